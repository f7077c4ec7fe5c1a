"""Short, garbled and forged messages raise an error at once and leak no memory."""

from __future__ import annotations

import json
import os
import pickle
import struct
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hostile, scripts
from support.limits import WAIT
from support.tiers import also
from support.waiting import eventually

import xpool
from xpool import InternalError, Pool
from xpool._calls.results import Unopened
from xpool._engine.answers import Encoded
from xpool._memory.anonymous_files import File
from xpool._pickling import frame
from xpool._wire import records
from xpool._wire.outbox import CAPACITY, HEADER, Outbox, entries
from xpool._wire.wire import ANSWER, ENTRY, MOST_MESSAGE_BYTES, TO_PARENT, FrameReader
from xpool.pickle import decode, encode

pytestmark = pytest.mark.xpool_only

FUZZ = settings(max_examples=60 * int(os.environ.get("XPOOL_TEST_DEEP", "1")), deadline=None)

heads = st.builds(
    TO_PARENT.pack,
    st.one_of(st.integers(1, 3), st.integers(0, 2**32 - 1)),
    st.integers(0, 255),
    st.integers(0, 255),
    st.one_of(st.integers(0, 200), st.integers(0, 2**64 - 1)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
streams = st.lists(st.one_of(heads, st.binary(max_size=100)), max_size=6).map(b"".join)


@FUZZ
@given(streams, st.lists(st.integers(1, 80), max_size=8))
def test_any_stream_of_bytes(data, cuts):
    """From any bytes, the reader yields the announced frames or raises an error."""
    pieces, at = [], 0
    for n in cuts:
        pieces.append(data[at : at + n])
        at += n
    pieces.append(data[at:])
    at = 0

    class Piecewise(FrameReader):
        __slots__ = ()

        @staticmethod
        def _read(fd, n):
            return pieces.pop(0) if pieces else b""

        @staticmethod
        def _readv(fd, buffers):
            piece = pieces.pop(0) if pieces else b""
            n = min(len(piece), len(buffers[0]))
            buffers[0][:n] = piece[:n]
            if piece[n:]:
                pieces.insert(0, piece[n:])
            return n

    pieces = [piece for piece in pieces if piece]
    reader = Piecewise(-1)
    try:
        while not reader.ended:
            for head, body in reader.frames():
                assert head == TO_PARENT.unpack_from(data, at)
                at += TO_PARENT.size
                assert len(body) == head[3] and data.startswith(bytes(body), at)
                at += len(body)
    except (ValueError, MemoryError, OSError) as exc:
        assert not isinstance(exc, ValueError) or "a frame " in str(exc)


def test_a_body_takes_memory_when_it_arrives():
    """The body of a large frame takes memory only when it arrives."""
    head = TO_PARENT.pack(1, ANSWER, 0, MOST_MESSAGE_BYTES // 4, 0, 0, 0)
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        os.write(writing, head + b"x")
        reader = FrameReader(reading)
        tracemalloc.start()
        before = resident()
        assert list(reader.frames()) == []
        assert resident() - before < 32 * 2**20
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
        os.close(reading)
        os.close(writing)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_more_than_the_machine_has_is_refused():
    """A frame larger than the machine's memory is refused before memory is allocated."""
    reading, writing = os.pipe()
    try:
        os.write(writing, TO_PARENT.pack(1, ANSWER, 0, MOST_MESSAGE_BYTES + 1, 0, 0, 0))
        with pytest.raises(ValueError, match="is announced, more than"):
            list(FrameReader(reading).frames())
    finally:
        os.close(reading)
        os.close(writing)


@FUZZ
@given(st.binary(max_size=200))
def test_any_table_of_buffers(data):
    """Decoding any message with buffers succeeds or raises ValueError. It reads no other memory."""
    try:
        pickled, buffers = frame.unpack(memoryview(b"\x01" + data))
    except ValueError:
        return
    assert len(pickled) + sum(map(len, buffers)) <= len(data)


@FUZZ
@given(st.data())
def test_messages_cut_short(data):
    """A message without its end is refused."""
    message = bytes(encode([1, 2.5, "three", pickle.PickleBuffer(bytearray(100_000))]))
    assert bytes(decode(message)[3]) == bytes(100_000)
    cut = data.draw(st.integers(1, len(message) - 1))
    with pytest.raises(ValueError, match="cut short|not a message"):
        decode(message[:cut])


@FUZZ
@given(st.binary(max_size=300))
def test_any_outbox(data):
    """Decoding any bytes of an outbox succeeds or raises ValueError."""
    try:
        found = entries(data)
    except (ValueError, struct.error):
        return
    assert sum(4 + len(payload) for _, payload in found) == len(data)


@FUZZ
@given(st.integers(0, 2**64 - 1))
def test_any_mark_of_an_outbox(mark):
    """A mark larger than the outbox is refused."""
    box = Outbox.__new__(Outbox)
    memory = memoryview(bytearray(HEADER + CAPACITY))
    box.words, box._data = memory[:HEADER].cast("Q"), memory[HEADER:]
    try:
        assert len(box.take(mark)) == mark <= CAPACITY
    except ValueError:
        assert mark > CAPACITY


@FUZZ
@given(st.binary(max_size=60), st.integers(1, 5))
def test_answers_that_are_not_as_many_as_said(data, count):
    """Garbled answers fail their tasks. The number of results stays the number of tasks."""
    good = encode(1)
    run = b"".join(ENTRY.pack(len(good)) + good for _ in range(count))
    assert Encoded(run, count, True).open() == [1] * count
    values = Encoded(run + data, count, True).open()
    assert len(values) == count
    assert not data or all(isinstance(value, Unopened) for value in values)


plain = st.recursive(
    st.sampled_from([None, True, -(2**70), 1.5, "text \udc80", b"\xff"]) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@FUZZ
@given(st.dictionaries(st.text(max_size=5), plain, max_size=4))
def test_fields_of_log_records(fields):
    """Plain data arrives unchanged, in a packet of limited size."""
    data = records.pack(records.LOG, fields)
    assert len(data) <= records.LARGEST
    assert records.unpack(data) == (records.LOG, fields)


@FUZZ
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda fields: json.dumps(["log", fields]).encode(),
            st.dictionaries(
                st.sampled_from(["name", "msg", "levelno", "getMessage", "args"]),
                st.recursive(
                    st.none() | st.integers() | st.text(),
                    lambda inner: (
                        st.lists(inner)
                        | st.dictionaries(st.sampled_from(["set", "dict", "tuple", "bytes"]), inner)
                    ),
                ),
            ),
        ),
    )
)
def test_any_log_packet(data):
    """Decoding any log packet succeeds or raises ValueError."""
    try:
        _, fields = records.unpack(data)
        record = records.record_from(fields)
    except ValueError:
        return
    assert isinstance(record.getMessage(), str)


def test_log_packets_that_take_long_are_refused():
    """Deep values and sets of members with equal hashes are refused, because they take long."""
    same_hash = {"set": [i * (2**61 - 1) for i in range(1, 5000)]}
    for text in (json.dumps(["log", {"x": same_hash}]), '["log", {"x": ' + "[" * 50_000):
        with pytest.raises(ValueError, match="is no log record or warning"):
            records.unpack(text.encode())


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        *also(
            ((ANSWER, 0, 0, 7, 0, 0),),
            ((ANSWER, 0, 2**63, 0, 0, 0),),
            ((ANSWER, 0, 0, 1, 2**40, 0),),
            ((99, 0, 0, 0, 0, 0),),
        ),
    ],
)
def test_a_worker_that_sends_an_invalid_message(make_pool, gate, garbage):
    """If a worker sends an invalid message, only its running task fails."""
    pool = make_pool(Pool, 2)
    # After this, the pool sends calls together.
    assert pool.map(abs, range(500), chunksize=1) == list(range(500))
    before = [pool.apply_async(abs, (-i,)) for i in range(20)]
    task = pool.apply_async(hostile.write_to_the_parent, (garbage, gate.path))
    after = [pool.apply_async(abs, (-i,)) for i in range(20)]
    assert [r.get(WAIT) for r in before] == list(range(20))
    gate.open()
    with pytest.raises(InternalError, match="because it sent an invalid message"):
        task.get(WAIT)
    assert [r.get(WAIT) for r in after] == list(range(20))
    # In `apply`, the caller receives the answer.
    with pytest.raises(InternalError, match="write_to_the_parent"):
        pool.apply(hostile.write_to_the_parent, (garbage,))
    assert pool.map(abs, range(100), chunksize=1) == list(range(100))
    eventually(lambda: pool.statistics()["deaths"] == 2, "both workers are replaced")


WORDS = {"began": 0, "tail": 8, "limit": 16, "head": 24, "since": 32, "stop": 40, "adopted": 48}


@pytest.mark.parametrize("value", [2**64 - 1, *also(2**40)])
@pytest.mark.parametrize(
    "word", ["began", "tail", *also("limit", "head", "since", "stop", "adopted")]
)
def test_an_invalid_word_in_the_shared_page(make_pool, word, value):
    """An invalid word in the shared page fails only the task that wrote it."""
    pool = make_pool(Pool, 1)
    task = pool.apply_async(hostile.scribble, (WORDS[word], value))
    rest = [pool.apply_async(abs, (-i,)) for i in range(20)]
    with pytest.raises((InternalError, xpool.WorkerDied)) as caught:
        task.get(WAIT)
    if word in ("began", "tail"):  # the worker writes these two
        assert "invalid message" in str(caught.value) or "had written over memory" in str(
            caught.value
        )
    assert [r.get(WAIT) for r in rest] == list(range(20))


@pytest.mark.exhaustive
def test_a_task_that_moves_its_own_clock(make_pool):
    """A task that claims to begin in the future still has its time limit."""
    pool = make_pool(Pool, 1)
    with pytest.raises(InternalError, match=r"its task began \d+ s in the future"):
        pool.apply(hostile.scribble_and_wait, (WORDS["since"], 2**63), timeout=2.0)
    assert pool.apply(abs, (-1,)) == 1


def test_files_of_a_spawn_cannot_be_truncated():
    """A file that processes open by its maker's path cannot be truncated either."""
    file = File(b"content", "test")
    fd = file.open()
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with file.locked():
            assert os.read(fd, 99) == b"content"
    finally:
        os.close(fd)


@pytest.mark.parametrize("verb", ["apply", "map"])
@pytest.mark.parametrize("receiver", ["caller", "engine"])
def test_part_of_a_message_after_the_answer(make_pool, tmp_path, receiver, verb):
    """If a task's thread writes to the pipe after the answer, the next task is still answered."""
    pool = make_pool(Pool, 1)
    # The worker is now idle, so the caller of `apply` receives its answer.
    pool.apply(abs, (-1,))
    written = tmp_path / "written"
    if receiver == "caller":
        pool.apply(hostile.write_later, (str(written),))
        await_bytes(pool, written)
    else:  # the engine's thread receives it
        result = pool.apply_async(hostile.write_later, (str(written),))
        eventually(result.ready, "it is answered")
        eventually(lambda: pool.statistics()["deaths"] == 1, "the worker is ended")
    # In a separate thread, because `apply` would wait for ever if the answer were lost.
    later: list[object] = []
    call = {"apply": lambda: pool.apply(abs, (-3,)), "map": lambda: pool.map(abs, [-3], 1)}[verb]
    caller = threading.Thread(target=lambda: later.append(call()), daemon=True)
    caller.start()
    eventually(lambda: bool(later), "the next task is answered")
    assert later == [3 if verb == "apply" else [3]]
    eventually(lambda: pool.statistics()["deaths"] == 1, "the worker is replaced")


@pytest.mark.parametrize("verb", ["apply", "map"])
@pytest.mark.parametrize(
    "stray", [b"x", TO_PARENT.pack(0, ANSWER, 0, 2**20, 1, 0, 0)], ids=["byte", "head"]
)
def test_bytes_after_the_check_of_the_pipe(make_pool, tmp_path, stray, verb):
    """If a task's thread writes between the parent's check of the pipe and the next task, its bytes
    are not read as that task's answer."""
    pool = make_pool(Pool, 1)
    pool.apply(abs, (-1,))
    written = tmp_path / "written"
    pool.apply(hostile.write_later, (str(written), stray))
    await_bytes(pool, written)
    if pool.statistics()["deaths"]:  # the engine's thread was the first
        assert pool.apply(abs, (-4,)) == 4
        return
    worker = pool._engine.workers[0]
    poller = worker.poller

    class Early:
        """A poller that finds no bytes."""

        @staticmethod
        def poll(milliseconds: float) -> list[tuple[int, int]]:
            return poller.poll(milliseconds) if milliseconds else []

    worker.poller = Early
    told: list[object] = []

    def call() -> None:
        try:
            told.append(pool.apply(abs, (-3,)) if verb == "apply" else pool.map(abs, [-3], 1)[0])
        except InternalError as exc:
            told.append(str(exc))

    # In a separate thread, because `apply` would wait for ever if the answer were lost.
    threading.Thread(target=call, daemon=True).start()
    eventually(lambda: bool(told), "the call has ended")
    # If the worker had not begun the task, another worker answers it.
    assert told == [3] or "a frame has number" in str(told)
    assert pool.apply(abs, (-4,)) == 4


def await_bytes(pool: Pool, written: Path) -> None:
    """Wait until the thread of `write_later` has written.

    If the engine's thread watches the pipe already, it may end the worker before the file is made.
    """
    eventually(
        lambda: written.exists() or pool.statistics()["deaths"] == 1,
        "the task's thread has written",
    )


def test_retries_after_an_invalid_message(make_pool, tmp_path):
    """An invalid message counts as the worker's death, so `retries` runs the task again."""
    pool = make_pool(Pool, 1)
    flag = str(tmp_path / "flag")
    assert pool.apply(hostile.invalid_once, (flag,), retries=1) == "second"


NO_LISTENER = """
import os, socket
import xpool

def listening(*_):
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.append(fd)
        except OSError:
            continue
    return found

if __name__ == "__main__":
    with xpool.Pool(2) as pool:
        print(listening(), pool.map(listening, range(4), 1), pool.apply(len, (bytes(10**6),)))
        mine = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{fd}")]
        print([path for path in mine if path.startswith(("/dev/shm", "/tmp"))])
"""


def test_nothing_listens_and_nothing_has_a_name(tmp_path):
    """The program and its workers have no listening socket and no file in /dev/shm or /tmp."""
    script = tmp_path / "script.py"
    script.write_text(NO_LISTENER)
    done = scripts.run([str(script)])
    assert done.stdout.split("\n")[:2] == ["[] [[], [], [], []] 1000000", "[]"], done.stderr
