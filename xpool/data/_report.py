"""The times of an epoch's batches: `DataLoader.report`, and the decisions of num_workers="auto"."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

HARDLY = 0.05
"""If the program waits for less than this share of an epoch, the report advises no change."""

BUSY = 0.7
"""If workers are busy for more than this share of an epoch, the report advises more of them."""

SMALL = 0.001
"""If making a batch takes less than these seconds, the report advises larger batches."""


@dataclass(frozen=True)
class LoaderReport:
    """Where the time of the last epoch went, up to the last batch that the program took.

    Attributes:
        batches: number of batches that the program took.
        workers: number of workers at the end; 0: the program makes the batches itself.
        seconds: seconds from the beginning of the iteration to the last batch.
        waited: seconds that the program waited for batches.
        made: seconds that all workers together took to make these batches.
        collated: the part of ``made`` that ``collate_fn`` took.
        ahead: average number of batches that were ready when the program asked for one.
        advice: one sentence that says what to change.
    """

    batches: int
    workers: int
    seconds: float
    waited: float
    made: float
    collated: float
    ahead: float

    @property
    def advice(self) -> str:
        """One sentence that says what to change."""
        if not self.batches:
            return "No batch was taken yet."
        if self.waited < HARDLY * self.seconds:
            return "The program hardly waits for batches: leave the loader as it is."
        if not self.workers:
            return "The program makes its batches itself: give num_workers=."
        if self.collated > self.made / 2:
            return "Most of the workers' time goes to collate_fn: make that cheaper."
        if self.made / self.batches < SMALL:
            return "A batch takes less than a millisecond to make: use larger ones."
        if self.made > BUSY * self.workers * self.seconds:
            processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
            if self.workers < (processors or os.cpu_count() or 1):
                return "The workers are always busy: use more of them."
            return "The workers are busy on all processors: do less for each item."
        return (
            "The program waits though workers are idle, as some batches take much longer: give a "
            "larger prefetch_factor, or in_order=False."
        )

    def __str__(self) -> str:
        return (
            f"{self.batches} batches in {self.seconds:.2f} s, of which the program waited "
            f"{self.waited:.2f} s; {self.workers} workers worked {self.made:.2f} s, "
            f"{self.collated:.2f} s of it in collate_fn; {self.ahead:.1f} batches were ready when "
            f"one was asked for. {self.advice}"
        )


class Times:
    """The times of one epoch, measured while the program takes its batches."""

    def __init__(self, workers: int) -> None:
        self.workers = workers  # the number of workers now
        self._begun = self._latest = time.perf_counter()
        self._batches = self._ahead = 0
        self._waited = self._made = self._collated = 0.0

    def took(self, asked: float, ahead: int, made: float, collated: float) -> tuple[float, float]:
        """Record a batch that the program has taken.

        The program asked for this batch at the time ``asked``; ``ahead`` batches were ready then.
        Return the seconds from the batch before to ``asked``, and the seconds that the program
        waited.
        """
        now = time.perf_counter()
        used, waited, self._latest = asked - self._latest, now - asked, now
        self._batches += 1
        self._waited += waited
        self._ahead += ahead
        self._made += made
        self._collated += collated
        return used, waited

    def report(self) -> LoaderReport:
        return LoaderReport(
            batches=self._batches, workers=self.workers, seconds=self._latest - self._begun,
            waited=self._waited, made=self._made, collated=self._collated,
            ahead=self._ahead / max(1, self._batches),
        )  # fmt: skip


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
        self._calm, self._patience = 0, 2  # both counted in decisions
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

        ``used``, ``waited``: what `Times.took` returned; ``made``: seconds that a worker took.
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
            # With this number of workers, making a batch takes as long as the program uses one.
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
