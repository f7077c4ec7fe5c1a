"""Which host gets which tasks, and which of them it may begin: a pure policy.

The words, beside those of `xpool._engine.jobs.scheduler`:

* A **lot** is a batch of consecutive items that was *staged* at a host: its payloads are there.
* A lot is **permitted** when the host may begin it.  What is permitted and not answered is what a
  host that vanishes may have run; what was only staged goes elsewhere, and costs nobody a try.

How much is permitted?  As many items as the host has workers, and what its workers do in
`AHEAD_SECONDS`, since the next permission is a round trip away.  How much is staged?  What they do
in `STAGED_SECONDS`, but not more than `STAGED_BYTES`.  A share of what waits is the upper bound of
each lot, so that the last items of a map are spread over all hosts.  Where nothing waits in the
queue, a host with room gets what another has staged; where nothing is staged, another is asked to
give back what it has been permitted and has not begun.

How long a task takes is a guess, by the last answers.  Where it was too low, a host has been
permitted more than it can begin, and all of that would be lost with it.  So a host that has not
come to the end of a lot in `RECALL_SECONDS` is asked to give back what is too much (`look`).  What
it has answered meanwhile says how much that is; a guess that has risen does not, since the time of
a few tasks of a millisecond may be tenfold on a busy machine, and fall again.

Methods return messages, each with the host that it is for.  Nothing here knows a clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from xpool._engine.jobs.ranges import Past, TaskRange, covers, name_of
from xpool._engine.jobs.waiting import Waiting
from xpool._hosts.holdings import Host, Lost, Lot
from xpool._hosts.messages import Back, Cancel, Drop, Forget, Func, Go

__all__ = ["HostScheduler", "Message"]

AHEAD_SECONDS = 0.05
"""Seconds of work for which a host may begin without another word of the driver."""

STAGED_SECONDS = 1.0
STAGED_BYTES = 64 * 1024 * 1024
"""What is sent ahead to a host, at most: in seconds of its work, and in bytes."""

LOT_SECONDS = 0.004
"""Seconds of the work of those in a lot who may run it: of one worker, or of all of a host."""

LONG_SECONDS = 0.25
"""Of items that take longer none is permitted ahead: a round trip is short beside them."""

RECALL_SECONDS = 0.1
"""Seconds between two looks at a host that was permitted more than it has workers."""

MOST_ITEMS = 512
"""Items in one lot at most."""

MOST_AHEAD = 8192
"""Items that a host may have been permitted at most, unless it has more workers."""

LOT_BYTES = 256 * 1024
"""Bytes in one lot at most, unless one item alone is more."""

Message = tuple[int, Any]
"""A host, and a message for its agent."""


class HostScheduler(Waiting):
    """The queue in front of the hosts, and what each of them holds."""

    def __init__(self) -> None:
        super().__init__(0)
        self.hosts: dict[int, Host] = {}
        self.workers = 0  # of all hosts that accept
        self.cost = float("inf")
        """Seconds that an item takes, by the last answers."""
        # Hosts that may be permitted something, longest first.  Input readers read its truth
        # without the lock.
        self.hungry: dict[int, None] = {}
        # Hosts that have something staged, that were permitted more than their workers can run and
        # are not asked for any of it, that could have more staged, and to whose workers something
        # is bound that waits: nobody looks for them among all, at each event.
        self._stagers: dict[int, None] = {}
        self._askable: dict[int, None] = {}
        self._unfilled: dict[int, None] = {}
        self._bound_at: dict[int, None] = {}
        self.unwatched: dict[int, None] = {}
        """Hosts that were permitted more than their workers run: `look` is to be called with each
        in `patience` seconds; the caller takes them out."""
        self._returned: TaskRange | None = None  # what was last given back, while it waits
        self._of: list[int] = []  # the host of each worker
        self._bound_ahead: list[int] = []  # items bound to each worker that were permitted
        self._functions: dict[int, tuple[int, Any]] = {}
        self._numbers_of_lots = 0

    # -- hosts come and go -------------------------------------------------------------------------

    def expect(self, number: int, workers: int) -> Host:
        """Number the workers of a host that is to join, after those that there are."""
        host = self.hosts[number] = Host(number, len(self._of), workers)
        self._of += [number] * workers
        self._bound_ahead += [0] * workers
        self.extend(len(self._of))
        return host

    def join(self, number: int) -> None:
        """Take a host into service."""
        host = self.hosts[number]
        if host.leaving:
            return
        host.accepting = True
        self.workers += host.workers
        self.hungry[number] = None
        self._unfilled[number] = None
        if any(self.own[host.first : host.first + host.workers]):
            self._bound_at[number] = None

    def drain(self, number: int) -> list[Message]:
        """Permit this host nothing more: it is about to go.  What is only staged there goes
        elsewhere."""
        host = self.hosts[number]
        host.leaving = True
        if not host.accepting:
            return []
        host.accepting = False
        self.workers -= host.workers
        self.hungry.pop(number, None)
        found: list[Message] = []
        if host.staged:
            self._drop(host, list(host.staged), found)
        self._unfilled.pop(number, None)
        return found

    def lost(self, number: int) -> list[Lost]:
        """Forget a host that is gone.

        Returns what it may have run, oldest first, and what waited for a worker of it.  What was
        only staged there waits again, in front.
        """
        self.drain(number)
        host = self.hosts.pop(number)
        for its in (self._stagers, self._askable, self._unfilled, self._bound_at, self.unwatched):
            its.pop(number, None)
        found = []
        for name, lot in host.permitted.items():
            part = lot.item(name)
            found.append(Lost(part, part.retries > 0 and part.bound is None))
        for w in range(host.first, host.first + host.workers):
            self._bound_ahead[w] = 0
            while (task_range := self.front_of(self.own[w])) is not None:
                job, func, first = task_range.job, task_range.func, task_range.first
                items = self.take(self.own[w], len(task_range.items), 1 << 62)
                found += [
                    Lost(TaskRange(job, func, first + i, (item,), 0, w), False)
                    for i, item in enumerate(items)
                ]
        found += [Lost(one, False) for one in self.take_later(host.first, host.workers)]
        return found

    def is_there(self, worker: int) -> bool:
        """Whether the host of a worker is in service, or is to be."""
        host = self.hosts.get(self._of[worker])
        return host is not None and not host.leaving

    def host_of(self, worker: int) -> int:
        """Return the number of the host that a worker is, or was, on."""
        return self._of[worker]

    def least_loaded(self) -> int:
        """Return the worker with the fewest items bound to it.

        Raises:
            LookupError: no host is in service.
        """
        there = [w for w in range(len(self._of)) if self.is_there(w)]
        if not there:
            raise LookupError("no host is in service")
        return min(there, key=lambda w: (self._bound_ahead[w] + self._bound[w], w))

    @property
    def waiting_ahead(self) -> bool:
        """Whether something is staged that is not permitted."""
        return bool(self._stagers)

    # -- functions ---------------------------------------------------------------------------------

    def learn(self, number: int, mode: int, payload: Any) -> None:
        """Keep a function for the hosts."""
        self._functions[number] = mode, payload

    def forget(self, number: int) -> list[Message]:
        """Let go of a function, here and at the hosts that have it."""
        self._functions.pop(number, None)
        found = []
        for host in self.hosts.values():
            if number in host.known:
                host.known.discard(number)
                found.append((host.number, Forget(number)))
        return found

    # -- work goes out -----------------------------------------------------------------------------

    def _queue(self, task_range: TaskRange) -> deque[TaskRange]:
        if task_range.bound is not None:
            # Its worker may be free although the host has as much as its workers can do.
            host = self.hosts.get(self._of[task_range.bound])
            if host is not None and host.accepting:
                self.hungry.setdefault(host.number)
                self._bound_at[host.number] = None
        return super()._queue(task_range)

    def give(self) -> list[Message]:
        """Permit what waits to the hosts that have room, and stage more of it there."""
        found: list[Message] = []
        while self.hungry and self._turn(found):
            continue
        # In turns: else the first would have all that waits, and the others nothing.
        while self._unfilled and self._stage_ahead(self.hosts[next(iter(self._unfilled))], found):
            continue
        return found

    def _turn(self, found: list[Message]) -> bool:
        """Permit one lot to each host that has room; return whether there was any."""
        some = False
        for number in list(self.hungry):
            if not (self.queued or self._stagers or self._askable):
                break
            host = self.hosts[number]
            room = self._room(host)
            if room <= 0 and number not in self._bound_at:
                del self.hungry[number]  # answers bring it back
                continue
            lot = self._next(host, room, found)
            if lot is not None:
                self._permit(host, lot, found)
                self.hungry[number] = self.hungry.pop(number)
                some = True
        return some

    def _next(self, host: Host, room: int, found: list[Message]) -> Lot | None:
        """Return the next lot for a host, staged there; None: it gets nothing now."""
        if host.number in self._bound_at:
            lot = self._next_bound(host, found)
            if lot is not None:
                return lot
        if room <= 0:
            return None
        if host.staged and not (host.staged[0].of_stream and self._streams_pass()):
            if host.staged[0].left <= room:
                lot = host.staged.popleft()
                host.ready -= lot.left
                self._unfilled[host.number] = None
                self._look_at_wealth(host)
                return lot
            if host.ahead >= host.workers:
                return None
            # When it was cut, items were shorter: it has become too much to begin at one place.
            self._drop(host, [host.staged[0]], found)
        lot = self._stage(host, self.shared, room, found)
        if lot is None and host.ahead < host.workers:
            lot = self._from_another(host, room, found)
        return lot

    def _streams_pass(self) -> bool:
        """Put streams behind what else waits for any worker; return whether there is something."""
        if not any(one.items and one.input_reader is None for one in self.shared):
            return False
        while (first := self.first_of(self.shared)) is None or first.input_reader is not None:
            self.shared.rotate(-1)
        return True

    def _next_bound(self, host: Host, found: list[Message]) -> Lot | None:
        more = 1 + self._extra(host)
        waits = False
        for w in range(host.first, host.first + host.workers):
            if self.own[w] and self._bound_ahead[w] < more:
                lot = self._stage(host, self.own[w], more, found)
                if lot is not None:  # else all of it was cancelled
                    return lot
            waits = waits or bool(self.own[w])
        if not waits:
            del self._bound_at[host.number]
        return None

    def _look_at_wealth(self, host: Host) -> None:
        if host.staged:
            self._stagers[host.number] = None
        else:
            self._stagers.pop(host.number, None)
        if host.ahead > host.workers and not host.asked and host.unasked:
            self._askable[host.number] = None
        else:
            self._askable.pop(host.number, None)

    def _from_another(self, host: Host, room: int, found: list[Message]) -> Lot | None:
        """Take what another host has staged, or ask one for what it has not begun."""
        for number in self._stagers:
            rich = self.hosts[number]
            self._drop(rich, [rich.staged[-1]], found)
            return self._stage(host, self.shared, room, found)
        for number in self._askable:
            rich = self.hosts[number]
            self._ask_back(rich, found)
            break
        return None

    def _ask_back(self, host: Host, found: list[Message]) -> int:
        """Ask a host for the newest lot that it was not asked for; return how many items of it
        have no answer."""
        lot = host.unasked.pop(next(reversed(host.unasked)))
        host.asked[lot.number] = lot
        part = lot.items
        which = lot.number, part.job, part.first, len(part.items)
        last = found[-1] if found else None
        if last is not None and last[0] == host.number and type(last[1]) is Back:
            last[1].batches.append(which)
        else:
            found.append((host.number, Back([which])))
        self._look_at_wealth(host)
        return lot.left

    def _drop(self, host: Host, lots: list[Lot], found: list[Message]) -> None:
        """Queue staged lots again, in front."""
        for lot in reversed(lots):
            host.staged.remove(lot)
            host.ready -= lot.left
            host.nbytes -= lot.nbytes
            self.put_back(lot.items)
        self._unfilled[host.number] = None
        self._look_at_wealth(host)
        found.append((host.number, Drop([lot.number for lot in lots])))

    def _permit(self, host: Host, lot: Lot, found: list[Message]) -> None:
        items = lot.items
        host.lots[lot.number] = lot
        for index in range(items.first, items.first + len(items.items)):
            host.permitted[name_of(items.job, index)] = lot
        if items.bound is None:
            host.ahead += lot.left
            host.unasked[lot.number] = lot
            self._look_at_wealth(host)
            if host.ahead > host.workers:
                self._watch(host)
        else:
            self._bound_ahead[items.bound] += lot.left
        last = found[-1] if found else None
        if last is not None and last[0] == host.number and type(last[1]) is Go:
            last[1].batches.append(lot.number)
        else:
            found.append((host.number, Go([lot.number])))

    def _stage_ahead(self, host: Host, found: list[Message]) -> bool:
        """Send a host a lot of what it will be permitted next, if it can keep more.

        Returns whether there may be something for another host.
        """
        # The rest is for who has room first.
        first = self.first_of(self.shared)
        if math.isinf(self.cost) or first is None or len(first.items) <= self.workers:
            return False
        del self._unfilled[host.number]
        most = host.workers * math.ceil(STAGED_SECONDS / self.cost) - host.ready
        if most > 0 and host.nbytes < STAGED_BYTES:
            lot = self._stage(host, self.shared, most, found)
            if lot is not None:
                host.staged.append(lot)
                host.ready += lot.left
                self._unfilled[host.number] = None
                self._look_at_wealth(host)
        return True

    def _stage(
        self, host: Host, queue: deque[TaskRange], most: int, found: list[Message]
    ) -> Lot | None:
        """Cut a lot of ``most`` items from a queue and send it to a host; None: nothing waits."""
        first = self.first_of(queue)
        if first is None:
            return None
        n = min(most, self._handful(1 if first.bound is not None else host.workers))
        if first.bound is None:
            n = min(n, -(-len(first.items) // (self.workers or 1)))
        items = self.take(queue, max(1, n), LOT_BYTES)
        part = TaskRange(
            first.job, first.func, first.first - len(items), items, first.retries, first.bound,
            first.limit, first.past,
        )  # fmt: skip
        if first.input_reader is not None:
            first.input_reader.taken(items)
        self._numbers_of_lots += 1
        lot = Lot(self._numbers_of_lots, part, first.input_reader is not None)
        host.nbytes += lot.nbytes
        if part.func and part.func not in host.known and part.func in self._functions:
            host.known.add(part.func)
            found.append((host.number, Func(part.func, *self._functions[part.func])))
        found.append((host.number, lot.stage(host.first)))
        return lot

    def _handful(self, workers: int) -> int:
        return max(1, min(MOST_ITEMS, int(LOT_SECONDS * workers / self.cost)))

    def _extra(self, host: Host) -> int:
        """Return how many items each worker of a host may have beside the one that it runs."""
        if self.cost > LONG_SECONDS or host.nbytes >= STAGED_BYTES:
            return 0
        return min(MOST_AHEAD, math.ceil(AHEAD_SECONDS / self.cost))

    def _room(self, host: Host) -> int:
        """Return how many more items a host may be permitted."""
        return self._most_ahead(host) - host.ahead if host.accepting else 0

    def _most_ahead(self, host: Host) -> int:
        """Return how many items that any of its workers may run a host may be permitted."""
        most = min(MOST_AHEAD, host.workers * (1 + self._extra(host)))
        if host.pace is not None:
            most = min(most, host.pace)
        return max(host.workers, most)

    # -- what a host has been permitted on a wrong guess -------------------------------------------

    @property
    def patience(self) -> float:
        """Seconds between two looks at a host: what waits behind one task each has begun by then,
        if these take as long as the last ones did."""
        return RECALL_SECONDS if self.cost > LONG_SECONDS else max(RECALL_SECONDS, 2 * self.cost)

    def _watch(self, host: Host) -> None:
        if not host.watched:
            host.watched = True
            host.newest_then, host.answers_then = self._numbers_of_lots, host.answers
            self.unwatched[host.number] = None

    def look(self, number: int) -> list[Message]:
        """Ask a host for what it has not begun in time.

        If it has a lot still that it had at the last look, it is to hold no more than it has
        answered since; until it answers more than that.
        """
        found: list[Message] = []
        host = self.hosts.get(number)
        if host is None:
            return found
        host.watched = False
        answers = host.answers - host.answers_then
        oldest = next(iter(host.unasked), None)
        if host.pace is not None and answers > host.pace:
            host.pace = None
            if host.accepting:
                self.hungry.setdefault(number)
        elif oldest is not None and oldest <= host.newest_then and host.ahead > answers:
            host.pace = answers
            self._shed(host, found)
        if host.ahead > host.workers or host.pace is not None:
            self._watch(host)
        return found

    def _shed(self, host: Host, found: list[Message]) -> None:
        """Ask for the newest lots, until a host holds no more than it may be permitted now."""
        more = host.ahead - sum(lot.left for lot in host.asked.values()) - self._most_ahead(host)
        while more > 0 and host.unasked:
            more -= self._ask_back(host, found)

    # -- answers come ------------------------------------------------------------------------------

    def answered(self, number: int, job: int, first: int, tasks: int) -> bool:
        """Note an answer to so many consecutive items; return whether they were awaited."""
        host = self.hosts.get(number)
        if host is None:
            return False
        host.answers += tasks
        lots = [host.permitted.pop((job, i), None) for i in range(first, first + tasks)]
        for lot in lots:
            if lot is not None:
                self._answered(host, lot)
        if host.accepting:
            self.hungry.setdefault(number)
        return None not in lots

    def _answered(self, host: Host, lot: Lot) -> None:
        bound = lot.items.bound
        if bound is None:
            host.ahead -= 1
        else:
            self._bound_ahead[bound] -= 1
        lot.left -= 1
        if not lot.left:
            del host.lots[lot.number]
            host.unasked.pop(lot.number, None)
            host.nbytes -= lot.nbytes
            host.asked.pop(lot.number, None)
            if host.accepting:
                self._unfilled[host.number] = None
        self._look_at_wealth(host)

    def again(
        self, number: int, job: int, item: int, killed: bool, when: Callable[[int], float]
    ) -> None:
        """Queue an item once more that failed: for ``when(n)``, where it was tried ``n`` times."""
        host = self.hosts.get(number)
        lot = None if host is None else host.permitted.get((job, item))
        if lot is not None:
            part = lot.item((job, item))
            self.answered(number, job, item, 1)
            self.put_again(part, killed, when(part.past.tries + 1))

    def put_again(self, item: TaskRange, killed: bool, when: float) -> None:
        """Queue an item that was run once more, for ``when``: it costs one of its retries."""
        item.retries -= 1
        item.past = Past(item.past.tries + 1, item.past.killed + killed)
        self.put_later(when, item)

    def given(self, number: int, batches: Iterable[int]) -> None:
        """Note that a host has given back what waited there of lots that it was asked for."""
        host = self.hosts.get(number)
        if host is not None:
            for batch in batches:
                host.asked.pop(batch, None)
            self._look_at_wealth(host)

    def unbegun(self, number: int, job: int, first: int, tasks: int) -> None:
        """Queue items again, in front, that a host was asked for and has not begun."""
        host = self.hosts.get(number)
        if host is None:
            return
        for item in reversed(range(first, first + tasks)):
            lot = host.permitted.pop((job, item), None)
            if lot is not None:
                self._answered(host, lot)
                self._return(lot.item((job, item)))
        if host.accepting:
            # Behind those for whose sake it was asked, if it had room as well.
            self.hungry.pop(number, None)
            self.hungry[number] = None

    def _return(self, part: TaskRange) -> None:
        """Queue an item in front, in one range with those that follow it and came back before."""
        last = self._returned
        if (
            last is not None
            and last.items
            and self.shared
            and self.shared[0] is last
            and part.first + 1 == last.first
            and _terms(part) == _terms(last)
        ):
            last.items.extendleft(part.items)
            last.first -= 1
        else:
            self._returned = part
            self.put_back(part)

    def withdraw(self, job: int, index: int | None = None) -> list[Message]:
        """Forget a job that has ended, or one item of it; stop what runs of it."""
        found: list[Message] = []
        for host in self.hosts.values():
            staged = [lot for lot in host.staged if covers(lot.items, job, index)]
            if staged:
                self._drop(host, staged, found)
            names = host.names(job, index)
            for name in names:
                self.answered(host.number, *name, 1)
            if names:
                found.append((host.number, Cancel(job, index)))
        self.strike(job, index)  # what was staged, too: it waits again
        return found

    def runs(self, job: int, index: int | None = None) -> bool:
        """Whether a host has been permitted an item of a job, or that item, and not answered."""
        return any(host.names(job, index) for host in self.hosts.values())

    def clear(self) -> None:
        """Forget everything: the pool ends."""
        super().clear()
        self._stagers.clear()
        self._askable.clear()
        self.unwatched.clear()
        for host in self.hosts.values():
            host.staged.clear()
            host.lots.clear()
            host.unasked.clear()
            host.asked.clear()
            host.permitted.clear()
            host.ahead = host.ready = host.nbytes = 0


def _terms(part: TaskRange) -> tuple[Any, ...]:
    return part.job, part.func, part.retries, part.bound, part.limit, part.past
