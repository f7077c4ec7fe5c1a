"""Whether a large value was changed in place: told cheaply, if not each time."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["mark"]

# So many samples of an array, of so many bytes each.
_SAMPLES, _SAMPLE = 64, 64


def mark(value: Any) -> Any:
    """Return what differs after most changes in place, in time that does not grow with the size.

    Of an array its shape and samples of its bytes; of a tensor, and of each in a module, the count
    that torch keeps of changes; of anything else its length.
    """
    kind = type(value)
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.shape, value.strides, value.dtype, _samples(numpy, value)
    if torch is not None and isinstance(value, torch.Tensor):
        return _version(value), value.shape, value.data_ptr() if kind is torch.Tensor else None
    if torch is not None and isinstance(value, torch.nn.Module):
        state = (*value.parameters(), *value.buffers())
        return [(id(tensor), _version(tensor)) for tensor in state], value.training
    try:
        return len(value)
    except Exception:  # of any object's own __len__, or there is none
        return None


def _version(tensor: Any) -> int | None:
    # Inference tensors do not count their changes: torch raises where it is asked.
    return None if tensor.is_inference() else tensor._version


def _samples(numpy: Any, array: Any) -> bytes:
    if array.dtype.hasobject or not array.size:
        return b""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        flat = array.ravel(order="K").view(numpy.uint8)
        step = max(1, (len(flat) - _SAMPLE) // _SAMPLES)
        # By itself, since what is less than a step is left out of the rows.
        last = flat[-_SAMPLE:].tobytes()
        whole = len(flat) // step * step
        samples: bytes = flat[:whole].reshape(-1, step)[:, :_SAMPLE].tobytes() + last
        return samples
    # A view with gaps: its elements are taken by strides, since to flatten it would copy all.
    some = tuple(slice(None, None, max(1, n // 8)) for n in array.shape)
    return bytes(array[some].tobytes())
