"""Assembles a pool of processes: engine, packer, and the configurations of its workers.

`process` imports this when a pool is made, after it has started the fork server.  So the server
imports the modules of workers while the program imports its own.
"""

from __future__ import annotations

from xpool._engine.answers import EngineOptions as EngineOptions
from xpool._engine.answers import MemoryLimits
from xpool._engine.engine import Engine as Engine
from xpool._engine.relay import Relay as Relay
from xpool._engine.worker_process import Recipe as Recipe
from xpool._pickling.policy import pools as pools
from xpool._pools.all_workers import AllWorkers as AllWorkers
from xpool._pools.engine_submitter import EngineSubmitter as EngineSubmitter
from xpool._pools.packing import Packer as Packer
from xpool._pools.packing import find_arena as find_arena
from xpool._pools.pool_options import PoolOptions
from xpool._pools.worker_config import Main as Main
from xpool._pools.worker_config import WorkerConfig as WorkerConfig
from xpool._pools.worker_config import WorkerSpec as WorkerSpec
from xpool._python import error_imports

error_imports.prepare(keep_path=False)


def engine_options(options: PoolOptions, workers: int) -> EngineOptions:
    """Return the options of a pool that its engine has, or that of each host."""
    return EngineOptions(
        lifetime=options.maxtasksperchild,
        restart_budget=options.restart_budget or max(100, 4 * workers),
        initializer_timeout=options.initializer_timeout,
        memory=MemoryLimits(options.worker_memory, options.memory_high),
    )
