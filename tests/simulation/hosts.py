"""The engine of a pool over many hosts, in a world whose hosts come, go, and become unreachable.

The driver (`HostEngine`, its scheduler and links) and each host's `AgentSession` are real, the time
between them is virtual. The world knows each task's right outcome, and where and when it runs. So
it finds a task that runs at two places at once, or without permission.
"""

from __future__ import annotations

import heapq
import itertools
import math
import queue
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from xpool._calls.terms import Terms
from xpool._engine.answers import CULPRIT
from xpool._engine.jobs.ranges import CALLS, Batch, TaskRange, name_of
from xpool._hosts import hosts_scheduler as policy
from xpool._hosts import messages as m
from xpool._hosts.hosts_engine import HostEngine
from xpool._hosts.service import DRIFT
from xpool.errors import HostLost, WorkerDied

from .host import STOP_GRACE, Host, Payload, Run, Value
from .network import SimFleet
from .seeds import Passing, Reader, World

__all__ = ["HostWorld"]

Task = tuple[int, int]
"""Job and index."""

MOST_TURNS = 40_000

HANG = 150.0
"""Seconds without progress after which the world counts as hanging."""

LARGE = 12 * 1024 * 1024


class _Known:
    """The world's knowledge of a task."""

    __slots__ = ("answers", "bound", "deadly", "error", "fails", "retries", "runs", "takes",
                 "tries", "where")  # fmt: skip

    def __init__(self) -> None:
        self.runs = 0  # times that it was begun
        self.tries = 0  # retries that the driver gave it
        self.where: Host | None = None  # the host where it runs now
        self.answers = 0
        self.retries = 0
        self.bound: int | None = None
        self.takes = 0.0
        self.deadly = 0  # runs that end its worker
        self.fails = 0  # runs that end in an error with a retry
        self.error = False


class Events:
    """The queue on which the driver's thread waits while other events happen."""

    def __init__(self, world: HostWorld) -> None:
        self.world = world
        self.waiting: deque[Any] = deque()
        self.put = self.waiting.append

    def get(self, timeout: float | None) -> Any:
        """Return the driver's next event."""
        self.world.others_until(self.waiting, timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self.waiting:
            raise queue.Empty
        return self.waiting.popleft()


class HostWorld(World):
    """One driver, up to five hosts, a few jobs, and a network that the seed decides."""

    name = "hosts"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.now = 1000.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = itertools.count()
        self.turns = 0
        self.lease = self.draw.network.one_of([8.0, 10.0])
        self.latency = self.draw.network.one_of([1e-4, 2e-3, 2e-3, 0.05])
        self.losses = self.draw.network.one_of([0.0, 0.0, 0.02, 0.1])
        self.accidents = self.draw.faults.one_of([0.0, 0.003, 0.02, 0.05])
        self.deaths = self.draw.deaths.one_of([0.0, 0.1])
        # Rare events: a host that was declared dead still works; tasks are bound to one worker;
        # large messages wait for room; long tasks follow many short ones.
        self.theme = self.draw.themes.one_of(
            ["", "", "", "", "", "", "cut off", "bound", "no room", "wrong guess"]
        )
        if self.theme == "no room":
            self.losses = self.accidents = 0.0
        elif self.theme == "wrong guess":
            self.losses = self.accidents = self.deaths = 0.0
        elif self.theme:
            self.accidents, self.deaths = 0.05, self.draw.themes.one_of([0.0, 0.5])
        self.pace = self.draw.order.one_of([1e-5, 1e-3])
        self.eager = self.draw.order.one_of([0.2, 0.6, 0.95])
        self.stalls = 5.0 * self.draw.stalls.chance(0.05)  # seconds; the driver is stopped
        self.first_hosts = self.draw.hosts.one_of([1, 1, 2, 2, 3, 4])
        self.late_hosts = self.draw.hosts.one_of([0, 0, 0, 1])
        self.events = Events(self)
        self.hosts: dict[int, Host] = {}  # hosts with an agent
        self.sizes: list[int] = []  # the number of workers of each host
        self.buried: set[int] = set()  # hosts whose death the driver knows
        self.known: dict[Task, _Known] = {}
        self.unanswered: dict[Task, None] = {}
        self.withdrawn: set[int] = set()
        self.funcs: dict[int, int] = {}
        self.forgotten: set[int] = set()
        self.granted: set[tuple[int, Task]] = set()  # tasks that a host may begin
        # Idle hosts whose last answer was a value, and in which order these came.
        self.warm: dict[int, int] = {}
        # In one theme: permitted tasks not begun, and since when.
        self.unbegun: dict[tuple[int, Task], float] = {}
        self.open: dict[int, TaskRange] = {}
        self.to_feed: list[TaskRange] = []
        self.calls: list[int] = []
        self.jobs = 0
        self.half_withdrawn = 0  # jobs whose function is forgotten, but not yet withdrawn
        self.jobs_wanted = 1 + self.draw.verbs.below(6) + (25 if self.theme == "wrong guess" else 0)
        self.ranked = self.draw.priorities.chance(0.25)
        self.spread = self.draw.time.one_of([1e-3, 0.1, 2.0])
        self.violent_end = self.draw.ends.chance(0.15)
        self.early_close = self.draw.ends.chance(0.05)
        self.driver_dies = self.draw.ends.chance(0.1)
        self.over = self.ended_violently = self.driver_is_dead = False
        self.closed_at: float | None = None
        self.progress = self.now
        self.engine = HostEngine(
            SimFleet(self),
            lambda job, index: f"task {index} of job {job}",
            lease=self.lease,
            now=self.clock,
            events=self.events,
        )
        self.engine.service.random = self.draw.pauses  # type: ignore[assignment]
        self.spy()

    def clock(self) -> float:
        """Return the driver's time, which advances between two readings."""
        self.now += 1e-7
        return self.now

    @property
    def at(self) -> str:
        """The time, as stories show it."""
        return f"{self.now:.6f}"

    # -- time --------------------------------------------------------------------------------------

    def later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.heap, (self.now + seconds, next(self.numbers), call, args))

    def trip(self) -> float:
        """Return the time that a message takes."""
        return self.latency * (0.5 + self.draw.network.random())

    def wait_for_room(self, messages: Sequence[Any]) -> float:
        """Return how long large messages wait before they are sent."""
        if self.theme != "no room" or self.over or not messages or self.draw.room.chance(0.5):
            return 0.0
        return self.draw.room.up_to(self.lease)

    def others_until(self, events: deque[Any], timeout: float | None) -> None:
        """Process events while the driver's thread waits."""
        deadline = None if timeout is None else self.now + timeout
        self.stop_if_wrong()
        self.check_policy()
        while not events or (self.soon() and not self.draw.order.chance(self.eager)):
            if deadline is not None and (not self.heap or self.heap[0][0] > deadline):
                self.now = max(self.now, deadline)
                return
            if not self.heap or self.now > self.progress + HANG:
                self.wrong(f"no progress, and {self.left()} have no answer")
            self.step()
            if self.driver_is_dead:
                return
            if events or self.over:
                continue
            when = self.engine.sched.later.next()
            if when is not None and when < self.now - 0.001:
                self.wrong(f"a retry was due at {when}")
            when = self.engine.service.next_time()
            if when is not None and when < self.now - 0.001:
                self.wrong(f"the driver did not wake up at {when}")

    def soon(self) -> bool:
        """Whether another event comes before the driver's thread looks."""
        return bool(self.heap) and self.heap[0][0] < self.now + self.pace + self.stalls

    def step(self) -> None:
        """Process the next event."""
        self.turns += 1
        if self.turns > MOST_TURNS:
            self.wrong("the history does not end")
        when, _, call, args = heapq.heappop(self.heap)
        self.now = max(self.now, when)
        call(*args)
        self.check_starved()
        self.check_sat_on()
        self.check_recalled()

    def tell(self, event: Any) -> None:
        self.events.put(event)

    def caller_receives(self, reply: m.Replied) -> None:
        """A caller that waits for one answer receives a reply with all its answers."""
        if self.driver_is_dead:
            return
        self.engine.receive(reply)
        self.deliver()

    # -- the play ----------------------------------------------------------------------------------

    def play(self) -> None:
        engine = self.engine
        engine.start_missing()
        self.later(self.draw.time.up_to(self.spread), self.act)
        while not engine.ended:
            engine.wait(None if self.draw.time.chance(0.9) else self.draw.time.random())
            if self.driver_is_dead:
                self.let_agents_end()
                return
            self.deliver()
            if engine.failure is not None and not self.ended_violently:
                self.check_failure()
                self.terminate()
        self.deliver()
        if self.left() and not (self.ended_violently or self.early_close):
            self.wrong(f"the hosts have ended without answers to {self.left()}")
        closed = self.closed_at
        if closed is not None and not self.early_close and not self.ended_violently:
            # Unreachable hosts may still work, and the driver has to wait.
            limit = max([closed, *(host.good_from for host in self.hosts.values())]) + 15
            if self.now > limit:
                self.wrong(f"the pool was closed at {closed} and ended only now")
        engine.close()

    def left(self) -> list[Task]:
        """Return the tasks that still need an answer."""
        return [task for task in self.unanswered if task[0] not in self.withdrawn]

    def let_agents_end(self) -> None:
        """After the driver's end, permitted tasks end when the lease ends."""
        limit = self.now + (self.lease + self.latency * 60) * DRIFT + STOP_GRACE + 1
        limit = max([limit, *(host.whole_at + 1 for host in self.hosts.values())])
        while self.heap and self.heap[0][0] <= limit:
            self.step()
        for host in self.hosts.values():
            if host.alive and not host.engine.ended:
                self.wrong(f"{host.name} works on without a driver")

    # -- hosts -------------------------------------------------------------------------------------

    def place(self) -> int:
        """Let a host join later or never; return its number of workers."""
        number, workers = len(self.sizes), self.draw.hosts.one_of([1, 1, 2, 2, 3, 8])
        self.sizes.append(workers)
        if self.draw.hosts.chance(0.15):
            self.later(self.draw.hosts.up_to(2.0, 60.0), self.comes_not, number)
        else:
            self.later(self.draw.hosts.up_to(0.001, 0.5), self.comes, number)
        return workers

    def comes(self, number: int) -> None:
        """A host joins, unless it was cancelled."""
        if number in self.buried:
            return
        host = self.hosts[number] = Host(self, number, self.sizes[number])
        self.progress = self.now
        self.note(self.at, host.name, "is there, with", host.workers, "workers")
        self.later(self.trip(), self.tell, m.Joined(number, host.name))

    def comes_not(self, number: int) -> None:
        """A host will never join."""
        if number not in self.buried:
            self.buried.add(number)
            self.later(self.trip(), self.tell, m.Dead(number, "it did not come"))

    def one_more(self) -> None:
        """Another host is found while the pool works."""
        number = len(self.sizes)
        workers = self.place()
        self.tell(m.Coming(number, workers))

    def dies(self, host: Host) -> None:
        """A host dies with all that runs there; the driver learns it later or knows it."""
        if host.alive:
            self.note(self.at, host.name, "dies")
            self.progress = self.now
            host.alive = False
            host.engine.kill()
            self.later(self.draw.faults.up_to(0.0, 0.01, 3.0), self.tell_dead, host)

    def tell_dead(self, host: Host) -> None:
        """Tell the driver that a host is dead, rightly or wrongly, perhaps twice."""
        if not host.told_dead or self.draw.faults.chance(0.1):
            host.told_dead = True
            self.note(self.at, host.name, "is said to be dead")
            self.tell(m.Dead(host.number, "it is gone"))

    def accident(self, host: Host) -> None:
        """A host dies, becomes unreachable for a while, or begins to drain."""
        how = self.draw.faults.below(8)
        if self.theme == "cut off":
            self.note(self.at, host.name, "is cut off")
            host.whole_at = self.now + 30
            host.trouble(host.whole_at)
            self.later(self.draw.faults.up_to(8), self.tell_dead, host)
        elif how < 2:
            self.dies(host)
        elif how == 2:
            self.note(self.at, host.name, "is going to go")
            self.tell(m.Draining(host.number))
            self.later(self.draw.faults.up_to(3.0, 30.0), self.dies, host)
        else:
            seconds = self.draw.faults.up_to(0.1, 1.0, 5.0, 30.0)
            if self.draw.faults.chance(0.3):  # it returns just after its lease has ended
                seconds = self.lease + self.draw.faults.up_to(2)
            self.note(self.at, host.name, "is out of reach for", f"{seconds:.6f} s")
            host.whole_at = max(host.whole_at, self.now + seconds)
            host.trouble(host.whole_at)
            if self.draw.faults.chance(0.5):
                self.later(self.draw.faults.up_to(seconds), self.tell_dead, host)

    # -- callers -----------------------------------------------------------------------------------

    def act(self) -> None:
        """Let callers act, now and again later."""
        if self.over:
            return
        acts: list[Callable[[], None]] = []
        if self.jobs < self.jobs_wanted:
            acts.append(self.submit)
        elif not (self.open or self.to_feed or self.half_withdrawn or self.left()):
            acts.append(self.close)
        if self.open:
            acts += [self.append, self.append]
        if self.to_feed:
            acts.append(self.feed)
        # Without progress no caller gives up, which would hide a hang.
        quiet = self.now > self.progress + 3
        if self.calls and not quiet and self.draw.cancels.chance(0.05):
            acts.append(self.cancel)
        if self.late_hosts and self.jobs and self.draw.hosts.chance(0.3):
            self.late_hosts -= 1
            acts.append(self.one_more)
        if self.jobs > 1 and not quiet:
            if self.violent_end and self.draw.ends.chance(0.1):
                acts = [self.terminate]
            elif self.early_close and self.draw.ends.chance(0.1):
                acts = [self.close]
            elif self.driver_dies and self.draw.ends.chance(0.1):
                acts = [self.die]
            elif self.draw.cancels.chance(0.01):
                acts.append(self.withdraw)
        if acts:
            self.draw.order.one_of(acts)()
        self.later((self.spread if acts else 0.1) * self.draw.time.random(), self.act)

    def die(self) -> None:
        """The driver is killed."""
        self.note(self.at, "the driver dies")
        self.over = self.ended_violently = self.driver_is_dead = True
        self.tell(None)

    def submit(self) -> None:
        """Submit calls, a map, the beginning of a stream, or a bound task."""
        kind = self.draw.verbs.one_of(
            ["calls", "calls", "map", "map", "map", "stream", "bound", "bound"]
        )
        n = self.draw.verbs.one_of([1, 3, 10, 40, 200]) if kind in ("map", "stream") else 1
        retries = self.draw.retries.one_of([0, 0, 1, 2, 3])
        takes = self.draw.tasks.one_of([1e-4, 1e-3, 0.02, 0.02, 0.3, 3.0, 20.0, 0.0])
        if takes >= 0.3:
            n = min(n, 40 if takes < 20 else 3)
        if self.theme == "cut off":
            takes, n, retries = 20.0, min(n, 3), max(retries, 1)
        elif self.theme == "bound":
            kind, n, retries = "bound", 1, 3
        elif self.theme == "wrong guess":
            kind, n = ("map", 40) if self.jobs else ("calls", 1)
            takes = self.draw.tasks.one_of([0.02, 0.2, 3.0]) if self.jobs else 1e-4
        bound = None
        if kind == "bound":
            bound = self.draw.bound.one_of([-1, -1, *range(len(self.engine.sched.host_of))])
        large = self.draw.payloads.chance(0.1)
        self.note(self.at, "somebody submits", kind, "of", n, "tasks of", takes, "s,", retries,
                  "retries, bound to", bound, "large" if large else "")  # fmt: skip
        several = self.draw.verbs.one_of([1, 4, 25]) if kind in ("calls", "bound") else 1
        for _ in range(25 if self.theme == "wrong guess" and not self.jobs else several):
            self.jobs += 1
            self.submit_one(kind, n, retries, takes, bound, large)

    def priority_of(self, job: int) -> float:
        return (0, 2, -1, 0.5)[job // 3 * 7 % 4] if self.ranked else 0

    def submit_one(
        self, kind: str, n: int, retries: int, takes: float, bound: int | None, large: bool
    ) -> None:
        """Submit a job."""
        job = self.jobs
        items = [self.new_task(job, i, retries, takes, bound, large) for i in range(n)]
        terms = Terms(retries, priority=self.priority_of(job))
        if kind == "calls":
            self.calls.append(job)
            self.funcs[job] = 0
            if self.draw.verbs.chance(0.5):
                to = self.engine.put_direct(job, items[0], None, terms)
                if to is not None:
                    self.engine.await_answer(to, job)
            else:
                self.engine.submit_call(job, items[0], terms)
        elif kind == "bound":
            self.calls.append(job)
            self.funcs[job] = 0
            self.engine.submit(TaskRange(CALLS, 0, job, items, bound, terms))
        else:
            self.funcs[job] = self.engine.learn(1, b"%d" % job)
            task_range = TaskRange(job, self.funcs[job], 0, items, None, terms)
            self.engine.submit(task_range)
            if kind == "stream":
                self.open[job] = task_range
                task_range.flow = Reader()

    def new_task(
        self, job: int, index: int, retries: int, takes: float, bound: int | None, large: bool
    ) -> Payload:
        """Decide a task's outcome; return its payload."""
        task = self.known[job, index] = _Known()
        self.unanswered[job, index] = None
        task.retries, task.bound = retries, bound
        draw = self.draw.tasks
        task.takes = (takes or draw.one_of([1e-4, 0.01, 2.0])) * (0.5 + draw.random())
        if self.deaths and self.draw.deaths.chance(self.deaths):
            task.deadly = self.draw.deaths.one_of([1, 1, 2, 9])
        if self.theme == "wrong guess" and takes < 1e-3:
            task.takes = takes  # the estimate is based on these
        task.error = draw.chance(0.05)
        if draw.chance(0.5 if self.theme == "bound" else 0.05):
            task.fails = 1 + draw.below(3)
        payload = Payload(b"%d.%d" % (job, index))
        payload.task = job, index
        payload.size = LARGE if large else self.draw.payloads.one_of([20, 20, 300_000])
        return payload

    def append(self) -> None:
        """The input reader of a stream draws more items, or reaches the end."""
        job = self.draw.streams.one_of(list(self.open))
        task_range = self.open[job]
        index = task_range.first + len(task_range.items)
        if index > 60 or self.draw.streams.chance(0.2):
            del self.open[job]
            return
        for _ in range(1 + self.draw.streams.below(8)):
            item = self.new_task(job, index, task_range.terms.retries, 0.01, None, False)
            task_range.items.append(item)
            index += 1
            if not task_range.queued or self.engine.idle:
                # The input reader has decided to call `feed`; others may act before it does.
                self.to_feed.append(task_range)

    def feed(self) -> None:
        """An input reader calls `feed`, as it decided earlier."""
        self.progress = self.now  # a slow input reader is no hang
        self.engine.feed(self.to_feed.pop(self.draw.streams.below(len(self.to_feed))))

    def cancel(self) -> None:
        """Cancel a call in any state."""
        job = self.draw.cancels.one_of(self.calls)
        self.calls.remove(job)
        if (job, 0) in self.unanswered:
            self.note(self.at, "call", job, "is cancelled")
            self.withdrawn.add(job)
            self.engine.withdraw(CALLS, job)

    def withdraw(self) -> None:
        """Withdraw a job that its caller no longer needs."""
        jobs = [job for job in {job for job, _ in self.left()} if job not in self.calls]
        if not jobs:
            return
        job = self.draw.cancels.one_of(sorted(jobs))
        self.note(self.at, "job", job, "is withdrawn")
        self.withdrawn.add(job)
        self.open.pop(job, None)
        self.to_feed = [one for one in self.to_feed if one.job != job]
        place = (job,) if self.funcs[job] else (CALLS, job)
        if self.funcs[job] and self.draw.cancels.chance(0.5):
            self.forget(job)
            # As in the pool, other threads may act in between.
            self.half_withdrawn += 1
            self.later(self.draw.cancels.up_to(0.01), self.withdraw_rest, *place)
            return
        self.engine.withdraw(*place)
        if self.funcs[job]:
            self.forget(job)

    def withdraw_rest(self, *place: int) -> None:
        """Withdraw a job whose function is forgotten."""
        self.half_withdrawn -= 1
        self.engine.withdraw(*place)

    def forget(self, job: int) -> None:
        if job not in self.forgotten:
            self.forgotten.add(job)
            self.engine.forget(self.funcs[job])

    def close(self) -> None:
        """Close the pool, nearly always when all tasks are answered."""
        self.note(self.at, "close")
        self.closed_at = self.now
        self.progress = self.now
        self.over = True
        self.engine.retire_all()

    def terminate(self) -> None:
        """Terminate the pool: from now on only its end counts."""
        self.note(self.at, "terminate")
        self.progress = self.now
        self.over = self.ended_violently = True
        self.open.clear()
        self.engine.terminate()

    def deliver(self) -> None:
        """Take and check the results, as the pool does."""
        results = self.engine.results
        while results:
            job, index, (_, value) = results.popleft()
            if isinstance(value, Value):
                if value.tasks[0] != (job, index):
                    self.wrong(f"task {index} of job {job} is answered with {value}")
                if value.host in self.buried:
                    self.wrong(f"{value} arrive after its death was known")
                for task in value.tasks:
                    if self.known[task].runs <= self.known[task].fails:
                        self.wrong(f"{task} failed and is answered with a value")
                    self.answered(*task, "done")
                continue
            if isinstance(value, HostLost):
                self.check_lost(job, index, value)
            elif isinstance(value, WorkerDied):
                self.check_death(job, index)
            elif not self.known[job, index].error:
                self.check_tries(job, index, "has failed")
            self.answered(job, index, repr(value))
        for host in self.hosts.values():
            if host.number in self.engine.service.gone:
                self.buried.add(host.number)

    def answered(self, job: int, index: int, how: str) -> None:
        """Record the only answer of a task."""
        task = self.known[job, index]
        self.note(self.at, "task", index, "of job", job, "is", how)
        self.progress = self.now
        task.answers += 1
        if task.answers > 1:
            self.wrong(f"task {index} of job {job} is answered twice")
        del self.unanswered[job, index]
        if self.funcs[job] and job not in self.open and all(t[0] != job for t in self.unanswered):
            self.forget(job)

    # -- what runs ---------------------------------------------------------------------------------

    def begins(self, host: Host, w: int, batch: Batch, position: int, function: Any) -> Run:
        """A worker begins a task; return its outcome."""
        name = batch.items[position].task
        job, index = name
        task = self.known[name]
        self.note(self.at, host.name, "begins task", index, "of job", job)
        self.progress = self.now
        if (job, index) != batch.name(batch.first + position):
            self.wrong(f"task {index} of job {job} is run as {batch.name(batch.first + position)}")
        if self.funcs[job] and not batch.func:
            self.wrong(f"task {index} of job {job} counts as a call")
        if task.where is not None:
            self.wrong(f"task {index} of job {job} runs at {task.where.name} and {host.name}")
        if (host.number, name) not in self.granted and not self.ended_violently:
            self.wrong(f"task {index} of job {job} is begun at {host.name} without permission")
        if job not in self.withdrawn and not self.ended_violently:
            self.check_begun(host, w, name, function)
        if batch.terms.tries != task.tries and host.number not in self.buried:
            self.wrong(f"{name} was tried {task.tries} times, not {batch.terms.tries}")
        self.unbegun.pop((host.number, name), None)
        for number, other in self.unbegun:
            if number == host.number and self.priority_of(other[0]) < self.priority_of(job):
                self.unbegun[number, other] = self.now  # it waits for those of higher priorities
        task.runs += 1
        task.where = host
        if task.runs > 1 + task.retries:
            self.wrong(f"task {index} of job {job} is run {task.runs} times")
        ends_in = "value"
        if task.runs <= task.deadly:
            ends_in = "death"
        elif task.error or task.runs <= task.fails:
            ends_in = "failure" if task.error else "error"
        return Run(name, task.takes, ends_in)

    def check_begun(self, host: Host, w: int, name: Task, function: Any) -> None:
        """A begun task is awaited, at the right worker, with its function."""
        task = self.known[name]
        if task.answers and not host.told_dead:
            self.wrong(f"{name} is run again after its answer")
        if self.funcs[name[0]] and function != b"%d" % name[0]:
            self.wrong(f"{name} is run with the function {function!r}")
        first = self.engine.sched.host_of.index(host.number)
        if task.bound is not None and task.bound not in (-1, first + w):
            self.wrong(f"{name} is bound to {task.bound}, not {first + w}")

    def ends(self, host: Host, name: Task) -> None:
        self.known[name].where = None
        self.progress = self.now

    # -- what the driver decides -------------------------------------------------------------------

    def spy(self) -> None:
        """Observe the scheduler's methods."""
        sched: Any = self.engine.sched
        permit, put_again, unbegun = sched._permit, sched.put_again, sched.unbegun
        note_answered = sched.answered
        passing = Passing(self, sched.shared)

        def answered(number: int, job: int, first: int, tasks: int, ok: bool = False) -> Any:
            awaited = note_answered(number, job, first, tasks, ok)
            host = sched.hosts.get(number)
            if ok and host is not None and not host.permitted:
                self.warm[number] = next(self.numbers)
            return awaited

        def permitting(host: Any, batch: Any, found: Any) -> None:
            if batch.items.bound is None:
                self.check_warm(host)
                self.check_priority(host, batch)
            self.warm.pop(host.number, None)
            permit(host, batch, found)
            if batch.of_stream:
                passing.given(batch.priority)
            for payload in batch.items.items:
                self.granted.add((host.number, payload.task))
                if self.theme == "wrong guess":
                    self.unbegun[host.number, payload.task] = self.now
            if host.leaving:
                self.wrong(f"draining host {host.number} is permitted a task")
            if batch.items.bound is not None:
                return
            extra = (
                0
                if sched.quotas.cost > policy.LONG_SECONDS
                else policy.AHEAD_SECONDS / sched.quotas.cost
            )
            most = max(host.workers, min(policy.MOST_AHEAD, host.workers * (1 + math.ceil(extra))))
            if host.ahead > most:
                self.wrong(f"host {host.number} is permitted {host.ahead} tasks, not {most}")
            if host.ahead > host.workers:
                self.check_bytes(host)

        def again(item: TaskRange, killed: bool, when: float) -> None:
            task = self.known[item.items[0].task]
            task.tries += 1
            put_again(item, killed, when)
            if item.terms.tries != task.tries or item.terms.retries != task.retries - task.tries:
                self.wrong(f"{item.items[0].task} has {item.terms}")

        def back(number: int, kept: int, job: int, first: int, tasks: int) -> Any:
            self.note(self.at, tasks, "tasks from", (job, first), "are given back by host", number)
            self.warm.pop(number, None)
            for item in range(first, first + tasks):
                self.granted.discard((number, name_of(job, item)))
                self.unbegun.pop((number, name_of(job, item)), None)
            found = unbegun(number, kept, job, first, tasks)
            host = sched.hosts.get(number)
            if host is not None:
                stays = any(batch.number == kept for batch in host.staged)
                drops = any(type(one) is m.Drop and kept in one.batches for _, one in found)
                if stays == drops:
                    self.wrong(f"batch {kept} stays at host {number}: {stays}; drops it: {drops}")
            return found

        sched._permit, sched.put_again, sched.unbegun = permitting, again, back
        sched.answered = answered

    def calls_host(self, number: int, call: m.Call) -> None:
        """The driver calls a host."""
        kinds = [type(message).__name__ for message in call.messages]
        self.note(self.at, "to host", number, call._replace(messages=kinds))
        if "Stage" in kinds and not self.ended_violently and number in self.engine.sched.hosts:
            self.check_bytes(self.engine.sched.hosts[number])

    def check_bytes(self, host: Any) -> None:
        """Bytes sent ahead are bounded, except for one task for each worker and one bound task for
        each."""
        batches = [*host.staged, *dict.fromkeys(host.permitted.values())]
        shared = sum(batch.nbytes for batch in batches if batch.items.bound is None)
        bound = sum(batch.nbytes for batch in batches) - shared
        largest = max((batch.nbytes for batch in batches if len(batch.items.items) == 1), default=0)
        most = policy.AHEAD_BYTES + policy.BATCH_BYTES + (1 + host.workers) * largest
        if shared > most or shared + bound > most + host.workers * largest:
            self.wrong(f"{shared} bytes are at host {host.number}, and {bound} for its workers")

    def check_warm(self, host: Any) -> None:
        """A task goes to the idle host that gave a value last, not to one that gave an error."""
        before = self.warm.get(host.number, -1)
        for other in self.engine.sched.hosts.values():
            if other.accepting and not other.permitted and self.warm.get(other.number, -1) > before:
                self.wrong(f"host {host.number} gets a task before host {other.number}")

    def check_priority(self, host: Any, batch: Any) -> None:
        """No task that waits for any host has a higher priority than one that may begin."""
        sched = self.engine.sched
        waits = [(one.terms.priority, one.job) for one in sched.shared if one.items]
        for other in sched.hosts.values():
            waits += [(one.priority, one.items.job) for one in other.staged]
        priority, job = max(waits, default=(-math.inf, 0))
        if priority > batch.priority:
            self.wrong(f"job {batch.items.job} goes to host {host.number} before job {job}")

    def check_policy(self) -> None:
        """When the driver's thread waits, no host has room while a task waits for any host."""
        sched = self.engine.sched
        if self.over or self.engine.failure is not None:
            return
        fed = {one.job for one in (*self.open.values(), *self.to_feed)}
        waits = [one.job for one in sched.shared if one.items and one.job not in fed]
        waits += [batch.items.job for host in sched.hosts.values() for batch in host.staged]
        for host in sched.hosts.values():
            if host.accepting and waits and host.ahead < host.workers:
                self.wrong(f"host {host.number} has room, and job {waits[0]} waits")
            for w in range(host.first, host.first + host.workers):
                if host.accepting and sched.own[w] and not sched.bound_ahead[w]:
                    self.wrong(f"worker {w} is idle while a task waits for it")

    def check_starved(self) -> None:
        """No host is idle for longer than a few trips while a task waits.

        `outbox_read` says from when on the time counts.
        """
        if self.over or self.losses or self.stalls or self.theme == "no room":
            return
        sched = self.engine.sched
        waits = any(one.items for one in sched.shared)
        if waits and self.turns % 8:
            return
        for number, host in self.hosts.items():
            its = sched.hosts.get(number)
            if (
                not waits or its is None or not its.accepting or host.over
                or self.now < host.good_from or host.holds_bound()
            ):  # fmt: skip
                host.starved = None
                continue
            idle = host.longest_idle()
            if host.starved is None or idle is None or host.starved[0] != idle:
                host.starved = None if idle is None else (idle, self.now)
            elif self.now - host.starved[1] > 8 * self.latency + 0.05:
                self.wrong(f"{host.name} is idle since {host.starved[1]:.6f}")

    def outbox_read(self, host: Host) -> None:
        """A host's engine finds answers that a worker has left in its outbox, behind which it runs
        a longer task.

        Until now the driver counted these tasks as running. If it counted as many as the host has
        workers, and may permit no more there, it could not know that a worker was idle. So the
        idle time counts from now on. The answers may have lain there for 0.1 s (`EngineWorld`
        checks this).
        """
        its = self.engine.sched.hosts.get(host.number)
        if its is not None and its.ahead >= its.workers:
            host.starved = None

    def check_sat_on(self) -> None:
        """No worker keeps tasks behind a long one while another host is idle.

        The time limit is that of requesting all batches of the worker's host.
        """
        if self.over or self.losses or self.stalls or self.deaths or self.turns % 8:
            return
        if self.theme == "no room":
            return
        sched = self.engine.sched
        idle = None
        for number, host in self.hosts.items():
            its = sched.hosts.get(number)
            fine = its is not None and its.accepting and not host.over
            if not fine or self.now < host.good_from:
                host.idle, host.sat_on = None, {}
                continue
            worker = host.longest_idle() if its.ahead < its.workers else None
            if host.idle is None or host.idle[0] != worker:
                host.idle = None if worker is None else (worker, self.now)
            if host.idle is not None:
                idle = min(idle or self.now, host.idle[1])
            sits = host.engine.sat_on(its.permitted) if its.ahead > its.workers else []
            host.sat_on = {one: host.sat_on.get(one, self.now) for one in sits}
        for host in self.hosts.values():
            for (worker, _), since in host.sat_on.items():
                batches = len(set(sched.hosts[host.number].permitted.values()))
                limit = 0.1 + 4 * self.latency * (2 + batches)
                if idle is not None and self.now - max(idle, since) > limit:
                    self.wrong(f"worker {worker} of {host.name} keeps tasks since {since:.6f}")

    def check_recalled(self) -> None:
        """Permissions that a wrong estimate gave are taken back, so that a lost host loses few
        tasks.

        One waiting task for each worker may stay.
        """
        if self.over or self.stalls or not self.unbegun or self.turns % 8:
            return
        # The time of two checks, which are farther apart for longer tasks.
        long_ago = self.now - 4 * policy.LONG_SECONDS - 0.1 - 8 * self.latency
        waits = Counter(number for (number, (job, _)), since in self.unbegun.items()
                        if since < long_ago and job not in self.withdrawn)  # fmt: skip
        for number, n in waits.items():
            host = self.hosts[number]
            if n > host.workers and not (host.over or host.number in self.buried):
                self.wrong(f"{host.name} keeps {n} unbegun tasks")

    # -- what must hold of the end of a task -------------------------------------------------------

    def check_tries(self, job: int, index: int, how: str) -> None:
        """The task has used all its retries."""
        task = self.known[job, index]
        if task.tries != task.retries and not self.over:
            self.wrong(f"task {index} of job {job} {how} after {task.tries} retries")

    def check_lost(self, job: int, index: int, error: HostLost) -> None:
        """A task is lost with a host only if it was permitted there and has no retry left."""
        task = self.known[job, index]
        if task.bound is not None:
            return
        number = int(error.host.removeprefix("host"))
        if (number, (job, index)) not in self.granted:
            self.wrong(f"task {index} of job {job} is lost with {error.host} without permission")
        self.check_tries(job, index, "is lost")

    def check_death(self, job: int, index: int) -> None:
        """The task's worker died, and no retry is left."""
        task = self.known[job, index]
        if not task.deadly:
            self.wrong(f"task {index} of job {job} has killed no worker")
        if task.runs < CULPRIT:
            self.check_tries(job, index, "has killed its worker")

    def check_failure(self) -> None:
        """The pool may fail only if none of its hosts is left."""
        self.note("the pool gives up:", self.engine.failure)
        service = self.engine.service
        if (service.expected | service.agents.keys()) - service.gone.keys():
            self.wrong(f"the pool gives up without a reason: {self.engine.failure}")
