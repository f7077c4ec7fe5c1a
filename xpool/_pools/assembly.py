"""Assembles a pool of processes: engine, packer, and the configurations of its workers.

`process` imports this when a pool is made, after it has started the fork server.  So the server
imports the modules of workers while the program imports its own.
"""

# No `from __future__ import annotations`: a NamedTuple would compile each type from its text.

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from xpool._engine.answers import EngineOptions as EngineOptions
from xpool._engine.engine import Engine as Engine
from xpool._engine.launch import Launcher
from xpool._engine.memory import MemoryLimits
from xpool._engine.relay import Relay as Relay
from xpool._engine.worker_process import Recipe as Recipe
from xpool._memory.arena import Arena
from xpool._pickling.by_value import settings
from xpool._pickling.by_value.settings_rows import Folder, arguments
from xpool._pickling.frame import inline
from xpool._pickling.frame import pools as pools
from xpool._pools.all_workers import AllWorkers as AllWorkers
from xpool._pools.engine_submitter import EngineSubmitter as EngineSubmitter
from xpool._pools.engine_submitter import Packer as Packer
from xpool._pools.engine_submitter import find_arena as find_arena
from xpool._pools.pool_options import PoolOptions
from xpool._python import failures
from xpool._python.import_hooks import search_path
from xpool._python.starting import is_frozen


class WorkerSpec(NamedTuple):
    """The part of the configuration that all workers share; agents on other hosts get it, too.

    ``contexts``: the context of each worker, pickled.  ``binds`` and ``cpus``: the environment
    variables and the cores of each context.  ``options``: those of the pool that workers get.
    """

    pool: str
    initializer: bytes | None
    contexts: list[bytes] | None
    binds: list[dict[str, str | None]]
    cpus: list[tuple[int, ...]]
    options: dict[str, Any]
    seed: bytes
    token: str
    peers: int
    threads: int


class Main(NamedTuple):
    """What workers know of the program from their start."""

    package: str | None  # for relative imports in functions of `__main__`
    argv: list[str]

    @classmethod
    def now(cls) -> "Main":
        """Return the description of this program now."""
        package = getattr(sys.modules.get("__main__"), "__package__", None)
        return cls(package, list(arguments(getattr(sys, "argv", None))))


def worker_config(
    spec: WorkerSpec,
    launcher: Launcher,
    arena: Arena | None,
    limit: int,
    main: Callable[[], Main] = Main.now,
    first: int = 0,
    host: str = "",
) -> Callable[[int, int, int | None], bytes]:
    """Return a function that makes the first message to each worker.

    ``main`` returns the description of the program when a worker starts; in an agent, the driver's.
    ``first``: the pool's index of the first worker on the host named ``host``.
    """

    def config(index: int, generation: int, attachment: int | None) -> bytes:
        program, process = main(), multiprocessing.current_process()
        index += first
        bound = spec.cpus[index] if spec.cpus else ()
        message = {
            **spec.options,
            "index": index,
            "host": host,
            "pool": spec.pool,
            "name": f"{spec.pool}-worker-{index}",
            "environ": _environment(),
            # Workers that `resize` has added have no context.
            "bind": spec.binds[index] if index < len(spec.binds) else {},
            "cpus": bound or _own_cpus(),
            "cwd": Folder().value(None),  # None: it was removed or is not known
            # Workers of a frozen program may be another Python, with a path of its own.
            "path": None if is_frozen() else search_path(sys.path),
            "argv": program.argv,
            "settings": settings.at_start(),
            "package": program.package,
            "parent": (process.name, os.getpid()),
            "authkey": bytes(process.authkey),
            # Includes the generation, so that a replacement draws other random numbers.
            "seed": spec.seed + f"/{index}/{generation}".encode(),
            "threads": min(spec.threads, len(bound) or spec.threads),
            "forked": launcher.forks,
            "initializer": _plain(spec.initializer, attachment),
            "arena": None if arena is None else arena.facts(attachment or 0, limit),
            "token": spec.token,
            "peers": spec.peers,
            "context": None if spec.contexts is None else _plain(spec.contexts[index], attachment),
        }
        return pickle.dumps(message)

    return config


def _plain(message: bytes | None, attachment: int | None) -> bytes | None:
    """Return a message as bytes; the blocks that it names stay held by the message object here.

    For a worker without an attachment to the arena, the content of the blocks is included.
    """
    if message is None:
        return None
    return bytes(inline(message) if attachment is None else message)


def _environment() -> dict[str, str]:
    """Return the present environment variables, which other threads may be changing."""
    found = ((name, os.environ.get(name)) for name in list(os.environ))
    return {name: value for name, value in found if value is not None}


def _own_cpus() -> tuple[int, ...]:
    """Return the cores of this process now; a fork server's children have those of its start."""
    # Ask for the main thread: the engine's thread has the cores from when the pool was made.
    return tuple(os.sched_getaffinity(os.getpid())) if sys.platform == "linux" else ()


failures.prepare(keep_path=False)


def engine_options(options: PoolOptions, workers: int) -> EngineOptions:
    """Return the options of a pool that its engine has, or that of each host."""
    return EngineOptions(
        lifetime=options.maxtasksperchild,
        restart_budget=options.restart_budget or max(100, 4 * workers),
        initializer_timeout=options.initializer_timeout,
        memory=MemoryLimits(options.worker_memory, options.memory_high),
    )
