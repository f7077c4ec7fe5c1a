"""Analyses the globals of a script by its syntax tree, without running it.

It answers two questions about a worker, which runs the file without its guarded blocks.  Which
names may have no value or another one there, because a guarded block or a function binds them?  And
which surely have the same value, because one statement of the file makes it and nothing rebinds it?
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from xpool._pickling.by_value.top_level import names_of, root_of

_MISSING = object()
_OF_CODE = frozenset({"__code__", "__defaults__", "__kwdefaults__"})
_CONSTANTS = frozenset({int, float, complex, str, bytes, bool, type(None)})


class SourceFile(NamedTuple):
    """The analysis of the top level of a file."""

    has_guard: bool = False
    rebound: frozenset[str] = frozenset()
    """Names that a guarded block binds, or a function with a ``global`` statement, and functions
    whose code or defaults a statement replaces.  A worker may have other objects by these names."""

    constants: Mapping[str, Any] = MappingProxyType({})
    """Literals by the names of globals and of class attributes ("Config.rate")."""

    imports: Mapping[str, list[tuple[str, str | None]]] = MappingProxyType({})
    """By a bound name, the imported modules and the names in them (None: the module itself)."""

    def makes(self, name: str, value: Any) -> bool:
        """Whether this name surely has this value in every process that runs the file."""
        if name in self.rebound:
            return False
        constant = self.constants.get(name, _MISSING)
        if type(constant) is type(value) and _same(constant, value):
            return True
        return any(_imported(*one) is value for one in self.imports.get(name, ()))


def _same(constant: Any, value: Any) -> bool:
    """Whether two objects of one type are the same constant, as 0.0 and -0.0 are not."""
    return type(constant) in _CONSTANTS | {tuple} and repr(constant) == repr(value)


def _imported(module: str, attribute: str | None) -> Any:
    found: Any = sys.modules.get(module, _MISSING)
    if attribute is None or found is _MISSING:
        return found
    return getattr(found, attribute, sys.modules.get(f"{module}.{attribute}", _MISSING))


def read(path: str, package: str | None) -> SourceFile:
    """Analyse a file.  The result is empty if the file cannot be read or parsed.

    ``package`` is the module's ``__package__``, for its relative imports.
    """
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return SourceFile()
    guards: list[ast.If] = []
    outside: list[tuple[str, ast.AST]] = []
    inside: set[str] = set()
    # The statements that workers run, which include the ``else`` of a guard.
    statements = list(_top_level(tree.body, guards))
    for guard in guards:
        for statement in _top_level(guard.body, []):
            inside.update(names_of(statement).bound)
        statements += _top_level(guard.orelse, [])
    for statement in statements:
        outside += [(name, statement) for name in names_of(statement).bound]
    # Functions may bind the globals that they declare, and any attributes.
    declared, attributes = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            declared.update(node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            attributes.add(node.attr)
            if node.attr in _OF_CODE and (root := root_of(node)) is not None:
                declared.add(root.id)
    return SourceFile(
        has_guard=bool(guards),
        rebound=frozenset(inside | declared),
        constants=dict(_constants(outside, attributes)),
        imports=_imports(outside, package),
    )


def _constants(
    bound: Iterable[tuple[str, ast.AST]], attributes: set[str]
) -> Iterator[tuple[str, Any]]:
    """Yield each name that exactly one statement binds to an immutable literal, and the literal."""
    bound = list(bound)
    times = Counter(name for name, _ in bound)
    for name, node in bound:
        if times[name] > 1:
            continue
        if isinstance(node, ast.ClassDef):
            inside = [(one, part) for part in node.body for one in names_of(part).bound]
            for one, constant in _constants(inside, attributes):
                if one not in attributes:
                    yield f"{name}.{one}", constant
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, ast.AST):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(target, ast.Name) for target in targets):
                try:
                    constant = ast.literal_eval(value)
                except (ValueError, TypeError, RecursionError):
                    continue
                if _is_constant(constant):
                    yield name, constant


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS


def _imports(
    outside: list[tuple[str, ast.AST]], package: str | None
) -> dict[str, list[tuple[str, str | None]]]:
    found: dict[str, list[tuple[str, str | None]]] = {}
    for name, node in outside:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname == name:
                    found.setdefault(name, []).append((alias.name, None))
                # ``import a.b`` binds a.
                elif alias.asname is None and alias.name.partition(".")[0] == name:
                    found.setdefault(name, []).append((name, None))
        elif isinstance(node, ast.ImportFrom):
            # In a relative import, one dot means the package itself.
            above = (package or "").split(".")
            above = above[: len(above) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    found.setdefault(name, []).append((module, alias.name))
    return found


def _top_level(body: list[ast.stmt], guards: list[ast.If]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module runs, except those in guarded blocks."""
    for node in body:
        if isinstance(node, ast.If) and is_guard(node.test):
            guards.append(node)
            continue
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(node, name, []), guards)
        for handler in getattr(node, "handlers", []):
            yield from _top_level(handler.body, guards)
        for case in getattr(node, "cases", []):
            yield from _top_level(case.body, guards)


def is_guard(test: ast.expr) -> bool:
    for node in ast.walk(test):
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq):
            continue
        sides = [node.left, *node.comparators]
        names = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
        mains = any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)
        if names and mains:
            return True
    return False
