"""Pools that override only the hooks work."""

from __future__ import annotations

import inspect
import multiprocessing
import queue
import threading
from typing import Any, NamedTuple

import pytest
from support import work
from support.kinds import STDLIB, VERBS
from support.limits import WAIT

import xpool

from .own_pools import QueueThreadPool

pytestmark = pytest.mark.xpool_only
if STDLIB:
    pytest.skip("hooks are xpool's own", allow_module_level=True)

KINDS = ["QueueThreadPool", "QueueProcessPool"]


@pytest.fixture(params=KINDS, scope="module")
def own(request):
    """The class of a pool that overrides the hooks."""
    from . import own_pools

    return getattr(own_pools, request.param)


@pytest.fixture
def shared(own, make_pool):
    """A pool of two workers."""
    return make_pool(own, 2)


def test_a_buffersize(shared):
    """The input of an `imap` is drawn as results are taken. `xpool.testing` tries all verbs."""
    assert list(shared.imap(work.square, range(20), buffersize=3)) == [i * i for i in range(20)]


def test_unpicklable_result(own, make_pool):
    """A result that cannot be pickled fails its task."""
    if own.__name__ == "QueueThreadPool":
        pytest.skip("threads send references")
    pool = make_pool(own, 1)
    with pytest.raises(multiprocessing.pool.MaybeEncodingError):  # type: ignore[attr-defined]
        pool.apply_async(work.unpicklable).get(WAIT)
    assert pool.apply(work.square, (2,)) == 4


def test_initializer(own, make_pool):
    """The initializer runs in every worker."""
    pool = make_pool(own, 1, work.remember, ("own",))
    try:
        assert pool.apply(work.recall)[-1] == ("own",)
        assert pool.initializer is work.remember and tuple(pool.initargs) == ("own",)
    finally:
        work.initialised.clear()


def test_put_that_raises(own, make_pool, monkeypatch):
    """If the put hook raises, the task fails with its error. The pool stays usable."""
    pool = make_pool(own, 1)
    real = type(pool).pool_inqueue_put

    def refuse(self, task):
        if task is not None and task[2] is not None and "refuse" in repr(task[3:]):
            raise OSError("the queue is broken")
        real(self, task)

    monkeypatch.setattr(type(pool), "pool_inqueue_put", refuse)
    with pytest.raises(Exception, match="the queue is broken"):
        pool.apply_async(work.same, ("refuse",)).get(WAIT)
    assert pool.apply(work.same, ("accept",)) == "accept"


MANY = ["map", "imap", "imap_unordered"]


@pytest.mark.parametrize("options", [{}, {"on_error": "return"}], ids=str)
@pytest.mark.parametrize("verb", MANY)
def test_a_second_result_of_a_task(make_pool, verb, options):
    """It fails its job: nobody gets too few values, or waits for the task that has no result."""

    class AllTheFirst(QueueThreadPool):
        def pool_outqueue_get(self, timeout):
            job, _, result = super().pool_outqueue_get(timeout)
            return job, 0, result

    pool = make_pool(AllTheFirst, 2)
    for func in (abs, work.fail) if options else (abs,):
        with pytest.raises(RuntimeError, match=r"two results of (item|task) 0 of "):
            list(getattr(pool, verb)(func, [1, 2, 3], **options))
    assert pool.apply(abs, (-4,)) == 4


@pytest.mark.parametrize("verb", MANY)
@pytest.mark.parametrize("base", [xpool.Pool, xpool.ThreadPool, QueueThreadPool])
def test_a_task_that_is_put_twice(make_pool, base, verb):
    """It fails its map, whose other tasks would have no result. A single call has one result."""

    class PutTwice(base):  # type: ignore[valid-type]
        def pool_inqueue_put(self, task):
            super().pool_inqueue_put(task)
            if task is not None:
                super().pool_inqueue_put(task)

    pool = make_pool(PutTwice, 2)
    with pytest.raises(RuntimeError, match=r"two results of (item|task) \d of abs\(\)"):
        list(getattr(pool, verb)(abs, [1, 2, 3]))
    assert pool.apply(abs, (-4,)) == 4


@pytest.mark.parametrize("verb", MANY)
@pytest.mark.parametrize("make", [list, iter])
@pytest.mark.parametrize("base", [xpool.Pool, xpool.ThreadPool, QueueThreadPool])
def test_a_result_of_a_task_that_was_not_put(make_pool, base, make, verb):
    """It fails its job. A later result of the right task does not come too late."""

    class AddsSeven(base):  # type: ignore[valid-type]
        def pool_inqueue_put(self, task):
            super().pool_inqueue_put(task and (task[0], task[1] + 7, *task[2:]))

    pool = make_pool(AddsSeven, 2)
    with pytest.raises(
        RuntimeError, match=r"a result of (item|task) \d of abs\(\), which was not put"
    ):
        list(getattr(pool, verb)(abs, make([1, 2, 3])))
    assert pool.apply(abs, (-4,)) == 4


@pytest.mark.parametrize("verb", ["apply", *MANY])
@pytest.mark.parametrize("value", ["text", ValueError, StopIteration, None])
def test_a_failed_task_without_an_exception(make_pool, value, verb):
    class Fails(QueueThreadPool):
        def pool_outqueue_get(self, timeout):
            job, chunk, _ = super().pool_outqueue_get(timeout)
            return job, chunk, (False, value)

    pool = make_pool(Fails, 1)
    with pytest.raises(TypeError, match="value of a failed task must be an exception, not"):
        list(getattr(pool, verb)(abs, [1]))


def test_a_number_of_a_job_that_is_a_text(make_pool):
    """It ends the pool: its results would never be found."""

    class Texts(QueueThreadPool):
        def pool_outqueue_get(self, timeout):
            job, chunk, result = super().pool_outqueue_get(timeout)
            return str(job), chunk, result

    with pytest.raises(xpool.errors.InternalError, match="as the number of a job, not an int"):
        make_pool(Texts, 1).apply(abs, (1,))


def test_a_hook_that_passes_on_the_values_of_generators(make_pool):
    """The numbers of their tasks say nothing of the items."""

    class Looks(xpool.Pool):
        def pool_outqueue_get(self, timeout):
            return super().pool_outqueue_get(timeout)

    pool = make_pool(Looks, 2)
    assert list(pool.imap(range, [3, 2, 40], yields=True)) == [*range(3), *range(2), *range(40)]


def test_tasks_have_the_documented_shape(own, make_pool, monkeypatch):
    """The put hook gets ``(job, chunk, func, args, kwds)``."""
    pool = make_pool(own, 1)
    real = type(pool).pool_inqueue_put
    seen: list[tuple] = []

    def look(self, task):
        if task is not None:
            seen.append(task)
        real(self, task)

    monkeypatch.setattr(type(pool), "pool_inqueue_put", look)
    assert pool.apply(work.add, (1,), {"b": 2}) == 3
    ((job, chunk, func, args, kwds),) = seen
    assert isinstance(job, int) and chunk == 0
    assert callable(func) and tuple(args) == (1,) and dict(kwds) == {"b": 2}
    seen.clear()
    assert pool.map(work.square, range(6), chunksize=2) == [0, 1, 4, 9, 16, 25]
    assert [task[1] for task in seen] == [0, 1, 2] and len({task[0] for task in seen}) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_terms_that_cannot_be_kept(make_pool, verb):
    """Time limits, retries and priorities are refused, because the pool neither stops, repeats nor
    chooses tasks."""
    call = getattr(make_pool(QueueThreadPool, 1), verb)
    for terms in (
        {"timeout": 5},
        {"retries": 1},
        {"retries": 1, "retry_on": OSError},
        {"priority": 1},
    ):
        with pytest.raises(ValueError, match="priority= are not for QueueThreadPool"):
            call(work.square, (1,), **terms)


def test_cancel(shared, mailbox, gate):
    """A cancelled job fails at once. Its workers finish their tasks."""
    victims = [shared.apply_async(work.post_and_gate, (mailbox.path, gate.path)) for _ in range(3)]
    mailbox.lines(2)
    assert all(victim.cancel() for victim in victims)
    for victim in victims:
        with pytest.raises(xpool.TaskCancelled):
            victim.get(0)
    gate.open(3)
    assert shared.apply(work.square, (3,)) == 9


def counting(kind):
    """Return a subclass of a pool that overrides the put hook, to count tasks."""

    class Counting(kind):  # type: ignore[valid-type, misc]
        def setup_queues(self):
            self.counted = 0
            super().setup_queues()

        def pool_inqueue_put(self, task):
            if task is not None:
                self.counted += 1
            return super().pool_inqueue_put(task)

    return Counting


def test_terms_under_an_own_hook(make_pool, log):
    """A subclass of `Pool` that overrides the put hook still supports time limits and retries."""
    pool = make_pool(counting(xpool.Pool), 1)
    with pytest.raises(xpool.TaskTimeout):
        pool.apply(work.count_up, timeout=0.2)
    with pytest.raises(xpool.TaskTimeout):
        pool.map(work.spin_on_three, range(5), timeout=0.2)
    task = (str(log), 2, OSError, "third")
    assert pool.apply(work.raise_times, task, retries=2, retry_on=OSError) == "third"


def test_counting_subclass_of_the_built_in_pool(make_pool):
    """A subclass of `Pool` may override `pool_inqueue_put` to count tasks."""
    pool = make_pool(counting(xpool.Pool), 2)
    assert pool.apply(work.square, (3,)) == 9
    assert pool.counted == 1
    assert pool.map(work.square, range(10), chunksize=5) == [i * i for i in range(10)]
    assert pool.counted == 3
    assert list(pool.imap(work.square, range(10))) == [i * i for i in range(10)]
    assert pool.counted == 13


def test_a_hook_of_threads_may_give_tasks_a_class_of_its_own(make_pool):
    """A subclass of `ThreadPool` may put tasks of a class of its own, and sees all tasks."""

    class Named(NamedTuple):
        job: int
        index: int
        func: Any
        args: tuple[Any, ...]
        kwds: dict[str, Any]

    class Naming(counting(xpool.ThreadPool)):  # type: ignore[misc]
        def pool_inqueue_put(self, task):
            return super().pool_inqueue_put(None if task is None else Named(*task))

    pool = make_pool(Naming, 2)
    assert pool.apply(work.square, (3,)) == 9
    assert pool.apply(work.square, (3,), retries=1) == 9
    assert pool.map(work.square, range(10), chunksize=5) == [i * i for i in range(10)]
    assert list(pool.imap(work.square, range(10))) == [i * i for i in range(10)]
    assert pool.counted == 14


def test_contexts_under_an_own_hook(make_pool):
    """A subclass of `CtxPool` that overrides the put hook still gives functions the context."""
    pool = make_pool(counting(xpool.CtxPool), worker_contexts=[10])
    assert pool.apply(work.add, (1,)) == 11
    assert pool.map(work.add, range(4), chunksize=3) == [10, 11, 12, 13]
    assert pool.starmap(work.add, [(1,)]) == [11]
    assert list(pool.imap(work.add, range(2), seed=1)) == [10, 11]


def test_default_worker_loop():
    """The static `worker` runs tasks until `get` returns None, or `maxtasks`. It puts ``(ok,
    value)``."""
    tasks = [
        (1, 0, work.square, (3,), {}),
        (1, 1, work.fail, ("x",), {}),
        (2, 0, work.add, (1,), {"b": 1}),
    ]
    for maxtasks, n in (None, 3), (2, 2):
        out: list[tuple] = []
        xpool.BasePool.worker(iter([*tasks, None]).__next__, out.append, None, (), maxtasks)
        assert len(out) == n and out[0] == (1, 0, (True, 9))
        assert out[1][:2] == (1, 1) and out[1][2][0] is False
        assert out[2:] == [(2, 0, (True, 2))] * (n - 2)


def test_incomplete_pool():
    """The error of a `BasePool` without hooks names a missing hook."""
    with pytest.raises((NotImplementedError, TypeError)) as caught:
        xpool.BasePool(1)
    assert any(name in str(caught.value) for name in ("setup_queues", "repopulate_pool", "hook"))


class LateStarter(QueueThreadPool):
    """Is terminated just before it replaces a worker."""

    def setup_queues(self):
        super().setup_queues()
        self.replacing, self.terminated = threading.Event(), threading.Event()

    def repopulate_pool(self):
        if self.started:
            self.replacing.set()
            self.terminated.wait(WAIT)
        super().repopulate_pool()

    def terminate_workers(self):
        super().terminate_workers()
        self.terminated.set()


def test_a_worker_started_during_terminate_ends_too(make_pool):
    """If `terminate` runs while another thread replaces a worker, that worker ends too."""
    pool = make_pool(LateStarter, 1, maxtasksperchild=1)
    assert pool.apply(work.square, (3,)) == 9
    assert pool.replacing.wait(WAIT)
    pool.terminate()
    pool.join()
    assert not any(thread.is_alive() for thread in pool.workers)


def test_context_is_kept(make_pool):
    """`BasePool` keeps `context`, which is also its fifth positional argument, for its hooks."""
    context = multiprocessing.get_context("spawn")

    class Looks(QueueThreadPool):
        def setup_queues(self):
            self.seen = self.context
            super().setup_queues()

    assert make_pool(Looks, 1, context=context).seen is context
    assert make_pool(Looks, 1, None, (), None, context).seen is context
    assert make_pool(Looks, 1).seen is None


def test_timeout_error_means_no_result(make_pool):
    """If it has no result, `pool_outqueue_get` may raise Python's TimeoutError."""

    class Patient(QueueThreadPool):
        def pool_outqueue_get(self, timeout=None):
            try:
                return super().pool_outqueue_get(timeout)
            except queue.Empty:
                raise TimeoutError from None

    pool = make_pool(Patient, 2)
    assert pool.map(work.square, range(20), 1) == [i * i for i in range(20)]
    pool.close()
    pool.join()


@pytest.mark.parametrize("kind", [xpool.Pool, xpool.P2PPool, xpool.ThreadPool])
def test_all_answers_pass_the_hook_in_the_engines_thread(make_pool, kind):
    """A subclass that overrides `pool_outqueue_get` alone gets all answers there, also those for
    which a caller waits, and no caller's thread runs it."""

    class Counts(kind):  # type: ignore[valid-type, misc]
        def pool_outqueue_get(self, timeout):
            result = super().pool_outqueue_get(timeout)
            seen.append((threading.get_ident(), result[2][0]))
            return result

    seen = []
    pool = make_pool(Counts, 2)
    assert [pool.apply(work.square, (n,)) for n in range(5)] == [n * n for n in range(5)]
    assert pool.apply_async(work.square, (5,)).get() == 25
    assert pool.submit(work.square, 6).result() == 36
    assert list(pool.imap(work.square, range(4))) == [0, 1, 4, 9]
    with pytest.raises(ZeroDivisionError):
        pool.apply(divmod, (1, 0))
    assert [ok for _, ok in seen] == [True] * 11 + [False]
    assert {thread for thread, _ in seen}.isdisjoint({threading.get_ident()})


@pytest.mark.parametrize("name", ["BasePool", "Pool", "ThreadPool"])
def test_the_put_hooks_parameter_is_obj(name):
    """The parameter has the name that machin's documentation gives it."""
    assert list(inspect.signature(getattr(xpool, name).pool_inqueue_put).parameters)[1:] == ["obj"]


def test_worker_can_be_called_with_any_arguments(make_pool):
    """A subclass may wrap `worker` as ``worker(*args, **kwargs)``."""

    class Wraps(QueueThreadPool):
        @staticmethod
        def worker(*args, **kwargs):
            seen.append(len(args))
            xpool.Pool.worker(*args, **kwargs)

    seen = []
    assert make_pool(Wraps, 1).map(work.square, range(3)) == [0, 1, 4]
    assert seen == [5]


def test_worker_of_a_pool_of_processes():
    """It is refused, because the processes have a loop of their own."""

    class Wraps(xpool.Pool):
        @staticmethod
        def worker(get, put, *args):
            raise AssertionError

    with pytest.raises(TypeError, match="Wraps overrides worker"):
        Wraps(1)


def test_worker_of_a_thread_pool_sees_each_task(make_pool):
    """If a subclass of `ThreadPool` overrides `worker`, it gets the tasks of maps one by one."""

    class Wraps(xpool.ThreadPool):
        @staticmethod
        def worker(get, put, *args):
            def get_and_see():
                task = get()
                seen.append(task and task[1])
                return task

            xpool.ThreadPool.worker(get_and_see, put, *args)

    seen = []
    pool = make_pool(Wraps, 2)
    assert pool.map(work.square, range(4), 1) == [0, 1, 4, 9]
    assert list(pool.imap(work.square, range(4))) == [0, 1, 4, 9]
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]
