"""The table of reducers, and what a pickler offers to them.

`reducer_override` is asked by both picklers (C and dill's) before anything else.  A
reducer answers as ``__reduce__`` does, or `NotImplemented` for "as usual".

By-value objects are rebuilt in two steps wherever they can be part of a cycle: a shell is
made and remembered by the pickler, then a setter fills it.  So functions that call each
other, classes whose methods use ``super()`` and the like need no special case.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pickle import PickleBuffer
from typing import Any, Protocol

from xpool.interrupt import by_handler
from xpool.memory.arena import Block
from xpool.memory.window import window
from xpool.pickle.forking import reducer_for
from xpool.pickle.main import MAIN_NAMES, source
from xpool.pickle.policy import Layout

__all__ = [
    "BUILDERS",
    "FOR_SUBCLASSES",
    "LAZY",
    "REDUCERS",
    "Context",
    "builder",
    "by_name",
    "goes_by_name",
    "in_place",
    "name_for",
    "reducer_override",
    "register",
    "static_modules",
]


class Context(Protocol):
    """State of one run of a pickler, as the reducers see it."""

    recurse: bool  # functions take along copies of the globals that they use
    blob: bool  # a class definition is being pickled: by-value classes are written out
    names: set[str]  # globals of __main__ that functions and classes are, or use
    follow: bool  # also those that go by name are noted there
    spaces: dict[int, Any]  # globals that belong to no module, by id
    tensors: Any  # what tensors.py remembers of this run, or None
    layout: Layout
    shared: dict[int, Block]  # by the id of a PickleBuffer: the block that it is already


def in_place(pickler: Context, block: Block, nbytes: int = 1) -> PickleBuffer:
    """Return the first bytes of a block as what a message names, and does not copy."""
    buffer = PickleBuffer(window(ctypes.addressof(block), nbytes, block))  # type: ignore[arg-type]
    pickler.shared[id(buffer)] = block
    return buffer


Reducer = Callable[[Any, Any], Any]


REDUCERS: dict[type, Reducer] = {}

#: Modules whose reducers are registered when an object of theirs is first met.
LAZY: dict[str, Callable[[], None]] = {}

#: Names of the modules that `mark_static_module` was given.
static_modules: set[str] = set()

#: Reducers that answer for subclasses too, unless a nearer base has one.
FOR_SUBCLASSES: dict[type, Reducer] = {}

#: Our own functions that build small things, with their names: they are in many messages.
BUILDERS: dict[Callable[..., Any], str] = {}


def builder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of this package that goes by name, whatever else is done to functions."""
    BUILDERS[function] = function.__name__
    return function


def register(*types: type) -> Callable[[Reducer], Reducer]:
    """Make a function the reducer of these exact types."""

    def add(reducer: Reducer) -> Reducer:
        for one in types:
            REDUCERS[one] = reducer
        return reducer

    return add


def reducer_override(pickler: Any, obj: Any) -> Any:
    """The method that both picklers have."""
    kind = type(obj)
    reducer = REDUCERS.get(kind)
    if reducer is None:
        reducer = _find(kind)
        if reducer is None:
            return NotImplemented
    return reducer(pickler, obj)


# Held while a module's reducers are registered, so that no thread finds some of them missing.
_finding = threading.RLock()


def _find(kind: type) -> Reducer | None:
    with _finding:
        while True:
            reducer = REDUCERS.get(kind)
            if reducer is not None:
                return reducer
            for base in kind.__mro__:
                reducer = FOR_SUBCLASSES.get(base)
                if reducer is not None:
                    return reducer
                load = LAZY.get(base.__module__)
                if load is not None:
                    load()  # which takes itself out of the table
                    break
            else:
                return reducer_for(kind)


def _after_fork() -> None:
    global _finding
    _finding = threading.RLock()  # another thread of the parent may have held the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def goes_by_name(obj: Any) -> bool:
    """Whether another process finds this function or class under its own name."""
    module_name, path = obj.__module__, _path_of(obj)
    if module_name in MAIN_NAMES and module_name not in static_modules:
        text = source()
        if text is None or path.partition(".")[0] in text.guarded:
            return False
    return _found(module_name, path) is obj


def by_name(obj: Any) -> Any:
    """Return what pickles a function or class by name, or None where that cannot be done."""
    if goes_by_name(obj):
        return _path_of(obj)
    module_name = obj.__module__
    if module_name in static_modules:
        # Another object of the same name (the module was reloaded) stands for this one,
        # but a decorated function must not stand for the function inside it.
        found = _found(module_name, _path_of(obj))
        if type(found) is type(obj) and not hasattr(found, "__wrapped__"):
            return _get, (module_name, _path_of(obj))
    return None


def name_for(pickler: Context, obj: Any) -> Any:
    """As `by_name`; and note what is of ``__main__``, for the globals that it uses."""
    module_name = obj.__module__
    if module_name not in MAIN_NAMES:
        return by_name(obj)
    name = path = _path_of(obj)
    text = source()
    # Most are of the top level: this is faster than `by_name`.
    known = text is not None and path not in text.guarded
    if not (known and sys.modules[module_name].__dict__.get(path) is obj):
        name = by_name(obj)
    if name is not None and pickler.follow:
        pickler.names.add(path.partition(".")[0])
    return name


def _path_of(obj: Any) -> str:
    path: str = getattr(obj, "__qualname__", None) or obj.__name__
    return path


def _get(module_name: str, path: str) -> Any:
    obj: Any = import_module(module_name)
    for part in path.split("."):
        obj = getattr(obj, part)
    return obj


def _found(module_name: Any, path: str) -> Any:
    if not isinstance(module_name, str):
        return None
    module: Any = sys.modules.get(module_name)
    if module is None:
        try:
            module = import_module(module_name)
        except Exception as exc:  # whatever a module does when it is imported: not found
            if by_handler(exc):
                raise
            return None
    obj = module
    for part in path.split("."):
        obj = getattr(obj, part, None)
    return obj
