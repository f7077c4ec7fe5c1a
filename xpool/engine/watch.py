"""What the engine's thread waits on: descriptors, a clock, and a call to look again."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Watch"]


_IN, _OUT = select.POLLIN, select.POLLOUT  # epoll's numbers are the same
_epoll: Any = getattr(select, "epoll", None)


class _Poll:
    """What is used of epoll, for systems that have only poll: there a change must wake the poller,
    which sees it at the next turn."""

    def __init__(self, nudge: Callable[[], None]) -> None:
        self._poll = select.poll()
        self._nudge = nudge

    def register(self, fd: int, events: int) -> None:
        self._poll.register(fd, events)
        self._nudge()

    def modify(self, fd: int, events: int) -> None:
        self._poll.modify(fd, events)
        self._nudge()

    def unregister(self, fd: int) -> None:
        self._poll.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        return self._poll.poll(None if timeout is None else timeout * 1000)

    def close(self) -> None:
        """Nothing is held."""


class Watch:
    """Descriptors and what to do when they are ready.  Guarded by the engine's lock, except
    `poll` and `nudge`; a change takes effect on a `poll` that is under way."""

    def __init__(self) -> None:
        self._epoll: Any = _Poll(self.nudge) if _epoll is None else _epoll()
        self._wake_r, self._wake_w = os.pipe()
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)
        self._epoll.register(self._wake_r, _IN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._alarm: float | None = None
        self._closed = False

    def now(self) -> float:
        """Return the time in seconds, by the clock that alarms are set by.

        The engine has no other: a simulated world gives it one of its own.
        """
        return time.monotonic()

    def __contains__(self, fd: int) -> bool:
        return fd in self._handlers

    def add(self, fd: int, handler: Callable[[int], None], *, writable: bool = False) -> None:
        """Have ``handler(fd)`` called when the descriptor is ready."""
        # First, since the system may refuse.  Handlers are looked up under the lock that we have.
        self._epoll.register(fd, _OUT if writable else _IN)
        self._handlers[fd] = handler

    def remove(self, fd: int) -> None:
        """Forget a descriptor, if it is known."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def mute(self, fd: int, muted: bool) -> None:
        """Let nothing but a hang-up of this descriptor be seen, or all again."""
        self._epoll.modify(fd, 0 if muted else _IN)

    def alarm(self, when: float) -> bool:
        """Have `poll` return at ``when`` at the latest; False when it would anyway."""
        if self._alarm is not None and self._alarm <= when:
            return False
        self._alarm = when
        self.wake()
        return True

    def rung(self) -> bool:
        """Whether the alarm has gone off; it is set no more, then."""
        if self._alarm is None or self.now() < self._alarm:
            return False
        self._alarm = None
        return True

    def wake(self) -> None:
        """Make `poll` return."""
        if not self._closed:
            self.nudge()

    def nudge(self) -> None:
        """As `wake`, for those who hold no lock and know that this is open."""
        try:
            os.write(self._wake_w, b"!")
        except BlockingIOError:
            return  # the last ones have not been seen yet

    def poll(self, timeout: float | None) -> list[int]:
        """Wait; return the descriptors that are ready.  Called by one thread."""
        if self._alarm is not None:
            left = max(0.0, self._alarm - self.now())
            timeout = left if timeout is None else min(left, timeout)
        return [fd for fd, _ in self._epoll.poll(timeout)]

    def handle(self, fd: int) -> None:
        """Do what is to be done for a descriptor; one that was removed meanwhile is passed by."""
        if fd == self._wake_r:
            os.read(fd, 512)
            return
        handler = self._handlers.get(fd)
        if handler is not None:
            handler(fd)

    def close(self) -> None:
        """Let go of the descriptors."""
        if not self._closed:
            self._closed = True
            self._epoll.close()
            os.close(self._wake_r)
            os.close(self._wake_w)
