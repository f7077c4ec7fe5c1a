"""The verbs: their signatures, types and docstrings.  `xpool._pools.verbs` implements them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from xpool._calls.options import JournalOptions, ManyOptions, OneCallOptions, takes_keywords
from xpool._calls.results import AsyncResult, MapResult
from xpool._calls.streams import IMapIterator, IMapUnorderedIterator
from xpool._pools.submitters import Work
from xpool._pools.verbs import (
    PLAIN,
    WAITING,
    PoolOfVerbs,
    imap,
    map_now,
    options_of,
    start_call,
    submit_call,
    submit_map,
)

if TYPE_CHECKING:
    from typing import Generic

    from typing_extensions import TypeVarTuple, Unpack

    Cs = TypeVarTuple("Cs", default=Unpack[tuple[()]])  # what a function gets before the item
else:
    # At run time nothing is generic: Python 3.10 has no `TypeVarTuple`.
    Generic, Unpack, Cs = {None: object}, {None: None}, None

S = TypeVar("S")
T = TypeVar("T")


class PublicVerbs(PoolOfVerbs, Generic[Unpack[Cs]]):
    """The verbs of `multiprocessing.pool.Pool`, with xpool's additions.

    For type checkers, a pool whose functions get a context of type C first is a `PublicVerbs[C]`.
    """

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parameters):
            return cls

    _start_call = staticmethod(start_call)

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
        value: T = submit_call(self, func, args, kwds, options).get()
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
        return submit_call(self, func, args, kwds, options, callback, error_callback)

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
        return submit_map(self, work, iterable, chunksize, options, callback, error_callback)

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
        return submit_map(self, work, iterable, chunksize, options, callback, error_callback)

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
        results use less than a sixteenth of the machine's free memory, or 64 MiB if that is more (a
        result counts 256 bytes more than its size).  If the iterator is dropped, or a thread waits
        in `join`, the rest of the input is still drawn and run.

        The iterator has the ``len()`` of the input, if that has one.

        Args:
            yields: True: ``func`` returns a generator, which runs in a worker, and the iterator
                gives its values as they are made: all of the first item, then of the second.
                ``buffersize`` and the limit on memory hold for values.  ``timeout`` is for each
                value.  With ``retries``, a generator begins again, and the values that have come
                are skipped.  If the iterator is closed, cancelled or dropped, so are they.
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
