"""Who gets which task next: a pure policy, driven by events, answering with batches.

The words used here and in the engine:

* An **item** is one task as it travels: an index in its job and a pickled payload.
* A **task range** is a run of consecutive items of one job that wait together.  A call is a range
  of one; a `map` is one range of all its chunks; an `imap` is a range that is still being fed.
* A **batch** is a piece cut from a task range and given to one worker: one message.
* What is **in flight** at one worker are batches in the order in which it will run them.  Workers
  answer item by item, in order, so positions are enough: no names travel back.

How much is in flight?  As much as the worker runs in `PREFETCH_SECONDS`, judged by how long the
last tasks took, in two batches, so that the next is there when the first is done.  A worker that
may run long gets one item.  A share of what waits is the upper bound, so that the last items of a
map are spread over all workers.  When the guess was wrong and a worker sits on items behind a long
one, the engine takes them back (`surplus`, `take_back`) as soon as another worker has nothing.

Tasks that are tried again wait their time in a heap; the clock is the caller's.

The engine's lock guards all of it, except `TaskRange.items`, to which an input reader appends
without it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from xpool.errors import InternalError

__all__ = ["Batch", "InFlight", "Item", "Limit", "Past", "Scheduler", "TaskRange"]

PREFETCH_SECONDS = 0.004
"""Seconds of work in flight at a worker.  Ten times the time a busy parent takes to answer."""

MOST_ITEMS = 512
"""Items in one batch at most: what is decoded ahead of a consumer stays small."""

MOST_BYTES = 48 * 1024
"""Payload bytes in one batch at most, unless one item alone is more: below a pipe's capacity."""

Item = Any
"""A payload as the channel takes it: bytes, for now always."""


class Limit(NamedTuple):
    """How long an item may run, and whether it is tried again when it ran longer."""

    seconds: float
    again: bool = False


class Past(NamedTuple):
    """What an item has been through: how often it was tried, and how many workers it killed."""

    tries: int = 0
    killed: int = 0


_NEW = Past()


class TaskRange:
    """Consecutive items of one job that wait.  ``first`` is the index of the leftmost.

    ``limit``: how long each may run, None: any time; for the engine, not looked at here.
    """

    __slots__ = (
        "bound",
        "first",
        "func",
        "input_reader",
        "items",
        "job",
        "limit",
        "past",
        "queued",
        "retries",
    )  # fmt: skip

    def __init__(
        self,
        job: int,
        func: int,
        first: int,
        items: Iterable[Item],
        retries: int = 0,
        bound: int | None = None,
        limit: Limit | None = None,
        past: Past = _NEW,
    ) -> None:
        self.job = job
        self.func = func
        self.first = first
        self.items: deque[Item] = deque(items)
        self.retries = retries
        self.bound = bound
        self.limit = limit
        self.past = past
        # True while it stands in a queue of the scheduler.  An open range that ran dry leaves the
        # queue, so that a slow iterable does not stand in front of other jobs.
        self.queued = False
        # Who appends to it, to be told how much was taken; for the engine, not looked at here.
        self.input_reader: Any = None


class Batch:
    """A piece of a task range that one worker has.  ``seq``: the number of its first item there."""

    __slots__ = (
        "bound",
        "done",
        "first",
        "func",
        "input_reader",
        "items",
        "job",
        "limit",
        "past",
        "retries",
        "seq",
        "taken",
        "withdrawn",
    )  # fmt: skip

    def __init__(self, task_range: TaskRange, items: list[Item], seq: int) -> None:
        self.job = task_range.job
        self.func = task_range.func
        self.first = task_range.first
        self.items = items
        self.retries = task_range.retries
        self.bound = task_range.bound
        self.input_reader = task_range.input_reader
        self.limit = task_range.limit
        self.past = task_range.past
        # Its job has ended: none of its items is queued again.
        self.withdrawn = False
        self.seq = seq
        self.done = 0
        # Items from this one on were taken back: the worker will answer them as skipped.
        self.taken = len(items)


class InFlight:
    """What one worker holds.  All counts are of items, since its process started."""

    __slots__ = ("accepting", "answered", "held", "left", "paused", "sent")

    def __init__(self) -> None:
        self.accepting = False
        # Told to skip what it has not begun; gets nothing new until it has answered all.
        self.paused = False
        self.reset(None)

    def reset(self, left: int | None) -> None:
        """Begin with a new process that may run ``left`` items (None: any number)."""
        self.held: deque[Batch] = deque()
        self.sent = 0
        self.answered = 0
        self.left = left
        self.paused = False

    @property
    def size(self) -> int:
        """Items in flight that have no answer yet."""
        return self.sent - self.answered


class Scheduler:
    """The queue in front of the workers, and what each of them holds."""

    def __init__(self, workers: int) -> None:
        self.in_flight = [InFlight() for _ in range(workers)]
        self.shared: deque[TaskRange] = deque()
        self.own: list[deque[TaskRange]] = [deque() for _ in range(workers)]
        # Ready workers with nothing in flight, oldest first.  Input readers read its truth without
        # the lock.
        self.idle: dict[int, None] = {}
        # Items that wait in `own`, for each worker; and task ranges that stand in any queue.
        self._bound = [0] * workers
        self._queued = 0
        # Spans that wait for their time, then for a worker: (when, a number, task range).
        self._later: list[tuple[float, int, TaskRange]] = []
        self._numbers = itertools.count()
        self.cost = float("inf")
        """Seconds a task takes, by the last answers; what a handful is measured with."""

    # -- work comes in ---------------------------------------------------------------------

    def put(self, task_range: TaskRange) -> None:
        """Queue a task range, behind what waits already."""
        self._queue(task_range).append(task_range)

    def put_back(self, task_range: TaskRange) -> None:
        """Queue a task range in front: its items have waited their turn before."""
        self._queue(task_range).appendleft(task_range)

    def _queue(self, task_range: TaskRange) -> deque[TaskRange]:
        task_range.queued = True
        self._queued += 1
        if task_range.bound is None:
            return self.shared
        self._bound[task_range.bound] += len(task_range.items)
        return self.own[task_range.bound]

    def least_loaded(self, newest: bool = False) -> int:
        """Return the worker with the fewest items in flight and bound to it.

        Of several idle ones that is the longest idle one, or the ``newest``: see `next_batches`.
        """
        for w in reversed(self.idle) if newest else self.idle:
            if not self._bound[w]:
                return w

        def load(w: int) -> tuple[int, bool]:
            return self.in_flight[w].size + self._bound[w], not self.in_flight[w].accepting

        return min(range(len(self.in_flight)), key=load)

    def waiting(self) -> int:
        """Return how many items wait for a worker."""
        queued = sum(len(s.items) for q in (self.shared, *self.own) for s in q)
        return queued + sum(len(task_range.items) for _, _, task_range in self._later)

    # -- work goes out ---------------------------------------------------------------------

    def next_batches(
        self, newest: bool = False, most: int | None = None
    ) -> list[tuple[int, Batch]]:
        """Give what waits to the idle workers, one batch each; the caller sends them.

        To ``most`` of them at most; None: to all.

        The longest idle worker comes first, so that tasks which come one by one, and are short, are
        spread over all workers: each has a device, or a model, that would lie idle.  For a caller
        that waits for its task, ``newest``: the last worker to become idle comes first, which looks
        for the next task still, and has what it needs in its processor's caches.
        """
        batches: list[tuple[int, Batch]] = []
        order = list(self.idle)
        if newest:
            order.reverse()
        for w in order:
            if not self._queued or len(batches) == most:
                break
            batch = self._cut(w)
            if batch is not None:
                batches.append((w, batch))
        return batches

    def refill(self, w: int) -> list[Batch]:
        """Bring what a worker has in flight up to the aim; called when it has answered."""
        in_flight = self.in_flight[w]
        batches: list[Batch] = []
        while self._queued and in_flight.accepting and len(in_flight.held) < 2:
            if in_flight.held and not self._worth_holding():
                break
            batch = self._cut(w)
            if batch is None:
                break
            batches.append(batch)
        return batches

    def _worth_holding(self) -> bool:
        return 2 * self.cost <= PREFETCH_SECONDS

    def _cut(self, w: int) -> Batch | None:
        """Cut the next batch for a worker, or None when nothing waits that it may run."""
        in_flight = self.in_flight[w]
        if not in_flight.accepting:
            return None
        for queue in (self.own[w], self.shared):
            while queue:
                task_range = queue[0]
                if not task_range.items and not self._dry(queue, task_range):
                    continue
                n = self._share(len(task_range.items), in_flight, queue is self.shared)
                items: list[Item] = []
                size = 0
                while len(items) < n and task_range.items:
                    size += len(task_range.items[0])
                    if items and size > MOST_BYTES:
                        break
                    items.append(task_range.items.popleft())
                if task_range.bound is not None:
                    self._bound[w] -= len(items)
                batch = Batch(task_range, items, in_flight.sent)
                task_range.first += len(items)
                if not task_range.items:
                    self._dry(queue, task_range)
                in_flight.held.append(batch)
                in_flight.sent += len(items)
                if in_flight.left is not None:
                    in_flight.left -= len(items)
                    in_flight.accepting = in_flight.left > 0
                self.idle.pop(w, None)
                return batch
        return None

    def _dry(self, queue: deque[TaskRange], task_range: TaskRange) -> bool:
        """Take an empty range off its queue; False when it was.  A reader may append meanwhile."""
        queue.popleft()
        task_range.queued = False
        self._queued -= 1
        # The input reader appends first and looks at `queued` then; so one of us sees the other.
        if task_range.items:
            task_range.queued = True
            self._queued += 1
            queue.appendleft(task_range)
            return True
        return False

    def _share(self, waiting: int, in_flight: InFlight, shared: bool) -> int:
        if not self._worth_holding():
            return 1
        n = min(MOST_ITEMS, int(PREFETCH_SECONDS / 2 / self.cost))
        if shared:
            n = min(n, -(-waiting // len(self.in_flight)))
        if in_flight.left is not None:
            n = min(n, in_flight.left)
        return max(1, n)

    # -- workers come, answer and go -------------------------------------------------------

    def ready(self, w: int, left: int | None) -> None:
        """Take a new process of worker ``w`` into service."""
        in_flight = self.in_flight[w]
        in_flight.reset(left)
        in_flight.accepting = True
        self.idle[w] = None

    def answered(self, w: int, n: int, seconds: float = 0.0) -> tuple[Batch, int]:
        """Note that the worker answered its next ``n`` items, all of one batch.

        Returns that batch and the index in the job of the first of them.
        """
        in_flight = self.in_flight[w]
        batch = in_flight.held[0] if in_flight.held else None
        if batch is None or batch.done + n > len(batch.items):
            raise InternalError(f"worker {w} answered {n} tasks that it did not hold")
        first = batch.first + batch.done
        batch.done += n
        in_flight.answered += n
        if batch.done == len(batch.items):
            in_flight.held.popleft()
            if not in_flight.held and in_flight.accepting:
                self.idle[w] = None
        if seconds > 0.0:
            # Up at once, down by halves: nothing is queued behind one long task among short ones.
            before = 0.0 if self.cost == float("inf") else min(self.cost, 1.0)
            self.cost = max(seconds / n, before / 2)
        return batch, first

    def retire(self, w: int) -> None:
        """Give nothing more to this worker."""
        self.in_flight[w].accepting = False
        self.idle.pop(w, None)

    def gone(self, w: int, began: int) -> tuple[Batch, int] | None:
        """Take back what a dead worker held; ``began`` counts the items that it had begun.

        Returns the batch and position of the one item that it was running, or None.  All
        items that it had not begun wait again, in front.
        """
        in_flight = self.in_flight[w]
        self.retire(w)
        lost: tuple[Batch, int] | None = None
        back: list[TaskRange] = []
        for batch in in_flight.held:
            start = batch.done
            if start < batch.taken and batch.seq + start < began:
                if lost is not None:
                    raise InternalError(f"worker {w} was running two tasks at once")
                lost = batch, start
                start += 1
            if start < batch.taken and not batch.withdrawn:
                back.append(_piece(batch, start, batch.taken))
        for task_range in reversed(back):
            self.put_back(task_range)
        in_flight.reset(None)
        return lost

    def again(
        self, batch: Batch, position: int, *, killed: bool = True, when: float | None = None
    ) -> None:
        """Queue an item once more that failed; costs one of its retries.

        ``killed``: its worker did not survive it.  ``when``: not before that time, see `due`.
        """
        if batch.withdrawn:
            return
        task_range = _piece(batch, position, position + 1)
        task_range.retries -= 1
        task_range.past = Past(batch.past.tries + 1, batch.past.killed + killed)
        if when is None:
            self.put_back(task_range)
        else:
            heapq.heappush(self._later, (when, next(self._numbers), task_range))

    def due(self, now: float) -> float | None:
        """Queue what has waited until ``now``; return when the next is due, None: nothing waits."""
        while self._later and self._later[0][0] <= now:
            self.put_back(heapq.heappop(self._later)[2])
        return self._later[0][0] if self._later else None

    # -- taking back from a worker that sits on its items -----------------------------------

    def running(self, w: int, began: int) -> tuple[Batch, int] | None:
        """Return the batch and position of the item that the worker is in, None: in none.

        ``began`` counts the items that it has begun; the last of them may have its answer.
        """
        for batch in self.in_flight[w].held:
            position = began - 1 - batch.seq
            if position < batch.done:
                return None
            if position < len(batch.items):
                return batch, position
        return None

    def surplus(self, w: int, began: int) -> bool:
        """Say whether the worker holds items that it has not begun and others could run."""
        held = self.in_flight[w].held
        if any(g.bound is not None for g in held):
            return False
        return any(max(began, g.seq + g.done) < g.seq + g.taken for g in held)

    def pause(self, w: int) -> None:
        """Give nothing more to this worker until it has answered all and `resume` is called."""
        in_flight = self.in_flight[w]
        in_flight.paused = True
        in_flight.accepting = False

    def resume(self, w: int) -> None:
        """Take a paused worker back into service; it has answered all."""
        in_flight = self.in_flight[w]
        in_flight.paused = False
        in_flight.accepting = in_flight.left is None or in_flight.left > 0
        if in_flight.accepting:
            self.idle[w] = None

    def take_back(self, w: int, limit: int) -> int:
        """Queue again what a paused worker has been told not to begin: items from ``limit`` on.

        The worker will answer each as skipped.  Returns how many were taken.
        """
        in_flight = self.in_flight[w]
        back = []
        count = 0
        for batch in in_flight.held:
            start = max(batch.done, limit - batch.seq)
            if start < batch.taken:
                if not batch.withdrawn:
                    back.append(_piece(batch, start, batch.taken))
                count += batch.taken - start
                batch.taken = start
        for task_range in reversed(back):
            self.put_back(task_range)
        if in_flight.left is not None:
            in_flight.left += count
        return count

    def skipped(self, w: int, n: int) -> None:
        """Note that the worker skipped its next ``n`` items.

        Those that `take_back` took wait elsewhere already; one that it left (the worker
        was at its door when told) waits again now.
        """
        in_flight = self.in_flight[w]
        for _ in range(n):
            batch = in_flight.held[0]
            position = batch.done
            if position < batch.taken and not batch.withdrawn:
                self.put_back(_piece(batch, position, position + 1))
            self.answered(w, 1)

    def withdraw(self, job: int) -> list[int]:
        """Forget what waits of a job that has ended, and queue none of it again.

        Returns the workers that hold some of it: they will answer it.
        """
        for queue in (self.shared, *self.own):
            for task_range in [s for s in queue if s.job == job]:
                task_range.queued = False
                self._queued -= 1
                if task_range.bound is not None:
                    self._bound[task_range.bound] -= len(task_range.items)
            keep = [s for s in queue if s.job != job]
            queue.clear()
            queue.extend(keep)
        self._later = [entry for entry in self._later if entry[2].job != job]
        heapq.heapify(self._later)
        holders = []
        for w, in_flight in enumerate(self.in_flight):
            batches = [batch for batch in in_flight.held if batch.job == job]
            for batch in batches:
                batch.withdrawn = True
            if batches:
                holders.append(w)
        return holders

    def clear(self) -> None:
        """Forget everything that waits and is held: the pool ends."""
        self.shared.clear()
        for queue in self.own:
            queue.clear()
        self._bound = [0] * len(self.own)
        self._queued = 0
        self._later.clear()
        for w, in_flight in enumerate(self.in_flight):
            self.retire(w)
            in_flight.held.clear()
            in_flight.answered = in_flight.sent


def _piece(batch: Batch, start: int, stop: int) -> TaskRange:
    return TaskRange(
        batch.job,
        batch.func,
        batch.first + start,
        batch.items[start:stop],
        batch.retries,
        batch.bound,
        batch.limit,
        batch.past,
    )
