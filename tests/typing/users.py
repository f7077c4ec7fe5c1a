"""Programs as users write them.  Checked, not run: no expression in this file is `Any`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from typing_extensions import assert_type

import xpool
from xpool import CtxPool, CtxThreadPool, Executor, P2PPool, Pool, ThreadPool, WorkerDied
from xpool.devices import DeviceContext, devices
from xpool.errors import TaskTimeout


def square(x: int) -> int:
    return x * x


def add(x: int, y: float) -> float:
    return x + y


@dataclass
class Model:
    name: str

    def enter(self) -> None:
        self.name = self.name.upper()


def evaluate(model: Model, batch: list[float]) -> float:
    return len(model.name) * sum(batch)


def with_blocks() -> None:
    with Pool(2) as pool:
        assert_type(pool, Pool)
        assert_type(pool.map(square, range(5)), list[int])
        assert_type(pool.starmap(add, [(1, 2.0)]), list[float])
        for value in pool.imap_unordered(square, range(5), chunksize=2, progress="squares"):
            assert_type(value, int)
        result = pool.apply_async(square, (3,), timeout=2.5, retries=1)
        assert_type(result.get(timeout=5), int)
        for index, square_of_it in pool.imap_unordered(square, range(5), with_index=True, seed=1):
            assert_type(index, int)
            assert_type(square_of_it, int)
        assert_type(pool.submit(square, 3).result(), int)
        assert_type(pool.executor().submit(square, 3).result(), int)
        report: xpool.Report = pool.report()
        assert_type(report.retries, int)
        assert_type(pool.run_all(square, 3), list[int])
        stack: xpool.WorkerStack = pool.stacks()[0]
        assert_type(stack.task, str)
        assert_type(pool.output_folder, str | None)
        assert_type(pool.size(), int)
        assert_type(repr(pool), str)
        with pool.trace("run.json"):
            pool.map(square, [1])
    with xpool.ThreadPool(4) as threads:
        assert_type(threads, ThreadPool)
        assert_type(threads.map(str.upper, ["a"]), list[str])
        assert_type(threads.submit(square, 3).result(), int)
    with P2PPool(2) as bound:
        assert_type(bound.apply(square, (2,), worker=1), int)
    with Executor(2) as executor:
        assert_type(executor.submit(add, 1, 2.0).result(), float)


def contexts() -> None:
    with CtxPool(worker_contexts=[Model("a"), Model("b")]) as pool:
        assert_type(pool, CtxPool[Model])
        assert_type(pool.map(evaluate, [[1.0], [2.0]]), list[float])
        assert_type(pool.apply(evaluate, ([1.0],)), float)
    with CtxThreadPool(worker_contexts=[Model("a")]) as threads:
        assert_type(threads.map(evaluate, [[1.0]]), list[float])


def pool_fixture() -> Iterator[Pool]:
    with Pool(2, initializer=print, initargs=("a",), maxtasksperchild=100) as pool:
        yield pool


def test_with_a_fixture(pool: Pool) -> None:
    assert_type(pool.map(square, [1]), list[int])


@dataclass
class Pipeline:
    pool: Pool
    threads: ThreadPool = field(default_factory=lambda: ThreadPool(2))

    def run(self, numbers: list[int]) -> list[int]:
        squares = self.pool.map(square, numbers)
        return self.threads.map(square, squares)


class CountingPool(Pool):
    tasks = 0

    def count(self, numbers: list[int]) -> int:
        self.tasks += len(numbers)
        return sum(self.map(square, numbers))


def subclasses() -> None:
    with CountingPool(2) as pool:
        assert_type(pool, CountingPool)
        assert_type(pool.count([1]), int)


def errors(pool: Pool) -> None:
    try:
        pool.apply(square, (2,), timeout=1)
    except WorkerDied as death:
        assert_type(death.pid, int | None)
        assert_type(death.exitcode, int | None)
    except TaskTimeout as late:
        assert_type(str(late), str)
    for value in pool.map(square, [1], on_error="return"):
        if isinstance(value, BaseException):
            raise value
        assert_type(value, int)


async def awaiting() -> None:
    async with Pool(2) as pool:
        assert_type(pool, Pool)
        assert_type(await pool.apply_async(square, (2,)), int)
        both = await asyncio.gather(pool.apply_async(square, (2,)), pool.apply_async(square, (3,)))
        assert_type(both, tuple[int, int])
        async for value in pool.imap(square, [1]):
            assert_type(value, int)


def on_device(device: DeviceContext, number: float) -> str:
    return f"{device}: {number}"


def devices_of_the_machine() -> None:
    with CtxPool(worker_contexts=devices("cpu", n=2)) as pool:
        assert_type(pool.map(on_device, [1.0]), list[str])
    xpool.preload("torch", "numpy")
    assert_type(xpool.current_worker().index, int)


def first(table: list[int], item: int) -> int:
    return table[0] + item


def with_a_broadcast(rows: list[int]) -> list[int]:
    """The reference has the type of the object that tasks get."""
    with Pool(2) as pool:
        table = pool.broadcast(rows)
        assert_type(pool.apply(first, (table, 1)), int)

        def at(i: int) -> int:
            return table[i]

        return pool.map(at, range(3))


def shared_data() -> None:
    names = xpool.SharedList(str(i) for i in range(3))
    assert_type(names, xpool.SharedList[str])
    assert_type(names[0], str)
    assert_type(names[1:], list[str])
    ages = xpool.SharedDict({"a": 1})
    assert_type(ages, xpool.SharedDict[str, int])
    assert_type(ages["a"], int)
    with Pool(2) as pool:
        assert_type(pool.map(ages.__getitem__, names), list[int])
