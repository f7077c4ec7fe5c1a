"""The agent's side of the messages with the driver: it calls an engine and uses no network.

Messages of the driver become calls of the engine.  Answers of the engine become messages, which
leave with the next reply.

The only time limit is the lease: the agent may go on until it is over, and each call of the driver
renews it.  A lease runs from the moment, by the agent's clock, at which the agent sent the last
reply that the driver has received.  The driver received that reply later, so a lease that it counts
from there, by its own clock, ends no earlier than the agent's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpool._engine.jobs.ranges import CALLS, TaskRange
from xpool._engine.protocols import LocalEngine
from xpool._hosts import messages as m
from xpool._hosts.fleet import Call
from xpool._hosts.link import Link

if TYPE_CHECKING:
    from xpool._engine.worker_process import WorkerProcess

MOST_WAITING = 2
"""The most calls that wait for a message at one time."""


class AgentSession:
    """What the driver has told a host, and the messages that the host has for the driver.

    A result of ``engine`` with ``ok=None`` is an item to try again, or, if its value is a
    `TaskRange`, the items in this range, which no worker has begun.
    """

    def __init__(self, engine: LocalEngine, lease: float, now: float) -> None:
        self.engine = engine
        self.retiring = False
        self.locate_requests: list[int] = []  # their numbers; the agent answers them
        self.until = now + lease
        """When the lease ends unless a call renews it."""
        self._lease = lease
        self._waiting: list[int] = []  # calls without a reply, oldest first
        self._replied: dict[int, float] = {}  # when each call had its first reply
        self._heard = 0  # number of the last call whose reply the driver has
        self._link = Link()
        self._staged: dict[int, m.Stage] = {}
        self._kept = 0  # number of the last batch that this host has staged itself: below 0
        self._files: list[Any] = []  # broadcast objects: each exists as long as it is in this list
        self._functions: dict[int, int] = {}  # the engine's numbers, by the driver's
        self._failed = self._ended = False

    # -- messages of the driver --------------------------------------------------------------------

    def called(self, call: Call) -> tuple[WorkerProcess, int] | None:
        """Act on a call; the caller then asks for `reply` or `reply_to_beat`.

        Returns a worker and the number of a task, whose answer the calling thread is to receive by
        `LocalEngine.await_briefly`.  It then calls `wait`, and asks for the reply.
        """
        replied = self._replied.get(call.heard)
        if replied is not None:
            self.until = max(self.until, replied + self._lease)
            self._replied = {k: when for k, when in self._replied.items() if k >= call.heard}
        self._heard = max(self._heard, call.heard)
        self._link.acknowledge(call.got)
        if call.again:
            self._link.send_again(call.got)
        messages = self._link.receive(call.first, call.messages)
        begun = None
        for message in messages:
            # It must be the last message: the calling thread has to receive the answer at once.
            if type(message) is m.Go and message is messages[-1] and not call.beat:
                begun = self._begin(message.batches)
            else:
                self._do(message)
        if not call.beat and begun is None:
            self._waiting.append(call.number)
        return begun

    def wait(self, number: int) -> None:
        """Add a call that waits for messages; it gets them before all other waiting calls."""
        self._waiting.insert(0, number)

    def _begin(self, batches: list[int]) -> tuple[WorkerProcess, int] | None:
        """Submit permitted batches.

        If they are a single call, and an idle worker has got it, return the worker and the number
        of the call.
        """
        ranges = [self._range(batch) for batch in batches]
        one = ranges[0]
        if len(ranges) == 1 and one.job == CALLS and len(one.items) == 1:
            worker = self.engine.put_direct(one)
            return None if worker is None else (worker, one.first)
        self.engine.submit(*ranges)
        return None

    def _do(self, message: Any) -> None:
        kind, engine = type(message), self.engine
        if kind is m.Stage:
            self._staged[message.batch] = message
        elif kind is m.Go:
            engine.submit(*(self._range(batch) for batch in message.batches))
        elif kind is m.Drop:
            for batch in message.batches:
                del self._staged[batch]
        elif kind is m.Back:
            for _, job, first, tasks in message.batches:
                engine.give_back(job, range(first, first + tasks))
            self.say(m.Given([batch for batch, *_ in message.batches]))
        elif kind is m.Cancel:
            engine.withdraw(message.job, message.item)
        elif kind is m.Func:
            self._functions[message.number] = engine.learn(message.mode, message.payload)
        elif kind is m.Forget:
            engine.forget(self._functions.pop(message.number))
        elif kind is m.Blob:
            self._files.append(message.payload)
        elif kind is m.LocateWorkers:
            self.locate_requests.append(message.number)
        elif kind is m.Retire:
            self.retiring = True
            engine.retire_all()
        else:
            raise ValueError(f"a message of unknown kind {kind.__name__}")

    def _range(self, batch: int) -> TaskRange:
        stage = self._staged.pop(batch)
        return TaskRange(
            stage.job,
            self._function(stage.func),
            stage.first,
            stage.items,
            stage.bound,
            stage.terms,
        )

    def _function(self, number: int) -> int:
        if number and number not in self._functions:
            # The job has failed and its function was dropped.  Its staged items still need a
            # function, because an item without one is run as a call.  So they get a function that
            # no worker has.  Nobody waits for their answers.
            unknown = self.engine.learn(1, b"")
            self.engine.forget(unknown)
            return unknown
        return self._functions.get(number, 0)

    # -- messages to the driver --------------------------------------------------------------------

    def say(self, message: Any) -> None:
        """Queue a message for the driver."""
        self._link.queue(message)

    @property
    def has_news(self) -> bool:
        """Whether a queued message has not been sent yet."""
        return self._link.has_unsent

    def may_reply(self, number: int) -> bool:
        """Whether a call is to be answered now.

        Only the oldest waiting call is, if messages are queued or more than `MOST_WAITING` calls
        wait.
        """
        waiting = self._waiting
        return waiting[0] == number and (self.has_news or len(waiting) > MOST_WAITING)

    def reply(self, number: int, now: float, most: int, weight: Any) -> tuple[int, int, list[Any]]:
        """Return the reply to a call: ``taken``, ``first`` and ``messages`` of a `Replied`."""
        self._waiting.remove(number)
        if number > self._heard:
            # The time of the first reply counts.  If a call arrives twice, the driver may have
            # received only the first reply.
            self._replied.setdefault(number, now)
        return self._link.got, *self._link.take(most, weight)

    def reply_to_beat(self, call: Call, now: float) -> tuple[int, int, list[Any]]:
        """Return the reply to a beat, which renews the lease and takes no messages."""
        self._replied[call.number] = now
        return self._link.got, call.got + 1, []

    def collect(self) -> bool:
        """Queue the engine's answers since the last call, oldest first; return whether any came."""
        found: list[Any] = []
        ended = self.engine.ended  # read before taking the results: an ended engine adds none
        results = self.engine.results
        while results:
            job, index, (ok, value) = results.popleft()
            if isinstance(value, TaskRange):
                found.append(self._keep(value))
            elif ok is None:
                found.append(m.Again(job, index, value))
            else:
                found.append(m.Answer(job, index, getattr(value, "count", 1), ok, value))
        failure = self.engine.failure
        if failure is not None and not self._failed:
            self._failed = True
            found.append(m.Failed(failure))
        if ended and not self._ended:
            self._ended = True
            found.append(m.Ended())
        for message in found:
            self.say(message)
        return bool(found)

    def _keep(self, items: TaskRange) -> m.Unbegun:
        """Stage items that no worker has begun, so that they need not be sent again."""
        self._kept -= 1
        job, first = items.job, items.first
        # -1: the function was dropped, see `_function`.
        func = next((mine for mine, its in self._functions.items() if its == items.func), -1)
        self._staged[self._kept] = m.Stage(
            self._kept, job, func if items.func else 0, first, list(items.items), None, items.terms
        )
        return m.Unbegun(self._kept, job, first, len(items.items))
