"""How a program's outcome is written down, and run: the same on both sides.

A program is the source of ``def program(pool, t)``, where ``t`` is a `Recorder`.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from differential import tasks

__all__ = ["Recorder", "run"]

Outcome = list[Any]

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _text(value: Any) -> str:
    return _ADDRESS.sub("0x", repr(value))


def _raised(exc: BaseException) -> dict[str, Any]:
    """Describe an exception; one that no task has raised ends the program instead."""
    if not isinstance(exc, Exception) and exc.args != ("task",):
        raise exc  # Ctrl-C, or the time limit of the test
    cause = exc.__cause__
    return {
        "type": type(exc).__name__,
        "classes": [cls.__name__ for cls in type(exc).__mro__],
        "args": _text(exc.args),
        "state": _text(sorted(_state(exc).items())),
        "cause": None if cause is None else type(cause).__name__,
    }


def _state(exc: BaseException) -> dict[str, Any]:
    """Attributes of an exception, without the notes that xpool adds about items."""
    state = {k: v for k, v in vars(exc).items() if k != "lock"}
    notes = [note for note in state.pop("__notes__", ()) if not note.startswith("item ")]
    return {**state, **({"__notes__": notes} if notes else {})}


class Recorder:
    """Writes down what calls do."""

    def __init__(self, standard: bool, make_pool: Callable[..., Any], processes: bool) -> None:
        self.standard = standard
        self.processes = processes
        self.Pool = make_pool
        self.outcomes: list[Outcome] = []

    def _add(self, *what: Any) -> None:
        self.outcomes.append(list(what))

    def value(self, value: Any) -> None:
        """Write down a value."""
        self._add("value", type(value).__name__, _text(value))

    def call(self, call: Callable[[], Any]) -> Any:
        """Write down what a call returns or raises; return what it returns."""
        try:
            value = call()
        except BaseException as exc:
            self._add("raised", _raised(exc))
            return None
        self.value(value)
        return value

    def start(self, call: Callable[[], Any]) -> Any:
        """Return what a call returns, of which only that it did is written down."""
        try:
            value = call()
        except BaseException as exc:
            self._add("raised", _raised(exc))
            return _Nothing()
        self._add("started")
        return value

    def refused(self, call: Callable[[], Any]) -> None:
        """Write down the class of the error alone: of an argument that makes no sense."""
        try:
            value = call()
        except BaseException as exc:
            self._add("refused", type(exc).__name__, [cls.__name__ for cls in type(exc).__mro__])
        else:
            self.value(value)

    def each(self, call: Callable[[], Any], in_order: bool = True, to_error: bool = False) -> None:
        """Write down all that an iterator yields and raises, or until it first raises."""
        got: list[Outcome] = []
        try:
            iterator = iter(call())
            while len(got) < 1000:
                try:
                    got.append(["value", _text(next(iterator))])
                except StopIteration:
                    break
                except BaseException as exc:
                    got.append(["raised", _raised(exc)])
                    if to_error:
                        break
        except BaseException as exc:
            got.append(["raised", _raised(exc)])
        self._add("each", got if in_order else sorted(got, key=repr))

    def documented(
        self, difference: str, call: Callable[[], Any], expected: Callable[[], Any]
    ) -> None:
        """Write down what ``call`` does here; over the standard library, what it should do here.

        ``difference`` is the name of one of `differential.differences`.
        """
        self._add("documented", difference)
        self.call(expected if self.standard else call)

    def documented_each(
        self, difference: str, call: Callable[[], Any], expected: Callable[[], Any],
        in_order: bool = True,
    ) -> None:  # fmt: skip
        """As `documented`, of iterators."""
        self._add("documented", difference)
        self.each(expected if self.standard else call, in_order)

    def gate(self) -> Gate:
        """Return what tasks can wait at."""
        return Gate()

    def together(self, *calls: Callable[[], Any]) -> None:
        """Write down what these do, each in a thread of its own."""
        parts = [Recorder(self.standard, self.Pool, self.processes) for _ in calls]
        threads = [
            threading.Thread(target=part.call, args=(call,)) for part, call in zip(parts, calls)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for part in parts:
            self.outcomes += part.outcomes


class _Nothing:
    """Stands for the result of what was refused."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: "nothing was started"


class Gate:
    """A pipe with a name: `tasks.through` waits there until it is opened."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._folder.name, "gate")
        os.mkfifo(self.path)

    def open(self) -> None:
        """Let one task through; waits until it is there."""
        with open(self.path, "w") as pipe:
            pipe.write("through")

    def close(self) -> None:
        """Remove it."""
        self._folder.cleanup()


def goes_on(func: Callable[[Any], Any], items: Any, size: int) -> Iterator[Any]:
    """Yield what an `imap` with chunks does that goes on after an error: an error for its chunk."""
    return _GoesOn(func, list(items), size)


class _GoesOn:
    def __init__(self, func: Callable[[Any], Any], items: list[Any], size: int) -> None:
        self._func, self._items, self._size = func, items, size
        self._ready: list[Any] = []

    def __iter__(self) -> _GoesOn:
        return self

    def __next__(self) -> Any:
        if not self._ready:
            if not self._items:
                raise StopIteration
            chunk, self._items = self._items[: self._size], self._items[self._size :]
            self._ready = [self._func(x) for x in chunk]
        return self._ready.pop(0)


def refuses(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """Return whether a call raises an error of this class."""
    try:
        value = call()
    except kind:
        return "refused"
    return f"returned {value!r}"


def died(result: Any) -> Any:
    """Return the class and exit code of the error that a result ends with."""
    try:
        value = result.get()
    except Exception as exc:
        return type(exc).__name__, getattr(exc, "exitcode", None)
    return value


def run(
    source: str, pool: Any, standard: bool, make_pool: Callable[..., Any], processes: bool
) -> list[Outcome]:
    """Run a program; return what it wrote down."""
    names = {name: getattr(tasks, name) for name in tasks.__all__}
    names |= {"goes_on": goes_on, "refuses": refuses, "died": died}
    exec(compile(source, "<program>", "exec"), names)
    recorder = Recorder(standard, make_pool, processes)
    try:
        names["program"](pool, recorder)
    except Exception as exc:
        recorder.outcomes.append(["the program failed", repr(exc)])
    return recorder.outcomes
