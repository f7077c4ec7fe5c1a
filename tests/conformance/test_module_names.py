"""Modules under other names, and modules that have the name of another."""

import sys

import pytest
from support import scripts
from support.tiers import also

pytestmark = pytest.mark.xpool_only

SETTINGS = """
RATE = 2

def scaled(x):
    return x * RATE

class Model:
    def __init__(self, x):
        self.x = x
    def scaled(self):
        return scaled(self.x)
"""

LEGACY = """
import sys
import types
import short

class Legacy(types.ModuleType):
    rate = 2
    @property
    def doubled(self):
        return 2 * self.rate
    def scaled(self, x):
        return short.scaled(x)

sys.modules[__name__] = Legacy(__name__)
"""

ALIASES = """
import importlib
import pickle
import sys
import traceback
import types
import xpool
sys.path.insert(0, FOLDER)
import long_settings
import package
import settings_of_tests

class Config:
    rate = 5
    def __init__(self):
        self.depth = 1
    @property
    def doubled(self):
        return 2 * self.depth

class Lazy(types.ModuleType):
    def __getattr__(self, name):
        return getattr(importlib.import_module(self.target), name)

lazy, listed = Lazy("lazy_statistics"), Lazy("listed")
lazy.target, listed.target = "statistics", "fractions"
sys.modules["listed"] = listed
made = types.ModuleType("made_here")
made.RATE = 7
sys.modules["short"] = long_settings
sys.modules["package.settings"] = package.settings = long_settings
sys.modules["fast_json"] = importlib.import_module("json")
sys.modules["config"] = Config()
sys.modules["made_alias"] = made
sys.modules["program"] = sys.modules["__main__"]
sys.modules["left_out"] = None
sys.modules["opened"] = types.SimpleNamespace(file=open(__file__))
sys.modules["settings_of_tests"] = long_settings
import legacy
import short

OWN = 3
OLD = pickle.dumps(long_settings.Model(4), 0).replace(b"long_settings", b"short")

def module(x):
    import short
    return short.RATE, short.scaled(x), short is long_settings

def names(x):
    from short import RATE, scaled
    return RATE, scaled(x)

def below(x):
    import package.settings
    from package.settings import RATE
    import package.settings as other
    return package.settings.RATE, RATE, other.RATE

def at_top(x):
    return legacy.scaled(x), short.RATE

def computed(x):
    return importlib.import_module("short").RATE, pickle.loads(OLD).scaled()

def installed(x):
    import fast_json
    return fast_json.dumps([x])

def instance(x):
    import config
    from config import doubled
    return config.depth, config.rate, doubled

def own(x):
    import made_alias, program
    return made_alias.RATE, program.OWN

def of_a_class(x):
    import listed as again
    return lazy.mean([x, 3]), again.Fraction(x), again is listed, legacy.doubled

def replaced(x):
    import settings_of_tests
    return settings_of_tests.RATE

def halted(x):
    import left_out

def refused(x):
    import opened

ALL = module, names, below, at_top, computed, installed, instance, own, of_a_class, replaced

def show(pool):
    print(*(pool.apply(one, (1,)) == one(1) for one in ALL))

if __name__ == "__main__":
    with xpool.Pool(1, context=CONTEXT) as pool:
        show(pool)
        long_settings.RATE = OWN = made.RATE = legacy.rate = 30
        sys.modules["config"].depth = 4
        show(pool)
        for one in halted, refused:
            try:
                pool.apply(one, (1,))
            except ModuleNotFoundError as error:
                text = "".join(traceback.format_exception(error))
                said = str(error).partition(". The global")[0]  # without notes, before Python 3.11
                print(said, "'opened' of sys.modules was not sent to this worker (Task" in text)
        del sys.modules["short"]
        try:
            pool.apply(module, (1,))
        except ModuleNotFoundError as error:
            print(error)
        sys.modules["short"] = sys.modules["long_settings"]
        show(pool)
    pool.join()
"""


@pytest.mark.parametrize("context", [None, *also("spawn", "forkserver")])
def test_names_in_sys_modules(tmp_path, context):
    """Workers have the names that the program has given to other modules, to objects and to None,
    as at the call, before their imports."""
    (tmp_path / "package").mkdir()
    for name, text in (
        ("long_settings", SETTINGS),
        ("legacy", LEGACY),
        ("package/__init__", ""),
        ("settings_of_tests", ""),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    text = ALIASES.replace("FOLDER", repr(str(tmp_path))).replace("CONTEXT", repr(context))
    out = scripts.run_ok([scripts.write(tmp_path / "aliases.py", text)]).splitlines()
    every = " ".join(["True"] * 10)
    halted = "import of {} halted; None in sys.modules {}"
    assert out[:2] == [every] * 2
    assert out[2:4] == [halted.format("left_out", False), halted.format("opened", True)]
    assert out[4:] == ["No module named 'short'", every]


SUBMODULES = """
import logging.handlers
import sys
import wsgiref.simple_server
import xml.dom, xml.etree.ElementTree
import xpool

class Parser:
    def parse(self, text):
        return xml.etree.ElementTree.fromstring(text).tag

def main():
    import email.message, urllib.parse
    trees = xml
    functions = (
        lambda _: logging.handlers.BufferingHandler.__name__,
        lambda _: Parser().parse("<a/>"),
        lambda _: trees.etree.ElementTree.__name__,
        lambda _: [one for one in sys.modules if one in ("xml.dom", "wsgiref.simple_server")],
        lambda _: urllib.parse.quote("/ "),
        lambda _, given=email: given.message.Message.__name__,
    )
    with xpool.Pool(1, context=CONTEXT) as pool:
        print(*(pool.apply(one, (0,)) for one in functions))
    pool.join()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("context", [None, *also("spawn")])
def test_submodules_of_packages(tmp_path, context):
    """Workers import those that functions use by the name of the package (`import xml.etree`)."""
    text = SUBMODULES.replace("CONTEXT", repr(context))
    out = scripts.program(tmp_path, text)
    assert out == "BufferingHandler a xml.etree.ElementTree [] /%20 Message\n"


HOOKS = """
HOOKS = []
COUNT = 0

def hook(function):
    global COUNT
    COUNT += 1
    HOOKS.append(function.__name__)
    return function
"""

HOOK = """
from hooks import hook

@hook
def NAME(x):
    return x
"""

REGISTERED = """
import importlib
import hooks, first, second
import xpool

def seen(x):
    return hooks.HOOKS, hooks.COUNT

def run(x):
    return first.first(x), hooks.HOOKS, hooks.COUNT

def run_later(x):
    import second
    return second.second(x), hooks.HOOKS

def run_by_name(name):
    return importlib.import_module(name).third(0), hooks.HOOKS

def set_here(x):
    hooks.HOOKS.append("task")

if __name__ == "__main__":
    importlib.import_module("third")
    every = (seen, 0), (run, 0), (run_later, 0), (run_by_name, "third")
    for orders in every, every[::-1]:
        with xpool.Pool(1) as pool:
            print([pool.apply(function, (x,)) == function(x) for function, x in orders])
            pool.apply(set_here, (0,))
            print(pool.apply(seen, (0,)))
    pool.join()
"""


def test_modules_that_register_something_when_they_are_imported(tmp_path):
    """What the program's imports have registered is not registered again by those of a worker."""
    (tmp_path / "hooks.py").write_text(HOOKS)
    for name in "first", "second", "third":
        (tmp_path / f"{name}.py").write_text(HOOK.replace("NAME", name))
    out = scripts.program(tmp_path, REGISTERED)
    seen = "(['first', 'second', 'third', 'task'], 3)"
    assert out.splitlines() == [str([True] * 4), seen] * 2


INSTALLED = """
import importlib

for name in NAMES:
    try:
        importlib.import_module(name)
    except ImportError:
        print("without", name)
from xpool._pickling.by_value.origin import aliases

print([*aliases()])
"""


@pytest.mark.parametrize(
    "names", ["decimal os.path numpy.testing six", *also("scipy.stats torch pandas")]
)
def test_other_names_that_installed_packages_make(tmp_path, names):
    """A worker's own imports make them, if it needs them."""
    text = INSTALLED.replace("NAMES", repr(names.split()))
    out = scripts.program(tmp_path, text)
    assert out.splitlines()[-1] == "[]"


SAME_AS_ANOTHER = """
import json
import types
import xpool

def text(x):
    return json.dumps(x)

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(text, (1,)))
        own = json
        json = types.ModuleType("json")
        json.dumps = lambda x: "fake"
        try:
            print(pool.apply(text, (1,)))
        except NameError as error:
            print("another module has the name 'json'" in str(error.__notes__))
        json.__name__ = "own_json"
        print(pool.apply(text, (1,)))
        json = own
        print(pool.apply(text, (1,)))
    pool.join()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_a_module_that_has_the_name_of_another_is_refused(tmp_path):
    """A module that the script has made is not sent by a name that leads to another module."""
    out = scripts.program(tmp_path, SAME_AS_ANOTHER)
    assert out.split() == ["1", "True", "fake", "1"]


FLAGS = """
import sys
import types

class Flags(types.ModuleType):
    _fast = True
    @property
    def fast(self):
        return self._fast
    @fast.setter
    def fast(self, value):
        type(self)._fast = bool(value)
    broken = False
    @property
    def mode(self):
        if type(self).broken:
            raise RuntimeError("the modes differ")
        return self._mode
    @mode.setter
    def mode(self, value):
        type(self)._mode = value
    def __init__(self, name):
        super().__init__(name)
        self.table = Table()

class Table:
    def __bool__(self):
        raise ValueError("ambiguous")

sys.modules[__name__] = Flags(__name__)
"""
PROPERTIES = """
import package.flags
import xpool

def use():
    return package.flags.fast, sorted(vars(package.flags))

def mode():
    return package.flags.mode

def never():
    package.flags.table.shape = 2, 2

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        for value in "", 1, False, True:
            package.flags.fast = value
            print(pool.apply(use) == use(), use()[0], end=" ")
        package.flags.mode = {"a": 1}
        print(pool.apply(mode), end=" ")
        type(package.flags).broken = True  # the property raises from now on
        print(pool.apply(use) == use())
    pool.join()
"""


def install_package(tmp_path, monkeypatch, module, text):
    """Let programs import a module of an installed package."""
    package = tmp_path / "site-packages" / "package"
    package.mkdir(parents=True)
    scripts.write(package / "__init__.py", "")
    scripts.write(package / f"{module}.py", text)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def test_what_is_assigned_to_a_property_of_an_installed_module(tmp_path, monkeypatch):
    """The module's class has it, as for `torch.backends.cudnn.enabled`."""
    install_package(tmp_path, monkeypatch, "flags", FLAGS)
    out = scripts.program(tmp_path, PROPERTIES)
    assert out == "True False True True True False True True {'a': 1} True\n"


CONFIG = """
import sys
import types

class Config(types.ModuleType):
    values = {"limit": 8, "quiet": False}
    def __setattr__(self, name, value):
        self.values[name] = value
    def __getattr__(self, name):
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

sys.modules[__name__].__class__ = Config
"""
CONFIGURED = """
import package.config
import xpool

package.config.limit = 64

def use():
    return package.config.limit, package.config.quiet

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(use))
        package.config.quiet, package.config.limit = True, 8
        print(pool.apply(use))
    pool.join()
"""


def test_what_is_assigned_to_a_module_that_keeps_it_elsewhere(tmp_path, monkeypatch):
    """Its class has a ``__setattr__``, as for ``torch._dynamo.config``."""
    install_package(tmp_path, monkeypatch, "config", CONFIG)
    assert scripts.program(tmp_path, CONFIGURED) == "(64, False)\n(8, True)\n"


FETCHED = """
import importlib.util
import pathlib
import sys
import xpool

FILES = {"package": "package/__init__.py", "package.job": "package/job.py"}

class Finder:
    def find_spec(self, name, path=None, target=None):
        file = FILES.get(name)
        return None if file is None else importlib.util.spec_from_file_location(name, SOURCE / file)

sys.meta_path.append(Finder())
SOURCE = pathlib.Path(__file__).parent / "source"
import package.job

spec = importlib.util.spec_from_file_location("plugins.job", SOURCE / "package" / "job.py")
plugin = sys.modules["plugins.job"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
jobs = package.job.Job(), plugin.Job()

def use(x):
    return [job.scaled(x) for job in jobs], plugin.scaled(x)

ALL = package.job.scaled, plugin.scaled, *(job.scaled for job in jobs), use

if __name__ == "__main__":
    for plugin.RATE in 3, 4:
        for one in ALL:
            with xpool.Pool(1) as pool:
                print(pool.apply(one, (2,)) == one(2), end=" ")
            pool.join()
"""


def test_modules_that_only_the_program_finds(tmp_path):
    """They are from a finder of its own, or below a package that does not exist. A worker makes
    the packages above those that it is sent."""
    source = tmp_path / "source" / "package"
    source.mkdir(parents=True)
    scripts.write(source / "__init__.py", "")
    job = "class Job:\n    def scaled(self, x):\n        return scaled(x)\n"
    scripts.write(source / "job.py", f"RATE = 2\ndef scaled(x):\n    return RATE * x\n{job}")
    out = scripts.program(tmp_path, FETCHED)
    assert out.split() == ["True"] * 10


UNREGISTERED = """
import importlib.util
import pathlib
import sys
import xpool
import shared

def load(name):
    file = pathlib.Path(__file__).parent / "plugins" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

# The program keeps functions of one module, and the other module.
first = load("first")
connect, work, ITEMS = first.connect, first.work, first.ITEMS
del first
second = load("second")
held = [second.MISSING]

def both():
    return second.is_missing(), second.is_missing(held[0]), held[0] is second.MISSING

def items():
    return ITEMS

def given():
    return second.is_missing, second.made, second, work

if __name__ == "__main__":
    for context in "spawn", "fork":
        with xpool.Pool(1, initializer=connect, initargs=(3,), context=context) as pool:
            print(pool.apply(work), pool.apply(work), end=" ")
            print(pool.apply(second.is_missing), pool.apply(both))
            ITEMS.append(context)
            print(pool.apply(items) == ITEMS, pool.apply(work)[1:])
            is_missing, made, module, function = pool.apply(given)
            print(is_missing is second.is_missing, made(), module is second, function is work)
        pool.join()
"""


def test_modules_that_are_not_in_sys_modules(tmp_path):
    """`module_from_spec` does not put them there.  Their functions have the globals of one module
    in a worker, also if the program has no name for it: what an initializer sets stays."""
    (tmp_path / "plugins").mkdir()
    first = """
import shared
from shared import DATA
connection, ITEMS = None, []
def connect(to):
    global connection
    connection = [to]
def work():
    return connection, shared.DATA is DATA, ITEMS
"""
    second = """
MISSING = object()
def is_missing(x=MISSING):
    return x is MISSING
def make():
    return lambda: is_missing()
made = make()
"""
    scripts.write(tmp_path / "plugins" / "first.py", first)
    scripts.write(tmp_path / "plugins" / "second.py", second)
    out = scripts.program(tmp_path, UNREGISTERED, shared="DATA = {'a': [1]}")
    seen, same = "True (True, True, True)", "True True True True"
    for items, line in zip(("[]", "['spawn']"), range(2)):
        assert out.splitlines()[3 * line] == f"([3], True, {items}) ([3], True, {items}) {seen}"
    assert out.splitlines()[2::3] == [same, same]
    assert out.splitlines()[1::3] == [
        "True (True, ['spawn'])",
        "True (True, ['spawn', 'fork'])",
    ]


SAME_NAMES = """
import importlib.util
import pathlib
import xpool

def load(name):
    file = pathlib.Path(__file__).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location("plugin", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

plugins = [load("first"), load("second")]
objects = [one.Plugin() for one in plugins]
functions = {one.NAME: one.work for one in plugins}

def same(x):
    return x

def names():
    return [one.NAME for one in plugins]

def used():
    return [one.run() for one in objects], [function() for function in functions.values()]

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        for _ in range(2):
            try:
                pool.apply(names)
            except NameError as error:
                print("another module has the name 'plugin'" in str(error.__notes__))
            print(pool.apply(used) == used(), pool.apply(objects[0].run) == objects[0].run())
            back = pool.map(same, objects)
            print([type(one) is type(two) for one, two in zip(back, objects)])
            for one in plugins:
                one.NAME += "!"
    pool.join()
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_modules_of_one_name(tmp_path):
    """Their functions and classes are sent by value.  The modules themselves are refused, because a
    name leads to one of them."""
    text = """
NAME = "{}"
def work():
    return NAME
class Plugin:
    def run(self):
        return NAME, work(), Plugin is type(self)
"""
    for name in "first", "second":
        scripts.write(tmp_path / f"{name}.py", text.format(name))
    out = scripts.program(tmp_path, SAME_NAMES)
    assert out.splitlines() == ["True", "True True", "[True, True]"] * 2


WITHOUT_A_PLACE = """
    import importlib.util
    import sys
    import own_config
    import xpool

    def load(path):
        spec = importlib.util.spec_from_file_location("twin", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    first, second = load(sys.argv[1]), load(sys.argv[1])
    made = {}
    exec("import own_config\\ndef rate(): return own_config.RATE, second()", made)
    made["second"] = second.rate

    if __name__ == "__main__":
        for function in first.rate, second.rate, made["rate"]:
            own_config.RATE += 1
            with xpool.Pool(1) as pool:
                assert pool.apply(function) == function(), (pool.apply(function), function())
    """


def test_globals_that_functions_without_a_module_read(tmp_path):
    """Functions of two modules of one name, and of `exec`, see the globals of other modules."""
    text = "def rate():\n    from own_config import RATE\n    return RATE"
    twin = scripts.write(tmp_path / "file_of_twin.py", text)
    assert scripts.program(tmp_path, WITHOUT_A_PLACE, twin, own_config="RATE = 7") == ""
