"""What each host holds, as the driver knows it.  `xpool._hosts.hosts_scheduler` has the terms."""

from __future__ import annotations

import bisect
from collections import OrderedDict, deque
from typing import Any, NamedTuple

from xpool._engine.jobs.ranges import CALLS, TaskRange, name_of, piece
from xpool._hosts.messages import Forget, Func, Stage


class Lost(NamedTuple):
    """An item that a lost host may have run, as a range; ``again``: it may be retried."""

    item: TaskRange
    again: bool

    @property
    def name(self) -> tuple[int, int]:
        """Job and index, as the pool knows them."""
        return name_of(self.item.job, self.item.first)


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

    def stage(self, first: int) -> Stage:
        """Return the message that stages it at a host; ``first``: the index of its first worker."""
        its = self.items
        bound = None if its.bound is None else its.bound - first
        items = list(its.items)
        return Stage(self.number, its.job, its.func, its.first, items, bound, its.terms)


class HostState:
    """One host: its workers, and the batches that it holds."""

    def __init__(self, number: int, first: int, workers: int) -> None:
        self.number = number
        self.first, self.workers = first, workers  # the pool's indices of its workers
        self.accepting = False  # it has joined and is not leaving
        self.leaving = False
        self.known: set[int] = set()  # numbers of the functions that it has
        # Staged, not permitted batches: the highest priority first, and of one priority the oldest.
        self.staged: deque[StagedBatch] = deque()
        self.staged_items = 0
        self.permitted: dict[tuple[int, int], StagedBatch] = {}  # permitted items, by name
        self.ahead = 0  # number of permitted items that any of its workers may run
        self.nbytes = 0  # of staged and permitted batches
        self.recalled: dict[int, StagedBatch] = {}  # permitted batches that were recalled
        self.recallable: dict[int, StagedBatch] = {}  # those that can be recalled, oldest first
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


class HostTable:
    """All hosts, and the sets of hosts that events may concern, so that no event has to search."""

    def __init__(self) -> None:
        self.hosts: dict[int, HostState] = {}
        self.workers = 0  # of all accepting hosts
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
        and calls `HostScheduler.look` with it after `Quotas.look_seconds`."""
        self.host_of: list[int] = []
        """The number of each worker's host, which may be gone."""
        self.bound_ahead: list[int] = []  # number of permitted items bound to each worker
        self._functions: dict[int, tuple[int, Any]] = {}

    def expect(self, number: int, workers: int) -> None:
        """Add a host that will join; its workers get the next indices."""
        self.hosts[number] = HostState(number, len(self.host_of), workers)
        self.host_of += [number] * workers
        self.bound_ahead += [0] * workers

    def accept(self, host: HostState) -> None:
        host.accepting = True
        self.workers += host.workers
        self.with_capacity[host.number] = None

    def refuse(self, host: HostState) -> None:
        """Note that a host is leaving."""
        host.accepting = False
        self.workers -= host.workers
        self.with_capacity.pop(host.number, None)

    def remove(self, number: int) -> HostState:
        for its in (self.with_staged, self.recallable, self.with_bound, self.unwatched):
            its.pop(number, None)
        host = self.hosts.pop(number)
        for w in range(host.first, host.first + host.workers):
            self.bound_ahead[w] = 0
        return host

    def is_there(self, worker: int) -> bool:
        """Whether the host of a worker is in service or expected."""
        host = self.hosts.get(self.host_of[worker])
        return host is not None and not host.leaving

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
        staged, priority = host.staged, batch.priority
        if in_front and (not staged or staged[0].priority <= priority):
            staged.appendleft(batch)
        elif not in_front and (not staged or staged[-1].priority >= priority):
            staged.append(batch)
        else:
            # In front of those of its priority, or behind them.
            place = bisect.bisect_left if in_front else bisect.bisect_right
            staged.insert(place(staged, -priority, key=lambda one: -one.priority), batch)
        host.staged_items += batch.left
        self.update_donors(host)

    def permit(self, host: HostState, batch: StagedBatch) -> None:
        """Note that a host may begin a batch."""
        items = batch.items
        for index in range(items.first, items.first + len(items.items)):
            host.permitted[name_of(items.job, index)] = batch
        if items.bound is None:
            host.ahead += batch.left
            host.recallable[batch.number] = batch
            self.update_donors(host)
        else:
            self.bound_ahead[items.bound] += batch.left

    def watch(self, host: HostState, newest: int) -> None:
        """Plan a look at a host; ``newest``: the number of the last batch."""
        if not host.watched:
            host.watched = True
            host.newest_then, host.answers_then = newest, host.answers
            self.unwatched[host.number] = None

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

    def clear(self) -> None:
        for its in (self.with_staged, self.recallable, self.unwatched):
            its.clear()
        for host in self.hosts.values():
            host.clear()

    # -- functions ---------------------------------------------------------------------------------

    def learn(self, number: int, mode: int, payload: Any) -> None:
        self._functions[number] = mode, payload

    def function_for(self, host: HostState, number: int) -> Func | None:
        """Return the message with a function that a host lacks; None: it has it, or needs none."""
        if not number or number in host.known or number not in self._functions:
            return None
        host.known.add(number)
        return Func(number, *self._functions[number])

    def forget(self, number: int) -> list[tuple[int, Any]]:
        """Drop a function; return the messages to the hosts that have it."""
        self._functions.pop(number, None)
        found: list[tuple[int, Any]] = []
        for host in self.hosts.values():
            if number in host.known:
                host.known.discard(number)
                found.append((host.number, Forget(number)))
        return found
