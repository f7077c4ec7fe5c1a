"""What to do with a block of bytes that someone wants to send: pure functions of its size.

Nothing else in the package compares sizes.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import enum
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from xpool._memory.arena import Arena, Block

__all__ = [
    "INLINE_BELOW",
    "BY_PIPE",
    "Placement",
    "Layout",
    "in_block",
    "placement",
    "pools",
    "share",
]

#: Bytes.  Below this, a copy in the message costs less than a block of shared memory.
INLINE_BELOW = 64 * 1024


class Placement(enum.Enum):
    """Where the bytes of a buffer go."""

    INLINE = "in the pickle itself"
    OUT_OF_BAND = "beside the pickle, copied once, used in place by the receiver"


class Layout(NamedTuple):
    """How the messages of one pool are laid out."""

    lessor: Callable[[int], Block | None] | None = None
    """Gives a block for so many bytes, or None; where there is no lessor all travels by pipe."""

    arena: Arena | None = None
    """Share mode: where the storages of tensors are moved.  None: copy mode."""

    named: bool = False
    """Share mode of `dumps`: storages go by the names of files, as torch shares them."""

    anywhere: bool = False
    """Share mode: descriptors go along, so what is shared stays in whatever arena it is."""

    method: str | None = None
    """Share mode: the only kind of device whose tensors are shared; None: all."""

    keep: Callable[[Any, Any], Any] | None = None
    """Share mode, in a worker: reduces a tensor on a device, which it keeps, to a handle."""

    gpus: bool = False
    """Share mode, in the pool's process: whether tensors on GPUs are shared; False: copied."""

    pool: str | None = None
    """Whose handles may be sent: the token of a pool."""

    target: int | None = None
    """The worker that the message is for, where handles of others are to be replaced by copies."""

    out_of_band: bool = True
    """Whether buffers may lie beside the pickle."""

    kept: bool = False
    """The sender may send the message again: the receiver copies, what it got is not its own."""

    book: Any = None
    """What the receivers were told of the globals of ``__main__`` (`main_globals.Book`)."""

    publisher: Callable[[Callable[["Layout"], Any], str], Any] | None = None
    """Takes what writes a message, and what is in it; returns the `Broadcast` for all workers."""

    room: Callable[[int], memoryview] | None = None
    """Gives memory for a message with buffers that is to lie in one piece."""


BY_PIPE = Layout()

pools: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The pools of this process, by the tokens that `Layout.pool` has."""


def share(layout: Layout, arena: Arena, method: str | None) -> Layout:
    """Return a layout for share mode; ``method``: only tensors of this kind, None: each."""
    return layout._replace(
        arena=arena if method in (None, "cpu") else None,
        method=method,
    )


def placement(nbytes: int) -> Placement:
    """Say where a buffer of ``nbytes`` bytes (of an array or of a CPU tensor) goes."""
    return Placement.INLINE if nbytes < INLINE_BELOW else Placement.OUT_OF_BAND


def in_block(nbytes: int) -> bool:
    """Whether a pickle of ``nbytes`` bytes goes into a block, where there is a lessor."""
    return nbytes >= INLINE_BELOW
