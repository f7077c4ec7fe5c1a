"""Finds the globals of the program that the code of a function or class uses.

A global is named by a key: its module and its name.  If code uses a module of the program, the
names in the code are looked up in that module, too (``config.rate``).  If code does more with the
module than to get or set attributes, or calls `eval`, `exec` or `globals`, all globals of the
module count.  Names that the program has added to `builtins` are globals of this module.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import WeakKeyDictionary

from xpool._pickling import Key
from xpool._pickling.by_value.origin import (
    IMPORTED,
    INSTALLED,
    adopt,
    attributes_of,
    awaited,
    canonical,
    find_module,
    module_of,
    name_of,
    namespace,
    origin_of,
    program_modules,
)
from xpool._pickling.reducers import CYTHON
from xpool._python.hidden import CachedFunction

# The opcodes of all versions from 3.10 on (Lib/opcode.py); LOAD_FROM_DICT_OR_GLOBALS is since 3.12.
LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_ABOUT_GLOBALS = LOADS | {"STORE_GLOBAL", "DELETE_GLOBAL"}
_OF_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
_OF_IMPORTS = frozenset({"IMPORT_NAME", "IMPORT_FROM", "SWAP", "ROT_TWO", "POP_TOP"})
"""What an import statement consists of, beside stores."""
_ALL = frozenset({"eval", "exec", "globals", "vars", "locals", "dir"})
_OPENERS = [getattr(builtins, name) for name in sorted(_ALL)]
_OF_EVAL = frozenset({"builtins", "pandas"})
_SPACES = frozenset({"__globals__", "f_globals"})
"""Attributes that are the globals of a function or frame."""
_BY_NAME = frozenset({"getattr", "hasattr", "getmembers", "getmembers_static", "__dict__"})
_BY_NAME |= {"attrgetter", "methodcaller"}
"""Names by which code finds attributes that it does not name."""


_OF_FRAMES = frozenset({"query", "eval"})
"""Methods of pandas that get a text in which `@` stands before a variable."""


_OF_SQL = frozenset({"sql", "execute", "query", "from_query"})
"""Functions of duckdb that get a text with the names of frames."""


_NEWLOCALS, _HAS_DOCSTRING = 0x2, 0x4000000  # `inspect.CO_NEWLOCALS`, `CO_HAS_DOCSTRING`


def _docstring_of(code: CodeType) -> Any:
    """Return the docstring of a function, or None."""
    known = sys.version_info >= (3, 14)
    return None if known and not code.co_flags & _HAS_DOCSTRING else code.co_consts[0]


def _names_in(text: str, named: tuple[str, ...]) -> Iterator[str]:
    """Yield the variables in a text of code that names these functions."""
    if "@" in text and not _OF_FRAMES.isdisjoint(named):  # `frame.query("price < @limit")`
        yield from re.findall(f"@({_WORD})", text)
    if "~" in text:  # a formula: `ols("price ~ scale(size)", frame)`
        yield from re.findall(_WORD, text)
    if not _OF_SQL.isdisjoint(named):  # `duckdb.sql("select max(price) from frame")`
        yield from re.findall(rf"\b(?:from|join)\s+({_WORD})", text, re.IGNORECASE)


class Code:
    """What code uses, with the functions and classes in it."""

    __slots__ = ("attributes", "handed", "held", "imports", "names", "whole")

    def __init__(self, code: CodeType) -> None:
        self.names = set[str]()  # globals that it reads or writes
        self.attributes = set[str]()  # all names in it
        # Globals, ".attributes" and "=locals" that it uses other than for their attributes.
        self.held = set[str]()
        # Of each import: the relative level, the module's name, and the names after `import`.
        self.imports = set[tuple[int, str, tuple[str, ...]]]()
        self.handed = set[tuple[int, str]]()  # those of which it holds the module itself
        bound = list[tuple[str, tuple[int, str], str]]()  # locals that imports bind
        for one in inner(code):
            self._add(one, bound)
        for name, module, part in bound:
            if f"={name}" in self.held and part:
                self.held.add(f".{part}")
            elif f"={name}" in self.held:
                self.handed.add(module)
        # `getattr(sys.modules[__name__], name)`
        of_modules = "modules" in self.attributes and not _BY_NAME.isdisjoint(self.attributes)
        spaces = _SPACES.isdisjoint(self.attributes)
        self.whole = of_modules or not spaces or not _ALL.isdisjoint(self.names)

    def _add(self, code: CodeType, bound: list[tuple[str, tuple[int, str], str]]) -> None:
        self.attributes.update(code.co_names)
        if not code.co_names:
            return
        if any(type(one) is tuple and "allow_pickle" in one for one in code.co_consts):
            self.attributes.add("allow_pickle")  # `numpy.load(path, allow_pickle=True)`
        if not _BY_NAME.isdisjoint(code.co_names):  # `getattr(module, "rate")`
            texts = (one for one in code.co_consts if type(one) is str)
            self.attributes.update(one for one in texts if one.isidentifier())
        for text in code.co_consts if code.co_flags & _NEWLOCALS else ():  # not those of classes
            if type(text) is str and text is not _docstring_of(code):
                self.names.update(_names_in(text, code.co_names))
        import dis  # imported here, because its import is slow

        last = part = ""
        module: Any = None
        names: Any = None
        constants: list[Any] = [None, None]  # the last two operands
        for instruction in dis.get_instructions(code):
            kind = instruction.opname
            if kind == "EXTENDED_ARG":
                continue
            if last and kind not in _OF_ATTRIBUTES:
                self.held.add(last)
            before, last = last, ""
            if kind in _ABOUT_GLOBALS:
                self.names.add(instruction.argval)
                if kind in LOADS:
                    last = instruction.argval
            elif kind in _OF_ATTRIBUTES:
                if instruction.argval == "load":  # `torch.load`
                    self.attributes.add(f"{before.lstrip('=')}.load")
                last = f".{instruction.argval}"
            elif kind == "IMPORT_NAME":
                level, names = constants
                module, part = (level, instruction.argval), ""
                self.imports.add((*module, names or ()))
            elif kind == "IMPORT_FROM":  # also for `import package.module as name`
                part = instruction.argval if names else ""
            elif "_FAST" in kind or "_DEREF" in kind:  # of one local variable, or of two
                two = instruction.argval
                of = two if type(two) is tuple else [two]
                for verb, name in zip(re.findall("LOAD|STORE|DELETE", kind), of):
                    if last:
                        self.held.add(last)
                    last = f"={name}" if verb == "LOAD" else ""
                    if verb == "STORE" and module is not None:
                        bound.append((name, module, part))
            if kind not in _OF_IMPORTS and not kind.startswith("STORE_"):
                module = None
            constants = [constants[1], instruction.argval]


_codes: WeakKeyDictionary[CodeType, Code] = WeakKeyDictionary()


def inner(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions and classes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from inner(constant)


def use_of(code: CodeType) -> Code:
    found = _codes.get(code)
    if found is None:
        found = _codes[code] = Code(code)
    return found


def is_open(function: FunctionType) -> bool:
    """Whether a function may use globals that its code does not name, also globals that are new."""
    use = use_of(function.__code__)
    return not _UNNAMED.isdisjoint(use.attributes) or is_whole(function.__globals__, use)


def is_whole(values: dict[str, Any], use: Code) -> bool:
    """Whether code with these globals may use all of them."""
    if use.whole:
        return True
    # `run = eval`, `builtins.eval(text)`, `pd.eval(text)`; but not `@py_builtins.locals()`, which
    # pytest writes into functions with assertions.
    found = (values.get(name) for name in use.names if name.isidentifier())
    return any(
        one in _OPENERS
        if type(one) is BuiltinFunctionType
        else type(one) is ModuleType
        and name_of(one) in _OF_EVAL
        and not _ALL.isdisjoint(use.attributes)
        for one in found
    )


def keys_of(function: FunctionType) -> set[Key]:
    """Return the globals of the program that a function uses.

    If its globals are no module's, they go with the function, and are not among these.
    """
    values = function.__globals__
    module = module_of(values)
    if module is not None and origin_of(module) == INSTALLED:
        return set()
    use = use_of(function.__code__)
    found = set[Key]() if module is None else {(module, name) for name in use.names}
    whole = is_whole(values, use)
    if whole and module is not None:
        found.update((module, name) for name in list(values) if type(name) is str)
    given: list[tuple[Any, bool]]
    given = [(values.get(name), name in use.held or whole) for name in use.names]
    given += [(one, f"={name}" in use.held or whole) for name, one in variables_of(function)]
    given += [(one, True) for one in _defaults_of(function)]
    modules = [one for one in given if issubclass(type(one[0]), ModuleType)]
    for level, name, inside in use.imports:
        absolute = absolute_name(level, name, values.get("__package__"))
        if not absolute:
            continue
        imported: Any = sys.modules.get(absolute)
        if name_of(imported) is not None:
            modules.append((imported, whole or (level, name) in use.handed))
            known = attributes_of(imported)
            submodules = [f"{absolute}.{one}" for one in inside if one not in known]
        else:
            submodules = [absolute]
        package: Any = sys.modules.get(absolute.partition(".")[0])
        if not inside and name_of(package) is not None:  # `import a.b` binds `a`
            modules.append((package, (level, name) in use.handed))
        awaited.update(one for one in submodules if one not in sys.modules)
    found.update(("builtins", name) for name in use.names - values.keys() if _is_added(name))
    if "FLAGS" in use.attributes and "absl.flags" in sys.modules:
        found.add(("absl.flags", "FLAGS"))
    named = use.attributes.union(*(_names_of(one) for one, _ in given))
    packages = set[str]() if _UNNAMED.isdisjoint(named) else _packages_of(given, use)
    if not _ANY_CLASS.isdisjoint(named):
        of_all = not (_OF_ALL.isdisjoint(named) and _OF_PICKLES.isdisjoint(packages))
        found |= own_classes(program_modules() if of_all else (module or "__main__", "__main__"))
    of_texts = not (_FINDERS.isdisjoint(named) or _OF_FINDERS.isdisjoint(packages))
    if of_texts or not _ANY_MODULE.isdisjoint(use.attributes):
        every = ((one, find_module(one)) for one in program_modules())
        # `getattr(import_module(path), name)`
        computed = of_texts or not (
            _IMPORTS.isdisjoint(use.attributes) or _BY_NAME.isdisjoint(use.attributes)
        )
        modules += [
            (one, computed or (whole and name == "__main__")) for name, one in every if name_of(one)
        ]
        found.add(("__main__", "__getattr__"))
    there = in_modules(modules, use, expand=True)
    found.update((canonical(one.__name__), name) for one, name, _ in there)
    return found


def _names_of(value: Any) -> tuple[str, ...]:
    """Return the names by which code could name a function that it has under another name."""
    if not issubclass(type(value), (FunctionType, BuiltinFunctionType)):
        return ()
    return value.__name__, f"{str(value.__module__).partition('.')[0]}.{value.__name__}"


def _packages_of(given: Iterable[tuple[Any, bool]], use: Code) -> set[str]:
    """Return the packages of what code imports, and of modules, functions and classes."""
    found = {name for _, name, _ in use.imports}
    for one, _ in given:
        if issubclass(type(one), ModuleType):
            found.add(getattr(one, "__name__", ""))
        elif issubclass(type(one), type):  # `class Reader(pickle.Unpickler)`
            found.update(str(base.__module__) for base in one.__mro__)
        elif _names_of(one):
            found.add(str(one.__module__))
    return {name.partition(".")[0] for name in found}


_OF_ALL = frozenset({"__subclasses__", "allow_pickle", "read_pickle", "shelve", "unsafe_load"})
_OF_ALL |= {"torch.load", "yaml.load"}
_ANY_CLASS = _OF_ALL | {"load", "loads", "Unpickler"}
"""Names by which code gets classes that it does not name: those of a pickle, for example.  Those
in `_OF_ALL` find them in all modules."""

_OF_PICKLES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "joblib"})
"""Packages whose `load` finds classes in all modules.  `json` has a `load`, too."""

_IMPORTS = frozenset({"import_module", "__import__"})
_ANY_MODULE = _IMPORTS | {"modules"}
"""Names by which code gets modules that it does not name: ``sys.modules["__main__"].rate``."""

_FINDERS = frozenset({"resolve_name", "locate", "instantiate", "import_string"})
_OF_FINDERS = frozenset({"pkgutil", "pydoc", "hydra", "django", "werkzeug"})
"""Functions that get a text with a module and a name in it, and the packages that have them."""

_UNNAMED = _ANY_CLASS | _ANY_MODULE | _FINDERS


def _is_added(name: str) -> bool:
    """Whether a name is one that the program has added to `builtins`."""
    value = vars(builtins).get(name, ...)
    if value is ... or value is NotImplemented or name.startswith("__"):
        return False
    own = issubclass(type(value), (type, BuiltinFunctionType)) and value.__module__ in _OF_PYTHON
    return not own and type(value).__module__ != "_sitebuiltins"


_OF_PYTHON = frozenset({"builtins", "io", "_io"})


def own_classes(modules: Iterable[str]) -> set[Key]:
    """Return the globals of these modules that are classes of the program."""
    spaces = [(one, list(namespace(one).items())) for one in modules]
    every = ((one, name, value) for one, items in spaces for name, value in items)
    some = ((one, name, value) for one, name, value in every if issubclass(type(value), type))
    return {(one, name) for one, name, value in some if origin_of(value.__module__) != INSTALLED}


def of_annotations(annotations: dict[str, Any], module: str) -> set[Key]:
    """Return the globals that are named in annotations that are texts."""
    values = namespace(module)
    found = set[Key]()
    for one in annotations.values():
        for name in re.findall(_WORD, one) if type(one) is str else ():
            if not issubclass(type(values.get(name, sys)), ModuleType):
                found.add((module, name))
    return found


_WORD = r"[^\W\d]\w*"


def absolute_name(level: int, name: str, package: Any) -> str:
    """Return the name of a module that an import statement names; "": the import would fail."""
    if not level:
        return name
    above = package.rsplit(".", level - 1) if isinstance(package, str) and package else []
    if len(above) < level:
        return ""
    return f"{above[0]}.{name}" if name else above[0]


def in_modules(
    modules: Iterable[tuple[ModuleType, bool]], use: Code, expand: bool = False
) -> Iterator[tuple[ModuleType, str, bool]]:
    """Yield the globals that code uses of the program's modules to which it refers.

    An item is a module, the name of a global of it, and whether the code uses the global itself: a
    module may be used only for its attributes.

    Args:
        modules: the modules that the code refers to, each with whether it uses the module itself.
        expand: yield all globals of a module that the code uses itself, and the submodules of
            installed packages: the import of `xml` does not import `xml.etree`.
    """
    todo, seen = [*modules], set[tuple[int, bool]]()
    for module, held in todo:
        key = id(module), held and expand
        adopt(module)
        if key in seen:
            continue
        seen.add(key)
        inside = vars(module)
        if origin_of(module.__name__) == INSTALLED:
            for name in use.attributes & inside.keys() if expand else ():
                below: Any = inside.get(name)
                known = sys.modules.get(f"{module.__name__}.{name}")
                if issubclass(type(below), ModuleType) and below is known:
                    yield module, name, False
                    todo.append((below, False))  # type: ignore[arg-type]
            continue
        # A class of its own may have code that uses them.
        every = expand and (held or type(module) is not ModuleType)
        names = set(inside) if every else use.attributes & inside.keys()
        names |= ({"__getattr__", "__name__"} if expand else {"__getattr__"}) & inside.keys()
        for name in names:
            of_it = f".{name}" in use.held
            yield module, name, of_it
            # Not `isinstance`: `__class__` may be overridden, and may raise.
            if issubclass(type(value := inside.get(name)), ModuleType):
                todo.append((value, of_it))  # type: ignore[arg-type]


def of_compiled(key: Key) -> set[Key]:
    """Return the globals that come with a global of a module in Cython.

    Its functions have no code that tells what they use, so these are all globals of the module, and
    of the program's modules to which it refers.  The module's name has them, and all others have
    the name.
    """
    module, path = key
    values = namespace(module)
    if (module, len(values)) not in _in_cython:
        _in_cython[module, len(values)] = origin_of(module) == IMPORTED and any(
            type(one).__name__ == CYTHON and one.__module__ == module
            for one in list(values.values())
        )
    if not _in_cython[module, len(values)]:
        return set()
    if path != "__name__":
        return {(module, "__name__")}
    named = map(name_of, list(values.values()))
    found = {module, *(one for one in named if one is not None and origin_of(one) != INSTALLED)}
    return {(one, name) for one in found for name in namespace(one) if not name.startswith("__")}


_in_cython: dict[tuple[str, int], bool] = {}


def reads(obj: Any, known: dict[int, tuple[Any, set[Key]]]) -> set[Key]:
    """Return the globals that a function or class of the program uses, with its parts.

    Its parts are the function inside a decorator, methods and defaults.  Globals that are used only
    by other globals are not included.

    Args:
        obj: the function or class.
        known: by id, functions and what they use (`keys_of`): classes share those of their bases.
    """
    found, seen, todo = set[Key](), set[int](), [obj]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if issubclass(type(one), FunctionType):
            if id(one) not in known:
                known[id(one)] = one, keys_of(one)
            found |= known[id(one)][1]
        elif issubclass(type(one), ModuleType) and origin_of(one.__name__) != INSTALLED:
            found.update((canonical(one.__name__), name) for name in vars(one))
        todo.extend(_inside(one))
        for kind in (one, type(one)):  # a class of the program, and the class of an instance
            if issubclass(type(kind), type) and origin_of(kind.__module__) != INSTALLED:
                found.add((canonical(kind.__module__), kind.__qualname__.partition(".")[0]))
    return found


def _inside(one: Any) -> Iterable[Any]:
    """Return the objects that an object directly contains, if code may be among them."""
    kind = type(one)
    parts = _PARTS.get(kind)
    if parts is not None:
        return parts(one)
    if issubclass(type(one), property):
        return functions_in(one)
    if issubclass(type(one), functools.partial):
        return one.func, *one.args, *one.keywords.values()
    is_class = issubclass(type(one), type)
    if origin_of((one if is_class else kind).__module__) == INSTALLED:
        return filter(callable, attributes_of(one).values()) if wraps_own(one) else ()
    return *_attributes(one), *(one.__bases__ if is_class else ())


def wraps_own(obj: Any) -> bool:
    """Whether an object has the name of a function of the program (`functools.update_wrapper`)."""
    own = attributes_of(obj)
    named = type(own.get("__module__")) is str and type(own.get("__qualname__")) is str
    return named and origin_of(own["__module__"]) != INSTALLED


def functions_in(attribute: Any) -> tuple[Any, ...]:
    """Return the functions of a property, static method or class method; else the object itself."""
    # Not `isinstance`: `__class__` may be overridden, and may warn.
    if issubclass(type(attribute), property):
        return attribute.fget, attribute.fset, attribute.fdel
    own = type(attribute) in (staticmethod, classmethod)
    return (attribute.__func__,) if own else (attribute,)


def in_python(cls: type, name: str) -> bool:
    """Whether a method is Python code."""
    found = getattr(cls, name, None)
    return isinstance(getattr(found, "__func__", found), FunctionType)


def required_of(function: FunctionType) -> tuple[str, ...]:
    """Return the names of the parameters of a function that have no default."""
    code, keywords = function.__code__, function.__kwdefaults__ or {}
    end = code.co_argcount - len(function.__defaults__ or ())
    named = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    return *code.co_varnames[:end], *(name for name in named if name not in keywords)


def classes_of(obj: Any) -> tuple[type, ...]:
    """Return the classes in which an attribute of a class or another object is looked up."""
    return obj.__mro__ if isinstance(obj, type) else type(obj).__mro__


def variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the enclosed variables of a function that have a value."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):
            yield name, cell.cell_contents


def _defaults_of(function: FunctionType) -> tuple[Any, ...]:
    return *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()


def _of_function(function: FunctionType) -> Iterable[Any]:
    # `keys_of` looks at modules among these.
    given = *(one for _, one in variables_of(function)), *_defaults_of(function)
    inside = (one for one in given if not issubclass(type(one), ModuleType))
    return *inside, *vars(function).values()


def _attributes(one: Any) -> Iterable[Any]:
    return list(getattr(one, "__dict__", {}).values())


_PARTS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    FunctionType: _of_function,
    MethodType: lambda one: (one.__func__,),
    **dict.fromkeys((staticmethod, classmethod), functions_in),
    **dict.fromkeys((dict, MappingProxyType), lambda one: list(one.values())),
    **dict.fromkeys((list, tuple, set, frozenset), list),
    **dict.fromkeys((CachedFunction, functools.cached_property), _attributes),
    **dict.fromkeys((functools.partialmethod, functools.singledispatchmethod), _attributes),
}
"""Functions that return what objects of these types contain."""
