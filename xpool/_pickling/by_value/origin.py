"""Tells where a module comes from, and so how its functions and data reach a worker.

================  ==============================================================================
`INSTALLED`       Python, xpool and installed packages: by name, and nothing of it is sent
`IMPORTED`        a module of the program that a worker can import: definitions by name, data sent
`SENT`            ``__main__``, and modules that a worker cannot import: definitions sent, too
================  ==============================================================================

A worker cannot import a module that was made by hand or by ``spec_from_file_location``, or whose
folder is no longer on `sys.path`.  A module whose file has changed, or that the program has loaded
again (`importlib.reload`), is sent, too, because a worker may import another version of it, or has
done so before.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from xpool._pickling import HEAP_TYPE, Key
from xpool._pickling.by_value.caches import CACHE, Cache
from xpool._python.hidden import CachedFunction, is_attribute
from xpool._python.interrupt import pass_on

INSTALLED, IMPORTED, SENT = range(3)

MAIN_NAMES = frozenset({"__main__", "__mp_main__"})
"""A child of `multiprocessing` has the main module under both names."""

OF_MODULES = frozenset(
    {"__name__", "__builtins__", "__spec__", "__loader__", "__package__", "__cached__", "__path__"}
)
"""Globals that every module has for itself."""

OF_IMPORTS = frozenset(
    {"__file__", "__doc__", "__annotations__", "__annotate__", "__conditional_annotations__"}
    | {"__warningregistry__"}
)
"""Those that the import of a module makes in each process, or warnings do."""

MISSING: Any = object()
"""Takes the place of a global that does not exist."""

# Two dicts: a thousand pairs would count towards the program's next garbage collection.
with_origin: dict[str, Any] = {}
"""The modules whose origin is known, by name.  `__mp_main__` is not in it."""

origins: dict[str, int] = {}
"""The origins of these modules, and of some that were forgotten or replaced."""

_holds_for: tuple[Any, list[str], str] = None, [], ""  # settings, `sys.path`, working folder
_generation = 0  # how often the origins were found again

_changed: dict[str, bool] = {}  # modules of `send_from_now`, and whether workers can import them

stamps: dict[str, Any] = {}
"""Times and sizes of the files of modules that are `IMPORTED`, when their origin was found."""

awaited: set[str] = set()
"""Names of modules that code imports when it runs, and that are not imported yet."""


class _Modules:
    """Takes the place of a module whose globals are the names in `sys.modules`."""

    def __init__(self) -> None:
        self.__dict__ = sys.modules


MODULES = "sys.modules"
"""The module of these names in their keys, where a colon stands for each dot (`key_of_alias`)."""


class _Space(ModuleType):
    """Takes the place of a module of which only the globals are known, from a function."""

    __slots__ = ("_values",)
    __dict__ = property(lambda self: self._values)

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        super().__init__(name)
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None


loose: dict[str, Any] = {MODULES: _Modules()}
"""Modules to which the program refers, and that are not in `sys.modules`."""


def adopt(module: ModuleType) -> None:
    """Let `find_module` find a module that is not in `sys.modules`."""
    name = name_of(module)
    if name is not None and name not in sys.modules and not is_object(module):
        known = loose.setdefault(name, module)
        if type(known) is _Space and vars(known) is vars(module):
            loose[name] = module


def is_object(module: ModuleType) -> bool:
    """Whether a module is an object of a class of the program, and no import makes it.

    For example, it imports another module at first use.
    """
    kind = type(module)
    if kind is ModuleType or attributes_of(module).get("__spec__") is not None:
        return False
    name = name_of(module)
    found = sys.modules.get(name) is module and origin_of(name) != SENT  # type: ignore[arg-type]
    return not found and origin_of(kind.__module__) != INSTALLED


def find_module(name: Any) -> Any:
    """Return the module of this name, or None."""
    found = sys.modules.get(name)
    return loose.get(name) if found is None else found


def canonical(name: Any) -> str:
    """Return a module's name, which is the same for both names of the main module."""
    return "__main__" if name in MAIN_NAMES else str(name)


def origin_of(name: Any) -> int:
    # Another thread writes the origin first.
    module = with_origin.get(name)
    if module is not None and module is sys.modules.get(name):
        return origins[name]
    if name in loose and name not in sys.modules:
        return INSTALLED if _is_installed_as(name, loose[name]) else SENT
    if not isinstance(name, str) or name == "__mp_main__":
        return SENT
    found = INSTALLED
    if is_program(name):
        is_sent = name == "__main__" or name in _changed or not _is_importable(name)
        found = SENT if is_sent else IMPORTED
        if found == IMPORTED and name in sys.modules:
            if name not in stamps:
                stamps[name] = stamp_of(sys.modules[name])
            origins[name], with_origin[name] = found, sys.modules[name]  # bases may lead here again
            if _extends_sent(name):
                _changed[name], found = True, SENT
    if name in sys.modules:
        origins[name] = found
        with_origin[name] = sys.modules[name]
    return found


def _extends_sent(name: str) -> bool:
    """Whether a worker that imports a module would get classes with other base classes.

    These are of a module that is sent, or of one that was loaded again.
    """
    classes = (one for one in list(namespace(name).values()) if issubclass(type(one), type))
    return any(
        base.__module__ != name and _is_sent(base)
        for one in classes
        if one.__module__ == name
        for base in one.__mro__[1:]
    )


def _is_sent(base: type) -> bool:
    """Whether a base class is of a sent module, or the program has another one under its name."""
    origin = origin_of(base.__module__)
    if origin != IMPORTED:
        return origin == SENT
    now = value_of((base.__module__, base.__qualname__))
    return issubclass(type(now), type) and now is not base


def send_from_now(module: str) -> None:
    """Treat a module as one that workers cannot import, because they may import another version."""
    global _generation
    if module in _changed:
        return
    _changed[module] = _is_importable(module)
    with_origin.clear()  # others may have classes with bases of this one
    _generation += 1


def send_edited() -> None:
    """Send modules whose files have changed: new workers would import other versions of them."""
    for name, stamp in list(stamps.items()):
        module = sys.modules.get(name)
        if module is not None and name not in _changed and stamp != stamp_of(module):
            send_from_now(name)


def stamp_of(module: Any) -> Any:
    """Return what tells whether the file of a module has changed, or None."""
    try:
        status = os.stat(module.__file__)
    except Exception as error:  # no file, or an attribute that raises
        pass_on(error)
        return None
    return status.st_mtime_ns, status.st_size


def about_module(name: str) -> tuple[str, Any, bool, bool]:
    """Return what a worker needs to make a module that is sent.

    These are its name, its package, whether it is a package itself, and whether a worker can import
    it nevertheless, for the other effects of the import.
    """
    about = namespace(name)
    return name, about.get("__package__"), "__path__" in about, _changed.get(name, False)


def renew_origins(settings: Any) -> int:
    """Find the origins again if `sys.path` or the working folder has changed.  Return a number that
    grows with each such change, and with each import of modules in `awaited`.

    ``settings``: another object after each change of the path or the folder.
    """
    global _of_program, _holds_for, _generation
    if awaited and not sys.modules.keys().isdisjoint(awaited):
        awaited.difference_update(list(sys.modules))
        _generation += 1
    if settings is not _holds_for[0]:
        try:
            folder = os.getcwd()
        except OSError:  # the folder was removed
            folder = ""
        if _holds_for[1:] != (sys.path, folder):
            with_origin.clear()
            _of_program = [], ()
            _generation += 1
        _holds_for = settings, list(sys.path), folder
    return _generation


_of_program: tuple[list[str], tuple[str, ...]] = [], ()  # modules; those of the program


def program_modules() -> tuple[str, ...]:
    """Return the names of the program's modules that exist."""
    global _of_program
    names = [*sys.modules, *(name for name, one in loose.items() if name_of(one) == name)]
    if names != _of_program[0]:
        _of_program = names, tuple(name for name in names if origin_of(name) != INSTALLED)
    return _of_program[1]


def namespace(module: str) -> dict[str, Any]:
    """Return the globals of a module of the program; empty if there is no such module."""
    return getattr(find_module(module), "__dict__", {})


def attributes_of(value: Any) -> dict[str, Any]:
    # A lazy module is not loaded by this, and a class may override attribute access.
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception as error:  # no attributes, or a class that computes `__dict__`
        pass_on(error)
        return {}
    return found if type(found) is dict else {}


def name_of(value: Any) -> str | None:
    """Return the name of a module; None: it is another object."""
    if not issubclass(type(value), ModuleType):
        return None
    name = attributes_of(value).get("__name__")
    return name if type(name) is str else None


def _file_of(module: Any) -> str | None:
    """Return the file of a module; None: it has none, or is another object."""
    file = None if name_of(module) is None else attributes_of(module).get("__file__")
    return file if isinstance(file, str) else None


def owner_of(key: Key) -> Any:
    """Return the module, class or function that has a global or attribute; None: it is not here."""
    module, path = key
    owner = find_module(module)
    for name in path.split(".")[:-1]:
        owner = getattr(owner, "__dict__", {}).get(name)
    if type(owner) in (staticmethod, classmethod):
        return owner.__func__
    return owner.dispatcher if type(owner) is functools.singledispatchmethod else owner


def place_of(key: Key) -> tuple[Any, str]:
    """Return the namespace (or None) in which a global or attribute is, and its name there."""
    name = key[1].rpartition(".")[2].replace(":", ".")
    owner = owner_of(key)
    holder: Any = getattr(owner, "__dict__", None)
    if type(owner) is not ModuleType and name_of(owner) is not None and name not in holder:
        made = any(hasattr(type(vars(one).get(name)), "__set__") for one in type(owner).__mro__)
        made |= any("__setattr__" in vars(one) for one in type(owner).__mro__[:-2])
        if made and origin_of(key[0]) == INSTALLED:
            holder = _Properties(owner)
    elif is_part(key):
        holder = Parts(owner)
    elif name == CACHE and type(owner) is CachedFunction:
        holder = Cache(owner)
    return holder, name


# By module and attribute: the last value that a property of an installed module had.
_read: dict[tuple[int, str], Any] = {}


class _Properties:
    """Has the attributes of a module that are properties of its class, as those of
    ``torch.backends.cudnn``.

    If a property raises, `get` returns the last value.  A property may return a new object each
    time, so `get` returns the last object if both are equal texts or numbers.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def get(self, name: str, default: Any = None) -> Any:
        place = id(self._module), name
        last = _read.get(place, MISSING)
        try:
            value = getattr(self._module, name)
        except Exception as exc:  # a property can raise any error
            pass_on(exc)
            return default if last is MISSING else last
        if type(value) is type(last) and type(value) in (str, int, float) and value == last:
            return last
        _read[place] = value
        return value

    def __getitem__(self, name: str) -> Any:
        value = self.get(name, MISSING)
        if value is MISSING:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __contains__(self, name: str) -> bool:
        return True


CODE = "__code__"
"""The name of the part of a function that is its code."""


class Parts(dict[str, Any]):
    """The parts of a function: its defaults by "=" and the name of the parameter, and its code."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        code, given = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
        named = (function.__kwdefaults__ or {}).items()
        self.update((f"={name}", value) for name, value in (*zip(names, given), *named))
        self[CODE] = code

    def set(self, name: str, value: Any) -> None:
        function, code = self._function, self._function.__code__
        positional = code.co_varnames[: code.co_argcount]
        self[name] = value
        if name == CODE:
            function.__code__ = value
        elif name[1:] not in positional:
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), name[1:]: value}
        else:
            values = [self.get(f"={one}", MISSING) for one in positional]
            first = next(n for n, one in enumerate(values) if one is not MISSING)
            function.__defaults__ = (*(None if one is MISSING else one for one in values[first:]),)


def is_part(key: Key) -> bool:
    """Whether a key is that of a part of a function."""
    name = key[1].rpartition(".")[2]
    return (name == CODE or name[:1] == "=") and type(owner_of(key)) is FunctionType


def value_of(key: Key) -> Any:
    """Return what `place_of` leads to, or `MISSING`."""
    holder, name = place_of(key)
    return MISSING if holder is None else holder.get(name, MISSING)


def is_patch(value: Any, module: str) -> bool:
    """Whether a value is a function by which the script has replaced a function of this module.

    `functools.wraps` gives such a function the names of the replaced one.  A function that `exec`
    has made in the module has the module's globals, and no file; or a function of the module has
    made it, with a ``global`` statement.
    """
    if type(value) is not FunctionType:
        return False
    if (values := value.__globals__) is namespace(module):
        made = value.__code__.co_filename[:1] == "<" or is_made_in_function(value)
        return made and "." not in value.__qualname__ and origin_of(module) == IMPORTED
    maker = values.get("__name__")
    return isinstance(maker, str) and maker != module and origin_of(maker) == SENT


def _is_replaced(function: FunctionType, space: dict[str, Any], module: str) -> bool:
    """Whether a function is a patch of this module; most are seen not to be one without a call."""
    code = function.__code__
    usual = code.co_flags & NESTED == 0 and code.co_filename[:1] != "<"
    return not (usual and function.__globals__ is space) and is_patch(function, module)


NESTED = 16  # CO_NESTED: the code is inside of a function


def is_made_in_function(function: FunctionType) -> bool:
    """Whether the ``def`` statement of a function is inside of another function, although it does
    not bind a local variable there."""
    code = function.__code__
    if not code.co_flags & NESTED or "__wrapped__" in function.__dict__:
        return False
    path = getattr(code, "co_qualname", None)  # from Python 3.11 on
    if path is None:
        return code.co_name == function.__name__ and "<locals>" not in function.__qualname__
    return bool(path == function.__qualname__ and "<locals>" not in path)


def module_of(values: dict[str, Any]) -> str | None:
    """Return the name of the module with these globals; None: they are no module's."""
    name = values.get("__name__")
    if not isinstance(name, str):
        return None
    if name not in sys.modules and name not in loose:  # `module_from_spec` does not register one
        if getattr(values.get("__spec__"), "name", None) != name:
            return None
        loose[name] = _Space(name, values)
    return canonical(name) if getattr(find_module(name), "__dict__", None) is values else None


_STANDARD_LIBRARY = os.path.realpath(os.path.dirname(os.__file__)) + os.sep


_PACKAGES = frozenset({"xpool", "numpy", "torch"})
"""Packages that are not the program's, also if they run from their source."""


own_packages: set[str] = set()
"""Installed packages that are the program: see `_look_at_main`.  In a worker, its parent's."""

_main = 0, 0  # the id of the main module that was looked at, and its number of globals then


def _look_at_main(main: Any) -> None:
    """Find the package from which the program was started, if it was installed from a local file.

    This is that of `python -m package`, or the one that has this console script.
    """
    global _main
    values = attributes_of(main)
    _main = id(main), len(values)  # the import statement of a console script may not have ended
    spec, file = values.get("__spec__"), _file_of(main)
    names, script = {getattr(spec, "name", None)}, ""
    if spec is None and file is not None and not file.endswith(".py"):
        # The module has the script's function under the same name, which may be a click command.
        script = f"/bin/{os.path.basename(file)}"
        own = [(name, one) for name, one in list(values.items()) if name_of(one) is None]
        own = [(name, one) for name, one in own if not name.startswith("__")]
        names = {
            module
            for module, there in modules()
            if any(attributes_of(there).get(name, MISSING) is one for name, one in own)
        }
    tops = {name.partition(".")[0] for name in names if isinstance(name, str)} - MAIN_NAMES
    found = {top for top in tops - own_packages if _is_installed_from_file(top, script)}
    if found:
        own_packages.update(found)
        with_origin.clear()


def _is_installed_from_file(top: str, script: str) -> bool:
    """Whether pip has installed a package, with this script, from a folder or a file, and not from
    an index.  A conda package may say so, too, of the machine that has built it."""
    file = _file_of(sys.modules.get(top))
    if file is None or not is_installed(file):
        return False
    folder, name = os.path.split(os.path.abspath(file))
    if name.startswith("__init__."):
        folder, name = os.path.dirname(folder), f"{os.path.basename(folder)}/{name}"
    for one in os.listdir(folder):
        url = os.path.join(folder, one, "direct_url.json")
        if one.endswith(".dist-info") and os.path.exists(url):
            with open(url, encoding="utf-8") as text:
                about = text.read()
            files = _recorded(os.path.dirname(url))
            made_here = '"file:' in about and "conda" not in about and name in files
            if made_here and any(one.endswith(script) for one in files):
                return True
    return False


_OF_CYTHON = ("_cython_", "_cyutility", "cython_runtime")
"""Beginnings of names of modules without a file that modules in Cython make."""


def is_program(name: Any) -> bool:
    """Whether a module belongs to the program, and not to Python, xpool or an installed package."""
    if not isinstance(name, str) or name in MAIN_NAMES:
        return True
    top = name.partition(".")[0]
    if top in _PACKAGES or name in sys.builtin_module_names or top.startswith(_OF_CYTHON):
        return False
    main = sys.modules.get("__main__")
    if _main != (id(main), len(attributes_of(main))):
        _look_at_main(main)
    if top in own_packages:
        return True
    while name:
        file = _file_of(sys.modules.get(name))
        if file is not None and (os.path.isabs(file) or os.path.exists(file)):  # not "_ops.py"
            return not is_installed(file)
        # A class may name a module that does not exist, and a namespace package has no file.
        name = name.rpartition(".")[0]
    return top not in sys.stdlib_module_names


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    # A few thousand files are in a few hundred folders, and few files are links.
    real = os.path.realpath(file) if os.path.islink(file) else file
    return _has_installed(os.path.dirname(real)) or _is_listed(file)


@functools.cache
def _has_installed(folder: str) -> bool:
    folder = os.path.realpath(folder)
    parts = folder.split(os.sep)
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or (folder + os.sep).startswith(_STANDARD_LIBRARY)
    )


def _is_listed(file: str) -> bool:
    """Whether a file is of a package in a folder that `pip install --target` has made."""
    places = {os.path.abspath(one) for one in sys.path if isinstance(one, str)}
    file = folder = os.path.abspath(file)
    while folder not in places:
        above = os.path.dirname(folder)
        if above == folder:
            return False
        folder = above
    return os.path.relpath(file, folder).replace(os.sep, "/") in _listed(folder)


@functools.cache
def _listed(folder: str) -> frozenset[str]:
    """Return the files below a folder of which it has the `RECORD`."""
    try:
        distributions = [one for one in os.listdir(folder) if one.endswith(".dist-info")]
    except OSError:  # an archive, or a folder that is gone
        return frozenset()
    return frozenset().union(*(_recorded(os.path.join(folder, one)) for one in distributions))


def _recorded(distribution: str) -> set[str]:
    """Return the files of a distribution, by its ``dist-info`` folder."""
    try:
        # Not `pathlib`, whose import takes 5 ms.
        with open(
            os.path.join(distribution, "RECORD"), encoding="utf-8", errors="replace"
        ) as lines:
            return {line.partition(",")[0] for line in lines}
    except OSError:
        return set()


def _is_importable(name: str) -> bool:
    """Whether another process with this `sys.path` imports the same file by this name."""
    module: Any = sys.modules.get(name)
    if module is None:
        return True  # an import will tell
    own = name_of(module)
    if own is not None and own != name and sys.modules.get(own) is module:
        return own not in MAIN_NAMES and _is_importable(own)  # a worker has this alias, too
    spec = spec_of(name, in_worker=True)
    return spec is not None and _same_file(spec, module)


def spec_of(name: str, in_worker: bool = False) -> Any:
    """Return the spec of a module, without importing it or its packages; None: there is none.

    ``in_worker``: leave out the import finders of the program, which workers lack.
    """
    package, path = name.rpartition(".")[0], None
    if package:
        above = spec_of(package, in_worker)
        if above is None:
            return None
        # Finders search `sys.path` for None, but nothing is below a module that is no package.
        path = above.submodule_search_locations or []
    finder: Any
    for finder in (importlib.machinery.PathFinder, *sys.meta_path):
        maker = getattr(finder, "__module__", "")
        # A finder of xpool answers only for modules that are not imported yet.
        if maker.startswith("xpool.") or (in_worker and is_program(maker)):
            continue
        try:
            spec = finder.find_spec(name, path)
        except Exception as exc:  # a finder of the program can raise any error, or have no method
            pass_on(exc)
            continue
        if spec is not None:
            return spec
    return None


def _same_file(spec: Any, module: ModuleType) -> bool:
    file = _file_of(module)
    if file is None:  # a namespace package
        return spec.origin is None and spec.submodule_search_locations is not None
    return isinstance(spec.origin, str) and os.path.realpath(spec.origin) == os.path.realpath(file)


def _is_installed_as(name: str, module: Any) -> bool:
    """Whether an import by this name, or of the module above, makes a module of a package."""
    file = _file_of(module)
    if file is None or not is_installed(file):
        return is_attribute(module) and not is_program(name)
    return (spec := spec_of(name)) is not None and _same_file(spec, module)


_OF_WORKERS = frozenset(
    {"xpool", "warnings", "signal", "threading", "multiprocessing", "subprocess", "time", "atexit"}
    | {"faulthandler", "gc", "importlib", "io", "pickle", "select", "selectors", "socket"}
)
"""Packages that a worker itself uses: their names in `sys.modules` lead to its own modules."""


def key_of_alias(name: str) -> Key:
    """Return the key of a name in `sys.modules`."""
    return MODULES, name.replace(".", ":")


def modules() -> Iterator[tuple[str, Any]]:
    """Yield the names in `sys.modules`, and what is there; other threads may import meanwhile.

    A list of pairs would count towards the program's next garbage collection.
    """
    for name in list(sys.modules):
        if (module := sys.modules.get(name, MISSING)) is not MISSING:
            yield name, module


def own_modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the program's modules, except `__main__`, by their packages: a question for each of the
    modules of a large program takes long."""
    tops: dict[str, bool] = {"__main__": False, "__mp_main__": False, "xpool": False}
    for name, module in modules():
        top = name.partition(".")[0]
        own = tops.get(top)
        if own is None:
            own = tops[top] = top not in sys.stdlib_module_names and is_program(top)
        if own and issubclass(type(module), ModuleType) and is_program(name):
            yield name, module


def code_of(module: Any) -> CodeType | None:
    """Return the code that the import of a module runs; None: it is not in Python."""
    spec = getattr(module, "__spec__", None)
    get = getattr(getattr(spec, "loader", None), "get_code", None)
    code = None if get is None else get(spec.name)  # type: ignore[union-attr]
    return code if type(code) is CodeType else None


def aliases() -> Iterator[Key]:
    """Yield the keys of the names in `sys.modules` to which the program has given a module of
    another name, an object that is no module, or None."""
    for name, value in modules():
        own = name_of(value)
        if own == name and not is_object(value):
            continue
        if type(name) is not str or name in MAIN_NAMES or name.partition(".")[0] in _OF_WORKERS:
            continue
        if value is None or not _is_of_package(name, value, own):
            yield key_of_alias(name)


def _is_of_package(name: str, value: Any, own: str | None) -> bool:
    """Whether the import of an installed package puts an object into `sys.modules` by this name.

    ``own``: the name of a module; None: it is another object.
    """
    if own is None:
        own = type(value).__module__
        file = getattr(spec_of(name), "origin", None) if name == own else None  # in its own place
    else:
        file = _file_of(value)
    installed = is_installed(file) if isinstance(file, str) else not is_program(own)
    package = name.rpartition(".")[0]
    return installed and (name == own or name.startswith("_") or not is_program(package))


def globals_of_modules(
    free: frozenset[Any],
) -> tuple[dict[int, list[tuple[str, str]]], dict[int, tuple[str, str, type]]]:
    """Return, by id, the globals of modules that workers import, other than definitions and objects
    of the types ``free``.

    The second dict has the objects without a state (``UNSET = Unset()``).  These objects are sent
    by name, so a worker uses its own object: defaults of functions in the worker's modules refer to
    it.
    """
    found: dict[int, list[tuple[str, str]]] = {}
    named: dict[int, tuple[str, str, type]] = {}
    for name in program_modules():
        space = namespace(name) if origin_of(name) == IMPORTED else {}
        for attribute, value in list(space.items()):
            kind = type(value)
            if (
                (kind is not object and kind in free)
                or issubclass(type(value), type)
                or (kind is FunctionType and not _is_replaced(value, space, name))
            ):
                continue
            if kind is object or (type(attribute) is str and not attribute.startswith("__")):
                found.setdefault(id(value), []).append((name, attribute))
                if has_no_state(value):
                    named.setdefault(id(value), (name, attribute, kind))
    return found, named


def has_no_state(value: Any) -> bool:
    """Whether it is an `object()`, or one of a class of the program, without attributes."""
    kind = type(value)
    return kind is object or (origin_of(kind.__module__) != INSTALLED and is_empty(value))


def is_empty(value: Any) -> bool:
    kind = type(value)
    if kind.__basicsize__ > _Empty.__basicsize__ or kind.__mro__[-2].__flags__ & HEAP_TYPE == 0:
        return False  # derived from a type in C, such as `dict`
    for own in map(vars, kind.__mro__):
        if own.get("__slots__") or type(own.get("__dict__")) is property:  # that of another object
            return False
    return not getattr(value, "__dict__", None)


class _Empty:
    pass


_homes: dict[tuple[str, str, int], tuple[int, str | None]] = {}


FLAGS = "absl.flags._flagvalues"
"""The module of the class of ``absl.flags.FLAGS``, which is sent by value."""


def home_of(key: Key, value: Any) -> Key | None:
    """Return the installed module that also has a global under its name, and the name; or None."""
    kind = type(value)
    if "." in key[1] or issubclass(kind, (type, FunctionType)) or kind.__module__ == FLAGS:
        return None
    return place_in_package(*key, value)


def place_in_package(here: str, name: str, value: Any) -> Key | None:
    """Return the installed module, other than ``here``, that has this global, and its name."""
    known = here, name, id(value)
    count, home = _homes.get(known, (0, None))
    if count != len(sys.modules) or (
        home is not None
        and getattr(sys.modules.get(home), "__dict__", {}).get(name, MISSING) is not value
    ):
        found = (
            module
            for module, one in modules()
            if getattr(one, "__dict__", {}).get(name, MISSING) is value
            and module != here  # the program has assigned it there
            and origin_of(module) == INSTALLED
        )
        home = next(found, None)
        if len(_homes) > 10_000:
            _homes.clear()
        _homes[known] = len(sys.modules), home
    return None if home is None else (home, name)


def is_imported(value: Any) -> bool:
    """Whether a value is a module that the receiver finds by its name."""
    if not issubclass(type(value), ModuleType):
        return False
    adopt(value)
    return find_module(name_of(value)) is value and not is_object(value)
