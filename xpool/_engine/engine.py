"""The engine of the process pools: waits for events, and acts on them.  See docs/dev/design.md.

One lock guards all of it.  It is held for moments: no thread waits for a descriptor, starts a
process, runs a user's code or wakes a caller while holding it.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from xpool._calls.results import INSIDE
from xpool._engine import stacks
from xpool._engine.answers import EngineOptions, StartFailure
from xpool._engine.jobs.scheduler import Batch, InFlight, Scheduler
from xpool._engine.jobs.states import RestartPolicy
from xpool._engine.ledger import EngineReport, Event, Ledger
from xpool._engine.memory import ArenaMaintenance, EngineParts
from xpool._engine.monitor import DirectReceive, WorkerMonitor
from xpool._engine.reactor import Reactor
from xpool._engine.replacement import Launch, Replacement
from xpool._engine.stacks import WorkerStack
from xpool._engine.submission import Postponed, Submission
from xpool._engine.switchboard import Switchboard
from xpool._engine.worker_process import Recipe, WorkerProcess
from xpool._pickling.frame import Leased, weight
from xpool._python.starting import aside
from xpool.errors import InternalError, OptionError, XPoolError


class System(NamedTuple):
    """The engine's only access to the system; a simulated world supplies its own."""

    reactor: Reactor
    worker: Callable[[int, InFlight, Recipe], WorkerProcess]
    aside: Callable[[Callable[[], object], str], bool] = aside  # as `starting.aside`


class Engine:
    """The workers of one pool and their tasks.

    ``describe(job, index)`` names a task for error messages.  `EngineProtocol` describes methods
    that have no docstring.
    """

    def __init__(
        self,
        workers: int,
        recipe: Recipe,
        describe: Callable[[int, int], str],
        options: EngineOptions,
        system: System | None = None,
    ) -> None:
        # Held by threads that submit tasks, and by the engine's thread except while it waits.  No
        # `interruptible` function holds it: a signal handler that uses the pool would deadlock.
        # Reentrant, so that a finalizer which has interrupted the holder can find this out.
        self.lock: Any = threading.RLock()  # guards all that follows, the parts included
        self.dropped = False  # the pool is gone; set without the lock
        self._resumed = False  # `resume` was called; set without the lock
        self._recipe, self._relay = recipe, recipe.relay
        system = system or System(Reactor(), WorkerProcess)
        self._reactor, self._make_worker, self._aside = system
        self._starting = False  # a thread starts the processes that are due
        self._trouble: BaseException | None = None  # why that thread has failed
        self.sched = Scheduler(workers, describe)
        self.idle = self.sched.idle
        self.workers: list[WorkerProcess] = []
        self._add_workers(workers)
        for one_process in options.processes:
            together = tuple(self.workers[i] for i in sorted(one_process))
            for worker in together:
                worker.share_process(together)
        self.ledger = Ledger(workers, self._reactor.now, describe)
        self._maintenance = ArenaMaintenance(recipe.arena, self._reactor)
        parts = EngineParts(
            self.workers,
            self.sched,
            self._reactor,
            self.ledger,
            self._maintenance,
            RestartPolicy(options.restart_budget),
        )
        self._direct = DirectReceive(self._reactor)
        self._monitor = WorkerMonitor(parts, self._direct, options)
        self.results = self._monitor.answers.results
        switchboard = None
        if recipe.has_control:
            switchboard = Switchboard(self.workers, self._reactor, self._monitor.distrust)
        self._replacement = Replacement(
            parts, self._direct, self._monitor, switchboard, options=options
        )
        self._on_end = options.on_end
        turn = None if recipe.arena is None else recipe.arena.turn
        self._postponed = Postponed(self.lock, self._reactor.wake, turn)
        self.guards = [self.lock] if turn is None else [self.lock, turn]
        submission = self._submission = Submission(
            self._postponed, self.sched, self._monitor, self._replacement, self._direct
        )
        self.submit, self.submit_call = submission.submit, submission.submit_call
        self.put_direct, self.await_answer = submission.put_direct, submission.await_answer
        self.feed = submission.feed
        self.await_briefly = submission.await_briefly
        self.receive_call = submission.receive_call

    def _add_workers(self, size: int) -> None:
        for i in range(len(self.workers), size):
            self.workers.append(self._make_worker(i, self.sched.in_flight[i], self._recipe))

    # -- called by the pool, from any thread ---------------------------------------------------

    def resume(self) -> None:
        self._resumed = True
        self._reactor.wake()

    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        if self._postponed.here():  # a number is needed now, and changes no more
            return self._monitor.learn(mode, payload)
        with self.lock:
            self._direct.end_turns()
            return self._monitor.learn(mode, payload)

    def forget(self, func: int) -> None:
        if not self._postponed(self.forget, func):
            with self.lock:
                self._monitor.forget(func)

    def withdraw(self, job: int, index: int | None = None) -> None:
        if self._postponed(self.withdraw, job, index):
            return
        with self.lock:
            self._direct.end_turns()
            self._monitor.withdraw(job, index)

    def give_back(self, job: int, items: range) -> None:
        """Give back these items, except those that a worker has begun.

        The pool gets them as ranges, in results whose ``ok`` is None.  Waiting items come back at
        once.  Items in flight come back if their worker makes no progress.
        """
        with self.lock:
            self._monitor.give_back(job, items)

    def sent(self, payload: bytes | memoryview) -> int:
        if type(payload) is Leased and not self._postponed(self.sent, payload):
            with self.lock:
                self._maintenance.later()
        return weight(payload)

    def _locked(self) -> Any:
        """Return the lock, or raise `RuntimeError` in a finalizer that must not wait for it."""
        if self._postponed.here():
            raise RuntimeError(INSIDE)
        return self.lock

    # -- questions -------------------------------------------------------------------------------

    def _running(self) -> list[tuple[WorkerProcess, Batch, int]]:
        """Return the workers that run a task, each with the task's batch and place there."""
        return [
            (worker, *running)
            for worker in self.workers
            # A worker without a process has no page: it was unmapped.
            if worker.handle is not None
            and (running := self.sched.running(worker.index, worker.box.began)) is not None
        ]

    def runs(self, job: int, index: int | None = None) -> bool:
        with self._locked():
            return any(
                batch.job == job and index in (None, batch.first + position)
                for _, batch, position in self._running()
            )

    def bars(self) -> list[str]:
        """Return the progress bars that running tasks draw."""
        with self._locked():
            bars = [worker.box.bar for worker, *_ in self._running()]
        return [bar for bar in bars if bar]

    def statistics(self) -> dict[str, Any]:
        sched = self.sched
        with self._locked():
            # A worker holds tasks that it has not begun, and the one that it runs.
            running = len(self._running())
            sent = sum(in_flight.size for in_flight in sched.in_flight)
            return {
                "ready": sum(in_flight.accepting for in_flight in sched.in_flight),
                "waiting": sched.waiting() + sent - running,
                "running": running,
                "deaths": sum(account.deaths for account in self.ledger.accounts),
                "pids": [worker.pid for worker in self.workers[: sched.size]],
            }

    def report(self) -> EngineReport:
        with self._locked():
            return self.ledger.report(self.workers)

    def stacks(self, describe: Callable[[int, int], str] | None = None) -> list[WorkerStack]:
        """Return the stack of each worker, within a second; busy ones are asked by a signal."""
        describe = describe or self.ledger.describe
        begun = time.monotonic()
        with self._locked():
            request = stacks.StackRequest(self.workers)
        while True:
            with self.lock:
                waited = time.monotonic() - begun
                workers = self.workers[: self.sched.size]
                found = request.collect(workers, self.sched, describe, waited)
            if found is not None:
                return found
            time.sleep(0.005)  # the handlers write to the page, which wakes no thread

    def begin_trace(self) -> None:
        """Begin to keep events.

        Raises:
            OptionError: another trace keeps them already.
        """
        with self._locked():
            self.ledger.begin_trace()

    def end_trace(self) -> tuple[list[Event], float, int]:
        """Return the events of the trace, the time of its begin, and how many are missing."""
        with self._locked():
            return self.ledger.end_trace()

    # -- starting and stopping -------------------------------------------------------------------

    @property
    def failure(self) -> XPoolError | StartFailure | None:
        return self._replacement.failure

    @property
    def ended(self) -> bool:
        """Whether no process is left and none will start."""
        return self._replacement.ended

    def start_missing(self) -> bool:
        """Start a process in every empty place; return whether there was one.

        Raises:
            OSError: the system refuses to start a process.
        """
        started = False
        while True:
            with self.lock:
                launch = self._replacement.next_missing()
            if launch is None:
                return started
            started = True
            self._launch(launch)

    def _launch(self, launch: Launch, *, again: bool = False) -> None:
        """Start a process, without the lock; ``again``: a failed start is tried again later."""
        try:
            result = launch.run()
            with self.lock:
                self._replacement.launched(launch, *result)
        except BaseException as exc:
            with self.lock:
                self._replacement.refused(launch, exc, again=again)
            # InternalError: the state table lacks the step; trying again would hide the bug.
            if not again or not isinstance(exc, Exception) or isinstance(exc, InternalError):
                raise

    def resize(self, size: int) -> None:
        """Set the number of workers: new ones start, or those with the highest numbers end.

        A surplus worker ends after its running task; others get the tasks that it has not begun.

        Raises:
            OptionError: a task is bound to a surplus worker.
            OSError: the system refuses to start a process.  The number of workers is as before, or,
                if a task was bound to a new one meanwhile, the others start later.
        """
        with self._locked():
            self._direct.end_turns()
            if self._replacement.ending:
                return
            if self.sched.bound_from(size):
                raise OptionError(
                    f"the pool cannot have {size} workers now: run_all uses a worker that "
                    "would end, or a generator of imap is in it; call resize() after run_all has "
                    "returned, or when the iterator has ended"
                )
            before = self.sched.size
            self._have(size)
        try:
            self.start_missing()
        except BaseException:
            with self.lock:
                # End the new workers that have started, unless another call has set another size or
                # bound a task to one of them.
                if self.sched.bound_from(before):
                    self._replacement.start_later()
                elif self.sched.size == size:
                    self._have(before)
            raise

    def _have(self, size: int) -> None:
        self.sched.resize(size)
        self._add_workers(size)
        self.ledger.open_accounts(size)
        self._replacement.resize()
        self._reactor.wake()

    def retire_all(self) -> None:
        with self.lock:
            self._replacement.retire_all()
            self._reactor.wake()

    def terminate(self, at_once: bool = False) -> None:
        """Stop all workers: ask them first and kill them a moment later, or kill them at once."""
        with self.lock:
            self._direct.end_turns()
            self._replacement.terminate(at_once)
            # If no process was left before, no descriptor wakes the engine's thread.
            self._reactor.wake()

    def close(self) -> None:
        """Close the engine's own descriptors, and kill workers whose end it could not await."""
        with self.lock:
            self._replacement.end_unseen()
            self._reactor.close()
        self._tell_ends()
        self._recipe = self._recipe.ended()
        for worker in self.workers:
            worker.starts_no_more()
        # Do not hold the lock: the arena's end is slow, and the relay waits for log handlers, which
        # may use this pool.
        self._maintenance.end()
        if self._relay is not None:
            self._relay.end()

    def after_fork_in_child(self) -> None:
        """Forget the parent's workers, whose descriptors are closed here already."""
        # A thread of the parent may have held the lock.
        self.lock = self._submission.lock = threading.RLock()
        self._postponed.lock = self._postponed.turn = self.lock
        self._replacement.ending = True
        self._reactor.after_fork_in_child()
        # These change no descriptor, because the child shares the epoll with its parent.
        self._monitor.clear()
        self._maintenance.forget()
        self._relay = None
        for worker in self.workers:
            worker.forget_process()

    # -- the engine's thread -----------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait for something to happen, at most ``timeout`` seconds, and act on it."""
        if self._trouble is not None:
            raise self._trouble
        # Start processes now, because the pool has delivered the answers of the last turn.
        if self._replacement.due and not self._starting:
            self._starting = True
            # The start may wait, or run the program's code: hooks of a fork, pickling by `spawn`.
            if not self._aside(self._start_due, f"{self._recipe.name}-starts"):
                self._start_due()
                timeout = 0.0
        # Do not hold the lock: callers submit, and epoll takes their changes while it waits.
        ready = self._reactor.poll(timeout)
        with self.lock:
            for fd in ready:
                self._reactor.handle(fd)
            self._reactor.run_timers()
            if self._resumed:
                self._resumed = False
                self._monitor.give_idle()
        # After the wake-up of `Postponed` was read: a later one makes the next poll return.
        self._postponed.run()
        if self._replacement.ends:
            self._tell_ends()
        # Do not hold the lock: clearing a dead worker's holds takes milliseconds.
        if self._maintenance.after_turn():
            with self.lock:
                self._maintenance.again()

    def _tell_ends(self) -> None:
        """Tell the pool which processes have ended.  Called without the lock."""
        ends = self._replacement.ends
        while ends:
            worker, end = ends.popleft()
            assert self._on_end is not None
            self._on_end(end, functools.partial(self._told, worker))

    def _told(self, worker: WorkerProcess) -> None:
        with self.lock:
            self._replacement.told(worker)

    def _start_due(self) -> None:
        try:
            while True:
                with self.lock:
                    launch = self._replacement.next_due()
                    if launch is None:
                        self._starting = False
                        return
                self._launch(launch, again=True)
        except BaseException as exc:
            self._trouble = exc
            self.wake()

    def wake(self) -> None:
        """Make the engine's thread check the clock and the pool's state again."""
        self._reactor.wake()

    def drop(self) -> None:
        """Note that the pool is gone.  Called by the garbage collector, so it takes no lock."""
        self.dropped = True
        self._reactor.wake()
