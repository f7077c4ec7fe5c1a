"""The world that this process is in, for the modules that `world` imports."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

from xpool._python import at_fork
from xpool.distributed._group_errors import GroupError
from xpool.distributed._world_peers import Peers


class CurrentWorld(Protocol):
    """The attributes of a `World` that its parts and the functions called by other ranks use."""

    name: str
    rank: int
    names: list[str]  # by rank
    has_rpc: bool
    started: bool
    peers: Peers
    # `Any`, because the modules of these classes import this one.
    watchers: Any
    meetings: Any
    register: Any
    groups: dict[str, Any]  # RPC groups, by name


_lock = threading.Lock()
at_fork.renew(globals(), _lock=threading.Lock)
# Guarded by _lock: the world, and the process that made it.  A forked child is in no world.
_world: CurrentWorld | None = None
_pid = 0


def claim(world: CurrentWorld) -> None:
    """Make ``world`` the world of this process.  Raises `GroupError` if it has one already."""
    global _world, _pid
    with _lock:
        if _world is not None and _pid == os.getpid():
            raise GroupError(
                f"This process is {_world.name!r} of a world already, and can be in one at a time:"
                " use get_world(), or stop() that world first."
            )
        # `current` takes no lock and reads `_pid` first, so `_pid` is written last.
        _world, _pid = world, os.getpid()


def free(world: CurrentWorld) -> None:
    global _world
    with _lock:
        # In a forked child, ``world`` may be the parent's while `_world` is the child's own.
        if _world is world:
            _world = None


def current() -> CurrentWorld | None:
    """Return the world of this process, or None."""
    # Needs no lock: `claim` writes the two in the opposite order.
    return _world if _pid == os.getpid() else None


def the_world() -> CurrentWorld:
    """Return the world of this process.  Raises `GroupError` if it is in none."""
    world = current()
    if world is None:
        raise GroupError(
            "This process is not in a world: make one with xpool.distributed.World(name, rank, "
            "world_size) in each of the processes first."
        )
    return world


def get_cur_rank() -> int:
    """Return the rank of this process in its world, from 0.  Raises `GroupError` if in none."""
    return the_world().rank


def get_cur_name() -> str:
    """Return the name of this process in its world.  Raises `GroupError` if it is in none."""
    return the_world().name
