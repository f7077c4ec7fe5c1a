"""`imap` without a buffersize: results that nobody has taken are bounded by memory."""

from __future__ import annotations

import itertools
import threading

import pytest
from support import work
from support.waiting import eventually

from xpool.pool import input_reader

pytestmark = pytest.mark.xpool_only

VERBS = ["imap", "imap_unordered"]
ROOM = 1_000_000
SIZE = 10_000


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    """Results may take a megabyte."""
    monkeypatch.setattr(input_reader, "room_for_results", lambda: ROOM)
    monkeypatch.setattr(input_reader, "AHEAD_ITEMS", 100)


class Counting:
    """An input that says how many items were drawn."""

    def __init__(self, length=None):
        self.drawn = 0
        self._numbers = itertools.count() if length is None else iter(range(length))

    def __iter__(self):
        for _ in self._numbers:
            self.drawn += 1
            yield SIZE


def _until_full(pool, source):
    """Wait until no more is drawn; return how many were."""
    (reader,) = pool._feeders
    eventually(lambda: reader.flow._waiting, "the drawing stops")
    return source.drawn


@pytest.mark.parametrize("verb", VERBS)
def test_a_slow_consumer_stops_the_drawing(kind, make_pool, verb):
    """An endless input is drawn only as far as there is room for results, and then further."""
    pool = make_pool(kind, 2)
    source = Counting()
    results = getattr(pool, verb)(work.large, source)
    next(results)
    most = ROOM // SIZE + 2 * 2 * 100  # and what waits for the workers
    assert _until_full(pool, source) <= most
    for _ in range(2 * most):
        assert len(next(results)) == SIZE
    assert source.drawn >= 2 * most


@pytest.mark.parametrize("verb", VERBS)
def test_everything_is_there_in_the_end(kind, make_pool, verb):
    """What is taken late is complete."""
    pool = make_pool(kind, 2)
    results = getattr(pool, verb)(work.large, Counting(600), 3)
    assert [len(x) for x in results] == [SIZE] * 600


def test_a_dropped_iterator_bounds_nothing(kind, make_pool):
    """The input is drawn to its end, and its tasks are run, when the results are dropped."""
    pool = make_pool(kind, 2)
    source = Counting(600)
    results = pool.imap(work.large, source)
    _until_full(pool, source)
    del results
    eventually(lambda: source.drawn == 600, "all is drawn")
    pool.close()
    pool.join()


def test_who_joins_does_not_wait_for_the_consumer(kind, make_pool):
    """`close` and `join`, and then the results: as with the standard library."""
    pool = make_pool(kind, 2)
    source = Counting(600)
    results = pool.imap(work.large, source)
    _until_full(pool, source)
    pool.close()
    pool.join()
    assert [len(x) for x in results] == [SIZE] * 600


def test_close_alone_bounds_as_before(kind, make_pool):
    """`close` is no reason to fill the memory: an iterator is often read after it."""
    pool = make_pool(kind, 2)
    source = Counting()
    results = pool.imap(work.large, source)
    pool.close()
    assert _until_full(pool, source) < 600
    results.cancel()


def test_the_first_result_may_come_last(kind, make_pool, gate):
    """Results that wait for an earlier one stop the drawing, and nothing else."""
    pool = make_pool(kind, 2)
    source = Counting(600)
    items = itertools.chain([gate.path], source)
    results = pool.imap(_gated_or_large, items)
    _until_full(pool, source)
    gate.open()
    assert [len(x) for x in results] == [1] + [SIZE] * 600


def _gated_or_large(item):
    if isinstance(item, str):
        work.pass_gate(item)
        return b"1"
    return work.large(item)


def test_a_consumer_in_another_thread(kind, make_pool):
    """The room that one thread makes is seen by the one that draws."""
    pool = make_pool(kind, 2)
    results = pool.imap(work.large, Counting(3000))
    got = []
    threads = [threading.Thread(target=lambda: got.extend(map(len, results))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [SIZE] * 3000
