"""Measure the parent's CPU time for a task, with many tasks and with many workers.

This is `time.process_time()` of all the parent's threads, without the workers.  It should not grow
with the number of queued tasks or of workers.  The program also measures the CPU time of an idle
pool, and the time to replace a dead worker.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench import tasks
from bench.procs import cpu_seconds, descendants
from xpool import Pool

MIN_TASKS = 20_000
"""Smaller batches are repeated up to this number, because the clock is coarse."""
Verb = Callable[[Any, int], None]


def _imap_unordered(pool: Any, count: int) -> None:
    got = 0
    for _result in pool.imap_unordered(tasks.noop, range(count)):
        got += 1
    _check(got, count)


def _map(pool: Any, count: int) -> None:
    _check(len(pool.map(tasks.noop, range(count), chunksize=1)), count)


def _apply_async(pool: Any, count: int) -> None:
    handles = [pool.apply_async(tasks.noop) for _ in range(count)]
    for handle in handles:
        handle.get(60)


def _check(got: int, count: int) -> None:
    if got != count:
        raise AssertionError(f"{got} results for {count} tasks")


VERBS: dict[str, Verb] = {
    "imap_unordered": _imap_unordered,
    "map, chunksize 1": _map,
    "apply_async": _apply_async,
}


def cost(verb: str, count: int, workers: int, repeats: int) -> dict[str, Any]:
    """Measure the parent's CPU microseconds for a task, and tasks a second."""
    run = VERBS[verb]
    batches = max(1, MIN_TASKS // count)
    cpu, wall = [], []
    with Pool(workers) as pool:
        run(pool, 1000)
        for _ in range(repeats):
            begin_cpu, begin = time.process_time(), time.perf_counter()
            for _ in range(batches):
                run(pool, count)
            cpu.append((time.process_time() - begin_cpu) / (batches * count))
            wall.append(batches * count / (time.perf_counter() - begin))
    return {
        "verb": verb,
        "tasks": count,
        "workers": workers,
        "cpu_us": statistics.median(cpu) * 1e6,
        "tasks_per_second": statistics.median(wall),
    }


def idle(seconds: float) -> dict[str, float]:
    """Measure the CPU seconds that the parent and the workers of an idle pool use."""
    with Pool(2) as pool:
        pool.map(tasks.noop, range(1000))
        below = descendants(os.getpid())
        begin, begin_below = time.process_time(), sum(map(cpu_seconds, below))
        time.sleep(seconds)
        used, used_below = time.process_time() - begin, sum(map(cpu_seconds, below))
    return {"seconds": seconds, "parent_cpu": used, "workers_cpu": used_below - begin_below}


def replacement(times: int) -> dict[str, Any]:
    """Measure milliseconds from the kill of an idle worker to an answer of its successor."""
    found = []
    with Pool(2) as pool:
        for _ in range(times):
            old: set[int] = set()
            while len(old) < 2:
                handles = [pool.apply_async(tasks.who) for _ in range(8)]
                old |= {handle.get(10) for handle in handles}
            begin = time.monotonic()
            os.kill(min(old), signal.SIGKILL)
            while True:
                handles = [pool.apply_async(tasks.who) for _ in range(2)]
                if {handle.get(10) for handle in handles} - old:
                    break
            found.append((time.monotonic() - begin) * 1e3)
    return {"times": times, "median_ms": statistics.median(found), "max_ms": max(found)}


def _cases(quick: bool) -> list[tuple[str, int, int]]:
    """The cases to measure: (verb, tasks, workers)."""
    many = [1_000, 100_000] if quick else [1_000, 100_000, 1_000_000]
    some = [1_000, 10_000] if quick else [1_000, 10_000, 100_000]
    crowd = [2, 8] if quick else [2, 8, 64]
    cases = [(verb, count, 2) for verb in ("imap_unordered", "map, chunksize 1") for count in many]
    cases += [("apply_async", count, 2) for count in some]
    cases += [("imap_unordered", 100_000, workers) for workers in crowd if workers != 2]
    cases += [("apply_async", 10_000, workers) for workers in crowd if workers != 2]
    return cases


def _spread(costs: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """For each verb, the highest cost divided by the lowest, by queued tasks and by workers."""
    found = []
    for verb in VERBS:
        mine = [c for c in costs if c["verb"] == verb]
        queued = [c["cpu_us"] for c in mine if c["workers"] == 2]
        found.append((f"{verb}: by tasks queued", max(queued) / min(queued)))
        sizes = {c["tasks"] for c in mine if c["workers"] != 2}
        crowd = [c["cpu_us"] for c in mine if c["tasks"] in sizes]
        if crowd:
            found.append((f"{verb}: by workers", max(crowd) / min(crowd)))
    return found


def table(report: dict[str, Any]) -> str:
    """Format the report as markdown."""
    lines = ["| verb | tasks | workers | parent's CPU, us a task | tasks/s |", "|---" * 5 + "|"]
    lines += [
        f"| {c['verb']} | {c['tasks']:,} | {c['workers']} | {c['cpu_us']:.2f} "
        f"| {c['tasks_per_second']:,.0f} |"
        for c in report["costs"]
    ]
    lines += ["", "| highest cost / lowest cost | |", "|---|---|"]
    lines += [f"| {what} | {ratio:.2f} |" for what, ratio in report["spread"]]
    rest, death = report["idle"], report["replacement"]
    idle_words = (
        f"In {rest['seconds']:g} idle seconds, the parent used {rest['parent_cpu'] * 1e3:.1f} ms "
        f"of CPU time, and its processes {rest['workers_cpu'] * 1e3:.0f} ms."
    )
    death_words = (
        "The successor of a killed worker answered after "
        f"{death['median_ms']:.1f} ms (median of {death['times']}; at most "
        f"{death['max_ms']:.1f} ms)."
    )
    return "\n".join([*lines, "", idle_words, death_words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument(
        "--repeats", type=int, default=3, help="measurements of each case (default: 3)"
    )
    parser.add_argument("--torch", action="store_true", help="import torch before")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    options = parser.parse_args()
    if options.torch:
        import torch  # noqa: F401
    costs = []
    for case in _cases(options.quick):
        costs.append(cost(*case, repeats=1 if case[1] >= 1_000_000 else options.repeats))
        print(*case, f"{costs[-1]['cpu_us']:.2f} us", file=sys.stderr, flush=True)
    report = {
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "costs": costs,
        "spread": _spread(costs),
        "idle": idle(2.0 if options.quick else 5.0),
        "replacement": replacement(3 if options.quick else 10),
    }
    print(f"Python {report['python']}, {report['cpus']} CPUs\n")
    print(table(report))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
