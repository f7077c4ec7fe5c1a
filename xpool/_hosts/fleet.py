"""What a `HostEngine` needs of the system that has the hosts, and what it is told by it.

A fleet places an agent on each host and carries calls to it.  A call may fail, be late, or have run
although it failed: the engine numbers what it sends, and makes it good.  `xpool.ray` has one; the
simulated world has another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = [
    "Call",
    "Coming",
    "Dead",
    "Draining",
    "Fleet",
    "Joined",
    "Refused",
    "Replied",
    "Unreached",
]


class Call(NamedTuple):
    """What a driver says to an agent: ``messages``, from number ``first`` on.

    ``number``: of the call.  ``got``: all messages of the agent's up to this number have come;
    ``again``: what it sent after that is lost, and to be sent again.  ``heard``: the last of its
    replies that came was to the call of this number.  ``beat``: it is replied to at once, without
    messages, which may be large and have to wait for room: it keeps the lease.
    """

    number: int
    first: int
    messages: list[Any]
    got: int
    again: bool
    heard: int
    beat: bool = False


class Coming(NamedTuple):
    """One more agent is being placed: it will be `Joined`, or `Dead`."""

    host: int
    workers: int


class Joined(NamedTuple):
    """An agent is there, with so many workers; ``name``: of its host, for people."""

    host: int
    workers: int
    name: str


class Replied(NamedTuple):
    """The agent's reply to a call: it has all messages up to number ``taken``; its own follow, from
    number ``first`` on."""

    host: int
    number: int
    taken: int
    first: int
    messages: list[Any]


class Unreached(NamedTuple):
    """A call did not come back, and may have run."""

    host: int
    number: int


class Draining(NamedTuple):
    """A host is going to go."""

    host: int


class Dead(NamedTuple):
    """An agent is gone for good, whatever its workers do until their lease is over."""

    host: int
    reason: str


class Refused(NamedTuple):
    """The fleet can have no hosts, or not this one: the pool fails with this error."""

    error: BaseException


class Fleet(Protocol):
    """Agents on hosts.  No method may block; what becomes of a call is told to the engine."""

    def start(self, tell: Callable[[Any], object]) -> list[int]:
        """Begin to place agents; call ``tell(event)`` with what happens, from any thread.

        Returns how many workers each of them will have: of hosts 0, 1 and so on.  Each will be
        `Joined`, or `Dead`.  Others may join later.
        """

    def call(self, host: int, call: Call) -> None:
        """Call an agent; `Replied` or `Unreached` follows.

        An agent that has nothing to say takes its time, a second or so.
        """

    def put(self, payload: bytes | memoryview) -> Any:
        """Put what all hosts are to have where they can get it; return what stands for it in a
        `Blob`.

        Raises:
            XPoolError: there is no cluster any more.
        """

    def stop(self, host: int) -> None:
        """End an agent and its workers now, also one that has not joined; `Dead` follows."""

    def close(self) -> None:
        """Let go of everything; all agents are dead."""
