"""`ThreadSubmitter`: turns the tasks of a verb into sources, from which all threads take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from xpool._calls.results import Job
from xpool._calls.streams import Stream
from xpool._calls.terms import ONCE
from xpool._engine.threads import Source, ThreadWorkers
from xpool._pools.hooks import Hooks
from xpool._pools.input_reader import FlowControl, Runs
from xpool._pools.job_table import JobTable
from xpool._pools.submitters import HookSubmitter, Put, Work
from xpool._python import at_fork


class ThreadSubmitter(HookSubmitter):
    """Queues single calls.  The tasks of a map, and consecutive items of a stream, form a source.

    Tasks with a time limit, retries or a priority go through the hook.
    """

    def __init__(self, pool: Hooks, jobs: JobTable, threads: ThreadWorkers) -> None:
        super().__init__(pool, jobs)
        self._threads = threads

    def call_starter(self, start_call: Callable[..., None]) -> Callable[..., None]:
        """Return the pool's `start_call`, which defers no signal handlers: if one raises, the job
        leaves the table, and threads skip its task.

        The given ``start_call`` still starts calls with options, and calls that are refused.
        """
        jobs, tasks = self.jobs, self._threads.tasks
        unanswered, counts, put, remove = jobs.unanswered, jobs.counts, tasks.put, tasks.remove

        def start(
            pool: Any, job: Job, func: Any, args: tuple[Any, ...], kwds: dict[str, Any]
        ) -> None:
            if job.options.terms is not ONCE or not (at_fork.known[0] and jobs.accepting):
                start_call(pool, job, func, args, kwds)
                return
            number = job.number
            task = number, 0, func, args, kwds
            counts["submitted"] += 1
            try:
                unanswered[number] = job
                put(task)
                # If another thread has closed the pool meanwhile, all threads may have ended.
                if not jobs.accepting and remove(task):
                    pool._life.check_running()  # raises
            except BaseException:
                # No handler can raise here, because nothing is called.
                try:
                    del unanswered[number]
                    counts["submitted"] -= 1
                except KeyError:
                    pass  # the job is answered
                raise

        return start

    def call(self, job: Job, func: Any, args: tuple[Any, ...], kwds: dict[str, Any]) -> None:
        """Submit the one task of a job."""
        if job.options.plain:
            self._threads.tasks.put((job.number, 0, func, args, kwds))
        else:
            super().call(job, func, args, kwds)

    def map(self, job: Job, work: Work, chunks: Iterable[Any]) -> None:
        """Submit a source of tasks, one for each chunk."""
        if not job.options.plain:
            super().map(job, work, chunks)
            return
        # Snapshots: a list may change while threads take from it, and a generator runs code.
        items = chunks if isinstance(chunks, (range, tuple, list)) else list(chunks)
        self._threads.tasks.put(Source(job, work.call, work.func, items))

    def stream(self, job: Stream, work: Work, flow: FlowControl) -> tuple[Put, Runs | None]:
        put, _ = super().stream(job, work, flow)
        if not job.options.plain:
            return put, None
        tasks, call, func = self._threads.tasks, work.call, work.func

        def put_run(index: int, items: list[Any]) -> int:
            tasks.put(Source(job, call, func, items, index, last=True), last=True)
            return 0

        return put, Runs(lambda items: items, put_run)

    def withdraw(self, job: Job) -> None:
        """Drop the waiting tasks of a job; replace the threads that run its tasks."""
        self._threads.withdraw(job.number)

    def runs(self, job: Job) -> bool:
        """Whether a thread runs a task of this job now."""
        return self._threads.runs(job.number)
