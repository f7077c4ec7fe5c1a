"""Mutants: planted bugs that the simulated worlds must find.

A mutant breaks one rule: during a test it replaces a method by one that behaves differently. The
wording of the code may change freely.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from xpool._engine.answers import Answers
from xpool._engine.engine import Engine
from xpool._engine.jobs import states, waiting
from xpool._engine.jobs.ranges import covers, piece
from xpool._engine.jobs.scheduler import LONG_SECONDS, SHORT_SECONDS, InFlight, Scheduler, Terms
from xpool._engine.jobs.states import (
    WORKER,
    Act,
    Deadlines,
    EndKind,
    RestartPolicy,
    Verdict,
    WorkerEvent,
    WorkerStates,
)
from xpool._engine.jobs.waiting import HeavyFunctions, RangeQueue, Waiting
from xpool._engine.monitor import DirectReceive, WorkerMonitor
from xpool._engine.replacement import Launch, Replacement
from xpool._engine.submission import Submission
from xpool._engine.worker_process import WorkerProcess
from xpool._wire.outbox import Outbox
from xpool._wire.wire import FrameReader


@dataclass(frozen=True)
class Mutant:
    """A rule, how to break it, and the world that must find it."""

    name: str
    world: str
    seed: Callable[[pytest.MonkeyPatch], Any]

    def __str__(self) -> str:
        return self.name


class StaleMutant(BaseException):
    """A mutant does not take the arguments of the method that it replaces.  No world counts this as
    a history that goes wrong."""


MUTANTS: list[Mutant] = []

PINNED: dict[Mutant, int] = {}
"""Bugs that few histories show, each with the seed of one."""


def of_world(world):
    """Return a function that adds mutants of this world."""

    def mutant(name, owner=None, attribute="", instead=None, pinned=None):
        """Add a mutant: ``owner`` has ``instead`` as this attribute, or as this item of a dict.

        Otherwise it is a decorator: of a function ``(original, *args)`` that is called in place of
        the owner's method, or without an owner of one that gets a `MonkeyPatch`.
        """

        def add(breaks):
            def seed(patch):
                original = getattr(owner, attribute)

                def broken(*args, **kwds):
                    try:
                        return breaks(original, *args, **kwds)
                    except TypeError as exc:
                        if exc.__traceback__.tb_next is None:
                            raise StaleMutant(f"{name}: {exc}") from exc
                        raise

                patch.setattr(owner, attribute, broken)

            one = Mutant(name, world, seed if owner is not None else breaks)
            if pinned is None:
                MUTANTS.append(one)
            else:
                PINNED[one] = pinned

        if instead is None:
            return add
        changed, owner = owner, None
        put = "setitem" if isinstance(changed, dict) else "setattr"
        return add(lambda patch: getattr(patch, put)(changed, attribute, instead))

    return mutant


scheduler, engine = of_world("scheduler"), of_world("engine")

swapped = mock.patch.object
"""Replaces an attribute of an object for the time of a block."""


def nothing(*_, **__):
    """Do nothing."""


def false(*_):
    return False


def during(path, value):
    """Return a mutant of a method: while it runs, this attribute of its object has this value."""
    *owners, attribute = path.split(".")

    def call(original, one, *args, **named):
        with swapped(functools.reduce(getattr, owners, one), attribute, value):
            return original(one, *args, **named)

    return call


def give_none(when):
    """Return a mutant of a method of the monitor: it gives no task to idle workers if ``when``."""

    def silent(original, monitor, *which):
        with swapped(monitor, "give_idle", nothing if when(monitor._sched) else monitor.give_idle):
            original(monitor, *which)

    return silent


# -- the scheduler -------------------------------------------------------------------------------


@scheduler("a batch numbers its first item wrongly", Scheduler, "_cut")
def _(original, sched, w, among):
    batch = original(sched, w, among)
    if batch is not None:
        batch.seq = sched.in_flight[w].answered
    return batch


@scheduler("a dead worker's tasks are put back in the wrong order", Scheduler, "gone")
def _(original, sched, w, began):
    pieces = []
    with swapped(sched, "put_back", pieces.append):
        found = original(sched, w, began)
    for part in reversed(pieces):
        sched.put_back(part)
    return found


scheduler("a dead worker's task counts as not begun", Scheduler, "gone")(
    lambda original, sched, w, began: original(sched, w, began - 1)
)


@scheduler("a task that killed its worker is put back without a retry", Scheduler, "gone")
def _(original, sched, w, began):
    lost = original(sched, w, began)
    if lost is not None:
        sched.put_back(piece(lost[0], lost[1], lost[1] + 1))
    return lost


@engine("a retry costs no retry", Scheduler, "again")
def _(original, sched, batch, position, **how):
    batch.terms = batch.terms._replace(retries=batch.terms.retries + 1)
    original(sched, batch, position, **how)


scheduler("a worker is given one task more than its lifetime", Scheduler, "ready")(
    lambda original, sched, w, left: original(sched, w, None if left is None else left + 1)
)


@scheduler("a worker gets more tasks ahead than its share", Scheduler, "_most_held")
def _(original, sched, w):
    n = original(sched, w)
    return max(n, 8) if SHORT_SECONDS < sched.sizes.cost <= LONG_SECONDS else n


@scheduler("items that were taken back count as held", Scheduler, "take_back")
def _(original, sched, w, limit):
    count = original(sched, w, limit)
    for batch in sched.in_flight[w].held:
        batch.taken = len(batch.items)
    return count


scheduler("a retry comes too early", Scheduler, "due")(
    lambda original, sched, now: original(sched, now + 1)
)


@scheduler("an input reader that looks as its range runs dry is missed", RangeQueue, "_dry")
def _(original, queue):
    with swapped(queue._ranges[0], "items", deque()):
        return original(queue)


def stays_in_front(original, queue, *how):
    with swapped(queue._ranges[0], "flow", None):
        return original(queue, *how)


engine("an endless stream stays in front of waiting jobs", RangeQueue, "take")(stays_in_front)


@scheduler("held tasks of a withdrawn job wait again", Scheduler, "withdraw")
def _(original, sched, *which):
    holders = original(sched, *which)
    for in_flight in sched.in_flight:
        for batch in in_flight.held:
            batch.withdrawn = False
    return holders


@scheduler("a task of a withdrawn job that waits for its retry stays", Waiting, "strike")
def _(original, waiting, job, index):
    kept = [(when, one) for when, _, one in waiting.later._heap if covers(one, job, index)]
    original(waiting, job, index)
    for when, one in kept:
        waiting.later.put(when, one)


@scheduler("a bound task goes to any worker", Waiting, "_queue")
def _(original, waiting, task_range):
    return waiting.shared if task_range.bound is not None else original(waiting, task_range)


@scheduler("tasks that wait for a worker do not count as its load", Scheduler, "least_loaded")
def _(original, sched, newest=False):
    return min(range(sched.size), key=lambda w: sched.in_flight[w].size)


@scheduler("a worker's last task counts as running after its answer", Scheduler, "running")
def _(original, sched, w, began):
    for batch in sched.in_flight[w].held:
        position = began - 1 - batch.seq
        if 0 <= position < len(batch.items):
            return batch, position
    return None


@scheduler(
    "a worker takes its share of all workers, also where the others are idle",
    Scheduler,
    "_most_items",
)
def _(original, sched, in_flight, n, *how):
    return original(sched, in_flight, n, how[0], sched.size)


@scheduler(
    "tasks that a worker holds beside a bound one are not taken back",
    Scheduler,
    "surplus",
    pinned=378,
)
def _(original, sched, w, began):
    bound = any(batch.bound is not None for batch in sched.in_flight[w].held)
    return not bound and original(sched, w, began)


# -- tasks that run alone --------------------------------------------------------------------------


@scheduler("others are given beside a task that runs alone", Scheduler, "_beside_alone")
def _(original, sched, w):
    found = original(sched, w)
    return found if sched.lone is None else sched._queues(w)


@scheduler("a task that runs alone begins beside others", Scheduler, "_beside_alone")
def _(original, sched, w):
    return (sched.alone,) if sched.alone.first() is not None else original(sched, w)


@scheduler("a call is given beside a task that runs alone", Scheduler, "_cut")
def _(original, sched, w, among):
    found = original(sched, w, among)
    if found is not None and sched.lone == w and not sched.alone:
        sched.queued.discard(sched.alone)
    return found


scheduler("no others are given after a task that ran alone", Scheduler, "_beside_alone")(
    lambda original, sched, w: () if sched.lone is not None else original(sched, w)
)


def bound_before(before):
    def put_back(original, sched, task_range):
        original(sched, task_range)
        if task_range.terms.alone:
            sched._before = before

    return put_back


class Always(dict):
    def get(self, key, default=None):
        return math.inf


scheduler("bound tasks wait behind a later one that runs alone", Scheduler, "put_back")(
    bound_before({})
)
scheduler("bound tasks go before an earlier one that runs alone", Scheduler, "put_back")(
    bound_before(Always())
)


@scheduler(
    "a cancelled task that was to run alone holds up others",
    Scheduler,
    "take_back",
    pinned=70077798,
)
def _(original, sched, w, limit):
    lone = sched.lone
    count = original(sched, w, limit)
    if w == lone and sched.lone is None:
        sched.queued.add(sched.alone)
    return count


scheduler("a task runs alone once and then beside others", Terms, "after_failure", pinned=35735)(
    lambda original, terms, killed, alone: original(terms, killed, alone)._replace(alone=alone)
)
engine(
    "no task is given when a worker that held up one alone is free", WorkerMonitor, "_after_answers"
)(give_none(lambda sched: sched.alone in sched.queued))


# -- heavy functions -------------------------------------------------------------------------------


scheduler("a heavy task begins where the memory is not enough", HeavyFunctions, "may_begin")(
    lambda original, its, w, part, holding: original(its, w, part, [v for v in holding if v == w])
)


@scheduler("a heavy task waits for memory although none runs", HeavyFunctions, "may_begin")
def _(original, its, w, part, holding):
    free, need = its._free, its.needs.get(its.name(part), 0.0)
    return original(its, w, part, holding) and need <= free


scheduler("a heavy task is given to a worker that has others", HeavyFunctions, "may_begin")(
    lambda original, its, w, part, holding: original(its, w, part, [v for v in holding if v != w])
)
scheduler("a worker gets several heavy tasks", Scheduler, "_most_by_memory")(
    lambda original, sched, w, task_range, n: n if original(sched, w, task_range, n) else 0
)


@scheduler("a call goes past heavy tasks that wait", HeavyFunctions, "add")
def _(original, its, *which):
    original(its, *which)
    its._busy.discard(its)


scheduler("the memory that a function is expected to need never falls", waiting, "FALL", 1.0)
scheduler("a task that ran when its function became heavy does not count", HeavyFunctions, "add")(
    lambda original, its, part, seen, held: original(its, part, seen, ())
)
scheduler("a function is heavy for ever", HeavyFunctions, "forget", nothing)


@scheduler("a function is forgotten before its task has run alone", Scheduler, "measured")
def _(original, sched, *what):
    original(sched, *what)
    sched.heavy.forget(sched.size)


engine("no task is given when a heavy one has ended", WorkerMonitor, "_after_answers")(
    give_none(lambda sched: sched.heavy in sched.queued)
)
engine("no task is given when a heavy one is dropped", WorkerMonitor, "withdraw", pinned=10727)(
    give_none(lambda sched: sched.heavy in sched.queued)
)


# -- priorities ----------------------------------------------------------------------------------


@scheduler("a task that is put back goes before those of a higher priority", RangeQueue, "put_back")
def _(original, queue, task_range):
    queue._enter(task_range)
    (queue._ranges or queue._line(task_range.terms.priority)).appendleft(task_range)


@scheduler("a higher priority waits until those in front are given out", RangeQueue, "_line")
def _(original, queue, priority):
    line = original(queue, priority)
    if not line and queue:  # a new one
        queue._order.remove(priority)
        queue._order.insert(0, priority)
    return line


scheduler(
    "a task for one worker goes before others of a higher priority",
    Scheduler,
    "_queues",
    lambda sched, w: (sched.own[w], sched.shared),
)
scheduler("a task is held behind one of a lower priority", InFlight, "is_below", false)
scheduler("a retry loses its priority", Terms, "after_failure")(
    lambda original, terms, killed, alone: original(terms, killed, alone)._replace(priority=0)
)


@scheduler(
    "a call that is given without queueing counts as one without a priority",
    Scheduler,
    "give",
    pinned=5955,
)
def _(original, sched, *call):
    ranked = sched.ranked
    found = original(sched, *call)
    sched.ranked = ranked
    return found


scheduler("a worker keeps tasks that others go before", Scheduler, "overtaken", false)
scheduler("a task that has begun counts as one that others go before", Scheduler, "overtaken")(
    lambda original, sched, w, began: original(sched, w, 0)
)


engine("no worker is looked at when a task of a higher priority comes", WorkerMonitor, "give_idle")(
    during("_look_soon", nothing)
)


@engine(
    "a call of a higher priority waits until a worker has answered",
    Submission,
    "submit_call",
    pinned=1693,
)
def _(original, submission, *what):
    monitor = submission._monitor
    with swapped(monitor, "give_idle", monitor.give_idle if submission._sched.idle else nothing):
        original(submission, *what)


@engine(
    "a stream without room for results holds up lower priorities",
    RangeQueue,
    "first",
    pinned=2513,
)
def _(original, queue, held=False):
    found = original(queue, held)
    return found if found is None or found.terms.priority == queue._order[-1] else None


@engine("a stream without room for results loses its priority", RangeQueue, "first")
def _(original, queue, held=False):
    found = original(queue, held)
    if found is not None:
        for priority in [one for one in queue._order if one > found.terms.priority]:
            queue._ranges += queue._lines.pop(priority)
            queue._order.remove(priority)
    return found


@engine("a call joins the calls before it that have another priority", Waiting, "put_call")
def _(original, waiting, number, payload, terms):
    waiting._calls.terms = terms._replace(priority=waiting._calls.terms.priority)
    original(waiting, number, payload, waiting._calls.terms)


# -- states --------------------------------------------------------------------------------------


engine(
    "a worker that is ready counts as starting",
    WORKER[WorkerStates.STARTING],
    WorkerEvent.HELLO,
    WorkerStates.STARTING,
)
engine(
    "a worker whose process has ended stays ready",
    WORKER[WorkerStates.READY],
    WorkerEvent.GONE,
    WorkerStates.READY,
)
engine(
    "a recalled worker never gets a task again",
    WORKER[WorkerStates.RECALLING],
    WorkerEvent.EMPTIED,
    WorkerStates.RECALLING,
)


# -- answers -------------------------------------------------------------------------------------


@engine(
    "answers found in the outbox are counted again when they are announced", Answers, "announced"
)
def _(original, answers, worker, *message):
    worker.announced()
    original(answers, worker, *message)


@engine("an interrupted task is also answered with its result", Answers, "_broken_off")
def _(original, answers, worker, batch, k):
    original(answers, worker, batch, k)
    answers.results.append((batch.job, batch.first + k, (False, OSError())))


engine("the timer of a retry is not set", Answers, "_again")(during("_reactor.call_at", nothing))
engine("a task is not retried after an error of `retry_on`", Answers, "_answer")(
    lambda original, answers, worker, *args: original(answers, worker, *args[:3])
)


@engine("a frame that came in part loses its beginning", FrameReader, "frames")
def _(original, reader):
    yield from original(reader)
    reader.buffer = b""


@engine("an answer that wraps around the outbox is cut", Outbox, "append")
def _(original, box, payload, error):
    start = box._written % box.capacity
    added = original(box, payload, error)
    if added and start + 4 + len(payload) > box.capacity:
        box._data[0:1] = b"?"
    return added


# -- workers that live ---------------------------------------------------------------------------


@engine("tasks that a worker may still begin are given to others", WorkerMonitor, "recall")
def _(original, monitor, worker, began):
    original(monitor, worker, began)
    monitor._sched.take_back(worker.index, began)
    monitor.give_idle()


engine("a silent worker is not checked", WorkerMonitor, "_look", nothing)


@engine("an answer between two checks is no change", WorkerProcess, "look", pinned=5011677)
def _(original, worker, began, tail, answered):
    return *original(worker, began, tail, answered)[:2], answered


engine("requested tasks are given back from the queue only", WorkerMonitor, "give_back")(
    during("_multi_item", {})
)


@engine("a recall's limit stays after the worker has given all back", WorkerProcess, "emptied")
def _(original, worker):
    limit = worker.box.limit
    original(worker)
    worker.box.forbid(limit)


engine(
    "the rest of a message that did not fit is not sent",
    WorkerMonitor,
    "send",
    lambda _, worker, parts: worker.writer.send(parts),
)


@engine("a new worker counts as knowing its predecessor's functions", WorkerProcess, "_reset")
def _(original, worker):
    functions = getattr(worker, "functions", set())
    original(worker)
    worker.functions = functions


engine(
    "an uninterruptible task beyond its limit is not killed",
    WorkerMonitor,
    "_kill_overdue",
    nothing,
)


@engine("limits are checked only once", WorkerMonitor, "_check")
def _(original, monitor, worker):
    original(monitor, worker)
    monitor._checks.cancel(worker)


# -- callers that receive by themselves ----------------------------------------------------------


@engine("a caller that gives up its turn leaves its worker muted", DirectReceive, "_mute")
def _(original, direct, worker, muted):
    if muted:
        original(direct, worker, muted)


@engine("a death during a caller's turn is forgotten", DirectReceive, "end")
def _(original, direct, job):
    direct.await_end = nothing
    original(direct, job)


engine("a process is closed while a caller polls its pipe", DirectReceive, "postpone_exit", false)
engine(
    "a caller takes over the answer that another thread receives",
    DirectReceive,
    "__contains__",
    false,
)


@engine(
    "a caller takes over the answer of a worker with other tasks, or that ends",
    WorkerMonitor,
    "take_over",
)
def _(original, monitor, number):
    for worker in monitor.workers:
        held = worker.in_flight.held
        if held and held[0].first == number and worker not in monitor._direct:
            monitor._direct.begin(worker, number)
            return worker
    return None


@engine(
    "a task has two turns, since its worker has changed", WorkerMonitor, "take_over", pinned=15888
)
def _(original, monitor, number):
    turns = monitor._direct.turns
    before = turns.pop(number, None)
    worker = original(monitor, number)
    if worker is None and before is not None:
        turns[number] = before
    return worker


# -- processes that start: what is raised there is taken for a refusal of the system ---------------


engine("a process is started after the end of the pool", Replacement, "_decide")(
    during("ending", False)
)
engine("a process is started again for a removed worker", Replacement, "_decide")(
    during("_left_over", false)
)


@engine("a second process is started during a start")
def _(patch):
    patch.setitem(WORKER[WorkerStates.LAUNCHING], WorkerEvent.LAUNCH, WorkerStates.LAUNCHING)

    original = Replacement.next_missing

    def missing(replacement):
        found = original(replacement)
        if found is None and not replacement.ending:
            for worker in replacement._workers[: replacement._sched.size]:
                if worker.state is WorkerStates.LAUNCHING:
                    worker.launching()
                    return Launch(worker, replacement._maintenance)
        return found

    patch.setattr(Replacement, "next_missing", missing)


@engine("a process that started while the pool ended is not told to end", Replacement, "launched")
def _(original, replacement, *what):
    with swapped(replacement._monitor, "stopped", False), swapped(replacement, "ending", False):
        original(replacement, *what)


engine("a process that started for a worker removed meanwhile goes on", Replacement, "launched")(
    during("_left_over", false)
)


@engine("a process gets its predecessor's generation", Launch, "run")
def _(original, launch):
    result = original(launch)
    configs = [
        one.recipe.config(one.index, max(1, one.generation), None) for one in launch.worker.workers
    ]
    return *result[:2], configs


@engine("a start that the system refused is tried again at once", RestartPolicy, "lost")
def _(original, policy, *what):
    pause = original(policy, *what)
    return pause and 0.0


@engine("the end of a new process cannot be watched", Replacement, "_await_end")
def _(original, replacement, worker):
    if worker.generation > 2:
        raise KeyError(worker.index)
    original(replacement, worker)


engine("the pool gives up a start too early", states, "START_ATTEMPTS", 2)


# -- messages of workers: `WorkerMonitor` takes what is raised there for an invalid message -------


@engine("unannounced answers count as invalid", Answers, "unannounced")
def _(original, answers, worker, mark):
    n = original(answers, worker, mark)
    if n > 1:
        raise ValueError(n)
    return n


# -- processes that end --------------------------------------------------------------------------


def without(name, spare):
    """At the end of a process, skip this method of the monitor for some of its workers."""

    def look(original, replacement, worker):
        monitor = replacement._monitor
        method = getattr(monitor, name)
        with swapped(monitor, name, lambda one, *a: 0 if spare(worker, one) else method(one, *a)):
            original(replacement, worker)

    return look


engine("a dead worker's answers in the outbox are ignored", Replacement, "_look_at_end")(
    without("take_early", lambda worker, one: True)
)
engine("of a dead process only one worker's pipe is read", Replacement, "_look_at_end")(
    without("drain", lambda worker, one: one is not worker)
)


engine("after a death waiting tasks are given to no worker", Replacement, "_look_at_end")(
    during("_monitor.give_idle", nothing)
)
engine("tasks of the other workers of a dead process are lost", Replacement, "_settle")(
    lambda original, replacement, ended, code: original(replacement, ended[:1], code)
)


@engine("a start that the system refused is not tried again", Replacement, "_lost")
def _(original, replacement, end):
    if end.kind is not EndKind.REFUSED:
        original(replacement, end)


@engine("a deaf worker is not killed at the end", Replacement, "terminate")
def _(original, replacement, *how):
    original(replacement, *how)
    for worker in replacement._workers:
        replacement._kills.cancel(worker)


engine("a removed worker is replaced when it has ended", Replacement, "_left_over", false)


engine("a worker is replaced before the pool was told of its end", Replacement, "_decide")(
    during("_untold", set())
)
engine(
    "the pool ends before it was told of all ends",
    Replacement,
    "ended",
    property(lambda one: one.ending and all(w.state is WorkerStates.ABSENT for w in one._workers)),
)
engine(
    "a place stays empty after the pool was told of an end",
    Replacement,
    "told",
    lambda one, worker: one._untold.discard(worker),
)
engine("a removed worker still gets tasks", Replacement, "_dismiss", nothing)
engine("a worker with bound tasks is dismissed", Scheduler, "bound_from", false)


# -- bugs that few histories show ------------------------------------------------------------------


engine("a worker is not checked after an interrupt", WorkerMonitor, "_after_answers")(
    during("_checks.schedule_by", nothing)
)


@engine(
    "an ending worker with tasks in hand is not checked",
    WorkerMonitor,
    "_after_answers",
    pinned=7049,
)
def _(original, monitor, worker):
    by = monitor._looks.schedule_by if worker.state is WorkerStates.READY else nothing
    with swapped(monitor._looks, "schedule_by", by):
        original(monitor, worker)


@engine("failed starts of a dismissed worker still count", Replacement, "_look_at_end", pinned=258)
def _(original, replacement, worker):
    policy = replacement._policy
    before = dict(policy._failures), dict(policy._killed)
    left_over = replacement._left_over(worker)
    original(replacement, worker)
    if left_over:
        policy._failures, policy._killed = before


@engine(
    "a task gets the shortest limit of its worker's tasks", Deadlines, "_standstill", pinned=107
)
def _(original, deadlines, held, running, seen, limit, now):
    verdict = original(deadlines, held, running, seen, limit, now)
    last = deadlines._last_progress
    assert last is not None
    if verdict.act is Act.NOTHING and running is not None and now >= last[1] + 2 * limit:
        return Verdict(Act.INTERRUPT, running[0].seq + running[1])
    return verdict


engine("the engine is not told that there is room for results again", Engine, "resume", nothing)
