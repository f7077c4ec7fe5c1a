"""Task ranges, which wait, and batches, which are cut from them and sent to workers.

`xpool._engine.jobs.scheduler` explains the terms.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["CALLS", "Batch", "Item", "Limit", "Past", "TaskRange", "covers", "name_of", "piece"]

CALLS = 0
"""The job that stands for all calls.  Each item is a call, and its index is the number of the
call's job, so consecutive calls are queued, sent and answered together like items of one job."""

Item = Any
"""A payload as the channel takes it: bytes."""


class Limit(NamedTuple):
    """How many seconds an item may run, and whether it is retried when it exceeds them."""

    seconds: float
    again: bool = False


class Past(NamedTuple):
    """How often an item was tried, and how many workers it killed."""

    tries: int = 0
    killed: int = 0


_NEW = Past()


class TaskRange:
    """Consecutive waiting items of one job.  ``first`` is the index of the leftmost.

    ``limit``: how long each may run, None: without limit; used by the engine only.
    """

    __slots__ = (
        "bound",
        "first",
        "func",
        "input_reader",
        "items",
        "job",
        "limit",
        "may_run",
        "past",
        "queued",
        "retries",
    )  # fmt: skip

    def __init__(
        self,
        job: int,
        func: int,
        first: int,
        items: Iterable[Item],
        retries: int = 0,
        bound: int | None = None,
        limit: Limit | None = None,
        past: Past = _NEW,
    ) -> None:
        self.job = job
        self.func = func
        self.first = first
        self.items: deque[Item] = deque(items)
        self.retries = retries
        self.bound = bound
        self.limit = limit
        self.past = past
        # True while it is in a queue of the scheduler.  An open range without items leaves the
        # queue, so that a slow iterable does not hold up other jobs.
        self.queued = False
        # Appends to it, and is told how much was taken; used by the engine only.
        self.input_reader: Any = None
        # Says whether items from an index on may run now.  Items of a `piece` were allowed before.
        self.may_run: Callable[[int], bool] | None = None

    def beside(
        self, first: int, items: Iterable[Item] = (), bound: int | None = None
    ) -> "TaskRange":
        """Return a range with other items of the same job and the same options."""
        other = TaskRange(self.job, self.func, first, items, self.retries, bound, self.limit)
        other.input_reader, other.may_run = self.input_reader, self.may_run
        return other


class Batch:
    """A part of a task range that one worker has.  ``seq``: how many items it got before."""

    __slots__ = (
        "bound",
        "done",
        "first",
        "func",
        "input_reader",
        "items",
        "job",
        "limit",
        "past",
        "retries",
        "seq",
        "taken",
        "withdrawn",
    )  # fmt: skip

    def __init__(self, task_range: TaskRange, items: list[Item], seq: int) -> None:
        self.job = task_range.job
        self.func = task_range.func
        self.first = task_range.first
        self.items = items
        self.retries = task_range.retries
        self.bound = task_range.bound
        self.input_reader = task_range.input_reader
        self.limit = task_range.limit
        self.past = task_range.past
        # Its job has ended: none of its items is queued again.
        self.withdrawn = False
        self.seq = seq
        self.done = 0
        # Items from this position on were taken back: the worker will answer them as skipped.
        self.taken = len(items)

    def name(self, index: int) -> tuple[int, int]:
        """Return job and index of an item as the pool knows them: of a call, its number and 0."""
        # As `name_of`, without a function call: each answer to a single call comes this way.
        return (index, 0) if self.job == CALLS else (self.job, index)

    def cut(self, start: int, stop: int) -> "Batch":
        """Return a part of it as a batch of its own, which the worker has got."""
        part = Batch(piece(self, start, stop), self.items[start:stop], self.seq + start)
        part.input_reader, part.withdrawn = self.input_reader, self.withdrawn
        part.done = min(max(self.done - start, 0), stop - start)
        part.taken = min(max(self.taken - start, 0), stop - start)
        return part


# Without the input reader, which was told of these items when they were first sent.
def piece(one: Batch | TaskRange, start: int, stop: int) -> "TaskRange":
    """Return some items of a batch or a range as a range of their own."""
    items = itertools.islice(one.items, start, stop)
    return TaskRange(
        one.job, one.func, one.first + start, items, one.retries, one.bound, one.limit, one.past
    )


def name_of(job: int, index: int) -> tuple[int, int]:
    """Return job and index of an item as the pool knows them: of a call, its number and 0."""
    return (index, 0) if job == CALLS else (job, index)


def covers(part: Batch | TaskRange, job: int, index: int | None) -> bool:
    """Whether a range or batch has unanswered items of a job, or the item ``index``."""
    if part.job != job or index is None:
        return part.job == job
    # Answered items of a batch are no longer in flight.
    first = part.first + part.done if isinstance(part, Batch) else part.first
    return first <= index < part.first + len(part.items)
