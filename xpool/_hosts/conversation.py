"""What the driver and the agent of one host say to each other, as the driver keeps it.

Messages that are queued leave with calls, of which some may be under way at one time.  A call may
fail, come late, or have run although it failed: what it had said is said again, and the agent drops
what it has already.
"""

from __future__ import annotations

import itertools
from typing import Any

from xpool._hosts import fleet as f
from xpool._hosts import messages as m
from xpool._hosts.link import Link

__all__ = ["CALLS_IN_FLIGHT", "Conversation"]

CALLS_IN_FLIGHT = 4
"""Calls to a host that are under way at one time, at most."""

CALL_BYTES = 8 * 1024 * 1024
"""Bytes of one call beside its first message, at most."""

NOTHING: dict[str, Any] = {"ready": 0, "waiting": 0, "running": 0, "deaths": 0, "pids": []}
"""What an agent's workers do that has not said it."""


class Conversation:
    """The messages to and from one agent, and what the driver knows of it.

    Args:
        fleet: carries the calls.
        host: the agent's number.
        name: of its host, for people.
        first: the pool's index of its first worker.
        now: the time.
    """

    def __init__(self, fleet: f.Fleet, host: int, name: str, first: int, now: float) -> None:
        self.name, self.first = name, first
        self.heard = now
        """When the last reply came: the agent's lease counts from before that."""
        self.called = now
        """When it was called last: no call, no longer lease."""
        self.beaten = now
        """When the last beat left."""
        self.status = m.Status(float("inf"), dict(NOTHING))
        self.ended = False
        self.given_up = ""
        """Why the driver has it stopped: what is said of its end then is that it was stopped."""
        self.link = Link()
        self._fleet, self._host = fleet, host
        self._sent = 0  # number of the last message that is under way, or there
        self.trip = 0.0
        """Seconds from a beat to its reply, at the least that was seen; 0: none was sent yet."""
        self._calls: dict[int, int] = {}  # under way: the first message of each, by its number
        self._beats: dict[int, float] = {}  # of these, when each beat left
        self._numbers = itertools.count(1)  # of calls
        self._lost = False  # a reply was lost: the agent is to say it again
        self._replied = 0  # number of the last call that has a reply

    def say(self, message: Any) -> None:
        """Queue a message; it leaves with the next `flush`."""
        self.link.send(message)

    def flush(self, now: float, expects: bool) -> None:
        """Send what is queued, as far as calls are free; with ``expects``, have a call there that
        brings what the agent has to say."""
        # What a call did not bring that failed, a later one may have brought.
        self._sent = max(self._sent, self.link.acked)
        while len(self._calls) < CALLS_IN_FLIGHT and self._sent < self.link.last:
            self._call(now, self.link.take(self._sent, CALL_BYTES, _weight))
        if expects and not self._calls:
            self._call(now, [])

    def beat(self, now: float) -> None:
        """Call an agent beside the calls that are under way, to keep its lease: these, and their
        replies, may be large and take long."""
        if self._calls:
            self.beaten = now
            self._call(now, [], beat=True)

    def _call(self, now: float, messages: list[Any], beat: bool = False) -> None:
        self.called = now
        number, first = next(self._numbers), self._sent + 1
        self._sent += len(messages)
        self._calls[number] = first
        if beat:
            self._beats[number] = now
        again, self._lost = self._lost, False
        self._fleet.call(
            self._host,
            f.Call(number, first, messages, self.link.got, again, self._replied, beat),
        )

    def replied(self, reply: f.Replied, now: float) -> list[Any]:
        """Take a reply; return the messages that are new, in order."""
        self._calls.pop(reply.number, None)
        left = self._beats.pop(reply.number, None)
        if left is not None:  # other calls wait at the agent until it has something to say
            self.trip = min(self.trip or now, now - left)
        self.heard, self._replied = now, max(self._replied, reply.number)
        self.link.acknowledge(reply.taken)
        # What came before it may still come, by another call; or a call took it that had failed.
        self._lost |= reply.first > self.link.got + 1
        return self.link.receive(reply.first, reply.messages)

    def unreached(self, number: int) -> None:
        """Have said again what a call that did not come back has said."""
        self._beats.pop(number, None)
        first = self._calls.pop(number, None)
        if first is not None:
            self._sent, self._lost = min(self._sent, first - 1), True

    def without(self, pid: int | None) -> None:
        """Note that a worker has ended, before the agent's next word of all: who asks for the
        processes then, as a `create_group` does, must not find it."""
        facts = self.status.statistics
        pids = [None if one == pid else one for one in facts.get("pids", ())]
        self.status = self.status._replace(statistics={**facts, "pids": pids})


def _weight(message: Any) -> int:
    kind = type(message)
    if kind is m.Stage:
        return 64 + sum(map(len, message.items))
    return 64 + len(message.payload) if kind is m.Func else 64
