"""The interface between a `HostEngine` and the system that manages the hosts.

A fleet places an agent on each host and carries calls to it.  A call may fail, arrive late, or have
run although it failed; the engine numbers its messages and sends lost ones again.  `ray_fleet` has
one fleet, the simulated world another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class Call(NamedTuple):
    """A call of a driver to an agent, with ``messages`` that are numbered from ``first`` on.

    ``number``: of the call.  ``got``: the driver has all of the agent's messages up to this number.
    ``again``: the agent's later messages are lost; it sends them again.  ``heard``: the number of
    the last call whose reply came.  ``beat``: the call only renews the lease; the agent replies at
    once and without messages, since these may be large and wait for room.
    """

    number: int
    first: int
    got: int
    again: bool
    heard: int
    beat: bool
    messages: list[Any]


class Coming(NamedTuple):
    """Another agent is being placed; `Joined` or `Dead` follows."""

    host: int
    workers: int


class Joined(NamedTuple):
    """An agent has started, with this number of workers; ``name``: of its host, for texts."""

    host: int
    workers: int
    name: str


class Replied(NamedTuple):
    """The agent's reply to a call.

    ``taken``: it has all of the driver's messages up to this number.  ``messages``: its own,
    numbered from ``first`` on.
    """

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
    """A host is going to be removed."""

    host: int


class Dead(NamedTuple):
    """An agent has ended for good; its workers may still run until their lease is over."""

    host: int
    reason: str


class Refused(NamedTuple):
    """The fleet can have no hosts, or it cannot have this one; the pool fails with this error."""

    error: BaseException


class Fleet(Protocol):
    """Agents on hosts.  Only `receive` may block; outcomes of calls reach the engine as events."""

    def start(self, tell: Callable[[Any], object]) -> list[int]:
        """Begin to place agents; pass events to ``tell(event)``, from any thread.

        Returns the number of workers of each agent: of hosts 0, 1 and so on.  `Joined` or `Dead`
        follows for each.  Others may join later.
        """

    def call(self, host: int, call: Call, hold: bool = False) -> None:
        """Call an agent; `Replied` or `Unreached` follows.

        An agent without messages replies after a second or so.  ``hold``: the event follows only
        after `receive`.
        """

    def receive(self, host: int, number: int, seconds: float) -> Replied | None:
        """Return the reply to a held call; None: an event follows, now or later."""

    def put(self, payload: bytes | memoryview) -> Any:
        """Store an object for all hosts; return a reference to it, the payload of a `Blob`.

        Raises:
            XPoolError: the cluster has ended.
        """

    def stop(self, host: int) -> None:
        """End an agent and its workers now, even before it has joined; `Dead` follows."""

    def close(self) -> None:
        """Release all resources; all agents are dead."""
