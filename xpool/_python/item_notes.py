"""Notes that tell which item of a map raised an exception.

The worker knows the item and its place in the chunk; the caller's process knows the chunk.  The
worker notes the place, which the caller's process replaces by the item's number.
"""

from __future__ import annotations

import reprlib
from typing import Any

_PLACE = "item of xpool, at +"
_SEVERAL = "raised for several items at once, by the same exception object"
_MOST = 8  # notes of one exception, which a program may raise many times


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict, self.maxset = 2, 4, 4, 4, 4

    def repr_instance(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", None)
        if type(x).__module__.partition(".")[0] in ("torch", "numpy", "jax") and shape is not None:
            # Their own reprs compute, for example on a device.
            return f"<{type(x).__name__} of shape {tuple(shape)}, {getattr(x, 'dtype', '')}>"
        return super().repr_instance(x, level)


_short = _Short()


def short(value: Any) -> str:
    """Return a repr of one line, at most about a hundred characters long."""
    try:
        text = " ".join(_short.repr(value).split())
    except Exception as exc:
        return f"<{type(value).__name__}, whose repr raised {type(exc).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."


def safe_repr(value: Any, most: int) -> str:
    """Return the repr of an object, cut to ``most`` characters; its class if the repr raises."""
    try:
        text = repr(value)
    except Exception as exc:
        text = f"<{type(value).__name__}, whose repr raised {type(exc).__name__}>"
    return text if len(text) <= most else f"{text[:most]}..."


_PLAIN = frozenset((bool, bytes, complex, float, int, str, type(None)))


def plain(value: Any) -> str:
    """Return the same as `short`, without running code of the value's class."""
    if type(value) is tuple and all(type(part) in _PLAIN for part in value):
        return short(value)
    return short(value) if type(value) in _PLAIN else f"<{type(value).__name__}>"


def note_item(exc: BaseException, item: Any, place: int = 0) -> None:
    """Note in ``exc`` which item, at which place in its chunk, raised it.  Called in the worker."""
    if type(exc).__setattr__ is not BaseException.__setattr__:
        return  # it may forbid attributes, and unpickling would then fail
    # `add_note` is missing in Python 3.10, and calls `__setattr__`.
    notes = exc.__dict__.setdefault("__notes__", [])
    if not isinstance(notes, list) or len(notes) >= _MOST:
        return
    for i, note in enumerate(notes):
        # Threads that raise one object: the caller could not tell the items apart.
        if isinstance(note, str) and note.startswith((_PLACE, _SEVERAL)):
            notes[i] = _SEVERAL
            return
    notes.append(f"{_PLACE}{place}: {short(item)}")


def without_places(text: str) -> str:
    """Return the text of a traceback without notes that have a place instead of a number."""
    return "".join(line for line in text.splitlines(True) if not line.startswith(_PLACE))


def number_item(exc: BaseException, first: int, label: str) -> None:
    """Replace the note's place by the item's number; ``first`` is the number of the first item."""
    notes = exc.__dict__.get("__notes__")
    if not isinstance(notes, list):
        return
    for i, note in enumerate(notes):
        if isinstance(note, str) and note.startswith(_PLACE):
            place, _, text = note.removeprefix(_PLACE).partition(": ")
            notes[i] = f"item {first + int(place)} of {label}: {text}"
