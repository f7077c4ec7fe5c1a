"""The buffers of a pickle have no memoryview below them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from xpool._memory.arena import Arena
from xpool._pickling.frame import Layout
from xpool._pickling.pickler import _FastPickler

pytestmark = pytest.mark.pure

SIZE = 100_000


def of(library: str) -> Any:
    return pytest.importorskip(library).ones(SIZE)


def twice(tensor: Any) -> Any:
    return [tensor, tensor[5:]]


KINDS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: of("torch"),
    "views": lambda: twice(of("torch")),
    "ndarray": lambda: of("numpy"),
    "memoryview": lambda: memoryview(bytearray(SIZE)),
    "matrix": lambda: memoryview(bytearray(SIZE)).cast("B", (10, SIZE // 10)),
}


@pytest.mark.parametrize("share", [False, True], ids=["copy", "share"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_memoryview(kind: str, share: bool) -> None:
    """CPython's garbage collector before 3.12.7 crashes on a memoryview below a buffer.

    The crash needs a cycle, such as one that an error during pickling leaves.
    """
    pickler = _FastPickler(Layout(arena=Arena.own() if share else None))
    pickler.dump(KINDS[kind]())
    assert pickler.buffers
    for buffer in pickler.buffers:
        below = gc.get_referents(buffer)
        assert below
        assert memoryview not in map(type, below)
