"""A page of memory that a worker and its parent share: the worker's progress, and its answers.

A worker that runs thousands of short tasks a second cannot afford a system call for each.  Yet its
finished answers must survive a task that kills it, and the parent must know which task that was.
So the worker writes each answer into shared memory, and makes one system call for many answers.
The memory is an anonymous file, which the system frees with the last process that maps it.

Each word has one writer, so nothing needs a lock.  The parent does not read its own words from
here, since a worker that writes to wrong addresses may have changed them::

    began   worker   number of items that it has entered, ever
    tail    worker   bytes of answers written, ever
    since   worker   start of its current item, in ns of the monotonic clock; 0: not timed
    limit   parent   the worker enters no item from this number on
    head    parent   bytes of answers taken out, ever
    adopted parent   number of answers whose arena blocks it has taken hold of, ever
    stop    parent   the item that the worker must break off, plus 1; 0: none
    dropped worker   number of log records and warnings that it could not send, ever
    turn    worker   start of its first unanswered task, in ns as `since`
    stack   both     the worker's stack when it got `STOP_SIGNAL`, as text

Order between processors: the parent reads `tail` up to a mark that came through the pipe, since the
two system calls order the memory, or after the worker's death.  For a worker that is silent in a
long task, it reads as far as `tail` stood at its last look, milliseconds before.  The parent relies
on a new `limit`, too, only at the look after the one that set it.  So the worker writes `began`
before it reads `limit`, and takes `began` back when `limit` forbids the item.

faulthandler's signal handler writes the stack, in C.  It needs neither the interpreter nor a lock,
so it also works for a task that is stuck in C code.  It writes to the file, at an offset beyond the
answers; the parent reads the stack there when the task has ended or was killed.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time

from xpool._memory.system import fixed_file
from xpool._wire.wire import ENTRY, ERROR_BIT

STOP_SIGNAL: int = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2
"""Asks a worker for its stack, and to break off the item that `stop` names.  Programs do not use
this signal: libraries take SIGUSR1 and SIGUSR2, the C library the first real-time signals."""

# Bytes: a page of words, the ring of answers, and the stack behind them.
HEADER = 4096
CAPACITY = 256 * 1024
NO_LIMIT = 2**64 - 1
TASK_LINE = "Item: "
"""Prefix of the line about the item, which follows the stack.  C code delays that line."""

STACK_AT = HEADER + CAPACITY
STACK = 64 * 1024  # for at most 100 frames, perhaps cut; only used pages take memory
SIZE = STACK_AT + STACK
# Indexes of the words, of 8 bytes each.  Each word has a cache line of its own.
_BEGAN, _TAIL, LIMIT, HEAD, _SINCE, _STOP, _ADOPTED, _DROPPED = 0, 8, 16, 24, 32, 40, 48, 56
_TURN = 64


def make_file() -> int:
    """Return the descriptor of a new anonymous file of the right size, filled with zeros."""
    if sys.platform == "linux":
        return fixed_file("xpool-outbox", SIZE)
    import tempfile  # imported here because it is slow, as slow as five modules of xpool

    with tempfile.TemporaryFile() as file:
        fd = os.dup(file.fileno())
    os.ftruncate(fd, SIZE)
    return fd


class Outbox:
    """The mapped page, as its worker and its parent use it: each writes its own words."""

    capacity = CAPACITY
    # The parent's copies of its own words.
    limit = head = _adopted = 0

    def __init__(self, fd: int) -> None:
        # The mapping duplicates the descriptor (mmapmodule.c), so the caller may close `fd`.
        self._map = mmap.mmap(fd, SIZE)
        view = memoryview(self._map)
        self.words = view[:HEADER].cast("Q")
        self._turn = self.words[_TURN : _TURN + 1]
        self._data = view[HEADER:STACK_AT]
        # The worker's own copies: how far it has written, and how far it may write before it reads
        # `head` again.
        self._written = 0
        self._room = 0

    def close(self) -> None:
        """Unmap the page; no other method may be called afterwards."""
        # Views first: a mapping with views cannot be closed.
        self._turn.release()
        self.words.release()
        self._data.release()
        self._map.close()

    # -- the worker's side -------------------------------------------------------------------

    def enter(self, seq: int) -> bool:
        """Mark item ``seq`` as begun; return False if the parent does not want it begun."""
        words = self.words
        words[_BEGAN] = seq + 1
        if seq < words[LIMIT]:
            return True
        words[_BEGAN] = seq  # if the worker dies now, the item is not lost: it never ran
        return False

    def leave(self) -> None:
        """Mark the last item as not begun: none of its code has run, and this worker ends."""
        self.words[_BEGAN] -= 1

    def tick(self) -> None:
        """Start the clock of the item that begins now."""
        self.words[_SINCE] = time.monotonic_ns()

    def rest(self) -> None:
        """Stop the clock: the timed item has ended."""
        self.words[_SINCE] = 0

    def begin_turn(self, when: float) -> None:
        self._turn[0] = int(when * 1e9)

    def told_to_stop(self) -> bool:
        """Whether the parent asked to break off the item that was entered last."""
        return self.words[_STOP] == self.words[_BEGAN]

    def count_dropped(self, number: int) -> None:
        self.words[_DROPPED] = number

    @property
    def asked(self) -> bool:
        """Whether the parent asked to break off an item or to write the stack."""
        return bool(self.words[_STOP])

    def append(self, payload: bytes | memoryview, error: int) -> bool:
        """Write one answer, as an error if ``error`` is not 0; return False if it has no room."""
        n = len(payload)
        tail = self._written
        end = tail + 4 + n
        # Read the parent's word only when the room that is known does not suffice.
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
        # Written last: if the worker dies before this, it has not answered, and the item is lost.
        self._written = self.words[_TAIL] = end
        return True

    @property
    def tail(self) -> int:
        return self.words[_TAIL]

    @property
    def adopted(self) -> int:
        """Number of answers whose blocks the parent has taken hold of, ever."""
        return self.words[_ADOPTED]

    # -- the parent's side -------------------------------------------------------------------

    @property
    def began(self) -> int:
        """Number of items that the worker has entered, ever."""
        return self.words[_BEGAN]

    @property
    def dropped(self) -> int:
        return self.words[_DROPPED]

    def forbid(self, seq: int) -> None:
        """Let the worker enter no item from this number on."""
        self.limit = self.words[LIMIT] = seq

    @property
    def since(self) -> float | None:
        """Start of the worker's current item (`time.monotonic`); None: it is not timed."""
        since = self.words[_SINCE]
        return since * 1e-9 if since else None

    @property
    def turn(self) -> float | None:
        """Start of its first unanswered task (`time.monotonic`); None: it is not ready yet."""
        turn = self._turn[0]
        return turn * 1e-9 if turn else None

    def ask(self, began: int) -> None:
        """Ask to break off the item that set `began` to this value; 0: withdraw the request."""
        # Clear the stack of an earlier request first.
        if began:
            self.clear_stack()
        self.words[_STOP] = began

    def clear_stack(self) -> None:
        self._map[STACK_AT:SIZE] = bytes(STACK)

    def stack(self) -> str:
        """Return the text that the worker wrote since the last request."""
        return self._map[STACK_AT:SIZE].split(b"\0", 1)[0].decode(errors="replace")

    @property
    def intact(self) -> bool:
        """Whether the parent's words are unchanged: no task has written over the page.

        Code that must avoid a call compares `words` with the two numbers itself.
        """
        words = self.words
        return words[LIMIT] == self.limit and words[HEAD] == self.head

    def count_adopted(self) -> None:
        """Count one more answer whose blocks the parent holds: the worker may release them."""
        self._adopted += 1
        self.words[_ADOPTED] = self._adopted

    def take(self, mark: int) -> bytes:
        """Take out the bytes before ``mark``: whole entries, which `entries` splits."""
        head = self.head
        if mark - head > self.capacity or mark < head:
            raise ValueError(f"outbox mark {mark} does not fit head {head}")
        start, stop = head % self.capacity, head % self.capacity + mark - head
        if stop <= self.capacity:
            data = bytes(self._data[start:stop])
        else:
            data = bytes(self._data[start:]) + bytes(self._data[: stop - self.capacity])
        # Written after the copy: from here on the worker may write over these bytes.
        self.head = self.words[HEAD] = mark
        return data


def entries(data: bytes) -> list[tuple[bool, bytes]]:
    """Split the bytes from `Outbox.take` into pairs (is an error, payload)."""
    found = []
    at, end = 0, len(data)
    while at < end:
        (n,) = ENTRY.unpack_from(data, at)
        error = n >= ERROR_BIT
        n &= ~ERROR_BIT
        at += 4
        # Without the top bit this is a length, unless the data is invalid.
        if at + n > end:
            raise ValueError("an entry of the outbox is longer than the outbox")
        found.append((error, data[at : at + n]))
        at += n
    return found
