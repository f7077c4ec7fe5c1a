"""Makes `torch.utils.data.get_worker_info` and torch's collate function work in workers.

A worker thread uses the memory of a large batch again when the program has dropped that batch: the
kernel clears new memory page by page, which takes as long as filling it.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from xpool._memory.buffers import HUGE_PAGES_FROM, new_buffer

_of_thread = threading.local()


@contextmanager
def as_worker(info: Any, is_thread: bool) -> Iterator[None]:
    """Make `get_worker_info` return ``info`` in the block, for this thread or for the process."""
    holder, name = (_of_thread, "info") if is_thread else (torch_worker, "_worker_info")
    before = getattr(holder, name, None)
    setattr(holder, name, info)
    try:
        yield
    finally:
        setattr(holder, name, before)


def make_info(shard: int, workers: int, seed: int, dataset: Any, generators: Any) -> Any:
    """Return torch's `WorkerInfo` of a worker.  ``generators`` are those of a worker thread."""
    extra = {} if generators is None else {"rng": generators, "worker_method": "thread"}
    return torch_worker.WorkerInfo(
        id=shard, num_workers=workers, seed=seed, dataset=dataset, **extra
    )


def own_generators() -> Any:
    """Return new generators for one thread, or None if this torch's `WorkerInfo` has no ``rng``."""
    if not hasattr(torch_worker, "_RNG"):
        return None
    numpy = sys.modules.get("numpy")
    return torch_worker._RNG(
        random.Random(), torch.Generator(), None if numpy is None else numpy.random.RandomState()
    )


def seed_own(generators: Any, seed: int) -> None:
    if generators is None:
        return
    generators.random_generator.seed(seed)
    generators.torch_generator.manual_seed(seed)
    if generators.numpy_generator is not None:
        generators.numpy_generator.seed(seed % 2**32)


def use_threads() -> None:
    """Make `get_worker_info` return the info of the calling thread.

    Torch's function reads a variable of the process.  This replaces the code of the function, and
    not the function itself, because programs may have imported it under other names.
    """
    vars(torch_worker)["_xpool_of_thread"] = _of_thread
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    info = getattr(_xpool_of_thread, "info", None)  # type: ignore[name-defined]  # noqa: F821
    return _worker_info if info is None else info  # type: ignore[name-defined]  # noqa: F821


def use_common_memory() -> None:
    """Make torch collate tensors in memory that is not shared, in workers, too.

    In a worker, torch would make each batch in a new shared file.  For a batch of 19 MB that takes
    ten times as long, and the pool would still copy the batch from there.
    """
    torch_collate.default_collate_fn_map[torch.Tensor] = _stacked


def _stacked(batch: Any, **options: Any) -> Any:
    is_thread = getattr(_of_thread, "info", None) is not None
    if is_thread and (stacked := stack(batch)) is not None:
        return stacked
    with as_worker(None, is_thread):
        return torch_collate.collate_tensor_fn(batch, **options)


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
