"""Finds the globals of ``__main__`` that the code of a function or class uses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from xpool._pickling.by_value import main
from xpool._python.hidden import CachedFunction

_names_of: WeakKeyDictionary[CodeType, frozenset[str]] = WeakKeyDictionary()

# The opcodes of all versions from 3.10 on (Lib/opcode.py); LOAD_FROM_DICT_OR_GLOBALS is since 3.12.
_ABOUT_GLOBALS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"}
)


def global_names(code: CodeType) -> frozenset[str]:
    """Return the names of the globals that a function or its inner functions read or write."""
    names = _names_of.get(code)
    if names is None:
        found = set[str]()
        if code.co_names:
            import dis  # imported here, because its import is slow

            found |= {i.argval for i in dis.get_instructions(code) if i.opname in _ABOUT_GLOBALS}
        for const in code.co_consts:
            if isinstance(const, CodeType):
                found |= global_names(const)
        names = _names_of[code] = frozenset(found)
    return names


def reads(obj: Any) -> set[str]:
    """Return the names of the globals that a by-name function or class of ``__main__`` uses.

    These include the globals of its parts: a decorated inner function, methods, defaults.  They do
    not include the globals that other globals use.
    """
    values = main.namespace()
    found, seen, todo = set[str](), set[int](), [obj]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType) and one.__globals__ is values:
            found |= global_names(one.__code__)
        todo.extend(_inside(one))
        for kind in (one, type(one)):  # a class of the script, and the class of an instance
            if isinstance(kind, type) and kind.__module__ in main.MAIN_NAMES:
                found.add(kind.__qualname__.partition(".")[0])
    return found


def _inside(one: Any) -> Iterator[Any]:
    """Yield the callables that an object directly contains."""
    kind = type(one)
    if kind is FunctionType:
        for cell in one.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
        yield from one.__defaults__ or ()
        yield from (one.__kwdefaults__ or {}).values()
        yield from vars(one).values()
    elif isinstance(one, type):
        if one.__module__ in main.MAIN_NAMES:
            yield from vars(one).values()
            yield from one.__bases__
    elif kind in (staticmethod, classmethod, MethodType):
        yield one.__func__
    elif isinstance(one, property):
        yield from (one.fget, one.fset, one.fdel)
    elif isinstance(one, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif kind in (dict, MappingProxyType):
        yield from list(one.values())
    elif kind in (list, tuple, set, frozenset):
        yield from list(one)
    elif kind in _WRAPPERS or kind.__module__ in main.MAIN_NAMES:
        yield from list(getattr(one, "__dict__", {}).values())


_WRAPPERS = frozenset(
    {CachedFunction, functools.cached_property, functools.partialmethod}
    | {functools.singledispatchmethod}
)
