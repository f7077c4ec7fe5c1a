"""Compare ``num_workers="auto"`` with fixed numbers: `python -m bench.loader_workers`.

Each row is a dataset and a program that uses its batches.  Each loader has persistent workers, and
runs the same epochs, in turns.  Printed for each number of workers:

    rate        batches a second, the median of the epochs after the first two
    waited      the share of this time that the program waited for batches
    CPU         processor milliseconds for a batch, of the program and its workers
    workers     how many it has at the end
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from bench.loaders import cpu_seconds
from xpool._memory.system import default_processes
from xpool.data import DataLoader

BATCH = 8


def sleep(i: int) -> Any:
    """Wait as for a file of a distant disk."""
    time.sleep(0.002)
    return torch.full((64,), float(i))


def compute(i: int) -> Any:
    """Use a core for about 2 ms."""
    total, until = 0, time.thread_time() + 0.002
    while time.thread_time() < until:
        total += 1
    return torch.full((64,), float(i))


def cheap(i: int) -> Any:
    return torch.full((64,), float(i))


class Row(NamedTuple):
    """A dataset, and the seconds for which the program uses each batch, as a device would."""

    make: Callable[[int], Any]
    use: float


ROWS = {
    "the program is slow, computing": Row(compute, 0.04),
    "the program is fast, computing": Row(compute, 0.002),
    "the program is fast, sleeping": Row(sleep, 0.002),
    "both are fast": Row(cheap, 0.0),
}


class Made(Dataset[Any]):
    """Items that a function makes of their indices."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


class Run:
    """A loader, and the figures of its epochs."""

    def __init__(self, row: Row, workers: Any, batches: int, threads: bool) -> None:
        self.row, self.batches = row, batches
        self.loader: Any = DataLoader(
            Made(row.make, batches * BATCH), BATCH, num_workers=workers,
            persistent_workers=workers != 0, workers="thread" if threads else "process",
        )  # fmt: skip
        self.seconds: list[float] = []
        self.waited: list[float] = []
        self.cpu: list[float] = []

    def epoch(self) -> None:
        cpu, begin = cpu_seconds(), time.perf_counter()
        for _ in self.loader:
            if self.row.use:
                time.sleep(self.row.use)
        self.seconds.append(time.perf_counter() - begin)
        self.cpu.append(cpu_seconds() - cpu)
        report = self.loader.report()
        self.waited.append(report.waited / report.seconds)

    def show(self, name: str, workers: Any) -> None:
        seconds, waited, cpu = (
            statistics.median(figures[2:]) for figures in (self.seconds, self.waited, self.cpu)
        )
        print(
            f"{name:32} {workers!s:>5}: {self.batches / seconds:8.1f}/s  waited {waited:4.0%}  "
            f"CPU {1000 * cpu / self.batches:6.2f} ms  workers {self.loader.report().workers}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows whose name has one of these words")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=150)
    parser.add_argument("--threads", action="store_true", help="threads instead of processes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    most = default_processes()
    numbers = ["auto", 0, *sorted({1, 2, most // 2, most} - {0})]
    for name, row in ROWS.items():
        if args.words and not any(word in name for word in args.words):
            continue
        runs = [Run(row, number, args.batches, args.threads) for number in numbers]
        for _ in range(args.epochs):
            for run in runs:
                run.epoch()
        for number, run in zip(numbers, runs):
            run.show(name, number)
        print(f"load {os.getloadavg()[0]:.1f} on {most} cores\n", flush=True)


if __name__ == "__main__":
    main()
