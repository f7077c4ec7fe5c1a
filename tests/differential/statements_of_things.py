"""Statements of scripts: loggers, values of a run, what is held, imports, links."""

TEXT = r"""
= logger: level
log~ = logging.getLogger('app.part~')
log~.setLevel(logging.ERROR)
? log~.level, log~ is logging.getLogger('app.part~'), log~.isEnabledFor(20)
> log~.setLevel(15)
> log~.propagate = False
> log~.disabled = True
%gives log~
= logger: set by a function
def quiet~(name):
    found = logging.getLogger(name)
    found.setLevel(33)
    return found
quiet_log~ = quiet~("lib~.deep")
? quiet_log~.level, logging.getLogger('lib~.deep.more').getEffectiveLevel()
> logging.getLogger('lib~').setLevel(5)
| quiet_log~.setLevel(0)
= logger: of a module
import own_noise~
? own_noise~.log.disabled, own_noise~.log.propagate, own_noise~.log.isEnabledFor(40)
> own_noise~.log.disabled = True
> own_noise~.log.propagate = False
%file own_noise~.py
import logging
log = logging.getLogger(__name__)
= logger: of a class of its own
class Verbose~(logging.Logger):
    prefix = ">"
    def note(self, text):
        return self.prefix + text
before~ = logging.getLoggerClass()
logging.setLoggerClass(Verbose~)
verbose~ = logging.getLogger("verbose~")
logging.setLoggerClass(before~)
? verbose~.note('a'), type(verbose~) is Verbose~, verbose~ is logging.getLogger('verbose~')
> Verbose~.prefix = '!'
> verbose~.setLevel(35)
= logger: in an object
class Service~:
    def __init__(self):
        self.log = logging.getLogger("service~")
        self.adapted = logging.LoggerAdapter(self.log, {"run": 3})
service~ = Service~()
service~.log.setLevel(25)
? service~.log.level, service~.adapted.extra, service~.adapted.logger is service~.log
> service~.adapted.extra['more'] = 1
> service~.log.setLevel(7)
%gives service~
= logger: basic setup
logging.basicConfig(level=logging.WARNING + 2)
? logging.getLogger().level
> logging.getLogger().setLevel(31)
%once
= logger: all below a level
logging.disable(logging.DEBUG)
? logging.root.manager.disable
> logging.disable(logging.INFO)
%once
= logger: handlers
handled~ = logging.getLogger("handled~")
handled~.addHandler(logging.NullHandler())
? len(handled~.handlers)
%differs handlers of loggers are not sent
= random: drawn at the top
import random
draw~ = [random.random() for _ in range(2)]
? draw~
> draw~.append(random.random())
%gives draw~
= random: generator object
import random
dice~ = random.Random(4)
class Player~:
    def __init__(self, dice):
        self.dice = dice
players~ = [Player~(dice~), Player~(dice~)]
dice~.random()
? players~[0].dice is dice~ is players~[1].dice
> dice~.random()
> players~[0].dice.seed(9)
%gives dice~
= random: of the system
import random
system~ = random.SystemRandom()
? 0 <= system~.random() < 1
= random: generator of numpy
import numpy as np
rng~ = np.random.default_rng(3)
first~ = rng~.normal(size=2)
? first~, type(rng~.bit_generator).__name__
> first~ = rng~.normal(size=1)
%names first~ %gives rng~
= random: id as a key
thing~ = ['thing']
by_id~ = {id(thing~): 'found'}
? by_id~.get(id(thing~))
%differs the id of an object is another one in a worker
= held: folder made anew
import shutil
out~ = os.path.abspath("out~")
shutil.rmtree(out~, ignore_errors=True)
os.makedirs(out~)
? os.listdir(out~)
%after os.path.getsize(os.path.join(out~, 'rows')) == 3
%inside
with open(os.path.join(out~, 'rows'), 'w') as rows~:
    rows~.write('one')
= held: log file begun anew
begun~ = open(os.path.abspath("begun~.log"), "w")
begun~.write("begin\n")
begun~.close()
? begun~.closed
%unsent a file, also a closed one %after open(begun~.name).read() == 'begin\nend'
%inside
with open(begun~.name, 'a') as more~:
    more~.write('end')
= held: file open for reading
lines~ = open('lines~.txt')
title~ = lines~.readline()
? title~
? lines~.readline()
%unsent an open file
%file lines~.txt
title
one
two
three
= held: lock in an object
import threading
class Shelf~:
    def __init__(self):
        self.lock = threading.Lock()
        self.books = []
    def put(self, book):
        with self.lock:
            self.books.append(book)
shelf~ = Shelf~()
shelf~.put("a")
? shelf~.books, shelf~.lock.acquire(blocking=False) and shelf~.lock.release()
> shelf~.put('b')
> shelf~ = Shelf~()
%names shelf~ %gives shelf~.books
= held: lock that is held
import threading
gate~ = threading.Lock()
gate~.acquire()
? gate~.locked()
> gate~.release() if gate~.locked() else gate~.acquire()
%unsent a lock
= held: condition and event
import threading
ready~ = threading.Event()
ready~.set()
changed~ = threading.Condition()
? ready~.is_set()
? changed~.acquire(blocking=False)
> ready~.clear()
%unsent an event has a lock
= held: values of a thread
import threading
local~ = threading.local()
local~.name = 'main'
? getattr(local~, 'name', None)
%unsent values of a thread %differs values of a thread arrive new
= held: queue with an item
import queue
inbox~ = queue.Queue()
inbox~.put('letter')
? inbox~.qsize(), list(inbox~.queue)
> inbox~.put('card')
%unsent a queue has locks
= held: generator
numbers~ = (n * n for n in range(20))
first~ = next(numbers~)
? first~
? next(numbers~)
> first~ = next(numbers~)
%names first~ %unsent a generator
= held: place of an iterator
import copy
cursor~ = iter(['a', 'b', 'c', 'd'])
next(cursor~)
? list(copy.copy(cursor~))
> next(cursor~)
= held: connection at first use
import sqlite3
link~ = None
def linked~():
    global link~
    if link~ is None:
        link~ = sqlite3.connect(":memory:", check_same_thread=False)
    return link~
? linked~().execute('select 5').fetchone()[0]
> linked~()
= held: connection of a module
import own_base~
? own_base~.fetched()
> own_base~.fetched()
%file own_base~.py
import sqlite3
_link = None
def fetched():
    global _link
    if _link is None:
        _link = sqlite3.connect(":memory:", check_same_thread=False)
    return _link.execute("select 6").fetchone()[0]
= held: threads
from concurrent.futures import ThreadPoolExecutor
threads~ = ThreadPoolExecutor(1)
lengths~ = list(threads~.map(len, ["a", "bb"]))
threads~.shutdown()
? lengths~
? threads~._max_workers
> lengths~.append(3)
%gives lengths~ %unsent an executor
= held: shared number
import multiprocessing
shared~ = multiprocessing.get_context("fork").Value("i", 4)
? shared~.value
> shared~.value += 1
%unsent it is shared with children that inherit it
= held: digest and match
import hashlib
import re
digest~ = hashlib.sha256(b"a")
hit~ = re.match(r"(\w+)", "word and more")
stem~ = hit~.group(1)
? stem~
? digest~.hexdigest()[:6]
? hit~.start()
> digest~.update(b'b')
%unsent a digest, a match
= held: socket
import atexit
import socket
near~, far~ = socket.socketpair()
atexit.register(near~.close)
atexit.register(far~.close)
? near~.fileno() >= 0
%unsent a socket
= held: buffer and text
import io
text~ = io.StringIO()
print('one', file=text~)
raw~ = io.BytesIO(b'ab')
? text~.getvalue(), text~.tell(), raw~.getvalue()
> text~.write('two')
> raw~.seek(1)
| raw~.write(b'x')
%gives text~
= held: view of memory
import numpy as np
memory~ = memoryview(bytearray(b'abc'))
? bytes(memory~)
> memory~[0] = 90
%unsent a view of memory
= import: codec that it registers
import own_codec~
? 'abc'.encode('turned~')
%file own_codec~.py
import codecs
def _encode(text, errors="strict"):
    return text[::-1].encode(), len(text)
def _search(name):
    return codecs.CodecInfo(_encode, None, name=name) if name == "turned~" else None
codecs.register(_search)
= import: entries of another module
import own_menu~
import own_dishes~  # fills the menu
? own_menu~.dishes(), len(own_menu~.MENU)
> own_menu~.MENU['water'] = 0
%gives own_menu~.MENU
%file own_menu~.py
MENU = {}
def dishes():
    return sorted(MENU)
%file own_dishes~.py
try:
    from own_menu~ import MENU
except ImportError:
    from .own_menu~ import MENU
MENU["soup"] = 4
= import: optional
try:
    import no_such_package~ as fast~
except ImportError:
    fast~ = None
try:
    import json as coder~
except ImportError:
    coder~ = None
? fast~ is None, coder~.dumps([x])
> fast~ = coder~
%names fast~
= import: in a function
def lazy~(n):
    import own_late~
    return own_late~.answer(n)
? lazy~(x)
%modes script bare stdin runpy
%file own_late~.py
BASE = 70
def answer(n):
    return BASE + n
= import: submodule in a function
def deep~(n):
    from own_shed~ import tools
    import own_shed~.parts.bolts
    return tools.SIZE * n, own_shed~.parts.bolts.COUNT
? deep~(x)
> import own_shed~.tools
| own_shed~.tools.SIZE = 9
> import own_shed~.parts.bolts as bolts~
| bolts~.COUNT = 8
%modes script bare stdin runpy
%file own_shed~/__init__.py
%file own_shed~/tools.py
SIZE = 2
%file own_shed~/parts/__init__.py
%file own_shed~/parts/bolts.py
COUNT = 3
= import: names by the modules of the process
import inspect
import sys
grain~ = 2
def by_name_a~(n):
    return n * grain~
def by_name_b~(n):
    return n + grain~
def chosen~(name):
    return getattr(sys.modules[__name__], name)
def all~(n):
    members = inspect.getmembers(sys.modules["__main__"], inspect.isfunction)
    return [one(n) for name, one in members if name.startswith("by_name_")]
? chosen~('by_name_b~')(x), len(all~(x)) >= 2
> grain~ = 40
> def by_name_b~(n):
|     return 'changed'
%names grain~ by_name_b~
= import: source of a class
import inspect
class Shown~:
    size = 3
? inspect.getsource(Shown~)
%modes script bare runpy
= import: added to the built-in names
import builtins
builtins.loud~ = True
builtins.shout~ = lambda text: text.upper() if loud~ else text
? shout~('a'), loud~
> builtins.loud~ = False
> setattr(builtins, 'shout~', str)
= import: module by another name
import os.path as paths~
import collections.abc
paths_too~ = paths~
? paths~.join('a', 'b'), paths_too~ is paths~, collections.abc.Sized.__name__
= import: the script itself
import sys
itself~ = sys.modules[__name__]
weight~ = [2]
? itself~.weight~, itself~.weight~ is weight~
> weight~ = [3]
> itself~.weight~.append(4)
%names weight~
= random: functions under other names
import functools
import random
from random import random as draws~
import numpy as np
between~, normal~ = functools.partial(random.uniform, 0, 1), np.random.standard_normal
class Noise~:
    def __init__(self):
        self.source = random.gauss
    def first(self, source=random.random):
        return self.source(0, 1), source()
noise~, chances~ = Noise~(), {"choice": random.choice}
def drawn~(n):
    random.seed(n)
    np.random.seed(n)
    return draws~(), between~(), normal~(), chances~["choice"](range(10**9)), *noise~.first()
def of~(source):
    random.seed(3)
    return source()
? drawn~(x)
%after pool.map(of~, [random.random, draws~]) == [of~(draws~)] * 2
= held: standard streams and views of dicts
import functools
import sys
import types
error~, data~, write~ = sys.stderr, sys.stdout.buffer, sys.stderr.write
say~ = functools.partial(print, file=sys.stderr)
class Printer~:
    def __init__(self, stream=sys.stdout):
        self.stream = stream
printer~, variables~, plain~ = Printer~(), os.environ, {"rate": 1}
shown~ = types.MappingProxyType(plain~)
def streams~(out=sys.stdout):
    return out is sys.stdout is printer~.stream, error~ is sys.stderr, data~ is sys.stdout.buffer
def show~(n):
    plain~["rate"] = n
    return shown~["rate"]
? streams~(), write~.__self__ is sys.stderr is say~.keywords['file'], variables~ is os.environ
? show~(x)
%after pool.apply(lambda out: (out is sys.stdout, out), (sys.stdout,)) == (True, sys.stdout)
= held: views and types of Python beside a list
import sys, types
beside~ = [1]
views~ = {"view": {1: 2}.values(), "list": beside~, "out": sys.stdout, "next": [beside~]}
kinds~ = [types.FunctionType, types.TracebackType, type({}.keys()), sys.stderr, beside~]
def lengthen~():
    views~["list"].append(2)
    return len(beside~) - len(views~["list"]), views~["next"][0] is kinds~[4] is beside~
? lengthen~(), views~["out"] is sys.stdout
? kinds~[:4] == [types.FunctionType, types.TracebackType, type({}.keys()), sys.stderr]
> beside~.append(3)
> kinds~.insert(0, types.FunctionType)
%gives beside~
= held: variables of a context that are reset
from contextvars import ContextVar
request~, speaker~, tokens~ = ContextVar("request~"), ContextVar("speaker~", default="nobody"), []
? request~.get('none'), speaker~.get()
> tokens~.append((request~, request~.set(1)))
> tokens~.append((speaker~, speaker~.set("first")))
> tokens~.append((speaker~, speaker~.set("second")))
> for variable, token in tokens~[::-1]:
|     variable.reset(token)
%once
= config: patch of an installed module that is taken back
import colorsys
import textwrap
class Wide~(textwrap.TextWrapper):
    pass
installed~ = colorsys.yiq_to_rgb, colorsys.ONE_THIRD, textwrap.TextWrapper
def patched~(n):
    import colorsys as late
    return late.yiq_to_rgb(n, 0, 0), late.ONE_THIRD, textwrap.TextWrapper.__name__
? patched~(x)
> colorsys.yiq_to_rgb, colorsys.ONE_THIRD, textwrap.TextWrapper = lambda *_: 3, 3, Wide~
> colorsys.yiq_to_rgb, colorsys.ONE_THIRD, textwrap.TextWrapper = installed~
> colorsys.yiq_to_rgb, colorsys.ONE_THIRD = lambda *_: 4, 4
> colorsys.yiq_to_rgb, colorsys.ONE_THIRD, textwrap.TextWrapper = installed~
%once
= config: attributes of installed classes
import functools
import json
import logging
import string
from fractions import Fraction
logging.addLevelName(5 + int("~"), "TRACE~")
def trace~(self, message):
    return self.name, logging.getLevelName(5 + int("~")), message
logging.Logger.trace~ = trace~
Fraction.half~ = classmethod(lambda cls: cls(1, 2))
Fraction.twice~ = property(lambda self: 2 * self)
setattr(string.Template, "extra~", [1])
string.Formatter.vformat = functools.partialmethod(string.Formatter.vformat)
def default~(self, obj):
    return f"own {type(obj).__name__}"
json.JSONEncoder.default = lambda self, obj: "first"
? logging.getLogger("a~").trace~(x), Fraction.half~(), Fraction(1, 3).twice~
? string.Template.extra~, json.dumps({"a": bytearray(x)}), string.Formatter().format("{}", x)
> json.JSONEncoder.default = default~
> Fraction.half~ = classmethod(lambda cls: cls(1, 4))
> string.Template.extra~.append(2)
> string.Template.extra~ = 5
%once
= config: objects of installed modules that an own module gets later
import calendar
import string
import own_state~
from logging import root
? [getattr(one, 'name', None) for one in own_state~.get()]
? own_state~.get()[1] is string.capwords, own_state~.c is calendar.c
> own_state~.root, own_state~.capwords, own_state~.c = root, string.capwords, calendar.c
%file own_state~.py
root = capwords = c = None
def get():
    return root, capwords, c
= config: module that the program makes
import importlib.util
plugin~ = importlib.util.module_from_spec(importlib.util.spec_from_loader("plugin~", None))
with open("plugin~.txt") as text:
    exec(text.read(), vars(plugin~))
? plugin~.scale(x), plugin~.Job(1).run(x), plugin~.Job.Part().run(x)
? plugin~.cached(x + 10 * plugin~.rate)
> plugin~.rate = 5
%after pool.map(plugin~.scale, [3]) == [plugin~.scale(3)]
%after pool.map(plugin~.Job(3).run, [2]) == [plugin~.Job(3).run(2)]
%after pool.map(plugin~.cached, [7]) == [plugin~.cached(7)]
%after pool.apply(lambda: (plugin~.scale, plugin~.Job)) == (plugin~.scale, plugin~.Job)
%file plugin~.txt
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
= config: names that lead to other modules
import importlib
import importlib.util
import sys
import own_first~
import own_group~
import own_second~
leads~, paths~ = own_first~, [own_first~.__name__ + ".scaled"]
named~ = [own_second~.__name__, own_group~.__name__]
def load~(name):
    spec = importlib.util.spec_from_file_location(f"plugin_{name}~", f"{name}~.txt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
plugins~ = {name: load~(name) for name in ("add", "sub")}
def find~(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
? leads~.RATE, leads~.scaled(x), own_group~.lib.RATE, own_group~.lib.scaled(x)
? {name: plugin.run(x) for name, plugin in plugins~.items()}
? [importlib.import_module(name).RATE + sys.modules[name].RATE for name in named~]
? {name: getattr(own_first~, name) for name in own_first~.__all__}
? getattr(own_group~, 'ADDED', None), {k: v for k, v in vars(own_group~).items() if k.isupper()}
? [find~(path)(x) for path in paths~]
> leads~ = own_group~.lib = own_second~
> own_second~.RATE = own_group~.RATE = own_group~.ADDED = 11
> plugins~['add'].DONE.append(1)
> own_first~.__all__.append('RATE')
> own_first~.RATE = 5
> own_first~.scaled = lambda x: 'other'
%names leads~
%file own_first~.py
__all__ = []
RATE = 2
def scaled(x):
    return x * RATE
%file own_second~.py
RATE = 3
def scaled(x):
    return x * RATE
%file own_group~.py
try:
    import own_first~ as lib
except ImportError:
    from . import own_first~ as lib
RATE = 1
%file add~.txt.py
DONE = []
def run(x):
    return x + len(DONE)
%file sub~.txt.py
def run(x):
    return x - 1
= import: definitions of a module that change
import importlib
import own_defs~
from own_defs~ import Box as Box~, scaled as first~
def make~(text):
    exec(compile(text, own_defs~.__file__, "exec"), vars(own_defs~))
def method~(name, text):
    space = {"__name__": own_defs~.__name__}
    exec(compile("class Box:\n    " + text, own_defs~.__file__, "exec"), space)
    setattr(own_defs~.Box, name, vars(space["Box"])[name])
? own_defs~.scaled(x), first~(x)
? own_defs~.used(x), Box~().go()
> own_defs~.scaled.__code__ = (lambda x, by: x + by).__code__
> make~('def scaled(x, by=1): return -x * by')
> exec('def scaled(x, by=1): return twice(x) - 1', vars(own_defs~))
> method~('go', 'def go(self): return 2, self.size')
> method~('static', '@staticmethod\n    def static(): return 2')
> method~('wide', '@property\n    def wide(self): return 2')
> vars(own_defs~).pop('removed', None)
> make~('def removed(x): return -x')
> importlib.reload(own_defs~)
> make~('def scaled(x, by=1): return -x * by')
%places between
%file own_defs~.py
def scaled(x, by=1):
    return x * by
def twice(x):
    return 2 * x
def removed(x):
    return x
class Box:
    size = 7
    def go(self):
        return 1, self.size
    @staticmethod
    def static():
        return 1
    @property
    def wide(self):
        return 1
class Bag(Box):
    pass
def used(x):
    box = Bag()
    return box.go(), box.static(), box.wide, removed(x) if "removed" in globals() else None
= import: globals that come later and that no code names
import builtins
import importlib
import pickle
import sys
runs~, pickled~ = eval, b""
class Base~:
    pass
class Finds~:
    def get(self, name):
        return globals().get(name)
    def names(self):
        return sorted(one.__name__ for one in Base~.__subclasses__())
finds~ = Finds~()
def by_space~(name):
    return by_space~.__globals__.get(name), sys._getframe().f_globals.get(name)
? finds~.get('late~'), Finds~().get('late~')
? finds~.names()
? sorted(one.__name__ for one in Base~.__subclasses__())
? getattr(importlib.import_module('__main__'), 'late~', None)
? builtins.eval("globals().get('late~')")
? runs~("globals().get('late~')")
? by_space~('late~')
? type(pickle.loads(pickled~)).__name__ if pickled~ else None
> late~ = [1]
> class Late~(Base~):
|     pass
| pickled~ = pickle.dumps(Late~())
> late~ = 5
%names late~ Late~ pickled~
= function: cached by types, and in a module
import functools
import sys
import own_cached~
@functools.lru_cache(maxsize=2, typed=True)
def typed~(n, y=0):
    note_load()
    return {"n": n}
@functools.lru_cache
def stream~():
    return sys.stdout
typed~(1), typed~(1.0), typed~(2, y=3), typed~(1.0)
stream~()
own_cached~.options()["rate"] = 9
? typed~(2, y=3), typed~(1.0), stream~() is sys.stdout
? own_cached~.rate(), own_cached~.options.cache_info().currsize
> own_cached~.options.cache_clear()
> own_cached~.options()["rate"] = 7
%file own_cached~.py
import functools
@functools.lru_cache(maxsize=None)
def options():
    return {}
def rate():
    return options().get("rate")
= class: descriptors with an __init__ of their own
class Shown~(property):
    def __init__(self, func):
        self.func = func
    def __get__(self, obj, owner=None):
        return self if obj is None else self.func(obj)
class Tagged~(property):
    def __init__(self, func, tag):
        super().__init__(func)
        self.tag = tag
class Named~(classmethod):
    def __init__(self, func, *, name):
        super().__init__(func)
        self.name = name
class Plain~(staticmethod):
    def __new__(cls, func, tag):
        return super().__new__(cls, func)
    def __init__(self, func, tag):
        super().__init__(func)
        self.tag = tag
class Wears~:
    rate = 2
    @Shown~
    def shown(self):
        return self.rate
    tagged = Tagged~(lambda self: self.rate * 2, "blue")
    named = Named~(lambda cls: cls.rate * 3, name="n")
    plain = Plain~(lambda: 4, "red")
? Wears~().shown, Wears~().tagged, Wears~.named(), Wears~.plain()
? Wears~.tagged.tag, vars(Wears~)['named'].name, vars(Wears~)['plain'].tag
? type(Wears~.tagged) is Tagged~, Wears~.shown.func(Wears~())
> Wears~.rate = 5
= data: hashes of objects in a cycle
import enum
class Colour~(enum.Enum):
    RED = 1
class Node~:
    def __init__(self, name):
        self.near, self.name, self.far = set(), name, {}
    def __hash__(self):
        return hash(self.name)
    def __eq__(self, other):
        return self.name == other.name
    def link(self, other):
        self.near.add(other)
        other.near.add(self)
        self.far[other] = other.far[self] = len(self.near)
class Slots~(Node~):
    __slots__ = ("key", "held")
    def __init__(self, *key):
        super().__init__("s")
        self.key = key
        self.held = {self: 1}
    def __hash__(self):
        return hash(self.key)
first~, second~ = Node~("a"), Node~("b")
first~.link(second~)
slots~ = Slots~(Colour~.RED, ("x", 2.5))
? list(vars(first~)), sorted(one.name for one in second~.near), first~ in second~.near
? first~.far[second~], second~.far[first~], any(one is second~ for one in first~.near)
? slots~.held[slots~], list(slots~.held)[0] is slots~, list(vars(slots~))
> first~.link(Node~("c"))
> second~.far[first~] = "new"
> slots~.held[first~] = 3
%gives first~
= data: attributes that the class of a library leaves out
import fractions
import pathlib
class Folder~(pathlib.PurePosixPath):
    def label(self):
        return self.tags
class Amount~(fractions.Fraction):
    __slots__ = ("unit",)
    def __new__(cls, unit, value):
        self = super().__new__(cls, value, 3)
        self.unit = unit
        return self
folder~, amount~ = Folder~("/a/b"), Amount~("kg", 2)
folder~.tags = ["x", folder~]
? str(folder~), folder~.label()[0], folder~.tags[1] is folder~, type(folder~) is Folder~
? str(amount~), amount~.unit, type(amount~) is Amount~
> folder~.tags[0] = "y"
> amount~.unit = "g"
= link: list of two
twice~ = [@, @]
? twice~[0] is twice~[1] is @
= link: attribute of a class
class Has~:
    part = @
? Has~.part is @
= link: default
def using~(part=@):
    return part
? using~() is @
= link: closure
def of~(part):
    return lambda: part
reader~ = of~(@)
? reader~() is @
= link: kept by a module
import own_keep~
own_keep~.keep(@)
? own_keep~.kept() is @
%file own_keep~.py
_kept = []
def keep(one):
    _kept.append(one)
def kept():
    return _kept[-1]
= link: second name
import copy
same~ = @
other~ = copy.copy(@)
? same~ is @
= link: record
from types import SimpleNamespace
record~ = SimpleNamespace(of=@, copies=None)
? record~.of is @
? record~.copies is None or record~.copies[0] is @
> record~.copies = [record~.of]
= link: partial
import functools
shown~ = functools.partial(id, @)
? shown~.args[0] is @
"""
