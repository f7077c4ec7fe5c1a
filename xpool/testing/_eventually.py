"""Waits with a limit in seconds, and with errors that name the missing event.

A test holds a `Mailbox` or `Gate`.  Tasks in any process use it by its path, with `post` and
`pass_gate`.  So a test knows the progress of its tasks and needs no sleep.
"""

from __future__ import annotations

import errno
import os
import select
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


class Mailbox:
    """Receives lines from any process through a named pipe that the test holds open.

    Writers (`post`) need only the path, so this works with every start method.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        os.mkfifo(self.path)
        # Open for both ends (fifo(7)), so that opening does not wait, and reads find no end.
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""

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


class Gate:
    """Holds tasks that call ``pass_gate(path)`` until the test opens it, or its process ends."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        os.mkfifo(self.path)
        # Open for both ends, as in `Mailbox`.
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

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
                # If one byte wakes several tasks, one gets it and the others come here again.
                _reader(fd).poll()
    finally:
        os.close(fd)
