"""The interface of `concurrent.futures` over a pool."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from xpool._calls.options import OneCallOptions, check_count, label
from xpool._calls.results import AsyncResult, PickledResult, about_to_block, local
from xpool._calls.streams import IMapIterator
from xpool._engine.jobs.states import PoolStates
from xpool._pools.job_table import JobTable
from xpool._pools.verbs import PLAIN, PublicVerbs, options_of
from xpool._python import at_fork
from xpool._python.interrupt import shielded
from xpool._python.waiters import deadline_of
from xpool.errors import PoolClosed, TaskCancelled, TimeoutError

P = ParamSpec("P")
T = TypeVar("T")

_FINISHED = "cannot schedule new futures after shutdown"


class _Call(AsyncResult[Any]):
    """A call in the pool that completes a future."""

    has_callback = True
    is_future = True
    _pool_ended = False

    def __init__(self, pool: PublicVerbs, name: str, future: _Future[Any]) -> None:
        super().__init__(next(pool._jobs.numbers), name, pool)
        self._future: _Future[Any] | None = future

    def fail(self, exc: BaseException | PickledResult) -> None:
        pool = self._pool
        self._pool_ended = pool is not None and pool._life.state is PoolStates.TERMINATE
        super().fail(exc)

    def call_back(self) -> None:
        future, self._future = self._future, None
        if future is None:
            return
        error: BaseException | None
        try:
            if not self._opened:
                self._open()
            error = None if self._success else self._value
        except BaseException as exc:  # unpickling may raise anything, for example `SystemExit`
            error = exc
        if error is None:
            future._end(future.set_result, self._value)
        elif isinstance(error, TaskCancelled):
            future._end_cancelled()
        else:
            error = _as_broken(error) if self._pool_ended else error
            future._end(future.set_exception, error)

    def open_plain(self) -> bool:
        """Unpickle the value if no code of the program takes part; return whether this was done."""
        value = self._value
        opened = value.open_plain() if self._success and isinstance(value, PickledResult) else None
        if opened is None:
            return False
        self._value, self._opened = opened.pop(), True
        return True

    def release(self) -> None:
        super().release()
        # This is only for a forked child, which has no thread to complete the future.
        future = self._future
        if future is not None:
            future._forked = self._value


def _as_broken(error: BaseException) -> BaseException:
    """Return the error of `concurrent.futures` for an ended pool, with the reason as its cause."""
    kind: type[Exception] = concurrent.futures.BrokenExecutor
    if isinstance(error, TaskCancelled):
        kind = concurrent.futures.CancelledError
    broken = kind(str(error))
    broken.__cause__ = error
    return broken


class _Callback:
    def __init__(self, func: Callable[[Any], object], future: _Future[Any]) -> None:
        self._func, self._future = func, future

    def call_back(self) -> None:
        try:
            self._func(self._future)
        except Exception:  # as `concurrent.futures` does
            logging.getLogger("concurrent.futures").exception(
                "exception calling callback for %r", self._future
            )

    def complete(self) -> None:
        """Do nothing: only jobs have to be completed."""


def _call_back(func: Callable[[Any], object], future: _Future[Any]) -> None:
    """Call a callback, but not in the thread that completes futures: it may wait for futures."""
    caller = local.caller and local.caller.for_callbacks
    if caller is None:
        func(future)
    else:
        caller.add(_Callback(func, future))


class _Future(concurrent.futures.Future[T]):
    """A future of a call in a pool."""

    # The unanswered call.  Set once by `submit`; cleared by the thread that completes the future,
    # so that neither keeps the other alive.
    _job: _Call | None = None
    # The executor whose `shutdown` waits for it.
    _owner: PoolExecutor | None = None
    # The reason why the future is never completed, in a forked child: its parent has the workers.
    _forked: BaseException | None = None

    def result(self, timeout: float | None = None) -> T:
        if (job := self._job) is not None:  # unanswered
            timeout = _await(job, timeout)
        if self._forked is not None:
            raise _as_broken(self._forked)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if (job := self._job) is not None:
            timeout = _await(job, timeout)
        if self._forked is not None:
            return _as_broken(self._forked)
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Have ``fn(future)`` called in a thread of the pool when this is done, or now if it is."""
        job = self._job
        pool = None if job is None else job._pool
        if pool is not None:
            pool._jobs.callbacks.program.start()  # the interpreter starts no thread at its exit
        super().add_done_callback(functools.partial(_call_back, fn))

    def cancel(self) -> bool:
        """Cancel the call, unless a worker runs it; return whether it is cancelled."""
        job = self._job
        if job is not None and not self.done():
            pool = job._pool
            # A running future cannot be cancelled; `job.cancel` would stop its task.
            if pool is None or pool._submitter.runs(job) or not job.cancel():
                return self.cancelled()
            self._end_cancelled()
        return super().cancel()

    def running(self) -> bool:
        """Return whether a worker runs the call."""
        job = self._job
        pool = None if job is None or self.done() else job._pool
        return pool is not None and job is not None and pool._submitter.runs(job)

    def _end(self, set_outcome: Callable[[Any], None], outcome: Any) -> None:
        self._job = None
        try:
            set_outcome(outcome)
        except concurrent.futures.InvalidStateError:
            self._end_cancelled()  # it was cancelled meanwhile, so the outcome is dropped
        _unfinished.discard(self)

    def _end_cancelled(self) -> None:
        """Cancel this future.  `cancel` and the pool's answer may both call this."""
        self._job = None
        if super().cancel():
            # Hold the future's reentrant lock: a second notification would raise
            # (Lib/concurrent/futures/_base.py).
            with self._condition:
                if self._state != "CANCELLED_AND_NOTIFIED":
                    self.set_running_or_notify_cancel()
        _unfinished.discard(self)

    # -- called by `PoolExecutor.shutdown` ---------------------------------------------------------

    def _shut(self, cancel: bool) -> None:
        if cancel:
            self.cancel()

    def _finish(self) -> None:
        concurrent.futures.wait([self])


def _await(job: _Call, timeout: float | None) -> float | None:
    """Wait for the answer in this thread for a moment, if possible; return the time left."""
    about_to_block()
    if not job.is_call or (pool := job._pool) is None:
        return timeout
    deadline = deadline_of(timeout)
    _receive(pool, job, timeout)
    return None if deadline is None else deadline - time.monotonic()


@shielded
def _receive(pool: Any, job: _Call, timeout: float | None) -> None:
    """Receive the answer of a future's call; complete the future, or have its thread do so.

    This thread completes it only if no code of the program runs meanwhile, since signal handlers
    are deferred.
    """
    jobs: JobTable = pool._jobs
    if not jobs.reserve(job):
        return
    plain = False
    try:
        pool._submitter.receive(job, timeout)
        plain = job.settled and job.open_plain()
    finally:
        if jobs.end_reservation(job):
            futures = jobs.callbacks.futures
            (futures.call_here if plain else futures.add)(job)


class _Map:
    """An unanswered `map`, for `shutdown`."""

    def __init__(self, owner: PoolExecutor, results: IMapIterator[Any]) -> None:
        assert results.cancelling is not None
        self._owner, self._pool = owner, owner._pool
        self._job, self._flow = results.cancelling
        _unfinished.add(self)
        # The waiters call `release` after the last answer.
        self._job._waiters.append(self)
        if self._job.settled:
            self._job._waiters.wake()

    def release(self) -> None:
        _unfinished.discard(self)

    def _shut(self, cancel: bool) -> None:
        if cancel:
            self._pool._submitter.cancel(self._job)
            self._flow.stop()
        else:
            self._flow.draw_no_further()

    def _finish(self) -> None:
        # Lift the limit: otherwise, results that nobody takes would stop the input for ever.
        self._flow.unbind()
        self._job._waiters.wait(lambda: self._job.settled, None)


# The unanswered calls and maps of executors.  They are kept here, since a dropped executor finishes
# its work.  Needs no lock: adding to a set and discarding from it are atomic.
_unfinished: set[_Future[Any] | _Map] = set()
at_fork.renew(globals(), _unfinished=set)


def submit(
    pool: PublicVerbs,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwds: dict[str, Any],
    owner: PoolExecutor | None = None,
) -> concurrent.futures.Future[Any]:
    """Submit a call to a pool; return its future."""
    if pool._life.state is not PoolStates.RUN:
        pool._life.check_running()
    name = pool._submitter.name_of(func)
    options = PLAIN
    if pool._calls_go_to is not None or pool._task_timeout is not None:
        options = options_of(pool, OneCallOptions, {}, False)
    future: _Future[Any] = _Future()
    future._job = job = _Call(pool, name, future)
    job.options = options
    pool._jobs.callbacks.futures.start()
    if owner is not None:
        future._owner = owner
        _unfinished.add(future)
    try:
        pool._start_call(pool, job, func, args, kwds)
    except BaseException:
        _unfinished.discard(future)
        raise
    return future


class PoolExecutor(concurrent.futures.Executor):
    """A `concurrent.futures.Executor` over an existing pool; `BasePool.executor` makes it.

    A worker that dies fails one future, with `WorkerDied`, and is replaced.  `shutdown` leaves the
    pool open.  When the pool ends, unfinished futures fail with
    `concurrent.futures.BrokenExecutor`, whose cause says why.
    """

    def __init__(self, pool: PublicVerbs) -> None:
        self._pool = pool
        # Guards `_over`: no call is submitted after `shutdown` has listed the unfinished ones.
        # Reentrant: code that runs while arguments are pickled may submit, and so may a signal
        # handler.
        self._lock = threading.RLock()
        self._over = False
        _executors.add(self)
        _finish_at_exit()

    def __repr__(self) -> str:
        state = "shut down" if self._over else "open"
        pending = len(self._unfinished())
        return f"<{type(self).__name__} {state}, {pending} pending, over {self._pool!r}>"

    def _unfinished(self) -> list[_Future[Any] | _Map]:
        return [one for one in list(_unfinished) if one._owner is self]

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Have ``fn(*args, **kwargs)`` called in a worker; return its future.

        `Future.cancel` succeeds unless a worker runs the call; a call that begins at that moment is
        stopped.  Callbacks run in a thread of the pool, one after the other, and may wait for other
        futures.

        Raises:
            RuntimeError: the executor was shut down.
            concurrent.futures.BrokenExecutor: the pool has failed, or was closed.
        """
        with self._lock:
            self._check_open()
            try:
                return submit(self._pool, fn, args, kwargs, self)
            except PoolClosed as error:
                raise concurrent.futures.BrokenExecutor(str(error)) from error

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Return an iterator over ``fn(a, b, ...)``, as ``map(fn, *iterables)`` of Python.

        Args:
            fn: a function of as many arguments as there are iterables.
            iterables: drawn at once; with ``buffersize``, the first items are, and a thread of the
                pool draws the others as the results are taken.
            timeout: seconds from this call on after which `next` raises; None: no limit.
            chunksize: number of items in a task.
            buffersize: the most items that are drawn ahead of the results taken; None: no limit.

        Raises:
            concurrent.futures.TimeoutError: by `next`, if a result is late.
            Exception: by `next`, the error of ``fn``, which ends the iteration.
            RuntimeError: the executor was shut down.  If that was before the iterables were drawn
                to their end, `next` raises this after the results of the drawn items.
        """
        size = check_count("chunksize", chunksize)
        ahead = None if buffersize is None else check_count("buffersize", buffersize)
        deadline = None if timeout is None else time.monotonic() + timeout
        rows: Iterable[tuple[Any, ...]] = zip(*iterables, strict=False)
        # As in the standard executors, items are drawn before this returns.
        drawn = list(itertools.islice(rows, ahead))
        given: Iterable[Any] = drawn if ahead is None else itertools.chain(drawn, rows)
        with self._lock:
            self._check_open()
            try:
                call = functools.partial(_apply_row, fn)
                call.__qualname__ = label(fn).removesuffix("()")  # type: ignore[attr-defined]
                results = self._pool.imap(call, given, size, ahead)
            except PoolClosed as error:
                raise concurrent.futures.BrokenExecutor(str(error)) from error
            _Map(self, results)
        return _results(results, iter(given if ahead else ()), timeout, deadline)

    def _check_open(self) -> None:
        if self._over:
            raise RuntimeError(_FINISHED)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; an executor that owns its pool frees the workers after the last one.

        Args:
            wait: return after all submitted calls have finished and the workers have ended.
            cancel_futures: cancel the futures that no worker runs yet, and each unfinished `map`.
        """
        with self._lock:
            self._over = True
            unfinished = self._unfinished()
        for one in unfinished:
            one._shut(cancel_futures)
        self._finish(unfinished, wait)

    def _finish(self, unfinished: list[_Future[Any] | _Map], wait: bool) -> None:
        for one in unfinished if wait else ():
            one._finish()


def _apply_row(fn: Callable[..., T], row: tuple[Any, ...]) -> T:
    return fn(*row)


def _results(
    results: IMapIterator[Any],
    rest: Iterator[Any],
    timeout: float | None,
    deadline: float | None,
) -> Iterator[Any]:
    """Yield results.  When the iterator is closed, calls without a taken result are cancelled.

    ``rest``: the input that a `shutdown` may have left.
    """
    try:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                one = [results.next(left)]
            except StopIteration:
                break
            except Exception as error:
                if type(error) is TimeoutError and deadline and time.monotonic() >= deadline:
                    story = (
                        f"no next result of {results.label} {timeout:g} s after the call of map; "
                        f"`python -m xpool stacks {os.getpid()}` says where each worker is"
                    )
                    raise concurrent.futures.TimeoutError(story) from error
                failure = results._failure
                if error is failure or isinstance(failure, PickledResult):
                    raise _as_broken(error)
                raise  # the task's own error
            yield one.pop()  # popped, so that only the consumer holds the result
        if next(rest, None) is not None:
            raise RuntimeError(_FINISHED)
    finally:
        results.cancel()


_executors: weakref.WeakSet[PoolExecutor] = weakref.WeakSet()


@functools.cache
def _finish_at_exit() -> None:
    # Called after the first pool was made: handlers run in the reverse order of their registration,
    # and the pools' own handler, which terminates them, must run after this one.
    atexit.register(_finish_all)


def _finish_all() -> None:
    """Wait for all submitted calls at the program's end, as `concurrent.futures` does."""
    for executor in list(_executors):
        executor.shutdown()
