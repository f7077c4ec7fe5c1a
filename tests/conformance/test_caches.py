"""The results that functions of `functools.lru_cache` keep, in tasks."""

from __future__ import annotations

import ast

import pytest
from support import scripts
from support.tiers import also

pytestmark = pytest.mark.xpool_only

OWN = """
import functools

@functools.lru_cache(maxsize=None)
def options():
    return {}

def rate():
    return options()["rate"]
"""

CACHED = """
import functools
import sys
import own
import xpool

def made(call):
    @functools.wraps(call)
    def wrapper(*args, **kwds):
        calls.append(call.__name__)
        return call(*args, **kwds)
    return wrapper

calls = []

class Settings:
    rate = 1

@functools.lru_cache()
@made
def settings():
    return Settings()

@functools.cache
@made
def load(name, *, times=1):
    return [name] * times

@functools.lru_cache(maxsize=2, typed=True)
@made
def typed(x, y=0):
    return {"x": x}

@functools.lru_cache
def stream():
    return sys.stdout

same = settings()
same.rate = 5
load("a", times=2).append("b")
load((1, 2))
typed(1), typed(1.0), typed(2, y=3), typed(1.0)
stream()
own.options()["rate"] = 9

def look():
    del calls[:]
    found = settings().rate, settings() is same, load("a", times=2), load((1, 2)), own.rate()
    return found, typed(2, y=3), typed(1.0), type(stream()) is type(sys.stdout), calls

def keep(name):
    load(name)
    return load.cache_info().currsize

def rate():
    return settings().rate

def count():
    return load.cache_info().currsize, own.options.cache_info().currsize

if __name__ == "__main__":
    with xpool.Pool(1, context=sys.argv[1]) as pool:
        print([pool.apply(look), look()])
        print([pool.apply(keep, ("c",)), pool.apply(keep, ("d",)), load.cache_info().currsize])
        load("e")
        print(pool.apply(count))
        load.cache_clear()
        own.options.cache_clear()
        settings().rate = 6
        print(pool.apply(count), pool.apply(rate))
        own.options()["rate"] = 7
        print(pool.apply(own.rate))
"""


@pytest.mark.parametrize("context", ["forkserver", *also("fork", "spawn")])
def test_results_of_the_program(tmp_path, context):
    """A task gets the objects that the program has got from a cached function, and calls it only
    for others. What a worker's calls keep stays until the program's cache changes."""
    scripts.write(tmp_path / "own.py", OWN)
    path = scripts.write(tmp_path / "cached.py", CACHED)
    lines = scripts.run_ok([path, context]).splitlines()
    found, here = ast.literal_eval(lines[0])
    assert found[:4] == here[:4]
    assert found[0] == (5, True, ["a", "a", "b"], [(1, 2)], 9)
    assert (found[4], here[4]) == ([], [])
    assert lines[1:] == ["[3, 4, 2]", "(3, 1)", "(0, 0) 6", "7"]


LARGE = """
import functools
import xpool

@functools.cache
def table(n):
    return list(range(n))

table(50_000)

def look():
    return table(50_000)[7], table.cache_info().misses

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(look))
        table(50_000)[7] = -1
        print(pool.apply(look))
"""


def test_a_large_result_that_changes_in_place(tmp_path):
    """A large result is sent once, and again after a change of one element."""
    out = scripts.run_ok([scripts.write(tmp_path / "large.py", LARGE)])
    assert out == "(7, 0)\n(-1, 0)\n"


KEYS = """
import functools
import xpool

class Number(int):
    pass

VALUES = 1, 1.0, True, "a", None, (1, 2), ("x",), (), Number(3), 3, b"a", frozenset({1}), object
NAMED = {}, {"y": 1}, {"y": 1.0, "z": "a"}, {"z": "a", "y": 1.0}
calls = []

def keep(*args, **kwds):
    calls.append((args, kwds))
    return len(calls)

def ways():
    for one in VALUES:
        for args in (), (one,), (one, one), (one, 2, (one,)):
            for kwds in NAMED:
                yield args, kwds

each = functools.cache(keep)
typed = functools.lru_cache(maxsize=None, typed=True)(keep)
some = functools.lru_cache(maxsize=1000)(keep)
some_typed = functools.lru_cache(maxsize=1000, typed=True)(keep)

def all_of():
    found = [
        [function(*args, **kwds) for function in (each, typed, some, some_typed)]
        for args, kwds in ways()
    ]
    return found, len(calls)

if __name__ == "__main__":
    here = all_of()
    with xpool.Pool(1) as pool:
        print(pool.apply(all_of) == here == all_of())
"""


def test_all_kinds_of_arguments(tmp_path):
    """The results of calls with any arguments arrive: none of these functions is called again."""
    assert scripts.run_ok([scripts.write(tmp_path / "keys.py", KEYS)]) == "True\n"
