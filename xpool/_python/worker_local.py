"""What each worker has one of, in a process that may have several workers as threads."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

__all__ = ["WorkerLocal", "process_is_shared", "share_process"]

T = TypeVar("T")

# Set before the workers' threads start, and never back: it needs no lock.
_shared = False


def share_process() -> None:
    """Note that this process has several workers, each a thread: what is set is a thread's own."""
    global _shared
    _shared = True


def process_is_shared() -> bool:
    """Whether this process has several workers."""
    return _shared


class WorkerLocal(Generic[T]):
    """This thread's, else the process's.

    Where the process is one worker, it has one, and threads that a task starts find it as well.
    Where it has several, such threads belong to none.
    """

    def __init__(self) -> None:
        self._process: T | None = None
        self._local = threading.local()

    def get(self) -> T | None:
        """Return the one of the worker that this thread is, or belongs to; None: there is none."""
        one: T | None = getattr(self._local, "one", None)
        return self._process if one is None else one

    def set(self, one: T | None, *, thread: bool = False) -> None:
        """Make it this worker's; ``thread``: this thread's only, whatever the process is."""
        if thread or _shared:
            self._local.one = one
        else:
            self._process = one
