"""Facts for which the standard library has no public name."""

from __future__ import annotations

import abc
import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

CachedFunction: type = type(functools.lru_cache(len))
"""The type of functions made by `functools.lru_cache` and `functools.cache`."""


def is_free_threaded() -> bool:
    """Whether threads of this interpreter run Python code at the same instant."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()


def folder_asker() -> Callable[[], bytes | None]:
    """Return a function that returns the working folder and keeps the interpreter's lock."""
    import ctypes

    size = 4096
    ask = ctypes.PyDLL(None).getcwd
    ask.restype = ctypes.c_char_p
    return functools.partial(ask, ctypes.create_string_buffer(size), size)


def is_mine(lock: Any) -> bool:
    """Whether the calling thread holds a `threading.RLock`.  `Condition` asks in the same way."""
    return bool(lock._is_owned())


def registered_classes(cls: type) -> Any:
    """Return weak references to the classes registered with an abstract base class."""
    return abc._get_dump(cls)[0] if isinstance(cls, abc.ABCMeta) else ()  # type: ignore[attr-defined]


def module_of(obj: Any, name: str) -> str:
    """Return the name of the module in which an object has this name.

    Raises:
        LookupError: no module has the object, for example a function made by `numpy.frompyfunc`.
    """
    try:
        module: str = pickle.whichmodule(obj, name)  # type: ignore[attr-defined]
    except pickle.PicklingError:  # from Python 3.15 on, `whichmodule` compares the objects itself
        raise LookupError(f"it is not {getattr(obj, '__module__', None)}.{name}") from None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not obj:
        raise LookupError(f"it is not {module}.{name}")
    return module


def warning_filters(warnings: Any) -> Callable[[], list[Any]]:
    """Return a function that returns the list of filters that `warnings` uses now."""
    # From Python 3.14 on, a context may have its own.
    found: Any = getattr(warnings, "_get_filters", None)
    return found or functools.partial(getattr, warnings, "filters")
