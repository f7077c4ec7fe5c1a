"""The reducers of `multiprocessing` for connections, sockets and shared memory of ctypes.

The pools of `multiprocessing` send tasks and results with a pickler that has a table of reducers,
to which `multiprocessing.reduction.register` adds.  xpool uses it for types without its own one.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

# These types are in the table only because Python 2 could not pickle them.
_AS_USUAL = {types.MethodType, type(list.append), type(int.__add__), functools.partial}

_table: dict[type, Callable[[Any], Any]] | None = None


def reducer_for(kind: type) -> Callable[[Any, Any], Any] | None:
    """Return the reducer for objects of exactly this type, if `multiprocessing` has one."""
    global _table
    if _table is None:
        if "multiprocessing.reduction" not in sys.modules and kind.__module__ != "socket":
            return None  # a program that registers a reducer has imported the module
        from multiprocessing.reduction import ForkingPickler

        # Undocumented, but in every Python from 3.3 to 3.15.  The documented `dispatch_table` of an
        # instance is a copy, and making one for each object would be too slow.
        _table = getattr(ForkingPickler, "_extra_reducers", {})
    reduce = _table.get(kind)
    if reduce is None or kind in _AS_USUAL or kind.__module__.partition(".")[0] == "torch":
        return None
    return functools.partial(_reduce, reduce)


def _reduce(reduce: Callable[[Any], Any], pickler: Any, obj: Any) -> Any:
    import ctypes

    # The base of all types of ctypes, _ctypes._CData, has no public name.
    if isinstance(obj, ctypes.c_int.__mro__[-2]):
        # Only objects in shared memory need the reducer, which refuses to send them.
        return reduce(obj) if hasattr(obj, "_wrapper") else NotImplemented
    if pickler.group is not None or pickler.layout.kept or not pickler.layout.out_of_band:
        # The reducer keeps a descriptor in this process until one receiver fetches it.
        raise RuntimeError(
            f"a {type(obj).__name__} object can be sent only once, and only in a result or in a "
            "task without retries=; workers get one in initargs=, by inheritance"
        )
    return reduce(obj)
