"""The format of frames, in both directions.

Both ends usually run the same version of xpool, so frames carry no version.  The handshake compares
`WIRE`, because a worker may import xpool from another path.

To a worker::

    kind u8, count u32, size u64 | body of `size` bytes
    TASKS   count items: func u64, count sizes u64, then the payloads
    TIMED   as TASKS, for items with a time limit: the worker records when it begins each
    FUNC    func u64, mode u8, payload of the function
    FORGET  count function numbers u64
    STOP    empty body
    BOOT    the first frame: a pickled dict of builtins for `xpool._worker.entry`

From a worker::

    number u32, kind u8, errors u8, size u64, count u32, mark u64, nanos u64 | `size` bytes
    number  the number of the message, from 1.  Any other number means that a task has written to
            the pipe: the parent must not take these bytes for a message.
    ANSWER  the outbox contains `count` more answers and now ends at `mark`.  If size > 0, the body
            is one more answer (an entry without its size).  `errors`: bit 0, some answers in the
            outbox are errors or name blocks of the arena; bit 1, the body is an error; bit 2, the
            task of that error may be tried again.  `nanos`: the time that all these tasks took.
    SKIPPED the worker did not begin `count` items, because the parent forbade it
    READY   body: wire u32, mapped u8: the worker's `WIRE`, and whether it has mapped the arena
    FAILED  the worker could not start.  body: size u32, a text of that size with the reason, then
            the reason as a pickled exception, which the parent unpickles when a caller asks for it

Packets on the control socket between a worker of a `P2PPool` and its parent::

    WANTED  peer u32, ended u32, known u64: request for a channel to a peer.  `known` is the number
            of the last channel that the worker knows, `ended` whether this channel has ended.
    LINK    peer u32, error u32, serial u64: a channel, with its descriptor, or an errno

An entry of the outbox, and of a body with several answers, is: size u32 (top bit: it is an error),
payload.  Answers have no numbers: they come in the order in which the worker got the items.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import struct
from typing import NamedTuple

Parts = list[bytes | memoryview]
"""The pieces of a frame, which are written one after the other."""

WIRE = 3

# `_worker/entry` has a copy of this one, because it may not import this module.
TO_WORKER = struct.Struct("<BxxxIQ")
TO_PARENT = struct.Struct("<IBBxxQIxxxxQQ")
WANTED = LINK = struct.Struct("<IIQ")
# TO_WORKER and the table of one item together, so that one `pack` makes the head of a call.
_ONE_TASK = struct.Struct("<BxxxIQQQ")
FUNC_HEAD = struct.Struct("<QB")
GREETING = struct.Struct("<I?")
U64 = struct.Struct("<Q")
ENTRY = struct.Struct("<I")
# Larger than the size of any answer in the outbox (`SMALL` in _worker/protocol).
ERROR_BIT = 0x8000_0000

TASKS, FUNC, FORGET, STOP, BOOT, TIMED = 1, 2, 3, 4, 5, 6
ANSWER, SKIPPED, READY, FAILED = 11, 12, 13, 14
OUTBOX_MIXED, BODY_ERROR, BODY_AGAIN = 1, 2, 4


class Mode:
    """How a function is applied to a payload.  The payload of a call contains its function."""

    CALL = 0  # payload (func, args, kwds)
    EACH = 1  # payload x: func(x)
    STAR = 2  # payload args: func(*args)
    CHUNK = 3  # payload [x, ...]: [func(x), ...]
    STARCHUNK = 4  # payload [args, ...]: [func(*args), ...]


class Refusal(NamedTuple):
    """The reason why a worker could not start: a line of text, and the pickled exception."""

    line: str
    pickled: bytes | memoryview

    def packed(self) -> bytes:
        line = self.line.encode(errors="backslashreplace")
        return ENTRY.pack(len(line)) + line + self.pickled

    @classmethod
    def unpacked(cls, body: bytes | memoryview) -> "Refusal":
        """Return the refusal from which `packed` made ``body``.  Raise an error for other data."""
        end = ENTRY.size + ENTRY.unpack_from(body)[0]
        if end > len(body):
            raise ValueError("the text of a FAILED frame is longer than the frame")
        return cls(bytes(body[ENTRY.size : end]).decode(), body[end:])


def tasks_frame(func: int, items: list[bytes | memoryview], kind: int = TASKS) -> Parts:
    n = len(items)
    if n == 1:
        size = len(items[0])
        return [_ONE_TASK.pack(kind, 1, 16 + size, func, size), items[0]]
    sizes = struct.pack(f"<Q{n}Q", func, *map(len, items))
    size = len(sizes) + sum(map(len, items))
    return [TO_WORKER.pack(kind, n, size) + sizes, *items]


def func_frame(func: int, mode: int, payload: bytes | memoryview) -> Parts:
    head = FUNC_HEAD.pack(func, mode)
    return [TO_WORKER.pack(FUNC, 1, len(head) + len(payload)) + head, payload]


def forget_frame(funcs: list[int]) -> Parts:
    n = len(funcs)
    return [TO_WORKER.pack(FORGET, n, 8 * n) + struct.pack(f"<{n}Q", *funcs)]


def boot_frame(body: bytes) -> Parts:
    return [TO_WORKER.pack(BOOT, 1, len(body)), body]


def stop_frame() -> Parts:
    return [TO_WORKER.pack(STOP, 0, 0)]
