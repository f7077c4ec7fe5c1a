"""Functions without an importable name, here and in another process."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import itertools
import operator
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from receiver import Receiver, again

from xpool._pickling.by_value.reads import is_open
from xpool.errors import TaskNotPicklable
from xpool.pickle import dumps, encode, loads, mark_static_module

# -- functions --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [(), (3,), (-2, 3), (0.5, -0.25), (2**70,), (1e300,)])
def test_a_counter_of_a_function(given: tuple[Any, ...]) -> None:
    """The copy of a function counts on from where the program's `itertools.count` is."""
    numbers = itertools.count(*given)
    next(numbers)
    back = loads(dumps(lambda: next(numbers)))
    assert [back(), back()] == [next(numbers), next(numbers)]


def closure_over(n: int) -> Callable[[int], int]:
    return lambda x, y=2: x * n + y


def fibonacci() -> Callable[[int], int]:
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return fib


def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def wrapper(*args: Any) -> Any:
        return [f(*args)]

    return wrapper


@decorate
def decorated(x: int) -> int:
    return x


def keyword_only(a: int, *, b: int = 3) -> int:
    return a + b


CALLS: dict[str, tuple[Callable[[], Any], tuple[Any, ...], Any]] = {
    "lambda": (lambda: lambda: 5, (), 5),
    "closure with a default": (lambda: closure_over(3), (2,), 8),
    "closures over a loop": (lambda: [closure_over(i) for i in range(4)][3], (1,), 5),
    "recursive": (fibonacci, (10,), 55),
    "decorated": (lambda: decorated, (1,), [1]),
    "wrapped function": (lambda: decorated.__wrapped__, (1,), 1),  # type: ignore[attr-defined]
    "partial": (lambda: functools.partial(closure_over(2), y=1), (4,), 9),
    "keyword only": (lambda: keyword_only, (1,), 4),
    "cached": (lambda: functools.lru_cache(maxsize=9)(closure_over(3)), (1,), 5),
    "itemgetter": (lambda: operator.itemgetter(1), ([1, 2],), 2),
    "attrgetter": (lambda: operator.attrgetter("real"), (3,), 3),
    "builtin": (lambda: len, ([1],), 1),
    "builtin method": (lambda: "a,b".split, (",",), ["a", "b"]),
    "unbound method": (lambda: str.upper, ("a",), "A"),
    "module of its own": (lambda: lambda: sys.modules[operator.__name__].add(1, 2), (), 3),
}


def test_calls_elsewhere(receiver: Receiver) -> None:
    """Each kind of callable works in another process."""
    for name, (make, args, expected) in CALLS.items():
        assert receiver.call(make(), *args) == expected, name


@pytest.mark.parametrize("recurse", [False, True])
def test_recurse(receiver: Receiver, recurse: bool) -> None:
    """recurse=True uses dill, and gives the function its own globals."""
    assert receiver.call(closure_over(3), 2, recurse=recurse) == 8
    assert loads(dumps(fibonacci(), recurse=recurse))(10) == 55


def test_attributes_of_a_function() -> None:
    """Name, defaults, annotations, docstring and attributes are kept."""

    def f(a: int, *, b: str = "x") -> list[int]:
        """Say hello."""
        return [a]

    f.tag = {"k": 1}  # type: ignore[attr-defined]
    g = again(f)
    assert g is not f
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__kwdefaults__", "__dict__"):
        assert getattr(g, name) == getattr(f, name), name
    assert g.__annotations__ == f.__annotations__
    assert g.__globals__ is f.__globals__


def test_shared_references_are_kept() -> None:
    """Two functions still share one variable, and a list stays one list."""

    def make() -> tuple[Any, Any]:
        count = 0

        def bump() -> None:
            nonlocal count
            count += 1

        return bump, lambda: count

    shared = [1]
    (bump, get), one, two = again((make(), shared, shared))
    bump()
    assert get() == 1
    assert one is two


def test_functions_made_by_exec() -> None:
    """Functions made by exec are sent with the globals that they use."""
    space: dict[str, Any] = {"__name__": "nowhere", "factor": 3, "unused": threading.Lock()}
    exec("def f(x): return g(x) + 1\ndef g(x):\n  global n\n  n = 1\n  return factor * x", space)
    f, g = again((space["f"], space["g"]))
    assert f(2) == 7
    assert f.__globals__ is g.__globals__
    assert f.__globals__["n"] == 1


def test_the_name_of_a_module_in_a_function_of_exec() -> None:
    """Without `__name__` in its globals, a function finds that of `builtins`."""
    for given in {}, {"__name__": "box"}, {"__name__": None}:
        space: dict[str, Any] = dict(given)
        exec("def f(): return __name__", space)
        assert again(space["f"])() == space["f"]() == given.get("__name__", "builtins")


class Fallback(dict[str, Any]):
    """Globals that also have the local variables, as those of `IPython.embed`."""

    def __missing__(self, name: str) -> Any:
        return self["local"][name]


def test_globals_that_a_subclass_of_dict_finds() -> None:
    """A function finds the names there, as in the program."""
    local: dict[str, Any] = {"factor": 3}
    space = Fallback(__name__="__main__", local=local, own=1)
    exec("def f(x): return factor * x + own + len([x])", space, local)
    assert local["f"](2) == again(local["f"])(2) == 8


def test_empty_cell() -> None:
    """A variable without a value has none after the trip."""

    def make() -> Callable[[], Any]:
        def f() -> Any:
            return later

        g = again(f)
        later = 1
        assert f() == 1
        return g

    with pytest.raises(NameError):
        make()()


def test_coroutine_and_generator_functions(receiver: Receiver) -> None:
    """Coroutine functions and generator functions can be sent; the objects that they return
    cannot."""

    async def one() -> int:
        return 1

    def count() -> Iterator[int]:
        yield from range(3)

    assert asyncio.run(again(one)()) == 1
    assert receiver.call(lambda f: list(f()), count) == [0, 1, 2]


def test_modules_go_by_name() -> None:
    """A module in a closure is sent by name, without its contents."""
    module = operator
    assert again(lambda: module)() is operator
    assert len(encode(lambda: module)) < 600


def test_static_module() -> None:
    """Functions and classes of a static module go by name, even after a redefinition."""
    module = types.ModuleType("static_for_a_test")
    exec("def f(): return 1\nclass C: pass", vars(module))
    sys.modules[module.__name__] = module
    try:
        old, old_class = module.f, module.C
        exec("def f(): return 2\nclass C: pass", vars(module))
        assert again(old)() == 1
        mark_static_module(module)
        assert again(old) is module.f
        assert again(old_class) is module.C
        assert again(module) is module
    finally:
        del sys.modules[module.__name__]
    with pytest.raises(TypeError, match="takes a module"):
        mark_static_module("operator")  # type: ignore[arg-type]


def test_bound_methods() -> None:
    """Methods of instances and classes can be sent, private ones too."""

    class Local:
        def __init__(self) -> None:
            self.x = 3

        def get(self) -> int:
            return self.x

        def __secret(self) -> int:
            return self.x + 1

        @classmethod
        def make(cls) -> Local:
            return cls()

        def secret(self) -> Any:
            return self.__secret

    one = Local()
    assert again(one.get)() == 3
    assert again(one.secret())() == 4
    assert type(again(Local.make)()) is Local
    method, owner = again((one.get, one))
    assert method.__self__ is owner


class Slotted:
    __slots__ = ("__dict__", "step")

    def forward(self) -> Any:
        return "class"


def test_methods_that_were_assigned_to_their_object() -> None:
    """A function bound to an object, as its attribute, replaces the method of this name there."""

    def forward(self: Any) -> Any:
        return self

    def step(self: Any) -> Any:
        return self

    one: Any = Slotted()
    one.forward, one.step = types.MethodType(forward, one), types.MethodType(step, one)
    for found in (again(one), again([one.step, one])[1], again([one, one.forward])[0]):
        assert found.forward() is found.step() is found


def test_a_module_that_another_process_has_made(receiver: Receiver) -> None:
    """A module without an import is found where it was made; elsewhere, the error names it."""
    module = types.ModuleType("made_for_a_test")
    assert again(module) is module
    with pytest.raises(ModuleNotFoundError, match="'made_there': another process has made it"):
        receiver.call(lambda: types.ModuleType("made_there"))


# -- what cannot travel -------------------------------------------------------------------------


def test_refusals_name_object_and_place() -> None:
    """The error names the object, its place and a remedy."""
    generator = (x for x in ())
    with pytest.raises(TaskNotPicklable, match=r"a generator object .* at \[1\]\['k'\]") as info:
        encode((1, {"k": generator}))
    assert isinstance(info.value.__cause__, TypeError)
    assert "list(generator)" in str(info.value)
    with pytest.raises(TaskNotPicklable, match="variable 'generator'"):
        encode(lambda: generator)
    holder = types.SimpleNamespace(inner=types.SimpleNamespace(lock=threading.Lock()))
    with pytest.raises(TaskNotPicklable, match=r"a lock object .* at inner\.lock"):
        encode(holder)
    with pytest.raises(TaskNotPicklable, match="lock"):
        encode((lambda: 1, threading.Lock()))
    with pytest.raises(TaskNotPicklable, match="a generator"):
        dumps((lambda: 1, generator))


def test_files_are_refused() -> None:
    """An open file is refused, because dill would open it anew in the receiver."""
    with open(__file__) as file, pytest.raises(TaskNotPicklable, match="path"):
        encode((lambda: 1, file))


def _where(error: BaseException) -> str:
    """Return where pickling failed: from a note, or before Python 3.11 from the cause."""
    return "".join([*getattr(error, "__notes__", ()), str(error.__cause__)])


class _Bad:
    """Its __reduce__ raises."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind, self.calls = kind, 0

    def __reduce__(self) -> Any:
        self.calls += 1
        try:
            raise OSError("first")
        except OSError:
            raise self.kind("mine")


@pytest.mark.parametrize("kind", [ValueError, TypeError, AttributeError, pickle.PicklingError])
def test_errors_of_reduce_are_raised_unchanged(kind: type[Exception]) -> None:
    """An exception of __reduce__ is raised unchanged, with the object's place."""
    bad = _Bad(kind)
    outer = types.SimpleNamespace(inner=(1, {"k": bad}))
    with pytest.raises(kind, match="mine") as info:
        encode([outer])
    assert not isinstance(info.value, TaskNotPicklable)
    assert "by _Bad.__reduce__ at [0].inner[1]['k']." in _where(info.value)
    assert repr(info.value.__context__) == "OSError('first')"
    with pytest.raises(kind, match="mine"):
        dumps(lambda: bad)
    if kind is ValueError:
        assert bad.calls == 2, "once for each attempt, and never to find the place"


def test_own_errors_of_state() -> None:
    """An exception of __getstate__ is raised unchanged."""

    class Holder:
        def __getstate__(self) -> bytes:
            return pickle.dumps(threading.Lock())

    with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object") as info:
        encode(Holder())
    assert "Holder.__getstate__." in _where(info.value)


def test_own_errors_in_a_class_by_value() -> None:
    """If pickling an attribute of a local class raises, the exception is raised unchanged."""

    class Local:
        attribute = _Bad(KeyError)

    with pytest.raises(KeyError, match="mine") as info:
        encode(Local)
    assert "_Bad.__reduce__" in _where(info.value)


def test_too_deep() -> None:
    """Too deep nesting is refused with that reason."""
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TaskNotPicklable, match="nested too deeply"):
        encode(nested)
    while nested:
        nested = nested.pop()


def test_only_dill_can(receiver: Receiver) -> None:
    """Objects that only dill can pickle arrive with shared references and large buffers."""
    values: dict[str, Any] = {"a": 1}
    view = values.keys()
    back = receiver.call(lambda keys, values: (list(keys), values), view, values)
    assert back == (["a"], {"a": 1})
    assert isinstance(again(ctypes.c_int(3)), ctypes.c_int)
    buffer = pickle.PickleBuffer(bytearray(100_000))
    keys, other, size = receiver.call(lambda k, d, b: (list(k), d, len(b)), view, values, buffer)
    assert (keys, other, size) == (["a"], {"a": 1}, 100_000)


def test_dill_settings_untouched() -> None:
    """dill's settings stay unchanged."""
    dill = pytest.importorskip("dill")
    before = dict(dill.settings)
    encode({1: 2}.keys())
    assert dict(dill.settings) == before


# -- modules that an import hook has rewritten ------------------------------------------------


def test_assertions_of_local_functions(receiver: Receiver) -> None:
    """An assertion that pytest has rewritten works in a process without pytest's rewriting."""

    def check(x: int) -> int:
        assert x == 1, "not one"
        return x

    class Checker:
        def check(self, x: int) -> int:
            assert x in (1,)
            return x

    assert "@pytest_ar" in check.__code__.co_names, "pytest rewrites this module"
    assert not is_open(check), "its `@py_builtins.locals()` reads no globals"
    assert receiver.call(check, 1) == receiver.call(Checker().check, 1) == 1
    with pytest.raises(AssertionError, match="not one"):
        receiver.call(check, 2)
    with pytest.raises(AssertionError):
        receiver.call(Checker().check, 2)


class _Wrappers:
    """Wrappers of functions, each with an attribute of its own."""

    def __init__(self) -> None:
        self.cached = functools.lru_cache(closure_over(3))
        self.partial = functools.partial(closure_over(2), 1)
        self.dispatched = functools.singledispatch(closure_over(2))
        self.method = functools.partialmethod(closure_over(2), 1)
        self.static = staticmethod(closure_over(2))
        self.bound_to_class = classmethod(closure_over(2))
        for one in vars(self).values():
            one.own = [type(one).__name__]


def test_attributes_of_wrappers(receiver: Receiver) -> None:
    """Attributes that the program has set on a wrapper of a function arrive with it."""
    for name, one in vars(_Wrappers()).items():
        assert again(one).own == [type(one).__name__], name
        assert receiver.call(lambda one: one.own, one) == [type(one).__name__], name


def test_attributes_of_wrappers_are_changed(receiver: Receiver) -> None:
    """They arrive as they are at the time of the call if the wrapper is in a class, too."""
    made = _Wrappers()
    Holder = type("Holder", (), vars(made).copy())
    names = list(vars(made))

    def look(cls: Any) -> list[Any]:
        return [vars(cls)[name].own for name in names]

    assert receiver.call(look, Holder) == look(Holder)
    for one in vars(made).values():
        one.own.append(1)
    assert receiver.call(look, Holder) == look(Holder)


def test_a_cached_function_that_refers_to_itself(receiver: Receiver) -> None:
    """A cached recursive function has its attributes in the other process."""

    @functools.cache
    def fib(n: int) -> int:
        first: int = fib.first  # type: ignore[attr-defined]
        return first if n < 2 else fib(n - 1) + fib(n - 2)

    fib.first = 1  # type: ignore[attr-defined]
    fib.itself = fib  # type: ignore[attr-defined]
    assert receiver.call(fib, 10) == 89
    assert receiver.call(lambda: fib.itself is fib)  # type: ignore[attr-defined]


def test_modules_that_import_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that names many modules, each of which has all others as globals, is pickled."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = [f"in_a_ring_{n}" for n in range(30)]
    for name in names:
        others = ", ".join(one for one in names if one != name)
        (tmp_path / f"{name}.py").write_text(f"import {others}\nRATE = 1\n")
    space: dict[str, Any] = {}
    rates = ", ".join(f"{name}.RATE" for name in names)
    exec(f"import {', '.join(names)}\ndef rates(): return [{rates}]", space)
    program = types.ModuleType("has_a_ring")
    vars(program).update(space, __name__=program.__name__)
    monkeypatch.setitem(sys.modules, program.__name__, program)
    rate = types.FunctionType(space["rates"].__code__, vars(program))
    try:
        assert again(rate)() == [1] * 30
    finally:
        for name in names:
            del sys.modules[name]
