"""`DeviceContext`: the device of one worker, and the code that opens it.

The table of the kinds of devices has a row for each.  `devices` and `DeviceContext` obey it, and so
does a pool over Ray's hosts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import xpool.devices._masks as masks
from xpool._python.worker_local import WorkerLocal
from xpool.devices._host import Host
from xpool.errors import DeviceError

if TYPE_CHECKING:
    import torch


class Row(NamedTuple):
    """What is known about a kind of device."""

    type: str
    """The type of its `torch.device`, unless torch_xla opens it: then ``"xla"``."""

    what: str
    """What its devices are called, in plural."""

    count: Callable[[Host], int]
    """The number of devices of a machine, whatever its masks say."""

    packages: tuple[str, ...] = ()
    """Packages of which one must be installed."""

    build: str = ""
    """What torch must be built with, as in `Host.build`; empty: any build."""

    resource: str = ""
    """Ray's name for such devices; empty: Ray has none."""

    remedy: str = ""
    """What to do if a worker cannot open its device."""

    mask: str = ""
    """The variable that hides devices from a worker's process; empty: there is none, or the kind
    has a function of its own in `xpool.devices._kinds`."""

    visible: Callable[[Host], list[Any]] = lambda host: []
    """Return the devices that the parent may see, each with its ``name`` and NUMA ``node``, in the
    order of its masks."""

    bind: Callable[[Sequence[Any], Mapping[str, str]], dict[str, str | None]] = lambda own, env: {}
    """Return the variables of a worker that owns some of these, from them and the parent's."""

    files: str = ""
    """Where the devices are looked for."""


def _number_of(kind: str) -> Callable[[Host], int]:
    return lambda host: len(host.accelerators.get(kind, ()))


TABLE = {
    "tpu": Row(
        type="tpu",
        what="TPU chips",
        count=lambda host: len(host.chips),
        packages=("torch_xla", "torch_tpu"),
        resource="TPU",
        remedy="A chip takes one process at a time: end the other one, which may be the program "
        "itself if it has used the device; `fuser /dev/vfio/* /dev/accel*` shows it",
    ),
    "cuda": Row(
        type="cuda",
        what="GPUs",
        count=lambda host: len(host.gpus or ()),
        packages=("torch",),
        build="CUDA",
        resource="GPU",
        remedy="nvidia-smi shows which processes use it; torch must be a CUDA build "
        "(torch.version)",
        mask=masks.CUDA,
        visible=masks.cuda,
        bind=masks.cuda_env,
    ),
    "rocm": Row(
        type="cuda",  # torch's builds for ROCm call HIP's devices "cuda", too
        what="AMD GPUs",
        count=_number_of("rocm"),
        packages=("torch",),
        build="ROCm",
        resource="GPU",
        remedy="rocm-smi shows which processes use it; torch must be a ROCm build "
        "(torch.version.hip)",
        mask=masks.HIP,
        visible=masks.rocm,
        bind=masks.rocm_env,
        files="/dev/kfd and /dev/dri/renderD*",
    ),
    "xpu": Row(
        type="xpu",
        what="Intel GPUs",
        count=_number_of("xpu"),
        packages=("torch",),
        build="XPU",
        resource="GPU",
        remedy="sycl-ls shows the devices; torch must be an XPU build (torch.version.xpu)",
        mask=masks.ZE,
        visible=masks.xpu,
        bind=masks.xpu_env,
        files="/dev/dri/renderD*, vendor 0x8086",
    ),
    "npu": Row(
        type="npu",
        what="Ascend NPUs",
        count=_number_of("npu"),
        packages=("torch_npu",),
        resource="NPU",
        remedy="npu-smi info shows which processes use it; torch_npu must fit torch and CANN",
        mask=masks.ASCEND,
        visible=masks.npu,
        bind=masks.npu_env,
        files="/dev/davinci*",
    ),
    "neuron": Row(
        type="neuron",
        what="NeuronCores",
        count=_number_of("neuron"),
        packages=("torch_neuronx",),
        resource="neuron_cores",
        remedy="A core takes one process at a time: neuron-ls shows which one has it",
        mask=masks.NEURON,
        visible=masks.neuron,
        bind=masks.neuron_env,
        files="/dev/neuron* and /sys/devices/virtual/neuron_device",
    ),
    "mps": Row(
        type="mps",
        what="Apple GPUs",
        count=lambda host: int(host.metal),
        packages=("torch",),
        remedy="It needs macOS 14 or later, and a build of torch for Apple's processors",
    ),
    "cpu": Row(
        type="cpu",
        what="cores",
        count=lambda host: len(host.cpus),
        resource="CPU",
    ),
    "xla": Row(
        type="xla",
        what="devices of torch_xla",
        count=lambda host: 0,  # "auto" never means it
        packages=("torch_xla",),
        remedy="PJRT_DEVICE selects torch_xla's client, <CLIENT>_NUM_DEVICES its number of devices",
    ),
}
"""The rows by kind.  "auto" means the first kind that this machine and its packages have."""


def row_of(kind: str) -> Row:
    """Return the row of a kind, or of a device that only `torch.accelerator` knows."""
    return TABLE.get(kind) or Row(
        type=kind,
        what=f"{kind} devices",
        count=lambda host: 0,
        remedy=f"torch.accelerator must report {kind} devices in the worker, too",
    )


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
                _OPENERS[self.framework](self)
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
    if row.type == "mps" and not torch.backends.mps.is_available():
        raise RuntimeError("torch.backends.mps.is_available() is False")
    if hasattr(module, "set_device"):
        # A mask hides all devices but the worker's own, so index 0 is the first of these.
        module.set_device(context.index)
    else:
        torch.empty(1, device=context.device)  # opens the runtime, so that a failure shows now


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
