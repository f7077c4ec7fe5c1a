"""Several workers in one process, each a thread with a channel of its own.

For devices that one process has to open, such as the two cores of a chip of TPU v2 and v3.  The
main thread runs no tasks: it starts the workers one after the other, so that what opens the devices
and the initializers need no lock, and waits for their ends.

**They start together.**  None says that it is ready before all are, so an initializer that fails
costs nobody a task.  **They end together**, since a process that has lost one of its threads is in
an unknown state: a worker that was told to stop waits for the others, and when one ends in any
other way (`sys.exit` in a task), so does the process, at once.

**Stopping a task.**  A handler of signals runs in the main thread and can raise nothing in another;
`PyThreadState_SetAsyncExc` can: `TaskStopped` comes when that thread next runs Python code.  That
may be after the task, so who leaves a task says so first, and then withdraws what has not come yet.
A task that waits in C code, asleep for one, does not get it, and is killed a moment later, with its
process.
"""

from __future__ import annotations

import _thread
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from xpool._python.async_error import raise_in_thread
from xpool._python.worker_local import share_process
from xpool._wire.outbox import STACK, STACK_AT, STOP_SIGNAL, TASK_LINE, Outbox
from xpool._worker.callables import item_of
from xpool._worker.loop import become
from xpool._worker.loop import run as serve
from xpool._worker.stopping import again, may_stop, stack_of
from xpool.errors import TaskStopped

__all__ = ["run"]

_News = queue.SimpleQueue["tuple[_Member, int | None] | None"]
"""A member that is ready (None) or has ended, with that code; None: the parent asks something."""


def run(
    orders: list[dict[str, Any]],
    channels: list[list[int]],
    inherited: tuple[Any, tuple[Any, ...]] | None,
) -> int:
    """Serve with a thread for each channel until all are told to stop; return the exit code."""
    # First: from here on, what is set for a worker is its thread's.
    share_process()
    become(orders[0], channels[0][2])
    news: _News = queue.SimpleQueue()
    all_ready = threading.Event()
    members: list[_Member] = []
    # `SimpleQueue.put` may be called in a handler, also while this thread is in `get`.
    signal.signal(STOP_SIGNAL, lambda signum, frame: news.put(None))
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_SIGNAL])
    for order, channel in zip(orders, channels):
        members.append(_Member(news, all_ready, order, channel, inherited))
        members[-1].start()
        _, code = _next(news, members)
        # It could not start: `loop.run` has told its parent why.
        if code is not None:
            os._exit(code)
    all_ready.set()
    for _ in members:
        member, code = _next(news, members)
        if not member.stopped:
            # The others may be anywhere: neither they nor the interpreter's end are waited for.
            os._exit(code or 0)
    for member in members:
        member.join()
    return 0


def _next(news: _News, members: list[_Member]) -> tuple[_Member, int | None]:
    """Wait for news of a member; see meanwhile to those that are to break something off."""
    while (one := news.get()) is None:
        for member in members:
            if member.fd >= 0 and member.box.asked:
                member.tell()
                member.break_off()
    return one


class _Member(threading.Thread):
    """One of the workers; tells the main thread when it is ready (None), and its exit code."""

    box: Outbox
    fd = -1  # of the box, once it is there
    stopped = False

    def __init__(
        self,
        news: _News,
        all_ready: threading.Event,
        orders: dict[str, Any],
        channel: list[int],
        inherited: Any,
    ) -> None:
        super().__init__(name=orders["name"], daemon=True)
        self._news, self._all_ready = news, all_ready
        self._orders, self._channel, self._inherited = orders, channel, inherited
        # Written by this thread: whether it is in a task.  By the main one: whether it is about to
        # raise something in that, and in which item it did last, plus 1; once is enough.
        self._inside = False
        self._raising = False
        self._raised = 0

    def run(self) -> None:
        code = 1
        try:
            code = serve(self._orders, self._channel, self._inherited, self)
        finally:
            self._news.put((self, code))

    # -- what `loop.run` calls -----------------------------------------------------------------

    def begins(self, box: Outbox, fd: int) -> None:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, [STOP_SIGNAL])  # it is for the main thread
        self.box = box
        self.fd = fd

    def wait_for_all(self) -> None:
        self._news.put((self, None))
        self._all_ready.wait()

    def stoppable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_inside(*task: Any) -> Any:
            self._inside = True
            try:
                return run(*task)
            finally:
                # No lock, which what is raised here could leave held.
                self._inside = False
                # Who raises sets `_raising` and looks at `_inside` then: he sees that the task is
                # over, or is waited for here, and what he has raised is withdrawn.
                while self._raising:
                    time.sleep(0)
                raise_in_thread(self.ident, None)

        return run_inside

    def told_to_stop(self) -> None:
        self.stopped = True

    # -- in the main thread --------------------------------------------------------------------

    def tell(self) -> None:
        """Write where the thread is."""
        frame = sys._current_frames().get(self.ident or 0)
        text = f"{stack_of(frame)}\n{TASK_LINE}{item_of(frame)}\n"
        os.pwrite(self.fd, text.encode()[: STACK - 1] + b"\0", STACK_AT)

    def break_off(self) -> None:
        """Raise `TaskStopped` in the thread, if it is in the task that is meant."""
        self._raising = True
        try:
            began = self.box.began
            # Once for an item: a second one would come into what the task does to clean up.
            if not self._inside or not self.box.told_to_stop() or self._raised == began:
                return
            while (frame := sys._current_frames().get(self.ident or 0)) is not None:
                at = frame.f_lasti
                # Not here, and not now: the signal comes again a moment later.
                if not may_stop(frame):
                    _thread.start_new_thread(again, (STOP_SIGNAL,))
                    return
                # Should the interpreter have let it go on while we looked, we look again.
                if sys._current_frames().get(self.ident or 0) is frame and frame.f_lasti == at:
                    raise_in_thread(self.ident, TaskStopped)
                    self._raised = began
                    return
        finally:
            self._raising = False
