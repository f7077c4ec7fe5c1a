"""Contexts for `CtxPool` that bind each worker to a device.

::

    from xpool import CtxPool
    from xpool.devices import devices

    pool = CtxPool(worker_contexts=devices("tpu"))     # a worker for each chip, or core of v2, v3

A worker context can be any object.  Three optional attributes of it bind a worker *process*:

``env``
    A mapping of environment variables.  The worker sets them before it imports anything else,
    because frameworks read their variables once, while they are imported.  A value of None deletes
    the variable, and all deletions come first.  A name that ends in ``*`` means all names with that
    prefix.  The variable ``XPOOL_PROCESS``, if present, names a process: workers whose contexts
    name the same process are threads of it, and must have equal ``env`` and ``cpus``
    (docs/devices.md).
``cpus``
    Numbers of the cores on which the worker runs.  They are set as early as ``env``.
``enter()``
    The worker (its thread, if workers are threads) calls this once, after it has received the
    context and before the pool's initializer runs.  An exception counts as a failed start.

`DeviceContext` has these attributes, and other classes can have them, too: ``examples/evaluate.py``
wraps a `DeviceContext` in a context that also holds a model.

This package opens no device and imports no framework, except for ``devices("accelerator")``.
Workers do this.
"""

from __future__ import annotations

import os
from dataclasses import replace

from xpool._calls.options import check_count
from xpool.devices._device_context import DeviceContext
from xpool.devices._host import Accelerator, Chip, Gpu, Host
from xpool.devices._kinds import KINDS, DeviceRequest, best
from xpool.errors import OptionError

__all__ = ["Accelerator", "Chip", "DeviceContext", "Gpu", "Host", "devices"]


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
    """Return contexts for ``n`` workers, each of which binds a worker to its own device.

    Args:
        kind: ``"cuda"``, ``"rocm"`` (AMD's GPUs, which ``"cuda"`` means as well if torch is built
            for them), ``"xpu"`` (Intel's GPUs), ``"npu"`` (Huawei's Ascend), ``"neuron"`` (cores of
            AWS's Trainium and Inferentia), ``"mps"`` (the GPU of an Apple Mac), ``"tpu"`` or
            ``"cpu"``.  ``"xla"`` is a TPU or, without one, torch_xla's CPU client.
            ``"accelerator"`` is what `torch.accelerator` reports; it imports torch in this process.
            ``"auto"`` means TPUs if this machine has some, else GPUs and other accelerators, else
            the CPU.
        n: number of workers.  None: the number of devices (on TPU v2 and v3, of cores).  On mps
            this is 1, and more workers share the GPU.  On the CPU it is the number of cores that
            this process may use, or ``CPU_NUM_DEVICES``, if set, for torch_xla's CPU client.
        per_worker: number of devices of each worker; on TPUs, number of chips.
        per_process: number of workers that are threads of one process and have one device each.
            None: 2 on TPU v2 and v3 with torch_xla (only one process can open a chip, and each of
            its cores gets a worker), else 1.  With 1, each worker has a process and both cores of
            its chip.  On torch_xla's CPU client it can be any number up to 64.
        independent: whether each worker is its own topology.  If False, all workers form one
            replica group (collective operations across workers), whose members start and end
            together.  Only TPUs can form groups.
        framework: ``"torch_xla"`` or ``"torch_tpu"``, for TPUs.  None: the one that is installed.
            For ``"neuron"``, ``"torch_xla"`` or None, which means torch_xla if it is installed.
        cache: folder of torch_xla's persistent compilation cache, with a folder for each worker.  A
            replacement worker uses the folder of its predecessor.  None: no such cache.
        host: the machine.  None: this one.

    `devices` respects the masks of this process: worker i gets the i-th visible device.  Workers
    share the cores: ``threads`` is the number of cores (near the device, if known) divided by the
    number of workers, at least 1.  If ``OMP_NUM_THREADS`` is set, ``threads`` is that number.

    If torch_tpu is chosen and this process has not imported torch, `devices` sets
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` in this process, so that torch will not load torch_tpu.

    Raises:
        DeviceError: the device does not exist, a TPU chip is in use, a mask hides all devices, or
            the framework is missing or does not fit torch.  The text says what to do.
        OptionError (a `ValueError`): an argument is invalid.
        TypeError: ``n``, ``per_worker`` or ``per_process`` is not an integer.
    """
    if not isinstance(kind, str):
        hint = f'; did you mean devices("cpu", {kind})?' if isinstance(kind, int) else ""
        raise TypeError(f'kind must be a str such as "cuda" or "cpu", not {kind!r}{hint}')
    if kind not in ("auto", *KINDS):
        hint = ""
        if kind[:3] in ("gpu", "cud", "hip", "amd"):
            hint = " For NVIDIA GPUs use 'cuda', for AMD's 'rocm', for Intel's 'xpu', with n= GPUs."
        raise OptionError(
            f"devices(kind={kind!r}): no such kind; use 'auto' or {sorted(KINDS)}.{hint}"
        )
    for name, value in (("n", n), ("per_worker", per_worker), ("per_process", per_process)):
        if value is not None:
            check_count(name, value)
    if framework not in (None, "torch_xla", "torch_tpu"):
        raise OptionError(f"framework must be 'torch_xla' or 'torch_tpu', not {framework!r}")
    if host is None:
        asks = kind == "accelerator"
        host = Host.here(gpus=asks or kind in ("cuda", "auto"), ask_torch=asks)
    if kind == "auto":
        kind = best(host)
    found = KINDS[kind](host, DeviceRequest(n, per_worker, per_process, independent, framework))
    if cache is not None:
        found = [_with_cache(context, os.fspath(cache)) for context in found]
    return found


def _with_cache(context: DeviceContext, folder: str) -> DeviceContext:
    if context.framework != "torch_xla" or context.kind == "neuron":
        raise OptionError("cache= is for torch_xla, which these workers do not use; leave it out")
    first = context.ordinal - (context.core or 0)  # the workers of a process share its cache
    path = os.path.join(os.path.abspath(folder), f"worker-{first}")
    env = {**context.env, "XLA_PERSISTENT_CACHE_PATH": path, "XLA_PERSISTENT_CACHE_READ_ONLY": "0"}
    return replace(context, env=env)
