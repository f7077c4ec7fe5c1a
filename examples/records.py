"""Log files to records: each file gives many, and the program never has all of them in memory.

Counts the records of each level in many files, and checks this against a plain loop.  Then looks
for the first error, in the order of the files, and stops there.

    python examples/records.py
"""

from __future__ import annotations

import argparse
import collections
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xpool

LEVELS = "debug", "info", "warning", "error"


class Record(NamedTuple):
    level: str
    seconds: float
    text: str


def write_log(path: Path, lines: int) -> None:
    """Write a log of random lines."""
    rng = random.Random(path.name)
    with path.open("w") as file:
        for i in range(lines):
            level = rng.choices(LEVELS, (80, 15, 4, 1))[0]
            file.write(f"{i * 0.25:.2f} {level} request {rng.randrange(10**6)}\n")


def records(path: Path) -> Iterator[Record]:
    """Parse a log, line by line."""
    with path.open() as file:
        for line in file:
            seconds, level, text = line.rstrip().split(" ", 2)
            if level != "debug":
                yield Record(level, float(seconds), text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--lines", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, xpool.Pool() as pool:
        logs = [Path(folder, f"{i:04}.log") for i in range(options.files)]
        pool.starmap(write_log, [(log, options.lines) for log in logs])
        found = pool.imap(records, logs, yields=True, buffersize=10_000)
        counts = collections.Counter(record.level for record in found)
        for level in LEVELS[1:]:
            print(f"{level}: {counts[level]:,}")
        plain = collections.Counter(record.level for log in logs for record in records(log))
        assert counts == plain
        print("checked: a plain loop finds the same")
        # The first error of all: the other generators are closed, with their files.
        for record in pool.imap(records, logs, yields=True, buffersize=100):
            if record.level == "error":
                print(f"first error: at {record.seconds} s, {record.text}")
                break
