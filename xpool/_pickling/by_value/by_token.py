"""Pickles objects by a token, to keep their identity in each process.

These are type variables, new types and aliases, and bare objects (``MISSING = object()``) that are
globals of ``__main__``.  Functions, arguments and globals, which refer to them, arrive in separate
pickles.
"""

from __future__ import annotations

import sys
from typing import Any

from xpool._pickling.by_value import main, registry
from xpool._pickling.by_value.main import MAIN_NAMES
from xpool._pickling.by_value.names import by_name
from xpool._pickling.reducers import LAZY, Context, register

KINDS = ("TypeVar", "ParamSpec", "TypeVarTuple", "NewType", "TypeAliasType")


def _lazy_typing() -> None:
    import typing

    register(*(getattr(typing, kind) for kind in KINDS if hasattr(typing, kind)))(_reduce)


def _reduce(pickler: Context, obj: Any) -> Any:
    name = by_name(obj)
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
    else:
        args = (obj.__name__, *getattr(obj, "__constraints__", ()))
        for option in ("bound", "covariant", "contravariant", "infer_variance"):
            if getattr(obj, f"__{option}__", None):
                options[option] = getattr(obj, f"__{option}__")
        if sys.version_info >= (3, 13) and obj.has_default():
            options["default"] = obj.__default__
    module = None if obj.__module__ in MAIN_NAMES else obj.__module__
    return _make, (registry.token_of(obj), kind, args, options, module)


def _make(token: str, kind: Any, args: Any, options: Any, module: str | None) -> Any:
    def build() -> Any:
        made = kind(*args, **options)
        if kind.__name__ != "TypeAliasType":  # its `__module__` is read-only
            made.__module__ = module or "__main__"
        return made

    return registry.shell(token, build)


@register(object)
def _reduce_object(pickler: Context, obj: object) -> Any:
    names = (name for name, value in list(main.namespace().items()) if value is obj)
    name = next(names, None)
    with registry.lock:
        if registry.known(obj) is None:
            if name is None:
                return NotImplemented
            # The program and a worker's own run of the script have the same token.  So values that
            # contain the object have the same pickle in both, and the worker keeps its own.
            token = f"{name} of __main__"
            at_first = not main.is_replica() or main.is_initial(name, obj)
            if at_first and registry.lookup(token) is None:
                registry.enter(obj, token, own=True)
        return _make_object, (registry.token_of(obj), name)


def _make_object(token: str, name: str | None) -> object:
    if name is None or not main.is_replica():
        return registry.shell(token, object)
    main.fill(name)
    here = main.namespace().get(name)
    # The object that the worker's own run of the script has made: other objects refer to it.
    own = type(here) is object and main.is_initial(name, here)
    return registry.shell(token, lambda: here if own else object())


LAZY["typing"] = _lazy_typing
