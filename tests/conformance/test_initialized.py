"""What an initializer does to globals of the program: tasks see it, as in a fork."""

import pytest
from support import scripts

from xpool import Pool

pytestmark = pytest.mark.xpool_only

CONFIG = """
class Db:
    url = None
    _instance = None
    def connect(self, url="default"):
        self.url = url
    @classmethod
    def instance(cls):
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

class Config:
    def __init__(self):
        self.env, self.db = None, Db()
    def load(self, env):
        self.env = env

config = Config()
TABLE = {}
"""

INSTALLED = """
from collections.abc import MutableMapping

class Store(MutableMapping):
    def __init__(self):
        self.values = {}
    def __getitem__(self, key):
        return self.values[key]
    def __setitem__(self, key, value):
        self.values[key] = value
    def __delitem__(self, key):
        del self.values[key]
    def __iter__(self):
        return iter(self.values)
    def __len__(self):
        return len(self.values)

class Service:
    url = None
    def open(self, url):
        self.url = url

service = Service()
"""

SCRIPT = """
import argparse
import collections
import dataclasses
import functools
import multiprocessing
import os
import random
import sys
import types
import xpool
sys.path.append(os.path.join(os.path.dirname(__file__), "site-packages"))
import config
import installed
from config import Db, TABLE
from config import config as settings

CACHE, LOG, COUNTS = {}, [], collections.defaultdict(int)
NESTED = [{1: [CACHE]}]
OPTIONS = argparse.Namespace(level=0)
STORE, SERVICE, DICE = installed.Store(), installed.Service(), random.Random(1)
METHOD = sys.argv[1]
LOCK = multiprocessing.get_context(None if METHOD == "None" else METHOD).Lock()

class State:
    def __init__(self):
        self.value, self.seen = None, {}
    def connect(self, value=5):
        self.value = self.seen["value"] = value
    def __call__(self, value):
        self.value = value
    def __own(self):
        self.value = "own"
    def own(self):
        return self.__own

class Registry:
    state = State()

class Locked(State):
    def __init__(self):
        super().__init__()
        self.lock = LOCK

class Pair:
    def __init__(self, state):
        self.state = state

state, locked, received = State(), Locked(), None

def fill(cache, items, *more):
    for i in items:
        cache[i] = i * i

def count(counts, log, options):
    counts["a"] += 1
    log.append(4)
    options.level = 3

def fill_all(caches, options):
    for one in (*caches, *options["more"]):
        one[1] = 2

def receive(*args):
    global received
    received = args

Options = collections.namedtuple("Options", "cache state")

@dataclasses.dataclass
class Setup:
    options: Options
    more: list
    def fill(self):
        self.options.cache["data"] = 1
        for one in self.more:
            one()

class Slots:
    __slots__ = "cache", "itself"
    def __init__(self):
        self.cache, self.itself = CACHE, self

def fill_setup(setup, *others):
    setup.fill()
    receive(setup, *others)

def fill_by_default(cache=CACHE):
    cache["default"] = 1

def filler(cache):
    def fill():
        cache["closure"] = 1
    return fill

def visit(first, *rest):
    todo, known = [first, *rest], []
    for one in todo:  # grows
        if any(one is other for other in known):
            continue
        known.append(one)
        if one is CACHE:
            one["visited"] = one.get("visited", 0) + 1
        elif isinstance(one, (dict, collections.ChainMap)):
            todo += one.values()
        elif isinstance(one, (list, set, collections.deque)):
            todo += one
        else:
            todo += [getattr(one, name) for name in ("cache", "itself") if hasattr(one, name)]

def in_itself():
    one = [{1: CACHE}]
    one.append(one)
    return one

def cache():
    return CACHE
def counts():
    return COUNTS, LOG, OPTIONS.level
def of_state(context=None):
    return state.value, state.seen
def of_class():
    return Registry.state.value
def of_config():
    return settings.env, config.config.env, settings.db.url
def table():
    return TABLE, config.TABLE
def instance():
    return Db.instance().url
def path():
    return sys.path[-1], os.environ.get("OF_TEST")
def of_installed():
    return dict(STORE), SERVICE.url, installed.service.url
def thrown():
    return DICE.getstate()[1][:3]
def is_one():
    return received[0] is received[1].state
def of_setup():
    setup, slots = received
    same = setup.options.cache is CACHE, setup.options.state is state, slots.itself is slots
    return *same, slots.cache is CACHE, setup.more[0].__self__ is state, state.value
def is_first():
    return received[0][0] is received[1], received[0][1][0] is state
def has_lock():
    with received[0].lock:
        return received[0].value

def shared(items):
    return receive, (items, items[0]), is_first

CASES = [
    (fill, (CACHE, range(3)), cache),
    (fill, (CACHE, range(3), LOCK), cache),
    (fill_all, ([CACHE], {"more": ()}), cache),
    (fill_all, ((), {"more": [CACHE], "n": [1]}), cache),
    (functools.partial(fill_all, [1, CACHE][1:]), ({"more": [{}]},), cache),
    (receive, (state, types.SimpleNamespace(state=state)), is_one),
    shared([{}, [state]]),
    (fill_setup, (Setup(Options(CACHE, state), [state.connect, filler(CACHE)]), Slots()), of_setup),
    (Setup(Options(CACHE, state), [filler(CACHE), state.connect]).fill, (), cache),
    (fill_by_default, (), cache),
    (filler(CACHE), (), cache),
    (functools.partial(functools.partial(filler(CACHE))), (), cache),
    (lambda call: call(), (filler(CACHE),), cache),
    (visit, (collections.deque([CACHE]), 5), cache),
    (visit, (collections.OrderedDict(a={1: [CACHE]}),), cache),
    (visit, (collections.defaultdict(list, a=CACHE),), cache),
    (visit, (collections.ChainMap({}, {1: CACHE}),), cache),
    (visit, (in_itself(),), cache),
    (visit, (NESTED,), cache),
    (visit, ({1: Slots()}, {Slots()}), cache),
    (CACHE.update, ({1: 7},), cache),
    (CACHE.__setitem__, (1, 8), cache),
    (count, (COUNTS, LOG, OPTIONS), counts),
    (settings.load, ("test",), of_config),
    (settings.db.connect, ("url",), of_config),
    (functools.partial(settings.db.connect, url="url"), (), of_config),
    (functools.partial(fill, CACHE, items=(5,)), (), cache),
    (TABLE.update, ({1: 2},), table),
    (Db.instance().connect, (), instance),
    (state.connect, (6,), of_state),
    (state, (6,), of_state),
    (state.seen.update, ({1: 2},), of_state),
    (state.own(), (), of_state),
    (Registry.state.connect, (), of_class),
    (sys.path.append, ("/of_test",), path),
    (os.environ.update, ({"OF_TEST": "1"},), path),
    (STORE.update, ({1: 2},), of_installed),
    (SERVICE.open, ("url",), of_installed),
    (installed.service.open, ("url",), of_installed),
    (DICE.seed, (5,), thrown),
    (receive, (state, Pair(state)), is_one),
    (receive, (locked,), has_lock),
]

def forked(initializer, initargs, task):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        initializer(*initargs)
        os.write(writer, repr(task()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 10_000).decode()

if __name__ == "__main__":
    options = {} if METHOD == "None" else {"context": METHOD}
    for initializer, initargs, task in CASES:
        expected = forked(initializer, initargs, task)
        with xpool.Pool(1, initializer, initargs, **options) as pool:
            found = [repr(pool.apply(task)), repr(pool.apply(task))]
        pool.join()
        assert found == [expected] * 2, (initializer, initargs, found, expected)
    for kind in xpool.P2PPool, xpool.CtxPool, xpool.Executor:
        with kind(1, initializer=state.connect, initargs=(7,)) as pool:
            run = pool.submit(of_state).result if kind is xpool.Executor else None
            print((run() if run else pool.apply(of_state))[0], end=" ")
    print(CACHE, LOG, state.value, settings.env)
"""


@pytest.mark.parametrize("method", ["None", "fork", "spawn", "forkserver"])
def test_an_initializer_acts_on_globals(method, tmp_path, monkeypatch):
    """This is so for the object of a method, and for the arguments."""
    # Of `multiprocessing`, about a lock that exists when the program ends.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:resource_tracker")
    package = tmp_path / "site-packages"
    package.mkdir()
    scripts.write(package / "installed.py", INSTALLED)
    scripts.write(tmp_path / "config.py", CONFIG)
    out = scripts.run_ok([scripts.write(tmp_path / "main.py", SCRIPT), method])
    assert out == "7 7 7 {} [] None None\n"


KEPT = """
import xpool

class Data(dict):
    pass

DATA = Data()

def task():
    return DATA

if __name__ == "__main__":
    with xpool.Pool(1, DATA.update, ({1: 2},), maxtasksperchild=1) as pool:
        print(pool.apply(task), pool.apply(task), end=" ")
        DATA[3] = 4  # the program's change replaces what the initializer has set
        print(pool.apply(task))
    pool.join()
"""


def test_the_global_of_an_initializer_is_one_of_the_program(tmp_path):
    """Each new worker begins with it, and it is replaced when the program changes it."""
    out = scripts.run_ok([scripts.write(tmp_path / "main.py", KEPT)])
    assert out == "{1: 2} {1: 2} {3: 4}\n"


UPDATED = """
import sys
import xpool

rate = 1

def task():
    return rate

if __name__ == "__main__":
    cases = (globals().update, {"rate": 2}), (exec, "rate = 3", globals())
    for initializer, *initargs in cases:
        with xpool.Pool(1, initializer, initargs, context=sys.argv[1]) as pool:
            print(pool.apply(task), end=" ")
        pool.join()
"""


@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_the_globals_of_the_script_as_an_object(tmp_path, context):
    """`globals()` of the script is that of the worker."""
    assert scripts.program(tmp_path, UPDATED, context) == "2 3 "


OWN = """
import sys
import xpool

def connect():
    global connection, rate
    connection, rate = open(__file__), 3

def task():
    return connection.read(0), rate

if __name__ == "__main__":
    with xpool.Pool(1, connect, context=sys.argv[1]) as pool:
        if sys.argv[2] == "late":
            print(pool.apply(task), end=" ")
        connection, rate = open(__file__), 4
        print(pool.apply(task))
    pool.join()
    connection.close()
"""


@pytest.mark.parametrize("context", ["forkserver", "fork"])
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_worker_keeps_what_the_program_makes_for_itself_later(tmp_path, context, when):
    """This is so for a value that cannot be sent, too."""
    out = scripts.program(tmp_path, OWN, context, when)
    assert out == ("('', 3) ('', 3)\n" if when == "late" else "('', 3)\n")


def test_an_initializer_that_sets_a_variable_of_the_function_around_it(make_pool):
    """A warning names the variable, because tasks do not see the new value."""
    model, models = None, {}

    def load():
        nonlocal model
        model = models["kept"] = 1

    with pytest.warns(RuntimeWarning, match=r"initializer .*load\(\) sets 'model'"):
        pool = make_pool(Pool, 1, load)
    assert pool.apply(lambda: (model, models)) == (None, {})
