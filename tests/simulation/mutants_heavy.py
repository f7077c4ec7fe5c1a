"""Mutants of heavy functions, whose tasks wait for memory; the simulated worlds must find them."""

from __future__ import annotations

from typing import Any

from xpool._engine.jobs import heavy
from xpool._engine.jobs.heavy import HeavyFunctions
from xpool._engine.jobs.scheduler import Scheduler

from .mutants import Patch, give_none, mutant, nothing, wrap

__all__: list[str] = []


@mutant("a heavy task begins where the memory is not enough", "scheduler")
def _(patch: Patch) -> None:
    def may_begin(original: Any, its: HeavyFunctions, w: int, part: Any, holding: Any) -> Any:
        return original(its, w, part, [v for v in holding if v == w])

    wrap(patch, HeavyFunctions, "may_begin", may_begin)


@mutant("a heavy task waits for memory although none runs", "scheduler")
def _(patch: Patch) -> None:
    def may_begin(original: Any, its: HeavyFunctions, w: int, part: Any, holding: Any) -> Any:
        free, need = its._free, its.needs.get(its.name(part), 0.0)
        return original(its, w, part, holding) and need <= free

    wrap(patch, HeavyFunctions, "may_begin", may_begin)


@mutant("a heavy task is given to a worker that has others", "scheduler")
def _(patch: Patch) -> None:
    def may_begin(original: Any, its: HeavyFunctions, w: int, part: Any, holding: Any) -> Any:
        return original(its, w, part, [v for v in holding if v != w])

    wrap(patch, HeavyFunctions, "may_begin", may_begin)


@mutant("a worker gets several heavy tasks", "scheduler")
def _(patch: Patch) -> None:
    def most(original: Any, sched: Scheduler, w: int, task_range: Any, n: int) -> Any:
        return n if original(sched, w, task_range, n) else 0

    wrap(patch, Scheduler, "_most_by_memory", most)


@mutant("a call goes past heavy tasks that wait", "scheduler")
def _(patch: Patch) -> None:
    def add(original: Any, its: HeavyFunctions, *which: Any) -> None:
        original(its, *which)
        its._busy.discard(its)

    wrap(patch, HeavyFunctions, "add", add)


@mutant("the memory that a function is expected to need never falls", "scheduler")
def _(patch: Patch) -> None:
    patch.setattr(heavy, "FALL", 1.0)


@mutant("a task that ran when its function became heavy does not count", "scheduler")
def _(patch: Patch) -> None:
    def add(original: Any, its: HeavyFunctions, part: Any, seen: float, held: Any) -> None:
        original(its, part, seen, ())

    wrap(patch, HeavyFunctions, "add", add)


@mutant("a function is heavy for ever", "scheduler")
def _(patch: Patch) -> None:
    patch.setattr(HeavyFunctions, "forget", nothing)


@mutant("a function is forgotten before its task has run alone", "scheduler")
def _(patch: Patch) -> None:
    def measured(original: Any, sched: Scheduler, *what: Any) -> None:
        original(sched, *what)
        sched.heavy.forget(sched.size)

    wrap(patch, Scheduler, "measured", measured)


@mutant("no task is given when a heavy one has ended")
def _(patch: Patch) -> None:
    give_none(patch, "_after_answers", lambda sched: sched.heavy in sched.queued)


@mutant("no task is given when a heavy one is dropped", pinned=3827)
def _(patch: Patch) -> None:
    give_none(patch, "withdraw", lambda sched: sched.heavy in sched.queued)
