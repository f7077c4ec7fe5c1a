"""What ``__main__`` is here, and whether another process can have the same one.

Two kinds of program:

* **importable**: a file with an ``if __name__ == "__main__"`` guard, also one that
  ``python -m`` runs.  A worker runs the file again under another name, as `multiprocessing`
  does, so functions and classes of ``__main__`` go by name.  What the guarded block itself
  defines exists in the caller's process only, and goes by value.
* **by value**: a notebook, ``python -``, ``python -c``, an interactive session, a script or
  module without the guard.  Functions and classes go by value.

In both, the values of the globals that they use go before them (see `main_globals`).

A *replica* is a process (a worker) whose ``__main__`` follows that of another.
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
        Source,  # at run time only when there is a file to look at
    )

__all__ = [
    "MAIN_NAMES",
    "MISSING",
    "TOP",
    "is_initial",
    "fill",
    "is_forked",
    "is_replica",
    "main_is_importable",
    "main_location",
    "mark_worker",
    "namespace",
    "record_initial",
    "settle",
    "settled",
    "source",
    "units",
    "unsettle",
]

#: `multiprocessing` calls the main module of a child by the second name, and makes each
#: name an alias of the other in ``sys.modules``.
MAIN_NAMES = frozenset({"__main__", "__mp_main__"})

#: Stands for a global that is not there.
MISSING: Any = object()


class _State:
    # All fields are set by whoever comes first; a race computes the same value twice.
    module: ModuleType | None = None  # the __main__, and its __file__, of the next two
    file: Any = None
    importable: bool = False
    source: Source | None = None  # of an importable one, once it was asked for
    units: bytes | None = None  # of that one, pickled, once they were asked for
    replica: bool = False
    forked: bool = False
    told: bool | None = None  # what mark_worker was told
    initial: dict[str, Any]
    settled: set[str]
    missing: set[str]
    values: dict[str, Any] | None = None  # where functions look, if that is not the module's


_state = _State()
_state.initial, _state.settled, _state.missing = {}, set(), set()


def main_is_importable() -> bool:
    """Whether functions and classes of ``__main__`` can go by name."""
    module = sys.modules.get("__main__")
    # A worker's __main__ may get its file later, when the caller's script is run for its names.
    if module is not _state.module or getattr(module, "__dict__", {}).get("__file__") is not (
        _state.file
    ):
        _examine(module)
    return _state.importable


def source() -> Source | None:
    """What the text of an importable ``__main__`` says about its globals; None: by value."""
    if not main_is_importable():
        return None
    found = _state.source
    if found is None:  # in a worker, which has its parent's word that it is importable
        found = _state.source = _read(_state.module)
    return found


def units() -> bytes | None:
    """What workers are told of the statements of this script, pickled (`Units`); None: nothing.

    Asked for once the script's classes are made: what they are says what their statements do.
    """
    location = main_location() if main_is_importable() else None
    if location is None:
        return None
    if _state.units is None:
        from xpool._pickling.by_value.units import read_units

        found = read_units(_file_of(_state.module), namespace())
        # As plain tuples: to import the classes would take a worker as long as all it does here.
        _state.units = b"" if found is None else pickle.dumps(found.plain())
    return _state.units or None


def main_location() -> tuple[str, str] | None:
    """Return ``("path", p)``, ``("name", modname)``, or None when there is no file to run again."""
    module = sys.modules.get("__main__")
    # What is typed is in no file.
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
    """The globals of this process's ``__main__``, in which its functions look."""
    values = _state.values
    return sys.modules["__main__"].__dict__ if values is None else values


def fill(name: str) -> None:
    """Have the caller's script run here as far as this name of it needs, if it was not.

    `TOP`: as far as it is run in any case.
    """
    module = sys.modules["__main__"]
    here = vars(module)
    # It is run once; and the script's own `__getattr__` is not asked for that.
    if name != TOP or ("_xpool_script" in here and "_xpool_top" not in here):
        getattr(module, name, None)


TOP = "the top of the script"
"""Stands for a name that leads to nothing but what acts; no name has spaces."""


def settle(names: Iterable[str]) -> None:
    """Note globals whose values come from the caller: what computes them is not run here."""
    _state.settled.update(names)


def unsettle(name: str) -> None:
    """Note that a value does not come: what computes it may be run here."""
    _state.settled.discard(name)


def settled() -> set[str]:
    """The globals whose values have come from the caller, or are missing there."""
    return _state.settled


def missing() -> set[str]:
    """The globals whose values in the caller cannot be sent here."""
    return _state.missing


def mark_worker(importable: bool | None = None, *, forked: bool = False) -> None:
    """Say that this process is a worker, whose ``__main__`` follows that of its parent.

    Args:
        importable: whether ``__main__`` here is the caller's own file, run again.  None:
            found out as in the caller's process.
        forked: the process is a fork of its parent, and has what cannot be pickled from there.
    """
    _state.replica, _state.forked = True, forked
    _state.told = importable
    # Nothing of the parent's, from before a fork, is taken for this process's.
    _state.module, _state.settled, _state.missing = None, set(), set()
    _state.values = _run_by_multiprocessing(sys.modules["__main__"])
    record_initial()


def _run_by_multiprocessing(module: ModuleType) -> dict[str, Any] | None:
    """The globals of functions that `multiprocessing` has defined by running the script.

    It puts a copy of these globals into the module: a function does not see what is set there.
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
    if names is None:
        _state.initial = dict(values)
    else:
        _state.initial.update((name, values[name]) for name in names if name in values)


def is_replica() -> bool:
    """Whether `mark_worker` was called in this process."""
    return _state.replica


def is_forked() -> bool:
    """Whether this replica is a fork of its parent."""
    return _state.forked


def is_initial(name: str, value: Any) -> bool:
    """Whether the replica's ``__main__`` has had this very global from the start.

    Asked once for each name: what is replaced is not kept alive.
    """
    return _state.initial.pop(name, MISSING) is value


def _examine(module: ModuleType | None) -> None:
    importable, found = False, None
    if _state.replica and _state.told is not None:
        importable = _state.told
    elif (location := main_location()) is not None:
        kind, where = location
        found = _read(module)
        # A worker that was itself started by `python -m` runs a runner, not a program.
        runner = kind == "name" and where.partition(".")[0] in ("xpool", "multiprocessing")
        importable = found.has_guard and not (runner and _state.replica)
    _state.importable, _state.source = importable, found if importable else None
    _state.module, _state.units = module, None
    _state.file = None if module is None else vars(module).get("__file__")


def _read(module: ModuleType | None) -> Source:
    from xpool._pickling.by_value.source import read

    return read(_file_of(module), getattr(module, "__package__", None))


def _file_of(module: ModuleType | None) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else ""
