"""Share mode: the storage of a tensor moves into the arena once, and then only its name travels.

`UntypedStorage._swap_data_ptr_` lets every tensor that uses the storage see the new memory.
(torch's own way, `share_memory_`, would put each storage into a file of its own in /dev/shm and
keep its descriptor open.)  Whoever receives the name maps nothing and opens nothing: the memory is
there already.  A storage that is in the arena, because it was shared before or was received, stays.
"""

from __future__ import annotations

import sys
import threading
from pickle import PickleBuffer
from typing import Any

from xpool.errors import TaskNotPicklable
from xpool.memory.arena import Arena, Block
from xpool.pickle.hooks import Context
from xpool.pickle.policy import Layout

__all__ = ["open_storage", "share_storage"]

_moving = threading.Lock()


def share_storage(pickler: Context, storage: Any) -> Any:
    """Return the arguments of `open_storage`, in a message whose layout has an arena.

    Raises:
        TaskNotPicklable: it cannot be shared; the message says why and what to do.
    """
    arena = pickler.layout.arena
    assert arena is not None
    nbytes = storage.nbytes()
    if not nbytes:
        return (None,)
    with _moving:
        address = storage.data_ptr()
        block = arena.holding(address)
        if block is None and pickler.layout.anywhere:
            block = Arena.holding_any(address)
        block = block or _move(pickler.layout, storage, nbytes)
    buffer = PickleBuffer(block.view(nbytes))
    pickler.shared[id(buffer)] = block
    return (buffer,)


def open_storage(buffer: Any) -> Any:
    """Return the storage whose memory this is."""
    import torch

    if buffer is None:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _move(layout: Layout, storage: Any, nbytes: int) -> Block:
    torch, arena = sys.modules["torch"], layout.arena
    assert arena is not None
    if Arena.elsewhere(storage.data_ptr(), arena):
        raise _refusal(
            nbytes,
            "it is shared with the processes of another pool already, by the worker that this "
            "runs in",
            "Send a clone() of the tensor",
        )
    if not hasattr(storage, "_swap_data_ptr_"):
        raise _refusal(
            nbytes,
            f"torch {torch.__version__} cannot give a storage other memory",
            "Use a newer torch (2.13 can), or is_copy_tensor=True",
        )
    block = (layout.lessor or arena.lease)(nbytes)
    if block is None:
        raise _refusal(
            nbytes,
            f"there is not enough memory, or the limit of {arena.limit} bytes is reached",
            "Let go of what is shared, or use is_copy_tensor=True",
        )
    target = torch.frombuffer(block.view(nbytes), dtype=torch.uint8).untyped_storage()
    target.copy_(storage)
    if not storage.resizable():
        # Something else may know the address, an array of numpy's for one, and must not find
        # its memory freed: it lives as long as the block.
        block.former = target
    storage._swap_data_ptr_(target)
    return block


def _refusal(nbytes: int, why: str, remedy: str) -> TaskNotPicklable:
    return TaskNotPicklable(
        f"A tensor's storage of {nbytes} bytes (cpu) cannot be shared: {why}. {remedy}."
    )
