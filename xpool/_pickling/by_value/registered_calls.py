"""Calls that every worker makes before its first task: of `everywhere`, of the script, of reducers.

They travel as globals of a module without a name: the beginning of a message brings them.
"""

from __future__ import annotations

from typing import Any

from xpool._pickling.by_value.origin import SENT, origin_of
from xpool._pickling.reducers import Key
from xpool._python import registered_reducers

CALLS = ""
"""Takes the place of a module in the keys of these calls."""

OF_SCRIPT = "calls of the script "
"""The beginning of the names of those that stand alone at the script's top level.  After it comes
the package after whose import a worker makes them, if any."""

registered: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
"""The calls by their names.  A worker makes them in the order of these."""

_reducers: dict[tuple[str, type], Any] = {}  # those for which there is a call


def register_call(function: Any, *args: Any, **kwds: Any) -> Key:
    """Make every worker make a call, after those that are registered; return its key."""
    name = f"{len(registered):06}"
    registered[name] = function, args, kwds
    return CALLS, name


def look_at_script(calls: tuple[tuple[str, Any, tuple[Any, ...]], ...]) -> None:
    """Take over the calls of the script: (package, function, arguments)."""
    for package, function, args in calls:
        name = OF_SCRIPT + package
        if name not in registered or registered[name][0] is not function:
            registered[name] = function, args, {}


def look_at_reducers() -> None:
    """Make every worker register the reducers that functions of the program are."""
    for register, kind, reduce in registered_reducers.registrations():
        key = register.__module__, kind
        # A module that a worker imports registers its own.
        if _reducers.get(key) is not reduce and origin_of(reduce.__module__) == SENT:
            _reducers[key] = reduce
            register_call(register, kind, reduce)


def forget() -> None:
    """Let all objects of the program go."""
    registered.clear()
    _reducers.clear()
