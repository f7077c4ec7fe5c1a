"""What the driver knows of what one host holds: books of `xpool.hosts.scheduler`, which has the
words."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from xpool.jobs.ranges import TaskRange, name_of

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
    """Items that were staged at a host."""

    __slots__ = ("items", "left", "nbytes", "number")

    def __init__(self, number: int, items: TaskRange) -> None:
        self.number = number
        self.items = items
        self.nbytes = sum(map(len, items.items))
        self.left = len(items.items)  # without an answer


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
