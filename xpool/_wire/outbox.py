"""A page that a worker and the parent both see: what was begun, and answers on their way.

Why it is there: a worker that runs thousands of short tasks a second cannot afford a system call
for each, yet what it has finished must not be lost when the next task kills it, and the parent
must know exactly which task that was.  So the worker writes each answer into shared memory (an
anonymous file, gone with the last process that maps it), and makes one call for many of them.

Who writes what (each word has one writer, so nothing needs a lock; the parent does not read its own
words from here, where a worker that writes to wrong addresses may have changed them)::

    began   worker   items it has entered, ever
    tail    worker   bytes of answers written, ever
    since   worker   when it began what it does now, in ns of the monotonic clock; 0: not timed
    limit   parent   the worker enters no item from this number on
    head    parent   bytes of answers taken out, ever
    adopted parent   answers with blocks of the arena of which it has taken hold, ever
    stop    parent   the item that the worker is to break off, plus 1; 0: none
    dropped worker   log records and warnings that it could not send, ever
    turn    worker   when it began the first task that it has not answered, in ns as `since`
    stack   both     where the worker was when it got `STOP_SIGNAL`, as text

Order between processors: the parent reads `tail` only as far as a message through the pipe said
(the two system calls order the memory), or after the worker's death, or - for a worker that is
silent in a long task - as far as it read at its last look, milliseconds before.  `limit` is the
same the other way round: what it forbids is believed only at the look after the one that set it.
So `began` must be written before `limit` is read, and is taken back when that says no.

The stack is written by faulthandler's signal handler, in C: it needs neither the interpreter nor a
lock, so a task that is stuck in C code can tell where, too.  It writes to the file, at an offset
beyond the answers; the parent reads it there when the task has ended one way or the other.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time

from xpool._memory.system import fixed_file
from xpool._wire.wire import ENTRY, ERROR_BIT

__all__ = [
    "CAPACITY",
    "SIZE",
    "HEAD",
    "LIMIT",
    "NO_LIMIT",
    "STACK",
    "STACK_AT",
    "STOP_SIGNAL",
    "TASK_LINE",
    "Outbox",
    "entries",
    "make_file",
]

STOP_SIGNAL: int = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2
"""Asks a worker where it is, and to break off the item that `stop` names.  None that programs use:
libraries take SIGUSR1 and SIGUSR2, the C library the first of the real-time ones."""

# Bytes: a page of words, the ring of answers, and the stack behind them.
HEADER = 4096
CAPACITY = 256 * 1024
NO_LIMIT = 2**64 - 1
TASK_LINE = "Item: "
"""Before what a worker says of its item, behind its stack; it cannot while it is in C code."""

STACK_AT = HEADER + CAPACITY
STACK = 64 * 1024  # a hundred frames at most, sent whole or cut; only what is used takes memory
SIZE = STACK_AT + STACK
# One cache line each, in words of 8 bytes.
_BEGAN, _TAIL, LIMIT, HEAD, _SINCE, _STOP, _ADOPTED, _DROPPED = 0, 8, 16, 24, 32, 40, 48, 56
_TURN = 64


def make_file() -> int:
    """Return the descriptor of a new anonymous file of the right size, filled with zeros."""
    if sys.platform == "linux":
        return fixed_file("xpool-outbox", SIZE)
    import tempfile  # only here: it takes as long as five modules of ours

    with tempfile.TemporaryFile() as file:
        fd = os.dup(file.fileno())
    os.ftruncate(fd, SIZE)
    return fd


class Outbox:
    """The mapped page.  The worker calls `enter`, `fits` and `append`; the rest is the parent's."""

    capacity = CAPACITY
    # The parent's words, as it has written them.
    limit_written = head_written = _adopted = 0

    def __init__(self, fd: int) -> None:
        # The mapping has a descriptor of its own (mmapmodule.c duplicates it): `fd` may be closed.
        self._map = mmap.mmap(fd, SIZE)
        view = memoryview(self._map)
        self.words = view[:HEADER].cast("Q")
        self._turn = self.words[_TURN : _TURN + 1]
        self._data = view[HEADER:STACK_AT]
        # The worker's own notes: how far it has written, and may without looking again.
        self._written = 0
        self._room = 0

    def close(self) -> None:
        """Unmap; nothing may be used afterwards."""
        # First the views: a mapping to which views lead cannot be closed.
        self._turn.release()
        self.words.release()
        self._data.release()
        self._map.close()

    # -- the worker's side -------------------------------------------------------------------

    def enter(self, seq: int) -> bool:
        """Say that item ``seq`` is begun; False when the parent does not want it begun."""
        words = self.words
        words[_BEGAN] = seq + 1
        if seq < words[LIMIT]:
            return True
        words[_BEGAN] = seq  # should we die now, it is not lost: it never ran
        return False

    def leave(self) -> None:
        """Take back that the last item was begun: nothing of it has run, and this worker ends."""
        self.words[_BEGAN] -= 1

    def tick(self) -> None:
        """Start the clock of what is begun now."""
        self.words[_SINCE] = time.monotonic_ns()

    def rest(self) -> None:
        """Stop the clock: what was timed is over."""
        self.words[_SINCE] = 0

    def begin_turn(self, when: float) -> None:
        """Say since when the worker is at the first task that it has not answered."""
        self._turn[0] = int(when * 1e9)

    def told_to_stop(self) -> bool:
        """Whether the item that was entered last is the one to break off."""
        return self.words[_STOP] == self.words[_BEGAN]

    def count_dropped(self, number: int) -> None:
        """Say how many log records and warnings could not be sent, ever."""
        self.words[_DROPPED] = number

    @property
    def asked(self) -> bool:
        """Whether there is something to break off, or to tell where it is."""
        return bool(self.words[_STOP])

    def append(self, payload: bytes | memoryview, error: int) -> bool:
        """Write one answer, an error if ``error`` is not 0; False: there was no room for it."""
        n = len(payload)
        tail = self._written
        end = tail + 4 + n
        # The parent's word is looked at only when there seems to be no room.
        if end > self._room:
            self._room = self.words[HEAD] + self.capacity
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
        # Last: a worker that dies before this has not answered, and the item is lost with it.
        self._written = self.words[_TAIL] = end
        return True

    @property
    def tail(self) -> int:
        """Bytes of answers written, ever."""
        return self.words[_TAIL]

    @property
    def adopted(self) -> int:
        """Answers with blocks that the parent has taken hold of, ever."""
        return self.words[_ADOPTED]

    # -- the parent's side -------------------------------------------------------------------

    @property
    def began(self) -> int:
        """Items that the worker has entered, ever."""
        return self.words[_BEGAN]

    @property
    def dropped(self) -> int:
        """Log records and warnings that the worker could not send, ever."""
        return self.words[_DROPPED]

    @property
    def limit(self) -> int:
        """The worker enters no item from this number on."""
        return self.limit_written

    @limit.setter
    def limit(self, seq: int) -> None:
        self.limit_written = self.words[LIMIT] = seq

    @property
    def since(self) -> float | None:
        """When the worker began what it does now (`time.monotonic`), where that is timed."""
        since = self.words[_SINCE]
        return since * 1e-9 if since else None

    @property
    def turn(self) -> float | None:
        """When it began what it has not answered (`time.monotonic`); None: it is not ready yet."""
        turn = self._turn[0]
        return turn * 1e-9 if turn else None

    def ask(self, began: int) -> None:
        """Name the item to break off: the one that made `began` this; 0: none any more."""
        # Cleared before it is named: what lies there is of an earlier stop.
        if began:
            self.clear_stack()
        self.words[_STOP] = began

    def clear_stack(self) -> None:
        """Forget what the worker wrote when it was asked before."""
        self._map[STACK_AT:SIZE] = bytes(STACK)

    def stack(self) -> str:
        """Return what the worker wrote since it was asked."""
        return self._map[STACK_AT:SIZE].split(b"\0", 1)[0].decode(errors="replace")

    @property
    def intact(self) -> bool:
        """Whether the parent's words are as it wrote them: no task has written over the page.

        Where each call counts, `words` is compared with the two numbers in place.
        """
        words = self.words
        return words[LIMIT] == self.limit_written and words[HEAD] == self.head_written

    @property
    def head(self) -> int:
        """Bytes of answers taken out, ever."""
        return self.head_written

    def adopt(self) -> None:
        """Say that one more answer with blocks is held here: the worker may let go."""
        self._adopted += 1
        self.words[_ADOPTED] = self._adopted

    def take(self, mark: int) -> bytes:
        """Take out all up to ``mark`` bytes, ever: whole entries, for `entries` to split."""
        head = self.head_written
        if mark - head > self.capacity or mark < head:
            raise ValueError(f"outbox mark {mark} does not fit head {head}")
        start, stop = head % self.capacity, head % self.capacity + mark - head
        if stop <= self.capacity:
            data = bytes(self._data[start:stop])
        else:
            data = bytes(self._data[start:]) + bytes(self._data[: stop - self.capacity])
        # After the copy: from here on the worker may write over these bytes.
        self.head_written = self.words[HEAD] = mark
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
        # The top bit is off by now: this is a length, or nonsense.
        if at + n > end:
            raise ValueError("an entry of the outbox is longer than the outbox")
        found.append((error, data[at : at + n]))
        at += n
    return found
