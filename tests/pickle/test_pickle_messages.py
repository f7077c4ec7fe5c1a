"""Messages: plain data, buffers, the framed layout, threads, nested calls."""

from __future__ import annotations

import io
import os
import pickle
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import together

from xpool._pickling import frame
from xpool._pickling.frame import INLINE_BELOW
from xpool.pickle import Pickler, decode, dumps, encode, loads

pytestmark = pytest.mark.pure

ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
HASHABLE = st.one_of(ATOMS, st.tuples(ATOMS, ATOMS), st.frozensets(ATOMS, max_size=3))
NESTED = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.sets(HASHABLE, max_size=4),
        st.binary(min_size=0, max_size=50).map(bytearray),
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(NESTED)
def test_nested_data(obj: Any) -> None:
    """Nested data arrives equal and of the same types."""
    for back in (decode(encode(obj)), loads(dumps(obj)), pickle.loads(dumps(obj))):
        assert back == obj
        assert type(back) is type(obj)
    assert repr(decode(encode(obj))) == repr(pickle.loads(pickle.dumps(obj)))


@settings(max_examples=50, deadline=None)
@given(NESTED)
def test_nested_data_with_functions(obj: Any) -> None:
    """Data in a lambda and beside it stays one object."""
    shared = [obj]
    function, beside = decode(encode((lambda: shared, shared)))
    assert function() == shared
    assert function() is beside


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3 * INLINE_BELOW), max_size=6), st.sampled_from([bytes, bytearray]))
def test_buffers(sizes: list[int], kind: Any) -> None:
    """Buffers of all sizes arrive, and large ones are sent outside the pickle."""
    blocks = [bytearray([i % 251]) * size for i, size in enumerate(sizes)]
    message = encode([pickle.PickleBuffer(block) for block in blocks])
    framed = any(size >= INLINE_BELOW for size in sizes)
    assert message[0] == (frame.FRAMED if framed else frame.PLAIN)
    back = decode(kind(message))
    assert [bytes(block) for block in back] == [bytes(block) for block in blocks]
    assert not any(memoryview(block).readonly for block in back)


def test_buffers_in_place() -> None:
    """Buffers of a bytearray are used in place; those of bytes are copied."""
    message = encode(pickle.PickleBuffer(bytearray(b"a" * INLINE_BELOW)))
    held = bytearray(message)
    for source in (held, memoryview(held)):
        view = decode(source)
        view[0] = ord("z")
        assert held.find(b"za") >= 0
        view[0] = ord("a")
    view = decode(message)
    view[0] = ord("z")
    assert message.find(b"z" + b"a" * 50) < 0


def test_alignment() -> None:
    """Each buffer begins at a multiple of ALIGN."""
    blocks = [bytearray([65 + i]) * (INLINE_BELOW + i) for i in range(3)]
    message = encode([pickle.PickleBuffer(block) for block in blocks])
    for block in blocks:
        assert message.index(bytes(block)) % frame.ALIGN == 0


def test_not_a_message() -> None:
    """Bytes that are no message are refused."""
    with pytest.raises(EOFError):
        decode(b"")
    with pytest.raises(ValueError, match="not a message"):
        decode(b"\x02" + bytes(50))
    with pytest.raises(ValueError, match="cut short"):
        decode(struct.pack("<BBxxIQ", frame.FRAMED, 0, 1000, 0) + bytes(50))


def test_pickler() -> None:
    """Each dump of a Pickler can be loaded by pickle.load alone."""
    file = io.BytesIO()
    pickler = Pickler(file, recurse=True)
    pickler.dump({"a": 1})
    pickler.dump(lambda: 2)
    file.seek(0)
    assert pickle.load(file) == {"a": 1}
    assert pickle.load(file)() == 2
    assert "recurse=True" in repr(pickler)


class Reentrant:
    """Its __reduce__ pickles an object."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __reduce__(self) -> Any:
        inner = encode(Reentrant(self.depth - 1)) if self.depth else encode((lambda: 7, [1, 2]))
        return loads, (inner,)


def test_reentrant() -> None:
    """A __reduce__ may call `encode`."""
    function, rest = decode(encode(Reentrant(20)))
    assert (function(), rest) == (7, [1, 2])


def test_pickler_is_clean_after_an_error() -> None:
    """A failed message leaves nothing in later ones."""
    for _ in range(3):
        with pytest.raises(pickle.PicklingError):
            encode([1, 2, (x for x in ())])
        assert encode([1, 2]) == pickle.dumps([1, 2], 5)
    big = [object() for _ in range(100_000)]
    assert len(decode(encode(big))) == 100_000
    assert encode([1, 2]) == pickle.dumps([1, 2], 5)


def test_many_threads() -> None:
    """Many threads pickle functions, classes and data concurrently."""

    class Local:
        def __init__(self, n: int) -> None:
            self.n = n

    def work(number: int) -> None:
        n = 20 * number
        for i in range(50):
            buffer = pickle.PickleBuffer(bytearray(n * 1000))
            one, function, block = decode(encode((Local(n + i), lambda i=i: n * i, buffer)))
            assert type(one) is Local
            assert one.n == n + i
            assert function() == n * i
            assert len(block) == n * 1000
            assert decode(encode([n] * i)) == [n] * i

    together(work, 8)


def test_class_in_many_threads_at_once() -> None:
    """Threads that load the same unknown class at once get one complete class."""
    from xpool._pickling.by_value import registry

    def make() -> Any:
        class Local:
            a = b = c = d = 1

            def f(self) -> int:
                return self.a + self.d

        return Local

    cls = make()
    message = encode(cls())
    with registry.lock:
        registry._by_id.clear()
        registry._by_token.clear()
    results: list[Any] = []

    def load(_: int) -> None:
        one = decode(message)
        results.append((type(one), one.f()))

    together(load, 8)
    assert len({kind for kind, _ in results}) == 1
    assert [value for _, value in results] == [2] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.starts
def test_after_fork() -> None:
    """A forked child can pickle and load, and knows its parent's classes."""

    class Local:
        pass

    message = encode(Local())
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            good = type(decode(message)) is Local and decode(encode(lambda: 3))() == 3
            status = 0 if good else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
