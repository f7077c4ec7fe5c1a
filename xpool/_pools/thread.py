"""`ThreadPool`: worker threads, the same verbs, objects passed by reference."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from xpool._calls.streams import Stream
from xpool._engine.jobs.states import PoolStates
from xpool._engine.threads import HeldTask, ThreadOptions, ThreadWorkers
from xpool._pools.base import BasePool
from xpool._pools.hooks import Result, Task, next_result
from xpool._pools.job_table import CAUSED, JobTable
from xpool._pools.pool_options import REFUSED_BY_THREADS, PoolOptions, takes
from xpool._pools.submitters import HookSubmitter
from xpool._pools.thread_submitter import ThreadSubmitter
from xpool._python.interrupt import shielded
from xpool._worker.callables import each, star_each


class ThreadPool(BasePool):
    """A pool of threads, which pass objects by reference.

    A thread cannot be stopped: `terminate` lets running tasks end.  If a task exceeds its
    ``timeout=``, or is cancelled while it runs, it is answered at once; its thread continues until
    the task ends, and another thread takes its place.

    It has the signature of `Pool`.  Arguments about pickling (``is_recursive``, ``is_copy_tensor``,
    ``share_method``, ``memory_limit``), ``is_daemon`` and ``restart_budget`` are checked, but have
    no effect.

    Raises:
        TypeError: an argument has a wrong type.
        OptionError (a `ValueError`): an argument has a wrong value, or is one that threads cannot
            have: ``context``, ``seed``, ``output``, ``on_worker_end``, ``worker_memory``,
            ``memory_high``, ``hosts``.
    """

    _terminate_waits = False
    _stops_tasks = True

    @takes(PoolOptions)
    def __init__(self, *args: Any, **keywords: Any) -> None:
        options = PoolOptions.of(self, args, keywords)
        options.refuse(REFUSED_BY_THREADS, ", or use xpool.Pool")
        self._task_timeout = options.task_timeout
        self._initializer_timeout = options.initializer_timeout
        super().__init__(
            options.processes, options.initializer, options.initargs, options.maxtasksperchild,
            name=options.name,
        )  # fmt: skip

    @shielded
    def setup_queues(self) -> None:
        """Make the queue that the threads take from."""
        self._results: deque[Result] = deque()  # used if a subclass has a `pool_outqueue_get`
        self._backend = self._threads = ThreadWorkers(
            self._size,
            ThreadOptions(
                self.name,
                self.worker,
                self.initializer,
                self.initargs,
                self._initializer_timeout,
                self.maxtasksperchild,
                self._contexts,
            ),
            self._jobs.unanswered,
            self._answerer(),
        )
        self._resizing = threading.RLock()
        own, kind = ThreadSubmitter(self, self._jobs, self._threads), type(self)
        hooks = kind.pool_inqueue_put, kind.worker
        is_hooked = hooks != (ThreadPool.pool_inqueue_put, ThreadPool.worker)
        if type(self).pool_outqueue_get is ThreadPool.pool_outqueue_get:
            self._jobs.hooked = CAUSED if is_hooked else ""
        if is_hooked:
            self._submitter = HookSubmitter(self, self._jobs, own)
        else:
            self._submitter = own
            self._start_call = own.call_starter(self._start_call)

    def _answerer(self) -> Callable[[int, int, bool, Any], None]:
        """Return the function that threads call with results; it does not hold the pool."""
        jobs, results = self._jobs, self._results
        if type(self).pool_outqueue_get is ThreadPool.pool_outqueue_get:
            return _deliverer(jobs)

        # A subclass with its own hook gets the results there, in the engine's thread.
        def queue_result(number: int, index: int, ok: bool, value: Any) -> None:
            results.append((number, index, (ok, value)))
            jobs.wake()

        return queue_result

    def pool_inqueue_put(self, obj: Task | None) -> None:
        """Queue a task."""
        if obj is None:
            self._threads.tasks.put(None, last=True)
            return
        job = self._jobs.unanswered.get(obj[0])
        last = isinstance(job, Stream)  # calls and maps go before the items of streams
        # The hook's arguments have no options, so they are taken from the job.
        if job is not None and not job.options.plain:
            entry = HeldTask(obj, job.options, chunked=obj[2] in (each, star_each))
            self._threads.held.put(entry, last)
        else:
            self._threads.tasks.put(obj, last)

    def pool_outqueue_get(self, timeout: float) -> Result:
        """Return the next result."""
        return next_result(self._results, self._threads.wait, timeout)

    @shielded
    def repopulate_pool(self) -> None:
        """Start the threads that are missing."""
        self._threads.start_missing()

    def maintain_pool(self) -> bool:
        """Do nothing: a thread that ends starts its successor."""
        return False

    def terminate_workers(self) -> None:
        """Drop the waiting tasks and let the threads end."""
        self._threads.terminate()

    def join_workers(self) -> None:
        """Wait for the threads."""
        self._threads.join()

    def join(self, timeout: float | None = None) -> None:
        if self.state is not PoolStates.RUN and self._threads.runs_here():
            raise RuntimeError("join() in a task of the same pool would wait for itself")
        super().join(timeout)

    join.__doc__ = BasePool.join.__doc__

    @shielded
    def _resize(self, size: int) -> None:
        with self._resizing:  # one after the other
            self._threads.resize(size)
            self._size = size

    def _release_workers(self) -> None:
        self._threads.release()


def _deliverer(jobs: JobTable) -> Callable[[int, int, bool, Any], None]:
    """Return a function that calls `JobTable.deliver` in one thread at a time, without a wait.

    A thread that waits for a lock would get it before it gets the interpreter, and the other
    threads would have to wait meanwhile.  So the threads would switch at each result.
    """
    waiting: deque[tuple[int, int, bool, Any]] = deque()
    delivering: Any = threading.RLock()
    jobs.guards.append(delivering)
    deliver, complete_future = jobs.deliver, jobs.complete_future
    acquire, release = delivering.acquire, delivering.release

    def deliver_waiting(error: BaseException | None) -> None:
        # Check again after the release: a thread that found the lock taken relies on this thread.
        while waiting and acquire(False):
            one = future = None
            try:
                if waiting:
                    job, index, ok, one = waiting.popleft()
                    future = deliver(job, index, ok, one, True)
            except BaseException as exc:
                error = exc
            release()
            if future is not None:
                complete_future(future)
            # Delete them after the release: this may run a finalizer, which may wait for another
            # result.
            del one, future
        if error is not None:
            try:
                raise error
            finally:
                del error

    def answer(number: int, index: int, ok: bool, value: Any) -> None:
        error: BaseException | None = None
        future = None
        if acquire(False):
            try:
                future = deliver(number, index, ok, value, True)
            except BaseException as exc:
                # Raised below, after the results that other threads have left meanwhile.
                error = exc
            release()
            if future is not None:
                complete_future(future)
                del future
        else:
            waiting.append((number, index, ok, value))
        if waiting or error is not None:
            try:
                deliver_waiting(error)
            finally:
                del error

    return answer
