"""What a task costs by the size of its argument: microseconds a task, xpool beside its peers.

Arrays go to a task that does nothing, by `imap_unordered`, each a task of its own, two workers.
Rounds are short and interleaved, and what is printed is the least of each: other work on the
machine only ever adds to it.
"""

from __future__ import annotations

import argparse
import time

import numpy

from bench import tasks
from bench.adapters import PEERS, Peer

SIZES = [16 << 4 * n for n in range(6)]
"""Bytes: 16 B to 16 MiB."""
AT_ONCE = 8 << 20
"""Bytes that go in one round, where that is not too many tasks or too few."""


def microseconds(peer: Peer, size: int) -> float:
    """Return what a task costs, of a stream of them."""
    count = min(400, max(2, AT_ONCE // size))
    items = [numpy.ones(size, dtype="uint8") for _ in range(count)]
    begin = time.perf_counter()
    done = sum(1 for _ in peer.imap_unordered(tasks.noop, items))
    seconds = time.perf_counter() - begin
    if done != count:
        raise AssertionError(f"{peer.name}: {done} results for {count} tasks")
    return seconds / count * 1e6


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    default = "xpool,stdlib fork,stdlib forkserver,concurrent.futures"
    parser.add_argument("--peers", default=default, help="names, with commas")
    options = parser.parse_args()
    peers = {
        name: PEERS[name]()
        for name in options.peers.split(",")
        if PEERS[name].version() is not None
    }
    for peer in peers.values():
        peer.open()
    found: dict[tuple[int, str], list[float]] = {}
    for number in range(options.rounds + 1):
        for size in SIZES:
            for name, peer in peers.items():
                cost = microseconds(peer, size)
                if number:  # the first round warms up
                    found.setdefault((size, name), []).append(cost)
    for peer in peers.values():
        peer.close()
    print("| argument, bytes |" + "".join(f" {name} |" for name in peers))
    print("|---" * (len(peers) + 1) + "|")
    for size in SIZES:
        cells = [f"{min(found[size, name]):,.1f}" for name in peers]
        print(f"| {size:,} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
