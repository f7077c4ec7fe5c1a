"""Decides whether a function or class is pickled by name."""

from __future__ import annotations

import sys
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any

from xpool._pickling.by_value.main import MAIN_NAMES, source
from xpool._pickling.reducers import Context
from xpool._python.interrupt import by_handler

static_modules: set[str] = set()  # the names of the modules given to `mark_static_module`


def mark_static_module(module: ModuleType) -> None:
    """Declare that a module is the same in every process, so that it is pickled by name.

    Its functions and classes are then always pickled by name, too.

    Raises:
        TypeError: ``module`` is not a module.
    """
    if not isinstance(module, ModuleType):
        raise TypeError(f"mark_static_module takes a module, not {module!r}")
    static_modules.add(module.__name__)


def goes_by_name(obj: Any) -> bool:
    """Whether another process finds this function or class by its name."""
    module_name, path = obj.__module__, _path_of(obj)
    if module_name in MAIN_NAMES and module_name not in static_modules:
        text = source()
        if text is None or path.partition(".")[0] in text.rebound:
            return False
    return _found(module_name, path) is obj


def by_name(obj: Any) -> Any:
    """Return the reduction of a function or class by name, or None if this is not possible."""
    if goes_by_name(obj):
        return _path_of(obj)
    module_name = obj.__module__
    if module_name in static_modules:
        # Another object with the same name (of a reloaded module) may take its place, but a
        # decorated function must not take the place of its inner function.
        found = _found(module_name, _path_of(obj))
        if type(found) is type(obj) and not hasattr(found, "__wrapped__"):
            return _get, (module_name, _path_of(obj))
    return None


def name_for(pickler: Context, obj: Any) -> Any:
    """As `by_name`, but record names of ``__main__``, whose globals will be sent."""
    module_name = obj.__module__
    if module_name not in MAIN_NAMES:
        return by_name(obj)
    name = path = _path_of(obj)
    text = source()
    # Most objects are at the top level, and this is faster than `by_name`.
    known = text is not None and path not in text.rebound
    if not (known and sys.modules[module_name].__dict__.get(path) is obj):
        name = by_name(obj)
    if name is not None and pickler.follow:
        pickler.names.add(path.partition(".")[0])
    return name


def _path_of(obj: Any) -> str:
    path: str = getattr(obj, "__qualname__", None) or obj.__name__
    return path


def _get(module_name: str, path: str) -> Any:
    return attrgetter(path)(import_module(module_name))


def _found(module_name: Any, path: str) -> Any:
    if not isinstance(module_name, str):
        return None
    module: Any = sys.modules.get(module_name)
    if module is None:
        try:
            module = import_module(module_name)
        except Exception as exc:  # the import of a module can raise any error
            if by_handler(exc):
                raise
            return None
    obj = module
    for part in path.split("."):
        obj = getattr(obj, part, None)
    return obj
