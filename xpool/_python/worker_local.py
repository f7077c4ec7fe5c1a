"""A value for each worker, for processes that may have several workers as threads."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")

shared = False
"""Whether this process has several workers: set before their threads start, and never reset."""


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
        if thread or shared:
            self._local.one = one
        else:
            self._process = one
