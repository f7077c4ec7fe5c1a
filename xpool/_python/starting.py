"""Starts threads without the wait with which CPython's `Thread.start` ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_made: dict[threading.Thread, threading.Thread] = vars(threading)["_limbo"]
"""Threads that the system has made and that have not run yet; a forked child's are none."""


def _wait_no_more(timeout: float | None = None) -> bool:
    return True


class PromptThread(threading.Thread):
    """A thread whose `start` returns when the system has made it.

    The usual `start` waits until the thread has run, so the interpreter lock goes to the thread and
    back.  Until this one has run, its `ident` is None.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._started: Any  # `start` waits for it; others only ask whether it is set
        self._started.wait = _wait_no_more

    def is_alive(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self in _made or super().is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends, at most ``timeout`` seconds.

        `Thread.join` refuses a thread that has not run yet as one that was not started.
        """
        if self in _made:
            begun = time.monotonic()
            if not threading.Event.wait(self._started, timeout):
                return
            if timeout is not None:
                timeout -= time.monotonic() - begun
        super().join(timeout)


def aside(call: Callable[[], object], name: str) -> bool:
    """Have ``call()`` made by a thread of its own; return False if the system refuses a thread.

    For work that may wait, while the caller holds a lock.
    """
    try:
        PromptThread(target=call, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True
