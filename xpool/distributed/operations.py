"""The operations of a collective group that are under way, and how they and the group end."""

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
_NEWS_SECONDS = 0.5  # for the news of a death, so that an error can name the process
_THREAD_SECONDS = 5.0  # for threads that still wait for torch when the group has ended
_MESSAGES = ("isend", "irecv")


class Pending:
    """An operation under way; what ``async_op=True``, `isend` and `irecv` return.

    It also has the attributes of torch's ``Work``.
    """

    def __init__(self, operations: Operations, what: str, work: Any) -> None:
        self._operations, self._what, self._work = operations, what, work
        self._then: Callable[[], object] | None = None  # runs here after the operation
        self._src: int | None = None
        self._dst: int | None = None

    def wait(self, timeout: timedelta | None = None) -> Any:
        """Wait for the end, at most ``timeout``; None takes the group's timeout.

        Returns True; for `irecv`, the rank of the sender.

        Raises:
            PeerLost: a member of the group has died.
            GroupTimeout: it took longer; the group is broken then.
        """
        with self._operations.watched(self._what):
            self._work.wait(*(() if timeout is None else (timeout,)))
        # Only after success: `send_out` reports the messages that are left as lost.
        self._operations.received(self)
        # Once, however often this is called.
        then, self._then = self._then, None
        if then is not None:
            then()
        return True if self._src is None else self._src

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __repr__(self) -> str:
        return f"<Pending {self._what} of {self._operations.label}>"


class ReceivingAny(Pending):
    """`irecv` from any rank.  gloo does not end it when a member dies, so a thread waits for the
    message, and the caller waits for that thread or for the group's end."""

    def __init__(self, operations: Operations, what: str, work: Any) -> None:
        super().__init__(operations, what, work)
        self._received = False
        self._error: Exception | None = None
        # Set at once if the group is broken already, so that no wait is missed.
        self._over = operations.over_event()
        threading.Thread(target=self._receive, name="xpool-irecv", daemon=True).start()

    def _receive(self) -> None:
        try:
            self._work.wait()
            # Before `_over`: the caller that it wakes reads this.
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
        # Raised inside, so that it becomes the group's error; `timed_out` goes by the text.
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
    """What is under way in one group, and whether the group still works.

    A group breaks as a whole, once: its connections are closed, which ends everything that is
    pending, and later operations raise the same reason.
    """

    def __init__(self, world: CurrentWorld, ranks: list[int], group: Any, timeout: float) -> None:
        self.group = group  # torch's; None where this process is no member, and after the end
        self.ranks, self.timeout = ranks, timeout
        self.label = f"<CollectiveGroup of ranks {', '.join(map(str, ranks))}>"
        self.destroyed = False
        self._world = world
        # Held for moments only: threads of torch's RPC take it to break the group, while others
        # wait for torch.  So nothing waits for torch, or closes connections, under it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # of _begun and _aborted
        # Guarded by _lock: why the group is broken, and the events of `ReceivingAny`.
        self._broken: GroupError | None = None
        self._events: set[threading.Event] = set()
        # Guarded by _lock: the first collectives, which the lost rank has completed, so that they
        # may still end well in a broken group; and whether the connections have been closed.
        self._unharmed = 0
        self._aborted = False
        # Guarded by _lock: how many collectives were begun, and how many of the first of them have
        # succeeded.  All members begin the same ones in the same order, and they end in it.
        self._begun = self._succeeded = 0
        # Guarded by _lock.  torch goes on with a collective whose `Pending` was dropped, but not
        # with a message.
        self._works: deque[Any] = deque()
        self._messages: weakref.WeakSet[Pending] = weakref.WeakSet()
        # Guarded by _lock, a set in order: messages sent, and not waited for.  torch drops a
        # message when its work is collected, and the receiver's next one then goes astray.
        self._sent: dict[Pending, None] = {}
        # Guarded by _lock: threads that wait for torch, and end when the group does.
        self._threads: list[threading.Thread] = []

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
        # Without the lock: an error of torch's breaks the group, which takes it.
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
        """Turn an error of torch's into the group's end, with a reason."""
        try:
            yield
        except GroupError:
            raise  # explained already, by a watch inside of this one
        except RuntimeError as exc:
            if launching and not (connection_lost(exc) or isinstance(exc, dist.DistError)):
                raise  # the caller's arguments: nothing has been sent
            names = tuple(self._world.names[rank] for rank in self.ranks)
            # While `explain` waits for news, a loss may break the group with the name of the
            # process.  The first reason stays.
            self.break_for(explain(self._world, names, exc, self.timeout))
            raise self._error(what) from exc

    def completed(self) -> int:
        """How many collectives have succeeded here, of those that were begun first."""
        with self._lock:
            self._retire()
            return self._succeeded

    # -- messages ---------------------------------------------------------------------------

    def received(self, pending: Pending) -> None:
        """Note that the operation has ended: if it was a sent message, it has been received."""
        if pending._dst is not None:
            with self._lock:
                self._sent.pop(pending, None)

    def send_out(self, seconds: float) -> None:
        """Wait until all messages are received, before the connections end; warn of the others."""
        end = time.monotonic() + seconds
        with self._lock:
            # A broken group closes its connections: there is nothing to wait for.
            sent = list(self._sent) if self._broken is None else []
        try:
            for pending in sent:
                # torch cannot be asked: a message not waited for never counts as completed.
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
        """Drop an event of `over_event`."""
        with self._lock:
            self._events.discard(event)

    # -- the end ----------------------------------------------------------------------------

    def break_for(self, error: GroupError, abort: bool = True, completed: int = 0) -> None:
        """End everything that is pending here, for this reason.

        Except the first ``completed`` collectives, which the lost rank has completed: its news may
        come before what it sent for them.
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
        # From here on without the lock: `_close` takes it, and waits for torch.
        for event in events:
            event.set()
        if abort and over:
            self._close()
        elif abort and first:
            # Some collectives are to end first.  A thread waits for them: this one may be torch's,
            # which brings the news of a loss and has other calls to answer.
            self._start_thread(self._close_later)

    def end(self) -> None:
        """Destroy the group: messages that were not received are lost."""
        busy = self._is_busy()
        self.break_for(GroupError(f"{self.label} was destroyed; make a new one."), abort=False)
        # Without anything pending, torch's own destruction closes the connections.
        self._close(abort=busy)
        if not self.destroyed:
            self.destroyed = True
            # The end of torch's default group, that of `World.group`, ends all others.
            if self.group is not None and dist.is_initialized():
                dist.destroy_process_group(self.group)
            self.group = None
        with self._lock:
            # Not before: torch drops a message when its work is collected.
            self._sent.clear()
            threads, self._threads = self._threads, []
        # A thread in torch's code when Python ends aborts the process: Python ends such threads by
        # pthread_exit(3), which is an exception to C++, thrown where none may be.
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_THREAD_SECONDS)

    def _start_thread(self, target: Callable[[], None]) -> None:
        """Run something in a thread that `end` waits for."""
        thread = threading.Thread(target=target, name="xpool-group-end", daemon=True)
        thread.start()
        with self._lock:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    def _close(self, abort: bool = True) -> None:
        """Close the group's connections, once, so that everything that waits on them ends."""
        with self._changed:
            # Of several threads, one closes them.
            abort, self._aborted = abort and not self._aborted, True
            self._changed.notify_all()
        if abort and self.group is not None:
            _abort(self.group)

    def _close_later(self) -> None:
        """Close them when the collectives that the loss does not harm have ended."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._aborted or self._begun >= self._unharmed)
                self._retire()
                # Later collectives end when the connections are closed.
                if self._aborted or self._begun - len(self._works) >= self._unharmed:
                    break
                # There is one: of those begun, fewer than `_unharmed` have ended.
                work = self._works[0]
            try:
                work.wait()
            except RuntimeError:
                break  # its own caller is told
        self._close()

    def _retire(self) -> None:
        """Take out the works that have ended; under the lock."""
        # To wait for a completed work takes no time, and raises if it has failed.
        while self._works and self._works[0].is_completed():
            before = self._begun - len(self._works)
            try:
                self._works.popleft().wait()
            except RuntimeError:
                continue  # it failed, and none after it counts as a success
            if self._succeeded == before:
                self._succeeded += 1

    def _error(self, what: str) -> GroupError:
        """Return the reason of the group's end, as an error of the caller's own: tracebacks do not
        grow into each other."""
        # Without the lock, which `launch` holds: the reason is set once, and stays.
        reason = self._broken
        if self.destroyed:
            return GroupError(str(reason))
        return type(reason or GroupError())(
            f"{what} in {self.label} failed: {reason}. The group is broken: destroy() it in all "
            "remaining members and make a new one of them."
        )

    def _is_busy(self) -> bool:
        """Whether something is pending, which would keep the connections open."""
        with self._lock:
            works = [*self._works, *(one._work for one in self._messages)]
            return any(not work.is_completed() for work in works)


def explain(
    world: CurrentWorld, names: tuple[str, ...], exc: RuntimeError, timeout: float
) -> GroupError:
    """Return the error for an operation among these members that torch gave up."""
    # After a timeout, or without RPC, no news of a death is on its way.
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
    """Close the connections of a process group, so that everything that waits on them ends."""
    try:
        if dist.get_backend(group) == "gloo":
            # gloo has no call for it, but closes them after a receive that timed out.
            nothing = torch.empty(1)
            group.recv_anysource([nothing], _ABORT_TAG).wait(timedelta(milliseconds=1))
        else:
            group.abort()
    except RuntimeError:
        pass  # it timed out, as intended, or they are closed already
    except ValueError:
        pass  # torch has destroyed the group
