"""The ends of a worker's pipes.  The parent's ends never block; the worker's ends may.

Each pipe has one writer and one reader.  So it needs no lock, which a dead process could still
hold.  If the writer dies within a frame, the reader finds the pipe's end within this frame.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from xpool._memory.buffers import new_buffer
from xpool._wire.wire import TO_PARENT, Parts

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
