"""What ``__main__`` is here, and whether another process can have the same one.

Two kinds of program:

* **importable**: a real file with an ``if __name__ == "__main__"`` guard, or ``python -m``.
  A worker runs the file again under another name, as `multiprocessing` does, so functions
  and classes of ``__main__`` go by name.  What the guarded block itself defines exists in
  the caller's process only, and goes by value.
* **by value**: a notebook, ``python -``, ``python -c``, an interactive session, a script
  without the guard.  Functions and classes go by value, and the globals that they use go
  before them (see `main_globals`).

A *replica* is a process (a worker) whose ``__main__`` follows that of another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast  # imported at run time only when there is a file to look at

__all__ = [
    "MAIN_NAMES",
    "born_with",
    "filled_namespace",
    "guarded_names",
    "is_replica",
    "main_is_importable",
    "main_location",
    "mark_worker",
    "namespace",
]

#: `multiprocessing` calls the main module of a child by the second name, and makes each
#: name an alias of the other in ``sys.modules``.
MAIN_NAMES = frozenset({"__main__", "__mp_main__"})


class _State:
    # All fields are set by whoever comes first; a race computes the same value twice.
    module: ModuleType | None = None  # the __main__, and its __file__, of the next two
    file: Any = None
    importable: bool = False
    guarded: frozenset[str] = frozenset()
    replica: bool = False
    told: bool | None = None  # what mark_replica was told
    born_with: frozenset[str] = frozenset()


_state = _State()


def main_is_importable() -> bool:
    """Whether functions and classes of ``__main__`` can go by name."""
    module = sys.modules.get("__main__")
    # A worker's __main__ may get its file later, when the caller's script is run for its names.
    if module is not _state.module or getattr(module, "__dict__", {}).get("__file__") is not (
        _state.file
    ):
        _examine(module)
    return _state.importable


def guarded_names() -> frozenset[str]:
    """Names of an importable ``__main__`` that only its guarded block defines."""
    main_is_importable()
    return _state.guarded


def main_location() -> tuple[str, str] | None:
    """Return ``("path", p)``, ``("name", modname)``, or None when there is no file to run again."""
    module = sys.modules.get("__main__")
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
    """The globals of this process's ``__main__``."""
    return sys.modules["__main__"].__dict__


def filled_namespace() -> dict[str, Any]:
    """The same, once the caller's script was run here for its names.

    A worker may put that off until somebody asks its ``__main__`` for a name.
    """
    module = sys.modules["__main__"]
    getattr(module, "xpool_asks_for_any_name", None)
    return module.__dict__


def mark_worker(importable: bool | None = None) -> None:
    """Say that this process is a worker, whose ``__main__`` follows that of its parent.

    Args:
        importable: whether ``__main__`` here is the caller's own file, run again.  None:
            found out as in the caller's process.
    """
    _state.replica = True
    _state.told = importable
    _state.module = None
    _state.born_with = frozenset(namespace())


def is_replica() -> bool:
    """Whether `mark_replica` was called in this process."""
    return _state.replica


def born_with(name: str) -> bool:
    """Whether the replica's ``__main__`` had this name when it was marked."""
    return name in _state.born_with


def _examine(module: ModuleType | None) -> None:
    importable, guarded = False, frozenset[str]()
    location = main_location()
    if location is not None:
        kind, where = location
        if kind == "name":
            # A worker that was itself started by `python -m` runs a runner, not a program.
            runner = where.partition(".")[0] in ("xpool", "multiprocessing")
            importable = not (runner and _state.replica)
            source = getattr(module, "__file__", None)
        else:
            source = where
        found = _guard_of(source) if isinstance(source, str) else None
        if found is not None:
            guarded = found
        if kind == "path":
            importable = found is not None
    if _state.replica and _state.told is not None:
        importable = _state.told
    _state.importable, _state.guarded = importable, guarded if importable else frozenset()
    _state.module = module
    _state.file = None if module is None else vars(module).get("__file__")


def _guard_of(path: str) -> frozenset[str] | None:
    """Names that only the guarded blocks of a file define; None when it has no guard."""
    import ast

    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    guards: list[ast.If] = []
    inside: set[str] = set()
    outside: set[str] = set()
    for node in _top_level(tree.body, guards):
        outside.update(_bound_by(node))
    for guard in guards:
        for node in _top_level(guard.body, []):
            inside.update(_bound_by(node))
        for node in _top_level(guard.orelse, []):
            outside.update(_bound_by(node))
    return frozenset(inside - outside) if guards else None


def _top_level(body: list[ast.stmt], guards: list[ast.If]) -> Iterator[ast.stmt]:
    """Statements that run when the module runs, guarded blocks apart."""
    import ast

    for node in body:
        if isinstance(node, ast.If) and _is_guard(node.test):
            guards.append(node)
            continue
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(node, name, []), guards)
        for handler in getattr(node, "handlers", []):
            yield from _top_level(handler.body, guards)
        for case in getattr(node, "cases", []):
            yield from _top_level(case.body, guards)


def _is_guard(test: ast.expr) -> bool:
    import ast

    for node in ast.walk(test):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq):
            continue
        sides = [node.left, *node.comparators]
        names = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
        mains = any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)
        if names and mains:
            return True
    return False


def _bound_by(node: ast.stmt) -> Iterator[str]:
    import ast

    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    else:
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id
