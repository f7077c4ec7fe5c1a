"""Sends the globals of ``__main__`` that functions use, before the functions.

In a worker, a function of ``__main__`` sees the values that the program's globals had at the time
of its call, no matter which tasks the worker has run before.  There is one exception: if code in
the worker has set a global (an initializer with ``global model``), the worker keeps it until the
program changes its own.

For each message with functions or classes of ``__main__``, the sender finds the globals that these
use, directly or through other functions and classes.  Three kinds of globals are not sent, because
the receiver has the same: those that do not exist, functions and classes that are pickled by name,
and values that running the script's text surely makes (`source`).  A `_Plan` keeps this result as
long as these globals are the same objects.  All others are pickled again for each message, because
they may have been changed in place.  Each has a serial number, which changes if its bytes change.
A receiver sets a global if the number differs from that of the value that it has set last.

A large value is put into shared memory, once for each pool (`broadcast`).  For each later message
it is pickled again, without copying its buffers, and compared with the shared bytes.

A value that cannot be pickled is left out.  If only the script's top level binds it, the receiver
keeps the value of its own run of the script.  Otherwise the name is unbound there, and the
`NameError` says why.

`globals_received` is the receiver's side.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import atexit
import itertools
import os
import pickle
import threading
import time
import weakref
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from pickle import PickleBuffer
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

from xpool._memory.holds import Block
from xpool._pickling import reducers
from xpool._pickling.by_value import checks, main
from xpool._pickling.by_value.globals_received import KEEP, NONE, PLACE, VALUE, SentGlobal, unwrap
from xpool._pickling.by_value.main import MAIN_NAMES, MISSING
from xpool._pickling.by_value.names import goes_by_name
from xpool._pickling.by_value.reads import reads
from xpool._pickling.pickler import write_global
from xpool._pickling.policy import INLINE_BELOW, Layout
from xpool._pickling.reducers import in_place
from xpool._python import at_fork
from xpool._python.hidden import CachedFunction
from xpool._python.interrupt import by_handler


class _Sent(NamedTuple):
    refer: Callable[[], Any]  # returns the value, by a weak reference if possible
    serial: int
    first: bool
    kind: int
    data: Any
    names: frozenset[str]

    @property
    def rest(self) -> tuple[int, bool, int, Any]:
        """The fields of a `SentGlobal` after the name."""
        return self.serial, self.first, self.kind, self.data


class Book:
    """The globals that were sent to the workers of one pool."""

    def __init__(self) -> None:
        self.told: frozenset[str] = frozenset()
        self.large: dict[str, _Sent] = {}


class _Outgoing:
    """The state of a sender, guarded by `_lock`."""

    def __init__(self) -> None:
        self.sender = os.urandom(16).hex()
        self.serials = itertools.count(1)
        self.sent: dict[str, _Sent] = {}
        self.anyone = Book()  # for messages that belong to no pool
        self.plans: dict[frozenset[str], _Plan] = {}


# -- finding the globals to send ----------------------------------------------------------------


class _Plan(NamedTuple):
    values: dict[str, Any]  # the namespace of the globals
    same: list[tuple[str, Any]]  # globals that are not sent as long as they are these objects
    owners: list[tuple[Any, list[int]]]  # classes and functions, with the ids of their attributes
    data: list[tuple[str, Any]]  # globals to send, and attributes to send with their owners
    names: frozenset[str]  # all names that functions and classes of the message use

    def holds(self) -> bool:
        """Whether all globals are still the same objects."""
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


_PLANS = 256  # the largest number of plans that are kept; if there are more, all are dropped


def _plan(names: frozenset[str]) -> _Plan:
    # Read without the lock, because a plan is never changed, only replaced.
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
        # A worker has its own `__x__`, but not those of a file that it does not run.
        reserved = name.startswith("__") and name.endswith("__")
        if name in seen or (reserved and (source is not None or name not in _OF_FILE)):
            continue
        seen.add(name)
        value = values.get(name, MISSING)
        if value is MISSING:
            same.append((name, value))
        elif source is not None and isinstance(value, _NAMED) and _is_named(name, value):
            same.append((name, value))
            todo += reads(value)
            for path, owner in _with_nested(name, value):
                owners.append((owner, list(map(id, vars(owner).values()))))
                data += [
                    (f"{path}.{attribute}", owner)
                    for attribute, one in _attributes(owner)
                    if not source.makes(f"{path}.{attribute}", one)
                ]
        elif source is not None and source.makes(name, value):
            same.append((name, value))
        else:
            data.append((name, None))
    return _Plan(values, same, owners, data, frozenset(seen))


_OF_FILE = frozenset({"__file__", "__doc__"})
_NAMED = (FunctionType, type, CachedFunction)
_PROTOCOL = type(Protocol)


def _is_named(name: str, value: Any) -> bool:
    return (
        value.__module__ in MAIN_NAMES and value.__qualname__ == name and bool(goes_by_name(value))
    )


def _with_nested(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield a function, or a class and the classes that are defined in it, with their paths."""
    yield path, owner
    if isinstance(owner, type):
        for name, one in list(vars(owner).items()):
            inner = f"{path}.{name}"
            if isinstance(one, type) and (one.__module__, one.__qualname__) == (
                owner.__module__,
                inner,
            ):
                yield from _with_nested(inner, one)


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a class or function that are data."""
    if isinstance(owner, type):
        kind = type(owner)
        known = kind in (type, ABCMeta, _PROTOCOL) or kind.__module__ in MAIN_NAMES
        if not known or issubclass(owner, tuple):
            return []  # attributes that a metaclass of a package keeps in its classes are not sent
    found = []
    for name, value in list(vars(owner).items()):
        if isinstance(value, FunctionType):  # a method, unless it was defined elsewhere
            data = not value.__qualname__.startswith(f"{owner.__qualname__}.")
        else:
            data = not isinstance(value, type) and not hasattr(type(value), "__get__")
        if data and not name.startswith(("__", "_abc_", "_is_protocol", "_is_runtime_protocol")):
            found.append((name, value))
    return found


# -- sending ------------------------------------------------------------------------------------


def _collect(names: Iterable[str], layout: Layout) -> list[SentGlobal]:
    """Return the globals that must be sent for these names: the names and all that they use."""
    roots = frozenset(names)
    if not _plan(roots).data:
        return []
    values = main.namespace()
    book = layout.book or _outgoing.anyone
    found: dict[str, SentGlobal] = {}
    leading = set[str]()  # those whose values use other globals
    with _lock:
        # The globals in `book.told` are checked, too, because a receiver may still use them: an
        # initializer may have put an object into a global that is None here.
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
                        found[path] = SentGlobal(path, *sent.rest)
                        more |= sent.names
                        if sent.names:
                            leading.add(path)
            pending = frozenset(more - seen)
        roots = frozenset(path.partition(".")[0] for path in found)
        if not roots <= book.told:
            book.told |= roots
    if len(found) == 1:
        return list(found.values())
    # Definitions come first, because unpickling a value may call them.  Values that use others come
    # after these, and attributes after their owners.
    kinds = (FunctionType, ModuleType, type)
    return sorted(
        found.values(),
        key=lambda entry: (
            "." in entry.name,
            not isinstance(values.get(entry.name), kinds),
            entry.name in leading,
            entry.name,  # so that the order is the same in each run of the program
        ),
    )


def _value(path: str, owner: Any, values: dict[str, Any]) -> Any:
    if owner is None:
        return values.get(path, MISSING)
    return vars(owner).get(path.rpartition(".")[2], MISSING)


_NEVER_CHANGE = frozenset({int, float, complex, str, bytes, bool, type(None), ModuleType})
_PLAIN = frozenset({dict, list, tuple, set, frozenset, bytearray}) | _NEVER_CHANGE


def _look(name: str, value: Any, layout: Layout, book: Book) -> _Sent:
    """Return the record to send of a global, with a new serial number if the global has changed."""
    # These cases need no pickling.
    large, sent = book.large.get(name), _outgoing.sent.get(name)
    if large is not None and large.refer() is value:
        return large
    if sent is not None and type(value) in _NEVER_CHANGE and sent.refer() is value:
        return sent
    # Otherwise pickle the value, and compare it with the pickle that was sent last.
    kind, data, names = VALUE, b"", frozenset[str]()
    try:
        if type(value) not in _PLAIN and _is_of_process(value) and _only_top_level(name):
            raise TypeError(f"each process has a {type(value).__name__} of its own")
        begun = time.perf_counter()
        place, data, names = _pickled(value, layout, large)
    except Exception as error:  # an object's `__reduce__` can raise any error
        if by_handler(error):
            raise
        # A pool raises NotImplementedError.  A worker keeps its own pool, as in a fork.
        itself = isinstance(error, NotImplementedError) and main.source() is not None
        alone = itself or _only_top_level(name)
        kind = KEEP if alone or "." in name else NONE
        if kind == KEEP and sent is None and type(value) in _LOCKS:
            checks.keeps_lock(name)
        data = f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        if sent is not None and sent.kind == kind and sent.refer() is value:
            return sent
    else:
        if large is not None and place is large.data:
            seconds = time.perf_counter() - begun
            checks.took(name, place.nbytes, seconds)
            return large
        if place is not None:
            kind, data = PLACE, place
        elif sent is not None and sent.kind == VALUE and sent.data == data:
            if type(value) in _NEVER_CHANGE:
                sent = _outgoing.sent[name] = sent._replace(refer=_reference(value))
            return sent
    # A mutable value needs no reference, because its bytes are compared each time.
    stays = type(value) in _NEVER_CHANGE or (kind == PLACE and checks.is_final(name))
    refer = _reference(value) if stays or kind in (KEEP, NONE) else _nothing
    first = sent is None and large is None
    now = _Sent(refer, next(_outgoing.serials), first, kind, data, names)
    if first and layout.arena is not None:
        checks.copies_shared(name, value)
    # A place belongs to one pool, but the bytes of a value are the same for all pools.
    if kind == PLACE:
        book.large[name] = now
    else:
        book.large.pop(name, None)
        _outgoing.sent[name] = now
    return now


def _only_top_level(name: str) -> bool:
    """Whether only the script's top level binds a global, so that the receiver binds it, too."""
    source = main.source()
    return source is not None and name not in source.rebound


def _nothing() -> Any:
    return MISSING


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # the type has no weak references
        return lambda: value


def _pickled(value: Any, layout: Layout, large: _Sent | None) -> tuple[Any, bytes, frozenset[str]]:
    """Pickle a global.  Return its place (None: it is small), its pickle, and the names it uses.

    If ``large`` has the same bytes, its place is returned.
    """
    written = write_global(value, True)
    if written.nbytes >= INLINE_BELOW:
        if large is not None and written.lies_in(large.data.content()):
            return large.data, b"", large.names
        if layout.publisher is not None:
            place = layout.publisher(written.message, type(value).__name__)
            return place, b"", frozenset(written.names)
        written = write_global(value, False)
    return None, b"".join(written.chunks), frozenset(written.names)


def _is_of_process(value: Any) -> bool:
    """Whether each process should have its own object of this type, such as a logger."""
    return any((base.__module__, base.__name__) in _OF_PROCESS for base in type(value).__mro__)


_OF_PROCESS = frozenset(
    {
        ("logging", "Logger"),  # its handlers belong to this process
        ("random", "Random"),  # with copies, all workers would draw the same numbers
        ("numpy.random._generator", "Generator"),
        ("numpy.random.mtrand", "RandomState"),
    }
)


_LOCKS = (type(threading.Lock()), type(threading.RLock()))


class _Prelude:
    """A pickle with the globals that must be set before it is loaded.

    With ``exact``, the receiver sets these values even if it has later ones.  It is true for the
    messages of a pool, because these may overtake each other.
    """

    def __init__(
        self,
        entries: list[SentGlobal],
        body: bytes,
        buffers: list[PickleBuffer],
        shared: dict[int, Block],
        exact: bool,
    ) -> None:
        self.entries, self.body, self.buffers, self.exact = entries, body, buffers, exact
        self.shared = shared  # as in a pickler: `in_place` adds to it

    def __reduce__(self) -> Any:
        entries = []
        for entry in self.entries:
            if entry.kind == PLACE:
                token, about = entry.data.parts
                # `in_place` needs only the attribute `shared` of a pickler.
                buffer = None if token is None else in_place(self, token)  # type: ignore[arg-type]
                entry = entry._replace(data=(buffer, *about))
            entries.append(tuple(entry))
        return unwrap, (_outgoing.sender, self.exact, entries, self.body, *self.buffers)


class _MainModule:
    """Answers the pickler's questions about ``__main__``."""

    importable = staticmethod(main.main_is_importable)

    def pickled_namespace(self, values: dict[Any, Any]) -> Any:
        """Reduce the globals of ``__main__``.  Return `NotImplemented` for any other dict."""
        return (main.namespace, ()) if values is main.namespace() else NotImplemented

    def preface(
        self,
        names: set[str],
        chunks: list[bytes],
        buffers: list[PickleBuffer],
        shared: dict[int, Block],
        layout: Layout,
    ) -> tuple[list[bytes], list[PickleBuffer]] | None:
        """Return a pickle that sets the needed globals first, or None if no global is needed."""
        entries = _collect(names, layout)
        if not entries:
            return None
        body, exact = b"".join(chunks), layout.book is not None
        outer = list[PickleBuffer]()
        wrapped = _Prelude(entries, body, buffers, shared, exact)
        return [pickle.dumps(wrapped, 5, buffer_callback=outer.append)], outer


# Guards `_outgoing`, plans and books.  Also held while values are pickled, so that two threads do
# not give one value two numbers.  Reentrant, because pickling runs code that may send an object.
_lock = threading.RLock()
_outgoing = _Outgoing()
reducers.script = _MainModule()


at_fork.renew(globals(), _lock=threading.RLock, _outgoing=_Outgoing)  # a child has its own numbers
# At its end, Python clears `__main__` while there is still a `sys.stdout`, unless others refer to
# its globals.
atexit.register(lambda: _outgoing.plans.clear())
