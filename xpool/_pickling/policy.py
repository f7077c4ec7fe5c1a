"""The options for the messages of a pool, and the size above which bytes go into shared memory."""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from xpool._memory.arena import Arena
from xpool._memory.holds import Block

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
