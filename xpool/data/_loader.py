"""`DataLoader`: its arguments, its pool and its states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.utils.data

from xpool import pickle
from xpool._calls.options import check_choice, names_of, refuse_unknown
from xpool._memory.system import default_processes
from xpool._pools.base import BasePool
from xpool._pools.thread import ThreadPool
from xpool.data._epoch import Before, Epoch, warn_of_pinning
from xpool.data._loader_worker import Base, Generators, decoded, is_stateful
from xpool.data._report import LoaderReport, Times, WorkerCount
from xpool.data._sampling import (
    EpochProgress,
    Preview,
    bases_of,
    can_preview,
    check_state,
    facts,
    inner_sampler,
)
from xpool.data._workers import Inline, Processes, Threads, check_auto, check_pool, prepare
from xpool.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Never


T = TypeVar("T", covariant=True)


class _Indexed(Protocol[T]):
    """What a dataset must have, for type checkers."""

    def __getitem__(self, index: Any, /) -> T: ...
    def __len__(self) -> int: ...


class DataLoader(torch.utils.data.DataLoader[T], Generic[T]):  # type: ignore[misc]
    """As `torch.utils.data.DataLoader`, with the same arguments in the same order.

    For the same seed, the batches and their order are those of torch's loader.  The random numbers
    that a dataset with indices draws depend only on the seed and on the number of the batch.  So
    they are the same for any number of workers, and after the death of a worker.  Generators that
    ``worker_init_fn`` has seeded are an exception: they are not seeded for each batch, and worker
    ``i % num_workers`` makes batch ``i``.

    Args:
        pool: a pool whose workers make the batches; it stays open.  A dataset with indices needs a
            `Pool`, `CtxPool`, `P2PPool` or `ThreadPool`.  A dataset with a state in each worker (an
            iterable one, or one with ``state_dict``) needs a `P2PPool` or `ThreadPool`.
            ``num_workers`` is then the size of the pool.  None: the loader starts its own workers,
            and ends them with each epoch unless ``persistent_workers`` is set.
        workers: whether the loader's own workers are a ``"process"`` or a ``"thread"`` each.
            Threads share the dataset, and nothing is copied.
        num_workers: 0, without a ``pool``: the caller's thread makes the batches.  "auto": the
            loader measures the batches, and has between 1 worker and one for each core that the
            process may use.  The batches are those of any fixed number from 1 on.
        timeout: seconds that the next batch may take; 0: no limit.
        multiprocessing_context: a start method or context for the loader's own workers, as for
            `Pool`.  Objects that can only be passed to a starting process (locks,
            `multiprocessing.Value`, with "fork" open files) may be in the dataset.
        prefetch_epochs: with ``persistent_workers``, the workers begin the next epoch while the
            program takes the last batches of this one.  The sampler gives the same indices as
            without.  This has no effect if the dataset, a ``worker_init_fn`` or a sampler that is
            not torch's may keep state.
        snapshot_every_n_steps: the number of batches of a worker after which the loader records the
            state of an iterable dataset or a sampler; 0: never.  A resumed loader makes the batches
            since the last record again, and skips those that were taken.

    After `load_state_dict` of a `state_dict`, a loader goes on in the middle of an epoch or begins
    the next one.  If a dataset, an iterator or a sampler has ``state_dict`` and
    ``load_state_dict``, the loader uses these, as torchdata's ``StatefulDataLoader`` does.  If not,
    the loader iterates over it again up to the same place.  As with torch's loader, each worker
    iterates over its own copy of an iterable dataset: divide the items among the workers with
    `torch.utils.data.get_worker_info`.

    Raises:
        ValueError, TypeError: an argument has a wrong value or type, as in torch's loader.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[T] | _Indexed[T],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | Literal["auto"] = 0,
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
        prefetch_epochs: bool = False,
        snapshot_every_n_steps: int = 1,
        pool: BasePool | None = None,
        workers: str = "process",
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown("DataLoader", names_of(DataLoader.__init__.__code__), unknown)
        self._iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        ordered = self._iterable or sampler is not None or batch_sampler is not None
        if not (ordered or hasattr(type(dataset), "__len__")):
            raise TypeError(
                f"object of type {type(dataset).__name__!r} has no len(); give its class a "
                "__len__, give the loader a sampler, or use an IterableDataset"
            )
        # Whether each worker has a state of its own, which only as many workers can go on from.
        self._has_state = self._iterable or is_stateful(dataset)
        is_auto = isinstance(num_workers, str)
        if is_auto:
            if num_workers != "auto":
                raise OptionError(f"num_workers must be a number or 'auto', not {num_workers!r}")
            check_auto(
                pool, self._iterable, self._has_state, worker_init_fn, multiprocessing_context
            )
            num_workers = default_processes()
        elif pool is not None:
            num_workers = pool.size()
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )  # fmt: skip
        if prefetch_factor == 0:
            raise OptionError(
                "prefetch_factor=0 leaves the workers no batch to make; give 1 or more"
            )
        if prefetch_epochs and not persistent_workers:
            raise OptionError(
                "prefetch_epochs=True needs persistent_workers=True: without it, each epoch has "
                "new workers"
            )
        check_choice("workers", workers, "process", "thread")
        self.in_order = in_order
        self.snapshot_every_n_steps = snapshot_every_n_steps
        # The name "forkserver" means the fork server of xpool, not that of `multiprocessing`.
        self._context = multiprocessing_context
        # Without "auto", `num_workers` is the number of workers; with it, it is the most of them.
        self._auto: WorkerCount | None = None
        if is_auto:
            self._auto = WorkerCount(self.num_workers, self.prefetch_factor or 2)
            # All workers see the same globals of modules, whenever they have started.
            self._context = multiprocessing_context or "forkserver"
        self._given_pool = pool
        self._is_threaded = isinstance(pool, ThreadPool) or workers == "thread"
        self._has_parts = self._has_state
        if pool is not None:
            check_pool(pool, self._has_parts)
        elif self.num_workers and not self._is_threaded:
            # Each batch has a fixed worker, so it draws from the generators that `worker_init_fn`
            # has seeded in this worker.
            self._has_parts = self._has_parts or worker_init_fn is not None
            prepare(self._context)
        self._previews = (
            prefetch_epochs and not self._has_parts and can_preview(self._index_sampler)
        )
        self._preview: Preview | None = None
        self._kept: Processes | Threads | None = None
        # Of the current or last epoch.  The loader keeps no reference to the epoch itself, which
        # must end when the program drops it.
        self._progress: EpochProgress | None = None
        self._times: Times | None = None
        self._loaded: dict[str, Any] | None = None
        self._number = 0  # the number of the last epoch
        self._seed: int | None = None
        self._turn = 0  # number of epochs whose seeds come from `_seed`

    def __iter__(self) -> Any:
        if self.pin_memory:
            warn_of_pinning(self.pin_memory_device)
        loaded, resume = self._loaded, None
        # Without workers, the dataset itself has the state.
        left = self._left() if self.num_workers else None
        before = Before(None, self._seed, self._turn, left)
        if loaded is not None:
            resume, before = self._of(loaded)
        self._number += 1
        workers = self._workers()
        epoch = Epoch(self, workers, workers is not self._kept, self._number, before, resume)
        self._progress, self._times = epoch.progress, epoch.times
        self._seed, self._turn = epoch.progress.seed, epoch.progress.turn
        self._loaded = None  # now, since a state that could not be used is still the loader's
        return epoch

    def _workers(self) -> Inline | Processes | Threads:
        if self.num_workers == 0:
            return Inline(self)
        if self._kept is not None:
            return self._kept
        if not self._is_threaded:
            self.check_worker_number_rationality()
        kind = Threads if self._is_threaded else Processes
        workers = kind(self, self._has_parts)
        if self.persistent_workers:
            self._kept = workers
        return workers

    def report(self) -> LoaderReport:
        """Return where the time of the last epoch went, with advice; ``str`` makes it a text."""
        return Times(self._size()).report() if self._times is None else self._times.report()

    def _size(self) -> int:
        """Return how many workers this loader starts."""
        return int(self.num_workers) if self._auto is None else self._auto.size

    # -- states ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's place as plain values: in an epoch, or between two epochs.

        The values can be written as JSON if the states of the dataset and the sampler can.  Call
        this between two batches: it counts the batches that the loader has returned.
        """
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        progress = self._progress
        if progress is not None and not progress.is_over:
            return {**facts(self), **progress.as_state()}
        bases = self._left() or []
        between = EpochProgress(Generators(self).states(), len(bases))
        between.bases = bases
        sampler = inner_sampler(self._index_sampler)
        if is_stateful(sampler):
            between.sampler = pickle.dumps({"sampler": sampler.state_dict()})
        after = {"seed": self._seed, "turn": self._turn}
        return {**facts(self), **between.as_state(), "epoch": None, "next": after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch begin at the place of ``state``, which `state_dict` returned.

        The dataset, the sampler and all arguments must be the same as at that time.  One exception:
        for a dataset with indices and without ``state_dict``, the kind and the number of workers
        may differ.  Iterators that were begun before are not changed.

        Raises:
            OptionError: ``state`` is not a loader's state, or its loader had another batch size or
                length of the dataset; or the dataset has a state in each worker (an iterable one,
                or one with ``state_dict``), and there was another number of workers.  The next
                iteration raises it if the sampler does not give the same indices again.
        """
        check_state(self, state)
        self._loaded = copy.deepcopy(dict(state))
        self._kept = self._preview = None  # their datasets are at another place

    def _of(self, state: dict[str, Any]) -> tuple[EpochProgress | None, Before]:
        """Return the progress in a loaded state (None: between two epochs) and its `Before`."""
        if state["epoch"] is not None:
            progress = EpochProgress.of(state)
            if not self._has_state:
                progress.share_among(self.num_workers if self._has_parts else 0)
            return progress, Before(None, progress.seed, progress.turn - 1, None)
        inner = state["sampler"]["state"]
        if inner is not None:
            inner_sampler(self._index_sampler).load_state_dict(inner["sampler"])
        after, bases = state["next"], bases_of(state) if self._has_state else None
        return None, Before(decoded(state["generators"]), after["seed"], after["turn"], bases)

    def _left(self) -> list[Base] | None:
        """Return the states from which the next epoch goes on, or None if it begins anew."""
        if self._progress is None or not self._has_parts:
            return None
        if self._kept is None and self.num_workers:
            return None  # new workers get the program's dataset as it is now
        return self._progress.left() if self._progress.is_over else None
