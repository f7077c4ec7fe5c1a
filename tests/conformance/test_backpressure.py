"""Without a buffersize, `imap` limits the memory of results that the caller has not taken."""

import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import work
from support.waiting import eventually

from xpool._pools import input_reader

pytestmark = pytest.mark.xpool_only

VERBS = ["imap", "imap_unordered"]
ROOM = 1_000_000
SIZE = 10_000


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    """Limit the results to a megabyte."""
    monkeypatch.setattr(input_reader, "LEAST_ROOM", ROOM)
    monkeypatch.setattr(input_reader, "room_for_results", lambda: ROOM)
    monkeypatch.setattr(input_reader, "AHEAD_ITEMS", 100)


class Counting:
    """An input that counts the items drawn from it."""

    def __init__(self, length=None):
        self.drawn = 0
        self._numbers = itertools.count() if length is None else iter(range(length))

    def __iter__(self):
        for _ in self._numbers:
            self.drawn += 1
            yield SIZE


def _until_full(pool, source):
    """Wait until drawing stops. Return the number of drawn items."""
    (reader,) = pool._jobs.input_readers
    eventually(lambda: reader.flow._waiting, "the drawing stops")
    return source.drawn


@pytest.mark.parametrize("verb", VERBS)
def test_a_slow_consumer_stops_the_drawing(kind, make_pool, verb):
    """An endless input is drawn while results have room, and again once results are taken."""
    pool = make_pool(kind, 2)
    source = Counting()
    results = getattr(pool, verb)(work.large, source)
    next(results)
    most = ROOM // SIZE + 2 * 2 * 100  # the tasks that wait for workers, too
    assert _until_full(pool, source) <= most
    for _ in range(2 * most):
        assert len(next(results)) == SIZE
    assert source.drawn >= 2 * most


def test_a_dropped_iterator_sets_no_limit(kind, make_pool):
    """When the results are dropped, the input is drawn to its end, and all tasks run."""
    pool = make_pool(kind, 2)
    source = Counting(600)
    results = pool.imap(work.large, source)
    _until_full(pool, source)
    del results
    eventually(lambda: source.drawn == 600, "all is drawn")
    pool.close()
    pool.join()


@pytest.mark.parametrize(("verb", "chunksize"), [("imap", 1), ("imap_unordered", 3)])
def test_join_does_not_wait_for_the_consumer(kind, make_pool, verb, chunksize):
    """After `close` and `join`, the caller can still take all results."""
    pool = make_pool(kind, 2)
    source = Counting(600 * chunksize)  # more than the tasks that wait for workers
    results = getattr(pool, verb)(work.large, source, chunksize)
    _until_full(pool, source)
    pool.close()
    pool.join()
    assert [len(x) for x in results] == [SIZE] * 600 * chunksize


@pytest.mark.parametrize("form", [tuple, list, "dict"])
def test_results_in_containers_count(kind, make_pool, form):
    """The limit counts what lists, tuples and dicts have, such as a picture with its label."""
    pool = make_pool(kind, 2)
    source = Counting(600)
    results = pool.imap(functools.partial(_in_a_container, form), source)
    _until_full(pool, source)
    assert next(results) is not None
    results.cancel()


def _in_a_container(form, size):
    value = work.large(size), 1
    return {"x": value} if form == "dict" else form(value)


def test_close_does_not_lift_the_limit(kind, make_pool):
    """`close` does not lift the limit, because an iterator is often read after it."""
    pool = make_pool(kind, 2)
    source = Counting()
    results = pool.imap(work.large, source)
    pool.close()
    assert _until_full(pool, source) < 600
    results.cancel()


def test_the_first_result_may_come_last(kind, make_pool, gate):
    """Results that wait for an earlier result stop only the drawing."""
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
    """Drawing continues when another thread takes results."""
    pool = make_pool(kind, 2)
    results = pool.imap(work.large, Counting(3000))
    with ThreadPoolExecutor(3) as threads:
        got = threads.map(lambda _: list(map(len, results)), range(3))
    assert list(itertools.chain(*got)) == [SIZE] * 3000


def _small_and_then_large(item):
    time.sleep(0.003)  # limits how many tasks a worker is given ahead
    return bytes(SIZE) if item >= 150 else b""


def _sized(item):
    return bytes(SIZE)


def _slowly_sized(item):
    return _small_and_then_large(item + 150)


def _until_stopped(pool, *streams):
    """Wait until untaken results of these streams fill their room and no task runs."""
    eventually(
        lambda: (
            all(stream.buffer.bytes_in >= ROOM for stream in streams)
            and not pool.statistics()["running"]
        ),
        "the workers stop",
    )


@pytest.mark.parametrize("verb", VERBS)
def test_drawn_tasks_wait_for_room(process_kind, make_pool, verb):
    """Tasks drawn before results grew wait until results have room. A call does not wait."""
    pool = make_pool(process_kind, 2)
    results = getattr(pool, verb)(_small_and_then_large, itertools.count())
    _until_stopped(pool, results)
    # The tasks that the workers had received by then have run.
    assert results.buffer.bytes_in < ROOM + 40 * SIZE
    assert pool.apply(abs, (-1,)) == 1
    sizes = [len(next(results)) for _ in range(1000)]
    assert sorted(sizes) == [0] * 150 + [SIZE] * 850
    results.cancel()


def test_dropped_while_it_waits_for_room(process_kind, make_pool):
    """Tasks that wait for room run when the results are dropped, and when the pool is joined."""
    pool = make_pool(process_kind, 2)
    # Workers that are given short tasks ahead may run 300 tasks more than there is room for.
    kept = pool.imap(_sized, range(4000))
    dropped = pool.imap_unordered(_sized, range(4000))
    unanswered = pool._jobs.unanswered
    kept_job, dropped_job = unanswered
    _until_stopped(pool, kept, dropped)
    all_drawn = pool.imap(_slowly_sized, range(150))
    assert kept_job in unanswered and dropped_job in unanswered
    del dropped
    eventually(lambda: dropped_job not in unanswered, "it ends")
    _until_stopped(pool, kept, all_drawn)
    assert kept_job in unanswered
    pool.close()
    pool.join()
    assert [len(x) for x in kept] == [SIZE] * 4000
    assert [len(x) for x in all_drawn] == [SIZE] * 150


def test_little_is_drawn_before_a_result_is_known(kind, make_pool, gate):
    """Until the first answer, only a few items for each worker are drawn."""
    pool = make_pool(kind, 2)
    source = Counting()
    items = itertools.chain([gate.path, gate.path], source)
    results = pool.imap(_gated_or_large, items)
    assert _until_full(pool, source) <= input_reader.FIRST_ALL
    gate.open(2)
    assert [len(next(results)) for _ in range(300)] == [1, 1] + [SIZE] * 298
    results.cancel()
