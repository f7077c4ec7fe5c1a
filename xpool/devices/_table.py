"""The table of the kinds of devices, a row for each.

`devices` and `DeviceContext` obey it, and so does a pool over Ray's hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import xpool.devices._masks as masks
from xpool.devices._host import Host


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


def _row(
    kind: str,
    visible: Callable[[Mapping[str, str], Sequence[Any]], list[masks.Visible]],
    **facts: Any,
) -> Row:
    """Return the row of a kind whose devices are in `Host.accelerators`."""

    def found(host: Host) -> Sequence[Any]:
        return host.accelerators.get(kind, ())

    return Row(
        count=lambda host: len(found(host)),
        visible=lambda host: visible(host.environ, found(host)),
        **facts,
    )


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
    "rocm": _row(
        "rocm",
        masks.rocm,
        type="cuda",  # torch's builds for ROCm call HIP's devices so
        what="AMD GPUs",
        packages=("torch",),
        build="ROCm",
        resource="GPU",
        remedy="rocm-smi shows which processes use it; torch must be a ROCm build "
        "(torch.version.hip)",
        mask=masks.HIP,
        bind=masks.rocm_env,
        files="/dev/kfd and /dev/dri/renderD*",
    ),
    "xpu": _row(
        "xpu",
        masks.xpu,
        type="xpu",
        what="Intel GPUs",
        packages=("torch",),
        build="XPU",
        resource="GPU",
        remedy="sycl-ls shows the devices; torch must be an XPU build (torch.version.xpu)",
        mask=masks.ZE,
        bind=masks.xpu_env,
        files="/dev/dri/renderD*, vendor 0x8086",
    ),
    "npu": _row(
        "npu",
        masks.npu,
        type="npu",
        what="Ascend NPUs",
        packages=("torch_npu",),
        resource="NPU",
        remedy="npu-smi info shows which processes use it; torch_npu must fit torch and CANN",
        mask=masks.ASCEND,
        bind=masks.npu_env,
        files="/dev/davinci*",
    ),
    "neuron": _row(
        "neuron",
        masks.neuron,
        type="neuron",
        what="NeuronCores",
        packages=("torch_neuronx",),
        resource="neuron_cores",
        remedy="A core takes one process at a time: neuron-ls shows which one has it",
        mask=masks.NEURON,
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
