"""Where the time of an epoch goes: what `DataLoader.report` returns."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

HARDLY = 0.05
"""The share of an epoch that a program may wait for batches before the report gives advice."""

BUSY = 0.7
"""The share of their time that workers are busy from which the report advises more workers."""

SMALL = 0.001
"""Seconds: if a batch takes less time to make, the report advises larger batches."""


@dataclass(frozen=True)
class LoaderReport:
    """Where the time of the last epoch went, up to the last batch that was taken.

    Attributes:
        batches: number of batches that were taken.
        workers: number of workers; 0: the program makes the batches itself.
        seconds: from the beginning of the iteration to the last batch.
        waited: seconds in which the program waited for batches.
        made: seconds in which workers made these batches, of all workers together.
        collated: seconds of ``made`` in ``collate_fn``.
        ahead: number of batches that were ready, on average, when the program asked for one.
        advice: what to change, in a sentence.
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
        """Say what to change, in a sentence."""
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
    """The times of one epoch, as its batches are taken."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._begun = self._latest = time.perf_counter()
        self._batches = self._ahead = 0
        self._waited = self._made = self._collated = 0.0

    def took(self, asked: float, ahead: int, made: float, collated: float) -> None:
        """Note a batch: when it was asked for, how many were ready, and its seconds of work."""
        self._latest = time.perf_counter()
        self._batches += 1
        self._waited += self._latest - asked
        self._ahead += ahead
        self._made += made
        self._collated += collated

    def report(self) -> LoaderReport:
        return LoaderReport(
            batches=self._batches, workers=self._workers, seconds=self._latest - self._begun,
            waited=self._waited, made=self._made, collated=self._collated,
            ahead=self._ahead / max(1, self._batches),
        )  # fmt: skip
