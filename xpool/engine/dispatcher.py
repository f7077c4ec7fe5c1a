"""Between the scheduler and the workers: tasks out, answers in.

All of it is called with the engine's lock held.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from xpool.engine.watch import Watch
from xpool.errors import InternalError, TaskTimeout
from xpool.jobs.budget import RestartBudget, back_off
from xpool.jobs.scheduler import Batch, Scheduler
from xpool.jobs.states import WorkerEvent, WorkerStates
from xpool.pickle import decode
from xpool.pickle.frame import FRAMED, Leased, adopt, inline
from xpool.queue.messages import (
    ANSWER,
    BODY_AGAIN,
    BODY_ERROR,
    ENTRY,
    FAILED,
    GREETING,
    OUTBOX_MIXED,
    READY,
    SKIPPED,
    TASKS,
    TIMED,
    TO_PARENT,
    WIRE,
    Parts,
    Refusal,
    forget_frame,
    func_frame,
    stop_frame,
    tasks_frame,
)
from xpool.queue.outbox import NO_LIMIT, entries
from xpool.results import Parcel, Unopened
from xpool.workers.slot import Slot

__all__ = ["Encoded", "Dispatcher", "own_part"]

CULPRIT = 5
"""Workers that one task may kill, whatever its ``retries``."""

ENDED = -1
"""In the place of the kind of a message: there is none."""

LOOK = 0.010
"""Seconds of silence after which the outbox of a worker with tasks in hand is looked into."""

GRACE = 0.002
"""Seconds until a word written to a shared page is certainly seen: microseconds, in truth."""


_WORKER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "worker", "")
_OURS = tuple(f'"{_WORKER}{name}.py"' for name in ("loop", "calls"))


class Encoded(Parcel):
    """Answers as they came: one payload, or ``count`` entries of an outbox."""

    __slots__ = ("_data", "_run", "count")

    def __init__(self, data: bytes | memoryview, count: int, run: bool) -> None:
        self._data = data
        self._run = run
        self.count = count

    def open(self) -> list[Any]:
        data = self._data
        if not self._run:
            return [_decode(data)]
        # As `entries`, in one pass: every result of a stream of short tasks comes through here.
        values: list[Any] = []
        at, end, size = 0, len(data), ENTRY.unpack_from
        while at + 4 <= end:
            stop = at + 4 + size(data, at)[0]
            values.append(_decode(data[at + 4 : stop]))
            at = stop
        if len(values) != self.count or at != end:
            garbled = ValueError(f"{self.count} answers of a worker came garbled, as {len(values)}")
            return [Unopened(garbled)] * self.count
        return values


def _decode(payload: bytes | memoryview) -> Any:
    try:
        return decode(payload)
    except Exception as exc:
        return Unopened(exc)


def own_part(stack: str) -> str:
    """Return the task's own part of what faulthandler wrote: without its title, and our frames."""
    lines = [line for line in stack.splitlines() if line.startswith("  ")]
    ours = [i for i, line in enumerate(lines) if any(o in line for o in _OURS)]
    # The last of ours stays where it called a function in C, which has no frame.
    return "\n".join(lines[: max(1, ours[0])] if ours else lines)


class Dispatcher:
    """The part of the engine that moves things; `Engine` adds processes and waiting."""

    def __init__(
        self,
        workers: int,
        lifetime: int | None,
        describe: Callable[[int, int], str],
        restart_budget: int,
        watch: Watch,
        slot: Callable[[int], Slot],
    ) -> None:
        self.lock = threading.Lock()
        self.slots = [slot(i) for i in range(workers)]
        self.sched = Scheduler(workers)
        # What happened, for the pool to deliver: appended under the lock, popped without.
        self.results: deque[tuple[int, int, tuple[bool, Any]]] = deque()
        self._watch = watch
        self._lifetime = lifetime
        self._describe = describe
        self._budget = RestartBudget(restart_budget)
        self._random = random.Random()  # not the program's: it may have been seeded
        self._funcs: dict[int, tuple[int, bytes | memoryview]] = {}
        # Workers with two or more items in hand: the ones to look at when they are silent.
        self._deep: dict[int, None] = {}
        self._direct: dict[int, Slot] = {}  # by job: whose answer a caller receives himself
        self._stopped = False  # terminated: nothing is sent or taken any more

    # -- answers in --------------------------------------------------------------------------------

    def _receive_from(self, slot: Slot) -> Callable[[int], None]:
        def handler(fd: int) -> None:
            # The event may be from before a caller took over: the answer is his to take.
            if not slot.direct_job:
                self._receive(slot)

        return handler

    def _receive(self, slot: Slot) -> None:
        """Take what has come from a worker, and hand it its next tasks in the same step."""
        frames = slot.reader.frames()
        while slot.protocol_error is None:
            kind = ENDED
            try:
                for head, body in frames:
                    kind, errors, count, _, mark, nanos = TO_PARENT.unpack(head)
                    if not self._stopped:  # else all was answered when the pool was terminated
                        self._understand(slot, kind, errors, count, body, mark, nanos)
                        break
                    kind = ENDED
            except Exception as exc:
                self._give_up(slot, exc)
                return
            if kind == ENDED:
                break
            if kind == READY and slot.reason is None:
                self._serves(slot)
            elif kind in (ANSWER, SKIPPED):
                self._after_answers(slot)
                if kind == SKIPPED:
                    self._give_idle()
        if slot.reader.ended:
            self._watch.remove(slot.reader.fd)

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
            Exception, of any kind: the worker has written nonsense.
        """
        if kind == ANSWER:
            self._answers(slot, errors, count, body, mark, nanos)
        elif kind == READY:
            wire, slot.mapped = GREETING.unpack(body) if len(body) == GREETING.size else (0, True)
            if wire != WIRE:
                slot.reason = RuntimeError(
                    "the worker imports another version of xpool; look at PYTHONPATH"
                )
                slot.kill()
            elif slot.ready:
                raise ValueError("a second greeting")
        elif kind == SKIPPED:
            self.sched.skipped(slot.index, count)
            if (
                slot.stop is not None
                and self.sched.in_flight[slot.index].answered > slot.stop.seq >= 0
            ):
                slot.stop = None  # it was at the door of what it was to break off, and turned back
                slot.box.ask(0)
        elif kind == FAILED:
            slot.reason = Refusal.unpacked(body)
        else:
            raise ValueError(f"a message of unknown kind {kind}")

    def _give_up(self, slot: Slot, exc: Exception) -> None:
        """Kill a worker that has written nonsense, and believe nothing more that comes from it.

        What it has begun and not answered fails: whether that was done cannot be known.
        """
        slot.protocol_error = exc
        if not slot.ready:
            slot.reason = exc
        slot.kill()
        slot.reader.ended = True
        self._watch.remove(slot.reader.fd)
        self.sched.retire(slot.index)
        in_flight = self.sched.in_flight[slot.index]
        while in_flight.held and in_flight.answered < slot.box.began:
            batch = in_flight.held[0]
            wanted = batch.done < batch.taken and not batch.withdrawn
            index = self.sched.answered(slot.index, 1)[1]
            if wanted and batch.retries > 0 and batch.past.killed + 1 < CULPRIT:
                self._again(batch, index - batch.first, killed=True)
            elif wanted:
                error = InternalError(
                    f"worker {slot.index} (pid {slot.pid}) was killed since it wrote nonsense to "
                    f"its parent ({type(exc).__name__}: {exc}), while it ran "
                    f"{self._describe(batch.job, index)} or after. If no code of that task, or of "
                    "a library that it uses, writes to memory or descriptors that are not its "
                    "own, this is a bug in xpool"
                )
                error.__cause__ = exc
                self.results.append((batch.job, index, (False, error)))

    def _serves(self, slot: Slot) -> None:
        """Take a worker into service that says that it is ready."""
        retiring = slot.state is WorkerStates.RETIRING
        slot.happens(WorkerEvent.HELLO)
        slot.ready, slot.stop = True, None
        slot.failures, slot.killed, slot.reason = 0, 0, None
        if not retiring:
            self.sched.ready(slot.index, self._lifetime)
            self._give_idle()
            self._look_for_surplus(slot)

    def _answers(
        self, slot: Slot, errors: int, count: int, body: bytes | memoryview, mark: int, nanos: int
    ) -> None:
        boxed = count - slot.answers_taken_early
        slot.answers_taken_early = 0
        self._budget.finished = True
        seconds = nanos * 1e-9 / (boxed + bool(body) or 1)
        if boxed:
            self._take(slot, mark, bool(errors & OUTBOX_MIXED), boxed, seconds)
        if body:
            again = bool(errors & BODY_AGAIN)
            self._answer(slot, bool(errors & BODY_ERROR), body, seconds, again)

    def _encoded(self, slot: Slot, payload: bytes | memoryview) -> Encoded:
        """One answer; of the blocks that it names, hold is taken now, before it may be dropped."""
        if payload[0] == FRAMED:
            payload = adopt(payload)
            if type(payload) is Leased:
                slot.box.adopt()
                self.tidy_later()
        return Encoded(payload, 1, False)

    def tidy_later(self) -> None:
        """Note that blocks of the arena are in use: their memory goes back when they are not."""

    def _take(self, slot: Slot, mark: int, mixed: bool, n: int, seconds: float) -> None:
        """Move answers out of an outbox; plain ones travel on in one piece."""
        data = slot.box.take(mark)
        if not mixed and slot.stop is None:
            batch, first = self.sched.answered(slot.index, n, seconds * n)
            self.results.append((batch.job, first, (True, Encoded(data, n, True))))
            return
        for error, payload in entries(data):
            self._answer(slot, error, payload, seconds)

    def _answer(
        self,
        slot: Slot,
        error: bool,
        payload: bytes | memoryview,
        seconds: float = 0.0,
        again: bool = False,
    ) -> None:
        """Take one answer; ``again``: it is an error that the task is to be tried again after."""
        # Also one that nobody will open: it has to be adopted.  First, since it may be nonsense.
        answer = self._encoded(slot, payload)
        batch, index = self.sched.answered(slot.index, 1, seconds)
        position = index - batch.first
        if slot.stop is not None and batch.seq + position == slot.stop.seq:
            self._broken_off(slot, batch, position)
        elif again and batch.retries > 0:
            self._again(batch, position, killed=False)
        else:
            self.results.append((batch.job, index, (not error, answer)))

    def _broken_off(self, slot: Slot, batch: Batch, position: int) -> None:
        """Answer a task that was asked to stop and has, or died of it.

        What the worker says of it no longer matters: its time was over before it said that.
        """
        slot.stop = None
        stack = slot.box.stack()
        slot.box.ask(0)
        self._check_by(slot, self._watch.now())  # what it runs now may have to end, too
        limit = batch.limit
        if batch.withdrawn or limit is None:
            return  # cancelled: its job is answered
        if limit.again and batch.retries > 0:
            self._again(batch, position, killed=False)
            return
        index = batch.first + position
        task = self._describe(batch.job, index)
        error = TaskTimeout(limit.seconds, slot.index, slot.pid, task, own_part(stack))
        self.results.append((batch.job, index, (False, error)))

    def _again(self, batch: Batch, position: int, killed: bool) -> None:
        """Have a task run once more, after a pause."""
        when = self._watch.now() + back_off(batch.past.tries + 1, self._random.random())
        self.sched.again(batch, position, killed=killed, when=when)
        self._watch.alarm(when)

    def _after_answers(self, slot: Slot) -> None:
        if slot.protocol_error is not None:
            return  # it gets nothing more
        w = slot.index
        in_flight = self.sched.in_flight[w]
        if in_flight.size < 2:
            self._deep.pop(w, None)
        if in_flight.size == 0 and in_flight.paused:
            slot.box.limit = NO_LIMIT
            slot.recalling = False
            if slot.state is WorkerStates.READY:
                self.sched.resume(w)
        if slot.state is not WorkerStates.READY:
            return
        batches = self.sched.refill(w)
        for batch in batches:
            self._give(slot, batch)
        if in_flight.size == 0 and in_flight.left == 0:
            self._retire(slot)
        elif w in self._deep:
            self._expect_silence(slot)  # it may have been given up looking at
        else:
            self._look_for_surplus(slot)

    def _look_for_surplus(self, slot: Slot) -> None:
        """When a worker has nothing and others have tasks in hand: are they sitting on them?"""
        if self._deep and not self.sched.in_flight[slot.index].size:
            self._look_at_all(self._deep, self._watch.now() + GRACE)

    def _retire(self, slot: Slot) -> None:
        """Let a worker end when it has answered what it holds."""
        slot.happens(WorkerEvent.RETIRE)
        self.sched.retire(slot.index)
        self._send(slot, stop_frame())

    def _drain(self, slot: Slot) -> None:
        """Receive all that is in a worker's pipe."""
        self._receive(slot)
        while not (slot.reader.ended or slot.reader.dry):
            self._receive(slot)

    def _take_late(self, slot: Slot, mark: int) -> int:
        """Move answers out of an outbox that no message has told of; return how many."""
        if slot.protocol_error is not None:
            return 0
        try:
            found = entries(slot.box.take(mark))
            for error, payload in found:
                self._answer(slot, error, payload)
        except Exception as exc:
            self._give_up(slot, exc)
            return 0
        self._budget.finished |= bool(found)
        return len(found)

    # -- tasks out ---------------------------------------------------------------------------------

    def _give_idle(self, direct_job: int = 0) -> None:
        """Send what waits to the idle; who gets the job ``driven`` will be driven."""
        for w, batch in self.sched.next_batches(newest=direct_job != 0):
            slot = self.slots[w]
            if batch.job == direct_job:
                self._mute(slot, True)
                slot.direct_job = direct_job
                self._direct[direct_job] = slot
            self._give(slot, batch)

    def _give(self, slot: Slot, batch: Batch) -> None:
        if slot.muted and not slot.direct_job:
            self._mute(slot, False)
        if slot.forget:
            self._send(slot, forget_frame(slot.forget))
            slot.forget = []
        func = batch.func
        if func and func not in slot.known and func in self._funcs:
            # A function that is not there was forgotten: its job has failed, and what of it was
            # queued already is answered by the worker, to nobody.
            slot.known.add(func)
            mode, payload = self._funcs[func]
            self._send(slot, func_frame(func, mode, payload if slot.mapped else inline(payload)))
        items = batch.items if slot.mapped else [inline(item) for item in batch.items]
        kind = TASKS
        if batch.limit is not None:
            kind = TIMED
            self._check_by(slot, self._watch.now() + batch.limit.seconds)
        self._send(slot, tasks_frame(func, items, kind))
        if self.sched.in_flight[slot.index].size > 1:
            self._deep[slot.index] = None
            self._expect_silence(slot)
        if batch.input_reader is not None:
            batch.input_reader.taken(batch.items)

    def _check_by(self, slot: Slot, when: float) -> None:
        """Have the limits of what a worker runs looked at, at that time or before.

        So there is one alarm for each limit and worker, not one for each task.
        """
        if slot.check_at is None or when < slot.check_at:
            slot.check_at = when
            self._watch.alarm(when)

    def _send(self, slot: Slot, parts: Parts) -> None:
        writer = slot.writer
        writer.send(parts)
        if writer.backlog and writer.fd not in self._watch:

            def flush(fd: int) -> None:
                writer.flush()
                if not writer.backlog:
                    self._watch.remove(fd)

            self._watch.add(writer.fd, flush, writable=True)

    def _mute(self, slot: Slot, muted: bool) -> None:
        if slot.muted != muted and slot.handle is not None and slot.reader.fd in self._watch:
            slot.muted = muted
            self._watch.mute(slot.reader.fd, muted)

    # -- silent workers ----------------------------------------------------------------------------

    def _look_at_all(self, which: dict[int, None], when: float) -> None:
        for w in which:
            slot = self.slots[w]
            if slot.look_at is None or slot.look_at > when:
                slot.look_at = when
        self._watch.alarm(when)

    def _expect_silence(self, slot: Slot) -> None:
        if slot.look_at is None:
            slot.look_at = self._watch.now() + LOOK
            self._watch.alarm(slot.look_at)

    def _look_around(self, now: float) -> None:
        """Look at the workers whose time has come."""
        for slot in self.slots:
            if slot.look_at is not None and now >= slot.look_at:
                slot.look_at = None
                if slot.direct_job:
                    slot.look_at = now + LOOK  # who drives it receives all there is
                elif slot.index in self._deep:
                    slot.look_at = self._look(slot, now)
            if slot.look_at is not None:
                self._watch.alarm(slot.look_at)

    def _look(self, slot: Slot, now: float) -> float | None:
        """Look at a worker with tasks in hand; return when to look again, None: it need not be.

        What the last look saw in the outbox is certainly all there by now: it is taken.  A worker
        that sits on tasks while another has none is told to begin no more of them, and at the
        next look, when it certainly has seen that, they are given to others.
        """
        w, box = slot.index, slot.box
        began, tail = box.began, box.tail
        seen, slot.seen = slot.seen, (began, tail)
        # Messages first: an answer in the pipe may come before those in the outbox.
        self._drain(slot)
        if seen[1] > box.head and not slot.reader.partial:
            slot.answers_taken_early += self._take_late(slot, seen[1])
            self._after_answers(slot)
        if slot.recalling:
            slot.recalling = False
            self.sched.take_back(w, max(box.limit, began))
            self._give_idle()
        elif (
            self.sched.idle and not self.sched.in_flight[w].paused and self.sched.surplus(w, began)
        ):
            box.limit = began
            slot.recalling = True
            self.sched.pause(w)
            return now + GRACE
        if w not in self._deep:
            return None
        unsaid = tail > box.head
        return now + LOOK if unsaid or seen != (began, tail) else None
