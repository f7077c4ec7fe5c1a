"""Finds objects that values of a script's globals share with each other or with the program."""

from __future__ import annotations

import enum
import gc
import sys
from collections.abc import Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    ModuleType,
)
from typing import Any

from xpool._python.hidden import is_free_threaded

_ATOMS = (
    int, float, complex, str, bytes, bool, range, slice, type(None), type(...),
    type(NotImplemented), FunctionType, BuiltinFunctionType, CodeType, MappingProxyType,
    ModuleType, type, enum.Enum,
)  # fmt: skip
"""Types whose objects have no identity, or the same one in each process."""

_MANY = 20_000
"""Number of objects from which a value counts as large, and arrives as a copy."""


def held_alone(name: str, values: Mapping[str, Any]) -> bool:
    """Whether only one global refers to a value, so that changes of it have no other effect.

    Local variables and arguments of running functions may refer to it, too.
    """
    if name not in values:
        return True  # it was there for a block's time
    if is_free_threaded():
        return False  # references of other threads are not all counted
    if sys.getrefcount(values[name]) <= _ALONE:
        return True
    # References from frozen or untracked objects cannot be found.
    if not gc.is_tracked(values[name]) or gc.get_freeze_count() > _FROZEN_AT_START:
        return False
    holders = [one for one in gc.get_referrers(values[name]) if one is not values]
    return all(isinstance(one, (tuple, FrameType)) for one in holders)


_FROZEN_AT_START = 1_000
"""Python 3.12 starts with some 400 frozen objects; `gc.freeze` freezes thousands."""

_ALONE = (lambda values: sys.getrefcount(values["name"]))({"name": object()})


def sharing(values: Mapping[str, Any]) -> set[str]:
    """Return the names of values that share an object, or are the same object."""
    owners: dict[int, str] = {}
    found: set[str] = set()
    for name, value in values.items():
        inside = _inside(value)
        for key in inside or ():
            other = owners.setdefault(key, name)
            if other != name:
                found |= {name, other}
    return found


def _inside(value: Any) -> dict[int, Any] | None:
    """Return all objects that a value consists of, by id; None: there are too many."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        if len(seen) + len(todo) > _MANY:
            return None
        fresh = []
        for one in todo:
            if type(one) is tuple and not one:
                continue  # there is one for all
            if not isinstance(one, _ATOMS) and id(one) not in seen:
                seen[id(one)] = one
                fresh.append(one)
        todo = gc.get_referents(*fresh)
    return seen
