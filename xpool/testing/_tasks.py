"""Tasks for `xpool.testing._pool_machine` and `conformance`.  Workers can import them cheaply."""

from __future__ import annotations

import os
import threading
from typing import Any

from xpool.testing._eventually import pass_gate
from xpool.testing._saboteurs import end


class TaskError(Exception):
    """The error of tasks that were told to raise one."""


def perform(spec: tuple[str, int, str | None]) -> Any:
    """Perform a specification: a kind of task, a number, and the path of a gate or None."""
    what, number, path = spec
    if what == "value":
        return number
    if what == "error":
        raise TaskError(number)
    if what == "pid":
        return os.getpid()
    if what == "held":
        assert path is not None
        pass_gate(path)
        return number
    if what == "large":
        return bytes([number % 251]) * 300_000
    if what == "unpicklable":
        return threading.Lock()
    end(what)
    return None


def perform_pair(number: int, spec: tuple[str, int, str | None]) -> Any:
    """Do the same as `perform`, but take two arguments, for `starmap`."""
    return perform(spec)


def in_context(_context: Any, *args: Any) -> Any:
    """Do the same as `perform` or `perform_pair`, for pools that pass a context to tasks."""
    return perform(args[-1])
