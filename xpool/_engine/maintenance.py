"""Memory that workers share with this process is given back when it was unused for long."""

from __future__ import annotations

from xpool._engine.reactor import Reactor
from xpool._memory.arena import IDLE_SECONDS, Arena
from xpool._pickling.tensors import mapped

__all__ = ["ArenaMaintenance"]


class ArenaMaintenance:
    """The arena's attachments, one for each process of workers, and when it is to be trimmed.

    Called with the engine's lock held, except `after_turn` and `end`, which take their time.
    """

    def __init__(self, arena: Arena | None, reactor: Reactor) -> None:
        self._arena = arena
        self._reactor = reactor
        # Filled under the lock, emptied without: `append` and `pop` of a list are atomic.
        self._pending_reclaim: list[int] = []  # to be cleared by the engine's thread
        self._due = False  # so is the memory that lay unused
        self._planned = False
        self._pause = IDLE_SECONDS
        if arena is not None:
            arena.begin()

    def take_attachment(self) -> tuple[Arena | None, int | None]:
        """Return the arena and a place in it for a new process, None: there is no more."""
        attachment = None if self._arena is None else self._arena.take_attachment()
        return (self._arena if attachment is not None else None), attachment

    def nonsense(self, attachment: int | None) -> str:
        """Say what a process that has ended did to its table in the arena; empty: nothing."""
        try:
            if self._arena is not None and attachment is not None:
                self._arena.file.check(attachment)
        except ValueError as exc:
            return str(exc)
        return ""

    def free_attachment(self, attachment: int | None) -> None:
        """The process that had this attachment has ended, or was not started."""
        if attachment is not None:
            # Not here: to clear its holds takes milliseconds, and the engine's lock is held.
            self._pending_reclaim.append(attachment)

    def later(self) -> None:
        """Blocks of the arena are in use: their memory goes back when they are not."""
        self._pause = IDLE_SECONDS
        self._plan()

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            self._reactor.call_at(self._reactor.now() + self._pause, self._ring)

    def _ring(self) -> None:
        self._due = True

    def after_turn(self) -> bool:
        """Do what is due, without the lock; return whether `again` is to be called, with it."""
        while self._pending_reclaim and self._arena is not None:
            self._arena.reclaim(self._pending_reclaim.pop())
        mapped.collect()
        if not self._due:
            return False
        arena = self._arena
        self._due = self._planned = False  # first: what comes into use from here on is planned anew
        self._pause = min(2 * self._pause, 60.0)
        return arena is not None and arena.trim()

    def again(self) -> None:
        """There is more to give back: look once more, after a longer pause."""
        self._plan()

    def end(self) -> None:
        # No thread turns any more: what ended last is cleared here.
        """All workers have ended."""
        while self._pending_reclaim and self._arena is not None:
            self._arena.reclaim(self._pending_reclaim.pop())
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.end()
            mapped.collect()

    def forget(self) -> None:
        """This process is a fork of the one that has the workers: the arena is not ours."""
        self._arena = None
