"""Looking again for a moment before going to sleep.

To wake a sleeping process takes 25 us or more, and then its caches are cold: that is most of what a
short message costs.  So whoever waits for one that may come at once looks for it some more before
he sleeps.  Where that was in vain, he sleeps at once the next time, then the next 2, 4, ... `_MOST`
times: so who waits for longer every time spends a 17th of a processor at most.  Between two looks
any other process that wants the processor has it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from xpool._calls.options import default_processes

__all__ = ["Spin"]

_MOMENT = 300e-6
"""Seconds: longer than a short task takes, with its messages, where both sides sleep in between.
With less, two that sleep would go on: each look ends before the other, who slept, has answered."""

_MOST = 16

_Events = list[tuple[int, int]]

_give_way: Callable[[], Any] = getattr(os, "sched_yield", lambda: None)


class Spin:
    """How one place waits.  One thread at a time looks; those that come meanwhile sleep."""

    __slots__ = ("_free", "_left", "_skip")

    def __init__(self) -> None:
        # With one processor, nothing can happen while somebody looks.
        self._free = default_processes() > 1
        self._skip = 1  # how many waits go by without a look after one in vain
        self._left = 0  # how many of these are left

    def look(self, poll: Callable[[int], _Events]) -> _Events:
        """Call ``poll(0)`` until it returns something, for a moment or not at all; return that."""
        # No lock: two that come at the same moment both look, which costs little.  A signal handler
        # that comes into a look, and waits here too, sleeps at once.
        if not self._free:
            return []
        if self._left:
            self._left -= 1
            return []
        try:
            self._free = False
            until = time.perf_counter() + _MOMENT
            while not (found := poll(0)):
                if time.perf_counter() > until:
                    self._left = self._skip
                    self._skip = min(2 * self._skip, _MOST)
                    return []
                _give_way()
            self._skip = 1
            return found
        finally:
            self._free = True
