"""The states of a pool and of a worker, as tables: the tables are the program.

Rules that one could wrongly assume to be otherwise:

* A pool never goes back.  `close` after `terminate` changes nothing, and a pool that has
  failed (a worker could not be started) is in TERMINATE, with the reason kept beside it.
* A worker is not a process.  Its process may die and be replaced any number of times; the worker
  keeps its index, its context and its device.  ABSENT is therefore both the first state and the
  one between two processes.
* A worker that is recalled or interrupted gets nothing more until its hand is empty: from the
  moment of asking it begins nothing new, so nothing but what was named can be hit.
* CONDEMNED and RETIRING take every word that may still come: a process that ends may have sent it
  before.  What they are told changes nothing more for them.

An event that a state does not list is a bug: `step` raises and nothing has changed.
``python -m xpool._engine.jobs.states`` prints the tables as markdown, the text of
``docs/dev/states.md``.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from xpool.errors import InternalError


class PoolStates(str, enum.Enum):
    """What a pool does with new work; equal to the strings of `multiprocessing.pool`."""

    RUN = "RUN"
    CLOSE = "CLOSE"
    TERMINATE = "TERMINATE"


class PoolEvent(enum.Enum):
    """What can happen to a pool."""

    CLOSE = "close()"
    TERMINATE = "terminate(), or the pool is dropped"
    DRAINED = "the last job is answered"
    FAILED = "a worker cannot be started, or they die and nothing gets done"


class WorkerStates(enum.Enum):
    """What the place of a worker holds."""

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
        """Whether a worker in it was ready for tasks, and was not told to end."""
        return self in _SERVES


class WorkerEvent(enum.Enum):
    """What can happen to a worker."""

    LAUNCH = "the start of a process is decided"
    LAUNCHED = "its process is started"
    REFUSED = "no process can be started, or none is wanted any more"
    HELLO = "it has bound its device and run the initializer"
    RECALL = "others are to get what it has not begun"
    INTERRUPT = "it is asked to break off what it runs"
    BROKEN_OFF = "what it was asked to break off is over"
    EMPTIED = "it holds nothing any more"
    RETIRE = "it is told to end after what it holds"
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
    # No RETIRE, no CONDEMN: what the worker is told meanwhile, it is told when there is a process.
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
    # No INTERRUPT: a recall comes first, so that nothing else is begun.
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
    # No EMPTIED: until BROKEN_OFF, the item to break off is in its hand.
    WorkerStates.INTERRUPTING: {
        WorkerEvent.BROKEN_OFF: WorkerStates.RECALLING,
        WorkerEvent.RETIRE: WorkerStates.RETIRING,
        WorkerEvent.CONDEMN: WorkerStates.CONDEMNED,
        WorkerEvent.GONE: WorkerStates.ABSENT,
    },
    # No HELLO: who condemns a worker that starts leaves a reason, and then it is not greeted.
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
    """Return the state that follows; raise `InternalError` when the table has none."""
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
