"""Mutants: planted bugs that the simulated worlds must find.

A mutant breaks one rule: during a test it replaces a method by one that behaves differently. The
wording of the code may change freely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from xpool._engine.answers import Answers
from xpool._engine.direct import DirectReceive
from xpool._engine.dispatcher import Dispatcher
from xpool._engine.engine import Engine
from xpool._engine.jobs.budget import EndKind, RestartPolicy
from xpool._engine.jobs.deadlines import Act, Deadlines, Verdict
from xpool._engine.jobs.ranges import piece
from xpool._engine.jobs.scheduler import LONG_SECONDS, SHORT_SECONDS, InFlight, Scheduler, Terms
from xpool._engine.jobs.states import WORKER, WorkerEvent, WorkerStates
from xpool._engine.jobs.waiting import RangeQueue, Waiting
from xpool._engine.monitor import WorkerMonitor
from xpool._engine.replacement import Launch, Replacement
from xpool._engine.submission import Submission
from xpool._engine.worker_process import FunctionCache, WorkerProcess
from xpool._wire.outbox import Outbox
from xpool._wire.pipes import FrameReader
from xpool.errors import InternalError

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A rule, how to break it, and the world that must find it."""

    name: str
    world: str
    seed: Callable[[Patch], None]

    def __str__(self) -> str:
        return self.name


MUTANTS: list[Mutant] = []

PINNED: dict[Mutant, int] = {}
"""Bugs that few histories show, each with the seed of one."""


def mutant(
    name: str, world: str = "engine", pinned: int | None = None
) -> Callable[[Callable[[Patch], None]], None]:
    def add(seed: Callable[[Patch], None]) -> None:
        one = Mutant(name, world, seed)
        if pinned is None:
            MUTANTS.append(one)
        else:
            PINNED[one] = pinned

    return add


def wrap(patch: Patch, cls: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by ``wrapper(original, *args)``."""
    original = getattr(cls, name)
    patch.setattr(cls, name, lambda *args, **kwds: wrapper(original, *args, **kwds))


def give_none(patch: Patch, name: str, when: Callable[[Scheduler], bool]) -> None:
    """Let a method of the monitor give no waiting task to idle workers, if ``when`` is true."""

    def silent(original: Any, monitor: WorkerMonitor, *which: Any) -> None:
        give = monitor.give_idle
        if when(monitor._sched):
            monitor.give_idle = nothing  # type: ignore[method-assign]
        original(monitor, *which)
        monitor.give_idle = give  # type: ignore[method-assign]

    wrap(patch, WorkerMonitor, name, silent)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


# -- the scheduler -------------------------------------------------------------------------------


@mutant("a batch numbers its first item wrongly", "scheduler")
def _(patch: Patch) -> None:
    def cut(original: Any, sched: Scheduler, w: int, among: int) -> Any:
        batch = original(sched, w, among)
        if batch is not None:
            batch.seq = sched.in_flight[w].answered
        return batch

    wrap(patch, Scheduler, "_cut", cut)


@mutant("a dead worker's tasks are put back in the wrong order", "scheduler")
def _(patch: Patch) -> None:
    def gone(original: Any, sched: Scheduler, w: int, began: int) -> Any:
        pieces: list[Any] = []
        put_back, sched.put_back = sched.put_back, pieces.append  # type: ignore[method-assign]
        found = original(sched, w, began)
        del sched.put_back
        for part in reversed(pieces):
            put_back(part)
        return found

    wrap(patch, Scheduler, "gone", gone)


@mutant("a dead worker's task counts as not begun", "scheduler")
def _(patch: Patch) -> None:
    wrap(patch, Scheduler, "gone", lambda original, sched, w, began: original(sched, w, began - 1))


@mutant("a task that killed its worker is put back without a retry", "scheduler")
def _(patch: Patch) -> None:
    def gone(original: Any, sched: Scheduler, w: int, began: int) -> Any:
        lost = original(sched, w, began)
        if lost is not None:
            sched.put_back(piece(lost[0], lost[1], lost[1] + 1))
        return lost

    wrap(patch, Scheduler, "gone", gone)


@mutant("a retry costs no retry")
def _(patch: Patch) -> None:
    def again(original: Any, sched: Scheduler, batch: Any, position: int, **how: Any) -> None:
        batch.terms = batch.terms._replace(retries=batch.terms.retries + 1)
        original(sched, batch, position, **how)

    wrap(patch, Scheduler, "again", again)


@mutant("a worker is given one task more than its lifetime", "scheduler")
def _(patch: Patch) -> None:
    def ready(original: Any, sched: Scheduler, w: int, left: int | None) -> None:
        original(sched, w, None if left is None else left + 1)

    wrap(patch, Scheduler, "ready", ready)


@mutant("a long task gets others behind it", "scheduler")
def _(patch: Patch) -> None:
    wrap(patch, Scheduler, "_most_held", lambda original, sched, w: original(sched, w) + 1)


@mutant("a worker gets more tasks ahead than its share", "scheduler")
def _(patch: Patch) -> None:
    def most(original: Any, sched: Scheduler, w: int) -> int:
        n: int = original(sched, w)
        return max(n, 8) if SHORT_SECONDS < sched.sizes.cost <= LONG_SECONDS else n

    wrap(patch, Scheduler, "_most_held", most)


@mutant("items that were taken back count as held", "scheduler")
def _(patch: Patch) -> None:
    def take_back(original: Any, sched: Scheduler, w: int, limit: int) -> Any:
        count = original(sched, w, limit)
        for batch in sched.in_flight[w].held:
            batch.taken = len(batch.items)
        return count

    wrap(patch, Scheduler, "take_back", take_back)


@mutant("a retry comes too early", "scheduler")
def _(patch: Patch) -> None:
    wrap(patch, Scheduler, "due", lambda original, sched, now: original(sched, now + 1))


@mutant("an input reader that looks as its range runs dry is missed", "scheduler")
def _(patch: Patch) -> None:
    def dry(original: Any, queue: RangeQueue) -> bool:
        task_range = queue._ranges.popleft()
        task_range.queued = False
        if not queue:
            queue._busy.discard(queue)
        return bool(task_range.items)

    wrap(patch, RangeQueue, "_dry", dry)


@mutant("an endless stream stays in front of waiting jobs", "engine")
def _(patch: Patch) -> None:
    wrap(patch, RangeQueue, "take", stays_in_front)


def stays_in_front(original: Any, queue: RangeQueue, *how: int) -> Any:
    first: Any = next(iter(queue))
    flow, first.flow = first.flow, None
    found = original(queue, *how)
    first.flow = flow
    return found


# -- priorities ----------------------------------------------------------------------------------


@mutant("a task that is put back goes before those of a higher priority", "scheduler")
def _(patch: Patch) -> None:
    def put_back(original: Any, queue: RangeQueue, task_range: Any) -> None:
        queue._enter(task_range)
        (queue._ranges or queue._line(task_range.terms.priority)).appendleft(task_range)

    wrap(patch, RangeQueue, "put_back", put_back)


@mutant("a higher priority waits until those in front are given out", "scheduler")
def _(patch: Patch) -> None:
    def front(original: Any, queue: RangeQueue) -> Any:
        priority, queue._priority = queue._priority, math.inf
        found = original(queue)
        if queue._priority == math.inf:
            queue._priority = priority
        return found

    wrap(patch, RangeQueue, "front", front)


@mutant("a task for one worker goes before others of a higher priority", "scheduler")
def _(patch: Patch) -> None:
    patch.setattr(Scheduler, "_queues", lambda sched, w: (sched.own[w], sched.shared))


@mutant("a task is held behind one of a lower priority", "scheduler")
def _(patch: Patch) -> None:
    patch.setattr(InFlight, "is_below", lambda in_flight, task_range: False)


@mutant("a retry loses its priority", "scheduler")
def _(patch: Patch) -> None:
    def after(original: Any, terms: Terms, killed: bool, alone: bool) -> Any:
        return original(terms, killed, alone)._replace(priority=0)

    wrap(patch, Terms, "after_failure", after)


@mutant("a call that is given without queueing counts as one without a priority", "scheduler", 5955)
def _(patch: Patch) -> None:
    def start(original: Any, sched: Scheduler, task_range: Any) -> Any:
        ranked = sched.ranked
        found = original(sched, task_range)
        sched.ranked = ranked
        return found

    wrap(patch, Scheduler, "start", start)


@mutant("a worker keeps tasks that others go before", "scheduler")
def _(patch: Patch) -> None:
    patch.setattr(Scheduler, "overtaken", lambda sched, w, began: False)


@mutant("a task that has begun counts as one that others go before", "scheduler")
def _(patch: Patch) -> None:
    wrap(patch, Scheduler, "overtaken", lambda original, sched, w, began: original(sched, w, 0))


@mutant("no worker is looked at when a task of a higher priority comes")
def _(patch: Patch) -> None:
    def give_idle(original: Any, monitor: WorkerMonitor, *how: Any) -> None:
        look, monitor._look_soon = monitor._look_soon, nothing  # type: ignore[method-assign]
        original(monitor, *how)
        monitor._look_soon = look  # type: ignore[method-assign]

    wrap(patch, WorkerMonitor, "give_idle", give_idle)


@mutant("a call of a higher priority waits until a worker has answered", pinned=1693)
def _(patch: Patch) -> None:
    def submit_call(original: Any, submission: Submission, *what: Any) -> None:
        monitor = submission._monitor
        if not submission._sched.idle:
            monitor.give_idle = nothing  # type: ignore[method-assign]
        original(submission, *what)
        monitor.__dict__.pop("give_idle", None)

    wrap(patch, Submission, "submit_call", submit_call)


@mutant("a stream without room for results holds up lower priorities", pinned=2513)
def _(patch: Patch) -> None:
    patch.setattr(RangeQueue, "_first_below", nothing)


@mutant("a stream without room for results loses its priority")
def _(patch: Patch) -> None:
    def below(original: Any, queue: RangeQueue) -> Any:
        found = original(queue)
        queue._order.clear()
        for ranges in queue._others.values():
            queue._ranges += ranges
        queue._others.clear()
        return found

    wrap(patch, RangeQueue, "_first_below", below)


@mutant("a call joins the calls before it that have another priority")
def _(patch: Patch) -> None:
    def put_call(original: Any, waiting: Waiting, number: int, payload: Any, terms: Terms) -> None:
        waiting._calls.terms = terms._replace(priority=waiting._calls.terms.priority)
        original(waiting, number, payload, waiting._calls.terms)

    wrap(patch, Waiting, "put_call", put_call)


# -- states --------------------------------------------------------------------------------------


@mutant("a worker that is ready counts as starting")
def _(patch: Patch) -> None:
    patch.setitem(WORKER[WorkerStates.STARTING], WorkerEvent.HELLO, WorkerStates.STARTING)


@mutant("a worker whose process has ended stays ready")
def _(patch: Patch) -> None:
    patch.setitem(WORKER[WorkerStates.READY], WorkerEvent.GONE, WorkerStates.READY)


@mutant("a recalled worker never gets a task again")
def _(patch: Patch) -> None:
    patch.setitem(WORKER[WorkerStates.RECALLING], WorkerEvent.EMPTIED, WorkerStates.RECALLING)


# -- answers -------------------------------------------------------------------------------------


@mutant("answers found in the outbox are counted again when they are announced")
def _(patch: Patch) -> None:
    def announced(original: Any, answers: Answers, worker: WorkerProcess, *message: Any) -> None:
        worker.early.announced()
        original(answers, worker, *message)

    wrap(patch, Answers, "announced", announced)


@mutant("an interrupted task is also answered with its result")
def _(patch: Patch) -> None:
    def broken_off(original: Any, answers: Answers, worker: Any, batch: Any, k: int) -> None:
        original(answers, worker, batch, k)
        answers.results.append((batch.job, batch.first + k, (False, OSError())))

    wrap(patch, Answers, "_broken_off", broken_off)


@mutant("the timer of a retry is not set")
def _(patch: Patch) -> None:
    def again(original: Any, answers: Answers, *args: Any, **how: Any) -> None:
        reactor = answers._reactor
        reactor.call_at = nothing  # type: ignore[method-assign, assignment]
        original(answers, *args, **how)
        del reactor.call_at

    wrap(patch, Answers, "_again", again)


@mutant("a task is not retried after an error of `retry_on`")
def _(patch: Patch) -> None:
    def answer(original: Any, answers: Answers, worker: WorkerProcess, *args: Any) -> None:
        original(answers, worker, *args[:3])

    wrap(patch, Answers, "_answer", answer)


@mutant("a frame that came in part loses its beginning")
def _(patch: Patch) -> None:
    def frames(original: Any, reader: FrameReader) -> Any:
        yield from original(reader)
        reader.buffer = b""

    wrap(patch, FrameReader, "frames", frames)


@mutant("an answer that wraps around the outbox is cut")
def _(patch: Patch) -> None:
    def append(original: Any, box: Outbox, payload: Any, error: int) -> bool:
        start = box._written % box.capacity
        added: bool = original(box, payload, error)
        if added and start + 4 + len(payload) > box.capacity:
            box._data[0:1] = b"?"
        return added

    wrap(patch, Outbox, "append", append)


# -- workers that live ---------------------------------------------------------------------------


@mutant("tasks that a worker may still begin are given to others")
def _(patch: Patch) -> None:
    def recall(original: Any, monitor: WorkerMonitor, worker: WorkerProcess, began: int) -> None:
        original(monitor, worker, began)
        monitor._sched.take_back(worker.index, began)
        monitor.give_idle()

    wrap(patch, WorkerMonitor, "recall", recall)


@mutant("a silent worker is not checked")
def _(patch: Patch) -> None:
    patch.setattr(WorkerMonitor, "_look", nothing)


@mutant("requested tasks are given back from the queue only")
def _(patch: Patch) -> None:
    def give_back(original: Any, monitor: WorkerMonitor, job: int, items: range) -> None:
        deep, monitor._multi_item = monitor._multi_item, {}
        original(monitor, job, items)
        monitor._multi_item = deep

    wrap(patch, WorkerMonitor, "give_back", give_back)


@mutant("a recall's limit stays after the worker has given all back")
def _(patch: Patch) -> None:
    def emptied(original: Any, worker: WorkerProcess) -> None:
        limit = worker.box.limit
        original(worker)
        worker.box.forbid(limit)

    wrap(patch, WorkerProcess, "emptied", emptied)


@mutant("the rest of a message that did not fit is not sent")
def _(patch: Patch) -> None:
    patch.setattr(Dispatcher, "send", lambda _, worker, parts: worker.writer.send(parts))


@mutant("a new worker counts as knowing its predecessor's functions")
def _(patch: Patch) -> None:
    def reset(original: Any, worker: WorkerProcess) -> None:
        functions = getattr(worker, "functions", FunctionCache())
        original(worker)
        worker.functions = functions

    wrap(patch, WorkerProcess, "_reset", reset)


@mutant("an uninterruptible task beyond its limit is not killed")
def _(patch: Patch) -> None:
    patch.setattr(WorkerMonitor, "_kill_overdue", nothing)


@mutant("limits are checked only once")
def _(patch: Patch) -> None:
    def check(original: Any, monitor: WorkerMonitor, worker: WorkerProcess) -> None:
        original(monitor, worker)
        monitor._checks.cancel(worker)

    wrap(patch, WorkerMonitor, "_check", check)


# -- callers that receive by themselves ----------------------------------------------------------


@mutant("a caller that gives up its turn leaves its worker muted")
def _(patch: Patch) -> None:
    def mute(original: Any, direct: DirectReceive, worker: WorkerProcess, muted: bool) -> None:
        if muted:
            original(direct, worker, muted)

    wrap(patch, DirectReceive, "_mute", mute)


@mutant("a death during a caller's turn is forgotten")
def _(patch: Patch) -> None:
    def end(original: Any, direct: DirectReceive, job: int) -> None:
        direct.await_end = nothing
        original(direct, job)

    wrap(patch, DirectReceive, "end", end)


@mutant("a process is closed while a caller polls its pipe")
def _(patch: Patch) -> None:
    patch.setattr(DirectReceive, "postpone_exit", lambda *_: False)


@mutant("a caller takes over the answer that another thread receives")
def _(patch: Patch) -> None:
    patch.setattr(DirectReceive, "__contains__", lambda *_: False)


@mutant("a caller takes over the answer of a worker with other tasks, or that ends")
def _(patch: Patch) -> None:
    def take_over(original: Any, monitor: WorkerMonitor, number: int) -> WorkerProcess | None:
        for worker in monitor.workers:
            held = worker.in_flight.held
            if held and held[0].first == number and worker not in monitor._direct:
                monitor._direct.begin(worker, number)
                return worker
        return None

    wrap(patch, WorkerMonitor, "take_over", take_over)


# -- processes that start: what is raised there is taken for a refusal of the system ---------------


@mutant("a process is started after the end of the pool")
def _(patch: Patch) -> None:
    def decide(original: Any, replacement: Replacement, worker: WorkerProcess) -> Any:
        ending, replacement.ending = replacement.ending, False
        try:
            return original(replacement, worker)
        finally:
            replacement.ending = ending

    wrap(patch, Replacement, "_decide", decide)


@mutant("a process is started again for a removed worker")
def _(patch: Patch) -> None:
    def decide(original: Any, replacement: Replacement, worker: WorkerProcess) -> Any:
        replacement._left_over = lambda worker: False  # type: ignore[method-assign]
        try:
            return original(replacement, worker)
        finally:
            del replacement._left_over

    wrap(patch, Replacement, "_decide", decide)


@mutant("a second process is started during a start")
def _(patch: Patch) -> None:
    patch.setitem(WORKER[WorkerStates.LAUNCHING], WorkerEvent.LAUNCH, WorkerStates.LAUNCHING)

    def missing(original: Any, replacement: Replacement) -> Any:
        found = original(replacement)
        if found is None and not replacement.ending:
            for worker in replacement._workers[: replacement._sched.size]:
                if worker.state is WorkerStates.LAUNCHING:
                    worker.launching()
                    return Launch(worker, None, None)
        return found

    wrap(patch, Replacement, "next_missing", missing)


@mutant("a process that started while the pool ended is not told to end")
def _(patch: Patch) -> None:
    def launched(original: Any, replacement: Replacement, *what: Any) -> None:
        monitor = replacement._monitor
        stopped, ending = monitor.stopped, replacement.ending
        monitor.stopped = replacement.ending = False
        original(replacement, *what)
        monitor.stopped, replacement.ending = stopped, ending

    wrap(patch, Replacement, "launched", launched)


@mutant("a process that started for a worker removed meanwhile goes on")
def _(patch: Patch) -> None:
    def launched(original: Any, replacement: Replacement, *what: Any) -> None:
        replacement._left_over = lambda worker: False  # type: ignore[method-assign]
        original(replacement, *what)
        del replacement._left_over

    wrap(patch, Replacement, "launched", launched)


@mutant("a process is started beside one that may still live")
def _(patch: Patch) -> None:
    patch.setattr(Replacement, "_finished_off", lambda *_: True)


@mutant("a process gets its predecessor's generation")
def _(patch: Patch) -> None:
    def run(original: Any, launch: Launch) -> Any:
        result = original(launch)
        configs = [
            one.recipe.config(one.index, max(1, one.generation), None)
            for one in launch.worker.workers
        ]
        return result._replace(configs=configs)

    wrap(patch, Launch, "run", run)


@mutant("a start that the system refused is tried again at once")
def _(patch: Patch) -> None:
    def lost(original: Any, policy: RestartPolicy, *what: Any) -> Any:
        pause = original(policy, *what)
        return pause and 0.0

    wrap(patch, RestartPolicy, "lost", lost)


@mutant("the end of a new process cannot be watched")
def _(patch: Patch) -> None:
    def await_end(original: Any, replacement: Replacement, worker: WorkerProcess) -> None:
        if worker.generation > 2:
            raise KeyError(worker.index)
        original(replacement, worker)

    wrap(patch, Replacement, "_await_end", await_end)


@mutant("the pool gives up a start too early")
def _(patch: Patch) -> None:
    patch.setattr("xpool._engine.jobs.budget.START_ATTEMPTS", 2)


# -- messages of workers: `WorkerMonitor` takes what is raised there for an invalid message -------


@mutant("counting four answers at once raises")
def _(patch: Patch) -> None:
    def answered(original: Any, sched: Scheduler, w: int, n: int, seconds: float = 0.0) -> Any:
        if n > 3:
            raise InternalError("four")
        return original(sched, w, n, seconds)

    wrap(patch, Scheduler, "answered", answered)


@mutant("unannounced answers count as invalid")
def _(patch: Patch) -> None:
    def unannounced(original: Any, answers: Answers, worker: WorkerProcess, mark: int) -> int:
        n: int = original(answers, worker, mark)
        if n > 1:
            raise ValueError(n)
        return n

    wrap(patch, Answers, "unannounced", unannounced)


# -- processes that end --------------------------------------------------------------------------


def without(patch: Patch, name: str, spare: Callable[[WorkerProcess, WorkerProcess], bool]) -> None:
    """At the end of a process, skip this method of the monitor for some of its workers."""

    def look(original: Any, replacement: Replacement, worker: WorkerProcess) -> None:
        monitor = replacement._monitor
        method = getattr(monitor, name)
        setattr(monitor, name, lambda one, *a: 0 if spare(worker, one) else method(one, *a))
        original(replacement, worker)
        delattr(monitor, name)

    wrap(patch, Replacement, "_look_at_end", look)


@mutant("a dead worker's answers in the outbox are ignored")
def _(patch: Patch) -> None:
    without(patch, "take_early", lambda worker, one: True)


@mutant("of a dead process only one worker's pipe is read")
def _(patch: Patch) -> None:
    without(patch, "drain", lambda worker, one: one is not worker)


@mutant("after a death waiting tasks are given to no worker")
def _(patch: Patch) -> None:
    def look(original: Any, replacement: Replacement, worker: WorkerProcess) -> None:
        monitor = replacement._monitor
        monitor.give_idle = nothing  # type: ignore[method-assign]
        original(replacement, worker)
        del monitor.give_idle

    wrap(patch, Replacement, "_look_at_end", look)


@mutant("tasks of the other workers of a dead process are lost")
def _(patch: Patch) -> None:
    def accounts(original: Any, replacement: Replacement, ended: list[Any], code: Any) -> None:
        original(replacement, ended[:1], code)

    wrap(patch, Replacement, "_settle", accounts)


@mutant("a start that the system refused is not tried again")
def _(patch: Patch) -> None:
    def lost(original: Any, replacement: Replacement, end: Any) -> None:
        if end.kind is not EndKind.REFUSED:
            original(replacement, end)

    wrap(patch, Replacement, "_lost", lost)


@mutant("a deaf worker is not killed at the end")
def _(patch: Patch) -> None:
    def terminate(original: Any, replacement: Replacement, *how: Any) -> None:
        original(replacement, *how)
        for worker in replacement._workers:
            replacement._kills.cancel(worker)

    wrap(patch, Replacement, "terminate", terminate)


@mutant("a removed worker is replaced when it has ended")
def _(patch: Patch) -> None:
    patch.setattr(Replacement, "_left_over", lambda replacement, worker: False)


@mutant("a worker is replaced before the pool was told of its end", "ends")
def _(patch: Patch) -> None:
    def decide(original: Any, replacement: Replacement, worker: WorkerProcess) -> Any:
        untold, replacement._untold = replacement._untold, set()
        try:
            return original(replacement, worker)
        finally:
            replacement._untold = untold

    wrap(patch, Replacement, "_decide", decide)


@mutant("the pool ends before it was told of all ends", "ends")
def _(patch: Patch) -> None:
    patch.setattr(
        Replacement,
        "ended",
        property(
            lambda one: one.ending and all(w.state is WorkerStates.ABSENT for w in one._workers)
        ),
    )


@mutant("a place stays empty after the pool was told of an end", "ends")
def _(patch: Patch) -> None:
    patch.setattr(Replacement, "told", lambda one, worker: one._untold.discard(worker))


@mutant("a removed worker still gets tasks")
def _(patch: Patch) -> None:
    patch.setattr(Replacement, "_dismiss", nothing)


@mutant("a worker with bound tasks is dismissed")
def _(patch: Patch) -> None:
    patch.setattr(Scheduler, "bound_from", lambda sched, w: False)


# -- bugs that few histories show ------------------------------------------------------------------


@mutant("a worker is not checked after an interrupt")
def _(patch: Patch) -> None:
    def after(original: Any, monitor: WorkerMonitor, worker: WorkerProcess) -> None:
        by, monitor._checks.schedule_by = monitor._checks.schedule_by, nothing  # type: ignore[method-assign]
        original(monitor, worker)
        monitor._checks.schedule_by = by  # type: ignore[method-assign]

    wrap(patch, WorkerMonitor, "_after_answers", after)


@mutant("an ending worker with tasks in hand is not checked", pinned=7049)
def _(patch: Patch) -> None:
    def after(original: Any, monitor: WorkerMonitor, worker: WorkerProcess) -> None:
        if worker.state is WorkerStates.READY:
            original(monitor, worker)
            return
        by, monitor._looks.schedule_by = monitor._looks.schedule_by, nothing  # type: ignore[method-assign]
        original(monitor, worker)
        monitor._looks.schedule_by = by  # type: ignore[method-assign]

    wrap(patch, WorkerMonitor, "_after_answers", after)


@mutant("failed starts of a dismissed worker still count", pinned=196)
def _(patch: Patch) -> None:
    def look(original: Any, replacement: Replacement, worker: WorkerProcess) -> None:
        policy = replacement._policy
        before = dict(policy._failures), dict(policy._killed)
        left_over = replacement._left_over(worker)
        original(replacement, worker)
        if left_over:
            policy._failures, policy._killed = before

    wrap(patch, Replacement, "_look_at_end", look)


@mutant("a task gets the shortest limit of its worker's tasks", pinned=107)
def _(patch: Patch) -> None:
    def standstill(
        original: Any, deadlines: Deadlines, held: Any, running: Any, seen: Any, limit: float,
        now: float,
    ) -> Verdict:  # fmt: skip
        verdict: Verdict = original(deadlines, held, running, seen, limit, now)
        last = deadlines._last_progress
        assert last is not None
        if verdict.act is Act.NOTHING and running is not None and now >= last[1] + 2 * limit:
            return Verdict(Act.INTERRUPT, running[0].seq + running[1])
        return verdict

    wrap(patch, Deadlines, "_standstill", standstill)


@mutant("the engine is not told that there is room for results again")
def _(patch: Patch) -> None:
    patch.setattr(Engine, "resume", nothing)
