"""A program that changes its globals at random and compares what tasks see with what it sees.

    python changes.py SEED STEPS            run a program
    python changes.py SEED STEPS NAME ...   only these of its changes and tasks
    python changes.py --shorten SEED STEPS  find the fewest changes and tasks that show a fault

Each step makes some changes (another object, an element, an attribute, a default, a definition, a
module that is edited and loaded again), and then some tasks describe what they see.  It must equal
the description that the program makes itself, also in which objects are the same.  A program ends
at the first difference, with exit status 1 and a report.
"""

from __future__ import annotations

import collections
import enum
import functools
import importlib
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from typing import Any

sys.dont_write_bytecode = True  # two versions of a module may have the same time
warnings.simplefilter("ignore", FutureWarning)  # Python 3.13 warns of partials in classes
warnings.filterwarnings("ignore", "xpool compares")  # on a busy machine, these take a second in all

MODULES = {
    "__init__": "",
    "shapes": '''
"""Describes objects."""
import enum, functools, sys, types

def describe(*values, shallow=False):
    """Return the structure of values; an object that comes again is its number.

    With `shallow`, without what classes and functions have.
    """
    numbers, alive = {}, []

    def one(value):
        kind = type(value)
        if value is None or kind in (bool, int, float, str) or isinstance(value, enum.Enum):
            return repr(value)
        if kind is types.ModuleType:
            return value.__name__
        if id(value) in numbers:
            return numbers[id(value)]
        if value != ():
            numbers[id(value)] = len(numbers)
            alive.append(value)
        if isinstance(value, type):
            now = sys.modules.get(value.__module__)
            for name in value.__qualname__.split("."):
                now = getattr(now, name, None)
            if shallow or now is not value or value.__module__ == "builtins":
                return "class", value.__qualname__, now is value
            own = [(k, v) for k, v in sorted(vars(value).items()) if k[:1] != "_"]
            return "class", value.__qualname__, all_of(value.__bases__), all_of(own)
        if kind is types.FunctionType:
            parts = value.__defaults__, value.__kwdefaults__, sorted(vars(value).items())
            if shallow:
                return "function", value.__qualname__
            constants = [str(c) for c in value.__code__.co_consts if type(c) is int]
            return "function", value.__qualname__, all_of(parts), constants
        if kind is types.MethodType:
            return "method", value.__func__.__qualname__, one(value.__self__)
        if kind is functools.partial:
            return "partial", all_of((value.func, value.args, value.keywords))
        if isinstance(value, (list, tuple)):
            return kind.__name__, len(value), all_of(value[:100])
        if isinstance(value, dict):
            return kind.__name__, all_of(value.items())
        if kind is set:
            return "set", sorted(value)
        return "object", one(kind), all_of(sorted(vars(value).items()))

    def all_of(values):
        return [one(value) for value in values]

    return all_of(values)
''',
    "base": '''
"""Definitions that another module extends."""
COUNT, LEVELS = 0, [1, 2, 3]
def scaled(x, factor=2):
    return x * factor + 1
class Base:
    kind = "base"
    def who(self):
        return type(self).__name__, self.kind, COUNT, 1
''',
    "derived": '''
"""Data, a registry, and a class that extends another module's."""
from own import base
from own.base import LEVELS, Base, scaled
RATE, NAMES, REGISTRY = 1, ["a"], {}
OPTIONS = {"rate": RATE}
def register(function):
    REGISTRY[function.__name__] = function
    return function
@register
def twice(x, by=2, *, options=OPTIONS):
    return scaled(x) * by, len(options), 1
class Derived(Base):
    flag, items = False, []
    def __init__(self, value):
        self.value = value
    def get(self):
        return self.value, self.flag, RATE, 1
DEFAULT = Derived(5)
def seen(describe):
    return describe(RATE, NAMES, OPTIONS, REGISTRY, Derived, DEFAULT, base.COUNT, scaled, LEVELS)
''',
}

if __name__ == "__main__" and sys.argv[1] != "--shorten":
    folder = tempfile.TemporaryDirectory()
    sys.path.insert(0, folder.name)
    for _name, _text in MODULES.items():
        _file = pathlib.Path(folder.name, "own", f"{_name}.py")
        _file.parent.mkdir(exist_ok=True)
        _file.write_text(_text)
    base: Any = importlib.import_module("own.base")
    derived: Any = importlib.import_module("own.derived")
    shapes: Any = importlib.import_module("own.shapes")
    Derived = derived.Derived

    from xpool import Pool

# What tasks see ----------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "first second")


class Colour(enum.Enum):
    RED = 1


class Box:
    rate, table = 1, {}

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def read(self) -> Any:
        return self.value, self.rate, globals().get("v0")


class Crate(Box):
    rate = 2


def first(x: Any = 1) -> Any:
    return x, 1


def second(x: Any = 2, *, more: Any = 3) -> Any:
    return first(x), more


NAMES = [f"v{i}" for i in range(8)]
v0: Any = 1
v1: Any = [1]
v2: Any = v1
v3: Any = Box(3)
v4: Any = {"key": v3}
v5: Any = first
v6: Any = None
v7: Any = list(range(30_000))

SEEN = [
    *NAMES, "Box", "Crate", "first", "second", "derived", "derived.RATE", "derived.OPTIONS",
    "derived.REGISTRY", "derived.Derived", "derived.DEFAULT", "derived.NAMES", "derived.twice",
    "base.COUNT", "base.LEVELS", "base.Base", "base.scaled", "Derived",
]  # fmt: skip

TASKS = """
def answers():
    found = []
    for function in derived.REGISTRY.values():
        try:
            found.append(shapes.describe(function(2)))
        except Exception as exc:
            found.append(type(exc).__name__)
    return found

def methods():
    found = []
    for one in (globals().get("v3"), derived.DEFAULT, derived.Derived(1), Crate(2)):
        for name in ("read", "get", "who"):
            try:
                found.append(shapes.describe(getattr(one, name)()))
            except Exception as exc:
                found.append(type(exc).__name__)
    return found

def module():
    return derived.seen(shapes.describe)
"""


def tell(*items: Any) -> Any:
    return shapes.describe(*items, shallow=True)


def back(*items: Any) -> Any:
    return items


def compare(pool: Any, task: Any, draw: random.Random) -> list[tuple[Any, Any]]:
    """Return pairs: what the program describes, and what a task does; also of arguments."""
    want, verb = task(), draw.randrange(3)
    if verb == 0:
        answers = [pool.apply(task)]
    elif verb == 1:
        answers = pool.starmap(task, [()] * 3, 1)
    else:
        answers = [one.get() for one in [pool.apply_async(task) for _ in range(3)]]
    items = [tuple(draw.sample(changeable(), 2)) for _ in range(2)]
    told = [tell(*some) for some in items]
    returned = [tell(*some) for some in pool.starmap(back, items, 1)]
    return [
        *((want, got) for got in answers),
        *zip(told, pool.starmap(tell, items, 1)),
        *zip(told, returned),
    ]


def make_tasks(draw: random.Random) -> dict[str, Callable[[], Any]]:
    """Return functions without arguments, by name.  Each describes some globals."""
    made: dict[str, Any] = {}
    texts = [TASKS]
    for i in range(6):
        names = draw.sample(SEEN, draw.randrange(1, 7))
        lines = [f"def task{i}():"]
        for j, name in enumerate(names):
            lines += ["    try:", f"        x{j} = {name}"]
            lines += ["    except (NameError, AttributeError):", f"        x{j} = 'missing'"]
        lines.append(f"    return shapes.describe({''.join(f'x{j}, ' for j in range(len(names)))})")
        texts.append("\n".join(lines))
    for text in texts:
        before = {*globals()}
        exec(text, globals())
        made.update((name, globals()[name]) for name in globals().keys() - before)
    return dict(sorted(made.items()))


# What the program changes ------------------------------------------------------------------------


def value(draw: random.Random, depth: int = 0) -> Any:
    """Return an object: a new one, or one that is there already."""
    number = draw.randrange(9)
    inner = (lambda: value(draw, depth + 1)) if depth < 2 else (lambda: number)
    return draw.choice([
        lambda: number, lambda: f"text {number}", lambda: [inner(), inner()], list, dict,
        lambda: {"k0": inner()}, lambda: (inner(), inner()), lambda: Box(inner()),
        lambda: Crate(number), lambda: derived.Derived(inner()), lambda: Pair(number, []),
        lambda: draw.choice([first, second, derived.twice, base.scaled]),
        lambda: draw.choice([Box, Crate, derived.Derived, base.Base, Colour]),
        lambda: functools.partial(draw.choice([first, second, base.scaled]), number),
        lambda: Box(number).read, lambda: derived.Derived(number).get, lambda: Colour.RED,
        lambda: (lambda x=number: (x, number, v1)), lambda: {"a", str(number)}, lambda: derived,
        lambda: list(range(draw.choice([300, 30_000]))), lambda: types.SimpleNamespace(a=inner()),
        lambda: globals().get(draw.choice(NAMES)), lambda: globals().get(draw.choice(NAMES)),
        lambda: draw.choice([derived.OPTIONS, derived.NAMES, derived.DEFAULT, base.LEVELS,
                             Box.table, derived.Derived.items, derived.REGISTRY]),
    ])()  # fmt: skip


def changeable() -> list[Any]:
    """Return the objects in globals whose contents can change."""
    found: list[Any] = []

    def walk(value: Any, depth: int = 0) -> None:
        if depth > 4 or any(value is one for one in found):
            return
        if isinstance(value, (list, dict, Box, derived.Derived, types.SimpleNamespace)):
            found.append(value)
        if isinstance(value, (type, types.ModuleType)):
            return
        if isinstance(value, (list, tuple)):
            inside = value[:5]
        else:
            inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            inside = [*inside.values()]
        for one in inside:
            walk(one, depth + 1)

    names = [globals().get(name) for name in NAMES]
    for one in (*names, derived.OPTIONS, derived.NAMES, derived.DEFAULT, base.LEVELS, Box.table):
        walk(one)
    return found


def change_contents(draw: random.Random, step: int) -> str:
    one, new, name = draw.choice(changeable()), value(draw, 1), draw.choice(["value", "k1"])
    if isinstance(one, list) and one and draw.random() < 0.3:
        one.pop()
    elif isinstance(one, list):
        one.append(new)
    elif isinstance(one, dict):
        one[name] = new
    else:
        setattr(one, name, new)
    return f"contents of {one!r:.40}: {new!r:.40}"


def change_name(draw: random.Random, step: int) -> str:
    name, new = draw.choice(NAMES), value(draw)
    globals()[name] = new
    return f"{name} = {new!r:.60}"


def delete_name(draw: random.Random, step: int) -> str:
    globals().pop(name := draw.choice(NAMES), None)
    return f"del {name}"


def change_class(draw: random.Random, step: int) -> str:
    one = draw.choice([Box, Crate, derived.Derived, base.Base])
    name, new = draw.choice(["rate", "kind", "flag", "table", "items", "new"]), value(draw, 1)
    setattr(one, name, new)
    return f"{one.__name__}.{name} = {new!r:.60}"


def change_module(draw: random.Random, step: int) -> str:
    one, new = draw.choice([derived, base]), value(draw, 1)
    name = draw.choice(["RATE", "NAMES", "LEVELS", "NEW"])
    setattr(one, name, new)
    base.COUNT = step
    return f"{one.__name__}.{name} = {new!r:.60}"


def change_function(draw: random.Random, step: int) -> str:
    one: Any = draw.choice([first, second, derived.twice, base.scaled])
    new = value(draw, 1)
    if one.__kwdefaults__ and draw.random() < 0.5:
        one.__kwdefaults__[next(iter(one.__kwdefaults__))] = new
    elif draw.random() < 0.5:
        one.__defaults__ = (step,)
    else:
        one.note = new
    return f"of {one.__name__}: {new!r:.60}"


def define_again(draw: random.Random, step: int) -> str:
    texts = [
        f"def first(x={step}):\n    return x, v1, {step}",
        f"""class Box:
    rate, table = {step}, dict()
    def __init__(self, value=None):
        self.value = value
    def read(self):
        return self.value, {step}""",
    ]
    exec(text := draw.choice(texts), globals())
    return text.partition(":")[0]


def replace_in_module(draw: random.Random, step: int) -> str:
    def replaced(self: Any) -> Any:
        return "replaced", step, self.value

    new = draw.choice([first, second, derived.twice])
    draw.choice([
        lambda: setattr(derived.Derived, "get", replaced), lambda: derived.register(new),
        lambda: setattr(derived, "scaled", draw.choice([first, second])),
        lambda: setattr(base, "another", new),
    ])()  # fmt: skip
    return f"a function in a module: {new.__name__}"


def load_again(draw: random.Random, step: int) -> str:
    one: Any = draw.choice([base, derived])
    file = pathlib.Path(one.__file__)
    edited = draw.random() < 0.7
    if edited:
        text = re.sub(r"(, |\+ )\d+$", rf"\g<1>{step + 100}", file.read_text(), flags=re.M)
        file.write_text(text)
        os.utime(file, (step, step))
    importlib.reload(one)
    return f"reload {one.__name__}, edited: {edited}"


CHANGES = [
    change_contents, change_contents, change_contents, change_name, change_name, delete_name,
    change_class, change_module, change_function, define_again, replace_in_module,
]  # fmt: skip


# One program -------------------------------------------------------------------------------------


def difference(want: Any, got: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return where two descriptions differ first."""
    if want == got:
        return None
    if type(want) is type(got) and isinstance(want, (list, tuple)) and len(want) == len(got):
        name = f" {want[0]}" if want and isinstance(want[0], str) else ""
        pairs = enumerate(zip(want, got))
        found = (difference(*both, f"{path}{name}[{i}]") for i, both in pairs)
        return next(one for one in found if one)
    return path, want, got


def run(seed: str, steps: int, only: set[str]) -> int:
    made, story = [], []

    def chosen(name: str) -> bool:
        if not only or name in only:
            made.append(name)
        return not only or name in only

    tasks = make_tasks(random.Random(seed))
    changes = [*CHANGES, load_again] if int(seed) % 2 else CHANGES
    with Pool(2) as pool:
        for step in range(1, steps):
            draw = random.Random(f"{seed}/{step}")
            for i in range(draw.choice([0, 1, 1, 1, 2, 4])):
                if chosen(f"change{step}.{i}"):
                    part = random.Random(f"{seed}/{step}/{i}")
                    story.append(f"{step}: {part.choice(changes)(part, step)}")
            for name in draw.sample([*tasks], draw.randrange(1, 5)):
                if not chosen(f"{name}:{step}"):
                    continue
                story.append(f"{step}: {name}()")
                for want, got in compare(pool, tasks[name], random.Random(f"{seed}/{step}/{name}")):
                    if found := difference(want, got):
                        print(*story, sep="\n")
                        print("at{}\n  program {!r:.300}\n  task    {!r:.300}".format(*found))
                        print(f"again: python {sys.argv[0]} {seed} {steps}", *made)
                        return 1
    pool.join()
    return 0


def shorten(seed: str, steps: str) -> None:
    """Print a program with as few changes and tasks as can be."""

    def report(names: list[str]) -> str:
        call = [sys.executable, __file__, seed, steps, *names]
        return subprocess.run(call, capture_output=True, text=True, check=False).stdout

    text = report([])
    if "again:" not in text:
        sys.exit("this program has no fault")
    names = text.split()[text.split().index("again:") + 5 :]
    size = len(names)
    while size := size // 2 or (1 if size > 1 else 0):
        for i in reversed(range(0, len(names), size)):
            less = names[:i] + names[i + size :]
            if less and "again:" in report(less):
                names = less
    print(report(names))


if __name__ == "__main__":
    if sys.argv[1] == "--shorten":
        shorten(*sys.argv[2:])
    else:
        with folder:
            sys.exit(run(sys.argv[1], int(sys.argv[2]), set(sys.argv[3:])))
