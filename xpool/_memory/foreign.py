"""Blocks that travel to processes which the arena's maker did not start.

A message that carries descriptors can name blocks of any arena: its sender attaches an in-flight
lease for each (`InFlightLeases`), a descriptor of that arena's file, and the receiver, where it
does not have the file yet, opens it as a `ForeignArena`.  What the kernel does for both is in
`xpool._memory.attachments`.

The sender's hold on the blocks stays until it finds that the lease is closed everywhere: the
receiver has taken hold and closed it, or it died, or the message went down with its queue.  If the
sender dies first, the lease keeps its attachment, and so its holds, alive.

`tidy` looks after all this.  It runs in a thread of its own, `call` starts it, which is there as
long as something is on its way or at hand, and comes round every few seconds: so memory goes back
to the system also in processes that send something and then compute for an hour.
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
from xpool._memory.layout import HOLDS, File
from xpool._memory.region import Region
from xpool._memory.system import is_fixed
from xpool._python import at_fork
from xpool._python.interrupt import shielded

__all__ = ["ForeignArena", "InFlightLeases", "call", "passing", "in_flight_leases_of", "tidy"]

passing = threading.RLock()
"""Held while descriptors of messages are open, for moments only, so that no fork copies them: a
child's copy would keep a lease open.  Re-entrant, for signal handlers that use a queue."""

_LOOKS = 4
"""In-flight leases that a sender looks at when it issues one: more than it issues."""

_SHARE = 32
_SHARE_BYTES = 256 * 1024
"""Messages, and bytes in blocks, that go under one in-flight lease."""


# -- foreign arenas ---------------------------------------------------------------------------


class _Part(File):
    """As much of the file as is needed: the tables and the maker's region, others when asked.

    The whole would be tens of terabytes of addresses, of which there is room for few.
    """

    def __init__(self, fd: int, region: int) -> None:
        super().__init__(fd, region)
        self._others: dict[
            int, tuple[mmap.mmap, int]
        ] = {}  # by attachment: the region, its address

    def _extent(self) -> int:
        return self.start(1)

    def address_at(self, offset: int) -> int:
        """Return where a byte of another region than the first lies."""
        attachment = (offset - self.start(0)) // self.region
        if attachment not in self._others:
            region = mmap.mmap(self.fd, self.region, offset=self.start(attachment))
            region.madvise(mmap.MADV_DONTDUMP)
            # Kept for good: blocks that lie there keep the arena, and it keeps this.
            self._others[attachment] = region, address_of(region)
        return self._others[attachment][1] + offset - self.start(attachment)

    def offset_of(self, address: int) -> int | None:
        """Return which byte of these regions lies at an address; None: none of them does."""
        for attachment, (_, begin) in list(self._others.items()):
            if 0 <= address - begin < self.region:
                return self.start(attachment) + address - begin
        return None


class _NoRegion(Region):
    """Where nothing is allocated."""

    blocks = out = 0
    filled = False

    def __init__(self, file: File, attachment: int) -> None:
        return

    def place(self, number: int) -> None:
        return

    def collect_all(self) -> None:
        return

    def give_back(self, before: float) -> bool:
        return False


class ForeignArena(Arena):
    """The arena of another process, to hold blocks in.  It gives none."""

    _mapping: type[File] = _Part
    _allotting: type[Region] = _NoRegion
    file: _Part

    def __init__(self, fd: int, token: int, attachment: int, region: int, limit: int) -> None:
        super().__init__(fd, token, attachment, region, limit)
        self._was_used = True  # since the last `tidy`
        self._heritage = set(range(HOLDS))  # to be cleared when the maker is dead

    @classmethod
    def enter(cls, fd: int, token: int) -> ForeignArena:
        """Take an attachment in the file that this descriptor (of a message) is open for.

        Raises:
            OSError: the system refuses descriptors or addresses.
            LookupError: too many processes have taken attachments.
            ValueError: it is not the file of an arena.
        """
        if not is_fixed(fd):
            raise ValueError("a message of xpool names a file that can be cut short by its sender")
        region = File.region_of(fd)
        # A description of its own, for locks of its own; that of the message is its sender's.
        own = attachments.reopen(fd)
        try:
            # A number for the time being: which one is free can be seen when the file is mapped.
            foreign = cls(own, token, HOLDS - 1, region, 0)
            try:
                for attachment in range(HOLDS - 1, attachments.FIRST_FOREIGN - 1, -1):
                    if attachments.claim(foreign.file, own, attachment, foreign=True):
                        foreign.attachment = attachment
                        foreign._mine = foreign.file.holds(attachment)
                        _foreign[token] = foreign
                        return foreign
                raise LookupError(
                    f"a message of xpool lies in the memory of another process, which "
                    f"{HOLDS - attachments.FIRST_FOREIGN} processes use already; more are not "
                    "possible"
                )
            except BaseException:
                # Where `Arena` has entered it.
                del cls._known[token]
                raise
        except BaseException:
            os.close(own)
            raise

    def lease(self, nbytes: int, limit: int | None = None) -> Block | None:
        """Return None: nothing is allocated here."""
        return None

    @property
    def orphaned(self) -> bool:
        """Whether the process that made the file has ended."""
        return not attachments.alive(self.file.fd, 0)

    @shielded
    def tidy(self) -> bool:
        """Leave when nothing is held since the last time; return whether one has stayed.

        Under `passing`, without which nobody takes hold of something here.
        """
        self.trim()
        with self._lock:
            orphaned = self.orphaned
            if self._counts or self._pins or (self._was_used and not orphaned):
                self._was_used = bool(self._counts)
                if orphaned:
                    self._inherit()
                return True
            del Arena._known[self.token], _foreign[self.token]
            # Nothing is held, so nothing is on its way: at most, an empty lease is at hand.
            if self.token in _in_flight:
                _in_flight.pop(self.token).retire()
            attachments.leave(self.file, self.file.fd, self.attachment)
            os.close(self.file.fd)
            return False

    def _hold(self, number: int) -> Block:
        self._was_used = True
        return super()._hold(number)

    def _offset_of(self, address: int) -> int | None:
        offset = super()._offset_of(address)
        return self.file.offset_of(address) if offset is None else offset

    def _address_at(self, offset: int) -> int:
        if offset < len(self.file.map):
            return super()._address_at(offset)
        return self.file.address_at(offset)

    def _inherit(self) -> None:
        """Give back what nobody holds, in the place of the one who made the file."""
        file, fd = self.file, self.file.fd
        # Workers' attachments are their parent's, whom they do not outlive.
        for attachment in self._heritage - {self.attachment}:
            if attachments.claim(file, fd, attachment, foreign=True):
                attachments.leave(file, fd, attachment)
                self._heritage.remove(attachment)
        attachments.clear_dead(file, fd, self.attachment)
        for attachment in range(HOLDS):
            try:
                table = file.table(attachment)
            except ValueError:
                continue  # written over: the memory goes with the file
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
    """What this process has sent of one arena, and holds until it has arrived.

    All but `reclaim` under `passing`.
    """

    def __init__(self, arena: Holds) -> None:
        self._arena = arena
        self._next = 1
        self._current: _InFlightLease | None = None
        self._out: deque[_InFlightLease] = deque()

    @shielded
    def descriptor(self) -> int:
        """Return the lease for the next message: small ones that follow each other share one.

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
        """Keep the blocks of a message that has gone with `descriptor`."""
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
        """Let nothing more go under the in-flight lease at hand, so that it can come back."""
        lease = self._current
        if lease is not None:
            self._current = None
            # Copies of it on their way, or with a receiver, keep the byte locked.
            os.close(lease.fd)
            if lease.blocks:
                self._out.append(lease)

    @shielded
    def reclaim(self, most: int | None = None) -> bool:
        """Let go of the blocks whose leases have come back, of the ``most`` oldest or of all.

        Returns whether any had.
        """
        fd, attachment = self._arena.file.fd, self._arena.attachment
        found = False
        for _ in range(len(self._out) if most is None else most):
            try:
                lease = self._out.popleft()
            except IndexError:
                break  # another thread sweeps too
            if attachments.out(fd, attachment, lease.number):
                self._out.append(lease)
            else:
                # Its blocks go with it.
                found = True
        return found

    @property
    def pending(self) -> bool:
        """Whether something has not arrived yet, as far as is known."""
        return bool(self._out) or self._current is not None


_in_flight: dict[int, InFlightLeases] = {}  # by token


def in_flight_leases_of(arena: Holds) -> InFlightLeases:
    """Return the in-flight leases of this process for an arena; under `passing`."""
    found = _in_flight.get(arena.token)
    if found is None:
        found = _in_flight[arena.token] = InFlightLeases(arena)
    return found


@shielded
def reclaim_arrived() -> bool:
    """Let go of all that has arrived; return whether something is still on its way."""
    with passing:
        for one in _in_flight.values():
            one.retire()
            one.reclaim()
        return any(one.pending for one in _in_flight.values())


# -- tidying up --------------------------------------------------------------------------------


def tidy(now: float | None = None) -> bool:
    """Do what is due; return whether it would do to come again later.

    ``now`` is as of `Arena.trim`: what has been free for `IDLE_SECONDS` seconds then goes back.
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
    """Have `tidy` run now and then, as long as there is something to do."""
    global _thread, _called
    with _calling:
        _called = True
        if _thread is None:
            _thread = threading.Thread(target=_run, name="xpool-tidy", daemon=True)
            try:
                _thread.start()
            except RuntimeError:
                _thread = None  # no more threads, or the interpreter ends: the next call may do


def _run() -> None:
    global _thread, _called
    try:
        while True:
            _wake.wait(IDLE_SECONDS)
            _wake.clear()
            # Before the look: who calls during it has it done once more.
            _called = False
            if not tidy():
                with _calling:
                    if not _called:
                        # Under the same lock: who calls after this look starts another thread.
                        _thread = None
                        return
    except BaseException:
        with _calling:
            _thread = None
        raise


# -- forks -------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    global _calling, _thread, _wake
    # The parent's: a copy that stays open here would keep the byte locked.
    for one in _in_flight.values():
        if one._current is not None:
            os.close(one._current.fd)
    # Their arenas are `_Inherited` by now: these blocks let go of nothing of the parent's.
    _in_flight.clear()
    for foreign in _foreign.values():
        # As long as we may look at what our parent held, its attachment must be kept.
        if not foreign._counts:
            os.close(foreign.file.fd)
    _foreign.clear()
    _calling = threading.RLock()
    _thread = None
    _wake = threading.Event()
    # Taken before the fork, by the thread that has become this process's.
    passing.release()


at_fork.at_fork(before=passing.acquire, in_parent=passing.release, in_child=_after_fork_in_child)
