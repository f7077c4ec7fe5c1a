"""How a world learns that a rank has died or left, without a thread and without a clock.

Each rank holds a call open to each other.  Such a call is answered only by a process that leaves;
it fails when its process dies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed.current import current, the_world
from xpool.distributed.peers import DIED, LEFT, Peers

FAREWELL_SECONDS = 5.0
"""Limit of a call that only improves messages of others."""


def watch(peers: Peers, timeout: float) -> None:
    """Connect to all others, within ``timeout`` seconds each, and hold calls open there.

    All connections are made now: a process that dies while it connects to another breaks, in torch
    2.13, what accepts connections in that one, for all.
    """
    others = [name for name in peers.names if name != peers.me]
    # One after the other: so many connections at once would be a burden on the machine.
    for name in others:
        rpc.rpc_sync(name, _greet, timeout=timeout)

    def ended(done: Future[str], name: str) -> None:
        try:
            # LEFT, from `Watchers.leave`; torch raises when the connection is lost instead.
            reason = done.value()
        except RuntimeError:
            reason = DIED
        peers.lose(name, reason)

    for name in others:
        # No timeout: it lasts as long as both are in the world.
        held = rpc.rpc_async(name, _hold, timeout=0)
        held.add_done_callback(lambda done, name=name: ended(done, name))


class Watchers:
    """The calls that other ranks hold open here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[Future[str]] | None = []  # guarded by _lock; None: this process leaves

    def hold(self) -> Future[str]:
        """Return a future that is answered when this process leaves."""
        future: Future[str] = Future()
        with self._lock:
            if self._held is not None:
                self._held.append(future)
                return future
        # Without the lock, here and in `leave`: torch may call back, or send, in this thread.
        future.set_result(LEFT)
        return future

    def leave(self, peers: Peers, farewell: Callable[[str], Farewell] | None) -> None:
        """Answer the held calls; send each rank that is there ``farewell(name)`` before."""
        left = peers.leave()
        # Before the held calls are answered: these answers do not say which collectives were
        # completed, and the first news of a loss counts.
        if farewell is not None:
            for name in left:
                try:
                    # The answers below may be lost with their connections; this one is waited for.
                    told = peers.me, farewell(name)
                    rpc.rpc_sync(name, _told, args=told, timeout=FAREWELL_SECONDS)
                except RuntimeError:
                    pass  # it is gone or too slow: it learns of this by its own held call
        with self._lock:
            held, self._held = self._held or [], None
        for future in held:
            future.set_result(LEFT)


@dataclass
class Farewell:
    """What a process that leaves tells another: what the two have ended together.

    Its last messages may be on their way in other connections than this news, and they may be lost
    with those connections.
    """

    completed: dict[Any, int]
    """By collective group, how many collectives have succeeded there."""
    answers: dict[Any, Any]
    """By meeting, answers that the receiver has not acknowledged."""


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _hold() -> Future[str]:
    return the_world().watchers.hold()


def _greet() -> None:
    """Answer a call that is made for its connection."""


def _told(name: str, farewell: Farewell) -> None:
    # None: the receiver has left as well, while the farewell was on its way.
    world = current()
    if world is not None:
        world.meetings.deliver(name, farewell.answers)
        world.peers.lose(name, LEFT, farewell.completed)
