"""Workers that have ended: what becomes of their work, and who takes their place.

A process has one worker, or several as threads (`Slot.siblings`).  These end together, so the
books of all are made at once: first all that any of them has sent is taken in, since they have one
seat in the arena; then what each held is lost, tried again or given to others; then the process is
started anew, for all of them.

Called with the engine's lock held.
"""

from __future__ import annotations

import signal
from typing import Any

from xpool.engine.deadlines import Deadlines
from xpool.engine.dispatcher import CULPRIT
from xpool.engine.switchboard import Switchboard
from xpool.errors import (
    DeviceError,
    InternalError,
    PoolBroken,
    WorkerDied,
    WorkerStartFailed,
    XPoolError,
    exit_reason,
)
from xpool.jobs.scheduler import Batch
from xpool.jobs.states import WorkerStates
from xpool.options import START_ATTEMPTS
from xpool.pickle import decode
from xpool.queue.messages import Refusal
from xpool.results import Parcel
from xpool.workers.launch import Handle
from xpool.workers.slot import Slot

__all__ = ["Replacement"]

SYSTEM_ATTEMPTS = 6
"""Times that the system may refuse to start a process, at intervals that grow to three seconds."""

KILLED_STARTS = 8
"""Workers that may be killed in one place while they start, at intervals that grow to a second.
More than may fail by themselves: a kill says little about the next one."""


class StartFailure(Parcel):
    """`WorkerStartFailed` with what the initializer raised as its cause: that is still pickled.

    To unpickle it may run any code of the user's, so whoever asks for it does that, each for
    himself, and never the engine.
    """

    __slots__ = ("_error", "_pickled")

    count = 1

    def __init__(self, error: WorkerStartFailed, pickled: bytes | memoryview) -> None:
        self._error, self._pickled = error, pickled

    def __str__(self) -> str:
        return str(self._error)

    def open(self) -> list[Any]:
        error = type(self._error)(*self._error.args)
        try:
            error.__cause__ = decode(self._pickled)
        except Exception as exc:
            # It came whole in the worker.  The text of it is in the error, whatever this says.
            error.__cause__ = exc
        return [error]


class Replacement(Deadlines):
    """The part of the engine that sees processes end; `Engine` starts them."""

    failure: XPoolError | StartFailure | None = None
    died = 0
    together = False  # the workers form one group: the death of one is the end of all
    switchboard: Switchboard | None = None  # where workers send messages to each other
    _ending = False  # no process is started any more
    _dead_seats: list[int]  # to be cleared, by the engine's thread

    def _start(self, slot: Slot) -> None:
        """Start the process of a worker, and of its siblings."""
        raise NotImplementedError

    def _watch_end(self, slot: Slot) -> None:
        assert slot.handle is not None
        self._watch.add(slot.handle.sentinel, lambda fd: self._check(slot))

    def _check(self, slot: Slot) -> None:
        """The sentinel has news: a pid, or the end."""
        handle = slot.handle
        if handle is None:
            return
        ended = [slot, *slot.siblings]
        for one in ended:
            if one.direct_job:
                # Its caller polls these descriptors: they may be closed when he has let go, which
                # is at once, since he sees this too.
                one.exit_pending = True
                self._watch.remove(handle.sentinel)
                return
        if not handle.ended():
            return
        for one in ended:
            if handle.exitcode is None:
                self._finish_off(one)
            self._drain(one)
            if not self._stopped:
                self._take_late(one, one.box.tail)
        workers = " and ".join(f"worker {one.index}" for one in ended)
        died = f"{workers} (pid {handle.pid}), {exit_reason(handle.exitcode)}"
        for one in ended:
            if one.protocol_error is not None:
                died += f", for it wrote nonsense ({one.protocol_error})"
        # To break off what it ran: then we have killed it.
        asked = any(one.stop is not None for one in ended)
        ready = [one for one in ended if one.state is WorkerStates.READY]
        starting = slot.state is WorkerStates.STARTING and not ready
        self._make_accounts(ended, handle)
        self._watch.remove(handle.sentinel)
        for one in ended:
            self._put_away(one)
        if self._ending:
            return
        if starting:
            failed = next((one for one in ended if one.reason is not None), slot)
            self._not_started(failed, handle.exitcode)
        else:
            self.died += len(ready)
            if self.together and ready:
                self.failure = DeviceError(
                    f"{died}, was a member of a replica group, whose members start and end "
                    "together: the pool has stopped; make a new one"
                )
                self._ending = True
                return
            if ready and not asked and self._budget.death(self._watch.now()):
                budget = self._budget
                self.failure = PoolBroken(budget.deaths, budget.task_range(), died)
                self._ending = True
                return
            self._start_again(slot)
        self._give_idle()

    def _finish_off(self, slot: Slot) -> None:
        """Nobody can tell whether the worker has ended (its server was killed): see to it.

        Before the accounts are made: what it still ran would be run twice.
        """
        slot.kill()
        while not slot.reader.ended and slot.hears(1.0):
            self._receive(slot)

    def _put_away(self, slot: Slot) -> None:
        """Let go of a worker whose accounts are made."""
        self._deep.pop(slot.index, None)
        for fd in (slot.reader.fd, slot.writer.fd):
            self._watch.remove(fd)
        if self.switchboard is not None:
            self.switchboard.ended(slot)
        slot.gone()
        if slot.seat is not None:
            self._dead_seats.append(slot.seat)  # all that it has sent is held here by now
            slot.seat = None

    # -- what they ran -------------------------------------------------------------------------

    def _make_accounts(self, ended: list[Slot], handle: Handle) -> None:
        """Answer what the workers of a process ran, or have it tried again; others get the rest."""
        lost: dict[Slot, tuple[Batch, int]] = {}
        for one in ended:
            found = self.sched.gone(one.index, one.box.began)
            if found is not None:
                lost[one] = found
        ran = {one: self._describe(batch.job, batch.first + k) for one, (batch, k) in lost.items()}
        guilty = next(
            (one for one in ended if one.stop is not None or one.protocol_error is not None), None
        )
        for one, (batch, position) in lost.items():
            innocent = guilty is not None and guilty is not one
            beside = _beside(one, guilty, ran) if one.siblings else ""
            self._lose(one, batch, position, handle, innocent, beside)

    def _lose(
        self, slot: Slot, batch: Batch, position: int, handle: Handle, innocent: bool, beside: str
    ) -> None:
        """Answer a task whose worker ended; ``innocent``: for something that another one ran."""
        if slot.stop is not None and batch.seq + position == slot.stop.seq:
            self._broken_off(slot, batch, position)
            return
        killed = batch.past.killed + (not innocent)
        if batch.retries > 0 and killed < CULPRIT and not self._ending:
            self._again(batch, position, killed=not innocent)
            return
        index = batch.first + position
        task = self._describe(batch.job, index)
        error = WorkerDied(handle.pid, handle.exitcode, slot.index, task, killed, beside)
        self.results.append((batch.job, index, (False, error)))

    # -- those who come after ------------------------------------------------------------------

    def _not_started(self, slot: Slot, exitcode: int | None) -> None:
        """Start a worker anew that ended before it was ready, unless that is hopeless."""
        if slot.reason is None and exitcode in (-signal.SIGKILL, -signal.SIGTERM):
            # By an operator, the kernel short of memory, a test: the next may live.
            slot.killed += 1
        else:
            slot.failures += 1
        if slot.failures >= START_ATTEMPTS or slot.killed >= KILLED_STARTS:
            self._fail(slot, exitcode)
        elif slot.killed > 1:
            self._start_at(slot, self._watch.now() + min(1.0, 0.05 * 2**slot.killed))
        else:
            self._start_again(slot)

    def _start_again(self, slot: Slot) -> None:
        try:
            self._start(slot)
        except InternalError:
            raise
        except Exception as exc:
            # No descriptors, no memory: that may pass, so a few times, at growing intervals.
            slot.failures += 1
            slot.reason = exc
            if slot.failures > SYSTEM_ATTEMPTS:
                self._fail(slot, None)
            else:
                self._start_at(slot, self._watch.now() + 0.05 * 2**slot.failures)

    def _start_at(self, slot: Slot, when: float) -> None:
        slot.start_at = when
        self._watch.alarm(when)

    def _start_overdue(self, now: float) -> None:
        for slot in self.slots:
            if slot.start_at is not None and not self._ending:
                if now >= slot.start_at:
                    slot.start_at = None
                    self._start_again(slot)
                else:
                    self._watch.alarm(slot.start_at)

    def _fail(self, slot: Slot, exitcode: int | None) -> None:
        """Give up on a worker that cannot be started, and with it on the pool."""
        cause = slot.reason
        if isinstance(cause, Refusal):
            reason = cause.line
        elif cause is not None:
            reason = f"{type(cause).__name__}: {cause}"
        else:
            reason = f"its process ended before it was ready, {exit_reason(exitcode)}"
            if exitcode is None or exitcode >= 0:
                reason += (
                    "; look at its output on stderr. A script must keep its own work behind "
                    'if __name__ == "__main__":'
                )
        error = WorkerStartFailed(slot.index, slot.failures + slot.killed, reason)
        if isinstance(cause, Refusal):
            self.failure = StartFailure(error, cause.pickled)
        else:
            error.__cause__ = cause
            self.failure = error
        self._ending = True


def _beside(slot: Slot, guilty: Slot | None, ran: dict[Slot, str]) -> str:
    """Say what other threads of a worker's process have to do with its end; empty: nothing."""
    if guilty is not None and guilty is not slot:
        why = "wrote nonsense to its parent"
        if guilty.protocol_error is None:
            task = ran.get(guilty, "what it was given")
            why = f"ran {task}, which did not stop when its time was over or it was cancelled"
        other = f"worker {guilty.index}, another thread of it,"
        return f"The pool ended the process, since {other} {why}."
    others = [f"worker {one.index} ran {task}" for one, task in ran.items() if one is not slot]
    if not others:
        return ""
    return f"In other threads of the process, {' and '.join(others)}: that may be what ended it."
