"""`DataLoader`: torch's loader, with a pool of xpool as its workers.  The guide is docs/data.md.

Names are resolved when they are first used, so that a worker imports no pools.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpool.data._loader import DataLoader as DataLoader
    from xpool.data._report import LoaderReport as LoaderReport
    from xpool.data._workers import RETRIES as RETRIES

_homes = {"DataLoader": "_loader", "LoaderReport": "_report", "RETRIES": "_workers"}

__all__ = [*_homes]


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'xpool.data' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"xpool.data.{_homes[name]}"), name)
    globals()[name] = value  # Python then no longer calls `__getattr__` for this name
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
