"""Worker pools for PyTorch programs: as `multiprocessing.Pool`, but fast, robust and device-aware.

Names are resolved when they are first used, so ``import xpool`` imports neither torch nor dill.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("xpool needs Linux, or another POSIX system such as macOS; it has no Windows")

# Imported here: a child that another thread forks does not wait for imports that begin later.
from xpool._python import import_hooks as _import_hooks  # noqa: F401

__version__ = "0.1.0"

if TYPE_CHECKING:
    from xpool._calls.results import AsyncResult as AsyncResult
    from xpool._calls.results import MapResult as MapResult
    from xpool._calls.streams import IMapIterator as IMapIterator
    from xpool._calls.streams import IMapUnorderedIterator as IMapUnorderedIterator
    from xpool._engine.jobs.states import PoolStates as PoolStates
    from xpool._engine.ledger import WorkerEnd as WorkerEnd
    from xpool._pickling.by_value.script_top import everywhere as everywhere
    from xpool._pickling.tensors.device_memory import TensorHandle as TensorHandle
    from xpool._pools.base import BasePool as BasePool
    from xpool._pools.ctx_pools import CtxPool as CtxPool
    from xpool._pools.ctx_pools import CtxThreadPool as CtxThreadPool
    from xpool._pools.executor import Executor as Executor
    from xpool._pools.observing import Report as Report
    from xpool._pools.observing import SlowTask as SlowTask
    from xpool._pools.observing import Stacks as Stacks
    from xpool._pools.observing import WorkerReport as WorkerReport
    from xpool._pools.observing import WorkerStack as WorkerStack
    from xpool._pools.preloading import preload as preload
    from xpool._pools.process import P2PPool as P2PPool
    from xpool._pools.process import Pool as Pool
    from xpool._pools.shared_data import SharedDict as SharedDict
    from xpool._pools.shared_data import SharedList as SharedList
    from xpool._pools.spawn import ProcessContext as ProcessContext
    from xpool._pools.spawn import spawn as spawn
    from xpool._pools.spawn import start_processes as start_processes
    from xpool._pools.thread import ThreadPool as ThreadPool
    from xpool._worker.worker_context import current_worker as current_worker

    # isort: off
    from xpool.errors import (
        DeviceError as DeviceError,
        InternalError as InternalError,
        OptionError as OptionError,
        PeerLost as PeerLost,
        PoolBroken as PoolBroken,
        PoolClosed as PoolClosed,
        RemoteTraceback as RemoteTraceback,
        ResultNotPicklable as ResultNotPicklable,
        TaskCancelled as TaskCancelled,
        TaskNotPicklable as TaskNotPicklable,
        TaskStopped as TaskStopped,
        TaskTimeout as TaskTimeout,
        TensorLost as TensorLost,
        TimeoutError as TimeoutError,
        WorkerDied as WorkerDied,
        WorkerStartFailed as WorkerStartFailed,
        XPoolError as XPoolError,
    )

_homes = {
    "xpool.errors": (
        "DeviceError InternalError OptionError PeerLost PoolBroken PoolClosed RemoteTraceback "
        "ResultNotPicklable TaskCancelled TaskNotPicklable TaskStopped TaskTimeout TensorLost "
        "TimeoutError WorkerDied WorkerStartFailed XPoolError"
    ),
    "xpool._engine.jobs.states": "PoolStates",
    "xpool._engine.ledger": "WorkerEnd",
    "xpool._pools.shared_data": "SharedDict SharedList",
    "xpool._pickling.tensors.device_memory": "TensorHandle",
    "xpool._pools.base": "BasePool",
    "xpool._pools.ctx_pools": "CtxPool CtxThreadPool",
    "xpool._pickling.by_value.script_top": "everywhere",
    "xpool._pools.executor": "Executor",
    "xpool._pools.observing": "Report SlowTask Stacks WorkerReport WorkerStack",
    "xpool._pools.preloading": "preload",
    "xpool._pools.process": "P2PPool Pool",
    "xpool._pools.spawn": "ProcessContext spawn start_processes",
    "xpool._pools.thread": "ThreadPool",
    "xpool._calls.results": "AsyncResult MapResult",
    "xpool._calls.streams": "IMapIterator IMapUnorderedIterator",
    "xpool._worker.worker_context": "current_worker",
}
_where = {name: module for module, names in _homes.items() for name in names.split()}

__all__ = [*_where, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _where:
        from xpool._python.uncollected import uncollected

        with uncollected():
            value = getattr(importlib.import_module(_where[name]), name)
        globals()[name] = value  # Python then no longer calls `__getattr__` for this name
        return value
    try:
        # The name may be a module of the package that the program has not imported.
        return importlib.import_module(f"xpool.{name}")
    except ModuleNotFoundError as exc:
        # The module exists, but a module that it imports is missing.
        if exc.name != f"xpool.{name}":
            raise
    # With ``name`` and ``obj``, the traceback suggests the right attribute.
    here = sys.modules[__name__]
    raise AttributeError(f"module 'xpool' has no attribute {name!r}", name=name, obj=here)


def __dir__() -> list[str]:
    return sorted(__all__)
