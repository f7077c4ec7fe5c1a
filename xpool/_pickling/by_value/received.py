"""Sets, in a worker, the definitions and globals that its parent has sent (`sent`).

Only a replica (see `main`) sets them, so a function that a worker sends back does not change the
program's globals.  Only a message of the parent changes a global that exists.  The state of a
message of another process adds the globals that are missing.

A worker keeps a global that its own code has set before the first value for it arrived.  It also
keeps an object that the import of a module has made, if the object has the same bytes as the
program's.  The reason: defaults of functions and other modules refer to the worker's object.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from xpool._pickling import Key
from xpool._pickling.by_value import classes, main, settings
from xpool._pickling.by_value.broadcast import open_broadcast
from xpool._pickling.by_value.caches import CACHE, Cache
from xpool._pickling.by_value.checks import said
from xpool._pickling.by_value.entries import HEAD, Entry, Kind, write_values
from xpool._pickling.by_value.names import original_of, originals, received
from xpool._pickling.by_value.origin import (
    CODE,
    IMPORTED,
    MISSING,
    MODULES,
    SENT,
    Parts,
    code_of,
    find_module,
    is_program,
    key_of_alias,
    loose,
    name_of,
    namespace,
    origin_of,
    own_modules,
    own_packages,
    owner_of,
    place_of,
    stamp_of,
    value_of,
    with_origin,
)
from xpool._pickling.by_value.reads import Code, absolute_name, classes_of
from xpool._pickling.by_value.registered_calls import CALL_OF_SCRIPT, CALLS, package_of, registered
from xpool._pickling.by_value.standard import is_generator
from xpool._pickling.pickler import decode
from xpool._python import at_fork, failures
from xpool._python.hidden import is_attribute
from xpool._python.import_hooks import when_imported
from xpool._python.interrupt import by_handler, frames_of, pass_on, uninterrupted


class _Incoming:
    """The state of a receiver, guarded by `_lock`."""

    def __init__(self) -> None:
        self.parent: bytes | None = None
        self.last = b""  # the parent's state that was set last
        # The epoch of the last state of each sender, and the states of this epoch that were set.
        self.seen: dict[tuple[bytes, bool], tuple[int, set[int]]] = {}
        self.serials: dict[Key, int] = {}
        # Globals that only states of other processes have set: the serial number, and the value.
        self.lent: dict[Key, tuple[int, Any]] = {}
        self.idents: dict[Key, int] = {}  # which object of the program a function stands for
        self.called: set[Key] = set()
        # Constant defaults of functions to set, by module and path, and the text of the last ones.
        self.defaults: dict[str, dict[str, tuple[tuple[str, Any], ...]]] = {}
        self.was: dict[Key, str] = {}
        self.waiting: dict[Key, Any] = {}  # attributes of installed modules to set at their import
        self.imported: set[str] = set()
        self.used: set[str] = set()  # the program's own modules that it has imported, too
        # The reasons why values were not sent.  Some of these globals are None here.
        self.missing: dict[Key, str] = {}


keep_environment: set[str] = set()
"""The environment variables of this worker's context."""

after_calls: list[Callable[[], object]] = []
"""Functions to call after calls that every worker makes, for example to seed generators again."""


def prepare(state: bytes, *buffers: Any) -> None:
    """Set what a message needs.  It is called at the beginning of the message's pickle."""
    here = _incoming
    heard = _heard.states
    if heard is not None:
        heard.append((state, buffers))
    elif state == here.last:
        return
    if not main.is_replica:
        return
    sender, serial, epoch, exact, placed = HEAD.unpack_from(state)
    if exact and here.parent is None:
        here.parent = sender
    ours = exact and sender == here.parent
    seen = here.seen.get((sender, ours))
    if seen is not None and seen[0] == epoch and serial in seen[1]:
        return
    with _lock:
        written = pickle.loads(memoryview(state)[HEAD.size :])
        left = list(buffers)
        if placed:
            written = _placed(None if written[1] is None else left.pop(), written)
        _receive(written, left, ours)
        settings.imports_done()
        settings.tell()
        seen = here.seen.get((sender, ours))  # another thread may have begun an epoch
        if seen is None or seen[0] != epoch:
            seen = here.seen[sender, ours] = epoch, set()
        seen[1].add(serial)
        if ours:
            here.last = state


class _Heard(threading.local):
    """The states of messages that this thread records, or None."""

    # Of the class, because to look up an attribute that is missing takes half a microsecond.
    states: list[tuple[bytes, tuple[Any, ...]]] | None = None


_heard = _Heard()


@contextlib.contextmanager
def listening() -> Iterator[list[tuple[bytes, tuple[Any, ...]]]]:
    """Record the states of messages that this thread opens."""
    states: list[tuple[bytes, tuple[Any, ...]]] = []
    _heard.states = states
    try:
        yield states
    finally:
        _heard.states = None


@uninterrupted  # a task that was stopped would leave a part of the state unset
def _receive(entries: list[Entry], buffers: list[Any], ours: bool) -> None:
    if ours:
        settings.receive([*_all_of(Kind.SETTINGS, entries)], keep_environment)
    # Calls come after what they need; the imports of the rest may need their effect.
    first = [n for n, entry in enumerate(entries, 1) if any(one[0] in _FIRST for one in entry[3])]
    at = first[-1] if first else 0
    named = [one for one in entries if one[0] == Kind.IMPORTED_AS and one[3][0][0] == MODULES]
    for name, package, is_package, has_file in _all_of(Kind.MODULE, entries):
        _make_module(name, package, is_package, has_file)
    for some in (named, entries[:at], entries[at:]):
        _import_modules(some)
        _take_all(some, buffers, ours)


_FIRST = frozenset({CALLS, MODULES})
_WITH_VALUES = (Kind.VALUES, Kind.PLACED)


def _take_all(entries: list[Entry], buffers: list[Any], ours: bool) -> None:
    groups: list[tuple[int, tuple[Key, ...], Any]] = []
    calls: list[tuple[Key, bytes]] = []
    for kind, serial, first, keys, data in entries:
        if kind == Kind.PLACED:
            token = data[1]
            data = (None if token is None else buffers.pop(0)), data
        if kind == Kind.DEFAULTS and ours:
            for module, path, defaults in data:
                if module not in _incoming.defaults:
                    _incoming.defaults[module] = {}
                    when_imported(module, lambda module: _set_defaults(module.__name__))
                _incoming.defaults[module][path] = defaults
            for module in {one[0] for one in data}.intersection(sys.modules):
                _set_defaults(module)
        if kind in (Kind.SETTINGS, Kind.IMPORTS, Kind.MODULE, Kind.USED, Kind.DEFAULTS):
            continue
        # No generator: a signal handler may raise in it after it has ended.
        had = [*map(_incoming.serials.get if ours else _had, keys)]
        if {serial} == {*had} or (not ours and all(map(_keeps, keys))):
            continue
        if kind == Kind.CALL:
            if keys[0] not in _incoming.called:
                calls.append((keys[0], data))
        elif not _take(kind, serial, first, keys, data, ours) and kind in _WITH_VALUES:
            groups.append((kind, keys, data))
    if calls:
        with settings.kept():
            for key, data in calls:
                _incoming.called.add(key)
                settings.when_ready(package_of(key), functools.partial(_call, key, data))
        for kind, keys, data in groups if ours else ():
            # Set last: these calls may have changed the globals, as they did in the program.
            for key, value in zip(keys, _load(kind, keys, data), strict=True):
                _set(key, value)


def _call(key: Key, data: bytes) -> None:
    registered[key[1]] = function, args, named = pickle.loads(data)
    try:
        function(*args, **named)
    except Exception as exc:
        if getattr(function, "__name__", "") != CALL_OF_SCRIPT or by_handler(exc):
            raise
        _warn_of_call(exc, function.__code__)
    for again in after_calls:
        again()


def _warn_of_call(exc: Exception, code: CodeType) -> None:
    """Warn that a call of the script has failed here: in the program it has returned."""
    line = max(line for *_, line in code.co_lines() if line)
    hint = missing_global(exc)
    text = (
        "A worker could not repeat this call, which stands alone at the script's top: "
        f"{failures.short(exc)}.{f' {hint}' if hint else ''} If workers do "
        'not need the call, move it under `if __name__ == "__main__":`'
    )
    # Not filtered here, where `settings.kept` ignores all warnings, but in the program.
    warnings.showwarning(RuntimeWarning(text), RuntimeWarning, code.co_filename, line)


def _take(
    kind: int, serial: int, first: bool, keys: tuple[Key, ...], data: Any, ours: bool
) -> set[Key]:
    """Set what an entry brings.  Return the globals that keep the worker's own values."""
    new = {key for key in keys if key not in _incoming.serials}
    if ours:
        # Globals that code of this worker has set, and that the program has not changed since.
        plain = {key for key in new if first and "." not in key[1] and _had(key) is None}
        kept = {key for key in plain if main.was_set_here(*key)}
    else:
        kept = {key for key in keys if _keeps(key)}
    if kind in _MAKERS:
        if not kept:
            _set(keys[0], _MAKERS[kind](keys[0], *data))
    elif kind in _WITH_VALUES:
        if new.issuperset(keys) and _has_equal(kind, keys, data):
            kept = set(keys)
        else:
            for key in keys:  # the code of a class may use its attributes when it is loaded
                if "." in key[1] and not _has(key):
                    _set(key, None)
            before = {key: value_of(key) for key in keys if "." not in key[1]}
            pairs = [*zip(keys, _load(kind, keys, data), strict=True)]
            # A function comes before the results that it keeps.
            for key, value in sorted(pairs, key=lambda one: one[0][1].endswith(CACHE)):
                if key not in kept:
                    _set(key, value)
            _set_in_late_modules(before, kept)
    elif kind == Kind.REMOVED:
        _take_back(keys[0], to_import=data)
    # A fork has the program's value, which cannot be pickled.
    elif not main.is_forked and keys[0] not in kept:
        _refuse(kind, keys[0], data)
    for key in keys:
        if ours:
            _incoming.serials[key] = serial
            _incoming.lent.pop(key, None)
            received.add(key)
        elif key not in kept and "." not in key[1] and _has(key):
            _incoming.lent[key] = serial, value_of(key)
    return kept


def _set_in_late_modules(before: dict[Key, Any], kept: set[Key]) -> None:
    """Set globals also in modules that only this worker has imported, and that import these by name
    (`from config import RATES`)."""
    replaced = {
        key: value for key, value in before.items() if key not in kept and value is not MISSING
    }
    for name in set(_own_modules((*sys.modules,))) - _incoming.used if replaced else ():
        values = namespace(name)
        for key in _imported_names(name) & replaced.keys():
            if values.get(key[1], MISSING) is replaced[key]:
                values[key[1]] = value_of(key)


@functools.lru_cache(1)
def _own_modules(_: tuple[str, ...]) -> list[str]:
    """Return the program's own modules that are imported here; the argument has all names."""
    return [
        name
        for name, module in own_modules()
        if name_of(module) == name and origin_of(name) == IMPORTED
    ]


@functools.cache
def _imported_names(module: str) -> frozenset[Key]:
    """Return the globals that the import statements at the top of a module name."""
    code = code_of(find_module(module))
    if code is None:
        return frozenset()
    package = namespace(module).get("__package__")
    # Without functions and classes, whose imports bind no names of the module.
    outer = (None if type(one) is CodeType else one for one in code.co_consts)
    return frozenset(
        (absolute_name(level, name, package), one)
        for level, name, names in Code(code.replace(co_consts=tuple(outer))).imports
        for one in names
    )


def _load(kind: int, keys: tuple[Key, ...], data: Any) -> list[Any]:
    if type(data) is list:
        return data
    try:
        if kind == Kind.PLACED:
            loaded = _placed(*data)
        else:
            loaded = pickle.loads(data)
    except Exception as error:  # an object's `__setstate__` can raise any error
        names = " and ".join(repr(path) for _, path in keys)
        what = "it was loaded" if len(keys) == 1 else f"{names}, which share an object, were loaded"
        reason = f"{type(error).__name__} while {what}: {error}"
        return [_Failed(reason)] * len(keys)
    return [loaded] if len(keys) == 1 else list(loaded)


def _placed(buffer: Any, about: tuple[Any, ...]) -> Any:
    token, place = about[1:3]
    return decode(place.pages()) if token is None else open_broadcast(buffer, *about)


class _Failed:
    def __init__(self, reason: str) -> None:
        self.reason = reason


def _define(key: Key, ident: int, code: bytes, defaults: Any, kwdefaults: Any, doc: Any) -> Any:
    module, name = key
    values = namespace(module)
    made = marshal.loads(code)
    function = values.get(name)
    known = _incoming.idents.get(key)
    # The program has changed the function itself: others refer to it, too.  To that of a fork,
    # classes refer that the program has not changed since.
    if type(function) is FunctionType and (
        function.__code__ == made if known is None and main.is_forked else known == ident
    ):
        function.__code__ = made
    else:
        function = FunctionType(made, values, name)
        function.__module__ = module
    function.__defaults__ = defaults
    function.__kwdefaults__ = None if kwdefaults is None else dict(kwdefaults)
    function.__doc__ = doc
    _incoming.idents[key] = ident
    return function


def _module(name: str) -> Any:
    try:
        return sys.modules.get(name) or import_module(name)
    except ModuleNotFoundError:
        above, _, last = name.rpartition(".")
        found = getattr(sys.modules.get(above), last, None)
        if not is_attribute(found):
            raise
        return found


_MAKERS: dict[int, Callable[..., Any]] = {
    Kind.FUNCTION: _define,
    Kind.CLASS: lambda _, *about: classes.load(*about),
    # An error of the import is the task's.
    Kind.IMPORTED_AS: lambda _, name: _module(name),
}


def _set(key: Key, value: Any) -> None:
    module, path = key
    if type(value) is _Failed:
        _refuse(Kind.REFUSED, key, value.reason)
        return
    _incoming.missing.pop(key, None)
    _note_original(key)
    there, name = place_of(key)
    if there is None and find_module(module) is None:
        # An installed module: the program has assigned an attribute of it, or of its class.
        waiting = _incoming.waiting
        if key not in waiting:
            when_imported(module, lambda _: _set_waiting(key, waiting))
        waiting[key] = value
    elif "." in path:
        owner, attribute = owner_of(key), path.rpartition(".")[2]
        if type(there) is Parts:
            there.set(attribute, value)
        elif type(there) is Cache:
            there.fill(value)
        elif isinstance(owner, type):
            type.__setattr__(owner, attribute, value)
        elif attribute == "registry" and isinstance(
            getattr(owner, attribute, None), MappingProxyType
        ):
            # A function of `functools.singledispatch`.
            for kind, function in value.items():
                if owner.registry.get(kind) is not function:
                    owner.register(kind, function)
        elif hasattr(owner, "__dict__"):
            setattr(owner, attribute, value)
    else:
        there[name] = value
        main.forget_initial(module, path)


def _note_original(key: Key) -> None:
    """Remember what an import has made of a global, before it is set or removed."""
    there, name = place_of(key)
    if there is not None and key not in originals and origin_of(key[0]) != SENT:
        originals[key] = there.get(name, MISSING)


def _set_defaults(module: str) -> None:
    """Set the defaults of functions that the program has changed; a worker's own ones stay."""
    new = _incoming.defaults[module]
    while new:  # another thread may import the module
        path, defaults = new.popitem()
        key, text = (module, f"{path}.{CODE}"), repr(defaults)
        parts = place_of(key)[0]
        if type(parts) is not Parts or _incoming.was.get(key) == text:
            continue
        _incoming.was[key] = text
        for name, value in defaults:
            if repr(parts.get(name, MISSING)) != repr(value):
                parts.set(name, value)


def _set_waiting(key: Key, waiting: dict[Key, Any]) -> None:
    value = waiting.pop(key, MISSING)
    if value is not MISSING:
        _set(key, value)


def _take_back(key: Key, to_import: bool) -> None:
    """Remove a global; with ``to_import``, set it to the object that the import has made."""
    _incoming.waiting.pop(key, None)
    original = originals.get(key, MISSING)
    inherited = to_import and main.is_forked and origin_of(key[0]) != SENT
    if inherited and "." not in key[1]:
        original = original_of(*key)
    if to_import and original is not MISSING:
        _set(key, original)
    elif not to_import or key in originals or origin_of(key[0]) == SENT:
        _remove(key)


def _remove(key: Key) -> None:
    _note_original(key)
    holder, name = place_of(key)
    if type(holder) is dict:
        holder.pop(name, None)
    elif type(holder) is Cache:
        holder.fill(None)
    elif isinstance(owner := owner_of(key), type) and _has(key):
        type.__delattr__(owner, name)


def _refuse(kind: int, key: Key, reason: str) -> None:
    if key[0] == MODULES:
        _set(key, None)  # so that an import does not find another module
    elif kind == Kind.REFUSED:
        _remove(key)
    elif not _has(key):  # an object that a task has made under this name stays
        _set(key, None)
    _incoming.missing[key] = reason


def _has(key: Key) -> bool:
    holder, name = place_of(key)
    return holder is not None and name in holder


def _keeps(key: Key) -> bool:
    """Whether the worker keeps its value of a global that a state of another process brings.

    It does not keep one that such a state has set before.  A fork of the program has values of the
    time of the fork, and its own versions of classes.
    """
    inherited = main.is_forked and "." not in key[1] and key not in received
    return _has(key) and _had(key) is None and not (inherited and not main.was_set_here(*key))


def _had(key: Key) -> int | None:
    """Return the serial number of what a state of another process has set a global to, if code of
    this worker has not set it since then."""
    found = _incoming.lent.get(key)
    return found[0] if found is not None and value_of(key) is found[1] else None


def _has_equal(kind: int, keys: tuple[Key, ...], data: Any) -> bool:
    """Whether the imports of modules have made values with the same bytes here."""
    if any(origin_of(module) != IMPORTED for module, _ in keys) or not all(map(_has, keys)):
        return False
    values = [*map(value_of, keys)]
    if type(data) is list:
        pairs = zip(values, data, strict=True)
        return all(type(one) is type(two) and repr(one) == repr(two) for one, two in pairs)
    if any(map(is_generator, values)):
        return False  # its seed is the program's
    return kind == Kind.VALUES and _written(keys) == data


def _written(keys: tuple[Key, ...]) -> bytes | None:
    """Return what is sent of globals with these values; None: they are large or not pickled."""
    try:
        written = write_values(keys, [*map(value_of, keys)], {}, True, True)
    except Exception:  # an object's `__reduce__` can raise any error
        return None
    return None if written.buffers else b"".join(written.chunks)


def _data_of_imported() -> list[tuple[tuple[Key, ...], bytes]]:
    """Return the globals that were set in modules that workers import, and their pickles."""
    groups: dict[int, list[Key]] = {}
    for key, serial in _incoming.serials.items():
        groups.setdefault(serial, []).append(key)
    found = []
    for keys in map(tuple, groups.values()):
        if any(origin_of(module) == IMPORTED for module, _ in keys) and all(map(_has, keys)):
            written = _written(keys)
            if written is not None:
                found.append((keys, written))
    return found


# -- kinds without values ------------------------------------------------------------------------


def _import_modules(entries: list[Entry]) -> None:
    """Import the modules whose globals will be set; their imports may set others."""
    for name in _all_of(Kind.IMPORTS, entries):
        if name not in _incoming.imported:
            _import(name)
            _incoming.imported.add(name)
    used = {one: stamp for one, stamp in _all_of(Kind.USED, entries) if one not in sys.modules}
    data = _data_of_imported() if used else []
    for name in used:
        _try_import(name)
    new = {one for one, _ in _all_of(Kind.USED, entries)} - _incoming.used
    _incoming.used |= new
    if not all(map(is_program, new)):  # the program was started from an installed package
        own_packages.update(one.partition(".")[0] for one in new)
        with_origin.clear()
    for name, stamp in used.items():
        if stamp is not None and name in sys.modules and stamp_of(sys.modules[name]) != stamp:
            settings.note_problem(
                f"xpool: a worker has imported {name} after the program, and its file was edited "
                "meanwhile: tasks of this worker run the new version; make a new pool after an edit"
            )
    # The program's are as after its own imports.
    for keys, written in data:
        if _written(keys) != written:
            for key, value in zip(keys, _load(Kind.VALUES, keys, written), strict=True):
                _set(key, value)
    for kind, _, _, keys, _ in entries:
        if kind in (*_WITH_VALUES, Kind.REFUSED, Kind.LEFT_NONE, Kind.REMOVED):
            for module, _ in keys:
                if module not in sys.modules and origin_of(module) == IMPORTED:
                    try:
                        _import(module)
                    except ModuleNotFoundError as exc:
                        # A module that the program has removed, with its file, has no names left.
                        if kind != Kind.REMOVED or exc.name != module:
                            raise


def _import(name: str) -> None:
    try:
        import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name != name:
            raise
        raise ModuleNotFoundError(
            f"No module named {name!r}. The program has imported it, but this worker cannot: the "
            "module's file was moved or removed since then.",
            name=name,
        ) from None


def _all_of(kind: int, entries: list[Entry]) -> list[Any]:
    """Return the data of all entries of a kind; for kinds of entries without values of globals."""
    return [one for of, _, _, _, data in entries if of == kind for one in data]


def _make_module(name: str, package: Any, is_package: bool, has_file: bool) -> None:
    """Make a module that cannot be imported here, or is another one here.

    ``has_file``: import it first, for the other effects of its import.
    """
    if has_file:
        _try_import(name)
    if name in sys.modules:
        return
    if name in loose:  # in a fork, to which its inherited classes and functions refer
        sys.modules[name] = loose[name]
        return
    module = ModuleType(name)
    module.__package__ = package
    if is_package:
        module.__path__ = []
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


def _try_import(name: str) -> None:
    """Import a module, unless this raises: it may not be needed, or its file has changed."""
    if name not in sys.modules:
        try:
            import_module(name)
        except SystemExit:
            return
        except Exception as exc:
            pass_on(exc)


# -- errors of tasks -------------------------------------------------------------------------------


def missing_global(exc: BaseException) -> str | None:
    if not isinstance(exc, (AttributeError, ImportError, NameError)):
        return None
    name: Any = getattr(exc, "name", None)
    match = re.search(_UNNAMED, str(exc))
    unnamed = match[match.lastindex or 0] if match else None
    found = None
    if isinstance(exc, AttributeError):
        found = _attribute(exc, name or unnamed) or _global_left_none(exc)
    elif isinstance(exc, NameError):
        module = _module_of(exc)
        keys = [key for key in _incoming.missing if key[1] == name and not _has(key)]
        keys.sort(key=lambda key: key[0] != module)
        found = _explained(keys[0]) if keys else None
    elif isinstance(name, str) and (key := key_of_alias(name)) in _incoming.missing:
        found = _explained(key)
    if found is None and unnamed is not None and main.is_replica:
        found = (
            f"If __main__ of the program has {unnamed!r}, it was not sent to this worker, because "
            "no function of its tasks names it. Name it in the function, or pass it as an argument."
        )
    return found


_UNNAMED = "|".join(
    (
        r"variable '([^']+)' is not defined",  # of pandas
        r"^cannot import name '([^']+)' from '__main__'",
        r"^Can't get attribute '([^']+)' on <module '__main__'",  # of an unpickler
        r"^module '__main__' has no attribute '([^']+)'",
    )
)
"""Texts of errors of Python about a name of `__main__` that no code names."""


def _explained(key: Key) -> str:
    reason = _incoming.missing[key]
    return f"The global {said(key)} was not sent to this worker ({reason}). {_remedy(reason)}"


def _remedy(reason: str) -> str:
    if "inheritance" in reason:  # a lock made in a worker would be another one
        return "Pass it in initargs= of the pool, and let the initializer set the global."
    return "Make it in the initializer, or pass what it is made from as an argument."


def _attribute(exc: AttributeError, name: str | None) -> str | None:
    owner = getattr(exc, "obj", None)
    for key in _incoming.missing:
        if key[1].rpartition(".")[2] == name and (
            owner is None or any(owner_of(key) is one for one in (owner, *classes_of(owner)))
        ):
            return _explained(key)
    return None


def _module_of(exc: BaseException) -> str:
    names = [one.f_globals["__name__"] for one in frames_of(exc) if "__name__" in one.f_globals]
    return names[-1] if names else "__main__"


def _global_left_none(exc: AttributeError) -> str | None:
    """Say that code has used a global that is None in this worker, and not in the program."""
    frames = [*frames_of(exc)]
    if not _incoming.missing or not frames or getattr(exc, "obj", exc) is not None:
        return None
    names = set(frames[-1].f_code.co_names)
    # "Config.pool" comes before "pool", because code that reads the first also has the second name.
    for key, reason in sorted(_incoming.missing.items(), key=lambda one: "." not in one[0][1]):
        if names.issuperset(key[1].split(".")) and value_of(key) is None:
            return (
                f"The global {said(key)} is None in this worker, as at the top of the script: the "
                f"program's value could not be sent ({reason}). {_remedy(reason)}"
            )
    return None


# Guards the received state, and the setting of globals.  Reentrant, because loading a value may
# load a message with other globals.
_lock = threading.RLock()
_incoming = _Incoming()


# A forked child may accept another sender than its parent did.
at_fork.renew(globals(), _lock=threading.RLock, _incoming=_Incoming)
