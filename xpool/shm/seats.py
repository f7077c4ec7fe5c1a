"""Who sits where in an arena's file, told by the kernel: a dead process keeps no seat.

The process that made the file gives its workers their seats and clears them (`Arena.bury`).  A
process that comes to the file by a queue is a **guest**, nobody's worker: it takes one of the upper
seats itself.  Seats are taken by a lock on bytes of the file, one of those that belong to open file
descriptions (``F_OFD_SETLK``): the kernel lets go of it when the last descriptor of the description
is closed, in whatever way the process ended, and also when the descriptor was not in a process but
in a message on its way.

So messages have locks too.  A sender opens the file anew for a message, locks a byte that stands
for it, its **ticket**, and sends the descriptor along.  As long as the byte is locked the message
is on its way, or its receiver is about to take hold of the blocks.  Tickets lie in the span of
their sender's seat, and nobody clears or takes a seat in whose span something is locked: what a
process has sent outlives it.

Offsets of locks have nothing to do with what lies at these offsets in the file::

    seat << 40          the process in this seat lives
    (seat << 40) + n    its ticket n has not come back
"""

from __future__ import annotations

import errno
import os
import struct
import sys

from xpool.shm.layout import HOLDS, File

if sys.platform == "linux":
    import fcntl

__all__ = ["FIRST_GUEST", "alive", "claim", "clear_dead", "issue", "out", "reopen", "sit", "taken"]

FIRST_GUEST = 224
"""Guests sit down from the last seat to this one, workers from the first on."""

_SPAN = 1 << 40
_FLOCK = struct.Struct("@hhqqi4x")
_MARKS = 8 * HOLDS  # behind the ledger: a byte for each seat of a guest that is not cleared yet


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
        if exc.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _locked(fd: int, start: int, length: int) -> bool:
    """Whether another description than this has a lock there."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, request)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


# -- seats -------------------------------------------------------------------------------------


def sit(fd: int, seat: int) -> None:
    """Say that a seat is alive as long as this description is open."""
    _set(fd, fcntl.F_WRLCK, seat * _SPAN, 1)


def alive(fd: int, seat: int) -> bool:
    """Whether the process in a seat lives, as far as another description than ours says so."""
    return _locked(fd, seat * _SPAN, 1)


def taken(fd: int, seat: int) -> bool:
    """Whether the process in a seat lives, or messages of it are on their way."""
    return _locked(fd, seat * _SPAN, _SPAN)


def claim(file: File, fd: int, seat: int, *, guest: bool) -> bool:
    """Clear a seat if it is not taken, and take it; False when it is.

    Whoever does this has the whole span locked, so that no two do it at once.
    """
    if not _set(fd, fcntl.F_WRLCK, seat * _SPAN, _SPAN):
        return False
    file.clear_holds(seat)
    if seat >= FIRST_GUEST:
        file.map[_MARKS + seat - FIRST_GUEST] = guest
    _set(fd, fcntl.F_UNLCK, seat * _SPAN + 1, _SPAN - 1)
    return True


def leave(file: File, fd: int, seat: int) -> None:
    """Give a seat away that one has claimed and in which one holds nothing any more."""
    if seat >= FIRST_GUEST:
        file.map[_MARKS + seat - FIRST_GUEST] = 0
    _set(fd, fcntl.F_UNLCK, seat * _SPAN, 1)


def clear_dead(file: File, fd: int, own: int) -> bool:
    """Clear the seats of guests that have ended; return whether there were any.

    ``own``: the caller's seat, which is not locked against himself.
    """
    marks = file.map[_MARKS : _MARKS + HOLDS - FIRST_GUEST]
    found = False
    at = marks.find(1)
    while at >= 0:
        seat = FIRST_GUEST + at
        if seat != own and claim(file, fd, seat, guest=True):
            leave(file, fd, seat)
            found = True
        at = marks.find(1, at + 1)
    return found


# -- tickets -----------------------------------------------------------------------------------


def issue(fd: int, seat: int, number: int) -> int:
    """Return a descriptor of the file that is the ticket of this number (from 1 on).

    Raises:
        OSError: no descriptor is left, or there is no /proc.
    """
    ticket = reopen(fd)
    _set(ticket, fcntl.F_WRLCK, seat * _SPAN + number, 1)
    return ticket


def out(fd: int, seat: int, number: int) -> bool:
    """Whether somebody still has a ticket."""
    return _locked(fd, seat * _SPAN + number, 1)
