"""The interface of `concurrent.futures` over a pool."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from xpool.errors import PoolClosed, TaskCancelled, TimeoutError
from xpool.options import check_count
from xpool.results import AsyncResult
from xpool.streams import IMapIterator

if TYPE_CHECKING:
    from xpool.pool.base import BasePool

__all__ = ["PoolExecutor"]

P = ParamSpec("P")
T = TypeVar("T")

_FINISHED = "cannot schedule new futures after shutdown"


class _Future(concurrent.futures.Future[T]):
    """A future that asks the pool what has become of its call."""

    # The call's result in the pool, while it is awaited.  Set by `submit`, once; cleared by
    # the thread that finishes the future, so that neither keeps the other alive.
    job: AsyncResult[Any] | None = None

    def cancel(self) -> bool:
        job = self.job
        if job is not None and not self.done():
            pool = job._pool
            # A future that runs is not cancelled; the pool's result would stop its task.
            if pool is None or pool._runs(job) or not job.cancel():
                return self.cancelled()
            self._end_cancelled()
        return super().cancel()

    def running(self) -> bool:
        job = self.job
        pool = None if job is None or self.done() else job._pool
        return pool is not None and job is not None and pool._runs(job)

    def succeed(self, value: T) -> None:
        self.job = None
        # False: it was cancelled meanwhile, and nobody wants the value.
        if self.set_running_or_notify_cancel():
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, TaskCancelled):
            self._end_cancelled()
        elif self.set_running_or_notify_cancel():
            self.job = None
            self.set_exception(error)

    def _end_cancelled(self) -> None:
        """Become cancelled, once, whoever comes first: who asked for it, or the pool's answer."""
        self.job = None
        if super().cancel():
            # Its lock, which may be taken again, is held for both: two that have seen that nobody
            # was told would both tell, and that raises (Lib/concurrent/futures/_base.py).
            with self._condition:
                if self._state != "CANCELLED_AND_NOTIFIED":
                    self.set_running_or_notify_cancel()


class PoolExecutor(concurrent.futures.Executor):
    """A `concurrent.futures.Executor` over a pool that is there: `BasePool.executor` makes it.

    What is true of the pool is true here: a worker that dies fails one future, with
    `WorkerDied`, and is replaced.  `shutdown` leaves the pool open.
    """

    _owned = False

    def __init__(self, pool: BasePool) -> None:
        self._pool = pool
        # Guards `_over`: no call is submitted once `shutdown` has looked at what is pending.
        # Again by the thread that has it: what is pickled may submit, and so may a signal handler.
        self._lock = threading.RLock()
        self._over = False
        # Unfinished futures.  Added and removed by single operations, which the interpreter
        # does not interrupt, so that finishing one takes no lock.
        self._pending: set[_Future[Any]] = set()
        _executors.add(self)
        _finish_at_exit()

    def __repr__(self) -> str:
        state = "shut down" if self._over else "open"
        return f"<{type(self).__name__} {state}, {len(self._pending)} pending, over {self._pool!r}>"

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Have ``fn(*args, **kwargs)`` called in a worker; return its future.

        `Future.cancel` succeeds as long as no worker runs the call; one that begins in that very
        moment is stopped.  Callbacks run in a thread of the pool.

        Raises:
            RuntimeError: the executor was shut down.
            concurrent.futures.BrokenExecutor: the pool has failed, or was closed.
        """
        future: _Future[T] = _Future()
        with self._lock:
            self._check_open()
            self._pending.add(future)
            try:
                future.job = self._pool.apply_async(
                    fn, args, kwargs, callback=future.succeed, error_callback=future.fail
                )
            except PoolClosed as error:
                self._pending.discard(future)
                raise concurrent.futures.BrokenExecutor(str(error)) from error
            except BaseException:
                self._pending.discard(future)
                raise
        if future.done():
            future.job = None  # it was answered before it was set
        future.add_done_callback(self._pending.discard)
        return future

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Return an iterator over ``fn(a, b, ...)`` for the items of ``iterables`` side by side.

        Args:
            fn: a function of as many arguments as there are iterables.
            iterables: drawn at once, or as the results are taken where ``buffersize`` is given.
            timeout: seconds from this call on after which `next` waits no more; None: no limit.
            chunksize: items that travel together.
            buffersize: at most so many items are drawn ahead of the results taken.

        Raises:
            concurrent.futures.TimeoutError: by `next`; a result is not there in time.
            Exception: by `next`, what ``fn`` raised; it ends the iteration.
            RuntimeError: the executor was shut down.
        """
        check_count("chunksize", chunksize)
        if buffersize is not None:
            check_count("buffersize", buffersize)
        deadline = None if timeout is None else time.monotonic() + timeout
        rows: Iterable[tuple[Any, ...]] = zip(*iterables, strict=False)
        if buffersize is None:
            # As the standard executors do: the input is drawn before this returns.
            rows = list(rows)
        with self._lock:
            self._check_open()
            try:
                results = self._pool.imap(
                    functools.partial(_apply_row, fn), rows, chunksize, buffersize=buffersize
                )
            except PoolClosed as error:
                raise concurrent.futures.BrokenExecutor(str(error)) from error
        return _results(results, deadline)

    def _check_open(self) -> None:
        if self._over:
            raise RuntimeError(_FINISHED)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and free the workers when the last is done.

        Args:
            wait: return when the pending futures have finished, and the workers have ended.
            cancel_futures: cancel the futures that no worker runs yet.
        """
        with self._lock:
            self._over = True
            pending = list(self._pending)
        if cancel_futures:
            for future in pending:
                future.cancel()
        if self._owned:
            self._pool.close()
            if wait:
                self._pool.join()
        elif wait:
            concurrent.futures.wait(pending)


def _apply_row(fn: Callable[..., T], row: tuple[Any, ...]) -> T:
    return fn(*row)


def _results(results: IMapIterator[Any], deadline: float | None) -> Iterator[Any]:
    """Hand out results; what is not taken is cancelled when the iterator is left."""
    try:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                one = [results.next(left)]
            except StopIteration:
                return
            except TimeoutError as error:
                raise concurrent.futures.TimeoutError(str(error)) from error
            yield one.pop()  # while this waits, it is the consumer's alone
    finally:
        results.cancel()


_executors: weakref.WeakSet[PoolExecutor] = weakref.WeakSet()


@functools.cache
def _finish_at_exit() -> None:
    # Now, when there is a pool: handlers run in the reverse order of their registration, and the
    # pools' own, which terminates them, is to run after this.
    atexit.register(_finish_all)


def _finish_all() -> None:
    """As `concurrent.futures` does, wait at the program's end for what was submitted."""
    for executor in list(_executors):
        executor.shutdown()
