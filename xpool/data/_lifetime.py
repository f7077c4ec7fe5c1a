"""Starts a loader's own worker processes, forks of the program or of the fork server, and ends its
pools in threads."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import queue
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from xpool import pickle
from xpool._engine.launch import (
    ForkServer,
    Handle,
    ProcessLauncher,
    import_for_arrays,
    wanted_modules,
)
from xpool._pools.base import BasePool
from xpool._pools.preloading import preload
from xpool.devices._frameworks import running_runtime

_NEEDED = (
    "multiprocessing.popen_fork", "xpool._pools.assembly", "xpool._worker.loop",
    "xpool.data._loader_worker",
)  # fmt: skip
"""Modules that a pool and its forked workers need."""

ENDING_SECONDS = 30.0
"""How long a new epoch waits until the workers of the last one have ended.  The program then has
one thread again and may fork.

Workers end at once, but the replacement of a dead one may still wait until the fork server has
imported torch.  New workers of that server would wait for this, too.
"""


def prepare(context: Any) -> None:
    """Import the modules that workers with this ``multiprocessing_context`` need.

    The fork server, which imports torch while the program makes its model, takes as much memory as
    the program.  So it is started only if the workers will most likely not be forks.
    """
    if context == "forkserver" or (context is None and not _will_fork()):
        preload()
    # With the objects of torch, a garbage collection would take 150 ms.
    collects = gc.isenabled()
    gc.disable()
    try:
        import_for_arrays()
        for name in _NEEDED:
            importlib.import_module(name)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # `generators` seeds it and reads its state
        # This call fills caches.  Forks inherit them.
        pickle.loads(pickle.dumps(torch.empty(1)))
    finally:
        if collects:
            gc.enable()


def find_context(context: Any, size: int) -> Any:
    """Return the ``context=`` of a pool of ``size`` workers that starts now."""
    # This must not depend on whether the fork server is ready: forks have the values that the
    # program has assigned to globals of its modules, but workers of the server do not.
    if context is None and sys.platform == "linux":
        wait_for_ends(ENDING_SECONDS)
        if _may_fork():
            return _ForkedFirst(ForkServer.get(wanted_modules()), size)
    return context


def _will_fork() -> bool:
    """Whether this program may fork now, and cannot start a device before its workers start."""
    has_device = any(getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    return sys.platform == "linux" and not has_device and _may_fork()


def _may_fork() -> bool:
    """Whether torch's loader would fork this program, and no other thread can hold a lock then."""
    method = multiprocessing.get_start_method(allow_none=True)
    if (method or multiprocessing.get_all_start_methods()[0]) != "fork":
        return False
    if multiprocessing.current_process().daemon or running_runtime() is not None:
        return False
    # `_current_frames` also has threads of C code that run Python.  Cleaners hold no lock.
    cleaners = {thread.ident for thread in threading.enumerate() if thread.name == CLEANER}
    return sys._current_frames().keys() - cleaners == {threading.get_ident()}


class _ForkedFirst:
    """Forks the program for a pool's first workers; the fork server starts their replacements.

    Forks begin at once.  But when a worker dies, the program has threads and may have started a
    device, so it cannot be forked safely any more.
    """

    inherits = False

    def __init__(self, server: ForkServer, size: int) -> None:
        self._server, self._left = server, size
        self._forking = ProcessLauncher(multiprocessing.get_context("fork"))

    @property
    def forks(self) -> bool:
        """Whether the next worker is a fork of the program."""
        return self._left > 0

    @property
    def bare(self) -> bool:
        """Whether the next worker must be set up as a process of `multiprocessing`."""
        return not self.forks

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Handle:
        if not self.forks:
            return self._server.launch(boot, name, daemon, inherited)
        with warnings.catch_warnings():
            # From 3.12 on, Python warns because OpenMP has threads.  The workers do not use them.
            warnings.simplefilter("ignore", DeprecationWarning)
            handle = self._forking.launch(boot, name, daemon, inherited)
        self._left -= 1
        return handle


CLEANER = "xpool-DataLoader-cleaner"
"""The name of these threads."""


def end_later(pool: BasePool | None) -> Callable[[Iterable[Any]], None]:
    """Return a function that makes a waiting thread cancel the given results and end the pool.

    The garbage collector may call this function, in any thread and with any locks held.  So it only
    puts the results into a `SimpleQueue`, which never waits.
    """
    orders: queue.SimpleQueue[Iterable[Any]] = queue.SimpleQueue()

    def clean() -> None:
        for result in orders.get():  # waits as long as the epoch or the loader lives
            result.cancel()
        if pool is not None:
            pool.terminate()
            pool.join()

    thread = threading.Thread(target=clean, name=CLEANER, daemon=True)
    thread.start()

    def end(results: Iterable[Any]) -> None:
        thread.is_ending = True  # type: ignore[attr-defined]
        orders.put(results)

    return end


def wait_for_ends(seconds: float) -> None:
    """Wait, at most ``seconds``, for the pools that the threads of `end_later` are ending."""
    until = time.monotonic() + seconds
    for thread in threading.enumerate():
        if getattr(thread, "is_ending", False):
            thread.join(max(0.0, until - time.monotonic()))
