"""Functions that the tests of shared memory run in workers."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from typing import Any

import torch

from support.work import nothing, pid, post_and_gate, same

__all__ = ["nothing", "pid", "post_and_gate", "same"]

_kept: dict[str, Any] = {}


def checksum(tensor: Any) -> int:
    """Return a checksum of a tensor's bytes."""
    return zlib.crc32(tensor.numpy().tobytes())


def checksum_and_reverse(tensor: Any) -> tuple[int, Any]:
    """Return the checksum of what arrived, and its elements in reverse order."""
    return checksum(tensor), tensor.flip(0)


def filled(value: int, size: int) -> Any:
    """Return ``size`` bytes of one value."""
    return torch.full((size,), value, dtype=torch.uint8)


def filled_ints(value: int, size: int = 1024) -> Any:
    """Return ``size`` numbers of 4 bytes."""
    return torch.full((size,), value, dtype=torch.int32)


def numbered(i: int) -> Any:
    """Return 64 KiB that are full of a number."""
    return torch.full((16384,), i, dtype=torch.int32)


def numbered_small(i: int) -> Any:
    """Return 4 KiB that are full of a number."""
    return torch.full((1024,), i, dtype=torch.int32)


def numbered_large(i: int) -> Any:
    """Return 5 MiB that are full of a number."""
    return torch.full((5 << 18,), i, dtype=torch.int32)


def made_shared(value: int, size: int) -> Any:
    """Return a tensor in a file of torch's."""
    return torch.full((size,), value, dtype=torch.uint8).share_memory_()


def write(tensor: Any, value: Any) -> None:
    """Fill a tensor."""
    tensor.fill_(value)


def add_one(tensor: Any) -> Any:
    """Add one in place, and return the tensor."""
    tensor += 1
    return tensor


def address(tensor: Any) -> int:
    place: int = tensor.data_ptr()
    return place


def total(tensor: Any) -> int:
    """Return the sum."""
    return int(tensor.sum())


def write_and_keep(name: str, tensor: Any) -> Any:
    """Write to what arrived, keep it, and return it."""
    tensor.fill_(7)
    _kept[name] = tensor
    return tensor


def keep(name: str, tensor: Any) -> None:
    """Keep what arrived for `kept`."""
    _kept[name] = tensor


def kept_pickle(size: int) -> bytes:
    """Pickle a tensor of ones by its name, keep it, and return the bytes."""
    import torch

    from xpool import pickle

    _kept["pickled"] = tensor = torch.ones(size, dtype=torch.uint8)
    return pickle.dumps([tensor], copy_tensor=False)


def kept(name: str) -> Any:
    """Return what was kept."""
    return _kept[name]


def kept_total(name: str) -> int:
    """Return the sum of what was kept."""
    return int(_kept[name].sum())


def kept_fill(name: str, value: int) -> None:
    """Fill what was kept."""
    _kept[name].fill_(value)


def forget() -> None:
    """Let go of what was kept."""
    _kept.clear()


def make_and_keep(name: str, size: int) -> Any:
    """Make a tensor of zeros, keep it and return it."""
    _kept[name] = torch.zeros(size, dtype=torch.uint8)
    return _kept[name]


def with_lock(size: int) -> Any:
    """Return a large tensor and something that cannot be pickled."""
    return [torch.zeros(size), threading.Lock()]


def arena_here() -> Any:
    """Return the arena of this process: a worker's is its parent's."""
    from xpool._memory.arena import Arena

    return next(iter(Arena._known.values()), None) or Arena.own()


def held_here() -> tuple[int, int]:
    """Return how many blocks this worker holds, and how many of its own are out."""
    found = arena_here().statistics()
    return found["held"], found["out"]


def count_descriptors(_: Any = None) -> int:
    """Return how many descriptors this worker has open."""
    return len(os.listdir("/proc/self/fd"))


def spoil_and_die(flag: str, tensor: Any) -> int:
    """The first time, write to the argument and die; later return its sum."""
    found = int(tensor.sum())
    tensor.zero_()
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return found
    os.kill(os.getpid(), signal.SIGKILL)
    return -1


def spoil_pair_and_die(pair: tuple[str, Any]) -> int:
    """As `spoil_and_die`, of one argument."""
    return spoil_and_die(*pair)


def through_a_pool(tensor: Any) -> Any:
    """Send a tensor on to a pool of this worker's own, and return what comes back."""
    import xpool

    with xpool.Pool(1) as pool:
        back = pool.apply(add_one, (tensor,))
    pool.join()
    return back


def share_with_a_pool(tensor: Any) -> str:
    """Try to share a tensor of the parent's with a pool of this worker's own."""
    import xpool

    with xpool.Pool(1, is_copy_tensor=False) as pool:
        try:
            pool.apply(add_one, (tensor,))
        except xpool.TaskNotPicklable as error:
            text = str(error)
        else:
            text = ""
        pool.apply(add_one, (tensor.clone(),))
    pool.join()
    return text


def fork_and_share_parts(tensor: Any) -> int:
    """Fork a child in this worker; return its exit code."""
    child = os.fork()
    if not child:
        os._exit(int(tensor.numpy().sum()) % 100)  # torch's threads do not survive a fork
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fill_module(module: Any, value: float) -> None:
    """Fill the parameters of a module."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def filled_1m(i: int) -> Any:
    """Return 1 MiB that is full of a number."""
    return torch.full((1 << 18,), i, dtype=torch.int32)


def first(tensor: Any) -> int:
    """Return the first element."""
    return int(tensor[0])


def use_one_storage(tensors: Any) -> bool:
    """Whether all tensors are of one storage."""
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1
