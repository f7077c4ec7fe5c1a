"""`ThreadPool`: worker threads, the same verbs, objects passed by reference."""

from __future__ import annotations

import queue
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

from xpool._calls.keywords import names_of_inits, refuse_unknown
from xpool._calls.options import (
    TaskOptions,
    check_bytes,
    check_count,
    check_memory,
    check_output,
    check_seconds,
    check_seed,
    check_share_method,
)
from xpool._calls.results import Job
from xpool._calls.streams import Stream
from xpool._engine.threads import Entry, Source, ThreadWorkers
from xpool._pools.base import BasePool
from xpool._pools.hooks import Result, Task
from xpool._pools.input_reader import FlowControl, Runs
from xpool._python.interrupt import shielded
from xpool._worker.callables import applied, each, star_each
from xpool.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Never

__all__ = ["ThreadPool"]


class ThreadPool(BasePool):
    """A pool of threads.  A thread cannot be stopped: `terminate` lets running tasks end.

    A task that is over its ``timeout=``, or is cancelled while it runs, is answered at once, and
    its thread is left to itself: it runs on until the task ends, while another has its place.

    Has the signature of `Pool`.  Arguments about pickling (``is_recursive``, ``is_copy_tensor``,
    ``share_method``, ``memory_limit``) and ``is_daemon`` and ``restart_budget`` are checked and
    have no effect: threads pass objects by reference.

    Raises:
        TypeError: an argument has a wrong type.
        OptionError (a `ValueError`): an argument has a wrong value, or asks for what threads cannot
            do: ``context``, ``seed``, ``output``, ``worker_memory``, ``memory_high``, ``hosts``.
    """

    _terminate_waits = False
    _keeps_terms = True

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[object] = (),
        maxtasksperchild: int | None = None,
        context: BaseContext | str | None = None,
        *,
        is_recursive: bool = False,
        is_daemon: bool = True,
        is_copy_tensor: bool = True,
        share_method: str | None = None,
        memory_limit: int | str | None = None,
        seed: int | None = None,
        task_timeout: float | None = None,
        initializer_timeout: float | None = None,
        restart_budget: int | None = None,
        output: str | None = None,
        worker_memory: int | str | None = None,
        memory_high: float | None = None,
        hosts: Any = None,
        name: str | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown(type(self).__name__, names_of_inits(self), unknown)
        check_share_method(share_method)
        check_seed(seed)
        check_output(output)
        check_memory(worker_memory, memory_high)
        _refuse(
            context=context,
            seed=seed,
            output=output,
            worker_memory=worker_memory,
            memory_high=memory_high,
            hosts=hosts,
        )
        if memory_limit is not None:
            check_bytes("memory_limit", memory_limit, least=0)
        if restart_budget is not None:
            check_count("restart_budget", restart_budget)
        self._task_timeout = check_seconds("task_timeout", task_timeout)
        self._initializer_timeout = check_seconds("initializer_timeout", initializer_timeout)
        super().__init__(processes, initializer, initargs, maxtasksperchild, context, name=name)

    @shielded
    def setup_queues(self) -> None:
        """Make the queue that the threads take from."""
        # Shortcuts are for those who have not put their own hook in the way.
        self._direct = type(self).pool_inqueue_put is ThreadPool.pool_inqueue_put
        self._results: deque[Result] = deque()  # for a `pool_outqueue_get` of a subclass
        self._threads = ThreadWorkers(
            self._size,
            self._work(),
            self.initializer,
            self.initargs,
            self.maxtasksperchild,
            self._worker_contexts(),
            self.name,
            self._jobs,
            self._answerer(),
            self._initializer_timeout,
        )
        self._backend = self._threads

    def _answerer(self) -> Callable[[Result], None]:
        """Return what the threads call with their results: it must not hold the pool."""
        ref, results = weakref.ref(self), self._results
        # A subclass with a hook of its own gets the results there, in the engine's thread.
        delivers = type(self).pool_outqueue_get is ThreadPool.pool_outqueue_get

        def answer(result: Result) -> None:
            pool = ref()
            # It was dropped while this task ran: nobody waits for the answer.
            if pool is None:
                return
            if delivers:
                number, index, (ok, value) = result
                pool._deliver(number, index, ok, value)
            else:
                results.append(result)
                pool._threads.wake()

        return answer

    def _work(self) -> Callable[..., None]:
        return self.worker

    def _worker_contexts(self) -> list[Any] | None:
        return None

    def pool_inqueue_put(self, obj: Task | None) -> None:
        """Queue a task."""
        if obj is None:
            self._threads.tasks.put(None, last=True)
            return
        job = self._jobs.get(obj[0])
        last = isinstance(job, Stream)  # calls and maps go before what a stream has drawn ahead
        # The hook carries no terms: they are the job's.
        if job is not None and (job.terms.timeout is not None or job.terms.retries):
            entry = Entry(obj, job.terms, chunked=obj[2] in (each, star_each))
            self._threads.tasks.put(entry, last)
        else:
            self._threads.tasks.put(obj, last)

    def pool_outqueue_get(self, timeout: float) -> Result:
        """Return the next result."""
        results = self._results
        if not results and timeout > 0:
            self._threads.wait(timeout)
        if results:
            result: Result = results.popleft()
            return result
        raise queue.Empty

    @shielded
    def repopulate_pool(self) -> None:
        """Start the threads that are missing."""
        self._threads.start_missing()

    def maintain_pool(self) -> bool:
        """Nothing is left to do: a thread that ends starts its successor."""
        return False

    def terminate_workers(self) -> None:
        """Drop what waits and let the threads end."""
        self._threads.terminate()

    def join_workers(self) -> None:
        """Wait for the threads."""
        self._threads.join()

    @shielded
    def _resize(self, size: int) -> None:
        with self._lock:  # one after the other
            self._threads.resize(size)
            self._size = size

    # -- shortcuts ---------------------------------------------------------------------------------

    def _submit_each(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        chunks: Iterable[Any],
        terms: TaskOptions,
    ) -> None:
        if not self._plain(terms):
            super()._submit_each(job, func, starred, chunked, chunks, terms)
            return
        # Snapshots: a list may change while threads take from it, and a generator runs.
        items = chunks if isinstance(chunks, (range, tuple, list)) else list(chunks)
        call, before = applied(func, starred, chunked)
        self._threads.put(Source(job, call, before, items), len(items))

    def _open_stream(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        flow: FlowControl,
        terms: TaskOptions,
    ) -> Callable[[int, Any], int]:
        put = super()._open_stream(job, func, starred, chunked, flow, terms)
        if self._plain(terms):
            assert isinstance(job, Stream)
            threads = self._threads
            call, before = applied(func, starred, chunked)

            def put_run(index: int, items: list[Any]) -> int:
                threads.put(Source(job, call, before, items, index, last=True), len(items))
                return 0

            job.runs = Runs(lambda items: items, put_run)
        return put

    def _plain(self, terms: TaskOptions) -> bool:
        return self._direct and terms.timeout is None and not terms.retries

    def _withdraw(self, job: Job) -> None:
        self._threads.withdraw(job.number)

    def _runs(self, job: Job) -> bool:
        return self._threads.runs(job.number)

    def _release_workers(self) -> None:
        self._threads.release()


def _refuse(**options: object) -> None:
    why = {
        "context": "threads have no start method",
        "seed": "all threads share the random generators of this process",
        "output": "all threads share the stdout and stderr of this process",
        "worker_memory": "all threads share the memory of this process",
        "memory_high": "it holds back tasks for other processes",
        "hosts": "threads are on this host",
    }
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{name}={value!r}: {why[name]}; leave it out, or use xpool.Pool")
