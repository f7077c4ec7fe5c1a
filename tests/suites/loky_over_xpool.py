"""loky's tests of its executor, run with `xpool.Executor`; copied to the folder of loky's tests.

`Executor` takes loky's arguments, and has those private names of loky's executor that have a
counterpart.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import types
from typing import Any

from support.executor_names import PrivateNames

import xpool

from . import _executor_mixin, _test_process_executor  # type: ignore[attr-defined]

# It counts this process's children, but xpool's workers are children of the server.
_executor_mixin.psutil = None
_test_process_executor.ShutdownExecutorError = RuntimeError
# In xpool a death fails one future; `BrokenExecutor` means that the executor has failed.
_ends = (xpool.WorkerDied, concurrent.futures.BrokenExecutor)
_test_process_executor.BrokenProcessPool = _test_process_executor.TerminatedWorkerError = _ends
_test_process_executor.process_executor._RemoteTraceback = xpool.RemoteTraceback


class Executor(PrivateNames):
    """An executor with the constructor and `shutdown` of loky's."""

    def __init__(
        self,
        max_workers: int | None = None,
        job_reducers: Any = None,
        result_reducers: Any = None,
        timeout: float | None = None,
        context: Any = None,
        initializer: Any = None,
        initargs: Any = (),
        env: Any = None,
    ) -> None:
        super().__init__(max_workers, None, initializer, initargs)

    def shutdown(self, wait: bool = True, kill_workers: bool = False, **options: Any) -> None:
        """Shut down, with ``kill_workers`` at once."""
        super().shutdown(wait and not kill_workers, **options)
        if kill_workers:
            self._pool._ends_at_once = True
            self._pool.terminate()

    @property
    def _flags(self) -> Any:
        return types.SimpleNamespace(broken=self._pool._life.failure, shutdown=self._over)


class Context:
    """A context with the methods that these tests use: an event that can be sent."""

    manager: Any = None

    def get_start_method(self) -> str:
        """Return the name that the tests' scripts take."""
        return "loky"

    def Event(self) -> Any:
        """Return an event of a manager."""
        if Context.manager is None:
            Context.manager = multiprocessing.get_context("spawn").Manager()
        return Context.manager.Event()


class Mixin(_executor_mixin.ExecutorMixin):  # type: ignore[misc, name-defined]
    """Makes the executors."""

    executor: Executor | None
    executor_type = Executor
    context = Context()

    def teardown_method(self, method: Any) -> None:
        """Shut the executor down in any state."""
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.shutdown(kill_workers=True)


class TestShutdown(Mixin, _test_process_executor.ExecutorShutdownTest):  # type: ignore[misc, name-defined]
    """loky's tests."""

    def _prime_executor(self) -> None:
        pass


class TestWait(Mixin, _test_process_executor.WaitTests):  # type: ignore[misc, name-defined]
    """loky's tests."""


class TestAsCompleted(Mixin, _test_process_executor.AsCompletedTests):  # type: ignore[misc, name-defined]
    """loky's tests."""


class TestExecutor(Mixin, _test_process_executor.ExecutorTest):  # type: ignore[misc, name-defined]
    """loky's tests."""
