"""How long a reader polls before it sleeps, and how often it skips polling."""

from __future__ import annotations

import itertools
import threading

import pytest

from xpool._wire import wire
from xpool._wire.wire import Spin

SOMETHING = [(3, 1)]


class Clock:
    """Replaces `time`: each reading takes 10 us."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 10e-6
        return self.now


class Poll:
    """Finds a message in poll number `at`, counted from 1; with None, never."""

    def __init__(self, at: int | None) -> None:
        self.at, self.looks = at, 0

    def __call__(self, timeout: int) -> list[tuple[int, int]]:
        assert timeout == 0, "the poll must not sleep"
        self.looks += 1
        return SOMETHING if self.looks == self.at else []


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "time", Clock())
    monkeypatch.setattr(wire, "default_processes", lambda: 2)


@pytest.mark.usefixtures("two_processors")
def test_a_message_that_comes_soon_is_found():
    one = Spin()
    for _ in range(5):
        poll = Poll(4)
        assert one.look(poll) == SOMETHING
        assert poll.looks == 4


@pytest.mark.usefixtures("two_processors")
def test_vain_polls_become_rare():
    one = Spin()
    looked = []
    for number in range(100):
        poll = Poll(None)
        assert one.look(poll) == []
        if poll.looks:
            assert 20 < poll.looks < 40, "polls for about 300 us"
            looked.append(number)
    between = [b - a - 1 for a, b in itertools.pairwise(looked)]
    assert between == [1, 2, 4, 8, 16, 16, 16, 16]


@pytest.mark.usefixtures("two_processors")
def test_a_find_restores_polling():
    one = Spin()
    for _ in range(20):
        one.look(Poll(None))
    while not one.look(Poll(1)):
        pass
    assert all(one.look(Poll(2)) for _ in range(5))
    assert [one.look(poll) for poll in (Poll(None), Poll(1), Poll(1))] == [[], [], SOMETHING]


@pytest.mark.usefixtures("two_processors")
def test_only_one_thread_polls():
    one, found = Spin(), []

    def poll(timeout: int) -> list[tuple[int, int]]:
        if not found:
            other = Poll(1)
            thread = threading.Thread(target=lambda: found.append((one.look(other), other.looks)))
            thread.start()
            thread.join()
        return SOMETHING

    assert one.look(poll) == SOMETHING
    assert found == [([], 0)]
    assert one.look(Poll(1)) == SOMETHING, "polling is possible again"


@pytest.mark.usefixtures("two_processors")
def test_an_interrupt_does_not_end_polling():
    one = Spin()

    def interrupted(timeout: int) -> list[tuple[int, int]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.look(interrupted)
    assert one.look(Poll(1)) == SOMETHING


def test_one_processor_never_polls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "default_processes", lambda: 1)
    poll = Poll(1)
    assert Spin().look(poll) == []
    assert poll.looks == 0


@pytest.mark.usefixtures("two_processors")
def test_a_busy_machine(monkeypatch: pytest.MonkeyPatch):
    """If another process takes the processor for a time slice, the next waits sleep."""

    def lose_the_processor() -> None:
        wire.time.now += 3e-3  # type: ignore[attr-defined]

    monkeypatch.setattr(wire, "_give_way", lose_the_processor)
    one = Spin()
    poll = Poll(2)
    assert one.look(poll) == SOMETHING
    assert poll.looks == 2
    later = Poll(1)
    looked = 0
    while one.look(later) == []:
        looked += 1
    assert (looked, later.looks) == (wire._LONG, 1)
