"""When what a worker does must end: a pure judgement of what the shared page and the books say.

A worker that must break something off is asked first, and killed when it has not said a word a
moment later.  When it is looked at is the parent's choice: the page says when the task was begun.
At the time at which a task given now could be over its limit, the parent looks, and finds either a
task that is over, or one that will be at a known time, or none; in the last case nothing can be
over before another limit has passed.  So tasks that are far below their limit cost nothing here.

A worker that is stuck outside of any task has no running clock: it is stopped by SIGSTOP, say, or
an object that it let go of hangs in its finalizer.  Such a one is known by its standing still: for
as long as a limit it has not done what is no task and takes no time, read what it was sent, begin
it, or send an answer.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import enum
from typing import Any, NamedTuple

from xpool._engine.jobs.scheduler import Batch, InFlight

__all__ = ["Act", "Deadlines", "Seen", "Verdict"]


class Act(enum.Enum):
    """What is to be done with a worker now."""

    NOTHING = "nothing"
    INTERRUPT = "ask it to break off an item"
    RECALL = "give what it has not begun to others"
    CONDEMN = "kill it"


class Verdict(NamedTuple):
    """``act`` now, of an INTERRUPT for ``item``; and look again at ``when``, None: never."""

    act: Act
    item: int = 0
    when: float | None = None


class Seen(NamedTuple):
    """What can be seen of a worker from outside."""

    began: int  # items that it has begun, ever
    since: float | None  # when it began what it does now, where that is timed
    pipes: Any  # how far both pipes have come: another value whenever they have


class Deadlines:
    """The deadlines of one process of a worker."""

    def __init__(self) -> None:
        # What it had come to when it was last seen to do something without a clock, and when.
        self._last_progress: tuple[Any, float] | None = None

    def judge(
        self, held: InFlight, running: tuple[Batch, int] | None, seen: Seen, now: float
    ) -> Verdict:
        """Say what is to be done with a worker that holds this, and runs that (None: nothing)."""
        again: list[float] = []
        if running is not None:
            batch, position = running
            due = None
            # Its job is cancelled: that needs no clock.
            if batch.withdrawn:
                due = now
            elif batch.limit is not None and seen.since is not None:
                due = seen.since + batch.limit.seconds
            if due is not None:
                if now >= due:
                    return Verdict(Act.INTERRUPT, batch.seq + position)
                again.append(due)
        # Only a limit says how long a standstill may last.
        limits = [batch.limit.seconds for batch in held.held if batch.limit is not None]
        if not limits:
            return Verdict(Act.NOTHING, when=min(again, default=None))
        # The soonest that one can be over its time which is not begun yet.
        again.append(now + min(limits))
        # It is in a task whose clock runs, or that may take any time: that is no standstill.
        if seen.since is not None or (running is not None and running[0].limit is None):
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
        seen: Seen,
        limit: float,
        now: float,
    ) -> Verdict:
        doing = seen.began, held.answered, seen.pipes
        if self._last_progress is None or self._last_progress[0] != doing:
            # No time to look again: `judge` has one, when a limit has passed.
            self._last_progress = doing, now
            return Verdict(Act.NOTHING)
        since = self._last_progress[1]
        if now < since + limit:
            return Verdict(Act.NOTHING, when=since + limit)
        if running is not None and running[0].limit is not None:
            # It may have run for some of that time, but only once, and not as long as its own
            # limit, which may be longer than that of what waits behind it.
            over = since + 2 * running[0].limit.seconds
            if now < over:
                return Verdict(Act.NOTHING, when=over)
            return Verdict(Act.INTERRUPT, running[0].seq + running[1])
        # Nothing of what it holds is begun.  Others get it first: then its death costs no task.
        return Verdict(Act.CONDEMN if held.paused else Act.RECALL)
