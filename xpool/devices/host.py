"""What the machine has, found without opening a device or importing a framework.

`Host.here` looks; everything else in this folder is a function of what it returns.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xpool.devices.numa import find_nodes, numa_node, read
from xpool.devices.nvml import Gpu, find_gpus

__all__ = ["Chip", "Host", "find_chips", "holders", "usable_cpus"]

# PCI vendor, and devices by generation, as sysfs writes them.
_GOOGLE = "0x1ae0"
_GENERATIONS = {
    "0x0027": "v3",  # v2 as well: nothing that is set here differs between the two
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "7x",
}


@dataclass(frozen=True)
class Chip:
    """A TPU chip on this host; its index among the host's chips is its place in `Host.chips`."""

    generation: str
    """``"v3"`` (v2 as well), ``"v4"``, ``"v5p"``, ``"v5e"``, ``"v6e"`` or ``"7x"``."""

    address: str = ""
    """On the PCI bus."""

    file: str = ""
    """The device file that a process using the chip holds open, where known."""

    node: int | None = None
    """Its NUMA node, where known."""

    user: str = ""
    """Who holds it open now: ``"pid 123 (python)"``, or empty."""


@dataclass(frozen=True)
class Host:
    """A machine as far as its devices' workers are concerned."""

    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The parent's variables: its masks, and what the user chose."""

    cpus: tuple[int, ...] = (0,)
    """Cores that the parent may run on, by number."""

    nodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The cores of each NUMA node."""

    chips: tuple[Chip, ...] = ()
    """TPU chips that this process may use, in PCI order."""

    gpus: tuple[Gpu, ...] | None = None
    """CUDA devices in PCI order; None: there is no NVML to ask."""

    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of those of torch, torch_xla and torch_tpu that are installed."""

    cuda_build: bool = False
    """Whether the installed torch was built with CUDA."""

    metal: bool = False
    """Whether this is a Mac with an Apple GPU, which torch calls mps."""

    @classmethod
    def here(cls, root: Path = Path("/"), *, gpus: bool = True) -> Host:
        """Describe this machine; ``root`` stands for ``/`` (of sysfs, /dev and /proc)."""
        return cls(
            environ=dict(os.environ),
            cpus=usable_cpus(),
            nodes=find_nodes(root),
            chips=find_chips(root),
            gpus=find_gpus(root) if gpus else None,
            packages=_packages(),
            cuda_build=_is_cuda_build(),
            metal=sys.platform == "darwin" and os.uname().machine == "arm64",
        )

    def near(self, node: int | None) -> tuple[int, ...]:
        """Return the usable cores of a NUMA node; empty: not known, or none of them usable."""
        if node is None:
            return ()
        return tuple(c for c in self.nodes.get(node, ()) if c in self.cpus)


def usable_cpus() -> tuple[int, ...]:
    """Return the cores that this process may run on, in a container fewer than there are."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def find_chips(root: Path) -> tuple[Chip, ...]:
    """Return the TPU chips that this process may use, in PCI order.

    A container sees the PCI devices of the whole machine, but only its own under /dev/vfio.  So
    where some chips are there, only those count; and where the drivers are others (/dev/accel*,
    before v5e), all.
    """
    found = []
    for pci in sorted((root / "sys/bus/pci/devices").glob("*")):
        generation = _GENERATIONS.get(read(pci / "device"))
        if read(pci / "vendor") != _GOOGLE or generation is None:
            continue
        # With VFIO, who uses a chip has the file of its IOMMU group open.
        group = ""
        if (pci / "iommu_group").is_symlink():
            group = os.path.basename(os.readlink(pci / "iommu_group"))
        file = f"dev/vfio/{group}"
        if not group or not (root / file).exists():
            file = ""
        found.append(Chip(generation, pci.name, file, numa_node(pci)))
    # Some files are there: the other chips are not this container's.
    if any(chip.file for chip in found):
        found = [chip for chip in found if chip.file]
    elif (root / "dev/accel0").exists():
        # The older drivers number the files in PCI order.
        files = [f"dev/accel{i}" for i in range(len(found))]
        found = [
            Chip(c.generation, c.address, f if (root / f).exists() else "", c.node)
            for c, f in zip(found, files)
        ]
    elif (root / "dev/vfio").is_dir():
        # VFIO without the file of any chip: a container that was given none.
        return ()
    users = holders((c.file for c in found if c.file), root)
    return tuple(
        Chip(c.generation, c.address, c.file, c.node, users.get(c.file, "")) for c in found
    )


def holders(files: Iterable[str], root: Path = Path("/")) -> dict[str, str]:
    """Return who has which of these files open: ``"pid 123 (python)"``.

    ``files`` are relative to ``root``.  Processes of other users cannot be looked into, so what
    is not found here may be in use all the same.
    """
    wanted = {str(root / file): file for file in files}
    found: dict[str, str] = {}
    if not wanted:
        return found
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fds = os.listdir(process / "fd")
        except OSError:
            continue  # it has ended, or is another user's
        for fd in fds:
            try:
                file = wanted.get(os.readlink(process / "fd" / fd))
            except OSError:
                continue  # closed meanwhile
            if file is not None:
                found[file] = f"pid {process.name} ({read(process / 'comm')})"
    return found


def _packages() -> dict[str, str]:
    found = {}
    for name in ("torch", "torch_xla", "torch_tpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _is_cuda_build() -> bool:
    """Whether torch was built with CUDA: read in its files, so that it need not be imported."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.version.cuda is not None
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        match = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", read(Path(folder, "version.py")), re.M)
        return match is not None and match[1] != "None"
    return False
