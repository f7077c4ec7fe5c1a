"""Globals of ``__main__`` as a worker takes them from its parent.

A process that is no replica never takes anything, so a function that a worker sends back does not
touch the caller's globals.  A worker listens to the first sender it hears, its parent.

What a worker keeps: a value that its own code made before the first one came; and, at the first,
what its run of the script made, if that pickles to the same bytes: other objects of the script hold
it too, and may compare by identity.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import contextlib
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xpool._pickling.by_value import main
from xpool._pickling.by_value.broadcast import open_broadcast
from xpool._pickling.by_value.main import MISSING
from xpool._pickling.pickler import write_global
from xpool._pickling.policy import in_block
from xpool._python import at_fork

__all__ = [
    "KEEP",
    "NONE",
    "PLACE",
    "VALUE",
    "Entry",
    "listening",
    "missing_global",
    "retake",
    "unwrap",
]

VALUE, PLACE, KEEP, NONE = range(4)
"""What an entry has: a pickle; where a large one lies; nothing, the receiver's own is as good;
nothing, since it cannot be sent."""


class Entry(NamedTuple):
    """One global on its way."""

    name: str  # "rate", or "Config.rate": an attribute of a class or of a function
    serial: int
    first: bool  # the program has not changed it since it was first looked at
    kind: int
    data: Any  # the pickle, the place, or in UTF-8 the reason why there is none


class _Incoming:
    """Guarded by `_lock`."""

    def __init__(self) -> None:
        self.parent: str | None = None
        self.serials: dict[str, int] = {}
        self.missing: dict[str, str] = {}


def unwrap(sender: str, exact: bool, entries: list[Any], body: bytes, *buffers: Any) -> Any:
    """Take the globals that a worker's parent has sent, and load what came with them."""
    if main.is_replica():
        # What acts comes first, and then the values.
        main.fill(main.TOP)
        found = [Entry(*entry) for entry in entries]
        with _lock:
            if _incoming.parent is None:
                _incoming.parent = sender
            ours = _incoming.parent == sender
            if ours:
                main.settle(entry.name for entry in found if entry.kind != KEEP)
            for entry in found:
                if entry.kind == KEEP:
                    main.unsettle(entry.name)
                # In this order: what is made here may use values that came before it.
                main.fill(entry.name.partition(".")[0])
                if ours:
                    _take(entry, exact)
            if ours and exact and getattr(_heard, "entries", None) is not None:
                _heard.entries = found
    return pickle.loads(body, buffers=buffers)


_heard = threading.local()


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], list[Entry]]]:
    """Note which globals come with a message that this thread opens; yields what returns them."""
    _heard.entries = []
    try:
        yield lambda: _heard.entries
    finally:
        _heard.entries = None


def retake(entries: list[Entry]) -> None:
    """Set the globals anew that came with a function, where other messages have set others."""
    serials = _incoming.serials
    for entry in entries:
        # Without the lock, for each call: `_take` looks again, with it.
        if serials.get(entry.name) != entry.serial:
            with _lock:
                _take(entry, True)


def _take(entry: Entry, exact: bool) -> None:
    name, serial, first, kind, data = entry
    last = _incoming.serials.get(name)
    if last == serial or (last is not None and last > serial and not exact):
        return
    # Noted whatever comes of it: one that cannot be loaded is not tried again for each task.
    _incoming.serials[name] = serial
    holder, attribute = _place_of(name)
    if holder is None:
        return
    current = holder.get(attribute, MISSING)
    if last is None and current is not MISSING:
        initial = "." in name or main.is_initial(name, current)
        if first and not initial:
            return  # code that ran here made it before its first value came: that stays
        if initial and kind == VALUE and _is_same(current, data):
            return  # and is still the object that other objects of the script hold
        # A fork has it from the program, though it cannot be pickled.
        if initial and kind == NONE and main.is_forked():
            return
    if kind == KEEP and current is not MISSING:
        return
    try:
        if kind == VALUE:
            # Some are pickled by their own name: a TypeVar, a NewType.
            main.unsettle(name)
            try:
                value = pickle.loads(data)
            finally:
                main.settle([name])
        elif kind == PLACE:
            token, _, _, place, _ = data
            value = place.load() if token is None else open_broadcast(*data)
        else:
            value, _incoming.missing[name] = MISSING, data.decode("utf-8", "replace")
    except Exception as error:  # of any object's own __setstate__
        value = MISSING
        _incoming.missing[name] = f"{type(error).__name__} while it was loaded: {error}"
    except BaseException:
        # The task was stopped meanwhile: the next one that comes with it loads it.
        if last is None:
            del _incoming.serials[name]
        else:
            _incoming.serials[name] = last
        raise
    if "." in name:
        if value is not MISSING:
            setattr(main.namespace()[name.partition(".")[0]], attribute, value)
    elif value is MISSING:
        holder.pop(name, None)
        main.missing().add(name)
    else:
        holder[name] = value
        main.missing().discard(name)
        _incoming.missing.pop(name, None)
        module = sys.modules["__main__"].__dict__
        # `multiprocessing` has copied the globals of its functions into the module.
        if module is not holder:
            module[name] = value


def _place_of(name: str) -> tuple[Any, str]:
    """The namespace that a path ends in, None if there is none here; and the name there."""
    values = main.namespace()
    owner, dot, attribute = name.partition(".")
    if not dot:
        return values, name
    return getattr(values.get(owner), "__dict__", None), attribute


def _is_same(value: Any, data: bytes) -> bool:
    try:
        written = write_global(value, True)
    except Exception:  # of any object's own __reduce__
        return False
    if in_block(written.nbytes):
        return False
    return _as_of_caller(b"".join(written.chunks)) == _as_of_caller(data)


def _as_of_caller(data: bytes) -> bytes:
    """A pickle without its frame, in which classes that the script made here are the caller's."""
    if data[2:3] == b"\x95":  # FRAME, and the length of it
        data = data[:2] + data[11:]
    return _MODULE_OF_GLOBAL.sub(b"\x8c\x08__main__\x94\\1", data)


# As SHORT_BINUNICODE, MEMOIZE, the name as the same, and STACK_GLOBAL.
_MODULE_OF_GLOBAL = re.compile(rb"\x8c\x0b__mp_main__\x94(\x8c.[^\x94]*\x94\x93)", re.DOTALL)


def missing_global(exc: BaseException) -> str | None:
    """Explain a NameError about a global that could not be sent here; None for others."""
    name = getattr(exc, "name", None)
    if not isinstance(exc, NameError) or not isinstance(name, str):
        return None
    if name not in _incoming.missing:
        script = vars(sys.modules["__main__"]).get("_xpool_script")
        if script is None or not script.leaves_out(name):
            return None
        return (
            f"The global {name!r} of __main__ is computed by the script's top, which is not done "
            "again in a worker, and the function of this task does not lead to where it is read. "
            "Read it in that function, pass it as an argument, or make it in the initializer."
        )
    return (
        f"The global {name!r} of __main__ was not sent to this worker "
        f"({_incoming.missing[name]}). Make it in the initializer, or pass it as an argument."
    )


# Guards what was received, and the setting of globals.  Re-entrant: loading a value may load a
# message that brings others.
_lock = threading.RLock()
_incoming = _Incoming()


# Whose messages the parent hears does not concern a child.
at_fork.renew(globals(), _lock=threading.RLock, _incoming=_Incoming)
