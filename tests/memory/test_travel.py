"""Values of many sizes, sent between processes: their contents, their memory, and their release."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from support import tensor_work as tasks
from support.leaks import descriptors
from support.memory import block_bytes, own_arena
from support.tiers import also
from support.waiting import Gate, Mailbox, eventually

import xpool
from xpool._memory.arena import Arena
from xpool._memory.holds import Region

pytestmark = pytest.mark.torch

MIB = 1 << 20
later: Any = None

SIZES = [0, 1, 4, 5, 16383, 16384, 65535, 65536, 65537, 100_001, MIB - 1, MIB, MIB + 1, 20 * MIB]


def used() -> int:
    return block_bytes(own_arena())


@pytest.fixture
def calm(warm: None) -> Iterator[None]:
    """After the test, no more blocks are held than before."""
    gc.collect()
    before = own_arena().statistics()["held"]  # the traceback of a failed test may hold some
    yield
    gc.collect()
    eventually(lambda: own_arena().statistics()["held"] <= before, "blocks released")


@pytest.mark.parametrize("share", [False, True], ids=["copy", "share"])
def test_initargs_are_freed_with_their_pool(share: bool) -> None:
    """The memory of initargs is free when the pool is gone, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = own_arena().statistics()["held"]
        pool = xpool.Pool(1, len, (torch.ones(MIB),), is_copy_tensor=not share)
        assert pool.apply(abs, (-1,)) == 1
        assert own_arena().statistics()["held"] > before
        pool.close()
        pool.join()
        del pool
        eventually(lambda: own_arena().statistics()["held"] == before, "the block is released")
    finally:
        gc.enable()


@pytest.mark.parametrize("share", [False, True], ids=["copy", "share"])
def test_contents(method_kind: Any, make_pool: Callable[..., Any], calm: None, share: bool) -> None:
    """Arguments and results of every size arrive unchanged, with every start method."""
    pool = make_pool(method_kind, 2, is_copy_tensor=not share)
    for size in SIZES:
        sent = torch.from_numpy(np.random.default_rng(size).integers(0, 255, size, np.uint8))
        before = sent.clone()
        checksum, back = pool.apply(tasks.checksum_and_reverse, (sent,))
        assert checksum == tasks.checksum(before)
        assert torch.equal(back, before.flip(0))
        assert torch.equal(sent, before)
    many = [torch.full((size // 4,), i, dtype=torch.int32) for i, size in enumerate(SIZES)]
    for i, back in enumerate(pool.map(tasks.same, [many] * 4, chunksize=2)):
        assert all(torch.equal(a, b) for a, b in zip(back, many, strict=True)), i


@pytest.mark.parametrize("kind_of", [bytes, bytearray, np.frombuffer, "pickle"])
def test_other_buffers(make_pool: Callable[..., Any], calm: None, kind_of: Any) -> None:
    """Bytes, byte arrays, numpy arrays and large pickles without buffers arrive unchanged."""
    pool = make_pool(xpool.Pool, 2)
    for size in SIZES[5:-1]:
        data = os.urandom(size)
        if kind_of == "pickle":
            value: Any = list(data)
        elif kind_of is np.frombuffer:
            value = np.frombuffer(data, np.uint8)
        else:
            value = kind_of(data)
        back = pool.apply(tasks.same, (value,))
        assert type(back) is type(value)
        assert np.array_equal(back, value) if kind_of is np.frombuffer else back == value


def test_what_arrives_can_be_written(make_pool: Callable[..., Any], calm: None) -> None:
    """The receiver owns its value. Its writes are invisible to others. Tensors are aligned to 64
    bytes for vector units."""
    pool = make_pool(xpool.Pool, 1)
    tensors = pool.apply(tasks.same, ([torch.zeros(65536 + 24 * i) for i in range(10)],))
    assert [tensor.data_ptr() % 64 for tensor in tensors] == [0] * 10
    sent = torch.zeros(MIB, dtype=torch.uint8)
    kept = pool.apply(tasks.write_and_keep, ("x", sent))
    assert sent.sum() == 0 and (kept == 7).all()
    kept.fill_(9)
    assert (pool.apply(tasks.kept, ("x",)) == 7).all()
    array = pool.apply(tasks.same, (np.zeros(MIB, np.uint8),))
    array += 1
    assert array.all()


def test_blocks_are_reused(make_pool: Callable[..., Any], calm: None) -> None:
    """A stream of values of the same size uses a few blocks again and again."""
    pool = make_pool(xpool.Pool, 1)
    before = own_arena().statistics()["blocks"]
    places = set()
    for i in range(100):
        back = pool.apply(tasks.same, (torch.full((MIB,), i, dtype=torch.uint8),))
        assert (back == i).all()
        places.add(back.data_ptr())
        del back
    assert own_arena().statistics()["blocks"] - before <= 3
    assert len(places) <= 3


def test_memory_is_released(make_pool: Callable[..., Any], calm: None) -> None:
    """The pool's end releases unused memory. Used memory is released with its last user."""
    pool = make_pool(xpool.Pool, 2)
    results = [pool.apply(tasks.filled, (i, 4 * MIB)) for i in range(8)]
    assert used() >= 32 * MIB
    del results[4:]
    pool.close()
    pool.join()
    assert used() <= 17 * MIB
    assert all((result == i).all() for i, result in enumerate(results))
    del results[:]
    assert used() <= MIB


@pytest.mark.exhaustive
def test_idle_memory_is_released(make_pool: Callable[..., Any], calm: None) -> None:
    """Idle memory is released on both sides while the pool lives."""
    pool = make_pool(xpool.Pool, 2)
    back = pool.map(tasks.same, [torch.zeros(4 * MIB, dtype=torch.uint8)] * 8, chunksize=1)
    assert used() > 8 * MIB
    del back
    eventually(lambda: used() <= MIB, "memory released", 20)
    assert pool.apply(os.getpid)


@pytest.mark.exhaustive
def test_memory_of_a_busy_worker_is_released(make_pool: Callable[..., Any], calm: None) -> None:
    """Idle memory of a worker is released even if it always has small tasks."""
    pool = make_pool(xpool.Pool, 1)
    back = pool.apply(tasks.filled, (1, 32 * MIB))
    del back

    def small() -> bool:
        pool.map(abs, range(50))
        return used() <= MIB

    eventually(small, "memory released", 20)


@pytest.mark.exhaustive
def test_descriptors(make_pool: Callable[..., Any], calm: None) -> None:
    """20,000 live results of 64 KiB need no additional descriptor."""
    pool = make_pool(xpool.Pool, 2)
    results = list(pool.imap(tasks.numbered, range(100)))
    before = len(descriptors())
    results = list(pool.imap(tasks.numbered, range(20_000), chunksize=10))
    assert len(descriptors()) <= before
    assert max(pool.map(tasks.count_descriptors, range(4))) < 30
    for i in range(0, 20_000, 97):
        assert (results[i] == i).all()
    del results[::2]
    more = list(pool.imap(tasks.numbered, range(5000)))
    for i in range(0, 10_000, 97):
        assert (results[i] == 2 * i + 1).all()
    assert all((x == i).all() for i, x in enumerate(more))


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 3 * MIB, *also(1)])
def test_memory_limit(make_pool: Callable[..., Any], calm: None, limit: int) -> None:
    """Beyond the limit, values go through the pipe."""
    base = used()
    pool = make_pool(xpool.Pool, 2, memory_limit=limit)
    sent = [torch.full((MIB,), i, dtype=torch.uint8) for i in range(20)]
    back = list(pool.imap(tasks.same, sent))
    assert all((x == i).all() for i, x in enumerate(back))
    assert used() <= max(base, limit) + MIB // 2
    values = pool.map(tasks.same, [bytes(200_000)] * 10)
    assert values == [bytes(200_000)] * 10


def test_memory_limit_in_share_mode(make_pool: Callable[..., Any], calm: None) -> None:
    """A tensor beyond the limit cannot be shared. Freed memory can be used again."""
    base = own_arena().file.used()  # the limit includes tables
    pool = make_pool(xpool.Pool, 1, memory_limit=base + 8 * MIB, is_copy_tensor=False)
    held = [torch.zeros(2 * MIB, dtype=torch.uint8) for _ in range(3)]
    for tensor in held:
        pool.apply(tasks.write, (tensor, 3))
    large = torch.zeros(4 * MIB, dtype=torch.uint8)
    with pytest.raises(xpool.TaskNotPicklable, match="memory_limit= is reached"):
        pool.apply(tasks.write, (large, 3))
    assert all((tensor == 3).all() for tensor in held)
    del held, tensor
    pool.apply(tasks.nothing)
    pool.apply(tasks.write, (large, 4))
    assert (large == 4).all()


def test_refused_reservation(
    make_pool: Callable[..., Any], calm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system refuses memory, values go through the pipe."""
    pool = make_pool(xpool.Pool, 1)
    monkeypatch.setattr(own_arena().file, "reserve", lambda start, length: False)
    blocks = own_arena().statistics()["out"]
    back = pool.apply(tasks.same, (torch.arange(3 * MIB),))
    assert torch.equal(back, torch.arange(3 * MIB))
    assert own_arena().statistics()["out"] <= blocks
    monkeypatch.undo()


def test_refused_in_the_middle(
    make_pool: Callable[..., Any], calm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one block of a message is refused, the whole message goes through the pipe."""
    pool = make_pool(xpool.Pool, 1)
    left = [3]
    take = Region.take

    def take_some(self: Region, nbytes: int, limit: int) -> int | None:
        left[0] -= 1
        return take(self, nbytes, limit) if left[0] > 0 else None

    monkeypatch.setattr(Region, "take", take_some)
    sent = [torch.full((MIB,), i) for i in range(5)]
    back = pool.apply(tasks.same, (sent,))
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(sent, back, strict=True))
    del back
    assert own_arena().statistics()["held"] == 0


def test_worker_that_cannot_map_it(
    make_pool: Callable[..., Any], calm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that cannot map the arena uses the pipe. In share mode it cannot start."""

    def refused(cls: Any, fd: int, facts: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Arena, "join", classmethod(refused))
    pool = make_pool(xpool.Pool, 2, context="fork")
    sent = [torch.full((MIB,), i) for i in range(10)]
    back = list(pool.imap(tasks.same, sent))
    assert all(torch.equal(a, b) for a, b in zip(sent, back, strict=True))
    captured = sent[3]
    assert pool.map(lambda i: int(captured[i]), range(10)) == [3] * 10
    assert [slot.mapped for slot in pool._engine.workers] == [False, False]
    with pytest.raises(xpool.WorkerStartFailed, match="Cannot allocate memory"):
        make_pool(xpool.Pool, 1, context="fork", is_copy_tensor=False).apply(abs, (1,))


@pytest.fixture
def attachments(warm: None) -> Iterator[list[int]]:
    """Take all attachments of the arena, and give back those that are left after the test."""
    taken = []
    while (attachment := own_arena().take_attachment()) is not None:
        taken.append(attachment)
    yield taken
    for attachment in taken:
        own_arena().reclaim(attachment)


@pytest.mark.usefixtures("attachments")
def test_named_objects_in_a_worker_that_cannot_map_it(
    make_pool: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a worker also gets what lies in blocks of its own, which messages only name: large
    globals, broadcasts, and shared lists."""
    pool = make_pool(xpool.Pool, 1)
    assert pool.apply(abs, (-1,)) == 1
    monkeypatch.setitem(globals(), "later", torch.full((MIB,), 7))
    once = pool.broadcast([torch.full((MIB,), 8)])
    for change in 0, 1:  # a task's change of the object stays in the worker
        sums = pool.map(lambda i: int(later[i]) + int(once[0].add_(1)[i]), range(3), 1)
        assert sums == [16 + 3 * change, 17 + 3 * change, 18 + 3 * change]
    assert pool.apply(sum, (xpool.SharedList(range(10)),)) == 45
    assert list(pool.imap(range, [3, 2], yields=True, retries=1)) == [0, 1, 2, 0, 1]
    assert not pool._engine.workers[0].mapped


def test_more_workers_than_attachments(
    make_pool: Callable[..., Any], calm: None, attachments: list[int]
) -> None:
    """Workers without an attachment use the pipe."""
    own_arena().reclaim(attachments.pop())
    pool = make_pool(xpool.Pool, 2)
    sent = [torch.full((MIB,), i, dtype=torch.uint8) for i in range(20)]
    back = list(pool.imap(tasks.same, sent))
    assert all((x == i).all() for i, x in enumerate(back))
    assert sorted(slot.mapped for slot in pool._engine.workers) == [False, True]
    with pytest.raises(xpool.WorkerStartFailed, match="479"):
        make_pool(xpool.Pool, 2, is_copy_tensor=False).apply(abs, (1,))


# -- failed and dropped jobs -----------------------------------------------------------------------


def test_results_without_get(make_pool: Callable[..., Any], calm: None) -> None:
    """A result without `get` releases its blocks when it is dropped."""
    pool = make_pool(xpool.Pool, 2)
    results = [pool.apply_async(tasks.filled, (i, MIB)) for i in range(10)]
    for result in results:
        result.wait()
    assert own_arena().statistics()["held"] == 10
    del results, result
    assert own_arena().statistics()["held"] == 0
    stream = pool.imap(tasks.numbered, range(50))
    assert (next(stream) == 0).all()
    del stream


def test_pickling_fails_after_blocks_were_leased(make_pool: Callable[..., Any], calm: None) -> None:
    """If pickling fails after a lease, the leased blocks are released, on both sides."""
    pool = make_pool(xpool.Pool, 1)
    big = torch.zeros(MIB)
    for _ in range(5):
        with pytest.raises(xpool.TaskNotPicklable):
            pool.apply(tasks.same, ([big, threading.Lock()],))
        with pytest.raises(xpool.ResultNotPicklable):
            pool.apply(tasks.with_lock, (MIB,))
    assert own_arena().statistics()["held"] == 0
    assert pool.apply(tasks.held_here)[0] == 0


def test_job_fails_half_way(make_pool: Callable[..., Any], calm: None) -> None:
    """If one task of a map with a large closure fails, all blocks are released."""
    pool = make_pool(xpool.Pool, 2)
    captured = torch.arange(MIB)

    def use(i: int) -> Any:
        if i == 7:
            raise ValueError(i)
        return captured + i

    with pytest.raises(ValueError, match="7"):
        pool.map(use, range(30), chunksize=1)
    both = pool.map(lambda i: (os.getpid(), int(captured[i])), range(40), chunksize=1)
    assert [x for _, x in both] == list(range(40))
    stream = pool.imap(use, range(30))
    with pytest.raises(ValueError, match="7"):
        list(stream)
    del stream, use
    eventually(lambda: own_arena().statistics()["held"] == 0, "all blocks released")


def test_terminate_during_large_transfers(make_pool: Callable[..., Any], calm: None) -> None:
    """`terminate` during large transfers leaves no block held."""
    for _ in range(2):
        pool = make_pool(xpool.Pool, 2)
        results = [pool.apply_async(tasks.same, (torch.zeros(MIB),)) for _ in range(10)]
        results[0].get()
        pool.terminate()
        pool.join()
        del results
        eventually(lambda: own_arena().statistics()["held"] == 0, "all blocks released")
    assert used() <= MIB


def test_retry_sees_the_original(make_pool: Callable[..., Any], calm: None, tmp_path: Any) -> None:
    """If a worker changes its argument and dies, the retry sees the original."""
    pool = make_pool(xpool.Pool, 2)
    sent = torch.ones(MIB)
    task = tasks.spoil_and_die, (str(tmp_path / "flag"), sent)
    assert pool.apply_async(*task, retries=1).get() == MIB
    flags = [str(tmp_path / f"flag{i}") for i in range(4)]
    found = list(pool.imap(tasks.spoil_pair_and_die, [(f, sent) for f in flags], retries=4))
    assert found == [MIB] * 4


@pytest.mark.exhaustive
def test_nested_pools(make_pool: Callable[..., Any], calm: None) -> None:
    """A pool in a worker has its own arena. Values pass through both."""
    pool = make_pool(xpool.Pool, 1, is_daemon=False)
    sent = torch.arange(MIB)
    assert torch.equal(pool.apply(tasks.through_a_pool, (sent,)), sent + 1)


def test_held_by_waiting_tasks(
    make_pool: Callable[..., Any], calm: None, mailbox: Mailbox, gate: Gate
) -> None:
    """If a worker dies, the tasks that it held still get their large arguments."""
    pool = make_pool(xpool.Pool, 1)
    first = pool.apply_async(tasks.post_and_gate, (mailbox.path, gate.path))
    rest = [pool.apply_async(tasks.total, (torch.full((MIB,), i),)) for i in range(5)]
    os.kill(int(mailbox.line()), 9)
    with pytest.raises(xpool.WorkerDied):
        first.get()
    assert [result.get() for result in rest] == [MIB * i for i in range(5)]


# -- streams ---------------------------------------------------------------------------------------


def _private_and_shared(pids: list[int]) -> int:
    """Return the memory of processes. A shared page counts once."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total * 1024


@pytest.mark.parametrize("buffersize", [16, *also(None)], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("share", [True, *also(False)], ids=["share", "copy"])
@pytest.mark.parametrize("way", ["both", *also("there", "back")])
def test_stream(
    make_pool: Callable[..., Any], calm: None, share: bool, way: str, buffersize: int | None
) -> None:
    """While 150 tensors of 1 MiB pass, memory stays within 64 MiB of the live results.

    With a buffersize few results are live. Without one, those that the caller has not taken count
    too.
    """
    pool = make_pool(xpool.Pool, 2, is_copy_tensor=not share)

    def stream(n: int) -> Any:
        inputs: Any = range(n)
        if way != "back":
            # Not torch.full, whose threads would wait for each other on few cores.
            inputs = (torch.from_numpy(np.full(MIB, i % 251, np.uint8)) for i in inputs)
        func = {"there": tasks.first, "back": tasks.filled_1m, "both": tasks.same}[way]
        return pool.imap(func, inputs, buffersize=buffersize)

    def begun() -> int:
        return sum(slot.box.began for slot in pool._engine.workers)

    for _ in stream(60):  # loads and allocates what is needed once
        pass
    own_arena().trim(float("inf"))
    pids = [os.getpid(), *pool.statistics()["pids"]]
    before = begun()
    base_pss, base = _private_and_shared(pids), used()
    most = most_pss = alive = 0
    results = stream(150)
    for i, value in enumerate(results):
        found = value if way == "there" else int(value[0])
        assert found == (i if way == "back" else i % 251)
        most = max(most, used() - base)
        if way != "there" and not buffersize:
            # Results that workers have made, but the caller has not taken.
            alive = max(alive, (begun() - before - i) * MIB)
        if i % 50 == 0:
            most_pss = max(most_pss, _private_and_shared(pids) - base_pss)
    del value, results
    assert most <= alive + 64 * MIB
    assert most_pss <= alive + 64 * MIB
    eventually(lambda: used() - base <= 64 * MIB, "memory of dead results released")
