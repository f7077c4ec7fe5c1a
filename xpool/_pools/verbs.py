"""The verbs of all pools, and their implementation: check the arguments, make a job, submit it."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from xpool._calls.options import (
    OF_TERMS,
    JournalOptions,
    ManyOptions,
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
    takes_keywords,
)
from xpool._calls.progress import Progress
from xpool._calls.results import AsyncResult, Job, MapResult
from xpool._calls.streams import IMapIterator, IMapUnorderedIterator, Stream
from xpool._engine.jobs.states import PoolStates
from xpool._pools.input_reader import FlowControl, InputReader, length_of
from xpool._pools.job_table import JobTable
from xpool._pools.lifecycle import Lifecycle
from xpool._pools.submitters import CO_ASYNC, HookSubmitter, Work, begin_work, numbering
from xpool._python.interrupt import interruptibly, pass_on, shielded
from xpool._worker.callables import task_function
from xpool.errors import OptionError

if TYPE_CHECKING:
    from typing import Generic, TypeAlias

    from typing_extensions import TypeVarTuple, Unpack

    from xpool._worker.task_output import TaskFiles

    Cs = TypeVarTuple("Cs", default=Unpack[tuple[()]])  # arguments of a function before the item
    AnyVerbs: TypeAlias = "PublicVerbs[Unpack[tuple[Any, ...]]]"
else:
    # At run time nothing is generic: Python 3.10 has no `TypeVarTuple`.
    Generic, Unpack, Cs = {None: object}, {None: None}, None

S = TypeVar("S")
T = TypeVar("T")
It = TypeVar("It", bound=IMapIterator[Any])

PLAIN, WAITING = TaskOptions(), TaskOptions(waits=True)
"""The options of calls without keywords; WAITING: the caller waits for the result."""


@shielded
def start_call(
    pool: AnyVerbs, job: Job, func: Any, args: tuple[Any, ...], kwds: dict[str, Any]
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


class PublicVerbs(Generic[Unpack[Cs]]):
    """The verbs of `multiprocessing.pool.Pool`, with xpool's additions.

    For type checkers, a pool whose functions get a context of type C first is a `PublicVerbs[C]`.
    """

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters):
            return cls

    # Attributes of their pool that the functions below use.
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
    _start_call = staticmethod(start_call)
    # The worker for calls that name none; None: any, -1: the one with the least to do.
    _calls_go_to: int | None = None
    # Whether the first argument of functions is their worker's context; and the contexts.
    _gives_context = False
    _contexts: list[Any] | None = None

    @takes_keywords(OneCallOptions)
    def apply(
        self,
        func: Callable[..., T],
        args: Iterable[object] = (),
        kwds: Mapping[str, object] | None = None,
        **keywords: Unpack[OneCallOptions],
    ) -> T:
        """Call ``func(*args, **kwds)`` in a worker; wait for the result and return it.

        All verbs that start tasks have these keywords:

        * ``timeout``: seconds that each call of ``func`` may run in a worker; after that, the call
          is stopped and its task fails with `TaskTimeout`.  None: the pool's ``task_timeout``;
          infinity: no limit.
        * ``retries``: how often the task may run again when its worker dies, or when it raises
          one of the exceptions ``retry_on`` (a class or a tuple of classes), after a pause.
        * ``priority``: a real number.  Of the tasks that wait for a worker, those with the highest
          priority are next, and of several, the oldest.  A running task is not interrupted.

        `apply` and `apply_async` of a `P2PPool` have ``worker``, too: the index of the worker.

        Raises:
            Exception: what ``func`` raised.
            WorkerDied, TaskTimeout: its worker died; it took longer than ``timeout``.
            PoolClosed: the pool takes no more work.
        """
        options = WAITING
        if keywords or self._task_timeout is not None or self._calls_go_to is not None:
            options = options_of(self, OneCallOptions, keywords, True)
        value: T = submit_call(self, func, args, kwds, options)
        return value

    @takes_keywords(OneCallOptions)
    def apply_async(
        self,
        func: Callable[..., T],
        args: Iterable[object] = (),
        kwds: Mapping[str, object] | None = None,
        callback: Callable[[T], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        **keywords: Unpack[OneCallOptions],
    ) -> AsyncResult[T]:
        """Submit ``func(*args, **kwds)``; return its `AsyncResult` at once.

        When the call has ended, ``callback(value)`` or ``error_callback(exception)`` runs in a
        thread of the pool, before `get` returns.  It may block and submit tasks.

        Raises:
            PoolClosed: the pool takes no more work.
        """
        options = PLAIN
        if keywords or self._task_timeout is not None or self._calls_go_to is not None:
            options = options_of(self, OneCallOptions, keywords, False)
        result: AsyncResult[T]
        result = submit_call(self, func, args, kwds, options, callback, error_callback)
        return result

    @overload
    def map(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S],
        chunksize: int | None = None, *, on_error: Literal["raise"] = "raise",
        **options: Unpack[JournalOptions],
    ) -> list[T]: ...  # fmt: skip

    @overload
    def map(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S],
        chunksize: int | None = None, *, on_error: Literal["return"],
        **options: Unpack[JournalOptions],
    ) -> list[T | BaseException]: ...  # fmt: skip

    @takes_keywords(JournalOptions)
    def map(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None,
        *, on_error: str = "raise", **keywords: Unpack[JournalOptions],
    ) -> list[Any]:  # fmt: skip
        """Return ``[func(x) for x in iterable]``, computed by the workers, in order.

        A task is a chunk of ``chunksize`` items, by default about four chunks for each worker.
        If a task fails, its error is raised after all tasks have been answered.

        Args:
            timeout: seconds that each call of ``func`` may run in a worker.  After that, the call
                is stopped, and its task fails with `TaskTimeout`.  None: the pool's
                ``task_timeout``; infinity: no limit.
            retries: how often a task runs again when its worker dies, or when it raises one of
                ``retry_on`` (an exception class or a tuple of them), after a pause.
            priority: a real number.  Of the tasks that wait for a worker, those with the highest
                priority are next, and of several, the oldest.  A running task is not interrupted.
            progress: True or a title shows how many items are done, by tqdm or rich if one is
                installed, else on stderr.  A callable is called with the number of finished items
                and the number of all items (None: the input has no length), at most ten times a
                second, in a thread of its own.
            on_error: "raise", or "return": the exception of an item is returned in place of its
                result, and each item is a task.
            seed: an int.  Before each item, its worker seeds the generators of `random`, numpy and
                torch from this and the item's number.  Not for threads.
            journal: path of an SQLite database.  Results are written there before the caller gets
                them, and an item whose result is there does not run again.  Each item is a task.
            key: a function that returns the name of an item in the journal, a str, bytes or an int;
                None: the name is a digest of the item's value.
            version: a str or an int that identifies, with the name of ``func``, the computation.
                None: the code of ``func``, the code of the program's functions that it calls, and
                the values that they use must be unchanged.

        Raises:
            Exception: what a task raised; of several errors, the first that arrived.
            WorkerDied, TaskTimeout: a worker died in a task; a task took longer than ``timeout``.
            PoolClosed: the pool takes no more work.
            OptionError: the journal belongs to another function, or to an earlier version.
            sqlite3.Error: the journal cannot be opened or written.
        """
        options = options_of(self, JournalOptions, keywords, True, on_error)
        return map_now(self, Work(func), iterable, chunksize, options)

    @overload
    def map_async(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S],
        chunksize: int | None = None, callback: Callable[[list[T]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None, *,
        on_error: Literal["raise"] = "raise", **options: Unpack[ManyOptions],
    ) -> MapResult[T]: ...  # fmt: skip

    @overload
    def map_async(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S],
        chunksize: int | None = None,
        callback: Callable[[list[T | BaseException]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None, *,
        on_error: Literal["return"], **options: Unpack[ManyOptions],
    ) -> MapResult[T | BaseException]: ...  # fmt: skip

    @takes_keywords(ManyOptions)
    def map_async(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None,
        callback: Callable[[list[Any]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *, on_error: str = "raise", **keywords: Unpack[ManyOptions],
    ) -> MapResult[Any]:  # fmt: skip
        """Submit ``func(x)`` for each item; return a `MapResult` at once.

        A task is a chunk of ``chunksize`` items, by default about four chunks for each worker.
        ``callback(values)`` or ``error_callback(exception)`` runs in a thread of the pool.

        The keywords are those of `map`, without those of a journal.

        Raises:
            PoolClosed: the pool takes no more work.
        """
        options = options_of(self, ManyOptions, keywords, False, on_error)
        work = Work(func)
        result: MapResult[Any]
        result = submit_map(self, work, iterable, chunksize, options, callback, error_callback)
        return result

    @overload
    def starmap(
        self, func: Callable[..., T], iterable: Iterable[Iterable[object]],
        chunksize: int | None = None, *, on_error: Literal["raise"] = "raise",
        **options: Unpack[JournalOptions],
    ) -> list[T]: ...  # fmt: skip

    @overload
    def starmap(
        self, func: Callable[..., T], iterable: Iterable[Iterable[object]],
        chunksize: int | None = None, *, on_error: Literal["return"],
        **options: Unpack[JournalOptions],
    ) -> list[T | BaseException]: ...  # fmt: skip

    @takes_keywords(JournalOptions)
    def starmap(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[object]],
        chunksize: int | None = None, *, on_error: str = "raise",
        **keywords: Unpack[JournalOptions],
    ) -> list[Any]:  # fmt: skip
        """Return ``[func(*args) for args in iterable]``, computed by the workers, in order.

        A task is a chunk of ``chunksize`` items, by default about four chunks for each worker.

        The keywords are those of `map`.

        Raises:
            Exception: what a task raised; of several errors, the first that arrived.
            WorkerDied, TaskTimeout: a worker died in a task; a task took longer than ``timeout``.
            PoolClosed: the pool takes no more work.
        """
        options = options_of(self, JournalOptions, keywords, True, on_error)
        return map_now(self, Work(func, starred=True), iterable, chunksize, options)

    @overload
    def starmap_async(
        self, func: Callable[..., T], iterable: Iterable[Iterable[object]],
        chunksize: int | None = None, callback: Callable[[list[T]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None, *,
        on_error: Literal["raise"] = "raise", **options: Unpack[ManyOptions],
    ) -> MapResult[T]: ...  # fmt: skip

    @overload
    def starmap_async(
        self, func: Callable[..., T], iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        callback: Callable[[list[T | BaseException]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None, *,
        on_error: Literal["return"], **options: Unpack[ManyOptions],
    ) -> MapResult[T | BaseException]: ...  # fmt: skip

    @takes_keywords(ManyOptions)
    def starmap_async(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[object]],
        chunksize: int | None = None, callback: Callable[[list[Any]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *, on_error: str = "raise", **keywords: Unpack[ManyOptions],
    ) -> MapResult[Any]:  # fmt: skip
        """Submit ``func(*args)`` for each ``args``; return a `MapResult` at once.

        A task is a chunk of ``chunksize`` items, by default about four chunks for each worker.
        ``callback(values)`` or ``error_callback(exception)`` runs in a thread of the pool.

        The keywords are those of `map`, without those of a journal.

        Raises:
            PoolClosed: the pool takes no more work.
        """
        options = options_of(self, ManyOptions, keywords, False, on_error)
        work = Work(func, starred=True)
        result: MapResult[Any]
        result = submit_map(self, work, iterable, chunksize, options, callback, error_callback)
        return result

    @overload
    def imap(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S], chunksize: int = 1,
        buffersize: int | None = None, *, on_error: Literal["raise"] = "raise",
        yields: Literal[False] = False, **options: Unpack[JournalOptions],
    ) -> IMapIterator[T]: ...  # fmt: skip

    @overload
    def imap(
        self, func: Callable[[Unpack[Cs], S], Iterable[T]], iterable: Iterable[S],
        chunksize: int = 1, buffersize: int | None = None, *, on_error: Literal["raise"] = "raise",
        yields: Literal[True], **options: Unpack[JournalOptions],
    ) -> IMapIterator[T]: ...  # fmt: skip

    @overload
    def imap(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S], chunksize: int = 1,
        buffersize: int | None = None, *, on_error: Literal["return"],
        yields: Literal[False] = False, **options: Unpack[JournalOptions],
    ) -> IMapIterator[T | BaseException]: ...  # fmt: skip

    @overload
    def imap(
        self, func: Callable[[Unpack[Cs], S], Iterable[T]], iterable: Iterable[S],
        chunksize: int = 1, buffersize: int | None = None, *, on_error: Literal["return"],
        yields: Literal[True], **options: Unpack[JournalOptions],
    ) -> IMapIterator[T | BaseException]: ...  # fmt: skip

    @takes_keywords(JournalOptions)
    def imap(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int = 1,
        buffersize: int | None = None, *, on_error: str = "raise", yields: bool = False,
        **keywords: Unpack[JournalOptions],
    ) -> IMapIterator[Any]:  # fmt: skip
        """Return an iterator over the results, in order, while the input is still drawn.

        With a ``buffersize``, at most so many items (not chunks) are drawn ahead of the consumer.
        Then `join` waits for the consumer, and no more items are drawn after the iterator was
        dropped or cancelled.

        Without a ``buffersize``, as many items are drawn as the workers need, while the untaken
        results use less than a sixteenth of the machine's free memory, or 64 MiB if that is more.
        A result counts with its size and 256 bytes.  If the iterator is dropped, or a thread waits
        in `join`, the rest of the input is still drawn and run.

        The iterator has the ``len()`` of the input, if that has one.

        Args:
            yields: True: ``func`` returns a generator, which runs in a worker, and the iterator
                gives its values as they are made: all of the first item, then of the second.
                ``buffersize`` and the limit on memory are for values, not items.  ``timeout`` is
                for each value.  With ``retries``, a generator begins again, and the values that
                have come are skipped.  If the iterator is closed, cancelled or dropped, the
                generators are closed.
            All other keywords: as in `map`.

        Raises:
            PoolClosed: the pool takes no more work.
            OptionError: the journal belongs to another function, or to an earlier version; the
                pool or an option is not for generators.
        """
        options = options_of(self, JournalOptions, keywords, False, on_error)
        kind, work = IMapIterator, Work(func)
        return imap(self, kind, work, iterable, chunksize, buffersize, options, yields=yields)

    @overload
    def imap_unordered(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S], chunksize: int = 1,
        buffersize: int | None = None, *, with_index: Literal[False] = False,
        on_error: Literal["raise"] = "raise", yields: Literal[False] = False,
        **options: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[T]: ...  # fmt: skip

    @overload
    def imap_unordered(
        self, func: Callable[[Unpack[Cs], S], Iterable[T]], iterable: Iterable[S],
        chunksize: int = 1, buffersize: int | None = None, *, with_index: Literal[False] = False,
        on_error: Literal["raise"] = "raise", yields: Literal[True],
        **options: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[T]: ...  # fmt: skip

    @overload
    def imap_unordered(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S], chunksize: int = 1,
        buffersize: int | None = None, *, with_index: Literal[False] = False,
        on_error: Literal["return"], yields: Literal[False] = False,
        **options: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[T | BaseException]: ...  # fmt: skip

    @overload
    def imap_unordered(
        self, func: Callable[[Unpack[Cs], S], Iterable[T]], iterable: Iterable[S],
        chunksize: int = 1, buffersize: int | None = None, *, with_index: Literal[False] = False,
        on_error: Literal["return"], yields: Literal[True], **options: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[T | BaseException]: ...  # fmt: skip

    @overload
    def imap_unordered(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S], chunksize: int = 1,
        buffersize: int | None = None, *, with_index: Literal[True],
        on_error: Literal["raise"] = "raise", yields: Literal[False] = False,
        **options: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[tuple[int, T]]: ...  # fmt: skip

    @overload
    def imap_unordered(
        self, func: Callable[[Unpack[Cs], S], Iterable[T]], iterable: Iterable[S],
        chunksize: int = 1, buffersize: int | None = None, *, with_index: Literal[True],
        on_error: Literal["raise"] = "raise", yields: Literal[True],
        **options: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[tuple[int, T]]: ...  # fmt: skip

    @overload
    def imap_unordered(
        self, func: Callable[[Unpack[Cs], S], T], iterable: Iterable[S], chunksize: int = 1,
        buffersize: int | None = None, *, with_index: Literal[True], on_error: Literal["return"],
        yields: Literal[False] = False, **options: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[tuple[int, T | BaseException]]: ...  # fmt: skip

    @overload
    def imap_unordered(
        self, func: Callable[[Unpack[Cs], S], Iterable[T]], iterable: Iterable[S],
        chunksize: int = 1, buffersize: int | None = None, *, with_index: Literal[True],
        on_error: Literal["return"], yields: Literal[True], **options: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[tuple[int, T | BaseException]]: ...  # fmt: skip

    @takes_keywords(JournalOptions)
    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int = 1,
        buffersize: int | None = None, *, on_error: str = "raise", with_index: bool = False,
        yields: bool = False, **keywords: Unpack[JournalOptions],
    ) -> IMapUnorderedIterator[Any]:  # fmt: skip
        """Return an iterator over the results in the order in which they arrive.

        Args:
            buffersize: as in `imap`.
            with_index: True: an item of the iterator is ``(index, result)``, where ``index`` is the
                position in ``iterable``, from 0 on.
            yields: as in `imap`, with the values of all generators as they come.
            All other keywords: as in `map`.

        Raises:
            PoolClosed: the pool takes no more work.
            OptionError: the journal belongs to another function, or to an earlier version.
        """
        options = options_of(self, JournalOptions, keywords, False, on_error)
        kind, work = IMapUnorderedIterator, Work(func)
        return imap(self, kind, work, iterable, chunksize, buffersize, options, with_index, yields)


def options_of(
    pool: AnyVerbs,
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


def _check_item_seed(pool: AnyVerbs, seed: Any, journal: Any) -> None:
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


def _check_callbacks(pool: AnyVerbs, callback: Any, error_callback: Any) -> None:
    if callback is not None:
        check_callable("callback", callback)
    if error_callback is not None:
        check_callable("error_callback", error_callback)
    if callback is not None or error_callback is not None:
        # The caller gets the error if the system refuses the thread.
        pool._jobs.callbacks.program.start()


# -- one call --------------------------------------------------------------------------------------


def submit_call(
    pool: AnyVerbs,
    func: Callable[..., Any],
    args: Iterable[Any],
    kwds: Mapping[str, Any] | None,
    options: TaskOptions,
    callback: Callable[[Any], object] | None = None,
    error_callback: Callable[[BaseException], object] | None = None,
    kind: type[AsyncResult[Any]] = AsyncResult,
) -> Any:
    """Submit ``func(*args, **kwds)``; return its result, a ``kind``, or wait for its value."""
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
    job = kind(next(pool._jobs.numbers), name, pool, callback, error_callback)
    job.options = options
    try:
        pool._start_call(pool, job, func, args, kwds)
        return job.get() if options.waits else job
    except BaseException:
        __tracebackhide__ = True
        _end_wait(pool, job)
        raise
    finally:
        del job  # an error's traceback keeps this frame, and the job has the error


# -- many tasks, known at once ---------------------------------------------------------------------


def submit_map(
    pool: AnyVerbs,
    work: Work,
    iterable: Iterable[Any],
    chunksize: int | None,
    options: TaskOptions,
    callback: Callable[[list[Any]], object] | None = None,
    error_callback: Callable[[BaseException], object] | None = None,
) -> Any:
    """Submit a call for each item; return the result of all, or wait for their values."""
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
    try:
        _start_map(pool, job, Work(work.func, work.starred, size > 1), items, size)
        return job.get() if options.waits else job
    except BaseException:
        _end_wait(pool, job)
        raise
    finally:
        del job  # as in `submit_call`


@shielded
def _start_map(
    pool: AnyVerbs, job: MapResult[Any], work: Work, items: Sequence[Any], size: int
) -> None:
    pool._life.enter(job, -(-len(items) // size))
    try:
        work, numbered = begin_work(pool, job, work)
        if numbered:
            items = list(enumerate(items))
        if not items:
            # Without tasks, no answer completes the job.
            pool._jobs.advance(job.number, MapResult.settle)
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
    pool: AnyVerbs,
    work: Work,
    iterable: Iterable[Any],
    chunksize: int | None,
    options: TaskOptions,
) -> list[Any]:
    """Submit a call for each item, unless a journal has its result; return all results."""
    __tracebackhide__ = True  # in notebooks and in pytest
    if options.journal is None:
        values: list[Any] = submit_map(pool, work, iterable, chunksize, options)
        return values
    return _map_in_journal(pool, work, list(iterable), options)


@shielded  # else a signal handler could raise when `imap` has returned
def _map_in_journal(pool: AnyVerbs, work: Work, items: Any, options: TaskOptions) -> list[Any]:
    __tracebackhide__ = True
    results: IMapIterator[Any] = imap(pool, IMapIterator, work, items, 1, None, options)
    values: list[Any] = []
    error: Exception | None = None
    try:
        for _ in items:
            try:
                values.append(interruptibly(results.next))
            except Exception as exc:
                pass_on(exc)
                # Continue, so that the results of all other items are stored in the journal.
                error = error or exc
        interruptibly(next, results, None)  # the end of the stream: the journal is closed
    except BaseException:
        results.cancel()
        raise
    if error is not None:
        raise error
    return values


def _end_wait(pool: AnyVerbs, result: AsyncResult[Any]) -> None:
    """Cancel a call if an exception other than its answer has ended its submission or the wait: as
    nobody has its result, its tasks would only keep the workers from the next call."""
    if result.number in pool._jobs.unanswered and not (result.settled or pool._life.runs_here()):
        result.cancel()


# -- streams ---------------------------------------------------------------------------------------


@shielded
def imap(
    pool: AnyVerbs,
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
    results.total, results.returns_errors = length_of(iterable), options.returns_errors
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
        from xpool._pools.journal import Journal, Recorded, inputs_of_workers  # imports sqlite3

        beside = inputs_of_workers(pool)
        about = options.journal, work.func, options.key, options.version, beside
        journal = interruptibly(Journal, *about)
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
    pool: AnyVerbs, job: Stream, work: Work, iterable: Iterable[Any], size: int
) -> None:
    """Begin to draw the input of an entered job.  Errors are raised by its results."""
    flow, jobs = job.flow, pool._jobs
    try:
        work, numbered = begin_work(pool, job, work)
        put, runs = pool._submitter.stream(job, work, flow)
        if numbered or job.options.journal is not None:
            runs = None
        put = job.around(numbering(put, work.chunked, size) if numbered else put)
    except BaseException as exc:
        pool._submitter.give_up(job, exc)
        return
    # These do not hold the job: its weak reference shows a dropped iterator.
    fail, end = partial(jobs.deliver, job.number), partial(jobs.end_input, job.number)
    InputReader(iterable, size, flow, put, runs, fail, end, pool.name).begin(pool, job)
