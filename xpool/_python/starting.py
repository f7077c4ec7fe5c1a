"""Starts threads without the wait with which CPython's `Thread.start` ends.

It also refuses programs in which threads are not those of the system, and keeps forked children of
the program from ending its processes.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from xpool._python.failures import XPoolError

_REAL = "thread", "threading", "socket", "select", "os"
"""Modules that a pool needs as they are: its threads wait in the system for descriptors."""

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


def spare_in_children(process: Any) -> None:
    """Have forked children of this process leave a process of `multiprocessing` alone.

    A child has a copy of the list of processes.  At its end, `multiprocessing` would send SIGTERM
    to each daemon in the list, also to those that the child's parent has started.
    """
    process.is_spared = True
    # The last registered function is called first: before that of `multiprocessing.util`, which
    # was registered when the process's pipe was made.
    atexit.unregister(_spare)
    atexit.register(_spare)


def _spare() -> None:
    # Not a hook of forks, because C code may have forked.
    children: set[Any] = vars(sys.modules["multiprocessing.process"])["_children"]
    for one in [*children]:
        if hasattr(one, "is_spared") and one._parent_pid != os.getpid():
            children.discard(one)


def refuse_green_threads() -> None:
    """Raise an error if gevent or eventlet has replaced modules that pools need.

    A thread of the pool would then be a greenlet of the caller's thread, and would never run while
    the caller waits.

    Raises:
        XPoolError: such a library has patched them.
    """
    for library, module, name in (
        ("gevent", "gevent.monkey", "is_module_patched"),
        ("eventlet", "eventlet.patcher", "is_monkey_patched"),
    ):
        is_patched: Any = getattr(sys.modules.get(module), name, None)
        patched = [one for one in _REAL if is_patched(one)] if is_patched else []
        if patched:
            raise XPoolError(
                f"{library} has patched {', '.join(patched)} in this program, so a pool's threads "
                "could not wait; do not call its monkey patching in a program that makes pools, or "
                "make them in another process"
            )
