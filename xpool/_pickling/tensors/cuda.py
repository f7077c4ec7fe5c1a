"""The few calls of torch that sharing the memory of a GPU takes: all of them, and no policy.

`cuda_ipc` decides; a test puts a stand-in into the place of `calls`.  Identities of GPUs, not their
numbers, go between processes, since each may be masked to others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Calls", "calls", "plain_identity"]


def plain_identity(uuid: str) -> str:
    """Return a UUID as torch writes it; NVML and masks have ``GPU-`` or ``MIG-`` before it."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


class Calls:
    """What torch can do, of 2.4 or later: before, it does not tell identities."""

    def version(self) -> str:
        """Return torch's version, on which the form of its handles depends."""
        import torch

        return str(torch.__version__)

    def identity(self, ordinal: int) -> str:
        """Return the UUID of a GPU.

        Raises:
            AttributeError: this torch does not tell.
        """
        properties = sys.modules["torch"].cuda.get_device_properties(ordinal)
        return plain_identity(str(properties.uuid))

    def identities(self) -> list[str]:
        """Return the UUIDs of all GPUs that this process sees.  Starts CUDA."""
        import torch

        return [self.identity(i) for i in range(torch.cuda.device_count())]

    def ordinal(self, storage: Any) -> int:
        """Return the number of the GPU that a storage lies on."""
        return int(storage.device.index)

    def export(self, storage: Any) -> tuple[bytes, int, int]:
        """Return what another process opens a storage with: handle, size, offset, in bytes.

        torch counts who has opened it in a file of its own, in which a killed process stays
        counted; then the memory is never used again.  Here blocks of the arena tell that, and
        nobody forgets to.  So the count is taken back at once, and none is handed on.

        Raises:
            RuntimeError: CUDA or torch cannot do that; it says why.
        """
        _, handle, nbytes, offset, counter, place, _, _ = storage._share_cuda_()
        storage._release_ipc_counter(counter, place, device=storage.device.type)
        return handle, nbytes, offset

    def open(self, ordinal: int, handle: bytes, nbytes: int, offset: int) -> Any:
        """Return the storage that another process has exported.

        Raises:
            RuntimeError: CUDA or torch cannot do that; it says why.
        """
        import torch

        torch.cuda.init()
        # No count: torch is content to find no such file, as after the producer's death.  And no
        # event to wait for: the producer has waited.
        nowhere = b"/xpool-counts-itself"
        return torch.UntypedStorage._new_shared_cuda(
            ordinal, handle, nbytes, offset, nowhere, 0, b"", False
        )

    def weak(self, storage: Any) -> Callable[[], Any]:
        """Return what gives a storage as long as any tensor uses it, and then None."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        # The function keeps it: with it, the weak reference would be given back.
        weak = StorageWeakRef(storage)
        return lambda: torch.UntypedStorage._new_with_weak_ptr(weak.cdata)

    def tensor(self, storage: Any, offset: int, name: str, shape: Any, strides: Any) -> Any:
        """Return the tensor that has these elements of a storage."""
        import torch

        made = torch.empty(0, dtype=getattr(torch, name), device=storage.device)
        return made.set_(storage, offset, shape, strides)

    def synchronize(self, ordinal: int) -> None:
        """Wait until a GPU has done what this process has asked of it so far."""
        sys.modules["torch"].cuda.synchronize(ordinal)

    def collect(self) -> None:
        """Have torch close the file of its counts, which nobody uses any more."""
        sys.modules["torch"].cuda.ipc_collect()


calls = Calls()
