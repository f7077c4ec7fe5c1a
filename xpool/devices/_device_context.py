"""`DeviceContext`: the device of one worker, and the code that opens it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from xpool._python.worker_local import WorkerLocal
from xpool.devices._table import row_of
from xpool.errors import DeviceError

if TYPE_CHECKING:
    import torch


PROCESS = "XPOOL_PROCESS"
"""A variable in a context's ``env``.  It names the process of which the worker is a thread, and
that process's largest number of workers: ``"1/2"`` is process 1 with at most 2 workers.  It is in
``env`` because wrappers of contexts pass ``env`` on."""

_opened: WorkerLocal[DeviceContext] = WorkerLocal()
"""The context of this worker, set by `enter`."""


def own_device() -> torch.device | None:
    """Return the device to which this worker is bound, or None for no device and for the CPU."""
    opened = _opened.get()
    return None if opened is None or opened.kind == "cpu" else opened.device


@dataclass(frozen=True, repr=False)
class DeviceContext:
    """The device of one worker, and the settings that bind the worker to it.

    It can be pickled, and is equal to its copies.  A replacement worker gets the same context.
    """

    kind: str
    """A kind of `devices`, such as ``"cuda"``, or the type of a device that only
    `torch.accelerator` knows.  ``"xla"`` is torch_xla without a TPU."""

    ordinal: int
    """Position among the contexts that were made together, from 0."""

    threads: int
    """Number of threads that one operation may use in this worker."""

    env: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    """Variables that the worker sets before it imports anything else.  None deletes a variable, and
    deletions come first.  A name that ends in ``*`` means all names with that prefix."""

    name: str = ""
    """The device's name on this machine, such as ``"2"``, ``"0,1"`` or ``"GPU-..."``; or empty."""

    framework: str = "torch"
    """The framework that opens the device: ``"torch"``, ``"torch_xla"`` or ``"torch_tpu"``."""

    count: int = 1
    """Number of devices of the worker.  A whole chip of TPU v2, v3 and 7x counts as two."""

    cpus: tuple[int, ...] = ()
    """Cores near the device, to which the worker is bound; empty: the parent's cores."""

    node: int | None = None
    """NUMA node of the device, if known."""

    group: int = 0
    """Number of workers in the worker's replica group, on all hosts; 0: it is in no group."""

    core: int | None = None
    """Index of the worker's device among those of its process, if workers are threads of one
    process; None: the worker has all devices of its process."""

    index: int = 0
    """Index of the device among those of its type that the worker sees.  It is 0 unless the kind
    has no mask."""

    host: str = ""
    """Name of the worker's host, in a pool over several hosts (`xpool.ray.devices`); or empty."""

    @property
    def device(self) -> torch.device:
        """The `torch.device` for the worker's tensors.  Imports torch."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        if self.framework == "torch_xla":
            return torch.device("xla", self.core or 0)
        return torch.device(row_of(self.kind).type, self.core or self.index)

    @property
    def devices(self) -> list[torch.device]:
        """All `count` devices of this worker.

        Raises:
            RuntimeError: this was called outside the worker, where it would start a runtime.
        """
        if _opened.get() is None:
            raise RuntimeError("DeviceContext.devices is known in the worker only; use .device")
        own = self.device
        if self.core is not None:
            return [own]
        if self.framework == "torch_xla":
            xm = import_module("torch_xla.core.xla_model")
            return [type(own)(name) for name in xm.get_xla_supported_devices()]
        if self.count == 1:
            return [own]
        return [type(own)(row_of(self.kind).type, i) for i in range(self.count)]

    def enter(self) -> None:
        """Open the device's runtime in the calling worker, and bind the worker to the device.

        The worker calls this once, before the pool's initializer.  If torch was imported before
        ``OMP_NUM_THREADS`` was set, as in a fork of a preloaded server, this sets torch's number of
        threads.  In a CPU worker this does not import torch.

        Raises:
            DeviceError: the device cannot be opened.  The text says what to check.
        """
        if self.kind != "cpu":
            try:
                (_open_mps if self.kind == "mps" else _OPENERS[self.framework])(self)
            except Exception as exc:
                raise DeviceError(
                    f"worker {self.ordinal} cannot open {self._title()}: {type(exc).__name__}: "
                    f"{exc}. {row_of(self.kind).remedy}"
                ) from exc
        # Set last, because a worker that could not open its device is bound to none.
        _opened.set(self)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(self.threads)

    def _title(self) -> str:
        core = "" if self.core is None else f", core {self.core},"
        return f"{self.kind} device {self.name or self.ordinal}{core} with {self.framework}"

    def __repr__(self) -> str:
        facts = [f"{self.kind}:{self.ordinal}"]
        if self.name and self.name != str(self.ordinal):
            facts.append(f"device {self.name}")
        if self.core is not None:
            facts.append(f"core {self.core}")
        if self.framework != "torch":
            facts.append(self.framework)
        facts.append(f"threads={self.threads}")
        if self.node is not None:
            facts.append(f"node={self.node}")
        if self.group:
            facts.append(f"group of {self.group}")
        return f"DeviceContext({', '.join(facts)})"


def _open_torch(context: DeviceContext) -> None:
    torch = import_module("torch")
    row = row_of(context.kind)
    for name in row.packages:
        import_module(name)  # a backend in a package of its own registers its devices
    module = getattr(torch, row.type, None)
    if module is None:
        raise RuntimeError(f"torch has no module torch.{row.type}")
    if hasattr(module, "set_device"):
        # A mask hides all devices but the worker's own, so index 0 is the first of these.
        module.set_device(context.index)
    else:
        torch.empty(1, device=context.device)  # opens the runtime, so that a failure shows now


def _open_mps(context: DeviceContext) -> None:
    torch = import_module("torch")
    if not torch.backends.mps.is_available():
        raise RuntimeError("torch.backends.mps.is_available() is False")
    torch.empty(1, device=context.device)  # opens Metal, so that a failure shows now


def _open_torch_xla(context: DeviceContext) -> None:
    torch_xla = import_module("torch_xla")
    xm = import_module("torch_xla.core.xla_model")
    if context.core is not None:
        found = xm.get_xla_supported_devices()
        if context.core >= len(found):
            raise RuntimeError(f"torch_xla has only {found}, which other workers use")
        torch_xla.device(context.core)  # makes it this thread's default device
    # An empty list keeps the optimizer of an independent worker from waiting for other workers.
    every: list[Any] = xm.get_xla_supported_devices() if context.group else []
    xm.set_replication(torch_xla.device(), every)


def _open_torch_tpu(context: DeviceContext) -> None:
    import_module("torch_tpu")  # registers the device with torch, if a chip is present
    torch = import_module("torch")
    if not hasattr(torch, "tpu"):
        raise RuntimeError("torch_tpu sees no chip, or no libtpu")
    torch.empty(1, device=context.device)  # opens the runtime, which fails if the chip is in use


_OPENERS = {"torch": _open_torch, "torch_xla": _open_torch_xla, "torch_tpu": _open_torch_tpu}
