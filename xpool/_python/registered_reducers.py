"""Reducers that are registered for a type: by the program, and by `multiprocessing`.

A program registers them in the table of `copyreg`, or in that of the pickler with which the pools
of `multiprocessing` send tasks and results (`multiprocessing.reduction.register`).  They come
before xpool's own, as they come before ``__reduce__``.  Those of `multiprocessing` itself, for
connections, sockets and shared memory of ctypes, are used for types without one of xpool's.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import types
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

# These types are in the table only because Python 2 could not pickle them.
_AS_USUAL = {types.MethodType, type(list.append), type(int.__add__), functools.partial}
_OWNERS = ("multiprocessing", "torch.multiprocessing")

# Undocumented, but in every Python from 3.3 to 3.15.  The documented `dispatch_table` of an
# instance is a copy, and making one for each object would be too slow.
forking: dict[type, Callable[[Any], Any]] = getattr(reduction.ForkingPickler, "_extra_reducers", {})
"""The table of `multiprocessing`."""

_own: set[Any] = set()  # reducers of `multiprocessing` and torch in it


def of_program(kind: type) -> Callable[[Any], Any] | None:
    """Return the reducer that the program has registered for exactly this type, if any."""
    reduce = forking.get(kind)
    if reduce is None or reduce in _own or _is_own(reduce):
        return copyreg.dispatch_table.get(kind)
    return reduce


def of_multiprocessing(kind: type) -> Callable[[Any, Any], Any] | None:
    """Return the reducer for objects of exactly this type, if `multiprocessing` has one."""
    reduce = forking.get(kind)
    if reduce is None or kind in _AS_USUAL or kind.__module__.partition(".")[0] == "torch":
        return None
    return functools.partial(_reduce, reduce)


def tables() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return copies of the two tables, to compare them later."""
    return dict(copyreg.dispatch_table), dict(forking)


def registrations() -> list[tuple[Callable[..., object], type, Any]]:
    """Return registrations of functions: the function that made it, the type, the reducer."""
    found = (copyreg.pickle, copyreg.dispatch_table), (reduction.register, forking)
    return [
        (register, kind, reduce)
        for register, table in found
        for kind, reduce in list(table.items())
        if isinstance(reduce, types.FunctionType)
    ]


def _is_own(reduce: Any) -> bool:
    if not str(getattr(reduce, "__module__", "")).startswith(_OWNERS):
        return False
    _own.add(reduce)
    return True


def _reduce(reduce: Callable[[Any], Any], pickler: Any, obj: Any) -> Any:
    ctypes: Any = sys.modules.get("ctypes")
    # The base of all types of ctypes, _ctypes._CData, has no public name.
    if ctypes is not None and isinstance(obj, ctypes.c_int.__mro__[-2]):
        # Only objects in shared memory need the reducer, which refuses to send them.
        return reduce(obj) if hasattr(obj, "_wrapper") else NotImplemented
    if pickler.group is not None or pickler.layout.kept or not pickler.layout.out_of_band:
        # The reducer keeps a descriptor in this process until one receiver fetches it.
        raise RuntimeError(
            f"a {type(obj).__name__} object can be sent only once, and only in a result or in a "
            "task without retries=; workers get one in initargs=, by inheritance"
        )
    return reduce(obj)
