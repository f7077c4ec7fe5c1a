"""The engine in a world of virtual workers, pipes and time.

The engine's thread, callers, workers and accidents take turns in an order that the seed decides.
A turn may end wherever a real one could: while the engine's thread waits, between two system
calls of a worker, between two stores to a shared page. The world knows the right outcome of each
task. If nothing more can happen and an answer is missing, the engine hangs, which is found at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from xpool._engine.answers import EngineOptions
from xpool._engine.engine import Engine, System
from xpool._engine.jobs.ranges import name_of
from xpool._engine.jobs.scheduler import CALLS, Batch, Limit, TaskRange, Terms
from xpool._engine.jobs.states import START_ATTEMPTS, WorkerStates
from xpool._engine.ledger import WorkerEnd
from xpool._engine.monitor import STOP_GRACE_SECONDS
from xpool._engine.worker_process import Recipe
from xpool._wire.outbox import entries
from xpool.errors import OptionError, TaskTimeout, WorkerDied, WorkerStartFailed

from .seeds import Passing, Reader, World
from .virtual import SEEN_WITHIN, Kernel, Page, Pipe, SimReactor, SimWorker
from .worker import Handle, Worker

__all__ = ["EngineWorld"]

Task = tuple[int, int]
"""Job and index."""

PATIENCE = 0.1
"""Seconds within which an answer must be delivered and surplus tasks shared out."""

STOP = 0.05
"""Seconds for which an accident stops a worker."""

SYSTEM_PAUSE = 0.1
"""Minimum seconds before a start that the system refused is tried again."""

MOST_TURNS = 20_000

LARGEST_PID = 1 << 22
"""The kernel gives no process a larger one (`PID_MAX_LIMIT`)."""

MOST_WORKERS = 4

REASONS = {"died", "stopped", "start failed", "recycled", "resized", "closed", "terminated"}


def no_thread(call: Callable[[], object], name: str) -> bool:
    """Refuse a thread, so that the engine's own turn starts processes."""
    return False


_NEED = 100
"""Bytes that a heavy task needs."""


class _Peaks(dict[str, int]):
    """The memory that each function was seen to take."""

    def get(self, name: str, default: Any = None) -> int:
        return _NEED


class _Plan:
    """The outcome of one run of a task."""

    __slots__ = ("again", "answer", "code", "error", "rings", "takes", "task")

    def __init__(self, task: Task, takes: float, answer: bytes, error: bool) -> None:
        self.task, self.takes, self.answer, self.error = task, takes, answer, error
        self.again = False  # whether the answer is an error after which the task is retried
        self.code: int | None = None
        self.rings = False


class _Known:
    """The world's knowledge of a task."""

    __slots__ = ("answers", "begun", "bound", "deadly", "died", "died_at_door", "error",
                 "failed", "fails", "finished", "large", "longest", "over", "retries",
                 "takes")  # fmt: skip

    def __init__(self) -> None:
        self.begun = 0
        self.died = 0  # runs in which its worker died
        self.over = 0  # runs that ended after the time limit
        self.died_at_door = 0  # deaths of its worker just before it began
        self.answers = 0
        self.fails = 0  # runs that end in an error with a retry
        self.failed = 0  # such runs so far
        self.finished: float | None = None  # when it finished, if it has no answer yet
        self.deadly = 0  # runs that end its worker
        self.retries = 0
        self.bound: int | None = None
        self.takes = 0.0
        self.longest = 0.0  # its longest run so far
        self.error = False
        self.large = 0


class _Room:
    """Whether a stream has room for results; without room, none of its tasks may begin."""

    def __init__(self, world: EngineWorld, job: int) -> None:
        self.world, self.job, self.is_there = world, job, True

    def may_run(self, first: int) -> bool:
        return self.is_there

    def change(self) -> None:
        """The consumer takes results, or stops taking them."""
        self.is_there = not self.is_there
        self.world.note(f"{self.world.now:.6f}", "room for job", self.job, self.is_there)
        if self.is_there:
            self.world.engine.resume()


class _Call:
    """A thread that receives its own answer (`await_answer`), and may be interrupted."""

    def __init__(
        self, world: EngineWorld, job: int, item: bytes, bound: int | None, terms: Terms
    ) -> None:
        self.world, self.job = world, job
        self.call = job, item, bound, terms
        self.slot: Any = None
        self.begun = False
        self.impatient = world.draw.callers.chance(0.3)

    def may_go_on(self) -> bool:
        if self.impatient and self.world.draw.callers.chance(0.05):
            return True
        return (
            not self.begun
            or bool(self.slot.poller.poll(0))
            or self.world.engine._direct.worker_of(self.job) is None
        )

    def go_on(self) -> None:
        """Do one turn of `Submission.await_answer`."""
        engine, job = self.world.engine, self.job
        if not self.begun:
            self.begun = True
            self.slot = engine._submission.put_direct(*self.call)
            if self.slot is not None:
                turns = engine._direct.turns
                turns[job] = turns[job][0], -job  # each caller is a separate thread
        elif self.slot is not None:
            events = self.slot.poller.poll(0)
            if not engine._submission.receive_direct(self.slot, job, events):
                self.slot = None
        if self.slot is not None and self.impatient and self.world.draw.callers.chance(0.5):
            engine._submission.let_go(job)
            self.slot = None
        if self.slot is None:
            self.world.calls.remove(self)
            self.world.deliver()


class _Getter:
    """A thread in `Submission.receive_call`, which receives the answer of an earlier call."""

    def __init__(self, world: EngineWorld, job: int) -> None:
        self.world, self.job = world, job
        self.slot: Any = None
        self.begun = False

    def may_go_on(self) -> bool:
        if not self.begun:
            # One of many comes late: the worker may by then have other tasks before the call.
            return self.world.draw.getters.chance(0.3 if self.world.most_getters < 40 else 0.03)
        events = bool(self.slot.poller.poll(0))
        return events or self.world.draw.getters.chance(0.05)

    def go_on(self) -> None:
        engine, job = self.world.engine, self.job
        if not self.begun:
            self.begun = True
            self.slot = engine._monitor.take_over(job)
            if self.slot is not None:
                turns = engine._direct.turns
                turns[job] = turns[job][0], -job
                return
        else:
            if engine._submission.receive_direct(self.slot, job, self.slot.poller.poll(0)):
                engine._submission.let_go(job)
        self.world.getters.remove(self)
        self.world.deliver()


class EngineWorld(World):
    """One engine, one to three workers, some of them siblings, a few jobs, and accidents."""

    name = "engine"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.now = 1000.0
        self.kernel = Kernel(self, cuts=self.draw.pipes.chance(0.5))
        self.pipe_size = self.draw.pipes.one_of([64, 300, 4096, 65536])
        self.box_size = self.draw.pipes.one_of([96, 160, 512])
        self.deaths = self.draw.faults.one_of([0.0, 0.0, 0.02, 0.1])
        self.deafness = self.draw.faults.one_of([0.0, 0.3])
        self.refusals = self.draw.starts.one_of([0.0, 0.0, 0.2])
        self.bad_starts = self.draw.starts.one_of([0.0, 0.0, 0.15, 0.6])
        # Rare events: a worker stops just after it announced a task; the pool shrinks and grows
        # while a worker's start has failed.
        self.theme = self.draw.themes.one_of(["", "", "", "", "", "", "", "", "stopped", "places"])
        if self.theme:
            self.deaths = 0.3
        if self.theme == "places":
            self.refusals, self.bad_starts = 0.2, 0.3
        self.pace = self.draw.time.one_of([2e-6, 5e-5, 1e-3])
        self.violent_end = self.draw.ends.chance(0.25)
        self.rooms: list[_Room] = []
        n = self.draw.pool.one_of([1, 2, 2, 3])
        siblings = self.draw.pool.one_of([(), (), (), [[0, 1]], [range(n)]]) if n > 1 else ()
        # No real process has these: the engine reads processor times under /proc.
        self.pids = itertools.count(LARGEST_PID + 1)
        self.workers: list[Worker] = []
        self.reports: list[tuple[Handle, int | None]] = []  # deaths that are not reported yet
        self.untold: list[Handle] = []  # processes whose deaths the engine has not seen
        self.failed_starts = [0] * MOST_WORKERS  # of each worker, since it was last ready
        self.refused_at: dict[int, float] = {}  # refused starts that the engine must retry later
        # Whether the pool is told of each end of a worker (``on_worker_end=``): the calls that have
        # not returned, and the workers and pids of processes of whose end it is not told yet.
        self.hears = self.draw.worker_ends.chance(0.25)
        self.hooks: list[tuple[WorkerEnd, Callable[[], None]]] = []
        self.owed: list[tuple[int, int]] = []
        self.resizing = False
        self.launching = False  # others go on while a process is started
        self.resizes = 0.0 if siblings else self.draw.resizes.one_of([0.0, 0.0, 0.02, 0.1])
        if self.theme == "places" and not siblings:
            self.resizes = 0.2
        launcher: Any = None
        self.engine = Engine(
            n,
            Recipe(launcher, self.config, "world"),
            lambda job, index: f"task {index} of job {job}",
            EngineOptions(
                lifetime=None if siblings else self.draw.lifetimes.one_of([None, None, 1, 2, 7]),
                processes=siblings,
                on_end=self.on_end if self.hears else None,
            ),
            System(SimReactor(self), functools.partial(SimWorker, self), no_thread),
        )
        self.engine._monitor.answers._chance = self.draw.pauses.random
        self.spy()
        self.ranked = self.draw.priorities.chance(0.25)
        self.bounded = self.draw.rooms.chance(1 / 3)  # whether streams wait for room for results
        if self.draw.memory.chance(0.2):
            self.engine._monitor.guard.ran_out = self.ran_out  # type: ignore[method-assign]
        self.heavy = self.draw.heavy.chance(0.1)
        if self.heavy:
            self.deaths = self.deaths or 0.1
            self.engine.ledger.peaks = _Peaks()
        self.overtaken: list[tuple[int, int]] = []
        self.overtaken_since = self.now
        self.limits: dict[int, Limit] = {}  # of jobs with a limit
        self.known: dict[Task, _Known] = {}
        self.payloads: dict[Task, bytes] = {}
        self.unanswered: dict[Task, None] = {}
        self.funcs: dict[int, int] = {}  # of jobs with a function
        self.withdrawn: set[int] = set()
        self.stops: list[float] = []  # times at which workers were stopped
        self.open: dict[int, TaskRange] = {}
        self.to_feed: list[TaskRange] = []
        self.calls: list[_Call] = []
        # Callers that wait for a call made before: fewer than this number, of each call.
        self.most_getters = self.draw.getters.one_of([0, 0, 0, 0, 3, 40, 40])
        self.getters: list[_Getter] = []
        self.cancellable: list[int] = []  # calls, answered ones too
        self.jobs = 0
        self.spread = self.draw.time.one_of([0.0, 0.005, 0.05])
        self.next_job = self.now + self.spread
        self.jobs_wanted = 1 + self.draw.verbs.below(6)
        self.unshared: tuple[list[int], list[tuple[int, int]]] = [], []
        self.unshared_since = self.check_at = self.now
        self.over = False  # retired or terminated
        self.ended_violently = False
        self.turns = 0
        # Whether tasks are requested. Of requested batches in workers: the number of tasks that the
        # worker had begun, and the time.
        self.asks = self.draw.asks.chance(0.25)
        self.asked: list[tuple[Batch, int, int, float]] = []

    # -- the play --------------------------------------------------------------------------------

    def play(self) -> None:
        engine = self.engine
        engine.start_missing()
        while not engine.ended:
            engine.wait()
            self.deliver()
            if engine.failure is not None and not self.ended_violently:
                self.check_failure()
                self.terminate()
        self.deliver()
        self.tell_all()
        for job in [*(call.job for call in self.calls), *(one.job for one in self.getters)]:
            engine._submission.let_go(job)
        if self.left() and not self.ended_violently:
            self.wrong(f"the workers have ended without answers to {self.left()}")
        engine.close()
        if self.kernel.fds.open:
            self.wrong(f"descriptors are left open: {sorted(self.kernel.fds.open)}")
        alive = [w.index for w in self.workers if w.alive]
        if alive:
            self.wrong(f"workers are left alive: {alive}")
        if self.owed or self.hooks:
            self.wrong(f"the pool has ended, and was not told of {self.owed} {self.hooks}")

    def left(self) -> list[Task]:
        """Return the tasks that still need an answer."""
        return [task for task in self.unanswered if task[0] not in self.withdrawn]

    def others_until(
        self, ready: Callable[[], list[Any]], timeout: float | None
    ) -> list[tuple[int, int]]:
        """Let others go on while the engine's thread waits; return its events."""
        deadline = None if timeout is None else self.now + timeout
        self.stop_if_wrong()
        self.check_idle()
        eager = self.draw.order.one_of([0.2, 0.6, 0.95])
        while True:
            self.turns += 1
            if self.turns > MOST_TURNS:
                self.wrong("the history does not end")
            found = ready()
            if found and self.draw.order.chance(eager):
                self.draw.order.shuffle(found)
                return found
            if deadline is not None and self.now >= deadline:
                return found
            acts = self.acts()
            if acts:
                self.pass_time(self.draw.time.up_to(self.pace))
                self.draw.order.one_of(acts)()
            elif found:
                return found
            else:
                self.wait_for_something(deadline)

    def acts(self) -> list[Callable[[], None]]:
        """Return the possible next events outside the engine's thread."""
        acts: list[Callable[[], None]] = [w.go_on for w in self.workers if w.may_go_on()]
        acts += [call.go_on for call in self.calls if call.may_go_on()]
        acts += [getter.go_on for getter in self.getters if getter.may_go_on()]
        if self.reports:
            acts.append(self.report)
        if not self.over:
            if self.jobs < self.jobs_wanted and self.now >= self.next_job:
                acts.append(self.submit)
            elif self.jobs >= self.jobs_wanted and not (self.open or self.calls or self.left()):
                acts.append(self.close)
            if self.open:
                acts.append(self.append)
            if self.to_feed:
                acts.append(self.feed)
            acts += [room.change for room in self.rooms if not room.is_there]
            if self.rooms and self.draw.rooms.chance(0.05):
                acts.append(self.draw.rooms.one_of(self.rooms).change)
            if acts and self.deaths and self.draw.faults.chance(self.deaths):
                acts.append(self.accident)
            if acts and self.resizes and self.draw.resizes.chance(self.resizes):
                acts.append(self.resize)
            if self.cancellable and self.draw.cancels.chance(0.01):
                acts.append(self.cancel)
            if self.asks and self.unanswered and not self.calls and self.draw.asks.chance(0.05):
                acts.append(self.ask)
            if self.heavy and self.engine.sched.heavy.needs and self.draw.heavy.chance(0.05):
                acts.append(self.measure)
            if self.violent_end and self.jobs > 1 and self.draw.ends.chance(0.02):
                acts.append(self.terminate)
        if self.hooks:
            acts.append(self.hook_returns)
        return acts

    def others_go_on(self) -> None:
        """Let others go on while a process is started."""
        if self.launching:
            return  # no start of a process within another
        self.launching = True
        resizing, self.resizing = self.resizing, False
        for _ in range(self.draw.order.one_of([0, 0, 1, 5])):
            acts = self.acts()
            if acts:
                self.pass_time(self.draw.time.up_to(self.pace))
                self.draw.order.one_of(acts)()
        self.launching, self.resizing = False, resizing

    def wait_for_something(self, deadline: float | None) -> None:
        """Nothing can go on now: advance the time."""
        times = [w.wakes_at for w in self.workers]
        times += [deadline, self.next_job]
        times += [entry[1] for page in self.kernel.pages for entry in page._pending]
        coming = [t for t in times if t is not None and t > self.now]
        if not coming:
            self.wrong(f"no event is left, and {self.left()} have no answer")
        self.pass_time(min(coming) - self.now)

    def pass_time(self, seconds: float) -> None:
        """Advance the time, and show what becomes visible."""
        self.now += seconds
        self.check_limits()
        for page in self.kernel.pages:
            page.tick(self.now)
        self.check_sharing()

    def spy(self) -> None:
        """Observe the scheduler's `take`."""
        shared: Any = self.engine.sched.shared
        take, passing = shared.take, Passing(self, shared)

        def taking(n: int, nbytes: int) -> Any:
            taken = shared._ranges[0]
            waits = [one for one in shared if one.items and one is not taken]
            for one in waits:
                may_run = one.may_run is None or one.may_run(one.first)
                if may_run and one.terms.priority > taken.terms.priority:
                    self.wrong(f"job {taken.job} is given before job {one.job}")
            of_stream = taken.flow is not None
            found = take(n, nbytes)
            if of_stream:
                passing.given(taken.terms.priority)
            return found

        shared.take = taking

    # -- callers ---------------------------------------------------------------------------------

    def submit(self) -> None:
        """Submit a call, a call that waits, a map, or the beginning of a stream."""
        kind = self.draw.verbs.one_of(
            ["calls", "wait", "wait", "map", "map", "map", "stream", "bound"]
        )
        n = self.draw.verbs.one_of([1, 3, 10, 40]) if kind in ("map", "stream") else 1
        retries = self.draw.retries.one_of([0, 0, 1, 2])
        takes = self.draw.tasks.one_of([1e-6, 5e-5, 1e-3, 0.02, 0.0, 0.0, 0.0])
        bound: int | None = None
        if kind == "bound":
            bound = self.draw.bound.one_of([-1, *range(self.engine.sched.size)])
        limit, draw = None, self.draw.limits
        if self.theme == "stopped" or draw.chance(0.25):
            limit = Limit(draw.one_of([0.01, 0.1]), draw.chance(0.5))
        for _ in range(self.draw.verbs.one_of([1, 1, 4, 25]) if kind == "calls" else 1):
            self.jobs += 1
            self.submit_one(kind, n, retries, takes, bound, limit)
        self.next_job = self.now + self.draw.time.up_to(self.spread)

    def submit_one(
        self, kind: str, n: int, retries: int, takes: float, bound: int | None, limit: Limit | None
    ) -> None:
        """Submit a job."""
        job = self.jobs
        func = self.engine.learn(1, b"function") if kind in ("map", "stream") else 0
        self.funcs[job] = func
        items = [self.new_task(job, i, retries, takes, bound) for i in range(n)]
        if limit is not None:
            self.limits[job] = limit
        self.note(f"{self.now:.6f}", kind, "job", job, "of", n, "tasks of", takes, "s,", retries,
                  "retries, bound to", bound, "limit", limit)  # fmt: skip
        terms = Terms(retries, limit, priority=self.priority(job))
        if func:
            task_range = TaskRange(job, func, 0, items, bound, terms)
            if kind == "stream" and self.bounded:
                self.rooms.append(_Room(self, job))
                task_range.may_run = self.rooms[-1].may_run
            self.engine.submit(task_range)
            if kind == "stream":
                self.open[job] = task_range
                task_range.flow = Reader()
            return
        self.cancellable.append(job)
        if kind == "wait":
            self.calls.append(_Call(self, job, items[0], bound, terms))
        elif kind == "bound":
            self.engine.submit(TaskRange(CALLS, 0, job, items, bound, terms))
        else:
            self.engine.submit_call(job, items[0], terms)
        if self.most_getters and kind != "wait":
            gets = self.draw.getters.below(self.most_getters)
            self.getters += [_Getter(self, job) for _ in range(gets)]

    def priority(self, job: int) -> float:
        """Return the priority of a job; that of several consecutive ones is the same."""
        return (0, 2, -1, 0.5)[job // 3 * 7 % 4] if self.ranked else 0

    def new_task(
        self, job: int, index: int, retries: int, takes: float, bound: int | None
    ) -> bytes:
        """Decide a task's outcome; return its payload."""
        task = self.known[job, index] = _Known()
        self.unanswered[job, index] = None
        task.retries, task.bound = retries, bound
        draw = self.draw.tasks
        takes = takes or draw.one_of([1e-6, 1e-6, 5e-4, 5e-3])
        task.takes = takes * (0.5 + draw.random())
        long = 0.15 if self.ranked else 0.04  # other tasks are to wait behind it
        if draw.chance(long) or (self.ranked and index == 0 and job % 3 == 1):
            task.takes = 0.3
        if self.deaths and self.draw.faults.chance(0.06):
            task.deadly = 1 + self.draw.faults.below(3)
        task.error = draw.chance(0.1)
        if draw.chance(0.1):
            task.fails = 1 + draw.below(3)
        task.large = self.draw.payloads.one_of([0, 0, 0, 0, 0, 60, 300])
        huge = self.pipe_size >= 4096 and self.draw.payloads.chance(0.003)
        padding = 70_000 if huge else self.draw.payloads.one_of([0, 0, 0, 40, 400])
        payload = self.payloads[job, index] = b"%d.%d." % (job, index) + bytes(padding)
        return payload

    def append(self) -> None:
        """The input reader of a stream draws more items, or reaches the end."""
        job = self.draw.streams.one_of(list(self.open))
        task_range = self.open[job]
        index = 1 + max(i for j, i in self.known if j == job)
        if index > 30 or self.draw.streams.chance(0.3):
            del self.open[job]
            return
        for _ in range(1 + self.draw.streams.below(3)):
            task_range.items.append(self.new_task(job, index, task_range.terms.retries, 1e-4, None))
            index += 1
            if not task_range.queued or self.engine.sched.idle:
                # The input reader has decided to call `feed`; others may act before it does.
                self.to_feed.append(task_range)

    def feed(self) -> None:
        """An input reader calls `feed`, as it decided earlier."""
        self.engine.feed(self.to_feed.pop(self.draw.streams.below(len(self.to_feed))))

    def cancel(self) -> None:
        """Cancel a call in any state, or its result before it arrives."""
        job = self.draw.cancels.one_of(self.cancellable)
        self.cancellable.remove(job)
        waiting = [call for call in self.calls if call.job == job and not call.begun]
        if (job, 0) in self.unanswered and not waiting:
            self.note(f"{self.now:.6f}", "cancel call", job)
            self.withdrawn.add(job)
            self.engine.withdraw(CALLS, job)

    def ask(self) -> None:
        """The client of the engine requests the unbegun tasks of a job or of all calls."""
        job = self.draw.asks.one_of(list(self.unanswered))[0]
        if job in self.open:
            return
        job = job if self.funcs[job] else CALLS
        self.note(f"{self.now:.6f}", "job", job, "is asked for")
        self.engine.give_back(job, range(1 << 40))
        for w, in_flight in enumerate(self.engine.sched.in_flight):
            began = self.engine.workers[w].box.began if in_flight.held else 0
            its = [batch for batch in in_flight.held if batch.job == job]
            self.asked += [(batch, w, began, self.now) for batch in its]

    def handed_back(self, job: int, index: int, payload: Any) -> None:
        """A task is given back; the engine gets it again and must run it."""
        task = self.known[job, index]
        self.note(f"{self.now:.6f}", "task", index, "of job", job, "is given back")
        if (job, index) not in self.unanswered or job in self.withdrawn or self.ended_violently:
            return
        if task.begun > task.died + task.over + task.failed:
            self.wrong(f"task {index} of job {job} is given back, and is run")
        if payload != self.payloads[job, index]:
            self.wrong(f"task {index} of job {job} is given back as {payload!r}")
        number, first = (job, index) if self.funcs[job] else (CALLS, job)
        left = max(0, task.retries - task.begun - task.died_at_door)
        limit = self.limits.get(job)
        self.engine.submit(
            TaskRange(
                number, self.funcs[job], first, [payload], None,
                Terms(left, limit, priority=self.priority(job)),
            )
        )  # fmt: skip

    def check_asked(self) -> None:
        """No worker keeps tasks that were requested."""
        sched, direct = self.engine.sched, self.engine._direct
        left = []
        alive = {worker.index for worker in self.workers}
        for batch, w, began, since in self.asked:
            in_flight, slot = sched.in_flight[w], self.engine.workers[w]
            if batch not in in_flight.held or slot.handle is None or in_flight.paused:
                continue
            free = slot.state is WorkerStates.READY and slot not in direct
            # What a dead worker holds is handed back when the engine learns of the death.
            if slot.box.began != began or not free or w not in alive:
                began, since = slot.box.began, self.now
            wanted = not batch.withdrawn and batch.seq + batch.taken > began
            if wanted and sched.surplus(w, began):
                left.append((batch, w, began, since))
                if self.now - since > PATIENCE:
                    self.wrong(f"worker {w} keeps requested tasks of job {batch.job}")
        self.asked = left

    def resize(self) -> None:
        """Change the number of workers."""
        size = 1 + self.draw.resizes.below(MOST_WORKERS)
        self.note(f"{self.now:.6f}", "resize to", size)
        bound = any(task.bound is not None for task in map(self.known.get, self.unanswered) if task)
        nested, self.resizing = self.resizing, True
        try:
            self.engine.resize(size)
        except OptionError:
            if not bound:
                self.wrong("resize fails although no task is bound")
        except OSError:
            self.note("a worker is refused")
        finally:
            self.resizing = nested

    def close(self) -> None:
        """Close the pool when all tasks are answered."""
        self.note(f"{self.now:.6f}", "close")
        self.over = True
        self.engine.retire_all()

    def terminate(self) -> None:
        """Terminate the pool: from now on only its end counts."""
        self.note(f"{self.now:.6f}", "terminate")
        self.over = self.ended_violently = True
        self.open.clear()
        self.engine.terminate()

    def deliver(self) -> None:
        """Take and check the results, as the pool does."""
        results = self.engine.results
        while results:
            job, index, (ok, value) = results.popleft()
            if ok is None:
                for position, payload in enumerate(value.items):
                    self.handed_back(*name_of(value.job, value.first + position), payload)
                continue
            if isinstance(value, WorkerDied):
                self.check_death(job, index, value)
                self.answered(job, index, "lost")
                continue
            if isinstance(value, TaskTimeout):
                self.check_timeout(job, index)
                self.answered(job, index, "over its time")
                continue
            if not hasattr(value, "_run"):
                self.wrong(f"task {index} of job {job} is answered with {value!r}")
            data = bytes(value._data)
            found = entries(data) if value._run else [(not ok, data)]
            if len(found) != value.count:
                self.wrong(f"{len(found)} answers count as {value.count}")
            for i, (error, payload) in enumerate(found, index):
                if payload.split(b".")[:2] != [b"%d" % job, b"%d" % i]:
                    self.wrong(f"task {i} of job {job} is answered with {payload[:40]!r}")
                task = self.known[job, i]
                if error != (task.error or task.begun <= task.fails):
                    self.wrong(f"the error of task {i} of job {job} counts as a value")
                if task.begun <= task.fails and task.begun + task.died_at_door <= task.retries:
                    self.wrong(f"task {i} of job {job} has failed, and has a retry left")
                self.answered(job, i, "an error" if error else "done")

    def answered(self, job: int, index: int, how: str) -> None:
        """Record the only answer of a task."""
        task = self.known[job, index]
        self.note(f"{self.now:.6f}", "task", index, "of job", job, "is", how)
        task.answers += 1
        task.finished = None
        if task.answers > 1:
            self.wrong(f"task {index} of job {job} is answered twice")
        del self.unanswered[job, index]
        if self.draw.cancels.chance(0.02) and not self.over:
            # One failure may make the whole job useless to its caller.
            self.note("withdraw job", job)
            self.withdrawn.add(job)
            self.open.pop(job, None)
            self.engine.withdraw(*((job,) if self.funcs[job] else (CALLS, job)))
        if self.funcs[job] and job not in self.open and all(t[0] != job for t in self.unanswered):
            self.engine.forget(self.funcs[job])

    # -- workers ---------------------------------------------------------------------------------

    def next_pid(self) -> int:
        return next(self.pids)

    def decides(self, index: int) -> None:
        """The engine has decided to start a process."""
        if index >= self.engine.sched.size:
            self.wrong(f"worker {index} is started in a pool of {self.engine.sched.size}")
        if self.over or self.engine.failure is not None:
            self.wrong(f"worker {index} is started although the pool ends")

    def spawn(
        self, slot: Any, tasks: Pipe, answers: Pipe, page: Page, siblings: list[Worker]
    ) -> Handle:
        """Start a worker in a slot, beside its siblings."""
        if any(one.index == slot.index for one in self.workers):
            self.wrong(f"worker {slot.index} is started beside its living predecessor")
        worker = Worker(self, slot, tasks, answers, page, siblings)
        self.workers.append(worker)
        if self.hears:
            if slot.index in [end.worker for end, _ in self.hooks] + [one for one, _ in self.owed]:
                self.wrong(f"worker {slot.index} is started before the hook has returned")
            self.owed.append((slot.index, worker.pid))
        self.note(f"{self.now:.6f}", "worker", slot.index, "starts as", worker.pid)
        if len(siblings) == 1:
            worker.handle.news.data += b"p"
        return worker.handle

    def config(self, index: int, generation: int, attachment: int | None) -> bytes:
        """Return the first message to a worker's process."""
        return b"%d.%d" % (index, generation)

    def refuses(self, index: int) -> bool:
        """Whether the system refuses a new process now."""
        if self.now < self.refused_at.pop(index, 0.0) + SYSTEM_PAUSE:
            self.wrong(f"the refused start of worker {index} is tried again at once")
        refused = self.draw.starts.chance(self.refusals)
        if refused and not self.resizing and index < self.engine.sched.size:
            self.refused_at[index] = self.now
            self.failed_starts[index] += 1
        return refused

    def start_takes(self) -> float:
        """Return the seconds that a worker takes to import and initialize."""
        return self.draw.starts.up_to(0.02)

    def fails_to_start(self) -> bool:
        return self.draw.starts.chance(self.bad_starts)

    def task_of(self, payload: bytes) -> Task:
        job, index, _ = payload.split(b".", 2)
        return int(job), int(index)

    def begins(self, worker: Worker, payload: bytes, has_function: bool) -> _Plan:
        """A worker begins a task; return its outcome."""
        job, index = self.task_of(payload)
        task = self.known[job, index]
        self.note(f"{self.now:.6f}", "worker", worker.index, "begins task", index, "of job", job)
        if task.answers and not self.ended_violently:
            self.wrong(f"task {index} of job {job} is run again after its answer")
        if task.begun > task.died + task.over + task.failed:
            self.wrong(f"task {index} of job {job} is run by two workers")
        if task.begun > task.retries:
            self.wrong(f"task {index} of job {job} is run {task.begun + 1} times")
        if task.bound is not None and task.bound not in (-1, worker.index):
            self.wrong(f"task {index} of job {job} is bound to {task.bound}, not {worker.index}")
        if not has_function and self.unanswered.keys() & {(job, index)}:
            self.wrong(f"worker {worker.index} does not have the function of job {job}")
        task.begun += 1
        lifetime = self.engine._monitor.lifetime
        worker.started.append((job, index))
        if lifetime is not None and len(worker.started) > lifetime:
            self.wrong(f"worker {worker.index} runs more than {lifetime} tasks in its life")
        answer = b"%d.%d." % (job, index) + bytes(task.large)
        plan = _Plan((job, index), task.takes, answer, task.error)
        if task.begun <= task.fails:
            plan.error = plan.again = True
        if task.begun <= task.deadly:
            plan.rings = self.draw.faults.chance(0.3)
            plan.code = 3 if plan.rings else self.draw.faults.one_of([-9, -11, 0])
        return plan

    def finishes(self, plan: _Plan, came_at: float) -> None:
        """A worker has finished a task, announced at this time, and sends the answer."""
        task = plan.task
        known, limit = self.known[task], self.limits.get(task[0])
        # The parent may see later that it no longer runs.
        known.longest = max(known.longest, self.now + SEEN_WITHIN - came_at)
        if limit is not None and known.longest >= limit.seconds:
            known.over += 1  # the parent may have interrupted it, and then discards the answer
        elif plan.again:
            known.failed += 1
        else:
            known.finished = self.now

    def accident(self) -> None:
        """Kill a worker, stop it for a while, or end the fork server."""
        stopped = self.theme == "stopped"
        among = [one for one in self.workers if one.at_door or not stopped]
        if not among:
            return
        worker = self.draw.faults.one_of(among)
        how = 1 if stopped else self.draw.faults.below(8)
        if how == 0:
            self.note(f"{self.now:.6f}", "the server of worker", worker.index, "has ended")
            worker.handle.has_server = False
        elif how < 3:
            self.note(f"{self.now:.6f}", "worker", worker.index, "is stopped for a while")
            if not callable(worker._when):
                worker._when = max(worker.wakes_at or 0.0, self.now + STOP)
                self.stops.append(self.now)
        else:
            self.note(f"{self.now:.6f}", "worker", worker.index, "is killed")
            worker.doomed = -9

    def ended(self, worker: Worker, code: int) -> None:
        """A process has ended; the report comes later, or never if the fork server has ended."""
        self.note(f"{self.now:.6f}", "worker", worker.index, "ends with", code)
        self.workers.remove(worker)
        self.failed_starts[worker.index] += not worker.greeted
        if worker.at_work is not None:
            self.known[worker.at_work].died += 1
        elif worker.at_door is not None:
            self.known[worker.at_door].died_at_door += 1
        elif worker.unsafe is not None:
            task = self.known[worker.unsafe]
            task.died += 1
            task.finished = None

    def on_end(self, end: WorkerEnd, told: Callable[[], None]) -> None:
        """The engine tells the pool of an end, without its lock."""
        self.note(f"{self.now:.6f}", "told of", end)
        if self.engine.lock._is_owned():
            self.wrong("the engine calls the hook with its lock held")
        if end.reason not in REASONS:
            self.wrong(f"worker {end.worker} has ended for no known reason: {end.reason}")
        if any(one.pid == end.pid and one.index == end.worker for one in self.workers):
            self.wrong(f"the pool is told of the end of process {end.pid}, which lives")
        if (end.worker, end.pid) not in self.owed:
            self.wrong(f"the pool is told twice, or of no process: {end}")
        self.owed.remove((end.worker, end.pid))
        self.hooks.append((end, told))

    def hook_returns(self) -> None:
        """A call of the hook returns."""
        end, told = self.hooks.pop(self.draw.worker_ends.below(len(self.hooks)))
        self.note(f"{self.now:.6f}", "the hook of worker", end.worker, "returns")
        told()

    def ran_out(self, ended: Iterable[Any], code: int | None) -> str:
        """Say that memory was short, for about half of the deaths."""
        pid = next(slot.pid for slot in ended)
        return "The kernel ended it." if code is not None and pid and pid % 2 else ""

    def measure(self) -> None:
        """Measure the memory, as the engine's guard does."""
        free = self.draw.heavy.one_of([0, 150, 150, 400])
        self.note(f"{self.now:.6f}", free, "bytes are free, and a heavy task needs", _NEED)
        self.engine.sched.measured(free, None, {})
        self.engine._monitor.give_idle()

    def report(self) -> None:
        """Report a death to the parent."""
        handle, code = self.reports.pop(self.draw.reports.below(len(self.reports)))
        if handle.news.writing:
            handle._worker.reported = code if handle.has_server else None
            handle.news.writing = False
        self.untold.append(handle)  # until the engine has seen it

    def tell_all(self) -> None:
        """Drop all reports, because no receiver is left."""
        self.reports.clear()

    # -- what must hold --------------------------------------------------------------------------

    def check_death(self, job: int, index: int, error: WorkerDied) -> None:
        """A task may be lost only if its worker died in it and no retry is left."""
        task = self.known[job, index]
        died = task.died + task.died_at_door
        if not died:
            self.wrong(f"task {index} of job {job} is lost, and no worker died in it")
        tries = died + task.over + task.failed
        if "It ran alone" in error.beside:
            if died < 2:
                self.wrong(f"task {index} of job {job} ran alone at first")
            return
        if tries <= task.retries and not (self.over or self.engine.failure):
            self.wrong(f"task {index} of job {job} is lost, and has a retry left")

    def check_timeout(self, job: int, index: int) -> None:
        """A task may time out only if it has a limit and no retry is left for it."""
        task, limit = self.known[job, index], self.limits.get(job)
        if limit is None:
            self.wrong(f"task {index} of job {job} times out without a limit")
        if task.longest < limit.seconds:
            self.wrong(f"task {index} of job {job} times out after {task.longest} s")
        tried = task.begun + task.died_at_door
        if limit.again and tried <= task.retries and not (self.over or self.engine.failure):
            self.wrong(f"task {index} of job {job} times out with a retry left")

    def check_limits(self) -> None:
        """A task beyond its limit is interrupted; if it still runs 0.1 s later, its worker is
        killed."""
        # For the parent, a worker runs until its end is reported, or found out later.
        handles = [slot.handle for slot in self.engine.workers]
        self.untold = [handle for handle in self.untold if handle in handles]
        ended = [*(handle for handle, _ in self.reports), *self.untold]
        unreported = [one for handle in ended for one in handle._worker.siblings]
        for worker in [*self.workers, *unreported]:
            which = worker.at_work or worker.at_door or worker.unsent
            if which is None:
                continue
            task, limit = self.known[which], self.limits.get(which[0])
            ran = self.now - (worker.began_at if worker.at_work else worker.came_at)
            # Count from the announcement: the parent may see it before the clock starts.
            task.longest = max(task.longest, self.now - worker.came_at)
            if limit is None or self.ended_violently:
                continue
            if which == worker.unsent and ran >= limit.seconds and task.finished is not None:
                # The answer is delayed for so long that the parent may interrupt the task.
                task.finished = None
                task.over += 1
            too_long = ran > limit.seconds + STOP_GRACE_SECONDS + 0.05
            if worker.at_work is not None and worker.alive and too_long:
                self.wrong(f"{which} runs for {ran} s, its limit is {limit.seconds}")

    def check_failure(self) -> None:
        """The pool may fail only if a worker failed several times in a row."""
        failure: Any = self.engine.failure
        self.note("the pool gives up:", failure)
        if not (self.bad_starts or self.refusals or self.deaths):
            self.wrong(f"the pool gives up without a reason: {failure}")
        error = getattr(failure, "error", failure)
        if isinstance(error, WorkerStartFailed):
            tries = self.failed_starts[error.worker]
            if tries < START_ATTEMPTS:
                self.wrong(f"the pool gives up on worker {error.worker} after {tries} starts")

    def check_idle(self) -> None:
        """When the engine's thread waits, no worker is idle while a task waits for any worker.

        No surplus worker serves.
        """
        sched = self.engine.sched
        for slot in self.engine.workers[sched.size :]:
            if slot.state.serves or slot.state is WorkerStates.STARTING:
                self.wrong(f"worker {slot.index} is {slot.state.name} in a pool of {sched.size}")
        fed = {task_range.job for task_range in (*self.open.values(), *self.to_feed)}
        # When there is room again, the engine's thread may not have looked yet.
        fed |= {room.job for room in self.rooms if not room.is_there or self.engine._resumed}
        waits = [
            task_range.job
            for task_range in (*sched.shared, *sched.alone)
            if task_range.items and task_range.job not in fed
        ]
        held = [batch for in_flight in sched.in_flight for batch in in_flight.held]
        if any(batch.terms.alone and batch.bound is None for batch in held) and held[1:]:
            self.wrong(f"{len(held)} batches are in flight beside one that is to run alone")
        if sched.alone in sched.queued and held:
            return
        # A heavy task that waits for memory holds up others, but not if none of its kind runs.
        needs = sched.heavy.needs
        if any(sched.heavy.name(batch) in needs for batch in held):
            first = next((one for one in sched.shared if one.items), None)
            if first is None or self.ranked or sched.heavy.name(first) in needs:
                return
        if waits and sched.idle and not (self.over or self.engine.failure):
            self.wrong(f"worker {next(iter(sched.idle))} is idle, and job {waits[0]} waits")

    def check_sharing(self) -> None:
        """No answer is delayed, and no worker holds unbegun tasks while another is idle."""
        if self.over or self.now < self.check_at:
            return
        self.check_at = self.now + PATIENCE / 8
        self.check_asked()
        sched, slots = self.engine.sched, self.engine.workers
        sits = [
            (w, slots[w].box.began)
            for w, in_flight in enumerate(sched.in_flight)
            if in_flight.held and not in_flight.paused and slots[w].handle is not None
            and sched.surplus(w, slots[w].box.began)
        ]  # fmt: skip
        idle = [w for w in sched.idle if slots[w].state is WorkerStates.READY]
        if (idle, sits) != self.unshared or not (idle and sits):
            self.unshared, self.unshared_since = (idle, sits), self.now
        elif self.now - self.unshared_since > PATIENCE:
            self.wrong(f"worker {idle[0]} is idle while {sits[0][0]} holds unbegun tasks")
        overtaken = [
            (w, slots[w].box.began)
            for w, in_flight in enumerate(sched.in_flight)
            if in_flight.held and not in_flight.paused and slots[w].handle is not None
            and slots[w].state is WorkerStates.READY and sched.overtaken(w, slots[w].box.began)
        ]  # fmt: skip
        if overtaken != self.overtaken or not overtaken:
            self.overtaken, self.overtaken_since = overtaken, self.now
        elif self.now - self.overtaken_since > PATIENCE:
            self.wrong(f"worker {overtaken[0][0]} keeps tasks while others go before them")
        # An interrupted worker may send its answers later, and earlier answers with them.
        asked = any(slot.interrupted is not None for slot in slots)
        patience = PATIENCE + (STOP_GRACE_SECONDS if asked else 0)
        for task in self.unanswered:
            finished = self.known[task].finished
            if finished is None or task[0] in self.withdrawn:
                continue
            # Each further stop of a worker delays its answer.
            stops = sum(since > finished for since in self.stops)
            if self.now - finished > patience + STOP * max(0, stops - 1):
                self.wrong(f"{task} was finished at {finished:.6f}, and is not answered")
