"""What the standard library has no public name for, and pickling has to know."""

from __future__ import annotations

import abc
import functools
import pickle
import sys
from typing import Any

__all__ = ["CachedFunction", "is_free_threaded", "module_of", "registered_classes"]

CachedFunction: type = type(functools.lru_cache(len))
"""The type of what `functools.lru_cache` and `functools.cache` make."""


def is_free_threaded() -> bool:
    """Whether threads of this interpreter run Python code at the same instant."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()


def registered_classes(cls: type) -> Any:
    """Weak references to the classes that an abstract base class was told of by `register`."""
    return abc._get_dump(cls)[0] if isinstance(cls, abc.ABCMeta) else ()  # type: ignore[attr-defined]


def module_of(obj: Any, name: str) -> str:
    """Return the module in which an object has this name.

    Raises:
        LookupError: in none; what `numpy.frompyfunc` makes has a name of its own making.
    """
    module: str = pickle.whichmodule(obj, name)  # type: ignore[attr-defined]
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not obj:
        raise LookupError(f"it is not {module}.{name}")
    return module
