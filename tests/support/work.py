"""Functions that tests run in workers. They are small and import neither pytest nor torch."""

from __future__ import annotations

import collections
import importlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from xpool import current_worker
from xpool.testing._test_tasks import (
    EndsWhenCollected,
    EndsWhenPickled,
    EndsWhenUnpickled,
    end,
    end_when_collected,
    pass_gate,
    post,
    spin,
)

__all__ = [
    "EndsWhenCollected", "EndsWhenPickled", "EndsWhenUnpickled", "end", "end_when_collected",
    "pass_gate", "post", "spin",
]  # fmt: skip

initialised: list[Any] = []
"""The arguments of `remember` in this process."""


def square(x: Any = 0) -> Any:
    return x * x


def add(a: Any, b: Any = 0) -> Any:
    return a + b


def multiply(a: Any, b: Any) -> Any:
    return a * b


def echo(*args: Any, **kwds: Any) -> Any:
    return args, kwds


def same(x: Any) -> Any:
    return x


def nothing(*_: Any) -> None:
    """Do nothing."""


def pid(*_: Any) -> int:
    return os.getpid()


def kill_oneself(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def place(*_: Any) -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def fail(x: Any = None) -> None:
    raise KeyError(x)


def fail_if(bad: int, x: int) -> int:
    if x == bad:
        raise ValueError(x)
    return x


def stop_on_three(x: int) -> int:
    """Raise ``StopIteration(3)`` for 3, as an unguarded ``next()`` does; return other values."""
    if x == 3:
        raise StopIteration(x)
    return x


class StopsWhenUnpickled:
    """Unpickling it raises StopIteration."""

    def __reduce__(self) -> Any:
        return stop_on_three, (3,)


def make_stops_when_unpickled(*_: Any) -> StopsWhenUnpickled:
    return StopsWhenUnpickled()


def fail_on_three(x: int) -> int:
    return fail_if(3, x)


def fail_slowly(gate: str, x: int) -> int:
    """Raise at once for 0; for other values wait at the gate."""
    if x == 0:
        raise ValueError(x)
    pass_gate(gate)
    return x


def unpicklable(*_: Any) -> Any:
    return threading.Lock()


class Away(Exception):
    """Its ``__setstate__`` or ``__str__`` blocks or raises, but only in the test's process."""

    entered = threading.Event()
    released = threading.Event()

    def __init__(self, pid: int, stage: str, how: str, everywhere: bool = False) -> None:
        super().__init__("its text")
        self.pid, self.stage, self.how, self.everywhere = pid, stage, how, everywhere

    def __reduce__(self) -> Any:
        return Away, (self.pid, self.stage, self.how, self.everywhere), self.__dict__

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self._strike("__setstate__")

    def __str__(self) -> str:
        if self.everywhere:
            raise ZeroDivisionError
        self._strike("__str__")
        return "its text"

    def _strike(self, stage: str) -> None:
        if os.getpid() == self.pid and stage == self.stage:
            if self.how == "raise":
                raise ZeroDivisionError
            self.entered.set()
            self.released.wait()


def raise_it(exc: BaseException) -> None:
    raise exc


def gated_raise(gate: str, exc: BaseException) -> None:
    pass_gate(gate)
    raise exc


def large(size: int) -> bytes:
    return bytes(size)


def remember(*args: Any) -> None:
    """Initializer: keep the arguments for `recall`."""
    initialised.append(args)


def recall(*_: Any) -> list[Any]:
    return list(initialised)


def gated(gate: str, x: Any = None) -> Any:
    pass_gate(gate)
    return x


def post_and_gate(box: str, gate: str, x: Any = None) -> Any:
    post(box, str(os.getpid()))
    pass_gate(gate)
    return x


def logged(path: str, x: Any) -> Any:
    log_line(path, str(x))
    return x


def post_and_spin(box: str) -> None:
    post(box, str(os.getpid()))
    spin()


class Awkward(Exception):
    """Can be pickled but not unpickled, because its arguments do not fit."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"awkward {a} {b}")


def raise_awkward(*_: Any) -> None:
    raise Awkward(1, 2)


class HasLock(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raise_with_lock(*_: Any) -> None:
    raise HasLock("locked")


def raise_large(size: int) -> None:
    raise ValueError("x" * size)


class BaseFault(BaseException):
    """Not an `Exception`."""


def raise_from(*_: Any) -> None:
    """Raise an exception with a cause."""
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error


def random_numbers(*_: Any) -> tuple[float, float | None, float | None]:
    """Draw a number from random, numpy and torch; None if the module is not loaded."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (
        random.random(),
        None if numpy is None else float(numpy.random.random()),
        None if torch is None else float(torch.rand(1).item()),
    )


def numbers_with(modules: tuple[str, ...]) -> tuple[float, float | None, float | None]:
    for name in modules:
        __import__(name)
    return random_numbers()


def meet(box: str, gate: str, modules: tuple[str, ...]) -> tuple[int, Any]:
    """Keep this worker busy until the gate opens, then draw numbers."""
    post(box, str(os.getpid()))
    pass_gate(gate)
    return os.getpid(), numbers_with(modules)


def environment(name: str) -> str | None:
    return os.environ.get(name)


def lower_limit(soft: int) -> None:
    """Lower this process's limit of open descriptors."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def hold_lock_and_count(_: Any = None) -> int:
    """Add one to the shared value under the shared lock; both are from `initargs`."""
    ((lock, value, queue),) = initialised[-1:]
    with lock:
        value.value += 1
        queue.put(value.value)
        return int(value.value)


def slow_square(seconds: float, x: int) -> int:
    time.sleep(seconds)
    return x * x


class Counted:
    """Counts its live instances in this process."""

    alive = 0

    def __init__(self) -> None:
        Counted.alive += 1

    def __setstate__(self, _: Any) -> None:
        Counted.alive += 1

    def __reduce__(self) -> Any:
        return Counted, ()

    def __del__(self) -> None:
        Counted.alive -= 1


def refuse_all(value: Any) -> Any:
    raise ValueError(type(value).__name__)


def nested(name: str, n: int) -> list[int]:
    """Map over a pool in this task."""
    import xpool

    with getattr(xpool, name)(2) as pool:
        squares = pool.map(square, range(n))
    pool.join()
    return list(squares)


def nested_threads(n: int) -> list[int]:
    """Map over the standard library's thread pool in this task."""
    from multiprocessing.pool import ThreadPool

    with ThreadPool(2) as pool:
        return pool.map(square, range(n))


def nested_spinners(box: str) -> None:
    """Start a pool whose workers never end by themselves."""
    import xpool

    with xpool.Pool(2) as pool:
        pool.map(post_and_spin, [box] * 2, chunksize=1)


def is_daemon(*_: Any) -> bool:
    import multiprocessing

    return multiprocessing.current_process().daemon


def who(*_: Any) -> tuple[int, Any, str]:
    """Return the worker's index, context and pool name."""
    from xpool import current_worker

    me = current_worker()
    return me.index, me.context, me.pool


def who_at_gate(box: str, gate: str) -> tuple[int, Any, str]:
    post_and_gate(box, gate)
    return who()


def context_and(context: Any, x: Any = None) -> tuple[Any, Any]:
    return context, x


def context_at_gate(context: Any, box: str, gate: str, x: Any) -> tuple[Any, Any]:
    """Keep this worker busy until the gate opens; return its context (for context pools)."""
    post_and_gate(box, gate)
    return context, x


def count_in_context(context: dict[str, int]) -> int:
    context["calls"] = context.get("calls", 0) + 1
    return context["calls"]


def end_logged(how: str, log: str) -> None:
    log_line(log, "try")
    end(how)


def post_and_sleep(box: str) -> None:
    """Post the worker's pid, then sleep longer than any test waits."""
    post(box, str(os.getpid()))
    time.sleep(120)


def sleep_long(*_: Any) -> None:
    """Sleep longer than any test waits."""
    time.sleep(120)


# Tasks that do not end ---------------------------------------------------------------------------


def count_up(log: str | None = None, box: str | None = None) -> None:
    """Count for ever after posting; log a line when interrupted."""
    n = 0
    try:
        if box is not None:
            post(box, "counts")
        while True:
            n += 1
    finally:
        if log is not None:
            log_line(log, "cleaned")


def leave_slowly(box: str, gate: str) -> None:
    """Count for ever; when interrupted, wait at a gate."""
    n = 0
    try:
        post(box, "counts")
        while True:
            n += 1
    finally:
        pass_gate(gate)


def import_plugin(context: Any = None) -> list[str]:
    """Import the module of the fixture ``plugin``; return the entries that it registered."""
    importlib.import_module("plugin")
    entries: list[str] = importlib.import_module("registry").entries
    return entries


def count_up_stubbornly(asked: str | None = None) -> None:
    """Count for ever, ignoring all exceptions; write the file ``asked`` at each exception."""
    n = 0
    while True:
        try:
            while True:
                n += 1
        except BaseException:
            n = 0
            if asked is not None:
                Path(asked).touch()


def spin_in_c(*_: Any) -> None:
    """Use the processor for ever in C code that neither handles signals nor releases the GIL."""
    collections.deque(itertools.repeat(0), maxlen=0)


def spin_in(index: int) -> None:
    worker = current_worker()
    if worker is not None and worker.index == index:
        spin()


def spin_on_three(x: Any) -> Any:
    if x == 3:
        count_up()
    return x


def stay_on_three(x: Any) -> Any:
    while x == 3:
        time.sleep(1)
    return x


def stay_once(flag: str, x: Any = None) -> Any:
    """Sleep for ever at the first call; later return `x`."""
    if first(flag):
        stay_on_three(3)
    return x


def stop_self(box: str) -> None:
    post(box, str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def first(flag: str) -> bool:
    """Whether this is the first call with this path, in any process."""
    try:
        # With O_EXCL only one of several processes makes the file (open(2)).
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def raise_times(log: str, times: int, error: type[Exception], x: Any = None) -> Any:
    """Log a line; raise in the first `times` calls, later return `x`."""
    log_line(log, "ran")
    with open(log) as file:
        if len(file.read().split()) <= times:
            raise error("not yet")
    return x


def log_line(path: str, text: str) -> None:
    """Append a line to a file; concurrent writers do not mix their lines."""
    # With O_APPEND the system appends in one atomic step (open(2)).
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, f"{text}\n".encode())
    finally:
        os.close(fd)


def end_or_return(how: str, bad: Any, log: str, x: Any) -> Any:
    """Log `x`; end in the given way if it equals `bad`, otherwise return it."""
    log_line(log, str(x))
    if x == bad:
        end(how)
    return x


def end_once(how: str, flag: str, x: Any = None) -> Any:
    """End in the given way at the first call with this flag; later return `x`."""
    if first(flag):
        end(how)
    return x
