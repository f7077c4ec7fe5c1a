"""A page that a worker and the parent both see: what was begun, and answers on their way.

Why it is there: a worker that runs thousands of short tasks a second cannot afford a system call
for each, yet what it has finished must not be lost when the next task kills it, and the parent
must know exactly which task that was.  So the worker writes each answer into shared memory (an
anonymous file, gone with the last process that maps it), and makes one call for many of them.

Who writes what (each word has one writer, so nothing needs a lock)::

    began   worker   items it has entered, ever
    tail    worker   bytes of answers written, ever
    limit   parent   the worker enters no item from this number on
    head    parent   bytes of answers taken out, ever

Order between processors: the parent reads `tail` only as far as a message through the pipe said
(the two system calls order the memory), or after the worker's death, or - for a worker that is
silent in a long task - as far as it read at its last look, milliseconds before.  `limit` is the
same the other way round: what it forbids is believed only at the look after the one that set it.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

from xpool.queue.messages import ENTRY, ERROR_BIT

__all__ = ["CAPACITY", "NO_LIMIT", "Outbox", "entries", "make_file"]

HEADER = 4096
CAPACITY = 256 * 1024
NO_LIMIT = 2**64 - 1
_BEGAN, _TAIL, _LIMIT, _HEAD = 0, 8, 16, 24  # one cache line each, in words of 8 bytes


def make_file() -> int:
    """Return the descriptor of a new anonymous file of the right size, filled with zeros."""
    if sys.platform == "linux":
        fd = os.memfd_create("xpool-outbox", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, HEADER + CAPACITY)
    return fd


class Outbox:
    """The mapped page.  The worker calls `enter`, `fits` and `append`; the rest is the parent's."""

    capacity = CAPACITY

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, HEADER + CAPACITY)
        view = memoryview(self._map)
        self.words = view[:HEADER].cast("Q")
        self._data = view[HEADER:]
        # The worker's own notes: how far it has written, and may without looking again.
        self._written = 0
        self._room = 0

    def close(self) -> None:
        """Unmap; nothing may be used afterwards."""
        self.words.release()
        self._data.release()
        self._map.close()

    # -- the worker's side -------------------------------------------------------------------

    def enter(self, seq: int) -> bool:
        """Say that item ``seq`` is begun; False when the parent does not want it begun."""
        words = self.words
        words[_BEGAN] = seq + 1
        return seq < words[_LIMIT]

    def append(self, payload: bytes | memoryview, error: bool) -> bool:
        """Write one answer; False when there is no room, and nothing was written."""
        n = len(payload)
        tail = self._written
        end = tail + 4 + n
        if end > self._room:
            self._room = self.words[_HEAD] + self.capacity
            if end > self._room:
                return False
        entry = ENTRY.pack(n | ERROR_BIT if error else n) + bytes(payload)
        start = tail % self.capacity
        stop = start + 4 + n
        if stop <= self.capacity:
            self._data[start:stop] = entry
        else:
            cut = self.capacity - start
            self._data[start:] = entry[:cut]
            self._data[: stop - self.capacity] = entry[cut:]
        self._written = self.words[_TAIL] = end
        return True

    @property
    def tail(self) -> int:
        """Bytes of answers written, ever."""
        return self.words[_TAIL]

    # -- the parent's side -------------------------------------------------------------------

    @property
    def began(self) -> int:
        """Items that the worker has entered, ever."""
        return self.words[_BEGAN]

    @property
    def limit(self) -> int:
        """The worker enters no item from this number on."""
        return self.words[_LIMIT]

    @limit.setter
    def limit(self, seq: int) -> None:
        self.words[_LIMIT] = seq

    @property
    def head(self) -> int:
        """Bytes of answers taken out, ever."""
        return self.words[_HEAD]

    def take(self, mark: int) -> bytes:
        """Take out all up to ``mark`` bytes, ever: whole entries, for `entries` to split."""
        head = self.words[_HEAD]
        if mark - head > self.capacity or mark < head:
            raise ValueError(f"outbox mark {mark} does not fit head {head}")
        start, stop = head % self.capacity, head % self.capacity + mark - head
        if stop <= self.capacity:
            data = bytes(self._data[start:stop])
        else:
            data = bytes(self._data[start:]) + bytes(self._data[: stop - self.capacity])
        self.words[_HEAD] = mark
        return data


def entries(data: bytes) -> list[tuple[bool, bytes]]:
    """Split what `Outbox.take` returned into (is an error, payload)."""
    found = []
    at, end = 0, len(data)
    while at < end:
        (n,) = ENTRY.unpack_from(data, at)
        error = n >= ERROR_BIT
        n &= ~ERROR_BIT
        at += 4
        if at + n > end:
            raise ValueError("an entry of the outbox is longer than the outbox")
        found.append((error, data[at : at + n]))
        at += n
    return found
