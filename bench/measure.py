"""Measure one peer in a process of its own, so that a hang does not stop `bench.peers`.

``python -m bench.measure PEER WORK[,WORK...]`` prints a JSON line after each work, and stops
after the first that fails.  `bench.peers` does not start this program for each peer, because
importing torch takes longer than most works.  It starts one server (``--serve``), which imports
torch once and forks for each measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from bench.adapters import PEERS, Peer
from bench.procs import reap
from bench.works import DEATH, QUICK, SHARED, WORKS, Broken, Sizes, uses_torch


def _raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors, as torch's documentation recommends."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _outcome(peer: Peer, key: str, sizes: Sizes) -> dict[str, Any]:
    """Run one work; return its figure or its fault."""
    begin = time.monotonic()
    outcome: dict[str, Any] = {"work": key}
    try:
        outcome["value"], outcome["note"] = WORKS[key].run(peer, sizes)
    except Broken as error:
        outcome["fault"] = str(error)
        outcome["broken"] = True
    except Exception as error:
        traceback.print_exc()
        outcome["fault"] = f"fails: {type(error).__name__}: {error}"[:200]
    outcome["seconds"] = time.monotonic() - begin
    return outcome


def measure(name: str, keys: Sequence[str], quick: bool, fd: int) -> None:
    """Run the works in turn, and write each outcome to `fd`."""
    _raise_descriptor_limit()
    if uses_torch(keys):
        # A program that uses torch imports it before it opens a pool.
        import bench.tensor_tasks  # noqa: F401

    peer = PEERS[name]()
    is_open = False
    for key in keys:
        shared = WORKS[key].group in SHARED
        if is_open and (peer.pool_a_work or not shared):
            peer.close()
            is_open = False
        if shared and not is_open:
            peer.open(with_torch=uses_torch(keys), with_lambdas=key == "lambda")
        is_open = True
        outcome = _outcome(peer, key, QUICK if quick else Sizes())
        # If a library starts slowly, its next pool is made in this process, even after one broke.
        last = key == keys[-1]
        outcome["goes_on"] = peer.one_process and outcome.get("broken", False) and not last
        os.write(fd, (json.dumps(outcome) + "\n").encode())
        if outcome["goes_on"]:
            is_open = False
            continue
        if "fault" in outcome or (last and WORKS[key].group == DEATH):
            # A pool that lost a worker may hang in `close`.  `bench.peers` kills its processes,
            # and starts another process for the remaining works.
            sys.stderr.flush()
            os._exit(0)
    peer.close()


def serve(fd: int, torch: bool) -> tuple[dict[str, Any], int] | None:
    """Fork for each request from the socket `fd`, and answer with the pid.

    Returns:
        In a forked process: the request, and the descriptor for its outcomes.
        In this process: None, after the other side has closed the socket.
    """
    if torch:
        import bench.tensor_tasks  # noqa: F401
    with socket.socket(fileno=fd) as link:
        link.set_inheritable(False)
        while True:
            data, fds, _flags, _address = socket.recv_fds(link, 65536, 2)
            if not data:
                return None
            # Not earlier: `bench.peers` uses the pid of a process until its next request.
            reap()
            pid = os.fork()
            if pid == 0:
                outcomes, log = fds
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.close(log)
                return json.loads(data), outcomes
            for passed in fds:
                os.close(passed)
            link.sendall(pid.to_bytes(8, "big"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", nargs="?", choices=PEERS)
    parser.add_argument("works", nargs="?", help="keys of bench.works.WORKS, separated by commas")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", type=int, metavar="FD", help=argparse.SUPPRESS)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        if (forked := serve(options.serve, options.torch)) is not None:
            request, fd = forked
            measure(request["peer"], request["works"], request["quick"], fd)
        return
    if not options.peer or not options.works:
        parser.error("name a peer and at least one work")
    measure(options.peer, options.works.split(","), options.quick, 1)


if __name__ == "__main__":
    main()
