"""What the process pools do with all workers at once: `Pool.run_all`, `Pool.broadcast`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from xpool import errors
from xpool._calls.options import TaskOptions, label
from xpool._calls.results import Job, Parcel, Unopened, exception_in, local
from xpool._engine.jobs.scheduler import Limit, TaskRange
from xpool._engine.protocols import EngineProtocol
from xpool._pools.base import BasePool
from xpool._python.interrupt import shielded
from xpool.errors import PeerLost, PoolClosed, TaskTimeout

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    from xpool._pickling.by_value.broadcast import Broadcast
    from xpool._pools.group import WorkerGroup
    from xpool._pools.packing import Packer
    from xpool._worker.launch_shared import File

    Ts = TypeVarTuple("Ts")

__all__ = ["AllWorkers", "limit_of"]

T = TypeVar("T")

CAUSE_SECONDS = 30.0
"""Longest wait for the error or death that a `PeerLost` follows from.  That one comes later where
its worker still pickles it, or gets no processor."""

LEAVE_SECONDS = 5.0
"""Longest wait for the other members of a group to end by themselves after one has failed: its
connections are closed, which ends their operations.  Who does not is interrupted."""

STOPPING = 5.0
"""Seconds that the other workers have to leave a call that has failed; the engine kills those that
do not within a tenth of one."""


class AllWorkers(BasePool):
    """What `Pool` and those made of it have beyond the standard verbs."""

    _engine: EngineProtocol
    _packer: Packer
    _token: str
    _memory_limit: int
    _order: threading.RLock
    _group: WorkerGroup | None = None
    _hosts: Any = None  # where the workers are, if not here
    _files: list[File]  # what was broadcast where there is no arena for it

    def run_all(
        self, func: Callable[[Unpack[Ts]], T], *args: Unpack[Ts], timeout: float | None = None
    ) -> list[T]:
        """Call ``func(*args)`` once in each worker; return the results, by index of the worker.

        A worker that is busy comes to it when it has done what it has in hand; calls of several
        threads come in the same order in all workers, so the functions may wait for each other.
        Each worker's arguments are its own copies; a `broadcast` object is the one that it has.

        When one fails, the others are stopped, as by `AsyncResult.cancel`, and when they have left
        the function, the exception is raised here as it is; its ``__cause__`` names the worker.  A
        worker that dies in it is an error too, and is replaced; a `PeerLost` that only follows from
        another worker's failure gives way to that.  With a `create_group`, that is made anew first
        where it is broken.

        Args:
            timeout: seconds that each call may take, from when its worker begins it; None: the
                pool's ``task_timeout``.

        Raises:
            Exception: what ``func`` raised.
            WorkerDied, TaskTimeout: with the ``worker`` that died or took too long.
            TaskNotPicklable: ``func``, an argument or a result cannot be sent.
            PoolClosed: the pool takes no more work.
        """
        self._check_running()
        self._check_call(func, None, None)
        group = self._group
        if group is None:
            return self._run_on_all(func, args, timeout)
        # One thread makes the group anew; re-entrant, since that is a call on all workers itself.
        with self._order:
            wrapped = group.wrap(func)
        try:
            return self._run_on_all(wrapped, args, timeout, label(func), LEAVE_SECONDS)
        except BaseException:
            group.note_failure()
            raise

    def _run_on_all(
        self,
        func: Any,
        args: tuple[Any, ...],
        timeout: float | None,
        name: str = "",
        patience: float = 0.0,
    ) -> list[Any]:
        """``patience``: seconds in which the others may end by themselves when one has failed."""
        terms = self._terms(None, False, timeout)
        job: AllWorkersResult | None = None
        try:
            with self._order:  # the workers come to the calls by number, and are as many as now
                number = next(self._job_numbers)
                job = AllWorkersResult(number, name or label(func), self, self._size)
                job.terms = terms
                self._start_on_all(job, (func, args, {}), terms)
            return job.get()
        # Nothing runs any more that could be stopped.
        except PoolClosed:
            raise
        except BaseException as exc:
            if job is None:
                raise
            # Not for Ctrl-C and its like, which are not to wait for the others.
            if isinstance(exc, Exception):
                job.wait(patience)
            self._cancel(job)
            # A worker that has to be killed for this must not be missed in the next call.
            until = time.monotonic() + STOPPING
            while self._engine.runs(job.number) and time.monotonic() < until:
                time.sleep(0.002)
            raise

    @shielded
    def _start_on_all(self, job: AllWorkersResult, call: Any, terms: TaskOptions) -> None:
        self._enter(job, self._size)
        try:
            self._engine.submit(*self._ranges_for_all(job, call, terms))
        except BaseException as exc:
            self._give_up(job, exc)
            raise

    def create_group(self, backend: str = "gloo", *, timeout: float = 60) -> WorkerGroup:
        """Make the workers one world of `torch.distributed`, so that functions which `run_all` runs
        can communicate; see `WorkerGroup`.  A pool has one: this makes it anew, if there is one.

        Args:
            backend: ``"gloo"`` on any workers; ``"nccl"`` on those of ``devices("cuda")``;
                ``"xla"`` on those of one replica group.
            timeout: seconds for making it, and for each collective operation.

        Raises:
            OptionError: there is no such backend, or it does not fit these workers.
            WorkerDied, xpool.distributed.GroupTimeout: as `WorkerGroup.rebuild`.
            PoolClosed: the pool takes no more work.
        """
        from xpool._pools.group import WorkerGroup  # here: few programs need it

        self._check_running()
        group = WorkerGroup(self, backend, timeout)
        with self._order:
            group.generation = 0 if self._group is None else self._group.generation
            group.rebuild()
            self._group = group
        return group

    def _pids(self) -> list[int | None]:
        """The workers' processes; None where one is missing, or has just been started."""
        pids: list[int | None] = self._engine.statistics()["pids"]
        return pids

    def _worker_contexts(self) -> list[Any] | None:
        """What each worker owns, by index; None: nothing."""
        return None

    def _processes(self) -> list[list[int]]:
        """The processes that have several workers, as threads: which, by index."""
        return []

    def _is_group(self) -> bool:
        """Whether the workers start and end together."""
        return False

    def _ranges_for_all(self, job: Job, call: Any, terms: TaskOptions) -> list[TaskRange]:
        # Pickled once, and marked as kept: each worker copies what lies in blocks.
        payload, owner = self._packer.pack_task(call, True, None)
        payloads = [payload] * self._size
        if owner is not None:  # handles to tensors of single workers: the others get copies
            payloads = [self._packer.pack_task(call, True, w)[0] for w in range(self._size)]
        for one in payloads:
            self._engine.sent(one)
        limit = limit_of(terms)
        return [TaskRange(job.number, 0, w, (one,), 0, w, limit) for w, one in enumerate(payloads)]

    def broadcast(self, obj: Any) -> Broadcast:
        """Pickle an object once for all workers; return a reference, to be given to tasks.

        A task that has the reference as an argument, in one, or in its function's closure, gets the
        object.  Each worker opens it when it first meets it and keeps it as long as the reference
        lives: all tasks there get the same object, and so does the worker's replacement, anew.  Its
        tensors and arrays lie in this machine's memory once, for all workers together, until one of
        them writes to them: then it has a copy of those pages, which no other process sees.

        Raises:
            TaskNotPicklable: it cannot be pickled, or there is no memory for it.
            PoolClosed: the pool takes no more work.
        """
        from xpool._pickling.by_value.broadcast import Broadcast, broadcast
        from xpool._worker.launch_shared import File, FileOfAgent

        self._check_running()
        packer = self._packer
        if packer.layout.lessor is not None and self._memory_limit:
            return broadcast(obj, self._token, packer.recurse, packer.layout.lessor)
        message = packer.pack_option(f"broadcast of a {type(obj).__name__}", obj)
        if self._hosts is not None:
            place = FileOfAgent(self._engine.broadcast(message))  # type: ignore[attr-defined]
            return Broadcast(self._token, place, len(message), None, type(obj).__name__)
        file = File(message)
        self._files.append(file)
        return Broadcast(self._token, file, len(message), None, type(obj).__name__)


def limit_of(terms: TaskOptions) -> Limit | None:
    """Return the limit of each task under these terms; None: there is none."""
    if terms.timeout is None:
        return None
    return Limit(terms.timeout, issubclass(TaskTimeout, terms.retry_on))


class AllWorkersResult(Job):
    """One call on each worker; its tasks are numbered as these are.

    There is news as soon as one has failed: the caller does not wait for the others then.
    """

    def __init__(self, number: int, label: str, pool: Any, workers: int) -> None:
        super().__init__(number, f"{label} on all workers", pool)
        self._values: list[Any] = [None] * workers
        self._errors: dict[int, Any] = {}  # by worker, in the order in which they came
        self._left = workers
        self._failure: BaseException | Parcel | None = None
        self._released = False

    # -- the caller's side -------------------------------------------------------------------

    def get(self) -> list[Any]:
        """Return what each worker returned, by index, or raise what explains the first failure.

        Raises:
            Exception: what the function raised; its ``__cause__`` says in which worker.
            WorkerDied, TaskTimeout: as of any task; their ``worker`` says which.
        """
        blocking = getattr(local, "blocking", None)
        if blocking is not None:
            blocking()
        self._waiters.wait(lambda: self._released or bool(self._errors), None)
        if self._failure is not None:
            raise exception_in(self._failure)
        values = []
        if not self._errors:
            for worker, value in enumerate(self._values):
                (one,) = value.open() if isinstance(value, Parcel) else (value,)
                if type(one) is Unopened:
                    raise _located(one.exc, worker)
                values.append(one)
            return values
        raise self._explanation()

    def wait(self, timeout: float) -> None:
        """Wait until all have answered, at most ``timeout`` seconds."""
        self._waiters.wait(lambda: self._released, timeout)

    def _explanation(self) -> BaseException:
        """The first error that does not follow from another, which may be the later one to come."""
        until = time.monotonic() + CAUSE_SECONDS
        known: dict[int, BaseException] = {}
        while True:
            for worker, error in self._new_errors(known):
                known[worker] = error
                if not isinstance(error, PeerLost):
                    return error
            left = until - time.monotonic()
            if not self._waiters.wait(
                lambda: self._released or len(self._errors) > len(known), left
            ) or len(self._errors) == len(known):
                return next(iter(known.values()))

    def _new_errors(self, known: dict[int, BaseException]) -> Iterator[tuple[int, BaseException]]:
        for worker, value in list(self._errors.items())[len(known) :]:
            (error,) = value.open() if isinstance(value, Parcel) else (value,)
            yield worker, _located(error.exc if type(error) is Unopened else error, worker)

    # -- the engine's side -------------------------------------------------------------------

    def describe(self, index: int) -> str:
        return self.label

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        (self._values if ok else self._errors)[index] = value
        self._left -= 1
        self.settled = not self._left
        # The caller is woken by the first error; by results only when all are there (`release`).
        if not ok:
            self._waiters.wake()
        return self.settled

    def fail(self, exc: BaseException | Parcel) -> None:
        if not self.settled:
            self._failure = exc
            self.settled = True

    def release(self) -> None:
        self._released = True
        self._pool = None
        self._waiters.wake()


def _located(error: BaseException, worker: int) -> BaseException:
    """Say in an error of a task's own where it was raised."""
    if isinstance(error.__cause__, errors.RemoteTraceback):
        error.__cause__.worker = worker
    return error
