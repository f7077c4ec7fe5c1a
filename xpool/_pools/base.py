"""`BasePool`: the base of all pools.

It has the verbs, the table of unanswered jobs, the thread that delivers results, and the hooks that
send tasks and receive results.  A subclass that overrides only the hooks is a working pool.  The
built-in pools are such subclasses; they bypass the hooks that no subclass of theirs overrides.

A task is a tuple ``(job, chunk, func, args, kwds)``: run ``func(*args, **kwds)``.  A result is
``(job, chunk, (ok, value))``: the value that it returned, or the exception that it raised.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from multiprocessing.context import BaseContext
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from xpool._calls.options import (
    check_args,
    check_callable,
    names_of_inits,
    refuse_unknown,
    resolve_processes,
)
from xpool._calls.progress import await_displays
from xpool._engine.jobs.states import PoolStates
from xpool._pools.hooks import Hooks
from xpool._pools.job_table import JobTable
from xpool._pools.lifecycle import Lifecycle
from xpool._pools.submitters import HookSubmitter
from xpool._pools.verbs import PublicVerbs
from xpool._python import at_fork
from xpool._python.interrupt import interruptibly, shielded, until_interrupted
from xpool._python.starting import PromptThread, refuse_green_threads
from xpool.errors import InternalError, OptionError, PoolBroken, TimeoutError

if TYPE_CHECKING:
    import concurrent.futures

    from typing_extensions import Never, Self

    from xpool._engine.protocols import WorkerBackend
    from xpool._pools.futures import PoolExecutor
    from xpool._pools.observing import Report, Stacks

P = ParamSpec("P")
T = TypeVar("T")

# Python's errors about arguments, and pickles, refer to the verbs by these names.
for _name, _verb in vars(PublicVerbs).items():
    if callable(_verb) and not _name.startswith("_"):
        _verb.__module__, _verb.__qualname__ = "xpool", f"Pool.{_name}"

_numbers = itertools.count(1)
# The pools that have not ended.  Not a WeakSet, which runs Python code when a pool is dropped: if a
# signal handler raised in that code, the exception would be lost.
_pools: dict[int, weakref.ref[BasePool]] = {}


TURN = 0.1
"""Seconds for which this thread waits in `pool_outqueue_get` of a pool without a backend."""


@functools.cache
def _late(name: str) -> Any:
    """Return a module that few programs need, or whose imports are slow."""
    return importlib.import_module(f"xpool._pools.{name}")


def _living() -> list[BasePool]:
    return [pool for ref in list(_pools.values()) if (pool := ref()) is not None]


class BasePool(PublicVerbs, Hooks):
    """The base of all pools: the verbs of `multiprocessing.pool.Pool`, on overridable hooks.

    Args:
        processes: number of workers; None: as many as this process may use cores.
        initializer: called in each worker before its first task, with ``initargs``.
        maxtasksperchild: tasks (a chunk counts as one) after which a worker is replaced.
        context: how workers start, for hooks that start processes: kept as ``self.context``.

    Raises:
        TypeError: an argument has a wrong type.
        OptionError (a `ValueError`): an argument has a wrong value.
    """

    _backend: WorkerBackend | None = None
    # Whether a pool that is dropped while it runs ends without a warning.
    _may_be_dropped = False
    # Whether `terminate` kills processes at once, without asking them to end first.
    _ends_at_once = False
    # Whether `terminate` waits for the workers.  Threads cannot be stopped, so it does not.
    _terminate_waits = True
    # Why the number of workers cannot change; empty: it can.
    _fixed_size = ""

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
        __tracebackhide__ = True
        if unknown:
            refuse_unknown(type(self).__name__, names_of_inits(self), unknown)
        refuse_green_threads()
        at_fork.notice_fork()
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
        self.initargs = check_args(initializer, initargs, {}, 0, "initargs")
        self.maxtasksperchild = maxtasksperchild
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str or None, not {name!r}")
        self.name = name or f"xpool-{next(_numbers)}"
        self._jobs = JobTable(self.name)
        self._life = Lifecycle(self.name, self._jobs)
        self._submitter = HookSubmitter(self, self._jobs)
        try:
            self._begin()
        except BaseException:
            if self._life.state is PoolStates.RUN:
                self.terminate()  # a signal handler raised after the pool had begun
            raise
        if context is not None:
            _end_before_multiprocessing(self)

    @shielded
    def _begin(self) -> None:
        is_set_up, ref = False, None
        try:
            # Interruptible, since hooks of a subclass may wait; the built-in pools shield theirs.
            interruptibly(self.setup_queues)
            is_set_up = True
            if self._backend is not None:
                self._jobs.waker = _waker(self._backend)
                self._jobs.guards += self._backend.guards
            interruptibly(self.repopulate_pool)
            ref = weakref.ref(self)
            thread = PromptThread(
                target=_take_turns,
                args=(ref, self._backend, self._jobs, self._life),
                name=f"{self.name}-engine",
                daemon=True,
            )
            # Tells `tensors.sharing` that this thread runs no operations on tensors.
            thread.runs_only_xpool = True  # type: ignore[attr-defined]
            # Do this before the start: the thread reads the state, and removes the pool's entry.
            self._life.begin(thread)
            _pools[id(ref)] = ref
            thread.start()
        except BaseException:
            _pools.pop(id(ref), None)
            self._life.give_up("not started")
            if is_set_up or self._backend is not None:
                self.terminate_workers()
            if self._backend is not None:
                while not self._backend.ended:
                    self._backend.wait()
                self._backend.close()
            self._jobs.callbacks.stop()
            self._jobs.callbacks.join()
            raise

    # -- observing ---------------------------------------------------------------------------------

    @property
    def state(self) -> PoolStates:
        """RUN, CLOSE or TERMINATE."""
        return self._life.state

    def size(self) -> int:
        """Return the number of workers that the pool keeps."""
        return self._size

    def statistics(self) -> dict[str, Any]:
        """Return counts: of tasks (submitted, succeeded, failed) and of unanswered jobs."""
        jobs = self._jobs
        return {"state": self.state.name, "workers": self._size, **jobs.counts,
                "jobs": len(jobs.unanswered)}  # fmt: skip

    def stacks(self) -> Stacks:
        """Return where each worker is now: its task, since when, and the stack of its calls.

        ``print(pool.stacks())`` shows them.  It takes less than a second.  The workers get a
        signal, so a system call in C code of a task may fail with EINTR.

        Raises:
            OptionError: a subclass starts the workers.
        """
        found: Stacks = _late("observing").stacks_of(self)
        return found

    def __repr__(self) -> str:
        s = self.statistics()
        return (
            f"<{type(self).__name__} {self.name} {s['state']}, {s['workers']} workers, "
            f"{s['jobs']} jobs unanswered, {s['succeeded']} tasks succeeded, {s['failed']} failed>"
        )

    @shielded
    def report(self) -> Report:
        """Return the work so far: of each worker, bytes sent, the slowest tasks, deaths, retries.

        ``print(pool.report())`` shows it as a table.  Only pools of processes list workers and
        tasks.
        """
        found: Report = _late("observing").report_of(self)
        return found

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Return a context manager that traces the pool; at its end, ``path`` is written.

        If the name ends in ``.html``, the trace is a page for any browser.  Otherwise it is Chrome
        trace events in JSON, for Perfetto and ``about:tracing``.  Both have a row for each worker,
        with its tasks, deaths and retries.  Tasks shorter than a millisecond are shown in groups.

        Raises:
            OptionError: another trace of this pool is running, or its workers are threads.
            OSError: the file cannot be written.
        """
        tracing: AbstractContextManager[None] = _late("observing").trace(self, path)
        return tracing

    def watch(self) -> AbstractContextManager[None]:
        """Return a context manager that shows `report` on the terminal, live.

        Raises:
            ImportError: rich is not installed (``pip install xpool[progress]``).
        """
        watching: AbstractContextManager[None] = _late("observing").watch(self)
        return watching

    # -- futures -----------------------------------------------------------------------------------

    def submit(
        self, func: Callable[P, T], /, *args: P.args, **kwds: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Have ``func(*args, **kwds)`` called in a worker; return a future of `concurrent.futures`.

        Callbacks of the future run in a thread of the pool, one after the other.  If the pool ends
        first, the future fails with `concurrent.futures.BrokenExecutor`, whose cause says why.
        For ``timeout=`` and ``retries=``, use `apply_async`.

        Raises:
            PoolClosed: the pool takes no more work.
        """
        future: concurrent.futures.Future[T] = _late("futures").submit(self, func, args, kwds)
        return future

    def executor(self) -> PoolExecutor:
        """Return a `concurrent.futures.Executor` over this pool, which `shutdown` leaves open."""
        executor: PoolExecutor = _late("futures").PoolExecutor(self)
        return executor

    # -- number of workers -------------------------------------------------------------------------

    def resize(self, processes: int | None = None) -> None:
        """Change the number of workers while the pool works; return at once.

        To have fewer, the workers with the highest numbers end after their present task; in a
        `ThreadPool`, idle ones first.  Pools whose workers differ cannot be resized: a `CtxPool`,
        a `P2PPool`, or a pool with a `create_group`.

        Args:
            processes: the number of workers; None: the default of the constructor.

        Raises:
            OptionError (a `ValueError`): this pool cannot be resized, or a function of `run_all`
                waits for or runs in a worker that would end.
            PoolClosed: the pool takes no more work.
            OSError, RuntimeError: the system refuses a process or thread; nothing has changed.
        """
        size = resolve_processes(processes)
        self._life.check_running()
        if self._fixed_size:
            raise OptionError(f"a {type(self).__name__} cannot be resized: {self._fixed_size}")
        self._resize(size)

    def _resize(self, size: int) -> None:
        raise OptionError(
            f"a {type(self).__name__} cannot be resized: its class does not implement it"
        )

    # -- ending ------------------------------------------------------------------------------------

    @shielded
    def close(self) -> None:
        """Take no more work; the workers end when all submitted tasks are answered."""
        self._life.close()

    def terminate(self) -> None:
        """Stop the workers now.  Unanswered calls fail with `PoolClosed`."""
        life = self._life
        if not self._stop() or not self._terminate_waits or self._jobs.callbacks.handles_end():
            return
        if threading.current_thread() is not life.thread:
            life.finished.wait()
            await_displays()

    @shielded
    def _stop(self) -> bool:
        if self._backend is not None and self._life.runs_here():
            # A finalizer calls this, and may have interrupted the engine while it holds its lock.
            self._life.give_up("terminated")
            self._backend.drop()
            return False
        return self._life.stop(self.terminate_workers)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the workers have ended; `close` or `terminate` must have been called.

        Raises:
            multiprocessing.TimeoutError: they have not ended after ``timeout`` seconds (None: no
                limit).
            ValueError: the pool still runs.
            RuntimeError: called in a thread of the pool, by a callback, a task, a finalizer or the
                input of `imap`, so that it would wait for itself.
        """
        if not self._life.join(timeout):
            raise TimeoutError(
                f"{self.name} has not ended after {timeout} s: {self!r}; print(pool.stacks()) says "
                "where each worker is, and terminate() stops them"
            )

    def __reduce__(self) -> Any:
        raise NotImplementedError(
            "pool objects cannot be passed between processes or pickled: pools cannot be sent to "
            "workers. Leave it out of the object's state (by __getstate__), or map a function in "
            "place of a method; a task that needs workers makes a pool of its own"
        )

    def __enter__(self) -> Self:
        self._life.check_running()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._life.leave_block()
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
        # The garbage collector calls this at any point of any thread, so it takes no lock.  At the
        # end of the interpreter, the names of this module no longer exist: hence the parameters.
        life = self.__dict__.get("_life")
        if life is None or life.state is TERMINATE:
            return  # the pool has ended, or its constructor has failed
        ended = life.finished.is_set()
        running = life.state == PoolStates.RUN or (self._jobs.unanswered and not ended)
        if self._backend is not None and not ended:
            self._backend.drop()
        if running and not self._may_be_dropped:
            warn(
                f"unclosed running multiprocessing pool {self.name}: it was dropped while it ran; "
                "close or terminate it, or use it as a context manager",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
        if self._backend is None and not ended:
            self.terminate_workers()

    def _release_workers(self) -> None:
        """Ask every worker to end: there is no more work."""
        for _ in range(self._size):
            self.pool_inqueue_put(None)


def _waker(backend: WorkerBackend) -> Callable[[], None]:
    """Return a function that wakes the engine's thread, which holds the backend.

    It works without the pool: the garbage collector clears weak references to a pool in a cycle
    before it calls finalizers, and these may use the pool.
    """
    ref = weakref.ref(backend)

    def wake() -> None:
        backend = ref()
        if backend is not None:
            backend.wake()

    return wake


def _take_turns(
    ref: weakref.ref[BasePool], backend: WorkerBackend | None, jobs: JobTable, life: Lifecycle
) -> None:
    """The engine's thread: take turns until the pool ends.  Between turns nothing here holds it."""
    try:
        go_on = True
        while go_on:
            trouble: BaseException | None = None
            try:
                if backend is not None:
                    backend.wait()
            except BaseException as exc:
                trouble = exc
            pool = ref()
            # The reference still works while another thread finalizes the pool, so check the flag.
            if pool is None or (backend is not None and backend.dropped):
                del pool
                life.give_up("dropped")
                jobs.stop_input_readers()
                try:
                    # A finalizer of an object in a cycle with the pool may wait for an answer.
                    life.fail_unanswered()
                    _disband(backend)
                    jobs.callbacks.stop()
                finally:
                    # A thread that got the pool while another finalized it may wait in `terminate`.
                    life.finished.set()
                return
            try:
                if trouble is not None:
                    raise trouble
                go_on = _turn(pool, backend, jobs, life)
            except BaseException as exc:
                story = InternalError(
                    f"{type(exc).__name__} in the engine of {jobs.name}: {exc}. If the pool has "
                    "hooks of your own, look at the cause first; else this is a bug in xpool"
                )
                story.__cause__ = exc
                go_on = False
                # Mostly the same error, which the jobs have.
                with contextlib.suppress(BaseException):
                    life.fail(story, pool.terminate_workers)
            if not go_on:
                _finish(pool, backend, jobs, life)
            del pool
    finally:
        _pools.pop(id(ref), None)


def _turn(pool: BasePool, backend: WorkerBackend | None, jobs: JobTable, life: Lifecycle) -> bool:
    """Deliver and maintain; return False when the pool is at its end."""
    jobs.receive(pool.pool_outqueue_get, 0.0 if backend is not None else TURN)
    if backend is not None:
        failure = backend.failure
        if jobs.bookkeeping_error is not None:
            error = jobs.bookkeeping_error
            failure = PoolBroken(0, 0.0, f"{type(error).__name__}: {error}")
        if failure is not None and life.failure is None:
            # Deliver the answers that have arrived; only the other jobs fail.
            jobs.receive(pool.pool_outqueue_get)
            life.fail(failure, pool.terminate_workers)
    elif time.monotonic() - life.maintained >= TURN:
        life.maintained = time.monotonic()
        if life.state is not PoolStates.TERMINATE and pool.maintain_pool():
            pool.repopulate_pool()
    if life.state is PoolStates.CLOSE and not jobs.unanswered:
        life.drain()
    return life.state is not PoolStates.TERMINATE


def _finish(pool: BasePool, backend: WorkerBackend | None, jobs: JobTable, life: Lifecycle) -> None:
    try:
        if life.drained:
            pool._release_workers()
        else:
            # Called again: this thread may have started workers while another called `terminate`.
            pool.terminate_workers()
        pool.join_workers()
    except BaseException:
        # If the pool has failed, this is mostly the same error.  `close` ends the workers.
        if life.failure is None:
            raise
    finally:
        try:
            # Fail the jobs that a thread in `terminate` has not reached yet, before the thread that
            # completes their futures ends.
            life.fail_unanswered()
            jobs.callbacks.stop()
            if backend is not None:
                backend.close()
        finally:
            # Set this last, since `join` and `__del__` rely on the end of everything else.
            life.finished.set()


def _disband(backend: WorkerBackend | None) -> None:
    """End the workers of a pool that was dropped."""
    if backend is not None:
        backend.dropped = True  # its finalizer may come later
        try:
            backend.terminate()
            while not backend.ended:
                backend.wait()
        finally:
            backend.close()


def _after_fork_in_child() -> None:
    for pool in _living():
        pool._life.after_fork_in_child()
        if pool._backend is not None:
            pool._backend.after_fork_in_child()
        pool._backend = None
    _pools.clear()


at_exit: list[Callable[[], None]] = []
"""Functions to call at the interpreter's exit, after all pools have ended."""


@atexit.register
@until_interrupted
def _at_exit() -> None:
    for pool in _living():
        _end(pool)
    for last in at_exit:
        last()


def _end(pool: BasePool | None) -> None:
    if pool is not None and not pool._life.finished.is_set():
        pool._life.leave_program()
        pool.terminate()


def _end_before_multiprocessing(pool: BasePool) -> None:
    """Have the pool end at the interpreter's exit before `multiprocessing` waits for processes.

    `multiprocessing` waits for the processes that it has started for a ``context``.  Before, it
    only sends them SIGTERM, which they ignore if the program does.
    """
    from multiprocessing import util  # a context has loaded it

    ref = weakref.ref(pool)
    util.Finalize(pool, until_interrupted(lambda: _end(ref())), exitpriority=100)


at_fork.at_fork(in_child=_after_fork_in_child)
