"""Which process has which part of an arena's file, told by the kernel: a dead process keeps none.

A process that maps the file has an **attachment**: the number of a region, and of a column in the
tables.  The process that made the file gives its workers theirs and clears them (`Arena.reclaim`).
For one that comes to the file by a message, nobody's worker, it is a **foreign arena**, and it
takes one of the upper numbers itself.  A number is taken by a lock on bytes of the file, one of
those that belong to open file descriptions (``F_OFD_SETLK``): the kernel drops it when the last
descriptor of the description is closed, in whatever way the process ended, and also when the
descriptor was not in a process but in a message on its way.

So messages have locks too.  A sender opens the file anew for a message, locks a byte that stands
for it, its **in-flight lease**, and sends the descriptor along.  As long as the byte is locked the
message is on its way, or its receiver is about to take hold of the blocks.  These bytes lie in the
range of their sender's number, and nobody clears or takes a number in whose range something is
locked: what a process has sent outlives it.

Offsets of locks have nothing to do with what lies at these offsets in the file::

    number << 40          the process with this attachment lives
    (number << 40) + n    its in-flight lease n has not come back
"""

from __future__ import annotations

import errno
import os
import struct
import sys

from xpool._memory.layout import HOLDS, File

if sys.platform == "linux":
    import fcntl

__all__ = [
    "FIRST_FOREIGN",
    "alive",
    "claim",
    "clear_dead",
    "open_lease",
    "out",
    "reopen",
    "attach",
    "taken",
]

FIRST_FOREIGN = 224
"""Foreign arenas take numbers from the last down to this one, workers from the first on."""

# Bytes of offsets for each number: 480 spans stay far below 2**63, the end of all offsets.
_SPAN = 1 << 40
# `struct flock` of a 64-bit system (fcntl(2)): type, whence, start, length, and a pid that has to
# be 0 for such locks.
_FLOCK = struct.Struct("@hhqqi4x")
_MARKS = 8 * HOLDS  # behind the ledger: a byte for each upper attachment that is not cleared yet


def reopen(fd: int) -> int:
    """Return a descriptor of a new open file description of the same file.

    Raises:
        OSError: no descriptor is left, or there is no /proc.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _set(fd: int, kind: int, start: int, length: int) -> bool:
    request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as exc:
        # fcntl(2): either may say that somebody else has a lock there.
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _locked(fd: int, start: int, length: int) -> bool:
    """Whether another description than this has a lock there."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    # The kernel writes into the request: whose lock is in the way, or that none is.
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


# -- attachments ------------------------------------------------------------------------------


def attach(fd: int, attachment: int) -> None:
    """Say that an attachment is alive as long as this description is open."""
    _set(fd, fcntl.F_WRLCK, attachment * _SPAN, 1)


def alive(fd: int, attachment: int) -> bool:
    """Whether the process with an attachment lives, by what other descriptions than ours say."""
    return _locked(fd, attachment * _SPAN, 1)


def taken(fd: int, attachment: int) -> bool:
    """Whether the process in an attachment lives, or messages of it are on their way."""
    return _locked(fd, attachment * _SPAN, _SPAN)


def claim(file: File, fd: int, attachment: int, *, foreign: bool) -> bool:
    """Clear an attachment if it is not taken, and take it; False when it is.

    Whoever does this has the whole span locked, so that no two do it at once.
    """
    if not _set(fd, fcntl.F_WRLCK, attachment * _SPAN, _SPAN):
        return False
    file.clear_holds(attachment)
    if attachment >= FIRST_FOREIGN:
        file.map[_MARKS + attachment - FIRST_FOREIGN] = foreign
    # The first byte stays locked: it says that the process lives.  Its in-flight leases are locked
    # by other descriptions, for which the rest must be free.
    _set(fd, fcntl.F_UNLCK, attachment * _SPAN + 1, _SPAN - 1)
    return True


def leave(file: File, fd: int, attachment: int) -> None:
    """Give an attachment away that one has claimed and in which one holds nothing any more."""
    if attachment >= FIRST_FOREIGN:
        # Before the lock goes: whoever claims the number next sets the mark anew.
        file.map[_MARKS + attachment - FIRST_FOREIGN] = 0
    _set(fd, fcntl.F_UNLCK, attachment * _SPAN, 1)


def clear_dead(file: File, fd: int, own: int) -> bool:
    """Clear the attachments of processes that opened it and ended; return whether there were any.

    ``own``: the caller's attachment, which is not locked against himself.
    """
    marks = file.map[_MARKS : _MARKS + HOLDS - FIRST_FOREIGN]
    found = False
    at = marks.find(1)
    while at >= 0:
        attachment = FIRST_FOREIGN + at
        # A living one is not claimed: its lock is in the way.
        if attachment != own and claim(file, fd, attachment, foreign=True):
            leave(file, fd, attachment)
            found = True
        at = marks.find(1, at + 1)
    return found


# -- in-flight leases -------------------------------------------------------------------------


def open_lease(fd: int, attachment: int, number: int) -> int:
    """Return a descriptor of the file that is the in-flight lease of this number (from 1 on).

    Raises:
        OSError: no descriptor is left, or there is no /proc.
    """
    lease = reopen(fd)
    _set(lease, fcntl.F_WRLCK, attachment * _SPAN + number, 1)
    return lease


def out(fd: int, attachment: int, number: int) -> bool:
    """Whether somebody still has an in-flight lease."""
    return _locked(fd, attachment * _SPAN + number, 1)
