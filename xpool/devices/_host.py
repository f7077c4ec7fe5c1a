"""Describes a machine without opening a device or importing a framework.

`Host.here` inspects the machine.  The rest of this package computes from its result.

Functions `find_...` with a ``root`` read files of the kernel and its drivers, in ``sys`` and
``dev`` there.  Those of accelerators return the devices in the order in which their runtime numbers
them.  A container sees the sysfs of the whole machine but only its own files in ``/dev``, so
devices without a file are left out.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from xpool.errors import DeviceError

# -- accelerators and NUMA nodes, in files -----------------------------------------------------


@dataclass(frozen=True)
class Accelerator:
    """An AMD or Intel GPU, an Ascend NPU, or a Neuron device of this host."""

    name: str = ""
    """The name of its file in /dev, such as ``"renderD128"``, ``"davinci0"`` or ``"neuron0"``."""

    node: int | None = None
    """Its NUMA node, if known."""

    parts: int = 1
    """Number of its tiles (Intel) or of its physical cores (Neuron); 0: not known."""

    model: str = ""
    """``"integrated"`` for a GPU in Intel's processor, the name of a Neuron device, or empty."""


def find_amd(root: Path) -> tuple[Accelerator, ...]:
    """Return AMD's GPUs, in the order of the driver's topology, which ROCm uses.

    Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c: a node of the topology with SIMD units is a
    GPU, and a process opens it through its render node.
    """
    if not (root / "dev/kfd").exists():
        return ()
    found = []
    for _, folder in _numbered(root / "sys/class/kfd/kfd/topology/nodes", ""):
        facts = dict(re.findall(r"^(\w+) (\d+)$", read(folder / "properties"), re.M))
        name = f"renderD{facts.get('drm_render_minor', '')}"
        if int(facts.get("simd_count", 0)) and (root / "dev/dri" / name).exists():
            found.append(Accelerator(name, numa_node(root / "sys/class/drm" / name / "device")))
    return tuple(found)


def find_intel(root: Path) -> tuple[Accelerator, ...]:
    """Return Intel's GPUs in PCI order, with the number of their tiles.

    The drivers show a tile as ``tile0`` (xe) or as ``gt/gt0`` of the card (i915); Linux,
    drivers/gpu/drm/xe and i915.  In a processor, i915's second ``gt`` is the media engine.
    """
    found = []
    for pci in sorted((root / "sys/bus/pci/devices").glob("*")):
        files = [path.name for path in (pci / "drm").glob("renderD*")]
        if read(pci / "vendor") != "0x8086" or not files:
            continue
        if not (root / "dev/dri" / files[0]).exists():
            continue
        # Intel's processors have their GPU at this address.
        integrated = pci.name == "0000:00:02.0"
        tiles = len(list(pci.glob("tile[0-9]*"))) or len(list(pci.glob("drm/card*/gt/gt[0-9]*")))
        found.append(
            Accelerator(
                files[0],
                numa_node(pci),
                1 if integrated else max(tiles, 1),
                "integrated" if integrated else "",
            )
        )
    return tuple(found)


def find_ascend(root: Path) -> tuple[Accelerator, ...]:
    """Return Huawei's Ascend NPUs: the driver's files ``/dev/davinci0``, ... (CANN's manuals)."""
    return tuple(Accelerator(path.name) for _, path in _numbered(root / "dev", "davinci"))


def find_neuron(root: Path) -> tuple[Accelerator, ...]:
    """Return AWS's Neuron devices, with the number of their cores.

    AWS Neuron, "Neuron Sysfs User Guide": ``core_count``, a folder for each core, and the name of
    the device.
    """
    found = []
    for _, file in _numbered(root / "dev", "neuron"):
        about = root / "sys/devices/virtual/neuron_device" / file.name
        count = read(about / "core_count")
        cores = int(count) if count.isdigit() else len(list(_numbered(about, "neuron_core")))
        model = read(about / "info/architecture/device_name")
        found.append(Accelerator(file.name, parts=cores, model=model))
    return tuple(found)


def _numbered(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    """Yield the entries of a folder whose names are the prefix and a number, by the number."""
    found = ((path.name.removeprefix(prefix), path) for path in folder.glob(f"{prefix}[0-9]*"))
    yield from sorted((int(number), path) for number, path in found if number.isdigit())


def find_nodes(root: Path) -> dict[int, tuple[int, ...]]:
    found = _numbered(root / "sys/devices/system/node", "node")
    nodes = {number: parse_cpulist(read(path / "cpulist")) for number, path in found}
    return {number: cpus for number, cpus in nodes.items() if cpus}


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in sysfs's format, in which ``0-3,8`` is 0, 1, 2, 3, 8."""
    cpus: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match:
            cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(cpus)


def numa_node(pci: Path) -> int | None:
    """Return the NUMA node of a PCI device, or None if the system does not know it (-1)."""
    text = read(pci / "numa_node")
    return int(text) if text.isdigit() else None


def read(path: Path) -> str:
    """Return the text of a small file, or an empty text if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""  # a device may vanish at any time


# -- NVIDIA's GPUs -----------------------------------------------------------------------------
# NVML, the driver's management library, opens no CUDA context.  The structures and constants come
# from nvml.h (NVML API reference).

LIBRARY = "libnvidia-ml.so.1"

_UUID_SIZE = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML lists it, in PCI order."""

    uuid: str
    """``GPU-...``"""

    mig: tuple[str, ...] | None = None
    """The GPU's MIG instances, ``MIG-...``; None: the GPU is not in MIG mode."""

    node: int | None = None
    """The GPU's NUMA node, if known."""


# These are nvmlPciInfo_t, nvmlMemory_t and nvmlUtilization_t.
class _PciInfo(ctypes.Structure):
    _fields_ = [
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    ]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


def find_gpus(root: Path = Path("/"), library: str = LIBRARY) -> tuple[Gpu, ...] | None:
    """Return the GPUs of this machine, or None if NVML or its driver is missing."""
    with _opened_nvml(library) as nvml:
        count = ctypes.c_uint()
        # 0 is NVML_SUCCESS here and in all calls below.
        if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        return tuple(_gpu(nvml, i, root) for i in range(count.value))


class Spare(NamedTuple):
    """The free memory and idle time of a device."""

    memory: int
    """Free memory, in bytes."""

    idle: float
    """The share of the last sample period in which it was idle, 0 to 1; 1: not known."""


def find_spare(names: Iterable[str], library: str = LIBRARY) -> list[Spare] | None:
    """Return the free memory and idle time of devices, or None if NVML is missing or lacks one.

    ``names`` are numbers in PCI order, ``GPU-...`` or ``MIG-...``, as in masks.
    """
    with _opened_nvml(library) as nvml:
        if nvml is None:
            return None
        found = [_spare(nvml, name) for name in names]
    return [spare for spare in found if spare] if all(found) else None


@contextmanager
def _opened_nvml(library: str) -> Iterator[ctypes.CDLL | None]:
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        nvml = None
    # NVML counts initializations, so the shutdown does not affect other users in this process.
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _spare(nvml: ctypes.CDLL, name: str) -> Spare | None:
    device, memory, load = ctypes.c_void_p(), _Memory(), _Utilization()
    if name.isdigit():
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(device))
    else:
        failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
    if failed or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
        return None
    # NVML reports no utilization for MIG instances.
    known = nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(load)) == 0
    return Spare(memory.free, 1 - load.gpu / 100 if known else 1.0)


def _gpu(nvml: ctypes.CDLL, index: int, root: Path) -> Gpu:
    device = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return Gpu("")  # unusable, but counted, so that the others keep their numbers
    return Gpu(_uuid(nvml, device), _mig(nvml, device), _node(nvml, device, root))


def _uuid(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_UUID_SIZE)
    nvml.nvmlDeviceGetUUID(device, text, ctypes.c_uint(_UUID_SIZE))
    return text.value.decode()


def _mig(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[str, ...] | None:
    now, later = ctypes.c_uint(), ctypes.c_uint()
    if nvml.nvmlDeviceGetMigMode(device, ctypes.byref(now), ctypes.byref(later)) or not now.value:
        return None
    most = ctypes.c_uint()
    nvml.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(most))
    instances = []
    for i in range(most.value):
        instance = ctypes.c_void_p()
        args = device, ctypes.c_uint(i), ctypes.byref(instance)
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(*args) == 0:
            instances.append(_uuid(nvml, instance))
    return tuple(instances)


def _node(nvml: ctypes.CDLL, device: ctypes.c_void_p, root: Path) -> int | None:
    info = _PciInfo()
    if nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(info)) != 0:
        return None
    # The GPU is function 0 of its PCI device.  The other functions are sound and USB.
    address = f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
    return numa_node(root / "sys/bus/pci/devices" / address)


# -- TPUs, and the machine ---------------------------------------------------------------------

# The PCI vendor, and the generation of each of its devices, as sysfs writes them.
_GOOGLE = "0x1ae0"
_GENERATIONS = {
    "0x0027": "v3",  # v2 as well, since both need the same settings
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}


@dataclass(frozen=True)
class Chip:
    """A TPU chip of this host.  Its number is its position in `Host.chips`."""

    generation: str
    """``"v3"`` (v2 as well), ``"v4"``, ``"v5p"``, ``"v5e"``, ``"v6e"`` or ``"7x"``."""

    address: str = ""
    """The chip's address on the PCI bus."""

    file: str = ""
    """The device file that a process holds open while it uses the chip; empty: not known."""

    node: int | None = None
    """The chip's NUMA node, if known."""

    user: str = ""
    """The process that has the chip open now: ``"pid 123 (python)"``, or empty."""


@dataclass(frozen=True)
class Host:
    """The properties of a machine that matter for workers with devices."""

    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The parent's environment variables, which contain masks and choices of the user."""

    cpus: tuple[int, ...] = (0,)
    """Numbers of the cores on which the parent may run."""

    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The cores of each NUMA node."""

    chips: tuple[Chip, ...] = ()
    """TPU chips that this process may use, in PCI order."""

    gpus: tuple[Gpu, ...] | None = None
    """CUDA devices in PCI order; None: NVML is missing."""

    accelerators: Mapping[str, tuple[Accelerator, ...]] = field(default_factory=dict)
    """The devices of the kinds ``"rocm"``, ``"xpu"``, ``"npu"`` and ``"neuron"``, in the order of
    their runtimes."""

    packages: Mapping[str, str] = field(default_factory=dict)
    """The versions of torch and of the packages with its backends, if installed."""

    build: str = ""
    """What the installed torch was built with: ``"CUDA"``, ``"ROCm"``, ``"XPU"`` or nothing."""

    metal: bool = False
    """Whether this is a Mac with an Apple GPU, which torch calls mps."""

    reported: tuple[str, int] = ("", 0)
    """The type and the number of the devices that `torch.accelerator` reports; empty: it has not
    been asked, or reports none."""

    @classmethod
    def here(cls, root: Path = Path("/"), *, gpus: bool = True, ask_torch: bool = False) -> Host:
        """Describe this machine.  ``root`` replaces ``/`` as the parent of sys and dev.

        ``gpus``: whether to ask NVML for the GPUs.  ``ask_torch``: whether to import torch and ask
        `torch.accelerator`.
        """
        return cls(
            environ=dict(os.environ),
            cpus=usable_cpus(),
            nodes=find_nodes(root),
            chips=find_chips(root),
            gpus=find_gpus(root) if gpus else None,
            accelerators={
                "rocm": find_amd(root),
                "xpu": find_intel(root),
                "npu": find_ascend(root),
                "neuron": find_neuron(root),
            },
            packages=installed(_FRAMEWORKS),
            build=_torch_build(),
            metal=sys.platform == "darwin" and os.uname().machine == "arm64",
            reported=_reported() if ask_torch else ("", 0),
        )

    def near(self, node: int | None) -> tuple[int, ...]:
        """Return the cores of a NUMA node that this process may use; empty for an unknown node."""
        found = () if node is None else self.nodes.get(node, ())
        return tuple(c for c in found if c in self.cpus)


def usable_cpus() -> tuple[int, ...]:
    """Return the numbers of the cores on which this process may run."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def find_chips(root: Path) -> tuple[Chip, ...]:
    """Return the TPU chips that this process may use, in PCI order.

    A container sees the PCI devices of the whole machine, but /dev/vfio has only the container's
    own devices.  So if some chips have files there, the others are left out.  With older drivers
    (/dev/accel*, before v5e), all chips are returned.
    """
    found = []
    for pci in sorted((root / "sys/bus/pci/devices").glob("*")):
        generation = _GENERATIONS.get(read(pci / "device"))
        if read(pci / "vendor") != _GOOGLE or generation is None:
            continue
        # With VFIO, a process that uses a chip has the file of its IOMMU group open.
        group = ""
        if (pci / "iommu_group").is_symlink():
            group = os.path.basename(os.readlink(pci / "iommu_group"))
        file = f"dev/vfio/{group}"
        if not group or not (root / file).exists():
            file = ""
        found.append(Chip(generation, pci.name, file, numa_node(pci)))
    if any(chip.file for chip in found):
        found = [chip for chip in found if chip.file]
    elif (root / "dev/accel0").exists():
        # Older drivers number the files in PCI order.
        files = [f"dev/accel{i}" for i in range(len(found))]
        found = [replace(c, file=f) if (root / f).exists() else c for c, f in zip(found, files)]
    elif (root / "dev/vfio").is_dir():
        return ()  # VFIO has no file of a chip, so this container has no chips
    users = holders((c.file for c in found if c.file), root)
    return tuple(replace(c, user=users.get(c.file, "")) for c in found)


def holders(files: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Map each file that a process has open to that process, as ``"pid 123 (python)"``.

    ``files`` are relative to ``root``.  Processes of other users cannot be inspected, so a file
    that is missing in the result may still be in use.
    """
    wanted = {str(root / file): file for file in files}
    found: dict[str, str] = {}
    if not wanted:
        return found
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fds = os.listdir(process / "fd")
        except OSError:
            continue  # the process has ended, or belongs to another user
        for fd in fds:
            try:
                file = wanted.get(os.readlink(process / "fd" / fd))
            except OSError:
                continue  # the process has closed it
            if file is not None:
                found[file] = f"pid {process.name} ({read(process / 'comm')})"
    return found


_FRAMEWORKS = ("torch", "torch_xla", "torch_tpu", "torch_npu", "torch_neuronx")


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of these packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


_BUILDS = {"hip": "ROCm", "cuda": "CUDA", "xpu": "XPU"}
"""Attributes of `torch.version`, of which only the build's own is not None."""


def _torch_build() -> str:
    """Return what torch was built with.  This reads a file of torch, to avoid its import."""
    torch = sys.modules.get("torch")
    if torch is not None:
        said = {name: getattr(torch.version, name, None) for name in _BUILDS}
        return next((build for name, build in _BUILDS.items() if said[name] is not None), "")
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        return build_of(read(Path(folder, "version.py")))
    return ""


def build_of(version: str) -> str:
    """Return what torch was built with, from the text of its ``version.py``."""
    for name, build in _BUILDS.items():
        match = re.search(rf"^{name}\b[^=\n]*=\s*(\S+)", version, re.M)
        if match is not None and match[1] != "None":
            return build
    return ""


def _reported() -> tuple[str, int]:
    try:
        import torch
    except ModuleNotFoundError:
        return "", 0

    ask = getattr(torch, "accelerator", None)  # since torch 2.6
    if ask is None or not ask.is_available():
        return "", 0
    return ask.current_accelerator().type, ask.device_count()


# -- frameworks: do they fit each other, and do they run in this process? ----------------------

TORCH_XLA_LEAST = (2, 3)
"""The first version with `torch_xla.device()`.  A version needs the torch of the same number."""

TORCH_TPU_FOR = (2, 11), (2, 15)
"""The first and the last torch for which torch_tpu 0.2 has binaries."""


def pick_framework(packages: Mapping[str, str], *names: str) -> str:
    """Return the first of these frameworks that is installed and fits the installed torch.

    Raises:
        DeviceError: none is.
    """
    problems = [_problem_of(packages, name) for name in names]
    if "" in problems:
        return names[problems.index("")]
    raise DeviceError("; ".join(problems))


def _problem_of(packages: Mapping[str, str], name: str) -> str:
    """Return why a framework cannot be used, or an empty text."""
    its, torch = packages.get(name), packages.get("torch")
    if its is None:
        fit = ", with the torch of the same number" if name == "torch_xla" else ""
        return f"{name} is not installed here: pip install {name}{fit}"
    if torch is None:
        return f"{name} is installed, but torch is not: pip install torch"
    mine, (first, last) = _minor(its), TORCH_TPU_FOR
    if name == "torch_tpu" and not first <= _minor(torch) <= last:
        return (
            f"torch_tpu {its} does not fit torch {torch}; it is for torch {first[0]}.{first[1]} to "
            f"{last[0]}.{last[1]}: pip install --upgrade torch"
        )
    if name == "torch_xla" and mine < TORCH_XLA_LEAST:
        return (
            f"torch_xla {its} is too old; xpool needs 2.3 or later: pip install --upgrade torch "
            "torch_xla"
        )
    if name == "torch_xla" and mine != _minor(torch):
        version = f"{mine[0]}.{mine[1]}.*"
        return (
            f"torch_xla {its} does not fit torch {torch}: pip install torch=={version} "
            f"torch_xla=={version}"
        )
    return ""


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])


def running_runtime() -> str | None:
    """Return the name of a device runtime that this process has started, or None.

    Such a runtime would not work in a fork of this process.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_initialized():
        return "CUDA" if torch.version.hip is None else "HIP"
    for name in ("xpu", "npu", "neuron"):
        started = getattr(getattr(torch, name, None), "is_initialized", None)
        if started is not None and started():
            return name.upper()
    xla = sys.modules.get("torch_xla")
    if xla is not None and xla._XLAC._xla_runtime_is_initialized():
        return "XLA"
    tpu = getattr(torch, "tpu", None) if "torch_tpu" in sys.modules else None
    return "TPU" if tpu is not None and tpu.is_initialized() else None
