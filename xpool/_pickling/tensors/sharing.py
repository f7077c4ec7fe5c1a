"""Share mode: the storage of a tensor moves into the arena once, and messages only name it.

`UntypedStorage._swap_data_ptr_` gives the new memory to every tensor that uses the storage.
(torch's `share_memory_` would put each storage into its own file in /dev/shm and keep the
descriptor open.)  The receiver maps and opens nothing, because it has mapped the arena.  A storage
is not moved if it was shared before or received, because it is then in the arena, or if it is in a
file that other processes may have mapped (see `mapped`).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from xpool._memory.arena import Arena
from xpool._memory.holds import Block
from xpool._pickling.frame import Layout
from xpool._pickling.reducers import Context, in_place
from xpool._pickling.tensors import mapped
from xpool._pickling.tensors.device_memory import on_own_device
from xpool._pickling.tensors.extents import Seen
from xpool._python import at_fork
from xpool._python.hidden import is_free_threaded
from xpool.errors import TaskNotPicklable

# If two threads move the same storage, the second finds it in the arena.  Reentrant, because a
# signal handler may share a tensor, too.
_moving = threading.RLock()


at_fork.renew(globals(), _moving=threading.RLock)


def reduce_shared(pickler: Context, storage: Any) -> Any:
    """Return the function that opens a storage, and its arguments, for a layout with an arena.

    Raises:
        TaskNotPicklable: the storage cannot be shared.  The text says why and what to do.
    """
    layout = pickler.layout
    arena = layout.arena
    assert arena is not None
    nbytes, address = storage.nbytes(), storage.data_ptr()
    if not nbytes:
        return _open_storage, (None, 0)
    other = first_user(pickler, address, storage)
    if other is not storage:
        return storage_of, (other,)
    about = f"A storage of {nbytes} bytes"
    if not arena.holds(address) and not Arena.elsewhere(address, arena):
        place = mapped.place_of(pickler, storage)
        if place is not None:
            return mapped.open_file, mapped.lend(pickler, storage, place, lambda: about)
    block = move(arena, layout, storage, lambda: about)
    return _open_storage, (in_place(pickler, block), nbytes)


_TORCH_FILES = "/dev/shm/torch_"
"""Name prefix of files of torch's "file_system" strategy."""


def reduce_named(pickler: Context, storage: Any) -> Any:
    """Return the function that opens a storage by its file's name, and the function's arguments.

    This is the "file_system" strategy of `torch.multiprocessing`.  torch counts the processes that
    have the file and the pickles that were not loaded.  After the last of these, a process of torch
    removes the file.

    Raises:
        TaskNotPicklable: the storage cannot be moved to such a file.  The text says why.
    """
    torch = sys.modules["torch"]
    reductions = torch.multiprocessing.reductions
    nbytes, address = storage.nbytes(), storage.data_ptr()
    if not nbytes:
        return _open_storage, (None, 0)
    refused = f"A storage of {nbytes} bytes cannot be shared by name: "
    with _moving:
        place = mapped.place_of(pickler, storage)
        path = "" if place is None else place[0]
        if Arena.elsewhere(address, None):
            raise TaskNotPicklable(
                f"{refused}it is shared with the workers of a pool. Send a clone() of it instead."
            )
        if path and not path.startswith((_TORCH_FILES, "/proc/")):
            raise TaskNotPicklable(f"{refused}it lies in {path}. Send a clone() of it instead.")
        if not path.startswith(_TORCH_FILES):
            target = torch.UntypedStorage._new_using_filename_cpu(nbytes)
            _reserve(target, nbytes, refused)
            # An attribute keeps the old memory as long as the storage exists.
            storage.xpool_former = _exchange(torch, storage, target, None)
        manager, name, _ = storage._share_filename_cpu_()
    storage._shared_incref()  # counts the pickle as a user until it is loaded
    reductions.shared_cache[name] = reductions.StorageWeakRef(storage)
    return reductions.rebuild_storage_filename, (type(storage), manager, name, nbytes)


def _reserve(storage: Any, nbytes: int, refused: str) -> None:
    """Reserve the memory of a new file.  Otherwise a write could end this process with SIGBUS."""
    _, name, _ = storage._share_filename_cpu_()
    try:
        with open(f"/dev/shm{name.decode()}", "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as exc:
        raise TaskNotPicklable(f"{refused}{exc}. Send a copy: copy_tensor=True.") from exc


def first_user(pickler: Context, address: int, user: Any) -> Any:
    """Return the first tensor or storage of this message that uses the memory at an address.

    The receiver opens the memory for this tensor alone, and the other tensors use its storage.
    """
    seen = Seen.of(pickler)
    if seen.users is None:
        seen.users = {}
    return seen.users.setdefault(address, user)


def move(
    arena: Arena, layout: Layout, storage: Any, about: Callable[[], str], tensor: Any = None
) -> Block:
    """Move the memory of a storage into the arena, and return a hold on it.

    Args:
        about: returns a description of the storage's owner, for an error.
        tensor: the tensor that is sent, if any.

    Raises:
        TaskNotPicklable: the storage cannot be shared.  The text says why and what to do.
    """
    with _moving:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        # If the storage was shared before or received, it is in the arena.
        block = arena.holding(address)
        if block is None and layout.anywhere:
            block = Arena.holding_any(address)
        if block is not None:
            return block
        if Arena.elsewhere(address, arena):
            raise TaskNotPicklable(
                f"{about()} cannot be shared: it came from another pool or a queue, whose "
                "processes share it already. Send a clone() of it instead."
            )
        block = (layout.lessor or arena.lease)(nbytes)
        if block is None:
            raise TaskNotPicklable(
                f"{about()} cannot be shared: there is no memory for {nbytes} bytes more, or "
                "memory_limit= is reached. Delete shared tensors, or send copies: "
                "is_copy_tensor=True."
            )
        torch = sys.modules["torch"]
        target = torch.frombuffer(block.view(nbytes), dtype=torch.uint8).untyped_storage()
        former = _exchange(torch, storage, target, tensor)
        if former is not None:
            block.former = former
        return block


def _open_storage(buffer: Any, nbytes: int) -> Any:
    """Return the storage of the first ``nbytes`` bytes of this memory."""
    torch = mapped.imported_torch()
    if buffer is None:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes).untyped_storage()


def storage_of(tensor: Any, of_device: bool = False) -> Any:
    return (on_own_device(tensor) if of_device else tensor).untyped_storage()


def _exchange(torch: Any, storage: Any, target: Any, tensor: Any) -> Any:
    """Give a storage the memory of another.  Return the old memory if it must not be freed.

    A numpy array, a DLPack capsule or an operation in another thread may use the old address.
    """
    # Copied before the swap, because other tensors of the storage then use the new memory.
    target.copy_(storage)
    needed = (
        not storage.resizable()
        or is_free_threaded()
        or _has_other_users(torch, storage, tensor)
        or _other_threads_compute()
    )
    _swap(torch, storage, target)
    return target if needed else None


def _other_threads_compute() -> bool:
    """Whether another Python thread may be running an operation on any tensor.

    The reference of such an operation is not counted.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    for ident in sys._current_frames():
        thread = threads.get(ident)
        if ident != threading.get_ident() and not getattr(thread, "runs_only_xpool", False):
            return True
    return False


def _has_other_users(torch: Any, storage: Any, tensor: Any) -> bool:
    """Whether an object other than ``tensor`` may use the storage, by torch's counts."""
    if tensor is None or not hasattr(torch._C, "_storage_Use_Count"):
        return True
    # The two users are the storage's Python object and the tensor.
    alone = torch._C._storage_Use_Count(storage._cdata) <= 2
    return not (alone and hasattr(tensor, "_use_count") and tensor._use_count() == 1)


def _swap(torch: Any, storage: Any, other: Any) -> None:
    if hasattr(storage, "_swap_data_ptr_"):
        storage._swap_data_ptr_(other)
        return
    # Older versions of torch have no call for this.  A StorageImpl begins with a few words (a table
    # of methods, counts).  The memory's address, a deleter and the deleter's argument follow.
    words = [(ctypes.c_size_t * 8).from_address(it._cdata) for it in (storage, other)]
    one, two = ([int(word) for word in block] for block in words)
    at = one.index(storage.data_ptr()) if storage.data_ptr() in one else 0
    if not 0 < at < 6 or two[at] != other.data_ptr():
        raise TaskNotPicklable(
            f"A storage cannot be shared: xpool does not know its layout in torch "
            f"{torch.__version__}. Use torch 2.13 or later, or send copies: is_copy_tensor=True."
        )
    for i in range(at, at + 3):
        words[0][i], words[1][i] = two[i], one[i]
