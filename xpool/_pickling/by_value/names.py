"""Decides whether a function or class is pickled by name."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from operator import attrgetter
from pickle import PickleBuffer
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from xpool._pickling import Key
from xpool._pickling.by_value import main, registry
from xpool._pickling.by_value.origin import (
    IMPORTED,
    INSTALLED,
    NESTED,
    SENT,
    attributes_of,
    canonical,
    find_module,
    is_empty,
    is_patch,
    module_of,
    namespace,
    origin_of,
    origins,
    with_origin,
)
from xpool._pickling.reducers import CYTHON, REDUCERS, Context, Reducer
from xpool._python.interrupt import pass_on

ATOMS = frozenset({int, float, complex, str, bytes, bool, type(None), type(...)})

SHARED_BY_ALL: frozenset[Any] = ATOMS | {
    tuple, type, ModuleType, BuiltinFunctionType, CodeType, PickleBuffer, object, range,
    slice, type(NotImplemented),
}  # fmt: skip
"""Types whose objects two globals may refer to without being a group: see `is_shared_by_all`."""

_OF_EACH_PROCESS = frozenset(
    {("enum", "Enum"), ("logging", "Logger"), ("re", "Pattern"), ("datetime", "timezone")}
    | {("datetime", "timedelta"), ("zoneinfo", "ZoneInfo"), ("numpy", "dtype"), ("numpy", "ufunc")}
    | {("pandas.api.typing", "NAType"), ("pandas._libs.missing", "NAType")}
    | {("torch", "dtype"), ("torch", "layout")}
    | {("torch._ops", "OpOverload"), ("torch._ops", "OpOverloadPacket")}
    | {("torch", "memory_format"), ("torch", "qscheme"), ("torch", "device"), ("torch", "Size")}
)
"""Classes of which a receiver has its own object with the same name or value."""


def is_shared_by_all(kind: type) -> bool:
    """Whether two globals may refer to the same object of this type without being a group."""
    return (
        kind in SHARED_BY_ALL
        or issubclass(kind, type)
        or kind.__name__ == CYTHON
        or any((base.__module__, base.__name__) in _OF_EACH_PROCESS for base in kind.__mro__)
    )


static_modules: set[str] = set()  # the names of the modules given to `mark_static_module`

received: set[tuple[str, str]] = set()
"""In a worker, the globals that messages of the program have set here."""

originals: dict[Key, Any] = {}
"""In a worker: what imports have made of globals that messages have set; `MISSING`: nothing."""


def mark_static_module(module: ModuleType) -> None:
    """Declare that a module is the same in every process, so that it is pickled by name.

    Its functions and classes are then always pickled by name, too.

    Raises:
        TypeError: ``module`` is not a module.
    """
    if not issubclass(type(module), ModuleType):
        raise TypeError(f"mark_static_module takes a module, not {module!r}")
    static_modules.add(module.__name__)


def found_by_name(obj: Any) -> bool:
    """Whether the name of a function or class leads to it here."""
    path = getattr(obj, "__qualname__", None) or obj.__name__
    return found_here(obj.__module__, path) is obj and not is_set_as_method(obj)


def name_in_package(value: Any) -> str | None:
    """Return the name of an object without attributes in the installed module of its class.

    Code compares such an object by identity (`dataclasses.MISSING`).  None: it is another object.
    """
    module = type(value).__module__
    if origin_of(module) != INSTALLED or not is_empty(value):
        return None
    items = list(attributes_of(sys.modules.get(module)).items())
    return next((name for name, one in items if one is value and type(name) is str), None)


def goes_by_name(obj: Any) -> bool:
    """Whether another process finds this function or class by its name."""
    module = obj.__module__
    known = origin_of(module) != SENT or module in static_modules
    return known and found_by_name(obj)


def by_name(reduce: Reducer) -> Reducer:
    """Let a reducer pickle only functions and classes that the receiver does not find by name.

    The names of functions and classes of the program are recorded: before the receiver loads the
    pickle, it gets the globals that they use, and the definitions that it cannot import.
    """

    def reduce_by_name(pickler: Context, obj: Any) -> Any:
        is_function = type(obj) is FunctionType
        module = obj.__module__
        path = getattr(obj, "__qualname__", None) or obj.__name__
        here = with_origin.get(module)  # another thread writes the origin first
        if here is not None and here is sys.modules.get(module) and module not in static_modules:
            # The usual case: the short way to the same answer.
            known = origins[module]
            direct = known != SENT or not (
                pickler.recurse or pickler.home or pickler.blob or pickler.group
            )
            space: dict[str, Any] = here.__dict__
            there = space.get(path) is obj
            if direct and there and (known != SENT or _has_package(module)):
                own = obj.__globals__ is space if is_function else True
                if own and is_function and known == IMPORTED:
                    code = obj.__code__
                    own = code.co_filename[:1] != "<" and (
                        not code.co_flags & NESTED or code.co_name != path
                    )
                if own or not is_patch(obj, module):
                    if known != INSTALLED and pickler.follow:
                        pickler.names.add((module, path))
                    return path
        name = _name_of(pickler, obj, module, path)
        return reduce(pickler, obj) if name is None else name

    return reduce_by_name


name_for = by_name(lambda pickler, obj: None)
"""Return the reduction of a function or class by name, or None if this is not possible."""


# Recorded, so that a worker gets the globals of their modules.
REDUCERS[CYTHON] = by_name(lambda pickler, obj: NotImplemented)


def _name_of(pickler: Context, obj: Any, module: str, path: str) -> Any:
    if type(obj) is FunctionType:
        module_of(obj.__globals__)  # so that its origin is known
    origin = origin_of(module)
    if module in static_modules:
        return path if found_by_name(obj) else _of_static(obj, module, path)
    if is_set_as_method(obj):
        return None
    if origin == SENT:
        if pickler.recurse or (pickler.blob is not None and not _comes_before(obj)):
            return None
        if pickler.group is not None and not issubclass(type(obj), type) and not _comes_before(obj):
            # The function belongs to the group of its global, because it may refer to other data.
            if found_here(module, path) is not obj:
                return None
            pickler.names.add((canonical(module), path.partition(".")[0]))
            return _by_path(module, path) if "." in path else None
        if pickler.home:
            return _for_program(obj, canonical(module), path)
    if found_here(module, path) is not obj:
        # A function made in Python goes by value.
        return original(obj) if issubclass(type(obj), type) else None
    if origin != SENT and is_patch(obj, module):
        if pickler.home:
            return _for_program(obj, canonical(module), path)
        inside = pickler.recurse or pickler.blob is not None or pickler.group is not None
        if origin != IMPORTED or inside or not pickler.follow:
            return None
    if origin != INSTALLED and pickler.follow:
        pickler.names.add((canonical(module), path.partition(".")[0]))
    elif module not in sys.modules:
        return None  # no other process finds a module that this program has made
    return _by_path(module, path)


def _by_path(module: str, path: str) -> Any:
    # The pickler looks in `sys.modules`, where a module that the program has made may be missing.
    # A child of `multiprocessing` has the main module under another name.
    own = module == canonical(module) and module in sys.modules and _has_package(module)
    return path if own else (get_global, (canonical(module), path))


def _has_package(module: str) -> bool:
    """Whether the package of a module is imported: the pickler imports ``a`` to find ``a.b``."""
    return "." not in module or module.partition(".")[0] in sys.modules


def _comes_before(obj: Any) -> bool:
    """Whether a worker gets this definition before all classes."""
    return type(obj) is FunctionType and is_simple(obj)


def is_simple(function: FunctionType) -> bool:
    """Whether a function at the top level of its module consists of code and constants alone."""
    path = function.__qualname__
    if "." in path or function.__closure__ or function.__dict__:
        return False
    if getattr(function, "__type_params__", ()) or type(function.__doc__) not in ATOMS:
        return False
    constants = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if not ATOMS.issuperset(map(type, constants)):
        return False
    name = function.__globals__.get("__name__")
    return (
        canonical(function.__module__) == canonical(name)
        and function.__name__ == path
        and namespace(canonical(name)) is function.__globals__
        and function.__globals__.get(path) is function
    )


def _of_static(obj: Any, module: str, path: str) -> Any:
    # Another object with the same name (of a reloaded module) may take its place, but a decorated
    # function must not take the place of its inner function.
    found = found_here(module, path)
    if type(found) is type(obj) and not hasattr(found, "__wrapped__"):
        return get_global, (module, path)
    return None


def _for_program(obj: Any, module: str, path: str) -> Any:
    """Return the reduction, in a worker, of a function or class that the program has sent."""
    if issubclass(type(obj), type):
        entry = registry.known(obj)
        if entry is not None:
            return None if entry.own else (of_program, (entry.token, module, path))
        if not main.is_forked:
            return None
    elif (module, path.partition(".")[0]) not in received and not main.is_forked:
        return None
    if found_here(module, path) is not obj:
        return None
    return path if module == "__main__" else (get_global, (module, path))


def of_program(token: str, module: str, path: str) -> Any:
    """Return the class that this program has sent with a token.

    Another program, which opens a journal, finds it by its name.
    """
    entry = registry.lookup(token)
    return get_global(module, path) if entry is None else entry.ref()


def original(obj: Any) -> Any:
    """Return the reduction of what an installed module had under a name that the program has given
    to another object (``_print = print; builtins.print = stamped``); None: it is something else."""
    place = obj.__module__, obj.__qualname__
    if type(place[0]) is not str or origin_of(place[0]) != INSTALLED:
        return None
    there = getattr(find_module(place[0]), "__dict__", {}).get(place[1], obj)
    if there is obj or place not in script_top().top_of_main().assigned:
        return None
    return original_of, place


def script_top() -> Any:  # imported late, because few workers send, and it imports `dis`
    return import_module("xpool._pickling.by_value.script_top")


def original_of(module: str, name: str) -> Any:
    """Return what the import of an installed module makes under a name."""
    there = get_global(module, name)
    if not main.is_forked:
        return originals.get((module, name), there)
    # This process has inherited what the program has assigned.
    known = gc.get_objects()
    known += [base for one in known if issubclass(type(one), type) for base in one.__mro__]
    kinds = BuiltinFunctionType, FunctionType, type
    found = (one for one in known if issubclass(type(one), kinds) and one is not there)
    place = module, name
    return next((one for one in found if (one.__module__, one.__qualname__) == place), there)


def get_global(module_name: str, path: str) -> Any:
    return attrgetter(path)(find_module(module_name) or import_module(module_name))


def found_here(module_name: Any, path: str) -> Any:
    if not isinstance(module_name, str):
        return None
    module: Any = find_module(module_name)
    if module is None:
        try:
            module = import_module(module_name)
        except Exception as exc:  # the import of a module can raise any error
            pass_on(exc)
            return None
    # Not `getattr`, which would call a module's own `__getattr__`.
    obj = module.__dict__.get(path)
    if obj is None:
        obj = module
        for part in path.split("."):
            # A function has the methods of a class that it wraps (`functools.wraps`).
            obj = None if type(obj) is FunctionType else getattr(obj, part, None)
    return obj


def is_set_as_method(function: Any) -> bool:
    """Whether a function at the top level of a module has the qualified name of a method of a class
    of another module, as by fastcore's `@patch`.  Workers have another method under this name."""
    if type(function) is not FunctionType or "." not in function.__qualname__:
        return False
    module = function.__module__
    own = getattr(function.__code__, "co_qualname", ".")  # from Python 3.11 on
    if "." in own or origin_of(module) == INSTALLED:
        return False
    owner = found_here(module, function.__qualname__.rpartition(".")[0])
    return issubclass(type(owner), type) and canonical(owner.__module__) != canonical(module)
