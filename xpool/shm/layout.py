"""The arena's file: what lies where in it, and how its tables are read and written.

::

    ledger    u64 for each attachment: how many entries its table has; then marks of `attachments`
    tables    for each attachment, ENTRY bytes for each block:
                  HOLDS bytes, one for each attachment: 1 while that process holds the block
                  u64 offset in the file, u64 capacity, u64 filled, u32 stamp
    regions   for each attachment: the blocks themselves

``filled`` are the bytes of the block that have memory behind them, from its start.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from bisect import bisect_right

from xpool.shm.buffers import address_of

__all__ = ["ENTRIES", "HOLDS", "LARGE", "PAGE", "File"]

HOLDS = 480
"""Attachments: processes that can have the file mapped at a time, the program's own included."""

ENTRIES = 1 << 18
"""Blocks of one attachment, at most."""

PAGE = mmap.PAGESIZE
LARGE = 4 * PAGE
"""Bytes from which a block has pages of its own, whose memory can go back to the system."""

# Bytes: 480 of holds, three u64, a u32, and 4 to spare; eight entries to a page.
_ENTRY = 512
# The ledger has 3840 bytes; the marks of `attachments` are the other 256.
_TABLES = 4096
_DATA = _TABLES + HOLDS * ENTRIES * _ENTRY
_NOBODY = bytes(HOLDS)
# MADV_POPULATE_WRITE, since Linux 5.14 (asm-generic/mman-common.h).
_POPULATE_WRITE = 23

_fence = threading.Lock()


class File:
    """The file, mapped.  A block's number is its place in all tables taken together."""

    def __init__(self, fd: int, region: int) -> None:
        self.fd = fd
        self.region = region
        self.map = mmap.mmap(fd, self._extent())
        # A core dump leaves it out: the addresses are terabytes.
        self.map.madvise(mmap.MADV_DONTDUMP)
        whole = memoryview(self.map)
        self._ledger = whole[: 8 * HOLDS].cast("Q")
        self._tables = whole[_TABLES:_DATA]
        self._address = 0
        # Columns of the tables, by number.
        words, halves = self._tables.cast("Q"), self._tables.cast("I")
        first = HOLDS // 8
        self.offsets = words[first :: _ENTRY // 8]
        self.capacities = words[first + 1 :: _ENTRY // 8]
        self.filled = words[first + 2 :: _ENTRY // 8]
        self.stamps = halves[2 * (first + 3) :: _ENTRY // 4]

    @property
    def address(self) -> int:
        """Where the mapping begins; found when it is asked for, which a worker's start does not."""
        if not self._address:
            self._address = address_of(self.map)
        return self._address

    def holds(self, attachment: int) -> memoryview:
        """Return the column of an attachment: 1 where its process holds the block."""
        return self._tables[attachment::_ENTRY]

    @staticmethod
    def size_for(region: int) -> int:
        """Return the size of a file whose regions have so many bytes each."""
        return _DATA + HOLDS * region

    @staticmethod
    def region_of(fd: int) -> int:
        """Return how many bytes each region of a file has."""
        return (os.fstat(fd).st_size - _DATA) // HOLDS

    def _extent(self) -> int:
        """Bytes of the file that are mapped."""
        return self.size_for(self.region)

    def start(self, attachment: int) -> int:
        """Return where an attachment's region begins."""
        return _DATA + attachment * self.region

    # -- tables --------------------------------------------------------------------------------

    def entries(self, attachment: int) -> int:
        """Return how many entries an attachment's table has."""
        return self._ledger[attachment]

    def add(self, number: int, offset: int, capacity: int) -> bool:
        """Write the next entry of a table; False when there is no memory for it."""
        at = _TABLES + number * _ENTRY
        # The first entry of a page: here a shortage is a refusal, in a write it would be a SIGBUS.
        if at % PAGE == 0 and not self.reserve(at, PAGE):
            return False
        self.offsets[number] = offset
        self.capacities[number] = capacity
        attachment, index = divmod(number, ENTRIES)
        # Last: from here on, other processes take it for a block.
        self._ledger[attachment] = index + 1
        return True

    def exists(self, number: int) -> bool:
        """Whether there is such a block."""
        attachment, index = divmod(number, ENTRIES)
        return 0 <= attachment < HOLDS and index < self._ledger[attachment]

    def find(self, offset: int) -> int | None:
        """Return the block that begins at an offset; None: none does."""
        attachment, past = divmod(offset - _DATA, self.region)
        if not 0 <= attachment < HOLDS or past < 0:
            return None
        # The offsets of an attachment's entries only grow.
        first = attachment * ENTRIES
        numbers = range(first, first + self._ledger[attachment])
        place = bisect_right(numbers, offset, key=self.offsets.__getitem__) - 1
        return first + place if place >= 0 and self.offsets[first + place] == offset else None

    # -- holds -------------------------------------------------------------------------------------

    def free(self, number: int) -> bool:
        """Whether nobody holds a block."""
        at = _TABLES + number * _ENTRY
        return self.map[at : at + HOLDS] == _NOBODY

    def claim(self, number: int) -> bool:
        """Take back a block of one's own if nobody holds it; no message can name it any more.

        Whoever comes too late with a message that was given up says first that he holds the block,
        and looks at the stamp then.  Here the stamp changes first, and the holds are looked at
        again.  So one of the two sees the other, and leaves the block alone.
        """
        at = _TABLES + number * _ENTRY
        if self.map[at : at + HOLDS] != _NOBODY:
            return False
        self.stamps[number] = (self.stamps[number] + 1) & 0xFFFF_FFFF
        with _fence:  # a lock orders what the processor writes and reads
            pass
        return self.map[at : at + HOLDS] == _NOBODY

    def only(self, number: int, attachment: int) -> bool:
        """Whether nobody but the process in this attachment holds a block."""
        at = _TABLES + number * _ENTRY
        holds = bytearray(self.map[at : at + HOLDS])
        holds[attachment] = 0
        return holds == _NOBODY

    def clear_holds(self, attachment: int) -> None:
        """Let a process that has ended hold nothing."""
        holds = self.holds(attachment)
        for other in range(HOLDS):
            count = self._ledger[other]
            if count:
                first = other * ENTRIES
                holds[first : first + count] = bytes(count)

    # -- memory ------------------------------------------------------------------------------------

    def fill(self, number: int, nbytes: int) -> bool:
        """Have memory behind the first ``nbytes`` bytes of a block; False when there is none."""
        offset, filled = self.offsets[number], self.filled[number]
        # From the page in which the memory ends, which may be there in part.
        start = (offset + filled) // PAGE * PAGE
        stop = -(-(offset + nbytes) // PAGE) * PAGE
        if not filled and self.capacities[number] >= LARGE:
            self.filled[number] = 1  # a trace for who clears up after a death in the midst of it
        if not self.reserve(start, stop - start):
            if not filled:
                self.punch(number)  # a part of it may have been there
            return False
        # Last: a process that dies before this leaves no more than a trace.
        self.filled[number] = nbytes
        return True

    def reserve(self, start: int, length: int) -> bool:
        """Have memory behind whole pages, before they are written; False when there is none."""
        try:
            try:
                self.map.madvise(_POPULATE_WRITE, start, length)
            except OSError as exc:
                # Not known to this kernel: all else is a refusal.
                if exc.errno != errno.EINVAL:
                    raise
                os.posix_fallocate(self.fd, start, length)  # Linux before 5.14
        except OSError:
            return False
        return True

    def punch(self, number: int) -> None:
        """Give the memory of a block back to the system, if it has any that is its own."""
        capacity = self.capacities[number]
        if capacity >= LARGE and self.filled[number]:
            self.filled[number] = 1  # as in `fill`
            size = -(-capacity // PAGE) * PAGE
            try:
                self.map.madvise(mmap.MADV_REMOVE, self.offsets[number], size)
            except OSError:
                pass  # a kernel without it: the memory is used again, or goes with the file
            self.filled[number] = 0

    def used(self) -> int:
        """Return how many bytes of memory the whole file has."""
        # Blocks of 512 bytes, whatever the file system's are (stat(2)).
        return os.fstat(self.fd).st_blocks * 512
