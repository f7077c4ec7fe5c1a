"""What all worlds have in common: a seed, a history, and a way to fail."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

__all__ = ["Passing", "Reader", "SimulationFailed", "World", "search"]

T = TypeVar("T")


class SimulationFailed(AssertionError):
    """Something happened in a simulated world that must not happen.

    Fields: ``world`` (its class), ``seed``, ``history`` (what happened, oldest first).
    """

    def __init__(self, world: type[World], seed: int, what: str, history: list[str]) -> None:
        super().__init__(world, seed, what, history)
        self.world, self.seed, self.what, self.history = world, seed, what, history

    def __str__(self) -> str:
        last = "\n  ".join(self.history[-30:])
        return (
            f"{self.what}\nin {self.world.__name__}({self.seed}); the last that happened:\n"
            f"  {last}\nReplay it: python -m tests.simulation {self.world.name} {self.seed}"
        )


class World:
    """A world that a seed decides: same seed, same code, same history."""

    name: str

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.verdict: SimulationFailed | None = None  # the first: see `wrong`
        self._history: list[tuple[Any, ...]] = []

    def run(self) -> None:
        """Let it happen; raise `SimulationFailed` when something is wrong."""
        try:
            self.play()
        except Exception as exc:
            # What follows a verdict may fail in any way: the verdict counts.
            if self.verdict is None:
                failure = SimulationFailed(
                    type(self), self.seed, f"{type(exc).__name__}: {exc}", self.history()
                )
                raise failure from exc
        self.stop_if_wrong()

    def play(self) -> None:
        """What happens.  For the worlds to define."""
        raise NotImplementedError

    def note(self, *what: Any) -> None:
        """Keep what happened for the story of a failure; made into text only then."""
        self._history.append(what)

    def history(self) -> list[str]:
        """Return what happened, oldest first."""
        return [" ".join(map(str, what)) for what in self._history]

    def wrong(self, what: str) -> NoReturn:
        """Say that something happened that must not.

        This ends the history even if the code under test catches what is raised here: the verdict
        is kept, and raised again by `stop_if_wrong`.
        """
        if self.verdict is None:
            self.verdict = SimulationFailed(type(self), self.seed, what, self.history())
        raise self.verdict

    def stop_if_wrong(self) -> None:
        """End the history if there was a verdict.  For worlds to call at each turn."""
        if self.verdict is not None:
            raise self.verdict

    def chance(self, probability: float) -> bool:
        """Return true with this probability."""
        return self.draw.random() < probability

    def one_of(self, options: list[T]) -> T:
        """Return one of these; a little quicker than `random.choice`."""
        return options[int(self.draw.random() * len(options))]

    def below(self, n: int) -> int:
        """Return a number from 0 to n - 1."""
        return int(self.draw.random() * n)


class Reader:
    """Stands for the input reader of a stream, which is told what was taken."""

    def taken(self, items: Any) -> None:
        """Some of what it has appended is under way."""


class Passing:
    """Holds that a stream that goes on lets pass what waits behind it in a queue."""

    def __init__(self, world: World, shared: Iterable[Any]) -> None:
        self._world, self._shared = world, shared
        # Of each range: how many pieces of streams went before it, and of how many streams.
        self._passed: dict[Any, tuple[int, int]] = {}

    def given(self) -> None:
        """A piece of a stream was given out."""
        waits = [one for one in self._shared if one.items]
        streams = 1 + sum(one.flow is not None for one in waits)
        before, self._passed = self._passed, {}
        for one in waits:
            if one.flow is None:
                n, most = before.get(one, (0, 0))
                self._passed[one] = n + 1, max(most, streams)
                if n + 1 > max(most, streams):
                    self._world.wrong("a stream goes on, and something waits behind it")


def search(world: type[World], seeds: Iterable[int]) -> SimulationFailed | None:
    """Run the world for each of these seeds; return the first failure, None when there is none."""
    for seed in seeds:
        try:
            world(seed).run()
        except SimulationFailed as failure:
            return failure
    return None
