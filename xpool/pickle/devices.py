"""Tensors of a device, copied: through host memory, to the receiver's own device where it has one.

The receiver's own device is the one that its worker is bound to (`xpool.devices`).  The pool's own
process has none, so it never starts a device's runtime because of what it receives.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["on_own_device", "staged"]


def staged(tensor: Any) -> Any:
    """Return the reduction of a tensor that is on a device, without gradient."""
    return on_own_device, (tensor.cpu(),)


def on_own_device(tensor: Any) -> Any:
    """Return a tensor that has arrived in host memory where this process wants it."""
    context: Any = sys.modules.get("xpool.devices.context")
    device = context.own_device() if context is not None else None
    return tensor if device is None else tensor.to(device)
