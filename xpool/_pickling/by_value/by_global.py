"""Refers to globals of the program in an initializer and its arguments.

In a fork, `Pool(initializer=CACHE.update)` changes the global `CACHE`, and `initargs=(CACHE,)`
passes it on.  So a worker looks such an object up, and does not get a copy of it.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, MutableSequence, MutableSet
from operator import is_not
from types import (
    BuiltinMethodType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from xpool._pickling import Key
from xpool._pickling.by_value.compared import attempt
from xpool._pickling.by_value.names import ATOMS, get_global
from xpool._pickling.by_value.origin import (
    INSTALLED,
    attributes_of,
    canonical,
    modules,
    namespace,
    origin_of,
    program_modules,
    value_of,
)
from xpool._pickling.by_value.standard import is_generator
from xpool._pickling.pickler import write_group
from xpool._pickling.reducers import Context, Group, Instead, register


class _Reference:
    """Takes the place of an object.  ``keys``: the globals that have it, or have it in them."""

    def __init__(self, module: str, path: str, keys: set[Key]) -> None:
        self.place, self.keys = (module, path), keys


@register(_Reference)
def _reduce(pickler: Context, reference: _Reference) -> Any:
    pickler.names |= {(module, path.partition(".")[0]) for module, path in reference.keys}
    pickler.names |= reference.keys
    return get_global, reference.place


def referred(obj: Any, shares: bool) -> Any:
    """Return what is pickled instead of an object: it has references to globals.

    If other parts of it share objects with these globals, it has none, and all is copied together.

    ``shares``: whether tensors are shared.  Then a global with tensors or arrays is pickled.
    """
    finder = _Finder(shares)
    found = finder.refer(obj)
    if found is obj:
        return obj
    rest = list[Any]()
    attempt(write_group, found, Group({}, {}, rest), True)
    known = set(map(id, filter(_is_kept, finder.objects)))
    return found if known.isdisjoint(map(id, filter(_is_kept, rest))) else obj


class _Finder:
    """Puts references in the place of objects that globals of the program have."""

    def __init__(self, shares: bool) -> None:
        self._shares = shares
        self._found: dict[int, _Reference | None] | None = None
        self.objects: list[Any] = []  # in the globals to which there are references
        # By id: lists and dicts that no global has, and what is pickled instead of them.
        self._within: dict[int, Any] = {}

    def refer(self, obj: Any) -> Any:
        """Return an object, or what is pickled instead of it."""
        kind = type(obj)
        if kind is tuple:
            referred = tuple(map(self.refer, obj))
            return referred if any(map(is_not, obj, referred)) else obj
        if kind is functools.partial:
            parts = obj.func, obj.args, tuple(obj.keywords.values())
            func, args, values = new = self.refer(parts)
            state = func, args, dict(zip(obj.keywords, values, strict=True)), vars(obj) or None
            return obj if new is parts else Instead(functools.partial, (int,), state)
        if kind in (MethodType, BuiltinMethodType, MethodWrapperType):
            owner = obj.__self__
            found: Any = self.refer(owner)
            if found is owner and _is_changeable(owner, by_method=True):
                found = self._of_program(owner) or self._of_installed(owner) or owner
            name = getattr(obj, "__name__", None)
            if found is owner or type(name) is not str:
                return obj
            if getattr(owner, name, None) == obj:
                return Instead(getattr, (found, name))
            return MethodType(obj.__func__, found) if kind is MethodType else obj
        found = (_is_changeable(obj) and self._of_program(obj)) or obj
        return self._of_parts(obj) if found is obj and kind in (list, dict) else found

    def _of_parts(self, obj: Any) -> Any:
        """Return a list or dict, or one that has references in it."""
        if id(obj) not in self._within:
            self._within[id(obj)] = obj  # it may contain itself
            values = list(obj.values()) if type(obj) is dict else obj
            if not ATOMS.issuperset(map(type, values)):
                new = [*map(self.refer, values)]
                if any(map(is_not, values, new)):
                    whole = dict(zip(obj, new, strict=True)) if type(obj) is dict else new
                    self._within[id(obj)] = whole
        return self._within[id(obj)]

    def _of_program(self, obj: Any) -> _Reference | None:
        if self._found is None:
            self._found = dict[int, Any](_places())
        found = self._found.get(id(obj))
        if found is not None and not all(map(self._can_be_sent, found.keys)):
            found = self._found[id(obj)] = None
        return found

    def _can_be_sent(self, key: Key) -> bool:
        value, objects = value_of(key), list[Any]()
        written, _ = attempt(write_group, value, Group({id(value): key}, {}, objects), True)
        if written is None or (self._shares and any(map(_has_memory, objects))):
            return False
        self.objects += objects
        return True

    def _of_installed(self, owner: Any) -> _Reference | None:
        """Return a reference to the object of a method, as of ``sys.path.append``."""
        for module, there in modules():
            if issubclass(type(there), ModuleType) and origin_of(module) == INSTALLED:
                for name, value in list(attributes_of(there).items()):
                    if value is owner:
                        return _Reference(module, name, set())
        return None


def _places() -> dict[int, _Reference]:
    """Return, by id, references to the objects that are globals, or attributes of these or of
    classes."""
    found: dict[int, _Reference] = {}
    todo: list[tuple[str, str, str, Any]] = []  # module, path, path of the global, object

    def add(module: str, path: str, root: str, values: dict[str, Any]) -> None:
        for name, one in list(values.items()):
            if type(name) is str and name[:2] != "__" and "." not in name:
                whole = f"{path}.{name}".lstrip(".")
                todo.append((module, whole, root or whole, one))

    for module in program_modules():
        add(module, "", "", namespace(module))
    for module, path, root, value in todo:  # grows
        if issubclass(type(value), type):
            if (canonical(value.__module__), value.__qualname__) == (module, path):
                add(module, path, "", {**vars(value)})
        elif _is_changeable(value, by_method=True):
            known = found.get(id(value))
            if known is None:
                known = found[id(value)] = _Reference(module, path, set())
                add(module, path, root, attributes_of(value) if _is_changeable(value) else {})
            if path == root or not known.keys:
                known.keys.add((module, root))
    return found


def _is_changeable(obj: Any, by_method: bool = False) -> bool:
    """Whether an initializer may change an object that it gets as an argument: it is a container,
    or of a class of the program.

    ``by_method``: whether one of its methods may, of any class.
    """
    kind = type(obj)
    if issubclass(kind, _OTHERS) or obj is None or _has_memory(obj):
        return False
    package = kind.__module__.partition(".")[0]
    if package in ("multiprocessing", "threading", "_thread"):
        return False
    of_data = issubclass(kind, _CONTAINERS) or package == "argparse"
    own = of_data or origin_of(kind.__module__) != INSTALLED
    return by_method or (own and not is_generator(obj))


_OTHERS = (
    type, FunctionType, BuiltinMethodType, ModuleType, int, float, complex, str, bytes, tuple,
)  # fmt: skip
_CONTAINERS = MutableMapping, MutableSequence, MutableSet, SimpleNamespace


def _has_memory(obj: Any) -> bool:
    """Whether an object is a tensor or an array."""
    return any(
        one.__module__ in ("torch", "numpy") and one is not object for one in type(obj).__mro__
    )


def _is_kept(obj: Any) -> bool:
    return _is_changeable(obj) or _has_memory(obj)
