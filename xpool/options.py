"""The arguments of the constructors and verbs, checked in one place."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from xpool.errors import OptionError

__all__ = [
    "START_ATTEMPTS",
    "check_callable",
    "check_chunksize",
    "check_count",
    "check_iterable",
    "check_share_method",
    "default_chunksize",
    "default_processes",
    "label",
    "resolve_processes",
]

START_ATTEMPTS = 3
"""Workers that may fail to start in one place, one after the other, before the pool gives up."""

SHARE_METHODS = ("cpu", "cuda", "xla", None)


def default_processes() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    """Return ``value`` as an int of at least ``least``.

    Raises:
        TypeError: it is no whole number.
        OptionError: it is too small (a `ValueError`).
    """
    try:
        number = value.__index__()
    except AttributeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        raise OptionError(f"{name} must be at least {least}, not {number}")
    return int(number)


def check_callable(name: str, value: Any) -> None:
    """Raise `TypeError` unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a callable, not {value!r}")


def check_iterable(name: str, value: Any) -> tuple[Any, ...]:
    """Return ``value`` as a tuple; raise `TypeError` when it is not iterable."""
    if not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be iterable, not {value!r}")
    return tuple(value)


def resolve_processes(processes: Any, contexts: Sequence[Any] | None = None) -> int:
    """Return how many workers are wanted."""
    if contexts is not None:
        n = len(contexts)
        if n == 0:
            raise OptionError("worker_contexts is empty: give one context for each worker")
        if processes is not None and check_count("processes", processes) != n:
            raise OptionError(
                f"processes is {processes}, but worker_contexts has {n}; leave processes out"
            )
        return n
    if processes is None:
        return default_processes()
    return check_count("processes", processes)


def check_chunksize(chunksize: Any) -> int:
    """Return a chunk size of at least 1."""
    return check_count("chunksize", chunksize)


def default_chunksize(length: int, workers: int) -> int:
    """Return the chunk size of `map`: about four chunks for each worker."""
    return max(1, math.ceil(length / (4 * workers)))


def check_share_method(method: Any) -> None:
    """Raise `OptionError` for a share method that does not exist."""
    if method not in SHARE_METHODS:
        raise OptionError(
            f"share_method must be 'cpu', 'cuda', 'xla' or None, not {method!r}; "
            "None shares each tensor by its own kind"
        )


def label(func: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None)
    return f"{name}()" if isinstance(name, str) else f"a {type(func).__name__}"
