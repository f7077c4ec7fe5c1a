"""Decides when a worker's task must stop, by the shared page and the scheduler's records; pure.

A worker is first asked to stop a task, and killed if it does not answer a moment later.  The page
says when the running task began, so the parent checks seldom: when a task that was sent just now
could exceed its limit.  It then finds a task over its limit, a task that will exceed its limit at a
known time, or neither.  If neither, no task can exceed its limit before another limit has passed.
So tasks that are far below their limit cost nothing here.

A worker can also be stuck outside of a task, where no clock runs: SIGSTOP may have stopped it, or
the finalizer of a result may hang.  The parent detects this as a standstill: for as long as a
limit, the worker has not read a message, begun an item or sent an answer.
"""

# No `from __future__ import annotations`: a NamedTuple would compile each type from its text.

import enum
from typing import Any, NamedTuple

from xpool._engine.jobs.scheduler import Batch, InFlight


class Act(enum.Enum):
    """What to do with a worker now."""

    NOTHING = "nothing"
    INTERRUPT = "ask it to break off an item"
    RECALL = "give what it has not begun to others"
    CONDEMN = "kill it"


class Verdict(NamedTuple):
    """Do ``act`` now (INTERRUPT: stop ``item``), and check again at ``when``; None: never."""

    act: Act
    item: int = 0
    when: float | None = None


class WorkerProgress(NamedTuple):
    """The progress of a worker, as far as the parent can see it."""

    began: int  # items that it has begun, ever
    since: float | None  # when it began its running item, if that has a limit
    pipes: Any  # changes with each byte that either pipe has carried


class Deadlines:
    """The deadlines of one process of a worker."""

    def __init__(self) -> None:
        # Its progress when it last changed outside of a timed item, and when that was.
        self._last_progress: tuple[Any, float] | None = None

    def judge(
        self, held: InFlight, running: tuple[Batch, int] | None, seen: WorkerProgress, now: float
    ) -> Verdict:
        """Return what to do with a worker that holds ``held`` and runs ``running``."""
        again: list[float] = []
        if running is not None:
            batch, position = running
            due = None
            # Its job is cancelled: it must stop now.
            if batch.withdrawn:
                due = now
            elif batch.terms.limit is not None and seen.since is not None:
                due = seen.since + batch.terms.limit.seconds
            if due is not None:
                if now >= due:
                    return Verdict(Act.INTERRUPT, batch.seq + position)
                again.append(due)
        # A worker without progress for as long as a limit is standing still.
        limits = [one.terms.limit.seconds for one in held.held if one.terms.limit is not None]
        if not limits:
            return Verdict(Act.NOTHING, when=min(again, default=None))
        # The earliest time at which an item that has not begun can exceed its limit.
        again.append(now + min(limits))
        # A running task with a running clock, or without a limit, is no standstill.
        if seen.since is not None or (running is not None and running[0].terms.limit is None):
            self._last_progress = None
            return Verdict(Act.NOTHING, when=min(again))
        verdict = self._standstill(held, running, seen, min(limits), now)
        if verdict.when is not None:
            again.append(verdict.when)
        return verdict._replace(when=min(again))

    def _standstill(
        self,
        held: InFlight,
        running: tuple[Batch, int] | None,
        seen: WorkerProgress,
        limit: float,
        now: float,
    ) -> Verdict:
        doing = seen.began, held.answered, seen.pipes
        if self._last_progress is None or self._last_progress[0] != doing:
            # No `when`: `judge` checks again when a limit has passed.
            self._last_progress = doing, now
            return Verdict(Act.NOTHING)
        since = self._last_progress[1]
        if now < since + limit:
            return Verdict(Act.NOTHING, when=since + limit)
        if running is not None and running[0].terms.limit is not None:
            # The running item may have used part of that time.  Its own limit may be longer than
            # those of the items behind it.
            over = since + 2 * running[0].terms.limit.seconds
            if now < over:
                return Verdict(Act.NOTHING, when=over)
            return Verdict(Act.INTERRUPT, running[0].seq + running[1])
        # None of its items has begun.  Recall them first, so that its death costs no task.
        return Verdict(Act.CONDEMN if held.paused else Act.RECALL)
