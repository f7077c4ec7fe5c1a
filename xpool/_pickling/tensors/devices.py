"""Tensors of a device, copied: through host memory, to the receiver's own device where it has one.

Large ones of a GPU go straight into the block in which they travel, and straight out of it
(`pinned`); other devices copy to and from memory of torch's.

The receiver's own device is the one that its worker is bound to (`xpool.devices`).  The pool's own
process has none, so it never starts a device's runtime because of what it receives.
"""

from __future__ import annotations

import sys
from typing import Any

from xpool._memory.arena import Block
from xpool._pickling.policy import Layout, Placement, placement
from xpool._pickling.tensors import pinned
from xpool._pickling.tensors.cuda_ipc import from_the_pool
from xpool._pickling.tensors.extents import extent

__all__ = ["copy_to", "fetch", "is_kept", "on_own_device"]


def is_kept(layout: Layout, tensor: Any) -> bool:
    """Whether a worker keeps a tensor that it sends, and sends a handle to it.

    What the pool's process has exported goes back there as it is.
    """
    if layout.keep is None or tensor.is_cpu or tensor.is_meta:
        return False
    if layout.method not in (None, tensor.device.type):
        return False
    return not from_the_pool(tensor)


def fetch(layout: Layout, tensor: Any) -> tuple[Block, tuple[int, ...]] | None:
    """Copy a large tensor of a GPU into a block for one message; return that, and the strides.

    None: it is not one, or there is no memory for a block.  ``tensor.cpu()`` does for all.
    """
    if not tensor.is_cuda or layout.lessor is None:
        return None
    if placement(tensor.nbytes) is not Placement.OUT_OF_BAND:
        return None
    block = layout.lessor(tensor.nbytes)
    if block is None:
        return None
    torch = sys.modules["torch"]
    if not _is_dense(tensor):
        tensor = _without_gaps(torch, tensor)
    host = torch.frombuffer(block.view(tensor.nbytes), dtype=torch.uint8)
    pinned.download(_flat(torch, tensor), host)
    # The message names the block, and writes nothing into it.
    block.filled = True  # type: ignore[misc]  # its subclass has it
    return block, tensor.stride()


def on_own_device(tensor: Any) -> Any:
    """Return a tensor that has arrived in host memory where this process wants it."""
    # Not imported here: where nobody has, this process is bound to no device.
    context: Any = sys.modules.get("xpool.devices.context")
    device = context.own_device() if context is not None else None
    return tensor if device is None else copy_to(tensor, device)


def copy_to(tensor: Any, device: Any) -> Any:
    """Return a leaf on another device, with all that the tensor is besides its values."""
    torch = sys.modules["torch"]
    made = _moved(torch, tensor.detach(), device)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        made.requires_grad_()
    made.__dict__.update(tensor.__dict__)
    return made


def _moved(torch: Any, tensor: Any, device: Any) -> Any:
    device = torch.device(device)
    if (
        device.type != "cuda"
        or not tensor.is_cpu
        or placement(tensor.nbytes) is not Placement.OUT_OF_BAND
        or not _is_dense(tensor)
    ):
        return tensor.to(device)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    pinned.upload(_flat(torch, tensor), _flat(torch, made))
    return made


def _is_dense(tensor: Any) -> bool:
    """Whether its elements, and nothing else, lie in so many bytes from its address on."""
    if tensor.layout is not sys.modules["torch"].strided or tensor.is_nested:
        return False
    size = tensor.element_size()
    (_, _, gaps), own = extent(0, tensor.shape, [step * size for step in tensor.stride()], size)
    return own == tensor.nbytes and not gaps


def _without_gaps(torch: Any, tensor: Any) -> Any:
    """A copy where the tensor is, its axes in the same order."""
    return torch.empty_like(tensor).copy_(tensor)


def _flat(torch: Any, tensor: Any) -> Any:
    """The bytes of a dense tensor, as a tensor."""
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
