"""Packets of a pair of ``SOCK_SEQPACKET`` sockets.  A packet arrives whole or not at all.

A packet may carry descriptors.  If a message is too long for a packet, it is written to an
anonymous file, and the packet carries the file's descriptor (`file_with`, `read_file`).
"""

from __future__ import annotations

import os
import socket
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from xpool._memory.system import available_memory, new_buffer
from xpool._python import descriptors
from xpool._python.descriptors import new_file
from xpool._wire.wire import write_all

LONGEST = 96 * 1024
"""The size in bytes of the largest message in a packet.  A larger pickle gets a block."""

_UNDER_WAY = 1024 * 1024
"""How many bytes of packets may wait in a socket.  The system may allow fewer."""

_RECEIVE = 0
if sys.platform == "linux":
    # Descriptors are closed on exec, so that a program started by another thread has none of them.
    _RECEIVE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


def give_room(writer: socket.socket) -> None:
    """Enlarge the send buffer of a socket, so that many packets can wait in it."""
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNDER_WAY)


def rights(fds: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]


def receive(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int], bool]:
    """Receive a packet.  Return its data, its descriptors, and whether descriptors were lost.

    The caller must close the descriptors.  They are lost if this process can open no more.

    Args:
        nbytes: the size in bytes of the longest packet.
        most: the largest number of descriptors in a packet.

    Raises:
        BlockingIOError: no packet has arrived.
    """
    data, found, flags, _ = sock.recvmsg(nbytes, socket.CMSG_SPACE(4 * most), _RECEIVE)
    fds = array("i")
    for _, _, numbers in found:
        # Drop an incomplete number at the end, as the example in the documentation of `recvmsg`.
        fds.frombytes(numbers[: len(numbers) - len(numbers) % fds.itemsize])
    # The system sets MSG_CTRUNC if it has dropped descriptors (recvmsg(2)).
    return data, list(fds), bool(flags & socket.MSG_CTRUNC)


@contextmanager
def file_with(message: bytes | memoryview) -> Iterator[int]:
    """Provide, in the block, the descriptor of an anonymous file that contains these bytes.

    Raises:
        MemoryError: the machine has too little memory for the file.
    """
    # The size of such a file has no limit, and the kernel kills a process if memory is used up.
    if len(message) > available_memory():
        raise MemoryError(
            f"there is no memory for a message of {len(message)} bytes; send smaller objects, or "
            "let go of what was received"
        )
    fd = descriptors.owned(new_file("xpool-message"))
    try:
        write_all(fd, [message])
        yield fd
    finally:
        descriptors.close(fd)


def read_file(fd: int, size: int) -> memoryview:
    """Read a message of ``size`` bytes from a file, which other processes may read, too.

    Raises:
        ValueError: the file is shorter than ``size``.
    """
    whole = memoryview(new_buffer(size))
    at = 0
    while at < size:
        # The offset is explicit, because all copies of the descriptor share one file position.
        got = os.preadv(fd, [whole[at:]], at)
        if not got:
            raise ValueError(f"the file of a message has {at} bytes instead of {size}")
        at += got
    return whole
