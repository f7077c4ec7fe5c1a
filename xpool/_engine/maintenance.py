"""Returns unused memory of the arena to the system, and clears the holds of ended workers."""

from __future__ import annotations

from xpool._engine.reactor import Reactor
from xpool._memory.arena import IDLE_SECONDS, Arena
from xpool._pickling.tensors import mapped


class ArenaMaintenance:
    """The arena's attachments, one for each process of workers, and the times of its trims.

    Called with the engine's lock held, except `after_turn` and `end`, which may take milliseconds.
    """

    def __init__(self, arena: Arena | None, reactor: Reactor) -> None:
        self._arena = arena
        self._reactor = reactor
        # Attachments whose holds the engine's thread clears.  Filled under the lock and emptied
        # without it: `append` and `pop` of a list are atomic.
        self._pending_reclaim: list[int] = []
        self._due = False  # the engine's thread must trim the arena
        self._planned = False  # a timer for the next trim is set
        self._pause = IDLE_SECONDS
        if arena is not None:
            arena.begin()

    def take_attachment(self) -> tuple[Arena | None, int | None]:
        """Return the arena and an attachment for a new process; two None if none is free."""
        attachment = None if self._arena is None else self._arena.take_attachment()
        return (self._arena if attachment is not None else None), attachment

    def damage(self, attachment: int | None) -> str:
        """Return how an ended process has damaged its table in the arena; empty: not at all."""
        try:
            if self._arena is not None and attachment is not None:
                self._arena.file.check(attachment)
        except ValueError as exc:
            return str(exc)
        return ""

    def free_attachment(self, attachment: int | None) -> None:
        """Record that the process with this attachment has ended, or was not started."""
        if attachment is not None:
            # Clear its holds later: that takes milliseconds, and the engine's lock is held here.
            self._pending_reclaim.append(attachment)

    def later(self) -> None:
        """Record that blocks of the arena are in use, and plan a trim for later."""
        self._pause = IDLE_SECONDS
        self._plan()

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            self._reactor.call_at(self._reactor.now() + self._pause, self._ring)

    def _ring(self) -> None:
        self._due = True

    def after_turn(self) -> bool:
        """Clear holds, and trim the arena if due; return whether `again` must be called."""
        while self._pending_reclaim and self._arena is not None:
            self._arena.reclaim(self._pending_reclaim.pop())
        mapped.collect()
        if not self._due:
            return False
        arena = self._arena
        self._due = self._planned = False  # before the trim: blocks used during it plan another one
        self._pause = min(2 * self._pause, 60.0)
        return arena is not None and arena.trim()

    def again(self) -> None:
        """Plan another trim after a longer pause, because there is more memory to return."""
        self._plan()

    def end(self) -> None:
        """Clear all holds and end the arena; all workers have ended."""
        # The engine's thread no longer calls `after_turn`.
        while self._pending_reclaim and self._arena is not None:
            self._arena.reclaim(self._pending_reclaim.pop())
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.end()
            mapped.collect()

    def forget(self) -> None:
        """Forget the arena: it belongs to the parent of this forked child."""
        self._arena = None
