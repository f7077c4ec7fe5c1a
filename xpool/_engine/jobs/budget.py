"""How often workers may die, or fail to start, and when to try again: pure, told of events."""

from __future__ import annotations

from collections import deque

__all__ = ["START_ATTEMPTS", "WINDOW", "RestartBudget", "Starts", "back_off"]

WINDOW = 60.0
"""Seconds after which a death is forgotten."""

# Seconds between two tries of a task: at first, and at most.
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0

START_ATTEMPTS = 3
"""Workers that may fail to start in one place, one after the other, before the pool gives up."""

SYSTEM_ATTEMPTS = 6
"""Times that the system may refuse to start a process, at intervals that grow to three seconds."""

KILLED_STARTS = 8
"""Workers that may be killed in one place while they start, at intervals that grow to a second.
More than may fail by themselves: a kill says little about the next one."""


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

    def seconds(self) -> float:
        """Return the seconds between the first and the last of these."""
        return self._deaths[-1] - self._deaths[0]


class Starts:
    """The attempts to start a worker, since the last that became ready."""

    def __init__(self) -> None:
        self.failures = 0  # those that failed by themselves
        self._killed = 0  # or were killed, by nobody knows whom

    def succeeded(self) -> None:
        """Note that it became ready."""
        self.failures = self._killed = 0

    def failed(self, killed: bool) -> float | None:
        """Note that a process ended before it was ready: how long to wait, None: it is hopeless.

        ``killed``: by an operator, the kernel short of memory, a test: the next may live.
        """
        if killed:
            self._killed += 1
        else:
            self.failures += 1
        if self.failures >= START_ATTEMPTS or self._killed >= KILLED_STARTS:
            return None
        # The first kill is taken for an accident: no pause.
        return min(1.0, 0.05 * 2**self._killed) if self._killed > 1 else 0.0

    def refused(self) -> float | None:
        """Note that there was no process: how long to wait, None: it is hopeless.

        Descriptors or memory were short, say: that may pass.
        """
        self.failures += 1
        # Never at once: what the system was short of a moment ago, it is short of now.
        return None if self.failures > SYSTEM_ATTEMPTS else 0.05 * 2**self.failures

    @property
    def attempts(self) -> int:
        """How many there were."""
        return self.failures + self._killed


def back_off(tries: int, chance: float) -> float:
    """Return the seconds to wait before a task is run again that has been run ``tries`` times.

    Doubled with each try, and drawn from the upper half (``chance``, from 0 to 1), so that tasks
    that failed together do not come back together.
    """
    # No power above 30: a task may have thousands of retries.
    pause: float = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(tries - 1, 30))
    return pause * (0.5 + chance / 2)
