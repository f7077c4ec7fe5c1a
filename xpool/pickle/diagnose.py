"""Finding what in an object cannot be pickled, for the message of the error.

Runs only when pickling has failed.  It tries the parts of the object one by one and goes
down into the first that fails, a few levels deep.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from xpool.errors import TaskNotPicklable

__all__ = ["refusal"]

_busy = threading.local()  # set in a thread that is looking already

_LEVELS = 8
_PARTS = 100  # parts tried at each level


def refusal(obj: Any, error: BaseException, *, no_dill: bool = False) -> TaskNotPicklable:
    """The error to raise when nothing can pickle an object because of ``error``."""
    from xpool.pickle.pickler import fails

    path, culprit = "", obj
    if not isinstance(error, RecursionError) and not getattr(_busy, "looking", False):
        _busy.looking = True
        try:
            path, culprit = _descend(obj)
        finally:
            _busy.looking = False
        if culprit is not obj:
            error = fails(culprit) or error
    kind = type(culprit).__qualname__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    what = f"{article} {kind} object ({_repr(culprit)})"
    where = f" at {path.lstrip('.')}" if path else ""
    text = f"Cannot be sent to another process: {what}{where}: {error}."
    if no_dill:
        hint = "dill can pickle more than the standard library; it is not installed here."
    elif isinstance(error, RecursionError):
        hint = "The object is nested too deeply; send it in flatter form."
    elif isinstance(error, RuntimeError) and "inheritance" in str(error):
        hint = "Pass it in initargs= of the pool, or in args= of multiprocessing.Process."
    else:
        hint = _HINTS.get(kind, _HINT)
    refused = TaskNotPicklable(f"{text} {hint}")
    refused.__cause__ = error
    return refused


_HINT = (
    "Send plain data and rebuild the object in the worker, or give its class a __reduce__ method."
)
_HINTS = {
    "generator": "Send list(generator), or have the worker make the generator.",
    "lock": "Processes cannot share a thread's lock; make one in the worker's initializer.",
    "RLock": "Processes cannot share a thread's lock; make one in the worker's initializer.",
    "TextIOWrapper": "Send the file's path and open it in the worker.",
    "BufferedReader": "Send the file's path and open it in the worker.",
    "BufferedWriter": "Send the file's path and open it in the worker.",
    "coroutine": "Send the coroutine function and its arguments, and run it in the worker.",
}


def _repr(obj: Any) -> str:
    try:
        return reprlib.repr(obj)
    except Exception as error:  # a __repr__ that raises
        return f"whose repr raises {type(error).__name__}"


def _descend(obj: Any) -> tuple[str, Any]:
    from xpool.pickle.pickler import fails

    path = ""
    seen = {id(obj)}
    for _ in range(_LEVELS):
        for _, (label, part) in zip(range(_PARTS), _parts(obj), strict=False):
            if id(part) not in seen and fails(part):
                seen.add(id(part))
                path, obj = path + label, part
                break
        else:
            break
    return path, obj


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[{_repr(key)}]", value
            yield f".key {_repr(key)}", key
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, (set, frozenset)):
        for value in obj:
            yield ".element", value
    elif isinstance(obj, FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            try:
                yield f".{obj.__name__}'s variable {name!r}", cell.cell_contents
            except ValueError:  # it has no value yet
                continue
        for value in obj.__defaults__ or ():
            yield f".{obj.__name__}'s default", value
    elif isinstance(obj, MethodType):
        yield ".__self__", obj.__self__
    elif not isinstance(obj, type) and not _pickles_itself(type(obj)):
        for name in ("func", "args", "keywords"):
            if type(obj).__name__ == "partial":
                yield f".{name}", getattr(obj, name)
        yield from ((f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items())


def _pickles_itself(kind: type) -> bool:
    """Whether a class says what its state is: then its attributes need not be picklable."""
    return any("__getstate__" in vars(base) for base in kind.__mro__[:-1])
