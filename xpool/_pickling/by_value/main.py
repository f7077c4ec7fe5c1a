"""Finds out whether another process can have the same ``__main__`` as this one.

There are two kinds of programs:

* **importable**: a file with an ``if __name__ == "__main__"`` guard, which ``python`` or
  ``python -m`` runs.  A worker runs the file again under another name, as `multiprocessing` does,
  so functions and classes of ``__main__`` are pickled by name.  Objects that the guarded block
  defines exist only in the caller's process, and are pickled by value.
* **by value**: a notebook, ``python -``, ``python -c``, an interactive session, a script or
  module without the guard.  Functions and classes are pickled by value.

For both, the values of the globals that functions use are sent before them (see `main_globals`).

A *replica* is a process (a worker) whose ``__main__`` follows that of another process.
"""

from __future__ import annotations

import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpool._pickling.by_value.source import (
        SourceFile,  # imported at run time only if there is a file to analyse
    )

# In a child of `multiprocessing`, ``sys.modules`` has the main module under both names.
MAIN_NAMES = frozenset({"__main__", "__mp_main__"})

# Takes the place of a global that does not exist.
MISSING: Any = object()


def _none() -> None:
    """Stand for a weak reference to no module."""


class _State:
    # Needs no lock: at worst, two threads compute the same value.
    # The __main__ to which the next four fields belong.  Weak, so that Python can clear the module
    # at its end: finalizers of its globals then still have `sys.stdout`.
    module: Callable[[], ModuleType | None] = staticmethod(_none)
    file: Any = None  # its __file__
    importable: bool = False
    source: SourceFile | None = None  # computed on demand if it is importable
    units: bytes | None = None  # pickled; computed on demand if it is importable
    replica: bool = False
    forked: bool = False
    told: bool | None = None  # the argument of `mark_worker`
    values: dict[str, Any] | None = None  # globals of functions, if not the module's own


_state = _State()
_initial: dict[str, Any] = {}

settled: set[str] = set()
"""In a worker, the globals whose values the caller sends, so that their statements do not run."""

missing: set[str] = set()
"""In a worker, the globals whose values the caller cannot send."""


def main_is_importable() -> bool:
    """Whether functions and classes of ``__main__`` can be pickled by name."""
    module = sys.modules.get("__main__")
    # A worker's __main__ may get its file later, when the worker runs the caller's script.
    if module is not _state.module() or getattr(module, "__dict__", {}).get("__file__") is not (
        _state.file
    ):
        _examine(module)
    return _state.importable


def source() -> SourceFile | None:
    """Return the analysis of ``__main__``'s text, or None if ``__main__`` is not importable."""
    if not main_is_importable():
        return None
    found = _state.source
    if found is None:  # in a worker whose parent has said that it is importable
        found = _state.source = _read(_state.module())
    return found


def units() -> bytes | None:
    """Return the pickled `Units` of this script for workers, or None.

    This is called after the script has made its classes, because the analysis uses these.
    """
    text = source()
    if text is None or main_location() is None:
        return None
    if _state.units is None:
        from xpool._pickling.by_value.units import read_units

        found = read_units(_file_of(_state.module()), namespace(), text.rebound)
        # Pickled as plain tuples, because importing their classes would double a worker's time.
        _state.units = b"" if found is None else pickle.dumps(found.plain())
    return _state.units or None


def main_location() -> tuple[str, str] | None:
    """Return ``("path", p)``, ``("name", modname)``, or None if no file can be run again."""
    module = sys.modules.get("__main__")
    # Interactive input is not in a file.
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
    """Run the part of the caller's script that this name needs, unless it has run here.

    For `TOP`, run the part that every worker runs.
    """
    module = sys.modules["__main__"]
    here = vars(module)
    # The condition keeps the script's own `__getattr__` from being called with `TOP`.
    if name != TOP or (here.get("_xpool_script") is not None and "_xpool_top" not in here):
        getattr(module, name, None)


TOP = "the top of the script"
"""Takes the place of a name, and needs only the statements that act.  Real names have no spaces."""


def mark_worker(importable: bool | None = None, *, forked: bool = False) -> None:
    """Record that this process is a worker, whose ``__main__`` follows that of its parent.

    Args:
        importable: whether this process runs the caller's file as its ``__main__``.  None: find out
            as in the caller's process.
        forked: whether the process is a fork of its parent, with objects that cannot be pickled.
    """
    _state.replica, _state.forked = True, forked
    _state.told = importable
    # Forget the parent's state from before a fork.
    _state.module = _none
    for names in (_initial, settled, missing):
        names.clear()
    _state.values = _run_by_multiprocessing(sys.modules["__main__"])
    record_initial()


def _run_by_multiprocessing(module: ModuleType) -> dict[str, Any] | None:
    """Return the globals of the script's functions if `multiprocessing` has run the script.

    The module then has a copy of these globals, and its functions do not use the module's.
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
    """Record these globals, or all globals that this replica has now, as its initial ones.

    Called by `mark_worker`, and after this process has run the caller's script.
    """
    values = namespace()
    found = list(values) if names is None else names
    _initial.update((name, values[name]) for name in found if name in values)


def is_replica() -> bool:
    return _state.replica


def is_forked() -> bool:
    return _state.forked


def is_initial(name: str, value: Any) -> bool:
    """Whether this global of the replica's ``__main__`` is the initial object."""
    return _initial.get(name, MISSING) is value


def forget_initial(name: str) -> None:
    """Let the initial object go.  `is_initial` returns False for this name from now on."""
    _initial.pop(name, None)


def _examine(module: ModuleType | None) -> None:
    importable, found = False, None
    if _state.replica and _state.told is not None:
        importable = _state.told
    elif (location := main_location()) is not None:
        kind, where = location
        found = _read(module)
        # In a worker that `python -m` has started, __main__ may be a module of xpool itself.
        runner = kind == "name" and where.partition(".")[0] in ("xpool", "multiprocessing")
        importable = found.has_guard and not (runner and _state.replica)
    _state.importable, _state.source = importable, found if importable else None
    _state.module, _state.units = _none if module is None else weakref.ref(module), None
    _state.file = None if module is None else vars(module).get("__file__")


def _read(module: ModuleType | None) -> SourceFile:
    from xpool._pickling.by_value.source import read

    return read(_file_of(module), getattr(module, "__package__", None))


def _file_of(module: ModuleType | None) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else ""
