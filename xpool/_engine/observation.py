"""Queries of an engine: counts, records and stacks of its workers and their tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from xpool._engine import stacks
from xpool._engine.jobs.scheduler import Scheduler
from xpool._engine.ledger import EngineReport, Event, Ledger
from xpool._engine.stacks import Whereabouts
from xpool._engine.worker_process import WorkerProcess


class Observation:
    """Looks at the engine's workers, scheduler and ledger, and changes none of them."""

    def __init__(
        self, lock: threading.Lock, workers: list[WorkerProcess], sched: Scheduler, ledger: Ledger
    ) -> None:
        self.lock = lock  # the engine's
        self._workers, self._sched, self._ledger = workers, sched, ledger

    def runs(self, job: int, index: int | None = None) -> bool:
        """Whether a worker now runs a task of this job, or its task ``index`` if given."""
        with self.lock:
            for worker in self._workers:
                # A worker without a process has no page: it was unmapped.
                if worker.handle is not None:
                    running = self._sched.running(worker.index, worker.box.began)
                    if running is not None and running[0].job == job:
                        batch, position = running
                        if index is None or batch.first + position == index:
                            return True
            return False

    def bars(self) -> list[str]:
        """Return the progress bars that running tasks draw."""
        with self.lock:
            return [
                bar
                for worker in self._workers
                if worker.handle is not None
                and self._sched.running(worker.index, worker.box.began) is not None
                and (bar := worker.box.bar)
            ]

    def statistics(self) -> dict[str, Any]:
        """Return counts: of workers (ready, deaths), of tasks (waiting, running), and ``pids``."""
        sched, workers = self._sched, self._workers
        with self.lock:
            # A worker holds tasks that it has not begun, and the one that it runs.
            running = sum(
                sched.running(worker.index, worker.box.began) is not None
                for worker in workers
                if worker.handle is not None
            )
            sent = sum(in_flight.size for in_flight in sched.in_flight)
            return {
                "ready": sum(in_flight.accepting for in_flight in sched.in_flight),
                "waiting": sched.waiting() + sent - running,
                "running": running,
                "deaths": sum(account.deaths for account in self._ledger.accounts),
                "pids": [worker.pid for worker in workers[: sched.size]],
            }

    def report(self) -> EngineReport:
        """Return what the workers have done."""
        with self.lock:
            return self._ledger.report(self._workers)

    def stacks(self, describe: Callable[[int, int], str] | None = None) -> list[Whereabouts]:
        """Return the stack of each worker, within a second; busy ones are asked by a signal."""
        describe = describe or self._ledger.describe
        begun = time.monotonic()
        with self.lock:
            asked = stacks.ask(self._workers)
        while True:
            with self.lock:
                waited = time.monotonic() - begun
                workers = self._workers[: self._sched.size]
                found = stacks.collect(workers, asked, self._sched, describe, waited)
            if found is not None:
                return found
            time.sleep(0.005)  # the handlers write to the page, which wakes no thread

    def begin_trace(self) -> None:
        """Begin to keep events.

        Raises:
            OptionError: another trace keeps them already.
        """
        with self.lock:
            self._ledger.begin_trace()

    def end_trace(self) -> tuple[list[Event], float, int]:
        """Return the events that were kept, when that began, and how many are missing."""
        with self.lock:
            return self._ledger.end_trace()
