"""Signal handlers that raise. Each call raises the handler's exception or returns its result, and
no pool hangs. `bench/alarms.py` repeats this with a million alarms."""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import json
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support import scripts, work
from support.tiers import also

from xpool import P2PPool, Pool, PoolBroken, PoolClosed, TaskNotPicklable, ThreadPool
from xpool._python import interrupt
from xpool._python.interrupt import deliver, interruptible, pass_on, pending, shielded

pytestmark = pytest.mark.xpool_only

SIGNAL = signal.SIGUSR1


class Late(Exception):
    """The handler's default exception."""


@pytest.fixture
def handler(on_signal: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that installs a handler of `SIGNAL`. The handler raises."""

    def install(error: type[BaseException] = Late) -> Any:
        def ring(signum: int, frame: Any) -> None:
            raise error("the time is over")

        on_signal(ring)
        return ring

    return install


def strike() -> None:
    """Raise the signal in this thread."""
    signal.raise_signal(SIGNAL)


# -- alarms at random times -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Pool", "ThreadPool", *also("P2PPool")])
def test_alarms_at_random_times(kind):
    """Alarms at random times cause no other error. No thread or descriptor stays."""
    count = 2000 if kind == "ThreadPool" else 300
    out = scripts.run_ok(["-m", "bench.alarms", "--kind", kind, "--alarms", str(count)])
    found = json.loads(out)
    assert found["alarms"] >= count
    assert found["errors"] == {}
    assert found["more descriptors"] == []
    assert found["threads"] == 0


@pytest.mark.parametrize("name", ["callbacks", "callbacks-ends"])
def test_a_handler_raises_while_a_thread_starts(name, handler, monkeypatch, gate):
    """A thread of callbacks is started once.  `join` would wait for a second one."""
    handler()
    start, struck = threading.Thread.start, []

    def start_and_strike(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.endswith(name) and not struck:
            struck.append(thread)
            strike()

    monkeypatch.setattr(threading.Thread, "start", start_and_strike)
    called: list[int] = []
    pool = None
    while pool is None:
        with contextlib.suppress(Late):
            pool = Pool(1, name="struck", on_worker_end=lambda end: None)
    for n in range(2):
        with contextlib.suppress(Late):
            pool.apply_async(work.gated, (gate.path, n), callback=called.append)
    serving = [one.name for one in threading.enumerate() if one.name.startswith("struck-callbacks")]
    assert sorted(serving) == ["struck-callbacks", "struck-callbacks-ends"]
    gate.open(2)
    pool.close()
    pool.join()
    assert struck and called


def test_a_handler_raises_between_enter_and_the_block_of_a_with(handler):
    """``__exit__`` is called: Python 3.14 handles signals there, and would not call it."""
    handler()
    left: list[Any] = []

    class Entered:
        # The signal is due when this function of C returns.
        __enter__ = staticmethod(functools.partial(_thread.interrupt_main, SIGNAL))

        def __exit__(self, *error: object) -> None:
            left.append(error)

    @interruptible
    def enter() -> None:
        if pending:
            deliver()
        with Entered():
            len("")

    with pytest.raises(Late):
        shielded(lambda: enter())()
    assert len(left) == 1


class Due:
    """``-Due()`` makes the signal due.  Python handles it after its next call or jump."""

    __neg__ = staticmethod(functools.partial(_thread.interrupt_main, SIGNAL))


def test_a_handler_raises_between_an_error_and_its_finally(handler):
    """A `finally` and `__exit__` run: Python 3.10 handles signals before them."""
    handler()
    lock: Any = threading.RLock()
    due, left = Due(), list[str]()

    @interruptible
    def leave_with() -> None:
        if pending:
            deliver()
        with lock:
            _ = -due
            raise LookupError

    @interruptible
    def leave_finally() -> None:
        if pending:
            deliver()
        try:
            _ = -due
            raise LookupError
        finally:
            left.append("finally")

    @interruptible
    def leave_both() -> None:
        if pending:
            deliver()
        with lock:
            try:
                raise LookupError
            finally:
                _ = -due

    for call in leave_with, leave_finally, leave_both:
        with pytest.raises(Late):
            shielded(lambda call=call: call())()
        assert not lock._is_owned()
    assert left == ["finally"]


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
    """Ctrl-C in `asyncio.run` cancels its main task, as it does without a pool."""
    out = scripts.program(tmp_path, ASYNCIO)
    assert out.split() == ["cancelled", "interrupted", "2"]


@pytest.mark.parametrize("kind", [Pool, P2PPool, ThreadPool])
def test_the_programs_handlers_are_restored(kind, handler):
    """After each call, `signal.getsignal` returns the program's handlers."""
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
    """Raises the signal while it is pickled."""

    def __reduce__(self):
        strike()
        return int, ()


VERBS = ("apply", "apply_async", "map", "starmap", "run_all")


@pytest.mark.parametrize(
    ("verb", "error"),
    [
        *(("apply", error) for error in (Late, TimeoutError, TypeError, KeyboardInterrupt)),
        *((verb, pickle.PicklingError) for verb in VERBS),
    ],
)
def test_a_signal_while_a_task_is_pickled(verb, error, handler):
    """The verb raises the handler's exception, and the task never runs."""
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
    """Raises the signal once, when the three hundredth is unpickled in the caller's process."""

    left = 0

    def __init__(self, caller):
        self.caller = caller

    def __reduce__(self):
        return open_it, (self.caller,)


def open_it(caller):
    if os.getpid() == caller:
        Opened.left -= 1
        if Opened.left == 0:
            strike()
    return "opened"


def opened(caller):
    return Opened(caller)


@pytest.mark.parametrize("error", [Late, KeyboardInterrupt])
def test_a_signal_while_a_result_is_unpickled(handler, error):
    """`get` and `next` raise the handler's exception. The next call returns the result, also if
    results are received together."""
    handler(error)
    tasks = [os.getpid()] * 500
    with Pool(2) as pool:
        for n, result in ((1, pool.apply_async(opened, tasks[:1])),
                          (300, pool.map_async(opened, tasks))):  # fmt: skip
            Opened.left = n
            with pytest.raises(error):
                result.get()
            assert result.get() in ("opened", ["opened"] * 500)
        for verb in (pool.imap, pool.imap_unordered):
            Opened.left = 300
            results, got = verb(opened, tasks), []
            with pytest.raises(error):
                got.extend(results)
            assert Opened.left == 0 and got + list(results) == ["opened"] * 500


# -- shielded functions ------------------------------------------------------------------------


def test_a_handler_waits_for_the_end_of_a_shielded_function(handler):
    """If a signal arrives in a shielded function, its handler runs after the function."""
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
    """In an interruptible part of a shielded function, the handler runs at once. If the signal
    arrived earlier, the handler runs at the start of that part."""
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
    """The innermost function decides whether a handler may raise."""
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


def test_a_handler_installed_in_an_interruptible_part(handler):
    """A handler that the program installs in an interruptible part stays installed."""
    handler()
    other = handler(TimeoutError)
    handler()

    @interruptible
    def change() -> None:
        signal.signal(SIGNAL, other)

    shielded(lambda: change())()
    assert signal.getsignal(SIGNAL) is other


def test_two_signals_while_handlers_are_replaced(handler, monkeypatch):
    """If a handler raises before it is replaced, and once more before those that were replaced are
    restored, the next shielded function defers it all the same."""
    ring, at_interrupt, done = handler(), signal.getsignal(signal.SIGINT), []
    replace = interrupt._set_handler

    def too_late(signum: int, new: Any) -> Any:
        if signum == SIGNAL:
            raise Late
        return replace(signum, new)

    def raise_late(*args: Any) -> None:
        raise Late

    @shielded
    def keep_books() -> None:
        strike()
        done.append("whole")

    with monkeypatch.context() as patch:
        patch.setattr(interrupt, "_set_handler", too_late)
        patch.setattr(interrupt, "_lower", raise_late)
        with pytest.raises(Late):
            keep_books()
    assert signal.getsignal(signal.SIGINT) is at_interrupt
    with pytest.raises(Late):
        keep_books()
    assert done == ["whole"]
    assert signal.getsignal(SIGNAL) is ring
    assert signal.getsignal(signal.SIGINT) is at_interrupt


def test_other_threads_call_no_handler(handler):
    """Only the main thread runs a pending handler."""
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
@pytest.mark.parametrize("verb", ["apply", "get"])
def test_a_stack_overflow_in_the_engine_breaks_the_pool(verb):
    """After a stack overflow in the engine, a call is right or raises `PoolBroken`."""

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
        call: Callable[[], Any] = functools.partial(pool.apply, work.square, (3,))
        if verb == "get":
            call = pool.apply_async(work.square, (3,)).get
        try:
            assert at_depth(depth, call) == 9
        except (RecursionError, TaskNotPicklable):
            # The next call checks that the pool works, or is broken.
            pass
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
    # `get` overflows before it comes to the engine.
    assert broken or verb == "get"


C_HANDLER = """
    import ctypes, os, signal, sys
    import xpool

    if __name__ == "__main__":
        embedded = sys.argv[1] == "a program with Python inside"
        if embedded:
            sys.orig_argv = []
        system = ctypes.CDLL(None)

        def handle():
            # The C library calls _exit(SIGINT).
            system.signal(signal.SIGINT, ctypes.cast(system._exit, ctypes.c_void_p))

        if not embedded:
            handle()
        with xpool.Pool(1, context="fork") as pool:
            assert pool.apply(abs, (-1,)) == 1
            if embedded:
                handle()
                assert pool.apply(abs, (-1,)) == 1
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("it is Python's handler")
"""


@pytest.mark.parametrize("what", ["a program of Python", "a program with Python inside"])
def test_a_handler_of_c_code(tmp_path, what):
    """A pool leaves it in place, although Python believes that its own handler is set. uWSGI ends
    its processes by such a handler, and sets it after the import of the application."""
    done = scripts.run([scripts.write(tmp_path / "c_handler.py", C_HANDLER), what])
    assert (done.returncode, done.stderr) == (signal.SIGINT, "")


def test_a_caught_exception_keeps_no_frame():
    """What functions below hold is dropped when they return, without a garbage collection: the
    iterator of an `imap`, for example, whose end is noticed by that."""

    class Held:
        pass

    def catch():
        try:
            raise ValueError
        except ValueError as error:
            pass_on(error)

    def hold():
        held = Held()
        catch()
        return weakref.ref(held)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        assert hold()() is None
    finally:
        if was_enabled:
            gc.enable()
