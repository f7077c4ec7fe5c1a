"""The settings of the process that travel with a task of the program's own functions.

`TABLE` has one row for each setting: how it is read, compared and set.

**The program's side.**  `snapshot` is called for each task, so it must find out within a few
microseconds that nothing has changed.  Each row has a *token*, which is cheap to read and is equal
as long as the setting is: often the value itself, else an object whose identity changes with it.
Only a row with another token is read.  A row has a serial number, another one for each change.
Rows with the value of a fresh worker are left out until they change for the first time.

**The worker's side.**  `receive` sets a row whose serial differs from that of the row set last.  So
what code of a worker has set itself stays until the program changes that row.  Environment
variables, loggers, options of a library and categories of the locale are rows within a row: only
those that differ are changed.  A row that is missing in a message has the value from before the
first change.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import contextlib
import functools
import itertools
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

from xpool._pickling.by_value.origin import MISSING
from xpool._pickling.by_value.settings_rows import (
    OF_PYTHON,
    SIMPLE,
    Line,
    Options,
    Row,
    environ,
    filters,
    loggers,
)
from xpool._python import worker_local
from xpool._python.at_fork import renew
from xpool._python.import_hooks import before_imports, is_initializing, when_imported
from xpool._python.interrupt import uninterrupted


class Snapshot(NamedTuple):
    serial: int  # another one whenever a row differs from the last snapshot of this process
    rows: tuple[tuple[str, int, Any], ...]  # (name, serial of this row, value of built-in types)


# -- of libraries ----------------------------------------------------------------------------------

_context = attrgetter("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "traps")


def _context_value(token: Any) -> Any:
    *numbers, traps = token
    return (*numbers, tuple(sorted(one.__name__ for one, on in traps.items() if on)))


def _set_context(decimal: Any, value: Any) -> None:
    here = decimal.getcontext()
    here.prec, here.rounding, here.Emin, here.Emax, here.capitals, here.clamp, traps = value
    for signal in list(here.traps):
        here.traps[signal] = signal.__name__ in traps


_CONTEXT = (28, "ROUND_HALF_EVEN", -999999, 999999, 1, 0)
_TRAPS = ("DivisionByZero", "InvalidOperation", "Overflow")


def _part(where: str, name: str) -> Any:
    """Return what a loaded module has under a name, or None.

    For facts of numpy and torch that have no public name.  A caller can do without them.
    """
    return getattr(sys.modules.get(where), name, None)


# From numpy 2 on, each change makes a new object, and in newer versions a new dict of options.


def _np(where: str, name: str, before: str) -> Any:
    return lambda numpy: getattr(_part(where, name), "get", None) or getattr(numpy, before)


def _np_printing_value(token: Any) -> Any:
    found = sys.modules["numpy"].get_printoptions()
    return tuple((name, found[name]) for name, _ in _NP_PRINTING if name in found)


_NP_ERRORS = ("divide", "warn"), ("invalid", "warn"), ("over", "warn"), ("under", "ignore")
_NP_PRINTING = (
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


_PRINTING = "precision", "threshold", "edgeitems", "linewidth", "sci_mode"
_printing = attrgetter(*_PRINTING)


def _torch_device(torch: Any) -> Callable[[], Any]:
    """Read the default device, which a mode on a stack has; usually the stack is empty."""
    depth = _part("torch._C", "_len_torch_function_stack")

    def device() -> Any:
        stack = _part("torch.overrides", "_get_current_function_mode_stack")()
        of_device = _part("torch.utils._device", "DeviceContext")  # None: not imported or used
        for mode in reversed(stack):
            if of_device is not None and isinstance(mode, of_device):
                return mode.device
        return 0

    return lambda: depth() and device()


def _matmul_precision(torch: Any) -> Callable[[], Any]:
    def peek() -> Any:
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # the program has used torch's newer interface, which excludes this
            return "highest"

    return peek


def _deterministic(torch: Any) -> Callable[[], Any]:
    return lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _cudnn(name: str) -> Line:
    def peek(torch: Any) -> Any:
        cudnn = torch.backends.cudnn
        return _part("torch._C", f"_get_cudnn_{name}") or (lambda: getattr(cudnn, name))

    def set(torch: Any, value: Any) -> None:
        setattr(torch.backends.cudnn, name, value)

    return Line(f"torch.backends.cudnn.{name}", "torch", False, peek, set)


_AUTOCAST = {"cpu": "bfloat16", "cuda": "float16", "xla": "bfloat16"}  # the default dtypes


def _autocast(torch: Any) -> Callable[[], Any]:
    if not hasattr(torch, "get_autocast_dtype"):  # before torch 2.4
        return lambda: False
    is_any = _part("torch._C", "_is_any_autocast_enabled") or torch.is_autocast_enabled
    return lambda: (
        is_any()
        and tuple(
            (kind, str(torch.get_autocast_dtype(kind)).partition(".")[2])
            for kind in _AUTOCAST
            if torch.is_autocast_enabled(kind)
        )
    )


def _set_autocast(torch: Any, value: Any) -> None:
    kinds = dict(value or ())
    for kind, dtype in {**_AUTOCAST, **kinds}.items():
        torch.set_autocast_enabled(kind, kind in kinds)
        torch.set_autocast_dtype(kind, getattr(torch, dtype))
    # Between two tasks, the program may change weights of which the cache has casts.
    torch.set_autocast_cache_enabled(not kinds)
    torch.clear_autocast_cache()


def _pandas_defaults() -> dict[str, Any]:
    known = _part("pandas._config.config", "_registered_options")
    return {name: one.defval for name, one in known.items()}


class _Parameters(Options):
    """The `rcParams` of matplotlib: numbers, texts, lists of these, and a cycle of colours."""

    def __init__(self) -> None:
        super().__init__(
            "matplotlib",
            # Not its own `values`, which sort the names and choose a backend.
            lambda matplotlib: lambda: tuple(dict.values(matplotlib.rcParams)),
            lambda: {**_part("matplotlib", "rcParamsDefault")},
            _set_parameter,
        )

    def keep(self, token: Any) -> Any:
        return tuple(list(one) if type(one) is list else one for one in token)

    def value(self, token: Any) -> Any:
        matplotlib: Any = sys.modules["matplotlib"]
        before = dict.values(matplotlib.rcParamsDefault)
        rows = zip(dict.keys(matplotlib.rcParams), map(_plain, token), before, strict=True)
        # A list may be the default's own, and both may have changed in place.
        return tuple(
            (name, value)
            for name, value, default in rows
            if type(default) is list or value != _plain(default)
        )


def _plain(parameter: Any) -> Any:
    """Return a number, a text, or a tuple of these; other parameters count as equal."""
    if type(parameter) in (list, tuple):
        return tuple(parameter) if all(type(one) in SIMPLE for one in parameter) else None
    if hasattr(parameter, "by_key"):
        cycles = sorted(parameter.by_key().items())  # else in the order of a set
        return tuple((name, tuple(values)) for name, values in cycles)
    return parameter if type(parameter) in SIMPLE else None


def _set_parameter(matplotlib: Any, name: str, value: Any) -> None:
    if name == "axes.prop_cycle" and type(value) is tuple:
        value = matplotlib.cycler(**dict(value))
    matplotlib.rcParams[name] = value


def _fields(library: str, module: str, peek: Any, set: Callable[[Any, Any], object]) -> Line:
    """Return the row of a logging library's fields in the present context: `SIMPLE` values."""

    def value(token: Any) -> Any:
        return tuple((name, one) for name, one in token.items() if type(one) in SIMPLE)

    return Line(f"context of {library}", module, (), peek, set, value, keep=dict, per_thread=True)


def _set_loguru(module: Any, value: Any) -> None:
    module.context.set(dict(value))


def _set_structlog(module: Any, value: Any) -> None:
    module.clear_contextvars()
    module.bind_contextvars(**dict(value))


class Umask(Row):
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


_OF_PROCESS: tuple[Row, ...] = Umask(), *OF_PYTHON

TABLE: tuple[Row, ...] = (
    *_OF_PROCESS,  # first, because the rows of the process are among them
    Line(
        "decimal context",
        "decimal",
        (*_CONTEXT, _TRAPS),
        lambda decimal: lambda: _context(decimal.getcontext()),
        _set_context,
        _context_value,
        keep=lambda token: (*token[:-1], dict(token[-1])),
        per_thread=True,
    ),
    Line(
        "numpy error state",
        "numpy",
        _NP_ERRORS,
        _np("numpy._core._ufunc_config", "_extobj_contextvar", "geterr"),
        lambda numpy, value: numpy.seterr(**dict(value)),
        lambda token: tuple(sorted(sys.modules["numpy"].geterr().items())),
        per_thread=True,
        of_pairs=True,
    ),
    Line(
        "numpy print options",
        "numpy",
        _NP_PRINTING,
        _np("numpy._core.printoptions", "format_options", "get_printoptions"),
        lambda numpy, value: numpy.set_printoptions(**dict(value)),
        _np_printing_value,
        per_thread=True,
        of_pairs=True,
    ),
    Line(
        "torch default dtype",
        "torch",
        "float32",
        "get_default_dtype",
        lambda torch, value: torch.set_default_dtype(getattr(torch, value)),
        lambda token: str(token).partition(".")[2],
    ),
    Line(
        "torch default device",
        "torch",
        None,
        _torch_device,
        "set_default_device",
        lambda token: str(token) if token else None,
        per_thread=True,
    ),
    Line("torch grad mode", "torch", True, "is_grad_enabled", "set_grad_enabled", per_thread=True),
    Line("torch autocast", "torch", False, _autocast, _set_autocast, per_thread=True),
    Line(
        "torch anomaly detection",
        "torch",
        (False, True),
        lambda torch: lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, value: torch.autograd.set_detect_anomaly(*value),
    ),
    Line(
        "torch deterministic algorithms",
        "torch",
        (False, False),
        _deterministic,
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    Line(
        "torch float32 matmul precision",
        "torch",
        "highest",
        _matmul_precision,
        "set_float32_matmul_precision",
    ),
    _cudnn("benchmark"),
    _cudnn("deterministic"),
    Line(
        "torch print options",
        "torch",
        (4, 1000, 3, 80, None),
        lambda _: functools.partial(_printing, _part("torch._tensor_str", "PRINT_OPTS")),
        lambda torch, value: torch.set_printoptions(**dict(zip(_PRINTING, value))),
    ),
    Options(
        "pandas",
        lambda _: functools.partial(_part, "pandas._config.config", "_global_config"),
        _pandas_defaults,
        lambda pandas, name, value: pandas.set_option(name, value),
    ),
    Options(
        "sklearn",
        lambda _: _part("sklearn._config", "_get_threadlocal_config"),
        lambda: _part("sklearn._config", "_global_config"),
        lambda sklearn, name, value: sklearn.set_config(**{name: value}),
        per_thread=True,
    ),
    _Parameters(),
    Line(
        "mpmath precision",
        "mpmath",
        53,
        lambda mpmath: lambda: mpmath.mp.prec,
        lambda mpmath, value: setattr(mpmath.mp, "prec", value),
    ),
    _fields("loguru", "loguru._logger", lambda module: module.context.get, _set_loguru),
    _fields("structlog", "structlog.contextvars", "get_contextvars", _set_structlog),
)

_ROWS = {row.name: row for row in TABLE}
_STARTED = TABLE[:5]  # the rows whose values a worker has from its start


def _ready(name: str) -> bool:
    """Whether a library is imported, and not just being imported by another thread."""
    module = sys.modules.get(name)
    return module is not None and not is_initializing(vars(module))


# -- the program's side ----------------------------------------------------------------------------


class _Source:
    """What is known of a row in the program.  Guarded by `_lock`."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self.peek = row.open(sys.modules.get(row.module))
        self.kept = row.keep(self.peek())
        self.first = self.value = row.value(self.kept)
        self.serial = 0  # the serial number of a fresh worker's value
        self._serials: dict[Any, int] = {}  # by value
        if not row.is_fresh(self.value):
            self._number()

    def look(self) -> None:
        # The function may belong to an object in whose place the program has put another.
        self.peek = self._row.open(sys.modules.get(self._row.module))
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
# Replaced as a whole, so that reading it needs no lock: what `_look` has found.
_last: Any = None
renew(globals(), _lock=threading.RLock, _serials=_count)


_call: Callable[[Any], Any] = operator.methodcaller("__call__")  # `operator.call` is of 3.11


def snapshot() -> Snapshot:
    """Return the present settings of this thread: the same object while nothing has changed."""
    if _last is not None:
        found: Snapshot
        found, peeks, kept, awaited = _last
        try:
            if [*map(_call, peeks)] == kept and sys.modules.keys().isdisjoint(awaited):
                return found
        except Exception:  # the program has replaced an object to which a token belongs
            pass
    return _look()


@uninterrupted  # a row whose token is known, but not its value, would not be read again
def _look() -> Snapshot:
    global _last
    with _lock:
        for row in TABLE:
            source = _sources.get(row.name)
            if source is not None:
                with contextlib.suppress(Exception):  # else the row keeps its value
                    source.look()
                continue
            if not _ready(row.module):
                continue
            with contextlib.suppress(Exception):  # another module of the library's name
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
                del _found[next(iter(_found))]  # not all: threads may take turns with two
            found = _found[key] = Snapshot(next(_serials), rows)
        sources = _sources.values()
        # Libraries that are not imported yet, or whose import has not ended.
        awaited = frozenset(row.module for row in TABLE if row.name not in _sources)
        _last = found, [one.peek for one in sources], [one.kept for one in sources], tuple(awaited)
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
        self.value: Any = None  # the value of the row received last
        self.last: Any = None  # the value set last; None: none
        self.before: Any = MISSING  # the value before the first row was received


class _Worker:
    """The rows of a process, or of a thread."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.serials: dict[str, int] = {}  # serial numbers of the rows in the last message
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
_calls: dict[str, list[Callable[[], object]]] = {}  # by library: calls to make after its import
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
        if _begun == os.getpid() and worker_local.shared:
            return  # another worker of this process was the first
        _begun = os.getpid()
        _process.reset()
        for name in _sources:  # of the parent, in a fork: it starts with the parent's values
            row, taken = _ROWS[name], _Taken()
            with contextlib.suppress(Exception):  # as in `_look`
                taken.last = row.now(sys.modules.get(row.module))
            _worker_of(row).taken[name] = taken
        for name, (serial, now, first) in serials.items():
            taken = _process.taken[name] = _Taken()
            taken.value = taken.last = now
            taken.before = first
            if not serial:
                continue
            _process.serials[name] = serial
    before_imports(_ignore_warnings)


def _ignore_warnings(frame: FrameType) -> None:
    """Ignore warnings until `imports_done` if reading a message imports a module."""
    is_read, needs = False, frame
    while needs.f_back and str(needs.f_globals.get("__name__")).startswith("xpool._pickling."):
        is_read, needs = True, needs.f_back
    if is_read and needs.f_globals.get("__name__") == "xpool._worker.loop":
        filters.ignore_all()


ignores = filters.ignores
"""Not empty while warnings are ignored, until `imports_done`."""


def receive(rows: Sequence[tuple[str, int, Any]], keep: Collection[str] = ()) -> None:
    """Set the rows that the program has changed since the last message.

    Called in the thread that runs the task.  ``keep``: environment variables of the worker, such as
    those of its device, which are never changed; ``NAME*`` means all with that prefix.
    """
    ours, own = _process.serials, _thread.serials
    if len(rows) == len(ours) + len(own) and not filters.missing:
        for name, serial, _ in rows:
            if ours.get(name) != serial and own.get(name) != serial:
                break
        else:
            if not (_process.can_set() or _thread.can_set()):
                return
    with _lock:
        environ.keeps = keep
        given = {name: (serial, value) for name, serial, value in rows}
        for row in TABLE:
            worker, ready = _worker_of(row), _ready(row.module)
            serial, value = given.get(row.name, (0, None))
            taken = worker.taken.setdefault(row.name, _Taken())
            if worker.serials.get(row.name, 0) != serial:
                if serial:
                    worker.serials[row.name], taken.value = serial, value
                else:
                    del worker.serials[row.name]
                    taken.value = taken.before
            elif row.name not in worker.waits or not ready:
                continue
            _set(worker, row, taken, ready)
        if filters.missing:
            filters.add_missing()
    tell()


def imports_done() -> None:
    """Restore what imports have changed while the task was read: called when this is done.

    Reading a task may import a package, which adds warning filters and sets levels of loggers.  The
    program has set its own after its import of that package.  Warnings of that import are ignored.
    """
    with _lock:
        if filters.missing:  # classes of `__main__` have arrived
            filters.add_missing()
        if ignores:
            filters.restore()
            loggers.restore()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep the settings of libraries in a block that makes the script's calls once more.

    The program may have changed a setting after its call.
    """
    before = _of_libraries()
    yield
    with _lock:
        for row, now in _of_libraries().items():
            worker = _worker_of(row)
            value = before.get(row, row.default)
            if row.name in worker.serials:
                value = worker.taken[row.name].value
            _change(row, now, value)


def _of_libraries() -> dict[Row, Any]:
    """Return the rows of libraries that calls may set, with their values."""
    found = dict[Row, Any]()
    for row in TABLE[len(_OF_PROCESS) :]:
        if _ready(row.module):
            with contextlib.suppress(Exception):  # another module of the library's name
                found[row] = row.now(sys.modules[row.module])
    return found


def take_over(found: Snapshot) -> None:
    """Set the rows of which each thread has its own values to those of another thread."""
    if snapshot() is found:
        return
    values = {name: value for name, _, value in found.rows}
    for row, now in _of_libraries().items():
        if row.per_thread:
            _change(row, now, values.get(row.name, row.default))


def _change(row: Row, now: Any, value: Any) -> None:
    if value != now:
        with contextlib.suppress(Exception):  # a version of the library that lacks it
            row.set(sys.modules[row.module], value, now)


def _worker_of(row: Row) -> _Worker:
    return _thread if row.per_thread else _process


def _set(worker: _Worker, row: Row, taken: _Taken, ready: bool) -> None:
    """Set a row to ``taken.value``, now or after the import of its library."""
    if not ready:
        if row.name not in worker.serials:
            worker.waits.discard(row.name)  # the row was never set
            return
        worker.waits.add(row.name)
        # If it is being imported now, the next message sets the row.
        if row.module not in sys.modules:
            _hook(row.module)
        return
    worker.waits.discard(row.name)
    if row.name not in worker.serials and taken.before is MISSING:
        return  # the row was never set
    module = sys.modules.get(row.module)
    try:
        if taken.before is MISSING:
            taken.before = row.before(module)
        row.set(module, taken.value, taken.last)
    except Exception as error:  # of a library, or of the system: the task runs without it
        note_problem(
            f"xpool: a worker could not take over the program's {row.name}: "
            f"{type(error).__name__}: {error}"
        )
    taken.last = taken.value


def when_ready(name: str, call: Callable[[], object]) -> None:
    """Make a call of the script now, or after the import of the library that it configures.

    The call is made before the library's rows are set, because the program may have changed a
    setting after its own call.
    """
    if not name or name in sys.modules:
        call()
        return
    _calls.setdefault(name, []).append(call)
    _hook(name)


def _hook(name: str) -> None:
    if name not in _hooked:
        _hooked.add(name)
        when_imported(name, _imported)


def _imported(module: Any) -> None:
    """Make the calls and set the rows of a library that a task has just imported."""
    try:
        for call in _calls.pop(module.__name__, ()):
            call()
    finally:
        with _lock:
            _hooked.discard(module.__name__)
            for worker in (_process, _thread):
                for row in TABLE:
                    if row.name not in worker.waits or row.module != module.__name__:
                        continue
                    _set(worker, row, worker.taken[row.name], True)
    tell()


def note_problem(text: str) -> None:
    """Have the next `tell` warn with this text."""
    with _lock:
        _problems.append(text)


def tell() -> None:
    """Warn of the noted problems, once each; never raise, for a task would not run."""
    if not _problems:
        return
    with _lock:
        texts = list(dict.fromkeys(itertools.filterfalse(_told.__contains__, _problems)))
        _told.update(texts)
        _problems.clear()
    for text in texts:
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        except RuntimeWarning as error:  # the filters made it an error
            warnings.showwarning(error, RuntimeWarning, __file__, 0)
