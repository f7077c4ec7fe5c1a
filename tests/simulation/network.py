"""The network between the driver and the hosts: calls arrive late, twice or never.

The driver gets one event for each call, unless its host is dead: the answer, or a failure. The call
at the host is independent of this event: it may run although it failed, run twice, or run long
after the driver has repeated it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xpool._hosts import messages as m

from .host import Host

if TYPE_CHECKING:
    from .hosts import HostWorld

__all__ = ["SimFleet"]


class Trip:
    """One call of the driver; its first event is its only one."""

    def __init__(self, world: HostWorld, host: Host, failed: Any, hold: bool) -> None:
        self.world, self.host, self.failed, self.hold = world, host, failed, hold
        self.over = False

    def fail(self) -> None:
        """Report to the driver that the call failed."""
        self.host.trouble(self.world.now)
        self.tell(self.failed)

    def tell(self, event: Any) -> None:
        """Report the call's outcome to the driver, unless it has one already."""
        if not self.over:
            self.over = True
            if self.hold and type(event) is m.Replied and self.world.draw.callers.chance(0.8):
                self.world.caller_receives(event)
            else:  # by the engine's thread, because the answer took too long
                self.world.tell(event)


class SimFleet:
    """Carries calls to the hosts of a world, and kills hosts for the driver."""

    def __init__(self, world: HostWorld) -> None:
        self.world = world
        self.closed = False

    def start(self, tell: Callable[[Any], object]) -> list[int]:
        """Start agents, some of which never join."""
        world = self.world
        return [world.place() for _ in range(world.first_hosts)]

    def call(self, host: int, call: m.Call, hold: bool = False) -> None:
        """Call an agent with a copy of the messages."""
        world = self.world
        one = world.hosts[host]
        call = call._replace(messages=list(call.messages))
        trip = Trip(world, one, m.Unreached(host, call.number), hold)
        world.calls_host(host, call)

        def arrive(answers: bool) -> None:
            def reply(taken: int, first: int, messages: list[Any]) -> None:
                if answers:
                    self._back(trip, m.Replied(host, call.number, taken, first, messages))

            one.call(call, reply)

        world.later(world.wait_for_room(call.messages), self._go, trip, arrive)

    def receive(self, host: int, number: int, seconds: float) -> m.Replied | None:
        """Return None: an event follows, and `Trip.tell` decides which thread gets it."""
        return None

    def _go(self, trip: Trip, arrive: Callable[[bool], None]) -> None:
        world = self.world
        fate = world.draw.network.random()
        if fate < world.losses:  # lost on the way there or back
            trip.host.trouble(world.now + 4 * world.latency)
            world.later(world.draw.network.up_to(world.latency * 4), trip.fail)
            if world.draw.network.chance(0.5):
                self._carry(trip, arrive, False)
            return
        self._carry(trip, arrive, True)
        if fate > 1 - world.losses:
            self._carry(trip, arrive, False)

    def _carry(self, trip: Trip, arrive: Callable[[bool], None], answers: bool) -> None:
        world = self.world
        late = 20 if world.draw.network.chance(world.losses) else 1
        world.later(world.trip() * late, self._arrive, trip, arrive, answers)

    def _arrive(self, trip: Trip, arrive: Callable[[bool], None], answers: bool) -> None:
        world, host = self.world, trip.host
        if world.draw.faults.chance(world.accidents):
            world.accident(host)
        if not host.alive:
            if answers:
                world.later(world.latency, trip.fail)
        elif world.now < host.whole_at:
            if answers and world.draw.network.chance(0.5):
                world.later(world.trip() * 4, trip.fail)
                answers = world.draw.network.chance(0.5)
            if world.draw.network.chance(0.5):
                world.later(host.whole_at - world.now + world.trip(),
                            self._arrive, trip, arrive, answers)  # fmt: skip
            elif answers:
                world.later(world.trip() * 4, trip.fail)
        else:
            arrive(answers)

    def _back(self, trip: Trip, event: Any) -> None:
        """Carry an answer to the driver."""
        world, host = self.world, trip.host

        def arrive() -> None:
            if world.now < host.whole_at:
                if world.draw.network.chance(0.5):
                    world.later(world.trip(), trip.fail)
                else:
                    world.later(host.whole_at - world.now + world.trip(), arrive)
            else:
                trip.tell(event)

        world.later(world.trip() + world.wait_for_room(event.messages), arrive)

    def stop(self, host: int, replace: bool = False) -> None:
        """Kill an agent, or let it never join; the driver is told afterwards."""
        world = self.world
        one = world.hosts.get(host)
        if one is None:
            world.comes_not(host)
        elif one.alive:
            world.later(max(0.0, one.whole_at - world.now) + world.trip(), world.dies, one)

    def close(self) -> None:
        self.closed = True
