"""Examines ``__main__``, and whether another process can have the same one.

There are two kinds of programs:

* **importable**: a file with an ``if __name__ == "__main__"`` guard, also one that
  ``python -m`` runs.  A worker runs the file again under another name, as `multiprocessing`
  does, so functions and classes of ``__main__`` are pickled by name.  Objects that the guarded
  block defines exist in the caller's process only, and are pickled by value.
* **by value**: a notebook, ``python -``, ``python -c``, an interactive session, a script or
  module without the guard.  Functions and classes are pickled by value.

In both, the values of the globals that they use are sent before them (see `main_globals`).

A *replica* is a process (a worker) whose ``__main__`` follows that of another process.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpool._pickling.by_value.source import (
        SourceFile,  # at run time only when there is a file to look at
    )

#: `multiprocessing` calls the main module of a child by the second name, and makes each
#: name an alias of the other in ``sys.modules``.
MAIN_NAMES = frozenset({"__main__", "__mp_main__"})

#: Stands for a global that does not exist.
MISSING: Any = object()


class _State:
    # Without a lock: two threads at worst compute the same value.
    module: ModuleType | None = None  # the __main__ of the next three fields
    file: Any = None  # its __file__
    importable: bool = False
    source: SourceFile | None = None  # of an importable one, computed on demand
    units: bytes | None = None  # of an importable one, pickled, computed on demand
    replica: bool = False
    forked: bool = False
    told: bool | None = None  # the argument of mark_worker
    values: dict[str, Any] | None = None  # globals of functions, if not the module's own


_state = _State()
_initial: dict[str, Any] = {}

settled: set[str] = set()
"""In a worker, the globals whose values come from the caller: their statements are not run here."""

missing: set[str] = set()
"""In a worker, the globals whose values in the caller cannot be sent here."""


def main_is_importable() -> bool:
    """Whether functions and classes of ``__main__`` can be pickled by name."""
    module = sys.modules.get("__main__")
    # A worker's __main__ may get its file later, when the caller's script is run for its names.
    if module is not _state.module or getattr(module, "__dict__", {}).get("__file__") is not (
        _state.file
    ):
        _examine(module)
    return _state.importable


def source() -> SourceFile | None:
    """Return the analysis of the text of an importable ``__main__``; None: not importable."""
    if not main_is_importable():
        return None
    found = _state.source
    if found is None:  # in a worker whose parent has said that it is importable
        found = _state.source = _read(_state.module)
    return found


def units() -> bytes | None:
    """Return the statements of this script for workers, pickled (`Units`); None: there are none.

    Called when the script's classes exist, since these say what their statements do.
    """
    location = main_location() if main_is_importable() else None
    if location is None:
        return None
    if _state.units is None:
        from xpool._pickling.by_value.units import read_units

        found = read_units(_file_of(_state.module), namespace())
        # As plain tuples: importing the classes would double the worker's time for this.
        _state.units = b"" if found is None else pickle.dumps(found.plain())
    return _state.units or None


def main_location() -> tuple[str, str] | None:
    """Return ``("path", p)``, ``("name", modname)``, or None when there is no file to run again."""
    module = sys.modules.get("__main__")
    # Interactive input is in no file.
    if module is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name not in MAIN_NAMES:
        return ("name", spec.name)
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not os.path.isfile(path):
        return None
    return ("path", os.path.abspath(path))


def namespace() -> dict[str, Any]:
    """Return the globals of this process's ``__main__``, which its functions use."""
    values = _state.values
    return sys.modules["__main__"].__dict__ if values is None else values


def fill(name: str) -> None:
    """Run the part of the caller's script here that this name needs, if it was not run.

    `TOP`: the part that is always run.
    """
    module = sys.modules["__main__"]
    here = vars(module)
    # It runs once; the script's own `__getattr__` is not called for `TOP`.
    if name != TOP or ("_xpool_script" in here and "_xpool_top" not in here):
        getattr(module, name, None)


TOP = "the top of the script"
"""Stands for a name that needs only the statements that act; no real name has spaces."""


def mark_worker(importable: bool | None = None, *, forked: bool = False) -> None:
    """Record that this process is a worker, whose ``__main__`` follows that of its parent.

    Args:
        importable: whether ``__main__`` here is the caller's own file, run again.  None:
            examined as in the caller's process.
        forked: the process is a fork of its parent, and has its objects that cannot be pickled.
    """
    _state.replica, _state.forked = True, forked
    _state.told = importable
    # Forget the parent's state from before a fork.
    _state.module = None
    for names in (_initial, settled, missing):
        names.clear()
    _state.values = _run_by_multiprocessing(sys.modules["__main__"])
    record_initial()


def _run_by_multiprocessing(module: ModuleType) -> dict[str, Any] | None:
    """Return the globals of functions that `multiprocessing` has defined by running the script.

    The module has a copy of these globals, so functions do not see what is set in the module.
    """
    if module is not sys.modules.get("__mp_main__"):
        return None
    for value in list(vars(module).values()):
        for one in (value, *(vars(value).values() if isinstance(value, type) else ())):
            found = one.__globals__ if isinstance(one, FunctionType) else {}
            if found.get("__name__") == "__mp_main__":
                return None if found is vars(module) else found
    return None


def record_initial(names: Iterable[str] | None = None) -> None:
    """Record these globals, or all that this replica has now, as its initial ones.

    Called when it is marked, and when the caller's script has been run here for its names.
    """
    values = namespace()
    found = list(values) if names is None else names
    _initial.update((name, values[name]) for name in found if name in values)


def is_replica() -> bool:
    return _state.replica


def is_forked() -> bool:
    return _state.forked


def is_initial(name: str, value: Any) -> bool:
    """Whether this global of the replica's ``__main__`` is the initial object.

    Works once for each name, so that replaced objects are not kept alive.
    """
    return _initial.pop(name, MISSING) is value


def _examine(module: ModuleType | None) -> None:
    importable, found = False, None
    if _state.replica and _state.told is not None:
        importable = _state.told
    elif (location := main_location()) is not None:
        kind, where = location
        found = _read(module)
        # The __main__ of a worker started by `python -m` is a runner, not the program.
        runner = kind == "name" and where.partition(".")[0] in ("xpool", "multiprocessing")
        importable = found.has_guard and not (runner and _state.replica)
    _state.importable, _state.source = importable, found if importable else None
    _state.module, _state.units = module, None
    _state.file = None if module is None else vars(module).get("__file__")


def _read(module: ModuleType | None) -> SourceFile:
    from xpool._pickling.by_value.source import read

    return read(_file_of(module), getattr(module, "__package__", None))


def _file_of(module: ModuleType | None) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else ""
