"""Signal handlers that raise: each call has the handler's exception or its result, and no pool
hangs or loses anything.  `bench/alarms.py` is the same by the million."""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import scripts, work
from support.tiers import also

from xpool import P2PPool, Pool, PoolBroken, PoolClosed, TaskNotPicklable, ThreadPool
from xpool._python.interrupt import deliver, interruptible, pending, shielded

pytestmark = pytest.mark.xpool_only

SIGNAL = signal.SIGUSR1


class Late(Exception):
    """What the handler raises, where a test names nothing else."""


@pytest.fixture
def handler() -> Iterator[Callable[[type[Exception]], Any]]:
    """Installs a handler of `SIGNAL` that raises."""
    before = signal.getsignal(SIGNAL)

    def install(error: type[Exception] = Late) -> Any:
        def ring(signum: int, frame: Any) -> None:
            raise error("the time is over")

        signal.signal(SIGNAL, ring)
        return ring

    yield install
    signal.signal(SIGNAL, before)


def strike() -> None:
    """Have the handler called here, if it may be."""
    signal.raise_signal(SIGNAL)


# -- a program under alarms --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool", *also("P2PPool")])
def test_alarms_at_random_instants(kind):
    """Under alarms at any instant every verb ends as it should, and nothing is left afterwards."""
    count = 2000 if kind == "ThreadPool" else 300
    out = scripts.run_ok(["-m", "bench.alarms", "--kind", kind, "--alarms", str(count)])
    found = json.loads(out)
    assert found["alarms"] >= count
    assert found["errors"] == {}
    assert found["more descriptors"] == []
    assert found["threads"] == 0


ASYNCIO = """
import asyncio, os, signal
from xpool import Pool

async def main():
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        print("cancelled")
        raise

if __name__ == "__main__":
    with Pool(1) as pool:
        pool.apply(abs, (-1,))
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", pool.apply(abs, (-2,)))
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.run does so from Python 3.11 on")
def test_ctrl_c_cancels_the_main_task(tmp_path):
    """With a pool, as without, Ctrl-C in `asyncio.run` cancels its main task."""
    out = scripts.run_ok([scripts.write(tmp_path / "program.py", ASYNCIO)])
    assert out.split() == ["cancelled", "interrupted", "2"]


@pytest.mark.parametrize("kind", [Pool, P2PPool, ThreadPool])
def test_handlers_are_in_their_places(kind, handler):
    """Between calls, `signal.getsignal` tells of no handler but the program's."""
    ring = handler()

    def look() -> None:
        assert signal.getsignal(SIGNAL) is ring
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    pool = kind(1)
    look()
    assert pool.apply(work.square, (3,)) == 9
    look()
    assert pool.map(work.square, range(3)) == [0, 1, 4]
    look()
    it = pool.imap(work.square, range(3))
    look()
    assert list(it) == [0, 1, 4]
    look()
    pool.apply_async(work.square, (3,)).cancel()
    look()
    pool.close()
    look()
    pool.join()
    look()


# -- pickling and unpickling -------------------------------------------------------------------


class Struck:
    """A signal comes while it is pickled."""

    def __reduce__(self):
        strike()
        return int, ()


@pytest.mark.parametrize("error", [Late, TimeoutError, TypeError, pickle.PicklingError])
@pytest.mark.parametrize("verb", ["apply", "apply_async", "map", "starmap", "run_all"])
def test_a_signal_while_a_task_is_pickled(verb, error, handler):
    """The handler's exception comes out of the verb as it is, and the task is never run."""
    handler(error)
    calls: dict[str, Callable[[Any], Any]] = {
        "apply": lambda pool: pool.apply(work.same, (Struck(),)),
        "apply_async": lambda pool: pool.apply_async(work.same, (Struck(),)),
        "map": lambda pool: pool.map(work.same, [1, Struck()], 1),
        "starmap": lambda pool: pool.starmap(work.same, [(Struck(),)]),
        "run_all": lambda pool: pool.run_all(work.same, Struck()),
    }
    with Pool(1) as pool:
        with pytest.raises(error, match="the time is over") as caught:
            calls[verb](pool)
        assert type(caught.value) is error
        assert pool.map(work.square, range(5)) == [0, 1, 4, 9, 16]
        assert pool.statistics()["jobs"] == 0
        pool.close()
        pool.join()


class Opened:
    """A signal comes while it is unpickled in the caller's process, the first time."""

    struck = False

    def __init__(self, caller):
        self.caller = caller

    def __reduce__(self):
        return open_it, (self.caller,)


def open_it(caller):
    if os.getpid() == caller and not Opened.struck:
        Opened.struck = True
        strike()
    return "opened"


def opened(caller):
    return Opened(caller)


def test_a_signal_while_a_result_is_unpickled(handler):
    """`get` and `next` raise the handler's exception, and have the result when asked again."""
    handler()
    me = os.getpid()
    with Pool(1) as pool:
        for result in (pool.apply_async(opened, (me,)), pool.map_async(opened, [me])):
            Opened.struck = False
            with pytest.raises(Late):
                result.get()
            assert result.get() in ("opened", ["opened"])
        for verb in (pool.imap, pool.imap_unordered):
            Opened.struck = False
            results = verb(opened, [me, me])
            with pytest.raises(Late):
                next(results)
            assert list(results) == ["opened", "opened"]


# -- books -------------------------------------------------------------------------------------


def test_a_handler_waits_for_the_end_of_a_shielded_function(handler):
    """A handler that comes into a shielded function is called when that is done."""
    handler()
    done = []

    @shielded
    def keep_books() -> None:
        strike()
        strike()
        done.append("whole")

    with pytest.raises(Late):
        keep_books()
    assert done == ["whole"]
    assert pending == []


def test_a_handler_is_called_where_it_may_raise(handler):
    """In an interruptible part of a shielded function it is called at once, or when that begins."""
    handler()
    done = []

    @interruptible
    def wait(before: bool) -> None:
        if pending:
            deliver()
        if not before:
            strike()
        done.append("waited")

    @shielded
    def keep_books(before: bool) -> None:
        if before:
            strike()
        try:
            wait(before)
        finally:
            strike()
            done.append("tidied")

    for before in (True, False):
        with pytest.raises(Late):
            keep_books(before)
    assert done == ["tidied", "tidied"]


def test_a_shielded_function_within_an_interruptible_one(handler):
    """The innermost of the two says whether a handler may raise."""
    handler()
    done = []

    @shielded
    def inner() -> None:
        strike()
        done.append("inner")

    @interruptible
    def wait() -> None:
        inner()
        strike()
        done.append("never")

    @shielded
    def outer() -> None:
        wait()

    with pytest.raises(Late):
        outer()
    assert done == ["inner"]


def test_a_handler_that_is_put_in_place_meanwhile_stays(handler):
    """What the program does with handlers in an interruptible part is left as it is."""
    handler()
    other = handler(TimeoutError)
    handler()

    @interruptible
    def change() -> None:
        signal.signal(SIGNAL, other)

    shielded(lambda: change())()
    assert signal.getsignal(SIGNAL) is other


def test_other_threads_call_no_handler(handler):
    """What waits for the main thread is not raised in another one that comes to such a place."""
    handler()
    errors: list[BaseException] = []

    @interruptible
    def elsewhere() -> None:
        try:
            deliver()
        except BaseException as exc:
            errors.append(exc)

    @shielded
    def keep_books() -> None:
        strike()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with pytest.raises(Late):
        keep_books()
    assert errors == []


@pytest.mark.exhaustive
def test_an_exception_in_the_midst_of_the_books_breaks_the_pool():
    """Where the stack ends in the engine, what comes after is the right answer or `PoolBroken`."""

    def at_depth(n: int, call: Callable[[], Any]) -> Any:
        return call() if n <= 0 else at_depth(n - 1, call)

    room = 0
    frame = sys._getframe()
    while frame is not None:
        room, frame = room + 1, frame.f_back  # type: ignore[assignment]
    broken = 0
    for left in range(4, 60, 2):
        pool = Pool(1)
        depth = sys.getrecursionlimit() - room - left
        try:
            assert at_depth(depth, functools.partial(pool.apply, work.square, (3,))) == 9
        except (RecursionError, TaskNotPicklable):
            pass  # the caller has it; the pool must be whole, or say that it is not
        try:
            assert pool.apply_async(work.square, (4,)).get() == 16
        except (PoolClosed, PoolBroken) as error:
            reason = error if isinstance(error, PoolBroken) else error.__cause__
            assert isinstance(reason, PoolBroken)
            assert "RecursionError" in str(reason)
            broken += 1
        else:
            pool.close()
        pool.join()
    assert broken
