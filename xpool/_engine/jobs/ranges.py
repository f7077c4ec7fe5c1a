"""Task ranges hold waiting items.  Batches are cut from them and sent to workers.

`xpool._engine.jobs.scheduler` explains the terms.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from xpool._calls.terms import ONCE, Terms

CALLS = 0
"""The job that stands for all calls.  Each item is a call, and its index is the number of the
call's job, so consecutive calls are queued, sent and answered together like items of one job."""

WHOLE = -1
"""In place of an index: the text that names the function of a job, or "" if it is not known."""

Item = Any
"""A pickled payload, in any form that the channel takes."""


class TaskRange:
    """Consecutive waiting items of one job, all with the same terms.

    ``first``: the index of the leftmost item.  ``bound``: the only worker that may run them.
    """

    __slots__ = (
        "bound",
        "first",
        "flow",
        "func",
        "items",
        "job",
        "may_run",
        "queued",
        "terms",
    )  # fmt: skip

    def __init__(
        self,
        job: int,
        func: int,
        first: int,
        items: Iterable[Item],
        bound: int | None = None,
        terms: Terms = ONCE,
    ) -> None:
        self.job = job
        self.func = func
        self.first = first
        self.items: deque[Item] = deque(items)
        self.bound = bound
        self.terms = terms
        # True while it is in a queue of the scheduler.  An open range without items leaves the
        # queue, so that a slow iterable does not hold up other jobs.
        self.queued = False
        # The `FlowControl` of the input reader that appends to it; it is told how much was taken.
        self.flow: Any = None
        # Says whether items from an index on may run now.  Items of a `piece` were allowed before.
        self.may_run: Callable[[int], bool] | None = None

    def beside(self, first: int, items: Iterable[Item] = (), bound: int | None = None) -> TaskRange:
        """Return a range with other items of the same job and the same options."""
        other = TaskRange(self.job, self.func, first, items, bound, self.terms)
        other.flow, other.may_run = self.flow, self.may_run
        return other


class Batch:
    """Items that one worker has, usually a part of a task range.  `Scheduler.give` makes it."""

    job: int
    func: int
    first: int
    items: list[Item]
    terms: Terms
    bound: int | None = None
    flow: Any = None
    # The number of items that the worker got before.
    seq: int
    # Items from this position on were taken back: the worker will answer them as skipped.
    taken: int
    done = 0
    # Its job has ended: none of its items is queued again.
    withdrawn = False

    def name(self, index: int) -> tuple[int, int]:
        """Return an item's job and index in the pool's numbers; for a call, its number and 0."""
        # As `name_of`, without a function call: each answer to a single call comes this way.
        return (index, 0) if self.job == CALLS else (self.job, index)

    def cut(self, start: int, stop: int) -> Batch:
        """Return a part of this batch as a separate batch of the same worker."""
        part = Batch()
        vars(part).update(vars(self))
        part.first, part.seq = self.first + start, self.seq + start
        part.items = self.items[start:stop]
        part.done = min(max(self.done - start, 0), stop - start)
        part.taken = min(max(self.taken - start, 0), stop - start)
        return part


# The result has no flow control, which was told of these items when they were first sent.
def piece(one: Batch | TaskRange, start: int, stop: int) -> TaskRange:
    """Return some items of a batch or a range as a range of their own."""
    items = itertools.islice(one.items, start, stop)
    return TaskRange(one.job, one.func, one.first + start, items, one.bound, one.terms)


def name_of(job: int, index: int) -> tuple[int, int]:
    """Return an item's job and index in the pool's numbers; for a call, its number and 0."""
    return (index, 0) if job == CALLS else (job, index)


def covers(part: Batch | TaskRange, job: int, index: int | None) -> bool:
    """Whether a range or batch has unanswered items of a job, or the item ``index``."""
    if part.job != job or index is None:
        return part.job == job
    # Answered items of a batch are no longer in flight.
    first = part.first + part.done if isinstance(part, Batch) else part.first
    return first <= index < part.first + len(part.items)
