"""Records what the workers have done, for `report`, `trace` and `watch`.

Records are made for each message, not for each task: a message says how long the worker took for
the answers in it.  A task that takes more than a millisecond is answered by a message of its own.

Guarded by the engine's lock.
"""

import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from xpool._engine.jobs.ranges import CALLS, WHOLE
from xpool._engine.jobs.scheduler import Batch
from xpool._pickling.frame import pickle_alone
from xpool._wire.outbox import COUNTERS
from xpool.errors import OptionError, signal_of

if TYPE_CHECKING:
    from xpool._engine.worker_process import WorkerProcess

SLOWEST = 10
SHORTEST = 1_000_000
"""Nanoseconds: faster tasks are not listed among the slowest."""

ITEM = 4096
"""Most bytes of a slow task's pickled item; the ledger keeps no larger item."""

MOST_EVENTS = 1_000_000


class Account:
    """The record of one worker, over all its processes."""

    __slots__ = ("busy", "counts", "deaths", "lived", "ready_at", "tasks")

    def __init__(self) -> None:
        self.tasks = 0
        self.busy = 0  # nanoseconds
        self.deaths = 0
        self.ready_at: float | None = None  # when the present process became ready
        self.lived = 0.0  # seconds that earlier processes were ready
        self.counts = [0] * len(COUNTERS)  # counts of earlier processes


class WorkerReport(NamedTuple):
    """The work of one worker, in all of its processes.

    ``dropped_records``: log records and warnings that did not reach the program.
    """

    index: int  # type: ignore[assignment]  # not the method of tuples
    pid: int | None
    tasks: int
    busy_seconds: float
    waiting_seconds: float
    deaths: int
    dropped_records: int

    @property
    def utilisation(self) -> float:
        """The fraction of its time, from 0 to 1, in which it ran tasks."""
        total = self.busy_seconds + self.waiting_seconds
        return self.busy_seconds / total if total else 0.0


class WorkerEnd(NamedTuple):
    """How a worker's process has ended: what ``on_worker_end=`` of a pool gets.

    Attributes:
        worker: the index of the worker.
        context: the worker's object in ``worker_contexts``, as the program has it; else None.
        pid: the process id.
        exitcode: as `multiprocessing.Process.exitcode`: negative for a signal; None: not known.
        reason: "died" (by itself, or another program has killed it), "stopped" (the pool has
            killed it: its task did not stop at its time limit or when it was cancelled), "start
            failed" (before it took tasks), "recycled" (by ``maxtasksperchild``), "resized",
            "closed" or "terminated".
        text: the worker, the pid, the exit code and the cause, for messages.
    """

    worker: int
    context: Any
    pid: int
    exitcode: int | None
    reason: str
    text: str

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended the process, or None."""
        return signal_of(self.exitcode)


class Slow(NamedTuple):
    nanos: int
    number: int  # unique, so comparisons never reach the next fields
    task: str
    worker: int
    item: bytes | None  # the pickled item, if it is small
    is_call: bool  # the item has a function and its arguments


class EngineReport(NamedTuple):
    """What the workers have done; bytes are those in pipes.

    ``peaks``: the most bytes of private memory of a worker by the function that it ran.
    """

    workers: Sequence[WorkerReport] = ()
    slowest: Sequence[Slow] = ()
    peaks: Mapping[str, int] = {}
    bytes_to_workers: int = 0
    bytes_from_workers: int = 0
    retries: int = 0

    @classmethod
    def of_hosts(cls, reports: Iterable[tuple[int, "EngineReport"]]) -> "EngineReport":
        """Return the report of several engines, each with the pool's index of its first worker."""
        workers, slowest, counts = list[WorkerReport](), list[Slow](), cls()[3:]
        for first, one in reports:
            workers += [its._replace(index=first + its.index) for its in one.workers]
            slowest += [its._replace(worker=first + its.worker) for its in one.slowest]
            counts = tuple(map(operator.add, counts, one[3:]))
        # The agents do not know the names of functions, and so no peaks.
        return cls(workers, sorted(slowest, reverse=True)[:SLOWEST], {}, *counts)


class Event(NamedTuple):
    """An event of some duration, or at one moment (``seconds`` is None)."""

    when: float
    seconds: float | None
    what: str
    worker: int | None
    tasks: int = 0


class Ledger:
    """The accounts of all workers.

    ``now()`` returns the engine's time; ``describe(job, index)`` names a task.
    """

    def __init__(
        self, workers: int, now: Callable[[], float], describe: Callable[[int, int], str]
    ) -> None:
        self.accounts = [Account() for _ in range(workers)]
        self.bytes_in = self.bytes_out = 0  # `bytes_out`: only to processes that have ended
        self.retries = 0
        self.slowest: list[Slow] = []  # a heap, the fastest first
        self.peaks: dict[str, int] = {}
        self.begun = now()
        self.events: list[Event] | None = None  # kept while a trace is written
        self.dropped = 0  # events above `MOST_EVENTS`
        self._traced = 0.0  # when the trace began
        self.floor = SHORTEST
        """Nanoseconds: only slower tasks may be among the slowest."""
        self._now, self.describe = now, describe
        self._numbers = itertools.count()

    def remarkable(self, worker: int, batch: Batch, tasks: int, nanos: int) -> None:
        """Record a message of ``tasks`` answers in the trace, if there is a trace; and one answer
        that took more than ``floor`` as a slow task.  ``batch``: that of the first task.
        """
        # For several answers in a message, only the total time is known.
        if tasks == 1 and nanos > self.floor:
            self._slow(worker, batch, nanos)
        if self.events is not None:
            seconds = nanos * 1e-9
            what = self.describe(*batch.name(batch.first + batch.done))
            self._add(Event(self._now() - seconds, seconds, what, worker, tasks))

    def _slow(self, worker: int, batch: Batch, nanos: int) -> None:
        item = batch.items[batch.done] if batch.done < len(batch.items) else None
        # The message itself would hold its blocks.
        pickled = b"" if item is None else pickle_alone(item)
        kept = bytes(pickled) if 0 < len(pickled) <= ITEM else None
        task = self.describe(*batch.name(batch.first + batch.done))
        slow = Slow(nanos, next(self._numbers), task, worker, kept, batch.job == CALLS)
        if len(self.slowest) < SLOWEST:
            heapq.heappush(self.slowest, slow)
        else:
            heapq.heapreplace(self.slowest, slow)
            self.floor = self.slowest[0].nanos

    def weighed(self, batch: Batch, memory: int) -> None:
        """Record the private memory of a worker that runs a task of ``batch``."""
        what = self.describe(batch.name(batch.first + batch.done)[0], WHOLE)
        if what and memory > self.peaks.get(what, 0):
            self.peaks[what] = memory

    def open_accounts(self, workers: int) -> None:
        while len(self.accounts) < workers:
            self.accounts.append(Account())

    def ready(self, worker: int) -> None:
        self.accounts[worker].ready_at = self._now()

    def gone(self, worker: "WorkerProcess") -> None:
        """Record the end of a process; its page can still be read."""
        self.bytes_out += worker.writer.sent
        account = self.accounts[worker.index]
        account.counts = self._counts(worker)
        if account.ready_at is not None:
            account.lived += self._now() - account.ready_at
            account.ready_at = None

    def died(self, worker: int, story: str) -> None:
        self.accounts[worker].deaths += 1
        if self.events is not None:
            self._add(Event(self._now(), None, story, worker))

    def retried(self, batch: Batch, index: int) -> None:
        self.retries += 1
        if self.events is not None:
            self._add(Event(self._now(), None, f"{self.describe(*batch.name(index))} again", None))

    def _counts(self, worker: "WorkerProcess") -> list[int]:
        counts = self.accounts[worker.index].counts
        if worker.handle is None or not worker.box.intact:  # a task has written over the page
            return counts
        return list(map(operator.add, counts, worker.box.counts))

    def report(self, workers: "Sequence[WorkerProcess]") -> EngineReport:
        found, out = [], self.bytes_out
        for worker in workers:
            a = self.accounts[worker.index]
            busy = a.busy * 1e-9
            ready = a.lived + (0.0 if a.ready_at is None else self._now() - a.ready_at)
            found.append(
                WorkerReport(
                    worker.index, worker.pid, a.tasks, busy, max(0.0, ready - busy), a.deaths,
                    **dict(zip(COUNTERS, self._counts(worker))),
                )
            )  # fmt: skip
            # `bytes_out` has the bytes sent to ended processes, so their writers do not count.
            out += worker.writer.sent if worker.handle is not None else 0
        slowest = sorted(self.slowest, reverse=True)
        return EngineReport(found, slowest, dict(self.peaks), out, self.bytes_in, self.retries)

    def begin_trace(self) -> None:
        if self.events is not None:
            raise OptionError("trace() of this pool runs already; leave its with block first")
        self.events, self.dropped, self._traced = [], 0, self._now()

    def end_trace(self) -> tuple[list[Event], float, int]:
        """Return the events of the trace, when it began, and how many events were dropped."""
        events, self.events = self.events or [], None
        return events, self._traced, self.dropped

    def _add(self, event: Event) -> None:
        assert self.events is not None
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)
        else:
            self.dropped += 1
