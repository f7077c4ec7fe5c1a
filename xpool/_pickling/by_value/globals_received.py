"""Sets the globals of ``__main__`` in a worker that its parent has sent.

A process that is no replica sets none, so a function that a worker sends back does not change the
caller's globals.  A worker accepts globals from the first sender only, its parent.

A worker keeps a value that its own code made before the first one came.  At the first one, it also
keeps the value of its own run of the script if that pickles to the same bytes: other objects of the
script refer to that value, and may compare by identity.
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
from xpool._pickling.policy import INLINE_BELOW
from xpool._python import at_fork

VALUE, PLACE, KEEP, NONE = range(4)
"""The data of an entry: a pickle; the place of a large one; none, since the receiver keeps its own;
none, since it cannot be sent."""


class SentGlobal(NamedTuple):
    """One global in a message."""

    name: str  # "rate", or "Config.rate": an attribute of a class or of a function
    serial: int
    first: bool  # the program has not changed it since it was first sent
    kind: int
    data: Any  # the pickle, the place, or the reason why there is neither, in UTF-8


class _Incoming:
    """Guarded by `_lock`."""

    def __init__(self) -> None:
        self.parent: str | None = None
        self.serials: dict[str, int] = {}
        # Why values of the program are not here: of names that are missing, or that stayed None.
        self.missing: dict[str, str] = {}
        self.left_none: dict[str, str] = {}


def unwrap(sender: str, exact: bool, entries: list[Any], body: bytes, *buffers: Any) -> Any:
    """Set the globals that a worker's parent has sent, and load the pickle that needs them."""
    if main.is_replica():
        # First run the statements that act, then set the values.
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
                # In this order, since values may use earlier ones.
                main.fill(entry.name.partition(".")[0])
                if ours:
                    _take(entry, exact)
            if ours and exact and getattr(_heard, "entries", None) is not None:
                _heard.entries = found
    return pickle.loads(body, buffers=buffers)


_heard = threading.local()


@contextlib.contextmanager
def listening() -> Iterator[Callable[[], list[SentGlobal]]]:
    """Record the globals of a message that this thread opens; yield a function for them."""
    _heard.entries = []
    try:
        yield lambda: _heard.entries
    finally:
        _heard.entries = None


def retake(entries: list[SentGlobal]) -> None:
    """Set the globals of a function again if other messages have changed them."""
    serials = _incoming.serials
    for entry in entries:
        # Without the lock, since each call comes here; `_take` checks again under it.
        if serials.get(entry.name) != entry.serial:
            with _lock:
                _take(entry, True)


def _take(entry: SentGlobal, exact: bool) -> None:
    name, serial, first, kind, data = entry
    last = _incoming.serials.get(name)
    if last == serial or (last is not None and last > serial and not exact):
        return
    # Recorded first: a value that fails to load is not tried again for each task.
    _incoming.serials[name] = serial
    holder, attribute = _place_of(name)
    if holder is None:
        return
    current = holder.get(attribute, MISSING)
    if last is None and current is not MISSING:
        initial = "." in name or main.is_initial(name, current)
        if first and not initial:
            return  # code in this worker set it before its first value came, and it stays
        if initial and kind == VALUE and _is_same(current, data):
            return  # it stays the object that other objects of the script refer to
        # It cannot be pickled, but a fork has it from the program.
        if initial and kind == NONE and main.is_forked():
            return
    if kind == KEEP and current is not MISSING:
        if current is None:
            _incoming.left_none[name] = data.decode("utf-8", "replace")
        return
    try:
        if kind == VALUE:
            # Some objects are pickled by their own name: a TypeVar, a NewType.
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
    except Exception as error:  # of any object's own __setstate__
        value = MISSING
        _incoming.missing[name] = f"{type(error).__name__} while it was loaded: {error}"
    except BaseException:
        # The task was stopped meanwhile: the next task with this value loads it.
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
        main.missing.add(name)
    else:
        holder[name] = value
        main.missing.discard(name)
        _incoming.missing.pop(name, None)
        module = sys.modules["__main__"].__dict__
        # `multiprocessing` has copied the globals of its functions into the module.
        if module is not holder:
            module[name] = value


def _place_of(name: str) -> tuple[Any, str]:
    """Return the namespace that a path ends in, None if it does not exist, and the name there."""
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
    if written.nbytes >= INLINE_BELOW:
        return False
    return _as_of_caller(b"".join(written.chunks)) == _as_of_caller(data)


def _as_of_caller(data: bytes) -> bytes:
    """Return a pickle without its frame and with __main__ for the script's module, to compare."""
    if data[2:3] == b"\x95":  # FRAME, and the length of it
        data = data[:2] + data[11:]
    return _MODULE_OF_GLOBAL.sub(b"\x8c\x08__main__\x94\\1", data)


# As SHORT_BINUNICODE, MEMOIZE, the name as the same, and STACK_GLOBAL.
_MODULE_OF_GLOBAL = re.compile(rb"\x8c\x0b__mp_main__\x94(\x8c.[^\x94]*\x94\x93)", re.DOTALL)


def missing_global(exc: BaseException) -> str | None:
    """Explain an error about a global that could not be sent here; None: it is about another."""
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
    """Explain an AttributeError of None in code that reads a global which stayed None."""
    trace = exc.__traceback__
    if not _incoming.left_none or trace is None or getattr(exc, "obj", exc) is not None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    names = set(trace.tb_frame.f_code.co_names)
    # "Config.pool" before "pool": its names include that one.
    for path, reason in sorted(_incoming.left_none.items(), key=lambda one: "." not in one[0]):
        holder, attribute = _place_of(path)
        if names.issuperset(path.split(".")) and (holder or {}).get(attribute, exc) is None:
            return (
                f"The global {path!r} of __main__ is None in this worker, where only the script's "
                f"top level has run: the program's value could not be sent ({reason}). Make it in "
                "the initializer, or pass it as an argument."
            )
    return None


# Guards the received state, and the setting of globals.  Re-entrant, since loading a value may load
# a message with other globals.
_lock = threading.RLock()
_incoming = _Incoming()


# A forked child accepts another sender than its parent.
at_fork.renew(globals(), _lock=threading.RLock, _incoming=_Incoming)
