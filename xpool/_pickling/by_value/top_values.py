"""Finds objects that a script's globals share with each other or with the program."""

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
"""Types whose objects are not compared by identity, or are the same in each process."""

_MANY = 20_000
"""A value with more objects than this counts as large, and arrives as a copy."""


def held_alone(name: str, values: Mapping[str, Any]) -> bool:
    """Whether only one global refers to a value, so that changes of it have no other effect.

    Local variables and arguments of running functions may refer to the value, too.
    """
    if name not in values:
        return True  # the script has deleted it
    if is_free_threaded():
        return False  # not all references of other threads are counted
    if sys.getrefcount(values[name]) <= _ALONE:
        return True
    # References from frozen or untracked objects cannot be found.
    if not gc.is_tracked(values[name]) or gc.get_freeze_count() > _FROZEN_AT_START:
        return False
    holders = [one for one in gc.get_referrers(values[name]) if one is not values]
    return all(isinstance(one, (tuple, FrameType)) for one in holders)


_FROZEN_AT_START = 1_000
"""Above this number, the program has called `gc.freeze`, which freezes thousands of objects.
Python 3.12 starts with about 400 frozen objects."""

_ALONE = (lambda values: sys.getrefcount(values["name"]))({"name": object()})


def sharing(values: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the groups of names whose values share objects, by each name in a group.

    A name whose value shares no object is in no group.
    """
    owners: dict[int, str] = {}
    found: dict[str, set[str]] = {}
    for name, value in values.items():
        for key in _inside(value) or ():
            other = owners.setdefault(key, name)
            group = found.get(other, {other})
            if name != other and name not in group:
                group = group | found.get(name, {name})
                found.update(dict.fromkeys(group, group))
    return found


def _inside(value: Any) -> dict[int, Any] | None:
    """Return all objects in a value, by id, or None if there are too many."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        if len(seen) + len(todo) > _MANY:
            return None
        fresh = []
        for one in todo:
            if type(one) is tuple and not one:
                continue  # all empty tuples are the same object
            if not isinstance(one, _ATOMS) and id(one) not in seen:
                seen[id(one)] = one
                fresh.append(one)
        todo = gc.get_referents(*fresh)
    return seen
