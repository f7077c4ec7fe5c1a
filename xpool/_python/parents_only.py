"""Descriptors that only this process may hold: each forked child of the program closes its copies.

Such a descriptor is one end of a pipe or socket, and its end is an event for another process.  For
example, a copy of the writing end of a lifeline would keep a worker alive after its parent.
"""

from __future__ import annotations

import os
import socket
import threading

from xpool._python import at_fork, sockets

# Shared by all pools.  Needs no lock: adding to a set is atomic.
_parents_only: set[int] = set()

no_fork = threading.RLock()
"""Held during a fork, and while descriptors are made and listed, or passed on and closed, so that
no child inherits an unlisted one.  Reentrant, since a finalizer may fork.  The holder waits for
nothing."""


def owned(fd: int) -> int:
    """List a descriptor to be closed in each forked child; return it."""
    _parents_only.add(fd)
    return fd


def disown(fd: int) -> None:
    """Remove a descriptor from the list: its owner closes it."""
    _parents_only.discard(fd)


def close(fd: int) -> None:
    """Close a listed descriptor."""
    # Remove it first: after `close`, another file may get its number, and a forked child would
    # close that file.
    _parents_only.discard(fd)
    os.close(fd)


class Private(socket.socket):
    """A socket that is closed in each forked child of the program; `detach` leaves it so."""

    def close(self) -> None:
        disown(self.fileno())
        super().close()


def private_pair(kind: int) -> tuple[Private, Private]:
    """Return two connected sockets that block, and that forked children do not keep."""
    with no_fork:
        one, other = (Private(fileno=end.detach()) for end in sockets.pair(kind))
        owned(one.fileno())
        owned(other.fileno())
    sockets.without_limit(one)
    sockets.without_limit(other)
    return one, other


def _after_fork_in_child() -> None:
    for fd in _parents_only:
        os.close(fd)
    _parents_only.clear()


at_fork.at_fork(in_child=_after_fork_in_child)
# Lambdas, because each child makes a new lock.  Ctrl-C may have interrupted `acquire`.
at_fork.at_fork(before=lambda: no_fork.acquire(), in_parent=lambda: no_fork.release())
at_fork.renew(globals(), no_fork=threading.RLock)
