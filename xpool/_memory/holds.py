"""What one process does with the arena: it allocates blocks in its region, and holds blocks.

`Block` is a hold, and `Holds` counts them.  In a `Region`, only its process allocates.

A process holds a block while it has at least one `Block` object for it.  A byte in the tables of
the file tells this to the other processes.  Only this process knows the number of its holds.

One lock guards the counts.  The time in which a thread holds it is a turn.  Code that may interrupt
a turn never waits for the lock: a finalizer appends to a list (`drop`), which the thread empties
after its turn.  A signal handler that interrupts a turn of its own thread gets no new block, and
its holds are counted after the turn.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from xpool._memory.layout import ENTRIES, LARGE, PAGE, ArenaFile, Entry
from xpool._memory.system import array_type
from xpool._python.hidden import is_mine
from xpool._python.interrupt import shielded, uninterrupted

_YOUNG = 64
"""So many of the latest leases are checked first, because most values are short-lived."""

_LEAST, _MOST = 8, 64
"""How many blocks are checked before a new one is made: more if earlier checks found free ones."""

_WORTH = 16 * 1024
"""The first touch of so many bytes of new memory takes about as long as checking a block."""

_WARM = 16 * 1024 * 1024
"""So many bytes of free blocks, or two blocks if these are larger, keep their memory for reuse."""

_AT_ONCE = 512
"""The memory of so many blocks is given back in one turn, which takes about a millisecond."""


def _capacity(nbytes: int) -> int:
    """Return the smallest capacity for so many bytes."""
    # A step is an eighth of the next power of two, so there are four steps between two of these.
    step = max(256, 1 << nbytes.bit_length() >> 3)
    if nbytes >= LARGE:
        step = max(step, PAGE)
    return -(-nbytes // step) * step


class Region:
    """The allocator.  A block is free when no process holds it; it keeps its memory for a while.

    All callers hold the lock of the arena.
    """

    def __init__(self, file: ArenaFile, attachment: int, entries: list[Entry]) -> None:
        self._file = file
        self._first = attachment * ENTRIES
        self._top = file.start(attachment)
        self._end = self._top + file.region
        # The blocks, by index.  Other processes may hold blocks of an earlier owner of the region.
        self.entries = entries
        # Blocks that were held when last checked.  The young ones are in the order of their leases.
        self._young: list[int] = []
        self._old: deque[int] = deque()
        # Free blocks with memory, by capacity; those that are free for the longest time come first.
        self._warm: dict[int, deque[int]] = defaultdict(deque)
        self._bare: dict[int, list[int]] = defaultdict(list)  # free blocks without memory
        self._looks = _MOST
        self._spare = 0  # number of bytes in `_warm` that can be given back
        if self.entries:
            last = self.entries[-1]
            self._top = last.offset + last.capacity
            self._old.extend(range(len(self.entries)))
            self.collect_all()

    def entry(self, number: int) -> Entry | None:
        """Return the entry of a block, or None if it is in another region."""
        index = number - self._first
        return self.entries[index] if 0 <= index < len(self.entries) else None

    def take(self, nbytes: int, limit: int) -> int | None:
        """Return the number of a free block with memory for ``nbytes`` bytes, or None.

        All regions of the file together may use ``limit`` bytes.
        """
        capacity = _capacity(nbytes)
        index = self._find(capacity, nbytes)
        if index is None:
            return None
        if self.entries[index].filled < nbytes and not self._extend(index, nbytes, limit):
            self._put(index)
            index = self._find_in_need(capacity, nbytes, limit)
            if index is None:
                return None
        if self._spare > _WARM:
            self.give_back(float("-inf"))  # only what is above its limit
        self._young.append(index)
        if len(self._young) > _YOUNG:
            self._old.append(self._young.pop(0))
        return self._first + index

    def _find(self, capacity: int, nbytes: int) -> int | None:
        warm = self._warm[capacity]
        if not warm:
            most = max(self._looks, nbytes // _WORTH)
            self._look_at_young(most, capacity)
            if not warm and self._old:
                self._look_at_old(most, capacity)
            # If no block was free, as during a `map` that holds its results, check fewer next time.
            self._looks = min(2 * self._looks, _MOST) if warm else max(_LEAST, self._looks * 3 // 4)
        elif self._old:
            self._look_at_old(4)  # after some calls, all have been checked
        if warm:
            return self._pop(warm)
        bare = self._bare[capacity]
        return bare.pop() if bare else self._new(capacity)

    def _find_in_need(self, capacity: int, nbytes: int, limit: int) -> int | None:
        """Take a block that has enough memory, or give back the memory of other blocks for one."""
        self.collect_all()
        warm, bare = self._warm[capacity], self._bare[capacity]
        for _ in range(len(warm)):
            index = self._pop(warm)
            if self.entries[index].filled >= nbytes:
                return index
            self._put(index, warmest=False)
        while self.give_back(time.monotonic()):
            pass
        # One of the two is not empty, because `take` has put back a block of this size.
        index = bare.pop() if bare else self._pop(warm)
        if self._extend(index, nbytes, limit):
            return index
        self._put(index)
        return None

    def _extend(self, index: int, nbytes: int, limit: int) -> bool:
        file, entry = self._file, self.entries[index]
        return file.used() + nbytes - entry.filled <= limit and file.fill(entry, nbytes)

    def _new(self, capacity: int) -> int | None:
        index = len(self.entries)
        # A large block begins at a page, because only whole pages can be given back.
        offset = -(-self._top // PAGE) * PAGE if capacity >= LARGE else self._top
        if index == ENTRIES or offset + capacity > self._end:
            return None
        entry = Entry(self._first + index, offset, capacity)
        if not self._file.add(entry):
            return None
        self._top = offset + capacity
        self.entries.append(entry)
        return index

    # -- finding free blocks -----------------------------------------------------------------------

    def _look_at_old(self, most: int, wanted: int = 0) -> None:
        """Check the next ``most`` old blocks.  Stop at a free one of capacity ``wanted``."""
        old, claim, first = self._old, self._file.claim, self._first
        for _ in range(min(most, len(old))):
            index = old.popleft()
            if not claim(first + index):
                old.append(index)
            elif self._put(index) == wanted:
                return

    def _look_at_young(self, most: int = _YOUNG, wanted: int = 0) -> None:
        """Check ``most`` young blocks.  Stop at a free one of capacity ``wanted``."""
        young, claim, first = self._young, self._file.claim, self._first
        # Dropped values often have the youngest blocks, or the oldest if they are dropped in turn.
        for index in young[:-3:-1] + young[: max(0, min(most, len(young)) - 2)]:
            if claim(first + index):
                young.remove(index)
                if self._put(index) == wanted:
                    return

    def _put(self, index: int, warmest: bool = True) -> int:
        """Record a free block.  Return its capacity."""
        entry = self.entries[index]
        capacity, filled = entry.capacity, entry.filled
        entry.free_since = time.monotonic()
        if filled:
            warm = self._warm[capacity]
            warm.append(index) if warmest else warm.appendleft(index)
            if capacity >= LARGE:
                self._spare += filled
        else:
            self._bare[capacity].append(index)
        return capacity

    def _pop(self, warm: deque[int]) -> int:
        """Take the block that was freed last."""
        index = warm.pop()
        entry = self.entries[index]
        if entry.capacity >= LARGE:
            self._spare -= entry.filled
        return index

    def collect_all(self) -> None:
        """Check all blocks that were held.  Record those that are free now."""
        self._look_at_young()
        self._look_at_old(len(self._old))

    # -- giving memory back ------------------------------------------------------------------------

    def _punch(self, capacity: int, warm: deque[int]) -> None:
        index = warm.popleft()
        entry = self.entries[index]
        self._spare -= entry.filled
        self._file.punch(entry)
        self._bare[capacity].append(index)

    def give_back(self, before: float) -> bool:
        """Give back the memory of blocks that are free since ``before``, and memory above a limit.

        Returns True if it has stopped after `_AT_ONCE` blocks and must be called again.
        """
        largest = max((size for size, warm in self._warm.items() if warm), default=0)
        left, most = _AT_ONCE, max(_WARM, 2 * largest)
        for capacity, warm in self._warm.items():
            # Small blocks keep their memory, because they share pages with others.
            if capacity < LARGE:
                continue
            while warm and (self.entries[warm[0]].free_since <= before or self._spare > most):
                if not left:
                    return True
                left -= 1
                self._punch(capacity, warm)
        return False

    @property
    def filled(self) -> bool:
        """Whether blocks have memory that can be given back, now or when they are released."""
        return bool(self._spare or self._young or self._old)

    @property
    def out(self) -> int:
        """Number of blocks that were held when last checked."""
        return len(self._young) + len(self._old)


class Pins:
    """The pipes to forked children, and the blocks that are held for each.

    A forked child has the same memory, but no attachment.  The blocks that its parent held at the
    fork must not be reused while the child may read them.  So the parent holds them once more until
    the child ends or executes another program.  Both events close the child's end of a pipe.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}
        self._poller = select.poll()

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, fd: int, numbers: list[int]) -> None:
        """Add a child that has the other end of the pipe ``fd``, and the blocks held for it."""
        self._blocks[fd] = numbers
        self._poller.register(fd, 0)  # poll(2) always reports a hang-up

    def take_ended(self) -> list[int]:
        """Remove the children that have ended.  Return their blocks, once for each child."""
        found: list[int] = []
        for fd, _ in self._poller.poll(0) if self._blocks else ():
            self._poller.unregister(fd)
            os.close(fd)
            found += self._blocks.pop(fd)
        return found

    def close(self) -> None:
        """Close the parent's ends of the pipes, in a child."""
        for fd in self._blocks:
            os.close(fd)


class Block:
    """A hold of this process on a block, whose memory is not reused while this object exists.

    Each instance is also a ctypes array over the memory, so an array or a tensor that is made of
    `memoryview(block)` keeps the block alive.
    """

    __slots__ = ()

    capacity: int
    arena: Holds
    number: int
    stands_for: tuple[int, int]
    """If it represents a tensor on a device: the index of the worker, and the tensor's bytes."""

    former: Any
    """Memory that must exist as long as this object."""

    filled: bool
    """True if a sender has filled the block for one message and no longer uses it."""

    @property
    def name(self) -> int:
        """The block's name in messages: the stamp of this lease, and the number."""
        return self.arena.file.stamps[self.number] << 32 | self.number

    def view(self, nbytes: int) -> memoryview:
        return memoryview(self).cast("B")[:nbytes]  # type: ignore[arg-type]

    @uninterrupted
    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():
            return  # names of this module may be gone; the parent clears the holds
        try:
            arena = self.arena
        except AttributeError:
            return  # an exception interrupted `_block`, so the hold is kept until the process exits
        arena.drop(self.number)


block_types: dict[int, Any] = {}  # by capacity: there are four between two powers of two


def make_block_type(capacity: int) -> Any:
    made = block_types.get(capacity)
    if made is None:
        # `arena` keeps the mapping alive, because an object of `from_address` owns no memory.
        bases = Block, array_type(capacity)
        slots = "arena", "filled", "former", "number", "stands_for"
        space = {"__slots__": slots, "capacity": capacity}
        # Two threads may make the same type at once, and both types work.
        made = block_types[capacity] = type(f"Block{capacity}", bases, space)
    return made


class Holds:
    """The blocks of one file that this process holds.  Any thread may call all methods."""

    def __init__(self, file: ArenaFile, region: Region, token: int, attachment: int) -> None:
        self.file = file
        self.token = token
        self.attachment = attachment
        self._region = region
        self._mine = file.holds(attachment)
        # Guards the next four.  Reentrant: a signal handler or a finalizer may interrupt a turn of
        # its own thread.  It finds out by `is_mine`, and then does not change the counts.
        self.turn = threading.RLock()
        self._counts: dict[int, int] = {}  # number of holds on each block
        # The blocks that this process has held, by offset.  An entry keeps its place for ever.
        self._numbers: dict[int, int] = {}
        self._dropped: deque[int] = deque()  # dropped by finalizers, but still in `_counts`
        self._late: list[int] = []  # held by signal handlers, but not yet in `_counts`
        self._pins = Pins()
        # Blocks of received values, which no other process uses: their capacities, by number.
        self.received: dict[int, int] = {}
        # Of these, those that were held at a fork (see `_part`): offset and capacity.
        self._apart: dict[int, tuple[int, int]] = {}

    def _let_go(self, number: int) -> None:
        """Called, under the lock, when this process has dropped its last hold on a block."""

    # -- places ------------------------------------------------------------------------------------

    def _number_at(self, address: int) -> int | None:
        """Return the block that begins at an address, if this process has ever held it."""
        offset = self.file.offset_of(address)
        return None if offset is None else self._numbers.get(offset)

    # -- taking and dropping holds -----------------------------------------------------------------

    @shielded
    def adopt(self, name: int) -> Block:
        """Hold a block that this process or another one holds now.

        Raises:
            LookupError: the block was no longer held, and was leased again.
            ValueError: the block does not exist.
        """
        number = name & 0xFFFF_FFFF
        block = self._hold_again(number)
        stamp = self.file.stamps[number]  # must be read after the hold is set: see `claim`
        if name >> 32 != stamp:
            raise LookupError(
                f"block {number} of the arena is gone: its message was withdrawn "
                f"(lease {name >> 32}, now {stamp})"
            )
        return block

    def holds(self, address: int) -> bool:
        """Whether this process holds a block that begins at an address."""
        return self._number_at(address) in self._counts

    @shielded
    def holding(self, address: int) -> Block | None:
        """Return another hold on the block that begins at an address, or None if it is not held."""
        number = self._number_at(address)
        # The hold cannot end during this call, because the caller uses the memory.
        if number is None or number not in self._counts:
            return None
        return self._hold_again(number)

    def _hold_again(self, number: int) -> Block:
        """Hold a block that this process or another one holds."""
        if is_mine(self.turn):
            # The caller interrupts a turn, after which the hold is counted.
            place = self._place(number)
            self._numbers[place[0]] = number
            self._late.append(number)
            self._mine[number] = 1
            return self._block(number, *place)
        with self.turn:
            block = self._hold(number)
        self._catch_up()
        return block

    @shielded
    def alone(self, block: Block) -> bool:
        """Whether this is the only hold on the block in all processes."""
        self._catch_up()
        number = block.number
        return self._counts.get(number) == 1 and self.file.only(number, self.attachment)

    def _hold(self, number: int) -> Block:
        # Counted before the `Block` is made: if an exception drops the `Block`, `drop` uncounts it.
        place = self._place(number)
        counts = self._counts
        count = counts.get(number, 0)
        counts[number] = count + 1
        if not count:
            self._mine[number] = 1
            self._numbers[place[0]] = number
        return self._block(number, *place)

    def _place(self, number: int) -> tuple[int, int]:
        entry = self._region.entry(number)
        return self.file.place(number) if entry is None else (entry.offset, entry.capacity)

    def _block(self, number: int, offset: int, capacity: int) -> Block:
        kind = block_types.get(capacity) or make_block_type(capacity)
        made = kind.from_address(self.file.address_at(offset))
        made.number = number
        made.arena = self
        return made  # type: ignore[no-any-return]

    @shielded
    def drop(self, number: int) -> None:
        """Release a hold.  The garbage collector calls this, at any moment in any thread."""
        self._dropped.append(number)
        self._catch_up()

    def _catch_up(self) -> None:
        """Count the holds that finalizers and signal handlers have listed.  Called after each turn.

        This never waits: a thread that is in a turn meanwhile calls this at the end of that turn.
        """
        turn = self.turn
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
            # If a signal handler has held it again, the byte stays, and `late` is counted next.
            if number not in late:
                self.received.pop(number, None)
                if number in self._apart and not self._rejoin(number):
                    continue  # the block is never used again
                self._mine[number] = 0
                self._let_go(number)

    # -- forks: see `Pins` -------------------------------------------------------------------------

    def _part(self) -> None:
        """Before a fork, map received values so that it copies them, as all memory of this process:
        neither side sees what the other writes."""
        new = self.received.keys() - self._apart.keys()
        # Not by the tables, to which other processes can write.
        for offset, number in list(self._numbers.items()) if new else ():
            if number in new:
                place = offset, self.received[number]
                if self.file.remap(*place, shared=False):
                    self._apart[number] = place

    def _rejoin(self, number: int) -> bool:
        """Map a block of `_part` as other processes do.  Return False if this is not possible."""
        done = self.file.remap(*self._apart[number], shared=True)
        if done:
            del self._apart[number]
        return done

    @shielded
    def share(self, block: Block) -> None:
        """Let other processes see a received value, and the later writes of this process to it.

        Raises:
            MemoryError: the system refuses to map the memory again.
        """
        number = block.number
        with self.turn:
            if number in self._apart:
                offset, capacity = self._apart[number]
                view, at = block.view(capacity), 0
                while at < capacity:
                    at += os.pwrite(self.file.fd, view[at:], offset + at)
                if not self._rejoin(number):
                    raise MemoryError("a received tensor cannot be shared: no mapping is left")
            self.received.pop(number, None)
        self._catch_up()

    def _pin(self, fd: int) -> None:
        held = list(self._counts)
        for number in held:
            self._counts[number] += 1
        if fd >= 0:
            self._pins.add(fd, held)

    def _unpin(self) -> None:
        self._dropped.extend(self._pins.take_ended())
