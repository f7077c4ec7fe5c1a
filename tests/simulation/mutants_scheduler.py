"""More mutants of the scheduler, which the world of the scheduler must find."""

from __future__ import annotations

from typing import Any

from xpool._engine.jobs.ranges import TaskRange, covers
from xpool._engine.jobs.scheduler import Scheduler
from xpool._engine.jobs.waiting import Waiting

from .mutants import Patch, mutant, wrap

__all__: list[str] = []


@mutant("held tasks of a withdrawn job wait again", "scheduler")
def _(patch: Patch) -> None:
    def withdraw(original: Any, sched: Scheduler, *which: Any) -> Any:
        holders = original(sched, *which)
        for in_flight in sched.in_flight:
            for batch in in_flight.held:
                batch.withdrawn = False
        return holders

    wrap(patch, Scheduler, "withdraw", withdraw)


@mutant("a task of a withdrawn job that waits for its retry stays", "scheduler")
def _(patch: Patch) -> None:
    def strike(original: Any, waiting: Waiting, job: int, index: int | None) -> None:
        kept = [(when, one) for when, _, one in waiting.later._heap if covers(one, job, index)]
        original(waiting, job, index)
        for when, one in kept:
            waiting.later.put(when, one)

    wrap(patch, Waiting, "strike", strike)


@mutant("a bound task goes to any worker", "scheduler")
def _(patch: Patch) -> None:
    def queue_of(original: Any, waiting: Waiting, task_range: TaskRange) -> Any:
        return waiting.shared if task_range.bound is not None else original(waiting, task_range)

    wrap(patch, Waiting, "_queue", queue_of)


@mutant("tasks that wait for a worker do not count as its load", "scheduler")
def _(patch: Patch) -> None:
    def least_loaded(original: Any, sched: Scheduler, newest: bool = False) -> int:
        return min(range(sched.size), key=lambda w: sched.in_flight[w].size)

    wrap(patch, Scheduler, "least_loaded", least_loaded)


@mutant("a worker's last task counts as running after its answer", "scheduler")
def _(patch: Patch) -> None:
    def running(original: Any, sched: Scheduler, w: int, began: int) -> Any:
        for batch in sched.in_flight[w].held:
            position = began - 1 - batch.seq
            if 0 <= position < len(batch.items):
                return batch, position
        return None

    wrap(patch, Scheduler, "running", running)


@mutant("a worker takes its share of all workers, also where the others are idle", "scheduler")
def _(patch: Patch) -> None:
    def most_items(original: Any, sched: Scheduler, in_flight: Any, n: int, *how: Any) -> int:
        return original(sched, in_flight, n, how[0], sched.size)  # type: ignore[no-any-return]

    wrap(patch, Scheduler, "_most_items", most_items)


@mutant("tasks that a worker holds beside a bound one are not taken back", "scheduler", 378)
def _(patch: Patch) -> None:
    def surplus(original: Any, sched: Scheduler, w: int, began: int) -> bool:
        bound = any(batch.bound is not None for batch in sched.in_flight[w].held)
        return not bound and original(sched, w, began)

    wrap(patch, Scheduler, "surplus", surplus)
