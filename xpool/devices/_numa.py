"""Reads NUMA nodes, and the node of each PCI device, from sysfs."""

from __future__ import annotations

import re
from pathlib import Path


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
