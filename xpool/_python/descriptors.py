"""Makes descriptors: sockets, anonymous files, and ends that only this process may hold.

No other module makes a socket (`tests/layout` checks that).  A new socket object has the program's
`socket.setdefaulttimeout`, and if there is one, its descriptor does not block.  xpool's sockets
have no such time limit: the code that waits states its own.

Each forked child of the program closes its copies of the descriptors that are `owned`.  Such a
descriptor is one end of a pipe or socket, and its end is an event for another process.  For
example, a copy of the writing end of a lifeline would keep a worker alive after its parent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from array import array
from collections.abc import Iterator

from xpool._python import at_fork


def pair(kind: int) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that block."""
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    return without_limit(one), without_limit(other)


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


_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def receive(
    sock: socket.socket, nbytes: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], bool]:
    """Receive a message.  Return its data, its descriptors, and whether descriptors were lost.

    The caller must close the descriptors.  They are lost if this process can open no more.
    Programs that this process starts do not inherit them: a copy would hide the end of this
    process.  (`socket.recv_fds` ignores its flags before Python 3.14.)

    Args:
        nbytes: the size in bytes of the longest message.
        most: the largest number of descriptors in a message.
        flags: of `socket.recvmsg`.

    Raises:
        BlockingIOError: no message has arrived at a non-blocking socket.
    """
    size = socket.CMSG_SPACE(4 * most)
    data, found, told, _ = sock.recvmsg(nbytes, size, flags | _CLOSE_ON_EXEC)
    fds = array("i")
    for _, _, numbers in found:
        # Drop an incomplete number at the end, as the example in the documentation of `recvmsg`.
        fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
    if not _CLOSE_ON_EXEC:
        for fd in fds:
            os.set_inheritable(fd, False)
    # The system sets MSG_CTRUNC if it has dropped descriptors (recvmsg(2)).
    return data, list(fds), bool(told & socket.MSG_CTRUNC)


def without_limit(sock: socket.socket) -> socket.socket:
    """Let a socket block; return it."""
    if sock.gettimeout() is not None:
        sock.settimeout(None)
    return sock


def new_file(name: str, flags: int = 0) -> int:
    """Return the descriptor of a new anonymous file, which is closed in programs that are executed.

    Raises:
        OSError: no descriptor is left, or the system refuses such files.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | flags)
    except OSError as exc:
        if exc.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise OSError(
                exc.errno,
                f"memfd_create(2) is refused ({exc.strerror}), perhaps by a seccomp filter; it "
                "makes the memory that pools of processes share: allow it, or use ThreadPool",
            ) from exc
        raise


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
        one, other = (Private(fileno=end.detach()) for end in pair(kind))
        owned(one.fileno())
        owned(other.fileno())
    without_limit(one)
    without_limit(other)
    return one, other


def _after_fork_in_child() -> None:
    for fd in _parents_only:
        with contextlib.suppress(OSError):  # the program has closed it
            os.close(fd)
    _parents_only.clear()


at_fork.at_fork(in_child=_after_fork_in_child)
# Lambdas, because each child makes a new lock.  Ctrl-C may have interrupted `acquire`.
at_fork.at_fork(before=lambda: no_fork.acquire(), in_parent=lambda: no_fork.release())
at_fork.renew(globals(), no_fork=threading.RLock)
