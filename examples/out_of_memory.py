"""Files of unequal size: the one that is too large beside others runs again alone.

Each worker may have 400 MB.  The pool ends the worker that reads the largest file, and runs that
task again when no other task runs; then it may have the memory of both workers.

    python examples/out_of_memory.py
"""

from __future__ import annotations

import argparse
import time

import xpool

WORKER_MEMORY = 400


def load(megabytes: int) -> int:
    """Stand in for a program that reads a file of this size and works for a while."""
    block = bytearray(megabytes * 2**20)
    time.sleep(0.5)  # longer than the pool takes to notice
    return len(block) // 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=int, default=500, help="megabytes of the largest file")
    sizes = [20, parser.parse_args().largest, 40, 30]
    with xpool.Pool(2, worker_memory=f"{WORKER_MEMORY}MB") as pool:
        found = pool.map(load, sizes, chunksize=1, retries=1, on_error="return")
        report = pool.report()
    for size, one in zip(sizes, found, strict=True):
        print(f"{size} MB: {'loaded' if one == size else type(one).__name__}")
    print(f"{report.deaths} deaths, {report.retries} retries")
    print(f"at most in load(): {report.peaks['load()'] / 2**20:.0f} MB")
