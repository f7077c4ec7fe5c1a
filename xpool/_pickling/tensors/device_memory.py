"""Tensors in the memory of devices: copies through host memory, and shared memory of GPUs.

A copy goes to the receiver's own device, if it has one.  A worker's own device is the one to which
it is bound (`xpool.devices`).  The pool's process has none, so a received tensor never starts a
device's runtime there.

Memory of GPUs is shared with `torch.multiprocessing.reductions`.  torch counts the readers of its
handles: each handle must be opened once, by one process.  So each message has its own handles, and
a message that may be opened several times contains copies instead.  A message names a GPU by its
UUID, because processes may number GPUs differently.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from xpool._pickling.policy import Layout
from xpool._pickling.reducers import Context, builder
from xpool._pickling.tensors.extents import Seen
from xpool.errors import DeviceError, TaskNotPicklable

_WAY_OUT = (
    "Copies can always be sent: is_copy_tensor=True, or share_method='cpu', which shares only what "
    "lies in the host's memory."
)

_RECEIVED = "received from another process"
"""A part of torch's error for memory of another process, which CUDA cannot export again."""

_shared: set[int] = set()
"""The numbers of the GPUs whose memory this process shares with others."""


def about(tensor: Any) -> str:
    """Return a description of a tensor for an error's text."""
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


@builder
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


@builder
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


def is_kept(layout: Layout, tensor: Any) -> bool:
    """Whether this worker keeps a tensor and sends a handle to it."""
    if layout.keep is None or tensor.is_cpu or tensor.is_meta:
        return False
    return layout.method in (None, tensor.device.type)


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
