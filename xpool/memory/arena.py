"""The arena: shared memory in which large values lie while they travel, and after.

One anonymous file for a program: the process that owns pools makes it, each worker is handed its
descriptor once and maps it whole.  The file is huge and empty; memory is used only where it has
been written.  Every process has a **seat**, and with it a region of the file in which it alone
allocates **blocks**.  Whoever maps the file can use any block in place: a value is copied into a
block once, by its sender, and what travels through the pipe is the name of the block.

**Every byte of the tables has one writer**, so nothing needs a lock between processes and nothing
can be orphaned.  A block is free for its owner when no process holds it.  A sender holds what it
has sent until it knows that the receiver has taken hold (a task was answered, an answer was
acknowledged), so a block in flight is held by someone at any moment.  When a process dies, the one
that gave it its seat takes out its mail and then clears its holds (`bury`); its blocks that others
still hold stay where they are.

An entry of a table keeps its place and size for ever, so a table can be read by whoever sits in
that seat next.  The stamp counts the leases of a block and is part of its name: who comes too late
finds another stamp, not another's value.  Memory is asked for before it is written, so that a
shortage is a refusal, and then the value goes through the pipe; it is never a SIGBUS.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
import threading
import time
from collections import deque
from typing import Any

from xpool.interrupt import uninterrupted
from xpool.memory import seats
from xpool.memory.layout import ENTRIES, HOLDS, PAGE, File
from xpool.memory.region import Region
from xpool.memory.system import available_memory

__all__ = ["IDLE", "MISSING", "Arena", "Block"]

IDLE = 5.0
"""Seconds after which the memory of a free block goes back to the system."""

MISSING = 2**64 - 1
"""In the place of a block's name: there is none."""

_MOST = 128 << 30  # bytes of addresses for a region: 480 of them fit into 47 bits of address


class Block:
    """A hold on a block, in this process: as long as this lives the memory is not given away.

    Instances are of a subclass that is a ctypes array over the memory: what is made of
    `memoryview(block)` (an array, a tensor) keeps the block alive, by whatever way.
    """

    capacity: int
    arena: Arena
    number: int
    name: int  # what a message calls it: the stamp of this lease, and the number
    former: Any = None  # memory that must live as long as the block does

    def view(self, nbytes: int) -> memoryview:
        """Return the first ``nbytes`` bytes."""
        return memoryview(self).cast("B")[:nbytes]  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise `LookupError` if the block has been leased anew since."""
        stamp = self.arena.file.stamp(self.number)
        if self.name >> 32 != stamp:
            raise LookupError(
                f"block {self.number} of the arena is gone: its message was withdrawn "
                f"(lease {self.name >> 32}, now {stamp})"
            )

    def __del__(self) -> None:
        self.arena.drop(self.number)


_types: dict[int, Any] = {}  # by capacity: four an octave, so there are few


def _block_type(capacity: int) -> Any:
    made = _types.get(capacity)
    if made is None:
        bases = Block, ctypes.c_char * capacity
        made = _types[capacity] = type(f"Block{capacity}", bases, {"capacity": capacity})
    return made


class Arena:
    """The file as one process sees it.  All methods may be called by any thread."""

    _own: Arena | None = None
    _making = threading.Lock()
    _known: dict[int, Arena] = {}  # by token
    _mapping: type[File] = File
    is_guest = False  # it came with a message, see `xpool.memory.guests`

    def __init__(self, fd: int, token: int, seat: int, region: int, limit: int) -> None:
        self.file = self._mapping(fd, region)
        self.token = token
        self.seat = seat
        self.limit = limit
        self._lock = threading.Lock()
        # Holds of this process: how often by block, and those that were dropped since.
        self._counts: dict[int, int] = {}
        self._dropped: deque[int] = deque()
        self._pins: list[tuple[int, list[int]]] = []  # by forked children, see `_before_fork`
        self._at: dict[int, int] = {}  # the blocks that were ever held here, by offset
        self._late: list[int] = []  # seats to bury when what was sent from them has arrived
        # Of the process that made the file: seats to give away, and those in which nobody
        # allocates, so that what is let go there can be punched.
        self._seats: list[int] = []
        self._vacant: set[int] = set()
        self._stale: set[int] = set()  # of these, those with blocks that others may hold
        self._engines = 0
        self._region = Region(self.file, seat)
        Arena._known[token] = self

    # -- making and joining ------------------------------------------------------------------------

    @classmethod
    def own(cls) -> Arena | None:
        """Return the arena that this process made for its pools; None where there cannot be one.

        Its limit is half of the memory that was available when it was made.
        """
        if sys.platform != "linux" or sys.maxsize < 2**32:
            return None
        with cls._making:
            if cls._own is None:
                cls._own = cls._make(available_memory() // 2)
            return cls._own

    @classmethod
    def _make(cls, limit: int) -> Arena | None:
        # Where another program's file is mapped already, the addresses must do for both.
        most = _MOST // 8 if cls._known else _MOST
        region = min(max(2 * limit, 1 << 30), most) // PAGE * PAGE
        fd = -1
        try:
            fd = os.memfd_create("xpool-arena", os.MFD_CLOEXEC)
            os.ftruncate(fd, File.size_for(region))
            seats.sit(fd, 0)
            arena = cls(fd, int.from_bytes(os.urandom(8), "little") | 1, 0, region, limit)
        except (OSError, ValueError, OverflowError):
            # No such thing here, or a limit on addresses or descriptors: pipes do as well.
            if fd >= 0:
                os.close(fd)
            return None
        arena._seats = list(range(seats.FIRST_GUEST - 1, 0, -1))
        arena._vacant = set(range(HOLDS))
        return arena

    @classmethod
    def join(cls, fd: int, facts: tuple[int, int, int, int]) -> Arena:
        """Map the file of the process that gave us this descriptor and a seat.

        Raises:
            OSError: the system refuses; most likely a limit on addresses (``ulimit -v``).
        """
        return cls(fd, *facts)

    def facts(self, seat: int, limit: int) -> tuple[int, int, int, int]:
        """Return what `join` needs besides the descriptor, as builtins."""
        return self.token, seat, self.file.region, limit

    @classmethod
    def here(cls) -> Arena | None:
        """Return the arena of the pool that this process works for, else its own."""
        return next((one for one in cls._known.values() if not one.is_guest), None) or cls.own()

    @classmethod
    def find(cls, token: int) -> Arena:
        """Return the arena that a message speaks of.

        Raises:
            LookupError: this process does not have it.
        """
        try:
            return cls._known[token]
        except KeyError:
            raise LookupError(
                "a message of xpool lies in shared memory that this process does not have; it can "
                "be opened only by the pool's own processes"
            ) from None

    @classmethod
    def elsewhere(cls, address: int, arena: Arena) -> bool:
        """Whether an address lies in another arena than this, in a block that others hold too."""
        for other in list(cls._known.values()):
            offset = None if other is arena else other.file.offset_of(address)
            if offset is not None:
                number = other._at.get(offset)
                return number is None or not other.file.only(number, other.seat)
        return False

    @classmethod
    def holding_any(cls, address: int) -> Block | None:
        """Return another hold on the block that begins at an address, in whatever arena it is."""
        held = (arena.holding(address) for arena in list(cls._known.values()))
        return next(filter(None, held), None)

    # -- the process that made it ------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a pool of this process uses the arena."""
        with self._lock:
            self._engines += 1
            if self.seat in self._vacant:
                self._vacant.discard(self.seat)
                self._stale.discard(self.seat)
                self._region = Region(self.file, self.seat)  # some memory was given back

    def end(self) -> None:
        """Note that a pool has ended; after the last all free memory goes back at once."""
        with self._lock:
            self._engines -= 1
            last = not self._engines
            if last:
                self._vacant.add(self.seat)
                self._stale.add(self.seat)
        if last:
            self.trim(float("inf"))

    def take_seat(self) -> int | None:
        """Return a seat for a process to come; None when all are taken."""
        with self._lock:
            if not self._seats:
                return None
            seat = self._seats.pop()
            self._vacant.discard(seat)
            self._stale.discard(seat)
            return seat

    @uninterrupted
    def bury(self, seat: int) -> None:
        """Clear the holds of a process that has ended, and give its seat away again.

        What it has sent must have been adopted before.
        """
        with self._lock:
            self._late.append(seat)
            self._bury_late()

    def _bury_late(self) -> None:
        # What a process has sent through queues outlives it, and with it the process's holds.
        for seat in [seat for seat in self._late if not seats.taken(self.file.fd, seat)]:
            self._late.remove(seat)
            self.file.clear_holds(seat)
            self._vacant.add(seat)
            self._stale.add(seat)
            self._seats.append(seat)
        self._punch_stale()

    def _punch_stale(self) -> None:
        for seat in list(self._stale):
            numbers = range(seat * ENTRIES, seat * ENTRIES + self.file.entries(seat))
            if sum(map(self._punch_if_free, numbers)) == len(numbers):
                self._stale.discard(seat)

    def _punch_if_free(self, number: int) -> bool:
        free = self.file.free(number)
        if free:
            self.file.punch(*self.file.entry(number))
        return free

    # -- leasing and holding -----------------------------------------------------------------------

    def lease(self, nbytes: int, limit: int | None = None) -> Block | None:
        """Return a block of ``nbytes`` bytes that only this process holds.

        Returns None when the system has no memory, or the program would use more than ``limit``
        bytes of shared memory (None: the arena's own limit).
        """
        # A signal handler may have come into a lease of its own thread: then there is none for it.
        if not self._lock.acquire(timeout=1.0):
            return None
        try:
            return self._lease(nbytes, self.limit if limit is None else limit)
        finally:
            self._lock.release()
            self._settle()

    @uninterrupted
    def _lease(self, nbytes: int, limit: int) -> Block | None:
        self._take_dropped()
        number = self._region.take(nbytes, limit)
        if number is None and self._clear_dead():
            number = self._region.take(nbytes, limit)
        if number is None:
            return None
        self.file.set_stamp(number, (self.file.stamp(number) + 1) & 0xFFFF_FFFF)
        return self._hold(number)

    def adopt(self, name: int) -> Block:
        """Take hold of a block that another process, or this one, holds now.

        Raises:
            LookupError: nobody held it any more: it has been leased to another message.
            ValueError: there is no such block.
        """
        number = name & 0xFFFF_FFFF
        seat, index = divmod(number, ENTRIES)
        if seat >= HOLDS or index >= self.file.entries(seat):
            raise ValueError(f"a message names block {number}, which does not exist")
        try:
            with self._lock:
                block = self._hold(number)
        finally:
            self._settle()
        block.name = name
        block.check()
        return block

    def holding(self, address: int) -> Block | None:
        """Return another hold on the block that begins at an address, if this process has one."""
        with self._lock:
            offset = self.file.offset_of(address)
            number = None if offset is None else self._at.get(offset)
            if number is None or number not in self._counts:
                return None
            return self._hold(number)

    @uninterrupted
    def _hold(self, number: int) -> Block:
        offset, capacity = self.file.entry(number)
        block: Block = _block_type(capacity).from_buffer(*self.file.place(offset))
        block.arena = self
        block.number = number
        block.name = self.file.stamp(number) << 32 | number
        counts = self._counts
        counts[number] = counts.get(number, 0) + 1
        self._at[offset] = number
        self.file.set_hold(number, self.seat, 1)
        return block

    @uninterrupted
    def drop(self, number: int) -> None:
        """Let go of a hold.  Called by the garbage collector: at any moment, in any thread."""
        self._dropped.append(number)
        self._settle()

    def _settle(self) -> None:
        # Whoever has the lock looks again when he has let go of it: so nothing is left lying, and
        # a collection that strikes while its own thread has the lock does not wait for itself.
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._take_dropped()
            finally:
                self._lock.release()

    def _take_dropped(self) -> None:
        dropped, counts = self._dropped, self._counts
        while dropped:
            number = dropped.popleft()
            left = counts[number] - 1
            if left:
                counts[number] = left
            else:
                del counts[number]
                self.file.set_hold(number, self.seat, 0)
                if number // ENTRIES in self._vacant:
                    self._punch_if_free(number)

    # -- giving memory back ------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether this process holds blocks, or its region has memory: `trim` may find some."""
        return bool(self._counts) or self._region.filled

    def trim(self, now: float | None = None) -> bool:
        """Give back memory of blocks that have been free for `IDLE` seconds before ``now``.

        Returns whether it would do to come again later.
        """
        with self._lock:
            self._unpin()
            self._take_dropped()
            self._clear_dead()
            self._punch_stale()
            self._region.collect_all()
            self._region.give_back((time.monotonic() if now is None else now) - IDLE)
            return self._region.filled or bool(self._pins or self._late or self._stale)

    def _clear_dead(self) -> bool:
        """As who made the file: clear the seats of those that have ended."""
        if self.seat:
            return False
        late = len(self._late)
        self._bury_late()
        return seats.clear_dead(self.file, self.file.fd) or len(self._late) < late

    def statistics(self) -> dict[str, int]:
        """Return counts: bytes used by the whole program, blocks that this process made, those of
        them that somebody holds, and those of anybody that this process holds."""
        with self._lock:
            self._unpin()
            self._take_dropped()
            self._clear_dead()
            self._region.collect_all()
            return {
                "bytes": self.file.used(),
                "blocks": self._region.blocks,
                "out": self._region.out,
                "held": len(self._counts),
            }

    # -- forks -------------------------------------------------------------------------------------
    #
    # A child that the program forks sees the same memory, but has no seat.  What its parent held at
    # that moment must not be given away while the child may look at it: it is held once more until
    # the child ends, or becomes another program, and with it the writing end of a pipe.

    def _pin(self, fd: int) -> None:
        held = list(self._counts)
        for number in held:
            self._counts[number] += 1
        self._pins.append((fd, held))

    def _unpin(self) -> None:
        for pin in list(self._pins):
            fd, held = pin
            if fd < 0:
                continue
            poller = select.poll()
            poller.register(fd, 0)  # a hang-up is always told
            if poller.poll(0):
                self._pins.remove(pin)
                os.close(fd)
                self._dropped.extend(held)


_forking: list[tuple[Arena, int, int]] = []


def _before_fork() -> None:
    for arena in Arena._known.values():
        # In vain only in a signal handler that has come into this thread's own turn.
        if not arena._lock.acquire(timeout=1.0):
            continue
        arena._unpin()
        arena._take_dropped()
        r = w = -1
        if arena._counts:
            try:
                r, w = os.pipe()
            except OSError:
                pass  # no descriptor is left: what is held now is held for good
        _forking.append((arena, r, w))


def _after_fork_in_parent() -> None:
    for arena, r, w in _forking:
        if w >= 0:
            os.close(w)
        if arena._counts:
            arena._pin(r)
        arena._lock.release()
    _forking.clear()


def _after_fork_in_child() -> None:
    for arena, r, _ in _forking:
        for fd in (r, *(fd for fd, _ in arena._pins)):
            if fd >= 0:
                os.close(fd)
    _forking.clear()
    for arena in Arena._known.values():
        arena._lock = threading.Lock()
        arena.drop = _not_ours  # type: ignore[method-assign]
    Arena._known = {}
    Arena._own = None
    Arena._making = threading.Lock()


def _not_ours(number: int) -> None:
    """In a forked child: the holds are its parent's."""


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
