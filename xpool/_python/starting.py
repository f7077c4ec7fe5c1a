"""Starts threads without the wait with which CPython's `Thread.start` ends."""

from __future__ import annotations

import threading
from typing import Any


def _wait_no_more(timeout: float | None = None) -> bool:
    return True


class PromptThread(threading.Thread):
    """A thread whose `start` returns when the system has made it.

    The usual `start` waits until the thread has run, so the interpreter lock goes to the thread and
    back.  Until this one has run, its `ident` is None, and `is_alive` returns false.
    """

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._started: Any  # `start` waits for it; others only ask whether it is set
        self._started.wait = _wait_no_more
