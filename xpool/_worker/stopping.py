"""The signal that makes a worker break off its task, or write its stack.

The signal has two handlers, called one after the other.  faulthandler's handler, in C, writes the
stack of the main thread into the outbox's file, whatever the interpreter is doing.  Then it calls
Python's handler, which runs the handler of this module when the main thread next runs Python code.
This raises `TaskStopped` if the worker still runs the task to be stopped.  If a task is stuck in C
code, this handler does not run, and the worker is killed.  During an import, or in the arena's
bookkeeping (`xpool._python.interrupt`), the error is raised a moment later.
"""

from __future__ import annotations

import _thread
import faulthandler
import os
import signal
import threading
import time
from types import CodeType, FrameType

from xpool._python.import_hooks import IMPORTER
from xpool._python.interrupt import keeps_clear, may_raise
from xpool._wire.outbox import SIZE, STACK, STACK_AT, STOP_SIGNAL, TASK_LINE, Outbox
from xpool._worker.callables import item_of
from xpool.errors import TaskStopped


def stack_of(frame: FrameType | None, ours: tuple[str, ...] = ()) -> str:
    """Return the stack of a thread, most recent call first, in faulthandler's format.

    It ends before the first frame of a file in ``ours``.
    """
    lines = []
    while frame is not None and frame.f_code.co_filename not in ours:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def may_stop(frame: FrameType | None, task: FrameType | None = None) -> bool:
    """Whether `TaskStopped` may be raised in a frame: not in bookkeeping or in an import.

    If an import is interrupted, Python removes the module from `sys.modules`, but keeps its other
    effects: registrations elsewhere, or in C, would make later tasks of this worker fail.  Frames
    that called ``task`` do not count: in a fork, the program's module may be in the midst of its
    import.
    """
    at = frame
    while at is not None and at is not task:
        if at.f_code.co_filename == IMPORTER:
            return False
        at = at.f_back
    return may_raise(frame)


def listen(box: Outbox, fd: int, inside: CodeType) -> None:
    """Handle `STOP_SIGNAL` from now on: raise `TaskStopped` while a frame of ``inside`` runs.

    ``fd`` is the outbox's file, kept open for the stack.
    """

    raised = 0  # the last item in which it raised, plus 1

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal raised
        end = os.lseek(fd, 0, os.SEEK_CUR)
        if not box.told_to_stop():  # only the stack was asked for, or the task has ended
            # Write the item after the stack, if there is room.
            if end < SIZE - 1024:
                os.write(fd, f"{TASK_LINE}{item_of(frame)}\n".encode())
            os.lseek(fd, STACK_AT, os.SEEK_SET)  # for the next stack
            return
        began = box.began
        if began == raised:
            return  # a second exception would interrupt the task's cleanup
        at = frame
        while at is not None and at.f_code is not inside:
            at = at.f_back
        # Without a text, this signal asked for the stack before the parent named an item.
        if at is not None and box.has_text(end) and may_stop(frame, at):
            # The next stack follows this one, which the parent reads first.  So that of a signal
            # that arrives during the task's cleanup does not replace it.
            if end > STACK_AT + STACK // 2:
                os.lseek(fd, STACK_AT, os.SEEK_SET)
            raised = began
            raise TaskStopped("its time is over, or it was cancelled")
        os.lseek(fd, STACK_AT, os.SEEK_SET)
        if at is not None:
            # `threading.Thread.start` would wait for the thread, and this is a handler.
            _thread.start_new_thread(again, (signum,))

    keeps_clear(stop)
    os.lseek(fd, STACK_AT, os.SEEK_SET)
    signal.signal(STOP_SIGNAL, stop)
    # Registered last: with ``chain`` it writes the stack, then calls the handler that it found.
    faulthandler.register(STOP_SIGNAL, file=fd, all_threads=False, chain=True)
    # A forked process inherits the blocked signals of the thread that forked it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_SIGNAL])


def again(signum: int) -> None:
    """Send the main thread the signal again after a moment.  Runs in a thread of its own."""
    time.sleep(0.001)  # lets the main thread run on
    # A signal, not `interrupt_main`: it must also end a wait that the main thread has begun.
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signum)
