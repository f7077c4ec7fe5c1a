"""What a driver and the agents of its hosts say to each other.

A driver stages batches of tasks at a host, ahead of time, and permits them when the host has room:
only what was permitted is ever begun there.  So of a host that vanishes it is known what it may
have run: what was permitted and is not answered.

Payloads are bytes, or views of bytes that lie in the object store: an agent never opens them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xpool._engine.jobs.ranges import Limit, Past

__all__ = [
    "Again",
    "Answer",
    "Back",
    "Blob",
    "Cancel",
    "Drop",
    "Ended",
    "Failed",
    "Forget",
    "Func",
    "Given",
    "Go",
    "Retire",
    "Stage",
    "Status",
    "Unbegun",
]

# -- from the driver ---------------------------------------------------------------------------


class Func(NamedTuple):
    """Keep a function, by the number that tasks will call it by."""

    number: int
    mode: int
    payload: Any


class Forget(NamedTuple):
    """Let go of a function."""

    number: int


class Blob(NamedTuple):
    """Keep an object that is broadcast, under a name by which the workers find it."""

    name: str
    payload: Any


class Stage(NamedTuple):
    """Keep a batch of consecutive tasks, and begin none of them yet.

    ``bound``: the worker, by its index at that host, that must run them; None: any.
    ``again``: an error or a death in one of them may be followed by another try, which is the
    driver's to give.
    """

    batch: int
    job: int
    func: int
    first: int
    items: list[Any]
    again: bool = False
    bound: int | None = None
    limit: Limit | None = None
    past: Past = Past()


class Go(NamedTuple):
    """Begin these batches, in this order, when workers are free."""

    batches: list[int]


class Drop(NamedTuple):
    """Forget staged batches: they were never permitted, and are not going to be."""

    batches: list[int]


class Back(NamedTuple):
    """Give back what nobody has begun of permitted batches: of each its number, its job, its first
    task, and how many these are."""

    batches: list[tuple[int, int, int, int]]


class Cancel(NamedTuple):
    """Stop what runs of a job, or one item of it: nobody waits for its answer."""

    job: int
    item: int | None


class Retire(NamedTuple):
    """End when all is answered."""


# -- from an agent -----------------------------------------------------------------------------


class Look(NamedTuple):
    """Tell where the workers are."""

    number: int


class Seen(NamedTuple):
    """Where the workers are, as `Look` of this number asked: `Whereabouts`.

    The ``task`` of each is a text of its job and index, or empty.
    """

    number: int
    workers: list[Any]


class Answer(NamedTuple):
    """What so many consecutive ``tasks`` came to, from ``first`` on.

    ``value``: still pickled, a `Parcel`, or an error of xpool's own.
    """

    job: int
    first: int
    tasks: int
    ok: bool
    value: Any


class Again(NamedTuple):
    """A task is to be tried again; ``killed``: its worker did not survive it."""

    job: int
    item: int
    killed: bool


class Given(NamedTuple):
    """Of batches that were asked for, what waited is given back: `Unbegun` follows.
    What a worker has in hand is, too, when it turns out that it sits on it."""

    batches: list[int]


class Unbegun(NamedTuple):
    """So many consecutive ``tasks``, from ``first`` on, were begun by nobody, and will not be
    here."""

    job: int
    first: int
    tasks: int


class Status(NamedTuple):
    """What the host's workers do, and the seconds that a task takes there (inf: not known)."""

    cost: float
    statistics: dict[str, Any]
    report: Any = None


class Failed(NamedTuple):
    """The host's workers can do nothing more, and why: a line, and what it is as an exception."""

    error: Any


class Ended(NamedTuple):
    """All workers of the host have ended."""
