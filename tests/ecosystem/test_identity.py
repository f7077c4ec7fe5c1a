"""The identity of a function in a journal: all that its results depend on, and nothing else."""

import builtins
import contextlib
import functools
import json
import sys
import textwrap
import types
from importlib.util import spec_from_file_location
from typing import Any

import pytest
from support.programs import PROGRAM

from xpool._pools.identity import Identity
from xpool._pools.values import Unknown, name_of
from xpool.pickle import dumps

NAME = "program_of_test_identity"

pytestmark = pytest.mark.pure


@contextlib.contextmanager
def program_of(source):
    """Run a program as a module."""
    module = sys.modules[NAME] = types.ModuleType(NAME)
    del module.__spec__  # Python 3.15 warns if a spec has no loader
    try:
        exec(compile(textwrap.dedent(source), f"{NAME}.py", "exec"), vars(module))
        yield module
    finally:
        del sys.modules[NAME]


def parts_of(source, name="f"):
    """Return the parts of one of a program's functions."""
    with program_of(source) as module:
        return Identity().of_function(eval(name, vars(module)), {})


def forget(name):
    """Let a package be imported again."""
    for one in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[one]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of modules that may be edited."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def changes(before, now):
    """Return the names of the parts that differ."""
    names = before.keys() | now.keys()
    return {name.replace(f"{NAME}.", "").replace(f" of {NAME}", "") for name in names
            if before.get(name) != now.get(name)}  # fmt: skip


EDITS = [
    ("return x + K", "return x + K + 1", "the code of helper"),
    ("K = 2", "K = 3", "the global K"),
    ("(1.5, None)", "(1.5, 0)", "the global TABLE"),
    ('"r"', '"s"', "the global TABLE"),
    ("scale=1", "scale=2", "the defaults of helper"),
    ("RED = 1", "RED = 2", "Color.RED"),
    ("rate: float = 0.5", "rate: float = 0.75", "the defaults of Config.__init__"),
    ("return x * self.rate", "return x / self.rate", "the code of Config.apply"),
    ("return 1\n", "return 2\n", "the code of Box.open"),
    ("factor = 3", "factor = 4", "Base.factor"),
    ("return 2", "return 3", "the code of Base.twice in Base"),
    ("return super().go(x)", "return 0", "the code of Model.go"),
    ("Config(0.25)", "Config(0.5)", "the global CONFIG"),
    ("Model([1, 2, 3])", "Model([1, 2, 4])", "the global MODEL"),
    ("return x - 1\n", "return x - 3\n", "the code of cached in the global cached"),
    ("return func(*args)", "return -func(*args)", "the code of decorated"),
    ("return x + 10", "return x + 11", "the variable func of decorated"),
    ("adder(5)", "adder(6)", "the global plus"),
    ("lambda x: x - 2", "lambda x: x - 3", "the code of <lambda> in the global minus"),
    ("scale=4", "scale=5", "the global partial"),
    ("x / by", "x // by", "the code of <lambda> in the global half"),
    ("by=2)\n", "by=3)\n", "the global half"),
    ("offset=7", "offset=8", "the defaults of f"),
    ("ValueError", "KeyError", "the code of f"),
    ("value = 1", "value = 2", "the code of f"),
    ("[half(y)", "[-half(y)", "the code of f"),
]


@pytest.mark.parametrize(("old", "new", "part"), EDITS, ids=[edit[2] for edit in EDITS])
def test_changed_parts_are_named(old, new, part):
    """Each value, function and class that a function uses is a named part."""
    assert PROGRAM.count(old) == 1, old
    found = changes(parts_of(PROGRAM), parts_of(PROGRAM.replace(old, new)))
    assert part in found
    # A changed class may also change its attributes and instances.
    assert len(found) <= 4, found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def helper", "# a comment\n\n\ndef helper"),
        ("K = 2", "K = 2\nunused = 3"),
        ("def f(x", "def other(x):\n    return K * 5\n\ndef f(x"),
        ("class Local", "\n\n\n    class Local"),
        ('{"p", "q", "r"}', '{"r", "q", "p"}'),
        ("import random", "import time"),
    ],
)
def test_irrelevant_changes(old, new):
    """Moving a function, or changing other code, does not change its parts."""
    assert PROGRAM.count(old) == 1, old
    assert changes(parts_of(PROGRAM), parts_of(PROGRAM.replace(old, new))) == set()


def differ(one, other, name="f"):
    """Return whether the functions of two programs have different parts."""
    return bool(changes(parts_of(one, name), parts_of(other, name)))


def test_bound_methods_and_callable_instances():
    """A bound method's object and a callable's attributes are parts."""
    program = """
        class Scaled:
            def __init__(self, by):
                self.by = by
                setattr(self, "\\udc80", 1)
            def __call__(self, x): return x * self.by
            def run(self, x): return x + self.by
            @classmethod
            def make(cls, x): return cls(x)
        one = Scaled({})
    """
    for name in ("one", "one.run", "one.__call__", "Scaled({}).run"):
        found = changes(
            parts_of(program.format(1), name.format(1)), parts_of(program.format(2), name.format(2))
        )
        assert found == {"the attribute by of the Scaled"}, name
    assert differ(program, program.replace("x + self.by", "x - self.by"), "one.run")
    assert differ(program, program.replace("cls(x)", "cls(-x)"), "Scaled.make")


def test_a_partial_and_a_wrapper():
    """A partial's arguments are a part. A wrapper's cache is not."""
    program = "import functools\ndef f(x, y): return x * y\np = functools.partial(f, y={})\n"
    assert changes(parts_of(program.format(1), "p"), parts_of(program.format(2), "p")) == {
        "the arguments of the partial"
    }
    assert changes(
        parts_of(program.format(1), "functools.partial(p, 2)"),
        parts_of(program.format(2), "functools.partial(p, 2)"),
    ) == {"the arguments of the partial"}
    cached = "import functools\n@functools.lru_cache\ndef f(x): return x + {}\nf({})\n"
    assert not differ(cached.format(1, 1), cached.format(1, 2))
    assert differ(cached.format(1, 1), cached.format(2, 1))
    context = "import contextlib\n@contextlib.contextmanager\ndef f(): yield {}\n"
    assert differ(context.format(1), context.format(2))


def test_modules_of_the_program(folder):
    """If a function uses a module's attribute, only this attribute is a part. If the function
    imports the module, all of it is a part."""
    package = folder / "identity_package"
    package.mkdir()
    text = "from . import other\nK = {}\ndef g(x): return x * K + other.h(x)\nUNUSED = {}\n"
    module, other = package / "module.py", package / "other.py"
    (package / "__init__.py").write_text("")
    above = "import identity_package.module\ndef f(x): return identity_package.module.g(x)\n"
    inside = "def f(x):\n  from identity_package.module import g\n  return g(x)\n"

    def found(program, k=1, unused=1, h="x"):
        module.write_text(text.format(k, unused))
        other.write_text(f"def h(x): return {h}\n")
        forget("identity_package")
        return parts_of(program)

    first = found(above)
    assert changes(first, found(above, k=2)) == {"the global K of identity_package.module"}
    assert changes(first, found(above, h="-x")) == {"the code of identity_package.other.h"}
    assert not changes(first, found(above, unused=2))
    first = found(inside)
    assert "identity_package.module" not in sys.modules
    assert changes(first, found(inside, k=2)) == {"the module identity_package.module"}
    assert changes(first, found(inside, h="-x")) == {"the module identity_package.other"}
    # Behind 256 constants, an instruction has a prefix.
    far = inside.replace("\n", "\n  y = [" + ", ".join(f"x + {n}.5" for n in range(300)) + "]\n", 1)
    before = found(far)
    assert changes(before, found(far, k=2)) == {"the module identity_package.module"}
    # An earlier import makes no difference.
    module.write_text(text.format(1, 1))
    other.write_text("def h(x): return x\n")
    __import__("identity_package.module")
    assert not changes(first, parts_of(inside))
    forget("identity_package")


def test_a_module_that_a_finder_of_the_program_finds(folder, monkeypatch):
    """A module outside `sys.path`, as of a package in editable mode, is a part."""
    file = folder / "edited.py"

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return spec_from_file_location(name, file) if name == "edited_package" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    program = "def f(x):\n  import edited_package\n  return edited_package.K * x\n"
    file.write_text("K = 1\n")
    first = parts_of(program)
    file.write_text("K = 2\n")
    assert changes(first, parts_of(program)) == {"the module edited_package"}


def test_names_that_are_imported_from_a_module(folder):
    """``from a import b`` does not lead to another module that is called `b`. The function
    `__getattr__` of a module that code uses is a part."""
    (folder / "imported_from.py").write_text("def imported_name(x): return x\n")
    (folder / "imported_name.py").write_text("K = 1\n")
    parts = parts_of("def f(x):\n  from imported_from import imported_name\n  return x\n")
    assert [name for name in parts if "module" in name] == ["the module imported_from"]
    program = """
        import sys, types
        made = sys.modules["made_by_hand"] = types.ModuleType("made_by_hand")
        made.__getattr__ = lambda name: 1
        def f(x): return made.RATE * x
    """
    edited = program.replace("name: 1", "name: 2")
    found = changes(parts_of(program), parts_of(edited))
    del sys.modules["made_by_hand"]
    assert "the global __getattr__ of made_by_hand" in found


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("def f(x): return scaled(m, x)", "f"),
        ("def f(x, by=m): return scaled(by, x)", "f"),
        ("def f(x): return getattr(m, 'RATE') * x", "f"),
        ("def f(x):\n  held = m\n  return held.RATE * x", "f"),
        ("def f(x): return scaled(LIST[0], x)\nLIST = [m]", "f"),
        ("def f(x): return scaled(Held.m, x)\nclass Held:\n  m = m\n  def go(self): pass", "f"),
        ("def f(x): return scaled(package.settings, x)\nimport held_package as package", "f"),
        ("def f(x): return scaled(package, x)\nimport held_package as package", "f"),
        ("def make(by):\n  return lambda x: by.RATE * x", "make(m)"),
        ("def f(by, x): return by.RATE * x\nimport functools", "functools.partial(f, m)"),
        ("class Model:\n  def __init__(self): self.m = m\n  def run(self, x): return x",
         "Model().run"),
    ],
)  # fmt: skip
def test_a_module_as_a_value(folder, code, name):
    """If a module of the program is a value, all of it is a part. An installed one is not."""
    (folder / "held_package").mkdir()
    (folder / "held_package" / "__init__.py").write_text("")
    program = "{}\ndef scaled(by, x): return by.RATE * x\n" + code

    def found(rate, first="import held_package.settings as m"):
        (folder / "held_package" / "settings.py").write_text(f"RATE = {rate}\n")
        forget("held_package")
        return parts_of(program.format(first), name)

    part = "the module held_package.settings"
    assert not changes(found(2), found("2 # a comment"))
    assert part in changes(found(2), found(3))
    # A module that the name does not lead to counts by its values.
    made = "import types\nm = types.ModuleType('held_package_made')\nm.RATE = {}"
    if "package" not in code:
        assert changes(found(2, made.format(2)), found(2, made.format(3)))
    if "held_package" not in code:
        assert part not in found(2, "import json as m")


def test_versions_of_packages(monkeypatch):
    """The version of a package that a function uses is a part. Python's version is not."""
    program = "import pytest\nimport json\ndef f(x): return pytest.approx(json.dumps(x))\n"
    before = parts_of(program)
    assert before["the version of pytest"] == pytest.__version__
    monkeypatch.setattr(pytest, "__version__", "1.0")
    assert changes(before, parts_of(program)) == {"the version of pytest"}
    assert "the version of json" not in before


def test_arrays_and_models():
    """Arrays, tensors and modules of torch are compared by their elements."""
    pytest.importorskip("numpy")
    program = "import numpy as np\nA = np.arange(100_000)\nA[{}] = -1\ndef f(x): return A[x]\n"
    assert not differ(program.format(5), program.format(5))
    assert changes(parts_of(program.format(5)), parts_of(program.format(6))) == {"the global A"}
    pytest.importorskip("torch")
    program = """
        import torch
        torch.manual_seed(0)
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(3, 4)
            def forward(self, x): return self.layer(x){}
        MODEL = Net()
        MODEL.layer.weight.data[0, 0] = {}
        def f(x): return MODEL(x)
    """
    assert not differ(program.format("", 1), program.format("", 1))
    assert changes(parts_of(program.format("", 1)), parts_of(program.format("", 2))) == {
        "the global MODEL"
    }
    assert differ(program.format("", 1), program.format(" + 1", 1))
    assert differ(program.format("", 1), program.format("", 2), "MODEL")


@pytest.mark.parametrize(
    "made",
    [
        "np.arange(3).view(Own)",
        "np.array([None, 1]).view(Own)",
        "torch.ones(3)",
        "torch.nn.Parameter(torch.ones(3))",
        "torch.eye(2).to_sparse()",
        "torch.ones(3).as_subclass(OwnTensor)",
    ],
)
def test_attributes_of_arrays(made):
    """Attributes of arrays and tensors are compared like all values: a set has no order, and a
    function counts by its parts."""
    pytest.importorskip("torch" if "torch" in made else "numpy")
    program = f"""
        import numpy as np
        {"import torch" if "torch" in made else ""}
        class Own(np.ndarray): pass
        {"class OwnTensor(torch.Tensor): pass" if "torch" in made else ""}
        def scale(x): return x * 2
        A = {made}
        A.tags, A.scale = {{0, 8}}, scale
        def f(x): return A
    """
    first = parts_of(program)
    assert not changes(first, parts_of(program.replace("{0, 8}", "{8, 0}")))
    assert changes(first, parts_of(program.replace("{0, 8}", "{8, 1}"))) == {"the global A"}
    edited = parts_of(program.replace("x * 2", "x * 3"))
    assert changes(first, edited) == {"the code of scale"}
    edited = parts_of(program.replace("A.tags, A.scale = {0, 8}, scale", ""))
    assert "the global A" in changes(first, edited)


def test_arrays_do_not_depend_on_earlier_ones():
    """An array has the same digest before and after the process has pickled others of its dtype.
    Its place in memory does not matter, its dtype and shape do."""
    np = pytest.importorskip("numpy")
    kind = np.dtype(">i8")
    first = Identity().of_item(np.zeros(3, kind))
    for _ in range(2):
        dumps(np.zeros(3, kind))
    assert Identity().of_item(np.zeros(3, kind)) == first
    array = np.arange(6).reshape(2, 3)
    digest = Identity().of_item(array)
    assert Identity().of_item(np.asfortranarray(array)) == digest
    unlike = [array.T, array.astype("i2"), array.astype(kind), array.ravel(), array[:0], array[0]]
    assert len({Identity().of_item(one)[0] for one in [array, *unlike]}) == 7


def test_registered_classes():
    """Classes registered with an abstract class are a part: `isinstance` depends on them."""
    program = """
        import abc
        class Shape(abc.ABC):
            def name(self): return 'shape'
        class Round:
            def area(self): return 3
        {}
        def f(x): return isinstance(Round(), Shape)
    """
    before, now = program.format(""), program.format("Shape.register(Round)")
    assert changes(parts_of(before), parts_of(now)) == {"what is registered with Shape"}


def test_globals_that_differ_in_kind():
    """Values that are equal or look alike, but differ in type or order, have different parts."""
    texts = ["1", "True", "1.0", "'1'", "b'1'", "None", "[1]", "(1,)", "{1}", "frozenset({1})"]
    texts += ["{1: 2}", "{2: 1}", "[[1], 2]", "[1, [2]]", "[[1, 2]]", "bytearray(b'1')", "0.0"]
    texts += ["-0.0", "'\\ud800'", "range(1)", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}", "..."]
    texts += ["int", "float", "len", "str.upper", "'a'.upper", "'b'.upper", "10 ** 5000"]
    texts += ["__import__('re').compile('a')", "__import__('re').compile('b')", "lambda: 1"]
    found = [parts_of(f"X = {text}\ndef f(): return X\n") for text in texts]
    unlike = {json.dumps(parts, sort_keys=True) for parts in found}
    assert len(unlike) == len(texts)


ALIKE: dict[str, Any] = {
    "what pickling an object, or combining flags, stores in a class is no part": (
        """
        import enum, pickle
        class Box: pass
        class Slots: __slots__ = ("x",)
        class Access(enum.Flag): READ, WRITE = 1, 2
        def f(x): return Box(), Slots(), Access.READ
        """,
        ("", "pickle.dumps([Box(), Slots(), Access.READ | Access.WRITE])"),
        ("1, 2", "1, 4"),
    ),
    "cycles, and objects referred to many times": (
        """
        X = [1]
        X.append({"self": X})
        deep = ()
        for _ in range(200): deep = (deep, deep)
        class Node: pass
        a, b = Node(), Node()
        a.next, b.next = b, a
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def f(): return X, deep, a, even
        """,
        ("", ""),
        ("[1]", "[2]"),
        ("n != 0", "n > 0"),
    ),
    "locks, thread-local values, weak references and caches are no parts": (
        """
        import threading, weakref, functools
        LOCK, LOCAL = threading.Lock(), threading.local()
        CONDITION, WEAK = threading.Condition(), weakref.WeakValueDictionary()
        @functools.singledispatch
        def show(x): return str(x)
        @show.register
        def _(x: int): return "int"
        def f(x):
            with LOCK, CONDITION: return show(x), LOCAL.x, WEAK
        """,
        ("", "LOCAL.x = 1\nLOCK.acquire()\nshow(1)"),
        ('"int"', '"number"'),
    ),
    "a set of a subclass of `set` is compared like a set, with its attributes": (
        """
        class Tags(set): pass
        S = Tags([0, 8])
        S.level = 1
        def f(x): return S
        """,
        ("[0, 8]", "[8, 0]"),
        ("[0, 8]", "[0, 9]"),
        ("level = 1", "level = 2"),
    ),
}


@pytest.mark.parametrize("why", ALIKE)
def test_what_makes_a_difference(why):
    """The first change of a program makes no difference, and the others do."""
    text, (old, new), *others = ALIKE[why]
    program = textwrap.dedent(text)
    assert not differ(program, program.replace(old, new) if old else f"{program}\n{new}\n")
    for old, new in others:
        assert differ(program, program.replace(old, new)), old


class Odd:
    """Raises an error for every attribute."""

    def __getattribute__(self, name):
        if name == "__class__":
            return Odd
        if name == "close":
            return lambda: None
        raise RuntimeError(name)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("open('/dev/null')", "TextIOWrapper"),
        ("[iter(open('/dev/null', 'rb'))]", "BufferedReader"),
        ("(x for x in ())", "generator"),
        ("__import__('socket').socket()", "socket"),
        ("Odd()", "Odd"),
        ("Named('sum')", "it is not builtins.sum"),
        ("Named('missing')", "Named"),
    ],
)
def test_an_unknown_value_is_named(value, what):
    """A value that cannot be compared is refused. The error names the part that has it."""
    program = f"X = {value}\ndef f(): return X\n"
    module = types.ModuleType(NAME)
    vars(module).update(Odd=Odd, Named=Named)
    exec(program, vars(module))
    with pytest.raises(Unknown, match=what) as caught:
        Identity().of_function(module.f, {})
    assert caught.value.part == f"the global X of {NAME} in the function"
    held = module.X[0] if isinstance(module.X, list) else module.X
    held.close()


class Named:
    """Pickles as the name of an object, like the results of `numpy.frompyfunc`."""

    __module__ = "builtins"

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name

    def close(self):
        pass


def test_an_unknown_attribute_is_named():
    """The error names the attribute of a callable, or the class of one with its own pickling."""
    program = """
        class Reader:
            def __init__(self, file): self.file = file
            def __call__(self, x): return self.file.read(x)
        class Own(Reader):
            def __reduce__(self): raise TypeError("it is mine")
    """
    names = {"Reader": "the attribute file of the {}.Reader", "Own": "the {}.Own"}
    for name, part in names.items():
        with pytest.raises(Unknown) as caught:
            parts_of(program, f"{name}(x for x in ())")
        assert caught.value.part == part.format(NAME)


def test_a_second_item_is_refused_too(monkeypatch):
    """A second item of a class with unknown parts is refused like the first."""
    monkeypatch.setattr(Scored, "file", (x for x in ()), raising=False)
    identity = Identity()
    for _ in range(2):
        with pytest.raises(Unknown) as caught:
            identity.of_item([Scored()])
        assert caught.value.part.endswith("Scored.file")
    assert identity.of_item(5)[1] == {}


class Scored:
    """An item."""


def test_too_deep_is_refused():
    """A list of a hundred thousand levels is refused."""
    with pytest.raises(Unknown, match="deep"):
        parts_of("X = []\nfor _ in range(100_000): X = [X, len]\ndef f(): return X\n")


def test_functions_without_a_name_are_described_alike_in_any_order():
    """The order in which items lead to lambdas and local classes makes no difference. Neither does
    the order of a set of them."""
    program = """
        def scale(n): return lambda x: x * n
        def local(n):
            class Local:
                by = n
                def again(self): return Local, type(self).__name__
            return Local
        class A: f, cls = scale(2), local(2)
        class B: f, cls = scale(3), local(3)
        shared = scale(4)
        A.g = B.g = shared
        ITEMS = [A(), B(), [shared], local(5)()]
    """

    def described(order):
        with program_of(program) as module:
            for cls in module.A, module.B:
                space = {"__name__": "made", "K": cls.f}
                exec("def made(self): return K", space)
                cls.made = space["made"]
                cls.made.__qualname__ = f"{cls.__name__}.made"
            identity = Identity()
            return {number: identity.of_item(module.ITEMS[number]) for number in order}

    first = described([0, 1, 2, 3])
    assert first == described([3, 2, 1, 0])
    assert first[1] == described([1])[1]
    digests = {digest for digest, _ in first.values()}
    assert len(digests) == 4
    program = """
        def scale(n): return lambda x: x * n
        S = set([scale(n) for n in {}])
        def f(x): return S
    """
    assert not differ(program.format("range(40)"), program.format("reversed(range(40))"))
    assert differ(program.format("range(40)"), program.format("range(1, 41)"))


def test_a_function_without_a_name():
    """A lambda, or a function whose name leads to another, is described as "the function". What it
    uses counts as for any other, also by annotations and through `builtins`."""
    program = """
        import builtins
        def wrap(func): return lambda x: func(x)
        @wrap
        def named(x): return x + 1
        def make(n):
            class Local:
                def go(self): return 1
            def inner(x): return inner(x - 1) + n if x else added_to_builtins
            inner.__annotations__ = {"x": Local}
            return inner
        builtins.added_to_builtins = lambda: 5
    """
    try:
        first = parts_of(program, "make(2)")
        assert "the variable n of the function" in changes(first, parts_of(program, "make(3)"))
        edited = program.replace("return 1", "return 2")
        assert "the annotations of the function" in changes(first, parts_of(edited, "make(2)"))
        edited = program.replace("inner(x - 1)", "inner(x - 2)")
        assert "the code of the function" in changes(first, parts_of(edited, "make(2)"))
        edited = program.replace("lambda: 5", "lambda: 6")
        assert "the global added_to_builtins of builtins" in changes(
            first, parts_of(edited, "make(2)")
        )
        inner = "named.__closure__[0].cell_contents"
        edited = program.replace("x + 1", "x + 2")
        found = changes(parts_of(program, inner), parts_of(edited, inner))
        assert found == {"the code of the function"}
    finally:
        vars(builtins).pop("added_to_builtins", None)


def test_a_class_that_is_replaced_while_items_arrive():
    """Objects of the old class and of the new one differ, though they have the same name."""
    identity = Identity()
    found = []
    for text in "return 1", "return 2":
        with program_of(f"class C:\n def go(self): {text}\n") as module:
            found.append(identity.of_item(module.C())[0])
    assert found[0] != found[1]


def test_items():
    """An item's digest is its value's. Its class is a separate part."""
    program = "class C:\n  def __init__(self, x): self.x = x\n  def go(self): return {}\n"

    def item(x, go="1"):
        with program_of(program.format(go)) as module:
            return Identity().of_item({"item": module.C(x)})

    assert item(1) == item(1)
    assert item(1)[0] != item(2)[0]
    assert item(1)[0] == item(1, "2")[0]
    assert changes(item(1)[1], item(1, "2")[1]) == {"the code of C.go"}
    assert Identity().of_item({3, "a", (1, 2)}) == Identity().of_item({"a", (1, 2), 3})


def test_names():
    """A function is named by its module and name, an instance by its class."""
    assert name_of(textwrap.dedent) == "textwrap.dedent"
    assert name_of(functools.partial(textwrap.dedent, "a")) == "textwrap.dedent"
    assert name_of("a".upper) == "None.str.upper" or name_of("a".upper).endswith("str.upper")
