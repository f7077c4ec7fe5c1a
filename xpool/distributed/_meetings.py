"""Meetings: several ranks wait for each other, but not for ranks that are lost.

A lost rank is detected without a thread and without polling.  Each rank holds a call open to each
other rank.  The called process answers it when it leaves.  If it dies, the call fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed._current import DIED, LEFT, Peers, current, the_world
from xpool.distributed._group_errors import GroupTimeout, PeerLost
from xpool.distributed._remote_calls import Raised, call, raised, settle
from xpool.errors import OptionError

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


_Answer = list[str] | Raised
"""The error of a meeting, or the names of the lost members (of a meeting of survivors)."""


@dataclass
class _Meeting:
    expected: tuple[str, ...]
    of_survivors: bool  # whether the meeting can end without the lost members
    arrived: dict[str, Future[Any]] = field(default_factory=dict)

    def missing(self, lost: Container[str] = ()) -> list[str]:
        return [name for name in self.expected if name not in self.arrived and name not in lost]

    def answer(self, value: Any) -> None:
        for future in self.arrived.values():
            future.set_result(value)


class Meetings:
    """The meetings in which this process is the host or a guest.

    One member of a meeting is its host.  A meeting ends when all members have arrived, or when one
    is lost.  A host that leaves right after a meeting may close a connection before the answer has
    been sent.  So it keeps each answer until the guest acknowledges it in its next arrival, and
    repeats the others in its farewell.
    """

    def __init__(self) -> None:
        # Taken before the lock of `Peers`, never after it.  No future is set under it, because a
        # host is its own guest, too: the answer may call `settle` in this thread.
        self._lock = threading.Lock()
        # Guarded by _lock: in a host, its open meetings, and the unacknowledged answers by guest.
        self._open: dict[Any, _Meeting] = {}
        self._unacknowledged: dict[str, dict[Any, Any]] = {}
        # Guarded by _lock: in a guest, the awaited answers and those to acknowledge, by host.
        self._awaited: dict[str, dict[Any, Future[Any]]] = {}
        self._received: dict[str, list[Any]] = {}

    # -- in the host ----------------------------------------------------------------------------

    def arrive(
        self,
        key: Any,
        name: str,
        expected: tuple[str, ...],
        of_survivors: bool,
        received: list[Any],
    ) -> Future[Any]:
        """Record that ``name`` has arrived, and that it has the answers to the keys ``received``.

        Return a future of the answer to this arrival.
        """
        future: Future[Any] = Future()
        with self._lock:
            for earlier in received:
                self._unacknowledged.get(name, {}).pop(earlier, None)
            meeting = self._open.setdefault(key, _Meeting(expected, of_survivors))
            meeting.arrived[name] = future
            if meeting.expected != expected:
                text = (
                    f"{key[1]!r} is being made with the members {list(meeting.expected)}, and by "
                    f"{name!r} with {list(expected)}: give the same members, in the same order."
                )
                # All members that have arrived get the error, instead of waiting for a timeout.
                answer: _Answer | None = self._end(key, meeting, raised(OptionError(text)))
            else:
                answer = self._end_if_due(key, meeting)
        if answer is not None:
            meeting.answer(answer)
        return future

    def _end_if_due(self, key: Any, meeting: _Meeting) -> _Answer | None:
        """End a meeting if all members have arrived or are lost.  The caller holds the lock."""
        gone = the_world().peers.lost()
        lost = [one for one in meeting.expected if one in gone]
        if lost and not meeting.of_survivors:
            what = "; ".join(the_world().peers.describe(name) for name in lost)
            error = PeerLost(f"{key[0]} of {key[1]!r} cannot complete: {what}.")
            return self._end(key, meeting, raised(error))
        return None if meeting.missing(lost) else self._end(key, meeting, lost)

    def _end(self, key: Any, meeting: _Meeting, answer: _Answer) -> _Answer:
        # After this no other call finds the meeting, so it is answered once.
        del self._open[key]
        for name in meeting.arrived:
            self._unacknowledged.setdefault(name, {})[key] = answer
        return answer

    def answers(self, name: str) -> dict[Any, Any]:
        """Return the answers that ``name`` has not acknowledged."""
        with self._lock:
            return dict(self._unacknowledged.get(name, {}))

    def withdraw(self, key: Any, name: str) -> list[str]:
        """End a meeting, because ``name`` gives it up.  Return the members that did not arrive."""
        with self._lock:
            meeting = self._open.pop(key, None)
        if meeting is None:
            return []  # it has ended, and the answer was late
        missing = meeting.missing()
        text = f"{name!r} gave up {key[0]} of {key[1]!r}: {', '.join(missing)} did not come."
        meeting.answer(raised(GroupTimeout(text)))
        return missing

    def lose(self, name: str) -> None:
        """End the meetings that need not, or cannot, wait for ``name``: this rank is lost."""
        with self._lock:
            # First a list, because `_end` changes `_open`.
            concerned = [(key, one) for key, one in self._open.items() if name in one.expected]
            answers = [(one, self._end_if_due(key, one)) for key, one in concerned]
        for meeting, answer in answers:
            if answer is not None:
                meeting.answer(answer)

    # -- in a guest -----------------------------------------------------------------------------

    def expect(self, host: str, key: Any) -> tuple[Future[Any], list[Any]]:
        """Return a future of the host's answer, and the keys of the answers to acknowledge."""
        future: Future[Any] = Future()
        with self._lock:
            self._awaited.setdefault(host, {})[key] = future
            return future, self._received.pop(host, [])

    def settle(self, host: str, key: Any, done: Future[Any], timeout: float) -> None:
        """Give the future of `expect` the host's answer, or the error of the call to the host."""
        with self._lock:
            future = self._awaited[host].pop(key, None)
            self._received.setdefault(host, []).append(key)
        if future is not None:  # else `deliver` has settled it already
            settle(future, done, host, meet, timeout)

    def deliver(self, host: str, answers: dict[Any, Any]) -> None:
        """Settle the futures whose answers are in a host's farewell."""
        with self._lock:
            awaited = self._awaited.get(host, {})
            found = [(awaited.pop(key), answers[key]) for key in answers if key in awaited]
        for future, answer in found:
            done: Future[Any] = Future()
            done.set_result(answer)
            settle(future, done, host, meet, 0)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _arrive(*arrival: Any) -> Future[Any]:
    return the_world().meetings.arrive(*arrival)


def _withdraw(key: Any, name: str) -> list[str]:
    missing: list[str] = the_world().meetings.withdraw(key, name)
    return missing


def meet(
    host: str,
    key: tuple[Any, ...],
    expected: tuple[str, ...],
    timeout: float = -1,
    *,
    of_survivors: bool = False,
) -> list[str]:
    """Wait until all of ``expected`` have called this; ``host`` is one of them.

    ``key`` consists of an operation, its object, and optionally a number that distinguishes
    meetings of the same kind.  A meeting of survivors does not wait for lost members, and returns
    their names.  All members get the same names.

    Raises:
        PeerLost: a member has died (in a meeting of survivors, the host).
        GroupTimeout: a member did not call this within ``timeout`` seconds (as in `call`).
        OptionError: other members have a different list of members.
    """
    world = the_world()
    world.peers.check(host)
    # Registered before the call, because an answer or a farewell may arrive at once.
    outer, received = world.meetings.expect(host, key)
    arrival = key, world.name, expected, of_survivors, received
    inner = rpc.rpc_async(host, _arrive, args=arrival, timeout=timeout)
    inner.add_done_callback(lambda done: world.meetings.settle(host, key, done, timeout))
    try:
        lost: list[str] = outer.wait()
        return lost
    except GroupTimeout:
        # The host ends the meeting for all, and returns the members that have not arrived.
        missing = call(host, _withdraw, (key, world.name), timeout=FAREWELL_SECONDS).wait()
        if not missing:
            raise  # all members arrived, but the answer was late
        seconds = rpc.get_rpc_timeout() if timeout < 0 else timeout
        raise GroupTimeout(
            f"{key[0]} of {key[1]!r}: {', '.join(missing)} did not come within {seconds:g} s. "
            f"All of {', '.join(expected)} have to call it."
        ) from None
