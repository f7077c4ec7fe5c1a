"""What waits: task ranges for any worker or a certain one, retries for a time, tasks for memory.

The owner's lock guards all of it, except `TaskRange.items`, to which an input reader appends
without it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from xpool._calls.terms import Terms
from xpool._engine.jobs.ranges import CALLS, WHOLE, Batch, Item, TaskRange, covers, name_of, piece

T = TypeVar("T")


class TimeQueue(Generic[T]):
    """Objects by time; of the same time, in the order in which they were put."""

    def __init__(self) -> None:
        # The number orders two of the same time, since the objects cannot be compared.
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()

    def put(self, when: float, one: T) -> bool:
        """Put an object; return whether it is the first now."""
        entry = when, next(self._numbers), one
        heapq.heappush(self._heap, entry)
        return self._heap[0] is entry

    def next(self) -> float | None:
        """Return the earliest time; None: nothing waits.  Needs no lock."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[T]:
        """Take out what is due, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(self.pop())
        return found

    def pop(self) -> T:
        """Take out the first object.  There must be one."""
        return heapq.heappop(self._heap)[2]

    def take_out(self, wanted: Callable[[T], bool]) -> list[T]:
        found = [one for one in self if wanted(one)]
        if found:
            self._heap = [entry for entry in self._heap if not wanted(entry[2])]
            heapq.heapify(self._heap)
        return found

    def __iter__(self) -> Iterator[T]:
        return (one for _, _, one in self._heap)

    def clear(self) -> None:
        self._heap.clear()


class RangeQueue:
    """Task ranges in order.  ``busy``: the set of the queues that have some.

    The range with the highest priority is first; ranges of one priority form a line.  A range
    without items is removed, so that a slow input does not hold up other jobs.  ``bound``: the
    number of items in ranges that are bound to a worker.
    """

    def __init__(self, busy: set[Any]) -> None:
        # The lines by priority, and the priorities in order.  No line is empty, unless all are.
        self._lines: dict[float, deque[TaskRange]] = {}
        self._order: list[float] = []
        self._ranges: deque[TaskRange] = deque()  # the line from which `take` takes
        self._busy = busy
        self.bound = 0

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __iter__(self) -> Iterator[TaskRange]:
        """Yield the ranges; those of one priority in order."""
        return itertools.chain.from_iterable(self._lines.values())

    def put(self, task_range: TaskRange) -> None:
        """Queue a range behind all others of its priority."""
        self._enter(task_range)
        self._line(task_range.terms.priority).append(task_range)

    def put_back(self, task_range: TaskRange) -> None:
        """Queue a range in front of those of its priority: its items have waited before."""
        self._enter(task_range)
        self._line(task_range.terms.priority).appendleft(task_range)

    def _line(self, priority: float) -> deque[TaskRange]:
        """Return the line of a priority, to which the caller adds a range."""
        line = self._lines.get(priority)
        if line is None:
            if not self._ranges:
                self._empty()
            line = self._lines[priority] = self._ranges if not self._lines else deque()
            bisect.insort(self._order, priority)
        return line

    def _enter(self, task_range: TaskRange) -> None:
        task_range.queued = True
        self._busy.add(self)
        if task_range.bound is not None:
            self.bound += len(task_range.items)

    def front(self) -> TaskRange | None:
        """Return the first range with items; None: there is none."""
        return self.first(held=True)

    def first(self, held: bool = False) -> TaskRange | None:
        """Move the first range whose items may run to the front; return it, None: there is none.

        Ranges whose results have no room (`FlowControl.may_run`) go behind the others of their
        priority, unless ``held``.
        """
        for priority in reversed(self._order):
            line = self._ranges = self._lines[priority]
            for _ in range(len(line)):
                task_range = line[0]
                if not task_range.items and not self._dry():
                    continue
                if held or task_range.may_run is None or task_range.may_run(task_range.first):
                    return task_range
                line.rotate(-1)
        return None

    def pass_streams(self) -> bool:
        """Move streams behind the first range of another kind and of their priority; return whether
        there is one."""
        if self.front() is None or not any(one.items and one.flow is None for one in self._ranges):
            return False
        while (first := self.first()) is None or first.flow is not None:
            self._ranges.rotate(-1)
        return True

    def take(self, n: int, nbytes: int) -> list[Item]:
        """Take items from the range in front, which must have some.

        At most ``n``, and at most ``nbytes`` bytes in all unless the first alone is larger.  A
        range to which an input reader appends may never end, and then goes behind all others of its
        priority.
        """
        task_range = self._ranges[0]
        waiting = task_range.items
        # As many as fit if all are as long as the first, so that few are put back.
        n = min(n, len(waiting), nbytes // (len(waiting[0]) or 1) + 1)
        items = [waiting.popleft() for _ in range(n)]
        if n > 1 and sum(map(len, items)) > nbytes:
            fits = bisect.bisect(list(itertools.accumulate(map(len, items))), nbytes) or 1
            waiting.extendleft(reversed(items[fits:]))
            del items[fits:]
        if task_range.bound is not None:
            self.bound -= len(items)
        task_range.first += len(items)
        if not task_range.items:
            self._dry()
        elif task_range.flow is not None and len(self._ranges) > 1:
            self._ranges.rotate(-1)
        return items

    def _dry(self) -> bool:
        """Remove the empty range in front; return True if a reader has appended meanwhile."""
        task_range = self._ranges.popleft()
        task_range.queued = False
        # The reader appends before it reads `queued`, so one of the two sees the other's change.
        if task_range.items:
            task_range.queued = True
            self._ranges.appendleft(task_range)
            return True
        if not self._ranges:
            if len(self._lines) == 1:
                self._busy.discard(self)
            else:
                del self._lines[task_range.terms.priority]
                self._order.remove(task_range.terms.priority)
                self._ranges = self._lines[self._order[-1]]
        return False

    def strike(self, job: int, index: int | None) -> None:
        """Drop the items of a job, or only the item ``index``."""
        if any(task_range.job == job for task_range in self):
            for one in self._empty():
                if not covers(one, job, index):
                    self._line(one.terms.priority).append(one)
                elif index is not None:
                    self._line(one.terms.priority).extend(self._without(one, index))
                else:
                    one.queued = False
                    self.bound -= 0 if one.bound is None else len(one.items)
                    one.items.clear()  # its job may keep the range
            if not self._ranges:
                self._busy.discard(self)

    def _without(self, task_range: TaskRange, index: int) -> list[TaskRange]:
        """Return a range cut in two at an item, which is dropped.

        The object stays the later part, to which others append.
        """
        self.bound -= task_range.bound is not None
        n = index - task_range.first
        before = [task_range.items.popleft() for _ in range(n + 1)][:n]
        task_range.first += n + 1
        if not before:
            return [task_range]
        front = piece(task_range, 0, 0)
        front.first, front.items, front.queued = index - n, deque(before), True
        return [front, task_range]

    def clear(self) -> None:
        for task_range in self._empty():
            task_range.items.clear()  # an input reader may still have the range
        self._busy.discard(self)
        self.bound = 0

    def _empty(self) -> list[TaskRange]:
        ranges = list(self)
        self._lines.clear()
        self._order.clear()
        self._ranges = deque()
        return ranges


class Waiting:
    """Queues of task ranges: for any worker, for each worker, for items that run alone, and by
    time.

    ``alarm(when)`` has `due` called at that time; the owner, who has a clock, sets it.
    """

    def __init__(self, workers: int) -> None:
        # The queues among `shared`, `own` and `alone` that have ranges.  `alone` stays here while
        # its item runs, and `Scheduler.heavy` is here while a function is heavy, so that no call
        # goes past the queues.
        self.queued: set[Any] = set()
        self.shared = RangeQueue(self.queued)
        self.alone = RangeQueue(self.queued)
        self.own: list[RangeQueue] = []
        self.ranked = False  # whether an item had a priority other than 0
        self.extend(workers)
        self.later: TimeQueue[TaskRange] = TimeQueue()
        self.alarm: Callable[[float], object] = lambda when: None
        self._calls = TaskRange(CALLS, 0, 0, ())  # the latest range of calls

    def extend(self, workers: int) -> None:
        while len(self.own) < workers:
            self.own.append(RangeQueue(self.queued))

    def put(self, task_range: TaskRange) -> None:
        self._queue(task_range).put(task_range)

    def put_call(self, number: int, payload: Item, terms: Terms) -> None:
        """Queue a call, in the range of the calls before it if possible.

        So calls in a loop gather while the caller has the interpreter, and are sent in batches.
        """
        calls = self._calls
        # Make a new range if another job has a number in between, or the terms differ, so that the
        # call overtakes nothing that was submitted before it.
        if calls.first + len(calls.items) != number or calls.terms != terms:
            calls = self._calls = TaskRange(CALLS, 0, number, (), None, terms)
        calls.items.append(payload)
        if not calls.queued:
            self.put(calls)

    def put_back(self, task_range: TaskRange) -> None:
        self._queue(task_range).put_back(task_range)

    def put_again(
        self, task_range: TaskRange, killed: bool, when: float | None = None, alone: bool = False
    ) -> None:
        """Queue a failed item in front; this uses one of its retries.

        ``killed``: its worker died.  ``when``: it waits until that time, see `due`.  ``alone``: it
        runs alone from now on, unless it is bound.
        """
        task_range.terms = task_range.terms.after_failure(killed, alone)
        if when is None:
            self.put_back(task_range)
        else:
            self.later.put(when, task_range)
            self.alarm(when)

    def _queue(self, task_range: TaskRange) -> RangeQueue:
        if task_range.terms.priority:
            self.ranked = True
        if task_range.bound is not None:
            return self.own[task_range.bound]
        return self.alone if task_range.terms.alone else self.shared

    def due(self, now: float) -> float | None:
        """Queue the ranges whose time has come; return when the next is due, None: never."""
        # Range by range: `put_back` of an item that is to run alone looks at the rest of `later`.
        while (when := self.later.next()) is not None and when <= now:
            self.put_back(self.later.pop())
        return when

    def waiting(self) -> int:
        waiting = itertools.chain(self.shared, self.alone, *self.own, self.later)
        return sum(len(one.items) for one in waiting)

    def bounds(self) -> Iterator[int]:
        """Yield the workers to which waiting ranges are bound."""
        yield from (w for w, queue in enumerate(self.own) if queue)
        yield from (one.bound for one in self.later if one.bound is not None)

    def take_out(self, job: int, items: range) -> list[TaskRange]:
        """Take out the items among ``items`` that wait for any worker."""
        found = []
        for one in self.shared:
            if one.items and one.job == job and one.first in items:
                found.append(piece(one, 0, len(one.items)))
                one.first += len(one.items)
                one.items.clear()  # `RangeQueue.front` removes the empty range
        return found

    def strike(self, job: int, index: int | None) -> None:
        """Drop the waiting items of a job, or only the item ``index``."""
        for queue in (self.shared, self.alone, *self.own):
            queue.strike(job, index)
        self.later.take_out(lambda one: covers(one, job, index))

    def clear(self) -> None:
        for queue in (self.shared, self.alone, *self.own):
            queue.clear()
        self.later.clear()


# -- tasks that wait for memory --------------------------------------------------------------------

FALL = 0.75
"""The expected memory rises at once, and falls at most to this part of it with each task.  So the
other tasks soon run as before if one of them was much larger."""


class HeavyFunctions:
    """Decides how many tasks of a function run at a time after one has died for lack of memory.

    Such a function is **heavy**.  A task of it is expected to need as much memory as the latest
    ones.  It begins if there is enough memory for it and for the running heavy tasks, or if no
    heavy task runs.  It is given to a worker that has no other item, in a batch of its own, because
    idle workers would take back the rest of a batch.

    ``needs``: the expected memory of the tasks of heavy functions, in bytes, by their names.

    ``busy``: the set `Scheduler.queued`.  This object is in the set while a function is heavy.
    ``describe(job, WHOLE)`` names the function of a job; "": not known.
    """

    def __init__(self, busy: set[Any], describe: Callable[[int, int], str]) -> None:
        self.needs: dict[str, float] = {}  # 0: not known yet, so tasks begin as others
        self._busy, self._describe = busy, describe
        # For each worker whose latest task is heavy: the function, the memory that it was expected
        # to need when the task began, and the most memory that was measured since then.
        self._latest: dict[int, tuple[str, float, float]] = {}
        # As measured: the machine's free memory, the limits of workers that heavy tasks may divide,
        # and what each worker has.
        self._free = self._limits = 0.0
        self._sizes: Mapping[int, int] = {}

    def name(self, part: Batch | TaskRange) -> str:
        """Return the name of the function of a range's next item, or of a batch's running one."""
        index = part.first + part.done if isinstance(part, Batch) else part.first
        return self._describe(name_of(part.job, index)[0], WHOLE)

    def add(self, part: Batch | TaskRange, seen: float, held: Iterable[tuple[int, Batch]]) -> None:
        """Record that a task has died for lack of memory.

        ``seen``: the most bytes that a worker had in tasks of its function; 0: not known.
        ``held``: the batches that workers run.
        """
        name = self.name(part)
        if not name:
            return
        if not self.needs:  # nothing is measured yet
            self._free = self._limits = 0.0
        self.needs[name] = max(seen, self.needs.get(name, 0.0))
        self._busy.add(self)
        for w, batch in held:
            if w not in self._latest and self.name(batch) == name:
                self._latest[w] = name, 0.0, 0.0

    def may_begin(self, w: int, part: TaskRange, holding: Iterable[int]) -> bool:
        """Whether worker ``w`` may get a range's next item; ``holding``: workers that have some."""
        if w in holding and w in self._latest:
            return False
        need = self.needs.get(self.name(part), 0.0)
        if not need:
            return True
        heavy = ((v, *self._latest[v]) for v in holding if v in self._latest)
        running = [
            (v, max(self.needs[name], start)) for v, name, start, _ in heavy if name in self.needs
        ]
        needs = sum(its for _, its in running)
        if w in holding or not needs:
            return w not in holding
        return needs + need <= self._limits and self._growth([*running, (w, need)]) <= self._free

    def _growth(self, needs: Iterable[tuple[int, float]]) -> float:
        """Return how many bytes more than now workers take if each needs so many."""
        return sum(max(0.0, need - self._sizes.get(w, 0)) for w, need in needs)

    def settle(self, workers: Iterable[int]) -> None:
        """Record that these workers have ended their latest tasks."""
        for w in workers:
            name, _, seen = self._latest.pop(w, ("", 0.0, 0.0))
            if name in self.needs:
                self.needs[name] = max(seen, FALL * self.needs[name])

    def given(self, w: int, batch: Batch) -> None:
        """Record that a worker without items was given a batch."""
        name = self.name(batch)
        if name in self.needs:
            self._latest[w] = name, self.needs[name], 0.0
        else:
            self._latest.pop(w, None)

    def goes_on(self, w: int, batch: Batch) -> None:
        """Record that a worker has ended a task, and runs the next one of a batch that it holds."""
        if w not in self._latest or self._latest[w][0] != self.name(batch):
            self.settle((w,))
            self.given(w, batch)

    def has_heavy(self, w: int) -> bool:
        """Whether the latest task of a worker is heavy, if its end is not settled."""
        return w in self._latest

    def weighed(self, w: int, memory: int) -> None:
        """Record the bytes of a worker that runs a heavy task."""
        name, start, seen = self._latest[w]
        self._latest[w] = name, start, max(seen, memory)
        if name in self.needs:
            self.needs[name] = max(memory, self.needs[name])

    def limit(self, w: int, each: int, workers: int) -> int:
        """Return how many bytes worker ``w`` may have.

        ``workers``: the number of workers.  ``each``: the limit of each, in bytes.  If fewer than
        ``workers`` tasks of the worker's function fit in the memory of all workers, these tasks
        divide that memory.
        """
        start = self._latest[w][1] if w in self._latest else 0.0
        if start <= each:
            return each
        return each * workers // max(1, int(each * workers // start))

    def measured(self, free: float, limits: float, sizes: Mapping[int, int]) -> None:
        """Record the memory that there is, and which each worker has."""
        self._free, self._limits, self._sizes = free, limits, sizes

    def forget(self, workers: int) -> None:
        """Forget functions of which each worker could run a task now."""
        for name, need in list(self.needs.items()):
            growth = self._growth((w, need) for w in range(workers))
            if growth <= self._free and workers * need <= self._limits:
                del self.needs[name]
        if not self.needs:
            self.clear()

    def clear(self) -> None:
        self.needs.clear()
        self._latest.clear()
        self._busy.discard(self)
