"""`imap` and `imap_unordered`: they draw the input lazily and yield results one by one."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import threading
import time
import weakref

import pytest
from support import scripts, work
from support.limits import WAIT
from support.waiting import eventually

import xpool
from xpool.errors import TaskNotPicklable

from .test_map import StopHere, failing


class StopsWhenPickled:
    """Raises StopIteration while it is pickled."""

    def __reduce__(self):
        raise StopIteration


class StopsAtOnce:
    """Raises StopIteration in `iter()`."""

    def __iter__(self):
        raise StopIteration


VERBS = ["imap", "imap_unordered"]


@pytest.mark.parametrize("chunksize", [1, 7, 1000])
def test_order(pool, chunksize):
    """`imap` yields results in the order of the input, `imap_unordered` every result once."""
    wanted = [i * i for i in range(200)]
    assert list(pool.imap(work.square, range(200), chunksize)) == wanted
    results = pool.imap_unordered(work.square, range(200), chunksize=chunksize)
    assert sorted(results) == wanted


def test_imap_unordered_does_not_wait_for_the_first(pool, gate):
    """`imap_unordered` yields a finished result before an earlier unfinished one."""
    items = [(gate.path, 0), (None, 1)]
    results = pool.imap_unordered(_wait_if_told, items)
    assert next(results) == 1
    gate.open()
    assert next(results) == 0


def _wait_if_told(item):
    gate, x = item
    if gate is not None:
        work.pass_gate(gate)
    return x


def test_next_with_timeout(pool, gate):
    """`next(timeout)` raises `multiprocessing.TimeoutError`. A later call returns the result."""
    results = pool.imap(work.gated, [gate.path])
    with pytest.raises(multiprocessing.TimeoutError):
        results.next(0.05)
    with pytest.raises(multiprocessing.TimeoutError):
        results.next(timeout=0)
    gate.open()
    assert results.next(timeout=WAIT) is None
    with pytest.raises(StopIteration):
        results.next(timeout=WAIT)


@pytest.mark.parametrize("verb", VERBS)
def test_error_of_a_task_in_a_chunk(pool, verb):
    """With larger chunks, the error of an item is raised in place of its chunk. The iteration goes
    on with the next chunk."""
    results, got = getattr(pool, verb)(work.fail_on_three, range(12), chunksize=4), []
    with pytest.raises(ValueError, match=r"^3\b"):
        for _ in range(12):
            got.append(next(results))
    if not type(pool).__module__.startswith("multiprocessing"):
        assert sorted([*got, *results]) == list(range(4, 12))


@pytest.mark.parametrize("verb", VERBS)
def test_iterable_that_raises_at_once(pool, verb):
    """If the iterable raises before its first item, the first `next` raises the error."""
    for _ in range(2):
        results = getattr(pool, verb)(work.square, failing(1, 0), 1)
        with pytest.raises(StopHere) as caught:
            next(results)
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(("chunksize", "whole"), [(1, 7), (2, 6), (4, 4)])
def test_iterable_that_raises_midway(pool, chunksize, whole):
    """The iterable's error is raised in place of the incomplete chunk, behind the results of the
    items before. Then the iteration stops."""
    results = pool.imap(work.square, failing(20, 7), chunksize)
    assert [next(results) for _ in range(whole)] == [i * i for i in range(whole)]
    with pytest.raises(StopHere):
        next(results)
    with pytest.raises(StopIteration):
        next(results)
    results, good = pool.imap_unordered(work.square, failing(20, 7), chunksize), []
    with pytest.raises(StopHere):
        for value in results:
            good.append(value)
    if not type(pool).__module__.startswith("multiprocessing"):
        assert sorted(good) == [i * i for i in range(whole)]
    assert len(set(good)) == len(good) and set(good) <= {i * i for i in range(7)}


def test_an_input_that_waits(pool):
    """While the iterable waits for its next item, results are yielded, and other tasks run."""
    dropped = pool.imap(work.square, range(1000))
    assert next(dropped) == 0
    del dropped  # the pool stays usable
    feed = threading.Event()

    def slow_input():
        yield 1
        feed.wait(WAIT)
        yield 2

    results = pool.imap(work.square, slow_input())
    try:
        assert results.next(timeout=WAIT) == 1
        # The standard library's task thread waits with the iterable.
        if not type(pool).__module__.startswith("multiprocessing"):
            assert pool.apply_async(work.square, (5,)).get(timeout=WAIT) == 25
    finally:
        feed.set()
    assert list(results) == [4]


@pytest.mark.xpool_only
def test_calls_overtake_an_endless_imap(process_kind, make_pool):
    """Calls and maps get results although an `imap` always has tasks waiting."""
    pool = make_pool(process_kind, 2)
    naps = pool.imap(time.sleep, itertools.repeat(0.002))
    assert next(naps) is None
    assert pool.apply_async(work.square, (5,)).get(timeout=WAIT) == 25
    assert pool.map(work.square, range(100), chunksize=1) == [x * x for x in range(100)]
    assert next(naps) is None


@pytest.mark.pure
@pytest.mark.parametrize("terms", [{}, {"timeout": WAIT}, {"chunksize": 2}])
def test_threads_run_a_call_before_items_drawn_ahead(terms):
    """A call waits for the running task only, not for the items that `imap` has drawn ahead."""
    begun, go = threading.Event(), threading.Semaphore(0)
    order = []

    def item(i):
        order.append(i)
        begun.set()
        assert go.acquire(timeout=WAIT)

    with xpool.ThreadPool(1) as pool:
        stream = pool.imap(item, range(40), **terms)
        assert begun.wait(WAIT)
        call = pool.apply_async(order.append, ("call",))
        mapped = pool.map_async(order.append, ["map"])
        for _ in range(40):
            go.release()
        call.get(WAIT)
        mapped.get(WAIT)
        assert list(stream) == [None] * 40
    chunk = terms.get("chunksize", 1)
    assert order == [*range(chunk), "call", "map", *range(chunk, 40)]


def test_the_input_may_use_the_pool(pool):
    """The iterable may itself be an `imap` of the same pool."""
    if type(pool).__module__.startswith("multiprocessing"):
        pytest.skip("the standard library deadlocks here")
    inner = pool.imap(work.square, range(20))
    assert list(pool.imap(work.square, inner)) == [i**4 for i in range(20)]


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("chunksize", [1, 4])
def test_buffersize_limits_the_items_drawn_ahead(pool, verb, chunksize):
    """With ``buffersize=n``, at most n items, not chunks, are drawn ahead of the yielded results.
    The argument follows `chunksize`, as in Python 3.16."""
    count = [0]

    def counting():
        for i in range(60):
            count[0] = i + 1
            yield i

    call = functools.partial(getattr(pool, verb), work.same)
    for make in (
        lambda: call(counting(), chunksize, buffersize=8),
        lambda: call(counting(), chunksize, 8),
    ):
        results = make()
        for taken in range(60):
            # The consumer takes whole chunks.
            assert count[0] <= taken + 8 + (chunksize - 1)
            next(results)
        assert count[0] == 60 and list(results) == []
        count[0] = 0


@pytest.mark.xpool_only
@pytest.mark.parametrize("end", ["consume", "cancel", "drop"])
@pytest.mark.parametrize("verb", VERBS)
def test_join_waits_for_the_consumer_of_a_buffersize(kind, make_pool, verb, end):
    """`join` returns when all results are taken, or when the iterator is cancelled or dropped."""
    pool = make_pool(kind, 2)
    results = getattr(pool, verb)(work.same, range(200), buffersize=2)
    got = [next(results)]
    pool.close()
    if end == "consume":
        consumer = threading.Thread(target=got.extend, args=[results])
        consumer.start()
        pool.join()
        consumer.join()
        assert sorted(got) == list(range(200))
        return
    if end == "cancel":
        results.cancel()
    del results
    pool.join()


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", VERBS)
def test_cancel_while_an_item_is_drawn(process_kind, make_pool, gate, mailbox, verb):
    """Nothing of the stream waits after the item has come."""
    pool, wanted, come = make_pool(process_kind, 1), threading.Event(), threading.Event()

    def items():
        yield from range(4)
        wanted.set()
        come.wait()
        yield 4

    # The worker is busy, so the items before it wait.
    call = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, 0))
    mailbox.line()
    results = getattr(pool, verb)(work.same, items())
    wanted.wait()
    results.cancel()
    come.set()
    eventually(lambda: not pool._jobs.input_readers, "the input was drawn")
    # Later, because a host says what it runs a moment after it has begun.
    eventually(lambda: pool.statistics()["waiting"] == 0, "nothing waits")
    gate.open(1)
    assert call.get(WAIT) == 0


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", VERBS)
def test_endless_input(kind, make_pool, verb):
    """With a buffersize, the input may be endless. `terminate` ends the remaining tasks."""
    pool = make_pool(kind, 2)
    results = getattr(pool, verb)(work.same, itertools.count(), buffersize=4)
    assert len({next(results) for _ in range(50)}) == 50


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind_of_input", [range, list])
def test_a_buffersize_between_two_chunks(pool, verb, kind_of_input):
    """Of a known input, the caller's thread draws the first items, and never waits for room."""
    inputs = range(20) if kind_of_input is range else [*range(19), 19.0]
    for size in 1, 4:
        got = getattr(pool, verb)(work.square, inputs, chunksize=3, buffersize=size)
        assert sorted(got) == [n * n for n in range(20)]


@pytest.mark.xpool_only
def test_buffersize_with_an_iterable_that_raises(pool):
    """With a buffersize, the iterable's error is raised after all earlier results."""
    results = pool.imap(work.square, failing(10, 5), buffersize=2)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(StopHere):
        next(results)


@pytest.mark.xpool_only
@pytest.mark.parametrize("chunksize", [1, 4, 100])
@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_stop_iteration_of_a_task(pool, verb, chunksize):
    """A task that raises StopIteration causes RuntimeError, as in a generator. The loop does not
    end."""
    results = getattr(pool, verb)(work.stop_on_three, range(100), chunksize)
    got = []
    with pytest.raises(RuntimeError, match="stop_on_three.*StopIteration") as caught:
        for value in results:
            got.append(value)
        pytest.fail(f"the loop ended after {len(got)} of 100 results")
    assert isinstance(caught.value.__cause__, StopIteration) and caught.value.__cause__.value == 3
    left = list(results)
    assert sorted(got + left) == [i for i in range(100) if i // chunksize != 3 // chunksize]


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_stop_iteration_of_an_item_being_pickled(process_kind, make_pool, verb):
    """If pickling an item raises StopIteration, the loop raises an error. It does not end early."""
    pool = make_pool(process_kind, 1)
    with pytest.raises((RuntimeError, TaskNotPicklable)):
        list(getattr(pool, verb)(work.same, [StopsWhenPickled()]))
        pytest.fail("the loop ended without an error")


@pytest.mark.xpool_only
def test_stop_iteration_of_the_input(pool):
    """If ``iter()`` of the input raises StopIteration, the loop raises an error."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(pool.imap(work.same, StopsAtOnce()))
        pytest.fail("the loop ended without an error")


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", VERBS)
def test_short_input_needs_no_thread(pool, verb, monkeypatch):
    """The caller draws a short list, tuple or range. A thread draws a longer one or a generator."""
    started: list[str] = []
    start = threading.Thread.start

    def noted(thread):
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    for items in (range(8), [1, 2, 3], (4, 5), []):
        assert sorted(getattr(pool, verb)(work.square, items)) == [i * i for i in items]
    assert not [name for name in started if "input_reader" in name]
    for many in (range(2000), (i for i in range(8))):
        assert len(list(getattr(pool, verb)(work.same, many, buffersize=700))) in (8, 2000)
        assert "input_reader" in started.pop()


@pytest.mark.parametrize("verb", VERBS)
def test_items_of_many_kinds_in_one_list(pool, verb):
    """Items of other types that follow many numbers arrive unchanged and in order."""
    items = [*range(600), "a text", (1, 2), None, 2.5, bytes(300_000), *range(600), "x" * 70_000]
    results = list(getattr(pool, verb)(work.same, items))
    assert sorted(map(repr, results)) == sorted(map(repr, items))
    assert verb == "imap_unordered" or results == items


@pytest.mark.xpool_only
@pytest.mark.parametrize("after", [0, 10, 300])
def test_unpicklable_item_after_numbers(process_kind, make_pool, after):
    """An item that cannot be pickled fails alone, wherever it is among numbers."""
    pool = make_pool(process_kind, 2)
    results = pool.imap(work.same, [*range(after), threading.Lock(), *range(after)])
    assert [results.next() for _ in range(after)] == list(range(after))
    with pytest.raises(TaskNotPicklable):
        results.next()
    assert list(results) == list(range(after))


@pytest.mark.xpool_only
def test_large_items_with_a_buffersize(pool):
    """With a buffersize of 2, a short list of large items yields all results."""
    items = [bytes(300_000)] * 20
    assert [len(x) for x in pool.imap(work.same, items, buffersize=2)] == [300_000] * 20


def test_threads_take_from_one_input_together(make_pool):
    """All threads of a pool run tasks of the same call, and each task runs once."""
    from xpool import ThreadPool

    together = threading.Barrier(3)
    pool = make_pool(ThreadPool, 3)
    for verb in (pool.map, pool.imap):
        assert sorted(verb(lambda _: together.wait(WAIT), range(3), 1)) == [0, 1, 2]
    seen: list[int] = []
    assert list(pool.imap_unordered(seen.append, range(3000))) == [None] * 3000
    assert sorted(seen) == list(range(3000))


class Items(list):
    """Items that can be referred to weakly."""


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("options", [{}, {"chunksize": 3}, {"buffersize": 2}])
def test_the_input_is_freed_at_once(pool, verb, options):
    """When all results are taken, nothing keeps the input until a garbage collection."""
    freed = weakref.ref(items := Items(range(10)))
    gc.collect()
    gc.disable()
    try:
        assert len(list(getattr(pool, verb)(work.square, items, **options))) == 10
        del items
        eventually(lambda: freed() is None, "its threads have let it go")
    finally:
        gc.enable()


UNFINISHED = """
import time
import xpool

def slow(x):
    time.sleep(0.01)
    return x

if __name__ == "__main__":
    with xpool.Pool(2) as pool:
        results = pool.imap(slow, iter(range(100_000)))
        assert next(results) == 0
        pool.terminate()
"""


@pytest.mark.xpool_only
def test_a_program_ends_with_an_iterator(tmp_path):
    """A global iterator whose pool has ended prints nothing when Python ends."""
    assert scripts.program(tmp_path, UNFINISHED) == ""


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", VERBS)
def test_a_loop_that_notes_errors_ends_after_its_pool(kind, make_pool, verb):
    """Each thread gets the error of the whole job, but such a loop does not go on for ever."""
    pool = make_pool(kind, 2)
    results = getattr(pool, verb)(work.square, iter(int, 1), buffersize=1)
    assert next(results) == 0
    pool.terminate()
    errors = []
    while True:
        try:
            next(results)
        except StopIteration:
            break
        except xpool.PoolClosed as error:
            errors.append(error)
    assert len(errors) == 1000
    assert list(results) == []
