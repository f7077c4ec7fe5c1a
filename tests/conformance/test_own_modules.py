"""Programs of several files: a task sees what the program has in its own modules."""

import ast
import sys
from pathlib import Path

import pytest
from support import scripts
from support.tiers import also

pytestmark = pytest.mark.xpool_only


def run(folder: Path, main: str, *arguments: str, installed: str = "", **modules: str) -> str:
    """Run a program whose ``main.py`` has this text, beside these modules; return its output.

    ``installed``: the text of an installed module of this name.
    """
    if installed:
        package = folder / "site-packages"
        package.mkdir()
        scripts.write(package / "installed.py", installed)
        main = f"    import sys\n    sys.path.append({str(package)!r}){main}"
    return scripts.program(folder, main, *arguments, **modules).strip()


CONFIG = """
    rate = 1
    other = [1]
"""

HANDED = """
    import functools
    import config

    def show(module):
        return module.rate, module.other

    def default(m=config):
        return show(m)

    def keyword(*, m=config):
        return show(m)

    def attribute():
        return show(attribute.module)
    attribute.module = config

    def decorated_with(module):
        def decorator(function):
            @functools.wraps(function)
            def wrapper():
                return show(module)
            return wrapper
        return decorator

    @decorated_with(config)
    def decorated(): ...

    class Held:
        module = config

        def __init__(self):
            import config as imported
            self.imported = imported

        def show(self):
            return show(self.module), show(self.imported)

    def held():
        return Held().show()

    def settings():
        import config
        return config

    def returned():
        return show(settings())

    def passed():
        from config import other
        import config as local
        return show(local), other

    def computed():
        import config
        return getattr(config, "rat" + "e"), sorted(vars(config))[-1]

    modules = [config]

    def listed():
        return show(modules[0])

    CASES = default, keyword, attribute, decorated, held, returned, passed, computed, listed
"""


@pytest.mark.parametrize("where", ["in the script", "in a module"])
def test_a_module_that_code_hands_on(where, tmp_path):
    """If code does more with a module than to use its attributes, all its globals are sent."""
    cases = HANDED
    if where == "in a module":
        cases = """
    import config
    from cases import CASES
    """
    main = (
        cases
        + """
    import xpool

    if __name__ == "__main__":
        config.rate = 5
        for case in CASES:
            with xpool.Pool(1) as pool:
                assert pool.apply(case) == case(), (case, pool.apply(case))
            config.rate += 1
            config.other.append(config.rate)
    """
    )
    run(tmp_path, main, config=CONFIG, cases=HANDED)


def test_an_object_that_loses_its_attributes(tmp_path):
    """An object of a module without attributes has none in a worker that has set some."""
    state = """
    import functools

    class State:
        @functools.cached_property
        def size(self):
            return 3

    state, kept = State(), State()

    def seen():
        return dict(vars(state)), dict(vars(kept))

    def count():
        state.n = vars(state).get("n", 0) + 1
        return state.n
    """
    main = """
    import state
    import xpool

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            assert pool.apply(state.seen) == ({}, {})
            state.kept.size
            state.state.user = "ann"
            assert pool.apply(state.seen) == ({"user": "ann"}, {"size": 3})
            del state.kept.size
            state.state = state.State()
            assert pool.apply(state.seen) == ({}, {})
            assert [pool.apply(state.count) for _ in range(2)] == [1, 2]
    """
    run(tmp_path, main, state=state)


def test_the_file_of_the_script(tmp_path):
    """`inspect` finds classes of the script, and a child of `multiprocessing` its functions."""
    lib = """
    import inspect

    def source_of(cls):
        return inspect.getsource(cls)
    """
    main = """
    import multiprocessing
    import lib
    import xpool

    class Shown:
        pass

    def show(_):
        return lib.source_of(Shown)

    def child(queue):
        queue.put(3)

    def start(method):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        found = queue.get()
        process.join()
        return found

    if __name__ == "__main__":
        with xpool.Pool(1, is_daemon=False) as pool:
            assert pool.map(show, [0]) == [show(0)]
            print(pool.map(start, ["spawn"]))
    """
    assert run(tmp_path, main, lib=lib) == "[3]"


APART = """
    import datetime, enum, functools, logging, re
    import xpool

    class Level(enum.Enum):
        LOW = 1

    class Own(type): ...
    class Kind(metaclass=Own): ...

    def same():
        zone, text = datetime.timezone.utc, re.compile("a")
        return {"of": [Level.LOW, zone, text, logging.getLogger("a"), Kind], "n": 0}

    jobs, users = same(), same()

    def job():
        jobs["n"] += 1
        return jobs["n"]

    def user():
        users["n"] += 1
        return users["n"], users["of"][0] is jobs["of"][0]

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            got = [pool.apply(func) for func in (job, job, user, job)]
            assert got == [1, 2, (1, True), 3], got
"""


def test_globals_with_a_common_constant(tmp_path):
    """Two globals that refer to one member, zone, pattern, logger or class are not one group: the
    first use of one leaves what a worker has set in the other."""
    run(tmp_path, APART)


FLAGS = """
    import enum, sys
    from absl import flags
    import xpool
    import lib

    FLAGS = flags.FLAGS

    class Kind(enum.Enum):
        A = 1
        B = 2

    flags.DEFINE_integer("n", 3, "a number", short_name="z")
    _M = flags.DEFINE_integer("m", 4, "a holder")
    _K = flags.DEFINE_enum_class("kind", Kind.A, Kind, "an enumeration")
    _L = flags.DEFINE_multi_integer("l", [1, 2], "a list")
    flags.register_validator("n", lambda n: n < 100)

    def seen():
        try:
            FLAGS.n = 1000
        except flags.IllegalFlagValueError:
            pass
        else:
            raise AssertionError
        same = _K.value is FLAGS.kind and _L.value is FLAGS.l and FLAGS.z == FLAGS.n
        about = FLAGS["m"].present, FLAGS["n"].using_default_value, _M.default
        return FLAGS.n, _M.value, FLAGS.kind, FLAGS.l, lib.rate(), same, about

    def direct():
        return flags.FLAGS.n

    if __name__ == "__main__":
        FLAGS(sys.argv)
        with xpool.Pool(1) as pool:
            for n in range(3):
                assert pool.apply(direct) == direct(), pool.apply(direct)
                assert pool.apply(seen) == seen(), (pool.apply(seen), seen())
                FLAGS.n, FLAGS.m, FLAGS.rate = 10 + n, 20 + n, n / 2
                FLAGS.l.append(n)
                FLAGS.kind = "B"
"""


def test_flags_of_absl(tmp_path):
    """absl's FLAGS have the program's values and definitions, as parsed and as set since then."""
    pytest.importorskip("absl", reason="absl is not installed")
    lib = """
    from absl import flags
    flags.DEFINE_float("rate", 0.5, "of a module")

    def rate():
        return flags.FLAGS.rate
    """
    run(tmp_path, FLAGS, "--n=8", "--m=5", lib=lib)
    run(tmp_path, FLAGS.replace('if __name__ == "__main__":', "if True:"), "--rate=2", lib=lib)


BY_SEARCH = """
    import xpool  # imports multiprocessing, so __mp_main__ comes before numpy
    import numpy
    from numpy import arctan2

    table = {"f": arctan2}

    def same(ufunc):
        return table["f"] is numpy.arctan2 is ufunc

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            print(pool.apply(arctan2, (0, 1)), pool.apply(same, (arctan2,)))
"""


def test_a_function_of_numpy_that_the_script_has_imported(tmp_path):
    """A worker finds it in numpy: it has no module `__mp_main__`."""
    pytest.importorskip("numpy", reason="numpy is not installed")
    assert run(tmp_path, BY_SEARCH) == "0.0 True"


REPEATED = """
    import sys, warnings
    import xpool
    import installed

    made = object.__new__(type("Made", (), {"__reduce__": lambda self: 1 / 0}))
    installed.register(made)

    class Odd:
        def __init__(self, x, y): ...

        def __reduce__(self):
            return Odd, (1,)

    class Text:
        def __reduce__(self):
            return exec, ("raise TypeError",)

    def task(x):
        return 1

    def odd(x):
        return Odd(1, 2)

    if __name__ == "__main__":
        with warnings.catch_warnings(record=True) as seen, xpool.Pool(1) as pool:
            assert pool.map(task, [0]) == [1]
            for func, value in (task, Odd(1, 2)), (task, Text()), (odd, 0):
                try:
                    pool.map(func, [value])
                except Exception as error:
                    print(type(error).__name__, *error.__notes__, sep="|")
        print(*[(one.category.__name__, one.lineno, str(one.message)) for one in seen])
"""


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes are new in Python 3.11")
def test_an_error_before_or_after_the_task(tmp_path):
    """An error of unpickling has a note that says so, and one of a repeated call is a warning."""
    argument, text, result, repeated = run(
        tmp_path, REPEATED, installed="    def register(obj): ...\n"
    ).splitlines()
    kind, line, why = ast.literal_eval(repeated)
    assert (kind, line) == ("RuntimeWarning", 8) and "could not repeat this call" in why
    assert "The global 'made' of __main__ was not sent" in why
    called = "The function was not called: the worker raised this while it unpickled the task."
    assert argument == text == f"TypeError|{called}"
    ran = "The task has run: the program raised this while it unpickled the result."
    assert result == f"TypeError|{ran}"


DEEP = """
    import sys
    from xpool.pickle import dumps

    def walk(depth):
        return dumps(lambda: walk) if depth == 0 else walk(depth - 1)

    kinds = set()
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit()):
        try:
            kinds.add(type(walk(depth)).__name__)
        except Exception as error:
            kinds.add(type(error).__name__)
    print(*sorted(kinds))
"""


def test_a_caller_near_the_recursion_limit(tmp_path):
    """The caller gets Python's RecursionError, and no error about the object."""
    assert run(tmp_path, DEEP) == "RecursionError bytes"


CLOSED = """
    import os, sys
    import xpool

    def task(path):
        print("to stdout", flush=True)
        return sys.stdout is None or os.fstat(1).st_ino != os.stat(path).st_ino

    if __name__ == "__main__":
        assert sys.stdout is None
        with open(__file__ + ".data", "w") as data:
            assert data.fileno() == 1
            with xpool.Pool(1) as pool:
                assert pool.map(task, [data.name]) == [True]
            data.write("squares")
        with open(data.name) as data:
            assert data.read() == "squares"
"""


def test_a_file_that_has_the_number_of_stdout(tmp_path):
    """If stdout is closed when the program starts, workers do not print into a file of it."""
    path = scripts.write(tmp_path / "main.py", CLOSED)
    command = f"import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, {path!r}])"
    scripts.run_ok(["-c", command])


LOCKS = """
    import sys, threading, warnings
    import installed
    import xpool

    class Own:
        def __init__(self):
            self.lock = threading.Lock()

    client, bar = installed.Client(), Own()

    def use():
        return client.n

    def use_own():
        return bar.lock.locked()

    if __name__ == "__main__":
        with xpool.Pool(1) as pool, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert pool.apply(use) == 1 and not told, told
            pool.apply(use_own)
            assert "the lock 'bar.lock'" in str(told[0].message) and len(told) == 1
"""

CLIENT = """
    import threading

    class Cache:
        __slots__ = "mutex", "n"

        def __init__(self):
            self.n, self.mutex = 1, threading.Lock()

    class Client:
        def __init__(self):
            self.cache, self._lock = Cache(), threading.RLock()

        @property
        def n(self):
            return self.cache.n
"""


def test_a_lock_that_the_program_has_not_made(tmp_path):
    """No warning tells of a lock that a library keeps in its object."""
    run(tmp_path, LOCKS, installed=CLIENT)


OF_CLASSES = """
    import installed
    import xpool

    first, second = installed.Default(), installed.Default()
    cache = {}
    installed.Default.cache = cache
    options = [cache]

    def add():
        first.items.append(1)
        options[0]["k"] = 1
        return len(second.items), first.items is second.items, len(cache)

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            print(pool.apply(add))
"""

DEFAULT = """
    class Default:
        default = []

        def __init__(self):
            self.items = self.default
"""


def test_an_object_of_an_installed_class_that_two_globals_share(tmp_path):
    """Globals that share what an installed class has for all its objects are one group."""
    assert run(tmp_path, OF_CLASSES, installed=DEFAULT) == "(1, True, 1)"


TARGET = """
    import sys
    sys.path.append("target")
    import vendored, single, beside
    from vendored import inner, mine
    from xpool import Pool

    def names():
        return vendored.table, inner.table, single.table, beside.table, mine.table

    for one in vendored, inner, single, beside, mine:
        one.table.append("set")
    with Pool(1) as pool:
        print(*(one == ["set"] for one in pool.apply(names)))
"""

RECORD = "".join(
    f"{name},sha256=aa,11\n"
    for name in ("vendored/__init__.py", "vendored/inner.py", "single.py", "../../bin/beside")
)


def test_packages_that_pip_has_installed_into_a_folder(tmp_path, monkeypatch):
    """`pip install --target` makes installed packages; other modules in the folder are own."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "target"
    for name in "vendored", "some-1.0.dist-info":
        (folder / name).mkdir(parents=True)
    for name in "vendored/__init__", "vendored/inner", "vendored/mine", "single", "beside":
        scripts.write(folder / f"{name}.py", "table = []")
    scripts.write(folder / "some-1.0.dist-info" / "RECORD", RECORD)
    assert run(tmp_path, TARGET) == "False False False True True"


LATE = """
    import registry
    from xpool import Pool

    def first():
        import late

    def task(name):
        import late
        assert late.EMPTY == () and late.BUILT is late.build and late.number == 1
        assert registry.later and not hasattr(late, "later")
        assert registry.number is not None and registry.SIZES is late.SIZES
        return late.net(), registry.CONF is late.CONF, registry.RATES is late.RATES

    if __name__ == "__main__":
        with Pool(1) as pool:
            pool.apply(first)
            for step in range(3):
                registry.CONF.n = step
                registry.RATES.append(step)
                registry.SIZES, registry.number, registry.later = (step, 2), step, [step]
                print(pool.apply(task, ("net",)), end=" ")
"""

REGISTRY = """
    class Item:
        def __init__(self, n):
            self.n = n

    CONF = Item(None)
    RATES = []
    SIZES = ()
    number = 1
"""

LATE_MODULE = """
    from registry import CONF, RATES, SIZES

    EMPTY, number = (), 1

    def build():
        from registry import number, later

    BUILT = build

    def net():
        return CONF.n, RATES, SIZES
"""


def test_a_module_that_only_tasks_import(tmp_path):
    """It has the objects of other modules as they are now, too: `from registry import CONF`."""
    assert run(tmp_path, LATE, registry=REGISTRY, late=LATE_MODULE) == (
        "((0, [0], (0, 2)), True, True) ((1, [0, 1], (1, 2)), True, True) "
        "((2, [0, 1, 2], (2, 2)), True, True)"
    )


IN_TURN = """
    import sys
    import registry
    from xpool import Pool

    def task(name, other):
        sys.modules.pop(other, None)
        return __import__(name).number, registry.number

    if __name__ == "__main__":
        with Pool(1) as pool:
            for step, names in enumerate([("one", "two")] * 3 + [("two", "one")] * 2):
                registry.number = step
                print(pool.apply(task, names), end=" ")
"""


def test_a_module_that_a_task_imports_in_the_place_of_another(tmp_path):
    """There are as many modules as before, and the new one gets the globals as they are, too."""
    modules = dict.fromkeys(("one", "two"), "from registry import number")
    found = run(tmp_path, IN_TURN, registry="number = 0", **modules)
    assert found == "(0, 0) (1, 1) (2, 2) (3, 3) (4, 4)"


PATCHED = """
    import patches
    from items import Items
    from xpool import Pool

    def size(self):
        return "patched"

    def twice(self):
        return "new"

    for one in size, twice:
        one.__qualname__ = f"Items.{one.__name__}"  # as fastcore's `@patch` does
        setattr(Items, one.__name__, one)
    del size, twice

    def task():
        one = Items()
        return one.size(), one.twice(), one.other(), one.same(), one.usual(), one.alias()

    if __name__ == "__main__":
        patches.install()
        with Pool(1) as pool:
            print(pool.apply(task) == task(), *task())
"""

ITEMS = """
    class Items:
        def size(self):
            return "original"

        def other(self):
            return "original"

        def usual(self):
            return "usual"

        same = lambda self: "same"
        alias = usual
"""

PATCHES = """
    from items import Items

    def other(self):
        return "patched"
    other.__qualname__ = "Items.other"

    def install():
        Items.other = other
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name in Python 3.10")
def test_a_method_that_has_the_name_of_a_class_of_another_module(tmp_path):
    """A function that the program sets in a class arrives, also if it says that it is a method."""
    out = run(tmp_path, PATCHED, items=ITEMS, patches=PATCHES)
    assert out == "True patched new patched same usual usual"


NAMED = """
    import own
    from xpool import Pool

    def task(n):
        return own.Job().odd, own.Point(n)

    if __name__ == "__main__":
        with Pool(1) as pool:
            print(pool.apply(task, (3,)))
"""
OWN = """
    from typing import NamedTuple

    class Odd:
        def __init__(self):
            self.rest = (one for one in "")  # cannot be pickled
        def __get__(self, obj, kind=None):
            return "odd"

    class Job:
        odd = Odd()

    class Point(NamedTuple):
        x: int
"""


def test_a_named_tuple_in_an_own_module(tmp_path):
    """Methods of a `NamedTuple` are made inside of a function, and its module is imported."""
    assert run(tmp_path, NAMED, own=OWN) == "('odd', Point(x=3))"


UNDONE = """
    import functools, sys
    import jobs
    from xpool import Pool

    plain = jobs.run

    @functools.wraps(plain)
    def wrapped(x):
        return "wrapped", plain(x)

    jobs.run = wrapped

    if __name__ == "__main__":
        with Pool(1, context=sys.argv[1] or None) as pool:
            print(pool.apply(jobs.twice, (1,)), end=" ")
            jobs.run = plain
            print(pool.apply(jobs.twice, (1,)), end=" ")
            jobs.run = wrapped
            print(pool.apply(jobs.twice, (1,)))
"""


@pytest.mark.parametrize("context", ["fork", *also("")])
def test_a_patch_of_an_own_function_that_is_undone(tmp_path, context):
    """The function that the module's import has made comes back, also in a fork with the patch."""
    scripts.write(tmp_path / "jobs.py", "def run(x): return x\ndef twice(x): return [run(x)] * 2")
    program = scripts.write(tmp_path / "undone.py", UNDONE)
    patched = [("wrapped", 1)] * 2
    assert scripts.run_ok([program, context]) == f"{patched} {[1, 1]} {patched}\n"


ODD = """
    import logging
    import threading
    import warnings
    import odd
    import installed
    from odd import parameters
    from xpool import Pool

    class Named(logging.Logger):
        def __init__(self, name):
            super().__init__(name)
            self.title = "of " + name

    made = Named("made")
    made.setLevel("ERROR")
    logging.setLoggerClass(Named)
    known = logging.getLogger("known")
    known.title = "changed"

    def is_managed():
        return known.manager is logging.root.manager is made.manager

    class Result:
        def __init__(self):
            self.log, self.made = known, made

    table = {"proxy": installed.Proxy(), "lock": threading.Lock()}

    def task():
        return (
            (made.level, made.title, known.title, type(known).__name__, is_managed()),
            (odd.ordered([3, 1, 2]), parameters.evaluate, odd.parameters.evaluate),
            sorted(table),
        )

    if __name__ == "__main__":
        warnings.simplefilter("ignore")  # the lock is a copy
        with Pool(1) as pool:
            print(pool.apply(task) == task(), *task())
            pool.apply(Result)
            assert is_managed() and known.title == "changed"
"""

PROXY = """
    class Proxy:
        @property
        def __dict__(self):
            raise RuntimeError("not bound")

        def __reduce__(self):
            return Proxy, ()
"""

ODD_MODULE = """
    from functools import cmp_to_key
    from threading import local

    def compare(a, b):
        return (a > b) - (a < b)

    key = cmp_to_key(compare)

    def ordered(items):
        return sorted(items, key=key)

    class Parameters(local):
        def __init__(self, **named):
            self.__dict__.update(named)

    parameters = Parameters(evaluate=True)
"""


def test_objects_that_pickle_refuses(tmp_path):
    """Loggers that no manager knows, keys of comparisons, thread-local parameters, and a proxy that
    raises, beside a lock."""
    assert run(tmp_path, ODD, installed=PROXY, odd=ODD_MODULE) == (
        "True (40, 'of made', 'changed', 'Named', True) ([1, 2, 3], True, True) ['lock', 'proxy']"
    )


RENAMED = """
    from api import Foo
    from xpool import Pool

    def task(part, method):
        assert isinstance(part, Foo.Part) and method is Foo.method and Foo.wrapped(Foo()) == 1
        raise Foo.Error("x")

    if __name__ == "__main__":
        with Pool(1) as pool:
            try:
                pool.apply(task, (Foo.Part(), Foo.method))
            except Foo.Error:
                print("caught")
"""

LIBRARY = """
    import functools
    import threading

    def decorate(function):
        lock = threading.Lock()

        @functools.wraps(function)
        def wrapper(*args):
            with lock:
                return function(*args)
        return wrapper

    class Foo:
        class Error(Exception): ...
        class Part: ...
        def method(self): ...
        @decorate
        def wrapped(self):
            return 1

    Foo.__module__ = "api"
"""


def test_a_class_that_says_it_is_of_another_module(tmp_path):
    """Classes and methods in a class whose `__module__` the program sets go by their names."""
    assert run(tmp_path, RENAMED, lib=LIBRARY, api="from lib import Foo") == "caught"


CLI = """
    from app import config
    from app.core import work
    from xpool import Pool

    def local(x):
        return x * config.rate, config.table, work(x)

    def nested():
        config.rate = 77
        with Pool(1) as pool:
            return pool.apply(work, (1,))

    def main():
        config.rate = 10
        config.table.append("set")
        with Pool(1) as pool:
            print(pool.apply(work, (2,)), pool.apply(local, (2,)), pool.apply(nested))

    if __name__ == "__main__":
        main()
"""

CORE = """
    from app.config import table
    from app import config

    def work(x):
        return x * config.rate, table
"""


@pytest.mark.parametrize(
    ("start", "url"),
    [
        ("script", "file:///src/app"),
        ("module", "file:///src/app"),
        ("script", "file:///dist/app-1.whl"),
        ("script", None),
    ],
)
def test_a_program_that_was_installed(tmp_path, monkeypatch, start, url):
    """After `pip install .`, the package whose script or module was started is the program."""
    packages = tmp_path / "site-packages"
    (packages / "app").mkdir(parents=True)
    (packages / "app-1.dist-info").mkdir()
    config = "rate = 1; table = []"
    for name, text in {"__init__": "", "config": config, "cli": CLI, "core": CORE}.items():
        scripts.write(packages / "app" / f"{name}.py", text)
    scripts.write(
        packages / "app-1.dist-info" / "RECORD", "app/__init__.py,,\n../../../bin/app,,\n"
    )
    if url is not None:
        about = f'{{"dir_info": {{}}, "url": "{url}"}}'
        scripts.write(packages / "app-1.dist-info" / "direct_url.json", about)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    (tmp_path / "bin").mkdir()
    stub = scripts.write(tmp_path / "bin" / "app", "from app.cli import main\nmain()\n")
    out = scripts.run_ok([stub] if start == "script" else ["-m", "app.cli"])
    seen = "(20, ['set']) (20, ['set'], (20, ['set'])) (77, ['set'])"
    # From an index, it is an installed package, whose data is that of its import.
    assert out.strip() == (seen if url else "(2, []) (2, [], (2, [])) (1, [])")


POLICY = """
    import torch
    from xpool import Pool

    class Policy:
        def __init__(self):
            self.net, self.last = torch.nn.Linear(2, 2), None

        def act(self, x):
            self.last = self.net(x)
            return self.last.argmax()

    policy = Policy()
    policy.act(torch.ones(3, 2))
    part = policy.last[1:]

    def look():
        last = policy.last
        return last.tolist(), last.requires_grad, last.is_leaf, part.sum().item()

    def learn():
        policy.act(torch.ones(3, 2))
        policy.last.sum().backward()
        return policy.net.bias.grad.tolist()

    def beyond():
        (part * 2).sum().backward()

    if __name__ == "__main__":
        with Pool(1) as pool:
            print(pool.apply(look) == look(), pool.apply(learn))
            try:
                pool.apply(beyond)
            except RuntimeError as error:
                print("the graph behind it was not sent" in str(error))
"""


def test_a_tensor_with_a_graph_that_an_object_keeps(tmp_path):
    """It arrives without its graph, and `backward` through it raises an error."""
    pytest.importorskip("torch", reason="torch is not installed")
    assert run(tmp_path, POLICY).splitlines() == ["True [3.0, 3.0]", "True"]


EXITS = """
    import sys
    import xpool
    import task

    if __name__ == "__main__":
        del sys.argv[1:]
        with xpool.Pool(1) as pool:
            for call in lambda: pool.apply(task.told), lambda: pool.map(task.told, [1]):
                try:
                    call()
                except ImportError as error:
                    notes = str(error) + "".join(getattr(error, "__notes__", ()))
                    assert "sys.exit('no arguments') was called" in notes
                    assert "it imported arguments: the top of a module" in notes
                else:
                    raise AssertionError
            assert pool.report().deaths == 0
"""


def test_an_own_module_that_exits_when_a_worker_imports_it(tmp_path):
    """The task fails with an error that names the module, and the worker goes on."""
    modules = {
        "arguments": """
            import sys
            if len(sys.argv) < 2:
                sys.exit("no arguments")
            GIVEN = sys.argv[1]
        """,
        "task": """
            import arguments

            def told(*_):
                return arguments.GIVEN
        """,
    }
    assert scripts.program(tmp_path, EXITS, "given", **modules) == ""


UNNAMED = """
    import importlib
    import pickle
    import sys
    import base
    import models
    import xpool

    def price(path):
        with open(path, "rb") as file:
            return pickle.load(file).price()

    if __name__ == "__main__":
        importlib.import_module("plugin")
        models.RATE = 4
        with open(sys.argv[1], "wb") as file:
            pickle.dump(models.Item(), file)
        with xpool.Pool(1) as pool:
            assert pool.map(base.names, [0]) == [["Plugin"]]
            assert pool.map(price, sys.argv[1:]) == [4]
            models.RATE = 5
            assert pool.apply(price, (sys.argv[1],)) == 5
"""


def test_classes_that_code_does_not_name(tmp_path):
    """Subclasses and the classes of a pickle may be of any own module."""
    modules = {
        "base": """
            class Base:
                pass

            def names(_):
                return [one.__name__ for one in Base.__subclasses__()]
        """,
        "plugin": "from base import Base\n\nclass Plugin(Base):\n    pass\n",
        "models": """
            RATE = 1

            class Item:
                def price(self):
                    return RATE
        """,
    }
    assert scripts.program(tmp_path, UNNAMED, str(tmp_path / "item.pickle"), **modules) == ""


LOADED = """
    import importlib
    import multiprocessing
    import operator
    import pickle
    import pkgutil
    import shelve
    import sys
    import models
    import numpy
    import pandas
    import xpool
    from pickle import loads as loaded
    from pkgutil import resolve_name as found

    folder, item = sys.argv[1], models.Item()
    written = pickle.dumps(item)

    def frames():
        return pandas.read_pickle(folder + "/frame")[0].price()

    def arrays():
        return numpy.load(folder + "/array.npy", allow_pickle=True)[0].price()

    def shelves():
        with shelve.open(folder + "/shelf") as shelf:
            return shelf["item"].price()

    def texts():
        return loaded(written).price()

    def names():
        return pkgutil.resolve_name("models:Item")().price()

    def renamed():
        return found("models:RATE")

    def managed(given=None):
        return (given or shared)["item"].price()

    def attributes():
        return operator.attrgetter("RATE")(importlib.import_module("models"))

    if __name__ == "__main__":
        pandas.Series([item]).to_pickle(folder + "/frame")
        numpy.save(folder + "/array.npy", numpy.array([item], object))
        with shelve.open(folder + "/shelf") as shelf:
            shelf["item"] = item
        manager = multiprocessing.Manager()
        shared = manager.dict(item=item)
        models.RATE = 4
        for read in frames, arrays, shelves, texts, names, renamed, attributes, managed:
            with xpool.Pool(1) as pool:
                assert pool.apply(read) == 4, read
        with xpool.Pool(1) as pool:
            assert pool.map(managed, [shared]) == [4]
"""


def test_what_libraries_load_and_find_by_texts(tmp_path):
    """The classes in a file, and what a text names, read the program's globals."""
    pytest.importorskip("pandas", reason="pandas is not installed")
    models = """
        RATE = 1

        class Item:
            def price(self):
                return RATE
    """
    assert scripts.program(tmp_path, LOADED, str(tmp_path), models=models) == ""


SENTINELS = """
    import dataclasses
    import installed
    from xpool import Pool

    held, also = [installed.MISSING], [installed.MISSING]
    installed.other = OTHER = object()
    unset = installed.UNSET

    def unsets(x, y=installed.UNSET):
        same = [one is installed.UNSET for one in (x, y, unset)]
        return *same, installed.is_unset(y), installed.other is OTHER

    def work(x, y=installed.MISSING, z=dataclasses.MISSING):
        return [one is installed.MISSING for one in (x, y, held[0])], z is dataclasses.MISSING

    def result():
        return also[0]

    def grow():
        held.append(1)
        return len(held)

    installed.strategy = installed.Fast()

    def strategy():
        return type(installed.strategy).__name__

    @installed.quiet
    def decorated():
        return "called"

    if __name__ == "__main__":
        with Pool(1) as pool:
            print(pool.map(work, [1, installed.MISSING]))
            print(pool.apply(decorated), pool.apply(grow))
            print(pool.apply(result) is installed.MISSING, pool.apply(grow))
            print(pool.apply(strategy), *pool.apply(unsets, (unset,)))
            print(pool.apply(installed.get) is unset)
"""

WITH_SENTINELS = """
    import functools

    class Missing: ...

    class Fast: ...

    MISSING = strategy = Missing()
    UNSET, other = object(), object()

    def is_unset(x=UNSET):
        return x is UNSET

    def get():
        return UNSET

    class Quiet:
        def __init__(self, function, call=MISSING):
            self.function, self.call = function, call

        def __call__(self):
            return self.function() if self.call is MISSING else self.call()

    def quiet(function):
        held = Quiet(function)
        return functools.wraps(function)(lambda: held())
"""


def test_objects_without_state_of_installed_packages(tmp_path):
    """Code compares them by identity, so a worker has its own object."""
    out = run(tmp_path, SENTINELS, installed=WITH_SENTINELS)
    seen = "[([False, True, True], True), ([True, True, True], True)]"
    assert out.splitlines() == [seen, "called 2", "True 3", "Fast" + 5 * " True", "True"]


WRAPPERS = """
    import functools
    from importlib import import_module

    class Cached:
        def __init__(self, function, cache):
            functools.update_wrapper(self, function)
            self.cache = cache

        def __call__(self, x):
            if x not in self.cache:
                self.cache[x] = self.__wrapped__(x)
            return self.cache[x]

        def __get__(self, obj, kind=None):
            return functools.partial(self, obj)

        def __reduce__(self):
            return self.__qualname__

    def cached(cache):
        return lambda function: Cached(function, cache)

    class Curry:
        def __init__(self, function, *args):
            functools.update_wrapper(self, function)
            del self.__wrapped__
            self.function, self.args = function, args

        def __call__(self, *args):
            args = *self.args, *args
            return Curry(self.function, *args) if len(args) < 2 else self.function(*args)

        def __reduce__(self):
            return restore, (f"{self.__module__}:{self.__qualname__}", self.args)

    def restore(name, args):
        module, _, path = name.partition(":")
        obj = getattr(import_module(module), path)
        return Curry(obj.function, *args) if args else obj
"""

WRAPPED = """
    from installed import Curry, cached

    rate, store = 1, {}

    @cached(store)
    def slow(x):
        return x * rate

    @Curry
    def add(a, b):
        return a + b * rate

    class Job:
        @cached({})
        def step(self):
            return rate

    def plain(a, b):
        return a * b

    @cached({})
    def opened(key):
        return key(rate)
"""

OF_SCRIPT = """
    from installed import Curry, cached
    from xpool import Pool
    %s

    lib.plain = Curry(lib.plain)
    half, table = lib.add(2), [lib.slow, lib.add]

    def work(x):
        same = table[0] is lib.slow, table[1] is lib.add, lib.slow.cache is lib.store
        return lib.slow(x), lib.add(x)(1), half(x), lib.plain(x)(2), lib.Job().step(), same

    def seen():
        return len(lib.store)

    def result():
        return lib.slow

    if __name__ == "__main__":
        lib.slow(5)
        lib.rate = 10
        lib.opened(str)
        lib.opened(lambda rate: open(__file__))
        with Pool(1) as pool:
            print(pool.apply(work, (1,)))
            print(pool.map(lib.slow, [5, 7]), pool.map(lib.add(1), [2]), pool.apply(seen))
            print(pool.apply(result) is lib.slow)
            try:
                print(pool.apply(lib.opened, (repr,)))
            except Exception as error:
                print("at cache" in f"{error} {error.__notes__}")
"""

AS_MODULE = "import sys; lib = sys.modules[__name__]"


@pytest.mark.parametrize("where", ["module", "script"])
def test_wrappers_that_pickle_themselves_by_name(tmp_path, where):
    """They are the task's own functions, also in the script, and keep what they have stored."""
    if where == "module":
        out = run(tmp_path, OF_SCRIPT % "import lib", installed=WRAPPERS, lib=WRAPPED)
    else:
        out = run(tmp_path, OF_SCRIPT % (AS_MODULE + WRAPPED), installed=WRAPPERS)
    values = "(10, 11, 12, 2, 10, (True, True, True))"
    # A module's own function is there in any case.
    opened = "10" if where == "module" else "True"
    assert out.splitlines() == [values, "[5, 70] [21] 3", "True", opened]


WRAPT = """
    class Proxy:
        __module__ = "_wrappers"

        def __init__(self, wrapped, wrapper, enabled=None, parent=None, owner=None):
            self.__wrapped__, self._self_wrapper = wrapped, wrapper
            self._self_enabled, self._self_parent = enabled, parent
            self._self_owner, self._self_instance = owner, getattr(wrapped, "__self__", None)
            self.__module__, self.__name__ = wrapped.__module__, wrapped.__name__

        __dict__ = property(lambda self: self.__wrapped__.__dict__)

        def __getattr__(self, name):
            return getattr(self.__wrapped__, name)

        def __call__(self, *args, **kwds):
            return self._self_wrapper(self.__wrapped__, self._self_instance, args, kwds)

        def __reduce_ex__(self, protocol):
            raise NotImplementedError("object proxy must define __reduce_ex__()")

    class FunctionWrapper(Proxy):
        __module__ = "_wrappers"

        def __get__(self, obj, kind):
            wrapped = self.__wrapped__.__get__(obj, kind)
            return BoundFunctionWrapper(wrapped, self._self_wrapper, None, self, kind)

    class BoundFunctionWrapper(Proxy):
        __module__ = "_wrappers"

    def decorator(wrapper):
        return lambda wrapped: FunctionWrapper(wrapped, wrapper)
"""

TRACED = """
    import wrapt

    rate = 1

    @wrapt.decorator
    def traced(wrapped, instance, args, kwds):
        return wrapped(*args, **kwds), rate

    @traced
    def work(x):
        return x * rate

    class Job:
        @traced
        def step(self):
            return rate

    def plain(x):
        return x

    same = [work]
"""

OF_TRACED = """
    import wrapt
    from xpool import Pool
    %s

    lib.plain = lib.traced(lib.plain)

    def call(x):
        return lib.work(x), lib.Job().step(), lib.plain(x), lib.same[0] is lib.work

    def result():
        return lib.work

    if __name__ == "__main__":
        lib.rate = 10
        with Pool(1) as pool:
            print(pool.apply(call, (1,)) == call(1), pool.map(lib.work, [1]))
            print(pool.apply(result) is lib.work, pool.apply(lib.Job().step))
"""


@pytest.mark.parametrize("where", ["module", "script"])
def test_wrappers_of_wrapt(tmp_path, where):
    """They refuse to be pickled, but a function in one is a function of the program."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    scripts.write(packages / "wrapt.py", WRAPT)
    script = OF_TRACED % ("import lib" if where == "module" else AS_MODULE + TRACED)
    main = f"    import sys\n    sys.path.append({str(packages)!r}){script}"
    assert run(tmp_path, main, lib=TRACED).splitlines() == ["True [(10, 10)]", "True (10, 10)"]


BY_OWNER = """
    class Cached:
        def __init__(self, function):
            self.function = function

        def __set_name__(self, owner, name):
            self.owner, self.name = owner, name

        def __get__(self, obj, kind=None):
            return self if obj is None else lambda: (self.function(obj), type(obj) is self.owner)

        def __reduce__(self):
            return find, (self.owner, self.name)

    def find(owner, name):
        return vars(owner)[name]
"""

WITH_DESCRIPTOR = """
    from installed import Cached
    from xpool import Pool

    rate = 1

    class Job:
        @Cached
        def step(self):
            return rate

    job, step = Job(), Job.step

    def work():
        return job.step(), step is Job.step

    if __name__ == "__main__":
        rate = 10
        with Pool(1) as pool:
            print(*pool.apply(work))
"""


def test_descriptors_that_pickle_themselves_by_their_class(tmp_path):
    """They are parts of the class's definition."""
    assert run(tmp_path, WITH_DESCRIPTOR, installed=BY_OWNER) == "(10, True) True"
