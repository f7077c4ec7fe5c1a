"""States of `xpool.data.DataLoader` that another number of workers loads."""

import itertools
import json
import random

import pytest
from support.tiers import also

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.torch,
    # torch warns of more workers than processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

import torch.utils.data as theirs  # noqa: E402
from support.datasets import Falling, Stream, die_once, initialize  # noqa: E402

from xpool import OptionError, P2PPool, ThreadPool  # noqa: E402
from xpool.data import DataLoader  # noqa: E402

COUNT = 30

NONE = {}
ONE, TWO, THREE = ({"num_workers": n, "workers": "thread"} for n in (1, 2, 3))
TWO_PROCESSES, THREE_PROCESSES = ({"num_workers": n} for n in (2, 3))
KEPT = {"num_workers": 2, "persistent_workers": True}


class Drawing(theirs.Sampler):
    """Draws its permutation in `iter()`, from the generator of the program."""

    def __iter__(self):
        return iter(torch.randperm(COUNT).tolist())

    def __len__(self):
        return COUNT


KINDS = {
    "in order": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator()},
    "drop_last": lambda: {
        "batch_size": 4, "shuffle": True, "drop_last": True, "generator": torch.Generator(),
    },
    "single items": lambda: {"batch_size": None, "sampler": Drawing()},
    "a sampler that draws at once": lambda: {"batch_size": 4, "sampler": Drawing()},
    "a sampler with a state": lambda: {"batch_size": 4, "sampler": Falling(COUNT)},
    "batches": lambda: {
        "batch_sampler": theirs.BatchSampler(
            theirs.WeightedRandomSampler(torch.arange(COUNT) + 1.0, COUNT), 4, True
        )
    },
}  # fmt: skip


def made(kind, options, dataset=range(COUNT)):
    return DataLoader(dataset, **KINDS[kind](), **options)


def values(batches):
    return [torch.as_tensor(batch).tolist() for batch in batches]


def state_after(loader, taken):
    """Return the loader's state after so many batches, through JSON, and the remaining batches."""
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    return json.loads(json.dumps(loader.state_dict())), values(batches)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TWO, THREE), (THREE, NONE), (NONE, TWO),
        *also((NONE, TWO_PROCESSES), (TWO_PROCESSES, THREE), (KEPT, ONE), (TWO, THREE_PROCESSES)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("taken", [3, *also(0, 1, 5)])
def test_the_rest_of_an_epoch(kind, before, after, taken):
    """The batches that remain are the same, and a state of the second loader is valid, too."""
    torch.manual_seed(7)
    state, wanted = state_after(made(kind, before), taken)
    torch.manual_seed(99)
    again = made(kind, after)
    again.load_state_dict(state)
    batches = iter(again)
    got = values(itertools.islice(batches, 2))
    assert got == wanted[:2]
    for options in before, after:
        third = made(kind, options)
        third.load_state_dict(again.state_dict())
        assert values(third) == wanted[2:]
    assert values(batches) == wanted[2:]


@pytest.mark.parametrize(("before", "after"), [(TWO, NONE), (NONE, THREE), *also((TWO, THREE))])
@pytest.mark.parametrize("epochs", [0, 1])
def test_a_state_between_epochs(before, after, epochs):
    """A state before or after an epoch is the start of the same next epochs."""
    loader = made("shuffled", before)
    for _ in range(epochs):
        list(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    wanted = values(loader), values(loader)
    again = made("shuffled", after)
    again.load_state_dict(state)
    assert (values(again), values(again)) == wanted


class Noisy(theirs.Dataset):
    """Each item is a random number.  The worker that makes an item of ``deadly`` dies once."""

    def __init__(self, deadly=None, flag=None):
        self.deadly, self.flag = deadly, flag

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        if i == self.deadly:
            die_once(self.flag)
        return torch.rand(1).item() + random.random()


@pytest.mark.parametrize("before", [TWO_PROCESSES, *also(KEPT)], ids=str)
def test_random_numbers_of_the_dataset(tmp_path, before):
    """Each batch has the same random numbers, also in a later epoch, and when a worker dies."""
    loader = made("shuffled", before, Noisy())
    list(loader)
    state, wanted = state_after(loader, 3)
    for size in 1, 3:
        dataset = Noisy(deadly=5, flag=tmp_path / str(size))
        again = made("in order", {"num_workers": size}, dataset)
        again.load_state_dict(state_after(made("in order", before, Noisy()), 0)[0])
        list(again)
        assert (tmp_path / str(size)).exists()
        again = made("shuffled", {"num_workers": size}, Noisy())
        again.load_state_dict(state)
        assert values(again) == wanted


@pytest.mark.parametrize(
    ("before", "after"), [(TWO_PROCESSES, THREE_PROCESSES), (TWO, TWO_PROCESSES), (KEPT, NONE)]
)
@pytest.mark.parametrize("taken", [0, *also(3, 8)])
def test_an_init_function(before, after, taken):
    """A ``worker_init_fn`` gives each batch a fixed worker.  Other workers go on, too."""
    loader = made("in order", {**before, "worker_init_fn": initialize})
    for _ in range(2):
        state, wanted = state_after(loader, taken)
    for workers in after, before:
        again = made("in order", {**workers, "worker_init_fn": initialize})
        again.load_state_dict(state)
        assert values(again) == wanted
    state = loader.state_dict()
    again = made("in order", {**after, "worker_init_fn": initialize})
    again.load_state_dict(state)
    assert len(values(again)) == 8


def test_batches_taken_out_of_order():
    """No batch comes twice or is missing if they were taken in another order."""
    loader = made("shuffled", {**THREE, "in_order": False, "prefetch_factor": 3})
    batches = iter(loader)
    got = [values([next(batches)])[0] for _ in range(4)]
    state = loader.state_dict()
    for options in NONE, TWO, {**ONE, "in_order": False}:
        again = made("shuffled", options)
        again.load_state_dict(state)
        rest = values(again)
        assert sorted(i for batch in got + rest for i in batch) == list(range(COUNT))


def test_a_pool_of_another_size():
    """The workers of a given pool go on, too."""
    state, wanted = state_after(made("shuffled", THREE), 2)
    with ThreadPool(2) as pool:
        again = made("shuffled", {"pool": pool})
        again.load_state_dict(state)
        assert values(again) == wanted


class Counting(theirs.Dataset):
    """Counts the items that its copy has made."""

    made = 0

    def __len__(self):
        return 8

    def __getitem__(self, i):
        self.made += 1
        return i

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Stream(), "own part of an iterable dataset"),
        (Counting(), "own copy of a dataset with a state_dict"),
    ],
    ids=["iterable", "stateful"],
)
@pytest.mark.parametrize(("before", "after"), [(TWO, THREE), (NONE, ONE), (ONE, NONE)])
@pytest.mark.parametrize("taken", [0, 1])
def test_states_of_workers_are_refused(dataset, reason, before, after, taken):
    """The error says which numbers differ, and why they must be the same."""
    loader = DataLoader(dataset, 2, **before)
    if taken:
        state = state_after(loader, taken)[0]
    else:
        state = loader.state_dict()
    numbers = [options.get("num_workers", 0) for options in (before, after)]
    text = rf"num_workers = {numbers[0]}, but this loader has {numbers[1]}\. Each .*{reason}"
    with pytest.raises(OptionError, match=text):
        DataLoader(dataset, 2, **after).load_state_dict(state)


def test_a_pool_of_another_size_is_refused():
    """So it is if the workers are those of a given pool."""
    state = state_after(DataLoader(Stream(), 2, **THREE), 1)[0]
    with P2PPool(1) as pool, pytest.raises(OptionError, match="own part of an iterable"):
        DataLoader(Stream(), 2, pool=pool).load_state_dict(state)
