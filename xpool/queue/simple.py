"""`SimpleQueue`: between any processes of the program, many readers and many writers.

The channel is a pair of sockets of packets: the kernel makes each send and each receive whole, so
readers and writers share no lock, and one that is killed at any instruction takes with it at most
the message that it had in hand.  What is large lies in the arena of the process that put it, and
messages say where (docs/queue.md).

A packet is a message of `xpool._pickling.frame`, or, where that is too long for a packet::

    b"\x02"  7 spare bytes  u64 size

and the message lies in a file of its own.  Descriptors that go along: that file's, and one for
each arena that the message names.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.context import BaseContext, assert_spawning
from queue import Empty
from types import TracebackType
from typing import Any

from xpool._memory import foreign
from xpool._memory.arena import Arena
from xpool._memory.holds import Block, Holds
from xpool._pickling import frame
from xpool._pickling.frame import Leased
from xpool._pickling.policy import BY_PIPE, Layout
from xpool._python.interrupt import shielded
from xpool._python.waiters import deadline_of
from xpool._wire import packets
from xpool.errors import OptionError
from xpool.pickle import decode, encode

__all__ = ["SimpleQueue"]

# The first byte of a packet: neither a plain pickle's nor `frame.FRAMED`.
_IN_FILE = 2
_FILE_HEAD = struct.Struct("<BxxxxxxxQ")
# For the file, and for an in-flight lease of each arena; the kernel passes 253 (SCM_MAX_FD).
_MOST_FDS = 64

_FOR_A_MESSAGE = 3
"""Descriptors that a process needs for a moment to take out a message: its
in-flight lease, and two to open its arena."""

_SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL if sys.platform == "linux" else 0

_PAUSE = 0.01
"""Seconds between looks where the kernel offers nothing to wait for."""


class SimpleQueue:
    """A queue for all processes and threads of a program, in order, as
    `multiprocessing.SimpleQueue`.

    Hand it to processes when they are started: as an argument of `multiprocessing.Process` (any
    start method), in ``initargs`` of a pool, or by a fork.  Many may put and many may get; when one
    of them dies, the others go on, and no message is lost but one that it had taken out.

    Args:
        ctx: a context of `multiprocessing` or the name of a start method; taken for likeness with
            `multiprocessing.SimpleQueue`, the queue is the same for all.
        copy_tensor: False: storages of CPU tensors move to shared memory, and all who have
            sent or got them see each other's writes.  True: a receiver's tensors are its own.

    Raises:
        OptionError (a `ValueError`): no such context, or the system is not Linux.
        OSError: no descriptor is left; a queue has two in each process.
    """

    def __init__(self, *, ctx: BaseContext | str | None = None, copy_tensor: bool = False) -> None:
        _check_context(ctx)
        if sys.platform != "linux":
            raise OptionError(
                "xpool.queue.SimpleQueue needs Linux (packets that carry descriptors, anonymous "
                "files); use multiprocessing.SimpleQueue"
            )
        reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        packets.give_room(writer)
        self._open(reader, writer, copy_tensor)

    def _open(self, reader: socket.socket, writer: socket.socket, copy_tensor: bool) -> None:
        self._reader, self._writer = reader, writer
        self._copy_tensor = bool(copy_tensor)
        self._arena: Arena | None = None  # which `_layout` is for
        self._layout: Layout | None = None
        self._leave_arena: Callable[[], object] | None = None

    # -- putting and getting -----------------------------------------------------------------------

    def put(self, obj: Any) -> None:
        """Put an object; waits while the queue is full.

        It is full when 1 MiB of packets is on its way (less, where the system's
        ``net.core.wmem_max`` is less), or when what lies in memory for messages on their way has
        reached the arena's limit (half of what was available).

        Raises:
            TaskNotPicklable: it cannot be pickled or shared; the message says why.
            OptionError: its tensors should be shared, and this process cannot share memory.
            OSError: no descriptor is left; nothing was put.
            ValueError: the queue is closed in this process.
        """
        self._check_open()
        message = encode(obj, layout=self._current_layout())
        held = message.by_arena() if type(message) is Leased else {}
        if len(message) > packets.LONGEST:
            with packets.file_with(message) as file:
                self._put(_FILE_HEAD.pack(_IN_FILE, len(message)), file, held)
        else:
            self._put(message, -1, held)
        if held:
            # Its thread lets go of the blocks when they have arrived, also if nothing more is put.
            foreign.call()

    def _put(self, packet: bytes | memoryview, file: int, held: dict[Holds, list[Block]]) -> None:
        while not self._try_put(packet, file, held):
            foreign.reclaim_arrived()  # what arrives now is let go even if we wait here for long
            self._wait(self._writer, select.POLLOUT, None)
            self._check_open()

    def get(self, timeout: float | None = None) -> Any:
        """Take the next object out; waits up to ``timeout`` seconds for one, None: for ever.

        Every process that has the queue can put, this one too, so the queue never ends: when
        nobody is left who would put, only the timeout ends the wait.  `close` in another thread
        ends it within a second.

        Raises:
            queue.Empty: nothing came in time.
            ValueError: the queue is closed in this process, or ``timeout`` is negative.
            OSError: no descriptor is left; the message stays in the queue.
            Exception: what unpickling the message raised; the message is gone.
        """
        end = deadline_of(timeout)
        if timeout is not None and timeout < 0:
            raise OptionError(f"timeout must be None or at least 0, not {timeout!r}")
        while True:
            self._check_open()
            try:
                message = self._try_get()
            except OSError as exc:
                if exc.errno == errno.EBADF:
                    self._check_open()  # another thread has closed it
                raise
            if message is not None:
                break
            if not self._wait(self._reader, select.POLLIN, end):
                raise Empty
        if type(message) is Leased:
            foreign.call()
        return decode(message)

    quick_put, quick_get = put, get  # machin's names for them without its locks; here are none

    def empty(self) -> bool:
        """Whether there is nothing to take out at this moment."""
        self._check_open()
        return not _poll(self._reader.fileno(), select.POLLIN, 0)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to take out.

        For `select` and `multiprocessing.connection.wait`.  Others may take it out first.
        """
        self._check_open()
        return self._reader.fileno()

    # -- ending ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up this process's ends.  What is in the queue stays for the others."""
        reader = self.__dict__.get("_reader")
        if reader is None:
            return  # it was never opened
        reader.close()
        self._writer.close()
        if self._leave_arena is not None:
            self._leave_arena()

    def __enter__(self) -> SimpleQueue:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._reader.fileno() < 0:
            raise ValueError("this SimpleQueue is closed in this process")

    def __repr__(self) -> str:
        state = "closed" if self._reader.fileno() < 0 else "open"
        return f"<SimpleQueue {state}, copy_tensor={self._copy_tensor}>"

    # -- to other processes ------------------------------------------------------------------------

    def __getstate__(self) -> tuple[Any, Any, bool]:
        assert_spawning(self)
        self._check_open()
        from multiprocessing.reduction import DupFd

        return DupFd(self._reader.fileno()), DupFd(self._writer.fileno()), self._copy_tensor

    def __setstate__(self, state: tuple[Any, Any, bool]) -> None:
        reader, writer, copy_tensor = state
        reader, writer = (socket.socket(fileno=one.detach()) for one in (reader, writer))
        self._open(reader, writer, copy_tensor)

    # -- the writer's side -------------------------------------------------------------------------

    def _current_layout(self) -> Layout:
        arena = Arena.own()
        if self._layout is None or arena is not self._arena:
            # The first time, or a fork has come in between.
            self._arena = arena
            if arena is None:
                share: Any = None if self._copy_tensor else _Unshared()
                self._layout = BY_PIPE._replace(arena=share, anywhere=True)
            else:
                arena.begin()
                # Not in `__del__`, which the interpreter may call when modules are gone.
                self._leave_arena = weakref.finalize(self, _end, arena)
                share = None if self._copy_tensor else arena
                self._layout = Layout(lessor=_lease, arena=share, anywhere=True)
        return self._layout

    def _try_put(
        self, packet: bytes | memoryview, file: int, held: dict[Holds, list[Block]]
    ) -> bool:
        """Send a message if there is room for it."""
        try:
            # No shield: nothing is noted for these that a signal handler could cut short.
            if file < 0 and not held:
                self._writer.send(packet, _SEND)
            else:
                self._send(packet, file, held)
            return True
        except BlockingIOError:
            return False
        except OSError as exc:
            if exc.errno == errno.EBADF:
                self._check_open()  # another thread has closed it
            if exc.errno != errno.ETOOMANYREFS:
                raise
        # As many descriptors of this user are on their way as the limit (ulimit -n) allows; no
        # event tells when there are fewer.
        time.sleep(_PAUSE)
        return False

    @shielded
    def _send(self, packet: bytes | memoryview, file: int, held: dict[Holds, list[Block]]) -> None:
        with foreign.passing:
            fds = [] if file < 0 else [file]
            fds += [foreign.in_flight_leases_of(arena).descriptor() for arena in held]
            # The lock keeps forks from copying leases; this does not wait while it is held.
            self._writer.sendmsg([packet], packets.rights(fds), _SEND)
            # Only now: a packet for which there is no room is sent again, with the same blocks.
            for arena, blocks in held.items():
                foreign.in_flight_leases_of(arena).sent(blocks)

    # -- the reader's side -------------------------------------------------------------------------

    @shielded
    def _try_get(self) -> bytes | memoryview | None:
        """Take out a message if there is one, and take hold of its blocks."""
        with foreign.passing:
            # Before the packet is taken out: the kernel drops descriptors that have no room.
            # Another thread may open files in between: then `lost` says so.
            _need_descriptors(self._reader.fileno())
            try:
                data, fds, lost = packets.receive(self._reader, packets.LONGEST, _MOST_FDS)
            except BlockingIOError:
                return None
            try:
                if not data:
                    raise EOFError("the queue was shut down: nobody can put any more")
                if lost:
                    raise OSError(
                        errno.EMFILE, "no descriptor was left for those of a message, which is lost"
                    )
                return _opened(data, list(fds)) if fds else data
            finally:
                # Closing the leases tells their senders that the blocks are held here by now.
                for fd in fds:
                    os.close(fd)

    def _wait(self, end: socket.socket, event: int, until: float | None) -> bool:
        """Wait for an event; True: look again, it may have come."""
        # Anew each second: another thread may close the queue, and a signal that comes just
        # before a wait begins would be lost.
        seconds = 1.0 if until is None else min(1.0, until - time.monotonic())
        fd = end.fileno()
        if fd >= 0:
            found = _poll(fd, event, max(0.0, seconds))
            return found or until is None or time.monotonic() < until
        return True


def _poll(fd: int, event: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(fd, event)
    return bool(poller.poll(seconds * 1000))


def _end(arena: Arena) -> None:
    if arena is Arena._own:  # else a fork has come in between, and it is our parent's
        arena.end()


def _need_descriptors(fd: int) -> None:
    """Raise `OSError` if so few are left that the kernel would drop those of a message."""
    free: list[int] = []
    try:
        for _ in range(_FOR_A_MESSAGE):
            free.append(os.dup(fd))
    finally:
        for one in free:
            os.close(one)


def _lease(nbytes: int) -> Block | None:
    """Lease a block of this process; waits for memory as long as some is in messages.

    None: what is left is in use by live objects; the message goes into a file then.
    """
    arena = Arena.own()
    if arena is None:
        return None
    block = arena.lease(nbytes)
    while block is None and foreign.reclaim_arrived():
        block = arena.lease(nbytes)
        if block is None:
            time.sleep(_PAUSE)  # no event tells that an in-flight lease has come back
    return block


def _opened(data: bytes, fds: list[int]) -> bytes | memoryview:
    """Return the message of a packet with descriptors; what it names is held."""
    message: bytes | memoryview = data
    if data[0] == _IN_FILE:
        message = packets.read_file(fds.pop(0), _FILE_HEAD.unpack(data)[1])
    if message[0] != frame.FRAMED:
        return message
    for token, fd in zip(frame.tokens(message), fds):
        if token not in Arena._known:
            foreign.ForeignArena.enter(fd, token)
    return frame.adopt(message)


class _Unshared:
    """Stands for the arena where there is none: only a tensor that should be shared asks it."""

    def holds(self, address: int) -> bool:
        return False

    def holding(self, address: int) -> Block:
        raise OptionError(
            "a tensor cannot be put into a SimpleQueue with copy_tensor=False: this process cannot "
            "have memory that it shares with others (a limit on addresses, ulimit -v, forbids it); "
            "use copy_tensor=True"
        )


def _check_context(ctx: Any) -> None:
    if isinstance(ctx, str):
        methods = multiprocessing.get_all_start_methods()
        if ctx not in methods:
            raise OptionError(f"ctx must be one of {methods}, not {ctx!r}")
    elif ctx is not None and not hasattr(ctx, "get_start_method"):
        raise TypeError(
            "ctx must be a multiprocessing context, the name of a start method or None, "
            f"not {ctx!r}"
        )
