"""The scheduler alone, compared with a model that keeps tasks in plain lists.

Virtual workers act like real ones: they begin, finish, answer, skip forbidden tasks, and die at any
step. After the events the scheduler's state is compared with the model's.
"""

from __future__ import annotations

import math
from collections import deque

from xpool._engine.jobs.scheduler import (
    AHEAD_SECONDS,
    LONG_SECONDS,
    MOST_BYTES,
    MOST_ITEMS,
    PREFETCH_SECONDS,
    SHORT_SECONDS,
    Batch,
    Scheduler,
    TaskRange,
    Terms,
)

from .seeds import World

__all__ = ["SchedulerWorld"]

Task = tuple[int, int]
"""Job and index."""

Entry = tuple[TaskRange | None, list[Task]]
"""A task range of the model with its waiting tasks; None: a piece that was put back."""

FAR = 2**62

ALONE = -1
"""The queue of the model for tasks that run alone."""


class _Worker:
    """The state of a worker process, and the messages to it."""

    def __init__(self, lifetime: int | None) -> None:
        self.alive = True
        self.lifetime = lifetime
        self.given: list[tuple[Task, Batch]] = []  # every task that it was given, in order
        self.messages: list[int] = []  # the message of each of these tasks
        self.began = 0
        self.finished = 0  # how many of these are finished or skipped
        self.answered = 0  # how many of these the scheduler knows as answered
        self.skips: set[int] = set()  # positions in `given` that it skipped
        self.limit = FAR  # the limit that the worker sees
        self.told = FAR  # the limit that the parent has set
        self.taken = 0  # number of items taken back from it


class _Fed(deque[bytes]):
    """Items to which the input reader appends between the scheduler's check and its action."""

    def __init__(self, world: SchedulerWorld, items: list[bytes]) -> None:
        super().__init__(items)
        self.world = world
        self.task_range: TaskRange | None = None

    def __len__(self) -> int:
        n = super().__len__()
        if not n and self.task_range is not None and self.world.draw.streams.chance(0.3):
            self.world.append(self.task_range)
        return n


class SchedulerWorld(World):
    """One scheduler, one to four workers, up to six jobs."""

    name = "scheduler"

    def __init__(self, seed: int, events: int = 36) -> None:
        super().__init__(seed)
        self.events = events
        n = 1 + self.draw.pool.below(4)
        self.sched = Scheduler(n, lambda job, index: self.function(job))
        self.sched.sizes.cost = self.draw.pool.one_of(
            [float("inf"), 1e-6, 3e-5, 2e-4, 1e-3, 3e-3, 0.1]
        )
        self.lifetime = self.draw.pool.one_of([None, None, 1, 3, 8])
        self.workers = [_Worker(self.lifetime) for _ in range(n)]
        self.priorities = self.draw.priorities.one_of([[0], [0], [0, 1], [0, -0.5, 3, 10**30, 7]])
        self.ranks: dict[int, float] = {}  # priorities by job
        # The model: waiting tasks by queue and task range; None is the shared queue.
        self.queues: dict[int | None, list[Entry]] = {q: [] for q in (None, ALONE, *range(n))}
        self.lonely = self.draw.alone.one_of([0.0, 0.3, 0.8])  # how many of the lost ones run alone
        self.lone: set[Task] = set()  # those that run alone from now on
        self.before: set[Task] = set()  # bound ones that go before the first of these
        # Whether the functions of those are heavy afterwards.
        self.heavy = self.lonely > 0.0 and self.draw.heavy.chance(1 / 3)
        self.needs: dict[str, float] = {}  # by heavy function
        # By worker: the function, what it needed at the start, the most memory so far.
        self.latest: dict[int, tuple[str, float, float]] = {}
        self.free = self.limits = 0.0
        self.sizes: dict[int, int] = {}
        self.retries: dict[Task, int] = {}
        self.bound: dict[Task, int | None] = {}
        self.open: dict[
            int, tuple[TaskRange, list[Task]]
        ] = {}  # by job: an open stream and its model
        self.to_feed: list[
            tuple[TaskRange, list[Task]]
        ] = []  # streams whose input reader must call `put`
        self.later: list[tuple[int, int, Task]] = []  # (when, a number, task) of retries
        self.clock = 0
        self.withdrawn: set[int] = set()
        self.cancelled: set[Task] = set()  # single tasks of jobs that are still wanted
        self.ended: dict[Task, str] = {}
        self.jobs = 0

    def play(self) -> None:
        for w in range(len(self.workers)):
            if self.draw.pool.chance(0.8):
                self.sched.ready(w, self.lifetime)
            else:
                self.workers[w].alive = False
        kinds = [
            *([self.death, self.begin, self.answer] if self.lonely > 0.5 else []),
            *([self.weigh, self.answer, self.become_heavy] if self.heavy else []),
            self.submit, self.submit, self.feed, self.batches, self.batches,
            self.begin, self.finish, self.finish, self.answer, self.answer, self.answer,
            self.look, self.look, self.death, self.revive, self.withdraw, self.due,
            self.cancel,
        ]  # fmt: skip
        for i in range(self.events):
            self.draw.order.one_of(kinds)()
            self.tell()
            if i % 3 == 0:  # a wrong state stays wrong
                self.check()
        self.check()
        self.drain()
        self.check()

    # -- work comes in ---------------------------------------------------------------------------

    def submit(self) -> None:
        """Submit a call, a map, or a stream that is fed later; bound or not."""
        if self.jobs == 6:
            return
        self.jobs += 1
        job, n = self.jobs, self.draw.verbs.one_of([1, 1, 2, 5, 12])
        bound: int | None = None
        if self.draw.bound.chance(0.25):
            n = 1
            bound = self.sched.least_loaded()
            self.check_least(bound)
        retries = self.draw.retries.one_of([0, 0, 1, 2, 4] if self.lonely else [0, 0, 1, 2])
        tasks = [(job, i) for i in range(n)]
        for task in tasks:
            self.retries[task], self.bound[task] = retries, bound
        self.ranks[job] = priority = self.draw.priorities.one_of(self.priorities)
        task_range = TaskRange(job, 0, 0, (), bound, Terms(retries, priority=priority))
        task_range.items = items = _Fed(self, [self.payload(task) for task in tasks])
        self.note("submit", job, "of", n, "bound to", bound, "retries", retries,
                  "priority", priority)  # fmt: skip
        if n == 1 and bound is None and self.draw.verbs.chance(0.5):
            waits = any(tasks for queue in self.queues.values() for _, tasks in queue)
            waits = waits or self.lone_runs() or bool(self.needs)
            idle = list(self.sched.idle)
            if idle and not self.sched.queued:  # as in `Submission.put_direct`
                w = idle[-1]
                batch = self.sched.give(w, job, 0, 0, [items[0]], task_range.terms)
                if waits:
                    self.wrong(f"worker {w} is given {job}, while others wait")
                self.queues[None].append((None, tasks))
                self.given(w, batch)
                return
        self.sched.put(task_range)
        entry = (task_range, tasks)
        self.enter(bound, entry)
        if bound is None and self.draw.streams.chance(0.3):
            self.open[job] = entry
            items.task_range = task_range

    def payload(self, task: Task) -> bytes:
        """Return a task's payload: its name, sometimes with much padding."""
        name = b"%d.%d " % task
        return name + bytes(MOST_BYTES // 2) if (task[0] + task[1]) % 13 == 0 else name

    def append(self, task_range: TaskRange) -> None:
        """The input reader of a stream draws an item, and checks whether it must call `put`."""
        entry = self.open[task_range.job]
        task = task_range.job, 1 + max(i for job, i in self.retries if job == task_range.job)
        self.retries[task], self.bound[task] = task_range.terms.retries, None
        task_range.items.append(self.payload(task))
        self.note("append", task, "queued" if task_range.queued else "not queued")
        if task_range.queued or entry in self.to_feed:
            entry[1].append(task)
        else:
            # The stream ran dry: the model's remaining items are being given out now.
            self.open[task_range.job] = entry = task_range, [task]
            self.to_feed.append(entry)

    def feed(self) -> None:
        """Draw more of a stream, and tell the scheduler if necessary."""
        if self.open:
            job = self.draw.streams.one_of(list(self.open))
            for _ in range(1 + self.draw.streams.below(3)):
                self.append(self.open[job][0])
        self.tell()

    def tell(self) -> None:
        """Let input readers call `put`, as they decided earlier."""
        while self.to_feed:
            entry = self.to_feed.pop()
            if not entry[0].queued:
                self.sched.put(entry[0])
                self.enter(None, entry)

    def enter(self, q: int | None, entry: Entry, front: bool = False) -> None:
        """Put an entry of the model behind those of its priority, or in front of them."""
        if entry[1] and entry[1][0] in self.lone:
            q = ALONE
            if not self.waits_alone():
                self.before = {
                    t for t, w in self.bound.items() if w is not None and t not in self.ended
                }
        queue, rank = self.queues[q], self.rank(entry)
        for k, other in enumerate(queue):
            its = self.rank(other)
            if its < rank or (front and its == rank):
                queue.insert(k, entry)
                return
        queue.append(entry)

    def rank(self, entry: Entry) -> float:
        """Return the priority of an entry of the model; inf: it is empty and gets no more tasks."""
        task_range, tasks = entry
        if task_range is not None:
            return task_range.terms.priority
        return self.ranks[tasks[0][0]] if tasks else math.inf

    def highest(self, q: int | None) -> float:
        """Return the highest priority of the tasks that wait in a queue; -inf: none waits."""
        return max((self.ranks[t[0][0]] for _, t in self.queues[q] if t), default=-math.inf)

    def overtaken(self, w: int) -> bool:
        """Whether a task that waits for a worker goes before one that it has not begun."""
        first, worker = self.highest(w), self.workers[w]
        if self.shared_may_run(w, later=True):
            first = max(first, self.highest(None))
        return any(
            self.ranks[task[0]] < first
            for i, (task, batch) in enumerate(worker.given)
            if i >= max(worker.began, worker.answered) and i - batch.seq < batch.taken
        )

    def check_least(self, chosen: int) -> None:
        loads = [
            sum(len(tasks) for _, tasks in self.queues[w]) + self.holds(w)
            for w in range(len(self.workers))
        ]
        if loads[chosen] != min(loads):
            self.wrong(f"least_loaded() is {chosen}, but the loads are {loads}")

    def holds(self, w: int) -> int:
        worker = self.workers[w]
        return len(worker.given) - worker.answered if worker.alive else 0

    # -- work goes out ---------------------------------------------------------------------------

    def batches(self) -> None:
        """Give waiting tasks to idle workers."""
        idle = list(self.sched.idle)
        among = len(self.workers)
        all_idle = len(idle) == among and not self.needs
        self.settle(idle)
        for w, batch in self.sched.next_batches():
            if w not in idle:
                self.wrong(f"worker {w} got a batch while it was not idle")
            left = among - idle.index(w) if all_idle else among
            self.given(w, batch, left)
        for w in self.sched.idle:
            if self.may_get(w):
                self.wrong(f"worker {w} is idle while a task waits that it may run")

    def waits_alone(self) -> bool:
        return any(tasks for _, tasks in self.queues[ALONE])

    def lone_runs(self) -> bool:
        """Whether a worker has a task that runs alone."""
        return any(
            task in self.lone and i - batch.seq < batch.taken
            for worker in self.workers if worker.alive
            for i, (task, batch) in enumerate(worker.given)
            if i >= worker.answered
        )  # fmt: skip

    def may_get(self, w: int) -> bool:
        """Whether a task waits that an idle worker may run now."""
        if self.lone_runs():
            return False
        if not self.waits_alone():
            return any(tasks for _, tasks in self.queues[w]) or self.shared_may_run(w)
        if not any(map(self.holds, range(len(self.workers)))):
            return True
        first = next((tasks[0] for _, tasks in self.queues[w] if tasks), None)
        return first in self.before

    def check_alone(self, w: int, tasks: list[Task]) -> None:
        """A task that runs alone is given when no worker has any, and others not beside it."""
        if self.lone_runs():
            self.wrong(f"worker {w} gets {tasks} beside a task that runs alone")
        if tasks[0] in self.lone:
            if any(map(self.holds, range(len(self.workers)))):
                self.wrong(f"worker {w} gets {tasks}, to run alone, beside others")
        elif self.waits_alone() and tasks[0] not in self.before:
            self.wrong(f"worker {w} gets {tasks} before a task that waits to run alone")

    @staticmethod
    def function(job: int) -> str:
        return f"function {job % 2}"

    def shared_may_run(self, w: int, later: bool = False) -> bool:
        """Whether a worker may get the first task that waits for any; ``later``: when it has
        answered all."""
        first = next((tasks for _, tasks in self.queues[None] if tasks), None)
        return first is not None and self.has_memory(w, first, later)

    def has_memory(self, w: int, tasks: list[Task], later: bool = False) -> bool:
        """Whether a worker may get the first of some tasks, which are for any worker."""
        need = self.needs.get(self.function(tasks[0][0]), 0.0)
        if self.holds(w) and not later:
            return not need and w not in self.latest
        heavy = [v for v in self.latest if self.holds(v) and self.latest[v][0] in self.needs]
        heavy = [v for v in heavy if v != w]
        needs = {v: max(self.needs[self.latest[v][0]], self.latest[v][1]) for v in heavy}
        needs[w] = need
        if not need or not sum(needs[v] for v in heavy):
            return True
        growth = sum(max(0.0, its - self.sizes.get(v, 0)) for v, its in needs.items())
        return growth <= self.free and sum(needs.values()) <= self.limits

    def check_memory(self, w: int, tasks: list[Task], shared: bool) -> None:
        """A heavy task is given to an idle worker if the memory is enough, by itself."""
        if shared and not self.has_memory(w, tasks):
            self.wrong(f"worker {w} gets {tasks}; {self.latest} need {self.needs} of {self.free}")
        name = self.function(tasks[0][0])
        if shared and name in self.needs and len(tasks) > 1:
            self.wrong(f"worker {w} gets {tasks} of a heavy function")
        if not self.holds(w):
            self.runs(w, name)

    def runs(self, w: int, name: str) -> None:
        """A worker runs a task of a function."""
        self.latest.pop(w, None)
        if name in self.needs:
            self.latest[w] = name, self.needs[name], 0.0

    def goes_on(self, w: int, at: int) -> None:
        """A worker has ended a task before item ``at``, and runs this one."""
        worker = self.workers[w]
        if self.needs and at < len(worker.given):
            name = self.function(worker.given[at][0][0])
            if w not in self.latest or self.latest[w][0] != name:
                self.settle([w])
                self.runs(w, name)

    def settle(self, workers: list[int]) -> None:
        """The tasks of these workers have ended: their functions may need less."""
        for w in workers if self.needs else ():
            name, _, seen = self.latest.pop(w, ("", 0.0, 0.0))
            if name in self.needs:
                self.needs[name] = max(seen, 0.75 * self.needs[name])

    def given(self, w: int, batch: Batch, among: int = 0) -> None:
        """Check a batch and give it to the worker; ``among``: workers that divide the handful, 0:
        all."""
        worker = self.workers[w]
        tasks = [(batch.job, batch.first + k) for k in range(len(batch.items))]
        self.note("worker", w, "gets", tasks)
        if not worker.alive:
            self.wrong(f"dead worker {w} got {tasks}")
        if worker.told != FAR:
            self.wrong(f"recalled worker {w} got {tasks}")
        if batch.seq != len(worker.given):
            self.wrong(f"seq {batch.seq} for item {len(worker.given)} of worker {w}")
        own = any(t for _, t in self.queues[w])
        own = own and (self.highest(w) >= self.highest(None) or not self.shared_may_run(w))
        self.check_alone(w, tasks)
        queue = self.queues[w] if own or self.waits_alone() else self.queues[None]
        if tasks[0] in self.lone:
            queue = self.queues[ALONE]
        if len(worker.given) > worker.answered:
            last = worker.given[-1][0]
            if self.ranks[last[0]] < self.ranks[batch.job]:
                self.wrong(f"worker {w} gets {tasks} behind {last} of a lower priority")
        while queue and not queue[0][1]:
            queue.pop(0)
        if not queue or tasks != queue[0][1][: len(tasks)]:
            self.wrong(f"{tasks} were given, but first in line are {queue[0][1] if queue else []}")
        for task, item in zip(tasks, batch.items):
            if item != self.payload(task):
                self.wrong(f"task {task} has the payload of another")
        among = among or len(self.workers)
        self.check_handful(w, batch, len(queue[0][1]), queue is self.queues[None], among)
        self.check_memory(w, tasks, queue is self.queues[None])
        del queue[0][1][: len(tasks)]
        if not queue[0][1]:
            queue.pop(0)
        worker.given.extend((task, batch) for task in tasks)
        worker.messages.extend([batch.seq] * len(tasks))
        if worker.lifetime is not None and len(worker.given) - worker.taken > worker.lifetime:
            self.wrong(f"worker {w} got more tasks than its lifetime of {worker.lifetime}")

    def check_handful(self, w: int, batch: Batch, waiting: int, shared: bool, among: int) -> None:
        """A batch has the size that the rules require."""
        n, cost = len(batch.items), self.sched.sizes.cost
        handful = (
            1
            if 2 * cost > PREFETCH_SECONDS
            else max(1, min(MOST_ITEMS, int(PREFETCH_SECONDS / 2 / cost)))
        )
        worker = self.workers[w]
        if shared and self.function(batch.job) in self.needs:
            handful = 1

        def allowed(waiting: int) -> int:
            most = min(handful, waiting)
            if shared:
                most = min(most, -(-waiting // (among if waiting <= handful else self.sched.size)))
            if worker.lifetime is not None:
                most = min(most, worker.lifetime - len(worker.given) + worker.taken)
            return most

        fed = batch.job in self.open  # more may have come since the batch was cut
        most = max(map(allowed, range(n, waiting + 1))) if fed else allowed(waiting)
        size = sum(map(len, batch.items))
        if n > most or (n > 1 and size > MOST_BYTES):
            self.wrong(f"a batch of {n} items, {size} bytes: more than {most}")
        if n < most and not fed and size + MOST_BYTES // 2 + 9 <= MOST_BYTES:
            self.wrong(f"a batch of {n} items where {most} were allowed")

    # -- workers work ----------------------------------------------------------------------------

    def busy(self) -> list[int]:
        """Return living workers with unfinished tasks."""
        return [w for w, x in enumerate(self.workers) if x.alive and x.finished < len(x.given)]

    def begin(self, w: int | None = None) -> None:
        """A worker reaches its next task, and skips forbidden ones."""
        if w is None:
            busy = self.busy()
            if not busy:
                return
            w = self.draw.order.one_of(busy)
        worker = self.workers[w]
        if worker.finished < worker.began:
            return
        seq = worker.finished
        worker.began = seq + 1
        task = worker.given[seq][0]
        if seq >= worker.limit:
            # It skips the rest of the message too.
            worker.began = seq  # it takes the announcement back, like `Outbox.enter`
            message = worker.messages[seq]
            while (
                worker.finished < len(worker.given) and worker.messages[worker.finished] == message
            ):
                worker.skips.add(worker.finished)
                worker.finished += 1
            self.note("worker", w, "skips", worker.finished - seq, "from", task)
        else:
            self.note("worker", w, "begins", task)
            if task in self.ended:
                self.wrong(f"{task} begins after its end ({self.ended[task]})")

    def finish(self) -> None:
        """A worker finishes its task."""
        busy = self.busy()
        if busy:
            w = self.draw.order.one_of(busy)
            worker = self.workers[w]
            self.begin(w)
            if worker.finished < worker.began:
                worker.finished += 1

    def answer(self, w: int | None = None) -> None:
        """Some of a worker's answers arrive."""
        if w is None:
            some = [w for w, x in enumerate(self.workers) if x.alive and x.answered < x.finished]
            if not some:
                return
            w = self.draw.order.one_of(some)
        worker = self.workers[w]
        at = worker.answered
        task, batch = worker.given[at]
        n, skipped = 1, at in worker.skips
        # Answers that arrive together are of one batch; skips arrive alone.
        while (
            at + n < worker.finished
            and worker.given[at + n][1] is batch
            and (at + n in worker.skips) == skipped
        ):
            n += 1
        if not skipped:
            n = 1 + self.draw.order.below(n)
        self.note("worker", w, "skipped" if skipped else "answers", n, "from", task)
        if skipped:
            self.skipped(w, at, n)
        else:
            before = self.sched.sizes.cost
            seconds = n * self.draw.time.one_of([1e-6, 3e-5, 2e-4, 3e-3, 0.01])
            got, first = self.sched.answered(w, n, seconds)
            if got is not batch or (got.job, first) != task:
                self.wrong(f"answers of {task} count as answers of {got.job, first}")
            if not seconds / n * 0.999 <= self.sched.sizes.cost <= max(before, seconds / n) * 1.001:
                self.wrong(f"cost {self.sched.sizes.cost} after {n} tasks in {seconds} s")
            for i in range(n):
                self.end(worker.given[at + i][0], "answered")
            self.goes_on(w, at + n)
        worker.answered += n
        self.after(w)

    def skipped(self, w: int, at: int, n: int) -> None:
        """A worker reports skipped tasks; those not taken back wait again."""
        worker = self.workers[w]
        for i in range(at, at + n):
            task, batch = worker.given[i]
            if i - batch.seq < batch.taken:
                self.put_back([task])
            self.goes_on(w, i + 1)
        self.sched.skipped(w, n)

    def put_back(self, tasks: list[Task]) -> None:
        """Put tasks in front again, if they are still wanted."""
        if tasks and self.unwanted(tasks[0]):
            for task in tasks:
                self.end(task, "withdrawn")
        elif tasks:
            self.enter(self.bound[tasks[0]], (None, tasks), front=True)

    def end(self, task: Task, how: str) -> None:
        if task in self.ended:
            self.wrong(f"{task} is {how}, and was {self.ended[task]} before")
        self.ended[task] = how

    def after(self, w: int) -> None:
        """Do what the engine does after answers."""
        worker, in_flight = self.workers[w], self.sched.in_flight[w]
        if in_flight.size == 0 and in_flight.paused:
            worker.told = worker.limit = FAR
            self.sched.resume(w)
        cost = self.sched.sizes.cost
        held = len(set(worker.messages[worker.answered :]))
        bound = any(t for _, t in self.queues[w])
        waiting = max((len(t) for _, t in self.queues[None]), default=0) - len(self.retries)
        if not self.holds(w):
            self.settle([w])
        batches = self.sched.refill(w)
        waiting += len(self.retries)  # with those that input readers have appended meanwhile
        most = 1 if 2 * cost > PREFETCH_SECONDS else 2
        if SHORT_SECONDS < cost <= LONG_SECONDS:
            # More, if enough tasks wait for all workers, or if only this worker may run them.
            n = 1 if 2 * cost > PREFETCH_SECONDS else int(PREFETCH_SECONDS / 2 / cost)
            ahead = math.ceil(AHEAD_SECONDS / (n * cost))
            if bound:
                most = 1 + ahead
            else:
                most = max(most, 1 + min(ahead, waiting // (n * len(self.workers))))
        for batch in batches:
            self.given(w, batch)
        if self.sched.holds_back:
            self.batches()
        if batches and held + len(batches) > most:
            self.wrong(f"worker {w} holds {held} and {len(batches)} messages of {cost} s a task")
        if in_flight.size == 0 and in_flight.left == 0:
            self.note("worker", w, "has lived its life")
            self.sched.retire(w)
            self.bury(w)

    # -- taking back -----------------------------------------------------------------------------

    def look(self) -> None:
        """The engine checks a silent worker, which holds tasks or did before."""
        w = self.draw.recalls.below(len(self.workers))
        worker, in_flight = self.workers[w], self.sched.in_flight[w]
        if not worker.alive:
            return
        unbegun = [
            (task, batch)
            for i, (task, batch) in enumerate(worker.given)
            if i >= max(worker.began, worker.answered) and i - batch.seq < batch.taken
        ]
        surplus = any(self.bound[task] is None for task, _ in unbegun)
        if surplus != self.sched.surplus(w, worker.began):
            self.wrong(f"surplus of worker {w} is {not surplus}, and it has not begun {unbegun}")
        before = self.overtaken(w)
        found = self.sched.overtaken(w, worker.began)
        # An input reader may have appended meanwhile.
        if found not in (before, overtaken := self.overtaken(w)):
            self.wrong(f"worker {w} is overtaken is {found}; in the model {overtaken}")
        if in_flight.paused and worker.told != FAR and not worker.skips:
            # By now the worker has seen the limit.
            worker.limit = worker.told
            limit = max(worker.told, worker.began)
            back: list[tuple[Batch, list[Task]]] = []
            for i in range(max(limit, worker.answered), len(worker.given)):
                task, batch = worker.given[i]
                if i - batch.seq < batch.taken:
                    if not back or back[-1][0] is not batch:
                        back.append((batch, []))
                    back[-1][1].append(task)
            count = sum(len(tasks) for _, tasks in back)
            self.note("take back", count, "from worker", w)
            if self.sched.take_back(w, limit) != count:
                self.wrong(f"not {count} tasks were taken back from worker {w}")
            worker.taken += count
            for _, tasks in reversed(back):
                self.put_back(tasks)
            self.batches()
        elif (surplus or found) and not in_flight.paused:
            self.note("worker", w, "is to begin nothing from", worker.began)
            self.sched.pause(w)
            worker.told = worker.began
            if self.draw.recalls.chance(0.5):
                worker.limit = worker.told

    # -- deaths ----------------------------------------------------------------------------------

    def death(self) -> None:
        """A worker dies in any state."""
        alive = [w for w, x in enumerate(self.workers) if x.alive]
        if alive and self.draw.faults.chance(0.5):
            w = self.draw.faults.one_of(alive)
            self.note("worker", w, "dies")
            # The engine finds finished tasks in its outbox.
            while self.workers[w].alive and self.workers[w].answered < self.workers[w].finished:
                self.answer(w)
            if self.workers[w].alive:
                self.bury(w)

    def bury(self, w: int) -> None:
        """Account for a worker that has ended."""
        worker = self.workers[w]
        running = worker.given[worker.began - 1][0] if worker.began > worker.answered else None
        back: list[tuple[Batch, list[Task]]] = []
        for i in range(worker.answered, len(worker.given)):
            task, batch = worker.given[i]
            if task != running and i - batch.seq < batch.taken:
                if not back or back[-1][0] is not batch:
                    back.append((batch, []))
                back[-1][1].append(task)
        if running is not None:
            i = worker.began - 1
            batch = worker.given[i][1]
            if i - batch.seq >= batch.taken:
                running = None  # it was taken back, and the worker was about to skip it
        lost = self.sched.gone(w, worker.began)
        found = None if lost is None else (lost[0].job, lost[0].first + lost[1])
        if found != running:
            self.wrong(f"worker {w} was running {running}, and {found} counts as lost")
        worker.alive = False
        for _, tasks in reversed(back):
            self.put_back(tasks)
        if lost is not None and running is not None:
            if lost[0].terms.retries != self.retries[running]:
                self.wrong(
                    f"{running} has {lost[0].terms.retries} retries, not {self.retries[running]}"
                )
            if lost[0].terms.retries > 0:
                self.note(running, "is run again")
                self.retries[running] -= 1
                alone = self.bound[running] is None and self.draw.alone.chance(self.lonely)
                if alone:
                    self.note(running, "runs alone from now on")
                if self.draw.retries.chance(0.5):
                    self.run_again(lost, running, alone)
                    self.put_back([running])
                elif self.unwanted(running):
                    self.run_again(lost, running, alone, self.clock + 1)
                    self.end(running, "withdrawn")
                else:
                    when = self.clock + 1 + self.draw.retries.below(3)
                    self.run_again(lost, running, alone, when)
                    self.later.append((when, len(self._history), running))
            else:
                self.end(running, "lost")

    def run_again(
        self, lost: tuple[Batch, int], task: Task, alone: bool, when: float | None = None
    ) -> None:
        if alone and self.heavy:
            self.ran_out(lost, task)
        self.sched.again(*lost, when=when, alone=alone)
        if alone:
            self.lone.add(task)

    def ran_out(self, lost: tuple[Batch, int], task: Task) -> None:
        """The function of a task becomes heavy."""
        name, peak = self.function(task[0]), self.draw.heavy.one_of([0, 10, 40, 100])
        self.note(name, "needs", peak)
        self.sched.ran_out(*lost, {name: peak})
        if not self.needs:
            self.free = self.limits = 0.0
        self.needs[name] = max(peak, self.needs.get(name, 0.0))
        for v, worker in enumerate(self.workers):
            runs = self.function(worker.given[worker.answered][0][0]) if self.holds(v) else ""
            if runs == name and v not in self.latest:
                self.latest[v] = name, 0.0, 0.0

    def become_heavy(self) -> None:
        """A function becomes heavy, whatever runs at that moment."""
        runs = [w for w in range(len(self.workers)) if self.holds(w)]
        if runs and self.draw.heavy.chance(0.5):
            worker = self.workers[self.draw.heavy.one_of(runs)]
            task, batch = worker.given[worker.answered]
            self.ran_out((batch, batch.done), task)

    def weigh(self) -> None:
        """The engine measures the memory."""
        sched, n = self.sched, len(self.workers)
        self.sizes = {w: self.draw.heavy.below(100) for w in range(n)}
        each = self.draw.heavy.one_of([None, None, 30, 90])
        self.free = self.draw.heavy.one_of([0, 30, 100, 300])
        runs = [w for w in range(n) if self.holds(w)]
        for w in runs:
            if w in self.latest:
                sched.heavy.weighed(w, self.sizes[w])
                name, start, seen = self.latest[w]
                self.latest[w] = name, start, max(seen, self.sizes[w])
                if name in self.needs:
                    self.needs[name] = max(self.needs[name], self.sizes[w])
        others = sum(w not in self.latest for w in runs)
        self.limits = math.inf if each is None else each * (n - others)
        self.note("needs are", self.needs, "of", self.free, "free; workers have", self.sizes)
        if sched.alone not in sched.queued and not any(t in self.lone for *_, t in self.later):
            for name, need in list(self.needs.items()):
                growth = sum(max(0.0, need - size) for size in self.sizes.values())
                if growth <= self.free and n * need <= self.limits:
                    del self.needs[name]
            if not self.needs:
                self.latest.clear()
        sched.measured(self.free, each, self.sizes)
        self.batches()

    def revive(self, w: int | None = None) -> None:
        """A new process is ready at a dead worker's place."""
        dead = [w for w, x in enumerate(self.workers) if not x.alive]
        if dead:
            w = self.draw.faults.one_of(dead)
            self.note("worker", w, "is ready")
            self.workers[w] = _Worker(self.lifetime)
            self.sched.ready(w, self.lifetime)

    def due(self) -> None:
        """Advance the time; due retries go to the front."""
        self.clock += 1
        due = [entry for entry in self.later if entry[0] <= self.clock]
        self.later = [entry for entry in self.later if entry[0] > self.clock]
        for _, _, task in sorted(due):
            self.put_back([task])
        next_one = min((when for when, _, _ in self.later), default=None)
        if self.sched.due(self.clock) != next_one:
            self.wrong(f"the next is due at {next_one}")

    def withdraw(self) -> None:
        """A job has failed: its waiting tasks are dropped."""
        if self.jobs and self.draw.cancels.chance(0.15):
            job = 1 + self.draw.cancels.below(self.jobs)
            self.note("withdraw", job)
            holders = [
                w
                for w, worker in enumerate(self.workers)
                if worker.alive and any(t[0] == job for t, _ in worker.given[worker.answered :])
            ]
            if self.sched.withdraw(job) != holders:
                self.wrong(f"job {job} is held by the workers {holders}")
            self.withdrawn.add(job)
            for _, _, task in self.later:
                if task[0] == job:
                    self.end(task, "withdrawn")
            self.later = [entry for entry in self.later if entry[2][0] != job]
            self.open.pop(job, None)
            self.to_feed = [entry for entry in self.to_feed if entry[0].job != job]
            for name, queue in self.queues.items():
                for _, tasks in queue:
                    for task in tasks:
                        if task[0] == job:
                            self.end(task, "withdrawn")
                self.queues[name] = [e for e in queue if not e[1] or e[1][0][0] != job]

    def cancel(self) -> None:
        """Cancel one of several calls that wait or are sent together."""
        running = [task for task in self.retries if task not in self.ended]
        running = [task for task in running if not self.unwanted(task)]
        if not running or self.draw.cancels.chance(0.5):
            return
        task = self.draw.cancels.one_of(running)
        self.note("cancel", task)
        holders = [
            w
            for w, worker in enumerate(self.workers)
            if worker.alive and task in [t for t, _ in worker.given[worker.answered :]]
        ]
        if self.sched.withdraw(*task) != holders:
            self.wrong(f"{task} is held by the workers {holders}")
        self.cancelled.add(task)
        for w in holders:
            worker, held = self.workers[w], self.sched.in_flight[w].held
            for i in range(worker.answered, len(worker.given)):
                batch = next(b for b in held if b.seq <= i < b.seq + len(b.items))
                worker.given[i] = worker.given[i][0], batch
        if any(entry[2] == task for entry in self.later):
            self.end(task, "withdrawn")
        self.later = [entry for entry in self.later if entry[2] != task]
        for queue in self.queues.values():
            for k, (_, tasks) in enumerate(queue):
                if task in tasks:
                    n = tasks.index(task)
                    if n:
                        queue.insert(k, (None, tasks[:n]))
                    del tasks[: n + 1]
                    self.end(task, "withdrawn")
                    break

    def unwanted(self, task: Task) -> bool:
        """Whether no caller waits for a task any more."""
        return task[0] in self.withdrawn or task in self.cancelled

    # -- the books -------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the scheduler's state with the model's."""
        sched = self.sched
        waiting = sum(len(tasks) for q in self.queues.values() for _, tasks in q)
        if sched.waiting() != waiting + len(self.later):
            self.wrong(f"{sched.waiting()} items wait; in the model {self.queues}")
        for w, (worker, in_flight) in enumerate(zip(self.workers, sched.in_flight)):
            if sched.own[w].bound != sum(len(tasks) for _, tasks in self.queues[w]):
                self.wrong(f"{sched.own[w].bound} items are said to wait for worker {w}")
            self.check_running(w, worker)
            if in_flight.size != self.holds(w):
                self.wrong(f"worker {w} holds {self.holds(w)}; the scheduler says {in_flight.size}")
            able = in_flight.accepting and not in_flight.held
            if able != (w in sched.idle) or (able and not worker.alive):
                self.wrong(f"idle are {list(sched.idle)}, wrong for worker {w}")
        if sched.heavy.needs != self.needs or (sched.heavy in sched.queued) != bool(self.needs):
            self.wrong(f"heavy are {sched.heavy.needs}; in the model {self.needs}")
        queued = {q for q in (sched.shared, *sched.own) if q}
        if sched.queued - {sched.alone, sched.heavy} != queued:
            self.wrong(f"not the queues that have ranges: {sched.queued}")
        if bool(sched.alone) != self.waits_alone():
            self.wrong(f"that tasks wait to run alone is {bool(sched.alone)}")
        if (self.waits_alone() or self.lone_runs()) and sched.alone not in sched.queued:
            self.wrong("a task runs alone or waits for that, and does not hold up others")

    def check_running(self, w: int, worker: _Worker) -> None:
        """The scheduler knows each worker's running item."""
        found = self.sched.running(w, worker.began) if worker.alive else None
        at = worker.began - 1
        task = worker.given[at][0] if worker.alive and at >= worker.answered else None
        if task != (None if found is None else (found[0].job, found[0].first + found[1])):
            self.wrong(f"worker {w} is in {task}; the scheduler says {found}")

    def close_streams(self) -> None:
        """End all inputs."""
        for task_range, _ in self.open.values():
            assert isinstance(task_range.items, _Fed)
            task_range.items.task_range = None
        self.open.clear()

    def drain(self) -> None:
        """Without further deaths all submitted tasks end."""
        self.close_streams()
        for _ in range(4 * len(self.retries) + 200):
            if len(self.ended) == len(self.retries):
                break
            self.revive()
            self.due()
            self.batches()
            for w in list(range(len(self.workers))):
                if self.workers[w].alive and self.workers[w].finished < len(self.workers[w].given):
                    self.begin(w)
                    self.workers[w].finished = max(self.workers[w].finished, self.workers[w].began)
                while self.workers[w].alive and self.workers[w].answered < self.workers[w].finished:
                    self.answer(w)
        else:
            self.wrong(f"never ended: {sorted(set(self.retries) - set(self.ended))}")
