"""Pure functions that choose a worker's GPUs and hide the others by a mask.

NVIDIA's CUDA C++ Programming Guide defines `CUDA_VISIBLE_DEVICES` ("CUDA Environment Variables").
The MIG User Guide describes how to use it for MIG.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xpool.devices._host import Host
from xpool.devices._masks import CUDA as MASK
from xpool.devices._masks import entries
from xpool.devices._nvml import Gpu
from xpool.errors import DeviceError, OptionError


@dataclass(frozen=True)
class VisibleDevice:
    """A device that is visible to the parent."""

    name: str
    """The device's name in `CUDA_VISIBLE_DEVICES`: a number, ``GPU-...`` or ``MIG-...``."""

    gpu: Gpu | None = None
    """The device's GPU, if it is certain."""

    @property
    def node(self) -> int | None:
        """The NUMA node of the device, if known."""
        return self.gpu.node if self.gpu is not None else None


def visible_devices(host: Host) -> list[VisibleDevice]:
    """Return the devices that are visible to the parent, in the order in which it numbers them.

    The list is empty if the mask hides all.

    Raises:
        DeviceError: there is no device, the mask names one twice or one that does not exist, or a
            device cannot be used.
    """
    __tracebackhide__ = True
    mask = host.environ.get(MASK)
    if mask is None:
        seen = _all(host)
    else:
        seen = [_named(name, host, mask) for name in entries(mask)]
        _check_different(seen, mask)
    for one in seen:
        _check_usable(one)
    return seen


def cuda_env(devices: Sequence[VisibleDevice], environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables of a worker that owns these devices.

    The numbers in the parent's mask refer to the parent's device order, so the worker keeps that
    order.  Without a mask, xpool numbers the devices in PCI bus order, as nvidia-smi does.
    """
    if len(devices) > 1 and any(d.name.startswith("MIG-") for d in devices):
        raise OptionError(
            f"per_worker={len(devices)}: CUDA lets a process use one MIG instance; "
            "leave per_worker out"
        )
    env: dict[str, str | None] = {MASK: ",".join(d.name for d in devices)}
    if MASK not in environ or not any(d.name.isdigit() for d in devices):
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return env


def _all(host: Host) -> list[VisibleDevice]:
    __tracebackhide__ = True
    if host.gpus is None:
        raise DeviceError(
            "devices('cuda'): no NVIDIA driver answers here (libnvidia-ml.so.1). Install the "
            f"driver, start the container with its GPUs, or name the devices in {MASK}"
        )
    seen = []
    any_mig = any(gpu.mig is not None for gpu in host.gpus)
    for i, gpu in enumerate(host.gpus):
        if gpu.mig is not None:
            seen += [VisibleDevice(uuid, gpu) for uuid in gpu.mig]
        elif gpu.uuid:
            # If other GPUs are in MIG mode, the numbers of GPUs change, but not their UUIDs.
            seen.append(VisibleDevice(gpu.uuid if any_mig else str(i), gpu))
    if not seen:
        raise DeviceError(
            "devices('cuda'): this machine has no GPU that can be used (nvidia-smi -L lists them; "
            "a GPU in MIG mode needs instances: nvidia-smi mig -cgi)"
        )
    return seen


def _check_different(seen: Sequence[VisibleDevice], mask: str) -> None:
    """Raise `DeviceError` if two of these devices may be the same."""
    by_number = [one for one in seen if one.name.isdigit() and one.gpu is None]
    if by_number and len(by_number) < len(seen):
        raise DeviceError(
            f"{MASK}={mask!r} names devices by number and by UUID, and a number may be any of the "
            "GPUs: name all in one way, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    # Without NVML a name may be a part of a UUID, so one name may be a prefix of another.
    names = sorted(map(_identity, seen))
    same = str.__eq__ if by_number else str.startswith
    if any(same(second, first) for first, second in itertools.pairwise(names)):
        raise DeviceError(f"{MASK}={mask!r} names a device twice; name each once")


def _identity(one: VisibleDevice) -> str:
    if one.gpu is None or one.name.startswith("MIG-"):
        return one.name
    # CUDA uses the first instance of a GPU in MIG mode.
    return one.gpu.mig[0] if one.gpu.mig else one.gpu.uuid or one.name


def _named(name: str, host: Host, mask: str) -> VisibleDevice:
    gpus = host.gpus
    if name.isascii() and name.isdigit():
        name = str(int(name))  # as in CUDA, "00" is 0
        if gpus is None:
            return VisibleDevice(name)  # only NVML could check it; a worker fails if it is wrong
        if int(name) < len(gpus):
            # By default, CUDA gives the fastest GPU number 0.  NVML numbers GPUs in bus order.
            by_bus = len(gpus) == 1 or host.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
            return VisibleDevice(name, gpus[int(name)] if by_bus else None)
    elif gpus is None:
        return VisibleDevice(name)
    else:
        # CUDA accepts a prefix of a UUID if it is unique.
        known = [(uuid, gpu) for gpu in gpus for uuid in (gpu.uuid, *(gpu.mig or ())) if uuid]
        found = [VisibleDevice(uuid, gpu) for uuid, gpu in known if uuid.startswith(name)]
        if len(found) == 1:
            return found[0]
        if found:
            which = ", ".join(one.name for one in found)
            raise DeviceError(
                f"{MASK}={mask!r} names {name!r}, with which several UUIDs begin ({which}): give "
                "more of the UUID"
            )
        if name.startswith("MIG-GPU-"):
            return VisibleDevice(name)  # a name of drivers before 470, which NVML does not list
    have = ", ".join(f"{i}: {gpu.uuid}" for i, gpu in enumerate(gpus)) or "none"
    raise DeviceError(
        f"{MASK}={mask!r} names {name!r}, which this machine does not have; it has {have}"
    )


def _check_usable(one: VisibleDevice) -> None:
    gpu = one.gpu
    if gpu is None:
        return
    if gpu.mode == "prohibited":
        raise DeviceError(
            f"GPU {one.name} takes no compute work (compute mode: prohibited); run nvidia-smi -c "
            f"DEFAULT as root, or leave the GPU out of {MASK}"
        )
    if gpu.mode == "exclusive" and gpu.users:
        pids = ", ".join(str(pid) for pid in gpu.users)
        raise DeviceError(
            f"GPU {one.name} is in use by pid {pids}, and takes one process at a time (compute "
            f"mode: exclusive); end that process, leave the GPU out of {MASK}, or run nvidia-smi "
            "-c DEFAULT as root"
        )
