"""Makes `torch.utils.data.get_worker_info` work in the workers of this loader."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from xpool.data._batch_memory import stack

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
