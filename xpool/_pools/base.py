"""`BasePool`: what all pools have in common.

The verbs, the table of unanswered jobs, the one thread that delivers results, and the hooks
through which tasks go out and results come in.  A subclass that overrides only the hooks is a
working pool; the built-in pools are such subclasses, with shortcuts where nobody has overridden
the hook that the shortcut passes by.

A task is a tuple ``(job, chunk, func, args, kwds)``: run ``func(*args, **kwds)``.  A result is
``(job, chunk, (ok, value))``: what it returned, or the exception that it raised.
"""

from __future__ import annotations

import atexit
import builtins
import itertools
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from xpool._calls.keywords import names_of_inits, refuse_unknown
from xpool._calls.options import (
    check_callable,
    check_iterable,
    resolve_processes,
)
from xpool._calls.results import AsyncResult, Job, Parcel, exception_in
from xpool._calls.streams import Stream
from xpool._engine.jobs.states import POOL, PoolEvent, PoolStates, step
from xpool._engine.protocols import WorkerBackend
from xpool._pools.callbacks import Callbacks, join_ended
from xpool._pools.hooks import Carried
from xpool._pools.input_reader import InputReader
from xpool._pools.public import PublicVerbs
from xpool._pools.turns import stop_input_readers, take_turns
from xpool._python import at_fork
from xpool._python.interrupt import interruptible, shielded
from xpool._python.waiters import Flag
from xpool.errors import (
    OptionError,
    PoolBroken,
    PoolClosed,
    TaskCancelled,
    TimeoutError,
    XPoolError,
)

if TYPE_CHECKING:
    from typing_extensions import Never, Self

__all__ = ["BasePool"]

TURN = 0.1
"""Seconds for which the engine's thread waits in `pool_outqueue_get` of a pool of people's own."""

_numbers = itertools.count(1)
# Those that have not ended.  Not a WeakSet, which runs Python code when a pool is dropped: what a
# signal handler raises there is lost.
_pools: dict[int, weakref.ref[BasePool]] = {}


def _living() -> list[BasePool]:
    return [pool for ref in list(_pools.values()) if (pool := ref()) is not None]


class BasePool(PublicVerbs):
    """The base of all pools: the verbs of `multiprocessing.pool.Pool`, on overridable hooks.

    Args:
        processes: number of workers; None: as many as this process may use cores.
        initializer: called in each worker before its first task, with ``initargs``.
        maxtasksperchild: tasks (a chunk counts as one) after which a worker is replaced.
        context: how workers start, for hooks that start processes: kept as ``self.context``.

    Raises:
        TypeError, OptionError (a `ValueError`): an argument makes no sense.
    """

    # Until the constructor is through, nothing runs.
    _state = PoolStates.TERMINATE
    _backend: WorkerBackend | None = None
    # Whether it ends without a warning when nobody holds it any more.
    _may_be_dropped = False
    # Whether processes are killed, without being asked to end.
    _ends_at_once = False
    # Threads cannot be stopped: a pool of threads does not wait for them in `terminate`.
    _terminate_waits = True

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[object] = (),
        maxtasksperchild: int | None = None,
        context: BaseContext | str | None = None,
        *,
        name: str | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown(type(self).__name__, names_of_inits(self), unknown)
        self.context = context
        self._size = resolve_processes(processes)
        if initializer is not None:
            check_callable("initializer", initializer)
        if maxtasksperchild is not None and (
            not isinstance(maxtasksperchild, int) or maxtasksperchild < 1
        ):
            raise OptionError(
                f"maxtasksperchild must be a positive int or None, not {maxtasksperchild!r}"
            )
        self.initializer = initializer
        self.initargs = check_iterable("initargs", initargs)
        self.maxtasksperchild = maxtasksperchild
        self.name = name or f"xpool-{next(_numbers)}"
        # Guards `_state` and entry into `_jobs`, so that no job enters after the last sweep.
        self._lock = threading.Lock()
        # Held while results are delivered: by the engine's thread or a caller that drives it.
        self._delivering = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._job_numbers = itertools.count(1)
        self._input_readers: set[InputReader] = set()
        self._callbacks = Callbacks(self.name)
        self._failure: BaseException | Parcel | None = None
        self._drained = False
        self._finished = Flag()
        self._counts = {"submitted": 0, "succeeded": 0, "failed": 0}
        self._maintained = self._started = time.monotonic()
        try:
            self._begin()
        except BaseException:
            if self._state is PoolStates.RUN:
                self.terminate()  # a signal handler has raised when all was done
            raise

    @shielded
    def _begin(self) -> None:
        there, ref = False, None
        try:
            self._set_up()
            there = True
            self._populate()
            ref = weakref.ref(self)
            self._thread = threading.Thread(
                target=_take_turns,
                args=(ref, self._backend, self._callbacks, self._input_readers),
                name=f"{self.name}-engine",
                daemon=True,
            )
            # For `tensors.sharing`: no operation on a tensor is under way in it.
            self._thread.runs_only_xpool = True  # type: ignore[attr-defined]
            # First: the thread looks at the state, and strikes the pool off when it ends.
            self._state = PoolStates.RUN
            _pools[id(ref)] = ref
            self._thread.start()
        except BaseException:
            _pools.pop(id(ref), None)
            self._state = PoolStates.TERMINATE
            if there or self._backend is not None:
                self.terminate_workers()
            if self._backend is not None:
                while not self._backend.ended:
                    self._backend.wait()
                self._backend.close()
            raise

    # The hooks of a pool of people's own may wait; the built-in pools shield theirs again.

    @interruptible
    def _set_up(self) -> None:
        self.setup_queues()

    @interruptible
    def _populate(self) -> None:
        self.repopulate_pool()

    # -- looking at it -----------------------------------------------------------------------------

    @property
    def state(self) -> PoolStates:
        """RUN, CLOSE or TERMINATE."""
        return self._state

    def size(self) -> int:
        """Return the number of workers that the pool keeps."""
        return self._size

    def statistics(self) -> dict[str, Any]:
        """Return counts: of tasks (submitted, succeeded, failed) and of unanswered jobs."""
        return {"state": self._state.name, "workers": self._size, **self._counts,
                "jobs": len(self._jobs)}  # fmt: skip

    def __repr__(self) -> str:
        s = self.statistics()
        return (
            f"<{type(self).__name__} {self.name} {s['state']}, {s['workers']} workers, "
            f"{s['jobs']} jobs unanswered, {s['succeeded']} tasks succeeded, {s['failed']} failed>"
        )

    # -- jobs --------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self._state is PoolStates.RUN:
            return
        if self._failure is not None:
            cause = exception_in(self._failure)
            raise PoolClosed(f"The pool has failed: {self._failure}") from cause
        raise PoolClosed(
            f"Pool not running: {self.name} was {self._how_ended or self._state.name.lower() + 'd'}"
            " and takes no more work; make a new pool"
        )

    def _enter(self, job: Job, tasks: int) -> None:
        with self._lock:
            if self._state is PoolStates.RUN:
                self._jobs[job.number] = job
                self._counts["submitted"] += tasks
                return
        # Raises, since no pool runs again.  Without the lock: it may unpickle the reason.
        self._check_running()

    # -- answers -----------------------------------------------------------------------------------

    def _pump(self, timeout: float = 0.0) -> None:
        """Deliver what has arrived, waiting at most ``timeout`` seconds for the first."""
        try:
            while True:
                number, index, (ok, value) = self.pool_outqueue_get(timeout)
                self._deliver(number, index, ok, value)
                timeout = 0.0
        except (queue.Empty, builtins.TimeoutError):
            return

    def _deliver(self, number: int, index: int, ok: bool, value: Any) -> None:
        with self._delivering:
            job = self._jobs.get(number)
            if job is None:
                return
            if ok:
                self._counts["succeeded"] += value.count if isinstance(value, Parcel) else 1
            else:
                self._counts["failed"] += 1
                if isinstance(value, Carried):
                    value = value.exc
            if job.deliver(index, ok, value):
                self._complete(job)

    def _record(self, number: int, index: int, ok: bool, value: Any) -> None:
        """Hand on an answer that is written in a journal."""
        with self._delivering:
            job = self._jobs.get(number)
            if isinstance(job, Stream) and job.record(index, ok, value):
                self._complete(job)

    def _end(self, number: int, length: int, input_reader: InputReader) -> None:
        """The input of a stream has ended."""
        self._input_readers.discard(input_reader)
        with self._lock:
            self._counts["submitted"] += length
        with self._delivering:
            job = self._jobs.get(number)
            if isinstance(job, Stream) and job.end(length):
                self._complete(job)

    def _complete(self, job: Job) -> None:
        if job.has_callback:
            assert isinstance(job, AsyncResult)
            if job.is_future:
                self._callbacks.add_future(job)
            else:
                self._callbacks.add(job)
        else:
            self._forget(job)
            job.release()

    def _forget(self, job: Job) -> None:
        """Strike a job off; the engine's thread looks whether it was the last."""
        self._jobs.pop(job.number, None)
        if self._state is not PoolStates.RUN:
            self._wake()

    @shielded
    def _cancel(self, job: Job) -> bool:
        """Answer a job with `TaskCancelled`, and have its tasks stopped; False: it was answered."""
        story = f"{job.label} was cancelled before it had a result"
        if not self._fail_jobs([job], TaskCancelled(story)):
            return False
        self._withdraw(job)
        return True

    def _fail_jobs(
        self, jobs: Iterable[Job], exc: BaseException | Parcel, call_back: bool = True
    ) -> int:
        """Answer all these jobs with an error, each with an instance of its own.

        Returns how many had no answer yet.
        """
        failed = 0
        for job in jobs:
            with self._delivering:
                if job.settled:
                    continue
                failed += 1
                job.fail(_own(exc))
                self._counts["failed"] += 1
                if call_back or job.is_future:
                    self._complete(job)
                else:
                    self._forget(job)
                    job.release()
        return failed

    # -- ending ------------------------------------------------------------------------------------

    @shielded
    def close(self) -> None:
        """Take no more work; the workers end when all that was submitted is answered."""
        with self._lock:
            self._state = step(POOL, self._state, PoolEvent.CLOSE)
        self._wake()

    def terminate(self) -> None:
        """Stop the workers now.  What is not answered yet fails with `PoolClosed`."""
        if (
            self._stop()
            and self._terminate_waits
            and threading.current_thread() is not self._thread
        ):
            self._finished.wait()

    @shielded
    def _stop(self) -> bool:
        with self._lock:
            self._state = step(POOL, self._state, PoolEvent.TERMINATE)
            jobs = list(self._jobs.values())
        running = not self._finished.is_set()
        if running:
            self.terminate_workers()
        self._fail_unanswered(jobs)
        stop_input_readers(self._input_readers)
        if running:
            self._wake()
        return running

    def _fail_unanswered(self, jobs: Iterable[Job]) -> None:
        how = self._how_ended or "terminated"
        error = PoolClosed(f"{self.name} was {how} before this was answered{self._instead}")
        self._fail_jobs(jobs, error, call_back=False)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the workers have ended; `close` or `terminate` must have been called.

        Raises:
            multiprocessing.TimeoutError: they have not after ``timeout`` seconds (None: any time).
            ValueError: the pool still runs.
            RuntimeError: called from a callback of the pool, which would wait for itself.
        """
        if self._state is PoolStates.RUN:
            raise ValueError(f"Pool is still running: close or terminate {self.name} before join")
        if self._callbacks.runs_here():
            raise RuntimeError("join() in a callback of the same pool would wait for itself")
        deadline = None if timeout is None else time.monotonic() + timeout
        for job in list(self._jobs.values()):
            # Else a stream whose results nobody takes would wait for room, and this for its end.
            if job.flow is not None:
                job.flow.unbind()
        ended = self._finished.wait(timeout) and self._callbacks.join(deadline)
        if ended:
            join_ended(self._thread)
        else:
            raise TimeoutError(
                f"{self.name} has not ended after {timeout} s: {self!r}; terminate() stops what "
                "its workers do"
            )

    def __reduce__(self) -> Any:
        raise NotImplementedError(
            "pool objects cannot be passed between processes or pickled: pools cannot be sent to "
            "workers. A task that needs workers makes a pool of its own"
        )

    def __enter__(self) -> Self:
        self._check_running()
        return self

    _how_ended = _instead = ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state is PoolStates.RUN:
            self._how_ended = "terminated by the end of its with block"
            self._instead = "; get() results inside the block, or close() and join() the pool there"
        self.terminate()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.__exit__(kind, exc, trace)

    def __del__(
        self, TERMINATE: PoolStates = PoolStates.TERMINATE, warn: Any = warnings.warn
    ) -> None:
        # Called by the garbage collector, at any point of any thread: it may not take a lock.
        # And at the interpreter's end, when this module's names are gone already.
        if self._state is TERMINATE:
            return
        if self._may_be_dropped:
            pass
        elif self._state == PoolStates.RUN or (self._jobs and not self._finished.is_set()):
            warn(
                f"unclosed running multiprocessing pool {self.name}: it was dropped while it ran; "
                "close or terminate it, or use it as a context manager",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
        if self._finished.is_set():
            return  # the engine has put everything away
        if self._backend is not None:
            self._backend.drop()
        else:
            self.terminate_workers()

    def _wake(self) -> None:
        if self._backend is not None:
            self._backend.wake()

    def _break(self, exc: BaseException | Parcel) -> None:
        """The pool cannot go on: everything unanswered fails with the reason."""
        with self._lock:
            self._state = step(POOL, self._state, PoolEvent.FAILED)
            self._failure = exc
            jobs = list(self._jobs.values())
        self.terminate_workers()
        self._fail_jobs(jobs, exc)
        stop_input_readers(self._input_readers)

    # -- the engine's thread -----------------------------------------------------------------------

    def _turn(self) -> bool:
        """Deliver and maintain; False when the pool is at its end."""
        backend = self._backend
        self._pump(0.0 if backend is not None else TURN)
        if backend is not None:
            failure = backend.failure
            if self._bookkeeping_error is not None:
                failure = PoolBroken(
                    0, 0.0, f"{type(self._bookkeeping_error).__name__}: {self._bookkeeping_error}"
                )
            if failure is not None and self._failure is None:
                # What has come up to now is delivered; only the rest fails.
                self._pump()
                self._break(failure)
        elif time.monotonic() - self._maintained >= TURN:
            self._maintained = time.monotonic()
            if self._state is not PoolStates.TERMINATE and self.maintain_pool():
                self.repopulate_pool()
        if self._state is PoolStates.CLOSE and not self._jobs:
            with self._lock:
                if self._state is PoolStates.CLOSE:
                    self._state = step(POOL, self._state, PoolEvent.DRAINED)
                    self._drained = True
        return self._state is not PoolStates.TERMINATE

    def _finish(self) -> None:
        try:
            if self._drained:
                self._release_workers()
            else:
                # Again: this thread may have started workers while another called `terminate`.
                self.terminate_workers()
            self.join_workers()
        finally:
            # Those that a thread in `terminate` has not come to yet: their futures are completed by
            # a thread that ends here.
            self._fail_unanswered(list(self._jobs.values()))
            self._callbacks.stop()
            if self._backend is not None:
                self._backend.close()
            # Last: whoever waits for it, `__del__` too, takes all else for put away.
            self._finished.set()

    def _release_workers(self) -> None:
        """Ask every worker to end: there is no more work."""
        for _ in range(self._size):
            self.pool_inqueue_put(None)

    def _after_fork_in_child(self) -> None:
        """This process is a copy: the workers are the parent's, and so are the answers."""
        self._state = PoolStates.TERMINATE
        self._failure = PoolClosed(
            f"{self.name} belongs to process {os.getppid()} that this one was forked from; "
            "make a pool of your own here"
        )
        self._finished.set()
        # Other threads of the parent may have held these.
        self._delivering = threading.Lock()
        self._lock = threading.Lock()
        self._callbacks = Callbacks(self.name)  # whose threads are the parent's
        if self._backend is not None:
            self._backend.after_fork_in_child()
        self._backend = None
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            job.fail(_own(self._failure))
            job.release()


def _own(exc: BaseException | Parcel) -> BaseException | Parcel:
    """Return an instance of its own for one of several callers; a parcel makes one when opened."""
    if isinstance(exc, XPoolError):
        copy = type(exc)(*exc.args)
        copy.__cause__ = exc.__cause__
        return copy
    return exc


def _take_turns(ref: weakref.ref[BasePool], *parts: Any) -> None:
    """The engine's thread."""
    try:
        take_turns(ref, *parts)
    finally:
        _pools.pop(id(ref), None)


def _after_fork_in_child() -> None:
    for pool in _living():
        pool._after_fork_in_child()
    _pools.clear()


at_exit: list[Callable[[], None]] = []
"""What is to be done at the interpreter's end when all pools have ended."""


@atexit.register
def _at_exit() -> None:
    for pool in _living():
        if not pool._finished.is_set():
            pool.terminate()
    for last in at_exit:
        last()


at_fork.at_fork(in_child=_after_fork_in_child)
