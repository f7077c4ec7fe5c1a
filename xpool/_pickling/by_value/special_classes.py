"""Pickles classes that cannot be made empty: enumerations, named tuples and the like.

For each kind a function returns ``(make, args, skip)``: the function that makes the class, its
arguments, and the attributes that it sets, which the state must not set again.
"""

from __future__ import annotations

import collections
import enum
import sys
from types import FunctionType
from typing import Any

from xpool._pickling.by_value.registry import shell
from xpool._pickling.reducers import FOR_SUBCLASSES, Context

Shell = tuple[Any, tuple[Any, ...], frozenset[str]]


# -- structures and unions of ctypes ----------------------------------------------------------

_MODULES = "_ctypes", "ctypes"
_LAYOUT = "_pack_", "_align_", "_layout_", "_anonymous_"


def is_structure(cls: type) -> bool:
    return type(cls).__module__ in _MODULES


def structure_shell(cls: Any, token: str) -> Shell | None:
    """Return how the class statement makes the class again.  The state sets its fields, which may
    be of pointers to this class."""
    if not is_structure(cls):
        return None
    attributes = vars(cls)
    creation = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    creation |= {name: attributes[name] for name in _LAYOUT if name in attributes}
    # Since Python 3.14, the type of fields is of the module `ctypes`.
    made = {name for name, one in attributes.items() if type(one).__module__ in _MODULES}
    args = token, cls.__name__, cls.__bases__, creation
    return _make_structure, args, frozenset({*creation, *made})


def _make_structure(
    token: str, name: str, bases: tuple[type, ...], creation: dict[str, Any]
) -> Any:
    # The metaclass has no name in `_ctypes`.
    return shell(token, lambda: type(bases[0])(name, bases, creation))


def set_in_structure(cls: Any, name: str, value: Any) -> None:
    """Set an attribute; C code reads the fields, which are final."""
    if name != "_fields_" or name not in vars(cls):
        setattr(cls, name, value)


# -- named tuples -----------------------------------------------------------------------------

_OF_NAMEDTUPLE = frozenset(
    {"_fields", "_field_defaults", "_make", "_replace", "__replace__", "_asdict", "__new__"}
    | {"__getnewargs__", "__match_args__", "_fields_defaults", "__repr__"}
)


def is_namedtuple(cls: type) -> bool:
    return cls.__bases__[0] is tuple and {"_fields", "_field_defaults"} <= vars(cls).keys()


def namedtuple_shell(cls: Any, token: str) -> Shell | None:
    """Return how `collections.namedtuple` makes the class again."""
    attributes = vars(cls)
    if not is_namedtuple(cls):
        return None
    fields: tuple[str, ...] = attributes["_fields"]
    defaults = attributes["_field_defaults"]
    values = tuple(defaults[name] for name in fields if name in defaults)
    given = cls.__new__.__defaults__  # which a program may set
    args = (token, cls.__name__, cls.__qualname__, cls.__module__, fields, values, given)
    # `namedtuple` makes its own methods again.  Those that the program has set are sent.
    skip = {name for name in _OF_NAMEDTUPLE if _is_made_by_namedtuple(attributes.get(name))}
    rest = cls.__bases__, attributes.get("__orig_bases__")
    return _make_namedtuple, (*args, *rest), frozenset(skip)


def _is_made_by_namedtuple(attribute: Any) -> bool:
    function = getattr(attribute, "__func__", attribute)
    if type(function) is not FunctionType:
        return True
    space = function.__globals__
    return space is vars(collections) or str(space.get("__name__")).startswith("namedtuple_")


def _make_namedtuple(
    token: str,
    name: str,
    qualname: str,
    module: str,
    fields: tuple[str, ...],
    defaults: tuple[Any, ...],
    _given: Any,  # the state sets them
    bases: tuple[type, ...],
    orig_bases: Any,
) -> Any:
    def build() -> Any:
        factory: Any = collections.namedtuple
        # `rename`: names such as `_1`, which `namedtuple` has made from others, are made again.
        made = factory(name, fields, rename=True, defaults=defaults, module=module)
        made.__qualname__ = qualname
        if orig_bases is not None:
            made.__orig_bases__ = orig_bases
        if bases != (tuple,):  # typing.NamedTuple together with Generic
            made.__bases__ = bases
        return made

    return shell(token, build)


# -- enumerations -----------------------------------------------------------------------------

_OF_ENUM = frozenset(
    {"_member_names_", "_member_map_", "_value2member_map_", "__new__", "_generate_next_value_"}
    | {"_hashable_values_", "_unhashable_values_", "_unhashable_values_map_", "_member_type_"}
)

# Attributes of a member that the metaclass sets, or that are caches.
_OF_MEMBER = frozenset({"_name_", "__objclass__", "_sort_order_", "_inverted_"})


def enum_shell(cls: Any, token: str) -> Shell | None:
    """Return how the metaclass makes the enumeration again without running the members' code."""
    if not isinstance(cls, enum.EnumMeta):
        return None
    members_of: dict[str, Any] = dict(cls.__members__)
    data_type = vars(cls)["_member_type_"]
    members = [(key, one.value, _raw(one, data_type)) for key, one in members_of.items()]
    boundary = getattr(cls, "_boundary_", None) if issubclass(cls, enum.Flag) else None
    names = (cls.__name__, cls.__qualname__, cls.__module__)
    args = (token, type(cls), names, cls.__bases__, members, boundary)
    return _make_enum, args, _OF_ENUM | frozenset(members_of)


def member_attributes(cls: Any) -> dict[str, dict[str, Any]]:
    """Return the values of the members and the attributes that their own code has set, by the
    member's name.  A class that the receiver has gets them again, if they have changed."""
    return {
        key: {name: value for name, value in vars(one).items() if name not in _OF_MEMBER}
        for key, one in cls.__members__.items()
    }


def _raw(member: Any, data_type: type) -> tuple[type, tuple[Any, ...]]:
    """Return the type and the arguments whose ``__new__`` makes a member's data again.

    If possible, this is a builtin type: a ``__new__`` of the program would convert the data twice.
    """
    as_object: Any = object.__new__
    if data_type.__new__ is as_object:
        return object, ()
    if issubclass(data_type, str):
        return str, (str.__str__(member),)  # not `str(member)`, which a class may override
    for plain in (int, float, complex, bytes, tuple, frozenset):
        if issubclass(data_type, plain):
            return plain, (plain(member),)
    value = member.value
    if isinstance(value, data_type):
        reduced = value.__reduce_ex__(2)
        if reduced[0] is type(value):
            return data_type, tuple(reduced[1])
    return data_type, value if isinstance(value, tuple) else (value,)


class _EnumMember:
    """Takes the place of a member's value in the body of the class."""

    def __init__(self, value: Any, raw: tuple[type, tuple[Any, ...]]) -> None:
        self.value, self.raw = value, raw


def _make_enum(
    token: str,
    metaclass: Any,
    names: tuple[str, str, str],
    bases: tuple[type, ...],
    members: list[tuple[str, Any, tuple[type, tuple[Any, ...]]]],
    boundary: Any,
) -> Any:
    def new(cls: Any, given: Any) -> Any:
        if type(given) is tuple:  # as the metaclass gives it to an enumeration of tuples
            (given,) = given
        kind, args = given.raw
        member = kind.__new__(cls, *args)
        member._value_ = given.value
        return member

    def build() -> Any:
        name, qualname, module = names
        # The metaclass's own code is not called, because it ran when the class was defined.
        body = enum.EnumMeta.__prepare__(name, bases)
        body["__module__"], body["__qualname__"] = module, qualname
        if members:
            body["__new__"] = new
            body["__init__"] = lambda self, *args: None
        for key, value, raw in members:
            body[key] = _EnumMember(value, raw)
        options = {} if boundary is None else {"boundary": boundary}
        made = enum.EnumMeta.__new__(metaclass, name, bases, body, **options)
        if members:  # the state sets those that the class itself has defined
            for key in ("__init__", "__new_member__", "_new_member_"):
                if key in vars(made):
                    type.__delattr__(made, key)
        return made

    return shell(token, build)


def _reduce_member(pickler: Context, member: Any) -> Any:
    """Pickle a member by its name: a copy of the value may not lead to the member."""
    kind: Any = type(member)
    name = vars(member).get("_name_")
    if kind.__reduce_ex__ is not enum.Enum.__reduce_ex__ or type(name) is not str:
        return NotImplemented
    return (getattr, (kind, name)) if getattr(kind, name, None) is member else NotImplemented


FOR_SUBCLASSES[enum.Enum] = _reduce_member


# -- models of pydantic -----------------------------------------------------------------------


def types_among(namespace: dict[str, Any]) -> dict[str, Any]:
    """Return those local variables of the defining function that a model's annotations may use.

    The model keeps all local variables.  If it is defined in the ``with`` block of a pool, one of
    them is the pool, which cannot be pickled.
    """
    found = {}
    for name, kept in namespace.items():
        # pydantic has weak references to most of them.
        value = kept() if type(kept).__module__.startswith("pydantic.") else kept
        if isinstance(value, type) or type(value).__module__ in ("typing", "types"):
            found[name] = kept
    return found


def enter_generic(cls: Any, about: dict[str, Any]) -> None:
    """Let ``Model[int]`` give the class that another process has made of it, if there is none."""
    generics = sys.modules.get("pydantic._internal._generics")
    find = getattr(generics, "get_cached_generic_type_early", None)
    enter = getattr(generics, "set_cached_generic_type", None)
    origin, args = about["origin"], about["args"]
    if origin is not None and find and enter and find(origin, args) is None:
        enter(origin, args, cls, origin, args)
