"""Finds the part of an object that cannot be pickled, for the error's text.

This runs only after pickling has failed.  If a pickler has refused the object, the error is a
`TaskNotPicklable`, and this module tries the parts of the object one by one, a few levels deep, to
name the part that fails.  If the object's own code (``__reduce__``, ``__getstate__``) has raised,
it does not run again, and its exception is raised unchanged, as in the standard pool, with a note.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

from xpool._pickling.reducers import Refused
from xpool._python.failures import short
from xpool._python.interrupt import frames_of
from xpool.errors import TaskNotPicklable

_busy = threading.local()  # `looking` is true in a thread that is already searching

_LEVELS = 8
_PARTS = 100  # number of parts that are tried at each level


def refusal(
    obj: Any,
    error: BaseException,
    fails: Callable[[Any], BaseException | None],
    *,
    no_dill: bool = False,
) -> BaseException:
    """Return the error to raise for an object that cannot be pickled because of ``error``.

    Args:
        fails: tries to pickle a part of the object, and returns its error, or None.
        no_dill: whether dill is missing.
    """
    frame = foreign_frame(error)
    if frame is not None:
        return _noted(obj, error, frame)

    path, culprit = "", obj
    found = error.culprit if isinstance(error, Refused) else None
    if found is not None:
        path, culprit = path_to(obj, found), found
    # If the object is nested too deeply, all its parts fail for the same reason.  If the search
    # runs a `__reduce__` that itself pickles an object and fails, no second search begins.
    elif not isinstance(error, RecursionError) and not getattr(_busy, "looking", False):
        _busy.looking = True
        try:
            path, culprit = _descend(obj, fails)
        finally:
            _busy.looking = False
        precise = None if culprit is obj else fails(culprit)
        if precise is not None:
            precise.__context__ = None  # the error of the whole object, which says the same
            error = precise
    if isinstance(error, RecursionError) and _is_deep():
        return error  # the caller's own stack is too deep, and not the object
    kind = type(culprit).__qualname__
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    what = f"{article} {kind} object ({short(culprit)})"
    if no_dill:
        hint = "dill can pickle more than the standard library; it is not installed here."
    elif isinstance(error, RecursionError):
        hint = "The object is nested too deeply; send it in flatter form."
    elif isinstance(culprit, type) and type(culprit).__module__ != "_ctypes":
        hint = _DEFINED
    else:
        hint = _HINTS.get(kind, _HINT)
    path = path.lstrip(".")
    refused = TaskNotPicklable(_text(what, at(path), str(error), hint))
    refused.parts = what, path, str(error), hint
    refused.__cause__ = error
    return refused


def refused(culprit: Any, about: str, why: str, hint: str) -> TaskNotPicklable:
    """Return the error of a reducer for an object; `locate` adds the object's place."""
    what = about[:1].lower() + about[1:]
    error = TaskNotPicklable(_text(what, "", why, hint))
    error.parts, error.culprit = (what, "", why, hint), culprit
    return error


def locate(error: BaseException, obj: Any) -> None:
    """Let an error of `refused` say where in ``obj`` the refused object is."""
    culprit = getattr(error, "culprit", None)
    if not isinstance(error, TaskNotPicklable) or culprit is None or error.parts is None:
        return
    error.culprit = None  # the error may outlive it
    what, _, why, hint = error.parts
    path = path_to(obj, culprit).lstrip(".")
    error.parts = what, path, why, hint
    error.args = (_text(what, at(path), why, hint),)


def _is_deep() -> bool:
    """Whether the stack of this thread takes most of the recursion limit."""
    frame, depth = sys._getframe(), 0
    while (above := frame.f_back) is not None:
        frame, depth = above, depth + 1
    return depth > sys.getrecursionlimit() // 2


def _text(what: str, where: str, why: str, hint: str) -> str:
    return f"Cannot be sent to another process: {what}{where}: {why}. {hint}"


def at(path: str) -> str:
    """Return words for a path to a part of an object, such as ``[0].model``."""
    return f" at {path}" if path else ""


def say_where(error: BaseException, say: Callable[[str], str]) -> None:
    """Let an error of `refusal` say by other words where the object is.

    ``say`` gets the path to it, such as ``[1][0].model``, and returns words such as " in ...".
    """
    if isinstance(error, TaskNotPicklable):
        if error.parts is not None:
            what, path, why, hint = error.parts
            error.args = (_text(what, say(path), why, hint),)
        return
    cause = error.__cause__  # has the note before Python 3.11
    notes = getattr(error, "__notes__", cause.args if type(cause) is TaskNotPicklable else ())
    said = list(notes)
    for i, note in enumerate(notes):
        match = re.fullmatch(_NOTE, note) if isinstance(note, str) else None
        if match:
            where = say(match[2] or "")
            said[i] = f"{match[1]}{where}.{match[3] or ''}"
            # It contains a pool.
            if where and type(error) is NotImplementedError and len(error.args) == 1:
                error.args = (f"{error}. It is{where}",)
    if isinstance(notes, list):
        notes[:] = said
    elif cause is not None:
        cause.args = tuple(said)


def foreign_frame(error: BaseException) -> FrameType | None:
    """Return the first frame of an object's own code, or None if this has not raised the error."""
    below_pickler = False
    for frame in frames_of(error):
        module = frame.f_globals.get("__name__") or ""
        package = module.partition(".")[0]
        if package == "xpool" and frame.f_code.co_name not in _OWN_WAYS:
            # If a reducer of xpool calls a library, the library is not the object's own code.
            below_pickler = module in _PICKLERS
        elif below_pickler and package not in _MACHINERY:
            return frame
    return None


_PICKLERS = frozenset(
    {"xpool._pickling.pickler", "xpool._python.hidden", "xpool._pickling.by_value.own_objects"}
)
_MACHINERY = frozenset({"dill", "pickle", "copyreg"})
_OWN_WAYS = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")


def _noted(obj: Any, error: BaseException, frame: FrameType) -> BaseException:
    code = frame.f_code
    note = "It was raised while something was pickled for another process"
    if code.co_name in _OWN_WAYS and code.co_argcount:
        culprit = frame.f_locals.get(code.co_varnames[0])
        path = path_to(obj, culprit).lstrip(".")
        note = f"{note}: by {type(culprit).__qualname__}.{code.co_name}{at(path)}"
    note += "."
    if isinstance(error, RuntimeError) and "inheritance" in str(error):
        note += " Pass it in initargs= of the pool, or in args= of multiprocessing.Process."
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.__cause__ is None:  # before Python 3.11
        error.__cause__ = TaskNotPicklable(note)
    return error


# Only a text: to compile it takes as long as the import of this module.
_NOTE = (
    r"(It was raised while something was pickled for another process: by [\w.<>]+?)"
    r"(?: at (.+?))?\.( Pass it in .*)?"
)
_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})


def path_to(obj: Any, culprit: Any) -> str:
    """Return the path from an object to a part of it, without running their code, or "".

    The labels are made last, because making one takes as long as looking at ten parts.
    """
    above: dict[int, Any] = {id(obj): None}
    level = [] if obj is culprit else [obj]
    for _ in range(_LEVELS):
        below: list[Any] = []
        for one in level:
            for part in _contents(one):
                if id(part) in above or type(part) in _PLAIN:
                    continue
                above[id(part)] = one
                if part is culprit:
                    return _labels(part, above)
                below.append(part)
        level = below
    return ""


def _contents(obj: Any) -> Iterable[Any]:
    if type(obj) is dict:
        return obj.values()
    if type(obj) in (list, tuple, set, frozenset):
        return obj  # type: ignore[no-any-return]
    return [part for _, part in _parts(obj)]


def _labels(part: Any, above: dict[int, Any]) -> str:
    path = ""
    while (owner := above[id(part)]) is not None:
        path = next((label for label, one in _parts(owner) if one is part), "") + path
        part = owner
    return path


_HINT = (
    "Send plain data and rebuild the object in the worker, or give its class a __reduce__ method."
)
_LOCK = (
    "Processes cannot share a thread's lock; make one in the worker's initializer, or pass one of "
    "multiprocessing in initargs=."
)
_OF_FILES = dict.fromkeys(
    ("TextIOWrapper", "BufferedReader", "BufferedWriter", "BufferedRandom", "FileIO"),
    "Send the file's path and open it in the worker.",
)
_DEFINED = "Define the class in a module of its own: workers import it, and get no definition."

_HINTS = {
    "generator": "Send list(generator), or have the worker make the generator.",
    "lock": _LOCK,
    "RLock": _LOCK,
    **_OF_FILES,
    "module": "Make it with a name of its own, or put it into sys.modules under this name.",
    "WeakValueDictionary": _DEFINED,
    "WeakKeyDictionary": _DEFINED,
    "coroutine": "Send the coroutine function and its arguments, and run it in the worker.",
}


def _descend(obj: Any, fails: Callable[[Any], BaseException | None]) -> tuple[str, Any]:
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
    kind = type(obj)  # not `isinstance`: an object may say that it is of another class
    if issubclass(kind, dict):
        for key, value in obj.items():
            yield f"[{short(key)}]", value
            yield f".key {short(key)}", key
    elif issubclass(kind, (list, tuple)):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif issubclass(kind, (set, frozenset)):
        for value in obj:
            yield ".element", value
    elif kind is FunctionType:
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            try:
                yield f".{obj.__name__}'s variable {name!r}", cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
        for value in (*(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()):
            yield f".{obj.__name__}'s default", value
    elif kind is MethodType:
        yield ".__self__", obj.__self__
    elif issubclass(kind, type):
        for name, value in [*vars(obj).items()]:
            if type(value) is FunctionType:
                yield f".{name}", value
    elif not _pickles_itself(kind):
        for name in ("func", "args", "keywords"):
            if kind.__name__ == "partial":
                yield f".{name}", getattr(obj, name)
        yield from ((f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items())
        for name in getattr(kind, "__slots__", ()):
            if type(vars(kind).get(name)) is MemberDescriptorType and hasattr(obj, name):
                yield f".{name}", getattr(obj, name)


def _pickles_itself(kind: type) -> bool:
    """Whether a class defines its pickled state, so that its attributes need not be picklable."""
    # `object` does not count, although it has `__getstate__` since Python 3.11.
    return any("__getstate__" in vars(base) for base in kind.__mro__[:-1])
