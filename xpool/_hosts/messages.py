"""The messages between a driver and the agents of its hosts.

A driver stages batches of tasks at a host ahead of time and permits them when the host has room.
Only permitted tasks are ever begun.  So a host that vanishes can have run only the tasks that were
permitted and not answered.

Payloads are bytes, or views of bytes in the object store; an agent never unpickles them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xpool._engine.jobs.ranges import ONCE, Terms

# -- from the driver ---------------------------------------------------------------------------


class Func(NamedTuple):
    """Keep a function under the number that tasks refer to it by."""

    number: int
    mode: int
    payload: Any


class Forget(NamedTuple):
    """Drop a function."""

    number: int


class Blob(NamedTuple):
    """Keep a broadcast object under the name by which the workers find it."""

    name: str
    payload: Any


class Stage(NamedTuple):
    """Keep a batch of consecutive tasks and begin none of them yet.

    ``bound``: the index, at that host, of the worker that must run them; None: any.
    ``terms``: the host does not retry a task that has retries; it hands the task back.
    """

    batch: int
    job: int
    func: int
    first: int
    items: list[Any]
    bound: int | None = None
    terms: Terms = ONCE


class Go(NamedTuple):
    """Begin these batches in this order as workers become free."""

    batches: list[int]


class Drop(NamedTuple):
    """Drop staged batches, which were not permitted."""

    batches: list[int]


class Back(NamedTuple):
    """Give back the tasks of permitted batches that no worker has begun.

    Each batch: its number, its job, its first task and its number of tasks.
    """

    batches: list[tuple[int, int, int, int]]


class Cancel(NamedTuple):
    """Stop the running items of a job, or one item of it; nobody waits for the answers."""

    job: int
    item: int | None


class Retire(NamedTuple):
    """End after the last answer."""


class LocateWorkers(NamedTuple):
    """Report where the workers are."""

    number: int


# -- from an agent -----------------------------------------------------------------------------


class WorkerLocations(NamedTuple):
    """The reply to the `LocateWorkers` with this number: a `Whereabouts` of each worker.

    Its ``task`` is a text with job and index, or empty.
    """

    number: int
    workers: list[Any]


class Answer(NamedTuple):
    """The results of consecutive tasks: ``tasks`` of them, from ``first`` on.

    ``value``: a `PickledResult`, still pickled, or an error of xpool's own.
    """

    job: int
    first: int
    tasks: int
    ok: bool
    value: Any


class Again(NamedTuple):
    """A task has to be tried again; ``killed``: its worker died in it."""

    job: int
    item: int
    killed: bool


class Given(NamedTuple):
    """The waiting tasks of recalled batches are given back: `Unbegun` follows.

    Tasks that a worker holds follow later, if it makes no progress.
    """

    batches: list[int]


class Unbegun(NamedTuple):
    """No worker here has begun ``tasks`` tasks, from ``first`` on, or will begin them."""

    job: int
    first: int
    tasks: int


class Status(NamedTuple):
    """Counts of the host's workers, and the seconds that a task takes there (inf: not known)."""

    cost: float
    statistics: dict[str, Any]
    report: Any = None


class Failed(NamedTuple):
    """The host's workers can run no more tasks; ``error``: an exception or a `PickledResult`."""

    error: Any


class Ended(NamedTuple):
    """All workers of the host have ended."""
