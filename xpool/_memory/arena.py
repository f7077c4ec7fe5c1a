"""The arena: shared memory for large values, in transit and afterwards.

A program has one anonymous file.  The process that owns pools makes it.  Each worker gets its
descriptor once and maps the whole file.  The file is huge and sparse: only pages that were written
take memory.  Every process has an **attachment**: a region of the file in which only this process
allocates **blocks**.  Any process that maps the file can use any block in place.  The sender copies
a value into a block once, and the message contains the name of the block.

**Every byte of the tables has one writer**, so processes need no lock, and a dead process leaves no
lock behind.  The owner of a block may reuse it when no process holds it.  A sender holds a block
until it knows that the receiver holds it (a task was answered, or an answer was acknowledged).  So
a block in transit is always held.  When a process dies, the process that gave it an attachment
first receives the messages of the dead process.  Then it clears the holds of the dead process
(`reclaim`), and no other holds.

An entry of a table keeps its place and size for ever, so the next process with that attachment can
read the table.  If a worker has overwritten a table, no other process gets it.  A block's name
contains a stamp that changes when the block is reused.  So a late message raises an error and never
reads the value of another message.  Memory is requested before it is written.  So a shortage is no
SIGBUS but a refusal, and the value is sent through the pipe.  The size of the file is sealed,
because truncating the file would also cause a SIGBUS.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from threading import get_ident

from xpool._memory import layout
from xpool._memory.holds import Block, Holds, Region
from xpool._memory.layout import ENTRIES, HOLDS, PAGE, ArenaFile, Entry
from xpool._memory.system import available_memory, fixed_file
from xpool._python import at_fork
from xpool._python.hidden import is_mine
from xpool._python.interrupt import shielded

IDLE_SECONDS = 5.0
"""Seconds after which the memory of a free block is given back to the system."""

MISSING = 2**64 - 1
"""Takes the place of a block's name if there is no block."""

_AT_ONCE = 512  # number of blocks that are checked in one turn

_TURN_SECONDS = 1.0
"""So long a lease waits for the turns of other threads."""

_MOST = 128 << 30  # the largest region in bytes: addresses have 47 bits, and there are 480 regions


class Arena(Holds):
    """One process's view of the file.  Any thread may call all methods."""

    _own: Arena | None = None
    _making = threading.Lock()  # guards `_own`: two threads may make the first pools at once
    _known: dict[int, Arena] = {}  # by token

    def __init__(
        self, file: ArenaFile, token: int, attachment: int, limit: int, entries: list[Entry]
    ) -> None:
        super().__init__(file, Region(file, attachment, entries), token, attachment)
        self.limit = limit
        # Only the process that made the file uses these.
        self._attachments: list[int] = []  # attachments that new processes can get
        self._vacant: set[int] = set()  # attachments without a process: blocks can be punched
        self._left: set[int] = set()  # blocks that were held when their owner ended
        self._pending_reclaim: set[int] = set()  # of dead processes with messages in transit
        self._engines = 0
        Arena._known[token] = self

    # -- making and joining ------------------------------------------------------------------------

    @classmethod
    def own(cls) -> Arena | None:
        """Return the arena of this process's pools, or None if the system does not support it.

        The first call makes it.  Its limit is half of the memory that is available then.
        """
        if sys.platform != "linux" or sys.maxsize < 2**32:
            return None
        if cls._own is None:
            cls._make_own()
        return cls._own

    @classmethod
    @shielded
    def _make_own(cls) -> None:
        with cls._making:
            if cls._own is None:
                cls._own = cls._make(available_memory() // 2)

    @classmethod
    def _make(cls, limit: int, region: int = 0) -> Arena | None:
        # If another program's file is mapped, the addresses must be enough for both.
        most = _MOST // 8 if cls._known else _MOST
        region = region or min(max(2 * limit, 1 << 30), most) // PAGE * PAGE
        fd = -1
        try:
            fd = fixed_file("xpool-arena", ArenaFile.size_for(region))
            layout.attach(fd, 0)
            # The token is odd, because 0 means no arena in a message.
            token = int.from_bytes(os.urandom(8), "little") | 1
            file = ArenaFile(fd, region)
            arena = cls(file, token, 0, limit, file.table(0))
        except (OSError, ValueError, OverflowError):
            # Without support, or with too few addresses or descriptors, values go through pipes.
            if fd >= 0:
                os.close(fd)
            return None
        arena._attachments = list(range(HOLDS - 1, 0, -1))
        arena._vacant = set(range(HOLDS))
        return arena

    @classmethod
    def join(cls, fd: int, facts: tuple[int, int, int, int]) -> Arena:
        """Map the file of the process that has sent this descriptor and an attachment.

        Raises:
            OSError: the file cannot be mapped, usually because of a limit (``ulimit -v``).
        """
        token, attachment, region, limit = facts
        file = ArenaFile(fd, region)
        return cls(file, token, attachment, limit, file.table(attachment))

    def facts(self, attachment: int, limit: int) -> tuple[int, int, int, int]:
        """Return the second argument of `join`, for a process with this attachment."""
        return self.token, attachment, self.file.region, limit

    @classmethod
    def find(cls, token: int) -> Arena:
        """Return the arena with this token.

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
    def elsewhere(cls, address: int, arena: Arena | None) -> bool:
        """Whether an address is in another arena, in a block that other processes hold, too."""
        for other in list(cls._known.values()):
            offset = None if other is arena else other.file.offset_of(address)
            if offset is not None:
                number = other._numbers.get(offset)
                return number is None or not other.file.only(number, other.attachment)
        return False

    @classmethod
    def holding_any(cls, address: int) -> Block | None:
        """As `holding`, but in any arena."""
        held = (arena.holding(address) for arena in list(cls._known.values()))
        return next(filter(None, held), None)

    # -- in the process that made the file ---------------------------------------------------------

    @shielded
    def begin(self) -> None:
        """Record that a pool of this process uses the arena."""
        with self.turn:
            self._engines += 1
            self._vacant.discard(self.attachment)
        self._catch_up()

    @shielded
    def end(self) -> None:
        """Record the end of a pool.  After the last one, give back all free memory at once."""
        with self.turn:
            self._engines -= 1
            last = not self._engines
            if last:
                self._vacant.add(self.attachment)
        if last:
            self.trim(float("inf"))
        self._catch_up()

    @shielded
    def take_attachment(self) -> int | None:
        """Return an attachment for a new process, or None if all are taken."""
        with self.turn:
            found = None
            for attachment in reversed(self._attachments):
                if layout.claim(self.file, self.file.fd, attachment, foreign=False):
                    self.file.give(attachment)
                    self._attachments.remove(attachment)
                    self._vacant.discard(attachment)
                    found = attachment
                    break
        self._catch_up()
        return found

    @shielded
    def reclaim(self, attachment: int) -> None:
        """Clear the holds of a process that has ended, and make its attachment available again.

        The blocks that it has sent must have been adopted before.  The caller must hold no other
        lock, because this takes milliseconds, and more if the process had many blocks.
        """
        if layout.taken(self.file.fd, attachment):
            # The process has messages in queues, which still need its holds.
            with self.turn:
                self._pending_reclaim.add(attachment)
            return
        # Needs no lock, because the only writer of this column is dead.
        self.file.clear_holds(attachment)
        layout.leave(self.file, self.file.fd, attachment)
        try:
            table = self.file.table(attachment)
        except ValueError:
            return  # the table was overwritten, so its blocks are unknown, and no process gets it
        with self.turn:
            self._vacant.add(attachment)
            self._left.update(entry.number for entry in table if entry.filled)
        self._sweep()
        # Appended last: a new process may get it only after the blocks left were recorded.
        with self.turn:
            self._attachments.append(attachment)
        self._catch_up()

    def _sweep(self) -> None:
        """Give back the memory of unheld blocks whose owners have ended."""
        left = list(self._left)
        # Done in several turns, so that a thread that leases a block waits for at most one of them.
        for start in range(0, len(left), _AT_ONCE):
            with self.turn:
                for number in left[start : start + _AT_ONCE]:
                    if number // ENTRIES not in self._vacant:
                        self._left.discard(number)  # a new process owns the block
                    else:
                        self._punch_if_free(number)

    def _let_go(self, number: int) -> None:
        if number // ENTRIES in self._vacant:
            self._punch_if_free(number)

    def _punch_if_free(self, number: int) -> None:
        if not self.file.claim(number):
            return
        self._left.discard(number)
        entry = self._region.entry(number)
        if entry is None:
            try:
                entry = Entry(number, *self.file.place(number), self.file.filled[number])
            except ValueError:
                return  # the entry was overwritten, so the memory is freed with the file
        self.file.punch(entry)

    # -- leasing and holding -----------------------------------------------------------------------

    @shielded
    def lease(self, nbytes: int, limit: int | None = None) -> Block | None:
        """Return a block of ``nbytes`` bytes that only this process holds.

        Returns None if the system has no memory, if the program would use more than ``limit`` bytes
        of shared memory (None: the arena's own limit), or if another thread's turn does not end.
        """
        if is_mine(self.turn):
            return None  # this is a signal handler or finalizer that interrupts a turn
        # A turn takes microseconds, unless a finalizer in it waits for a lock of this caller.
        if not self.turn.acquire(timeout=_TURN_SECONDS):
            return None
        try:
            self._take_dropped()
            most = self.limit if limit is None else limit
            # Dead processes are cleared only if necessary: each needs a system call.
            number = self._region.take(nbytes, most)
            if number is None and self._clear_dead():
                number = self._region.take(nbytes, most)
            block = None if number is None else self._hold(number)
        finally:
            self.turn.release()
        self._catch_up()
        return block

    # -- giving memory back ------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether this process holds blocks or its region has memory that `trim` may give back."""
        return bool(self._counts) or self._region.filled

    @shielded
    def trim(self, now: float | None = None) -> bool:
        """Give back the memory of blocks that were free for `IDLE_SECONDS` before ``now``.

        ``now`` is as `time.monotonic`; None: now.  Returns whether a later call may give back more.
        """
        if is_mine(self.turn):
            return True  # as in `lease`
        before = (time.monotonic() if now is None else now) - IDLE_SECONDS
        more = True
        while self._pending_reclaim and not layout.taken(
            self.file.fd, attachment := next(iter(self._pending_reclaim))
        ):
            self._pending_reclaim.discard(attachment)
            self.reclaim(attachment)
        with self.turn:
            self._look_for_free()
        while more:
            with self.turn:
                more = self._region.give_back(before)
        self._sweep()
        self._catch_up()
        return self._region.filled or bool(self._pins or self._left or self._pending_reclaim)

    def _look_for_free(self) -> None:
        self._unpin()
        self._take_dropped()
        self._clear_dead()
        self._region.collect_all()

    def _clear_dead(self) -> bool:
        """In the process that made the file, clear the holds of foreign processes that ended."""
        return self.attachment == 0 and layout.clear_dead(self.file, self.file.fd, 0)

    @shielded
    def statistics(self) -> dict[str, int]:
        """Return four counts: the ``bytes`` that the program uses, the ``blocks`` that this process
        has made, how many of these are held (``out``), and how many blocks it holds (``held``)."""
        interrupts = is_mine(self.turn)
        with self.turn:
            if not interrupts:
                self._look_for_free()
            found = {
                "bytes": self.file.used(),
                "blocks": len(self._region.entries),
                "out": self._region.out,
                "held": len(self._counts),
            }
        self._catch_up()
        return found


class _Inherited(Arena):
    """The parent's arena in a forked child, which may read the blocks that the parent held.

    The holds and the region belong to the parent, so this object changes neither.
    """

    def lease(self, nbytes: int, limit: int | None = None) -> Block | None:
        return None

    def adopt(self, name: int) -> Block:
        raise LookupError(
            "a message of xpool came to the process from which this one was forked: open it in the "
            "process that the message came to"
        )

    def holds(self, address: int) -> bool:
        return False

    def holding(self, address: int) -> Block | None:
        return None

    def drop(self, number: int) -> None:
        return


_forking: dict[int, list[tuple[Arena, int, int]]] = {}  # by thread


def _before_fork() -> None:
    turns = _forking[get_ident()] = []
    for arena in list(Arena._known.values()):
        if is_mine(arena.turn):
            continue  # this is a signal handler that interrupts a turn
        # Held during the fork, so that the child copies consistent counts.
        arena.turn.acquire()
        arena._unpin()
        arena._take_dropped()
        arena._part()
        r = w = -1
        if arena._counts:
            try:
                r, w = os.pipe()
            except OSError:
                pass  # no descriptor is left, so the blocks are held for ever
        turns.append((arena, r, w))


def _after_fork_in_parent() -> None:
    for arena, r, w in _forking.pop(get_ident(), ()):
        # Now only the child has this end, so `Pins` sees a hang-up when the child closes it.
        if w >= 0:
            os.close(w)
        if arena._counts:
            arena._pin(r)
        arena.turn.release()
        arena._catch_up()


def _after_fork_in_child() -> None:
    # The child keeps ``w``, which closes when the child ends or executes another program.
    for _, r, _ in _forking.get(get_ident(), ()):
        if r >= 0:
            os.close(r)
    _forking.clear()
    for arena in Arena._known.values():
        arena._pins.close()
        # A new lock, because no thread of the child would release the copy of the held one.
        arena.turn = threading.RLock()
        arena.__class__ = _Inherited
    Arena._known = {}
    Arena._own = None
    Arena._making = threading.Lock()


at_fork.at_fork(before=_before_fork, in_parent=_after_fork_in_parent, in_child=_after_fork_in_child)
