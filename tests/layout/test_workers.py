"""Only a worker writes its own fields; other parts call its methods."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import xpool

pytestmark = pytest.mark.pure

ENGINE = Path(xpool.__file__).parent / "_engine"


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that code assigns or deletes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def fields() -> set[str]:
    """Return the names of the fields of `WorkerProcess`."""
    tree = ast.parse((ENGINE / "worker_process.py").read_text())
    (cls,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "WorkerProcess"
    )
    return {node.attr for node in assigned(cls) if is_own(node)}


def test_a_worker_writes_its_own_fields():
    """No part of the engine assigns a worker's field or a word of its page."""
    own = fields()
    assert {"state", "interrupted", "protocol_error", "attachment"} <= own
    parts = [path for path in sorted(ENGINE.rglob("*.py")) if "WorkerProcess" in path.read_text()]
    assert len(parts) > 8
    found = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in parts
        if path.name != "worker_process.py"
        for node in assigned(ast.parse(path.read_text()))
        if not is_own(node) and (node.attr in own or ast.unparse(node.value).endswith(".box"))
    ]
    assert found == []


@pytest.mark.parametrize("code", ["worker.state = 1", "a.worker.interrupted = None"])
def test_the_check_finds_assignments(code):
    """Assignments to another object's fields are found."""
    (node,) = assigned(ast.parse(code))
    assert not is_own(node) and node.attr in fields()


def parameters(init: ast.FunctionDef) -> int:
    args = init.args
    return len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) - 1


def test_constructors_take_few_arguments():
    """No constructor in the engine takes more than six arguments."""
    found = []
    for path in sorted(ENGINE.rglob("*.py")):
        for cls in ast.walk(ast.parse(path.read_text())):
            if isinstance(cls, ast.ClassDef):
                found += [
                    f"{cls.name}: {parameters(node)}"
                    for node in cls.body
                    if isinstance(node, ast.FunctionDef)
                    and node.name == "__init__"
                    and parameters(node) > 6
                ]
    assert found == []
