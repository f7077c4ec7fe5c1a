"""Processes of workers: how they start and end, what becomes of their work, who takes their place.

A process has one worker, or several as threads (`Slot.siblings`).  These end together, so the books
of all are made at once: first all that any of them has sent is taken in, since they have one
attachment to the arena; then what each held is lost, tried again or given to others; then the
process is started anew, for all of them.

Called with the engine's lock held.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from xpool._engine.answers import Answers
from xpool._engine.direct import DirectReceive
from xpool._engine.dispatcher import Dispatcher
from xpool._engine.jobs.budget import RestartBudget, Starts
from xpool._engine.jobs.scheduler import Batch, Scheduler
from xpool._engine.jobs.states import WorkerEvent, WorkerStates
from xpool._engine.launch import Launcher
from xpool._engine.ledger import Ledger
from xpool._engine.maintenance import ArenaMaintenance
from xpool._engine.monitor import WorkerMonitor
from xpool._engine.pickled_results import StartFailure
from xpool._engine.reactor import Alarms, Reactor
from xpool._engine.slot import Slot
from xpool._engine.switchboard import Switchboard
from xpool._wire.wire import Refusal, boot_frame
from xpool.errors import (
    DeviceError,
    InternalError,
    PoolBroken,
    WorkerStartFailed,
    XPoolError,
    exit_reason,
)

__all__ = ["Recipe", "Replacement"]

LAST_WORDS_SECONDS = 1.0
"""Seconds of silence after which nothing more is expected of a killed worker whose pipe is open: a
child that one of its tasks has forked has that end, too."""

TERMINATE_GRACE_SECONDS = 0.3
"""Seconds between asking a worker to stop (SIGTERM) and stopping it (SIGKILL)."""


class Recipe(NamedTuple):
    """How processes are started.

    ``orders(index, generation, attachment)`` returns the first message to a worker;
    ``inherited``: what
    cannot be sent, for start methods that fork.
    """

    launcher: Launcher
    orders: Callable[[int, int, int | None], bytes]
    name: str
    daemon: bool
    inherited: Any


class Replacement:
    """Keeps a process in every slot, until the pool ends or that is hopeless."""

    def __init__(
        self,
        slots: Sequence[Slot],
        sched: Scheduler,
        reactor: Reactor,
        dispatcher: Dispatcher,
        answers: Answers,
        direct: DirectReceive,
        monitor: WorkerMonitor,
        maintenance: ArenaMaintenance,
        ledger: Ledger,
        budget: RestartBudget,
        recipe: Recipe,
        together: bool,
        switchboard: Switchboard | None,
    ) -> None:
        self.failure: XPoolError | StartFailure | None = None  # why the pool can go on no more
        self.ending = False  # no process is started any more
        self._together = together  # the workers form one group: the death of one is the end of all
        self._switchboard = switchboard  # where workers get channels to each other
        self._slots, self._sched, self._reactor = slots, sched, reactor
        self._dispatcher, self._answers, self._direct = dispatcher, answers, direct
        self._monitor, self._maintenance, self._budget = monitor, maintenance, budget
        self._recipe, self._ledger = recipe, ledger
        self._starts = {slot.index: Starts() for slot in slots}
        self._kills = Alarms(reactor, lambda slot: slot.kill())
        self._restarts = Alarms(reactor, self._start_again)
        # Workers that were killed since nobody can tell whether they have ended: when they have
        # been silent for long, and those that have.
        self._silences = Alarms(reactor, self._fell_silent)
        self._silent: set[int] = set()

    # -- starting ----------------------------------------------------------------------------------

    def start_missing(self) -> bool:
        """Start a process in every empty slot; return whether there was one."""
        wanted = self._slots[: self._sched.size]
        missing = [slot for slot in wanted if slot.state is WorkerStates.ABSENT]
        for slot in missing:
            # Else it came with a sibling, or comes after a pause.
            if slot.state is WorkerStates.ABSENT and not self._restarts.pending(slot):
                self._start(slot)
        return bool(missing)

    def _start(self, slot: Slot) -> None:
        """Start the process of a worker and its siblings."""
        if self.ending or self._left_over(slot):
            return
        recipe, slots = self._recipe, (slot, *slot.siblings)
        arena, attachment = self._maintenance.take_attachment()
        try:
            # Before there is a process: when this fails, the slot is as it was.
            # The generation is that of the process to come: `Slot.start` counts it.
            orders = [recipe.orders(one.index, one.generation + 1, attachment) for one in slots]
            name = f"{recipe.name}-worker-{slot.index}"
            slot.start(recipe.launcher, name, recipe.daemon, recipe.inherited, arena)
        # Whatever came: a place in the arena that nobody frees is lost for the pool's life.
        except BaseException:
            self._maintenance.free_attachment(attachment)
            raise
        slot.attachment = attachment
        assert slot.handle is not None
        sentinel = slot.handle.sentinel
        try:
            self._await_end(slot)
            for one, order in zip(slots, orders, strict=True):
                self._monitor.started(one)
                if self._switchboard is not None:
                    self._switchboard.started(one)
                self._dispatcher.send(one, boot_frame(order))
        except BaseException:
            # A process whose end nobody would see: it is none of ours.
            self._reactor.remove(sentinel)
            for one in slots:
                one.kill()
                self._put_away(one)
            raise

    def _await_end(self, slot: Slot) -> None:
        assert slot.handle is not None
        self._reactor.add(slot.handle.sentinel, lambda fd: self._look_at_end(slot))

    def _start_again(self, slot: Slot) -> None:
        try:
            self._start(slot)
        # A step that the table of states does not have: to try again would hide the bug.
        except InternalError:
            raise
        # The system has no process or descriptor for it now, say: that may pass.
        except Exception as exc:
            slot.reason = exc
            self._start_later(slot, self._starts[slot.index].refused(), None)

    def _start_later(self, slot: Slot, pause: float | None, exitcode: int | None) -> None:
        """Start a worker anew after so many seconds; None: give up on it, and so on the pool."""
        if pause is None:
            self.ending = True
            self.failure = _start_failure(slot, self._starts[slot.index].attempts, exitcode)
        elif pause:
            self._restarts.schedule_by(slot, self._reactor.now() + pause)
        else:
            self._start_again(slot)

    # -- ending ------------------------------------------------------------------------------------

    def resize(self) -> None:
        """Start the workers that are missing by now, and let those end that are left over."""
        for slot in self._slots:
            self._starts.setdefault(slot.index, Starts())
            if self._left_over(slot) and (slot.state is WorkerStates.STARTING or slot.state.serves):
                self._monitor.dismiss(slot)
        self.start_missing()

    def _left_over(self, slot: Slot) -> bool:
        return slot.index >= self._sched.size

    def retire_all(self) -> None:
        """Let workers end when they have answered what they hold: nothing more will come."""
        self.ending = True
        for slot in self._slots:
            if slot.state is WorkerStates.STARTING or slot.state.serves:
                self._monitor.retire(slot)

    def terminate(self, at_once: bool = False) -> None:
        """Stop all workers now: asked first, and killed a moment later, or at once."""
        self.ending = True
        self._monitor.clear()
        # The pool's end calls this again: those who were asked before have their timer.
        for slot in self._slots:
            if slot.handle is not None and not self._kills.pending(slot):
                if slot.state is WorkerStates.STARTING or slot.state.serves:
                    slot.transition(WorkerEvent.RETIRE)
                # None: the server has not forked it yet, and there is nobody to ask.
                if at_once or slot.pid is None:
                    slot.kill()
                else:
                    slot.handle.signal(signal.SIGTERM)
                self._kills.schedule_by(slot, self._reactor.now() + TERMINATE_GRACE_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether no process is left and none will come."""
        return self.ending and all(slot.handle is None for slot in self._slots)

    def let_go(self, job: int) -> None:
        """The caller who received the answer of this job does so no more."""
        slot = self._direct.end(job)
        if slot is not None:
            self._await_end(slot)

    def _look_at_end(self, slot: Slot) -> None:
        """The sentinel has news: a pid, or the end."""
        handle = slot.handle
        if handle is None:
            return
        ended = [slot, *slot.siblings]
        if any(self._direct.postpone_exit(one) for one in ended):
            # Unread, it would wake the engine's thread at every turn until the caller lets go.
            self._reactor.remove(handle.sentinel)
            return
        try:
            if not handle.ended():
                return
        except ValueError as exc:
            self._monitor.distrust(slot, exc)
            return
        exitcode = handle.exitcode
        if exitcode is None and not self._finished_off(ended):
            return
        # What was sent comes before what lies in the outbox: answers are in the tasks' order.
        for one in ended:
            self._monitor.drain(one)
            if not self._monitor.stopped:
                # The worker is dead: its `tail` is final, and all up to that is whole.
                self._monitor.take_early(one, one.box.tail)
            self._look_at_books(one)
        # All this before the accounts, which end an interrupt, and before the slots are emptied.
        died = _story(ended, exitcode)
        # A stand-in that steps aside has run nothing, and takes nothing with it: no death.
        served = [one for one in ended if _served(one) and not handle.stepped_aside]
        # To break off what it ran: then we have killed it.
        asked = any(
            _told_to_end(one) and one.protocol_error is None and not one.remark for one in ended
        )
        problem = handle.problem
        if problem is not None:
            slot.reason = problem
        failed = next((one for one in ended if one.reason is not None), slot)
        started = bool(served) or handle.stepped_aside or slot.state is WorkerStates.RETIRING
        self._make_accounts(ended, exitcode)
        # Out of the reactor before `_put_away` closes it.
        self._reactor.remove(handle.sentinel)
        for one in ended:
            self._put_away(one)
        if self.ending:
            return
        if started:
            for one in ended:
                self._starts[one.index].succeeded()
        if self._left_over(slot):
            pass  # nobody takes its place
        elif not started:
            # By an operator, or the kernel short of memory: that says little about the next one.
            killed = failed.reason is None and exitcode in (-signal.SIGKILL, -signal.SIGTERM)
            starts = self._starts[failed.index]
            # Processes are short, say: that may pass.
            refused = isinstance(problem, OSError)
            pause = starts.refused() if refused else starts.failed(killed)
            self._start_later(failed, pause, exitcode)
        else:
            self._replace(slot, served, asked, died)
        # What it held waits again, and others may be idle.
        self._monitor.give_idle()

    def _replace(self, slot: Slot, served: list[Slot], asked: bool, died: str) -> None:
        """Start a process in the place of one that has ended after it was ready."""
        for one in served:
            self._ledger.died(one.index, died)
        budget = self._budget
        if self._together and served:
            self.failure = DeviceError(
                f"{died}, was a member of a replica group, whose members start and end "
                "together: the pool has stopped; make a new one"
            )
        elif served and not asked and budget.death(self._reactor.now()):
            self.failure = PoolBroken(budget.deaths, budget.seconds(), died)
        if self.failure is not None:
            self.ending = True
        else:
            self._start_again(slot)

    def _look_at_books(self, slot: Slot) -> None:
        """Look whether what a worker has left in shared memory can be true."""
        if slot.protocol_error is not None:
            # It may have begun more before it was killed, if that can be known.
            if slot.box.intact:
                self._answers.disown(slot, slot.protocol_error)
            return
        began, most = slot.box.began, self._sched.in_flight[slot.index].answered + 1
        nonsense = f"{began} tasks begun where {most} can be" if began > most else ""
        nonsense = nonsense or self._maintenance.nonsense(slot.attachment)
        if nonsense:
            slot.remark = f"It had written over memory that it shares with its parent ({nonsense})."

    def _finished_off(self, ended: list[Slot]) -> bool:
        """Whether nothing more can come of workers that may live, as their server was killed.

        They are killed first: what they still run would be run twice.
        """
        slot = min(ended, key=lambda one: one.index)  # stands for all of them
        if slot.index in self._silent or all(one.reader.ended for one in ended):
            return True
        if not self._silences.pending(slot):
            # Its end stays readable.
            assert slot.handle is not None
            self._reactor.remove(slot.handle.sentinel)
            for one in ended:
                one.kill()
                self._sched.retire(one.index)
                if not one.reader.ended:
                    # Their ends of the pipes close with them.
                    self._reactor.remove(one.reader.fd)
                    self._reactor.add(one.reader.fd, partial(self._hear, slot, one))
            self._silences.schedule_by(slot, self._reactor.now() + LAST_WORDS_SECONDS)
        return False

    def _hear(self, slot: Slot, one: Slot, fd: int) -> None:
        """Take the last words of a worker; ``slot``: the sibling that stands for all of them."""
        self._monitor.receive(one)
        self._silences.cancel(slot)
        self._silences.schedule_by(slot, self._reactor.now() + LAST_WORDS_SECONDS)
        if one.reader.ended:
            self._look_at_end(slot)

    def _fell_silent(self, slot: Slot) -> None:
        self._silent.add(slot.index)
        self._look_at_end(slot)

    def _put_away(self, slot: Slot) -> None:
        """Let go of a worker whose accounts are made."""
        # Out of the reactor first: `slot.gone` closes the descriptors.
        self._monitor.gone(slot)
        self._direct.gone(slot)
        self._kills.cancel(slot)
        self._silences.cancel(slot)
        self._silent.discard(slot.index)
        if self._switchboard is not None:
            self._switchboard.ended(slot)
        slot.gone()
        # All that it has sent is held here by now.
        self._maintenance.free_attachment(slot.attachment)
        slot.attachment = None

    def _make_accounts(self, ended: list[Slot], exitcode: int | None) -> None:
        """Answer what the workers of a process ran, or have it tried again; others get the rest."""
        # All hands are emptied before anyone is answered: an error tells what ran beside it.
        lost: dict[Slot, tuple[Batch, int]] = {}
        for one in ended:
            # All that it has answered is taken in, so it was in the next one at most.
            answered = self._sched.in_flight[one.index].answered
            began = one.begun(answered)
            # What had begun was failed when it sent an invalid message.
            if one.protocol_error is not None and not one.box.intact:
                began = answered
            found = self._sched.gone(one.index, min(began, answered + 1))
            if found is not None:
                lost[one] = found
        describe = self._answers.describe
        ran = {one: describe(*batch.name(batch.first + k)) for one, (batch, k) in lost.items()}
        ended_by_us = next((one for one in ended if _told_to_end(one)), None)
        for one, (batch, position) in lost.items():
            not_counted = ended_by_us is not None and ended_by_us is not one
            beside = one.remark or (_beside(one, ended_by_us, ran) if one.siblings else "")
            self._answers.lost(one, batch, position, exitcode, not_counted, beside, self.ending)


def _served(slot: Slot) -> bool:
    """Whether a worker that has ended was ready for tasks before."""
    if slot.state is WorkerStates.CONDEMNED:
        return slot.reason is None  # else it was killed because it did not start
    return slot.state.serves


def _told_to_end(slot: Slot) -> bool:
    """Whether we have ended it, for what it did or did not do."""
    return slot.state is WorkerStates.CONDEMNED or slot.interrupted is not None


def _story(ended: list[Slot], exitcode: int | None) -> str:
    workers = " and ".join(f"worker {one.index}" for one in ended)
    died = f"{workers} (pid {ended[0].pid}), {exit_reason(exitcode)}"
    for one in ended:
        if one.protocol_error is not None:
            died += f", for it sent an invalid message ({one.protocol_error})"
    return died


def _start_failure(
    slot: Slot, attempts: int, exitcode: int | None
) -> WorkerStartFailed | StartFailure:
    """Say why a worker cannot be started."""
    cause = slot.reason
    if isinstance(cause, Refusal):
        return StartFailure(WorkerStartFailed(slot.index, attempts, cause.line), cause.pickled)
    if isinstance(cause, XPoolError):
        reason = str(cause)
    elif cause is not None:
        reason = f"{type(cause).__name__}: {cause}"
    else:
        reason = f"its process ended before it was ready, {exit_reason(exitcode)}"
        # It ended by itself, as one does that imports a script which makes a pool at its top.
        if exitcode is None or exitcode >= 0:
            reason += (
                "; look at its output on stderr. A script must keep its own work behind "
                'if __name__ == "__main__":'
            )
    error = WorkerStartFailed(slot.index, attempts, reason)
    error.__cause__ = cause
    return error


def _beside(slot: Slot, ended_by_us: Slot | None, ran: dict[Slot, str]) -> str:
    """Say what other threads of a worker's process have to do with its end; empty: nothing."""
    if ended_by_us is not None and ended_by_us is not slot:
        why = "sent an invalid message to its parent"
        if ended_by_us.protocol_error is None:
            task = ran.get(ended_by_us, "what it was given")
            why = f"ran {task}, which did not stop when its time was over or it was cancelled"
        other = f"worker {ended_by_us.index}, another thread of it,"
        return f"The pool ended the process, since {other} {why}."
    others = [f"worker {one.index} ran {task}" for one, task in ran.items() if one is not slot]
    if not others:
        return ""
    return f"In other threads of the process, {' and '.join(others)}: that may be what ended it."
