"""The engine's thread of a pool: it delivers results and maintains the workers until the end."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import TYPE_CHECKING, TypeVar

from xpool._engine.jobs.states import PoolStates
from xpool._pools.hooks import Hooks
from xpool._pools.job_table import JobTable
from xpool._pools.lifecycle import Lifecycle
from xpool.errors import InternalError, PoolBroken

if TYPE_CHECKING:
    from xpool._engine.protocols import WorkerBackend

TURN = 0.1
"""Seconds for which this thread waits in `pool_outqueue_get` of a pool without a backend."""


Some = TypeVar("Some", bound=Hooks)


def take_turns(
    ref: weakref.ref[Some], backend: WorkerBackend | None, jobs: JobTable, life: Lifecycle
) -> None:
    """Take turns until the pool ends.  Between turns nothing here holds the pool."""
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
            jobs.stop_input_readers()
            try:
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
                f"{type(exc).__name__} in the engine of {jobs.name}: {exc}. If the pool has hooks "
                "of your own, look at the cause first; else this is a bug in xpool"
            )
            story.__cause__ = exc
            go_on = False
            with contextlib.suppress(BaseException):  # mostly the same error, which the jobs have
                life.fail(story, pool.terminate_workers)
        if not go_on:
            _finish(pool, backend, jobs, life)
        del pool


def _turn(pool: Hooks, backend: WorkerBackend | None, jobs: JobTable, life: Lifecycle) -> bool:
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


def _finish(pool: Hooks, backend: WorkerBackend | None, jobs: JobTable, life: Lifecycle) -> None:
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
        try:
            backend.terminate()
            while not backend.ended:
                backend.wait()
        finally:
            backend.close()
