"""Interactive requests beside a batch: with a priority, a request overtakes what waits.

Prints the longest time that a request took while the batch ran, without and with `priority=`.

    python examples/priorities.py
"""

from __future__ import annotations

import argparse
import time

import xpool

WORKERS, TASK_SECONDS, REQUESTS = 2, 0.02, 5


def work(x: int) -> int:
    time.sleep(TASK_SECONDS)
    return x


def longest_request(pool: xpool.Pool, items: int, priority: int) -> float:
    """Return the seconds of the slowest of a few requests beside a batch."""
    batch = pool.map_async(work, range(items), chunksize=1)
    seconds = []
    for number in range(REQUESTS):
        start = time.perf_counter()
        assert pool.apply(work, (number,), priority=priority) == number
        seconds.append(time.perf_counter() - start)
    assert batch.get() == list(range(items))
    return max(seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=200)
    items = parser.parse_args().items
    with xpool.Pool(WORKERS) as pool:
        pool.map(work, range(WORKERS))
        for priority in 0, 1:
            slowest = longest_request(pool, items, priority)
            print(f"priority {priority}: the slowest request took {slowest:.2f} s")
