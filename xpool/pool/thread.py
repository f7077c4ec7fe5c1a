"""`ThreadPool`: worker threads, the same verbs, objects passed by reference."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from typing import Any

from xpool.fleet.crew import ThreadCrew
from xpool.pool.base import BasePool
from xpool.pool.hooks import Result, Task

__all__ = ["ThreadPool"]


class ThreadPool(BasePool):
    """A pool of threads.  A thread cannot be stopped: `terminate` lets running tasks end.

    Takes the arguments of `Pool`, so that one can stand in for the other; those that are about
    processes and pickling have no effect here.
    """

    _terminate_waits = False

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(processes, initializer, initargs, maxtasksperchild, name=name)

    def setup_queues(self) -> None:
        """Make the queue that the threads take from."""
        self._threads = ThreadCrew(
            self._size,
            self._work(),
            self.initializer,
            self.initargs,
            self.maxtasksperchild,
            self._worker_contexts(),
            self.name,
        )
        self._crew = self._threads

    def _work(self) -> Callable[..., None]:
        return self.worker

    def _worker_contexts(self) -> list[Any] | None:
        return None

    def pool_inqueue_put(self, task: Task | None) -> None:
        """Queue a task."""
        self._threads.tasks.put(task)

    def pool_outqueue_get(self, timeout: float) -> Result:
        """Return the next result."""
        results = self._threads.results
        if not results and timeout > 0:
            self._threads.wait(timeout)
        if results:
            result: Result = results.popleft()
            return result
        raise queue.Empty

    def repopulate_pool(self) -> None:
        """Start the threads that are missing."""
        self._threads.start_missing()

    def maintain_pool(self) -> bool:
        """Nothing is left to do: a thread that ends starts its successor."""
        return False

    def terminate_workers(self) -> None:
        """Drop what waits and let the threads end."""
        self._threads.terminate()

    def join_workers(self) -> None:
        """Wait for the threads."""
        self._threads.join()

    def _release_workers(self) -> None:
        self._threads.release()
