"""Functions and classes that have no importable name: here and in another process."""

from __future__ import annotations

import abc
import asyncio
import collections
import ctypes
import dataclasses
import datetime
import enum
import functools
import gc
import operator
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from receiver import Receiver

from xpool.errors import TaskNotPicklable
from xpool.pickle import decode, dumps, encode, loads, mark_static_module, registry


def again(obj: Any) -> Any:
    """There and back within this process."""
    plain = pickle.loads(dumps(obj))
    assert type(plain) is type(obj)
    return decode(encode(obj))


@pytest.fixture
def forgotten() -> Iterator[Callable[[Any], Any]]:
    """Load as a process does that has never seen the classes."""
    saved = registry._by_id.copy(), registry._by_token.copy()

    def load(obj: Any) -> Any:
        data = encode(obj)
        registry._by_id.clear()
        registry._by_token.clear()
        return decode(data)

    yield load
    for table, old in zip((registry._by_id, registry._by_token), saved, strict=True):
        table.clear()
        table.update(old)


def echo(x: Any) -> Any:
    return x


def apply(f: Any, *args: Any) -> Any:
    return f(*args)


# -- functions --------------------------------------------------------------------------------


def closure_over(n: int) -> Callable[[int], int]:
    return lambda x, y=2: x * n + y


def fibonacci() -> Callable[[int], int]:
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    return fib


def even_and_odd() -> tuple[Any, Any]:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    return even, odd


def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def wrapper(*args: Any) -> Any:
        return [f(*args)]

    return wrapper


@decorate
def decorated(x: int) -> int:
    return x


def keyword_only(a: int, *, b: int = 3) -> int:
    return a + b


CALLS: dict[str, tuple[Callable[[], Any], tuple[Any, ...], Any]] = {
    "lambda": (lambda: lambda: 5, (), 5),
    "closure with a default": (lambda: closure_over(3), (2,), 8),
    "closures over a loop": (lambda: [closure_over(i) for i in range(4)][3], (1,), 5),
    "recursive": (fibonacci, (10,), 55),
    "mutually recursive": (lambda: even_and_odd()[0], (8,), True),
    "decorated": (lambda: decorated, (1,), [1]),
    "what a decorator wraps": (lambda: decorated.__wrapped__, (1,), 1),  # type: ignore[attr-defined]
    "partial": (lambda: functools.partial(closure_over(2), y=1), (4,), 9),
    "keyword only": (lambda: keyword_only, (1,), 4),
    "cached": (lambda: functools.lru_cache(maxsize=9)(closure_over(3)), (1,), 5),
    "itemgetter": (lambda: operator.itemgetter(1), ([1, 2],), 2),
    "attrgetter": (lambda: operator.attrgetter("real"), (3,), 3),
    "builtin": (lambda: len, ([1],), 1),
    "builtin method": (lambda: "a,b".split, (",",), ["a", "b"]),
    "unbound method": (lambda: str.upper, ("a",), "A"),
    "module of its own": (lambda: lambda: sys.modules[operator.__name__].add(1, 2), (), 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    """Each kind of callable works after the trip."""
    make, args, expected = CALLS[name]
    assert again(make())(*args) == expected


def test_calls_elsewhere(receiver: Receiver) -> None:
    """Each kind of callable works in another process."""
    for name, (make, args, expected) in CALLS.items():
        assert receiver.call(make(), *args) == expected, name


@pytest.mark.parametrize("recurse", [False, True])
def test_recurse(receiver: Receiver, recurse: bool) -> None:
    """recurse=True goes through dill and gives the function its own globals."""
    assert receiver.call(closure_over(3), 2, recurse=recurse) == 8
    assert loads(dumps(fibonacci(), recurse=recurse))(10) == 55


def test_attributes_of_a_function() -> None:
    """Name, defaults, annotations, docs and own attributes are kept."""

    def f(a: int, *, b: str = "x") -> list[int]:
        """Say hello."""
        return [a]

    f.tag = {"k": 1}  # type: ignore[attr-defined]
    g = again(f)
    assert g is not f
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__kwdefaults__", "__dict__"):
        assert getattr(g, name) == getattr(f, name), name
    assert g.__annotations__ == f.__annotations__
    assert g.__globals__ is f.__globals__


def test_shared_references_survive() -> None:
    """Two functions over one variable still share it; a list is still one list."""

    def make() -> tuple[Any, Any]:
        count = 0

        def bump() -> None:
            nonlocal count
            count += 1

        return bump, lambda: count

    shared = [1]
    (bump, get), one, two = again((make(), shared, shared))
    bump()
    assert get() == 1
    assert one is two


def test_globals_of_no_module() -> None:
    """Functions that were made by exec take along the globals that they use, shared."""
    space: dict[str, Any] = {"__name__": "nowhere", "factor": 3, "unused": threading.Lock()}
    exec("def f(x): return g(x) + 1\ndef g(x):\n  global n\n  n = 1\n  return factor * x", space)
    f, g = again((space["f"], space["g"]))
    assert f(2) == 7
    assert f.__globals__ is g.__globals__
    assert f.__globals__["n"] == 1


def test_empty_cell() -> None:
    """A variable that has no value yet has none after the trip."""

    def make() -> Callable[[], Any]:
        def f() -> Any:
            return later

        g = again(f)
        later = 1
        assert f() == 1
        return g

    with pytest.raises(NameError):
        make()()


def test_coroutine_and_generator_functions(receiver: Receiver) -> None:
    """Functions of both kinds travel; what they return does not."""

    async def one() -> int:
        return 1

    def count() -> Iterator[int]:
        yield from range(3)

    assert asyncio.run(again(one)()) == 1
    assert receiver.call(lambda f: list(f()), count) == [0, 1, 2]


def test_modules_go_by_name() -> None:
    """A module in a closure is that module, not a copy of its contents."""
    module = operator
    assert again(lambda: module)() is operator
    assert len(encode(lambda: module)) < 600


def test_static_module() -> None:
    """Functions and classes of a static module go by name even when they were redefined."""
    module = types.ModuleType("static_for_a_test")
    exec("def f(): return 1\nclass C: pass", vars(module))
    sys.modules[module.__name__] = module
    try:
        old, old_class = module.f, module.C
        exec("def f(): return 2\nclass C: pass", vars(module))
        assert again(old)() == 1
        mark_static_module(module)
        assert again(old) is module.f
        assert again(old_class) is module.C
        assert again(module) is module
    finally:
        del sys.modules[module.__name__]
    with pytest.raises(TypeError, match="takes a module"):
        mark_static_module("operator")  # type: ignore[arg-type]


def test_bound_methods() -> None:
    """Methods of instances and of classes, private ones too."""

    class Local:
        def __init__(self) -> None:
            self.x = 3

        def get(self) -> int:
            return self.x

        def __secret(self) -> int:
            return self.x + 1

        @classmethod
        def make(cls) -> Local:
            return cls()

        def secret(self) -> Any:
            return self.__secret

    one = Local()
    assert again(one.get)() == 3
    assert again(one.secret())() == 4
    assert type(again(Local.make)()) is Local
    method, owner = again((one.get, one))
    assert method.__self__ is owner


# -- classes ----------------------------------------------------------------------------------


class Importable:
    def __init_subclass__(cls, *, tag: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.tag = tag

    tag: str


def plain() -> Any:
    class Plain:
        kind = "plain"

        def __init__(self) -> None:
            self.x = 1

        def me(self) -> Any:
            return __class__  # type: ignore[name-defined]

    return Plain()


def derived() -> Any:
    class Base:
        def who(self) -> str:
            return "base"

    class Derived(Base):
        def who(self) -> str:
            return "derived from " + super().who()

        def others(self) -> Any:
            return Base, Derived

    return Derived()


def slotted() -> Any:
    class Slotted:
        __slots__ = ("__hidden", "x")

        def __init__(self) -> None:
            self.x, self.__hidden = 1, 2

        def hidden(self) -> int:
            return self.__hidden

    return Slotted()


def data() -> Any:
    @dataclasses.dataclass(order=True)
    class Data:
        n: int = 1
        items: list[int] = dataclasses.field(default_factory=list, compare=False)
        kind: typing.ClassVar[int] = 7

    return Data(3, [4])


def slotted_data() -> Any:
    @dataclasses.dataclass(slots=True, frozen=True)
    class Slotted:
        n: int = 1

    return Slotted(3)


def named_tuple() -> Any:
    class Named(typing.NamedTuple):
        a: int
        b: str = "x"

        def both(self) -> str:
            return f"{self.a}{self.b}"

    return Named(1)


def old_named_tuple() -> Any:
    return collections.namedtuple("Old", "a b", defaults=[5])(1)


def below_a_named_tuple() -> Any:
    class Below(collections.namedtuple("Below", "a b")):
        def total(self) -> int:
            return self.a + self.b

    return Below(1, 2)


def color() -> Any:
    class Color(enum.Enum):
        RED = 1
        GREEN = 2
        CRIMSON = 1  # noqa: PIE796

        @property
        def next(self) -> Any:
            return Color.GREEN if self is Color.RED else Color.RED

        @classmethod
        def _missing_(cls, value: Any) -> Any:
            return cls.RED

    return Color.RED


def rich_enum() -> Any:
    class Planet(enum.Enum):
        EARTH = (5.976e24, 6.37814e6)

        def __init__(self, mass: float, radius: float) -> None:
            self.mass, self.radius = mass, radius

    return Planet.EARTH


def enum_with_new() -> Any:
    class Labelled(str, enum.Enum):
        def __new__(cls, value: str, label: str) -> Any:
            member = str.__new__(cls, value)
            member._value_ = value
            member.label = label
            return member

        A = ("a", "the first")
        B = ("b", "the second")

    return Labelled.B


def flag() -> Any:
    class Permission(enum.Flag):
        READ = enum.auto()
        WRITE = enum.auto()
        BOTH = READ | WRITE

    return Permission.READ


def int_enum() -> Any:
    class Number(enum.IntEnum):
        ONE = 1
        TWO = 2

    return Number.TWO


def abstract() -> Any:
    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self) -> int: ...

        @property
        @abc.abstractmethod
        def name(self) -> str: ...

    class Square(Shape):
        def area(self) -> int:
            return 4

        @property
        def name(self) -> str:
            return "square"

    Shape.register(int)
    return Square()


def generic() -> Any:
    T = typing.TypeVar("T")

    class Box(typing.Generic[T]):
        def __init__(self, value: T) -> None:
            self.value = value

        def get(self) -> T:
            return self.value

    class IntBox(Box[int]):
        pass

    return IntBox(3)


def protocol() -> Any:
    @typing.runtime_checkable
    class HasX(typing.Protocol):
        x: int

    class It:
        x = 1
        proto = HasX

    return It()


def with_metaclass() -> Any:
    class Meta(type):
        made: typing.ClassVar[list[str]] = []

        def __new__(mcs, name: str, bases: Any, body: Any, *, tag: str) -> Any:
            return super().__new__(mcs, name, bases, {**body, "tag": tag})

        def __init__(cls, name: str, bases: Any, body: Any, *, tag: str) -> None:
            super().__init__(name, bases, body)
            Meta.made.append(name)

        def __setattr__(cls, name: str, value: Any) -> None:
            raise TypeError("is read only")

        def __eq__(cls, other: object) -> bool:
            return cls is other

        __hash__ = type.__hash__

        def hello(cls) -> str:
            return "hello " + cls.tag

    class WithMeta(metaclass=Meta, tag="x"):
        pass

    return WithMeta()


def with_hook() -> Any:
    class Base:
        subclasses: typing.ClassVar[list[Any]] = []

        def __init_subclass__(cls, *, tag: str) -> None:
            cls.tag = tag
            Base.subclasses.append(cls)

    class Sub(Base, tag="local"):
        pass

    return Sub()


def below_an_importable_hook() -> Any:
    class Sub(Importable, tag="ours"):
        pass

    return Sub()


def with_descriptors() -> Any:
    class Name:
        def __set_name__(self, owner: Any, name: str) -> None:
            self.name = name

        def __get__(self, obj: Any, owner: Any = None) -> str:
            return "value of " + self.name

    class Holder:
        field = Name()
        lock = threading.Lock()

        @functools.cached_property
        def slow(self) -> int:
            return 42

        @staticmethod
        def two() -> int:
            return 2

        @property
        def three(self) -> int:
            return 3

        class Inner:
            pass

        @functools.cache  # noqa: B019
        def cached(self, x: int) -> int:
            return x + 1

    return Holder()


def below_builtins() -> Any:
    class Numbers(dict):  # type: ignore[type-arg]
        def __missing__(self, key: Any) -> str:
            return f"no {key}"

    return Numbers(a=1)


def mutual() -> Any:
    class A:
        def b(self) -> Any:
            return B()

    class B:
        def a(self) -> Any:
            return A()

    return A()


def typed_dict() -> Any:
    class Movie(typing.TypedDict, total=False):
        name: str

    class Holder:
        kind = Movie

    return Holder()


def date_enum() -> Any:
    class Day(datetime.date, enum.Enum):
        FIRST = 2020, 1, 1

    return Day.FIRST


def newtype() -> Any:
    UserId = typing.NewType("UserId", int)

    class Holder:
        kind = UserId

        def get(self, x: UserId) -> UserId:
            return x

    return Holder()


CHECKS: dict[Callable[[], Any], Callable[[Any], bool]] = {
    plain: lambda x: x.x == 1 and x.kind == "plain" and x.me() is type(x),
    derived: lambda x: x.who() == "derived from base" and x.others()[1] is type(x),
    slotted: lambda x: x.hidden() == 2 and not hasattr(x, "__dict__"),
    data: lambda x: dataclasses.asdict(x) == {"n": 3, "items": [4]} and type(x)() < x,
    slotted_data: lambda x: dataclasses.replace(x, n=4).n == 4,
    named_tuple: lambda x: x.both() == "1x" and x._replace(a=2)._asdict() == {"a": 2, "b": "x"},
    old_named_tuple: lambda x: x.b == 5 and type(x)(1, 2) == (1, 2) and repr(x) == "Old(a=1, b=5)",
    below_a_named_tuple: lambda x: x.total() == 3,
    color: lambda x: (
        x is type(x)(1)
        and x.next.name == "GREEN"
        and len(type(x)) == 2
        and type(x).CRIMSON is x
        and type(x)(99) is x
    ),
    rich_enum: lambda x: x.mass == 5.976e24 and x.value == (5.976e24, 6.37814e6),
    enum_with_new: lambda x: x.label == "the second" and x == "b" and type(x)("a").name == "A",
    flag: lambda x: (x | type(x).WRITE) is type(x).BOTH and x in type(x).BOTH,
    int_enum: lambda x: x + 1 == 3 and type(x)(2) is x,
    abstract: lambda x: (
        x.area() == 4 and x.name == "square" and issubclass(int, type(x).__mro__[1])
    ),
    generic: lambda x: x.get() == 3 and type(x).__orig_bases__[0].__args__ == (int,),
    protocol: lambda x: isinstance(x, x.proto),
    with_metaclass: lambda x: type(x).hello() == "hello x" and type(type(x)).made == ["WithMeta"],
    with_hook: lambda x: x.tag == "local" and x.subclasses == [type(x)],
    below_an_importable_hook: lambda x: x.tag == "ours" and isinstance(x, Importable),
    with_descriptors: lambda x: (
        x.field == "value of field"
        and (x.slow, x.two(), x.three, x.cached(1)) == (42, 2, 3, 2)
        and not x.lock.locked()
    ),
    below_builtins: lambda x: x["b"] == "no b" and x["a"] == 1,
    mutual: lambda x: type(x.b().a()) is type(x),
    typed_dict: lambda x: x.kind(name="a") == {"name": "a"},
    date_enum: lambda x: x.year == 2020 and type(x)(x.value) is x,
    newtype: lambda x: x.get(x.kind(3)) == 3,
}


@pytest.mark.parametrize("make", CHECKS, ids=lambda make: make.__name__)
def test_class_keeps_identity(make: Callable[[], Any]) -> None:
    """An instance of a local class comes back as an instance of that class."""
    one = make()
    assert CHECKS[make](one), "the test itself"
    back = again(one)
    assert type(back) is type(one)
    assert CHECKS[make](back)
    assert again(type(one)) is type(one)


@pytest.mark.parametrize("make", CHECKS, ids=lambda make: make.__name__)
def test_class_rebuilt(make: Callable[[], Any], forgotten: Callable[[Any], Any]) -> None:
    """A process that does not know the class builds an equal one, once."""
    one = make()
    first, second = forgotten((one, type(one)))
    assert type(first) is not type(one)
    assert second is type(first)
    assert CHECKS[make](first)
    assert type(first).__qualname__ == type(one).__qualname__
    assert type(first).__doc__ == type(one).__doc__


def test_classes_elsewhere(receiver: Receiver) -> None:
    """In another process the class works, and what it sends back is of the class here."""
    for make, check in CHECKS.items():
        one = make()
        assert receiver.call(apply, check, one), make.__name__
        back = receiver.call(echo, one)
        assert type(back) is type(one), make.__name__
        assert check(back), make.__name__


def test_received_class_is_sent_on_as_it_came(
    receiver: Receiver, forgotten: Callable[[Any], Any]
) -> None:
    """The definition is not pickled anew by who received it."""
    one = plain()
    message = encode(one)
    assert encode(forgotten(one)) == message


def test_class_that_changed(receiver: Receiver) -> None:
    """An attribute that was set, added or deleted since reaches the other process."""

    class Config:
        level = 1
        old = True

        def get(self) -> Any:
            return self.level

    assert receiver.call(Config().get) == 1
    Config.level = 2
    assert receiver.call(Config().get) == 2
    assert receiver.call(lambda: Config().get()) == 2
    Config.get = lambda self: self.level * 10  # type: ignore[method-assign]
    assert receiver.call(Config().get) == 20
    Config.level = 3
    assert type(receiver.call(echo, Config())) is Config
    assert Config.level == 3


def test_classes_are_not_kept_alive() -> None:
    """Pickling a class does not keep it for ever."""
    one = plain()
    ref = weakref.ref(type(one))
    encode(one)
    count = len(registry._by_token)
    del one
    gc.collect()
    assert ref() is None
    assert len(registry._by_token) < count


def test_annotations_with_type_variables() -> None:
    """A local type variable is one variable for all that names it."""
    T = typing.TypeVar("T", bound=int)

    def f(x: Any) -> Any:
        return x

    f.__annotations__ = {"x": T, "return": list[T]}  # type: ignore[valid-type]
    g = again(f)
    assert g.__annotations__["x"] is T


# -- what cannot travel -------------------------------------------------------------------------


def test_refusals_name_the_culprit() -> None:
    """The error says what and where, and what to do instead."""
    generator = (x for x in ())
    with pytest.raises(TaskNotPicklable, match=r"a generator object .* at \[1\]\['k'\]") as info:
        encode((1, {"k": generator}))
    assert isinstance(info.value.__cause__, TypeError)
    assert "list(generator)" in str(info.value)
    with pytest.raises(TaskNotPicklable, match="variable 'generator'"):
        encode(lambda: generator)
    holder = types.SimpleNamespace(inner=types.SimpleNamespace(lock=threading.Lock()))
    with pytest.raises(TaskNotPicklable, match=r"a lock object .* at inner\.lock"):
        encode(holder)
    with pytest.raises(TaskNotPicklable, match="lock"):
        encode((lambda: 1, threading.Lock()))
    with pytest.raises(TaskNotPicklable, match="a generator"):
        dumps((lambda: 1, generator))


def test_files_are_refused() -> None:
    """dill would open the file again over there."""
    with open(__file__) as file, pytest.raises(TaskNotPicklable, match="path"):
        encode((lambda: 1, file))


def test_own_errors_are_the_cause() -> None:
    """What an object's __reduce__ raises is the cause, and is not tried again."""
    calls = []

    class Bad:
        def __reduce__(self) -> Any:
            calls.append(1)
            raise ValueError("mine")

    with pytest.raises(TaskNotPicklable, match="mine") as info:
        encode(Bad())
    assert isinstance(info.value.__cause__, ValueError)


def test_too_deep() -> None:
    """Deep nesting is an error that says so."""
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TaskNotPicklable, match="nested too deeply"):
        encode(nested)
    while nested:
        nested = nested.pop()


def test_only_dill_can(receiver: Receiver) -> None:
    """What only dill can do, with shared references and large buffers, arrives."""
    values: dict[str, Any] = {"a": 1}
    view = values.keys()
    back = receiver.call(lambda keys, values: (list(keys), values), view, values)
    assert back == (["a"], {"a": 1})
    assert isinstance(again(ctypes.c_int(3)), ctypes.c_int)
    buffer = pickle.PickleBuffer(bytearray(100_000))
    keys, other, size = receiver.call(lambda k, d, b: (list(k), d, len(b)), view, values, buffer)
    assert (keys, other, size) == (["a"], {"a": 1}, 100_000)


def test_dill_settings_untouched() -> None:
    """dill's global settings and its pickler's dispatch for our types stay as they are."""
    dill = pytest.importorskip("dill")
    before = dict(dill.settings)
    encode({1: 2}.keys())
    assert dict(dill.settings) == before
