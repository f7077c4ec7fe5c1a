"""The messages between a driver and the agents of its hosts: their `Link`, and the `Fleet`.

A `Fleet`, the interface to the system that manages the hosts, places an agent on each host and
carries calls to it.  `ray_fleet` has one fleet, the simulated world another.  docs/dev/hosts.md
explains the messages.  Payloads are bytes, or views of bytes in the object store.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple, Protocol

from xpool._calls.terms import ONCE, Terms
from xpool._engine.ledger import EngineReport
from xpool._pickling.frame import INLINE_BELOW

# -- between the engine and a fleet ----------------------------------------------------------------


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
    """An agent has started; ``name``: of its host, for texts."""

    host: int
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
    """The fleet cannot get any host, or a host that it needs; the pool fails with this error."""

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

    def stop(self, host: int, replace: bool = False) -> None:
        """End an agent and its workers now, even before it has joined; `Dead` follows.

        ``replace``: another agent may take its place.
        """

    def close(self) -> None:
        """Release all resources; all agents are dead."""


# -- from the driver ---------------------------------------------------------------------------


class Func(NamedTuple):
    """Keep a function under the number that tasks refer to it by."""

    number: int
    mode: int
    payload: Any


class Forget(NamedTuple):
    """Drop a function."""

    number: int


class Blob(NamedTuple):
    """Keep a broadcast object under the name by which the workers find it."""

    name: str
    payload: Any


class Stage(NamedTuple):
    """Keep a batch of consecutive tasks and begin none of them yet.

    ``bound``: the index, at that host, of the worker that must run them; None: any.
    ``terms``: the host does not retry a task that has retries; it hands the task back.
    """

    batch: int
    job: int
    func: int
    first: int
    items: list[Any]
    bound: int | None = None
    terms: Terms = ONCE


class Go(NamedTuple):
    """Begin these batches in this order as workers become free."""

    batches: list[int]


class Drop(NamedTuple):
    """Drop staged batches, which were not permitted."""

    batches: list[int]


class Back(NamedTuple):
    """Give back the tasks of permitted batches that no worker has begun.

    Each batch: its number, its job, its first task and its number of tasks.
    """

    batches: list[tuple[int, int, int, int]]


class Cancel(NamedTuple):
    """Stop the running items of a job, or one item of it; nobody waits for the answers."""

    job: int
    item: int | None


class Retire(NamedTuple):
    """End after the last answer."""


class LocateWorkers(NamedTuple):
    """Report where the workers are."""

    number: int


# -- from an agent -----------------------------------------------------------------------------


class WorkerLocations(NamedTuple):
    """The reply to the `LocateWorkers` with this number: a `WorkerStack` of each worker.

    Its ``task`` is a text with job and index, or empty.
    """

    number: int
    workers: list[Any]


class Answer(NamedTuple):
    """The results of consecutive tasks: ``tasks`` of them, from ``first`` on.

    ``value``: a `PickledResult`, still pickled, or an error of xpool's own.
    """

    job: int
    first: int
    tasks: int
    ok: bool
    value: Any


class Again(NamedTuple):
    """A task has to be tried again; ``killed``: its worker died in it."""

    job: int
    item: int
    killed: bool


class Given(NamedTuple):
    """The waiting tasks of recalled batches are given back: `Unbegun` follows.

    Tasks that a worker holds follow later, if it makes no progress.
    """

    batches: list[int]


class Unbegun(NamedTuple):
    """No worker here has begun ``tasks`` tasks, from ``first`` on; they are staged as ``batch``."""

    batch: int
    job: int
    first: int
    tasks: int


class Status(NamedTuple):
    """Counts of the host's workers, and the seconds that a task takes there (inf: not known)."""

    cost: float
    statistics: dict[str, Any]
    report: EngineReport = EngineReport()


class Failed(NamedTuple):
    """The host's workers can run no more tasks; ``error``: an exception or a `PickledResult`."""

    error: Any


class Ended(NamedTuple):
    """All workers of the host have ended."""


# -- on the way --------------------------------------------------------------------------------

MOST_BYTES = 8 * 1024 * 1024
"""The most bytes of a call or a reply, not counting its first message."""

_KINDS: tuple[type, ...] = (
    Func, Forget, Blob, Stage, Go, Drop, Back, Cancel, Retire, LocateWorkers,
    WorkerLocations, Answer, Again, Given, Unbegun, Status, Failed, Ended,
)  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def packed(head: tuple[Any, ...], messages: Sequence[Any]) -> list[Any]:
    """Return a head and messages as one pickle, followed by the large payloads as buffers."""
    buffers: list[PickleBuffer] = []
    said = head, [_plain(one) for one in messages]
    data = pickle.dumps(said, 5, buffer_callback=buffers.append)
    return [data, *(buffer.raw() for buffer in buffers)]


def unpacked(parts: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return the head and the messages that `packed` packed; the buffers are used in place."""
    head, messages = pickle.loads(parts[0], buffers=parts[1:])
    return head, [_KINDS[number](*fields) for number, *fields in messages]


def _plain(message: Any) -> tuple[Any, ...]:
    number = _NUMBERS[type(message)]
    if type(message) is Stage:
        message = message._replace(items=[_beside(item) for item in message.items])
        if message.terms == ONCE:  # the default
            message = message[:-1]
    elif type(message) is Func:
        message = message._replace(payload=_beside(message.payload))
    return number, *message


def _beside(payload: bytes | memoryview) -> Any:
    large = len(payload) >= INLINE_BELOW
    return PickleBuffer(payload) if large else bytes(payload)


def _bytes_of(message: Any) -> int:
    """Return about how many bytes a message has."""
    kind, large = type(message), 0
    if kind is Stage:
        large = sum(map(len, message.items))
    elif kind is Func:
        large = len(message.payload)
    elif kind is Answer:
        large = getattr(message.value, "nbytes", 0)
    return 64 + large


class Link:
    """One side of an exactly-once, ordered stream of messages.

    A link numbers its messages, from 1, and keeps them until the other side acknowledges them.  It
    puts arriving messages in order and drops duplicates.
    """

    def __init__(self) -> None:
        self._out: deque[Any] = deque()  # not acknowledged, oldest first
        self.acked = 0
        """The other side has all messages up to this number."""
        self.sent = 0
        """All messages up to this number were sent, and none of them has to be sent again."""
        self.got = 0
        """All messages up to this number have arrived."""
        self._early: dict[int, Sequence[Any]] = {}  # arrived out of order, by their first number

    def queue(self, message: Any) -> None:
        self._out.append(message)

    @property
    def has_unsent(self) -> bool:
        return self.sent < self.acked + len(self._out)

    def take(self, most: int = MOST_BYTES) -> tuple[int, list[Any]]:
        """Return the messages to send next: the number of the first, and the messages.

        The size of the first does not count, so that a large batch and the message that permits
        it travel together.  The others together have at most ``most`` bytes.
        """
        first, found, total = self.sent + 1, list[Any](), 0
        for message in itertools.islice(self._out, self.sent - self.acked, None):
            total += _bytes_of(message) if found else 0
            if total > most:
                break
            found.append(message)
        self.sent += len(found)
        return first, found

    def send_again(self, after: int) -> None:
        """Send the messages after this number again, except acknowledged ones."""
        self.sent = max(self.acked, min(self.sent, after))

    def acknowledge(self, upto: int) -> None:
        """Drop the messages up to this number, which the other side has."""
        while self.acked < upto and self._out:
            self._out.popleft()
            self.acked += 1
        # A later call may have delivered messages that had to be sent again.
        self.sent = max(self.sent, self.acked)

    def receive(self, first: int, messages: Sequence[Any]) -> list[Any]:
        """Return the new messages in order, including those that had arrived too early."""
        if first > self.got + 1:
            if len(messages) > len(self._early.get(first, ())):
                self._early[first] = messages
            return []
        found = list(messages[self.got + 1 - first :])
        self.got += len(found)
        for begin in sorted(self._early):
            if begin > self.got + 1:
                break
            more = self._early.pop(begin)[self.got + 1 - begin :]
            found += more
            self.got += len(more)
        return found
