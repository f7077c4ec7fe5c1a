"""Files, classes and functions have limited sizes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

PACKAGE = Path(__file__).resolve().parents[2] / "xpool"
FILE_LINES = 800
FUNCTION_LINES = 75
METHODS = 25

FILES = sorted(PACKAGE.rglob("*.py"))


def test_no_file_is_too_long():
    """A file of the package has at most 800 lines."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = [f"{path}: {n} lines" for path, n in lines.items() if n > FILE_LINES]
    assert not long, "\n" + "\n".join(long)


def test_no_function_is_too_long():
    """A function has at most 75 lines with its docstring."""
    long = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                n = (node.end_lineno or node.lineno) - node.lineno + 1
                if n > FUNCTION_LINES:
                    long.append(f"{path}:{node.lineno}: {node.name} has {n} lines")
    assert not long, "\n" + "\n".join(long)


def test_no_class_has_too_many_methods():
    """A class has at most 25 methods of its own."""
    large = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                n = sum(
                    isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) for one in node.body
                )
                if n > METHODS:
                    large.append(f"{path}:{node.lineno}: {node.name} has {n} methods")
    assert not large, "\n" + "\n".join(large)
