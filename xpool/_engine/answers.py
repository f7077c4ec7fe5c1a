"""What comes of tasks: a result, an error of their own, one of xpool's, or another try.

Called with the engine's lock held.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

from xpool._engine.jobs.budget import RestartBudget, back_off
from xpool._engine.jobs.ranges import name_of
from xpool._engine.jobs.scheduler import CALLS, Batch, Scheduler
from xpool._engine.jobs.states import WorkerEvent
from xpool._engine.ledger import Ledger
from xpool._engine.pickled_results import Encoded
from xpool._engine.reactor import Reactor
from xpool._engine.slot import Slot
from xpool._pickling.frame import FRAMED, Leased, adopt
from xpool._wire.outbox import NO_LIMIT, entries
from xpool._wire.wire import BODY_AGAIN, BODY_ERROR, OUTBOX_MIXED
from xpool.errors import InternalError, TaskTimeout, WorkerDied

__all__ = ["OURS", "Answers", "own_part"]

CULPRIT = 5
"""Workers that one task may kill, whatever its ``retries``."""

_WORKER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "_worker", "")
OURS = tuple(f'"{_WORKER}{name}.py"' for name in ("loop", "callables"))


def own_part(stack: str) -> str:
    """Return the task's own part of what faulthandler wrote: without its title, and our frames."""
    lines = [line for line in stack.splitlines() if line.startswith("  ")]
    ours = [i for i, line in enumerate(lines) if any(o in line for o in OURS)]
    # The last of ours stays where it called a function in C, which has no frame.
    return "\n".join(lines[: max(1, ours[0])] if ours else lines)


def _chance() -> float:
    """Return a random number below 1: not the program's `random`, which may have been seeded."""
    return int.from_bytes(os.urandom(4), "little") / (1 << 32)


class Answers:
    """Moves answers from workers to the results, and books them with the scheduler.

    ``give_idle()`` is called when a task was queued that is to be run once more, ``leased()`` when
    an answer lies in the arena.
    """

    def __init__(
        self,
        sched: Scheduler,
        reactor: Reactor,
        budget: RestartBudget,
        describe: Callable[[int, int], str],
        ledger: Ledger,
        give_idle: Callable[[], None],
        leased: Callable[[], None],
        hands_back: bool = False,
    ) -> None:
        # What happened, for the pool to deliver: appended under the lock, popped without.
        self.results: deque[tuple[int, int, tuple[Any, Any]]] = deque()
        self.describe = describe
        self._sched = sched
        self._reactor = reactor
        self._budget = budget
        self._ledger = ledger
        self._give_idle, self._leased = give_idle, leased
        self._hands_back = hands_back
        self._chance = _chance

    def announced(
        self, slot: Slot, errors: int, count: int, body: bytes | memoryview, mark: int, nanos: int
    ) -> None:
        """Take the answers that a message tells of.

        Raises:
            Exception, of any kind: the worker has sent an invalid message.
        """
        # The message counts these, too: `WorkerMonitor._look` took them out before it came.
        boxed = count - slot.answers_taken_early
        if boxed < 0:
            raise ValueError(f"{count} answers where {slot.answers_taken_early} were taken before")
        slot.answers_taken_early = 0
        self._budget.finished = True
        # Looked at before the books move on: the ledger names the task at the front.
        held = self._sched.in_flight[slot.index].held
        self._ledger.answered(slot.index, held[0] if held else None, count + bool(body), nanos)
        self._ledger.bytes_in += len(body)
        # Where all of them were taken early, none is left, and the time is not used.
        seconds = nanos * 1e-9 / (boxed + bool(body) or 1)
        if boxed:
            data = slot.box.take(mark)
            self._ledger.bytes_in += len(data)
            # One may be the item that is to be broken off: its answer is not the worker's to give.
            plain = not errors & OUTBOX_MIXED and slot.interrupted is None
            job, together = self._sched.next_answers(slot.index)
            if plain and boxed <= together and job != CALLS:
                # They travel on in one piece, and are counted where that is opened.
                batch, first = self._sched.answered(slot.index, boxed, seconds * boxed)
                self.results.append((batch.job, first, (True, Encoded(data, boxed, True))))
            else:
                self._split(slot, data, boxed, plain and boxed <= together, seconds)
        # All were taken early, up to the head.  With another mark, an answer would be missing.
        elif count and mark != slot.box.head:
            raise ValueError(f"outbox mark {mark} where all up to {slot.box.head} is taken")
        if body:
            self._answer(slot, bool(errors & BODY_ERROR), body, seconds, bool(errors & BODY_AGAIN))

    def _split(self, slot: Slot, data: bytes, boxed: int, calls: bool, seconds: float) -> None:
        """Take answers one by one; ``calls``: they are plain ones, to calls that came together."""
        found = entries(data)
        if len(found) != boxed:
            raise ValueError(f"{len(found)} answers come as {boxed}")
        if not calls:
            for error, payload in found:
                self._answer(slot, error, payload, seconds)
            return
        first = self._sched.answered(slot.index, boxed, seconds * boxed)[1]
        for number, (_, payload) in enumerate(found, first):
            self.results.append((number, 0, (True, Encoded(payload, 1, False))))

    def unannounced(self, slot: Slot, mark: int) -> int:
        """Take answers out of an outbox that no message has told of; return how many.

        Raises:
            Exception, of any kind: there is nonsense in it.
        """
        found = entries(slot.box.take(mark))
        for error, payload in found:
            self._answer(slot, error, payload)
        self._budget.finished |= bool(found)
        return len(found)

    def skipped(self, slot: Slot, count: int) -> None:
        """Note that a worker has not begun some items, as told.

        Raises:
            ValueError: it was not told so, by its parent: the items would be sent to it again.
        """
        if slot.box.limit == NO_LIMIT:
            raise ValueError(f"{count} tasks are skipped which it was to begin")
        self._sched.skipped(slot.index, count)
        item = slot.interrupted
        if item is not None and self._sched.in_flight[slot.index].answered > item:
            # It was at the door of what it was to break off, and turned back.
            self._over(slot)

    def _answer(
        self,
        slot: Slot,
        error: bool,
        payload: bytes | memoryview,
        seconds: float = 0.0,
        again: bool = False,
    ) -> None:
        """Take one answer; ``again``: it is an error that the task is to be tried again after."""
        # Of the blocks that it names hold is taken now, before the worker may drop them: also of an
        # answer that nobody will open.  First of all, since it may be nonsense.
        if payload[0] == FRAMED:
            payload = adopt(payload)
            if type(payload) is Leased:
                slot.box.adopt()
                self._leased()
        batch, index = self._sched.answered(slot.index, 1, seconds)
        position = index - batch.first
        if batch.seq + position == slot.interrupted:
            self._broken_off(slot, batch, position)
        elif again and batch.retries > 0:
            self._again(batch, position, killed=False)
        else:
            number, index = (index, 0) if batch.job == CALLS else (batch.job, index)
            self.results.append((number, index, (not error, Encoded(payload, 1, False))))

    def _result(self, batch: Batch, index: int, ok: bool | None, value: Any) -> None:
        self.results.append((*batch.name(index), (ok, value)))

    def handed_back(self, job: int, index: int) -> None:
        """Tell that an item waits here no more, which nobody has begun."""
        self.results.append((*name_of(job, index), (None, None)))

    def _over(self, slot: Slot) -> str:
        """What it was asked to break off is over; return where it was then."""
        stack = slot.box.stack()
        # A signal that arrives after this finds no item named, and raises nothing.
        slot.box.ask(0)
        slot.interrupted = None
        slot.transition(WorkerEvent.BROKEN_OFF)
        return stack

    def _broken_off(self, slot: Slot, batch: Batch, position: int) -> None:
        """Answer a task that was asked to stop and has, or died of it.

        What the worker says of it no longer matters: its time was over before it said that.
        """
        stack = self._over(slot)
        limit = batch.limit
        if batch.withdrawn or limit is None:
            return  # cancelled: its job is answered
        if limit.again and batch.retries > 0:
            self._again(batch, position, killed=False)
            return
        index = batch.first + position
        task = self.describe(*batch.name(index))
        error = TaskTimeout(limit.seconds, slot.index, slot.pid, task, own_part(stack))
        self._result(batch, index, False, error)

    def _again(self, batch: Batch, position: int, killed: bool) -> None:
        """Have a task run once more, after a pause."""
        # The driver of a pool over hosts has the retries: it decides where the task runs again.
        if self._hands_back:
            self._result(batch, batch.first + position, None, killed)
            return
        when = self._reactor.now() + back_off(batch.past.tries + 1, self._chance())
        self._sched.again(batch, position, killed=killed, when=when)
        self._ledger.retried(batch, batch.first + position)
        self._reactor.call_at(when, self._queue)

    def _queue(self) -> None:
        """The pause of a task is over."""
        self._sched.due(self._reactor.now())
        self._give_idle()

    # -- workers that have no word any more ------------------------------------------------------

    def disown(self, slot: Slot, exc: Exception) -> None:
        """Fail what a worker has begun and not answered that has sent an invalid message.

        Whether that was done cannot be known.
        """
        in_flight = self._sched.in_flight[slot.index]
        began = slot.begun(in_flight.answered)
        if began > in_flight.sent:  # nonsense, too: but it cannot have begun two at once
            began = in_flight.answered + 1
        while in_flight.held and in_flight.answered < began:
            batch = in_flight.held[0]
            # Asked before `answered` counts it.  What was taken back waits elsewhere already.
            wanted = batch.done < batch.taken and not batch.withdrawn
            index = self._sched.answered(slot.index, 1)[1]
            if wanted and batch.retries > 0 and batch.past.killed + 1 < CULPRIT:
                self._again(batch, index - batch.first, killed=True)
            elif wanted:
                error = InternalError(
                    f"worker {slot.index} (pid {slot.pid}) was killed since it sent an invalid "
                    f"message to its parent ({type(exc).__name__}: {exc}), while it ran "
                    f"{self.describe(*batch.name(index))} or after. If no code of that task, or of "
                    "a library that it uses, writes to memory or descriptors that are not its "
                    "own, this is a bug in xpool"
                )
                error.__cause__ = exc
                self._result(batch, index, False, error)

    def lost(
        self, slot: Slot, batch: Batch, position: int, exitcode: int | None, not_counted: bool,
        beside: str, last: bool,
    ) -> None:  # fmt: skip
        """Answer a task whose worker ended, or have it run again.

        ``not_counted``: it ended for something that another thread of its process ran.  ``beside``:
        what others have to do with it.  ``last``: no worker will come.
        """
        # It ended by the signal that was to break this off, or by the kill after that.
        if batch.seq + position == slot.interrupted:
            self._broken_off(slot, batch, position)
            return
        killed = batch.past.killed + (not not_counted)
        if batch.retries > 0 and killed < CULPRIT and not last:
            self._again(batch, position, killed=not not_counted)
            return
        index = batch.first + position
        task = self.describe(*batch.name(index))
        error = WorkerDied(slot.pid, exitcode, slot.index, task, killed, beside)
        self._result(batch, index, False, error)
