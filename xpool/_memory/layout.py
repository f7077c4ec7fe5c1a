"""The layout of the arena's file: its tables, and the locks that say which process has which part.

::

    ledger    u64 for each attachment: the length of its table; then the marks of attachments
    tables    for each attachment, ENTRY bytes for each block:
                  HOLDS bytes, one for each attachment: 1 while that process holds the block
                  u64 offset in the file, u64 capacity, u64 filled, u32 stamp
    regions   for each attachment: the blocks themselves

``filled`` is the number of bytes, from the start of the block, that have memory.

Every process that maps the file can write to all of it.  So the owner of a table keeps its own copy
of the entries (`Entry`) and never reads them here.  Entries of other tables are checked before use:
a block must lie in the region of its attachment.

A process that maps the file has an **attachment**: the number of a region, and of a column in the
tables.  The process that made the file gives attachments to its workers and clears them
(`Arena.reclaim`).  A process that receives the file in a message uses it as a **foreign arena**,
and takes one of the upper numbers itself.  A process takes a number by locking bytes of the file
with a lock of the open file description (``F_OFD_SETLK``).  The kernel drops the lock when the last
descriptor of this description, which may be in a message, is closed, however the process ends.

So messages can have locks, too.  For a message, a sender opens the file again, locks a byte, which
is the **in-flight lease** of the message, and sends the new descriptor with it.  While the byte is
locked, the message is in transit, or its receiver is about to hold the blocks.  The byte is in the
range of the sender's number.  A number is not cleared or taken while any byte in its range is
locked, so messages may outlive their sender.

The offsets of locks have nothing to do with the data at these offsets in the file::

    number << 40          the process with this attachment is alive
    (number << 40) + n    its in-flight lease n is still open
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import struct
import threading
from typing import Any

from xpool._memory.system import address_of
from xpool._python.hidden import ctypes_module

HOLDS = 480
"""Number of attachments: so many processes, including the program, can map the file at a time."""

ENTRIES = 1 << 18
"""The largest number of blocks of one attachment."""

PAGE = mmap.PAGESIZE
LARGE = 4 * PAGE
"""Blocks of at least this many bytes have their own pages, whose memory can be given back."""

# The size of an entry: 480 bytes of holds, three u64, a u32, and 4 spare bytes.
_ENTRY = 512
# Before the tables, the ledger has 3840 bytes, and the marks of attachments have 256.
_TABLES = 4096
_DATA = _TABLES + HOLDS * ENTRIES * _ENTRY
_NOBODY = bytes(HOLDS)
# MADV_POPULATE_WRITE, since Linux 5.14 (asm-generic/mman-common.h).
_POPULATE_WRITE = 23

# Flags of mmap(2) (asm-generic/mman-common.h).
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_fence = threading.Lock()


@functools.cache
def _mmap() -> Any:
    """Return mmap(2).  Python's own cannot map at a given address."""
    ctypes = ctypes_module()
    call = ctypes.PyDLL(None).mmap
    numbers = ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, *numbers), ctypes.c_void_p
    return call


class Entry:
    __slots__ = ("capacity", "filled", "free_since", "number", "offset")

    def __init__(self, number: int, offset: int, capacity: int, filled: int = 0) -> None:
        self.number, self.offset, self.capacity, self.filled = number, offset, capacity, filled
        self.free_since = 0.0


class ArenaFile:
    """The mapped file.  The number of a block is its index in the tables, taken as one table."""

    def __init__(self, fd: int, region: int) -> None:
        self.fd = fd
        self.region = region
        self.map = mmap.mmap(fd, self._extent())
        # Core dumps leave it out, because it has terabytes of addresses.
        self.map.madvise(mmap.MADV_DONTDUMP)
        whole = memoryview(self.map)
        self._ledger = whole[: 8 * HOLDS].cast("Q")
        self._tables = whole[_TABLES:_DATA]
        self._address = 0
        # How many entries a table has, by attachment.  No other process writes to these tables:
        # they are this process's own and, in the maker of the file, those of ended processes.
        self._counts: dict[int, int] = {}
        # The columns of the tables, by a block's number.
        words, halves = self._tables.cast("Q"), self._tables.cast("I")
        first = HOLDS // 8
        self.offsets = words[first :: _ENTRY // 8]
        self.capacities = words[first + 1 :: _ENTRY // 8]
        self.filled = words[first + 2 :: _ENTRY // 8]
        self.stamps = halves[2 * (first + 3) :: _ENTRY // 4]

    @property
    def address(self) -> int:
        """The address of the mapping, computed at the first use to make a worker's start faster."""
        if not self._address:
            self._address = address_of(self.map)
        return self._address

    def pages(self, offset: int) -> tuple[mmap.mmap, int, int]:
        """Return the mapping that has a byte of the file, the mapping's address, and the byte's
        place.
        """
        return self.map, self.address, offset

    def address_at(self, offset: int) -> int:
        _, address, place = self.pages(offset)
        return address + place

    def offset_of(self, address: int) -> int | None:
        """Return the offset in the file of the byte at an address, or None if it is not mapped."""
        offset = address - self.address
        return offset if 0 <= offset < len(self.map) else None

    def holds(self, attachment: int) -> memoryview:
        """Return the column of an attachment: a 1 for each block that its process holds."""
        return self._tables[attachment::_ENTRY]

    @staticmethod
    def size_for(region: int) -> int:
        return _DATA + HOLDS * region

    @staticmethod
    def region_of(fd: int) -> int:
        return (os.fstat(fd).st_size - _DATA) // HOLDS

    def _extent(self) -> int:
        return self.size_for(self.region)

    def start(self, attachment: int) -> int:
        return _DATA + attachment * self.region

    # -- tables --------------------------------------------------------------------------------

    def entries(self, attachment: int) -> int:
        """Return the number of entries in an attachment's table.

        Raises:
            ValueError: the number was overwritten and is above `ENTRIES`.
        """
        known = self._counts.get(attachment)
        count = self._ledger[attachment] if known is None else known
        if count > ENTRIES:
            raise ValueError(
                f"the arena's table {attachment} was written over: it has {count} entries, of "
                f"{ENTRIES} at most"
            )
        return count

    def check(self, attachment: int) -> None:
        """Check the length and the last entry of a table.

        Raises:
            ValueError: the table was overwritten.
        """
        count = self.entries(attachment)
        if count:
            self.place(attachment * ENTRIES + count - 1)

    def add(self, entry: Entry) -> bool:
        """Write the next entry of a table.  Return False if there is no memory for it."""
        number = entry.number
        at = _TABLES + number * _ENTRY
        # Reserve each page of the table: without memory, a write would be a SIGBUS.
        if at % PAGE == 0 and not self.reserve(at, PAGE):
            return False
        self.offsets[number] = entry.offset
        self.capacities[number] = entry.capacity
        attachment, index = divmod(number, ENTRIES)
        # Written last, because other processes now regard the entry as a block.
        self._ledger[attachment] = self._counts[attachment] = index + 1
        return True

    def give(self, attachment: int) -> None:
        """Let a new process write to a table, which has the entries that its last owner left."""
        self._ledger[attachment] = self._counts.pop(attachment, 0)

    def place(self, number: int) -> tuple[int, int]:
        """Return offset and capacity of a block, as the table has them.

        Raises:
            ValueError: the block does not exist, or its entry was overwritten.
        """
        attachment = number // ENTRIES
        if not 0 <= attachment < HOLDS:
            raise ValueError(f"block {number} does not exist: there are {HOLDS} tables")
        # Read once, because another process could change them after the check.
        offset, capacity = self.offsets[number], self.capacities[number]
        start = self.start(attachment)
        if not start <= offset <= offset + capacity <= start + self.region:
            # An unused entry has only zeros.
            raise ValueError(
                f"block {number} does not exist, or its entry in the arena's table {attachment} "
                f"was written over: {capacity} bytes at {offset}"
            )
        return offset, capacity

    def table(self, attachment: int) -> list[Entry]:
        """Return the entries of an attachment, to which no other process writes from now on.

        Raises:
            ValueError: entries were overwritten, so that they overlap or lie outside the region.
        """
        first = attachment * ENTRIES
        found: list[Entry] = []
        top = self.start(attachment)
        for number in range(first, first + self.entries(attachment)):
            offset, capacity = self.place(number)
            filled = self.filled[number]
            if offset < top or filled > capacity:
                raise ValueError(f"entry {number} of the arena's table was written over")
            top = offset + capacity
            found.append(Entry(number, offset, capacity, filled))
        self._counts[attachment] = len(found)
        return found

    # -- holds -------------------------------------------------------------------------------------

    def claim(self, number: int) -> bool:
        """Take back an own block if no process holds it.  Messages that name it become invalid.

        The receiver of a late message first sets its hold and then reads the stamp.  This method
        first changes the stamp and then reads the holds again.  So at least one of the two sees the
        other and does not use the block.
        """
        at = _TABLES + number * _ENTRY
        if self.map[at : at + HOLDS] != _NOBODY:
            return False
        self.stamps[number] = (self.stamps[number] + 1) & 0xFFFF_FFFF
        with _fence:  # a lock makes the processor keep the order of the store and the load
            pass
        return self.map[at : at + HOLDS] == _NOBODY

    def only(self, number: int, attachment: int) -> bool:
        """Whether only the process with this attachment, or none, holds a block."""
        at = _TABLES + number * _ENTRY
        holds = bytearray(self.map[at : at + HOLDS])
        holds[attachment] = 0
        return holds == _NOBODY

    def clear_holds(self, attachment: int) -> None:
        """Clear all holds of a process that has ended."""
        holds = self.holds(attachment)
        # Skip empty tables, because most are empty, and this is done twice for each worker.
        used = {other for other, count in enumerate(self._ledger.tolist()) if count}
        for other in used | self._counts.keys():
            try:
                count = self.entries(other)
            except ValueError:
                continue  # the table was overwritten, and none of its blocks is reused
            first = other * ENTRIES
            holds[first : first + count] = bytes(count)

    # -- memory ------------------------------------------------------------------------------------

    def fill(self, entry: Entry, nbytes: int) -> bool:
        """Reserve memory for the first ``nbytes`` of a block.  Return False if none is left."""
        filled = entry.filled
        # Begin with the page in which the block's memory ends.
        start = (entry.offset + filled) // PAGE * PAGE
        stop = -(-(entry.offset + nbytes) // PAGE) * PAGE
        if not filled and entry.capacity >= LARGE:
            # If this process dies here, another one knows that the block may have memory.
            self._note_filled(entry, 1)
        if not self.reserve(start, stop - start):
            if not filled:
                self.punch(entry)  # a part may have been reserved
            return False
        self._note_filled(entry, nbytes)
        return True

    def _note_filled(self, entry: Entry, nbytes: int) -> None:
        entry.filled = self.filled[entry.number] = nbytes

    def reserve(self, start: int, length: int) -> bool:
        """Reserve memory for whole pages before they are written.  Return False if none is left."""
        try:
            try:
                self.map.madvise(_POPULATE_WRITE, start, length)
            except OSError as exc:
                # EINVAL means that the kernel lacks this call.  Other errors are refusals.
                if exc.errno != errno.EINVAL:
                    raise
                os.posix_fallocate(self.fd, start, length)  # for Linux before 5.14
        except OSError:
            return False
        return True

    def punch(self, entry: Entry) -> None:
        """Give the memory of a block with its own pages back to the system."""
        if entry.capacity >= LARGE and entry.filled:
            self._note_filled(entry, 1)  # as in `fill`
            size = -(-entry.capacity // PAGE) * PAGE
            try:
                pages, _, start = self.pages(entry.offset)
                pages.madvise(mmap.MADV_REMOVE, start, size)
            except OSError:
                pass  # the kernel lacks this call: the memory is reused, or freed with the file
            self._note_filled(entry, 0)

    def remap(self, offset: int, capacity: int, shared: bool) -> bool:
        """Map a block with its own pages again.  Return False if it is not mapped as wanted.

        ``shared``: whether this process shares the pages, or copies each before it writes to it.
        """
        if capacity < LARGE:
            return False
        address, kind = self.address_at(offset), mmap.MAP_SHARED
        if not shared:
            kind = mmap.MAP_PRIVATE | _MAP_NORESERVE
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _mmap()(address, capacity, access, kind | _MAP_FIXED, self.fd, offset) == address:
            return True
        # The old mapping may be gone.
        return not shared and self.remap(offset, capacity, True) and False

    def used(self) -> int:
        """Return how many bytes of memory the whole file uses."""
        return os.fstat(self.fd).st_blocks * 512  # the unit of any file system (stat(2))


FIRST_FOREIGN = 224
"""Foreign arenas take the highest free number down to this one.  Workers get the lowest one."""

# The range of offsets of each number.  480 ranges stay far below 2**63, the end of all offsets.
_SPAN = 1 << 40
# `struct flock` of a 64-bit system (fcntl(2)): type, whence, start, length, and a pid, always 0.
_FLOCK = struct.Struct("@hhqqi4x")
_MARKS = 8 * HOLDS  # after the ledger, a byte for each upper attachment: 1 until that is cleared


def reopen(fd: int) -> int:
    """Return a descriptor of a new open file description of the same file.

    Raises:
        OSError: no descriptor is left, or /proc is missing.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _set(fd: int, kind: int, start: int, length: int) -> bool:
    request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as exc:
        # Both errors mean that another description has a lock there (fcntl(2)).
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _locked(fd: int, start: int, length: int) -> bool:
    """Whether another open file description has a lock in this range."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    # The kernel returns the conflicting lock, or F_UNLCK if no lock conflicts.
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


# -- attachments ------------------------------------------------------------------------------


def attach(fd: int, attachment: int) -> None:
    """Mark an attachment as alive as long as this open file description exists."""
    _set(fd, fcntl.F_WRLCK, attachment * _SPAN, 1)


def alive(fd: int, attachment: int) -> bool:
    """Whether the process with an attachment is alive: another description has its lock."""
    return _locked(fd, attachment * _SPAN, 1)


def taken(fd: int, attachment: int) -> bool:
    """Whether the process that has this attachment is alive, or has sent a message that was not yet
    received.
    """
    return _locked(fd, attachment * _SPAN, _SPAN)


def claim(file: ArenaFile, fd: int, attachment: int, *, foreign: bool) -> bool:
    """Clear an attachment and take it.  Return False if it is already taken.

    The whole range is locked meanwhile, so only one process at a time does this.
    """
    if not _set(fd, fcntl.F_WRLCK, attachment * _SPAN, _SPAN):
        return False
    file.clear_holds(attachment)
    if attachment >= FIRST_FOREIGN:
        file.map[_MARKS + attachment - FIRST_FOREIGN] = foreign
    # The first byte stays locked, which marks the process as alive.  The others are unlocked, so
    # that other descriptions can lock them as in-flight leases.
    _set(fd, fcntl.F_UNLCK, attachment * _SPAN + 1, _SPAN - 1)
    return True


def leave(file: ArenaFile, fd: int, attachment: int) -> None:
    """Release a claimed attachment, which must no longer hold blocks."""
    if attachment >= FIRST_FOREIGN:
        # Cleared before unlocking, because the next process that claims the number sets the mark.
        file.map[_MARKS + attachment - FIRST_FOREIGN] = 0
    _set(fd, fcntl.F_UNLCK, attachment * _SPAN, 1)


def clear_dead(file: ArenaFile, fd: int, own: int) -> bool:
    """Clear the attachments of foreign processes that have ended.  Return whether there were any.

    ``own`` is the caller's attachment.  Its lock does not prevent the caller's own claim.
    """
    marks = file.map[_MARKS : _MARKS + HOLDS - FIRST_FOREIGN]
    found = False
    at = marks.find(1)
    while at >= 0:
        attachment = FIRST_FOREIGN + at
        # The claim fails if the process is alive, because it has the lock.
        if attachment != own and claim(file, fd, attachment, foreign=True):
            leave(file, fd, attachment)
            found = True
        at = marks.find(1, at + 1)
    return found


# -- in-flight leases -------------------------------------------------------------------------


def open_lease(fd: int, attachment: int, number: int) -> int:
    """Return a descriptor that locks the in-flight lease of this number (from 1 on).

    Raises:
        OSError: no descriptor is left, or /proc is missing.
    """
    lease = reopen(fd)
    _set(lease, fcntl.F_WRLCK, attachment * _SPAN + number, 1)
    return lease


def out(fd: int, attachment: int, number: int) -> bool:
    """Whether an in-flight lease is still open in a process or a message."""
    return _locked(fd, attachment * _SPAN + number, 1)
