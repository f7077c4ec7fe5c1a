"""The first batches of the next epoch, which workers make while the program ends this epoch."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from xpool.data._generators import Generators
from xpool.data._loader_worker import EpochSpec, WorkerCopy
from xpool.data._sampling import Request, Sampling, label

_DRAW_ONLY = {
    DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler,
    WeightedRandomSampler,
}  # fmt: skip
"""Samplers whose iteration changes only generators."""


def can_preview(sampler: Any) -> bool:
    """Whether iterating over a sampler leaves later iterations unchanged."""
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return type(sampler) in _DRAW_ONLY


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
