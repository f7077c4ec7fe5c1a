"""The table of reducers, and what a pickler offers to them.

`reducer_override` is asked by both picklers (C and dill's) before anything else.  A
reducer answers as ``__reduce__`` does, or `NotImplemented` for "as usual".

By-value objects are rebuilt in two steps wherever they can be part of a cycle: a shell is
made and remembered by the pickler, then a setter fills it.  So functions that call each
other, classes whose methods use ``super()`` and the like need no special case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from pickle import PickleBuffer
from typing import Any, Protocol

from xpool._memory.arena import Block
from xpool._pickling.policy import Layout
from xpool._python import at_fork
from xpool._python.forking_pickler import reducer_for

__all__ = [
    "BUILDERS",
    "FOR_SUBCLASSES",
    "LAZY",
    "REDUCERS",
    "Context",
    "builder",
    "in_place",
    "lazily",
    "reducer_override",
    "register",
]


class Context(Protocol):
    """State of one run of a pickler, as the reducers see it."""

    recurse: bool  # functions take along copies of the globals that they use
    blob: bool  # a class definition is being pickled: by-value classes are written out
    names: set[str]  # globals of __main__ that functions and classes are, or use
    follow: bool  # also those that go by name are noted there
    spaces: dict[int, Any]  # globals that belong to no module, by id
    tensors: Any  # what the reducers of tensors and arrays remember of this run, or None
    layout: Layout
    shared: dict[int, Block]  # by the id of a PickleBuffer: the block that it is already


def in_place(pickler: Context, block: Block) -> PickleBuffer:
    """Return a block as a buffer whose place a message names, and whose bytes it does not copy."""
    buffer = PickleBuffer(block)  # type: ignore[arg-type]
    # The pickler keeps the buffer in a list, so its `id` stays its own.
    pickler.shared[id(buffer)] = block
    return buffer


Reducer = Callable[[Any, Any], Any]


class Script(Protocol):
    """What a message has to know of the program's ``__main__``."""

    def importable(self) -> bool:
        """Whether functions and classes of ``__main__`` can go by name."""

    def pickled_namespace(self, values: dict[Any, Any]) -> Any:
        """What pickles the globals of ``__main__``; `NotImplemented` for any other dict."""

    def quiet(self, names: set[str]) -> bool:
        """Whether nothing has to go before a message that names these globals."""

    def preface(
        self,
        names: set[str],
        chunks: list[bytes],
        buffers: list[PickleBuffer],
        shared: dict[int, Block],
        layout: Layout,
    ) -> tuple[list[bytes], list[PickleBuffer]] | None:
        """Put the globals that have to go before a pickle there; None: it stays as it is."""


class _NoScript:
    """As the standard pickler has it: what is of ``__main__`` goes by name, and nothing with it."""

    def importable(self) -> bool:
        return True

    def pickled_namespace(self, values: dict[Any, Any]) -> Any:
        return NotImplemented

    def quiet(self, names: set[str]) -> bool:
        return True

    def preface(self, *message: Any) -> None:
        return None


#: Set once, by the family that sends things of ``__main__`` by value.
script: Script = _NoScript()

REDUCERS: dict[type, Reducer] = {}

#: Modules whose reducers are registered when an object of theirs is first met.
LAZY: dict[str, Callable[[], None]] = {}


def lazily(family: str, *modules: str) -> None:
    """Import the module that knows how to pickle these modules' objects when one is first met."""

    def load() -> None:
        import_module(family)  # which puts loaders of its own into the table
        for name in modules:
            if LAZY.get(name) is load:
                LAZY.pop(name, None)  # it had done so before; or another thread has, just now

    for name in modules:
        LAZY.setdefault(name, load)


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
                    load()  # which takes itself out of the table
                    break
            else:
                return reducer_for(kind)


# By name, as in `xpool._engine.channel`.
at_fork.at_fork(before=lambda: _finding.acquire(), in_parent=lambda: _finding.release())
at_fork.renew(globals(), _finding=threading.RLock)
