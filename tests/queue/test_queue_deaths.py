"""Processes die at any point: the others continue, and only the held messages are lost."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import parts
import pytest
from support.memory import own_arena
from support.waiting import LIMIT, eventually

from xpool._memory import foreign
from xpool._memory.arena import Arena
from xpool._memory.foreign import ForeignArena
from xpool._memory.layout import HOLDS

LARGE = 100_000


@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_readers_are_killed(make_queue: Any, start: Any, nbytes: int):
    """Each killed reader loses at most the one message that it holds."""
    q, results = make_queue(), make_queue()
    count, seed = 750, random.randrange(2**32)
    rng = random.Random(seed)
    readers = [start("fork", parts.report, q, results) for _ in range(4)]
    got: list[Any] = []
    kills = 0

    def write() -> None:
        for i in range(count):
            q.put((i, bytearray([i % 251]) * nbytes))

    writer = threading.Thread(target=write)
    writer.start()
    at = 100
    while len(got) < count - kills:
        got.append(results.get(LIMIT))
        if len(got) == at and kills < 12:
            victim = readers.pop(rng.randrange(len(readers)))
            victim.kill()
            victim.join()
            kills += 1
            readers.append(start("fork", parts.report, q, results))
            at += rng.randrange(25, 80)
    writer.join()
    for _ in readers:
        q.put(None)
    for reader in readers:
        reader.join(LIMIT)
        assert reader.exitcode == 0
    while not results.empty():
        got.append(results.get())
    assert kills > 5
    assert len(set(got)) == len(got), seed
    assert set(got) <= set(range(count)), seed
    assert len(got) >= count - kills, f"{count - len(got)} lost by {kills} deaths, seed {seed}"
    parts.settled()
    assert own_arena().statistics()["out"] == 0


@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_writers_are_killed(make_queue: Any, start: Any, nbytes: int):
    """The items of a killed writer are complete, in order and without gaps."""
    q = make_queue()
    writers = {who: start("fork", parts.put_for_ever, q, who, nbytes) for who in range(3)}
    alive = set(writers)
    expected = dict.fromkeys(writers, 0)
    taken, born = 0, 3
    while born < 9:
        who, i, data = q.get(LIMIT)
        assert i == expected[who]
        assert data == bytes([i % 251]) * nbytes
        expected[who] += 1
        taken += 1
        if taken % 50 == 0:
            victim = random.choice(sorted(alive))
            alive.remove(victim)
            writers[victim].kill()
            writers[victim].join()
            writers[born] = start("fork", parts.put_for_ever, q, born, nbytes)
            alive.add(born)
            expected[born] = 0
            born += 1
    for who in alive:
        writers[who].kill()
        writers[who].join()
    while not q.empty():
        who, i, data = q.get()
        assert i == expected[who]
        assert data == bytes([i % 251]) * nbytes
        expected[who] += 1
    del data
    parts.settled()
    assert not any(isinstance(arena, ForeignArena) for arena in Arena._known.values())


@pytest.mark.parametrize(
    "where",
    [
        "xpool.queue:frame.hold_blocks",
        "xpool.queue:foreign.ForeignArena.enter",
        "xpool._memory.layout:claim",
        "xpool._memory.holds:Holds._hold",
        "xpool.queue:decode",
    ],
)
def test_a_reader_dies_with_a_message(make_queue: Any, start: Any, where: str):
    """A reader that dies inside `get` loses its message alone, and its memory is freed."""
    q, results = make_queue(), make_queue()
    q.put((1, bytearray([1]) * LARGE))
    victim = start("fork", parts.die_at, where, parts.report, q, results)
    victim.join(LIMIT)
    assert victim.exitcode == -signal.SIGKILL
    q.put((2, bytearray([2]) * LARGE))
    start("fork", parts.report, q, results)
    assert results.get(LIMIT) == 2
    q.put(None)
    parts.settled()
    eventually(lambda: not own_arena().statistics()["out"], "blocks are free")


@pytest.mark.parametrize(
    ("where", "arrives"),
    [
        ("xpool.queue:encode", False),
        ("xpool._memory.layout:open_lease", False),
        ("xpool._memory.layout:_set", False),
        ("xpool._memory.foreign:InFlightLeases.sent", True),
        ("xpool._memory.foreign:call", True),
    ],
)
def test_a_writer_dies_with_a_message(make_queue: Any, start: Any, where: str, arrives: bool):
    """A writer that dies inside `put` has sent all of its message or nothing; others can put."""
    q = make_queue()
    data = bytearray([7]) * LARGE
    victim = start("fork", parts.die_at, where, parts.put_all, q, [data])
    victim.join(LIMIT)
    assert victim.exitcode == -signal.SIGKILL
    assert q.empty() == (not arrives)
    start("fork", parts.put_all, q, [data]).join(LIMIT)
    for _ in range(1 + arrives):
        assert q.get(LIMIT) == data
    assert q.empty()


def test_a_reader_is_stopped_with_a_message(make_queue: Any, start: Any):
    """A stopped reader that holds a message blocks no other process."""
    q, results = make_queue(), make_queue()
    q.put((1, bytearray([1]) * LARGE))
    stopped = start("fork", parts.stop_at, "xpool.queue:_opened", parts.report, q, results)
    eventually(lambda: _state(stopped.pid) == "T", "the reader is stopped")
    start("fork", parts.report, q, results)
    for i in range(2, 200):
        q.put((i, bytearray([i]) * LARGE))
        assert results.get(LIMIT) == i
    foreign.tidy(float("inf"))
    assert 1 <= own_arena().statistics()["out"] <= 3  # blocks of the same in-flight lease
    os.kill(stopped.pid, signal.SIGCONT)
    assert results.get(LIMIT) == 1
    q.put(None)
    q.put(None)


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("where", ["xpool.queue:encode", "xpool.queue:SimpleQueue._try_put"])
def test_a_writer_is_stopped_with_a_message(make_queue: Any, start: Any, where: str, size: int):
    """A writer stopped inside `put` blocks no other `put` or `get`."""
    q = make_queue()
    stopped = start("fork", parts.stop_at, where, parts.put_all, q, [bytearray(size)])
    eventually(lambda: _state(stopped.pid) == "T", "the writer is stopped")
    for i in range(1, 50):
        q.put(bytearray([i]) * size)
        assert q.get(LIMIT) == bytearray([i]) * size
    os.kill(stopped.pid, signal.SIGCONT)
    assert q.get(LIMIT) == bytearray(size)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.torch
def test_a_reader_dies_with_a_tensor(make_queue: Any, start: Any):
    """Blocks that a killed process held are freed."""
    import torch

    there, back, go = make_queue(), make_queue(), make_queue()
    victim = start("fork", parts.keep, there, back, go)
    there.put(torch.zeros(LARGE))
    assert back.get(LIMIT) == "kept"
    foreign.tidy(float("inf"))
    assert own_arena().statistics()["out"] == 1
    victim.kill()
    victim.join()
    assert own_arena().statistics()["out"] == 0


def test_closing_frees_messages(make_queue: Any):
    """Closing the last end of a queue frees the blocks of its messages."""
    q = make_queue()
    for _ in range(5):
        q.put(bytearray(LARGE))
    foreign.reclaim_arrived()
    assert own_arena().statistics()["out"] == 5
    q.close()
    foreign.reclaim_arrived()
    assert own_arena().statistics()["out"] == 0


def test_kills_do_not_leak(make_queue: Any, start: Any):
    """Memory and descriptors do not grow with the number of killed processes."""
    q = make_queue()
    most = 0
    for i in range(6):
        victim = start("fork", parts.put_for_ever, q, i, 1 << 20)
        for _ in range(10):
            data = q.get(LIMIT)
        victim.kill()
        victim.join()
        while not q.empty():
            data = q.get()
        del data
        foreign.tidy()
        most = max(most, len(Arena._known))
    assert most <= 3  # our own, the last victim's, and one that is being freed


@pytest.mark.exhaustive
@pytest.mark.torch
def test_jugglers_are_killed(make_queue: Any, start: Any, monkeypatch: pytest.MonkeyPatch):
    """Shared tensors stay correct while processes pass them on and some are killed."""
    monkeypatch.setattr("xpool._memory.arena.IDLE_SECONDS", 0.005)
    monkeypatch.setattr("xpool._memory.foreign.IDLE_SECONDS", 0.005)
    q, faults = make_queue(), make_queue()
    rng = random.Random(seed := random.randrange(2**32))
    jugglers = [start("fork", parts.juggle, q, faults, rng.random()) for _ in range(4)]
    seen, kept = 0, []
    for _ in range(15):
        for _ in range(60):
            tensor = q.get(LIMIT)
            assert bool((tensor == tensor[0]).all()) and int(tensor[0]), f"seed {seed}"
            seen += 1
            kept.append(tensor)
            if len(kept) > 8:
                q.put(kept.pop(rng.randrange(8)))
        victim = jugglers.pop(rng.randrange(4))
        victim.kill()
        victim.join()
        jugglers.append(start("fork", parts.juggle, q, faults, rng.random()))
    for tensor in kept:
        assert bool((tensor == tensor[0]).all()) and int(tensor[0]), f"seed {seed}"
    for juggler in jugglers:
        juggler.kill()
        juggler.join()
    assert faults.empty(), f"{faults.get()}, seed {seed}"
    del tensor
    kept.clear()
    while not q.empty():
        q.get()
    parts.settled()
    assert not any(isinstance(arena, ForeignArena) for arena in Arena._known.values())


def test_too_many_readers(make_queue: Any, start: Any, monkeypatch: pytest.MonkeyPatch):
    """If a file has no free attachment, `get` refuses its message; the next message arrives."""
    q = make_queue()
    start("fork", parts.put_all, q, [bytearray(LARGE), "short", bytearray(LARGE)]).join(LIMIT)
    monkeypatch.setattr("xpool._memory.layout.FIRST_FOREIGN", HOLDS)
    with pytest.raises(LookupError, match="which is the limit"):
        q.get(LIMIT)
    assert q.get(LIMIT) == "short"
    monkeypatch.undo()
    assert q.get(LIMIT) == bytearray(LARGE)
