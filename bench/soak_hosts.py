"""Run the load of `bench.soak` on hosts of a Ray cluster, while workers and hosts are killed.

``python -m bench.soak_hosts [--minutes N] [--kill-every S] [--remove-every S] [--seed N]``.  Needs
``pip install xpool[ray]``.  The cluster is three raylets on this machine.  Workers are killed at a
fixed interval.  At a longer one, a host is killed and a new host is added.  The program prints what
went wrong and exits with status 1 if a task is unanswered, answered twice or answered wrongly, if a
task with retries fails, or if actors, processes, shared memory or threads are left at the end.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.soak import PATIENCE, Book, Load, laps, square
from xpool.testing._leaks import Snapshot, mark_this_run

HEAD, CPUS, STORE = "127.0.0.2", 8, 150 << 20

QUICK = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray's settings: it notices the loss of a host within seconds, but does not take a busy host for
a lost one."""

AT_REST = 120.0
"""Seconds within which the pool must become idle."""


class HostLoad(Load):
    """The load of one thread, in which tasks with retries must not fail."""

    def __init__(self, book: Book, pools: list[Any], seed: int) -> None:
        super().__init__(book, pools, None, seed)
        self.kinds.remove(self.share)  # hosts share no memory

    def retried(self) -> None:
        numbers = self.book.numbers(50)
        again = self.pool().map_async(square, numbers, 1, retries=30, timeout=30)
        try:
            right = again.get(2 * PATIENCE) == [(x, x * x) for x in numbers]
        except BaseException as error:
            self.book.complain(f"with retries: {type(error).__name__}: {error}")
            right = False
        else:
            if not right:
                self.book.complain("with retries: wrong results")
        self.book.end("result" if right else "wrong", len(numbers))


class Cluster:
    """Three hosts: the driver's host stays, the two others are replaced."""

    def __init__(self) -> None:
        os.environ.update(QUICK)
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        import ray
        from ray.cluster_utils import Cluster as RayCluster

        head = {
            "num_cpus": CPUS, "object_store_memory": STORE, "include_dashboard": False,
            "node_ip_address": HEAD,
        }  # fmt: skip
        self._cluster = RayCluster(initialize_head=True, head_node_args=head)
        self._numbers = itertools.count(3)
        self.others: list[Any] = []
        self.grow(), self.grow()
        ray.init(
            address=self._cluster.address, _node_ip_address=HEAD, log_to_driver=False,
            logging_level="ERROR",
        )  # fmt: skip

    def grow(self) -> None:
        address = f"127.0.0.{3 + next(self._numbers) % 250}"
        self.others.append(
            self._cluster.add_node(
                num_cpus=CPUS, object_store_memory=STORE, node_ip_address=address
            )
        )

    def shrink(self) -> None:
        """Kill the processes of the oldest host."""
        self._cluster.remove_node(self.others.pop(0), allow_graceful=False)

    def actors(self) -> list[str]:
        """Return the actors that are alive."""
        from ray._private.state import actors  # the public function needs Ray's dashboard

        return [str(one) for one in actors().values() if one["State"] == "ALIVE"]

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


class Faults:
    """Kills workers and replaces hosts at fixed intervals."""

    def __init__(self, pool: Any, cluster: Cluster, kill: float, remove: float, seed: int) -> None:
        self.pool, self.cluster, self.kill, self.remove = pool, cluster, kill, remove
        self.chance = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self._removed = time.monotonic()

    def run(self, until: float) -> None:
        """Cause faults until then."""
        pause = threading.Event()
        due = time.monotonic()
        while due < until:
            due += self.kill
            pids = [pid for pid in self.pool.statistics()["pids"] if pid]
            if pids:
                try:
                    os.kill(self.chance.choice(pids), signal.SIGKILL)
                except ProcessLookupError:
                    self.counts["too late"] += 1
                else:
                    self.counts["workers"] += 1
            if time.monotonic() >= self._removed + self.remove:
                self.cluster.shrink()
                self.cluster.grow()
                self._removed = time.monotonic()
                self.counts["hosts"] += 1
            pause.wait(max(0.0, due - time.monotonic()))


def eventually(what: Callable[[], Any], seconds: float) -> bool:
    """Wait up to ``seconds`` until a condition is true; return whether it became true."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def at_rest(pool: Any) -> bool:
    """Return whether the pool is idle."""
    found = pool.statistics()
    return not found["running"] and not found["waiting"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kill-every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--remove-every", type=float, default=30.0, help="the same for hosts")
    parser.add_argument("--threads", type=int, default=2, help="threads that submit tasks")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args()
    print(f"seed {asked.seed}, {asked.minutes:g} minutes", flush=True)
    mark_this_run()
    import xpool.ray

    cluster = Cluster()
    before = Snapshot.take()
    before.fds = dict.fromkeys(range(1 << 16), "")  # Ray keeps connections to former hosts
    book = Book()
    pool = xpool.Pool(hosts=xpool.ray.hosts(per_host=2))
    faults = Faults(pool, cluster, asked.kill_every, asked.remove_every, asked.seed)
    loads = [HostLoad(book, [pool], asked.seed + i + 1) for i in range(asked.threads)]
    begin = time.monotonic()
    for seconds in laps(asked.minutes * 60):
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=one.run, args=(until,)) for one in loads]
        for thread in threads:
            thread.start()
        faults.run(until)  # Ray can start a host in the main thread only
        for thread in threads:
            thread.join()
        if not eventually(lambda: at_rest(pool), AT_REST):
            book.complain(f"not idle after {AT_REST:g} s: {pool}")
        print(
            f"{time.monotonic() - begin:5.0f} s  {book.submitted:8} tasks  {dict(faults.counts)}  "
            f"{len(book.wrong)} wrong",
            flush=True,
        )
    minutes = (time.monotonic() - begin) / 60
    pool.close()
    pool.join(PATIENCE)
    left: list[str] = []
    if not eventually(lambda: not cluster.actors(), 20.0):
        left += cluster.actors()
    left += before.leaks(10.0)
    cluster.close()
    answered = sum(book.ends.values())
    print(f"\n{minutes:.1f} minutes, {dict(faults.counts)} killed")
    print(f"{book.submitted} tasks submitted, {answered} answered: {dict(book.ends.most_common())}")
    print(f"{book.unanswered} unanswered, {book.twice} answered twice, {len(book.wrong)} wrong")
    for what in [*book.wrong[:20], *left]:
        print("  ", what)
    if book.wrong or left or answered != book.submitted:
        sys.exit(1)
    print("no errors")


if __name__ == "__main__":
    main()
