"""Distinguishes the program's functions, classes and modules from others, and describes code."""

from __future__ import annotations

import dis
import functools
import importlib.machinery
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

from xpool._pickling.by_value import origin
from xpool._pickling.by_value.classes import CACHES
from xpool._pickling.by_value.origin import (
    MAIN_NAMES,
    canonical,
    is_installed,
    is_program,
    namespace,
    spec_of,
)
from xpool._pickling.by_value.reads import absolute_name, use_of

Code = tuple[Any, ...]
"""A description of code: plain values, and such tuples for nested code."""

_LINE_OF_CLASS = frozenset({"__firstlineno__", "__static_attributes__"})
"""Names that Python 3.13 and later bind in the body of a class: its line number, and attributes in
an order that differs between runs."""

OF_MODULES = origin.OF_MODULES | frozenset(
    {"__file__", "__doc__", "__annotations__", "__module__", "__qualname__"}
)
"""Globals that every module has, and names that every class body has."""

OF_CLASSES = CACHES | frozenset(
    {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__"}
    | {"__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__"}
    | {"__conditional_annotations__", "_abc_impl", "_value2member_map_"}
)
"""Attributes of classes that do not affect what their objects do.  Some are caches: a class of
flags keeps the combinations that were used."""


# -- modules of the program ------------------------------------------------------------------------


def version_of(name: str) -> tuple[str, str] | None:
    """Return the package of an installed module and its version; None: it has no version."""
    top = name.partition(".")[0]
    version = getattr(sys.modules.get(top), "__dict__", {}).get("__version__")
    if not isinstance(version, str) or top in sys.stdlib_module_names:
        return None
    return top, str(version)


# -- code ------------------------------------------------------------------------------------------


def said(code: CodeType) -> Code:
    """Return a description of code that does not depend on its place in the file."""
    names, body = code.co_names, code.co_code
    consts: tuple[Any, ...] = code.co_consts
    instructions: Any = body
    if not _LINE_OF_CLASS.isdisjoint(names):
        instructions, consts = _without_lines(code), ()
    return (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        instructions,
        names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        getattr(code, "co_exceptiontable", b""),  # before 3.11, it is part of the instructions
        consts,
    )


def _without_lines(code: CodeType) -> list[tuple[str, Any]]:
    kept: list[tuple[str, Any]] = []
    for one in dis.get_instructions(code):
        if one.opname == "STORE_NAME" and one.argval in _LINE_OF_CLASS:
            kept.pop()  # the instruction that loads the stored value
        else:
            kept.append((one.opname, one.argval))
    return kept


def imported(code: CodeType, package: str | None) -> set[str]:
    """Return the names of the modules that code imports, and of their parents.

    ``from a import b`` gives ``a.b``, too, which may not be a module.
    """
    found = set[str]()
    for level, relative, names in use_of(code).imports:
        name = absolute_name(level, relative, package)
        if not name:
            continue
        parts = name.split(".")
        found.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
        found.update(f"{name}.{inside}" for inside in names)
    return found


def module_code(name: str) -> tuple[CodeType | bytes, str | None] | None:
    """Return the code of a module of the program and its package, without importing it.

    For a module in C, the bytes of its file.  None: it is not the program's, or was not found.
    """
    if name.partition(".")[0] in sys.stdlib_module_names:
        return None
    spec = spec_of(name)
    if spec is None or spec.loader is None or spec.origin is None or name.startswith("xpool"):
        return None
    if is_installed(spec.origin):
        return None
    get: Callable[[str], CodeType | None] | None = getattr(spec.loader, "get_code", None)
    code = None if get is None else get(name)
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    if code is not None:
        return code, package
    with open(spec.origin, "rb") as file:
        return file.read(), package


def submodules(path: Any, package: str) -> Iterator[str]:
    """Yield the names of all modules in the folders of a package, without importing them."""
    for finder, name, is_package in pkgutil.iter_modules(path, f"{package}."):
        yield name
        if is_package and isinstance(finder, importlib.machinery.FileFinder):
            yield from submodules([os.path.join(finder.path, name.rpartition(".")[2])], name)


# -- functions, classes and their names ------------------------------------------------------------


CODE = (FunctionType, property, classmethod, staticmethod)
_CODE_TYPES = frozenset(CODE)


def wrapped_by(obj: Any) -> FunctionType | None:
    """Return the function in a library's wrapper, such as `functools.lru_cache`; None: it is
    none."""
    found = attributes_of(obj).get("__wrapped__")
    own = isinstance(found, FunctionType) and not is_program(type(obj).__module__)
    return found if own else None


def attributes_of(obj: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(obj, "__dict__")  # its class may override attribute access
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def label_of(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", type(obj).__name__)
    return f"{canonical(getattr(obj, '__module__', None))}.{name}"


def is_in_c(cls: type) -> bool:
    """Whether a class is made in C although its module has no file (as Cython's functions)."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return (
        file is None
        and cls.__module__ not in MAIN_NAMES
        and _CODE_TYPES.isdisjoint(map(type, vars(cls).values()))
    )


def name_of(func: Any) -> str:
    """Return the name of a function for error texts."""
    while isinstance(func, functools.partial):
        func = func.func
    func = getattr(func, "__func__", func)
    return label_of(func if hasattr(func, "__qualname__") else type(func))


# -- globals --------------------------------------------------------------------------------------


def globals_of(module: str) -> Any:
    """Return the globals of the module that has this name now."""
    return namespace("__main__") if module in MAIN_NAMES else attributes_of(sys.modules.get(module))


def is_standard(builtin: Any) -> bool:
    """Whether an object of `builtins` is Python's own, and not one that the program put there."""
    kind = type(builtin)
    return kind is BuiltinFunctionType or (kind is type and builtin.__module__ == "builtins")
