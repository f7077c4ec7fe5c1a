"""Functions and objects that end their process at a chosen stage of a task.

They are for tests of pools.  Any worker can import them, and they have no dependencies.  `perform`
is the task of `_pool_machine` and `_conformance`.  ::

    result = pool.apply_async(*sabotage("run", "SIGKILL"))
    with pytest.raises(WorkerDied):
        result.get()
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from xpool.testing._eventually import pass_gate

EXITS = {
    "sys.exit": 3, "os._exit": 4, "SIGKILL": -signal.SIGKILL, "SIGSEGV": -signal.SIGSEGV,
    "SIGABRT": -signal.SIGABRT, "SIGTERM": -signal.SIGTERM,
}  # fmt: skip
"""The ways to end a process, each with the exit code that the parent sees."""

WAYS = ("raise", *EXITS, "SIGSTOP", "hang", "spin")
"""Raise an exception, end the process (`EXITS`), stop by a signal, wait or compute for ever."""


def same(x: Any = None) -> Any:
    return x


def spin() -> None:
    """Use the processor for ever."""
    while True:
        pass


def end(how: str) -> None:
    """Raise an error, end this process, or hang, in the given way of `WAYS`."""
    if how == "raise":
        raise RuntimeError("sabotage")
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    if how == "hang":
        threading.Event().wait()
    if how == "spin":
        spin()
    if how.startswith("SIG"):
        number = signal.Signals[how]
        if number in (signal.SIGSEGV, signal.SIGABRT):
            # A core dump would take seconds and stay in the working directory.
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # Only the main thread can set handlers.
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Another thread may get the signal, so wait until it has ended the process.
        threading.Event().wait(None if number == signal.SIGSTOP else 30)
    raise ValueError(f"{how!r} is not one of {', '.join(WAYS)}")


def _rebuild(how: str) -> Any:
    end(how)


class EndsWhenUnpickled:
    """An object that can be pickled, but ends the process in the given way when unpickled."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return _rebuild, (self.how,)


class EndsWhenPickled:
    """An object that ends the process in the given way when it is pickled."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        end(self.how)
        raise AssertionError("not reached")


def make_ends_when_pickled(how: str) -> Any:
    return EndsWhenPickled(how)


def make_ends_when_unpickled(how: str) -> Any:
    return EndsWhenUnpickled(how)


class EndsWhenCollected:
    """An object that ends the process in the given way when it is garbage-collected."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.me = self  # only the garbage collector frees this reference cycle

    def __del__(self) -> None:
        end(self.how)


def end_when_collected(how: str) -> None:
    """Leave garbage that ends the process when it is collected, after 0.05 s."""
    EndsWhenCollected(how)
    threading.Timer(0.05, gc.collect).start()


STAGES: dict[str, Callable[[str], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "task pickle": lambda how: (same, (EndsWhenPickled(how),)),
    "task unpickle": lambda how: (same, (EndsWhenUnpickled(how),)),
    "run": lambda how: (end, (how,)),
    "result pickle": lambda how: (make_ends_when_pickled, (how,)),
    "result unpickle": lambda how: (make_ends_when_unpickled, (how,)),
    "collection": lambda how: (end_when_collected, (how,)),
}
"""Stages of a task.  The first and the fifth run in the caller's process, so use "raise" there."""


def sabotage(stage: str, how: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and its arguments, which fail in the way ``how`` at a stage of the task.

    Args:
        stage: one of `STAGES`.
        how: one of `WAYS`.

    Raises:
        ValueError: the stage or way does not exist.  The text lists all.
    """
    if stage not in STAGES:
        raise ValueError(f"{stage!r} is not one of {', '.join(STAGES)}")
    if how not in WAYS:
        raise ValueError(f"{how!r} is not one of {', '.join(WAYS)}")
    return STAGES[stage](how)


class TaskError(Exception):
    """The error of tasks that were told to raise one."""


def perform(spec: tuple[str, int, str | None]) -> Any:
    """Perform a specification: a kind of task, a number, and the path of a gate or None."""
    what, number, path = spec
    if what == "value":
        return number
    if what == "error":
        raise TaskError(number)
    if what == "pid":
        return os.getpid()
    if what == "held":
        assert path is not None
        pass_gate(path)
        return number
    if what == "large":
        return bytes([number % 251]) * 300_000
    if what == "unpicklable":
        return threading.Lock()
    end(what)
    return None


def perform_pair(number: int, spec: tuple[str, int, str | None]) -> Any:
    """Do the same as `perform`, but take two arguments, for `starmap`."""
    return perform(spec)


def in_context(_context: Any, *args: Any) -> Any:
    """Do the same as `perform` or `perform_pair`, for pools that pass a context to tasks."""
    return perform(args[-1])
