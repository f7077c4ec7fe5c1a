"""Sets, in a worker, the globals of ``__main__`` that its parent has sent.

Only a replica (see `main`) sets globals, so a function that a worker sends back does not change the
caller's globals.  A worker accepts globals only from its first sender, which is its parent.

If code of the worker has set a global before the first value for it arrived, the worker keeps its
own.  It also keeps the value of its own run of the script if the first received value has the same
bytes, because other objects of the script refer to that value and may be compared by identity.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

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
from xpool._pickling.policy import INLINE_BELOW
from xpool._python import at_fork

VALUE, PLACE, KEEP, NONE = range(4)
"""Kinds of `SentGlobal`.  VALUE has a pickle, and PLACE the place of a large pickle.  KEEP has no
value, and the receiver keeps its own.  NONE has no value, because it cannot be sent."""


class SentGlobal(NamedTuple):
    """One global in a message."""

    name: str  # "rate", or "Config.rate" for an attribute of a class or of a function
    serial: int
    first: bool  # whether the program has not changed it since it was first sent
    kind: int
    data: Any  # the pickle, the place, or the reason why there is neither, in UTF-8


class _Incoming:
    """The state of a receiver, guarded by `_lock`."""

    def __init__(self) -> None:
        self.parent: str | None = None
        self.serials: dict[str, int] = {}
        # By global, the reason why its value was not sent.  Those in `left_none` are None here.
        self.missing: dict[str, str] = {}
        self.left_none: dict[str, str] = {}


def unwrap(sender: str, exact: bool, entries: list[Any], body: bytes, *buffers: Any) -> Any:
    """Set the globals that a worker's parent has sent, and load the pickle that needs them."""
    if main.is_replica():
        # The statements that act must run before the values are set.
        main.fill(main.TOP)
        found = [SentGlobal(*entry) for entry in entries]
        with _lock:
            if _incoming.parent is None:
                _incoming.parent = sender
            ours = _incoming.parent == sender
            if ours:
                main.settled.update(entry.name for entry in found if entry.kind != KEEP)
            for entry in found:
                if entry.kind == KEEP:
                    main.settled.discard(entry.name)
                # The order matters, because values may use earlier ones.
                main.fill(entry.name.partition(".")[0])
                if ours:
                    _take(entry, exact)
            if ours and exact and getattr(_heard, "entries", None) is not None:
                _heard.entries = found
    return pickle.loads(body, buffers=buffers)


_heard = threading.local()


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], list[SentGlobal]]]:
    """Record the globals of messages that this thread opens.  Yield a function that has them."""
    _heard.entries = []
    try:
        yield lambda: _heard.entries
    finally:
        _heard.entries = None


def retake(entries: list[SentGlobal]) -> None:
    """Set the globals of a function again if other messages have changed them."""
    serials = _incoming.serials
    for entry in entries:
        # Checked without the lock, because this runs for each call.  `_take` checks it again.
        if serials.get(entry.name) != entry.serial:
            with _lock:
                _take(entry, True)


def _take(entry: SentGlobal, exact: bool) -> None:
    name, serial = entry.name, entry.serial
    last = _incoming.serials.get(name)
    if last == serial or (last is not None and last > serial and not exact):
        return
    # Recorded first, so that a value that cannot be loaded is not tried again for each task.
    _incoming.serials[name] = serial
    try:
        _set(entry, last is None)
        main.forget_initial(name)
    except BaseException:
        # The task was stopped.  The next task with this value sets it.
        if last is None:
            del _incoming.serials[name]
        else:
            _incoming.serials[name] = last
        raise


def _set(entry: SentGlobal, is_new: bool) -> None:
    name, _, first, kind, data = entry
    holder, attribute = _place_of(name)
    if holder is None:
        return
    current = holder.get(attribute, MISSING)
    if is_new and current is not MISSING:
        initial = "." in name or main.is_initial(name, current)
        if first and not initial:
            return  # code in this worker has set it before
        if initial and kind == VALUE and _is_same(current, data):
            return  # other objects of the script may refer to this object
        if initial and kind == NONE and main.is_forked():
            return  # a fork has the program's value, which cannot be pickled
    if kind == KEEP and current is not MISSING:
        if current is None:
            _incoming.left_none[name] = data.decode("utf-8", "replace")
        return
    try:
        if kind == VALUE:
            # An object may be pickled by its own name, such as a TypeVar or a NewType.
            main.settled.discard(name)
            try:
                value = pickle.loads(data)
            finally:
                main.settled.add(name)
        elif kind == PLACE:
            token, _, _, place, _ = data
            value = place.load() if token is None else open_broadcast(*data)
        else:
            value, _incoming.missing[name] = MISSING, data.decode("utf-8", "replace")
    except Exception as error:  # an object's `__setstate__` can raise any error
        value = MISSING
        _incoming.missing[name] = f"{type(error).__name__} while it was loaded: {error}"
    if "." in name:
        if value is not MISSING:
            setattr(_owner_of(name), attribute, value)
    elif value is MISSING:
        holder.pop(name, None)
        main.missing.add(name)
    else:
        holder[name] = value
        main.missing.discard(name)
        _incoming.missing.pop(name, None)
        module = sys.modules["__main__"].__dict__
        # If `multiprocessing` has run the script, the module has a copy of the globals.
        if module is not holder:
            module[name] = value


def _place_of(name: str) -> tuple[Any, str]:
    """Return the namespace (or None) in which a path ends, and the last name of the path."""
    if "." not in name:
        return main.namespace(), name
    return getattr(_owner_of(name), "__dict__", None), name.rpartition(".")[2]


def _owner_of(path: str) -> Any:
    """Return the class or function with the attribute that a path names; None: it is not here."""
    root, *inner = path.split(".")[:-1]
    owner = main.namespace().get(root)
    for name in inner:
        owner = getattr(owner, "__dict__", {}).get(name)
    return owner


def _is_same(value: Any, data: bytes) -> bool:
    try:
        written = write_global(value, True)
    except Exception:  # an object's `__reduce__` can raise any error
        return False
    if written.nbytes >= INLINE_BELOW:
        return False
    return _as_of_caller(b"".join(written.chunks)) == _as_of_caller(data)


def _as_of_caller(data: bytes) -> bytes:
    """Return a pickle without its frame, with __main__ as the script's module, to compare it."""
    if data[2:3] == b"\x95":  # the opcode FRAME, before the length of the frame
        data = data[:2] + data[11:]
    return _MODULE_OF_GLOBAL.sub(b"\x8c\x08__main__\x94\\1", data)


# The opcodes of a global: twice SHORT_BINUNICODE and MEMOIZE (module, name), and STACK_GLOBAL.
_MODULE_OF_GLOBAL = re.compile(rb"\x8c\x0b__mp_main__\x94(\x8c.[^\x94]*\x94\x93)", re.DOTALL)


def missing_global(exc: BaseException) -> str | None:
    """Explain an error about a global that was not sent here, or return None for other errors."""
    if isinstance(exc, AttributeError):
        return _global_left_none(exc)
    name = getattr(exc, "name", None)
    if not isinstance(exc, NameError) or not isinstance(name, str):
        return None
    if name not in _incoming.missing:
        script = vars(sys.modules["__main__"]).get("_xpool_script")
        if script is None or not script.leaves_out(name):
            return None
        return (
            f"The global {name!r} of __main__ is computed by the script's top level, which a "
            "worker does not run again, and xpool has not found that this task's function uses it. "
            "Use it in that function, pass it as an argument, or make it in the initializer."
        )
    return (
        f"The global {name!r} of __main__ was not sent to this worker "
        f"({_incoming.missing[name]}). Make it in the initializer, or pass it as an argument."
    )


def _global_left_none(exc: AttributeError) -> str | None:
    """Explain an AttributeError of None in code that reads a global which is None only here."""
    trace = exc.__traceback__
    if not _incoming.left_none or trace is None or getattr(exc, "obj", exc) is not None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    names = set(trace.tb_frame.f_code.co_names)
    # "Config.pool" comes before "pool", because code that reads the first also has the second name.
    for path, reason in sorted(_incoming.left_none.items(), key=lambda one: "." not in one[0]):
        holder, attribute = _place_of(path)
        if names.issuperset(path.split(".")) and (holder or {}).get(attribute, exc) is None:
            return (
                f"The global {path!r} of __main__ is None in this worker, where only the script's "
                f"top level has run: the program's value could not be sent ({reason}). Make it in "
                "the initializer, or pass it as an argument."
            )
    return None


# Guards the received state, and the setting of globals.  Reentrant, because loading a value may
# load a message with other globals.
_lock = threading.RLock()
_incoming = _Incoming()


# A forked child may accept another sender than its parent did.
at_fork.renew(globals(), _lock=threading.RLock, _incoming=_Incoming)
