"""Functions, errors and iterables of random programs. Uses the standard library only.

All objects have the same repr in every process, so that outcomes can be compared as text.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

# Functions ---------------------------------------------------------------------------------------


def square(x: Any) -> Any:
    """Return ``x * x``, or a string twice."""
    return x * 2 if isinstance(x, (str, bytes)) else x * x


def same(x: Any) -> Any:
    return x


def empty(*_: Any) -> None:
    """Return None."""


def echo(*args: Any, **kwds: Any) -> Any:
    return args, sorted(kwds.items())


def add(a: Any, b: Any = 10) -> Any:
    return a + b


def add_one(x: Any, *, by: Any = 1) -> Any:
    return x + by


def both(x: Any) -> Any:
    return [x], [x]


def boxed(x: Any) -> Boxed:
    return Boxed(x)


def large(n: int) -> bytes:
    """Return more bytes than a pipe holds."""
    return bytes([n % 251]) * (70_000 + n)


def grow(x: list[Any]) -> int:
    x.append(0)
    return len(x)


def alias(pair: Any) -> bool:
    return pair[0] is pair[1]


def count(x: Any) -> int:
    return len(x)


def lock_of(_: Any = None) -> Any:
    return threading.Lock()


def step(limit: Any, x: Any) -> Any:
    if x >= limit:
        raise ValueError("over the limit")
    return x


def fail_at(bad: Any, exc: Callable[[], BaseException], x: Any) -> Any:
    if x == bad:
        raise exc()
    return x


def fail_with(exc: Callable[[], BaseException], *_: Any) -> None:
    raise exc()


def chained(x: Any) -> None:
    """Raise an error caused by another."""
    try:
        raise KeyError(x)
    except KeyError as exc:
        raise ValueError("of a key") from exc


def with_note(x: Any) -> None:
    """Raise an error that has a note, if Python has notes."""
    exc = ValueError(x)
    exc.remark = "kept"  # type: ignore[attr-defined]
    if hasattr(exc, "add_note"):
        exc.add_note("noted")
    raise exc


def through(path: str) -> str:
    with open(path) as pipe:
        return pipe.read()


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


class CallMe:
    """An object that can be called."""

    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: Any) -> Any:
        return x, self.by

    def method(self, x: Any) -> Any:
        return self.by, x

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return cls.__name__, x

    @staticmethod
    def of_none(x: Any) -> Any:
        return x


class Boxed:
    """A wrapped value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Boxed) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Boxed({self.value!r})"


class WithState(Boxed):
    """Pickled by ``__getstate__`` and ``__setstate__``."""

    def __getstate__(self) -> Any:
        return {"was": self.value}

    def __setstate__(self, state: Any) -> None:
        self.value = state["was"]


class ReduceRaises:
    """Raises its own error when it is pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")

    def __repr__(self) -> str:
        return "ReduceRaises()"


Pair = collections.namedtuple("Pair", "left right")


# Errors ------------------------------------------------------------------------------------------


class KeywordOnly(Exception):
    """Its ``__init__`` accepts keywords only. Its ``args`` are empty."""

    def __init__(self, *, code: int = 0) -> None:
        super().__init__()
        self.code = code


class Stubborn(Exception):
    """Defines its own pickling correctly."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a)
        self.b = b

    def __reduce__(self) -> Any:
        return type(self), (self.args[0], self.b)


# Iterables ---------------------------------------------------------------------------------------


def generator(items: Any) -> Iterator[Any]:
    yield from items


class OnlyGetitem:
    """Can be iterated over by index only."""

    def __init__(self, items: Any) -> None:
        self._items = list(items)

    def __getitem__(self, i: int) -> Any:
        return self._items[i]


class OnlyIter:
    """Has only ``__iter__``."""

    def __init__(self, items: Any) -> None:
        self._items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class Counted(OnlyIter):
    """Is its own iterator, so it works once."""

    def __init__(self, items: Any) -> None:
        self._left = list(items)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._left:
            raise StopIteration
        return self._left.pop(0)


class Sized(OnlyIter):
    """Has a length but no index."""

    def __len__(self) -> int:
        return len(self._items)


class ListWithIter(list):  # type: ignore[type-arg]
    """A list that yields other items than it contains."""

    def __iter__(self) -> Iterator[Any]:
        return iter([x + 1 for x in super().__iter__()])


class Raises:
    """Yields its items, then raises."""

    def __init__(self, items: Any, exc: Callable[[], BaseException]) -> None:
        self._items, self._exc = items, exc

    def __iter__(self) -> Iterator[Any]:
        yield from self._items
        raise self._exc()
