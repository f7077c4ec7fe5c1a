"""The simulated worlds: thousands of histories go well, and seeded bugs do not go unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .engine import EngineWorld
from .hosts import HostWorld
from .mutants import MUTANTS, PINNED, Mutant
from .mutants_hosts import HOSTS
from .scheduler import SchedulerWorld
from .seeds import SimulationFailed, World, search

DEEP = int(os.environ.get("XPOOL_TEST_DEEP", "1"))
"""How many times the usual number of histories to run; `make nightly` runs many."""

HISTORIES = {"scheduler": 2_000, "engine": 600, "hosts": 400}

pytestmark = [pytest.mark.pure, pytest.mark.xpool_only]


@pytest.mark.parametrize("world", [SchedulerWorld, EngineWorld, HostWorld])
@pytest.mark.parametrize("turn", range(DEEP))
def test_histories_go_well(world, turn):
    """Whatever happens in whatever order, every task ends as it must, and nothing is left over."""
    n = HISTORIES[world.name]
    assert search(world, range(turn * n, (turn + 1) * n)) is None


@pytest.mark.parametrize("mutant", PINNED, ids=str)
def test_histories_that_went_wrong(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    """The history that shows a rare bug goes well without that bug, and goes wrong with it.

    When the second fails, a change has given this seed another history: look for a new one with
    `python -m tests.simulation engine --seeds 20000 --mutant NAME`.
    """
    seed = PINNED[mutant]
    assert search(EngineWorld, [seed]) is None
    mutant.seed(monkeypatch)
    assert search(EngineWorld, [seed]) is not None, f"seed {seed} no longer shows that {mutant}"


@pytest.mark.parametrize("world", [SchedulerWorld, EngineWorld, HostWorld])
def test_a_seed_is_a_history(world):
    """The same seed tells the same story each time."""
    stories = []
    for _ in range(2):
        one = world(7)
        one.run()
        stories.append(one.history())
    assert stories[0] == stories[1] and len(stories[0]) > 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", [*MUTANTS, *HOSTS], ids=str)
def test_seeded_bugs_are_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    """A rule that is broken is found, with a seed and its story."""
    mutant.seed(monkeypatch)
    world = {kind.name: kind for kind in (SchedulerWorld, EngineWorld, HostWorld)}[mutant.world]
    found = search(world, range(4 * HISTORIES[mutant.world]))
    assert found is not None, f"no history shows that {mutant.name}"
    assert str(found.seed) in str(found) and "--seeds" not in str(found)


class Broken(World):
    """A world in which the seventh history goes wrong."""

    name = "broken"

    def play(self) -> None:
        self.note("so far", self.seed)
        if self.seed == 7:
            raise ZeroDivisionError("seven")


def test_a_failure_tells_its_seed_and_its_story():
    """What is raised inside a history comes out as a failure with everything needed to replay."""
    found = search(Broken, range(100))
    assert isinstance(found, SimulationFailed) and found.seed == 7
    assert isinstance(found.__cause__, ZeroDivisionError)
    assert "so far 7" in str(found) and "broken 7" in str(found)


class Caught(World):
    """A world whose verdicts are caught by what it tries, and followed by another error."""

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
def test_a_verdict_counts_whatever_catches_it(seed):
    """The first verdict fails the history if it is caught, and whatever is raised after it."""
    found = search(Caught, [seed])
    assert isinstance(found, SimulationFailed) and found.what == "first"
    assert found.__cause__ is None


@pytest.mark.parametrize("world", ["scheduler", "engine", "hosts"])
@pytest.mark.starts
def test_the_command_line(world):
    """A seed is replayed, and seeds are searched, from the command line."""
    command = [sys.executable, "-m", "tests.simulation", world]
    root = Path(__file__).resolve().parents[2]
    options = {"capture_output": True, "text": True, "check": True, "timeout": 60, "cwd": root}
    one = subprocess.run([*command, "3"], **options)
    assert one.stdout.rstrip().endswith("all is well")
    many = subprocess.run([*command, "--seeds", "20"], **options)
    assert many.stdout.startswith("20 histories")
