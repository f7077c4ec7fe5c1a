"""Workers of `xpool.data.DataLoader` that die: the batches are those of a run without deaths.

The batch of a dead worker is requested again after a pause, in which other batches are made.
"""

import contextlib
import functools

import pytest
from support.tiers import also

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

import torch.utils.data as theirs  # noqa: E402
from support.datasets import die_once  # noqa: E402

from xpool import Pool, pickle  # noqa: E402
from xpool.data import DataLoader  # noqa: E402
from xpool.data._epoch import PendingBatch  # noqa: E402
from xpool.data._loader_worker import Base, EpochSpec, WorkerCopy  # noqa: E402


class Once(theirs.IterableDataset):
    """Seven numbers that can be iterated over only once. A worker is killed at ``deadly``."""

    def __init__(self, deadly=None, flag=None):
        self.left, self.deadly, self.flag = list(range(7)), deadly, flag

    def __iter__(self):
        while self.left:
            if self.left[0] == self.deadly:
                die_once(self.flag)
            yield self.left.pop(0)


def fail_at_four(i):
    if i == 4:
        raise ZeroDivisionError
    return i


class Failing(Once):
    """Its item 4 raises."""

    def __iter__(self):
        return map(fail_at_four, super().__iter__())


class Counting(theirs.Dataset):
    """Each item is the number of items made before. This number is the dataset's state."""

    def __init__(self, deadly=None, flag=None):
        self.count, self.deadly, self.flag = 0, deadly, flag

    def __len__(self):
        return 9

    def __getitem__(self, i):
        if i == self.deadly:
            die_once(self.flag)
        self.count += 1
        return self.count - 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("deadly", [4, *also(0, 3, 6)])
@pytest.mark.parametrize(
    "options",
    [{"in_order": False}, *also({}, {"persistent_workers": True}, {"drop_last": True})],
    ids=str,
)
def test_the_end_of_an_iterable(tmp_path, deadly, options):
    """No batch is lost, although the worker reaches the dataset's end before it makes one again."""
    loader = DataLoader(
        Once(deadly, tmp_path / "died"), 3, num_workers=1, prefetch_factor=4, collate_fn=list,
        **options,
    )  # fmt: skip
    wanted = [[0, 1, 2], [3, 4, 5], *([] if options.get("drop_last") else [[6]])]
    assert list(loader) == wanted
    assert (tmp_path / "died").exists()


def test_an_error_before_it_is_requested(tmp_path):
    """An error on the way to a later batch is raised when its batch is requested."""
    dataset = Failing(3, tmp_path / "died")
    batches = iter(DataLoader(dataset, 3, num_workers=1, prefetch_factor=4, collate_fn=list))
    assert next(batches) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert list(batches) == [[5, 6]]
    assert (tmp_path / "died").exists()


@pytest.mark.parametrize("deadly", [4, *also(2, 8)])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_state_of_persistent_workers(tmp_path, deadly, in_order):
    """After a death, the dataset goes on from the last state, also in the next epoch. The batches
    of one worker keep their order, because a state has only one place for each worker."""
    loader = DataLoader(
        Counting(deadly, tmp_path / "died"), 3, num_workers=1, persistent_workers=True,
        in_order=in_order, collate_fn=list,
    )  # fmt: skip
    assert [i for _ in range(2) for batch in loader for i in batch] == list(range(18))
    assert (tmp_path / "died").exists()


@pytest.fixture(scope="module")
def in_a_worker():
    """A function that calls another in a worker, with a copy of a dataset for batches of three."""

    def run(dataset, func):
        def call():
            return func(WorkerCopy(DataLoader(dataset, 3, num_workers=1, collate_fn=list)))

        return pool.apply(call)

    with Pool(1) as pool:
        yield run
    pool.join()


def spec(number):
    """Return the values of an epoch."""
    return EpochSpec(number, 0, None)


def test_only_batches_that_may_be_requested_are_kept(in_a_worker):
    """On the way to its place, a worker keeps no batches that the program has taken."""

    def make(copy):
        copy.make_next(spec(1), 0, Base(), 2, 1, None, 0)
        kept = [list(copy._kept)]
        copy.make_next(spec(1), 0, Base(), 3, 2, None, 0)
        return [*kept, list(copy._kept)]

    assert in_a_worker(Once(), make) == [[1], []]


def test_the_next_epoch_begins_at_the_end_of_the_last(in_a_worker):
    """A worker that made the batch of a dead one last does not go on from there."""

    def make(copy, first_epoch):
        requests = [(place, [0, 1, 2]) for place in range(3)]
        for place in first_epoch:
            copy.make_next(spec(1), 0, Base(), place, 0, requests[: place + 1], 1)
        copy.dataset.count += 1  # a change without a state
        copy.begin(spec(2), 0, Base(0, pickle.dumps({"dataset": {"count": 9}}), end=3))
        return copy.make_next(spec(2), 0, Base(), 0, 0, requests[:1], 1).batch

    assert in_a_worker(Counting(), functools.partial(make, first_epoch=[1])) == [9, 10, 11]
    kept = in_a_worker(Counting(), functools.partial(make, first_epoch=[0, 1, 2]))
    assert kept == [10, 11, 12], "the worker was at the end, and its dataset was changed"


class Ready:
    """A result that is ready when it is asked for the n-th time."""

    def __init__(self, n):
        self.n, self._waiters = n, self

    def ready(self):
        self.n -= 1
        return self.n <= 0

    def listening(self, bell):
        """Ring the bell at once, as if something had changed."""
        bell.release()
        return contextlib.nullcontext()


def test_the_batches_of_a_worker_keep_their_order():
    """With in_order=False, a batch waits for the earlier ones of its part."""
    epoch = iter(DataLoader(Once(), num_workers=2, workers="thread", in_order=False))
    kept = epoch._pending
    for part, other, place in (0, 0, 0), (0, 1, 1), (None, None, 1):
        epoch._pending = [
            PendingBatch(Ready(2), None, part, 0),
            PendingBatch(Ready(1), None, other, 1),
        ]
        assert epoch._ready_place() == place
    epoch._pending = kept
