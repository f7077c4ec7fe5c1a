"""Measure messages between two workers, against torch.distributed and the way through the parent.

    python -m bench.peer_messages                 (about a minute)
    python -m bench.peer_messages --workers 8     (for `run_all` and `broadcast`)

Prints medians of the time for one way, which is half a round trip.  Four ways take turns:

* ``peers``: `current_worker().send` and `recv`;
* ``shared``: the same in share mode;
* ``gloo``: `torch.distributed.send` and `recv` on gloo;
* ``parent``: the parent passes the result of one worker's task to a task of the other.

Then `run_all` of an empty function is timed.  Last, all workers open a `broadcast` of 256 MiB.  The
time is compared with one copy between warm buffers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from xpool import P2PPool, current_worker

KIB, MIB = 1024, 1024 * 1024
SIZES = ((KIB, 300), (64 * KIB, 100), (MIB, 30), (64 * MIB, 10))
"""(bytes, round trips in one measurement)."""


def ping_peers(nbytes: int, times: int) -> float:
    """Seconds for one way by messages of xpool."""
    me = current_worker()
    other = 1 - me.index
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    begin = time.perf_counter()
    for _ in range(times):
        if me.index == 0:
            me.send(other, tensor)
            me.recv(other)
        else:
            got = me.recv(other)
            me.send(other, got)
            del got
    return (time.perf_counter() - begin) / times / 2


def ping_gloo(nbytes: int, times: int) -> float:
    """Seconds for one way by torch.distributed, which receives into an existing tensor."""
    rank = dist.get_rank()
    tensor = torch.ones(nbytes, dtype=torch.uint8)
    begin = time.perf_counter()
    for _ in range(times):
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
    return (time.perf_counter() - begin) / times / 2


def same(tensor: Any) -> Any:
    return tensor


def ping_parent(pool: P2PPool, nbytes: int, times: int) -> float:
    """Seconds for one way from worker to worker through the parent."""
    tensor = pool.apply(torch.ones, (nbytes,), {"dtype": torch.uint8}, worker=0)
    begin = time.perf_counter()
    for _ in range(times):
        tensor = pool.apply(same, (tensor,), worker=1)
        tensor = pool.apply(same, (tensor,), worker=0)
    return (time.perf_counter() - begin) / times / 2


def noop() -> None:
    """An empty task."""


def look(table: Any) -> int:
    """Open a broadcast, and read a byte of each tensor."""
    return sum(int(tensor[-1]) for tensor in table)


def median_of(rounds: int, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Measure all ways in turn; return the median of each, without the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            value = way()
            if turn:
                seconds[name].append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


def messages(rounds: int) -> None:
    with P2PPool(2) as pool, P2PPool(2, is_copy_tensor=False) as sharing:
        pool.create_group()
        for nbytes, times in SIZES:
            size = nbytes, times
            found = median_of(
                rounds,
                {
                    "peers": lambda size=size: max(pool.run_all(ping_peers, *size)),
                    "shared": lambda size=size: max(sharing.run_all(ping_peers, *size)),
                    "gloo": lambda size=size: max(pool.run_all(ping_gloo, *size)),
                    "parent": lambda size=size: ping_parent(pool, *size),
                },
            )
            name = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
            row = ", ".join(f"{way} {1e6 * value:,.0f} us" for way, value in found.items())
            gloo, parent = found["gloo"] / found["peers"], found["parent"] / found["peers"]
            print(f"{name}: {row}; gloo/peers {gloo:.1f}, parent/peers {parent:.1f}", flush=True)


def all_at_once(workers: int, rounds: int) -> None:
    def timed(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    with P2PPool(workers) as pool:
        calls = sorted(timed(lambda: pool.run_all(noop)) for _ in range(300))
        print(f"run_all of {workers} workers: {1e6 * calls[150]:,.0f} us", flush=True)
        table = [torch.ones(16 * MIB, dtype=torch.uint8) for _ in range(16)]
        target = [torch.ones(16 * MIB, dtype=torch.uint8) for _ in range(16)]

        def copy() -> None:
            for one, other in zip(target, table):
                one.copy_(other)

        references: list[Any] = []

        def broadcast() -> None:
            references[:] = [pool.broadcast(table)]

        found = median_of(
            rounds,
            {
                "memcpy": lambda: timed(copy),
                "broadcast": lambda: timed(broadcast),
                "opened by all": lambda: timed(lambda: pool.run_all(look, references[0])),
            },
        )
        row = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in found.items())
        both = found["broadcast"] + found["opened by all"]
        print(f"256 MiB to {workers} workers: {row}; both/memcpy {both / found['memcpy']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    messages(args.rounds)
    all_at_once(args.workers, args.rounds)


if __name__ == "__main__":
    main()
