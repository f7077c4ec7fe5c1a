"""Calls functions when a worker first imports a module, for example to seed its generators.

A finder, which is the first one in `sys.meta_path`, finds these modules and wraps their loaders.
The wrapped loader calls the registered functions after the import.  From then on, the finder
ignores the module.

This module also keeps imports of other threads from stopping or spoiling a forked child: see
`imports_awaited`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeVar

from xpool._python.at_fork import at_fork

IMPORTER = "<frozen importlib._bootstrap>"
"""The file name, in frames and tracebacks, of the code that runs an import."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SYSTEM = ("importlib", "importlib._bootstrap", "importlib._bootstrap_external")
_waiting: dict[str, list[Callable[[Any], object]]] = {}
_before: list[Callable[[FrameType], object]] = []

_locks: dict[str, Callable[[], Any]] = vars(importlib)["_bootstrap"]._module_locks
"""Weak references to the locks of modules.  A thread owns the lock of a module it imports."""

_STILL, _LONGEST = 5.0, 60.0
"""Seconds without a begin or an end of an import, and in all, after which a fork waits no more."""

_waiting_codes: set[CodeType] = set()


def when_imported(name: str, call: Callable[[Any], object]) -> None:
    """Call ``call(module)`` after the module's first import, or now if it has been imported."""
    if name in sys.modules:
        call(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(call)
    _install()


def before_imports(call: Callable[[FrameType], object]) -> None:
    """Call ``call(frame)`` before each import of a module that is not loaded, from now on.

    The frame is that of the code that needs the module.
    """
    if call not in _before:
        _before.append(call)
    _install()


def _install() -> None:
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def is_initializing(namespace: dict[str, Any]) -> bool:
    """Whether the module with these globals is being imported."""
    return bool(getattr(namespace.get("__spec__"), "_initializing", False))


def child_prepares() -> bool:
    """Whether this is a child of `multiprocessing` that imports the program's main module."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_inheriting", False)


def search_path(entries: Iterable[Any]) -> list[str]:
    """Return the strings among the entries of `sys.path`, absolute except the empty one.

    The interpreter ignores other objects in it.  The interpreter looks for the folder of a relative
    entry once, and the program may have changed its working folder since then.
    """
    found = list[str]()
    for entry in entries:
        if isinstance(entry, str):
            known = getattr(sys.path_importer_cache.get(entry), "path", entry)
            # The empty one means the working folder at the time of each import.
            relative = entry and not os.path.isabs(entry)
            found.append(os.path.abspath(known) if relative else str(entry))
    return found


def waits(function: _Function) -> _Function:
    """Mark a function in which a thread waits for a pool: see `imports_awaited`."""
    _waiting_codes.add(function.__code__)
    return function


_kept: dict[int, set[str]] = {}
"""By the forking thread: the modules that its child keeps although another thread imports them."""


@contextlib.contextmanager
def imports_awaited() -> Iterator[None]:
    """Wait until no other thread imports a module.  A child that this thread forks in the block
    would have half of the module; the child forgets what is begun after the wait.

    A thread that waits for a pool in the code of a module that it imports is not waited for.  The
    same may be true of a thread that neither begins nor ends an import for `_STILL` seconds.  The
    child keeps their modules as they are.
    """
    begun, known, since = time.monotonic(), None, 0.0
    while True:
        imports, waiting = _imports_elsewhere()
        if not imports:
            break
        now = time.monotonic()
        if imports != known:
            known, since = imports, now
        if now - since > _STILL or now - begun > _LONGEST:
            break
        time.sleep(0.001)
    _kept[get_ident()] = {name for name, _ in (*imports, *waiting)}
    try:
        yield
    finally:
        del _kept[get_ident()]


def _imports_elsewhere() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return (module, thread) for what other threads import: those that run, those that wait."""
    locks = [lock for ref in _locks.copy().values() if _is_of_another(lock := ref())]
    held = [(lock.name, owner) for lock in locks if (owner := lock.owner) is not None]
    if not held:
        return [], []
    # Only the last frame: CPython 3.11 can crash if `f_back` is read while the thread runs.
    waiting = {
        thread for thread, frame in sys._current_frames().items() if frame.f_code in _waiting_codes
    }
    return (
        [one for one in held if one[1] not in waiting], [one for one in held if one[1] in waiting]
    )  # fmt: skip


def _is_of_another(lock: Any) -> bool:
    return lock is not None and lock.owner not in (None, get_ident())


def _forget_imports() -> None:
    """Free the locks of modules that the parent's other threads were importing.

    In this child these threads are gone, so who imports such a module would wait for ever.  The
    module stays as it was at the fork, or is forgotten: see `imports_awaited`.  What a thread
    imported for a pool is forgotten, too: the child's own pools import it anew.
    """
    kept = _kept.pop(get_ident(), None)
    found = {name: lock for name, ref in _locks.copy().items() if _is_of_another(lock := ref())}
    for_pools = {lock.owner for name, lock in found.items() if name.startswith("xpool.")}
    for name, lock in found.items():
        _locks.pop(name, None)
        # A module may have put any object in its place.
        namespace = getattr(sys.modules.get(name), "__dict__", {})
        unknown = kept is not None and name not in kept
        if is_initializing(namespace) and (unknown or (lock.owner in for_pools and _is_ours(name))):
            # If it is a package, its modules were imported meanwhile: no other code has them.
            for one in [one for one in sys.modules if f"{one}.".startswith(f"{name}.")]:
                del sys.modules[one]


def _is_ours(name: str) -> bool:
    # Modules of other libraries may be in C, and cannot be imported twice.
    return name.startswith("xpool.") or name.partition(".")[0] in sys.stdlib_module_names


at_fork(in_child=_forget_imports)


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module with registered functions.  The import system calls this."""
        for call in _before:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in _SYSTEM:
                frame = frame.f_back
            call(frame)
        if name not in _waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec)  # not derived from `Loader`: importlib.abc imports much
            spec.loader = loader
        return spec


class _Loader:
    """Loads with the module's own loader, restores this loader, and calls the functions."""

    def __init__(self, spec: ModuleSpec) -> None:
        assert spec.loader is not None
        self._own: Any = spec.loader
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # Restored now, because the module's code may use its loader.
        module.__loader__ = self._spec.loader = self._own
        self._own.exec_module(module)
        # If the import has failed, the functions stay registered for the next try.
        for call in _waiting.pop(module.__name__, ()):
            call(module)
