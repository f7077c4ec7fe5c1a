"""The engine of a pool whose workers are on many hosts: the face of `xpool.engine.loop.Engine`.

An agent on each host has an ordinary engine (`desk`, `agent`); here is what the driver knows of
them.  What a host may have run is what it was permitted and has not answered (`scheduler`).  A task
that a lost host may have run is run again elsewhere only when that host's lease is over: its agent
has ended its workers by then, whoever can still reach it.

One lock guards all of it.  Calls to the fleet do not block and are made with the lock held, so that
messages leave in the order in which they were numbered; what becomes of them comes as events, which
the engine's thread takes in `wait`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from xpool.errors import HostLost, OptionError, TaskTimeout, WorkerDied, XPoolError
from xpool.hosts import fleet as f
from xpool.hosts import messages as m
from xpool.hosts.link import Link
from xpool.hosts.scheduler import HostScheduler, Message
from xpool.jobs.budget import back_off
from xpool.jobs.ranges import Limit, TaskRange, name_of
from xpool.results import Parcel

if TYPE_CHECKING:
    from xpool.engine.ledger import Event, Slow, Work

__all__ = ["DRIFT", "LEASE", "HostEngine"]

LEASE = 10.0
"""Seconds for which an agent works on without a word of the driver."""

DRIFT = 1.02
"""How much slower than the driver's an agent's clock may run."""

GRACE = 1.0
"""Seconds that an agent may take to end its workers when its lease is over."""

CALLS_IN_FLIGHT = 4
"""Calls to a host that are under way at one time, at most."""

CALL_BYTES = 4 * 1024 * 1024
"""Bytes of one call, at most, unless one message is larger."""

BEAT = 1.0
"""Seconds after which a host is called that has nothing to do: its lease must not end.  An eighth
of the lease, where that is shorter."""

END_LIMIT = 5.0
"""Seconds for which `terminate` waits to hear that the agents are dead."""

RETRY = 0.2
"""Seconds after which a call that did not come back is made again."""


NOTHING: dict[str, Any] = {"ready": 0, "waiting": 0, "running": 0, "deaths": 0, "pids": []}
"""What an agent's workers do that has not said it."""


class _Agent:
    """What the driver knows of a host's agent."""

    def __init__(self, name: str, first: int, now: float) -> None:
        self.name = name
        self.first = first  # index of its first worker
        self.link = Link()
        self.sent = 0  # number of the last message that is under way, or there
        self.calls: dict[int, int] = {}  # calls under way: the first message of each, by number
        self.numbers = itertools.count(1)  # of calls
        self.lost = False  # a reply was lost: the agent is to say it again
        self.replied = 0  # number of the last call that has a reply
        self.heard = now  # when the last reply came: the agent's lease counts from before that
        self.status = m.Status(float("inf"), dict(NOTHING))
        self.ended = False


def _weight(message: Any) -> int:
    kind = type(message)
    if kind is m.Stage:
        return 64 + sum(map(len, message.items))
    return 64 + len(message.payload) if kind is m.Func else 64


class HostEngine:
    """Workers on the hosts of a fleet.

    Args:
        fleet: where the agents are.
        describe: says which task one is, by job and index, for people.
        lease: seconds, as the agents have it.
        now, events: the clock, and where events come: a simulated world has its own.
    """

    def __init__(
        self,
        fleet: f.Fleet,
        describe: Callable[[int, int], str],
        *,
        lease: float = LEASE,
        now: Callable[[], float] = time.monotonic,
        events: Any = None,
    ) -> None:
        self.lock = threading.Lock()  # guards all that follows
        self.dropped = False  # the pool is gone; set without the lock
        self.results: deque[tuple[int, int, tuple[bool, Any]]] = deque()
        self.failure: BaseException | Parcel | None = None
        self.sched = HostScheduler()
        self.idle: Collection[int] = self.sched.hungry
        self._fleet, self._describe, self._lease, self._now = fleet, describe, lease, now
        self._beat_seconds = min(BEAT, lease / 8)
        self._events = queue.SimpleQueue() if events is None else events
        self._agents: dict[int, _Agent] = {}
        self._gone: dict[int, str] = {}  # names of hosts that are lost, by number
        self._expected: set[int] = set()  # hosts that have neither joined nor died
        self._ending = self._retiring = False
        self._blobs: list[m.Blob] = []
        self._deaths = 0
        self._beating = False
        self._touched: dict[int, None] = {}  # hosts that may have to be called, at a turn's end
        self._functions = itertools.count(1)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._random = random.Random()  # not the program's: it may have been seeded

    # -- called by the pool, from any thread -------------------------------------------------------

    def start_missing(self) -> bool:
        """Have the fleet place its agents, the first time; return whether it does."""
        if self._agents or self._expected:
            return False
        with self.lock:
            for number, workers in enumerate(self._fleet.start(self._events.put)):
                self.sched.expect(number, workers)
                self._expected.add(number)
        return True

    def submit(self, *ranges: TaskRange) -> None:
        """Queue ranges of tasks, and permit them to hosts that have room."""
        with self.lock:
            self._put(ranges)

    def _put(self, ranges: Iterable[TaskRange]) -> None:
        if self._ending:
            return
        for one in ranges:
            if one.bound is not None and one.bound < 0:
                one.bound = self._least_loaded()
            if one.bound is not None and not self.sched.is_there(one.bound):
                self._refuse(one)
            else:
                self.sched.put(one)
        self._give()

    def _least_loaded(self) -> int | None:
        try:
            return self.sched.least_loaded()
        except LookupError:
            return None  # the first host that joins

    def _refuse(self, one: TaskRange) -> None:
        """Fail what is bound to a worker whose host is gone."""
        assert one.bound is not None
        host = self._gone.get(self.sched.host_of(one.bound), "")
        for index in range(one.first, one.first + len(one.items)):
            job, item = name_of(one.job, index)
            task = self._describe(job, item)
            error = HostLost(host, "its workers have not come back", task, one.bound)
            self.results.append((job, item, (False, error)))
        self._events.put(None)

    def submit_call(
        self, number: int, payload: bytes | memoryview, retries: int, limit: Limit | None
    ) -> None:
        """Queue a call: item ``number`` of `CALLS`."""
        with self.lock:
            if self._ending:
                return
            self.sched.put_call(number, payload, retries, limit)
            if self.idle:
                self._give()

    def call(self, task_range: TaskRange) -> None:
        """Submit a range of one call; its answer comes by the engine's thread."""
        self.submit(task_range)

    def feed(self, task_range: TaskRange) -> None:
        """See to it that a range to which items were appended is queued, and hosts get it."""
        with self.lock:
            if not self._ending:
                if not task_range.queued and task_range.items:
                    self.sched.put(task_range)
                self._give()

    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        """Keep a function for the workers; return the number that tasks call it by."""
        with self.lock:
            number = next(self._functions)
            self.sched.learn(number, mode, payload)
            return number

    def forget(self, func: int) -> None:
        """Let workers drop a function: its job is done."""
        with self.lock:
            self._send(self.sched.forget(func))

    def broadcast(self, payload: bytes | memoryview) -> str:
        """Have all hosts keep an object until the pool ends; return its name there."""
        held = self._fleet.put(payload)
        with self.lock:
            blob = m.Blob(f"xpool-{os.getpid()}-{id(self):x}-{len(self._blobs)}", held)
            self._blobs.append(blob)
            self._send([(n, blob) for n, agent in self._agents.items() if not agent.ended])
            self._give()
        return blob.name

    def withdraw(self, job: int, index: int | None = None) -> None:
        """Give nobody what still waits of a job that has ended, and stop what runs of it."""
        with self.lock:
            self._send(self.sched.withdraw(job, index))
            self._give()

    def runs(self, job: int, index: int | None = None) -> bool:
        """Whether a host has been permitted a task of this job, or that task, and not answered."""
        with self.lock:
            return self.sched.runs(job, index)

    def sent(self, payload: bytes | memoryview) -> int:
        """Return how many bytes of memory a message holds; it was made for a worker."""
        return len(payload)

    def statistics(self) -> dict[str, Any]:
        """Return counts: of workers (ready, deaths), of tasks (waiting, running), ``pids``, and
        ``hosts``: the same of each, by name."""
        with self.lock:
            each = {
                f"{agent.name}#{number}": agent.status.statistics
                for number, agent in self._agents.items()
                if not agent.ended
            }
            held = list(self.sched.hosts.values())
            running = sum(one.get("running", 0) for one in each.values())
            sent = sum(len(h.permitted) + sum(lot.left for lot in h.staged) for h in held)
            return {
                "ready": sum(one.get("ready", 0) for one in each.values()),
                "waiting": max(0, self.sched.waiting() + sent - running),
                "running": running,
                "deaths": self._deaths + sum(one.get("deaths", 0) for one in each.values()),
                "pids": [pid for one in each.values() for pid in one.get("pids", ())],
                "hosts": each,
            }

    def report(self) -> tuple[list[Work], list[Slow], int, int, int]:
        """Return each worker's work, the slowest tasks, bytes to workers and back, and retries: as
        the hosts said last."""
        work: list[Any] = []
        slow: list[Any] = []
        out = back = retries = 0
        with self.lock:
            for agent in self._agents.values():
                if agent.status.report is not None:
                    its, slowest, sent, got, again = agent.status.report
                    work += [one._replace(worker=agent.first + one.worker) for one in its]
                    slow += [one._replace(worker=agent.first + one.worker) for one in slowest]
                    out, back, retries = out + sent, back + got, retries + again
        return work, sorted(slow, reverse=True)[:10], out, back, retries

    def begin_trace(self) -> None:
        """Refuse: each host has a clock of its own.

        Raises:
            OptionError: always.
        """
        raise OptionError("trace() is not for pools over hosts, whose clocks differ; use report()")

    def end_trace(self) -> tuple[list[Event], float, int]:
        """Return nothing: no trace was begun."""
        return [], 0.0, 0

    def resize(self, size: int) -> None:
        """Refuse: hosts join and leave.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            "a pool over hosts has the workers of the hosts that there are: add a host, or remove "
            "one, and the pool follows"
        )

    # -- ending ------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether no agent is left and none will come."""
        return not self._expected and all(agent.ended for agent in self._agents.values())

    def retire_all(self) -> None:
        """Let workers end when they have answered what they hold: nothing more will come."""
        with self.lock:
            self._retiring = True
            for number, agent in self._agents.items():
                if not agent.ended:
                    self._send([(number, m.Retire())])
            # What has not joined by now may never: nobody is to wait for that.
            for number in self._expected:
                self._fleet.stop(number)
            self._give()
        self._events.put(None)

    def terminate(self) -> None:
        """Stop all agents now, and with them their workers."""
        with self.lock:
            if not self._ending:
                self._ending = True
                self.sched.clear()
                living = [number for number, one in self._agents.items() if not one.ended]
                for number in (*living, *self._expected):
                    self._fleet.stop(number)
                self._at(self._now() + END_LIMIT, self._strike_off)
        self._events.put(None)

    def _strike_off(self) -> None:
        """Wait no longer for word that agents have ended: whoever says so may be gone itself."""
        self._expected.clear()
        for agent in self._agents.values():
            agent.ended = True

    def close(self) -> None:
        """Let go of the fleet; all agents have ended."""
        self._fleet.close()

    def after_fork_in_child(self) -> None:
        """These workers are the parent's."""
        self.lock = threading.Lock()  # some thread of the parent may have held it
        self._ending = True

    # -- the engine's thread -----------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait for something to happen, at most ``timeout`` seconds, and act on it."""
        if self._timers:
            left = max(0.0, self._timers[0][0] - self._now())
            timeout = left if timeout is None else min(timeout, left)
        events: list[Any] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        with self.lock:
            for event in events:
                if event is not None:
                    self._happened(event)
            while self._timers and self._timers[0][0] <= self._now():
                heapq.heappop(self._timers)[2]()
            self.sched.due(self._now())
            self._give()

    def wake(self) -> None:
        """Make the engine's thread look at the clock and the pool's state again."""
        self._events.put(None)

    def drop(self) -> None:
        """Note that the pool is gone.  For the garbage collector: without a lock."""
        self.dropped = True
        self._events.put(None)

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._numbers), call))

    def _give(self) -> None:
        """Permit and stage what there is, and call the hosts that are to hear something."""
        self._send(self.sched.give())
        while self._touched:
            self._flush(self._touched.popitem()[0])

    def _send(self, found: list[Message]) -> None:
        for number, message in found:
            self._agents[number].link.send(message)
            self._touched[number] = None

    def _flush(self, number: int) -> None:
        """Send what is queued for a host, as far as calls are free; have one there for answers."""
        agent = self._agents[number]
        if agent.ended:
            return
        # What a call did not bring that failed, a later one may have brought.
        agent.sent = max(agent.sent, agent.link.acked)
        while len(agent.calls) < CALLS_IN_FLIGHT and agent.sent < agent.link.last:
            self._call(number, agent, agent.link.take(agent.sent, CALL_BYTES, _weight))
        if not agent.calls and self._is_due(number, agent):
            self._call(number, agent, [])

    def _is_due(self, number: int, agent: _Agent) -> bool:
        """Whether a host may have something to say, or must hear that it is not forgotten."""
        host = self.sched.hosts[number]
        expects = bool(host.permitted) or host.asked is not None or self._retiring
        return expects or self._now() >= agent.heard + self._beat_seconds

    def _call(self, number: int, agent: _Agent, messages: list[Any], beat: bool = False) -> None:
        serial, first = next(agent.numbers), agent.sent + 1
        agent.sent += len(messages)
        agent.calls[serial] = first
        got, again, agent.lost = agent.link.got, agent.lost, False
        self._fleet.call(number, f.Call(serial, first, messages, got, again, agent.replied, beat))

    def _beat(self) -> None:
        """Call the hosts that have nothing to do; give up those that say nothing."""
        for number, agent in self._agents.items():
            if not agent.ended:
                self._flush(number)
                if self._now() > agent.heard + self._lease:
                    self._fleet.stop(number)
                elif agent.calls and self._now() >= agent.heard + 2 * self._beat_seconds:
                    self._call(number, agent, [], beat=True)
        if not self.ended:
            self._at(self._now() + self._beat_seconds, self._beat)

    # -- what the fleet tells ----------------------------------------------------------------------

    def _happened(self, event: Any) -> None:
        kind = type(event)
        if kind is f.Joined:
            self._joined(event)
        elif kind is f.Coming:
            self.sched.expect(event.host, event.workers)
            self._expected.add(event.host)
            if self._ending or self._retiring:
                self._fleet.stop(event.host)
        elif kind is f.Refused:
            self._fail(event.error)
        elif kind is f.Dead:
            self._dead(event.host, event.reason)
        elif kind is f.Draining:
            if event.host in self.sched.hosts:
                self._send(self.sched.drain(event.host))
        elif (agent := self._agents.get(event.host)) is None or agent.ended:
            return
        elif kind is f.Replied:
            self._replied(event, agent)
        else:
            self._at(self._now() + RETRY, lambda: self._once_more(event, agent))

    def _once_more(self, event: f.Unreached, agent: _Agent) -> None:
        """Say again what a call that did not come back has said; what had arrived is dropped."""
        first = agent.calls.pop(event.number, None)
        if first is not None and not agent.ended:
            agent.sent, agent.lost = min(agent.sent, first - 1), True
            self._flush(event.host)

    def _joined(self, event: f.Joined) -> None:
        if event.host in self._gone:
            return
        if event.host not in self._expected:
            self.sched.expect(event.host, event.workers)
        self._expected.discard(event.host)
        host = self.sched.hosts[event.host]
        self._agents[event.host] = _Agent(event.name, host.first, self._now())
        if self._ending:
            self._fleet.stop(event.host)
            return
        self.sched.join(event.host)
        self._send([(event.host, blob) for blob in self._blobs])
        if not self._beating:
            self._beating = True
            self._beat()
        if self._retiring:
            self._send([(event.host, m.Retire())])

    def _replied(self, event: f.Replied, agent: _Agent) -> None:
        agent.calls.pop(event.number, None)
        agent.heard, agent.replied = self._now(), max(agent.replied, event.number)
        self._touched[event.host] = None
        agent.link.acknowledge(event.taken)
        # What came before it may still come, by another call; or a call took it that had failed.
        agent.lost |= event.first > agent.link.got + 1
        for message in agent.link.receive(event.first, event.messages):
            self._heard(event.host, agent, message)

    def _heard(self, host: int, agent: _Agent, message: Any) -> None:
        kind = type(message)
        if kind is m.Answer:
            job, first = message.job, message.first
            if self.sched.answered(host, job, first, message.tasks):
                value = message.value
                if isinstance(value, (WorkerDied, TaskTimeout)):
                    value = self._placed(value, agent, self._describe(job, first))
                self.results.append((job, first, (message.ok, value)))
        elif kind is m.Again:
            self.sched.again(host, message.job, message.item, message.killed, self._pause)
        elif kind is m.Given:
            self.sched.given_back(host, message.batch, message.tasks)
        elif kind is m.Status:
            agent.status = message
            if message.cost < float("inf"):  # else it has answered nothing yet
                self.sched.cost = message.cost
        elif kind is m.Failed:
            self._fail(message.error)
        else:
            self._fleet.stop(host)
            if self._retiring or self.failure is not None:
                agent.ended = True
            else:  # it has not heard of us for so long that its lease is over
                self._dead(host, "it was out of reach for too long")

    def _pause(self, tries: int) -> float:
        """Return when a task is to be run again that was run so often; be awake then."""
        when = self._now() + back_off(tries, self._random.random())
        self._at(when, lambda: None)
        return when

    def _placed(
        self, error: WorkerDied | TaskTimeout, agent: _Agent, task: str
    ) -> WorkerDied | TaskTimeout:
        """Say in an agent's error which worker of the pool it is about, and on which host."""
        e, worker = error, agent.first + error.worker
        if isinstance(e, TaskTimeout):
            return TaskTimeout(e.seconds, worker, e.pid, task, e.stack, e.stopped, agent.name)
        return WorkerDied(e.pid, e.exitcode, worker, task, e.killed, e.beside, agent.name)

    def _dead(self, number: int, reason: str) -> None:
        """Make the books of a host that is gone."""
        agent = self._agents.get(number) or _Agent(f"number {number}", -1, self._now())
        if agent.ended or number in self._gone:
            return
        agent.ended = True
        self._expected.discard(number)
        self._gone[number] = agent.name
        self._deaths += agent.status.statistics.get("deaths", 0)
        over = agent.heard + self._lease * DRIFT + GRACE
        for lost in self.sched.lost(number):
            if lost.again and not self._ending:
                self.sched.put_again(lost.item, False, over)
                self._at(over, lambda: None)
            else:
                job, index = lost.name
                worker = -1 if lost.item.bound is None else lost.item.bound
                error = HostLost(agent.name, reason, self._describe(job, index), worker)
                self.results.append((job, index, (False, error)))
        self._look_for_hosts(f"{agent.name}: {reason}")

    def _look_for_hosts(self, reason: str) -> None:
        if self.ended and not self._ending and not self._retiring:
            self._fail(XPoolError(f"No host of the pool is left; the last to go was {reason}"))

    def _fail(self, error: BaseException | Parcel) -> None:
        if self.failure is None and not self._ending:
            self.failure = error
