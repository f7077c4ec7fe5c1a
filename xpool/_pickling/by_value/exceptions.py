"""Pickles exceptions so that they load without code of their class, and so never fail to load.

If an exception cannot be unpickled, the reason is usually that the parameters of its ``__init__``
are not its ``args``.  Here only the ``__new__`` and ``__init__`` of its built-in base run, and the
attributes are set afterwards.
"""

from __future__ import annotations

import builtins
from typing import Any

from xpool import errors
from xpool._pickling import reducers
from xpool._pickling.by_value.own_objects import slots_of
from xpool._pickling.by_value.reads import in_python
from xpool._pickling.by_value.received import missing_global
from xpool._pickling.pickler import decode, encode
from xpool._pickling.reducers import Context
from xpool._python.failures import safe_repr
from xpool._python.interrupt import pass_on


def encode_exception(exc: BaseException, traceback_text: str) -> bytes | memoryview:
    """Pickle the exception of a task, with the worker's traceback.

    `decode` returns an exception of the same class whose ``__cause__`` is a `RemoteTraceback` with
    the text.  Attributes that cannot be pickled are left out.  If the class cannot be pickled,
    `decode` returns a `ResultNotPicklable` with the same cause.
    """
    cause = exc.__cause__
    # If a task of a nested pool has raised the error, the traceback of that pool's worker is first.
    if (
        hasattr(cause, "text")
        and isinstance(cause, errors.RemoteTraceback)
        and cause.text not in traceback_text
    ):
        traceback_text = f"{cause.text}\n{traceback_text}"
    missing = missing_global(exc) or _advice(exc)
    if missing:
        add_note(exc, missing)
        traceback_text = f"{traceback_text.rstrip()}\n{missing}\n"
    failure: BaseException | None = None
    for form in (_Raised(exc, traceback_text), _Raised(_Salvaged(exc), traceback_text)):
        try:
            data = encode(form, home=True)
            # Loaded as a test, because many exceptions can be pickled but not unpickled.
            if type(decode(data)) is type(exc):
                return data
        except Exception as error:  # the code of the class can raise any error
            failure = error
    if failure is None:
        failure = TypeError(f"{type(exc).__qualname__} is unpickled as another type")
    stand_in = errors.ResultNotPicklable(_text(failure), _text(exc))
    return encode(_Raised(stand_in, traceback_text), home=True)


_ADVICE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "builtins.AssertionError",
        ("daemonic processes are not allowed",),
        (
            "A task that starts processes of multiprocessing, as a DataLoader with num_workers "
            "does, needs a pool with is_daemon=False. Any task can make a pool of xpool."
        ),
    ),
    (
        "builtins.EOFError",
        ("EOF when reading a line",),
        "A worker has no standard input: ask in the program, and pass the answer on.",
    ),
    (
        "bdb.BdbQuit",
        ("",),
        (
            "A worker has no standard input for a debugger. Debug the function in the program, or "
            "in a ThreadPool."
        ),
    ),
    (
        "builtins.LookupError",
        ("unknown error handler name ", "unknown encoding: "),
        (
            "If the program has registered it, it was not sent to this worker. Register it by "
            "xpool.everywhere(codecs.register_error, ...), or codecs.register."
        ),
    ),
)
"""Errors of Python that have their cause in a worker: type, parts of the text, advice."""


def _advice(exc: BaseException) -> str:
    name = f"{type(exc).__module__}.{type(exc).__qualname__}"
    found = (
        advice
        for kind, parts, advice in _ADVICE
        if name == kind and any(part in str(exc) for part in parts)
    )
    return next(found, "")


def _text(obj: Any) -> Any:
    """Return an object that has the same repr as this one, for attributes that cannot be sent."""
    return _Text(safe_repr(obj))


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


def add_note(exc: BaseException, note: str) -> None:
    if hasattr(exc, "add_note"):
        exc.add_note(note)
    elif exc.args and isinstance(exc.args[0], str):
        exc.args = (f"{exc.args[0]}. {note}", *exc.args[1:])


class _Raised:
    """An object that is loaded as an exception with the worker's traceback."""

    def __init__(self, exc: BaseException | _Salvaged, text: str) -> None:
        self.exc, self.text = exc, text

    def __reduce__(self) -> Any:
        return _raised, (self.exc, self.text)


class _Salvaged:
    """An object that is loaded as an exception without the parts that cannot be pickled.

    It ignores the ``__reduce__`` of the exception's class.
    """

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc

    def __reduce__(self) -> Any:
        cls, args, state = _parts(self.exc)
        kept: tuple[Any, ...]
        if isinstance(self.exc, _GROUPS):
            kept = args[0], [_salvaged_member(member) for member in args[1]]
        else:
            kept = tuple(arg if _travels(arg) else str(_text(arg)) for arg in args)
        state = {name: value for name, value in state.items() if _travels(value)}
        return _rebuild, (cls, kept), state, None, None, _set


def _salvaged_member(exc: BaseException) -> Any:
    """Return the object that is pickled in place of an exception in a group."""
    for form in (exc, _Salvaged(exc)):
        if _travels(form):
            return form
    why = f"{type(exc).__qualname__} of a group cannot be pickled"
    return errors.ResultNotPicklable(_text(TypeError(why)), _text(exc))


def _travels(obj: Any) -> bool:
    try:
        decode(encode(obj, home=True))
    except Exception as exc:  # the object's own code can raise any error
        pass_on(exc)
        return False
    return True


def _raised(exc: BaseException, text: str) -> BaseException:
    _set(exc, {"__cause__": errors.RemoteTraceback(text)})
    return exc


def _set(exc: BaseException, state: dict[str, Any]) -> None:
    """Set attributes; the class may forbid it, as a frozen dataclass does."""
    for name, value in state.items():
        object.__setattr__(exc, name, value)


# -- exceptions anywhere in a message ---------------------------------------------------------

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on


def reduce_exception(pickler: Context, exc: BaseException) -> Any:
    """Reduce an exception whose class has an ``__init__``, ``__new__`` or ``__setattr__`` in
    Python, or slots, which its own ``__reduce__`` leaves out.  So does that of an AttributeError
    with a name, before Python 3.12.

    Leave all others to the pickler, because loading them calls no Python code.
    """
    cls = type(exc)
    # Not those of a NameError: Python would look for similar names in the frames of the receiver.
    named = isinstance(exc, AttributeError) and exc.name is not None
    sets = in_python(cls, "__setattr__")
    calls = sets or in_python(cls, "__init__") or in_python(cls, "__new__")
    if not (named or calls or slots_of(cls)):
        return NotImplemented
    if any(in_python(cls, name) for name in ("__reduce__", "__reduce_ex__", "__setstate__")):
        return NotImplemented
    cls, args, state = _parts(exc)
    reduced = _rebuild, (cls, args), state
    return (*reduced, None, None, _set) if sets else reduced


def _parts(exc: BaseException) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    reduced: Any = _built_in(type(exc), "__reduce__").__reduce__(exc)
    state = reduced[2] if len(reduced) > 2 and isinstance(reduced[2], dict) else {}
    args = tuple(reduced[1])
    if isinstance(exc, AttributeError):
        state = {"name": exc.name, **state}
    if isinstance(exc, _GROUPS):
        # The exception's class may have other args than the built-in class.
        group: Any = exc
        state, args = {"args": args, **state}, (group.message, list(group.exceptions))
    slots = {name: getattr(exc, name) for name in slots_of(type(exc)) if hasattr(exc, name)}
    return type(exc), args, {**state, **exc.__dict__, **slots}


def _built_in(cls: type, name: str) -> Any:
    """Return the first class of the MRO whose method of this name is not Python code."""
    return next(
        base
        for base in cls.__mro__
        if name in vars(base) and issubclass(base, BaseException) and not in_python(base, name)
    )


def _rebuild(cls: Any, args: tuple[Any, ...]) -> Any:
    exc = _built_in(cls, "__new__").__new__(cls, *args)
    try:
        _built_in(cls, "__init__").__init__(exc, *args)
    except TypeError:  # the built-in class needs other args
        BaseException.__init__(exc, *args)
    return exc


reducers.FOR_SUBCLASSES[BaseException] = reduce_exception
