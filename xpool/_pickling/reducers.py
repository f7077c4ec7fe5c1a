"""The table of reducers, and the interface of a pickler to them.

Both picklers (C and dill's) call `reducer_override` first.  A reducer returns what ``__reduce__``
would, or `NotImplemented` to leave the object to the pickler.

An object that is pickled by value and may be part of a cycle is rebuilt in two steps: an empty
object is made, which the pickler memoizes, then a setter fills it.  So functions that call each
other, and classes whose methods use ``super()``, need no special case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pickle import PickleBuffer
from typing import Any, Protocol

from xpool._memory.holds import Block
from xpool._pickling.policy import Layout
from xpool._python import at_fork
from xpool._python.forking_pickler import reducer_for


class Context(Protocol):
    """State of one run of a pickler, as the reducers see it."""

    recurse: bool  # functions are pickled with copies of the globals that they use
    blob: bool  # a class definition is being pickled: by-value classes are written out
    names: set[str]  # globals of __main__ that are functions or classes, or that these use
    follow: bool  # `names` also has those of objects that are pickled by name
    spaces: dict[int, Any]  # globals that belong to no module, by id
    tensors: Any  # the state of the reducers of tensors and arrays in this run, or None
    layout: Layout
    shared: dict[int, Block]  # by the id of a PickleBuffer: the block that it is already


def in_place(pickler: Context, block: Block) -> PickleBuffer:
    """Return a block as a buffer that a message names and does not copy."""
    buffer = PickleBuffer(block)  # type: ignore[arg-type]
    # The pickler keeps the buffer in a list, so its `id` stays unique.
    pickler.shared[id(buffer)] = block
    return buffer


Reducer = Callable[[Any, Any], Any]


script: Any
"""Answers what a pickler asks about the program's ``__main__`` (`by_value.main_globals`)."""

REDUCERS: dict[type, Reducer] = {}

#: Modules whose reducers are registered when one of their objects is first pickled.
LAZY: dict[str, Callable[[], object]] = {}


def lazily(family: str, *modules: str) -> None:
    """Import the module with the reducers of these modules' objects when one is first pickled."""

    for name in modules:
        LAZY.setdefault(name, partial(import_module, family))


#: Reducers that apply to subclasses, too, unless a nearer base has one.
FOR_SUBCLASSES: dict[type, Reducer] = {}

#: xpool's own functions that rebuild objects, with their names, which are in many messages.
BUILDERS: dict[Callable[..., Any], str] = {}


def set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    """Restore attributes, as the setter of a reduction, of an object with ``__setstate__``."""
    obj.__dict__.update(attributes)


def builder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function of this package that is always pickled by name."""
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
    kind = type(obj)
    reducer = REDUCERS.get(kind)
    if reducer is None:
        reducer = _find(kind)
        if reducer is None:
            return NotImplemented
    return reducer(pickler, obj)


# Held while a module's reducers are registered, so that no thread finds some of them missing; and
# over a fork, in whose child an import would wait for ever for that of another thread.
_finding = threading.RLock()


def _find(kind: type) -> Reducer | None:
    with _finding:
        while True:
            # Looked for again: another thread may have registered it, or `load` just now.
            reducer = REDUCERS.get(kind)
            if reducer is not None:
                return reducer
            for base in kind.__mro__:
                reducer = FOR_SUBCLASSES.get(base)
                if reducer is not None:
                    return reducer
                load = LAZY.get(base.__module__)
                if load is not None:
                    load()
                    if LAZY.get(base.__module__) is load:  # not if it has put another here
                        del LAZY[base.__module__]
                    break
            else:
                return reducer_for(kind)


# By name, as in `xpool._engine.channel`.
at_fork.at_fork(before=lambda: _finding.acquire(), in_parent=lambda: _finding.release())
at_fork.renew(globals(), _finding=threading.RLock)
