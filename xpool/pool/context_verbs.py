"""The types of the verbs of pools whose workers own a context: functions get it first.

They are in ``context_verbs.pyi``; at run time, the verbs are those of other pools.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["C", "ContextVerbs"]

C = TypeVar("C")


class ContextVerbs(Generic[C]):
    """Nothing but a name for `CtxPool` and `CtxThreadPool` of contexts of one type."""
