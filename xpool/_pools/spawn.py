"""`spawn` and `start_processes`: run one function in n processes and return the results.

They work like `torch.multiprocessing.spawn`: each process calls ``fn(i, *args)``; if one fails, the
others are stopped, and its error is raised with its traceback.  Unlike torch's, they return
results.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from xpool._calls.options import check_callable, check_count
from xpool._calls.results import AsyncResult
from xpool._pools.process import P2PPool
from xpool._python.waiters import Waiters
from xpool._worker import replica
from xpool.errors import PoolClosed, RemoteTraceback, WorkerDied, XPoolError, exit_reason


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = None,
) -> Any:
    """Run ``fn(i, *args)`` in ``nprocs`` processes, i from 0; return the list of their results.

    Args:
        fn: a function, as for a pool's task.
        args: its further arguments; they may hold locks and queues of `multiprocessing`.
        nprocs: number of processes; 0 runs nothing.
        join: False: return a `ProcessContext` at once.
        daemon: whether the processes are daemonic; such processes cannot have children.
        start_method: None: xpool's fork server; or "spawn", "fork", "forkserver".

    Raises:
        torch.multiprocessing.ProcessRaisedException: ``fn`` raised in one of the processes, and the
            others were stopped.  ``__cause__`` is the exception; the message has its traceback.
        torch.multiprocessing.ProcessExitedException: a process was ended by a signal, or by
            `sys.exit` with a code other than 0.
        WorkerStartFailed: a process could not be started.
    """
    check_callable("fn", fn)
    if not check_count("nprocs", nprocs, least=0):
        return [] if join else ProcessContext(None, replica.run, [])
    pool = Replicas(fn, tuple(args), nprocs, daemon=daemon, start_method=start_method)
    context = ProcessContext(pool, replica.run, [(i,) for i in range(nprocs)])
    return context.wait() if join else context


start_processes = spawn
"""The name that `torch.multiprocessing` uses for any start method."""


class Replicas(P2PPool):
    """Workers that each run one function once; they start together and end together."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        n: int,
        *,
        daemon: bool,
        start_method: str | None,
        contexts: list[Any] | None = None,
    ) -> None:
        self._contexts = contexts
        super().__init__(n, replica.keep, (fn, args), context=start_method, is_daemon=daemon)


class ReplicaDied(WorkerDied):
    """The process of a replica has ended before its function returned; it is not run again."""

    def __str__(self) -> str:
        return (
            f"Process {self.worker} (pid {self.pid}) ended with {exit_reason(self.exitcode)} while "
            f"it ran {self.task}. The others were stopped."
        )


class ReplicaProcess:
    """One process of a `ProcessContext`, with the attributes of a started
    `multiprocessing.Process`.

    It has ended when its function has.
    """

    def __init__(self, context: ProcessContext, index: int) -> None:
        self._context, self._index = context, index
        self.name = f"process {index}"

    @property
    def pid(self) -> int:
        """Its process id; reading it waits until the process has started.

        Raises:
            WorkerStartFailed: the process cannot start.
        """
        try:
            pid: int = self._context._pids[self._index].get()
        except WorkerDied as exc:
            return exc.pid or -1
        return pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs; 0 after its function has returned, 1 after it has raised.

        Otherwise the exit code of the process, or the negative number of the signal that ended it.
        """
        if self._index not in self._context._in_order():
            return None
        try:
            # The result arrives in a moment: the callbacks of `_told` run just before.
            self._context._pending[self._index].get()
        except WorkerDied as exc:
            return -1 if exc.exitcode is None else exc.exitcode
        except PoolClosed:  # stopped by `_stop`, or the process of a forked child's parent
            return -signal.SIGTERM
        except BaseException:
            return 1
        return 0

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for the end of this process."""
        self._context._pending[self._index].wait(timeout)

    def terminate(self) -> None:
        """Send it SIGTERM; `ProcessContext.join` then raises."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL; `ProcessContext.join` then raises."""
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        pid, pool = self.pid, self._context._pool
        # Check that it lives: another process may have the id of an ended one.
        if pool is not None and pid in pool.statistics()["pids"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def __repr__(self) -> str:
        return f"<ReplicaProcess {self._index} exitcode={self.exitcode}>"


class ProcessContext:
    """Processes that run one function each, as the `ProcessContext` of `torch.multiprocessing`.

    If this object is dropped, the processes run to their end.  The end of the interpreter stops
    them.

    Attributes:
        processes: a `ReplicaProcess` for each, in order of index.
    """

    def __init__(
        self, pool: Replicas | None, run: Callable[..., Any], args: Sequence[tuple[Any, ...]]
    ) -> None:
        self._pool = pool  # None: there are no processes
        self._ended: list[int] = []  # indices in the order of the ends
        self._ends = Waiters()  # threads that wait for more ends
        self._running = set(range(len(args)))
        self._values: list[Any] = [None] * len(args)
        self._failure: BaseException | None = None
        self._pids: list[AsyncResult[int]] = []
        self._pending: list[AsyncResult[Any]] = []
        self.processes = [ReplicaProcess(self, i) for i in range(len(args))]
        if pool is not None:
            # Ask each worker for its pid first: `apply_async` returns before the worker has one.
            self._pids += [pool.apply_async(replica.pid, worker=i) for i in range(len(args))]
            self._pending += [
                pool.apply_async(run, each, None, *_told(self._ended, self._ends, i), worker=i)
                for i, each in enumerate(args)
            ]
            pool.close()  # no more calls: each process ends after its answer

    def pids(self) -> list[int]:
        """Wait until all processes have started; return their ids in order of index.

        Raises:
            WorkerStartFailed: a process cannot start.
        """
        return [process.pid for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds until all have ended; return whether they have.

        If one fails, the others are stopped.  With ``grace_period``, they have that many seconds to
        end by themselves first.

        Raises:
            As `spawn`, for the first process that failed.
        """
        if self._failure is not None:
            raise self._failure
        until = None if timeout is None else time.monotonic() + timeout
        failed = self._wait(until)
        # Another thread may have joined meanwhile, and stopped the processes.
        if failed is not None and self._failure is None:
            self._failure = self._error(*failed)
            if grace_period is not None:
                self._wait(time.monotonic() + grace_period, others=True)
            self._stop()
        if self._failure is not None:
            raise self._failure
        if self._running:
            return False
        if self._pool is not None:
            self._pool.join()
        return True

    def results(self) -> list[Any]:
        """Return the results in order of index.

        Raises:
            XPoolError: a process has failed or not ended; call `join` until it returns True.
        """
        if self._failure is not None:
            raise self._failure
        if self._running:
            many = f"{len(self._running)} of {len(self._values)}"
            raise XPoolError(f"{many} processes have not ended; call join() first")
        return list(self._values)

    def wait(self) -> list[Any]:
        """Join and return the results; stop all processes if that raises."""
        try:
            self.join()
        except BaseException:
            self._stop()
            raise
        return self.results()

    def _wait(self, until: float | None, others: bool = False) -> tuple[int, BaseException] | None:
        """Wait until all have ended, the time is over, or one has failed; return the failed one."""
        while True:
            for index in self._in_order():
                if index in self._running:
                    error = self._take(index)
                    if error is not None and not others:
                        return index, error
            left = None if until is None else until - time.monotonic()
            if not self._running or not self._ends.wait(self._has_ended, left):
                return None

    def _has_ended(self) -> bool:
        """Whether a process has ended that `_take` has not seen, or other threads have seen all."""
        return not (self._running and self._running.isdisjoint(self._in_order()))

    def _in_order(self) -> list[int]:
        """Return the indices of the ended processes, in the order of their ends."""
        # A terminated pool runs no callbacks, and so does its copy in a forked child.
        stopped = self._pool is not None and self._pool.state == "TERMINATE"
        return self._ended + list(self._running if stopped else ())

    def _take(self, index: int) -> BaseException | None:
        """Store the result of an ended process; return its failure."""
        pending = self._pending[index]
        failure: BaseException | None = None
        try:
            self._values[index] = pending.get()
        except WorkerDied as exc:
            # `sys.exit()` and `sys.exit(0)` are successes without a result.  A new exception, since
            # the text of `WorkerDied` advises `retries=`, which these calls do not have.
            died = ReplicaDied(exc.pid or self.processes[index].pid, exc.exitcode, index, exc.task)
            failure = None if exc.exitcode == 0 else died
        except KeyboardInterrupt:
            # torch treats this exception in the process as a success; here it is the user's Ctrl-C.
            if not pending.ready() or pending.successful():
                raise
        except Exception as exc:
            failure = exc
        self._running.discard(index)
        self._ends.wake()
        return failure

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._ends.wake()

    def _error(self, index: int, exc: BaseException) -> BaseException:
        """Return the exception that `join` raises."""
        if isinstance(exc, XPoolError) and not isinstance(exc, WorkerDied):
            return exc
        from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

        error: BaseException
        if isinstance(exc, WorkerDied):
            pid, code = exc.pid or -1, -1 if exc.exitcode is None else exc.exitcode
            what = exit_reason(exc.exitcode) if exc.signal is None else f"signal {exc.signal}"
            message = f"process {index} terminated with {what}"
            error = ProcessExitedException(message, index, pid, code, exc.signal)
        else:
            cause = exc.__cause__
            trace = cause.text if isinstance(cause, RemoteTraceback) else repr(exc)
            message = f"\n\n-- Process {index} terminated with the following error:\n{trace}"
            error = ProcessRaisedException(message, index, self.processes[index].pid)
        error.__cause__ = exc
        return error


def _told(ended: list[int], ends: Waiters, index: int) -> tuple[Callable[[Any], None], ...]:
    """Return callbacks for the end of a process.  They do not hold the context: the pool holds
    them, and the context holds the pool."""

    def tell(_: Any) -> None:
        ended.append(index)
        ends.wake()

    return tell, tell
