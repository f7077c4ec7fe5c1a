"""Contexts for `CtxPool` that bind each worker to a device.

::

    from xpool import CtxPool
    from xpool.devices import devices

    pool = CtxPool(worker_contexts=devices("tpu"))     # a worker for each chip, or core of v2, v3

A worker context is any object.  These attributes of it bind a worker *process*:

``env``
    A mapping of environment variables.  The worker sets them before it imports anything else, since
    frameworks read their variables once, while they are imported.  A value of None deletes the
    variable, and all deletions come first.  A name that ends in ``*`` means all names with that
    prefix.  The variable ``XPOOL_PROCESS``, if present, names a process: workers whose contexts
    name the same process are threads of it, and must have equal ``env`` and ``cpus``
    (docs/devices.md).
``cpus``
    Numbers of the cores to run on, if any.  They are set as early as ``env``.
``enter()``
    Called once in the worker (in its thread, if workers are threads), after the context has arrived
    and before the pool's initializer runs.  An exception counts as a failed start of the worker.

All of them are optional.  `DeviceContext` has them, and a class of your own can have them, too:
``examples/evaluate.py`` wraps a `DeviceContext` in a context that also holds a model.

This package opens no device and imports no framework; workers do that.
"""

from __future__ import annotations

import os
from dataclasses import replace

from xpool.devices.context import DeviceContext
from xpool.devices.host import Chip, Host
from xpool.devices.kinds import KINDS, Asked, best
from xpool.devices.nvml import Gpu
from xpool.errors import OptionError

__all__ = ["Chip", "DeviceContext", "Gpu", "Host", "devices"]


def devices(
    kind: str = "auto",
    n: int | None = None,
    *,
    per_worker: int = 1,
    per_process: int | None = None,
    independent: bool = True,
    framework: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    host: Host | None = None,
) -> list[DeviceContext]:
    """Return contexts for ``n`` workers, each bound to a device of its own.

    Args:
        kind: ``"cuda"``, ``"mps"`` (the GPU of an Apple Mac), ``"tpu"`` or ``"cpu"``; ``"xla"``:
            torch_xla's choice, a TPU or else its CPU client; ``"auto"``: TPUs if there are any,
            else GPUs, else the CPU.
        n: number of workers.  None: the number of devices (cores of TPU v2 and v3).  On mps this is
            1; more workers share the one GPU.  On the CPU it is the number of cores that this
            process may use; for torch_xla's CPU client ``CPU_NUM_DEVICES``, if that is set.
        per_worker: number of devices of each worker; on TPUs, of chips.
        per_process: number of workers that are threads of one process, with one of its devices
            each.  None: 2 on TPU v2 and v3 with torch_xla (a worker for each core of a chip, which
            only one process can open), else 1.  With 1, each worker has a process, and both cores
            of its chip.  On torch_xla's CPU client it can be any number up to 64.
        independent: whether each worker is a topology of its own.  If False, all workers form one
            replica group (collective operations across workers), whose members start and end
            together; TPU only.
        framework: ``"torch_xla"`` or ``"torch_tpu"``, for TPUs; None: the one that is installed.
        cache: folder of torch_xla's persistent compilation cache, in which each worker has its own
            folder.  A replacement worker uses that of its predecessor.  None: no such cache.
        host: the machine; None: this one.

    `devices` respects the masks of this process: worker i gets the i-th visible device.  Workers
    share the cores: ``threads`` is the number of cores (near the device, if known) divided by the
    number of workers, at least one.  If ``OMP_NUM_THREADS`` is set, it is kept instead.

    If torch_tpu is chosen and this process has not imported torch, `devices` sets
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` here, so that torch does not load torch_tpu when imported.

    Raises:
        DeviceError: the device does not exist or is in use, a mask names none, or its framework is
            missing or does not fit; the message says what to do.
        OptionError (a `ValueError`): an argument is invalid.
        TypeError: ``n``, ``per_worker`` or ``per_process`` is not an integer.
    """
    if kind not in ("auto", *KINDS):
        hint = " For NVIDIA GPUs use 'cuda', with n= GPUs." if kind[:3] in ("gpu", "cud") else ""
        raise OptionError(
            f"devices(kind={kind!r}): no such kind; use 'auto' or {list(KINDS)}.{hint}"
        )
    for name, value in (("n", n), ("per_worker", per_worker), ("per_process", per_process)):
        _check_number(name, value)
    if framework not in (None, "torch_xla", "torch_tpu"):
        raise OptionError(f"framework must be 'torch_xla' or 'torch_tpu', not {framework!r}")
    if host is None:
        host = Host.here(gpus=kind in ("cuda", "auto"))
    if kind == "auto":
        kind = best(host)
    found = KINDS[kind](host, Asked(n, per_worker, per_process, independent, framework))
    if cache is not None:
        found = [_with_cache(context, os.fspath(cache)) for context in found]
    return found


def _check_number(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        what = _MANY[name]
        raise TypeError(f"devices({name}={value!r}): {name} is the number of {what}, an int.")
    if value < 1:
        raise OptionError(f"devices({name}={value}): there must be at least 1 {_ONE[name]}.")


_MANY = {
    "n": "workers",
    "per_worker": "devices of each worker",
    "per_process": "workers of each process",
}
_ONE = {"n": "worker", "per_worker": "device for each worker", "per_process": "worker a process"}


def _with_cache(context: DeviceContext, folder: str) -> DeviceContext:
    if context.framework != "torch_xla":
        raise OptionError("cache= is for torch_xla, which these workers do not use; leave it out")
    first = context.ordinal - (context.core or 0)  # the workers of a process share its cache
    path = os.path.join(os.path.abspath(folder), f"worker-{first}")
    env = {**context.env, "XLA_PERSISTENT_CACHE_PATH": path, "XLA_PERSISTENT_CACHE_READ_ONLY": "0"}
    return replace(context, env=env)
