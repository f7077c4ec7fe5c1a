"""How a loader's own worker processes start: forked from the program, or from the fork server."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import socket
import sys
import threading
import warnings
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
from xpool._pickling.by_value.main import main_is_importable
from xpool._pools.preloading import preload
from xpool.data.ending import CLEANER, wait_for_ends
from xpool.devices.frameworks import running_runtime

_NEEDED = (
    "multiprocessing.popen_fork", "xpool._pools.assembly", "xpool._worker.launch_shared",
    "xpool._worker.loop", "xpool.data.calls",
)  # fmt: skip
"""Modules that a pool and its forked workers need."""

ENDING_SECONDS = 30.0
"""How long a new epoch waits for the end of the last one's workers, to fork from one thread.

They end at once, but a worker in place of a dead one may still wait for the server's import of
torch.  Workers of that server would wait for it as well.
"""


def prepare(context: Any) -> None:
    """Start and import what workers with this ``multiprocessing_context`` will need.

    The fork server imports torch while the program makes its model.  It takes as much memory as the
    program, so it is not started here where the workers will most likely be forks.
    """
    if context == "forkserver" or (context is None and not _will_fork()):
        preload()
    # A garbage collection would take 150 ms with the objects of torch.
    collects = gc.isenabled()
    gc.disable()
    try:
        import_for_arrays()
        for name in _NEEDED:
            importlib.import_module(name)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # its state is asked for, and it is seeded
        # What is learned of torch and of the script takes 30 ms, and forks inherit it.
        pickle.loads(pickle.dumps(torch.empty(1)))
        main_is_importable()
    finally:
        if collects:
            gc.enable()


def find_context(context: Any, size: int) -> Any:
    """Return the ``context=`` of a pool of ``size`` workers that starts now."""
    # Whether there is a server, and is ready, must not decide: forks have the values that the
    # program has given to globals of its modules, and workers of the server have not.
    if context is None and sys.platform == "linux":
        wait_for_ends(ENDING_SECONDS)
        if _may_fork():
            return _ForkedFirst(ForkServer.get(wanted_modules()), size)
    return context


def _will_fork() -> bool:
    """Whether this program may fork now, and has a torch that starts no device until then."""
    has_device = any(getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    return sys.platform == "linux" and not has_device and _may_fork()


def _may_fork() -> bool:
    """Whether torch's loader would fork this program, and no thread of it can hold a lock then."""
    method = multiprocessing.get_start_method(allow_none=True)
    if (method or multiprocessing.get_all_start_methods()[0]) != "fork":
        return False
    if multiprocessing.current_process().daemon or running_runtime() is not None:
        return False
    # Threads of C code that run Python have frames, too.  Cleaners wait and hold no lock.
    cleaners = {thread.ident for thread in threading.enumerate() if thread.name == CLEANER}
    return sys._current_frames().keys() - cleaners == {threading.get_ident()}


class _ForkedFirst:
    """Forks the program for a pool's first workers, and starts their replacements by a server.

    Forks begin at once.  When one dies, the program has threads and may have started a device, so
    it cannot be forked safely.
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
        """Whether the next worker must be made a process of `multiprocessing`."""
        return not self.forks

    def launch(self, boot: socket.socket, name: str, daemon: bool, inherited: Any) -> Handle:
        if not self.forks:
            return self._server.launch(boot, name, daemon, inherited)
        with warnings.catch_warnings():
            # Python 3.12 and later warn of OpenMP's threads.  Workers compute in one thread.
            warnings.simplefilter("ignore", DeprecationWarning)
            handle = self._forking.launch(boot, name, daemon, inherited)
        self._left -= 1
        return handle
