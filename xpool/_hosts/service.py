"""What a pool over hosts does about what happens: hosts join and die, and agents answer.

Called with the engine's lock held, most of it by the engine's thread.  Calls to the fleet do not
block and are made here all the same, so that messages leave in the order in which they were
numbered.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from xpool._calls.results import Parcel
from xpool._engine.jobs.budget import back_off
from xpool._engine.jobs.ranges import TaskRange, name_of
from xpool._engine.stacks import Whereabouts
from xpool._hosts import fleet as f
from xpool._hosts import messages as m
from xpool._hosts.conversation import Conversation
from xpool._hosts.scheduler import HostScheduler, Message
from xpool.errors import HostLost, TaskTimeout, WorkerDied, XPoolError

__all__ = ["DRIFT", "GRACE", "HostService"]

DRIFT = 1.02
"""How much slower than the driver's an agent's clock may run."""

GRACE = 1.0
"""Seconds that an agent may take to end its workers when its lease is over."""

BEAT = 1.0
"""Seconds after which a host is called that has nothing to do: its lease must not end.  An eighth
of the lease, where that is shorter."""

RETRY = 0.2
"""Seconds after which a call that did not come back is made again."""


class HostService:
    """The agents of one pool, and what they were given.

    Args:
        fleet: where the agents are.
        describe: says which task one is, by job and index, for people.
        lease: seconds, as the agents have it.
        now: the clock.
        wake: has the engine's thread ask `next_time` anew.
    """

    def __init__(
        self,
        fleet: f.Fleet,
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
        """Names of hosts that are lost, by number."""
        self.blobs: list[m.Blob] = []
        self.seen: dict[int, dict[int, list[Whereabouts]]] = {}
        """Where workers are, as hosts have told: by question and host."""
        self.ending = self.retiring = False
        self._last_to_go = ""
        self.deaths = 0
        """Of workers, on hosts that are gone."""
        self.results: deque[tuple[int, int, tuple[bool, Any]]] = deque()
        self.failure: BaseException | Parcel | None = None
        self.random = random.Random()  # not the program's: it may have been seeded
        self._fleet, self._describe, self._lease, self._now = fleet, describe, lease, now
        self._wake = wake
        self._beat_seconds = min(BEAT, lease / 8)
        self._beating = False
        self._touched: dict[int, None] = {}  # hosts that may have to be called, at a turn's end
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # -- time --------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have something called when it is time."""
        timer = when, next(self._numbers), call
        heapq.heappush(self._timers, timer)
        if self._timers[0] is timer:  # the engine's thread waits for a later one
            self._wake()

    def next_time(self) -> float | None:
        """Return when something is to be called next.  Asked without the lock, too."""
        return self._timers[0][0] if self._timers else None

    def due(self) -> None:
        """Call what is to be called by now; fail, if all hosts that there were are gone."""
        while self._timers and self._timers[0][0] <= self._now():
            heapq.heappop(self._timers)[2]()
        self.sched.due(self._now())
        # Not at once with the death of the last: the next event may be that another one comes.
        if self._last_to_go and self.ended and not self.ending and not self.retiring:
            last = self._last_to_go
            self._fail(XPoolError(f"No host of the pool is left; the last to go was {last}"))

    # -- to the hosts ------------------------------------------------------------------------------

    def put(self, ranges: Iterable[TaskRange]) -> bool:
        """Queue ranges of tasks, and permit them to hosts that have room; return whether some of
        them have failed, as the host is gone to whose worker they are bound."""
        refused = False
        if self.ending:
            return refused
        for one in ranges:
            if one.bound is not None and one.bound < 0:
                one.bound = self._least_loaded()
            if one.bound is not None and not self.sched.table.is_there(one.bound):
                self._refuse(one)
                refused = True
            else:
                self.sched.put(one)
        self.give()
        return refused

    def _least_loaded(self) -> int | None:
        try:
            return self.sched.least_loaded()
        except LookupError:
            return None  # the first host that joins

    def _refuse(self, one: TaskRange) -> None:
        """Fail what is bound to a worker whose host is gone."""
        assert one.bound is not None
        host = self.gone.get(self.sched.table.host_of[one.bound], "")
        for index in range(one.first, one.first + len(one.items)):
            job, item = name_of(one.job, index)
            task = self._describe(job, item)
            error = HostLost(host, "its workers have not come back", task, one.bound)
            self.results.append((job, item, (False, error)))

    def give(self) -> None:
        """Permit and stage what there is, and call the hosts that are to hear something."""
        sched = self.sched
        self.send(sched.give())
        while sched.table.unwatched:
            number = sched.table.unwatched.popitem()[0]
            # What was permitted is under way for some of that time, and so are the answers.
            patience = sched.quotas.look_seconds + 2 * self.agents[number].trip
            self.at(self._now() + patience, functools.partial(self._look, number))
        while self._touched:
            self._flush(self._touched.popitem()[0])

    def _look(self, number: int) -> None:
        self.send(self.sched.look(number))

    def send(self, found: Iterable[Message]) -> None:
        """Queue messages; `give` has them sent."""
        for number, message in found:
            self.agents[number].say(message)
            self._touched[number] = None

    def _flush(self, number: int) -> None:
        agent = self.agents[number]
        if not agent.ended:
            host = self.sched.table.hosts[number]
            # It may have something to say, or must hear that it is not forgotten.
            expects = bool(host.permitted) or bool(host.recalled) or self.retiring
            # Since the last call, not since the last reply: one that was long under way renews
            # nothing before the agent is told that it has come.
            now = self._now()
            agent.flush(now, expects or now >= agent.called + self._beat_seconds)

    def _beat(self) -> None:
        """Call the hosts that have nothing to do; give up those that say nothing."""
        for number, agent in self.agents.items():
            if not agent.ended:
                self._flush(number)
                if self._now() > agent.heard + self._lease:
                    agent.given_up = f"no word of its agent for {self._lease:g} s"
                    self._fleet.stop(number)
                # Whatever has come meanwhile: a reply renews nothing until the agent is told of it.
                elif self._now() >= agent.beaten + 2 * self._beat_seconds:
                    agent.beat(self._now())
        if not self.ended:
            self.at(self._now() + self._beat_seconds, self._beat)

    # -- what the fleet tells ----------------------------------------------------------------------

    def happened(self, event: Any) -> None:
        """Act on an event."""
        kind = type(event)
        if kind is f.Joined:
            self._joined(event)
        elif kind is f.Coming:
            self.sched.expect(event.host, event.workers)
            self.expected.add(event.host)
            if self.ending or self.retiring:
                self._fleet.stop(event.host)
        elif kind is f.Refused:
            self._fail(event.error)
        elif kind is f.Dead:
            self._dead(event.host, event.reason)
        elif kind is f.Draining:
            if event.host in self.sched.table.hosts:
                self.send(self.sched.drain(event.host))
        elif (agent := self.agents.get(event.host)) is None or agent.ended:
            return
        elif kind is f.Replied:
            self._touched[event.host] = None
            for message in agent.replied(event, self._now()):
                self._heard(event.host, agent, message)
        else:
            self.at(self._now() + RETRY, lambda: self._once_more(event, agent))

    def _once_more(self, event: f.Unreached, agent: Conversation) -> None:
        agent.unreached(event.number)
        self._flush(event.host)

    def _joined(self, event: f.Joined) -> None:
        if event.host in self.gone:
            return
        if event.host not in self.expected:
            self.sched.expect(event.host, event.workers)
        self.expected.discard(event.host)
        first = self.sched.table.hosts[event.host].first
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
            if self.sched.answered(host, job, first, message.tasks):
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
            self.sched.unbegun(host, message.job, message.first, message.tasks)
        elif kind is m.Status:
            agent.status = message
            if message.cost < float("inf"):  # else it has answered nothing yet
                self.sched.quotas.cost = message.cost
        elif kind is m.Seen:
            if message.number in self.seen:  # else nobody waits for it any more
                self.seen[message.number][host] = message.workers
        elif kind is m.Failed:
            self._fail(message.error)
        else:
            self._fleet.stop(host)
            if self.retiring or self.failure is not None:
                agent.ended = True
            else:  # it has not heard of us for so long that its lease is over
                self._dead(host, "it was out of reach for too long")

    def placed(self, host: int, workers: list[Whereabouts] | None) -> list[Whereabouts]:
        """Return where workers of a host are, by their numbers and tasks in the pool.

        None: the host has not told.
        """
        agent, found = self.agents[host], []
        if workers is None:
            pids = agent.status.statistics.get("pids", ())
            why = "its host has not answered within a second"
            workers = [Whereabouts(i, pid, "", "", None, why, "") for i, pid in enumerate(pids)]
        for one in workers:
            job = one.task.split()
            task = self._describe(int(job[0]), int(job[1])) if len(job) == 2 else one.task
            index = agent.first + one.worker
            found.append(one._replace(worker=index, host=agent.name, task=task))
        return found

    def _pause(self, tries: int) -> float:
        """Return when a task is to be run again that was run so often; be awake then."""
        when = self._now() + back_off(tries, self.random.random())
        self.at(when, lambda: None)
        return when

    # -- the end of a host, and of all -------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether no agent is left and none will come."""
        return not self.expected and all(agent.ended for agent in self.agents.values())

    def living(self) -> list[int]:
        """Return the numbers of the agents that have not ended."""
        return [number for number, agent in self.agents.items() if not agent.ended]

    def retire(self) -> None:
        """Let workers end when they have answered what they hold: nothing more will come."""
        self.retiring = True
        self.send([(number, m.Retire()) for number in self.living()])
        # What has not joined by now may never: nobody is to wait for that.
        for number in self.expected:
            self._fleet.stop(number)
        self.give()

    def stop(self, limit: float) -> None:
        """Stop all agents now, and wait so many seconds at most to hear that they have ended."""
        if not self.ending:
            self.ending = True
            self.sched.clear()
            for number in (*self.living(), *self.expected):
                self._fleet.stop(number)
            self.at(self._now() + limit, self._strike_off)

    def _strike_off(self) -> None:
        """Wait no longer for word that agents have ended: whoever says so may be gone itself."""
        self.expected.clear()
        for agent in self.agents.values():
            agent.ended = True

    def _dead(self, number: int, reason: str) -> None:
        """Make the books of a host that is gone."""
        agent = self.agents.get(number)
        if agent is None:
            agent = Conversation(self._fleet, number, f"number {number}", -1, self._now())
        if agent.ended or number in self.gone:
            return
        agent.ended = True
        reason = agent.given_up or reason
        self.expected.discard(number)
        self.gone[number] = agent.name
        self.deaths += agent.status.statistics.get("deaths", 0)
        over = agent.heard + self._lease * DRIFT + GRACE
        for lost in self.sched.lost(number):
            if lost.again and not self.ending:
                self.sched.put_again(lost.item, False, over)
                self.at(over, lambda: None)
            else:
                job, index = lost.name
                worker = -1 if lost.item.bound is None else lost.item.bound
                error = HostLost(agent.name, reason, self._describe(job, index), worker)
                self.results.append((job, index, (False, error)))
        self._last_to_go = f"{agent.name}: {reason}"

    def _fail(self, error: BaseException | Parcel) -> None:
        if self.failure is None and not self.ending:
            self.failure = error


def _placed(
    error: WorkerDied | TaskTimeout, agent: Conversation, task: str
) -> WorkerDied | TaskTimeout:
    """Say in an agent's error which worker of the pool it is about, and on which host."""
    e, worker = error, agent.first + error.worker
    if isinstance(e, TaskTimeout):
        return TaskTimeout(e.seconds, worker, e.pid, task, e.stack, e.stopped, agent.name)
    return WorkerDied(e.pid, e.exitcode, worker, task, e.killed, e.beside, agent.name)
