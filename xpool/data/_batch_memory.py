"""Memory for large batches.  A worker thread uses it again when the program has dropped a batch.

The kernel clears new memory page by page, which takes as long as filling it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import torch

from xpool._memory.buffers import HUGE_PAGES_FROM, new_buffer

KEPT_BUFFERS = 8
"""How many buffers of one size a thread keeps: about as many as it has batches in flight."""


class _Buffers(threading.local):
    """A thread's latest buffers, by size, each with a weak reference to the view that uses it."""

    def __init__(self) -> None:
        self._known: dict[int, deque[tuple[Any, weakref.ref[memoryview]]]] = {}

    def lease(self, nbytes: int) -> memoryview:
        """Return a view of memory.  The memory is free again when the view is collected."""
        # Batches of nearly the same size share buffers.  Pages that are not touched take no memory.
        size = 1 << (nbytes - 1).bit_length()
        known = self._known.setdefault(size, deque(maxlen=KEPT_BUFFERS))
        # A callback of the weak reference could lose an exception of a signal handler.
        place = next((i for i, (_, user) in enumerate(known) if user() is None), None)
        if place is None:
            buffer = new_buffer(size)
        else:
            buffer = known[place][0]
            del known[place]
        view = memoryview(buffer)
        known.append((buffer, weakref.ref(view)))
        return view


_buffers = _Buffers()


def stack(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Return what `torch.stack` returns, in memory used before.  Return None for small batches, and
    for tensors that ``out=`` would change.

    The storage holds the view, so the buffer is in use as long as a tensor or array uses it.
    """
    first = tensors[0]
    nbytes = len(tensors) * first.numel() * first.element_size()
    if nbytes < HUGE_PAGES_FROM or not all(_is_like(tensor, first) for tensor in tensors):
        return None
    view = _buffers.lease(nbytes)
    out = torch.frombuffer(view, dtype=first.dtype, count=nbytes // first.element_size())
    return torch.stack(tensors, 0, out=out.view(len(tensors), *first.shape))


def _is_like(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether ``out=`` keeps the class, the type, the strides and the gradients of this tensor."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_nested
        and tensor.dtype is first.dtype
        and tensor.shape == first.shape
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
