"""`P2PPool`: a task is bound to one worker when it is submitted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from xpool._calls.keywords import names_of, refuse_unknown
from xpool._calls.options import Exceptions, TaskOptions, check_count
from xpool._calls.results import AsyncResult, Job
from xpool._engine.jobs.scheduler import TaskRange
from xpool._pools.input_reader import FlowControl
from xpool._pools.process import Pool, limit_of
from xpool._worker.callables import InCall
from xpool.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Never

__all__ = ["P2PPool"]

T = TypeVar("T")


class P2PPool(Pool):
    """A pool that binds each task to a worker as it is submitted, over that worker's own channel.

    To the worker with the least to do, or the one that the caller names: ``worker=i`` of `apply`
    and `apply_async`, 0 to ``size() - 1``.  When that worker dies, what is bound to it waits for
    its replacement.

    Its workers can send messages to each other: ``current_worker().send(peer, obj)`` and
    ``recv(peer)``, see `WorkerInfo` and docs/peers.md.
    """

    _fixed_size = "its workers, and who gives them tasks, know them by their numbers"
    _has_peers = sys.platform == "linux"
    _calls_go_to = -1

    def apply(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        *,
        worker: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        **unknown: Never,
    ) -> T:
        """As `BasePool.apply`, on the worker with index ``worker`` if it is given."""
        if unknown:
            refuse_unknown("apply", names_of(P2PPool.apply.__code__), unknown)
        terms = self._terms(self._bind(worker), True, timeout, retries, retry_on)
        value: T = self._call(func, args, kwds, None, None, terms).get()
        return value

    def apply_async(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callable[[T], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        worker: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        **unknown: Never,
    ) -> AsyncResult[T]:
        """As `BasePool.apply_async`, on the worker with index ``worker`` if it is given.

        Raises:
            OptionError (a `ValueError`): there is no such worker.
        """
        if unknown:
            refuse_unknown("apply_async", names_of(P2PPool.apply_async.__code__), unknown)
        terms = self._terms(self._bind(worker), False, timeout, retries, retry_on)
        return self._call(func, args, kwds, callback, error_callback, terms)

    def _bind(self, worker: int | None) -> int:
        if worker is None:
            return self._calls_go_to
        if check_count("worker", worker, least=0) >= self._size:
            raise OptionError(
                f"worker must be from 0 to {self._size - 1} in this pool, not {worker}"
            )
        return worker

    def _ranges_for_all(self, job: Job, call: Any, terms: TaskOptions) -> list[TaskRange]:
        # The job's number is the scope of the messages that workers send in this call.
        func, args, kwds = call
        return super()._ranges_for_all(job, (InCall(func, job.number), args, kwds), terms)

    def _submit_range(self, task_range: TaskRange) -> None:
        if task_range.bound is not None:
            self._engine.submit(task_range)
            return
        # The engine binds each item on its own, so they go to it one by one.
        for i, item in enumerate(task_range.items, task_range.first):
            self._engine.submit(task_range.beside(i, (item,), -1))

    def _open_stream(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        flow: FlowControl,
        terms: TaskOptions,
    ) -> Callable[[int, Any], int]:
        if not self._direct:
            return super()._open_stream(job, func, starred, chunked, flow, terms)
        engine, packer = self._engine, self._packer
        job.func, owner = self._learn(func, starred, chunked, terms)
        bound = -1 if owner is None else owner
        begin = TaskRange(job.number, job.func, 0, (), terms.retries, None, limit_of(terms))
        begin.input_reader, begin.may_run = flow, flow.may_run
        flow.resume = engine.resume

        def put(index: int, task: Any) -> int:
            payload, worker = packer.pack_task(task, terms.retries > 0, bound)
            engine.submit(begin.beside(index, (payload,), worker))
            return engine.sent(payload)

        return put
