"""`Peers`: which ranks of the world are still there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from xpool.distributed.errors import PeerLost

DIED = "has died or cannot be reached"
LEFT = "has left the world"


class Peers:
    """The ranks of the world, by name, and which of them are known to be lost.

    ``on_loss(name, completed)`` is called once for each lost rank, in the thread of the news.
    """

    def __init__(
        self, names: list[str], me: str, on_loss: Callable[[str, dict[Any, int]], None]
    ) -> None:
        self.names, self.me = names, me
        self._on_loss = on_loss
        # Guards what follows; waited on by `wait_lost`.
        self._changed = threading.Condition()
        self._lost: dict[str, str] = {}  # what became of each; names are only added
        self._leaving = False

    def lead(self) -> str:
        """Return the lowest rank that is still there."""
        with self._changed:
            return next(name for name in self.names if name not in self._lost)

    def lost(self) -> dict[str, str]:
        """Return the lost ranks, and what became of each."""
        with self._changed:
            return dict(self._lost)

    def describe(self, name: str) -> str:
        """Say what became of a process, and which are left."""
        with self._changed:
            left = ", ".join(other for other in self.names if other not in self._lost)
            return f"{name!r} {self._lost.get(name, 'is there')}; still there: {left}"

    def check(self, name: str) -> None:
        """Raise `PeerLost` when a process is known to be lost."""
        # Without the lock: a look into a dict is atomic.
        if name in self._lost:
            raise PeerLost(f"No call can reach {name!r}: {self.describe(name)}.")

    def wait_lost(self, names: list[str], seconds: float) -> list[str]:
        """Wait, at most ``seconds``, until one of these is known to be lost; return the lost."""
        with self._changed:
            self._changed.wait_for(lambda: any(name in self._lost for name in names), seconds)
            return [name for name in names if name in self._lost]

    def lose(self, name: str, reason: str, completed: dict[Any, int] | None = None) -> None:
        """Note that a process is lost; ``completed`` is as in `Farewell`."""
        with self._changed:
            # The first news counts.  When this process leaves, its calls fail, which says nothing
            # about the others.
            if name in self._lost or name == self.me or self._leaving:
                return
            # Before `_on_loss`: it ends meetings, which ask for the lost.
            self._lost[name] = reason
            self._changed.notify_all()
        # Without the lock: `Meetings` asks `lost` under its own, so the other order would deadlock.
        self._on_loss(name, completed or {})

    def leave(self) -> list[str]:
        """Take no more news, as this process leaves; return the others that are still there."""
        with self._changed:
            self._leaving = True
            return [name for name in self.names if name not in self._lost and name != self.me]
