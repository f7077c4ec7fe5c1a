"""The values of globals that a task sees, for each way of starting a program."""

from __future__ import annotations

import pytest
from support import scripts
from support.tiers import also

pytestmark = pytest.mark.xpool_only

# Names of cases, and the expressions that read their globals. The functions below use them.
READS = {
    "mutated": "CFG['rate'], CFG['list']",
    "made": "made",
    "rebound": "RATE",
    "constant": "CONSTANT",
    "default": "Settings.rate, Settings.options",
    "initialised": "MODEL",
    "array": "int(ARRAY[0]), len(ARRAY)",
    "sentinel": "(lambda one=None: one is SENTINEL)(kept)",
    "followed": "instance.twice()",
    "module": "late_module.sqrt(4)",
    "local_lock": "LOCK.acquire(False) and not LOCK.release()",
    "made_lock": "made_lock.acquire(False) and not made_lock.release()",
    "replaced_lock": "replaced_lock is None",
}

FUNCTIONS = "".join(
    f"""
def named_{name}(_):
    return {text}
def calls_{name}(_):
    return named_{name}(_)
def inside_{name}():
    def local(_):
        return {text}
    return local
lambda_{name} = lambda _: ({text})
"""
    for name, text in READS.items()
)

METHODS = "".join(
    f"    def {name}(self, _):\n        return {text}\n" for name, text in READS.items()
)

PROGRAM = f"""
import random
import threading
import warnings
import xpool

warnings.filterwarnings("ignore", "Each worker has its own copy of the lock")
CFG = {{"rate": 1, "list": []}}
RATE = 1
CONSTANT = (1, "two")
MODEL = None
ARRAY = bytearray(200_000)
LOCK = threading.Lock()
SENTINEL = object()
kept = SENTINEL
late_module = None
replaced_lock = None

class Settings:
    rate = 1
    options = {{}}

class Number:
    def __init__(self, n):
        self.n = n
    def twice(self):
        return self.n * FACTOR

FACTOR = 2
instance = Number(1)

def initialise(value):
    global MODEL
    MODEL = value
    CFG.setdefault("of the worker", True)

class Methods:
{METHODS}
{FUNCTIONS}

def kinds(name):
    found = globals()
    yield found["named_" + name]
    yield found["calls_" + name]
    yield found["inside_" + name]()
    yield found["lambda_" + name]
    yield getattr(Methods(), name)

def answer(pool, verb, function):
    try:
        if verb == "apply":
            return repr(pool.apply(function, (0,)))
        if verb == "map":
            return repr(pool.map(function, range(3))[-1])
        return repr(list(pool.imap(function, range(3)))[-1])
    except NameError as error:
        text = str(error) + str(getattr(error, "__notes__", ""))
        return "explained" if "was not sent to this worker" in text else text

def look(pool, when, order, wanted):
    cells = [(name, kind) for name in {list(READS)} for kind in range(5)]
    order.shuffle(cells)
    for number, (name, kind) in enumerate(cells):
        function = list(kinds(name))[kind]
        verb = ("apply", "map", "imap")[number % 3]
        got = answer(pool, verb, function)
        want = wanted[name] if name in wanted else repr(function(0))
        if got != want:
            print(f"{{when}}: {{name}}, kind {{kind}}, by {{verb}}: {{got}} and not {{want}}")

def main(unpicklable, method=None):
    global RATE, ARRAY, FACTOR, instance, made, made_lock, late_module, replaced_lock
    import math
    late_module = math
    made_lock = threading.Lock()
    replaced_lock = threading.Lock()
    for seed in range(2):
        order = random.Random(seed)
        CFG["rate"], CFG["list"], RATE, made, FACTOR = 2, [seed], 2, "once", 3
        Settings.rate, Settings.options = 2, {{"seed": seed}}
        ARRAY[0] = 7
        instance = Number(5)
        wanted = {{"initialised": "'model'", **unpicklable}}
        with xpool.Pool(1, initialise, ("model",), context=method) as pool:
            look(pool, "at first", order, wanted)
            look(pool, "again", order, wanted)
            CFG["rate"] += 1
            CFG["list"].append("more")
            RATE, made, FACTOR = RATE + 1, made * 2, 4
            Settings.rate = 3
            Settings.options["more"] = 1
            ARRAY = bytearray(b"8") * 300_000
            instance.n = 6
            look(pool, "changed", order, wanted)
            if seed:
                CFG["rate"] -= 1
                CFG["list"].pop()
                ARRAY.append(1)
                look(pool, "changed back", order, wanted)
        pool.join()
    print("done")
"""

GUARD = '\nif __name__ == "__main__":\n    made = "made behind the guard"\n    main({}, {})\n'


def _run_main(folder, text, arguments=""):
    """Run a script that calls `main`, without a guard."""
    return scripts.run_ok([scripts.write(folder / "program.py", f"{text}\nmain({arguments})\n")])


def _done(out: str) -> None:
    assert out.splitlines() == ["done"], out


@pytest.mark.parametrize("method", [None, *also("forkserver", "spawn", "fork")])
def test_guarded_script(tmp_path, method):
    """Functions of a guarded script see the values that globals have at the time of the call."""
    text = PROGRAM + GUARD.format({}, repr(method))
    _done(scripts.run_ok([scripts.write(tmp_path / "guarded.py", text)]))


def test_script_without_the_guard(tmp_path):
    """Workers do not run an unguarded script. The error names the global that cannot be pickled."""
    text = PROGRAM + "\nmain({})\n"
    _done(scripts.run_ok([scripts.write(tmp_path / "unguarded.py", text)]))


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
    out = scripts.run_ok([scripts.write(tmp_path / "inherited.py", text)])
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
    out = scripts.run_ok([scripts.write(tmp_path / "own.py", OF_THE_PROCESS)])
    assert out.splitlines() == ["2", "(1, False) True", "['model', 'model']", "KeyError('model')"]


POOLS = """
import xpool

pool = None
class Config:
    pool = None

def of_global(x):
    return pool.map(abs, [x])

def of_class(x):
    return Config.pool.map(abs, [x])

def of_other(x):
    return [x].map

def main():
    global pool
    pool = Config.pool = xpool.Pool(2)
    for func in of_global, of_class, of_other:
        try:
            pool.apply(func, (-1,))
        except AttributeError as error:
            print(*error.args, *getattr(error, "__notes__", ()))
    pool.terminate()

if __name__ == "__main__":
    main()
"""


def test_a_pool_that_is_a_global_is_explained(tmp_path):
    """If a task uses the program's pool, which is None there, the error says why and what to do."""
    out = scripts.run_ok([scripts.write(tmp_path / "pools.py", POOLS)])
    first, second, third = out.splitlines()
    assert "'map'" in first and "'map'" in second
    assert "The global 'pool' of __main__ is None in this worker" in first
    assert "The global 'Config.pool' of __main__ is None in this worker" in second
    assert "makes a pool of its own" in first
    assert "None in this worker" not in third


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
    out = scripts.run_ok([scripts.write(tmp_path / "slow.py", SLOW)])
    (line,) = out.splitlines()
    # The first call publishes the global. A busy machine makes the warning earlier, not later.
    assert line[0] in "123" and line[1:].startswith(
        " RuntimeWarning True xpool compares the global 'slow' of"
    )
    parts = "(1,00", "have taken", "`slow: Final = ...`", "pool.broadcast", "initializer"
    assert all(part in line for part in parts), line


def test_the_item_is_noted_beside_a_missing_global(tmp_path):
    """If a global cannot be sent, the exception still has the note that names the item."""
    text = """
import xpool

def locked(x):
    return next(rows)

if __name__ == "__main__":
    rows = (row for row in range(3))
    with xpool.Pool(1) as pool:
        try:
            pool.map(locked, [7])
        except NameError as error:
            item, *missing = error.__notes__
            print(item)
            # Python 3.10 has no notes in its tracebacks: this one is in the message there.
            print("was not sent to this worker" in "".join([*missing, str(error)]))
"""
    out = scripts.run_ok([scripts.write(tmp_path / "missing.py", text)])
    assert out == "item 0 of locked(): 7\nTrue\n"


@pytest.mark.parametrize(("kind", "times"), [("Pool", 1), ("ThreadPool", 0)])
def test_a_lock_of_the_script_warns_once(tmp_path, kind, times):
    """A task that uses the script's lock warns once in a process pool, never in a thread pool."""
    text = f"""
import threading
import warnings
import xpool

LOCK = threading.Lock()

def locked(x):
    with LOCK:
        return x

if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as seen, xpool.{kind}(2) as pool:
        warnings.simplefilter("always")
        for _ in range(3):
            assert pool.map(locked, range(3)) == [0, 1, 2]
            assert pool.apply(locked, (1,)) == 1
        said = [one for one in seen if "the lock 'LOCK' of __main__" in str(one.message)]
        print(len(said), {{one.filename == __file__ for one in said}})
"""
    out = scripts.run_ok([scripts.write(tmp_path / "lock.py", text)])
    assert out == ("1 {True}\n" if times else "0 set()\n")


OF_A_SCRIPT = '''
"""About this."""
import functools
import os
import sys
import xpool

class Meta(type):
    rate = 1
class Model(metaclass=Meta):
    speed = 1
    class Inner:
        rate = 1
class Net(Model):
    pass

def loss(x):
    return x
def step(x):
    return loss(x)
def twice(func):
    @functools.wraps(func)
    def doubled(x):
        return 2 * func(x)
    return doubled
def decorated(x):
    return x

def __getattr__(name):
    if name == "answer":
        return 42
    raise AttributeError(name)

class Saver:
    def __del__(self):
        print("saved")
saver = Saver()

def look(net):
    computed = [getattr(sys.modules["__main__"], name, 0) for name in ("answer", "no", "answer")]
    classes = Net.rate, Net.speed, net.speed, Net.Inner.rate
    functions = step(1), loss(1), decorated(1)
    file = os.path.basename(__file__), __doc__, __name__
    return file, computed, classes, functions, saver is not None

with xpool.Pool(1) as pool:
    print(pool.apply(look, (Net(),)) == look(Net()))
    Model.speed = Meta.rate = Model.Inner.rate = 2
    def loss(x):
        return -x
    decorated = twice(decorated)
    print(pool.apply(look, (Net(),)) == look(Net()), look(Net())[2:])
pool.join()
'''


def test_what_a_script_has(tmp_path):
    """A task sees the script's file and docstring, its ``__getattr__``, and its classes and
    functions as they are at the call. Python finalizes the globals while they still can print."""
    out = scripts.run_ok([scripts.write(tmp_path / "of_a_script.py", OF_A_SCRIPT)])
    assert out == "True\nTrue ((2, 2, 2, 2), (-1, -1, 2), True)\nsaved\n"


SENTINEL = """
import xpool

MISSING = object()
table = {"key": MISSING}
tables = [table]

def holds():
    return tables[0] is table, table["key"] is MISSING
def get(key, default=MISSING):
    return "missing" if default is MISSING else default
def look(key):
    return get(key)
is_default = lambda one=MISSING: one is MISSING
def back(one):
    return one is MISSING, one

def main():
    global LATER
    LATER = object()
    with xpool.Pool(1) as pool:
        print(*pool.apply(holds))
        found, one = pool.apply(back, (MISSING,))
        print(pool.apply(look, ("a",)), pool.apply(is_default), found, one is MISSING)
        print(pool.apply(lambda one: one is LATER, (LATER,)))
    pool.join()
"""


def test_sentinels(tmp_path):
    """A bare object that is a global is the same object in defaults, arguments and results. A
    worker keeps its own values that contain it, as they share objects."""
    out = _run_main(tmp_path, SENTINEL)
    assert out == "True True\nmissing True True True\nTrue\n"


OF_A_MODULE = """
import sys
import types
import xpool
import marks

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "made":
            raise RuntimeError("a finder that fails")

sys.meta_path.append(Finder())
made = sys.modules["made"] = types.ModuleType("made")
exec("def twice(n): return 2 * n", vars(made))

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(marks.is_missing, (marks.MISSING,)), pool.apply(made.twice, (2,)))
        print(pool.apply(marks.missing) is marks.MISSING)
    pool.join()
"""

MARKS = """
MISSING = object()

def missing():
    return MISSING

def is_missing(value):
    return value is MISSING
"""


def test_sentinels_of_a_module(tmp_path):
    """A bare object of a module is the worker's own; a module that a finder fails for is sent."""
    scripts.write(tmp_path / "marks.py", MARKS)
    out = scripts.run_ok([scripts.write(tmp_path / "of_a_module.py", OF_A_MODULE)])
    assert out == "True 4\nTrue\n"


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
    out = scripts.run_ok([scripts.write(tmp_path / "warns.py", text)])
    errors = "UserWarning('import latest')\nUserWarning('of the task')\n"
    assert out == f"4 2\nKind\nKind\n{errors}"


UNLOADABLE = """
import functools
import os
import traceback
import xpool

PROGRAM = os.getpid()

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

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        for func in reads, wrapped, calls:
            try:
                pool.apply(func, (1,))
            except Exception as error:
                print("ValueError while it was loaded: made in the program alone" in
                      "".join(traceback.format_exception(error)))
"""


def test_a_global_that_a_worker_cannot_load_says_why(tmp_path):
    """The error has the reason, also if the message itself is what needs the global."""
    out = scripts.run_ok([scripts.write(tmp_path / "unloadable.py", UNLOADABLE)])
    assert out == "True\n" * 3


CONTEXTS = """
import contextlib
import contextvars
import xpool

user = contextvars.ContextVar("user", default="nobody")
request = contextvars.ContextVar("request")
depths = []

@contextlib.contextmanager
def section(name):
    depths.append(name)
    yield
    depths.pop()

@section("decorated")
def decorated(x):
    return x, list(depths)

def look(_):
    return user.get(), request.get("none")

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(look, (1,)))
        begun = user.set("first"), request.set(1)
        print(pool.apply(look, (1,)))
        again = user.set("second")
        print(pool.apply(look, (1,)))
        user.reset(again)
        print(pool.apply(look, (1,)))
        user.reset(begun[0])
        request.reset(begun[1])
        print(pool.apply(look, (1,)))
        print(pool.apply(decorated, (1,)))
        depths.append("outer")
        print(pool.apply(decorated, (2,)))
    pool.join()
"""


def test_variables_of_contexts_and_decorators_of_them(tmp_path):
    """A variable that was reset has no value in a worker, too.  A function that a context manager
    of a generator decorates is sent."""
    out = scripts.run_ok([scripts.write(tmp_path / "contexts.py", CONTEXTS)])
    assert out.splitlines() == [
        "('nobody', 'none')",
        "('first', 1)",
        "('second', 1)",
        "('first', 1)",
        "('nobody', 'none')",
        "(1, ['decorated'])",
        "(2, ['outer', 'decorated'])",
    ]


NAMED = """
import xpool

class Missing:
    only = None
    def __new__(cls):
        if cls.only is None:
            cls.only = super().__new__(cls)
        return cls.only
    def __reduce__(self):
        return "MISSING"

class Unit:
    __slots__ = ("name",)
    def __init__(self, name):
        self.name = name
    def __reduce__(self):
        return self.name

MISSING = Missing()
METRE = Unit("METRE")
table = {"a": MISSING, METRE: 1}

def look(x, default=MISSING):
    same = default is MISSING, x is MISSING, table["a"] is MISSING, Missing() is MISSING
    return *same, getattr(MISSING, "tag", None), table[METRE], METRE.name

def back(x):
    return MISSING, x

if __name__ == "__main__":
    with xpool.Pool(1) as pool:
        print(pool.apply(look, (MISSING,)))
        MISSING.tag = 2
        print(pool.apply(look, (METRE,)))
        print([one is other for one, other in zip(pool.apply(back, (METRE,)), (MISSING, METRE))])
        print(MISSING.tag)
    pool.join()
"""


def test_objects_that_reduce_to_the_name_of_a_global(tmp_path):
    """They stay one object in arguments, defaults, globals and results, with their attributes."""
    out = scripts.run_ok([scripts.write(tmp_path / "named.py", NAMED)])
    assert out.splitlines() == [
        "(True, True, True, True, None, 1, 'METRE')",
        "(True, False, True, True, 2, 1, 'METRE')",
        "[True, True]",
        "2",
    ]


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
    out = scripts.run_ok([scripts.write(tmp_path / "nested.py", NESTED)])
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
    (tmp_path / "script.py").write_text(ITEMS_ALONE)
    first = [[3, 3], [3, 3], [9, 9], [3, 3], [[1.5, True]] * 2, 3]
    wanted = f"{first} [5, 5] {[[2.5, True]]}\n"
    assert scripts.run_ok([str(tmp_path / "script.py")]) == wanted


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
    out = scripts.run_ok([scripts.write(tmp_path / "needs.py", NEEDS)])
    assert out.splitlines() == ["True True", "True [4, 4]", "True [8, 8] True", "True"]


DEFAULTS = """
import xpool

def positional(x=1):
    return x
def named(*, x=1):
    return x
def other():
    return 0
class Model:
    def run(self, *, x=1):
        return x
def model():
    return Model().run()

if __name__ == "__main__":
    tasks = [positional, named, model]
    with xpool.Pool(1) as pool:
        def said():
            return [repr(pool.apply(task)) for task in tasks]
        print(*said())
        positional.__defaults__ = (True,)
        named.__kwdefaults__["x"] = 2
        Model.run.__kwdefaults__["x"] = 3
        print(*said())
        positional.__defaults__ = (1.0,)
        named.__kwdefaults__["x"] = 2.0
        print(*said())
        tasks = [other]
        positional.__defaults__ = (5,)
        print(*said())
        tasks = [positional]
        print(*said())
"""


def test_defaults_that_change_in_place(tmp_path):
    """Also to a value that is equal and of another type, and in the dict of a function itself."""
    out = scripts.run_ok([scripts.write(tmp_path / "defaults.py", DEFAULTS)])
    assert out.splitlines() == ["1 1 1", "True 2 3", "1.0 2.0 3", "0", "5"]


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
    assert scripts.run_ok([scripts.write(tmp_path / "mended.py", MENDED)]).splitlines() == [
        *("generator", "generator", "generator", "None"),
        *("TextIOWrapper", "1", "2", "[2]", "generator"),
    ]
