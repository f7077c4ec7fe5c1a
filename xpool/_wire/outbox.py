"""A page of memory that a worker and its parent share: the worker's progress, and its answers.

A worker that runs thousands of short tasks a second has no time for a system call for each.  But
its finished answers must survive a task that kills it, and the parent must know which task this
was.  So the worker writes each answer into shared memory, and makes one system call for many
answers.  The memory is an anonymous file, which the system frees when no process maps it.

Each word has one writer, so nothing needs a lock.  The parent keeps copies of its own words and
does not read them here, because a worker that writes to wrong addresses may have changed them::

    began   worker   number of items that the worker has ever entered
    tail    worker   number of bytes of answers that the worker has ever written
    since   worker   start of the current item, in ns of the monotonic clock; 0: not timed
    limit   parent   the worker may enter only items with lower numbers
    head    parent   number of bytes of answers that the parent has ever taken out
    adopted parent   number of answers whose arena blocks the parent has ever taken over
    stop    parent   number of the item that the worker must break off, plus 1; 0: none
    turn    worker   start of the first unanswered task, in ns as `since`
    counts  worker   what it has counted: a word for each of `COUNTERS`
    bar     worker   the progress bar that its task draws, as text
    stack   both     the worker's stack when it got `STOP_SIGNAL` or `STACK_SIGNAL`, as text

A processor may see the stores of another one late.  So the parent reads answers up to a mark that
came through the pipe, because the system calls of both sides order the memory.  After the worker's
death, the parent reads up to `tail`.  If a worker sends nothing during a long task, the parent
reads up to the `tail` that it saw some milliseconds earlier.  After the parent has set a new
`limit`, it waits some milliseconds before it relies on the limit.  So the worker writes `began`
before it reads `limit`, and restores `began` if `limit` forbids the item.

The handlers of two signals write the stack into the file, beyond the answers: see
`xpool._worker.stopping`.  The parent reads it when the task has ended or was killed.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time

from xpool._memory.system import fixed_file, temporary_file
from xpool._wire.wire import ENTRY, ERROR_BIT

STOP_SIGNAL: int = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2
"""Asks a worker to write its stack and to break off the item that `stop` names.  Libraries use
SIGUSR1 and SIGUSR2, and the C library uses the first real-time signals, but hardly this one."""
STACK_SIGNAL: int = signal.SIGRTMIN + 8 if sys.platform == "linux" else signal.SIGUSR1
"""Asks for the same, and makes a worker that is in C code write its stack at once."""

# In bytes: a page of words, the ring of answers, and the stack.
HEADER = 4096
CAPACITY = 256 * 1024
NO_LIMIT = 2**64 - 1
TASK_LINE = "Item: "
"""Prefix of the line about the item, which follows the stack.  Tasks in C code delay that line."""

BAR_AT = HEADER // 2
"""Offset of the text of a bar, which ends at a zero byte."""

STACK_AT = HEADER + CAPACITY
STACK = 64 * 1024  # for at most 100 frames, perhaps cut; pages that are not used take no memory
SIZE = STACK_AT + STACK
# Indexes of the words, which have 8 bytes.  Each word has its own cache line.
_BEGAN, _TAIL, LIMIT, HEAD, _SINCE, _STOP, _ADOPTED, _TURN = 0, 8, 16, 24, 32, 40, 48, 56

COUNTERS = ("dropped_records",)
"""What a worker counts by `Outbox.count`: fields of `WorkerReport`."""
_COUNTS = {name: _TURN + 8 + 8 * i for i, name in enumerate(COUNTERS)}


def make_file() -> int:
    """Return the descriptor of a new anonymous file of the right size, filled with zeros."""
    if sys.platform == "linux":
        return fixed_file("xpool-outbox", SIZE)
    fd, path = temporary_file()
    os.unlink(path)
    os.ftruncate(fd, SIZE)
    return fd


class Outbox:
    """The mapped page.  Its worker and its parent use it, and each writes its own words."""

    capacity = CAPACITY
    limit = head = _adopted = 0  # the parent's copies of its own words

    def __init__(self, fd: int) -> None:
        # `mmap` duplicates the descriptor, so the caller may close `fd`.
        self._map = mmap.mmap(fd, SIZE)
        self._use(self._map)
        self._written = 0  # the worker's copy of `tail`
        self._room = 0  # how far the worker may write before it must read `head` again

    def _use(self, pages: mmap.mmap) -> None:
        view = memoryview(pages)
        self.words = view[:HEADER].cast("Q")
        self._turn = self.words[_TURN : _TURN + 1]
        self._data = view[HEADER:STACK_AT]

    def part(self) -> None:
        """Write only bars from now on, and all else into memory of this process's own: it was
        forked from the worker."""
        self._use(mmap.mmap(-1, SIZE))

    def close(self) -> None:
        """Unmap the page.  No other method may be called after this."""
        # A mapping with views cannot be closed, so release these first.
        self._turn.release()
        self.words.release()
        self._data.release()
        self._map.close()

    # -- the worker's side -------------------------------------------------------------------

    def enter(self, seq: int) -> bool:
        """Mark item ``seq`` as begun.  If the parent forbids it, undo this and return False."""
        words = self.words
        words[_BEGAN] = seq + 1
        if seq < words[LIMIT]:
            return True
        words[_BEGAN] = seq  # so if the worker dies now, the parent knows that the item never ran
        return False

    def tick(self) -> None:
        """Record that a timed item begins now."""
        self.words[_SINCE] = time.monotonic_ns()

    def rest(self) -> None:
        """Record that the timed item has ended."""
        self.words[_SINCE] = 0

    def begin_turn(self, when: float) -> None:
        self._turn[0] = int(when * 1e9)

    def told_to_stop(self) -> bool:
        """Whether the parent has asked to break off the item that was entered last."""
        return self.words[_STOP] == self.words[_BEGAN]

    def count(self, counter: str, n: int = 1) -> None:
        at = _COUNTS[counter]
        self.words[at] = (self.words[at] + n) % 2**64  # a task may have written over it

    def draw(self, bar: str) -> None:
        """Let the program show a bar; "" removes it."""
        data = bar.encode(errors="replace").replace(b"\0", b"")[: HEADER - BAR_AT - 1] + b"\0"
        self._map[BAR_AT : BAR_AT + len(data)] = data

    @property
    def asked(self) -> bool:
        """Whether the parent has asked to break off an item or to write the stack."""
        return bool(self.words[_STOP])

    def append(self, payload: bytes | memoryview, error: int) -> bool:
        """Write one answer, an error if ``error`` is not 0.  Return False if there is no room."""
        n = len(payload)
        tail = self._written
        end = tail + 4 + n
        # Read the parent's word only if the known room is too small.
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
        # Written last, so that a death during the write leaves no incomplete answer.
        self._written = self.words[_TAIL] = end
        return True

    @property
    def tail(self) -> int:
        return self.words[_TAIL]

    @property
    def adopted(self) -> int:
        """Number of answers whose blocks the parent has ever taken over."""
        return self.words[_ADOPTED]

    # -- the parent's side -------------------------------------------------------------------

    @property
    def began(self) -> int:
        """Number of items that the worker has ever entered."""
        return self.words[_BEGAN]

    @property
    def counts(self) -> list[int]:
        """What the worker has counted, in the order of `COUNTERS`."""
        words = self.words
        return [words[at] for at in _COUNTS.values()]

    def forbid(self, seq: int) -> None:
        """Forbid the worker to enter items from number ``seq`` on."""
        self.limit = self.words[LIMIT] = seq

    @property
    def since(self) -> float | None:
        """Time (of `time.monotonic`) at which the current item began; None: it is not timed."""
        since = self.words[_SINCE]
        return since * 1e-9 if since else None

    @property
    def turn(self) -> float | None:
        """Time (of `time.monotonic`) at which the worker's first unanswered task began.

        None: the worker is not ready yet.
        """
        turn = self._turn[0]
        return turn * 1e-9 if turn else None

    def ask(self, began: int) -> None:
        """Ask to break off the item that has set `began` to this value; 0: no longer."""
        if began:
            self.clear_stack()  # of an earlier request
        self.words[_STOP] = began

    @property
    def bar(self) -> str:
        """The bar that the worker's task draws, or "".  A part may be of the previous bar."""
        return self._map[BAR_AT:HEADER].split(b"\0", 1)[0].decode(errors="ignore")

    def clear_stack(self) -> None:
        self._map[STACK_AT:SIZE] = bytes(STACK)

    def stack(self) -> str:
        """Return the text that the worker has written since the last request."""
        return self._map[STACK_AT:SIZE].lstrip(b"\0").split(b"\0", 1)[0].decode(errors="replace")

    @property
    def intact(self) -> bool:
        """Whether the parent's words are unchanged.  If not, a task has written over the page.

        Code that must avoid a call compares `words` with the two numbers itself.
        """
        words = self.words
        return words[LIMIT] == self.limit and words[HEAD] == self.head

    def count_adopted(self) -> None:
        """Count one more answer whose blocks the parent has taken over from the worker."""
        self._adopted += 1
        self.words[_ADOPTED] = self._adopted

    def take(self, mark: int) -> bytes:
        """Take out the bytes before ``mark``: whole entries, which `entries` separates."""
        head = self.head
        if mark - head > self.capacity or mark < head:
            raise ValueError(f"outbox mark {mark} does not fit head {head}")
        start, stop = head % self.capacity, head % self.capacity + mark - head
        if stop <= self.capacity:
            data = bytes(self._data[start:stop])
        else:
            data = bytes(self._data[start:]) + bytes(self._data[: stop - self.capacity])
        # Written after the copy, because the worker may now write over these bytes.
        self.head = self.words[HEAD] = mark
        return data


def entries(data: bytes) -> list[tuple[bool, bytes]]:
    """Split the bytes from `Outbox.take` into pairs: whether it is an error, and the payload."""
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
