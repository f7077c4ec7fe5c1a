"""The region of one process: the blocks that it alone allocates.

Called under the lock of its arena.
"""

from __future__ import annotations

import time
from collections import deque

from xpool.memory.layout import ENTRIES, LARGE, PAGE, File

__all__ = ["Region"]

_YOUNG = 64
"""Blocks leased last: the ones to look at first, since most values do not live long."""

_AT_ONCE = 512
"""Blocks whose memory goes back to the system in one turn: about a millisecond."""


def _capacity(nbytes: int) -> int:
    """Round up to one of four steps an octave."""
    step = max(256, 1 << nbytes.bit_length() >> 3)
    if nbytes >= LARGE:
        step = max(step, PAGE)
    return -(-nbytes // step) * step


class Region:
    """The allocator.  A block is free when nobody holds it; its memory stays, warm, for a while."""

    def __init__(self, file: File, seat: int) -> None:
        self._file = file
        self._first = seat * ENTRIES
        self._top = file.start(seat)
        self._end = self._top + file.region
        self._since: list[float] = []  # by index: when it was found free
        self._free: dict[int, list[int]] = {}  # by capacity, indices
        # Those that someone holds, or did when last looked at; the young in the order of leases.
        self._young: list[int] = []
        self._old: deque[int] = deque()
        self.filled = False  # there may be memory that can go back to the system, now or later
        # Who sat here before may have left blocks that others still hold.
        count = file.entries(seat)
        if count:
            last = self._first + count - 1
            self._top = file.offsets[last] + file.capacities[last]
            self._since = [0.0] * count
            self._old.extend(range(count))
            self.filled = True
            self.collect_all()

    def take(self, nbytes: int, limit: int) -> int | None:
        """Return the number of a free block with memory for ``nbytes`` bytes; None: there is none.

        ``limit``: bytes that the file may use, of all regions together.
        """
        capacity = _capacity(nbytes)
        free = self._free.get(capacity)
        if free is None:
            free = self._free[capacity] = []
        if not free:
            self._look_at_young(capacity)
            if not free and self._old:
                # A look costs a twentieth of the first touch of 4 KiB of fresh memory.
                self._look_at_old(max(16, nbytes // 4096), capacity)
        elif self._old:
            self._look_at_old(2)  # so that what is free among them is found in time
        index = free.pop() if free else self._new(capacity)
        if index is None:
            return None
        number = self._first + index
        if self._file.filled[number] < nbytes and not self._fill(number, nbytes, limit):
            free.append(index)
            found = self._make_room(free, nbytes, limit)
            if found is None:
                return None
            index, number = found, self._first + found
        self._young.append(index)
        if len(self._young) > _YOUNG:
            self._old.append(self._young.pop(0))
        return number

    def _new(self, capacity: int) -> int | None:
        index = len(self._since)
        offset = -(-self._top // PAGE) * PAGE if capacity >= LARGE else self._top
        if index == ENTRIES or offset + capacity > self._end:
            return None
        if not self._file.add(self._first + index, offset, capacity):
            return None
        self._top = offset + capacity
        self._since.append(0.0)
        return index

    def _fill(self, number: int, nbytes: int, limit: int) -> bool:
        file = self._file
        self.filled = True
        return file.used() + nbytes - file.filled[number] <= limit and file.fill(number, nbytes)

    def _make_room(self, free: list[int], nbytes: int, limit: int) -> int | None:
        """Where memory is short: take from ``free`` what has it, or give back what others have."""
        self.collect_all()
        for place, index in enumerate(free):
            if self._file.filled[self._first + index] >= nbytes:
                return free.pop(place)
        while self.give_back(time.monotonic()):
            pass
        return free.pop() if self._fill(self._first + free[-1], nbytes, limit) else None

    def _look_at_old(self, most: int, wanted: int = 0) -> None:
        """Look at ``most`` in turn; one of the capacity ``wanted`` is enough."""
        old, claim, first = self._old, self._file.claim, self._first
        for _ in range(min(most, len(old))):
            index = old.popleft()
            if not claim(first + index):
                old.append(index)
            elif self._found(index) == wanted:
                return

    def _look_at_young(self, wanted: int = 0) -> None:
        """Look from the youngest on; one of the capacity ``wanted`` is enough."""
        young, claim, first = self._young, self._file.claim, self._first
        for i in range(len(young) - 1, -1, -1):
            if claim(first + young[i]) and self._found(young.pop(i)) == wanted:
                return

    def _found(self, index: int) -> int:
        """Take a free block in; return its capacity."""
        capacity = self._file.capacities[self._first + index]
        self._since[index] = time.monotonic()
        self._free.setdefault(capacity, []).append(index)
        return capacity

    def collect_all(self) -> None:
        """Look at all that are out; what nobody holds any more is free."""
        self._look_at_young()
        self._look_at_old(len(self._old))

    def give_back(self, before: float) -> bool:
        """Give memory of blocks that have been free since ``before`` back to the system.

        Returns whether there is more to give: it stops after some, to be called again.
        """
        file, left, warm = self._file, _AT_ONCE, False
        for capacity, free in self._free.items():
            if capacity >= LARGE:
                for index in free:
                    number = self._first + index
                    if file.filled[number]:
                        if self._since[index] > before:
                            warm = True
                            continue
                        if not left:
                            return True
                        left -= 1
                        file.punch(number)
        self.filled = warm or any(
            file.capacities[self._first + i] >= LARGE for i in (*self._young, *self._old)
        )
        return False

    @property
    def blocks(self) -> int:
        """Blocks that were ever made."""
        return len(self._since)

    @property
    def out(self) -> int:
        """Blocks that somebody held when last looked at."""
        return len(self._young) + len(self._old)
