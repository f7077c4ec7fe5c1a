"""Several workers in one process, each a thread with a channel of its own.

This is for devices that one process has to open, such as the two cores of a chip of TPU v2 and v3.
The main thread runs no tasks.  It starts the workers one after the other, so the code that opens
devices and the initializers need no lock.  Then it waits for their ends.

**They start together.**  A worker reports that it is ready only when all are.  So if an initializer
fails, no task is lost.  **They end together**, since a process that has lost one of its threads is
in an unknown state.  A worker that is told to stop waits for the others.  If one ends in another
way, such as `sys.exit` in a task, the process ends at once.

**Stopping a task.**  A signal handler runs in the main thread and cannot raise in another thread.
`PyThreadState_SetAsyncExc` can: `TaskStopped` is raised when that thread next runs Python code,
which may be after the task.  So a thread that leaves a task first says so, and then withdraws an
exception that has not been raised yet.  A task that waits in C code, such as a sleep, does not get
the exception; it is killed a moment later, with its process.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from xpool._python import worker_local
from xpool._python.interrupt import send_again
from xpool._python.starting import PromptThread
from xpool._wire.outbox import STACK_AT, STOP_SIGNAL, Outbox
from xpool._worker.callables import item_of
from xpool._worker.loop import become
from xpool._worker.loop import run as serve
from xpool._worker.stopping import SIGNALS, may_stop, report_of
from xpool.errors import TaskStopped


class _Withdrawn(BaseException):
    """Takes the place of the exception that is withdrawn."""


def raise_in_thread(ident: int | None, what: type[BaseException]) -> None:
    """Raise ``what`` in a thread when it next runs Python code, instead of a pending exception."""
    # The thread id is an unsigned long (Python/pystate.c).
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(what))


def withdraw() -> None:
    """Withdraw the exception that is pending in the calling thread, if there is one.

    NULL would withdraw it too, but leaves a flag set that only the raising of an exception clears.
    With this flag, CPython 3.11 never ends the first call that is profiled or traced.
    """
    try:
        raise_in_thread(threading.get_ident(), _Withdrawn)
        while True:
            continue
    except _Withdrawn:
        return


_News = queue.SimpleQueue["tuple[WorkerThread, int | None] | None"]
"""A worker with None (it is ready) or its exit code; None alone: the parent has a request."""


def run(
    configs: list[dict[str, Any]],
    channels: list[list[int]],
    inherited: tuple[Any, tuple[Any, ...]] | None,
) -> int:
    """Serve with a thread for each channel until all are told to stop; return the exit code."""
    # Called first: from here on, a worker's settings are per thread.
    worker_local.shared = True
    become(configs[0], channels[0][2])
    news: _News = queue.SimpleQueue()
    all_ready = threading.Event()
    workers: list[WorkerThread] = []
    # A signal handler may call `SimpleQueue.put`, even while this thread is in `get`.
    for number in SIGNALS:
        signal.signal(number, lambda signum, frame: news.put(None))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for config, channel in zip(configs, channels):
        workers.append(WorkerThread(news, all_ready, config, channel, inherited))
        workers[-1].start()
        _, code = _next(news, workers)
        # The worker could not start, and `loop.run` has told the parent why.
        if code is not None:
            os._exit(code)
    all_ready.set()
    for _ in workers:
        worker, code = _next(news, workers)
        if not worker.stopped:
            # Exit without waiting for the other threads, which may be in any state.
            os._exit(code or 0)
    for worker in workers:
        worker.join()
    return 0


def _next(news: _News, workers: list[WorkerThread]) -> tuple[WorkerThread, int | None]:
    """Wait for news of a worker; handle requests to break off tasks or to write stacks."""
    while (one := news.get()) is None:
        for worker in workers:
            if worker.fd >= 0 and worker.box.asked:
                worker.tell()
                worker.break_off()
    return one


class WorkerThread(PromptThread):
    """One of the workers.  It tells the main thread that it is ready (None), and its exit code."""

    box: Outbox
    fd = -1  # the descriptor of the box, once it is known
    stopped = False  # `loop.run` has been told to stop

    def __init__(
        self,
        news: _News,
        all_ready: threading.Event,
        config: dict[str, Any],
        channel: list[int],
        inherited: Any,
    ) -> None:
        super().__init__(name=config["name"], daemon=True)
        self._news, self._all_ready = news, all_ready
        self._config, self._channel, self._inherited = config, channel, inherited
        # This thread writes `_inside`: whether it is in a task.  The main thread writes two fields.
        # `_raising`: whether it is about to raise an exception in that task.  `_raised`: the number
        # of the last item in which it has raised one, plus 1; it raises only once in an item.
        self._inside = False
        self._raising = False
        self._raised = 0

    def run(self) -> None:
        code = 1
        try:
            code = serve(self._config, self._channel, self._inherited, self)
        finally:
            self._news.put((self, code))

    # -- what `loop.run` calls -----------------------------------------------------------------

    def begins(self, box: Outbox, fd: int) -> None:
        """Take the outbox.  Called instead of `listen`, which needs the main thread."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the main thread handles them
        self.box = box
        self.fd = fd

    def wait_for_all(self) -> None:
        """Report that this worker is ready; return when all workers of the process are."""
        self._news.put((self, None))
        self._all_ready.wait()

    def stoppable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs a task as ``run`` does; the main thread can interrupt it."""

        def run_inside(*task: Any) -> Any:
            raised, self._inside = self._raised, True
            try:
                return run(*task)
            finally:
                # No lock: an exception that is raised here could leave it held.
                self._inside = False
                # The main thread sets `_raising` before it reads `_inside`.  So that thread sees
                # that the task is over, or this thread waits, and then withdraws the exception.
                while self._raising:
                    time.sleep(0)
                if self._raised != raised:
                    withdraw()

        return run_inside

    # -- in the main thread --------------------------------------------------------------------

    def tell(self) -> None:
        """Write this thread's stack, but do not replace the stack of a task that it was told to
        stop.
        """
        if self.box.told_to_stop() and self._raised == self.box.began:
            return
        frame = sys._current_frames().get(self.ident or 0)
        os.pwrite(self.fd, report_of(frame, item_of(frame)), STACK_AT)

    def break_off(self) -> None:
        """Raise `TaskStopped` in the thread, if it is in the task to be stopped."""
        self._raising = True
        try:
            began = self.box.began
            # Raise once for an item: a second exception would interrupt the task's cleanup.
            if not self._inside or not self.box.told_to_stop() or self._raised == began:
                return
            while (frame := sys._current_frames().get(self.ident or 0)) is not None:
                at = frame.f_lasti
                # The thread cannot be interrupted now: repeat the signal a moment later.
                if not may_stop(frame):
                    _thread.start_new_thread(send_again, (STOP_SIGNAL,))
                    return
                # Raise only if the thread has not moved since the check; otherwise check again.
                if sys._current_frames().get(self.ident or 0) is frame and frame.f_lasti == at:
                    raise_in_thread(self.ident, TaskStopped)
                    self._raised = began
                    return
        finally:
            self._raising = False
