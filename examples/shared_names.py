"""The names of a million files in each worker: as a list, and as a `SharedList`.

Prints how much memory each worker has for itself, after it has read all names.

    python examples/shared_names.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import xpool

WORKERS = 2


def private_megabytes() -> float:
    """Return the memory of this process that no other process uses."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1000


def letters_of_list(_worker: int) -> tuple[int, float]:
    return sum(map(len, plain)), private_megabytes()


def letters_of_shared(_worker: int) -> tuple[int, float]:
    return sum(map(len, shared)), private_megabytes()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", type=int, default=1_000_000)
    count = parser.parse_args().names
    plain = [f"images/{i % 1000:03}/{i:012x}.jpg" for i in range(count)]
    shared = xpool.SharedList(plain)
    for function in letters_of_list, letters_of_shared:
        with xpool.Pool(WORKERS) as pool:
            letters, memory = zip(*pool.map(function, range(WORKERS), chunksize=1))
        assert set(letters) == {sum(map(len, plain))}
        print(f"{function.__name__}: {max(memory):.0f} MB for each of {WORKERS} workers")
    print(f"{shared}: in memory once")
