"""Decides which statements of a script a worker runs, and which it leaves out.

A worker runs the script to get its functions and classes.  The slow statements, such as loading
data or building a model, compute values that the program already has.  So the script's top level is
divided into units of whole lines, of four kinds:

* A unit that **acts** runs first, in the script's order: calls as statements, loops and ``with``
  and ``if`` blocks with such calls, assignments to attributes and items, definitions that call a
  function or (``n=rate``) evaluate a name that later code binds or changes, imports of modules that
  may have effects.
* A unit that **binds** (functions, plain classes, imports of the standard library, numpy and torch)
  runs when a name that it binds is looked up, or another name that needs it.  A class statement
  also runs when one of its base classes is looked up, because these list their subclasses.
* A unit that **computes** does not run: assignments to names, blocks of these, changes of only
  such a value (``data.sort()``, ``data["x"] = 1``), and calls of print.  The program sends its
  values with the functions that read them (`main_globals`).  The unit runs if a value cannot be
  sent, or if a statement that runs uses the name.
* A unit that acts only in torch or numpy **waits** until the worker imports that library.  Three
  kinds of units wait until the worker imports any installed package: imports of installed packages
  whose names the script uses, settings of some of these packages, and classes that derive from
  theirs.  An import whose name is not used acts, because it must be there for its effect.

If values share an object, their statements run, because the values may be compared by identity.
They all run together, before a value of the program is set, because each may change the shared
object.  Large values are always copies.

If a script uses its globals as a whole (`globals`, `exec`), imports ``*`` from its own package, or
cannot be analysed, all of it runs.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import ast
import builtins
import os
import re
import sys
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from xpool._pickling.by_value.effects import (
    LIBRARY,
    SELF_CONTAINED,
    is_inert,
    is_installed,
    is_plain_class,
    is_silent,
    library_of,
    looks_at_itself,
    names_of_star,
    only_prints,
    origins_of,
)
from xpool._pickling.by_value.source import is_guard
from xpool._pickling.by_value.top_level import (
    Names,
    acted_on,
    calls_of,
    first_line,
    groups_of,
    is_text,
    names_of,
    reads_of,
    root_of,
    targets_of,
)
from xpool._pickling.by_value.top_values import held_alone, sharing

BINDS, ACTS, COMPUTES, WAITS = range(4)
"""Kinds of units."""


class Unit(NamedTuple):
    """Whole lines of a script that run together."""

    first: int  # the first and the last line, counted from 1
    last: int
    names: tuple[str, ...]  # names that it binds; if it computes, see `_StatementGroups._binds`
    needs: tuple[int, ...]  # units of other kinds that must run with it
    wants: tuple[str, ...]  # computed names that it uses
    reads: tuple[str, ...]  # computed names that its functions use when they are called
    kind: int
    imports: tuple[str, ...]  # "torch", "numpy", and `LIBRARY` for other installed packages
    awaits: tuple[str, ...]  # if it waits: it runs when one of these (as above) is imported
    anew: tuple[str, ...]  # of `wants`, names whose values may not be the last ones


class Units(NamedTuple):
    """The analysis of a script for workers, which have the script's text."""

    check: int  # CRC-32 of the analysed file
    flags: int  # the compiler's flags for its ``from __future__ import``
    units: tuple[Unit, ...]
    packages: tuple[str, ...]  # packages of `LIBRARY` that the program has imported, if awaited
    shared: tuple[str, ...]  # computed names whose values share an object with another one

    def plain(self) -> tuple[Any, ...]:
        return self.check, self.flags, tuple(map(tuple, self.units)), self.packages, self.shared


_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", re.MULTILINE)  # PEP 263


def read_units(path: str, values: Mapping[str, Any], rebound: frozenset[str]) -> Units | None:
    """Read a script and divide it into units.  Return None if all of it must run.

    ``values`` are the script's globals in the program, which contain its classes.
    """
    try:
        with open(path, "rb") as file:
            text = file.read()
        tree = ast.parse(text, path)
        reads = reads_of(text, path)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    # Lines in another encoding cannot be compiled one by one.
    coding = _CODING.search(b"".join(text.splitlines(True)[:2]))
    utf8 = coding is None or coding[1].lower() in (b"utf-8", b"utf8")
    if not utf8 or text.startswith(b"\xef\xbb\xbf"):
        return None
    if looks_at_itself(tree):
        return None
    flags, statements = _statements(tree)
    groups = list(groups_of(statements))
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    parts = _StatementGroups(groups, reads, values, os.path.dirname(path), named, rebound)
    units = parts.units()
    if all(unit.kind == ACTS for unit in units):
        return None
    awaited = any(LIBRARY in unit.awaits for unit in units)
    packages = tuple(filter(is_installed, list(sys.modules))) if awaited else ()
    return Units(zlib.crc32(text), flags, tuple(units), packages, tuple(sorted(parts.shared)))


def _statements(tree: ast.Module) -> tuple[int, list[ast.stmt]]:
    flags, found = 0, list[ast.stmt]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                flags |= getattr(__import__("__future__"), alias.name).compiler_flag
        elif not (isinstance(node, ast.If) and is_guard(node.test) and not node.orelse):
            found.append(node)
    return flags, found


class _StatementGroups:
    """The statements of a script, in groups that have no line in common."""

    def __init__(
        self,
        groups: list[list[ast.stmt]],
        reads: Mapping[str, set[str]],
        values: Mapping[str, Any],
        folder: str,
        named: set[str],
        rebound: frozenset[str],
    ) -> None:
        self._reads, self._values, self._folder = reads, values, folder
        self._named = named  # all names in the script
        self._rebound = rebound  # see `SourceFile`
        self._groups = groups
        self._alone: dict[str, bool] = {}
        self._names = [Names.all_of(map(names_of, group)) for group in groups]
        for group, found in zip(groups, self._names, strict=True):
            for node in group:
                if isinstance(node, ast.ImportFrom) and "*" in found.bound:
                    found.bound |= names_of_star(node) or set()
        self._bound = {name for names in self._names for name in names.bound}
        self._origins = origins_of(groups)
        self._computed = self._find_computed()
        self.shared = sharing({n: v for n, v in list(values.items()) if n in self._computed})
        self._owners: dict[str, list[int]] = {}
        # Names that a unit binds.  If it computes, also names that it changes, and names whose
        # values share an object with any of these.  A worker runs all units of such a name.
        self._binds: list[set[str]] = []
        for i, group in enumerate(groups):
            names = set(self._names[i].bound)
            if self._computes(group):
                names |= {name for node in group for name in acted_on(node)}
                names = names.union(*(self.shared.get(name, ()) for name in names))
            self._binds.append(names)
            for name in names:
                self._owners.setdefault(name, []).append(i)

    # -- units that compute -----------------------------------------------------------------

    def _find_computed(self) -> set[str]:
        """Return the names that only computing statements bind."""
        computed = {
            name
            for group, names in zip(self._groups, self._names, strict=True)
            if not any(isinstance(node, _DEFINE) for node in group)
            for name in names.bound
        }
        while True:
            self._computed = computed
            others = {
                name
                for group, names in zip(self._groups, self._names, strict=True)
                if not self._computes(group)
                for name in names.bound
            }
            if not computed & others:
                return computed
            computed = computed - others

    def _computes(self, group: list[ast.stmt]) -> bool:
        return all(map(self._is_computing, group)) and not all(map(_is_nothing, group))

    def _is_computing(self, node: ast.stmt) -> bool:
        if isinstance(node, (ast.Pass, ast.Break, ast.Continue, ast.Assert)) or is_text(node):
            return True
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)):
            return all(map(self._is_own, targets_of(node)))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name):
                # The program has already printed.  A computed value may be any function.
                return "print" not in self._bound and only_prints(node.value)
            return self._is_own(called)
        if isinstance(node, _BLOCKS):
            inside = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt)]
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                inside += part.body
            return all(map(self._is_computing, inside)) and all(map(self._is_own, targets_of(node)))
        return False

    def _is_own(self, target: ast.expr) -> bool:
        """Whether the target is, or is in, a computed value to which nothing else refers."""
        root = root_of(target)
        if root is None or root.id not in self._computed:
            return False
        if root is target:
            return True
        # Computed once, because this may search all objects of the program.
        if root.id not in self._alone:
            self._alone[root.id] = held_alone(root.id, self._values)
        return self._alone[root.id]

    # -- units that act ---------------------------------------------------------------------

    def _kind(self, group: list[ast.stmt]) -> int:
        if self._computes(group):
            return COMPUTES
        if all(map(self._only_binds, group)):
            return BINDS
        wait = all(self._only_binds(one) or self._libraries_of(one) for one in group)
        return WAITS if wait else ACTS

    def _only_binds(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Import):
            return all(is_silent(alias.name, self._folder) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return node.level == 0 and is_silent(node.module or "", self._folder)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return all(map(self._is_inert, calls_of(node)))
        if isinstance(node, ast.ClassDef):
            return self._is_plain_class(node) and not self._libraries_of_bases(node)
        return isinstance(node, ast.Pass) or is_text(node)

    def _is_inert(self, called: ast.expr) -> bool:
        return is_inert(called, self._origins, self._bound)

    def _is_plain_class(self, node: ast.ClassDef) -> bool:
        return is_plain_class(node, self._values.get(node.name), self._origins, self._bound)

    def _bases_of(self, node: ast.ClassDef) -> list[tuple[str, str]]:
        """Return the modules and names of all bases, except those of silent modules."""
        found = self._values.get(node.name)
        bases = found.__mro__[1:-1] if isinstance(found, type) else ()
        return [
            (base.__module__, base.__name__)
            for base in bases
            if not is_silent(base.__module__, self._folder)
        ]

    def _libraries_of_bases(self, node: ast.ClassDef) -> set[str | None]:
        """Return the libraries whose classes list this one as a subclass, with None for others."""
        modules = {module for module, _ in self._bases_of(node)} - {self._values.get("__name__")}
        return {library_of(module.partition(".")[0]) for module in modules}

    def _libraries_of(self, node: ast.stmt) -> set[str]:
        """Return the libraries that a statement imports, or to which its effects are limited.

        The set is empty if the statement may have other effects, so that it acts.
        """
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self._imported_libraries(node)
        roots: list[ast.expr] = [*calls_of(node)]
        found = set[str | None]()
        if isinstance(node, ast.ClassDef) and self._is_plain_class(node):
            roots, found = [], self._libraries_of_bases(node)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            roots += getattr(node, "bases", ())
            if getattr(node, "keywords", ()):
                return set()
        elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, *_BLOCKS)):
            inside = [one for one in ast.walk(node) if isinstance(one, ast.stmt)]
            if any(isinstance(one, (*_DEFINE, ast.Raise, ast.Global)) for one in inside):
                return set()
            roots += [
                target
                for one in inside
                for target in targets_of(one)
                if not isinstance(target, ast.Name)
            ]
        else:
            return set()
        found |= set(map(self._library_of, roots)) - {"builtins"}
        return set() if None in found else {name for name in found if name is not None}

    def _imported_libraries(self, node: ast.Import | ast.ImportFrom) -> set[str]:
        """Return the libraries that an import statement imports, or an empty set if it cannot wait.

        It cannot wait if it imports a module of the program, or a name that the script never uses:
        such an import must be there for its effect, unless the library is in `SELF_CONTAINED`.
        """
        tops = {top for top in self._tops(node) if not is_silent(top, self._folder)}
        found = {library_of(top) for top in tops} | {None for top in tops if top == "numpy"}
        wanted = not isinstance(node, ast.Import) or all(
            alias.asname or top in self._named or top in SELF_CONTAINED
            for alias in node.names
            if (top := alias.name.partition(".")[0])
        )
        if None in found or (LIBRARY in found and not wanted):
            return set()
        return {label for label in found if label is not None}

    def _library_of(self, node: ast.expr) -> str | None:
        """Return the library from which a name was imported, such as "torch" for ``nn.Module``.

        Return "builtins" if a call has no effects, and None if it may have effects elsewhere.
        """
        root = root_of(node)
        if root is None:
            return None
        if self._is_inert(node):
            return "builtins"
        if root.id in self._origins:
            top = self._origins[root.id].partition(".")[0]
            label = library_of(top)
            return label if label != LIBRARY or top in SELF_CONTAINED else None
        own = root.id in self._owners or root.id == "print"
        return "builtins" if hasattr(builtins, root.id) and not own else None

    # -- units ------------------------------------------------------------------------------

    def units(self) -> list[Unit]:
        kinds = [self._kind(group) for group in self._groups]
        if kinds and kinds[0] == BINDS and all(map(is_text, self._groups[0])):
            kinds[0] = ACTS  # the first text sets __doc__
        for i, names in enumerate(self._names):
            if kinds[i] in (BINDS, WAITS) and self._changed_after(i, names.used | names.spelled):
                kinds[i] = ACTS  # a worker that runs it later finds other values
        self._kinds = kinds
        self._left_out = {
            name for i, kind in enumerate(kinds) if kind == COMPUTES for name in self._binds[i]
        }
        self._below = self._subclasses()
        units = [self._unit(i, group) for i, group in enumerate(self._groups)]
        # These exist before the values of the program are set.
        acted = {name for unit in units if unit.kind == ACTS for name in unit.wants}
        return [unit._replace(anew=self._anew(i, unit, acted)) for i, unit in enumerate(units)]

    def _changed_after(self, i: int, names: Iterable[str]) -> set[str]:
        """Return those of these computed names that code after unit i binds or changes."""
        return {
            name
            for name in self._computed.intersection(names)
            if name in self._rebound or self._owners[name][-1] > i
        }

    def _anew(self, i: int, unit: Unit, acted: set[str]) -> tuple[str, ...]:
        """Return the wanted names whose last values would be wrong for a unit that computes.

        Its own calls may change a value, too: ``last = rows.pop()``.
        """
        if unit.kind != COMPUTES:
            return ()
        called = [part for node in self._groups[i] for part in calls_of(node)]
        roots = {root.id for part in called if (root := root_of(part)) and root is not part}
        found = self._changed_after(i, unit.wants) | roots.intersection(unit.wants)
        return tuple(sorted(found - acted))

    def _subclasses(self) -> dict[str, set[int]]:
        """Return, by a class's name, the units of the classes that derive from it."""
        found: dict[str, set[int]] = {}
        for i, group in enumerate(self._groups):
            for node in group:
                if isinstance(node, ast.ClassDef):
                    for module, name in self._bases_of(node):
                        if module == self._values.get("__name__"):
                            found.setdefault(name, set()).add(i)
        return found

    def _unit(self, i: int, group: list[ast.stmt]) -> Unit:
        first = min(map(first_line, group))
        last = max(part.end_lineno or part.lineno for part in group)
        names = self._names[i]
        used = names.used | names.spelled
        reads = set[str]()
        if all(isinstance(node, _DEFINE) for node in group):
            # The unit does not call the functions that it defines.  Values that they read are sent.
            reads = {name for name in self._read_by(i) if not self._is_constant(name)}
            constants = {name for name in self._read_by(i) if self._is_constant(name)}
            if self._kinds[i] != BINDS:
                used = self._all_that(used)
            used |= constants | (names.later - self._left_out)
        else:
            # A unit that acts or computes may call all functions that it uses, directly or not.
            used = self._all_that(used | names.later)
        below = {n for name in names.bound for n in self._below.get(name, ())}
        imports, awaits = set[str](), set[str]()
        for node in group:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports |= {label for top in self._tops(node) if (label := library_of(top))}
            if self._kinds[i] == WAITS and not self._only_binds(node):
                awaits |= self._libraries_of(node)
        return Unit(
            first=first,
            last=last,
            names=tuple(sorted(self._binds[i])),
            needs=tuple(sorted((self._owned(used - self._left_out) | below) - {i})),
            wants=tuple(sorted((used & self._left_out) - self._binds[i])),
            reads=tuple(sorted(reads - used)),
            kind=self._kinds[i],
            imports=tuple(sorted(imports)),
            awaits=tuple(sorted(awaits)),
            anew=(),
        )

    @staticmethod
    def _tops(node: ast.Import | ast.ImportFrom) -> set[str]:
        if isinstance(node, ast.ImportFrom):
            return {"" if node.level else (node.module or "").partition(".")[0]}
        return {alias.name.partition(".")[0] for alias in node.names}

    def _all_that(self, some: set[str]) -> set[str]:
        """Return these names and all names that their statements and functions use."""
        found, todo = set[str](), list(some)
        while todo:
            name = todo.pop()
            if name not in found and name in self._owners:
                found.add(name)
                for i in self._owners[name]:
                    names = self._names[i]
                    todo += names.used | names.spelled | self._read_by(i)
                    todo += names.later - self._left_out
                    if self._kinds[i] == COMPUTES:
                        todo += self._binds[i] | names.later
        return found

    def _read_by(self, i: int) -> set[str]:
        """Return the computed names that functions and methods of a unit read."""
        return {
            name
            for bound in self._names[i].bound
            for name in self._reads.get(bound, ())
            if name in self._left_out
        }

    def _is_constant(self, name: str) -> bool:
        """Whether a computed name is a literal.  Literals are not always sent (`source`)."""
        owners = self._owners[name]
        return len(owners) == 1 and all(map(_is_literal, self._groups[owners[0]]))

    def _owned(self, names: Iterable[str]) -> set[int]:
        return {i for name in names for i in self._owners.get(name, ())}


_DEFINE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_BLOCKS = (
    ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match,
    *([vars(ast)["TryStar"]] if sys.version_info >= (3, 11) else []),
)  # fmt: skip


def _is_literal(node: ast.stmt) -> bool:
    value = getattr(node, "value", None)
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or value is None:
        return False
    try:
        ast.literal_eval(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _is_nothing(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or is_text(node)
