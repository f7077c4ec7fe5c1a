"""The verbs as people call them: their signatures, types and help.

`xpool._pools.verbs` has what they do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from xpool._calls.keywords import names_of, refuse_unknown
from xpool._calls.options import (
    MANY_HELP,
    Exceptions,
    ManyOptions,
    ProgressOption,
    resolve_processes,
)
from xpool._calls.results import AsyncResult, MapResult
from xpool._calls.streams import IMapIterator, IMapUnorderedIterator
from xpool._pools.verbs import PLAIN, WAITING, Verbs
from xpool._python.interrupt import shielded
from xpool.errors import OptionError

if TYPE_CHECKING:
    import concurrent.futures

    from typing_extensions import Never, Unpack

    from xpool._pools.futures import PoolExecutor, PoolOfFutures
    from xpool._pools.observing import ObservedPool, Report

__all__ = ["PublicVerbs"]

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class PublicVerbs(Verbs):
    """The verbs of `multiprocessing.pool.Pool`, with what xpool adds to each."""

    _fixed_size = ""  # why there cannot be more workers, or fewer

    def submit(
        self: PoolOfFutures, func: Callable[P, T], /, *args: P.args, **kwds: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Have ``func(*args, **kwds)`` called in a worker; return a future of `concurrent.futures`.

        Callbacks of the future run in a thread of the pool, one after the other.  When the pool
        ends first, the future fails with `concurrent.futures.BrokenExecutor`, whose cause says why.
        `apply_async` has ``timeout=`` and ``retries=``.

        Raises:
            PoolClosed: the pool takes no more work.
        """
        from xpool._pools.futures import submit  # here: few programs need it

        return submit(self, func, args, kwds)

    def executor(self: PoolOfFutures) -> PoolExecutor:
        """Return a `concurrent.futures.Executor` over this pool; its `shutdown` leaves it open."""
        from xpool._pools.futures import PoolExecutor  # here: few programs need it

        return PoolExecutor(self)

    @shielded
    def report(self: ObservedPool) -> Report:
        """Return what was done so far: by each worker, bytes, the slowest tasks, deaths, retries.

        ``print(pool.report())`` shows it as a table.  Of workers and tasks one by one only pools
        of processes know.
        """
        from xpool._pools.observing import report_of  # here: few programs need it

        return report_of(self)

    def trace(self: ObservedPool, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Return a context in which what happens is written to ``path``, at its end.

        A name that ends in ``.html`` makes a page that any browser shows; else Chrome trace events
        in JSON, for Perfetto and ``about:tracing``.  Both have a row for each worker, with its
        tasks, deaths and retries.  Tasks of less than a millisecond are shown several at a time.

        Raises:
            OptionError: a trace of this pool is being written, or its workers are threads.
            OSError: there can be no such file.
        """
        from xpool._pools.observing import trace

        return trace(self, path)

    def watch(self: ObservedPool) -> AbstractContextManager[None]:
        """Return a context in which `report` is shown on the terminal, live.

        Raises:
            ImportError: rich is not installed (``pip install xpool[progress]``).
        """
        from xpool._pools.observing import watch

        return watch(self)

    def apply(
        self,
        func: Callable[..., T],
        args: Iterable[object] = (),
        kwds: Mapping[str, object] | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        **unknown: Never,
    ) -> T:
        """Call ``func(*args, **kwds)`` in a worker; wait for the result and return it.

        Of all verbs that start work:

        * ``timeout``: seconds that each call of ``func`` may take, from when a worker begins it;
          then it is stopped and its task fails with `TaskTimeout`.  None: the pool's
          ``task_timeout``; infinity: any time.
        * ``retries``: how often the task may run again when its worker dies, or when it raises
          one of the exceptions ``retry_on`` (a class or a tuple of classes), after a pause.

        Raises:
            Exception: what ``func`` raised.
            WorkerDied, TaskTimeout: its worker died; it took longer than ``timeout``.
            PoolClosed: the pool takes no more work.
        """
        if unknown:
            refuse_unknown("apply", names_of(PublicVerbs.apply.__code__), unknown)
        terms = WAITING
        if timeout is not None or retries or retry_on or self._task_timeout is not None:
            terms = self._terms(None, True, timeout, retries, retry_on)
        value: T = self._call(func, args, kwds, None, None, terms).get()
        return value

    def apply_async(
        self,
        func: Callable[..., T],
        args: Iterable[object] = (),
        kwds: Mapping[str, object] | None = None,
        callback: Callable[[T], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        **unknown: Never,
    ) -> AsyncResult[T]:
        """Have ``func(*args, **kwds)`` called in a worker; return its result to come.

        ``callback(value)`` or ``error_callback(exception)`` is called when it is there, before
        `get` returns, in a thread of the pool in which it may block and submit more.

        Raises:
            PoolClosed: the pool takes no more work.
        """
        if unknown:
            refuse_unknown("apply_async", names_of(PublicVerbs.apply_async.__code__), unknown)
        terms = PLAIN
        if timeout is not None or retries or retry_on or self._task_timeout is not None:
            terms = self._terms(None, False, timeout, retries, retry_on)
        return self._call(func, args, kwds, callback, error_callback, terms)

    @overload
    def map(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> list[T]: ...

    @overload
    def map(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> list[T | BaseException]: ...

    def map(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        progress: ProgressOption = False,
        on_error: str = "raise",
        journal: str | os.PathLike[str] | None = None,
        key: Callable[[Any], str | bytes | int] | None = None,
        version: str | int | None = None,
        seed: int | None = None,
        **unknown: Any,
    ) -> list[Any]:
        """Return ``[func(x) for x in iterable]``, computed by the workers, in order.

        A task is a chunk of ``chunksize`` items; by default about four chunks for each worker.
        The error of a task is raised when all have been answered.

        Args:
            {many}
            journal: path of an SQLite database.  Results are written there before they are handed
                out, and what is there is not run again.  Each item is a task.
            key: a function that returns the name of an item in the journal, a str, bytes or an int;
                None: the name is a digest of the item's value.
            version: a str or an int that says, with the name of ``func``, what the results are of.
                None: the code of ``func``, that of the program's functions that it calls, and the
                values that they use must all be as they were.

        Raises:
            Exception: what a task raised, as it is; of several, what arrived first.
            WorkerDied, TaskTimeout: a worker died in a task; it took longer than ``timeout``.
            PoolClosed: the pool takes no more work.
            OptionError: the journal is of another function, or of this one before a change.
            sqlite3.Error: the journal cannot be opened or written.
        """
        terms = self._terms(None, True, timeout, retries, retry_on, progress, on_error, journal,
                            key, version, seed, **unknown)  # fmt: skip
        if terms.journal is not None:
            return self._map_recorded(func, iterable, terms, False)
        values: list[Any] = self._map(func, iterable, chunksize, False, None, None, terms).get()
        return values

    @overload
    def map_async(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int | None = None,
        callback: Callable[[list[T]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> MapResult[T]: ...

    @overload
    def map_async(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int | None = None,
        callback: Callable[[list[T | BaseException]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> MapResult[T | BaseException]: ...

    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callable[[list[Any]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        progress: ProgressOption = False,
        on_error: str = "raise",
        seed: int | None = None,
        **unknown: Any,
    ) -> MapResult[Any]:
        """Submit ``func(x)`` for each item; return a `MapResult` at once.

        A task is a chunk of ``chunksize`` items, by default about four chunks for each worker.
        ``callback(values)`` or ``error_callback(exception)`` runs in a thread of the pool.

        Args:
            {many}

        Raises:
            PoolClosed: the pool takes no more work.
        """
        terms = self._terms(
            None, False, timeout, retries, retry_on, progress, on_error, seed=seed, **unknown
        )
        return self._map(func, iterable, chunksize, False, callback, error_callback, terms)

    @overload
    def starmap(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> list[T]: ...

    @overload
    def starmap(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> list[T | BaseException]: ...

    def starmap(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        progress: ProgressOption = False,
        on_error: str = "raise",
        journal: str | os.PathLike[str] | None = None,
        key: Callable[[Any], str | bytes | int] | None = None,
        version: str | int | None = None,
        seed: int | None = None,
        **unknown: Any,
    ) -> list[Any]:
        """Return ``[func(*args) for args in iterable]``, computed by the workers, in order.

        A task is a chunk of ``chunksize`` items, by default about four chunks for each worker.

        Args:
            {many}
            journal, key, version: as in `map`.

        Raises:
            Exception: what a task raised; of several errors, the first that arrived.
            WorkerDied, TaskTimeout: a worker died in a task; a task took longer than ``timeout``.
            PoolClosed: the pool takes no more work.
        """
        terms = self._terms(None, True, timeout, retries, retry_on, progress, on_error, journal,
                            key, version, seed, **unknown)  # fmt: skip
        if terms.journal is not None:
            return self._map_recorded(func, iterable, terms, True)
        values: list[Any] = self._map(func, iterable, chunksize, True, None, None, terms).get()
        return values

    @overload
    def starmap_async(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        callback: Callable[[list[T]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> MapResult[T]: ...

    @overload
    def starmap_async(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        callback: Callable[[list[T | BaseException]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> MapResult[T | BaseException]: ...

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        callback: Callable[[list[Any]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        progress: ProgressOption = False,
        on_error: str = "raise",
        seed: int | None = None,
        **unknown: Any,
    ) -> MapResult[Any]:
        """Submit ``func(*args)`` for each ``args``; return a `MapResult` at once.

        A task is a chunk of ``chunksize`` items, by default about four chunks for each worker.
        ``callback(values)`` or ``error_callback(exception)`` runs in a thread of the pool.

        Args:
            {many}

        Raises:
            PoolClosed: the pool takes no more work.
        """
        terms = self._terms(
            None, False, timeout, retries, retry_on, progress, on_error, seed=seed, **unknown
        )
        return self._map(func, iterable, chunksize, True, callback, error_callback, terms)

    def resize(self, processes: int | None = None) -> None:
        """Have so many workers from now on, while the pool works; returns at once.

        When there are to be fewer, those with the highest numbers end after their present task; of
        a `ThreadPool`, those that are free first.  Not for pools whose workers differ from each
        other: a `CtxPool`, a `P2PPool`, or one with a `create_group`.

        Args:
            processes: the number of workers; None: as many as the pool would have by default.

        Raises:
            OptionError (a `ValueError`): the workers of this pool cannot change in number, or it
                gets smaller while a function of `run_all` waits or runs in a worker that would go.
            PoolClosed: the pool takes no more work.
            OSError, RuntimeError: the system refuses a process or thread; nothing has changed.
        """
        size = resolve_processes(processes)
        self._check_running()
        if self._fixed_size:
            raise OptionError(f"a {type(self).__name__} cannot be resized: {self._fixed_size}")
        self._resize(size)

    def _resize(self, size: int) -> None:
        raise OptionError(f"a {type(self).__name__} cannot be resized: its class does not say how")

    @overload
    def imap(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> IMapIterator[T]: ...

    @overload
    def imap(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> IMapIterator[T | BaseException]: ...

    def imap(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        progress: ProgressOption = False,
        on_error: str = "raise",
        journal: str | os.PathLike[str] | None = None,
        key: Callable[[Any], str | bytes | int] | None = None,
        version: str | int | None = None,
        seed: int | None = None,
        **unknown: Any,
    ) -> IMapIterator[Any]:
        """Return an iterator over the results, in order, while the input is still drawn.

        ``buffersize``: at most so many items, not chunks, are drawn ahead of the consumer.  Then
        `join` waits for the consumer, and nothing more is drawn when the iterator is dropped or
        cancelled.

        Without a ``buffersize``, as many are drawn as the workers have use for, while the results
        that nobody has taken need less than a sixteenth of the machine's free memory (at least
        64 MiB; a result is counted with 256 bytes more than it has).  When the iterator is dropped,
        or somebody waits in `join`, the rest is drawn and run all the same.

        ``len()`` of it is that of the input, where that has one.

        Args:
            {many}
            journal, key, version: as in `map`.

        Raises:
            PoolClosed: the pool takes no more work.
            OptionError: the journal is of another function, or of this one before a change.
        """
        terms = self._terms(None, False, timeout, retries, retry_on, progress, on_error, journal,
                            key, version, seed, **unknown)  # fmt: skip
        return self._imap(IMapIterator, func, iterable, chunksize, buffersize, terms)

    @overload
    def imap_unordered(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        with_index: Literal[False] = False,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> IMapUnorderedIterator[T]: ...

    @overload
    def imap_unordered(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        with_index: Literal[False] = False,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> IMapUnorderedIterator[T | BaseException]: ...

    @overload
    def imap_unordered(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        with_index: Literal[True],
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> IMapUnorderedIterator[tuple[int, T]]: ...

    @overload
    def imap_unordered(
        self,
        func: Callable[[S], T],
        iterable: Iterable[S],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        with_index: Literal[True],
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> IMapUnorderedIterator[tuple[int, T | BaseException]]: ...

    def imap_unordered(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
        progress: ProgressOption = False,
        on_error: str = "raise",
        journal: str | os.PathLike[str] | None = None,
        key: Callable[[Any], str | bytes | int] | None = None,
        version: str | int | None = None,
        with_index: bool = False,
        seed: int | None = None,
        **unknown: Any,
    ) -> IMapUnorderedIterator[Any]:
        """Return an iterator over the results in the order in which they arrive.

        ``buffersize``: at most so many items are drawn ahead of the consumer; None: as in `imap`.

        Args:
            with_index: True: an item of the iterator is ``(index, result)``, where ``index`` is the
                position in ``iterable``, from 0 on.
            {many}
            journal, key, version: as in `map`.

        Raises:
            PoolClosed: the pool takes no more work.
            OptionError: the journal is of another function, or of this one before a change.
        """
        terms = self._terms(None, False, timeout, retries, retry_on, progress, on_error, journal,
                            key, version, seed, **unknown)  # fmt: skip
        return self._imap(
            IMapUnorderedIterator, func, iterable, chunksize, buffersize, terms,
            with_index=with_index,
        )  # fmt: skip


for _name in ("map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered"):
    _verb = vars(PublicVerbs)[_name]
    # None: under python -OO.
    _verb.__doc__ = _verb.__doc__ and _verb.__doc__.replace("{many}", MANY_HELP)
