"""`Lifecycle`: the state of a pool, why it ended, and the wait for its end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from xpool._calls.results import INSIDE, Job, PickledResult, exception_in
from xpool._engine.jobs.states import PoolStates
from xpool._pools.callbacks import join_ended
from xpool._pools.job_table import JobTable
from xpool._python import at_fork
from xpool._python.waiters import Flag, deadline_of
from xpool.errors import PoolClosed


class Lifecycle:
    """The state of one pool.  It does not hold the pool: the pool gives it hooks to call."""

    def __init__(self, name: str, jobs: JobTable) -> None:
        self.name = name
        self._jobs = jobs
        # Written under the lock of the table, like its `accepting`.  TERMINATE until `begin`.
        self.state = PoolStates.TERMINATE
        self.failure: BaseException | PickledResult | None = None
        self.drained = False  # closed, and all jobs are answered
        self.finished = Flag()  # the workers have ended, and the pool has released everything
        self.thread: threading.Thread | None = None
        # When the pool began, and when a pool without a backend has last checked its workers.
        self.started = self.maintained = time.monotonic()
        self._how_ended = self._advice = ""
        self._error: type[BaseException] = PoolClosed  # of jobs that are unanswered at the end

    def begin(self, thread: threading.Thread) -> None:
        """Accept jobs from now on; ``thread`` is the engine's thread, which was not started yet."""
        self.thread = thread
        self.state = PoolStates.RUN
        self._jobs.accepting = True

    def check_running(self) -> None:
        """Raise `PoolClosed`, with the reason, unless the pool takes work."""
        if self.state is PoolStates.RUN:
            return
        if type(self.failure) is PoolClosed:  # this process was forked
            raise PoolClosed(str(self.failure))
        if self.failure is not None:
            cause = exception_in(self.failure)
            raise PoolClosed(f"The pool has failed: {self.failure}") from cause
        error = self._error if threading.current_thread().daemon else PoolClosed
        closed = self.drained or self.state is PoolStates.CLOSE
        how = self._how_ended or ("closed" if closed else "terminated")
        raise error(
            f"Pool not running: {self.name} was {how} and takes no more work; make a new pool"
        )

    def enter(self, job: Job, tasks: int) -> None:
        """Add a job to the table, or raise `PoolClosed`."""
        if not self._jobs.enter(job, tasks):
            # Raises, since no pool runs again.  Without the lock: this may unpickle the reason.
            self.check_running()

    def _end(self, state: PoolStates, failure: BaseException | PickledResult | None = None) -> None:
        """Accept no more jobs, and go to this state; nothing leads out of TERMINATE."""
        at_fork.notice_fork()
        with self._jobs.lock:
            if self.state is not PoolStates.TERMINATE:
                self.state = state
            self._jobs.accepting = False
            if failure is not None:
                self.failure = failure

    def close(self) -> None:
        """Take no more jobs; when all are answered, the engine's thread lets the workers end."""
        self._end(PoolStates.CLOSE)
        self._jobs.wake()

    def runs_here(self) -> bool:
        """Whether this is a finalizer that has interrupted the pool's own work in this thread.

        The thread is the engine's, or holds a lock of the pool.  So nothing here may wait.
        """
        return threading.current_thread() is self.thread or self._jobs.is_held_here()

    def refuse_inside(self) -> None:
        """Raise `RuntimeError` in such a finalizer."""
        if self.runs_here():
            raise RuntimeError(INSIDE)

    def give_up(self, how: str) -> None:
        """Accept no more jobs; ``how`` the pool has ended, for the errors of unanswered ones."""
        self._how_ended = self._how_ended or how
        self._end(PoolStates.TERMINATE)

    def leave_block(self) -> None:
        """Note that a ``with`` block ends the pool, for the errors of unanswered jobs."""
        if self.state is PoolStates.RUN:
            self._how_ended = "terminated by the end of its with block"
            self._advice = "; get() results inside the block, or close() and join() the pool there"

    def leave_program(self) -> None:
        """Note that the program ends.  Only daemon threads still wait for answers then, and they
        end without a traceback, as those that wait for a pool of `multiprocessing`."""
        self._error = SystemExit

    def stop(self, terminate_workers: Callable[[], None]) -> bool:
        """Stop the workers and fail all jobs; return False if the pool has ended already."""
        self._end(PoolStates.TERMINATE)
        running = not self.finished.is_set()
        if running:
            terminate_workers()
        self.fail_unanswered()
        self._jobs.stop_input_readers()
        if running:
            self._jobs.wake()
        return running

    def fail(
        self, exc: BaseException | PickledResult, terminate_workers: Callable[[], None]
    ) -> None:
        """End a pool that cannot go on: everything unanswered fails with the reason."""
        self._end(PoolStates.TERMINATE, exc)
        try:
            terminate_workers()
        finally:  # the error that has ended the pool may occur here, too
            self._jobs.fail(list(self._jobs.unanswered.values()), exc)
            self._jobs.stop_input_readers()

    def drain(self) -> None:
        """End a closed pool whose jobs are all answered."""
        with self._jobs.lock:
            if self.state is PoolStates.CLOSE:  # else the pool was terminated meanwhile
                # The flag is set before the state, because the engine's thread reads them in the
                # reverse order.
                self.drained = True
                self.state = PoolStates.TERMINATE

    def fail_unanswered(self) -> None:
        """Fail all jobs, since the pool has ended."""
        how = self._how_ended or "terminated"
        error = self._error(f"{self.name} was {how} before this was answered{self._advice}")
        self._jobs.fail(list(self._jobs.unanswered.values()), error, call_back=False)

    def join(self, timeout: float | None) -> bool:
        """Wait until the workers and the pool's threads have ended; return whether they have."""
        if self.state is PoolStates.RUN:
            raise ValueError(f"Pool is still running: close or terminate {self.name} before join")
        if self._jobs.callbacks.runs_here():
            raise RuntimeError("join() in a callback of the same pool would wait for itself")
        self.refuse_inside()
        if self._jobs.is_drawn_here():
            raise RuntimeError("join() in the input of imap of the same pool would wait for itself")
        if sys.is_finalizing():
            return True  # the pool was terminated, and no other thread runs any more
        deadline = deadline_of(timeout)
        for job in list(self._jobs.unanswered.values()):
            # A stream whose results nobody takes would wait for room for ever.
            if job.flow is not None:
                job.flow.unbind()
        ended = self.finished.wait(timeout) and self._jobs.callbacks.join(deadline)
        if ended and self.thread is not None:
            join_ended(self.thread)
        return ended

    def after_fork_in_child(self) -> None:
        """End the copy of a pool in a forked child: the workers belong to the parent."""
        self.state = PoolStates.TERMINATE
        self.failure = PoolClosed(
            f"{self.name} belongs to process {os.getppid()} that this one was forked from; "
            "make a pool of your own here"
        )
        self.finished.set()
        self.thread = None  # the thread runs in the parent, and may not have begun there
        self._jobs.after_fork_in_child(self.failure)
