"""Records, by locks of the kernel, which process has which part of an arena's file.

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
import os
import struct
import sys

from xpool._memory.layout import HOLDS, ArenaFile

if sys.platform == "linux":
    import fcntl

FIRST_FOREIGN = 224
"""Foreign arenas take the highest free number down to this one.  Workers get the lowest one."""

# The range of offsets of each number.  480 ranges stay far below 2**63, the end of all offsets.
_SPAN = 1 << 40
# `struct flock` of a 64-bit system (fcntl(2)): type, whence, start, length, and a pid, always 0.
_FLOCK = struct.Struct("@hhqqi4x")
_MARKS = 8 * HOLDS  # after the ledger: a byte for each upper attachment, 1 until it is cleared


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
    """Whether the process with an attachment is alive, or messages of it are in transit."""
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
    """Clear the attachments of foreign processes that have ended.  Return whether any had.

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
