"""Describes a machine without opening a device or importing a framework.

`Host.here` inspects the machine.  The rest of this package computes from its result.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from xpool.devices._nvml import Gpu, find_gpus
from xpool.devices._sysfs import (
    Accelerator,
    find_amd,
    find_ascend,
    find_intel,
    find_neuron,
    find_nodes,
    numa_node,
    read,
)

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
            packages=_packages(),
            build=_torch_build(),
            metal=sys.platform == "darwin" and os.uname().machine == "arm64",
            reported=_reported() if ask_torch else ("", 0),
        )

    def near(self, node: int | None) -> tuple[int, ...]:
        """Return the cores of a NUMA node that this process may use; empty for an unknown node."""
        if node is None:
            return ()
        return tuple(c for c in self.nodes.get(node, ()) if c in self.cpus)


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


def _packages() -> dict[str, str]:
    found = {}
    for name in ("torch", "torch_xla", "torch_tpu", "torch_npu", "torch_neuronx"):
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
