"""What pools need of the workers behind them.

`BasePool` needs a `WorkerBackend`, which `ThreadWorkers` is; pools of processes give ranges of
tasks to an `EngineProtocol`, which engines over hosts implement, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from xpool._calls.results import PickledResult
from xpool._engine.jobs.scheduler import Limit, TaskRange

if TYPE_CHECKING:
    from xpool._engine.ledger import Slow, Work

__all__ = ["EngineProtocol", "LocalEngine", "WorkerBackend"]


class WorkerBackend(Protocol):
    """The workers of a pool, without the pool: what its thread may hold while it waits."""

    dropped: bool
    """Whether the pool is gone, and the workers must be."""

    @property
    def failure(self) -> BaseException | PickledResult | None:
        """Why they can do nothing more; a parcel is opened by those who raise it."""

    @property
    def ended(self) -> bool:
        """Whether all workers have ended."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until something has happened."""

    def wake(self) -> None:
        """Make `wait` return."""

    def drop(self) -> None:
        """Set `dropped` and make `wait` return; for the garbage collector: takes no lock."""

    def terminate(self) -> None:
        """Stop the workers now."""

    def close(self) -> None:
        """Let go of everything; all workers have ended."""

    def after_fork_in_child(self) -> None:
        """Have nothing more to do with workers that are another process's."""


class EngineProtocol(WorkerBackend, Protocol):
    """Workers that take ranges of tasks.  All methods may be called by any thread."""

    def terminate(self, at_once: bool = False) -> None:
        """Stop the workers now; ``at_once``: without asking them first."""

    results: deque[tuple[int, int, tuple[bool, Any]]]
    """Answers to be delivered: job, index, and whether it is a value; popped without a lock."""

    @property
    def idle(self) -> Collection[int]:
        """Workers that have nothing; looked at without a lock, after items came to a range."""

    def report(self) -> tuple[list[Work], list[Slow], int, int, int]:
        """Return each worker's work, the slowest tasks, bytes to workers and back, and retries."""

    def start_missing(self) -> bool:
        """Start a process for every worker that has none; return whether there was one."""

    def retire_all(self) -> None:
        """Let workers end when they have answered what they hold: nothing more will come."""

    def submit(self, *ranges: TaskRange) -> None:
        """Queue ranges of tasks, at one moment."""

    def submit_call(
        self, number: int, payload: bytes | memoryview, retries: int, limit: Limit | None
    ) -> None:
        """Queue a call: item ``number`` of `CALLS`."""

    def call(self, task_range: TaskRange) -> None:
        """Submit a range of one call for a caller that waits; may receive its answer here."""

    def feed(self, task_range: TaskRange) -> None:
        """See to it that a range to which items were appended is queued, and the idle get it."""

    def resume(self) -> None:
        """Give out what waits: some that was kept from running may run.  Takes no lock."""

    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        """Keep a function for the workers; return the number that tasks call it by."""

    def forget(self, func: int) -> None:
        """Let workers drop a function: its job is done."""

    def withdraw(self, job: int, index: int | None = None) -> None:
        """Give nobody what still waits of a job that has ended, and stop what runs of it."""

    def runs(self, job: int, index: int | None = None) -> bool:
        """Whether a worker is in a task of this job now, or in that task."""

    def sent(self, payload: bytes | memoryview) -> int:
        """Return how many bytes of memory a message holds; it was made for a worker."""

    def statistics(self) -> dict[str, Any]:
        """Return counts: of workers (ready, deaths), of tasks (waiting, running), and ``pids``."""


class LocalEngine(EngineProtocol, Protocol):
    """An engine that has its workers here, and may work for a driver elsewhere."""

    def give_back(self, job: int, items: range) -> None:
        """Hand back those of these items that nobody has begun, each as a result without a value
        whose ``ok`` is None: what waits now, what a worker has when it is seen to sit on it."""
