"""What a pool of processes is put together from: its engine, its packer, and the workers' orders.

`process` imports this when the pool is made, and the fork server has been started: while that
imports what a worker needs, the program imports the parent's side of it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from typing import TYPE_CHECKING

import xpool.pool_errors  # noqa: F401 - when a task has failed, no descriptor may be left for it
from xpool.byvalue.main import main_is_importable, main_location, units
from xpool.codec.frame import inline
from xpool.codec.policy import pools
from xpool.engine.loop import Engine
from xpool.engine.replacement import Recipe
from xpool.options import default_processes
from xpool.pool.packing import Packer, find_arena
from xpool.pool.sight import Sight
from xpool.tensors import cuda_ipc
from xpool.workers.launch import Launcher, search_path
from xpool.workers.relay import Relay, levels

if TYPE_CHECKING:
    from xpool.pool.process import Pool

__all__ = [
    "Engine",
    "Orders",
    "Packer",
    "Recipe",
    "Relay",
    "Sight",
    "find_arena",
    "cuda_ipc",
    "pools",
]


class Orders:
    """Makes the first message to each worker: what it is to be."""

    def __init__(self, pool: Pool, launcher: Launcher, initializer: bytes | None) -> None:
        contexts = pool._worker_contexts()
        self._contexts: list[bytes] | None = None
        if contexts is not None:
            self._contexts = [
                pool._packer.pack_option(f"worker_contexts[{i}]", c) for i, c in enumerate(contexts)
            ]
        every = contexts or [None] * pool._size
        self.binds = [dict(getattr(context, "env", None) or {}) for context in every]
        self._cpus = [tuple(getattr(c, "cpus", None) or ()) for c in contexts or ()]
        self._initializer = initializer
        self._bare = launcher.bare
        self._pool = pool.name
        self._daemon = pool._daemon
        self._recurse = pool._recurse
        self._seed = pool._seed
        self._arena = pool._arena
        self._limit = pool._memory_limit
        self._copy_tensor = pool._copy_tensor
        self._share_method = pool._share_method
        self._token = pool._token
        self._peers = pool._size if pool._has_peers else 0
        self._forked = launcher.forks
        self._output = pool._output
        self._threads = max(1, default_processes() // pool._size)

    def __call__(self, index: int, generation: int, attachment: int | None) -> bytes:
        arena = self._arena
        process = multiprocessing.current_process()
        orders = {
            "index": index,
            "pool": self._pool,
            "name": f"{self._pool}-worker-{index}",
            "environ": _environment(),
            # Those that came by `resize` have no context.
            "bind": self.binds[index] if index < len(self.binds) else {},
            "cpus": (self._cpus[index] if self._cpus else ()) or _own_cpus(),
            "cwd": _folder(),
            "pid": os.getpid(),
            "path": search_path(),
            "argv": _arguments(),
            "bare": self._bare,
            "main": main_location() if main_is_importable() else None,
            "units": units(),
            "daemon": self._daemon,
            "parent": (process.name, os.getpid()),
            "authkey": bytes(process.authkey),
            "recurse": self._recurse,
            "seed": self._seed + f"/{index}/{generation}".encode(),
            "threads": self._threads,
            "forked": self._forked,
            "initializer": _plain(self._initializer, attachment),
            "arena": None if arena is None else arena.facts(attachment or 0, self._limit),
            "copy_tensor": self._copy_tensor,
            "share_method": self._share_method,
            "token": self._token,
            "peers": self._peers,
            "levels": levels(),
            "output": self._output,
            "context": None
            if self._contexts is None
            else _plain(self._contexts[index], attachment),
        }
        return pickle.dumps(orders)


def _plain(message: bytes | None, attachment: int | None) -> bytes | None:
    """Return the bytes of a message alone: the blocks that it names are held here, by itself.

    A worker without an attachment in the arena gets all of it.
    """
    if message is None:
        return None
    return bytes(inline(message) if attachment is None else message)


def _environment() -> dict[str, str]:
    """The variables of now; other threads may change them meanwhile."""
    found = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in found if value is not None}


def _folder() -> str | None:
    """The folder that this process is in; None: it was removed, or cannot be known."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _arguments() -> list[str]:
    """The program's arguments; for one that is neither text nor a path, the name of its type."""
    argv = getattr(sys, "argv", None)
    return [
        str(one) if isinstance(one, (str, os.PathLike)) else f"<{type(one).__name__}>"
        for one in (argv if isinstance(argv, (list, tuple)) else ())
    ]


def _own_cpus() -> tuple[int, ...]:
    """The cores of this process now: a fork server's children have those of when it started."""
    # Asked of the main thread; that of the engine has what it had when the pool was made.
    return tuple(os.sched_getaffinity(os.getpid())) if sys.platform == "linux" else ()
