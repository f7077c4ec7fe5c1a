"""One host of the simulated world: an agent's engine on virtual workers, and its clock.

The session, the link and the engine's scheduler are real. The virtual workers follow
`xpool._engine`: they take batches, answer tasks singly or in groups, die, are stopped in withdrawn
tasks, and end when told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

from xpool._engine.answers import CULPRIT
from xpool._engine.jobs.ranges import name_of
from xpool._engine.jobs.scheduler import CALLS, Batch, Scheduler, TaskRange, Terms
from xpool._hosts import messages as m
from xpool._hosts.agent import DIRECT_MILLISECONDS, AgentSession
from xpool._hosts.messages import Call
from xpool._hosts.service import END_SECONDS, RETRY_SECONDS
from xpool.errors import WorkerDied

if TYPE_CHECKING:
    from .hosts import HostWorld

__all__ = ["Host", "Payload", "Value"]

DIRECT_SECONDS = DIRECT_MILLISECONDS / 1000

PATIENCE = 1.0
"""Seconds after which an agent answers a pull without news."""

STOP_GRACE = 0.95 * END_SECONDS
"""Seconds that a worker may take to end when its engine is terminated."""

LOOK = 0.01
"""Seconds before a worker with tasks in hand is checked while another is idle."""

REPLY_BYTES = 4096


class Payload(bytes):
    """The bytes of a task, with the task's name and the size to count."""

    task: tuple[int, int]
    size: int

    def __len__(self) -> int:
        return self.size


class Value:
    """Answers to consecutive tasks, with their host."""

    def __init__(self, tasks: list[tuple[int, int]], host: int) -> None:
        self.tasks, self.host, self.count = tasks, host, len(tasks)

    def __repr__(self) -> str:
        return f"answers to {self.tasks} from host {self.host}"


class Run:
    """One run of a task in a worker."""

    def __init__(self, task: tuple[int, int], takes: float, ends_in: str) -> None:
        self.task, self.takes, self.ends_in = task, takes, ends_in


class AgentEngine:
    """Replaces `xpool._engine.engine.Engine` on a host; gives back tasks to retry."""

    def __init__(self, world: HostWorld, host: Host, workers: int) -> None:
        self.world, self.host = world, host
        self.sched = Scheduler(workers)
        self.results: deque[Any] = deque()
        self.failure = None
        self.functions: dict[int, Any] = {}
        self.learned = 0
        self.began = [0] * workers
        self.deaths = [0] * workers
        self.runs: list[Run | None] = [None] * workers
        self.wanted: list[list[tuple[int, range]]] = [[] for _ in range(workers)]
        self.unsaid = [0] * workers  # finished and not announced; one message will announce them
        self.gone = [False] * workers
        self.ending = self.stopped = False
        for w in range(workers):
            self._start(w)

    # -- what a session calls ----------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self.ending and all(self.gone)

    @property
    def cost(self) -> float:
        return self.sched.sizes.cost

    def submit(self, *ranges: TaskRange) -> None:
        if not self.ending:
            for one in ranges:
                self.sched.put(one)
            self._give()

    def put_direct(self, number: int, payload: Any, bound: int | None, terms: Terms) -> Any:
        self.submit(TaskRange(CALLS, 0, number, (payload,), bound, terms))
        # Any object stands for the worker.
        return self if self.world.draw.agents.chance(0.5) else None

    def learn(self, mode: int, payload: Any) -> int:
        self.learned += 1
        self.functions[self.learned] = payload
        return self.learned

    def forget(self, func: int) -> None:
        del self.functions[func]

    def withdraw(self, job: int, index: int | None = None) -> None:
        for w in self.sched.withdraw(job, index):
            run, found = self.runs[w], self.sched.running(w, self.began[w])
            if run is not None and found is not None and found[0].withdrawn:
                self.world.later(self.world.draw.agents.up_to(0.1), self._stop, w, run)
        self._give()

    def give_back(self, job: int, items: range) -> None:
        for one in reversed(self.sched.take_out(job, items)):
            self.results.append((*name_of(job, one.first), (None, one)))
            self.host.news()
        for w, began in enumerate(self.began):
            if any(one.job == job and one.first in items for one in self.sched.in_flight[w].held):
                self.wanted[w].append((job, items))
                self.world.later(LOOK, self._look, w, began)

    def _look(self, w: int, began: int) -> None:
        """Give back a worker's unbegun tasks if it made no progress."""
        if not self.host.alive or self.ending:
            return
        if not self.sched.surplus(w, self.began[w]):
            self.wanted[w].clear()
        elif began != self.began[w]:
            self.world.later(LOOK, self._look, w, self.began[w])
        elif self.wanted[w]:
            self._take_back(w)

    def sat_on(self, permitted: Container[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the workers with permitted unbegun tasks that others could run, and how many tasks
        each has begun."""
        return [
            (w, self.began[w])
            for w, run in enumerate(self.runs)
            if run is not None and self.sched.surplus(w, self.began[w])
            for one in self.sched.in_flight[w].held
            if one.bound is None and not one.withdrawn and one.seq + one.taken > self.began[w]
            and one.name(one.first + one.taken - 1) in permitted
        ]  # fmt: skip

    def retire_all(self) -> None:
        self.ending = True
        for w in range(len(self.gone)):
            self.sched.retire(w)
            self._go_on(w)

    def terminate(self) -> None:
        self.ending = self.stopped = True
        self.unsaid = [0] * len(self.gone)
        self.sched.clear()
        for w, run in enumerate(self.runs):
            draw = self.world.draw.agents
            takes = draw.one_of([STOP_GRACE, draw.up_to(STOP_GRACE)])
            self.world.later(takes, self._stop, w, run)

    def statistics(self) -> dict[str, Any]:
        return {"deaths": 0, "ready": len(self.gone), "running": 0}

    def kill(self) -> None:
        """Kill the host and all that runs there."""
        for w, run in enumerate(self.runs):
            if run is not None:
                self.world.ends(self.host, run.task)
                self.runs[w] = None
        self.ending = self.stopped = True

    # -- workers -----------------------------------------------------------------------------------

    def _start(self, w: int) -> None:
        self.world.later(self.world.draw.agents.up_to(0.05), self._ready, w)

    def _ready(self, w: int) -> None:
        if not self.host.alive:
            return
        if not self.ending:
            self.sched.ready(w, None)
            self._give()
        self._go_on(w)

    def _give(self) -> None:
        for w, _ in self.sched.next_batches():
            self._go_on(w)
        if self.sched.idle:
            for w, began in enumerate(self.began):
                if self.sched.surplus(w, began):
                    self.world.later(LOOK, self._recall, w)

    def _recall(self, w: int) -> None:
        """Give others the tasks that a worker has not begun."""
        if not self.host.alive or self.ending:
            return
        if self.sched.idle and self.sched.surplus(w, self.began[w]):
            self._take_back(w)

    def _take_back(self, w: int) -> None:
        """Forbid a worker to begin its tasks in hand, because some are wanted elsewhere."""
        if self.sched.in_flight[w].paused:
            return
        self.sched.pause(w)
        self.sched.take_back(w, self.began[w])
        self._give()
        wanted, self.wanted[w] = self.wanted[w], []
        for job, items in wanted:
            self.give_back(job, items)
        self._go_on(w)

    def _go_on(self, w: int) -> None:
        """Let a free worker begin its next task, or end if it was told to."""
        held = self.sched.in_flight[w].held
        while self.runs[w] is None:
            batch = next((b for b in held if b.seq + len(b.items) > self.began[w]), None)
            if batch is None:
                self._say(w)
                if not held and self.sched.in_flight[w].paused:
                    self.sched.resume(w)
                    self._give()
                if not held and self.ending and not self.gone[w]:
                    self.gone[w] = True
                    self.host.news()
                return
            position = self.began[w] - batch.seq
            self.began[w] += 1
            if batch.withdrawn or position >= batch.taken:
                self._say(w)
                self.sched.skipped(w, 1)
                self._refill(w)
            else:
                function = self.functions.get(batch.func) if batch.func else None
                run = self.world.begins(self.host, w, batch, position, function)
                self.runs[w] = run
                self.world.later(run.takes, self._finish, w, run)

    def _refill(self, w: int) -> None:
        if not self.ending:
            self.sched.refill(w)

    def _finish(self, w: int, run: Run) -> None:
        """A worker finishes a task, or dies in it."""
        if self.runs[w] is not run:
            return
        if self.stopped:
            self._stop(w, run)
            return
        if run.ends_in == "death":
            self._die(w)
            return
        self.world.ends(self.host, run.task)
        self.runs[w] = None
        found = self.sched.running(w, self.began[w])
        assert found is not None
        batch, position = found
        last = position + 1 == len(batch.items)
        if run.ends_in == "value" and not last and self.world.draw.agents.chance(0.5):
            self.unsaid[w] += 1
            # The real engine finds answers in the outbox (`EngineWorld` checks this).
            self.world.later(self.world.draw.agents.up_to(0.1), self._find, w)
        else:
            self.unsaid[w] += run.ends_in == "value"
            self._say(w)
            if run.ends_in != "value":
                batch, index = self.sched.answered(w, 1, run.takes)
                again = run.ends_in == "error" and batch.terms.retries > 0
                self._result(batch, index, None if again else False, again)
        self._refill(w)
        self._go_on(w)
        self._give()

    def _result(self, batch: Batch, index: int, ok: bool | None, value: Any) -> None:
        if not batch.withdrawn or self.world.draw.agents.chance(0.5):
            name = batch.name(index)
            self.results.append((*name, (ok, False if ok is None else value)))
            self.host.news()

    def _say(self, w: int) -> None:
        """Announce a worker's finished tasks, one result for each batch."""
        while self.unsaid[w]:
            batch = self.sched.in_flight[w].held[0]
            n = min(self.unsaid[w], len(batch.items) - batch.done)
            self.unsaid[w] -= n
            batch, first = self.sched.answered(w, n, 1e-3 * n)
            if batch.withdrawn:
                continue
            if batch.job == CALLS:
                found = [((i, 0), [(i, 0)]) for i in range(first, first + n)]
            else:
                found = [((batch.job, first), [(batch.job, i) for i in range(first, first + n)])]
            for name, tasks in found:
                self.results.append((*name, (True, Value(tasks, self.host.number))))
            self.host.news()

    def _find(self, w: int) -> None:
        if self.host.alive and self.unsaid[w]:
            self.world.outbox_read(self.host)
            self._say(w)
            self._refill(w)
            self._go_on(w)
            self._give()

    def _die(self, w: int) -> None:
        run = self.runs[w]
        if run is not None:
            self.world.ends(self.host, run.task)
            self.runs[w] = None
        self._say(w)
        lost = self.sched.gone(w, self.began[w])
        self.began[w] = 0
        self.deaths[w] += 1
        if lost is not None and not lost[0].withdrawn:
            batch, position = lost
            name = batch.name(batch.first + position)
            killed = batch.terms.killed + 1
            if batch.terms.retries > 0 and killed < CULPRIT and not self.ending:
                self.results.append((*name, (None, True)))
            else:
                error = WorkerDied(1, -9, w, "", killed)
                self.results.append((*name, (False, error)))
            self.host.news()
        if self.ending:
            self.gone[w] = True
            self.host.news()
        else:
            self._start(w)
            self._give()

    def _stop(self, w: int, run: Run | None) -> None:
        """Interrupt a worker's task, or end the worker."""
        if not self.host.alive or self.runs[w] is not run:
            return
        if run is not None:
            self.world.ends(self.host, run.task)
            self.runs[w] = None
        if self.stopped:
            self.gone[w] = True
            self.host.news()
            return
        self._say(w)
        self.sched.answered(w, 1)
        self._refill(w)
        self._go_on(w)
        self._give()


class Host:
    """A host with an agent: like `xpool._hosts.agent.Agent`, without threads."""

    def __init__(self, world: HostWorld, number: int, workers: int) -> None:
        self.world, self.number, self.workers = world, number, workers
        self.name = f"host{number}"
        self.alive = True
        self.told_dead = False
        self.whole_at = 0.0  # until then no message arrives
        self.good_from = 0.0  # since then no message was lost
        # An idle worker while a task waits, and since when.
        self.starved: tuple[tuple[int, int, int], float] | None = None
        self.idle: tuple[tuple[int, int], float] | None = None  # an idle worker, and since when
        # Workers with unbegun tasks, with the number of begun ones, and since when.
        self.sat_on: dict[tuple[int, int], float] = {}
        self.rate = world.draw.clocks.one_of([1.0, 1 / 1.02, 1.02])
        self.offset = world.draw.clocks.up_to(1000)
        self.engine = AgentEngine(world, self, workers)
        self.session = AgentSession(self.engine, world.lease, self.clock())  # type: ignore[arg-type]
        self.over = False
        self._noticed = False
        self._waiting: list[tuple[int, Callable[..., None]]] = []  # calls without a reply
        self._said = float("inf")
        self._look_at_lease()

    def clock(self) -> float:
        """Return the host's own time: with an offset, and up to 2 % too fast or slow."""
        return self.offset + self.world.now * self.rate

    def _look_at_lease(self) -> None:
        left = self.session.until - self.clock()
        if not self.alive or self.engine.ended:
            return
        if left > 1e-9:
            self.world.later(left / self.rate, self._look_at_lease)
            return
        self.world.note(self.world.at, self.name, "has not heard of the driver for too long")
        world = self.world
        if world.now > self.good_from + world.lease + 5 and not (
            world.stalls or world.driver_is_dead or self.told_dead
        ):
            world.wrong(f"{self.name} ends although the driver could reach it")
        self.over = True
        self.engine.terminate()
        self.news()

    def trouble(self, until: float) -> None:
        """Record that messages may be lost until then; repeated messages arrive a little later."""
        self.good_from = max(self.good_from, until + PATIENCE + 3 * RETRY_SECONDS)

    # -- the driver's calls ------------------------------------------------------------------------

    def call(self, call: Call, reply: Callable[..., None]) -> None:
        """Handle a call; reply when there is news, or after a second."""
        if call.beat:
            self.session.called(call)
            reply(*self.session.reply_to_beat(call, self.clock()))
            return
        one = call.number, reply
        begun = self.session.called(call)
        # Below 0: the driver may not know yet that the host has staged it.
        staged = [batch for batch in self.session._staged if batch > 0]
        if self.session.retiring and staged and not self.world.early_close:
            self.world.wrong(f"{self.name} keeps {staged} at its end")
        if begun is None:
            self._waiting.append(one)
            self._wait(one)
        else:
            self._collect()
            self._reply()
            takes = self.world.draw.agents.up_to(self.world.pace, DIRECT_SECONDS)
            self.world.later(takes, self._end_turn, one)

    def _end_turn(self, one: tuple[int, Callable[..., None]]) -> None:
        """The call's thread now waits for any news, not only for its task's answer."""
        if self.alive:
            self.session.wait(one[0])
            self._waiting.insert(0, one)
            self._wait(one)

    def _wait(self, one: tuple[int, Callable[..., None]]) -> None:
        self._collect()
        self._reply()
        if one in self._waiting:
            self.world.later(PATIENCE, self._nothing, one)

    def _reply(self) -> None:
        while self._waiting and self.session.may_reply(self._waiting[0][0]):
            self._send(self._waiting[0])

    def _nothing(self, one: tuple[int, Callable[..., None]]) -> None:
        if self.alive and one in self._waiting:
            self._send(one)

    def _send(self, one: tuple[int, Callable[..., None]]) -> None:
        self._waiting.remove(one)
        number, reply = one
        reply(*self.session.reply(number, self.clock(), REPLY_BYTES))

    # -- its own turn ------------------------------------------------------------------------------

    def news(self) -> None:
        """The engine has news; take it after a moment."""
        if not self._noticed:
            self._noticed = True
            self.world.later(self.world.draw.agents.up_to(self.world.pace), self._take)

    def _take(self) -> None:
        """Send the engine's answers."""
        self._noticed = False
        if not self.alive:
            return
        self._collect()
        self._reply()
        if self.over and self.engine.ended:
            lingers = self.world.draw.agents.up_to(self.world.pace, 3.0)
            self.world.later(lingers, self.world.dies, self)

    def _collect(self) -> None:
        if self.session.collect() and self.engine.cost != self._said:
            self._said = self.engine.cost
            self.session.say(m.Status(self._said, self.engine.statistics()))

    def holds_bound(self) -> bool:
        """Whether a worker holds a bound task; the engine takes nothing back from that worker."""
        in_flight = self.engine.sched.in_flight
        return any(one.bound is not None for its in in_flight for one in its.held)

    def longest_idle(self) -> tuple[int, int, int] | None:
        """Return the worker that is idle for longest, its deaths and its begun tasks."""
        sched = self.engine.sched
        if not self.alive or sched.queued or not sched.idle:
            return None
        w = next(iter(sched.idle))
        return w, self.engine.deaths[w], self.engine.began[w]
