"""Modules of the program that are edited and loaded again."""

from __future__ import annotations

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

EDITS = r'''
import importlib
import os
import pathlib
import sys
import xpool

folder = pathlib.Path(__file__).parent / "edited_package"
times = iter(range(1, 100))

def write(k):
    """Write a package; its values depend on `k`."""
    for name, text in {
        "__init__": "from .first import use as used\n",
        "second": f"K = {k}\ndef helper(x): return x * 1000 * {k}\n",
        "third": "from .first import Base\nclass Grand(Base): pass\n",
        "first": f"""
import dataclasses, enum, functools, os
from . import second
from .second import helper
os.environ["EDITED"] = "{k}"
class Color(enum.Enum):
    RED = {k}
@dataclasses.dataclass
class Point:
    x: int
    def scaled(self): return self.x * {k}
class Base:
    tag, kept = {k}, "kept"
    def who(self): return self.tag, self.kept, {k}
class Child(Base):
    def who(self): return ("child", *super().who())
instance = Child()
@functools.lru_cache
def cached(x): return x + {k}
def decorate(function):
    @functools.wraps(function)
    def wrapper(*args): return {k}, function(*args)
    return wrapper
@decorate
def decorated(x): return x * {k}
def use(x): return x + {k}, helper(x), second.helper(x)
def late(x):
    from .second import helper as again
    import edited_package.second
    return again(x), edited_package.second.K
""",
    }.items():
        (folder / f"{name}.py").write_text(text)
        time = next(times)
        os.utime(folder / f"{name}.py", (time, time))

def task(x):
    one, p = package.first, Point(x)
    return (
        use(x), one.use(x), package.used(x), one.Color.RED.value, p.scaled(), one.Point(x).scaled(),
        one.Child().who(), one.instance.who(), isinstance(one.instance, one.Base), one.cached(x),
        one.decorated(x), one.late(x), type(p) is Point, third.Grand().who(),
        third.Grand.__base__ is one.Base, isinstance(third.Grand(), third.Base),
    )

def same(x):
    return x

def compare(pool, name):
    for _ in range(2):
        got = pool.apply(task, (3,))
        assert got == task(3), (name, got, task(3))
    for one in package.first.Color.RED, package.first.Point(1), Point(2):
        back = pool.apply(same, (one,))
        assert back == one and type(back) is type(one), (name, one, back)
    for function in package.first.use, package.first.decorated, package.first.cached, use:
        assert pool.map(function, range(3)) == list(map(function, range(3))), name

def main():
    global package, third, use, Point
    sys.dont_write_bytecode = True
    folder.mkdir()
    write(1)
    import edited_package as package
    from edited_package import third
    from edited_package.first import use, Point
    with xpool.Pool(1) as pool, xpool.Pool(1) as late:
        def check(name):
            compare(pool, name)
            with xpool.Pool(1) as new:
                compare(new, "new pool, " + name)
            print(name)
        check("at first")
        write(2)
        check("edited")
        second = (folder / "second.py").read_text()
        (folder / "second.py").write_text("def (")
        check("in the middle of an edit")
        (folder / "second.py").write_text(second)
        for module in package.second, package.first, package:
            importlib.reload(module)
            check(f"{module.__name__} is loaded again")
        compare(late, "a pool without a task so far")
        use, Point = package.first.use, package.first.Point
        check("names of the script")
        importlib.reload(package.first)
        check("loaded again unchanged")
        for name in [one for one in sys.modules if one.startswith("edited_package")]:
            del sys.modules[name]
        write(3)
        import edited_package as package
        from edited_package import third
        from edited_package.first import use, Point
        check("imported again")
    for one in pool, late:
        one.join()

if __name__ == "__main__":
    main()
'''


def test_modules_that_are_edited_and_loaded_again(tmp_path):
    """Tasks see the module that the program has, and not the one of the file or an earlier one."""
    out = scripts.program(tmp_path, EDITS)
    assert len(out.splitlines()) == 9


CELLS = """
import os
import pathlib
import sys
from IPython.core.interactiveshell import InteractiveShell

sys.dont_write_bytecode = True
file = pathlib.Path(__file__).with_name("autoreloaded.py")
derived = "from autoreloaded import Box\\nclass Small(Box): pass"
file.with_name("derived_from_it.py").write_text(derived)
shell = InteractiveShell.instance()

def write(k):
    more = "def new(x): return -x" if k > 1 else ""
    text = f"class Box:\\n    def go(self): return {k}\\ndef scaled(x): return {k} * x\\n{more}"
    file.write_text(text)
    os.utime(file, (k, k))

def run(text):
    done = shell.run_cell(text)
    done.raise_error()

if __name__ == "__main__":
    write(1)
    run("%load_ext autoreload\\n%autoreload 2")
    run('''
import xpool, autoreloaded
from autoreloaded import Box, scaled
from derived_from_it import Small
box = Box()
def task(x):
    known = isinstance(Small(), autoreloaded.Box)
    return scaled(x), Box().go(), box.go(), autoreloaded.Box().go(), Small().go(), known
pool = xpool.Pool(1)
''')
    for k in 1, 2, 3:
        write(k)
        run("assert pool.apply(task, (3,)) == task(3)\\nprint(*task(3))")
        run("assert pool.map(scaled, [1]) == [scaled(1)]")
    run("assert pool.apply(autoreloaded.new, (3,)) == -3")
    run("with xpool.Pool(1) as other: assert other.apply(task, (3,)) == task(3)")
    run("other.join(); pool.terminate(); pool.join()")
"""


def test_autoreload_in_a_notebook(tmp_path):
    """After an edit of a module, cells and the tasks of an older pool use the new version."""
    pytest.importorskip("IPython", reason="cells are run by IPython")
    out = scripts.program(tmp_path, CELLS)
    assert out.splitlines() == ["3 1 1 1 1 True", "6 2 2 2 2 True", "9 3 3 3 3 True"]


BEFORE = """
import importlib
import pathlib
import sys

sys.dont_write_bytecode = True
file = pathlib.Path(__file__).with_name("loaded_twice.py")
file.write_text("class Base:\\n    def who(self): return 1")
extends = "from loaded_twice import Base\\nclass Child(Base): pass"
file.with_name("extends_it.py").write_text(extends)
import extends_it
import loaded_twice
import xpool

file.write_text("class Base:\\n    def who(self): return 'two'")
importlib.reload(loaded_twice)

def task():
    return extends_it.Child().who(), isinstance(extends_it.Child(), loaded_twice.Base)

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(task), task())
    pool.join()
"""


def test_a_module_that_is_loaded_again_before_the_first_pool(tmp_path):
    """A class of another module still extends the class that it was made with."""
    out = scripts.program(tmp_path, BEFORE)
    assert out == "(1, False) (1, False)\n"


EDITED = """
import os
import pathlib
import sys

sys.dont_write_bytecode = True
file = pathlib.Path(__file__).with_name("edited_later.py")
file.write_text("def number(): return 1")
import edited_later
import xpool

def version(_):
    return edited_later.number()

def other(_):
    return "other"

def kill(_):
    os.kill(os.getpid(), 9)

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.map(other, [0]), pool.map(version, [0]))
        file.write_text("def number(): return 'two'")
        print(pool.map(version, [0]))
        try:
            pool.map(kill, [0])
        except xpool.WorkerDied:
            print(pool.map(version, [0]))
    pool.join()
"""


def test_a_worker_that_imports_an_edited_module_warns(tmp_path):
    """A worker that starts after an edit imports the new version, and says so."""
    done = scripts.run([scripts.write(tmp_path / "later.py", EDITED)])
    assert done.stdout.splitlines() == ["['other'] [1]", "[1]", "['two']"]
    assert done.stderr.count("a worker has imported edited_later after the program") == 1
