"""Common to all worlds: a seed, a history, and a way to fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from .draws import Streams

__all__ = ["Passing", "Reader", "SimulationFailed", "World", "search"]


class SimulationFailed(AssertionError):
    """A rule was broken in a simulated world.

    Fields: ``world`` (its class), ``seed``, ``history`` (the events, oldest first).
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
    """A world that a seed decides: the same seed and code give the same history."""

    name: str

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = Streams(seed)
        self.verdict: SimulationFailed | None = None  # the first failure; see `wrong`
        self._history: list[tuple[Any, ...]] = []

    def run(self) -> None:
        """Run the history; raise `SimulationFailed` if a rule was broken."""
        try:
            self.play()
        except Exception as exc:
            # Errors after a verdict are ignored.
            if self.verdict is None:
                failure = SimulationFailed(
                    type(self), self.seed, f"{type(exc).__name__}: {exc}", self.history()
                )
                raise failure from exc
        self.stop_if_wrong()

    def play(self) -> None:
        """Run the events; each world defines this."""
        raise NotImplementedError

    def note(self, *what: Any) -> None:
        """Record an event; it becomes text only when a failure shows it."""
        self._history.append(what)

    def history(self) -> list[str]:
        """Return the events as text, oldest first."""
        return [" ".join(map(str, what)) for what in self._history]

    def wrong(self, what: str) -> NoReturn:
        """Fail the history because a rule was broken.

        This ends the history even if the code under test catches the exception: the verdict is
        kept, and `stop_if_wrong` raises it again.
        """
        if self.verdict is None:
            self.verdict = SimulationFailed(type(self), self.seed, what, self.history())
        raise self.verdict

    def stop_if_wrong(self) -> None:
        """Raise the verdict, if there is one. Worlds call this at each turn."""
        if self.verdict is not None:
            raise self.verdict


class Reader:
    """Replaces the input reader of a stream."""

    def taken(self, items: Any) -> None:
        """Some of its items were taken."""


class Passing:
    """Checks that an endless stream lets the jobs behind it in a queue pass."""

    def __init__(self, world: World, shared: Iterable[Any]) -> None:
        self._world, self._shared = world, shared
        # For each range: the pieces of streams that went before it, and the number of streams.
        self._passed: dict[Any, tuple[int, int]] = {}

    def given(self, priority: float = 0) -> None:
        """A piece of a stream of this priority was given out."""
        waits = [one for one in self._shared if one.items and one.terms.priority == priority]
        streams = 1 + sum(one.flow is not None for one in waits)
        before, self._passed = self._passed, {}
        for one in waits:
            if one.flow is None:
                n, most = before.get(one, (0, 0))
                self._passed[one] = n + 1, max(most, streams)
                if n + 1 > max(most, streams):
                    self._world.wrong("an endless stream blocks a job behind it")


def search(world: type[World], seeds: Iterable[int]) -> SimulationFailed | None:
    """Run the world for each seed; return the first failure or None."""
    for seed in seeds:
        try:
            world(seed).run()
        except SimulationFailed as failure:
            return failure
    return None
