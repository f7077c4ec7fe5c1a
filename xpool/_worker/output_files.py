"""Puts what a task prints into a file of its own: ``output="files"``.

The file takes the place of the descriptors 1 and 2 while the task runs.  So it also gets what C
code and child processes write, and what a logging handler of an earlier task writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xpool._python.exits import flush

_MODE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)

# The process, and copies of its descriptors 1 and 2 from before its first task.
_before: tuple[int, int, int] | None = None


@contextmanager
def output_to(path: str) -> Iterator[None]:
    """Make the descriptors 1 and 2 a file in the block."""
    global _before
    if _before is None or _before[0] != os.getpid():
        _before = os.getpid(), os.dup(1), os.dup(2)
        sys.stdout, sys.stderr = _stream(sys.stdout, 1), _stream(sys.stderr, 2)
    _, *before = _before
    _flush()
    try:
        fd = os.open(path, _MODE, 0o666)
    except FileNotFoundError:  # on another host, or removed
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, _MODE, 0o666)
    try:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        yield
    finally:
        try:
            _flush()
            if os.fstat(fd).st_size == 0:
                os.unlink(path)
        finally:
            os.dup2(before[0], 1)
            os.dup2(before[1], 2)
            os.close(fd)


def _stream(stream: Any, fd: int) -> Any:
    """Return a stream that writes each line to ``fd`` at once, so that a killed task leaves it."""
    try:
        if stream.fileno() == fd:
            stream.reconfigure(line_buffering=True)
            return stream
    # The stream is None, or an object of a notebook or a test that writes elsewhere.
    except (AttributeError, OSError, ValueError):
        pass
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _flush() -> None:
    """Write what Python and C have buffered."""
    import ctypes  # imported here because few programs need it

    flush()
    ctypes.CDLL(None).fflush(None)
