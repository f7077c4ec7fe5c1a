"""The engine of the process pools: wait, turn what happened into events, do what follows.

::

     any caller's thread           engine's thread                    worker process
    ---------------------        -------------------              ----------------------
     verb, pickles               waits on descriptors        |
      | submit                     ^        |                |
      v                            |        v                |
     Scheduler  --- batches ---->  worker.writer ==== pipe =========>  run, one by one
     (jobs/)                       |                         |         |          |
        ^                          |                         |         v          v
        `------ answered --------  worker.reader <==== pipe ========= "so many"   outbox
                                   worker.box   <---- shared page ----------------'
                                   |                         |
                             results (a deque)               |
                                   | pool_outqueue_get       |
                                   v
                             the pool delivers them to the callers

One lock guards all of it.  Whoever holds it does what is to be done and lets go; nobody waits for
a descriptor, starts a process, runs a user's code or wakes a caller while holding it.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import threading
from collections.abc import Callable
from typing import NamedTuple

from xpool._engine.answers import EngineOptions, Parts
from xpool._engine.direct import DirectReceive
from xpool._engine.dispatcher import Dispatcher
from xpool._engine.jobs.budget import RestartPolicy
from xpool._engine.jobs.scheduler import InFlight, Scheduler
from xpool._engine.ledger import Ledger
from xpool._engine.maintenance import ArenaMaintenance
from xpool._engine.monitor import WorkerMonitor
from xpool._engine.observation import Observation
from xpool._engine.pickled_results import StartFailure
from xpool._engine.reactor import Reactor
from xpool._engine.relay import Relay
from xpool._engine.replacement import Launch, Replacement
from xpool._engine.submission import Submission
from xpool._engine.switchboard import Switchboard
from xpool._engine.worker import Recipe, WorkerProcess
from xpool._pickling.frame import Leased, weight
from xpool.errors import InternalError, OptionError, XPoolError

__all__ = ["Engine", "System"]


class System(NamedTuple):
    """The engine's only ways to the system; a simulated world gives others."""

    reactor: Reactor
    worker: Callable[[int, InFlight, Recipe], WorkerProcess]


class Engine:
    """The workers of one pool and the tasks that are given to them.

    ``describe(job, index)`` names a task for error messages.
    """

    def __init__(
        self,
        workers: int,
        recipe: Recipe,
        describe: Callable[[int, int], str],
        options: EngineOptions,
        system: System | None = None,
    ) -> None:
        # Taken by whoever submits, and by the engine's thread for each turn, not for its wait.  No
        # `interruptible` function holds it: a handler that uses the pool would wait for itself.
        self.lock = threading.Lock()  # guards all that follows, the parts included
        self.dropped = False  # the pool is gone; set without the lock
        self._resumed = False  # as is this
        self._recipe, self._relay = recipe, recipe.relay
        self._reactor, self._make_worker = system or System(Reactor(), WorkerProcess)
        self.sched = Scheduler(workers)
        self.idle = self.sched.idle
        self.workers: list[WorkerProcess] = []
        self._add_workers(workers)
        for one_process in options.processes:
            for i in one_process:
                siblings = tuple(self.workers[k] for k in one_process if k != i)
                self.workers[i].share_process(siblings)
        self.ledger = Ledger(workers, self._reactor.now, describe)
        self._maintenance = ArenaMaintenance(recipe.arena, self._reactor)
        parts = Parts(
            self.workers,
            self.sched,
            self._reactor,
            self.ledger,
            self._maintenance,
            RestartPolicy(options.restart_budget),
        )
        self._dispatcher = Dispatcher(self._reactor)
        self._direct = DirectReceive(self._reactor)
        self._monitor = WorkerMonitor(parts, self._dispatcher, self._direct, options)
        self.results = self._monitor.answers.results
        switchboard = None
        if recipe.has_control:
            switchboard = Switchboard(self.workers, self._reactor, self._monitor.distrust)
        self._replacement = Replacement(
            parts, self._dispatcher, self._direct, self._monitor, switchboard,
            together=options.together,
        )  # fmt: skip
        submission = self._submission = Submission(
            self.lock, self.sched, self._monitor, self._replacement, self._direct
        )
        self.submit, self.submit_call = submission.submit, submission.submit_call
        self.call, self.feed = submission.call, submission.feed
        observation = self._observation = Observation(
            self.lock, self.workers, self.sched, self.ledger
        )
        self.runs, self.statistics = observation.runs, observation.statistics
        self.report, self.stacks = observation.report, observation.stacks
        self.begin_trace, self.end_trace = observation.begin_trace, observation.end_trace
        if self._relay is not None:
            self._watch_relay(self._relay)

    def _add_workers(self, size: int) -> None:
        """Have so many places for workers, at least."""
        for i in range(len(self.workers), size):
            self.workers.append(self._make_worker(i, self.sched.in_flight[i], self._recipe))

    def _watch_relay(self, relay: Relay) -> None:
        """Have the relay's thread started when there is something for it."""
        fd = relay.fileno()
        if fd is None:
            relay.begin()
        else:
            self._reactor.add(fd, lambda fd: self._relay_has_something(relay, fd))

    def _relay_has_something(self, relay: Relay, fd: int) -> None:
        if not relay.is_needed():
            return
        self._reactor.remove(fd)  # the relay's own thread reads from here on
        if not relay.begin():
            # The system has no thread now: workers wait for room, then count what they drop.
            self._reactor.call_at(self._reactor.now() + 1.0, self._watch_relay, relay)

    # -- called by the pool, from any thread ---------------------------------------------------

    def resume(self) -> None:
        """Give out what waits: some that was kept from running may run.  Without the lock."""
        self._resumed = True
        if not self._reactor.closed:
            self._reactor.nudge()

    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        """Keep a function for the workers; return the number that tasks call it by."""
        with self.lock:
            self._submission.leave_signal_handler()
            return self._dispatcher.learn(mode, payload)

    def forget(self, func: int) -> None:
        """Let workers drop a function: its job is done."""
        with self.lock:
            self._dispatcher.forget(func, self.workers)

    def withdraw(self, job: int, index: int | None = None) -> None:
        """Give nobody what still waits of a job that has ended, and stop what runs of it."""
        with self.lock:
            self._monitor.withdraw(job, index)

    def give_back(self, job: int, items: range) -> None:
        """Hand back those of these items that nobody has begun, each as a result without a value
        whose ``ok`` is None: what waits now, what a worker has when it is seen to sit on it."""
        with self.lock:
            self._monitor.give_back(job, items)

    def sent(self, payload: bytes | memoryview) -> int:
        """Return how many bytes of memory a message holds; it was made for a worker."""
        if type(payload) is Leased:
            with self.lock:
                self._maintenance.later()
        return weight(payload)

    @property
    def cost(self) -> float:
        """Seconds that a task takes, by the last answers; inf: not known."""
        return self.sched.cost

    # -- starting and stopping -------------------------------------------------------------------

    @property
    def failure(self) -> XPoolError | StartFailure | None:
        """Why the pool can go on no more."""
        return self._replacement.failure

    @property
    def ended(self) -> bool:
        """Whether no process is left and none will come."""
        return self._replacement.ended

    def start_missing(self) -> bool:
        """Start a process in every empty place; return whether there was one.

        Raises:
            OSError: the system refuses a process.
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
        """Start a process, without the lock; ``again``: what fails is tried again later."""
        try:
            result = launch.run()
            with self.lock:
                self._replacement.launched(launch, result)
        except BaseException as exc:
            with self.lock:
                self._replacement.refused(launch, exc, again=again)
            # A step that the table of states does not have: to try again would hide the bug.
            if not again or not isinstance(exc, Exception) or isinstance(exc, InternalError):
                raise

    def resize(self, size: int) -> None:
        """Have so many workers: new ones start, or those with the highest numbers end.

        These end after the task that they are in; others get what they have not begun.

        Raises:
            OptionError: something is bound to one of these.
            OSError: the system refuses a process; there are as many workers as before.
        """
        with self.lock:
            self._submission.leave_signal_handler()
            if self._replacement.ending:
                return
            if self.sched.bound_from(size):
                raise OptionError(
                    f"a function of run_all runs in a worker that is not among the first {size}, "
                    "or is to run there; call resize() when that has returned"
                )
            before = self.sched.size
            self._have(size)
        try:
            self.start_missing()
        except BaseException:
            with self.lock:
                # Those that did start are dismissed; their places stay, empty, for the next time.
                # Not if another call has set another size meanwhile.
                if self.sched.size == size:
                    self._have(before)
            raise

    def _have(self, size: int) -> None:
        """Have so many places, and let the workers end that are left over."""
        self.sched.resize(size)
        self._add_workers(size)
        self.ledger.open_accounts(size)
        self._replacement.resize()
        self._reactor.wake()

    def retire_all(self) -> None:
        """Let workers end when they have answered what they hold: nothing more will come."""
        with self.lock:
            self._replacement.retire_all()
            self._reactor.wake()

    def terminate(self, at_once: bool = False) -> None:
        """Stop all workers now: asked first, and killed a moment later, or at once."""
        with self.lock:
            self._submission.leave_signal_handler()
            self._replacement.terminate(at_once)
            # This alone may make `ended` true: then no descriptor wakes the thread that waits.
            self._reactor.wake()

    def close(self) -> None:
        """Let go of the engine's own descriptors; all workers have ended."""
        with self.lock:
            self._reactor.close()
        # Both without the lock: the first gives back memory, which takes its time, the second waits
        # for handlers of loggers, which may look at this pool.
        self._maintenance.end()
        if self._relay is not None:
            self._relay.end()

    def after_fork_in_child(self) -> None:
        """These workers are the parent's; their descriptors are closed here already."""
        # Some thread of the parent may have held it.
        self.lock = self._submission.lock = self._observation.lock = threading.Lock()
        self._replacement.ending = True
        # Touches no descriptor: the epoll that the child has is the parent's, too.
        self._monitor.clear()
        self._maintenance.forget()
        if self._relay is not None:
            self._relay.after_fork_in_child()
        for worker in self.workers:
            worker.forget_process()

    # -- the engine's thread -----------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait for something to happen, at most ``timeout`` seconds, and act on it."""
        # First, not last: by now the pool has handed out the answers of the turn before.
        if self._replacement.due:
            timeout = 0.0
        while self._replacement.due:
            with self.lock:
                launch = self._replacement.next_due()
            if launch is not None:
                self._launch(launch, again=True)
        # Without the lock: callers submit meanwhile, and epoll takes their changes while it waits.
        ready = self._reactor.poll(timeout)
        with self.lock:
            for fd in ready:
                self._reactor.handle(fd)
            self._reactor.run_timers()
            if self._resumed:
                self._resumed = False
                self._monitor.give_idle()
        # Without the lock: to clear a dead worker's holds takes milliseconds.
        if self._maintenance.after_turn():
            with self.lock:
                self._maintenance.again()

    def wake(self) -> None:
        """Make the engine's thread look at the clock and the pool's state again."""
        with self.lock:
            self._reactor.wake()

    def drop(self) -> None:
        """Note that the pool is gone.  For the garbage collector: without a lock."""
        self.dropped = True
        self._reactor.nudge()  # the pool had not ended, so this is open
