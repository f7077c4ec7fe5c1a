"""Limits of the memory of workers, and of the machine's memory.

Guarded by the engine's lock.
"""

# No `from __future__ import annotations`: a NamedTuple would compile each type from its text.

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xpool._engine.reactor import Reactor
from xpool._engine.worker_process import WorkerProcess
from xpool._memory.system import Scope, fullest_scope

POLL_SECONDS = 0.2
"""Seconds between two checks."""

LARGE_PART = 0.02
"""Fraction of the machine's memory.  A worker with less is not ended when the machine is full."""

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

    ``end(worker, remark)`` ends a worker; ``again()`` sends waiting tasks.  The guard polls,
    because the system has no event for memory in use.
    """

    def __init__(
        self,
        reactor: Reactor,
        workers: Sequence[WorkerProcess],
        limits: MemoryLimits,
        end: Callable[[WorkerProcess, str], object],
        again: Callable[[], object],
    ) -> None:
        self.short = False
        self._reactor, self._workers = reactor, workers
        self._most, self._high, self._full = limits
        self._end, self._again = end, again
        if limits != MemoryLimits():
            self._look()

    def _look(self) -> None:
        if self._most is not None:
            for worker in self._workers:
                self._weigh(worker, self._most)
        scope = None if self._high is None and self._full is None else fullest_scope()
        used = 0.0 if scope is None else scope.part
        if self._high is not None:
            before, self.short = self.short, used > self._high
            if before:
                self._again()  # also while memory is short: one task may run if none does
        if scope is not None and self._full is not None and used > self._full:
            self._end_largest(scope)
        self._reactor.call_at(self._reactor.now() + POLL_SECONDS, self._look)

    def _weigh(self, worker: WorkerProcess, most: int) -> None:
        pid = worker.pid
        if pid is None or not worker.state.serves:
            return
        bytes_ = private_memory(pid)
        if bytes_ > most:
            # In text such as "300MB", a megabyte is 1024**2 bytes.
            unit = 10**6 if most % 1024 else 2**20
            self._end(
                worker,
                f"The pool ended it, because it had {bytes_ / unit:.0f} MB of private memory, and "
                f"worker_memory= allows {most / unit:.4g} MB.",
            )

    def _end_largest(self, scope: Scope) -> None:
        living = [s for s in self._workers if s.pid is not None and s.state.serves]
        sizes = [(private_memory(worker.pid or 0), worker.index, worker) for worker in living]
        bytes_, _, worker = max(sizes, default=(0, 0, None))
        # Ending a small worker would not help: other processes have the memory.
        if worker is not None and bytes_ > scope.total * LARGE_PART:
            self._end(
                worker,
                f"The pool ended it, because {self._full:.0%} of the {scope.total / 1e9:.1f} GB of "
                f"the machine, or of its cgroup, were in use, and this worker had the most "
                f"private memory, {bytes_ / 1e6:.0f} MB.",
            )
