"""How a worker is asked to break off what it runs, and to tell where it is.

Two handlers of one signal, one after the other.  faulthandler's, in C, writes the stack of the main
thread into the outbox's file, whatever the interpreter is doing; then it calls Python's, which runs
ours as soon as the main thread gets to it, and that raises `TaskStopped` if this is still the task
that is meant.  A task that is stuck in C code never gets to it, and is killed.  While the
task is in an import, or in the arena's bookkeeping (`xpool._python.interrupt`), the error is raised
a moment later.
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
from xpool._wire.outbox import SIZE, STACK_AT, STOP_SIGNAL, TASK_LINE, Outbox
from xpool._worker.callables import item_of
from xpool.errors import TaskStopped

__all__ = ["again", "listen", "may_stop", "stack_of"]


def stack_of(frame: FrameType | None, ours: tuple[str, ...] = ()) -> str:
    """Return where a thread is, most recent call first, as faulthandler says it.

    Frames of the files ``ours`` and those that called them are left out.
    """
    lines = []
    while frame is not None and frame.f_code.co_filename not in ours:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def may_stop(frame: FrameType | None, task: FrameType | None = None) -> bool:
    """Whether `TaskStopped` may be raised in a frame: not where books are kept, or in an import.

    Import takes a module that was cut short out of `sys.modules`, and nothing that the module has
    done: what it has registered elsewhere, or in C, would fail later tasks of this worker.  Frames
    that called ``task`` do not count: a fork's program may be a module that is being imported.
    """
    at = frame
    while at is not None and at is not task:
        if at.f_code.co_filename == IMPORTER:
            return False
        at = at.f_back
    return may_raise(frame)


def listen(box: Outbox, fd: int, inside: CodeType) -> None:
    """Answer `STOP_SIGNAL` from now on, by raising where a frame of ``inside`` is running.

    ``fd``: the outbox's file, kept open for the stack.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        is_told = box.told_to_stop()
        # Behind the stack, where there is room.
        if not is_told and os.lseek(fd, 0, os.SEEK_CUR) < SIZE - 1024:
            os.write(fd, f"{TASK_LINE}{item_of(frame)}\n".encode())
        os.lseek(fd, STACK_AT, os.SEEK_SET)  # for the next stack
        if not is_told:
            return  # asked where it is; or for a task that has ended meanwhile
        at = frame
        while at is not None and at.f_code is not inside:
            at = at.f_back
        if at is not None:
            if may_stop(frame, at):
                raise TaskStopped("its time is over, or it was cancelled")
            # Not `threading.Thread`, whose `start` waits for the thread: this is a signal handler.
            _thread.start_new_thread(again, (signum,))

    keeps_clear(stop)
    os.lseek(fd, STACK_AT, os.SEEK_SET)
    signal.signal(STOP_SIGNAL, stop)
    # Second: with ``chain`` it calls the handler that it finds, after it has written the stack.
    faulthandler.register(STOP_SIGNAL, file=fd, all_threads=False, chain=True)
    if hasattr(signal, "pthread_sigmask"):
        # A process that was forked by a thread has the signals blocked that were there.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOP_SIGNAL])


def again(signum: int) -> None:
    """Send the main thread a signal once more, in a thread of its own, a moment later."""
    time.sleep(0.001)  # not to wait for anything: to let the main thread run on
    # A signal, and not `interrupt_main`: it must also end a wait that has begun meanwhile.
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signum)
