"""The results of the asynchronous verbs."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import work
from support.kinds import STDLIB
from support.limits import WAIT
from support.waiting import eventually


@pytest.mark.parametrize("verb", ["apply_async", "map_async", "starmap_async"])
def test_before_and_after_the_result(pool, gate, verb):
    """While the task runs, `ready` is false, `successful` and `get(timeout)` raise, and
    `wait(timeout)` returns after the timeout. Each later `get` returns the same object."""
    arguments = (gate.path, "late") if verb == "apply_async" else [(gate.path, "late")]
    func = work.gated if verb != "map_async" else _gated_in_tuple
    result = getattr(pool, verb)(func, arguments)
    assert not result.ready()
    with pytest.raises(ValueError):
        result.successful()
    for get in (result.get, lambda timeout: result.get(timeout=timeout)):
        for timeout in 0, 0.05:
            with pytest.raises(multiprocessing.TimeoutError):
                get(timeout)
    begin = time.monotonic()
    result.wait(0.1)
    assert 0.09 <= time.monotonic() - begin < 5 and not result.ready()
    gate.open()
    result.wait(WAIT)
    assert result.ready() and result.successful() is True
    assert result.get(timeout=WAIT) is result.get(timeout=0) is result.get()
    assert result.get() == ("late" if verb == "apply_async" else ["late"])


def _gated_in_tuple(item):
    return work.gated(*item)


def test_after_an_error(pool):
    """`successful` is false if the task raised, and every `get` raises. `wait` does not."""
    result = pool.apply_async(work.fail, ("again",))
    result.wait()
    assert result.successful() is False
    for _ in range(2):
        with pytest.raises(KeyError, match="again"):
            result.get()


def test_get_of_a_map_with_timeout(pool, gate):
    """While a map is incomplete, `get(timeout)` raises TimeoutError."""
    result = pool.starmap_async(work.gated, [(gate.path, i) for i in range(3)], 1)
    gate.open()
    with pytest.raises(multiprocessing.TimeoutError):
        result.get(timeout=0.05)
    gate.open(2)
    assert result.get() == [0, 1, 2]


def test_get_from_many_threads(pool, gate):
    """All threads that wait for a result get it."""
    result = pool.apply_async(work.gated, (gate.path, "shared"))
    with ThreadPoolExecutor(5) as threads:
        got = [threads.submit(result.get) for _ in range(5)]
        gate.open()
    assert [one.result() for one in got] == ["shared"] * 5


@pytest.mark.skipif(STDLIB, reason="xpool's own classes")
def test_classes_of_the_results(pool):
    """The verbs return the public classes."""
    import xpool

    assert isinstance(pool.apply_async(work.nothing), xpool.AsyncResult)
    assert isinstance(pool.map_async(work.nothing, [1]), xpool.MapResult)
    assert isinstance(pool.starmap_async(work.nothing, [(1,)]), xpool.MapResult)
    ordered, unordered = pool.imap(work.nothing, [1]), pool.imap_unordered(work.nothing, [1])
    assert isinstance(ordered, xpool.IMapIterator)
    assert isinstance(unordered, xpool.IMapUnorderedIterator)
    assert list(ordered) == list(unordered) == [None]


@pytest.mark.xpool_only
@pytest.mark.parametrize("caught", [TimeoutError, multiprocessing.TimeoutError])
def test_timeout_errors_are_pythons_too(pool, gate, mailbox, caught):
    """The errors of `get(timeout=)` and of a task's limit are both TimeoutErrors."""
    from xpool.errors import TaskTimeout

    result = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, 1))
    said = r"no result after 0\.01 s(?s:.*)print\(pool\.stacks\(\)\)"
    with pytest.raises(caught, match=said):
        result.get(timeout=0.01)
    gate.open()
    result.get()
    assert issubclass(TaskTimeout, caught)


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", ["apply_async", "map_async", "submit"])
def test_a_failed_result_is_in_no_cycle(pool, verb):
    """After `get` has raised, the result is freed without the garbage collector."""
    args = {"apply_async": (((),),), "map_async": ([()],), "submit": ((),)}[verb]
    result = getattr(pool, verb)(work.fail, *args)
    reference = weakref.ref(result)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(KeyError, TypeError):
            (result.result if verb == "submit" else result.get)(WAIT)
        del result
        eventually(lambda: reference() is None, "it is freed")
    finally:
        gc.enable()
