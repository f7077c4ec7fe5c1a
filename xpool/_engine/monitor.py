"""What is done with workers that live: their messages are taken, they get tasks, and are looked at.

A worker that must break something off is asked first: the parent names the item in the shared page
and sends a signal.  Its handler writes where the worker is, and raises `TaskStopped` there, if the
worker is in that very item.  If it has not said a word when the grace is over, it is killed.  From
the moment of asking, the worker begins nothing new, so nothing else can be hit; what else it held
goes to others two milliseconds later, as with every recall.

Called with the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Sequence

from xpool._engine.answers import Answers
from xpool._engine.direct import DirectReceive
from xpool._engine.dispatcher import Dispatcher
from xpool._engine.jobs.deadlines import Act, Deadlines, Seen
from xpool._engine.jobs.scheduler import CALLS, Batch, Scheduler, TaskRange
from xpool._engine.jobs.states import WorkerEvent, WorkerStates
from xpool._engine.ledger import Ledger
from xpool._engine.memory import MemoryGuard
from xpool._engine.reactor import Alarms, Reactor
from xpool._engine.slot import Slot
from xpool._engine.start_limit import STOP_GRACE_SECONDS, StartLimit, is_starved, note_asked
from xpool._wire.outbox import HEAD, LIMIT, NO_LIMIT, STOP_SIGNAL
from xpool._wire.wire import (
    ANSWER,
    FAILED,
    GREETING,
    READY,
    SKIPPED,
    TO_PARENT,
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
        self,
        slots: Sequence[Slot],
        sched: Scheduler,
        reactor: Reactor,
        dispatcher: Dispatcher,
        answers: Answers,
        direct: DirectReceive,
        ledger: Ledger,
        lifetime: int | None,
        start_limit: float | None,
    ) -> None:
        self.guard: MemoryGuard  # set by the engine, whose it is
        self.stopped = False  # terminated: nothing is sent or taken any more
        self.lifetime = lifetime  # tasks that a process may run
        self._slots, self._sched, self._reactor = slots, sched, reactor
        self._dispatcher, self._answers, self._direct = dispatcher, answers, direct
        self._ledger = ledger
        self._deadlines = {slot.index: Deadlines() for slot in slots}
        # Workers with two or more items in hand: the ones to look at when they are silent.
        self._multi_item: dict[int, None] = {}
        # What is to be handed back, as job and items, if such a worker is seen to sit on it.
        self._give_back_requests: dict[int, list[tuple[int, range]]] = {}
        self._looks = Alarms(reactor, self._look)
        self._recalls = Alarms(reactor, self._take_back)
        self._checks = Alarms(reactor, self._check)
        self._overdue = Alarms(reactor, self._kill_overdue)
        self._alarms = (self._looks, self._recalls, self._checks, self._overdue)
        self._start_limit = StartLimit(reactor, start_limit, self.condemn)

    # -- a process comes and goes ------------------------------------------------------------------

    def started(self, slot: Slot) -> None:
        """Listen to a new process."""

        def handler(fd: int) -> None:
            # The event may be from before a caller took over: the answer is his to take.
            if slot not in self._direct:
                self.receive(slot)

        self._reactor.add(slot.reader.fd, handler)
        self._deadlines[slot.index] = Deadlines()
        self._start_limit.started(slot)

    def _greeted(self, slot: Slot) -> None:
        """Take a worker into service that says that it is ready."""
        self._start_limit.over(slot)
        self._ledger.ready(slot.index)
        # Else it was told to end while it started: it goes on to the STOP that lies in its pipe.
        if slot.state is WorkerStates.READY:
            self._sched.ready(slot.index, self.lifetime)
            self.give_idle()
            # Others may sit on tasks that they were given when it was not there.
            self._look_for_surplus(slot)

    def retire(self, slot: Slot) -> None:
        """Let a worker end when it has answered what it holds."""
        slot.transition(WorkerEvent.RETIRE)
        self._sched.retire(slot.index)
        # The last of what it is sent: it answers all that came before.
        self._dispatcher.send(slot, stop_frame())

    def dismiss(self, slot: Slot) -> None:
        """Let a worker end after the task that it is in; others get what it has not begun."""
        if self._sched.in_flight[slot.index].size:
            self._recall(slot, slot.box.began)
        self.retire(slot)

    def condemn(self, slot: Slot) -> None:
        """Kill a worker; it gets nothing more, and is looked at no more."""
        slot.transition(WorkerEvent.CONDEMN)
        self._sched.retire(slot.index)
        # A timer that is left could want a step that a condemned worker's table does not have.
        self._unset(slot)
        slot.kill()

    def _unset(self, slot: Slot) -> None:
        self._start_limit.over(slot)
        for alarms in self._alarms:
            alarms.cancel(slot)

    def gone(self, slot: Slot) -> None:
        """Its process has ended, and all that it sent is taken."""
        self._multi_item.pop(slot.index, None)
        self._give_back_requests.pop(slot.index, None)
        self._ledger.gone(slot.index, slot.writer.sent)
        self._unset(slot)
        # Before the slot closes them.  The writer is there while it has a backlog.
        for fd in (slot.reader.fd, slot.writer.fd):
            self._reactor.remove(fd)

    def clear(self) -> None:
        """The pool is terminated: all is answered, nothing more is taken or given."""
        self.stopped = True
        self._sched.clear()
        self._multi_item.clear()
        for slot in self._slots:
            self._unset(slot)

    # -- messages in -------------------------------------------------------------------------------

    def receive(self, slot: Slot) -> None:
        """Take what has come from a worker, and give it its next tasks in the same step."""
        frames = slot.reader.frames()
        # Only what the worker wrote is read within the `try`.  What follows is done outside of it:
        # an exception there is a bug of the engine's, and no nonsense of the worker's.
        while slot.protocol_error is None:
            kind = ENDED
            try:
                for head, body in frames:
                    kind, errors, count, _, mark, nanos = TO_PARENT.unpack(head)
                    if not self.stopped:  # else all was answered when the pool was terminated
                        self._understand(slot, kind, errors, count, body, mark, nanos)
                        break
                    kind = ENDED
            except Exception as exc:
                self.distrust(slot, exc)
                return
            if kind == ENDED:
                break
            if kind == READY and slot.reason is None:
                self._greeted(slot)
            elif kind in (ANSWER, SKIPPED):
                self._after_answers(slot)
                if kind == SKIPPED:
                    self.give_idle()
        reader = slot.reader
        if reader.buffer or reader.body is not None:  # part of a message
            in_flight = self._sched.in_flight[slot.index]
            # Its next answer would be read as the rest of this message.
            if in_flight.sent == in_flight.answered and slot.state is WorkerStates.READY:
                self.distrust(slot, ValueError("part of a message where nothing is to be answered"))
        # The end of a pipe stays readable.  What it means is for the sentinel to say.
        if reader.ended:
            self._reactor.remove(reader.fd)

    def _understand(
        self,
        slot: Slot,
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
        box = slot.box
        # Zeros leave one of them, 0xFF the other.
        if box.words[LIMIT] != box.limit_written or box.words[HEAD] != box.head_written:
            raise ValueError("the parent's words in the shared page are overwritten")
        if kind == ANSWER:
            self._answers.announced(slot, errors, count, body, mark, nanos)
        elif kind == READY:
            # Of another size, it is the greeting of another version.
            wire, slot.mapped = GREETING.unpack(body) if len(body) == GREETING.size else (0, True)
            if wire != WIRE:
                slot.reason = RuntimeError(
                    "the worker imports another version of xpool; look at PYTHONPATH"
                )
                self.condemn(slot)
            elif slot.reason is None:
                slot.transition(WorkerEvent.HELLO)  # raises where it has greeted before
        elif kind == SKIPPED:
            self._answers.skipped(slot, count)
        elif kind == FAILED:
            slot.reason = Refusal.unpacked(body)
        else:
            raise ValueError(f"a message of unknown kind {kind}")

    def distrust(self, slot: Slot, exc: Exception) -> None:
        """Kill a worker that has sent an invalid message; nothing more of it is believed."""
        if slot.protocol_error is not None:
            return
        slot.protocol_error = exc
        if slot.state is WorkerStates.STARTING:
            # Its start has failed for this reason.
            slot.reason = exc
        self.condemn(slot)
        # So that whoever drains the pipe comes to an end; what is left in it is not believed.
        slot.reader.ended = True
        self._reactor.remove(slot.reader.fd)
        self._answers.disown(slot, exc)

    def _after_answers(self, slot: Slot) -> None:
        if slot.protocol_error is not None:
            return  # it gets nothing more
        w = slot.index
        in_flight = self._sched.in_flight[w]
        size = in_flight.sent - in_flight.answered
        if size < 2:
            self._multi_item.pop(w, None)
        waits = slot.state is not WorkerStates.READY
        if waits and slot.interrupted is None and self._overdue.cancel(slot):
            # It has broken off what it was to.  What it runs now may have to end, too.
            self._checks.schedule_by(slot, self._reactor.now())
        # It has answered, or skipped, all that it held when it was told to begin nothing more.
        if in_flight.paused and not size:
            self._emptied(slot)
        if slot.state is not WorkerStates.READY:
            # It goes on with what it holds, and what it answers next may wait in its outbox.
            if w in self._multi_item and slot.state is not WorkerStates.CONDEMNED:
                self._looks.schedule_by(slot, self._reactor.now() + OUTBOX_POLL_SECONDS)
            return
        if self._sched.queued:
            # Only where nothing else is in flight: one at a time while memory is short.
            if self.guard.short:
                self.give_idle()
            else:
                for batch in self._sched.refill(w):
                    self._give(slot, batch)
            size = in_flight.sent - in_flight.answered
        # It has run as many tasks as a process may (`maxtasksperchild`).
        if not size and in_flight.left == 0:
            self.retire(slot)
        elif w in self._multi_item:
            if not self._looks.pending(slot):  # it may have been given up looking at
                self._looks.schedule_by(slot, self._reactor.now() + OUTBOX_POLL_SECONDS)
        # This one may be free, and others have more in hand than what they run.
        elif self._multi_item:
            self._look_for_surplus(slot)

    def _emptied(self, slot: Slot) -> None:
        """A worker that was told to begin nothing more has answered all that it held."""
        # Before it may be given anything: it would answer that as skipped.
        slot.box.limit = NO_LIMIT
        self._recalls.cancel(slot)
        slot.transition(WorkerEvent.EMPTIED)
        if slot.state is WorkerStates.READY:
            self._sched.resume(slot.index)

    def drain(self, slot: Slot) -> None:
        """Receive all that is in a worker's pipe."""
        self.receive(slot)
        while not (slot.reader.ended or slot.reader.dry):
            self.receive(slot)

    def take_early(self, slot: Slot, mark: int) -> int:
        """Take answers out of an outbox that no message has told of; return how many."""
        if slot.protocol_error is not None:
            return 0
        try:
            return self._answers.unannounced(slot, mark)
        except Exception as exc:
            self.distrust(slot, exc)
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
                if self._slots[w].poller.poll(0):  # as in `give_direct`
                    self.receive(self._slots[w])
        for w, batch in self._sched.next_batches(direct_job != 0, most):
            slot = self._slots[w]
            # Before it is given: `_give` has the engine's thread hear a pipe that nobody polls.
            if direct_job and batch.job == CALLS and batch.first == direct_job:
                self._direct.begin(slot, direct_job)
            self._give(slot, batch)

    def give_direct(self, call: TaskRange) -> Slot | None:
        """Send an idle worker a call, whose answer the calling thread receives; None: it waits."""
        if self.guard.short:
            return None
        if self._sched.idle:
            slot = self._slots[next(reversed(self._sched.idle))]
            # A thread of a task may have written to the pipe after the answer.  Found here, that
            # ends the worker; found later, it would be read as the beginning of the next answer.
            if slot.poller.poll(0):
                self.receive(slot)
        given = self._sched.start(call)
        if given is None:
            return None
        slot = self._slots[given[0]]
        self._direct.begin(slot, call.first)
        self._give(slot, given[1])
        return slot

    def _give(self, slot: Slot, batch: Batch) -> None:
        if slot.index in self._direct.muted:
            self._direct.given(slot)
        self._dispatcher.send_batch(slot, batch)
        # Nothing that is given now can be over its time before.
        if batch.limit is not None:
            self._checks.schedule_by(slot, self._reactor.now() + batch.limit.seconds)
        in_flight = self._sched.in_flight[slot.index]
        if in_flight.sent - in_flight.answered > 1:
            self._multi_item[slot.index] = None
            if not self._looks.pending(slot):
                self._looks.schedule_by(slot, self._reactor.now() + OUTBOX_POLL_SECONDS)

    # -- silent workers ----------------------------------------------------------------------------

    def _look_for_surplus(self, slot: Slot) -> None:
        """When a worker has nothing and others have tasks in hand: are they sitting on them?"""
        if self._multi_item and not self._sched.in_flight[slot.index].size:
            when = self._reactor.now() + PAGE_SETTLE_SECONDS
            for w in self._multi_item:
                self._looks.schedule_by(self._slots[w], when)

    def _look(self, slot: Slot) -> None:
        """Look at a worker with tasks in hand that was silent for a while.

        What the last look saw in the outbox is certainly all there by now: it is taken.  A worker
        that sits on tasks while another has none is told to begin no more of them.
        """
        w, now = slot.index, self._reactor.now()
        if w not in self._multi_item:
            self._give_back_requests.pop(w, None)
            return
        if slot in self._direct:  # its caller receives all there is
            self._looks.schedule_by(slot, now + OUTBOX_POLL_SECONDS)
            return
        box = slot.box
        # Read before the pipe is drained: the next look takes what this one has seen.
        began, tail = box.began, box.tail
        seen, slot.seen = slot.seen, (began, tail)
        # Messages first: an answer in the pipe may come before those in the outbox.
        self.drain(slot)
        if seen[1] > box.head and not slot.reader.partial:
            slot.answers_taken_early += self.take_early(slot, seen[1])
            self._after_answers(slot)
        sits = w in self._give_back_requests and seen == (began, tail)
        surplus = slot.state is WorkerStates.READY and self._sched.surplus(w, began)
        if surplus and (self._sched.idle or sits):
            self._recall(slot, began)
            self._looks.schedule_by(slot, now + PAGE_SETTLE_SECONDS)
        elif w in self._multi_item and (tail > box.head or seen != (began, tail)):
            self._looks.schedule_by(slot, now + OUTBOX_POLL_SECONDS)

    def _recall(self, slot: Slot, began: int) -> None:
        """Let a worker begin nothing from item ``began`` on; others get it.

        What it is told it has certainly seen a moment later; then the rest is taken back.
        """
        if self._sched.in_flight[slot.index].paused:
            return  # it is told already
        slot.box.limit = began
        self._sched.pause(slot.index)
        slot.transition(WorkerEvent.RECALL)
        self._recalls.schedule_by(slot, self._reactor.now() + PAGE_SETTLE_SECONDS)

    def _take_back(self, slot: Slot) -> None:
        box = slot.box
        # It may have begun more before it saw the limit.
        self._sched.take_back(slot.index, max(box.limit, box.began))
        self.give_idle()
        for job, items in self._give_back_requests.pop(slot.index, ()):
            self.give_back(job, items)  # others may have got some of them just now

    def give_back(self, job: int, items: range) -> None:
        """Hand back those of these items that nobody has begun, now or when they are recalled."""
        # The last first: each is queued in front of all others.
        for index in reversed(self._sched.take_out(job, items)):
            self._answers.handed_back(job, index)
        for w in self._multi_item:
            held = self._sched.in_flight[w].held
            if any(batch.job == job and batch.first in items for batch in held):
                self._give_back_requests.setdefault(w, []).append((job, items))
                self._looks.schedule_by(self._slots[w], self._reactor.now() + PAGE_SETTLE_SECONDS)

    # -- deadlines ---------------------------------------------------------------------------------

    def withdraw(self, job: int, index: int | None = None) -> None:
        """Give nobody what still waits of a job that has ended, and stop what runs of it."""
        for w in self._sched.withdraw(job, index):
            slot = self._slots[w]
            # A condemned one begins nothing more, and its table has no recall.
            if slot.state is not WorkerStates.CONDEMNED:
                self._recall(slot, slot.box.began)
                self._check(slot)
                # It may have been about to begin another of them.
                self._checks.schedule_by(slot, self._reactor.now() + PAGE_SETTLE_SECONDS)

    def _check(self, slot: Slot) -> None:
        """End what a worker runs, if it must; have it looked at again when it may have to."""
        if slot not in self._direct:
            self.drain(slot)  # what is answered is in time
        if slot.interrupted is not None or slot.state is WorkerStates.CONDEMNED:
            return
        box, now = slot.box, self._reactor.now()
        seen = Seen(box.began, box.since, (slot.reader.got, slot.writer.rest))
        if seen.since is not None and seen.since > now + 1.0:
            # By such a clock, no task is ever over its time.
            self.distrust(slot, ValueError(f"a task that began {seen.since - now:.0f} s from now"))
            return
        running = self._sched.running(slot.index, seen.began)
        in_flight = self._sched.in_flight[slot.index]
        act, item, when = self._deadlines[slot.index].judge(in_flight, running, seen, now)
        if act is Act.INTERRUPT:
            self._interrupt(slot, item)
        elif act is Act.CONDEMN:
            self.condemn(slot)
        else:
            if act is Act.RECALL:
                self._recall(slot, seen.began)
                when = now + PAGE_SETTLE_SECONDS
            if when is not None:
                self._checks.schedule_by(slot, when)

    def _interrupt(self, slot: Slot, item: int) -> None:
        """Ask a worker to break off what it runs, and to begin nothing more."""
        assert slot.handle is not None
        # The item is named, and the rest forbidden, before the signal is sent: its handler looks
        # for the name, and could hit the next task.  The table, too, wants the recall first.
        slot.interrupted = item
        slot.box.ask(item + 1)
        self._recall(slot, item + 1)
        slot.transition(WorkerEvent.INTERRUPT)
        note_asked(slot, self._reactor.now())
        slot.handle.signal(STOP_SIGNAL)
        self._overdue.schedule_by(slot, self._reactor.now() + STOP_GRACE_SECONDS)

    def _kill_overdue(self, slot: Slot) -> None:
        """It was asked a while ago."""
        if slot not in self._direct:
            self.drain(slot)
        if slot.interrupted is None:
            return
        # It is in that item still, and has had its time.
        now = self._reactor.now()
        if slot.box.began == slot.interrupted + 1 and not is_starved(slot, now):
            self.condemn(slot)
        else:  # it has left it, and the answer is on its way; or it is given more time
            self._overdue.schedule_by(slot, now + STOP_GRACE_SECONDS)
