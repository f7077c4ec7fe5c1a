"""`map`, `starmap` and their asynchronous versions return results in the input's order."""

import functools

import pytest
from support import work
from support.limits import WAIT

from xpool._worker.callables import has_state


class StopHere(Exception):
    """Raised by the iterables of these tests."""


def failing(total, at):
    """Yield numbers from 0, and raise StopHere at one of them."""
    for i in range(total):
        if i == at:
            raise StopHere
        yield i


class LyingSequence:
    """Has a length, but raises at its first item."""

    def __len__(self):
        return 1

    def __iter__(self):
        return self

    def __next__(self):
        raise StopHere


@pytest.mark.parametrize("chunksize", [None, 1, 3, 10, 1000])
def test_map_keeps_order(pool, chunksize):
    """`map` returns results in the order of the input, for any chunksize."""
    expected = [i * i for i in range(100)]
    assert pool.map(work.square, range(100), chunksize) == expected
    assert pool.map(work.square, range(100), chunksize=chunksize) == expected


@pytest.mark.parametrize("chunksize", [None, 1, 7, 1000])
def test_starmap_unpacks(pool, chunksize):
    """`starmap` calls the function with the elements of each item."""
    pairs = list(zip(range(50), range(50, 0, -1), strict=True))
    assert pool.starmap(work.multiply, pairs, chunksize) == [a * b for a, b in pairs]


def test_starmap_takes_any_iterable_as_item(pool):
    """Items of `starmap` may be lists, tuples or other iterables."""
    assert pool.starmap(work.add, [[1, 2], (3, 4), "ab"]) == [3, 7, "ab"]


@pytest.mark.parametrize("chunksize", [None, 1, 5])
def test_empty_input(pool, chunksize):
    """An empty input gives an empty list."""
    assert pool.map(work.square, [], chunksize) == []
    assert pool.starmap(work.add, [], chunksize) == []
    assert pool.map_async(work.square, [], chunksize).get(timeout=WAIT) == []
    assert pool.map(work.square, iter(()), chunksize) == []


class More(tuple):
    """Yields more items than its length."""

    def __iter__(self):
        return iter([*super().__iter__(), 7, 8])


class Every(list):
    """A list that yields only every other element, and reports a wrong length."""

    def __iter__(self):
        return iter(self[::2])

    def __len__(self):
        return 1000


class Doubled(tuple):
    """A tuple that yields doubled elements, and whose slices raise."""

    def __iter__(self):
        return (2 * x for x in super().__iter__())

    def __getitem__(self, _):
        raise StopHere


@pytest.mark.xpool_only
@pytest.mark.parametrize("chunksize", [None, 1, 4, 100])
def test_the_iterator_of_a_subclass_is_used(pool, chunksize):
    """The iterator of a subclass of list or tuple decides which items `map` uses."""
    assert pool.map(work.square, Every(range(20)), chunksize) == [i * i for i in range(0, 20, 2)]
    assert pool.map(work.same, Doubled(range(9)), chunksize) == list(range(0, 18, 2))
    assert pool.map(work.same, More(range(7)), chunksize) == list(range(9))
    assert pool.map_async(work.square, Every(), chunksize).get() == []


class Shrinks:
    """Removes the last element of a list while it is pickled."""

    def __init__(self, items):
        self.items = items

    def __reduce__(self):
        if self.items:
            self.items.pop()
        return int, ()


@pytest.mark.xpool_only
@pytest.mark.parametrize("chunksize", [None, 1, 4, 100])
def test_a_list_that_shrinks_during_the_call(process_kind, make_pool, chunksize):
    """`map` copies its list at the call. A list that shrinks later loses no items."""
    pool = make_pool(process_kind, 2)
    items = []
    items.extend(Shrinks(items) for _ in range(20))
    assert pool.map(work.same, items, chunksize) == [0] * 20
    items.clear()
    items.extend((Shrinks(items),) for _ in range(20))
    assert pool.starmap(work.same, items, chunksize) == [0] * 20
    pool.close()
    pool.join()


@pytest.mark.parametrize(("total", "at"), [(1, 0), (10, 3)], ids=["at-once", "midway"])
def test_iterable_that_raises(pool, total, at):
    """`map` raises the iterable's error, on a second call too."""
    for _ in range(2):
        with pytest.raises(StopHere) as caught:
            pool.map(work.square, failing(total, at), 1)
        assert caught.value.__cause__ is None
    with pytest.raises(StopHere):
        pool.map_async(work.square, failing(total, at), 1).get()
    assert pool.map(work.square, [2]) == [4]


def test_sequence_that_raises(pool):
    """`map` raises the error of an iterable with a length too."""
    for _ in range(2):
        with pytest.raises(StopHere):
            pool.map(work.square, LyingSequence(), 1)


@pytest.mark.parametrize("chunksize", [None, 1, 4])
def test_error_of_a_task(pool, chunksize):
    """`map` raises the error of the task that failed."""
    with pytest.raises(ValueError, match=r"^3\b"):
        pool.map(work.fail_on_three, range(10), chunksize)
    assert pool.map(work.square, range(3)) == [0, 1, 4]


@pytest.mark.xpool_only
@pytest.mark.parametrize("chunksize", [None, 1, 4, 100])
@pytest.mark.parametrize("verb", ["map", "starmap"])
def test_stop_iteration_of_a_task(pool, verb, chunksize):
    """A task that raises StopIteration fails the map. The list does not become shorter."""
    items = range(100) if verb == "map" else [(i,) for i in range(100)]
    with pytest.raises(StopIteration) as caught:
        getattr(pool, verb)(work.stop_on_three, items, chunksize)
    assert caught.value.value == 3
    assert pool.map(work.square, range(3)) == [0, 1, 4]


def test_error_waits_for_all_chunks(pool, kind, gate):
    """A map with a failed chunk is not ready until the other chunks are done."""
    if kind.name == "p2p":
        pytest.skip("it may assign the later task to the worker that waits at the gate")
    result = pool.starmap_async(work.fail_slowly, [(gate.path, 0), (gate.path, 1)], 1)
    # The failed chunk is done as soon as the pool has answered a task submitted after it.
    assert pool.apply(work.square, (2,)) == 4
    assert not result.ready()
    gate.open()
    with pytest.raises(ValueError, match=r"^0\b"):
        result.get()
    assert result.ready() and not result.successful()


class Trainer:
    """Counts its own calls, as a model that is trained would change."""

    def __init__(self):
        self.steps = []

    def __call__(self, x):
        self.steps.append(x)
        return len(self.steps)

    def train(self, x):
        return self(x)


def count(steps, x):
    """Count the calls in an argument of a `partial`."""
    steps.append(x)
    return len(steps)


@pytest.mark.parametrize(
    "func",
    [Trainer(), Trainer().train, functools.partial(count, []), functools.partial(Trainer())],
    ids=["callable", "method", "partial", "partial-of-callable"],
)
def test_a_function_with_a_state_is_new_for_each_task(process_kind, make_pool, func):
    """No task sees what another has changed in the object of a method: no fold trains on others."""
    pool = make_pool(process_kind, 1)
    assert pool.map(func, range(4), 1) == [1] * 4
    assert pool.map(func, range(4), 2) == [1, 2, 1, 2]
    assert list(pool.imap(func, range(3))) == [1] * 3
    assert pool.starmap(func, [(1,), (2,)], 1) == [1, 1]


@pytest.mark.pure
def test_a_function_that_is_found_by_its_name_is_kept():
    """A worker does not unpickle numpy's functions again for each task: it would get the same."""
    numpy = pytest.importorskip("numpy")
    assert not any(map(has_state, [numpy.sqrt, numpy.sum, functools.partial(numpy.power, 2)]))
    named = Trainer()
    vars(named).update(__module__="numpy", __name__="sqrt")
    assert has_state(named)


def test_large_items(pool):
    """Many items that are larger than a pipe's buffer arrive in order, in both directions."""
    items = [bytes([i]) * 300_000 for i in range(32)]
    assert pool.map(work.same, items, chunksize=1) == items


def test_large_errors(pool):
    """Large exceptions do not block the end of the pool."""
    with pytest.raises(ValueError, match="xxx"):
        pool.map(work.raise_large, [1 << 20, 1 << 20])


def test_a_hundred_thousand_items(pool):
    """`map` handles a hundred thousand items."""
    assert sum(pool.map(work.same, range(100_000))) == sum(range(100_000))


def test_two_maps_at_once(pool):
    """Two maps in flight return their own results."""
    a = pool.map_async(work.square, range(500), 1)
    b = pool.map_async(work.same, range(500), 1)
    assert b.get() == list(range(500))
    assert a.get() == [i * i for i in range(500)]
