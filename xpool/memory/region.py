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
        self._out: deque[int] = deque()  # those that someone holds, or did when last looked at
        self.filled = False  # there may be memory that can go back to the system, now or later
        # Who sat here before may have left blocks that others still hold.
        count = file.entries(seat)
        if count:
            last = self._first + count - 1
            self._top = file.offsets[last] + file.capacities[last]
            self._since = [0.0] * count
            self._out.extend(range(count))
            self.filled = True
            self.collect(count)

    def take(self, nbytes: int, limit: int) -> int | None:
        """Return the number of a free block with memory for ``nbytes`` bytes; None: there is none.

        ``limit``: bytes that the file may use, of all regions together.
        """
        # All, where they are few: warm memory is worth a look.
        out = self._out
        self.collect(len(out) if len(out) <= 4 * _LOOKS else _LOOKS)
        capacity = _capacity(nbytes)
        free = self._free.get(capacity)
        index = free.pop() if free else self._new(capacity)
        if index is None:
            return None
        number = self._first + index
        if self._file.filled[number] < nbytes and not self._fill(number, nbytes, limit):
            self._free.setdefault(capacity, []).append(index)
            return None
        out.append(index)
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
        more = nbytes - file.filled[number]
        if file.used() + more > limit:
            # What lies free in other sizes makes room.
            self.collect_all()
            while self.give_back(time.monotonic()):
                pass
            if file.used() + more > limit:
                return False
        self.filled = True
        return file.fill(number, nbytes)

    def collect(self, most: int) -> None:
        """Look at ``most`` blocks that were out; what nobody holds any more is free."""
        out, claim, first = self._out, self._file.claim, self._first
        for _ in range(min(most, len(out))):
            index = out.popleft()
            if claim(first + index):
                capacity = self._file.capacities[first + index]
                self._since[index] = time.monotonic()
                self._free.setdefault(capacity, []).append(index)
            else:
                out.append(index)

    def collect_all(self) -> None:
        """Look at all of them."""
        self.collect(len(self._out))

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
        self.filled = warm or any(file.capacities[self._first + i] >= LARGE for i in self._out)
        return False

    @property
    def blocks(self) -> int:
        """Blocks that were ever made."""
        return len(self._since)

    @property
    def out(self) -> int:
        """Blocks that somebody held when last looked at."""
        return len(self._out)
