"""The form of a message: the options for it (`Layout`), and buffers or blocks besides its pickle.

::

    b"\x01"  u8 flags  u16 more  u32 count  u64 token
    u64 token x more
    (u64 place, u64 length, u32 which, u32 shared) x (1 + count)  inline bytes

All numbers are little-endian.  The first entry of the table is the pickle, the others are its
buffers (protocol 5).  A ``place`` is the name of a block.  ``which`` is the index of the token of
the block's arena.  If ``place`` is `MISSING`, the bytes are inline: they follow the table, and each
buffer begins at a multiple of `ALIGN` from the start of the message.  A message without buffers and
blocks is a plain pickle.  Its first byte is `PLAIN`, the opcode PROTO.

The flag `KEPT` means that the sender keeps the blocks and will send them again, so the receiver
copies them and does not use them in place.  ``shared`` is 1 if both sides use the block (share
mode).  Such a block is never copied.

A pickle, framed or not, may begin with a call that prepares its receiver, see `preparation`.
"""

# No `from __future__ import annotations`: a NamedTuple would compile each type from its text.

import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple

from xpool._memory.arena import MISSING, Arena
from xpool._memory.holds import Block, Holds
from xpool._memory.system import HUGE_PAGES_FROM, new_buffer

INLINE_BELOW = 64 * 1024
"""For fewer bytes than this, a copy in the message costs less than a block of shared memory."""


class Layout(NamedTuple):
    """The options for a message: where its bytes are placed, and how tensors are sent."""

    lessor: Callable[[int], Block | None] | None = None
    """Returns a block of so many bytes, or None.  Without a lessor, all bytes are sent by pipe."""

    arena: Arena | None = None
    """In share mode: the arena to which the storages of tensors are moved.  None: copy mode."""

    named: bool = False
    """In share mode of `dumps`: storages are sent as names of files, as torch shares them."""

    anywhere: bool = False
    """In share mode: descriptors are sent, too, so shared memory may be in any arena."""

    method: str | None = None
    """In share mode: the only kind of device whose tensors are shared; None: all kinds."""

    keep: Callable[[Any, Any], Any] | None = None
    """In share mode, in a worker: keeps a tensor on a device, and reduces it to a handle."""

    gpus: bool = False
    """In share mode, in the pool's process: whether tensors on GPUs are shared or copied."""

    pool: str | None = None
    """Token of the pool whose handles may be sent."""

    target: int | None = None
    """Index of the worker that gets the message.  Copies replace handles of other workers.  None:
    the handles determine the worker."""

    out_of_band: bool = True
    """Whether buffers may be separate from the pickle."""

    kept: bool = False
    """Whether the sender may send the message again, so that the receiver must copy buffers."""

    book: Any = None
    """What the receivers have of the program's state: a `Book` of `by_value.sent`, or None."""

    publisher: Callable[[Callable[["Layout"], Any], str], Any] | None = None
    """Gets a function that writes a message, and a description, and returns the `Broadcast`."""

    room: Callable[[int], memoryview] | None = None
    """Returns memory for a message that must be in one piece, with its buffers."""


BY_PIPE = Layout()

pools: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The pools of this process, by token (`Layout.pool`)."""


def share(layout: Layout, arena: Arena, method: str | None) -> Layout:
    """Return a layout for share mode, in which ``method`` is as in `Layout`."""
    return layout._replace(arena=arena if method in (None, "cpu") else None, method=method)


# The first byte is the opcode PROTO of a pickle, or 1, which is not an opcode.
PLAIN = 0x80
FRAMED = 0x01
ALIGN = 16
KEPT = 1

PREPARE = 0x78706FFF
"""The number in `copyreg`'s table of the function that prepares the receiver of a message."""

# The opcodes are those of Lib/pickle.py: PROTO 5, and EXT4 with the number.
_PREPARED = b"\x80\x05\x84" + struct.pack("<I", PREPARE)
_BODY = struct.Struct("<2sQ")  # MARK and BINBYTES8

_HEAD = struct.Struct("<BBHIQ")
_ENTRY = struct.Struct("<QQII")

_Entry = tuple[int, int, int, int]


class Leased(bytes):
    """A message with parts in blocks, which this process holds as long as the message exists."""

    blocks: dict[tuple[int, int], Block]
    """The blocks, by ``which`` and name."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Another pickle contains it as plain bytes, which hold no blocks.
        return bytes, (bytes(self),)

    def by_arena(self) -> dict[Holds, list[Block]]:
        """Return the blocks of each arena, in the order of the tokens."""
        found: dict[Holds, list[Block]] = {}
        for block in self.blocks.values():
            found.setdefault(block.arena, []).append(block)
        return found

    @property
    def owners(self) -> dict[int, int]:
        """The workers to whose tensors the message has handles, with the bytes of these tensors."""
        found: dict[int, int] = {}
        for block in self.blocks.values():
            worker, nbytes = getattr(block, "stands_for", (None, 0))
            if worker is not None:
                found[worker] = found.get(worker, 0) + nbytes
        return found


def weight(message: bytes | memoryview) -> int:
    """Return how many bytes of memory a message takes: in its blocks, or itself if it has none."""
    if type(message) is Leased:
        return sum(block.capacity for block in message.blocks.values())
    return len(message)


def weight_of_all(messages: Sequence[bytes | memoryview]) -> int:
    """Return how many bytes of memory these messages take together."""
    # Fast if none is `Leased`, because this is called for all short tasks.
    if Leased in set(map(type, messages)):
        return sum(map(weight, messages))
    return sum(map(len, messages))


def pack(
    chunks: Sequence[bytes | memoryview],
    buffers: Sequence[PickleBuffer | memoryview],
    layout: Layout,
    shared: Mapping[int, Block],
) -> bytes | memoryview:
    """Join the pieces of a pickle and its buffers.  Every byte is copied once.

    If ``layout`` has a lessor, large parts are copied into blocks.  If no block can be leased, all
    parts are copied into the message.  ``shared`` has, by the `id` of a buffer, the block in which
    the buffer lies (share mode).  The message always names these blocks.
    """
    views = [buffer.raw() if type(buffer) is PickleBuffer else buffer for buffer in buffers]
    size = sum(map(len, chunks))
    blocks: list[Block | None] = [None]
    # The ids are unique, because `buffers` keeps all buffers alive.
    blocks += [shared.get(id(buffer)) for buffer in buffers]
    leased = _lease(chunks, size, views, blocks, layout)
    table, inline, held = b"", [], {}
    arenas: dict[Holds, int] = {}
    for given, block, view in zip(blocks, leased, [None, *views], strict=True):
        length = size if view is None else view.nbytes
        if block is None:
            table += _ENTRY.pack(MISSING, length, 0, 0)
            if view is not None:
                inline.append(view)
        else:
            which = arenas.setdefault(block.arena, len(arenas))
            name = block.name
            held[which, name] = block
            # Both sides use a given block, unless it was filled for this message.
            of_both = given is not None and not hasattr(given, "filled")
            table += _ENTRY.pack(name, length, which, of_both)
    first, *more = [arena.token for arena in arenas] or [0]
    flags = KEPT if layout.kept and held else 0
    head = _HEAD.pack(FRAMED, flags, len(more), len(views), first)
    head += struct.pack(f"<{len(more)}Q", *more)
    message = _join(head + table, () if leased[0] is not None else chunks, inline, layout.room)
    if held:
        message = Leased(message)
        message.blocks = held
    return message


def _lease(
    chunks: Sequence[bytes | memoryview],
    size: int,
    views: Sequence[memoryview],
    blocks: list[Block | None],
    layout: Layout,
) -> list[Block | None]:
    """Return the blocks of pickle and buffers: those in ``blocks``, and newly filled ones."""
    if layout.lessor is None:
        return blocks
    leased = list(blocks)
    if size >= INLINE_BELOW:
        leased[0] = block = layout.lessor(size)
        if block is None:
            return blocks  # the blocks leased so far are released with `leased`
        at, target = 0, block.view(size)
        for chunk in chunks:
            target[at : at + len(chunk)] = chunk
            at += len(chunk)
    for i, view in enumerate(views, 1):
        if leased[i] is None:
            leased[i] = block = layout.lessor(view.nbytes)
            if block is None:
                return blocks
            block.view(view.nbytes)[:] = view
    return leased


def _join(
    head: bytes,
    chunks: Sequence[bytes | memoryview],
    views: Sequence[memoryview],
    room: Callable[[int], memoryview] | None,
) -> bytes | memoryview:
    parts: list[bytes | memoryview] = [head, *chunks]
    size = sum(map(len, parts))
    for view in views:
        pad = -size % ALIGN
        parts.append(bytes(pad))
        parts.append(view)
        size += pad + view.nbytes
    if size < HUGE_PAGES_FROM:
        return b"".join(parts)
    whole = memoryview(new_buffer(size)) if room is None else room(size)
    at = 0
    for part in parts:
        whole[at : at + len(part)] = part
        at += len(part)
    return whole


def tokens(message: bytes | memoryview) -> list[int]:
    """Return the tokens of the arenas whose blocks a framed message names.

    Raises:
        ValueError: the message is incomplete or is not a framed one.
    """
    if len(message) < _HEAD.size or message[0] != FRAMED:
        raise ValueError("not a message of xpool: neither a pickle nor a framed table")
    _, _, more, _, token = _HEAD.unpack_from(message)
    if not more:
        return [token] if token else []
    if len(message) < _HEAD.size + 8 * more:
        raise ValueError("a message of xpool was cut short in its head")
    return [token, *struct.unpack_from(f"<{more}Q", message, _HEAD.size)] if token else []


def hold_blocks(message: bytes | memoryview) -> bytes | memoryview:
    """Return a message that will be opened later, with holds on its blocks."""
    if message[0] != FRAMED or type(message) is Leased:
        return message
    known = tokens(message)
    if not known:
        return message
    leased = Leased(message)
    leased.blocks = {
        (which, place): _block(known, which, place)
        for place, _, which, _ in _table(memoryview(message))[1]
        if place != MISSING
    }
    return leased


def _block(known: list[int], which: int, place: int) -> Block:
    if which >= len(known):
        raise ValueError("a message of xpool names a block, but not its arena")
    return Arena.find(known[which]).adopt(place)


def _table(message: memoryview) -> tuple[int, list[_Entry], int]:
    """Return the flags, the table and the end of the table of a framed message.

    Raises:
        ValueError: the message is incomplete.
    """
    _, flags, more, count, _ = _HEAD.unpack_from(message)
    start = _HEAD.size + 8 * more
    stop = start + (1 + count) * _ENTRY.size
    if len(message) < stop:
        raise ValueError("a message of xpool was cut short in its table")
    return flags, list(_ENTRY.iter_unpack(message[start:stop])), stop


def unpack(message: bytes | bytearray | memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return the pickle and the buffers, which are slices of the message or of its blocks.

    Raises:
        ValueError: the message is incomplete or is not a framed one.
        LookupError: the message names blocks in memory that this process does not have.
    """
    view = memoryview(message).cast("B")
    known = tokens(view)
    flags, table, end = _table(view)
    held = message.blocks if type(message) is Leased else {}
    parts: list[memoryview] = []
    for place, size, which, shared in table:
        if place == MISSING:
            if parts and view.readonly:
                view = memoryview(bytearray(view))  # the receiver may write to its objects
            begin = end + -end % ALIGN if parts else end
            end = begin + size
            if end > len(view):
                raise ValueError(f"a message of xpool was cut short: {len(view)} bytes of {end}")
            parts.append(view[begin:end])
            continue
        # If the message comes from `hold_blocks`, it already holds the block.
        block = held.get((which, place)) or _block(known, which, place)
        part = block.view(size)
        if len(part) < size:
            raise ValueError(f"a message names {size} bytes of block {place}, which has less")
        if parts and not shared:
            if flags & KEPT:
                copy = memoryview(new_buffer(size))
                copy[:] = part
                part = copy
            else:
                block.arena.received[block.number] = block.capacity
        parts.append(part)
    return parts[0], parts[1:]


def pickle_alone(message: bytes | memoryview) -> memoryview:
    """Return the pickle of a message, without its buffers and the call that prepares its receiver.

    It is empty if it lies in a block.
    """
    view = memoryview(message).cast("B")
    if view[0] == FRAMED:
        _, table, end = _table(view)
        place, size, _, _ = table[0]
        view = view[end : end + size] if place == MISSING else view[:0]
    if view[: len(_PREPARED)] != _PREPARED:
        return view
    _, size = _BODY.unpack_from(view, len(_PREPARED))
    rest = bytes(view[len(_PREPARED) + _BODY.size + size :]).lstrip(b"\x97")
    return memoryview(b"\x80\x05" + rest[3:])


def preparation(body: bytes, buffers: int, function: bytes = _PREPARED[2:]) -> bytes:
    """Return a pickle's beginning that calls a function with ``body`` and buffers.

    It memoizes nothing, because the rest of the pickle counts from 0.
    """
    # MARK, BINBYTES8, NEXT_BUFFER, TUPLE, REDUCE, POP.
    head = _PREPARED[:2] + function + _BODY.pack(b"(\x8e", len(body))
    return head + body + b"\x97" * buffers + b"tR0"


def inline(message: bytes | memoryview) -> bytes | memoryview:
    """Return the message with the contents of its blocks, for a receiver without the arena.

    The message of a broadcast takes the place of its token.  In share mode, where a copy would be
    wrong, no worker can be such a receiver.
    """
    if type(message) is not Leased:
        return message
    pickled, buffers = unpack(message)
    for n, (place, _, which, _) in enumerate(_table(memoryview(message))[1][1:]):
        kept = getattr(message.blocks.get((which, place)), "former", None)
        if isinstance(kept, Block):
            buffers[n] = kept.view(kept.capacity)
    return pack([pickled], buffers, BY_PIPE, {})


def names_given(message: bytes | memoryview) -> bool:
    """Whether a message names a block that was not filled for it, such as a token."""
    return type(message) is Leased and any(one[3] for one in _table(memoryview(message))[1])


def lodge(message: bytes | memoryview, layout: Layout) -> bytes | memoryview:
    """Return the unopened message with its large parts in blocks: the inverse of `inline`.

    A small message, and one that names blocks, is returned as bytes.
    """
    view = memoryview(message).cast("B")
    if len(view) < INLINE_BELOW or (view[0] == FRAMED and tokens(view)):
        return bytes(view)
    if view[0] != FRAMED:
        return pack([view], [], layout, {})
    pickled, buffers = unpack(view)
    return pack([pickled], buffers, layout, {})
