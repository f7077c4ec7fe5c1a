"""The resource tracker of a worker is that of the program, as with `multiprocessing`'s own pools.

The tracker is a process of `multiprocessing` that unlinks named shared memory and semaphores when
all who use it have ended.  A worker with one of its own would unlink what it has only attached to.
`multiprocessing` starts the program's before the first child and hands it on; that is a Python
process for every program, which few need.  Here a worker asks its parent for the tracker when
something is first registered, and the parent starts it then.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.resource_tracker import ResourceTracker
from typing import Any

from xpool._python import at_fork

__all__ = ["Borrowed", "ask_now"]


def ask_now() -> None:
    """Ask for the tracker if that has not been done: before a fork, whose child cannot."""
    from multiprocessing.resource_tracker import _resource_tracker

    _resource_tracker._fd  # type: ignore[attr-defined]  # noqa: B018 - asking is what it is for


class Borrowed(ResourceTracker):
    """A tracker whose descriptor, which every version of the class keeps in `_fd`, is asked for."""

    _parent = -1  # the socket on which to ask; -1: that has been done
    _ask: Callable[[socket.socket], int | None]
    _got: int | None = None
    _forking = 0  # the thread that is in `os.fork`

    @property
    def _fd(self) -> int | None:
        if self._forking == threading.get_ident():
            return None  # asked by the class's own hook: see `become`
        if self._parent >= 0:
            # Other processes that have the socket may ask at the same time: the answers are equal.
            # Of a copy: the socket object closes what it has, and `_close` the original.
            with socket.socket(fileno=os.dup(self._parent)) as sock:
                self._got = self._ask(sock)
            self._close()
        return self._got

    @_fd.setter
    def _fd(self, fd: int | None) -> None:
        self._got = fd
        self._close()

    def _close(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
            self._parent = -1

    @classmethod
    def become(cls, module: Any, parent: int, ask: Callable[[socket.socket], int | None]) -> None:
        """Have the tracker of `multiprocessing` asked for when it is needed.

        ``ask`` gets a socket, of the descriptor ``parent``, and returns the descriptor of the
        program's tracker; None: this process starts its own.
        """
        tracker = module._resource_tracker
        # A property is a data descriptor: it goes before the `_fd` in the instance's dict.
        tracker.__class__ = cls
        tracker._parent, tracker._ask = parent, ask
        if hasattr(module, "_fork_intent"):
            # From Python 3.14 on, a child of `os.fork` closes its parent's tracker and starts its
            # own, which would unlink what the child has only attached to.  The hook that does it
            # was registered with the class as it was; it does nothing where `_fd` is None.
            # Hooks in a child run in the order of their registration: this one later.
            at_fork.at_fork(
                before=lambda: setattr(tracker, "_forking", threading.get_ident()),
                in_parent=lambda: setattr(tracker, "_forking", 0),
                in_child=lambda: setattr(tracker, "_forking", 0),
            )
