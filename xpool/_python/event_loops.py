"""Waits for results in an event loop: asyncio's, a replacement of it such as uvloop, or trio's.

A waiting coroutine lists a `_Bell` where a waiting thread lists a lock.  The thread that completes
the result releases it; the loop then wakes the coroutine, which checks the result again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from xpool._python.waiters import Waiters


class _Bell:
    """An event of a loop, and the function by which other threads have the loop call something."""

    def __init__(self, call: Callable[[Callable[[], object]], object], event: Any) -> None:
        self._call, self._event = call, event

    def release(self) -> object:
        """Wake the coroutine, from any thread; RuntimeError: its loop has ended."""
        return self._call(self._event.set)

    async def rung(self) -> None:
        """Wait for `release`."""
        await self._event.wait()


def _bell() -> _Bell:
    try:
        return _Bell(asyncio.get_running_loop().call_soon_threadsafe, asyncio.Event())
    except RuntimeError:
        # A program in trio's loop has imported trio.
        trio = sys.modules.get("trio")
        if trio is None:
            raise
        return _Bell(trio.lowlevel.current_trio_token().run_sync_soon, trio.Event())


async def _until(waiters: Waiters, there: Callable[[], bool]) -> None:
    """Wait in the running event loop until ``there()``.

    Raises:
        RuntimeError: no loop of asyncio or trio runs in this thread.
        BaseException: the loop's own error, when it cancels the waiting task.
    """
    while not there():
        bell = _bell()
        with waiters.listening(bell):
            # Register before checking, so that a result between the two is not missed.
            if not there():
                await bell.rung()


async def awaited(result: Any) -> Any:
    """Return the value of an `AsyncResult`, or raise its error.

    Cancels the result if the loop cancels the waiting task.
    """
    try:
        await _until(result._waiters, result.ready)
    except BaseException:
        # The waiting task was cancelled, or its loop ends.
        result.cancel()
        raise
    # 0: a wait would block the whole loop.
    return result.get(0)


async def next_of(results: Any) -> Any:
    """Return the next value of an iterator of `imap`; cancels it if the loop cancels the task."""
    try:
        await _until(results._waiters, results._movable)
    except BaseException:
        results.cancel()
        raise
    try:
        return results.next(0)
    except StopIteration:
        raise StopAsyncIteration from None
