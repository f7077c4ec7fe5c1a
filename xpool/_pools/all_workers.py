"""Calls on all workers of a pool at once: `Pool.run_all`, `broadcast` and `create_group`."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from xpool import errors
from xpool._calls.options import TaskOptions, check_timeout, label
from xpool._calls.results import (
    Job,
    PickledResult,
    Unopened,
    about_to_block,
    exception_in,
    open_one,
)
from xpool._calls.terms import terms_of
from xpool._memory.anonymous_files import File, FileOfAgent
from xpool._pickling import Brought
from xpool._pickling.by_value.broadcast import Broadcast, publish
from xpool._pools.engine_submitter import EngineSubmitter
from xpool._pools.lifecycle import Lifecycle
from xpool._python.interrupt import shielded
from xpool._worker.callables import task_function
from xpool.errors import OptionError, PeerLost, PoolClosed
from xpool.pickle import encode

if TYPE_CHECKING:
    from xpool._pickling.frame import Layout
    from xpool._pools.worker_group import WorkerGroup
    from xpool._worker.task_output import TaskFiles

CAUSE_SECONDS = 30.0
"""The longest wait for the error or death that has caused a `PeerLost`.  It may arrive later than
the `PeerLost`, since its worker has to pickle it and may get no processor."""

LEAVE_SECONDS = 5.0
"""Seconds in which the other members of a group may end by themselves after one has failed: its
closed connections end their operations.  After that, they are interrupted."""

STOPPING = 5.0
"""Seconds to wait until the other workers have left a failed call.  The engine kills those that do
not leave within a tenth of a second."""

STORES = 16
"""How many files of groups' stores stay open.  When a worker drops the store of an earlier group or
generation, torch opens its file once more, to write to it.  It does so by the number of this
process's descriptor, so this number must not belong to another file or socket by then."""


class AllWorkers:
    """Calls on all workers of a pool at once; it does not hold the pool.

    ``hosts``: the hosts of the workers; None: this one.  ``files``: the files of their output, or
    None.
    """

    def __init__(
        self,
        submitter: EngineSubmitter,
        life: Lifecycle,
        size: int,
        task_timeout: float | None,
        hosts: Any,
        files: TaskFiles | None,
    ) -> None:
        self.name, self.size, self.hosts = life.name, size, hosts
        self._submitter, self._life, self._task_timeout = submitter, life, task_timeout
        self._files = files
        # Guards the size, and the order of the calls on all workers.
        self._order = threading.RLock()
        self._group: WorkerGroup | None = None
        # The files through which the members of groups have met.
        self.stores: deque[File] = deque(maxlen=STORES)
        self._broadcast: list[File] = []  # broadcast objects that are not in an arena

    def run(self, func: Any, args: tuple[Any, ...], timeout: float | None) -> list[Any]:
        __tracebackhide__ = True
        self._life.check_running()
        self._life.refuse_inside()
        name = self._submitter.name_of(func)
        group = self._group
        if group is None:
            return self.call(func, args, timeout, name)
        # One thread at a time rebuilds the group.  The rebuild is itself a call on all workers, so
        # the lock is reentrant.
        with self._order:
            wrapped = group.wrap(func)
        try:
            return self.call(wrapped, args, timeout, name, LEAVE_SECONDS)
        except BaseException:
            group.note_failure()
            raise

    def call(
        self,
        func: Any,
        args: tuple[Any, ...],
        timeout: float | None = None,
        name: str = "",
        patience: float = 0.0,
    ) -> list[Any]:
        """Call a function on all workers, without their group.

        ``patience``: seconds in which the others may end by themselves after one has failed.
        """
        __tracebackhide__ = True
        timeout = self._task_timeout if timeout is None else check_timeout("timeout", timeout)
        jobs, engine = self._submitter.jobs, self._submitter.engine
        job: AllWorkersResult | None = None
        try:
            with self._order:  # all workers get the calls in one order; their number stays the same
                number, name = next(jobs.numbers), name or label(func)
                job = AllWorkersResult(number, name, self.size)
                job.options = TaskOptions(terms_of(timeout))
                if self._submitter.worker is not None:  # peers: the scope of their messages
                    func = task_function(func, scope=number)
                if self._files is not None:
                    file = self._files.of(job, name, self._files.WORKER)
                    func = task_function(func, file=file)
                self._submit(job, (func, args, {}))
            return job.get()
        # The pool has ended, so no worker runs the call.
        except PoolClosed:
            raise
        except BaseException as exc:
            if job is None:
                raise
            # Ctrl-C and the like do not wait for the other workers.
            if isinstance(exc, Exception):
                job.wait(patience)
            self._submitter.cancel(job)
            # The next call must not begin before a worker that has to be killed is replaced.
            jobs.at_turns.wait(lambda: not engine.runs(number), STOPPING)
            raise

    @shielded
    def _submit(self, job: AllWorkersResult, call: tuple[Any, ...]) -> None:
        self._life.enter(job, self.size)
        try:
            self._submitter.on_all(job, call, self.size)
        except BaseException as exc:
            self._submitter.give_up(job, exc)
            raise

    def resize(self, size: int) -> None:
        self._life.refuse_inside()
        with self._order:  # a call on all workers must be submitted to all of them
            if self._group is not None:
                raise OptionError(
                    "a pool with a group (create_group) cannot be resized; make another"
                )
            engine: Any = self._submitter.engine  # the hosts of other engines decide their size
            engine.resize(size)
            self.size = size

    def create_group(self, group: WorkerGroup) -> WorkerGroup:
        """Make the workers members of this group, which replaces an earlier one."""
        self._life.refuse_inside()
        with self._order:
            group.generation = 0 if self._group is None else self._group.generation
            group.rebuild()
            self._group = group
        return group

    def pids(self) -> list[int | None]:
        """Return the workers' process ids; None: it has no process, or has just been started."""
        pids: list[int | None] = self._submitter.engine.statistics()["pids"]
        return pids

    def broadcast(self, obj: Any) -> Broadcast:
        self._life.check_running()
        packer, told = self._submitter.packer, Brought()
        lessor, name = packer.layout.lessor, type(obj).__name__
        if lessor is not None and packer.memory_limit:

            def write(layout: Layout) -> bytes | memoryview:
                return encode(obj, recurse=packer.recurse, layout=layout, told=told)

            reference = publish(write, packer.token, lessor, name)
        else:
            message = packer.pack_option(f"broadcast of a {name}", obj, told, later=True)
            place: File | FileOfAgent
            if self.hosts is not None:
                engine: Any = self._submitter.engine
                place = FileOfAgent(engine.broadcast(message))
            else:
                place = File(message)
                self._broadcast.append(place)
            reference = Broadcast(packer.token, place, len(message), None, name)
        reference.names = told.names
        return reference


class AllWorkersResult(Job):
    """One call on each worker; the index of a task is that of its worker.

    The first failure wakes the caller, which does not wait for the other answers.
    """

    def __init__(self, number: int, label: str, workers: int) -> None:
        super().__init__(number, f"{label} on all workers", None)
        self._values: list[Any] = [None] * workers
        self._errors: dict[int, Any] = {}  # by worker, in the order of arrival
        self._left = workers
        self._failure: BaseException | PickledResult | None = None
        self._released = False

    # -- the caller's side -------------------------------------------------------------------

    def get(self) -> list[Any]:
        """Return the results by index of the worker, or raise the cause of the first failure."""
        about_to_block()
        self._waiters.wait(lambda: self._released or bool(self._errors), None)
        if self._failure is not None:
            raise exception_in(self._failure)
        values = []
        if not self._errors:
            for worker, value in enumerate(self._values):
                one = open_one(value)
                if type(one) is Unopened:
                    raise _located(one.exc, worker)
                values.append(one)
            return values
        raise self._explanation()

    def wait(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until all workers have answered."""
        self._waiters.wait(lambda: self._released, timeout)

    def _explanation(self) -> BaseException:
        """Return the first error that is not a consequence of another; it may arrive later."""
        until = time.monotonic() + CAUSE_SECONDS
        known: list[BaseException] = []
        while True:
            for worker, value in list(self._errors.items())[len(known) :]:
                found = open_one(value)
                known.append(_located(found.exc if type(found) is Unopened else found, worker))
                if not isinstance(known[-1], PeerLost):
                    return known[-1]
            left = until - time.monotonic()
            if not self._waiters.wait(
                lambda: self._released or len(self._errors) > len(known), left
            ) or len(self._errors) == len(known):
                return known[0]

    # -- the engine's side -------------------------------------------------------------------

    def describe(self, index: int) -> str:
        return self.label

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        (self._values if ok else self._errors)[index] = value
        self._left -= 1
        self.settled = not self._left
        # The first error wakes the caller; results do so when all have arrived (`release`).
        if not ok:
            self._waiters.wake()
        return self.settled

    def fail(self, exc: BaseException | PickledResult) -> None:
        if not self.settled:
            self._failure = exc
            self.settled = True

    def release(self) -> None:
        self._released = True
        self._pool = None
        self._waiters.wake()


def _located(error: BaseException, worker: int) -> BaseException:
    """Return a task's own error with the worker in its ``__cause__``."""
    if isinstance(error.__cause__, errors.RemoteTraceback):
        error.__cause__.worker = worker
    return error
