"""Between the scheduler and the workers: tasks out, answers in.

All of it is called with the engine's lock held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from xpool.engine.watch import Watch
from xpool.errors import InternalError
from xpool.fleet.slot import Slot
from xpool.jobs.scheduler import Grant, Scheduler
from xpool.jobs.states import WorkerEvent, WorkerStates
from xpool.pickle import decode
from xpool.pickle.frame import FRAMED, Leased, adopt, inline
from xpool.queue.messages import (
    ANSWER,
    BODY_ERROR,
    ENTRY,
    FAILED,
    OUTBOX_MIXED,
    READY,
    SKIPPED,
    TO_PARENT,
    WIRE,
    Parts,
    forget_frame,
    func_frame,
    stop_frame,
    tasks_frame,
)
from xpool.queue.outbox import NO_LIMIT, entries
from xpool.results import Parcel, Unopened

__all__ = ["Encoded", "Exchange"]

LOOK = 0.010
"""Seconds of silence after which the outbox of a worker with tasks in hand is looked into."""

GRACE = 0.002
"""Seconds until a word written to a shared page is certainly seen: microseconds, in truth."""


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
        while at < end:
            stop = at + 4 + size(data, at)[0]
            values.append(_decode(data[at + 4 : stop]))
            at = stop
        return values


def _decode(payload: bytes | memoryview) -> Any:
    try:
        return decode(payload)
    except Exception as exc:
        return Unopened(exc)


class Exchange:
    """The part of the engine that moves things; `Engine` adds processes and waiting."""

    def __init__(self, workers: int, lifetime: int | None) -> None:
        self.lock = threading.Lock()
        self.slots = [Slot(i) for i in range(workers)]
        self.sched = Scheduler(workers)
        # What happened, for the pool to deliver: appended under the lock, popped without.
        self.results: deque[tuple[int, int, tuple[bool, Any]]] = deque()
        self._watch = Watch()
        self._lifetime = lifetime
        self._funcs: dict[int, tuple[int, bytes | memoryview]] = {}
        # Workers with two or more items in hand: the ones to look at when they are silent.
        self._deep: dict[int, None] = {}
        self._driven: dict[int, Slot] = {}  # by job: whose answer a caller receives himself
        self._stopped = False  # terminated: nothing is sent or taken any more

    # -- answers in --------------------------------------------------------------------------------

    def _receive_from(self, slot: Slot) -> Callable[[int], None]:
        def handler(fd: int) -> None:
            # The event may be from before a caller took over: the answer is his to take.
            if not slot.driven:
                self._receive(slot)

        return handler

    def _receive(self, slot: Slot) -> None:
        """Take what has come from a worker, and hand it its next tasks in the same step."""
        for head, body in slot.inlet.frames():
            kind, errors, count, _, mark, nanos = TO_PARENT.unpack(head)
            if self._stopped:
                continue  # all was answered when the pool was terminated
            if kind == ANSWER:
                self._answers(slot, errors, count, body, mark, nanos)
            elif kind == READY:
                self._ready(slot, body)
            elif kind == SKIPPED:
                self.sched.skipped(slot.index, count)
                self._after_answers(slot)
                self._give_idle()
            elif kind == FAILED:
                slot.reason = body
            else:
                raise InternalError(f"worker {slot.index} sent a message of unknown kind {kind}")
        if slot.inlet.ended:
            self._watch.remove(slot.inlet.fd)

    def _ready(self, slot: Slot, body: bytes | memoryview) -> None:
        facts = decode(body)
        if facts["wire"] != WIRE:
            slot.reason = RuntimeError(
                "the worker imports another version of xpool; look at PYTHONPATH"
            )
            slot.kill()
            return
        retiring = slot.state is WorkerStates.RETIRING
        slot.mapped = facts["mapped"]
        slot.happens(WorkerEvent.HELLO)
        slot.failures, slot.reason = 0, None
        if not retiring:
            self.sched.ready(slot.index, self._lifetime)
            self._give_idle()
            self._look_for_surplus(slot)

    def _answers(
        self, slot: Slot, errors: int, count: int, body: bytes | memoryview, mark: int, nanos: int
    ) -> None:
        boxed = count - slot.ahead
        slot.ahead = 0
        seconds = nanos * 1e-9 / (boxed + bool(body) or 1)
        if boxed:
            self._take(slot, mark, bool(errors & OUTBOX_MIXED), boxed, seconds)
        if body:
            grant, first = self.sched.answered(slot.index, 1, seconds)
            ok = not errors & BODY_ERROR
            self.results.append((grant.job, first, (ok, self._encoded(slot, body))))
        self._after_answers(slot)

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
        if not mixed:
            grant, first = self.sched.answered(slot.index, n, seconds * n)
            self.results.append((grant.job, first, (True, Encoded(data, n, True))))
            return
        for error, payload in entries(data):
            grant, first = self.sched.answered(slot.index, 1, seconds)
            self.results.append((grant.job, first, (not error, self._encoded(slot, payload))))

    def _after_answers(self, slot: Slot) -> None:
        w = slot.index
        hand = self.sched.hands[w]
        if hand.size < 2:
            self._deep.pop(w, None)
        if hand.size == 0 and hand.paused:
            slot.box.limit = NO_LIMIT
            slot.revoking = False
            self.sched.resume(w)
        if slot.state is not WorkerStates.READY:
            return
        grants = self.sched.refill(w)
        for grant in grants:
            self._give(slot, grant)
        if hand.size == 0 and hand.left == 0:
            self._retire(slot)
        else:
            self._look_for_surplus(slot)

    def _look_for_surplus(self, slot: Slot) -> None:
        """When a worker has nothing and others have tasks in hand: are they sitting on them?"""
        if self._deep and not self.sched.hands[slot.index].size:
            self._look_at_all(self._deep, time.monotonic() + GRACE)

    def _retire(self, slot: Slot) -> None:
        """Let a worker end when it has answered what it holds."""
        slot.happens(WorkerEvent.RETIRE)
        self.sched.retire(slot.index)
        self._send(slot, stop_frame())

    def _drain(self, slot: Slot) -> None:
        """Receive all that is in a worker's pipe."""
        self._receive(slot)
        while not (slot.inlet.ended or slot.inlet.dry):
            self._receive(slot)

    def _take_late(self, slot: Slot, mark: int) -> int:
        """Move answers out of an outbox that no message has told of; return how many."""
        found = entries(slot.box.take(mark))
        for error, payload in found:
            grant, first = self.sched.answered(slot.index, 1)
            self.results.append((grant.job, first, (not error, self._encoded(slot, payload))))
        return len(found)

    # -- tasks out ---------------------------------------------------------------------------------

    def _give_idle(self, driven: int = 0) -> None:
        """Send what waits to the idle; who gets the job ``driven`` will be driven."""
        for w, grant in self.sched.next_grants():
            slot = self.slots[w]
            if grant.job == driven:
                self._mute(slot, True)
                slot.driven = driven
                self._driven[driven] = slot
            self._give(slot, grant)

    def _give(self, slot: Slot, grant: Grant) -> None:
        if slot.muted and not slot.driven:
            self._mute(slot, False)
        if slot.forget:
            self._send(slot, forget_frame(slot.forget))
            slot.forget = []
        func = grant.func
        if func and func not in slot.known and func in self._funcs:
            # A function that is not there was forgotten: its job has failed, and what of it was
            # queued already is answered by the worker, to nobody.
            slot.known.add(func)
            mode, payload = self._funcs[func]
            self._send(slot, func_frame(func, mode, payload if slot.mapped else inline(payload)))
        items = grant.items if slot.mapped else [inline(item) for item in grant.items]
        self._send(slot, tasks_frame(func, items))
        if self.sched.hands[slot.index].size > 1:
            self._deep[slot.index] = None
            if slot.look_at is None:
                slot.look_at = time.monotonic() + LOOK
                self._watch.alarm(slot.look_at)
        if grant.feeder is not None:
            grant.feeder.taken(grant.items)

    def _send(self, slot: Slot, parts: Parts) -> None:
        outlet = slot.outlet
        outlet.send(parts)
        if outlet.backlog and outlet.fd not in self._watch:

            def flush(fd: int) -> None:
                outlet.flush()
                if not outlet.backlog:
                    self._watch.remove(fd)

            self._watch.add(outlet.fd, flush, writable=True)

    def _mute(self, slot: Slot, muted: bool) -> None:
        if slot.muted != muted and slot.handle is not None and slot.inlet.fd in self._watch:
            slot.muted = muted
            self._watch.mute(slot.inlet.fd, muted)

    # -- silent workers ----------------------------------------------------------------------------

    def _look_at_all(self, which: dict[int, None], when: float) -> None:
        for w in which:
            slot = self.slots[w]
            if slot.look_at is None or slot.look_at > when:
                slot.look_at = when
        self._watch.alarm(when)

    def _look_around(self, now: float) -> None:
        """Look at the workers whose time has come."""
        for slot in self.slots:
            if slot.look_at is not None and now >= slot.look_at:
                slot.look_at = None
                if slot.driven:
                    slot.look_at = now + LOOK  # who drives it receives all there is
                elif slot.state is WorkerStates.READY and slot.index in self._deep:
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
        if seen[1] > box.head and not slot.inlet.partial:
            slot.ahead += self._take_late(slot, seen[1])
            self._after_answers(slot)
        if slot.revoking:
            slot.revoking = False
            self.sched.take_back(w, max(box.limit, began))
            self._give_idle()
        elif self.sched.idle and not self.sched.hands[w].paused and self.sched.surplus(w, began):
            box.limit = began
            slot.revoking = True
            self.sched.pause(w)
            return now + GRACE
        if w not in self._deep:
            return None
        unsaid = tail > box.head
        return now + LOOK if unsaid or seen != (began, tail) else None
