"""The types that checkers infer for the verbs. Checked, not run: see `test_typing`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future

from typing_extensions import assert_type

from xpool import (
    AsyncResult,
    CtxPool,
    CtxThreadPool,
    Executor,
    IMapIterator,
    IMapUnorderedIterator,
    MapResult,
    P2PPool,
    Pool,
    ThreadPool,
)


class Device:
    """A context."""


def name(number: int) -> str:
    return str(number)


def names(number: int) -> Iterator[str]:
    yield str(number)


def join(number: int, text: str, *, end: str = "") -> bytes:
    return (str(number) + text + end).encode()


def on_device(device: Device, number: int) -> float:
    return float(number)


def plain(pool: Pool | ThreadPool) -> None:
    assert_type(pool.apply(name, (1,)), str)
    assert_type(pool.apply(join, (1, "a"), {"end": "."}, timeout=3, retries=1), bytes)
    assert_type(pool.apply_async(name, (1,)), AsyncResult[str])
    assert_type(pool.apply_async(name, (1,)).get(), str)
    assert_type(pool.apply_async(name, (1,), priority=2.5), AsyncResult[str])
    assert_type(pool.map(name, [1, 2], priority=-1), list[str])
    assert_type(pool.map(name, [1, 2]), list[str])
    assert_type(pool.map(name, range(3), 2, progress=True, retries=1, retry_on=OSError), list[str])
    assert_type(pool.map(lambda x: x + 1, [1, 2]), list[int])
    assert_type(pool.map_async(name, [1]), MapResult[str])
    assert_type(pool.map_async(name, [1]).get(3), list[str])
    assert_type(pool.starmap(join, [(1, "a")]), list[bytes])
    assert_type(pool.starmap_async(join, [(1, "a")], callback=print), MapResult[bytes])
    assert_type(pool.imap(name, [1], buffersize=3), IMapIterator[str])
    assert_type(pool.imap_unordered(name, [1]), IMapUnorderedIterator[str])
    assert_type(pool.imap_unordered(name, [1], 2, 8), IMapUnorderedIterator[str])
    assert_type(next(pool.imap(name, [1])), str)
    assert_type(pool.imap(names, [1], yields=True), IMapIterator[str])
    assert_type(
        pool.imap(names, [1], yields=True, on_error="return"), IMapIterator[str | BaseException]
    )
    assert_type(
        pool.imap_unordered(names, [1], yields=True, with_index=True),
        IMapUnorderedIterator[tuple[int, str]],
    )
    assert_type(len(pool.imap(name, [1])), int)
    for text in pool.imap_unordered(name, [1]):
        assert_type(text, str)


def errors_in_place(pool: Pool) -> None:
    assert_type(pool.map(name, [1], on_error="return"), list[str | BaseException])
    assert_type(pool.map(name, [1], on_error="raise"), list[str])
    assert_type(pool.map_async(name, [1], on_error="return"), MapResult[str | BaseException])
    assert_type(pool.starmap(join, [(1, "a")], on_error="return"), list[bytes | BaseException])
    assert_type(pool.imap(name, [1], on_error="return"), IMapIterator[str | BaseException])


def with_contexts(pool: CtxPool[Device], threads: CtxThreadPool[Device]) -> None:
    assert_type(CtxPool(worker_contexts=[Device()]), CtxPool[Device])
    assert_type(pool.apply(on_device, (1,)), float)
    assert_type(pool.map(on_device, [1, 2]), list[float])
    assert_type(threads.map(on_device, [1, 2]), list[float])
    assert_type(pool.imap(on_device, [1, 2]), IMapIterator[float])
    assert_type(pool.map_async(on_device, [1]), MapResult[float])
    assert_type(pool.map(lambda device, n: (device, n), [1]), list[tuple[Device, int]])
    assert_type(pool.map(on_device, [1], on_error="return"), list[float | BaseException])
    assert_type(pool.starmap(on_device, [(1,)]), list[float])
    assert_type(pool.submit(on_device, 1), Future[float])
    assert_type(pool.run_all(on_device, 3), list[float])
    of_any(pool)
    with CtxPool(2) as some:
        some.map(on_device, [1])


def of_any(pool: Pool) -> None:
    assert_type(pool.apply(lambda x: f"{x}", (1,)), str)


def on_all(pool: Pool, bound: P2PPool) -> None:
    assert_type(pool.run_all(name, 3, timeout=5), list[str])
    assert_type(bound.apply(name, (1,), worker=1), str)
    assert_type(bound.apply_async(name, (1,), worker=1), AsyncResult[str])


def futures(executor: Executor) -> None:
    assert_type(executor.submit(name, 1), Future[str])
    assert_type(executor.submit(join, 1, "a", end="."), Future[bytes])


async def in_a_loop(pool: Pool) -> None:
    assert_type(await pool.apply_async(name, (1,)), str)
    assert_type(await pool.map_async(name, [1]), list[str])
    results: AsyncIterator[str] = pool.imap(name, [1])
    async for text in results:
        assert_type(text, str)
