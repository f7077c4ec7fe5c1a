"""`WorkerCopy`: a worker's dataset and settings, and the methods that make batches.  Other
functions here are run by the workers of a loader, or make `torch.utils.data.get_worker_info` and
torch's collate function work in workers.  `Generators` has the generators from which an epoch draws
random numbers.  A worker imports this, but none of the pools.

A worker thread uses the memory of a large batch again when the program has dropped that batch: the
kernel clears new memory page by page, which takes as long as filling it.
"""

from __future__ import annotations

import functools
import multiprocessing.context
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, MapDataPipe, dataloader, graph_settings
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from xpool import pickle
from xpool._memory.system import HUGE_PAGES_FROM, new_buffer
from xpool._python.failures import note_batch
from xpool._worker.worker_context import current_worker

_DEPTH = 8  # how many nested samplers are searched for generators


class Generators:
    """The program's global generators, and those that a loader and its samplers own."""

    def __init__(self, loader: Any) -> None:
        found = [loader.generator]
        self._own: list[torch.Generator] = []
        sampler = loader._index_sampler
        for _ in range(_DEPTH):
            found.append(getattr(sampler, "generator", None))
            sampler = getattr(sampler, "sampler", None)
        for generator in found:
            if isinstance(generator, torch.Generator) and generator not in self._own:
                self._own.append(generator)

    def states(self) -> dict[str, Any]:
        """Return the state of each generator, for `as_in` and `encoded`."""
        return {**states_of_all(), "own": [own.get_state() for own in self._own]}

    @contextmanager
    def restored(self) -> Iterator[None]:
        states = self.states()
        try:
            yield
        finally:
            self._set(states)

    @contextmanager
    def as_in(self, states: dict[str, Any] | None) -> Iterator[None]:
        """Set the generators to ``states`` for the block; None: do not set them.

        After the block, the generators of the loader and its samplers keep their new states,
        because later epochs draw from them.  The program's generators are restored.  If they had
        exactly ``states`` before, they are not restored: a resumed program then goes on with the
        same numbers as the first one.
        """
        if states is None:
            yield
            return
        before = states_of_all()
        self._set(states)
        try:
            yield
        finally:
            if not all(_equal(state, states.get(name)) for name, state in before.items()):
                _set_all(before)

    def _set(self, states: dict[str, Any]) -> None:
        _set_all(states)
        for own, state in zip(self._own, states["own"]):
            own.set_state(state)


def encoded(states: dict[str, Any]) -> dict[str, Any]:
    """Return states as numbers and names, which can be written as JSON."""
    own = [state.tolist() for state in states["own"]]
    return {**states, "torch": states["torch"].tolist(), "own": own}


def decoded(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the states from which `encoded` made ``plain``.  JSON has turned tuples into lists."""
    states = {name: _as_tuple(state) for name, state in plain.items()}
    how = {"dtype": torch.uint8, "device": "cpu"}
    own = [torch.tensor(state, **how) for state in plain["own"]]
    return {**states, "torch": torch.tensor(plain["torch"], **how), "own": own}


def _as_tuple(state: Any) -> Any:
    return tuple(map(_as_tuple, state)) if isinstance(state, (list, tuple)) else state


def seed_all(seed: int, numpy_seed: Any = None, but: Iterable[str] = ()) -> None:
    """Seed the global generators, except those named in ``but``."""
    if "random" not in but:
        random.seed(seed)
    if "torch" not in but:
        _seed_torch(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" not in but:
        # numpy's global generator accepts only seeds of 32 bits.
        numpy.random.seed(seed % 2**32 if numpy_seed is None else numpy_seed)


def _seed_torch(seed: int) -> None:
    # `torch.manual_seed` is used only if a device has started: it takes 0.1 ms otherwise.
    torch.default_generator.manual_seed(seed)
    devices = (getattr(torch, kind, None) for kind in ("cuda", "xpu", "mtia"))
    if any(device is not None and device.is_initialized() for device in devices):
        torch.manual_seed(seed)


def states_of_all() -> dict[str, Any]:
    """Return the states of the global generators, by the names of their modules."""
    states = {"torch": torch.get_rng_state(), "random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = (name, tuple(keys.tolist()), *rest)
    return states


def changed(before: dict[str, Any]) -> list[str]:
    """Return the names of the global generators whose states differ from these."""
    now = states_of_all()
    return [name for name, state in before.items() if not _equal(state, now[name])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)


def _set_all(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["random"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])


# -- making batches --------------------------------------------------------------------------------


class EpochSpec(NamedTuple):
    """The values that all batches of one epoch share."""

    number: int  # counts all epochs of the loader, new and resumed ones
    seed: int
    shared_seed: int | None  # the seed with which all workers shuffle a data pipe


class Base(NamedTuple):
    """A place in a worker's part of the dataset, and the state of the dataset there.

    The process that replaces the worker begins at this place.
    """

    place: int = 0  # number of batches of this part before this place
    state: bytes | None = None  # pickled; None: the state at the beginning
    end: int | None = None  # at the end of an epoch: number of batches of this part


class Made(NamedTuple):
    """The answer of a worker."""

    batch: Any
    seconds: float = 0.0  # how many seconds the worker took to make the batch
    collating: float = 0.0  # the part of these seconds that collate_fn took
    state: bytes | None = None  # the state after this batch; None: none exists or is wanted
    ended: bool = False  # whether the part has ended, without another batch
    is_last: bool = False  # whether the part is known to end with this batch


def is_stateful(thing: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(thing, "state_dict", None)) and callable(
        getattr(thing, "load_state_dict", None)
    )


def is_pipe(dataset: Any) -> bool:
    """Whether a dataset is a data pipe of torch.  The loader shards and seeds data pipes."""
    return isinstance(dataset, (IterDataPipe, MapDataPipe))


class WorkerCopy:
    """A worker's dataset, and the methods that make batches of it.

    A worker process gets a `WorkerCopy` pickled or inherited, so its dataset is a copy.  In a
    thread, and in the caller's thread if there are no workers, it is the program's dataset.
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
        # As in torch, each worker iterates over its own part of a data pipe.
        self._world, self._rank = dataloader._get_distributed_settings()
        if is_pipe(self.dataset) and self.workers:
            self.initialize = functools.partial(
                dataloader._sharding_worker_init_fn, self.initialize, self._world, self._rank
            )
        self._epoch = self._over = -1  # number of the current epoch, and of the last ended one
        self._initialized = False
        self._seeded: list[str] = []  # generators that worker_init_fn has used
        self._generators: Any = None  # the own generators of a thread
        self._fetcher: Any = None
        self._place = 0  # number of batches of this part that were made in this epoch
        self._kept: dict[int, Made | Exception] = {}  # batches made before they were requested
        self._collating = 0.0

    # -- tasks -------------------------------------------------------------------------------------

    def make(self, epoch: EpochSpec, number: int, indices: Any) -> Made:
        """Make one batch of a dataset with indices.  Any worker may make it."""
        shard = 0 if self.is_inline else current_worker().index
        with self._as_worker(epoch, shard):
            if self._epoch != epoch.number:
                self._begin(epoch, shard, Base())
            return self._batch(epoch, number, indices)

    def begin(self, epoch: EpochSpec, shard: int, base: Base) -> bytes | None:
        """Go to ``base`` in this worker's part of the dataset, and return the state there."""
        with self._as_worker(epoch, shard):
            self._begin(epoch, shard, base)
            return self.state()

    def make_next(
        self, epoch: EpochSpec, shard: int, base: Base, place: int, taken: int, requests: Any,
        interval: int,
    ) -> Made:  # fmt: skip
        """Make batch ``place`` of this worker's part.

        Its state comes with it if ``interval`` divides the number of batches up to this one.

        ``requests`` has number and indices of each batch from ``base`` up to this one, or is None
        for a dataset without indices.  If the worker is at another place (it replaces a dead one,
        or an epoch was resumed), it makes all batches from ``base`` on.

        The batch of a dead worker is requested again after a pause, and later batches may be
        requested before it.  So if the worker makes earlier batches on the way to a later one, it
        keeps those that the program has not taken.  ``taken``: how many the program has taken.
        """
        with self._as_worker(epoch, shard):
            self._kept = {at: made for at, made in self._kept.items() if at >= taken}
            if self._epoch == epoch.number and place in self._kept:
                return _opened(self._kept.pop(place))
            if self._over != epoch.number:
                if self._epoch != epoch.number or not base.place <= self._place <= place:
                    # An iterable dataset counts as ended if `_begin` raises.
                    self._over = epoch.number if requests is None else -1
                    self._begin(epoch, shard, base)
                    self._over = -1
                while self._place < place and self._over != epoch.number:
                    at = self._place
                    made: Made | Exception
                    try:
                        made = self._next(epoch, base, requests, interval)
                    except Exception as exc:
                        made = exc
                    if at >= taken:
                        self._kept[at] = made
                    del made  # the traceback of an error keeps this frame
            if self._over == epoch.number:
                return Made(None, ended=True)
            return self._next(epoch, base, requests, interval)

    def _next(self, epoch: EpochSpec, base: Base, requests: Any, interval: int) -> Made:
        """Make the next batch of this part."""
        number, indices = None, [None] * (self.batch_size or 0)
        if requests is not None:
            number, indices = requests[self._place - base.place]
        self._place += 1
        try:
            made = self._batch(epoch, number, indices)
        except StopIteration:
            # The part has ended, even if the iterator would yield more items later.
            self._over = epoch.number
            self._place -= 1
            return Made(None, state=self.state(), ended=True)
        # After a partial batch, the iterator has ended, and the state is that of the end.
        is_last = getattr(self._fetcher, "ended", False)
        is_due = is_last or (interval and self._place % interval == 0)
        return made._replace(state=self.state(), is_last=is_last) if is_due else made

    def state(self) -> bytes | None:
        """Return the pickled state of the dataset and its iterator, or None if they have none."""
        iterator = getattr(self._fetcher, "dataset_iter", None)
        state: dict[str, Any] = {}
        # If a dataset is its own iterator, the state is stored only once.
        if is_stateful(self.dataset) and iterator is not self.dataset:
            state["dataset"] = self.dataset.state_dict()
        if iterator is not None and is_stateful(iterator):
            state["iterator"] = iterator.state_dict()
        return pickle.dumps(state) if state else None

    @contextmanager
    def _as_worker(self, epoch: EpochSpec, shard: int) -> Iterator[None]:
        if self.is_inline:
            yield
            return
        # Set for each batch, because a worker may serve several loaders in turn.
        own = self._generators
        info = torch_worker.WorkerInfo(
            id=shard, num_workers=self.workers, seed=epoch.seed + shard, dataset=self.dataset,
            **({} if own is None else {"rng": own, "worker_method": "thread"}),
        )  # fmt: skip
        with as_worker(info, self.is_thread):
            yield

    def _begin(self, epoch: EpochSpec, shard: int, base: Base) -> None:
        """Begin this epoch at ``base``.  A worker at the end of the epoch before keeps the state of
        its dataset.  A worker may be elsewhere, if it made a dead worker's batch last."""
        is_at_end = self._initialized and self._epoch != epoch.number and self._place == base.end
        self._epoch = -1  # stays so if an error is raised below
        if is_pipe(self.dataset):
            self._shuffle(epoch)
        if not self.is_inline:
            self._initialize(epoch, shard)
        if self.kind == dataloader._DatasetKind.Iterable:
            self._seed(epoch.seed + shard, _numpy_seed(epoch.seed, shard))
        state = {} if base.state is None or is_at_end else pickle.loads(base.state)
        if not self.is_inline:
            self.load(state, base.end is not None)
        self._fetcher = dataloader._DatasetKind.create_fetcher(
            self.kind, self.dataset, self.is_batched, self._collate, self.drop_last
        )
        if "iterator" in state and base.end is None and is_stateful(self._fetcher.dataset_iter):
            self._fetcher.dataset_iter.load_state_dict(state["iterator"])
        self._place, self._kept = base.place, {}
        self._epoch = epoch.number

    def load(self, state: dict[str, Any], is_end: bool) -> None:
        """Load a state into the dataset.  ``is_end``: it is the state at the end of an epoch."""
        if "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])
        elif is_end and "iterator" in state and is_stateful(self.dataset):
            # The dataset is its own iterator, and `iter` may have to create its state.
            iter(self.dataset)
            self.dataset.load_state_dict(state["iterator"])

    def _initialize(self, epoch: EpochSpec, shard: int) -> None:
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
            # The number of the batch decides, so another worker or a repetition gets the same seed.
            self._seed(epoch.seed + number)
        begun, self._collating = time.perf_counter(), 0.0
        try:
            batch = self._fetcher.fetch(indices)
        except Exception as exc:
            if number is not None:
                note_batch(exc, number, indices)
                if isinstance(exc, StopIteration):  # would end the epoch without a word
                    text = f"the dataset raised StopIteration in batch {number}"
                    raise RuntimeError(text) from exc
            raise
        return Made(batch, time.perf_counter() - begun, self._collating)

    def _collate(self, items: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self.collate(items)
        except StopIteration as exc:  # would end the epoch without a word
            raise RuntimeError("collate_fn raised StopIteration") from exc
        finally:
            self._collating = time.perf_counter() - begun

    def _seed(self, seed: int, numpy_seed: Any = None) -> None:
        # Threads must not seed the program's generators, which they share.  Without workers, the
        # dataset draws from those as they are.
        if self.is_thread:
            seed_own(self._generators, seed)
        elif not self.is_inline:
            seed_all(seed, numpy_seed, but=self._seeded)


def _opened(kept: Made | Exception) -> Made:
    if isinstance(kept, Exception):
        raise kept
    return kept


def _numpy_seed(seed: int, shard: int) -> Any:
    """Return the seed that torch gives numpy's generator in a worker."""
    return torch_worker._generate_state(seed, shard)


_received: WorkerCopy | None = None


class AtStart:
    """The argument of a starting worker, which inherits it or gets it pickled."""

    def __init__(self, made: WorkerCopy) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        if multiprocessing.context.get_spawning_popen() is None:
            # The error makes the pool pass it to the starting process.
            raise RuntimeError("a worker gets its dataset when it starts, by inheritance")
        return AtStart, (self.made,)


def begin() -> None:
    """Prepare a worker: one thread for torch."""
    torch.set_num_threads(1)


def receive(start: AtStart) -> None:
    """Call `begin`, and keep the copy that came with the start of this process for `with_copy`."""
    global _received
    begin()
    _received = start.made


def with_copy(func: Callable[..., Any], made: WorkerCopy | None, *args: Any) -> Any:
    """Call ``func(copy, *args)``.  ``made`` is None if the copy came with the process's start."""
    return func(_received if made is None else made, *args)


def in_thread(func: Callable[..., Any], copies: list[WorkerCopy], *args: Any) -> Any:
    """Call ``func(copy, *args)`` with this thread's copy."""
    return func(copies[current_worker().index], *args)


def after(before: Any, func: Callable[..., Any], *args: Any) -> Any:
    """Call ``func(*args)`` when the result ``before`` is ready, or at once if it is None."""
    if before is not None:
        before.wait()
    return func(*args)


def without_context(context: Any, func: Callable[..., Any], *args: Any) -> Any:
    """Call ``func(*args)`` without the context that a `CtxPool` passes to each task."""
    return func(*args)


_of_thread = threading.local()


@contextmanager
def as_worker(info: Any, is_thread: bool) -> Iterator[None]:
    """Make `get_worker_info` return ``info`` in the block, for this thread or for the process."""
    holder, name = (_of_thread, "info") if is_thread else (torch_worker, "_worker_info")
    before = getattr(holder, name, None)
    setattr(holder, name, info)
    try:
        yield
    finally:
        setattr(holder, name, before)


def own_generators() -> Any:
    """Return new generators for one thread, or None if this torch's `WorkerInfo` has no ``rng``."""
    if not hasattr(torch_worker, "_RNG"):
        return None
    numpy = sys.modules.get("numpy")
    return torch_worker._RNG(
        random.Random(), torch.Generator(), None if numpy is None else numpy.random.RandomState()
    )


def seed_own(generators: Any, seed: int) -> None:
    if generators is None:
        return
    generators.random_generator.seed(seed)
    generators.torch_generator.manual_seed(seed)
    if generators.numpy_generator is not None:
        generators.numpy_generator.seed(seed % 2**32)


def use_threads() -> None:
    """Make `get_worker_info` return the info of the calling thread.

    Torch's function reads a variable of the process.  This replaces the code of the function, and
    not the function itself, because programs may have imported it under other names.
    """
    vars(torch_worker)["_xpool_of_thread"] = _of_thread
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    info = getattr(_xpool_of_thread, "info", None)  # type: ignore[name-defined]  # noqa: F821
    return _worker_info if info is None else info  # type: ignore[name-defined]  # noqa: F821


def use_common_memory() -> None:
    """Make torch collate tensors in memory that is not shared, in workers, too.

    In a worker, torch would make each batch in a new shared file.  For a batch of 19 MB that takes
    ten times as long, and the pool would still copy the batch from there.
    """
    torch_collate.default_collate_fn_map[torch.Tensor] = _stacked


def _stacked(batch: Any, **options: Any) -> Any:
    is_thread = getattr(_of_thread, "info", None) is not None
    if is_thread and (stacked := stack(batch)) is not None:
        return stacked
    with as_worker(None, is_thread):
        return torch_collate.collate_tensor_fn(batch, **options)


KEPT_BUFFERS = 8
"""How many buffers of one size a thread keeps: about as many as it has batches in flight."""


class _Buffers(threading.local):
    """A thread's latest buffers, by size, each with a weak reference to the view that uses it."""

    def __init__(self) -> None:
        self._known: dict[int, deque[tuple[Any, weakref.ref[memoryview]]]] = {}

    def lease(self, nbytes: int) -> memoryview:
        """Return a view of memory.  The memory is free again when the view is collected."""
        # Batches of nearly the same size share buffers.  Pages that are not touched take no memory.
        size = 1 << (nbytes - 1).bit_length()
        known = self._known.setdefault(size, deque(maxlen=KEPT_BUFFERS))
        # A callback of the weak reference could lose an exception of a signal handler.
        place = next((i for i, (_, user) in enumerate(known) if user() is None), None)
        if place is None:
            buffer = new_buffer(size)
        else:
            buffer = known[place][0]
            del known[place]
        view = memoryview(buffer)
        known.append((buffer, weakref.ref(view)))
        return view


_buffers = _Buffers()


def stack(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Return what `torch.stack` returns, in memory used before.  Return None for small batches, and
    for tensors that ``out=`` would change.

    The storage holds the view, so the buffer is in use as long as a tensor or array uses it.
    """
    first = tensors[0]
    nbytes = len(tensors) * first.numel() * first.element_size()
    if nbytes < HUGE_PAGES_FROM or not all(_is_like(tensor, first) for tensor in tensors):
        return None
    view = _buffers.lease(nbytes)
    out = torch.frombuffer(view, dtype=first.dtype, count=nbytes // first.element_size())
    return torch.stack(tensors, 0, out=out.view(len(tensors), *first.shape))


def _is_like(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether ``out=`` keeps the class, the type, the strides and the gradients of this tensor."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_nested
        and tensor.dtype is first.dtype
        and tensor.shape == first.shape
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
