"""The settings of the process that travel with a task of the program's own functions.

A function in a worker computes with the program's default dtype, prints with its options and logs
by its levels, as if it ran in the program.  `TABLE` has one row for each setting: how it is read,
compared and set.  Random state is not in it: each worker has its own seed.

**The program's side.**  `snapshot` is called for each task, so it must find out within a few
microseconds that nothing has changed.  Each row has a *token*, which is cheap to read and is equal
as long as the setting is: often the value itself, else an object whose identity changes with it.
Only a row with another token is read.  A row has a serial number, another one for each change.
Rows with the value of a fresh worker are left out until they change for the first time.

**The worker's side.**  `receive` sets a row whose serial differs from that of the row set last.  So
what code of a worker has set itself stays until the program changes that row.  Environment
variables and loggers are rows within a row: only those that differ are changed.  A row that is
missing in a message has the value from before the first change.  A row of a library that the worker
has not imported is set after its import.

Not seen: `os.putenv`, a C library's own calls of ``setenv``, ``logger.level = n`` (its
documentation forbids it), functions in settings (`numpy.seterrcall`, formatters), `disabled` of a
logger until a level changes.  Inference mode arrives as a grad mode that is off.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import contextlib
import functools
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from xpool._python.at_fork import renew
from xpool._python.import_hooks import is_initializing, when_imported
from xpool._python.worker_local import process_is_shared


class Snapshot(NamedTuple):
    serial: int  # another one whenever a row differs from the last snapshot of this process
    rows: tuple[tuple[str, int, Any], ...]  # (name, serial of this row, value of built-in types)


class Row:
    """A setting.  ``module``: the library that has it; None: the interpreter.

    ``default``: the value in a fresh worker.  ``per_thread``: each thread has its own value.
    """

    name: str
    module: str | None = None
    default: Any = None
    per_thread = False

    def open(self, module: Any) -> Callable[[], Any]:
        """Return the function that reads the token."""
        raise NotImplementedError

    def keep(self, token: Any) -> Any:
        """Return a copy of the token that does not change with the setting."""
        return token

    def value(self, token: Any) -> Any:
        """Return the value that belongs to a kept token."""
        return token

    def is_fresh(self, value: Any) -> bool:
        """Whether a fresh worker has this value."""
        return bool(value == self.default)

    def before(self, module: Any) -> Any:
        """Return the value for messages without this row, before the first row is set."""
        # The default where it is known: a fork of the program may have another value already.
        fixed = self.default is not None or type(self) is _Line
        return self.default if fixed else self.value(self.keep(self.open(module)()))

    def set(self, module: Any, value: Any, last: Any) -> None:
        """Set the value; ``last``: the value set last, or None."""
        raise NotImplementedError


class _Line(Row):
    """A row that fits in a line: ``peek(module)`` returns the function that reads the token."""

    def __init__(
        self,
        name: str,
        module: str | None,
        default: Any,
        peek: Callable[[Any], Callable[[], Any]],
        set: Callable[[Any, Any], object],
        value: Callable[[Any], Any] | None = None,
        *,
        per_thread: bool = False,
    ) -> None:
        self.name, self.module, self.default, self.per_thread = name, module, default, per_thread
        self._peek, self._set, self._value = peek, set, value

    def open(self, module: Any) -> Callable[[], Any]:
        return self._peek(module)

    def value(self, token: Any) -> Any:
        return token if self._value is None else self._value(token)

    def set(self, module: Any, value: Any, last: Any) -> None:
        self._set(module, value)


class _Started(Row):
    """A row with which a worker is started: fresh is the value at the first snapshot."""

    _first: Any = ...

    def is_fresh(self, value: Any) -> bool:
        if self._first is ...:
            self._first = value
        return bool(value == self._first)


# -- of the process --------------------------------------------------------------------------------


def _variables() -> dict[bytes, bytes]:
    """Return all variables: `os.environ`'s own dict, whose comparison runs no Python code."""
    try:
        data = os.environ._data  # type: ignore[attr-defined]
        if type(data) is dict and os.name == "posix":
            found: dict[bytes, bytes] = data
            return found
    except AttributeError:  # the program has put another mapping in its place
        pass
    pairs = ((name, os.environ.get(name)) for name in list(os.environ))
    return {os.fsencode(name): os.fsencode(one) for name, one in pairs if one is not None}


class _Environ(Row):
    """The variables that differ from those at the first snapshot, as (name, now, then).

    A worker on another host has other variables, so only the changed ones are sent.
    """

    name, default = "os.environ", ()

    def __init__(self) -> None:
        self._then: dict[bytes, bytes] | None = None
        self.keeps: Collection[str] = ()  # names that belong to the worker

    def open(self, module: Any) -> Callable[[], Any]:
        return _variables

    def keep(self, token: Any) -> Any:
        return dict(token)

    def value(self, token: Any) -> Any:
        if self._then is None:
            self._then = token
        then, text = self._then, os.fsdecode
        return tuple(
            (text(name), *(None if one is None else text(one) for one in pair))
            for name in sorted({*token, *then})
            if (pair := (token.get(name), then.get(name)))[0] != pair[1]
        )

    def set(self, module: Any, value: Any, last: Any) -> None:
        had = {name: now for name, now, _ in last or ()}
        wanted = {name: then for name, _, then in last or ()}  # no longer changed in the program
        wanted.update((name, now) for name, now, _ in value)
        for name, one in wanted.items():
            if self._is_kept(name) or (name in had and had[name] == one):
                continue
            if one is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = one

    def _is_kept(self, name: str) -> bool:
        # A worker's context may name all variables with a prefix.
        return name in self.keeps or any(
            one.endswith("*") and name.startswith(one[:-1]) for one in self.keeps
        )


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


class _Folder(_Started):
    name = "working folder"

    def open(self, module: Any) -> Callable[[], Any]:
        return _cwd

    def set(self, module: Any, value: Any, last: Any) -> None:
        if value is not None and value != _cwd():
            os.chdir(value)


class _Path(_Started):
    """`sys.path`.  Entries that a worker has added itself stay, before or after the others."""

    name = "sys.path"

    def open(self, module: Any) -> Callable[[], Any]:
        return lambda: sys.path

    def keep(self, token: Any) -> Any:
        return list(token)

    def value(self, token: Any) -> Any:
        # The interpreter ignores entries of other types.
        return tuple(str(one) for one in token if isinstance(one, str))

    def set(self, module: Any, value: Any, last: Any) -> None:
        known = {*(last or ()), *value}
        common = next((at for at, one in enumerate(sys.path) if one in known), len(sys.path))
        own = [(at, one) for at, one in enumerate(sys.path) if one not in known]
        front = [one for at, one in own if at < common]
        sys.path[:] = [*front, *value, *(one for at, one in own if at > common)]


class _Umask(_Started):
    """The mask of new files, which can be read only by setting it.

    The first time it is 0o077 for a moment.  After that, the known mask is set again, so other
    threads see no difference as long as the program has not changed it.
    """

    name = "umask"

    def __init__(self) -> None:
        self._known: int | None = None

    def open(self, module: Any) -> Callable[[], Any]:
        umask = os.umask

        def peek() -> int:
            known = self._known
            now = umask(0o077 if known is None else known)
            if now != known:
                umask(now)
                self._known = now
            return now

        return peek

    def set(self, module: Any, value: Any, last: Any) -> None:
        os.umask(value)
        self._known = value


_zone = attrgetter("tzname", "timezone", "altzone", "daylight")


class _TimeZone(_Started):
    """The time zone in effect: that of ``TZ`` when the program called `time.tzset`."""

    name = "time zone"

    def open(self, module: Any) -> Callable[[], Any]:
        return functools.partial(_zone, time)

    def is_fresh(self, value: Any) -> bool:
        # The server of the workers may have started before TZ was set.
        if self._first is ... and "TZ" in os.environ:
            self._first = ()
        return super().is_fresh(value)

    def set(self, module: Any, value: Any, last: Any) -> None:
        if _zone(time) == value or not hasattr(time, "tzset"):
            return
        time.tzset()
        # Without TZ, it is the zone of the host.
        if "TZ" in os.environ and _zone(time) != value:
            raise ValueError(f"TZ={os.environ['TZ']!r} is {time.tzname}, not {value[0]}")


_CATEGORIES = ("LC_CTYPE", "LC_NUMERIC", "LC_TIME", "LC_COLLATE", "LC_MONETARY", "LC_MESSAGES")


class _Locale(Row):
    name, module = "locale", "locale"

    def open(self, module: Any) -> Callable[[], Any]:
        ask = getattr(sys.modules.get("_locale"), "setlocale", module.setlocale)
        numbers = [getattr(module, one) for one in _CATEGORIES if hasattr(module, one)]
        return lambda: (*map(ask, numbers),)  # one question about all of them takes twice the time

    def is_fresh(self, value: Any) -> bool:
        # Python itself sets LC_CTYPE at its start, to that of the environment.
        if self.default is None and all(one in ("C", "POSIX") for one in value[1:]):
            self.default = value
        return bool(value == self.default)

    def set(self, module: Any, value: Any, last: Any) -> None:
        for name, one in zip(_CATEGORIES, value):
            if module.setlocale(getattr(module, name)) != one:
                module.setlocale(getattr(module, name), one)


# -- warnings and logging --------------------------------------------------------------------------


def _of_warnings() -> list[Any]:
    """Return the filters in effect; from Python 3.14 on, a context may have its own."""
    warnings: Any = sys.modules["warnings"]
    found: list[Any] = warnings._get_filters() if _BY_CONTEXT else warnings.filters
    return found


_BY_CONTEXT = sys.version_info >= (3, 14)


def _pattern(one: Any) -> Any:
    return (one.pattern, one.flags) if isinstance(one, re.Pattern) else one


def _compiled(one: Any) -> Any:
    return re.compile(*one) if isinstance(one, tuple) else one


def _class(where: tuple[str, str]) -> Any:
    """Return the class with this module and name, or None; import nothing."""
    found: Any = sys.modules.get(where[0])
    for part in where[1].split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


class _Filters(Row):
    """The filters of warnings, as (action, message, category, module, line).

    A category is (module, name).  A filter whose category does not exist yet is added later.
    """

    name, module = "warning filters", "warnings"
    default = (
        ("default", None, ("builtins", "DeprecationWarning"), "__main__", 0),
        *(
            ("ignore", None, ("builtins", one), None, 0)
            for one in (
                "DeprecationWarning",
                "PendingDeprecationWarning",
                "ImportWarning",
                "ResourceWarning",
            )
        ),
    )

    def __init__(self) -> None:
        self._set: list[Any] = []  # all filters of the row; None: its category does not exist yet
        self.missing: dict[int, Any] = {}  # those, by their place
        self._order: list[Any] = []

    def open(self, module: Any) -> Callable[[], Any]:
        return _of_warnings

    def keep(self, token: Any) -> Any:
        return list(token)

    def value(self, token: Any) -> Any:
        return tuple(
            (action, _pattern(text), (kind.__module__, kind.__qualname__), _pattern(place), line)
            for action, text, kind, place, line in token
            if isinstance(kind, type) and "<" not in kind.__qualname__  # not made in a function
        )

    def before(self, module: Any) -> Any:
        return self.value(self.keep(self.open(module)()))  # packages have set some

    def set(self, module: Any, value: Any, last: Any) -> None:
        made, self.missing = [_made(one) for one in value], {}
        for at, one in enumerate(made):
            if one is None:
                self.missing[at] = value[at]
        self._set = made
        self._put([one for one in made if one is not None])
        for where in {one[2][0] for one in self.missing.values()}:
            if where not in sys.modules:
                when_imported(where, self.add_missing)

    def add_missing(self, module: object = None) -> None:
        """Add the filters whose categories exist now, before those that follow in the program."""
        for at in sorted(self.missing, reverse=True):
            made = _made(self.missing[at])
            if made is None:
                continue
            del self.missing[at]
            self._set[at] = made
            here = list(_of_warnings())
            if made in here:  # the module has added it itself
                here.remove(made)
            follow = (here.index(one) for one in self._set[at + 1 :] if one in here)
            here.insert(next(follow, len(here)), made)
            self._put(here)

    @staticmethod
    def _put(filters: list[Any]) -> None:
        # It also makes modules forget which warnings they have shown.
        sys.modules["warnings"].resetwarnings()
        _of_warnings()[:] = filters

    def note(self) -> None:
        """Remember the order, for `restore`."""
        if "warnings" in sys.modules:
            self._order = _of_warnings().copy()

    def restore(self) -> None:
        """Put the filters that were there at `note`, and are there now, back into their order."""
        if not self._order or self._order == (here := _of_warnings()):
            return
        order = iter([one for one in self._order if one in here])
        # New ones stay where they are.  A filter may be there twice.
        now = [next(order, one) if one in self._order else one for one in here]
        if next(order, None) is None and now != here:
            self._put(now)


def _made(one: Any) -> Any:
    action, text, where, place, line = one
    kind = _class(where)
    return None if kind is None else (action, _compiled(text), kind, _compiled(place), line)


_SEEN: Any = "seen by xpool"


class _Loggers(Row):
    """Levels, `propagate` and `disabled` of loggers that are not as made, and `logging.disable`.

    Each change of a level clears the caches of all loggers, so a mark in the root's cache tells
    whether there was one.  `propagate` is looked at each time.
    """

    name, module, default = "levels of loggers", "logging", (0, ())

    def __init__(self) -> None:
        self._pending: dict[str, tuple[int, bool, bool]] = {}  # loggers that do not exist yet
        self._made: dict[str, tuple[int, bool, bool]] = {}  # those that came since `note`
        # The result, and what the next look compares: the number of loggers, a function that
        # returns the placeholders, these, and the loggers that do not propagate, and that do.
        self._scan: Any = (None, -1, None, None, (), ())

    def open(self, module: Any) -> Callable[[], Any]:
        root = module.getLogger()
        loggers = root.manager.loggerDict
        cache = getattr(root, "_cache", {})  # without one, each look is a scan

        def peek() -> Any:
            # A placeholder may become a logger; loggers themselves stay.
            stamp, count, holders, held, others, plain = self._scan
            if _SEEN not in cache or len(loggers) != count or holders(loggers) != held:
                return None
            # In the interpreter, these loops take half the time of `map` with an `attrgetter`.
            for one in plain:
                if one.handlers or not one.propagate:
                    return None
            for one, propagate, handlers in others:
                if one.propagate is not propagate or one.handlers != handlers:
                    return None
            return stamp

        return peek

    def keep(self, token: Any) -> Any:
        logging: Any = sys.modules["logging"]
        root = logging.getLogger()
        # Before levels are read, so that a change meanwhile is found the next time.
        getattr(root, "_cache", {})[_SEEN] = True
        found = dict(root.manager.loggerDict)
        real = {name: one for name, one in found.items() if isinstance(one, logging.Logger)}
        ways = {name: _way_of(one) for name, one in real.items()}
        rows = [(name, *way) for name, way in sorted(ways.items()) if way != _AS_MADE]
        of_root = _way_of(root)
        if of_root != (logging.WARNING, *_AS_MADE[1:]):
            rows.insert(0, ("", *of_root))
        stamp = (object(), (root.manager.disable, tuple(rows)))
        holders = [name for name in found if name not in real]
        self._scan = (
            stamp,
            len(found),
            itemgetter(*holders) if holders else lambda _: None,
            itemgetter(*holders)(found) if holders else None,
            [
                (one, one.propagate, list(one.handlers))
                for one in (root, *real.values())
                if not one.propagate or one.handlers
            ],
            [one for one in (root, *real.values()) if one.propagate and not one.handlers],
        )
        return stamp

    def value(self, token: Any) -> Any:
        return token[1]

    def before(self, module: Any) -> Any:
        return self.value(self.keep(self.open(module)()))  # packages have set some

    def set(self, module: Any, value: Any, last: Any) -> None:
        had = {name: tuple(way) for name, *way in (last or self.default)[1]}
        now = {name: tuple(way) for name, *way in value[1]}
        if value[0] != (last or self.default)[0]:
            module.disable(value[0])
        manager = module.getLogger().manager
        for name in {**had, **now}:
            default = (0 if name else module.WARNING, *_AS_MADE[1:])
            way: Any = now.get(name, default)
            if way == had.get(name, default):
                continue
            self._pending.pop(name, None)
            # Not made here: its package may use a class of its own.
            if not name or isinstance(manager.loggerDict.get(name), module.Logger):
                _set_logger(module.getLogger(name or None), way)
            elif way != default:
                self._pending[name] = way
        if self._pending and "getLogger" not in vars(manager):
            self._watch(manager)

    def _watch(self, manager: Any) -> None:
        """Set pending levels when their loggers are made, and parents before their children."""
        make, pending, made = manager.getLogger, self._pending, self._made

        def getLogger(name: str) -> Any:
            if pending and isinstance(name, str):
                parts = name.split(".")
                for one in itertools.accumulate(parts, lambda front, part: f"{front}.{part}"):
                    way = pending.pop(one, None)
                    if way is not None:
                        made[one] = way
                        _set_logger(make(one), way)
            return make(name)

        manager.getLogger = getLogger

    def note(self) -> None:
        """Forget the loggers that were made, for `restore`."""
        if self._made:
            self._made.clear()

    def restore(self) -> None:
        """Set the levels of loggers made since `note` again: their packages have set others."""
        for name, way in list(self._made.items()):
            _set_logger(sys.modules["logging"].getLogger(name), way)
        self.note()


_AS_MADE: tuple[Any, ...] = (0, True, False, (), ())
_OF_LOGGERS = frozenset(
    {"name", "level", "parent", "propagate", "handlers", "disabled", "filters", "manager", "_cache"}
)
_SIMPLE = (int, float, str, bytes, bool, type(None))


def _way_of(logger: Any) -> tuple[Any, ...]:
    """Return level, `propagate`, `disabled`, the handlers, and attributes of the program."""
    handlers = tuple(
        (type(one).__module__, type(one).__qualname__, _simple(one)) for one in logger.handlers
    )
    own = tuple(one for one in _simple(logger) if one[0] not in _OF_LOGGERS)
    return logger.level, bool(logger.propagate), bool(logger.disabled), handlers, own


def _simple(obj: Any) -> tuple[tuple[str, Any], ...]:
    """Return the attributes of an object that are numbers and texts."""
    return tuple((name, one) for name, one in list(vars(obj).items()) if type(one) in _SIMPLE)


def _set_logger(logger: Any, way: tuple[Any, ...]) -> None:
    level, logger.propagate, logger.disabled, handlers, own = way
    logger.setLevel(level)
    vars(logger).update(own)
    logging = sys.modules["logging"]
    theirs = [one for one in logger.handlers if not hasattr(one, "_xpool_of_program")]
    logger.handlers[:] = [_stand_in(logging, *one) for one in handlers] + theirs


def _stand_in(logging: Any, module: str, name: str, attributes: Any) -> Any:
    """Return an object that takes the place of a handler of the program, for code that looks for one.

    The program's handler gets the records (`xpool._worker.relay`).
    """

    class Handler(logging.Handler):  # type: ignore[misc, name-defined]
        _xpool_of_program = True

        @property
        def __class__(self) -> Any:
            found = getattr(sys.modules.get(module), name, None)
            return found if isinstance(found, type) else type(self)

        def handle(self, record: Any) -> bool:
            return False

    one = Handler()
    logging._handlers.pop(getattr(one, "name", None), None)
    one.__dict__.update(attributes)
    return one


# -- of libraries ----------------------------------------------------------------------------------

_context = attrgetter("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "traps")


class _Held(tuple[Any, ...]):
    """The fields of a context, whose traps are valid as long as it exists."""

    owner: Any


class _Decimal(Row):
    name, module, per_thread = "decimal context", "decimal", True
    default = (
        28,
        "ROUND_HALF_EVEN",
        -999999,
        999999,
        1,
        0,
        ("DivisionByZero", "InvalidOperation", "Overflow"),
    )

    def open(self, module: Any) -> Callable[[], Any]:
        get = module.getcontext
        return lambda: _context(get())

    def keep(self, token: Any) -> Any:
        owner = sys.modules["decimal"].getcontext().copy()
        held = _Held(_context(owner))
        held.owner = owner
        return held

    def value(self, token: Any) -> Any:
        *numbers, traps = token
        return (*numbers, tuple(sorted(one.__name__ for one, on in traps.items() if on)))

    def set(self, module: Any, value: Any, last: Any) -> None:
        here = module.getcontext()
        here.prec, here.rounding, here.Emin, here.Emax, here.capitals, here.clamp, traps = value
        for signal in list(here.traps):
            here.traps[signal] = signal.__name__ in traps


def _part(*names: str) -> Any:
    """Return what the first of these paths names in the loaded modules, or None.

    For facts of numpy and torch that have no public name; each caller has another way.
    """
    for path in names:
        where, _, name = path.partition(":")
        found = getattr(sys.modules.get(where), name, None)
        if found is not None:
            return found
    return None


def _np_errors(numpy: Any) -> Callable[[], Any]:
    # From numpy 2 on, each change makes a new object.
    variable = _part("numpy._core._ufunc_config:_extobj_contextvar")
    get: Callable[[], Any] = numpy.geterr if variable is None else variable.get
    return get


def _np_errors_value(token: Any) -> Any:
    return tuple(sorted(sys.modules["numpy"].geterr().items()))


class _NumpyPrint(Row):
    name, module, per_thread = "numpy print options", "numpy", True
    default = (
        ("edgeitems", 3),
        ("floatmode", "maxprec"),
        ("infstr", "inf"),
        ("legacy", False),
        ("linewidth", 75),
        ("nanstr", "nan"),
        ("precision", 8),
        ("sign", "-"),
        ("suppress", False),
        ("threshold", 1000),
    )

    def open(self, module: Any) -> Callable[[], Any]:
        # Newer versions make a new dict for each change.
        variable = _part("numpy._core.printoptions:format_options")
        get: Callable[[], Any] = module.get_printoptions if variable is None else variable.get
        return get

    def value(self, token: Any) -> Any:
        found = sys.modules["numpy"].get_printoptions()
        return tuple((name, found[name]) for name, _ in self.default if name in found)

    def set(self, module: Any, value: Any, last: Any) -> None:
        module.set_printoptions(**dict(value))


_printing = attrgetter("precision", "threshold", "edgeitems", "linewidth", "sci_mode")


def _set_torch_printing(torch: Any, value: Any) -> None:
    names = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
    torch.set_printoptions(**dict(zip(names, value)))


def _torch_printing(torch: Any) -> Callable[[], Any]:
    return functools.partial(_printing, _part("torch._tensor_str:PRINT_OPTS"))


def _torch_device(torch: Any) -> Callable[[], Any]:
    """Read the default device, which a mode on a stack has; usually the stack is empty."""
    depth = _part("torch._C:_len_torch_function_stack")

    def peek() -> Any:
        return depth() and device()

    def device() -> Any:
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._device import DeviceContext

        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, DeviceContext):
                return mode.device
        return 0

    return peek


def _matmul_precision(torch: Any) -> Callable[[], Any]:
    get = _part("torch._C:_get_float32_matmul_precision") or torch.get_float32_matmul_precision

    def peek() -> Any:
        try:
            return get()
        except RuntimeError:  # the program has used torch's newer interface, which excludes this
            return "highest"

    return peek


def _deterministic(torch: Any) -> Callable[[], Any]:
    mode = _part("torch._C:_get_deterministic_algorithms") or (
        torch.are_deterministic_algorithms_enabled
    )
    warns = _part("torch._C:_get_deterministic_algorithms_warn_only") or (
        torch.is_deterministic_algorithms_warn_only_enabled
    )
    return lambda: (mode(), warns())


def _cudnn(name: str) -> Callable[[Any], Callable[[], Any]]:
    def open(torch: Any) -> Callable[[], Any]:
        get: Any = _part(f"torch._C:_get_cudnn_{name}")
        return get or (lambda: getattr(torch.backends.cudnn, name))

    return open


def _set_cudnn(name: str) -> Callable[[Any, Any], object]:
    return lambda torch, value: setattr(torch.backends.cudnn, name, value)


def _digits(_: None) -> Callable[[], Any]:
    return getattr(sys, "get_int_max_str_digits", lambda: 4300)  # Python 3.10.0 to 3.10.6


_environ, _filters, _loggers = _Environ(), _Filters(), _Loggers()

TABLE: tuple[Row, ...] = (
    # Those of the process come first, in the order in which they are set: TZ before the time zone.
    _environ,
    _Folder(),
    _Path(),
    _Umask(),
    _TimeZone(),
    _Locale(),
    _filters,
    _loggers,
    _Line(
        "recursion limit",
        None,
        1000,
        lambda _: sys.getrecursionlimit,
        lambda _, value: sys.setrecursionlimit(value),
    ),
    _Line(
        "digits of int as str",
        None,
        4300,
        _digits,
        lambda _, value: getattr(sys, "set_int_max_str_digits", id)(value),
    ),
    _Line(
        "socket timeout",
        "socket",
        None,
        lambda socket: socket.getdefaulttimeout,
        lambda socket, value: socket.setdefaulttimeout(value),
    ),
    _Decimal(),
    _Line(
        "numpy error state",
        "numpy",
        (("divide", "warn"), ("invalid", "warn"), ("over", "warn"), ("under", "ignore")),
        _np_errors,
        lambda numpy, value: numpy.seterr(**dict(value)),
        _np_errors_value,
        per_thread=True,
    ),
    _NumpyPrint(),
    _Line(
        "torch default dtype",
        "torch",
        "float32",
        lambda torch: torch.get_default_dtype,
        lambda torch, value: torch.set_default_dtype(getattr(torch, value)),
        lambda token: str(token).partition(".")[2],
    ),
    _Line(
        "torch default device",
        "torch",
        None,
        _torch_device,
        lambda torch, value: torch.set_default_device(value),
        lambda token: str(token) if token else None,
        per_thread=True,
    ),
    _Line(
        "torch grad mode",
        "torch",
        True,
        lambda torch: torch.is_grad_enabled,
        lambda torch, value: torch.set_grad_enabled(value),
        per_thread=True,
    ),
    _Line(
        "torch deterministic algorithms",
        "torch",
        (False, False),
        _deterministic,
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    _Line(
        "torch float32 matmul precision",
        "torch",
        "highest",
        _matmul_precision,
        lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
    _Line(
        "torch.backends.cudnn.benchmark",
        "torch",
        False,
        _cudnn("benchmark"),
        _set_cudnn("benchmark"),
    ),
    _Line(
        "torch.backends.cudnn.deterministic",
        "torch",
        False,
        _cudnn("deterministic"),
        _set_cudnn("deterministic"),
    ),
    _Line(
        "torch print options",
        "torch",
        (4, 1000, 3, 80, None),
        _torch_printing,
        _set_torch_printing,
    ),
)

_ROWS = {row.name: row for row in TABLE}
_STARTED = TABLE[:4]  # those whose values a worker is started with


def _ready(name: str | None) -> bool:
    """Whether a library is imported, and not just being imported by another thread."""
    if name is None:
        return True
    module = sys.modules.get(name)
    return module is not None and not is_initializing(vars(module))


# -- the program's side ----------------------------------------------------------------------------


class _Source:
    """What is known of a row in the program.  Guarded by `_lock`."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.peek = row.open(sys.modules.get(row.module or ""))
        self.kept = row.keep(self.peek())
        self.first = self.value = row.value(self.kept)
        self.serial = 0  # of the value of a fresh worker, until it changes
        self._serials: dict[Any, int] = {}  # by value
        if not row.is_fresh(self.value):
            self._number()

    def look(self) -> None:
        token = self.peek()
        if token == self.kept:
            return
        self.kept = self._row.keep(token)
        value = self._row.value(self.kept)
        if value != self.value:
            self.value = value
            self._number()

    def _number(self) -> None:
        if not self._row.per_thread:
            self.serial = next(_serials)
            return
        # Threads with different values take turns: that is no change of the values.
        if len(self._serials) > _KNOWN:
            self._serials.clear()
        if self.value not in self._serials:
            self._serials[self.value] = next(_serials)
        self.serial = self._serials[self.value]


_KNOWN = 16  # the largest number of values, and of snapshots, that are kept


def _count() -> Any:
    # A worker may get rows of several processes in its life, so their numbers are different.
    return itertools.count((int.from_bytes(os.urandom(5), "big") << 20) + 1)


_lock = threading.RLock()  # guards the four below, and the worker's side
_serials = _count()
_sources: dict[str, _Source] = {}
_found: dict[tuple[int, ...], Snapshot] = {}
# Replaced as a whole, so that reading it needs no lock: functions that read the tokens, the tokens,
# the snapshot, and the libraries that were not imported.
_last: tuple[list[Any], list[Any], Snapshot, tuple[str, ...]] | None = None
renew(globals(), _lock=threading.RLock, _serials=_count)


def snapshot() -> Snapshot:
    """Return the present settings of this thread: the same object while nothing has changed."""
    if _last is not None:
        peeks, kept, found, awaited = _last
        try:
            if [peek() for peek in peeks] == kept and (
                not awaited or sys.modules.keys().isdisjoint(awaited)
            ):
                return found
        except Exception:  # another thread has replaced what a token refers to
            pass
    return _look()


def _look() -> Snapshot:
    global _last
    with _lock:
        for row in TABLE:
            source = _sources.get(row.name)
            if source is not None:
                with contextlib.suppress(Exception):  # it cannot be read now: its value stays
                    source.look()
            elif _ready(row.module):
                _sources[row.name] = _Source(row)
        rows = tuple(
            (row.name, source.serial, source.value)
            for row in TABLE
            if (source := _sources.get(row.name)) is not None and source.serial
        )
        key = tuple(serial for _, serial, _ in rows)
        found = _found.get(key)
        if found is None:
            if len(_found) > _KNOWN:
                _found.clear()
            found = _found[key] = Snapshot(next(_serials), rows)
        sources = list(_sources.values())
        awaited = {row.module for row in TABLE if row.module and row.name not in _sources}
        peeks, kept = [one.peek for one in sources], [one.kept for one in sources]
        _last = peeks, kept, found, tuple(awaited)
        return found


def at_start() -> dict[str, Any]:
    """Return what `begin_worker` needs for a worker that starts with the present values.

    Called by the process whose environment, folder and path the worker is started with: for workers
    on another host, by the agent there.  By name: (serial, value now, value at the first snapshot).
    """
    with _lock:
        snapshot()
        found = ((row.name, _sources[row.name]) for row in _STARTED)
        return {name: (one.serial, one.value, one.first) for name, one in found}


# -- the worker's side -----------------------------------------------------------------------------


class _Taken:
    """What is known of a row in a worker."""

    def __init__(self) -> None:
        self.value: Any = None  # of the row received last
        self.last: Any = None  # the value set last; None: none
        self.before: Any = None  # from before the first row
        self.known = False  # whether `before` is known


class _Worker:
    """The rows of a process, or of a thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.serials: dict[str, int] = {}  # of the rows in the last message
        self.taken: dict[str, _Taken] = {}
        self.waits: set[str] = set()  # rows whose libraries are not imported

    def can_set(self) -> bool:
        """Whether a row waits no longer: another thread has imported its library."""
        return bool(self.waits) and any(_ready(_ROWS[name].module) for name in tuple(self.waits))


class _Thread(threading.local, _Worker):
    """The rows of which each thread has its own values.  A thread starts with the defaults."""


_process, _thread = _Worker(), _Thread()
_begun: int | None = None  # the pid of the worker process
_hooked: set[str] = set()  # libraries for which `_imported` waits
_told: set[str] = set()  # texts of warnings
_problems: list[str] = []  # texts to warn of, guarded by `_lock`


def begin_worker(serials: dict[str, Any]) -> None:
    """Take over what `at_start` returned when this worker was configured.

    Called once for each worker, before its first `receive`, in the thread that runs its tasks.
    """
    global _begun
    with _lock:
        # A fork has what its parent had received, perhaps from another program.
        _thread.reset()
        if _begun == os.getpid() and process_is_shared():
            return  # another worker of this process was the first
        _begun = os.getpid()
        _process.reset()
        for name, (serial, now, first) in serials.items():
            taken = _process.taken[name] = _Taken()
            taken.value = taken.last = now
            taken.before, taken.known = first, True
            if serial:
                _process.serials[name] = serial


def receive(rows: Iterable[tuple[str, int, Any]], keep: Collection[str] = ()) -> None:
    """Set the rows that the program has changed since the last message.

    Called in the thread that runs the task.  ``keep``: environment variables of the worker, such as
    those of its device, which are never changed; ``NAME*`` means all with that prefix.
    """
    rows = rows if isinstance(rows, (tuple, list)) else tuple(rows)
    ours, own = _process.serials, _thread.serials
    if len(rows) == len(ours) + len(own) and not _filters.missing:
        for name, serial, _ in rows:
            if ours.get(name) != serial and own.get(name) != serial:
                break
        else:
            if not (_process.can_set() or _thread.can_set()):
                _filters.note()
                _loggers.note()
                return
    with _lock:
        _environ.keeps = keep
        given = {name: (serial, value) for name, serial, value in rows}
        for row in TABLE:
            worker = _thread if row.per_thread else _process
            serial, value = given.get(row.name, (0, None))
            taken = worker.taken.get(row.name)
            if worker.serials.get(row.name, 0) != serial:
                if taken is None:
                    taken = worker.taken[row.name] = _Taken()
                if serial:
                    worker.serials[row.name], taken.value = serial, value
                else:
                    del worker.serials[row.name]
                    taken.value = taken.before
                _set(worker, row, taken, _ready(row.module))
            elif row.name in worker.waits and _ready(row.module):
                _set(worker, row, worker.taken[row.name], True)
        if _filters.missing:  # classes of `__main__` arrive with tasks
            _filters.add_missing()
        _filters.note()
        _loggers.note()
    _tell()


def imports_done() -> None:
    """Restore what imports have changed since `receive`: called when the task has been read.

    The program imported a package and then set its filters and levels.  In a worker, reading the
    task may import the package, which adds its filters before all others, and sets its levels.
    """
    with _lock:
        _filters.restore()
        _loggers.restore()


def _set(worker: _Worker, row: Row, taken: _Taken, ready: bool) -> None:
    """Set a row to ``taken.value``, now or after the import of its library."""
    if not ready:
        if row.name not in worker.serials:
            worker.waits.discard(row.name)  # it was never set
            return
        worker.waits.add(row.name)
        # If it is being imported now, the next message sets the row.
        if row.module and row.module not in _hooked and row.module not in sys.modules:
            _hooked.add(row.module)
            when_imported(row.module, _imported)
        return
    worker.waits.discard(row.name)
    if row.name not in worker.serials and not taken.known:
        return  # it was never set
    module = sys.modules.get(row.module or "")
    try:
        if not taken.known:
            taken.before, taken.known = row.before(module), True
        row.set(module, taken.value, taken.last)
    except Exception as error:  # of a library, or of the system: the task runs without it
        _problems.append(
            f"xpool: a worker could not take over the program's {row.name}: "
            f"{type(error).__name__}: {error}"
        )
    taken.last = taken.value


def _imported(module: Any) -> None:
    """Set the rows of a library that a task has just imported."""
    with _lock:
        _hooked.discard(module.__name__)
        for worker in (_process, _thread):
            for row in TABLE:
                if row.name in worker.waits and row.module == module.__name__:
                    _set(worker, row, worker.taken[row.name], True)
    _tell()


def _tell() -> None:
    """Warn of rows that could not be set, once each; never raise, for a task would not run."""
    if not _problems:
        return
    import warnings

    with _lock:
        texts = [one for one in dict.fromkeys(_problems) if one not in _told]
        _told.update(texts)
        _problems.clear()
    for text in texts:
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        except RuntimeWarning as error:  # the filters made it an error
            warnings.showwarning(error, RuntimeWarning, __file__, 0)
