"""Compare queues between two processes: xpool's, the standard library's and torch's.

Another process puts and this one gets.  Queues take turns, and each round begins with another
queue.  The table shows medians.  ``python -m bench.queues [--quick] [--json]``.

`torch.multiprocessing` moves each tensor into its own file and sends a descriptor.  Importing torch
makes all queues of `multiprocessing` do the same.  So only the row with arrays shows the cost of
plain pickling.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.multiprocessing

from bench.floor import BIG
from xpool.queue import SimpleQueue

Make = Callable[[], Any]
Work = Callable[[Make, bool], float]


QUEUES: dict[str, Make] = {
    "xpool, shared": SimpleQueue,
    "xpool, copied": lambda: SimpleQueue(copy_tensor=True),
    "multiprocessing": lambda: multiprocessing.SimpleQueue(),
    "torch.multiprocessing": lambda: torch.multiprocessing.SimpleQueue(),
}


def _start(target: Callable[..., None], *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def _put_many(queue: Any, go: Any, make: Callable[[int], Any], count: int) -> None:
    go.recv()
    for i in range(count):
        queue.put(make(i))
    # torch's tensors can be received only while their sender lives.
    go.recv()


def _rate(make_queue: Make, make: Callable[[int], Any], count: int) -> float:
    """Objects a second from the other process to this one."""
    queue = make_queue()
    here, there = multiprocessing.Pipe()
    process = _start(_put_many, queue, there, make, count)
    here.send("go")
    queue.get()
    begin = time.perf_counter()
    for _ in range(count - 1):
        queue.get()
    seconds = time.perf_counter() - begin
    here.send("end")
    process.join()
    queue.close()
    return (count - 1) / seconds


def _answer(inbox: Any, outbox: Any, count: int) -> None:
    for _ in range(count):
        value = inbox.get()
        outbox.put(float(value[-1]))
        del value


def _one_way(make_queue: Make, make: Callable[[int], Any], count: int) -> float:
    """Median milliseconds from `put` to the other process's answer, which is the last element."""
    queue, answers = make_queue(), make_queue()
    process = _start(_answer, queue, answers, count)
    times = []
    for i in range(count):
        value = make(i)
        begin = time.perf_counter()
        queue.put(value)
        answer = answers.get()
        times.append(time.perf_counter() - begin)
        if answer != float(value[-1]):
            raise AssertionError(f"got {answer} instead of {value[-1]}")
        del value
    process.join()
    queue.close()
    answers.close()
    return statistics.median(times[1:]) * 1e3


def _message(i: int) -> dict[str, Any]:
    return {"number": i, "name": "a short message", "values": (1.5, 2.5)}


def _array(i: int) -> Any:
    return numpy.full(BIG // 8, float(i))


def _tensor(i: int) -> Any:
    return torch.full((BIG // 4,), float(i))


_same = torch.zeros(BIG // 4)


def _kept(i: int) -> Any:
    _same[-1] = i
    return _same


WORKS: dict[str, tuple[str, Work]] = {
    "short messages": ("1/s", lambda q, quick: _rate(q, _message, 5_000 if quick else 50_000)),
    "1 KiB tensors": (
        "1/s",
        lambda q, quick: _rate(q, lambda _: torch.zeros(256), 1_000 if quick else 10_000),
    ),
    "64 MiB array": ("ms", lambda q, quick: _one_way(q, _array, 5 if quick else 15)),
    "64 MiB tensor, new": ("ms", lambda q, quick: _one_way(q, _tensor, 5 if quick else 15)),
    "64 MiB tensor, again": ("ms", lambda q, quick: _one_way(q, _kept, 5 if quick else 15)),
}


def _copy_ms() -> float:
    """Median milliseconds of a warm copy of 64 MiB, for comparison."""
    source, target = bytearray(BIG), bytearray(BIG)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a process with threads of torch must not fork
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))  # torch needs them
    found: dict[str, dict[str, list[float]]] = {work: {q: [] for q in QUEUES} for work in WORKS}
    copies = []
    names = list(QUEUES)
    for turn in range(options.rounds):
        for work, (_unit, run) in WORKS.items():
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found[work][name].append(run(QUEUES[name], options.quick))
        copies.append(_copy_ms())
    medians = {
        work: {name: statistics.median(values) for name, values in row.items()}
        for work, row in found.items()
    }
    if options.json:
        print(json.dumps({"medians": medians, "copy_ms": statistics.median(copies)}))
        return
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} CPUs")
    print(f"a warm copy of 64 MiB: {statistics.median(copies):.1f} ms")
    print(f"{'':24}" + "".join(f"{name:>24}" for name in QUEUES))
    for work, row in medians.items():
        unit = WORKS[work][0]
        cells = (f"{v:,.0f} {unit}" if unit == "1/s" else f"{v:.2f} {unit}" for v in row.values())
        print(f"{work:24}" + "".join(f"{cell:>24}" for cell in cells))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
