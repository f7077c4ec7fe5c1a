"""Exceptions keep their class and attributes, whatever their class does."""

from __future__ import annotations

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
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls, *args)

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("never")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("never")


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
    TwoArguments(1, "why"),
    KeywordOnly(field="name"),
    OwnNew(1, 2),
    FromOSError("somewhere"),
    OwnReduce(1, 2),
    WorkerDied(1, -9, 0, "f"),
]


@pytest.mark.parametrize("exc", EXAMPLES, ids=lambda exc: type(exc).__name__)
def test_same_exception(exc: BaseException) -> None:
    """Class, args, text and attributes are kept; in a value too."""
    for back in (trip(exc), decode(encode([exc]))[0]):
        assert type(back) is type(exc)
        assert back.args == exc.args
        assert str(back) == str(exc)
        assert vars(back) == vars(exc)
    if isinstance(exc, OSError):
        assert trip(exc).filename == exc.filename
    if isinstance(exc, ImportError):
        assert trip(exc).name == "a"


def test_local_class(receiver: Receiver) -> None:
    """A local exception class with its own __init__ is caught by its class."""

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


def test_unpicklable_attributes_are_left_out() -> None:
    """They are dropped, the rest is kept."""
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
    """A __reduce__ that does not work is set aside."""
    back = trip(exc)
    assert type(back) is type(exc)
    assert back.args == (1,)


def test_class_cannot_travel() -> None:
    """Then it is a ResultNotPicklable that shows the exception and the traceback."""
    back = trip(Refusing("message"))
    assert type(back) is ResultNotPicklable
    assert "Refusing('message')" in str(back)
    again = pickle.loads(pickle.dumps(back))
    assert type(again) is ResultNotPicklable


def test_repr_that_raises() -> None:
    """Not even a bad repr is in the way."""

    class Rude(Refusing):
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Rude" in str(trip(Rude()))


def test_cause_from_a_nested_pool_is_not_lost() -> None:
    """The text of the inner worker is in the text of the outer."""
    exc = ValueError(1)
    exc.__cause__ = RemoteTraceback("the inner text")
    back = trip(exc)
    assert "the inner text" in back.__cause__.text
    text = "".join(traceback.format_exception(None, exc, None)) + "the text"
    assert trip(exc, text).__cause__.text.count("the inner text") == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes and groups came with Python 3.11")
def test_notes_and_groups() -> None:
    """Notes and the exceptions of a group are kept."""
    exc = TwoArguments(1, "why")
    exc.add_note("a note")  # type: ignore[attr-defined]
    assert trip(exc).__notes__ == ["a note"]
    group = ExceptionGroup("group", [ValueError(1), exc])  # type: ignore[name-defined]  # noqa: F821
    back = trip(group)
    assert type(back) is type(group)
    assert back.message == "group"
    assert [type(one) for one in back.exceptions] == [ValueError, TwoArguments]
    assert back.exceptions[1].__notes__ == ["a note"]


def test_no_code_of_the_class_runs() -> None:
    """Loading calls neither __init__ nor __new__ of the class."""
    data = encode_exception(OwnNew(1, 2), "the text")
    OwnNew.__init__ = None  # type: ignore[assignment,method-assign]
    assert decode(data).b == 2
