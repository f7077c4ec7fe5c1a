"""`xpool.Executor` and `pool.executor()`: what `concurrent.futures` documents."""

from __future__ import annotations

import concurrent.futures as futures
import inspect
import os
import threading
from typing import Any

import pytest
from support import scripts, work
from support.limits import WAIT

from xpool import Executor, Pool, ThreadPool, WorkerDied


@pytest.fixture(params=["own", "over processes", "over threads"])
def executor(request):
    """An executor with its own pool, and one for an existing pool of processes and of threads."""
    if request.param == "own":
        with Executor(2) as made:
            yield made
        return
    with (Pool if "processes" in request.param else ThreadPool)(2) as pool:
        with pool.executor() as made:
            yield made
        assert pool.apply(work.square, (3,)) == 9  # still open
        pool.close()
        pool.join()


def test_submit(executor):
    """The future gets the call's result or its exception."""
    assert executor.submit(pow, 2, exp=5).result(WAIT) == 32
    failed = executor.submit(divmod, 1, 0)
    assert isinstance(failed.exception(60), ZeroDivisionError)
    assert failed.done() and not failed.running() and not failed.cancelled()


def test_as_completed_and_wait(executor):
    """`as_completed` and `wait` of `concurrent.futures` accept these futures."""
    made = {executor.submit(work.square, n): n for n in range(20)}
    assert all(isinstance(future, futures.Future) for future in made)
    for future in futures.as_completed(made, timeout=WAIT):
        assert future.result() == made[future] ** 2
    done, pending = futures.wait(made, timeout=WAIT)
    assert done == set(made) and not pending


def test_callbacks(executor):
    """A callback receives its future. It also runs if the future is already done."""
    future, seen = executor.submit(work.square, 3), threading.Event()
    future.add_done_callback(lambda done: done is future and seen.set())
    assert seen.wait(WAIT)
    late = []
    future.add_done_callback(late.append)
    assert late == [future]


@pytest.mark.parametrize("chunksize", [1, 3])
@pytest.mark.parametrize("buffersize", [None, 2])
def test_map(executor, chunksize, buffersize):
    """`map` takes several iterables, stops at the end of the shortest one, and keeps the order."""
    got = executor.map(pow, range(10), [2] * 20, chunksize=chunksize, buffersize=buffersize)
    assert list(got) == [n**2 for n in range(10)]


@pytest.mark.parametrize("buffersize", [None, 1])
def test_map_raises_at_its_place(executor, buffersize):
    """`map` yields the results before the error, raises the error, and stops."""
    got = executor.map(divmod, [4, 5, 6, 8], [2, 0, 3, 4], buffersize=buffersize)
    assert next(got) == (2, 0)
    with pytest.raises(ZeroDivisionError):
        next(got)
    with pytest.raises(StopIteration):
        next(got)


def test_map_is_eager(executor):
    """Without a buffersize, `map` draws all items at once. With one, it draws only that many."""
    drawn = []
    executor.map(work.square, (drawn.append(n) or n for n in range(5)))
    assert drawn == [0, 1, 2, 3, 4]
    ahead = []
    got = executor.map(work.square, (ahead.append(n) or n for n in range(100)), buffersize=2)
    assert [next(got) for _ in range(3)] == [0, 1, 4] and len(ahead) <= 5


def test_arguments_are_checked(executor):
    """A chunksize or buffersize below one raises an error that names it."""
    with pytest.raises(ValueError, match="chunksize"):
        executor.map(work.square, [1], chunksize=0)
    for size in (0, -1, "2", 1.5):
        with pytest.raises((ValueError, TypeError), match="buffersize"):
            executor.map(work.square, [1], buffersize=size)


def test_buffersize_counts_items(executor):
    """Items drawn ahead never exceed the buffersize, even if the chunks are larger."""
    drawn = []
    inputs = (drawn.append(n) or n for n in range(40))
    got = executor.map(work.square, inputs, chunksize=16, buffersize=4)
    assert len(drawn) <= 4
    for taken in range(40):
        assert next(got) == taken * taken and len(drawn) <= taken + 1 + 4
    assert list(got) == []


def test_executor_has_the_standard_methods():
    """`Executor` has all public methods and arguments of this Python's `ProcessPoolExecutor`."""
    standard = futures.ProcessPoolExecutor
    for name in [*filter(lambda name: not name.startswith("_"), dir(standard)), "__init__"]:
        theirs = inspect.signature(getattr(standard, name)).parameters
        ours = inspect.signature(getattr(Executor, name)).parameters
        assert set(theirs) <= set(ours), name
        for parameter in theirs.values():
            assert ours[parameter.name].default == parameter.default, (name, parameter)
    assert "buffersize" in inspect.signature(Executor.map).parameters


def test_shutdown(executor):
    """`shutdown` waits for submitted calls. Afterwards the executor refuses calls."""
    made = [executor.submit(work.square, n) for n in range(8)]
    executor.shutdown()
    assert [future.result(0) for future in made] == [n**2 for n in range(8)]
    for again in (lambda: executor.submit(work.square, 1), lambda: executor.map(abs, [1])):
        with pytest.raises(RuntimeError, match="after shutdown"):
            again()
    executor.shutdown()


def test_cancel():
    """A waiting call can be cancelled and never runs; a running call cannot be cancelled."""
    with ThreadPool(1) as pool:
        executor, gate, began = pool.executor(), threading.Event(), threading.Event()
        running = executor.submit(lambda: (began.set(), gate.wait(WAIT)))
        waiting = [executor.submit(work.square, n) for n in range(3)]
        assert began.wait(WAIT)
        assert running.running() and not running.cancel()
        assert waiting[0].cancel() and waiting[0].cancelled() and waiting[0].cancel()
        with pytest.raises(futures.CancelledError):
            waiting[0].result(WAIT)
        executor.shutdown(wait=False, cancel_futures=True)
        assert not futures.wait(waiting, 60).not_done and all(f.cancelled() for f in waiting)
        gate.set()
        assert running.result(WAIT)
        pool.close()
        pool.join()


def test_all_who_wait_for_a_future(executor):
    """Threads in `result`, `exception`, `wait` and `as_completed` get it, whoever receives it."""

    def completed(future):
        return [one.result() for one in futures.as_completed([future])]

    with futures.ThreadPoolExecutor(5) as threads:
        for n in range(50):
            value: Any = [n] if n % 2 else complex(n)  # builtin types alone, and by a class
            future = executor.submit(work.same, value)
            both = [threads.submit(future.result, limit) for limit in (None, WAIT)]
            error = threads.submit(future.exception)
            waits = threads.submit(futures.wait, [future])
            others = threads.submit(completed, future)
            assert [one.result() for one in both] == [value, value]
            assert error.result() is None and waits.result().done == {future}
            assert others.result() == [value]
            assert future.done() and not future.running() and not future.cancel()


def read_all(path):
    with open(path) as file:
        return file.read()


def test_a_callback_never_runs_in_the_thread_that_waits(tmp_path):
    """A callback runs once, in a thread of the pool, also if the caller of `result` has received
    the answer.  So it may wait for that caller."""
    gate = str(tmp_path / "gate")
    os.mkfifo(gate)
    with Executor(1) as executor:
        for _ in range(30):
            seen: list[int] = []
            returned, called = threading.Event(), threading.Event()

            def call(future, seen=seen, returned=returned, called=called):
                assert returned.wait(WAIT)
                seen.append(threading.get_ident())
                called.set()

            future = executor.submit(read_all, gate)
            future.add_done_callback(call)
            with open(gate, "w") as file:
                file.write("done")
            assert future.result(WAIT) == "done"
            returned.set()
            assert called.wait(WAIT)
            assert len(seen) == 1 and seen[0] != threading.get_ident()


class Submits:
    """Submits a call while it is pickled."""

    def __init__(self, executor, futures):
        self.executor, self.futures = executor, futures

    def __reduce__(self):
        self.futures.append(self.executor.submit(abs, -2))
        return int, (1,)


def test_a_call_whose_argument_submits():
    """Pickling an argument may submit another call to the same executor."""
    with Executor(1) as executor:
        inner = []
        future = executor.submit(work.same, Submits(executor, inner))
        assert future.result(WAIT) == 1
        assert inner[0].result(WAIT) == 2


def test_a_worker_dies():
    """The death of a worker fails only the running call's future. The executor stays usable."""
    with Executor(1) as executor:
        lost, kept = executor.submit(os._exit, 3), executor.submit(work.square, 4)
        assert isinstance(lost.exception(60), WorkerDied)
        assert kept.result(WAIT) == 16


def test_a_pool_that_was_closed():
    """If the pool is closed, `submit` raises BrokenExecutor."""
    with ThreadPool(1) as pool:
        executor = pool.executor()
        pool.close()
        for call in (lambda: executor.submit(abs, 1), lambda: executor.map(abs, [1])):
            with pytest.raises(futures.BrokenExecutor, match="Pool not running"):
                call()
        pool.join()


def test_the_program_ends():
    """At the end of the program, submitted calls finish, as with the standard executors."""
    code = (
        "import xpool\n"
        "e = xpool.Executor(1)\n"
        "e.submit(pow, 2, 3).add_done_callback(lambda f: print(f.result(), flush=True))\n"
    )
    assert scripts.run_ok(["-c", code]) == "8\n"
