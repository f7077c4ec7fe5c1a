"""The functions that the workers of a loader run.

A worker imports this module and `xpool.data._loader_worker`, but none of the pools.
"""

from __future__ import annotations

import multiprocessing.context
import signal
from collections.abc import Callable
from typing import Any

import torch

from xpool._worker.worker_context import current_worker
from xpool.data._loader_worker import WorkerCopy

_received: WorkerCopy | None = None


class AtStart:
    """The argument of a starting worker, which inherits it or gets it pickled."""

    def __init__(self, made: WorkerCopy) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        if multiprocessing.context.get_spawning_popen() is None:
            # The error makes the pool pass it to the starting process.
            raise RuntimeError("a worker gets its dataset when it starts, by inheritance")
        return AtStart, (self.made,)


def begin() -> None:
    """Prepare a worker: torch computes in one thread, and the program's signal handlers end.

    In a fork of the program, a signal would run the program's handler and write into the wakeup
    descriptor of the program's event loop.
    """
    torch.set_num_threads(1)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        module = getattr(handler, "__module__", None) or ""
        if callable(handler) and not module.startswith(("xpool.", "_signal", "signal")):
            signal.signal(number, signal.SIG_DFL)


def receive(start: AtStart) -> None:
    """Call `begin`, and keep the copy that came with the start of this process for `with_copy`."""
    global _received
    begin()
    _received = start.made


def with_copy(func: Callable[..., Any], made: WorkerCopy | None, *args: Any) -> Any:
    """Call ``func(copy, *args)``.  ``made`` is None if the copy came with the process's start."""
    return func(_received if made is None else made, *args)


def in_thread(func: Callable[..., Any], copies: list[WorkerCopy], *args: Any) -> Any:
    """Call ``func(copy, *args)`` with this thread's copy."""
    return func(copies[current_worker().index], *args)


def after(before: Any, func: Callable[..., Any], *args: Any) -> Any:
    """Call ``func(*args)`` when the result ``before`` is ready, or at once if it is None."""
    if before is not None:
        before.wait()
    return func(*args)


def call(func: Callable[..., Any], *args: Any) -> Any:
    return func(*args)


def without_context(context: Any, func: Callable[..., Any], *args: Any) -> Any:
    """Call ``func(*args)`` without the context that a `CtxPool` passes to each task."""
    return func(*args)
