"""Finds CUDA devices with NVML, the driver's management library, which opens no CUDA context.

The structures and constants come from ``nvml.h`` (NVML API reference).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xpool.devices._sysfs import numa_node

LIBRARY = "libnvidia-ml.so.1"

_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3  # nvmlComputeMode_t
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

    mode: str = ""
    """The compute mode: ``"prohibited"``, ``"exclusive"`` (one process at a time) or empty."""

    users: tuple[int, ...] = ()
    """Ids of the processes that compute on the GPU."""


# These are nvmlPciInfo_t, nvmlProcessInfo_t (of _v3), nvmlMemory_t and nvmlUtilization_t.
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


class _ProcessInfo(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    ]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


def find_gpus(root: Path = Path("/"), library: str = LIBRARY) -> tuple[Gpu, ...] | None:
    """Return the GPUs of this machine, or None if NVML or its driver is missing."""
    with _opened(library) as nvml:
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

    ``names`` are numbers in PCI order, ``GPU-...`` or ``MIG-...``, as in `VisibleDevice.name`.
    """
    with _opened(library) as nvml:
        if nvml is None:
            return None
        found = [_spare(nvml, name) for name in names]
    return [spare for spare in found if spare] if all(found) else None


@contextmanager
def _opened(library: str) -> Iterator[ctypes.CDLL | None]:
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
        return Gpu("")  # unusable for this process; it keeps its place, so numbers stay right
    mode = ctypes.c_uint()
    nvml.nvmlDeviceGetComputeMode(device, ctypes.byref(mode))
    names = {_PROHIBITED: "prohibited", _EXCLUSIVE_PROCESS: "exclusive"}
    return Gpu(
        _uuid(nvml, device),
        _mig(nvml, device),
        _node(nvml, device, root),
        names.get(mode.value, ""),
        _users(nvml, device),
    )


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


def _users(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[int, ...]:
    # With more than 64 processes, NVML fails (NVML_ERROR_INSUFFICIENT_SIZE) and reports none.
    count = ctypes.c_uint(64)
    found = (_ProcessInfo * count.value)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found) != 0:
        return ()
    return tuple(info.pid for info in found[: count.value])
