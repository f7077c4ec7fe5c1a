"""Permits beside hosts as workers with slots, in virtual time: a table for docs/dev/hosts.md.

The hosts are those of `scale`.  Each policy but the first leaves something out of `HostScheduler`::

    python -m tests.simulation.slots
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from xpool._hosts.hosts_scheduler import AHEAD_BYTES, HostScheduler, Message

from .scale import UPLINK, Cluster

__all__ = ["Slots"]


class Slots(HostScheduler):
    """A host has slots.  It may begin what it holds, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.quotas.room_staged = lambda host: 0  # type: ignore[method-assign]

    def look(self, number: int) -> list[Message]:
        return []

    def _from_another(self, *_: Any) -> None:
        return None


class Asked(Slots):
    """Each slot has an item ahead.  Idle hosts get unbegun items of others, which are sent
    again."""

    def __init__(self) -> None:
        super().__init__()
        quotas, extra = self.quotas, self.quotas.extra
        quotas.extra = lambda host: (  # type: ignore[method-assign]
            max(1, extra(host)) if host.nbytes < AHEAD_BYTES and quotas.cost < math.inf else 0
        )

    def _from_another(self, *how: Any) -> Any:
        return HostScheduler._from_another(self, *how)

    def unbegun(self, number: int, kept: int, *which: int) -> list[Message]:
        found = super().unbegun(number, kept, *which)
        host = self.hosts.get(number)
        for batch in () if host is None else list(host.staged):
            self._drop(host, [batch], found)  # type: ignore[arg-type]
        return found


POLICIES: dict[str, Callable[[], HostScheduler]] = {
    "permits": HostScheduler,
    "slots": Slots,
    "slots, taken back": Asked,
}


class Work(NamedTuple):
    """A job: the seconds of its tasks, and the bytes of the arguments of each."""

    takes: Callable[[random.Random], list[float]]
    nbytes: int = 64
    hosts: int = 20
    workers: int = 8
    loses: float = 0.5


def around(seconds: float, n: int) -> Callable[[random.Random], list[float]]:
    return lambda draw: [seconds * (0.5 + draw.random()) for _ in range(n)]


def exponential(seconds: float, n: int) -> Callable[[random.Random], list[float]]:
    # A worker needs some time for the shortest task, too.
    return lambda draw: [5e-5 + draw.expovariate(1 / seconds) for _ in range(n)]


WORKS = {
    "10 ms": Work(lambda draw: [0.01] * 10_000),
    "10 ms, exponential": Work(exponential(0.01, 10_000)),
    "10 ms, and 20 of 1 s": Work(
        lambda draw: draw.sample([0.01] * 9_980 + [1.0] * 20, 10_000),
    ),
    "1 ms, exponential": Work(exponential(0.001, 100_000)),
    "5,000 of 1 ms, then 480 of 1 s": Work(lambda draw: [0.001] * 5_000 + [1.0] * 480, loses=0.93),
    "10,000 of 1 ms, then 4,800 of 1 s": Work(
        lambda draw: [0.001] * 10_000 + [1.0] * 4_800, loses=0.75
    ),
    "1 s, exponential": Work(exponential(1.0, 2_000)),
    "10 ms, 0.1 MB": Work(around(0.01, 10_000), 100_000),
    "10 ms, 10 MB": Work(around(0.01, 1_000), 10_000_000),
    "1 s, 10 MB": Work(around(1.0, 1_000), 10_000_000),
    "0.5 s, 60 MB, 4 hosts of 1 worker": Work(around(0.5, 100), 60_000_000, 4, 1),
}


def main() -> None:
    """Print the table: medians of several draws."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.slots", description=__doc__)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--only", default="", help="a part of a job's name")
    options = parser.parse_args()
    columns = "tasks", "policy", "time / ideal", "tail, s", "lost", "begun", "sent"
    print("|", " | ".join(columns), "|\n|---|---|--:|--:|--:|--:|--:|")
    for name, work in WORKS.items():
        for policy, make in POLICIES.items() if options.only in name else ():
            rows = []
            for seed in range(options.draws):
                takes = work.takes(random.Random(seed))
                one, losing = (
                    Cluster(
                        work.hosts, takes, 0.002, loses=loses, workers=work.workers,
                        nbytes=work.nbytes, sched=make(),
                    ).run()
                    for loses in (None, work.loses)
                )  # fmt: skip
                ideal = max(
                    sum(takes) / work.hosts / work.workers,
                    max(takes),
                    len(takes) * work.nbytes / UPLINK,
                )
                rows.append((one.seconds / ideal, one.tail, losing.lost, losing.begun, one.sent))
            over, tail, lost, begun, sent = map(statistics.median, zip(*rows, strict=True))
            print(f"| {name} | {policy} | {over:.2f} | {tail:.2f} | {lost:.0f} | {begun:.0f} "
                  f"| {sent:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
