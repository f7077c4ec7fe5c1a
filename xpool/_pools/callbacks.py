"""Runs the callbacks of a pool one after the other, in the order of completion.

A pool has two threads for them, each started at its first call.  One calls the callbacks of the
program, and the other completes futures, so a callback can wait for a future of the same pool.
Callers of `Future.result` complete some themselves, and threads of a `ThreadPool` those of their
tasks.  A pool with ``on_worker_end=`` has a third thread, so a slow callback delays no replacement
of a worker.

The engine's thread runs no callbacks, since they may block, raise, or submit work and wait for it.
Before a callback waits for a result of its pool, it passes its queue to a new thread, which can run
the callback of that result.  If the callback is an ``on_worker_end=``, its worker is replaced
meanwhile, since the result may need that worker.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from xpool._calls.results import Job, local
from xpool._python.interrupt import shielded
from xpool._python.starting import PromptThread, print_error
from xpool._python.waiters import Flag

if TYPE_CHECKING:
    from xpool._engine.ledger import WorkerEnd


@shielded
def join_ended(thread: threading.Thread) -> None:
    """Wait for a thread that has set its flag, and so ends in a moment.

    For a longer wait, wait for the flag: if a signal handler raises in `Thread.join`, Python then
    treats the thread as ended (bpo-45274).
    """
    thread.join()


class _Call(Protocol):
    """An `AsyncResult` with callbacks, or a callback of a future."""

    def call_back(self) -> None:
        """Call the callback; it may raise."""

    def complete(self) -> None:
        """Do what follows the callback, even if it has raised."""


class Callbacks:
    """The callback threads of a pool."""

    def __init__(self, name: str) -> None:
        self.program = _Caller(f"{name}-callbacks")
        """Calls the callbacks of the program."""
        self.futures = _Caller(f"{name}-callbacks-futures")
        """Completes futures."""
        self.ends = _Caller(f"{name}-callbacks-ends")
        """Calls ``on_worker_end=``."""

    def of(self, job: Job) -> _Caller:
        """Return the thread that calls the callback of a job."""
        return self.futures if job.is_future else self.program

    def runs_here(self) -> bool:
        """Whether the calling thread is one of these callback threads."""
        return local.caller in (self.program, self.futures, self.ends)

    def handles_end(self) -> bool:
        """Whether this thread is in an ``on_worker_end=``, for which the pool's end waits."""
        return local.caller is self.ends

    def for_ends(
        self, hook: Callable[[WorkerEnd], object], contexts: Sequence[Any]
    ) -> Callable[[WorkerEnd, Callable[[], None]], None]:
        """Return the `EngineOptions.on_end` that has ``hook`` called; start its thread."""
        self.ends.start()  # the interpreter starts no thread at its exit

        def on_end(end: WorkerEnd, told: Callable[[], None]) -> None:
            # Workers that `resize` has added have no context.
            if end.worker < len(contexts):
                end = end._replace(context=contexts[end.worker])
            self.ends.add(_End(hook, end, told))

        return on_end

    def forget(self) -> None:
        """In a forked child: the thread that has forked it ends after its call."""
        for one in (self.program, self.futures, self.ends):
            one.forget()

    def stop(self) -> None:
        """Let the threads end after the queued calls."""
        # Futures first: completing them queues their callbacks.
        self.futures.stop(self.program.stop)
        self.ends.stop()

    def join(self, deadline: float | None = None) -> bool:
        """Wait for the threads to end, after `stop`; return False at the deadline."""
        return all(one.join(deadline) for one in (self.futures, self.program, self.ends))


class _End:
    """A call of ``on_worker_end=``."""

    def __init__(
        self, hook: Callable[[WorkerEnd], object], end: WorkerEnd, told: Callable[[], None]
    ) -> None:
        self._hook, self._end, self._told = hook, end, [told]

    def call_back(self) -> None:
        relieve = local.blocking

        def blocking() -> None:
            self.complete()
            relieve()

        local.blocking = blocking
        try:
            self._hook(self._end)
        finally:
            local.blocking = relieve

    def complete(self) -> None:
        # Only once: later, the place may wait for the call of the next end.
        while self._told:
            self._told.pop()()


class _Caller:
    """A queue of calls, and the thread that serves it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Guards the fields below.  Reentrant, since a signal handler may submit.
        self._lock = threading.RLock()
        self._runner: threading.Thread | None = None
        self._threads: list[tuple[threading.Thread, Flag]] = []
        self._stopped = False
        self._last: Callable[[], None] | None = None

    def add(self, call: _Call) -> None:
        # Queue the call first, so that the serving thread finds it, whichever thread serves.
        self.put(call)
        self.serve()

    def put(self, call: _Call) -> None:
        """Queue a call for `serve`.  Takes no lock."""
        self._queue.put(call)

    def serve(self) -> None:
        """Have the queued calls made: start the thread if it has ended."""
        with self._lock:
            self.start()
            if self._stopped:
                self._queue.put(None)

    def start(self) -> None:
        """Start the thread unless it runs.

        Called before it is needed, since the interpreter starts no threads at its exit.
        """
        if self._runner is None:
            self._start_first()

    @shielded  # a handler could raise when the thread runs, and a second one would be started
    def _start_first(self) -> None:
        with self._lock:
            if self._runner is None:
                self._start()

    def _start(self) -> None:
        ended = Flag()
        thread = PromptThread(target=self._run, args=(ended,), name=self._name, daemon=True)
        self._threads = [(t, e) for t, e in self._threads if t.is_alive()] + [(thread, ended)]
        # Set before the start: the thread checks whether it is the serving one.
        before, self._runner = self._runner, thread
        try:
            thread.start()
        except BaseException:
            self._threads.pop()
            self._runner = before
            raise

    def _relieve(self) -> None:
        with self._lock:
            # Only once: a thread that was replaced finishes its callback and ends.
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
        """Make the next call; return whether this thread continues."""
        call = self._queue.get()
        if call is None:
            return not self._end()
        try:
            call.call_back()
        except BaseException:
            try:
                print_error()
            except BaseException:  # as in a thread that ends: this one must go on
                sys.excepthook(*sys.exc_info())
        finally:
            call.complete()
        # False if `_relieve` has replaced this thread by a new one.
        return self._runner is threading.current_thread()

    def _end(self) -> bool:
        with self._lock:
            # Check under the lock: `add` queues first, and then starts a thread if this one ended.
            if not self._queue.empty():
                return False
            self._runner = None
            last, self._last = self._last, None
        if last is not None:
            last()
        return True

    def forget(self) -> None:
        self._lock = threading.RLock()  # some thread of the parent may have held it
        self._runner = None

    def stop(self, last: Callable[[], None] | None = None) -> None:
        """Let the thread end after the queued calls, and call ``last`` then."""
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
