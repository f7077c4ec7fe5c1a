"""Detects that a rank has died or left, without a thread and without polling.

Each rank holds a call open to each other rank.  The called process answers it when it leaves.  If
it dies, the call fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed._current import DIED, LEFT, Peers, current, the_world

Farewell = tuple[dict[Any, int], dict[Any, Any]]
"""The message of a process to another before it leaves: the number of collectives that have
succeeded, by group, and the answers that the other has not acknowledged, by meeting.

Earlier messages use other connections, so they may arrive later than it, or never.
"""

FAREWELL_SECONDS = 5.0
"""Seconds for a call that only improves the error messages of others."""


def watch(peers: Peers, timeout: float) -> None:
    """Connect to all others, within ``timeout`` seconds each, and hold a call open to each.

    All connections are made now: in torch 2.13, a process that dies while it connects to another
    one breaks the listener there, so that no other process can connect.
    """
    others = [name for name in peers.names if name != peers.me]
    # Connected one after the other, because many connections at once would load the machine.
    for name in others:
        rpc.rpc_sync(name, _greet, timeout=timeout)

    def ended(done: Future[str], name: str) -> None:
        try:
            # The value is LEFT, from `Watchers.leave`.  It raises if the connection is lost.
            reason = done.value()
        except RuntimeError:
            reason = DIED
        peers.lose(name, reason)

    for name in others:
        # The call has no timeout: it lasts as long as both processes are in the world.
        held = rpc.rpc_async(name, _hold, timeout=0)
        held.add_done_callback(lambda done, name=name: ended(done, name))


class Watchers:
    """The calls that other ranks hold open to this process."""

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
        # Set without the lock, here and in `leave`: torch may run callbacks in this thread.
        future.set_result(LEFT)
        return future

    def leave(self, peers: Peers, farewell: Callable[[str], Farewell] | None) -> None:
        """Send ``farewell(name)`` to each rank that is not lost, then answer the held calls."""
        left = peers.leave()
        # A rank heeds only the first message about a loss, and only the farewell says which
        # collectives were completed.  So it is sent before the held calls are answered.
        if farewell is not None:
            for name in left:
                try:
                    # Wait for this call, because the answers below may be lost on the way.
                    told = peers.me, *farewell(name)
                    rpc.rpc_sync(name, _told, args=told, timeout=FAREWELL_SECONDS)
                except RuntimeError:
                    pass  # it has gone, or is slow and will learn of this by its held call
        with self._lock:
            held, self._held = self._held or [], None
        for future in held:
            future.set_result(LEFT)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _hold() -> Future[str]:
    return the_world().watchers.hold()


def _greet() -> None:
    """Do nothing: `watch` calls this to open a connection."""


def _told(name: str, completed: dict[Any, int], answers: dict[Any, Any]) -> None:
    world = current()  # None if the receiver has left as well
    if world is not None:
        world.meetings.deliver(name, answers)
        world.peers.lose(name, LEFT, completed)
