"""Random programs have the same outcomes on xpool and on the standard library.

By default, some hundred programs of each kind run, always the
same ones. To run more::

    XPOOL_TEST_PROGRAMS=10000 pytest tests/differential      # seeds 0 to 9,999
    XPOOL_TEST_SEED=4711 pytest tests/differential           # from this seed on

The test prints the shortest program that shows a difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.tiers import also

from differential.programs import Block, blocks, program
from differential.sides import OurSide, StandardSide

PROGRAMS = int(os.environ.get("XPOOL_TEST_PROGRAMS", "300"))
FIRST = int(os.environ.get("XPOOL_TEST_SEED", "0"))
BATCH = 50  # programs of one test. They share pools.

pytestmark = [pytest.mark.xpool_only, pytest.mark.usefixtures("warm")]


@pytest.mark.parametrize("first", [FIRST, *also(*range(FIRST + BATCH, FIRST + PROGRAMS, BATCH))])
@pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])
def test_random_programs(sides: Sides, first: int) -> None:
    """Each program has the same outcomes on xpool's pools and on those of the standard library."""
    for seed in range(first, min(first + BATCH, FIRST + PROGRAMS)):
        parts = program(seed, sides.processes)
        story = sides.difference(parts)
        if story is not None:
            parts = shortened(sides, parts)
            story = sides.difference(parts) or story
            pytest.fail(sides.report(seed, parts, story), pytrace=False)


@pytest.mark.parametrize("processes", [False], ids=["threads"])
def test_a_difference_is_found_and_shortened(sides: Sides) -> None:
    """A program that differs is shortened to the block that differs, and the report shows it."""
    parts = [["t.value(1)"], ["x = 2", "t.value((x, t.standard))"], ["t.value(3)"]]
    short = shortened(sides, parts)
    assert short == [["x = 2", "t.value((x, t.standard))"]]
    report = sides.report(7, short, sides.difference(short) or "")
    assert "seed 7" in report and "    t.value((x, t.standard))" in report
    assert "(2, True)" in report and "(2, False)" in report


# Comparing ---------------------------------------------------------------------------------------


class Sides:
    """Pools of xpool and of the standard library."""

    def __init__(self, processes: bool) -> None:
        self.processes = processes
        self._standard = StandardSide(processes)
        self._ours = OurSide(processes)

    def difference(self, parts: list[Block]) -> str | None:
        """Run a program on both. Return where the outcomes differ, or None."""
        source = blocks(parts)
        self._standard.send(source)
        ours = self._ours.run(source)
        standard = self._standard.receive()
        return differing(standard, ours)

    def report(self, seed: int, parts: list[Block], story: str) -> str:
        kind = "Pool" if self.processes else "ThreadPool"
        return (
            f"seed {seed} over {kind}(2) differs: {story}\n\n{blocks(parts)}\n"
            f"XPOOL_TEST_SEED={seed} XPOOL_TEST_PROGRAMS=1 runs it again."
        )

    def close(self) -> None:
        self._standard.close()
        self._ours.close()


@pytest.fixture
def sides(processes: bool, nothing_leaks: None) -> Iterator[Sides]:
    """The pools of both libraries, for one test."""
    both = Sides(processes)
    yield both
    both.close()


def shortened(sides: Sides, parts: list[Block]) -> list[Block]:
    """Remove blocks while the outcomes still differ."""
    for block in list(parts):
        fewer = [part for part in parts if part is not block]
        if fewer and sides.difference(fewer) is not None:
            parts = fewer
    return parts


def differing(standard: list[Any], ours: list[Any]) -> str | None:
    """Return where two lists of outcomes differ, or None."""
    for i, (theirs, mine) in enumerate(zip(standard, ours)):
        if theirs[0] == "the program failed" or not alike(theirs, mine):
            return f"outcome {i}\n  standard library: {theirs}\n  xpool:            {mine}"
    if len(standard) != len(ours):
        return f"{len(standard)} outcomes over the standard library, {len(ours)} over xpool"
    return None


def alike(theirs: Any, mine: Any) -> bool:
    """Return whether two outcomes are the same for a caller that catches errors."""
    if theirs[0] != mine[0]:
        return False
    if theirs[0] == "refused":
        return theirs[1] in mine[2]
    if theirs[0] == "each":
        pairs = list(zip(theirs[1], mine[1]))
        return len(theirs[1]) == len(mine[1]) and all(alike(a, b) for a, b in pairs)
    if theirs[0] != "raised":
        return bool(theirs == mine)
    same = ("type", "args", "state", "cause")
    return all(theirs[1][name] == mine[1][name] for name in same)
