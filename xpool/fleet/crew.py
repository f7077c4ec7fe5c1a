"""Worker threads: the crew of the thread pools."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from xpool.errors import WorkerStartFailed
from xpool.options import START_ATTEMPTS
from xpool.worker.context import WorkerInfo, enter, leave

__all__ = ["ThreadCrew"]


class ThreadCrew:
    """Threads that take tasks from one queue; none of them holds the pool."""

    def __init__(
        self,
        size: int,
        work: Callable[..., None],
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
        lifetime: int | None,
        contexts: list[Any] | None,
        name: str,
    ) -> None:
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.results: deque[Any] = deque()
        self.failure: BaseException | None = None
        self.dropped = False
        self._size = size
        self._work = work
        self._initializer = initializer
        self._initargs = initargs
        self._lifetime = lifetime
        self._contexts = contexts
        self._name = name
        self._signal = threading.Semaphore(0)
        self._failures = 0
        self._ending = False
        # The threads by index; a replacement takes the place of the one that ended.
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}

    def start_missing(self) -> None:
        """Start a thread for every index that has none."""
        with self._lock:
            for index in range(self._size):
                if index not in self._threads and not self._ending:
                    thread = threading.Thread(
                        target=self._run,
                        args=(index,),
                        name=f"{self._name}-worker-{index}",
                        daemon=True,
                    )
                    self._threads[index] = thread
                    thread.start()

    def _run(self, index: int) -> None:
        context = self._contexts[index] if self._contexts is not None else None
        enter(WorkerInfo(index, self._name, context), thread=True)
        try:
            try:
                if self._initializer is not None:
                    self._initializer(*self._initargs)
            except BaseException as exc:
                self._failed(index, exc)
                return
            self._failures = 0
            self._work(self.tasks.get, self.put, None, (), self._lifetime)
        finally:
            leave()
            with self._lock:
                del self._threads[index]
            if not self._ending and self.failure is None:
                self.start_missing()
            self.wake()

    def _failed(self, index: int, exc: BaseException) -> None:
        self._failures += 1
        if self._failures >= START_ATTEMPTS and self.failure is None:
            failure = WorkerStartFailed(index, self._failures, f"{type(exc).__name__}: {exc}")
            failure.__cause__ = exc
            self.failure = failure

    def put(self, result: Any) -> None:
        """Take a result from a worker."""
        self.results.append(result)
        self._signal.release()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until there is a result, or something else to look at."""
        self._signal.acquire(timeout=timeout)

    def wake(self) -> None:
        """Make `wait` return."""
        self._signal.release()

    def drop(self) -> None:
        """Note that the pool is gone.  For the garbage collector: takes no lock of ours."""
        self.dropped = True
        self._signal.release()

    def release(self) -> None:
        """Let each thread end when the queue is empty."""
        self._ending = True
        for _ in range(self._size):
            self.tasks.put(None)

    def terminate(self) -> None:
        """Drop what waits; the threads end after the task they are in."""
        self._ending = True
        try:
            while True:
                self.tasks.get_nowait()
        except queue.Empty:
            pass  # that was the last; the threads take from it too, so it cannot be counted
        self.release()

    @property
    def ended(self) -> bool:
        """Whether all threads have ended."""
        return self._ending and not self._threads

    def join(self) -> None:
        """Wait for all threads."""
        while not self.ended:
            self.wait()
        for thread in list(self._threads.values()):
            thread.join()

    def close(self) -> None:
        """Nothing is held."""

    def after_fork_in_child(self) -> None:
        """The threads were not copied."""
        self._lock = threading.Lock()
        self._ending = True
        self._threads = {}
