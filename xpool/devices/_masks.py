"""Pure functions for the variables of workers: masks, and those of TPUs.

Each kind with a mask has two functions.  One returns the devices that a process with given
variables may see, in the order in which its runtime numbers them.  The other returns the variables
of a worker that owns some of these devices.  A name is what a mask calls a device.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xpool.devices._host import Host
from xpool.errors import DeviceError, OptionError

Env = dict[str, str | None]
"""Variables to set; None: to delete."""

HIP, ROCR, CUDA = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
ZE, SELECTOR = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"
ASCEND = "ASCEND_RT_VISIBLE_DEVICES"
NEURON = "NEURON_RT_VISIBLE_CORES"

OTHERS = {HIP: (ROCR, CUDA), ZE: (SELECTOR,)}
"""Variables that hide devices as well, by the variable that xpool sets."""


class Visible(NamedTuple):
    """A device that is visible to the parent, and its NUMA node, if known."""

    name: str
    node: int | None = None


# -- NVIDIA ------------------------------------------------------------------------------------
# CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide.


def cuda(host: Host) -> list[Visible]:
    """Return the devices that are visible to the parent, in the order in which it numbers them.

    The list is empty if the mask hides all.

    Raises:
        DeviceError: there is no device, or the mask names one twice, one that does not exist, or
            some by number and others by UUID.
    """
    __tracebackhide__ = True
    mask = host.environ.get(CUDA)
    if mask is None:
        return _all_gpus(host)
    seen = [_named_gpu(name, host, mask) for name in entries(mask)]
    if len({one.name.isdigit() for one in seen}) > 1:  # a number may be any of the GPUs
        raise DeviceError(
            f"{CUDA}={mask!r} names devices by number and by UUID: name all in one way"
        )
    if len({one.name for one in seen}) < len(seen):
        raise _twice(CUDA, mask)
    return seen


def cuda_env(devices: Sequence[Visible], environ: Mapping[str, str]) -> Env:
    """Return the variables of a worker that owns these devices.

    The numbers in the parent's mask refer to the parent's device order, so the worker keeps that
    order.  Without a mask, xpool numbers the devices in PCI bus order, as nvidia-smi does.
    """
    if len(devices) > 1 and any(d.name.startswith("MIG-") for d in devices):
        raise OptionError(
            f"per_worker={len(devices)}: CUDA lets a process use one MIG instance; "
            "leave per_worker out"
        )
    env: Env = {CUDA: ",".join(d.name for d in devices)}
    if CUDA not in environ or not any(d.name.isdigit() for d in devices):
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return env


def _all_gpus(host: Host) -> list[Visible]:
    __tracebackhide__ = True
    if host.gpus is None:
        raise DeviceError(
            "devices('cuda'): no NVIDIA driver answers here (libnvidia-ml.so.1). Install the "
            f"driver, start the container with its GPUs, or name the devices in {CUDA}"
        )
    seen = []
    any_mig = any(gpu.mig is not None for gpu in host.gpus)
    for i, gpu in enumerate(host.gpus):
        if gpu.mig is not None:
            seen += [Visible(uuid, gpu.node) for uuid in gpu.mig]
        elif gpu.uuid:
            # If other GPUs are in MIG mode, the numbers of GPUs change, but not their UUIDs.
            seen.append(Visible(gpu.uuid if any_mig else str(i), gpu.node))
    if not seen:
        raise DeviceError(
            "devices('cuda'): this machine has no GPU that can be used (nvidia-smi -L lists them; "
            "a GPU in MIG mode needs instances: nvidia-smi mig -cgi)"
        )
    return seen


def _named_gpu(name: str, host: Host, mask: str) -> Visible:
    gpus = host.gpus
    if name.isascii() and name.isdigit():
        name = str(int(name))  # as in CUDA, "00" is 0
        if gpus is None:
            return Visible(name)  # only NVML could check it; a worker fails if it is wrong
        if int(name) < len(gpus):
            # By default, CUDA gives the fastest GPU number 0.  NVML numbers GPUs in bus order.
            by_bus = len(gpus) == 1 or host.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
            return Visible(name, gpus[int(name)].node if by_bus else None)
    elif gpus is None:
        return Visible(name)
    else:
        # CUDA accepts a prefix of a UUID if it is unique.
        known = [(uuid, gpu) for gpu in gpus for uuid in (gpu.uuid, *(gpu.mig or ())) if uuid]
        found = [Visible(uuid, gpu.node) for uuid, gpu in known if uuid.startswith(name)]
        if len(found) == 1:
            return found[0]
        if found:
            which = ", ".join(one.name for one in found)
            raise DeviceError(
                f"{CUDA}={mask!r} names {name!r}, with which several UUIDs begin ({which}): give "
                "more of the UUID"
            )
    raise _unknown(CUDA, mask, name, [Visible(f"{i}: {gpu.uuid}") for i, gpu in enumerate(gpus)])


# -- AMD ---------------------------------------------------------------------------------------
# AMD, "GPU isolation techniques" and "HIP environment variables": ROCR_VISIBLE_DEVICES hides and
# orders the machine's GPUs.  HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES in its place, then
# selects among those that are left.  Both take numbers and UUIDs.  torch reads them in this way,
# too (torch.cuda._parse_visible_devices).


def rocm(host: Host) -> list[Visible]:
    environ, found = host.environ, host.accelerators.get("rocm", ())
    left: list[Visible] = [Visible(str(i), gpu.node) for i, gpu in enumerate(found)]
    if ROCR in environ:
        named = _named(ROCR, environ[ROCR], left)
        left = [Visible(str(i), gpu.node) for i, gpu in enumerate(named)]
    for variable in (HIP, CUDA):
        if variable in environ:
            # If ROCR_VISIBLE_DEVICES has hidden every GPU, no number is right.
            return [] if ROCR in environ and not left else _named(variable, environ[variable], left)
    return left


def rocm_env(own: Sequence[Visible], environ: Mapping[str, str]) -> Env:
    # The worker's names are numbers among the GPUs that the parent's ROCR_VISIBLE_DEVICES leaves.
    env: Env = {HIP: ",".join(one.name for one in own), CUDA: None}
    return env | ({ROCR: environ[ROCR]} if ROCR in environ else {})


# -- Intel -------------------------------------------------------------------------------------
# oneAPI Level Zero Specification, "Environment Variables" and "Affinity Mask": a number in the mask
# is a tile or, if ZE_FLAT_DEVICE_HIERARCHY is COMPOSITE, a card.  "0.1" is then tile 1 of card 0,
# and all named tiles of a card are one device.  The order of a mask has no effect.  Intel's driver
# (compute-runtime, execution_environment.cpp) ignores an empty mask, and "0.1" if tiles are
# devices.  GPUs of processors have the last numbers, unless ZE_ENABLE_PCI_ID_DEVICE_ORDER is set.
# ONEAPI_DEVICE_SELECTOR (DPC++, "Environment Variables") selects among the devices that are left.


def xpu(host: Host) -> list[Visible]:
    environ, found = host.environ, host.accelerators.get("xpu", ())
    mask, selected = environ.get(ZE, "").strip(), _selected(environ)
    names_tiles, chosen = "." in mask, _hierarchy(environ)
    if names_tiles and chosen not in ("", "COMPOSITE"):
        raise DeviceError(
            f"{ZE}={mask!r} names tiles of cards, which needs ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE, "
            f"not {chosen}; otherwise each tile has a number of its own"
        )
    whole = names_tiles or chosen == "COMPOSITE"
    if not _own_numbers(environ) and environ.get("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "0") == "0":
        found = tuple(sorted(found, key=lambda card: card.model == "integrated"))
    cards = [card for card in found for _ in range(1 if whole else card.parts)]
    seen = [Visible(str(i), card.node) for i, card in enumerate(cards)]
    if mask:
        seen = _in_mask(mask, seen, whole)
    elif selected is None and any(card.model != "integrated" for card in cards):
        # torch uses the GPU of a processor only if there is no other (c10/xpu/XPUFunctions.cpp).
        seen = [one for one, card in zip(seen, cards) if card.model != "integrated"]
    if selected is None:
        return seen
    if seen and max(selected) >= len(seen):
        raise DeviceError(
            f"{SELECTOR}={environ[SELECTOR]!r} names level_zero:{max(selected)}, but this process "
            f"may see {len(seen)} devices"
        )
    return [seen[i] for i in sorted({*selected}) if seen]


def xpu_env(own: Sequence[Visible], environ: Mapping[str, str]) -> Env:
    env: Env = {ZE: ",".join(one.name for one in own), SELECTOR: None}
    if "." in (env[ZE] or ""):
        env["ZE_FLAT_DEVICE_HIERARCHY"] = "COMPOSITE"
    elif _own_numbers(environ):
        env["ZE_FLAT_DEVICE_HIERARCHY"] = _hierarchy(environ) or "FLAT"
        env["ZE_ENABLE_PCI_ID_DEVICE_ORDER"] = "1"
    return env


def _hierarchy(environ: Mapping[str, str]) -> str:
    return environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").strip()


def _own_numbers(environ: Mapping[str, str]) -> bool:
    """Whether no mask has numbers, so that xpool numbers the devices, in PCI order."""
    return not environ.get(ZE, "").strip() and _selected(environ) is None


def _selected(environ: Mapping[str, str]) -> list[int] | None:
    """Return the numbers of the devices in ONEAPI_DEVICE_SELECTOR; None: it selects all GPUs."""
    value = environ.get(SELECTOR, "").strip().lower() or "level_zero:*"
    match = re.fullmatch(r"(?:level_zero|\*):(?:\*|gpu)|level_zero:(\d+(?:,\d+)*)", value)
    if match is None:
        raise DeviceError(
            f"{SELECTOR}={environ[SELECTOR]!r} must be level_zero:gpu, or numbers as in "
            f"level_zero:0,1; or unset it, and name the devices in {ZE}"
        )
    return [int(number) for number in match[1].split(",")] if match[1] else None


def _in_mask(mask: str, every: Sequence[Visible], whole: bool) -> list[Visible]:
    nodes = {one.name: one.node for one in every}
    names = [part.strip() for part in mask.split(",")]
    if not all(re.fullmatch(r"\d+(\.\d+)?", name) for name in names):
        raise DeviceError(
            f"{ZE}={mask!r} must be numbers of devices, such as 0,1, or of tiles: 0.1"
        )
    if len({*names}) < len(names):
        raise _twice(ZE, mask)
    names.sort(key=lambda name: [int(part) for part in name.split(".")])
    for name in names:
        if every and name.partition(".")[0] not in nodes:
            raise _unknown(ZE, mask, name, every)
    if not whole:
        return [Visible(name, nodes.get(name)) for name in names]
    cards = itertools.groupby(names, lambda name: name.partition(".")[0])
    return [Visible(",".join(tiles), nodes.get(card)) for card, tiles in cards]


# -- Ascend ------------------------------------------------------------------------------------
# Huawei, CANN, "ASCEND_RT_VISIBLE_DEVICES": numbers in ascending order, with commas and nothing
# else between them; CANN ignores all from the first space or unknown number on.  ASCEND_DEVICE_ID
# is then an index among these devices.


def npu(host: Host) -> list[Visible]:
    environ, found = host.environ, host.accelerators.get("npu", ())
    every = [Visible(str(i), one.node) for i, one in enumerate(found)]
    mask = environ.get(ASCEND)
    if mask is None:
        return every
    if not re.fullmatch(r"(\d+(,\d+)*)?", mask):
        raise DeviceError(
            f"{ASCEND}={mask!r} must be numbers with commas between them, without spaces"
        )
    # In a container with the file /dev/davinci4 alone, programs name it 4 or 0.
    files = [Visible(one.name.removeprefix("davinci"), one.node) for one in found]
    return _named(ASCEND, mask, every + [one for one in files if one not in every])


def npu_env(own: Sequence[Visible], environ: Mapping[str, str]) -> Env:
    names = sorted((one.name for one in own), key=int)
    return {ASCEND: ",".join(names), "ASCEND_DEVICE_ID": None}


# -- AWS Neuron --------------------------------------------------------------------------------
# AWS Neuron, "Neuron Runtime configuration": NEURON_RT_VISIBLE_CORES has numbers and ranges of
# cores, and NEURON_RT_NUM_CORES a number of any free cores.  "Logical NeuronCore configuration": on
# Trainium 2 and later, two physical cores are one core, unless NEURON_LOGICAL_NC_CONFIG is 1.


def neuron(host: Host) -> list[Visible]:
    environ, found = host.environ, host.accelerators.get("neuron", ())
    each = environ.get("NEURON_LOGICAL_NC_CONFIG") or environ.get("NEURON_RT_VIRTUAL_CORE_SIZE")
    every = []
    for one in found:
        paired = re.fullmatch(r"trainium([2-9]|\d\d+)", one.model, re.I)
        size = int(each) if each and each.isdigit() and int(each) else 2 if paired else 1
        every += [one.node] * (one.parts // size)
    cores = [Visible(str(i), node) for i, node in enumerate(every)]
    if NEURON not in environ:
        if environ.get("NEURON_RT_NUM_CORES", "0").strip() not in ("", "0"):
            raise DeviceError(
                f"NEURON_RT_NUM_CORES={environ['NEURON_RT_NUM_CORES']} does not say which cores "
                f"this process may use; name them, as in {NEURON}=0-3"
            )
        return cores
    mask = environ[NEURON]
    names: list[str] = []
    for part in mask.split(",") if mask.strip() else ():
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise DeviceError(
                f"{NEURON}={mask!r} must be numbers and ranges of cores: 0-3 or 0,2-3"
            )
        names += map(str, range(int(match[1]), int(match[2] or match[1]) + 1))
    return _look_up(NEURON, mask, names, cores)


def neuron_env(own: Sequence[Visible], environ: Mapping[str, str]) -> Env:
    numbers = [int(one.name) for one in own]
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        mask = f"{numbers[0]}-{numbers[-1]}"
    else:
        mask = ",".join(map(str, numbers))
    return {NEURON: mask, "NEURON_RT_NUM_CORES": None}


def neuron_xla_env(count: int) -> Env:
    """Return the variables for torch_xla in an independent worker with this number of cores.

    libneuronxla's plugin reads them (``_internal`` of torch_neuronx sets them for torchrun, too).
    """
    return {
        "NEURON_PJRT_*": None,
        "TORCHELASTIC_RUN_ID": None,
        "PJRT_LOCAL_PROCESS_RANK": None,
        "PJRT_DEVICE": "NEURON",
        "PJRT_LOCAL_PROCESS_COUNT": "1",
        "NEURON_PJRT_PROCESS_INDEX": "0",
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": str(count),
    }


# -- Google TPU --------------------------------------------------------------------------------
# libtpu, torch_xla 2.9 (_internal/tpu.py, _internal/pjrt.py) and torch_tpu 0.2
# (_internal/distributed) read these variables.  All are set or deleted, because all three treat an
# inherited variable as a setting of the user.

TPU_SCRUB = (
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "CLOUD_TPU_TASK_ID",
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "MEGASCALE_*",
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
    "XRT_*",
)
"""Variables to delete in TPU workers.  Notebook services and orchestrators set them for a host."""

_TORCH_TPU_LAUNCHER = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_TPU_SLICEBUILDER_ADDRESSES",
    "TORCH_TPU_TOPOLOGY",
)
"""If any of these variables is set, torch_tpu acts as a member of a group."""

_TPU_CORES = {"v3": 2, "v4": 2, "v5p": 2, "7x": 2}
"""Number of cores of a chip, for generations whose slice names count cores and not chips."""

TPU_DEVICES = {"v3": 2, "7x": 2}
"""Number of devices in a chip.  A chip of v4 or v5p has two cores, but is one device."""

TPU_CORE_EACH = {"v3"}
"""Generations whose programs use each core as a device ("v3" includes v2)."""

_TPU_NAMES = {"v5e": "v5litepod", "7x": "tpu7x"}

_TPU_SHAPES = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
_TPU_CUBE = {"v4", "v5p"}  # in these generations eight chips form a cube, in others a flat mesh

_TORCH_TPU_7X = {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"}
"""Topologies by number of devices.  The two devices of a 7x chip are a fourth dimension."""


@dataclass(frozen=True)
class TpuSlice:
    """The TPU slice to which a host belongs.  By default, it contains only this host."""

    generation: str
    chips: int
    """Number of chips on this host."""

    host: int = 0
    """This host's index in the slice."""

    hosts: tuple[str, ...] = ("localhost",)
    """All hosts of the slice, in order."""

    bounds: tuple[int, int, int] = (1, 1, 1)
    """Number of hosts in the directions x, y and z."""

    accelerator: str = ""
    """Name of the slice, such as ``v5litepod-8``; empty: derived from the other fields."""


def accelerator_type(at: TpuSlice) -> str:
    """Return the slice's name as in Google's metadata, such as ``v5litepod-8``."""
    if at.accelerator:
        return at.accelerator
    size = at.chips * len(at.hosts) * _TPU_CORES.get(at.generation, 1)
    return f"{_TPU_NAMES.get(at.generation, at.generation)}-{size}"


def tpu_shape(generation: str, chips: int) -> str:
    """Return the shape of the mesh that so many chips of one host form, as ``x,y,z``.

    Raises:
        OptionError: this number of chips forms no mesh.
    """
    if chips not in _TPU_SHAPES:
        raise OptionError(
            f"{chips} TPU chips form no mesh; a worker or a replica group can have 1, 2, 4 or 8"
        )
    return "2,2,2" if chips == 8 and generation in _TPU_CUBE else _TPU_SHAPES[chips]


def tpu_env(at: TpuSlice, chips: Sequence[int], framework: str) -> Env:
    """Return the variables of an independent worker that owns these chips of its host."""
    env = _tpu_chips(chips, tpu_shape(at.generation, len(chips)), "1,1,1")
    if framework == "torch_xla":
        env |= {"PJRT_DEVICE": "TPU", "PJRT_LOCAL_PROCESS_COUNT": "1"}
        # The worker is its own slice, with only this host.
        env |= _instead_of_metadata(at, 0, ("localhost",))
    else:
        env |= _torch_tpu_env()
    return env


def tpu_group_env(
    at: TpuSlice,
    rank: int,
    chips: Sequence[int],
    ports: Sequence[int],
    framework: str,
    master_port: int = 29500,
) -> Env:
    """Return the variables of this host's worker ``rank`` in a group of workers with one chip each.

    ``chips`` are all chips of the group on this host.  ``ports`` has one port for each chip.  The
    ports are the same on every host, and other groups of the host must not use them.
    """
    n = len(chips)
    addresses = ",".join(f"{host}:{port}" for host in at.hosts for port in ports)
    if framework == "torch_xla":
        # Each process has one chip, so the processes form the mesh of the chips of all hosts.
        lie = [int(d) for d in tpu_shape(at.generation, n).split(",")]
        bounds = ",".join(str(h * c) for h, c in zip(at.bounds, lie))
        env = _tpu_chips(chips[rank : rank + 1], "1,1,1", bounds)
        env |= _instead_of_metadata(at, at.host, at.hosts)
        return env | {
            "CLOUD_TPU_TASK_ID": str(at.host * n + rank),
            "TPU_PROCESS_ADDRESSES": addresses,
            "TPU_PROCESS_PORT": str(ports[rank]),
            "PJRT_DEVICE": "TPU",
            "PJRT_LOCAL_PROCESS_RANK": str(rank),
            "PJRT_LOCAL_PROCESS_COUNT": str(n),
        }
    if at.generation == "7x":
        if n not in _TORCH_TPU_7X:
            raise OptionError(f"{n} devices of TPU 7x form no group; torch_tpu knows 2, 4 and 8")
        topology = _TORCH_TPU_7X[n]
    else:
        topology = tpu_shape(at.generation, n)
    return {
        **dict.fromkeys(TPU_SCRUB),
        **_torch_tpu_env(),
        "RANK": str(at.host * n + rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(at.hosts) * n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": at.hosts[0],
        "MASTER_PORT": str(master_port),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": addresses,
        "TORCH_TPU_TOPOLOGY": topology,
    }


def _tpu_chips(chips: Sequence[int], shape: str, processes: str) -> Env:
    """Return variables with the chips of a process, their shape, and that of all processes."""
    numbers = ",".join(str(chip) for chip in chips)
    # Each variable has a newer and an older name.
    return dict.fromkeys(TPU_SCRUB) | {
        "TPU_VISIBLE_CHIPS": numbers,
        "TPU_VISIBLE_DEVICES": numbers,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": shape,
        "TPU_CHIPS_PER_HOST_BOUNDS": shape,
        "TPU_PROCESS_BOUNDS": processes,
        "TPU_HOST_BOUNDS": processes,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _instead_of_metadata(at: TpuSlice, host: int, hosts: Sequence[str]) -> Env:
    """Return variables that stop torch_xla's import from querying Google's metadata server."""
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": accelerator_type(at),
        "TPU_WORKER_ID": str(host),
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
    }


def _torch_tpu_env() -> Env:
    # `devices` has set AUTOLOAD to 0 in the parent, but the worker must load the backend.
    return {**dict.fromkeys(_TORCH_TPU_LAUNCHER), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


# -- names in masks ----------------------------------------------------------------------------


def entries(mask: str) -> list[str]:
    """Return the names in a mask.  As in CUDA, a -1 or an empty name ends the list."""
    parts = (part.strip() for part in mask.split(","))
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), parts))


def _named(variable: str, mask: str, known: Sequence[Visible]) -> list[Visible]:
    names = [str(int(n)) if n.isascii() and n.isdigit() else n for n in entries(mask)]
    return _look_up(variable, mask, names, known)


def _look_up(
    variable: str, mask: str, names: Sequence[str], known: Iterable[Visible]
) -> list[Visible]:
    """Return the devices of these names.  If none is known, only a worker can check the names."""
    by_name = {one.name: one for one in known}
    if len({*names}) < len(names):
        raise _twice(variable, mask)
    for name in names:
        # The kernel's files do not have UUIDs.
        if by_name and name not in by_name and not name.upper().startswith("GPU-"):
            raise _unknown(variable, mask, name, by_name.values())
    return [by_name.get(name, Visible(name)) for name in names]


def _twice(variable: str, mask: str) -> DeviceError:
    return DeviceError(f"{variable}={mask!r} names a device twice; name each once")


def _unknown(variable: str, mask: str, name: str, known: Iterable[Visible]) -> DeviceError:
    have = ", ".join(one.name for one in known) or "none"
    return DeviceError(
        f"{variable}={mask!r} names {name!r}, which this machine does not have; it has {have}"
    )
