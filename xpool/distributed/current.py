"""The world that this process is in, for the modules that `world` imports."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from xpool._python import at_fork
from xpool.distributed.errors import GroupError
from xpool.distributed.peers import Peers


class CurrentWorld(Protocol):
    """What the parts of a `World` use of it, and the functions that other ranks call here."""

    name: str
    rank: int
    names: list[str]  # by rank
    has_rpc: bool
    started: bool
    peers: Peers
    # Their modules import this one:
    watchers: Any
    meetings: Any
    register: Any
    groups: dict[str, Any]  # RPC groups, by name


_lock = threading.Lock()
at_fork.renew(globals(), _lock=threading.Lock)
# Guarded by _lock: the world, and the process that made it (a forked child has none).
_world: CurrentWorld | None = None
_pid = 0


def claim(world: CurrentWorld) -> None:
    """Make ``world`` the world of this process; `GroupError` if it has one already."""
    global _world, _pid
    with _lock:
        if _world is not None and _pid == os.getpid():
            raise GroupError(
                f"This process is {_world.name!r} of a world already, and can be in one at a time:"
                " use get_world(), or stop() that world first."
            )
        # The world first: `current` reads the process first.
        _world, _pid = world, os.getpid()


def free(world: CurrentWorld) -> None:
    global _world
    with _lock:
        # In a forked child, ``world`` may be the parent's, and the child in a world of its own.
        if _world is world:
            _world = None


def current() -> CurrentWorld | None:
    """Return the world of this process, or None."""
    # Without the lock: `claim` writes in the opposite order.
    return _world if _pid == os.getpid() else None


def the_world() -> CurrentWorld:
    """Return the world; `GroupError` if there is none."""
    world = current()
    if world is None:
        raise GroupError(
            "This process is not in a world: make one with xpool.distributed.World(name, rank, "
            "world_size) in each of the processes first."
        )
    return world


def get_cur_rank() -> int:
    """Return the rank of this process in its world; `GroupError` if there is none."""
    return the_world().rank


def get_cur_name() -> str:
    """Return the name of this process in its world; `GroupError` if there is none."""
    return the_world().name
