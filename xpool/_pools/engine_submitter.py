"""How a verb becomes tasks of worker processes: pickled, and given to the engine in ranges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from xpool._calls.options import TaskOptions, check_callable, label
from xpool._calls.results import Job
from xpool._calls.streams import Stream
from xpool._engine.jobs.ranges import CALLS, ONCE, Limit, TaskRange, Terms
from xpool._pools.input_reader import FlowControl, Runs
from xpool._pools.job_table import JobTable
from xpool._pools.submitters import HookedPool, HookSubmitter, Put, Work
from xpool._pools.task_stream import TaskStream
from xpool._python.interrupt import by_handler, shielded
from xpool._wire.wire import Mode
from xpool._worker.callables import InCall, Retried, applied
from xpool.errors import TaskTimeout

if TYPE_CHECKING:
    from xpool._engine.protocols import EngineProtocol
    from xpool._pools.packing import Packer

# inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR: to import that takes 10 ms.
_IS_ASYNC = 0x80 | 0x200

_MODES = {
    (False, False): Mode.EACH,
    (False, True): Mode.CHUNK,
    (True, False): Mode.STAR,
    (True, True): Mode.STARCHUNK,
}


class EngineSubmitter(HookSubmitter):
    """Pickles tasks and gives them to an engine.

    ``one_as_call``: whether a map of one task is submitted as a call, whose caller receives the
    answer itself.
    """

    def __init__(
        self,
        pool: HookedPool,
        jobs: JobTable,
        engine: EngineProtocol,
        packer: Packer,
        one_as_call: bool = True,
    ) -> None:
        super().__init__(pool, jobs)
        self.engine, self.packer = engine, packer
        self._one_as_call = one_as_call

    def check(self, func: Any) -> None:
        """Raise `TypeError` unless workers can call ``func``."""
        if not callable(func):
            check_callable("func", func)
        inner = func.func if isinstance(func, functools.partial) else func
        if getattr(getattr(inner, "__code__", None), "co_flags", 0) & _IS_ASYNC:
            raise TypeError(
                f"{label(inner)} is a coroutine function, and a coroutine cannot leave the worker; "
                f"send a function that runs it, with asyncio.run({label(inner)[:-1]}...))"
            )

    def call(self, job: Job, func: Any, args: tuple[Any, ...], kwds: dict[str, Any]) -> None:
        """Submit the one task of a job; where its caller waits, receive the answer here."""
        options, engine = job.options, self.engine
        job.is_call = True
        if options.retry_on:
            func = Retried(func, options.retry_on)
        terms = terms_of(options)
        keep = terms.retries > 0
        payload, worker = self.packer.pack_task((func, args, kwds), keep, options.worker)
        if type(payload) is not bytes:  # it holds blocks, or is large
            engine.sent(payload)
        if not options.waits and worker is None:
            engine.submit_call(job.number, payload, terms)
            return
        task_range = TaskRange(CALLS, 0, job.number, (payload,), worker, terms)
        del payload  # it holds what was lent for this call, and so does the range
        if not options.waits:
            engine.submit(task_range)
            return
        engine.call(task_range)
        if engine.results:
            pool = self._pool()
            assert pool is not None  # its verb was called
            self.jobs.receive(pool.pool_outqueue_get)

    def map(self, job: Job, work: Work, chunks: Iterable[Any]) -> None:
        """Submit a range of tasks, one for each chunk; a tuple of one chunk is a call."""
        options = job.options
        plain = options.timeout is None and not options.retries
        if plain and self._one_as_call and type(chunks) is tuple and len(chunks) == 1:
            call, before = applied(*work)
            self.call(job, call, (*before, *chunks), {})
            return
        begin, owner = self.learn(job, work)
        task_ranges = [begin]
        failed = []
        for i, chunk in enumerate(chunks):
            try:
                payload, worker = self.packer.pack_task(chunk, options.retries > 0, owner)
            except Exception as error:
                if by_handler(error):
                    raise
                # It fails alone; what comes after it is a task range of its own.
                failed.append((i, error))
                task_ranges.append(begin.beside(i + 1))
                continue
            self.engine.sent(payload)
            if worker is None:
                task_ranges[-1].items.append(payload)
            else:
                task_ranges += begin.beside(i, (payload,), worker), begin.beside(i + 1)
        for task_range in task_ranges:
            if task_range.items:
                self._submit_range(task_range)
        for i, exc in failed:
            self.jobs.deliver(job.number, i, False, exc)

    def _submit_range(self, task_range: TaskRange) -> None:
        self.engine.submit(task_range)

    def stream(self, job: Stream, work: Work, flow: FlowControl) -> Put:
        """Return what the input reader calls with each task; it does not hold the pool."""
        begin, owner = self.learn(job, work)
        stream = TaskStream(self.engine, self.packer, begin, flow, owner)
        if owner is None:
            job.runs = Runs(self.packer.pack_atoms, stream.put_run)
        return stream.put

    def learn(self, job: Job, work: Work) -> tuple[TaskRange, int | None]:
        """Have the engine keep the job's function for the workers, until the job is answered.

        Returns an empty range of its tasks, and the worker to which a function with handles to
        tensors is bound.
        """
        func, options = work.func, job.options
        if options.retry_on:
            func = Retried(func, options.retry_on)
        payload, owner = self.packer.pack_task(func, True, None)
        number = self.engine.learn(_MODES[work.starred, work.chunked], payload)
        job.drop_function = functools.partial(self.engine.forget, number)
        return TaskRange(job.number, number, 0, (), None, terms_of(options)), owner

    def put_task(self, job: Job, index: int, call: tuple[Any, ...]) -> None:
        """Submit one task, as the hook `pool_inqueue_put` gets it."""
        options = job.options
        if options.retry_on:
            call = (Retried(call[0], options.retry_on), *call[1:])
        payload, worker = self.packer.pack_task(call, options.retries > 0, options.worker)
        self.engine.sent(payload)
        self.engine.submit(TaskRange(job.number, 0, index, (payload,), worker, terms_of(options)))

    def on_all(self, job: Job, call: tuple[Any, ...], size: int) -> None:
        """Submit a call to each of ``size`` workers."""
        # Pickled once, and marked as kept: each worker copies what lies in blocks.
        payload, owner = self.packer.pack_task(call, True, None)
        payloads = [payload] * size
        if owner is not None:  # handles to tensors of single workers: the others get copies
            payloads = [self.packer.pack_task(call, True, w)[0] for w in range(size)]
        for one in payloads:
            self.engine.sent(one)
        terms = terms_of(job.options)._replace(retries=0)
        self.engine.submit(
            *(TaskRange(job.number, 0, w, (one,), w, terms) for w, one in enumerate(payloads))
        )

    def beside_bar(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs a function whose workers share the terminal of a bar with it."""
        from xpool._worker.line_streams import Clearing  # only here: few programs have a terminal

        return Clearing(func)

    def withdraw(self, job: Job) -> None:
        """Give no worker what waits of a job, and stop what runs of it."""
        self.engine.withdraw(*_place(job))

    @shielded
    def runs(self, job: Job) -> bool:
        """Whether a worker is in a task of this job now."""
        return self.engine.runs(*_place(job))


class HookedEngineSubmitter(EngineSubmitter):
    """For a pool whose subclass overrides `pool_inqueue_put`: each task goes through that."""

    call = HookSubmitter.call
    map = HookSubmitter.map
    stream = HookSubmitter.stream


class PeerSubmitter(EngineSubmitter):
    """Binds each task to a worker when it is submitted: to that with the least to do."""

    def on_all(self, job: Job, call: tuple[Any, ...], size: int) -> None:
        """Submit a call to each of ``size`` workers; its number is the scope of their messages."""
        func, args, kwds = call
        super().on_all(job, (InCall(func, job.number), args, kwds), size)

    def _submit_range(self, task_range: TaskRange) -> None:
        if task_range.bound is not None:
            self.engine.submit(task_range)
            return
        # The engine binds each item on its own, so they go to it one by one.
        for i, item in enumerate(task_range.items, task_range.first):
            self.engine.submit(task_range.beside(i, (item,), -1))

    def stream(self, job: Stream, work: Work, flow: FlowControl) -> Put:
        """Return what the input reader calls with each task; it does not hold the pool."""
        begin, owner = self.learn(job, work)
        return TaskStream(self.engine, self.packer, begin, flow, -1 if owner is None else owner).put


def _place(job: Job) -> tuple[int, int | None]:
    """Return what the engine knows a job by, and which item of that it is; None: all of them."""
    return (CALLS, job.number) if job.is_call else (job.number, None)


def terms_of(options: TaskOptions) -> Terms:
    """Return the terms on which workers get a task with these options."""
    if options.timeout is None:
        return Terms(options.retries) if options.retries else ONCE
    limit = Limit(options.timeout, issubclass(TaskTimeout, options.retry_on))
    return Terms(options.retries, limit)
