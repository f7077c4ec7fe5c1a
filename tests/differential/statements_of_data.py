"""Statements of scripts: data, modules of the program, registries."""

TEXT = r"""
= data: rows of a load
def read_rows~():
    note_load()
    return [{"id": n, "cost": n * 1.5} for n in range(4)]
rows~ = read_rows~()
? [row['cost'] for row in rows~]
> rows~.append({'id': len(rows~), 'cost': 0.5})
> rows~ = [row for row in rows~ if row['id'] % 2] + rows~[:1]
> rows~[0]['cost'] += 10
> rows~.sort(key=lambda row: -row['id'])
> rows~[1:2] = []
%names rows~ %gives rows~
= data: shuffled and split
import random
def load_ids~():
    note_load()
    return list(range(12))
ids~ = load_ids~()
random.shuffle(ids~)
fit~, held~ = ids~[:9], ids~[9:]
def is_held~(n, among=held~):
    return n in among
? fit~, held~
? [n for n in range(12) if is_held~(n)]
? is_held~.__defaults__[0] is held~
> random.shuffle(fit~)
> held~.append(-1)
%gives held~
= data: large list
def load_large~():
    note_load()
    return list(range(30_000))
large~ = load_large~()
? len(large~), large~[7], large~[-1]
> large~[7] = -1
> large~.append('end')
> large~.reverse()
%gives large~
= data: array and its view
import numpy as np
def load_grid~():
    note_load()
    return np.arange(24.0).reshape(4, 6)
grid~ = load_grid~()
edge~ = grid~[:, 0]
edge~ += 0.5
? grid~.sum(), edge~
? np.shares_memory(grid~, edge~)
> grid~[2] = 9
> edge~ *= 3
> grid~ = grid~ + 1
%names grid~ edge~ %gives grid~
= data: large array
import numpy as np
wave~ = np.linspace(0, 1, 40_000)
mask~ = wave~ > 0.5
logging.info("wave has %d points", len(wave~))
? wave~[:3], mask~.sum(), float(wave~[mask~][0])
> wave~[1] = 70
> mask~[:] = False
| mask~[5] = True
> wave~ /= 2
%names wave~ %gives wave~
= data: folder of its own
import atexit
import shutil
import tempfile
folder~ = tempfile.mkdtemp()
atexit.register(shutil.rmtree, folder~, True)
? folder~
? os.path.isdir(folder~)
> open(os.path.join(folder~, "more"), "w").close()
%after os.path.isdir(folder~)
= data: bytes in place
import array
buffer~ = bytearray(b"head")
samples~ = array.array("h", [1, 2, 3])
? bytes(buffer~), samples~.tolist()
> buffer~ += b'tail'
> buffer~[0] = 72
> samples~.extend([4, 5])
%names buffer~ %gives buffer~
= data: tree with parents
class Branch~:
    def __init__(self, label, parent=None):
        self.label, self.parent, self.children = label, parent, []
        if parent is not None:
            parent.children.append(self)
root~ = Branch~("root")
leaf~ = Branch~("leaf", Branch~("middle", root~))
? leaf~.parent.parent is root~, leaf~ is root~.children[0].children[0]
? root~.children[0].label, type(leaf~) is Branch~
> Branch~('new', root~)
> leaf~.parent.label = 'bough'
> leaf~.parent = root~
%gives root~
= data: nested defaults
from collections import defaultdict
tally~ = defaultdict(lambda: defaultdict(int))
for place, n in [("in", 2), ("out", 3), ("in", 4)]:
    tally~[place][n % 2] += n
? {k: dict(v) for k, v in tally~.items()}, tally~.default_factory()['none']
> tally~['up'][0] += 1
> tally~.pop('out', None)
%gives tally~
= config: namespace imported by name
from own_opts~ import opts as opts~, depth_of as depth_of~
? opts~.depth, depth_of~(), sorted(vars(opts~))
> opts~.depth += 3
> opts~.extra = ['x']
> vars(opts~).update(depth=40)
%gives opts~
%file own_opts~.py
from types import SimpleNamespace
opts = SimpleNamespace(depth=2)
def depth_of():
    return opts.depth
= config: module of a folder
from own_parts~ import core as core~
from own_parts~.shapes import area as area~
? core~.scaled(x), area~(2)
> core~.FACTOR = 7
> setattr(core~, 'FACTOR', core~.FACTOR + 1)
> core~.TABLE['more'] = 1
%file own_parts~/__init__.py
%file own_parts~/core.py
FACTOR = 2
TABLE = {}
def scaled(x):
    return x * FACTOR + len(TABLE)
%file own_parts~/shapes.py
from .core import scaled
def area(side):
    return scaled(side) * side
= config: patches that keep the names
import functools
import own_jobs~
plain_run~, plain_step~ = own_jobs~.run, own_jobs~.Job.step
@functools.wraps(plain_run~)
def run~(x):
    return ("wrapped", plain_run~(x))
@functools.wraps(plain_step~)
def step~(self):
    return "wrapped " + plain_step~(self)
own_jobs~.run = run~
own_jobs~.Job.step = step~
own_jobs~.Job.__len__ = lambda self: 7
? own_jobs~.twice(x), own_jobs~.Long().step(), hasattr(own_jobs~.Job, '__len__')
> own_jobs~.run = plain_run~
> own_jobs~.Job.step = plain_step~
> del own_jobs~.Job.__len__
%file own_jobs~.py
def run(x):
    return x
def twice(x):
    return [run(x)] * 2
class Job:
    def step(self):
        return "step"
class Long(Job):
    pass
= config: module that makes its attributes
import own_lazy~
own_lazy~._values['rate'] = 0.5
? own_lazy~.rate, own_lazy~.size
> own_lazy~._values['size'] = 64
> own_lazy~._values.update(rate=[1])
%file own_lazy~.py
_values = {"rate": 0.1, "size": 32}
def __getattr__(name):
    if name not in _values:
        raise AttributeError(name)
    return _values[name]
= config: attribute that comes later
import own_later~
def later~():
    try:
        return own_later~.found
    except AttributeError:
        return "none"
? getattr(own_later~, 'late', None), later~(), own_later~.known()
> own_later~.late = 3
> own_later~.found = [4]
> own_later~.more = {}
%file own_later~.py
def known():
    return 'more' in globals()
= config: module that is no module of the path
import importlib.util
where~ = importlib.util.spec_from_file_location("tool~", os.path.abspath("extras/tool~.py"))
tool~ = importlib.util.module_from_spec(where~)
where~.loader.exec_module(tool~)
? tool~.measure(x), tool~.UNIT
> tool~.UNIT = 'km'
%file extras/tool~.py
UNIT = "m"
def measure(x):
    return f"{x} {UNIT}"
= config: folder appended to the path
import sys
sys.path.append(os.path.join(os.getcwd(), "vendor~"))
import vendored~ as from_vendor~
? from_vendor~.NAME, from_vendor~.Thing(x).twice()
> from_vendor~.NAME = 'changed'
%file vendor~/vendored~.py
NAME = "vendored"
class Thing:
    def __init__(self, n):
        self.n = n
    def twice(self):
        return 2 * self.n, NAME
= config: object shared by two modules
import own_store~
import own_user~
own_store~.items.append("top")
? own_user~.held is own_store~.items, own_user~.count()
> own_store~.items.append('more')
> own_user~.held = own_store~.items = ['new']
%gives own_store~.items
%file own_store~.py
items = []
%file own_user~.py
try:
    from own_store~ import items as held
except ImportError:
    from .own_store~ import items as held
def count():
    return len(held)
= config: arguments that the guard parses
from types import SimpleNamespace
chosen~ = None
? chosen~ and chosen~.seed
> chosen~ = SimpleNamespace(seed=7)
> chosen~ = SimpleNamespace(seed=[8])
%names chosen~
= config: frozen record replaced
from dataclasses import dataclass, field, replace
@dataclass(frozen=True)
class Plan~:
    rate: float = 0.1
    steps: list = field(default_factory=list)
plan~ = Plan~()
? plan~, type(plan~) is Plan~
> plan~ = replace(plan~, rate=0.7)
> plan~.steps.append('warm')
%names plan~ %gives plan~
= registry: decorator
OPS~ = {}
def op~(name):
    def keep(func):
        OPS~[name] = func
        return func
    return keep
@op~("inc")
def inc~(x):
    return x + 1
@op~("neg")
def neg~(x):
    return -x
? {name: func(x) for name, func in OPS~.items()}
? OPS~['inc'] is inc~
> OPS~['late'] = lambda x: x * 100
> op~('abs')(abs)
> OPS~.pop('neg', None)
%gives OPS~
= registry: decorator of a module
import own_plugs~
@own_plugs~.plug
def mine~(x):
    return x + 30
? sorted(own_plugs~.PLUGS), own_plugs~.call('mine~', x)
? own_plugs~.PLUGS['mine~'] is mine~
> own_plugs~.PLUGS['other'] = mine~
%file own_plugs~.py
PLUGS = {}
def plug(func):
    PLUGS[func.__name__] = func
    return func
@plug
def builtin(x):
    return x
def call(name, x):
    return PLUGS[name](x)
= registry: subclasses
class Reader~:
    known = {}
    def __init_subclass__(cls, suffix=None, **more):
        super().__init_subclass__(**more)
        Reader~.known[suffix or cls.__name__] = cls
    def read(self):
        return type(self).__name__
class Text~(Reader~, suffix=".txt"):
    pass
? {key: cls().read() for key, cls in Reader~.known.items()}
? Reader~.known['.txt'] is Text~
> type('Late~', (Reader~,), {})
> Reader~.known['.md'] = Text~
%gives Reader~.known
= registry: metaclass
class Listed~(type):
    made = []
    def __init__(cls, name, bases, space):
        super().__init__(name, bases, space)
        Listed~.made.append(cls)
class First~(metaclass=Listed~):
    size = 1
class Second~(First~):
    size = 2
? [cls.size for cls in Listed~.made], Listed~.made[1] is Second~
> First~.size = 10
> Listed~.made.reverse()
= registry: dispatch on types
import functools
class Metre~:
    pass
@functools.singledispatch
def unit~(value):
    return "any"
@unit~.register(int)
def _(value):
    return "number"
@unit~.register
def _(value: Metre~):
    return "m"
? unit~(x), unit~(Metre~()), unit~('s'), unit~(b'')
> unit~.register(bytes, lambda value: 'bytes')
= registry: dispatch of a module
import own_shows~
class Shown~:
    pass
@own_shows~.show.register(Shown~)
def show_mine~(value):
    return "mine"
? own_shows~.show(Shown~()), own_shows~.show(x)
%file own_shows~.py
import functools
@functools.singledispatch
def show(value):
    return "any"
= registry: bound methods
class Meter~:
    def __init__(self):
        self.total = 0
    def count(self, n):
        self.total += n
        return self.total
class Bus~:
    def __init__(self):
        self.listeners = []
meter~, bus~ = Meter~(), Bus~()
bus~.listeners.append(meter~.count)
bus~.listeners[0](4)
? meter~.total, [one.__name__ for one in bus~.listeners]
? bus~.listeners[0].__self__ is meter~
> bus~.listeners.append(meter~.count)
> meter~.count(10)
%gives bus~
= registry: weak values
import weakref
class Node~:
    def __init__(self, name):
        self.name = name
        nodes~[name] = self
nodes~ = weakref.WeakValueDictionary()
kept~ = [Node~("a"), Node~("b")]
? sorted(nodes~) if kept~ else None
? nodes~['a'] is kept~[0]
> kept~.append(Node~('c'))
= registry: weak keys and references
import weakref
class Owner~:
    def __init__(self, name):
        self.name = name
    def say(self):
        return self.name * 2
owner~, tenant~ = Owner~("o"), Owner~("t")
tenant~.of, owner~.me = weakref.ref(owner~), weakref.proxy(owner~)
owner~.calls, owner~.gone = weakref.WeakMethod(tenant~.say), weakref.WeakMethod(Owner~("g").say)
notes~ = weakref.WeakKeyDictionary({owner~: "first", tenant~: "second"})
seen~ = weakref.WeakSet([tenant~])
? tenant~.of().name, tenant~.of().me.me.name
? owner~.calls()(), owner~.calls().__self__ is tenant~, owner~.gone()
? notes~[owner~], notes~.get(tenant~), tenant~ in seen~, tenant~.of() is owner~
> notes~[owner~] = 'changed'
> owner~.name = 'p'
> seen~.add(owner~)
%gives owner~
= data: equal values that are not the same
exact~, exacts~ = 1, {"n": 1}
class Exact~:
    debug = 0
? repr((exact~, exacts~, Exact~.debug))
> exact~ = exacts~["n"] = Exact~.debug = True
> exact~ = exacts~["n"] = Exact~.debug = 1.0
> exact~ = exacts~["n"] = Exact~.debug = 1 + 0j
> exact~ = exacts~["n"] = Exact~.debug = 0.0
> exact~ = exacts~["n"] = Exact~.debug = -0.0
> exact~ = exacts~["n"] = Exact~.debug = False
> exact~ = exacts~["n"] = Exact~.debug = "0"
> exact~ = exacts~["n"] = Exact~.debug = b"0"
%names exact~
= config: sentinel of a module, and a module that a finder fails for
import sys
import types
import own_marks~
class Finder~:
    def find_spec(self, name, path=None, target=None):
        if name == "unfound~":
            raise RuntimeError("a finder that fails")
sys.meta_path.append(Finder~())
unfound~ = sys.modules["unfound~"] = types.ModuleType("unfound~")
exec("def twice(n): return 2 * n", vars(unfound~))
? own_marks~.is_missing(own_marks~.MISSING), unfound~.twice(x)
%after pool.apply(own_marks~.missing) is own_marks~.MISSING
%file own_marks~.py
MISSING = object()
def missing():
    return MISSING
def is_missing(value):
    return value is MISSING
= config: objects without state that the script assigns
import own_plans~
class Simple~:
    def run(self):
        return "simple"
class Other~(Simple~):
    def run(self):
        return "other", super().run()
simple~ = Simple~()
own_plans~.strategy = simple~
def unset~(default=own_plans~.UNSET):
    return default is own_plans~.UNSET is own_plans~.get.__defaults__[0]
? own_plans~.run(), own_plans~.strategy is simple~
? unset~(), own_plans~.get(), own_plans~.get(own_plans~.UNSET)
> own_plans~.strategy = Other~()
> own_plans~.strategy = own_plans~.First()
> own_plans~.strategy = simple~
%file own_plans~.py
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
= config: assigned to classes and functions of a module
import functools
import own_lib~
class Mine~:
    name = "mine"
def jobs~():
    job, lib = own_lib~.Job(), own_lib~
    own = isinstance(lib.row(), lib.Job.Row), lib.Job.key(lib.Job.Row(3))
    of_job = job.kind.name, job.odd, job.field, job.slow(), job.half, job.kept, job.memo
    others = lib.Color.RED.text(), getattr(lib.Color, "extra", 0), lib.Point(2).norm()
    return own, of_job, job.first(), others, lib.called(), repr(lib.Job.number)
? jobs~()
> own_lib~.Job.kind = own_lib~.Large
> own_lib~.Job.kind = Mine~
> own_lib~.Job.field = own_lib~.Fixed("b")
> own_lib~.Job.slow = own_lib~.Job.fast
> own_lib~.Job.half = property(lambda self: "new")
> own_lib~.Job.kept = property(lambda self: "other")
> own_lib~.Job.slow = functools.partialmethod(own_lib~.Job.scale, 5)
> own_lib~.Job.number = False
> own_lib~.Job.number = -0.0
> own_lib~.Job.number = None
> own_lib~.Color.extra, own_lib~.Color.text = 3, lambda self: "text"
> own_lib~.Point.norm = lambda self: "norm"
> own_lib~.called.hook = lambda: "hook"
> own_lib~.called.hook, own_lib~.called.kind = own_lib~.row, Mine~
> own_lib~.Job.memo.cache["x"] = 1
> for name in own_lib~.MADE:
|     setattr(own_lib~.Job, name, own_lib~.MADE[name])
%file own_lib~.py
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
MADE = {name: value for name, value in vars(Job).items() if name[0] != "_"}
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
= data: large, and shares other objects later
small~, common~, left~ = [1], {"text": bytes(100_000)}, [1]
one~, two~ = common~, [common~]
common~["left"] = left~
? one~.get("more") is small~, two~[0] is one~ if two~ else None, left~
> two~ = None
| common~["more"] = small~
| common~.pop("left").append(2)
%names two~ %once
= config: defaults that are globals of a module
import own_fits~
def fitted~(n):
    model, lib = own_fits~.Model(), own_fits~
    return lib.fit(n), model.options["rate"], model.options is lib.OPTIONS, lib.Model.rate()
own_fits~.OPTIONS["rate"], own_fits~.STORE.items = 2, ["a"]
? fitted~(x)
> own_fits~.OPTIONS["rate"] += 1
> own_fits~.SEEN.append(0)
%after pool.apply(own_fits~.fit, (0,)) == own_fits~.fit(0)
%after pool.map(own_fits~.note, [1, 2], 2) == [len(own_fits~.SEEN) + n for n in (1, 2)]
%file own_fits~.py
import threading
OPTIONS, SEEN, LOCK, FILE = {"rate": 1}, [], threading.Lock(), open(__file__)
class Store:
    items = ()
STORE = Store()
def fit(x, options=OPTIONS, lock=LOCK, *, store=STORE, file=FILE):
    return options["rate"], options is OPTIONS, lock is LOCK, store.items, store is STORE, file.name
def note(x, seen=SEEN):
    seen.append(x)
    return len(seen)
class Model:
    def __init__(self, options=OPTIONS):
        self.options = options
    @staticmethod
    def rate(options=OPTIONS):
        return options["rate"]
= config: parts of functions and methods of a module
import own_tools~
def change~(n):
    fit, job = own_tools~.fit, own_tools~.Job
    fit.__defaults__ = n, *fit.__defaults__[1:]
    fit.__kwdefaults__["seen"][n] = n
    fit.__kwdefaults__["power"] = n
    own_tools~.plain.__code__ = (lambda x: x + 5).__code__ if n == 3 else other~.__code__
    own_tools~.guarded.__defaults__ = *own_tools~.guarded.__defaults__[:1], n
    job.run.__defaults__, job.run.__kwdefaults__["power"] = (n,), n
    job.run.note = n
    job.of.__defaults__ = ((n,),)
    job.Inner.get.__defaults__[0].append(n)
    job.code.__code__ = (lambda self: 7).__code__ if n == 2 else (lambda self: 8).__code__
def other~(x):
    return x + 1
change~(2)
? own_tools~.fit(3), own_tools~.plain(3), own_tools~.guarded(3), own_tools~.Job().run()
? own_tools~.Job().of(3), own_tools~.Job().code(), own_tools~.Job.Inner().get()
> change~(3)
> change~(4)
%after pool.apply(own_tools~.fit, (3,)) == own_tools~.fit(3)
%file own_tools~.py
import sys
def fit(x, rate=1, log=sys.stdout, *, seen={}, power=1):
    return rate * x ** power, log is sys.stdout, sorted(seen)
def plain(x):
    return x
def guarded(x, lock=iter([1]), rate=1):
    return rate
class Job:
    def run(self, rate=1, *, power=1):
        return rate, power, getattr(Job.run, "note", None)
    @staticmethod
    def of(x, rates=(1,)):
        return rates
    class Inner:
        def get(self, rows=[]):
            return rows
    def code(self):
        return 1
= config: definitions that a function of a module makes again
import own_again~
from own_again~ import rate as rate~
class Mine~:
    pass
own_again~.use("early")
? rate~(), own_again~.rate(), own_again~.decorated(), own_again~.Kind().name()
? own_again~.Job().go(1), own_again~.Job().go(Mine~())
? own_again~.kept[-1] is own_again~.rate, own_again~.kept[-1]()
> own_again~.use("late")
> own_again~.kept.append(own_again~.rate)
> own_again~.Job.__dict__["go"].register(Mine~, lambda self, x: "mine")
%after pool.apply(lambda: (own_again~.rate, own_again~.Kind)) == (own_again~.rate, own_again~.Kind)
%file own_again~.py
import functools
def decorate(function):
    @functools.wraps(function)
    def wrapper():
        return "decorated", function()
    return wrapper
@decorate
def decorated():
    return rate()
def rate():
    return "slow"
kept = [rate]
class Kind:
    def name(self):
        return "default"
class Job:
    @functools.singledispatchmethod
    def go(self, x):
        return "any"
    @go.register
    def _(self, x: int):
        return "int"
def use(what):
    global rate, Kind
    def rate():
        return what
    class Kind:
        def name(self):
            return "of", what
= data: of classes that are derived from built-in types
import collections
import datetime
import decimal
import functools
import math
import types
class Oldest~(collections.OrderedDict):
    def __init__(self, size):
        super().__init__()
        self.size = size
    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if len(self) > self.size:
            self.popitem(last=False)
class Lower~(dict):
    def __init__(self):
        self.sets = 0
    def __setitem__(self, key, value):
        self.sets += 1
        super().__setitem__(key.lower(), (key, value))
class Words~(collections.Counter):
    def __init__(self, name, *args):
        super().__init__(*args)
        self.name = name
class Groups~(collections.defaultdict):
    def __init__(self, depth):
        super().__init__(self.more)
        self.depth = depth
    def more(self):
        return [self.depth]
class Window~(collections.deque):
    def __init__(self, size):
        super().__init__(maxlen=size)
        self.total = 0
    def append(self, value):
        self.total += value
        super().append(value)
class History~(list):
    def __init__(self, name):
        self.name, self.best = name, 0
    def append(self, value):
        super().append(value)
        self.best = max(value, self.best)
    def extend(self, values):
        for value in values:
            self.append(value)
class Bag~(set):
    def __init__(self, name, items):
        super().__init__(items)
        self.name = name
class Frozen~(frozenset):
    def __new__(cls, *items):
        return super().__new__(cls, items)
class Data~(bytearray):
    def __init__(self, name):
        super().__init__(name.encode())
class Degrees~(float):
    def __new__(cls, degrees):
        return super().__new__(cls, math.radians(degrees))
class Path~(str):
    __slots__ = "parts"
    def __new__(cls, *parts):
        self = super().__new__(cls, "/".join(parts) + "/")
        self.parts = parts
        return self
class Shape~(tuple):
    def __new__(cls, *sizes):
        return super().__new__(cls, sizes)
class Pair~(collections.namedtuple("Pair", "first second")):
    def __new__(cls, first):
        return super().__new__(cls, first, 2 * first)
class Day~(datetime.datetime):
    def __new__(cls, text):
        self = super().__new__(cls, *map(int, text.split("-")), tzinfo=Zone~(2))
        self.text = text
        return self
class Zone~(datetime.tzinfo):
    def __init__(self, hours):
        self.offset = datetime.timedelta(hours=hours)
    def utcoffset(self, when):
        return self.offset
class Hours~(datetime.timedelta):
    def __new__(cls, hours):
        return super().__new__(cls, hours=hours)
class Money~(decimal.Decimal):
    def __new__(cls, cents):
        return super().__new__(cls, decimal.Decimal(cents) / 100)
class Options~(types.SimpleNamespace):
    def __init__(self, rate):
        super().__init__(rate=rate)
class Step~(functools.partial):
    def __new__(cls, label, func, *args):
        self = super().__new__(cls, func, *args)
        self.label = label
        return self
def content~(one):
    if isinstance(one, dict):
        one = type(one), list(one.items()), vars(one)
    elif not isinstance(one, (str, bytearray)):
        try:
            one = type(one), list(one), getattr(one, "__dict__", None)
        except TypeError:
            pass
    return repr(one), str(one), getattr(one, "parts", None)
class Sizes~:
    def __init__(self, shape=Shape~(3, 4), oldest=Oldest~(5), bag=Bag~("c", [2]), zone=Zone~(1)):
        self.all = [*shape], oldest.size, [*bag], bag.name, zone.offset
oldest~, lower~, groups~, window~ = Oldest~(2), Lower~(), Groups~(3), Window~(2)
history~, words~, bag~ = History~("loss"), Words~("w", "aab"), Bag~("b", [1])
mutable~ = oldest~, lower~, words~, groups~, window~, history~, bag~, Data~("d")
others~ = Frozen~(1, 2), Degrees~(180), Path~("a", "b"), Shape~(1, 2), Pair~(3), Hours~(3)
money~, day~ = Money~(250), Day~("2026-11-28")
options~, step~ = Options~(7), Step~("two", pow, 2)
def grow~(n):
    oldest~[n] = lower~[f"K{n}"] = words~[n] = n
    groups~[n].append(groups~), window~.append(n), history~.append(n), bag~.add(n)
    return len(oldest~), window~.total, history~.best
grow~(1)
groups~[1].pop()
? [content~(one) for one in (*mutable~, *others~, money~)]
? day~.isoformat(), day~.text, Sizes~().all
? options~.rate, type(options~) is Options~, step~(5), step~.label
> grow~(2)
| groups~[2].pop()
> grow~(3)
| groups~[3].pop()
%after pool.apply(grow~, (9,))[1] == window~.total + 9
"""
