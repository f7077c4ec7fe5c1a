"""Measure microseconds a task by the size of its argument, for xpool and its peers.

`imap_unordered` passes arrays to a task that does nothing: two workers, chunks of one.  Peers take
turns in short rounds.  The table shows the minimum of the rounds, because other work on the
machine can only make a round slower.
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
"""Bytes to send in one round; but a round has 2 to 400 tasks."""


def microseconds(peer: Peer, size: int) -> float:
    """Return the time of a task in a stream of them."""
    count = min(400, max(2, AT_ONCE // size))
    items = [numpy.ones(size, dtype="uint8") for _ in range(count)]
    begin = time.perf_counter()
    done = sum(1 for _ in peer.imap_unordered(tasks.noop, items))
    seconds = time.perf_counter() - begin
    if done != count:
        raise AssertionError(f"{peer.name}: {done} results for {count} tasks")
    return seconds / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    default = "xpool,stdlib fork,stdlib forkserver,concurrent.futures"
    parser.add_argument("--peers", default=default, help="names, separated by commas")
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
