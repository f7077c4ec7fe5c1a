"""Functions that a worker calls when it first imports a module: seeds, the tracker, logging.

One finder, the first of the import system, finds these modules and wraps their loaders, which then
call the registered functions.  After the import, the finder ignores the module.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

IMPORTER = "<frozen importlib._bootstrap>"
"""The file of the code that runs an import, in frames and tracebacks."""

_waiting: dict[str, list[Callable[[Any], object]]] = {}


def when_imported(name: str, call: Callable[[Any], object]) -> None:
    """Call ``call(module)`` after the module's import, or now if it is imported already."""
    if name in sys.modules:
        call(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(call)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def is_initializing(namespace: dict[str, Any]) -> bool:
    """Whether the module with these globals is being imported."""
    return bool(getattr(namespace.get("__spec__"), "_initializing", False))


def child_prepares() -> bool:
    """Whether this is a child of `multiprocessing` that imports the program's main module."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_inheriting", False)


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system; leaves all other modules to the next finder."""
        if name not in _waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec)  # no `Loader`: importlib.abc imports much
            spec.loader = loader
        return spec


class _Loader:
    """Loads with the module's own loader, restores it, and calls the registered functions."""

    def __init__(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        self._own: Any = spec.loader
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Restored before the module's code runs, which may use its loader.
        module.__loader__ = self._spec.loader = self._own
        self._own.exec_module(module)
        # After the import: if it fails, the functions wait for the next try.
        for call in _waiting.pop(module.__name__, ()):
            call(module)
