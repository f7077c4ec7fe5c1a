"""Sends blocks to processes that the maker of the arena has not started.

A message with descriptors can name blocks of any arena.  For each arena its sender attaches an
in-flight lease (`InFlightLeases`), which is a descriptor of the arena's file.  A receiver that does
not have the file opens it as a `ForeignArena`.  `xpool._memory.layout` explains the locks.

The sender holds the blocks as long as a process or a message has the lease open.  The receiver
closes the lease when it holds the blocks itself, and the kernel closes it when the receiver dies or
the queue ends with the message in it.  If the sender dies first, the open lease protects the
sender's attachment, and so its holds.

`tidy` releases blocks that have arrived, and gives memory back.  It runs every few seconds in a
thread, which `call` starts and which ends when no block is in transit or held.  So a process that
sends an object and then computes for an hour gives its memory back, too.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable

from xpool._memory import layout
from xpool._memory.arena import IDLE_SECONDS, Arena
from xpool._memory.holds import Block, Holds
from xpool._memory.layout import HOLDS, ArenaFile
from xpool._memory.system import address_of, is_fixed
from xpool._python import at_fork, descriptors
from xpool._python.interrupt import shielded
from xpool._python.starting import PromptThread

passing = threading.RLock()
"""Held briefly while descriptors of messages are open, because a child of a fork would keep copies
of the leases open.  Reentrant, because signal handlers may use a queue."""

_LOOKS = 4
"""How many in-flight leases a sender checks after each message: more than it makes."""

_SHARE = 32
_SHARE_BYTES = 256 * 1024
"""The largest number of blocks, and of bytes in blocks, of one in-flight lease."""


# -- foreign arenas ---------------------------------------------------------------------------


class _Part(ArenaFile):
    """A mapping of the file's tables and the maker's region.  Other regions are mapped on demand.

    The whole file would take tens of terabytes of addresses, of which a process has few.
    """

    def __init__(self, fd: int, region: int) -> None:
        super().__init__(fd, region)
        self._others: dict[int, tuple[mmap.mmap, int]] = {}  # regions and addresses, by attachment

    def _extent(self) -> int:
        return self.start(1)

    def pages(self, offset: int) -> tuple[mmap.mmap, int, int]:
        if offset < len(self.map):
            return super().pages(offset)
        attachment = (offset - self.start(0)) // self.region
        start = self.start(attachment)
        if attachment not in self._others:
            region = mmap.mmap(self.fd, self.region, offset=start)
            region.madvise(mmap.MADV_DONTDUMP)
            # Never unmapped, because blocks in it may be in use.
            self._others[attachment] = region, address_of(region)
        return (*self._others[attachment], offset - start)

    def offset_of(self, address: int) -> int | None:
        """Return the offset in the file of the byte at an address, or None if it is not mapped."""
        for attachment, (_, begin) in list(self._others.items()):
            if 0 <= address - begin < self.region:
                return self.start(attachment) + address - begin
        return super().offset_of(address)


class ForeignArena(Arena):
    """The arena of another process.  This process holds blocks of it, but leases none."""

    def __init__(self, file: ArenaFile, token: int, attachment: int) -> None:
        super().__init__(file, token, attachment, 0, [])
        self._was_used = True  # whether blocks were held since the last `tidy`
        self._heritage = set(range(HOLDS))  # attachments to clear after the maker's death

    @classmethod
    def enter(cls, fd: int, token: int) -> ForeignArena:
        """Take an attachment in the file of this descriptor, which has arrived in a message.

        Raises:
            OSError: no descriptor is left, or the file cannot be mapped.
            LookupError: all attachments are taken.
            ValueError: the file is not that of an arena.
        """
        if not is_fixed(fd):
            raise ValueError("a message of xpool names a file that can be cut short by its sender")
        # This process needs its own description, because the message's one has the sender's locks.
        own = layout.reopen(fd)
        try:
            file = _Part(own, ArenaFile.region_of(own))
            for attachment in range(HOLDS - 1, layout.FIRST_FOREIGN - 1, -1):
                if not layout.claim(file, own, attachment, foreign=True):
                    continue
                foreign = _foreign[token] = cls(file, token, attachment)
                return foreign
            raise LookupError(
                "a message of xpool lies in memory that "
                f"{HOLDS - layout.FIRST_FOREIGN} processes have mapped already, which is the "
                "limit: let fewer processes receive messages of its sender"
            )
        except BaseException:
            os.close(own)
            raise

    def lease(self, nbytes: int, limit: int | None = None) -> Block | None:
        return None

    @shielded
    def tidy(self) -> bool:
        """Leave the arena if no block was held since the last call.  Return False if so.

        The caller holds `passing`, which a thread also needs to hold a block here.
        """
        self.trim()
        with self.turn:
            orphaned = not layout.alive(self.file.fd, 0)  # its maker has ended
            if self._counts or self._pins or (self._was_used and not orphaned):
                self._was_used = bool(self._counts)
                if orphaned:
                    self._inherit()
                return True
            del Arena._known[self.token], _foreign[self.token]
            # No block is held, so none is in transit, but a lease without blocks may be open.
            if self.token in _in_flight:
                _in_flight.pop(self.token).retire()
            layout.leave(self.file, self.file.fd, self.attachment)
            os.close(self.file.fd)
            return False

    def _hold(self, number: int) -> Block:
        self._was_used = True
        return super()._hold(number)

    def _inherit(self) -> None:
        """Give back unheld memory, because the maker of the file is dead."""
        file, fd = self.file, self.file.fd
        # Workers do not outlive the maker, so their attachments are unlocked.
        for attachment in self._heritage - {self.attachment}:
            if layout.claim(file, fd, attachment, foreign=True):
                layout.leave(file, fd, attachment)
                self._heritage.remove(attachment)
        layout.clear_dead(file, fd, self.attachment)
        for attachment in range(HOLDS):
            try:
                table = file.table(attachment)
            except ValueError:
                continue  # the table was overwritten, so the memory is freed with the file
            for entry in table:
                self._punch_if_free(entry.number)


_foreign: dict[int, ForeignArena] = {}  # by token


# -- in-flight leases -------------------------------------------------------------------------


class _InFlightLease:
    __slots__ = ("blocks", "fd", "nbytes", "number")

    def __init__(self, number: int, fd: int) -> None:
        self.number, self.fd = number, fd
        self.blocks: list[Block] = []
        self.nbytes = 0


class InFlightLeases:
    """The blocks of one arena that this process has sent.  They are held until they have arrived.

    Callers of all methods except `reclaim` hold `passing`.
    """

    def __init__(self, arena: Holds) -> None:
        self._arena = arena
        self._next = 1
        self._current: _InFlightLease | None = None
        self._out: deque[_InFlightLease] = deque()

    @shielded
    def descriptor(self) -> int:
        """Return the lease for the next message.  Consecutive small messages share a lease.

        Raises:
            OSError: no descriptor is left.
        """
        if self._current is None:
            # A forked child's copy would keep the byte locked.
            fd = layout.open_lease(self._arena.file.fd, self._arena.attachment, self._next)
            self._current = _InFlightLease(self._next, descriptors.owned(fd))
            self._next += 1
        return self._current.fd

    @shielded
    def sent(self, blocks: Iterable[Block]) -> None:
        """Hold the blocks of a message that was sent with `descriptor`, until it has arrived."""
        lease = self._current
        assert lease is not None
        for block in blocks:
            lease.blocks.append(block)
            lease.nbytes += block.capacity
        if len(lease.blocks) >= _SHARE or lease.nbytes >= _SHARE_BYTES:
            self.retire()
        self.reclaim(_LOOKS)

    @shielded
    def retire(self) -> None:
        """Send the present lease with no more messages, so that its blocks can be released."""
        lease = self._current
        if lease is not None:
            self._current = None
            # Copies in messages or receivers keep the byte locked.
            descriptors.close(lease.fd)
            if lease.blocks:
                self._out.append(lease)

    @shielded
    def reclaim(self, most: int | None = None) -> None:
        """Release the blocks of closed leases.  ``most`` leases are checked; None: all."""
        fd, attachment = self._arena.file.fd, self._arena.attachment
        for _ in range(len(self._out) if most is None else most):
            try:
                lease = self._out.popleft()
            except IndexError:
                break  # another thread reclaims, too
            if layout.out(fd, attachment, lease.number):
                self._out.append(lease)  # else dropping the lease releases its blocks

    @property
    def pending(self) -> bool:
        """Whether a message may not have arrived yet."""
        return bool(self._out) or self._current is not None


_in_flight: dict[int, InFlightLeases] = {}  # by token


def in_flight_leases_of(arena: Holds) -> InFlightLeases:
    """Return the in-flight leases of this process for an arena.  The caller holds `passing`."""
    found = _in_flight.get(arena.token)
    if found is None:
        found = _in_flight[arena.token] = InFlightLeases(arena)
    return found


@shielded
def reclaim_arrived() -> bool:
    """Release the blocks of all messages that have arrived.  Return whether others have not
    arrived.
    """
    with passing:
        for one in _in_flight.values():
            one.retire()
            one.reclaim()
        return any(one.pending for one in _in_flight.values())


# -- tidying up --------------------------------------------------------------------------------


def tidy(now: float | None = None) -> bool:
    """Release blocks that have arrived, and give back memory as `Arena.trim` with this ``now``.

    Returns whether a later call may give back more.
    """
    again = reclaim_arrived()
    with passing:
        for arena in list(Arena._known.values()):
            again |= arena.tidy() if isinstance(arena, ForeignArena) else arena.trim(now)
    return again


# Reentrant, because a signal handler that uses a queue may call `call`.
_calling = threading.RLock()
_thread: threading.Thread | None = None  # guarded by _calling
_called = False  # guarded by _calling
_wake = threading.Event()


def call() -> None:
    """Make a thread call `tidy` every few seconds, as long as necessary."""
    global _thread, _called
    with _calling:
        _called = True
        if _thread is None:
            _thread = PromptThread(target=_run, name="xpool-tidy", daemon=True)
            try:
                _thread.start()
            except RuntimeError:
                _thread = None  # no thread can be started; the next `call` tries again


def _run() -> None:
    global _thread, _called
    try:
        while True:
            _wake.wait(IDLE_SECONDS)
            _wake.clear()
            _called = False  # cleared before `tidy`: a `call` during it makes it run once more
            if not tidy():
                with _calling:
                    if not _called:
                        # Set under the lock, so that a later `call` starts another thread.
                        _thread = None
                        return
    except BaseException:
        with _calling:
            _thread = None
        raise


# -- forks -------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    for foreign in _foreign.values():
        # The open descriptor protects the attachment while this process may read blocks of it.
        if not foreign._counts:
            os.close(foreign.file.fd)
    _foreign.clear()


# Lambdas, because each child makes a new lock.
at_fork.at_fork(before=lambda: passing.acquire(), in_parent=lambda: passing.release())
at_fork.at_fork(in_child=_after_fork_in_child)
# The arenas are now `_Inherited`, so dropping the blocks in flight releases no hold of the parent.
at_fork.renew(globals(), passing=threading.RLock, _in_flight=dict)
at_fork.renew(globals(), _calling=threading.RLock, _thread=lambda: None, _wake=threading.Event)
