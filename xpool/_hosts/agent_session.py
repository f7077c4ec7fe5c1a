"""The agent of a host, as far as it is a matter of messages: it has an engine, and no network.

The driver's words come as messages and become calls of the engine; what the engine answers becomes
messages, which the next reply takes along.  No time is looked at but the lease: the driver's
permission to go on, which each of its calls renews.  It counts from the moment at which the agent
sent what the driver has received since, by the agent's own clock; so the driver, which received it
later, knows by its own when it is over.
"""

from __future__ import annotations

from typing import Any

from xpool._engine.jobs.ranges import TaskRange
from xpool._engine.protocols import LocalEngine
from xpool._hosts import messages as m
from xpool._hosts.fleet import Call
from xpool._hosts.link import Link

__all__ = ["AgentSession"]

MOST_WAITING = 2
"""Calls that wait for something to say, at most."""


class AgentSession:
    """What a host has been told, and what it has to say.

    ``engine`` hands back what is to be tried again, as a result whose ``ok`` is None, and what was
    begun by nobody, where its value is None, too.
    """

    def __init__(self, engine: LocalEngine, lease: float, now: float) -> None:
        self.engine = engine
        self.retiring = False
        self.looks: list[int] = []  # questions where the workers are, for the agent to answer
        self.until = now + lease
        """When the lease is over, if nothing renews it."""
        self._lease = lease
        self._waiting: list[int] = []  # calls without a reply, oldest first
        self._replied: dict[int, float] = {}  # when each call had its first reply
        self._heard = 0  # the driver has the reply to the call of this number
        self._link = Link()
        self._sent = 0  # number of the last message that is under way, or there
        self._staged: dict[int, m.Stage] = {}
        self._files: list[Any] = []  # what was broadcast: it is there as long as it is held
        self._functions: dict[int, int] = {}  # the engine's numbers, by the driver's
        self._failed = self._ended = False

    # -- the driver's word -------------------------------------------------------------------------

    def called(self, call: Call) -> None:
        """Do what a call says; a `reply` to it follows, or a `reply_to_beat`."""
        if not call.beat:
            self._waiting.append(call.number)
        replied = self._replied.get(call.heard)
        if replied is not None:
            self.until = max(self.until, replied + self._lease)
            self._replied = {k: when for k, when in self._replied.items() if k >= call.heard}
        self._heard = max(self._heard, call.heard)
        self._link.acknowledge(call.got)
        if call.again:
            self._sent = call.got
        # A call that comes late knows less than we do.
        self._sent = max(self._sent, self._link.acked)
        for message in self._link.receive(call.first, call.messages):
            self._do(message)

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
        elif kind is m.Look:
            self.looks.append(message.number)
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
            int(stage.again),
            stage.bound,
            stage.limit,
            stage.past,
        )

    def _function(self, number: int) -> int:
        if number and number not in self._functions:
            # Its job has failed, and what was staged of it is answered by a worker, to nobody: with
            # a function that is not there either.  Without one, a task would be taken for a call.
            unknown = self.engine.learn(1, b"")
            self.engine.forget(unknown)
            return unknown
        return self._functions.get(number, 0)

    # -- what there is to say ----------------------------------------------------------------------

    def say(self, message: Any) -> None:
        """Queue a message for the driver."""
        self._link.send(message)

    @property
    def has_news(self) -> bool:
        """Whether there is something to say that is not under way."""
        return self._sent < self._link.last

    def may_reply(self, number: int) -> bool:
        """Whether a call has its reply now: the oldest takes what there is to say, and too many
        that wait would be in the way of the next."""
        waiting = self._waiting
        return waiting[0] == number and (self.has_news or len(waiting) > MOST_WAITING)

    def reply(self, number: int, now: float, most: int, weight: Any) -> tuple[int, int, list[Any]]:
        """Return the reply to a call: what a `Replied` has after the number."""
        self._waiting.remove(number)
        if number > self._heard:
            # Of a call that comes twice, the driver may have had the first reply only.
            self._replied.setdefault(number, now)
        messages = self._link.take(self._sent, most, weight)
        first = self._sent + 1
        self._sent += len(messages)
        return self._link.got, first, messages

    def reply_to_beat(self, call: Call, now: float) -> tuple[int, int, list[Any]]:
        """Return the reply to a call that only keeps the lease."""
        self._replied[call.number] = now
        return self._link.got, call.got + 1, []

    def collect(self) -> bool:
        """Queue what the engine has answered since, oldest first; return whether there was any."""
        found: list[Any] = []
        ended = self.engine.ended  # before its results are taken: none comes after
        results = self.engine.results
        while results:
            job, index, (ok, value) = results.popleft()
            if ok is None and value is None:
                _add_unbegun(found, job, index)
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


def _add_unbegun(found: list[Any], job: int, index: int) -> None:
    """Add that an item was begun by nobody: these come the last first, and often many at once."""
    last = found[-1] if found else None
    if type(last) is m.Unbegun and (last.job, last.first) == (job, index + 1):
        found[-1] = m.Unbegun(job, index, last.tasks + 1)
    else:
        found.append(m.Unbegun(job, index, 1))
