"""What is done with workers that live: their messages are taken, they get tasks, and are looked at.

A worker that must break something off is asked first: the parent names the item in the shared page
and sends a signal.  Its handler writes where the worker is, and raises `TaskStopped` there, if the
worker is in that very item.  If it has not said a word when the grace is over, it is killed.  From
the moment of asking, the worker begins nothing new, so nothing else can be hit; what else it held
goes to others two milliseconds later, as with every recall.

Called with the engine's lock held.
"""

from __future__ import annotations

from xpool._engine.answers import Answers, EngineOptions, Parts
from xpool._engine.direct import DirectReceive
from xpool._engine.dispatcher import Dispatcher
from xpool._engine.jobs.deadlines import Act, Seen
from xpool._engine.jobs.scheduler import CALLS, Batch, TaskRange
from xpool._engine.jobs.states import WorkerStates
from xpool._engine.memory import MemoryGuard
from xpool._engine.reactor import Alarms
from xpool._engine.start_limit import STOP_GRACE_SECONDS, StartLimit, is_starved
from xpool._engine.worker import WorkerProcess
from xpool._wire.outbox import HEAD, LIMIT
from xpool._wire.wire import (
    ANSWER,
    FAILED,
    GREETING,
    READY,
    SKIPPED,
    WIRE,
    Refusal,
    stop_frame,
)

__all__ = ["PAGE_SETTLE_SECONDS", "STOP_GRACE_SECONDS", "WorkerMonitor"]

ENDED = -1
"""In the place of the kind of a message: there is none."""

OUTBOX_POLL_SECONDS = 0.010
"""Seconds of silence after which the outbox of a worker with tasks in hand is looked into."""

PAGE_SETTLE_SECONDS = 0.002
"""Seconds until a word written to a shared page is certainly seen: microseconds, in truth."""


class WorkerMonitor:
    """Carries out what the scheduler, the deadlines and the workers' own words ask for."""

    def __init__(
        self, parts: Parts, dispatcher: Dispatcher, direct: DirectReceive, options: EngineOptions
    ) -> None:
        self.stopped = False  # terminated: nothing is sent or taken any more
        self.lifetime = options.lifetime  # tasks that a process may run
        self._workers, self._sched, self._reactor = parts.workers, parts.sched, parts.reactor
        self._dispatcher, self._direct, self._ledger = dispatcher, direct, parts.ledger
        self.answers = Answers(parts, self.give_idle, hands_back=options.hands_back)
        # Workers with two or more items in hand: the ones to look at when they are silent.
        self._multi_item: dict[int, None] = {}
        # What is to be handed back, as job and items, if such a worker is seen to sit on it.
        self._give_back_requests: dict[int, list[tuple[int, range]]] = {}
        reactor = parts.reactor
        self._looks = Alarms(reactor, self._look)
        self._recalls = Alarms(reactor, self._take_back)
        self._checks = Alarms(reactor, self._check)
        self._overdue = Alarms(reactor, self._kill_overdue)
        self._start_limit = StartLimit(reactor, options.initializer_timeout, self.condemn)
        self.guard = MemoryGuard(
            reactor, self._workers, options.memory, self.condemn, self.give_idle
        )

    # -- a process comes and goes ------------------------------------------------------------------

    def started(self, worker: WorkerProcess) -> None:
        """Listen to a new process."""

        def handler(fd: int) -> None:
            # The event may be from before a caller took over: the answer is his to take.
            if worker not in self._direct:
                self.receive(worker)

        self._reactor.add(worker.reader.fd, handler)
        self._start_limit.started(worker)

    def _greeted(self, worker: WorkerProcess) -> None:
        """Take a worker into service that says that it is ready."""
        self._start_limit.over(worker)
        self._ledger.ready(worker.index)
        # Else it was told to end while it started: it goes on to the STOP that lies in its pipe.
        if worker.state is WorkerStates.READY:
            self._sched.ready(worker.index, self.lifetime)
            self.give_idle()
            # Others may sit on tasks that they were given when it was not there.
            self._look_for_surplus(worker)

    def retire(self, worker: WorkerProcess) -> None:
        """Let a worker end when it has answered what it holds."""
        worker.retire()
        self._sched.retire(worker.index)
        # The last of what it is sent: it answers all that came before.
        self._dispatcher.send(worker, stop_frame())

    def dismiss(self, worker: WorkerProcess) -> None:
        """Let a worker end after the task that it is in; others get what it has not begun."""
        if worker.in_flight.size:
            self._recall(worker, worker.box.began)
        self.retire(worker)

    def condemn(self, worker: WorkerProcess, remark: str = "") -> None:
        """Kill a worker; it gets nothing more, and is looked at no more."""
        self._sched.retire(worker.index)
        worker.condemn(remark)

    def gone(self, worker: WorkerProcess) -> None:
        """Its process has ended, and all that it sent is taken."""
        self._multi_item.pop(worker.index, None)
        self._give_back_requests.pop(worker.index, None)
        self._ledger.gone(worker.index, worker.writer.sent)
        # Before the worker closes them.  The writer is there while it has a backlog.
        for fd in (worker.reader.fd, worker.writer.fd):
            self._reactor.remove(fd)

    def clear(self) -> None:
        """The pool is terminated: all is answered, nothing more is taken or given."""
        self.stopped = True
        self._sched.clear()
        self._multi_item.clear()
        for worker in self._workers:
            worker.cancel_timers(serving=True)

    # -- messages in -------------------------------------------------------------------------------

    def receive(self, worker: WorkerProcess) -> None:
        """Take what has come from a worker, and give it its next tasks in the same step."""
        frames = worker.reader.frames()
        # Only what the worker wrote is read within the `try`.  What follows is done outside of it:
        # an exception there is a bug of the engine's, and no nonsense of the worker's.
        while worker.protocol_error is None:
            kind = ENDED
            try:
                for head, body in frames:
                    _, kind, errors, _, count, mark, nanos = head
                    if not self.stopped:  # else all was answered when the pool was terminated
                        self._understand(worker, kind, errors, count, body, mark, nanos)
                        break
                    kind = ENDED
            except Exception as exc:
                self.distrust(worker, exc)
                return
            if kind == ENDED:
                break
            if kind == READY and worker.reason is None:
                self._greeted(worker)
            elif kind in (ANSWER, SKIPPED):
                self._after_answers(worker)
                if kind == SKIPPED:
                    self.give_idle()
        reader = worker.reader
        if reader.buffer or reader.body is not None:  # part of a message
            in_flight = worker.in_flight
            # Its next answer would be read as the rest of this message.
            if in_flight.sent == in_flight.answered and worker.state is WorkerStates.READY:
                self.distrust(
                    worker, ValueError("part of a message where nothing is to be answered")
                )
        # The end of a pipe stays readable.  What it means is for the sentinel to say.
        if reader.ended:
            self._reactor.remove(reader.fd)

    def _understand(
        self,
        worker: WorkerProcess,
        kind: int,
        errors: int,
        count: int,
        body: bytes | memoryview,
        mark: int,
        nanos: int,
    ) -> None:
        """Take what one message says into the books of this worker, and do nothing else yet.

        Raises:
            Exception, of any kind: the worker has sent an invalid message.
        """
        box = worker.box
        # Zeros leave one of them, 0xFF the other.
        if box.words[LIMIT] != box.limit_written or box.words[HEAD] != box.head_written:
            raise ValueError("the parent's words in the shared page are overwritten")
        if kind == ANSWER:
            self.answers.announced(worker, errors, count, body, mark, nanos)
        elif kind == READY:
            # Of another size, it is the greeting of another version.
            wire, mapped = GREETING.unpack(body) if len(body) == GREETING.size else (0, True)
            if wire != WIRE:
                story = "the worker imports another version of xpool; look at PYTHONPATH"
                worker.failed(RuntimeError(story))
                self.condemn(worker)
            elif worker.reason is None:
                worker.ready(mapped)  # raises where it has greeted before
        elif kind == SKIPPED:
            self.answers.skipped(worker, count)
        elif kind == FAILED:
            worker.failed(Refusal.unpacked(body))
        else:
            raise ValueError(f"a message of unknown kind {kind}")

    def distrust(self, worker: WorkerProcess, exc: Exception) -> None:
        """Kill a worker that has sent an invalid message; nothing more of it is believed."""
        if worker.protocol_error is not None:
            return
        worker.distrust(exc)
        self.condemn(worker)
        self._reactor.remove(worker.reader.fd)
        self.answers.disown(worker, exc)

    def _after_answers(self, worker: WorkerProcess) -> None:
        if worker.protocol_error is not None:
            return  # it gets nothing more
        w = worker.index
        in_flight = worker.in_flight
        size = in_flight.sent - in_flight.answered
        if size < 2:
            self._multi_item.pop(w, None)
        waits = worker.state is not WorkerStates.READY
        if waits and worker.interrupted is None and self._overdue.cancel(worker):
            # It has broken off what it was to.  What it runs now may have to end, too.
            self._checks.schedule_by(worker, self._reactor.now())
        # It has answered, or skipped, all that it held when it was told to begin nothing more.
        if in_flight.paused and not size:
            self._emptied(worker)
        if worker.state is not WorkerStates.READY:
            # It goes on with what it holds, and what it answers next may wait in its outbox.
            if w in self._multi_item and worker.state is not WorkerStates.CONDEMNED:
                self._looks.schedule_by(worker, self._reactor.now() + OUTBOX_POLL_SECONDS)
            return
        if self._sched.queued:
            # Only where nothing else is in flight: one at a time while memory is short.
            if self.guard.short:
                self.give_idle()
            else:
                for batch in self._sched.refill(w):
                    self._give(worker, batch)
            size = in_flight.sent - in_flight.answered
        # It has run as many tasks as a process may (`maxtasksperchild`).
        if not size and in_flight.left == 0:
            self.retire(worker)
        elif w in self._multi_item:
            if not self._looks.pending(worker):  # it may have been given up looking at
                self._looks.schedule_by(worker, self._reactor.now() + OUTBOX_POLL_SECONDS)
        # This one may be free, and others have more in hand than what they run.
        elif self._multi_item:
            self._look_for_surplus(worker)

    def _emptied(self, worker: WorkerProcess) -> None:
        """A worker that was told to begin nothing more has answered all that it held."""
        self._recalls.cancel(worker)
        worker.emptied()
        if worker.state is WorkerStates.READY:
            self._sched.resume(worker.index)

    def drain(self, worker: WorkerProcess) -> None:
        """Receive all that is in a worker's pipe."""
        self.receive(worker)
        while not (worker.reader.ended or worker.reader.dry):
            self.receive(worker)

    def take_early(self, worker: WorkerProcess, mark: int) -> int:
        """Take answers out of an outbox that no message has told of; return how many."""
        if worker.protocol_error is not None:
            return 0
        try:
            return self.answers.unannounced(worker, mark)
        except Exception as exc:
            self.distrust(worker, exc)
            return 0

    # -- tasks out ---------------------------------------------------------------------------------

    def give_idle(self, direct_job: int = 0) -> None:
        """Send what waits to the idle; the caller of ``direct_job`` will receive its answer."""
        most = None
        if self.guard.short:
            if any(in_flight.size for in_flight in self._sched.in_flight):
                return
            most = 1  # so that there is an end to it
        if self._direct.muted and self._sched.queued:
            for w in self._direct.muted.intersection(self._sched.idle):
                if self._workers[w].poller.poll(0):  # as in `give_direct`
                    self.receive(self._workers[w])
        for w, batch in self._sched.next_batches(direct_job != 0, most):
            worker = self._workers[w]
            # Before it is given: `_give` has the engine's thread hear a pipe that nobody polls.
            if direct_job and batch.job == CALLS and batch.first == direct_job:
                self._direct.begin(worker, direct_job)
            self._give(worker, batch)

    def give_direct(self, call: TaskRange) -> WorkerProcess | None:
        """Send an idle worker a call, whose answer the calling thread receives; None: it waits."""
        if self.guard.short:
            return None
        if self._sched.idle:
            worker = self._workers[next(reversed(self._sched.idle))]
            # A thread of a task may have written to the pipe after the answer.  Found here, that
            # ends the worker; found later, it would be read as the beginning of the next answer.
            if worker.poller.poll(0):
                self.receive(worker)
        given = self._sched.start(call)
        if given is None:
            return None
        worker = self._workers[given[0]]
        self._direct.begin(worker, call.first)
        self._give(worker, given[1])
        return worker

    def _give(self, worker: WorkerProcess, batch: Batch) -> None:
        if worker.index in self._direct.muted:
            self._direct.given(worker)
        self._dispatcher.send_batch(worker, batch)
        # Nothing that is given now can be over its time before.
        if batch.limit is not None:
            self._checks.schedule_by(worker, self._reactor.now() + batch.limit.seconds)
        in_flight = worker.in_flight
        if in_flight.sent - in_flight.answered > 1:
            self._multi_item[worker.index] = None
            if not self._looks.pending(worker):
                self._looks.schedule_by(worker, self._reactor.now() + OUTBOX_POLL_SECONDS)

    # -- silent workers ----------------------------------------------------------------------------

    def _look_for_surplus(self, worker: WorkerProcess) -> None:
        """When a worker has nothing and others have tasks in hand: are they sitting on them?"""
        if self._multi_item and not worker.in_flight.size:
            when = self._reactor.now() + PAGE_SETTLE_SECONDS
            for w in self._multi_item:
                self._looks.schedule_by(self._workers[w], when)

    def _look(self, worker: WorkerProcess) -> None:
        """Look at a worker with tasks in hand that was silent for a while.

        What the last look saw in the outbox is certainly all there by now: it is taken.  A worker
        that sits on tasks while another has none is told to begin no more of them.
        """
        w, now = worker.index, self._reactor.now()
        if w not in self._multi_item:
            self._give_back_requests.pop(w, None)
            return
        if worker in self._direct:  # its caller receives all there is
            self._looks.schedule_by(worker, now + OUTBOX_POLL_SECONDS)
            return
        box = worker.box
        # Read before the pipe is drained: the next look takes what this one has seen.
        began, tail = box.began, box.tail
        seen = worker.looked(began, tail)
        # Messages first: an answer in the pipe may come before those in the outbox.
        self.drain(worker)
        if seen[1] > box.head and not worker.reader.partial:
            worker.took_early(self.take_early(worker, seen[1]))
            self._after_answers(worker)
        sits = w in self._give_back_requests and seen == (began, tail)
        surplus = worker.state is WorkerStates.READY and self._sched.surplus(w, began)
        if surplus and (self._sched.idle or sits):
            self._recall(worker, began)
            self._looks.schedule_by(worker, now + PAGE_SETTLE_SECONDS)
        elif w in self._multi_item and (tail > box.head or seen != (began, tail)):
            self._looks.schedule_by(worker, now + OUTBOX_POLL_SECONDS)

    def _recall(self, worker: WorkerProcess, began: int) -> None:
        """Let a worker begin nothing from item ``began`` on; others get it.

        What it is told it has certainly seen a moment later; then the rest is taken back.
        """
        if worker.in_flight.paused:
            return  # it is told already
        worker.recall(began)
        self._sched.pause(worker.index)
        self._recalls.schedule_by(worker, self._reactor.now() + PAGE_SETTLE_SECONDS)

    def _take_back(self, worker: WorkerProcess) -> None:
        box = worker.box
        # It may have begun more before it saw the limit.
        self._sched.take_back(worker.index, max(box.limit, box.began))
        self.give_idle()
        for job, items in self._give_back_requests.pop(worker.index, ()):
            self.give_back(job, items)  # others may have got some of them just now

    def give_back(self, job: int, items: range) -> None:
        """Hand back those of these items that nobody has begun, now or when they are recalled."""
        # The last first: each is queued in front of all others.
        for index in reversed(self._sched.take_out(job, items)):
            self.answers.handed_back(job, index)
        for w in self._multi_item:
            held = self._sched.in_flight[w].held
            if any(batch.job == job and batch.first in items for batch in held):
                self._give_back_requests.setdefault(w, []).append((job, items))
                self._looks.schedule_by(self._workers[w], self._reactor.now() + PAGE_SETTLE_SECONDS)

    # -- deadlines ---------------------------------------------------------------------------------

    def withdraw(self, job: int, index: int | None = None) -> None:
        """Give nobody what still waits of a job that has ended, and stop what runs of it."""
        for w in self._sched.withdraw(job, index):
            worker = self._workers[w]
            # A condemned one begins nothing more, and its table has no recall.
            if worker.state is not WorkerStates.CONDEMNED:
                self._recall(worker, worker.box.began)
                self._check(worker)
                # It may have been about to begin another of them.
                self._checks.schedule_by(worker, self._reactor.now() + PAGE_SETTLE_SECONDS)

    def _check(self, worker: WorkerProcess) -> None:
        """End what a worker runs, if it must; have it looked at again when it may have to."""
        if worker not in self._direct:
            self.drain(worker)  # what is answered is in time
        if worker.interrupted is not None or worker.state is WorkerStates.CONDEMNED:
            return
        box, now = worker.box, self._reactor.now()
        seen = Seen(box.began, box.since, (worker.reader.got, worker.writer.rest))
        if seen.since is not None and seen.since > now + 1.0:
            # By such a clock, no task is ever over its time.
            self.distrust(
                worker, ValueError(f"a task that began {seen.since - now:.0f} s from now")
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
                self._recall(worker, seen.began)
                when = now + PAGE_SETTLE_SECONDS
            if when is not None:
                self._checks.schedule_by(worker, when)

    def _interrupt(self, worker: WorkerProcess, item: int) -> None:
        """Ask a worker to break off what it runs, and to begin nothing more."""
        # The item is named, and the rest forbidden, before the signal is sent: its handler looks
        # for the name, and could hit the next task.  The table, too, wants the recall first.
        worker.name_item(item)
        self._recall(worker, item + 1)
        worker.interrupt(self._reactor.now())
        self._overdue.schedule_by(worker, self._reactor.now() + STOP_GRACE_SECONDS)

    def _kill_overdue(self, worker: WorkerProcess) -> None:
        """It was asked a while ago."""
        if worker not in self._direct:
            self.drain(worker)
        if worker.interrupted is None:
            return
        # It is in that item still, and has had its time.
        now = self._reactor.now()
        if worker.box.began == worker.interrupted + 1 and not is_starved(worker, now):
            self.condemn(worker)
        else:  # it has left it, and the answer is on its way; or it is given more time
            self._overdue.schedule_by(worker, now + STOP_GRACE_SECONDS)
