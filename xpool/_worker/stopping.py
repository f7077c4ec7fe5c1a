"""The signals that make a worker break off its task, or write its stack.

When the main thread next runs Python code, the handler of `STOP_SIGNAL` writes the stack into the
outbox's file, and raises `TaskStopped` if the worker still runs the task to be stopped.  During an
import, a finalizer or a fork, or in the arena's bookkeeping (`xpool._python.interrupt`), it raises
a moment later.

If a task is stuck in C code, this handler does not run, and the worker is killed.  Before that, the
parent sends `STACK_SIGNAL`.  faulthandler's handler, in C, writes the stack of the main thread
whatever the interpreter is doing, and then the first handler is due, too.  This is not the first
signal: before Python 3.13, faulthandler crashes if its signal interrupts the interpreter while it
enters a function.
"""

from __future__ import annotations

import _thread
import faulthandler
import os
import signal
from types import CodeType, FrameType

from xpool._python.at_fork import HOOK
from xpool._python.import_hooks import IMPORTER
from xpool._python.interrupt import keeps_clear, may_raise, send_again
from xpool._wire.outbox import STACK, STACK_AT, STACK_SIGNAL, STOP_SIGNAL, TASK_LINE, Outbox
from xpool._worker.callables import item_of
from xpool.errors import TaskStopped

SIGNALS = STOP_SIGNAL, STACK_SIGNAL

MOST_FRAMES = 100
"""The most frames of a stack, as with faulthandler."""


def stack_of(frame: FrameType | None, ours: tuple[str, ...] = ()) -> str:
    """Return the stack of a thread, most recent call first, in faulthandler's format.

    It ends before the first frame of a file in ``ours``.
    """
    lines: list[str] = []
    while frame is not None and frame.f_code.co_filename not in ours:
        if len(lines) == MOST_FRAMES:
            lines.append("  ...")
            break
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def may_stop(frame: FrameType | None, task: FrameType | None = None) -> bool:
    """Whether `TaskStopped` may be raised here: not in bookkeeping or an import, nor where Python
    would only print it (in a finalizer, or in a function of xpool that a fork calls).

    If an import is interrupted, Python removes the module from `sys.modules`, but keeps its other
    effects: registrations elsewhere, or in C, would make later tasks of this worker fail.  Frames
    that called ``task`` do not count: in a fork, the program's module may be in the midst of its
    import.
    """
    at = frame
    while at is not None and at is not task:
        code = at.f_code
        if code.co_filename == IMPORTER or code.co_name == "__del__" or code is HOOK:
            return False
        at = at.f_back
    return may_raise(frame)


def report_of(frame: FrameType | None, item: str) -> bytes:
    """Return the text about a thread for the outbox: its stack and the item that it runs."""
    text = f"{stack_of(frame)}\n{TASK_LINE}{item}\n"
    return text.encode(errors="backslashreplace")[: STACK // 2 - 1] + b"\0"


def listen(box: Outbox, fd: int, inside: CodeType) -> None:
    """Handle the two signals from now on: raise `TaskStopped` while a frame of ``inside`` runs.

    ``fd`` is the outbox's file, kept open for the stack.
    """

    raised = 0  # the last item in which it raised, plus 1
    start = STACK_AT  # the offset of the next text, for faulthandler that of the file

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal raised, start
        os.lseek(fd, start, os.SEEK_SET)
        # Read once: the parent may name the item at any moment, and the signal comes again then.
        told, began = box.told_to_stop(), box.began
        if told and began == raised:
            return  # a second exception would interrupt the task's cleanup
        # Of a task to be stopped, the parent knows the item.
        end = start + os.pwrite(fd, report_of(frame, "" if told else item_of(frame)), start)
        if not told:  # only the stack was asked for, or the task has ended
            return
        at = frame
        while at is not None and at.f_code is not inside:
            at = at.f_back
        if at is not None and may_stop(frame, at):
            # The next text follows this one, which the parent reads first.  So a stack that is
            # asked for during the task's cleanup does not replace it.
            start = end if end <= STACK_AT + STACK // 2 else STACK_AT
            os.lseek(fd, start, os.SEEK_SET)
            raised = began
            raise TaskStopped("its time is over, or it was cancelled")
        if at is not None:
            # `threading.Thread.start` would wait for the thread, and this is a handler.
            _thread.start_new_thread(send_again, (STOP_SIGNAL,))

    keeps_clear(stop)
    os.lseek(fd, start, os.SEEK_SET)
    for number in SIGNALS:
        signal.signal(number, stop)
    # Registered last: with ``chain`` it writes the stack, then calls the handler that it found.
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=False, chain=True)
    # A forked process inherits the blocked signals of the thread that forked it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
