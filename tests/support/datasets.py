"""Datasets and samplers for tests of `xpool.data`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from support import work


def die_once(flag: Any) -> None:
    """Kill this process, unless the file ``flag`` exists."""
    if work.first(flag):
        os.kill(os.getpid(), signal.SIGKILL)


def initialize(worker: int) -> None:
    """Do nothing, in place of opening a file."""


class Stream(IterableDataset[int]):
    """The numbers below ten."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Falling(Sampler[int]):
    """The numbers below n from the highest one down, with a state. It begins again at its end."""

    def __init__(self, n: int = 30) -> None:
        self.n = self.left = n
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        while self.left:
            self.left -= 1
            self.drawn += 1
            yield self.left
        self.left = self.n

    def __len__(self) -> int:
        return self.n

    def state_dict(self) -> dict[str, int]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left = state["left"]
