"""Finds what a worker must know about the code of the program's top level, without running it.

Definitions and data travel by value, so nothing of a script runs in a worker.  Four facts are in
its code alone: imports for their effect, calls for their effect, names that the script first binds
to None, and attributes that the program sets on other packages' modules.

The code is that of the running frame, so it is what really runs: of a file, of ``python -m``, ``-``
or ``-c``, under a debugger or `runpy`, and after the file was edited.  Only the calls are found in
the script's text, and only if the text compiles to the same code.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.
# A script with a short task waits for the import of this module, so it has few imports at the top.

import builtins
import dis
import functools
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from importlib import import_module
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from xpool._pickling import reducers
from xpool._pickling.by_value.names import found_by_name
from xpool._pickling.by_value.origin import (
    attributes_of,
    code_of,
    home_of,
    is_program,
    name_of,
    own_modules,
)
from xpool._pickling.by_value.reads import LOADS, absolute_name, functions_in, inner
from xpool._pickling.by_value.registered_calls import look_at_script, register_call
from xpool._python.interrupt import pass_on

if TYPE_CHECKING:
    import ast

    from xpool._pickling.by_value.effect_calls import Call

_Chain = tuple[str, ...]
"""A name and the attributes behind it: ("torch", "backends", "cudnn", "benchmark")."""


class Top(NamedTuple):
    """Facts about the program's top level."""

    imports: tuple[str, ...] = ()
    """Modules that are imported for their effect alone, in the order of the script."""

    calls: tuple["Call", ...] = ()
    """The calls for their effect: those that have ended since the last look are added."""

    nones: frozenset[str] = frozenset()
    """Names that the top level binds to None, also in class bodies ("Config.pool")."""

    assigned: tuple[tuple[str, str], ...] = ()
    """(module, path): what the program's code assigns to modules that are not its own, and to
    classes of these."""


class _Known(NamedTuple):
    namespace: dict[str, Any]
    code: CodeType
    whole: bool = False  # whether the code is the whole program, and not a cell of a notebook
    sizes: tuple[int, int] = (0, 0)  # the sizes of `sys.modules` and of the namespace
    statements: tuple["ast.stmt", ...] = ()  # the calls that stand alone
    ended: int = 0  # how many of these calls have ended
    calls: dict["ast.stmt", "Call | None"] = {}  # None: it acts outside of the process
    others: frozenset[tuple[str, str]] = frozenset()  # attributes that the program's modules assign
    top: Top = Top()


_NONE: CodeType = (lambda: None).__code__
"""Takes the place of the code of a top level that does not run.  A call of `compile` takes long:
the first makes the types of `ast`."""

# Needs no lock: at worst, two threads compute the same.
_last = _Known({}, _NONE)
# By a module, the number of its globals at that time, and what its code assigns.
_of_modules: WeakKeyDictionary[ModuleType, tuple[int, frozenset[_Chain]]] = WeakKeyDictionary()


def top_of_main() -> Top:
    """Return the facts about ``__main__``.  They are empty where its code is not known for sure."""
    try:
        return _top_of_main()
    except Exception as error:  # of strange loaders and modules; such a program has no such facts
        pass_on(error)
        return Top()


def forget() -> None:
    """Let the globals of ``__main__`` go."""
    global _last
    _last = _Known({}, _NONE)


def nones_of(module_name: str) -> frozenset[str]:
    """Return the names that a module of the program binds to None, as in `Top`."""
    try:
        code = code_of(sys.modules[module_name])
        return frozenset() if code is None else _nones(code)
    except Exception as error:  # as above, or its file is gone
        pass_on(error)
        return frozenset()


def assigned_in(codes: Iterable[CodeType], namespace: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the places, as (module, path), to which these codes, or code in them, assign.

    ``namespace`` has the globals of the codes.  The places are attributes of modules and of their
    classes.  Modules of the program are left out.
    """
    return _resolved(_chains(codes, _others(namespace)), namespace)


# -- the running top level -------------------------------------------------------------------------


def _top_of_main() -> Top:
    global _last
    last, namespace = _last, vars(sys.modules["__main__"])
    frame = _frame_of(namespace)
    if frame is None and last.whole and last.namespace is namespace:
        return last.top  # the top level has ended: threads and exit functions go on
    code, line = (_NONE, 0) if frame is None else (frame.f_code, frame.f_lineno or 0)
    sizes = len(sys.modules), len(namespace)
    if last.namespace is not namespace or last.code is not code:
        last = _Known(namespace, code)
    elif last.sizes == sizes and last.ended == _ended(last.statements, line):
        return last.top
    whole = frame is not None and _is_whole(code, namespace)
    others = last.others
    if last.sizes[0] != sizes[0]:
        others = frozenset(_assigned_by_modules())
    imports: tuple[str, ...] = ()
    statements: tuple[ast.stmt, ...] = ()
    codes = [code]
    if whole:
        imports = tuple(dict.fromkeys(_imports(code, namespace)))
        statements = _statements(code, namespace)
    else:
        codes += _functions(namespace)  # of earlier cells
    assigned = others | assigned_in(codes, namespace)
    ended, calls = _ended(statements, line), {**last.calls}
    for one in statements[:ended]:
        if one not in calls:
            effect = _effect_calls()
            outside = effect.acts_outside(one, namespace)
            calls[one] = None if outside else effect.call(code, namespace, one, _WITHOUT_EFFECT)
    top = Top(imports, tuple(filter(None, calls.values())), _nones(code), tuple(sorted(assigned)))
    _last = _Known(namespace, code, whole, sizes, statements, ended, calls, others, top)
    return top


def _ended(statements: tuple["ast.stmt", ...], line: int) -> int:
    """Return how many of the statements have ended when the one in this line runs."""
    return sum((one.end_lineno or 0) < line for one in statements)


def _frame_of(namespace: dict[str, Any]) -> FrameType | None:
    """Return the outermost frame of a module with these globals, of the main thread if it has one.

    Some runners run a script in a thread.
    """
    frames = sys._current_frames()
    file = namespace.get("__file__")
    frame = outermost = of_file = None
    try:
        first = threading.main_thread().ident
        for ident in sorted(frames, key=lambda ident: ident != first):
            frame, outermost, of_file = frames[ident], None, None
            while frame is not None:
                if frame.f_globals is namespace and frame.f_code.co_name == "<module>":
                    outermost = frame
                    if frame.f_code.co_filename == file:
                        of_file = frame
                frame = frame.f_back
            # With `pdb`, there are two such frames: the module of `pdb`, and the script, which runs
            # in the same namespace.
            if outermost is not None:
                return of_file or outermost
        return None
    finally:
        # The frames include this function's own.  A cycle would keep the variables of all threads.
        frames.clear()
        del frame, outermost, of_file


def _is_whole(code: CodeType, namespace: dict[str, Any]) -> bool:
    interactive = hasattr(sys, "ps1") or "__IPYTHON__" in vars(builtins)
    return not interactive or code.co_filename == namespace.get("__file__")


# -- code ------------------------------------------------------------------------------------------

_NOISE = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME"})
_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_COPIES = frozenset({"COPY", "DUP_TOP"})
_SWAPS = frozenset({"SWAP", "ROT_TWO"})
_COMMON = "LOAD_COMMON_CONSTANT"
_OPTIMIZED = 0x1  # co_flags of functions, and not of the bodies of modules and classes


@functools.lru_cache(maxsize=8)
def _steps(code: CodeType) -> tuple[list[str], list[Any]]:
    """Return the names and arguments of instructions, except those in `_NOISE`.

    Two lists, because pairs would count towards the program's next garbage collection.
    """
    names, values = list[str](), list[Any]()
    for one in dis.get_instructions(code):
        kind, value = one.opname, one.argval
        if kind == _COMMON and one.argrepr == "None":
            kind, value = "LOAD_CONST", None
        elif kind == "LOAD_SMALL_INT":  # since Python 3.14
            kind = "LOAD_CONST"
        if kind not in _NOISE:
            names.append(kind)
            values.append(value)
    return names, values


# -- imports for their effect ----------------------------------------------------------------------


_WITHOUT_EFFECT = frozenset({"xpool", "numpy", "pandas", "torch"})
"""Packages that take long to import, and register nothing elsewhere."""


def _imports(code: CodeType, namespace: dict[str, Any]) -> Iterator[str]:
    used = set(namespace.get("__all__", ()))
    deleted = {name for kind, name in zip(*_steps(code)) if kind == "DELETE_NAME"}
    for level, name, inside, bound in _unused(code):
        # A name without a value: the import did not run, as under `TYPE_CHECKING`.
        if not used.isdisjoint(bound) or (namespace.keys() | deleted).isdisjoint(bound):
            continue
        name = absolute_name(level, name, namespace.get("__package__"))
        top = name.partition(".")[0]
        if top in _WITHOUT_EFFECT or top in sys.stdlib_module_names:
            continue
        if name in sys.modules:
            modules = [one for part in inside if (one := f"{name}.{part}") in sys.modules]
            yield from modules or [name]


@functools.lru_cache(maxsize=8)
def _unused(code: CodeType) -> tuple[tuple[int, str, _Chain, _Chain], ...]:
    """Return the imports at the module level whose names no code loads.

    Each is the number of dots, the module, the names in it, and the names that it binds.
    """
    found = list[tuple[int, str, _Chain, _Chain]]()
    names, values = _steps(code)
    for n, kind in enumerate(names):
        if kind == "IMPORT_NAME":
            name, inside = values[n], values[n - 1] or ()
            if inside != ("*",):
                rest = zip(names[n:], values[n:])
                stores = (value for step, value in rest if step in _STORES)
                bound = tuple(value for value, _ in zip(stores, inside or (name,)))
                found.append((values[n - 2], name, inside, bound))
    wanted = {name for *_, bound in found for name in bound}
    loaded, attributes = set[str](), set[str]()
    for one in inner(code):
        # The names of attributes are among these, too.
        attributes.update(one.co_names)
        if not wanted.isdisjoint(one.co_names):
            loaded.update(
                name for kind, name in zip(*_steps(one)) if kind in LOADS and name in wanted
            )
            wanted -= loaded
    unused = []
    for one_import in found:
        _, name, inside, bound = one_import
        root, _, last = name.rpartition(".")
        # `import a.b` binds `a`, which has other uses: it has none itself if no code says `b`.
        of_root = root != "" and not inside and bound == (name.partition(".")[0],)
        if loaded.isdisjoint(bound) or (of_root and last not in attributes):
            unused.append(one_import)
    return tuple(unused)


# -- calls for their effect ------------------------------------------------------------------------

_CALL = re.compile(r"(?:^|;)[ \t]*(\w+)[\w. \t]*\(", re.MULTILINE)


def _statements(code: CodeType, namespace: dict[str, Any]) -> tuple["ast.stmt", ...]:
    """Return the calls of installed packages that stand alone at the top of a guarded script."""
    if "__name__" not in code.co_names or "__main__" not in code.co_consts:
        return ()
    text = "".join(linecache.getlines(code.co_filename, namespace))
    names = namespace.keys() & _CALL.findall(text)  # without builtins
    roots = {name for name in names if _is_installed(name, namespace[name])}
    # Most scripts have no such call, and are not parsed.
    if not roots:
        return ()
    return tuple(one for root, one in _effect_calls().alone(code, text) if root in roots)


def _effect_calls() -> Any:  # imported late, because few scripts need it, and it imports `ast`
    return import_module("xpool._pickling.by_value.effect_calls")


def _is_installed(root: str, value: Any) -> bool:
    """Whether a value is a module of an installed package, or a function, class or object of one.

    ``root``: the value's name in the script; an object (`loguru.logger`) has the same name in its
    package.
    """
    name = name_of(value)
    if name is None and issubclass(type(value), (FunctionType, BuiltinFunctionType, type)):
        name = value.__module__
    elif name is None:
        home = home_of(("__main__", root), value)
        name = None if home is None else home[0]
    if type(name) is not str:
        return False
    top = name.partition(".")[0]
    named = top in _TRACKERS or top == "xpool" or top in sys.stdlib_module_names
    return not named and not is_program(name)


_TRACKERS = frozenset(
    {"aim", "clearml", "comet_ml", "debugpy", "horovod", "mlflow"}
    | {"mpi4py", "neptune", "ray", "swanlab", "wandb"}
)
"""Packages whose calls begin a run on a server (`wandb.init()`), listen, or join processes."""


# -- names that begin as None ----------------------------------------------------------------------


def _nones(code: CodeType, prefix: str = "") -> frozenset[str]:
    found = set[str]()
    stack: list[Any] = []  # the part of its stack that is known
    for kind, value in zip(*_steps(code)):
        if kind == "LOAD_CONST":
            stack.append(value)
        elif kind in _STORES and stack:
            if stack.pop() is None:
                found.add(prefix + value)
        elif kind in _COPIES and stack and value in (1, None):  # a = b = None
            stack.append(stack[-1])
        elif kind == "UNPACK_SEQUENCE" and stack and type(stack[-1]) is tuple:
            stack.extend(reversed(stack.pop()))
        elif kind in _SWAPS and len(stack) >= (depth := value or 2):  # a, b = None, 1
            stack[-1], stack[-depth] = stack[-depth], stack[-1]
        else:
            stack.clear()
    for one in code.co_consts:
        if type(one) is CodeType:
            if not one.co_flags & _OPTIMIZED:
                found |= _nones(one, f"{prefix}{one.co_name}.")
            elif one.co_name.startswith("<generic parameters of"):  # around ``class A[T]``
                found |= _nones(one, prefix)
    return frozenset(found)


# -- attributes of other packages' modules and classes ---------------------------------------------


@functools.cache
def _assignment() -> re.Pattern[bytes]:
    """Return a pattern of the instructions of ``X.attr = value``, each as one byte."""

    def any_of(names: Iterable[str]) -> bytes:
        numbers = [dis.opmap.get(name, 256) for name in names]
        # From 256 on, they are the compiler's own.
        kinds = [re.escape(bytes([number])) for number in numbers if number < 256]
        return b"(?:" + b"|".join(kinds) + b")"

    noise = any_of(_NOISE)
    loads, attributes, copies = any_of(LOADS), any_of(_ATTRIBUTES), any_of(_COPIES)
    ends = any_of(["STORE_ATTR"]) + b"|" + copies + noise + b"*" + attributes
    parts = b"(?:" + attributes + noise + b"*)*"
    return re.compile(loads + noise + b"*" + parts + b"(?:" + ends + b")", re.DOTALL)


_STORE_ATTR = dis.opmap["STORE_ATTR"]
# Of the text of a module, for a first look: to load the code of each would take much longer.
_ASSIGNS_IN_TEXT = (
    rb"\n[ \t]*(?!self\.|cls\.)(\w+(?:\.\w+)+)[ \t]*(?:\*\*|//|<<|>>|[-+*/%&|^@])?=(?!=)"
)
_SETS_IN_TEXT = rb"setattr\(\s*([\w.]+)\s*,\s*[\"'](\w+)"
_NOT_SENT = frozenset({"sys", "xpool"})
"""A worker has its own ``sys``."""

_SETTINGS = frozenset({("os", "environ"), ("os", "environb"), ("warnings", "filters")})
"""Attributes that travel as settings."""


def _chains(codes: Iterable[CodeType], roots: Set[str]) -> set[_Chain]:
    """Return the attributes of these globals to which code objects, or those in them, assign."""
    found = set[_Chain]()
    for code in codes:
        for one in inner(code):
            # Few functions assign to a global's attribute, and `dis` is slow.
            if roots.isdisjoint(one.co_names):
                continue
            body = one.co_code
            assigns = _STORE_ATTR in body and _assignment().search(body[::2]) is not None
            if assigns or "setattr" in one.co_names:
                found.update(chain for chain in _chains_in(one) if chain[0] in roots)
    return found


@functools.lru_cache(maxsize=1024)
def _chains_in(code: CodeType) -> frozenset[_Chain]:
    found = set[_Chain]()
    chain: _Chain = ()
    before = ""
    for kind, value in zip(*_steps(code)):
        if kind in LOADS:
            before = "setattr" if chain == ("setattr",) else ""
            chain = (value,)
        elif chain and kind in _ATTRIBUTES:
            if before == "copy":  # X.attr += value
                found.add((*chain, value))
            chain += (value,)
        elif chain and kind in _COPIES:
            before = "copy"
        else:
            sets = kind == "LOAD_CONST" and before == "setattr" and type(value) is str
            if chain and (sets or kind == "STORE_ATTR"):
                found.add((*chain, value))
            chain, before = (), ""
    return frozenset(found)


def _others(namespace: dict[str, Any]) -> set[str]:
    return {
        name
        for name, value in list(namespace.items())
        if (module := _module_of(value)) is not None and not is_program(module)
    }


def _module_of(value: Any) -> str | None:
    """Return the name of a module, or of the module of a class."""
    if not issubclass(type(value), type):
        return name_of(value)
    module: Any = value.__module__
    return module if type(module) is str and module != "builtins" else None


def _resolved(chains: Iterable[_Chain], namespace: dict[str, Any]) -> set[tuple[str, str]]:
    found = set[tuple[str, str]]()
    for root, *parts, attribute in chains:
        value = namespace.get(root)
        for part in parts:
            # `getattr` could import a submodule.
            above = name_of(value)
            known = {} if above is None else attributes_of(value)
            # A module of a class of its own may have its submodules elsewhere.
            value = known[part] if part in known else sys.modules.get(f"{above}.{part}")
        name = _module_of(value)
        if name is None or name.partition(".")[0] in _NOT_SENT:
            continue
        if sys.modules.get(name) is value:
            found.add((name, attribute))
        elif not isinstance(value, type) or name not in sys.modules or is_program(name):
            continue
        elif found_by_name(value):
            found.add((name, f"{value.__qualname__}.{attribute}"))
    return found - _SETTINGS


def _assigned_by_modules() -> set[tuple[str, str]]:
    found = set[tuple[str, str]]()
    for _, module in own_modules():
        namespace = attributes_of(module)
        size, chains = _of_modules.get(module, (-1, frozenset()))
        if size != len(namespace):
            chains = _chains_of(module, namespace)
            _of_modules[module] = len(namespace), chains
        found |= _resolved(chains, namespace)
    return found


def _chains_of(module: ModuleType, namespace: dict[str, Any]) -> frozenset[_Chain]:
    others = _others(namespace)
    if not others:
        return frozenset()
    found = _chains(_functions(namespace), others)
    try:
        spec: Any = namespace.get("__spec__")
        if spec.origin.endswith(".py"):
            text = spec.loader.get_data(spec.origin)
            said = [one.split(b".") for one in re.findall(_ASSIGNS_IN_TEXT, text)]
            said += [[*one.split(b"."), last] for one, last in re.findall(_SETS_IN_TEXT, text)]
            chains = {tuple(map(bytes.decode, one)) for one in said}
            if all(one in found or one[0] not in others for one in chains):
                return frozenset(found)
        code = code_of(module)
    except Exception as error:  # the file is gone, is wrong by now, or its loader is a strange one
        pass_on(error)
        return frozenset(found)
    return frozenset(found if code is None else found | _chains([code], others))


def _functions(namespace: dict[str, Any]) -> Iterator[CodeType]:
    """Yield the code of the functions and methods that have these globals."""
    parts = list(namespace.values())
    for value in list(parts):
        if issubclass(type(value), type) and value.__module__ == namespace.get("__name__"):
            parts += vars(value).values()
    seen = set[int]()
    for part in parts:
        for function in functions_in(part):
            while type(function) is FunctionType and id(function) not in seen:
                seen.add(id(function))
                if function.__globals__ is namespace:
                    yield function.__code__
                function = vars(function).get("__wrapped__")


# -- calls for their effect, in the program and in every worker ------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


def everywhere(func: F, /, *args: Any, **kwds: Any) -> F:
    """Call a function now, and in every worker before its first task.

    Use it for calls whose effect a task needs: to register a format, a plug-in or an environment,
    or to configure a package.  Nothing of a script runs in a worker, so a worker would not have it.

        >>> import mimetypes, xpool
        >>> xpool.everywhere(mimetypes.add_type, "text/x-log", ".log")
        <function add_type at 0x...>

    It is also a decorator of a function without parameters: ``@xpool.everywhere``.

    Args:
        func: the function.  It and its arguments are pickled as those of a task.  Its result is not
            used.
        args, kwds: its arguments.

    Returns:
        ``func``, so that a decorated function keeps its name.

    Raises:
        TypeError: ``func`` is not callable.
        Exception: what ``func`` raises here; workers then do not call it.  If it raises in a
            worker, the task that came with it fails with that exception.
    """
    if not callable(func):
        raise TypeError(f"everywhere takes a function and its arguments, not {func!r}")
    func(*args, **kwds)
    look_at_script(top_of_main().calls)  # calls that the script has made before this one
    reducers.everyone.add(register_call(func, args, kwds))
    return func
