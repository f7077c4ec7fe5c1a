"""A pool from its constructor to `join`: its states, and each way to end it."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.pool
import os
import pickle
import signal
import threading
import warnings
import weakref

import pytest
from support import work
from support.kinds import STDLIB
from support.leaks import descendants
from support.limits import WAIT
from support.tiers import also
from support.waiting import eventually, wait_gone

from xpool import CtxThreadPool, PoolClosed

SUBMIT = {
    "apply": lambda pool: pool.apply(work.square, (1,)),
    "apply_async": lambda pool: pool.apply_async(work.square, (1,)),
    "map": lambda pool: pool.map(work.square, [1]),
    "map_async": lambda pool: pool.map_async(work.square, [1]),
    "starmap": lambda pool: pool.starmap(work.add, [(1, 2)]),
    "starmap_async": lambda pool: pool.starmap_async(work.add, [(1, 2)]),
    "imap": lambda pool: pool.imap(work.square, [1]),
    "imap_unordered": lambda pool: pool.imap_unordered(work.square, [1]),
}


@pytest.mark.parametrize("end", ["close", "terminate"])
def test_no_work_after_the_end(kind, make_pool, end):
    """After `close` or `terminate`, every verb and ``with`` raise ValueError, which says how the
    pool has ended."""
    pool = make_pool(kind, 1)
    assert pool.apply(work.square, (3,)) == 9
    getattr(pool, end)()
    said = {"close": "was closed", "terminate": "was terminated"}[end]
    for _ in range(2):  # also after `join`
        for name, submit in SUBMIT.items():
            with pytest.raises(ValueError, match="(?i)pool") as caught:
                submit(pool)
                pytest.fail(f"{name} was accepted after {end}")
            assert STDLIB or f"{said} and takes no more work; make a new" in str(caught.value)
        with pytest.raises(ValueError, match="(?i)pool"), pool:
            pytest.fail("entered")
        pool.join()


def test_close_then_join_finishes_the_work(kind, make_pool):
    """After `close`, `join` waits until all submitted tasks are done."""
    pool = make_pool(kind, 2)
    results = [pool.apply_async(work.square, (i,)) for i in range(500)]
    mapped = pool.map_async(work.square, range(500), 1)
    lazily = pool.imap(work.square, range(100))
    pool.close()
    pool.join()
    assert all(r.ready() for r in results) and mapped.ready()
    assert [r.get() for r in results] == mapped.get() == [i * i for i in range(500)]
    assert list(lazily) == [i * i for i in range(100)]


@pytest.mark.xpool_only
@pytest.mark.parametrize("end", ["close", "terminate"])
def test_join_in_a_task_of_the_same_pool(thread_kind, make_pool, end):
    """It is refused, since it would wait for itself. The pool ends after the task."""
    pool, refused = make_pool(thread_kind, 2), []

    def join(*_):
        getattr(pool, end)()
        try:
            pool.join()
        except RuntimeError as error:
            refused.append(str(error))

    pool.apply_async(join)
    eventually(lambda: refused, "the error")
    assert refused == ["join() in a task of the same pool would wait for itself"]
    pool.join(WAIT)


@pytest.mark.xpool_only
def test_join_in_the_input_of_the_same_pool(kind, make_pool):
    """It is refused in the input of `imap`, since it would wait for itself."""
    pool = make_pool(kind, 2)

    def items(end):
        yield 1
        end()
        pool.join(WAIT)
        yield 2

    results = pool.imap(work.square, items(pool.close))
    assert next(results) == 1
    with pytest.raises(RuntimeError, match="in the input of imap of the same pool would wait"):
        next(results)
    pool.join(WAIT)
    pool = make_pool(kind, 2)
    with pytest.raises(PoolClosed):
        list(pool.imap(work.square, items(pool.terminate)))
    pool.join(WAIT)


def test_join_waits_for_a_running_task(kind, make_pool, mailbox, gate):
    """`join` does not return before the running task has ended."""
    pool = make_pool(kind, 1)
    result = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, "done"))
    mailbox.line()
    pool.close()
    joiner = threading.Thread(target=pool.join)
    joiner.start()
    joiner.join(0.1)
    assert joiner.is_alive()
    gate.open()
    joiner.join(WAIT)
    assert not joiner.is_alive() and result.get(0) == "done"


def test_terminate_with_a_full_queue(process_kind, make_pool, mailbox, gate):
    """`terminate` waits neither for ten thousand queued tasks nor for the running ones."""
    pool = make_pool(process_kind, 2)
    jobs = [(mailbox.path, gate.path)] * 10_000
    result = pool.starmap_async(work.post_and_gate, jobs, chunksize=1)
    pids = {int(line) for line in mailbox.lines(2)}
    pool.terminate()
    pool.join()
    assert wait_gone(pids, 5) == []
    assert not STDLIB or not result.ready()


def test_terminate_with_large_queued_tasks(process_kind, make_pool, mailbox, gate):
    """`terminate` does not wait for a pipe full of large tasks."""
    pool = make_pool(process_kind, 1)
    pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
    mailbox.line()
    for _ in range(20):
        pool.apply_async(work.nothing, (bytes(1 << 20),))
    pool.terminate()
    pool.join()


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", ["apply_async", "map_async", "imap", "imap_unordered"])
def test_terminate_fails_pending_results(kind, make_pool, mailbox, gate, verb):
    """After `terminate`, a pending result raises an XPoolError instead of waiting."""
    from xpool import XPoolError

    pool = make_pool(kind, 1)
    running = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
    mailbox.line()
    arguments = (3,) if verb == "apply_async" else range(10)
    pending = getattr(pool, verb)(work.square, arguments)

    # Open the gate later, because no thread can be ended from outside. Otherwise `terminate` would
    # wait for ever.
    def open_gate():
        eventually(lambda: "TERMINATE" in repr(pool), "the pool ends")
        gate.open()

    opener = threading.Thread(target=open_gate)
    if not kind.processes:
        opener.start()
    pool.terminate()
    for get in (running.get, pending.get if verb.endswith("async") else pending.__next__):
        if get == running.get and not kind.processes:
            continue
        with pytest.raises(XPoolError):
            get()
    if not kind.processes:
        opener.join()
    pool.join()


@pytest.mark.xpool_only
def test_terminate_from_another_thread(process_kind, make_pool, mailbox):
    """A caller that waits in `map` gets an error when another thread terminates the pool."""
    from xpool import XPoolError

    pool = make_pool(process_kind, 2)

    def stop():
        mailbox.line()
        pool.terminate()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(XPoolError):
        pool.map(work.post_and_spin, [mailbox.path] * 4, chunksize=1)
    stopper.join(WAIT)
    assert not stopper.is_alive()


def test_context_manager_terminates(process_kind, make_pool, mailbox, gate):
    """The end of the ``with`` block terminates the pool and its running tasks."""
    with make_pool(process_kind, 1) as pool:
        pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
        worker = int(mailbox.line())
    assert wait_gone([worker], 5) == []
    with pytest.raises(ValueError, match="(?i)pool"):
        pool.apply(work.square, (1,))
    pool.join()


def test_context_manager_binds_the_pool(kind, make_pool):
    """``with pool as p`` binds the pool itself, and does not catch errors."""
    pool = make_pool(kind, 1)
    with pytest.raises(ZeroDivisionError), pool as inside:
        assert inside is pool
        assert inside.map(work.square, [1, 2]) == [1, 4]
        raise ZeroDivisionError
    pool.join()


@pytest.mark.xpool_only
def test_deleted_without_close(kind):
    """If a running pool is dropped, it warns, and its workers stop."""
    before = descendants()
    pool = kind(2)
    assert pool.apply(work.square, (3,)) == 9
    count = 2 if kind.processes else 0  # one worker may have answered before the other started
    eventually(lambda: len(descendants() - before) == count, "all workers")
    workers = descendants() - before
    # A recorded warning would keep a reference to the pool, its source.
    seen: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_: seen.append(f"{category} {message}")
        del pool
        gc.collect()
        eventually(lambda: seen, "a warning")
    assert "ResourceWarning" in seen[0]
    assert "unclosed running multiprocessing pool" in seen[0], "the standard library's text"
    assert wait_gone(workers, 5) == []


@pytest.mark.xpool_only
@pytest.mark.parametrize("name", ["Pool", "ThreadPool"])
def test_ended_while_it_is_deleted(name):
    """A thread that gets the pool while another finalizes it can end it: `terminate` returns.

    The interpreter's exit ends the pools that it finds, also one that is just being finalized.
    """
    import xpool

    found = []

    class Found(getattr(xpool, name)):
        def __del__(self):
            super().__del__()
            found.append(self)  # as a weak reference gives it to another thread

    pool = Found(1)
    assert pool.apply(work.square, (3,)) == 9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del pool
        gc.collect()
    (pool,) = found
    pool.terminate()
    pool.join()
    assert "TERMINATE" in repr(pool)
    found.clear()


@pytest.mark.xpool_only
def test_deleted_after_close_does_not_warn(kind, make_pool):
    """If a closed pool is dropped, it still runs its tasks and does not warn."""
    pool = kind(1)
    result = pool.apply_async(work.square, (3,))
    pool.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del pool
        gc.collect()
    assert result.get(WAIT) == 9


@pytest.mark.xpool_only
def test_result_outlives_the_variable(kind):
    """If the pool of a result is dropped, the result gets a value or an error."""
    from xpool import XPoolError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        result = kind(1).apply_async(work.square, (3,))
        gc.collect()
        try:
            assert result.get(WAIT) == 9
        except XPoolError:
            assert result.ready() and not result.successful()
        gc.collect()


def test_pools_do_not_pickle(pool):
    """Pickling a pool raises NotImplementedError."""
    with pytest.raises(NotImplementedError, match="pool"):
        pickle.dumps(pool)


@pytest.mark.xpool_only
def test_states_and_repr(kind, make_pool, mailbox, gate):
    """The state changes from RUN to CLOSE to TERMINATE, the strings that `multiprocessing.pool`
    uses. `repr` shows it in one line. `join` of a running pool raises ValueError."""
    from xpool import PoolStates

    pool = make_pool(kind, 2)
    assert pool.state == PoolStates.RUN == multiprocessing.pool.RUN
    with pytest.raises(ValueError, match="running"):
        pool.join()
    text = repr(pool)
    assert "\n" not in text and "Pool" in text and "2" in text and "RUN" in text
    pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
    mailbox.line()
    pool.close()
    assert pool.state == PoolStates.CLOSE == multiprocessing.pool.CLOSE and "CLOSE" in repr(pool)
    gate.open()
    pool.join()
    pool.terminate()
    pool.close()  # nothing leads back
    assert pool.state == PoolStates.TERMINATE == multiprocessing.pool.TERMINATE
    assert "TERMINATE" in repr(pool)


@pytest.mark.parametrize("ends", [("close", "terminate"), ("close", "close"), ("terminate",) * 2])
def test_ends_may_be_repeated(kind, make_pool, ends):
    """A pool may be ended again while it still ends, and after its end, in any order."""
    pools = [make_pool(kind, processes=1) for _ in range(4)]
    for pool in pools:
        pool.apply(work.square, (1,))
    for end in ends:
        for pool in pools:
            getattr(pool, end)()
    for pool in pools:
        pool.join()
    for end in ("join", "terminate", "close", "join"):
        getattr(pool, end)()


def test_default_number_of_workers(make_pool):
    """`size()` is the number of workers, by default that of usable processors."""
    if STDLIB:
        pytest.skip("the standard library counts all processors until Python 3.13")
    from xpool import Pool, ThreadPool

    usable = len(os.sched_getaffinity(0))
    assert make_pool(Pool, processes=3).size() == make_pool(ThreadPool, 3).size() == 3
    assert make_pool(Pool).size() in (usable, os.cpu_count())
    assert make_pool(ThreadPool).size() in (usable, os.cpu_count())


def test_workers_are_children_that_leave(process_kind, make_pool):
    """After `join`, the worker processes no longer exist."""
    before = descendants()
    pool = make_pool(process_kind, 3)
    pool.map(work.square, range(10))
    # One worker may have run all tasks before the others started.
    eventually(lambda: len(descendants() - before) >= 3, "all workers have been started")
    workers = descendants() - before
    pool.close()
    pool.join()
    assert wait_gone(workers, 5) == []


def test_task_references_are_released(kind, make_pool):
    """After a task, the pool keeps no references to its arguments and result."""
    pool = make_pool(kind, 2)
    assert len(pool.map(work.same, [work.Counted() for _ in range(10)])) == 10
    assert isinstance(pool.apply(work.same, (work.Counted(),)), work.Counted)
    assert len(list(pool.imap(work.same, [work.Counted() for _ in range(10)]))) == 10

    def gone():
        gc.collect()
        return work.Counted.alive == 0

    eventually(gone, "all arguments and results released", 5)

    result = pool.map_async(work.refuse_all, [work.Counted() for _ in range(10)], 1)
    with pytest.raises(ValueError) as failed:
        result.get()
    del result
    # The traceback of the error may still refer to its item.
    eventually(lambda: gc.collect() >= 0 and work.Counted.alive <= 1, "other items released", 5)
    del failed
    eventually(gone, "the item of the error released", 5)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_core_with_every_start_method(make_pool, method, gate, mailbox):
    """With every start method, a pool runs tasks, raises their errors, and ends."""
    from multiprocessing import get_context

    if STDLIB:
        pool = make_pool(get_context(method).Pool, 2)
    else:
        from xpool import Pool

        pool = make_pool(Pool, 2, context=method)
    assert pool.apply(work.pid) != os.getpid()
    assert pool.map(work.square, range(100)) == [i * i for i in range(100)]
    assert list(pool.imap(work.square, range(100), 7)) == [i * i for i in range(100)]
    with pytest.raises(KeyError):
        pool.apply(work.fail, (1,))
    pending = pool.starmap_async(work.post_and_gate, [(mailbox.path, gate.path)] * 4, 1)
    mailbox.lines(2)
    gate.open(4)
    pool.close()
    pool.join()
    assert pending.get() == [None] * 4


@pytest.mark.parametrize(
    ("by_position", "as_object"),
    [(False, False), (True, True), *also((False, True), (True, False))],
)
@pytest.mark.xpool_only
def test_context_argument(make_pool, as_object, by_position):
    """The fifth positional argument is the context: an object or the name of a start method."""
    from xpool import Pool

    context = multiprocessing.get_context("forkserver") if as_object else "forkserver"
    if by_position:
        pool = make_pool(Pool, 1, None, (), None, context)
    else:
        pool = make_pool(Pool, 1, context=context)
    assert pool.apply(work.square, (3,)) == 9


@pytest.mark.xpool_only
@pytest.mark.parametrize("last", ["result", "callback", "future"])
def test_an_ended_pool_of_threads_is_freed_at_once(last):
    """When it has ended, nothing keeps the contexts of its threads until a garbage collection."""

    class Context:
        def square(self, n):
            return n * n

    freed = weakref.ref(context := Context())
    gc.collect()
    gc.disable()
    try:
        pool = CtxThreadPool(worker_contexts=[context])
        if last == "result":
            assert pool.map(Context.square, [1, 2, 3]) == [1, 4, 9]
        elif last == "callback":
            pool.apply_async(Context.square, (2,), callback=int)
        else:
            pool.submit(Context.square, 2).add_done_callback(repr)
        pool.close()
        pool.join()
        del pool, context
        eventually(lambda: freed() is None, "its threads have returned, and it is freed")
    finally:
        gc.enable()


@pytest.mark.xpool_only
@pytest.mark.parametrize("daemon", [True, *also(False)])
def test_pool_in_a_worker_task(process_kind, make_pool, daemon):
    """A task may make its own pool of processes or threads, in workers of any kind."""
    pool = make_pool(process_kind, 1, is_daemon=daemon)
    assert pool.apply(work.nested, ("Pool", 5)) == [i * i for i in range(5)]
    assert pool.apply(work.nested, ("ThreadPool", 5)) == [i * i for i in range(5)]
    assert pool.apply(work.nested, ("Pool", 3)) == [i * i for i in range(3)]


def test_thread_pool_in_a_worker_task(kind, make_pool):
    """A task may use its own thread pool."""
    pool = make_pool(kind, 1)
    assert pool.apply(work.nested_threads, (5,)) == [i * i for i in range(5)]


@pytest.mark.xpool_only
@pytest.mark.parametrize(
    ("end", "daemon"),
    [("terminate", False), ("kill -9", True), *also(("terminate", True), ("kill -9", False))],
)
def test_nested_pool_dies_with_its_worker(make_pool, mailbox, end, daemon):
    """When a worker ends, the workers and the fork server of its task's pool end too."""
    from xpool import Pool, WorkerDied

    pool = make_pool(Pool, 1, is_daemon=daemon)
    result = pool.apply_async(work.nested_spinners, (mailbox.path,))
    inner = {int(line) for line in mailbox.lines(2)}
    (outer,) = pool.statistics()["pids"]
    servers = {parent_of(pid) for pid in inner} - {None}
    if end == "kill -9":
        os.kill(outer, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            result.get()
    pool.terminate()
    pool.join()
    assert wait_gone(inner | servers, 10) == []


def parent_of(pid):
    """Return the parent's pid of a running process."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.xpool_only
@pytest.mark.parametrize("context", ["fork", *also("spawn")])
def test_pool_of_multiprocessing_s_own_processes_in_a_task(make_pool, context):
    """A daemonic worker refuses a pool that starts by fork or spawn, and says what to do."""
    from xpool import OptionError, Pool

    with pytest.raises(OptionError, match="is_daemon=False"):
        make_pool(Pool, 1).apply(nested_by, (context,))
    assert make_pool(Pool, 1, is_daemon=False).apply(nested_by, (context,)) == 9


def nested_by(context):
    """Use a pool with this start method inside a task."""
    from xpool import Pool

    with Pool(1, context=context) as pool:
        return pool.apply(work.square, (3,))


@pytest.mark.xpool_only
@pytest.mark.starts
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_use_in_a_forked_child(kind, make_pool):
    """In a forked child, the pool raises an error at once. In the parent, it stays usable."""
    pool = make_pool(kind, 1)
    assert pool.apply(work.square, (2,)) == 4
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pool.apply(work.square, (3,))
            said = "no error"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    assert wait_gone([child], 10) == [], os.kill(child, 9)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert "fork" in said and not said.startswith("no error") and "has failed" not in said
    assert pool.apply(work.square, (4,)) == 16
