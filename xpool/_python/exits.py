"""The orderly end of a worker, which runs the functions that its tasks registered for this.

In the standard library's pools, each worker runs the finalizers of `multiprocessing.util.Finalize`
and waits for threads, and spawned workers also run `atexit` callbacks.  Workers of xpool do all
three with every start method, in the order of a spawned process, if they end by themselves: after
`close`, by `maxtasksperchild`, or by `sys.exit` in a task.  Killed workers do none of these.

A forked worker does not run its parent's callbacks, which may remove the parent's temporary files.
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
"""Seconds that finalizers, threads and callbacks may take together.  After this time, the process
writes the stacks of all threads to stderr and ends, so that `join` does not wait for ever."""

_STDERR = 2


def begin() -> None:
    """Forget the callbacks of the process from which this one was forked."""
    if multiprocessing.get_start_method(allow_none=True) == "spawn":
        return  # a spawned process has only its own callbacks
    atexit._clear()
    finalize: Any = weakref.finalize
    for inherited in list(finalize._registry):
        inherited.atexit = False
    finalize._registered_with_atexit = False  # so that the next finalizer registers with atexit
    # `logging` registers its `shutdown` when it is imported, and it is imported only once.
    if "logging" in sys.modules:
        atexit.register(sys.modules["logging"].shutdown)


def forget_log_handlers(logging: Any) -> None:
    """Keep `logging.shutdown` from writing the text that the parent's handlers have buffered."""
    del logging._handlerList[:]


def run() -> None:
    """Run the registered functions and wait for threads, for at most `EXIT_LIMIT` seconds."""
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
            sys.__excepthook__(*sys.exc_info())
    flush()


def _finalize() -> None:
    util = sys.modules.get("multiprocessing.util")
    if util is not None:  # without the module, nothing was registered
        # The parent's finalizers do nothing here, because they compare the process id.
        util._exit_function()


def _limit() -> None:
    """After `EXIT_LIMIT`, let SIGALRM make faulthandler write the stacks, and end the process.

    Neither needs the interpreter lock, which hanging code may hold.  `dump_traceback_later` is not
    used: in a fork of a program that has used it, it would wait for a thread that does not exist.
    """
    # faulthandler then calls the handler that it replaces: the default action ends the process.
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
            continue  # a task has closed or replaced the stream
