"""Workers do not compute top-level values of a script. They get the program's values."""

from __future__ import annotations

import pytest
from support import scripts
from support.limits import WAIT
from support.tiers import also

pytestmark = pytest.mark.xpool_only

TOP = """
import atexit
import collections
import dataclasses
import enum
import functools
import logging
import os
import random
import sys
import tempfile
import threading
import typing
import xpool

def count(what):
    with open(os.environ["COUNTED"], "a") as file:
        file.write(what)

def load(what):
    count(what)
    return list(range(10))

def scale(x):
    return x * FACTOR

FACTOR = 3
data = load("d")
scaled = [scale(x) for x in data]
data.sort(key=lambda x: -x)
data[0] = 99
big = [load("g")[:2] for _ in range(1)] * 20_000
first, *rest = load("f")
total = 0
total += sum(data)
with open(os.environ["COUNTED"]) as file:
    text = file.read()
words = []
for word in "a b c".split():
    words.append(word)
try:
    found = load("n")[100]
except IndexError as error:
    found = str(error)

class State:
    pass

START, STOP = State(), State()
NEXT = {START: STOP}
Point = collections.namedtuple("Point", "x y")
kind = typing.TypeVar("kind")
half = functools.partial(pow, 2)
doubled = lambda x: 2 * x
lock = threading.Lock()
log = logging.getLogger("a.b")
log.addHandler(logging.NullHandler())
seed = len(load("s"))
base = load("b")
random.seed(seed)
folder = tempfile.mkdtemp()
atexit.register(os.rmdir, folder)
registry = {}
counter = 0
MODEL = None

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Row:
    color: Color
    next: typing.Any = None
    def sums(self):
        return len(data) + len(self.__dict__)

row = Row(Color.RED, START)

def register(function):
    registry[function.__name__] = function
    return function

@register
def registered(x):
    return len(data)

def initialise(value):
    global MODEL
    MODEL = value

def bump(_):
    global counter
    counter += 1
    return counter

def nothing(x):
    return x

def values(_):
    numbers = first, rest, total, half(4), doubled(2), seed
    return data, scaled, big[-1], numbers, len(text), words, found

def objects(_):
    with lock:
        return (
            NEXT[START] is STOP, row.next is START or row.next, Point(1, 2) == point, row.color,
            len(log.handlers), row.sums(), registered(0), sorted(registry), MODEL,
        )

def default(_, table=base, state=START):
    return table[1], state is START, os.path.isdir(folder)

def nested(_):
    with xpool.Pool(1) as pool:
        return pool.apply(values, (0,)), pool.apply(default, (0,))

point = Point(1, 2)
print("once", len(data))

def main():
    wanted, before = values(0), repr(values(0))
    print(len(open(os.environ["COUNTED"]).read()))
    with xpool.Pool(2, initialise, ("model",), maxtasksperchild=1) as pool:
        print(pool.map(nothing, range(4), 1))
        assert pool.map(values, range(4), 1) == [wanted] * 4, pool.apply(values, (0,))
        assert pool.apply(lambda: values(0)) == wanted
        print(*pool.apply(objects, (0,)))
        print(open(os.environ["COUNTED"]).read())
        print(*pool.apply(default, (0,)))
        data[1] = -1
        assert pool.apply(values, (0,)) == values(0) and repr(values(0)) != before
        assert pool.apply(lambda: (data[1], kind.__name__, Color.RED)) == (-1, "kind", Color.RED)
        found = pool.apply(lambda: (row, point))
        assert [type(one) for one in found] == [Row, Point] and found[1] == point
    pool.join()
    with xpool.Pool(1) as pool:
        print(pool.map(bump, range(3)), counter)
        assert pool.apply(nested, (0,))[0] == values(0)
    pool.join()
    assert os.path.isdir(folder)
"""

GUARD = '\nif __name__ == "__main__":\n    main()\n'


def run(monkeypatch, tmp_path, args, text=None, cwd=None):
    """Run a program that records in a file what it loads. Return its output lines."""
    counted = tmp_path / "counted"
    counted.write_text("")
    monkeypatch.setenv("COUNTED", str(counted))
    done = scripts.popen(args, cwd=cwd or str(tmp_path)) if text is None else None
    if done is None:
        return scripts.run_ok(args, text).splitlines()
    out, err = done.communicate(timeout=WAIT)
    assert (done.returncode, err) == (0, ""), err
    return out.splitlines()


GUARDED = [
    "6",
    "[0, 1, 2, 3]",
    "True True True Color.RED 1 12 10 ['registered'] model",
]


@pytest.mark.parametrize("how", ["script", *also("module")])
def test_guarded_program(tmp_path, monkeypatch, how):
    """Workers run no statement of a program. Its globals have the program's values."""
    scripts.write(tmp_path / "prog.py", TOP + GUARD)
    ignored = "Each worker has its own copy of the lock 'lock'"
    monkeypatch.setenv("PYTHONWARNINGS", f"ignore:{ignored}:RuntimeWarning")
    args = ["prog.py"] if how == "script" else ["-m", "prog"]
    lines = run(monkeypatch, tmp_path, args)
    assert lines.pop(0) == "once 10" and lines[:3] == GUARDED
    assert lines[3] == "dgfnsb"  # the program loads each value
    assert lines[4:] == ["1 True True", "[1, 2, 3] 0"]


@pytest.mark.parametrize("how", ["file", *also("stdin")])
def test_program_without_the_guard(tmp_path, monkeypatch, how):
    """It is the same without the guard, and from standard input."""
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:Each worker has its own copy:RuntimeWarning")
    text = TOP + "\nmain()\n"
    if how == "file":
        scripts.write(tmp_path / "prog.py", text)
        lines = run(monkeypatch, tmp_path, ["prog.py"])
    else:
        lines = run(monkeypatch, tmp_path, ["-"], text)
    assert lines.pop(0) == "once 10" and lines[:3] == GUARDED and lines[3] == "dgfnsb"


SHARED = """
import xpool

class Counter:
    value = 0

pair = (1, [2])
part = pair[1]
part.append(3)
one = other = []
one.append(1)
counter = Counter()
same = counter
same.value += 1
state = Counter()
states = [state]
states[0].value += 1
last = [0]
lasts = (last,)
last.append(1); lasts[0].append(2)
head, *tail = rows = [[1], [2], [3]]
for row in tail: row.append(4)
head += [5]
table = {"rows": rows}
table["rows"] = table["rows"][:2]

def values(_):
    return pair, part, one, other, counter.value, same.value, state.value, states[0].value, table

def objects(_):
    return (
        part is pair[1], one is other, counter is same, state is states[0], last is lasts[0],
        rows[0] is head, table["rows"][1] is tail[0], last, lasts, head, tail, rows,
    )

def joined(_, whole=lasts, part=last):
    return whole[0] is part, whole

if __name__ == "__main__":
    for function in (values, objects, joined), (joined, values), (objects, values):
        with xpool.Pool(1) as pool:
            for one_ in function:
                assert pool.apply(one_, (0,)) == one_(0), (pool.apply(one_, (0,)), one_(0))
        pool.join()
    part.append(6)
    with xpool.Pool(1) as pool:
        assert pool.apply(values, (0,)) == values(0), pool.apply(values, (0,))
        part.append(7)
        assert pool.apply(values, (0,)) == values(0), pool.apply(values, (0,))
    pool.join()
"""

ARRAYS = """
import numpy as np
import xpool

weights = np.zeros(3)
params = {"w": weights}
params["w"] += 1
view = weights[1:]
view *= 2

def values(_):
    return weights.tolist(), params["w"].tolist(), view.tolist()

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        assert pool.apply(values, (0,)) == values(0), pool.apply(values, (0,))
    pool.join()
"""


# A call of a package comes first in a worker, and its argument is an attribute of a class, too.
OF_A_CALL = """
import numpy as np
import xpool

rows = [1, 2, 3, 4]
np.random.shuffle(rows)

class Holder:
    rows = rows

def other(_):
    return 1

def values(_):
    return Holder.rows is rows, rows

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        assert pool.map(other, [0]) == [1]
        assert pool.map(values, [0]) == [values(0)], pool.map(values, [0])
    pool.join()
"""


@pytest.mark.parametrize("seed", ["0", *also("1", "2", "6")])
@pytest.mark.parametrize(
    "text",
    [
        SHARED,
        pytest.param(ARRAYS, marks=pytest.mark.torch),
        pytest.param(OF_A_CALL, marks=pytest.mark.torch),
    ],
)
def test_values_that_share_an_object(tmp_path, monkeypatch, text, seed):
    """If values share an object, each change of it at the top is made once, whichever of their
    names a task needs first."""
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert scripts.run_ok([scripts.write(tmp_path / "prog.py", text)]) == ""


CHANGED = """
import threading
import xpool

class Index:
    def __init__(self, rows):
        self.lock = threading.Lock()
        self.rows = list(rows)

n = 1
rows = [1]

def defaults(_, k=n, part=tuple(rows)):
    return k, n, part, rows

class Sizes:
    size = n
    def get(self, size=n):
        return size, n

n = 2
rows.append(2)
bound = 1

def late(_, k=bound):
    return k, bound

def sizes(_):
    return Sizes().get(), Sizes.size

data = [3, 1, 2]
index = Index(data)
data.sort()
more = [3, 1, 2]
last = Index([more.pop()])
whole = [1, [2]]
part = whole.pop()
part.append(4)
same = part

def indices(_):
    return data, index.rows, last.rows, more

def shared(_):
    return whole, part, same is part

def read(_):
    return data, more, whole, n, rows, bound

if __name__ == "__main__":
    bound = 5
    functions = [defaults, late, sizes, indices, shared]
    for order in functions, functions[::-1], [read, *functions, read]:
        with xpool.Pool(1) as pool:
            for one in order:
                assert pool.apply(one, (0,)) == one(0), (one, pool.apply(one, (0,)))
        pool.join()
"""


@pytest.mark.parametrize("seed", ["0", *also("1", "2")])
def test_statements_that_run_after_a_value_is_set(tmp_path, monkeypatch, seed):
    """A statement that a worker runs finds the values of its place in the script, and does not
    change the program's values."""
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::RuntimeWarning")
    assert scripts.run_ok([scripts.write(tmp_path / "prog.py", CHANGED)]) == ""
