"""`Spin` polls for a moment, and not where this costs more than it saves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from xpool._wire import spin

pytestmark = pytest.mark.pure


class World:
    """A clock, a place where an event comes at a time, and a processor that is given away."""

    def __init__(self, monkeypatch, event: float, away: float = 1e-6) -> None:
        self.now, self.event, self.away, self.polls = 0.0, event, away, 0
        monkeypatch.setattr(spin, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(spin, "_give_way", self.give_way)
        monkeypatch.setattr(spin, "default_processes", lambda: 2)

    def give_way(self) -> None:
        self.now += self.away

    def poll(self, _timeout: int) -> list[tuple[int, int]]:
        self.polls += 1
        self.now += 1e-6
        return [(3, 1)] if self.now >= self.event else []

    def sleeps(self, spinning: spin.Spin) -> int:
        """Return how many waits sleep before the next one polls."""
        count = 0
        while True:
            before = self.polls
            spinning.look(self.poll)
            if self.polls > before:
                return count
            count += 1


def test_an_event_soon(monkeypatch):
    """It finds an event that comes within a moment, each time."""
    world = World(monkeypatch, event=100e-6)
    spinning = spin.Spin()
    assert spinning.look(world.poll) == [(3, 1)]
    assert world.polls > 10
    assert world.sleeps(spinning) == 0


def test_no_event(monkeypatch):
    """After polls in vain, 1, 2, 4, ... waits sleep, but never more than 16."""
    world = World(monkeypatch, event=1e9)
    spinning = spin.Spin()
    assert spinning.look(world.poll) == []
    assert [world.sleeps(spinning) for _ in range(6)] == [1, 2, 4, 8, 16, 16]


def test_the_processor_is_away(monkeypatch):
    """If another process takes the processor for a slice, the next waits sleep."""
    world = World(monkeypatch, event=2e-3, away=3e-3)
    spinning = spin.Spin()
    assert spinning.look(world.poll) == [(3, 1)]
    assert world.polls == 2
    assert world.sleeps(spinning) == spin._LONG


def test_one_processor(monkeypatch):
    """With one processor it never polls, because no event could come."""
    world = World(monkeypatch, event=0.0)
    monkeypatch.setattr(spin, "default_processes", lambda: 1)
    assert spin.Spin().look(world.poll) == []
    assert world.polls == 0
