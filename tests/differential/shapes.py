"""Random programs of several modules.  What tasks see of them is what a fork at the call sees.

    python shapes.py SEED             make a program, and run it
    python shapes.py SEED 3 7 ...     only with these of its parts
    python shapes.py --shorten SEED   find the fewest parts that show a fault
    python shapes.py --show SEED ...  print the program

A program has modules of all origins: files, packages, an archive, `spec_from_file_location` with
and without a place in `sys.modules`, two modules of one name.  Each part of the program (`PARTS`)
is in one of them, and uses objects of other parts, which it imports in one of several ways.  The
program changes parts between calls, and gives objects of parts as arguments.  It ends at the first
difference, with exit status 1.
"""

from __future__ import annotations

import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import zipfile

# A part: lines of a module, "? " expressions that tasks describe, "> " changes, and "% " the names
# of objects that others may use.  `~` is the number of the part, and `$` an object of another one.
PARTS = r"""
data~ = {"k": [1], "other": $}
alias~ = data~["k"]
? data~, alias~, data~["k"] is alias~
> data~["k"].append($)
> alias~ = [4]
% data~ alias~

def plain~(x=1, *, by=[$]):
    return x, by
? plain~, plain~(2)
> plain~.__defaults__ = (5,)
> plain~.__kwdefaults__["by"] = $
> plain~.note = [$]
> def plain~(x=3, *, by=0): return "again", x
% plain~

class Box~:
    rate, table = [$], {}
    def __init__(self, value=None):
        self.value = value
    def get(self):
        return self.value, self.rate, type(self) is Box~
    @property
    def both(self):
        return self.rate, self.table
box~ = Box~($)
? Box~, box~, box~.get(), box~.both, Box~.__dict__["both"].fget
> Box~.rate = [$]
> Box~.table["x"] = box~
> Box~.get = lambda self: "new"
> box~.value = $
% Box~ box~

import functools
def wrap~(function):
    @functools.wraps(function)
    def inner(*args):
        return inner.notes, function(*args)
    inner.notes = []
    return inner
@wrap~
def wrapped~(x=1):
    return x, $
? wrapped~(2), wrapped~.notes
> wrapped~.notes.append(1)
> wrapped~ = wrap~(len)
% wrapped~

import functools
def single~(cls):
    made = []
    @functools.wraps(cls)
    def get(*args):
        return made[0] if made else made.append(cls(*args)) or made[0]
    return get
@single~
class Config~:
    def __init__(self, value=2):
        self.value = value
    def same(self):
        return Config~() is self, self.value
? Config~().same()
% single~

class Base~:
    found = []
    def __init_subclass__(cls, **options):
        Base~.found.append(cls)
class One~(Base~):
    def who(self):
        return One~ is type(self), super().__repr__()[:1]
? Base~.found, One~().who(), One~.__mro__
> One~.more = [$]
> Base~.found = Base~.found[:0]
% One~ Base~

import functools
@functools.singledispatch
def kind~(x):
    return "any", x
class Visitor~:
    @functools.singledispatchmethod
    def go(self, x):
        return "any", x
    @go.register
    def _(self, x: int):
        return "int", x
? kind~(1), kind~("a"), kind~([]), Visitor~().go(1), Visitor~().go("a")
> kind~.register(str, lambda x: "text")
> Visitor~.__dict__["go"].register(str, lambda self, x: "text")
% Visitor~

import enum
class Colour~(enum.Enum):
    RED = 1
    def nice(self):
        return self.name, LIMIT~
LIMIT~ = 1
? Colour~.RED.nice(), Colour~(1)
> LIMIT~ = [2]
% LIMIT~

def counter~(start):
    held = [start]
    def peek(x=0):
        return held, x
    return peek, held
peek~, held~ = counter~($)
bound~ = held~.append
? peek~(1), held~, peek~.__closure__[0].cell_contents is held~, bound~.__self__ is held~
> held~.append(3)
> peek~, held~ = counter~(4)
% peek~ held~

class Unset~:
    pass
UNSET~, MISSING~ = Unset~(), object()
def option~(x=UNSET~, y=MISSING~):
    return x is UNSET~, y is MISSING~
? option~(), option~(UNSET~, MISSING~), UNSET~, MISSING~
% option~ MISSING~

import collections, weakref
class Node~:
    def __init__(self):
        self.me, self.kids = self, []
root~ = Node~()
table~ = collections.defaultdict(list, a=[$, root~])
kept~ = weakref.WeakKeyDictionary({root~: [1]})
? table~, root~.me is root~, kept~[root~]
> table~["b"].append(root~)
> root~.kids.append(table~)
> kept~[root~].append(2)
% table~ root~

state~ = None
def connect~():
    global state~
    state~ = ["connected"]
def late~(x=0):
    {lazy}
    return state~, lazy, __name__
? late~()
> connect~()
> state~ = $
% connect~ late~

import collections, functools, types
Pair~ = collections.namedtuple("Pair~", "first second")
pair~, space~ = Pair~(1, [$]), types.SimpleNamespace(a=$)
part~, large~ = functools.partial(max, 3), list(range(30_000))
? pair~, space~, part~(2), part~.args, large~[7], large~[-1], len(large~)
> space~.a = pair~ = Pair~($, 2)
> space~.more = [$]
> part~ = functools.partial(max, len(large~))
> large~[7] = space~
> large~.append($)
> large~ = list(range(300))
% pair~ space~

held~, gone~ = [$], [1]
def known~():
    try:
        return gone~, held~
    except NameError:
        return "missing"
? known~(), known~
> globals().pop("gone~", None)
> gone~ = held~
> gone~ = {"held": held~, "other": $}
> held~.append([$])
> del held~[1:]
% known~ held~

class Kind~:
    rate, items = 1, [$]
    def who(self):
        return type(self).__name__, self.rate, type(self) is Kind~
one~ = Kind~()
? Kind~, one~.who(), Kind~().who(), isinstance(one~, Kind~), one~.who
> class Kind~: rate, items, who = 5, [], lambda self: "again"
> one~ = Kind~()
> Kind~.items.append(one~)
> one~.rate = $
% Kind~ one~
"""

COUNT = 9
"""Parts of a program."""

DESCRIBING = r'''
"""Describes objects, with which of them are the same.  It counts as an installed package."""
import enum, functools, json, os, random, sys, types, weakref

def describe(*asks, arguments=False):
    numbers, alive = {}, []
    def one(value):
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return repr(value)
        if isinstance(value, enum.Enum):
            return [str(value), [member is value for member in kind]]
        if arguments and kind is object:  # beside its function, it may be a copy of the default
            return "object"
        if kind is types.ModuleType or id(value) in numbers or value == ():
            return getattr(value, "__name__", None) or numbers.get(id(value), "()")
        if kind is not tuple:  # one of constants may be another one
            numbers[id(value)] = f"#{len(numbers)}"
        alive.append(value)
        if kind is types.FunctionType:
            constants = [c for c in value.__code__.co_consts if type(c) in (int, str)]
            parts = [one(value.__defaults__), sorted(vars(value)), constants]
            return [value.__qualname__, is_there(value), repr(parts)]
        if isinstance(value, type):
            return [value.__qualname__, is_there(value), *map(one, value.__bases__)]
        if kind in (types.MethodType, types.BuiltinMethodType):
            return [value.__name__, one(value.__self__)]
        if isinstance(value, (list, tuple)):
            return [kind.__name__, *map(one, value)]
        if isinstance(value, dict):
            return [kind.__name__, *map(one, value.items())]
        return [one(kind), *map(one, sorted(getattr(value, "__dict__", {}).items()))]
    said = []
    for ask in asks:
        try:
            said.append(one(ask()))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return json.dumps(said)

def is_there(value):
    now = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        now = getattr(now, "__dict__", {}).get(name)
    return now is value or value.__module__ in ("loaded", "twin") or "<" in value.__qualname__

def of_a_fork(task):
    child = os.fork()
    if not child:
        with open("said", "w") as file:
            file.write(task())
        os._exit(0)
    os.waitpid(child, 0)
    return open("said").read()

def of_arguments(*objects):
    return describe(lambda: objects, arguments=True)

def same(*objects):
    return objects

def told(want, got):
    if got != want:
        pairs = zip(json.loads(want), json.loads(got))
        print(*(f"a fork {a}\na task {b}" for a, b in pairs if a != b), sep="\n")
        sys.exit(1)

def compare(pool, seed, tasks, changes, objects):
    for step in range(8):
        draw = random.Random(f"{seed}/{step}")
        for name in draw.sample([*changes], min(len(changes), 3)) if step else ():
            print(f"{step}: {name}")
            changes[name]()
        for name, task in tasks.items():
            if step and draw.random() < 0.5:
                continue
            print(f"{step}: {name}")
            want = of_a_fork(task)
            late = pool.apply_async(task)
            for got in pool.apply(task), *pool.starmap(task, [()] * 2, 1), late.get():
                told(want, got)
        for name in draw.sample([*objects], min(len(objects), 3)):
            print(f"{step}: {name}")
            some = objects[name]()
            want = of_arguments(*some)
            told(want, pool.apply(of_arguments, some))
            told(want, of_arguments(*pool.apply(same, some)))
'''

LOAD = """
def load(path, name, register):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    if register:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""
MODULES = {
    "here": "here.py", "pack": "pack/__init__.py", "pack.inner": "pack/inner.py",
    "pack.sub.deep": "pack/sub/deep.py", "zipped": "zipped.py", "known": "files/known.py",
    "loaded": "files/loaded.py", "twin": "files/twin.py", "twin2": "files/twin2.py",
    "__main__": "program.py",
}  # fmt: skip
FORMS = [
    "def {0}():\n    return describe({1})",
    "{0} = lambda: describe({1})",
    "class A_{0}:\n    def ask(self):\n        return describe({1})\n{0} = A_{0}().ask",
]
OF_FILES = ("known", "loaded", "twin", "twin2")  # by `spec_from_file_location`


class Program:
    """The modules of a program: each has lines that import, and others."""

    def __init__(self, seed: str, only: set[int]) -> None:
        self.seed = seed
        self.imports: dict[str, list[str]] = {module: [] for module in MODULES}
        self.lines: dict[str, list[str]] = {module: [] for module in MODULES}
        self.tasks: list[tuple[str, str]] = []
        self.changes: list[tuple[str, str]] = []
        self.objects: list[tuple[str, str]] = []
        kinds = PARTS.strip().split("\n\n")
        modules = sorted(random.Random(seed).choices(range(len(MODULES)), k=COUNT))
        given: list[tuple[str, str, bool]] = []  # module, name, and whether its part is there
        for number, at in enumerate(modules, 1):
            self.draw = random.Random(f"{seed}/{number}")
            module, text = [*MODULES][at], self.draw.choice(kinds).replace("~", str(number))
            text = text.replace("{lazy}", self._lazy(module, given))
            if module == "twin2":  # its classes are sent with their data, so these would be others
                text = text.replace(f'.table["x"] = box{number}', '.table["x"] = 5')
            there = not only or number in only
            first, *rest = text.split("$")
            text = first + "".join(self._object(module, given, there) + one for one in rest)
            names = re.findall("^% (.*)", text, re.M)[0].split()
            given += [(module, name, there) for name in names]
            if there:
                self._add(module, number, text)
        self.draw = random.Random(f"{seed}/cross")
        seen = [name for _, name, there in given if there and self.draw.random() < 0.5]
        used = [self._used("__main__", *one) for one in given if one[1] in seen]
        self._task("__main__", "cross", [one for one in used if one])

    def _used(self, module: str, other: str, name: str, there: bool) -> str:
        """Return an expression for an object of another module; it may add an import."""
        if other == module:
            return name if there else ""
        hidden = other in OF_FILES
        if other == "twin2" or (hidden and module != "__main__"):  # workers have `twin` as `twin`
            return ""
        dotted, way = other.rpartition("."), self.draw.randrange(5)
        line, found = [
            (f"from {other} import {name}", name),
            (f"from {other} import {name} as other_{name}", f"other_{name}"),
            (f"import {other}", f"{other}.{name}"),
            (f"import {other} as m_{dotted[2]}", f"m_{dotted[2]}.{name}"),
            (f"from {other} import *", name),
        ][way]
        if way < 2 and module.startswith("pack.") and other == "pack":
            line = line.replace("pack", "." * module.count("."))
        if hidden:
            line, found = "", f"{other}.{name}"
        if not there:
            return ""
        if line and line not in self.imports[module]:
            self.imports[module].append(line)
        return found

    def _object(self, module: str, given: list[tuple[str, str, bool]], there: bool) -> str:
        value = self.draw.choice(["7", "[1, [2]]", "{'a': None}", "'text'", "3.5"])
        others = [one for one in given if one[0] not in OF_FILES or module in (one[0], "__main__")]
        if not others or self.draw.random() < 0.3:
            return value
        other, name, is_there = self.draw.choice(others)
        return self._used(module, other, name, is_there and there) or value

    def _lazy(self, module: str, given: list[tuple[str, str, bool]]) -> str:
        others = [(m, name) for m, name, there in given if there and m not in (*OF_FILES, module)]
        if not others:
            return "lazy = None"
        return "from {} import {} as lazy".format(*self.draw.choice(others))

    def _add(self, module: str, number: int, text: str) -> None:
        lines, bound = self.lines[module], set[str]()
        for line in text.split("\n"):
            if line[:2] not in ("? ", "> ", "% "):
                lines.append(line)
                bound.update(re.findall(r"^(?:def |class )?((?:\w+, )*\w+)(?= = |[(:])", line))
        names = {one for some in bound for one in some.split(", ") if one.endswith(str(number))}
        for i, change in enumerate(re.findall("^> (.*)", text, re.M)):
            lines += [f"def change{number}_{i}():", f"    global {', '.join(sorted(names))}"]
            lines += [f"    {change}"]
            self.changes.append((module, f"change{number}_{i}"))
        if module not in OF_FILES:  # a worker cannot import the module of a closure
            given = re.findall("^% (.*)", text, re.M)[0]
            lines += [f"def give{number}():", f"    return {given.replace(' ', ', ')},"]
            self.objects.append((module, f"give{number}"))
        probes = re.findall("^[?] (.*)", text, re.M)[0]
        self._task(module, f"see{number}", [probes])

    def _task(self, module: str, name: str, probes: list[str]) -> None:
        asks = ", ".join(f"lambda: ({one},)" for one in probes)
        form = self.draw.choice(FORMS)
        self.lines[module] += form.format(name, asks).split("\n")
        self.tasks.append((module, name))

    def texts(self) -> dict[str, str]:
        """Return the files of the program."""
        texts = {
            MODULES[module]: "\n".join(
                ["from describing import describe", *self.imports[module], *self.lines[module], ""]
            )
            for module in MODULES
        }
        loads = [
            f"{one} = load('files/{one}.py', '{one.rstrip('2')}', {one == 'known'})"
            for one in OF_FILES
        ]
        watch = '__import__("faulthandler").dump_traceback_later(180, exit=True)'
        first = [watch, "import importlib.util", "import sys", "import xpool", LOAD, *loads]
        plain = [one for one in MODULES if one not in (*OF_FILES, "__main__")]
        first += [f"import {one}" for one in plain]
        context = self.draw.choice(["spawn", "spawn", "fork"])
        options = f"context={context!r}" + self.draw.choice(["", ", maxtasksperchild=4"])
        tables = ["".join(map(_item, some)) for some in (self.tasks, self.changes, self.objects)]
        last = ['if __name__ == "__main__":', "    from describing import compare"]
        last += [f"    with xpool.Pool(2, {options}) as pool:"]
        given = ", ".join(f"{{{table}}}" for table in tables)
        last += [f"        compare(pool, {self.seed!r}, {given})", ""]
        texts["program.py"] = "\n".join([*first, texts["program.py"], *last])
        return texts


def _item(place: tuple[str, str]) -> str:
    """Return an item of a dict: the name of a function, and the function."""
    path = ".".join(place).removeprefix("__main__.")
    return f"{path!r}: {path}, "


def run(seed: str, only: set[int]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        texts = Program(seed, only).texts() | {"site-packages/describing.py": DESCRIBING}
        with zipfile.ZipFile(pathlib.Path(folder, "archive.zip"), "w") as archive:
            archive.writestr("zipped.py", texts.pop("zipped.py"))
        for name, text in texts.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        paths = [*map(folder.__add__, ("/site-packages", "/archive.zip"))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *filter(None, sys.path[1:])])}
        call = [sys.executable, "program.py"]
        return subprocess.run(
            call, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=200
        )


def main(seed: str, *only: str) -> int:
    if seed == "--show":
        for name, text in Program(only[0], set(map(int, only[1:]))).texts().items():
            print(f"# ---- {name}", text, sep="\n")
        return 0
    if seed == "--shorten":
        left = list(range(1, 1 + COUNT))
        if not run(only[0], set(left)).returncode:
            sys.exit("this program has no fault")
        for number in range(1, 1 + COUNT):
            less = [one for one in left if one != number]
            left = less if less and run(only[0], set(less)).returncode else left
        return main(only[0], *map(str, left))
    done = run(seed, set(map(int, only)))
    if done.returncode:
        print(done.stdout, done.stderr, f"again: python {sys.argv[0]} {seed}", *only)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
