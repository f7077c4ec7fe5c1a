"""What a worker has of a loader, and how it makes a batch of it."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, dataloader, graph_settings
from torch.utils.data._utils import worker as torch_worker

from xpool import pickle
from xpool._worker.context import current_worker
from xpool.data.generators import changed, seed_all, states_of_all
from xpool.data.worker_info import as_worker, make_info, seed_own, use_common_memory

__all__ = ["Base", "EpochSpec", "Made", "WorkerCopy", "is_stateful", "is_pipe"]


class EpochSpec(NamedTuple):
    """What all batches of one epoch have in common."""

    number: int  # of the loader's epochs, begun and resumed ones
    seed: int
    shared_seed: int | None  # of a data pipe's shuffling, the same in all workers


class Base(NamedTuple):
    """Where a worker's part of the dataset was once: what a replaced worker begins at."""

    place: int = 0  # batches of this part that were made then
    state: bytes | None = None  # pickled; None: as at the beginning
    is_end: bool = False  # the state is that after the epoch before: this one begins with it


class Made(NamedTuple):
    """What a worker answers."""

    batch: Any
    seconds: float = 0.0  # that it took to make
    collating: float = 0.0  # those of them in collate_fn
    state: bytes | None = None  # of a part after it; None: there is none, or none was wanted
    ended: bool = False  # there is no batch: the part has ended


def is_stateful(thing: Any) -> bool:
    """Whether a dataset, an iterator or a sampler can tell and load its state."""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def is_pipe(dataset: Any) -> bool:
    """Whether a dataset is one of torch's data pipes, which the loader shards and seeds."""
    return isinstance(dataset, (IterDataPipe, MapDataPipe))


class WorkerCopy:
    """A worker's dataset, and what makes batches of it.

    A process opens one that was pickled, or has inherited it, so the dataset is its own.  Threads
    have one each, of the same dataset.  Without workers there is one, in the caller's thread.
    """

    is_thread = False
    is_inline = False

    def __init__(self, loader: Any) -> None:
        self.dataset, self.kind = loader.dataset, loader._dataset_kind
        self.is_batched = loader.batch_sampler is not None
        self.collate, self.drop_last = loader.collate_fn, loader.drop_last
        self.batch_size = loader.batch_size
        self.workers = loader.num_workers
        self.initialize = loader.worker_init_fn
        # As torch's workers have their part of a pipe.
        self._world, self._rank = dataloader._get_distributed_settings()
        if is_pipe(self.dataset) and self.workers:
            self.initialize = functools.partial(
                dataloader._sharding_worker_init_fn, self.initialize, self._world, self._rank
            )
        self._epoch = self._over = -1  # number of the epoch it is in, and of one that has ended
        self._initialized = False
        self._seeded: list[str] = []  # generators that worker_init_fn has used
        self._generators: Any = None  # a thread's own
        self._fetcher: Any = None
        self._place = 0
        self._collating = 0.0

    # -- tasks -------------------------------------------------------------------------------------

    def make(self, epoch: EpochSpec, number: int, indices: Any) -> Made:
        """Make one batch of a dataset with indices, whichever worker this is."""
        shard = 0 if self.is_inline else current_worker().index
        with self._as_worker(epoch, shard):
            if self._epoch != epoch.number:
                self._begin(epoch, shard, Base())
            return self._batch(epoch, number, indices)

    def begin(self, epoch: EpochSpec, shard: int, base: Base) -> bytes | None:
        """Go to the beginning of this worker's part, or to ``base``; return the state there."""
        with self._as_worker(epoch, shard):
            self._begin(epoch, shard, base)
            return self.state()

    def make_next(
        self, epoch: EpochSpec, shard: int, base: Base, place: int, requests: Any, wants_state: bool
    ) -> Made:
        """Make batch ``place`` of this worker's part.

        ``requests``: number and indices of each batch from ``base`` up to this one; None: the
        dataset has no indices.  A worker that is not there, since it replaces one or goes on in an
        old epoch, makes those before it too, from ``base`` on.
        """
        with self._as_worker(epoch, shard):
            if self._over == epoch.number:
                return Made(None, ended=True)
            if self._epoch != epoch.number or not base.place <= self._place <= place:
                # A stream that cannot begin is over after that error.
                self._over = epoch.number if requests is None else -1
                self._begin(epoch, shard, base)
                self._over = -1
            while True:
                is_last = self._place == place
                number, indices = (
                    (None, [None] * (self.batch_size or 0))
                    if requests is None
                    else requests[self._place - base.place]
                )
                self._place += 1
                try:
                    made = self._batch(epoch, number, indices)
                except StopIteration:
                    if requests is not None:
                        raise
                    # Whatever an iterator says when it is asked again.
                    self._over = epoch.number
                    return Made(None, state=self.state(), ended=True)
                except Exception:
                    if is_last:
                        raise
                    continue
                if is_last:
                    return made._replace(state=self.state()) if wants_state else made
                del made

    def state(self) -> bytes | None:
        """Return the state of the dataset and its iterator, pickled; None: they have none."""
        iterator = getattr(self._fetcher, "dataset_iter", None)
        state: dict[str, Any] = {}
        # Once, where a dataset is its own iterator.
        if is_stateful(self.dataset) and iterator is not self.dataset:
            state["dataset"] = self.dataset.state_dict()
        if iterator is not None and is_stateful(iterator):
            state["iterator"] = iterator.state_dict()
        return pickle.dumps(state) if state else None

    # -- how ---------------------------------------------------------------------------------------

    @contextmanager
    def _as_worker(self, epoch: EpochSpec, shard: int) -> Iterator[None]:
        if self.is_inline:
            yield
            return
        # At each batch: a worker may serve several loaders by turns.
        info = make_info(shard, self.workers, epoch.seed + shard, self.dataset, self._generators)
        with as_worker(info, self.is_thread):
            yield

    def _begin(self, epoch: EpochSpec, shard: int, base: Base) -> None:
        """Go to ``base`` in this epoch, or in the next one with the same dataset."""
        goes_on = self._initialized and self._epoch != epoch.number
        self._epoch = -1  # until this has succeeded
        if is_pipe(self.dataset):
            self._shuffle(epoch)
        if not self.is_inline:
            self._initialize(epoch, shard)
        if self.kind == dataloader._DatasetKind.Iterable:
            self._seed(epoch.seed + shard, _numpy_seed(epoch.seed, shard))
        # A worker that goes on has its dataset as the last epoch left it.
        state = {} if base.state is None or goes_on else pickle.loads(base.state)
        if not self.is_inline:
            self.load(state, base.is_end)
        self._fetcher = dataloader._DatasetKind.create_fetcher(
            self.kind, self.dataset, self.is_batched, self._collate, self.drop_last
        )
        if "iterator" in state and not base.is_end and is_stateful(self._fetcher.dataset_iter):
            self._fetcher.dataset_iter.load_state_dict(state["iterator"])
        self._place = base.place
        self._epoch = epoch.number

    def load(self, state: dict[str, Any], is_end: bool) -> None:
        """Have the dataset be as in a state; ``is_end``: of the end of an epoch."""
        if "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])
        elif is_end and "iterator" in state and is_stateful(self.dataset):
            # It is its own iterator, and may have its state only after `iter`.
            iter(self.dataset)
            self.dataset.load_state_dict(state["iterator"])

    def _initialize(self, epoch: EpochSpec, shard: int) -> None:
        """Become a worker, once."""
        if self._initialized:
            return
        torch.set_num_threads(1)
        use_common_memory()
        if self.initialize is not None:
            seed_all(epoch.seed + shard, _numpy_seed(epoch.seed, shard))
            before = states_of_all()
            self.initialize(shard)
            self._seeded = changed(before)
        self._initialized = True

    def _shuffle(self, epoch: EpochSpec) -> None:
        if self.is_inline:
            graph_settings.apply_sharding(self.dataset, self._world, self._rank)
        if epoch.shared_seed is not None:
            generator = torch.Generator()
            generator.manual_seed(epoch.shared_seed)
            self.dataset = graph_settings.apply_random_seed(self.dataset, generator)

    def _batch(self, epoch: EpochSpec, number: int | None, indices: Any) -> Made:
        if number is not None:
            # By the batch's own number, so that who makes it, and how often, changes nothing.
            self._seed(epoch.seed + number)
        begun, self._collating = time.perf_counter(), 0.0
        batch = self._fetcher.fetch(indices)
        return Made(batch, time.perf_counter() - begun, self._collating)

    def _collate(self, items: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self.collate(items)
        finally:
            self._collating = time.perf_counter() - begun

    def _seed(self, seed: int, numpy_seed: Any = None) -> None:
        # Without workers the program's generators are drawn from; threads share these.
        if self.is_thread:
            seed_own(self._generators, seed)
        elif not self.is_inline:
            seed_all(seed, numpy_seed, but=self._seeded)


def _numpy_seed(seed: int, shard: int) -> Any:
    """Return the seed that torch gives numpy's generator in a worker."""
    return torch_worker._generate_state(seed, shard)
