"""Who of the world is still there, and meetings that do not wait for those who are not.

Each rank holds a call open to each other.  Such a call is answered only by a process that leaves;
it fails when its process dies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed.calls import DIED, Raised, call, raised, settle
from xpool.distributed.current import get_world, the_world
from xpool.distributed.errors import GroupTimeout, PeerLost
from xpool.errors import OptionError

__all__ = ["MOMENT", "Meetings", "Peers", "meet"]

LEFT = "has left the world"
MOMENT = 5.0  # seconds for what is said in passing: it improves messages, no more


class Peers:
    """The other ranks, as far as they are known to be there."""

    def __init__(
        self, names: list[str], me: str, on_loss: Callable[[str, dict[Any, int]], None]
    ) -> None:
        self.names, self.me = names, me
        self._on_loss = on_loss
        # Guards what follows; waited on by `wait_lost`.
        self._changed = threading.Condition()
        # Names are only ever added to `_lost`.
        self._lost: dict[str, str] = {}
        self._held: list[Future[str]] = []
        self._leaving = False

    def lead(self) -> str:
        """The lowest rank that is still there."""
        with self._changed:
            return next(name for name in self.names if name not in self._lost)

    def lost(self) -> dict[str, str]:
        """Those who are not there any more, and what became of them."""
        with self._changed:
            return dict(self._lost)

    def describe(self, name: str) -> str:
        """Say what became of a process, and who is left."""
        with self._changed:
            left = ", ".join(other for other in self.names if other not in self._lost)
            return f"{name!r} {self._lost.get(name, 'is there')}; still there: {left}"

    def check(self, name: str) -> None:
        """Raise `PeerLost` when a process is known to be gone."""
        # Without the lock: a look into a dict is atomic.
        if name in self._lost:
            raise PeerLost(f"No call can reach {name!r}: {self.describe(name)}.")

    def wait_lost(self, names: list[str], seconds: float) -> list[str]:
        """Wait a moment until one of these is known to be gone; return those who are."""
        with self._changed:
            self._changed.wait_for(lambda: any(name in self._lost for name in names), seconds)
            return [name for name in names if name in self._lost]

    # -- watching ---------------------------------------------------------------------------

    def watch(self) -> None:
        """Connect to all others, and hold calls open there.

        Not when there is something to say: a process that dies while it connects to another breaks
        what accepts connections in that one, for all.
        """
        others = [name for name in self.names if name != self.me]
        # One after the other: so many connections at once would be a burden on the machine.
        for name in others:
            rpc.rpc_sync(name, _greet)
        for name in others:
            # No timeout: it lasts as long as both are in the world.
            held = rpc.rpc_async(name, _hold, timeout=0)
            held.add_done_callback(lambda done, name=name: self._ended(done, name))

    def hold(self) -> Future[str]:
        """A caller watches this process: answer when it leaves."""
        future: Future[str] = Future()
        with self._changed:
            # Once it leaves, nobody looks into `_held` any more: the caller is answered below.
            if not self._leaving:
                self._held.append(future)
                return future
        # Without the lock, here and elsewhere: torch may call back, or send, in this thread.
        future.set_result(LEFT)
        return future

    def _ended(self, done: Future[str], name: str) -> None:
        try:
            # LEFT, from `leave`; torch raises when the connection is lost instead.
            reason = done.value()
        except RuntimeError:
            reason = DIED
        self.lose(name, reason)

    def lose(self, name: str, reason: str, completed: dict[Any, int] | None = None) -> None:
        """Take note that a process is gone; ``completed`` is as in `Farewell`."""
        with self._changed:
            # The first news counts.  When this process leaves, its calls fail: that tells nothing.
            if name in self._lost or name == self.me or self._leaving:
                return
            # Before `_on_loss`: it ends meetings, which ask who is lost.
            self._lost[name] = reason
            self._changed.notify_all()
        # Without the lock: `Meetings` asks `lost` under its own, so the other order would deadlock.
        self._on_loss(name, completed or {})

    def leave(self, farewell: Callable[[str], Farewell] | None) -> None:
        """Answer those who watch this process; tell them ``farewell(name)`` first, if given."""
        with self._changed:
            self._leaving = True
            held, self._held = self._held, []
            left = [name for name in self.names if name not in self._lost and name != self.me]
        # Before the held calls are answered: these answers do not say which collectives were
        # completed, and the first news of a loss counts.
        if farewell is not None:
            for name in left:
                try:
                    # Answers may be lost with the connections that they are to take; this is not.
                    rpc.rpc_sync(name, _told, args=(self.me, farewell(name)), timeout=MOMENT)
                except RuntimeError:
                    pass  # it is gone itself, or too slow: then it will find out
        for future in held:
            future.set_result(LEFT)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _hold() -> Future[str]:
    return the_world().peers.hold()


def _greet() -> None:
    """Answer a call that is made for its connection."""


@dataclass
class Farewell:
    """What a process that leaves tells another: what the two have ended together.

    Its last messages may be on their way in other connections than this news, and they may be lost
    with those connections.
    """

    completed: dict[Any, int]
    """By collective group, how many collectives have succeeded there."""
    answers: dict[Any, Any]
    """By meeting, answers of which the receiver has not said that it has them."""


def _told(name: str, farewell: Farewell) -> None:
    # None: the receiver has left as well, while the farewell was on its way.
    world = get_world()
    if world is not None:
        world.meetings.deliver(name, farewell.answers)
        world.peers.lose(name, LEFT, farewell.completed)


# -- meetings -----------------------------------------------------------------------------------


@dataclass
class _Meeting:
    expected: tuple[str, ...]
    of_survivors: bool  # goes on without those who are lost
    arrived: dict[str, Future[Any]] = field(default_factory=dict)

    def missing(self, lost: Container[str] = ()) -> list[str]:
        return [name for name in self.expected if name not in self.arrived and name not in lost]

    def answer(self, value: Any) -> None:
        for future in self.arrived.values():
            future.set_result(value)


class Meetings:
    """Meetings that take place in this process: each ends when all have come, or cannot.

    The answer is a `Raised`, or the names of those who are lost: for a meeting of survivors.

    A host that leaves right after a meeting might take along answers that are still to be sent. So
    it keeps them until they are acknowledged, in the next arrival, and says them in its farewell.
    """

    def __init__(self) -> None:
        # Taken before the lock of `Peers`, never after it.  Nothing is answered under it: a host is
        # its own guest as well, and its answer may call `settle` in this thread.
        self._lock = threading.Lock()
        # Guarded by _lock, in the host: open meetings, and by name the answers to be acknowledged.
        self._open: dict[Any, _Meeting] = {}
        self._unacknowledged: dict[str, dict[Any, Any]] = {}
        # Guarded by _lock, in a guest: by host, answers waited for, and those to acknowledge.
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
        """``name`` has come, and has ``received`` answers; the future will be answered."""
        future: Future[Any] = Future()
        with self._lock:
            for earlier in received:
                self._unacknowledged.get(name, {}).pop(earlier, None)
            meeting = self._open.setdefault(key, _Meeting(expected, of_survivors))
            if meeting.expected != expected:
                text = (
                    f"{key[1]!r} is being made with the members {list(meeting.expected)}, and by "
                    f"{name!r} with {list(expected)}: give the same members, in the same order."
                )
                future.set_result(raised(OptionError(text)))
                return future
            meeting.arrived[name] = future
            # Whoever comes last ends it; so does one who comes after a member was lost.
            answer = self._answer(key, meeting)
        if answer is not None:
            meeting.answer(answer)
        return future

    def _answer(self, key: Any, meeting: _Meeting) -> list[str] | Raised | None:
        """End a meeting if it can; under the lock."""
        gone = the_world().peers.lost()
        lost = [one for one in meeting.expected if one in gone]
        if lost and not meeting.of_survivors:
            answer: list[str] | Raised = raised(_lost_error(key, lost))
        elif meeting.missing(lost):
            return None
        else:
            answer = lost
        # From here on nobody else finds it, so it is answered once.
        del self._open[key]
        # Kept until it is acknowledged: the connection may end before the answer gets through.
        for name in meeting.arrived:
            self._unacknowledged.setdefault(name, {})[key] = answer
        return answer

    def answers(self, name: str) -> dict[Any, Any]:
        """Return the answers that ``name`` may not have."""
        with self._lock:
            return dict(self._unacknowledged.get(name, {}))

    def withdraw(self, key: Any, name: str) -> list[str]:
        """``name`` gives up, which ends the meeting; return who had not come."""
        with self._lock:
            meeting = self._open.pop(key, None)
        # It has ended meanwhile, and its answer was on its way.
        if meeting is None:
            return []
        missing = meeting.missing()
        text = f"{name!r} gave up {key[0]} of {key[1]!r}: {', '.join(missing)} did not come."
        meeting.answer(raised(GroupTimeout(text)))
        return missing

    def lose(self, name: str) -> None:
        """End the meetings that waited for ``name``, who is lost."""
        with self._lock:
            concerned = [(key, one) for key, one in self._open.items() if name in one.expected]
            # A list of them is made first, since `_answer` takes meetings out.
            answers = [(one, self._answer(key, one)) for key, one in concerned]
        for meeting, answer in answers:
            if answer is not None:
                meeting.answer(answer)

    # -- in a guest -----------------------------------------------------------------------------

    def expect(self, host: str, key: Any) -> tuple[Future[Any], list[Any]]:
        """Begin to wait for an answer; return its future, and the answers to acknowledge."""
        future: Future[Any] = Future()
        with self._lock:
            self._awaited.setdefault(host, {})[key] = future
            return future, self._received.pop(host, [])

    def settle(self, host: str, key: Any, done: Future[Any], timeout: float) -> None:
        """The host's own answer has come, or will not."""
        with self._lock:
            future = self._awaited[host].pop(key, None)
            self._received.setdefault(host, []).append(key)
        # None: the farewell was quicker, and `deliver` has settled it.
        if future is not None:
            settle(future, done, host, meet, timeout)

    def deliver(self, host: str, answers: dict[Any, Any]) -> None:
        """``host`` leaves, and these are answers that may not have come."""
        with self._lock:
            awaited = self._awaited.get(host, {})
            found = [(awaited.pop(key), answers[key]) for key in answers if key in awaited]
        for future, answer in found:
            done: Future[Any] = Future()
            done.set_result(answer)
            settle(future, done, host, meet, 0)


def _lost_error(key: Any, lost: list[str]) -> PeerLost:
    peers = the_world().peers
    what = "; ".join(peers.describe(name) for name in lost)
    return PeerLost(f"{key[0]} of {key[1]!r} cannot complete: {what}.")


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _arrive(*arrival: Any) -> Future[Any]:
    return the_world().meetings.arrive(*arrival)


def _withdraw(key: Any, name: str) -> list[str]:
    return the_world().meetings.withdraw(key, name)


def meet(
    host: str,
    key: tuple[Any, ...],
    expected: tuple[str, ...],
    timeout: float = -1,
    *,
    of_survivors: bool = False,
) -> list[str]:
    """Wait, in all of ``expected``, until all have called this; ``host`` is one of them.

    ``key`` is what is done, for whom, and what tells this meeting from the next. A meeting of
    survivors does not wait for those who are lost, and returns, the same in all, who they are.

    Raises:
        PeerLost: one of them has died; of a meeting of survivors, the host.
        GroupTimeout: one of them did not come within ``timeout`` seconds (as in `call`).
        OptionError: the others expect somebody else.
    """
    world = the_world()
    world.peers.check(host)
    # Before the call: its answer, or a farewell, may come at any time after it.
    outer, received = world.meetings.expect(host, key)
    arrival = key, world.name, expected, of_survivors, received
    inner = rpc.rpc_async(host, _arrive, args=arrival, timeout=timeout)
    inner.add_done_callback(lambda done: world.meetings.settle(host, key, done, timeout))
    try:
        lost: list[str] = outer.wait()
        return lost
    except GroupTimeout:
        # The host ends the meeting for all, and says who had not come.
        missing = call(host, _withdraw, (key, world.name), timeout=MOMENT).wait()
        # All had come: the answer was late, not they.
        if not missing:
            raise
        seconds = rpc.get_rpc_timeout() if timeout < 0 else timeout
        raise GroupTimeout(
            f"{key[0]} of {key[1]!r}: {', '.join(missing)} did not come within {seconds:g} s. "
            f"All of {', '.join(expected)} have to call it."
        ) from None
