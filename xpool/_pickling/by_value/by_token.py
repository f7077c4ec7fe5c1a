"""Pickles objects by a token, to keep their identity in each process.

These objects are type variables, new types, aliases and sentinels (Python 3.15), and two kinds of
globals of ``__main__``: objects without attributes (``MISSING = object()``), and objects whose
``__reduce__`` returns the global's name.  A token is needed because functions, arguments and
globals arrive in separate pickles, and may all refer to one such object.
"""

from __future__ import annotations

import builtins
import sys
import typing
from typing import Any

from xpool._pickling.by_value import registry
from xpool._pickling.by_value.names import name_for, script_top
from xpool._pickling.by_value.origin import (
    IMPORTED,
    INSTALLED,
    SENT,
    attributes_of,
    has_no_state,
    modules,
    namespace,
    origin_of,
    program_modules,
)
from xpool._pickling.reducers import LAZY, Context, by_place, of_module, register

KINDS = ("TypeVar", "ParamSpec", "TypeVarTuple", "NewType", "TypeAliasType")


def _lazy_typing() -> None:
    register(*(getattr(typing, kind) for kind in KINDS if hasattr(typing, kind)))(_reduce)


def _reduce(pickler: Context, obj: Any) -> Any:
    if origin_of(obj.__module__) != SENT:
        name = name_for(pickler, obj)
        if name is not None:
            return name
    kind = type(obj)
    args: tuple[Any, ...] = (obj.__name__,)
    options: dict[str, Any] = {}
    if kind.__name__ == "NewType":
        args = (obj.__name__, obj.__supertype__)
    elif kind.__name__ == "TypeAliasType":
        args = (obj.__name__, obj.__value__)
        options["type_params"] = obj.__type_params__
    elif kind.__module__ == "typing":
        args = (obj.__name__, *getattr(obj, "__constraints__", ()))
        for option in ("bound", "covariant", "contravariant", "infer_variance"):
            if getattr(obj, f"__{option}__", None):
                options[option] = getattr(obj, f"__{option}__")
        if sys.version_info >= (3, 13) and obj.has_default():
            options["default"] = obj.__default__
    return _make, (registry.token_of(obj), kind, args, options, obj.__module__)


def _make(token: str, kind: Any, args: Any, options: Any, module: str | None) -> Any:
    def build() -> Any:
        made = kind(*args, **options)
        if kind.__name__ != "TypeAliasType":  # the `__module__` of this type is read-only
            made.__module__ = module
        return made

    return registry.shell(token, build)


@register(object)
def reduce_object(pickler: Context, obj: object) -> Any:
    """Pickle an object without attributes, if a global refers to it or it has a token."""
    with registry.lock:
        if registry.known(obj) is None:
            if type(obj) is object and (there := _in_package(obj)) is not None:
                return of_module, there
            place = _place_of(pickler, obj)
            if place is None:
                return NotImplemented
            if origin_of(place[0]) == IMPORTED:
                named = (*place, type(obj))
                return by_place(*named) if pickler.group else (of_module, named)
        return make_object, (registry.token_of(obj), type(obj))


def _place_of(pickler: Context, obj: object) -> tuple[str, str] | None:
    """Return the module of the program and the global that refers to an object, or None."""
    # Found once for a message, which may have many such objects.  No object has the id 0.
    places = pickler.spaces.get(0)
    if places is None:
        places = pickler.spaces[0] = {}
        for module in program_modules():
            for name, value in list(namespace(module).items()):
                if has_no_state(value):
                    places.setdefault(id(value), (module, name))
    return places.get(id(obj))


# How many modules there were, and the globals of installed ones that are `object()`, by id.
_of_packages: tuple[int, dict[int, tuple[str, str]]] = 0, {}


def _in_package(obj: object) -> tuple[str, str] | None:
    """Return the installed module whose import has made an object, and the name there, or None."""
    global _of_packages
    count = len(sys.modules)
    if _of_packages[0] != count:
        _of_packages = (
            count,
            {
                id(value): (name, attribute)
                for name, module in modules()
                for attribute, value in list(attributes_of(module).items())
                if type(value) is object and type(attribute) is str and origin_of(name) == INSTALLED
            },
        )
    place = _of_packages[1].get(id(obj))
    if place is None or attributes_of(sys.modules.get(place[0])).get(place[1]) is not obj:
        return None
    return None if place in script_top().top_of_main().assigned else place


def make_object(token: str, kind: type) -> object:
    """Return the object of this token, a new one of this class if there is none."""
    found = registry.shell(token, lambda: object.__new__(kind))
    if type(found) is not kind:  # the program has changed its class, as `%autoreload` does
        found.__class__ = kind
    return found


LAZY["typing"] = _lazy_typing
if hasattr(builtins, "sentinel"):
    register(builtins.sentinel)(_reduce)
