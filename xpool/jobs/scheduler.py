"""Who gets which task next: a pure policy, driven by events, answering with grants.

The words used here and in the engine:

* An **item** is one task as it travels: an index in its job and a pickled payload.
* A **span** is a run of consecutive items of one job that wait together.  A call is a span of
  one; a `map` is one span of all its chunks; an `imap` is a span that is still being fed.
* A **grant** is a piece cut from a span and given to one worker: one message.
* A **hand** is what one worker holds: grants in the order in which it will run them.  Workers
  answer item by item, in order, so positions are enough: no names travel back.

How much is a handful?  As much as the worker runs in `HANDFUL` seconds, judged by how long the
last tasks took, in two grants, so that the next is there when the first is done.  A worker that
may run long gets one item.  A share of what waits is the upper bound, so that the last items of a
map are spread over all workers.  When the guess was wrong and a worker sits on items behind a long
one, the engine takes them back (`surplus`, `take_back`) as soon as another worker has nothing.

Tasks that are tried again wait their time in a heap; the clock is the caller's.

Guarded by the engine's lock, all of it, except `Span.items`, to which a feeder appends on its own.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from xpool.errors import InternalError

__all__ = ["Grant", "Hand", "Item", "Limit", "Past", "Scheduler", "Span"]

HANDFUL = 0.004
"""Seconds of work that a worker has in hand.  Ten times the time a busy parent takes to answer."""

MOST_ITEMS = 512
"""Items in one grant at most: what is decoded ahead of a consumer stays small."""

MOST_BYTES = 48 * 1024
"""Payload bytes in one grant at most, unless one item alone is more: below a pipe's capacity."""

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


class Span:
    """Consecutive items of one job that wait.  ``first`` is the index of the leftmost.

    ``limit``: how long each may run, None: any time; for the engine, not looked at here.
    """

    __slots__ = (
        "bound", "feeder", "first", "func", "items", "job", "limit", "past", "queued", "retries",
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
        # True while it stands in a queue of the scheduler.  An open span that ran dry leaves the
        # queue, so that a slow iterable does not stand in front of other jobs.
        self.queued = False
        # Who appends to it, to be told how much was taken; for the engine, not looked at here.
        self.feeder: Any = None


class Grant:
    """A piece of a span in one worker's hand.  ``seq`` numbers its first item for that worker."""

    __slots__ = (
        "bound", "done", "feeder", "first", "func", "items", "job", "limit", "past", "retries",
        "seq", "taken", "withdrawn",
    )  # fmt: skip

    def __init__(self, span: Span, items: list[Item], seq: int) -> None:
        self.job = span.job
        self.func = span.func
        self.first = span.first
        self.items = items
        self.retries = span.retries
        self.bound = span.bound
        self.feeder = span.feeder
        self.limit = span.limit
        self.past = span.past
        # Its job has ended: none of its items is queued again.
        self.withdrawn = False
        self.seq = seq
        self.done = 0
        # Items from this one on were taken back: the worker will answer them as skipped.
        self.taken = len(items)


class Hand:
    """What one worker holds.  All counts are of items, since its process started."""

    __slots__ = ("accepting", "answered", "held", "left", "paused", "sent")

    def __init__(self) -> None:
        self.accepting = False
        # Told to skip what it has not begun; gets nothing new until its hand is empty.
        self.paused = False
        self.reset(None)

    def reset(self, left: int | None) -> None:
        """Begin with a new process that may run ``left`` items (None: any number)."""
        self.held: deque[Grant] = deque()
        self.sent = 0
        self.answered = 0
        self.left = left
        self.paused = False

    @property
    def size(self) -> int:
        """Items in hand that have no answer yet."""
        return self.sent - self.answered


class Scheduler:
    """The queue in front of the workers, and what each of them holds."""

    def __init__(self, workers: int) -> None:
        self.hands = [Hand() for _ in range(workers)]
        self.shared: deque[Span] = deque()
        self.own: list[deque[Span]] = [deque() for _ in range(workers)]
        # Ready workers with empty hands, oldest first.  Feeders read its truth without the lock.
        self.idle: dict[int, None] = {}
        # Items that wait in `own`, for each worker; and spans that stand in any queue.
        self._bound = [0] * workers
        self._queued = 0
        # Spans that wait for their time, then for a worker: (when, a number, span).
        self._later: list[tuple[float, int, Span]] = []
        self._numbers = itertools.count()
        self.cost = float("inf")
        """Seconds a task takes, by the last answers; what a handful is measured with."""

    # -- work comes in ---------------------------------------------------------------------

    def put(self, span: Span) -> None:
        """Queue a span, behind what waits already."""
        self._queue(span).append(span)

    def put_back(self, span: Span) -> None:
        """Queue a span in front: its items have waited their turn before."""
        self._queue(span).appendleft(span)

    def _queue(self, span: Span) -> deque[Span]:
        span.queued = True
        self._queued += 1
        if span.bound is None:
            return self.shared
        self._bound[span.bound] += len(span.items)
        return self.own[span.bound]

    def least_loaded(self) -> int:
        """Return the worker with the fewest items in hand and bound to it."""

        def load(w: int) -> tuple[int, bool]:
            return self.hands[w].size + self._bound[w], not self.hands[w].accepting

        return min(range(len(self.hands)), key=load)

    def waiting(self) -> int:
        """Return how many items wait for a worker."""
        queued = sum(len(s.items) for q in (self.shared, *self.own) for s in q)
        return queued + sum(len(span.items) for _, _, span in self._later)

    # -- work goes out ---------------------------------------------------------------------

    def next_grants(self) -> list[tuple[int, Grant]]:
        """Give what waits to the idle workers, one grant each; the caller sends them."""
        grants = []
        # The last to become idle first: what it needs is still in the processor's caches.
        for w in reversed(list(self.idle)):
            if not self._queued:
                break
            grant = self._cut(w)
            if grant is not None:
                grants.append((w, grant))
        return grants

    def refill(self, w: int) -> list[Grant]:
        """Bring a worker's hand up to a handful; called when it has answered."""
        hand = self.hands[w]
        grants: list[Grant] = []
        while self._queued and hand.accepting and len(hand.held) < 2:
            if hand.held and not self._worth_holding():
                break
            grant = self._cut(w)
            if grant is None:
                break
            grants.append(grant)
        return grants

    def _worth_holding(self) -> bool:
        return 2 * self.cost <= HANDFUL

    def _cut(self, w: int) -> Grant | None:
        """Cut the next grant for a worker, or None when nothing waits that it may run."""
        hand = self.hands[w]
        if not hand.accepting:
            return None
        for queue in (self.own[w], self.shared):
            while queue:
                span = queue[0]
                if not span.items and not self._dry(queue, span):
                    continue
                n = self._share(len(span.items), hand, queue is self.shared)
                items: list[Item] = []
                size = 0
                while len(items) < n and span.items:
                    size += len(span.items[0])
                    if items and size > MOST_BYTES:
                        break
                    items.append(span.items.popleft())
                if span.bound is not None:
                    self._bound[w] -= len(items)
                grant = Grant(span, items, hand.sent)
                span.first += len(items)
                if not span.items:
                    self._dry(queue, span)
                hand.held.append(grant)
                hand.sent += len(items)
                if hand.left is not None:
                    hand.left -= len(items)
                    hand.accepting = hand.left > 0
                self.idle.pop(w, None)
                return grant
        return None

    def _dry(self, queue: deque[Span], span: Span) -> bool:
        """Take an empty span off its queue; False when it was.  A feeder may append meanwhile."""
        queue.popleft()
        span.queued = False
        self._queued -= 1
        # The feeder appends first and looks at `queued` then; so one of us sees the other.
        if span.items:
            span.queued = True
            self._queued += 1
            queue.appendleft(span)
            return True
        return False

    def _share(self, waiting: int, hand: Hand, shared: bool) -> int:
        if not self._worth_holding():
            return 1
        n = min(MOST_ITEMS, int(HANDFUL / 2 / self.cost))
        if shared:
            n = min(n, -(-waiting // len(self.hands)))
        if hand.left is not None:
            n = min(n, hand.left)
        return max(1, n)

    # -- workers come, answer and go -------------------------------------------------------

    def ready(self, w: int, left: int | None) -> None:
        """Take a new process of worker ``w`` into service."""
        hand = self.hands[w]
        hand.reset(left)
        hand.accepting = True
        self.idle[w] = None

    def answered(self, w: int, n: int, seconds: float = 0.0) -> tuple[Grant, int]:
        """Note that the worker answered its next ``n`` items, all of one grant.

        Returns that grant and the index in the job of the first of them.
        """
        hand = self.hands[w]
        grant = hand.held[0] if hand.held else None
        if grant is None or grant.done + n > len(grant.items):
            raise InternalError(f"worker {w} answered {n} tasks that it did not hold")
        first = grant.first + grant.done
        grant.done += n
        hand.answered += n
        if grant.done == len(grant.items):
            hand.held.popleft()
            if not hand.held and hand.accepting:
                self.idle[w] = None
        if seconds > 0.0:
            # Up at once, down by halves: nothing is queued behind one long task among short ones.
            before = 0.0 if self.cost == float("inf") else min(self.cost, 1.0)
            self.cost = max(seconds / n, before / 2)
        return grant, first

    def retire(self, w: int) -> None:
        """Give nothing more to this worker."""
        self.hands[w].accepting = False
        self.idle.pop(w, None)

    def gone(self, w: int, began: int) -> tuple[Grant, int] | None:
        """Take back what a dead worker held; ``began`` counts the items that it had begun.

        Returns the grant and position of the one item that it was running, or None.  All
        items that it had not begun wait again, in front.
        """
        hand = self.hands[w]
        self.retire(w)
        lost: tuple[Grant, int] | None = None
        back: list[Span] = []
        for grant in hand.held:
            start = grant.done
            if start < grant.taken and grant.seq + start < began:
                if lost is not None:
                    raise InternalError(f"worker {w} was running two tasks at once")
                lost = grant, start
                start += 1
            if start < grant.taken and not grant.withdrawn:
                back.append(_piece(grant, start, grant.taken))
        for span in reversed(back):
            self.put_back(span)
        hand.reset(None)
        return lost

    def again(
        self, grant: Grant, position: int, *, killed: bool = True, when: float | None = None
    ) -> None:
        """Queue an item once more that failed; costs one of its retries.

        ``killed``: its worker did not survive it.  ``when``: not before that time, see `due`.
        """
        if grant.withdrawn:
            return
        span = _piece(grant, position, position + 1)
        span.retries -= 1
        span.past = Past(grant.past.tries + 1, grant.past.killed + killed)
        if when is None:
            self.put_back(span)
        else:
            heapq.heappush(self._later, (when, next(self._numbers), span))

    def due(self, now: float) -> float | None:
        """Queue what has waited until ``now``; return when the next is due, None: nothing waits."""
        while self._later and self._later[0][0] <= now:
            self.put_back(heapq.heappop(self._later)[2])
        return self._later[0][0] if self._later else None

    # -- taking back from a worker that sits on its hand ------------------------------------

    def running(self, w: int, began: int) -> tuple[Grant, int] | None:
        """Return the grant and position of the item that the worker is in, None: in none.

        ``began`` counts the items that it has begun; the last of them may have its answer.
        """
        for grant in self.hands[w].held:
            position = began - 1 - grant.seq
            if position < grant.done:
                return None
            if position < len(grant.items):
                return grant, position
        return None

    def surplus(self, w: int, began: int) -> bool:
        """Say whether the worker holds items that it has not begun and others could run."""
        held = self.hands[w].held
        if any(g.bound is not None for g in held):
            return False
        return any(max(began, g.seq + g.done) < g.seq + g.taken for g in held)

    def pause(self, w: int) -> None:
        """Give nothing more to this worker until its hand is empty and `resume` is called."""
        hand = self.hands[w]
        hand.paused = True
        hand.accepting = False

    def resume(self, w: int) -> None:
        """Take a paused worker back into service; its hand is empty."""
        hand = self.hands[w]
        hand.paused = False
        hand.accepting = hand.left is None or hand.left > 0
        if hand.accepting:
            self.idle[w] = None

    def take_back(self, w: int, limit: int) -> int:
        """Queue again what a paused worker has been told not to begin: items from ``limit`` on.

        The worker will answer each as skipped.  Returns how many were taken.
        """
        hand = self.hands[w]
        back = []
        count = 0
        for grant in hand.held:
            start = max(grant.done, limit - grant.seq)
            if start < grant.taken:
                if not grant.withdrawn:
                    back.append(_piece(grant, start, grant.taken))
                count += grant.taken - start
                grant.taken = start
        for span in reversed(back):
            self.put_back(span)
        if hand.left is not None:
            hand.left += count
        return count

    def skipped(self, w: int, n: int) -> None:
        """Note that the worker skipped its next ``n`` items.

        Those that `take_back` took wait elsewhere already; one that it left (the worker
        was at its door when told) waits again now.
        """
        hand = self.hands[w]
        for _ in range(n):
            grant = hand.held[0]
            position = grant.done
            if position < grant.taken and not grant.withdrawn:
                self.put_back(_piece(grant, position, position + 1))
            self.answered(w, 1)

    def withdraw(self, job: int) -> list[int]:
        """Forget what waits of a job that has ended, and queue none of it again.

        Returns the workers that hold some of it: they will answer it.
        """
        for queue in (self.shared, *self.own):
            for span in [s for s in queue if s.job == job]:
                span.queued = False
                self._queued -= 1
                if span.bound is not None:
                    self._bound[span.bound] -= len(span.items)
            keep = [s for s in queue if s.job != job]
            queue.clear()
            queue.extend(keep)
        self._later = [entry for entry in self._later if entry[2].job != job]
        heapq.heapify(self._later)
        holders = []
        for w, hand in enumerate(self.hands):
            grants = [grant for grant in hand.held if grant.job == job]
            for grant in grants:
                grant.withdrawn = True
            if grants:
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
        for w, hand in enumerate(self.hands):
            self.retire(w)
            hand.held.clear()
            hand.answered = hand.sent


def _piece(grant: Grant, start: int, stop: int) -> Span:
    return Span(
        grant.job,
        grant.func,
        grant.first + start,
        grant.items[start:stop],
        grant.retries,
        grant.bound,
        grant.limit,
        grant.past,
    )
