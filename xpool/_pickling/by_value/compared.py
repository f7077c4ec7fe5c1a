"""The program's globals as `Book` last compared them, and whether they are still the same.

`sent` asks this for each message.  What cannot change is compared by identity, and the rest by its
pickle.
"""

from __future__ import annotations

import sys
from abc import get_cache_token
from collections.abc import Callable, Iterable
from operator import is_
from types import FunctionType
from typing import Any

from xpool._pickling import HEAP_TYPE, Key
from xpool._pickling.by_value import checks, classes
from xpool._pickling.by_value.caches import CACHE
from xpool._pickling.by_value.entries import Kind, SentGroup
from xpool._pickling.by_value.functions import annotations_of, parts_of_function, set_since_import
from xpool._pickling.by_value.names import is_shared_by_all, is_simple, name_in_package
from xpool._pickling.by_value.origin import (
    IMPORTED,
    INSTALLED,
    MISSING,
    MODULES,
    Parts,
    canonical,
    is_patch,
    namespace,
    origin_of,
    place_of,
)
from xpool._pickling.by_value.reads import of_annotations
from xpool._pickling.by_value.registered_calls import CALLS
from xpool._pickling.by_value.standard import is_generator
from xpool._pickling.pickler import Pickled, write_group
from xpool._pickling.reducers import Group
from xpool._python.hidden import CachedFunction
from xpool._python.interrupt import pass_on

GONE, PLAIN, FUNCTION, CLASS, NAMED, DATA, CALL = range(7)
"""Kinds of nodes."""


class Node:
    """A global, or an attribute of a class, as it was when `Book` last compared it."""

    def __init__(self, kind: int, value: Any, names: Iterable[Key] = ()) -> None:
        self.kind = kind
        # Not kept alive if it is data, which may be large.
        self.value: Any = None if kind == DATA else value
        self.id = id(value)
        self.names = frozenset(names)  # globals that the value uses
        self.parts: Any = None  # the parts of a function or class that are compared
        self.written: Pickled | None = None
        self.error = ""  # why there is no pickle
        self.objects: set[int] = set()  # ids of the objects that another global may refer to, too
        self.serial = 0
        self.entry: tuple[Any, ...] = ()
        # Of a function or class that workers import: the paths of it, or of its methods, and their
        # defaults that are constant.
        self.defaults: list[tuple[str, tuple[Any, ...]]] = []
        self.large, self.alive = False, list[Any]()
        self.group: SentGroup | None = None  # the group in which the value was sent


_constants: dict[str, tuple[Any, ...]] = {}  # defaults of functions, by their text


def note_class(node: Node, cls: type, module: str, path: str) -> None:
    """Add the attributes of a class that are data, and those of the classes in it."""
    found = set[Key]()
    for inner, owner in classes.with_nested(path, cls):
        found.update((module, f"{inner}.{name}") for name in classes.data_attributes(owner))
        found |= of_annotations(annotations_of(owner), module)
        if origin_of(module) == IMPORTED:
            found.update((module, f"{inner}.{name}") for name in classes.registries(owner))
    for one, method in classes.plain_methods(cls) if origin_of(module) == IMPORTED else ():
        note_function(node, method, module, one)
    node.names |= found


def note_function(node: Node, function: Any, module: str, path: str) -> None:
    """Add the attributes, defaults and code of a function that may differ in a worker."""
    names = classes.data_of_function(function)
    if type(function) is FunctionType:
        parts, constant = set_since_import(function)
        names += parts
        if constant:  # most are equal, and are written once
            constant = _constants.setdefault(repr(constant), constant)
            node.defaults.append((path, constant))
    node.names |= {(module, f"{path}.{name}") for name in names}


def note_cache(node: Node, key: Key, value: Any) -> None:
    """Add the results that a function of `functools.lru_cache` keeps."""
    if issubclass(type(value), CachedFunction) and node.kind in (NAMED, DATA):
        node.names |= {(key[0], f"{key[1]}.{CACHE}")}


def shared_objects(objects: list[Any]) -> tuple[list[Any], set[int]]:
    """Return those of a global's objects to which another global may refer, too, and their ids.

    The ids include the addresses of memory.
    """
    own = {kind for kind in set(map(type, objects)) if not is_shared_by_all(kind)}
    if not own:
        return [], set()
    alive = [one for one in objects if type(one) in own]
    installed = {
        kind
        for kind in own
        if kind.__flags__ & HEAP_TYPE and origin_of(kind.__module__) == INSTALLED
    }
    alone = (
        one
        for one in alive
        if (
            type(one) is FunctionType
            and not is_patch(one, one.__module__)
            and (is_simple(one) or origin_of(one.__module__) == INSTALLED)
        )
        or (type(one) in installed and name_in_package(one) is not None)
    )
    # Each frame and series of pandas refers to a list of its class, which is a constant.
    names = (getattr(kind, "_metadata", None) for kind in own if kind.__module__ in _OF_PANDAS)
    found = set(map(id, alive)) - set(map(id, alone)) - set(map(id, names))
    return alive, found | checks.memory_of(objects)


_OF_PANDAS = frozenset({"pandas", "pandas.core.frame", "pandas.core.series"})


class Compared:
    """What is compared for each message.

    ``named``: by id, objects without state that are globals of modules which workers import.
    ``maps``: as that of `Group`.

    Attributes:
        at_once: what `Book.preface` compares without the lock: the numbers of globals of modules,
            globals by identity, and functions; and whether there is more to compare.
        if_used: groups that are compared only for messages that use them, with the places of
            their globals: those in shared memory, and those that cannot be sent.
    """

    def __init__(
        self,
        nodes: dict[Key, Node],
        groups: Iterable[SentGroup],
        named: dict[int, Key],
        stateless: list[Any],
        maps: bool,
    ) -> None:
        self._named, self._stateless, self._maps = named, stateless, maps
        self._data: list[tuple[Any, str, int]] = []
        self._classes: list[tuple[Any, list[int], tuple[Any, ...]]] = []
        self._registrations = get_cache_token()  # of abstract base classes
        self._changing: list[tuple[type, Any]] = []  # classes with parts that may change in place
        self.if_used: list[tuple[SentGroup, list[tuple[Any, str]]]] = []
        main = namespace("__main__")
        modules = {module for module, _ in nodes} - {CALLS, "__main__"} | {MODULES}
        spaces = [namespace(one) for one in modules if origin_of(one) != INSTALLED]
        self._spaces = [(space, len(space)) for space in spaces]
        apart = set[Key]()
        for group in groups:
            if group.kind not in (Kind.PLACED, Kind.REFUSED, Kind.LEFT_NONE):
                continue
            apart.update(group.keys)
            if not all(map(checks.is_final, group.keys)) and any(
                nodes[key].kind == DATA for key in group.keys
            ):
                self.if_used.append((group, [place_of(key) for key in group.keys]))
        small, functions = [], list[tuple[Any, Any, Any, Any]]()
        methods = list[Any]()  # also functions that workers import
        same = [(sys.modules, "__main__", sys.modules.get("__main__"))]
        for key, node in nodes.items():
            holder, name = place_of(key)
            if holder is None or node.kind == CALL:
                continue
            if node.kind in (GONE, DATA):
                self._data.append((holder, name, node.id))
            if node.kind == GONE:
                continue
            if node.kind == DATA:
                value = holder.get(name)
                if node.written is not None and key not in apart and not is_generator(value):
                    small.append((key, holder, name))
                continue
            if type(holder) is Parts:
                continue  # compared with its function
            same.append((holder, name, node.value))
            if type(node.value) is FunctionType and node.parts is not None:
                if node.kind == FUNCTION:
                    functions.append((node.value, *node.parts[:3]))
                else:
                    methods.append(node.value)
            elif issubclass(type(node.value), type) and node.kind in (CLASS, NAMED):
                for _, owner in classes.with_nested(key[1], node.value):
                    self._classes.append((owner, [*map(id, vars(owner).values())], owner.__bases__))
                if node.kind == CLASS:
                    methods += (one for _, _, one in classes.methods(node.value))
                    if classes.may_change(node.value):
                        self._changing.append((node.value, node.parts))
                else:
                    methods += (one for _, one in classes.plain_methods(node.value))
        self._small = [one[1:] for one in sorted(small, key=lambda one: one[0])]
        # If they cannot be pickled, b"" equals no later pickle, and all is looked at again.
        self._small_bytes = (self._write_small() if small else None) or b""
        functions += ((one, one.__code__, one.__defaults__, one.__kwdefaults__) for one in methods)
        # With the copy, the values are alive, and no other object has the id of one.
        whole = [
            (*one, _named(one[3]), len(one[0].__dict__), one[3] and dict(one[3]))
            for one in functions
        ]
        more = self._stateless or self._data or self._classes or self._changing
        self.at_once = self._spaces, main, len(main), same, whole, bool(more or self.if_used)

    def has_grown(self) -> bool:
        """Whether modules have got more or fewer globals."""
        return any(len(space) != size for space, size in self._spaces)

    def holds(self) -> bool:
        """Whether the values that need more than identity are unchanged, except `if_used`."""
        if any(map(vars, self._stateless)):
            return False
        for holder, name, ident in self._data:
            if id(holder.get(name, MISSING)) != ident:
                return False
        for cls, ids, bases in self._classes:
            if [*map(id, vars(cls).values())] != ids or cls.__bases__ != bases:
                return False
        if self._classes and get_cache_token() != self._registrations:
            return False
        for cls, definition in self._changing:
            if classes.definition_of(cls) is not definition:
                return False
        return not self._small or self._write_small() == self._small_bytes

    def _write_small(self) -> bytes | None:
        """Return the pickle of the small data; None: it cannot be pickled now."""
        values = [holder.get(name) for holder, name in self._small]
        written, _ = attempt(write_group, values, Group({}, self._named, maps=self._maps), False)
        return None if written is None else b"".join(written.chunks)


def attempt(write: Callable[..., Pickled], *args: Any) -> tuple[Pickled | None, str]:
    """Return what this function of the pickler writes, or None and why it cannot."""
    try:
        return write(*args), ""
    except Exception as error:  # an object's `__reduce__` can raise any error
        pass_on(error)
        return None, f"{type(error).__name__}: {error}"


def same_parts(before: Any, now: Any) -> bool:
    """Whether the parts of a function (`parts_of_function`) are unchanged."""
    return (
        before is not None
        and all(map(is_, before[:4], now[:4]))
        and (_named(before[4]), before[5]) == (_named(now[4]), now[5])
    )


def same_bytes(before: Any, now: Any) -> bool:
    """Whether the data of two groups are the same, also in type: True equals 1, and 0.0 -0.0."""
    same = type(before) is not list or before[0] is now[0] or repr(before) == repr(now)
    return bool(before == now) and same


def _named(kwdefaults: dict[str, Any] | None) -> list[Any] | None:
    """Return values that differ when the defaults of keyword parameters have changed in place."""
    return None if kwdefaults is None else [*kwdefaults, *map(id, kwdefaults.values())]


def parts_of(obj: Any) -> Any:
    """Return values that differ when a function or class that workers import was made again."""
    if issubclass(type(obj), type):
        return classes.own_methods(obj)
    if type(obj) is not FunctionType:
        return None
    return *parts_of_function(obj)[:5], True  # the attributes are globals of their own


def is_made_again(key: Key, node: Node, now: Any) -> bool:
    """Whether the program has made a function or class, or a part of it, again.

    ``node``: what it was when workers have imported it.  Other defaults alone do not count: they
    are data.
    """
    if now is not node.value:
        again = type(now) is type(node.value) and not is_patch(now, key[0])
    elif issubclass(type(now), type):
        again = any(node.parts.get(one) != has for one, has in parts_of(now).items())
    else:
        again = parts_of_function(now)[0] is not node.parts[0]
    return again and (canonical(now.__module__), now.__qualname__) == key
