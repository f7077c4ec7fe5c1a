"""Runs a program and records its outcomes, the same way for both libraries.

A program is the source of ``def program(pool, t)``, where ``t`` is a `Recorder`.
"""

from __future__ import annotations

import array
import collections
import functools
import operator
import os
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from differential import tasks

__all__ = ["Recorder", "run"]

Outcome = list[Any]

_NOTES = ("item ", "The item was passed as one argument; ")

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _text(value: Any) -> str:
    return _ADDRESS.sub("0x", repr(value))


def _raised(exc: Exception) -> dict[str, Any]:
    cause = exc.__cause__
    return {
        "type": type(exc).__name__,
        "classes": [cls.__name__ for cls in type(exc).__mro__],
        "args": _text(exc.args),
        "state": _text(sorted(_state(exc).items())),
        "cause": None if cause is None else type(cause).__name__,
    }


def _state(exc: Exception) -> dict[str, Any]:
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
        except Exception as exc:
            self._add("raised", _raised(exc))
            return None
        self.value(value)
        return value

    def start(self, call: Callable[[], Any]) -> Any:
        """Record only that a call returned. Return its value."""
        try:
            value = call()
        except Exception as exc:
            self._add("raised", _raised(exc))
            return _Nothing()
        self._add("started")
        return value

    def refused(self, call: Callable[[], Any]) -> None:
        """Record only the class of a call's error, because its text may differ."""
        try:
            value = call()
        except Exception as exc:
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
                except Exception as exc:
                    got.append(["raised", _raised(exc)])
                    if to_error:
                        break
        except Exception as exc:
            got.append(["raised", _raised(exc)])
        self._add("each", got if in_order else sorted(got, key=repr))

    def gate(self) -> Gate:
        return Gate()

    def together(self, *calls: Callable[[], Any]) -> None:
        """Record the outcomes of these calls, each in its own thread."""
        parts = [Recorder(self.standard, self.Pool, self.processes) for _ in calls]
        with ThreadPoolExecutor(len(calls)) as threads:
            list(threads.map(Recorder.call, parts, calls))
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


def run(
    source: str, pool: Any, standard: bool, make_pool: Callable[..., Any], processes: bool
) -> list[Outcome]:
    """Run a program. Return its outcomes."""
    modules = {one.__name__: one for one in (array, collections, functools, operator, threading)}
    names: dict[str, Any] = {**vars(tasks), **modules}
    exec(compile(source, "<program>", "exec"), names)
    recorder = Recorder(standard, make_pool, processes)
    try:
        names["program"](pool, recorder)
    except Exception as exc:
        recorder.outcomes.append(["the program failed", repr(exc)])
    return recorder.outcomes
