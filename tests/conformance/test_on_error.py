"""``on_error="return"``: exceptions stand in their tasks' places."""

from __future__ import annotations

import os
import traceback

import pytest
from support import work

from xpool import OptionError, WorkerDied
from xpool.errors import TaskNotPicklable, TaskTimeout

from .test_map import StopHere, failing

pytestmark = pytest.mark.xpool_only

VERBS = ["map", "starmap", "imap", "imap_unordered"]


def _fail_on_odd(x):
    if x % 2:
        raise ValueError(x)
    return x


def _die_on_three(x):
    return os._exit(3) if x == 3 else x


def _items(verb, xs):
    return [(x,) for x in xs] if verb == "starmap" else xs


def _told(results):
    return [(type(r), r.args) if isinstance(r, BaseException) else r for r in results]


@pytest.mark.parametrize("chunksize", [1, 4])
@pytest.mark.parametrize("verb", VERBS)
def test_errors_stand_in_their_places(pool, verb, chunksize):
    """Each item that fails gives its exception, whatever the chunksize; the others are there."""
    got = getattr(pool, verb)(_fail_on_odd, _items(verb, range(9)), chunksize, on_error="return")
    got = _told(got)
    expected = [(ValueError, (x,)) if x % 2 else x for x in range(9)]
    assert (sorted(got, key=str) == sorted(expected, key=str)) if "un" in verb else got == expected


def test_the_async_forms_too(pool):
    """`map_async` and `starmap_async` succeed, and call their callback with errors in the list."""
    seen = []
    result = pool.map_async(_fail_on_odd, [1, 2], callback=seen.append, on_error="return")
    assert _told(result.get()) == [(ValueError, (1,)), 2]
    assert result.successful()
    assert [_told(got) for got in seen] == [[(ValueError, (1,)), 2]]
    result = pool.starmap_async(_fail_on_odd, [(1,), (2,)], on_error="return")
    assert _told(result.get()) == [(ValueError, (1,)), 2]


def test_the_error_has_the_workers_traceback(pool):
    """An exception that is returned tells where it came from."""
    (error,) = pool.map(_fail_on_odd, [1], on_error="return")
    assert "_fail_on_odd" in "".join(traceback.format_exception(error))


def test_a_returned_exception_is_a_result(pool):
    """What a task returns is not taken for what it raises, and can still be told from it."""
    assert _told(pool.map(work.same, [KeyError(1)], on_error="return")) == [(KeyError, (1,))]


def test_deaths_and_timeouts_too(process_kind, make_pool):
    """A worker that dies, and a task that takes too long, cost one item each."""
    pool = make_pool(process_kind, 2)
    got = pool.map(_die_on_three, range(6), 3, on_error="return")
    assert [type(x) for x in got] == [int, int, int, WorkerDied, int, int]
    got = pool.map(work.spin_on_three, range(5), timeout=5, on_error="return")
    assert [type(x) for x in got] == [int, int, int, TaskTimeout, int]


def test_what_cannot_be_sent_or_opened_too(process_kind, make_pool):
    """Items and results that cannot be pickled or unpickled give their errors in place."""
    pool = make_pool(process_kind, 2)
    got = pool.map(work.same, [1, work.unpicklable(), 2], on_error="return")
    assert [type(x) for x in got] == [int, TaskNotPicklable, int]
    got = list(pool.imap(work.make_stops_when_unpickled, [1, 2], on_error="return"))
    assert [type(x) for x in got] == [StopIteration, StopIteration]


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_an_error_of_the_input_is_raised(pool, verb):
    """What the iterable raises is no task's error: it is raised."""
    results = getattr(pool, verb)(work.same, failing(3, 2), on_error="return")
    with pytest.raises(StopHere):
        list(results)


def test_the_end_of_the_pool_is_raised(kind, make_pool, gate):
    """When the pool is terminated, `get` raises: that is no task's error."""
    pool = make_pool(kind, 1)
    result = pool.map_async(work.gated, [gate.path, None], on_error="return")
    result.cancel()
    gate.open()
    with pytest.raises(Exception, match="cancelled"):
        result.get()


def test_another_word_is_refused(pool):
    """``on_error`` is "raise" or "return"."""
    assert pool.map(work.same, [1], on_error="raise") == [1]
    with pytest.raises(OptionError, match="on_error"):
        pool.map(work.same, [1], on_error="ignore")
