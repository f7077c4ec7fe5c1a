"""Memory: the arena's attachments and trims; limits for workers' own memory and the machine's.

Guarded by the engine's lock.
"""

import os
import signal
from collections.abc import Callable, Iterable
from typing import NamedTuple

from xpool._engine.jobs.scheduler import Scheduler
from xpool._engine.jobs.states import RestartPolicy
from xpool._engine.ledger import Ledger
from xpool._engine.reactor import Reactor
from xpool._engine.worker_process import WorkerProcess
from xpool._memory.arena import IDLE_SECONDS, Arena
from xpool._memory.system import Scope, available_memory, fullest_scope, oom_kills
from xpool._pickling.tensors import mapped

POLL_SECONDS = 0.2
"""Seconds between two checks."""

LARGE_PART = 0.02
"""Fraction of the machine's memory.  A worker with less is not ended when the machine is full."""

USABLE = 0.95
"""Fraction of the machine's memory that heavy tasks may use together with all other programs."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


def private_memory(pid: int) -> int:
    """Return how many bytes of private memory a process has; 0: it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            # proc(5), in pages: total, resident, and the resident ones of files and shared memory.
            _, resident, shared, *_ = map(int, file.read().split())
    # OSError: there is no such process; ValueError: it ended while this was read.
    except (OSError, ValueError):
        return 0
    return (resident - shared) * _PAGE


class ArenaMaintenance:
    """The arena's attachments, one for each process of workers, and the times of its trims.

    Called with the engine's lock held, except `after_turn` and `end`, which may take milliseconds,
    and `take_attachment`, which waits for the arena's turn.
    """

    def __init__(self, arena: Arena | None, reactor: Reactor) -> None:
        self._arena = arena
        self._reactor = reactor
        # Attachments whose holds the engine's thread clears.  Filled under the lock and emptied
        # without it: `append` and `pop` of a list are atomic.
        self._pending_reclaim: list[int] = []
        self._due = False  # the engine's thread must trim the arena
        self._planned = False  # a timer for the next trim is set
        self._pause = IDLE_SECONDS
        if arena is not None:
            arena.begin()

    def take_attachment(self) -> tuple[Arena | None, int | None]:
        """Return the arena and an attachment for a new process; two None if none is free."""
        attachment = None if self._arena is None else self._arena.take_attachment()
        return (self._arena if attachment is not None else None), attachment

    def damage(self, attachment: int | None) -> str:
        """Return how an ended process has damaged its table in the arena; empty: not at all."""
        try:
            if self._arena is not None and attachment is not None:
                self._arena.file.check(attachment)
        except ValueError as exc:
            return str(exc)
        return ""

    def free_attachment(self, attachment: int | None) -> None:
        """Record that the process with this attachment has ended, or was not started."""
        if attachment is not None:
            # Clear the holds later: this takes milliseconds, and the engine's lock is held here.
            self._pending_reclaim.append(attachment)

    def later(self) -> None:
        """Record that blocks of the arena are in use, and plan a trim for later."""
        self._pause = IDLE_SECONDS
        self.again()

    def again(self) -> None:
        """Plan the next trim, if none is planned."""
        if not self._planned:
            self._planned = True
            self._reactor.call_at(self._reactor.now() + self._pause, self._ring)

    def _ring(self) -> None:
        self._due = True

    def after_turn(self) -> bool:
        """Clear holds, and trim the arena if due; return whether `again` must be called."""
        self._reclaim()
        mapped.collect()
        if not self._due:
            return False
        arena = self._arena
        self._due = self._planned = False  # before the trim: blocks used during it plan another one
        self._pause = min(2 * self._pause, 60.0)
        return arena is not None and arena.trim()

    def _reclaim(self) -> None:
        while self._pending_reclaim and self._arena is not None:
            self._arena.reclaim(self._pending_reclaim.pop())

    def end(self) -> None:
        """Clear all holds and end the arena; all workers have ended."""
        self._reclaim()  # the engine's thread no longer calls `after_turn`
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.end()
            mapped.collect()

    def forget(self) -> None:
        """Forget the arena: it belongs to the parent of this forked child."""
        self._arena = None


class EngineParts(NamedTuple):
    """The parts of an engine that all other parts use."""

    workers: list[WorkerProcess]
    sched: Scheduler
    reactor: Reactor
    ledger: Ledger
    maintenance: ArenaMaintenance
    policy: RestartPolicy


class MemoryLimits(NamedTuple):
    """Limits of memory; None: no limit.

    ``worker``: most bytes of private memory of a worker.  ``high``, ``full``: fractions of the
    machine's memory.  Above ``high``, tasks wait; above ``full``, the largest worker is ended.
    """

    worker: int | None = None
    high: float | None = None
    full: float | None = None


class MemoryGuard:
    """Ends workers with too much memory; ``short`` is True while more than ``high`` is in use.

    A worker whose task runs alone may have as much as all workers.  After a death for lack of
    memory, the guard measures what heavy tasks need and may have (`HeavyFunctions`).
    ``end(worker, remark)`` ends a worker; ``again()`` sends waiting tasks.  The guard polls,
    because the system has no event for memory in use.
    """

    def __init__(
        self,
        parts: EngineParts,
        limits: MemoryLimits,
        end: Callable[[WorkerProcess, str], object],
        again: Callable[[], object],
    ) -> None:
        self.short = False
        self._reactor, self._workers, self._sched = parts.reactor, parts.workers, parts.sched
        self._ledger = parts.ledger
        self._most, self._high, self._full = limits
        self._end, self._again = end, again
        self._ended: set[int] = set()  # the workers whose end is not handled yet
        self._kills = oom_kills()
        self._polls = self._limited = limits != MemoryLimits()
        if self._polls:
            self._look()

    def _look(self) -> None:
        held_back = bool(self._sched.heavy.needs)
        if self._most is not None or held_back:
            sizes = {worker.index: self._weigh(worker) for worker in self._workers}
            if held_back:
                free = available_memory(self._high or USABLE)
                self._sched.measured(free, self._most, sizes)
        scope = None if self._high is None and self._full is None else fullest_scope()
        used = 0.0 if scope is None else scope.part
        if self._high is not None:
            before, self.short = self.short, used > self._high
            held_back |= before
        if held_back:
            self._again()  # also while memory is short: one task may run if none does
        if scope is not None and self._full is not None and used > self._full:
            self._end_largest(scope)
        self._polls = self._limited or bool(self._sched.heavy.needs)
        if self._polls:
            self._reactor.call_at(self._reactor.now() + POLL_SECONDS, self._look)

    def is_above(self, worker: WorkerProcess) -> bool:
        """Whether a worker has more memory than the limit of one worker."""
        return self._most is not None and private_memory(worker.pid or 0) > self._most

    def ran_out(self, ended: Iterable[WorkerProcess], exitcode: int | None) -> str:
        """Return why the process of these workers ended, if for lack of memory; else "".

        Asked once for each process.
        """
        ours = {worker.index: worker for worker in ended if worker.index in self._ended}
        if ours:
            self._ended -= ours.keys()
            return min(ours.items())[1].remark
        if exitcode == -signal.SIGKILL and self._kills < oom_kills():
            self._kills += 1  # the kernel may have killed several before the first is handled
            if not self._polls:
                self._polls = True
                self._reactor.call_at(self._reactor.now(), self._look)
            return "The kernel ended it, because memory was short."
        return ""

    def _weigh(self, worker: WorkerProcess) -> int:
        """Return a worker's private memory, and end the worker if that is too much."""
        pid = worker.pid
        if pid is None or not worker.state.serves:
            return 0
        bytes_, sched, limit = private_memory(pid), self._sched, self._most
        runs = bool(worker.in_flight.held)
        if runs:
            self._ledger.weighed(worker.in_flight.held[0], bytes_)
            if sched.heavy.has_heavy(worker.index):
                sched.heavy.weighed(worker.index, bytes_)
        if limit is None:
            return bytes_
        times = sched.size if runs and worker.index == sched.lone else 1
        most = limit * times
        if runs and times == 1:
            most = sched.heavy.limit(worker.index, limit, sched.size)
        if bytes_ > most:
            # In text such as "300MB", a megabyte is 1024**2 bytes.
            unit = 10**6 if limit % 1024 else 2**20
            more = f", and {times} times as much for a task alone" if times > 1 else ""
            if times == 1 and most > limit:
                more = f", and {most / unit:.4g} MB for this function, of which fewer tasks run"
            self._ended.add(worker.index)
            self._end(
                worker,
                f"The pool ended it, because it had {bytes_ / unit:.0f} MB of private memory, and "
                f"worker_memory= allows {limit / unit:.4g} MB{more}.",
            )
        return bytes_

    def _end_largest(self, scope: Scope) -> None:
        living = [s for s in self._workers if s.pid is not None and s.state.serves]
        sizes = [(private_memory(worker.pid or 0), worker.index, worker) for worker in living]
        bytes_, _, worker = max(sizes, default=(0, 0, None))
        # Ending a small worker would not help: other processes have the memory.
        if worker is not None and bytes_ > scope.total * LARGE_PART:
            self._ended.add(worker.index)
            self._end(
                worker,
                f"The pool ended it, because {self._full:.0%} of the {scope.total / 1e9:.1f} GB of "
                f"the machine, or of its cgroup, were in use, and this worker had the most "
                f"private memory, {bytes_ / 1e6:.0f} MB.",
            )
