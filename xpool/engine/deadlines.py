"""Tasks that must end: those whose time is over, and those that were cancelled.

A worker that must break something off is asked first: the parent names the item in the shared page
and sends a signal.  Its handler writes where the worker is, and raises `TaskStopped` there, if the
worker is in that very item.  If it has not said a word when the grace is over, it is killed.  From
the moment of asking, the worker begins nothing new, so nothing else can be hit; what else it held
goes to others after the next look, two milliseconds later, as with every taking back.

When the worker is looked at is the parent's choice: the page says when the task was begun.  At the
time at which a task given now could be over its limit, the parent looks, and finds either a task
that is over, or one that will be at a known time, or none; in the last case nothing can be over
before another limit has passed.  So tasks that are far below their limit cost nothing here.
"""

from __future__ import annotations

from xpool.engine.dispatcher import GRACE, Dispatcher, own_part
from xpool.errors import TaskTimeout
from xpool.interrupt import uninterrupted
from xpool.jobs.scheduler import Batch
from xpool.queue.outbox import NO_LIMIT, STOP_SIGNAL
from xpool.workers.slot import Slot, Stop

__all__ = ["TASK_GRACE", "Deadlines"]

TASK_GRACE = 0.1
"""Seconds between asking a worker to break a task off and killing it."""


class Deadlines(Dispatcher):
    """The part of the engine that ends what takes too long.  Called with the lock held."""

    _start_limit: float | None = None
    """Seconds that a worker may take from its first line to its readiness."""

    @uninterrupted
    def withdraw(self, job: int) -> None:
        """Give nobody what still waits of a job that has ended, and stop what runs of it."""
        with self.lock:
            now = self._watch.now()
            for w in self.sched.withdraw(job):
                slot = self.slots[w]
                if slot.stop is None and slot.handle is not None and not self._stopped:
                    self._hold_back(slot, slot.box.began, now)
                    self._mind_limit(slot, now)
                    # It may have been about to begin another of them.
                    self._check_by(slot, now + GRACE)

    @uninterrupted
    def runs(self, job: int) -> bool:
        """Whether a worker is in a task of this job now."""
        with self.lock:
            for slot in self.slots:
                if slot.handle is not None and not self._stopped:
                    running = self.sched.running(slot.index, slot.box.began)
                    if running is not None and running[0].job == job:
                        return True
            return False

    def _mind_limits(self, now: float) -> None:
        """Look at the workers whose time has come."""
        for slot in self.slots:
            if slot.check_at is None:
                continue
            if slot.handle is None or self._stopped:
                slot.check_at = None
            elif now < slot.check_at:
                self._watch.alarm(slot.check_at)
            else:
                slot.check_at = None
                if slot.ready:
                    self._mind_limit(slot, now)
                else:
                    self._mind_start(slot, now)

    def _mind_limit(self, slot: Slot, now: float) -> None:
        """End what a worker runs, if it must; have it looked at again when it may have to."""
        if not slot.direct_job:
            self._drain(slot)  # what is answered is in time
        stop, box = slot.stop, slot.box
        if stop is not None:
            if now < stop.until:
                self._check_by(slot, stop.until)
            elif box.began == stop.seq + 1:
                slot.kill()
            else:
                self._check_by(slot, now + TASK_GRACE)  # it has left it: the answer is on its way
            return
        running = self.sched.running(slot.index, box.began)
        if running is not None:
            batch, position = running
            due = None
            if batch.withdrawn:
                due = now
            elif batch.limit is not None and (since := box.since) is not None:
                due = since + batch.limit.seconds
            if due is not None and now >= due:
                self._ask(slot, batch.seq + position, now)
                return
            if due is not None:
                self._check_by(slot, due)
        limits = [
            g.limit.seconds for g in self.sched.in_flight[slot.index].held if g.limit is not None
        ]
        if limits:
            # The soonest that one can be over its time which is not begun yet.
            self._check_by(slot, now + min(limits))
            if box.since is not None or (running is not None and running[0].limit is None):
                slot.last_progress = None
            else:
                self._mind_standstill(slot, running, min(limits), now)

    def _mind_standstill(
        self, slot: Slot, running: tuple[Batch, int] | None, limit: float, now: float
    ) -> None:
        """End a worker that for ``limit`` seconds has not done what is no task and takes no time:
        read what it was sent, begin it, or send an answer.  It is stopped by SIGSTOP, say, or an
        object that it let go of hangs in its finalizer.
        """
        in_flight, box = self.sched.in_flight[slot.index], slot.box
        doing = box.began, in_flight.answered, slot.reader.got, slot.writer.rest
        if slot.last_progress is None or slot.last_progress[0] != doing:
            slot.last_progress = doing, now
        elif now < slot.last_progress[1] + limit:
            self._check_by(slot, slot.last_progress[1] + limit)
        elif running is not None:
            # It may have run for some of that time, but only once, and not as long as its limit.
            if now >= slot.last_progress[1] + 2 * limit:
                self._ask(slot, running[0].seq + running[1], now)
            else:
                self._check_by(slot, slot.last_progress[1] + 2 * limit)
        elif not in_flight.paused:
            # Nothing of what it holds is begun, and nothing shall be: others get it.
            self._hold_back(slot, box.began, now)
            self._check_by(slot, now + GRACE)
        else:
            slot.stop = Stop(-1, now)
            slot.kill()

    def _ask(self, slot: Slot, seq: int, now: float) -> None:
        """Ask a worker to break off what it runs, and to begin nothing more."""
        assert slot.handle is not None
        slot.stop = Stop(seq, now + TASK_GRACE)
        slot.box.ask(seq + 1)
        self._hold_back(slot, seq + 1, now)
        slot.handle.signal(STOP_SIGNAL)
        self._check_by(slot, slot.stop.until)

    def _hold_back(self, slot: Slot, began: int, now: float) -> None:
        """Let a worker begin nothing from item ``began`` on; others get it."""
        if self.sched.in_flight[slot.index].paused:
            return  # it is told already
        slot.box.limit = began
        slot.recalling = True
        self.sched.pause(slot.index)
        if slot.index in self._deep:
            slot.look_at = now + GRACE  # no sooner, even where a look was due
            self._watch.alarm(slot.look_at)

    def _mind_start(self, slot: Slot, now: float) -> None:
        """Kill a worker whose initializer takes too long; ask it where it is, before that."""
        limit = self._start_limit
        assert limit is not None and slot.handle is not None
        since = slot.box.since
        if since is None:
            self._check_by(slot, now + limit)
        elif now < since + limit:
            self._check_by(slot, since + limit)
        elif slot.stop is None:
            slot.stop = Stop(-1, now + TASK_GRACE)
            slot.box.ask(NO_LIMIT)  # no item: it is asked for its stack only
            slot.handle.signal(STOP_SIGNAL)
            self._check_by(slot, slot.stop.until)
        else:
            stack = own_part(slot.box.stack())
            task = "The start of the worker, with its initializer,"
            slot.reason = TaskTimeout(limit, slot.index, slot.pid, task, stack)
            slot.kill()

    def _try_again(self, now: float) -> None:
        """Queue the tasks whose pause is over."""
        due = self.sched.due(now)
        if due is not None:
            self._watch.alarm(due)
        self._give_idle()
