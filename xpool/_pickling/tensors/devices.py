"""Copies tensors of a device through host memory to the receiver's own device, if it has one.

A worker's own device is the one to which it is bound (`xpool.devices`).  The pool's process has
none, so a received tensor never starts a device's runtime there.
"""

from __future__ import annotations

import sys
from typing import Any

from xpool._pickling.policy import Layout


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
