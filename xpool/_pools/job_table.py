"""`JobTable`: the jobs of a pool that are not answered yet."""

from __future__ import annotations

import builtins
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from xpool._calls.results import AsyncResult, Job, PickledResult, Unopened, error_of
from xpool._pools.callbacks import Callbacks
from xpool._pools.hooks import Carried, Result
from xpool._pools.input_reader import InputReader
from xpool._python import at_fork
from xpool._python.waiters import Waiters
from xpool.errors import XPoolError

HOOKED = "pool_outqueue_get() has returned"
CAUSED = "a hook has caused"
"""The beginnings of errors about results that come through hooks."""

Failure = TypeVar("Failure", bound=BaseException | PickledResult)


class JobTable:
    """The unanswered jobs of a pool; it delivers their results, or fails them.

    The table does not hold the pool.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.waker: Callable[[], object] = _nothing  # set when there is an engine
        # Guards `accepting` and entry into `unanswered`: no job enters after the last sweep.
        self.lock = threading.RLock()
        self.accepting = False
        self.unanswered: dict[int, Job] = {}
        self.numbers = itertools.count(1)
        # What hooks of a subclass have done, for errors about wrong results; empty: it has none.
        self.hooked = HOOKED
        # Where an engine puts answers; None: `pool_outqueue_get` returns them.
        self.results: deque[Result] | None = None
        # Held while a job takes an answer: by the engine's thread, or by a caller that receives.
        # Its holder waits for no other lock, because a finalizer may wait for this one while its
        # thread has any other lock of the pool.
        self._delivering = threading.RLock()
        # Answers wait for the holder of one of these, so it must not wait for an answer.  They are
        # reentrant, so that a finalizer which has interrupted the holder can submit tasks.
        self.guards: list[Any] = [self.lock, self._delivering]
        self.input_readers: set[InputReader] = set()
        self.callbacks = Callbacks(name)
        self.counts = {"submitted": 0, "succeeded": 0, "failed": 0}
        # An exception in the middle of the pool's bookkeeping: the pool cannot continue.
        self.bookkeeping_error: BaseException | None = None
        # Threads that wait for an event in the engine other than an answer; woken at each turn.
        self.at_turns = Waiters()

    def enter(self, job: Job, tasks: int) -> bool:
        """Add a job of this many tasks; return False if the pool accepts no more."""
        if not at_fork.known[0]:
            at_fork.notice_fork()
        with self.lock:
            if self.accepting:
                self.unanswered[job.number] = job
                self.counts["submitted"] += tasks
                return True
        return False

    def is_held_here(self) -> bool:
        """Whether this is a finalizer that has interrupted a holder of the `guards`."""
        for guard in self.guards:  # noqa: SIM110 - each wait for an answer runs this
            if guard._is_owned():
                return True
        return False

    def wake(self) -> None:
        """Wake the engine's thread."""
        self.waker()

    # -- answers -----------------------------------------------------------------------------------

    def receive(self, get: Callable[[float], Result], timeout: float = 0.0) -> None:
        """Deliver the results that ``get`` returns, waiting ``timeout`` seconds for the first."""
        if self.results is not None:
            self.take(self.results)
            return
        try:
            while True:
                number, index, (ok, value) = get(timeout)
                self.deliver(number, index, ok, value)
                timeout = 0.0
        except (queue.Empty, builtins.TimeoutError):
            pass
        if self.at_turns:
            self.at_turns.wake()

    def take(self, results: deque[Result]) -> None:
        """Deliver these results, which other threads take, too."""
        while results:
            try:
                number, index, (ok, value) = results.popleft()
            except IndexError:  # another thread has taken the last one
                break
            self.deliver(number, index, ok, value)
        if self.at_turns:
            self.at_turns.wake()

    def deliver(
        self, number: int, index: int, ok: bool, value: Any, completes: bool = False
    ) -> Job | None:
        """Hand the answer of task ``index`` to its job; ignore it if the job is answered.

        ``completes``: if this answers the job of a future, return it, to be completed by the
        caller.
        """
        wrong, answered = "", False
        with self._delivering:
            job = self.unanswered.get(number)
            if job is None:
                if not isinstance(number, int):  # such a job would wait for ever
                    raise TypeError(f"{self.hooked} {number!r} as the number of a job, not an int")
                return None
            # Else a result would be lost, or `imap` would wait for one that never comes.
            if not self.hooked or not (wrong := job.misfit(index, ok, value)):
                if ok:
                    count = value.count if isinstance(value, PickledResult) else 1
                    self.counts["succeeded"] += count
                else:
                    self.counts["failed"] += 1
                    if isinstance(value, Carried):
                        value = value.exc
                    elif not isinstance(value, (PickledResult, Unopened)):
                        value = error_of(value)
                if answered := job.deliver(index, ok, value):
                    if completes and job.is_future:
                        return job
                    if job.reserved:
                        return None  # the thread that has reserved it completes it
                    if job.has_callback:
                        self._queue_callback(job)
                elif not job.asks:
                    return None
        if wrong:
            self.fail([job], RuntimeError(f"{self.hooked} {wrong}"))
        elif answered:
            self.complete(job)
        else:
            job.send_asks()
        return None

    def advance(self, number: int, step: Callable[[Any], bool]) -> None:
        """Call ``step`` with an unanswered job; it returns whether the job is now answered."""
        with self._delivering:
            job = self.unanswered.get(number)
            if job is None or not step(job):
                return
            if job.has_callback:
                self._queue_callback(job)
        self.complete(job)

    def submitted(self, tasks: int) -> None:
        """Count tasks of a job that has entered."""
        with self.lock:
            self.counts["submitted"] += tasks

    def end_input(self, number: int, length: int, input_reader: InputReader) -> None:
        """Note that the input of a stream has ended after ``length`` tasks."""
        self.input_readers.discard(input_reader)
        self.submitted(length)
        self.advance(number, lambda job: job.end(length))

    def _queue_callback(self, job: Job) -> None:
        """Queue the callback of a job, as soon as it is answered: the pool ends after its call."""
        assert isinstance(job, AsyncResult)
        self.callbacks.of(job).put(job)

    def complete(self, job: Job, call_back: bool = True) -> None:
        """Have the queued callback of an answered job called; if it has none, or without
        ``call_back``, remove the job and release its callers.  Called without `_delivering`."""
        if call_back and job.has_callback:
            self.callbacks.of(job).serve()
            return
        if job.drop_function is not None:
            job.drop_function()
            job.drop_function = None
        self.unanswered.pop(job.number, None)
        if not self.accepting:
            try:
                self.wake()  # the engine's thread checks whether it was the last job
            except OSError:
                # The program has closed the descriptor; the callers must be released all the same.
                pass
        job.release()

    def complete_future(self, job: Any) -> None:
        """Complete the future of an answered job in this thread."""
        try:
            job.call_back()
        finally:
            self.complete(job, call_back=False)

    def reserve(self, job: Job) -> bool:
        """Let this thread complete the future of a job, after `end_reservation`.  Return False if
        the job is answered, or another thread will do so."""
        with self._delivering:
            if job.settled or job.reserved:
                return False
            job.reserved = True
            return True

    def end_reservation(self, job: Job) -> bool:
        """Return whether the job was answered meanwhile, so that this thread must complete it."""
        with self._delivering:
            job.reserved = False
            return job.settled

    def fail(
        self, jobs: Iterable[Job], exc: BaseException | PickledResult, call_back: bool = True
    ) -> int:
        """Answer these jobs with an error, each with its own instance.

        Returns how many had no answer yet.
        """
        failed = 0
        for job in jobs:
            with self._delivering:
                if job.settled:
                    continue
                failed += 1
                job.fail(_own(exc))
                self.counts["failed"] += 1
                if job.reserved:
                    continue
                calls_back = call_back or job.is_future
                if calls_back and job.has_callback:
                    self._queue_callback(job)
            self.complete(job, calls_back)
        return failed

    # -- ending ------------------------------------------------------------------------------------

    def is_drawn_here(self) -> bool:
        """Whether this thread draws the input of an `imap`, for which the pool's end waits."""
        me = threading.current_thread()
        return any(one.thread is me and not one.flow.stopped for one in list(self.input_readers))

    def stop_input_readers(self) -> None:
        """Stop drawing all inputs."""
        for input_reader in list(self.input_readers):
            input_reader.flow.stop()

    def after_fork_in_child(self, exc: BaseException) -> None:
        """Fail all jobs: the workers and the threads belong to the parent."""
        # Other threads of the parent may have held these.
        self._delivering = threading.RLock()
        self.lock = threading.RLock()
        self.guards = [self.lock, self._delivering]
        self.callbacks.forget()
        self.callbacks = Callbacks(self.name)
        self.accepting = False
        self.waker = _nothing
        jobs = list(self.unanswered.values())
        self.unanswered.clear()
        for job in jobs:
            job.abandon(_own(exc))


def _nothing() -> None:
    """Wake no thread."""


def _own(exc: Failure) -> Failure:
    """Return an error for one of several callers: a copy, so that each gets its own traceback.

    A `PickledResult` needs no copy: it makes a new error each time that it is unpickled.
    """
    if isinstance(exc, XPoolError):
        copy = type(exc)(*exc.args)
        copy.__cause__ = exc.__cause__
        return copy
    return exc
