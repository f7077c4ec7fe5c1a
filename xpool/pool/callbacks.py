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
from typing import Any

from xpool.interrupt import shielded
from xpool.results import AsyncResult, local
from xpool.waiters import Flag

__all__ = ["Callbacks", "see_off"]


@shielded
def see_off(thread: threading.Thread) -> None:
    """Wait for a thread that has said that it ends.

    That is what is waited for where it may take long: `Thread.join`, cut short by a signal handler
    that raises, takes the thread for ended (bpo-45274).
    """
    thread.join()


class Callbacks:
    """The thread that calls back; started with the first callback."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[AsyncResult[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._runner: threading.Thread | None = None
        self._threads: list[tuple[threading.Thread, Flag]] = []

    def add(self, job: AsyncResult[Any]) -> None:
        """Have the callback of a settled job run; the job is completed after it."""
        # Queued first: whichever thread serves then finds it.
        self._queue.put(job)
        with self._lock:
            if self._runner is None:
                self._start()

    def _start(self) -> None:
        ended = Flag()
        thread = threading.Thread(
            target=self._run, args=(ended,), name=f"{self._name}-callbacks", daemon=True
        )
        # Noted before it starts: it looks whether it still is the one that serves.
        self._runner = thread
        self._threads = [(t, e) for t, e in self._threads if t.is_alive()] + [(thread, ended)]
        thread.start()

    def _relieve(self) -> None:
        with self._lock:
            # Once: a thread that was relieved already only has its callback to end.
            if self._runner is threading.current_thread():
                self._start()

    def runs_here(self) -> bool:
        """Whether the calling thread is running a callback of this pool."""
        me = threading.current_thread()
        return any(thread is me for thread, _ in self._threads)

    def _run(self, ended: Flag) -> None:
        try:
            self._serve()
        finally:
            ended.set()

    def _serve(self) -> None:
        local.blocking = self._relieve
        me = threading.current_thread()
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
                # The traceback holds this frame, and these hold the traceback: a circle.
                del kind, exc, trace, args
            finally:
                job.complete()
                # Else its result would live until the next callback.
                del job
            # `_relieve` has put a fresh thread in its place while it waited.
            if self._runner is not me:
                return

    def stop(self) -> None:
        """Let the thread end when it has run what is queued."""
        self._queue.put(None)

    def join(self, deadline: float | None = None) -> bool:
        """Wait for the threads to end; `stop` was called.  False: not before the deadline."""
        me = threading.current_thread()
        for thread, ended in self._threads:
            if thread is not me:
                if not ended.wait(None if deadline is None else deadline - time.monotonic()):
                    return False
                see_off(thread)
        return True
