"""A stand-in for GPUs that this machine does not have: their memory is files, which processes map.

It takes the place of `xpool._pickling.tensors.cuda.calls`, and refuses what CUDA and torch would:
to open memory in the process that made it, to export what was received or what a process does not
see.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from typing import Any

import torch
from torch.utils._pytree import tree_map

from xpool._pickling.reducers import REDUCERS
from xpool._pickling.tensors import cuda, devices, pinned
from xpool._pickling.tensors.dense import reduce_any
from xpool.pickle import dumps

__all__ = ["Calls", "OnGpu", "install", "on_gpu", "uninstall"]

FOLDER = "XPOOL_TEST_GPU"
"""The variable that names the folder of the memory."""


class OnGpu(torch.Tensor):
    """A wrapper that torch takes for a tensor on ``cuda:0``; its elements lie in a file."""

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

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

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
    """Return a tensor with the same elements, in memory of the GPU."""
    path = os.path.join(os.environ[FOLDER], uuid.uuid4().hex)
    storage = torch.UntypedStorage.from_file(path, True, tensor.untyped_storage().nbytes())
    storage.copy_(tensor.untyped_storage())
    storage.path = path
    there = torch.empty(0, dtype=tensor.dtype)
    there.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return OnGpu(there)


class Calls:
    """As `xpool._pickling.tensors.cuda.Calls`."""

    def __init__(self) -> None:
        self.torch = "2.13.0"
        self.collected = 0
        self.waited = 0
        self.fails: str | None = None

    def version(self) -> str:
        return os.environ.get("XPOOL_TEST_TORCH", self.torch)

    def identities(self) -> list[str]:
        mask = os.environ.get("CUDA_VISIBLE_DEVICES", "GPU-one")
        return [cuda.plain_identity(one) for one in mask.split(",")]

    def identity(self, ordinal: int) -> str:
        return self.identities()[ordinal]

    def ordinal(self, storage: Any) -> int:
        return 0

    def export(self, storage: Any) -> tuple[bytes, int, int]:
        if self.fails:
            raise RuntimeError(self.fails)
        if hasattr(storage, "received"):
            raise RuntimeError("Attempted to send CUDA tensor received from another process")
        storage.exports = getattr(storage, "exports", 0) + 1
        return f"{os.getpid()} {storage.path}".encode(), storage.nbytes(), 0

    def open(self, ordinal: int, handle: bytes, nbytes: int, offset: int) -> Any:
        pid, path = handle.decode().split(" ", 1)
        assert int(pid) != os.getpid(), "opened by the process that made it"
        if self.fails:
            raise RuntimeError(self.fails)
        storage = torch.UntypedStorage.from_file(path, True, nbytes)
        storage.received = True
        return storage

    weak = cuda.Calls.weak

    def tensor(self, storage: Any, offset: int, name: str, shape: Any, strides: Any) -> Any:
        made = torch.empty(0, dtype=getattr(torch, name))
        return OnGpu(made.set_(storage, offset, shape, strides))

    def synchronize(self, ordinal: int) -> None:
        self.waited += 1

    def collect(self) -> None:
        self.collected += 1


_before: list[Any] = []


def install(folder: str | None = None) -> None:
    """Give this process the stand-in."""
    os.environ[FOLDER] = folder or os.environ.get(FOLDER) or tempfile.mkdtemp()
    dumps(torch.nn.Parameter(torch.ones(1)))  # reducers of torch's own types come first
    REDUCERS[OnGpu] = reduce_any
    _before[:] = [cuda.calls, devices._flat, devices._without_gaps, pinned.download]
    cuda.calls = Calls()  # type: ignore[assignment]
    devices._flat = lambda torch, tensor: _before[1](torch, _inner(tensor))
    devices._without_gaps = lambda torch, tensor: OnGpu(_before[2](torch, _inner(tensor)))
    pinned.download = lambda source, target: target.copy_(source)


def uninstall() -> None:
    """Take it away again."""
    REDUCERS.pop(OnGpu, None)
    cuda.calls, devices._flat, devices._without_gaps, pinned.download = _before
