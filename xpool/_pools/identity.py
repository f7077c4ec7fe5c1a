"""Finds what the results of a function depend on, as far as the function refers to it.

An `Identity` follows a function's references: its code; the functions, classes and modules of the
program that it names; the values of globals, enclosed variables, defaults and of the object that it
is bound to.  Each of these is a *part*.  A part has a name for error texts, and a digest that is
the same in each run of the program: it depends on values, but not on addresses, the order of sets
or the line numbers of code.

Installed packages are represented by their names and versions.  docs/guides/crashes.md says which
dependencies are not found.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import functools
import itertools
import sys
import threading
import typing
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pickle import PickleBuffer
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from xpool._pickling.by_value.broadcast import Broadcast
from xpool._pickling.by_value.main import MAIN_NAMES
from xpool._pickling.by_value.reads import global_names
from xpool._pickling.policy import Layout
from xpool._pickling.reducers import reducer_override
from xpool._pools.digests import ATOMS, PLAIN, hashed, is_array, is_plain, marshalled
from xpool._pools.program import (
    CODE,
    annotations_of,
    attributes_of,
    imported,
    inner,
    is_found,
    is_in_c,
    is_program,
    label_of,
    module_code,
    module_name,
    said,
    version_of,
    wrapped_by,
)
from xpool._python.hidden import module_of, registered_classes
from xpool._python.interrupt import by_handler
from xpool.pickle import dumps

_SHOWN = frozenset({int, float, bool, type(None)})

_OF_MODULES = frozenset(
    {"__name__", "__file__", "__doc__", "__spec__", "__loader__", "__package__", "__path__"}
    | {"__builtins__", "__cached__", "__annotations__", "__module__", "__qualname__"}
)
"""Globals that every module has, and names that every class body has."""

_OF_CLASSES = frozenset(
    {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__"}
    | {"__static_attributes__", "__annotations__", "__annotate__", "__annotate_func__"}
    | {"__annotations_cache__", "__conditional_annotations__", "_abc_impl"}
)
"""Attributes of classes that do not affect what their objects do."""


class Unknown(Exception):
    """An object has no digest.

    Attributes:
        part: the part that it belongs to.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.part = ""


class _Context:
    """The attributes of a pickler that reducers use."""

    recurse = False
    blob = True  # the state of a lock does not count
    follow = False

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.spaces: dict[int, Any] = {}
        self.tensors: Any = None
        self.layout = Layout(out_of_band=False)
        self.shared: dict[int, Any] = {}


class _Node:
    """An object with parts of its own: a function, a class, a module, a global, or an item."""

    __slots__ = ("leads_to", "parts", "unknown")

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.unknown: Unknown | None = None  # why a part is missing
        self.leads_to: set[str] = set()  # labels of the nodes that it refers to


class Identity:
    """The parts of a function and of its items.  Used by one thread at a time."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._labels: dict[Any, str] = {}  # labels of nodes, by their keys
        self._taken = Counter[str]()
        self._nameless: set[str] = set()  # labels of objects that their names do not lead to
        self._todo: deque[tuple[_Node, Callable[[_Node], None]]] = deque()
        self._held: list[Any] = []  # keeps the objects alive whose `id` is a key of `_labels`
        # These belong to the current node or item:
        self._leads_to: set[str] = set()
        self._memo: dict[int, bytes] = {}
        self._alive: list[Any] = []  # keeps the objects alive whose `id` is a key of `_memo`
        self._above: dict[int, int] = {}

    def of_function(self, func: Any, beside: dict[str, Any]) -> dict[str, str]:
        """Return the digests of a function's parts, by their names."""
        root = _Node()
        root.parts["the version of Python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
        self._look(root, lambda node: self._fill_root(node, func, beside))
        return self._parts_of(root)

    def of_item(self, item: Any) -> tuple[bytes, dict[str, str]]:
        """Return the digest of an item, and the parts of the objects that it refers to.

        If it holds a function or class that its name does not lead to (a lambda, a local class),
        the digest includes all parts, and no parts are returned.
        """
        kind = type(item)
        if kind in ATOMS:  # takes a microsecond; a node takes five
            return hashed(marshalled(item)), {}
        digest, parts = self._digest_and_parts(item)
        if not self._leads_to.isdisjoint(self._nameless):
            # Use a new `Identity`: this one numbers nameless objects after those of earlier items.
            digest, parts = Identity()._digest_and_parts(item)
            return hashed(digest, repr(sorted(parts.items())).encode()), {}
        return digest, parts

    def _digest_and_parts(self, item: Any) -> tuple[bytes, dict[str, str]]:
        node = _Node()
        found: list[bytes] = []
        self._look(node, lambda node: found.append(self._value(item)))
        parts = self._parts_of(node)
        self._leads_to = node.leads_to
        return found[0], parts

    # -- nodes -------------------------------------------------------------------------------------

    def _look(self, node: _Node, fill: Callable[[_Node], None]) -> None:
        self._leads_to = node.leads_to
        try:
            fill(node)
        except Unknown as exc:
            node.unknown = exc
        finally:
            # Values may change, and an `id` may be reused.
            self._memo.clear()
            self._alive.clear()
            self._above.clear()

    def _parts_of(self, root: _Node) -> dict[str, str]:
        """Return the parts of a node and of all nodes that it leads to."""
        while self._todo:
            self._look(*self._todo.popleft())
        parts, seen, todo = dict[str, str](), set[str](), [root]
        while todo:
            node = todo.pop()
            if node.unknown is not None:
                raise node.unknown
            parts.update(node.parts)
            todo += [self._nodes[label] for label in node.leads_to - seen]
            seen |= node.leads_to
        return parts

    def _node(self, key: Any, label: str, held: Any, fill: Callable[[str], Any]) -> bytes:
        """Refer to a node, and make it if it is new; ``fill(label)`` returns the filling
        function."""
        known = self._labels.get(key)
        if known is None:
            self._taken[label] += 1
            count = self._taken[label]
            known = self._labels[key] = label if count == 1 else f"{label} ({count})"
            self._held.append(held)
            if isinstance(held, (FunctionType, type)) and not is_found(held):
                self._nameless.add(known)
            node = self._nodes[known] = _Node()
            self._todo.append((node, fill(known)))
        self._leads_to.add(known)
        return hashed(b"node", known.encode("utf-8", "surrogatepass"))

    def _part(self, node: _Node, name: str, value: Any) -> None:
        try:
            digest = self._value(value).hex()
        except Unknown as exc:
            exc.part = name
            raise
        # Errors show numbers, but not texts, which may be secret.
        name = name.encode("utf-8", "backslashreplace").decode()  # attributes may have any name
        shown = type(value) in _SHOWN and not (type(value) is int and abs(value) >= 1 << 64)
        node.parts[name] = repr(value) if shown else digest

    def _fill_root(self, node: _Node, func: Any, beside: dict[str, Any]) -> None:
        given = []
        while isinstance(func, functools.partial):
            given.append((func.args, func.keywords))
            func = func.func
        if given:
            self._part(node, "the arguments of the partial", given)
        if isinstance(func, MethodType):
            self._fill_object(node, func.__self__)
            func = func.__func__
        if isinstance(func, FunctionType):
            self._function(func)
        else:
            self._fill_object(node, func)
        for name, value in beside.items():
            self._part(node, name, value)

    def _fill_object(self, node: _Node, obj: Any) -> None:
        """Add a part for each attribute of an object, if it pickles by its attributes alone."""
        name = label_of(type(obj))
        if attributes_of(obj) and wrapped_by(obj) is None:
            try:
                reduced = self._reduced(obj)
            except Exception as exc:  # from the object's own methods; `_part` below names it
                if by_handler(exc):
                    raise
                reduced = ()
            state = reduced[2] if type(reduced) is tuple and len(reduced) > 2 else None
            if type(state) is dict and not any(reduced[3:]):
                self._part(node, f"what makes the {name}", reduced[:2])
                for key, value in state.items():
                    self._part(node, f"the attribute {key} of the {name}", value)
                return
        self._part(node, f"the {name}", obj)

    # -- functions, classes, modules, globals ------------------------------------------------------

    def _function(self, function: FunctionType) -> bytes:
        module = function.__globals__.get("__name__")
        if is_program(module):
            fill = self._fill_function
        elif is_program(function.__module__) or not is_found(function):
            fill = self._fill_closure  # made by a library's decorator
        else:
            fill = self._fill_installed
        label = label_of(function)
        return self._node(
            id(function), label, function, lambda label: lambda node: fill(node, label, function)
        )

    def _fill_function(self, node: _Node, label: str, function: Any) -> None:
        self._fill_closure(node, label, function)
        code, values = function.__code__, function.__globals__
        attributes = {name for one in inner(code) for name in one.co_names}
        seen = set[int]()
        for name in sorted(global_names(code) - _OF_MODULES):
            if name in values:
                self._global(values, name, attributes, seen)
            elif hasattr(builtins, name):
                self._value(getattr(builtins, name))
        for name in sorted(imported(code, values.get("__package__"))):
            self._import(name)
        self._follow(annotations_of(function).values(), values)

    def _fill_closure(self, node: _Node, label: str, function: Any) -> None:
        self._fill_installed(node, label, function)
        code = function.__code__
        if function.__defaults__ or function.__kwdefaults__:
            given = function.__defaults__, function.__kwdefaults__
            self._part(node, f"the defaults of {label}", given)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # the variable has no value yet
                self._part(node, f"the variable {name} of {label}", cell.cell_contents)
        for name, value in vars(function).items():
            self._part(node, f"the attribute {name} of {label}", value)

    def _fill_installed(self, node: _Node, label: str, function: Any) -> None:
        self._part(node, f"the code of {label}", function.__code__)
        self._installed(function.__globals__.get("__name__"))

    def _global(
        self, values: dict[str, Any], name: str, attributes: set[str], seen: set[int]
    ) -> None:
        """Refer to a global; if it is a module of the program, also to its globals in
        ``attributes``."""
        value = values[name]
        label = f"the global {name} of {module_name(values.get('__name__'))}"
        self._node(
            (id(values), name),
            label,
            values,
            lambda label: lambda node: self._part(node, label, value),
        )
        # Check its type: `__class__` may be overridden, and may raise.
        module = issubclass(type(value), ModuleType) and is_program(value.__name__)
        if module and id(value) not in seen:
            seen.add(id(value))
            inside = vars(value)
            for attribute in sorted(attributes & inside.keys() - _OF_MODULES):
                self._global(inside, attribute, attributes, seen)

    def _class(self, cls: type) -> bytes:
        if is_in_c(cls) or not is_program(cls.__module__):
            self._installed(cls.__module__)
            return hashed(b"class", label_of(cls).encode("utf-8", "surrogatepass"))
        fill = self._fill_class
        return self._node(
            id(cls), label_of(cls), cls, lambda label: lambda node: fill(node, label, cls)
        )

    def _fill_class(self, node: _Node, label: str, cls: type) -> None:
        self._part(node, f"the bases of {label}", (type(cls), *cls.__bases__))
        # A library's metaclass may store anything in its classes.
        own = is_program(type(cls).__module__) or type(cls).__module__ in _METACLASSES
        for name, value in sorted(vars(cls).items()):
            if name in _OF_CLASSES:
                continue
            dunder = name.startswith("__") and not isinstance(value, CODE)
            if own or not dunder or name.endswith("fields__"):
                self._part(node, f"{label}.{name}", value)
        if registered := {ref() for ref in registered_classes(cls)}:
            self._part(node, f"what is registered with {label}", registered)
        module = sys.modules.get(cls.__module__)
        self._follow(vars(cls).get("__annotations__", {}).values(), getattr(module, "__dict__", {}))

    def _module(self, module: ModuleType) -> bytes:
        self._installed(module.__name__)
        return hashed(b"module", module_name(module.__name__).encode("utf-8", "surrogatepass"))

    def _import(self, name: str) -> None:
        """Add an imported module as a whole, from its file: it may not be imported yet."""
        if name in MAIN_NAMES or ("module", name) in self._labels:
            self._leads_to.add(self._labels.get(("module", name), ""))
            self._leads_to.discard("")
            return
        try:
            found = module_code(name)
        except Exception as exc:  # from an import finder, or a file that does not compile
            if by_handler(exc):
                raise
            found = None
        if found is None:
            return
        code, package = found

        def fill(label: str) -> Any:
            def go(node: _Node) -> None:
                self._part(node, label, code)
                if isinstance(code, CodeType):
                    for inside in sorted(imported(code, package)):
                        self._import(inside)

            return go

        self._node(("module", name), f"the module {name}", None, fill)

    def _installed(self, module: Any) -> None:
        """Add the version of an installed module's package."""
        found = None if is_program(module) else version_of(module)
        if found is not None:
            label = f"the version of {found[0]}"
            self._node(
                label, label, None, lambda label: lambda node: node.parts.update({label: found[1]})
            )

    def _follow(self, annotations: Iterable[Any], values: dict[str, Any]) -> None:
        """Add the program's classes that annotations name: their methods may be called."""
        for one in annotations:
            cls = values.get(one) if isinstance(one, str) else one
            if isinstance(cls, type) and is_program(cls.__module__):
                self._class(cls)

    # -- values ------------------------------------------------------------------------------------

    def _value(self, obj: Any) -> bytes:
        """Return the digest of an object."""
        kind = type(obj)
        if kind in ATOMS:
            return hashed(marshalled(obj))
        known = self._memo.get(id(obj))
        if known is not None:
            return known
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
            if by_handler(exc):
                raise
            raise Unknown(f"a {label_of(kind)} ({exc})") from exc
        finally:
            del self._above[id(obj)]
        self._memo[id(obj)] = digest
        self._alive.append(obj)
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
        if kind is FunctionType:
            return self._function(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, ModuleType):
            return self._module(obj)
        if kind is CodeType:
            return self._values(b"code", said(obj))
        if kind is PickleBuffer:
            return hashed(b"buffer", obj.raw())
        if kind is bytearray:
            return hashed(b"bytearray", obj)
        if kind is BuiltinFunctionType and isinstance(obj.__self__, (ModuleType, type(None))):
            self._installed(obj.__module__)
            return hashed(b"builtin", f"{obj.__module__}.{obj.__qualname__}".encode())
        if kind is MethodType:
            return self._values(b"method", (obj.__func__, obj.__self__))
        if kind is Broadcast:  # by its content, since its reference differs in each run
            return hashed(b"broadcast", obj.content())
        if kind in _TYPES_BY_NAME:  # its pickle has a number that differs in each run
            about = [getattr(obj, name, None) for name in _ABOUT_TYPES]
            return self._values(b"type", (kind, *about))
        if isinstance(obj, _WITHOUT_VALUE):
            return self._values(b"one of", (kind,))
        wrapped = wrapped_by(obj)
        if wrapped is not None:
            return self._values(b"wrapper", (kind, wrapped))
        if is_array(obj):
            return hashed(b"array", self._value(kind), dumps(obj))
        reduced = self._reduced(obj)
        if isinstance(reduced, str):
            return self._values(b"name", (kind, module_of(obj, reduced), reduced))
        rest = (list(one) if isinstance(one, Iterator) else one for one in reduced[3:])
        return self._values(b"reduced", (*reduced[:3], *rest))

    def _reduced(self, obj: Any) -> Any:
        found = reducer_override(_Context(), obj)
        if found is NotImplemented:
            reduce: Any = copyreg.dispatch_table.get(type(obj))
            found = obj.__reduce_ex__(5) if reduce is None else reduce(obj)
        if not isinstance(found, (str, tuple)):
            raise TypeError(f"its __reduce__ returned {type(found).__name__}")
        return found


_METACLASSES = frozenset({"builtins", "abc", "enum"})
_TYPES_BY_NAME = frozenset(
    getattr(typing, name, None)
    for name in ("TypeVar", "ParamSpec", "TypeVarTuple", "NewType", "TypeAliasType")
)
_ABOUT_TYPES = ("__name__", "__bound__", "__constraints__", "__supertype__", "__value__")
_WITHOUT_VALUE: tuple[type, ...] = (
    weakref.ReferenceType,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    threading.local,
)
"""Classes of objects without a value of their own, or with another value in each thread."""
