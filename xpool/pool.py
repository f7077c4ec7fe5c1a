"""The pools, in a module with the name that `multiprocessing` and machin use for it."""

from __future__ import annotations

from xpool._pools.base import BasePool
from xpool._pools.ctx_pools import CtxPool, CtxThreadPool
from xpool._pools.process import P2PPool, Pool
from xpool._pools.thread import ThreadPool

__all__ = ["BasePool", "CtxPool", "CtxThreadPool", "P2PPool", "Pool", "ThreadPool"]
