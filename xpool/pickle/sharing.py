"""Share mode: the storage of a tensor moves into the arena once, and then only its name travels.

`UntypedStorage._swap_data_ptr_` lets every tensor that uses the storage see the new memory.
(torch's own way, `share_memory_`, would put each storage into a file of its own in /dev/shm and
keep its descriptor open.)  Whoever receives the name maps nothing and opens nothing: the memory is
there already.  A storage that is in the arena, because it was shared before or was received, stays.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

from xpool.errors import TaskNotPicklable
from xpool.memory.arena import Arena, Block
from xpool.pickle.hooks import Context
from xpool.pickle.policy import Layout

__all__ = ["move_in", "open_storage", "share_storage"]

# Reentrant: a signal handler may share something in the midst of that.
_moving = threading.RLock()


def _after_fork_in_child() -> None:
    global _moving
    _moving = threading.RLock()  # some thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)


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
    block = _moved(pickler.layout, arena, storage, alone=False)
    buffer = PickleBuffer(block.view(nbytes))
    pickler.shared[id(buffer)] = block
    return (buffer,)


def move_in(pickler: Context, tensor: Any) -> Any:
    """Return the storage of a tensor that is going to be shared, moved into the arena by now.

    Raises:
        TaskNotPicklable: as `share_storage`.
    """
    arena = pickler.layout.arena
    assert arena is not None
    storage = tensor.untyped_storage()
    if storage.nbytes() and not arena.holds(storage.data_ptr()):
        count = getattr(sys.modules["torch"]._C, "_storage_Use_Count", None)
        # This tensor, the storage's own Python object, and the detached one that is being sent.
        users = 3 if tensor.requires_grad else 2
        alone = (
            count is not None
            and count(storage._cdata) <= users
            and hasattr(tensor, "_use_count")
            and tensor._use_count() == 1
        )
        _moved(pickler.layout, arena, storage, alone)
    return storage


def _moved(layout: Layout, arena: Arena, storage: Any, alone: bool) -> Block:
    with _moving:
        block = arena.holding(storage.data_ptr())
        if block is None and layout.anywhere:
            block = Arena.holding_any(storage.data_ptr())
        if block is None:
            block = _move(arena, layout.lessor or arena.lease, storage, alone)
        return block


def open_storage(buffer: Any) -> Any:
    """Return the storage whose memory this is."""
    import torch

    if buffer is None:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _move(arena: Arena, lessor: Callable[[int], Block | None], storage: Any, alone: bool) -> Block:
    torch = sys.modules["torch"]
    nbytes = storage.nbytes()
    if Arena.elsewhere(storage.data_ptr(), arena):
        raise _refusal(
            nbytes,
            "it is shared with other processes already: those of another pool, in a worker of "
            "which this runs, or those that put it into a queue",
            "Send a clone() of the tensor",
        )
    if not hasattr(storage, "_swap_data_ptr_"):
        raise _refusal(
            nbytes,
            f"torch {torch.__version__} cannot give a storage other memory",
            "Use a newer torch (2.13 can), or is_copy_tensor=True",
        )
    block = lessor(nbytes)
    if block is None:
        raise _refusal(
            nbytes,
            "there is not enough memory, or memory_limit= is reached",
            "Let go of what is shared, or use is_copy_tensor=True",
        )
    target = torch.frombuffer(block.view(nbytes), dtype=torch.uint8).untyped_storage()
    target.copy_(storage)
    if not (alone and storage.resizable()):
        # Something else may know the address, an array of numpy's or a DLPack capsule, and must
        # not find its memory freed: it lives as long as the storage does.
        block.former = target
    storage._swap_data_ptr_(target)
    return block


def _refusal(nbytes: int, why: str, remedy: str) -> TaskNotPicklable:
    return TaskNotPicklable(
        f"A tensor's storage of {nbytes} bytes (cpu) cannot be shared: {why}. {remedy}."
    )
