"""The by-value classes of this process and their tokens.

A class gets a token when it is first pickled by value.  The receiver of a definition first looks up
the token.  So a class that was sent comes back, or arrives a second time, as the same class.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from xpool._python import at_fork


class Definition:
    """A pickled definition.

    Args:
        version: greater than those of its classes.
        names: the globals of ``__main__`` that its methods use.
        classes: all by-value classes in it, with their versions.
        opened: its functions that may use globals which they do not name.
    """

    def __init__(
        self,
        version: int,
        blob: bytes,
        names: frozenset[tuple[str, str]],
        classes: dict[ClassEntry, int],
        opened: Iterable[Any] = (),
    ) -> None:
        self.version, self.blob, self.names, self.classes = version, blob, names, classes
        self.opened = [*map(weakref.ref, opened)]


class ClassEntry:
    """The record of one by-value class (or type variable)."""

    loaded = -1  # the version of the definition that was loaded last
    attributes: frozenset[str] = frozenset()  # attributes that the last state set
    changes = False  # whether parts of the class may be changed in place

    def __init__(self, token: str, ref: Callable[[], Any], own: bool) -> None:
        self.token = token
        self.ref = ref  # weak
        self.own = own  # whether it was defined here, so that received definitions never change it
        # The version of the class itself.  The owner raises it when the class changes.  -1 is lower
        # than any version, so `classes._fill` fills a received class.
        self.version = 0 if own else -1
        # By `recurse`: what the owner compares to detect a change of the class itself, and the
        # definition, which contains other classes, too.
        self.marks: dict[bool, Any] = {}
        self.definitions: dict[bool, Definition] = {}


lock = threading.RLock()
"""Guards the tables below, and the books of `sent`.  Held while a definition is written or loaded,
so that no thread sees an incomplete class, and while globals are pickled, so that two threads do
not give one value two numbers.  One lock for both: globals contain classes, and pickling runs code
of the program, perhaps of a finalizer, that may send globals while a definition is written.  For
the same reasons reentrant."""
_by_id: dict[int, ClassEntry] = {}
_by_token: dict[str, ClassEntry] = {}
_gone: deque[tuple[int, ClassEntry]] = deque()


def known(obj: Any) -> ClassEntry | None:
    """Return the record of a class, or None if it was never pickled by value."""
    # The key is the id, because a metaclass may define equality in any way.
    found = _by_id.get(id(obj))
    return found if found is not None and found.ref() is obj else None


def lookup(token: str) -> ClassEntry | None:
    found = _by_token.get(token)
    return found if found is not None and found.ref() is not None else None


def token_of(obj: Any) -> str:
    """Return the token of a class, and make one if it has none."""
    with lock:
        found = known(obj)
        return found.token if found else enter(obj, os.urandom(16).hex(), own=True).token


def _sweep() -> None:
    """Remove the entries of classes that are gone.  The caller holds the lock."""
    while _gone:
        key, entry = _gone.popleft()
        # The entries are compared, because the id may now belong to another class.
        if _by_id.get(key) is entry:
            del _by_id[key]
        if _by_token.get(entry.token) is entry:
            del _by_token[entry.token]


def enter(obj: Any, token: str, *, own: bool) -> ClassEntry:
    """Register a class under a token.  The caller holds the lock."""
    _sweep()
    key = id(obj)

    # `ending` is a parameter, since the globals may be None at the end of Python.
    def forget(_: weakref.ref[Any], ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            return
        _gone.append((key, entry))
        # This may run at any moment, so it must not wait.  The next `enter` sweeps, too.
        if lock.acquire(blocking=False):
            try:
                _sweep()
            finally:
                lock.release()

    ref: Callable[[], Any] | None = None
    with suppress(TypeError):  # type aliases have no weak references, but there are few
        ref = weakref.ref(obj, forget)
    entry = ClassEntry(token, ref or (lambda: obj), own)
    _by_id[key] = _by_token[token] = entry
    return entry


def shell(token: str, build: Callable[[], Any]) -> Any:
    """Return the class of a token.  If there is none, build and register it."""
    with lock:
        entry = lookup(token)
        cls = None if entry is None else entry.ref()
        if cls is None:
            cls = build()
            enter(cls, token, own=False)
        return cls


def forget_received_definitions() -> None:
    """Let definitions of received classes be written again.  The caller holds the lock."""
    for entry in _by_token.values():
        if not entry.own:
            entry.definitions = {}


def disown() -> None:
    """In a worker that was forked from the parent, accept definitions of the parent."""
    with lock:
        for entry in _by_token.values():
            entry.own = False


at_fork.renew(globals(), lock=threading.RLock)
