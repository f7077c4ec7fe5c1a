"""Batches in pinned memory, from which a device copies without the processor."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils.data._utils import pin_memory as torch_pin_memory

__all__ = ["can_pin", "pinned", "warn_of_pinning"]


def can_pin() -> bool:
    """Whether there is a device for which memory can be pinned."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return bool(torch.cuda.is_available())
    return bool(accelerator.is_available()) and accelerator.current_accelerator().type != "mps"


def pinned(batch: Any) -> Any:
    """Return the batch with its tensors in pinned memory, and other leaves as torch has them."""
    return torch_pin_memory.pin_memory(batch)


def warn_of_pinning(device: str) -> None:
    """Say what of ``pin_memory=True`` has no effect here."""
    if device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device={device!r}.",
            stacklevel=4,
        )
    if not can_pin():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, then device pinned "
            "memory won't be used.",
            stacklevel=4,
        )
