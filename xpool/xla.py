"""torch_xla's launchers, but with results: `spawn`, `launch`, `MpModelWrapper`, `MpSerialExecutor`.

These are for programs that were written for ``torch_xla.launch`` or ``xmp.spawn``: such a program
runs replicas that work together, one for each device.  `xpool.devices` is for pools of independent
workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from xpool._calls.options import check_callable, check_count
from xpool._pools.spawn import ProcessContext, Replicas
from xpool._worker import replica
from xpool._worker.entry import set_environment
from xpool._worker.replica import MpModelWrapper, MpSerialExecutor
from xpool.devices import DeviceContext, Host, devices
from xpool.devices._host import running_runtime
from xpool.devices._kinds import xla_client
from xpool.errors import OptionError

__all__ = ["MpModelWrapper", "MpSerialExecutor", "launch", "spawn"]


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
) -> Any:
    """Run ``fn(index, *args)`` on every XLA device.  Return the list of results, by ``index``.

    ``index`` is the replica's global ordinal of torch_xla.  Each chip has a process, with a thread
    for each device of the chip: two on TPU v2 and v3, ``CPU_NUM_DEVICES`` on the CPU client, else
    one.  All replicas form one replica group.

    Args:
        fn: the function.
        args: its further arguments.
        nprocs: the number of devices, or None.  With 1, ``fn(0, *args)`` runs in this process, and
            has ended when `spawn` returns, even with ``join=False``.
        join: whether to wait for the results.  If False, return a `ProcessContext` at once.
        daemon: whether the processes are daemonic.  Daemonic processes cannot have children.
        start_method: "spawn", "fork" or "forkserver".  None: xpool's fork server.
        cache: folder of the persistent compilation cache, with a folder for each process.

    Raises:
        Exception: the error of ``fn``, with its traceback as the cause.  The other replicas were
            stopped.
        WorkerDied: a signal or `sys.exit` ended the process of a replica.  The others were stopped.
        OptionError: ``nprocs`` is neither 1 nor the number of devices.
        DeviceError: no device exists, it is in use, or torch_xla is missing or does not fit.
        WorkerStartFailed: a process could not be started.
    """
    check_callable("fn", fn)
    if nprocs is not None and check_count("nprocs", nprocs) == 1:
        value = _run_here(fn, args, cache)
        return [value] if join else _OneHere(value)
    contexts = _contexts(cache)
    count = sum(context.count for context in contexts)
    if nprocs not in (None, count):
        raise OptionError(
            f"nprocs={nprocs}: torch_xla runs one replica on each of the {count} devices; leave "
            "nprocs out, mask devices (TPU_VISIBLE_CHIPS, CPU_NUM_DEVICES), or use "
            "CtxPool(worker_contexts=devices('xla', n)) for independent workers"
        )
    pool = Replicas(
        fn,
        tuple(args),
        len(contexts),
        daemon=daemon,
        start_method=start_method,
        contexts=contexts,
    )
    context = _XlaContext(pool, replica.run_xla, [()] * len(contexts))
    return context.wait() if join else context


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    start_method: str | None = None,
    debug_single_process: bool = False,
    *,
    cache: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Run ``fn(index, *args)`` on every XLA device, and return the results by ``index``, as
    `spawn`.  Under torchrun, which has started the processes, run ``fn`` in this one only.

    ``debug_single_process`` is the same as ``nprocs=1``.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [fn(int(os.environ["LOCAL_RANK"]), *args)]
    nprocs = 1 if debug_single_process else None
    results: list[Any] = spawn(fn, args, nprocs, start_method=start_method, cache=cache)
    return results


class _XlaContext(ProcessContext):
    """The processes of replicas.  Each returns a dict of its devices' results, by ordinal."""

    def results(self) -> list[Any]:
        """Return the results of the replicas, in the order of their ordinals."""
        merged: dict[int, Any] = {}
        for part in super().results():
            merged |= part or {}
        return [merged[ordinal] for ordinal in sorted(merged)]

    def _error(self, index: int, exc: BaseException) -> BaseException:
        return exc


class _OneHere(ProcessContext):
    """A replica that has run in this process."""

    def __init__(self, value: Any) -> None:
        super().__init__(None, replica.run_xla, [])
        self._values = [value]

    def pids(self) -> list[int]:
        return [os.getpid()]


def _contexts(cache: str | os.PathLike[str] | None) -> list[DeviceContext]:
    host = Host.here(gpus=False)
    if xla_client(host) == "TPU":
        return devices("xla", independent=False, cache=cache, host=host)
    each = host.environ.get("CPU_NUM_DEVICES", "")
    number = int(each) if each.isdigit() and int(each) else 1
    return devices("xla", 1, per_worker=number, cache=cache, host=host)


def _run_here(
    fn: Callable[..., Any], args: Sequence[Any], cache: str | os.PathLike[str] | None
) -> Any:
    before = ours = dict(os.environ)
    try:
        # A runtime that has started no longer reads variables.
        if running_runtime() != "XLA":
            context = devices("xla", 1, per_process=1, cache=cache)[0]
            # Limits of threads are only for workers, which share the machine.
            env = {k: v for k, v in context.env.items() if not k.endswith("_NUM_THREADS")}
            set_environment(env)
            ours = dict(os.environ)
            context.enter()
        ordinal = import_module("torch_xla.runtime").global_ordinal()
        return fn(ordinal, *args)
    finally:
        # Otherwise later processes could use only the device of this replica.
        _put_back(before, ours)


def _put_back(before: dict[str, str], ours: dict[str, str]) -> None:
    """Undo the changes of `set_environment`, except for variables that ``fn`` has set later."""
    changed = {name for name in before.keys() | ours.keys() if before.get(name) != ours.get(name)}
    for name in changed:
        if os.environ.get(name) == ours.get(name):
            set_environment({name: before.get(name)})
