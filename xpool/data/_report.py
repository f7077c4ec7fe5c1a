"""`LoaderReport`, which `DataLoader.report` returns: where the time of an epoch went."""

from __future__ import annotations

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
        self.workers = workers  # the number of them now
        self._begun = self._latest = time.perf_counter()
        self._batches = self._ahead = 0
        self._waited = self._made = self._collated = 0.0

    def took(self, asked: float, ahead: int, made: float, collated: float) -> tuple[float, float]:
        """Record a batch that the program has taken.

        The program asked for it at the time ``asked``, when ``ahead`` batches were ready.  Return
        the seconds from the batch before to ``asked``, and the seconds that the program waited.
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
