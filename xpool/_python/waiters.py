"""Waits for another thread, in a thread or in a coroutine.

This stays correct if a signal handler raises at any moment.

Each waiter has its own lock: it puts the lock into a list and then checks the result again.  The
thread that completes the result first sets it ready and then releases the locks.  So one of the two
sees the other, and neither takes a shared lock that such a handler could leave locked.

A coroutine of asyncio, of a replacement such as uvloop, or of trio registers a `_Bell` instead of a
lock.  The thread that completes the result releases the bell.  The loop then wakes the coroutine,
which checks the result again.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Any

from xpool._python.import_hooks import waits
from xpool._python.interrupt import uninterrupted

LOST_SIGNAL = 1.0
"""Seconds after which a wait begins again.  Otherwise Ctrl-C could have no effect: a signal between
the interpreter's check for signals and the beginning of the wait does not end the wait."""


def deadline_of(timeout: float | None) -> float | None:
    """Return the time of `time.monotonic` at which a wait ends, or None for a wait without limit.

    Raises:
        TypeError: the timeout is not a number.
    """
    if timeout is None:
        return None
    try:
        return time.monotonic() + timeout
    except TypeError:
        raise TypeError(f"timeout must be a number of seconds or None, not {timeout!r}") from None


class Waiters(list[Any]):
    """The locks of the threads that wait for one result: see the module's docstring."""

    @waits
    def wait(self, there: Callable[[], bool], timeout: float | None) -> bool:
        """Wait, at most ``timeout`` seconds, until ``there()`` is true.  Return its last value.

        Raises:
            RuntimeError: the interpreter ends, and no other thread runs any more.
        """
        deadline, left = None if timeout is None else deadline_of(timeout), LOST_SIGNAL
        while True:
            if deadline is not None:
                left = min(deadline - time.monotonic(), LOST_SIGNAL)
            # Each turn needs a new lock, because the last one may be released late.
            lock = threading.Lock()
            lock.acquire()
            # Register before checking, so that a wake between the two is not lost.
            self.append(lock)
            try:
                if there():
                    return True
                if left <= 0:
                    return False
                if sys.is_finalizing():
                    raise RuntimeError("can't wait for another thread at interpreter shutdown")
                lock.acquire(True, left)
            finally:
                if self:  # else `wake` has removed the lock
                    self._remove(lock)
            if there():
                return True

    @contextlib.contextmanager
    def listening(self, bell: Any) -> Iterator[None]:
        """Make the next `wake` call ``bell.release()``, in the thread that calls `wake`."""
        self.append(bell)
        try:
            yield
        finally:
            self._remove(bell)

    def _remove(self, lock: Any) -> None:
        with contextlib.suppress(ValueError):  # `wake` has removed it
            self.remove(lock)

    def wake(self) -> None:
        # `copy` locks the list, even without the interpreter lock, so it sees the caller's store.
        while self.copy():
            try:
                self.pop().release()  # removed, so that a waiter is not woken twice
            except (IndexError, RuntimeError):
                continue  # another thread has woken it, or the event loop of a bell has ended


class Flag:
    """Like `threading.Event`, but signal handlers may raise in its methods at any moment."""

    __slots__ = ("_on", "_waiters")

    def __init__(self) -> None:
        self._on = False
        self._waiters = Waiters()

    def is_set(self) -> bool:
        return self._on

    def set(self) -> None:
        """Set the flag.  Nothing clears it."""
        # Set before waking, because woken waiters check it.
        self._on = True
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flag is set, at most ``timeout`` seconds if given.  Return `is_set`.

        When the interpreter ends, this does not wait: no other thread can set the flag.
        """
        return self._waiters.wait(self.is_set, 0.0 if sys.is_finalizing() else timeout)


class TaskQueue:
    """A queue for threads: the thread that has begun to wait last gets the next item.

    This thread's caches are warm.  With `queue.SimpleQueue` the threads take turns, so a caller
    that waits for each answer would wake another thread each time.

    Items of ``first`` are taken before those of ``last``, and each of these in the order of puts.
    Items of a priority above 0 are taken before all of these, and those below 0 after them.
    """

    def __init__(self) -> None:
        self.first: deque[Any] = deque()
        self.last: deque[Any] = deque()
        # Heaps of (negated priority, whether it is of the last ones, a number, item); the lock
        # guards both.  Threads look without it whether they are empty.
        self.higher: list[tuple[float, bool, int, Any]] = []
        self.lower: list[tuple[float, bool, int, Any]] = []
        self._lock, self._numbers = threading.RLock(), itertools.count()
        self._idle: list[Any] = []  # the locks of the waiting threads

    @uninterrupted
    def put(self, item: Any, last: bool = False) -> None:
        (self.last if last else self.first).append(item)
        self._wake_one()

    @uninterrupted
    def put_back(self, item: Any, last: bool = False) -> None:
        (self.last if last else self.first).appendleft(item)
        self._wake_one()

    @uninterrupted
    def put_ranked(self, item: Any, last: bool, priority: float, front: bool = False) -> None:
        """Put an item of a priority other than 0; ``front``: before the others of its priority."""
        with self._lock:
            number = next(self._numbers)
            entry = -priority, last, -number if front else number, item
            heappush(self.higher if priority > 0 else self.lower, entry)
        self._wake_one()

    def remove(self, item: Any) -> bool:
        """Take back an item that was put without a priority; False: a thread has taken it."""
        for queue in self.first, self.last:
            with contextlib.suppress(ValueError):
                queue.remove(item)
                return True
        return False

    def _wake_one(self) -> None:
        """Release the lock of the thread that has begun to wait last."""
        # The thread itself removes the lock from the list.  If a signal handler raised between a
        # `pop` and a `release` here, the thread would wait for ever.
        try:
            lock = self._idle[-1]
            if lock.locked():
                lock.release()
        except (IndexError, RuntimeError):
            return  # another thread has woken it

    def taker(self) -> Callable[[], Any]:
        """Return the function with which a thread waits for the next item, removes and returns it.

        Each thread needs its own.  The main thread must have none, because signal handlers run in
        it.
        """
        first, last, higher, lower = self.first, self.last, self.higher, self.lower
        idle, wake_one = self._idle, self._wake_one
        # Held by this thread, unless it was woken since.  Then it does not wait the next time.
        lock: Any = threading.Lock()
        lock.acquire()

        def take() -> Any:
            while True:
                try:
                    if higher or lower:
                        item = self.get_nowait()
                    elif first:
                        item = first.popleft()
                    elif last:
                        item = last.popleft()
                    else:
                        # This thread registers before it checks, and `put` appends the item before
                        # it looks for a waiter.  So `put` sees the waiter, or this thread the item.
                        idle.append(lock)
                        if not (first or last or higher or lower):
                            lock.acquire()
                        idle.remove(lock)
                        continue
                except IndexError:
                    continue  # another thread has taken the item
                # Several puts may have woken only this thread.
                if idle and (first or last or higher or lower):
                    wake_one()
                return item

        return take

    def get_nowait(self) -> Any:
        """Remove and return the next item.

        Raises:
            IndexError: the queue is empty.
        """
        if self.higher:
            with contextlib.suppress(IndexError):
                return self._pop(self.higher)
        for queue in self.first, self.last:
            with contextlib.suppress(IndexError):
                return queue.popleft()
        return self._pop(self.lower)

    def _pop(self, heap: list[tuple[float, bool, int, Any]]) -> Any:
        with self._lock:
            return heappop(heap)[-1]


# -- in a coroutine --------------------------------------------------------------------------------


class _Bell:
    """An event of a loop, and the loop's function with which other threads run code in the loop."""

    def __init__(self, call: Callable[[Callable[[], object]], object], event: Any) -> None:
        self._call, self.event = call, event

    def release(self) -> object:
        """Wake the coroutine, from any thread.  Raises `RuntimeError` if its loop has ended."""
        return self._call(self.event.set)


def _bell() -> _Bell:
    # The library whose loop runs is imported.
    asyncio, trio = sys.modules.get("asyncio"), sys.modules.get("trio")
    try:
        if asyncio is None:
            raise RuntimeError("no running event loop")
        return _Bell(asyncio.get_running_loop().call_soon_threadsafe, asyncio.Event())
    except RuntimeError:
        if trio is None:
            raise
        return _Bell(trio.lowlevel.current_trio_token().run_sync_soon, trio.Event())


async def _until(there: Callable[[], bool], results: Any) -> None:
    """Wait in the running event loop until ``there()`` is true, or cancel the results.

    Raises:
        RuntimeError: no loop of asyncio or trio runs in this thread.
        BaseException: the loop's own error, if it cancels the waiting task.
    """
    try:
        while not there():
            bell = _bell()
            with results._waiters.listening(bell):
                # Register before checking, so that a result between the two is not missed.
                if not there():
                    await bell.event.wait()
    except BaseException:
        results.cancel()
        raise


async def awaited(result: Any) -> Any:
    """Return the value of an `AsyncResult`, or raise its error.

    If the loop cancels the waiting task, this cancels the result.
    """
    await _until(result.ready, result)
    return result.get(0)  # a longer wait would block the whole loop


async def next_of(results: Any) -> Any:
    """Return the next value of an iterator of `imap`.

    If the loop cancels the waiting task, this cancels the iterator.
    """
    await _until(results._movable, results)
    try:
        return results.next(0)
    except StopIteration:
        raise StopAsyncIteration from None
