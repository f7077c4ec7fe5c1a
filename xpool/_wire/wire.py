"""The format of frames, in both directions.

Both ends run the same build of the same code on the same machine, so frames carry no version.  The
handshake still compares `WIRE`, since a worker's import path may find another xpool.

To a worker::

    kind u8, count u32, size u64 | body of `size` bytes
    TASKS   count items: func u64, count sizes u64, then the payloads
    TIMED   as TASKS, for items with a time limit: the worker notes when it begins each
    FUNC    func u64, mode u8, payload of the function
    FORGET  count function numbers u64
    STOP    empty body
    BOOT    the first frame: a pickled dict of builtins for `xpool._worker.entry`

From a worker::

    number u32, kind u8, errors u8, size u64, count u32, mark u64, nanos u64 | `size` bytes
    number  of the message, from 1. Other bytes here are not the worker's: a task has written to the
            pipe, perhaps when nothing was to come. They must not be read as the next message.
    ANSWER  `count` answers lie in the outbox, which now ends at `mark`.  If size > 0, the body is
            one more answer after them (an entry without its size).  `errors`: bit 0, some answers
            in the outbox are errors or name blocks of the arena; bit 1, the body is an error;
            bit 2, that error's task may be tried again.  `nanos`: time spent on all of these.
    SKIPPED the worker did not begin `count` items, as told
    READY   body: wire u32, mapped u8: its version of this format, and whether it has the arena
    FAILED  body: size u32, then text of that size, the reason why it could not start; then the
            reason as a pickled exception, which the parent unpickles when a caller asks for it

Between a worker of a `P2PPool` and its parent, packets on the worker's control socket::

    WANTED  peer u32, ended u32, known u64: request for a channel to a peer; `known` is the number
            of the last channel that the worker knows, `ended` whether that has ended
    LINK    peer u32, error u32, serial u64: a channel, whose descriptor comes along, or an errno

An entry in the outbox, and in the body of several answers: size u32 (top bit: it is an error),
payload.  Answers have no names: they come in the order in which the worker was given the items.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a string.

import struct
from typing import NamedTuple

Parts = list[bytes | memoryview]
"""The pieces of a frame, to be written one after the other."""

WIRE = 3

STEPPED_ASIDE = 75
"""Exit code of a stand-in (`_worker/provisional`) that leaves its first task to its successor."""

# `_worker/entry` has a copy of the first, since it may not import this module.
TO_WORKER = struct.Struct("<BxxxIQ")
TO_PARENT = struct.Struct("<IBBxxQIxxxxQQ")
WANTED = LINK = struct.Struct("<IIQ")
# TO_WORKER and the table of a single item in one struct: one `pack` makes the head of a call.
_ONE_TASK = struct.Struct("<BxxxIQQQ")
FUNC_HEAD = struct.Struct("<QB")
GREETING = struct.Struct("<I?")
U64 = struct.Struct("<Q")
ENTRY = struct.Struct("<I")
# Larger than any size in the outbox: its answers are small (`SMALL` in _worker/protocol).
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
    """The reason why a worker could not start: one line of text, and the pickled exception."""

    line: str
    pickled: bytes | memoryview

    def packed(self) -> bytes:
        line = self.line.encode(errors="backslashreplace")
        return ENTRY.pack(len(line)) + line + self.pickled

    @classmethod
    def unpacked(cls, body: bytes | memoryview) -> "Refusal":
        """Undo `packed`; raise an `Exception` for invalid data."""
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
