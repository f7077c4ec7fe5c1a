"""Frames may be cut anywhere by a pipe, and entries may wrap anywhere in a page."""

import functools
import os
import struct
import threading
import time

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from xpool import WorkerReport
from xpool._engine import worker_process as channel_module
from xpool._python import descriptors
from xpool._wire.outbox import CAPACITY, COUNTERS, NO_LIMIT, STACK_AT, Outbox, entries, make_file
from xpool._wire.wire import TO_PARENT, BlockingFrameReader, FrameReader, FrameWriter

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
@given(
    st.lists(st.one_of(st.integers(0, 50), st.sampled_from([65_500, 70_000, 200_000]))),
    st.lists(st.integers(1, 90_000), min_size=1),
)
def test_frames_survive_any_cut(sizes, cuts):
    """The reader yields the same frames in order, however a pipe cuts the bytes."""
    bodies = [os.urandom(1) * n for n in sizes]
    cuts = [*cuts, 50_000]  # limits the number of turns
    stream = b"".join(frame(k, body) for k, body in enumerate(bodies, 1))
    r, w = os.pipe()
    os.set_blocking(r, False)
    os.set_blocking(w, False)
    try:
        reader = FrameReader(r)
        got = []
        at = turn = 0
        while at < len(stream) or not reader.dry:
            cut = cuts[turn % len(cuts)]
            turn += 1
            if at < len(stream):
                try:
                    at += os.write(w, stream[at : at + cut])
                except BlockingIOError:
                    cut = 0  # the pipe is full: read first
            got += [bytes(body) for _, body in reader.frames()]
        assert got == bodies and not reader.partial
    finally:
        os.close(r)
        os.close(w)


def test_a_frame_that_was_cut_short(pipe):
    """The reader detects a pipe that ends in the middle of a frame."""
    r, w = pipe
    os.write(w, frame(1, b"whole") + frame(2, b"y" * 100)[:50])
    os.close(w)
    reader = FrameReader(r)
    assert [bytes(body) for _, body in reader.frames()] == [b"whole"]
    assert list(reader.frames()) == [] and reader.ended and reader.partial


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


def test_sending_to_a_dead_worker(pipe):
    """Sending to a dead worker has no effect and raises no error."""
    r, w = pipe
    os.close(r)
    writer = FrameWriter(w)
    writer.send([b"x"])
    writer.send([b"x" * 100_000, b"y"])
    assert not writer.backlog


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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.booleans(), st.integers(0, 3))))
def test_an_outbox_is_a_queue(steps):
    """Appended entries are taken out whole and in order, however often the page wraps."""
    fd = make_file()
    box = Outbox(fd)
    os.close(fd)
    try:
        sent, got, marks = [], [], [0]
        for number, (size, error, take) in enumerate(steps):
            payload = number.to_bytes(4, "big") * (size // 4)
            if box.append(payload, error):
                sent.append((error, payload))
                marks.append(box.tail)
            else:
                assert box.tail + 4 + len(payload) - box.head > CAPACITY
            if take == 0 and marks:
                got += entries(box.take(marks[len(marks) // 2]))
                marks = marks[len(marks) // 2 :]
        got += entries(box.take(box.tail))
        assert got == sent
    finally:
        box.close()


def test_an_entry_without_its_end():
    """An entry that is longer than what was taken out is refused."""
    with pytest.raises(ValueError, match="longer than the outbox"):
        entries(b"\xff\x00\x00\x00x")


def test_the_limit_is_obeyed(box):
    """A worker does not begin an item beyond the limit. The parent sees how many items it began."""
    assert box.enter(0) and box.began == 1
    box.forbid(1)
    assert not box.enter(1)
    # If the worker dies now, the parent must not count the refused item as begun.
    assert box.began == 1


def test_a_request_to_stop(box):
    """A request to stop, and a stack, belong to the last begun item only."""
    box.enter(0)
    assert not box.told_to_stop() and box.stack() == ""
    box.ask(1)
    assert box.told_to_stop()
    box.enter(1)
    assert not box.told_to_stop()
    box._map[STACK_AT : STACK_AT + 9] = "where ä".encode() + b"\xff"
    assert box.stack() == "where ä\ufffd"
    box.ask(0)
    assert not box.told_to_stop() and box.stack()
    box.ask(2)
    assert box.told_to_stop() and box.stack() == ""


def test_the_clock_of_the_box(box):
    """The parent sees when the task began, by the clock that both processes share."""
    assert box.since is None
    before = time.monotonic()
    box.tick()
    assert before <= box.since <= time.monotonic()
    box.rest()
    assert box.since is None


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
