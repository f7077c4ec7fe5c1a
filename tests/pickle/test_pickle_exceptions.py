"""Exceptions keep their class and attributes, whatever code their class has."""

from __future__ import annotations

import builtins
import dataclasses
import pickle
import sys
import threading
import traceback
from typing import Any

import pytest
from receiver import Receiver

from xpool.errors import RemoteTraceback, ResultNotPicklable, WorkerDied
from xpool.pickle import decode, encode, encode_exception


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class KeywordOnly(ValueError):
    def __init__(self, *, field: str) -> None:
        super().__init__()
        self.field = field


class OwnNew(Exception):
    def __new__(cls, a: int, b: int) -> Any:
        return super().__new__(cls, a)

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.b = b


class FromOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "not there", path)
        self.path = path


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        return BadReduce, (1, 2, 3, 4), {}

    def __init__(self, one: int) -> None:
        super().__init__(one)


class RaisingReduce(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class Refusing(Exception):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("never")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("never")


class RaisingSetstate(Exception):
    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    reason: str = "why"


class WithoutSetattr(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class OwnReduce(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)
        self.b = b

    def __reduce__(self) -> Any:
        return OwnReduce, (self.args[0], self.b)


def trip(exc: BaseException, text: str = "the text") -> Any:
    back = decode(encode_exception(exc, text))
    assert isinstance(back.__cause__, RemoteTraceback)
    assert "the text" in back.__cause__.text
    return back


EXAMPLES: list[BaseException] = [
    ValueError(),
    ValueError("a", 2),
    KeyError("k"),
    OSError(2, "not there", "file"),
    FileNotFoundError(2, "not there", "a", None, "b"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    StopIteration(5),
    SystemExit(3),
    KeyboardInterrupt(),
    SyntaxError("bad", ("file", 1, 2, "text")),
    ImportError("no", name="a", path="b"),
    AttributeError("no", name="a"),
    TwoArguments(1, "why"),
    KeywordOnly(field="name"),
    OwnNew(1, 2),
    FromOSError("somewhere"),
    OwnReduce(1, 2),
    Frozen(1),
    WithoutSetattr("a"),
    WorkerDied(1, -9, 0, "f"),
]


@pytest.mark.parametrize("exc", EXAMPLES, ids=lambda exc: type(exc).__name__)
def test_same_exception(exc: BaseException) -> None:
    """Class, args, text and attributes are kept, also if the exception is in a list."""
    for back in (trip(exc), decode(encode([exc]))[0]):
        assert type(back) is type(exc)
        assert back.args == exc.args
        assert str(back) == str(exc)
        assert vars(back) == vars(exc)
        if isinstance(back, (ImportError, AttributeError)):
            assert back.name == "a"
    if isinstance(exc, OSError):
        assert trip(exc).filename == exc.filename


def test_local_class(receiver: Receiver) -> None:
    """A local exception class with its own __init__ can be caught by its class."""

    class Local(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__("text")
            self.a = a

    def fail() -> None:
        raise Local(1, 2)

    with pytest.raises(Local) as info:
        receiver.call(fail)
    assert info.value.a == 1
    assert isinstance(info.value.__cause__, RemoteTraceback)
    assert "in fail" in str(info.value.__cause__)


def test_unpicklable_attributes_are_dropped() -> None:
    """Unpicklable attributes are dropped, the others are kept."""
    exc = TwoArguments(1, "why")
    exc.lock = threading.Lock()  # type: ignore[attr-defined]
    exc.generator = (x for x in ())  # type: ignore[attr-defined]
    back = trip(exc)
    assert type(back) is TwoArguments
    assert vars(back) == {"code": 1, "reason": "why"}
    back = trip(ValueError("a", threading.Lock()))
    assert back.args[0] == "a"
    assert "lock" in back.args[1]


@pytest.mark.parametrize("exc", [BadReduce(1), RaisingReduce(1)], ids=["bad", "raising"])
def test_bad_reduce(exc: BaseException) -> None:
    """If __reduce__ fails, the exception is pickled without it."""
    back = trip(exc)
    assert type(back) is type(exc)
    assert back.args == (1,)


def test_an_exception_that_cannot_be_pickled() -> None:
    """An exception that cannot be pickled becomes ResultNotPicklable with its repr and
    traceback."""
    back = trip(Refusing("message"))
    assert type(back) is ResultNotPicklable
    assert "Refusing('message')" in str(back)
    again = pickle.loads(pickle.dumps(back))
    assert type(again) is ResultNotPicklable


def test_repr_that_raises() -> None:
    """An exception with a raising repr is shown by its class name."""

    class Rude(Refusing):
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Rude" in str(trip(Rude()))


def test_cause_from_a_nested_pool_is_not_lost() -> None:
    """The traceback text of a nested pool's worker is in the outer text."""
    exc = ValueError(1)
    exc.__cause__ = RemoteTraceback("the inner text")
    back = trip(exc)
    assert "the inner text" in back.__cause__.text
    text = "".join(traceback.format_exception(None, exc, None)) + "the text"
    assert trip(exc, text).__cause__.text.count("the inner text") == 1


HAS_GROUPS = sys.version_info >= (3, 11)
with_groups = pytest.mark.skipif(not HAS_GROUPS, reason="notes and groups need Python 3.11")
ExceptionGroup: Any = getattr(builtins, "ExceptionGroup", Exception)
BaseExceptionGroup: Any = getattr(builtins, "BaseExceptionGroup", Exception)


class Exits(ExceptionGroup):  # type: ignore[misc]
    """Takes exceptions and no message, as in Python's documentation."""

    def __new__(cls, errors: list[Exception], code: int) -> Any:
        self = super().__new__(Exits, f"exit code: {code}", errors)
        self.code = code
        return self

    def derive(self, excs: Any) -> Any:
        return Exits(excs, self.code)


def outline(exc: Any) -> Any:
    """Return the comparable parts of an exception and of its members."""
    notes = list(getattr(exc, "__notes__", ()))
    rest = {key: value for key, value in vars(exc).items() if key != "__notes__"}
    members = [outline(one) for one in getattr(exc, "exceptions", ())]
    return type(exc), str(exc), notes, rest, members


def noted(exc: Any, *notes: str) -> Any:
    for note in notes:
        exc.add_note(note)
    return exc


@with_groups
def test_notes_and_groups() -> None:
    """Notes and members of a group are kept at any depth, also in a list."""
    exc = noted(TwoArguments(1, "why"), "a note", "another")
    assert trip(exc).__notes__ == ["a note", "another"]
    inner = noted(Exits([OSError(2, "not there"), exc], 3), "of the inner")
    group = noted(BaseExceptionGroup("group", [KeyboardInterrupt(), inner]), "of the outer")
    for back in (trip(group), decode(encode([group]))[0]):
        assert outline(back) == outline(group)
        assert back.message == "group" and back.exceptions[1].args[1] == 3
        # `split` makes new groups by `derive`, with the notes.
        matching, rest = back.split(OSError)
        assert type(matching.exceptions[0]) is Exits and matching.exceptions[0].code == 3
        assert matching.__notes__ == ["of the outer"]
        assert [type(one) for one in rest.exceptions[1].exceptions] == [TwoArguments]


@with_groups
def test_a_local_group(receiver: Receiver) -> None:
    """A group of a local class is caught by ``except*`` with its class, code and notes."""

    class Local(ExceptionGroup):  # type: ignore[misc]
        def __init__(self, message: str, errors: Any, code: int = 0) -> None:
            super().__init__(message, errors)
            self.code = code

        def __new__(cls, message: str, errors: Any, code: int = 0) -> Any:
            return super().__new__(cls, message, errors)

        def derive(self, excs: Any) -> Any:
            return Local(self.message, excs, self.code)

    class Cause(Exception):
        pass

    def fail() -> None:
        try:
            raise Cause("the reason")
        except Cause as cause:
            raise noted(Local("local", [ValueError(1), TypeError(2)], 5), "a note") from cause

    with pytest.raises(Local) as info:
        receiver.call(fail)
    assert (info.value.code, info.value.__notes__) == (5, ["a note"])
    part = info.value.subgroup(TypeError)
    assert type(part) is Local and part.code == 5 and part.exceptions[0].args == (2,)
    text = str(info.value.__cause__)
    assert "Cause: the reason" in text and "a note" in text and "TypeError: 2" in text


@with_groups
def test_a_group_with_unpicklable_members() -> None:
    """Each unpicklable member is treated as if it were alone; other members are kept."""
    exc = noted(TwoArguments(1, "why"), "a note")
    exc.generator = (x for x in ())
    group = Exits([exc, RaisingReduce(2), Refusing("message"), ValueError(3)], 4)
    group.generator = exc.generator
    back = trip(group)
    assert type(back) is Exits and back.code == 4 and not hasattr(back, "generator")
    kinds = [TwoArguments, RaisingReduce, ResultNotPicklable, ValueError]
    assert [type(one) for one in back.exceptions] == kinds
    assert vars(back.exceptions[0]) == {"code": 1, "reason": "why", "__notes__": ["a note"]}
    assert back.exceptions[1].args == (2,) and "Refusing('message')" in str(back.exceptions[2])
    deep = ExceptionGroup("outer", [ExceptionGroup("inner", [exc]), KeyError("k")])
    assert vars(trip(deep).exceptions[0].exceptions[0])["code"] == 1


def test_attributes_that_the_class_does_not_set() -> None:
    """They arrive, also if `__setstate__` or `__setattr__` refuses, and the other ones are left
    out."""
    for exc in (RaisingSetstate("a"), WithoutSetattr("a"), Frozen(1)):
        vars(exc).update(more=5, lock=threading.Lock())
        back = trip(exc)
        assert type(back) is type(exc) and back.args == exc.args
        assert back.more == 5 and not hasattr(back, "lock")


def test_no_code_of_the_class_runs() -> None:
    """Loading an exception calls neither __init__ nor __new__ of its class."""
    data = encode_exception(OwnNew(1, 2), "the text")
    OwnNew.__init__ = None  # type: ignore[assignment,method-assign]
    assert decode(data).b == 2


class Slots(Exception):
    __slots__ = ("__code", "unset")

    def __init__(self, code: Any) -> None:
        self.__code = code

    def code(self) -> Any:
        return self.__code


class OnlySlots(Exception):
    __slots__ = ("code",)
    code: int


def test_slots() -> None:
    """Attributes in slots arrive, except those that cannot be pickled."""
    plain = OnlySlots("text")
    plain.code = 3
    for got in decode(encode(plain)), decode(encode_exception(plain, "")):
        assert (got.args, got.code) == (("text",), 3)
    for got in decode(encode(Slots(4))), decode(encode_exception(Slots(4), "")):
        assert got.code() == 4 and not hasattr(got, "unset")
    got = decode(encode_exception(Slots(threading.Lock()), ""))
    assert type(got) is Slots and not hasattr(got, "_Slots__code")
