"""Finds accelerators and NUMA nodes in the files of the kernel and its drivers, without opening
them.

Each function `find_...` takes the parent of ``sys`` and ``dev``.  Those of accelerators return the
devices in the order in which their runtime numbers them.  A container sees the sysfs of the whole
machine but only its own files in ``/dev``, so devices without a file are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
    nodes = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpulist(read(path / "cpulist"))
        if cpus:
            nodes[int(path.name[4:])] = cpus
    return nodes


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
