"""What a worker is bound to: one device, as a context for `CtxPool`.

::

    from xpool import CtxPool
    from xpool.devices import devices

    pool = CtxPool(worker_contexts=devices("tpu"))     # one worker for each chip, or core of v2, v3

A worker context is any object.  These attributes of it bind a worker *process*:

``env``
    A mapping of environment variables.  The worker sets them before it imports anything else, since
    frameworks read theirs once, while they are imported.  A value of None deletes the variable, and
    all deletions come first; a name that ends in ``*`` stands for all that begin so.
    ``XPOOL_PROCESS`` in it, if it is there, names a process: workers whose contexts name the same
    are threads of one process, and what ``env`` and ``cpus`` say has to be the same for all of
    them (docs/devices.md).
``cpus``
    Numbers of the cores to run on, if any; set as early.
``enter()``
    Called once in the worker (in its thread, where it is one), when the context has arrived and
    before the pool's initializer runs.  Whatever it raises counts as a failed start of the worker.

Each may be left out.  `DeviceContext` has them, and so can a class of your own;
``examples/evaluate.py`` wraps a `DeviceContext` in a context that also holds a model.

Nothing here opens a device or imports a framework: that is the worker's.
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
    """Contexts for ``n`` workers, each bound to a device of its own.

    Args:
        kind: ``"cuda"``, ``"mps"`` (the GPU of an Apple Mac), ``"tpu"``, ``"cpu"``; ``"xla"``: what
            torch_xla would take, a TPU or else its CPU client; ``"auto"``: TPUs if there are any,
            else GPUs, else the CPU.
        n: number of workers.  None: as many as there are devices (cores of TPU v2 and v3).  On mps
            1: workers share the one GPU.  On the CPU one for each core that this process may use,
            and for torch_xla's CPU client ``CPU_NUM_DEVICES`` if that is set.
        per_worker: devices of each worker; on TPUs, chips.
        per_process: workers that are threads of one process, with one of its devices each.  None: 2
            on TPU v2 and v3 with torch_xla, a worker for each core of a chip, which only one
            process can open; else 1.  1: each worker has a process, and both cores of its chip.
            On torch_xla's CPU client any number up to 64.
        independent: whether each worker is a topology of its own, or all form one replica group
            (collective operations across workers), whose members start and end together; TPU only.
        framework: ``"torch_xla"`` or ``"torch_tpu"``, for TPUs; None: the one that is installed.
        cache: folder of torch_xla's persistent compilation cache; each worker, and what replaces
            it, has a folder of its own in it.  None: no such cache.
        host: the machine; None: this one.

    Masks of this process are respected: worker i gets the i-th device that it may see.  The cores
    are shared out: ``threads`` is cores (near the device, where that is known) by workers, at least
    one, unless ``OMP_NUM_THREADS`` is set, which is then kept.

    If torch_tpu is chosen and this process has not imported torch, it sets
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` here, so that torch, when imported, leaves torch_tpu alone.

    Raises:
        DeviceError: there is no such device, it is in use, a mask names none, or its framework is
            missing or does not fit; the message says what to do.
        OptionError (a `ValueError`): an argument makes no sense.
        TypeError: ``n``, ``per_worker`` or ``per_process`` is no integer.
    """
    if kind not in ("auto", *KINDS):
        hint = " GPUs of NVIDIA are 'cuda', n= of them." if kind[:3] in ("gpu", "cud") else ""
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
        raise OptionError("cache= is torch_xla's compilation cache; these workers do not use it")
    first = context.ordinal - (context.core or 0)  # the cache is its process's
    path = os.path.join(os.path.abspath(folder), f"worker-{first}")
    env = {**context.env, "XLA_PERSISTENT_CACHE_PATH": path, "XLA_PERSISTENT_CACHE_READ_ONLY": "0"}
    return replace(context, env=env)
