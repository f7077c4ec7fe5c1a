"""Joins the workers of a pool to one world: `Pool.create_group` runs this in each worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from xpool._worker.worker_context import current_worker
from xpool.distributed._group_errors import PeerLost
from xpool.distributed._world import get_world, join

_INTERFACE = "GLOO_SOCKET_IFNAME"

_STORE_IS_THERE = "TORCHELASTIC_USE_AGENT_STORE"
"""With this variable set, torch opens no store at a TCP address: it expects that one exists."""

_generation = 0  # the generation of the group that this worker has joined; 0: none


class Join(NamedTuple):
    """A function that makes its worker a member of the pool's world, and returns its process id."""

    generation: int
    size: int
    address: str
    backend: str
    timeout: float

    def __call__(self, *_: Any) -> int:
        global _generation
        if self.backend == "xla":
            import_module("torch_xla.distributed.xla_backend")  # registers the backend
        # A replacement has the index, and so the rank, of the worker that it replaces.
        rank = current_worker().index
        with _variables(self.address):
            join(rank, self.size, self.address, backend=self.backend, timeout=self.timeout)
        # Set after `join`, because a worker that could not join is in no group.
        _generation = self.generation
        return os.getpid()


@contextmanager
def _variables(address: str) -> Iterator[None]:
    """Set torch's environment variables in the block: over hosts, to use the driver's store; on one
    machine, to use the loopback interface, unless the environment names another interface."""
    wanted: dict[str, str] = {}
    if address.startswith("tcp:"):
        wanted[_STORE_IS_THERE] = "True"
    elif sys.platform == "linux" and _INTERFACE not in os.environ:
        wanted[_INTERFACE] = "lo"
    before = {name: os.environ.get(name) for name in wanted}
    # Torch reads the variables only when it makes a group, so they are restored for the tasks.
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def in_group(generation: int) -> Iterator[None]:
    """Run a block in all members.  If it fails in one, the others do not wait for that one."""
    world = get_world()
    # A replacement has not joined, and a group of an earlier generation has dead members.
    if world is None or _generation != generation:
        raise PeerLost(
            f"worker {current_worker().index} has replaced another since the group was made, "
            "and is not in it yet; the next run_all makes the group anew"
        )
    with world.group.together("run_all"):
        yield
