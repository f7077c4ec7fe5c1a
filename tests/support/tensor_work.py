"""Functions that tests of shared memory run in workers."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from typing import Any

import torch

from support import work
from support.work import nothing, pid, post_and_gate, same

__all__ = ["nothing", "pid", "post_and_gate", "same"]

_kept: dict[str, Any] = {}


def checksum(tensor: Any) -> int:
    return zlib.crc32(tensor.numpy().tobytes())


def checksum_and_reverse(tensor: Any) -> tuple[int, Any]:
    return checksum(tensor), tensor.flip(0)


def filled(value: int, size: int) -> Any:
    return torch.full((size,), value, dtype=torch.uint8)


def numbered(i: int) -> Any:
    return torch.full((16384,), i, dtype=torch.int32)


def made_shared(value: int, size: int) -> Any:
    return torch.full((size,), value, dtype=torch.uint8).share_memory_()


def write(tensor: Any, value: Any) -> None:
    tensor.fill_(value)


def add_one(tensor: Any) -> Any:
    tensor += 1
    return tensor


def address(tensor: Any) -> int:
    place: int = tensor.data_ptr()
    return place


def total(tensor: Any) -> int:
    return int(tensor.sum())


def write_and_keep(name: str, tensor: Any) -> Any:
    tensor.fill_(7)
    _kept[name] = tensor
    return tensor


def keep(name: str, tensor: Any) -> None:
    _kept[name] = tensor


def kept_pickle(size: int) -> bytes:
    """Pickle a tensor of ones without a copy, keep the tensor, and return the bytes."""
    import torch

    from xpool import pickle

    _kept["pickled"] = tensor = torch.ones(size, dtype=torch.uint8)
    return pickle.dumps([tensor], copy_tensor=False)


def kept(name: str) -> Any:
    return _kept[name]


def kept_total(name: str) -> int:
    return int(_kept[name].sum())


def kept_fill(name: str, value: int) -> None:
    _kept[name].fill_(value)


def forget() -> None:
    _kept.clear()


def make_and_keep(name: str, size: int) -> Any:
    _kept[name] = torch.zeros(size, dtype=torch.uint8)
    return _kept[name]


def with_lock(size: int) -> Any:
    return [torch.zeros(size), threading.Lock()]


def arena_here() -> Any:
    """Return this process's arena; a worker's is its parent's."""
    from xpool._memory.arena import Arena

    return next(iter(Arena._known.values()), None) or Arena.own()


def held_here() -> tuple[int, int]:
    found = arena_here().statistics()
    return found["held"], found["out"]


def count_descriptors(_: Any = None) -> int:
    return len(os.listdir("/proc/self/fd"))


def spoil_and_die(flag: str, tensor: Any) -> int:
    """At the first call write to the tensor and die; later return the sum."""
    found = int(tensor.sum())
    tensor.zero_()
    if work.first(flag):
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def spoil_pair_and_die(pair: tuple[str, Any]) -> int:
    return spoil_and_die(*pair)


def through_a_pool(tensor: Any) -> Any:
    """Send a tensor through a pool of this worker, and return the result."""
    import xpool

    with xpool.Pool(1) as pool:
        back = pool.apply(add_one, (tensor,))
    pool.join()
    return back


def share_with_a_pool(tensor: Any) -> str:
    """Try to share a tensor of the parent with a pool of this worker."""
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
    """Fork a child that sums the tensor; return its exit code."""
    child = os.fork()
    if not child:
        os._exit(int(tensor.numpy().sum()) % 100)  # torch's threads do not survive a fork
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fill_module(module: Any, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def filled_1m(i: int) -> Any:
    return torch.full((1 << 18,), i, dtype=torch.int32)


def first(tensor: Any) -> int:
    return int(tensor[0])


def use_one_storage(tensors: Any) -> bool:
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) == 1
