"""A caller that waits for one answer receives it himself.

That saves the turn of the engine's thread: two context switches of the three that an answer costs
beyond the pipe itself.  The worker's pipe is muted for the engine's thread meanwhile, and stays so
while the worker is idle, since nothing is expected from it.  Before such a worker gets a task, its
pipe is polled: what a task has written there unasked must not be read as the next answer.  What
must be seen at any time, its death, comes by the sentinel, and is the engine's thread's to see.

Called with the engine's lock held.
"""

from __future__ import annotations

import threading

from xpool._engine.jobs.states import WorkerStates
from xpool._engine.reactor import Reactor
from xpool._engine.worker import WorkerProcess

__all__ = ["DirectReceive"]


class _Turn:
    """A caller's turn at a worker's pipe."""

    __slots__ = ("exit_pending", "thread", "worker")

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.thread = 0
        self.exit_pending = False  # the sentinel has news that wait for the end of the turn


class DirectReceive:
    """Which caller receives from which worker."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        # Guarded by the engine's lock, but for a look of `Submission.call` into `turns`.
        self.turns: dict[int, _Turn] = {}  # by job
        self._jobs: dict[int, int] = {}  # by worker
        self.muted: set[int] = set()  # workers whose pipe does not wake the engine's thread

    def __contains__(self, worker: WorkerProcess) -> bool:
        return worker.index in self._jobs

    def begin(self, worker: WorkerProcess, job: int) -> None:
        """The answer of this job, which the worker is given now, is for the calling thread."""
        # As a rule it is muted still, since the last caller's turn: that saves a system call.
        if worker.index not in self.muted:
            self._mute(worker, True)
        turn = self.turns[job] = _Turn(worker)
        turn.thread = threading.get_ident()
        self._jobs[worker.index] = job

    def worker_of(self, job: int) -> WorkerProcess | None:
        """Return the worker from which a job's caller receives, None: he does not (any more)."""
        turn = self.turns.get(job)
        return None if turn is None else turn.worker

    def given(self, worker: WorkerProcess) -> None:
        """The worker gets a task: its answer is for the engine's thread, if for nobody else."""
        if worker.index in self.muted and worker.index not in self._jobs:
            self._mute(worker, False)

    def end(self, job: int) -> WorkerProcess | None:
        """The caller polls no more; return his worker if its end was left for then to look at."""
        turn = self.turns.pop(job, None)
        if turn is None:
            return None
        worker = turn.worker
        del self._jobs[worker.index]
        in_flight = worker.in_flight
        if in_flight.sent > in_flight.answered or worker.state is not WorkerStates.READY:
            # What else it holds is for the engine's thread again.
            self._mute(worker, False)
        return worker if turn.exit_pending else None

    def of_this_thread(self) -> list[int]:
        """Return the jobs for which the calling thread polls already.

        It does when it is in a signal handler that has come into its wait; what it was waiting for,
        and what the handler will wait for, are then the engine's thread's to receive.
        """
        me = threading.get_ident()
        return [job for job, turn in self.turns.items() if turn.thread == me]

    def postpone_exit(self, worker: WorkerProcess) -> bool:
        """Whether a caller polls this worker's descriptors; its end is looked at when he has let
        go, which is at once, since he sees it too.  Until then they must stay open."""
        job = self._jobs.get(worker.index)
        if job is None:
            return False
        self.turns[job].exit_pending = True
        return True

    def gone(self, worker: WorkerProcess) -> None:
        """The worker's process has ended."""
        # The next process of this worker begins with a pipe that is heard.
        self.muted.discard(worker.index)

    def _mute(self, worker: WorkerProcess, muted: bool) -> None:
        # A pipe that has ended is out of the reactor already, and says no more.
        if (worker.index in self.muted) != muted and worker.reader.fd in self._reactor:
            self._reactor.mute(worker.reader.fd, muted)
            (self.muted.add if muted else self.muted.discard)(worker.index)
