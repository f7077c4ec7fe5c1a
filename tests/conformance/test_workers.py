"""Workers: their initializers, lifetimes, indices and contexts, and random numbers."""

from __future__ import annotations

import collections
import multiprocessing
import os
import threading
import types

import pytest
from support import scripts, work
from support.kinds import PROCESS_KINDS, STDLIB
from support.waiting import eventually

from xpool import OptionError


@pytest.fixture(autouse=True)
def _forget():
    """Clear the list that workers of thread pools share with this module."""
    yield
    work.initialised.clear()


# Initializers ------------------------------------------------------------------------------------


def test_initializer_runs_before_the_first_task(process_kind, make_pool):
    """Every worker runs its initializer once, before its first task."""
    pool = make_pool(process_kind, 2, work.remember, (1, "two"))
    assert pool.map(work.recall, range(20), 1) == [[(1, "two")]] * 20


def test_initializer_in_threads(thread_kind, make_pool):
    """In a thread pool, each thread runs the initializer once."""
    pool = make_pool(thread_kind, 3, work.remember, ("x",))
    pool.close()
    pool.join()
    assert work.initialised == [("x",)] * 3


def test_initializer_by_name(kind, make_pool):
    """`initializer` and `initargs` may be keywords. `initargs` may be any iterable, or left out."""
    pool = make_pool(kind, processes=1, initializer=work.remember, initargs=["a", "b"])
    assert pool.apply(work.recall) == [("a", "b")]
    work.initialised.clear()
    assert make_pool(kind, 1, work.remember).apply(work.recall) == [()]


@pytest.mark.xpool_only
def test_initializer_may_be_a_closure(kind, make_pool):
    """The initializer may be a lambda or a local function."""
    token = "closure"

    def initialise(x):
        work.remember(token, x)

    pool = make_pool(kind, 1, initialise, (1,))
    assert pool.apply(work.recall) == [("closure", 1)]


def test_locks_of_the_default_context(make_pool):
    """Locks, values and queues of the default context work with a pool of the default context."""
    lock, value, queue = (
        multiprocessing.Lock(),
        multiprocessing.Value("i", 0),
        multiprocessing.SimpleQueue(),
    )
    if STDLIB:
        pool = make_pool(multiprocessing.Pool, 2, work.remember, (lock, value, queue))
    else:
        from xpool import Pool

        pool = make_pool(Pool, 2, work.remember, (lock, value, queue))
    assert sorted(pool.map(work.hold_lock_and_count, range(10), 1)) == list(range(1, 11))
    for _ in range(10):
        queue.get()
    queue.close()


# Lifetimes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
def test_maxtasksperchild(process_kind, make_pool, limit):
    """A worker runs exactly `maxtasksperchild` tasks; a chunk of a map counts as one. Then another
    worker replaces it, runs the initializer and has the same index."""
    pool = make_pool(process_kind, 1, work.remember, (7,), limit)
    results = [pool.apply_async(work.pid) for _ in range(4 * limit)]
    counts = collections.Counter(r.get() for r in results)
    assert list(counts.values()) == [limit] * 4
    counts = collections.Counter(pool.map(work.pid, range(6 * limit), chunksize=3))
    assert list(counts.values()) == [3 * limit] * 2
    assert pool.map(work.recall, range(2 * limit), 1) == [[(7,)]] * 2 * limit
    if not STDLIB:
        assert [index for index, *_ in pool.map(work.who, range(2 * limit), 1)] == [0] * 2 * limit


@pytest.mark.xpool_only
def test_maxtasksperchild_of_threads(thread_kind, make_pool):
    """A thread that reaches `maxtasksperchild` in the middle of a call loses no task."""
    for threads in 1, 2:
        pool = make_pool(thread_kind, threads, maxtasksperchild=3)
        assert pool.map(work.square, range(20), 1) == [i * i for i in range(20)]
        assert list(pool.imap(work.square, range(20))) == [i * i for i in range(20)]


def test_daemon_flag(process_kind, make_pool):
    """Workers are daemonic by default."""
    pool = make_pool(process_kind, 1)
    assert pool.apply(work.is_daemon) is True
    if not STDLIB:
        assert make_pool(process_kind, 1, is_daemon=False).apply(work.is_daemon) is False


@pytest.mark.xpool_only
def test_working_directory_of_the_moment(make_pool, monkeypatch, tmp_path):
    """A worker's working directory is the parent's directory when the worker starts."""
    from xpool import Pool

    make_pool(Pool, 1).apply(work.nothing)
    monkeypatch.chdir(tmp_path)
    assert make_pool(Pool, 1).apply(os.getcwd) == str(tmp_path)


# Indices and contexts ----------------------------------------------------------------------------


@pytest.mark.xpool_only
def test_current_worker(kind, make_pool, mailbox, gate):
    """In a task, `current_worker()` has the worker's index and context."""
    pool = make_pool(kind, 3)
    results = [pool.apply_async(work.who_at_gate, (mailbox.path, gate.path)) for _ in range(3)]
    mailbox.lines(3)
    gate.open(3)
    seen = sorted(r.get() for r in results)
    assert [index for index, _, _ in seen] == [0, 1, 2]
    expected = [f"context {i}" for i in range(3)] if kind.name.startswith("ctx") else [None] * 3
    assert [context for _, context, _ in seen] == expected
    assert len({name for _, _, name in seen}) == 1 and all(name for _, _, name in seen)


@pytest.mark.xpool_only
def test_current_worker_after_a_thread_pool(kind, make_pool):
    """A caller whose tasks ran in threads is not a worker."""
    from xpool import current_worker

    pool = make_pool(kind, 1)
    pool.apply(work.square, (1,))
    with pytest.raises(RuntimeError):
        current_worker()


@pytest.mark.xpool_only
@pytest.mark.parametrize("name", ["CtxPool", "CtxThreadPool"])
def test_contexts(make_pool, mailbox, gate, name):
    """`func(ctx, *args)` gets its worker's context. The pool's size is the number of contexts."""
    import xpool

    pool = make_pool(getattr(xpool, name), worker_contexts=[{"i": 0}, {"i": 1}])
    assert pool.size() == 2
    results = [
        pool.apply_async(work.context_at_gate, (mailbox.path, gate.path, i)) for i in range(2)
    ]
    mailbox.lines(2)
    gate.open(2)
    seen = [r.get() for r in results]
    assert sorted(context["i"] for context, _ in seen) == [0, 1]
    assert [x for _, x in seen] == [0, 1]
    assert pool.map(work.context_and, range(4)) and pool.starmap(work.context_and, [(1,)])
    assert [x for _, x in pool.imap(work.context_and, range(4))] == list(range(4))
    assert pool.apply(work.context_and, (), {"x": 9})[1] == 9


class Entered:
    """A context that counts how often its worker has entered it."""

    def __init__(self) -> None:
        self.times, self.thread, self.seen = 0, "", 0

    def enter(self) -> None:
        self.times += 1
        self.thread = threading.current_thread().name


def times_entered(context):
    context.seen += 1
    return context.times, context.thread == threading.current_thread().name


class Refusing:
    def enter(self) -> None:
        raise ValueError("no device")


@pytest.mark.xpool_only
@pytest.mark.parametrize("name", ["CtxPool", "CtxThreadPool"])
def test_a_context_is_entered(make_pool, name):
    """A worker calls its context's `enter` once, in the thread that runs its tasks. If it raises,
    the worker cannot start, and the error says why."""
    import xpool

    pool = make_pool(getattr(xpool, name), worker_contexts=[Entered()])
    assert [pool.apply(times_entered) for _ in range(2)] == [(1, True)] * 2
    pool = make_pool(getattr(xpool, name), worker_contexts=[Refusing()])
    with pytest.raises((xpool.WorkerStartFailed, xpool.PoolClosed), match="ValueError: no device"):
        pool.apply(times_entered)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"A": 1}, r"worker_contexts\[1\]\.env\['A'\] must be a str, .* not 1"),
        ({1: "A"}, r"a name in worker_contexts\[1\]\.env must be a str, not 1"),
        (["A"], r"worker_contexts\[1\]\.env must be a mapping .* not \['A'\]"),
    ],
)
def test_wrong_variables_of_a_context(env, says):
    """A context whose variables are no strings is refused by name."""
    from xpool import CtxPool

    contexts = [types.SimpleNamespace(env=one) for one in ({"A": None}, env)]
    with pytest.raises(TypeError, match=says):
        CtxPool(worker_contexts=contexts)


def test_contexts_in_place_of_a_number():
    """The error names the argument for contexts."""
    from xpool import CtxPool

    with pytest.raises(TypeError, match="not a list; .* write worker_contexts="):
        CtxPool([{}])


def test_a_string_in_place_of_contexts():
    """Its characters are no contexts."""
    import xpool

    for name in "CtxPool", "CtxThreadPool":
        with pytest.raises(TypeError, match=r"is a string, .* write worker_contexts=\['cuda'\]"):
            getattr(xpool, name)(worker_contexts="cuda")


@pytest.mark.parametrize(
    ("name", "value"), [("env", {"OMP_NUM_THREADS": "1"}), ("cpus", (0,)), ("cpus", [0])]
)
def test_threads_are_not_bound(name, value):
    """A context that binds its process is refused for threads, which share one."""
    from xpool import CtxThreadPool

    context = types.SimpleNamespace(**{name: value})
    with pytest.raises(OptionError, match=rf"worker_contexts\[0\] has {name}, .*use CtxPool"):
        CtxThreadPool(worker_contexts=[context])


@pytest.mark.xpool_only
def test_a_context_keeps_what_tasks_put_there(make_pool):
    """A worker keeps its context. A task finds what an earlier task stored in it."""
    from xpool import CtxPool

    pool = make_pool(CtxPool, worker_contexts=[{}])
    assert [pool.apply(work.count_in_context) for _ in range(3)] == [1, 2, 3]


@pytest.mark.xpool_only
def test_p2p_names_the_worker(make_pool):
    """With `worker=i`, `P2PPool` always runs the task in the same process."""
    from xpool import P2PPool

    pool = make_pool(P2PPool, 3)
    pids = [{pool.apply(work.pid, worker=i) for _ in range(5)} for i in range(3)]
    assert all(len(seen) == 1 for seen in pids) and len(set.union(*pids)) == 3
    results = [pool.apply_async(work.who, worker=i % 3) for i in range(30)]
    assert [r.get()[0] for r in results] == [i % 3 for i in range(30)]


@pytest.mark.xpool_only
@pytest.mark.parametrize("worker", [2, -1, 99, "0", 1.0, True])
def test_p2p_worker_out_of_range(make_pool, worker):
    """An invalid worker raises an error that names the argument. The pool stays usable."""
    from xpool import P2PPool

    pool = make_pool(P2PPool, 2)
    with pytest.raises((ValueError, TypeError), match="worker") as caught:
        pool.apply_async(work.square, (2,), worker=worker)
    assert isinstance(caught.value, ValueError) or type(worker) is not int
    assert pool.apply(work.square, (2,), worker=1) == 4


@pytest.mark.xpool_only
def test_p2p_takes_the_least_loaded(make_pool, mailbox, gate):
    """Without `worker=`, the worker with the fewest tasks gets the task."""
    from xpool import P2PPool

    pool = make_pool(P2PPool, 2)
    busy = [pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), worker=0)]
    mailbox.line()
    indices = []
    for _ in range(4):
        indices.append(pool.apply(work.who)[0])
    assert indices == [1] * 4
    gate.open()
    assert busy[0].get() is None


@pytest.mark.xpool_only
def test_short_tasks_one_after_the_other_use_all_workers(process_kind, make_pool):
    """Short tasks of a stream go to idle workers in turn."""
    pool = make_pool(process_kind, 3)
    eventually(lambda: pool.statistics()["ready"] == 3, "all workers ready")

    def one_by_one():
        for _ in range(6):
            seen.clear()
            yield 0
            seen.wait()

    seen = threading.Event()
    streamed = []
    for index, *_ in pool.imap(work.who, one_by_one()):
        streamed.append(index)
        seen.set()
    assert sorted(streamed[:3]) == [0, 1, 2] and streamed[3:] == streamed[:3]


@pytest.mark.xpool_only
def test_statistics(kind, make_pool):
    """`statistics()` returns the same names before and after tasks, with other numbers."""
    pool = make_pool(kind, 2)
    before = dict(pool.statistics())
    pool.map(work.square, range(10), 1)
    with pytest.raises(KeyError):
        pool.apply(work.fail)
    after = dict(pool.statistics())
    assert before != after and before.keys() == after.keys()
    assert all(isinstance(name, str) for name in after)


# Random numbers ----------------------------------------------------------------------------------


@pytest.fixture(
    params=[
        pytest.param((), id="plain", marks=pytest.mark.exhaustive),
        pytest.param(("numpy",), id="numpy", marks=pytest.mark.exhaustive),
        pytest.param(("numpy", "torch"), id="torch"),
    ],
    scope="module",
)
def modules(request, warm):
    """Modules with random generators. The program imports them too."""
    for name in request.param:
        pytest.importorskip(name)
    if request.param and not STDLIB:
        # Start the fork server that preloads them now, not in a test.
        with PROCESS_KINDS[0](1) as pool:
            pool.apply(work.nothing)
        pool.join()
    return request.param


def _streams(make_pool, mailbox, gate, kind, modules, **options):
    pool = make_pool(kind, 2, **options)
    results = [pool.apply_async(work.meet, (mailbox.path, gate.path, modules)) for _ in range(2)]
    mailbox.lines(2)
    gate.open(2)
    drawn = [result.get() for result in results]
    assert len({pid for pid, _ in drawn}) == 2
    pool.terminate()
    pool.join()
    return sorted(numbers for _, numbers in drawn)


@pytest.mark.xpool_only
def test_workers_draw_different_numbers(modules, process_kind, make_pool, mailbox, gate):
    """No two workers draw the same random numbers from any generator."""
    one, two = _streams(make_pool, mailbox, gate, process_kind, modules)
    for a, b in zip(one, two, strict=True):
        assert a is None or a != b


@pytest.mark.xpool_only
def test_seed_makes_workers_repeat(modules, process_kind, make_pool, mailbox, gate):
    """Pools with the same ``seed=`` draw the same numbers, pools with other seeds draw others."""
    first = _streams(make_pool, mailbox, gate, process_kind, modules, seed=7)
    again = _streams(make_pool, mailbox, gate, process_kind, modules, seed=7)
    other = _streams(make_pool, mailbox, gate, process_kind, modules, seed=8)
    assert first == again
    assert all(a != b for a, b in zip(first[0], other[0], strict=True) if a is not None)
    assert all(a != b for a, b in zip(*first, strict=True) if a is not None)


@pytest.mark.xpool_only
def test_seed_depends_on_the_index(make_pool):
    """With a seed, the worker with the same index draws the same numbers in every pool."""
    from xpool import P2PPool

    drawn = []
    for _ in range(2):
        pool = make_pool(P2PPool, 2, seed=3)
        drawn.append([pool.apply(work.random_numbers, worker=i)[0] for i in range(2)])
    assert drawn[0] == drawn[1]


@pytest.mark.exhaustive
@pytest.mark.torch
@pytest.mark.xpool_only
def test_forked_from_a_program_that_computes(tmp_path):
    """After the program has used OpenMP's threads, forked workers still compute."""
    out = scripts.program(
        tmp_path,
        """
        import os
        import torch, xpool

        if __name__ == "__main__":
            torch.set_num_threads(2)
            torch.full((10_000_000,), 1.0).sum()
            for number in ("", "2"):
                if number:
                    os.environ["OMP_NUM_THREADS"] = number
                with xpool.Pool(1, context="fork") as pool:
                    print(pool.apply(torch.full, ((1_000_000,), 7.0)).sum().item())
        """,
    )
    assert out.split() == ["7000000.0"] * 2
