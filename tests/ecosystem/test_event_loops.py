"""`await`, `async for` and `async with` of results and pools, in asyncio and trio."""

import asyncio
import importlib.util
import os

import pytest
from support import work
from support.kinds import PROCESS_KINDS, THREAD_KINDS
from support.limits import WAIT
from support.waiting import eventually

from xpool import Pool, TaskCancelled, ThreadPool


def _asyncio(main, *args):
    return asyncio.run(main(*args))


def _uvloop(main, *args):
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(main(*args))
    finally:
        loop.close()


@pytest.fixture(scope="module", autouse=True)
def uvloop_is_warm():
    """Run a first loop of uvloop, which opens a pipe for ever. No test may count it as a leak."""
    if importlib.util.find_spec("uvloop"):
        _uvloop(asyncio.sleep, 0)


def _anyio(backend):
    def run(main, *args):
        anyio = pytest.importorskip("anyio", reason="anyio is not installed")
        pytest.importorskip(backend, reason=f"{backend} is not installed")
        return anyio.run(main, *args, backend=backend)

    return run


RUNNERS = {
    "asyncio": _asyncio,
    "uvloop": _uvloop,
    "anyio on asyncio": _anyio("asyncio"),
    "anyio on trio": _anyio("trio"),
}


@pytest.fixture(params=RUNNERS)
def run(request):
    """A function that runs a coroutine function in one kind of loop."""
    return RUNNERS[request.param]


@pytest.fixture(params=[PROCESS_KINDS[0], THREAD_KINDS[0]], ids=repr, scope="module")
def kind(request):
    """`Pool`, then `ThreadPool`."""
    return request.param


def test_await(run, pool):
    """A result can be awaited more than once. It raises the same errors as `get`."""

    async def main():
        result = pool.apply_async(work.square, (7,))
        assert await result == 49
        assert await result == 49
        assert await pool.map_async(work.square, range(5)) == [0, 1, 4, 9, 16]
        with pytest.raises(ZeroDivisionError):
            await pool.apply_async(divmod, (1, 0))

    run(main)


def test_many_at_once(make_pool):
    """`gather` awaits many results at once."""

    async def main(pool):
        return await asyncio.gather(*(pool.apply_async(work.square, (n,)) for n in range(50)))

    assert asyncio.run(main(make_pool(ThreadPool, 2))) == [n * n for n in range(50)]


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_async_for(run, pool, verb):
    """`async for` yields the same results as `for`, and raises errors in their places."""

    async def main():
        got = [value async for value in getattr(pool, verb)(work.square, range(20))]
        assert sorted(got) == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            async for _ in getattr(pool, verb)(lambda n: 1 // n, [0]):
                raise AssertionError("there is no result")

    run(main)


def test_other_coroutines_run(make_pool, gate):
    """While one coroutine awaits a result, others run."""

    async def main(pool):
        waiting = asyncio.ensure_future(pool.apply_async(work.pass_gate, (gate.path,)))
        turns = 0
        while not waiting.done():
            turns += 1
            if turns == 3:
                gate.open()
            await asyncio.sleep(0)
        assert turns >= 3

    asyncio.run(main(make_pool(Pool, 1)))


def test_cancelling_the_task_cancels_the_work(make_pool, gate, tmp_path):
    """Cancelling the `await` cancels the task, even while it runs."""

    async def main(pool):
        began = tmp_path / "began"
        result = pool.apply_async(lambda: (began.write_text(""), work.pass_gate(gate.path)))

        async def wait():
            await result

        task = asyncio.ensure_future(wait())
        while not began.exists():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return result

    pool = make_pool(Pool, 1)
    with pytest.raises(TaskCancelled):
        asyncio.run(main(pool)).get(WAIT)
    assert pool.apply(work.square, (2,)) == 4


def test_cancelling_in_trio(make_pool, gate):
    """In trio, cancelling a scope cancels its awaited task."""
    trio = pytest.importorskip("trio", reason="trio is not installed")

    async def main(pool):
        result = pool.apply_async(work.pass_gate, (gate.path,))
        with trio.CancelScope() as scope:
            scope.cancel()
            await result
        assert scope.cancelled_caught
        return result

    with pytest.raises(TaskCancelled):
        trio.run(main, make_pool(Pool, 1)).get(WAIT)


def test_cancelling_a_stream(make_pool, gate):
    """Cancelling an `async for` cancels the stream."""

    async def main(pool):
        async def wait():
            async for _ in pool.imap(work.pass_gate, [gate.path] * 100):
                raise AssertionError("the gate is shut")

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    pool = make_pool(Pool, 1)
    asyncio.run(main(pool))
    eventually(lambda: pool.statistics()["jobs"] == 0, "the stream has ended")
    assert pool.apply(os.getpid) > 0


def test_async_with(run):
    """`async with` ends the pool, as `with` does."""

    async def main():
        async with Pool(1) as pool:
            assert await pool.apply_async(abs, (-1,)) == 1
        with pytest.raises(ValueError, match="not running"):
            pool.apply_async(abs, (-1,))
        pool.join()

    run(main)


def test_without_a_loop(make_pool):
    """A finished result can be awaited without an event loop."""
    result = make_pool(ThreadPool, 1).apply_async(abs, (-1,))
    result.wait()
    with pytest.raises(StopIteration) as done:
        next(result.__await__())
    assert done.value.value == 1
