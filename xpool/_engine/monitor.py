"""Handles live workers: receives their messages, gives them tasks, and checks on silent ones.

To stop a task, the parent names the item in the shared page and sends a signal.  The worker's
handler writes its stack to the page, and raises `TaskStopped` if it still runs that item.  A worker
that does not answer within the grace period is killed.  Once asked, a worker begins no other task,
so the signal can hit only this one.  Two milliseconds later, other workers get the rest of its
tasks.

Called with the engine's lock held.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from xpool._engine.answers import Answers, EngineOptions, own_part
from xpool._engine.jobs.scheduler import CALLS, Batch
from xpool._engine.jobs.states import Act, WorkerProgress, WorkerStates
from xpool._engine.memory import EngineParts, MemoryGuard
from xpool._engine.reactor import Alarms, Reactor
from xpool._engine.worker_process import WorkerProcess, processor_times
from xpool._pickling.frame import inline
from xpool._wire.outbox import HEAD, LIMIT, TASK_LINE
from xpool._wire.wire import (
    ANSWER,
    FAILED,
    GREETING,
    READY,
    SKIPPED,
    TASKS,
    TIMED,
    WIRE,
    FrameWriter,
    Parts,
    Refusal,
    forget_frame,
    func_frame,
    stop_frame,
    tasks_frame,
)
from xpool.errors import START_OF_WORKER, TaskTimeout

STOP_GRACE_SECONDS = 0.1
"""Seconds between asking a worker to stop and killing it."""

STARVED_SECONDS = 0.5
"""Seconds after which a worker that was asked to stop is killed, even if it got no processor."""


def is_starved(worker: WorkerProcess, now: float) -> bool:
    """Whether a worker has hardly run since it was asked to stop, so that it could not react."""
    when, ran_then, waited_then = worker.asked
    if now >= when + STARVED_SECONDS:
        return False
    ran, waited, is_runnable = processor_times(worker.pid)
    # The second condition is needed, because the system counts a wait only when it is over.
    return waited - waited_then > STOP_GRACE_SECONDS / 2 or (
        is_runnable and ran - ran_then < STOP_GRACE_SECONDS / 2
    )


OUTBOX_POLL_SECONDS = 0.010
"""Seconds of silence after which the outbox of a worker with several tasks is checked."""

LOG_PAUSE_SECONDS = 0.010
"""Seconds until a worker's log records are taken again when too many wait."""

PAGE_SETTLE_SECONDS = 0.002
"""Seconds until the other process has surely seen a new word in a shared page."""


class DirectReceive:
    """Which caller receives from which worker.

    A caller that waits for one answer receives it in its own thread.  This saves two of the three
    context switches of an answer.  Meanwhile the pipe is muted: it does not wake the engine's
    thread.  It stays muted while the worker is idle, because an idle worker sends nothing.  A muted
    pipe is polled before its worker gets a task; otherwise, data that a task wrote there would be
    read as the next answer.  The sentinel reports a death to the engine's thread.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        # All guarded by the engine's lock.
        self.turns: dict[int, tuple[WorkerProcess, int]] = {}  # by job: its worker, its thread
        self._jobs: dict[int, int] = {}  # by worker
        self.muted: set[int] = set()  # workers whose pipe does not wake the engine's thread
        self._ended: set[int] = set()  # workers whose sentinel's event is handled after the turn
        self.await_end: Callable[[WorkerProcess], object]  # listens to a sentinel: `Replacement`'s

    def __contains__(self, worker: WorkerProcess) -> bool:
        return worker.index in self._jobs

    def begin(self, worker: WorkerProcess, job: int) -> None:
        """Begin a turn: the calling thread receives the answer of this job."""
        # Usually the pipe is still muted from the last turn, so no system call is needed.
        if worker.index not in self.muted:
            self._mute(worker, True)
        self.turns[job] = worker, threading.get_ident()
        self._jobs[worker.index] = job

    def received_last(self, idle: dict[int, None]) -> bool:
        """Whether a caller has received the answer of the worker that became idle last.

        Then the program probably waits for each answer, and this worker polls for the next call.
        """
        return bool(idle) and next(reversed(idle)) in self.muted

    def worker_of(self, job: int) -> WorkerProcess | None:
        """Return the worker from which a job's caller receives; None: its turn is over."""
        turn = self.turns.get(job)
        return None if turn is None else turn[0]

    def given(self, worker: WorkerProcess) -> None:
        """Unmute a worker that gets a task, unless a caller receives from it."""
        if worker.index in self.muted and worker.index not in self._jobs:
            self._mute(worker, False)

    def end(self, job: int) -> None:
        """End the turn of the caller that receives the answer of this job, if it is not over."""
        turn = self.turns.pop(job, None)
        if turn is None:
            return
        worker = turn[0]
        del self._jobs[worker.index]
        in_flight = worker.in_flight
        if in_flight.sent > in_flight.answered or worker.state is not WorkerStates.READY:
            # The engine's thread receives the worker's other answers.
            self._mute(worker, False)
        if worker.index in self._ended:
            self._ended.remove(worker.index)
            self.await_end(worker)

    def end_turns(self) -> None:
        """Leave the answers that the calling thread waits for to the engine's thread.

        This thread waits for such answers if a signal handler has interrupted `await_answer`.
        If the handler uses the pool, it may itself wait for that worker's answer or end; if it has
        raised, the call is withdrawn.
        """
        me = threading.get_ident()
        for job in [job for job, (_, thread) in self.turns.items() if thread == me]:
            self.end(job)

    def postpone_exit(self, worker: WorkerProcess) -> bool:
        """Return whether a caller polls this worker's descriptors, so that they must stay open.  If
        so, the worker's end is handled after the turn, which ends when the caller sees the end."""
        if worker not in self:
            return False
        self._ended.add(worker.index)
        return True

    def gone(self, worker: WorkerProcess) -> None:
        """Forget a process that has ended: the pipe of the next one is not muted."""
        self.muted.discard(worker.index)

    def abandon(self, worker: WorkerProcess) -> None:
        """End the turn of a caller whose worker the engine kills without awaiting its end."""
        self.gone(worker)
        self._ended.discard(worker.index)
        self.turns.pop(self._jobs.pop(worker.index, 0), None)

    def _mute(self, worker: WorkerProcess, muted: bool) -> None:
        # The reactor removes a pipe that has reached its end, and ends with the engine's thread.
        there = not self._reactor.closed and worker.reader.fd in self._reactor
        if (worker.index in self.muted) != muted and there:
            self._reactor.mute(worker.reader.fd, muted)
            (self.muted.add if muted else self.muted.discard)(worker.index)


class WorkerMonitor:
    """Carries out what the scheduler, the deadlines and the workers' messages require."""

    def __init__(self, parts: EngineParts, direct: DirectReceive, options: EngineOptions) -> None:
        self.stopped = False  # terminated: no message is sent or received any more
        # Functions by number.  They are kept until the job ends, for workers that start later.
        self._functions: dict[int, tuple[int, bytes | memoryview]] = {}
        self._numbers = itertools.count(1)
        self.lifetime = options.lifetime  # tasks that a process may run
        self.workers, self._sched, self._reactor = parts.workers, parts.sched, parts.reactor
        self._direct, self._ledger = direct, parts.ledger
        self.answers = Answers(parts, self.give_idle, hands_back=options.hands_back)
        # Workers with two or more items in flight, which are checked when they are silent.
        self._multi_item: dict[int, None] = {}
        # Jobs and items to hand back if such a worker makes no progress, by worker.
        self._give_back_requests: dict[int, list[tuple[int, range]]] = {}
        reactor = parts.reactor
        self._looks = Alarms(reactor, self._look)
        self._recalls = Alarms(reactor, self._take_back)
        self._checks = Alarms(reactor, self._check)
        self._overdue = Alarms(reactor, self._kill_overdue)
        self._log_pauses = Alarms(reactor, self._listen_to_logs, serving=False)
        # Workers whose start has a time limit, from their first line until they are ready.
        self._start_limit = options.initializer_timeout
        self._starting: set[WorkerProcess] = set()
        self.guard = MemoryGuard(parts, options.memory, self.condemn, self.give_idle)

    # -- a process comes and goes ------------------------------------------------------------------

    def started(self, worker: WorkerProcess) -> None:
        def handler(fd: int) -> None:
            # If a caller's turn has begun since the event, the caller receives the answer.
            if worker not in self._direct:
                self.receive(worker)

        self._reactor.add(worker.reader.fd, handler)
        self._listen_to_logs(worker)
        if self._start_limit is not None:
            self._starting.add(worker)
            self._checks.schedule_by(worker, self._reactor.now() + self._start_limit)

    def _listen_to_logs(self, worker: WorkerProcess) -> None:
        """Take log records; while too many wait for the program's handlers, look again later."""
        logs, relay = worker.logs, worker.recipe.relay
        if logs is None or relay is None:
            return

        def handler(fd: int) -> None:
            if not relay.receive(logs):
                self._reactor.remove(fd)
                if not logs.ended:
                    self._log_pauses.schedule_by(worker, self._reactor.now() + LOG_PAUSE_SECONDS)

        self._reactor.add(logs.fd, handler)

    def _greeted(self, worker: WorkerProcess) -> None:
        self._starting.discard(worker)
        self._checks.cancel(worker)
        self._overdue.cancel(worker)
        self._ledger.ready(worker.index)
        # In another state, it was told to end while it started, and will read STOP from its pipe.
        if worker.state is WorkerStates.READY:
            self._sched.ready(worker.index, self.lifetime)
            self.give_idle()
            # Others may hold tasks that this worker could run now.
            self._look_for_surplus(worker)

    def retire(self, worker: WorkerProcess) -> None:
        """Let a worker end when it has answered what it holds."""
        worker.retire()
        self._sched.retire(worker.index)
        # The last message: the worker first answers all tasks that it was sent before.
        self.send(worker, stop_frame())

    def condemn(self, worker: WorkerProcess, remark: str = "") -> None:
        """Kill a worker; it gets no more tasks and is not checked any more."""
        self._sched.retire(worker.index)
        worker.condemn(remark)

    def gone(self, worker: WorkerProcess) -> None:
        """Forget a worker whose process has ended and whose messages are all received."""
        self._starting.discard(worker)
        self._multi_item.pop(worker.index, None)
        self._give_back_requests.pop(worker.index, None)
        self._ledger.gone(worker)
        # Remove them before they are closed.  The writer is registered while it has a backlog.
        for fd in (worker.reader.fd, worker.writer.fd):
            self._reactor.remove(fd)
        if worker.logs is not None:
            self._reactor.remove(worker.logs.fd)

    def clear(self) -> None:
        """Stop: the pool is terminated and has answered all jobs."""
        self.stopped = True
        self._sched.clear()
        self._multi_item.clear()
        for worker in self.workers:
            worker.cancel_timers(serving=True)

    # -- messages in -------------------------------------------------------------------------------

    def receive(self, worker: WorkerProcess) -> None:
        """Receive a worker's messages, and give it its next tasks in the same step."""
        reader, box = worker.reader, worker.box
        frames = reader.frames()
        # The `try` covers only the reading of the worker's data.  An exception in what follows is a
        # bug of the engine, not an invalid message of the worker.
        while worker.protocol_error is None:
            try:
                frame = next(frames, None)
                if frame is None:
                    break
                if self.stopped:  # `terminate` has answered all jobs
                    continue
                # At least one of the two differs if the page was filled with zeros or 0xFF.
                if box.words[LIMIT] != box.limit or box.words[HEAD] != box.head:
                    raise ValueError("it wrote over its parent's words in the shared page")
                (_, kind, errors, _, count, mark, nanos), body = frame
                if kind == ANSWER:
                    self.answers.announced(worker, errors, count, body, mark, nanos)
                else:
                    self._understand(worker, kind, count, body)
            except Exception as exc:
                self.distrust(worker, exc)
                return
            if kind == ANSWER:
                self._after_answers(worker)
            elif kind == SKIPPED:
                self._after_answers(worker)
                self.give_idle()
            elif kind == READY and worker.reason is None:
                self._greeted(worker)
        if reader.buffer or reader.body is not None:  # part of a message
            in_flight = worker.in_flight
            # Otherwise its next answer would be read as the rest of this message.
            if in_flight.sent == in_flight.answered and worker.state is WorkerStates.READY:
                self.distrust(worker, ValueError("it began a message, but has nothing to answer"))
        # A pipe at its end stays readable.  The sentinel reports the end of the process.
        if reader.ended:
            self._reactor.remove(reader.fd)

    def _understand(
        self, worker: WorkerProcess, kind: int, count: int, body: bytes | memoryview
    ) -> None:
        """Record what a message other than answers says about this worker; do not act on it yet.

        Raises:
            Exception: of any type, if the worker has sent an invalid message.
        """
        if kind == READY:
            # A greeting of another size comes from another version.
            wire, mapped = GREETING.unpack(body) if len(body) == GREETING.size else (0, True)
            if wire != WIRE:
                story = "the worker imports another version of xpool; check PYTHONPATH"
                worker.failed(RuntimeError(story))
                self.condemn(worker)
            elif worker.reason is None:
                worker.ready(mapped)  # raises on a second greeting
        elif kind == SKIPPED:
            self.answers.skipped(worker, count)
        elif kind == FAILED:
            worker.failed(Refusal.unpacked(body))
        else:
            raise ValueError(f"a message of unknown kind {kind}")

    def distrust(self, worker: WorkerProcess, exc: Exception) -> None:
        """Kill a worker that has sent an invalid message, and ignore what it sends afterwards.

        Its tasks are answered when it has ended.
        """
        if worker.protocol_error is not None:
            return
        worker.distrust(exc)
        self.condemn(worker)
        self._reactor.remove(worker.reader.fd)

    def _after_answers(self, worker: WorkerProcess) -> None:
        """Go on with a worker that has answered or skipped some of its items."""
        w = worker.index
        in_flight = worker.in_flight
        size = in_flight.sent - in_flight.answered
        if size < 2:
            self._multi_item.pop(w, None)
        if worker.state is not WorkerStates.READY:
            if worker.interrupted is None and self._overdue.cancel(worker):
                # The worker has stopped that task.  Its current task may have to stop, too.
                self._checks.schedule_by(worker, self._reactor.now())
            # The worker has answered or skipped all that it held when it was recalled.
            if in_flight.paused and not size:
                self._recalls.cancel(worker)
                if worker.emptied():
                    self._sched.resume(w)
        if worker.state is not WorkerStates.READY:
            # The worker goes on with the tasks that it holds; answers may wait in its outbox.
            if w in self._multi_item and worker.state is not WorkerStates.CONDEMNED:
                self._looks.schedule_by(worker, self._reactor.now() + OUTBOX_POLL_SECONDS)
            if self._sched.holds_back:
                self.give_idle()
            return
        if self._sched.queued:
            # A process that has kept the memory of a task that might have more than others ends.
            if not size and self._sched.had_more(w) and self.guard.is_above(worker):
                self.retire(worker)
            # While memory is short, one task runs at a time.
            alone = self.guard.short or self._sched.alone in self._sched.queued
            for batch in () if alone else self._sched.refill(w):
                self.give(worker, batch)
            if alone or self._sched.holds_back:
                self.give_idle()
            if worker.state is not WorkerStates.READY:
                return
            size = in_flight.sent - in_flight.answered
        # The process has run all tasks that it may run (`maxtasksperchild`).
        if not size and in_flight.left == 0:
            self.retire(worker)
        elif w in self._multi_item:
            if not self._looks.pending(worker):  # the last `_look` may have set none
                self._looks.schedule_by(worker, self._reactor.now() + OUTBOX_POLL_SECONDS)
        # This worker may be idle while others hold tasks that they do not run.
        elif self._multi_item:
            self._look_for_surplus(worker)

    def drain(self, worker: WorkerProcess) -> None:
        self.receive(worker)
        while not (worker.reader.ended or worker.reader.dry):
            self.receive(worker)

    def take_early(self, worker: WorkerProcess, mark: int) -> int:
        """Take answers from an outbox before a message announces them; return how many."""
        if worker.protocol_error is not None:
            return 0
        try:
            return self.answers.unannounced(worker, mark)
        except Exception as exc:
            self.distrust(worker, exc)
            return 0

    # -- tasks out ---------------------------------------------------------------------------------

    def give_idle(self, direct_job: int = 0, newest: bool = False) -> None:
        """Send waiting tasks to idle workers; the caller of ``direct_job`` receives its answer.

        ``newest``: the worker that became idle last comes first, as for ``direct_job``.
        """
        most = None
        if self.guard.short:
            if any(in_flight.size for in_flight in self._sched.in_flight):
                return
            most = 1  # else no task would run while memory is short
        if self._direct.muted and self._sched.queued:
            for w in self._direct.muted.intersection(self._sched.idle):
                if self.workers[w].poller.poll(0):  # as in `Submission.put_direct`
                    self.receive(self.workers[w])
        for w, batch in self._sched.next_batches(newest or direct_job != 0, most):
            worker = self.workers[w]
            if direct_job and batch.job == CALLS and batch.first == direct_job:
                self._direct.begin(worker, direct_job)
            else:
                self._direct.given(worker)
            self.give(worker, batch)
        if self._sched.ranked and self._sched.queued:
            self._look_soon()  # some may hold tasks that the waiting ones overtake

    def take_over(self, number: int) -> WorkerProcess | None:
        """Let this thread receive the answer of a call that a worker has as its only task.

        Return the worker.  None: no worker has only this task, or another thread receives it.
        """
        # The turn of a thread whose task was taken back from its worker is not over yet.
        if number in self._direct.turns:
            return None
        for worker in self.workers:
            in_flight = worker.in_flight
            if in_flight.sent - in_flight.answered != 1:
                continue
            batch = in_flight.held[0]
            if batch.first == number and batch.job == CALLS and not batch.done:
                if worker.state is not WorkerStates.READY or worker in self._direct:
                    return None
                self._direct.begin(worker, number)
                return worker
        return None

    def give(self, worker: WorkerProcess, batch: Batch) -> None:
        """Send a batch to a worker, after its function if the worker does not have that yet.

        The pipe of the worker is watched, by the engine's thread or by a caller.
        """
        before: Parts = []
        # Functions to drop first, then the function, then its tasks: all in one write.
        func, writer = batch.func, worker.writer
        if worker.dropped:
            before = forget_frame(worker.dropped)
            worker.dropped.clear()
        if func and func not in worker.functions and func in self._functions:
            # If the function is missing, its job has failed: answers to its tasks are ignored.
            worker.functions.add(func)
            mode, payload = self._functions[func]
            before += func_frame(func, mode, payload if worker.mapped else inline(payload))
        items = batch.items if worker.mapped else [inline(item) for item in batch.items]
        tasks = tasks_frame(func, items, TASKS if batch.terms.limit is None else TIMED)
        writer.send(before + tasks if before else tasks)
        if writer.backlog:
            self._flush_later(writer)
        if batch.flow is not None:
            batch.flow.taken(batch.items)
        # The earliest time at which one of the new tasks can exceed its limit.
        limit = batch.terms.limit
        if limit is not None:
            self._checks.schedule_by(worker, self._reactor.now() + limit.seconds)
        in_flight = worker.in_flight
        if in_flight.sent - in_flight.answered > 1:
            self._multi_item[worker.index] = None
            if not self._looks.pending(worker):
                self._looks.schedule_by(worker, self._reactor.now() + OUTBOX_POLL_SECONDS)

    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        """Keep a function; return the number that tasks call it by."""
        number = next(self._numbers)
        self._functions[number] = mode, payload
        return number

    def forget(self, func: int) -> None:
        """Let the workers drop a function: its job is done."""
        self._functions.pop(func, None)
        for worker in self.workers:
            if func in worker.functions:
                worker.functions.discard(func)
                worker.dropped.append(func)

    def send(self, worker: WorkerProcess, parts: Parts) -> None:
        """Write a frame: as much as the pipe has room for now, and the rest later."""
        worker.writer.send(parts)
        if worker.writer.backlog:
            self._flush_later(worker.writer)

    def _flush_later(self, writer: FrameWriter) -> None:
        # If the pipe is watched already, `flush` will write the backlog.
        if writer.fd in self._reactor:
            return

        def flush(fd: int) -> None:
            writer.flush()
            # Stop watching, since epoll reports a pipe with room at every turn.
            if not writer.backlog:
                self._reactor.remove(fd)

        self._reactor.add(writer.fd, flush, writable=True)

    # -- silent workers ----------------------------------------------------------------------------

    def _look_for_surplus(self, worker: WorkerProcess) -> None:
        """If a worker is idle, check soon whether others hold tasks that they do not run."""
        if not worker.in_flight.size:
            self._look_soon()

    def _look_soon(self) -> None:
        """Check soon all workers with several tasks."""
        if self._multi_item:
            when = self._reactor.now() + PAGE_SETTLE_SECONDS
            for w in self._multi_item:
                self._looks.schedule_by(self.workers[w], when)

    def _look(self, worker: WorkerProcess) -> None:
        """Check a worker with several tasks that was silent for a while.

        Takes the answers that the last check saw in the outbox: all their bytes are visible by now.
        Recalls the tasks that the worker has not begun if another worker is idle, or if tasks of a
        higher priority wait.
        """
        w, now = worker.index, self._reactor.now()
        if w not in self._multi_item:
            self._give_back_requests.pop(w, None)
            return
        if worker in self._direct:  # a caller receives the worker's messages
            self._looks.schedule_by(worker, now + OUTBOX_POLL_SECONDS)
            return
        box = worker.box
        # These words are read before the pipe: the next check takes answers up to this mark.  An
        # answer since the last check is a change, too: a task may have ended just after that check.
        now_seen = began, tail, _ = box.began, box.tail, worker.in_flight.answered
        seen = worker.look(*now_seen)
        # Messages first: an answer in the pipe may precede those in the outbox.
        self.drain(worker)
        if seen[1] > box.head and not worker.reader.partial:
            worker.took_early(self.take_early(worker, seen[1]))
            if worker.protocol_error is None:  # else the worker gets no more tasks
                self._after_answers(worker)
        sits = w in self._give_back_requests and seen == now_seen
        serves, sched = worker.state is WorkerStates.READY, self._sched
        if serves and (
            (sched.surplus(w, began) and (sched.idle or sits)) or sched.overtaken(w, began)
        ):
            self.recall(worker, began)
            self._looks.schedule_by(worker, now + PAGE_SETTLE_SECONDS)
        elif w in self._multi_item and (tail > box.head or seen != now_seen):
            self._looks.schedule_by(worker, now + OUTBOX_POLL_SECONDS)

    def recall(self, worker: WorkerProcess, began: int) -> None:
        """Forbid a worker to begin items from number ``began`` on, and give them to others.

        They are taken back a moment later, when the worker has surely seen the limit.
        """
        if worker.in_flight.paused:
            return  # already recalled
        worker.recall(began)
        self._sched.pause(worker.index)
        self._recalls.schedule_by(worker, self._reactor.now() + PAGE_SETTLE_SECONDS)

    def _take_back(self, worker: WorkerProcess) -> None:
        box = worker.box
        # The worker may have begun more items before it saw the limit.
        self._sched.take_back(worker.index, max(box.limit, box.began))
        self.give_idle()
        for job, items in self._give_back_requests.pop(worker.index, ()):
            self.give_back(job, items)  # other workers may just have got some of them

    def give_back(self, job: int, items: range) -> None:
        """Give back the items among ``items`` that no worker has begun, now or after a recall."""
        holds_back = self._sched.holds_back
        # In reverse order, because the receiver puts each range in front of all others.
        for one in reversed(self._sched.take_out(job, items)):
            self.answers.handed_back(one)
        for w in self._multi_item:
            held = self._sched.in_flight[w].held
            if any(batch.job == job and batch.first in items for batch in held):
                self._give_back_requests.setdefault(w, []).append((job, items))
                self._looks.schedule_by(self.workers[w], self._reactor.now() + PAGE_SETTLE_SECONDS)
        if holds_back:
            self.give_idle()  # other items may have waited for one of these

    # -- deadlines ---------------------------------------------------------------------------------

    def withdraw(self, job: int, index: int | None = None) -> None:
        """Drop the waiting tasks of a job that has ended, and stop its running ones."""
        holds_back = self._sched.holds_back
        for w in self._sched.withdraw(job, index):
            worker = self.workers[w]
            # A condemned worker begins nothing more and cannot be recalled.
            if worker.state is not WorkerStates.CONDEMNED:
                self.recall(worker, worker.box.began)
                self._check(worker)
                # The worker may have been about to begin another task of the job.
                self._checks.schedule_by(worker, self._reactor.now() + PAGE_SETTLE_SECONDS)
        if holds_back:
            self.give_idle()  # others may have waited for a dropped task

    def _check(self, worker: WorkerProcess) -> None:
        """Stop a worker's start or running task if it is due; schedule the next check."""
        if worker in self._starting:
            self._check_start(worker)
            return
        if worker not in self._direct:
            self.drain(worker)  # a task that is answered was in time
        if worker.interrupted is not None or worker.state is WorkerStates.CONDEMNED:
            return
        box, now = worker.box, self._reactor.now()
        seen = WorkerProgress(box.began, box.since, (worker.reader.got, worker.writer.rest))
        if seen.since is not None and seen.since > now + 1.0:
            # With such a time in the page, the task would never exceed its limit.
            self.distrust(
                worker, ValueError(f"its task began {seen.since - now:.0f} s in the future")
            )
            return
        running = self._sched.running(worker.index, seen.began)
        in_flight = worker.in_flight
        act, item, when = worker.deadlines.judge(in_flight, running, seen, now)
        if act is Act.INTERRUPT:
            self._interrupt(worker, item)
        elif act is Act.CONDEMN:
            self.condemn(worker)
        else:
            if act is Act.RECALL:
                self.recall(worker, seen.began)
                when = now + PAGE_SETTLE_SECONDS
            if when is not None:
                self._checks.schedule_by(worker, when)

    def _check_start(self, worker: WorkerProcess) -> None:
        assert self._start_limit is not None
        since, now = worker.box.since, self._reactor.now()
        # If it has not reached its first line, the fork server or the system is still at work.
        if since is None or now < since + self._start_limit:
            self._checks.schedule_by(worker, (now if since is None else since) + self._start_limit)
        else:
            worker.ask_for_stack(now)
            self._overdue.schedule_by(worker, now + STOP_GRACE_SECONDS / 2)

    def _interrupt(self, worker: WorkerProcess, item: int) -> None:
        """Ask a worker to stop its running task, and to begin nothing more."""
        self.recall(worker, item + 1)
        worker.interrupt(item, self._reactor.now())
        self._overdue.schedule_by(worker, self._reactor.now() + STOP_GRACE_SECONDS / 2)

    def _kill_overdue(self, worker: WorkerProcess) -> None:
        """Kill a worker that has not stopped its task, or its start, within the grace period."""
        if worker not in self._direct:
            self.drain(worker)
        starts, now = worker in self._starting, self._reactor.now()
        if not starts and worker.interrupted is None:
            return
        if not worker.asked_again:  # also if this thread comes late: else no stack is known
            worker.ask_again()
            self._overdue.schedule_by(worker, now + STOP_GRACE_SECONDS / 2)
            return
        if worker.interrupted is None:
            stack = worker.box.stack()
            # Without its last line, the stack may be half written.
            due = TASK_LINE in stack or not is_starved(worker, now)
        else:
            # The worker still runs that item after the grace period.
            due = worker.box.began == worker.interrupted + 1 and not is_starved(worker, now)
        if not due:  # the worker has left the item, or lacked processor time
            self._overdue.schedule_by(worker, now + STOP_GRACE_SECONDS)
            return
        if starts and worker.reason is None:  # else the initializer has failed
            # Record it first: the pool reads the reason when the process has ended.
            limit, stack = self._start_limit or 0.0, own_part(stack)
            worker.failed(TaskTimeout(limit, worker.index, worker.pid, START_OF_WORKER, stack))
        self.condemn(worker)
