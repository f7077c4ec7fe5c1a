"""The types of the verbs of pools whose workers own a context: functions get it first.

They are in ``context_verbs.pyi``; at run time, the verbs are those of other pools.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["C", "ContextVerbs"]

C = TypeVar("C")


class ContextVerbs(Generic[C]):
    """What `CtxPool` and `CtxThreadPool` of contexts of one type have in common."""

    _fixed_size = "it has a worker for each of its contexts"
