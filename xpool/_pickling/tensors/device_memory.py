"""Tensors in the memory of devices: copies, shared memory of GPUs, and handles.

A copy goes to the receiver's own device, if it has one.  A worker's own device is the one to which
it is bound (`xpool.devices`).  The pool's process has none, so a received tensor never starts a
device's runtime there.

Memory of GPUs is shared with `torch.multiprocessing.reductions`.  torch counts the readers of its
handles: each handle must be opened once, by one process.  So each message has its own handles, and
a message that may be opened several times contains copies instead.  A message names a GPU by its
UUID, because processes may number GPUs differently.

Other chips cannot access each other's memory, and the pool's process must not open their runtimes.
So in share mode a worker keeps a tensor that it returns, and sends a `TensorHandle`.  A task with
the handle runs in that worker and gets the tensor itself.  Another worker gets a copy.  The pool's
process can use a tensor on a GPU in place: the tensor's worker then exports the memory.

A small block of the arena represents the tensor of a handle.  Processes with the handle, and
messages with it, hold this block, and the worker keeps the tensor as long as it is held.  So
handles in unopened messages or killed processes need no special case.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from math import prod
from typing import Any

from xpool._memory.arena import Arena
from xpool._memory.holds import Block
from xpool._pickling.frame import pools
from xpool._pickling.reducers import Context, in_place, register
from xpool._pickling.tensors.extents import Seen
from xpool._python.worker_local import WorkerLocal
from xpool.errors import DeviceError, OptionError, PoolClosed, TaskNotPicklable, TensorLost

_WAY_OUT = (
    "Copies can always be sent: is_copy_tensor=True, or share_method='cpu', which shares only what "
    "lies in the host's memory."
)

_RECEIVED = "received from another process"
"""A part of torch's error for memory of another process, which CUDA cannot export again."""

_shared: set[int] = set()
"""The numbers of the GPUs whose memory this process shares with others."""


def about(tensor: Any) -> str:
    shape = "nested" if tensor.is_nested else f"of shape {tuple(tensor.shape)}"
    return f"A tensor {shape}, {tensor.dtype}, on {tensor.device}"


def share_memory(pickler: Context, tensor: Any) -> Any:
    """Return how to open a tensor's memory in another process, or None if the message gets a copy.

    Raises:
        TaskNotPicklable: CUDA cannot share the memory.  The text says why and what to do.
    """
    layout = pickler.layout
    if not layout.gpus or layout.kept or not tensor.numel():
        return None
    seen = Seen.of(pickler)
    # Only the second run exports, because the output of the first is never opened.
    if seen.plan is None:
        seen.exports = True
        return _nothing, ()
    return export(tensor)


def export(tensor: Any) -> Any:
    """Return the function that opens a tensor's memory once in another process, and its arguments.

    Return None if the memory was received from another process and cannot be exported again.

    Raises:
        TaskNotPicklable: CUDA cannot share the memory.  The text says why and what to do.
    """
    torch = sys.modules["torch"]
    ordinal = tensor.device.index
    gpu = identity(ordinal)
    if gpu is None:
        raise TaskNotPicklable(
            f"{about(tensor)} cannot be shared: torch {torch.__version__} gives GPUs no UUIDs; "
            f"torch 2.4 does. {_WAY_OUT}"
        )
    try:
        rebuild, args = torch.multiprocessing.reductions.reduce_tensor(tensor)
    except RuntimeError as exc:
        if _RECEIVED in str(exc):
            return None
        raise TaskNotPicklable(
            f"{about(tensor)} cannot be shared: CUDA's IPC fails here ({exc}). {_WAY_OUT}"
        ) from exc
    _shared.add(ordinal)
    return open_exported, (gpu, rebuild, args)


def open_exported(gpu: str, rebuild: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the tensor whose memory another process has exported.

    Args:
        gpu: UUID of the GPU.
        rebuild, args: torch's reduction of the tensor.

    Raises:
        DeviceError: this process does not see the GPU, or CUDA cannot open the memory.
    """
    seen = _identities()
    if gpu not in seen:
        raise DeviceError(
            f"A tensor on the GPU {gpu} cannot be opened: this process sees {seen or 'no GPU'}. "
            f"Give the task to a worker that sees it (worker= of a P2PPool). {_WAY_OUT}"
        )
    ordinal = seen.index(gpu)
    call = inspect.signature(rebuild).bind(*args)
    call.arguments["storage_device"] = ordinal
    try:
        tensor = rebuild(*call.args)
    except RuntimeError as exc:
        raise DeviceError(
            f"A tensor on the GPU {gpu} cannot be opened: {exc}. The process that made it may have "
            f"ended. {_WAY_OUT}"
        ) from exc
    _shared.add(ordinal)
    return tensor


def _nothing() -> None:
    """Takes the place of a tensor in the first run of a pickler, whose output is never opened."""


def identity(ordinal: int) -> str | None:
    """Return the UUID of a GPU, or None with torch before 2.4."""
    properties = sys.modules["torch"].cuda.get_device_properties(ordinal)
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


@lru_cache(1)  # CUDA reads the mask once
def _identities() -> list[str | None]:
    return [identity(i) for i in range(sys.modules["torch"].cuda.device_count())]


def synchronize() -> None:
    """Wait until the GPUs whose memory this process shares have finished its operations.

    A worker calls this before it sends the answer of a task, so that the task's writes are done.
    """
    for ordinal in _shared:
        sys.modules["torch"].cuda.synchronize(ordinal)


def keep(pickler: Context, tensor: Any) -> Any:
    """Keep a tensor in this worker, and return how to make a handle; None: its values are sent."""
    layout = pickler.layout
    if layout.keep is None or tensor.is_cpu or tensor.is_meta:
        return None
    return layout.keep(pickler, tensor) if layout.method in (None, tensor.device.type) else None


def on_own_device(tensor: Any) -> Any:
    """Return a received tensor on the device of this process, or in host memory."""
    # If this module was not imported before, the process has no device.
    context: Any = sys.modules.get("xpool.devices._device_context")
    device = context.own_device() if context is not None else None
    return tensor if device is None else copy_to(tensor, device)


def copy_to(tensor: Any, device: Any) -> Any:
    """Return a leaf tensor on another device, with all other properties of the tensor."""
    torch = sys.modules["torch"]
    made = tensor.detach().to(device)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        made.requires_grad_()
    made.__dict__.update(tensor.__dict__)
    return made


# -- handles ---------------------------------------------------------------------------------------

_TOKEN = 64  # bytes of the block that represents a tensor

_AT_ONCE = 64  # number of kept tensors that are checked before a task


class TensorHandle:
    """A tensor on the device of a worker.

    If an argument of a task contains a handle, the task runs in the handle's worker, and its
    function gets the tensor itself, without a copy.  If the task runs in another worker
    (``worker=i``, or handles of two workers in one task), that worker gets a copy through the
    memory of this machine.  The copy is on the device to which the worker is bound, or else on the
    CPU.  The worker keeps the tensor as long as handles exist.

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
        return prod(self.shape) * self.dtype.itemsize  # type: ignore[no-any-return]

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
    return copy_to(args[-1], "cpu")  # a context may precede the tensor


@register(TensorHandle)
def _reduce(pickler: Context, handle: TensorHandle) -> Any:
    layout = pickler.layout
    if layout.pool != handle._pool:
        return handle.__reduce__()
    # Another worker gets a copy.
    if layout.target is not None and layout.target != handle.worker:
        return on_own_device, (handle.cpu(),)
    return open_handle, (in_place(pickler, handle._block), handle._block.name, *handle._about)


def _export(*args: Any) -> Any:
    tensor = args[-1]  # a context may precede the tensor
    exported = export(tensor)
    if exported is None:
        raise TaskNotPicklable(
            f"{about(tensor)} cannot be opened: another process made it, and CUDA "
            "cannot share memory that was received. Use handle.cpu(), or return a clone() of it."
        )
    return exported


class Keeper:
    """The tensors that a worker keeps for handles."""

    here: WorkerLocal[Keeper] = WorkerLocal()
    synchronize = staticmethod(synchronize)

    def __init__(self, arena: Arena, pool: str, worker: int, pid: int) -> None:
        self.pool = pool
        self._arena = arena
        self._who = worker, pid
        self._kept: dict[int, tuple[Block, Any]] = {}  # by name; those checked last come last
        Keeper.here.set(self)

    def reduce(self, pickler: Context, tensor: Any) -> Any:
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
            identity(tensor.device.index) if tensor.is_cuda else None,
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


def _compute() -> None:
    """Make torch_xla begin to compute the recorded operations.

    Otherwise these operations would run in the next task, which would get their errors, and their
    inputs would stay on the device even without handles.
    """
    torch_xla: Any = sys.modules.get("torch_xla")
    if torch_xla is not None:
        torch_xla.sync()


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
