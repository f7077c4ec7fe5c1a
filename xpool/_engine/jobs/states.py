"""The rules for the life of a pool and of a worker: states, restarts, time limits.

`WORKER` is the table of a worker's states that the code uses.  Rules that a reader might not
expect:

* A worker is not a process.  Its process may die and be replaced any number of times; the worker
  keeps its index, its context and its device.  So ABSENT is the first state and also the state
  between two processes.
* A worker that is recalled or interrupted gets no tasks until it has answered all that it holds.
  Once asked, it begins no other item, so a stop signal can hit only the named item.
* CONDEMNED and RETIRING accept all events of a live worker: its process may have sent messages
  before it ended.  These events do not change the state.

An event that a state does not list is a bug: `step` raises an error and changes nothing.

`RestartPolicy` decides when a worker that has ended is started again, and when the pool gives up.
`Deadlines` decides when a worker must stop its task.
"""

import enum
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from xpool.errors import InternalError

if TYPE_CHECKING:
    from xpool._engine.jobs.scheduler import Batch, InFlight


class PoolStates(str, enum.Enum):
    """The states of a pool; equal to the strings of `multiprocessing.pool`.

    A pool never returns to an earlier state (`Lifecycle`).  A pool that has failed is in TERMINATE.
    """

    RUN = "RUN"
    CLOSE = "CLOSE"
    TERMINATE = "TERMINATE"


class WorkerStates(enum.Enum):
    ABSENT = "ABSENT"
    LAUNCHING = "LAUNCHING"
    STARTING = "STARTING"
    READY = "READY"
    RECALLING = "RECALLING"
    INTERRUPTING = "INTERRUPTING"
    CONDEMNED = "CONDEMNED"
    RETIRING = "RETIRING"

    @property
    def serves(self) -> bool:
        """Whether a worker in this state has become ready and was not told to end."""
        return self in _SERVES

    @property
    def may_retire(self) -> bool:
        """Whether a worker in this state has a process that was not yet told to end."""
        return WorkerEvent.RETIRE in WORKER[self]


class WorkerEvent(enum.Enum):
    LAUNCH = "the start of a process is decided"
    LAUNCHED = "its process is started"
    REFUSED = "no process can be started, or none is needed any more"
    HELLO = "it has bound its device and run the initializer"
    RECALL = "its tasks that have not begun must go to other workers"
    INTERRUPT = "it is asked to stop its running task"
    BROKEN_OFF = "the task that it was asked to stop has ended"
    EMPTIED = "it has answered all that it held"
    RETIRE = "it is told to end after the tasks that it holds"
    CONDEMN = "it is killed"
    GONE = "its process has ended"


_ENDS = {
    WorkerEvent.RETIRE: WorkerStates.RETIRING,
    WorkerEvent.CONDEMN: WorkerStates.CONDEMNED,
    WorkerEvent.GONE: WorkerStates.ABSENT,
}
"""How the process of a worker may end that was not told to end yet."""

WORKER: dict[WorkerStates, dict[WorkerEvent, WorkerStates]] = {
    WorkerStates.ABSENT: {
        WorkerEvent.LAUNCH: WorkerStates.LAUNCHING,
    },
    # No RETIRE, no CONDEMN: there is no process yet; `Replacement.launched` tells it afterwards.
    WorkerStates.LAUNCHING: {
        WorkerEvent.LAUNCHED: WorkerStates.STARTING,
        WorkerEvent.REFUSED: WorkerStates.ABSENT,
    },
    WorkerStates.STARTING: {WorkerEvent.HELLO: WorkerStates.READY, **_ENDS},
    # No INTERRUPT: a recall comes first, so that the worker begins no other item.
    WorkerStates.READY: {WorkerEvent.RECALL: WorkerStates.RECALLING, **_ENDS},
    WorkerStates.RECALLING: {
        WorkerEvent.INTERRUPT: WorkerStates.INTERRUPTING,
        WorkerEvent.EMPTIED: WorkerStates.READY,
        **_ENDS,
    },
    # No EMPTIED: until BROKEN_OFF, the worker holds the item that it is to stop.
    WorkerStates.INTERRUPTING: {WorkerEvent.BROKEN_OFF: WorkerStates.RECALLING, **_ENDS},
    # No HELLO: a starting worker is condemned for a reason, and `HELLO` is ignored if there is one.
    WorkerStates.CONDEMNED: {
        WorkerEvent.BROKEN_OFF: WorkerStates.CONDEMNED,
        WorkerEvent.EMPTIED: WorkerStates.CONDEMNED,
        WorkerEvent.CONDEMN: WorkerStates.CONDEMNED,
        WorkerEvent.GONE: WorkerStates.ABSENT,
    },
    WorkerStates.RETIRING: {
        WorkerEvent.HELLO: WorkerStates.RETIRING,
        WorkerEvent.RECALL: WorkerStates.RETIRING,
        WorkerEvent.INTERRUPT: WorkerStates.RETIRING,
        WorkerEvent.BROKEN_OFF: WorkerStates.RETIRING,
        WorkerEvent.EMPTIED: WorkerStates.RETIRING,
        WorkerEvent.CONDEMN: WorkerStates.CONDEMNED,
        WorkerEvent.GONE: WorkerStates.ABSENT,
    },
}

_SERVES = frozenset({WorkerStates.READY, WorkerStates.RECALLING, WorkerStates.INTERRUPTING})


def step(state: WorkerStates, event: WorkerEvent) -> WorkerStates:
    """Return the next state; raise `InternalError` if the table has none."""
    try:
        return WORKER[state][event]
    except KeyError:
        story = f"{event} cannot happen in state {state}; this is a bug in xpool"
        raise InternalError(story) from None


# -- restarts --------------------------------------------------------------------------------------

WINDOW = 60.0
"""Seconds for which a death counts."""

FIRST_RETRY_PAUSE = 0.05
"""Seconds between the first two tries of a task."""

LONGEST_RETRY_PAUSE = 5.0
"""The most seconds between two tries of a task."""

START_ATTEMPTS = 3
"""The pool gives up after this many consecutive failed starts in one place."""

SYSTEM_ATTEMPTS = 6
"""The pool gives up if the system refuses a process or thread more often than this in a row."""

KILLED_STARTS = 8
"""The pool gives up after this many starts in one place were killed.  It is more than
`START_ATTEMPTS`, because a kill says nothing about the next start."""


class EndKind(enum.Enum):
    REFUSED = "the system refused its process or thread"
    FAILED = "it ended by itself before it was ready"
    KILLED = "it was killed before it was ready"
    FINISHED = "it was told to end"
    STOPPED = "the pool stopped it, because of its task"
    DIED = "it died after it was ready"


class RestartPolicy:
    """Decides when a worker (a process or a thread) that has ended gets a successor.

    The pool gives up when more than ``most`` workers have died within `WINDOW` seconds and no task
    was finished in between: each new worker would cost a process and achieve nothing.  A task that
    raises an exception is finished, too.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._deaths: deque[float] = deque()
        # Starts in each place since a worker was last ready there: those that failed or were
        # refused, and those that another program has killed.
        self._failures: dict[int, int] = {}
        self._killed: dict[int, int] = {}
        self.finished = False  # set when a task is finished; read after a death

    def forget_failures(self, place: int) -> None:
        """Forget the failed starts in a place: a worker is ready there, or was told to end."""
        self._failures.pop(place, None)
        self._killed.pop(place, None)

    def lost(self, place: int, kind: EndKind, now: float) -> float | None:
        """Record the end of a worker; return the seconds until the next start; None: give up."""
        if kind is EndKind.REFUSED:
            failures = self._failures[place] = self._failures.get(place, 0) + 1
            # Wait, because the system probably still lacks what it lacked.
            return None if failures > SYSTEM_ATTEMPTS else 0.05 * 2**failures
        if kind is EndKind.FAILED:
            failures = self._failures[place] = self._failures.get(place, 0) + 1
            return None if failures >= START_ATTEMPTS else 0.0
        if kind is EndKind.KILLED:
            killed = self._killed[place] = self._killed.get(place, 0) + 1
            if killed >= KILLED_STARTS:
                return None
            # No pause after the first kill, which may be an accident.
            return min(1.0, 0.05 * 2**killed) if killed > 1 else 0.0
        self.forget_failures(place)
        return None if kind is EndKind.DIED and self._is_one_too_many(now) else 0.0

    def _is_one_too_many(self, now: float) -> bool:
        deaths = self._deaths
        if self.finished:
            self.finished = False
            deaths.clear()
        while deaths and deaths[0] < now - WINDOW:
            deaths.popleft()
        deaths.append(now)
        return len(deaths) > self.most

    def attempts(self, place: int) -> int:
        """Return how many starts there were since a worker was last ready there."""
        return self._failures.get(place, 0) + self._killed.get(place, 0)

    @property
    def deaths(self) -> int:
        """The number of deaths in the last minute, without those before the last finished task."""
        return len(self._deaths)

    def seconds(self) -> float:
        """Return the seconds between the first and the last of these deaths."""
        return self._deaths[-1] - self._deaths[0]


def back_off(tries: int, chance: float) -> float:
    """Return the seconds to wait before a task is run again that has been run ``tries`` times.

    The pause doubles with each try.  ``chance`` (0 to 1) picks a value from its upper half, so that
    tasks that failed together do not run again together.
    """
    # No power above 30: a task may have thousands of retries.
    pause: float = min(LONGEST_RETRY_PAUSE, FIRST_RETRY_PAUSE * 2 ** min(tries - 1, 30))
    return pause * (0.5 + chance / 2)


# -- time limits -----------------------------------------------------------------------------------


class Act(enum.Enum):
    NOTHING = "nothing"
    INTERRUPT = "ask it to break off an item"
    RECALL = "give what it has not begun to others"
    CONDEMN = "kill it"


class Verdict(NamedTuple):
    """Do ``act`` now (INTERRUPT: stop ``item``), and check again at ``when``; None: never."""

    act: Act
    item: int = 0
    when: float | None = None


class WorkerProgress(NamedTuple):
    """The progress of a worker, as far as the parent can see it."""

    began: int  # items that it has begun, ever
    since: float | None  # when it began its running item, if that has a limit
    pipes: Any  # changes with each byte that either pipe has carried


class Deadlines:
    """The deadlines of one process of a worker, by the shared page and the scheduler's records.

    A worker is first asked to stop a task, and killed if it does not answer a moment later.  The
    page says when the running task began, so the parent checks seldom: when a task that was sent
    just now could exceed its limit.  It then finds a task over its limit, a task that will exceed
    its limit at a known time, or neither.  In the last case, the next check is one limit later,
    because a task that begins now cannot exceed its limit before.  So tasks that are far below
    their limit cost nothing here.

    A worker can also be stuck outside of a task, where no clock runs: SIGSTOP may have stopped it,
    or the finalizer of a result may hang.  The parent detects this as a standstill: for as long as
    a limit, the worker has not read a message, begun an item or sent an answer.
    """

    def __init__(self) -> None:
        # Its progress when it last changed outside of a timed item, and when that was.
        self._last_progress: tuple[Any, float] | None = None

    def judge(
        self,
        held: "InFlight",
        running: "tuple[Batch, int] | None",
        seen: WorkerProgress,
        now: float,
    ) -> Verdict:
        """Return what to do with a worker that holds ``held`` and runs ``running``."""
        again: list[float] = []
        if running is not None:
            batch, position = running
            due = None
            # Its job is cancelled: it must stop now.
            if batch.withdrawn:
                due = now
            elif batch.terms.limit is not None and seen.since is not None:
                due = seen.since + batch.terms.limit.seconds
            if due is not None:
                if now >= due:
                    return Verdict(Act.INTERRUPT, batch.seq + position)
                again.append(due)
        # A worker without progress for as long as a limit is standing still.
        limits = [one.terms.limit.seconds for one in held.held if one.terms.limit is not None]
        if not limits:
            return Verdict(Act.NOTHING, when=min(again, default=None))
        # The earliest time at which an item that has not begun can exceed its limit.
        again.append(now + min(limits))
        # A running task with a running clock, or without a limit, is no standstill.
        if seen.since is not None or (running is not None and running[0].terms.limit is None):
            self._last_progress = None
            return Verdict(Act.NOTHING, when=min(again))
        verdict = self._standstill(held, running, seen, min(limits), now)
        if verdict.when is not None:
            again.append(verdict.when)
        return verdict._replace(when=min(again))

    def _standstill(
        self,
        held: "InFlight",
        running: "tuple[Batch, int] | None",
        seen: WorkerProgress,
        limit: float,
        now: float,
    ) -> Verdict:
        doing = seen.began, held.answered, seen.pipes
        if self._last_progress is None or self._last_progress[0] != doing:
            # No `when`: `judge` checks again when a limit has passed.
            self._last_progress = doing, now
            return Verdict(Act.NOTHING)
        since = self._last_progress[1]
        if now < since + limit:
            return Verdict(Act.NOTHING, when=since + limit)
        if running is not None and running[0].terms.limit is not None:
            # The running item may have used part of that time, and its limit may be longer than the
            # limits of the items behind it.
            over = since + 2 * running[0].terms.limit.seconds
            if now < over:
                return Verdict(Act.NOTHING, when=over)
            return Verdict(Act.INTERRUPT, running[0].seq + running[1])
        # None of its items has begun.  Recall them first, so that its death costs no task.
        return Verdict(Act.CONDEMN if held.paused else Act.RECALL)
