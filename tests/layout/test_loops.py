"""No loop under a lock keeps the lock when a signal handler raises in it.

Python 3.12 and 3.13 leave a jump that they add at the end of a loop out of the table of handlers.
There, signal handlers run.  If one raises, no `with` or `finally` around the loop ends.  The jump
is added if the last statement of the loop is an ``if``, or a comprehension has one.  A loop that
ends with ``if ...: continue`` and another statement has a jump of its own, which is in the table.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import xpool

dis: Any = importlib.import_module("dis")  # mypy knows an older one

pytestmark = [
    pytest.mark.pure,
    pytest.mark.skipif(sys.version_info < (3, 12), reason="earlier Pythons add no such jump"),
]


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from codes(one)


def unguarded(code: CodeType) -> Iterator[int]:
    """Yield the lines of jumps back that lie outside the `with` around their target."""
    table = dis._parse_exception_table(code)
    instructions = list(dis.get_instructions(code))
    places = {one.offset: place for place, one in enumerate(instructions)}

    def ends_with(offset: int) -> bool:
        """Whether a `with` ends if this instruction raises."""
        for entry in table:
            if entry.start <= offset < entry.end:
                place = places[entry.target]
                first = [one.opname for one in instructions[place : place + 2]]
                return "WITH_EXCEPT_START" in first or ends_with(entry.target)
        return False

    line = code.co_firstlineno
    for one in instructions:
        line = (one.positions and one.positions.lineno) or line
        if one.opname == "JUMP_BACKWARD" and ends_with(one.argval) and not ends_with(one.offset):
            yield line


def test_the_search_finds_such_loops():
    text = "with lock:\n for x in y:\n  if x:\n   f()\n"
    assert sys.version_info >= (3, 14) or list(unguarded(compile(text, "text", "exec")))
    text = "with lock:\n for x in y:\n  if not x:\n   continue\n  f()\n"
    assert not list(unguarded(compile(text, "text", "exec")))


def test_loops_under_locks():
    """Pickling runs in the program's thread, and its signal handlers may raise in it."""
    found = []
    for path in sorted((Path(xpool.__file__).parent / "_pickling").rglob("*.py")):
        for code in codes(compile(path.read_text(), str(path), "exec")):
            found += [f"{path.name}:{line} {code.co_name}" for line in unguarded(code)]
    assert found == []
