"""`DataLoader`: torch's, over a pool of xpool's.  docs/data.md is the guide.

Names are resolved when they are first used: a worker imports what makes batches, and no pools.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpool.data.loader import DataLoader as DataLoader
    from xpool.data.report import LoaderReport as LoaderReport
    from xpool.data.workers import RETRIES as RETRIES

_homes = {"DataLoader": "loader", "LoaderReport": "report", "RETRIES": "workers"}

__all__ = [*_homes]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'xpool.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"xpool.data.{_homes[name]}"), name)
    # Python calls this function only for names that the module lacks.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
