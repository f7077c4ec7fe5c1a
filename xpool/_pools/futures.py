"""The interface of `concurrent.futures` over a pool."""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from xpool._calls.options import ManyOptions, OneCallOptions, check_count
from xpool._calls.results import (
    AsyncResult,
    Job,
    PickledResult,
    about_to_block,
)
from xpool._calls.streams import IMapIterator
from xpool._engine.jobs.states import PoolStates
from xpool._pools.job_table import JobTable
from xpool._pools.submitters import Work
from xpool._pools.verbs import PLAIN, PublicVerbs, imap, options_of, submit_call
from xpool._python.interrupt import shielded
from xpool._python.waiters import Waiters, deadline_of
from xpool.errors import PoolClosed, TaskCancelled, TimeoutError

P = ParamSpec("P")
T = TypeVar("T")

_FINISHED = "cannot schedule new futures after shutdown"


class _Call(AsyncResult[Any]):
    """A call in the pool that completes a future."""

    has_callback = True
    is_future = True
    _pool_ended = False
    _waiters = Waiters()  # of all: threads wait for the future instead

    def __init__(
        self,
        number: int,
        label: str,
        pool: PublicVerbs,
        callback: None = None,
        error_callback: None = None,
    ) -> None:
        # As in `AsyncResult`, whose call this saves.
        self.number, self.label, self._pool = number, label, pool
        self.future: _Future[Any] = _Future()
        self.future._job = self
        pool._jobs.callbacks.futures.start()

    def fail(self, exc: BaseException | PickledResult) -> None:
        pool = self._pool
        self._pool_ended = pool is not None and pool._life.state is PoolStates.TERMINATE
        super().fail(exc)

    def call_back(self) -> None:
        future = self.future
        if future._job is None:
            return
        future._job = None
        error: BaseException
        try:
            if not self._opened:
                self._open()
        except BaseException as exc:  # unpickling may raise anything, for example `SystemExit`
            error = exc
        else:
            if self._success:
                future._end(future.set_result, self._value)
                return
            error = self._value
        if isinstance(error, TaskCancelled):
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
        self._pool = None

    def abandon(self, exc: BaseException) -> None:
        super().abandon(exc)
        if self.future._job is not None:
            self.future._forked = exc


def _as_broken(error: BaseException) -> BaseException:
    """Return the error of `concurrent.futures` for an ended pool, with the reason as its cause."""
    kind: type[Exception] = concurrent.futures.BrokenExecutor
    if isinstance(error, TaskCancelled):
        kind = concurrent.futures.CancelledError
    broken = kind(str(error))
    broken.__cause__ = error
    return broken


_result = concurrent.futures.Future.result  # by this name, since `super()` takes longer


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


def _call_back(
    func: Callable[[Any], object], add: Callable[[_Callback], None], future: _Future[Any]
) -> None:
    """Call a callback, but not in a thread of the pool that completes the future: the callback may
    wait for futures."""
    if future._job is None:
        add(_Callback(func, future))
    else:  # `cancel` completes it
        func(future)


class _Future(concurrent.futures.Future[T]):
    """A future of a call in a pool."""

    # The unanswered call.  Set once by `_Call`; cleared by the pool's thread that completes the
    # future, so that neither keeps the other alive.
    _job: _Call | None = None
    # The reason why the future is never completed, in a forked child: its parent has the workers.
    _forked: BaseException | None = None
    # Of the base class, in every version of Python.
    _done_callbacks: list[Any]
    _invoke_callbacks: Callable[[], None]

    def result(self, timeout: float | None = None) -> T:
        job = self._job
        try:
            if job is not None:  # unanswered
                timeout = _await(job, timeout)
            if self._forked is not None:
                raise _as_broken(self._forked)
            value = _result(self, timeout)
            # Before Python 3.14, `Future.result` takes an exception that is false for none.
            if value is None and self._exception is not None:
                raise self._exception
            return value
        finally:
            del self, job  # breaks a reference cycle: the error's traceback keeps this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if (job := self._job) is not None:
            timeout = _await(job, timeout)
        forked = self._forked
        return super().exception(timeout) if forked is None else _as_broken(forked)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Have ``fn(future)`` called in a thread of the pool when this is done, or now if it is."""
        job = self._job
        pool = None if job is None else job._pool
        if pool is not None:
            caller = pool._jobs.callbacks.program
            caller.start()  # the interpreter starts no thread at its exit
            fn = functools.partial(_call_back, fn, caller.add)
        super().add_done_callback(fn)

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
        # A signal handler may have interrupted a thread that holds this lock, and may wait for the
        # next future of the pool.
        if not self._condition.acquire(blocking=False):
            about_to_block()
            self._condition.acquire()
        callbacks, self._done_callbacks = self._done_callbacks, []
        try:
            set_outcome(outcome)
        except concurrent.futures.InvalidStateError:
            self._end_cancelled()  # cancelled meanwhile, so the outcome is dropped
            return
        finally:
            self._done_callbacks = callbacks
            self._condition.release()
        self._invoke_callbacks()  # without the lock, since they may wait

    def _end_cancelled(self) -> None:
        """Cancel this future.  `cancel` and the pool's answer may both call this."""
        if super().cancel():
            # Hold the future's reentrant lock: a second notification would raise
            # (Lib/concurrent/futures/_base.py).
            with self._condition:
                if self._state != "CANCELLED_AND_NOTIFIED":
                    self.set_running_or_notify_cancel()


def _await(job: _Call, timeout: float | None) -> float | None:
    """Wait for the answer in this thread for a moment, if possible; return the time left."""
    pool = job._pool
    about_to_block(pool)
    if sys.is_finalizing() and not job.future.done():
        raise concurrent.futures.BrokenExecutor("can't wait for a call at interpreter shutdown")
    if not job.is_call or pool is None:
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
            (jobs.complete_future if plain else jobs.callbacks.futures.add)(job)


def submit(
    pool: PublicVerbs,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwds: dict[str, Any],
) -> _Future[Any]:
    """Submit a call to a pool; return its future."""
    options = PLAIN
    if pool._calls_go_to is not None or pool._task_timeout is not None:
        options = options_of(pool, OneCallOptions, {}, False)
    call: _Call = submit_call(pool, func, args, kwds, options, kind=_Call)
    return call.future


class PoolExecutor(concurrent.futures.Executor):
    """A `concurrent.futures.Executor` over an existing pool; `BasePool.executor` makes it.

    A worker that dies fails one future, with `WorkerDied`, and is replaced.  `shutdown` leaves the
    pool open.  When the pool ends, unfinished futures fail with
    `concurrent.futures.BrokenExecutor`, whose cause says why.
    """

    def __init__(self, pool: PublicVerbs) -> None:
        self._pool = pool
        # Without a lock: arguments are pickled by code that may take long, or wait for another
        # call.  So `shutdown` may miss a call that another thread is submitting.
        self._over = False
        _executors.add(self)
        _finish_at_exit()

    def __repr__(self) -> str:
        state = "shut down" if self._over else "open"
        pending = sum(not job.settled for job in self._unanswered())
        return f"<{type(self).__name__} {state}, {pending} pending, over {self._pool!r}>"

    @property
    def _max_workers(self) -> int:
        """The number of workers, under the name of the standard executors' attribute.

        Libraries that are given an executor read it, as dask does.
        """
        return self._pool._size

    def _unanswered(self) -> list[Job]:
        return [job for job in list(self._pool._jobs.unanswered.values()) if job.owner is self]

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
        if self._over:
            raise RuntimeError(_FINISHED)
        try:
            future = submit(self._pool, fn, args, kwargs)
        except PoolClosed as error:
            raise self._closed(error) from error
        if (job := future._job) is not None:  # else the future is completed
            job.owner = self
        return future

    def _closed(self, error: PoolClosed) -> Exception:
        if self._over:  # by another thread, during the call
            return RuntimeError(_FINISHED)
        return concurrent.futures.BrokenExecutor(str(error))

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
        if self._over:
            raise RuntimeError(_FINISHED)
        try:
            work = Work(fn, starred=True)
            options = options_of(self._pool, ManyOptions, {}, False)
            results = imap(self._pool, IMapIterator, work, given, size, ahead, options)
        except PoolClosed as error:
            raise self._closed(error) from error
        assert results.cancelling is not None
        results.cancelling[0].owner = self
        return _results(results, iter(given if ahead else ()), timeout, deadline)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; an executor that owns its pool frees the workers after the last one.

        Args:
            wait: return after all submitted calls have finished and the workers have ended.
            cancel_futures: cancel the futures that no worker runs yet, and each unfinished `map`.
        """
        self._over = True
        jobs = self._unanswered()
        for job in jobs:
            if isinstance(job, _Call):
                if cancel_futures:
                    job.future.cancel()
            elif cancel_futures:
                self._pool._submitter.cancel(job)
                job.flow.stop()
            else:
                job.flow.draw_no_further()
        self._finish(jobs, wait)

    def _finish(self, jobs: list[Job], wait: bool) -> None:
        for job in jobs if wait else ():
            if isinstance(job, _Call):
                concurrent.futures.wait([job.future])
            else:
                # Lift the limit: otherwise, results that nobody takes would stop the input for
                # ever.
                job.flow.unbind()
                job._waiters.wait(functools.partial(getattr, job, "settled"), None)


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
