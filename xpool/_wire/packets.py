"""Packets of a pair of ``SOCK_SEQPACKET`` sockets.  Each arrives whole or not at all.

A packet may carry descriptors.  A message that is too long for a packet lies in an anonymous file,
and the packet carries its descriptor (`file_with`, `read_file`).
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
from xpool._wire.pipes import write_all

LONGEST = 96 * 1024
"""Largest message in a packet, in bytes: a pickle too small for a block, and its table."""

_UNDER_WAY = 1024 * 1024
"""Bytes of packets that may wait in a socket.  The system may grant less."""

_RECEIVE = 0
if sys.platform == "linux":
    # Descriptors are closed on exec: a program that another thread starts must not inherit them.
    _RECEIVE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


def give_room(writer: socket.socket) -> None:
    """Enlarge the send buffer of a socket, so that many packets can wait in it."""
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNDER_WAY)


def rights(fds: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]


def receive(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int], bool]:
    """Receive a packet; return its data, its descriptors, and whether descriptors were lost.

    The caller closes the descriptors.  They are lost if this process has no free ones.

    Args:
        nbytes: the size of the longest packet.
        most: the largest number of descriptors in a packet.

    Raises:
        BlockingIOError: there is no packet.
    """
    data, found, flags, _ = sock.recvmsg(nbytes, socket.CMSG_SPACE(4 * most), _RECEIVE)
    fds = array("i")
    for _, _, numbers in found:
        # Drop an incomplete number at the end, as Python's example of `recvmsg` does.
        fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
    # The system sets MSG_CTRUNC when it dropped descriptors (recvmsg(2)).
    return data, list(fds), bool(flags & socket.MSG_CTRUNC)


_files: set[int] = set()  # files about to be sent; a forked child closes them


@contextmanager
def file_with(message: bytes | memoryview) -> Iterator[int]:
    """Provide the descriptor of an anonymous file that contains these bytes.

    Raises:
        MemoryError: the machine has too little memory for it.
    """
    # Check first: such a file has no limit, and the kernel ends some process if memory runs out.
    if len(message) > available_memory():
        raise MemoryError(
            f"there is no memory for a message of {len(message)} bytes; send smaller objects, or "
            "let go of what was received"
        )
    fd = os.memfd_create("xpool-message", os.MFD_CLOEXEC)
    _files.add(fd)
    try:
        write_all(fd, [message])
        yield fd
    finally:
        # Remove before closing: a fork in between would close another file with the same number.
        _files.remove(fd)
        os.close(fd)


def read_file(fd: int, size: int) -> memoryview:
    """Read the message in a file from its beginning; others may have read it too.

    Raises:
        ValueError: the file is shorter than ``size``.
    """
    whole = memoryview(new_buffer(size))
    at = 0
    while at < size:
        # At an explicit offset: all copies of the descriptor share one file position.
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
