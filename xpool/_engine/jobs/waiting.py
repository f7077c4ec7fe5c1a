"""The queues of task ranges that wait for any worker, or for a certain one.

The owner's lock guards all of it, except `TaskRange.items`, to which an input reader appends
without it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Iterator

from xpool._engine.jobs.ranges import CALLS, Item, TaskRange, Terms, covers, piece


class Waiting:
    """Queues of task ranges: one for any worker, one for each worker, and one by time."""

    def __init__(self, workers: int) -> None:
        self.shared: deque[TaskRange] = deque()
        self.own: list[deque[TaskRange]] = [deque() for _ in range(workers)]
        # The number of items in `own` for each worker, and of task ranges in all queues.
        self._bound = [0] * workers
        self.queued = 0
        # Ranges that wait for a time first: (when, a number, task range).  The number orders two
        # of the same time, since ranges cannot be compared.
        self._later: list[tuple[float, int, TaskRange]] = []
        self._numbers = itertools.count()
        self._calls = TaskRange(CALLS, 0, 0, ())  # the latest range of calls

    def extend(self, workers: int) -> None:
        """Make queues for at least this many workers."""
        while len(self.own) < workers:
            self.own.append(deque())
            self._bound.append(0)

    def put(self, task_range: TaskRange) -> None:
        """Queue a task range behind all others."""
        self._queue(task_range).append(task_range)

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
        """Queue a task range in front: its items have waited before."""
        self._queue(task_range).appendleft(task_range)

    def _queue(self, task_range: TaskRange) -> deque[TaskRange]:
        task_range.queued = True
        self.queued += 1
        if task_range.bound is None:
            return self.shared
        self._bound[task_range.bound] += len(task_range.items)
        return self.own[task_range.bound]

    def put_later(self, when: float, task_range: TaskRange) -> None:
        """Queue a task range in front at a time: see `due`."""
        heapq.heappush(self._later, (when, next(self._numbers), task_range))

    def due(self, now: float) -> float | None:
        """Queue the ranges whose time has come; return when the next is due, None: never."""
        while self._later and self._later[0][0] <= now:
            self.put_back(heapq.heappop(self._later)[2])
        return self._later[0][0] if self._later else None

    def take_later(self, worker: int, workers: int) -> list[TaskRange]:
        """Take out ranges that wait for a time and are bound to these consecutive workers."""
        its = range(worker, worker + workers)
        found = [one for _, _, one in self._later if one.bound in its]
        if found:
            self._later = [entry for entry in self._later if entry[2].bound not in its]
            heapq.heapify(self._later)
        return found

    def waiting(self) -> int:
        """Return how many items wait for a worker."""
        queued = sum(len(s.items) for q in (self.shared, *self.own) for s in q)
        return queued + sum(len(task_range.items) for _, _, task_range in self._later)

    def bounds(self) -> Iterator[int]:
        """Yield the workers to which waiting ranges are bound."""
        yield from (w for w, queue in enumerate(self.own) if queue)
        yield from (one.bound for _, _, one in self._later if one.bound is not None)

    def take_out(self, job: int, items: range) -> list[TaskRange]:
        """Take out those of these items that wait for any worker."""
        found = []
        for one in self.shared:
            if one.items and one.job == job and one.first in items:
                found.append(piece(one, 0, len(one.items)))
                one.first += len(one.items)
                one.items.clear()  # `front_of` removes the empty range
        return found

    def strike(self, job: int, index: int | None) -> None:
        """Drop the waiting items of a job, or only the item ``index``."""
        for queue in (self.shared, *self.own):
            if any(task_range.job == job for task_range in queue):
                kept = [part for one in queue for part in self._without(one, job, index)]
                queue.clear()
                queue.extend(kept)
        self._later = [entry for entry in self._later if not covers(entry[2], job, index)]
        heapq.heapify(self._later)

    def _without(self, task_range: TaskRange, job: int, index: int | None) -> list[TaskRange]:
        """Return what is left of a queued range; others still append to the last part."""
        if not covers(task_range, job, index):
            return [task_range]
        if index is None:
            task_range.queued = False
            self.queued -= 1
            if task_range.bound is not None:
                self._bound[task_range.bound] -= len(task_range.items)
            return []
        if task_range.bound is not None:
            self._bound[task_range.bound] -= 1
        # Cut it in two at the item; the object stays the later part, to which others append.
        n = index - task_range.first
        before = [task_range.items.popleft() for _ in range(n + 1)][:n]
        task_range.first += n + 1
        if not before:
            return [task_range]
        self.queued += 1
        front = piece(task_range, 0, 0)
        front.first, front.items, front.queued = index - n, deque(before), True
        return [front, task_range]

    def front_of(self, queue: deque[TaskRange]) -> TaskRange | None:
        """Return the first range of a queue that has items; None: there is none."""
        while queue:
            task_range = queue[0]
            if task_range.items or self._dry(queue, task_range):
                return task_range
        return None

    def first_of(self, queue: deque[TaskRange]) -> TaskRange | None:
        """Move the first range whose items may run to the front; return it, None: there is none.

        Ranges whose results have no room (`FlowControl.may_run`) go behind the others.
        """
        held = 0
        while (task_range := self.front_of(queue)) is not None and held < len(queue):
            if task_range.may_run is None or task_range.may_run(task_range.first):
                return task_range
            queue.rotate(-1)
            held += 1
        return None

    def take(self, queue: deque[TaskRange], n: int, nbytes: int) -> list[Item]:
        """Take items from the first range of a queue, which must have some.

        At most ``n``, and at most ``nbytes`` bytes in all unless the first alone is larger.  A
        range to which an input reader appends may never end, and then goes behind all others.
        """
        task_range = queue[0]
        waiting = task_range.items
        # As many as fit if all are as long as the first, so that few are put back.
        n = min(n, len(waiting), nbytes // (len(waiting[0]) or 1) + 1)
        items = [waiting.popleft() for _ in range(n)]
        if n > 1 and sum(map(len, items)) > nbytes:
            fits = bisect.bisect(list(itertools.accumulate(map(len, items))), nbytes) or 1
            waiting.extendleft(reversed(items[fits:]))
            del items[fits:]
        if task_range.bound is not None:
            self._bound[task_range.bound] -= len(items)
        task_range.first += len(items)
        if not task_range.items:
            self._dry(queue, task_range)
        elif task_range.flow is not None and len(queue) > 1:
            queue.rotate(-1)
        return items

    def _dry(self, queue: deque[TaskRange], task_range: TaskRange) -> bool:
        """Remove an empty range from its queue; return True if a reader has appended meanwhile."""
        queue.popleft()
        task_range.queued = False
        self.queued -= 1
        # The reader appends before it reads `queued`, so one of the two sees the other's change.
        if task_range.items:
            task_range.queued = True
            self.queued += 1
            queue.appendleft(task_range)
            return True
        return False

    def clear(self) -> None:
        """Drop all waiting items: the pool ends."""
        for queue in (self.shared, *self.own):
            for task_range in queue:
                task_range.items.clear()  # an input reader may still have the range
            queue.clear()
        self._bound = [0] * len(self.own)
        self.queued = 0
        self._later.clear()
