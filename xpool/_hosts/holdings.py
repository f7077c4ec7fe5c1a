"""What the driver knows of what one host holds: books of `xpool._hosts.scheduler`, which has the
words."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from xpool._engine.jobs.ranges import CALLS, TaskRange, name_of, piece
from xpool._hosts.messages import Stage

__all__ = ["Host", "Lost", "Lot"]


class Lost(NamedTuple):
    """An item that a lost host may have run, as a range of its own, and whether another try is
    permitted."""

    item: TaskRange
    again: bool

    @property
    def name(self) -> tuple[int, int]:
        """Job and index, as the pool knows them."""
        return name_of(self.item.job, self.item.first)


class Lot:
    """Items that were staged at a host.

    ``of_stream``: they were cut from a range that an input reader appends to.
    """

    __slots__ = ("items", "left", "nbytes", "number", "of_stream")

    def __init__(self, number: int, items: TaskRange, of_stream: bool) -> None:
        self.number = number
        self.items = items
        self.of_stream = of_stream
        self.nbytes = sum(map(len, items.items))
        self.left = len(items.items)  # without an answer

    def item(self, name: tuple[int, int]) -> TaskRange:
        """Return one item as a range of its own."""
        position = (name[0] if self.items.job == CALLS else name[1]) - self.items.first
        part = piece(self.items, position, position + 1)
        part.bound = self.items.bound
        return part

    def stage(self, first: int) -> Stage:
        """Return the message that sends it to a host whose first worker has this number."""
        its = self.items
        bound = None if its.bound is None else its.bound - first
        again = its.retries > 0
        return Stage(
            self.number, its.job, its.func, its.first, list(its.items), again, bound, its.limit,
            its.past,
        )  # fmt: skip


class Host:
    """What one host holds."""

    def __init__(self, number: int, first: int, workers: int) -> None:
        self.number = number
        self.first, self.workers = first, workers  # the pool's indices of its workers
        self.accepting = False  # it has not joined yet, or is about to go
        self.leaving = False
        self.known: set[int] = set()  # functions that it has
        self.staged: deque[Lot] = deque()  # not permitted, oldest first
        self.ready = 0  # items in these
        self.lots: dict[int, Lot] = {}  # permitted, and not all answered; oldest first
        self.permitted: dict[tuple[int, int], Lot] = {}  # items by name
        self.ahead = 0  # permitted items that any of its workers may run
        self.nbytes = 0  # of what is staged and what is permitted
        self.asked: dict[int, Lot] = {}  # lots that it was asked to give back
        self.unasked: dict[int, Lot] = {}  # lots that it could be asked for, oldest first
        # For `HostScheduler.look`: whether the next look is under way, the newest lot and the
        # number of answers at the last one, answers since the host joined, and how many items it
        # may be permitted at most, since it has not begun in time what it was (None: by cost).
        self.watched = False
        self.newest_then = self.answers_then = self.answers = 0
        self.pace: int | None = None

    def names(self, job: int, index: int | None) -> list[tuple[int, int]]:
        """Return the names of what it is permitted of a job, or of that item alone."""
        return [
            name
            for name, lot in self.permitted.items()
            if lot.items.job == job and (index is None or name == name_of(job, index))
        ]
