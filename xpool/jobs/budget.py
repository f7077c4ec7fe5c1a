"""How often workers may die while nothing gets done: pure, told of events and of the time."""

from __future__ import annotations

from collections import deque

__all__ = ["WINDOW", "RestartBudget", "back_off"]

WINDOW = 60.0
"""Seconds after which a death is forgotten."""

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0


class RestartBudget:
    """Counts the deaths of workers since a task was finished.

    A pool whose workers die and die, and none of whose tasks comes to an end, is of no use to
    anyone and costs a process each time: when ``most`` have died so within `WINDOW` seconds, the
    budget is used up.  A task that ends in an exception is finished, too.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Set by whoever takes an answer; looked at when the next worker dies.
        self.finished = False
        self._deaths: deque[float] = deque()

    def death(self, now: float) -> bool:
        """Note that a worker died; return whether that was one too many."""
        deaths = self._deaths
        if self.finished:
            self.finished = False
            deaths.clear()
        while deaths and deaths[0] < now - WINDOW:
            deaths.popleft()
        deaths.append(now)
        return len(deaths) > self.most

    @property
    def deaths(self) -> int:
        """How many have died since a task was finished, this minute."""
        return len(self._deaths)

    def task_range(self) -> float:
        """Return the seconds between the first and the last of these."""
        return self._deaths[-1] - self._deaths[0]


def back_off(tries: int, chance: float) -> float:
    """Return the seconds to wait before a task is run again that has been run ``tries`` times.

    Doubled with each try, and drawn from the upper half (``chance``, from 0 to 1), so that tasks
    that failed together do not come back together.
    """
    pause: float = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tries - 1, 30))
    return pause * (0.5 + chance / 2)
