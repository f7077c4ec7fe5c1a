"""Measure microseconds of short calls on an idle machine, and beside other work on each core.

Rows: `apply`, `apply_async` and `get`, `map` of 8, `imap` of 8, `submit().result()`, each with a
task that does nothing, of two workers.  States: nothing else runs; a loop without end runs on each
core with the same priority; such loops run with the lowest priority (`nice 19`).  Each peer is in a
process of its own, and they take turns in short rounds.  The table shows the median of all rounds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib.util
import multiprocessing
import multiprocessing.pool
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import xpool
from bench.tasks import noop

WORKERS = 2
SECONDS = 0.05  # of one round of one row
EIGHT = list(range(8))

STATES: dict[str, int | None] = {"idle": None, "busy": 0, "busy, niced": 19}
"""By name: the niceness of the loop on each core; None: no loop."""

OF_POOLS: dict[str, Callable[[Any], object]] = {
    "apply": lambda pool: pool.apply(noop),
    "apply_async, get": lambda pool: pool.apply_async(noop).get(),
    "map of 8": lambda pool: pool.map(noop, EIGHT),
    "imap of 8": lambda pool: list(pool.imap(noop, EIGHT)),
}
OF_EXECUTORS: dict[str, Callable[[Any], object]] = {
    "map of 8": lambda executor: list(executor.map(noop, EIGHT)),
    "submit, result": lambda executor: executor.submit(noop).result(),
}
ROWS = [*OF_POOLS, "submit, result"]

BURN = "import os\nos.nice({nice})\nprint(flush=True)\nwhile os.getppid() == {parent}: pass"


def _loky() -> Any:
    from loky import get_reusable_executor

    return get_reusable_executor(WORKERS, timeout=None)


PROCESSES: dict[str, list[Callable[[], Any]]] = {
    "fork": [lambda: multiprocessing.get_context("fork").Pool(WORKERS)],
    "futures": [lambda: concurrent.futures.ProcessPoolExecutor(WORKERS)],
    "fork server": [lambda: multiprocessing.get_context("forkserver").Pool(WORKERS)],
    "loky": [_loky],
    "xpool": [lambda: xpool.Pool(WORKERS), lambda: xpool.Executor(WORKERS)],
}
"""The pools and executors of each peer."""

THREADS: dict[str, list[Callable[[], Any]]] = {
    "ThreadPool": [lambda: multiprocessing.pool.ThreadPool(WORKERS)],
    "ThreadPoolExecutor": [lambda: concurrent.futures.ThreadPoolExecutor(WORKERS)],
    "xpool's threads": [
        lambda: xpool.ThreadPool(WORKERS),
        lambda: xpool.ThreadPool(WORKERS).executor(),
    ],
}


@contextmanager
def burners(nice: int | None) -> Iterator[None]:
    """Run a loop without end on each core that this process may use."""
    cores = () if nice is None else sorted(os.sched_getaffinity(0))
    loops = []
    try:
        for core in cores:
            text = BURN.format(nice=nice, parent=os.getpid())
            loop = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
            loops.append(loop)
            os.sched_setaffinity(loop.pid, {core})
            assert loop.stdout is not None
            loop.stdout.readline()
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
            assert loop.stdout is not None
            loop.stdout.close()


def calls_of(pools: list[Any]) -> dict[str, Callable[[], object]]:
    """Return the rows that a peer can do."""
    found: dict[str, Callable[[], object]] = {}
    for pool in reversed(pools):
        rows = OF_POOLS if hasattr(pool, "apply") else OF_EXECUTORS
        found.update((name, functools.partial(row, pool)) for name, row in rows.items())
    return found


def serve(makers: list[Callable[[], Any]]) -> None:
    """Measure the rows that are named on stdin, and print the mean microseconds of a call."""
    pools = [make() for make in makers]
    calls = calls_of(pools)
    print(*calls, sep=";", flush=True)
    for line in sys.stdin:
        call, done, begin = calls[line.strip()], 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < SECONDS:
            call()
            done += 1
        print((now - begin) / done * 1e6, flush=True)
    for pool in pools:
        (pool.terminate if hasattr(pool, "terminate") else pool.shutdown)()


class Peer:
    """The process of a peer."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "bench.short_calls", "--peer", name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ask, self._answer = self._process.stdin, self._process.stdout
        self.rows = self._answer.readline().strip().split(";")

    def measure(self, row: str) -> float:
        print(row, file=self._ask, flush=True)
        return float(self._answer.readline())

    def close(self) -> None:
        self._ask.close()
        self._process.wait()
        self._answer.close()


def measure(peers: dict[str, Peer], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the times of all rounds by row and peer."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for row in ROWS:
            for name, peer in peers.items():
                if row in peer.rows:
                    cost = peer.measure(row)
                    if number:  # the first round warms up
                        found.setdefault((row, name), []).append(cost)
    return found


def show(state: str, names: list[str], found: dict[tuple[str, str], list[float]]) -> None:
    print(f"\n| {state}, us | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for row in ROWS:
        times = [found.get((row, name)) for name in names]
        cells = [f"{statistics.median(one):,.0f}" if one else "-" for one in times]
        print(f"| {row} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--states", default="idle;busy;busy, niced", help="separated by semicolons")
    makers = {**PROCESSES, **THREADS}
    parser.add_argument("--peer", choices=makers, help="used by the program itself")
    options = parser.parse_args()
    if options.peer is not None:
        serve(makers[options.peer])
        return
    if importlib.util.find_spec("loky") is None:
        del makers["loky"]
        print("loky is not installed")
    peers = {name: Peer(name) for name in makers}
    try:
        for state in options.states.split(";"):
            with burners(STATES[state]):
                for kind in (PROCESSES, THREADS):
                    some = {name: peers[name] for name in kind if name in peers}
                    show(state, list(some), measure(some, options.rounds))
    finally:
        for peer in peers.values():
            peer.close()


if __name__ == "__main__":
    main()
