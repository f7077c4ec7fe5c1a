"""The driver's side of the messages with the agent of one host.

Queued messages leave with calls; several calls may be under way at one time.  A call may fail,
arrive late, or have run although it failed.  Its messages are then sent again, and the agent drops
those that it has already.
"""

from __future__ import annotations

import itertools
from typing import Any

from xpool._hosts import fleet as f
from xpool._hosts import messages as m
from xpool._hosts.link import Link

CALLS_IN_FLIGHT = 4
"""The most calls to a host that are under way at one time."""

CALL_BYTES = 8 * 1024 * 1024
"""The most bytes of one call, not counting its first message."""

NOTHING: dict[str, Any] = {"ready": 0, "waiting": 0, "running": 0, "deaths": 0, "pids": []}
"""The statistics of an agent that has sent no `Status` yet."""


class Conversation:
    """The messages to and from one agent, and what the driver knows of it.

    Args:
        fleet: carries the calls.
        host: the agent's number.
        name: of its host, for texts.
        first: the pool's index of its first worker.
        now: the time, in seconds.
    """

    def __init__(self, fleet: f.Fleet, host: int, name: str, first: int, now: float) -> None:
        self.name, self.first = name, first
        self.heard = now
        """When the last reply came.  The agent's lease counts from an earlier moment."""
        self.called = now
        """When it was called last.  Only calls renew the lease."""
        self.beaten = now
        """When the last beat left."""
        self.status = m.Status(float("inf"), dict(NOTHING))
        self.ended = False
        self.given_up = ""
        """Why the driver stopped it, or "".  It takes the place of the fleet's reason."""
        self.link = Link()
        self._fleet, self._host = fleet, host
        self.trip = 0.0
        """The fewest seconds from a beat to its reply so far; 0: no beat was answered yet."""
        self._calls: dict[int, int] = {}  # calls under way: number -> number of the first message
        self._beats: dict[int, float] = {}  # beats among them: number -> when it left
        self._numbers = itertools.count(1)  # of calls
        self._lost = False  # a reply was lost: the agent has to send its messages again
        self._overdue = False  # no earlier call is under way that may still bring them
        self._replied = 0  # number of the last call that was answered

    def flush(self, now: float, expects: bool, hold: bool = False) -> int | None:
        """Send the queued messages, with at most `CALLS_IN_FLIGHT` calls under way.

        ``expects``: make a call even without messages, so that the agent can reply with its own.
        ``hold``: if all messages leave with one call and no other is under way, the fleet holds its
        reply back for `Fleet.receive`, and the number of the call is returned.
        """
        while len(self._calls) < CALLS_IN_FLIGHT and self.link.has_unsent:
            first, messages = self.link.take(CALL_BYTES, _weight)
            if hold and not self._calls and not self.link.has_unsent:
                return self._call(now, first, messages, hold=True)
            self._call(now, first, messages)
        # The calls under way did not ask for lost messages, and may wait at the agent for new ones.
        overdue = self._overdue and len(self._calls) < CALLS_IN_FLIGHT
        if expects and (overdue or not self._calls):
            self._call(now, self.link.sent + 1, [])
        return None

    def beat(self, now: float) -> None:
        """Renew an agent's lease by a call beside those under way, which may be large and slow."""
        if self._calls:
            self.beaten = now
            self._call(now, self.link.sent + 1, [], beat=True)

    def _call(
        self, now: float, first: int, messages: list[Any], beat: bool = False, hold: bool = False
    ) -> int:
        self.called = now
        number = next(self._numbers)
        self._calls[number] = first
        if beat:
            self._beats[number] = now
        again, self._lost, self._overdue = self._lost, False, False
        self._fleet.call(
            self._host,
            f.Call(number, first, self.link.got, again, self._replied, beat, messages),
            hold,
        )
        return number

    def replied(self, reply: f.Replied, now: float) -> list[Any]:
        """Take a reply; return the messages that are new, in order."""
        self._calls.pop(reply.number, None)
        left = self._beats.pop(reply.number, None)
        if left is not None:  # a beat: other calls wait at the agent
            self.trip = min(self.trip or now, now - left)
        self.heard, self._replied = now, max(self._replied, reply.number)
        self.link.acknowledge(reply.taken)
        # Earlier messages are missing: another reply may still bring them, or a reply was lost.
        if reply.first > self.link.got + 1:
            self._lost = True
            others = self._calls.keys() - self._beats
            self._overdue = all(number > reply.number for number in others)
        return self.link.receive(reply.first, reply.messages)

    def unreached(self, number: int) -> None:
        """Send the messages of a call again, because the call did not come back."""
        self._beats.pop(number, None)
        first = self._calls.pop(number, None)
        if first is not None:
            self.link.send_again(first - 1)
            self._lost = True

    def without(self, pid: int | None) -> None:
        """Remove an ended worker from the process ids before the agent's next `Status`.

        `create_group`, which reads them, must not find it.
        """
        facts = self.status.statistics
        pids = [None if one == pid else one for one in facts.get("pids", ())]
        self.status = self.status._replace(statistics={**facts, "pids": pids})


def _weight(message: Any) -> int:
    kind = type(message)
    if kind is m.Stage:
        return 64 + sum(map(len, message.items))
    return 64 + len(message.payload) if kind is m.Func else 64
