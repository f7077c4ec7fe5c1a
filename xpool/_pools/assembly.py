"""Assembles a pool of processes: engine, packer, and the configurations of its workers.

`process` imports this when the pool is made, and the fork server has been started: while that
imports what a worker needs, the program imports the parent's side of it.
"""

from __future__ import annotations

from xpool._engine.answers import EngineOptions
from xpool._engine.engine import Engine
from xpool._engine.memory import MemoryLimits
from xpool._engine.relay import Relay
from xpool._engine.worker import Recipe
from xpool._pickling.policy import pools
from xpool._pools.all_workers import AllWorkers
from xpool._pools.engine_submitter import EngineSubmitter, HookedEngineSubmitter
from xpool._pools.packing import Packer, find_arena
from xpool._pools.worker_config import Main, WorkerConfig, WorkerSpec
from xpool._python import error_imports

__all__ = [
    "AllWorkers",
    "Engine",
    "EngineOptions",
    "EngineSubmitter",
    "HookedEngineSubmitter",
    "Main",
    "MemoryLimits",
    "WorkerConfig",
    "Packer",
    "Recipe",
    "Relay",
    "WorkerSpec",
    "find_arena",
    "pools",
]

error_imports.prepare(keep_path=False)
