"""Threads reuse the memory of a large batch only after the program has dropped it."""

import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

import torch.utils.data as theirs  # noqa: E402

from xpool.data import DataLoader  # noqa: E402
from xpool.data._loader_worker import KEPT_BUFFERS, stack  # noqa: E402

SIZE = 3 * 2**17  # floats of an item. A batch of four takes 6 MiB.


class Filled(theirs.Dataset):
    """Items of 1.5 MiB, each filled with its index."""

    def __len__(self):
        return 80

    def __getitem__(self, i):
        return torch.full((SIZE,), float(i))


def in_thread(func):
    """Return the result of ``func()`` in a new thread, which has no buffers."""
    results = []
    thread = threading.Thread(target=lambda: results.append(func()))
    thread.start()
    thread.join()
    return results[0]


def items(value):
    return [torch.full((SIZE,), float(value)) for _ in range(4)]


def test_memory_of_a_dropped_batch_is_reused():
    """The next batch gets the memory of a dropped one."""

    def addresses():
        found = set()
        for value in range(9):
            batch = stack(items(value))
            assert batch.eq(value).all()
            found.add(batch.data_ptr())
        return found

    # The variable keeps one batch while the next is made.
    assert len(in_thread(addresses)) == 2


@pytest.mark.parametrize(
    "part",
    [lambda batch: batch, lambda batch: batch[2], lambda batch: batch.numpy()[1:]],
    ids=["batch", "view", "array"],
)
def test_memory_in_use_is_left_alone(part):
    """A program may keep any number of batches, and parts of them."""
    loader = DataLoader(Filled(), 4, num_workers=2, workers="thread")
    assert len(loader) > 2 * KEPT_BUFFERS
    for number, kept in enumerate([part(batch) for batch in loader]):
        wanted = part(torch.arange(4.0).add(4 * number).repeat_interleave(SIZE).view(4, SIZE))
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(wanted))


def test_batches_outlive_the_loader():
    """The memory stays after the threads have ended."""
    loader = DataLoader(Filled(), 4, num_workers=2, workers="thread")
    batches = list(loader)
    del loader
    assert [batch[0, -1].item() for batch in batches] == list(range(0, 80, 4))


@pytest.mark.parametrize(
    "change",
    [
        lambda item: item.requires_grad_(),
        lambda item: torch.nn.Parameter(item),
        lambda item: item.view(2, -1).t(),
        lambda item: item[:4],
        lambda item: torch.quantize_per_tensor(item, 1.0, 0, torch.qint32),
    ],
    ids=["gradient", "class", "strides", "small", "quantized"],
)
@pytest.mark.filterwarnings("ignore")
def test_batches_that_out_would_change(change):
    """Items that `out=` would change in gradient, class or strides are left to `torch.stack`."""
    assert stack([change(item) for item in items(1)]) is None


def test_items_that_do_not_fit():
    """Items of different shapes or types are left to torch."""
    one, *rest = items(1)
    assert stack([one[:-1], *rest]) is None
    assert stack([one.double(), *rest]) is None
