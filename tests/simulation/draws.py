"""Random choices that a seed decides, in one stream for each concern."""

from __future__ import annotations

import random
from typing import Any, TypeVar

__all__ = ["Draws", "Streams"]

T = TypeVar("T")


class Draws:
    """One stream of random choices."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def one_of(self, options: list[T]) -> T:
        """Return one of the options; a little faster than `random.choice`."""
        return options[int(self.random() * len(options))]

    def shuffle(self, items: list[Any]) -> None:
        """Put the items in any order."""
        items.sort(key=lambda _: self.random())

    def up_to(self, *limits: float) -> float:
        """Return a number from 0 to one of the limits."""
        limit = limits[int(self.random() * len(limits))] if len(limits) > 1 else limits[0]
        return limit * self.random()

    def below(self, n: int) -> int:
        return int(self.random() * n)


class Streams:
    """An attribute for each concern: ``streams.faults.chance(0.1)``, made when it is first used.

    The seed and the concern's name decide a stream. So draws for one concern, which may be a new
    one, leave the draws for the others as they are.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __getattr__(self, concern: str) -> Draws:
        if concern.startswith("_"):
            raise AttributeError(concern)
        found = self.__dict__[concern] = Draws(f"{self._seed}/{concern}")
        return found
