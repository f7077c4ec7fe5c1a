"""Decides how many workers a loader with ``num_workers="auto"`` has."""

from __future__ import annotations

import math

WAITS = 0.05
"""If the program waits for more than this share of the time, the loader gets more workers."""

HALF = 0.5
"""It gets no more workers if those that it has are busy for less than this share of the time.  They
may still be starting, or the program waits for something else."""

CALM = 0.01
"""If the program waits for less than this share of the time, the loader may get fewer workers."""

ENOUGH = 0.7
"""Fewer workers are enough if they would be busy for at most this share of the time."""

BATCHES = 8
"""The loader decides after this many batches for each worker, or more."""

SECONDS = 0.2
"""The loader decides after these seconds, or more."""


class WorkerCount:
    """Decides from the times of batches how many workers a loader needs.

    It compares the time that a worker needs for a batch with the time that the program needs for
    one.  It waits for several calm decisions before it takes a worker away.  If the program then
    has to wait, the worker comes back, and the next time twice as many decisions must be calm.
    """

    def __init__(self, most: int, ahead: int) -> None:
        self.size, self._most, self._ahead = 1, most, ahead
        self._calm, self._patience = 0, 2  # in decisions
        self._has_shrunk = False
        self.begin(0)

    def begin(self, new: int) -> None:
        """Begin to measure, after the first batches of this many workers: the program waits for the
        start of new workers, too."""
        self._skip, self._batches = self._ahead * new, 0
        self._used = self._waited = self._made = 0.0

    def refused(self, size: int) -> None:
        """Have at most this many workers, because the system refuses more of them."""
        self.size = self._most = size

    def took(self, used: float, waited: float, made: float) -> int:
        """Record a batch that the program took; return how many workers the loader shall have.

        Args:
            used: seconds from the batch before until the program asked for this one.
            waited: seconds that the program then waited.
            made: seconds that a worker took to make it.
        """
        if self._skip:
            self._skip -= 1
            return self.size
        self._batches += 1
        self._used, self._waited, self._made = (
            self._used + used, self._waited + waited, self._made + made,
        )  # fmt: skip
        seconds = self._used + self._waited
        if self._batches >= BATCHES * self.size and seconds >= SECONDS:
            size = self._decide(seconds)
            # The next batches were requested from as many workers as before.
            self.begin(max(size, self.size) if size != self.size else 0)
            self.size = size
        return self.size

    def _decide(self, seconds: float) -> int:
        """Return the new number of workers, after these seconds."""
        waits = self._waited / seconds
        if waits > WAITS:
            self._calm = 0
            if self._made < HALF * self.size * seconds:
                return self.size
            if self._has_shrunk:
                self._has_shrunk = False
                self._patience *= 2
            # So many workers make a batch in the time in which the program uses one.
            wanted = math.ceil(min(self._most, self._made / max(self._used, 1e-9)))
            return min(self._most, max(self.size + 1, min(2 * self.size, wanted)))
        if waits > CALM or self._made > ENOUGH * (self.size - 1) * self._used:
            self._calm = 0
            return self.size
        self._calm += 1
        if self.size == 1 or self._calm < self._patience:
            return self.size
        self._calm, self._has_shrunk = 0, True
        return self.size - 1
