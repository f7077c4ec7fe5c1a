"""Waits for results in an event loop of asyncio, of a replacement such as uvloop, or of trio.

A waiting coroutine registers a `_Bell` instead of a thread's lock.  The thread that completes the
result releases the bell.  The loop then wakes the coroutine, which checks the result again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from xpool._python.waiters import Waiters


class _Bell:
    """An event of a loop, and the loop's function with which other threads run code in the loop."""

    def __init__(self, call: Callable[[Callable[[], object]], object], event: Any) -> None:
        self._call, self._event = call, event

    def release(self) -> object:
        """Wake the coroutine, from any thread.  Raises `RuntimeError` if its loop has ended."""
        return self._call(self._event.set)

    async def rung(self) -> None:
        await self._event.wait()


def _bell() -> _Bell:
    try:
        return _Bell(asyncio.get_running_loop().call_soon_threadsafe, asyncio.Event())
    except RuntimeError:
        trio = sys.modules.get("trio")  # imported if trio's loop runs
        if trio is None:
            raise
        return _Bell(trio.lowlevel.current_trio_token().run_sync_soon, trio.Event())


async def _until(waiters: Waiters, there: Callable[[], bool]) -> None:
    """Wait in the running event loop until ``there()`` is true.

    Raises:
        RuntimeError: no loop of asyncio or trio runs in this thread.
        BaseException: the loop's own error, if it cancels the waiting task.
    """
    while not there():
        bell = _bell()
        with waiters.listening(bell):
            # Register before checking, so that a result between the two is not missed.
            if not there():
                await bell.rung()


async def awaited(result: Any) -> Any:
    """Return the value of an `AsyncResult`, or raise its error.

    If the loop cancels the waiting task, this cancels the result.
    """
    try:
        await _until(result._waiters, result.ready)
    except BaseException:
        result.cancel()
        raise
    return result.get(0)  # a longer wait would block the whole loop


async def next_of(results: Any) -> Any:
    """Return the next value of an iterator of `imap`.

    If the loop cancels the waiting task, this cancels the iterator.
    """
    try:
        await _until(results._waiters, results._movable)
    except BaseException:
        results.cancel()
        raise
    try:
        return results.next(0)
    except StopIteration:
        raise StopAsyncIteration from None
