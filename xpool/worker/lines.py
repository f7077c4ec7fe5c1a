"""Whole lines on a stream that others write to as well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from xpool.worker.context import current_worker

__all__ = ["Clearing", "Lines"]

ERASE = "\r\x1b[K"
"""To the beginning of the line, and erase it: where a progress bar may stand."""


class Lines:
    """A text stream that puts something before each line, and hands on whole lines in one piece."""

    def __init__(self, stream: Any, before: Callable[[], str]) -> None:
        self._stream, self._before = stream, before
        self._begun = ""  # a line without its end
        self._continues = False  # the beginning of this line is written

    @classmethod
    def prefixed(cls, stream: Any) -> Any:
        """Return the stream with ``[worker i]`` before its lines."""
        return None if stream is None else cls(stream, _name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the lines that are complete."""
        whole, end, rest = (self._begun + text).rpartition("\n")
        self._begun = rest
        if end:
            self._hand_on(whole + end)
            self._continues = False
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write them all."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what there is of a line, too."""
        if self._begun:
            begun, self._begun = self._begun, ""
            self._hand_on(begun)
            self._continues = True
        self._stream.flush()

    def _hand_on(self, text: str) -> None:
        before = self._before()
        lines = text.splitlines(keepends=True)
        # The rest of a line whose beginning `flush` has written gets no prefix.
        if self._continues:
            head = lines.pop(0)
        else:
            head = ""
        self._stream.write(head + "".join(before + line for line in lines))


def _name() -> str:
    try:
        return f"[worker {current_worker().index}] "
    except RuntimeError:
        return "[worker] "  # a thread of a task's, where workers are threads


class Clearing:
    """A function whose lines on a terminal take the place of a progress bar, which goes below."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func

    def __call__(self, *args: Any) -> Any:
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_clearing(one) for one in before)
        try:
            return self._func(*args)
        finally:
            for one in (sys.stdout, sys.stderr):
                if isinstance(one, Lines):
                    one.flush()
            sys.stdout, sys.stderr = before


def _clearing(stream: Any) -> Any:
    if stream is None or not stream.isatty():
        return stream
    return Lines(stream, lambda: ERASE)
