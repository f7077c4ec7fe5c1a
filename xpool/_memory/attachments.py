"""Attachments: which process has which part of an arena's file, recorded by locks of the kernel.

A process that maps the file has an **attachment**: the number of a region, and of a column in the
tables.  The process that made the file gives attachments to its workers and clears them
(`Arena.reclaim`).  A process that receives the file in a message uses it as a **foreign arena**,
and takes one of the upper numbers itself.  To take a number is to lock bytes of the file by a lock
of the open file description (``F_OFD_SETLK``).  The kernel drops the lock when the last descriptor
of the description is closed, however the process ended, and also when the descriptor was in a
message.

So messages have locks, too.  A sender opens the file again for a message, locks a byte that stands
for the message, its **in-flight lease**, and sends the descriptor along.  While the byte is locked,
the message is in transit, or its receiver is about to hold the blocks.  These bytes are in the
range of the sender's number, and a number in whose range a byte is locked is neither cleared nor
taken: so messages outlive their sender.

Offsets of locks are unrelated to the data at these offsets in the file::

    number << 40          the process with this attachment lives
    (number << 40) + n    its in-flight lease n has not come back
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
"""Foreign arenas take numbers from the last down to this one, workers from the first on."""

# Bytes of offsets for each number: 480 spans stay far below 2**63, the end of all offsets.
_SPAN = 1 << 40
# `struct flock` of a 64-bit system (fcntl(2)): type, whence, start, length, and a pid, which must
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
        # fcntl(2): either error may mean that another description has a lock there.
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
    """Lock an attachment as alive as long as this description is open."""
    _set(fd, fcntl.F_WRLCK, attachment * _SPAN, 1)


def alive(fd: int, attachment: int) -> bool:
    """Whether the process with an attachment lives, by the locks of other descriptions."""
    return _locked(fd, attachment * _SPAN, 1)


def taken(fd: int, attachment: int) -> bool:
    """Whether the process with an attachment lives, or messages of it are in transit."""
    return _locked(fd, attachment * _SPAN, _SPAN)


def claim(file: ArenaFile, fd: int, attachment: int, *, foreign: bool) -> bool:
    """Clear an attachment and take it; return False if it is taken already.

    The whole span is locked meanwhile, so no two processes do this at once.
    """
    if not _set(fd, fcntl.F_WRLCK, attachment * _SPAN, _SPAN):
        return False
    file.clear_holds(attachment)
    if attachment >= FIRST_FOREIGN:
        file.map[_MARKS + attachment - FIRST_FOREIGN] = foreign
    # The first byte stays locked, which marks the process as alive.  The rest must be unlocked for
    # its in-flight leases, which other descriptions lock.
    _set(fd, fcntl.F_UNLCK, attachment * _SPAN + 1, _SPAN - 1)
    return True


def leave(file: ArenaFile, fd: int, attachment: int) -> None:
    """Release a claimed attachment, which must hold nothing any more."""
    if attachment >= FIRST_FOREIGN:
        # Before unlocking: the next process that claims the number sets the mark again.
        file.map[_MARKS + attachment - FIRST_FOREIGN] = 0
    _set(fd, fcntl.F_UNLCK, attachment * _SPAN, 1)


def clear_dead(file: ArenaFile, fd: int, own: int) -> bool:
    """Clear the attachments of foreign processes that ended; return whether there were any.

    ``own``: the caller's attachment, whose lock does not exclude the caller.
    """
    marks = file.map[_MARKS : _MARKS + HOLDS - FIRST_FOREIGN]
    found = False
    at = marks.find(1)
    while at >= 0:
        attachment = FIRST_FOREIGN + at
        # The lock of a live process prevents the claim.
        if attachment != own and claim(file, fd, attachment, foreign=True):
            leave(file, fd, attachment)
            found = True
        at = marks.find(1, at + 1)
    return found


# -- in-flight leases -------------------------------------------------------------------------


def open_lease(fd: int, attachment: int, number: int) -> int:
    """Return a descriptor that locks the in-flight lease of this number (from 1 on).

    Raises:
        OSError: no descriptor is left, or there is no /proc.
    """
    lease = reopen(fd)
    _set(lease, fcntl.F_WRLCK, attachment * _SPAN + number, 1)
    return lease


def out(fd: int, attachment: int, number: int) -> bool:
    """Whether an in-flight lease is still open in a process or a message."""
    return _locked(fd, attachment * _SPAN + number, 1)
