"""`resize` adds or removes workers while the pool works."""

import functools
import os
import threading

import pytest
from support import work
from support.limits import WAIT
from support.waiting import eventually, wait_gone

import xpool
from xpool import OptionError, Pool, PoolClosed, ThreadPool
from xpool._engine.worker_process import WorkerProcess

pytestmark = pytest.mark.xpool_only

BOTH = pytest.mark.parametrize("kind", [Pool, ThreadPool])


def at_gate(pool, mailbox, gate, count):
    results = [pool.apply_async(work.who_at_gate, (mailbox.path, gate.path)) for _ in range(count)]
    mailbox.lines(count)
    return results


@BOTH
def test_larger_and_smaller(kind, make_pool, mailbox, gate):
    """The pool runs as many tasks at once as `resize` allows, and no more."""
    pool = make_pool(kind, 1)
    for size in (3, 4, 2, 1, 2):
        pool.resize(size)
        assert pool.size() == size and pool.statistics()["workers"] == size
        held = at_gate(pool, mailbox, gate, size)
        behind = pool.apply_async(work.square, (3,))
        assert not behind.ready()
        gate.open(size)
        assert len({result.get(WAIT)[0] for result in held}) == size
        assert behind.get(WAIT) == 9


def test_with_each_start_method(method_kind, make_pool):
    """New workers run the initializer. Removed workers leave no process behind."""
    pool = make_pool(method_kind, 1, work.remember, (5,))
    pool.resize(3)
    eventually(lambda: pool.statistics()["ready"] == 3, "three workers")
    assert pool.map(work.recall, range(30), 1) == [[(5,)]] * 30
    pids = pool.statistics()["pids"]
    pool.resize(1)
    assert wait_gone(pids[1:]) == []
    assert pool.statistics()["pids"] == pids[:1]
    assert pool.map(work.recall, range(5), 1) == [[(5,)]] * 5


@BOTH
def test_a_map_under_way(kind, make_pool, gate, mailbox):
    """A running map uses added workers, and loses no item when workers are removed."""
    pool = make_pool(kind, 1)
    first = pool.apply_async(work.gated, (gate.path,))
    mapped = pool.map_async(
        functools.partial(work.post_and_gate, mailbox.path, gate.path), range(12), 1
    )
    waits = pool.imap(work.square, range(500))
    pool.resize(3)
    mailbox.lines(2)  # these tasks run in the added workers
    gate.open(100)
    first.get(WAIT)
    pool.resize(2)
    assert mapped.get(WAIT) == list(range(12))
    pool.resize(1)
    assert list(waits) == [x * x for x in range(500)]


def test_a_removed_worker_finishes_its_task(make_pool, mailbox, gate):
    """A removed worker finishes its running task. Others run the tasks that it had received."""
    pool = make_pool(Pool, 2)
    # The tasks are short, so each worker is given several at once.
    assert pool.map(work.square, range(200), 1) == [x * x for x in range(200)]
    held = at_gate(pool, mailbox, gate, 2)
    rest = [pool.apply_async(work.square, (i,)) for i in range(100)]
    pool.resize(1)
    gate.open()  # lets either of the two tasks pass
    eventually(lambda: any(result.ready() for result in held), "one has passed")
    if not held[0].ready() or held[0].get()[0] == 1:
        gate.open()
    assert [result.get(WAIT) for result in rest] == [i * i for i in range(100)]
    gate.open()
    assert {result.get(WAIT)[0] for result in held} == {0, 1}


def test_with_run_all(make_pool, gate, mailbox):
    """A worker that runs a function of `run_all` cannot be removed. Workers can be added."""
    pool = make_pool(Pool, 2)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(pool.run_all(work.who_at_gate, mailbox.path, gate.path))
    )
    thread.start()
    mailbox.lines(2)
    with pytest.raises(OptionError, match="run_all uses a worker that would end"):
        pool.resize(1)
    pool.resize(3)
    gate.open(2)
    thread.join(WAIT)
    assert [worker for worker, *_ in found[0]] == [0, 1]
    gate.open(3)
    assert [w for w, *_ in pool.run_all(work.who_at_gate, mailbox.path, gate.path)] == [0, 1, 2]
    pool.resize(1)
    assert [worker for worker, *_ in pool.run_all(work.who)] == [0]


def test_numbers_of_threads_that_begin_while_others_end(make_pool, mailbox, gate):
    """A thread begins only in the place of one that has ended: no number is above the size."""
    ends, go = [], threading.Event()

    class Leisurely(ThreadPool):
        """Its threads do something else before they end."""

        @staticmethod
        def worker(*args):
            ThreadPool.worker(*args)
            ends.append(1)
            go.wait(WAIT)

    pool = make_pool(Leisurely, 3)
    pool.resize(1)
    eventually(lambda: len(ends) == 2, "two threads are about to end")
    pool.resize(3)
    pool.resize(4)
    go.set()
    held = at_gate(pool, mailbox, gate, 4)
    gate.open(4)
    assert sorted(result.get(WAIT)[0] for result in held) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [xpool.P2PPool, xpool.CtxPool, xpool.CtxThreadPool])
def test_pools_whose_workers_differ(kind, make_pool):
    """The error says why these pools cannot be resized."""
    pool = make_pool(kind, 2)
    with pytest.raises(OptionError, match="cannot be resized: "):
        pool.resize(3)
    assert pool.size() == 2


@BOTH
def test_invalid_calls(kind, make_pool):
    """`resize` refuses invalid numbers of workers, and refuses to resize a closed pool."""
    pool = make_pool(kind, 2)
    for wrong in (0, -1, "3", 1.5):
        with pytest.raises((TypeError, OptionError)):
            pool.resize(wrong)
    pool.resize()
    assert pool.size() == len(os.sched_getaffinity(0))
    pool.close()
    with pytest.raises(PoolClosed):
        pool.resize(3)


def test_the_system_refuses_a_process(make_pool, monkeypatch):
    """If a process cannot start, `resize` raises the error, and the pool keeps its size."""
    pool = make_pool(Pool, 1)
    start, calls = WorkerProcess.launch, []

    def refuse(self, *args):
        calls.append(self.index)
        if self.index == 2:
            raise OSError(11, "no more processes")
        return start(self, *args)

    monkeypatch.setattr(WorkerProcess, "launch", refuse)
    with pytest.raises(OSError, match="no more processes"):
        pool.resize(3)
    assert calls == [1, 2] and pool.size() == 1
    monkeypatch.undo()
    assert pool.map(work.square, range(9), 1) == [x * x for x in range(9)]
    pool.resize(3)
    eventually(lambda: pool.statistics()["ready"] == 3, "three workers")


def test_the_system_refuses_a_thread(make_pool, monkeypatch):
    """If a thread cannot start, `resize` raises the error, and the pool keeps its size."""
    pool = make_pool(ThreadPool, 1)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.resize(3)
    assert pool.size() == 1
    assert pool.map(work.square, range(9), 1) == [x * x for x in range(9)]
    pool.resize(2)
    assert pool.size() == 2
