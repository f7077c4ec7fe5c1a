"""Holds of one process on blocks of the arena: `Block` is one of them, `Holds` counts them all.

A process holds a block from its first `Block` to its last.  One byte in the tables of the file says
so to the other processes; how many holds there are is known in this process only.

One lock guards the counts.  Code that may interrupt its holder never waits for it: a finalizer
appends to a list (`drop`), and the holder empties the list after releasing the lock.  A signal
handler that interrupts its own thread's turn gets no new block; its holds are counted when that
turn ends.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from xpool._memory.layout import ArenaFile
from xpool._memory.pins import Pins
from xpool._memory.region import Region
from xpool._python.hidden import is_mine
from xpool._python.interrupt import shielded, uninterrupted


class Block:
    """A hold of this process on a block, whose memory is not reused while this object lives.

    Instances are of a subclass that is a ctypes array over the memory, so an array or a tensor that
    is made of `memoryview(block)` keeps the block alive.
    """

    __slots__ = ()

    capacity: int
    arena: Holds
    number: int
    stands_for: tuple[int, int]
    """If it stands for a tensor on a device: the index of the worker, and the tensor's bytes."""

    former: Any
    """Memory that must live as long as this does."""

    filled: bool
    """True if a sender has filled it for one message and does not use it any more."""

    @property
    def name(self) -> int:
        """Its name in messages: the stamp of this lease, and the number."""
        return self.arena.file.stamps[self.number] << 32 | self.number

    def view(self, nbytes: int) -> memoryview:
        return memoryview(self).cast("B")[:nbytes]  # type: ignore[arg-type]

    @uninterrupted
    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            return  # names of this module are gone; the parent clears the holds of dead processes
        try:
            arena = self.arena
        except AttributeError:
            return  # an exception interrupted `_block`: the hold is kept until the process exits
        arena.drop(self.number)


block_types: dict[int, Any] = {}  # by capacity: few, since there are four in an octave


def make_block_type(capacity: int) -> Any:
    made = block_types.get(capacity)
    if made is None:
        import ctypes

        # `arena` keeps the mapping alive: an object of `from_address` owns no memory.
        bases = Block, ctypes.c_char * capacity
        slots = "arena", "filled", "former", "number", "stands_for"
        space = {"__slots__": slots, "capacity": capacity}
        # Two threads may make the same type at once, and either can be used.
        made = block_types[capacity] = type(f"Block{capacity}", bases, space)
    return made


class Holds:
    """The blocks of one file that this process holds.  All methods may be called by any thread."""

    _finalizing = staticmethod(sys.is_finalizing)

    def __init__(self, file: ArenaFile, region: Region, token: int, attachment: int) -> None:
        self.file = file
        self.token = token
        self.attachment = attachment
        self._region = region
        self._mine = file.holds(attachment)
        # Guards the next four.  Re-entrant: a signal handler or a finalizer may interrupt its own
        # thread's turn.  It finds out by `is_mine`, and then leaves the counts alone.
        self._turn = threading.RLock()
        self._counts: dict[int, int] = {}  # how many holds there are on each block
        # Blocks that this process has held, by offset: an entry keeps its place for ever.
        self._numbers: dict[int, int] = {}
        self._dropped: deque[int] = deque()  # dropped by finalizers, and still in `_counts`
        self._late: list[int] = []  # held by signal handlers, and not yet in `_counts`
        self._pins = Pins()

    def _let_go(self, number: int) -> None:
        """Called under the lock when the last hold of this process on a block is gone."""

    # -- places ------------------------------------------------------------------------------------

    def _number_at(self, address: int) -> int | None:
        """Return the block that begins at an address, if this process holds it."""
        offset = self.file.offset_of(address)
        return None if offset is None else self._numbers.get(offset)

    # -- taking and dropping holds -----------------------------------------------------------------

    @shielded
    def adopt(self, name: int) -> Block:
        """Hold a block that another process, or this one, holds now.

        Raises:
            LookupError: no process held it any more, and it was leased again.
            ValueError: there is no such block.
        """
        number = name & 0xFFFF_FFFF
        block = self._hold_again(number)
        stamp = self.file.stamps[number]  # read after the hold is visible: see `ArenaFile.claim`
        if name >> 32 != stamp:
            raise LookupError(
                f"block {number} of the arena is gone: its message was withdrawn "
                f"(lease {name >> 32}, now {stamp})"
            )
        return block

    def holds(self, address: int) -> bool:
        """Whether a block that this process holds begins at an address."""
        number = self._number_at(address)
        return number is not None and number in self._counts

    @shielded
    def holding(self, address: int) -> Block | None:
        """Return another hold on the block that begins at an address, if this process has one."""
        number = self._number_at(address)
        # The caller uses the memory, so the hold cannot end meanwhile.
        if number is None or number not in self._counts:
            return None
        return self._hold_again(number)

    def _hold_again(self, number: int) -> Block:
        """Hold a block that this process or another one holds."""
        if is_mine(self._turn):
            # The caller interrupts the turn, which will count the hold.
            place = self._place(number)
            self._numbers[place[0]] = number
            self._late.append(number)
            self._mine[number] = 1
            return self._block(number, *place)
        with self._turn:
            block = self._hold(number)
        self._catch_up()
        return block

    @shielded
    def alone(self, block: Block) -> bool:
        """Whether this hold is the only one on its block, of any process."""
        self._catch_up()
        number = block.number
        return self._counts.get(number) == 1 and self.file.only(number, self.attachment)

    def _hold(self, number: int) -> Block:
        # Counted before there is a `Block`, which an exception would drop.
        place = self._place(number)
        counts = self._counts
        count = counts.get(number, 0)
        counts[number] = count + 1
        if not count:
            self._mine[number] = 1
            self._numbers[place[0]] = number
        return self._block(number, *place)

    def _place(self, number: int) -> tuple[int, int]:
        return self._region.place(number) or self.file.place(number)

    def _block(self, number: int, offset: int, capacity: int) -> Block:
        kind = block_types.get(capacity) or make_block_type(capacity)
        made = kind.from_address(self.file.address_at(offset))
        made.number = number
        made.arena = self
        block: Block = made
        return block

    @shielded
    def drop(self, number: int) -> None:
        """Release a hold.  Called by the garbage collector, at any moment in any thread."""
        if self._finalizing():
            return  # modules may be gone already; the holds end with the process
        self._dropped.append(number)
        self._catch_up()

    def _catch_up(self) -> None:
        """Count what finalizers and signal handlers have listed.  Called after each turn.

        Never waits: another thread that is in its turn calls this afterwards.
        """
        turn = self._turn
        while (self._dropped or self._late) and not is_mine(turn) and turn.acquire(False):
            try:
                self._take_dropped()
            finally:
                turn.release()

    def _take_dropped(self) -> None:
        dropped, counts, late = self._dropped, self._counts, self._late
        while dropped or late:
            while late:
                number = late.pop()
                counts[number] = counts.get(number, 0) + 1
                self._mine[number] = 1
            if not dropped:
                return
            number = dropped.popleft()
            count = counts[number] - 1
            if count:
                counts[number] = count
                continue
            del counts[number]
            # If a handler has held it meanwhile, the byte stays: `late` is counted next.
            if number not in late:
                self._mine[number] = 0
                self._let_go(number)

    # -- forks: see `pins` -------------------------------------------------------------------------

    def _pin(self, fd: int) -> None:
        held = list(self._counts)
        for number in held:
            self._counts[number] += 1
        if fd >= 0:
            self._pins.add(fd, held)

    def _unpin(self) -> None:
        self._dropped.extend(self._pins.take_ended())
