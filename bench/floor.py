"""Measure the machine's floor: the time of pipes, memory copies and forks without any pool.

A pool whose round trip takes 1.2 pipe ping-pongs, or whose tensor takes 2 warm copies, can hardly
become faster.  A ping-pong depends on the placement of its two processes: on one CPU, or on two,
of which one must be woken.  Both are measured.  A pool does not pin its processes, so the
placement by the scheduler is measured too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypedDict

BIG = 64 * 2**20


class Figure(TypedDict):
    """One measured floor."""

    value: float
    unit: str
    what: str


def _median_us(step: Callable[[], None], count: int) -> float:
    """Median microseconds of `count` calls of `step`, after a warm-up."""
    for _ in range(max(10, count // 10)):
        step()
    clock = time.perf_counter
    times = []
    for _ in range(count):
        begin = clock()
        step()
        times.append(clock() - begin)
    return statistics.median(times) * 1e6


def _pair_of_cpus() -> tuple[int, int] | None:
    """Two CPUs that this process may use; None if it may use only one."""
    cpus = sorted(os.sched_getaffinity(0))
    return (cpus[0], cpus[1]) if len(cpus) > 1 else None


def _ping_pong(fds: tuple[int, int, int, int], count: int, cpus: tuple[int, int] | None) -> float:
    """Median microseconds of a round trip; `fds`: (my read, my write, its read, its write)."""
    my_read, my_write, its_read, its_write = fds
    allowed = os.sched_getaffinity(0)
    child = os.fork()
    if child == 0:
        try:
            # The child ends when the parent closes its ends, so the child must not hold them.
            for fd in {my_read, my_write} - {its_read, its_write}:
                os.close(fd)
            if cpus is not None:
                os.sched_setaffinity(0, {cpus[1]})
            while data := os.read(its_read, 1):
                os.write(its_write, data)
        finally:
            os._exit(0)
    for fd in {its_read, its_write}:
        os.close(fd)
    try:
        if cpus is not None:
            os.sched_setaffinity(0, {cpus[0]})

        def step() -> None:
            os.write(my_write, b"x")
            os.read(my_read, 1)

        return _median_us(step, count)
    finally:
        os.sched_setaffinity(0, allowed)
        for fd in {my_read, my_write}:
            os.close(fd)
        os.waitpid(child, 0)


def pipe_ping_pong(count: int = 3000, cpus: tuple[int, int] | None = None, pairs: int = 1) -> float:
    """Median microseconds for one byte through a pipe and one back.

    `cpus` pins both processes.  Without it the result depends on where the scheduler puts them,
    so use several `pairs` of processes and their median.
    """
    medians = []
    for _ in range(pairs):
        its_read, my_write = os.pipe()
        my_read, its_write = os.pipe()
        medians.append(_ping_pong((my_read, my_write, its_read, its_write), count, cpus))
    return statistics.median(medians)


def socket_ping_pong(count: int = 3000) -> float:
    """Median microseconds for one byte through a socket pair and one back."""
    mine, its = socket.socketpair()
    mine_fd, its_fd = mine.detach(), its.detach()
    return _ping_pong((mine_fd, mine_fd, its_fd, its_fd), count, None)


def warm_memcpy(size: int = BIG, count: int = 10) -> float:
    """Median milliseconds to copy `size` bytes between two buffers whose pages are mapped."""
    # Assigning a slice of a memoryview is one memcpy, and needs neither numpy nor torch.
    source, target = memoryview(bytearray(b"\1") * size), memoryview(bytearray(b"\2") * size)

    def step() -> None:
        target[:] = source

    return _median_us(step, count) / 1000


def preloaded_fork(count: int = 10) -> float:
    """Median milliseconds from fork to the child's first byte, in a process that uses torch."""
    import torch

    torch.ones(16).sum()

    def step() -> None:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"x")
            os._exit(0)
        os.close(write)
        os.read(read, 1)
        os.close(read)
        children.append(child)

    children: list[int] = []
    try:
        return _median_us(step, count) / 1000
    finally:
        for child in children:
            os.waitpid(child, 0)


def measure(quick: bool = False) -> dict[str, Figure]:
    """Measure all floors that this machine supports."""
    count = 500 if quick else 3000
    figures: dict[str, Figure] = {
        "pipe": {
            "value": pipe_ping_pong(count, pairs=5),
            "unit": "us",
            "what": "pipe ping-pong, unpinned",
        }
    }
    if (pair := _pair_of_cpus()) is not None:
        figures["pipe_two_cpus"] = {
            "value": pipe_ping_pong(count, pair),
            "unit": "us",
            "what": "pipe ping-pong, pinned to two CPUs",
        }
        figures["pipe_one_cpu"] = {
            "value": pipe_ping_pong(count, (pair[0], pair[0])),
            "unit": "us",
            "what": "pipe ping-pong, pinned to one CPU",
        }
    figures["socketpair"] = {
        "value": socket_ping_pong(count),
        "unit": "us",
        "what": "socketpair ping-pong, unpinned",
    }
    figures["memcpy"] = {"value": warm_memcpy(), "unit": "ms", "what": "warm memcpy of 64 MiB"}
    try:
        fork = preloaded_fork()
    except ImportError as error:
        print(f"preloaded fork not measured: {error}", file=sys.stderr)
    else:
        figures["fork"] = {
            "value": fork,
            "unit": "ms",
            "what": "fork of a process that has torch, until the child's first byte",
        }
    return figures


def median_of(runs: list[dict[str, Figure]]) -> dict[str, Figure]:
    """Return the median of each floor over several runs."""
    return {
        key: {**figure, "value": statistics.median(run[key]["value"] for run in runs)}
        for key, figure in runs[0].items()
    }


def table(figures: dict[str, Figure]) -> str:
    """The floors as a markdown table."""
    lines = ["| floor | median |", "|---|---|"]
    lines += [f"| {f['what']} | {f['value']:.3g} {f['unit']} |" for f in figures.values()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures to this file ('-': print JSON)"
    )
    options = parser.parse_args()
    figures = measure(options.quick)
    if options.json != "-":
        print(f"{multiprocessing.cpu_count()} CPUs, Python {sys.version.split()[0]}\n")
        print(table(figures))
    else:
        print(json.dumps(figures))
    if options.json not in (None, "-"):
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
