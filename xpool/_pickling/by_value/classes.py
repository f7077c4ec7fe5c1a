"""Pickles classes by value, and keeps their identity.

For a by-value class, a message contains a token and a *blob*: the definition of the class, pickled
once and compressed.  The receiver loads the blob only if it does not know the token.  So an
instance of a local class costs little more than an instance of an importable class.  A process
sends a received class with the same blob that it has received.

In the blob, the class and every by-value class to which it refers are written as an empty class and
a state (see `reducers`).  So classes may refer to themselves and to each other.

A definition is a snapshot.  The process that defined the class makes a new one if an attribute of
the class was set or deleted, if a container, an array or an object of the program in an attribute
was changed in place, or if a class was registered with it (`abc`).
"""

from __future__ import annotations

import abc
import contextlib
import enum
import pickle
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from xpool._pickling import reducers
from xpool._pickling.by_value import main, registry, special_classes
from xpool._pickling.by_value.functions import annotations_of
from xpool._pickling.by_value.names import name_for
from xpool._pickling.pickler import write_blob
from xpool._pickling.reducers import Context
from xpool._python.hidden import registered_classes
from xpool._python.interrupt import by_handler, uninterrupted

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it, or could have
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: C code made it


def reduce_class(pickler: Context, cls: type) -> Any:
    """Pickle a class by name if the receiver finds it by name, else by value."""
    name = name_for(pickler, cls)
    if name is not None:
        return name
    flags = cls.__flags__
    if not flags & _HEAP_TYPE or flags & _IMMUTABLE_TYPE:
        return NotImplemented
    if pickler.blob:
        return _written_out(cls)
    entry = _up_to_date(cls, pickler.recurse)
    pickler.names |= entry.names
    blob = entry.blobs[pickler.recurse]
    return _load, (entry.token, entry.version, blob, tuple(sorted(entry.names)))


def _up_to_date(cls: type, recurse: bool) -> registry.ClassEntry:
    with registry.lock:
        token = registry.token_of(cls)
        entry = registry.lookup(token)
        assert entry is not None
        # A received class is sent with the received blob: only its owner changes the definition.
        if entry.own:
            mark = _mark(cls)
            if entry.mark != mark:
                entry.mark = mark
                entry.version += 1
                entry.blobs.clear()
        if recurse not in entry.blobs:
            blob, names = write_blob(cls, recurse)
            entry.blobs[recurse] = zlib.compress(blob, 1)
            entry.names = frozenset(names)
        return entry


def _mark(cls: type) -> Any:
    """Return a value that changes if the definition changes."""
    return [
        (name, id(value), _content(name, value))
        for name, value in list(vars(cls).items())
        if name not in _CACHES
    ], registered_classes(cls)


def _content(name: str, value: Any) -> Any:
    """Return a value that changes if an attribute is changed in place, or None if it cannot be."""
    kind = type(value)
    mutable = kind in _MUTABLE or kind.__module__ in _OF_PROGRAM
    # Special attributes are set only once.  Objects with `__get__` are functions and the like.
    if not mutable or isinstance(value, type) or hasattr(kind, "__get__") or name[:2] == "__":
        return None
    try:
        # The pickle is only compared, so it may contain names of the program.
        return pickle.dumps(value, 5)
    except Exception as error:  # an object's `__reduce__` can raise any error
        if by_handler(error):
            raise
    parts = value if kind in _MUTABLE else vars(value) if hasattr(value, "__dict__") else ()
    inside = parts.items() if isinstance(parts, dict) else enumerate(parts)
    return [(id(one), id(other)) for one, other in list(inside)]


_MUTABLE = frozenset({dict, list, set, bytearray, OrderedDict, defaultdict, deque, Counter})
_OF_PROGRAM = main.MAIN_NAMES | {"numpy"}  # and arrays


def _load(token: str, version: int, blob: bytes, names: tuple[str, ...]) -> Any:
    entry = registry.lookup(token)
    if entry is not None and (entry.own or entry.version >= version):
        cls = entry.ref()
        # A class without blobs was a part of another definition, or another thread is filling it.
        if cls is not None and (entry.own or entry.blobs):
            return cls
    with registry.lock:
        cls = pickle.loads(zlib.decompress(blob))
        entry = registry.lookup(token)
        assert entry is not None
        if not entry.own:
            entry.version = version
            entry.names = frozenset(names)
            # Set last, because `_load` returns a class with blobs without taking the lock.
            entry.blobs = {False: blob, True: blob}
        return cls


# -- writing a definition out -----------------------------------------------------------------


def _written_out(cls: type) -> Any:
    with registry.lock:
        token = registry.token_of(cls)
        entry = registry.lookup(token)
        assert entry is not None
        version = entry.version
    for kind in (special_classes.enum_shell, special_classes.namedtuple_shell):
        shell = kind(cls, token)
        if shell is not None:
            make, args, skip = shell
            break
    else:
        make, args, skip = _make, _shell(cls, token), frozenset()
    state = (version, _state(cls, skip), skip)
    return make, args, state, None, None, _fill


def _shell(cls: type, token: str) -> tuple[Any, ...]:
    attributes = vars(cls)
    creation = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    for name in ("__slots__", "__orig_bases__"):
        if name in attributes:
            creation[name] = attributes[name]
    return token, type(cls), _maker(type(cls)), cls.__name__, cls.__bases__, creation


def _maker(metaclass: type) -> type:
    """Return the class whose ``__new__`` makes classes of a metaclass without running its code.

    The attributes of the class already contain the effects of this code.
    """
    for base in metaclass.__mro__:
        made_by = vars(base).get("__new__")
        if base is abc.ABCMeta or (made_by is not None and not _is_python(made_by)):
            return base
    return type


def _is_python(function: Any) -> bool:
    return isinstance(getattr(function, "__func__", function), FunctionType)


def _state(cls: type, skip: frozenset[str]) -> dict[str, Any]:
    state = {}
    for name, value in list(vars(cls).items()):
        if name in skip or name in _MADE_BY_PYTHON:
            continue
        if isinstance(value, (MemberDescriptorType, GetSetDescriptorType)) and (
            value.__objclass__ is cls
        ):
            continue
        if name == "__pydantic_parent_namespace__" and value:
            value = special_classes.types_among(value)
        state[name] = value
    if "__annotate_func__" in state or "__annotate__" in state:
        state.pop("__annotate_func__", None)
        state.pop("__annotate__", None)
        state["__annotations__"] = annotations_of(cls)
    if isinstance(cls, abc.ABCMeta):
        found = (ref() for ref in registered_classes(cls))
        state["_abc_impl"] = [one for one in found if one is not None]
    if isinstance(cls, enum.EnumMeta):
        state["_member_map_"] = special_classes.member_attributes(cls)
    return state


# Attributes that Python sets in a class when the class or an instance is first pickled.
_CACHES = frozenset({"__slotnames__", "__annotations_cache__"})

_MADE_BY_PYTHON = _CACHES | {
    "__module__", "__qualname__", "__slots__", "__orig_bases__", "__dict__", "__weakref__",
    "_abc_impl", "__classcell__", "__classdictcell__", "_xpool_registered",
}  # fmt: skip


# -- loading a definition -------------------------------------------------------------------


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
        try:
            with _muted(bases, known_only=True):
                return maker.__new__(metaclass, name, bases, creation)
        except TypeError:  # `__init_subclass__` of an importable base requires keywords
            with _muted(bases, known_only=False):
                return maker.__new__(metaclass, name, bases, creation)

    return registry.shell(token, build)


@contextlib.contextmanager
def _muted(bases: tuple[type, ...], known_only: bool) -> Iterator[None]:
    """Keep ``__init_subclass__`` of by-value bases (unless ``known_only``, of all) from running.

    It ran when the class was defined, and its effects are in the state of the class.  Here it would
    get an empty class, without the keywords of the class statement.
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


def _fill(cls: Any, versioned: tuple[int, dict[str, Any], frozenset[str]]) -> None:
    version, state, skipped = versioned
    entry = registry.known(cls)
    if entry is None or entry.own or entry.version >= version:
        return
    # Registered subclasses and the data of members are not set as attributes.
    subclasses = state.pop("_abc_impl", ())
    for key, extra in state.pop("_member_map_", {}).items():
        vars(cls._member_map_[key]).update(extra)
    if entry.version >= 0:
        # This is a later version of a known class, whose owner has deleted these attributes.
        gone = set(vars(cls)) - state.keys() - skipped - _MADE_BY_PYTHON
        for name in gone:
            if isinstance(vars(cls)[name], FunctionType):
                type.__delattr__(cls, name)
    for name, value in state.items():
        # Not `setattr`, which a metaclass may override.
        type.__setattr__(cls, name, value)
    for one in subclasses:
        abc.ABCMeta.register(cls, one)
    if subclasses:
        # Keep them alive: `register` has only weak references, and would forget a collected class.
        type.__setattr__(cls, "_xpool_registered", subclasses)
    entry.version = version


reducers.FOR_SUBCLASSES[type] = reducers.REDUCERS[type] = reduce_class
