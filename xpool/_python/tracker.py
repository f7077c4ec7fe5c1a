"""Lets a worker use the program's resource tracker, as the pools of `multiprocessing` do.

The tracker is a process of `multiprocessing` that unlinks named shared memory and semaphores when
all its users have ended.  If a worker had its own tracker, that would unlink memory to which the
worker has only attached.  `multiprocessing` starts the program's tracker before the first child,
but few programs need this additional process.  So a worker of xpool asks its parent for the tracker
when it first registers a resource, and the parent starts the tracker then.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from xpool._python import at_fork, descriptors


def ask_now() -> None:
    """Ask for the tracker, unless this was done.  Call this before a fork: a child cannot ask."""
    resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]  # noqa: B018 - it asks


class Borrowed(resource_tracker.ResourceTracker):
    """A tracker that asks for its descriptor when `_fd` is first read.  Every Python uses `_fd`."""

    _parent: int  # the descriptor of the socket for the request
    _ask: Callable[[socket.socket], int | None] | None = None  # None: the request was made
    _got: int | None = None
    _forking = 0  # the id of the thread that is in `os.fork`

    @property
    def _fd(self) -> int | None:
        if self._forking == threading.get_ident():
            return None  # makes the hook of `multiprocessing` do nothing: see `become`
        ask = self._ask
        if ask is not None:
            # The original stays open: its end tells the parent that this process has ended, if the
            # fork server is killed.  Two threads may ask at the same time: the answers are equal.
            with descriptors.on_copy(self._parent) as sock:
                self._got, self._ask = ask(sock), None
        return self._got

    @_fd.setter
    def _fd(self, fd: int | None) -> None:
        self._got, self._ask = fd, None

    @classmethod
    def become(cls, module: Any, parent: int, ask: Callable[[socket.socket], int | None]) -> None:
        """Make the tracker of `multiprocessing` ask for its descriptor when it is first used.

        ``ask`` gets a socket made of the descriptor ``parent``, and returns the descriptor of the
        program's tracker.  If ``ask`` returns None, this process starts its own tracker.
        """
        tracker = module._resource_tracker
        # The class's property takes priority over `_fd` in the instance's dict.
        tracker.__class__ = cls
        tracker._parent, tracker._ask = parent, ask
        if hasattr(module, "_fork_intent"):
            # From Python 3.14 on, a hook of `multiprocessing` closes the parent's tracker in a
            # child of `os.fork`.  The child would start its own tracker, which would unlink memory
            # to which the child has only attached.  The hook does nothing if `_fd` is None.
            # Hooks of a child run in the order of registration, so this one runs after it.
            def before() -> None:
                ask_now()  # first, because a child cannot ask
                tracker._forking = threading.get_ident()

            after = functools.partial(setattr, tracker, "_forking", 0)
            at_fork.at_fork(before=before, in_parent=after, in_child=after)
