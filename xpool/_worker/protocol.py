"""The worker's side of the protocol: its messages to the parent and their order; no system calls.

The real worker (`loop`) and the simulated worker use the same classes of this file.  They differ in
how they read and write bytes, in their tasks, and in their clock.  So the simulation tests the code
that runs in real workers.

Only `Inbox.items` and `Replies.answer` are called for each task: a plain generator and a plain
method.  A coroutine that yields each read and write to a driver would cost twice as much as all the
bookkeeping of a short task.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from xpool._pickling.frame import Leased
from xpool._wire.outbox import Outbox
from xpool._wire.wire import (
    ANSWER,
    BODY_AGAIN,
    FAILED,
    FORGET,
    FUNC,
    FUNC_HEAD,
    GREETING,
    OUTBOX_MIXED,
    READY,
    SKIPPED,
    TO_PARENT,
    U64,
    WIRE,
    Parts,
    Refusal,
)

SILENCE = 0.001
"""Seconds that a finished answer may lie in the outbox while the worker runs other tasks."""

SMALL = 16 * 1024
"""In bytes.  A larger answer goes through the pipe at once."""


class Replies:
    """Sends answers: into the outbox while the worker has more tasks, through the pipe at the end.

    ``write(parts)`` sends a frame; ``clock()`` returns the time in seconds.
    """

    small = SMALL
    silent = False
    """Whether this process is a child that a task has forked: its parent answers."""

    def __init__(
        self, box: Outbox, write: Callable[[Parts], object], clock: Callable[[], float]
    ) -> None:
        self.box = box
        self._write, self._clock = write, clock
        self._count = 0  # answers in the outbox of which the parent has not been told
        self._errors = 0
        self._sent = 0  # messages
        # Answers with blocks and their numbers, kept until the parent holds the blocks.
        self.kept: deque[tuple[int, Leased]] = deque()
        self._leased = 0
        self._since = clock()  # when the first of the untold answers was begun
        self._rung = self._since

    def fall_silent(self) -> None:
        """Send nothing from now on, in a forked child; the process ends where it would answer."""
        self.silent, self._count, self._write = True, 0, _end
        self.small = -1  # no answer is short: each goes to `_write`
        self.box.part()  # last: memory may be short

    def _head(self, kind: int, errors: int, size: int, count: int, nanos: int) -> bytes:
        self._sent = number = (self._sent + 1) % 2**32
        return TO_PARENT.pack(number, kind, errors, size, count, self.box.tail, nanos)

    def _frame(self, kind: int, body: bytes | memoryview, count: int = 0) -> None:
        self._write([self._head(kind, 0, len(body), count, 0), body])

    def ready(self, mapped: bool) -> None:
        """Tell the parent to send tasks; ``mapped``: their buffers may lie in the arena."""
        self.box.begin_turn(self._clock())
        self._frame(READY, GREETING.pack(WIRE, mapped))

    def refuse(self, refusal: Refusal) -> None:
        self._frame(FAILED, refusal.packed())

    def begin(self) -> None:
        """Note the time before the first task of a frame: the wait for the frame does not count."""
        if not self._count:
            self._since = now = self._clock()
            self.box.begin_turn(now)

    def answer(self, payload: bytes | memoryview, error: int, last: bool) -> None:
        """Answer the current task; ``last``: the next one has not arrived yet.

        ``error``: 0, or `BODY_ERROR`, with `BODY_AGAIN` if the task may be tried again.
        """
        leased = type(payload) is Leased
        if leased:
            self._leased += 1
            self.kept.append((self._leased, payload))  # type: ignore[arg-type]
        if self.kept:
            self.forget_adopted()
        # An answer goes into the outbox only if others follow soon.  If the task may be tried
        # again, the answer goes through the pipe: an entry of the outbox has one bit for errors
        # (`ERROR_BIT`), and none for `BODY_AGAIN`.
        if (
            not last
            and len(payload) <= self.small
            and error < BODY_AGAIN
            and self.box.append(payload, error)
        ):
            self._count += 1
            if error or leased:
                self._errors = OUTBOX_MIXED
            if self._clock() - self._rung > SILENCE:
                self.ring()
        else:
            self.ring(payload, error)

    def forget_adopted(self) -> None:
        """Release the answers whose blocks the parent holds."""
        adopted, kept = self.box.adopted, self.kept
        while kept and kept[0][0] <= adopted:
            kept.popleft()

    def ring(self, payload: bytes | memoryview = b"", error: int = 0) -> None:
        """Tell the parent how many answers are in the outbox; send ``payload``, one more answer."""
        if not self._count and not payload:
            return
        now = self._clock()
        nanos = int((now - self._since) * 1e9)
        head = self._head(ANSWER, self._errors | error, len(payload), self._count, nanos)
        self._count = self._errors = 0
        self._since = self._rung = now
        self.box.begin_turn(now)
        self._write([b"".join((head, payload))] if len(payload) < self.small else [head, payload])

    def skip(self, n: int) -> None:
        """Tell the parent that ``n`` items were not begun, as it asked."""
        # Answers are matched by their order.  Those in the outbox belong to earlier items.
        self.ring()
        self._frame(SKIPPED, b"", n)


def _end(parts: Parts) -> None:
    """End a forked child, whose parent sends the answer."""
    raise SystemExit(0)


class Inbox:
    """Handles the parent's messages: functions, and items to run.

    Args:
        learn: makes the entry for a function from its number, mode and pickle.
        withdrawn: the entry in place of a function that was forgotten.
    """

    def __init__(
        self, replies: Replies, learn: Callable[[int, int, bytes], Any], withdrawn: Any
    ) -> None:
        self.functions: dict[int, Any] = {}
        self._replies = replies
        self._learn = learn
        self._withdrawn = withdrawn
        self._seq = 0  # number of the next item, among all that were ever sent

    def take(self, kind: int, body: bytes | memoryview) -> bool:
        """Handle a message about functions; return whether it was one."""
        if kind == FUNC:
            number, mode = FUNC_HEAD.unpack_from(body)
            self.functions[number] = self._learn(number, mode, bytes(body[FUNC_HEAD.size :]))
        elif kind == FORGET:
            for (number,) in U64.iter_unpack(body):
                self.functions.pop(number, None)
        else:
            return False
        return True

    def items(
        self, count: int, body: bytes | memoryview
    ) -> Iterator[tuple[Any, bytes | memoryview, bool]]:
        """Begin the items of a TASKS or TIMED frame, each when the generator is resumed for it.

        Yields the entry of the item's function (None: a call, whose payload has the function), the
        payload, and whether the item is the last.  Items that the parent does not want begun are
        answered as skipped.
        """
        sizes = struct.unpack_from(f"<{count + 1}Q", body)
        at = 8 * (count + 1)
        number = sizes[0]
        functions, enter = self.functions, self._replies.box.enter
        self._replies.begin()
        for k in range(1, count + 1):
            seq = self._seq
            # All later items of the message are above the limit, too.  They keep their numbers.
            if not enter(seq):
                self._seq += count + 1 - k
                self._replies.skip(count + 1 - k)
                return
            self._seq = seq + 1
            stop = at + sizes[k]
            # Look it up for each item: the first item unpickles the function and replaces it.
            func = functions.get(number, self._withdrawn) if number else None
            yield func, body[at:stop] if count > 1 else body[at:], k == count
            at = stop
