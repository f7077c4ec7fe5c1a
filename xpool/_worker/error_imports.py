"""What a worker needs when a task fails, and does not import before that: most first tasks succeed.

A task may have taken all descriptors, or emptied `sys.path`, before it fails.  So one descriptor is
kept for these imports, and the path as it was.  Workers that are forked when the server has had a
moment of rest have all of this from there.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import TracebackType

__all__ = ["prepare", "ready", "text_of"]

_MODULES = ("traceback", "xpool._python.pool_errors")

_spare: int | None = None  # a descriptor; None: everything is imported
_path: list[str] = []


def prepare() -> None:
    """Keep what it takes to import these modules later; called before the first task."""
    global _spare, _path
    if _spare is None and not all(name in sys.modules for name in _MODULES):
        _spare, _path = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), list(sys.path)


def ready() -> None:
    """Import what the failure of a task needs."""
    global _spare
    if _spare is None:
        return
    spare, _spare = _spare, None
    now = list(sys.path)
    sys.path[:] = _path
    # One is enough: an import opens one file at a time.
    os.close(spare)
    try:
        for name in _MODULES:
            import_module(name)
    finally:
        sys.path[:] = now


def text_of(exc: BaseException, tb: TracebackType | None) -> str:
    """Return the traceback from ``tb`` on as text."""
    ready()
    from traceback import format_exception  # not at the top: that is what this module is for

    if isinstance(exc, ModuleNotFoundError):
        _say_where(exc)

    return "".join(format_exception(type(exc), exc, tb))


def _say_where(exc: ModuleNotFoundError) -> None:
    """Say on which host a module is missing, and what to do, if it is not the program's."""
    from xpool._pickling.by_value.exceptions import add_note
    from xpool._worker.context import current_worker

    try:
        host = current_worker().host
    except RuntimeError:  # it has not begun
        return
    if host:
        add_note(
            exc,
            f"On host {host}: the program's folder and path are not sent to hosts; bring the "
            "module there, by runtime_env= of xpool.ray.hosts() for one.",
        )
