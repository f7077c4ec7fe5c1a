"""States of `xpool.data.DataLoader`, and persistent workers."""

import json
import multiprocessing
import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

import torch.utils.data as theirs  # noqa: E402
from support.datasets import Falling, die_once  # noqa: E402
from support.tiers import also  # noqa: E402

from xpool import OptionError  # noqa: E402
from xpool.data import DataLoader  # noqa: E402

# multiprocessing keeps these for ever after their first use, which is no leak of a test.
KEPT = multiprocessing.Value("i"), multiprocessing.get_context("spawn").Lock()

ALL = [
    {"num_workers": 2, "workers": "thread"},
    *also({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}),
]


class Numbers(theirs.Dataset):
    """Thirty numbers."""

    def __len__(self):
        return 30

    def __getitem__(self, i):
        if not 0 <= i < 30:
            raise IndexError(i)
        return i


class Counting(theirs.IterableDataset):
    """Numbers, divided among workers. It has a state and counts its steps."""

    def __init__(self, n=40):
        self.n, self.at, self.walked, self.epoch = n, 0, 0, 0

    def __iter__(self):
        info = theirs.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first + self.at * step, self.n, step):
            self.at += 1
            self.walked += 1
            yield torch.tensor([i, self.epoch, self.walked])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.at, self.epoch = state["at"], state["epoch"]


def values(batches):
    return [batch.tolist() for batch in batches]


def take(iterator, n):
    return [next(iterator).tolist() for _ in range(n)]


def through_json(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_state_of_any_epoch(options, epochs):
    """A state of a later epoch yields the rest of that epoch, and then the next ones."""
    loader = DataLoader(
        Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(1), **options
    )
    for _ in range(epochs):
        list(loader)
    batches = iter(loader)
    take(batches, 3)
    state = through_json(loader.state_dict())
    wanted = values(batches) + values(loader)

    again = DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator(), **options)
    again.load_state_dict(state)
    assert values(again) + values(again) == wanted


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_a_state_between_epochs(options, epochs):
    """A state taken before the first epoch or after any epoch starts the next epoch."""
    torch.manual_seed(5)
    loader = DataLoader(Numbers(), 4, shuffle=True, **options)
    for _ in range(epochs):
        list(loader)
    state = through_json(loader.state_dict())
    wanted = values(loader) + values(loader)

    torch.manual_seed(99)
    again = DataLoader(Numbers(), 4, shuffle=True, **options)
    again.load_state_dict(state)
    assert again.state_dict() == state
    first = values(again)
    assert first == wanted[: len(first)]
    torch.manual_seed(5)
    third = DataLoader(Numbers(), 4, shuffle=True, **options)
    for _ in range(epochs):
        list(third)
    third.load_state_dict(state)
    assert values(third) + values(third) == wanted, "the program's generator has another state"


def test_generators_of_samplers_are_restored():
    """A state restores the sampler's own generator and Python's random generator."""

    class Shuffled(theirs.Sampler):
        def __iter__(self):
            order = list(range(30))
            random.shuffle(order)
            return iter(order)

        def __len__(self):
            return 30

    def own(seed):
        return theirs.RandomSampler(Numbers(), generator=torch.Generator().manual_seed(seed))

    for make in own, lambda _: Shuffled():
        loader = DataLoader(Numbers(), 4, sampler=make(1), num_workers=1, workers="thread")
        batches = iter(loader)
        take(batches, 2)
        state = loader.state_dict()
        wanted = values(batches)
        random.seed(0)
        again = DataLoader(Numbers(), 4, sampler=make(2), num_workers=1, workers="thread")
        again.load_state_dict(state)
        assert values(again) == wanted


def test_another_loader_is_refused():
    """If the batch size, the dataset or the permutation differs, the error names it."""
    options = {"num_workers": 2, "workers": "thread"}
    loader = DataLoader(Numbers(), 4, **options)
    take(iter(loader), 1)
    batches = iter(loader)
    take(batches, 1)
    state = loader.state_dict()
    for other, name in (
        (DataLoader(Numbers(), 5, **options), "batch_size"),
        (DataLoader(theirs.TensorDataset(torch.arange(9)), 4, **options), "length"),
    ):
        with pytest.raises(OptionError, match=name):
            other.load_state_dict(state)
    with pytest.raises(OptionError, match="not {'random': 1}"):
        loader.load_state_dict({"random": 1})
    other = DataLoader(Numbers(), 4, sampler=range(29, -1, -1), **options)
    other.load_state_dict(state)
    with pytest.raises(OptionError, match="indices"):
        iter(other)
    assert other.state_dict() == state, "an iteration that could not begin lost the state"


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("interval", [1, 4])
def test_an_iterable_with_a_state(options, interval):
    """A dataset with a state resumes from its last snapshot, so few items are made again."""
    loader = DataLoader(Counting(), 2, snapshot_every_n_steps=interval, **options)
    batches = iter(loader)
    before = take(batches, 12)
    state = through_json(loader.state_dict())
    rest = values(batches)
    again = DataLoader(Counting(), 2, snapshot_every_n_steps=interval, **options)
    again.load_state_dict(state)
    got = values(again)
    numbers = [[row[0] for row in batch] for batch in got]
    assert numbers == [[row[0] for row in batch] for batch in rest]
    walked = max(row[2] for batch in got for row in batch)
    passed = 2 * len(before) // max(1, options.get("num_workers", 0))
    assert walked <= 20 + 20 * (not options) - passed + 2 * (interval - 1)


def test_persistent_workers_keep_the_datasets_state():
    """With persistent workers, the dataset's state continues in the next epoch."""
    options = {"num_workers": 2, "persistent_workers": True}
    loader = DataLoader(Counting(), 5, **options)
    assert {row[1] for batch in values(loader) for row in batch} == {0}
    state = through_json(loader.state_dict())
    wanted = [[row[:2] for row in batch] for batch in values(loader)]
    assert {row[1] for batch in wanted for row in batch} == {1}
    again = DataLoader(Counting(), 5, **options)
    again.load_state_dict(state)
    assert [[row[:2] for row in batch] for batch in values(again)] == wanted


class Steps:
    """An iterator over the numbers below six, with a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 6:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Stepping(theirs.IterableDataset):
    """Only its iterator has a state."""

    def __iter__(self):
        return Steps()


@pytest.mark.parametrize("workers", ["thread", *also("process")])
@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_before_the_first_snapshot_of_an_epoch(workers, taken, epochs):
    """A state whose worker has only the state of the last epoch's end does not end this epoch."""
    options = {"num_workers": 1, "workers": workers, "persistent_workers": True}
    loader = DataLoader(Stepping(), 2, snapshot_every_n_steps=2, **options)
    for _ in range(epochs):
        list(loader)
    batches = iter(loader)
    take(batches, taken)
    state = through_json(loader.state_dict())
    again = DataLoader(Stepping(), 2, snapshot_every_n_steps=2, **options)
    again.load_state_dict(state)
    assert values(again) == values(batches) == [[1, 2], [3, 4], [5, 6]][taken:]


@pytest.mark.parametrize(("interval", "drawn"), [(1, 12), *also((0, 30), (4, 18))])
def test_a_sampler_with_a_state(interval, drawn):
    """A sampler with a state resumes from its last snapshot. With interval 0 it starts again."""
    options = {"num_workers": 2, "workers": "thread", "snapshot_every_n_steps": interval}
    loader = DataLoader(Numbers(), 3, sampler=Falling(), **options)
    batches = iter(loader)
    take(batches, 6)
    state = through_json(loader.state_dict())
    wanted = values(batches)
    again = DataLoader(Numbers(), 3, sampler=Falling(), **options)
    again.load_state_dict(state)
    assert values(again) == wanted and again.sampler.drawn == drawn


def test_a_worker_dies(tmp_path):
    """A worker that replaces a dead one resumes from the last snapshot. No item comes twice."""

    class Dying(Counting):
        def __iter__(self):
            for row in super().__iter__():
                if row[0] == 33:
                    die_once(tmp_path / "died")
                yield row

    got = values(DataLoader(Dying(), 1, num_workers=2))
    assert sorted(batch[0][0] for batch in got) == list(range(40))
    assert (tmp_path / "died").exists()
    assert max(batch[0][2] for batch in got if batch[0][0] % 2) < 20, "it made all items again"


class Living(theirs.Dataset):
    """Counts the items made in this worker, and its initializations."""

    made = 0
    begun = 0

    def __len__(self):
        return 8

    def __getitem__(self, i):
        self.made += 1
        return self.made, self.begun, random.random(), torch.rand(1).item()


def initialize(worker):
    """Count the initialization in the dataset, and seed Python's generator."""
    theirs.get_worker_info().dataset.begun += 1
    random.seed(7)


def test_persistent_workers_keep_their_dataset():
    """A persistent worker keeps its dataset and its random state, and is initialized once."""
    loader = DataLoader(
        Living(), None, num_workers=1, persistent_workers=True, worker_init_fn=initialize
    )
    items = list(loader) + list(loader)
    assert [made for made, *_ in items] == list(range(1, 17))
    assert {begun for _, begun, *_ in items} == {1}
    drawn = random.Random(7)
    assert [value for *_, value, _ in items] == [drawn.random() for _ in items]
    assert len({value for *_, value in items}) == 16, "torch's generator has no seed for each batch"
    fresh = DataLoader(Living(), None, num_workers=1, worker_init_fn=initialize)
    assert [made for _ in range(2) for made, *_ in fresh] == [*range(1, 9), *range(1, 9)]


class Inherited(theirs.Dataset):
    """A dataset with objects that only a start of multiprocessing passes on. With fork, it has an
    open file too."""

    def __init__(self, context, path):
        self.total, self.lock = context.Value("i", 0), context.Lock()
        self.file = open(path) if context.get_start_method() == "fork" else None  # noqa: SIM115

    def __len__(self):
        return 8

    def __getitem__(self, i):
        with self.lock, self.total.get_lock():
            self.total.value += 1
        return i


@pytest.mark.parametrize("method", ["fork", *also("spawn", "forkserver", None)])
def test_objects_passed_at_the_start(tmp_path, method):
    """Locks, shared values and open files reach the workers, as with torch's loader."""
    (tmp_path / "file").write_text("text")
    dataset = Inherited(multiprocessing.get_context(method), tmp_path / "file")
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context=method)
    assert len(list(loader)) == 4 and dataset.total.value == 8
    if dataset.file is not None:
        dataset.file.close()


@pytest.mark.parametrize("options", [{}, *ALL], ids=str)
@pytest.mark.parametrize("kind", ["dataset", "sampler"])
@pytest.mark.parametrize("n", [5, *also(1, 4, 11)])
def test_after_the_last_batch(options, kind, n):
    """After the last batch, partial or not, no batch is left, and the next epoch is whole."""

    def make():
        if kind == "dataset":
            return DataLoader(Counting(n), 2, collate_fn=list, **options)
        return DataLoader(range(n), 2, sampler=Falling(n), collate_fn=list, **options)

    loader = make()
    batches = iter(loader)
    whole = []
    for batch in batches:
        whole.append(batch)
        state = through_json(loader.state_dict())
    again = make()
    again.load_state_dict(state)
    assert list(again) == []
    assert [[int(i[0]) if kind == "dataset" else i for i in b] for b in again] == [
        [int(i[0]) if kind == "dataset" else i for i in b] for b in whole
    ]
