"""How long a worker has that was asked to stop, and one that starts.

Called with the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Callable

from xpool._engine.answers import own_part
from xpool._engine.reactor import Alarms, Reactor
from xpool._engine.slot import Slot
from xpool._wire.outbox import NO_LIMIT, STOP_SIGNAL
from xpool.errors import TaskTimeout

__all__ = ["STOP_GRACE_SECONDS", "StartLimit", "is_starved", "note_asked"]

STOP_GRACE_SECONDS = 0.1
"""Seconds between asking a worker to break off what it does and killing it."""

STARVED_SECONDS = 0.5
"""Seconds after which a worker is killed that was asked, though it has waited for a processor."""


def note_asked(slot: Slot, now: float) -> None:
    """Note that a worker is asked now."""
    slot.asked = (now, *slot.processor()[:2])


def is_starved(slot: Slot, now: float) -> bool:
    """Whether a worker that was asked has hardly run since: it could not even answer."""
    when, ran_then, waited_then = slot.asked
    if now >= when + STARVED_SECONDS:
        return False
    ran, waited, is_runnable = slot.processor()
    # The second: the first wait may go on still, and is not counted then.
    return waited - waited_then > STOP_GRACE_SECONDS / 2 or (
        is_runnable and ran - ran_then < STOP_GRACE_SECONDS / 2
    )


class StartLimit:
    """Seconds that a worker may take from its first line until it is ready; None: any time.

    ``condemn(slot)`` is called with a worker that has taken longer.
    """

    def __init__(
        self, reactor: Reactor, seconds: float | None, condemn: Callable[[Slot], None]
    ) -> None:
        self._reactor, self._seconds, self._condemn = reactor, seconds, condemn
        self._checks = Alarms(reactor, self._check)
        self._overdue = Alarms(reactor, self._kill)

    def started(self, slot: Slot) -> None:
        """A process was started."""
        if self._seconds is not None:
            self._checks.schedule_by(slot, self._reactor.now() + self._seconds)

    def over(self, slot: Slot) -> None:
        """It is ready, or starts no more."""
        self._checks.cancel(slot)
        self._overdue.cancel(slot)

    def _check(self, slot: Slot) -> None:
        assert self._seconds is not None and slot.handle is not None
        since, now = slot.box.since, self._reactor.now()
        # Not at its first line yet: the time until then is the fork server's, or the system's.
        if since is None or now < since + self._seconds:
            self._checks.schedule_by(slot, (now if since is None else since) + self._seconds)
        else:
            slot.box.ask(NO_LIMIT)  # no item: it is asked for its stack only
            note_asked(slot, now)
            slot.handle.signal(STOP_SIGNAL)
            self._overdue.schedule_by(slot, now + STOP_GRACE_SECONDS)

    def _kill(self, slot: Slot) -> None:
        assert self._seconds is not None
        stack, now = own_part(slot.box.stack()), self._reactor.now()
        if not stack and is_starved(slot, now):
            self._overdue.schedule_by(slot, now + STOP_GRACE_SECONDS)
            return
        task = "The start of the worker, with its initializer,"
        # Said first: the pool asks for it when the process has ended.
        slot.reason = TaskTimeout(self._seconds, slot.index, slot.pid, task, stack)
        self._condemn(slot)
