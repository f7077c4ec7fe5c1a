"""Lets a worker use the program's resource tracker, as `multiprocessing`'s own pools do.

The tracker is a process of `multiprocessing` that unlinks named shared memory and semaphores when
all its users have ended.  A worker with a tracker of its own would unlink memory that it has only
attached to.  `multiprocessing` starts the program's tracker before the first child and passes it
on: an additional Python process, which few programs need.  Here a worker asks its parent for the
tracker when it first registers something, and the parent starts it then.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.resource_tracker import ResourceTracker
from typing import Any

from xpool._python import at_fork


def ask_now() -> None:
    """Ask for the tracker, unless it was done.  For use before a fork: the child cannot ask."""
    from multiprocessing.resource_tracker import _resource_tracker

    _resource_tracker._fd  # type: ignore[attr-defined]  # noqa: B018 - asking is what it is for


class Borrowed(ResourceTracker):
    """A tracker that asks for its descriptor (in `_fd`, in every Python) when it is first used."""

    _parent = -1  # the socket for the request; -1: the request was made
    _ask: Callable[[socket.socket], int | None]
    _got: int | None = None
    _forking = 0  # the id of the thread in `os.fork`

    @property
    def _fd(self) -> int | None:
        if self._forking == threading.get_ident():
            return None  # for the class's own hook: see `become`
        if self._parent >= 0:
            # Other processes with this socket may ask at the same time: the answers are equal.
            # The socket object closes the copy, `_close` the original.
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
        """Make the tracker of `multiprocessing` ask for its descriptor when it is first used.

        ``ask`` gets a socket, of the descriptor ``parent``, and returns the descriptor of the
        program's tracker; after None, this process starts its own tracker.
        """
        tracker = module._resource_tracker
        # A property is a data descriptor: it has priority over `_fd` in the instance's dict.
        tracker.__class__ = cls
        tracker._parent, tracker._ask = parent, ask
        if hasattr(module, "_fork_intent"):
            # From Python 3.14 on, a child of `os.fork` closes its parent's tracker and starts its
            # own, which would unlink memory that the child has only attached to.  A hook that
            # `multiprocessing` has registered does it; it does nothing if `_fd` is None.  Hooks in
            # a child run in the order of registration, so this one after that.
            at_fork.at_fork(
                before=lambda: setattr(tracker, "_forking", threading.get_ident()),
                in_parent=lambda: setattr(tracker, "_forking", 0),
                in_child=lambda: setattr(tracker, "_forking", 0),
            )
