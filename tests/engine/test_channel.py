"""Frames may be cut anywhere by a pipe, and entries may wrap anywhere in a page."""

import functools
import os
import struct
import threading

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from xpool import WorkerReport
from xpool._engine import worker_process as channel_module
from xpool._python import descriptors
from xpool._wire.outbox import COUNTERS, NO_LIMIT, Outbox, entries, make_file
from xpool._wire.wire import TO_PARENT, BlockingFrameReader, FrameReader

pytestmark = pytest.mark.pure


@pytest.fixture
def pipe():
    r, w = os.pipe()
    os.set_blocking(r, False)
    os.set_blocking(w, False)
    yield r, w
    for fd in (r, w):
        try:
            os.close(fd)
        except OSError:
            continue  # the test has closed it


@pytest.fixture
def box():
    fd = make_file()
    box = Outbox(fd)
    os.close(fd)
    box.forbid(NO_LIMIT)
    yield box
    box.close()


def test_counters(box):
    """Each counter has a word of its own, and the report has a field for it."""
    assert set(COUNTERS) <= set(WorkerReport._fields)
    for n, name in enumerate(COUNTERS, 1):
        box.count(name, n)
        box.count(name)
    assert box.counts == [n + 2 for n in range(len(COUNTERS))]
    assert box.turn is None and box.intact and not box.tail and not box.asked
    box.words[:] = memoryview(b"\xff" * 8 * len(box.words)).cast("Q")
    box.count(COUNTERS[0], 3)
    assert box.counts[0] == 2


def frame(number, body):
    return TO_PARENT.pack(number, 11, 0, len(body), 1, 0, 0) + body


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=2 * TO_PARENT.size), st.integers(0, 200), st.integers(0, 3))
@example(frame(1, b""), 0, 1)
@example(frame(3, b"x" * 100)[:-99], 0, 2)
@example(TO_PARENT.pack(0, 11, 0, 2**20, 1, 0, 0), 0, 1)
@example(bytes(1), 0, 0)
def test_bytes_of_another_writer(stray, size, before):
    """Bytes that a task writes between two messages raise an error."""
    assume(not stray.startswith(struct.pack("<I", before + 1)))  # a valid number would be accepted
    r, w = os.pipe()
    os.set_blocking(r, False)
    try:
        for number in range(1, before + 1):
            os.write(w, frame(number, b"x"))
        os.write(w, stray + frame(before + 1, b"y" * size))
        reader = FrameReader(r)
        with pytest.raises(ValueError, match=f"instead of {before + 1}$"):
            for taken, (head, body) in enumerate(reader.frames(), 1):
                assert (head[0], bytes(body)) == (taken, b"x")
    finally:
        os.close(r)
        os.close(w)


def test_a_source_ends_with_its_parent(pipe):
    """A worker that waits for its parent gets EOFError when the pipe ends."""
    r, w = pipe
    os.set_blocking(r, True)
    os.write(w, b"12345")
    os.close(w)
    source = BlockingFrameReader(r)
    assert source.read(3) == b"123"
    with pytest.raises(EOFError):
        source.read(3)


def test_an_entry_without_its_end():
    """An entry that is longer than what was taken out is refused."""
    with pytest.raises(ValueError, match="longer than the outbox"):
        entries(b"\xff\x00\x00\x00x")


def test_no_fork_while_a_channel_is_made(monkeypatch):
    """Forks wait until a channel is complete, so a forked child has no end of it."""
    could_fork = []

    def look(original, *args):
        def fork():
            could_fork.append(descriptors.no_fork.acquire(blocking=False))

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        return original(*args)

    for name in ("make_file", "Outbox", "_packed"):
        original = getattr(channel_module, name)
        monkeypatch.setattr(channel_module, name, functools.partial(look, original))
    channel = channel_module.Channel(0, None, True, None)
    channel.close()
    channel.boot.close()
    assert could_fork == [False] * 3
