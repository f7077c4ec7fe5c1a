"""Modules under other names, names that lead to other modules, and imports inside functions."""

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
import short

def scaled(x):
    return short.scaled(x)
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

def replaced(x):
    import settings_of_tests
    return settings_of_tests.RATE

def halted(x):
    import left_out

def refused(x):
    import opened

ALL = module, names, below, at_top, computed, installed, instance, own, replaced

def show(pool):
    print(*(pool.apply(one, (1,)) == one(1) for one in ALL))

if __name__ == "__main__":
    with xpool.Pool(1, context=CONTEXT) as pool:
        show(pool)
        long_settings.RATE = OWN = made.RATE = 30
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
    every = " ".join(["True"] * 9)
    halted = "import of {} halted; None in sys.modules {}"
    assert out[:2] == [every] * 2
    assert out[2:4] == [halted.format("left_out", False), halted.format("opened", True)]
    assert out[4:] == ["No module named 'short'", every]


LEADS = """
import importlib
import importlib.util
import sys
import xpool
sys.path.insert(0, FOLDER)
import first, package, second

def load(name):
    spec = importlib.util.spec_from_file_location(f"plugin_{name}", f"{FOLDER}/{name}.txt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

lib = first
NAMES = ["second", "package"]
plugins = {name: load(name) for name in ("add", "sub")}

def by_global(x):
    return lib.RATE, lib.scaled(x)

def by_attribute(x):
    return package.lib.RATE, package.lib.scaled(x)

def late(x):
    import later
    return later.RATE, later.scaled(x)

def submodule(x):
    import package.inner
    return package.RATE, package.inner.RATE

def by_plugins(x):
    return {name: plugin.run(x) for name, plugin in plugins.items()}

def computed(x):
    return [importlib.import_module(name).RATE + sys.modules[name].RATE for name in NAMES]

def exported(x):
    return {name: getattr(first, name) for name in first.__all__}

def by_text(x):
    import package
    return getattr(package, "RATE"), getattr(package, "ADDED", None)

def by_vars(x):
    import package.inner
    return {name: value for name, value in vars(package.inner).items() if name.isupper()}

ALL = by_global, by_attribute, late, submodule, by_plugins, computed, exported, by_text, by_vars

def show(pool):
    answers = [pool.apply(one, (1,)) for one in ALL]
    print(*(answer == one(1) for one, answer in zip(ALL, answers)))

def main():
    global lib
    with xpool.Pool(1) as pool:
        for one in ALL:
            pool.apply(one, (1,))
        import later
        later.RATE = 8
        show(pool)
        lib = package.lib = second
        show(pool)
        second.RATE = package.RATE = 11
        package.inner.RATE = package.ADDED = package.inner.NEW = 12
        plugins["add"].DONE.append(1)
        first.__all__.append("RATE")
        show(pool)
    pool.join()

if __name__ == "__main__":
    main()
"""


def test_names_that_lead_to_other_modules(tmp_path):
    """What functions read in a module is found again if a name leads to another module, if the
    program imports one later, and in modules that only a container has."""
    (tmp_path / "package").mkdir()
    for name, text in (
        *((name, f"__all__ = []\n{SETTINGS}") for name in ("first", "second", "later")),
        ("package/__init__", "import first as lib\nRATE = 1\n"),
        ("package/inner", "RATE = 2\n"),
        ("add.txt", "DONE = []\ndef run(x): return x + len(DONE)\n"),
        ("sub.txt", "def run(x): return x - 1\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    text = LEADS.replace("FOLDER", repr(str(tmp_path)))
    out = scripts.run_ok([scripts.write(tmp_path / "leads.py", text)])
    assert out == f"{' '.join(['True'] * 9)}\n" * 3


BY_PATH = """
import importlib
import first
import xpool

paths = ["first.scaled"]

def find(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)

def call(x):
    return [find(path)(x) for path in paths]

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(call, (1,)) == call(1))
        first.RATE = 5
        print(pool.apply(call, (1,)) == call(1))
        first.scaled = lambda x: "other"
        print(pool.apply(call, (1,)) == call(1))
    pool.join()
"""


def test_functions_that_code_finds_by_a_path_that_is_a_text(tmp_path):
    """They see the data of their modules, although no name in the code leads to them."""
    (tmp_path / "first.py").write_text(SETTINGS)
    out = scripts.run_ok([scripts.write(tmp_path / "paths.py", BY_PATH)])
    assert out == "True\n" * 3


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
    out = scripts.run_ok([scripts.write(tmp_path / "installed.py", text)])
    assert out.splitlines()[-1] == "[]"
