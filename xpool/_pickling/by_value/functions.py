"""Reducers of functions, methods and modules, and of the parts of functions."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import marshal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import WeakKeyDictionary

from xpool._pickling.by_value.names import (
    ATOMS,
    by_name,
    is_simple,
    name_for,
    original,
    static_modules,
)
from xpool._pickling.by_value.origin import (
    CODE,
    INSTALLED,
    SENT,
    Parts,
    adopt,
    canonical,
    find_module,
    is_object,
    is_program,
    module_of,
    origin_of,
)
from xpool._pickling.by_value.own_objects import made_as
from xpool._pickling.by_value.reads import classes_of, is_open, keys_of, required_of, use_of
from xpool._pickling.reducers import (
    FOR_SUBCLASSES,
    LAZY,
    NEW,
    Context,
    Instead,
    Refused,
    is_message,
    of_module,
    register,
    set_attributes,
)
from xpool._python.hidden import CachedFunction, is_attribute
from xpool._python.interrupt import pass_on

# -- functions ----------------------------------------------------------------------------


def _make_space(*name: Any) -> dict[str, Any]:
    # Without a name, `__name__` is that of `builtins`.
    return {"__builtins__": builtins, **dict(zip(("__name__",), name))}


@register(FunctionType)
@by_name
def _reduce_function(pickler: Context, function: FunctionType) -> Any:
    # First find its globals in the receiver.
    names = use_of(function.__code__).names
    values = function.__globals__
    module: Any = values.get("__name__")
    state: dict[str, Any] = {}
    space: Any
    known = module in sys.modules or pickler.follow  # others do not find a module made by hand
    if not pickler.recurse:
        pickler.names |= keys_of(function)
    if not pickler.recurse and known and module_of(values) is not None:
        space = canonical(module)
        if pickler.blob is not None and is_open(function):
            pickler.blob.open.append(function)
        # An import hook may have rewritten the module here, but not in the receiver, as pytest's
        # for assertions.  Names that are not identifiers belong to the rewritten code.
        helpers = [name for name in names if name in values and not name.isidentifier()]
        if helpers and origin_of(module) != SENT:
            state["helpers"] = {name: values[name] for name in helpers}
    else:
        # They are no module's, or are copied (`recurse`).  In the receiver, functions with the same
        # globals share a dict.
        named = (module,) if "__name__" in values else ()
        space = pickler.spaces.setdefault(id(values), Instead(_make_space, named))
        state["globals"] = _used(values, names)
    if function.__module__ != module:  # functools.wraps
        state["__module__"] = function.__module__
    # Then add the attributes that a new function with this code lacks.
    for attribute in _ATTRIBUTES:
        value = getattr(function, attribute, None)
        if value is not None and value != ():
            state[attribute] = value
    try:
        if function.__annotations__:
            state["__annotations__"] = dict(function.__annotations__)
    except Exception as error:  # Python 3.14 evaluates them here, and a name is undefined
        pass_on(error)
        state["__annotate__"] = function.__annotate__  # type: ignore[attr-defined]
    if function.__dict__:
        state["dict"] = function.__dict__
    shell = (function.__code__, space, function.__name__, function.__closure__)
    return _make_function, shell, state, None, None, _fill_function


def _used(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return those globals of a function that have these names."""
    if type(values) is dict:
        return {name: values[name] for name in names if name in values}
    found = {}
    for name in names:
        with contextlib.suppress(KeyError):
            found[name] = values[name]  # also by `__missing__`, as in `IPython.embed`
    return found


_ATTRIBUTES = ("__defaults__", "__kwdefaults__", "__doc__", "__qualname__", "__type_params__")


def parts_of_function(function: Any) -> tuple[Any, ...]:
    """Return values that differ when a function without state has changed."""
    kwdefaults = function.__kwdefaults__
    return (
        function.__code__,
        function.__defaults__,
        kwdefaults,
        function.__doc__,
        None if kwdefaults is None else dict(kwdefaults),
        is_simple(function),
    )


def is_constant(value: Any) -> bool:
    """Whether a value is a number, a text or another constant of Python, or a tuple of these."""
    return type(value) in ATOMS or (type(value) is tuple and all(map(is_constant, value)))


def set_since_import(function: FunctionType) -> tuple[list[str], tuple[tuple[str, Any], ...]]:
    """Return the parts of a function that may be others in a worker, which imports the module.

    These are its defaults, and code of another file or of another function.  The second value has
    the defaults that are constant.
    """
    parts, code = Parts(function), function.__code__
    del parts[CODE]
    constant = tuple(one for one in parts.items() if is_constant(one[1]))
    others = [name for name, value in parts.items() if not is_constant(value)]
    file, name = code.co_filename, code.co_name
    # Code that `exec` has compiled, as for methods of data classes, has no file.
    moved = file.startswith(_INPUTS) or (
        file[:1] != "<" and file != function.__globals__.get("__file__", file)
    )
    other = name != function.__name__ and name[:1] != "<"
    if moved or ((other or _is_conditional(function)) and not function.__closure__):
        others.append(CODE)
    return others, constant


def _is_conditional(function: FunctionType) -> bool:
    """Whether a ``def`` statement is in a block of its module, such as ``if config.fast:``.

    The import in a worker may come to another block.
    """
    code = function.__code__
    if "." in function.__qualname__ or code.co_filename[:1] == "<":
        return False
    linecache = import_module("linecache")  # late, because it imports `tokenize`: a millisecond
    line = linecache.getline(code.co_filename, code.co_firstlineno, function.__globals__)
    return line[:1] in " \t" and bool(line.strip())


_INPUTS = "<stdin>", "<ipython-input", "<python-input"
"""How the names begin that Python and IPython give to code which a user enters."""


def annotations_of(obj: Any) -> dict[str, Any]:
    """Return the annotations of a function or class.

    Python 3.14 evaluates them only when they are read: names that are undefined are `ForwardRef`
    objects here.  Before, reading them adds an empty dict to a class that has none, which would
    count as a change of the class.
    """
    if isinstance(obj, type) and sys.version_info < (3, 14):
        return dict(vars(obj).get("__annotations__", ()))
    try:
        return dict(obj.__annotations__)
    except Exception as error:
        pass_on(error)
        if sys.version_info < (3, 14):
            raise
        library: Any = import_module("annotationlib")
        found: dict[str, Any] = library.get_annotations(obj, format=library.Format.FORWARDREF)
        return found


def _lazy_annotationlib() -> None:
    kind: Any = sys.modules["annotationlib"].ForwardRef

    @register(kind)
    def reduce(pickler: Context, obj: Any) -> Any:
        """Pickle a forward reference with the name of the module whose globals it has."""
        state = {name: getattr(obj, name) for name in _OF_REFERENCES}
        state["__globals__"] = None if obj.__globals__ is None else module_of(obj.__globals__)
        if obj.__cell__:
            # `__classdict__` has the attributes of the owner, which is sent.
            cells = {name: one for name, one in obj.__cell__.items() if name != "__classdict__"}
            state["__cell__"] = cells
        return NEW, (kind,), state, None, None, _fill_reference


_OF_REFERENCES = (
    "__forward_is_argument__", "__forward_is_class__", "__forward_module__", "__owner__",
    "__extra_names__", "__forward_arg__",
)  # fmt: skip
_NOT_OF_REFERENCES = (
    "__cell__", "__code__", "__ast_node__", "__stringifier_dict__", "__resolved_str_cache__",
)  # fmt: skip
"""Slots that Python fills when it needs them, and cells that most references do not have."""


def _fill_reference(obj: Any, state: dict[str, Any]) -> None:
    module = state["__globals__"]
    if module is not None:
        state["__globals__"] = (find_module(module) or import_module(module)).__dict__
    state["__arg__"] = state.pop("__forward_arg__")
    for name, value in {**dict.fromkeys(_NOT_OF_REFERENCES), **state}.items():
        setattr(obj, name, value)


LAZY["annotationlib"] = _lazy_annotationlib


def _make_function(code: CodeType, space: Any, name: str, closure: Any) -> FunctionType:
    if isinstance(space, str):
        # Not `import_module` for `__main__`: a worker's has no spec.
        module = find_module(space) or import_module(space)
        values = module.__dict__
        # C code that imports a module needs it, and it may be missing in a worker.
        values.setdefault("__builtins__", builtins)
    else:
        values = space
    return FunctionType(code, values, name, None, closure)


def _fill_function(function: FunctionType, state: dict[str, Any]) -> None:
    function.__globals__.update(state.pop("globals", ()))
    for name, value in state.pop("helpers", {}).items():
        # If the receiver has such names, functions that were rewritten there use them.
        function.__globals__.setdefault(name, value)
    function.__dict__.update(state.pop("dict", ()))
    for name, value in state.items():
        setattr(function, name, value)


register(BuiltinFunctionType)(lambda _, function: original(function) or NotImplemented)


@register(CodeType)
def _reduce_code(pickler: Context, code: CodeType) -> Any:
    # marshal requires that both processes run the same version of Python, and they do.
    if pickler.blob is not None and pickler.blob.is_mark:
        pickler.blob.codes.append(code)
        return int, ()
    return marshal.loads, (marshalled(code),)


_marshalled: WeakKeyDictionary[CodeType, bytes] = WeakKeyDictionary()


def marshalled(code: CodeType) -> bytes:
    """Return the bytes of code, which are the same each time."""
    # The bytes that `marshal` writes depend on the reference counts of constants.
    found = _marshalled.get(code)
    if found is None:
        found = _marshalled[code] = marshal.dumps(code)
    return found


@register(CellType)
def _reduce_cell(pickler: Context, cell: CellType) -> Any:
    try:
        state = (cell.cell_contents,)
    except ValueError:  # the cell is empty, because the variable has no value yet
        return _make_cell, ()
    return _make_cell, (), state, None, None, _fill_cell


def _make_cell() -> CellType:
    return CellType()


def _fill_cell(cell: CellType, state: tuple[Any]) -> None:
    cell.cell_contents = state[0]


# -- wrappers of functions ----------------------------------------------------------------


@register(MethodType)
def _reduce_method(pickler: Context, method: MethodType) -> Any:
    """Pickle a method by object and name, as the standard pickler does, but allow private names."""
    owner, name = method.__self__, method.__func__.__name__
    for found in _private_names(owner, name):
        if getattr(owner, found, None) == method and not _is_own(owner, found):
            # When the definition is loaded, the class of the object has no attributes yet.
            if pickler.blob and _of_class_by_value(pickler, owner, found):
                break
            return getattr, (owner, found)
    return MethodType, (method.__func__, owner)


def _is_own(owner: Any, name: str) -> bool:
    """Whether a method was assigned to the object itself, which lacks it while it is loaded."""
    if not isinstance(owner, type) and name in getattr(owner, "__dict__", ()):
        return True
    found = next((vars(one)[name] for one in classes_of(owner) if name in vars(one)), None)
    return type(found) in (MemberDescriptorType, MethodType)


def _of_class_by_value(pickler: Context, owner: Any, name: str) -> bool:
    """Whether an attribute of an object is in the body of a class that is pickled by value."""
    for one in classes_of(owner):
        if name in vars(one):
            return name_for(pickler, one) is None
    return True  # the attribute is in the metaclass, or in the object itself


def _private_names(owner: Any, name: str) -> Iterator[str]:
    yield name
    if name.startswith("__") and not name.endswith("__"):
        for one in classes_of(owner):
            # The compiler mangles private names in this way (_Py_Mangle).
            yield f"_{one.__name__.lstrip('_')}{name}"


@register(property)
def _reduce_property(pickler: Context, obj: property) -> Any:
    kind = type(obj)
    if kind.__module__ == "enum":  # `__new__` and attributes differ between Python's versions
        return NotImplemented
    parts = (obj.fget, obj.fset, obj.fdel, obj.__doc__)
    state = getattr(obj, "__dict__", None)  # only an instance of a subclass has it
    if kind is property:
        return kind, parts
    return made_as, (property, kind, parts), state or None, None, None, set_attributes


@register(classmethod, staticmethod)
def _reduce_wrapper(pickler: Context, obj: Any) -> Any:
    kind, args = type(obj), (obj.__func__,)
    if kind in (classmethod, staticmethod):
        return _with_attributes(obj, kind, args)
    base = classmethod if issubclass(kind, classmethod) else staticmethod
    return _with_attributes(obj, made_as, (base, kind, args))


def own_attributes(wrapper: Any) -> dict[str, Any]:
    """Return the attributes of a wrapper, except those that are set when a function is wrapped."""
    found: dict[str, Any] = getattr(wrapper, "__dict__", {})  # a property has none
    return {name: value for name, value in found.items() if name not in _OF_WRAPPERS}


_OF_WRAPPERS = frozenset(
    {*functools.WRAPPER_ASSIGNMENTS, "__annotations__", "__annotate__", "__wrapped__"}
    | {"cache_parameters"}
    | vars(functools.partialmethod(len)).keys()
)


def _with_attributes(wrapper: Any, make: Any, args: tuple[Any, ...]) -> Any:
    attributes = own_attributes(wrapper)
    return (make, args, attributes, None, None, set_attributes) if attributes else (make, args)


FOR_SUBCLASSES[property] = _reduce_property
FOR_SUBCLASSES[classmethod] = FOR_SUBCLASSES[staticmethod] = _reduce_wrapper


def _lru(maxsize: int | None, typed: bool, function: Callable[..., Any]) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


@register(CachedFunction)
@by_name
def _reduce_lru_cache(pickler: Context, obj: Any) -> Any:
    """Pickle the inner function, for which the receiver makes a new cache."""
    options = obj.cache_parameters()
    args = options["maxsize"], options["typed"], obj.__wrapped__
    return _with_attributes(obj, _lru, args)


@register(functools.partialmethod)
def _reduce_partialmethod(pickler: Context, obj: Any) -> Any:
    """Call the constructor with the function, which Python 3.14 and later require."""
    return _with_attributes(obj, _partialmethod, (obj.func, obj.args, obj.keywords))


def _partialmethod(func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return functools.partialmethod(func, *args, **keywords)


@register(MappingProxyType)
def _reduce_proxy(pickler: Context, obj: Any) -> Any:
    return MappingProxyType, (gc.get_referents(obj)[0],)  # the dict that it shows


# -- modules ------------------------------------------------------------------------------


@register(ModuleType)
def _reduce_module(pickler: Context, module: ModuleType) -> Any:
    """Pickle a module by name, never with its contents."""
    name = canonical(module.__name__)
    if name in static_modules:
        return import_module, (name,)
    if is_object(module):
        state = {name: one for name, one in vars(module).items() if name != "__builtins__"}
        return _make_module, (type(module), name), state, None, None, set_attributes
    if name not in sys.modules and is_attribute(module) and not is_program(name):
        above, _, last = name.rpartition(".")
        return of_module, (above, last)
    adopt(module)  # the program may have made it itself
    if find_module(name) is not module:
        # Installed packages have modules of classes of their own that are in no place.
        if type(module) is ModuleType or getattr(module, "__file__", None) is None:
            raise Refused(f"another module has the name {name!r}", module)
        return NotImplemented
    origin = origin_of(name)
    if pickler.follow and not pickler.home and name != "__main__" and origin != INSTALLED:
        # Any of its globals may be used.  The receiver makes a module that it cannot import.
        pickler.names.update(
            (name, one)
            for one, value in list(vars(module).items())
            if not issubclass(type(value), ModuleType)
        )
    return (sent_module if origin == SENT else import_module), (name,)


def _make_module(kind: type[ModuleType], name: str) -> ModuleType:
    module = kind.__new__(kind)
    ModuleType.__init__(module, name)  # Python 3.10 makes the dict of the module here
    return module


def sent_module(name: str) -> Any:
    found = find_module(name)
    if found is None:
        text = f"No module named {name!r}: another process has made it, and no import finds it here"
        raise ModuleNotFoundError(text, name=name)
    return found


FOR_SUBCLASSES[ModuleType] = _reduce_module


# -- objects that are compared by identity ---------------------------------------------------


def _lazy_dataclasses() -> None:
    """Register a reducer that pickles the markers in ``__dataclass_fields__`` by name."""
    import dataclasses

    named = vars(dataclasses).items()
    marks = {one: name for name, one in named if type(one).__module__ == "dataclasses"}

    def reduce_mark(pickler: Context, obj: Any) -> Any:
        return (getattr, (dataclasses, marks[obj])) if obj in marks else NotImplemented

    register(*map(type, marks))(reduce_mark)


LAZY["dataclasses"] = _lazy_dataclasses


def _lazy_locks() -> None:
    """Register reducers for locks and thread-locals: in definitions and globals, they are new."""

    def reduce_lock(pickler: Context, obj: Any) -> Any:
        if pickler.group is not None:
            pickler.group.locks.append(obj)
        elif not pickler.blob:
            raise Refused(f"cannot pickle {type(obj).__name__!r} object", obj)
        return (threading.RLock if type(obj) is rlock else threading.Lock), ()

    def reduce_local(pickler: Context, obj: Any) -> Any:
        if is_message(pickler):
            return NotImplemented
        init: Any = type(obj).__init__
        in_python = type(init) is FunctionType
        needed = required_of(init)[1:] if in_python else ()
        given = vars(obj)
        if not given.keys() >= {*needed}:
            raise Refused(f"cannot make a {type(obj).__name__!r} without its arguments", obj)
        args = tuple(given[name] for name in needed)
        if in_python and init.__code__.co_flags & _VARKEYWORDS:
            # `__init__(self, **settings)` makes these attributes of what it was called with.
            return type(obj), args, {**given}, None, None, set_attributes
        return type(obj), args

    rlock = type(threading.RLock())
    register(type(threading.Lock()), rlock)(reduce_lock)
    register(threading.local)(reduce_local)
    FOR_SUBCLASSES[threading.local] = reduce_local


_VARKEYWORDS = 0x08  # `inspect.CO_VARKEYWORDS`

LAZY["_thread"] = _lazy_locks


# -- lazy imports (PEP 810) ------------------------------------------------------------------

# ``lazy import torch`` binds an object, which Python replaces by the module when the global is
# first used.  If it has not been used, it is sent as such a statement, and the worker imports the
# module when a task uses it.


def lazy_import(module: str, name: str) -> Any:
    """Return the object of ``lazy import module``, or of ``lazy from module import name``."""
    statement = f"lazy from {module} import {name} as it" if name else f"lazy import {module}"
    namespace: dict[str, Any] = {}
    exec(statement, namespace)
    # The namespace is separate, because the first use of a global would do the import.
    return namespace["it" if name else module.partition(".")[0]]


if sys.version_info >= (3, 15):
    from types import LazyImportType

    @register(LazyImportType)
    def _reduce_lazy_import(pickler: Context, obj: Any) -> Any:
        # Only the repr contains the name of the module.  The object of `lazy from` refers to
        # another such object, that of the module.
        module, name = repr(obj).removeprefix("<lazy_import '").removesuffix("'>"), ""
        if any(type(part) is LazyImportType for part in gc.get_referents(obj)):
            module, _, name = module.rpartition(".")
        return lazy_import, (module, name)
