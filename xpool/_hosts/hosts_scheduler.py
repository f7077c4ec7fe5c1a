"""Which host gets which tasks, and which of them it may begin: a pure policy.

The terms, besides those of `xpool._engine.jobs.scheduler`:

* A **batch** is a run of consecutive items that was *staged* at a host: its payloads are there.
* A batch is **permitted** when the host may begin it.
* A permitted batch is **recalled** when the host is asked to give back its unbegun items.

`Quotas` says how much is permitted and staged.  No batch is larger than a host's share of the
waiting items, so the last items of a map are spread over all hosts.  When nothing waits in the
queue, a host with capacity gets batches that another has staged.  When nothing is staged, a
permitted batch of another host is recalled for it.

A host that has not finished a batch in `Quotas.look_seconds` is asked to give back the surplus
(`look`).  The surplus follows from the number of answers since the last look, not from the measured
time of a task, because on a busy machine a few tasks of a millisecond may take ten times as long.

Methods return messages, each with its host.  No function here reads a clock.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

from xpool._engine.jobs.ranges import CALLS, TaskRange, covers, name_of, piece
from xpool._engine.jobs.waiting import RangeQueue, Waiting
from xpool._hosts.messages import Back, Cancel, Drop, Forget, Func, Go, Stage


class StagedBatch:
    """A batch of items that was staged at a host.

    ``of_stream``: it was cut from a range that an input reader appends to.
    """

    __slots__ = ("items", "left", "nbytes", "number", "of_stream")

    def __init__(self, number: int, items: TaskRange, of_stream: bool) -> None:
        self.number = number
        self.items = items
        self.of_stream = of_stream
        self.nbytes = sum(map(len, items.items))
        self.left = len(items.items)  # number of items without an answer

    @property
    def priority(self) -> float:
        return self.items.terms.priority

    def item(self, name: tuple[int, int]) -> TaskRange:
        """Return one item as a range of its own."""
        position = (name[0] if self.items.job == CALLS else name[1]) - self.items.first
        part = piece(self.items, position, position + 1)
        part.bound = self.items.bound
        return part


class HostState:
    """One host: its workers, and the batches that it holds."""

    def __init__(self, number: int, first: int, workers: int) -> None:
        self.number = number
        self.first, self.workers = first, workers  # the pool's indices of its workers
        self.accepting = False  # the host has joined and is not leaving
        self.leaving = False
        self.known: set[int] = set()  # numbers of the functions that the host has
        # Staged, not permitted batches: the highest priority first, and of one priority the oldest.
        self.staged: deque[StagedBatch] = deque()
        self.staged_items = 0
        self.permitted: dict[tuple[int, int], StagedBatch] = {}  # permitted items, by name
        self.ahead = 0  # number of permitted items that any of its workers may run
        self.nbytes = 0  # bytes of staged and permitted batches
        self.recalled: dict[int, StagedBatch] = {}  # permitted batches that were recalled
        self.recallable: dict[int, StagedBatch] = {}  # permitted ones that can be, oldest first
        # For `HostScheduler.look`: whether the next look is planned, the newest batch and the
        # number of answers at the last look, the number of answers since the host joined, and the
        # most items that may be permitted after it was late (None: the cost decides).
        self.watched = False
        self.newest_then = self.answers_then = self.answers = 0
        self.pace: int | None = None

    def names(self, job: int, index: int | None) -> list[tuple[int, int]]:
        """Return the names of the permitted items of a job, or of one item of it."""
        return [
            name
            for name, batch in self.permitted.items()
            if batch.items.job == job and (index is None or name == name_of(job, index))
        ]

    def clear(self) -> None:
        for its in (self.staged, self.recallable, self.recalled, self.permitted):
            its.clear()
        self.ahead = self.staged_items = self.nbytes = 0


AHEAD_SECONDS = 0.05
"""Seconds of work that a host may begin without another message of the driver."""

AHEAD_BYTES = 64 * 1024 * 1024
"""A host that holds as many bytes gets only what its workers run at once."""

BATCH_SECONDS = 0.004
"""Seconds of work in a batch: of one worker if the batch is bound to it, otherwise of all workers
of the host."""

LONG_SECONDS = 0.25
"""Items that take longer are not permitted ahead: compared with them, a round trip is short."""

RECALL_SECONDS = 0.1
"""Seconds between two looks at a host that was permitted more items than it has workers."""

MOST_ITEMS = 512
"""The most items in one batch."""

MOST_AHEAD = 8192
"""The most items that are permitted to a host, unless it has more workers."""


class Quotas:
    """How many items are permitted to a host and staged there.  They follow from the cost of an
    item: its seconds, by the last answers."""

    def __init__(self) -> None:
        self.cost = math.inf

    @property
    def look_seconds(self) -> float:
        """Seconds between two looks at a host: by then, each worker should have begun a task."""
        return RECALL_SECONDS if self.cost > LONG_SECONDS else max(RECALL_SECONDS, 2 * self.cost)

    def batch_items(self, workers: int) -> int:
        """Return the number of items in a batch for this number of workers."""
        return max(1, min(MOST_ITEMS, int(BATCH_SECONDS * workers / self.cost)))

    def extra(self, host: HostState) -> int:
        """Return how many items each worker of a host may hold besides the one that it runs."""
        if self.cost > LONG_SECONDS or host.nbytes >= AHEAD_BYTES:
            return 0
        return min(MOST_AHEAD, math.ceil(AHEAD_SECONDS / self.cost))

    def most_ahead(self, host: HostState) -> int:
        """Return the most items, not bound to a worker, that may be permitted to a host."""
        most = min(MOST_AHEAD, host.workers * (1 + self.extra(host)))
        if host.pace is not None:
            most = min(most, host.pace)
        return max(host.workers, most)

    def room(self, host: HostState) -> int:
        """Return how many more items may be permitted to a host."""
        return self.most_ahead(host) - host.ahead if host.accepting else 0

    def room_staged(self, host: HostState) -> int:
        """Return how many more items may be staged at a host."""
        if not LONG_SECONDS < self.cost < math.inf or host.nbytes >= AHEAD_BYTES:
            return 0
        return host.workers - host.staged_items


BATCH_BYTES = 256 * 1024
"""The most bytes in one batch, unless a single item is larger."""

Message = tuple[int, Any]
"""A host, and a message for its agent."""


def _tell(found: list[Message], host: HostState, kind: type[Go] | type[Back], batch: Any) -> None:
    """Add a message about a batch, or add the batch to the last message."""
    if found and found[-1][0] == host.number and type(found[-1][1]) is kind:
        found[-1][1].batches.append(batch)
    else:
        found.append((host.number, kind([batch])))


class HostScheduler(Waiting):
    """The queue of waiting items, and the batches that each host holds.  Sets have the hosts that
    an event may concern, so that no event has to search all hosts.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.quotas = Quotas()
        self.hosts: dict[int, HostState] = {}
        self.workers = 0  # number of workers of all accepting hosts
        # Hosts that may be permitted more, in the order in which they get the next batches.  A host
        # that gets a batch goes to the end.  A host whose last task has given a value goes to the
        # front: its processes are warm.  Input readers read without the lock whether it is empty.
        self.with_capacity: OrderedDict[int, None] = OrderedDict()
        self.with_staged: dict[int, None] = {}
        # Hosts that were permitted more than their workers run at once, without a recall under way.
        self.recallable: dict[int, None] = {}
        self.with_bound: dict[int, None] = {}  # hosts with a worker that bound items wait for
        self.unwatched: dict[int, None] = {}
        """Hosts that were permitted more than their workers run at once.  The caller removes each
        and calls `look` with it after `Quotas.look_seconds`."""
        self.host_of: list[int] = []
        """The number of each worker's host, which may be gone."""
        self.bound_ahead: list[int] = []  # number of permitted items bound to each worker
        self._functions: dict[int, tuple[int, Any]] = {}
        self._batches = 0  # number of the last batch

    # -- hosts come and go -------------------------------------------------------------------------

    def expect(self, number: int, workers: int) -> None:
        """Add a host that will join; its workers get the next indices."""
        self.hosts[number] = HostState(number, len(self.host_of), workers)
        self.host_of += [number] * workers
        self.bound_ahead += [0] * workers
        self.extend(len(self.host_of))

    def join(self, number: int) -> None:
        host = self.hosts[number]
        if host.leaving:
            return
        host.accepting = True
        self.workers += host.workers
        self.with_capacity[number] = None
        if any(self.own[host.first : host.first + host.workers]):
            self.with_bound[number] = None

    def drain(self, number: int) -> list[Message]:
        """Permit nothing more to a host that will be removed; queue its staged batches again."""
        host = self.hosts[number]
        host.leaving = True
        if not host.accepting:
            return []
        host.accepting = False
        self.workers -= host.workers
        self.with_capacity.pop(number, None)
        found: list[Message] = []
        if host.staged:
            self._drop(host, list(host.staged), found)
        return found

    def lost(self, number: int) -> list[TaskRange]:
        """Remove a host that is gone.

        Returns the items that the host may have run, oldest first, and then the items that were
        bound to one of its workers.  Its staged batches are queued again, in front.
        """
        self.drain(number)
        host = self.hosts.pop(number)
        for sets in (self.with_staged, self.recallable, self.with_bound, self.unwatched):
            sets.pop(number, None)
        found = [batch.item(name) for name, batch in host.permitted.items()]
        its = range(host.first, host.first + host.workers)
        for w in its:
            self.bound_ahead[w] = 0
            while (task_range := self.own[w].front()) is not None:
                job, func, first = task_range.job, task_range.func, task_range.first
                items = self.own[w].take(len(task_range.items), 1 << 62)
                found += [
                    TaskRange(job, func, first + i, (item,), w) for i, item in enumerate(items)
                ]
        return found + self.later.take_out(lambda one: one.bound in its)

    def is_there(self, worker: int) -> bool:
        """Whether the host of a worker is in service or expected."""
        host = self.hosts.get(self.host_of[worker])
        return host is not None and not host.leaving

    def least_loaded(self) -> int | None:
        """Return the worker with the fewest items bound to it; None: no host is in service."""
        ahead, there = self.bound_ahead, filter(self.is_there, range(len(self.own)))
        return min(there, key=lambda w: (ahead[w] + self.own[w].bound, w), default=None)

    # -- work goes out -----------------------------------------------------------------------------

    def _queue(self, task_range: TaskRange) -> RangeQueue:
        if task_range.bound is not None:
            # The worker may be free although the host has no room for items that any worker may
            # run.
            host = self.hosts.get(self.host_of[task_range.bound])
            if host is not None and host.accepting:
                self.with_capacity.setdefault(host.number)
                self.with_bound[host.number] = None
        return super()._queue(task_range)

    def give(self) -> list[Message]:
        """Permit waiting items to the hosts with room, and stage more there."""
        found: list[Message] = []
        permitted = True
        while self.with_capacity and permitted:
            permitted = False
            for number in list(self.with_capacity):
                if not (self.queued or self.with_staged or self.recallable):
                    break
                host = self.hosts[number]
                room = self.quotas.room(host)
                batch = self._next(host, room, found)
                if batch is not None:
                    self._permit(host, batch, found)
                    self.with_capacity.move_to_end(number)
                    permitted = True
                elif room <= 0:
                    self._stage_ahead(host, found)
                    if number not in self.with_bound:
                        del self.with_capacity[number]  # the next answer adds it again
        return found

    def _next(self, host: HostState, room: int, found: list[Message]) -> StagedBatch | None:
        """Return the next batch for a host, which is then staged there; None: there is none."""
        if host.number in self.with_bound:
            batch = self._next_bound(host, found)
            if batch is not None:
                return batch
        if room <= 0:
            return None
        if self.ranked:
            self._fetch_higher(host, found)
        if host.staged and not self._overtakes(host.staged[0]):
            if host.staged[0].left <= room:
                batch = host.staged.popleft()
                host.staged_items -= batch.left
                self.update_donors(host)
                return batch
            if host.ahead >= host.workers:
                return None
            # The batch was cut when items took less time: it is too large for one host now.
            self._drop(host, [host.staged[0]], found)
        batch = self._stage(host, self.shared, room, found)
        if batch is None and host.ahead < host.workers:
            batch = self._from_another(host, room, found)
        return batch

    def _fetch_higher(self, host: HostState, found: list[Message]) -> None:
        """Queue a staged batch of another host again, if its priority is higher than that of all
        batches that ``host`` may get otherwise."""
        hosts, first = self.hosts, self.shared.first()
        waiting = -math.inf if first is None else first.terms.priority
        here = host.staged[0].priority if host.staged else -math.inf
        staged = [(hosts[number].staged[0].priority, number) for number in self.with_staged]
        highest, number = max(staged, default=(-math.inf, 0))
        if highest > max(waiting, here):
            self._drop(hosts[number], [hosts[number].staged[0]], found)

    def _overtakes(self, batch: StagedBatch) -> bool:
        """Whether items that wait in the queue go before a staged batch."""
        if self.ranked:
            first = self.shared.first()
            if first is None or first.terms.priority < batch.priority:
                return False
            if first.terms.priority > batch.priority:
                return True
        return batch.of_stream and self.shared.pass_streams()

    def _next_bound(self, host: HostState, found: list[Message]) -> StagedBatch | None:
        more = 1 + self.quotas.extra(host)
        waits = False
        for w in range(host.first, host.first + host.workers):
            if self.own[w] and self.bound_ahead[w] < more:
                batch = self._stage(host, self.own[w], more, found)
                if batch is not None:  # None: all waiting items were cancelled
                    return batch
            waits = waits or bool(self.own[w])
        if not waits:
            del self.with_bound[host.number]
        return None

    def _from_another(self, host: HostState, room: int, found: list[Message]) -> StagedBatch | None:
        """Return a batch that another host had staged; if none has, recall a permitted one."""
        for number in self.with_staged:
            donor = self.hosts[number]
            self._drop(donor, [donor.staged[-1]], found)
            return self._stage(host, self.shared, room, found)
        for number in self.recallable:
            self._recall(self.hosts[number], found)
            break
        return None

    def _recall(self, host: HostState, found: list[Message]) -> int:
        """Recall a host's newest batch; return how many items of it have no answer."""
        batch = host.recallable.pop(next(reversed(host.recallable)))
        host.recalled[batch.number] = batch
        part = batch.items
        _tell(found, host, Back, (batch.number, part.job, part.first, len(part.items)))
        self.update_donors(host)
        return batch.left

    def _drop(self, host: HostState, batches: list[StagedBatch], found: list[Message]) -> None:
        """Take staged batches back from a host, and queue them in front."""
        for batch in reversed(batches):
            host.staged.remove(batch)
            host.staged_items -= batch.left
            host.nbytes -= batch.nbytes
            self.put_back(batch.items)
        self.update_donors(host)
        found.append((host.number, Drop([batch.number for batch in batches])))

    def update_donors(self, host: HostState) -> None:
        """Note whether other hosts may get staged or permitted batches of a host."""
        if host.staged:
            self.with_staged[host.number] = None
        else:
            self.with_staged.pop(host.number, None)
        if host.ahead > host.workers and not host.recalled and host.recallable:
            self.recallable[host.number] = None
        else:
            self.recallable.pop(host.number, None)

    def keep(self, host: HostState, batch: StagedBatch, in_front: bool = False) -> None:
        """Note that a batch is staged at a host and not permitted."""
        # In front of the batches of the same priority, or behind them.
        place = bisect.bisect_left if in_front else bisect.bisect_right
        index = place(host.staged, -batch.priority, key=lambda one: -one.priority)
        host.staged.insert(index, batch)
        host.staged_items += batch.left
        self.update_donors(host)

    def _permit(self, host: HostState, batch: StagedBatch, found: list[Message]) -> None:
        items = batch.items
        for index in range(items.first, items.first + len(items.items)):
            host.permitted[name_of(items.job, index)] = batch
        if items.bound is None:
            host.ahead += batch.left
            host.recallable[batch.number] = batch
            self.update_donors(host)
            if host.ahead > host.workers:
                self._watch(host)
        else:
            self.bound_ahead[items.bound] += batch.left
        _tell(found, host, Go, batch.number)

    def _stage_ahead(self, host: HostState, found: list[Message]) -> None:
        """Stage items at a host that may have no more permitted items."""
        # The last items stay in the queue, for the hosts that are the first to have room.
        while (
            (most := self.quotas.room_staged(host)) > 0
            and (first := self.shared.first()) is not None
            and len(first.items) > self.workers
            and (batch := self._stage(host, self.shared, most, found)) is not None
        ):
            self.keep(host, batch)

    def _stage(
        self, host: HostState, queue: RangeQueue, most: int, found: list[Message]
    ) -> StagedBatch | None:
        """Cut a batch of at most ``most`` items from a queue and stage it; None: none waits."""
        first = queue.first()
        if first is None:
            return None
        n = min(most, self.quotas.batch_items(1 if first.bound is not None else host.workers))
        if first.bound is None:
            n = min(n, -(-len(first.items) // (self.workers or 1)))
        items = queue.take(max(1, n), BATCH_BYTES)
        part = TaskRange(
            first.job, first.func, first.first - len(items), items, first.bound, first.terms
        )  # fmt: skip
        if first.flow is not None:
            first.flow.taken(items)
        self._batches += 1
        batch = StagedBatch(self._batches, part, first.flow is not None)
        host.nbytes += batch.nbytes
        func, bound = part.func, part.bound
        if func not in host.known and func in self._functions:  # 0, a call's, is in neither
            host.known.add(func)
            found.append((host.number, Func(func, *self._functions[func])))
        at_host = None if bound is None else bound - host.first
        stage = Stage(batch.number, part.job, func, part.first, list(items), at_host, part.terms)
        found.append((host.number, stage))
        return batch

    # -- hosts that were permitted too much --------------------------------------------------------

    def look(self, number: int) -> list[Message]:
        """Recall items that a host has not begun in time.

        A host is late if it still has a batch from the last look, and holds more than twice as many
        items as it has answered since then.  From now on it may hold as many as it has answered,
        until it answers more between two looks, or has nothing to do.
        """
        found: list[Message] = []
        host = self.hosts.get(number)
        if host is None:
            return found
        host.watched = False
        answers = host.answers - host.answers_then
        oldest = next(iter(host.recallable), None)
        if oldest is not None and oldest <= host.newest_then and host.ahead > 2 * answers:
            host.pace = answers
            surplus = host.ahead - sum(batch.left for batch in host.recalled.values())
            surplus -= self.quotas.most_ahead(host)
            while surplus > 0 and host.recallable:
                surplus -= self._recall(host, found)
        elif host.pace is not None:
            host.pace = max(host.pace, answers) if host.ahead else None
            if host.accepting:
                self.with_capacity.setdefault(number)
        if host.ahead > host.workers or host.pace is not None:
            self._watch(host)
        return found

    def _watch(self, host: HostState) -> None:
        """Plan a look at a host."""
        if not host.watched:
            host.watched = True
            host.newest_then, host.answers_then = self._batches, host.answers
            self.unwatched[host.number] = None

    # -- answers come ------------------------------------------------------------------------------

    def settle(self, host: HostState, batch: StagedBatch, given: int = 0) -> None:
        """Note that one item of a permitted batch was answered, or given back with its bytes."""
        bound = batch.items.bound
        batch.nbytes -= given
        host.nbytes -= given
        if bound is None:
            host.ahead -= 1
        else:
            self.bound_ahead[bound] -= 1
        batch.left -= 1
        if not batch.left:
            host.recallable.pop(batch.number, None)
            host.recalled.pop(batch.number, None)
            host.nbytes -= batch.nbytes
        self.update_donors(host)

    def runs(self, job: int, index: int | None = None) -> bool:
        """Whether an item of a job, or this item, is permitted to a host and not answered."""
        return any(host.names(job, index) for host in self.hosts.values())

    def answered(self, number: int, job: int, first: int, tasks: int, ok: bool = False) -> bool:
        """Note the answers to consecutive items; return whether all of them were awaited.

        ``ok``: the items have values.  Then a host that has nothing left to do gets the next task.
        After an error, a death or a cancellation, the worker may be busy or gone, and a retry
        should go to another host.
        """
        host = self.hosts.get(number)
        if host is None:
            return False
        host.answers += tasks
        batches = [host.permitted.pop((job, i), None) for i in range(first, first + tasks)]
        for batch in batches:
            if batch is not None:
                self.settle(host, batch)
        if host.accepting:
            self.with_capacity.setdefault(number)
            if ok and not host.permitted:
                self.with_capacity.move_to_end(number, last=False)
        return None not in batches

    def again(
        self, number: int, job: int, item: int, killed: bool, when: Callable[[int], float]
    ) -> None:
        """Queue a failed item again, to run at the time ``when(n)`` after n tries."""
        host = self.hosts.get(number)
        batch = None if host is None else host.permitted.get((job, item))
        if batch is not None:
            part = batch.item((job, item))
            self.answered(number, job, item, 1)
            self.put_again(part, killed, when(part.terms.tries + 1))

    def given(self, number: int, batches: Iterable[int]) -> None:
        """Note that a host has given back the waiting items of recalled batches."""
        host = self.hosts.get(number)
        if host is not None:
            for batch in batches:
                host.recalled.pop(batch, None)
            self.update_donors(host)

    def unbegun(self, number: int, kept: int, job: int, first: int, tasks: int) -> list[Message]:
        """Note that a host has given back items, and has staged them as its batch ``kept``."""
        found: list[Message] = []
        host = self.hosts.get(number)
        if host is None:
            return found
        parts, of_stream = [], False
        for name in (name_of(job, index) for index in range(first, first + tasks)):
            batch = host.permitted.pop(name, None)
            if batch is not None:
                parts.append(batch.item(name))
                of_stream = batch.of_stream
                self.settle(host, batch, len(parts[-1].items[0]))
        if len(parts) == tasks and host.accepting:
            whole = parts[0]
            for part in parts[1:]:
                whole.items += part.items
            batch = StagedBatch(kept, whole, of_stream)
            host.nbytes += batch.nbytes
            self.keep(host, batch, in_front=True)
        else:  # the host is leaving, or some were withdrawn meanwhile
            found.append((number, Drop([kept])))
            for part in reversed(parts):
                self.put_back(part)
        if host.accepting:
            # The host goes behind the one for which the items were recalled.
            self.with_capacity[number] = None
            self.with_capacity.move_to_end(number)
        return found

    def withdraw(self, job: int, index: int | None = None) -> list[Message]:
        """Drop a job that has ended, or one item of it; return messages that stop running items."""
        found: list[Message] = []
        for host in self.hosts.values():
            staged = [batch for batch in host.staged if covers(batch.items, job, index)]
            if staged:
                self._drop(host, staged, found)
            names = host.names(job, index)
            for name in names:
                self.answered(host.number, *name, 1)
            if names:
                found.append((host.number, Cancel(job, index)))
        self.strike(job, index)  # includes the staged items, which `_drop` has queued again
        return found

    def clear(self) -> None:
        super().clear()
        for sets in (self.with_staged, self.recallable, self.unwatched):
            sets.clear()
        for host in self.hosts.values():
            host.clear()

    def learn(self, number: int, mode: int, payload: Any) -> None:
        self._functions[number] = mode, payload

    def forget(self, number: int) -> list[tuple[int, Any]]:
        """Drop a function; return the messages to the hosts that have it."""
        self._functions.pop(number, None)
        found: list[tuple[int, Any]] = []
        for host in self.hosts.values():
            if number in host.known:
                host.known.discard(number)
                found.append((host.number, Forget(number)))
        return found
