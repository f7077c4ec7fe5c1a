"""Descriptions of machines for the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xpool.devices import Chip, Gpu, Host

XLA = {"torch": "2.9.0", "torch_xla": "2.9.0"}
TPU = {"torch": "2.13.0", "torch_tpu": "0.2.0"}

DEVICE_IDS = {
    "v3": "0x0027",
    "v4": "0x005e",
    "v5p": "0x0062",
    "v5e": "0x0063",
    "v6e": "0x006f",
    "7x": "0x0076",
}


def tpu_host(generation: str, chips: int, packages: dict[str, str] = XLA, **facts: Any) -> Host:
    """A TPU VM with this many chips."""
    return Host(chips=(Chip(generation),) * chips, packages=packages, **facts)


def gpu_host(count: int, *, mig: dict[int, tuple[str, ...]] | None = None, **facts: Any) -> Host:
    """A machine with GPUs ``GPU-00000000``, ``GPU-11111111``, ... and a CUDA build of torch."""
    gpus = tuple(Gpu(f"GPU-{str(i) * 8}", (mig or {}).get(i)) for i in range(count))
    return Host(gpus=gpus, packages={"torch": "2.13.0"}, build="CUDA", **facts)


def add_pci(
    root: Path,
    address: str,
    device: str,
    *,
    vendor: str = "0x1ae0",
    node: int = -1,
    group: int = -1,
) -> None:
    """Add a PCI device to a directory that looks like sysfs."""
    pci = root / "sys/bus/pci/devices" / address
    pci.mkdir(parents=True)
    (pci / "vendor").write_text(f"{vendor}\n")
    (pci / "device").write_text(f"{device}\n")
    (pci / "numa_node").write_text(f"{node}\n")
    if group >= 0:
        target = root / "sys/kernel/iommu_groups" / str(group)
        target.mkdir(parents=True, exist_ok=True)
        (pci / "iommu_group").symlink_to(target)


def add_vfio(root: Path, *groups: int) -> None:
    """Add IOMMU groups to /dev/vfio, which makes them usable."""
    folder = root / "dev/vfio"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vfio").touch()
    for group in groups:
        (folder / str(group)).touch()


def add_node(root: Path, node: int, cpulist: str) -> None:
    """Add a NUMA node to the directory."""
    folder = root / f"sys/devices/system/node/node{node}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpulist}\n")
