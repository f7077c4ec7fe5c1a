"""Time limits of a worker that was asked to stop, and of a worker that starts.

Called with the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Callable

from xpool._engine.answers import own_part
from xpool._engine.reactor import Alarms, Reactor
from xpool._engine.worker_process import WorkerProcess, processor_times
from xpool._wire.outbox import TASK_LINE
from xpool.errors import TaskTimeout

STOP_GRACE_SECONDS = 0.1
"""Seconds between asking a worker to stop and killing it."""

STARVED_SECONDS = 0.5
"""Seconds after which a worker that was asked to stop is killed, even if it got no processor."""


def is_starved(worker: WorkerProcess, now: float) -> bool:
    """Whether a worker has hardly run since it was asked to stop, so that it could not react."""
    when, ran_then, waited_then = worker.asked
    if now >= when + STARVED_SECONDS:
        return False
    ran, waited, is_runnable = processor_times(worker.pid)
    # The second condition is needed, because the system counts a wait only when it is over.
    return waited - waited_then > STOP_GRACE_SECONDS / 2 or (
        is_runnable and ran - ran_then < STOP_GRACE_SECONDS / 2
    )


class StartLimit:
    """Limits the seconds from a worker's first line until it is ready; None: no limit.

    ``condemn(worker)`` is called for a worker that has taken longer.
    """

    def __init__(
        self, reactor: Reactor, seconds: float | None, condemn: Callable[[WorkerProcess], None]
    ) -> None:
        self._reactor, self._seconds, self._condemn = reactor, seconds, condemn
        self._checks = Alarms(reactor, self._check)
        self._overdue = Alarms(reactor, self._kill)

    def started(self, worker: WorkerProcess) -> None:
        """Begin to check a worker whose process was started."""
        if self._seconds is not None:
            self._checks.schedule_by(worker, self._reactor.now() + self._seconds)

    def over(self, worker: WorkerProcess) -> None:
        """End the checks: the worker is ready, or its start has ended."""
        self._checks.cancel(worker)
        self._overdue.cancel(worker)

    def _check(self, worker: WorkerProcess) -> None:
        assert self._seconds is not None and worker.handle is not None
        since, now = worker.box.since, self._reactor.now()
        # If it has not reached its first line, the fork server or the system is still at work.
        if since is None or now < since + self._seconds:
            self._checks.schedule_by(worker, (now if since is None else since) + self._seconds)
        else:
            worker.ask_for_stack(now)
            self._overdue.schedule_by(worker, now + STOP_GRACE_SECONDS)

    def _kill(self, worker: WorkerProcess) -> None:
        assert self._seconds is not None
        stack, now = worker.box.stack(), self._reactor.now()
        # Without its last line, the stack may be half written.
        if TASK_LINE not in stack and is_starved(worker, now):
            self._overdue.schedule_by(worker, now + STOP_GRACE_SECONDS)
            return
        task = "The start of the worker, with its initializer,"
        # Record it first: the pool reads the reason when the process has ended.
        worker.failed(TaskTimeout(self._seconds, worker.index, worker.pid, task, own_part(stack)))
        self._condemn(worker)
