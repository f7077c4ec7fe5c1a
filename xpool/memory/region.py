"""The region of one process: the blocks that it alone allocates.

Called under the lock of its arena.
"""

from __future__ import annotations

import time
from collections import deque

from xpool.memory.layout import ENTRIES, LARGE, PAGE, File

__all__ = ["Region"]

_LOOKS = 4
"""Blocks that are out which a lease looks at: more than it takes, so that what is free is found."""


def _capacity(nbytes: int) -> int:
    """Round up to one of four steps an octave."""
    step = max(256, 1 << ((nbytes - 1).bit_length() - 3))
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
        # By entry: where it is, its size, the bytes that have memory, when it was found free.
        self._offsets: list[int] = []
        self._capacities: list[int] = []
        self._filled: list[int] = []
        self._since: list[float] = []
        self._free: dict[int, list[int]] = {}  # by capacity
        self._out: deque[int] = deque()  # those that someone holds, or did when last looked at
        self.filled = False  # some block has memory
        # Who sat here before may have left blocks that others still hold.
        for index in range(file.entries(seat)):
            offset, capacity = file.entry(self._first + index)
            self._note(offset, capacity)
            self._top = max(self._top, offset + capacity)
            self._out.append(index)
        self.collect(len(self._out))

    def _note(self, offset: int, capacity: int) -> None:
        self._offsets.append(offset)
        self._capacities.append(capacity)
        self._filled.append(0)
        self._since.append(0.0)

    def take(self, nbytes: int, limit: int) -> int | None:
        """Return the number of a free block with memory for ``nbytes`` bytes; None: there is none.

        ``limit``: bytes that the file may use, of all regions together.
        """
        self.collect(_LOOKS)
        capacity = _capacity(nbytes)
        free = self._free.setdefault(capacity, [])
        if not free and len(self._out) <= 4 * _LOOKS:
            self.collect(len(self._out))  # cheap, and warm memory is worth a look
        index = free.pop() if free else self._new(capacity)
        if index is None:
            return None
        if self._filled[index] < nbytes and not self._fill(index, nbytes, limit):
            free.append(index)
            return None
        self._out.append(index)
        return self._first + index

    def _new(self, capacity: int) -> int | None:
        index = len(self._offsets)
        offset = -(-self._top // PAGE) * PAGE if capacity >= LARGE else self._top
        if index == ENTRIES or offset + capacity > self._end:
            return None
        if not self._file.add(self._first + index, offset, capacity):
            return None
        self._top = offset + capacity
        self._note(offset, capacity)
        return index

    def _fill(self, index: int, nbytes: int, limit: int) -> bool:
        """Have memory behind the first ``nbytes`` bytes of a block."""
        if self._file.used() + nbytes - self._filled[index] > limit:
            self.give_back(time.monotonic())
            if self._file.used() + nbytes - self._filled[index] > limit:
                return False
        offset = self._offsets[index]
        start = (offset + self._filled[index]) // PAGE * PAGE
        stop = -(-(offset + nbytes) // PAGE) * PAGE
        if not self._file.reserve(start, stop - start):
            return False
        self._filled[index] = nbytes
        self.filled = True
        return True

    def collect(self, most: int) -> None:
        """Look at ``most`` blocks that were out; what nobody holds any more is free."""
        out = self._out
        for _ in range(min(most, len(out))):
            index = out.popleft()
            if self._file.free(self._first + index):
                self._free.setdefault(self._capacities[index], []).append(index)
                self._since[index] = time.monotonic()
            else:
                out.append(index)

    def collect_all(self) -> None:
        """Look at all of them."""
        self.collect(len(self._out))

    def give_back(self, before: float) -> None:
        """Give the memory of blocks that have been free since ``before`` back to the system."""
        for capacity, free in self._free.items():
            if capacity >= LARGE:
                for index in free:
                    if self._filled[index] and self._since[index] <= before:
                        self._file.punch(self._offsets[index], capacity)
                        self._filled[index] = 0
        self.filled = any(n >= LARGE for n in self._filled)

    @property
    def blocks(self) -> int:
        """Blocks that were ever made."""
        return len(self._offsets)

    @property
    def out(self) -> int:
        """Blocks that somebody held when last looked at."""
        return len(self._out)
