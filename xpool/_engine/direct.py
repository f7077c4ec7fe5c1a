"""A caller that waits for one answer receives it in its own thread.

This saves two of the three context switches of an answer.  Meanwhile the pipe is muted: it does not
wake the engine's thread.  It stays muted while the worker is idle, because an idle worker sends
nothing.  A muted pipe is polled before its worker gets a task; otherwise, data that a task wrote
there would be read as the next answer.  The sentinel reports a death to the engine's thread.

Called with the engine's lock held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from xpool._engine.jobs.states import WorkerStates
from xpool._engine.reactor import Reactor
from xpool._engine.worker_process import WorkerProcess


class DirectReceive:
    """Which caller receives from which worker."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        # Guarded by the engine's lock, except when `Submission.call` reads `turns`.
        self.turns: dict[int, tuple[WorkerProcess, int]] = {}  # by job: its worker, its thread
        self._jobs: dict[int, int] = {}  # by worker
        self.muted: set[int] = set()  # workers whose pipe does not wake the engine's thread
        self._ended: set[int] = set()  # workers whose sentinel's event is handled after the turn
        self.await_end: Callable[[WorkerProcess], object]  # listens to a sentinel: `Replacement`'s

    def __contains__(self, worker: WorkerProcess) -> bool:
        return worker.index in self._jobs

    def begin(self, worker: WorkerProcess, job: int) -> None:
        """Begin a turn: the calling thread receives the answer of this job."""
        # Usually the pipe is still muted from the last turn, so no system call is needed.
        if worker.index not in self.muted:
            self._mute(worker, True)
        self.turns[job] = worker, threading.get_ident()
        self._jobs[worker.index] = job

    def received_last(self, idle: dict[int, None]) -> bool:
        """Whether a caller has received the answer of the worker that became idle last.

        Then the program probably waits for each answer, and this worker polls for the next call.
        """
        return bool(idle) and next(reversed(idle)) in self.muted

    def worker_of(self, job: int) -> WorkerProcess | None:
        """Return the worker from which a job's caller receives; None: its turn is over."""
        turn = self.turns.get(job)
        return None if turn is None else turn[0]

    def given(self, worker: WorkerProcess) -> None:
        """Unmute a worker that gets a task, unless a caller receives from it."""
        if worker.index in self.muted and worker.index not in self._jobs:
            self._mute(worker, False)

    def end(self, job: int) -> None:
        """End the turn of the caller that receives the answer of this job, if it is not over."""
        turn = self.turns.pop(job, None)
        if turn is None:
            return
        worker = turn[0]
        del self._jobs[worker.index]
        in_flight = worker.in_flight
        if in_flight.sent > in_flight.answered or worker.state is not WorkerStates.READY:
            # The engine's thread receives the worker's other answers.
            self._mute(worker, False)
        if worker.index in self._ended:
            self._ended.remove(worker.index)
            self.await_end(worker)

    def of_this_thread(self) -> list[int]:
        """Return the jobs for which the calling thread polls already.

        There are some if this thread runs a signal handler that has interrupted its wait.  Then the
        engine's thread must receive the answers for the wait and for the handler.
        """
        me = threading.get_ident()
        return [job for job, (_, thread) in self.turns.items() if thread == me]

    def postpone_exit(self, worker: WorkerProcess) -> bool:
        """Return whether a caller polls this worker's descriptors, so that they must stay open.  If
        so, the worker's end is handled after the turn, which ends when the caller sees the end."""
        if worker not in self:
            return False
        self._ended.add(worker.index)
        return True

    def gone(self, worker: WorkerProcess) -> None:
        """Forget a process that has ended: the pipe of the next one is not muted."""
        self.muted.discard(worker.index)

    def _mute(self, worker: WorkerProcess, muted: bool) -> None:
        # The reactor removes a pipe that has reached its end, and ends with the engine's thread.
        there = not self._reactor.closed and worker.reader.fd in self._reactor
        if (worker.index in self.muted) != muted and there:
            self._reactor.mute(worker.reader.fd, muted)
            (self.muted.add if muted else self.muted.discard)(worker.index)
