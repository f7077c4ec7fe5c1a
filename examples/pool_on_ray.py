"""A pool whose workers are Ray's actors, made with the hooks of `BasePool` alone.

    pip install xpool[ray]; python examples/pool_on_ray.py

It has all verbs, results, callbacks, progress and executors, on all nodes of the cluster that
`ray.init` finds.  It lacks the features of xpool's own engine: time limits, retries, `cancel` of
running tasks, binding to devices, several tasks in one message, and tensors in shared memory.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from typing import Any

import ray

from xpool import BasePool, WorkerDied


class Actor:
    """Runs in a worker's process."""

    def __init__(self, initializer: Any, initargs: tuple[Any, ...]) -> None:
        if initializer is not None:
            initializer(*initargs)

    def run(self, task: Any) -> Any:
        """Return the task's answer, which may be an error."""
        answers: list[Any] = []
        BasePool.worker(iter([task, None]).__next__, answers.append)
        return answers[0]


class RayPool(BasePool):
    """A pool whose workers are actors of a Ray cluster, with one CPU each."""

    def setup_queues(self) -> None:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="ERROR")
        self.lock = threading.Lock()  # guards `tasks` and `idle`
        self.tasks: deque[Any] = deque()
        self.idle: list[Any] = []
        self.actors: list[Any] = []
        self.dead: list[Any] = []
        self.results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def pool_inqueue_put(self, obj: Any) -> None:
        if obj is not None:
            self.give(task=obj)

    def give(self, actor: Any = None, task: Any = None) -> None:
        """Add an idle actor or a new task; if there are both, send a task to an actor."""
        with self.lock:
            self.idle += [actor] if actor is not None else []
            self.tasks += [task] if task is not None else []
            if not (self.idle and self.tasks):
                return
            actor, task = self.idle.pop(), self.tasks.popleft()
        future = actor.run.remote(task).future()
        future.add_done_callback(lambda done: self.answered(actor, task, done))

    def answered(self, actor: Any, task: Any, done: Any) -> None:
        """Store an answer.  A thread of Ray calls this."""
        try:
            self.results.put(done.result())
        except ray.exceptions.RayActorError:
            self.dead.append(actor)
            died = WorkerDied(None, None, self.actors.index(actor), task[2].__name__)
            self.results.put((*task[:2], (False, died)))
        except Exception as error:  # a task or a result that Ray cannot send
            self.results.put((*task[:2], (False, error)))
            self.give(actor)
        else:
            self.give(actor)

    def pool_outqueue_get(self, timeout: float) -> Any:
        return self.results.get(timeout=timeout)

    def repopulate_pool(self) -> None:
        for _ in range(self.size() - len(self.actors)):
            actor = ray.remote(num_cpus=1)(Actor).remote(self.initializer, self.initargs)
            self.actors.append(actor)
            self.give(actor)

    def maintain_pool(self) -> bool:
        gone = [self.dead.pop() for _ in range(len(self.dead))]
        self.actors = [actor for actor in self.actors if actor not in gone]
        return bool(gone)

    def terminate_workers(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def join_workers(self) -> None:
        self.terminate_workers()


def evaluate(seed: int) -> float:
    """Return the score of an imaginary model."""
    import random

    return max(random.Random(seed).random() for _ in range(10_000))


def main() -> None:
    with RayPool(2) as pool:
        scores = pool.map(evaluate, range(20))
        best = max(range(20), key=scores.__getitem__)
        print(f"candidate {best} is the best of {len(scores)}: {scores[best]:.6f}")
        try:
            pool.apply(os._exit, (3,))
        except WorkerDied:
            print("a task killed its worker, and the pool continues:", pool.map(abs, [-1, -2]))
    ray.shutdown()


if __name__ == "__main__":
    main()
