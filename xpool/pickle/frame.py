"""The layout of a message that carries buffers beside its pickle.

::

    b"\\x01"  3 spare bytes  u32 count  u64 length x (1 + count)  pickle  buffer  buffer ...

All numbers are little-endian.  The first length is that of the pickle.  Each buffer begins
at a multiple of `ALIGN` from the start of the message.  A message without buffers is a
plain pickle instead: its first byte is `PLAIN`, the PROTO opcode.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pickle import PickleBuffer

from xpool.memory.fresh import LARGE, fresh

__all__ = ["ALIGN", "FRAMED", "PLAIN", "pack", "unpack"]

PLAIN = 0x80
FRAMED = 0x01
ALIGN = 16

_HEAD = struct.Struct("<B3xI")


def pack(chunks: Sequence[bytes], buffers: Sequence[PickleBuffer]) -> bytes | memoryview:
    """Join the pieces of a pickle and its buffers; every byte is copied once."""
    views = [buffer.raw() for buffer in buffers]
    lengths = [sum(map(len, chunks)), *(view.nbytes for view in views)]
    head = _HEAD.pack(FRAMED, len(views)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    parts: list[bytes | memoryview] = [head, *chunks]
    size = len(head) + lengths[0]
    for view in views:
        pad = -size % ALIGN
        parts.append(bytes(pad))
        parts.append(view)
        size += pad + view.nbytes
    if size < LARGE:
        return b"".join(parts)
    message = memoryview(fresh(size))
    at = 0
    for part in parts:
        message[at : at + len(part)] = part
        at += len(part)
    return message


def unpack(message: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return the pickle and the buffers, as slices of the message.

    Raises:
        ValueError: the message is cut short or is not a framed one.
    """
    size = len(message)
    if size < _HEAD.size or message[0] != FRAMED:
        raise ValueError("not a message of xpool: neither a pickle nor a framed table")
    _, count = _HEAD.unpack_from(message)
    start = _HEAD.size + 8 * (1 + count)
    if size < start:
        raise ValueError("a message of xpool was cut short in its table")
    lengths = struct.unpack_from(f"<{1 + count}Q", message, _HEAD.size)
    pickled = message[start : start + lengths[0]]
    end = start + lengths[0]
    buffers = []
    for length in lengths[1:]:
        begin = end + -end % ALIGN
        end = begin + length
        buffers.append(message[begin:end])
    if size < end:
        raise ValueError(f"a message of xpool was cut short: {size} bytes of {end}")
    return pickled, buffers
