"""Ctrl-C and the engine's books: `KeyboardInterrupt` waits until they are in order.

Python raises `KeyboardInterrupt` in the main thread between any two instructions.  If that thread
is just writing a task to a worker, what was written and what is noted as written would differ, and
a later `get` could wait for ever.  Locks do not help.  So, as trio does, xpool puts a handler of
its own in the place of Python's default one (of no other): when the interrupt comes inside a
function marked `uninterrupted`, it is raised a moment later.  These functions never wait and never
run a user's code, so the moment is short.

In a worker the same holds for the signal that breaks a task off (`xpool.worker.stopping`).
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

__all__ = ["install", "postponed", "uninterrupted"]

F = TypeVar("F", bound=Callable[..., object])

_marked: set[CodeType] = set()


def uninterrupted(func: F) -> F:
    """Mark a function that `KeyboardInterrupt` must not cut short; costs nothing per call."""
    _marked.add(func.__code__)
    return func


def install() -> None:
    """Replace Python's default SIGINT handler, if that is what is in place.

    Only the main thread can do that; a pool made in another is served by those made before.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _handler)


def postponed(signum: int, frame: FrameType | None) -> bool:
    """For a signal handler that raises: whether it came where it may not.

    Then the main thread gets the signal once more, a moment later.
    """
    while frame is not None:
        if frame.f_code in _marked:
            _thread.start_new_thread(_again, (signum,))
            return True
        frame = frame.f_back
    return False


def _handler(signum: int, frame: FrameType | None) -> None:
    if not postponed(signum, frame):
        signal.default_int_handler(signum, frame)


def _again(signum: int) -> None:
    time.sleep(0.001)  # not to wait for anything: to let the main thread run on
    # A signal, and not `interrupt_main`: it must also end a wait that has begun meanwhile.
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signum)
