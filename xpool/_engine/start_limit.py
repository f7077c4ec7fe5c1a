"""How long a worker has that was asked to stop, and one that starts.

Called with the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Callable

from xpool._engine.answers import own_part
from xpool._engine.reactor import Alarms, Reactor
from xpool._engine.worker import WorkerProcess
from xpool.errors import TaskTimeout

__all__ = ["STOP_GRACE_SECONDS", "StartLimit", "is_starved"]

STOP_GRACE_SECONDS = 0.1
"""Seconds between asking a worker to break off what it does and killing it."""

STARVED_SECONDS = 0.5
"""Seconds after which a worker is killed that was asked, though it has waited for a processor."""


def is_starved(worker: WorkerProcess, now: float) -> bool:
    """Whether a worker that was asked has hardly run since: it could not even answer."""
    when, ran_then, waited_then = worker.asked
    if now >= when + STARVED_SECONDS:
        return False
    ran, waited, is_runnable = worker.processor()
    # The second: the first wait may go on still, and is not counted then.
    return waited - waited_then > STOP_GRACE_SECONDS / 2 or (
        is_runnable and ran - ran_then < STOP_GRACE_SECONDS / 2
    )


class StartLimit:
    """Seconds that a worker may take from its first line until it is ready; None: any time.

    ``condemn(worker)`` is called with a worker that has taken longer.
    """

    def __init__(
        self, reactor: Reactor, seconds: float | None, condemn: Callable[[WorkerProcess], None]
    ) -> None:
        self._reactor, self._seconds, self._condemn = reactor, seconds, condemn
        self._checks = Alarms(reactor, self._check)
        self._overdue = Alarms(reactor, self._kill)

    def started(self, worker: WorkerProcess) -> None:
        """A process was started."""
        if self._seconds is not None:
            self._checks.schedule_by(worker, self._reactor.now() + self._seconds)

    def over(self, worker: WorkerProcess) -> None:
        """It is ready, or starts no more."""
        self._checks.cancel(worker)
        self._overdue.cancel(worker)

    def _check(self, worker: WorkerProcess) -> None:
        assert self._seconds is not None and worker.handle is not None
        since, now = worker.box.since, self._reactor.now()
        # Not at its first line yet: the time until then is the fork server's, or the system's.
        if since is None or now < since + self._seconds:
            self._checks.schedule_by(worker, (now if since is None else since) + self._seconds)
        else:
            worker.ask_for_stack(now)
            self._overdue.schedule_by(worker, now + STOP_GRACE_SECONDS)

    def _kill(self, worker: WorkerProcess) -> None:
        assert self._seconds is not None
        stack, now = own_part(worker.box.stack()), self._reactor.now()
        if not stack and is_starved(worker, now):
            self._overdue.schedule_by(worker, now + STOP_GRACE_SECONDS)
            return
        task = "The start of the worker, with its initializer,"
        # Said first: the pool asks for it when the process has ended.
        worker.failed(TaskTimeout(self._seconds, worker.index, worker.pid, task, stack))
        self._condemn(worker)
