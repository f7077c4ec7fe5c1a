"""What the standard library has no public name for, and pickling has to know."""

from __future__ import annotations

import abc
import functools
import sys
from typing import Any

__all__ = ["CachedFunction", "is_free_threaded", "registered_classes"]

CachedFunction: type = type(functools.lru_cache(len))
"""The type of what `functools.lru_cache` and `functools.cache` make."""


def is_free_threaded() -> bool:
    """Whether threads of this interpreter run Python code at the same instant."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()


def registered_classes(cls: abc.ABCMeta) -> Any:
    """Weak references to the classes that an abstract base class was told of by `register`."""
    return abc._get_dump(cls)[0]  # type: ignore[attr-defined]
