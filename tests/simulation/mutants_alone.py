"""Mutants of tasks that run alone, which the simulated worlds must find."""

from __future__ import annotations

import math
from typing import Any

from xpool._calls.terms import Terms
from xpool._engine.jobs.scheduler import Scheduler, TaskRange

from .mutants import Patch, give_none, mutant, wrap

__all__: list[str] = []


@mutant("others are given beside a task that runs alone", "scheduler")
def _(patch: Patch) -> None:
    def beside(original: Any, sched: Scheduler, w: int) -> Any:
        found = original(sched, w)
        return found if sched.lone is None else sched._queues(w)

    wrap(patch, Scheduler, "_beside_alone", beside)


@mutant("a task that runs alone begins beside others", "scheduler")
def _(patch: Patch) -> None:
    def beside(original: Any, sched: Scheduler, w: int) -> Any:
        return (sched.alone,) if sched.alone.first() is not None else original(sched, w)

    wrap(patch, Scheduler, "_beside_alone", beside)


@mutant("a call is given beside a task that runs alone", "scheduler")
def _(patch: Patch) -> None:
    def cut(original: Any, sched: Scheduler, w: int, among: int) -> Any:
        found = original(sched, w, among)
        if found is not None and sched.lone == w and not sched.alone:
            sched.queued.discard(sched.alone)
        return found

    wrap(patch, Scheduler, "_cut", cut)


@mutant("no others are given after a task that ran alone", "scheduler")
def _(patch: Patch) -> None:
    def beside(original: Any, sched: Scheduler, w: int) -> Any:
        return () if sched.lone is not None else original(sched, w)

    wrap(patch, Scheduler, "_beside_alone", beside)


def _bound_before(patch: Patch, before: Any) -> None:
    def put_back(original: Any, sched: Scheduler, task_range: TaskRange) -> None:
        original(sched, task_range)
        if task_range.terms.alone:
            sched._before = before

    wrap(patch, Scheduler, "put_back", put_back)


@mutant("bound tasks wait behind a later one that runs alone", "scheduler")
def _(patch: Patch) -> None:
    _bound_before(patch, {})


@mutant("bound tasks go before an earlier one that runs alone", "scheduler")
def _(patch: Patch) -> None:
    _bound_before(patch, _Always())


class _Always(dict[Any, float]):
    def get(self, key: Any, default: Any = None) -> float:
        return math.inf


@mutant("a task runs alone once and then beside others", "scheduler", 35735)
def _(patch: Patch) -> None:
    def after(original: Any, terms: Terms, killed: bool, alone: bool) -> Any:
        return original(terms, killed, alone)._replace(alone=alone)

    wrap(patch, Terms, "after_failure", after)


@mutant("no task is given when a worker that held up one alone is free")
def _(patch: Patch) -> None:
    give_none(patch, "_after_answers", lambda sched: sched.alone in sched.queued)


@mutant("no task is given when one that was to run alone is dropped", pinned=3827)
def _(patch: Patch) -> None:
    give_none(patch, "withdraw", lambda sched: True)
