"""Any structure of tensors, arrays and buffers arrives as it was, its common memory included."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xpool import Pool
from xpool.errors import OptionError
from xpool.pickle import decode, dumps, encode, extents, loads

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


@pytest.fixture(params=["copy", "share"], scope="module")
def copy_tensor(request: pytest.FixtureRequest) -> bool:
    """Both modes, as far as they are built."""
    if request.param == "share":
        try:
            encode([1], copy_tensor=False)
        except OptionError:
            pytest.skip("share mode (copy_tensor=False) is not built yet")
    return bool(request.param == "copy")


def check(sent: Any, back: Any, before: list[Any]) -> None:
    assert anything.fingerprint(back) == before
    assert anything.fingerprint(sent) == before, "what was sent has changed"
    assert not anything.strides_lost(sent, back)


@THOROUGH
@given(sent=anything.structures())
def test_encode_and_dumps(copy_tensor: bool, sent: Any) -> None:
    """Through a message, in place and copied, and through a plain pickle."""
    before = anything.fingerprint(sent)
    message = encode(sent, copy_tensor=copy_tensor)
    check(sent, decode(message), before)
    check(sent, decode(bytearray(message)), before)
    plain = dumps(sent, copy_tensor=copy_tensor)
    check(sent, loads(plain), before)
    if copy_tensor:
        check(sent, pickle.loads(plain), before)


@FEW
@given(sent=anything.structures())
def test_beside_what_dill_does(copy_tensor: bool, sent: Any) -> None:
    """The same through dill's pickler."""
    before = anything.fingerprint(sent)
    back, _ = decode(encode((sent, {1: 2}.keys()), copy_tensor=copy_tensor))
    check(sent, back, before)


@FEW
@given(sent=anything.structures())
def test_on_and_on(copy_tensor: bool, sent: Any) -> None:
    """What has arrived is sent on as well as what was made here."""
    before = anything.fingerprint(sent)
    back = sent
    for _ in range(3):
        back = decode(bytearray(encode(back, copy_tensor=copy_tensor)))
        gc.collect(0)
    assert anything.fingerprint(back) == before


@pytest.fixture(scope="module")
def pool(copy_tensor: bool, warm: None) -> Iterator[Any]:
    with Pool(1, is_copy_tensor=copy_tensor) as one:
        one.apply(anything.echo, (1,))  # until the worker runs: no test is charged with it
        yield one
    one.join()


@FEW
@given(sent=anything.structures())
@example(sent=[torch.zeros(20_000)[::2], np.zeros((300, 300)).T])
def test_through_a_pool(copy_tensor: bool, pool: Any, sent: Any) -> None:
    """To a worker and back: right there, and right here again."""
    before = anything.fingerprint(sent)
    back, there = pool.apply(anything.echo, (sent,))
    assert there == before
    check(sent, back, before)


# -- the arithmetic -------------------------------------------------------------------------------

LAYOUTS = st.tuples(
    st.integers(0, 40),
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
    """Whether two layouts have a byte in common is found out as a look at each byte would."""
    found, sets = [], []
    for start, axes, itemsize in (one, two):
        lengths, steps = [n for n, _ in axes], [step for _, step in axes]
        found.append(extents.extent(start, lengths, steps, itemsize)[0])
        sets.append(places(start, axes, itemsize))
        low, high, gaps = found[-1]
        assert (low, high) == (min(sets[-1]), max(sets[-1]) + 1)
        if not gaps:  # they may have gaps if the elements, each counted, fill the range
            sets[-1] = set(range(low, high))
    assert extents.alias(*found) == bool(sets[0] & sets[1])


def test_alias_gives_up() -> None:
    """A search that would take long is not finished: then they count as aliases."""
    axes = tuple((7 + 2 * i, 60) for i in range(6))
    stop = 1 + sum(step * (length - 1) for step, length in axes)
    assert extents.alias((0, stop, axes), (1, stop + 1, axes))
