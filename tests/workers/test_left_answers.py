"""Answers of a stream that threads leave for its consumer, instead of delivering each."""

from __future__ import annotations

import threading

import pytest

from xpool import PoolClosed, ThreadPool
from xpool.workers.threads import LEFT_BYTES, LEFT_MOST


class Stages:
    """A function of which item ``held`` waits until it is let go."""

    def __init__(self, held: int) -> None:
        self.held, self.begun, self.go = held, threading.Event(), threading.Event()

    def __call__(self, x: int) -> int:
        if x == self.held:
            self.begun.set()
            self.go.wait()
        return x


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
@pytest.mark.parametrize("many", [1, LEFT_MOST, 3 * LEFT_MOST + 1])
def test_those_before_a_long_task_can_be_had(verb, many):
    """What a thread has left is there while it runs its next task, though nobody waited for it."""
    func = Stages(many)
    with ThreadPool(1) as pool:
        results = getattr(pool, verb)(func, range(many + 1))
        func.begun.wait()
        assert pool.statistics()["succeeded"] == many
        assert [results.next(0) for _ in range(many)] == list(range(many))
        func.go.set()
        assert list(results) == [many]


def test_they_arrive_before_the_end_of_the_pool():
    """`terminate` answers with `PoolClosed` only what has not been run."""
    func = Stages(3)
    with ThreadPool(1) as pool:
        results = pool.imap(func, range(5))
        func.begun.wait()
    func.go.set()
    assert [results.next() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(PoolClosed):
        results.next()
    pool.join()


@pytest.mark.parametrize("many", [1, LEFT_MOST + 5])
@pytest.mark.parametrize("tasks_per_thread", [None, 1, 7])
def test_nobody_takes_them(many, tasks_per_thread):
    """Without a consumer, all are delivered, and the pool comes to its end."""
    with ThreadPool(2, maxtasksperchild=tasks_per_thread) as pool:
        results = pool.imap(abs, range(many))
        pool.close()
        pool.join()
        assert pool.statistics()["succeeded"] == many
    assert list(results) == list(range(many))


def test_errors_are_left_too():
    """Each item that fails does so in its place."""
    func = Stages(-1)
    with ThreadPool(1) as pool:
        results = pool.imap(lambda x: 1 // (x % 3), [1, 0, 2, 3, 1])
        pool.apply(func, (0,))  # behind all of these
        got = []
        for _ in range(5):
            try:
                got.append(next(results))
            except ZeroDivisionError:
                got.append("failed")
        assert got == [1, "failed", 0, "failed", 1]
        assert (pool.statistics()["succeeded"], pool.statistics()["failed"]) == (4, 2)


def test_a_consumer_that_waits_is_woken():
    """One that waits in `next` gets the first answer while the thread runs the second task."""
    func = Stages(1)
    with ThreadPool(1) as pool:
        for _ in range(100):
            func.go.clear()
            results = pool.imap(func, range(2))
            assert next(results) == 0
            func.go.set()
            assert next(results) == 1


def test_large_ones_are_delivered():
    """They count as memory that results take, which bounds how far ahead the input is drawn."""
    func = Stages(3)
    with ThreadPool(1) as pool:
        results = pool.imap(lambda x: func(x) and bytes(LEFT_BYTES), range(4))
        func.begun.wait()
        assert results.shelf.bytes_in > 2 * LEFT_BYTES
        func.go.set()
