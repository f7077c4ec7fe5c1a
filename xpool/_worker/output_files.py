"""Puts what a task prints into a file of its own: ``output="files"``.

The file takes the place of the descriptors 1 and 2 while the task runs.  So it also gets what C
code and child processes write, and what a logging handler of an earlier task writes.  Workers call
`output_to`; the pool names the files (`TaskFiles`).
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from xpool._python.exits import flush

if TYPE_CHECKING:
    from xpool._calls.results import Job

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


class TaskFiles:
    """A new folder, and the names of the tasks' files in it."""

    # Ends of the names of the files of single items, and of single workers.
    ITEM, WORKER = "-{number:06}", "-worker-{worker}"

    def __init__(self, pool: str) -> None:
        name = os.path.abspath(f"xpool-output/{time.strftime('%Y%m%d-%H%M%S')}-{_plain(pool)}")
        for end in chain([""], (f"-{n}" for n in count(2))):
            try:
                os.makedirs(name + end)
            except FileExistsError:
                continue
            self.folder = name + end
            break

    def of(self, job: Job, called: str, end: str = "") -> tuple[str, str]:
        """Return the ``file`` of a `TaskFunction`; ``called`` names the function."""
        return os.path.join(self.folder, f"{job.number:04}-{_plain(called)}"), end


def _plain(name: str) -> str:
    """Return the part of a text that a file's name may have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80] or "task"
