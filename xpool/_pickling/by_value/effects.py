"""Finds out which effects the imports and the definitions of a script may have."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from xpool._pickling.by_value.top_level import calls_of, is_text, names_of, targets_of

__all__ = [
    "LIBRARY",
    "SELF_CONTAINED",
    "is_inert",
    "is_installed",
    "is_plain_class",
    "is_silent",
    "library_of",
    "looks_at_itself",
    "names_of_star",
    "only_prints",
    "origins_of",
    "stands_on_torch",
]

# The import of these three prints, opens a browser, or changes how the terminal is read.
_SILENT = (sys.stdlib_module_names - {"this", "antigravity", "readline"}) | {
    "numpy",
    "torch",
    "xpool",
}
"""Modules whose import has no effects outside of the modules."""

LIBRARY = "library"
"""Any installed package except numpy and those that use torch.  These may affect each other."""

SELF_CONTAINED = {
    "PIL", "attr", "attrs", "cv2", "jax", "matplotlib", "numba", "pandas", "plotly", "polars",
    "pyarrow", "pydantic", "scipy", "seaborn", "sklearn", "statsmodels", "tqdm", "xarray",
}  # fmt: skip
"""Libraries whose import changes only settings of libraries.  The same is true of their functions
if a script calls these as statements or as decorators."""

_OF_WORKERS = {"numpy", "torch", "xpool", "dill", "pytest"}
"""Packages that a worker may import even if no task uses them."""


def is_silent(module: str, folder: str) -> bool:
    """Whether the import of a module has no other effects.  ``folder`` is that of the script."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    # A module of the program may have the same name.
    own = os.path.dirname(file) in (folder, os.path.join(folder, top))
    return top in _SILENT and (not own or top == "xpool")


def library_of(top: str) -> str | None:
    """Return "torch", "numpy" or `LIBRARY` for an installed package, or None for another one."""
    if stands_on_torch(top):
        return "torch"
    return top if top == "numpy" else LIBRARY if is_installed(top) else None


def is_installed(top: str) -> bool:
    """Whether an imported package belongs neither to the program nor to Python."""
    if "." in top or top in _OF_WORKERS or top in sys.stdlib_module_names:
        return False
    return "-packages" in (getattr(sys.modules.get(top), "__file__", None) or "")


def stands_on_torch(top: str) -> bool:
    """Whether a package is torch, or has been imported and uses torch."""
    torch = sys.modules.get("torch")
    if top == "torch" or torch is None or top not in sys.modules:
        return top == "torch"
    if "-packages" not in (getattr(sys.modules[top], "__file__", None) or ""):
        return False
    return any(
        getattr(module, "__dict__", {}).get("torch") is torch  # not `getattr`, which may import
        for name, module in list(sys.modules.items())
        if name == top or name.startswith(top + ".")
    )


def names_of_star(node: ast.ImportFrom) -> set[str] | None:
    """Return the names that ``from module import *`` binds, or None if they are not known."""
    module = None if node.level else sys.modules.get(node.module or "")
    if module is None:
        return None
    names = vars(module)
    return set(names.get("__all__", (name for name in names if not name.startswith("_"))))


def origins_of(groups: Iterable[list[ast.stmt]]) -> dict[str, str]:
    """Return the full names of the objects that a script imports, by the names that it binds.

    For example ``{"cache": "functools.cache"}``.  Names with several origins are left out.
    """
    found: dict[str, set[str]] = {}
    for group in groups:
        for node in group:
            for name, origin in _origins(node):
                found.setdefault(name, set()).add(origin)
    return {name: origins.pop() for name, origins in found.items() if len(origins) == 1}


def _origins(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement binds, each with the full imported name, or ""."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield alias.asname or top, alias.name if alias.asname else top
    elif isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            for name in names_of_star(node) or () if alias.name == "*" else (alias.name,):
                yield alias.asname or name, f"{module}.{name}"
    else:
        for name in names_of(node).bound:
            yield name, ""


_AS_A_WHOLE = {"globals", "exec", "eval", "__import__"}


def looks_at_itself(tree: ast.Module) -> bool:
    """Whether the script may use names that its text does not show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found = node.id in _AS_A_WHOLE
        elif isinstance(node, ast.Attribute):
            found = node.attr == "__dict__" and _names_a_module(node.value)
        elif isinstance(node, ast.Call):
            own = isinstance(node.func, ast.Name) and node.func.id in ("vars", "locals", "dir")
            found = own and (not node.args or any(map(_names_a_module, node.args)))
        elif isinstance(node, ast.ImportFrom):
            found = any(alias.name == "*" for alias in node.names) and names_of_star(node) is None
        else:
            continue
        if found:
            return True
    return False


def _names_a_module(node: ast.expr) -> bool:
    """Whether an expression may be the script's module, such as ``sys.modules[__name__]``."""
    for part in ast.walk(node):
        name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        if name in ("modules", "__main__", "import_module"):
            return True
    return False


def only_prints(call: ast.Call) -> bool:
    """Whether this is ``print(...)`` to stdout or stderr.  Printing to another file acts."""
    files = [keyword.value for keyword in call.keywords if keyword.arg in ("file", None)]
    ours = (isinstance(file, ast.Attribute) and file.attr in ("stdout", "stderr") for file in files)
    return isinstance(call.func, ast.Name) and call.func.id == "print" and all(ours)


# -- definitions -----------------------------------------------------------------------------------

_INERT = {
    "abc.abstractmethod", "collections.namedtuple",
    "contextlib.asynccontextmanager", "contextlib.contextmanager",
    "dataclasses.dataclass", "dataclasses.field",
    "enum.auto", "enum.unique",
    "functools.cache", "functools.cached_property", "functools.lru_cache", "functools.wraps",
    "functools.singledispatch", "functools.total_ordering",
    "typing.final", "typing.overload", "typing.runtime_checkable",
    "classmethod", "property", "staticmethod",
}  # fmt: skip
"""Full names of functions and classes that only make an object."""

_ACCESSORS = {"setter", "getter", "deleter"}  # of a property of the same class

_METACLASSES = {"builtins", "abc", "enum", "typing"}
"""Modules with metaclasses that only make the class."""

_OF_ENUM = {"__init__", "__new__", "_generate_next_value_"}
"""Methods that the metaclass of an enumeration calls."""


def is_inert(called: ast.expr, origins: Mapping[str, str], bound: set[str]) -> bool:
    """Whether a call of this expression only makes an object.

    Args:
        origins: the result of `origins_of`.
        bound: all names that the script binds.
    """
    if isinstance(called, ast.Call):  # a decorator with arguments
        called = called.func
    if isinstance(called, ast.Name):
        own = "" if called.id in bound else called.id
        return origins.get(called.id, own) in _INERT
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        module = origins.get(called.value.id)
        return f"{module}.{called.attr}" in _INERT
    return False


def is_plain_class(
    node: ast.ClassDef, found: Any, origins: Mapping[str, str], bound: set[str]
) -> bool:
    """Whether a class statement, whose class is ``found`` in the program, only makes the class.

    Its bases list it as a subclass, which is not counted here.
    """
    if not isinstance(found, type) or type(found).__module__ not in _METACLASSES:
        return False
    if any(keyword.arg != "metaclass" for keyword in node.keywords):
        return False
    # `__init_subclass__` of a base runs when the class is made.  That of `object` does nothing.
    if any(
        "__init_subclass__" in vars(base) and base.__module__ not in _METACLASSES
        for base in found.__mro__[1:-1]
    ):
        return False
    methods = {part.name for part in node.body if isinstance(part, _FUNCTIONS)}
    if type(found).__module__ == "enum" and (
        methods & _OF_ENUM or {base.__module__ for base in found.__mro__[1:]} - {"enum", "builtins"}
    ):
        return False
    return all(
        _is_accessor(called, methods) or is_inert(called, origins, bound)
        for called in calls_of(node)
    ) and all(map(_only_binds, node.body))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _only_binds(part: ast.stmt) -> bool:
    if isinstance(part, (ast.Assign, ast.AnnAssign)):
        return all(isinstance(one, ast.Name) for one in targets_of(part))
    return isinstance(part, (*_FUNCTIONS, ast.Pass)) or is_text(part)


def _is_accessor(called: ast.expr, methods: set[str]) -> bool:
    return (
        isinstance(called, ast.Attribute)
        and called.attr in _ACCESSORS
        and isinstance(called.value, ast.Name)
        and called.value.id in methods
    )
