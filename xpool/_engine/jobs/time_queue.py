"""`TimeQueue`: what waits for a time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class TimeQueue(Generic[T]):
    """Objects by time; of the same time, in the order in which they were put."""

    def __init__(self) -> None:
        # The number orders two of the same time, since the objects cannot be compared.
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()

    def put(self, when: float, one: T) -> bool:
        """Put an object; return whether it is the first now."""
        entry = when, next(self._numbers), one
        heapq.heappush(self._heap, entry)
        return self._heap[0] is entry

    def next(self) -> float | None:
        """Return the earliest time; None: nothing waits.  Needs no lock."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[T]:
        """Take out what is due, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(self.pop())
        return found

    def pop(self) -> T:
        """Take out the first object.  There must be one."""
        return heapq.heappop(self._heap)[2]

    def take_out(self, wanted: Callable[[T], bool]) -> list[T]:
        """Take out these objects, whenever they are due."""
        found = [one for one in self if wanted(one)]
        if found:
            self._heap = [entry for entry in self._heap if not wanted(entry[2])]
            heapq.heapify(self._heap)
        return found

    def __iter__(self) -> Iterator[T]:
        return (one for _, _, one in self._heap)

    def clear(self) -> None:
        self._heap.clear()
