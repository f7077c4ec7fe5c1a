"""`xpool.Executor` and `pool.executor()`: what `concurrent.futures` documents.

Executors and their pools end without a future that waits for ever.
"""

from __future__ import annotations

import asyncio
import concurrent.futures as futures
import contextlib
import functools
import inspect
import itertools
import os
import pickle
import signal
import threading
import weakref
from typing import Any

import pytest
from support import scripts, work
from support.limits import WAIT
from support.waiting import eventually, wait_gone

import xpool
from xpool import CtxPool, Executor, Pool, ThreadPool, WorkerDied, WorkerStartFailed


@contextlib.contextmanager
def executor_of(kind):
    """An executor with its own pool, or one for an existing pool of processes or of threads."""
    if kind == "own":
        with Executor(2) as made:
            yield made
        return
    with (Pool if "processes" in kind else ThreadPool)(2) as pool:
        with pool.executor() as made:
            yield made
        assert pool.apply(work.square, (3,)) == 9  # still open
        pool.close()
        pool.join()


KINDS = ["own", "over processes", "over threads"]


@pytest.fixture(params=KINDS, scope="module")
def executor(request, warm):
    """Executors of each kind, which tests share."""
    with executor_of(request.param) as made:
        yield made


@pytest.fixture(params=KINDS)
def to_end(request):
    """Executors of each kind, which a test may shut down."""
    with executor_of(request.param) as made:
        yield made


def test_submit(executor):
    """The future gets the call's result or its exception."""
    assert executor.submit(pow, 2, exp=5).result(WAIT) == 32
    failed = executor.submit(divmod, 1, 0)
    assert isinstance(failed.exception(60), ZeroDivisionError)
    assert failed.done() and not failed.running() and not failed.cancelled()


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


def test_the_number_of_workers(executor):
    """Libraries read it under the name that it has in the standard executors."""
    assert executor._max_workers == executor._pool.size()


def test_shutdown(to_end):
    """`shutdown` waits for submitted calls. Afterwards the executor refuses calls."""
    made = [to_end.submit(work.square, n) for n in range(8)]
    to_end.shutdown()
    assert [future.result(0) for future in made] == [n**2 for n in range(8)]
    for again in (lambda: to_end.submit(work.square, 1), lambda: to_end.map(abs, [1])):
        with pytest.raises(RuntimeError, match="after shutdown"):
            again()
    to_end.shutdown()


def test_a_call_that_is_pickled_for_long(tmp_path):
    """It delays no other call, no `shutdown` and no end of a forked child."""
    out = scripts.program(
        tmp_path,
        """
        import os
        import sys
        import threading
        import warnings
        import xpool

        warnings.simplefilter("ignore")  # of a fork beside threads
        inside, go = threading.Event(), threading.Event()

        class Slow:
            def __reduce__(self):
                inside.set()
                go.wait()
                return Slow, ()

        def name(value):
            return type(value).__name__

        if __name__ == "__main__":
            made = xpool.Executor(2)
            slow = []
            thread = threading.Thread(target=lambda: slow.append(made.submit(name, Slow())))
            thread.start()
            inside.wait()
            print(made.submit(abs, -1).result(), flush=True)
            child = os.fork()
            if not child:
                sys.exit()  # its exit handlers shut executors down
            print(os.waitpid(child, 0)[1])
            made.shutdown(wait=False)
            go.set()
            thread.join()
            print(slow[0].result())
        """,
    )
    assert out.split() == ["1", "0", "Slow"]


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


# Ends ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[Pool, ThreadPool])
def pool(request):
    """A pool of processes, then a pool of threads."""
    with request.param(2) as made:
        yield made


def test_maps_at_a_shutdown(to_end):
    """After `shutdown`, `map` with a buffersize yields the items already drawn, then raises if the
    input has more."""
    whole = to_end.map(work.square, range(6), chunksize=2, buffersize=4)
    half = to_end.map(work.square, range(100), buffersize=4)
    for got in whole, half:
        assert [next(got), next(got)] == [0, 1]
    to_end.shutdown()
    assert list(whole) == [next(half) for _ in range(4)] == [4, 9, 16, 25]
    with pytest.raises(RuntimeError, match="after shutdown"):
        next(half)


def test_the_error_of_the_input_of_a_map(executor):
    """With a buffersize, the input's error comes last."""

    def rows():
        yield from range(6)
        raise ZeroDivisionError

    got = executor.map(work.square, rows(), buffersize=2)
    assert [next(got) for _ in range(6)] == [n * n for n in range(6)]
    with pytest.raises(ZeroDivisionError):
        next(got)


def test_shutdown_waits_for_maps(to_end, tmp_path):
    """`shutdown` waits for all tasks of `map`, even if the caller takes no results."""
    log = tmp_path / "log"
    to_end.map(work.logged, [str(log)] * 20, range(20))
    to_end.shutdown()
    assert sorted(map(int, log.read_text().split())) == list(range(20))


@pytest.mark.parametrize("buffersize", [None, 4])
def test_cancel_futures_ends_maps(to_end, gate, buffersize):
    """`shutdown(cancel_futures=True)` cancels a `map` that has not finished."""
    got = to_end.map(work.gated, [str(gate.path)] * 20, range(20), buffersize=buffersize)
    to_end.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(futures.CancelledError):
        next(got)
    gate.open()


@pytest.mark.parametrize("end", ["terminate", "with"])
def test_the_end_of_a_pool(pool, gate, end):
    """When the pool ends, unfinished futures and maps fail. Their cause is PoolClosed."""
    executor = pool.executor()
    called = []
    many = [executor.submit(work.gated, str(gate.path)) for _ in range(10)]
    many[0].add_done_callback(called.append)
    got = executor.map(work.gated, [str(gate.path)] * 9, buffersize=3)
    if end == "terminate":
        pool.terminate()
    else:
        pool.__exit__(None, None, None)
    gate.open()
    for future in many:
        error = future.exception(WAIT)
        assert isinstance(error, futures.BrokenExecutor), error
        assert isinstance(error.__cause__, xpool.PoolClosed)
    until(lambda: called == [many[0]])
    with pytest.raises(futures.BrokenExecutor, match="terminated"):
        next(got)
    with pytest.raises(futures.BrokenExecutor):
        executor.submit(abs, -1)


def test_the_end_of_a_pool_in_an_event_loop(pool, gate):
    """A coroutine that awaits a call gets an error when the pool ends."""

    async def main():
        awaited = asyncio.get_running_loop().run_in_executor(
            pool.executor(), work.gated, str(gate.path)
        )
        pool.terminate()
        with pytest.raises(futures.BrokenExecutor, match="terminated"):
            await asyncio.wait_for(awaited, WAIT)

    asyncio.run(main())
    gate.open()


class Opens:
    """Raises an exception when it is unpickled."""

    def __init__(self, kind):
        self.kind = kind

    def __reduce__(self):
        return work.raise_it, (self.kind(),)


def until(fact):
    eventually(fact, "what the test waits for", WAIT)


def waits_for(executor, how):
    """Submit a call, and wait for it in the given way."""
    future = executor.submit(abs, -5)
    if how == "wait":
        futures.wait([future], WAIT)
    elif how == "as_completed":
        (future,) = futures.as_completed([future], WAIT)
    elif how == "done":
        until(future.done)
    elif how == "exception":
        assert future.exception(WAIT) is None
    elif how == "another thread":
        thread = threading.Thread(target=future.result, args=(WAIT,))
        thread.start()
        thread.join()
    return future.result(WAIT)


WAYS = ["result", "exception", "wait", "as_completed", "done", "another thread"]


def test_a_callback_waits_for_another_future(executor, gate):
    """A callback of a future may wait for another future of the same executor, in any way."""
    found = []
    for how in WAYS:
        first = executor.submit(work.gated, str(gate.path))
        first.add_done_callback(lambda _, how=how: found.append(waits_for(executor, how)))
        gate.open()
        until(lambda how=how: found == [5] * (WAYS.index(how) + 1))


def test_a_handler_calls_the_pool_while_futures_are_looked_at(pool, gate):
    """A signal handler that interrupts `concurrent.futures.wait` may use the pool.

    The interrupted thread holds the condition of the future, which is answered meanwhile.
    """
    first = pool.submit(work.gated, str(gate.path))
    with first._condition:  # as in `wait`; it is reentrant
        gate.open()
        until(lambda: pool.statistics()["succeeded"] == 1)
        assert pool.map(abs, range(-64, 0), chunksize=1) == [*range(64, 0, -1)]
        assert [pool.apply(abs, (-1,)) for _ in range(8)] == [1] * 8
    first.result(WAIT)


def test_a_callback_of_the_pool_waits_for_a_future(pool):
    """A callback of `apply_async` may wait for futures."""
    found, executor = [], pool.executor()
    for how in WAYS:
        wait = functools.partial(waits_for, executor, how)
        pool.apply_async(abs, (-1,), callback=lambda _, wait=wait: found.append(wait()))
    until(lambda: found == [5] * len(WAYS))


def test_callbacks_run_one_by_one(executor, gate):
    """Callbacks of a future run in one thread, in the order in which they were added."""
    seen = []
    future = executor.submit(work.gated, str(gate.path))
    for n in range(5):
        future.add_done_callback(lambda _, n=n: seen.append((n, threading.get_ident())))
    gate.open()
    until(lambda: len(seen) == 5)
    assert [n for n, _ in seen] == list(range(5)) and len({thread for _, thread in seen}) == 1


def test_a_callback_that_raises(executor, gate, caplog):
    """A callback's exception is logged, as in `concurrent.futures`. Later callbacks still run."""
    seen = []
    future = executor.submit(work.gated, str(gate.path))
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(seen.append)
    gate.open()
    until(lambda: seen == [future])
    assert "exception calling callback" in caplog.text and "ZeroDivisionError" in caplog.text


class Errors(Exception):
    def __len__(self):
        return 0


def raise_errors():
    raise Errors


def test_an_exception_that_is_false(executor):
    """It is raised. `concurrent.futures` returns None until Python 3.14."""
    with pytest.raises(Errors):
        executor.submit(raise_errors).result(WAIT)


@pytest.mark.parametrize("end", ["terminate_workers", "kill_workers"])
def test_workers_are_stopped(gate, end):
    """Both methods cancel waiting calls, fail the running call and unfinished maps, stop drawing
    their input, and end the workers and the executor."""
    executor, drawn = Executor(1), []
    running = executor.submit(work.gated, str(gate.path))
    until(running.running)
    waiting = [executor.submit(abs, -n) for n in range(5)]
    pids = [pid for pid in executor._pool.statistics()["pids"] if pid is not None]
    bounded = (drawn.append(n) or n for n in range(100))
    several = [
        executor.map(work.gated, itertools.repeat(str(gate.path)), bounded, buffersize=4),
        executor.map(work.gated, [str(gate.path)] * 9),
    ]
    getattr(executor, end)()
    assert isinstance(running.exception(WAIT), futures.BrokenExecutor)
    assert not futures.wait(waiting, WAIT).not_done and all(f.cancelled() for f in waiting)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(abs, -1)
    for got in several:
        with pytest.raises((futures.BrokenExecutor, futures.CancelledError)):
            next(got)
    assert len(drawn) <= 5
    assert not wait_gone(pids)


@pytest.mark.parametrize("end", ["terminate_workers", "kill_workers"])
def test_workers_are_stopped_at_any_time(end):
    """Both methods also accept idle workers, a second call, and an executor after `shutdown`."""
    for prepare in (lambda _: None, Executor.shutdown, Executor.terminate_workers):
        executor = Executor(2)
        future = executor.submit(abs, -1)
        assert future.result(WAIT) == 1
        prepare(executor)
        getattr(executor, end)()
        getattr(executor, end)()
        executor.shutdown()
        assert future.result() == 1
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(abs, -1)


def test_signals_that_stop_the_workers(tmp_path, monkeypatch):
    """`kill_workers` sends SIGKILL; `terminate_workers` sends SIGTERM, which a task may handle."""
    monkeypatch.setattr("xpool._engine.replacement.TERMINATE_GRACE_SECONDS", WAIT)

    def asked(path):
        path.write_text("asked")
        os._exit(0)

    def task(path):
        signal.signal(signal.SIGTERM, lambda *_: asked(path))
        path.write_text("begun")
        while True:
            signal.pause()

    for end, text in (("kill_workers", "begun"), ("terminate_workers", "asked")):
        executor, path = Executor(1), tmp_path / end
        executor.submit(task, path)
        until(lambda path=path: path.exists() and path.read_text() == "begun")
        getattr(executor, end)()
        assert path.read_text() == text


def test_initializers_that_fail():
    """If a worker cannot start, futures fail with `BrokenExecutor`. Its cause is the error."""
    with Executor(1, None, divmod, (1, 0)) as executor:
        error = executor.submit(abs, -1).exception(WAIT)
        assert isinstance(error, futures.BrokenExecutor)
        assert isinstance(error.__cause__, WorkerStartFailed)
        assert isinstance(error.__cause__.__cause__, ZeroDivisionError)
        with pytest.raises(futures.BrokenExecutor):
            executor.submit(abs, -1)


def test_max_tasks_per_child_and_mp_context():
    """The standard names are accepted. An option given by both its names is refused."""
    with Executor(1, "spawn", max_tasks_per_child=2) as executor:
        pids = [executor.submit(os.getpid).result(WAIT) for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    for options in (
        {"mp_context": "spawn", "context": "spawn"},
        {"max_tasks_per_child": 1, "maxtasksperchild": 1},
    ):
        with pytest.raises(ValueError, match="the same"):
            Executor(1, **options)
    with pytest.raises(ValueError, match="max_tasks_per_child"):
        Executor(1, max_tasks_per_child=0)


@pytest.mark.parametrize("call", ["submit", "map"])
def test_an_executor_that_is_dropped_finishes(tmp_path, call):
    """If an executor is dropped, its submitted calls still run. Then its workers end."""
    log = tmp_path / "log"
    executor = Executor(1)
    for n in range(5):
        if call == "submit":
            executor.submit(work.logged, str(log), n)
    if call == "map":
        executor.map(work.logged, [str(log)] * 5, range(5))
    gone = weakref.ref(executor._pool)
    del executor
    until(lambda: gone() is None)
    assert log.read_text().split() == list("01234")


def test_a_forked_child():
    """In a forked child, a future of the parent fails instead of waiting for ever."""
    code = (
        "import os, sys, time, xpool\n"
        "with xpool.Executor(1) as e:\n"
        "    f = e.submit(time.sleep, 1)\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        print(type(f.exception()).__name__, flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
    )
    assert scripts.run_ok(["-W", "ignore", "-c", code]) == "BrokenExecutor\n"


def test_the_timeout_of_map(to_end, gate):
    """The error of `map(timeout=)` names the limit."""
    got = to_end.map(work.gated, [str(gate.path)], timeout=0.2)
    with pytest.raises(futures.TimeoutError, match=r"0\.2 s"):
        next(got)
    gate.open()


class CannotBeSent:
    """Raises an error when it is pickled."""

    def __reduce__(self):
        raise pickle.PicklingError("not this")


def test_calls_that_cannot_be_pickled():
    """If a task or a result cannot be pickled, or the result not unpickled, its future has the
    error. Other futures are not affected."""
    with Executor(1) as executor:
        for kind, *call in (
            (pickle.PicklingError, id, CannotBeSent()),
            (pickle.PicklingError, CannotBeSent),
            *((kind, Opens, kind) for kind in (SystemExit, KeyboardInterrupt, ZeroDivisionError)),
        ):
            assert isinstance(executor.submit(*call).exception(WAIT), kind)
            assert executor.submit(abs, -1).result(WAIT) == 1


def test_a_future_of_a_pool(pool, gate):
    """`pool.submit` returns a standard future. It fails when the pool ends."""
    assert pool.submit(pow, 2, exp=5).result(WAIT) == 32
    assert isinstance(pool.submit(divmod, 1, 0).exception(WAIT), ZeroDivisionError)
    waiting = pool.submit(work.gated, str(gate.path))
    assert not futures.wait([waiting], 0).done
    pool.terminate()
    gate.open()
    assert isinstance(waiting.exception(WAIT), futures.BrokenExecutor)
    with pytest.raises(xpool.PoolClosed):
        pool.submit(abs, -1)


def test_a_future_of_a_pool_with_contexts():
    """A function submitted to a `CtxPool` gets the worker's context as its first argument."""
    with CtxPool(worker_contexts=["a"]) as pool:
        assert pool.submit(work.echo, 1, n=2).result(WAIT) == (("a", 1), {"n": 2})
        assert list(pool.executor().map(work.echo, [1], [2])) == [(("a", 1, 2), {})]
