"""A value for each worker, for processes that may have several workers as threads."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")

_shared = False  # needs no lock: set before the workers' threads start, and never reset


def share_process() -> None:
    """Record that this process has several workers, each of which is a thread."""
    global _shared
    _shared = True


def process_is_shared() -> bool:
    return _shared


class WorkerLocal(Generic[T]):
    """A value of this thread or, if it has none, of the process.

    If the process is one worker, threads that a task starts get the worker's value.  If it has
    several workers, such threads have no value.
    """

    def __init__(self) -> None:
        self._process: T | None = None
        self._local = threading.local()

    def get(self) -> T | None:
        one: T | None = getattr(self._local, "one", None)
        return self._process if one is None else one

    def set(self, one: T | None, *, thread: bool = False) -> None:
        """Set the value of this worker or, with ``thread``, only of this thread."""
        if thread or _shared:
            self._local.one = one
        else:
            self._process = one
