"""Facts about a script's globals that its text shows."""

from __future__ import annotations

import math
import os
import posixpath
from pathlib import Path

import pytest

from xpool._pickling.by_value.source import SourceFile, read

pytestmark = pytest.mark.pure

TEXT = """
import os, math as mathematics
import os.path
from math import sqrt as root, pi
from .near import thing
try:
    import json
except ImportError:
    json = None
ONE = 1
PAIR: tuple = (1, ("a", None))
LIST = [1]
MADE = int("1")
TWICE = 1
TWICE = 1
if os.sep:
    MAYBE = 1
AGAIN = 1
LATER = 1
class Settings:
    rate = 0.5
    names = []
    set_below = 1
    assert rate
def setup():
    global AGAIN
    AGAIN = 2
    Settings.set_below = 2
if __name__ == "__main__":
    LATER = 2
    guarded = 3
"""


@pytest.fixture
def text(tmp_path: Path) -> SourceFile:
    path = tmp_path / "script.py"
    path.write_text(TEXT)
    return read(str(path), "package.inner")


@pytest.mark.parametrize(
    ("name", "value", "certain"),
    [
        ("ONE", 1, True),
        ("ONE", 2, False),
        ("ONE", True, False),
        ("ONE", 1.0, False),
        ("PAIR", (1, ("a", None)), True),
        ("PAIR", (True, ("a", None)), False),
        ("LIST", [1], False),
        ("MADE", 1, False),
        ("TWICE", 1, False),
        ("MAYBE", 1, False),
        ("AGAIN", 1, False),
        ("LATER", 1, False),
        ("guarded", 3, False),
        ("Settings.rate", 0.5, True),
        ("Settings.rate", 0.25, False),
        ("Settings.names", [], False),
        ("Settings.set_below", 1, False),
        ("os", os, True),
        ("os", math, False),
        ("mathematics", math, True),
        ("root", math.sqrt, True),
        ("root", math.sin, False),
        ("pi", math.pi, True),
        ("path", posixpath, False),
        ("unknown", None, False),
    ],
)
def test_certain_values(text: SourceFile, name: str, value: object, certain: bool) -> None:
    """A value is certain if one statement assigns a literal or imports it, and nothing rebinds
    it."""
    assert text.makes(name, value) is certain


def test_names(text: SourceFile) -> None:
    """The text shows names that the guard or a function binds."""
    assert text.has_guard
    assert text.rebound == {"AGAIN", "LATER", "guarded"}
    assert text.imports["thing"] == [("package.inner.near", "thing")]


def test_unreadable(tmp_path: Path) -> None:
    """A missing or invalid file has no information."""
    broken = tmp_path / "broken.py"
    broken.write_text("def")
    for path in (str(broken), str(tmp_path / "missing.py"), ""):
        assert read(path, None) == SourceFile()
