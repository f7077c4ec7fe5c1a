"""The orderly end of a worker, which runs what its tasks registered for the end of the process.

The standard library's pools run `multiprocessing.util.Finalize` and wait for threads in every
worker, and run `atexit` callbacks in spawned workers.  Workers of xpool do all three, in the order
of a spawned process, with every start method, if they end by themselves: after `close`, by
`maxtasksperchild`, by `sys.exit` in a task.  A worker that is terminated or killed runs nothing.

A forked worker does not run the callbacks of its parent: they may remove the parent's temporary
folders.
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

EXIT_LIMIT = 30.0
"""Seconds that finalizers, threads and callbacks may take together.  After them, the process writes
the stacks of all its threads to stderr and ends, so that `join` does not wait for ever."""

_STDERR = 2


def begin() -> None:
    """Forget the callbacks of the process that this one was forked from."""
    if multiprocessing.get_start_method(allow_none=True) == "spawn":
        return  # a spawned process has only callbacks of its own
    atexit._clear()
    finalize: Any = weakref.finalize
    for inherited in list(finalize._registry):
        inherited.atexit = False
    finalize._registered_with_atexit = False  # so that the next finalizer registers with atexit
    # `logging` registered this when it was imported, which does not happen again.
    if "logging" in sys.modules:
        atexit.register(sys.modules["logging"].shutdown)


def forget_log_handlers(logging: Any) -> None:
    """Keep `logging.shutdown` from writing what the parent's handlers have buffered."""
    del logging._handlerList[:]


def run() -> None:
    """Run what was registered, and wait for threads, for at most `EXIT_LIMIT` seconds."""
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
            import traceback  # few workers need it

            traceback.print_exc()
    flush()


def _finalize() -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # without the module, nothing was registered
        # A finalizer of the parent compares the process id, and does nothing here.
        util._exit_function()


def _limit() -> None:
    """Let SIGALRM end the process after `EXIT_LIMIT`, when faulthandler has written the stacks.

    Neither needs the interpreter lock, which hanging code may hold.  `dump_traceback_later` would
    wait for a thread that does not exist in a fork of a program that has used it.
    """
    # The default action ends the process: faulthandler calls the handler that it replaces.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, file=_STDERR, all_threads=True, chain=True)
    # A task, or the thread that forked this process, may have blocked the signal.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, EXIT_LIMIT)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # the task has closed or replaced the stream
