"""Which GPUs the workers of a pool see: by the masks that they start with, nobody is asked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from xpool._pickling.tensors.cuda import plain_identity

__all__ = ["Sight"]

_MASKS = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip


class Sight:
    """Which GPUs the workers see.

    Args:
        binds: what each worker sets in its environment, None: deletes; it has the rest from here.
    """

    def __init__(self, binds: Sequence[Mapping[str, str | None]]) -> None:
        self._binds = binds
        self.workers = len(binds)
        self._known: list[frozenset[str] | None] | None = None  # found out when first asked for

    def reach(self, gpu: str, worker: int | None) -> bool:
        """Whether a worker sees a GPU that this process or another worker sees; None: any does.

        NVML says what a mask means.  Where it does not, those with one mask see the same.
        """
        if self._known is None:
            self._known = self._look()
        if worker is None:
            return any(self.reach(gpu, i) for i in range(self.workers))
        known = self._known[worker]
        if known is None:
            return self._mask(self._binds[worker]) == self._mask({})
        return gpu in known

    def able(self, gpus: set[str]) -> list[int]:
        """Return the workers that see all of these."""
        every = range(self.workers)
        return [i for i in every if all(self.reach(gpu, i) for gpu in gpus)]

    def _look(self) -> list[frozenset[str] | None]:
        # Only here: most programs need these never.
        from xpool.devices.cuda import identities
        from xpool.devices.host import Host
        from xpool.devices.nvml import find_gpus

        gpus = find_gpus()
        found = [identities(Host(environ=self._environ(bind), gpus=gpus)) for bind in self._binds]
        return [uuids and frozenset(map(plain_identity, uuids)) for uuids in found]

    def _environ(self, bind: Mapping[str, str | None]) -> dict[str, str]:
        found = {**os.environ, **bind}
        return {name: value for name, value in found.items() if value is not None}

    def _mask(self, bind: Mapping[str, str | None]) -> list[str | None]:
        environ = self._environ(bind)
        return [environ.get(name) for name in _MASKS]
