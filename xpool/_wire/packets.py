"""Packets of a pair of ``SOCK_SEQPACKET`` sockets.  A packet arrives whole or not at all.

A packet may carry descriptors.  If a message is too long for a packet, it is written to an
anonymous file, and the packet carries the file's descriptor (`file_with`, `read_file`).
"""

from __future__ import annotations

import os
import socket
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


def give_room(writer: socket.socket) -> None:
    """Enlarge the send buffer of a socket, so that many packets can wait in it."""
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNDER_WAY)


def rights(fds: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]


def receive(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int], bool]:
    """Receive a packet, as `descriptors.receive`, without waiting for one."""
    return descriptors.receive(sock, nbytes, most, socket.MSG_DONTWAIT)


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


def read_file(fd: int) -> memoryview:
    """Read the message in a file, which other processes may read, too.

    Raises:
        ValueError: the file has become shorter meanwhile.
    """
    size = os.fstat(fd).st_size
    whole = memoryview(new_buffer(size))
    at = 0
    while at < size:
        # The offset is explicit, because all copies of the descriptor share one file position.
        got = os.preadv(fd, [whole[at:]], at)
        if not got:
            raise ValueError(f"the file of a message has {at} bytes instead of {size}")
        at += got
    return whole
