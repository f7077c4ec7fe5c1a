"""Thousands of histories go well in the simulated worlds, and planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xpool._engine import start_limit
from xpool._engine import worker_process as worker
from xpool._engine.worker_process import processor_times

from . import mutants_alone  # noqa: F401 - it adds to MUTANTS
from .ends import EndsWorld
from .engine import EngineWorld
from .hosts import HostWorld
from .mutants import MUTANTS, PINNED, Mutant
from .mutants_hosts import HOSTS
from .scheduler import SchedulerWorld
from .seeds import SimulationFailed, World, search

DEEP = int(os.environ.get("XPOOL_TEST_DEEP", "1"))
"""Factor for the number of histories; `make nightly` raises it."""

HISTORIES = {"scheduler": 2_000, "engine": 600, "ends": 300, "hosts": 400}
WORLDS: list[type[World]] = [SchedulerWorld, EngineWorld, EndsWorld, HostWorld]

pytestmark = [pytest.mark.pure, pytest.mark.xpool_only]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("turn", range(DEEP))
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
    seed = PINNED[mutant]
    assert search(EngineWorld, [seed]) is None
    mutant.seed(monkeypatch)
    assert search(EngineWorld, [seed]) is not None, f"seed {seed} no longer shows that {mutant}"


@pytest.mark.parametrize("world", WORLDS)
def test_a_seed_is_a_history(world):
    """The same seed gives the same history each time."""
    stories = []
    for _ in range(2):
        one = world(7)
        one.run()
        stories.append(one.history())
    assert stories[0] == stories[1] and len(stories[0]) > 5


def test_no_history_depends_on_a_process_of_this_machine(monkeypatch):
    """The engine finds no real process under the pids of the world."""
    found = set()

    def times(pid):
        found.add(answer := processor_times(pid))
        return answer

    for module in start_limit, worker:
        monkeypatch.setattr(module, "processor_times", times)
    assert search(EngineWorld, range(60)) is None
    assert found == {(0.0, 0.0, False)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", [*MUTANTS, *HOSTS], ids=str)
def test_seeded_bugs_are_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    """Each planted bug is found, with a seed and its history."""
    mutant.seed(monkeypatch)
    world = {kind.name: kind for kind in WORLDS}[mutant.world]
    found = search(world, range(4 * HISTORIES[mutant.world]))
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


@pytest.mark.parametrize("world", ["scheduler", "engine", "ends", "hosts"])
@pytest.mark.starts
def test_the_command_line(world):
    """The command line replays a seed and searches seeds."""
    command = [sys.executable, "-m", "tests.simulation", world]
    root = Path(__file__).resolve().parents[2]
    options = {"capture_output": True, "text": True, "check": True, "timeout": 60, "cwd": root}
    one = subprocess.run([*command, "3"], **options)
    assert one.stdout.rstrip().endswith("all is well")
    many = subprocess.run([*command, "--seeds", "20"], **options)
    assert many.stdout.startswith("20 histories")
