"""What a test does with its tasks: it waits for them, and lets them end their process.

Waits have a limit in seconds, and errors that name the missing event.

A test holds a `Mailbox` or `Gate`.  Tasks in any process use it by its path, with `post` and
`pass_gate`.  So a test knows the progress of its tasks and needs no sleep.

Functions and objects end their process at a chosen stage of a task.  Any worker can import them.
`perform` is the task of `_pool_machine` and `_conformance`.  ::

    result = pool.apply_async(*sabotage("run", "SIGKILL"))
    with pytest.raises(WorkerDied):
        result.get()
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from xpool import errors

__all__ = [
    "LIMIT", "Gate", "Late", "Mailbox", "eventually", "in_time", "pass_gate", "post", "wait_gone",
    "watch",
]  # fmt: skip

LIMIT = float(os.environ.get("XPOOL_TEST_WAIT", "20"))
"""Seconds after which an expected event counts as missing."""


def eventually(fact: Callable[[], Any], what: str, limit: float = LIMIT) -> Any:
    """Return the first true value of ``fact()``.  Raise `AssertionError` after ``limit`` seconds.

    Use this only for facts that have no event, such as the table of open descriptors.
    """
    pause = threading.Event()
    end = time.monotonic() + limit
    while True:
        value = fact()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit:g} s: {what}")
        pause.wait(0.005)


class Late(errors.TimeoutError):
    """A call has not returned within the limit."""


def in_time(act: Callable[[], Any], limit: float, threads: int = 1) -> Any:
    """Call ``act()`` in new threads and return a result.  Raise `Late` after ``limit`` seconds."""
    done: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            done.append((True, act()))
        except BaseException as exc:
            done.append((False, exc))

    working = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    end = time.monotonic() + limit
    for thread in working:
        thread.start()
    for thread in working:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            raise Late
    for ok, value in done:
        if not ok:
            raise value
    return done[0][1]


def watch(pid: int) -> int | None:
    """Return a pidfd for the process ``pid``, or None if the process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def wait_gone(pids: Iterable[int], limit: float = LIMIT) -> list[int]:
    """Wait until all processes have ended.  After ``limit`` seconds, return the others."""
    fds = {fd: pid for pid in pids if (fd := watch(pid)) is not None}
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    end = time.monotonic() + limit
    try:
        left = dict(fds)
        while left:
            remaining = end - time.monotonic()
            if remaining <= 0:
                break
            # A pidfd becomes readable when its process ends (pidfd_open(2)).
            for fd, _ in poller.poll(remaining * 1000):
                poller.unregister(fd)
                left.pop(fd, None)
        return sorted(left.values())
    finally:
        for fd in fds:
            os.close(fd)


def _reader(fd: int) -> select.poll:
    poller = select.poll()  # `select` accepts only descriptors below 1024 (select(2))
    poller.register(fd, select.POLLIN)
    return poller


class _Pipe:
    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        os.mkfifo(self.path)
        # Open for both ends (fifo(7)), so that opening does not wait, and reads find no end.
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class Mailbox(_Pipe):
    """Receives lines from any process through a named pipe that the test holds open.

    Writers (`post`) need only the path, so this works with every start method.
    """

    _rest = b""

    def line(self, limit: float = LIMIT) -> str:
        """Return the next line.  Raises `AssertionError` after ``limit`` seconds."""
        end = time.monotonic() + limit
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not _reader(self._fd).poll(left * 1000):
                raise AssertionError(f"nobody posted to {self.path} within {limit:g} s")
            self._rest += os.read(self._fd, 65536)
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def lines(self, count: int, limit: float = LIMIT) -> list[str]:
        """Return the next ``count`` lines, waiting ``limit`` seconds for each."""
        return [self.line(limit) for _ in range(count)]

    def empty(self) -> bool:
        """Whether all posted lines have been read."""
        return not self._rest and not _reader(self._fd).poll(0)

    def close(self) -> None:
        """Close the pipe.  The file stays in its folder."""
        os.close(self._fd)


class Gate(_Pipe):
    """Holds tasks that call ``pass_gate(path)`` until the test opens it, or its process ends."""

    def open(self, passes: int = 1) -> None:
        """Let ``passes`` waiting or later tasks pass."""
        os.write(self._fd, b"." * passes)

    def close(self) -> None:
        """Let all tasks pass from now on: they read the end of the pipe."""
        self.open(4096)
        os.close(self._fd)


def post(path: str, text: str) -> None:
    """Write one line into a `Mailbox`, unless the test has closed it."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno == errno.ENXIO:  # the pipe has no reader
            return
        raise
    os.set_blocking(fd, True)  # the write then waits if the pipe is full
    try:
        os.write(fd, f"{text}\n".encode())
    finally:
        os.close(fd)


def pass_gate(path: str) -> None:
    """Wait until the `Gate` lets this task pass, or the test's process has ended."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                os.read(fd, 1)  # an empty read means that the test has ended
                return
            except BlockingIOError:
                # One byte may wake several tasks: one reads it, and the others wait again.
                _reader(fd).poll()
    finally:
        os.close(fd)


# -- tasks that end their process ------------------------------------------------------------------

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
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # Only the main thread can set handlers.
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Another thread may get the signal, so wait until it has ended the process.
        threading.Event().wait(None if number == signal.SIGSTOP else 30)
    raise ValueError(f"{how!r} is not one of {', '.join(WAYS)}")


class EndsWhenUnpickled:
    """An object that can be pickled, but ends the process in the given way when unpickled."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return end, (self.how,)


class EndsWhenPickled(EndsWhenUnpickled):
    """An object that ends the process in the given way when it is pickled."""

    def __reduce__(self) -> Any:
        end(self.how)
        raise AssertionError("not reached")


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
    "result pickle": lambda how: (EndsWhenPickled, (how,)),
    "result unpickle": lambda how: (EndsWhenUnpickled, (how,)),
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
