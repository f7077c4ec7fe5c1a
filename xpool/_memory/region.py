"""The region of one process, in which only this process allocates blocks.

All callers hold the lock of the arena.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque

from xpool._memory.layout import ENTRIES, LARGE, PAGE, ArenaFile, Entry

_YOUNG = 64
"""So many of the latest leases are checked first, because most values are short-lived."""

_LEAST, _MOST = 8, 64
"""How many blocks are checked before a new one is made: more if earlier checks found free ones."""

_WORTH = 16 * 1024
"""The first touch of so many bytes of new memory takes about as long as checking a block."""

_WARM = 16 * 1024 * 1024
"""So many bytes of free blocks, or two blocks if these are larger, keep their memory for reuse."""

_AT_ONCE = 512
"""The memory of so many blocks is given back in one turn, which takes about a millisecond."""


def _capacity(nbytes: int) -> int:
    """Return the smallest capacity for so many bytes."""
    # A step is an eighth of the next power of two, so there are four steps between two of these.
    step = max(256, 1 << nbytes.bit_length() >> 3)
    if nbytes >= LARGE:
        step = max(step, PAGE)
    return -(-nbytes // step) * step


class Region:
    """The allocator.  A block is free when no process holds it; it keeps its memory for a while."""

    def __init__(self, file: ArenaFile, attachment: int, entries: list[Entry]) -> None:
        self._file = file
        self._first = attachment * ENTRIES
        self._top = file.start(attachment)
        self._end = self._top + file.region
        # The blocks, by index.  Other processes may hold blocks of an earlier owner of the region.
        self.entries = entries
        # Blocks that were held when last checked.  The young ones are in the order of their leases.
        self._young: list[int] = []
        self._old: deque[int] = deque()
        # Free blocks with memory, by capacity; those that are free for the longest time come first.
        self._warm: dict[int, deque[int]] = defaultdict(deque)
        self._bare: dict[int, list[int]] = defaultdict(list)  # free blocks without memory
        self._looks = _MOST
        self._spare = 0  # number of bytes in `_warm` that can be given back
        if self.entries:
            last = self.entries[-1]
            self._top = last.offset + last.capacity
            self._old.extend(range(len(self.entries)))
            self.collect_all()

    def place(self, number: int) -> tuple[int, int] | None:
        """Return offset and capacity of a block, or None if it is in another region."""
        index = number - self._first
        if 0 <= index < len(self.entries):
            entry = self.entries[index]
            return entry.offset, entry.capacity
        return None

    def punch(self, number: int) -> None:
        """Give back the memory of an unheld block."""
        self._file.punch(self.entries[number - self._first])

    def take(self, nbytes: int, limit: int) -> int | None:
        """Return the number of a free block with memory for ``nbytes`` bytes, or None.

        All regions of the file together may use ``limit`` bytes.
        """
        capacity = _capacity(nbytes)
        index = self._find(capacity, nbytes)
        if index is None:
            return None
        if self.entries[index].filled < nbytes and not self._extend(index, nbytes, limit):
            self._put(index)
            index = self._find_in_need(capacity, nbytes, limit)
            if index is None:
                return None
        if self._spare > _WARM:
            self._cool()
        self._young.append(index)
        if len(self._young) > _YOUNG:
            self._old.append(self._young.pop(0))
        return self._first + index

    def _find(self, capacity: int, nbytes: int) -> int | None:
        warm = self._warm[capacity]
        if not warm:
            most = max(self._looks, nbytes // _WORTH)
            self._look_at_young(most, capacity)
            if not warm and self._old:
                self._look_at_old(most, capacity)
            # If no block was free, as during a `map` that holds its results, check fewer next time.
            self._looks = min(2 * self._looks, _MOST) if warm else max(_LEAST, self._looks * 3 // 4)
        elif self._old:
            self._look_at_old(4)  # after some calls, all have been checked
        if warm:
            return self._pop(warm)
        bare = self._bare[capacity]
        return bare.pop() if bare else self._new(capacity)

    def _find_in_need(self, capacity: int, nbytes: int, limit: int) -> int | None:
        """Take a block that has enough memory, or give back the memory of other blocks for one."""
        self.collect_all()
        warm, bare = self._warm[capacity], self._bare[capacity]
        for _ in range(len(warm)):
            index = self._pop(warm)
            if self.entries[index].filled >= nbytes:
                return index
            self._put(index, warmest=False)
        while self.give_back(time.monotonic()):
            pass
        # One of the two is not empty, because `take` has put back a block of this size.
        index = bare.pop() if bare else self._pop(warm)
        if self._extend(index, nbytes, limit):
            return index
        self._put(index)
        return None

    def _extend(self, index: int, nbytes: int, limit: int) -> bool:
        file, entry = self._file, self.entries[index]
        return file.used() + nbytes - entry.filled <= limit and file.fill(entry, nbytes)

    def _new(self, capacity: int) -> int | None:
        index = len(self.entries)
        # A large block begins at a page, because only whole pages can be given back.
        offset = -(-self._top // PAGE) * PAGE if capacity >= LARGE else self._top
        if index == ENTRIES or offset + capacity > self._end:
            return None
        entry = Entry(self._first + index, offset, capacity)
        if not self._file.add(entry):
            return None
        self._top = offset + capacity
        self.entries.append(entry)
        return index

    # -- finding free blocks -----------------------------------------------------------------------

    def _look_at_old(self, most: int, wanted: int = 0) -> None:
        """Check the next ``most`` old blocks.  Stop at a free one of capacity ``wanted``."""
        old, claim, first = self._old, self._file.claim, self._first
        for _ in range(min(most, len(old))):
            index = old.popleft()
            if not claim(first + index):
                old.append(index)
            elif self._put(index) == wanted:
                return

    def _look_at_young(self, most: int = _YOUNG, wanted: int = 0) -> None:
        """Check ``most`` young blocks.  Stop at a free one of capacity ``wanted``."""
        young, claim, first = self._young, self._file.claim, self._first
        # Dropped values often have the youngest blocks, or the oldest if they are dropped in turn.
        for index in young[:-3:-1] + young[: max(0, min(most, len(young)) - 2)]:
            if claim(first + index):
                young.remove(index)
                if self._put(index) == wanted:
                    return

    def _put(self, index: int, warmest: bool = True) -> int:
        """Record a free block.  Return its capacity."""
        entry = self.entries[index]
        capacity, filled = entry.capacity, entry.filled
        entry.free_since = time.monotonic()
        if filled:
            warm = self._warm[capacity]
            warm.append(index) if warmest else warm.appendleft(index)
            if capacity >= LARGE:
                self._spare += filled
        else:
            self._bare[capacity].append(index)
        return capacity

    def _pop(self, warm: deque[int]) -> int:
        """Take the block that was freed last."""
        index = warm.pop()
        entry = self.entries[index]
        if entry.capacity >= LARGE:
            self._spare -= entry.filled
        return index

    def collect_all(self) -> None:
        """Check all blocks that were held.  Record those that are free now."""
        self._look_at_young()
        self._look_at_old(len(self._old))

    # -- giving memory back ------------------------------------------------------------------------

    def _kept(self) -> int:
        """Return how many bytes of free blocks may keep their memory for reuse."""
        return max(_WARM, 2 * max((c for c, warm in self._warm.items() if warm), default=0))

    def _cool(self) -> None:
        """Give back the memory of free blocks above `_kept`."""
        most = self._kept()
        for capacity, warm in self._warm.items():
            while self._spare > most and warm and capacity >= LARGE:
                self._punch(capacity, warm)

    def _punch(self, capacity: int, warm: deque[int]) -> None:
        index = warm.popleft()
        entry = self.entries[index]
        self._spare -= entry.filled
        self._file.punch(entry)
        self._bare[capacity].append(index)

    def give_back(self, before: float) -> bool:
        """Give back the memory of blocks that are free since ``before``, and memory above `_kept`.

        Returns True if it has stopped after `_AT_ONCE` blocks and must be called again.
        """
        left, most = _AT_ONCE, self._kept()
        for capacity, warm in self._warm.items():
            # Small blocks keep their memory, because they share pages with others.
            if capacity < LARGE:
                continue
            while warm and (self.entries[warm[0]].free_since <= before or self._spare > most):
                if not left:
                    return True
                left -= 1
                self._punch(capacity, warm)
        return False

    @property
    def filled(self) -> bool:
        """Whether blocks have memory that can be given back, now or when they are released."""
        return bool(self._spare or self._young or self._old)

    @property
    def blocks(self) -> int:
        return len(self.entries)

    @property
    def out(self) -> int:
        """Number of blocks that were held when last checked."""
        return len(self._young) + len(self._old)
