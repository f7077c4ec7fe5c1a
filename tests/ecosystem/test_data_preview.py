"""`DataLoader(prefetch_epochs=True)`: the next epoch starts during the last batches of this one."""

import threading

import pytest
from support.tiers import also

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

import torch.utils.data as theirs  # noqa: E402

from xpool.data import DataLoader  # noqa: E402
from xpool.errors import OptionError  # noqa: E402

COUNT = 12


class Counted(theirs.Dataset):
    """A dataset of numbers. In threads, it counts each item that is made."""

    def __init__(self):
        self.made, self.told = [], threading.Semaphore(0)

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        self.made.append(i)
        self.told.release()
        return i

    def __getstate__(self):
        return {"made": [], "told": NoSemaphore()}


class NoSemaphore:
    """Replaces the semaphore in processes."""

    def release(self):
        pass


def begun(dataset, count):
    """Wait until that many more items were made."""
    for _ in range(count):
        assert dataset.told.acquire(timeout=60)


def loader(dataset, **options):
    """Return a loader of two threads that prefetches epochs."""
    return DataLoader(
        dataset, 2, num_workers=2, persistent_workers=True, workers="thread",
        prefetch_epochs=True, **options,
    )  # fmt: skip


def values(batches):
    return [int(i) for batch in batches for i in batch]


def epochs(loader_class, kind, **options):
    """Return three epochs. The program draws random numbers between them."""
    torch.manual_seed(11)
    if kind == "own generator":
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(3)}
    elif kind == "weights":
        options["sampler"] = theirs.WeightedRandomSampler(torch.arange(COUNT) + 1.0, COUNT)
    elif kind == "batches":
        sampler = theirs.RandomSampler(range(COUNT), replacement=True)
        options["batch_sampler"] = theirs.BatchSampler(sampler, 2, False)
    else:
        options["shuffle"] = True
    if kind != "batches":
        options["batch_size"] = 2
    batches = loader_class(Counted(), num_workers=2, persistent_workers=True, **options)
    found = []
    for epoch in range(3):
        found.append(values(batches))
        if epoch:
            torch.rand(3)
    return found, torch.rand(1).item()


@pytest.mark.parametrize("workers", ["thread", *also("process")])
@pytest.mark.parametrize("kind", ["shared generator", "own generator", "weights", "batches"])
def test_the_permutations_of_torch(kind, workers):
    """The samplers draw in torch's order, whatever the program draws between epochs."""
    wanted = epochs(theirs.DataLoader, kind)
    assert epochs(DataLoader, kind, workers=workers, prefetch_epochs=True) == wanted


def test_the_next_epoch_has_begun():
    """The first batches of the next epoch are made early, and only once."""
    dataset = Counted()
    batches = loader(dataset, shuffle=True, generator=torch.Generator().manual_seed(1))
    first = values(batches)
    begun(dataset, COUNT + 8)
    second = values(batches)
    assert sorted(first) == sorted(second) == list(range(COUNT)) and first != second
    begun(dataset, COUNT)
    assert not dataset.told.acquire(blocking=False) and len(dataset.made) == 2 * COUNT + 8


def test_batches_of_another_permutation_are_dropped():
    """Prefetched batches are dropped if the sampler's weights have changed."""
    dataset, weights = Counted(), torch.zeros(COUNT)
    weights[3] = 1
    sampler = theirs.WeightedRandomSampler(weights, COUNT)
    batches = loader(dataset, sampler=sampler)
    assert values(batches) == [3] * COUNT
    sampler.weights = weights.roll(1)
    assert values(batches) == [4] * COUNT


def test_leaving_an_epoch():
    """If the program leaves an epoch early, the next one is not prefetched. It is complete."""
    dataset = Counted()
    batches = loader(dataset)
    iterator = iter(batches)
    assert next(iterator).tolist() == [0, 1]
    del iterator
    assert values(batches) == list(range(COUNT))
    state = batches.state_dict()
    batches.load_state_dict(state)
    assert values(batches) == list(range(COUNT))


class OwnSampler(theirs.Sampler):
    """Each epoch yields the next numbers."""

    def __init__(self):
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        return iter(range(self.begun, self.begun + 3))


def test_a_custom_sampler():
    """A custom sampler may keep state, so its epochs are not prefetched."""
    dataset = Counted()
    ours = loader(dataset, sampler=OwnSampler())
    torchs = theirs.DataLoader(
        Counted(), 2, sampler=OwnSampler(), num_workers=1, persistent_workers=True
    )
    for _ in range(2):
        assert values(ours) == values(torchs)
    assert len(dataset.made) == 6


def test_it_needs_persistent_workers():
    """Without persistent workers, `prefetch_epochs` is refused."""
    with pytest.raises(OptionError, match="persistent_workers"):
        DataLoader(range(3), num_workers=1, prefetch_epochs=True)
