"""The threads that end the pools of loaders."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from xpool._pools.base import BasePool

__all__ = ["CLEANER", "end_later", "wait_for_ends"]

CLEANER = "xpool-DataLoader-cleaner"
"""The name of these threads."""


def end_later(pool: BasePool | None) -> Callable[[Iterable[Any]], None]:
    """Return what cancels results and ends a pool, in a thread that waits for it to be called.

    The garbage collector may call it, in any thread and with any locks held: to put into such a
    queue is one operation that waits for nothing.
    """
    orders: queue.SimpleQueue[Iterable[Any]] = queue.SimpleQueue()

    def clean() -> None:
        # Waits here while the epoch, or the loader, lives.
        for result in orders.get():
            result.cancel()
        if pool is not None:
            pool.terminate()
            pool.join()

    thread = threading.Thread(target=clean, name=CLEANER, daemon=True)
    thread.start()

    def end(results: Iterable[Any]) -> None:
        thread.is_ending = True  # type: ignore[attr-defined]
        orders.put(results)

    return end


def wait_for_ends(seconds: float) -> None:
    """Wait until the pools that are being ended have no threads, at most ``seconds``."""
    until = time.monotonic() + seconds
    for thread in threading.enumerate():
        if getattr(thread, "is_ending", False):
            thread.join(max(0.0, until - time.monotonic()))
