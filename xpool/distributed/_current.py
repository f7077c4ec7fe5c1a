"""The world that this process is in, its ranks and its errors, for the modules of this package.

The errors are under `XPoolError`::

    GroupError         also RuntimeError   the group or world cannot be used in this way
    |-- NotAMember                         the process is not a member of the group
    |-- PeerLost       also xpool.PeerLost a process has died or left; the message names it
    `-- GroupTimeout   also TimeoutError   the others took longer than the timeout
    GroupKeyError      also KeyError       no such service or value, or its name is taken

`torch.distributed` raises the classes in the middle column, and programs written for
`machin.parallel` catch them.  A wrong value of an argument raises `OptionError`.  Most errors of
torch itself are plain `RuntimeError`: the functions here distinguish them by their texts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed import DistNetworkError
from torch.futures import Future

from xpool import errors
from xpool._python import at_fork
from xpool.errors import TimeoutError, XPoolError


class GroupError(XPoolError, RuntimeError):
    """The group or the world was destroyed, or does not allow this call."""


class NotAMember(GroupError):
    """The calling or the called process is not a member of the group."""


class PeerLost(GroupError, errors.PeerLost):
    """A process that this call needs has died or left the world."""


class GroupTimeout(GroupError, TimeoutError):
    """Other processes did not answer, or did not make the same call, within the timeout."""


class GroupKeyError(XPoolError, KeyError):
    """The group has no service or value of this name, or the name is taken."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show its repr


for _one in (GroupError, NotAMember, PeerLost, GroupTimeout, GroupKeyError):
    _one.__module__ = "xpool.distributed"  # the public name, in pickles and tracebacks


def connection_lost(exc: BaseException) -> bool:
    """Whether a connection to another process has ended.

    The texts of gloo and TensorPipe contain the path of a source file in a folder ``transport``.
    A store at a TCP address raises `DistNetworkError`.
    """
    network = isinstance(exc, DistNetworkError) and not timed_out(exc)
    return network or "transport" in str(exc) or "tensorpipe" in str(exc)


def timed_out(exc: BaseException) -> bool:
    # The first letter is left out: torch writes "Timed out" and "timed out".
    text = str(exc)
    return "imed out" in text or "imeout" in text


def first_line(exc: BaseException) -> str:
    """Return torch's text without the C++ stack trace."""
    return str(exc).strip().partition("\n")[0].rstrip(". ")


DIED = "has died or cannot be reached"
LEFT = "has left the world"


class Peers:
    """The names of the ranks, and which of them are known to be lost.

    ``on_loss(name, completed)`` is called once for each lost rank, in the thread that calls `lose`.
    """

    def __init__(
        self, names: list[str], me: str, on_loss: Callable[[str, dict[Any, int]], None]
    ) -> None:
        self.names, self.me = names, me
        self._on_loss = on_loss
        self._changed = threading.Condition()
        # Guarded by _changed: the reason of each lost rank.  Entries are never removed.
        self._lost: dict[str, str] = {}
        self._leaving = False

    def lead(self) -> str:
        """Return the lowest rank that is not lost."""
        with self._changed:
            return next(name for name in self.names if name not in self._lost)

    def lost(self) -> dict[str, str]:
        with self._changed:
            return dict(self._lost)

    def describe(self, name: str) -> str:
        """Return a text that says why a process is lost and which processes are left."""
        with self._changed:
            left = ", ".join(other for other in self.names if other not in self._lost)
            return f"{name!r} {self._lost.get(name, 'is there')}; still there: {left}"

    def check(self, name: str) -> None:
        # Needs no lock: reading a dict is atomic.
        if name in self._lost:
            raise PeerLost(f"No call can reach {name!r}: {self.describe(name)}.")

    def wait_lost(self, names: list[str], seconds: float) -> list[str]:
        """Wait, at most ``seconds``, until one of ``names`` is lost.  Return the lost names."""
        with self._changed:
            self._changed.wait_for(lambda: any(name in self._lost for name in names), seconds)
            return list(filter(self._lost.__contains__, names))

    def lose(self, name: str, reason: str, completed: dict[Any, int] | None = None) -> None:
        """Record that a process is lost.  `Farewell` describes ``completed``."""
        with self._changed:
            # The first reason stays.  After `leave`, a failed call does not mean a loss.
            if name in self._lost or name == self.me or self._leaving:
                return
            # Recorded before `_on_loss` ends meetings, because these call `lost`.
            self._lost[name] = reason
            self._changed.notify_all()
        # Not called under the lock, because `Meetings` calls `lost` while it holds its own lock.
        self._on_loss(name, completed or {})

    def leave(self) -> list[str]:
        """Ignore later losses, because this process leaves.  Return the ranks that are not lost."""
        with self._changed:
            self._leaving = True
            lost = set(self._lost)
        return [name for name in self.names if name not in lost and name != self.me]


class CurrentWorld(Protocol):
    """The attributes of a `World` that its parts and the functions called by other ranks use."""

    name: str
    rank: int
    names: list[str]  # by rank
    has_rpc: bool
    started: bool
    peers: Peers
    left: Future[str]  # set when this process leaves
    # `Any`, because the modules of these classes import this one.
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
