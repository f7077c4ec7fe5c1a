"""Acts on the events of a pool over hosts: hosts join and die, and agents answer.

All methods are called with the engine's lock held, most of them by the engine's thread.  Calls to
the fleet are made here, since they do not block and messages must leave in the order of their
numbers.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from xpool._calls.results import PickledResult
from xpool._engine.answers import StartFailure
from xpool._engine.jobs.ranges import TaskRange, name_of
from xpool._engine.jobs.states import back_off
from xpool._engine.jobs.waiting import TimeQueue
from xpool._engine.stacks import WorkerStack
from xpool._hosts import messages as m
from xpool._hosts.hosts_scheduler import HostScheduler, Message
from xpool.errors import (
    HostLost,
    PoolBroken,
    TaskTimeout,
    WorkerDied,
    WorkerStartFailed,
    XPoolError,
)

CALLS_IN_FLIGHT = 4
"""The most calls to a host that are under way at one time."""

NOTHING: dict[str, Any] = {"ready": 0, "waiting": 0, "running": 0, "deaths": 0, "pids": []}
"""The statistics of an agent that has sent no `Status` yet."""


class Conversation:
    """The messages to and from one agent, and what the driver knows of it.

    Queued messages leave with calls; several calls may be under way at one time.  A call may fail,
    arrive late, or have run although it failed.  Its messages are then sent again, and the agent
    drops those that it has already.  ``first``: the pool's index of its first worker.
    """

    def __init__(self, fleet: m.Fleet, host: int, name: str, first: int, now: float) -> None:
        self.name, self.first = name, first
        self.heard = now
        """When the last reply came.  The agent's lease counts from an earlier moment."""
        self.called = now
        """When it was called last.  Only calls renew the lease."""
        self.beaten = now
        """When the last beat left."""
        self.status = m.Status(float("inf"), dict(NOTHING))
        self.ended = False
        self.given_up = ""
        """Why the driver stopped it, or "".  It takes the place of the fleet's reason."""
        self.link = m.Link()
        self._fleet, self._host = fleet, host
        self.trip = 0.0
        """The fewest seconds from a beat to its reply so far; 0: no beat was answered yet."""
        self._calls: dict[int, int] = {}  # calls under way: number -> number of the first message
        self._beats: dict[int, float] = {}  # beats among these calls: number -> when the beat left
        self._numbers = itertools.count(1)  # the numbers of calls
        self._lost = False  # a reply was lost: the agent has to send its messages again
        self._overdue = False  # no earlier call is under way that may bring them
        self._replied = 0  # number of the last call that was answered

    def flush(self, now: float, expects: bool, hold: bool = False) -> int | None:
        """Send the queued messages, with at most `CALLS_IN_FLIGHT` calls under way.

        ``expects``: make a call even without messages, so that the agent can reply with its own.
        ``hold``: let the caller receive the reply by `Fleet.receive`.  This is possible if all
        messages leave with one call and no other call is under way; then its number is returned.
        """
        while len(self._calls) < CALLS_IN_FLIGHT and self.link.has_unsent:
            first, messages = self.link.take()
            if hold and not self._calls and not self.link.has_unsent:
                return self._call(now, first, messages, hold=True)
            self._call(now, first, messages)
        # The calls under way did not ask for lost messages, and may wait at the agent for new ones.
        overdue = self._overdue and len(self._calls) < CALLS_IN_FLIGHT
        if expects and (overdue or not self._calls):
            self._call(now, self.link.sent + 1, [])
        return None

    def beat(self, now: float) -> None:
        """Renew an agent's lease by a call beside those under way, which may be large and slow."""
        if self._calls:
            self.beaten = now
            self._call(now, self.link.sent + 1, [], beat=True)

    def _call(
        self, now: float, first: int, messages: list[Any], beat: bool = False, hold: bool = False
    ) -> int:
        self.called = now
        number = next(self._numbers)
        self._calls[number] = first
        if beat:
            self._beats[number] = now
        again, self._lost, self._overdue = self._lost, False, False
        self._fleet.call(
            self._host,
            m.Call(number, first, self.link.got, again, self._replied, beat, messages),
            hold,
        )
        return number

    def replied(self, reply: m.Replied, now: float) -> list[Any]:
        """Take a reply; return the messages that are new, in order."""
        self._calls.pop(reply.number, None)
        left = self._beats.pop(reply.number, None)
        if left is not None:  # a beat: other calls wait at the agent
            self.trip = min(self.trip or now, now - left)
        self.heard, self._replied = now, max(self._replied, reply.number)
        self.link.acknowledge(reply.taken)
        # Earlier messages are missing: another reply may still bring them, or a reply was lost.
        if reply.first > self.link.got + 1:
            self._lost = True
            others = self._calls.keys() - self._beats
            self._overdue = all(number > reply.number for number in others)
        return self.link.receive(reply.first, reply.messages)

    def unreached(self, number: int) -> None:
        """Send the messages of a call again, because the call did not come back."""
        self._beats.pop(number, None)
        first = self._calls.pop(number, None)
        if first is not None:
            self.link.send_again(first - 1)
            self._lost = True

    def without(self, pid: int | None) -> None:
        """Remove an ended worker from the process ids before the agent's next `Status`.

        `create_group`, which reads them, must not find it.
        """
        facts = self.status.statistics
        pids = [None if one == pid else one for one in facts.get("pids", ())]
        self.status = self.status._replace(statistics={**facts, "pids": pids})


DRIFT = 1.02
"""The driver's clock may run faster than an agent's by this factor."""

END_SECONDS = 1.0
"""Seconds that an agent may take to end its workers after its lease."""

BEAT_SECONDS = 1.0
"""Seconds after which an idle host is called to renew its lease: an eighth of the lease, if that is
shorter."""

END_LIMIT = 5.0
"""Seconds after which a pool that stops no longer waits for the ends of its agents."""

RETRY_SECONDS = 0.2
"""Seconds after which a call that did not come back is made again."""


class HostService:
    """The agents of one pool, and the tasks that they hold.

    ``describe`` returns a text that names a task, given job and index.  ``wake`` makes the engine's
    thread call `next_time` again.
    """

    def __init__(
        self,
        fleet: m.Fleet,
        describe: Callable[[int, int], str],
        lease: float,
        now: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.sched = HostScheduler()
        self.agents: dict[int, Conversation] = {}
        self.expected: set[int] = set()
        """Hosts that have neither joined nor died."""
        self.gone: dict[int, str] = {}
        """Names of lost hosts, by number."""
        self.blobs: list[m.Blob] = []
        self.locations: dict[int, dict[int, list[WorkerStack]]] = {}
        """Replies to `LocateWorkers`, by its number and by host."""
        self.ending = self.retiring = False
        self._last_to_go = ""
        self.deaths = 0
        """Number of dead workers of hosts that are gone."""
        self.results: deque[tuple[int, int, tuple[bool, Any]]] = deque()
        self.failure: BaseException | PickledResult | None = None
        self.random = random.Random()  # a generator of its own: the program's may have been seeded
        self._fleet, self._describe, self._lease, self._now = fleet, describe, lease, now
        self._wake = wake
        self._beat_seconds = min(BEAT_SECONDS, lease / 8)
        self._beating = False
        self._touched: dict[int, None] = {}  # hosts that `give` checks for messages to send
        self._timers: TimeQueue[Callable[[], None]] = TimeQueue()
        self.sched.alarm = lambda when: self.at(when, lambda: None)  # `due` asks the scheduler

    # -- time --------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have ``call()`` called at the time ``when``."""
        if self._timers.put(when, call):  # the engine's thread waits for a later timer
            self._wake()

    def next_time(self) -> float | None:
        """Return the time of the next timer; None: there is none.  Also called without the lock."""
        return self._timers.next()

    def due(self) -> None:
        """Run the timers that are due; fail the pool if no host is left."""
        for call in self._timers.due(self._now()):
            call()
        self.sched.due(self._now())
        # `_dead` does not do this, because the next event may say that another host is coming.
        if self._last_to_go and self.ended and not self.ending and not self.retiring:
            last = self._last_to_go
            self._fail(XPoolError(f"The pool has lost its last host: {last}"))

    # -- to the hosts ------------------------------------------------------------------------------

    def put(self, ranges: Iterable[TaskRange], hold: bool = False) -> tuple[int, int] | None:
        """Queue ranges of tasks, and permit them to hosts with room.

        A range fails if it is bound to a worker whose host is gone.  ``hold`` is that of `give`; it
        has no effect if other tasks wait, because these leave first.
        """
        if self.ending:
            return None
        hold = hold and not self.sched.queued
        for one in ranges:
            if one.bound is not None and one.bound < 0:
                one.bound = self.sched.least_loaded()  # None: any worker of the next host
            if one.bound is not None and not self.sched.is_there(one.bound):
                host = self.gone.get(self.sched.host_of[one.bound], "")
                for index in range(one.first, one.first + len(one.items)):
                    self._lose(one.job, index, one.bound, host, "its workers have ended")
            else:
                self.sched.put(one)
        return self.give(hold)

    def _lose(self, job: int, index: int, bound: int | None, host: str, reason: str) -> None:
        """Fail a task whose host is gone."""
        job, item = name_of(job, index)
        error = HostLost(host, reason, self._describe(job, item), -1 if bound is None else bound)
        self.results.append((job, item, (False, error)))

    def give(self, hold: bool = False) -> tuple[int, int] | None:
        """Permit and stage waiting tasks, and send the queued messages.

        ``hold``: let the calling thread receive the reply.  This is possible if all messages leave
        in one call, and no other call to that host is under way; then host and number of the call
        are returned.
        """
        sched = self.sched
        self.send(sched.give())
        while sched.unwatched:
            number = sched.unwatched.popitem()[0]
            # Add the time in which the permission and the answers are under way.
            seconds = sched.quotas.look_seconds + 2 * self.agents[number].trip
            self.at(self._now() + seconds, functools.partial(self._look, number))
        hold = hold and len(self._touched) == 1
        held = None
        while self._touched:
            held = self._flush(self._touched.popitem()[0], hold)
        return held

    def _look(self, number: int) -> None:
        self.send(self.sched.look(number))

    def send(self, found: Iterable[Message]) -> None:
        """Queue messages; `give` sends them."""
        for number, message in found:
            self.agents[number].link.queue(message)
            self._touched[number] = None

    def _flush(self, number: int, hold: bool = False) -> tuple[int, int] | None:
        """Send a host's messages; ``hold`` is that of `Conversation.flush`."""
        agent = self.agents[number]
        if not agent.ended:
            host = self.sched.hosts[number]
            # A call is needed if the agent may have messages, or if its lease has to be renewed.
            expects = bool(host.permitted) or bool(host.recalled) or self.retiring
            # The beat counts from the last call, not from the last reply: a late reply renews the
            # lease only when the next call acknowledges it.
            now = self._now()
            held = agent.flush(now, expects or now >= agent.called + self._beat_seconds, hold)
            return None if held is None else (number, held)
        return None

    def _beat(self) -> None:
        """Renew the leases of idle hosts; stop agents that have not replied for a whole lease."""
        for number, agent in self.agents.items():
            if not agent.ended:
                self._flush(number)
                if self._now() > agent.heard + self._lease:
                    agent.given_up = f"its agent has not replied for {self._lease:g} s"
                    self._fleet.stop(number, replace=True)
                elif self._now() >= agent.beaten + 2 * self._beat_seconds:
                    agent.beat(self._now())
        if not self.ended:
            self.at(self._now() + self._beat_seconds, self._beat)

    # -- events of the fleet -----------------------------------------------------------------------

    def happened(self, event: Any) -> None:
        kind = type(event)
        if kind is m.Joined:
            self._joined(event)
        elif kind is m.Coming:
            self.sched.expect(event.host, event.workers)
            self.expected.add(event.host)
            if self.ending or self.retiring:
                self._fleet.stop(event.host)
        elif kind is m.Refused:
            self._fail(event.error)
        elif kind is m.Dead:
            self._dead(event.host, event.reason)
        elif kind is m.Draining:
            if event.host in self.sched.hosts:
                self.send(self.sched.drain(event.host))
        elif (agent := self.agents.get(event.host)) is None or agent.ended:
            return
        elif kind is m.Replied:
            self._touched[event.host] = None
            for message in agent.replied(event, self._now()):
                self._heard(event.host, agent, message)
        else:
            self.at(self._now() + RETRY_SECONDS, lambda: self._once_more(event, agent))

    def _once_more(self, event: m.Unreached, agent: Conversation) -> None:
        agent.unreached(event.number)
        self._flush(event.host)

    def _joined(self, event: m.Joined) -> None:
        if event.host in self.gone:
            return
        self.expected.discard(event.host)
        first = self.sched.hosts[event.host].first
        self.agents[event.host] = Conversation(
            self._fleet, event.host, event.name, first, self._now()
        )
        if self.ending:
            self._fleet.stop(event.host)
            return
        self.sched.join(event.host)
        self.send([(event.host, blob) for blob in self.blobs])
        if not self._beating:
            self._beating = True
            self._beat()
        if self.retiring:
            self.send([(event.host, m.Retire())])

    def _heard(self, host: int, agent: Conversation, message: Any) -> None:
        kind = type(message)
        if kind is m.Answer:
            job, first = message.job, message.first
            if self.sched.answered(host, job, first, message.tasks, message.ok):
                value = message.value
                if isinstance(value, (WorkerDied, TaskTimeout)):
                    if isinstance(value, WorkerDied):
                        agent.without(value.pid)
                    value = _placed(value, agent, self._describe(job, first))
                self.results.append((job, first, (message.ok, value)))
        elif kind is m.Again:
            self.sched.again(host, message.job, message.item, message.killed, self._pause)
        elif kind is m.Given:
            self.sched.given(host, message.batches)
        elif kind is m.Unbegun:
            self.send(self.sched.unbegun(host, *message))
        elif kind is m.Status:
            agent.status = message
            if message.cost < float("inf"):  # inf: the host has answered no task yet
                self.sched.quotas.cost = message.cost
        elif kind is m.WorkerLocations:
            if message.number in self.locations:  # otherwise `stacks` has stopped waiting
                self.locations[message.number][host] = message.workers
        elif kind is m.Failed:
            self._fail(_failure(message.error, agent))
        else:
            self._fleet.stop(host)
            if self.retiring or self.failure is not None:
                agent.ended = True
            else:  # no call has reached the agent during its lease, so the agent has ended
                self._dead(host, "the driver could not reach it during its lease")

    def placed(self, host: int, workers: list[WorkerStack] | None) -> list[WorkerStack]:
        """Return where workers of a host are, with the pool's indices and texts of their tasks.

        ``workers``: as the host has reported them; None: it has not answered.
        """
        agent, found = self.agents[host], []
        if workers is None:
            pids = agent.status.statistics.get("pids", ())
            why = "its host has not answered within a second"
            workers = [WorkerStack(i, pid, "", "", None, why, "") for i, pid in enumerate(pids)]
        for one in workers:
            job = one.task.split()
            task = self._describe(int(job[0]), int(job[1])) if len(job) == 2 else one.task
            index = agent.first + one.index
            found.append(one._replace(index=index, host=agent.name, task=task))
        return found

    def _pause(self, tries: int) -> float:
        """Return when a task runs again after this number of tries."""
        return self._now() + back_off(tries, self.random.random())

    # -- ends of hosts and of the pool -------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether no agent is left and none is expected."""
        return not self.expected and all(agent.ended for agent in self.agents.values())

    def living(self) -> list[int]:
        """Return the numbers of the agents that have not ended."""
        return [number for number, agent in self.agents.items() if not agent.ended]

    def retire(self) -> None:
        """Let workers end after their last answer; no more tasks will be submitted."""
        self.retiring = True
        self.send([(number, m.Retire()) for number in self.living()])
        # Hosts that have not joined may never join.
        for number in self.expected:
            self._fleet.stop(number)
        self.give()

    def stop(self) -> None:
        """Stop all agents now."""
        if not self.ending:
            self.ending = True
            self.sched.clear()
            for number in (*self.living(), *self.expected):
                self._fleet.stop(number)
            self.at(self._now() + END_LIMIT, self._strike_off)

    def _strike_off(self) -> None:
        """Treat all agents as ended; the cluster, which would report it, may have ended itself."""
        self.expected.clear()
        for agent in self.agents.values():
            agent.ended = True

    def _dead(self, number: int, reason: str) -> None:
        """Retry or fail the tasks of a host that is gone."""
        agent = self.agents.get(number)
        if agent is None:
            agent = Conversation(self._fleet, number, f"number {number}", -1, self._now())
        if agent.ended or number in self.gone:
            return
        agent.ended = True
        agent.link = m.Link()  # its messages have the arguments of the host's tasks
        reason = agent.given_up or reason
        self.expected.discard(number)
        self.gone[number] = agent.name
        self.deaths += agent.status.statistics.get("deaths", 0)
        over = agent.heard + self._lease * DRIFT + END_SECONDS
        for one in self.sched.lost(number):
            if one.terms.retries > 0 and one.bound is None and not self.ending:
                self.sched.put_again(one, False, over)
            else:
                self._lose(one.job, one.first, one.bound, agent.name, reason)
        self._last_to_go = f"{agent.name}: {reason}"

    def _fail(self, error: BaseException | PickledResult) -> None:
        if self.failure is None and not self.ending:
            self.failure = error


def _placed(
    error: WorkerDied | TaskTimeout, agent: Conversation, task: str
) -> WorkerDied | TaskTimeout:
    """Return an agent's error with the pool's index of its worker, and the name of its host."""
    e, worker = error, agent.first + error.worker
    if isinstance(e, TaskTimeout):
        return TaskTimeout(e.seconds, worker, e.pid, task, e.stack, e.stopped, agent.name)
    return WorkerDied(e.pid, e.exitcode, worker, task, e.killed, e.beside, agent.name)


def _failure(error: Any, agent: Conversation) -> Any:
    """Return why the workers of a host can run no more tasks, as `_placed` returns an error."""
    e, host = error, agent.name
    if isinstance(e, StartFailure):
        return StartFailure(_failure(e.error, agent), e.pickled)
    if isinstance(e, WorkerStartFailed):
        return WorkerStartFailed(agent.first + e.worker, e.attempts, e.reason, host)
    if isinstance(e, PoolBroken):
        return PoolBroken(e.deaths, e.seconds, f"on host {host}: {e.last}")
    return e
