"""Calls that every worker makes before its first task: of `everywhere`, of the script, of reducers.

They travel as globals of a module without a name: the beginning of a message brings them.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from xpool._pickling import Key
from xpool._pickling.by_value.origin import SENT, loose, origin_of
from xpool._python import hidden

CALLS = ""
"""The module of these calls in their keys."""

loose[CALLS] = SimpleNamespace()

registered: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = vars(loose[CALLS])
"""The calls by their names.  A worker makes them in the order of these."""

CALL_OF_SCRIPT = "calls_of_the_script"
"""The name of a function that makes one call of the script."""

_numbers = itertools.count()
_of_script: dict[Key, Any] = {}  # the functions among the calls that the script has
_reducers: dict[tuple[str, type], Any] = {}  # reducers that a registered call registers


def register_call(
    function: Any, args: tuple[Any, ...], kwds: dict[str, Any] | None = None, package: str = ""
) -> Key:
    """Register a call that every worker makes, after the earlier ones; return its key.

    ``package``: a worker makes it after the import of this package; "": now.
    """
    name = f"{next(_numbers):06} {package}"
    registered[name] = function, args, kwds or {}
    return CALLS, name


def package_of(key: Key) -> str:
    """Return the package for whose import a worker waits with a call; "": none."""
    return key[1].partition(" ")[2]


def look_at_script(calls: tuple[tuple[str, Any, tuple[Any, ...]], ...]) -> None:
    """Register the calls at the script's top level that stand alone and have returned.

    Each is (package, function, arguments), as in `script_top`.
    """
    functions = [function for _, function, _ in calls]
    for key in [key for key, one in _of_script.items() if one not in functions]:
        del registered[key[1]], _of_script[key]  # of a script that a runner has executed before
    for package, function, args in calls:
        if function not in _of_script.values():
            _of_script[register_call(function, args, package=package)] = function


def look_at_reducers() -> None:
    """Make every worker register those reducers that are functions of the program."""
    for register, kind, reduce in hidden.reducer_registrations():
        key = register.__module__, kind
        # A module that a worker imports registers its own.
        if _reducers.get(key) is not reduce and origin_of(reduce.__module__) == SENT:
            _reducers[key] = reduce
            register_call(register, (kind, reduce))


def forget() -> None:
    """Let all objects of the program go."""
    registered.clear()
    _of_script.clear()
    _reducers.clear()
