"""The interfaces that pools use of their workers.

`BasePool` needs a `WorkerBackend`, such as `ThreadWorkers`.  Pools of processes give ranges of
tasks to an `EngineProtocol`.  Engines over hosts implement it, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from xpool._calls.results import PickledResult
from xpool._engine.jobs.scheduler import TaskRange, Terms

if TYPE_CHECKING:
    from xpool._engine.ledger import EngineReport


class WorkerBackend(Protocol):
    """The workers of a pool.  While the pool's thread waits, it refers to them, not to the pool."""

    guards: list[Any]
    """Reentrant locks.  A finalizer that has interrupted a holder must not wait for the pool."""

    dropped: bool
    """Whether the pool is gone, so that the workers must end."""

    @property
    def failure(self) -> BaseException | PickledResult | None:
        """Why the workers have stopped; None: they have not.  May still be pickled."""

    @property
    def ended(self) -> bool:
        """Whether all workers have ended."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until something has happened."""

    def wake(self) -> None:
        """Make `wait` return."""

    def drop(self) -> None:
        """Set `dropped` and make `wait` return.  Takes no lock: the garbage collector calls it."""

    def terminate(self) -> None:
        """Stop the workers now."""

    def close(self) -> None:
        """Release everything; all workers have ended."""

    def after_fork_in_child(self) -> None:
        """Forget the workers, which belong to the parent."""


class EngineProtocol(WorkerBackend, Protocol):
    """Workers that take ranges of tasks.  All methods may be called by any thread."""

    def terminate(self, at_once: bool = False) -> None:
        """Stop the workers now; ``at_once``: without asking them first."""

    results: deque[tuple[int, int, tuple[bool, Any]]]
    """Answers to be delivered: job, index, and (ok, value or error).  Popped without a lock."""

    @property
    def idle(self) -> Collection[int]:
        """Idle workers; read without a lock after items were appended to a range."""

    def report(self) -> EngineReport:
        """Return what the workers have done."""

    def start_missing(self) -> bool:
        """Start a process for every worker that has none; return whether there was one."""

    def retire_all(self) -> None:
        """Let workers end when they have answered all tasks; no more will be submitted."""

    def submit(self, *ranges: TaskRange) -> None:
        """Queue ranges of tasks, with no others in between."""

    def submit_call(self, number: int, payload: bytes | memoryview, terms: Terms) -> None:
        """Queue a call: item ``number`` of `CALLS`."""

    def put_direct(
        self, number: int, payload: bytes | memoryview, bound: int | None, terms: Terms
    ) -> Any:
        """Submit call ``number`` for a caller that waits.  Return the worker whose answer this
        thread receives by `await_answer`; None: the engine's thread receives it."""

    def await_answer(self, worker: Any, number: int) -> None:
        """Receive the answer of call ``number``, or leave it to the engine's thread.

        If a signal handler raises here, `withdraw` ends the turn.
        """

    def receive_call(self, number: int, milliseconds: float) -> BaseException | None:
        """Receive the answer of a call in this thread if it comes within that time and the engine
        can do so.  Returns what was raised meanwhile, or None."""

    def feed(self, task_range: TaskRange) -> None:
        """Queue a range to which items were appended, and give them to idle workers."""

    def resume(self) -> None:
        """Give waiting tasks to workers, because held ones may run now.  Takes no lock."""

    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        """Keep a function for the workers; return the number that tasks call it by."""

    def forget(self, func: int) -> None:
        """Let workers drop a function: its job is done."""

    def withdraw(self, job: int, index: int | None = None) -> None:
        """Drop the waiting tasks of a job that has ended, and stop its running ones."""

    def runs(self, job: int, index: int | None = None) -> bool:
        """Whether a worker now runs a task of this job, or its task ``index`` if given."""

    def sent(self, payload: bytes | memoryview) -> int:
        """Return how many bytes of memory a message to a worker holds."""

    def statistics(self) -> dict[str, Any]:
        """Return counts: of workers (ready, deaths), of tasks (waiting, running), and ``pids``."""
