"""How tasks come to the workers of an engine, from any thread of the program.

The thread that submits a task writes it to an idle worker itself.  A thread that waits for a single
answer may receive it itself (`call`, see `DirectReceive`), without the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from xpool._engine.jobs.scheduler import CALLS, Scheduler, TaskRange, Terms
from xpool._engine.monitor import DirectReceive, WorkerMonitor
from xpool._engine.replacement import Replacement
from xpool._engine.worker_process import WorkerProcess
from xpool._python.import_hooks import waits
from xpool._python.interrupt import deliver, interruptible, pending, uninterrupted
from xpool._wire.wire import Spin


class Postponed:
    """Calls that finalizers make while the engine cannot take them.

    The garbage collector may call a finalizer in the thread that holds the engine's reentrant lock,
    while the engine's tables are half changed; or in a turn of the arena (``turn`` is its lock),
    for which the holder of the engine's lock may wait.
    """

    def __init__(self, lock: Any, wake: Callable[[], object], turn: Any = None) -> None:
        self.lock, self._wake = lock, wake
        self.turn = lock if turn is None else turn
        self._calls: deque[partial[Any]] = deque()

    def here(self) -> bool:
        """Whether this is a finalizer that must not wait for the engine's lock."""
        return bool(self.lock._is_owned() or self.turn._is_owned())

    def __call__(self, call: Callable[..., object], *args: Any) -> bool:
        """In such a finalizer, have the engine's thread make a call, and return True."""
        if not self.lock._is_owned() and not self.turn._is_owned():
            return False
        self._calls.append(partial(call, *args))
        self._wake()
        return True

    def run(self) -> None:
        """Make the calls.  Called by the engine's thread, without the lock."""
        while self._calls:
            self._calls.popleft()()


class Submission:
    def __init__(
        self,
        postponed: Postponed,
        sched: Scheduler,
        monitor: WorkerMonitor,
        replacement: Replacement,
        direct: DirectReceive,
    ) -> None:
        self.lock, self._postponed = postponed.lock, postponed  # the lock is the engine's
        self._sched, self._monitor = sched, monitor
        self._replacement, self._direct = replacement, direct
        self._spin = Spin()

    def submit(self, *ranges: TaskRange) -> None:
        """Queue ranges of tasks and give them to idle workers.

        A range that is bound to worker -1, or to one that `resize` has removed, is bound to the
        worker with the least to do.  All ranges are queued under one lock, so workers get the
        ranges of two callers in the same order.
        """
        if self._postponed(self.submit, *ranges):
            return
        with self.lock:
            if self._direct.turns:
                self._direct.end_turns()
            self._put(ranges)

    def _put(self, ranges: Iterable[TaskRange], direct_job: int = 0) -> None:
        # When the pool ends, it answers all jobs itself; no worker would take queued tasks.
        if not self._replacement.ending:
            for one in ranges:
                if one.bound is not None and not 0 <= one.bound < self._sched.size:
                    one.bound = self._sched.least_loaded(newest=direct_job != 0)
                self._sched.put(one)
            self._monitor.give_idle(direct_job)

    def submit_call(self, number: int, payload: bytes | memoryview, terms: Terms) -> None:
        if self._postponed(self.submit_call, number, payload, terms):
            return
        with self.lock:
            if self._direct.turns:
                self._direct.end_turns()
            if self._replacement.ending:
                return
            self._sched.put_call(number, payload, terms)
            if self._sched.idle or self._sched.ranked:
                self._monitor.give_idle(newest=self._direct.received_last(self._sched.idle))

    def feed(self, task_range: TaskRange) -> None:
        if self._postponed(self.feed, task_range):
            return
        with self.lock:
            if not self._replacement.ending:
                # The reader looked without the lock: `_dry` may have queued it since.
                if not task_range.queued and task_range.items:
                    self._sched.put(task_range)
                self._monitor.give_idle()

    # -- a caller that waits for one answer receives it: see `DirectReceive` -----------------------

    @interruptible
    @waits
    def await_answer(self, worker: WorkerProcess, number: int) -> None:
        # `put_direct` is not called here: an error there leaves a task half entered, so the pool
        # has to end, but errors here count as those of signal handlers.
        if pending:
            deliver()
        poll = worker.poller.poll
        # Poll at most a second: if a signal handler takes the call away, no answer comes here.
        events = self._spin.look(poll) or poll(1000)
        while self.receive_direct(worker, number, events):
            if pending:
                deliver()
            events = poll(1000)

    def await_briefly(self, worker: WorkerProcess, number: int, milliseconds: int) -> None:
        """Receive the answer of a call that `put_direct` has sent, in the same thread; leave it to
        the engine's thread if it takes longer."""
        poll = worker.poller.poll
        try:
            self.receive_direct(worker, number, self._spin.look(poll) or poll(milliseconds))
        finally:
            self.let_go(number)

    def receive_call(self, number: int, milliseconds: float) -> BaseException | None:
        """Receive the answer of a call that a worker has as its only task, as `await_briefly` does.

        Returns the exception of a signal handler that could not be deferred, or None.
        """
        with self.lock:
            worker = self._monitor.take_over(number)
        if worker is None:
            return None
        raised = None
        events: list[tuple[int, int]] = []
        poll = worker.poller.poll
        # Not interruptible: a signal handler could itself wait for this worker.
        try:
            events = self._spin.look(poll) or poll(milliseconds)
        except BaseException as exc:
            raised = exc
        if self.receive_direct(worker, number, events):
            self.let_go(number)
        return raised

    @uninterrupted
    def put_direct(
        self, number: int, payload: bytes | memoryview, bound: int | None, terms: Terms
    ) -> WorkerProcess | None:
        if self.lock._is_owned() or self._postponed.turn._is_owned():
            self.submit(TaskRange(CALLS, 0, number, (payload,), bound, terms))
            return None
        with self.lock:
            if self._direct.turns:
                self._direct.end_turns()
            sched, monitor = self._sched, self._monitor
            hindered = self._replacement.ending or monitor.guard.short
            # An idle worker gets the call without queueing.  Otherwise the call is queued, and this
            # thread receives the answer only if `_put` sends the call now.
            if sched.idle and not sched.queued and bound is None and not hindered:
                w = next(reversed(sched.idle))
                worker = monitor.workers[w]
                # A thread that a task left behind may have written to the pipe after the answer.
                # Here, such data end the worker; later, they would be read as part of the next
                # answer.
                if worker.poller.poll(0):
                    monitor.receive(worker)
                if w in sched.idle and not sched.queued:
                    self._direct.begin(worker, number)
                    monitor.give(worker, sched.give(w, CALLS, 0, number, [payload], terms))
                    return worker
            self._put((TaskRange(CALLS, 0, number, (payload,), bound, terms),), number)
            return self._direct.worker_of(number)

    @uninterrupted
    def receive_direct(
        self, worker: WorkerProcess, job: int, events: list[tuple[int, int]]
    ) -> bool:
        """Receive what has come; return whether the caller must poll again, or its turn is over."""
        with self.lock:
            if job not in self._direct.turns:
                return False
            # If the sentinel is ready, or the worker is to die, the engine's thread does the rest.
            ends = events and (len(events) > 1 or events[0][0] != worker.reader.fd)
            if not ends and worker.protocol_error is None:
                if events:
                    self._monitor.receive(worker)
                held = worker.in_flight.held
                # The call is still the worker's oldest task, so it has no answer yet.
                if held and held[0].name(held[0].first) == (job, 0):
                    return True
            # From now on, another thread may receive from this worker.
            self._direct.end(job)
            return False

    def let_go(self, job: int) -> None:
        """Leave the answer of this job to the engine's thread."""
        with self.lock:
            self._direct.end(job)
