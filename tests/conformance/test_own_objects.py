"""Objects of the script that a plain copy would change."""

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

MEMBERS = """
import enum
import functools
import xpool

class Scale:
    def __init__(self, k):
        self.k = k

# From 3.13 on, a partial in the body of an enumeration is no member by itself.
member = getattr(enum, "member", lambda value: value)

class Kind(enum.Enum):
    MISSING = object()
    TWICE = Scale(2)
    LARGER = member(functools.partial(max, 5))
    ROWS = [1]
    AGAIN = TWICE
    def of(self, x, other=None):
        return self.value.k * x, other is Kind.MISSING

class Flags(enum.Flag):
    A = 1
    B = 2

class Named(enum.Enum):
    ONE = 1
    def __reduce_ex__(self, protocol):
        return Named, (1,)

ITEMS = [*Kind, Flags.A, Flags.A | Flags.B, Named.ONE]

def use(x, unset=Kind.MISSING):
    table = {Kind.MISSING: 1, Flags.A: 2}
    same = unset is Kind.MISSING, ITEMS[0] is unset, Kind.AGAIN is Kind.TWICE
    return same, table[unset], Kind.TWICE.of(x, unset), Kind.LARGER.value(7), Kind.ROWS.value

def places(one):
    return [one is other for other in ITEMS]

def back(x):
    return ITEMS

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(use, (1,)) == use(1))
        Kind.TWICE.value.k = 3
        Kind.ROWS.value.append(2)
        print(pool.apply(use, (1,)) == use(1))
        print(pool.map(places, ITEMS) == [*map(places, ITEMS)])
        print(all(one is other for one, other in zip(ITEMS, pool.apply(back, (1,)))))
    pool.join()
"""


def test_members_of_enumerations_whose_values_equal_no_copy(tmp_path):
    """They are the same members in globals, defaults, arguments and results."""
    out = scripts.run_ok([scripts.write(tmp_path / "members.py", MEMBERS)])
    assert out == "True\n" * 4


ITEMS_AS_ATTRIBUTES = """
import collections
import xpool

class Options(dict):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.__dict__ = self

class Saved(Options):
    def __getstate__(self):
        return dict(self)
    def __setstate__(self, state):
        self.update(state, loaded=True)

class Plain(collections.OrderedDict):
    pass

options = Options(rate=1, net=Options(depth=2))
options.self = options
inner = options.net
saved = Saved(a=1)
plain = Plain(z=1, a=2)
plain.extra = 3

def trial(x):
    options.update(rate=x)
    inner.depth = x
    same = options.self is options, options.net is inner
    return same, options.rate, options["rate"], options.net["depth"]

def others(x):
    return saved.get("loaded"), list(plain), plain.extra

def of(one):
    one.rate = 7
    return one["rate"], type(one) is Options

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(trial, (5,)))
        options.rate = 8
        print(pool.apply(trial, (6,)))
        print(pool.apply(others, (1,)), pool.apply(of, (options,)))
    pool.join()
"""


def test_dicts_whose_attributes_are_their_items(tmp_path):
    """``self.__dict__ = self``: a worker that sets an item sees it as an attribute."""
    out = scripts.run_ok([scripts.write(tmp_path / "options.py", ITEMS_AS_ATTRIBUTES)])
    assert out.splitlines() == [
        "((True, True), 5, 5, 5)",
        "((True, True), 6, 6, 6)",
        "(True, ['z', 'a'], 3) (7, True)",
    ]


DRAWS = """
import functools
import random
from random import random as draw
import numpy as np
import xpool

between = functools.partial(random.uniform, 0, 1)
normal = np.random.standard_normal
table = {"choice": random.choice}

class Noise:
    def __init__(self):
        self.source = random.gauss
    def first(self, source=random.random):
        return self.source(0, 1), source()

noise = Noise()

def drawn(seed):
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
    return draw(), between(), normal(), table["choice"](range(10**9)), *noise.first()

def of(source):
    random.seed(3)
    return source()

if __name__ == "__main__":
    with xpool.Pool(2) as pool:
        print(pool.apply(drawn, (3,)) == drawn(3))
        print(pool.map(of, [random.random, draw]) == [of(draw)] * 2)
    pool.join()
    with xpool.Pool(2) as pool:
        first, second = pool.run_all(drawn, None)
        print([one != other for one, other in zip(first, second)])
    pool.join()
"""


def test_functions_that_draw_random_numbers_under_other_names(tmp_path):
    """They draw from the worker's own generator, which a task can seed."""
    pytest.importorskip("numpy")
    out = scripts.run_ok([scripts.write(tmp_path / "draws.py", DRAWS)])
    assert out.splitlines() == ["True", "True", str([True] * 6)]


STREAMS = """
import functools
import os
import sys
import types
import xpool

error = sys.stderr
data = sys.stdout.buffer
write = sys.stderr.write
say = functools.partial(print, file=sys.stderr)

class Printer:
    def __init__(self, stream=sys.stdout):
        self.stream = stream

printer = Printer()

def own(x, out=sys.stdout):
    say("said")
    write("written ")
    streams = sys.stdout, sys.stderr, sys.stdout.buffer, sys.stdout
    return [one is other for one, other in zip((out, error, data, printer.stream), streams)]

def same(stream):
    return stream is sys.stderr, environment is os.environ

environment = os.environ
OPTIONS = {"rate": 1}
SHOWN = types.MappingProxyType(OPTIONS)

def shown(x):
    OPTIONS["rate"] = x
    return SHOWN["rate"]

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(own, (1,)), pool.apply(same, (sys.stderr,)))
        print(pool.apply(shown, (5,)))
        print(pool.apply(lambda: sys.stdout) is sys.stdout)
    pool.join()
"""


def test_standard_streams_and_views_of_dicts(tmp_path):
    """Standard streams and `os.environ` are the worker's own; a read-only view shows the dict that
    tasks change."""
    done = scripts.run([scripts.write(tmp_path / "streams.py", STREAMS)])
    assert done.stdout.splitlines() == ["[True, True, True, True] (True, True)", "5", "True"], (
        done.stderr
    )
    assert "said" in done.stderr and "written" in done.stderr


AGAIN = """
import xpool
import lib

CLASS = '''
class Model:
    class Part:
        number = {0}
        constant = 2
    def run(self):
        return {0}
    constant = [1]
model = Model()
lib.kept = [model]
table = {{"model": Model, "part": Model.Part, "large": [model] * 40000}}
'''

def own(x):
    return model.run(), type(model) is Model, lib.run(), table["model"] is Model

def inside(x):
    return table["part"] is Model.Part, table["part"].number, table["large"][-1].run()

def constants(x):
    return Model.constant, Model.Part.constant

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        for number in range(3):  # as a cell of a notebook that runs again
            exec(CLASS.format(number))
            print(pool.apply(own, (1,)) == own(1), pool.apply(inside, (1,)) == inside(1))
            print(pool.apply(constants, (1,)))
    pool.join()
"""


def test_a_class_that_is_defined_again_with_its_instances(tmp_path):
    """Data that refer to it by its name have the new class, though their bytes are the same."""
    (tmp_path / "lib.py").write_text("kept = []\ndef run():\n    return kept[0].run()\n")
    out = scripts.run_ok([scripts.write(tmp_path / "again.py", AGAIN)])
    assert out == "True True\n([1], 2)\n" * 3


STRATEGIES = """
import xpool
import lib

class Plain:
    def run(self):
        return "plain"

class Other(Plain):
    def run(self):
        return "other", super().run()

plain = Plain()

def state(x):
    unset = lib.UNSET is lib.get.__defaults__[0], lib.get(), lib.get(lib.UNSET)
    return lib.run(), lib.strategy is plain, unset

def given(default=lib.UNSET):
    return default is lib.UNSET

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        for lib.strategy in plain, Other(), lib.First(), plain:
            print(pool.apply(state, (1,)) == state(1), pool.apply(given))
    pool.join()
"""
LIB = """
class First:
    def run(self):
        return "first"
class Unset:
    pass
UNSET = Unset()
strategy = None
def run():
    return strategy.run()
def get(x=UNSET):
    return x is UNSET
"""


def test_objects_without_state_that_the_script_assigns_to_an_own_module(tmp_path):
    """They arrive, and are not taken for what the module's import has made under that name."""
    (tmp_path / "lib.py").write_text(LIB)
    out = scripts.run_ok([scripts.write(tmp_path / "strategies.py", STRATEGIES)])
    assert out == "True True\n" * 4


REPLACED = """
import xpool
import lib

def step(x):
    return x + 1

class Job:
    own = staticmethod(step)
    other = staticmethod(lib.work)
    def __init__(self, first=step, second=lib.work):
        self.both = first, second
    def run(self, x):
        return [one(x) for one in self.both]

def use(x):
    return Job.own(x), Job.other(x), Job().run(x), step(x)

def workers(first):  # those of the second pool get the class for the first time
    print(first.apply(use, (1,)) == use(1), end=" ")
    with xpool.Pool(1) as second:
        print(second.apply(use, (1,)) == use(1))
    second.join()

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        workers(pool)
        def step(x):
            return x + 100
        lib.work = lambda x: "new"
        workers(pool)
    pool.join()
"""


def test_a_class_keeps_functions_whose_names_lead_elsewhere_now(tmp_path):
    """A static method and a default stay the function that the class was defined with."""
    (tmp_path / "lib.py").write_text("def work(x):\n    return 'old', x\n")
    out = scripts.run_ok([scripts.write(tmp_path / "replaced.py", REPLACED)])
    assert out == "True True\n" * 2


NESTED = """
import xpool

class Model:
    class Config:
        rate = 1
        class Inner:
            rows = [1]

def use(x):
    return Model.Config.rate, Model.Config.Inner.rows

if __name__ == "__main__":
    Model.Config = type("Config", (Model.Config,), {"rate": 7})
    with xpool.Pool(1) as pool:
        print(pool.apply(use, (1,)))
        Model.Config.Inner.rows.append(2)
        print(pool.apply(use, (1,)))
    pool.join()
"""


def test_a_class_inside_one_that_was_replaced_by_its_subclass(tmp_path):
    """Its attributes arrive, although its name leads to it through the subclass."""
    out = scripts.run_ok([scripts.write(tmp_path / "nested.py", NESTED)])
    assert out.splitlines() == ["(7, [1])", "(7, [1, 2])"]


def test_a_module_that_the_program_has_removed(tmp_path):
    """New workers do without a module that is gone from `sys.modules`, and whose file is gone."""
    scripts.write(tmp_path / "gone_soon.py", "RATE = 2\n\ndef rate():\n    return RATE\n")
    text = """
        import os, sys, xpool
        sys.dont_write_bytecode = True
        import gone_soon
        gone_soon.RATE = 3

        def other():
            return "other"

        if __name__ == "__main__":
            with xpool.Pool(1, maxtasksperchild=1) as pool:
                print(pool.apply(gone_soon.rate))
                os.remove(gone_soon.__file__)
                del sys.modules["gone_soon"], gone_soon
                print(pool.apply(other), pool.apply(other))
            pool.join()
    """
    script = scripts.write(tmp_path / "program.py", text)
    assert scripts.run_ok([script]) == "3\nother other\n"
