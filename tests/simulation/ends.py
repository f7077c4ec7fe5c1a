"""The engine of a pool with ``on_worker_end=``: the world is told of each end, and takes its time.

A call of the hook begins when the engine's thread makes it, and returns in any later turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xpool._engine.ledger import WorkerEnd

from .engine import EngineWorld

__all__ = ["EndsWorld"]

REASONS = {"died", "stopped", "start failed", "recycled", "resized", "closed", "terminated"}


class EndsWorld(EngineWorld):
    """An `EngineWorld` that is told of each end, once, before the next process starts there."""

    name = "ends"

    def __init__(self, seed: int) -> None:
        self.running: list[tuple[WorkerEnd, Callable[[], None]]] = []
        self.owed: list[tuple[int, int]] = []  # the workers and pids of processes
        super().__init__(seed)

    def on_end(self, end: WorkerEnd, told: Callable[[], None]) -> None:  # type: ignore[override]
        """The engine tells the pool of an end, without its lock."""
        self.note(f"{self.now:.6f}", "told of", end)
        if self.engine.lock._is_owned():
            self.wrong("the engine calls the hook with its lock held")
        if end.reason not in REASONS:
            self.wrong(f"worker {end.worker} has ended for no known reason: {end.reason}")
        if any(one.pid == end.pid and one.index == end.worker for one in self.workers):
            self.wrong(f"the pool is told of the end of process {end.pid}, which lives")
        if (end.worker, end.pid) not in self.owed:
            self.wrong(f"the pool is told twice, or of no process: {end}")
        self.owed.remove((end.worker, end.pid))
        self.running.append((end, told))

    def acts(self) -> list[Callable[[], None]]:
        return super().acts() + [self.hook_returns] * bool(self.running)

    def hook_returns(self) -> None:
        """A call of the hook returns."""
        end, told = self.running.pop(self.draw.hook.below(len(self.running)))
        self.note(f"{self.now:.6f}", "the hook of worker", end.worker, "returns")
        told()

    def spawn(self, slot: Any, *parts: Any) -> Any:
        handle = super().spawn(slot, *parts)
        ends = [end for end, _ in self.running if end.worker == slot.index]
        if ends or any(worker == slot.index for worker, _ in self.owed):
            self.wrong(f"worker {slot.index} is started before the hook has returned")
        self.owed.append((slot.index, self.workers[-1].pid))
        return handle

    def play(self) -> None:
        super().play()
        if self.owed or self.running:
            self.wrong(f"the pool has ended, and was not told of {self.owed} {self.running}")
