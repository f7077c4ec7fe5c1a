"""The arena's file: what lies where in it, and how its tables are read and written.

::

    ledger    u64 for each seat: how many entries its table has; then the marks of `seats`
    tables    for each seat, ENTRY bytes for each block:
                  HOLDS bytes, one for each seat: 1 while that process holds the block
                  u64 offset in the file, u64 capacity, u32 stamp
    regions   for each seat: the blocks themselves
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

__all__ = ["ENTRIES", "HOLDS", "LARGE", "PAGE", "File"]

HOLDS = 480
"""Seats: processes that can have the file mapped at a time, the program's own included."""

ENTRIES = 1 << 18
"""Blocks of one seat, at most."""

PAGE = mmap.PAGESIZE
LARGE = 4 * PAGE
"""Bytes from which a block has pages of its own, whose memory can go back to the system."""

_ENTRY = 512
_TABLES = 4096
_DATA = _TABLES + HOLDS * ENTRIES * _ENTRY
_NOBODY = bytes(HOLDS)
_POPULATE_WRITE = 23


class File:
    """The file, mapped.  A block's number is its place in all tables taken together."""

    def __init__(self, fd: int, region: int) -> None:
        self.fd = fd
        self.region = region
        self.map = mmap.mmap(fd, self._extent())
        self.map.madvise(mmap.MADV_DONTDUMP)
        self._address = self.address_of(self.map)
        self._bytes = memoryview(self.map)
        self._ledger = self._bytes[: 8 * HOLDS].cast("Q")

    @staticmethod
    def size_for(region: int) -> int:
        """Return the size of a file whose regions have so many bytes each."""
        return _DATA + HOLDS * region

    @staticmethod
    def region_of(fd: int) -> int:
        """Return how many bytes each region of a file has."""
        return (os.fstat(fd).st_size - _DATA) // HOLDS

    @staticmethod
    def address_of(mapping: mmap.mmap) -> int:
        """Return where a mapping begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    def start(self, seat: int) -> int:
        """Return where a seat's region begins."""
        return _DATA + seat * self.region

    def _extent(self) -> int:
        """Bytes of the file that are mapped."""
        return self.size_for(self.region)

    def place(self, offset: int) -> tuple[mmap.mmap, int]:
        """Return the mapping in which a byte of the file lies, and where in it."""
        return self.map, offset

    def offset_of(self, address: int) -> int | None:
        """Return which byte of the file lies at an address; None: none of it does."""
        offset = address - self._address
        return offset if 0 <= offset < len(self.map) else None

    # -- tables --------------------------------------------------------------------------------

    def entries(self, seat: int) -> int:
        """Return how many entries a seat's table has."""
        return self._ledger[seat]

    def add(self, number: int, offset: int, capacity: int) -> bool:
        """Write the next entry of a table; False when there is no memory for it."""
        at = _TABLES + number * _ENTRY
        if at % PAGE == 0 and not self.reserve(at, PAGE):
            return False
        entry = offset.to_bytes(8, "little") + capacity.to_bytes(8, "little")
        self.map[at + HOLDS : at + HOLDS + 16] = entry
        seat, index = divmod(number, ENTRIES)
        self._ledger[seat] = index + 1
        return True

    def entry(self, number: int) -> tuple[int, int]:
        """Return offset and capacity of a block."""
        at = _TABLES + number * _ENTRY + HOLDS
        data = self.map[at : at + 16]
        return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")

    def stamp(self, number: int) -> int:
        """Return how often a block has been leased, modulo 2**32."""
        at = _TABLES + number * _ENTRY + HOLDS + 16
        return int.from_bytes(self.map[at : at + 4], "little")

    def set_stamp(self, number: int, stamp: int) -> None:
        """Count a lease."""
        at = _TABLES + number * _ENTRY + HOLDS + 16
        self.map[at : at + 4] = stamp.to_bytes(4, "little")

    def set_hold(self, number: int, seat: int, held: int) -> None:
        """Say whether the process in a seat holds a block: 1 or 0."""
        self.map[_TABLES + number * _ENTRY + seat] = held

    def free(self, number: int) -> bool:
        """Whether nobody holds a block."""
        at = _TABLES + number * _ENTRY
        return self.map[at : at + HOLDS] == _NOBODY

    def only(self, number: int, seat: int) -> bool:
        """Whether nobody but the process in this seat holds a block."""
        at = _TABLES + number * _ENTRY
        holds = bytearray(self.map[at : at + HOLDS])
        holds[seat] = 0
        return holds == _NOBODY

    def clear_holds(self, seat: int) -> None:
        """Let a process that has ended hold nothing."""
        for other in range(HOLDS):
            count = self._ledger[other]
            if count:
                start = _TABLES + other * ENTRIES * _ENTRY
                self._bytes[start + seat : start + count * _ENTRY : _ENTRY] = bytes(count)

    # -- memory ----------------------------------------------------------------------------------

    def reserve(self, start: int, length: int) -> bool:
        """Have memory behind whole pages, before they are written; False when there is none."""
        try:
            try:
                self.map.madvise(_POPULATE_WRITE, start, length)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                os.posix_fallocate(self.fd, start, length)  # Linux before 5.14
        except OSError:
            return False
        return True

    def punch(self, offset: int, capacity: int) -> None:
        """Give the memory of a block back to the system."""
        if capacity >= LARGE:
            self.map.madvise(mmap.MADV_REMOVE, offset, -(-capacity // PAGE) * PAGE)

    def used(self) -> int:
        """Return how many bytes of memory the whole file has."""
        return os.fstat(self.fd).st_blocks * 512
