"""Share mode for tensors on devices: the tensor stays in its worker, and a handle travels.

Chips cannot see each other's memory, and the pool's own process must not open their runtimes.  So
a worker keeps a tensor that it sends, and sends a `TensorHandle`.  A task that gets the handle goes
to that worker and finds the tensor itself; for another worker it is replaced by a copy.

How long the worker keeps a tensor is told by a block of the arena, a few bytes that stand for it:
whoever has the handle, or a message with it, holds that block.  So all that is true of blocks (a
message that nobody opens, a process that is killed) is true of handles.
"""

from __future__ import annotations

import weakref
from math import prod
from pickle import PickleBuffer
from typing import Any

from xpool.errors import TaskNotPicklable, WorkerDied
from xpool.memory.arena import Arena, Block
from xpool.pickle.hooks import Context, builder, register

__all__ = ["Keeper", "TensorHandle", "TensorLost", "pools"]

pools: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The pools of this process, by their tokens."""

_TOKEN = 64


class TensorLost(WorkerDied):
    """The worker that held a tensor on its device has ended, and the tensor with it.

    Fields as of `WorkerDied`; ``task`` says which tensor.
    """

    def __str__(self) -> str:
        return (
            f"{self.task} is lost: worker {self.worker} (pid {self.pid}), which held it, has "
            "ended. Make it again in the worker that is there now, or keep a copy: handle.cpu()."
        )


class TensorHandle:
    """A tensor that lies on the device of a worker.

    Given to the pool as (part of) an argument, it takes the task to that worker, where the function
    gets the tensor itself and nothing is copied.  For another worker (``worker=i``, or handles of
    two workers in one call) the tensor is copied, through the memory of this machine, and arrives
    as `cpu` returns it.  The worker keeps the tensor until all handles are gone.

    Attributes:
        shape: tuple of int.
        dtype: `torch.dtype`.
        device: str, as in the worker: ``"xla:0"``, ``"cuda:0"``.
        worker: index of the worker.
        pid: its process.
    """

    def __init__(self, buffer: memoryview, *about: Any) -> None:
        self._buffer = buffer
        self._about = about
        self.pool, self.worker, self.pid, self.shape, self.dtype, self.device, _ = about
        block: Block = buffer.obj  # type: ignore[assignment]
        block.owner = self.worker  # type: ignore[misc]  # its subclass has it
        self._block = block

    @property
    def nbytes(self) -> int:
        """Size of the values, in bytes."""
        size: int = prod(self.shape) * self.dtype.itemsize
        return size

    def cpu(self) -> Any:
        """Return a copy of the tensor in this process, on the CPU.

        Raises:
            WorkerDied: the worker has ended.
            PoolClosed: the pool takes no more work.
        """
        return _pool_of(self).apply(_to_cpu, (self,))

    def __repr__(self) -> str:
        return f"<TensorHandle {self._title()}, held by worker {self.worker} (pid {self.pid})>"

    def _title(self) -> str:
        return f"tensor of shape {self.shape}, {self.dtype}, on {self.device}"


def _pool_of(handle: TensorHandle) -> Any:
    pool = pools.get(handle.pool)
    if pool is None:
        raise TaskNotPicklable(
            f"{handle!r}: its pool is gone, or is another process's; a handle is good for its own "
            "pool only. Send handle.cpu() instead."
        )
    return pool


def _to_cpu(*args: Any) -> Any:
    return args[-1].cpu()  # a context may come before it


@register(TensorHandle)
def _reduce(pickler: Context, handle: TensorHandle) -> Any:
    layout = pickler.layout
    if layout.pool != handle.pool:
        raise TaskNotPicklable(
            f"{handle!r} is good for the pool that it came from only. Send handle.cpu() instead."
        )
    if layout.target is not None and layout.target != handle.worker:
        return _same, (handle.cpu(),)
    buffer = PickleBuffer(handle._buffer)
    pickler.shared[id(buffer)] = handle._block
    return open_handle, (buffer, handle._block.name, *handle._about)


@builder
def _same(tensor: Any) -> Any:
    return tensor


class Keeper:
    """What a worker keeps for those who have handles."""

    here: Keeper | None = None

    def __init__(self, arena: Arena, pool: str, worker: int, pid: int) -> None:
        self.pool = pool
        self._arena = arena
        self._who = worker, pid
        self._kept: dict[int, tuple[Block, Any]] = {}
        Keeper.here = self

    def reduce(self, pickler: Context, tensor: Any) -> Any:
        """Keep a tensor, and pickle a handle to it."""
        self.sweep()
        block = self._arena.lease(_TOKEN)
        if block is None:
            raise TaskNotPicklable(
                f"No shared memory is left for a handle to a tensor on {tensor.device}; let go of "
                "results, or give the pool a larger memory_limit."
            )
        self._kept[block.name] = block, tensor.detach()
        sent = self._arena.adopt(block.name)  # the message's own hold, beside that of the table
        buffer = PickleBuffer(sent.view(1))
        pickler.shared[id(buffer)] = sent
        about = tuple(tensor.shape), tensor.dtype, str(tensor.device), tensor.requires_grad
        return open_handle, (buffer, block.name, self.pool, *self._who, *about)

    def get(self, name: int) -> Any:
        """Return a tensor that is kept, or None."""
        kept = self._kept.get(name)
        return None if kept is None else kept[1]

    def sweep(self) -> bool:
        """Let go of the tensors to which there are no handles; return whether any are left."""
        for name, (block, _) in list(self._kept.items()):
            if self._arena.alone(block):
                del self._kept[name]
        return bool(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


@builder
def open_handle(buffer: Any, name: int, pool: str, worker: int, pid: int, *about: Any) -> Any:
    """Return the tensor in its own worker, a `TensorHandle` in the pool's process."""
    if pool in pools:
        return TensorHandle(buffer, pool, worker, pid, *about)
    keeper = Keeper.here
    if keeper is None or keeper.pool != pool:
        raise LookupError(
            "a handle to a tensor on a device was sent to a process that does not belong to its "
            "pool; send handle.cpu() instead"
        )
    tensor = keeper.get(name)
    if tensor is None:
        shape, dtype, device, _ = about
        what = f"The tensor of shape {shape}, {dtype}, on {device}"
        raise TensorLost(pid, None, worker, what)
    return tensor
