"""Which statements of a script a worker has to run for a name of it, and which it can leave out.

A worker runs the script for its names.  What takes long there is what most tasks never touch: an
``import torch``, a table of 150 MB.  So the script's top level is taken apart into units, whole
lines, and a worker runs for a name

* those that may do more than bind names: calls, loops, ``with``, assignments to attributes, classes
  with a decorator or a metaclass, imports of the program's own modules: always, and in their order;
* the one that binds the name; and
* those that bind what these use, by any name in their text, and so on.

What can be left out binds names and does nothing else, which is seen in the text: functions and
classes without decorators, literals and arithmetic with them, and imports of modules that are known
to do nothing to others.  A name must be bound by one statement alone.  Where a script looks at its
globals as a whole (`globals`, `exec`), or imports ``*``, all of it is run, as it is where this
analysis has nothing to say.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import ast
import builtins
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from xpool.byvalue.source import bound_by, is_guard

__all__ = ["Unit", "Units", "read_units"]


class Unit(NamedTuple):
    """Whole lines of a script, which are run together."""

    first: int  # lines, from 1 on, the last included
    last: int
    names: tuple[str, ...]  # that it binds
    needs: tuple[int, ...]  # the units that bind what it uses
    always: bool  # it may do more than bind names


class Units(NamedTuple):
    """What a worker is told about a script; it has the script's text itself."""

    check: int  # CRC-32 of the file: of another text nothing is known
    flags: int  # of the compiler: those of its ``from __future__ import``
    units: tuple[Unit, ...]

    def plain(self) -> tuple[int, int, tuple[tuple[Any, ...], ...]]:
        """Return the same without these classes."""
        return self.check, self.flags, tuple(map(tuple, self.units))


# Those three print, open a browser, and change how the terminal is read.
_SILENT = (sys.stdlib_module_names - {"this", "antigravity", "readline"}) | {
    "numpy",
    "torch",
    "xpool",
}
"""Modules that change nothing when they are imported but what belongs to them."""

_AS_A_WHOLE = {"globals", "locals", "vars", "exec", "eval", "__import__"}

_CALLS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "builtins": "abs bool bytearray bytes complex dict float frozenset int len list max min "
        "object pow range round set slice sorted str sum tuple",
        "collections": "Counter OrderedDict defaultdict deque namedtuple",
        "dataclasses": "field",
        "numpy": "arange array dtype eye full linspace ones zeros",
        "os.path": "abspath basename dirname join",
        "pathlib": "Path PurePath",
        "re": "compile",
        "threading": "Lock RLock",
        "torch": "arange device eye full ones tensor zeros",
        "typing": "NamedTuple NewType ParamSpec TypeVar",
    }.items()
    for name in names.split()
)
"""Functions that make a value of their arguments and do nothing else."""

_DECORATORS = frozenset(
    {
        "abc.abstractmethod", "builtins.classmethod", "builtins.property", "builtins.staticmethod",
        "contextlib.contextmanager", "dataclasses.dataclass", "functools.cache",
        "functools.cached_property", "functools.lru_cache", "functools.total_ordering",
        "torch.inference_mode", "torch.no_grad", "typing.final", "typing.overload",
    }
)  # fmt: skip
"""Decorators that change what they decorate, and nothing else."""

_PLAIN = (
    ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.BoolOp,
    ast.Compare, ast.IfExp, ast.JoinedStr, ast.FormattedValue, ast.Subscript, ast.Slice, ast.Name,
    ast.Attribute, ast.Call, ast.Lambda, ast.keyword, ast.Starred, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip


def units_of(text: bytes, tree: ast.Module, values: Mapping[str, Any], folder: str) -> Units | None:
    """Take a script apart; None: nothing of it can be left out, or that cannot be seen.

    Args:
        values: the script's globals as they are in the program, to see what its classes are.
        folder: of the script: modules there are the program's own.
    """
    if b"coding" in b"".join(text.splitlines(True)[:2]) or text.startswith(b"\xef\xbb\xbf"):
        return None  # its lines cannot be compiled one by one
    script = _Script(tree, values, folder)
    if script.whole:
        return None
    groups = list(_groups(script.statements))
    owner = {name: i for i, group in enumerate(groups) for part in group for name in bound_by(part)}
    units = []
    for i, group in enumerate(groups):
        used = {name for part in group for name in _used_by(part)} & owner.keys()
        first = min(_first_line(part) for part in group)
        last = max(part.end_lineno or part.lineno for part in group)
        names = tuple(name for part in group for name in bound_by(part))
        # All of them are asked, since each may bring names for the next; a first text is __doc__.
        acting = [script.acts(part) for part in group]
        always = any(acting) or (i == 0 and _is_text(group[0]))
        units.append(Unit(first, last, names, tuple(sorted(owner[n] for n in used)), always))
    if all(unit.always for unit in units):
        return None
    return Units(zlib.crc32(text), script.flags, tuple(units))


def read_units(path: str, values: Mapping[str, Any]) -> Units | None:
    """Read a script and take it apart; what cannot be read or parsed is run as a whole."""
    try:
        with open(path, "rb") as file:
            text = file.read()
        tree = ast.parse(text, path)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return units_of(text, tree, values, os.path.dirname(path))


class _Script:
    def __init__(self, tree: ast.Module, values: Mapping[str, Any], folder: str) -> None:
        self.flags = 0
        self.statements: list[ast.stmt] = []
        self._values, self._folder = values, folder
        self._imported: dict[str, str] = {}  # names of modules, and of what is in them
        self._inert: set[str] = set()  # names bound by what can be left out
        times: Counter[str] = Counter()
        self.whole = False
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                for alias in node.names:
                    self.flags |= getattr(__import__("__future__"), alias.name).compiler_flag
                continue
            if isinstance(node, ast.If) and is_guard(node.test) and not node.orelse:
                continue
            self.statements.append(node)
            times.update(bound_by(node))
        # A worker that leaves one of several out would bind the name to another's value.
        self._changed = {name for name, n in times.items() if n > 1}
        for part in ast.walk(tree):
            self._look(part)

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Global):
            self._changed.update(node.names)
        elif isinstance(node, ast.Name):
            self.whole |= node.id in _AS_A_WHOLE
        elif isinstance(node, ast.Attribute):
            self.whole |= node.attr == "modules"  # sys.modules[__name__]
            if not isinstance(node.ctx, ast.Load):
                self._changed.add(node.attr)
        elif isinstance(node, ast.alias):
            self.whole |= node.name == "*"

    def acts(self, node: ast.stmt) -> bool:
        """Whether a statement may do more than bind names that nothing else binds."""
        names = set(bound_by(node))
        if names & self._changed or not self._only_binds(node):
            return True
        self._inert |= names
        return False

    def _only_binds(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._imported[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
            return all(self._is_silent(alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                self._imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            return node.level == 0 and self._is_silent(node.module or "")
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = all(isinstance(target, ast.Name) for target in targets)
            return named and (node.value is None or self._is_plain(node.value)) and (
                isinstance(node, ast.Assign) or self._is_plain(node.annotation)
            )  # fmt: skip
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return self._is_plain_function(node)
        if isinstance(node, ast.ClassDef):
            return self._is_plain_class(node)
        return isinstance(node, ast.Pass) or _is_text(node)

    def _is_silent(self, module: str) -> bool:
        top = module.partition(".")[0]
        file = getattr(sys.modules.get(top), "__file__", None) or ""
        # One of the program's own may hide the one meant.
        own = os.path.dirname(file) in (self._folder, os.path.join(self._folder, top))
        return top in _SILENT and (not own or top == "xpool")

    def _is_plain_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        given = node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        parts = [*given.defaults, *given.kw_defaults, node.returns]
        parts += [one.annotation for one in arguments if one is not None]
        return all(map(self._is_plain_decorator, node.decorator_list)) and all(
            self._is_plain(part) for part in parts if part is not None
        )

    def _is_plain_class(self, node: ast.ClassDef) -> bool:
        found = self._values.get(node.name)
        if node.keywords or not isinstance(found, type):
            return False
        # `object` apart, whose own does nothing: what a base defines runs when the class is made.
        hooked = any("__init_subclass__" in vars(base) for base in found.__mro__[1:-1])
        return (
            type(found) is type
            and not hooked
            and all(map(self._is_plain_decorator, node.decorator_list))
            and all(map(self._is_plain, node.bases))
            and all(map(self._is_plain_part, node.body))
        )

    def _is_plain_part(self, node: ast.stmt) -> bool:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)):
            return False
        return self._only_binds(node)

    def _is_plain(self, node: ast.AST) -> bool:
        """Whether to evaluate an expression does nothing, and takes it nothing that others use."""
        if not isinstance(node, _PLAIN):
            return False
        if isinstance(node, ast.Name):
            return node.id in self._inert or node.id == "__file__" or hasattr(builtins, node.id)
        if isinstance(node, ast.Lambda):
            return all(
                self._is_plain(one) for one in node.args.defaults + node.args.kw_defaults if one
            )
        if isinstance(node, ast.Call) and self._path_of(node.func) not in _CALLS:
            return False
        return all(map(self._is_plain, ast.iter_child_nodes(node)))

    def _is_plain_decorator(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Attribute) and node.attr in ("setter", "deleter"):
            return isinstance(node.value, ast.Name)  # of a property
        given: list[ast.AST] = []
        if isinstance(node, ast.Call):
            given, node = [*node.args, *node.keywords], node.func
        return self._path_of(node) in _DECORATORS and all(map(self._is_plain, given))

    def _path_of(self, node: ast.expr) -> str:
        """Where a name leads: "torch.zeros" also of what is called ``th.zeros``."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        top = self._imported.get(node.id, "" if node.id in self._inert else "builtins." + node.id)
        return ".".join([top, *path])


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _groups(statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Statements that have no line in common with others."""
    group: list[ast.stmt] = []
    for node in statements:
        if group and _first_line(node) > (group[-1].end_lineno or 0):
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _used_by(node: ast.stmt) -> Iterator[str]:
    """Every name in the text of a statement, and in short texts in it: annotations, getattr."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Global):
            yield from part.names
        elif isinstance(part, ast.Constant) and type(part.value) is str:
            yield from _names_in(part.value)


def _names_in(text: str) -> list[str]:
    if len(text) > _SHORT:
        return []
    return "".join(c if c.isalnum() or c == "_" else " " for c in text).split()


_SHORT = 60
"""Characters of a text that may be an expression; a longer one is for people."""
