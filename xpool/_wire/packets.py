"""Packets: what a pair of sockets of type ``SOCK_SEQPACKET`` carries, each whole or not at all.

A packet may bring descriptors.  A message that is too long for one lies in an anonymous file, whose
descriptor goes along (`file_with`, `read_file`).
"""

from __future__ import annotations

import os
import socket
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from xpool._memory.buffers import new_buffer
from xpool._memory.system import available_memory
from xpool._python import at_fork

__all__ = ["LONGEST", "file_with", "give_room", "read_file", "receive", "rights"]

LONGEST = 96 * 1024
"""Bytes of a message in a packet, at most: a pickle that is not worth a block, and its table."""

_UNDER_WAY = 1024 * 1024
"""Bytes of packets that may wait in a socket, as asked of the system, which may grant less."""

_RECEIVE = 0
if sys.platform == "linux":
    # Closed on exec from the start: a program that another thread starts must not have them.
    _RECEIVE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


def give_room(writer: socket.socket) -> None:
    """Let many packets wait in a socket."""
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNDER_WAY)


def rights(fds: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    """Return descriptors as `socket.sendmsg` takes them."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]


def receive(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int], bool]:
    """Take a packet out: what it has, its descriptors, and whether some of these were lost.

    The caller closes the descriptors.  They are lost where none was free for them.

    Args:
        nbytes: of the longest packet.
        most: descriptors that may come with one.

    Raises:
        BlockingIOError: there is no packet.
    """
    data, found, flags, _ = sock.recvmsg(nbytes, socket.CMSG_SPACE(4 * most), _RECEIVE)
    fds = array("i")
    for _, _, numbers in found:
        # A number that was cut short at the end is none, as in Python's example of `recvmsg`.
        fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
    # recvmsg(2): MSG_CTRUNC where descriptors were dropped.
    return data, list(fds), bool(flags & socket.MSG_CTRUNC)


_files: set[int] = set()  # that are about to be sent; a forked child must not keep them


@contextmanager
def file_with(message: bytes | memoryview) -> Iterator[int]:
    """Have an anonymous file that has these bytes; gives its descriptor.

    Raises:
        MemoryError: the machine has no memory for it.
    """
    # Asked first: such a file has no limit; where memory runs out, the kernel ends some process.
    if len(message) > available_memory():
        raise MemoryError(
            f"there is no memory for a message of {len(message)} bytes; send smaller objects, or "
            "let go of what was received"
        )
    fd = os.memfd_create("xpool-message", os.MFD_CLOEXEC)
    _files.add(fd)
    try:
        view = memoryview(message)
        # write(2) takes a little less than 2 GiB at once.
        while view:
            view = view[os.write(fd, view) :]
        yield fd
    finally:
        # Struck off before it is closed: the number may be another file's in a child of a fork.
        _files.remove(fd)
        os.close(fd)


def read_file(fd: int, size: int) -> memoryview:
    """Read the message of a file, from its beginning, whoever else has read it.

    Raises:
        ValueError: the file is shorter than ``size``.
    """
    whole = memoryview(new_buffer(size))
    at = 0
    while at < size:
        # At a place of its own: the descriptor's is the same for all who have got a copy of it.
        got = os.preadv(fd, [whole[at:]], at)
        if not got:
            raise ValueError(f"the file of a message has {at} bytes instead of {size}")
        at += got
    return whole


def _after_fork_in_child() -> None:
    for fd in _files:
        os.close(fd)
    _files.clear()


at_fork.at_fork(in_child=_after_fork_in_child)
