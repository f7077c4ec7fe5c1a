"""Run histories from the command line; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import time

import pytest

from . import mutants_hosts  # noqa: F401 - adds to MUTANTS
from .engine import EngineWorld
from .hosts import HostWorld
from .mutants import MUTANTS, PINNED
from .scheduler import SchedulerWorld
from .seeds import SimulationFailed, World, search

WORLDS: dict[str, type[World]] = {
    world.name: world for world in (SchedulerWorld, EngineWorld, HostWorld)
}


def main() -> int:
    """Replay one seed, or search for a failing one; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("world", choices=sorted(WORLDS))
    parser.add_argument("seed", type=int, nargs="?", help="replay this history and tell it")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to try (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--mutant", metavar="NAME", help="with this bug planted")
    options = parser.parse_args()
    kind = WORLDS[options.world]
    if options.mutant is not None:
        known = {str(one): one for one in (*MUTANTS, *PINNED)}
        if options.mutant not in known:
            parser.error("there is no such mutant; these are: " + "; ".join(known))
        known[options.mutant].seed(pytest.MonkeyPatch())
    if options.seed is not None:
        world = kind(options.seed)
        try:
            world.run()
        except SimulationFailed as failure:
            print("\n".join(failure.history), failure.what, sep="\n")
            return 1
        print("\n".join(world.history()), "all is well", sep="\n")
        return 0
    start = time.perf_counter()
    found = search(kind, range(options.first, options.first + options.seeds))
    if found is not None:
        print(found)
        return 1
    took = time.perf_counter() - start
    print(f"{options.seeds} histories, all is well; {options.seeds / took:.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
