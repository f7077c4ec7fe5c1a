"""`DeviceContext`: one worker's device, and how the worker opens it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from xpool._python.worker_local import WorkerLocal
from xpool.errors import DeviceError

if TYPE_CHECKING:
    import torch

__all__ = ["PROCESS", "DeviceContext", "own_device"]

PROCESS = "XPOOL_PROCESS"
"""The variable in a context's ``env`` that names the process of which its worker is a thread, and
the most workers that it may have: ``"1/2"``.  In ``env``, which who wraps a context passes on."""

_opened: WorkerLocal[DeviceContext] = WorkerLocal()
"""The context that this worker has entered."""


def own_device() -> torch.device | None:
    """Return the device that this worker is bound to; None: it is bound to none, or to the CPU."""
    opened = _opened.get()
    return None if opened is None or opened.kind == "cpu" else opened.device


@dataclass(frozen=True, repr=False)
class DeviceContext:
    """One worker's device: which it is, and what to set so that the worker owns it.

    Picklable, and equal to its copies.  A replacement worker gets its predecessor's.
    """

    kind: str
    """``"cpu"``, ``"cuda"``, ``"mps"``, ``"tpu"`` or ``"xla"`` (torch_xla without a TPU)."""

    ordinal: int
    """Position among the contexts made together, from 0."""

    threads: int
    """Threads that one operation may use inside this worker."""

    env: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    """Variables that the worker sets before it imports anything else.  Those with None are deleted
    first; a name that ends in ``*`` stands for all that begin so."""

    name: str = ""
    """What the device is called on this machine: ``"2"``, ``"0,1"``, ``"GPU-..."``; or empty."""

    framework: str = "torch"
    """What opens it: ``"torch"``, ``"torch_xla"`` or ``"torch_tpu"``."""

    count: int = 1
    """Devices that the worker has: more with ``per_worker=``, and two for each chip of TPU v2, v3
    and 7x, unless each is another worker's."""

    cpus: tuple[int, ...] = ()
    """Cores that the worker is bound to, those near its device; empty: the parent's."""

    node: int | None = None
    """The device's NUMA node, where known."""

    group: int = 0
    """Workers in its replica group, on all hosts; 0: it is independent."""

    core: int | None = None
    """Which of its process's devices it has, where others are other workers', threads of the same
    process; None: it has them all."""

    host: str = ""
    """Name of the host that it is on, in a pool over several (`xpool.ray.devices`); or empty."""

    @property
    def device(self) -> torch.device:
        """The `torch.device` to put tensors on.  Imports torch, if nothing else has."""
        import torch

        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device("xla" if self.framework == "torch_xla" else self.kind, self.core or 0)

    @property
    def devices(self) -> list[torch.device]:
        """All `count` devices of this worker.

        Raises:
            RuntimeError: called outside the worker, where asking would start a runtime.
        """
        if _opened.get() is None:
            raise RuntimeError("DeviceContext.devices is known in the worker only; use .device")
        import torch

        if self.core is not None:
            return [self.device]
        if self.framework == "torch_xla":
            xm = import_module("torch_xla.core.xla_model")
            return [torch.device(name) for name in xm.get_xla_supported_devices()]
        if self.count == 1:
            return [self.device]
        return [torch.device(self.kind, i) for i in range(self.count)]

    def enter(self) -> None:
        """Bind the calling worker: called once in it, before the pool's initializer.

        Opens the device's runtime.  A worker that starts from a preloaded server has torch imported
        already, too early for ``OMP_NUM_THREADS``; so the number is set there by hand.  A CPU
        worker that has not imported torch is not made to: it will find the variable when it does.

        Raises:
            DeviceError: the device cannot be opened; the message says what to look at.
        """
        if self.kind != "cpu":
            try:
                (_open_mps if self.kind == "mps" else _OPENERS[self.framework])(self)
            except Exception as exc:
                raise DeviceError(
                    f"worker {self.ordinal} cannot open {self._title()}: {type(exc).__name__}: "
                    f"{exc}. {_REMEDY[self.kind]}"
                ) from exc
        # Only now: a worker that could not open its device is bound to none.
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


_REMEDY = {
    "cuda": "nvidia-smi shows which processes use it; torch must be a CUDA build (torch.version)",
    "mps": "It needs macOS 14 or later, and a build of torch for Apple's processors",
    "tpu": "A chip takes one process at a time: end the other one, this program's parent included "
    "if it has touched the device; `fuser /dev/vfio/* /dev/accel*` shows it",
    "xla": "PJRT_DEVICE and <CLIENT>_NUM_DEVICES say which client torch_xla takes",
}


def _open_cuda(context: DeviceContext) -> None:
    import torch

    # The mask leaves the worker nothing but its own GPUs.
    torch.cuda.set_device(0)


def _open_mps(context: DeviceContext) -> None:
    import torch

    if not torch.backends.mps.is_available():
        raise RuntimeError("torch.backends.mps.is_available() is False")
    torch.empty(1, device=context.device)  # opens Metal, so that a failure is found at the start


def _open_torch_xla(context: DeviceContext) -> None:
    torch_xla = import_module("torch_xla")
    xm = import_module("torch_xla.core.xla_model")
    if context.core is not None:
        found = xm.get_xla_supported_devices()
        if context.core >= len(found):
            raise RuntimeError(f"torch_xla has only {found}, and another worker has that")
        torch_xla.device(context.core)  # from now on, this thread's default
    # An independent worker replicates nothing; without this its optimizer would wait for others.
    every: list[Any] = xm.get_xla_supported_devices() if context.group else []
    xm.set_replication(torch_xla.device(), every)


def _open_torch_tpu(context: DeviceContext) -> None:
    import_module("torch_tpu")  # registers the device with torch, if there is a chip
    torch = import_module("torch")
    if not hasattr(torch, "tpu"):
        raise RuntimeError("torch_tpu sees no chip, or no libtpu")
    # Opens the runtime, so that a chip that is in use is found out at the start.
    torch.empty(1, device=context.device)


_OPENERS = {"torch": _open_cuda, "torch_xla": _open_torch_xla, "torch_tpu": _open_torch_tpu}
