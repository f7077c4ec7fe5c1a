"""What a failed task needs: the base of xpool's errors, modules for a traceback, notes on an item.

The modules are imported only when the first task fails: they would be a fifth of all imports of a
first pool, and in most programs no task fails.  When a task fails, the process may have no free
descriptor, and a task may have emptied `sys.path`.  So this module reserves one descriptor for the
import and, in workers, saves `sys.path`.

A note tells which item of a map, or batch of a loader, raised an exception.  The worker knows the
item and its place in the chunk, but only the caller's process knows the chunk's number.  So the
worker notes the place, and the caller's process replaces it by a number.
"""

from __future__ import annotations

import builtins
import multiprocessing
import os
import reprlib
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from xpool._python import at_fork
from xpool._python.interrupt import frames_of


# Here and not in `xpool.errors`, because this layer raises it, and `pool_errors` derives from it.
class XPoolError(Exception):
    """Base of all errors that xpool itself raises."""


class TimeoutError(multiprocessing.TimeoutError, builtins.TimeoutError):
    """The caller waited for ``timeout`` seconds without a result.

    This is a subclass of Python's own `TimeoutError` and of `multiprocessing.TimeoutError`.
    """


for _one in (XPoolError, TimeoutError):
    _one.__module__ = "xpool.errors"  # the public name, in pickles and tracebacks


# -- imports ---------------------------------------------------------------------------------------

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


# -- notes -----------------------------------------------------------------------------------------

_PLACE = "item of xpool, at +"
_SEVERAL = "raised for several items at once, by the same exception object"
_MOST = 8  # the largest number of notes: a program may raise one exception many times


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict, self.maxset = 2, 4, 4, 4, 4

    def repr_instance(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", None)
        if type(x).__module__.partition(".")[0] in ("torch", "numpy", "jax") and shape is not None:
            # The reprs of these packages compute, for example on a device.
            return f"<{type(x).__name__} of shape {tuple(shape)}, {getattr(x, 'dtype', '')}>"
        return super().repr_instance(x, level)


_short = _Short()


def short(value: Any) -> str:
    """Return a repr of one line with at most 100 characters."""
    text = " ".join(safe_repr(value, make=_short.repr).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def safe_repr(value: Any, most: int = sys.maxsize, make: Callable[[Any], str] = repr) -> str:
    """Return the repr of an object, cut to ``most`` characters, or its class if the repr raises."""
    try:
        text = make(value)
    except Exception as exc:
        text = f"<{type(value).__name__}, whose repr raised {type(exc).__name__}>"
    return text if len(text) <= most else f"{text[:most]}..."


_PLAIN = frozenset((bool, bytes, complex, float, int, str, type(None)))


def plain(value: Any) -> str:
    """Return the same as `short`, but run no code of the value's class."""
    if type(value) is tuple and all(type(part) in _PLAIN for part in value):
        return short(value)
    return short(value) if type(value) in _PLAIN else f"<{type(value).__name__}>"


def note_item(exc: BaseException, item: Any, place: int = 0) -> None:
    """Note in ``exc`` which item raised it, and the item's place in its chunk.

    This runs in the worker.
    """
    notes = _notes_of(exc)
    for i, note in enumerate(notes):
        # If threads raise the same object, the caller cannot distinguish the items.
        if isinstance(note, str) and note.startswith((_PLACE, _SEVERAL)):
            notes[i] = _SEVERAL
            return
    notes.append(f"{_PLACE}{place}: {short(item)}")


def note_loading(exc: BaseException) -> None:
    """Note in ``exc`` that the worker raised it before it called the function of its task."""
    story = "The function was not called: the worker raised this while it unpickled the task."
    if module := imported_module(exc):
        story += (
            f" For the task it imported {module}: the top of a module runs in each worker that "
            "needs it, with the present folder, sys.argv and environment."
        )
    _notes_of(exc).append(story)


def imported_module(exc: BaseException) -> str | None:
    """Return the name of the module whose top has raised an error; None: no top has."""
    name = None
    for frame in frames_of(exc):
        code, top = frame.f_code, frame.f_globals.get("__name__")
        # Neither a text that `exec` runs ("<string>"), nor a call that a worker repeats.
        if code.co_name == "<module>" and top != "__main__" and code.co_filename[:1] != "<":
            name = str(top)
    return name


def note_result(exc: BaseException) -> None:
    """Note in ``exc`` that unpickling a result has raised it."""
    _notes_of(exc).append(
        "The task has run: the program raised this while it unpickled the result."
    )


def note_batch(exc: BaseException, number: int, indices: Any) -> None:
    """Note in ``exc`` which batch of a loader raised it."""
    note = f"batch {number} (indices {safe_repr(indices, 400)})"
    notes = _notes_of(exc)
    if note not in notes:
        notes.append(note)


def _notes_of(exc: BaseException) -> list[Any]:
    """Return the list to which a note can be added, or a list of no use if there can be none."""
    if type(exc).__setattr__ is not BaseException.__setattr__:
        return []  # the class may forbid attributes; then unpickling would fail
    # `add_note` is missing in Python 3.10, and it calls `__setattr__`.
    notes = exc.__dict__.setdefault("__notes__", [])
    return notes if isinstance(notes, list) and len(notes) < _MOST else []


def without_places(text: str) -> str:
    """Return the text of a traceback without the notes that still have a place and no number."""
    return "".join(line for line in text.splitlines(True) if not line.startswith(_PLACE))


def number_item(exc: BaseException, first: int, label: str) -> None:
    """Replace the note's place by the item's number.  ``first`` is the first item's number."""
    notes = exc.__dict__.get("__notes__")
    if not isinstance(notes, list):
        return
    for i, note in enumerate(notes):
        if isinstance(note, str) and note.startswith(_PLACE):
            place, _, text = note.removeprefix(_PLACE).partition(": ")
            notes[i] = f"item {first + int(place)} of {label}: {text}"
