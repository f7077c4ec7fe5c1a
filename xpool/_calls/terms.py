"""`Terms`: what queues and workers know of the keywords of a call."""

# No `from __future__ import annotations`: a NamedTuple would compile each type from its text.

from typing import Any, NamedTuple

from xpool.errors import TaskTimeout


class Limit(NamedTuple):
    """How many seconds an item may run, and whether it is retried when it exceeds them."""

    seconds: float
    again: bool = False


class Terms(NamedTuple):
    """How long an item may run, how often it may run again, and how often it has run again.

    The queues obey these.  A field with the name of a keyword of `CallOptions` has its value and
    its default.  ``alone``: its worker has died for lack of memory, so it runs while no other
    worker has an item.
    """

    retries: int = 0  # tries that are left
    limit: Limit | None = None
    tries: int = 0  # tries that have failed
    killed: int = 0  # workers that have died in these tries
    priority: float = 0  # waiting items with the highest priority are next
    alone: bool = False

    def after_failure(self, killed: bool, alone: bool = False) -> "Terms":
        """Return the terms of the next try; ``killed``: the worker died in the last one."""
        return self._replace(
            retries=self.retries - 1,
            tries=self.tries + 1,
            killed=self.killed + killed,
            alone=self.alone or alone,
        )


ONCE = Terms()
"""The terms of a call without keywords.  No other terms are equal to it: see `terms_of`."""


def terms_of(timeout: float | None, retry_on: tuple[Any, ...] = (), **others: Any) -> Terms:
    """Return the terms of a task with this limit, and these ``others`` of its keywords."""
    limit = None if timeout is None else Limit(timeout, issubclass(TaskTimeout, retry_on))
    terms = Terms(limit=limit, **others)
    return ONCE if terms == ONCE else terms
