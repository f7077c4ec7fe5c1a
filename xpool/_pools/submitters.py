"""`HookSubmitter`: submits the tasks of a verb through the hooks of `BasePool`."""

# No `from __future__ import annotations`: a NamedTuple would compile each type from its text.

import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, NamedTuple

from xpool._calls.options import check_callable, label
from xpool._calls.results import INSIDE, Job
from xpool._calls.streams import Stream
from xpool._pools.hooks import Hooks, Task
from xpool._pools.input_reader import FlowControl, Runs
from xpool._pools.job_table import JobTable
from xpool._python.interrupt import by_handler, cut_short, deliver, interruptible, pending, shielded
from xpool._worker.callables import OF_MAPS, task_function
from xpool.errors import TaskCancelled, XPoolError

Put = Callable[[int, Any], int]
"""Hands on a task of a stream, by its index; returns its size in bytes."""

CO_ASYNC = 0x80 | 0x200
"""inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR, whose import takes 10 ms."""

CALL, FUNCTION, ITEM = "call", "function", "item"
"""Roles of what is pickled: (function, arguments, keywords), a function, an item or chunk."""


class Work(NamedTuple):
    """The function of a map or a stream, and how workers call it.

    ``starred``: an item holds the arguments of a call; ``chunked``: a task is a list of items.
    """

    func: Callable[..., Any]
    starred: bool = False
    chunked: bool = False

    @property
    def mode(self) -> int:
        return self.starred + 2 * self.chunked

    @property
    def call(self) -> Callable[..., Any]:
        """The function of a task, which gets ``func``, and an item or a chunk."""
        return OF_MAPS[self.mode]


def begin_work(pool: Any, job: Job, work: Work) -> tuple[Work, bool]:
    """Show the job's progress, if asked for; return work that does what the job's options say
    around each call, and whether it takes numbered items."""
    fields: dict[str, Any] = {}
    if job.options.seed is not None:
        fields["seed"] = job.options.seed
    if pool._files is not None:
        fields["file"] = pool._files.of(job, job.label, pool._files.ITEM)
    numbered = bool(fields)
    if numbered:
        fields.update(numbered=True, starred=work.starred)
    if job.progress is not None and job.progress.begin(getattr(pool, "_engine", None)):
        fields["above_bar"] = True
    if not fields:
        return work, False
    starred = work.starred and not numbered
    return Work(task_function(work.func, **fields), starred, work.chunked), numbered


def numbering(put: Put, chunked: bool, size: int) -> Put:
    """Return a ``put`` that gives each item of a task its number."""

    def put_numbered(index: int, task: Any) -> int:
        return put(index, list(zip(count(index * size), task)) if chunked else (index, task))

    return put_numbered


class HookSubmitter:
    """Puts each task into the hook `pool_inqueue_put`.  Refers to its pool weakly.

    `call`, `map` and `stream` make the tasks of a job that the table has.  ``own``: the submitter
    of a built-in pool to its workers, if a subclass overrides its hooks.
    """

    def __init__(self, pool: Hooks, jobs: JobTable, own: "HookSubmitter | None" = None) -> None:
        self._pool = weakref.ref(pool)
        self.jobs = jobs
        self._own = own

    def name_of(self, func: Any) -> str:
        """Return the name of ``func`` for error texts; refuse what workers cannot call."""
        if self._own is not None:
            return self._own.name_of(func)
        if not callable(func):
            check_callable("func", func)
        return label(func)

    @interruptible
    def call(self, job: Job, func: Any, args: tuple[Any, ...], kwds: dict[str, Any]) -> None:
        """Submit the one task of a job."""
        if pending:
            deliver()
        pool = self._pool()
        assert pool is not None  # the caller of the verb holds it
        pool.pool_inqueue_put((job.number, 0, func, args, kwds))

    @interruptible
    def map(self, job: Job, work: Work, chunks: Iterable[Any]) -> None:
        """Submit a task for each chunk; a tuple of one chunk is a map of one task."""
        pool = self._pool()
        assert pool is not None
        for i, chunk in enumerate(chunks):
            try:
                if pending:
                    deliver()
                pool.pool_inqueue_put(_task(job.number, i, work, chunk))
            except Exception as exc:
                if by_handler(exc):
                    raise
                self.jobs.deliver(job.number, i, False, exc)

    def stream(self, job: Stream, work: Work, flow: FlowControl) -> tuple[Put, Runs | None]:
        """Return the functions that submit a task of the stream, and consecutive ones together if
        the pool can do so.  They must not hold the pool."""
        job.answers = flow.answered  # the hooks do not tell when a worker takes a task
        ref, jobs, number = self._pool, self.jobs, job.number

        def put(index: int, task: Any) -> int:
            pool = ref()
            if pool is None or number not in jobs.unanswered:
                flow.stop()
            else:
                # The task is counted before it is put: a pool of threads may answer it at once.
                flow.added(0)
                pool.pool_inqueue_put(_task(number, index, work, task))
            return 0

        return put, None

    # -- taking back -------------------------------------------------------------------------------

    def withdraw(self, job: Job) -> None:
        """Take back the tasks of a job, if the pool can."""
        if self._own is not None:
            self._own.withdraw(job)

    def runs(self, job: Job) -> bool:
        """Whether a worker runs a task of this job now; False if the pool does not know."""
        return self._own is not None and self._own.runs(job)

    @shielded
    def cancel(self, job: Job) -> bool:
        """Answer a job with `TaskCancelled` and stop its tasks; return False if it was answered."""
        if self.jobs.is_held_here():
            raise RuntimeError(INSIDE)
        story = f"{job.label} was cancelled before it had a result"
        if not self.jobs.fail([job], TaskCancelled(story)):
            return False
        self.withdraw(job)
        return True

    def give_up(self, job: Job, exc: BaseException) -> None:
        """Fail a job that could not be submitted; re-raise the exceptions of signal handlers."""
        try:
            self.withdraw(job)
            self.jobs.fail([job], exc)
            inconsistent = cut_short(exc) and not isinstance(exc, XPoolError)
        except BaseException:  # for the same reason, such as a full stack
            inconsistent = True
        if inconsistent:
            # The engine's thread then ends the pool.
            self.jobs.bookkeeping_error = exc
            self.jobs.wake()
        if inconsistent or not isinstance(exc, Exception) or by_handler(exc):
            raise exc


def _task(number: int, index: int, work: Work, chunk: Any) -> Task:
    """Return the tuple for one task of a map."""
    return number, index, work.call, (work.func, chunk), {}
