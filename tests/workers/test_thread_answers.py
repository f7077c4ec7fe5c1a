"""Threads deliver the results of their tasks without waiting for each other."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
from support.limits import WAIT

from xpool import ThreadPool
from xpool._calls.streams import Stream

pytestmark = pytest.mark.xpool_only


def test_a_thread_runs_tasks_while_another_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other tasks run while one result is being delivered; then all results arrive."""
    begun: SimpleQueue[int] = SimpleQueue()
    delivering, go_on = threading.Event(), threading.Event()
    deliver = Stream.deliver

    def pause_once(self: Stream, index: int, ok: bool, value: object) -> bool:
        if not delivering.is_set():
            delivering.set()
            go_on.wait()
        return deliver(self, index, ok, value)

    def task(n: int) -> int:
        begun.put(n)
        return -n

    monkeypatch.setattr(Stream, "deliver", pause_once)
    with ThreadPool(2) as pool:
        try:
            results = pool.imap(task, range(100))
            assert sorted(begun.get(timeout=WAIT) for _ in range(100)) == list(range(100))
            assert delivering.is_set()
        finally:
            go_on.set()
        assert list(results) == [-n for n in range(100)]


def test_a_dropped_result_that_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finalizer of a result that another thread delivers can wait for a result of the pool."""
    begun: SimpleQueue[int] = SimpleQueue()
    got: SimpleQueue[int] = SimpleQueue()
    delivering, go_on = threading.Event(), threading.Event()
    deliver = Stream.deliver

    class Waits:
        def __del__(self) -> None:
            got.put(pool.apply_async(abs, (-1,)).get(timeout=WAIT))

    def pause_once(self: Stream, index: int, ok: bool, value: object) -> bool:
        if not delivering.is_set():
            delivering.set()
            go_on.wait()
        return deliver(self, index, ok, value)

    def task(n: int) -> Waits:
        begun.put(n)
        return Waits()

    monkeypatch.setattr(Stream, "deliver", pause_once)
    with ThreadPool(2) as pool:
        try:
            results = pool.imap(task, range(2))
            # The thread that does not deliver begins this after it has left its result.
            last = pool.apply_async(begun.put, (2,))
            assert sorted(begun.get(timeout=WAIT) for _ in range(3)) == [0, 1, 2]
            del results
        finally:
            go_on.set()
        assert [got.get(timeout=WAIT) for _ in range(2)] == [1, 1]
        last.get(timeout=WAIT)


def test_a_delivery_that_raises_leaves_the_other_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ends in a delivery does not keep the others from delivering."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    deliver, failed = Stream.deliver, threading.Event()

    def fail_once(self: Stream, index: int, ok: bool, value: object) -> bool:
        if index == 0 and not failed.is_set():
            failed.set()
            raise MemoryError
        return deliver(self, index, ok, value)

    monkeypatch.setattr(Stream, "deliver", fail_once)
    with ThreadPool(2) as pool:
        results = pool.imap_unordered(int.__neg__, range(100))
        assert sorted(results.next(timeout=WAIT) for _ in range(99)) == list(range(-99, 0))
        assert failed.is_set()
        results.cancel()
