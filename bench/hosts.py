"""Compare pools on a Ray cluster: `python -m bench.hosts`.  Needs ``pip install xpool[ray]``.

The cluster is two raylets on this machine.  A pool of xpool with one worker on each takes turns
with `ray.util.multiprocessing.Pool`.  The program prints the medians and their ratio for each work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

HEAD = "127.0.0.2"

STORE = 2 * 1024**3
"""Bytes of each object store.  It must be large, because all wait for the disk when it is full, and
Ray's pool frees the results of an `imap` only at a garbage collection."""


def noop(x: Any) -> Any:
    return x


def stream(pool: Any, n: int) -> float:
    """Return tasks a second of an `imap` of no-ops."""
    begin = time.perf_counter()
    assert sum(1 for _ in pool.imap(noop, range(n), chunksize=1)) == n
    return n / (time.perf_counter() - begin)


def calls(pool: Any, n: int) -> float:
    """Return `apply` calls a second."""
    begin = time.perf_counter()
    for i in range(n):
        assert pool.apply(noop, (i,)) == i
    return n / (time.perf_counter() - begin)


def arrays(pool: Any, n: int) -> float:
    """Return arrays of 1 MiB a second to a worker and back."""
    array = np.ones(1 << 17)
    begin = time.perf_counter()
    for back in pool.imap(noop, [array] * n, chunksize=1):
        assert back[-1] == 1
    return n / (time.perf_counter() - begin)


WORKS: dict[str, tuple[Callable[[Any, int], float], int, int]] = {
    "no-op tasks of imap": (stream, 60_000, 2_000),
    "apply, one after the other": (calls, 200, 200),
    "arrays of 1 MiB there and back": (arrays, 200, 200),
}
"""By name: the function, and the numbers of tasks for xpool and for Ray's pool, which is slower."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="a part of a work's name")
    args = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.multiprocessing import Pool as RayPool

    import xpool.ray
    from xpool import Pool

    # Not 127.0.0.1, because Ray replaces that by the machine's other address.
    head = {
        "num_cpus": 2,
        "object_store_memory": STORE,
        "include_dashboard": False,
        "node_ip_address": HEAD,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, object_store_memory=STORE, node_ip_address="127.0.0.3")
    ray.init(
        address=cluster.address, _node_ip_address=HEAD, log_to_driver=False, logging_level="ERROR"
    )
    # Each host has one processor left, so Ray's pool gets a worker on each.  Otherwise both workers
    # might be on the driver's host, and no array would cross the network.
    ours = Pool(hosts=xpool.ray.hosts(per_host=1))
    theirs = RayPool(2, ray_remote_args={"num_cpus": 1})
    with ours, theirs:
        for name, (work, n, m) in WORKS.items():
            if args.only not in name:
                continue
            rates: tuple[list[float], list[float]] = [], []
            work(ours, m), work(theirs, m)
            for _ in range(args.turns):
                rates[0].append(work(ours, n))
                rates[1].append(work(theirs, m))
            mine, other = map(statistics.median, rates)
            print(f"{name}: {mine:,.0f}/s, Ray's {other:,.0f}/s, ratio {mine / other:.1f}")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
