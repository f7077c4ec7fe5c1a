"""The implementation of the verbs, for all pools: check the arguments, make a job, submit it."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from xpool._calls.options import (
    OF_TERMS,
    OneCallOptions,
    TaskOptions,
    check_args,
    check_callable,
    check_can_iterate,
    check_choice,
    check_chunksize,
    check_count,
    check_flag,
    check_keywords,
    default_chunksize,
    names_of,
    refuse_unknown,
)
from xpool._calls.progress import Progress
from xpool._calls.results import AsyncResult, Job, MapResult
from xpool._calls.streams import IMapIterator, Stream
from xpool._engine.jobs.states import PoolStates
from xpool._pools.input_reader import FlowControl, InputReader
from xpool._pools.job_table import JobTable
from xpool._pools.lifecycle import Lifecycle
from xpool._pools.submitters import CO_ASYNC, HookSubmitter, Put, Work, begin_work
from xpool._python.interrupt import by_handler, deliver, interruptible, pending, shielded
from xpool._worker.callables import task_function
from xpool.errors import OptionError

if TYPE_CHECKING:
    from xpool._worker.task_output import TaskFiles

It = TypeVar("It", bound=IMapIterator[Any])

PLAIN, WAITING = TaskOptions(), TaskOptions(waits=True)
"""The options of calls without keywords; WAITING: the caller waits for the result."""


class PoolOfVerbs:
    """What the verbs use of their pool."""

    name: str
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    # The parts of a pool.
    _jobs: JobTable
    _life: Lifecycle
    _submitter: HookSubmitter
    _size: int
    _task_timeout: float | None = None
    # Whether this pool knows when its workers begin a task, and can stop them.
    _stops_tasks = False
    # Whether each worker has random generators of its own.
    _seeds_items = False
    _files: TaskFiles | None = None
    # Enters the job of one call, and submits its task.
    _start_call: Callable[..., None]
    # The worker for calls that name none; None: any, -1: the one with the least to do.
    _calls_go_to: int | None = None
    # Whether the first argument of functions is their worker's context; and the contexts.
    _gives_context = False
    _contexts: list[Any] | None = None


def options_of(
    pool: PoolOfVerbs,
    kind: Any,
    given: Mapping[str, Any],
    waits: bool,
    on_error: str = "raise",
) -> TaskOptions:
    """Check the keywords that a verb was called with, which must be those of a `CallOptions`,
    ``kind``."""
    worker = pool._calls_go_to if kind is OneCallOptions else None
    if not given and on_error == "raise" and pool._task_timeout is None:
        if worker is not None:
            return TaskOptions(worker=worker, waits=waits)
        return WAITING if waits else PLAIN
    __tracebackhide__ = True
    known = [name for name in kind.__annotations__ if name != "worker" or worker is not None]
    unknown = [name for name in given if name not in known]
    if unknown:
        verb = sys._getframe(1).f_code
        refuse_unknown(verb.co_name, names_of(verb) + known, unknown)
    options = check_keywords(given, pool._task_timeout)
    if not (options.plain or pool._stops_tasks):
        *others, last = (f"{name}=" for name in OF_TERMS)
        raise OptionError(
            f"{', '.join(others)} and {last} are not for {type(pool).__name__}: xpool does not "
            "start its workers, so it can neither stop a task, nor run it again, nor choose the "
            "next one"
        )
    if options.seed is not None:
        _check_item_seed(pool, options.seed, options.journal)
    check_choice("on_error", on_error, "raise", "return")
    if options.worker is not None:
        worker = options.worker
        if worker >= pool._size:
            raise OptionError(
                f"worker must be from 0 to {pool._size - 1} in this pool, not {worker}"
            )
    return options._replace(returns_errors=on_error != "raise", worker=worker, waits=waits)


def _check_item_seed(pool: PoolOfVerbs, seed: Any, journal: Any) -> None:
    if not pool._seeds_items:
        raise OptionError(
            f"seed={seed}: several workers of this {type(pool).__name__} may be threads of one "
            "process, whose random generators they share; leave it out, or use xpool.Pool"
        )
    if journal is not None:
        raise OptionError(
            "seed= cannot be combined with journal=, which finds results by the item alone; let "
            "the function make a generator from the item, and leave seed= out"
        )


def _check_callbacks(pool: PoolOfVerbs, callback: Any, error_callback: Any) -> None:
    if callback is not None:
        check_callable("callback", callback)
    if error_callback is not None:
        check_callable("error_callback", error_callback)
    if callback is not None or error_callback is not None:
        # The caller gets the error if the system refuses the thread.
        pool._jobs.callbacks.program.start()


# -- one call --------------------------------------------------------------------------------------


def submit_call(
    pool: PoolOfVerbs,
    func: Callable[..., Any],
    args: Iterable[Any],
    kwds: Mapping[str, Any] | None,
    options: TaskOptions,
    callback: Callable[[Any], object] | None = None,
    error_callback: Callable[[BaseException], object] | None = None,
) -> AsyncResult[Any]:
    """Submit ``func(*args, **kwds)``; return its result."""
    if pool._life.state is not PoolStates.RUN:
        pool._life.check_running()
    if type(func) is FunctionType and not func.__code__.co_flags & CO_ASYNC:
        name = f"{func.__qualname__}()"  # as `name_of`, to save its calls in loops of `apply`
    else:
        name = pool._submitter.name_of(func)
    if callback is not None or error_callback is not None:
        _check_callbacks(pool, callback, error_callback)
    if kwds and not hasattr(kwds, "keys"):
        raise TypeError(f"kwds must be a dict of keyword arguments, not {reprlib.repr(kwds)}")
    kwds = dict(kwds) if kwds else {}
    if type(args) is not tuple:
        args = check_args(func, args, kwds, pool._gives_context)
    job: AsyncResult[Any] = AsyncResult(
        next(pool._jobs.numbers), name, pool, callback, error_callback
    )
    job.options = options
    pool._start_call(pool, job, func, args, kwds)
    return job


@shielded
def start_call(
    pool: PoolOfVerbs, job: Job, func: Any, args: tuple[Any, ...], kwds: dict[str, Any]
) -> None:
    """Enter the job of one call, and submit its task."""
    if not pool._jobs.enter(job, 1):
        pool._life.check_running()  # raises
    try:
        if pool._files is not None:
            func = task_function(func, file=pool._files.of(job, job.label))
        pool._submitter.call(job, func, args, kwds)
    except BaseException as exc:
        pool._submitter.give_up(job, exc)


# -- many tasks, known at once ---------------------------------------------------------------------


def submit_map(
    pool: PoolOfVerbs,
    work: Work,
    iterable: Iterable[Any],
    chunksize: int | None,
    options: TaskOptions,
    callback: Callable[[list[Any]], object] | None = None,
    error_callback: Callable[[BaseException], object] | None = None,
) -> MapResult[Any]:
    """Submit a call for each item; return the result of all."""
    __tracebackhide__ = True
    pool._life.check_running()
    name = pool._submitter.name_of(work.func)
    _check_callbacks(pool, callback, error_callback)
    # Copy it, since a list may change while its items are pickled, and a subclass's iterator may
    # disagree with its length and slices.  Slices of a range stay ranges, which are cheap to send.
    check_can_iterate(iterable)
    kept = type(iterable) is range or type(iterable) is tuple
    items: Sequence[Any] = iterable if kept else list(iterable)  # type: ignore[assignment]
    if chunksize is None:
        chunksize = default_chunksize(len(items), pool._size)
    size = check_chunksize(chunksize)
    if options.returns_errors:
        size = 1
    tasks = -(-len(items) // size)
    job: MapResult[Any] = MapResult(
        next(pool._jobs.numbers), name, pool, tasks, size > 1, callback, error_callback
    )
    job.options, job.chunksize = options, size
    if options.progress is not False:
        length = len(items)
        job.progress = Progress(options.progress, job.label, length, size, lambda: length)
    _start_map(pool, job, Work(work.func, work.starred, size > 1), items, size)
    return job


@shielded
def _start_map(
    pool: PoolOfVerbs, job: MapResult[Any], work: Work, items: Sequence[Any], size: int
) -> None:
    pool._life.enter(job, -(-len(items) // size))
    try:
        work, numbered = begin_work(pool, job, work)
        if numbered:
            items = list(enumerate(items))
        if not items:
            # Without tasks, no answer completes the job.
            job.settled = True
            pool._jobs.complete(job)
            return
        chunks: Iterable[Any]
        if size >= len(items):
            chunks = (items if size > 1 else items[0],)
        elif size == 1:
            chunks = items
        else:
            chunks = (items[i : i + size] for i in range(0, len(items), size))
        pool._submitter.map(job, work, chunks)
    except BaseException as exc:
        pool._submitter.give_up(job, exc)


def map_now(
    pool: PoolOfVerbs,
    work: Work,
    iterable: Iterable[Any],
    chunksize: int | None,
    options: TaskOptions,
) -> list[Any]:
    """Submit a call for each item, unless a journal has its result; return all results."""
    __tracebackhide__ = True  # in notebooks and in pytest
    if options.journal is None:
        return submit_map(pool, work, iterable, chunksize, options).get()
    items = list(iterable)
    results: IMapIterator[Any] = imap(pool, IMapIterator, work, items, 1, None, options)
    values: list[Any] = []
    error: Exception | None = None
    for _ in items:
        try:
            values.append(results.next())
        except Exception as exc:
            if by_handler(exc):
                raise
            # Continue, so that the results of all other items are stored in the journal.
            error = error or exc
    next(results, None)  # the end of the stream: the journal is closed
    if error is not None:
        raise error
    return values


# -- streams ---------------------------------------------------------------------------------------


@shielded
def imap(
    pool: PoolOfVerbs,
    kind: type[It],
    work: Work,
    iterable: Iterable[Any],
    chunksize: int,
    buffersize: int | None,
    options: TaskOptions,
    with_index: bool = False,
    yields: bool = False,
) -> It:
    """Submit a call for each item while the input is drawn; return the iterator of results."""
    pool._life.check_running()
    name = pool._submitter.name_of(work.func)
    size = check_chunksize(chunksize)
    if yields is not False and check_flag("yields", yields) and size > 1:
        raise OptionError(
            "chunksize= says how many items a task has, and with yields=True each item has tasks "
            "of its own; leave one of them out"
        )
    if buffersize is not None:
        size = min(size, check_count("buffersize", buffersize))
    if options.returns_errors or options.journal is not None:
        size = 1
    check_can_iterate(iterable)
    # The caller's iterator, and the limits on drawing the input ahead of it.
    results = kind(name, pool, size > 1)
    flow = FlowControl(buffersize, pool._size, results.buffer)
    if buffersize is not None:
        results.taken = flow.handed_out
    else:
        results.opened = flow.handed_out
    results.total, results.returns_errors = _length(iterable), options.returns_errors
    results.items_per_task, results.with_index = size, with_index
    if yields:
        from xpool._pools import yielded  # imported here because few programs use it

        length, results.total = results.total, None
        yielded.begin(pool, results, work.func, iterable, buffersize, options, length)
        return results
    # Without a buffersize, all of the input is drawn even if the iterator is dropped.
    gone = flow.stop if buffersize is not None else flow.unbind
    number = next(pool._jobs.numbers)
    if options.journal is None:
        job = Stream(results, number, gone)
    else:
        from xpool._pools.journal import Journal, Recorded  # imports sqlite3

        beside = _inputs_of_workers(pool)
        journal = _call(Journal, options.journal, work.func, options.key, options.version, beside)
        job = Recorded(results, number, gone, journal, pool._jobs)
    results.cancelling, job.options, job.flow = (job, flow), options, flow
    if options.progress is not False:
        job.progress = results.progress = Progress(
            options.progress, job.label, results.total, size, lambda: flow.drawn
        )
    try:
        pool._life.enter(job, 0)
    except BaseException:
        job.release()  # ends the thread of a journal
        raise
    if size > 1:
        work = work._replace(chunked=True)
    _begin_stream(pool, job, work, iterable, size)
    return results


def _begin_stream(
    pool: PoolOfVerbs, job: Stream, work: Work, iterable: Iterable[Any], size: int
) -> None:
    """Begin to draw the input of an entered job.  Errors are raised by its results."""
    flow, jobs = job.flow, pool._jobs
    try:
        work, numbered = begin_work(pool, job, work)
        put, runs = pool._submitter.stream(job, work, flow)
        if numbered or job.options.journal is not None:
            runs = None
        put = job.around(_numbering(put, work.chunked, size) if numbered else put)
    except BaseException as exc:
        pool._submitter.give_up(job, exc)
        return
    # These do not hold the job: its weak reference shows a dropped iterator.
    fail, end = partial(jobs.deliver, job.number), partial(jobs.end_input, job.number)
    input_reader = InputReader(iterable, size, flow, put, runs, fail, end, pool.name)
    jobs.input_readers.add(input_reader)
    if pool._life.state is PoolStates.TERMINATE:
        flow.stop()  # the pool has ended since the job was entered
    try:
        input_reader.begin()
    except BaseException as exc:
        jobs.input_readers.discard(input_reader)
        pool._submitter.give_up(job, exc)
        raise


def _numbering(put: Put, chunked: bool, size: int) -> Put:
    """Return a ``put`` that gives each item of a task its number."""

    def put_numbered(index: int, task: Any) -> int:
        return put(index, list(zip(count(index * size), task)) if chunked else (index, task))

    return put_numbered


@interruptible
def _call(func: Callable[..., Any], *args: Any) -> Any:
    if pending:
        deliver()
    return func(*args)


def _inputs_of_workers(pool: PoolOfVerbs) -> dict[str, Any]:
    """Return the objects that results depend on besides function and item, by name."""
    found: dict[str, Any] = {}
    if pool.initializer is not None:
        found = {"the initializer": pool.initializer, "the initargs": pool.initargs}
    if pool._gives_context:
        # Contexts of `devices()` decide where a worker runs, and not its results.
        contexts = [
            context
            for context in pool._contexts or ()
            if not type(context).__module__.startswith("xpool.")
        ]
        found["the worker_contexts"] = contexts
    return found


def _length(iterable: Any) -> int | None:
    """Return ``len(iterable)``; None: it has none."""
    if not hasattr(type(iterable), "__len__"):
        return None
    try:
        return len(iterable)
    except Exception as exc:
        if by_handler(exc):
            raise
        return None
