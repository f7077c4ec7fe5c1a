"""Decides when workers and tasks are started again, and when a pool gives up."""

from __future__ import annotations

import enum
from collections import deque

WINDOW = 60.0
"""Seconds for which a death counts."""

FIRST_RETRY_PAUSE = 0.05
"""Seconds between the first two tries of a task."""

LONGEST_RETRY_PAUSE = 5.0
"""The most seconds between two tries of a task."""

START_ATTEMPTS = 3
"""The pool gives up after this many consecutive failed starts in one place."""

SYSTEM_ATTEMPTS = 6
"""The pool gives up if the system refuses a process or thread more often than this in a row."""

KILLED_STARTS = 8
"""The pool gives up after this many starts in one place were killed.  It is more than
`START_ATTEMPTS`, because a kill says nothing about the next start."""


class EndKind(enum.Enum):
    """How a worker ended."""

    REFUSED = "the system refused its process or thread"
    FAILED = "it ended by itself before it was ready"
    KILLED = "it was killed before it was ready"
    FINISHED = "it was told to end"
    STOPPED = "the pool stopped it, because of its task"
    DIED = "it died after it was ready"


class RestartPolicy:
    """Decides when a place that has lost its worker, a process or a thread, gets the next one.

    The pool gives up when more than ``most`` workers have died within `WINDOW` seconds and no task
    was finished in between: each new worker would cost a process and achieve nothing.  A task that
    raises an exception is finished, too.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._deaths: deque[float] = deque()
        # Starts in each place since a worker was last ready there: those that failed or were
        # refused, and those that another program has killed.
        self._failures: dict[int, int] = {}
        self._killed: dict[int, int] = {}
        self.finished = False  # set when a task is finished; read after a death

    def forget_failures(self, place: int) -> None:
        """Forget the failed starts in a place: a worker is ready there, or was told to end."""
        self._failures.pop(place, None)
        self._killed.pop(place, None)

    def lost(self, place: int, kind: EndKind, now: float) -> float | None:
        """Record the end of a worker; return the seconds until the next start; None: give up."""
        if kind is EndKind.REFUSED:
            failures = self._failures[place] = self._failures.get(place, 0) + 1
            # Wait, because the system probably still lacks what it lacked.
            return None if failures > SYSTEM_ATTEMPTS else 0.05 * 2**failures
        if kind is EndKind.FAILED:
            failures = self._failures[place] = self._failures.get(place, 0) + 1
            return None if failures >= START_ATTEMPTS else 0.0
        if kind is EndKind.KILLED:
            killed = self._killed[place] = self._killed.get(place, 0) + 1
            if killed >= KILLED_STARTS:
                return None
            # No pause after the first kill, which may be an accident.
            return min(1.0, 0.05 * 2**killed) if killed > 1 else 0.0
        self.forget_failures(place)
        return None if kind is EndKind.DIED and self._is_one_too_many(now) else 0.0

    def _is_one_too_many(self, now: float) -> bool:
        deaths = self._deaths
        if self.finished:
            self.finished = False
            deaths.clear()
        while deaths and deaths[0] < now - WINDOW:
            deaths.popleft()
        deaths.append(now)
        return len(deaths) > self.most

    def attempts(self, place: int) -> int:
        """Return how many starts there were since a worker was last ready there."""
        return self._failures.get(place, 0) + self._killed.get(place, 0)

    @property
    def deaths(self) -> int:
        """The number of deaths in the last minute, without those before the last finished task."""
        return len(self._deaths)

    def seconds(self) -> float:
        """Return the seconds between the first and the last of these deaths."""
        return self._deaths[-1] - self._deaths[0]


def back_off(tries: int, chance: float) -> float:
    """Return the seconds to wait before a task is run again that has been run ``tries`` times.

    The pause doubles with each try.  ``chance`` (0 to 1) picks a value from its upper half, so that
    tasks that failed together do not run again together.
    """
    # No power above 30: a task may have thousands of retries.
    pause: float = min(LONGEST_RETRY_PAUSE, FIRST_RETRY_PAUSE * 2 ** min(tries - 1, 30))
    return pause * (0.5 + chance / 2)
