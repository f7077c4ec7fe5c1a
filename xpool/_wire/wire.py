"""The wire: what a frame looks like, in both directions.

Both ends are the same build of the same code on the same machine, so the format has no version;
the handshake compares `WIRE` all the same, since a worker's import path may find another xpool.

To a worker::

    kind u8, count u32, size u64 | body of `size` bytes
    TASKS   count items: func u64, count sizes u64, then the payloads
    TIMED   as TASKS, for items with a limit of time: the worker notes when it begins each
    FUNC    func u64, mode u8, payload of the function
    FORGET  count function numbers u64
    STOP    nothing
    BOOT    first of all: what `xpool._worker.entry` needs, a pickled dict of builtins

From a worker::

    kind u8, errors u8, count u32, size u64, mark u64, nanos u64 | `size` bytes
    ANSWER  `count` answers lie in the outbox, which now ends at `mark`; after them one more in the
            body when size > 0 (an entry without its size).  `errors`: bit 0, some in the outbox
            are errors, or name blocks of the arena; bit 1, the body is an error; bit 2, one of
            those that are tried again.  `nanos`: time spent on all of these.
    SKIPPED `count` items were not begun, as told
    READY   body: wire u32, mapped u8: the version that it speaks, and whether it has the arena
    FAILED  body: size u32, as many bytes of text: what kept it from starting; then the same as a
            pickled exception, which the parent leaves closed until a caller asks for it

Between a worker of a `P2PPool` and its parent, packets on the worker's control::

    WANTED  peer u32, ended u32, known u64: a channel to a peer, please; the last that I know of
            has this number, and has ended or not
    LINK    peer u32, error u32, serial u64: here it is (a descriptor goes along), or an errno

An entry in the outbox, and in the body of several answers: size u32 (top bit: it is an error),
payload.  Answers come in the order in which the worker was given the items: no names are needed.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import struct
from typing import NamedTuple

__all__ = [
    "ANSWER", "BODY_AGAIN", "BODY_ERROR", "BOOT", "ENTRY", "ERROR_BIT", "FAILED", "FORGET",
    "FUNC", "FUNC_HEAD", "GREETING", "LINK", "OUTBOX_MIXED", "READY", "SKIPPED",
    "STEPPED_ASIDE", "STOP", "TASKS", "TIMED", "TO_PARENT", "TO_WORKER", "U64", "WANTED",
    "WIRE", "Mode", "Parts", "Refusal", "boot_frame", "forget_frame", "func_frame",
    "stop_frame", "tasks_frame",
]  # fmt: skip

Parts = list[bytes | memoryview]
"""A frame, as the pieces that are written one after the other."""

WIRE = 2

STEPPED_ASIDE = 75
"""Exit code of a stand-in (`_worker/provisional`) whose first task is for its successor to run."""

# The size stands in bytes 8 to 16 of both: `FrameReader` looks for it there.  `_worker/entry` has
# the first once more, since it may not import this.
TO_WORKER = struct.Struct("<BxxxIQ")
TO_PARENT = struct.Struct("<BBxxIQQQ")
WANTED = LINK = struct.Struct("<IIQ")
# TO_WORKER, and the table of a single item: a call is one `pack`.
_ONE_TASK = struct.Struct("<BxxxIQQQ")
FUNC_HEAD = struct.Struct("<QB")
GREETING = struct.Struct("<I?")
U64 = struct.Struct("<Q")
ENTRY = struct.Struct("<I")
# More than any size there: an answer in the outbox is small (`SMALL` in _worker/protocol).
ERROR_BIT = 0x8000_0000

TASKS, FUNC, FORGET, STOP, BOOT, TIMED = 1, 2, 3, 4, 5, 6
ANSWER, SKIPPED, READY, FAILED = 11, 12, 13, 14
OUTBOX_MIXED, BODY_ERROR, BODY_AGAIN = 1, 2, 4


class Mode:
    """How a function is applied to a payload; a call carries its own function."""

    CALL = 0  # payload (func, args, kwds)
    EACH = 1  # payload x: func(x)
    STAR = 2  # payload args: func(*args)
    CHUNK = 3  # payload [x, ...]: [func(x), ...]
    STARCHUNK = 4  # payload [args, ...]: [func(*args), ...]


class Refusal(NamedTuple):
    """Why a worker could not start: a line for people, and the exception, pickled."""

    line: str
    pickled: bytes | memoryview

    def packed(self) -> bytes:
        """Return the body of a FAILED frame."""
        line = self.line.encode(errors="backslashreplace")
        return ENTRY.pack(len(line)) + line + self.pickled

    @classmethod
    def unpacked(cls, body: bytes | memoryview) -> "Refusal":
        """Return what `packed` has made; raise an `Exception` for anything else."""
        end = ENTRY.size + ENTRY.unpack_from(body)[0]
        if end > len(body):
            raise ValueError("the text of a FAILED frame is longer than the frame")
        return cls(bytes(body[ENTRY.size : end]).decode(), body[end:])


def tasks_frame(func: int, items: list[bytes | memoryview], kind: int = TASKS) -> Parts:
    """Return the parts of a TASKS or TIMED frame."""
    n = len(items)
    if n == 1:
        size = len(items[0])
        return [_ONE_TASK.pack(kind, 1, 16 + size, func, size), items[0]]
    sizes = struct.pack(f"<Q{n}Q", func, *map(len, items))
    size = len(sizes) + sum(map(len, items))
    return [TO_WORKER.pack(kind, n, size) + sizes, *items]


def func_frame(func: int, mode: int, payload: bytes | memoryview) -> Parts:
    """Return the parts of a FUNC frame."""
    head = FUNC_HEAD.pack(func, mode)
    return [TO_WORKER.pack(FUNC, 1, len(head) + len(payload)) + head, payload]


def forget_frame(funcs: list[int]) -> Parts:
    """Return the parts of a FORGET frame."""
    n = len(funcs)
    return [TO_WORKER.pack(FORGET, n, 8 * n) + struct.pack(f"<{n}Q", *funcs)]


def boot_frame(body: bytes) -> Parts:
    """Return the parts of a BOOT frame."""
    return [TO_WORKER.pack(BOOT, 1, len(body)), body]


def stop_frame() -> Parts:
    """Return the parts of a STOP frame."""
    return [TO_WORKER.pack(STOP, 0, 0)]
