"""Makes functions of the calls for their effect that stand alone at the top of a script.

Imported late, because most scripts have no such call, and `ast` takes long to import.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import ast
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from xpool._pickling.by_value.origin import name_of
from xpool._pickling.by_value.registered_calls import CALL_OF_SCRIPT
from xpool._python.interrupt import pass_on

_future: Any = import_module("__future__")  # an import statement of it is a directive elsewhere
_FUTURE = sum(getattr(_future, name).compiler_flag for name in _future.all_feature_names)


class Call(NamedTuple):
    """A call for its effect, as a function of ``__main__`` that makes this call."""

    package: str
    """The large package whose call this is: a worker makes it after its import; "": now."""

    function: Callable[..., object]
    """Takes the module of the large package, so that to send it does not import it."""

    args: tuple[ModuleType, ...]


@functools.lru_cache(maxsize=2)
def alone(code: CodeType, text: str) -> tuple[tuple[str, ast.stmt], ...]:
    """Return the first name and the tree of each call that stands alone.

    There are none without a guard, or if the text is not that of the code.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has shown them when it compiled the script
        try:
            tree = ast.parse(text, code.co_filename)
            made = _compile(text, code)
            # Before Python 3.12, lines are not part of the comparison.
            if made != code or list(made.co_lines()) != list(code.co_lines()):
                return ()
        except (SyntaxError, ValueError):
            return ()
    if not any(map(_is_guard, _run_with(tree.body))):
        return ()
    return tuple(
        (_names_of(one.value)[0], one)
        for one in tree.body
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)
        if _is_of_a_module(one.value.func) and not _acts_outside(_appending(one.value))
        if not any(isinstance(part, ast.NamedExpr) or _writes(part) for part in ast.walk(one))
    )


def _compile(source: str | ast.Module, like: CodeType) -> CodeType:
    flags = like.co_flags & _FUTURE
    made: CodeType = compile(source, like.co_filename, "exec", flags, dont_inherit=True)
    return made


def _run_with(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and those in them that run when the module runs."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            yield from _run_with(ast.iter_child_nodes(node))


def _is_guard(node: ast.AST) -> bool:
    for test in ast.walk(node.test) if isinstance(node, ast.If) else ():
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
            sides = {ast.unparse(side) for side in (test.left, *test.comparators)}
            if sides >= {"__name__", repr("__main__")}:
                return True
    return False


def _is_of_a_module(function: ast.expr) -> bool:
    """Whether this may be a function of a module, ``a.b.c``, and no method of a call's result."""
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name)


_OUTSIDE = (
    "save", "write", "dump", "to_", "download", "upload", "send", "post", "put", "delete", "remove",
    "show", "run", "main", "Fire", "serve", "start", "set_start_method", "print", "log", "trace",
    "debug", "info", "success", "warn", "error", "critical", "exception", "echo", "confirm",
    "prompt", "display", "inspect", "summary", "wait", "pause", "init_process_group",
    "init_distributed", "init_rpc", "barrier",
)  # fmt: skip
"""The beginnings of names of functions that act on something outside of the process."""

_WRITING = ("write", "save", "dump", "export", "print", "echo", "download")
"""The ends of such names, as of ``imwrite``."""


def _writes(part: ast.AST) -> bool:
    """Whether an argument is ``mode="w"``, which empties a file."""
    return isinstance(part, ast.keyword) and part.arg == "mode" and "'w" in ast.unparse(part)


def _appending(call: ast.Call) -> ast.Call:
    """Let ``logger.add(path, mode="w")`` append: the program itself has emptied the file."""
    if _names_of(call)[-1] == "add":
        for one in call.keywords:
            if one.arg == "mode" and isinstance(one.value, ast.Constant) and one.value.value == "w":
                one.value.value = "a"
    return call


def acts_outside(one: ast.stmt, namespace: dict[str, Any]) -> bool:
    """Whether the function of a call does by its own name: ``from rich import print as say``."""
    call: ast.Call = one.value  # type: ignore[attr-defined]
    first, *rest = _names_of(call)
    try:
        name = functools.reduce(getattr, [*rest, "__name__"], namespace.get(first))
    except Exception as exc:  # a method of an object that is gone, or has no name
        pass_on(exc)
        return False
    return type(name) is str and _acts_outside(call, name)


def _acts_outside(call: ast.Call, name: str = "") -> bool:
    names = _names_of(call)
    name = name or names[-1]
    # ``logger.remove()`` and ``logger.remove(0)`` remove something of the package's own.
    own = all(isinstance(one, ast.Constant) and type(one.value) is int for one in call.args)
    acts = name.startswith(_OUTSIDE) or name.endswith(_WRITING) or "distributed" in names[:-1]
    return acts and not (name == "remove" and own and not call.keywords)


def _names_of(call: ast.Call) -> list[str]:
    """Return the names of a function: of ``a.b.c()`` "a", "b", "c"."""
    return ast.unparse(call.func).split(".")


def call(code: CodeType, namespace: dict[str, Any], one: ast.stmt, packages: Set[str]) -> Call:
    """Return a function that makes a call; ``packages``: the large ones."""
    root = _names_of(one.value)[0]  # type: ignore[attr-defined]
    module: Any = namespace.get(root)
    package = (name_of(module) or "").partition(".")[0]
    if package not in packages:
        package = root = ""
    # `torch.fx.wrap("scale")` names a function in a text.  The names below let it be sent, too.
    texts = [part.value for part in ast.walk(one) if isinstance(part, ast.Constant)]
    words = (text for text in texts if type(text) is str and text.isidentifier())
    named = [word for word in words if type(namespace.get(word)) is FunctionType]
    tree = ast.parse(f"def {CALL_OF_SCRIPT}({root}): lambda: ({', '.join(named)})")
    tree.body[0].body.append(one)  # type: ignore[attr-defined]
    made = next(one for one in _compile(tree, code).co_consts if type(one) is CodeType)
    made = made.replace(co_name="<module>")  # `torch.fx.wrap` asks whether its caller is a top
    function = FunctionType(made, namespace, CALL_OF_SCRIPT)
    return Call(package, function, (module,) if package else ())
