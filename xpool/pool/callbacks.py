"""Callbacks run in a thread of their own, one after the other, in the order of completion.

Not in the engine's thread: a callback may take its time, raise, submit more work and wait for it.
A callback that is about to wait for a result hands the queue to a fresh thread first, so that the
callback of what it waits for can run.
"""

from __future__ import annotations

import queue
import sys
import threading
import time

from xpool.results import AsyncResult, local
from xpool.waiters import LOST_SIGNAL

__all__ = ["Callbacks", "join_thread"]


def join_thread(thread: threading.Thread, deadline: float | None = None) -> bool:
    """Wait for a thread to end, open to Ctrl-C at any moment; False: not before the deadline."""
    while thread.is_alive():
        left = LOST_SIGNAL if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return False
        thread.join(min(left, LOST_SIGNAL))
    return True


class Callbacks:
    """The thread that calls back; started with the first callback."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[AsyncResult | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._runner: threading.Thread | None = None
        self._threads: list[threading.Thread] = []

    def add(self, job: AsyncResult) -> None:
        """Have the callback of a settled job run; the job is completed after it."""
        self._queue.put(job)
        with self._lock:
            if self._runner is None:
                self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-callbacks", daemon=True)
        self._runner = thread
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _relieve(self) -> None:
        with self._lock:
            if self._runner is threading.current_thread():
                self._start()

    def runs_here(self) -> bool:
        """Whether the calling thread is running a callback of this pool."""
        return threading.current_thread() in self._threads

    def _run(self) -> None:
        local.blocking = self._relieve
        while True:
            job = self._queue.get()
            if job is None:
                return
            try:
                job.call_back()
            except BaseException:
                kind, exc, trace = sys.exc_info()
                assert kind is not None
                args = threading.ExceptHookArgs((kind, exc, trace, threading.current_thread()))
                threading.excepthook(args)
                del kind, exc, trace, args
            finally:
                job.complete()
                del job
            if self._runner is not threading.current_thread():
                return

    def stop(self) -> None:
        """Let the thread end when it has run what is queued."""
        self._queue.put(None)

    def join(self, deadline: float | None = None) -> bool:
        """Wait for the threads to end; `stop` was called.  False: not before the deadline."""
        me = threading.current_thread()
        return all(join_thread(t, deadline) for t in self._threads if t is not me)
