"""Numbered items: notes on exceptions, ``with_index=``, ``seed=``."""

import gc
import operator
import random
import sys
import traceback

import pytest
from support import work

from xpool import OptionError, Pool

pytestmark = pytest.mark.xpool_only


def _notes(call):
    with pytest.raises(Exception) as caught:
        call()
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("chunksize", [1, 3, 100])
@pytest.mark.parametrize("verb", ["map", "imap", "imap_unordered"])
def test_an_exception_names_its_item(pool, verb, chunksize):
    """For any chunksize, a note names the item's number and repr."""
    items = [0, 1, 2, 4, 5, 6, 3, 7]
    notes = _notes(lambda: list(getattr(pool, verb)(work.fail_on_three, items, chunksize)))
    assert notes == ["item 6 of fail_on_three(): 3"]


def test_the_note_stands_once_in_the_traceback(pool):
    """The traceback shows the note once. It does not show the worker's internal note."""
    with pytest.raises(ValueError, match="3") as caught:
        pool.map(work.fail_on_three, [3])
    shown = "".join(traceback.format_exception(caught.value))
    # Before Python 3.11, tracebacks show notes only if exceptiongroup (of pytest) adds them.
    expected = {1} if sys.version_info >= (3, 11) else {0, 1}
    assert shown.count("\nitem ") in expected, shown


@pytest.mark.parametrize("chunksize", [1, 2])
def test_an_exception_names_its_arguments(pool, chunksize):
    """With `starmap`, the note shows the item's arguments."""
    rows = [(1, 1), (2, 1), (3, 0)]
    (note,) = _notes(lambda: pool.starmap(operator.truediv, rows, chunksize))
    assert note == "item 2 of truediv(): (3, 0)"


def test_exceptions_that_are_returned_name_their_items(pool):
    """With ``on_error="return"``, each exception has its own note."""
    found = pool.map(_fail_long, ["a", "b" * 500], on_error="return")
    (first,), (second,) = (error.__notes__ for error in found)
    assert first == "item 0 of _fail_long(): 'a'"
    assert second.startswith("item 1 of _fail_long(): 'bbb") and len(second) < 150


def _fail_long(x):
    raise ValueError(x)


def test_a_call_has_no_note(pool):
    """Exceptions of `apply` have no note, because the caller knows its arguments."""
    assert _notes(lambda: pool.apply(_fail_long, (1,))) == []


class _Frozen(Exception):
    def __setattr__(self, name, value):
        if name not in ("__traceback__", "__cause__"):
            raise AttributeError(name)


def _fail_frozen(x):
    raise _Frozen(x)


def test_an_exception_that_forbids_attributes(pool):
    """An exception that accepts no attributes arrives unchanged."""
    with pytest.raises(_Frozen):
        pool.map(_fail_frozen, [1, 2])


class _Secret:
    def __repr__(self):
        raise RuntimeError


def test_an_item_without_a_repr(pool):
    """An item whose repr raises is named by its class."""
    (note,) = _notes(lambda: pool.map(_fail_long, [_Secret()]))
    assert note.startswith("item 0 of _fail_long(): <_Secret instance")


@pytest.mark.parametrize("chunksize", [1, 3])
def test_with_index(pool, chunksize):
    """With ``with_index=True``, each result, also a returned exception, comes with the index of its
    item."""
    found = list(pool.imap_unordered(work.square, range(5, 15), chunksize, with_index=True))
    assert sorted(found) == [(i, (i + 5) ** 2) for i in range(10)]
    results = pool.imap_unordered(work.fail_on_three, [3, 4], with_index=True, on_error="return")
    (zero, error), other = sorted(results, key=operator.itemgetter(0))
    assert zero == 0 and type(error) is ValueError and other == (1, 4)


def _draw(x):
    import numpy as np
    import torch

    return x, random.random(), float(np.random.rand()), torch.rand(2).tolist()


@pytest.mark.torch
def test_seed_of_each_item():
    """With ``seed=``, an item draws the same numbers in any worker, chunk and pool."""
    with Pool(2) as pool:
        first = pool.map(_draw, range(6), seed=1, chunksize=1)
        assert len({row[1] for row in first}) == 6
        assert list(pool.imap(_draw, range(6), chunksize=4, seed=1)) == first
        assert pool.starmap(_draw, [(x,) for x in range(6)], seed=1) == first
        assert pool.map(_draw, range(6), seed=2) != first
    with Pool(1) as pool:
        assert pool.map(_draw, range(6), seed=1) == first


_generator = random.Random(3)


def _draw_own(x):
    return _generator.random(), x


def test_seeds_of_generators_that_are_globals():
    """With ``seed=``, items draw the same numbers from a worker's own generators, too. These go on
    as if the items had not drawn."""
    with Pool(1, seed=5) as pool:
        undisturbed = pool.map(_draw_own, range(4))
    with Pool(1, seed=5) as pool:
        later = pool.map(_draw_own, range(2))
        first = pool.map(_draw_own, range(4), seed=1)
        later += pool.map(_draw_own, range(2, 4))
    assert later == undisturbed and len(set(first)) == 4
    with Pool(2) as pool:
        assert pool.map(_draw_own, range(4), seed=1, chunksize=3) == first
        assert pool.map(_draw_own, range(4), seed=2) != first


@pytest.mark.torch
def test_a_seed_leaves_the_generators_alone():
    """Items with ``seed=`` do not change the numbers that the worker draws later."""
    with Pool(1, seed=5) as pool:
        expected = [pool.apply(_draw, (0,)), pool.apply(_draw, (0,))]
    with Pool(1, seed=5) as pool:
        first = pool.apply(_draw, (0,))
        pool.map(_draw, range(3), seed=1)
        assert [first, pool.apply(_draw, (0,))] == expected


class _Kept:
    def __call__(self, x):
        return x


def _kept():
    return sum(type(one).__name__ == "_Kept" for one in gc.get_objects())


@pytest.mark.parametrize("options", [{"seed": 1}, {"retries": 1, "retry_on": OSError}])
def test_a_function_with_options_is_freed(options):
    """When its job is done, a worker frees the function without its garbage collector."""
    with Pool(1, initializer=gc.disable) as pool:
        assert pool.map(_Kept(), range(3), chunksize=1, **options) == [0, 1, 2]
        assert pool.apply(_kept) == 0


def test_seeds_that_are_refused(pool, tmp_path):
    """A seed that is no integer, a seed with a journal, and a seed for threads are refused."""
    with pytest.raises((TypeError, OptionError), match="seed"):
        pool.map(work.square, [1], seed="a")
    with pytest.raises(OptionError, match="seed"):
        pool.map(work.square, [1], seed=1, journal=tmp_path / "journal")
