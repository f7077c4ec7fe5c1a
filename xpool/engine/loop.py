"""The engine of the process pools: wait, turn what happened into events, do what follows.

::

     any caller's thread           engine's thread                    worker process
    ---------------------        -------------------              ----------------------
     verb, pickles               waits on descriptors        |
      | submit                     ^        |                |
      v                            |        v                |
     Scheduler  --- batches ----->  Slot.writer ==== pipe =========>  run, one by one
     (jobs/)                       |                         |         |          |
        ^                          |                         |         v          v
        `------ answered --------  Slot.reader <==== pipe ========= "so many"   outbox
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

import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xpool.engine.replacement import Replacement
from xpool.engine.switchboard import Switchboard
from xpool.engine.watch import Watch
from xpool.interrupt import uninterrupted
from xpool.jobs.scheduler import TaskRange
from xpool.jobs.states import WorkerEvent, WorkerStates
from xpool.memory.arena import IDLE, Arena
from xpool.pickle.frame import Leased, weight
from xpool.pickle.loans import sweep
from xpool.queue.messages import boot_frame
from xpool.queue.spin import Spin
from xpool.workers.launch import Launcher
from xpool.workers.slot import Slot

__all__ = ["Engine"]

STOP_GRACE = 0.3
"""Seconds between asking a worker to stop (SIGTERM) and stopping it (SIGKILL)."""


class Engine(Replacement):
    """The workers of one pool and the work that they share out.

    ``watch`` and ``slot`` are the engine's only ways to the system: clock, descriptors and
    processes.  `xpool.testing.simulation` gives others.

    ``processes``: workers that are threads of one process, by index; each of the others has a
    process of its own.
    """

    def __init__(
        self,
        workers: int,
        launcher: Launcher,
        orders: Callable[[int, int, int | None], bytes],
        *,
        arena: Arena | None,
        name: str,
        daemon: bool,
        inherited: Any,
        lifetime: int | None,
        describe: Callable[[int, int], str],
        restart_budget: int = 100,
        initializer_timeout: float | None = None,
        watch: Watch | None = None,
        slot: Callable[[int], Slot] = Slot,
        processes: Iterable[Sequence[int]] = (),
    ) -> None:
        super().__init__(workers, lifetime, describe, restart_budget, watch or Watch(), slot)
        for workers_of_one in processes:
            for i in workers_of_one:
                siblings = tuple(self.slots[k] for k in workers_of_one if k != i)
                self.slots[i].siblings = siblings
        self.dropped = False
        self._launcher = launcher
        self._orders = orders
        self._arena = arena
        self._dead_seats = []
        self._trim_at: float | None = None
        self._trim_after = IDLE
        if arena is not None:
            arena.begin()
        self._name = name
        self._daemon = daemon
        self._inherited = inherited
        self._start_limit = initializer_timeout
        self._numbers = 0
        self._spin = Spin()

    # -- called by the pool, from any thread ---------------------------------------------------

    @uninterrupted
    def submit(self, task_range: TaskRange) -> None:
        """Queue a task range and give it to whoever is idle.

        A task range that is bound to worker -1 is bound to the one with the least to do.
        """
        with self.lock:
            self._put(task_range)

    def _put(self, task_range: TaskRange, direct_job: bool = False) -> None:
        self._leave_signal_handler()
        if not self._ending:
            if task_range.bound is not None and task_range.bound < 0:
                task_range.bound = self.sched.least_loaded(newest=direct_job)
            self.sched.put(task_range)
            self._give_idle(task_range.job if direct_job else 0)

    def connect_peers(self) -> None:
        """Let workers have channels to each other; before the first is started."""
        self.switchboard = Switchboard(self.slots, self._watch)

    @uninterrupted
    def submit_together(self, task_ranges: Iterable[TaskRange]) -> None:
        """Queue task ranges at once: those of several callers reach all workers in one order."""
        with self.lock:
            self._leave_signal_handler()
            if not self._ending:
                for task_range in task_ranges:
                    self.sched.put(task_range)
                self._give_idle()

    @uninterrupted
    def feed(self, task_range: TaskRange) -> None:
        """Queue a task range to which items were appended, and give them to idle workers."""
        with self.lock:
            if not self._ending:
                if not task_range.queued and task_range.items:
                    self.sched.put(task_range)
                self._give_idle()

    @uninterrupted
    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        """Keep a function for the workers; return the number that task ranges call it by."""
        with self.lock:
            self._leave_signal_handler()
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
            self._watch.wake()

    def drop(self) -> None:
        """Note that the pool is gone.  For the garbage collector: without a lock."""
        self.dropped = True
        self._watch.nudge()  # the pool had not ended, so this is open

    # -- a caller that waits for one answer receives it himself ------------------------------------
    #
    # That saves the turn of the engine's thread: two context switches of the three that an answer
    # costs beyond the pipe itself.  A driven slot's pipe is muted for the engine's thread, and
    # stays so while the worker is idle, since nothing is expected from it; what must be seen at
    # any time, its death, comes by the sentinel.

    def call(self, task_range: TaskRange) -> None:
        """Submit one task, and receive its answer in this thread if it is sent at once.

        Returns when the answer is among the results, or will come by the engine's thread.
        """
        try:
            slot = self._put_driven(task_range)
            if slot is None:
                return
            poll = slot.poller.poll
            # Each second, since a call that a signal handler took away gets no answer here.
            events = self._spin.look(poll) or poll(1000)
            while self._receive_driven(slot, task_range.job, events):
                events = poll(1000)
        finally:
            self._let_go(task_range.job)

    @uninterrupted
    def _put_driven(self, task_range: TaskRange) -> Slot | None:
        with self.lock:
            self._put(task_range, direct_job=True)
            slot = self._direct.get(task_range.job)
            if slot is not None:
                slot.direct_thread = threading.get_ident()
            return slot

    @uninterrupted
    def _receive_driven(self, slot: Slot, job: int, events: list[tuple[int, int]]) -> bool:
        with self.lock:
            # No longer ours, or its sentinel: a death is for the engine's thread.
            if slot.direct_job != job or any(fd != slot.reader.fd for fd, _ in events):
                return False
            if slot.protocol_error is not None:
                return False  # its death is for the engine's thread, too
            if events:
                self._receive(slot)
            held = self.sched.in_flight[slot.index].held
            if held and held[0].job == job:
                return True
            # Answered: another thread may drive this worker from now on.
            del self._direct[job]
            self._undrive(slot)
            return False

    @uninterrupted
    def _let_go(self, job: int) -> None:
        with self.lock:
            slot = self._direct.pop(job, None)
            if slot is not None and slot.direct_job == job:
                self._undrive(slot)

    def _leave_signal_handler(self) -> None:
        """Let go of what the calling thread drives already.

        It does when it is in a signal handler that has come into its wait; what it was waiting
        for, and what the handler will wait for, are then the engine's thread's to receive.
        """
        if self._direct:
            me = threading.get_ident()
            for job, slot in list(self._direct.items()):
                if slot.direct_thread == me:
                    del self._direct[job]
                    self._undrive(slot)

    def _undrive(self, slot: Slot) -> None:
        slot.direct_job = 0
        if self.sched.in_flight[slot.index].size or slot.state is not WorkerStates.READY:
            # What else it holds is for the engine's thread again.
            self._mute(slot, False)
        if slot.exit_pending:
            slot.exit_pending = False
            self._watch_end(slot)

    # -- starting and stopping -------------------------------------------------------------------

    @uninterrupted
    def start_missing(self) -> bool:
        """Start a process in every empty slot; True when there was one."""
        with self.lock:
            missing = [s for s in self.slots if s.state is WorkerStates.ABSENT]
            for slot in missing:
                if slot.state is WorkerStates.ABSENT:  # else it came with a sibling
                    self._start(slot)
            return bool(missing)

    def _start(self, slot: Slot) -> None:
        if self._ending:
            return
        name = f"{self._name}-worker-{slot.index}"
        arena = self._arena
        seat = None if arena is None else arena.take_seat()
        slots = (slot, *slot.siblings)
        try:
            # Before there is a process: when this fails, the slot is as it was.
            orders = [self._orders(one.index, one.generation + 1, seat) for one in slots]
            there = arena if seat is not None else None
            slot.start(self._launcher, name, self._daemon, self._inherited, there)
        except BaseException:
            if seat is not None:
                self._dead_seats.append(seat)
            raise
        slot.seat = seat
        assert slot.handle is not None
        sentinel = slot.handle.sentinel
        try:
            self._watch_end(slot)
            for one, order in zip(slots, orders, strict=True):
                self._watch.add(one.reader.fd, self._receive_from(one))
                if self.switchboard is not None:
                    self.switchboard.started(one)
                self._send(one, boot_frame(order))
                if self._start_limit is not None:
                    self._check_by(one, self._watch.now() + self._start_limit)
        except BaseException:
            # A process whose end nobody would see: it is none of ours.
            self._watch.remove(sentinel)
            for one in slots:
                one.kill()
                self._put_away(one)
            raise

    @uninterrupted
    def retire_all(self) -> None:
        """Let workers end when they have answered what they hold: nothing more will come."""
        with self.lock:
            self._ending = True
            for slot in self.slots:
                if slot.state in (WorkerStates.READY, WorkerStates.STARTING):
                    self._retire(slot)
            self._watch.wake()

    @uninterrupted
    def terminate(self) -> None:
        """Stop all workers now: asked first, and killed a moment later if they do not."""
        with self.lock:
            self._ending = self._stopped = True
            self.sched.clear()
            self._deep.clear()
            now = self._watch.now()
            self._leave_signal_handler()
            for slot in self.slots:
                if slot.handle is not None and slot.stopping_since is None:
                    if slot.state is not WorkerStates.RETIRING:
                        slot.happens(WorkerEvent.RETIRE)
                    slot.stopping_since = now
                    slot.handle.signal(signal.SIGTERM)
                    self._watch.alarm(now + STOP_GRACE)
            self._watch.wake()

    def _kill_stubborn(self, now: float) -> None:
        for slot in self.slots:
            if slot.stopping_since is not None and slot.handle is not None:
                if now >= slot.stopping_since + STOP_GRACE:
                    slot.kill()
                else:
                    self._watch.alarm(slot.stopping_since + STOP_GRACE)

    @property
    def ended(self) -> bool:
        """Whether no process is left and none will come."""
        return self._ending and all(s.handle is None for s in self.slots)

    @uninterrupted
    def close(self) -> None:
        """Let go of the engine's own descriptors; all workers have ended."""
        with self.lock:
            self._watch.close()
        self._bury_dead()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.end()
            sweep(everything=True)

    def after_fork_in_child(self) -> None:
        """These workers are the parent's; their descriptors are closed here already."""
        self.lock = threading.Lock()  # some thread of the parent may have held it
        self._ending = self._stopped = True
        self.sched.clear()
        self._arena = None
        for slot in self.slots:
            slot.handle = None

    # -- the engine's thread -----------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait for something to happen, at most ``timeout`` seconds, and act on it."""
        ready = self._watch.poll(timeout)
        with self.lock:
            for fd in ready:
                self._watch.handle(fd)
            if self._watch.rung():
                now = self._watch.now()
                self._kill_stubborn(now)
                self._look_around(now)
                self._mind_limits(now)
                self._try_again(now)
                self._start_overdue(now)
                if self.switchboard is not None:
                    self.switchboard.mind(now)
                if self._trim_at is not None:
                    self._watch.alarm(self._trim_at)
        if self._dead_seats:
            self._bury_dead()
        sweep()
        if self._trim_at is not None and self._watch.now() >= self._trim_at:
            self._trim()

    def sent(self, payload: bytes | memoryview) -> int:
        """Return how many bytes of memory a message holds; it was made for a worker."""
        if type(payload) is Leased:
            with self.lock:
                self.tidy_later()
        return weight(payload)

    def tidy_later(self) -> None:
        self._trim_after = IDLE
        if self._trim_at is None:
            self._trim_at = self._watch.now() + IDLE
            self._watch.alarm(self._trim_at)

    def _bury_dead(self) -> None:
        """Clear the holds of workers that have ended; without the lock, as `_trim`."""
        while self._dead_seats and self._arena is not None:
            self._arena.bury(self._dead_seats.pop())

    def _trim(self) -> None:
        """Give back memory that lay unused; without the lock, since that takes its time."""
        arena, self._trim_at = self._arena, None
        lent = sweep(everything=True)
        if (arena is not None and arena.trim()) or lent:
            # The memory of a GPU is scarce: whether it is lent still is looked at more often.
            self._trim_after = IDLE if lent else min(2 * self._trim_after, 60.0)
            with self.lock:
                self._trim_at = self._watch.now() + self._trim_after
                self._watch.alarm(self._trim_at)
