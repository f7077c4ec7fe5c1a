"""Pickles objects of the program's classes where `pickle` would call methods that change them.

An argument or result is pickled as `pickle` does it, because a pool of `multiprocessing` does so,
too.  An object in a global or in a definition would be the program's own in a fork, so here it
arrives as it is: the receiver calls no ``__new__`` or ``__init__`` of its class, and no ``append``.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType
from typing import Any

from xpool._pickling import reducers
from xpool._pickling.by_value import registry
from xpool._pickling.by_value.by_token import make_object, reduce_object
from xpool._pickling.by_value.names import found_by_name, found_here, name_for, name_in_package
from xpool._pickling.by_value.origin import (
    FLAGS,
    IMPORTED,
    INSTALLED,
    SENT,
    has_no_state,
    origin_of,
)
from xpool._pickling.by_value.reads import in_python, required_of, wraps_own
from xpool._pickling.reducers import NEW, Context, Instead, is_message, of_module


def _reduce_own(pickler: Context, obj: Any) -> Any:
    """Pickle an object of a class with a ``__reduce__``, ``__new__`` or ``__getattr__`` of its own.

    If its ``__reduce__`` returns the name of a global of a module that a worker cannot import, the
    object is pickled by a token, with its attributes.  If the object is in a global, the receiver
    makes it without a call of its ``__new__``, which may count the objects.
    """
    kind = type(obj)
    if kind.__module__ == reducers.PARAMETRIZE:
        return NEW, (kind,), vars(obj)
    origin = origin_of(kind.__module__)
    in_message = is_message(pickler)
    if not in_message and origin != INSTALLED and has_no_state(obj) and not _has_methods(kind):
        made = reduce_object(pickler, obj)
        if made is not NotImplemented:
            return made
    if not _has_methods(kind) and (name := name_in_package(obj)) is not None:
        return of_module, (kind.__module__, name, kind)
    # `pickle` would ask an object that is still empty for its `__setstate__`, and call a `__new__`
    # without its arguments.
    answers = hasattr(kind, "__getattr__") and not hasattr(kind, "__setstate__")
    incomplete = type(kind.__new__) is FunctionType and len(required_of(kind.__new__)) > 1
    by_pickle = origin == IMPORTED or type(kind.__reduce__) is not FunctionType
    as_usual = origin == INSTALLED or (by_pickle and in_message)
    base = None if as_usual or in_message else _builtin_base(kind)
    if base is not None:
        return _reduce_content(obj, base)
    if origin == INSTALLED and _goes_by_function(obj):
        return _by_place(pickler, obj, kind, _state_of(obj), set_state)
    if pickler.blob and origin == INSTALLED and _goes_by_class(obj):
        return empty_object, (kind,), _state_of(obj), None, None, set_state
    if as_usual and not (answers or incomplete):
        return NotImplemented
    if origin == INSTALLED and not found_by_name(kind):  # a class that each mock makes for itself
        return NotImplemented
    reduced = _reduced(obj) if answers else obj.__reduce_ex__(5)
    if type(reduced) is not str:
        if not in_message and reduced[0] is kind and _is_made_in_c(kind, *reduced[1]):
            made = empty_object, (kind, *reduced[1])
            if hasattr(kind, "__setstate__"):  # of `functools.partial`
                return *made, *reduced[2:]
            return *made, _state_of(obj), None, None, set_state
        if answers and len(reduced) < 6:
            reduced = (*reduced, *(None,) * (5 - len(reduced)), set_state)
        # `__new__` may make what a state leaves out, or what these methods use during the load.
        own = any(type(getattr(kind, name, None)) is FunctionType for name in _USES_NEW)
        empty = not (own or as_usual or in_message)
        # `__getnewargs__` returns arguments of a `__new__` that need not be called.
        unused = empty and type(kind.__new__) is FunctionType and _base_in_c(kind) is object
        plain = reduced[0] is NEW and (unused or len(reduced[1]) == 1)
        if plain and (incomplete or empty):
            return empty_object, reduced[1][:1], *reduced[2:]
        if len(reduced) == 2 and not in_message and origin != INSTALLED:
            base, attributes = _left_out(obj)
            if base is not None and reduced[0] is kind:
                reduced = made_as, (base, kind, reduced[1])
            if any(attributes):
                return *reduced, attributes, None, None, set_state
        return reduced
    if origin != SENT or not in_python(kind, "__reduce__"):
        return NotImplemented
    made = make_object, (registry.token_of(obj), type(obj))
    if pickler.home:  # the program keeps its own attributes
        return made
    return *made, _state_of(obj), None, None, set_state


def _left_out(obj: Any) -> tuple[Any, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the attributes of an object that the ``__reduce__`` of a library's class leaves out.

    They are of the program's classes, if objects of the library's class have no ``__dict__``.  Also
    return the library's class, if the program's have an ``__init__`` or ``__new__``; else None.
    """
    kind = type(obj)
    base = next(one for one in kind.__mro__ if origin_of(one.__module__) == INSTALLED)
    own = [vars(one) for one in kind.__mro__[: kind.__mro__.index(base)]]
    if base.__dictoffset__ or any(name in names for names in own for name in _OF_PICKLING):
        return None, ({}, {})
    makes = any(name in names for names in own for name in ("__new__", "__init__"))
    attributes, slots = _state_of(obj)
    given = {*slots_of(base)}
    slots = {name: one for name, one in slots.items() if name not in given}
    return base if makes else None, (attributes, slots)


def made_as(base: Any, kind: Any, args: tuple[Any, ...]) -> Any:
    """Make an object as its base class would, without the code of the program's class."""
    made = base.__new__(kind, *args)
    if base.__init__ is not object.__init__:
        base.__init__(made, *args)
    return made


def _goes_by_function(obj: Any) -> bool:
    """Whether a wrapper of a function of the program is reduced to the name of this function.

    A worker gets the wrapper under this name, and needs its attributes.
    """
    kind = type(obj)
    if not (wraps_own(obj) and _has_methods(kind) and _base_in_c(kind) is object):
        return False
    reduced = obj.__reduce_ex__(5)
    texts = (reduced,) if type(reduced) is str else reduced[1]
    module, path = obj.__module__, obj.__qualname__
    names = path, f"{module}.{path}", f"{module}:{path}"
    by_value = any(type(one) is FunctionType for one in texts)
    return not by_value and any(type(one) is str and one in names for one in texts)


def _goes_by_class(obj: Any) -> bool:
    """Whether a descriptor is reduced to a class and its name there.

    It is a part of the definition of this class, which has no attributes yet.
    """
    kind = type(obj)
    if not (in_python(kind, "__reduce__") and hasattr(kind, "__set_name__")):
        return False
    reduced = obj.__reduce_ex__(5)
    owner, name = (*reduced[1], None, None)[:2] if type(reduced) is tuple else (None, None)
    return issubclass(type(owner), type) and vars(owner).get(name) is obj


def _by_place(pickler: Context, obj: Any, kind: Any, state: Any, fill: Any) -> Any:
    """Pickle a wrapper by its name or, in the global of this name, by its state."""
    name = name_for(pickler, obj)
    if name is None:
        return empty_object, (kind,), state, None, None, fill
    module, path = obj.__module__, obj.__qualname__
    if pickler.group is None or "." in path or found_here(module, path) is not obj:
        return name
    return made_by_import, (module, path, kind), state, None, None, fill


def made_by_import(module: str, name: str, kind: type) -> Any:
    """Return a global of a module; a new, empty object if it is not of this class."""
    found = getattr(import_module(module), name, None)
    return found if type(found) is kind else empty_object(kind)


def slots_of(kind: type) -> list[str]:
    """Return the names of the attributes for which a class and its bases have ``__slots__``."""
    made = (vars(base) for base in kind.__mro__ if "__slots__" in vars(base))
    members = (one for names in made for one in names.items())
    return [name for name, member in members if type(member) is MemberDescriptorType]


def _reduced(obj: Any) -> Any:
    """Return what ``__reduce_ex__`` returns.

    `object.__reduce_ex__` is not called if the class may lack `__getstate__`: Python 3.10 looks it
    up in the object, and so calls the object's ``__getattr__``.
    """
    kind: Any = type(obj)
    own = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if not own or hasattr(kind, "__getstate__") or hasattr(kind, "__getnewargs_ex__"):
        return obj.__reduce_ex__(5)
    args = kind.__getnewargs__(obj) if hasattr(kind, "__getnewargs__") else ()
    items = iter(obj) if issubclass(kind, list) else None
    pairs = iter(obj.items()) if issubclass(kind, dict) else None
    return NEW, (kind, *args), _state_of(obj), items, pairs


def _state_of(obj: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an object's attributes, and its slots."""
    attributes, slots = {}, {}
    for name in "__dict__", *slots_of(type(obj)):
        with contextlib.suppress(AttributeError):
            value = object.__getattribute__(obj, name)
            if name == "__dict__":
                attributes = value
            else:
                slots[name] = value
    return attributes, slots


def set_state(obj: Any, state: Any) -> None:
    """Set the attributes and slots of an object, as `pickle` does where no ``__setstate__`` is."""
    attributes, slots = state if type(state) is tuple else (state, None)
    if attributes:
        vars(obj).update(attributes)
    for name, value in (slots or {}).items():
        object.__setattr__(obj, name, value)


_USES_NEW = ("__getstate__", "__setstate__")


def empty_object(kind: Any, *args: Any) -> Any:
    """Make an object by the ``__new__`` of the first base in C."""
    return _base_in_c(kind).__new__(kind, *args)


def _base_in_c(kind: Any) -> Any:
    made = (base for base in kind.__mro__ if type(vars(base).get("__new__")) is BuiltinFunctionType)
    return next(made)


def _is_made_in_c(kind: Any, *args: Any) -> bool:
    """Whether the ``__new__`` of a base in C makes what the methods of this base have reduced.

    `pickle` would call the class, which may take other arguments (`datetime.date`, `Decimal`).
    Without arguments, the base need not be initialised (`types.SimpleNamespace`).
    """
    base = _base_in_c(kind)
    if _has_methods(kind) or base is object:
        return False
    return base.__init__ is object.__init__ or not args


# -- objects with a hash of their own ---------------------------------------------------------


def _reduce_hashed(pickler: Context, obj: Any) -> Any:
    """Make the object with its plain attributes, before the sets and dicts that it refers to.

    One of these may hold the object itself.  So it is hashed before the rest of its state is set.
    """
    kind, classes = type(obj), pickler.group.hashed  # type: ignore[union-attr]
    if id(kind) not in classes:
        classes[id(kind)] = None
        if _has_hash(kind) and _is_simple(kind):
            classes[id(kind)] = bool(slots_of(kind)) or not kind.__dictoffset__
    has_slots = classes[id(kind)]
    if has_slots is None:
        return NotImplemented
    state = _state_of(obj) if has_slots else (object.__getattribute__(obj, "__dict__"), {})
    if all(type(one) in _PLAIN for part in state for one in part.values()):
        return NotImplemented
    plain = tuple({name: one for name, one in part.items() if _is_plain(one)} for part in state)
    if sum(map(len, plain)) in (0, sum(map(len, state))):
        return NotImplemented
    return _with_attributes, (kind, *plain), state, None, None, _set_whole_state


def _with_attributes(kind: Any, attributes: dict[str, Any], slots: dict[str, Any]) -> Any:
    made = empty_object(kind)
    set_state(made, (attributes, slots))
    return made


def _set_whole_state(obj: Any, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    if state[0]:
        vars(obj).clear()  # so that the attributes keep their order
    set_state(obj, state)


def _has_hash(kind: Any) -> bool:
    """Whether a class has Python code for hashes.  A class of a mock would make another mock."""
    for one in kind.__mro__:
        if "__hash__" in one.__dict__:
            return type(one.__dict__["__hash__"]) is FunctionType
    return False


def _is_simple(kind: Any) -> bool:
    """Whether `pickle` calls no method of a class, and its objects have only attributes."""
    if _has_methods(kind) or hasattr(kind, "__getnewargs__") or kind.__itemsize__:
        return False
    return kind.__new__ is object.__new__


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Whether a value cannot refer to the object that has it as an attribute."""
    kind = type(value)
    if kind in _PLAIN or issubclass(kind, Enum) or str(kind.__module__).split(".")[0] in _OF_VALUES:
        return True
    if depth and (kind in _FEW or issubclass(kind, (tuple, frozenset))):
        values = [*value, *value.values()] if kind is dict else value
        return len(values) <= _MOST and all(_is_plain(one, depth - 1) for one in values)
    if depth and _has_hash(kind) and _is_simple(kind):
        parts = _state_of(value)
        return all(_is_plain(one, depth - 1) for part in parts for one in part.values())
    return False


_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})
_FEW = frozenset({list, dict, set})
_MOST = 20  # values in a container that is looked at
_OF_VALUES = frozenset({"datetime", "decimal", "fractions", "pathlib", "uuid"})


# -- objects of classes that are derived from a builtin type ----------------------------------


def _builtin_base(kind: type) -> Any:
    """Return the type in `_CONTENT` from which a class is derived; None: it has none, or its own
    code for pickling."""
    made = False
    for one in kind.__mro__:
        if one in _CONTENT:
            return one
        names = vars(one)
        # `__getnewargs__` returns the arguments of a `__new__` that a derived class may replace.
        if any(name in names for name in _OF_PICKLING) or ("__getnewargs__" in names and not made):
            return None
        made = made or "__new__" in names
    return None


_OF_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs_ex__")


def _has_methods(kind: type) -> bool:
    """Whether a class has methods for pickling."""
    return any(in_python(kind, name) for name in _OF_PICKLING)


def _reduce_content(obj: Any, base: Any) -> Any:
    """Pickle an object with its content, which the receiver sets without methods of the class.

    `pickle` would call ``__init__`` or ``__new__`` with the content as an argument, or ``append``
    or ``__setitem__`` before the attributes are set.
    """
    content, fill = _CONTENT[base]
    state, args = _state_of(obj), content(obj)
    if fill is None:
        return empty_object, (type(obj), *args), state, None, None, set_state
    return empty_object, (type(obj),), (state, base, args), None, None, set_content


def set_content(obj: Any, state: tuple[Any, Any, Any]) -> None:
    attributes, base, args = state
    set_state(obj, attributes)
    _CONTENT[base][1](obj, *args)


def _fill_ordered(obj: Any, pairs: list[tuple[Any, Any]]) -> None:
    for key, value in pairs:
        OrderedDict.__setitem__(obj, key, value)


def _fill_default(obj: Any, factory: Any, items: dict[Any, Any]) -> None:
    defaultdict.__init__(obj, factory)
    dict.update(obj, items)


_VALUES: Any = int, float, complex, str, bytes, tuple

# By type: the function that returns what `__new__` gets, or what the second function gets after the
# object; this sets the content of an object that is empty.
_CONTENT: dict[Any, tuple[Any, Any]] = {
    **{one: (one.__getnewargs__, None) for one in _VALUES},
    list: (lambda obj: ([*list.__iter__(obj)],), list.extend),
    set: (lambda obj: (set(obj),), set.update),
    bytearray: (lambda obj: (bytes(obj),), bytearray.extend),
    deque: (lambda obj: ([*deque.__iter__(obj)], obj.maxlen), deque.__init__),
    **dict.fromkeys((dict, Counter), (lambda obj: (dict(dict.items(obj)),), dict.update)),
    OrderedDict: (lambda obj: ([*OrderedDict.items(obj)],), _fill_ordered),
    defaultdict: (lambda obj: (obj.default_factory, dict(dict.items(obj))), _fill_default),
}


# -- absl's flags -----------------------------------------------------------------------------


def _reduce_flags(pickler: Context, flags: Any) -> Any:
    """Pickle flags with their values; those of the program's modules with their definitions, too.

    A receiver may not make the program's calls of ``DEFINE_integer``, or make them later.
    """
    is_own = flags is sys.modules["absl.flags"].FLAGS
    made = (of_module, ("absl.flags", "FLAGS")) if is_own else (type(flags), ())
    if is_own and pickler.home:  # the program keeps its own values
        return made
    of_program = {
        id(flag)
        for name, defined in flags.flags_by_module_dict().items()
        if name == sys.argv[0] or origin_of(name) != INSTALLED or not is_own
        for flag in defined
    }
    found = {}
    for name, flag in flags._flags().items():
        module = flags.find_module_defining_flag(name) if id(flag) in of_program else None
        value = flag.value, flag.default, flag.using_default_value, flag.present
        found[name] = module, *((type(flag), vars(flag)) if module else (None, value))
    return *made, (flags.is_parsed(), found), None, None, set_flags


def set_flags(flags: Any, state: tuple[bool, dict[str, tuple[Any, ...]]]) -> None:
    vars(flags)["__flags_parsed"], found = state
    known, made = flags._flags(), dict[int, Any]()
    for name, (module, kind, content) in found.items():
        flag = known.get(name, made.get(id(content)))
        if module is None:
            if flag is not None:
                flag.value, flag.default, flag.using_default_value, flag.present = content
            continue
        if flag is None:
            flag = made[id(content)] = object.__new__(kind)
            # As from another import of the module: `FlagValues` lets a later one define it again.
            flags.register_flag_by_module(module, flag)
            flags.register_flag_by_module_id(0, flag)
        vars(flag).update(content)
        known[name] = flag


def _find_flags() -> None:
    reducers.register(sys.modules[FLAGS].FlagValues)(_reduce_flags)


# -- wrapt's wrappers of functions ------------------------------------------------------------


def _find_wrapt() -> None:
    wrapt: Any = sys.modules.get("wrapt")
    if wrapt is None:  # another `_wrappers`
        return
    reducers.FOR_SUBCLASSES[wrapt.FunctionWrapper] = _reduce_wrapt
    reducers.FOR_SUBCLASSES[wrapt.BoundFunctionWrapper] = _reduce_bound


def _reduce_wrapt(pickler: Context, obj: Any) -> Any:
    """Pickle a wrapper with its functions.  An object of wrapt refuses to be pickled."""
    kind: Any = type(obj)
    base = sys.modules["wrapt"].FunctionWrapper
    if kind.__reduce__ is not base.__reduce__ or kind.__reduce_ex__ is not base.__reduce_ex__:
        return _reduce_own(pickler, obj)
    # `__dict__` is that of the function.
    found = [one for one in gc.get_referents(obj) if type(one) is dict]
    attributes = {
        name: value for one in found for name, value in one.items() if name.startswith("_self_")
    }
    state = obj.__wrapped__, obj._self_wrapper, obj._self_enabled, attributes
    # The class names a module in C that is not imported by this name.
    made = Instead(of_module, ("wrapt", "FunctionWrapper")) if kind is base else kind
    return _by_place(pickler, obj, made, state, set_wrapt)


def _reduce_bound(pickler: Context, obj: Any) -> Any:
    """Pickle a method by its object and name."""
    owner, name = obj._self_instance, obj.__name__
    if owner is None:  # the method of a class
        owner = getattr(obj, "_self_owner", None)
    found: Any = getattr(owner, name, None)
    if type(found) is type(obj) and found._self_parent is obj._self_parent:
        return getattr, (owner, name)
    return _reduce_own(pickler, obj)


def set_wrapt(obj: Any, state: tuple[Any, ...]) -> None:
    *parts, attributes = state
    sys.modules["wrapt"].FunctionWrapper.__init__(obj, *parts)
    for name, value in attributes.items():
        setattr(obj, name, value)


reducers.LAZY.update(dict.fromkeys(("_wrappers", "wrapt.wrappers"), _find_wrapt))
reducers.LAZY[FLAGS] = _find_flags
reducers.own, reducers.hashed = _reduce_own, _reduce_hashed
