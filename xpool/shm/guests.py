"""Blocks that travel to processes which the arena's maker did not start: guests and tickets.

A message that carries descriptors can name blocks of any arena: its sender attaches a **ticket**
for each (`Tickets`), which is a descriptor of that arena's file, and the receiver, where it does
not have the file yet, becomes a **guest** of it (`Guest`).  What the kernel does for both is in
`xpool.shm.seats`.

The sender's hold on the blocks stays until it finds that the ticket is closed everywhere: the
receiver has taken hold and closed it, or it died, or the message went down with its queue.  If the
sender dies first, the ticket keeps its seat, and so its holds, alive.

`tidy` looks after all this.  It runs in a thread of its own, `call` starts it, which is there as
long as something is on its way or at hand, and comes round every few seconds: so memory goes back
to the system also in processes that send something and then compute for an hour.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable

from xpool import forks
from xpool.interrupt import shielded
from xpool.shm import seats
from xpool.shm.arena import IDLE, Arena, Block
from xpool.shm.layout import ENTRIES, HOLDS, File
from xpool.shm.region import Region

__all__ = ["Guest", "Tickets", "call", "passing", "tickets_of", "tidy"]

passing = threading.RLock()
"""Held while descriptors of messages are open, for moments only, so that no fork copies them: a
child's copy would keep a ticket open.  Re-entrant, for signal handlers that use a queue."""

_LOOKS = 4
"""Tickets that a sender looks at when it issues one: more than it issues."""

_SHARE = 32
_SHARE_BYTES = 256 * 1024
"""Messages, and bytes in blocks, that go under one ticket."""


# -- guests ------------------------------------------------------------------------------------


class _Part(File):
    """As much of the file as a guest needs: the tables and the maker's region, others when asked.

    The whole would be tens of terabytes of addresses, of which there is room for few.
    """

    def __init__(self, fd: int, region: int) -> None:
        super().__init__(fd, region)
        self._others: dict[int, tuple[mmap.mmap, int]] = {}  # by seat: the region, its address

    def _extent(self) -> int:
        return self.start(1)

    def address_at(self, offset: int) -> int:
        """Return where a byte of another region than the first lies."""
        seat = (offset - self.start(0)) // self.region
        if seat not in self._others:
            region = mmap.mmap(self.fd, self.region, offset=self.start(seat))
            region.madvise(mmap.MADV_DONTDUMP)
            address = ctypes.addressof(ctypes.c_char.from_buffer(region))
            self._others[seat] = region, address
        return self._others[seat][1] + offset - self.start(seat)

    def offset_of(self, address: int) -> int | None:
        """Return which byte of these regions lies at an address; None: none of them does."""
        for seat, (_, begin) in list(self._others.items()):
            if 0 <= address - begin < self.region:
                return self.start(seat) + address - begin
        return None


class _NoRegion(Region):
    """Where nothing is allocated."""

    blocks = out = 0
    filled = False

    def __init__(self, file: File, seat: int) -> None:
        return

    def collect_all(self) -> None:
        return

    def give_back(self, before: float) -> bool:
        return False


class Guest(Arena):
    """The arena of another process, to hold blocks in.  It gives none."""

    _mapping: type[File] = _Part
    _allotting: type[Region] = _NoRegion
    file: _Part
    is_guest = True

    def __init__(self, fd: int, token: int, seat: int, region: int, limit: int) -> None:
        super().__init__(fd, token, seat, region, limit)
        self._was_used = True  # since the last `tidy`
        self._heritage = set(range(HOLDS))  # to be cleared when the maker is dead

    @classmethod
    def enter(cls, fd: int, token: int) -> Guest:
        """Take a seat in the file that this descriptor (of a message) is open for.

        Raises:
            OSError: the system refuses descriptors or addresses.
            LookupError: too many processes have taken seats.
        """
        region = File.region_of(fd)
        own = seats.reopen(fd)
        try:
            guest = cls(own, token, HOLDS - 1, region, 0)
            try:
                for seat in range(HOLDS - 1, seats.FIRST_GUEST - 1, -1):
                    if seats.claim(guest.file, own, seat, guest=True):
                        guest.seat = seat
                        guest._mine = guest.file.holds(seat)
                        _guests[token] = guest
                        return guest
                raise LookupError(
                    f"a message of xpool lies in the memory of another process, which "
                    f"{HOLDS - seats.FIRST_GUEST} processes use already; more are not possible"
                )
            except BaseException:
                del cls._known[token]
                raise
        except BaseException:
            os.close(own)
            raise

    def lease(self, nbytes: int, limit: int | None = None) -> Block | None:
        """Return None: a guest has no region."""
        return None

    @property
    def orphaned(self) -> bool:
        """Whether the process that made the file has ended."""
        return not seats.alive(self.file.fd, 0)

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
            del Arena._known[self.token], _guests[self.token]
            if self.token in _tickets:
                _tickets.pop(self.token).retire()
            seats.leave(self.file, self.file.fd, self.seat)
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
        # Workers' seats are their parent's, whom they do not outlive.
        for seat in self._heritage - {self.seat}:
            if seats.claim(file, fd, seat, guest=True):
                seats.leave(file, fd, seat)
                self._heritage.remove(seat)
        seats.clear_dead(file, fd, self.seat)
        for seat in range(HOLDS):
            for number in range(seat * ENTRIES, seat * ENTRIES + file.entries(seat)):
                self._punch_if_free(number)


_guests: dict[int, Guest] = {}  # by token


# -- tickets -----------------------------------------------------------------------------------


class _Ticket:
    __slots__ = ("blocks", "fd", "nbytes", "number")

    def __init__(self, number: int, fd: int) -> None:
        self.number, self.fd = number, fd
        self.blocks: list[Block] = []
        self.nbytes = 0


class Tickets:
    """What this process has sent of one arena, and holds until it has arrived.

    All but `sweep` under `passing`.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._next = 1
        self._current: _Ticket | None = None
        self._out: deque[_Ticket] = deque()

    @shielded
    def descriptor(self) -> int:
        """Return the ticket for the next message: small ones that follow each other share one.

        Raises:
            OSError: no descriptor is left.
        """
        if self._current is None:
            fd = seats.issue(self._arena.file.fd, self._arena.seat, self._next)
            self._current = _Ticket(self._next, fd)
            self._next += 1
        return self._current.fd

    @shielded
    def sent(self, blocks: Iterable[Block]) -> None:
        """Keep the blocks of a message that has gone with `descriptor`."""
        ticket = self._current
        assert ticket is not None
        for block in blocks:
            ticket.blocks.append(block)
            ticket.nbytes += block.capacity
        if len(ticket.blocks) >= _SHARE or ticket.nbytes >= _SHARE_BYTES:
            self.retire()
        self.sweep(_LOOKS)

    @shielded
    def retire(self) -> None:
        """Let nothing more go under the ticket at hand, so that it can come back."""
        ticket = self._current
        if ticket is not None:
            self._current = None
            os.close(ticket.fd)
            if ticket.blocks:
                self._out.append(ticket)

    @shielded
    def sweep(self, most: int | None = None) -> bool:
        """Let go of the blocks whose tickets have come back, of the ``most`` oldest or of all.

        Returns whether any had.
        """
        fd, seat = self._arena.file.fd, self._arena.seat
        found = False
        for _ in range(len(self._out) if most is None else most):
            try:
                ticket = self._out.popleft()
            except IndexError:
                break  # another thread sweeps too
            if seats.out(fd, seat, ticket.number):
                self._out.append(ticket)
            else:
                found = True
        return found

    @property
    def pending(self) -> bool:
        """Whether something has not arrived yet, as far as is known."""
        return bool(self._out) or self._current is not None


_tickets: dict[int, Tickets] = {}  # by token


def tickets_of(arena: Arena) -> Tickets:
    """Return the tickets of this process for an arena; under `passing`."""
    found = _tickets.get(arena.token)
    if found is None:
        found = _tickets[arena.token] = Tickets(arena)
    return found


@shielded
def settle() -> bool:
    """Let go of all that has arrived; return whether something is still on its way."""
    with passing:
        for one in _tickets.values():
            one.retire()
            one.sweep()
        return any(one.pending for one in _tickets.values())


# -- tidying up --------------------------------------------------------------------------------


def tidy(now: float | None = None) -> bool:
    """Do what is due; return whether it would do to come again later.

    ``now`` is as of `Arena.trim`: what has been free for `IDLE` seconds then goes back.
    """
    again = settle()
    with passing:
        for arena in list(Arena._known.values()):
            again |= arena.tidy() if isinstance(arena, Guest) else arena.trim(now)
    return again


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
            _wake.wait(IDLE)
            _wake.clear()
            _called = False
            if not tidy():
                with _calling:
                    if not _called:
                        return
    finally:
        with _calling:
            _thread = None


# -- forks -------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    global _calling, _thread, _wake
    for one in _tickets.values():
        if one._current is not None:
            os.close(one._current.fd)
    _tickets.clear()
    for guest in _guests.values():
        # As long as we may look at what our parent held, its seat must be kept.
        if not guest._counts:
            os.close(guest.file.fd)
    _guests.clear()
    _calling = threading.RLock()
    _thread = None
    _wake = threading.Event()
    passing.release()


forks.at_fork(before=passing.acquire, in_parent=passing.release, in_child=_after_fork_in_child)
