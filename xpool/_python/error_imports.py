"""Imports the modules that a failed task needs, but only when the first task fails.

They would be a fifth of all imports of a first pool, and in most programs no task fails.  When a
task fails, the process may have no free descriptor, and a task may have emptied `sys.path`.  So
this module reserves one descriptor for the import and, in workers, saves `sys.path`.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from typing import Any

from xpool._python import at_fork

# `traceback` imports `tokenize` to read a file (before Python 3.13, at once), and `unicodedata` for
# the width of a line that is not ASCII.
_MODULES = ("traceback", "tokenize", "unicodedata", "xpool._python.pool_errors")

_spare: int | None = None  # the reserved descriptor
_path: list[str] | None = None

# Held during a fork: if another thread were importing, the child could wait for it for ever.
_importing = threading.RLock()


def prepare(*, keep_path: bool) -> None:
    """Reserve the descriptor for the later import and, with ``keep_path``, save `sys.path`."""
    global _spare, _path
    if _spare is None and not all(name in sys.modules for name in _MODULES):
        _spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        _path = list(sys.path) if keep_path else None


def kept_descriptor() -> int | None:
    """Return the descriptor that is reserved for the import, or None."""
    return _spare


def ready() -> Any:
    """Import the modules if this was not done yet; return `traceback`."""
    if _spare is not None:
        _import()
    return import_module("traceback")


def _import() -> None:
    global _spare
    with _importing:
        spare, _spare = _spare, None
        if spare is None:
            return
        now = list(sys.path)
        if _path is not None:
            sys.path[:] = _path
        # One descriptor is enough: an import opens one file at a time.
        os.close(spare)
        try:
            for name in _MODULES:
                import_module(name)
        finally:
            if _path is not None:
                sys.path[:] = now


at_fork.at_fork(before=lambda: _importing.acquire(), in_parent=lambda: _importing.release())
at_fork.renew(globals(), _importing=threading.RLock)
