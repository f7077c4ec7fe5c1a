"""The pending operations of a collective group, and how they and the group end."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from xpool.distributed.current import CurrentWorld
from xpool.distributed.errors import GroupError, GroupTimeout, NotAMember, PeerLost
from xpool.distributed.faults import connection_lost, first_line, timed_out

_ABORT_TAG = 0x7AB0  # of a message that no rank sends
_NEWS_SECONDS = 0.5  # to learn of a death, so that an error can name the process
_THREAD_SECONDS = 5.0  # for a thread that still waits for torch after the group's end
_MESSAGES = ("isend", "irecv")


class Pending:
    """A pending operation: the result of ``async_op=True``, `isend` and `irecv`.

    It also has the attributes of torch's ``Work``.
    """

    def __init__(self, operations: Operations, what: str, work: Any) -> None:
        self._operations, self._what, self._work = operations, what, work
        self._then: Callable[[], object] | None = None  # runs here after the operation
        self._src: int | None = None
        self._dst: int | None = None

    def wait(self, timeout: timedelta | None = None) -> Any:
        """Wait for the end, at most ``timeout``; None: the group's timeout.

        Returns True; for `irecv`, the rank of the sender.

        Raises:
            PeerLost: a member of the group has died.
            GroupTimeout: it took longer; the group is broken after this.
        """
        with self._operations.watched(self._what):
            self._work.wait(*(() if timeout is None else (timeout,)))
        # Only after success: `send_out` reports the messages that are left as lost.
        self._operations.received(self)
        # Once, even if this is called again.
        then, self._then = self._then, None
        if then is not None:
            then()
        return True if self._src is None else self._src

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __repr__(self) -> str:
        return f"<Pending {self._what} of {self._operations.label}>"


class ReceivingAny(Pending):
    """`irecv` from any rank.  gloo does not end it when a member dies.  So a thread waits for the
    message, and the caller waits for the thread or for the group's end."""

    def __init__(self, operations: Operations, what: str, work: Any) -> None:
        super().__init__(operations, what, work)
        self._received = False
        self._error: Exception | None = None
        self._over = operations.over_event()
        threading.Thread(target=self._receive, name="xpool-irecv", daemon=True).start()

    def _receive(self) -> None:
        try:
            self._work.wait()
            # Before `_over` is set: the waiting caller reads this.
            self._received = True
        except RuntimeError as exc:
            self._error = exc
        self._over.set()

    def is_completed(self) -> bool:
        """Whether a message has come."""
        return self._received

    def wait(self, timeout: timedelta | None = None) -> int:
        in_time = self._over.wait(None if timeout is None else timeout.total_seconds())
        self._operations.forget_event(self._over)
        # Inside `watched`, which turns the error into the group's; `timed_out` reads the text.
        with self._operations.watched("irecv"):
            if not in_time:
                raise RuntimeError("Timed out waiting")
            if self._error is not None:
                raise self._error
            if not self._received:
                raise RuntimeError("the group is broken")
        sender: int = self._operations.ranks[self._work._source_rank()]
        return sender


class Operations:
    """The pending operations of one group, and the group's state.

    A group breaks as a whole, once.  Then its connections are closed, which ends everything that is
    pending, and later operations raise an error with the same reason.
    """

    def __init__(self, world: CurrentWorld, ranks: list[int], group: Any, timeout: float) -> None:
        self.group = group  # torch's; None if this process is not a member, and after the end
        self.ranks, self.timeout = ranks, timeout
        self.label = f"<CollectiveGroup of ranks {', '.join(map(str, ranks))}>"
        self.destroyed = False
        self._world = world
        # Held briefly: threads of torch's RPC take it to break the group while other threads wait
        # for torch.  So no thread waits for torch, or closes connections, while it holds the lock.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # of _begun and _aborted
        # Guarded by _lock: why the group is broken, and the events of `ReceivingAny`.
        self._broken: GroupError | None = None
        self._events: set[threading.Event] = set()
        # Guarded by _lock: the number of collectives that the lost rank has completed, which may
        # still succeed in the broken group; and whether the connections have been closed.
        self._unharmed = 0
        self._aborted = False
        # Guarded by _lock: the number of collectives that were begun, and how many of them, from
        # the first on, have succeeded.  All members begin the same ones in the same order, and they
        # end in this order.
        self._begun = self._succeeded = 0
        # Guarded by _lock.  torch completes a collective whose `Pending` was dropped, but not a
        # message.
        self._works: deque[Any] = deque()
        self._messages: weakref.WeakSet[Pending] = weakref.WeakSet()
        # Guarded by _lock, an ordered set: messages that were sent and not waited for.  torch drops
        # a message when its work is collected, and the receiver then takes the wrong message.
        self._sent: dict[Pending, None] = {}
        self._closing: threading.Thread | None = None  # waits for torch; ends with the group

    def launch(self, what: str, start: Callable[[], Any], kind: type[Pending] = Pending) -> Pending:
        """Begin an operation: ``start`` returns torch's work."""
        if self.group is None and not self.destroyed:
            raise NotAMember(
                f"Rank {self._world.rank} is not in the group, whose ranks are {self.ranks}."
            )
        with self._lock:
            # A collective that the lost rank has completed may still begin.
            if self._broken is not None and (what in _MESSAGES or self._begun >= self._unharmed):
                raise self._error(what)
        # Without the lock, which `break_for` takes after an error.
        with self.watched(what, launching=True):
            pending = kind(self, what, start())
        with self._changed:
            if what in _MESSAGES:
                self._messages.add(pending)
                if what == "isend":
                    self._sent[pending] = None
            else:
                self._retire()
                self._works.append(pending._work)
                self._begun += 1
                self._changed.notify_all()
        return pending

    @contextmanager
    def watched(self, what: str, launching: bool = False) -> Iterator[None]:
        """Break the group if torch raises an error in the block; raise the group's error."""
        try:
            yield
        except GroupError:
            raise  # raised by an inner `watched`
        except RuntimeError as exc:
            if launching and not (connection_lost(exc) or isinstance(exc, dist.DistError)):
                raise  # an error in the caller's arguments: nothing was sent
            names = tuple(self._world.names[rank] for rank in self.ranks)
            # While `explain` waits, a loss may break the group with the name of the process.  The
            # first reason stays.
            self.break_for(explain(self._world, names, exc, self.timeout))
            raise self._error(what) from exc

    def completed(self) -> int:
        """Return how many collectives, from the first on, have succeeded here."""
        with self._lock:
            self._retire()
            return self._succeeded

    # -- messages ---------------------------------------------------------------------------

    def received(self, pending: Pending) -> None:
        """Record that an operation has ended; a sent message has been received."""
        if pending._dst is not None:
            with self._lock:
                self._sent.pop(pending, None)

    def send_out(self, seconds: float) -> None:
        """Wait until all sent messages are received; warn of those that are not."""
        end = time.monotonic() + seconds
        with self._lock:
            sent = list(self._sent) if self._broken is None else []
        try:
            for pending in sent:
                # `is_completed` is of no use: it is False until someone waits for the message.
                pending.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except GroupError:
            with self._lock:
                lost = [str(one._dst) for one in self._sent]
            warnings.warn(
                f"{self.label} ends in {self._world.name!r} before {len(lost)} messages to rank "
                f"{', '.join(sorted(set(lost)))} were received; they are lost.",
                ResourceWarning,
                stacklevel=3,
            )

    def over_event(self) -> threading.Event:
        """Return an event that is set when the group breaks."""
        event = threading.Event()
        with self._lock:
            if self._broken is None:
                self._events.add(event)
            else:
                event.set()
        return event

    def forget_event(self, event: threading.Event) -> None:
        with self._lock:
            self._events.discard(event)

    # -- the end ----------------------------------------------------------------------------

    def break_for(self, error: GroupError, abort: bool = True, completed: int = 0) -> None:
        """End everything that is pending here, for this reason.

        The first ``completed`` collectives are left, which the lost rank has completed: its
        farewell may come before the data that it has sent for them.
        """
        with self._changed:
            first = self._broken is None
            if first:
                self._broken, self._unharmed = error, completed
            elif completed < self._unharmed:  # another rank is lost, which had completed fewer
                self._unharmed = completed
                self._changed.notify_all()
            else:
                return
            events, self._events = self._events, set()
            self._retire()
            over = self._succeeded >= self._unharmed
        # Without the lock: `_close` takes it, and waits for torch.
        for event in events:
            event.set()
        if abort and over:
            self._close()
        elif abort and first:
            # Some collectives may still succeed.  A new thread waits for them, since this one may
            # be a thread of torch's RPC, which has other calls to answer.
            closing = threading.Thread(
                target=self._close_later, name="xpool-group-end", daemon=True
            )
            closing.start()
            self._closing = closing

    def end(self) -> None:
        """Destroy the group: messages that were not received are lost."""
        with self._lock:
            works = [*self._works, *(one._work for one in self._messages)]
            # Pending operations would keep the connections open.
            busy = any(not work.is_completed() for work in works)
        self.break_for(GroupError(f"{self.label} was destroyed; make a new one."), abort=False)
        # If nothing is pending, torch's own destruction closes the connections.
        self._close(abort=busy)
        if not self.destroyed:
            self.destroyed = True
            # The end of torch's default group, which `World.group` uses, ends all others.
            if self.group is not None and dist.is_initialized():
                dist.destroy_process_group(self.group)
            self.group = None
        with self._lock:
            self._sent.clear()
        # A thread that is in torch's code when Python ends aborts the process: Python ends such
        # threads by pthread_exit(3), which unwinds C++ functions that must not throw.
        if self._closing not in (None, threading.current_thread()):
            self._closing.join(_THREAD_SECONDS)

    def _close(self, abort: bool = True) -> None:
        """Close the group's connections, once, so that everything that waits on them ends."""
        with self._changed:
            abort, self._aborted = abort and not self._aborted, True
            self._changed.notify_all()
        if abort and self.group is not None:
            _abort(self.group)

    def _close_later(self) -> None:
        """Close the connections when the collectives that may still succeed have ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._aborted or self._begun >= self._unharmed)
                self._retire()
                if self._aborted or self._begun - len(self._works) >= self._unharmed:
                    break
                # There is one: fewer than `_unharmed` of the begun ones have ended.
                work = self._works[0]
            try:
                work.wait()
            except RuntimeError:
                break  # its own caller gets the error
        self._close()

    def _retire(self) -> None:
        """Remove the works that have ended; the caller holds the lock."""
        # `wait` of a completed work returns at once, and raises if the work has failed.
        while self._works and self._works[0].is_completed():
            before = self._begun - len(self._works)
            try:
                self._works.popleft().wait()
            except RuntimeError:
                continue  # it failed, and none after it counts as a success
            if self._succeeded == before:
                self._succeeded += 1

    def _error(self, what: str) -> GroupError:
        """Return a new error for a caller, with the reason of the group's end."""
        # Without the lock, which `launch` holds: the reason is set only once.
        reason = self._broken
        if self.destroyed:
            return GroupError(str(reason))
        return type(reason or GroupError())(
            f"{what} in {self.label} failed: {reason}. The group is broken: destroy() it in all "
            "remaining members and make a new one of them."
        )


def explain(
    world: CurrentWorld, names: tuple[str, ...], exc: RuntimeError, timeout: float
) -> GroupError:
    """Return the error for an operation among these members that has failed in torch."""
    # After a timeout, or without RPC, no message about a death can be on its way.
    late = timed_out(exc)
    lost = world.peers.wait_lost(list(names), 0 if late or not world.has_rpc else _NEWS_SECONDS)
    if lost:
        return PeerLost("; ".join(world.peers.describe(name) for name in lost))
    members = ", ".join(names)
    if late:
        return GroupTimeout(
            f"not all of {members} took part within {timeout:g} s, or the timeout that was given"
        )
    story = first_line(exc)
    if connection_lost(exc):
        return PeerLost(f"a member (of {members}) has died, or left the group ({story[:200]})")
    return GroupError(story)


def _abort(group: Any) -> None:
    """Close the connections of a process group, so that everything that waits for them ends."""
    try:
        if dist.get_backend(group) == "gloo":
            # gloo has no call for this, but closes connections after a receive has timed out.
            nothing = torch.empty(1)
            group.recv_anysource([nothing], _ABORT_TAG).wait(timedelta(milliseconds=1))
        else:
            group.abort()
    except RuntimeError:
        pass  # it timed out, as intended, or they are closed already
    except ValueError:
        pass  # torch has destroyed the group
