"""The code of a worker of `xpool.spawn` or `xpool.xla.spawn`: it runs one function, once."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

_what: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


def keep(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Store the function.  An initializer: `multiprocessing` passes locks and queues only then."""
    global _what
    _what = fn, args


def pid(*_: Any) -> int:
    """Return the process id; a worker with a context passes it as the argument."""
    return os.getpid()


def run(index: int) -> Any:
    assert _what is not None
    fn, args = _what
    return fn(index, *args)


def run_xla(context: Any) -> dict[int, Any]:
    """Run ``fn(ordinal, *args)`` on every device of this process; return the results by ordinal.

    As in torch_xla, each device has a thread, if there are several devices.
    """
    assert _what is not None
    fn, args = _what
    torch_xla = import_module("torch_xla")
    xm = import_module("torch_xla.core.xla_model")
    runtime = import_module("torch_xla.runtime")
    devices = xm.get_xla_supported_devices()
    xm.set_replication(torch_xla.device(), devices)

    def one(device: str) -> tuple[int, Any]:
        torch_xla._XLAC._xla_set_default_device(device)
        runtime._init_world_size_ordinal()
        ordinal = runtime.global_ordinal()
        return ordinal, fn(ordinal, *args)

    if len(devices) == 1:
        return dict([one(devices[0])])
    return dict(_in_threads(one, devices))


def _in_threads(one: Callable[[str], tuple[int, Any]], devices: list[str]) -> list[tuple[int, Any]]:
    """Run ``one`` for each device; raise the first error at once, without waiting for the rest."""
    ends: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def guarded(device: str) -> None:
        try:
            ends.put((one(device), None))
        except BaseException as exc:
            ends.put((None, exc))

    for device in devices:
        # Daemon threads: if one fails, the process ends without waiting for the others.
        name = f"replica-{device}"
        threading.Thread(target=guarded, args=(device,), name=name, daemon=True).start()
    results = []
    for _ in devices:
        result, error = ends.get()
        if error is not None:
            raise error
        results.append(result)
    return results
