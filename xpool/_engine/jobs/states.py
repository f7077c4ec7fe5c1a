"""The states of a pool and of a worker, as the tables that the code uses.

Rules that a reader might not expect:

* A pool never returns to an earlier state.  `close` after `terminate` changes nothing.  A pool that
  has failed (a worker could not be started) is in TERMINATE, and its `failure` is the reason.
* A worker is not a process.  Its process may die and be replaced any number of times; the worker
  keeps its index, its context and its device.  So ABSENT is the first state and also the state
  between two processes.
* A worker that is recalled or interrupted gets no tasks until it has answered all that it holds.
  Once asked, it begins no other item, so a stop signal can hit only the named item.
* CONDEMNED and RETIRING accept all events of a live worker: its process may have sent messages
  before it ended.  These events do not change the state.

An event that a state does not list is a bug: `step` raises an error and changes nothing.
``python -m xpool._engine.jobs.states`` prints the tables as markdown, the text of
``docs/dev/states.md``.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from xpool.errors import InternalError


class PoolStates(str, enum.Enum):
    """The states of a pool; equal to the strings of `multiprocessing.pool`."""

    RUN = "RUN"
    CLOSE = "CLOSE"
    TERMINATE = "TERMINATE"


class PoolEvent(enum.Enum):
    """What can happen to a pool."""

    CLOSE = "close()"
    TERMINATE = "terminate(), or the pool is dropped"
    DRAINED = "the last job is answered"
    FAILED = "a worker cannot be started, or workers die and no task is finished"


class WorkerStates(enum.Enum):
    """The states of a worker."""

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
    """What can happen to a worker."""

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


POOL: dict[PoolStates, dict[PoolEvent, PoolStates]] = {
    PoolStates.RUN: {
        PoolEvent.CLOSE: PoolStates.CLOSE,
        PoolEvent.TERMINATE: PoolStates.TERMINATE,
        PoolEvent.FAILED: PoolStates.TERMINATE,
    },
    PoolStates.CLOSE: {
        PoolEvent.CLOSE: PoolStates.CLOSE,
        PoolEvent.TERMINATE: PoolStates.TERMINATE,
        PoolEvent.DRAINED: PoolStates.TERMINATE,
        PoolEvent.FAILED: PoolStates.TERMINATE,
    },
    PoolStates.TERMINATE: {
        PoolEvent.CLOSE: PoolStates.TERMINATE,
        PoolEvent.TERMINATE: PoolStates.TERMINATE,
        PoolEvent.FAILED: PoolStates.TERMINATE,
    },
}

WORKER: dict[WorkerStates, dict[WorkerEvent, WorkerStates]] = {
    WorkerStates.ABSENT: {
        WorkerEvent.LAUNCH: WorkerStates.LAUNCHING,
    },
    # No RETIRE, no CONDEMN: there is no process yet; `Replacement.launched` tells it afterwards.
    WorkerStates.LAUNCHING: {
        WorkerEvent.LAUNCHED: WorkerStates.STARTING,
        WorkerEvent.REFUSED: WorkerStates.ABSENT,
    },
    WorkerStates.STARTING: {
        WorkerEvent.HELLO: WorkerStates.READY,
        WorkerEvent.RETIRE: WorkerStates.RETIRING,
        WorkerEvent.CONDEMN: WorkerStates.CONDEMNED,
        WorkerEvent.GONE: WorkerStates.ABSENT,
    },
    # No INTERRUPT: a recall comes first, so that the worker begins no other item.
    WorkerStates.READY: {
        WorkerEvent.RECALL: WorkerStates.RECALLING,
        WorkerEvent.RETIRE: WorkerStates.RETIRING,
        WorkerEvent.CONDEMN: WorkerStates.CONDEMNED,
        WorkerEvent.GONE: WorkerStates.ABSENT,
    },
    WorkerStates.RECALLING: {
        WorkerEvent.INTERRUPT: WorkerStates.INTERRUPTING,
        WorkerEvent.EMPTIED: WorkerStates.READY,
        WorkerEvent.RETIRE: WorkerStates.RETIRING,
        WorkerEvent.CONDEMN: WorkerStates.CONDEMNED,
        WorkerEvent.GONE: WorkerStates.ABSENT,
    },
    # No EMPTIED: until BROKEN_OFF, the worker holds the item that it is to stop.
    WorkerStates.INTERRUPTING: {
        WorkerEvent.BROKEN_OFF: WorkerStates.RECALLING,
        WorkerEvent.RETIRE: WorkerStates.RETIRING,
        WorkerEvent.CONDEMN: WorkerStates.CONDEMNED,
        WorkerEvent.GONE: WorkerStates.ABSENT,
    },
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

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


def step(table: dict[S, dict[E, S]], state: S, event: E) -> S:
    """Return the next state; raise `InternalError` if the table has none."""
    try:
        return table[state][event]
    except KeyError:
        story = f"{event} cannot happen in state {state}; this is a bug in xpool"
        raise InternalError(story) from None


def _markdown(title: str, table: dict[S, dict[E, S]]) -> str:
    rows = [f"## {title}", "", "| in state | when | goes to |", "| --- | --- | --- |"]
    for state, events in table.items():
        for event, target in events.items():
            goes = "stays" if target is state else f"`{target.name}`"
            rows.append(f"| `{state.name}` | {event.value} | {goes} |")
    return "\n".join(rows)


def document() -> str:
    """Return the text of ``docs/dev/states.md``."""
    return "\n\n".join(
        [
            "# States",
            "Printed by `python -m xpool._engine.jobs.states`, from the tables there.",
            _markdown("A pool", POOL),
            _markdown("A worker", WORKER),
            "",
        ]
    )


if __name__ == "__main__":
    print(document(), end="")
