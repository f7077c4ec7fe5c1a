"""Thousands of histories go well in the simulated worlds, and planted bugs are found."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from support.tiers import also

from xpool._engine import monitor
from xpool._engine import worker_process as worker
from xpool._engine.worker_process import processor_times

from .__main__ import WORLDS, main
from .draws import Draws
from .engine import EngineWorld
from .mutants import MUTANTS, PINNED, Mutant
from .seeds import SimulationFailed, World, search

DEEP = int(os.environ.get("XPOOL_TEST_DEEP", "1"))
"""Factor for the number of histories; `make nightly` raises it."""

TURNS = 4
"""Turns of `make test-all`, of which `make test` has the first."""

HISTORIES = {"scheduler": 500, "engine": 200, "hosts": 100}
"""Histories of a turn."""

pytestmark = [pytest.mark.pure, pytest.mark.xpool_only]


@pytest.mark.parametrize("world", WORLDS.values())
@pytest.mark.parametrize("turn", [0, *also(*range(1, TURNS * DEEP))])
def test_histories_go_well(world, turn):
    """In any order of events every task ends as it must, and nothing is left over."""
    n = HISTORIES[world.name]
    assert search(world, range(turn * n, (turn + 1) * n)) is None


@pytest.mark.parametrize("mutant", PINNED, ids=str)
def test_histories_that_went_wrong(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    """The pinned history of a rare bug goes well without the bug, and wrong with it.

    If only the second part fails, a change has given this seed another history. Then search a new
    seed by `python -m tests.simulation engine --seeds 20000 --mutant NAME`.
    """
    seed, world = PINNED[mutant], WORLDS[mutant.world]
    assert search(world, [seed]) is None
    mutant.seed(monkeypatch)
    assert search(world, [seed]) is not None, f"seed {seed} no longer shows that {mutant}"


def story(world: type[World], seed: int) -> list[str]:
    """Run a history; return its events."""
    one = world(seed)
    one.run()
    return one.history()


@pytest.mark.parametrize("world", WORLDS.values())
def test_draws_for_a_new_concern_change_no_history(world, monkeypatch):
    """A seed gives the same history again, also if each event draws for a new concern too."""
    before, note = story(world, 7), World.note
    assert len(before) > 5

    def noting(self: World, *what: Any) -> None:
        self.draw.something_new.random()
        note(self, *what)

    monkeypatch.setattr(World, "note", noting)
    assert story(world, 7) == before


@pytest.mark.parametrize("world", WORLDS.values())
def test_draws_for_one_concern_leave_those_for_others(world, monkeypatch):
    """One more draw for a concern changes no number that is drawn for another."""
    drawn: dict[str, list[float]] = {}
    one_more = ""
    init = Draws.__init__

    def recording(self: Draws, seed: str) -> None:
        init(self, seed)
        concern = seed.partition("/")[2]
        numbers, number = drawn.setdefault(concern, []), self.random
        if concern == one_more:
            number()

        def random() -> float:
            numbers.append(number())
            return numbers[-1]

        self.random = random  # type: ignore[method-assign]

    monkeypatch.setattr(Draws, "__init__", recording)
    story(world, 7)
    before = drawn
    assert len(before) > 8
    for one_more in before:
        drawn = {}
        story(world, 7)
        for concern, numbers in before.items():
            both = list(zip(drawn.get(concern, []), numbers))
            same = all(one == other for one, other in both)
            assert same == (concern != one_more or not both), f"{concern} after {one_more}"


def test_no_history_depends_on_a_process_of_this_machine(monkeypatch):
    """The engine finds no real process under the pids of the world."""
    found = set()

    def times(pid):
        found.add(answer := processor_times(pid))
        return answer

    for module in monitor, worker:
        monkeypatch.setattr(module, "processor_times", times)
    assert search(EngineWorld, range(15)) is None
    assert found == {(0.0, 0.0, False)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_seeded_bugs_are_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    """Each planted bug is found, with a seed and its history."""
    mutant.seed(monkeypatch)
    found = search(WORLDS[mutant.world], range(4 * TURNS * HISTORIES[mutant.world]))
    assert found is not None, f"no history shows that {mutant.name}"
    assert str(found.seed) in str(found) and "--seeds" not in str(found)


class Broken(World):
    """A world whose seventh history goes wrong."""

    name = "broken"

    def play(self) -> None:
        self.note("so far", self.seed)
        if self.seed == 7:
            raise ZeroDivisionError("seven")


def test_a_failure_has_its_seed_and_history():
    """An exception in a history becomes a failure with seed and history."""
    found = search(Broken, range(100))
    assert isinstance(found, SimulationFailed) and found.seed == 7
    assert isinstance(found.__cause__, ZeroDivisionError)
    assert "so far 7" in str(found) and "broken 7" in str(found)


class Caught(World):
    """A world in which verdicts are caught and another error follows."""

    name = "caught"

    def play(self) -> None:
        for what in ("first", "second"):
            try:
                self.wrong(what)
            except Exception:
                self.note("caught", what)
            if self.seed == 1:
                self.stop_if_wrong()
        if self.seed == 2:
            raise ZeroDivisionError("later")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_caught_verdict_counts(seed):
    """The first verdict fails the history, even if it is caught or another exception follows."""
    found = search(Caught, [seed])
    assert isinstance(found, SimulationFailed) and found.what == "first"
    assert found.__cause__ is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["3"], "all is well"), (["--seeds", "20"], "20 histories, all is")],
)
def test_the_command_line(monkeypatch, capsys, arguments, says):
    """The command line replays a seed and searches seeds."""
    monkeypatch.setattr(sys, "argv", ["", "scheduler", *arguments])
    assert main() == 0 and says in capsys.readouterr().out
