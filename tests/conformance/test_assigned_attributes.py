"""What the program assigns to classes and functions of its own modules, and names that code finds
without naming them."""

from __future__ import annotations

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

LIB = """
import collections
import enum
import functools
from typing import NamedTuple

class Small:
    name = "small"

class Large:
    name = "large"

class Fixed:
    def __init__(self, value):
        self.value = value
    def __get__(self, obj, kind=None):
        return self.value

class Memo:
    def __init__(self, func):
        self.func, self.cache = func, {}
        functools.update_wrapper(self, func)
    def __get__(self, obj, kind=None):
        return self if obj is None else self.cache or self.func(obj)

class Odd:
    def __init__(self):
        self.rest = (one for one in "")  # cannot be pickled
    def __get__(self, obj, kind=None):
        return "odd"

class Job:
    odd = Odd()
    kind = Small
    field = Fixed("a")
    Row = collections.namedtuple("Row", "x")
    key = staticmethod(lambda row: row.x)
    number = 0
    def slow(self):
        return "slow"
    def fast(self):
        return "fast"
    def scale(self, by):
        return by
    @property
    def half(self):
        return "half"
    @functools.cached_property
    def kept(self):
        return "kept"
    @Memo
    def memo(self):
        return "memo"
    first = slow

class Color(enum.Enum):
    RED = 1
    def text(self):
        return self.name

class Point(NamedTuple):
    x: int
    def norm(self):
        return self.x

def row():
    return Job.Row(5)

def called():
    return called.hook(), called.kind.name

called.hook = row
called.kind = Small
"""
ASSIGNED = """
import functools
import xpool
import lib

def use(x):
    job = lib.Job()
    own = isinstance(lib.row(), lib.Job.Row), lib.Job.key(lib.Job.Row(3))
    of_job = job.kind.name, job.odd, job.field, job.slow(), job.half, job.kept, job.memo
    of_job += (job.first(),)
    others = lib.Color.RED.text(), getattr(lib.Color, "extra", 0), lib.Point(2).norm()
    return own, of_job, others, lib.called(), repr(lib.Job.number)

class Mine:
    name = "mine"

def changes():
    before = [(lib.Job, name, value) for name, value in vars(lib.Job).items() if name[0] != "_"]
    yield lib.Job, "kind", lib.Large
    yield lib.Job, "kind", Mine
    yield lib.Job, "field", lib.Fixed("b")
    yield lib.Job, "slow", lib.Job.fast
    yield lib.Job, "half", property(lambda self: "new")
    yield lib.Job, "kept", property(lambda self: "other")
    yield lib.Job, "slow", functools.partialmethod(lib.Job.scale, 5)
    yield lib.Job, "number", False
    yield lib.Job, "number", 0.0
    yield lib.Job, "number", -0.0
    yield lib.Color, "extra", 3
    yield lib.Color, "text", lambda self: "text"
    yield lib.Point, "norm", lambda self: "norm"
    yield lib.called, "hook", lambda: "hook"
    yield lib.called, "hook", lib.row
    yield lib.called, "kind", Mine
    lib.Job.memo.cache["x"] = 1
    yield from before

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(use, (1,)) == use(1))
        for owner, name, value in changes():
            setattr(owner, name, value)
            if pool.apply(use, (1,)) != use(1):
                print(name, value, pool.apply(use, (1,)), use(1))
        with xpool.Pool(1) as second:
            print(second.apply(use, (1,)) == use(1))
        second.join()
    pool.join()
"""


def test_what_the_program_assigns_to_classes_and_functions_of_an_own_module(tmp_path):
    """Methods, descriptors, classes and numbers arrive; what the import has made stays."""
    (tmp_path / "lib.py").write_text(LIB)
    assert scripts.run_ok([scripts.write(tmp_path / "assigned.py", ASSIGNED)]) == "True\nTrue\n"


LATE = """
import builtins
import importlib
import pickle
import sys
import xpool

run = eval

class Base:
    pass

class Reader:
    def get(self, name):
        return globals().get(name)
    def names(self):
        return sorted(one.__name__ for one in Base.__subclasses__())

reader = Reader()

def method(name):
    return Reader().get(name), reader.names()

def classes(name):
    return sorted(one.__name__ for one in Base.__subclasses__())

def loaded(data):
    return type(pickle.loads(data)).__name__

def imported(name):
    return getattr(importlib.import_module("__main__"), name, None)

def by_builtins(name):
    return builtins.eval(name)

def by_alias(name):
    return run(name)

def by_space(name):
    return by_space.__globals__[name], sys._getframe().f_globals[name]

def check(function, by_pickle, numbers):
    with xpool.Pool(1) as pool:
        for number in numbers:
            exec(f"class Model{number}(Base): pass", globals())
            name = f"Model{number}"
            item = pickle.dumps(globals()[name]()) if by_pickle else name
            if pool.apply(function, (item,)) != function(item):
                print(function, pool.apply(function, (item,)), function(item))
    pool.join()

if __name__ == "__main__":
    check(loaded, True, (0, 1))
    numbers = iter(range(2, 99))
    for function in method, classes, imported, by_builtins, by_alias, by_space, reader.get:
        check(function, False, [next(numbers) for _ in range(2)])
    print("done")
"""


def test_globals_that_come_later_and_that_no_code_names(tmp_path):
    """Functions and methods that may use any global see a new one."""
    out = scripts.run_ok([scripts.write(tmp_path / "late.py", LATE)])
    assert out == "done\n"


EXACT = """
import xpool

rate = 1
options = {"n": 1}

class Config:
    debug = 0

def use(x):
    return repr((rate, options, Config.debug))

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        for rate in 1, True, 1.0, 1 + 0j, 0.0, -0.0, 0, False, 0, "0", b"0", None:
            options["n"] = Config.debug = rate
            print(pool.apply(use, (1,)) == use(1), end=" ")
    pool.join()
"""


def test_values_that_are_equal_and_not_the_same(tmp_path):
    """A global that was 1 and is True now, or 1.0, arrives as what it is."""
    out = scripts.run_ok([scripts.write(tmp_path / "exact.py", EXACT)])
    assert out.split() == ["True"] * 12


FRAMES = """
import pandas
import xpool

low, factor = 1, 3
text = "a > @factor"
frame = pandas.DataFrame({"a": [1, 2, 3]})

def query(column):
    return len(frame.query(f"{column} > @low")), frame.eval("a * @factor").tolist()

def evaluate(column):
    return int(pandas.eval("low + factor"))

def computed(column):
    return len(frame.query(text))

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        for low in 1, 2:
            print(pool.apply(query, ("a",)) == query("a"), pool.apply(evaluate, ("a",)) == low + 3)
        factor = 2
        print(pool.apply(query, ("a",)) == query("a"), pool.apply(evaluate, ("a",)) == 4)
    with xpool.Pool(1) as pool:
        try:
            pool.apply(computed, ("a",))
        except NameError as error:
            said = "".join([*getattr(error, "__notes__", ()), str(error.__cause__)])
            print("no function of its tasks names it" in said)
    pool.join()
"""


def test_variables_in_texts_for_pandas(tmp_path):
    """`query` and `eval` find variables after @; the error of a text that is a global says why."""
    pytest.importorskip("pandas", reason="pandas is not installed")
    out = scripts.run_ok([scripts.write(tmp_path / "frames.py", FRAMES)])
    assert out == "True True\n" * 3 + "True\n"


SETUP = """
import timeit
import xpool

def hit():
    pass

def measure(x):
    return timeit.timeit("hit()", setup="from __main__ import hit", number=1)

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        try:
            pool.apply(measure, (1,))
        except ImportError as error:
            said = "".join([*getattr(error, "__notes__", ()), str(error.__cause__)])
            print("has 'hit', it was not sent to this worker" in said)
    pool.join()
"""


def test_an_import_from_the_script_in_a_text_says_why_it_fails(tmp_path):
    """A note names the global that no function names."""
    assert scripts.run_ok([scripts.write(tmp_path / "setup.py", SETUP)]) == "True\n"
