"""Statements of scripts: classes, functions, torch, settings."""

TEXT = r"""
= class: counter of instances
class Ticket~:
    sold = 0
    waiting = []
    def __init__(self):
        type(self).sold += 1
        self.number = self.sold
tickets~ = [Ticket~() for _ in range(3)]
? Ticket~.sold, [one.number for one in tickets~], Ticket~.waiting
> tickets~.append(Ticket~())
> Ticket~.waiting.append('me')
> Ticket~.sold = 90
%gives Ticket~.waiting
= class: methods added later
class Shape~:
    def __init__(self, side):
        self.side = side
def area_of~(self):
    return self.side ** 2
Shape~.area = area_of~
? Shape~(x).area(), [hasattr(Shape~, name) for name in ('extra', 'double')]
> Shape~.extra = property(lambda self: self.side + 1)
> Shape~.double = staticmethod(lambda n: n * 2)
> Shape~.area = lambda self: -1
= class: descriptor
class Positive~:
    def __set_name__(self, owner, name):
        self.place = "_" + name
    def __get__(self, one, owner=None):
        return self if one is None else getattr(one, self.place, 0)
    def __set__(self, one, value):
        setattr(one, self.place, max(0, value))
class Account~:
    money = Positive~()
account~ = Account~()
account~.money = 8
? account~.money, Account~.money.place, vars(account~)
> account~.money -= 100
> account~.money = 21
%gives account~
= class: slots
class Point~:
    __slots__ = ("across", "up")
    def __init__(self, across, up):
        self.across, self.up = across, up
corner~ = Point~(2, 3)
? corner~.across, corner~.up, type(corner~) is Point~
> corner~.up = -3
> corner~ = Point~(corner~.up, 1)
%names corner~ %gives corner~
= class: number with a unit
class Length~(float):
    unit = "m"
    def __new__(cls, value, unit=None):
        made = super().__new__(cls, value)
        made.unit = unit or cls.unit
        return made
lengths~ = [Length~(2.5), Length~(3, "km")]
? [(one, one.unit) for one in lengths~], Length~(x).unit
> Length~.unit = 'cm'
> lengths~.append(Length~(1))
%gives lengths~
= class: single instance
class Only~:
    _one = None
    def __new__(cls):
        if cls._one is None:
            cls._one = super().__new__(cls)
            cls._one.log = []
        return cls._one
only~ = Only~()
? Only~() is only~, only~.log, Only~._one is only~
> Only~().log.append('seen')
%gives only~
= class: exception of its own
class Refused~(ValueError):
    codes = {"low": 1}
    def __init__(self, word):
        super().__init__(word)
        self.code = self.codes[word]
def risky~(word):
    try:
        raise Refused~(word)
    except Refused~ as error:
        return error
? risky~('low').code, risky~('low')
> Refused~.codes['low'] = 5
= class: answer of the task
from typing import NamedTuple
class Hit~(NamedTuple):
    place: int
    score: float = 0.5
    @property
    def worth(self):
        return self.place * self.score
? Hit~(x), Hit~(x).worth
= class: cached property
import functools
class Report~:
    def __init__(self, rows):
        self.rows = rows
    @functools.cached_property
    def total(self):
        note_load()
        return sum(self.rows)
report~ = Report~([1, 2, 3])
report~.total
? report~.total
> report~.rows.append(4)
| report~.__dict__['total'] = 10
%gives report~.rows
= class: key by identity
class Cell~:
    pass
cells~ = [Cell~(), Cell~()]
values~ = {cells~[0]: "first", cells~[1]: "second"}
? [values~.get(cell) for cell in cells~]
> cells~.reverse()
> values~[cells~[0]] = 'changed'
%gives values~
= class: subclass of a dict
class Bag~(dict):
    def __missing__(self, key):
        return f"no {key}"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]
bag~ = Bag~(size=3)
bag~.label = "mine"
? bag~.size, bag~['gone'], vars(bag~), dict(bag~)
> bag~['size'] = 4
> bag~.label = 'yours'
%gives bag~
= class: wrapped by a decorator
def counted~(cls):
    class Counted(cls):
        base = cls
        def name(self):
            return "counted " + super().name()
    Counted.__name__ = Counted.__qualname__ = cls.__name__
    return Counted
@counted~
class Job~:
    def name(self):
        return "job"
job~ = Job~()
? job~.name(), type(job~) is Job~, Job~.base is not Job~
> Job~.name = lambda self: 'other'
= class: nested and generic
from typing import Generic, TypeVar
T~ = TypeVar("T~")
class Holder~(Generic[T~]):
    class Part:
        weight = 2
    def __init__(self, item):
        self.item, self.part = item, Holder~.Part()
holder~ = Holder~[int](5)
? holder~.item, holder~.part.weight, type(holder~.part) is Holder~.Part
> Holder~.Part.weight = 30
> holder~.item = [holder~.part]
%gives holder~
= class: bases and virtual subclasses that come later
import abc
class One~:
    who = "one"
class Two~:
    who = "two"
class Heir~(One~):
    options, deep, itself = {}, {"inside": bytearray()}, {}
Heir~.itself["class"] = Heir~
class Rounded~(abc.ABC):
    pass
class Circle~:
    pass
class Ring~:
    pass
circle~, ring~ = Circle~(), Ring~()
? Heir~.who, len(Heir~.options), len(Heir~.deep['inside']), len(Heir~.itself)
? isinstance(circle~, Rounded~), isinstance(ring~, Rounded~)
> Heir~.__bases__ = (Two~,)
| Rounded~.register(Circle~)
> Rounded~.register(Ring~)
| Heir~.options[1] = Heir~.itself["more"] = 1
> Heir~.deep["inside"].append(1)
= class: names and defaults of its own
import collections
class Fake~:
    __name__ = "fake"
class Computed~:
    @property
    def __name__(self):
        return "computed"
Pair~ = collections.namedtuple("Pair~", "left right")
Pair~.__new__.__defaults__ = (0, 0)
? Fake~().__name__, Fake~.__name__[:4], Computed~().__name__, Computed~.__name__[:8]
? Pair~(1), Pair~(1, 2)
> Pair~.__new__.__defaults__ = (5,)
> Pair~.__new__.__defaults__ = (0, 7)
= function: counted calls
import functools
def counted~(func):
    @functools.wraps(func)
    def inner(*given):
        inner.calls += 1
        return func(*given)
    inner.calls = 0
    return inner
@counted~
def triple~(n):
    return 3 * n
triple~(1)
? triple~.calls, triple~.__wrapped__(x), triple~.__name__
> triple~(2)
> triple~.calls = 40
= function: counter in a closure
def counter~():
    n = 0
    def step(by=1):
        nonlocal n
        n += by
        return n
    return step
tick~ = counter~()
tick~()
? tick~(0)
> tick~()
> tick~(by=5)
= function: two closures of one cell
def account~():
    entries = []
    def put(entry):
        entries.append(entry)
    def seen():
        return entries
    return put, seen
put~, seen~ = account~()
put~("first")
? seen~(), put~.__closure__[0].cell_contents is seen~()
> put~('next')
%gives put~.__closure__[0].cell_contents
= function: default that was a global
scale~ = 3
limits~ = [0, 10]
def clipped~(n, scale=scale~, limits=limits~):
    return min(max(n * scale, limits[0]), limits[1])
scale~ = 4
? clipped~(x), scale~, clipped~.__defaults__[1] is limits~
> limits~[0] = 2
> scale~ = 8
> clipped~.__defaults__ = (5, limits~)
%names scale~ %gives limits~
= function: partial
import functools
def blend~(a, b, table):
    return a + b + len(table)
table~ = {"k": 1}
blended~ = functools.partial(blend~, 10, table=table~)
? blended~(x), blended~.keywords['table'] is table~
> table~['more'] = 2
> blended~ = functools.partial(blend~, 100, table=table~)
%names blended~ %gives table~
= function: contents of a cache
import functools
@functools.cache
def looked_up~(n):
    return [n]
looked_up~(1).append(3)
looked_up~(2)
@functools.lru_cache
def settings~(name="x", *, rate=1):
    return {"name": name, "rate": rate}
current~ = settings~(rate=2)
current~["rate"] = 5
@functools.cache
def large~(n):
    note_load()
    return list(range(n))
large~(50_000)
def size~(n):
    return looked_up~.cache_info().currsize
def kept~(n):
    looked_up~(n)
    return size~(n)
? size~(x)
? settings~(rate=2) is current~, current~
? large~(50_000)[7]
> looked_up~(7)
> large~(50_000)[7] = -1
> looked_up~.cache_clear()
> settings~(rate=2)["rate"] = 6
%after pool.map(kept~, [50, 51], 2) == [size~(0) + 1, size~(0) + 2]
%after bool(looked_up~(99)) and pool.map(size~, range(2), 1) == [size~(0)] * 2
= function: recursion of two
def even~(n):
    return True if n == 0 else odd~(n - 1)
def odd~(n):
    return False if n == 0 else even~(n - 1)
? even~(x), odd~(x)
> def odd~(n):
|     return 'changed'
%names odd~
= function: context manager
import contextlib
depth~ = []
@contextlib.contextmanager
def deeper~(name):
    depth~.append(name)
    try:
        yield list(depth~)
    finally:
        depth~.pop()
with deeper~("top") as inside~:
    pass
def nested~(name):
    with deeper~(name) as found:
        return found
@deeper~("decorated")
def decorated~():
    return list(depth~)
? inside~, nested~(x), depth~, decorated~()
> depth~.append('base')
%gives depth~
= function: made by exec
space~ = {"k": 2}
exec("def made~(n):\n    return n * k", space~)
made~ = space~["made~"]
? made~(x)
> space~['k'] = 9
= function: made under the guard
base~ = 10
? shifted~(x)
? local_class~(x).n, local_class~.__name__
> base~ = 90
%names base~
%inside
offset~ = 5
def shifted~(n):
    return n + offset~ + base~
class local_class~:
    def __init__(self, n):
        self.n = n * offset~
= torch: network and optimizer
import torch
net~ = torch.nn.Linear(3, 1)
optim~ = torch.optim.SGD(net~.parameters(), lr=0.25)
def trained~(n):
    before = net~.weight.detach().clone()
    optim~.zero_grad()
    with torch.enable_grad():
        net~(torch.ones(2, 3).to(before)).sum().backward()
    optim~.step()
    return bool((before != net~.weight).all())
? optim~.param_groups[0]['params'][0] is net~.weight, optim~.param_groups[0]['lr']
? trained~(x)
> optim~.param_groups[0]['lr'] = 0.5
> net~.requires_grad_(True)
= torch: weights changed in place
import torch
def load_net~():
    note_load()
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
model~ = load_net~()
torch.nn.init.constant_(model~[0].weight, 0.5)
model~.eval()
? model~[0].weight, model~.training, model~(torch.ones(2).to(model~[0].weight)).detach()
> with torch.no_grad():
|     model~[0].weight.add_(1)
> model~.train()
> model~[0].bias.data.fill_(3)
> model~.load_state_dict({k: v * 0 for k, v in model~.state_dict().items()})
%gives model~
= torch: tied weights
import torch
class Tied~(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.outer = torch.nn.Linear(2, 2)
        self.outer.weight = self.inner.weight
        self.register_buffer("steps", torch.zeros(1))
tied~ = Tied~()
? tied~.outer.weight is tied~.inner.weight, tied~.steps, type(tied~) is Tied~
> tied~.steps += 1
> tied~.name = 'b'
%gives tied~
= torch: tensor and its view
import torch
def load_batch~():
    note_load()
    return torch.arange(8.0)
batch~ = load_batch~()
head~ = batch~[:2]
head~ += 0.5
? batch~, head~, batch~.data_ptr() == head~.data_ptr()
> head~.mul_(2)
> batch~[5] = -1
%gives batch~
= torch: scheduler
import torch
weight~ = torch.nn.Parameter(torch.ones(2))
adam~ = torch.optim.Adam([weight~], lr=0.1)
plan~ = torch.optim.lr_scheduler.StepLR(adam~, step_size=1, gamma=0.5)
? plan~.optimizer is adam~, adam~.param_groups[0]['params'][0] is weight~
? plan~.get_last_lr()
> weight~.grad = torch.ones(2)
| adam~.step()
| plan~.step()
= torch: generator
import torch
source~ = torch.Generator().manual_seed(5)
noise~ = torch.rand(3, generator=source~)
? noise~, source~.device.type
> noise~ = torch.rand(2, generator=source~)
%names noise~
= setting: environment
os.environ["PLACE~"] = "home"
os.environ.setdefault("KIND~", "a")
? [os.environ.get(name) for name in ('PLACE~', 'KIND~', 'MORE~')]
> os.environ['MORE~'] = '1'
> os.environ.pop('KIND~')
> os.environ['PLACE~'] = 'b'
= setting: decimal places
import decimal
decimal.getcontext().prec = 9
? str(decimal.Decimal(1) / 7)
> decimal.getcontext().prec = 12
> decimal.getcontext().rounding = 'ROUND_DOWN'
%once
= setting: warnings of the program
import warnings
class Stale~(UserWarning):
    pass
warnings.simplefilter("error", Stale~)
def warned~():
    try:
        warnings.warn("old", Stale~)
    except Stale~:
        return "raised"
    return "passed"
? warned~()
> warnings.simplefilter('ignore', Stale~)
= setting: arguments of the program
import argparse
import sys
sys.argv = ['train', '--deep', '3']
? sys.argv
> sys.argv.append('--wide')
> sys.argv = sys.argv[:1]
%once
= setting: folder
deep~ = os.path.abspath("deep~")
os.makedirs(os.path.join(deep~, "two"))
? os.path.basename(os.getcwd())
> os.chdir(os.path.join(deep~, 'two'))
%once %modes script bare %places guard between
%inside
os.chdir(deep~)
= setting: made in every worker
import mimetypes
import xpool
xpool.everywhere(mimetypes.add_type, "text/x-kind~", ".kind~")
? mimetypes.guess_type('a.kind~')[0]
= class: reduced to the name of a global
class Absent~:
    only = None
    def __new__(cls):
        if cls.only is None:
            cls.only = super().__new__(cls)
        return cls.only
    def __reduce__(self):
        return "ABSENT~"
class Unit~:
    __slots__ = ("name",)
    def __init__(self, name):
        self.name = name
    def __reduce__(self):
        return self.name
ABSENT~, METRE~ = Absent~(), Unit~("METRE~")
units~ = {"a": ABSENT~, METRE~: 1}
def measured~(default=ABSENT~):
    return default is ABSENT~, units~["a"] is ABSENT~, Absent~() is ABSENT~, units~[METRE~]
? measured~(), getattr(ABSENT~, 'tag', None), METRE~.name
> ABSENT~.tag = 2
%after pool.apply(lambda *them: them, (ABSENT~, METRE~)) == (ABSENT~, METRE~)
= class: members of enumerations that equal no copy
import enum
import functools
class Scale~:
    def __init__(self, k):
        self.k = k
member~ = getattr(enum, "member", lambda value: value)  # from 3.13 on, a partial is no member
class Kind~(enum.Enum):
    MISSING = object()
    TWICE = Scale~(2)
    LARGER = member~(functools.partial(max, 5))
    ROWS = [1]
    AGAIN = TWICE
    def of(self, n, other=None):
        return self.value.k * n, other is Kind~.MISSING
class Flags~(enum.Flag):
    A = 1
    B = 2
class Named~(enum.Enum):
    ONE = 1
    def __reduce_ex__(self, protocol):
        return Named~, (1,)
members~ = [*Kind~, Flags~.A, Flags~.A | Flags~.B, Named~.ONE]
def uses~(unset=Kind~.MISSING):
    return unset is Kind~.MISSING, members~[0] is unset, Kind~.TWICE.of(3, unset)
def found~(one):
    return one, sum(one is other for other in members~)
? uses~(), {Kind~.MISSING: 1}[members~[0]], Kind~.LARGER.value(7), Kind~.ROWS.value
> Kind~.TWICE.value.k = 3
> Kind~.ROWS.value.append(2)
%after pool.map(found~, members~) == [(one, 1) for one in members~]
= class: dict whose attributes are its items
import collections
class Options~(dict):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.__dict__ = self
class Saved~(Options~):
    def __getstate__(self):
        return dict(self)
    def __setstate__(self, state):
        self.update(state, loaded=True)
class Ordered~(collections.OrderedDict):
    pass
options~ = Options~(rate=1, net=Options~(depth=2))
options~.self, inner~ = options~, options~.net
saved~, ordered~ = Saved~(a=1), Ordered~(z=1, a=2)
ordered~.extra = 3
def trial~(n):
    options~.update(rate=n)
    inner~.depth = n
    same = options~.self is options~, options~.net is inner~
    return same, options~.rate, options~["rate"], options~.net["depth"], options~.get("more")
? trial~(x), list(ordered~), ordered~.extra
> options~.more = 8
%after pool.apply(lambda: saved~['loaded']) is True
%after pool.apply(lambda one: (setattr(one, 'rate', 7), one['rate']), (options~,)) == (None, 7)
= class: defined again with its instances
import own_kept~
source~ = '''
class Again~:
    class Part:
        number = {0}
        constant = 2
    constant = [1]
    def run(self):
        return {0}
again~ = Again~()
own_kept~.kept = [again~]
parts~ = {{"class": Again~, "part": Again~.Part, "large": [again~] * 40000}}
'''
exec(source~.format(0), globals())
? again~.run(), type(again~) is Again~, own_kept~.run(), parts~["class"] is Again~
? parts~["part"] is Again~.Part, parts~["part"].number, parts~["large"][-1].run()
? Again~.constant, Again~.Part.constant
> exec(source~.format(1), globals())
> exec(source~.format(2), globals())
%file own_kept~.py
kept = []
def run():
    return kept[0].run()
= class: functions whose names lead elsewhere later
import own_works~
def steps~(n):
    return n + 1
class Keeps~:
    own = staticmethod(steps~)
    other = staticmethod(own_works~.work)
    def __init__(self, first=steps~, second=own_works~.work):
        self.both = first, second
    def run(self, n):
        return [one(n) for one in self.both]
? Keeps~.own(x), Keeps~.other(x), Keeps~().run(x), steps~(x)
> def steps~(n):
|     return n + 100
> own_works~.work = lambda n: 'new'
%names steps~
%file own_works~.py
def work(n):
    return 'old', n
= class: inside one that its subclass replaces
class Model~:
    class Config:
        rate = 1
        class Inner:
            rows = [1]
Model~.Config = type("Config", (Model~.Config,), {"rate": 7})
? Model~.Config.rate, Model~.Config.Inner.rows
> Model~.Config.Inner.rows.append(2)
= function: defaults that change in place
def positional~(n=1):
    return n
def keyed~(*, n=1):
    return n
class Runs~:
    def run(self, *, n=1):
        return n
? positional~(), keyed~(), Runs~().run()
> positional~.__defaults__ = (True,)
> keyed~.__kwdefaults__['n'] = 2
> Runs~.run.__kwdefaults__['n'] = 3
> positional~.__defaults__ = (1.0,)
> keyed~.__kwdefaults__['n'] = 2.0
= class: methods assigned to one object
import types
class Net~:
    def go~(self, n):
        return n
net~, other~ = Net~(), Net~()
def go~(self, n):
    return n * 100
def step~(self, n):
    return self is other~
net~.go~ = types.MethodType(go~, net~)
other~.step = types.MethodType(step~, other~)
nets~ = [net~, other~]
? net~.go~(x), nets~[0].go~(x), nets~[1].step(x)
%after pool.apply(lambda one: one.go~(3), (net~,)) == 300
%after pool.apply(net~.go~, (4,)) == 400
= class: behind a function that wraps it
import functools
def single~(cls):
    made = []
    @functools.wraps(cls)
    def get(*args):
        if not made:
            made.append(cls(*args))
        return made[0]
    return get
@single~
class Alone~:
    rate = 1
    def __init__(self, depth=2):
        self.depth = depth
    @property
    def both(self):
        return self.rate, self.depth, Alone~() is self
? Alone~(3).both, Alone~.rate, type(Alone~()) is Alone~.__wrapped__
%after pool.apply(Alone~, (4,)).rate == 1
= class: sentinels without attributes
import own_unset~
class Unset~:
    def __bool__(self):
        return False
class Gone~:
    one = None
    def __new__(cls):
        cls.one = cls.one or super().__new__(cls)
        return cls.one
class Slots~:
    __slots__ = ()
unset~, gone~, slots~, mark~ = Unset~(), Gone~(), Slots~(), object()
class Asks~:
    kind = unset~
    def __init__(self, a=unset~, b=gone~, c=slots~, d=mark~, e=own_unset~.UNSET):
        self.given = a, b, c, d, e
    def use(self):
        a, b, c, d, e = self.given
        found = a is unset~, b is gone~ is Gone~(), c is slots~, d is mark~, e is own_unset~.UNSET
        return *found, self.kind is unset~
def set_to~(a=unset~, b=gone~):
    return a is unset~, b is gone~
asks~, marks~ = Asks~(), {"key": mark~}
is_default~ = lambda one=mark~: one is mark~ is marks~["key"]
? is_default~()
? asks~.use(), Asks~().use(), set_to~(), set_to~(*asks~.given[:2]), type(unset~) is Unset~
> asks~.more, unset~ = 1, Unset~()
%names unset~ %after pool.apply(lambda one: (one is mark~, one), (mark~,)) == (True, mark~)
%file own_unset~.py
class Unset:
    pass
UNSET = Unset()
= class: objects that are made with effects
import threading
import weakref
class Work~:
    count = 0
    def __new__(cls, name):  # loading a copy would lack the argument
        cls.count += 1
        return super().__new__(cls)
    def __init__(self, name):
        self.name = name
class Table~(dict):
    made = []
    def __new__(cls, *items):
        cls.made.append(len(items))
        return super().__new__(cls)
class Frame~:
    columns = ["a"]
    def __init__(self, *values):
        self.a, *_ = values
    def __getstate__(self):
        return self.columns, [getattr(self, one) for one in self.columns]
    def __setstate__(self, state):  # with attributes that the class shares with the state
        for name, value in zip(self.columns, state[1], strict=True):
            setattr(self, name, value)
class Sorted~(dict):
    def __new__(cls, *args):
        self = super().__new__(cls)
        self.order = []
        return self
    def __setitem__(self, key, value):
        self.order.append(key)
        super().__setitem__(key, value)
class Cached~:
    def __new__(cls):
        self = super().__new__(cls)
        self.cache = {}
        return self
    def __getstate__(self):
        return {}
class Wrapper~:  # the usual way to delegate: without `inner`, it asks for `inner` for ever
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
class Asked~(dict):
    def __init__(self, **options):
        super().__init__(options)
        vars(self)["path"] = "o.json"
    def __getattr__(self, name):
        return self[name]
class Crate~(dict):
    __getattr__ = dict.get
class Local~(threading.local):
    def __init__(self, name):
        self.name = name
work~, table~, frame~, sorted~, cached~ = Work~("x"), Table~({}), Frame~(1), Sorted~(), Cached~()
around~, over~, asked~, local~ = Wrapper~(work~), Wrapper~(cached~), Asked~(rate=1), Local~("own")
crate~, near~ = Crate~(rate=1), weakref.proxy(work~)
work~.near = near~
? Work~.count, work~.name, Table~.made, dict(table~), frame~.a, len(vars(frame~)), Frame~.columns
? len(sorted~), type(sorted~.order), cached~.cache, near~.name, near~.near.near.name
? around~.name, over~.cache, asked~.path, asked~.rate, local~.name, crate~.rate
> work~.name, table~[1], frame~.a, sorted~[1], asked~["rate"] = [1] * 5
> work~.name, table~[2], frame~.a, sorted~[2], asked~["rate"] = [2] * 5
= function: cached for arguments of all kinds
import functools
class Number~(int):
    pass
values~ = 1, 1.0, True, "a", None, (1, 2), ("x",), (), Number~(3), 3, b"a", frozenset({1}), object
named~ = {}, {"y": 1}, {"y": 1.0, "z": "a"}, {"z": "a", "y": 1.0}
calls~ = []
def keep~(*args, **kwds):
    calls~.append((args, kwds))
    return len(calls~)
each~ = functools.cache(keep~)
typed~ = functools.lru_cache(maxsize=None, typed=True)(keep~)
some~ = functools.lru_cache(maxsize=1000)(keep~)
both~ = functools.lru_cache(maxsize=1000, typed=True)(keep~)
def all_of~():
    for one in values~:
        for args in (), (one,), (one, one), (one, 2, (one,)):
            for kwds in named~:
                yield [kept(*args, **kwds) for kept in (each~, typed~, some~, both~)]
numbers~ = list(all_of~())
? list(all_of~()) == numbers~, len(calls~)
"""
