"""For each kind of device: the devices that workers get, and the variables that they set."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import xpool.devices._masks as masks
from xpool.devices._device_context import PROCESS, TABLE, DeviceContext, Row
from xpool.devices._host import Host, pick_framework
from xpool.errors import DeviceError, OptionError

TPU_PORT = 8476
"""First port of a replica group over several hosts.  All hosts need the same: torch_xla's port."""


def best(host: Host) -> str:
    """Return the kind that ``"auto"`` means on this machine."""
    return next(kind for kind, row in TABLE.items() if _fits(row, host))


def _fits(row: Row, host: Host) -> bool:
    if not row.count(host) or (row.packages and not {*row.packages} & set(host.packages)):
        return False
    if row.build and row.build != host.build:
        return False
    return not row.mask or bool(row.visible(host))


def _share_out(total: int, n: int | None, per_worker: int, what: str) -> list[range]:
    """Return, for each of ``n`` workers, the positions of its devices among ``total`` devices."""
    most = total // per_worker
    if n is None:
        n = most
    if n > most or n == 0:
        each = f" of {per_worker} each" if per_worker > 1 else ""
        raise OptionError(f"{max(n, 1)} workers{each} are too many: there are {total} {what}")
    return [range(i * per_worker, (i + 1) * per_worker) for i in range(n)]


def _part(
    kind: str,
    framework: str = "torch",
    env: Mapping[str, str | None] | None = None,
    name: str = "",
    count: int = 1,
    nodes: Sequence[int | None] = (),
) -> DeviceContext:
    """Return a worker's context before `_contexts`; ``nodes``: the NUMA nodes of its devices."""
    node = nodes[0] if len(set(nodes)) == 1 else None
    return DeviceContext(kind, 0, 0, env or {}, name, framework, count, node=node)


def _contexts(host: Host, parts: Sequence[DeviceContext], group: int = 0) -> list[DeviceContext]:
    """Give each worker its position, cores and threads."""
    # The variable may list numbers for nested levels.  The first one counts.
    set_number = re.match(r"\s*([1-9][0-9]*)", host.environ.get("OMP_NUM_THREADS", ""))
    chosen = int(set_number[1]) if set_number else None
    near = [host.near(part.node) for part in parts]
    made = []
    for i, part in enumerate(parts):
        # Workers near the same cores share these.  A worker without near cores shares all cores.
        sharing = near.count(near[i]) if near[i] else len(parts)
        threads = chosen or max(1, len(near[i] or host.cpus) // sharing)
        env = dict(part.env)
        if chosen is None:  # else workers inherit the variable
            env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        made.append(replace(part, ordinal=i, threads=threads, env=env, cpus=near[i], group=group))
    return made


class DeviceRequest(NamedTuple):
    n: int | None
    per_worker: int
    per_process: int | None
    independent: bool
    framework: str | None


def _cores(number: int, workers: int, process: DeviceContext) -> list[DeviceContext]:
    """Return contexts of threads of one process, which have one device each."""
    env = {**process.env, PROCESS: f"{number}/{workers}"}
    return [replace(process, env=env, count=1, core=core) for core in range(workers)]


def _spread(n: int, per_process: int) -> list[int]:
    """Return the number of workers of each process."""
    return [min(per_process, n - i) for i in range(0, n, per_process)]


def xla_client(host: Host) -> str:
    """Return the client of torch_xla that a program on this machine uses."""
    return host.environ.get("PJRT_DEVICE") or ("TPU" if host.chips else "CPU")


def _cpu(host: Host, asked: DeviceRequest) -> list[DeviceContext]:
    __tracebackhide__ = True
    _check_plain("cpu", asked)
    return _contexts(host, [_part("cpu")] * (asked.n or len(host.cpus)))


def _check_plain(kind: str, asked: DeviceRequest, why: str = "") -> None:
    """Raise `OptionError` unless each worker is an independent process of torch with one device."""
    _, per_worker, per_process, independent, framework = asked
    if per_worker != 1 or not independent or framework or (per_process or 1) > 1:
        raise OptionError(
            f"devices({kind!r}) takes no per_worker=, per_process=, independent= or framework={why}"
        )


def _masked(kind: str, host: Host, asked: DeviceRequest) -> list[DeviceContext]:
    """Return contexts whose workers see only their own devices, by the mask in the kind's row."""
    __tracebackhide__ = True
    row = TABLE[kind]
    if kind == "cuda" and host.build == "ROCm":
        return _masked("rocm", host, asked)  # torch calls its devices cuda
    n, per_worker, per_process, independent, framework = asked
    frameworks = ("torch_xla", "torch") if kind == "neuron" else ("torch",)
    if framework is None:
        framework = next(name for name in frameworks if name == "torch" or name in host.packages)
    if not independent or (per_process or 1) > 1 or framework not in frameworks:
        raise OptionError(
            f"devices({kind!r}) takes no per_process=, independent= or framework=: each device has "
            "its own worker process; to make a group, call torch.distributed in the initializer"
        )
    missing = [name for name in ("torch", *row.packages) if name not in host.packages]
    if missing:
        raise DeviceError(
            f"devices({kind!r}): {missing[0]} is not installed here: pip install {missing[0]}"
        )
    if framework == "torch_xla":
        pick_framework(host.packages, "torch_xla")
    seen = row.visible(host)
    if not seen:
        raise _none_visible(kind, row, host)
    if row.build and row.build != host.build:
        raise DeviceError(
            f"devices({kind!r}): torch {host.packages['torch']} is built without {row.build}; "
            "install a build with it (https://pytorch.org/get-started), or use devices('cpu')"
        )
    parts = []
    for which in _share_out(len(seen), n, per_worker, f"{row.what} that this process may see"):
        own = [seen[i] for i in which]
        env = row.bind(own, host.environ)
        if framework == "torch_xla":
            env |= masks.neuron_xla_env(per_worker)
        nodes = [one.node for one in own]
        parts.append(_part(kind, framework, env, env[row.mask] or "", per_worker, nodes))
    return _contexts(host, parts)


def _none_visible(kind: str, row: Row, host: Host) -> DeviceError:
    names = row.mask, *masks.OTHERS.get(row.mask, ())
    said = [f"{name}={host.environ[name]!r}" for name in names if name in host.environ]
    if said and (row.count(host) or row.mask in host.environ):
        return DeviceError(
            f"{' and '.join(said)} hides every {row.what[:-1]}; unset it, or name the devices to "
            "use"
        )
    return DeviceError(
        f"devices({kind!r}): no {row.what} were found here ({row.files}). Start the container with "
        f"its devices, or name them in {row.mask}"
    )


def _accelerator(host: Host, asked: DeviceRequest) -> list[DeviceContext]:
    """Return contexts for the devices that `torch.accelerator` reports."""
    __tracebackhide__ = True
    kind, count = host.reported
    if "torch" not in host.packages:
        raise DeviceError("devices('accelerator'): torch is not installed here: pip install torch")
    if not kind:
        raise DeviceError(
            "devices('accelerator'): torch.accelerator reports no device here; use devices('cpu')"
        )
    if kind == "cuda" and host.build == "ROCm":
        kind = "rocm"
    if kind in TABLE:
        return KINDS[kind](host, asked)
    _check_plain("accelerator", asked, f": xpool knows no mask for {kind} devices")
    # Each worker sees all devices, and uses its own by its index.
    own = [which[0] for which in _share_out(count, asked.n, 1, f"{kind} devices")]
    return _contexts(host, [replace(_part(kind, name=str(i)), index=i) for i in own])


def _mps(host: Host, asked: DeviceRequest) -> list[DeviceContext]:
    __tracebackhide__ = True
    _check_plain("mps", asked, ": a Mac has one GPU, which its n= workers share")
    if not host.metal:
        raise DeviceError("devices('mps'): this is not a Mac with an Apple GPU; use devices('cpu')")
    if "torch" not in host.packages:
        raise DeviceError("devices('mps'): torch is not installed here: pip install torch")
    return _contexts(host, [_part("mps")] * (asked.n or 1))


def _xla(host: Host, asked: DeviceRequest) -> list[DeviceContext]:
    __tracebackhide__ = True
    n, per_worker, per_process, independent, framework = asked
    if framework == "torch_tpu":
        raise OptionError("devices('xla') uses torch_xla; for torch_tpu use devices('tpu')")
    client = xla_client(host)
    if client == "TPU":
        return _tpu(host, asked._replace(framework="torch_xla"))
    pick_framework(host.packages, "torch_xla")
    if client != "CPU":
        raise DeviceError(
            f"PJRT_DEVICE={client}: the number of its devices is not known before it runs. Set "
            "PJRT_DEVICE to TPU or CPU, use devices('neuron') for NEURON, or give CtxPool contexts "
            "of your own"
        )
    if not independent:
        raise OptionError(
            "independent=False: torch_xla's CPU client makes no group of several processes; "
            "xpool.xla.spawn makes one of CPU_NUM_DEVICES threads in one process"
        )
    if n is None:
        set_number = host.environ.get("CPU_NUM_DEVICES", "")
        n = int(set_number) // per_worker if set_number.isdigit() else len(host.cpus)
        n = max(1, n)
    per_process = per_process or 1
    _check_shares(per_worker, per_process)
    # At least one of `per_worker` and `per_process` is 1.
    env = dict.fromkeys(masks.TPU_SCRUB) | {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(max(per_worker, per_process)),
        "PJRT_LOCAL_PROCESS_COUNT": "1",
    }
    if per_process > 1:
        spread = enumerate(_spread(n, per_process))
        part = _part("xla", "torch_xla", env)
        parts = [one for i, workers in spread for one in _cores(i, workers, part)]
    else:
        parts = [_part("xla", "torch_xla", env, count=per_worker)] * n
    return _contexts(host, parts)


def _check_shares(per_worker: int, per_process: int) -> None:
    if per_worker > 1 and per_process > 1:
        raise OptionError(
            f"per_worker={per_worker}, per_process={per_process}: workers that share a process "
            "have one device each; leave out one of the two arguments"
        )


def _tpu(host: Host, asked: DeviceRequest) -> list[DeviceContext]:
    __tracebackhide__ = True
    n, per_worker, per_process, independent, framework = asked
    if not host.chips:
        raise DeviceError(
            "devices('tpu'): no TPU chip was found here (PCI devices of vendor 0x1ae0, and in "
            "a container their groups under /dev/vfio). Start the container with its TPU devices, "
            "or use devices('xla') for torch_xla's CPU client"
        )
    wanted = (framework,) if framework else ("torch_tpu", "torch_xla")
    framework = pick_framework(host.packages, *wanted)
    usable = _masked_chips(host)
    cores = _workers_of_a_chip(host, framework, per_worker, per_process, independent)
    spread: list[int] = []  # the number of workers of each process, if it has several
    if cores > 1:
        what = "cores of TPU chips that this process may use"
        spread = _spread(len(_share_out(cores * len(usable), n, 1, what)), cores)
        shares = [range(i, i + 1) for i in range(len(spread))]
    else:
        shares = _share_out(len(usable), n, per_worker, "TPU chips that this process may use")
    # The chips that each process opens.
    own = [[usable[i] for i in which] for which in shares]
    for c in sorted({c for chips in own for c in chips}):
        chip = host.chips[c]
        if chip.user:
            raise DeviceError(
                f"TPU chip {c} (/{chip.file}) is in use by {chip.user}, and takes one process at "
                "a time; end that process, or leave the chip out of TPU_VISIBLE_CHIPS"
            )
    at = _slice(host)
    if independent:
        envs = [masks.tpu_env(at, chips, framework) for chips in own]
        group = 0
    else:
        if per_worker != 1:
            raise OptionError(
                f"independent=False, per_worker={per_worker}: a replica group has one worker for "
                "each chip; leave per_worker out"
            )
        group = len(own) * len(at.hosts)
        chips = [c for part in own for c in part]
        ports = _ports(len(own) + 1, at)
        envs = [
            masks.tpu_group_env(at, rank, chips, ports[1:], framework, ports[0])
            for rank in range(len(own))
        ]
    # A later import of torch here would load torch_tpu, but only workers may open the chips.
    if framework == "torch_tpu" and "torch" not in sys.modules:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    each = masks.TPU_DEVICES.get(at.generation, 1)
    parts = []
    for i, (chips, env) in enumerate(zip(own, envs)):
        nodes = [host.chips[c].node for c in chips]
        name = ",".join(map(str, chips))
        part = _part("tpu", framework, env, name, len(chips) * each, nodes)
        parts += _cores(i, spread[i], part) if spread else [part]
    return _contexts(host, parts, group)


def _workers_of_a_chip(
    host: Host, framework: str, per_worker: int, per_process: int | None, independent: bool
) -> int:
    """Return how many workers are threads of the process that opens a chip."""
    generation = host.chips[0].generation
    most = 1
    if framework == "torch_xla" and independent and per_worker == 1:
        most = masks.TPU_DEVICES.get(generation, 1)
    if per_process is None:
        return most if generation in masks.TPU_CORE_EACH else 1
    _check_shares(per_worker, per_process)
    if per_process not in (1, most):
        raise OptionError(
            f"per_process={per_process}: the process of a TPU {generation} chip can have "
            f"{'1' if most == 1 else f'1 or {most}'} workers here; more than one needs torch_xla, "
            "a generation with two devices per chip, per_worker=1 and independent=True"
        )
    return per_process


def _masked_chips(host: Host) -> list[int]:
    """Return the indices of the chips that the parent's mask leaves visible."""
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        mask = host.environ.get(name, "").strip()
        if not mask:
            continue
        chips = [int(part) if part.strip().isdigit() else -1 for part in mask.split(",")]
        if any(not 0 <= chip < len(host.chips) for chip in chips) or len({*chips}) < len(chips):
            raise DeviceError(
                f"{name}={mask!r} must name chips of this host, 0 to {len(host.chips) - 1}, each "
                "once; unset it to use all"
            )
        return chips
    return list(range(len(host.chips)))


def _slice(host: Host) -> masks.TpuSlice:
    """Return the slice that the variables of a GKE pod or launcher describe, else this host."""
    names = tuple(h for h in host.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if h)
    generation = host.chips[0].generation
    accelerator = host.environ.get("TPU_ACCELERATOR_TYPE", "")
    if len(names) < 2:
        return masks.TpuSlice(generation, len(host.chips), accelerator=accelerator)
    index = host.environ.get("TPU_WORKER_ID", "")
    bounds = host.environ.get("TPU_HOST_BOUNDS", "")
    if not (index.isdigit() and int(index) < len(names) and re.fullmatch(r"\d+,\d+,\d+", bounds)):
        raise DeviceError(
            f"TPU_WORKER_HOSTNAMES names {len(names)} hosts; TPU_WORKER_ID must then be 0 to "
            f"{len(names) - 1}, not {index!r}, and TPU_HOST_BOUNDS x,y,z, not {bounds!r}. For this "
            "host alone set TPU_WORKER_HOSTNAMES=localhost"
        )
    x, y, z = (int(d) for d in bounds.split(","))
    return masks.TpuSlice(generation, len(host.chips), int(index), names, (x, y, z), accelerator)


def _ports(count: int, at: masks.TpuSlice) -> list[int]:
    """Return ports for a group: free ports, or fixed ports if the group has several hosts."""
    if len(at.hosts) > 1:
        # The master has the first port.  The workers' ports begin at TPU_PORT.
        return list(range(TPU_PORT - 1, TPU_PORT - 1 + count))
    # All sockets are open at the same time, so that the ports differ.
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("localhost", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


KINDS: dict[str, Callable[[Host, DeviceRequest], list[DeviceContext]]] = {
    **{kind: partial(_masked, kind) for kind, row in TABLE.items() if row.mask},
    "accelerator": _accelerator,
    "cpu": _cpu,
    "mps": _mps,
    "tpu": _tpu,
    "xla": _xla,
}
