"""The world of this process: there is one at a time."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from xpool._python import at_fork
from xpool.distributed.errors import GroupError

if TYPE_CHECKING:
    from xpool.distributed.world import World

__all__ = [
    "claim", "free", "get_cur_name", "get_cur_rank", "get_world", "is_world_initialized",
    "the_world",
]  # fmt: skip

_lock = threading.Lock()
at_fork.renew(globals(), _lock=threading.Lock)
# Guarded by _lock: the world, and the process that made it (a forked child has none).
_world: World | None = None
_pid = 0


def claim(world: World) -> None:
    """Make ``world`` the one of this process; `GroupError` when there is one already."""
    global _world, _pid
    with _lock:
        if _world is not None and _pid == os.getpid():
            raise GroupError(
                f"This process is {_world.name!r} of a world already, and can be in one at a time:"
                " use get_world(), or stop() that world first."
            )
        # The world first: `get_world` looks at the process first.
        _world, _pid = world, os.getpid()


def free(world: World) -> None:
    """Forget ``world``, if it is this process's."""
    global _world
    with _lock:
        # In a forked child, this may be the parent's, and the child in a world of its own.
        if _world is world:
            _world = None


def get_world() -> World | None:
    """Return the world that this process is in, or None."""
    # Without the lock: each of the two is read at once, in the order opposite to `claim`'s.
    return _world if _pid == os.getpid() else None


def is_world_initialized() -> bool:
    """Whether this process is in a world."""
    return get_world() is not None


def the_world() -> World:
    """Return the world; `GroupError` where there is none."""
    world = get_world()
    if world is None:
        raise GroupError(
            "This process is in no world: make one with xpool.distributed.World(name, rank, "
            "world_size) in each of the processes first."
        )
    return world


def get_cur_rank() -> int:
    """Return the rank of this process in its world; `GroupError` where there is none."""
    return the_world().rank


def get_cur_name() -> str:
    """Return the name of this process in its world; `GroupError` where there is none."""
    return the_world().name
