"""Polls for a moment before a thread sleeps.

Waking a sleeping process takes 25 us or more, and its caches are cold.  This is most of the cost of
a short message.  So a thread that may soon get a message polls for it before it sleeps.  If the
poll finds nothing, the next wait sleeps without polling.  If later polls find nothing either, the
next 2, 4, ... `_MOST` waits do.  So a thread whose waits are all long spends at most a 17th of a
processor on polling.  Between two polls, the thread offers the processor to other processes.  If
one takes it for long, the machine is busy: the offer has cost a time slice, 3 ms, in which an
answer waits.  A thread that sleeps gets the processor when its message comes, so the next `_LONG`
waits sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from xpool._memory.system import default_processes

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
    """Polls for one place that waits.  One thread at a time polls, and the others sleep."""

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
            while not (found := poll(0)):
                if now - begin > _MOMENT:
                    self._left = self._skip
                    self._skip = min(2 * self._skip, _MOST)
                    return []
                _give_way()
                before, now = now, time.perf_counter()
                if now - before > _AWAY:
                    self._left = _LONG
                    return poll(0)
            self._skip = 1
            return found
        finally:
            self._free = True
