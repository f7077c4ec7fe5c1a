"""The orderly end of a worker: what its tasks registered for the end of the process is run.

The standard library's pools run `multiprocessing.util.Finalize` and wait for threads in every
worker, and run `atexit` callbacks in those that were spawned.  Here all three happen, in the order
of a spawned process, however the worker was started, whenever it ends by itself: after `close`, by
`maxtasksperchild`, by `sys.exit` in a task.  A worker that is terminated or killed runs nothing.

Only what was registered in this process is run: the one that it was forked from may have callbacks
that remove its temporary folders.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["EXIT_LIMIT", "begin", "flush", "forget_log_handlers", "run"]

EXIT_LIMIT = 30.0
"""Seconds that finalizers, threads and callbacks may take together.  Then the process writes the
stacks of all its threads to stderr and ends, so that `join` does not wait for ever."""

_STDERR = 2


def begin() -> None:
    """Forget the callbacks of the process that this one was forked from."""
    if multiprocessing.get_start_method(allow_none=True) == "spawn":
        return  # they are its own: it has imported the program
    atexit._clear()
    finalize: Any = weakref.finalize
    for inherited in list(finalize._registry):
        inherited.atexit = False
    finalize._registered_with_atexit = False  # the next one registers anew
    # It has registered this when it was imported, and is not imported again.
    if "logging" in sys.modules:
        atexit.register(sys.modules["logging"].shutdown)


def forget_log_handlers(logging: Any) -> None:
    """Have `logging.shutdown` leave alone what the handlers of the parent have buffered there."""
    del logging._handlerList[:]


def run() -> None:
    """Run what was registered, and wait for threads; at most for `EXIT_LIMIT` seconds."""
    _limit()
    last: list[Callable[[], object]] = [
        _finalize,
        threading._shutdown,  # type: ignore[attr-defined]
        atexit._run_exitfuncs,
    ]
    for function in last:
        try:
            function()
        except BaseException:
            import traceback  # only here: few workers need it

            traceback.print_exc()
    flush()


def _finalize() -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # else nobody can have registered anything
        # Finalizers of the process that it was forked from look at the process id, and do nothing.
        util._exit_function()


def _limit() -> None:
    """Have SIGALRM end the process when the time is over, after faulthandler has written stacks.

    Neither needs the interpreter, which what hangs may hold.  Not `dump_traceback_later`: it waits
    for its former thread, and in a fork of a program that has used it there is none.
    """
    if not hasattr(signal, "setitimer"):
        return  # not this system's
    # The default action ends the process: faulthandler chains to what was there before it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, file=_STDERR, all_threads=True, chain=True)
    # A task may have blocked it, or the thread that forked this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, EXIT_LIMIT)


def flush() -> None:
    """Write what was printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # closed or replaced by the task: there is nothing to save
