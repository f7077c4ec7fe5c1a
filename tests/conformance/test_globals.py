"""The values of globals that a task sees, for each way of starting a program."""

from __future__ import annotations

import ast

import pytest
from support import scripts
from support.tiers import also

pytestmark = pytest.mark.xpool_only


def _run_main(folder, text, arguments=""):
    """Run a script that calls `main`, without a guard."""
    return scripts.program(folder, f"{text}\nmain({arguments})\n")


INHERITED = """
import multiprocessing
import xpool

CFG = {"rate": 1}
lock = None

def initialise(one):
    global lock, seen
    lock, seen = one, CFG["rate"]

def look(_):
    with lock:
        return seen, CFG["rate"]

def main(method):
    CFG["rate"] = 2
    one = multiprocessing.get_context(method).Lock()
    with xpool.Pool(1, initialise, (one,), context=method) as pool:
        print(pool.map(look, [0]))
        CFG["rate"] = 3
        print(pool.map(look, [0]))
    pool.join()
"""


@pytest.mark.parametrize("method", ["spawn", *also("fork", "forkserver")])
def test_initializer_that_is_inherited(tmp_path, method):
    """If initargs can only be inherited, the initializer still sees the program's globals."""
    text = INHERITED + f'\nif __name__ == "__main__":\n    main("{method}")\n'
    out = scripts.program(tmp_path, text)
    assert out.splitlines() == ["[(2, 2)]", "[(2, 3)]"]


LATE = """
import xpool

CFG = 1
tries = []

def look(x):
    tries.append(x)
    if x == 0 and tries.count(0) == 1:
        raise ValueError("once")
    return CFG

def main():
    global CFG
    with xpool.Pool(1) as pool:
        first = pool.map_async(look, [0], retries=1, retry_on=ValueError)
        CFG = 2
        print(pool.map(look, [1]), first.get(), pool.map(look, [2]))
    pool.join()
"""


def test_task_that_runs_late(tmp_path):
    """A task that runs after tasks of a later call still sees the values of its own call."""
    assert _run_main(tmp_path, LATE) == "[2] [1] [2]\n"


OF_THE_PROCESS = """
import logging
import random
import xpool

logger = logging.getLogger(__name__)
handler = logging.NullHandler()
logger.addHandler(handler)
rng = random.Random()
pool = None
cache = {}

def fill(value):
    cache["model"] = value

def cached(_):
    return cache["model"]

def numbers(_):
    return rng.random()

def handlers(_):
    return len(logger.handlers), handler in logger.handlers

def nested(_):
    return pool is None

def main():
    global pool
    with xpool.Pool(2, fill, ("model",)) as pool:
        print(len(set(pool.run_all(numbers, 0))))
        print(pool.apply(handlers, (0,)), pool.apply(nested, (0,)))
        print(pool.map(cached, [0, 1]))
        cache["program"] = 1
        try:
            pool.map(cached, [0])
        except KeyError as error:
            print(repr(error))
    pool.join()

if __name__ == "__main__":
    main()
"""


def test_globals_of_each_process(tmp_path):
    """Each process has its own random generators and pools. A logger shows as many handlers as in
    the program. A global that a worker changed keeps the worker's value until the program changes
    it."""
    out = scripts.program(tmp_path, OF_THE_PROCESS)
    assert out.splitlines() == ["2", "(1, False) True", "['model', 'model']", "KeyError('model')"]


EXPLAINED = """
import functools
import os
import threading
import timeit
import traceback
import xpool

PROGRAM = os.getpid()
pool = None
class Config:
    pool = None

def of_global(x):
    return pool.map(abs, [x])

def of_class(x):
    return Config.pool.map(abs, [x])

def of_other(x):
    return [x].map

def make(pid):
    if os.getpid() != pid:
        raise ValueError("made in the program alone")
    return Odd()

class Odd:
    def __reduce__(self):
        return make, (PROGRAM,)

def wrap(func):
    @functools.wraps(func)
    def wrapper(*args):
        return func(*args)
    wrapper.odd = odd
    return wrapper

odd = Odd()

@wrap
def wrapped(x):
    return x

def reads(x):
    return odd

def calls(x):
    return wrapped(x)

def hit():
    pass

def measures(x):
    return timeit.timeit("hit()", setup="from __main__ import hit", number=1)

def misses(x):
    return next(rows)

class Client:
    def __init__(self):
        self.lock, self.rows = threading.Lock(), rows

def in_object(x):
    return client

if __name__ == "__main__":
    rows = (row for row in range(3))
    client = Client()
    pool = Config.pool = xpool.Pool(1)
    for func in of_global, of_class, of_other, reads, wrapped, calls, measures, misses, in_object:
        try:
            pool.map(func, [7])
        except Exception as error:
            # Python 3.10 has no notes in its tracebacks.
            said = *traceback.format_exception(error), *getattr(error, "__notes__", ())
            print(repr("".join(said)))
    pool.terminate()
    pool.join()
"""

ALONE = "loaded: made in the program alone"
SAID = {
    "of_global": ("'map'", "The global 'pool' of __main__ is None in this worker", "of its own"),
    "of_class": ("'map'", "The global 'Config.pool' of __main__ is None in this worker"),
    "of_other": ("'map'",),
    "reads": (f"ValueError while it was {ALONE}",),
    "wrapped": (ALONE,),
    "calls": (ALONE,),
    "measures": ("has 'hit', it was not sent to this worker",),
    "misses": ("item 0 of misses(): 7", "was not sent to this worker"),
    "in_object": ("a generator object", " at rows"),  # and not the lock
}


def test_an_error_says_why_a_global_is_not_there(tmp_path):
    """So it does for the program's pool, for a value that a worker cannot load, also if the message
    itself needs it, for a name that no function names, and for what cannot be sent."""
    out = scripts.program(tmp_path, EXPLAINED)
    for (name, texts), said in zip(SAID.items(), out.splitlines(), strict=True):
        assert all(text in ast.literal_eval(said) for text in texts), (name, said)
        assert ("None in this worker" in said) is (name in ("of_global", "of_class"))


TOGETHER = """
from xpool import Pool

class Alone:
    def __init__(self, rows):
        self.rows = rows

    def __reduce__(self):
        return divided, (self.rows,)

def divided(rows):
    return rows / 0

rows = [1]
alone = Alone(rows)

def first(x):
    return alone

def second(x):
    return rows

if __name__ == "__main__":
    with Pool(1) as pool:
        for func in second, first, second:
            try:
                print(pool.map(func, [7]))
            except NameError as error:
                print(error, *error.__notes__)
"""


def test_an_error_names_the_globals_that_share_an_object(tmp_path):
    """A worker cannot load one of them, so it lacks the other, too."""
    before, *errors = scripts.program(tmp_path, TOGETHER).splitlines()
    assert before == "[[1]]" and len(errors) == 2
    for error in errors:
        assert "(TypeError while 'alone' and 'rows', which share an object, were loaded: " in error


OF_THE_PROGRAM = """
import functools
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool as StandardPool
from xpool import Pool, PoolClosed, ThreadPool

class Toolbox:
    def __del__(self):
        self.pool.terminate()

toolbox = Toolbox()
pool = None

def evaluate(x):
    return toolbox.scale * x

def look(name):
    found = getattr(toolbox, name)
    assert type(found).__name__ in repr(found)
    return type(found).__name__, isinstance(found, Pool)

def call(path):
    name, *rest = path.split(".")
    found = getattr(toolbox, name)
    try:
        for attribute in rest:
            found = getattr(found, attribute)
        return found()
    except PoolClosed as error:
        return str(error)

def send(name):
    return getattr(toolbox, name)

def use():
    return pool.apply(abs, (-1,))

def main():
    global pool
    toolbox.scale = 2
    with Pool(1, name="main") as toolbox.pool, ThreadPool(1, name="threads") as toolbox.threads:
        pool = toolbox.pool
        toolbox.map, toolbox.mapped = pool.map, functools.partial(pool.map, evaluate)
        print(toolbox.mapped([1, 2]))
        toolbox.results = [pool.apply_async(evaluate, (i,)) for i in (1, 2)]
        toolbox.one, toolbox.stream = toolbox.results[0], pool.imap(evaluate, [3])
        toolbox.executors = [pool.executor(), ThreadPoolExecutor(1)]
        toolbox.standard = StandardPool(1)
        print(pool.map(evaluate, [4]), [one.get() for one in toolbox.results], *toolbox.stream)
        for name in "pool", "threads", "one", "stream":
            print(name, *pool.apply(look, (name,)))
        for path in ("pool.size", "pool.state", "map", "mapped", "threads.close", "one.ready",
                     "one._ready", "stream.__next__", "standard.map"):
            print(path, pool.apply(call, (path,)), sep=": ")
        for func, args in (send, ("pool",)), (use, ()):
            try:
                pool.apply(func, args)
            except Exception as error:
                print(type(error).__name__, error)
    toolbox.standard.terminate()
    pool = toolbox.pool = Pool(1)
    print(pool.apply(call, ("pool.state",)))
    pool.terminate()

main()
"""

IN_A_WORKER = """\
[2, 4]
[8] [2, 4] 6
pool Pool True
threads ThreadPool False
one AsyncResult False
stream IMapIterator False
pool.size: main belongs to the program; a task that needs workers makes a pool itself
pool.state: main belongs to the program; a task that needs workers makes a pool itself
map: main belongs to the program; a task that needs workers makes a pool itself
mapped: main belongs to the program; a task that needs workers makes a pool itself
threads.close: None
one.ready: the result of evaluate() belongs to the program; send what get() returns
one._ready: the result of evaluate() belongs to the program; send what get() returns
stream.__next__: the result of evaluate() belongs to the program; send what get() returns
standard.map: the ThreadPool belongs to the program; a task that needs workers makes a pool itself
ResultNotPicklable The result cannot be sent back from the worker: NotImplementedError"""


def test_pools_and_results_in_an_object(tmp_path):
    """A task uses the rest of the object; the pool's methods raise `PoolClosed`."""
    out = scripts.program(tmp_path, OF_THE_PROGRAM)
    said, rest = out[: len(IN_A_WORKER)], out[len(IN_A_WORKER) :].splitlines()[1:]
    assert said == IN_A_WORKER, out
    # A global itself is as before: the top of the script sets this one to None.
    assert rest[0].startswith("AttributeError 'NoneType' object has no attribute 'apply'"), out
    assert "belongs to the program" in rest[1], out


LARGE = """
import xpool

class Estimator:
    def __init__(self):
        self.weights = [bytes(1_000) for _ in range(1_000)]
    def fit(self):
        self.weights[500] = b"fitted"

words = list(range(100_000))
table = {"columns": {"name": ["a"] * 100_000}}
text = bytearray(1_000_000)
estimator = Estimator()

def look(_):
    return words[50_000], table["columns"]["name"][7], text[123_456], len(estimator.weights[500])

def scribble(_):
    words[50_000] = text[123_456] = 9

def main(options):
    with xpool.Pool(1, **options) as pool:
        first = pool.apply_async(look, (0,))
        words[50_000] = -1
        table["columns"]["name"][7] = "b"
        text[123_456] = 1
        estimator.fit()
        print(first.get(), pool.apply(look, (0,)), pool.map(look, [0]), *pool.imap(look, [0]))
        pool.apply(scribble, (0,))
        print(pool.apply(look, (0,)))
        words[50_000] = 50_000
        print(pool.apply(look, (0,)))
        pool.apply(scribble, (0,))
        words.append(0)
        print(pool.apply(look, (0,)))
    pool.join()
"""

ANSWERS = """\
(50000, 'a', 0, 1000) (-1, 'b', 1, 6) [(-1, 'b', 1, 6)] (-1, 'b', 1, 6)
(9, 'b', 9, 6)
(50000, 'b', 9, 6)
(50000, 'b', 9, 6)
"""


@pytest.mark.parametrize("options", ["{}", *also("{'memory_limit': 0}")])
def test_one_element_of_a_large_global(tmp_path, options):
    """If a large global is changed in place, a task gets its values at the time of the call. An
    element that a worker changed keeps its value until the program changes the global."""
    assert _run_main(tmp_path, LARGE, options) == ANSWERS


COUNTED = """
import typing
from typing import Final
import xpool

class Counted:
    def __init__(self):
        self.text = bytes(1_000_000)
        self.pickled = 0
    def __getstate__(self):
        self.pickled += 1
        return {"text": self.text}

compared = Counted()
final: Final = Counted()
typed: "typing.Final[Counted]" = Counted()
string = "x" * 1_000_000

class Held:
    final: Final = Counted()

def size(_):
    return sum(len(one.text) for one in (compared, final, typed, Held.final)) + len(string)

def other(_):
    return 1

def counts():
    return [one.pickled for one in (compared, final, typed, Held.final)]

def main():
    for _ in range(2):
        with xpool.Pool(2) as pool:
            assert pool.map(size, range(8)) == [5_000_000] * 8
            print(counts())
            for _ in range(3):
                assert pool.apply(size, (0,)) == 5_000_000
                assert pool.apply(other, (0,)) == 1
            print(counts())
        pool.join()
"""


def test_a_final_global_is_pickled_once(tmp_path):
    """A large global is pickled once for each call of a function that uses it, a Final global once
    for each pool."""
    out = _run_main(tmp_path, COUNTED)
    first, last = ("1, 1, 1", "4, 1, 1", "5, 2, 2", "8, 2, 2"), (1, 1, 2, 2)
    assert out.splitlines() == [f"[{some}, {one}]" for some, one in zip(first, last)]


SLOW = """
import time
import warnings
import xpool

class Slow:
    def __init__(self, seconds):
        self.text, self.seconds = bytes(1_000_000), seconds
    def __getstate__(self):
        time.sleep(self.seconds)
        return vars(self)

slow, quick = Slow(0.4), Slow(0)

def size(_):
    return len(slow.text) + len(quick.text)

def main():
    with warnings.catch_warnings(record=True) as told, xpool.Pool(1) as pool:
        warnings.simplefilter("always")
        for calls in range(8):
            pool.apply(size, (0,))
            if told:
                break
        for _ in range(2):
            pool.apply(size, (0,))
    for one in told:
        print(calls, one.category.__name__, one.filename == __file__, one.message)
    pool.join()

if __name__ == "__main__":
    main()
"""


def test_slow_checks_warn_once(tmp_path):
    """If pickling one global has taken a second in total, one warning says how to avoid it."""
    out = scripts.program(tmp_path, SLOW)
    (line,) = out.splitlines()
    # The first call publishes the global. A busy machine makes the warning earlier, not later.
    assert line[0] in "123" and line[1:].startswith(
        " RuntimeWarning True xpool compares the global 'slow' of"
    )
    parts = "(1,00", "have taken", "`slow: Final = ...`", "pool.broadcast", "initializer"
    assert all(part in line for part in parts), line


LOCKED = """
import threading
import warnings
import xpool

LOCK = threading.Lock()

def locked(x):
    with LOCK:
        return x

if __name__ == "__main__":
    for kind in xpool.ThreadPool, xpool.Pool:
        with warnings.catch_warnings(record=True) as seen, kind(2) as pool:
            warnings.simplefilter("always")
            for _ in range(3):
                assert pool.map(locked, range(3)) == [0, 1, 2]
                assert pool.apply(locked, (1,)) == 1
            said = [one for one in seen if "the lock 'LOCK' of __main__" in str(one.message)]
            print(len(said), {one.filename == __file__ for one in said})
"""


def test_a_lock_of_the_script_warns_once(tmp_path):
    """A task that uses the script's lock warns once in a process pool, never in a thread pool."""
    out = scripts.program(tmp_path, LOCKED)
    assert out == "0 set()\n1 {True}\n"


OF_A_SCRIPT = '''
"""About this."""
import os
import sys
import xpool

def __getattr__(name):
    if name == "answer":
        return 42
    raise AttributeError(name)

class Saver:
    def __del__(self):
        print("saved")
saver = Saver()

def look():
    computed = [getattr(sys.modules["__main__"], name, 0) for name in ("answer", "no", "answer")]
    return os.path.basename(__file__), __doc__, __name__, computed, saver is not None

with xpool.Pool(1) as pool:
    print(pool.apply(look) == look(), *look()[3:])
pool.join()
'''


def test_what_a_script_has(tmp_path):
    """A task sees the script's file, docstring and ``__getattr__``. Python finalizes the globals
    while they still can print."""
    out = scripts.program(tmp_path, OF_A_SCRIPT)
    assert out == "True [42, 0, 42] True\nsaved\n"


IMPORTS = """
import sys
import warnings

sys.path.insert(0, FOLDER)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import loud
    import louder
import xpool

def read(x):
    return loud.LIMIT + x

def annotated(x, kind: loud = None):
    return x

def late(x):
    import latest
    return x

def own(x):
    warnings.warn("of the task")

if __name__ == "__main__":
    warnings.simplefilter("error")
    with xpool.Pool(1, context=CONTEXT) as pool:
        print(pool.apply(read, (1,)), pool.apply(annotated, (2,)))
        print(pool.apply(louder.same, (louder.Kind(),)).__class__.__name__)
    with xpool.Pool(1, context=CONTEXT) as pool:
        print(pool.map(type, [louder.Kind()])[0].__name__)
        for func in (late, own):
            try:
                pool.apply(func, (1,))
            except Warning as error:
                print(repr(error))
"""


@pytest.mark.parametrize("context", [None, *also("spawn", "forkserver")])
def test_imports_for_a_message_warn_of_nothing(tmp_path, context):
    """A program has imported its packages before it makes warnings errors; a worker has not."""
    for name in ("loud", "louder", "latest"):
        (tmp_path / f"{name}.py").write_text(
            f"import warnings\nwarnings.warn('import {name}')\nLIMIT = 3\n"
            "def same(x): return x\nclass Kind: pass\n"
        )
    text = IMPORTS.replace("FOLDER", repr(str(tmp_path))).replace("CONTEXT", repr(context))
    out = scripts.program(tmp_path, text)
    errors = "UserWarning('import latest')\nUserWarning('of the task')\n"
    assert out == f"4 2\nKind\nKind\n{errors}"


NESTED = """
import traceback
import xpool

first = None
for number in range(3000):
    first = [number, first]

def count(_):
    found, rest = 0, first
    while rest:
        found, rest = found + 1, rest[1]
    return found

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        try:
            print(pool.apply(count, (1,)))
        except NameError as error:
            text = "".join(traceback.format_exception(error))
            print("nested too deeply; send it in flatter form" in text)
    pool.join()
"""


def test_a_list_that_is_nested_too_deeply_is_not_none(tmp_path):
    """A worker does not take it for a connection that the script's top sets to None at first.

    From Python 3.12 on, it can be pickled.
    """
    out = scripts.program(tmp_path, NESTED)
    assert out in ("True\n", "3000\n")


ITEMS_ALONE = """
import operator
import os
import signal
import xpool

class Shape:
    side = 3
    def __abs__(self):
        return self.side
    def area(self):
        return self.side ** 2
    def __len__(self):
        return self.side

def halves(shape):
    return [shape.side / 2, type(shape) is Shape]

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def again(pool, deaths):
    found = [
        pool.map(abs, [Shape(), Shape()], 1),
        pool.map(len, [Shape(), Shape()]),
        list(pool.imap(operator.methodcaller("area"), [Shape(), Shape()])),
        pool.starmap(getattr, [(Shape(), "side"), (Shape, "side")], 1),
        pool.map(halves, [Shape(), Shape()], 1),
        pool.apply(abs, (Shape(),)),
    ]
    for _ in range(deaths):
        try:
            pool.apply(end)
        except xpool.WorkerDied:
            pass
    return found

if __name__ == "__main__":
    with xpool.Pool(2) as pool:
        first = again(pool, 3)
        assert again(pool, 3) == again(pool, 0) == first, first
        Shape.side = 5
        print(first, pool.map(abs, [Shape()] * 2, 1), pool.map(halves, [Shape()], 1))
"""


def test_classes_that_only_items_name(tmp_path):
    """The function of a map names nothing of the script, and the items do: each worker gets their
    class, also workers that take the places of others."""
    first = [[3, 3], [3, 3], [9, 9], [3, 3], [[1.5, True]] * 2, 3]
    wanted = f"{first} [5, 5] {[[2.5, True]]}\n"
    assert scripts.program(tmp_path, ITEMS_ALONE) == wanted


NEEDS = """
import os
import xpool

functions = {}
for n in range(40):
    exec(f"G{n} = [{n}]\\ndef f{n}(x):\\n    return x + G{n}[0], {'x' * 200!r}")
    functions[n] = globals()[f"f{n}"]
SEEN = None
SCALE = 1

class Model:
    def of(self, x):
        return SCALE * x

def make(_):
    global SEEN
    SEEN = Model()

def use(x):
    return SEEN.of(x)

def size(pool, function):
    return len(pool._packer.pack_task((function, (1,), {}), False, None)[0])

def turns(pool):
    found = [pool.apply_async(functions[n % 40], (n,)) for n in range(200)]
    wanted = [functions[n % 40](n) for n in range(200)]
    return [one.get() for one in found] == wanted

if __name__ == "__main__":
    with xpool.Pool(2) as pool:
        first = size(pool, functions[0])
        pool.run_all(make, 0)
        print(turns(pool), size(pool, functions[0]) < first + 40)
        G7.append(1)
        G3[0] = 300
        print(turns(pool), pool.run_all(use, 4))
        SCALE = 2
        f5.__defaults__ = None
        exec("def f9(x): return 'new'")
        functions[9] = f9
        print(turns(pool), pool.run_all(use, 4), size(pool, functions[0]) < 3 * first)
        print(pool.map(functions[3], [1, 2]) == [functions[3](1), functions[3](2)])
"""


def test_a_message_brings_what_it_needs(tmp_path):
    """It does not bring what other messages needed, but all that has changed, since a worker's own
    objects may use it.  Messages with different needs take turns."""
    out = scripts.program(tmp_path, NEEDS)
    assert out.splitlines() == ["True True", "True [4, 4]", "True [8, 8] True", "True"]


MENDED = """
import xpool

class Config:
    pass

config, rows = Config(), [1, iter_ := (n for n in range(3))]
maybe = None

def of_object(_):
    return config.n

def of_list(_):
    return len(rows)

def of_none(_):
    return maybe

def tell(pool, function):
    try:
        print(pool.apply(function, (0,)))
    except NameError as error:
        text = "".join([str(error), *getattr(error, "__notes__", ())])
        print(*(one for one in ("generator", "TextIOWrapper") if one in text))

def main():
    global maybe
    config.n, config.first, config.second = 1, iter_, open(__file__)
    maybe = [iter_]
    with config.second, xpool.Pool(1) as pool:
        for _ in range(2):
            tell(pool, of_object)
        tell(pool, of_list)
        tell(pool, of_none)
        del config.first
        tell(pool, of_object)
        del config.second
        rows[1] = maybe[0] = 2
        for function in of_object, of_list, of_none:
            tell(pool, function)
        rows[1] = iter_
        tell(pool, of_list)
    pool.join()

if __name__ == "__main__":
    main()
"""


def test_a_global_that_the_program_mends_in_place(tmp_path):
    """A global that cannot be sent is sent when it can be, or the error has the new reason."""
    assert scripts.program(tmp_path, MENDED).splitlines() == [
        *("generator", "generator", "generator", "None"),
        *("TextIOWrapper", "1", "2", "[2]", "generator"),
    ]


BUSY = """
import collections
import sys
import xpool

turns = []

class Job:
    def __init__(self, add=None):
        self.add = add

    def __reduce__(self):
        if turns and turns[-1] == self.add:  # as another thread
            turns.pop()
            if self.add == "jobs":
                jobs[len(jobs)] = 1
            else:
                recent.append(1)
        return Job, (self.add,)

recent = collections.deque([Job("recent"), 1])
jobs = {0: Job("jobs"), 1: 1}

def count(_):
    return len(jobs), len(recent)

if __name__ == "__main__":
    before = sys.getswitchinterval()
    with xpool.Pool(1) as pool:
        for more in [], ["jobs"] * 9, ["recent"] * 9, ["jobs", "recent"] * 4:
            turns += more
            print(pool.apply(count, (0,)) == count(0))
    print(sys.getswitchinterval() == before)
"""


def test_a_global_to_which_a_thread_adds(tmp_path):
    """It is pickled again, until no item is added meanwhile."""
    assert scripts.program(tmp_path, BUSY).split() == ["True"] * 5


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
        try:
            pool.apply(computed, ("a",))
        except NameError as error:
            said = "".join([*getattr(error, "__notes__", ()), str(error.__cause__)])
            print("no function of its tasks names it" in said)
        for low in 1, 2:
            print(pool.apply(query, ("a",)) == query("a"), pool.apply(evaluate, ("a",)) == low + 3)
        factor = 2
        print(pool.apply(query, ("a",)) == query("a"), pool.apply(evaluate, ("a",)) == 4)
    pool.join()
"""


def test_variables_in_texts_for_pandas(tmp_path):
    """`query` and `eval` find variables after @; the error of a text that is a global says why."""
    pytest.importorskip("pandas", reason="pandas is not installed")
    out = scripts.program(tmp_path, FRAMES)
    assert out == "True\n" + "True True\n" * 3


IN_TEXTS = """
import texts
import xpool

rate = 1

def scale(x):
    return x * rate

frame, other = [1, 2], [3]

class Locked(list):
    def __reduce__(self):
        print("pickled")
        return Locked, ()

table = Locked()

def fit(x):
    '''Uses :func:`~texts.formula`, and no table.'''
    return texts.formula(f"y ~ scale(x) + {x}")(x)

def select():
    return texts.sql("select max(a) from frame Left JOIN other")

if __name__ == "__main__":
    rate = 2
    with xpool.Pool(1) as pool:
        print(pool.apply(fit, (3,)), pool.apply(select))
"""

TEXTS = """
import sys

def formula(text):
    return sys._getframe(1).f_globals["scale"]

def sql(text):
    values = sys._getframe(1).f_globals
    return [values["frame"], values["other"]]
"""


def test_variables_in_formulas_and_queries(tmp_path):
    """As statsmodels and duckdb do, a function finds globals of its caller that a text names."""
    assert scripts.program(tmp_path, IN_TEXTS, texts=TEXTS) == "6 [[1, 2], [3]]\n"


IN_FILES = """
import numpy
ROWS = numpy.memmap("rows", "f4", "r+", shape=(100, 300))
"""

MAPPED = """
import os
import sys
import warnings
import numpy
import xpool

def prepare():
    numpy.arange(30000, dtype="f4").tofile("rows")
    numpy.save("saved.npy", numpy.arange(90000).reshape(300, 300))

prepare()
import in_files

rows = numpy.memmap("rows", "f4", "r+", shape=(100, 300))
made = numpy.memmap("made", "i8", "w+", shape=50)
fixed = numpy.memmap("rows", "f4", "r", offset=1200, shape=(3, 5), order="F")
own = numpy.memmap("rows", "f4", "c", shape=(100, 300))
views = {"back": rows[::-2, 5:9], "plain": numpy.asarray(rows)[7:9], "row": rows[3]}
loaded = numpy.load("saved.npy", mmap_mode="r+")
gone = numpy.memmap("gone", "i8", "w+", shape=50)
os.rename("made", "moved")
os.remove("gone")
_ = numpy.zeros(50).tofile("gone")

def about(array):
    mapped = getattr(array, "mode", ""), getattr(array, "offset", 0)
    return type(array).__name__, *mapped, array.flags.writeable, array.tolist()

def tell(_=None):
    arrays = rows, fixed, *views.values(), loaded[:5, ::-1], in_files.ROWS[0]
    return [*map(about, arrays)]

def write(n):
    rows[50, n] = views["back"][1, 2] = views["plain"][1, 1] = -n
    loaded[2, n] = in_files.ROWS[9, 9] = -n
    own[0, 0] = made[0] = gone[0] = 8
    try:
        fixed[0] = 8
    except ValueError:
        return float(own[1, 1]), type(own).__name__

if __name__ == "__main__":
    own[1, 1] = 4
    with warnings.catch_warnings(record=True) as warned, xpool.Pool(1) as pool:
        warnings.simplefilter("always")
        print(pool.apply(tell) == tell(), pool.apply(write, (7,)))
        rows[2, 2] = 88  # without a message to the worker
        print(pool.apply(tell) == tell(), rows[50, 7], own[0, 0], made[0], gone[0])
        print(in_files.ROWS[9, 9], loaded[2, 7], pool.apply(lambda: rows[2, 2]))
        same = pool.apply(lambda: rows[:2]).tolist() == rows[:2].tolist()
        print(pool.apply(lambda x: type(x).__name__, (rows,)), same)
    print(*sorted(str(one.message).split()[7] for one in warned))
    pool.join()
"""


@pytest.mark.parametrize("context", [None, *also("spawn")])
def test_globals_that_are_mapped_from_files(tmp_path, monkeypatch, context):
    """A worker maps the same file, as a fork has it, if the file still has a name; otherwise it has
    a copy, with a warning."""
    pytest.importorskip("numpy", reason="numpy is not installed")
    monkeypatch.chdir(tmp_path)  # the files are there
    text = MAPPED.replace("Pool(1)", f"Pool(1, context={context!r})")
    out = scripts.program(tmp_path, text, in_files=IN_FILES)
    assert out.splitlines() == [
        "True (4.0, 'ndarray')",
        "True -7.0 0.0 8 0",
        "-7.0 -7 88.0",
        "ndarray True",
        "'gone'",
    ]


RECURSIVE = """
import xpool

def make():
    class Counter:
        count = 0
        def hit(self):
            type(self).count += 1
            return self.count
    return Counter

def hit(counter):
    return counter.hit()

if __name__ == "__main__":
    with xpool.Pool(1, is_recursive=True) as pool:
        counter = make()()
        print([pool.apply(hit, (counter,)) for _ in range(3)])
"""


def test_what_a_task_sets_in_a_class_stays_in_a_recursive_pool(tmp_path):
    """A class that has not changed is not filled again by the next message."""
    assert scripts.program(tmp_path, RECURSIVE) == "[1, 2, 3]\n"


FORKED_AGAIN = """
import xpool

class Job:
    def run(self):
        return 1

def text(*args):
    return "text"

def seen():
    return Job.run is text, Job.__dict__["name"].fget is text, Job.static is text, Job().run()

def used():
    return Job().name

if __name__ == "__main__":
    Job.name, Job.static = property(text), staticmethod(text)
    for _ in range(2):
        with xpool.Pool(1, context="fork") as pool:
            print(pool.apply(used), pool.apply(seen) == seen())
        pool.join()
"""


def test_functions_in_classes_of_a_fork(tmp_path):
    """A class that the program has sent before the fork, and not changed since, refers to the
    functions that the worker has inherited."""
    out = scripts.program(tmp_path, FORKED_AGAIN)
    assert out.splitlines() == ["text True"] * 2


OF_CONTEXTS = """
import operator
import xpool

rate = 1

class Model:
    def run(self):
        return rate

if __name__ == "__main__":
    with xpool.CtxPool(worker_contexts=[Model()]) as pool:
        rate = 2
        print(pool.apply(lambda model: model.run()), pool.map(lambda model, _: model.run(), [0]))
        rate = 3
        print(pool.apply(operator.methodcaller("run")), *pool.imap(lambda model, _: rate, [0]))
"""


def test_globals_that_only_the_context_uses(tmp_path):
    """Methods of a worker's context see globals as they are at the call, also if the task's
    function uses nothing of the program."""
    out = scripts.program(tmp_path, OF_CONTEXTS)
    assert out == "2 [2]\n3 3\n"


OF_A_QUEUE = """
import xpool
from xpool.queue import SimpleQueue

rate = 1

class Box:
    def get(self):
        return rate

def begin(given):
    global boxes
    boxes = given

def take():
    return boxes.get().get()

if __name__ == "__main__":
    with xpool.Pool(1, begin, (given := SimpleQueue(),)) as pool:
        for rate in (1, 2):
            given.put(Box())
            print(pool.apply(take))
        rate = 3
        print(pool.apply(lambda: rate))
"""


def test_globals_that_came_with_an_object_of_a_queue(tmp_path):
    """They are not values that the worker has set itself: it takes those of later objects, and of
    tasks."""
    out = scripts.program(tmp_path, OF_A_QUEUE)
    assert out == "1\n2\n3\n"


NAMESAKES = """
    import sys
    import xpool
    import colorsys

    class Model:
        class Config:
            rows = [1]

    Model.Config = type("Config", (Model.Config,), {"rate": 7})  # as a class decorator does

    class Job:
        def name(self):
            return "first"

    class Job(Job):
        def name(self):
            return "second", super().name()

    JOB = Job()

    def ask(job):
        return Model.Config.rate, Model.Config.rows, JOB.name(), isinstance(JOB, Job), job.name()

    def late():
        import own_late
        return own_late.COUNT, colorsys.ONE_THIRD

    if __name__ == "__main__":
        with xpool.Pool(1, context=sys.argv[1]) as pool:
            assert pool.apply(ask, (JOB,)) == ask(JOB), pool.apply(ask, (JOB,))
            Job.name = lambda self: "third"
            assert pool.apply(ask, (JOB,)) == ask(JOB), pool.apply(ask, (JOB,))
            assert pool.apply(late) == (3, 1 / 3)  # the worker imports the module
            import own_late
            own_late.COUNT = colorsys.ONE_THIRD = 8  # of modules that the fork did not have, or had
            assert pool.apply(late) == (8, 8), pool.apply(late)
    """


@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_what_changes_after_a_fork(tmp_path, context):
    """A fork of the program gets it as other workers do, and a class that has taken the name of its
    base class is not taken for this."""
    assert scripts.program(tmp_path, NAMESAKES, context, own_late="COUNT = 3") == ""


PUT_BACK = """
    import contextlib
    import sys
    from unittest import mock
    import xpool
    import own_lib

    def ask():
        return own_lib.rate(), own_lib.Job.kind(), own_lib.Job.name

    def is_gone(pool):
        with contextlib.suppress(AttributeError):
            return pool.apply(ask) == before  # a fork has the program's object
        return True

    if __name__ == "__main__":
        before = ask()
        with xpool.Pool(1, context=sys.argv[1]) as pool:
            for owner, name in (own_lib, "rate"), (own_lib.Job, "kind"), (own_lib, "Job"):
                original = vars(owner)[name]
                setattr(owner, name, (i for i in "no pickler takes it"))
                assert is_gone(pool)
                setattr(owner, name, original)
                assert pool.apply(ask) == before, (name, pool.apply(ask))
            for _ in range(2):
                with mock.patch.object(own_lib, "rate", return_value=6):
                    assert pool.apply(ask)[0] == 6
                assert pool.apply(ask) == before
    """
LIB = """
    def rate():
        return 1

    class Job:
        name = "job"
        @staticmethod
        def kind():
            return 2
    """


@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_what_the_program_puts_back_is_there_again(tmp_path, context):
    """A definition of an own module returns after the program has had something in its place that
    cannot be sent, or a mock, whose class has the name of its base class."""
    assert scripts.program(tmp_path, PUT_BACK, context, own_lib=LIB) == ""
