"""Classes without an importable name keep their identity, here and in another process."""

from __future__ import annotations

import abc
import collections
import copy
import dataclasses
import datetime
import enum
import functools
import gc
import threading
import time
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from receiver import Receiver, again

from xpool._pickling import pickler, reducers
from xpool._pickling.by_value import registry
from xpool.pickle import decode, encode


@pytest.fixture
def forgotten() -> Iterator[Callable[[Any], Any]]:
    """Load as in a process that does not know the classes."""
    saved = registry._by_id.copy(), registry._by_token.copy()

    def load(obj: Any) -> Any:
        data = encode(obj)
        registry._by_id.clear()
        registry._by_token.clear()
        return decode(data)

    yield load
    for table, old in zip((registry._by_id, registry._by_token), saved, strict=True):
        table.clear()  # type: ignore[attr-defined]
        table.update(old)  # type: ignore[attr-defined]


def echo(x: Any) -> Any:
    return x


def apply(f: Any, *args: Any) -> Any:
    return f(*args)


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
            member.label = label  # type: ignore[attr-defined]
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
            return "hello " + cls.tag  # type: ignore[attr-defined]

    class WithMeta(metaclass=Meta, tag="x"):
        pass

    return WithMeta()


def with_hook() -> Any:
    class Base:
        subclasses: typing.ClassVar[list[Any]] = []

        def __init_subclass__(cls, *, tag: str) -> None:
            cls.tag = tag  # type: ignore[attr-defined]
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


def with_own_dict() -> Any:
    class Proxy:
        shown: typing.ClassVar[dict[str, int]] = {"a": 1}

        @property
        def __dict__(self) -> dict[str, int]:  # type: ignore[override]
            return Proxy.shown

    return Proxy()


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


def delegating() -> Any:
    class Slots:
        __slots__ = ("inner",)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    class Recorder(Slots):
        def __init__(self, inner: Any) -> None:
            super().__init__(inner)
            self.calls = [self]

        def __getattr__(self, name: str) -> Any:
            if name == "__getstate__":  # Python 3.10 asks for it before the trip
                raise AttributeError(name)
            return lambda *_: name  # also for `__setstate__`

    return Recorder(Slots(3))


def numbering() -> Any:
    class Words(collections.defaultdict[str, int]):
        def __init__(self, *given: Any) -> None:
            super().__init__(self.number, *given[1:])
            self.plain: Any = collections.defaultdict()
            self.plain.default_factory = self.plain.__len__

        def number(self) -> int:
            return len(self)

    return Words()


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
    with_metaclass: lambda x: type(x).hello() == "hello x" and type(type(x)).made == ["WithMeta"],  # type: ignore[attr-defined]
    with_hook: lambda x: x.tag == "local" and x.subclasses == [type(x)],
    below_an_importable_hook: lambda x: x.tag == "ours" and isinstance(x, Importable),
    with_descriptors: lambda x: (
        x.field == "value of field"
        and (x.slow, x.two(), x.three, x.cached(1)) == (42, 2, 3, 2)
        and not x.lock.locked()
    ),
    with_own_dict: lambda x: vars(x) == {"a": 1} and vars(x) is type(x).shown,
    below_builtins: lambda x: x["b"] == "no b" and x["a"] == 1,
    mutual: lambda x: type(x.b().a()) is type(x),
    typed_dict: lambda x: x.kind(name="a") == {"name": "a"},
    date_enum: lambda x: x.year == 2020 and type(x)(x.value) is x,
    delegating: lambda x: x.inner.real == 3 and x.calls[0] is x and x.anything() == "anything",
    numbering: lambda x: (x["a"], x["b"], x.plain["c"], x.plain["d"]) == (0, 1, 0, 1),
    newtype: lambda x: x.get(x.kind(3)) == 3,
}


def describe(one: Any, cls: Any) -> tuple[bool, str, Any]:
    return type(one) is cls, cls.__qualname__, cls.__doc__


def test_classes_elsewhere(receiver: Receiver) -> None:
    """Another process builds an equal class, only once, and returned objects have the class of this
    process."""
    for make, check in CHECKS.items():
        one = make()
        assert check(one), f"{make.__name__} fails before the trip"
        assert receiver.call(apply, check, one), make.__name__
        assert receiver.call(describe, one, type(one)) == describe(one, type(one)), make.__name__
        for back in (receiver.call(echo, one), again(one)):
            assert type(back) is type(one), make.__name__
            assert check(back), make.__name__


def test_a_received_class_is_sent_on_unchanged(forgotten: Callable[[Any], Any]) -> None:
    """A receiver passes on a class's original definition."""
    one = plain()
    message = encode(one)
    assert encode(forgotten(one)) == message


def test_a_changed_class_of_any_kind(receiver: Receiver) -> None:
    """Setting an attribute later keeps the rest of the definition, for every kind of class."""
    for make, check in CHECKS.items():
        one = make()
        assert receiver.call(apply, check, one), make.__name__
        if make is with_metaclass:  # its classes are read only
            continue
        type(one).set_later = 3
        assert receiver.call(lambda one=one: type(one).set_later) == 3, make.__name__
        assert receiver.call(apply, check, one), make.__name__
        assert check(receiver.call(echo, one)), make.__name__


def test_class_is_defined_once() -> None:
    """Using a class changes nothing in its definition."""
    for make in CHECKS:
        one = make()
        before = encode(one)
        copy.copy(one)
        assert encode(one) == before, make.__name__


def test_classes_are_not_kept_alive() -> None:
    """Pickling a class does not keep it alive."""
    one = plain()
    ref = weakref.ref(type(one))
    encode(one)
    count = len(registry._by_token)
    del one
    gc.collect()
    assert ref() is None
    assert len(registry._by_token) < count


def test_annotations_with_type_variables() -> None:
    """A local type variable stays one object for all its uses."""
    T = typing.TypeVar("T", bound=int)

    def f(x: Any) -> Any:
        return x

    f.__annotations__ = {"x": T, "return": list[T]}  # type: ignore[valid-type]
    g = again(f)
    assert g.__annotations__["x"] is T


class Late:
    """Its reducer is registered when the first instance is pickled."""

    __module__ = "late"


def test_a_class_that_holds_methods_of_its_own(receiver: Receiver) -> None:
    """If attributes of a class hold its methods, the methods are bound to the class in the other
    process."""

    class Base:
        @classmethod
        def inherited(cls) -> Any:
            return cls()

    class Own(Base):
        @classmethod
        def make(cls) -> Any:
            return cls()

        @classmethod
        def __hidden(cls) -> Any:
            return cls()

        def text(self) -> str:
            return type(self).__name__

        hidden = property(lambda self: self.__hidden)

    one = Own()
    Own.makers = [Own.make, Own.inherited, one.hidden, abc.ABC.register]  # type: ignore[attr-defined]
    Own.texts = {"text": one.text}  # type: ignore[attr-defined]

    def look(cls: Any) -> Any:
        made = [make() for make in cls.makers[:3]]
        same = cls.makers[0].__func__ is vars(cls)["make"].__func__
        return made, same, cls.texts["text"](), cls.texts["text"].__self__

    made, same, text, held = receiver.call(look, Own)
    assert same and text == "Own" and {type(each) for each in (*made, held)} == {Own}


def test_registering_reducers_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one thread is registering a module's reducers, other threads wait for it."""
    begun = threading.Event()
    answers: list[Any] = []

    def load() -> None:
        begun.set()
        for _ in range(100):
            time.sleep(0)  # lets the other thread run
        reducers.register(Late)(lambda pickler, obj: "reduced")

    def ask() -> None:
        begun.wait()
        answers.append(pickler.reducer_override(None, Late()))

    monkeypatch.setitem(reducers.LAZY, "late", load)
    monkeypatch.setitem(reducers.REDUCERS, Late, None)  # restores the missing entry after the test
    del reducers.REDUCERS[Late]
    others = [threading.Thread(target=ask) for _ in range(4)]
    for other in others:
        other.start()
    answers.append(pickler.reducer_override(None, Late()))
    for other in others:
        other.join()
    assert answers == ["reduced"] * 5


def test_a_metaclass_that_needs_more_than_the_class_has(receiver: Receiver) -> None:
    """A class that its metaclass cannot make again is named, with a remedy."""

    class Meta(type):
        pass

    class Record(metaclass=Meta):
        pass

    Meta.__new__ = staticmethod(len)  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError, match=r"<locals>\.Record cannot be .* Define the class in a mod"):
        receiver.call(str, Record)


@pytest.mark.parametrize("sent_alone", [False, True], ids=["inside", "alone"])
def test_what_a_definition_refers_to_is_changed(receiver: Receiver, sent_alone: bool) -> None:
    """A change of a base, of another class or of a closure's variable reaches the other process.

    It does so also if the changed class was sent alone before, and if it is changed back.
    """
    variable = 1

    class Meta(type):
        rate = 1

    class Base(metaclass=Meta):
        rate = 1

    class Other:
        rate = 1

    class Outer:
        class Inner:
            rate = 1

    class Sub(Base):
        held = Other
        kept: typing.ClassVar[tuple[Any, ...]] = (1, [1])
        counter = staticmethod(functools.partial(list, [1]))
        value = property(lambda self: variable)

        def get(self, default: Any = [1], *, key: Any = [1]) -> Any:  # noqa: B006
            inside = self.held.rate, self.kept[1][0], Outer.Inner.rate, self.counter()[0]
            own = self.rate, type(type(self)).rate, self.value, variable, vars(Sub)["get"].note
            return [*inside, *own, default[0], key[0], self.local()]

        @staticmethod
        def local() -> Any:
            return variable

    def change(rate: int) -> None:
        nonlocal variable
        Base.rate = Meta.rate = Other.rate = Outer.Inner.rate = variable = rate
        Sub.kept[1][0] = Sub.counter.args[0][0] = rate  # type: ignore[attr-defined]
        get: Any = Sub.get
        get.note = get.__defaults__[0][0] = get.__kwdefaults__["key"][0] = rate

    for rate in (1, 2, 1, 3):
        change(rate)
        if sent_alone:
            assert receiver.call(lambda cls: cls.rate, Base) == rate
        change(rate + 10)
        change(rate)
        assert receiver.call(Sub().get) == [rate] * 12


def test_a_changed_class_in_a_fresh_process(receiver: Receiver) -> None:
    """A process that gets a changed class for the first time gets it as it is now."""

    class Base:
        rate = 1

    class Sub(Base):
        pass

    encode(Sub)
    Base.rate = 2
    assert receiver.call(lambda cls: cls.rate, Sub) == 2
    assert receiver.call(lambda: (Base.rate, Sub.rate)) == (2, 2)


def test_a_value_at_the_address_of_an_earlier_one(receiver: Receiver) -> None:
    """An attribute that is set often arrives, though Python uses the memory of old values again."""

    class Model:
        rate = 0.5

    for n in range(20):
        Model.rate = n + 0.25
        if n % 2:  # the value before, which was not sent, had other memory
            assert receiver.call(lambda cls: cls.rate, Model) == n + 0.25


def test_globals_of_methods_are_changed(receiver: Receiver) -> None:
    """The globals that are copied with methods arrive with their new values: those of code that has
    a namespace of its own, and all with ``recurse``."""
    space: dict[str, Any] = {"__name__": "of_its_own"}
    exec("def get(self): return rate", space)

    class Model:
        get = space["get"]

    for recurse in (False, True, False):
        for rate in (1, 2, 1):
            space["rate"] = rate
            assert receiver.call(Model().get, recurse=recurse) == rate


def test_unchanged_classes_are_written_once() -> None:
    """Classes that have a part in common do not cause new definitions of each other."""

    class Base:
        rate = 1

    class One(Base):
        pass

    class Two(Base):
        pass

    first = [encode(cls) for cls in (One, Two, Base)]
    assert [encode(cls) for cls in (One, Two, Base)] == first
    Base.rate = 2
    second = [encode(cls) for cls in (One, Two, Base)]
    assert all(map(bytes.__ne__, first, second))
    assert [encode(cls) for cls in (One, Two, Base)] == second


def test_a_deleted_attribute(receiver: Receiver) -> None:
    """An attribute of any kind that is deleted is gone in the other process, but attributes that
    this process has added stay."""

    class Config:
        flag = 1

        @property
        def half(self) -> int:
            return 1

        def get(self) -> int:
            return 1

    def own(cls: Any) -> None:
        cls.own = 1

    def look(cls: Any) -> list[bool]:
        return [hasattr(cls, name) for name in ("flag", "half", "get", "own")]

    receiver.call(own, Config)
    assert receiver.call(look, Config) == [True] * 4
    del Config.flag, Config.half, Config.get
    assert receiver.call(look, Config) == [False, False, False, True]
