"""Structures of tensors, arrays and buffers arrive unchanged, with their common memory."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xpool._memory.arena import Arena
from xpool._pickling.frame import Layout
from xpool._pickling.tensors import extents
from xpool.pickle import decode, dumps, encode, loads

np = pytest.importorskip("numpy", reason="numpy is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
anything = pytest.importorskip("anything")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
THOROUGH = settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=SLOW)


@pytest.fixture(scope="module")
def share() -> Iterator[Layout]:
    """The layout of share mode in this process."""
    arena = Arena.own()
    if arena is None:
        pytest.skip("there is no shared memory here")
    arena.begin()
    yield Layout(lessor=arena.lease, arena=arena)
    arena.end()


def check(sent: Any, back: Any, before: list[Any]) -> None:
    assert anything.fingerprint(back) == before
    assert anything.fingerprint(sent) == before, "the sent object has changed"
    assert not anything.strides_lost(sent, back)


@pytest.mark.exhaustive
@THOROUGH
@given(sent=anything.structures())
def test_encode_and_dumps(sent: Any) -> None:
    """A structure survives a message, in place and copied, and a plain pickle."""
    before = anything.fingerprint(sent)
    message = encode(sent)
    check(sent, decode(message), before)
    check(sent, decode(bytearray(message)), before)
    plain = dumps(sent)
    check(sent, loads(plain), before)
    check(sent, pickle.loads(plain), before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("torch_files")
@THOROUGH
@given(sent=anything.structures(arrays=False))
def test_shared(share: Layout, sent: Any) -> None:
    """In share mode the received tensor has the same memory, also if sent again or passed on."""
    before = anything.fingerprint(sent)
    for _ in range(2):
        message = encode(sent, layout=share)
        back = decode(message)
        check(sent, back, before)
        assert anything.shared(sent, back)
    on = encode(back, layout=share)
    del back, message
    gc.collect(0)
    assert anything.shared(sent, decode(on))
    back = loads(dumps(sent, copy_tensor=False))
    check(sent, back, before)
    assert anything.shared(sent, back)


@FEW
@given(sent=anything.structures())
def test_arrays_in_share_mode(share: Layout, sent: Any) -> None:
    """In share mode arrays arrive as copies with their values, also when tensors move."""
    values = [fact[1:] for fact in anything.fingerprint(sent)[:-1]]
    back = decode(encode(sent, layout=share))
    for obj in (back, sent):
        assert [fact[1:] for fact in anything.fingerprint(obj)[:-1]] == values
    assert anything.shared(sent, back)


@FEW
@given(sent=anything.structures())
def test_with_dill(sent: Any) -> None:
    """A structure survives dill's pickler."""
    before = anything.fingerprint(sent)
    back, _ = decode(encode((sent, {1: 2}.keys())))
    check(sent, back, before)


@FEW
@given(sent=anything.structures())
def test_sent_on_repeatedly(sent: Any) -> None:
    """A received structure can be sent on."""
    before = anything.fingerprint(sent)
    back = sent
    for _ in range(3):
        back = decode(bytearray(encode(back)))
        gc.collect(0)
    assert anything.fingerprint(back) == before


# -- the arithmetic -------------------------------------------------------------------------------

LAYOUTS = st.tuples(
    st.integers(1_000, 1_040),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9)), max_size=3),
    st.integers(1, 4),
)


def places(start: int, axes: list[tuple[int, int]], itemsize: int) -> set[int]:
    found = {start}
    for length, step in axes:
        found = {place + i * step for place in found for i in range(length)}
    return {place + i for place in found for i in range(itemsize)}


@settings(max_examples=500, deadline=None)
@given(LAYOUTS, LAYOUTS)
def test_alias(one: Any, two: Any) -> None:
    """`alias` gives the same result as comparing every byte."""
    found, sets = [], []
    for start, axes, itemsize in (one, two):
        lengths, steps = [n for n, _ in axes], [step for _, step in axes]
        found.append(extents.extent(start, lengths, steps, itemsize)[0])
        sets.append(places(start, axes, itemsize))
        low, high, gaps = found[-1]
        assert (low, high) == (min(sets[-1]), max(sets[-1]) + 1)
        if not gaps:  # if the elements fill the range, gaps are harmless
            sets[-1] = set(range(low, high))
    assert extents.alias(*found) == bool(sets[0] & sets[1])


def test_alias_gives_up() -> None:
    """If a search takes too long, `alias` returns True."""
    axes = tuple((7 + 2 * i, 60) for i in range(6))
    stop = 1 + sum(step * (length - 1) for step, length in axes)
    assert extents.alias((1, stop + 1, axes), (2, stop + 2, axes))
