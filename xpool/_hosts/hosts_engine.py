"""The engine of a pool over hosts: it has the methods of `xpool._engine.engine.Engine`.

The agent of each host has an ordinary engine (`agent`); this is the driver's side.  One lock guards
everything.  The outcomes of calls to the fleet arrive as events; the engine's thread takes them in
`wait`, and `service` acts on them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from xpool._calls.results import PickledResult
from xpool._calls.terms import Terms
from xpool._engine.jobs.ranges import CALLS, TaskRange
from xpool._engine.launch import wanted_modules
from xpool._engine.ledger import EngineReport
from xpool._engine.submission import Postponed
from xpool._hosts import messages as m
from xpool._hosts.agent import AgentConfig, facts
from xpool._hosts.service import HostService
from xpool._pickling.by_value.sent import Book
from xpool._pickling.frame import BY_PIPE
from xpool._pools import assembly
from xpool._pools.process import describe

if TYPE_CHECKING:
    from xpool._engine.stacks import WorkerStack
    from xpool._pools.process import Pool

LEASE = 10.0
"""Seconds for which an agent goes on after the last call of the driver."""

LOOK_SECONDS = 1.0
"""Seconds for which `stacks` waits for the hosts."""

DIRECT_SECONDS = 0.005
"""Seconds for which a caller of `call` waits for the reply.  After that the engine's thread
receives it.  A signal handler may have to wait as long."""


class HostEngine:
    """Workers on the hosts of a fleet; `EngineProtocol` describes the methods.

    ``now``, ``events``: the clock and the queue of events; a simulated world gives its own.
    """

    def __init__(
        self,
        fleet: m.Fleet,
        describe: Callable[[int, int], str],
        *,
        lease: float = LEASE,
        now: Callable[[], float] = time.monotonic,
        events: Any = None,
    ) -> None:
        # Guards the fields below; reentrant, as the local engine's.
        self.lock: Any = threading.RLock()
        self.guards = [self.lock]
        self.dropped = False  # the pool was collected; set without the lock
        self._events = queue.SimpleQueue() if events is None else events
        self._postponed = Postponed(self.lock, self.wake)
        self.service = HostService(fleet, describe, lease, now, self.wake)
        self.results = self.service.results
        self.sched = self.service.sched
        self.idle: Collection[int] = self.sched.with_capacity
        self._fleet, self._now = fleet, now
        self._functions = itertools.count(1)

    @property
    def failure(self) -> BaseException | PickledResult | None:
        return self.service.failure

    # -- called by the pool, from any thread -------------------------------------------------------

    def start_missing(self) -> bool:
        """Have the fleet place its agents at the first call; return whether this was the first."""
        service = self.service
        if service.agents or service.expected:
            return False
        with self.lock:
            for number, workers in enumerate(self._fleet.start(self._events.put)):
                self.sched.expect(number, workers)
                service.expected.add(number)
        return True

    def submit(self, *ranges: TaskRange) -> None:
        self._put(ranges)

    def _put(self, ranges: Sequence[TaskRange], hold: bool = False) -> tuple[int, int] | None:
        if self._postponed(self._put, ranges):
            return None
        with self.lock:
            held = self.service.put(ranges, hold)
            if self.results:
                self.wake()  # the engine's thread takes the results
        return held

    def submit_call(self, number: int, payload: bytes | memoryview, terms: Terms) -> None:
        if self._postponed(self.submit_call, number, payload, terms):
            return
        with self.lock:
            if self.service.ending:
                return
            self.sched.put_call(number, payload, terms)
            if self.idle:
                self.service.give()

    def put_direct(
        self, number: int, payload: bytes | memoryview, bound: int | None, terms: Terms
    ) -> Any:
        return self._put((TaskRange(CALLS, 0, number, (payload,), bound, terms),), hold=True)

    def await_answer(self, worker: Any, number: int) -> None:
        host, held = worker
        reply = self._fleet.receive(host, held, DIRECT_SECONDS)
        if reply is not None:
            self.receive(reply)

    def receive_call(self, number: int, milliseconds: float) -> None:
        """Return None: the thread that receives messages from the host receives the answer."""

    def receive(self, reply: m.Replied) -> None:
        """Act on a reply in the thread of a caller that waits for its answers."""
        if any(type(message) not in (m.Answer, m.Status) for message in reply.messages):
            self._events.put(reply)  # the reply may end the pool, in the engine's thread
            return
        with self.lock:
            self.service.happened(reply)
            self.service.give()

    def feed(self, task_range: TaskRange) -> None:
        if self._postponed(self.feed, task_range):
            return
        with self.lock:
            if not self.service.ending:
                if not task_range.queued and task_range.items:
                    self.sched.put(task_range)
                self.service.give()

    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        with self.lock:
            number = next(self._functions)
            self.sched.learn(number, mode, payload)
            return number

    def forget(self, func: int) -> None:
        if not self._postponed(self.forget, func):
            with self.lock:
                self.service.send(self.sched.forget(func))

    def broadcast(self, payload: bytes | memoryview) -> str:
        """Send an object to all hosts, which keep it until the pool ends; return its name."""
        held = self._fleet.put(payload)
        with self.lock:
            service = self.service
            blob = m.Blob(f"xpool-{os.getpid()}-{id(self):x}-{len(service.blobs)}", held)
            service.blobs.append(blob)
            service.send([(number, blob) for number in service.living()])
            service.give()
        return blob.name

    def withdraw(self, job: int, index: int | None = None) -> None:
        if self._postponed(self.withdraw, job, index):
            return
        with self.lock:
            self.service.send(self.sched.withdraw(job, index))
            self.service.give()

    def runs(self, job: int, index: int | None = None) -> bool:
        with self.lock:
            return self.sched.runs(job, index)

    def sent(self, payload: bytes | memoryview) -> int:
        return len(payload)

    def statistics(self) -> dict[str, Any]:
        """Return counts: of workers (ready, deaths), of tasks (waiting, running), ``pids``, and
        ``hosts``: the same counts for each host, by name."""
        with self.lock:
            each: dict[str, Any] = {}
            for number, agent in self.service.agents.items():
                if agent.ended:
                    continue
                each[f"{agent.name}#{number}"] = agent.status.statistics
            held = list(self.sched.hosts.values())
            running = sum(one.get("running", 0) for one in each.values())
            sent = sum(len(h.permitted) + h.staged_items for h in held)
            return {
                "ready": sum(one.get("ready", 0) for one in each.values()),
                "waiting": max(0, self.sched.waiting() + sent - running),
                "running": running,
                "deaths": self.service.deaths + sum(one.get("deaths", 0) for one in each.values()),
                "pids": [pid for one in each.values() for pid in one.get("pids", ())],
                "hosts": each,
            }

    def report(self) -> EngineReport:
        """Return what the workers have done, by the last `Status` of each host."""
        with self.lock:
            agents = self.service.agents.values()
            return EngineReport.of_hosts((one.first, one.status.report) for one in agents)

    def stacks(self) -> list[WorkerStack]:
        """Return where each worker is; those of hosts that do not answer in a second say so."""
        service, number = self.service, next(self._functions)
        with self.lock:
            living = service.living()
            service.locations[number] = {}
            service.send([(host, m.LocateWorkers(number)) for host in living])
        until = self._now() + LOOK_SECONDS
        while len(service.locations[number]) < len(living) and self._now() < until:
            time.sleep(0.01)  # as in the engine of one machine
        with self.lock:
            seen = service.locations.pop(number)
            told = [service.placed(host, seen.get(host)) for host in sorted({*living, *seen})]
            return [where for of_host in told for where in of_host]

    # -- ending ------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.service.ended

    def retire_all(self) -> None:
        with self.lock:
            self.service.retire()
        self.wake()

    def terminate(self, at_once: bool = False) -> None:
        with self.lock:
            self.service.stop()
        self.wake()

    def close(self) -> None:
        self._fleet.close()

    def after_fork_in_child(self) -> None:
        # Some thread of the parent may have held it.
        self.lock = self._postponed.lock = threading.RLock()
        self.service.ending = True

    # -- the engine's thread -----------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for events and timers, and act on them."""
        service = self.service
        if (when := service.next_time()) is not None:
            left = max(0.0, when - self._now())
            timeout = left if timeout is None else min(timeout, left)
        events: list[Any] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        self._postponed.run()
        with self.lock:
            for event in events:
                if event is not None:
                    service.happened(event)
            service.due()
            service.give()

    def wake(self) -> None:
        self._events.put(None)

    resume = wake

    def drop(self) -> None:
        self.dropped = True
        self.wake()


def make_engine(
    pool: Pool,
    workers: Sequence[int],
    fleet: Callable[[AgentConfig], m.Fleet],
    kind: str | None = None,
) -> HostEngine:
    """Return the engine of a pool over hosts.

    ``workers``: the number of workers of each host.  ``fleet`` makes the fleet from the agents'
    configuration.  ``kind``: of the devices that the workers are bound to; None: no devices.
    """
    packer, options = pool._pack_by(BY_PIPE._replace(book=Book())), pool._options
    start = packer.refer((pool.initializer, *pool.initargs))
    spec = pool._worker_spec(packer.pack_start(start))
    if kind is not None:
        spec = spec._replace(contexts=None)  # each agent makes the contexts of its own workers
    modules = wanted_modules()
    config = AgentConfig(
        spec=spec._replace(peers=0),  # workers of different hosts cannot send each other messages
        main=assembly.Main.now(),
        modules=modules,
        options=assembly.engine_options(options, max(workers))._replace(hands_back=True),
        memory_limit=options.memory_limit,
        lease=LEASE,
        facts=facts(modules),
        kind=kind,
    )
    describing = functools.partial(describe, pool._jobs.unanswered)
    return HostEngine(fleet(config), describing, lease=LEASE)
