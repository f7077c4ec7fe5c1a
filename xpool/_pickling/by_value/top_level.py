"""Finds the names that a top-level statement binds, uses and changes, by its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Names:
    """The names of globals in a statement.

    Attributes:
        bound: names that the statement binds.
        used: names that the statement reads.
        later: names that its functions read when they are called.
        spelled: names in annotations that are texts.
    """

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.used: set[str] = set()
        self.later: set[str] = set()
        self.spelled: set[str] = set()

    @classmethod
    def all_of(cls, some: Iterable[Names]) -> Names:
        found = cls()
        for one in some:
            found.bound |= one.bound
            found.used |= one.used
            found.later |= one.later
            found.spelled |= one.spelled
        return found


def names_of(node: ast.stmt) -> Names:
    """Return the names in a statement.

    `later` may contain local variables of functions.  The result of `reads_of` does not.
    """
    found = Names()
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        found.bound = {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        return found
    _visit(node, found, frozenset(), top=True)
    return found


def _visit(node: ast.AST, found: Names, own: frozenset[str], top: bool) -> None:
    """Add the names in a node.  ``own`` has the variables of a comprehension, which are local."""
    if isinstance(node, ast.Name):
        if node.id in own:
            return
        if isinstance(node.ctx, ast.Load):
            found.used.add(node.id)
        elif top:
            found.bound.add(node.id)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        if top and not isinstance(node, ast.Lambda):
            found.bound.add(node.name)
        _visit_function(node, found, own)
    elif isinstance(node, ast.ClassDef):
        if top:
            found.bound.add(node.name)
        for part in ast.iter_child_nodes(node):
            _visit(part, found, own, False)
    elif isinstance(node, _COMPREHENSIONS):
        targets = {
            one.id
            for part in node.generators
            for one in ast.walk(part.target)
            if isinstance(one, ast.Name)
        }
        for part in ast.iter_child_nodes(node):
            _visit(part, found, own | targets, top)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        if top:
            found.bound |= names_of(node).bound
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        if top and node.name:
            found.bound.add(node.name)
        for part in ast.iter_child_nodes(node):
            _visit(part, found, own, top)
    else:
        if isinstance(node, ast.AnnAssign):
            found.spelled.update(_spelled([node.annotation]))
        for part in ast.iter_child_nodes(node):
            _visit(part, found, own, top)


def _visit_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, found: Names, own: frozenset[str]
) -> None:
    """Add the names that a definition evaluates when it runs, and those in its body."""
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    now: list[ast.AST | None] = [*given.defaults, *given.kw_defaults]
    annotations = [one.annotation for one in every if one is not None]
    annotations.append(getattr(node, "returns", None))
    now += annotations
    found.spelled.update(_spelled(annotations))
    body: list[ast.AST]
    if isinstance(node, ast.Lambda):
        body = [node.body]
    else:
        now += [*node.decorator_list, *getattr(node, "type_params", ())]
        body = [*node.body]
    for one in now:
        if one is not None:
            _visit(one, found, own, False)
    inside = Names()
    for part in body:
        _visit(part, inside, own, False)
        for one in ast.walk(part):
            if isinstance(one, ast.Global):
                inside.used.update(one.names)
    found.later |= (inside.used | inside.later) - {one.arg for one in every if one is not None}
    found.spelled |= inside.spelled


def reads_of(text: bytes, path: str) -> dict[str, set[str]]:
    """Return the globals that functions read, by the name of the top-level function or class.

    This uses the compiler's symbol table, so local variables are not included.
    """
    import symtable  # imported here, because this runs only when the first worker starts

    found: dict[str, set[str]] = {}
    for table in symtable.symtable(text.decode(), path, "exec").get_children():
        names = found.setdefault(table.get_name(), set())
        todo = [table]
        while todo:
            one = todo.pop()
            todo += one.get_children()
            if isinstance(one, symtable.Function):
                names.update(one.get_globals())
    return found


def _spelled(annotations: Iterable[ast.AST | None]) -> Iterator[str]:
    """Yield names in annotations that are texts, because a library may evaluate these."""
    for one in annotations:
        for part in ast.walk(one) if one is not None else ():
            if isinstance(part, ast.Constant) and type(part.value) is str:
                text = "".join(c if c.isalnum() or c == "_" else " " for c in part.value)
                yield from text.split()


def root_of(node: ast.AST) -> ast.Name | None:
    """Return the name with which an expression begins: ``a`` of ``a.b[0].c`` and of ``a().b``."""
    while not isinstance(node, ast.Name):
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node


def targets_of(node: ast.stmt) -> list[ast.expr]:
    """Return the targets of a statement, but not those in its block.  Tuples are unpacked."""
    found: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        found = [*node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        found = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    flat: list[ast.expr] = []
    while found:
        one = found.pop(0)
        if isinstance(one, (ast.Tuple, ast.List)):
            found += one.elts
        elif isinstance(one, ast.Starred):
            found.append(one.value)
        else:
            flat.append(one)
    return flat


def acted_on(node: ast.stmt) -> Iterator[str]:
    """Yield the names of values that a computing statement changes but does not bind."""
    for part in ast.walk(node):
        if isinstance(part, ast.stmt):
            changed = targets_of(part)
            if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call):
                changed = [part.value.func]
            for one in changed:
                root = root_of(one)
                if root is not None and root is not one:
                    yield root.id


def calls_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a statement calls, and decorators, but no bodies of functions."""
    todo = [node]
    while todo:
        one = todo.pop()
        if isinstance(one, ast.Call):
            yield one.func
        yield from getattr(one, "decorator_list", ())
        if isinstance(one, ast.Lambda):
            todo += [*one.args.defaults, *filter(None, one.args.kw_defaults)]
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += [part for part in ast.iter_child_nodes(one) if not isinstance(part, ast.stmt)]
        else:
            todo += ast.iter_child_nodes(one)


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is only a constant, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def groups_of(statements: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Divide statements into groups, so that no two groups have a line in common."""
    group: list[ast.stmt] = []
    for node in statements:
        if group and first_line(node) > (group[-1].end_lineno or 0):
            yield group
            group = []
        group.append(node)
    if group:
        yield group
