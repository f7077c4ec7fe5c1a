"""Pure functions that return the environment variables of a worker that owns TPU chips.

libtpu, torch_xla 2.9 (``_internal/tpu.py``, ``_internal/pjrt.py``) and torch_tpu 0.2
(``_internal/distributed``) read these variables.  A value of None deletes the variable, because all
three treat an inherited variable as a setting of the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpool.errors import OptionError

Env = dict[str, str | None]

SCRUB = (
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

_LAUNCHER = (
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

_CORES = {"v3": 2, "v4": 2, "v5p": 2, "7x": 2}
"""Number of cores of a chip, for generations whose slice names count cores and not chips."""

DEVICES = {"v3": 2, "7x": 2}
"""Number of devices in a chip.  A chip of v4 or v5p has two cores, but is one device."""

CORE_EACH = {"v3"}
"""Generations whose programs use each core as a device ("v3" includes v2)."""

_NAMES = {"v5e": "v5litepod", "7x": "tpu7x"}

_SHAPES = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
_CUBE = {"v4", "v5p"}  # in these generations eight chips form a cube, in others a flat mesh

_TORCH_TPU_7X = {2: "1,1,1,2", 4: "1,2,1,2", 8: "2,2,1,2"}
"""Topologies by number of devices.  The two devices of a 7x chip are a fourth dimension."""


@dataclass(frozen=True)
class Slice:
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


def accelerator_type(at: Slice) -> str:
    """Return the slice's name as in Google's metadata, such as ``v5litepod-8``."""
    if at.accelerator:
        return at.accelerator
    size = at.chips * len(at.hosts) * _CORES.get(at.generation, 1)
    return f"{_NAMES.get(at.generation, at.generation)}-{size}"


def shape(generation: str, chips: int) -> str:
    """Return the shape of the mesh that so many chips of one host form, as ``x,y,z``.

    Raises:
        OptionError: this number of chips forms no mesh.
    """
    if chips not in _SHAPES:
        raise OptionError(
            f"{chips} TPU chips form no mesh; a worker or a replica group can have 1, 2, 4 or 8"
        )
    return "2,2,2" if chips == 8 and generation in _CUBE else _SHAPES[chips]


def independent_env(at: Slice, chips: Sequence[int], framework: str) -> Env:
    """Return the variables of an independent worker that owns these chips of its host."""
    env = _scrubbed()
    env |= _visible(chips)
    # Each variable has a newer and an older name.
    for name in ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"):
        env[name] = shape(at.generation, len(chips))
    for name in ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"):
        env[name] = "1,1,1"
    if framework == "torch_xla":
        env |= {"PJRT_DEVICE": "TPU", "PJRT_LOCAL_PROCESS_COUNT": "1"}
        # The worker is its own slice, with only this host.
        env |= _instead_of_metadata(at, 0, ("localhost",))
    else:
        env |= _torch_tpu()
    return env


def group_env(
    at: Slice,
    rank: int,
    chips: Sequence[int],
    ports: Sequence[int],
    framework: str,
    master_port: int = 29500,
) -> Env:
    """Return the variables of this host's worker ``rank`` in a group of workers with one chip each.

    ``chips`` are all chips of the group on this host.  ``ports`` has one port for each chip.  They
    are the same on every host, and other groups of the host must not use them.
    """
    n = len(chips)
    env = _scrubbed()
    addresses = ",".join(f"{host}:{port}" for host in at.hosts for port in ports)
    if framework == "torch_xla":
        # Each process has one chip, so the processes form the mesh of the chips of all hosts.
        lie = [int(d) for d in shape(at.generation, n).split(",")]
        bounds = ",".join(str(h * c) for h, c in zip(at.bounds, lie))
        for name in ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"):
            env[name] = "1,1,1"
        for name in ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"):
            env[name] = bounds
        env |= _visible(chips[rank : rank + 1])
        env |= _instead_of_metadata(at, at.host, at.hosts)
        env |= {
            "CLOUD_TPU_TASK_ID": str(at.host * n + rank),
            "TPU_PROCESS_ADDRESSES": addresses,
            "TPU_PROCESS_PORT": str(ports[rank]),
            "PJRT_DEVICE": "TPU",
            "PJRT_LOCAL_PROCESS_RANK": str(rank),
            "PJRT_LOCAL_PROCESS_COUNT": str(n),
        }
        return env
    env |= _torch_tpu()
    if at.generation == "7x":
        if n not in _TORCH_TPU_7X:
            raise OptionError(f"{n} devices of TPU 7x form no group; torch_tpu knows 2, 4 and 8")
        topology = _TORCH_TPU_7X[n]
    else:
        topology = shape(at.generation, n)
    env |= {
        "RANK": str(at.host * n + rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(at.hosts) * n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": at.hosts[0],
        "MASTER_PORT": str(master_port),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": addresses,
        "TORCH_TPU_TOPOLOGY": topology,
    }
    return env


def _scrubbed() -> Env:
    return dict.fromkeys(SCRUB)


def _visible(chips: Sequence[int]) -> Env:
    numbers = ",".join(str(chip) for chip in chips)
    return {
        "TPU_VISIBLE_CHIPS": numbers,
        "TPU_VISIBLE_DEVICES": numbers,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _instead_of_metadata(at: Slice, host: int, hosts: Sequence[str]) -> Env:
    """Return variables that stop torch_xla's import from querying Google's metadata server."""
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": accelerator_type(at),
        "TPU_WORKER_ID": str(host),
        "TPU_WORKER_HOSTNAMES": ",".join(hosts),
    }


def _torch_tpu() -> Env:
    # `devices` has set AUTOLOAD to 0 in the parent, but the worker must load the backend.
    return {**dict.fromkeys(_LAUNCHER), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
