"""Share mode for tensors on devices: the tensor stays in its worker, and a handle is sent.

Chips cannot access each other's memory, and the pool's process must not open their runtimes.  So a
worker keeps a tensor that it returns, and sends a `TensorHandle`.  A task with the handle runs in
that worker and gets the tensor itself.  Another worker gets a copy.

A small block of the arena represents the tensor.  Processes with the handle, and messages with it,
hold this block, and the worker keeps the tensor as long as it is held.  So handles in unopened
messages or killed processes need no special case.

The pool's process can use a tensor on a GPU in place.  The tensor's worker then exports the memory
(see `device_memory`).
"""

from __future__ import annotations

import sys
from itertools import islice
from math import prod
from typing import Any

from xpool._memory.arena import Arena
from xpool._memory.holds import Block
from xpool._pickling.policy import pools
from xpool._pickling.reducers import Context, builder, in_place, register
from xpool._pickling.tensors import device_memory
from xpool._python.worker_local import WorkerLocal
from xpool.errors import OptionError, PoolClosed, TaskNotPicklable, TensorLost

_TOKEN = 64  # bytes of the block that represents a tensor

_AT_ONCE = 64  # number of kept tensors that are checked before a task


class TensorHandle:
    """A tensor on the device of a worker.

    If an argument of a task contains a handle, the task runs in the handle's worker, and its
    function gets the tensor itself, without a copy.  If the task runs in another worker
    (``worker=i``, or handles of two workers in one task), that worker gets a copy, through the
    memory of this machine: on the device to which it is bound, or else on the CPU.  The worker
    keeps the tensor as long as handles exist.

    Attributes:
        shape: tuple of int.
        dtype: `torch.dtype`.
        device: the name of the device in the worker, such as ``"xla:0"`` or ``"cuda:0"``.
        requires_grad: bool.
        gpu: the UUID of the tensor's GPU, as str; None: it is on no GPU.
        worker: the index of the worker.
        pid: the process id of the worker.
    """

    def __init__(self, buffer: memoryview, *about: Any) -> None:
        self._about = about
        self._pool, self.worker, self.pid, self.shape, self.dtype, self.device = about[:6]
        self.requires_grad, self.gpu = about[6:]
        block: Block = buffer.obj  # type: ignore[assignment]
        # The pool reads this to find the worker that must run the task.
        block.stands_for = self.worker, self.nbytes  # type: ignore[misc]  # its subclass has it
        self._block = block

    @property
    def nbytes(self) -> int:
        """Size of the values, in bytes."""
        size: int = prod(self.shape) * self.dtype.itemsize
        return size

    def cpu(self) -> Any:
        """Return a copy of the tensor in this process, on the CPU.

        This waits until the tensor's worker is free.  The copy has the same properties as in copy
        mode: ``requires_grad``, Parameter, attributes.

        Raises:
            TensorLost (a `WorkerDied`): the worker has ended.
            PoolClosed: the pool accepts no more tasks.
        """
        return self._ask(_to_cpu)

    def open(self) -> Any:
        """Return the tensor itself in this process, so that both sides see each other's writes.

        The tensor must be on a GPU that this process sees.  This starts CUDA in this process; no
        other method of a pool does.  torch keeps the memory in the worker as long as this process
        uses it.  When the worker ends, the values are lost.  Attributes that the worker has set on
        the tensor are not sent.

        Raises:
            OptionError: the tensor is on a device whose memory no other process can see.
            TaskNotPicklable: the memory cannot be shared.  The text says why.
            DeviceError: the memory cannot be opened.  The text says why.
            TensorLost, PoolClosed: as in `cpu`.
        """
        if self.gpu is None:
            raise OptionError(
                f"{self!r}: another process can use only a tensor on a GPU, with torch 2.4 or "
                "later; use handle.cpu()"
            )
        rebuild, args = self._ask(_export)
        return rebuild(*args)

    def _ask(self, question: Any) -> Any:
        pool = pools.get(self._pool)
        if pool is None:
            raise PoolClosed(f"{self!r}: its pool is gone, and the tensor with it")
        return pool.apply(question, (self,))

    def __repr__(self) -> str:
        what = f"of shape {self.shape}, {self.dtype}, on {self.device}"
        return f"<TensorHandle to a tensor {what}, of worker {self.worker} (pid {self.pid})>"

    def __reduce__(self) -> Any:
        raise TaskNotPicklable(
            f"{self!r} can be sent only in tasks of the pool that it came from. Send "
            "handle.cpu() instead."
        )


def _to_cpu(*args: Any) -> Any:
    return device_memory.copy_to(args[-1], "cpu")  # a context may precede the tensor


@register(TensorHandle)
def _reduce(pickler: Context, handle: TensorHandle) -> Any:
    layout = pickler.layout
    if layout.pool != handle._pool:
        return handle.__reduce__()
    # Another worker gets a copy.
    if layout.target is not None and layout.target != handle.worker:
        return device_memory.on_own_device, (handle.cpu(),)
    return open_handle, (in_place(pickler, handle._block), handle._block.name, *handle._about)


def _export(*args: Any) -> Any:
    tensor = args[-1]  # a context may precede the tensor
    exported = device_memory.export(tensor)
    if exported is None:
        raise TaskNotPicklable(
            f"{device_memory.about(tensor)} cannot be opened: another process made it, and CUDA "
            "cannot share memory that was received. Use handle.cpu(), or return a clone() of it."
        )
    return exported


class Keeper:
    """The tensors that a worker keeps for handles."""

    here: WorkerLocal[Keeper] = WorkerLocal()
    synchronize = staticmethod(device_memory.synchronize)

    def __init__(self, arena: Arena, pool: str, worker: int, pid: int) -> None:
        self.pool = pool
        self._arena = arena
        self._who = worker, pid
        self._kept: dict[int, tuple[Block, Any]] = {}  # by name; those checked last come last
        Keeper.here.set(self)

    def reduce(self, pickler: Context, tensor: Any) -> Any:
        """Keep a tensor, and pickle a handle to it."""
        if tensor.device.type == "xla":
            _compute()
        block = self._arena.lease(_TOKEN)
        if block is None:
            raise TaskNotPicklable(
                f"No shared memory is left for a handle to a tensor on {tensor.device}; delete "
                "results, or give the pool a larger memory_limit."
            )
        # `collect` drops the tensor when this is the only hold on the block.
        self._kept[block.name] = block, tensor
        sent = self._arena.adopt(block.name)  # the message has its own hold
        about = tuple(tensor.shape), tensor.dtype, str(tensor.device), tensor.requires_grad
        return open_handle, (
            in_place(pickler, sent),
            block.name,
            self.pool,
            *self._who,
            *about,
            device_memory.identity(tensor.device.index) if tensor.is_cuda else None,
        )

    def get(self, name: int) -> Any:
        kept = self._kept.get(name)
        return None if kept is None else kept[1]

    def collect(self, everything: bool = False) -> bool:
        """Drop tensors without handles.  Return whether any tensors are left.

        With ``everything`` this checks all tensors, else some of them in turn.
        """
        count = len(self._kept) if everything else _AT_ONCE
        # The loop needs a list, because it moves kept tensors to the end of the dict.
        for name in list(islice(self._kept, count)):
            kept = self._kept.pop(name)
            if not self._arena.alone(kept[0]):
                self._kept[name] = kept
        return bool(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def _compute() -> None:
    """Make torch_xla begin to compute the recorded operations.

    Otherwise they would take time in the next task, which would also get their errors, and their
    inputs would stay on the device even without handles.
    """
    torch_xla: Any = sys.modules.get("torch_xla")
    if torch_xla is not None:
        torch_xla.sync()


@builder
def open_handle(buffer: Any, name: int, pool: str, worker: int, pid: int, *about: Any) -> Any:
    """Return the tensor in its own worker, or a `TensorHandle` in the pool's process."""
    keeper = Keeper.here.get()
    # This is the pool's process, or a worker of another pool of the program.
    if keeper is None or keeper.pool != pool:
        return TensorHandle(buffer, pool, worker, pid, *about)
    tensor = keeper.get(name)
    if tensor is None:
        shape, dtype, device, *_ = about
        what = f"The tensor of shape {shape}, {dtype}, on {device}"
        raise TensorLost(pid, None, worker, what)
    return tensor
