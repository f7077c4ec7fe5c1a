"""Private parts of the standard library that xpool needs: some facts, and registered reducers.

A program registers reducers in the table of `copyreg`, or in that of the pickler with which the
pools of `multiprocessing` send tasks and results (`multiprocessing.reduction.register`).  Such a
reducer has priority over xpool's own and over ``__reduce__``.  `multiprocessing` itself registers
reducers for connections, sockets and shared memory of ctypes; these are used only for types for
which xpool has none.
"""

from __future__ import annotations

import abc
import copyreg
import functools
import pickle
import sys
import types
from collections.abc import Callable
from importlib import import_module
from multiprocessing import reduction
from typing import Any

from xpool._python import failures

CachedFunction: type = type(functools.lru_cache(len))
"""The type of functions made by `functools.lru_cache` and `functools.cache`."""


def is_free_threaded() -> bool:
    """Whether threads of this interpreter run Python code at the same instant."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()


def folder_asker() -> Callable[[], bytes | None]:
    """Return a function that returns the working folder and keeps the interpreter's lock."""
    ctypes, size = ctypes_module(), 4096
    ask = ctypes.PyDLL(None).getcwd
    ask.restype = ctypes.c_char_p
    return functools.partial(ask, ctypes.create_string_buffer(size), size)


def flush_c() -> None:
    """Write what C code has buffered in its streams."""
    ctypes_module().CDLL(None).fflush(None)


def ctypes_module() -> Any:
    # Imported here, because few programs need it.
    try:
        return import_module("ctypes")
    except OSError:
        failures.ready()  # if no descriptor was free, now one is, which was reserved for an import
        return import_module("ctypes")


def is_mine(lock: Any) -> bool:
    """Whether the calling thread holds a `threading.RLock`.  `Condition` asks in the same way."""
    return bool(lock._is_owned())


def registered_classes(cls: type) -> Any:
    """Return weak references to the classes registered with an abstract base class."""
    return abc._get_dump(cls)[0] if isinstance(cls, abc.ABCMeta) else ()  # type: ignore[attr-defined]


def module_of(obj: Any, name: str) -> str:
    """Return the name of the module in which an object has this name.

    Raises:
        LookupError: no module has the object, for example a function made by `numpy.frompyfunc`.
    """
    try:
        module: str = pickle.whichmodule(obj, name)  # type: ignore[attr-defined]
    except pickle.PicklingError:  # from Python 3.15 on, `whichmodule` compares the objects itself
        raise LookupError(f"it is not {getattr(obj, '__module__', None)}.{name}") from None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not obj:
        raise LookupError(f"it is not {module}.{name}")
    return module


def warning_filters(warnings: Any) -> Callable[[], list[Any]]:
    """Return a function that returns the list of filters that `warnings` uses now."""
    # From Python 3.14 on, a context may have a list of its own.
    found: Any = getattr(warnings, "_get_filters", None)
    return found or functools.partial(getattr, warnings, "filters")


SHOWS_WARNING = "_showwarnmsg_impl"
"""The name of the function in `warnings` that shows a `warnings.WarningMessage`, if
`warnings.showwarning` is the original.  `warnings.catch_warnings` replaces it, too."""


# -- registered reducers ---------------------------------------------------------------------------

# These types are in the table only because Python 2 could not pickle them.
_AS_USUAL = {types.MethodType, type(list.append), type(int.__add__), functools.partial}
_OWNERS = ("multiprocessing", "torch.multiprocessing")

# Undocumented, but in every Python from 3.3 to 3.15.  The documented `dispatch_table` of an
# instance is a copy, and making one for each object would be too slow.
forking: dict[type, Callable[[Any], Any]] = getattr(reduction.ForkingPickler, "_extra_reducers", {})
"""The table of `multiprocessing`."""

_own: set[Any] = set()  # reducers of `multiprocessing` and torch in this table


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


def reducer_registrations() -> list[tuple[Callable[..., object], type, Any]]:
    """Return all reducers that are functions: how each was registered, its type, the reducer."""
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


def is_attribute(module: Any) -> bool:
    """Whether a module of a class of its own is an attribute of the module that its name names, as
    ``torch.ops.aten``, which no import finds."""
    kind = type(module)
    if kind is types.ModuleType or not issubclass(kind, types.ModuleType):
        return False
    above, _, last = module.__name__.rpartition(".")
    return getattr(sys.modules.get(above), "__dict__", {}).get(last) is module
