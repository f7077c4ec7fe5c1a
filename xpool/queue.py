"""`SimpleQueue`: a queue between processes of the program, with many readers and many writers.

The channel is a pair of sockets for packets.  The kernel sends and receives a packet as a whole, so
readers and writers share no lock, and if a process is killed, at most the message that it is
putting or getting is lost.  Large data stay in the arena of the process that has put them, and the
message contains their place (docs/queue.md).

A packet is a message of `xpool._pickling.frame`.  If a message is too long for a packet, it is
written to a file, and the packet is the byte 2.  A packet carries the descriptors of this file and
of an in-flight lease for each arena it names.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.context import BaseContext, assert_spawning
from multiprocessing.reduction import DupFd
from queue import Empty
from types import TracebackType
from typing import Any

from xpool._calls.options import check_context
from xpool._memory import foreign
from xpool._memory.arena import Arena
from xpool._memory.holds import Block, Holds
from xpool._pickling import frame
from xpool._pickling.frame import BY_PIPE, Layout, Leased
from xpool._python import descriptors
from xpool._python.interrupt import by_handler, shielded
from xpool._python.waiters import deadline_of
from xpool._wire import packets
from xpool.errors import OptionError
from xpool.pickle import decode, encode

__all__ = ["SimpleQueue"]

# The packet of a message in a file.  Plain pickles and framed messages begin with other bytes.
_IN_FILE = b"\x02"
# The largest number of descriptors in a packet.  The kernel allows 253 (SCM_MAX_FD).
_MOST_FDS = 64

_FOR_A_MESSAGE = 3
"""The number of descriptors that a process needs briefly to take out a message: one for the
in-flight lease, and two to open the arena."""

_SEND = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL if sys.platform == "linux" else 0

_PAUSE = 0.01
"""Seconds between two polls if the kernel has no event to wait for."""


class SimpleQueue:
    """A first-in, first-out queue for all processes and threads of a program, as
    `multiprocessing.SimpleQueue`.

    A process gets the queue when it is started: as an argument of `multiprocessing.Process` (any
    start method), in ``initargs`` of a pool, or by a fork.  Any number of processes may put and
    get.  If a process dies, the others continue, and only a message that it has taken out is lost.

    Args:
        ctx: a context of `multiprocessing` or the name of a start method.  It has no effect, and
            exists for compatibility with `multiprocessing.SimpleQueue`.
        copy_tensor: if False, the storages of CPU tensors are moved to shared memory, and all
            processes that have put or got a tensor see each other's writes.  If True, it is copied.

    Raises:
        OptionError (a `ValueError`): ``ctx`` is invalid, or the system is not Linux.
        TypeError: ``ctx`` is neither a context nor a name.
        OSError: this process can open no more descriptors.  A queue needs two in each process.
    """

    def __init__(self, *, ctx: BaseContext | str | None = None, copy_tensor: bool = False) -> None:
        if ctx is not None:
            check_context("ctx", ctx)
        if sys.platform != "linux":
            raise OptionError(
                "xpool.queue.SimpleQueue needs Linux (packets that carry descriptors, anonymous "
                "files); use multiprocessing.SimpleQueue"
            )
        reader, writer = descriptors.pair(socket.SOCK_SEQPACKET)
        packets.give_room(writer)
        self._open(reader, writer, copy_tensor)

    def _open(self, reader: socket.socket, writer: socket.socket, copy_tensor: bool) -> None:
        self._reader, self._writer = reader, writer
        self._copy_tensor = bool(copy_tensor)
        self._arena: Arena | None = None  # the arena to which `_layout` belongs
        self._layout: Layout | None = None
        self._leave_arena: Callable[[], object] | None = None
        # Messages that were taken out, each with the process that has done so.  If a signal handler
        # raises in `get`, the next `get` returns the object.
        self._taken: deque[tuple[int, bytes | memoryview]] = deque()
        self._take = iter(self._taken.popleft, (0, b""))

    # -- putting and getting -----------------------------------------------------------------------

    def put(self, obj: Any) -> None:
        """Put an object, and wait while the queue is full.

        The queue is full if it contains 1 MiB of packets (or the system's ``net.core.wmem_max``, if
        this is less), or if the memory of its messages has reached the arena's limit (half of the
        memory that was available).

        Raises:
            TaskNotPicklable: the object cannot be pickled or shared.  The text says why.
            OptionError: tensors should be shared, but this process cannot share memory.
            OSError: this process can open no more descriptors.  Nothing was put.
            ValueError: the queue is closed in this process.
        """
        self._check_open()
        message = encode(obj, layout=self._current_layout())
        held = message.by_arena() if type(message) is Leased else {}
        if len(message) > packets.LONGEST:
            with packets.file_with(message) as file:
                self._put(_IN_FILE, file, held)
        else:
            self._put(message, -1, held)
        if held:
            # Makes a thread release the blocks when they have arrived, even without another `put`.
            foreign.call()

    def _put(self, packet: bytes | memoryview, file: int, held: dict[Holds, list[Block]]) -> None:
        while not self._try_put(packet, file, held):
            foreign.reclaim_arrived()  # called now, because the wait may be long
            self._wait(self._writer, select.POLLOUT, None)
            self._check_open()

    def get(self, timeout: float | None = None) -> Any:
        """Take out the next object.  Wait for it at most ``timeout`` seconds; None: without limit.

        The queue never ends, because this process can put objects, too: if no other process is
        left, only the timeout ends the wait.  `close` in another thread ends it within a second.

        Raises:
            queue.Empty: no object arrived in time.
            ValueError: the queue is closed in this process, or ``timeout`` is negative.
            OSError: this process can open no more descriptors.  The message stays in the queue.
            Exception: the message cannot be unpickled, and is lost.
        """
        end = deadline_of(timeout)
        if timeout is not None and timeout < 0:
            raise OptionError(f"timeout must be None or at least 0, not {timeout!r}")
        while True:
            self._check_open()
            try:
                if not self._taken:
                    self._try_get()
            except OSError as exc:
                if exc.errno == errno.EBADF:
                    self._check_open()  # another thread has closed the queue
                raise
            one = None
            try:
                # A loop, because if a signal handler raises after a call, the value is lost.
                for one in self._take:
                    if one[0] == os.getpid():  # else a fork has copied it
                        if type(one[1]) is Leased:
                            foreign.call()
                        return decode(one[1])
                    one = None
            except BaseException as exc:
                if one is not None:
                    if isinstance(exc, KeyboardInterrupt) or by_handler(exc):
                        self._taken.appendleft(one)
                    raise
                if not isinstance(exc, IndexError):
                    raise
            if not self._wait(self._reader, select.POLLIN, end):
                raise Empty

    quick_put, quick_get = put, get  # machin's names for variants without locks

    def empty(self) -> bool:
        """Whether the queue has no object at this moment."""
        self._check_open()
        return not self._taken and not _poll(self._reader.fileno(), select.POLLIN, 0)

    def fileno(self) -> int:
        """Return a descriptor that is readable while the queue has an object.

        `multiprocessing.connection.wait` calls this.  Another process may take out the object.
        """
        self._check_open()
        return self._reader.fileno()

    # -- ending ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the queue in this process.  Other processes can still use it."""
        reader = self.__dict__.get("_reader")
        if reader is None:
            return  # the constructor has raised
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
        return DupFd(self._reader.fileno()), DupFd(self._writer.fileno()), self._copy_tensor

    def __setstate__(self, state: tuple[Any, Any, bool]) -> None:
        reader, writer, copy_tensor = state
        reader, writer = (descriptors.on(one.detach()) for one in (reader, writer))
        self._open(reader, writer, copy_tensor)

    # -- the writer's side -------------------------------------------------------------------------

    def _current_layout(self) -> Layout:
        arena = Arena.own()
        if self._layout is None or arena is not self._arena:
            # This is the first call, or the first one after a fork.
            self._arena = arena
            if arena is None:
                share: Any = None if self._copy_tensor else _Unshared()
                self._layout = BY_PIPE._replace(arena=share, anywhere=True)
            else:
                arena.begin()
                # `__del__` cannot do this, because modules may be cleared when it runs at exit.
                self._leave_arena = weakref.finalize(self, _end, arena)
                share = None if self._copy_tensor else arena
                self._layout = Layout(lessor=_lease, arena=share, anywhere=True)
        return self._layout

    def _try_put(
        self, packet: bytes | memoryview, file: int, held: dict[Holds, list[Block]]
    ) -> bool:
        """Send a message if there is room for it."""
        try:
            if file < 0 and not held:  # no bookkeeping that a signal handler could interrupt
                self._writer.send(packet, _SEND)
            else:
                self._send(packet, file, held)
            return True
        except BlockingIOError:
            return False
        except OSError as exc:
            if exc.errno == errno.EBADF:
                self._check_open()  # another thread has closed the queue
            if exc.errno != errno.ETOOMANYREFS:
                raise
        # Too many of this user's descriptors are in packets (ulimit -n).  No event reports an end.
        time.sleep(_PAUSE)
        return False

    @shielded
    def _send(self, packet: bytes | memoryview, file: int, held: dict[Holds, list[Block]]) -> None:
        with foreign.passing:
            fds = [] if file < 0 else [file]
            fds += [foreign.in_flight_leases_of(arena).descriptor() for arena in held]
            # Under the lock, no fork can copy the leases.  This call does not wait.
            self._writer.sendmsg([packet], packets.rights(fds), _SEND)
            # Only a packet that was sent counts.  Otherwise it is sent again, with the same blocks.
            for arena, blocks in held.items():
                foreign.in_flight_leases_of(arena).sent(blocks)

    # -- the reader's side -------------------------------------------------------------------------

    @shielded
    def _try_get(self) -> None:
        """Take out a message, if there is one, and take holds on its blocks."""
        with foreign.passing:
            # Checked before the packet is taken out, because the kernel drops descriptors beyond
            # the limit.  If another thread opens files after the check, ``lost`` is true.
            _need_descriptors(self._reader.fileno())
            try:
                data, fds, lost = packets.receive(self._reader, packets.LONGEST, _MOST_FDS)
            except BlockingIOError:
                return
            try:
                if not data:
                    raise EOFError("the queue was shut down, so no more objects will come")
                if lost:
                    raise OSError(
                        errno.EMFILE, "a message is lost: no descriptor is free (ulimit -n)"
                    )
                message = _opened(data, list(fds)) if fds else data
                self._taken.append((os.getpid(), message))
            finally:
                # A closed lease tells the sender that this process holds the blocks.
                for fd in fds:
                    os.close(fd)

    def _wait(self, end: socket.socket, event: int, until: float | None) -> bool:
        """Wait for an event, at most a second.  Return False if ``until`` has passed."""
        # At most a second, because `close` in another thread and earlier signals end no wait.
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
    if arena is Arena._own:  # in a forked process, it may be the parent's arena
        arena.end()


def _need_descriptors(fd: int) -> None:
    """Raise `OSError` if this process can open too few descriptors for a message."""
    free: list[int] = []
    try:
        for _ in range(_FOR_A_MESSAGE):
            free.append(os.dup(fd))
    finally:
        for one in free:
            os.close(one)


def _lease(nbytes: int) -> Block | None:
    """Lease a block of this process.  Wait for memory while messages in queues hold some.

    Return None if only objects hold memory.  The message is then put into a file.
    """
    arena = Arena.own()
    if arena is None:
        return None
    block = arena.lease(nbytes)
    while block is None and foreign.reclaim_arrived():
        block = arena.lease(nbytes)
        if block is None:
            time.sleep(_PAUSE)  # no event reports that an in-flight lease has ended
    return block


def _opened(data: bytes, fds: list[int]) -> bytes | memoryview:
    """Return the message of a packet with descriptors, and take holds on its blocks."""
    message: bytes | memoryview = data
    if data == _IN_FILE:
        message = packets.read_file(fds.pop(0))
    if message[0] != frame.FRAMED:
        return message
    for token, fd in zip(frame.tokens(message), fds):
        if token not in Arena._known:
            foreign.ForeignArena.enter(fd, token)
    return frame.hold_blocks(message)


class _Unshared:
    """Takes the place of an arena.  Only tensors that should be shared use it, and get an error."""

    def holds(self, address: int) -> bool:
        return False

    def holding(self, address: int) -> Block:
        raise OptionError(
            "a tensor cannot be put into a SimpleQueue with copy_tensor=False: this process cannot "
            "have memory that it shares with others (a limit on addresses, ulimit -v, forbids it); "
            "use copy_tensor=True"
        )
