"""Share mode: the storage of a tensor moves into the arena once, and then only its name travels.

`UntypedStorage._swap_data_ptr_` lets every tensor that uses the storage see the new memory.
(torch's own way, `share_memory_`, would put each storage into a file of its own in /dev/shm and
keep its descriptor open.)  Whoever receives the name maps nothing and opens nothing: the memory is
there already.  A storage that is in the arena, because it was shared before or was received, stays.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

from xpool.errors import TaskNotPicklable
from xpool.memory.arena import Arena, Block
from xpool.pickle.hooks import Context, builder

__all__ = ["move", "open_storage", "share"]

_moving = threading.Lock()


def share(pickler: Context, storage: Any) -> Any:
    """Return the arguments of `open_storage`, in a message whose layout has an arena.

    Raises:
        TaskNotPicklable: it cannot be shared; the message says why and what to do.
    """
    arena = pickler.layout.arena
    assert arena is not None
    nbytes = storage.nbytes()
    if not nbytes:
        return (None,)
    block = move(arena, storage, lambda: f"A storage of {nbytes} bytes")
    buffer = PickleBuffer(block.view(nbytes))
    pickler.shared[id(buffer)] = block
    return (buffer,)


def move(arena: Arena, storage: Any, about: Callable[[], str]) -> Block:
    """Have the memory of a storage in the arena; return a hold on it.

    Args:
        about: says whose storage it is, for the message.

    Raises:
        TaskNotPicklable: it cannot be shared; the message says why and what to do.
    """
    with _moving:
        block = arena.holding(storage.data_ptr())
        if block is None:
            try:
                block = _move(arena, storage, storage.nbytes())
            except _Refused as exc:
                raise TaskNotPicklable(f"{about()} cannot be shared: {exc}") from None
        return block


class _Refused(Exception):
    pass


@builder
def open_storage(buffer: Any) -> Any:
    """Return the storage whose memory this is."""
    import torch

    if buffer is None:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _move(arena: Arena, storage: Any, nbytes: int) -> Block:
    torch = sys.modules["torch"]
    if Arena.elsewhere(storage.data_ptr(), arena):
        raise _Refused(
            "it is shared with another pool's processes, for one of which this code works. "
            "Send a clone() of it instead."
        )
    if not hasattr(storage, "_swap_data_ptr_"):
        raise _Refused(
            f"torch {torch.__version__} cannot give a storage other memory, torch 2.13 can. "
            "Use that, or send copies: is_copy_tensor=True."
        )
    block = arena.lease(nbytes)
    if block is None:
        raise _Refused(
            f"there is no memory for {nbytes} bytes more, or they are over the limit of "
            f"{arena.limit} bytes. Let go of what is shared, or send copies: is_copy_tensor=True."
        )
    target = torch.frombuffer(block.view(nbytes), dtype=torch.uint8).untyped_storage()
    target.copy_(storage)
    if not storage.resizable():
        # Something else may know the address, an array of numpy's for one, and must not find
        # its memory freed: it lives as long as the block.
        block.former = target
    storage._swap_data_ptr_(target)
    return block
