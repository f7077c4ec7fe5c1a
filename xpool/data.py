"""`DataLoader`: that of torch, over a pool of xpool's.

A worker that dies costs nobody an epoch: its batch is done again.  The dataset goes to the workers
once, in shared memory, and so do the batches on their way back.  docs/data.md is the guide.
Importing this imports torch.
"""

from __future__ import annotations

import itertools
import queue
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.data
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from xpool.errors import OptionError
from xpool.pool.base import BasePool
from xpool.pool.context import CtxPool
from xpool.pool.p2p import P2PPool
from xpool.pool.preloading import preload
from xpool.pool.process import Pool
from xpool.results import AsyncResult
from xpool.worker.context import current_worker

__all__ = ["RETRIES", "DataLoader"]

RETRIES = 2
"""How often a batch is done again whose worker died."""

_STRIDE = 1 << 32
"""Between the seeds of two epochs of the same workers: more than an epoch has batches."""

_END = "xpool.data: this worker's part of the dataset has ended"


class DataLoader(torch.utils.data.DataLoader):  # type: ignore[misc]
    """As `torch.utils.data.DataLoader`, with the same arguments, in the same order.

    The batches are those that torch's gives for the same seed, in the same order; random numbers
    that a dataset draws depend on the seed and the batch alone, not on who does it, so they are
    the same for any number of workers, and after a death.

    Args:
        pool: the workers to use, which stay when this has ended: a `Pool` or `CtxPool`, or for an
            iterable dataset a `P2PPool`.  ``num_workers`` may then be left out.  None: ones of its
            own, ended with each epoch unless ``persistent_workers``.
        num_workers: 0, without a ``pool``: torch's own loader does the work, in this process.
        timeout: seconds that the next batch may take; 0: any time.
        multiprocessing_context: a start method or context for workers of its own, as for `Pool`.

    `state_dict` and `load_state_dict` go on in the middle of an epoch.  With an iterable dataset
    each worker has a copy and iterates over it, as torch's have: use
    `torch.utils.data.get_worker_info` to share it out.

    Raises:
        ValueError: an argument makes no sense; as torch's.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        pool: BasePool | None = None,
    ) -> None:
        if pool is not None:
            num_workers = pool.size()
        # Its context is not told to torch, which knows only those of `multiprocessing`.
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            pin_memory, drop_last, timeout, worker_init_fn, None, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
        )  # fmt: skip
        if pin_memory_device not in ("", "cuda"):
            raise OptionError(f"pin_memory_device={pin_memory_device!r}: only CUDA's is known here")
        self.in_order = in_order
        self._iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        if pool is not None:
            _check_pool(pool, self._iterable)
        elif self.num_workers and multiprocessing_context in (None, "forkserver"):
            preload()  # the server imports torch while the program makes its model
        self._given_pool = pool
        self._context = multiprocessing_context
        self._kept: BasePool | None = None
        # Of the epoch that runs, or ran last.  Not the epoch itself: it ends when it is dropped.
        self._progress: _Progress | None = None
        self._resume: _Progress | None = None
        self._first_seed: int | None = None
        self._epochs = 0  # that had their seed from it

    def __iter__(self) -> Any:
        # For one epoch: the one after it begins at its beginning.
        resume, self._resume = self._resume, None
        if self.num_workers == 0:
            if resume is not None:
                raise OptionError("load_state_dict takes workers: give num_workers= or pool=")
            return super().__iter__()
        epoch = _Epoch(self, self._workers(), resume)
        self._progress = epoch.progress
        return epoch

    def _workers(self) -> BasePool:
        """Return the pool of the epoch that begins."""
        if self._given_pool is not None:
            return self._given_pool
        if self._kept is not None:
            return self._kept
        pool_class = P2PPool if self._iterable else Pool
        pool = pool_class(
            self.num_workers, torch.set_num_threads, (1,), context=self._context, name="DataLoader"
        )
        if self.persistent_workers:
            self._kept = pool
            # There is nothing to cancel then, only the pool to end.
            weakref.finalize(self, _janitor(pool), ())
        return pool

    def _draw_seed(self) -> int:
        """Return an epoch's seed; drawn for each; with persistent workers once, as in torch."""
        if self._first_seed is None or not self.persistent_workers:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._first_seed, self._epochs = int(drawn.item()), 0
        self._epochs += 1
        return (self._first_seed + (self._epochs - 1) * _STRIDE) % 2**63

    def state_dict(self) -> dict[str, Any]:
        """Return where the last epoch is: how many batches were taken, and its random state.

        Raises:
            OptionError: no epoch was begun, it has no workers, or ``in_order`` is false.
        """
        if self._progress is None or not self.in_order:
            raise OptionError(
                "state_dict() tells where in an epoch you are: begin one, with workers, in order"
            )
        return self._progress._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next epoch begin where ``state``, of a `state_dict`, was.

        The dataset, the sampler and all arguments must be those of then.
        """
        self._resume = _Progress(**state)


def _check_pool(pool: BasePool, iterable: bool) -> None:
    if not isinstance(pool, Pool):
        raise OptionError(
            f"pool= must be one of processes (Pool, CtxPool, P2PPool), not {type(pool).__name__}"
        )
    if iterable and not isinstance(pool, P2PPool):
        raise OptionError(
            "an iterable dataset lives in its workers, each with its part: its pool must be a "
            f"P2PPool, not {type(pool).__name__}"
        )


class _Progress:
    """How far an epoch has come; what `state_dict` tells."""

    def __init__(
        self, random: torch.Tensor, taken: int = 0, shards: Iterable[int] = (), turn: int = 0,
        ended: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.random = random  # state of the generator when it began
        self.taken = taken  # batches
        # Of an iterable dataset: batches taken of each worker's part, whose turn it is, and
        # whose part has ended.
        self.shards, self.turn, self.ended = list(shards), turn, set(ended)

    def _asdict(self) -> dict[str, Any]:
        return {
            "random": self.random.clone(), "taken": self.taken, "shards": list(self.shards),
            "turn": self.turn, "ended": sorted(self.ended),
        }  # fmt: skip


class _Epoch(Iterator[Any]):
    """One walk through the dataset, from a worker's point of view and the consumer's."""

    def __init__(self, loader: DataLoader, pool: BasePool, resume: _Progress | None) -> None:
        self._loader, self._pool = loader, pool
        owned = pool is not loader._given_pool and pool is not loader._kept
        # Before all that may fail: `__del__` calls it then.
        self._clean = _janitor(pool if owned else None)
        self._pending: deque[tuple[int, AsyncResult[Any]]] = deque()
        generator = loader.generator
        self.progress = resume or _Progress(
            _random_state(generator), shards=[0] * loader.num_workers if loader._iterable else ()
        )
        with _RandomState(generator, None if resume is None else resume.random):
            # Drawn first, and the sampler's numbers after it, as torch does.
            seed = loader._draw_seed()
            self._plan = self._shards() if loader._iterable else self._batches()
        size = None if loader.batch_size is None else int(loader.batch_size)
        about = _About(loader, seed, size if loader._iterable else None)
        self._about: Any = pool.broadcast(about)  # type: ignore[attr-defined]
        self._prefix: Callable[..., Any] = _without_context if isinstance(pool, CtxPool) else _call
        # As many batches ahead as torch's loader is.
        for _ in range((loader.prefetch_factor or 2) * loader.num_workers):
            self._submit()

    # -- what is to be done --------------------------------------------------------------------

    def _batches(self) -> Iterator[tuple[int, Any]]:
        loader = self._loader
        indices = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        numbered = enumerate(indices)
        # The first is drawn here, while the generator is as it has to be.
        first = list(itertools.islice(numbered, self.progress.taken + 1))[self.progress.taken :]
        return itertools.chain(first, numbered)

    def _shards(self) -> Iterator[tuple[int, Any]]:
        """The next batch of each worker's part in turn, until all have ended."""
        progress, workers = self.progress, self._loader.num_workers
        places = list(progress.shards)
        for shard in itertools.islice(itertools.cycle(range(workers)), progress.turn, None):
            if len(progress.ended) == workers:
                return
            if shard not in progress.ended:
                yield shard, places[shard]
                places[shard] += 1

    def _submit(self) -> None:
        planned = next(self._plan, None)
        if planned is None:
            return
        number, what = planned
        if self._loader._iterable:
            result = self._pool.apply_async(  # type: ignore[call-arg]
                _next_of_shard, (self._about, number, what), retries=RETRIES, worker=number
            )
        else:
            args = _fetch, self._about, number, what
            result = self._pool.apply_async(self._prefix, args, retries=RETRIES)
        self._pending.append((number, result))

    # -- taking it -----------------------------------------------------------------------------

    def __next__(self) -> Any:
        loader, progress = self._loader, self.progress
        while self._pending:
            # Out of order, this waits for the oldest where none is ready.
            place = self._place()
            number, result = self._pending[place]
            result.wait(loader.timeout or None)
            if not result.ready():
                raise RuntimeError(f"DataLoader timed out after {loader.timeout} seconds")
            del self._pending[place]
            # Before this one is opened, so that a worker has something to do meanwhile.
            self._submit()
            try:
                batch = result.get()
            finally:
                del result  # the traceback of its error has this frame
            if type(batch) is str and batch == _END:
                progress.ended.add(number)
                continue
            progress.taken += 1
            if loader._iterable:
                progress.shards[number] += 1
                progress.turn = (number + 1) % loader.num_workers
            return _pinned(batch) if loader.pin_memory else batch
        self._finish()
        raise StopIteration

    def _place(self) -> int:
        """Return which of the pending batches is to come next."""
        if not self._loader.in_order:
            for place, (_, result) in enumerate(self._pending):
                if result.ready():
                    return place
        return 0

    def __len__(self) -> int:
        return len(self._loader) - self.progress.taken

    def _finish(self) -> None:
        self._about = None  # the workers let go of the dataset
        self._clean([result for _, result in self._pending])

    def __del__(self) -> None:
        # Left in the middle: what runs for it is of no use to anybody.
        if hasattr(self, "_clean"):
            self._finish()


def _janitor(pool: BasePool | None) -> Callable[[Iterable[AsyncResult[Any]]], None]:
    """Return what cancels results and ends a pool, in a thread that waits for it to be called.

    The garbage collector may call it, in any thread and whatever locks that holds: to put into
    such a queue is one operation that waits for nobody.
    """
    orders: queue.SimpleQueue[Iterable[AsyncResult[Any]]] = queue.SimpleQueue()

    def clean() -> None:
        # Waits here for as long as the epoch, or the loader, lives.
        for result in orders.get():
            result.cancel()
        if pool is not None:
            pool.terminate()
            pool.join()

    threading.Thread(target=clean, name="xpool-DataLoader-cleaner", daemon=True).start()
    return orders.put


def _random_state(generator: torch.Generator | None) -> torch.Tensor:
    return torch.get_rng_state() if generator is None else generator.get_state()


class _RandomState:
    """Draws from a generator as it was in a given state, None: as it is.

    Torch's own is as before afterwards; a loader's own goes on, as later epochs draw from it.
    """

    def __init__(self, generator: torch.Generator | None, state: torch.Tensor | None) -> None:
        self._generator, self._state = generator, state

    def _set(self, state: torch.Tensor) -> None:
        if self._generator is None:
            torch.set_rng_state(state)
        else:
            self._generator.set_state(state)

    def __enter__(self) -> None:
        if self._state is not None:
            self._before = _random_state(self._generator)
            self._set(self._state)

    def __exit__(self, *_: object) -> None:
        if self._state is not None and self._generator is None:
            self._set(self._before)


def _pinned(batch: Any) -> Any:
    """Return the batch with its tensors in pinned memory, where there is a GPU."""
    if not torch.cuda.is_available():
        return batch
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return type(batch)({key: _pinned(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_pinned, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(_pinned, batch))
    return batch


# -- in a worker -----------------------------------------------------------------------------------


class _About:
    """What a worker has to know of an epoch; broadcast, so each keeps one."""

    def __init__(self, loader: DataLoader, seed: int, batch_size: int | None) -> None:
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        self.in_batches = loader.batch_sampler is not None
        self.batch_size, self.drop_last = batch_size, loader.drop_last
        self.initialize, self.workers = loader.worker_init_fn, loader.num_workers
        self.seed = seed
        self.entered = False
        self.iterator: Iterator[Any] | None = None
        self.position = 0

    def enter(self, shard: int) -> None:
        """Become a worker of this epoch, as torch's code knows one."""
        # At each batch: the workers of a pool may serve several epochs by turns.
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=shard, num_workers=self.workers, seed=self.seed + shard, dataset=self.dataset
        )
        if not self.entered:
            self.entered = True
            torch_collate.default_collate_fn_map[torch.Tensor] = _stacked
            if self.initialize is not None:
                _seed(self.seed + shard)
                self.initialize(shard)


def _stacked(batch: Any, **options: Any) -> Any:
    """As torch's collation of tensors, in common memory.

    In a worker torch makes each batch in a new shared file: for one of 19 MB that takes ten times
    as long as in memory which is there, and it would be copied from it all the same.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return torch_collate.collate_tensor_fn(batch, **options)
    finally:
        torch_worker._worker_info = info


def _call(func: Callable[..., Any], *args: Any) -> Any:
    return func(*args)


def _without_context(context: Any, func: Callable[..., Any], *args: Any) -> Any:
    return func(*args)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # numpy takes 32 bits.
        numpy.random.seed(seed % 2**32)


def _fetch(about: _About, number: int, indices: Any) -> Any:
    """Make one batch of a dataset with indices."""
    about.enter(current_worker().index)
    # By the batch's own number, so that who makes it, and how often, changes nothing.
    _seed(about.seed + number)
    dataset = about.dataset
    if not about.in_batches:
        return about.collate(dataset[indices])
    many = getattr(dataset, "__getitems__", None)
    return about.collate([dataset[i] for i in indices] if many is None else many(indices))


def _next_of_shard(about: _About, shard: int, place: int) -> Any:
    """Make the next batch of this worker's copy of an iterable dataset.

    A worker that has replaced a dead one, or that goes on in an old epoch, first passes over what
    was taken.
    """
    about.enter(shard)
    # Behind where this copy is, as when a batch is made a second time: from the start again.
    if about.iterator is None or about.position > place:
        _seed(about.seed + shard)
        about.iterator, about.position = iter(about.dataset), 0
    while True:
        batch = _next_batch(about, about.iterator)
        about.position += 1
        if about.position > place:
            return batch


def _next_batch(about: _About, iterator: Iterator[Any]) -> Any:
    if not about.in_batches:
        for item in iterator:
            return about.collate(item)
        return _END
    items = list(itertools.islice(iterator, about.batch_size))
    if not items or (about.drop_last and len(items) < (about.batch_size or 0)):
        return _END
    return about.collate(items)
