"""The pipes between the program and a worker: the format of frames, the ends, and the wait for one.

Both ends usually run the same version of xpool, so frames carry no version.  The handshake compares
`WIRE`, because a worker may import xpool from another path.

To a worker::

    kind u8, count u32, size u64 | body of `size` bytes
    TASKS   count items: func u64, count sizes u64, then the payloads
    TIMED   as TASKS, for items with a time limit: the worker records when it begins each
    FUNC    func u64, mode u8 (the place in `callables.OF_MAPS`), payload of the function
    FORGET  count function numbers u64
    STOP    empty body
    BOOT    the first frame: a pickled dict of builtins for `xpool._worker.entry`

From a worker::

    number u32, kind u8, errors u8, size u64, count u32, mark u64, nanos u64 | `size` bytes
    number  the number of the message, from 1.  Any other number means that a task has written to
            the pipe: the parent must not take these bytes for a message.
    ANSWER  the outbox contains `count` more answers and now ends at `mark`.  If size > 0, the body
            is one more answer (an entry without its size).  `errors`: bit 0, some answers in the
            outbox are errors or name blocks of the arena; bit 1, the body is an error; bit 2, the
            task of that error may be tried again.  `nanos`: the time that all these tasks took.
    SKIPPED the worker did not begin `count` items, because the parent forbade it
    READY   body: wire u32, mapped u8: the worker's `WIRE`, and whether it has mapped the arena
    FAILED  the worker could not start.  body: size u32, a text of that size with the reason, then
            the reason as a pickled exception, which the parent unpickles when a caller asks for it

Packets on the control socket between a worker of a `P2PPool` and its parent::

    WANTED  peer u32, ended u32, known u64: request for a channel to a peer.  `known` is the number
            of the last channel that the worker knows, `ended` whether this channel has ended.
    LINK    peer u32, error u32, serial u64: a channel, with its descriptor, or an errno

An entry of the outbox, and of a body with several answers, is: size u32 (top bit: it is an error),
payload.  Answers have no numbers: they come in the order in which the worker got the items.
"""

import itertools
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xpool._memory.system import default_processes, new_buffer

Parts = list[bytes | memoryview]
"""The pieces of a frame, which are written one after the other."""

WIRE = 4

# `_worker/entry` has a copy of `TO_WORKER`, because it may not import this module.
TO_WORKER = struct.Struct("<BxxxIQ")
TO_PARENT = struct.Struct("<IBBxxQIxxxxQQ")
WANTED = LINK = struct.Struct("<IIQ")
# TO_WORKER and the table of one item together, so that one `pack` makes the head of a call.
_ONE_TASK = struct.Struct("<BxxxIQQQ")
FUNC_HEAD = struct.Struct("<QB")
GREETING = struct.Struct("<I?")
U64 = struct.Struct("<Q")
ENTRY = struct.Struct("<I")
# Larger than the size of any answer in the outbox (`SMALL` in _worker/protocol).
ERROR_BIT = 0x8000_0000

TASKS, FUNC, FORGET, STOP, BOOT, TIMED = 1, 2, 3, 4, 5, 6
ANSWER, SKIPPED, READY, FAILED = 11, 12, 13, 14
OUTBOX_MIXED, BODY_ERROR, BODY_AGAIN = 1, 2, 4


class Refusal(NamedTuple):
    """The reason why a worker could not start: a line of text, and the pickled exception."""

    line: str
    pickled: bytes | memoryview

    def packed(self) -> bytes:
        line = self.line.encode(errors="backslashreplace")
        return ENTRY.pack(len(line)) + line + self.pickled

    @classmethod
    def unpacked(cls, body: bytes | memoryview) -> "Refusal":
        """Return the refusal from which `packed` made ``body``.  Raise an error for other data."""
        end = ENTRY.size + ENTRY.unpack_from(body)[0]
        if end > len(body):
            raise ValueError("the text of a FAILED frame is longer than the frame")
        return cls(bytes(body[ENTRY.size : end]).decode(), body[end:])


def tasks_frame(func: int, items: list[bytes | memoryview], kind: int = TASKS) -> Parts:
    n = len(items)
    if n == 1:
        size = len(items[0])
        return [_ONE_TASK.pack(kind, 1, 16 + size, func, size), items[0]]
    sizes = struct.pack(f"<Q{n}Q", func, *map(len, items))
    size = len(sizes) + sum(map(len, items))
    return [TO_WORKER.pack(kind, n, size) + sizes, *items]


def func_frame(func: int, mode: int, payload: bytes | memoryview) -> Parts:
    head = FUNC_HEAD.pack(func, mode)
    return [TO_WORKER.pack(FUNC, 1, len(head) + len(payload)) + head, payload]


def forget_frame(funcs: list[int]) -> Parts:
    n = len(funcs)
    return [TO_WORKER.pack(FORGET, n, 8 * n) + struct.pack(f"<{n}Q", *funcs)]


def boot_frame(body: bytes) -> Parts:
    return [TO_WORKER.pack(BOOT, 1, len(body)), body]


def stop_frame() -> Parts:
    return [TO_WORKER.pack(STOP, 0, 0)]


# -- the ends of a worker's pipes ------------------------------------------------------------------
#
# Each pipe has one writer and one reader.  So it needs no lock, which a dead process could still
# hold.  If the writer dies within a frame, the reader finds the pipe's end within this frame.  The
# parent's ends never block; the worker's ends may.

READ = 64 * 1024  # bytes of one read: the default capacity of a pipe (pipe(7))
_IOV = 64  # the largest number of parts in one `writev`; the system allows 1024 (IOV_MAX)


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**40  # the system does not report it


MOST_MESSAGE_BYTES = _memory()
"""The machine's memory in bytes.  A message that announces more bytes is invalid."""


class FrameWriter:
    """The parent's end of the pipe to a worker.  It writes what fits, and queues the rest.

    The engine's lock guards it.  ``fd`` must be non-blocking.
    """

    __slots__ = ("backlog", "fd", "sent")

    # Attributes, so that a simulated world can replace the system calls.
    _write = staticmethod(os.write)
    _writev = staticmethod(os.writev)

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.backlog: deque[memoryview | bytes] = deque()
        self.sent = 0  # number of bytes sent so far, including those in the backlog

    def send(self, parts: Parts) -> None:
        """Send the parts of a frame.  Queue the bytes for which the pipe has no room.

        If the worker has ended, this does nothing.  The engine detects its death by other means.
        """
        size = sum(map(len, parts))
        self.sent += size
        # With a backlog nothing may be written now: it could land inside another frame.
        if self.backlog:
            self.backlog.extend(parts)
            return
        if size <= 16 * 1024 and len(parts) > 1:
            parts = [b"".join(parts)]
        if len(parts) == 1:
            try:
                n = self._write(self.fd, parts[0])
            except BlockingIOError:
                n = 0
            except BrokenPipeError:
                return
            if n < size:
                self.backlog.append(memoryview(parts[0])[n:])
            return
        self.backlog.extend(parts)
        self.flush()

    @property
    def rest(self) -> tuple[int, int]:
        """A value that changes whenever bytes of the backlog are written."""
        backlog = self.backlog
        return len(backlog), len(backlog[0]) if backlog else 0

    def flush(self) -> None:
        """Write from the backlog until it is empty or the pipe is full."""
        backlog = self.backlog
        while backlog:
            batch = list(itertools.islice(backlog, _IOV))
            try:
                n = self._writev(self.fd, batch)
            except BlockingIOError:
                return
            except BrokenPipeError:
                backlog.clear()
                return
            if n == sum(map(len, batch)):
                for _ in batch:
                    backlog.popleft()
                continue
            while n:
                part = backlog[0]
                if n >= len(part):
                    n -= len(part)
                    backlog.popleft()
                else:
                    backlog[0] = memoryview(part)[n:]
                    n = 0
            # Remove empty parts.  `writev` would return 0 for them, and the loop would not end.
            while backlog and not len(backlog[0]):
                backlog.popleft()


class FrameReader:
    """The parent's end of the pipe from a worker.  It yields the frames that have arrived whole.

    One thread at a time uses it, under the engine's lock.  ``fd`` must be non-blocking.
    """

    __slots__ = ("_at", "_head", "_number", "body", "buffer", "dry", "ended", "fd", "limit")

    _read = staticmethod(os.read)
    _readv = staticmethod(os.readv)

    def __init__(self, fd: int, limit: int = MOST_MESSAGE_BYTES) -> None:
        self.fd = fd
        self.limit = limit
        self._number = 1  # the number that the next frame must have
        self.ended = False
        self.dry = False  # whether the last read found nothing
        self.buffer = b""
        # A body that needs several reads is read directly into its place, without a copy.
        self._head: tuple[Any, ...] | None = None
        self.body: memoryview | None = None
        self._at = 0

    @property
    def partial(self) -> bool:
        return bool(self.buffer) or self.body is not None

    @property
    def got(self) -> int:
        """Number of bytes of the incomplete frame that have arrived."""
        return self._at if self.body is not None else len(self.buffer)

    def frames(self) -> Iterator[tuple[tuple[Any, ...], bytes | memoryview]]:
        """Read the pipe once, and yield (head, body) for each frame that is now complete.

        The head is unpacked by `TO_PARENT`.

        Raises:
            ValueError: the bytes are not a frame, or not the next one.
        """
        self.dry = False
        if self.body is not None:
            if not self._receive():
                return
            # Reset before the yield, because the caller may not resume this generator.
            head, body = self._head, self.body
            self._head = self.body = None
            assert head is not None
            yield head, body
            return
        try:
            data = self._read(self.fd, READ)
        except BlockingIOError:
            self.dry = True
            return
        if not data:
            self.ended = True
            return
        if self.buffer:
            data = self.buffer + data
            self.buffer = b""
        size = TO_PARENT.size
        # Until this generator ends, only its local variables hold the remaining frames.
        at, end = 0, len(data)
        while end - at >= size:
            head = TO_PARENT.unpack_from(data, at)
            n = head[3]
            if head[0] != self._number:
                raise ValueError(f"a frame has number {head[0]} instead of {self._number}")
            if n > self.limit:
                raise ValueError(f"a frame of {n} bytes is announced, more than {self.limit}")
            stop = at + size + n
            if stop <= end:
                self._number = (self._number + 1) % 2**32
                yield head, data[at + size : stop]
                at = stop
                continue
            if n > READ:
                self._number = (self._number + 1) % 2**32
                self._head = head
                self.body = memoryview(new_buffer(n))
                got = data[at + size :]
                self.body[: len(got)] = got
                self._at = len(got)
                return
            break
        self.buffer = data[at:]

    def _receive(self) -> bool:
        """Read into the incomplete body.  Return whether it is now complete."""
        body = self.body
        assert body is not None
        while self._at < len(body):
            try:
                n = self._readv(self.fd, [body[self._at :]])
            except BlockingIOError:
                self.dry = True
                return False
            if n == 0:
                self.ended = True
                return False
            self._at += n
        return True


class BlockingFrameReader:
    """The worker's end of the pipe from the parent.  A read blocks until its bytes have arrived.

    ``before_waiting()``, if set, is called before the reader waits for the next frame.
    """

    __slots__ = ("_at", "_buffer", "before_waiting", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = b""
        self._at = 0
        self.before_waiting: Callable[[], None] | None = None

    def read(self, n: int) -> bytes | memoryview:
        """Return the next ``n`` bytes.  Raise `EOFError` if the parent has ended."""
        at = self._at
        if len(self._buffer) - at >= n:
            self._at = at + n
            return self._buffer[at : at + n]
        if n > READ:
            return self._read_large(n)
        buffer = self._buffer[at:]
        if not buffer and self.before_waiting is not None:
            self.before_waiting()
        while len(buffer) < n:
            data = os.read(self.fd, READ)
            if not data:
                raise EOFError
            buffer = buffer + data if buffer else data
        self._buffer = buffer
        self._at = n
        return buffer[:n]

    def _read_large(self, n: int) -> memoryview:
        body = memoryview(new_buffer(n))
        got = self._buffer[self._at :]
        self._buffer, self._at = b"", 0
        body[: len(got)] = got
        at = len(got)
        while at < n:
            k = os.readv(self.fd, [body[at:]])
            if k == 0:
                raise EOFError
            at += k
        return body


def write_all(fd: int, parts: Parts) -> None:
    """Write all parts, and wait for room.  Raise `BrokenPipeError` if the reader has ended."""
    for part in parts:
        view = memoryview(part)
        # One write(2) takes at most 0x7ffff000 bytes.
        while view:
            view = view[os.write(fd, view) :]


# -- a wait for the next frame ---------------------------------------------------------------------

_MOMENT = 300e-6
"""Seconds of a poll: longer than a short task and its messages take if both sides sleep.  A shorter
poll would end before the sleeping other side answers, so both sides would always sleep."""

_MOST = 16

_AWAY = 500e-6
"""Seconds.  If the processor is away longer than this, a process that does not sleep has it."""

_LONG = 256
"""How many waits sleep then.  One poll for each of so many costs a slice: 12 us for each wait."""

_Events = list[tuple[int, int]]

_give_way: Callable[[], Any] = getattr(os, "sched_yield", lambda: None)


class Spin:
    """Polls for a moment before a thread sleeps.  One thread at a time polls, the others sleep.

    Waking a sleeping process takes 25 us or more, and its caches are cold.  This is most of the
    cost of a short message.  So a thread that may soon get a message polls for it before it sleeps.
    If the poll finds nothing, the next wait sleeps without polling.  If later polls find nothing
    either, the next 2, 4, ... `_MOST` waits do.  So a thread whose waits are all long spends at
    most a 17th of a processor on polling.  Between two polls, the thread offers the processor to
    other processes.  If one takes it for long, the machine is busy: the offer has cost a time
    slice, 3 ms, in which an answer waits.  A thread that sleeps gets the processor when its message
    comes, so the next `_LONG` waits sleep.
    """

    __slots__ = ("_free", "_left", "_skip")

    def __init__(self) -> None:
        # With one processor, no message can arrive while a thread polls.
        self._free = default_processes() > 1
        self._skip = 1  # how many waits sleep without polling if the next poll finds nothing
        self._left = 0  # how many waits are still to sleep without polling

    def look(self, poll: Callable[[int], _Events]) -> _Events:
        """Call ``poll(0)`` repeatedly for a moment, until it finds events, and return these.

        It may return at once, without a poll.  If it returns no events, the caller should sleep.
        """
        # Needs no lock: if two threads come at the same moment, both poll, which costs little.  A
        # signal handler that interrupts a poll and calls this does not poll.
        if not self._free:
            return []
        if self._left:
            self._left -= 1
            return []
        try:
            self._free = False
            now = begin = time.perf_counter()
            while True:
                if found := poll(0):
                    self._skip = 1
                    return found
                if now - begin > _MOMENT:
                    self._left = self._skip
                    self._skip = min(2 * self._skip, _MOST)
                    return []
                _give_way()
                before, now = now, time.perf_counter()
                if now - before <= _AWAY:
                    continue
                self._left = _LONG
                return poll(0)
        finally:
            self._free = True
