from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from typing_extensions import TypeVar as TypeVarWithDefault
from typing_extensions import TypeVarTuple, Unpack

from xpool._calls.options import Exceptions, ManyOptions
from xpool._calls.results import AsyncResult, MapResult
from xpool._calls.streams import IMapIterator, IMapUnorderedIterator

__all__ = ["C", "ContextVerbs"]

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")
C = TypeVarWithDefault("C", default=Any)
Ts = TypeVarTuple("Ts")

class ContextVerbs(Generic[C]):
    _fixed_size: str

    def submit(
        self, func: Callable[Concatenate[C, P], T], /, *args: P.args, **kwds: P.kwargs
    ) -> Future[T]: ...
    def apply(
        self,
        func: Callable[Concatenate[C, ...], T],
        args: Iterable[object] = (),
        kwds: Mapping[str, object] | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
    ) -> T: ...
    def apply_async(
        self,
        func: Callable[Concatenate[C, ...], T],
        args: Iterable[object] = (),
        kwds: Mapping[str, object] | None = None,
        callback: Callable[[T], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        timeout: float | None = None,
        retries: int = 0,
        retry_on: Exceptions = (),
    ) -> AsyncResult[T]: ...
    @overload
    def map(
        self,
        func: Callable[[C, S], T],
        iterable: Iterable[S],
        chunksize: int | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> list[T]: ...
    @overload
    def map(
        self,
        func: Callable[[C, S], T],
        iterable: Iterable[S],
        chunksize: int | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> list[T | BaseException]: ...
    @overload
    def map_async(
        self,
        func: Callable[[C, S], T],
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
        func: Callable[[C, S], T],
        iterable: Iterable[S],
        chunksize: int | None = None,
        callback: Callable[[list[T | BaseException]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> MapResult[T | BaseException]: ...
    @overload
    def starmap(
        self,
        func: Callable[Concatenate[C, ...], T],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ManyOptions],
    ) -> list[T]: ...
    @overload
    def starmap(
        self,
        func: Callable[Concatenate[C, ...], T],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> list[T | BaseException]: ...
    @overload
    def starmap_async(
        self,
        func: Callable[Concatenate[C, ...], T],
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
        func: Callable[Concatenate[C, ...], T],
        iterable: Iterable[Iterable[object]],
        chunksize: int | None = None,
        callback: Callable[[list[T | BaseException]], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> MapResult[T | BaseException]: ...
    @overload
    def imap(
        self,
        func: Callable[[C, S], T],
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
        func: Callable[[C, S], T],
        iterable: Iterable[S],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> IMapIterator[T | BaseException]: ...
    @overload
    def imap_unordered(
        self,
        func: Callable[[C, S], T],
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
        func: Callable[[C, S], T],
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
        func: Callable[[C, S], T],
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
        func: Callable[[C, S], T],
        iterable: Iterable[S],
        chunksize: int = 1,
        buffersize: int | None = None,
        *,
        with_index: Literal[True],
        on_error: Literal["return"],
        **options: Unpack[ManyOptions],
    ) -> IMapUnorderedIterator[tuple[int, T | BaseException]]: ...
    def run_all(
        self,
        func: Callable[[C, Unpack[Ts]], T],
        *args: Unpack[Ts],
        timeout: float | None = None,
    ) -> list[T]: ...
