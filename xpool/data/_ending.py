"""The threads that end the pools of loaders."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from xpool._pools.base import BasePool

CLEANER = "xpool-DataLoader-cleaner"
"""The name of these threads."""


def end_later(pool: BasePool | None) -> Callable[[Iterable[Any]], None]:
    """Return a function that makes a waiting thread cancel the given results and end the pool.

    The garbage collector may call this function, in any thread and with any locks held.  So it only
    puts the results into a `SimpleQueue`, which never waits.
    """
    orders: queue.SimpleQueue[Iterable[Any]] = queue.SimpleQueue()

    def clean() -> None:
        for result in orders.get():  # waits as long as the epoch or the loader lives
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
    """Wait, at most ``seconds``, for the pools that the threads of `end_later` are ending."""
    until = time.monotonic() + seconds
    for thread in threading.enumerate():
        if getattr(thread, "is_ending", False):
            thread.join(max(0.0, until - time.monotonic()))
