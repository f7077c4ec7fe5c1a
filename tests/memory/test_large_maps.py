"""A map of large items pickles them as the workers go on, if its caller waits for the results."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support import work
from support.waiting import Gate, eventually

from xpool import Pool, PoolClosed, WorkerDied
from xpool._pools import engine_submitter

HALF = 1 << 19
AHEAD = 5  # two tasks for each of the two workers, and one


@pytest.fixture(autouse=True)
def no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two items are as much as may wait, in the place of a quarter of the available memory."""
    monkeypatch.setattr(engine_submitter, "available_memory", lambda: 0)
    monkeypatch.setattr(engine_submitter, "LEAST_AHEAD", 2 * HALF)


def first(value: Any, _data: bytes) -> Any:
    return value


class Large:
    """An item that a worker gets as its value."""

    pickled = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        Large.pickled += 1
        return first, (self.value, bytes(HALF))


@pytest.fixture
def larges(gate: Gate) -> list[Large]:
    Large.pickled = 0
    return [Large(gate.path) for _ in range(20)]


def start(call: Callable[[], Any], got: list[Any]) -> threading.Thread:
    def run() -> None:
        try:
            got.append(call())
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_map_waits_for_its_workers(
    process_kind: Any, make_pool: Any, gate: Gate, larges: list[Large]
) -> None:
    """Each worker has a task and another one. The others are pickled later."""
    pool, got = make_pool(process_kind, 2), list[Any]()
    thread = start(lambda: pool.map(work.gated, larges, chunksize=1), got)
    eventually(lambda: Large.pickled == AHEAD, "the first are pickled")
    time.sleep(0.1)
    assert Large.pickled == AHEAD
    gate.open(20)
    thread.join()
    assert got == [[None] * 20] and Large.pickled == 20
    assert pool.map(abs, [-1, -2]) == [1, 2]


def test_map_async_pickles_all(make_pool: Any, gate: Gate, larges: list[Large]) -> None:
    """Its caller goes on, and may change the items."""
    pool = make_pool(Pool, 2)
    result = pool.map_async(work.gated, larges, chunksize=1)
    assert Large.pickled == 20
    gate.open(20)
    assert result.get() == [None] * 20


def test_items_that_cannot_be_sent(make_pool: Any) -> None:
    """They are answered, so the map does not wait for them."""
    items = [Large(KeyError(i)) for i in range(8)] + [Large(i) for i in range(12)]
    pool = make_pool(Pool, 2)
    got = pool.map(work.same, items, on_error="return")
    assert [type(one) for one in got] == [KeyError] * 8 + [int] * 12
    with pytest.raises(KeyError):
        pool.map(work.same, items, chunksize=1)


def test_a_pool_that_ends_meanwhile(make_pool: Any, larges: list[Large]) -> None:
    """The map that waits fails."""
    pool, got = make_pool(Pool, 2), list[Any]()
    thread = start(lambda: pool.map(work.gated, larges, chunksize=1), got)
    eventually(lambda: Large.pickled == AHEAD, "the first are pickled")
    pool.terminate()
    thread.join()
    assert [type(one) for one in got] == [PoolClosed] and Large.pickled == AHEAD


def test_workers_that_die_meanwhile(make_pool: Any) -> None:
    """The other tasks run, and the map raises the error."""
    with pytest.raises(WorkerDied):
        make_pool(Pool, 2).map(os._exit, [Large(3)] * 2 + [Large(0)] * 10, chunksize=1)


class Alarm(Exception):
    pass


def test_a_signal_handler_that_raises(make_pool: Any, gate: Gate, larges: list[Large]) -> None:
    """It ends the map that waits, as it ends one whose tasks run."""

    def ring(*_: Any) -> None:
        raise Alarm

    pool, before = make_pool(Pool, 2), signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarm):
            pool.map(work.gated, larges, chunksize=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert Large.pickled == AHEAD
    assert pool.map(abs, [-1, -2]) == [1, 2]
