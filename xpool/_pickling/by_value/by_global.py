"""Refers to globals of the program in an initializer and its arguments.

In a fork, `Pool(initializer=CACHE.update)` changes the global `CACHE`, and `initargs=(CACHE,)`
passes it on, as `initargs=(Settings(cache=CACHE),)` does.  So a worker looks such an object up, and
does not get a copy of it.  The references are pickled first.  Then they take the places of their
objects in the memo of the pickler, which so writes them wherever it meets these objects.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import MutableMapping, MutableSequence, MutableSet
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
from xpool._pickling.by_value import checks
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
from xpool._pickling.reducers import Context, Group, register


class _Reference:
    """Takes the place of an object.  ``keys``: the globals that have it, or have it in them."""

    def __init__(self, module: str, path: str, keys: set[Key]) -> None:
        self.place, self.keys = (module, path), keys


@register(_Reference)
def _reduce(pickler: Context, reference: _Reference) -> Any:
    pickler.names |= {(module, path.partition(".")[0]) for module, path in reference.keys}
    pickler.names |= reference.keys
    return get_global, reference.place


class _Within:
    """Takes the place of an object that is such a global, or has some in it at any depth."""

    def __init__(self, obj: Any, pairs: list[tuple[Any, _Reference]]) -> None:
        self.obj, self.pairs = obj, pairs
        self.objects: list[Any] | None = None  # those that are pickled


@register(_Within)
def _reduce_within(pickler: Any, within: _Within) -> Any:
    """Pickle references, then let the pickler take them for the objects, then the whole object."""
    known = pickler.memo.copy()
    pairs = [one for one in within.pairs if id(one[0]) not in known]
    references = [reference for _, reference in pairs]
    return operator.itemgetter(-1), ((*references, _Known(pairs), within.obj),)


class _Known:
    def __init__(self, pairs: list[tuple[Any, _Reference]]) -> None:
        self.pairs = pairs


@register(_Known)
def _reduce_known(pickler: Any, known: _Known) -> Any:
    memo = dict(pickler.memo.copy())
    # Its length stays, because the receiver counts the objects, too.
    for obj, reference in known.pairs:
        memo[id(obj)] = memo.pop(id(reference))[0], obj
    pickler.memo = memo
    return int, ()


def referred(whole: tuple[Any, ...], shares: bool) -> tuple[Any, ...]:
    """Return what is pickled instead of an initializer and its arguments: with references.

    If other parts of them share objects with these globals, there are none, and all is copied.

    ``shares``: whether tensors are shared.  Then a global with tensors or arrays is pickled.
    """
    _warn_of_variables(whole[0])
    finder = _Finder(shares)
    found = tuple(map(finder.refer, whole))
    if all(map(operator.is_, found, whole)):
        return whole
    common = finder.of_globals.keys() & finder.copied(found)
    objects = (finder.of_globals[one] for one in common)
    return whole if any(_is_changeable(one) or _has_memory(one) for one in objects) else found


def _warn_of_variables(initializer: Any) -> None:
    """Warn of an initializer that sets a variable of the function around it (``nonlocal``)."""
    if type(initializer) is FunctionType and initializer.__code__.co_freevars:
        code = initializer.__code__
        stores = (one for one in dis.get_instructions(code) if one.opname == "STORE_DEREF")
        name = next((one.argval for one in stores if one.argval in code.co_freevars), None)
        if name is not None:
            checks.warn(
                f"The initializer {initializer.__qualname__}() sets {name!r}, a variable of the "
                "function around it. Tasks do not see the new value: let it set a global."
            )


class _Finder:
    """Puts references in the place of objects that globals of the program have."""

    def __init__(self, shares: bool) -> None:
        self._shares = shares
        self._places: dict[int, _Reference] | None = None
        self._sent: dict[Key, bool] = {}
        self.of_globals: dict[int, Any] = {}  # by id: objects in globals to which references lead

    def refer(self, obj: Any) -> Any:
        """Return an object, or what is pickled instead of it."""
        kind = type(obj)
        if kind in ATOMS or _has_memory(obj) or kind.__module__.partition(".")[0] == "pandas":
            return obj
        if self._places is None:
            self._places = _places()
        if kind in (list, tuple, dict, set) and id(obj) not in self._places:
            values = obj.values() if kind is dict else ()
            if ATOMS.issuperset(map(type, obj)) and ATOMS.issuperset(map(type, values)):
                return obj
        owner = obj.__self__ if kind in _METHODS else obj
        objects = None if owner is namespace("__main__") else _objects_in(obj)
        if objects is None:  # the rest of it may be in such an object
            objects = [obj, owner]
        pairs = self._pairs(objects, self._places)
        if not pairs:
            return obj
        within = _Within(obj, pairs)
        within.objects = _objects_in(within, with_locks=False)
        return obj if within.objects is None else within  # the error names its parts

    def copied(self, found: tuple[Any, ...]) -> set[int]:
        """Return the ids of the objects to which no references lead."""
        every, pairs = list[Any](), list[tuple[Any, _Reference]]()
        for obj in found:
            is_within = type(obj) is _Within
            every += (obj.objects if is_within else _objects_in(obj)) or [obj]
            pairs += obj.pairs if is_within else []
        # They exist as long as `whole`, or the objects with which they are compared.
        return set(map(id, every)).difference(id(obj) for obj, _ in pairs)

    def _pairs(
        self, objects: list[Any], places: dict[int, _Reference]
    ) -> list[tuple[Any, _Reference]]:
        by_id = dict(zip(map(id, objects), objects))
        owners: dict[int, Any] = {}
        if not _METHODS.isdisjoint(map(type, objects)):
            methods = (one.__self__ for one in objects if type(one) in _METHODS)
            owners = {id(one): one for one in methods if _is_changeable(one, by_method=True)}
        pairs = list[tuple[Any, _Reference]]()
        for one in places.keys() & by_id.keys():
            obj, reference = by_id[one], places[one]
            changeable = one in owners or _is_changeable(obj)
            if changeable and all(map(self._can_be_sent, reference.keys)):
                pairs.append((obj, reference))
        for one in owners.keys() - places.keys():
            installed = self._of_installed(owners[one])
            if installed is not None:
                pairs.append((owners[one], installed))
        return pairs

    def _can_be_sent(self, key: Key) -> bool:
        if key not in self._sent:
            value = value_of(key)
            objects = _objects_in(value, {id(value): key})
            self._sent[key] = objects is not None and not (
                self._shares and any(map(_has_memory, objects))
            )
            if self._sent[key]:
                self.of_globals.update(zip(map(id, objects or ()), objects or ()))
        return self._sent[key]

    def _of_installed(self, owner: Any) -> _Reference | None:
        """Return a reference to the object of a method, as of ``sys.path.append``."""
        for module, there in modules():
            if issubclass(type(there), ModuleType) and origin_of(module) == INSTALLED:
                for name, value in list(attributes_of(there).items()):
                    if value is owner:
                        return _Reference(module, name, set())
        return None


_METHODS = {MethodType, BuiltinMethodType, MethodWrapperType}


def _objects_in(
    value: Any, own: dict[int, Key] | None = None, with_locks: bool = True
) -> list[Any] | None:
    """Return the objects that the pickle of a value has; None: it cannot be pickled.

    A lock can be pickled in a global, but not in an argument.
    """
    objects = list[Any]()
    group = Group(own or {}, {}, objects)
    written, _ = attempt(write_group, value, group, True)
    return None if written is None or (group.locks and not with_locks) else objects


def _places() -> dict[int, _Reference]:
    """Return, by id, references to the objects that are globals, or attributes of these or of
    classes."""
    script = namespace("__main__")
    found = {id(script): _Reference("__main__", "__dict__", set())}
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
