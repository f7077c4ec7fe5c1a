"""`xpool.data.DataLoader` compared with torch's."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from typing import Any

import pytest
from support import scripts
from support.tiers import also
from support.waiting import Gate, wait_gone

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

import numpy as np  # noqa: E402
import torch.utils.data as theirs  # noqa: E402

from xpool import CtxPool, P2PPool, Pool, ThreadPool, WorkerDied  # noqa: E402
from xpool.data import DataLoader, LoaderReport  # noqa: E402


class Rows(theirs.Dataset):
    """Rows of four numbers, with their indices."""

    def __init__(self, n=60):
        self.x = torch.arange(n * 4.0).reshape(n, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], i


class Stream(theirs.IterableDataset):
    """The numbers below 23, divided among the workers."""

    def __iter__(self):
        info = theirs.get_worker_info()
        return iter(range(info.id, 23, info.num_workers) if info else range(23))


class Each(theirs.Dataset):
    """Items that a function makes from their indices."""

    def __init__(self, func, n=40):
        self.func, self.n = func, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.func(i)


def assert_same(got, wanted):
    """Check that the batches are equal."""
    got, wanted = list(got), list(wanted)
    assert len(got) == len(wanted)
    for mine, his in zip(got, wanted):
        torch.testing.assert_close(mine, his, rtol=0, atol=0)


def seeded(loader_class, dataset, **options):
    """Seed the generators, and make a loader of two workers."""
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    torch.manual_seed(3)
    return loader_class(dataset, num_workers=2, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 7, "shuffle": True, "drop_last": True, "generator": 5},
        {"sampler": [5, 3, 1], "batch_size": 2, "persistent_workers": True},
        *also(
            {"batch_size": 7},
            {"batch_size": 7, "shuffle": True},
            {"batch_size": None, "prefetch_factor": 4},
            {"batch_sampler": [[0, 1], [9]], "collate_fn": len},
        ),
    ],
    ids=str,
)
def test_the_batches_of_torch(options):
    """Two epochs yield the same batches as torch's loader, and draw the same random numbers."""
    wanted = seeded(theirs.DataLoader, Rows(), **options)
    expected = [batch for _ in range(2) for batch in wanted]
    drawn = torch.rand(1)
    loader = seeded(DataLoader, Rows(), **options)
    got = [batch for _ in range(2) for batch in loader]
    assert_same(got, expected)
    assert torch.equal(torch.rand(1), drawn)
    assert len(loader) == len(wanted) and isinstance(loader, theirs.DataLoader)


class Permuted(theirs.Sampler):
    """Draws its numbers in `iter()`, not in the first `next`."""

    def __iter__(self):
        return iter(torch.randperm(60).tolist())


@pytest.mark.parametrize("batch_size", [None, 7])
def test_iter_of_a_sampler_is_called_once(batch_size):
    """The loader calls `iter()` of a sampler as often as torch's."""
    options = {"sampler": Permuted(), "batch_size": batch_size}
    ours = list(seeded(DataLoader, Rows(), workers="thread", **options))
    assert_same(ours, seeded(theirs.DataLoader, Rows(), **options))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_an_iterable_dataset(batch_size, drop_last):
    """Each worker iterates over its part. The batches have torch's order."""
    options = {"batch_size": batch_size, "drop_last": drop_last and batch_size is not None}
    wanted = theirs.DataLoader(Stream(), num_workers=2, **options)
    assert_same(DataLoader(Stream(), num_workers=2, **options), wanted)


def test_without_workers():
    """Without workers, it is torch's loader."""
    assert_same(DataLoader(Rows(), 8), theirs.DataLoader(Rows(), 8))


def test_resuming_an_epoch():
    """A state of an iterable dataset that has none yields the remaining batches of the epoch."""
    loader = DataLoader(Stream(), 5, num_workers=2)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    rest = list(batches)
    again = DataLoader(Stream(), 5, num_workers=2)
    again.load_state_dict(state)
    torch.manual_seed(99)
    drawn = torch.rand(1)
    torch.manual_seed(99)
    assert_same(again, rest)
    assert torch.equal(torch.rand(1), drawn), "the program's random numbers changed"


def test_a_batch_that_kills():
    """A batch that kills every worker raises WorkerDied, after the earlier batches."""
    batches = iter(DataLoader(Each(lambda i: os._exit(1) if i == 4 else i, 6), 2, num_workers=1))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(WorkerDied, match=r"while it ran batch 2 \(indices \[4, 5\]\)\."):
        next(batches)


@pytest.mark.parametrize("workers", [None, "thread", "process"])
def test_an_error_of_the_dataset(workers):
    """A dataset's exception is raised in place of its batch, which it names. The epoch continues,
    as with torch."""
    options = {"num_workers": 2, "workers": workers} if workers else {}
    batches = iter(DataLoader(Each(lambda i: 1 // (i - 2), 6), 2, **options))
    next(batches)
    with pytest.raises(ZeroDivisionError) as caught:
        next(batches)
    assert next(batches).tolist() == [0, 0]
    assert vars(caught.value)["__notes__"] == ["batch 1 (indices [2, 3])"]
    # The worker's traceback begins in torch: it has no frames of xpool.
    assert "_loader_worker" not in str(caught.value.__cause__)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "collate"),
    [
        (Each(lambda i: next(iter([i][i == 6 :])), 9), None),
        (Each(abs, 9), lambda items: items if 6 not in items else next(iter(()))),
        (Stream(), lambda items: items if 6 not in items else next(iter(()))),
    ],
    ids=["getitem", "collate", "collate-iterable"],
)
def test_stop_iteration_ends_no_epoch(dataset, collate, workers):
    """A StopIteration of the dataset or of collate_fn would end the loop over the loader."""
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(DataLoader(dataset, 2, collate_fn=collate, num_workers=workers))


def test_an_error_that_takes_no_notes():
    """An exception whose class forbids them is raised as it is."""

    class Fixed(Exception):
        def __setattr__(self, name, value):
            assert name != "__notes__"
            super().__setattr__(name, value)

    def fail(i):
        raise Fixed(i)

    with pytest.raises(Exception, match="^0$") as caught:
        list(DataLoader(Each(fail), 2, num_workers=1))
    assert type(caught.value).__name__ == "Fixed"
    assert not hasattr(caught.value, "__notes__")


def test_worker_info_and_init():
    """The dataset's code can get its worker's info. The init function runs once in each worker."""
    calls = []

    def initialize(worker):
        calls.append(worker)

    def look(i):
        info = theirs.get_worker_info()
        return info.id, info.num_workers, len(calls) == 1 and calls == [info.id]

    loader = DataLoader(
        Each(look), None, num_workers=2, worker_init_fn=initialize, collate_fn=tuple
    )
    found = set(loader)
    assert found <= {(0, 2, True), (1, 2, True)} and found
    assert calls == [] and theirs.get_worker_info() is None


def test_a_given_pool():
    """A given pool stays open. It may have contexts."""
    for pool_class, options in (
        (Pool, {"processes": 2}),
        (P2PPool, {"processes": 2}),
        (CtxPool, {"worker_contexts": ["a", "b"]}),
    ):
        with pool_class(**options) as pool:
            for _ in range(2):
                assert_same(DataLoader(Rows(), 16, pool=pool), theirs.DataLoader(Rows(), 16))
            assert pool.apply(lambda *args: 7) == 7
            pool.close()
            pool.join()


def test_leaving_in_the_middle(tmp_path):
    """If the program leaves the loop, the loader ends its own workers and their tasks."""
    gate = Gate(tmp_path / "gate")
    pids = []

    def work(i):
        if i >= 2:
            from support import work

            work.pass_gate(gate.path)
        return os.getpid()

    for batch in DataLoader(Each(work), 1, num_workers=2):
        pids += batch.tolist()
        break
    assert wait_gone(pids) == []
    gate.close()


def test_a_batch_that_takes_too_long(tmp_path):
    """A batch that takes longer than `timeout` raises an error, as with torch."""
    gate = Gate(tmp_path / "gate")

    def wait(i):
        from support import work

        work.pass_gate(gate.path)
        return i

    loader = DataLoader(Each(wait, 2), 1, num_workers=1, timeout=0.1)
    batches = iter(loader)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.1 seconds; .*xpool stacks"):
        next(batches)
    loader.timeout = 60
    gate.open(2)
    assert next(batches).tolist() == [0], "a later call did not return the batch"
    gate.close()


def test_arguments():
    """The error of an invalid argument says what to do."""
    with Pool(1) as pool, pytest.raises(ValueError, match="P2PPool"):
        DataLoader(Stream(), pool=pool)
    with pytest.raises(ValueError, match="Pool"):
        DataLoader(Rows(), pool=CtxThreads())
    with pytest.raises(ValueError, match="give 1 or more"):
        DataLoader(Rows(), num_workers=1, prefetch_factor=0)
    with pytest.raises(ValueError, match="start method"):
        DataLoader(Rows(), num_workers=1, multiprocessing_context="fourk")
    with pytest.raises(TypeError, match="context"):
        DataLoader(Rows(), num_workers=1, multiprocessing_context=7)
    with pytest.raises(ValueError, match="'process' or 'thread'"):
        DataLoader(Rows(), num_workers=1, workers="threads")
    with pytest.raises(TypeError, match=r"no keyword 'batchsize'; did you mean batch_size=\?"):
        DataLoader(Rows(), batchsize=4)
    for shuffle in (False, True):
        with pytest.raises(TypeError, match=r"'Endless' has no len\(\); give its class a __len__"):
            DataLoader(Endless(), shuffle=shuffle)
    assert next(iter(DataLoader(Endless(), sampler=[4]))).item() == 4
    assert DataLoader[int](Rows()).batch_size == 1


class Endless(theirs.Dataset):
    """Has no length."""

    def __getitem__(self, index):
        return index


class CtxThreads:
    """Not a pool, although it has a size."""

    def size(self):
        return 1


THREADS = {"num_workers": 2, "workers": "thread"}


class Itself(theirs.IterableDataset):
    """Is its own iterator, and starts again after its end."""

    def __iter__(self):
        self.left = 5
        return self

    def __next__(self):
        if not self.left:
            self.left = 5
            raise StopIteration
        self.left -= 1
        return self.left


@pytest.mark.parametrize("options", [THREADS | {"num_workers": 1}, *also({"num_workers": 1})])
def test_an_iterable_that_is_its_own_iterator(options):
    """In each epoch, the loader stops at the first StopIteration of such an iterable."""
    for size, wanted in (2, [[4, 3], [2, 1], [0]]), (None, [4, 3, 2, 1, 0]):
        loader = DataLoader(Itself(), size, **options)
        for _ in range(2):
            assert [torch.as_tensor(batch).tolist() for batch in loader] == wanted


def test_an_iterable_whose_iter_raises():
    """The error is raised once for each worker. Then the iteration ends."""

    class Missing(Stream):
        def __iter__(self):
            raise FileNotFoundError("the data are gone")

    batches = iter(DataLoader(Missing(), 2, **THREADS))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            next(batches)
    assert list(batches) == []


def test_lengths():
    """An iterator has its sampler's length. A stream longer than its length causes a warning."""

    class Long(Stream):
        def __len__(self):
            return 20

    loader = DataLoader(Rows(), 7, **THREADS)
    batches = iter(loader)
    next(batches)
    assert len(batches) == len(loader) == 9
    loader = DataLoader(Long(), None, **THREADS)
    assert len(loader) == 20
    with pytest.warns(UserWarning, match="samples have been fetched"):
        assert len(list(loader)) == 23
    with pytest.raises(TypeError):
        len(iter(loader))


def test_out_of_order_takes_what_is_ready(tmp_path):
    """With ``in_order=False``, finished batches come first. A state records the taken batches."""
    gate = Gate(tmp_path / "gate")

    def slow_first(i):
        if i == 0:
            from support import work

            work.pass_gate(gate.path)
        return i

    loader = DataLoader(Each(slow_first, 8), 1, in_order=False, prefetch_factor=4, **THREADS)
    batches = iter(loader)
    got = [next(batches).item() for _ in range(5)]
    assert 0 not in got
    state = loader.state_dict()
    gate.open(2)
    rest = [batch.item() for batch in batches]
    assert sorted(got + rest) == list(range(8))
    again = DataLoader(Each(slow_first, 8), 1, in_order=False, **THREADS)
    again.load_state_dict(state)
    assert sorted(batch.item() for batch in again) == sorted(rest)
    gate.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [THREADS, *also({"num_workers": 2})], ids=str)
def test_data_pipes_are_sharded(options):
    """Each item of a data pipe comes once, as with torch's loader."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    pipe = IterableWrapper(range(12)).shuffle().sharding_filter()
    torch.manual_seed(1)
    got = [batch.tolist() for batch in DataLoader(pipe, 2, shuffle=True, **options)]
    assert sorted(i for batch in got for i in batch) == list(range(12))
    if "workers" not in options:
        torch.manual_seed(1)
        wanted = theirs.DataLoader(pipe, 2, shuffle=True, num_workers=2)
        assert got == [batch.tolist() for batch in wanted]


class Late(Exception):
    """Raised by a signal handler."""


def strike(value, times):
    """Raise a signal in this process, if any is left in ``times``."""
    if times:
        times.pop()
        signal.raise_signal(signal.SIGUSR1)
    return value


STRIKES: list[int] = []


class Index(int):
    """An index that raises a signal when it is pickled."""

    def __reduce__(self):
        return strike(int, STRIKES), (int(self),)


class Items(list):
    """A batch that raises a signal when it is unpickled."""

    def __reduce__(self):
        return in_program, (list(self),)


def in_program(value):
    return strike(value, STRIKES)


@pytest.mark.parametrize(
    "options", [{}, {"in_order": False}, {"persistent_workers": True}], ids=str
)
@pytest.mark.parametrize("place", ["request", "batch", "sampler"])
def test_a_signal_handler_raises(place, options, on_signal):
    """The next batch is that of the interrupted call. After an interruption of the sampler, the
    loop does not look complete."""

    def ring(signum, frame):
        raise Late

    def indices():
        for i in range(30):
            if place == "sampler" and i == 20:
                strike(i, STRIKES)
            yield Index(i) if place == "request" and i == 20 else i

    def collate(items):
        return Items(items) if place == "batch" else items

    on_signal(ring)
    loader = DataLoader(
        Each(abs, 30), 2, sampler=indices(), collate_fn=collate, num_workers=2, **options
    )
    got, batches = [], iter(loader)
    for _ in range(4):
        got.append(next(batches))
    STRIKES.append(1)
    with pytest.raises(Late):
        while True:
            got.append(next(batches))
    if place == "sampler":
        with pytest.raises(RuntimeError, match="has ended the sampler's iteration"):
            got += batches
        assert len(got) == 10
    else:
        got += batches
        assert sorted(got) == [[i, i + 1] for i in range(0, 30, 2)]


def test_two_iterators_at_once():
    """Each iterator yields all batches. With persistent workers, a newer one ends the older."""
    loader = DataLoader(Rows(), 8, **THREADS)
    for mine, other in zip(loader, loader):
        torch.testing.assert_close(mine, other)
    loader = DataLoader(Stream(), 4, persistent_workers=True, **THREADS)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(RuntimeError, match="a newer iteration"):
        next(older)
    assert sum(len(batch) for batch in newer) == 23


@pytest.mark.parametrize("options", [{}, THREADS, *also({"num_workers": 2})], ids=str)
def test_report(options):
    """The report has the times of waiting for batches and of making them."""
    loader = DataLoader(Rows(), 8, **options)
    assert loader.report().batches == 0 and "No batch" in loader.report().advice
    batches = iter(loader)
    next(batches), next(batches)
    report = loader.report()
    assert report.batches == 2 and report.workers == options.get("num_workers", 0)
    assert 0 < report.waited <= report.seconds and 0 < report.collated < report.made
    assert 0 <= report.ahead <= 4 and report.advice in str(report)


def test_advice():
    """Each reason for waiting has its own advice."""
    fine = LoaderReport(batches=100, workers=1, seconds=10, waited=0.1, made=9, collated=1, ahead=2)
    slow = dataclasses.replace(fine, waited=5)
    for report, word in (
        (fine, "leave the loader"),
        (dataclasses.replace(slow, workers=0), "num_workers="),
        (dataclasses.replace(slow, collated=6), "collate_fn"),
        (dataclasses.replace(slow, made=0.05, collated=0), "larger ones"),
        (dataclasses.replace(slow, workers=4096, made=40000), "for each item"),
        (dataclasses.replace(slow, made=2, collated=0), "in_order=False"),
    ):
        assert word in report.advice, report


def test_threads():
    """Threads use the dataset itself, and have their own worker info. A given ThreadPool stays
    open."""
    dataset: Any = Each(lambda i: (id(dataset), theirs.get_worker_info().id), 20)
    with ThreadPool(2) as pool:
        for options in THREADS, {"pool": pool}:
            got = list(DataLoader(dataset, None, collate_fn=tuple, **options))
            assert {place for place, _ in got} == {id(dataset)}
            assert {worker for _, worker in got} <= {0, 1}
            assert_same(
                DataLoader(Stream(), 4, **options), theirs.DataLoader(Stream(), 4, num_workers=2)
            )
        assert pool.apply(lambda: theirs.get_worker_info()) is None
    assert theirs.get_worker_info() is None


def test_batches_use_no_shared_file_of_torch():
    """torch's collation puts batches into the arena, not into torch's shared files."""
    shared = []

    def collate(items):
        batch = theirs.default_collate(items)
        shared.append(batch.is_shared())
        return batch, torch.tensor(any(shared)), theirs.get_worker_info() is not None

    loader = DataLoader(
        Each(lambda i: torch.full((100,), i), 6), 2, num_workers=1, collate_fn=collate
    )
    for n, (batch, any_shared, has_info) in enumerate(loader):
        assert batch[:, 0].tolist() == [2 * n, 2 * n + 1]
        assert not any_shared and has_info


MADE = """
    import threading

    import torch
    from support import leaks
    from torch.utils.data import TensorDataset

    from xpool.data import DataLoader

    if __name__ == "__main__":
        dataset = TensorDataset(torch.arange(8))
        DataLoader(dataset, 2)
        assert len(list(DataLoader(dataset, 2, num_workers=1))) == 4
        assert leaks.servers() == []
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        loader = DataLoader(dataset, 2, num_workers=1)
        (server,) = leaks.servers()
        assert len(list(loader)) == 4
        assert leaks.servers() == [server]
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(
    multiprocessing.get_all_start_methods()[0] != "fork", reason="no worker is a fork here"
)
def test_the_server_starts_with_the_loader(tmp_path):
    """The server imports torch before the first epoch. If workers are forks, no server starts."""
    assert scripts.program(tmp_path, MADE) == ""


class Shared(torch.utils.data.Dataset):
    """Its items are the epoch, in shared memory; it counts them there and in a file."""

    def __init__(self, path):
        self.epoch = torch.zeros(1, dtype=torch.long).share_memory_()
        self.seen = torch.zeros(4, dtype=torch.long).share_memory_()
        self.file = np.memmap(path, "int64", "w+", shape=(4,))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.seen[index] += 1
        self.file[index] += 1
        return int(self.epoch) * 100 + index


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataset_in_shared_memory(persistent, tmp_path):
    """As with torch's loader, workers and the program share tensors and arrays in files."""
    dataset = Shared(tmp_path / "file")
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent)
    for epoch in range(2):
        dataset.epoch.fill_(epoch)
        found = torch.cat(list(loader)).tolist()
        assert found == [100 * epoch + index for index in range(4)]
    assert dataset.seen.tolist() == dataset.file.tolist() == [2] * 4
