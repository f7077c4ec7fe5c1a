"""Settings of the interpreter and of the standard library, as rows of the table in `settings`."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from operator import attrgetter, itemgetter
from typing import Any

from xpool._pickling.by_value.origin import is_program
from xpool._python.hidden import folder_asker, is_free_threaded, warning_filters
from xpool._python.import_hooks import search_path, when_imported

STARTED: Any = ...
"""Takes the place of a default: a worker starts with the program's value of the first snapshot."""


class Row:
    """A setting.  ``module``: the library that has it.

    ``default``: the value in a fresh worker.  ``per_thread``: each thread has its own value.
    """

    name: str
    module = "sys"
    default: Any = STARTED
    per_thread = False
    _first: Any = ...

    def open(self, module: Any) -> Callable[[], Any]:
        """Return the function that reads the token."""
        raise NotImplementedError

    def keep(self, token: Any) -> Any:
        """Return a copy of the token that does not change with the setting."""
        return token

    def value(self, token: Any) -> Any:
        """Return the value that belongs to a kept token."""
        return token

    def now(self, module: Any) -> Any:
        return self.value(self.keep(self.open(module)()))

    def is_fresh(self, value: Any) -> bool:
        """Whether a fresh worker has this value."""
        if self._first is ...:
            self._first = value if self.default is STARTED else self.default
        return bool(value == self._first)

    def before(self, module: Any) -> Any:
        """Return the value for messages without this row, before the first row is set."""
        # The default where it is known: a fork of the program may have another value already.
        return self.now(module) if self.default is STARTED else self.default

    def set(self, module: Any, value: Any, last: Any) -> None:
        """Set the value; ``last``: the value set last, or None."""
        raise NotImplementedError


class Line(Row):
    """A row that fits in a line.

    ``peek(module)`` returns the function that reads the token, and ``set(module, value)`` sets a
    value.  Both may also be names of functions of the module, which read and set the value.

    ``of_pairs``: whether the value has several settings, as (name, value).  Only those that differ
    from the value set last are set.
    """

    def __init__(
        self,
        name: str,
        module: str,
        default: Any,
        peek: str | Callable[[Any], Callable[[], Any]],
        set: str | Callable[[Any, Any], object],
        value: Callable[[Any], Any] | None = None,
        *,
        keep: Callable[[Any], Any] | None = None,
        per_thread: bool = False,
        of_pairs: bool = False,
    ) -> None:
        self.name, self.module, self.default, self.per_thread = name, module, default, per_thread
        self._of_pairs = of_pairs
        self._peek, self._set = peek, set
        if value is not None:
            self.value = value  # type: ignore[assignment]
        if keep is not None:
            self.keep = keep  # type: ignore[assignment]

    def open(self, module: Any) -> Callable[[], Any]:
        peek = self._peek
        found: Any = getattr(module, peek) if isinstance(peek, str) else peek(module)
        return found  # type: ignore[no-any-return]

    def set(self, module: Any, value: Any, last: Any) -> None:
        if self._of_pairs and last is not None:
            value = [one for one in value if one not in last]
        if isinstance(self._set, str):
            getattr(module, self._set)(value)
        else:
            self._set(module, value)


class Options(Row):
    """Those options of a library that differ from its defaults, as (name, value).

    Args:
        module: the name of the library.
        table: returns the dict of all options, with dicts in it for names with dots.
        defaults: returns the defaults, by name.
        set: sets an option of the library.
    """

    default = ()

    def __init__(
        self,
        module: str,
        table: Callable[[Any], Callable[[], Any]],
        defaults: Callable[[], dict[str, Any]],
        set: Callable[[Any, str, Any], object],
        *,
        per_thread: bool = False,
    ) -> None:
        self.name, self.module, self.per_thread = f"{module} options", module, per_thread
        self._table, self._defaults, self._set = table, defaults, set

    def open(self, module: Any) -> Callable[[], Any]:
        return self._table(module)

    def keep(self, token: Any) -> Any:
        return {name: self.keep(one) if type(one) is dict else one for name, one in token.items()}

    def value(self, token: Any) -> Any:
        defaults = self._defaults()
        return tuple(
            (name, value)
            for name, value in _flat(token)
            if type(value) in SIMPLE and value != defaults.get(name, value)
        )

    def set(self, module: Any, value: Any, last: Any) -> None:
        defaults, had, now = self._defaults(), dict(last or ()), dict(value)
        for name in had.keys() | now.keys():
            one = now.get(name, defaults.get(name))
            if name not in had or one != had[name]:
                self._set(module, name, one)


def _flat(options: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, one in options.items():
        if type(one) is dict:
            yield from _flat(one, f"{prefix}{name}.")
        else:
            yield prefix + name, one


# -- of the process --------------------------------------------------------------------------------


def _variables() -> dict[bytes, bytes]:
    pairs = ((name, os.environ.get(name)) for name in list(os.environ))
    return {os.fsencode(name): os.fsencode(one) for name, one in pairs if one is not None}


_own_dict = functools.partial(attrgetter("environ._data"), os)
"""Returns the dict of `os.environ`.  Neither this nor a comparison of it runs Python code."""


class Environ(Row):
    """The variables that differ from those at the first snapshot, as (name, now, then).

    A worker on another host has other variables, so only the changed ones are sent.
    """

    name, default = "os.environ", ()

    def __init__(self) -> None:
        self._then: dict[bytes, bytes] | None = None
        self.keeps: Collection[str] = ()  # names that belong to the worker

    def open(self, module: Any) -> Callable[[], Any]:
        # The program may put another mapping in its place, before or after this.
        plain = type(getattr(os.environ, "_data", None)) is dict
        return _own_dict if plain else _variables

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


def _folder() -> bytes | None:
    try:
        return os.getcwdb()
    except OSError:  # the folder was removed
        return None


_SHORT_PROGRAM = 64  # calls


class Folder(Row):
    """The working folder.

    `os.getcwd` lets another thread of the program run.  A thread that submits many tasks would wait
    for its turn after each of them, 10 us and more.  So after some calls, which a short program
    does not make, the C library is asked through ctypes, whose import takes 2 ms.
    """

    name = "working folder"

    def __init__(self) -> None:
        self._calls = 0
        self._ask: Callable[[], bytes | None] | None = None

    def open(self, module: Any) -> Callable[[], Any]:
        return self._ask or self._count

    def _count(self) -> bytes | None:
        self._calls += 1
        if self._calls == _SHORT_PROGRAM and not is_free_threaded():
            self._ask = folder_asker()
            return None  # so that the row is opened again
        return _folder()

    def keep(self, token: Any) -> Any:
        # None: it was removed, or its path is too long.  This equals no token, so it is read again.
        return object() if token is None else token

    def value(self, token: Any) -> Any:
        folder = token if isinstance(token, bytes) else _folder()
        return None if folder is None else os.fsdecode(folder)

    def set(self, module: Any, value: Any, last: Any) -> None:
        if value is not None and value != self.value(_folder()):
            os.chdir(value)


class Path(Row):
    """`sys.path`.  Entries that a worker has added itself stay, before or after the others."""

    name = "sys.path"

    def open(self, module: Any) -> Callable[[], Any]:
        return functools.partial(getattr, sys, "path")

    def keep(self, token: Any) -> Any:
        return list(token)

    def value(self, token: Any) -> Any:
        return tuple(search_path(token))

    def set(self, module: Any, value: Any, last: Any) -> None:
        known = {*(last or ()), *value}
        common = next((at for at, one in enumerate(sys.path) if one in known), len(sys.path))
        own = [(at, one) for at, one in enumerate(sys.path) if one not in known]
        front = [one for at, one in own if at < common]
        sys.path[:] = [*front, *value, *(one for at, one in own if at > common)]


def arguments(argv: Any) -> tuple[str, ...]:
    """Return `sys.argv` as texts; an object that is not a text or path becomes its type's name."""
    return tuple(
        str(one) if isinstance(one, (str, os.PathLike)) else f"<{type(one).__name__}>"
        for one in (argv if isinstance(argv, (list, tuple)) else ())
    )


_zone = attrgetter("tzname", "timezone", "altzone", "daylight")


class TimeZone(Row):
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
        if _zone(time) == value:
            return
        time.tzset()
        # Without TZ, it is the zone of the host.
        if "TZ" in os.environ and _zone(time) != value:
            raise ValueError(f"TZ={os.environ['TZ']!r} is {time.tzname}, not {value[0]}")


_CATEGORIES = ("LC_CTYPE", "LC_NUMERIC", "LC_TIME", "LC_COLLATE", "LC_MONETARY", "LC_MESSAGES")


class Locale(Row):
    name, module = "locale", "locale"

    def open(self, module: Any) -> Callable[[], Any]:
        # One call for all categories takes less time than six calls.
        ask = getattr(sys.modules.get("_locale"), "setlocale", module.setlocale)
        return functools.partial(ask, module.LC_ALL)

    def value(self, token: Any) -> Any:
        locale: Any = sys.modules["locale"]
        numbers = [getattr(locale, one) for one in _CATEGORIES if hasattr(locale, one)]
        return tuple(map(locale.setlocale, numbers))

    def is_fresh(self, value: Any) -> bool:
        # Python itself sets LC_CTYPE at its start, to that of the environment.  If this is "C",
        # Python is in its UTF-8 mode.
        changed = value[0] in ("C", "POSIX") and not sys.flags.utf8_mode
        if self.default is STARTED and not changed and set(value[1:]) <= {"C", "POSIX"}:
            self.default = value
        return bool(value == self.default)

    def set(self, module: Any, value: Any, last: Any) -> None:
        for name, one, had in zip(_CATEGORIES, value, last or (None,) * len(value)):
            if one != had and module.setlocale(getattr(module, name)) != one:
                module.setlocale(getattr(module, name), one)


# -- warnings and logging --------------------------------------------------------------------------


def _of_warnings() -> Any:
    return warning_filters(warnings)()


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


class Filters(Row):
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

    IGNORE = ("ignore", None, Warning, None, 0)
    """The first filter while this process imports what a message needs.  The program has seen the
    warnings of its own imports, or has changed its filters since then."""

    def __init__(self) -> None:
        self.ignores: list[Any] = []  # `IGNORE` while it may be among the filters
        self._set: list[Any] = []  # all filters of the row; None: its category does not exist yet
        self.missing: dict[int, Any] = {}  # filters without a category, by their place
        self._order: list[Any] = []

    def open(self, module: Any) -> Callable[[], Any]:
        return warning_filters(module)

    def keep(self, token: Any) -> Any:
        return list(token)

    def value(self, token: Any) -> Any:
        return tuple(
            (action, _pattern(text), (kind.__module__, kind.__qualname__), _pattern(place), line)
            for one in token
            for action, text, kind, place, line in [one]
            # Not made in a function.
            if isinstance(kind, type) and "<" not in kind.__qualname__ and one is not self.IGNORE
        )

    before = Row.now  # packages have set some

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
            if made in here:  # the module has added the filter itself
                here.remove(made)
            follow = (here.index(one) for one in self._set[at + 1 :] if one in here)
            here.insert(next(follow, len(here)), made)
            self._put(here)

    @staticmethod
    def _put(filters: list[Any]) -> None:
        # This call also makes modules show warnings again that they have shown before.
        warnings.resetwarnings()
        _of_warnings()[:] = filters

    def ignore_all(self) -> None:
        """Ignore all warnings until `restore` is called."""
        here = _of_warnings()
        if not any(one is self.IGNORE for one in here):
            self.ignores[:], self._order = [self.IGNORE], here.copy()
            here.insert(0, self.IGNORE)

    def restore(self) -> None:
        """Put the filters from before `ignore_all` that are there now back into their order."""
        self.ignores.clear()
        here = _of_warnings()
        here[:] = [one for one in here if one is not self.IGNORE]
        order = iter([one for one in self._order if one in here])
        # New filters stay where they are.  A filter may be there twice.
        now = [next(order, one) if one in self._order else one for one in here]
        if next(order, None) is None and now != here:
            self._put(now)


def _made(one: Any) -> Any:
    action, text, where, place, line = one
    kind = _class(where)
    return None if kind is None else (action, _compiled(text), kind, _compiled(place), line)


_SEEN: Any = "seen by xpool"


class Loggers(Row):
    """Levels, `propagate` and `disabled` of loggers that are not as made, and `logging.disable`.

    Each change of a level clears the caches of all loggers, so a mark in the root's cache tells
    whether a level has changed.  `propagate`, `disabled`, handlers and attributes of the root and
    of the program's own loggers are looked at each time; those of other loggers, which may be
    hundreds, after such a change.
    """

    name, module, default = "levels of loggers", "logging", (0, ())

    def __init__(self) -> None:
        self._pending: dict[str, tuple[Any, ...]] = {}  # loggers that do not exist yet
        self.made: dict[str, tuple[Any, ...]] = {}  # loggers made while messages were read
        # The result, and what the next look compares: the number of loggers, a function that
        # returns the placeholders, these, and the loggers that are looked at each time.
        self._scan: Any = (None, -1, None, None, ())

    def open(self, module: Any) -> Callable[[], Any]:
        root = module.getLogger()
        loggers = root.manager.loggerDict
        cache = getattr(root, "_cache", {})  # without one, each look is a scan

        def peek() -> Any:
            # A placeholder may become a logger; loggers themselves stay.
            stamp, count, holders, held, own = self._scan
            if _SEEN not in cache or len(loggers) != count or holders(loggers) != held:
                return None
            for one, propagate, disabled, handlers, size, attributes in own:
                if one.propagate is not propagate or one.disabled is not disabled:
                    return None
                if one.handlers != handlers:
                    return None
                if len(vars(one)) != size or (attributes and _own(one) != attributes):
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
                (one, one.propagate, one.disabled, list(one.handlers), len(vars(one)), _own(one))
                for one in (root, *(one for name, one in real.items() if is_program(name)))
            ],
        )
        return stamp

    def value(self, token: Any) -> Any:
        return token[1]

    before = Row.now  # packages have set some

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
            # A logger is made here only if one below it exists: its package may have a class for
            # it.
            if not name or name in manager.loggerDict:
                _set_logger(module.getLogger(name or None), way)
            elif way != default:
                self._pending[name] = way
        if self._pending and "getLogger" not in vars(manager):
            self._watch(manager)

    def _watch(self, manager: Any) -> None:
        """Set pending levels when their loggers are made, and parents before their children."""
        make, pending, made = manager.getLogger, self._pending, self.made

        def getLogger(name: str) -> Any:
            if pending and isinstance(name, str):
                parts = name.split(".")
                for one in itertools.accumulate(parts, lambda front, part: f"{front}.{part}"):
                    way = pending.pop(one, None)
                    if way is not None:
                        if filters.ignores:
                            made[one] = way
                        _set_logger(make(one), way)
            return make(name)

        manager.getLogger = getLogger

    def restore(self) -> None:
        """Set the levels of the loggers in `made` again: their packages have set others."""
        for name, way in list(self.made.items()):
            _set_logger(sys.modules["logging"].getLogger(name), way)
        self.made.clear()


_AS_MADE: tuple[Any, ...] = (0, True, False, (), ())
OF_LOGGERS = frozenset(
    {"name", "level", "parent", "propagate", "handlers", "disabled", "filters", "manager", "_cache"}
)
"""Attributes of every logger."""

SIMPLE = (int, float, str, bytes, bool, type(None))


def _way_of(logger: Any) -> tuple[Any, ...]:
    """Return level, `propagate`, `disabled`, the handlers, and attributes of the program."""
    handlers = tuple(
        (type(one).__module__, type(one).__qualname__, _simple(one)) for one in logger.handlers
    )
    return logger.level, bool(logger.propagate), bool(logger.disabled), handlers, _own(logger)


def _own(logger: Any) -> tuple[tuple[str, Any], ...]:
    """Return the attributes of a logger that are the program's."""
    return tuple(one for one in _simple(logger) if one[0] not in OF_LOGGERS)


def _simple(obj: Any) -> tuple[tuple[str, Any], ...]:
    """Return the attributes of an object that are numbers and texts."""
    return tuple((name, one) for name, one in list(vars(obj).items()) if type(one) in SIMPLE)


def _set_logger(logger: Any, way: tuple[Any, ...]) -> None:
    level, logger.propagate, logger.disabled, handlers, own = way
    logger.setLevel(level)
    vars(logger).update(own)
    logging = sys.modules["logging"]
    theirs = [one for one in logger.handlers if not hasattr(one, "_xpool_of_program")]
    logger.handlers[:] = [_stand_in(logging, *one) for one in handlers] + theirs


def _stand_in(logging: Any, module: str, name: str, attributes: Any) -> Any:
    """Return a handler that a worker has in place of the program's, for code that looks for one.

    The program's handler gets the records (`xpool._worker.worker_relay`).
    """

    class Handler(logging.Handler):  # type: ignore[misc]
        _xpool_of_program = True

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            found = getattr(sys.modules.get(module), name, None)
            return found if isinstance(found, type) else type(self)

        def handle(self, record: Any) -> bool:
            return False

    one = Handler()
    logging._handlers.pop(getattr(one, "name", None), None)
    # Unlike a `NullHandler`, this handler has a lock: its own, because a fork may have inherited
    # the program's in a locked state.
    one.__dict__.update((key, value) for key, value in attributes if key != "lock")
    return one


digits: Any = getattr(sys, "get_int_max_str_digits", lambda: 4300)  # Python 3.10.0 to 3.10.6

environ, filters, loggers = Environ(), Filters(), Loggers()

_LEVELS = "NOTSET", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"


def _name_levels(logging: Any, value: Any) -> None:
    for level, name in value:
        logging.addLevelName(level, name)


# In the order in which they are set: TZ before the time zone.
OF_PYTHON: tuple[Row, ...] = (
    environ,
    Folder(),
    Path(),
    Line(
        "sys.argv",
        "sys",
        STARTED,
        lambda _: functools.partial(getattr, sys, "argv", None),
        lambda _, value: sys.argv.__setitem__(slice(None), value),
        arguments,
        keep=lambda token: list(token) if isinstance(token, list) else token,
    ),
    TimeZone(),
    Locale(),
    filters,
    loggers,
    Line(
        "names of levels",
        "logging",
        tuple(zip(range(0, 60, 10), _LEVELS)),
        lambda logging: lambda: logging._levelToName,
        _name_levels,
        lambda token: tuple(sorted(token.items())),
        keep=dict,
    ),
    Line("recursion limit", "sys", 1000, "getrecursionlimit", "setrecursionlimit"),
    Line("digits of int as str", "sys", 4300, lambda _: digits, "set_int_max_str_digits"),
    Line("socket timeout", "socket", None, "getdefaulttimeout", "setdefaulttimeout"),
    Line("csv field size", "csv", 131072, "field_size_limit", "field_size_limit"),
)
