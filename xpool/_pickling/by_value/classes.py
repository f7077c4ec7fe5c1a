"""Pickles classes by value, and keeps their identity.

For a by-value class, a message contains a token and a *blob*: the definition of the class, pickled
once and compressed.  The receiver loads the blob only if it does not know the token.  A process
sends a received class with the same blob that it has received.

In the blob, the class and every by-value class to which it refers are written as an empty class and
a state (see `reducers`).  So classes may refer to themselves and to each other.

A definition is a snapshot.  At each message, the process that defined the classes in it compares
each of them with the snapshot.  If one has changed, there is a new definition.
"""

from __future__ import annotations

import _collections_abc
import abc
import contextlib
import enum
import functools
import itertools
import pickle
import types
import zlib
from collections.abc import Iterator
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, Protocol

from xpool._pickling import HEAP_TYPE, reducers
from xpool._pickling.by_value import main, registry, special_classes
from xpool._pickling.by_value.functions import annotations_of, own_attributes
from xpool._pickling.by_value.names import (
    ATOMS,
    by_name,
    found_by_name,
    found_here,
    goes_by_name,
    is_set_as_method,
)
from xpool._pickling.by_value.origin import (
    IMPORTED,
    INSTALLED,
    SENT,
    canonical,
    is_made_in_function,
    is_patch,
    module_of,
    origin_of,
    place_in_package,
    value_of,
)
from xpool._pickling.by_value.reads import functions_in, in_python, keys_of, variables_of
from xpool._pickling.by_value.registry import ClassEntry, Definition
from xpool._pickling.pickler import write_blob
from xpool._pickling.reducers import Blob, Context, of_module
from xpool._python.hidden import CachedFunction, registered_classes
from xpool._python.interrupt import pass_on, uninterrupted

_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: C code made it


@by_name
def _reduce_class(pickler: Context, cls: type) -> Any:
    if not is_defined_by_statement(cls):
        place = _PLACES.get(cls)
        return NotImplemented if place is None else (of_module, place)
    if cls.__module__ == "builtins":  # so says a class in Rust: `safetensors.safe_open`
        place = place_in_package("builtins", cls.__name__, cls)
        if place is not None:
            return of_module, place
    if pickler.blob is None:
        token = registry.token_of(cls)
        # With `recurse`, definitions have copies of globals.
        checked = {} if pickler.group is None or pickler.recurse else pickler.group.checked
        if id(cls) not in checked:
            checked[id(cls)] = cls, definition_of(cls, pickler.recurse)
        definition = checked[id(cls)][1]
        pickler.names |= definition.names
        names = tuple(sorted(definition.names))
        return load, (token, definition.version, definition.blob, names)
    if pickler.blob.is_mark:
        return str, (registry.token_of(cls),)
    if origin_of(cls.__module__) == SENT and found_by_name(cls):
        # The receiver sets attributes of the class, and methods may use the class by its name.
        pickler.names.add((canonical(cls.__module__), cls.__qualname__.partition(".")[0]))
    return _written_out(cls, pickler.recurse, pickler.blob.versions)


_PLACES = {
    one: (place, name)
    for place, module in (("_collections_abc", _collections_abc), ("types", types))
    for name, one in vars(module).items()
    if type(one) is type and one.__module__ == "builtins"
}
"""Where Python has types to which their own names do not lead: of functions, views of dicts."""


def is_defined_by_statement(cls: type) -> bool:
    """Whether a class was made by Python code, so that it can be sent by value."""
    return bool(cls.__flags__ & HEAP_TYPE and not cls.__flags__ & _IMMUTABLE_TYPE)


# The next version.  One counter for all classes makes a new definition newer than its classes.
_versions = itertools.count(1)


def definition_of(cls: type, recurse: bool = False) -> Definition:
    with registry.lock:
        definition = _entry_of(cls).definitions.get(recurse)
        if definition is None or not _holds(definition, recurse):
            state = Blob()
            data, names = write_blob(cls, recurse, state)
            entry, versions = _entry_of(cls), state.versions
            if entry.own:
                version = next(_versions)
            else:  # another process has numbered the versions of received classes
                version = max(number for one, number in versions.items() if not one.own)
            blob = zlib.compress(data, 1)
            definition = Definition(version, blob, frozenset(names), versions, state.open)
            entry.definitions[recurse] = definition
        elif definition.opened:
            functions = (ref() for ref in definition.opened)
            new = (keys_of(one) for one in functions if one is not None)
            definition.names = definition.names.union(*new)
        return definition


def _entry_of(cls: type) -> ClassEntry:
    entry = registry.lookup(registry.token_of(cls))
    assert entry is not None
    return entry


def _holds(definition: Definition, recurse: bool) -> bool:
    """Whether none of the classes in a definition has changed."""
    for entry, version in definition.classes.items():
        cls = entry.ref()
        if cls is None:
            return False
        _compare(cls, entry, recurse)
        if entry.version != version:
            return False
    return True


def _compare(cls: type, entry: ClassEntry, recurse: bool) -> None:
    """Raise the version of a class if it has changed."""
    if not entry.own:  # only its owner changes a class
        return
    # With `recurse`, functions have copies of globals, which may have changed as well.
    for one in {False, recurse}:
        mark = _Mark(cls, entry.token, one)
        entry.changes = mark.changes
        if entry.marks.get(one) != mark.value:
            entry.marks[one] = mark.value
            entry.version = next(_versions)


class _Mark:
    """What the owner of a class compares to detect a change of the class itself.

    The value contains what `_written_out` writes, but it is made faster: most of a class are
    functions and constants, which need no reducers.  All the rest is pickled.
    """

    def __init__(self, cls: type, token: str, recurse: bool) -> None:
        self.recurse, self.own = recurse, f"{cls.__qualname__}."
        self.blob = Blob(is_mark=True)
        self.rest: list[Any] = []
        self.changes = False  # whether a part, other than of functions, may be changed in place
        self.value: Any = object()  # equals no other value, so the class is always written again
        try:
            parts = [*map(self.part, (type(cls), *cls.__bases__))]
            skip = _MADE_BY_PYTHON | _data_of(cls)
            special = _special(cls, token)
            if special is not None:
                self.rest.append(special[1])
                self.changes = True
                skip |= special[2]
            if isinstance(cls, enum.EnumMeta):
                self.rest.append(special_classes.member_attributes(cls))
            for name, value in list(vars(cls).items()):
                if name not in skip:
                    once = name.startswith(_SET_ONCE)
                    parts += name, id(value) if once else self.part(value, True)
            self.rest += (one for ref in registered_classes(cls) if (one := ref()) is not None)
            data = write_blob(self.rest, recurse, self.blob)[0] if self.rest else b""
            # Code is compared as an object.  This keeps it alive, so new code has another id.
            self.value = pickle.dumps(parts, 5), data, self.blob.codes
        except Exception as error:  # an object's `__reduce__` can raise any error
            pass_on(error)
            self.changes = True

    def part(self, value: Any, is_attribute: bool = False) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is tuple or kind is frozenset:
            return value if ATOMS.issuperset(map(type, value)) else [*map(self.part, value)]
        if issubclass(type(value), type):
            by_value = value.__flags__ & HEAP_TYPE and (
                registry.known(value) or not goes_by_name(value)
            )
            return registry.token_of(value) if by_value else (value.__module__, value.__qualname__)
        if is_attribute and (inside := functions_in(value))[0] is not value:
            parts = [self.part(one, True) for one in inside]
            return [*parts, self.part(own_attributes(value) or None)]
        # With `recurse`, functions have copies of globals.
        plain = kind is FunctionType and not self.recurse
        plain = plain and module_of(value.__globals__) is not None
        if plain and (is_attribute or not (value.__closure__ or value.__dict__)):
            self.blob.codes.append(value.__code__)
            named = (value.__kwdefaults__ or {}).items()
            parts = [value.__defaults__, tuple(one for _, one in variables_of(value)), tuple(named)]
            # A function of another module is written by its name, if the name leads to it.
            by_name = value.__qualname__.startswith(self.own) or found_by_name(value)
            return [by_name, *map(self.part, (*parts, value.__dict__ or None))]
        if is_attribute and kind is MemberDescriptorType:
            return None
        self.rest.append(value)
        self.changes |= kind not in _FIXED and kind.__module__ not in ("dataclasses", "typing")
        return kind.__name__


_FIXED = frozenset(
    {MemberDescriptorType, GetSetDescriptorType, BuiltinFunctionType, ModuleType}
    | {type(object.__init__), type(NotImplemented), object}
)
"""Types of objects that never change."""


# The beginnings of names of attributes that are not changed in place, and slow to pickle.
_SET_ONCE = ("__annotations__", "__dataclass_", "__parameters__", "__pydantic_")


def load(token: str, version: int, blob: bytes, names: tuple[tuple[str, str], ...]) -> Any:
    entry = registry.lookup(token)
    # `loaded` is set last, so a class that another thread is filling is not returned.
    if entry is not None and (entry.own or entry.loaded >= version):
        cls = entry.ref()
        if cls is not None:
            return cls
    with registry.lock:
        cls = pickle.loads(zlib.decompress(blob))
        entry = registry.lookup(token)
        assert entry is not None
        if not entry.own and entry.loaded < version:
            definition = Definition(version, blob, frozenset(names), {})
            entry.definitions = {False: definition, True: definition}
            entry.loaded = version
        return cls


# -- writing a definition out -----------------------------------------------------------------


def _written_out(cls: type, recurse: bool, versions: dict[Any, int]) -> Any:
    entry = _entry_of(cls)
    # First, so that a change that another thread makes now is found later.
    _compare(cls, entry, recurse)
    versions[entry] = entry.version
    plain = _make, _shell(cls, entry.token), frozenset[str]()
    make, args, skip = _special(cls, entry.token) or plain
    state = _state(cls, skip | _data_of(cls))
    if entry.own:  # in a forked worker, a later definition may lack one of them
        entry.attributes = frozenset(state)
    return make, args, (entry.version, cls.__bases__, state), None, None, _fill


def _special(cls: type, token: str) -> special_classes.Shell | None:
    return (
        special_classes.enum_shell(cls, token)
        or special_classes.namedtuple_shell(cls, token)
        or special_classes.structure_shell(cls, token)
    )


def _shell(cls: type, token: str) -> tuple[Any, ...]:
    attributes = vars(cls)
    creation = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    # `__class__` and `__name__` cannot be set later: that would change the class itself.  Nor can a
    # `__dict__` of the class's own, as proxies have, be set later.
    for name in ("__slots__", "__orig_bases__", "__class__", "__name__", "__dict__"):
        if name in attributes and type(attributes[name]) is not GetSetDescriptorType:
            creation[name] = attributes[name]
    return token, type(cls), _maker(type(cls)), cls.__name__, cls.__bases__, creation


def _maker(metaclass: type) -> type:
    """Return the class whose ``__new__`` makes classes of a metaclass without running its code.

    The attributes of the class already contain the effects of this code.
    """
    return next(
        base
        for base in metaclass.__mro__
        if base is abc.ABCMeta or ("__new__" in vars(base) and not in_python(base, "__new__"))
    )


def _state(cls: Any, skip: frozenset[str]) -> dict[str, Any]:
    state = {}
    for name, value in list(vars(cls).items()):
        if name in skip or name in _MADE_BY_PYTHON:
            continue
        if issubclass(type(value), (MemberDescriptorType, GetSetDescriptorType)) and (
            value.__objclass__ is cls
        ):
            continue
        if name == "__pydantic_parent_namespace__" and value:
            value = special_classes.types_among(value)
        state[name] = value
    if not _ANNOTATE.isdisjoint(vars(cls)):
        state["__annotations__"] = annotations_of(cls)
    if isinstance(cls, abc.ABCMeta):
        found = (ref() for ref in registered_classes(cls))
        state["_abc_impl"] = [one for one in found if one is not None]
    if isinstance(cls, enum.EnumMeta):
        state["_member_map_"] = special_classes.member_attributes(cls)
    if special_classes.is_namedtuple(cls):
        state["_field_defaults"] = cls.__new__.__defaults__
    return state


CACHES = frozenset({"__slotnames__", "__annotations_cache__"})
"""Attributes that Python sets in a class when the class or an instance is first pickled."""

_ANNOTATE = frozenset({"__annotate_func__", "__annotate__"})  # from Python 3.14 on

_MADE_BY_PYTHON = CACHES | _ANNOTATE | {
    "__module__", "__qualname__", "__slots__", "__orig_bases__", "__class__", "__name__",
    "__dict__", "__weakref__",
    "_abc_impl", "__classcell__", "__classdictcell__", "_xpool_registered",
}  # fmt: skip


# -- data --------------------------------------------------------------------------------------


_PROTOCOL = type(Protocol)


_OF_PYTHON: Any = ("__", "_abc_", "_is_protocol", "_is_runtime_protocol")
"""The beginnings of names of attributes that Python itself gives to classes."""


def data_attributes(cls: type) -> list[str]:
    """Return the names of a class's attributes that are data, and not part of its definition."""
    kind = type(cls)
    known = kind in (type, abc.ABCMeta, _PROTOCOL) or origin_of(kind.__module__) != INSTALLED
    imported, skip = origin_of(cls.__module__) == IMPORTED, _OF_PYTHON
    if isinstance(cls, enum.EnumMeta) or issubclass(cls, tuple):
        known, skip = imported, "_"
    # Attributes that a metaclass of a package keeps in its classes are not looked at.
    test = is_assigned if imported else _is_data
    return [
        name
        for name, value in list(vars(cls).items())
        if (known and not name.startswith(skip) and test(cls, name, value))
        or (imported and is_patch(functions_in(value)[0], cls.__module__))
    ]


def _is_data(cls: type, name: str, value: Any) -> bool:
    """Whether an attribute is not in the definition of a class."""
    if issubclass(type(functions_in(value)[0]), FunctionType):  # a method, unless defined elsewhere
        # The definition contains its descriptors.
        return type(value) is FunctionType and not value.__qualname__.startswith(
            f"{cls.__qualname__}."
        )
    return not issubclass(type(value), type) and not is_descriptor(type(value))


def is_descriptor(kind: type) -> bool:
    """Whether class statements usually make attributes of this type; not a partial, which has a
    `__get__` since Python 3.14."""
    return kind is not functools.partial and hasattr(kind, "__get__")


def is_assigned(cls: type, name: str, value: Any) -> bool:
    """Whether an attribute is not the method or class that the class statement makes under this
    name.  A worker runs this statement when it imports the module.
    """
    kind = type(value)
    if kind in (functools.cached_property, functools.singledispatchmethod):
        value = value.func
    for one in functions_in(value):
        if issubclass(type(one), (FunctionType, CachedFunction, type)):
            if not _is_of_statement(cls, name, one):
                return True
        elif one is value or (one is not None and not issubclass(type(value), property)):
            mine = kind is functools.partialmethod or origin_of(kind.__module__) != INSTALLED
            plain = kind is MethodType or not is_descriptor(kind)
            # An enumeration has its members as attributes, too.
            return (mine and kind is not cls) or plain
    return False


def _is_of_statement(cls: type, name: str, value: Any) -> bool:
    """Whether the ``class`` statement itself defines this function or class, under this name."""
    path, inside = getattr(value, "__qualname__", ""), f"{cls.__qualname__}."
    if is_patch(value, cls.__module__):
        return False
    if (value.__module__, path) == (cls.__module__, inside + name):
        return True
    if is_set_as_method(value):
        return False
    # Others without a name, such as lambdas and named tuples, are the worker's own.
    if issubclass(type(value), type) or path.startswith(inside):
        return not (found_by_name(value) or origin_of(value.__module__) == SENT)
    return False


def methods(cls: type) -> Iterator[tuple[str, Any, FunctionType]]:
    """Yield the path, the attribute and the function of each method, also of inner classes."""
    for path, owner in with_nested(cls.__qualname__, cls):
        for name, value in list(vars(owner).items()):
            for one in functions_in(value):
                if type(one) is FunctionType:
                    yield f"{path}.{name}", value, one


def plain_methods(cls: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield path and function of the methods from the class statement, not of properties; also of
    inner classes.
    """
    for path, value, one in methods(cls):
        if not issubclass(type(value), property) and not is_patch(one, cls.__module__):
            yield path, one


def registries(cls: type) -> list[str]:
    """Return the names of the functions that the methods of `functools.singledispatchmethod` call
    for each type, as attributes of these methods."""
    own = list(vars(cls).items())
    return [f"{name}.registry" for name, one in own if type(one) is functools.singledispatchmethod]


def own_methods(cls: type) -> dict[str, Any]:
    """Return values, by path, that differ when methods from the class statement have changed."""
    return {
        path: (value, one.__code__)
        for path, value, one in methods(cls)
        if one.__qualname__ == path and not is_patch(one, cls.__module__)
    }


def _data_of(cls: type) -> frozenset[str]:
    """Return the attributes that are sent beside the definition of a class."""
    # Not `found_by_name`, which also finds a class in a base of the class that its name says.
    key = canonical(cls.__module__), cls.__qualname__
    named = origin_of(cls.__module__) == SENT and value_of(key) is cls
    return frozenset(data_attributes(cls)) if named else frozenset()


def is_made_again(cls: type) -> bool:
    """Whether a function of the module has made a class, with a ``global`` statement."""
    return any(
        (one.__module__, one.__qualname__) == (cls.__module__, path)  # not of a `NamedTuple`
        and one.__code__.co_filename[:1] != "<"
        and is_made_in_function(one)
        for path, _, one in methods(cls)
    )


def data_of_function(function: Any) -> list[str]:
    """Return the names of a function's attributes that are data."""
    found = []
    for name, value in list(vars(function).items()):
        kind = type(value)
        code = kind in (FunctionType, BuiltinFunctionType) or issubclass(type(value), type)
        # Functions that a decorator makes share variables with the function itself.
        known = not code or found_by_name(value) or origin_of(value.__module__) == SENT
        if known and not name.startswith("__"):
            found.append(name)
    return found


def with_nested(path: str, cls: type) -> Iterator[tuple[str, type]]:
    """Yield a class and the classes that are defined in it, with their paths."""
    yield path, cls
    for name, one in list(vars(cls).items()):
        inner = cls.__module__, f"{path}.{name}"
        if issubclass(type(one), type) and (one.__module__, one.__qualname__) == inner:
            yield from with_nested(inner[1], one)


def may_change(cls: type) -> bool:
    """Whether a class has parts, other than those of functions, that may be changed in place."""
    definition = _entry_of(cls).definitions.get(False)
    inside = () if definition is None else definition.classes
    owners = (_entry_of(owner) for _, owner in with_nested(cls.__qualname__, cls))
    return any(entry.changes for entry in (*owners, *inside))


# -- loading a definition -------------------------------------------------------------------


def _inherited(module: str, path: str, bases: tuple[type, ...]) -> type | None:
    """Return the class that a fork of the program has inherited, because objects are of this class.

    A class may have taken the name of its base class: ``class Settings(Settings)``.
    """
    found = found_here(module, path)
    above = {id(one) for base in bases for one in base.__mro__}
    known = [
        one
        for one in (found.__mro__ if isinstance(found, type) else ())
        if (one.__module__, one.__qualname__) == (module, path)
        and registry.known(one) is None
        and id(one) not in above
    ]
    if len(known) > 1:
        known = [one for one in known if one.__bases__ == bases]
    return known[0] if known else None


@uninterrupted  # a task that was stopped would leave bases muted
def _make(
    token: str,
    metaclass: type,
    maker: Any,
    name: str,
    bases: tuple[type, ...],
    creation: dict[str, Any],
) -> Any:
    def build() -> Any:
        if main.is_forked:
            inherited = _inherited(creation["__module__"], creation["__qualname__"], bases)
            if inherited is not None:
                return inherited
        try:
            with _muted(bases, known_only=True):
                return maker.__new__(metaclass, name, bases, creation)
        except TypeError:  # `__init_subclass__` of an importable base requires keywords
            with _muted(bases, known_only=False):
                try:
                    return maker.__new__(metaclass, name, bases, creation)
                except TypeError as error:  # C code of a metaclass may need more, as `msgspec`'s
                    place = f"{creation['__module__']}.{creation['__qualname__']}"
                    text = f"the class {place} cannot be made in another process: its metaclass"
                    text += f" raises {error!r}. Define the class in a module of its own: workers"
                    raise TypeError(f"{text} import it, and get no definition.") from None

    return registry.shell(token, build)


@contextlib.contextmanager
def _muted(bases: tuple[type, ...], known_only: bool) -> Iterator[None]:
    """Keep ``__init_subclass__`` of by-value bases (unless ``known_only``, of all) from running.

    It ran when the class was defined, and its effects are in the state of the class.  If it ran
    again, it would get an empty class, without the keywords of the class statement.
    """
    saved = {}
    for base in bases:
        for one in base.__mro__:
            hook = vars(one).get("__init_subclass__")
            if hook is None or one.__module__ in ("builtins", "typing"):
                continue
            if not known_only or registry.known(one):
                saved[one] = hook
    for one in saved:
        type.__setattr__(one, "__init_subclass__", classmethod(lambda cls, **options: None))
    try:
        yield
    finally:
        for one, hook in saved.items():
            type.__setattr__(one, "__init_subclass__", hook)


def _fill(cls: Any, versioned: tuple[int, tuple[type, ...], dict[str, Any]]) -> None:
    version, bases, state = versioned
    entry = registry.known(cls)
    if entry is None or entry.own or entry.version >= version:
        return
    if entry.version >= 0:
        registry.forget_received_definitions()  # these may contain the earlier version
    attributes = frozenset(state)
    if cls.__bases__ != bases:
        cls.__bases__ = bases
    # Registered subclasses and the data of members are not set as attributes.
    subclasses = state.pop("_abc_impl", ())
    for key, extra in state.pop("_member_map_", {}).items():
        vars(cls._member_map_[key]).update(extra)
    if special_classes.is_namedtuple(cls):
        cls.__new__.__defaults__ = state.pop("_field_defaults")
    for name in entry.attributes - attributes:  # the owner has deleted them
        if name in vars(cls):
            type.__delattr__(cls, name)
    # Not `setattr`, which a metaclass may override.
    is_structure = special_classes.is_structure(cls)
    assign = special_classes.set_in_structure if is_structure else type.__setattr__
    for name, value in state.items():
        assign(cls, name, value)
    if "__pydantic_generic_metadata__" in state:
        special_classes.enter_generic(cls, state["__pydantic_generic_metadata__"])
    for one in subclasses:
        abc.ABCMeta.register(cls, one)
    if subclasses:
        # Keep them alive: `register` has only weak references, and would forget a collected class.
        type.__setattr__(cls, "_xpool_registered", subclasses)
    entry.attributes = attributes
    entry.version = version


reducers.FOR_SUBCLASSES[type] = reducers.REDUCERS[type] = _reduce_class
