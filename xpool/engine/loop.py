"""The engine of the process pools: wait, turn what happened into events, do what follows.

::

     any caller's thread           engine's thread                    worker process
    ---------------------        -------------------              ----------------------
     verb, pickles               waits on descriptors        |
      | submit                     ^        |                |
      v                            |        v                |
     Scheduler  --- grants ----->  Slot.outlet ==== pipe =========>  run, one by one
     (jobs/)                       |                         |         |          |
        ^                          |                         |         v          v
        `------ answered --------  Slot.inlet <==== pipe ========= "so many"   outbox
                                   Slot.box   <---- shared page ------------------'
                                   |                         |
                             results (a deque)               |
                                   | pool_outqueue_get       |
                                   v
                             the pool delivers them to the callers

One lock guards all of it.  Whoever holds it does what is to be done and lets go; nobody waits for
a descriptor, runs a user's code or wakes a caller while holding it.  Whoever submits writes to an
idle worker himself, and a caller that waits for a single answer may receive it himself (`drive`):
then nothing stands between the caller and the worker but the pipe.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from xpool.engine.interrupt import uninterrupted
from xpool.errors import InternalError, WorkerDied, WorkerStartFailed, exit_reason
from xpool.fleet.launch import Launcher
from xpool.fleet.slot import Slot
from xpool.jobs.scheduler import Grant, Scheduler, Span
from xpool.jobs.states import WorkerEvent, WorkerStates
from xpool.pickle import decode
from xpool.queue.messages import (
    ANSWER,
    BODY_ERROR,
    FAILED,
    OUTBOX_ERROR,
    READY,
    SKIPPED,
    TO_PARENT,
    WIRE,
    forget_frame,
    func_frame,
    stop_frame,
    tasks_frame,
)
from xpool.queue.outbox import NO_LIMIT, entries
from xpool.results import Parcel

__all__ = ["Engine", "Encoded"]

START_ATTEMPTS = 3
"""Processes that may fail to start in one slot, one after the other, before the pool gives up."""

LOOK = 0.010
"""Seconds of silence after which the engine looks into the outbox of a worker with tasks in hand."""

GRACE = 0.002
"""Seconds until a word written to a shared page is certainly seen: microseconds, in truth."""

STOP_GRACE = 0.3
"""Seconds between asking a worker to stop (SIGTERM) and stopping it (SIGKILL)."""


class Encoded(Parcel):
    """Answers as they came: one payload, or ``count`` entries of an outbox."""

    __slots__ = ("_data", "_run", "count")

    def __init__(self, data: bytes | bytearray, count: int, run: bool) -> None:
        self._data = data
        self._run = run
        self.count = count

    def open(self) -> list[Any]:
        if not self._run:
            return [decode(self._data)]
        return [decode(payload) for _, payload in entries(bytes(self._data))]


Result = tuple[int, int, tuple[bool, Any]]


class Engine:
    """The workers of one pool and the work that they share out."""

    def __init__(
        self,
        workers: int,
        launcher: Launcher,
        orders: Callable[[int, int], bytes],
        *,
        name: str,
        daemon: bool,
        inherited: Any,
        lifetime: int | None,
        describe: Callable[[int, int], str],
    ) -> None:
        self.lock = threading.Lock()
        self.slots = [Slot(i) for i in range(workers)]
        self.sched = Scheduler(workers)
        # What happened, for the pool to deliver: appended under the lock, popped without.
        self.results: deque[Result] = deque()
        self.failure: BaseException | None = None
        self.dropped = False
        self.died = 0
        self._launcher = launcher
        self._orders = orders
        self._name = name
        self._daemon = daemon
        self._inherited = inherited
        self._lifetime = lifetime
        self._describe = describe
        self._funcs: dict[int, tuple[int, bytes]] = {}
        self._numbers = 0
        self._epoll = select.epoll()
        self._wake_r, self._wake_w = os.pipe()
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)
        self._epoll.register(self._wake_r, select.EPOLLIN)
        self._handlers: dict[int, tuple[Slot, Callable[[Slot], None]]] = {}
        # Workers with two or more items in hand: the ones to look at when they are silent.
        self._deep: dict[int, None] = {}
        self._next_look: float | None = None
        self._driven: dict[int, Slot] = {}  # by job: whose answer a caller receives himself
        self._ending = False  # no process is started any more
        self._closed = False

    # -- called by the pool, from any thread ---------------------------------------------------

    @uninterrupted
    def submit(self, span: Span) -> None:
        """Queue a span and give it to whoever is idle.

        A span that is bound to worker -1 is bound to the one with the least to do.
        """
        with self.lock:
            self._put(span)

    def _put(self, span: Span, driven: bool = False) -> None:
        if not self._ending:
            if span.bound is not None and span.bound < 0:
                span.bound = self.sched.least_loaded()
            self.sched.put(span)
            self._give_idle(span.job if driven else 0)

    @uninterrupted
    def feed(self, span: Span) -> None:
        """See to it that a span to which items were appended is queued, and idle workers get it."""
        with self.lock:
            if not self._ending:
                if not span.queued and span.items:
                    self.sched.put(span)
                self._give_idle()

    @uninterrupted
    def learn(self, mode: int, payload: bytes) -> int:
        """Keep a function for the workers; return the number that spans call it by."""
        with self.lock:
            self._numbers += 1
            self._funcs[self._numbers] = mode, payload
            return self._numbers

    @uninterrupted
    def forget(self, func: int) -> None:
        """Let workers drop a function: its job is done."""
        with self.lock:
            self._funcs.pop(func, None)
            for slot in self.slots:
                if func in slot.known:
                    slot.known.discard(func)
                    slot.forget.append(func)

    @uninterrupted
    def wake(self) -> None:
        """Make the engine's thread look at the clock and the pool's state again."""
        with self.lock:
            self._rouse()

    def _rouse(self) -> None:
        if not self._closed:
            self._write_wake()

    def drop(self) -> None:
        """Note that the pool is gone.  For the garbage collector: without a lock."""
        self.dropped = True
        self._write_wake()  # the pool had not ended, so this is open

    def _write_wake(self) -> None:
        try:
            os.write(self._wake_w, b"!")
        except BlockingIOError:
            return  # it has not yet seen the last ones

    # -- a caller that waits for one answer receives it himself ------------------------------------
    #
    # That saves the turn of the engine's thread: two context switches of the three that an answer
    # costs beyond the pipe itself.  A driven slot's pipe is muted for the engine's thread, and
    # stays so while the worker is idle, since nothing is expected from it; what must be seen at
    # any time, its death, comes by the sentinel.

    def call(self, span: Span, done: Callable[[], bool], pump: Callable[[], None]) -> None:
        """Submit a span of one task, and receive its answer in this thread if it is sent at once.

        Returns when `done()`, or when the answer will come by the engine's thread.
        """
        try:
            slot = self._put_driven(span)
            while slot is not None and not done():
                if not self._receive_driven(slot, span.job, slot.poller.poll()):
                    return
                pump()
        finally:
            self._let_go(span.job)

    @uninterrupted
    def _put_driven(self, span: Span) -> Slot | None:
        with self.lock:
            self._put(span, driven=True)
            return self._driven.get(span.job)

    @uninterrupted
    def _receive_driven(self, slot: Slot, job: int, events: list[tuple[int, int]]) -> bool:
        with self.lock:
            # Its sentinel, or no longer ours: a death is for the engine's thread.
            if slot.driven != job or len(events) != 1 or events[0][0] != slot.inlet.fd:
                return False
            self._receive(slot)
            return True

    @uninterrupted
    def _let_go(self, job: int) -> None:
        with self.lock:
            slot = self._driven.pop(job, None)
            if slot is not None and slot.driven == job:
                slot.driven = 0
                if self.sched.hands[slot.index].size or slot.state is not WorkerStates.READY:
                    # What else it holds is for the engine's thread again.
                    self._mute(slot, False)

    def _mute(self, slot: Slot, muted: bool) -> None:
        if slot.muted != muted and slot.handle is not None and slot.inlet.fd in self._handlers:
            slot.muted = muted
            self._epoll.modify(slot.inlet.fd, 0 if muted else select.EPOLLIN)

    # -- starting and stopping -------------------------------------------------------------------

    @uninterrupted
    def start_missing(self) -> bool:
        """Start a process in every empty slot; True when there was one."""
        with self.lock:
            missing = [s for s in self.slots if s.state is WorkerStates.ABSENT]
            for slot in missing:
                self._start(slot)
            return bool(missing)

    def _start(self, slot: Slot) -> None:
        if self._ending:
            return
        name = f"{self._name}-worker-{slot.index}"
        slot.start(
            self._launcher,
            name,
            self._daemon,
            lambda generation: self._orders(slot.index, generation),
            self._inherited,
        )
        assert slot.handle is not None
        self._watch(slot.inlet.fd, slot, self._receive)
        self._watch(slot.handle.sentinel, slot, self._check)
        if slot.outlet.backlog:
            self._watch_room(slot)

    def _watch(self, fd: int, slot: Slot, handler: Callable[[Slot], None]) -> None:
        self._handlers[fd] = slot, handler
        self._epoll.register(fd, select.EPOLLIN)

    def _watch_room(self, slot: Slot) -> None:
        """Wait for room in the pipe to a worker; the rest of what it is to get goes then."""
        fd = slot.outlet.fd
        if fd not in self._handlers:
            self._handlers[fd] = slot, self._flush
            self._epoll.register(fd, select.EPOLLOUT)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    @uninterrupted
    def retire_all(self) -> None:
        """Let workers end when they have answered what they hold: nothing more will come."""
        with self.lock:
            self._ending = True
            for slot in self.slots:
                if slot.state in (WorkerStates.READY, WorkerStates.STARTING):
                    self._retire(slot)
            self._rouse()

    def _retire(self, slot: Slot) -> None:
        slot.happens(WorkerEvent.RETIRE)
        self.sched.retire(slot.index)
        self._send(slot, stop_frame())

    @uninterrupted
    def terminate(self) -> None:
        """Stop all workers now: asked first, and killed a moment later if they do not."""
        with self.lock:
            self._ending = True
            self.sched.clear()
            self._deep.clear()
            now = time.monotonic()
            for slot in self.slots:
                if slot.handle is not None and slot.stopping_since is None:
                    if slot.state is not WorkerStates.RETIRING:
                        slot.happens(WorkerEvent.RETIRE)
                    slot.stopping_since = now
                    slot.handle.signal(15)
            self._look_by(now + STOP_GRACE)
            self._rouse()

    @property
    def ended(self) -> bool:
        """Whether no process is left and none will come."""
        return self._ending and all(s.handle is None for s in self.slots)

    @uninterrupted
    def close(self) -> None:
        """Let go of the engine's own descriptors; all workers have ended."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self._epoll.close()
                os.close(self._wake_r)
                os.close(self._wake_w)

    # -- the engine's thread -----------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait for something to happen, at most ``timeout`` seconds, and act on it."""
        look = self._next_look
        if look is not None:
            left = max(0.0, look - time.monotonic())
            timeout = left if timeout is None else min(left, timeout)
        events = self._epoll.poll(timeout)
        with self.lock:
            for fd, _ in events:
                if fd == self._wake_r:
                    os.read(self._wake_r, 512)
                    continue
                watched = self._handlers.get(fd)
                if watched is not None:
                    slot, handler = watched
                    # The event may be from before a caller took over: the answer is his to take.
                    if not (slot.driven and fd == slot.inlet.fd):
                        handler(slot)
            if self._next_look is not None and time.monotonic() >= self._next_look:
                self._look_around()

    def _receive(self, slot: Slot) -> None:
        """Take what has come from a worker, and hand it its next tasks in the same step."""
        for head, body in slot.inlet.frames():
            kind, errors, count, _, mark, nanos = TO_PARENT.unpack(head)
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
        if slot.inlet.ended and slot.inlet.fd in self._handlers:
            self._unwatch(slot.inlet.fd)

    def _ready(self, slot: Slot, body: bytes | bytearray) -> None:
        facts = decode(body)
        if facts["wire"] != WIRE:
            slot.reason = RuntimeError("the worker imports another version of xpool; see PYTHONPATH")
            slot.kill()
            return
        retiring = slot.state is WorkerStates.RETIRING
        slot.happens(WorkerEvent.HELLO)
        slot.failures, slot.reason = 0, None
        if not retiring:
            self.sched.ready(slot.index, self._lifetime)
            self._give_idle()

    def _answers(
        self, slot: Slot, errors: int, count: int, body: bytes | bytearray, mark: int, nanos: int
    ) -> None:
        boxed = count - slot.ahead
        slot.ahead = 0
        seconds = nanos * 1e-9 / (boxed + bool(body) or 1)
        if boxed:
            self._take(slot, mark, bool(errors & OUTBOX_ERROR), boxed, seconds)
        if body:
            grant, first = self.sched.answered(slot.index, 1, seconds)
            ok = not errors & BODY_ERROR
            self.results.append((grant.job, first, (ok, Encoded(body, 1, False))))
        self._after_answers(slot)

    def _take(self, slot: Slot, mark: int, errors: bool, n: int, seconds: float) -> None:
        """Move answers out of an outbox; those without error travel on in one piece."""
        data = slot.box.take(mark)
        if not errors:
            grant, first = self.sched.answered(slot.index, n, seconds * n)
            self.results.append((grant.job, first, (True, Encoded(data, n, True))))
            return
        for error, payload in entries(data):
            grant, first = self.sched.answered(slot.index, 1, seconds)
            self.results.append((grant.job, first, (not error, Encoded(payload, 1, False))))

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
        if hand.size == 0:
            if hand.left == 0:
                self._retire(slot)
            elif self._deep:
                # It has nothing, others have something in hand: are they sitting on it?
                self._look_by(time.monotonic() + GRACE, also=self._deep)

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
        if func and func not in slot.known:
            slot.known.add(func)
            mode, payload = self._funcs[func]
            self._send(slot, func_frame(func, mode, payload))
        self._send(slot, tasks_frame(func, grant.items))
        if self.sched.hands[slot.index].size > 1:
            self._deep[slot.index] = None
            if slot.look_at is None:
                slot.look_at = time.monotonic() + LOOK
                self._look_by(slot.look_at)
        if grant.feeder is not None:
            grant.feeder.taken(grant.items)

    def _send(self, slot: Slot, parts: list[bytes]) -> None:
        outlet = slot.outlet
        outlet.send(parts)
        if outlet.backlog:
            self._watch_room(slot)

    def _flush(self, slot: Slot) -> None:
        slot.outlet.flush()
        if not slot.outlet.backlog:
            self._unwatch(slot.outlet.fd)

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
            self.results.append((grant.job, first, (not error, Encoded(payload, 1, False))))
        return len(found)

    # -- deaths ------------------------------------------------------------------------------------

    def _check(self, slot: Slot) -> None:
        """The sentinel has news: a pid, or the end."""
        handle = slot.handle
        if handle is None or not handle.ended():
            return
        self._drain(slot)
        box, w = slot.box, slot.index
        self._take_late(slot, box.tail)
        lost = self.sched.gone(w, box.began)
        pid, exitcode, before_ready = handle.pid, handle.exitcode, slot.state is WorkerStates.STARTING
        self._deep.pop(w, None)
        for fd in (slot.inlet.fd, slot.outlet.fd, handle.sentinel):
            self._unwatch(fd)
        slot.gone()
        if lost is not None:
            self._lose(*lost, pid, exitcode, w)
        if self._ending:
            return
        self.died += not before_ready
        if before_ready:
            slot.failures += 1
            if slot.failures >= START_ATTEMPTS:
                self._fail(slot, exitcode)
                return
        self._start_again(slot)
        self._give_idle()

    def _start_again(self, slot: Slot) -> None:
        while True:
            try:
                self._start(slot)
                return
            except OSError as exc:
                slot.failures += 1
                slot.reason = exc
                if slot.failures >= START_ATTEMPTS:
                    self._fail(slot, None)
                    return

    def _lose(
        self, grant: Grant, position: int, pid: int | None, exitcode: int | None, w: int
    ) -> None:
        if grant.retries > 0 and not self._ending:
            self.sched.again(grant, position)
            return
        index = grant.first + position
        error = WorkerDied(pid, exitcode, w, self._describe(grant.job, index))
        self.results.append((grant.job, index, (False, error)))

    def _fail(self, slot: Slot, exitcode: int | None) -> None:
        """Give up on a worker that cannot be started, and with it on the pool."""
        cause, reason = slot.reason, None
        if isinstance(cause, (bytes, bytearray)):
            cause = decode(cause)
        if isinstance(cause, BaseException):
            reason = f"{type(cause).__name__}: {cause}"
        else:
            reason = (
                f"its process ended with {exit_reason(exitcode)} before it was ready; look at its "
                'output on stderr. A script must keep its own work behind if __name__ == "__main__":'
            )
        self.failure = WorkerStartFailed(slot.index, slot.failures, reason)
        self.failure.__cause__ = cause if isinstance(cause, BaseException) else None
        self._ending = True

    # -- silent workers ----------------------------------------------------------------------------

    def _look_by(self, when: float, also: dict[int, None] | None = None) -> None:
        """Have `_look_around` called at ``when``; ``also`` these workers looked at."""
        for w in also or ():
            slot = self.slots[w]
            if slot.look_at is None or slot.look_at > when:
                slot.look_at = when
        if self._next_look is None or when < self._next_look:
            self._next_look = when
            self._rouse()

    def _look_around(self) -> None:
        now = time.monotonic()
        self._next_look = None
        upcoming = []
        for slot in self.slots:
            if slot.stopping_since is not None and slot.handle is not None:
                if now >= slot.stopping_since + STOP_GRACE:
                    slot.kill()
                else:
                    upcoming.append(slot.stopping_since + STOP_GRACE)
            if slot.look_at is not None and now >= slot.look_at:
                slot.look_at = None
                if slot.driven:
                    slot.look_at = now + LOOK  # who drives it receives all there is
                elif slot.state is WorkerStates.READY and slot.index in self._deep:
                    slot.look_at = self._look(slot, now)
            if slot.look_at is not None:
                upcoming.append(slot.look_at)
        if upcoming:
            self._next_look = min(upcoming)

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
