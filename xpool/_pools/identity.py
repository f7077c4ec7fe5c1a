"""Finds what the results of a function depend on, as far as the function refers to it.

An `Identity` follows a function's references: its code; the functions, classes and modules of the
program that it names; the values of globals, enclosed variables, defaults and of the object that it
is bound to.  Each of these is a *part*.  A part has a name for error texts, and a digest that is
the same in each run of the program: it depends on values, but not on addresses, the order of sets
or the line numbers of code.

A function or class with a name in a module is described once, by parts of its own.  One without
(a lambda, a local class) counts as a value of the parts that lead to it, as a list would.

Installed packages are represented by their names and versions.  docs/guides/crashes.md says which
dependencies are not found.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from xpool._pickling.by_value.functions import annotations_of
from xpool._pickling.by_value.names import ATOMS, found_by_name
from xpool._pickling.by_value.origin import MAIN_NAMES, attributes_of, canonical, is_program
from xpool._pickling.by_value.reads import Code, in_modules, use_of
from xpool._pools.values import (
    CODE,
    OF_CLASSES,
    OF_MODULES,
    Unknown,
    Values,
    globals_of,
    hashed,
    imported,
    is_in_c,
    is_standard,
    label_of,
    marshalled,
    module_code,
    submodules,
    version_of,
    wrapped_by,
)
from xpool._python.hidden import registered_classes
from xpool._python.interrupt import pass_on

_SHOWN = frozenset({int, float, bool, type(None)})


class _Node:
    """An object with parts of its own: a function, a class, a module, a global, or an item."""

    __slots__ = ("label", "leads_to", "parts", "unknown")

    def __init__(self, label: str) -> None:
        self.label = label
        self.parts: dict[str, str] = {}
        self.unknown: Unknown | None = None  # why a part is missing
        self.leads_to: set[str] = set()  # labels of the nodes that it refers to

    def add(self, name: str, digest: str) -> None:
        if name in self.parts:  # such as the code of a function and of one that it wraps
            digest = hashed(self.parts[name].encode(), digest.encode()).hex()
        self.parts[name] = digest


class Identity(Values):
    """The parts of a function and of its items.  Used by one thread at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[str, _Node] = {}
        self._held: dict[Any, Any] = {}  # by the nodes' keys, which contain the `id` of the object
        self._todo: deque[tuple[_Node, Callable[[_Node], Any]]] = deque()
        self._imports = _Node(_IMPORTS)  # leads to globals of modules that functions import
        self._imports_told = 0  # how many of these `of_imports` has returned
        # These belong to the current node or item:
        self._leads_to: set[str] = set()
        self._codes: list[tuple[str, str]] = []  # labels and digests of functions without a name

    def of_function(self, func: Any, beside: dict[str, Any]) -> dict[str, str]:
        """Return the digests of a function's parts, by their names."""
        root = _Node(_ROOT)
        root.parts["the version of Python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
        self._look(root, lambda node: self._fill_root(node, func, beside))
        return self._parts_of(root)

    def of_item(self, item: Any) -> tuple[bytes, dict[str, str]]:
        """Return the digest of an item, and the parts of the objects that it refers to."""
        kind = type(item)
        if kind in ATOMS:  # takes a microsecond; a node takes five
            return hashed(marshalled(item)), {}
        node = _Node("")
        digest = self._look(node, lambda node: self._value(item))
        return digest, self._parts_of(node)

    def of_imports(self) -> dict[str, str]:
        """Return parts of the modules that the functions so far import when they run.

        These are the globals that the functions name there.  They are missing if the program has
        not imported the module yet.  Nothing is returned twice.
        """
        if len(self._imports.leads_to) == self._imports_told:
            return {}
        parts = self._parts_of(self._imports)
        self._imports_told = len(self._imports.leads_to)
        return parts

    # -- nodes -------------------------------------------------------------------------------------

    def _look(self, node: _Node, fill: Callable[[_Node], Any]) -> Any:
        """Fill a node, and return what `fill` returns."""
        self._leads_to = node.leads_to
        try:
            found = fill(node)
            # These parts only help to name a change: the code is also in the part that led to it.
            for label, digest in sorted(self._codes):
                place = "" if label == node.label else f" in {node.label}"
                node.add(f"the code of {label}{place}", digest)
            return found
        except Unknown as exc:
            node.unknown = exc
        finally:
            self._codes.clear()
            self._forget()

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

    def _is_free(self, key: Any, label: str) -> bool:
        """Whether no other object has this label; the program may have replaced an object."""
        return key in self._held or label not in self._nodes

    def _node(self, key: Any, label: str, held: Any, fill: Callable[[_Node], Any]) -> bytes:
        """Refer to a node, and make it if it is new."""
        if key not in self._held:
            self._held[key] = held
            node = self._nodes[label] = _Node(label)
            self._todo.append((node, fill))
        self._leads_to.add(label)
        return hashed(b"node", label.encode("utf-8", "surrogatepass"))

    def _part(self, node: _Node, name: str, value: Any) -> None:
        try:
            digest = self._value(value).hex()
        except Unknown as exc:
            exc.part = name
            raise
        # Errors show numbers, but not texts, which may be secret.
        name = name.encode("utf-8", "backslashreplace").decode()  # attributes may have any name
        shown = type(value) in _SHOWN and not (type(value) is int and abs(value) >= 1 << 64)
        node.add(name, repr(value) if shown else digest)

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
        if not isinstance(func, FunctionType):
            self._fill_object(node, func)
        elif self._is_named(func):
            self._named(func)
        else:
            self._filler(func)(node, func)
        for name, value in beside.items():
            self._part(node, name, value)

    def _fill_object(self, node: _Node, obj: Any) -> None:
        """Add a part for each attribute of an object, if it pickles by its attributes alone."""
        name = label_of(type(obj))
        if attributes_of(obj) and wrapped_by(obj) is None:
            try:
                reduced = self._reduced(obj)
            except Exception as exc:  # from the object's own methods; `_part` below names it
                pass_on(exc)
                reduced = ()
            state = reduced[2] if type(reduced) is tuple and len(reduced) > 2 else None
            if type(state) is dict and not any(reduced[3:]):
                self._part(node, f"what makes the {name}", reduced[:2])
                for key, value in state.items():
                    self._part(node, f"the attribute {key} of the {name}", value)
                return
        self._part(node, f"the {name}", obj)

    # -- functions, classes, modules, globals ------------------------------------------------------

    def _is_named(self, obj: Any) -> bool:
        return self._is_free(id(obj), label_of(obj)) and found_by_name(obj)

    def _named(self, obj: Any) -> bytes:
        """Refer to a function or class by its name, or return the digest of one that has none."""
        label, fill = label_of(obj), self._filler(obj)
        if self._is_named(obj):
            return self._node(id(obj), label, obj, lambda node: fill(node, obj))
        node = _Node(label)
        fill(node, obj)
        if isinstance(obj, FunctionType):
            self._codes.append((label, node.parts[f"the code of {label}"]))
        return hashed(b"nameless", repr(sorted(node.parts.items())).encode())

    def _defined(self, obj: Any) -> bytes | None:
        if type(obj) is FunctionType:
            return self._named(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, ModuleType):
            return self._module(obj)
        if type(obj) is BuiltinFunctionType and isinstance(obj.__self__, (ModuleType, type(None))):
            self._installed(obj.__module__)
            return hashed(b"builtin", f"{obj.__module__}.{obj.__qualname__}".encode())
        return None

    def _filler(self, function: Any) -> Callable[[_Node, Any], None]:
        if isinstance(function, type):
            return self._fill_class
        if is_program(function.__globals__.get("__name__")):
            return self._fill_function
        if is_program(function.__module__) or not found_by_name(function):
            return self._fill_closure  # made by a library's decorator
        return self._fill_installed

    def _fill_function(self, node: _Node, function: Any) -> None:
        self._fill_closure(node, function)
        code, values = function.__code__, function.__globals__
        use = use_of(code)
        found = [
            (values if name in values else vars(builtins), name, name in use.held)
            for name in use.names
            if name in values or not is_standard(getattr(builtins, name, len))
        ]
        modules = [(space[name], held) for space, name, held in found if _is_module(space[name])]
        found += [(vars(one), name, held) for one, name, held in in_modules(modules, use)]
        found.sort(key=lambda one: (str(one[0].get("__name__")), one[1]))
        for space, name, held in found:
            if name not in OF_MODULES:
                self._global(node, space, name, held)
        for name in sorted(imported(code, values.get("__package__"))):
            self._import(name)
            self._imported(name, use)
        self._follow(node, annotations_of(function), values)

    def _fill_closure(self, node: _Node, function: Any) -> None:
        self._fill_installed(node, function)
        code = function.__code__
        if function.__defaults__ or function.__kwdefaults__:
            given = function.__defaults__, function.__kwdefaults__
            self._part(node, f"the defaults of {node.label}", given)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # the variable has no value yet
                self._part(node, f"the variable {name} of {node.label}", cell.cell_contents)
        for name, value in vars(function).items():
            self._part(node, f"the attribute {name} of {node.label}", value)

    def _fill_installed(self, node: _Node, function: Any) -> None:
        self._part(node, f"the code of {node.label}", function.__code__)
        self._installed(function.__globals__.get("__name__"))

    def _global(self, node: _Node, values: dict[str, Any], name: str, held: bool) -> None:
        """Refer to a global of a function.

        If the global is a module, refer to the whole module, unless the function only uses its
        attributes.
        """
        value, module = values[name], canonical(values.get("__name__"))
        label, key = f"the global {name} of {module}", (id(values), name)
        is_module = _is_module(value)
        said = ("module", canonical(value.__name__)) if is_module else value
        if values is globals_of(module) and self._is_free(key, label):
            self._node(key, label, values, lambda node: self._part(node, label, said))
        else:  # a copy of a module, or names that a library made for a generated function
            self._part(node, f"{label} in {node.label}", said)
        if is_module and not is_program(value.__name__):
            self._installed(value.__name__)
        elif is_module and held:
            self._part(node, f"{label}, used in {node.label}", value)

    def _class(self, cls: type) -> bytes:
        if is_in_c(cls) or not is_program(cls.__module__):
            self._installed(cls.__module__)
            return hashed(b"class", label_of(cls).encode("utf-8", "surrogatepass"))
        return self._named(cls)

    def _fill_class(self, node: _Node, cls: type) -> None:
        self._part(node, f"the bases of {node.label}", (type(cls), *cls.__bases__))
        # A library's metaclass may store anything in its classes.
        own = is_program(type(cls).__module__) or type(cls).__module__ in _METACLASSES
        for name, value in sorted(vars(cls).items()):
            if name in OF_CLASSES:
                continue
            dunder = name.startswith("__") and not isinstance(value, CODE)
            if own or not dunder or name.endswith("fields__"):
                self._part(node, f"{node.label}.{name}", value)
        if registered := {ref() for ref in registered_classes(cls)}:
            self._part(node, f"what is registered with {node.label}", registered)
        module = sys.modules.get(cls.__module__)
        names = getattr(module, "__dict__", {})
        self._follow(node, vars(cls).get("__annotations__", {}), names)

    def _module(self, module: ModuleType) -> bytes:
        """Refer to a module that is a value, such as an argument: any part of it may be used."""
        name = module.__name__
        self._installed(name)
        inside: Any = None
        if is_program(name) and name not in MAIN_NAMES:
            if sys.modules.get(name) is module and self._import(name):
                for one in submodules(attributes_of(module).get("__path__", ()), name):
                    self._import(one)
            else:  # not made from a file that a program can find by the name
                inside = {key: one for key, one in vars(module).items() if key not in OF_MODULES}
        return self._values(b"module", (canonical(name), inside))

    def _import(self, name: str) -> bool:
        """Add an imported module as a whole, from its file: it may not be imported yet.

        Return whether there is a file of the program.
        """
        label = f"the module {name}"
        if ("module", name) in self._held:
            self._leads_to.add(label)
            return True
        try:
            found = None if name in MAIN_NAMES else module_code(name)
        except Exception as exc:  # from an import finder, or a file that does not compile
            pass_on(exc)
            found = None
        if found is None:
            return False
        code, package = found

        def fill(node: _Node) -> None:
            self._part(node, label, code)
            if isinstance(code, CodeType):
                for inside in sorted(imported(code, package)):
                    self._import(inside)

        self._node(("module", name), label, None, fill)
        return True

    def _imported(self, name: str, use: Code) -> None:
        """Add the globals that code uses of a module that it imports, if this is imported now.

        `_import` adds the module's file.  These are the values that the program has set there.
        """
        module: Any = sys.modules.get(name)
        if not (_is_module(module) and is_program(name)):
            return
        before, self._leads_to = self._leads_to, self._imports.leads_to
        try:
            for inside, one, held in sorted(in_modules([(module, False)], use), key=itemgetter(1)):
                if one not in OF_MODULES:
                    self._global(self._imports, vars(inside), one, held)
        finally:
            self._leads_to = before

    def _installed(self, module: Any) -> None:
        """Add the version of an installed module's package."""
        found = None if is_program(module) else version_of(module)
        if found is not None:
            label = f"the version of {found[0]}"
            self._node(label, label, None, lambda node: node.add(label, found[1]))

    def _follow(self, node: _Node, annotations: dict[str, Any], values: dict[str, Any]) -> None:
        """Add the program's classes that annotations name: their methods may be called."""
        found = [values.get(one) if isinstance(one, str) else one for one in annotations.values()]
        classes = [one for one in found if isinstance(one, type) and is_program(one.__module__)]
        if classes:
            self._part(node, f"the annotations of {node.label}", classes)


def _is_module(value: Any) -> bool:
    # `__class__` may be overridden, and may raise.
    return issubclass(type(value), ModuleType)


_IMPORTS = "the modules that it imports"
_ROOT = "the function"
"""Takes the place of the label of a function without a name that `of_function` describes."""

_METACLASSES = frozenset({"builtins", "abc", "enum"})
