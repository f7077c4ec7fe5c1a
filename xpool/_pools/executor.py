"""`xpool.Executor`: an executor with a pool of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from typing import Any

from xpool._calls.options import check_count, names_of, refuse_unknown
from xpool._pools.futures import PoolExecutor
from xpool._pools.pool_options import PoolOptions
from xpool._pools.process import Pool
from xpool.errors import OptionError


class Executor(PoolExecutor):
    """A `concurrent.futures.ProcessPoolExecutor` whose calls run in the workers of an xpool `Pool`.

    As in the pool, lambdas and closures work, tensors travel in shared memory, and a worker that
    dies fails one future, with `WorkerDied`, and is replaced.

    Args:
        max_workers: number of processes; None: one for each processor core.
        mp_context: how workers start, as ``context`` of `Pool`; None: by xpool's fork server.
        initializer: called with ``initargs`` in each worker before its first task.  If it raises
            repeatedly, the futures fail with `concurrent.futures.BrokenExecutor`, whose cause is a
            `WorkerStartFailed`.
        initargs: see ``initializer``.
        max_tasks_per_child: tasks after which a worker is replaced; None: any number.
        options: further keyword arguments of `Pool`.

    Its workers start at once.  The end of a ``with`` block, `shutdown` and the end of the program
    wait for all submitted calls.  A dropped executor finishes its calls.

    Raises:
        OptionError (a `ValueError`): an argument has a wrong value.
    """

    _pool: Pool

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: BaseContext | str | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        *,
        max_tasks_per_child: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(max_workers, int) and max_workers <= 0:
            raise OptionError(f"max_workers must be greater than 0, not {max_workers}")
        if max_tasks_per_child is not None:
            check_count("max_tasks_per_child", max_tasks_per_child)
        for theirs, given, ours in (
            ("mp_context", mp_context, "context"),
            ("max_tasks_per_child", max_tasks_per_child, "maxtasksperchild"),
        ):
            if given is not None:
                if options.get(ours) is not None:
                    raise OptionError(f"{theirs} and {ours} mean the same: pass one of them")
                options[ours] = given
        known = names_of(Executor.__init__.__code__, PoolOptions.__init__.__code__)
        known.remove("processes")
        unknown = [name for name in options if name not in known]
        if unknown:
            refuse_unknown("Executor", known, unknown)
        pool = Pool(max_workers, initializer, initargs, **options)
        pool._may_be_dropped = True
        super().__init__(pool)

    def _finish(self, unfinished: Any, wait: bool) -> None:
        self._pool.close()
        if wait:
            self._pool.join()

    def terminate_workers(self) -> None:
        """Shut down now: cancel the calls that no worker runs yet, and stop the workers.

        Running futures fail with `concurrent.futures.BrokenExecutor`.
        """
        self.shutdown(wait=False, cancel_futures=True)
        self._pool.terminate()

    def kill_workers(self) -> None:
        """Shut down now and kill the workers: unlike in `terminate_workers`, no ``finally``
        runs."""
        self._pool._ends_at_once = True
        self.terminate_workers()
