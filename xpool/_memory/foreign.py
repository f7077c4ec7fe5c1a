"""Sends blocks to processes that were not started by the arena's maker.

A message with descriptors can name blocks of any arena: its sender attaches an in-flight lease for
each arena (`InFlightLeases`), a descriptor of the arena's file.  A receiver that does not have the
file yet opens it as a `ForeignArena`.  `xpool._memory.attachments` explains the locks of both.

The sender holds the blocks until the lease is closed everywhere: the receiver holds the blocks and
has closed it, or has died, or the message was lost with its queue.  If the sender dies first, the
lease keeps its attachment, and so its holds, alive.

`tidy` maintains all this.  It runs every few seconds in a thread, which `call` starts and which
ends when no block is in transit or held.  So memory goes back to the system also in processes that
send something and then compute for an hour.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable

from xpool._memory import attachments
from xpool._memory.arena import IDLE_SECONDS, Arena
from xpool._memory.buffers import address_of
from xpool._memory.holds import Block, Holds
from xpool._memory.layout import HOLDS, ArenaFile
from xpool._memory.system import is_fixed
from xpool._python import at_fork
from xpool._python.interrupt import shielded

passing = threading.RLock()
"""Held for moments while descriptors of messages are open, so that no fork copies them: a child's
copy would keep a lease open.  Re-entrant, for signal handlers that use a queue."""

_LOOKS = 4
"""In-flight leases that a sender checks when it issues one: more than it issues."""

_SHARE = 32
_SHARE_BYTES = 256 * 1024
"""The most blocks, and bytes in blocks, of one in-flight lease."""


# -- foreign arenas ---------------------------------------------------------------------------


class _Part(ArenaFile):
    """A mapping of parts of the file: the tables and the maker's region, and others on demand.

    The whole file takes tens of terabytes of addresses, for which there is little room.
    """

    def __init__(self, fd: int, region: int) -> None:
        super().__init__(fd, region)
        # By attachment: the region, and its address.
        self._others: dict[int, tuple[mmap.mmap, int]] = {}

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
            # Kept for good: blocks in it refer to the arena, which refers to this.
            self._others[attachment] = region, address_of(region)
        return (*self._others[attachment], offset - start)

    def address_at(self, offset: int) -> int:
        _, address, place = self.pages(offset)
        return address + place

    def offset_of(self, address: int) -> int | None:
        """Return which byte of these regions is at an address; None: none."""
        for attachment, (_, begin) in list(self._others.items()):
            if 0 <= address - begin < self.region:
                return self.start(attachment) + address - begin
        return super().offset_of(address)


class ForeignArena(Arena):
    """The arena of another process, in which blocks are held but not leased."""

    def __init__(self, file: ArenaFile, token: int, attachment: int) -> None:
        super().__init__(file, token, attachment, 0, [])
        self._was_used = True  # since the last `tidy`
        self._heritage = set(range(HOLDS))  # attachments to clear when the maker is dead

    @classmethod
    def enter(cls, fd: int, token: int) -> ForeignArena:
        """Take an attachment in the file of this descriptor, which came in a message.

        Raises:
            OSError: the system refuses descriptors or addresses.
            LookupError: too many processes have taken attachments.
            ValueError: it is not the file of an arena.
        """
        if not is_fixed(fd):
            raise ValueError("a message of xpool names a file that can be cut short by its sender")
        # A new description, for its own locks; the message's description is its sender's.
        own = attachments.reopen(fd)
        try:
            file = _Part(own, ArenaFile.region_of(own))
            for attachment in range(HOLDS - 1, attachments.FIRST_FOREIGN - 1, -1):
                if attachments.claim(file, own, attachment, foreign=True):
                    foreign = _foreign[token] = cls(file, token, attachment)
                    return foreign
            raise LookupError(
                f"a message of xpool lies in the memory of another process, and "
                f"{HOLDS - attachments.FIRST_FOREIGN} processes, the most that can, mapped it; "
                "let fewer processes receive its messages"
            )
        except BaseException:
            os.close(own)
            raise

    def lease(self, nbytes: int, limit: int | None = None) -> Block | None:
        """Return None: this process allocates nothing here."""
        return None

    @property
    def orphaned(self) -> bool:
        """Whether the process that made the file has ended."""
        return not attachments.alive(self.file.fd, 0)

    @shielded
    def tidy(self) -> bool:
        """Leave the arena if nothing was held since the last call; return False if so.

        Called under `passing`, which is needed to hold a block here.
        """
        self.trim()
        with self._turn:
            orphaned = self.orphaned
            if self._counts or self._pins or (self._was_used and not orphaned):
                self._was_used = bool(self._counts)
                if orphaned:
                    self._inherit()
                return True
            del Arena._known[self.token], _foreign[self.token]
            # Nothing is held, so nothing is in transit; there may be an empty lease.
            if self.token in _in_flight:
                _in_flight.pop(self.token).retire()
            attachments.leave(self.file, self.file.fd, self.attachment)
            os.close(self.file.fd)
            return False

    def _hold(self, number: int) -> Block:
        self._was_used = True
        return super()._hold(number)

    def _inherit(self) -> None:
        """Give back unheld memory in place of the dead maker of the file."""
        file, fd = self.file, self.file.fd
        # Attachments of workers are unlocked, since workers do not outlive the maker.
        for attachment in self._heritage - {self.attachment}:
            if attachments.claim(file, fd, attachment, foreign=True):
                attachments.leave(file, fd, attachment)
                self._heritage.remove(attachment)
        attachments.clear_dead(file, fd, self.attachment)
        for attachment in range(HOLDS):
            try:
                table = file.table(attachment)
            except ValueError:
                continue  # overwritten: the memory is freed with the file
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
    """The blocks of one arena that this process has sent, held until they have arrived.

    All methods except `reclaim` are called under `passing`.
    """

    def __init__(self, arena: Holds) -> None:
        self._arena = arena
        self._next = 1
        self._current: _InFlightLease | None = None
        self._out: deque[_InFlightLease] = deque()

    @shielded
    def descriptor(self) -> int:
        """Return the lease for the next message; consecutive small messages share one.

        Raises:
            OSError: no descriptor is left.
        """
        if self._current is None:
            fd = attachments.open_lease(self._arena.file.fd, self._arena.attachment, self._next)
            self._current = _InFlightLease(self._next, fd)
            self._next += 1
        return self._current.fd

    @shielded
    def sent(self, blocks: Iterable[Block]) -> None:
        """Keep the blocks of a message that was sent with `descriptor`."""
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
        """Use the present lease for no more messages, so that it can be reclaimed."""
        lease = self._current
        if lease is not None:
            self._current = None
            # Copies of it in messages or receivers keep the byte locked.
            os.close(lease.fd)
            if lease.blocks:
                self._out.append(lease)

    @shielded
    def reclaim(self, most: int | None = None) -> bool:
        """Release the blocks whose leases are closed, among the ``most`` oldest or all.

        Returns whether there were any.
        """
        fd, attachment = self._arena.file.fd, self._arena.attachment
        found = False
        for _ in range(len(self._out) if most is None else most):
            try:
                lease = self._out.popleft()
            except IndexError:
                break  # another thread reclaims, too
            if attachments.out(fd, attachment, lease.number):
                self._out.append(lease)
            else:
                # Its blocks are released with it.
                found = True
        return found

    @property
    def pending(self) -> bool:
        """Whether a message may not have arrived yet."""
        return bool(self._out) or self._current is not None


_in_flight: dict[int, InFlightLeases] = {}  # by token


def in_flight_leases_of(arena: Holds) -> InFlightLeases:
    """Return the in-flight leases of this process for an arena; called under `passing`."""
    found = _in_flight.get(arena.token)
    if found is None:
        found = _in_flight[arena.token] = InFlightLeases(arena)
    return found


@shielded
def reclaim_arrived() -> bool:
    """Release the blocks of all messages that have arrived; return whether any have not."""
    with passing:
        for one in _in_flight.values():
            one.retire()
            one.reclaim()
        return any(one.pending for one in _in_flight.values())


# -- tidying up --------------------------------------------------------------------------------


def tidy(now: float | None = None) -> bool:
    """Release and give back what is due; return whether a later call may give back more.

    ``now``: as of `Arena.trim`, which gives back blocks that are free for `IDLE_SECONDS`.
    """
    again = reclaim_arrived()
    with passing:
        for arena in list(Arena._known.values()):
            again |= arena.tidy() if isinstance(arena, ForeignArena) else arena.trim(now)
    return again


# Re-entrant: a signal handler that uses a queue may come into `call`.
_calling = threading.RLock()
_thread: threading.Thread | None = None  # guarded by _calling, as is the next
_called = False
_wake = threading.Event()


def call() -> None:
    """Have `tidy` run every few seconds, as long as it is needed."""
    global _thread, _called
    with _calling:
        _called = True
        if _thread is None:
            _thread = threading.Thread(target=_run, name="xpool-tidy", daemon=True)
            try:
                _thread.start()
            except RuntimeError:
                _thread = None  # no thread is left, or the interpreter ends: try at the next call


def _run() -> None:
    global _thread, _called
    try:
        while True:
            _wake.wait(IDLE_SECONDS)
            _wake.clear()
            # Before `tidy`: a call meanwhile makes it run once more.
            _called = False
            if not tidy():
                with _calling:
                    if not _called:
                        # Under the lock: a call after this check starts another thread.
                        _thread = None
                        return
    except BaseException:
        with _calling:
            _thread = None
        raise


# -- forks -------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    global _calling, _thread, _wake
    # A copy of the parent's lease that stays open here would keep the byte locked.
    for one in _in_flight.values():
        if one._current is not None:
            os.close(one._current.fd)
    # Their arenas are `_Inherited` by now, so these blocks release no hold of the parent.
    _in_flight.clear()
    for foreign in _foreign.values():
        # While this process may read blocks that its parent held, the attachment must be kept.
        if not foreign._counts:
            os.close(foreign.file.fd)
    _foreign.clear()
    _calling = threading.RLock()
    _thread = None
    _wake = threading.Event()
    # Taken before the fork by the thread that runs here.
    passing.release()


at_fork.at_fork(before=passing.acquire, in_parent=passing.release, in_child=_after_fork_in_child)
