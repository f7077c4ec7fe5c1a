"""The globals of ``__main__`` that functions use, sent before them.

A function of ``__main__`` sees in a worker the values that the program's globals had when its
call was made, whatever ran in that worker before; except what code in the worker set itself (an
initializer that says ``global model``): that stays until the program changes its own.

The sender looks, for each message that names something of ``__main__``, at the globals that lead on
from there: what functions and methods name is followed through other functions and classes.  Three
kinds need not travel, since the receiver has the same: what is not there, what goes by name and is
followed, and what the script's text says that running it makes (`source`).  A `_Plan` remembers the
outcome as long as these globals are the same objects.  All others are pickled again each time, for
they may have been changed in place.  Each has a serial number, another one whenever its bytes
changed, and a receiver sets it when the number is not that of the value that it set last.

A large value goes into shared memory, once for each pool (`broadcast`).  At each later message it
is pickled again, its buffers where they lie, and compared with what is there, byte for byte.

What cannot be pickled is left out.  Where the script's top level alone binds it, the receiver keeps
what its own run of the script made; else the name is unbound there, and a `NameError` about it says
why.

`globals_received` has the other side.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import itertools
import os
import pickle
import threading
import time
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable
from pickle import PickleBuffer
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from xpool._memory.arena import Block
from xpool._pickling import reducers
from xpool._pickling.by_value import main
from xpool._pickling.by_value.checks import Checks, is_final
from xpool._pickling.by_value.globals_received import KEEP, NONE, PLACE, VALUE, Entry, unwrap
from xpool._pickling.by_value.main import MAIN_NAMES, MISSING
from xpool._pickling.by_value.names import goes_by_name
from xpool._pickling.by_value.reads import reads
from xpool._pickling.pickler import write_global
from xpool._pickling.policy import Layout, in_block
from xpool._pickling.reducers import in_place
from xpool._python import at_fork
from xpool._python.hidden import CachedFunction
from xpool._python.interrupt import by_handler

__all__ = ["Book"]


class _Sent(NamedTuple):
    refer: Callable[[], Any]  # to the value: weak where that can be
    serial: int
    first: bool
    kind: int
    data: Any
    names: frozenset[str]

    @property
    def rest(self) -> tuple[int, bool, int, Any]:
        """What an `Entry` has after the name."""
        return self.serial, self.first, self.kind, self.data


class Book:
    """What the workers of one pool were told."""

    def __init__(self) -> None:
        self.told: frozenset[str] = frozenset()
        self.large: dict[str, _Sent] = {}


class _Outgoing:
    """Guarded by `_lock`."""

    def __init__(self) -> None:
        self.sender = os.urandom(16).hex()
        self.serials = itertools.count(1)
        self.sent: dict[str, _Sent] = {}
        self.anyone = Book()  # of messages to whom it may concern
        self.plans: dict[frozenset[str], _Plan] = {}
        self.checks = Checks()


# -- which globals have to travel ---------------------------------------------------------------


class _Plan(NamedTuple):
    values: dict[str, Any]  # the globals that it is about
    same: list[tuple[str, Any]]  # globals that need not travel while they are these objects
    owners: list[tuple[Any, list[int]]]  # classes and functions, with what their attributes are
    data: list[tuple[str, Any]]  # paths of globals that do, and of attributes with their owners
    names: frozenset[str]  # all that lead on from the first

    def holds(self) -> bool:
        """Whether every global is still what it was."""
        if main.namespace() is not self.values:
            return False
        get = self.values.get
        for name, value in self.same:
            if get(name, MISSING) is not value:
                return False
        for one, ids in self.owners:
            attributes = one.__dict__
            if len(attributes) != len(ids) or (ids and list(map(id, attributes.values())) != ids):
                return False
        return True


# Sets of names whose plans are remembered; when there are more, all are forgotten.
_PLANS = 256


def _quiet(names: set[str]) -> bool:
    """Whether it is known already that nothing has to go before a message that names these."""
    plan = _outgoing.plans.get(frozenset(names))
    return plan is not None and not plan.data and plan.holds()


def _plan(names: frozenset[str]) -> _Plan:
    # Without the lock: a plan is replaced as a whole, and never changed.
    plan = _outgoing.plans.get(names)
    if plan is None or not plan.holds():
        with _lock:
            if len(_outgoing.plans) >= _PLANS:
                _outgoing.plans.clear()
            plan = _outgoing.plans[names] = _make_plan(names)
    return plan


def _make_plan(names: frozenset[str]) -> _Plan:
    values, source = main.namespace(), main.source()
    same: list[tuple[str, Any]] = []
    owners: list[tuple[Any, list[int]]] = []
    data: list[tuple[str, Any]] = []
    seen, todo = set[str](), list(names)
    while todo:
        name = todo.pop()
        if name in seen or (name.startswith("__") and name.endswith("__")):
            continue
        seen.add(name)
        value = values.get(name, MISSING)
        if value is MISSING:
            same.append((name, value))
        elif source is not None and isinstance(value, _NAMED) and _is_named(name, value):
            same.append((name, value))
            owners.append((value, list(map(id, vars(value).values()))))
            todo += reads(value)
            data += [
                (f"{name}.{attribute}", value)
                for attribute, one in _attributes(value)
                if not source.makes(f"{name}.{attribute}", one)
            ]
        elif source is not None and source.makes(name, value):
            same.append((name, value))
        else:
            data.append((name, None))
    return _Plan(values, same, owners, data, frozenset(seen))


_NAMED = (FunctionType, type, CachedFunction)


def _is_named(name: str, value: Any) -> bool:
    return (
        value.__module__ in MAIN_NAMES and value.__qualname__ == name and bool(goes_by_name(value))
    )


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    """The attributes of a class or function that are data, as globals are."""
    if isinstance(owner, type) and (type(owner) not in (type, ABCMeta) or issubclass(owner, tuple)):
        return []  # what a metaclass keeps in its classes is its own affair
    found = []
    for name, value in list(vars(owner).items()):
        if isinstance(value, FunctionType):  # a method, unless something has put it there
            data = not value.__qualname__.startswith(f"{owner.__qualname__}.")
        else:
            data = not isinstance(value, type) and not hasattr(type(value), "__get__")
        if data and not name.startswith(("__", "_abc_")):
            found.append((name, value))
    return found


# -- sending ------------------------------------------------------------------------------------


def _collect(names: Iterable[str], layout: Layout) -> list[Entry]:
    """Return the globals of ``__main__`` that lead on from these and have to travel."""
    roots = frozenset(names)
    if not _plan(roots).data:
        return []
    values = main.namespace()
    book = layout.book or _outgoing.anyone
    found: dict[str, Entry] = {}
    leading = set[str]()  # those that name others
    with _lock:
        # What a receiver made of earlier ones may use them still: an initializer has put an
        # object into a global that is None here, and nothing leads on from there.
        pending = book.told if roots <= book.told else roots | book.told
        seen = pending
        while pending:
            plan = _plan(pending)
            seen, more = seen | plan.names, set[str]()
            for path, owner in plan.data:
                if path not in found:
                    value = _value(path, owner, values)
                    if value is not MISSING:
                        sent = _look(path, value, layout, book)
                        found[path] = Entry(path, *sent.rest)
                        more |= sent.names
                        if sent.names:
                            leading.add(path)
            pending = frozenset(more - seen)
        roots = frozenset(path.partition(".")[0] for path in found)
        if not roots <= book.told:
            book.told |= roots
    if len(found) == 1:
        return list(found.values())
    # Definitions first, for unpickling a value may call them, and what these may read before it;
    # attributes after their owners.
    kinds = (FunctionType, ModuleType, type)
    return sorted(
        found.values(),
        key=lambda entry: (
            "." in entry.name,
            not isinstance(values.get(entry.name), kinds),
            entry.name in leading,
        ),
    )


def _value(path: str, owner: Any, values: dict[str, Any]) -> Any:
    if owner is None:
        return values.get(path, MISSING)
    return vars(owner).get(path.partition(".")[2], MISSING)


_NEVER_CHANGE = frozenset({int, float, complex, str, bytes, bool, type(None), ModuleType})
_PLAIN = frozenset({dict, list, tuple, set, frozenset, bytearray}) | _NEVER_CHANGE


def _look(name: str, value: Any, layout: Layout, book: Book) -> _Sent:
    """Return what is to be sent of a global; its serial number is another if it has changed."""
    # First, whether it is known without pickling.
    large, sent = book.large.get(name), _outgoing.sent.get(name)
    if large is not None and large.refer() is value:
        return large
    if sent is not None and type(value) in _NEVER_CHANGE and sent.refer() is value:
        return sent
    # Else it is pickled, and compared with what was sent last.
    kind, data, names = VALUE, b"", frozenset[str]()
    try:
        if type(value) not in _PLAIN and _is_of_process(value) and _only_top_level(name):
            raise TypeError(f"each process has a {type(value).__name__} of its own")
        begun = time.perf_counter()
        place, data, names = _pickled(value, layout, large)
    except Exception as error:  # of any object's own __reduce__
        if by_handler(error):
            raise
        # A pool says so itself.  A worker has, as a fork would, what was there before it.
        itself = isinstance(error, NotImplementedError) and main.source() is not None
        alone = itself or _only_top_level(name)
        kind = KEEP if alone or "." in name else NONE
        data = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        if sent is not None and sent.kind == kind and sent.refer() is value:
            return sent
    else:
        if large is not None and place is large.data:
            seconds = time.perf_counter() - begun
            _outgoing.checks.took(name, place.nbytes, seconds)
            return large
        if place is not None:
            kind, data = PLACE, place
        elif sent is not None and sent.kind == VALUE and sent.data == data:
            if type(value) in _NEVER_CHANGE:
                sent = _outgoing.sent[name] = sent._replace(refer=_reference(value))
            return sent
    # What may be changed in place is not held: its bytes are compared in any case.
    stays = type(value) in _NEVER_CHANGE or (kind == PLACE and is_final(name))
    refer = _reference(value) if stays or kind in (KEEP, NONE) else _nothing
    first = sent is None and large is None
    now = _Sent(refer, next(_outgoing.serials), first, kind, data, names)
    # A place is the pool's that it was made for; what is sent as bytes is the same for all.
    if kind == PLACE:
        book.large[name] = now
    else:
        book.large.pop(name, None)
        _outgoing.sent[name] = now
    return now


def _only_top_level(name: str) -> bool:
    """Whether the script's top level binds it, which a receiver runs too, and nothing else."""
    source = main.source()
    return source is not None and name not in source.rebound


def _nothing() -> Any:
    return MISSING


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # held, so that its identity stays its own
        return lambda: value


def _pickled(value: Any, layout: Layout, large: _Sent | None) -> tuple[Any, bytes, frozenset[str]]:
    """Pickle a global: where it lies if it is large, else its pickle; and the names it uses.

    The place is that of ``large`` where the same bytes lie there already.
    """
    written = write_global(value, True)
    if in_block(written.nbytes):
        if large is not None and written.lies_in(large.data.content()):
            return large.data, b"", large.names
        if layout.publisher is not None:
            place = layout.publisher(written.message, type(value).__name__)
            return place, b"", frozenset(written.names)
        written = write_global(value, False)
    return None, b"".join(written.chunks), frozenset(written.names)


def _is_of_process(value: Any) -> bool:
    """Whether an object is one that each process rather has for itself: it says where it is."""
    return any((base.__module__, base.__name__) in _OF_PROCESS for base in type(value).__mro__)


_OF_PROCESS = frozenset(
    {
        ("logging", "Logger"),  # its handlers are this process's
        ("random", "Random"),  # a copy would give all workers the same numbers
        ("numpy.random._generator", "Generator"),
        ("numpy.random.mtrand", "RandomState"),
    }
)


class _Prelude:
    """A pickle together with the globals that have to be set before it is loaded.

    ``exact``: the receiver sets these values, were it later ones that it has; for the messages of a
    pool, which may overtake each other.
    """

    def __init__(
        self,
        entries: list[Entry],
        body: bytes,
        buffers: list[PickleBuffer],
        shared: dict[int, Block],
        exact: bool,
    ) -> None:
        self.entries, self.body, self.buffers, self.exact = entries, body, buffers, exact
        self.shared = shared  # as of a pickler: `in_place` adds to it

    def __reduce__(self) -> Any:
        entries = []
        for entry in self.entries:
            if entry.kind == PLACE:
                token, about = entry.data.parts
                # Of a pickler it takes only what this has, too.
                buffer = None if token is None else in_place(self, token)  # type: ignore[arg-type]
                entry = entry._replace(data=(buffer, *about))
            entries.append(tuple(entry))
        return unwrap, (_outgoing.sender, self.exact, entries, self.body, *self.buffers)


class _Script:
    """What the codec asks about ``__main__``."""

    importable = staticmethod(main.main_is_importable)
    quiet = staticmethod(_quiet)

    def pickled_namespace(self, values: dict[Any, Any]) -> Any:
        return (main.namespace, ()) if values is main.namespace() else NotImplemented

    def preface(
        self,
        names: set[str],
        chunks: list[bytes],
        buffers: list[PickleBuffer],
        shared: dict[int, Block],
        layout: Layout,
    ) -> tuple[list[bytes], list[PickleBuffer]] | None:
        entries = _collect(names, layout)
        if not entries:
            return None
        body, exact = b"".join(chunks), layout.book is not None
        outer = list[PickleBuffer]()
        wrapped = _Prelude(entries, body, buffers, shared, exact)
        return [pickle.dumps(wrapped, 5, buffer_callback=outer.append)], outer


# Guards what was sent, plans and books; pickling, which runs the program's code, included: two
# threads must not give one value two numbers.  Re-entrant: that code may send something, too.
_lock = threading.RLock()
_outgoing = _Outgoing()
reducers.script = _Script()


at_fork.renew(globals(), _lock=threading.RLock, _outgoing=_Outgoing)  # a child counts for itself
