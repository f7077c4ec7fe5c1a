"""Waiting for another thread, whole at any moment: signal handlers may raise in it.

Waiting is done on a lock of the waiter's own: it puts the lock in a list and looks again; whoever
completes the result sets it ready first and opens the locks then.  So one of the two sees the
other, and neither needs a lock that such a handler could leave locked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from xpool._python.interrupt import uninterrupted

__all__ = ["LOST_SIGNAL", "Flag", "TaskQueue", "Waiters", "deadline_of"]

LOST_SIGNAL = 1.0
"""Seconds after which a wait begins anew.  A signal that comes when the interpreter has looked for
signals, but does not wait yet, does not end the wait: without this, Ctrl-C could be lost."""


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
    """The threads that wait for one thing: their locks.  The module's text says why it is safe."""

    def wait(self, there: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `there()`, at most ``timeout`` seconds; return whether it is."""
        deadline = deadline_of(timeout)
        while not there():
            left = LOST_SIGNAL
            if deadline is not None:
                left = min(deadline - time.monotonic(), LOST_SIGNAL)
                if left <= 0:
                    return False
            # A lock for each turn: the one of the last turn may have been opened late.
            lock = threading.Lock()
            lock.acquire()
            # Listed first, looked at then; `wake` is called after the thing is there.
            self.append(lock)
            try:
                if not there():
                    lock.acquire(timeout=left)
            finally:
                self._remove(lock)
        return True

    @contextlib.contextmanager
    def listening(self, bell: Any) -> Iterator[None]:
        """Have the next `wake` call ``bell.release()``, from whatever thread that is."""
        self.append(bell)
        try:
            yield
        finally:
            self._remove(bell)

    def _remove(self, lock: Any) -> None:
        if self:  # whoever wakes takes it out
            with contextlib.suppress(ValueError):  # in this very moment
                self.remove(lock)

    def wake(self) -> None:
        """Let all who wait look again."""
        # A copy is made with the list locked, so after what the caller has stored, in any build.
        while self.copy():
            try:
                # Taken out: one that has not run yet is not woken by every further result.
                self.pop().release()
            except (IndexError, RuntimeError):
                continue  # another thread has woken it; the event loop of a bell has ended


class Flag:
    """As `threading.Event`, but whole at any moment: signal handlers may raise in its `wait`."""

    __slots__ = ("_on", "_waiters")

    def __init__(self) -> None:
        self._on = False
        self._waiters = Waiters()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._on

    def set(self) -> None:
        """Set it, for good."""
        # Before the wake, after which whoever waits looks here.
        self._on = True
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds (None: any time); False: it is not."""
        return self._waiters.wait(self.is_set, timeout)


class TaskQueue:
    """A queue for threads, of which the one that has waited least gets what comes.

    Its stack and caches are warm.  With `queue.SimpleQueue` all take turns: a caller who waits for
    each answer would wake another thread each time.

    ``first`` is taken before ``last``; each is in the order of its puts.
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
        """Put an item before all others of ``last``."""
        self.last.appendleft(item)
        self._wake_one()

    @uninterrupted
    def _wake_one(self) -> None:
        # A thread whose lock is taken out, but not opened, sleeps for good: so no signal handler
        # may raise here.
        try:
            self._idle.pop().release()
        except IndexError:
            return  # nobody waits

    def get(self) -> Any:
        """Take the next item; wait until there is one.  For threads that run no signal handlers."""
        first, last, idle = self.first, self.last, self._idle
        lock: Any = None
        while True:
            # Looked at by trying, since other threads take from them.
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
            # Listed first, looked at then; `put` does it the other way round, so one of the two
            # sees the other.
            idle.append(lock)
            if first or last:
                try:
                    idle.remove(lock)
                    continue
                except ValueError:
                    pass  # it is about to be released
            lock.acquire()

    def get_nowait(self) -> Any:
        """Take the next item.

        Raises:
            IndexError: there is none.
        """
        try:
            return self.first.popleft()
        except IndexError:
            return self.last.popleft()
