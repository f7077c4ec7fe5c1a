"""Compares the arena with a model. Several `Arena` objects that share a file act as processes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.memory import is_free
from support.waiting import eventually, together

from xpool._memory import arena as module
from xpool._memory.arena import MISSING, Arena
from xpool._memory.holds import Block
from xpool._memory.layout import ENTRIES, HOLDS, LARGE, PAGE

pytestmark = pytest.mark.pure

LIMIT = 1 << 30


class Program:
    """A separate arena, used by no pool, and other attachments to it."""

    def __init__(self, limit: int = LIMIT) -> None:
        made = Arena._make(limit, 512 << 20)  # small, because many exist at a time
        assert made is not None, "no arena on this system"
        self.own = made
        self.own.begin()
        self.others: list[Arena] = []

    def join(self, limit: int = LIMIT) -> Arena:
        """Return the arena as another process would see it."""
        attachment = self.own.take_attachment()
        assert attachment is not None
        fd = os.dup(self.own.file.fd)
        other = Arena.join(fd, self.own.facts(attachment, limit))
        Arena._known[self.own.token] = self.own  # `join` replaced this entry
        self.others.append(other)
        return other

    def kill(self, other: Arena) -> None:
        """End a process. The process that gave it its attachment releases its holds."""
        self.others.remove(other)
        other.drop = _nobody  # type: ignore[method-assign]
        os.close(other.file.fd)
        self.own.reclaim(other.attachment)

    def close(self) -> None:
        for other in list(self.others):
            self.kill(other)
        self.own.end()
        del Arena._known[self.own.token]
        self.own.drop = _nobody  # type: ignore[method-assign]
        os.close(self.own.file.fd)


def _nobody(number: int) -> None:
    """A dead process releases nothing."""


@contextmanager
def program(limit: int = LIMIT) -> Iterator[Program]:
    made = Program(limit)
    try:
        yield made
    finally:
        made.close()


def tag(block: Block, text: bytes) -> None:
    """Fill a block with a repeated text."""
    view = memoryview(block).cast("B")  # type: ignore[arg-type]
    view[: len(text)] = text
    view[-len(text) :] = text


def read(block: Block, n: int) -> tuple[bytes, bytes]:
    """Return the first and last bytes of a block."""
    view = memoryview(block).cast("B")  # type: ignore[arg-type]
    return bytes(view[:n]), bytes(view[-n:])


class Machine(RuleBasedStateMachine):
    """Processes lease, send, drop, die and start again. The contents show whether a block was lost.

    Each entry of `holds` is (process, Block, name, content). A message is a hold of its sender
    together with the name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.program = Program()
        self.holds: list[tuple[Arena, Block, int, bytes]] = []
        self.count = 0

    def teardown(self) -> None:
        self.holds.clear()
        self.program.close()

    @property
    def arenas(self) -> list[Arena]:
        return [self.program.own, *self.program.others]

    def _pick(self, data: Any, things: Sequence[Any]) -> Any:
        # Draw an index, because hypothesis keeps the drawn object, and with it the block.
        return things[data.draw(st.integers(0, len(things) - 1))]

    # -- rules

    @precondition(lambda self: len(self.program.others) < 4)
    @rule()
    def process_starts(self) -> None:
        self.program.join()

    @rule(
        data=st.data(),
        size=st.one_of(
            st.integers(16, 3000),
            st.integers(LARGE - 2, LARGE + 2),
            st.sampled_from([1 << 16, 99_999]),
        ),
    )
    def lease(self, data: Any, size: int) -> None:
        arena = self._pick(data, self.arenas)
        block = arena.lease(size)
        assert block is not None and block.capacity >= size
        assert block.capacity < 1.26 * size + 256 + PAGE
        # No other hold uses this memory.
        assert all(block.name != name for _, _, name, _ in self.holds)
        self.count += 1
        content = b"%016d" % self.count
        tag(block, content)
        self.holds.append((arena, block, block.name, content))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def send(self, data: Any) -> None:
        _, _, name, content = self._pick(data, self.holds)
        arena = self._pick(data, self.arenas)
        block = arena.adopt(name)
        assert block.name == name
        self.holds.append((arena, block, name, content))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def hold_once_more(self, data: Any) -> None:
        arena, block, name, content = self._pick(data, self.holds)
        other = arena.holding(arena.file.address + arena.file.offsets[block.number])
        assert other is not None and other.name == name
        self.holds.append((arena, other, name, content))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        place = data.draw(st.integers(0, len(self.holds) - 1))
        arena, block, name, _ = self.holds.pop(place)
        number = block.number
        del block
        if not any(held == name for _, _, held, _ in self.holds):
            assert is_free(arena, number)

    @precondition(lambda self: self.program.others)
    @rule(data=st.data())
    def process_dies(self, data: Any) -> None:
        arena = self._pick(data, self.program.others)
        # A dead process's blocks must not release holds of the next process in its attachment.
        self.program.kill(arena)
        self.holds = [hold for hold in self.holds if hold[0] is not arena]

    @rule(data=st.data(), later=st.sampled_from([0.0, 1e9]))
    def trim(self, data: Any, later: float) -> None:
        self._pick(data, self.arenas).trim(later)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def limit_reached(self, data: Any) -> None:
        """A refused lease takes no memory."""
        arena = self._pick(data, self.arenas)
        assert arena.lease(1 << 28, limit=arena.file.used()) is None

    # -- invariants

    @invariant()
    def contents(self) -> None:
        for _, block, name, content in self.holds:
            assert block.name == name
            assert read(block, 16) == (content, content)

    @invariant()
    def books(self) -> None:
        live = {block.number for _, block, _, _ in self.holds}
        for arena in self.arenas:
            mine = {block.number for held, block, _, _ in self.holds if held is arena}
            assert set(arena._counts) == mine
        for arena in self.arenas:
            first = arena._region._first
            numbers = range(first, first + arena.file.entries(arena.attachment))
            assert {n for n in numbers if not is_free(arena, n)} == live & set(numbers)
            # Each entry is either free or in use, and no two overlap.
            region = arena._region
            free = (*region._warm.values(), *region._bare.values())
            known = sorted(chain(region._young, region._old, *free))
            assert known == list(range(len(numbers)))
            ends = 0
            for number in numbers:
                assert arena.file.offsets[number] >= ends
                assert arena.file.offsets[number] % 256 == 0
                ends = arena.file.offsets[number] + arena.file.capacities[number]

    @invariant()
    def memory(self) -> None:
        """After all processes trim, large blocks without holds have no memory."""
        if self.count % 7:
            return
        for arena in self.arenas:
            arena.trim(float("inf"))
        file, live = self.program.own.file, {block.number for _, block, _, _ in self.holds}
        for attachment in range(HOLDS):
            for number in range(attachment << 18, (attachment << 18) + file.entries(attachment)):
                if number not in live and file.capacities[number] >= LARGE:
                    assert file.filled[number] == 0


TestModel = Machine.TestCase
TestModel.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_reused_among_many() -> None:
    """Among many blocks in use, dropped ones are reused, so memory stays limited."""
    with program() as one:
        held = [one.own.lease(LARGE) for _ in range(500)]
        for i in range(5000):
            held[i % 500] = None
            held[i % 500] = one.own.lease(LARGE)
        assert one.own.statistics()["blocks"] <= 500 * 1.35
        del held[:]


def test_withdrawn_message() -> None:
    """The name of a dropped block raises an error once its memory has been leased again."""
    with program() as one:
        other = one.join()
        block = one.own.lease(LARGE)
        assert block is not None
        name = block.name
        del block
        other.adopt(name)  # no lease has taken the block yet
        again = one.own.lease(LARGE)
        assert again is not None and again.number == name & 0xFFFF_FFFF
        with pytest.raises(LookupError, match="withdrawn"):
            other.adopt(name)
        assert other._counts == {}
        for bad in (MISSING, 1 << 17, HOLDS << 18):
            with pytest.raises(ValueError, match="does not exist"):
                other.adopt(bad)
        del again


def test_no_process_can_truncate_the_file() -> None:
    """A process that has the file can neither truncate nor seal it."""
    with program() as one:
        size = os.fstat(one.own.file.fd).st_size
        for other in (0, size - 1, size + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(one.own.file.fd, other)
        with pytest.raises(PermissionError):
            fcntl.fcntl(one.own.file.fd, fcntl.F_ADD_SEALS, 0x10)  # F_SEAL_FUTURE_WRITE


SCRIBBLES = {
    "all counts": lambda file, it: file._ledger.__setitem__(slice(None), _words(b"\xff")),
    "no counts": lambda file, it: file._ledger.__setitem__(slice(None), _words(b"\0")),
    "its count": lambda file, it: file._ledger.__setitem__(it, 2**64 - 1),
    "more than it has": lambda file, it: file._ledger.__setitem__(it, ENTRIES),
    "its offsets": lambda file, it: file.offsets.__setitem__(it * ENTRIES, 2**64 - 1),
    "another's offset": lambda file, it: file.offsets.__setitem__(it * ENTRIES, file.start(0)),
    "its capacity": lambda file, it: file.capacities.__setitem__(it * ENTRIES, 2**63),
    "its memory": lambda file, it: file.filled.__setitem__(it * ENTRIES, 2**63),
    "the maker's table": lambda file, it: file._tables.__setitem__(slice(480, 512), b"\xff" * 32),
}


def _words(byte: bytes) -> memoryview:
    return memoryview(byte * 8 * HOLDS).cast("Q")


@pytest.mark.parametrize("what", SCRIBBLES)
def test_tables_that_a_worker_has_written_over(what: str) -> None:
    """After a worker has overwritten its tables, the maker clears up and does not reuse its
    attachment."""
    with program() as one:
        kept = one.own.lease(LARGE)
        bad, good = one.join(), one.join()
        theirs = bad.lease(LARGE), good.lease(LARGE)
        assert kept is not None and theirs[1] is not None
        held = one.own.adopt(theirs[1].name), bad.adopt(kept.name)
        tag(kept, b"kept")
        SCRIBBLES[what](bad.file, bad.attachment)
        attachment = bad.attachment
        one.kill(bad)
        del held, theirs
        # The worker's holds are cleared, whatever it wrote to the tables.
        number = kept.number
        assert read(kept, 4) == (b"kept", b"kept") and one.own.alone(kept)
        del kept
        again = one.own.lease(LARGE)
        assert again is not None and again.number == number
        assert one.own.trim(float("inf")) in (True, False)
        new = one.join()
        assert new.lease(LARGE) is not None
        # An empty table is as good as a new one.
        assert (new.attachment == attachment) == (what in {"no counts", "the maker's table"})
        one.kill(good)
        assert one.own.statistics()["held"] == 1


def test_a_block_outside_of_its_region() -> None:
    """A name of a block outside its owner's region is refused, and no hold is left."""
    with program() as one:
        other = one.join()
        block = other.lease(LARGE)
        assert block is not None
        name = block.name
        for offsets in (2**64 - 1, 0, one.own.file.start(other.attachment + 1) - PAGE):
            other.file.offsets[block.number] = offsets
            with pytest.raises(ValueError, match="does not exist, or its entry"):
                one.own.adopt(name)
        assert one.own._counts == {}
        with pytest.raises(ValueError, match="does not exist"):
            one.own.adopt(HOLDS * ENTRIES)


def test_a_hold_between_check_and_claim() -> None:
    """A hold added between the owner's check and its claim keeps the block."""
    with program() as one:
        other = one.join()
        block = one.own.lease(LARGE)
        assert block is not None
        name, number = block.name, block.number
        del block
        file, late = one.own.file, list[Any]()
        first_look = file.map

        class AdoptedThen:
            """After the first read of this map, another process adds a hold."""

            def __getitem__(self, key: Any) -> bytes:
                found = first_look[key]
                if not late and found == bytes(HOLDS):
                    late.append(other.adopt(name))
                return found

        file.map = AdoptedThen()  # type: ignore[assignment]
        try:
            assert file.claim(number) is False
        finally:
            file.map = first_look
        assert late[0].number == number
        again = one.own.lease(LARGE)
        assert again is not None and again.number != number
        late.clear()
        del again


def test_limit() -> None:
    """At the limit, a lease fails. Free memory of other sizes is used first."""
    with program(limit=64 << 20) as one:
        base = one.own.file.used()
        held = []
        while (block := one.own.lease(1 << 20)) is not None:
            held.append(block)
        assert 60 <= len(held) <= 64
        held.clear()
        block = one.own.lease(48 << 20)  # another size
        assert block is not None
        assert one.own.file.used() - base <= 64 << 20
        assert one.own.lease(32 << 20) is None
        assert one.own.lease(100, limit=0) is None
        del block


def test_refused_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses memory, a lease fails. Later it succeeds."""
    with program() as one:
        monkeypatch.setattr(one.own.file, "reserve", lambda start, length: False)
        assert one.own.lease(1 << 20) is None
        monkeypatch.undo()
        block = one.own.lease(1 << 20)
        assert block is not None
        monkeypatch.setattr(one.own.file, "reserve", lambda start, length: False)
        assert one.own.lease(1 << 20) is None
        del block
        assert one.own.lease(1 << 20) is not None  # this block has its memory already


def test_idle_memory_is_released() -> None:
    """Idle memory is released after `IDLE_SECONDS`, not before."""
    with program() as one:
        block = one.own.lease(8 << 20)
        assert block is not None
        del block
        used = one.own.file.used()
        assert one.own.trim() is True
        assert one.own.file.used() == used
        assert one.own.trim(time.monotonic() + module.IDLE_SECONDS + 1) is False
        assert one.own.file.used() < used - (7 << 20)
        block = one.own.lease(8 << 20)
        assert block is not None
        tag(block, b"there is memory.")
        del block


def test_many_threads() -> None:
    """Threads that lease, fill, check and drop blocks never share one."""
    with program() as one:
        wrong: list[Any] = []

        def work(me: int) -> None:
            held: list[tuple[Block, bytes]] = []
            for i in range(800):
                block = one.own.lease((LARGE, 1 << 16, 300)[i % 3])
                if block is None:
                    wrong.append("refused")
                    return
                content = b"%08d%08d" % (me, i)
                tag(block, content)
                held.append((one.own.adopt(block.name), content))
                if len(held) > 20:
                    old, content = held.pop(i % 20)
                    if read(old, 16) != (content, content):
                        wrong.append(content)
                del block

        together(work, 8)
        assert wrong == []
        eventually(lambda: one.own.statistics()["held"] == 0, "all blocks released")
        assert one.own.statistics()["out"] == 0
