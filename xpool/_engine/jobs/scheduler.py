"""Decides which worker gets which task: a pure policy that turns events into batches.

Terms used here and in the engine:

* An **item** is one task: an index in its job and a pickled payload.
* A **task range** is a run of consecutive waiting items of one job.  A `map` is one range of all
  its chunks; an `imap` is a range to which items are still appended; so are calls, see `CALLS`.
* A **batch** is a part of a task range that is given to one worker in one message.
* **In flight** at a worker are its batches, in the order in which it runs them.  Workers answer
  item by item in this order, so answers carry no names.

`BatchSizes` says how many items make a batch and how many batches a worker holds.  A worker gets at
most its share of the waiting items, so that the last items of a map are spread over all workers.
Idle workers divide a single batch evenly.  If the estimate was wrong and a worker holds items
behind a long one, the engine takes them back (`surplus`, `take_back`) as soon as another worker is
idle.  It also takes back items that a worker has not begun when others of a higher priority wait
(`overtaken`).

Items to be retried wait in a heap until their time; the caller supplies the clock.

An item whose worker has died for lack of memory is retried **alone**.  While it waits, workers get
only bound items that came before it.  When no worker holds an item, the scheduler gives this one to
a worker, and no other item until it has ended.  Later items of the same function, and items behind
these, wait for memory: see `HeavyFunctions`.

The engine's lock guards all of it, except `TaskRange.items`, to which an input reader appends
without it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from xpool._calls.terms import Limit, Terms
from xpool._engine.jobs.ranges import CALLS, Batch, Item, TaskRange, covers, piece
from xpool._engine.jobs.waiting import HeavyFunctions, RangeQueue, Waiting
from xpool.errors import InternalError

__all__ = ["CALLS", "Batch", "InFlight", "Item", "Limit", "Scheduler", "TaskRange", "Terms"]

PREFETCH_SECONDS = 0.004
"""Seconds of work in flight at a worker.  Ten times the time a busy parent takes to answer."""

AHEAD_SECONDS = 0.020
"""Seconds of work that a worker holds besides its running item, if items are not short and many
wait.  Four times as long as a computing thread keeps the interpreter."""

SHORT_SECONDS, LONG_SECONDS = 1e-4, 0.25
"""`AHEAD_SECONDS` applies to items between these: with shorter ones the parent is the bottleneck,
and with longer ones the time between two does not matter."""

MOST_ITEMS = 512
"""Most items in one batch, so that few results are decoded before the consumer takes them."""

MOST_BYTES = 48 * 1024
"""Most payload bytes in one batch of several items: below a pipe's capacity."""


class BatchSizes:
    """How many items make a batch, and how many batches a worker holds.

    The sizes follow from ``cost``, the seconds that an item takes by the latest answers; infinity:
    unknown.  It rises at once and falls by half at most, so few items are queued behind a long one.
    Then an item of more than a second counts as one second, so it has no effect a dozen short items
    later.

    A worker has as many items in flight as it runs in `PREFETCH_SECONDS`, in two batches: the
    second is there when the first is done.  A batch has one item if items take longer.  If many
    wait, a worker holds more batches, so that it does not wait for the parent, whose engine gets
    the interpreter late while the program computes.
    """

    def __init__(self) -> None:
        self.cost = math.inf

    @property
    def items(self) -> int:
        if 2 * self.cost > PREFETCH_SECONDS:
            return 1
        return min(MOST_ITEMS, int(PREFETCH_SECONDS / 2 / self.cost))

    def most_held(self, share: int | None = None) -> int:
        """Return how many batches a worker may hold.

        ``share``: how many of the waiting items are for this worker; None: all.
        """
        if SHORT_SECONDS < self.cost <= LONG_SECONDS:
            items = self.items
            more = math.ceil(AHEAD_SECONDS / (items * self.cost))
            if share is None:
                return 1 + more
            if share >= items:
                return 1 + min(more, share // items)
        return 2 if 2 * self.cost <= PREFETCH_SECONDS else 1


class InFlight:
    """The items that one worker holds, and counts of its items since its process started."""

    __slots__ = ("accepting", "answered", "held", "left", "paused", "sent")

    def __init__(self) -> None:
        self.accepting = False
        # Recalled: the worker skips items that it has not begun, and gets no new ones until it has
        # answered all.
        self.paused = False
        self.reset(None)

    def reset(self, left: int | None) -> None:
        """Start counting for a new process, which may run ``left`` items (None: any number)."""
        self.held: deque[Batch] = deque()
        self.sent = 0
        self.answered = 0
        self.left = left
        self.paused = False

    def is_below(self, task_range: TaskRange) -> bool:
        """Whether the last batch has a lower priority than a range."""
        return bool(self.held) and self.held[-1].terms.priority < task_range.terms.priority

    @property
    def size(self) -> int:
        """Items in flight that have no answer yet."""
        return self.sent - self.answered


class Scheduler(Waiting):
    """The queues of waiting items, and what each worker holds.

    ``describe(job, WHOLE)`` names the function of a job; "": not known.
    """

    def __init__(
        self, workers: int, describe: Callable[[int, int], str] = lambda job, index: ""
    ) -> None:
        super().__init__(workers)
        self.size = workers  # workers from this index on get no more tasks: see `resize`
        self.in_flight = [InFlight() for _ in range(workers)]
        self.lone: int | None = None  # the worker that has an item that runs alone
        # When such an item began to wait: the last index by worker and job of the bound items.
        self._before: dict[tuple[int, int], int] = {}
        self.heavy = HeavyFunctions(self.queued, describe)
        # Ready workers with nothing in flight, longest idle first.  Input readers test it for truth
        # without the lock.
        self.idle: dict[int, None] = {}
        self.sizes = BatchSizes()

    # -- work comes in ---------------------------------------------------------------------
    def least_loaded(self, newest: bool = False) -> int:
        """Return the worker with the fewest items in flight and bound to it.

        Of several idle workers, this is the longest idle, or the ``newest`` (see `next_batches`).
        """
        for w in reversed(self.idle) if newest else self.idle:
            if not self.own[w].bound:
                return w

        def load(w: int) -> tuple[int, bool]:
            # If two are equal, prefer one that gets tasks now to one that starts or is recalled.
            return self.in_flight[w].size + self.own[w].bound, not self.in_flight[w].accepting

        return min(range(self.size), key=load)

    def resize(self, size: int) -> None:
        """Set the number of workers; the caller retires surplus ones.

        No item may be bound to a surplus worker: see `bound_from`.
        """
        self.size = size
        while len(self.in_flight) < size:
            self.in_flight.append(InFlight())
        self.extend(size)

    def bound_from(self, w: int) -> bool:
        """Whether an item is bound to worker ``w`` or to a worker with a higher number."""
        held = (batch.bound for in_flight in self.in_flight[w:] for batch in in_flight.held)
        bounds = itertools.chain(held, self.bounds())
        return any(bound is not None and bound >= w for bound in bounds)

    # -- work goes out ---------------------------------------------------------------------

    def next_batches(
        self, newest: bool = False, most: int | None = None
    ) -> list[tuple[int, Batch]]:
        """Give waiting items to idle workers, one batch each; the caller sends them.

        Gives to at most ``most`` workers; None: to all.

        The longest idle worker comes first, so that short tasks that come one by one are spread
        over all workers, whose devices or models would be idle otherwise.  For a caller that waits
        for its task, ``newest``: the worker that became idle last comes first; it still polls for
        the next task, and its data are in its processor's caches.
        """
        batches: list[tuple[int, Batch]] = []
        order = list(self.idle)
        if newest:
            order.reverse()
        heavy = bool(self.heavy.needs)
        if heavy:
            self.heavy.settle(order)
        if self.alone in self.queued and any(one.held for one in self.in_flight):
            order = [w for w in order if self.own[w]]
        all_idle = len(order) == self.size and most is None and not heavy
        for i, w in enumerate(order):
            if not self.queued or len(batches) == most:
                break
            batch = self._cut(w, self.size - i if all_idle else self.size)
            if batch is not None:
                batches.append((w, batch))
                if w == self.lone:
                    break
        if heavy and batches and len(batches) != most:
            # The next item may be one that a worker may have for which the first needed too much.
            most = None if most is None else most - len(batches)
            batches += self.next_batches(newest, most)
        return batches

    def give(
        self, w: int, job: int, func: int, first: int, items: list[Item], terms: Terms
    ) -> Batch:
        """Record that a worker gets these items; return them as a batch.

        A caller from outside gives an idle worker an unbound item, while nothing is queued: waiting
        items must not be overtaken, whichever worker they are for.
        """
        if terms.priority:
            self.ranked = True
        in_flight, n = self.in_flight[w], len(items)
        batch = Batch()
        batch.job, batch.func, batch.first, batch.items = job, func, first, items
        batch.terms, batch.seq, batch.taken = terms, in_flight.sent, n
        in_flight.held.append(batch)
        in_flight.sent += n
        if in_flight.left is not None:
            in_flight.left -= n
            in_flight.accepting = in_flight.left > 0
        self.idle.pop(w, None)
        return batch

    def refill(self, w: int) -> list[Batch]:
        """Give a worker that has answered as many batches as it may hold."""
        in_flight = self.in_flight[w]
        batches: list[Batch] = []
        held = in_flight.held
        if self.heavy.needs and not held:
            self.heavy.settle((w,))
        while self.queued and in_flight.accepting and len(held) < self._most_held(w):
            batch = self._cut(w, self.size)
            if batch is None:
                break
            batches.append(batch)
        return batches

    def _most_held(self, w: int) -> int:
        if self.own[w].bound:
            # Only this worker may run its bound items, so it leaves no share to others.
            return self.sizes.most_held()
        front = self.shared.front()
        return self.sizes.most_held(0 if front is None else len(front.items) // self.size)

    def _cut(self, w: int, among: int) -> Batch | None:
        """Cut the next batch for a worker; None: no item waits that it may run.

        ``among``: the number of workers that divide a single batch.
        """
        in_flight = self.in_flight[w]
        if not in_flight.accepting:
            return None
        # Its own queue first: no other worker may run bound items.
        queues: Iterable[RangeQueue] = (self.own[w], self.shared)
        if self.alone in self.queued:
            queues = self._beside_alone(w)
        elif self.ranked:
            queues = self._queues(w)
        for queue in queues:
            task_range = queue.first()
            if task_range is not None:
                if self.ranked and in_flight.is_below(task_range):
                    # Another worker may be free before this one has run the items that it holds.
                    return None
                n = self._most_items(in_flight, len(task_range.items), queue is self.shared, among)
                if self.heavy.needs and queue is self.shared:
                    n = self._most_by_memory(w, task_range, n)
                    if not n:
                        continue
                first = task_range.first  # `take` moves the start of the range behind the items
                items = queue.take(n, MOST_BYTES)
                batch = self.give(
                    w, task_range.job, task_range.func, first, items, task_range.terms
                )
                batch.bound, batch.flow = task_range.bound, task_range.flow
                if self.heavy.needs and len(in_flight.held) == 1:
                    self.heavy.given(w, batch)
                if queue is self.alone:
                    self.lone = w
                    self.queued.add(queue)  # so that no item is given without a look at this queue
                return batch
        return None

    def _beside_alone(self, w: int) -> Iterable[RangeQueue]:
        """Return the queues from which worker ``w`` gets items while one waits to run alone, or
        runs."""
        held = [batch for in_flight in self.in_flight for batch in in_flight.held]
        if not held:
            self.lone = None
            if self.alone.first() is not None:
                return (self.alone,)
            self.queued.discard(self.alone)
            return self._queues(w)
        # A running item may wait for one that is bound to another worker.
        task_range = self.own[w].first() if self.lone is None else None
        if task_range is None or task_range.first > self._before.get((w, task_range.job), -1):
            return ()
        return (self.own[w],)

    def _most_by_memory(self, w: int, task_range: TaskRange, n: int) -> int:
        """Return how many of ``n`` items a worker may have in its next batch; 0: they wait."""
        if not self.heavy.may_begin(w, task_range, self._holding()):
            return 0
        # Each of several calls may have another function.
        heavy = task_range.job == CALLS or self.heavy.name(task_range) in self.heavy.needs
        return 1 if heavy else n

    def _holding(self, besides: int | None = None) -> list[int]:
        """Return the workers that have items; ``besides``: not this one."""
        return [v for v, one in enumerate(self.in_flight) if one.held and v != besides]

    @property
    def holds_back(self) -> bool:
        """Whether the items that a worker may get depend on the items that other workers hold."""
        return self.alone in self.queued or bool(self.heavy.needs)

    def ran_out(self, batch: Batch, position: int, peaks: Mapping[str, int]) -> None:
        """Record that an item's worker has died for lack of memory; its function is heavy now.

        ``peaks``: the most bytes of a worker by function.
        """
        item = piece(batch, position, position + 1)
        held = [(w, one.held[0]) for w, one in enumerate(self.in_flight) if one.held]
        self.heavy.add(item, peaks.get(self.heavy.name(item), 0), held)

    def measured(self, free: float, each: int | None, sizes: Mapping[int, int]) -> None:
        """Record the machine's free memory, the limit of each worker, and what each has."""
        limits = math.inf
        if each is not None:
            others = sum(not self.heavy.has_heavy(w) for w in self._holding())
            limits = each * max(0, self.size - others)
        self.heavy.measured(free, limits, sizes)
        # Until then, the need of its function may not be known.
        if self.alone not in self.queued and not any(one.terms.alone for one in self.later):
            self.heavy.forget(self.size)

    def had_more(self, w: int) -> bool:
        """Whether the latest item of a worker was allowed more memory than an ordinary item."""
        return (w == self.lone and self.alone in self.queued) or self.heavy.has_heavy(w)

    def put_back(self, task_range: TaskRange) -> None:
        if task_range.terms.alone and not self.alone:
            self._before = {}
            held = (batch for in_flight in self.in_flight for batch in in_flight.held)
            parts: Iterable[Batch | TaskRange] = itertools.chain(held, self.later, *self.own)
            for part in parts:
                if part.bound is not None:
                    last, key = part.first + len(part.items) - 1, (part.bound, part.job)
                    self._before[key] = max(last, self._before.get(key, last))
        super().put_back(task_range)

    def _queues(self, w: int) -> tuple[RangeQueue, RangeQueue]:
        """Return the queues from which worker ``w`` gets items, in order of their priorities."""
        own, shared = self.own[w], self.shared
        mine, any_ones = own.first(), shared.first()
        if mine is None or any_ones is None or mine.terms.priority >= any_ones.terms.priority:
            return own, shared
        return shared, own

    def _most_items(self, in_flight: InFlight, waiting: int, shared: bool, among: int) -> int:
        """Return how many of the ``waiting`` items of a range a worker gets in its next batch."""
        n = self.sizes.items
        if shared:
            # Rounded up, so that each worker gets one of the last few items.
            n = min(n, -(-waiting // (among if waiting <= n else self.size)))
        if in_flight.left is not None:
            n = min(n, in_flight.left)
        return max(1, n)

    # -- workers come, answer and go -------------------------------------------------------

    def ready(self, w: int, left: int | None) -> None:
        in_flight = self.in_flight[w]
        in_flight.reset(left)
        in_flight.accepting = True
        self.idle[w] = None

    def next_answers(self, w: int) -> tuple[int, int]:
        """Return the job of the worker's next answers, and how many of them are of one batch."""
        held = self.in_flight[w].held
        return (held[0].job, len(held[0].items) - held[0].done) if held else (CALLS, 0)

    def answered(self, w: int, n: int, seconds: float = 0.0) -> tuple[Batch, int]:
        """Record that the worker answered its next ``n`` items, all of one batch.

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
            before = self.sizes.cost
            least = min(before, 1.0) / 2 if before < math.inf else 0.0
            self.sizes.cost = max(seconds / n, least)
        if self.heavy.needs and in_flight.held:
            self.heavy.goes_on(w, in_flight.held[0])
        return batch, first

    def retire(self, w: int) -> None:
        """Give this worker no more items."""
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
            # The worker has begun this item and not answered it, so it died during the item.
            if start < batch.taken and batch.seq + start < began:
                if lost is not None:
                    raise InternalError(f"worker {w} was running two tasks at once")
                lost = batch, start
                start += 1
            if start < batch.taken and not batch.withdrawn:
                back.append(piece(batch, start, batch.taken))
        # In reverse order, because each is queued in front of the others.
        for task_range in reversed(back):
            self.put_back(task_range)
        in_flight.reset(None)
        return lost

    def again(
        self,
        batch: Batch,
        position: int,
        *,
        killed: bool = True,
        when: float | None = None,
        alone: bool = False,
    ) -> None:
        """Queue a failed item again: see `put_again`."""
        if not batch.withdrawn:
            self.put_again(piece(batch, position, position + 1), killed, when, alone)

    # -- taking back items that a worker does not run ----------------------------------------

    def running(self, w: int, began: int) -> tuple[Batch, int] | None:
        """Return the batch and position of the item that the worker runs; None: it runs none.

        ``began``: how many items the worker has begun.  The worker may have answered the last of
        these.
        """
        for batch in self.in_flight[w].held:
            position = began - 1 - batch.seq
            if position < batch.done:
                # The last item that it began is answered, so it runs none now.
                return None
            if position < len(batch.items):
                return batch, position
        return None

    def surplus(self, w: int, began: int) -> bool:
        """Return whether the worker holds items that it has not begun and others could run."""
        return any(
            # No other worker could run bound items.
            g.bound is None and max(began, g.seq + g.done) < g.seq + g.taken
            for g in self.in_flight[w].held
        )

    def overtaken(self, w: int, began: int) -> bool:
        """Return whether an item that waits for worker ``w`` has a higher priority than one that it
        holds and has not begun."""
        if not (self.ranked and self.queued):
            return False
        task_range = None
        for queue in reversed(self._queues(w)):
            first = queue.first()
            # A heavy item may not have enough memory even when the worker has answered all.
            if first is not None and (
                queue is not self.shared
                or not self.heavy.needs
                or self.heavy.may_begin(w, first, self._holding(besides=w))
            ):
                task_range = first
        return task_range is not None and any(
            g.terms.priority < task_range.terms.priority
            and max(began, g.seq + g.done) < g.seq + g.taken
            for g in self.in_flight[w].held
        )

    def pause(self, w: int) -> None:
        """Give this worker no items until it has answered all and `resume` is called."""
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
        """Queue the items again that a recalled worker may not begin: those from ``limit`` on.

        The worker will answer each as skipped.  Returns their number.
        """
        in_flight = self.in_flight[w]
        back = []
        count = 0
        for batch in in_flight.held:
            # `limit - batch.seq` is negative if all of the batch is behind the limit.
            start = max(batch.done, limit - batch.seq)
            if start < batch.taken:
                if not batch.withdrawn:
                    back.append(piece(batch, start, batch.taken))
                count += batch.taken - start
                batch.taken = start
        for task_range in reversed(back):
            self.put_back(task_range)
        if w == self.lone and not any(batch.done < batch.taken for batch in in_flight.held):
            self.lone = None  # the item that was to run alone waits again, or is cancelled
            if self.alone.front() is None:
                self.queued.discard(self.alone)
        # These items do not count for `maxtasksperchild`: the worker never runs them.
        if in_flight.left is not None:
            in_flight.left += count
        return count

    def skipped(self, w: int, n: int) -> None:
        """Record that the worker skipped its next ``n`` items.

        `take_back` has queued most of these.  It leaves an item that the worker seemed about to
        begin; such an item is queued now.
        """
        in_flight = self.in_flight[w]
        for _ in range(n):
            batch = in_flight.held[0]
            position = batch.done
            if position < batch.taken and not batch.withdrawn:
                self.put_back(piece(batch, position, position + 1))
            self.answered(w, 1)

    def withdraw(self, job: int, index: int | None = None) -> list[int]:
        """Drop the waiting items of a job that has ended, and queue none of its items again.

        ``index``: only this item; used for calls, which share the job `CALLS`.

        Returns the workers that hold such items; they will still answer them.
        """
        self.strike(job, index)
        self.alone.front()  # removes an empty range, which would hold up others
        if self.lone is not None:
            self.queued.add(self.alone)
        holders = []
        for w, in_flight in enumerate(self.in_flight):
            found = [batch for batch in in_flight.held if covers(batch, job, index)]
            for batch in found:
                if index is not None and len(batch.items) > 1:
                    batch = _single_out(in_flight.held, batch, index - batch.first)
                batch.withdrawn = True
            if found:
                holders.append(w)
        return holders

    def clear(self) -> None:
        super().clear()
        self.lone = None
        self.heavy.clear()
        for w, in_flight in enumerate(self.in_flight):
            self.retire(w)
            in_flight.held.clear()
            # Nothing is in flight any more: later answers of these workers are ignored.
            in_flight.answered = in_flight.sent


def _single_out(held: deque[Batch], batch: Batch, position: int) -> Batch:
    """Make an item of a batch in flight a batch of its own, and return that.

    The worker need not know: it answers in order, whichever message an item came in.
    """
    at = held.index(batch)
    cuts = [0, position, position + 1, len(batch.items)]
    parts = [batch.cut(a, b) for a, b in itertools.pairwise(cuts) if b > a]
    del held[at]
    for part in reversed(parts):
        if part.done < len(part.items):  # else the item is answered
            held.insert(at, part)
    # Where nothing comes before the item, the item is the first part.
    return parts[position > 0]
