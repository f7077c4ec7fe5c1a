"""Measure how much the report and `progress` slow down a stream of empty tasks.

    python -m bench.observing [rounds]

Each round times `imap_unordered` of an empty function with both, with the report alone, and with
neither.  A pool always keeps its report, so for "neither" its method that records an answer is
replaced.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from xpool import Pool
from xpool._engine.ledger import Ledger

ITEMS = 60_000


def nothing(_: int) -> None:
    """An empty task."""


def stream(pool: Any, **options: Any) -> float:
    begun = time.perf_counter()
    for _ in pool.imap_unordered(nothing, range(ITEMS), **options):
        pass
    return time.perf_counter() - begun


def ignore(*_: Any) -> None:
    """Replaces `Ledger.answered`, and does nothing."""


def main(rounds: int = 9) -> None:
    """Print the ratios."""
    noting = Ledger.answered
    ways: dict[str, tuple[dict[str, Any], Callable[..., None]]] = {
        "nothing": ({}, ignore),
        "report": ({}, noting),
        "report and progress": ({"progress": lambda done, total: None}, noting),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with Pool(2) as pool:
        stream(pool)
        for _ in range(rounds):
            for name, (options, note) in ways.items():
                Ledger.answered = note  # type: ignore[method-assign]
                times[name].append(stream(pool, **options))
    base = statistics.median(times["nothing"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:20} {ITEMS / median:10,.0f} tasks/s  {median / base - 1:+6.1%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
