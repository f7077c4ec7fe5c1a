"""The globals of ``__main__`` that by-value functions use, sent before them.

All functions sent from one ``__main__`` share one dict in the receiver: its own
``__main__.__dict__``.  So an initializer that says ``global model`` is seen by the tasks
after it.  To make that hold in both directions, each name carries a serial number that the
sender counts up when the pickled bytes of its value change, and a replica sets a name only
when the number is higher than the last one it saw:

* what the sender changed reaches the workers with the next function;
* what a worker changed itself stays as it is until then.

A process that is no replica never takes anything, so a function that a worker sends back
does not touch the caller's globals.  A worker listens to the first sender it hears, its
parent: what comes back from workers of its own is not applied either.

A global that cannot be pickled is left out; the receiver keeps the reason, and a
`NameError` about it says so (`missing_global`).
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterable
from pickle import PickleBuffer
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from xpool.pickle import main

__all__ = ["Entry", "Prelude", "collect", "missing_global"]

_KEPT_BELOW = 1 << 16  # bytes; the pickles of larger globals are not kept


class Entry(NamedTuple):
    """One global on its way."""

    name: str
    serial: int  # 0: it cannot be pickled
    data: bytes  # the pickle, or the reason in UTF-8


class _Sent(NamedTuple):
    value: Any  # held, so that its identity stays its own; None when it is large
    identity: int
    serial: int
    digest: bytes
    data: bytes | None  # None: too large to keep
    names: frozenset[str]


class _Outgoing:
    """Guarded by `_lock`."""

    def __init__(self) -> None:
        self.sender = os.urandom(16).hex()
        self.sent: dict[str, _Sent] = {}


class _Incoming:
    """Guarded by `_lock`."""

    def __init__(self) -> None:
        self.parent: str | None = None
        self.serials: dict[str, int] = {}
        self.missing: dict[str, str] = {}


_lock = threading.RLock()
_outgoing = _Outgoing()
_incoming = _Incoming()


# -- sending ----------------------------------------------------------------------------------


def collect(names: Iterable[str]) -> list[Entry]:
    """Pickle these globals of ``__main__`` and, in turn, those that they use."""
    values = main.namespace()
    only = main.guarded_names() if main.main_is_importable() else None
    found: dict[str, Entry] = {}
    todo = sorted(names)
    with _lock:
        while todo:
            name = todo.pop()
            if name in found or name not in values or name.startswith("__"):
                continue
            if only is not None and name not in only:
                continue
            found[name], more = _entry(name, values[name])
            todo.extend(sorted(more))
        _follow_up(found, values)
    # Definitions first: unpickling a value may call them.
    kinds = (FunctionType, ModuleType, type)
    return sorted(found.values(), key=lambda entry: not isinstance(values.get(entry.name), kinds))


def _follow_up(found: dict[str, Entry], values: dict[str, Any]) -> None:
    """Add what was sent before, for what a receiver made of it may use it still.

    An initializer may have put an object of a class into a global there that is None here:
    then nothing leads from the function at hand to the globals that the class uses.
    """
    for name, sent in list(_outgoing.sent.items()):
        if name in found or name not in values:
            continue
        if id(values[name]) != sent.identity:
            found[name], _ = _entry(name, values[name])
        elif sent.data is not None:
            found[name] = Entry(name, sent.serial, sent.data)


def _entry(name: str, value: Any) -> tuple[Entry, Iterable[str]]:
    import hashlib

    from xpool.pickle.pickler import write_global

    sent = _outgoing.sent.get(name)
    unchanged = sent is not None and sent.value is value and isinstance(value, _NEVER_CHANGE)
    if unchanged and sent is not None and sent.data is not None:
        return Entry(name, sent.serial, sent.data), sent.names
    try:
        data, names = write_global(value)
    except Exception as error:  # of any object's own __reduce__
        reason = f"{type(error).__name__}: {error}"
        return Entry(name, 0, reason.encode("utf-8", "replace")), ()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    serial = 1 if sent is None else sent.serial + (sent.digest != digest)
    kept = data if len(data) < _KEPT_BELOW else None
    # A large value is not held either: the caller may want its memory back.
    held = value if kept is not None else None
    _outgoing.sent[name] = _Sent(held, id(value), serial, digest, kept, frozenset(names))
    return Entry(name, serial, data), names


_NEVER_CHANGE = (int, float, complex, str, bytes, type(None), ModuleType)


class Prelude:
    """A pickle together with the globals that have to be set before it is loaded."""

    def __init__(self, entries: list[Entry], body: bytes, buffers: list[PickleBuffer]) -> None:
        self.entries, self.body, self.buffers = entries, body, buffers

    def __reduce__(self) -> Any:
        entries = [tuple(entry) for entry in self.entries]
        return _unwrap, (_outgoing.sender, entries, self.body, *self.buffers)


# -- receiving --------------------------------------------------------------------------------


def _unwrap(sender: str, entries: list[Any], body: bytes, *buffers: Any) -> Any:
    if main.is_replica():
        with _lock:
            if _incoming.parent is None:
                _incoming.parent = sender
            if _incoming.parent == sender:
                for entry in entries:
                    _take(Entry(*entry))
    return pickle.loads(body, buffers=buffers)


def _take(entry: Entry) -> None:
    name = entry.name
    last = _incoming.serials.get(name)
    values = main.namespace()
    if entry.serial == 0:
        if name not in values:
            _incoming.missing[name] = entry.data.decode("utf-8", "replace")
        return
    if last is not None and entry.serial <= last:
        return
    _incoming.serials[name] = entry.serial
    if last is None and name in values and not main.born_with(name):
        return  # code that ran here made it before its first value came: that stays
    try:
        values[name] = pickle.loads(entry.data)
        _incoming.missing.pop(name, None)
    except Exception as error:  # of any object's own __setstate__
        _incoming.missing[name] = f"{type(error).__name__} while it was loaded: {error}"


def missing_global(exc: BaseException) -> str | None:
    """Explain a NameError about a global that could not be sent here; None for others."""
    name = getattr(exc, "name", None)
    if not isinstance(exc, NameError) or name not in _incoming.missing:
        return None
    return (
        f"The global {name!r} of __main__ was not sent to this worker "
        f"({_incoming.missing[name]}). Make it in the initializer, or pass it as an argument."
    )


def _after_fork() -> None:
    global _lock, _outgoing
    _lock = threading.RLock()  # another thread of the parent may have held the old one
    _outgoing = _Outgoing()  # this process counts for itself


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
