"""Simulated GPUs: their memory is files that processes map.

It replaces torch's code in `torch.multiprocessing.reductions`. Like CUDA it refuses to open memory
twice, to open it in the process that made it, and to export received memory. It counts handles,
because each must be opened once.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils._pytree import tree_map

from xpool._pickling.reducers import REDUCERS
from xpool._pickling.tensors import device_memory as cuda
from xpool._pickling.tensors.dense import reduce_any
from xpool.pickle import dumps

__all__ = ["FAILS", "OnGpu", "install", "on_gpu", "unopened", "waited", "uninstall"]

FOLDER = "XPOOL_TEST_GPU"
"""The variable with the folder of the memory."""

FAILS = "XPOOL_TEST_GPU_FAILS"
"""The variable with CUDA's error when sharing is impossible."""

waited: list[int] = []
"""The GPUs for which this process has waited."""


class OnGpu(torch.Tensor):
    """A wrapper that torch takes for a tensor on ``cuda:0``; its elements are in a file."""

    inner: torch.Tensor

    __slots__ = ("inner",)

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            dtype=inner.dtype,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            device="cuda:0",
            requires_grad=requires_grad,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.inner.clone()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        to = kwargs.pop("device", None)
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if to is not None and torch.device(to).type == "cpu":
            return out.clone()
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, OnGpu) else x


def on_gpu(tensor: torch.Tensor) -> OnGpu:
    """Return a copy of the tensor in GPU memory."""
    path = os.path.join(os.environ[FOLDER], uuid.uuid4().hex)
    storage = torch.UntypedStorage.from_file(path, True, tensor.untyped_storage().nbytes())
    storage.copy_(tensor.untyped_storage())
    storage.path = path
    there = torch.empty(0, dtype=tensor.dtype)
    there.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return OnGpu(there)


def _reduce_tensor(tensor: OnGpu) -> Any:
    storage = tensor.inner.untyped_storage()
    if FAILS in os.environ:
        raise RuntimeError(os.environ[FAILS])
    if hasattr(storage, "received"):
        raise RuntimeError("Attempted to send CUDA tensor received from another process; ...")
    handle = f"{storage.path}.{uuid.uuid4().hex}"
    with open(handle, "x") as file:
        file.write(str(os.getpid()))
    inner = tensor.inner
    place = inner.dtype, inner.storage_offset(), tuple(inner.shape), inner.stride()
    return _rebuild, (0, handle, storage.path, storage.nbytes(), place)


def _rebuild(storage_device: int, handle: str, path: str, nbytes: int, place: Any) -> OnGpu:
    if FAILS in os.environ:
        raise RuntimeError(os.environ[FAILS])
    with open(handle) as file:
        assert int(file.read()) != os.getpid(), "opened by the process that made it"
    os.unlink(handle)
    storage = torch.UntypedStorage.from_file(path, True, nbytes)
    storage.received = True
    dtype, *where = place
    return OnGpu(torch.empty(0, dtype=dtype).set_(storage, *where))


def unopened() -> list[str]:
    """Return the handles that no process has opened."""
    return [name for name in os.listdir(os.environ[FOLDER]) if "." in name]


def _identities() -> list[str]:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "one").split(",")


_before: list[Any] = []


def install(folder: str | None = None) -> None:
    """Install the simulation in this process."""
    os.environ[FOLDER] = folder or os.environ.get(FOLDER) or tempfile.mkdtemp()
    dumps(torch.nn.Parameter(torch.ones(1)))  # register the reducers of torch's own types first
    REDUCERS[OnGpu] = reduce_any
    _before[:] = reductions.reduce_tensor, cuda.identity, cuda._identities, torch.cuda.synchronize
    reductions.reduce_tensor = _reduce_tensor
    cuda.identity = lambda ordinal: _identities()[ordinal]
    cuda._identities = _identities
    torch.cuda.synchronize = waited.append


def uninstall() -> None:
    """Remove the simulation."""
    REDUCERS.pop(OnGpu, None)
    os.environ.pop(FOLDER, None)  # tests on a real GPU ask for it
    reductions.reduce_tensor, cuda.identity, cuda._identities, torch.cuda.synchronize = _before
    cuda._shared.clear()
