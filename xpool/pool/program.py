"""What is the program's own among functions, classes and modules, and what their code says."""

from __future__ import annotations

import dis
import functools
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from xpool.byvalue.main import MAIN_NAMES

__all__ = ["Code", "imported", "is_program", "module_code", "said", "version_of"]

Code = tuple[Any, ...]
"""What code says, as plain values and further such tuples."""

_LINE_OF_CLASS = frozenset({"__firstlineno__", "__static_attributes__"})
"""Names that Python 3.13 and later bind in the body of a class: where it is in its file, and names
in an order that differs from run to run."""


# -- whose it is -----------------------------------------------------------------------------------


@functools.cache
def _library_folders() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_path(kind) for kind in kinds}
    found.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    return tuple(os.path.realpath(folder) + os.sep for folder in found if folder)


def is_program(name: Any) -> bool:
    """Whether a module is the program's own: neither Python's, nor xpool's, nor installed."""
    if not isinstance(name, str) or name in MAIN_NAMES:
        return True
    top = name.partition(".")[0]
    if top == "xpool":
        return False
    while name:
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str):
            return not _is_installed(file)
        # Some classes name a module that is none; a namespace package has no file.
        name = name.rpartition(".")[0]
    return top not in sys.stdlib_module_names


@functools.cache
def _is_installed(file: str) -> bool:
    file = os.path.realpath(file)
    parts = file.split(os.sep)
    return (
        "site-packages" in parts or "dist-packages" in parts or file.startswith(_library_folders())
    )


def version_of(name: str) -> tuple[str, str] | None:
    """Return the package of a module that is not the program's, and its version, if it says one."""
    top = name.partition(".")[0]
    version = getattr(sys.modules.get(top), "__dict__", {}).get("__version__")
    if not isinstance(version, str) or top in sys.stdlib_module_names:
        return None
    return top, str(version)


# -- what code says --------------------------------------------------------------------------------


def said(code: CodeType) -> Code:
    """Return what code does, without where it is: the same when it is moved in its file."""
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
        getattr(code, "co_exceptiontable", b""),  # in the code itself before 3.11
        consts,
    )


def _without_lines(code: CodeType) -> list[tuple[str, Any]]:
    kept: list[tuple[str, Any]] = []
    for one in dis.get_instructions(code):
        if one.opname == "STORE_NAME" and one.argval in _LINE_OF_CLASS:
            kept.pop()  # what is stored there
        else:
            kept.append((one.opname, one.argval))
    return kept


def inner(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from inner(constant)


def imported(code: CodeType, package: str | None) -> set[str]:
    """Names of the modules that code imports, and of their parents.

    ``from a import b`` says ``a.b``, too: whether that is a module is for the caller to see.
    """
    found = set[str]()
    for one in inner(code):
        last: list[Any] = [None, None]
        for instruction in dis.get_instructions(one):
            if instruction.opname == "IMPORT_NAME":
                level, names = last
                name = instruction.argval
                if level:
                    try:
                        name = importlib.util.resolve_name("." * level + name, package)
                    except ImportError:  # beyond the top, or no package: it fails there, too
                        continue
                parts = name.split(".")
                found.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
                found.update(f"{name}.{inside}" for inside in names or ())
            last = [last[1], instruction.argval]
    return found


def module_code(name: str) -> tuple[CodeType | bytes, str | None] | None:
    """Return the code of a module of the program and its package, without importing it.

    Of a module in C its bytes.  None: it is no module of the program's, or not found.
    """
    path, spec = None, None
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        part = ".".join(parts[:n])
        if part in sys.builtin_module_names or part in sys.stdlib_module_names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    if spec is None or spec.loader is None or spec.origin is None or name.startswith("xpool"):
        return None
    if _is_installed(spec.origin):
        return None
    get: Callable[[str], CodeType | None] | None = getattr(spec.loader, "get_code", None)
    code = None if get is None else get(name)
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    if code is not None:
        return code, package
    with open(spec.origin, "rb") as file:
        return file.read(), package
