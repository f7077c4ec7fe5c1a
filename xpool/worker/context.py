"""Who am I?  `current_worker()` for code that runs inside a task."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

__all__ = ["WorkerInfo", "current_worker", "enter", "leave"]


@dataclass(frozen=True)
class WorkerInfo:
    """The worker that runs the current task.

    ``index`` counts from 0 and outlives the process: a replacement has the index of the one
    it replaces.  ``context`` is this worker's context (`CtxPool`), else None.
    """

    index: int
    pool: str
    context: Any = None

    @property
    def device(self) -> Any:
        """The device that this worker is bound to: its context's, or None."""
        return getattr(self.context, "device", None)


# A worker process has one worker, in its main thread, and threads that its tasks start belong to
# it; a thread pool has one worker for each thread.  So: this thread's, else the process's.
_local = threading.local()
_process: WorkerInfo | None = None


def enter(info: WorkerInfo, *, thread: bool = False) -> None:
    """Make ``info`` the worker of this thread, or of this whole process."""
    global _process
    if thread:
        _local.info = info
    else:
        _process = info


def leave() -> None:
    """Forget the worker of this thread: it serves no pool any more."""
    _local.info = None


def current_worker() -> WorkerInfo:
    """Return the worker that runs the calling task.

    Raises:
        RuntimeError: the caller is not inside a task of an xpool pool.
    """
    info = getattr(_local, "info", None) or _process
    if info is None:
        raise RuntimeError(
            "current_worker() was called outside a task; it is for functions that a pool runs"
        )
    return info
