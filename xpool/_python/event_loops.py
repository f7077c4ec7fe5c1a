"""Waiting for results in an event loop: asyncio's (and those that take its place), or trio's.

A waiting coroutine puts a `_Bell` where a waiting thread would put a lock.  Whoever completes the
result rings it, from whatever thread that is; the loop wakes the coroutine, which looks again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Protocol

from xpool._python.waiters import Waiters

__all__ = ["awaited", "next_of"]


class _Bell(Protocol):
    def release(self) -> object:
        """Ring, from any thread; RuntimeError: the loop has ended, so nobody listens."""

    async def rung(self) -> object:
        """Wait for it."""


class _AsyncioBell:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._event = loop, asyncio.Event()

    def release(self) -> object:
        # An asyncio event may be set in the loop's own thread only; trio's, below, likewise.
        return self._loop.call_soon_threadsafe(self._event.set)

    async def rung(self) -> object:
        return await self._event.wait()


class _TrioBell:
    def __init__(self, trio: Any) -> None:
        self._token, self._event = trio.lowlevel.current_trio_token(), trio.Event()

    def release(self) -> object:
        return self._token.run_sync_soon(self._event.set)

    async def rung(self) -> object:
        return await self._event.wait()


def _bell() -> _Bell:
    try:
        return _AsyncioBell(asyncio.get_running_loop())
    except RuntimeError:
        # Not asyncio's: a program in trio's loop has imported trio.
        trio = sys.modules.get("trio")
        if trio is None:
            raise
        return _TrioBell(trio)


async def _until(waiters: Waiters, there: Callable[[], bool]) -> None:
    """Wait in the running event loop until ``there()``.

    Raises:
        RuntimeError: there is no loop of asyncio or trio.
        BaseException: the loop's own, when the waiting task is cancelled.
    """
    while not there():
        bell = _bell()
        with waiters.listening(bell):
            # Listened for first and looked at then: what comes between the two rings.
            if not there():
                await bell.rung()


async def awaited(result: Any) -> Any:
    """Return the value of an `AsyncResult`, or raise its error; cancel it with the waiting task."""
    try:
        await _until(result._waiters, result.ready)
    except BaseException:
        # The waiting task is cancelled, or its loop ends: nobody wants the result any more.
        result.cancel()
        raise
    # Not to wait, whatever happens: this would hold up the whole loop.
    return result.get(0)


async def next_of(results: Any) -> Any:
    """Return the next value of an iterator of `imap`; cancel it with the waiting task."""
    try:
        await _until(results._waiters, results._movable)
    except BaseException:
        results.cancel()
        raise
    try:
        return results.next(0)
    except StopIteration:
        raise StopAsyncIteration from None
