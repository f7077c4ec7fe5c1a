"""All sockets of xpool.  No other module makes one (`tests/layout` checks that).

A new socket object has the program's `socket.setdefaulttimeout`, and if there is one, its
descriptor does not block.  xpool's sockets have no such time limit: the code that waits states its
own.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def pair(kind: int) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that block."""
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    without_limit(one)
    without_limit(other)
    return one, other


def on(fd: int) -> socket.socket:
    """Return a socket that owns the descriptor ``fd``, and blocks."""
    return without_limit(socket.socket(fileno=fd))


def on_copy(fd: int) -> socket.socket:
    """Return a socket that owns a duplicate of the descriptor ``fd``, and blocks."""
    return on(os.dup(fd))


@contextlib.contextmanager
def borrowed(fd: int, kind: int) -> Iterator[socket.socket]:
    """Provide a socket object for a descriptor that does not block, and that stays open."""
    sock = socket.socket(socket.AF_UNIX, kind, 0, fd)
    try:
        if sock.gettimeout() is not None:
            sock.settimeout(0.0)
        yield sock
    finally:
        sock.detach()


def without_limit(sock: socket.socket) -> socket.socket:
    """Let a socket block; return it."""
    if sock.gettimeout() is not None:
        sock.settimeout(None)
    return sock
