"""``on_error="return"``: the results contain exceptions in place of failed tasks."""

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
    """For any chunksize, a failed item gives its exception, and the others give results."""
    got = getattr(pool, verb)(_fail_on_odd, _items(verb, range(9)), chunksize, on_error="return")
    got = _told(got)
    expected = [(ValueError, (x,)) if x % 2 else x for x in range(9)]
    assert (sorted(got, key=str) == sorted(expected, key=str)) if "un" in verb else got == expected


def test_the_async_forms_too(pool):
    """The results of the asynchronous verbs are successful. Their callback gets the same list."""
    seen = []
    result = pool.map_async(_fail_on_odd, [1, 2], callback=seen.append, on_error="return")
    assert _told(result.get()) == [(ValueError, (1,)), 2]
    assert result.successful()
    assert [_told(got) for got in seen] == [[(ValueError, (1,)), 2]]
    result = pool.starmap_async(_fail_on_odd, [(1,), (2,)], on_error="return")
    assert _told(result.get()) == [(ValueError, (1,)), 2]


def test_what_a_returned_exception_is(pool):
    """It shows the worker's traceback. One that a task returns is a result like any other."""
    (error,) = pool.map(_fail_on_odd, [1], on_error="return")
    assert "_fail_on_odd" in "".join(traceback.format_exception(error))
    assert _told(pool.map(work.same, [KeyError(1)], on_error="return")) == [(KeyError, (1,))]


def test_deaths_and_timeouts_too(process_kind, make_pool):
    """A worker's death and a time limit fail one item each."""
    pool = make_pool(process_kind, 2)
    got = pool.map(_die_on_three, range(6), 3, on_error="return")
    assert [type(x) for x in got] == [int, int, int, WorkerDied, int, int]
    got = pool.map(work.spin_on_three, range(5), timeout=1, on_error="return")
    assert [type(x) for x in got] == [int, int, int, TaskTimeout, int]


def test_pickling_errors_too(process_kind, make_pool):
    """Items and results that cannot be pickled or unpickled give errors in their places."""
    pool = make_pool(process_kind, 2)
    got = pool.map(work.same, [1, work.unpicklable(), 2], on_error="return")
    assert [type(x) for x in got] == [int, TaskNotPicklable, int]
    got = list(pool.imap(work.make_stops_when_unpickled, [1, 2], on_error="return"))
    assert [type(x) for x in got] == [StopIteration, StopIteration]


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_an_error_of_the_input_is_raised(pool, verb):
    """An exception of the iterable is raised, because it belongs to no task."""
    results = getattr(pool, verb)(work.same, failing(3, 2), on_error="return")
    with pytest.raises(StopHere):
        list(results)


def test_cancellation_is_raised(kind, make_pool, gate):
    """If the call is cancelled, `get` raises TaskCancelled."""
    pool = make_pool(kind, 1)
    result = pool.map_async(work.gated, [gate.path, None], on_error="return")
    result.cancel()
    gate.open()
    with pytest.raises(Exception, match="cancelled"):
        result.get()


def test_another_value_is_refused(pool):
    """``on_error`` must be "raise" or "return"."""
    assert pool.map(work.same, [1], on_error="raise") == [1]
    with pytest.raises(OptionError, match="on_error"):
        pool.map(work.same, [1], on_error="ignore")
