"""The queues of task ranges that wait for any worker, or for a certain one.

The owner's lock guards all of it, except `TaskRange.items`, to which an input reader appends
without it.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Any

from xpool._calls.terms import Terms
from xpool._engine.jobs.ranges import CALLS, Item, TaskRange, covers, piece
from xpool._engine.jobs.time_queue import TimeQueue


class RangeQueue:
    """Task ranges in order.  ``busy``: the set of the queues that have some.

    The range with the highest priority is first; ranges of one priority form a line.  A range
    leaves when it has no items, so that a slow input does not hold up other jobs.  ``bound``: the
    number of items in ranges that are bound to a worker.
    """

    def __init__(self, busy: set[Any]) -> None:
        # The line from which `take` takes, and its priority.  It is empty only if all are.
        self._ranges: deque[TaskRange] = deque()
        self._priority: float = 0
        # The other lines by priority, and a heap of their negated priorities.
        self._others: dict[float, deque[TaskRange]] = {}
        self._order: list[float] = []
        self._busy = busy
        self.bound = 0

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __iter__(self) -> Iterator[TaskRange]:
        """Yield the ranges; those of one priority in order."""
        return itertools.chain(self._ranges, *self._others.values())

    def put(self, task_range: TaskRange) -> None:
        """Queue a range behind all others of its priority."""
        self._enter(task_range)
        priority = task_range.terms.priority
        (self._ranges if priority == self._priority else self._line(priority)).append(task_range)

    def put_back(self, task_range: TaskRange) -> None:
        """Queue a range in front of those of its priority: its items have waited before."""
        self._enter(task_range)
        self._line(task_range.terms.priority).appendleft(task_range)

    def _line(self, priority: float) -> deque[TaskRange]:
        """Return the line of a priority, to which the caller adds a range."""
        if priority == self._priority or not self._ranges:
            self._priority = priority
            return self._ranges
        line = self._others.get(priority)
        if line is None:
            line = self._others[priority] = deque()
            heappush(self._order, -priority)
        return line

    def _enter(self, task_range: TaskRange) -> None:
        task_range.queued = True
        self._busy.add(self)
        if task_range.bound is not None:
            self.bound += len(task_range.items)

    def front(self) -> TaskRange | None:
        """Return the first range with items; None: there is none."""
        if self._order and -self._order[0] > self._priority:
            highest = -heapreplace(self._order, -self._priority)
            self._others[self._priority] = self._ranges
            self._priority, self._ranges = highest, self._others.pop(highest)
        while self._ranges:
            task_range = self._ranges[0]
            if task_range.items or self._dry():
                return task_range
        return None

    def first(self) -> TaskRange | None:
        """Move the first range whose items may run to the front; return it, None: there is none.

        Ranges whose results have no room (`FlowControl.may_run`) go behind the others of their
        priority.
        """
        held = 0
        while (task_range := self.front()) is not None and held < len(self._ranges):
            if task_range.may_run is None or task_range.may_run(task_range.first):
                return task_range
            self._ranges.rotate(-1)
            held += 1
        return self._first_below() if self._order else None

    def _first_below(self) -> TaskRange | None:
        """As `first`, among the other lines: no range of the highest priority may run."""
        passed, found = [], None
        while found is None and self._order:
            passed.append((self._priority, self._ranges))
            self._next_line()
            for _ in range(len(self._ranges)):
                one = self._ranges[0]
                if one.items and (one.may_run is None or one.may_run(one.first)):
                    found = one
                    break
                self._ranges.rotate(-1)
        for priority, ranges in passed:
            self._others[priority] = ranges
            heappush(self._order, -priority)
        return found

    def _next_line(self) -> None:
        """Go on with the line of the next priority, and forget the present one."""
        self._priority = -heappop(self._order)
        self._ranges = self._others.pop(self._priority)

    def pass_streams(self) -> bool:
        """Move streams behind the first range of another kind and of their priority; return whether
        there is one."""
        if not any(one.items and one.flow is None for one in self._ranges):
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
            if self._order:
                self._next_line()
            else:
                self._busy.discard(self)
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
        """Drop all items."""
        for task_range in self._empty():
            task_range.items.clear()  # an input reader may still have the range
        self._busy.discard(self)
        self.bound = 0

    def _empty(self) -> list[TaskRange]:
        """Take out all ranges."""
        ranges = list(self)
        for its in (self._ranges, self._others, self._order):
            its.clear()
        return ranges


class Waiting:
    """Queues of task ranges: for any worker, for each worker, for items that run alone, and by
    time.

    ``alarm(when)`` has `due` called at that time; the owner, who has a clock, sets it.
    """

    def __init__(self, workers: int) -> None:
        # Those of `shared`, `own` and `alone` that have ranges; `alone` also while its item runs.
        # `Scheduler.heavy` while a function is heavy, so that no call goes past the queues.
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
        """Make queues for at least this many workers."""
        while len(self.own) < workers:
            self.own.append(RangeQueue(self.queued))

    def put(self, task_range: TaskRange) -> None:
        """Queue a task range behind all others of its priority."""
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
        """Queue a task range in front of those of its priority: its items have waited before."""
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
        # One by one, because `put_back` of an item that is to run alone looks at those in `later`.
        while (when := self.later.next()) is not None and when <= now:
            self.put_back(self.later.pop())
        return when

    def waiting(self) -> int:
        """Return how many items wait for a worker."""
        waiting = itertools.chain(self.shared, self.alone, *self.own, self.later)
        return sum(len(one.items) for one in waiting)

    def bounds(self) -> Iterator[int]:
        """Yield the workers to which waiting ranges are bound."""
        yield from (w for w, queue in enumerate(self.own) if queue)
        yield from (one.bound for one in self.later if one.bound is not None)

    def take_out(self, job: int, items: range) -> list[TaskRange]:
        """Take out those of these items that wait for any worker."""
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
        """Drop all waiting items: the pool ends."""
        for queue in (self.shared, self.alone, *self.own):
            queue.clear()
        self.later.clear()
