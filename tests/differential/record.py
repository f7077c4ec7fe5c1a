"""Runs a program and records its outcomes, the same way for both libraries.

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

_NOTES = ("item ", "The item was passed as one argument; ")

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _text(value: Any) -> str:
    return _ADDRESS.sub("0x", repr(value))


def _raised(exc: BaseException) -> dict[str, Any]:
    """Describe a task's exception. Raise any other exception that should end the program."""
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
    """Return an exception's attributes without xpool's notes about items and `starmap`."""
    state = {k: v for k, v in vars(exc).items() if k != "lock"}
    notes = [note for note in state.pop("__notes__", ()) if not note.startswith(_NOTES)]
    return {**state, **({"__notes__": notes} if notes else {})}


class Recorder:
    """Records the outcomes of calls."""

    def __init__(self, standard: bool, make_pool: Callable[..., Any], processes: bool) -> None:
        self.standard = standard
        self.processes = processes
        self.Pool = make_pool
        self.outcomes: list[Outcome] = []

    def _add(self, *what: Any) -> None:
        self.outcomes.append(list(what))

    def value(self, value: Any) -> None:
        self._add("value", type(value).__name__, _text(value))

    def call(self, call: Callable[[], Any]) -> Any:
        """Record the value or error of a call. Return the value."""
        try:
            value = call()
        except BaseException as exc:
            self._add("raised", _raised(exc))
            return None
        self.value(value)
        return value

    def start(self, call: Callable[[], Any]) -> Any:
        """Record only that a call returned. Return its value."""
        try:
            value = call()
        except BaseException as exc:
            self._add("raised", _raised(exc))
            return _Nothing()
        self._add("started")
        return value

    def refused(self, call: Callable[[], Any]) -> None:
        """Record only the class of a call's error, because its text may differ."""
        try:
            value = call()
        except BaseException as exc:
            self._add("refused", type(exc).__name__, [cls.__name__ for cls in type(exc).__mro__])
        else:
            self.value(value)

    def each(self, call: Callable[[], Any], in_order: bool = True, to_error: bool = False) -> None:
        """Record all that an iterator yields and raises, optionally until its first error."""
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
        """Record the outcome of ``call`` on xpool, of ``expected`` on the standard library.

        ``difference`` is a name in `test_differential.DIFFERENCES`.
        """
        self._add("documented", difference)
        self.call(expected if self.standard else call)

    def documented_each(
        self, difference: str, call: Callable[[], Any], expected: Callable[[], Any],
        in_order: bool = True,
    ) -> None:  # fmt: skip
        self._add("documented", difference)
        self.each(expected if self.standard else call, in_order)

    def gate(self) -> Gate:
        return Gate()

    def together(self, *calls: Callable[[], Any]) -> None:
        """Record the outcomes of these calls, each in its own thread."""
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
    """The result of a refused call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: "nothing was started"


class Gate:
    """A named pipe. `tasks.through` waits until it is opened."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._folder.name, "gate")
        os.mkfifo(self.path)

    def open(self) -> None:
        """Let one task pass. Wait until it arrives."""
        with open(self.path, "w") as pipe:
            pipe.write("through")

    def close(self) -> None:
        self._folder.cleanup()


def goes_on(func: Callable[[Any], Any], items: Any, size: int) -> Iterator[Any]:
    """Yield the results of an `imap` that continues after a failed chunk."""
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
    """Return "refused" if the call raises this error."""
    try:
        value = call()
    except kind:
        return "refused"
    return f"returned {value!r}"


def died(result: Any) -> Any:
    """Return the class and exit code of a result's error."""
    try:
        value = result.get()
    except Exception as exc:
        return type(exc).__name__, getattr(exc, "exitcode", None)
    return value


def run(
    source: str, pool: Any, standard: bool, make_pool: Callable[..., Any], processes: bool
) -> list[Outcome]:
    """Run a program. Return its outcomes."""
    names = {name: getattr(tasks, name) for name in tasks.__all__}
    names |= {"goes_on": goes_on, "refuses": refuses, "died": died}
    exec(compile(source, "<program>", "exec"), names)
    recorder = Recorder(standard, make_pool, processes)
    try:
        names["program"](pool, recorder)
    except Exception as exc:
        recorder.outcomes.append(["the program failed", repr(exc)])
    return recorder.outcomes
