"""The table of reducers, and the attributes of a pickler that they use.

Both picklers (C and dill's) call `reducer_override` first.  A reducer returns the same as a
``__reduce__`` method, or `NotImplemented` to leave the object to the pickler.

If an object is pickled by value and may be part of a cycle, it is rebuilt in two steps: first an
empty object is made, which the pickler memoizes, then a setter fills it.  So functions that call
each other, and classes whose methods use ``super()``, need no special case.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pickle import PickleBuffer
from types import CodeType, FunctionType
from typing import Any, Protocol

from xpool._memory.holds import Block
from xpool._pickling import Key
from xpool._pickling.policy import Layout
from xpool._python import at_fork
from xpool._python import registered_reducers as registered


class Blob:
    """The state of a pickler that writes a class definition or, if ``is_mark``, a mark of it.

    A mark is only compared.  It has no code and no other by-value classes, so it is made fast.
    """

    def __init__(self, is_mark: bool = False) -> None:
        self.is_mark = is_mark
        self.codes: list[CodeType] = []  # those that a mark has left out
        self.versions: dict[Any, int] = {}  # those of the classes written, by `ClassEntry`


class Refused(TypeError):
    """A reducer has refused an object that no pickler can pickle.

    Attributes:
        culprit: the object.
    """

    def __init__(self, text: str, culprit: Any = None) -> None:
        super().__init__(text)
        self.culprit = culprit


class Group:
    """The state of a pickler that writes globals of the program.

    Args:
        own: by id, the globals among them; a random generator is the receiver's own there.
        named: by id, objects that are written by their names: the arguments of `of_module`.
        objects: gets all objects that are written; None: they are not wanted.
    """

    def __init__(
        self,
        own: dict[int, Key],
        named: dict[int, tuple[Any, ...]],
        objects: list[Any] | None = None,
    ) -> None:
        self.own, self.named, self.objects = own, named, objects
        self.locks: list[Any] = []  # those in place of which the receiver makes new ones


class Context(Protocol):
    """The state of one run of a pickler that the reducers use."""

    recurse: bool  # whether functions are pickled with copies of the globals that they use
    blob: Blob | None  # None, unless a class definition is pickled
    group: Group | None  # None, unless globals of the program are pickled
    names: set[Key]  # globals of the program that the object uses
    follow: bool  # whether `names` also gets those of objects that are pickled by name
    home: bool  # whether the receiver is the program, and this process its worker
    spaces: dict[int, Any]  # globals that belong to no module, by id; at 0, places of objects
    tensors: Any  # the state of the reducers of tensors and arrays in this run, or None
    layout: Layout
    shared: dict[int, Block]  # the block in which a PickleBuffer lies, by the buffer's id


def in_place(pickler: Context, block: Block) -> PickleBuffer:
    """Return a block as a buffer that a message names and does not copy."""
    buffer = PickleBuffer(block)  # type: ignore[arg-type]
    # The `id` stays unique, because the pickler keeps the buffer in a list.
    pickler.shared[id(buffer)] = block
    return buffer


Reducer = Callable[[Any, Any], Any]


script: Any
"""Answers the picklers' questions about the program (`by_value.sent`)."""

everyone: set[Key] = set()
"""Keys of what every message of a pool brings, also one that uses nothing of the program."""

named: Reducer | None = None
"""The reducer of objects of classes with a ``__reduce__`` of their own (`by_value.by_token`)."""

REDUCERS: dict[type, Reducer] = {}

# By module: the function that registers reducers when an object of the module is first pickled.
LAZY: dict[str, Callable[[], object]] = {}


def lazily(family: str, *modules: str) -> None:
    """Import ``family``, a module of reducers, when an object of ``modules`` is first pickled."""

    for name in modules:
        LAZY.setdefault(name, partial(import_module, family))


# Reducers that apply to subclasses, too, unless a nearer base has one.
FOR_SUBCLASSES: dict[type, Reducer] = {}

# xpool's own functions that rebuild objects, with their names, which are in many messages.
BUILDERS: dict[Callable[..., Any], str] = {}


def set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    """Restore the attributes of an object, even if its class has ``__setstate__``."""
    obj.__dict__.update(attributes)


def builder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function of this package that is always pickled by name."""
    BUILDERS[function] = function.__name__
    return function


@builder
def of_module(module: str, name: str, kind: type | None = None) -> Any:
    """Return a global of a module.

    ``kind``: its class, if it has no state.  Then the program may have put it in the place of what
    the module's import has made, and the receiver makes one, too.
    """
    if kind is None:
        return getattr(import_module(module), name)
    found = getattr(import_module(module), name, None)
    return found if type(found) is kind else object.__new__(kind)


class InModule:
    """Takes the place of an object that is written by the name of a global."""

    def __init__(self, place: Key) -> None:
        self._place = place

    def __reduce__(self) -> Any:
        return of_module, self._place


def register(*types: type) -> Callable[[Reducer], Reducer]:
    """Make a function the reducer of these exact types."""

    def add(reducer: Reducer) -> Reducer:
        for one in types:
            REDUCERS[one] = reducer
        return reducer

    return add


def reducer_override(pickler: Any, obj: Any) -> Any:
    kind = type(obj)
    if kind in registered.forking or kind in copyreg.dispatch_table:
        reduce = registered.of_program(kind)
        if reduce is not None:
            return reduce(obj)
    reducer = REDUCERS.get(kind) or _find(kind)
    return NotImplemented if reducer is None else reducer(pickler, obj)


# Held while a module's reducers are registered, so that no thread finds some of them missing.  Also
# held during a fork, because the child would wait for ever for an import of another thread.
_finding = threading.RLock()


def _find(kind: type) -> Reducer | None:
    with _finding:
        while True:
            # Another thread, or `load` in the last turn of this loop, may have registered it.
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
                    if LAZY.get(base.__module__) is load:  # `load` may have replaced the entry
                        del LAZY[base.__module__]
                    break
            else:
                own = type(kind.__reduce__) is FunctionType and kind not in copyreg.dispatch_table
                return registered.of_multiprocessing(kind) or (named if own else None)


# The lambdas look up `_finding` at each fork, because `renew` replaces it in a child.
at_fork.at_fork(before=lambda: _finding.acquire(), in_parent=lambda: _finding.release())
at_fork.renew(globals(), _finding=threading.RLock)
