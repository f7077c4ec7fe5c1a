"""`SimpleQueue`, which is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpool.queue.simple import SimpleQueue as SimpleQueue

__all__ = ["SimpleQueue"]


def __getattr__(name: str) -> Any:
    if name == "SimpleQueue":
        from xpool.queue.simple import SimpleQueue

        globals()[name] = SimpleQueue
        return SimpleQueue
    raise AttributeError(f"module 'xpool.queue' has no attribute {name!r}")
