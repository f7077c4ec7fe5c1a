"""Waits for another thread, in a way that stays correct if a signal handler raises at any moment.

Each waiter has a lock of its own: it puts the lock in a list and checks the result again.  The
thread that completes the result first sets it ready, then releases the locks.  So one of the two
sees the other, and neither takes a shared lock that such a handler could leave locked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from xpool._python.interrupt import uninterrupted

LOST_SIGNAL = 1.0
"""Seconds after which a wait begins anew.  A signal that arrives after the interpreter has looked
for signals, but before it waits, does not end the wait: Ctrl-C would have no effect."""


def deadline_of(timeout: float | None) -> float | None:
    """Return the time of `time.monotonic` at which a wait ends; None: it has no end.

    Raises:
        TypeError: the timeout is no number.
    """
    if timeout is None:
        return None
    try:
        return time.monotonic() + timeout
    except TypeError:
        raise TypeError(f"timeout must be a number of seconds or None, not {timeout!r}") from None


class Waiters(list[Any]):
    """The locks of the threads that wait for one thing; the module's docstring has the protocol."""

    def wait(self, there: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``there()``, at most ``timeout`` seconds; return its last value."""
        deadline = deadline_of(timeout)
        while not there():
            left = LOST_SIGNAL
            if deadline is not None:
                left = min(deadline - time.monotonic(), LOST_SIGNAL)
                if left <= 0:
                    return False
            # A new lock for each turn: the last one may have been released late.
            lock = threading.Lock()
            lock.acquire()
            # Register before checking, so that a wake between the two is not lost.
            self.append(lock)
            try:
                if not there():
                    lock.acquire(timeout=left)
            finally:
                self._remove(lock)
        return True

    @contextlib.contextmanager
    def listening(self, bell: Any) -> Iterator[None]:
        """Let the next `wake` call ``bell.release()``, in the thread that calls `wake`."""
        self.append(bell)
        try:
            yield
        finally:
            self._remove(bell)

    def _remove(self, lock: Any) -> None:
        if self:  # `wake` has removed it otherwise
            with contextlib.suppress(ValueError):  # `wake` removes it just now
                self.remove(lock)

    def wake(self) -> None:
        """Let all waiters check again."""
        # `copy` locks the list also without the interpreter lock, which orders it after the
        # caller's store.
        while self.copy():
            try:
                # Removed, so that a waiter that has not run yet is not woken again.
                self.pop().release()
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
        """Set the flag; it is never cleared."""
        # Set before waking: woken waiters check it.
        self._on = True
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds (None: no limit); return `is_set`."""
        return self._waiters.wait(self.is_set, timeout)


class TaskQueue:
    """A queue for threads: the thread that has waited shortest gets the next item.

    Its caches are warm.  With `queue.SimpleQueue` the threads take turns: a caller that waits for
    each answer would wake another thread each time.

    Items of ``first`` are taken before those of ``last``; each is in the order of its puts.
    """

    def __init__(self) -> None:
        self.first: deque[Any] = deque()
        self.last: deque[Any] = deque()
        self._idle: list[Any] = []  # locks of the threads that wait

    @uninterrupted
    def put(self, item: Any, last: bool = False) -> None:
        """Append an item to ``first`` or ``last``."""
        (self.last if last else self.first).append(item)
        self._wake_one()

    @uninterrupted
    def put_back(self, item: Any) -> None:
        self.last.appendleft(item)
        self._wake_one()

    @uninterrupted
    def _wake_one(self) -> None:
        # No signal handler may raise between the two calls: a thread whose lock is removed, but not
        # released, waits for ever.
        try:
            self._idle.pop().release()
        except IndexError:
            return  # no thread waits

    def get(self) -> Any:
        """Remove and return the next item; wait for one.  For threads without signal handlers."""
        first, last, idle = self.first, self.last, self._idle
        lock: Any = None
        while True:
            # No check before: another thread may take the item between check and take.
            try:
                return first.popleft()
            except IndexError:
                try:
                    return last.popleft()
                except IndexError:
                    pass
            if lock is None:
                lock = threading.Lock()
                lock.acquire()
            # Register before checking; `put` appends before it looks for a waiter.  So one of the
            # two sees the other.
            idle.append(lock)
            if first or last:
                try:
                    idle.remove(lock)
                    continue
                except ValueError:
                    pass  # `put` has removed the lock and releases it
            lock.acquire()

    def get_nowait(self) -> Any:
        """Remove and return the next item.

        Raises:
            IndexError: the queue is empty.
        """
        try:
            return self.first.popleft()
        except IndexError:
            return self.last.popleft()
