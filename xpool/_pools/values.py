"""What identifies a value, a function or a module of the program in each of its runs.

Digests depend on values, but not on addresses, or the order of sets.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib.machinery
import itertools
import marshal
import os
import pkgutil
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator
from pickle import PickleBuffer
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from xpool._pickling.by_value import origin
from xpool._pickling.by_value.broadcast import Broadcast
from xpool._pickling.by_value.by_token import KINDS
from xpool._pickling.by_value.classes import CACHES
from xpool._pickling.by_value.names import ATOMS
from xpool._pickling.by_value.origin import (
    MAIN_NAMES,
    attributes_of,
    canonical,
    is_installed,
    is_program,
    namespace,
    spec_of,
)
from xpool._pickling.by_value.reads import absolute_name, use_of
from xpool._pickling.pickler import description, reducer_override
from xpool._python.hidden import module_of
from xpool._python.interrupt import pass_on

Code = tuple[Any, ...]
"""A description of code: plain values, and such tuples for nested code."""

_LINE_OF_CLASS = frozenset({"__firstlineno__", "__static_attributes__"})
"""Names that Python 3.13 and later bind in the body of a class: its line number, and attributes in
an order that differs between runs."""

OF_MODULES = origin.OF_MODULES | frozenset(
    {"__file__", "__doc__", "__annotations__", "__module__", "__qualname__"}
)
"""Globals that every module has, and names that every class body has."""

OF_CLASSES = CACHES | frozenset(
    {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__"}
    | {"__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__"}
    | {"__conditional_annotations__", "_abc_impl", "_value2member_map_"}
)
"""Attributes of classes that do not affect what their objects do.  Some are caches: a class of
flags keeps the combinations that were used."""


# -- modules of the program ------------------------------------------------------------------------


def version_of(name: str) -> tuple[str, str] | None:
    """Return the package of an installed module and its version; None: it has no version."""
    top = name.partition(".")[0]
    version = getattr(sys.modules.get(top), "__dict__", {}).get("__version__")
    if not isinstance(version, str) or top in sys.stdlib_module_names:
        return None
    return top, str(version)


# -- code ------------------------------------------------------------------------------------------


def said(code: CodeType) -> Code:
    """Return a description of code that does not depend on its place in the file."""
    names, body = code.co_names, code.co_code
    consts: tuple[Any, ...] = code.co_consts
    instructions: Any = body
    if not _LINE_OF_CLASS.isdisjoint(names):
        instructions, consts = _without_lines(code), ()
    return (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        instructions,
        names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        getattr(code, "co_exceptiontable", b""),  # before 3.11, it is part of the instructions
        consts,
    )


def _without_lines(code: CodeType) -> list[tuple[str, Any]]:
    kept: list[tuple[str, Any]] = []
    for one in dis.get_instructions(code):
        if one.opname == "STORE_NAME" and one.argval in _LINE_OF_CLASS:
            kept.pop()  # the instruction that loads the stored value
        else:
            kept.append((one.opname, one.argval))
    return kept


def imported(code: CodeType, package: str | None) -> set[str]:
    """Return the names of the modules that code imports, and of their parents.

    ``from a import b`` gives ``a.b``, too, which may not be a module.
    """
    found = set[str]()
    for level, relative, names in use_of(code).imports:
        name = absolute_name(level, relative, package)
        if not name:
            continue
        parts = name.split(".")
        found.update(".".join(parts[:n]) for n in range(1, len(parts) + 1))
        found.update(f"{name}.{inside}" for inside in names)
    return found


def module_code(name: str) -> tuple[CodeType | bytes, str | None] | None:
    """Return the code of a module of the program and its package, without importing it.

    For a module in C, the bytes of its file.  None: it is not the program's, or was not found.
    """
    if name.partition(".")[0] in sys.stdlib_module_names:
        return None
    spec = spec_of(name)
    if spec is None or spec.loader is None or spec.origin is None or name.startswith("xpool"):
        return None
    if is_installed(spec.origin):
        return None
    get: Callable[[str], CodeType | None] | None = getattr(spec.loader, "get_code", None)
    code = None if get is None else get(name)
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    if code is not None:
        return code, package
    with open(spec.origin, "rb") as file:
        return file.read(), package


def submodules(path: Any, package: str) -> Iterator[str]:
    """Yield the names of all modules in the folders of a package, without importing them."""
    for finder, name, is_package in pkgutil.iter_modules(path, f"{package}."):
        yield name
        if is_package and isinstance(finder, importlib.machinery.FileFinder):
            yield from submodules([os.path.join(finder.path, name.rpartition(".")[2])], name)


# -- functions, classes and their names ------------------------------------------------------------


CODE = (FunctionType, property, classmethod, staticmethod)
_CODE_TYPES = frozenset(CODE)


def wrapped_by(obj: Any) -> FunctionType | None:
    """Return the function in a library's wrapper, such as `functools.lru_cache`; None: it is
    none."""
    found = attributes_of(obj).get("__wrapped__")
    own = isinstance(found, FunctionType) and not is_program(type(obj).__module__)
    return found if own else None


def label_of(obj: Any) -> str:
    name = getattr(obj, "__qualname__", None) or getattr(obj, "__name__", type(obj).__name__)
    return f"{canonical(getattr(obj, '__module__', None))}.{name}"


def is_in_c(cls: type) -> bool:
    """Whether a class is made in C, in a module without a file (as that of Cython's functions)."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return (
        file is None
        and cls.__module__ not in MAIN_NAMES
        and _CODE_TYPES.isdisjoint(map(type, vars(cls).values()))
    )


def name_of(func: Any) -> str:
    """Return the name of a function for error texts."""
    while isinstance(func, functools.partial):
        func = func.func
    func = getattr(func, "__func__", func)
    return label_of(func if hasattr(func, "__qualname__") else type(func))


# -- globals --------------------------------------------------------------------------------------


def globals_of(module: str) -> Any:
    """Return the globals of the module that has this name now."""
    return namespace("__main__") if module in MAIN_NAMES else attributes_of(sys.modules.get(module))


def is_standard(builtin: Any) -> bool:
    """Whether an object of `builtins` is Python's own, and not one that the program put there."""
    kind = type(builtin)
    return kind is BuiltinFunctionType or (kind is type and builtin.__module__ == "builtins")


class Unknown(Exception):
    """An object, which belongs to ``part``, has no digest."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.part = ""


class Values:
    """Digests of objects by what they consist of.

    A subclass says how functions, classes and modules count.
    """

    def __init__(self) -> None:
        self._memo: dict[int, tuple[bytes, Any]] = {}  # by `id`: digests, and the objects
        self._above: dict[int, int] = {}

    def _forget(self) -> None:
        # Values may change, and an `id` may be reused.
        self._memo.clear()
        self._above.clear()

    def _defined(self, obj: Any) -> bytes | None:
        """Return the digest of a function, class or module; None: it is none."""
        raise NotImplementedError

    def _value(self, obj: Any) -> bytes:
        """Return the digest of an object."""
        kind = type(obj)
        if kind in ATOMS:
            return hashed(marshalled(obj))
        known = self._memo.get(id(obj))
        if known is not None:
            return known[0]
        if id(obj) in self._above:  # the object holds itself
            return hashed(b"above", str(len(self._above) - self._above[id(obj)]).encode())
        self._above[id(obj)] = len(self._above)
        try:
            digest = self._compound(kind, obj)
        except (Unknown, MemoryError):
            raise
        except RecursionError as exc:
            raise Unknown("something that is nested too deeply") from exc
        except Exception as exc:  # from the object's own methods
            pass_on(exc)
            raise Unknown(f"a {label_of(kind)} ({exc})") from exc
        finally:
            del self._above[id(obj)]
        self._memo[id(obj)] = digest, obj
        return digest

    def _values(self, name: bytes, objects: Iterable[Any]) -> bytes:
        return hashed(name, *map(self._value, objects))

    def _compound(self, kind: type, obj: Any) -> bytes:
        if kind in PLAIN:
            if is_plain(obj):
                return hashed(marshalled(obj))
            if kind is dict:
                return self._values(b"dict", itertools.chain.from_iterable(obj.items()))
            return self._values(kind.__name__.encode(), obj)
        if kind is set or kind is frozenset:
            return hashed(kind.__name__.encode(), *sorted(map(self._value, obj)))
        defined = self._defined(obj)
        if defined is not None:
            return defined
        if kind is CodeType:
            return self._values(b"code", said(obj))
        if kind is PickleBuffer:
            return hashed(b"buffer", obj.raw())
        if kind is bytearray:
            return hashed(b"bytearray", obj)
        if kind is MethodType:
            return self._values(b"method", (obj.__func__, obj.__self__))
        if kind is Broadcast:  # by its content: the reference differs in each run
            return hashed(b"broadcast", obj.content())
        if kind in _BY_TOKEN:  # the pickle has a token, which differs in each run
            about = [getattr(obj, name, None) for name in _ABOUT_TYPES]
            return self._values(b"type", (kind, *about))
        if issubclass(kind, enum.Enum):  # a member's pickle has only its name
            return self._values(b"member", (kind, *map(vars(obj).get, ("_name_", "_value_"))))
        if isinstance(obj, _WITHOUT_VALUE):
            return self._values(b"one of", (kind,))
        wrapped = wrapped_by(obj)
        if wrapped is not None:
            return self._values(b"wrapper", (kind, wrapped))
        array = bare(obj)
        if array is not None:  # other arrays consist of bare ones, a class and attributes
            *about, content = array
            return hashed(b"array", self._value(kind), self._value(about), content)
        reduced = self._reduced(obj)
        if isinstance(reduced, str):
            return self._values(b"name", (kind, module_of(obj, reduced), reduced))
        rest = [list(one) if isinstance(one, Iterator) else one for one in reduced[3:]]
        return self._values(b"reduced", (*reduced[:3], *rest))

    def _reduced(self, obj: Any) -> Any:
        found = reducer_override(description(), obj)
        if found is NotImplemented:
            found = obj.__reduce_ex__(5)
        if not isinstance(found, (str, tuple)):
            raise TypeError(f"its __reduce__ returned {type(found).__name__}")
        if found[0] is type(obj) and type(obj).__reduce__ in _OF_SETS:
            found = (found[0], (frozenset(found[1][0]),), *found[2:])  # the list has no fixed order
        return found


_OF_SETS: tuple[Any, ...] = (set.__reduce__, frozenset.__reduce__)
_BY_TOKEN = frozenset({object, *(getattr(typing, name, None) for name in KINDS)})
_ABOUT_TYPES = ("__name__", "__bound__", "__constraints__", "__supertype__", "__value__")
_WITHOUT_VALUE: tuple[type, ...] = (
    weakref.ReferenceType,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    threading.local,
)
"""Classes of objects without a value of their own, or with another value in each thread."""


# -- plain values, arrays and tensors --------------------------------------------------------------


PLAIN = ATOMS | {list, tuple, dict}


def hashed(*parts: Any) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        # Include the length, so that the same bytes, divided differently, give another digest.
        digest.update(b"%d " % memoryview(part).nbytes)
        digest.update(part)
    return digest.digest()[:16]


def marshalled(obj: Any) -> bytes:
    # Version 0 has no references, so equal values give equal bytes.
    return marshal.dumps(obj, 0)


def is_plain(obj: Any) -> bool:
    """Whether an object consists of lists, tuples, dicts and atoms alone, at most 20 levels deep.

    It checks level by level, since a call for each of a million rows would take seconds.
    """
    level: list[Any] = [obj]
    for _ in range(20):
        inside: list[Any] = []
        for one in level:
            inside += one
            if type(one) is dict:
                inside += one.values()
        kinds = set(map(type, inside))
        if not kinds <= PLAIN:
            return False
        if kinds <= ATOMS:
            return True
        level = [one for one in inside if type(one) not in ATOMS]
        # If an object occurs twice, `marshal` would write it twice.
        if len(set(map(id, level))) < len(level):
            return False
    return False


def bare(obj: Any) -> tuple[Any, ...] | None:
    """Return the dtype, shape, device and bytes of a plain array or tensor; None: it is none.

    A pickle of it would not serve: its bytes depend on what the process has pickled before.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    content: Any = b""
    if numpy is not None and type(obj) is numpy.ndarray:
        if obj.dtype.hasobject:
            return None
        if obj.nbytes:
            content = numpy.ascontiguousarray(obj).reshape(-1).view(numpy.uint8)
        dtype = obj.dtype
        # The string of other dtypes, such as those with fields, says too little.
        if dtype.kind in "biufcmMSU" and dtype.type.__module__ == "numpy" and not dtype.metadata:
            dtype = dtype.str
        return dtype, obj.shape, "", content
    if torch is None or type(obj) is not torch.Tensor or obj.layout is not torch.strided:
        return None
    if obj.__dict__ or obj.requires_grad or obj.is_quantized or obj.is_nested or obj.is_meta:
        return None
    if any(getattr(obj, "names", ())):
        return None
    if obj.numel():
        plain = obj.detach().cpu().resolve_conj().resolve_neg()
        content = plain.reshape(-1).contiguous().view(torch.uint8).numpy()
    return str(obj.dtype), tuple(obj.shape), str(obj.device), content
