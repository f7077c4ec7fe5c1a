"""Describes the devices for the models without starting a device runtime.

CUDA's functions for free memory create a context on the device.  It takes hundreds of megabytes,
and the process can no longer be forked.  So this module asks NVML, as `xpool.devices` does, and
torch only if NVML is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from xpool._calls.options import check_iterable
from xpool._memory.system import available_memory
from xpool.devices import DeviceContext, Host, devices
from xpool.devices._host import Spare, find_spare
from xpool.devices._kinds import best
from xpool.errors import DeviceError, OptionError


class Place(NamedTuple):
    """A device, or a worker's share of a device: one for each entry of ``devices``."""

    device: torch.device
    """The device in this process; a CUDA device has an index."""

    binding: DeviceContext
    """The context that binds a worker to the device."""

    memory: float
    """Free memory, in bytes."""

    power: float
    """Computing power; an idle GPU has 1."""


def find_places(wanted: Any, cpu_weight: float, host: Host | None = None) -> list[Place]:
    """Return the places that ``wanted`` names.  None: all CUDA devices, or the CPU if none exist.

    Entries that name the same device share its memory and power equally.
    """
    host = Host.here() if host is None else host
    if wanted is None:
        gpus = devices("cuda", host=host) if best(host) == "cuda" else []
        named = [torch.device("cuda", i) for i in range(len(gpus))] or [torch.device("cpu")]
    else:
        named = _named(wanted)
        gpus = devices("cuda", host=host) if any(d.type == "cuda" for d in named) else []
    for i, device in enumerate(named):
        if device.type == "cuda" and device.index >= len(gpus):
            raise DeviceError(
                f"devices[{i}] is '{device}', but this process may see cuda:0 to "
                f"cuda:{len(gpus) - 1}; name those, or 'cpu'"
            )
    # A GPU's workers get a mask with that GPU.  Workers on the CPU divide its cores.
    cpus = sum(device.type == "cpu" for device in named)
    bindings = iter(devices("cpu", cpus, host=host) if cpus else ())
    spare = _spare(gpus, sorted({d.index for d in named if d.type == "cuda"}))
    places = []
    for device in named:
        sharing = named.count(device)
        if device.type == "cpu":
            binding, left = next(bindings), Spare(available_memory(), cpu_weight)
        else:
            binding, left = gpus[device.index], spare[device.index]
        places.append(Place(device, binding, left.memory / sharing, left.idle / sharing))
    return places


def _named(wanted: Any) -> list[torch.device]:
    if isinstance(wanted, (str, torch.device)):
        raise TypeError(f"devices must be a list of devices, such as [{str(wanted)!r}]")
    found = []
    for i, given in enumerate(check_iterable("devices", wanted)):
        try:
            device = torch.device(given)
        except (RuntimeError, TypeError) as exc:
            raise OptionError(
                f"devices[{i}] is {given!r}, which is not a device; give 'cpu' or 'cuda:i'"
            ) from exc
        if device.type not in ("cpu", "cuda"):
            raise OptionError(f"devices[{i}] is '{device}'; models go to 'cpu' and 'cuda:i' only")
        found.append(torch.device("cuda", device.index or 0) if device.type == "cuda" else device)
    if not found:
        raise OptionError(
            "devices is empty; leave it out for all GPUs of this machine, or else the CPU"
        )
    return [torch.device("cpu") if device.type == "cpu" else device for device in found]


def _spare(gpus: Sequence[DeviceContext], indices: Sequence[int]) -> dict[int, Spare]:
    if not indices:
        return {}
    found = find_spare([gpus[i].name for i in indices])
    if found is None:
        # NVML is missing, or does not know a device of the mask.
        found = [Spare(torch.cuda.mem_get_info(i)[0], 1.0) for i in indices]
    return dict(zip(indices, found))
