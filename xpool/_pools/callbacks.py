"""Callbacks of a pool: called one after the other, in the order of completion.

A pool has two threads for them, each started by its first call.  One calls the callbacks of the
program, the other completes futures: so a callback can wait for a future of the same pool.

The engine's thread runs no callbacks, since they may block, raise, submit work and wait for it.  A
callback that is about to wait for a result of its pool hands its queue to a fresh thread first,
which can run the callback of that result.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from xpool._calls.results import local
from xpool._python.interrupt import shielded
from xpool._python.waiters import Flag

__all__ = ["Callbacks", "calling_back", "join_ended"]


@shielded
def join_ended(thread: threading.Thread) -> None:
    """Wait for a thread that has said that it ends.

    That is what is waited for where it may take long: `Thread.join`, cut short by a signal handler
    that raises, takes the thread for ended (bpo-45274).
    """
    thread.join()


class _Call(Protocol):
    """Something to be called: an `AsyncResult`, or a callback of a future."""

    def call_back(self) -> None:
        """Call it; it may raise."""

    def complete(self) -> None:
        """Called after it, whatever it has raised."""


class Callbacks:
    """The two threads of a pool."""

    def __init__(self, name: str) -> None:
        self._program = _Caller(f"{name}-callbacks", self)
        self._futures = _Caller(f"{name}-callbacks-futures", self)

    def add(self, call: _Call) -> None:
        """Have a callback of the program run."""
        self._program.add(call)

    def add_future(self, call: _Call) -> None:
        """Have a future completed."""
        self._futures.add(call)

    def expect_future(self) -> None:
        """Start the thread now: at the interpreter's end none can be started any more."""
        self._futures.start()

    def expect(self) -> None:
        """As `expect_future`, for a callback of the program."""
        self._program.start()

    def runs_here(self) -> bool:
        """Whether the calling thread is one of these."""
        return getattr(local, "caller", None) in (self._program, self._futures)

    def stop(self) -> None:
        """Let the threads end when they have called what is queued."""
        # What completes futures queues their callbacks.
        self._futures.stop(self._program.stop)

    def join(self, deadline: float | None = None) -> bool:
        """Wait for the threads to end; `stop` was called.  False: not before the deadline."""
        return self._futures.join(deadline) and self._program.join(deadline)


def calling_back() -> Callbacks | None:
    """Return the callbacks of the pool whose futures the calling thread completes, if it does."""
    caller: _Caller | None = getattr(local, "caller", None)
    if caller is None or caller is not caller.owner._futures:
        return None
    return caller.owner


class _Caller:
    """A queue of calls, and the thread that serves it."""

    def __init__(self, name: str, owner: Callbacks) -> None:
        self.owner = owner
        self._name = name
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Guards what follows.  Again by the thread that has it: a signal handler may submit.
        self._lock = threading.RLock()
        self._runner: threading.Thread | None = None
        self._threads: list[tuple[threading.Thread, Flag]] = []
        self._stopped = False
        self._last: Callable[[], None] | None = None

    def add(self, call: _Call) -> None:
        # Queued first: whichever thread serves then finds it.
        self._queue.put(call)
        with self._lock:
            self.start()
            if self._stopped:
                self._queue.put(None)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._runner is None:
                self._start()

    def _start(self) -> None:
        ended = Flag()
        thread = threading.Thread(target=self._run, args=(ended,), name=self._name, daemon=True)
        self._threads = [(t, e) for t, e in self._threads if t.is_alive()] + [(thread, ended)]
        # Noted before it starts: it looks whether it still is the one that serves.
        before, self._runner = self._runner, thread
        try:
            thread.start()
        except BaseException:
            self._threads.pop()
            self._runner = before
            raise

    def _relieve(self) -> None:
        with self._lock:
            # Once: a thread that was relieved already only has its callback to end.
            if self._runner is threading.current_thread():
                self._start()

    def _run(self, ended: Flag) -> None:
        local.blocking, local.caller = self._relieve, self
        try:
            while self._call_next():
                pass
        finally:
            ended.set()

    def _call_next(self) -> bool:
        """Call what comes next; return whether this thread goes on."""
        call = self._queue.get()
        if call is None:
            return not self._end()
        try:
            call.call_back()
        except BaseException:
            kind, exc, trace = sys.exc_info()
            assert kind is not None
            args = threading.ExceptHookArgs((kind, exc, trace, threading.current_thread()))
            threading.excepthook(args)
            # The traceback holds this frame, and these hold the traceback: a circle.
            del kind, exc, trace, args
        finally:
            call.complete()
        # Another serves if `_relieve` has put a fresh thread in the place of this one.
        return self._runner is threading.current_thread()

    def _end(self) -> bool:
        with self._lock:
            # Looked at under the lock: `add` queues first, and starts a thread then if this ends.
            if not self._queue.empty():
                return False
            self._runner = None
            last, self._last = self._last, None
        if last is not None:
            last()
        return True

    def stop(self, last: Callable[[], None] | None = None) -> None:
        """Let the thread end when it has called what is queued, and call ``last`` in the end."""
        with self._lock:
            self._stopped = True
            runs = self._runner is not None
            if runs:
                self._last = last
                self._queue.put(None)
        if not runs and last is not None:
            last()

    def join(self, deadline: float | None) -> bool:
        me = threading.current_thread()
        for thread, ended in self._threads:
            if thread is not me:
                if not ended.wait(None if deadline is None else deadline - time.monotonic()):
                    return False
                join_ended(thread)
        return True
