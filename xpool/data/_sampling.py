"""`Sampling`: draws numbered requests from an epoch's sampler, and records the sampler's states.
`Preview`: the first batches of the next epoch, which workers make while this epoch ends.
`EpochProgress`: the progress of an epoch, and its form in `DataLoader.state_dict`.
"""

from __future__ import annotations

import itertools
import marshal
import reprlib
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from xpool import pickle
from xpool.data._loader_worker import (
    Base,
    EpochSpec,
    Generators,
    WorkerCopy,
    decoded,
    encoded,
    is_stateful,
)
from xpool.errors import OptionError


class Request(NamedTuple):
    """The indices of one batch, as drawn from the sampler."""

    number: int
    indices: Any
    digest: int  # the digest of all indices up to this batch
    state: bytes | None  # the sampler's pickled state after this batch; None: not recorded here


def inner_sampler(sampler: Any) -> Any:
    """Return the sampler that may have a state: the one inside torch's `BatchSampler`."""
    return sampler.sampler if type(sampler) is BatchSampler else sampler


class Sampling(Iterator[Request]):
    """The requests of one epoch, in order.

    The state of a stateful sampler is recorded after each ``interval`` batches that are not
    partial; 0: never.
    """

    def __init__(self, sampler: Any, interval: int) -> None:
        self._sampler, self._interval = sampler, interval
        self._inner, self._size, self._drop_last = inner_sampler(sampler), 0, False
        if self._inner is not sampler:
            self._size, self._drop_last = sampler.batch_size, sampler.drop_last
        self._drawn = 0
        self._digest = 0

    def begin(self) -> None:
        """Call ``__iter__`` of the sampler.  If it is inside torch's `BatchSampler`, this happens
        with the first batch."""
        self._indices: Any = None
        if self._inner is self._sampler:
            self._indices = self._requests = iter(self._inner)
        else:
            self._requests = self._batches()

    def go_on(self, taken: int, digest: int, drawn: int, state: bytes | None) -> None:
        """Go to the place after ``taken`` batches.  ``state`` is the sampler's state after
        ``drawn`` batches.  Without a ``state``, `begin` was called before; the batches are drawn
        again, and must have this ``digest``.
        """
        if state is not None:
            states = pickle.loads(state)
            if "sampler" in states:
                self._inner.load_state_dict(states["sampler"])
            self.begin()
            if "iterator" in states:
                self._indices = self._indices or iter(self._inner)
                self._indices.load_state_dict(states["iterator"])
            self._drawn = drawn
            for _ in itertools.islice(self, taken - drawn):
                pass
            self._digest = digest
            return
        for _ in itertools.islice(self, taken):
            pass
        if (self._drawn, self._digest) != (taken, digest):
            raise OptionError(
                f"load_state_dict: the sampler does not repeat the {taken} batches of indices that "
                "were taken before this state. Either it or the dataset is another one, or it "
                "draws from a generator that the state does not contain. Make the loader as it was "
                "(call set_epoch of a DistributedSampler), or give the sampler a state_dict"
            )

    def states(self) -> bytes | None:
        """Return the pickled states of the sampler and its iterator, or None if they have none."""
        state = {}
        if is_stateful(self._inner):
            state["sampler"] = self._inner.state_dict()
        if self._indices is not self._inner and is_stateful(self._indices):
            state["iterator"] = self._indices.state_dict()
        return pickle.dumps(state) if state else None

    def __next__(self) -> Request:
        indices = next(self._requests)
        number = self._drawn
        self._drawn += 1
        self._digest = _digest(indices, self._digest)
        # After a partial batch, the sampler has ended, and its state may be that of a new epoch.
        is_partial = self._size and len(indices) < self._size
        is_due = self._interval and self._drawn % self._interval == 0 and not is_partial
        return Request(number, indices, self._digest, self.states() if is_due else None)

    def _batches(self) -> Iterator[list[Any]]:
        """Yield batches as torch's `BatchSampler`, which begins the sampler with the first one."""
        if self._indices is None:
            self._indices = iter(self._inner)
        while True:
            batch = list(itertools.islice(self._indices, self._size))
            if not batch or (self._drop_last and len(batch) < self._size):
                return
            yield batch


def label(request: Request) -> str:
    return f"batch {request.number} (indices {reprlib.repr(request.indices)})"


def _digest(indices: Any, before: int) -> int:
    """Return the digest of these and all earlier indices; it is the same in each process."""
    try:
        # The output of marshal's version 2 does not depend on the numbers of references.
        return zlib.crc32(marshal.dumps(indices, 2), before)
    except ValueError:  # marshal takes only plain values; batches of others are only counted
        return zlib.crc32(b"?", before)


_DRAW_ONLY = {
    DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler,
    WeightedRandomSampler,
}  # fmt: skip
"""Samplers whose iteration changes only generators."""


def can_preview(sampler: Any) -> bool:
    """Whether iterating over a sampler leaves later iterations unchanged."""
    return type(inner_sampler(sampler)) in _DRAW_ONLY


class Preview:
    """Batches of the next epoch, made before the program has begun it.

    This draws from the sampler and then restores the generators.  When the epoch begins, it draws
    again, and uses these batches as long as its indices and its seed are the same.
    """

    def __init__(self, loader: Any, workers: Any, spec: EpochSpec, at_most: int) -> None:
        self._workers, self._spec = workers, spec
        sampling = Sampling(loader._index_sampler, 0)
        with Generators(loader).restored():
            sampling.begin()
            self._requests = deque(itertools.islice(sampling, at_most))
        self._begun: deque[tuple[Request, Any]] = deque()

    def begin_one(self) -> None:
        """Request one more batch, unless all were requested."""
        if self._requests:
            request = self._requests.popleft()
            result = self._workers.make(
                label(request), WorkerCopy.make, self._spec, request.number, request.indices
            )
            self._begun.append((request, result))

    def take(self, spec: EpochSpec, request: Request) -> Any:
        """Return the early result for this request.  If there is none, drop all and return None."""
        if self._begun and spec == self._spec:
            known, result = self._begun[0]
            if (known.number, known.indices) == (request.number, request.indices):
                self._begun.popleft()
                return result
        self.drop()
        return None

    def drop(self) -> None:
        """Cancel the batches that were requested."""
        self._requests.clear()
        while self._begun:
            self._begun.popleft()[1].cancel()


# -- the state of a loader -------------------------------------------------------------------------

VERSION = 5


class EpochProgress:
    """The place in an epoch, counted by the batches that the program has taken.

    Attributes:
        seed, shared_seed: the seeds of the epoch, as in `EpochSpec`.
        turn: number of epochs, up to this one, whose seeds come from the same draw.
        had_workers: whether the loader that began the epoch had workers.  The sampler is then begun
            twice, as in torch.
        generators: the states of the generators when the epoch began.
        taken, beyond: the program has taken the batches before number ``taken``, and those with a
            number in ``beyond``.  ``in_order=False`` may leave a gap between the two.
        digest: the digest of the indices of the batches before ``taken``.
        drawn, sampler: a state of the sampler, and the number of batches before that state.
        parts: for each worker with its own part, the number of batches taken from the part.
        bases: the last state of each such part.
        ended: the parts that have ended.
        next_part: the part of the next batch.
    """

    def __init__(self, generators: dict[str, Any], parts: int) -> None:
        self.generators = generators
        self.seed, self.turn, self.had_workers = 0, 0, False
        self.shared_seed: int | None = None
        self.taken, self.digest = 0, 0
        self.beyond: set[int] = set()
        self.drawn = 0
        self.sampler: bytes | None = None
        self.parts = [0] * parts
        self.bases = [Base()] * parts
        self.ended: set[int] = set()
        self.next_part = 0
        self.yielded = 0
        self.is_over = False
        self.ask: Callable[[], bytes | None] | None = None  # without workers: returns the state

    def as_state(self) -> dict[str, Any]:
        self.learn()
        return {
            "epoch": {
                "seed": self.seed, "turn": self.turn, "had_workers": self.had_workers,
                "shared_seed": self.shared_seed, "taken": self.taken,
                "beyond": sorted(self.beyond), "digest": self.digest, "yielded": self.yielded,
            },
            "generators": encoded(self.generators),
            "sampler": {"drawn": self.drawn, "state": _opened(self.sampler)},
            "workers": [
                {
                    "taken": taken, "ended": shard in self.ended,
                    "at": base.place, "state": _opened(base.state), "end": base.end,
                }
                for shard, (taken, base) in enumerate(zip(self.parts, self.bases))
            ],
            "next_worker": self.next_part,
        }  # fmt: skip

    def learn(self) -> None:
        """Without workers, read the dataset's present state."""
        state = None if self.ask is None else self.ask()
        if state is not None:
            taken = self.parts[0]
            self.bases = [Base(taken, state, taken if self.is_over or self.ended else None)]

    def left(self) -> list[Base]:
        """Return the states of the workers after this epoch.  The next epoch begins with them."""
        self.learn()
        return [Base(0, base.state, taken) for taken, base in zip(self.parts, self.bases)]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> EpochProgress:
        """Return the progress from which `as_state` made ``state``."""
        workers = state["workers"]
        progress = cls(decoded(state["generators"]), len(workers))
        for name, value in state["epoch"].items():
            setattr(progress, name, set(value) if name == "beyond" else value)
        progress.drawn = state["sampler"]["drawn"]
        progress.sampler = _closed(state["sampler"]["state"])
        progress.parts = [worker["taken"] for worker in workers]
        progress.bases = bases_of(state)
        progress.ended = {shard for shard, worker in enumerate(workers) if worker["ended"]}
        progress.next_part = state["next_worker"]
        return progress

    def share_among(self, parts: int) -> None:
        """Let this many workers go on with a dataset that has no state in its workers."""
        self.parts, self.bases, self.ended = [0] * parts, [Base()] * parts, set()
        self.next_part = self.taken % parts if parts else 0


def bases_of(state: Mapping[str, Any]) -> list[Base]:
    """Return the bases of the workers in a loader's state."""
    return [
        Base(worker["at"], _closed(worker["state"]), worker["end"]) for worker in state["workers"]
    ]


def facts(loader: Any) -> dict[str, Any]:
    """Return the values that must be equal in the loader that later loads the state."""
    try:
        length = len(loader.dataset)
    except (TypeError, NotImplementedError):
        length = None  # an iterable dataset without a length
    return {
        "version": VERSION, "num_workers": loader.num_workers, "batch_size": loader.batch_size,
        "length": length,
    }  # fmt: skip


def check_state(loader: Any, state: Any) -> None:
    """Raise `OptionError` if the state does not fit this loader."""
    if not isinstance(state, Mapping) or not {"version", "epoch", "generators"} <= set(state):
        raise OptionError(
            "load_state_dict takes what state_dict() of an xpool.data.DataLoader returned, not "
            f"{reprlib.repr(state)}"
        )
    why = ""
    for name, here in facts(loader).items():
        there = state.get(name)
        if there == here:
            continue
        if name == "num_workers":
            if not loader._has_state:
                continue
            why = _PARTS if loader._iterable else _STATES
        raise OptionError(
            f"load_state_dict: the state has {_NAMES[name]} {there!r}, but this loader has "
            f"{here!r}{why}; make the loader as it was when it returned the state"
        )


_NAMES = {
    "version": "the version",
    "num_workers": "num_workers =",
    "batch_size": "batch_size =",
    "length": "a dataset of length",
}

_PARTS = (
    ". Each worker iterates over its own part of an iterable dataset, and the state holds the "
    "place in each part. With another number of workers, there are other parts"
)

_STATES = (
    ". Each worker has its own copy of a dataset with a state_dict, and the states of the copies "
    "cannot be divided among other workers"
)


def _opened(state: bytes | None) -> Any:
    return None if state is None else pickle.loads(state)


def _closed(state: Any) -> bytes | None:
    return None if state is None else pickle.dumps(state)
