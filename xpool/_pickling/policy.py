"""The options for the messages of a pool, and the size from which bytes go into shared memory."""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from xpool._memory.arena import Arena
from xpool._memory.holds import Block

INLINE_BELOW = 64 * 1024
"""Bytes.  Below this, a copy in the message costs less than a block of shared memory."""


class Layout(NamedTuple):
    """The options for a message: how it is laid out, and how tensors are sent."""

    lessor: Callable[[int], Block | None] | None = None
    """Returns a block of this many bytes, or None.  Without a lessor, all bytes go by pipe."""

    arena: Arena | None = None
    """Share mode: the storages of tensors move here.  None: copy mode."""

    named: bool = False
    """Share mode of `dumps`: storages are sent as names of files, as torch shares them."""

    anywhere: bool = False
    """Share mode: descriptors are sent too, so shared memory may lie in any arena."""

    method: str | None = None
    """Share mode: the only kind of device whose tensors are shared; None: all kinds."""

    keep: Callable[[Any, Any], Any] | None = None
    """Share mode, in a worker: keeps a tensor on a device, and reduces it to a handle."""

    gpus: bool = False
    """Share mode, in the pool's process: whether tensors on GPUs are shared; False: copied."""

    pool: str | None = None
    """Token of the pool whose handles may be sent."""

    target: int | None = None
    """The worker that gets the message: handles of other workers are replaced by copies.  None:
    the handles determine the worker."""

    out_of_band: bool = True
    """Whether buffers may be separate from the pickle."""

    kept: bool = False
    """Whether the sender may send the message again, so that the receiver must copy buffers."""

    book: Any = None
    """The globals of ``__main__`` that the receivers have (`main_globals.Book`)."""

    publisher: Callable[[Callable[["Layout"], Any], str], Any] | None = None
    """Gets a function that writes a message, and a description of it; returns the `Broadcast`."""

    room: Callable[[int], memoryview] | None = None
    """Returns memory for a message that must lie in one piece, buffers included."""


BY_PIPE = Layout()

pools: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The pools of this process, by token (`Layout.pool`)."""


def share(layout: Layout, arena: Arena, method: str | None) -> Layout:
    """Return a layout for share mode; ``method``: the only kind that is shared, None: all kinds."""
    return layout._replace(arena=arena if method in (None, "cpu") else None, method=method)
