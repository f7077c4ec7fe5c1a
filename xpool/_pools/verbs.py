"""How each verb becomes a job and its tasks.  Written once, for all pools."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, TypeVar

from xpool._calls.keywords import names_of, refuse_unknown
from xpool._calls.options import (
    Exceptions,
    TaskOptions,
    check_args,
    check_callable,
    check_can_iterate,
    check_chunksize,
    check_count,
    check_exceptions,
    check_on_error,
    check_progress,
    check_seconds,
    check_seed,
    default_chunksize,
    label,
)
from xpool._calls.progress import Progress
from xpool._calls.results import AsyncResult, Job, MapResult, Unopened
from xpool._calls.streams import IMapIterator, Stream
from xpool._engine.jobs.states import PoolStates
from xpool._pools.hooks import Hooks
from xpool._pools.input_reader import Fed, FlowControl, InputReader
from xpool._python.interrupt import by_handler, cut_short, deliver, interruptible, pending, shielded
from xpool._worker.callables import Item, Seeded, applied
from xpool.errors import OptionError, XPoolError

__all__ = ["PLAIN", "WAITING", "Verbs"]

It = TypeVar("It", bound=IMapIterator[Any])

PLAIN, WAITING = TaskOptions(), TaskOptions(waits=True)
"""Of calls without terms."""


class Verbs(Hooks):
    """What the verbs of `xpool._pools.public` do.  `BasePool` adds what this stands on."""

    name: str
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    _size: int
    _state: PoolStates
    _job_numbers: itertools.count[int]
    _input_readers: set[InputReader]
    # What was raised in the midst of the pool's own bookkeeping: it cannot go on.
    _bookkeeping_error: BaseException | None = None
    _task_timeout: float | None = None
    # Whether this pool knows when its workers begin a task, and can stop them.
    _keeps_terms = False
    # Whether each worker has random generators of its own.
    _seeds_items = False
    # The worker that a call goes to which names none; None: any, -1: the one with the least to do.
    _calls_go_to: int | None = None
    # Whether functions get their worker's context in front of their arguments.
    _gives_context = False

    # -- from verb to job --------------------------------------------------------------------------

    def _terms(
        self,
        worker: int | None,
        waits: bool,
        /,  # what follows is what people give by keyword
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        progress: Any = False,
        on_error: str = "raise",
        journal: Any = None,
        key: Any = None,
        version: Any = None,
        seed: int | None = None,
        **unknown: Any,
    ) -> TaskOptions:
        """Check what the verbs take by keyword: all of them, here."""
        if unknown:
            verb = sys._getframe(1).f_code
            refuse_unknown(verb.co_name, names_of(verb), unknown)
        timeout = self._task_timeout if timeout is None else check_seconds("timeout", timeout)
        if retries:
            check_count("retries", retries, least=0)
        on = check_exceptions("retry_on", retry_on) if retry_on else ()
        if on and not retries:
            raise OptionError("retry_on= says what is tried again, retries= how often: give it too")
        if (timeout is not None or retries or on) and not self._keeps_terms:
            raise OptionError(
                f"timeout= and retries= are not for {type(self).__name__}, whose workers are its "
                "own: only they could stop a task or run it again"
            )
        if progress is not False:
            check_progress(progress)
        if journal is None and (key is not None or version is not None):
            name = "version= is that of the function" if key is None else "key= names the items"
            raise OptionError(f"{name} of a journal: give journal= too")
        if version is not None and not isinstance(version, (str, int)):
            raise TypeError(f"version must be a str or an int, not {version!r}")
        if seed is not None:
            self._check_item_seed(seed, journal)
        returns = on_error != "raise" and check_on_error(on_error)
        return TaskOptions(
            retries, worker, waits, timeout, on, progress, returns, journal, key, version, seed
        )

    def _check_item_seed(self, seed: Any, journal: Any) -> None:
        check_seed(seed)
        if not self._seeds_items:
            raise OptionError(
                f"seed={seed}: several workers of this {type(self).__name__} may be threads of one "
                "process, whose random generators they share; leave it out, or use xpool.Pool"
            )
        if journal is not None:
            raise OptionError(
                "seed= does not go with journal=, which takes results by the item alone; have the "
                "function make a generator from the item, and leave seed= out"
            )

    def _call(
        self,
        func: Callable[..., Any],
        args: Iterable[Any],
        kwds: Mapping[str, Any] | None,
        callback: Callable[[Any], object] | None,
        error_callback: Callable[[BaseException], object] | None,
        terms: TaskOptions,
    ) -> AsyncResult[Any]:
        if self._state is not PoolStates.RUN:
            self._check_running()
        self._check_call(func, callback, error_callback)
        kwds = dict(kwds) if kwds else {}
        if type(args) is not tuple:
            args = check_args(func, args, kwds, self._gives_context)
        job: AsyncResult[Any] = AsyncResult(
            next(self._job_numbers), label(func), self, callback, error_callback
        )
        job.terms = terms
        self._start_call(job, func, args, kwds, terms)
        return job

    @shielded
    def _start_call(
        self,
        job: Job,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwds: dict[str, Any],
        terms: TaskOptions,
    ) -> None:
        self._enter(job, 1)
        try:
            self._submit_call(job, func, args, kwds, terms)
        except BaseException as exc:
            self._give_up(job, exc)

    def _map(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None,
        starred: bool,
        callback: Callable[[list[Any]], object] | None,
        error_callback: Callable[[BaseException], object] | None,
        terms: TaskOptions,
    ) -> MapResult[Any]:
        self._check_running()
        self._check_call(func, callback, error_callback)
        if terms.journal is not None:
            raise OptionError("journal= is for map, starmap, imap and imap_unordered")
        # Counted once and for all: a list may change while its items are pickled, and a subclass
        # may yield something else than its length and slices say.  Slices of a range stay ranges,
        # and cost nothing to send.
        kept = type(iterable) is range or type(iterable) is tuple
        items: Sequence[Any] = iterable if kept else list(iterable)  # type: ignore[assignment]
        if chunksize is None:
            chunksize = default_chunksize(len(items), self._size)
        size = check_chunksize(chunksize)
        if terms.returns_errors:
            size = 1
        tasks = -(-len(items) // size)
        number = next(self._job_numbers)
        job: MapResult[Any] = MapResult(
            number, label(func), self, tasks, size > 1, callback, error_callback
        )
        job.terms, job.chunksize = terms, size
        if terms.seed is not None:
            func, numbered, starred = _seeded(func, items, starred, terms.seed)
            items = list(numbered)
        if terms.progress is not False:
            length = len(items)
            job.progress = Progress(terms.progress, job.label, length, size, lambda: length)
        self._start_map(job, func, starred, items, size, terms)
        return job

    @shielded
    def _start_map(
        self,
        job: MapResult[Any],
        func: Callable[..., Any],
        starred: bool,
        items: Sequence[Any],
        size: int,
        terms: TaskOptions,
    ) -> None:
        self._enter(job, -(-len(items) // size))
        if size == 1:
            chunks: Iterable[Any] = items
        else:
            chunks = (items[i : i + size] for i in range(0, len(items), size))
        try:
            func = self._begin_progress(job, func)
            if not items:
                # There is no task whose answer would complete it.
                job.settled = True
                self._complete(job)
                return
            if size >= len(items):
                chunk = items if size > 1 else items[0]
                self._submit_only(job, func, starred, size > 1, chunk, terms)
            else:
                self._submit_each(job, func, starred, size > 1, chunks, terms)
        except BaseException as exc:
            self._give_up(job, exc)

    @shielded
    def _imap(
        self,
        kind: type[It],
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int,
        buffersize: int | None,
        terms: TaskOptions,
        starred: bool = False,
        with_index: bool = False,
    ) -> It:
        self._check_running()
        self._check_call(func, None, None)
        size = check_chunksize(chunksize)
        if buffersize is not None:
            size = min(size, check_count("buffersize", buffersize))
        if terms.returns_errors or terms.journal is not None:
            size = 1
        check_can_iterate(iterable)
        results = kind(label(func), self, size > 1)
        flow = FlowControl(buffersize, self._size, results.shelf)
        if buffersize is not None:
            results.taken, results.chunksize = flow.handed_out, size
        else:
            results.opened = flow.handed_out
        if isinstance(iterable, Fed):
            iterable.bind(flow)
        results.total, results.returns_errors = _length(iterable), terms.returns_errors
        results.items_per_task, results.with_index = size, with_index
        func, iterable, starred = _seeded(func, iterable, starred, terms.seed)
        # Without a buffersize all of the input is drawn, whether anybody listens or not.
        gone = flow.stop if buffersize is not None else flow.unbind
        job = self._stream(results, func, gone, terms)
        results.cancelling, job.terms, job.flow = (job, flow), terms, flow
        if terms.progress is not False:
            job.progress = results.progress = Progress(
                terms.progress, job.label, results.total, size, lambda: flow.drawn
            )
        try:
            self._enter(job, 0)
        except BaseException:
            job.release()  # ends the thread of a journal
            raise
        try:
            # From here on, what fails does so through the results.
            func = self._begin_progress(job, func)
            put = job.around(self._open_stream(job, func, starred, size > 1, flow, terms))
            runs = job.runs if terms.journal is None else None
        except BaseException as exc:
            self._give_up(job, exc)
            return results
        # The input reader may outlive the pool, and then must not keep it from going.
        ref, number = weakref.ref(self), job.number

        def fail(index: int, exc: BaseException | Unopened) -> None:
            pool = ref()
            if pool is not None:
                pool._deliver(number, index, False, exc)

        def end(length: int) -> None:
            pool = ref()
            if pool is not None:
                pool._end(number, length, input_reader)

        input_reader = InputReader(iterable, size, flow, put, runs, fail, end, self.name)
        self._input_readers.add(input_reader)
        if self._state is PoolStates.TERMINATE:
            flow.stop()  # since we entered the job; nobody else would
        try:
            input_reader.begin()
        except BaseException as exc:
            self._input_readers.discard(input_reader)
            self._give_up(job, exc)
            raise
        return results

    def _stream(
        self, results: IMapIterator[Any], func: Any, gone: Callable[[], None], terms: TaskOptions
    ) -> Stream:
        number = next(self._job_numbers)
        if terms.journal is None:
            return Stream(results, number, gone)
        from xpool._pools.journal import Recorded, Stored  # sqlite3: few programs need it

        ref = weakref.ref(self)

        def found(index: int, value: Stored) -> None:
            pool = ref()
            if pool is not None:
                pool._deliver(number, index, True, value)

        def hand_on(index: int, ok: bool, value: Any) -> None:
            pool = ref()
            if pool is not None:
                pool._record(number, index, ok, value)

        def fail_all(exc: BaseException) -> None:
            pool, job = ref(), job_ref()
            if pool is not None and job is not None:
                pool._fail_jobs([job], exc)

        journal = self._open_journal(func, terms)
        job = Recorded(results, number, gone, journal, found, hand_on, fail_all)
        job_ref = weakref.ref(job)
        return job

    @interruptible
    def _open_journal(self, func: Any, terms: TaskOptions) -> Any:
        from xpool._pools.journal import Journal

        if pending:
            deliver()
        return Journal(terms.journal, func, terms.key, terms.version, self._inputs_of_workers())

    def _inputs_of_workers(self) -> dict[str, Any]:
        """What results depend on besides the function and its items, by its name for people."""
        found: dict[str, Any] = {}
        if self.initializer is not None:
            found = {"the initializer": self.initializer, "the initargs": self.initargs}
        if self._gives_context:
            # Those of `devices()` say where a worker runs.
            contexts = [
                context
                for context in getattr(self, "_contexts", ())
                if not type(context).__module__.startswith("xpool.")
            ]
            found["the worker_contexts"] = contexts
        return found

    def _map_recorded(
        self, func: Any, iterable: Iterable[Any], terms: TaskOptions, starred: bool
    ) -> list[Any]:
        """As `map`, by way of an iterator whose results are written down."""
        items = list(iterable)
        results: IMapIterator[Any] = self._imap(IMapIterator, func, items, 1, None, terms, starred)
        values: list[Any] = []
        error: Exception | None = None
        for _ in items:
            try:
                values.append(results.next())
            except Exception as exc:
                if by_handler(exc):
                    raise
                # The rest is taken all the same, so that the whole input is run and written down.
                error = error or exc
        if error is not None:
            raise error
        return values

    def _give_up(self, job: Job, exc: BaseException) -> None:
        """What could not be sent fails through its result; what a signal raised, here and now."""
        try:
            self._withdraw(job)
            self._fail_jobs([job], exc)
            torn = cut_short(exc) and not isinstance(exc, XPoolError)
        except BaseException:  # as the first: there is no stack left, for one
            torn = True
        if torn:
            # The engine's thread ends the pool, at the latest when something else wakes it.
            self._bookkeeping_error = exc
            self._wake()
        if torn or not isinstance(exc, Exception) or by_handler(exc):
            raise exc

    def _withdraw(self, job: Job) -> None:
        """Take back what was submitted of a job, where that can be done."""

    def _runs(self, job: Job) -> bool:
        """Whether a worker is in a task of this job now; False where that cannot be known."""
        return False

    def _check_call(self, func: Any, callback: Any, error_callback: Any) -> None:
        if not callable(func):
            check_callable("func", func)
        if callback is not None:
            check_callable("callback", callback)
        if error_callback is not None:
            check_callable("error_callback", error_callback)

    # -- from job to tasks: by the hooks; the process pools have shortcuts -------------------------

    @interruptible
    def _submit_call(
        self,
        job: Job,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwds: dict[str, Any],
        terms: TaskOptions,
    ) -> None:
        if pending:
            deliver()
        self.pool_inqueue_put((job.number, 0, func, args, kwds))

    @interruptible
    def _submit_each(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        chunks: Iterable[Any],
        terms: TaskOptions,
    ) -> None:
        for i, chunk in enumerate(chunks):
            try:
                if pending:
                    deliver()
                self.pool_inqueue_put(_task(job.number, i, func, starred, chunked, chunk))
            except Exception as exc:
                if by_handler(exc):
                    raise
                self._deliver(job.number, i, False, exc)

    def _begin_progress(self, job: Job, func: Callable[..., Any]) -> Callable[..., Any]:
        """Show the job's progress, if it is to be; return what the workers call for it."""
        if job.progress is None:
            return func
        beside_bar = job.progress.on_terminal
        job.progress.begin()
        return self._beside_bar(func) if beside_bar else func

    def _beside_bar(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs a function whose workers share the terminal of a bar with it."""
        return func

    def _submit_only(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        chunk: Any,
        terms: TaskOptions,
    ) -> None:
        """As `_submit_each`, for a map that is a single task."""
        self._submit_each(job, func, starred, chunked, (chunk,), terms)

    def _open_stream(
        self,
        job: Job,
        func: Callable[..., Any],
        starred: bool,
        chunked: bool,
        flow: FlowControl,
        terms: TaskOptions,
    ) -> Callable[[int, Any], int]:
        """Return what the input reader calls with each task; it must not hold the pool.

        Where it has another way for items that are there at once, it sets the job's ``runs``.
        """
        assert isinstance(job, Stream)
        job.answers = flow.answered  # the hooks do not tell when a worker takes a task
        ref = weakref.ref(self)
        number = job.number

        def put(index: int, task: Any) -> int:
            pool = ref()
            if pool is None or pool._state is PoolStates.TERMINATE:
                flow.stop()
            else:
                # Before it is put: a pool of threads may answer it at once.
                flow.added(0)
                pool.pool_inqueue_put(_task(number, index, func, starred, chunked, task))
            return 0

        return put

    # -- what `BasePool` defines -------------------------------------------------------------------

    if TYPE_CHECKING:

        def _check_running(self) -> None: ...

        def _wake(self) -> None: ...

        def _enter(self, job: Job, tasks: int) -> None: ...

        def _deliver(self, number: int, index: int, ok: bool, value: Any) -> None: ...

        def _record(self, number: int, index: int, ok: bool, value: Any) -> None: ...

        def _end(self, number: int, length: int, input_reader: InputReader) -> None: ...

        def _complete(self, job: Job) -> None: ...

        def _fail_jobs(
            self, jobs: Iterable[Job], exc: BaseException, call_back: bool = True
        ) -> int: ...


def _task(
    number: int, index: int, func: Callable[..., Any], starred: bool, chunked: bool, chunk: Any
) -> tuple[int, int, Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the tuple for one task of a map."""
    call, before = applied(func, starred, chunked)
    return number, index, call, (*before, chunk), {}


def _seeded(
    func: Callable[..., Any], items: Iterable[Any], starred: bool, seed: int | None
) -> tuple[Callable[..., Any], Iterable[Any], bool]:
    """Return function and items of a map whose items have random numbers of their own."""
    if seed is None:
        return func, items, starred
    return Seeded(func, seed, starred), starmap(Item, enumerate(items)), False


def _length(iterable: Any) -> int | None:
    """Return ``len(iterable)``; None: it has none, or does not say."""
    if not hasattr(type(iterable), "__len__"):
        return None
    try:
        return len(iterable)
    except Exception as exc:
        if by_handler(exc):
            raise
        return None
