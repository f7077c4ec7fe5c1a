"""Pools on a Ray cluster: `python -m bench.hosts`.  Needs ``pip install xpool[ray]``.

A cluster of two raylets on this machine, one worker each.  xpool over these hosts takes turns with
`ray.util.multiprocessing.Pool`; prints a line for each work: medians, and their ratio.
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
"""Bytes of each object store.  Where that is full, all have to wait for the disk, and Ray's pool
lets go of what an `imap` has brought only when the garbage collector comes."""


def noop(x: Any) -> Any:
    """Return the argument."""
    return x


def stream(pool: Any, n: int) -> float:
    """Return the tasks a second of an `imap` of no-ops."""
    begin = time.perf_counter()
    assert sum(1 for _ in pool.imap(noop, range(n), chunksize=1)) == n
    return n / (time.perf_counter() - begin)


def calls(pool: Any, n: int) -> float:
    """Return the `apply` calls a second."""
    begin = time.perf_counter()
    for i in range(n):
        assert pool.apply(noop, (i,)) == i
    return n / (time.perf_counter() - begin)


def arrays(pool: Any, n: int) -> float:
    """Return how many arrays of 1 MiB go there and back a second."""
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
"""What is done: how many times by xpool, and by Ray's pool, which would take minutes for more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="works whose name has this in it")
    args = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.multiprocessing import Pool as RayPool

    import xpool.ray
    from xpool import Pool

    # On loopback; Ray takes 127.0.0.1 for "this machine, by its other address".
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
    # A processor each, of which each host has one left: else Ray may place both workers beside the
    # driver, where no array crosses a network.
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
