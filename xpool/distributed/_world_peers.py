"""`Peers`: the ranks of the world, and which of them are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from xpool.distributed._group_errors import PeerLost

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
            return [name for name in names if name in self._lost]

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
            return [name for name in self.names if name not in self._lost and name != self.me]
