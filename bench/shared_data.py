"""Measure the memory of ten million strings in a program and four workers, and of one access.

Each kind is read as a whole by four workers in a process of its own: a plain list as a global of a
fork, a plain list in torch's loader, a numpy array of packed strings, and `SharedList`.  The memory
is the proportional set size (PSS) of the program and its workers, less that of a program with
workers and without data.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKERS = 4
KINDS = ("nothing", "list", "torch", "packed", "SharedList")

data: Any = None


def strings(count: int) -> Iterator[str]:
    """Names of files, as in a dataset."""
    numbers = random.Random(0)
    return (f"images/{n % 1000:03}/{numbers.getrandbits(48):012x}.jpg" for n in range(count))


class Packed:
    """Strings in one array of bytes, with the places of their ends in another."""

    def __init__(self, items: Iterator[str]) -> None:
        import numpy as np

        parts = [item.encode() for item in items]
        self.ends = np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)))
        self.bytes = np.frombuffer(b"".join(parts), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        begin = self.ends[i - 1] if i else 0
        return str(self.bytes[begin : self.ends[i]].tobytes().decode())


def make(kind: str, count: int) -> Any:
    if kind == "SharedList":
        import xpool

        return xpool.SharedList(strings(count))
    if kind == "packed":
        return Packed(strings(count))
    return list(strings(0 if kind == "nothing" else count))


def read(part: int) -> int:
    """Read each fourth item, the first of which is number ``part``; return the sum of lengths."""
    held = data
    return sum(len(held[i]) for i in range(part, len(held), WORKERS))


def pss(pids: list[int]) -> int:
    """Return the proportional set size of processes in bytes."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def children() -> list[int]:
    """Return the children of this process, and theirs."""
    found, todo = [], [os.getpid()]
    while todo:
        pid = todo.pop()
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        todo += map(int, below)
        found += map(int, below)
    return found


def one(kind: str, count: int) -> None:
    """Print the seconds to make the data, bytes of memory, and microseconds of an access."""
    global data
    begin = time.perf_counter()
    data = make(kind, count)
    made = time.perf_counter() - begin
    if kind == "torch":
        from torch.utils.data import DataLoader

        loader = DataLoader(data, batch_size=1000, num_workers=WORKERS, collate_fn=len)
        batches = iter(loader)
        for number in range((len(data) + 999) // 1000):
            if number == (len(data) + 999) // 1000 - 3:  # all workers are alive
                used = pss([os.getpid(), *children()])
            next(batches)
    elif kind == "SharedList":
        import xpool

        with xpool.Pool(WORKERS) as pool:
            pool.map(read, range(WORKERS), 1)
            used = pss([os.getpid(), *children()])
    else:
        with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
            pool.map(read, range(WORKERS), 1)
            used = pss([os.getpid(), *children()])
    places = random.Random(1).choices(range(max(1, len(data))), k=100_000 if len(data) else 0)
    begin = time.perf_counter()
    for i in places:
        data[i]
    access = (time.perf_counter() - begin) / max(1, len(places))
    print(made, used, access * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000_000)
    parser.add_argument("--kind", choices=KINDS)
    options = parser.parse_args()
    if options.kind is not None:
        one(options.kind, options.count)
        return
    found: dict[str, list[float]] = {}
    for kind in KINDS:
        command = [sys.executable, "-m", "bench.shared_data", "--kind", kind, "--count"]
        done = subprocess.run(
            [*command, str(options.count)], check=True, capture_output=True, text=True
        )
        found[kind] = list(map(float, done.stdout.split()))
    empty = found.pop("nothing")[1]
    print(f"| {options.count:,} strings | made, s | memory, MB | access, us |\n|---|---|---|---|")
    for kind, (made, used, access) in found.items():
        print(f"| {kind} | {made:.1f} | {(used - empty) / 1e6:,.0f} | {access:.2f} |")


if __name__ == "__main__":
    main()
