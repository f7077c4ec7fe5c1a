"""Starts the processes of workers, handles their ends, and replaces them.

A process has one worker, or several as threads (`WorkerProcess.workers`).  Siblings end together
and are settled together.  First the messages of all are received, since they share an attachment to
the arena.  Then the tasks of each are failed, retried or given to others.  Then one process is
started for all of them.

A start is decided under the engine's lock, carried out without it, and recorded under it again
(`Launch`), so no caller waits for a fork or for the start of a fork server.  If the pool ends or
shrinks meanwhile, the new process is told to end when it is recorded.

Called with the engine's lock held.
"""

import signal
from collections import deque
from typing import NamedTuple

from xpool._engine.answers import EngineOptions, StartFailure
from xpool._engine.jobs.scheduler import Batch
from xpool._engine.jobs.states import EndKind, RestartPolicy, WorkerStates
from xpool._engine.launch import Handle
from xpool._engine.ledger import WorkerEnd
from xpool._engine.memory import ArenaMaintenance, EngineParts
from xpool._engine.monitor import DirectReceive, WorkerMonitor
from xpool._engine.reactor import Alarms
from xpool._engine.switchboard import Switchboard
from xpool._engine.worker_process import Channel, WorkerProcess
from xpool._wire.wire import Refusal, boot_frame
from xpool.errors import (
    DeviceError,
    PoolBroken,
    WorkerStartFailed,
    XPoolError,
    exit_reason,
)

TERMINATE_GRACE_SECONDS = 0.3
"""Seconds between asking a worker to stop (SIGTERM) and stopping it (SIGKILL)."""


class End(NamedTuple):
    """How a process has ended, or that it could not be started."""

    kind: EndKind
    exitcode: int | None
    worker: WorkerProcess  # could not start, or stands for all of its process
    served: tuple[WorkerProcess, ...] = ()  # workers of the process that were ready
    story: str = ""  # for error texts: the workers, the pid, and why

    @classmethod
    def of(cls, worker: WorkerProcess) -> "End":
        """Return how the process of this worker and its siblings has ended."""
        handle, ended = worker.handle, worker.workers
        assert handle is not None
        exitcode, problem = handle.exitcode, handle.problem
        if problem is not None:
            worker.failed(problem)
        failed = next((one for one in ended if one.reason is not None), worker)
        served = tuple(one for one in ended if _served(one))
        if served:
            # STOPPED: the pool has killed it to stop a task.
            asked = any(
                _ended_by_us(one) and one.protocol_error is None and not one.remark for one in ended
            )
            kind, failed = (EndKind.STOPPED if asked else EndKind.DIED), worker
        elif worker.state is WorkerStates.RETIRING:
            kind, failed = EndKind.FINISHED, worker
        elif isinstance(problem, OSError):
            kind = EndKind.REFUSED
        elif failed.reason is None and exitcode in (-signal.SIGKILL, -signal.SIGTERM):
            # Killed by an operator, or because memory was short: the next one may start.
            kind = EndKind.KILLED
        else:
            kind = EndKind.FAILED
        names = " and ".join(f"worker {one.index}" for one in ended)
        story = f"{names} (pid {worker.pid}), {exit_reason(exitcode)}"
        for one in ended:
            if one.protocol_error is not None:
                story += f", after it sent an invalid message ({one.protocol_error})"
        return cls(kind, exitcode, failed, served, story)


class Launch:
    """The start of a process: decided and recorded under the engine's lock, run without it.

    ``worker`` represents all workers of the process.  ``attachment``: of the process, when it runs.
    """

    def __init__(self, worker: WorkerProcess, maintenance: ArenaMaintenance) -> None:
        self.worker, self._maintenance = worker, maintenance
        self.attachment: int | None = None

    def run(self) -> tuple[Handle, list[Channel], list[bytes]]:
        """Start the process; return it, with a channel and the first message for each worker.

        Called without the engine's lock.

        Raises:
            Exception: of any type, if it cannot be started; nothing is left over.
        """
        workers = self.worker.workers
        arena, self.attachment = self._maintenance.take_attachment()
        configs = [
            one.recipe.config(one.index, one.generation + 1, self.attachment) for one in workers
        ]
        return *self.worker.launch(arena), configs


class Replacement:
    """Keeps a process in every place, until the pool ends or the restart policy gives up."""

    def __init__(
        self,
        parts: EngineParts,
        direct: DirectReceive,
        monitor: WorkerMonitor,
        switchboard: Switchboard | None,
        *,
        options: EngineOptions,
    ) -> None:
        self.failure: XPoolError | StartFailure | None = None  # why the pool has stopped
        self.ending = False  # no more processes are started
        # Places whose next process the engine's thread starts after it has released the lock.
        self.due: deque[WorkerProcess] = deque()
        # With `EngineOptions.on_end`: the ends that the pool is not told yet, and the workers whose
        # place stays empty until it was.
        self.ends: deque[tuple[WorkerProcess, WorkerEnd]] = deque()
        self._untold: set[WorkerProcess] = set()
        self._tells = options.on_end is not None
        self._together = options.together  # the workers form one group, which ends when one dies
        self._switchboard = switchboard  # gives workers channels to each other
        self._workers, self._sched, self._reactor = parts.workers, parts.sched, parts.reactor
        self._maintenance, self._policy = parts.maintenance, parts.policy
        self._ledger, self._answers = parts.ledger, monitor.answers
        self._direct, self._monitor = direct, monitor
        direct.await_end = self._await_end
        reactor = parts.reactor
        self._kills = Alarms(reactor, lambda worker: worker.kill(), serving=False)
        self._restarts = Alarms(reactor, self.due.append, serving=False)

    # -- starting ----------------------------------------------------------------------------------

    def next_missing(self) -> Launch | None:
        """Decide to start a process in an empty place, if there is one."""
        for worker in self._workers[: self._sched.size]:
            # If pending, it starts after a pause.
            if worker.state is WorkerStates.ABSENT and not self._restarts.pending(worker):
                launch = self._decide(worker)
                if launch is not None:
                    return launch
        return None

    def start_later(self) -> None:
        """Let the engine's thread start processes in empty places, and try again if it cannot."""
        missing = self._workers[: self._sched.size]
        self.due.extend(worker for worker in missing if worker.state is WorkerStates.ABSENT)
        self._reactor.wake()

    def next_due(self) -> Launch | None:
        """Decide to start a process whose time has come, if there is one."""
        while self.due:
            worker = self.due.popleft()
            # A worker may be here twice.  If its first start was refused, it starts after a pause.
            if any(self._restarts.pending(one) for one in worker.workers):
                continue
            launch = self._decide(worker)
            if launch is not None:
                return launch
        return None

    def _decide(self, worker: WorkerProcess) -> Launch | None:
        # If not absent, a caller of `resize` has started it meanwhile.
        if self.ending or self._left_over(worker) or worker.state is not WorkerStates.ABSENT:
            return None
        if not self._untold.isdisjoint(worker.workers):
            return None  # `told` makes the place due later
        for one in worker.workers:
            one.launching()
        return Launch(worker, self._maintenance)

    def launched(
        self, launch: Launch, handle: Handle, channels: list[Channel], configs: list[bytes]
    ) -> None:
        """Record a started process; tell it if the pool has ended or shrunk meanwhile.

        Raises:
            OSError: the system cannot watch it; it is killed, and nothing is left over.
        """
        worker, workers = launch.worker, launch.worker.workers
        for one, channel in zip(workers, channels, strict=True):
            one.launched(handle, channel, launch.attachment if one is worker else None)
        try:
            self._await_end(worker)
            for one, config in zip(workers, configs, strict=True):
                self._monitor.started(one)
                if self._switchboard is not None:
                    self._switchboard.started(one)
                self._monitor.send(one, boot_frame(config))
        except BaseException:
            # Kill it: its end would not be seen.
            self._reactor.remove(handle.sentinel)
            for one in workers:
                one.kill()
                self._put_away(one, None)
            raise
        for one in workers:
            if self._monitor.stopped:
                self._stop(one, at_once=False)
            elif self.ending:
                self._monitor.retire(one)
            elif self._left_over(one):
                self._dismiss(one)

    def refused(self, launch: Launch, exc: BaseException, *, again: bool) -> None:
        """Record that a process could not be started; ``again``: try again after a pause."""
        worker = launch.worker
        if worker.state is WorkerStates.LAUNCHING:  # else `launched` has put the worker away
            self._maintenance.free_attachment(launch.attachment)
        for one in worker.workers:
            one.failed(exc if isinstance(exc, Exception) else None)
        if again and not self.ending and not self._left_over(worker):
            self._lost(End(EndKind.REFUSED, None, worker))
        # If the pool has ended meanwhile, no descriptor wakes its thread.
        self._reactor.wake()

    def _await_end(self, worker: WorkerProcess) -> None:
        assert worker.handle is not None
        self._reactor.add(worker.handle.sentinel, lambda fd: self._look_at_end(worker))

    def _lost(self, end: End) -> None:
        """Start another worker in a place that has lost its own, or fail the pool."""
        pause = self._policy.lost(end.worker.index, end.kind, self._reactor.now())
        if pause is None:
            self.ending = True
            self.failure = _failure(end, self._policy)
        elif pause:
            self._restarts.schedule_by(end.worker, self._reactor.now() + pause)
        else:
            self.due.append(end.worker)

    # -- ending ------------------------------------------------------------------------------------

    def resize(self) -> None:
        for worker in self._workers:
            if self._left_over(worker) and worker.state.may_retire:
                self._dismiss(worker)

    def _dismiss(self, worker: WorkerProcess) -> None:
        """Let a worker end after its running task; others get the tasks that it has not begun."""
        if worker.in_flight.size:
            self._monitor.recall(worker, worker.box.began)
        self._monitor.retire(worker)

    def _left_over(self, worker: WorkerProcess) -> bool:
        return worker.index >= self._sched.size

    def retire_all(self) -> None:
        """Let workers end when they have answered all tasks; no more will be submitted."""
        self.ending = True
        for worker in self._workers:
            if worker.state.may_retire:
                self._monitor.retire(worker)

    def terminate(self, at_once: bool = False) -> None:
        """Stop all workers: ask them first and kill them a moment later, or kill them at once."""
        self.ending = True
        self._monitor.clear()
        for worker in self._workers:
            # The pool's end calls this again; workers that were asked before have a timer.
            if worker.handle is not None and not self._kills.pending(worker):
                self._stop(worker, at_once)

    def _stop(self, worker: WorkerProcess, at_once: bool) -> None:
        assert worker.handle is not None
        if worker.state.may_retire:
            worker.retire()
        # None: the server has not forked it yet.
        if at_once or worker.pid is None:
            worker.kill()
        else:
            worker.handle.signal(signal.SIGTERM)
        self._kills.schedule_by(worker, self._reactor.now() + TERMINATE_GRACE_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether no process is left, none will start, and the pool was told of all ends."""
        gone = self.ending and all(one.state is WorkerStates.ABSENT for one in self._workers)
        # Read this last: another thread, which has failed to start a process, adds to it first.
        return gone and not self._untold

    def _look_at_end(self, worker: WorkerProcess) -> None:
        """Handle an event of the sentinel: a pid, or the end of the process."""
        handle = worker.handle
        if handle is None:
            return
        ended = list(worker.workers)
        if any(self._direct.postpone_exit(one) for one in ended):
            # The readable sentinel would wake the engine's thread repeatedly during the turn.
            self._reactor.remove(handle.sentinel)
            return
        try:
            if not handle.ended():
                return
        except ValueError as exc:
            self._monitor.distrust(worker, exc)
            return
        # Messages first, then the outbox: answers are in the order of the tasks.
        for one in ended:
            self._monitor.drain(one)
            if not self._monitor.stopped:
                # The worker is dead, so its `tail` is final, and all before it is complete.
                self._monitor.take_early(one, one.box.tail)
            self._check_page(one)
        # Compute this before `_settle`, which ends an interrupt, and before `_put_away`.
        end = End.of(worker)
        self._settle(ended, handle.exitcode)
        # Remove the sentinel before `_put_away` closes it.
        self._reactor.remove(handle.sentinel)
        for one in ended:
            self._put_away(one, end)
        if self.ending:
            return
        if end.kind not in (EndKind.FAILED, EndKind.KILLED, EndKind.REFUSED):
            for one in ended:
                self._policy.forget_failures(one.index)
        # A surplus worker is not replaced.
        if not self._left_over(worker):
            for one in end.served:
                self._ledger.died(one.index, end.story)
            if self._together and end.served:
                self.ending = True
                self.failure = DeviceError(
                    f"a worker of a replica group died: {end.story}. Such workers start and end "
                    "together, so the pool has stopped; make a new one"
                )
            else:
                self._lost(end)
        # The tasks of this worker wait again, and other workers may be idle.
        self._monitor.give_idle()

    def _check_page(self, worker: WorkerProcess) -> None:
        """Check that the values which a worker has left in shared memory are possible."""
        if worker.protocol_error is not None:
            self._answers.disown(worker, worker.protocol_error)
            return
        began, most = worker.box.began, worker.in_flight.answered + 1
        wrong = f"it reports {began} tasks begun, but at most {most} can be" if began > most else ""
        wrong = wrong or self._maintenance.damage(worker.attachment)
        if wrong:
            worker.found_wrong(wrong)

    def _put_away(self, worker: WorkerProcess, end: End | None) -> None:
        """Release a worker whose tasks are settled; ``end`` is None if it was not awaited."""
        self._note_end(worker, end)
        # Remove its descriptors from the reactor before `worker.ended` closes them.
        self._monitor.gone(worker)
        self._direct.gone(worker)
        if self._switchboard is not None:
            self._switchboard.ended(worker)
        attachment = worker.attachment
        worker.ended()
        # By now, the parent holds all blocks that the process has sent.
        self._maintenance.free_attachment(attachment)

    def end_unseen(self) -> None:
        """Kill and release the workers whose end the engine's thread cannot await."""
        self.ending = True  # `terminate` may have failed
        for worker in self._workers:
            if worker.handle is not None:
                self._note_end(worker, None)
                self._direct.abandon(worker)
                worker.ended(seen=False)

    def _note_end(self, worker: WorkerProcess, end: End | None) -> None:
        """Have the pool told how a process has ended."""
        pid = worker.pid
        # Without a pid, there was no process, or the server ended it before its first line.
        if not self._tells or pid is None:
            return
        exitcode, text = None, f"worker {worker.index} (pid {pid}), killed by the pool"
        if end is not None:
            exitcode, text = end.exitcode, end.story
        if worker.reason is not None:
            text += f": {_line(worker.reason)}"
        elif worker.remark:
            text += f". {worker.remark}"
        reason = self._reason(worker, end)
        self._untold.add(worker)
        self.ends.append((worker, WorkerEnd(worker.index, None, pid, exitcode, reason, text)))

    def _reason(self, worker: WorkerProcess, end: End | None) -> str:
        if end is None or self._monitor.stopped:
            return "terminated"
        if end.kind is EndKind.STOPPED:
            return "stopped"
        if end.kind is EndKind.DIED:
            return "died"
        if end.kind is not EndKind.FINISHED or worker.reason is not None:
            return "start failed"
        if end.exitcode:
            return "died"  # at its orderly end
        if self._left_over(worker):
            return "resized"
        return "closed" if self.ending else "recycled"

    def told(self, worker: WorkerProcess) -> None:
        """Start the next process in a place, because the pool was told of the last one's end."""
        self._untold.discard(worker)
        self.due.append(worker)  # `_decide` refuses a place that needs no process
        self._reactor.wake()

    def _settle(self, ended: list[WorkerProcess], exitcode: int | None) -> None:
        """Answer or retry the tasks that a process ran; other workers get the rest."""
        # Collect the tasks of all workers before answering: an error names what ran beside it.
        lost: dict[WorkerProcess, tuple[Batch, int]] = {}
        for one in ended:
            # All its answers are received, so at most the next task was running.
            answered = one.in_flight.answered
            # After an invalid message, its begun tasks have failed already.
            began = answered if one.protocol_error is not None else one.begun(answered)
            found = self._sched.gone(one.index, min(began, answered + 1))
            if found is not None:
                lost[one] = found
        describe = self._answers.describe
        ran = {one: describe(*batch.name(batch.first + k)) for one, (batch, k) in lost.items()}
        ended_by_us = next((one for one in ended if _ended_by_us(one)), None)
        short = self._monitor.guard.ran_out(ended, None if ended_by_us else exitcode)
        for one, (batch, position) in lost.items():
            not_counted = ended_by_us is not None and ended_by_us is not one
            beside = one.remark or short
            beside = beside or (_beside(one, ended_by_us, ran) if one.workers[1:] else "")
            self._answers.lost(
                one, batch, position, exitcode, not_counted, beside, self.ending, bool(short)
            )


def _served(worker: WorkerProcess) -> bool:
    """Whether a worker that has ended was ready for tasks before."""
    if worker.state is WorkerStates.CONDEMNED:
        return worker.reason is None  # otherwise it was killed because it did not start
    return worker.state.serves


def _ended_by_us(worker: WorkerProcess) -> bool:
    """Whether the pool has killed the worker, or asked it to stop its task."""
    return worker.state is WorkerStates.CONDEMNED or worker.interrupted is not None


def _failure(end: End, policy: RestartPolicy) -> XPoolError | StartFailure:
    """Return the error that says why the pool gives up."""
    if end.kind is EndKind.DIED:
        return PoolBroken(policy.deaths, policy.seconds(), end.story)
    worker, exitcode, attempts = end.worker, end.exitcode, policy.attempts(end.worker.index)
    cause = worker.reason
    if isinstance(cause, Refusal):
        return StartFailure(WorkerStartFailed(worker.index, attempts, cause.line), cause.pickled)
    if cause is not None:
        reason = _line(cause)
    else:
        reason = f"its process ended before it was ready, {exit_reason(exitcode)}"
        # The process ended itself: it may have imported a script with a pool at its top level.
        if exitcode is None or exitcode >= 0:
            reason += (
                "; look at its output on stderr. A script must keep its own work behind "
                'if __name__ == "__main__":'
            )
    error = WorkerStartFailed(worker.index, attempts, reason)
    error.__cause__ = cause
    return error


def _line(cause: Refusal | Exception) -> str:
    """Return the text of the cause for which a worker could not start."""
    if isinstance(cause, Refusal):
        return cause.line
    return str(cause) if isinstance(cause, XPoolError) else f"{type(cause).__name__}: {cause}"


def _beside(
    worker: WorkerProcess, ended_by_us: WorkerProcess | None, ran: dict[WorkerProcess, str]
) -> str:
    """Say how other threads of the process may have caused its end; empty: there are none."""
    if ended_by_us is not None and ended_by_us is not worker:
        why = "sent an invalid message to its parent"
        if ended_by_us.protocol_error is None:
            task = ran.get(ended_by_us, "its task")
            why = f"ran {task}, which did not stop when its time was over or it was cancelled"
        other = f"worker {ended_by_us.index}, another thread of it,"
        return f"The pool ended the process, because {other} {why}."
    others = [f"worker {one.index} ran {task}" for one, task in ran.items() if one is not worker]
    if not others:
        return ""
    return f"Other threads of the process may have ended it: {' and '.join(others)}."
