"""What the failure of a task needs, and is not imported before one: most programs never see any.

It is a fifth of all that a first pool would import.  By the time of the failure the process may
have no descriptor left, and a task may have emptied `sys.path`.  So one descriptor is kept for the
import and, in workers, the path as it was.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module

from xpool._python import at_fork

__all__ = ["kept_descriptor", "prepare", "ready"]

# `traceback` imports `tokenize` for the lines of a file (from Python 3.13 on only when it reads the
# first), and `unicodedata` for the width of a line that is not ASCII.
_MODULES = ("traceback", "tokenize", "unicodedata", "xpool._python.pool_errors")

_spare: int | None = None  # a descriptor; None: none is kept
_path: list[str] | None = None

# A child that was forked while another thread imports would wait for that import for ever.
_importing = threading.RLock()


def prepare(*, keep_path: bool) -> None:
    """Keep what it takes to import these modules later."""
    global _spare, _path
    if _spare is None and not all(name in sys.modules for name in _MODULES):
        _spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        _path = list(sys.path) if keep_path else None


def kept_descriptor() -> int | None:
    """Return the descriptor that this process keeps for the import."""
    return _spare


def ready() -> None:
    """Import what the failure of a task needs."""
    global _spare
    if _spare is None:
        return
    with _importing:
        spare, _spare = _spare, None
        if spare is None:
            return
        now = list(sys.path)
        if _path is not None:
            sys.path[:] = _path
        # One is enough: an import opens one file at a time.
        os.close(spare)
        try:
            for name in _MODULES:
                import_module(name)
        finally:
            if _path is not None:
                sys.path[:] = now


at_fork.at_fork(before=lambda: _importing.acquire(), in_parent=lambda: _importing.release())
at_fork.renew(globals(), _importing=threading.RLock)
