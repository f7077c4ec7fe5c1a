"""The agent of a host, as far as it is a matter of messages: it has an engine, and no network.

The driver's words come as messages and become calls of the engine; what the engine answers becomes
messages.  No time is looked at but the lease: the driver's permission to go on, which each of its
pulls renews.  It counts from the moment at which the agent sent what the driver has received since,
by the agent's own clock; so the driver, which received it later, knows by its own when it is over.
"""

from __future__ import annotations

from typing import Any

from xpool.engine.face import LocalEngine
from xpool.hosts import messages as m
from xpool.jobs.ranges import TaskRange

__all__ = ["Desk"]


class Desk:
    """What a host has been told, and what it has to say.

    ``engine`` hands back what is to be tried again, as a result whose ``ok`` is None.
    """

    def __init__(self, engine: LocalEngine, lease: float, now: float) -> None:
        self.engine = engine
        self.retiring = False
        self.until = now + lease
        """When the lease is over, if nothing renews it."""
        self._lease = lease
        self._sent: dict[int, float] = {}  # when each answer to a pull was sent
        self._staged: dict[int, m.Stage] = {}
        self._given: dict[int, TaskRange] = {}  # what the engine was given, while it may wait
        self._functions: dict[int, int] = {}  # the engine's numbers, by the driver's
        self._failed = self._ended = False

    # -- the driver's word -------------------------------------------------------------------------

    def do(self, message: Any) -> list[Any]:
        """Do what a message says; return the replies."""
        kind, engine = type(message), self.engine
        replies: list[Any] = []
        if kind is m.Stage:
            self._staged[message.batch] = message
        elif kind is m.Go:
            engine.submit(*(self._range(batch) for batch in message.batches))
        elif kind is m.Drop:
            for batch in message.batches:
                del self._staged[batch]
        elif kind is m.Back:
            replies.append(self._back(message.batch))
        elif kind is m.Cancel:
            engine.withdraw(message.job, message.item)
        elif kind is m.Func:
            self._functions[message.number] = engine.learn(message.mode, message.payload)
        elif kind is m.Forget:
            engine.forget(self._functions.pop(message.number))
        elif kind is m.Retire:
            self.retiring = True
            engine.retire_all()
        else:
            raise ValueError(f"a message of unknown kind {kind.__name__}")
        return replies

    def _range(self, batch: int) -> TaskRange:
        stage = self._staged.pop(batch)
        self._given = {b: one for b, one in self._given.items() if one.items}
        task_range = self._given[batch] = TaskRange(
            stage.job,
            self._functions.get(stage.func, 0),
            stage.first,
            stage.items,
            int(stage.again),
            stage.bound,
            stage.limit,
            stage.past,
        )
        return task_range

    def _back(self, batch: int) -> m.Given:
        """Take from the engine what no worker has of a batch."""
        task_range = self._given.pop(batch, None)
        return m.Given(batch, 0 if task_range is None else self.engine.take_back(task_range))

    # -- what the engine says ----------------------------------------------------------------------

    def answers(self) -> list[Any]:
        """Return messages about what the engine has answered since, oldest first."""
        found: list[Any] = []
        results = self.engine.results
        while results:
            job, index, (ok, value) = results.popleft()
            if ok is None:
                found.append(m.Again(job, index, value))
            else:
                found.append(m.Answer(job, index, getattr(value, "count", 1), ok, value))
        failure = self.engine.failure
        if failure is not None and not self._failed:
            self._failed = True
            found.append(m.Failed(failure))
        if self.engine.ended and not self._ended:
            self._ended = True
            found.append(m.Ended())
        return found

    # -- the lease ---------------------------------------------------------------------------------

    def answering(self, pull: int, now: float) -> None:
        """Note that this pull is answered now."""
        self._sent[pull] = now

    def renewed(self, pull: int) -> None:
        """Note that the driver has the answer to this pull."""
        sent = self._sent.get(pull)
        if sent is not None:
            self.until = max(self.until, sent + self._lease)
            self._sent = {k: when for k, when in self._sent.items() if k > pull}
