"""`LightFuture`: a future of `concurrent.futures` that is made and waited for in half of the time.

`Future` makes a `threading.Condition`, which takes most of its constructor, and whose ``with``
statements call functions of Python.  The condition of a `LightFuture` is itself a lock of C.
"""

from __future__ import annotations

import _thread
import concurrent.futures
from typing import Any, TypeVar

T = TypeVar("T")


class _Condition(_thread.RLock):  # type: ignore[misc]
    """What `concurrent.futures` uses of a `threading.Condition`.  ``waiting`` has the locks of the
    threads that wait; only the thread that holds the condition uses it."""

    __slots__ = ("waiting",)

    waiting: list[_thread.LockType]

    def wait(self, timeout: float | None = None) -> bool:
        """Release the condition until `notify_all` is called, at most ``timeout`` seconds; return
        whether it was called."""
        lock = _thread.allocate_lock()
        lock.acquire()
        self.waiting.append(lock)
        held, woken = self._release_save(), False  # type: ignore[attr-defined]
        try:
            woken = lock.acquire(True, -1 if timeout is None else max(timeout, 0))
        finally:
            self._acquire_restore(held)  # type: ignore[attr-defined]
            if not woken and lock in self.waiting:
                self.waiting.remove(lock)
        return woken

    def notify_all(self) -> None:
        while self.waiting:
            self.waiting.pop().release()


class LightFuture(concurrent.futures.Future[T]):
    # A Python whose futures have other fields makes them as usual.
    if vars(concurrent.futures.Future()).keys() == {
        "_condition", "_state", "_result", "_exception", "_waiters", "_done_callbacks"
    }:  # fmt: skip

        def __init__(self) -> None:
            condition: Any = _Condition()
            self._condition, condition.waiting = condition, []
            self._state = "PENDING"
            self._result = self._exception = None
            self._waiters: list[Any] = []
            self._done_callbacks: list[Any] = []
