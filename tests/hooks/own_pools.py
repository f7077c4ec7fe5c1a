"""Two subclasses of `BasePool`, written from the documentation of its hooks."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import threading
from typing import Any

from xpool import BasePool


class QueuePool(BasePool):
    """Workers with two queues."""

    tasks: Any
    answers: Any
    workers: list[Any]
    started: int

    def make_worker(self, *options: Any) -> Any:
        """Return a thread or process that runs `worker`."""
        raise NotImplementedError

    def pool_inqueue_put(self, task: Any) -> None:
        self.tasks.put(task)

    def pool_outqueue_get(self, timeout: float | None = None) -> Any:
        return self.answers.get(timeout=timeout)

    def repopulate_pool(self) -> None:
        options = self.initializer, self.initargs, self.maxtasksperchild
        while len(self.workers) < self.size():
            worker = self.make_worker(*options)
            worker.start()
            self.started += 1
            self.workers.append(worker)

    def maintain_pool(self) -> bool:
        living = [worker for worker in self.workers if worker.is_alive()]
        ended = len(living) < len(self.workers)
        self.workers[:] = living
        return ended


class QueueThreadPool(QueuePool):
    """Threads with two queues of `queue.SimpleQueue`."""

    def setup_queues(self) -> None:
        self.tasks = queue.SimpleQueue()
        self.answers = queue.SimpleQueue()
        self.workers = []
        self.started = 0

    def make_worker(self, *options: Any) -> Any:
        args = self.tasks.get, self.answers.put, *options
        return threading.Thread(target=self.worker, args=args, daemon=True)

    def terminate_workers(self) -> None:
        while True:
            try:
                self.tasks.get_nowait()
            except queue.Empty:
                break
        for _ in self.workers:
            self.tasks.put(None)

    def join_workers(self) -> None:
        for thread in self.workers:
            thread.join()


class QueueProcessPool(QueuePool):
    """Processes with two queues of `multiprocessing`."""

    def setup_queues(self) -> None:
        self.mp = multiprocessing.get_context("forkserver")
        self.tasks = self.mp.Queue()
        self.answers = self.mp.Queue()
        self.workers = []
        self.started = 0

    def make_worker(self, *options: Any) -> Any:
        args = type(self), self.tasks, self.answers, *options
        return self.mp.Process(target=run_worker, args=args, daemon=True)

    def terminate_workers(self) -> None:
        for process in self.workers:
            process.terminate()

    def join_workers(self) -> None:
        for process in self.workers:
            process.join()
            process.close()
        self.workers.clear()
        for own in (self.tasks, self.answers):
            own.close()
            own.cancel_join_thread()
        # The last reference closes their semaphores and pipes.
        del self.tasks, self.answers, own


def run_worker(
    kind: type[BasePool],
    tasks: Any,
    answers: Any,
    initializer: Any,
    initargs: Any,
    maxtasks: int | None,
) -> None:
    """Run the default loop with queues, in a process."""

    def put(answer: Any) -> None:
        # A `Queue` pickles in its own thread, where an error would be lost.
        pickle.dumps(answer)
        answers.put(answer)

    kind.worker(tasks.get, put, initializer, initargs, maxtasks)
    answers.close()
    answers.join_thread()
