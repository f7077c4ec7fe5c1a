"""What the script puts in the place of functions and data of modules, and takes back."""

import sys

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

BACK = """
import colorsys
import contextlib
import textwrap
import xpool

class Wide(textwrap.TextWrapper):
    pass

@contextlib.contextmanager
def patched(value):
    own = colorsys.yiq_to_rgb, colorsys.ONE_THIRD, textwrap.TextWrapper
    colorsys.yiq_to_rgb = lambda *args: value
    colorsys.ONE_THIRD, textwrap.TextWrapper = value, Wide
    try:
        yield
    finally:
        colorsys.yiq_to_rgb, colorsys.ONE_THIRD, textwrap.TextWrapper = own

def other(x):
    return x

def use(x):
    import colorsys as late
    return late.yiq_to_rgb(x, 0, 0), late.ONE_THIRD, textwrap.TextWrapper.__name__

def check(pool, function):
    print(pool.apply(function, (1,)) == function(1), end=" ")

if __name__ == "__main__":
    for first in use, other:  # does the worker import the module before it is patched?
        with xpool.Pool(1) as pool:
            check(pool, first)
            with patched(3):
                check(pool, other)
            check(pool, use)
            with patched(4):
                check(pool, use)
            check(pool, use)
        pool.join()
"""


def test_patches_of_installed_modules_that_are_taken_back(tmp_path):
    """Before and after, a worker's own function runs with its own module's globals."""
    out = scripts.run_ok([scripts.write(tmp_path / "back.py", BACK)])
    assert out.split() == ["True"] * 10


SETTING = "root = capwords = c = None\ndef get():\n    return root, capwords, c\n"
SAME_NAME = """
import calendar
import string
import state
import xpool
from logging import root

def names(x):
    return [getattr(one, "name", None) for one in state.get()], state.get()[1] is string.capwords

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(names, (1,)) == names(1))
        state.root, state.capwords, state.c = root, string.capwords, calendar.c
        print(pool.apply(names, (1,)) == names(1))
        print(pool.apply(lambda: state.c is calendar.c))
    pool.join()
"""


def test_objects_of_installed_modules_that_own_modules_get_later(tmp_path):
    """An own module gets an object that an installed module has under the same name."""
    (tmp_path / "state.py").write_text(SETTING)
    out = scripts.run_ok([scripts.write(tmp_path / "same.py", SAME_NAME)])
    assert out == "True\n" * 3


PLUGIN = """
import functools

rate = 2
def scale(x):
    return x * rate, helper(x)
def helper(x):
    return x + rate
class Job:
    class Part:
        def run(self, x):
            return helper(x)
    def __init__(self, n):
        self.n = n
    def run(self, x):
        return helper(self.n) + x
@functools.cache
def cached(x):
    return helper(x)
"""
LOADED = """
import importlib.util
import xpool

spec = importlib.util.spec_from_loader("plugin", None)
plugin = importlib.util.module_from_spec(spec)
exec(open(FILE).read(), vars(plugin))

def use(x):
    return plugin.scale(x), plugin.Job(1).run(x)

def back(x):
    return plugin.scale, plugin.Job, plugin.Job(x)

if __name__ == "__main__":
    functions = plugin.scale, plugin.Job(3).run, plugin.Job.Part().run, plugin.cached
    with xpool.Pool(1) as pool:
        for plugin.rate in 2, 5:  # other functions refer to the module from the second turn on
            plugin.cached.cache_clear()
            print([pool.apply(one, (plugin.rate,)) == one(plugin.rate) for one in functions])
            print(pool.apply(use, (1,)) == use(1), plugin.rate)
        scale, Job, job = pool.apply(back, (1,))
        print(scale is plugin.scale, Job is plugin.Job, type(job) is Job)
    again = xpool.pickle.loads(xpool.pickle.dumps(plugin.scale))
    print(again(1) == plugin.scale(1))
    pool.join()
"""


def test_functions_of_modules_that_the_program_has_made(tmp_path):
    """A module that is not in `sys.modules`: its functions and objects are sent directly, also
    after a function that names the module."""
    file = tmp_path / "plugin.txt"
    file.write_text(PLUGIN)
    text = LOADED.replace("FILE", repr(str(file)))
    out = scripts.run_ok([scripts.write(tmp_path / "loaded.py", text)])
    turn = "[True, True, True, True]\nTrue {}\n"
    assert out == turn.format(2) + turn.format(5) + "True True True\nTrue\n"


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
    out = scripts.run_ok([scripts.write(tmp_path / "named.py", SAME_AS_ANOTHER)])
    assert out.split() == ["1", "True", "fake", "1"]
