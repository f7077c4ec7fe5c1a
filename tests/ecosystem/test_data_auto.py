"""`DataLoader(num_workers="auto")`: the rule as data, and loaders whose workers come and go."""

import itertools
import multiprocessing
import os
import random
import time
from collections import deque

import pytest
from support.tiers import also

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.torch,
    # torch warns of more workers than processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

import torch.utils.data as theirs  # noqa: E402
from support.datasets import Stream, die_once, initialize  # noqa: E402

from xpool import OptionError, ThreadPool  # noqa: E402
from xpool.data import DataLoader, _loader  # noqa: E402
from xpool.data._report import WorkerCount  # noqa: E402

# multiprocessing keeps these for ever after their first use, which is no leak of a test.
KEPT = multiprocessing.Value("i"), multiprocessing.get_context("forkserver").Lock()

COUNT = 120
AHEAD = 2


def simulate(make, use, spread, most=8, batches=4000, seed=0):
    """Return the sizes of a simulated loader after each batch, and the share of waiting in the
    second half.

    A worker needs about `make(size)` seconds for a batch, the program about ``use`` seconds, and a
    new worker a second to start.  Both vary by the factor ``spread``.
    """
    draw, count = random.Random(seed), WorkerCount(most, AHEAD)
    now, free, pending, sizes, waits = 0.0, [0.0], deque(), [], 0.0

    def submit():
        worker = min(range(len(free)), key=free.__getitem__)
        took = make(len(free)) * draw.uniform(1 - spread, 1 + spread)
        free[worker] = max(now, free[worker]) + took
        pending.append((free[worker], took))

    for turn in range(batches):
        while len(pending) < AHEAD * len(free):
            submit()
        used = use * draw.uniform(1 - spread, 1 + spread)
        now += used
        ready, took = pending.popleft()
        waited = max(0.0, ready - now)
        now += waited
        if turn == batches // 2:
            middle, waits = now, 0.0
        waits += waited
        size = count.took(used, waited, took)
        free = sorted(free)[:size] + [now + 1.0] * (size - len(free))
        sizes.append(size)
    return sizes, waits / (now - middle)


@pytest.mark.parametrize("spread", [0.2, 0.9])
@pytest.mark.parametrize(
    ("make", "use", "least", "most"),
    [
        (lambda size: 0.01, 0.05, 1, 1),
        (lambda size: 0.05, 0.02, 3, 5),
        (lambda size: 0.095, 0.05, 2, 4),
        (lambda size: 0.05, 0.001, 8, 8),
        (lambda size: 0.005, 0.0001, 8, 8),
        (lambda size: 2.0, 0.5, 4, 6),
        (lambda size: 0.02 * size, 0.005, 8, 8),
    ],
    ids=[
        "the program is slow", "the program needs 2.5", "1.9", "it only takes", "small batches",
        "large batches", "workers slow each other",
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_simulated_loader_gets_its_workers(make, use, least, most, spread, seed):
    """The number is soon one with which the program hardly waits, and it hardly changes then."""
    sizes, waits = simulate(make, use, spread, seed=seed)
    half = sizes[len(sizes) // 2 :]
    assert least <= min(half) and max(half) <= most, set(half)
    assert waits < 0.03 or set(half) == {8}
    assert sum(one != other for one, other in itertools.pairwise(half)) <= 4


def test_a_program_that_becomes_slow():
    """When the program gets slower, workers go; when it is fast again, they come back."""
    count, size = WorkerCount(4, AHEAD), 1
    for used, wanted in (0.001, 4), (0.5, 1), (0.001, 4):
        for _ in range(600):
            size = count.took(used, max(0.0, 0.05 / size - used), 0.05)
        assert size == wanted


def test_one_wait_in_a_while_changes_nothing():
    """A batch that takes long once is no reason for another worker."""
    count = WorkerCount(4, AHEAD)
    for turn in range(1000):
        assert count.took(0.05, 0.02 if turn % 40 == 0 else 0.0, 0.04) == 1


def test_waiting_for_something_else():
    """If the workers are idle while the program waits, it does not wait for them."""
    count = WorkerCount(4, AHEAD)
    for _ in range(1000):
        assert count.took(0.01, 0.05, 0.02) == 1


def test_no_more_than_the_system_has():
    """After the system has refused a worker, the number is no more raised."""
    count = WorkerCount(4, AHEAD)
    for _ in range(20):
        count.took(0.001, 0.05, 0.05)
    count.refused(1)
    for _ in range(100):
        assert count.took(0.001, 0.05, 0.05) == 1


class Scripted(WorkerCount):
    """Takes its sizes from a list, again and again."""

    script = (1, 1, 3, 3, 3, 2, 1, 1, 1, 2, 3, 1, 3, 2)

    def took(self, used, waited, made):
        self.turn = getattr(self, "turn", -1) + 1
        self.size = self.script[self.turn % len(self.script)]
        return self.size


class Noisy(theirs.Dataset):
    """Items with random numbers.  The worker that makes ``deadly`` first dies."""

    def __init__(self, deadly=None, flag=None):
        self.deadly, self.flag, self.program = deadly, flag, os.getpid()

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        info = theirs.get_worker_info()
        assert 0 <= info.id < info.num_workers == 3
        if i == self.deadly:
            die_once(self.flag)
        rng = getattr(info, "rng", None)
        if rng is not None:
            return i, rng.random_generator.random()
        # With older versions of torch, threads have no generators of their own.
        return i, 0.0 if os.getpid() == self.program else random.random()


def values(batches):
    return [[column.tolist() for column in batch] for batch in batches]


def made(number, rule=None, dataset=None, **options):
    """Return a loader with this number of workers, and with this rule."""
    loader = DataLoader(
        dataset or Noisy(), 3, shuffle=True, num_workers=number,
        generator=torch.Generator().manual_seed(4), **options,
    )  # fmt: skip
    if rule is not None:
        loader._auto = rule(3, AHEAD)
    return loader


@pytest.fixture(autouse=True)
def three_cores(monkeypatch):
    """Let the process have three cores."""
    monkeypatch.setattr(_loader, "default_processes", lambda: 3)


@pytest.mark.parametrize("workers", ["thread", *also("process")])
@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": True},
        *also({}, {"persistent_workers": True, "prefetch_epochs": True}),
    ],
    ids=str,
)
def test_the_batches_are_those_of_a_fixed_number(workers, options):
    """The batches, with their random numbers, do not depend on when workers come and go."""
    fixed = made(3, workers=workers, **options)
    auto = made("auto", Scripted, workers=workers, **options)
    for _ in range(3):
        assert values(auto) == values(fixed)
    assert auto.num_workers == 3 and auto.report().workers == auto._auto.size


@pytest.mark.parametrize("workers", ["thread", *also("process")])
def test_out_of_order(workers):
    """With ``in_order=False``, each batch comes once."""
    got = values(made("auto", Scripted, workers=workers, in_order=False))
    assert sorted(i for batch in got for i in batch[0]) == list(range(COUNT))


def test_a_worker_dies(tmp_path):
    """Deaths change nothing in the batches while workers come and go."""
    wanted = values(made(3))
    for deadly in (0, 77):
        dataset = Noisy(deadly, tmp_path / str(deadly))
        assert values(made("auto", Scripted, dataset)) == wanted
        assert (tmp_path / str(deadly)).exists()


@pytest.mark.exhaustive
def test_objects_passed_at_the_start():
    """Workers that start later inherit locks, too."""
    context = multiprocessing.get_context("forkserver")
    dataset = Noisy()
    dataset.total = context.Value("i", 0)
    loader = made("auto", Scripted, dataset, multiprocessing_context="forkserver")
    assert values(loader) == values(made(3))


def test_states():
    """A state of one loads into the other."""
    for numbers in (("auto", 3), (3, "auto")):
        first, second = (
            made(n, Scripted if n == "auto" else None, workers="thread") for n in numbers
        )
        batches = iter(first)
        for _ in range(7):
            next(batches)
        second.load_state_dict(first.state_dict())
        assert values(second) == values(batches)


def test_leaving_in_the_middle():
    """Each iterator has its own workers, and ends them."""
    loader = made("auto", Scripted, workers="thread")
    for turns in (3, 6):
        batches = iter(loader)
        for _ in range(turns):
            next(batches)
        del batches
    assert len(values(loader)) == COUNT // 3
    for one, other in zip(*(values(loader) for _ in range(2))):
        assert len(one) == len(other)


def test_the_system_refuses_a_worker(monkeypatch):
    """The epoch goes on with the workers that it has."""
    loader = made("auto", workers="thread")
    loader._auto.took = lambda *times: 3 if loader._auto.size == 1 else loader._auto.size

    def refuse(pool, size):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPool, "resize", refuse)
    assert len(values(loader)) == COUNT // 3
    assert loader.report().workers == 1


class Slow(theirs.Dataset):
    """Items that take as long as reading a file from a distant disk."""

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        time.sleep(0.01)
        return i


def test_a_program_that_only_waits():
    """The loader gets all workers, and the next epoch begins with them."""
    loader = DataLoader(Slow(), num_workers="auto", workers="thread")
    assert loader._size() == 1
    assert [int(i) for i in loader] == list(range(COUNT))
    assert loader.report().workers == loader._size() == 3


class Stateful(Slow):
    """Has a state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def test_where_the_number_must_be_given():
    """The error says why."""
    for dataset, options, reason in (
        (Stream(), {}, "own part of an iterable dataset"),
        (Stateful(), {}, "own copy of a dataset with a state_dict"),
        (Slow(), {"worker_init_fn": initialize}, "worker_init_fn, worker i % num_workers"),
        (Slow(), {"multiprocessing_context": "fork"}, "forks of a program that has threads"),
    ):
        with pytest.raises(OptionError, match=f"cannot be used here.*{reason}.*give a number"):
            DataLoader(dataset, num_workers="auto", **options)
    with ThreadPool(1) as pool, pytest.raises(OptionError, match="the size of the pool"):
        DataLoader(Slow(), num_workers="auto", pool=pool)
    with pytest.raises(OptionError, match="num_workers must be a number or 'auto', not 'all'"):
        DataLoader(Slow(), num_workers="all")
