"""What the engine's thread waits on: descriptors, timers, and a call to look again."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Alarms", "Reactor", "Timer"]


MOST_WAIT_SECONDS = 86400.0
"""Seconds of one wait: epoll counts milliseconds in 31 bits, and a timer may be further away."""

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
        # No nudge: what the poller still sees of it has no handler, and is passed by.
        self._poll.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        # poll takes milliseconds, epoll takes seconds.
        return self._poll.poll(None if timeout is None else timeout * 1000)

    def close(self) -> None:
        """Nothing is held."""


class Timer:
    """A call that is to be made at a time.  Guarded by the engine's lock."""

    __slots__ = ("_args", "_call", "when")

    def __init__(self, when: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.when = when
        self._call: Callable[..., object] | None = call
        self._args = args

    @property
    def pending(self) -> bool:
        """Whether it was neither made nor cancelled."""
        return self._call is not None

    def cancel(self) -> None:
        """Never make the call; it may have been made."""
        # The entry stays in the heap until its time: to look for it would cost more.
        self._call, self._args = None, ()

    def run(self) -> None:
        """Make the call, unless it was cancelled."""
        call, args = self._call, self._args
        self.cancel()  # first, so that the call may set the timer anew
        if call is not None:
            call(*args)


class Reactor:
    """Descriptors and times, and what to do when they have come.  Guarded by the engine's lock,
    except `poll` and `nudge`; a change takes effect on a `poll` that is under way."""

    def __init__(self) -> None:
        self._epoll: Any = _Poll(self.nudge) if _epoll is None else _epoll()
        self._wake_r, self._wake_w = os.pipe()
        # Non-blocking: `nudge` may run in a finalizer, which must not wait for room.
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)
        self._epoll.register(self._wake_r, _IN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        # Timers by time; the number keeps two of one time in their order.
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._next: float | None = None  # the first of these times; `poll` reads it without lock
        self.closed = False

    def now(self) -> float:
        """Return the time in seconds, by the clock that timers are set by.

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
        # Its owner closes it after this, never before: the number may be another file's at once.
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def mute(self, fd: int, muted: bool) -> None:
        """Let nothing but a hang-up of this descriptor be seen, or all again."""
        # EPOLLHUP and EPOLLERR come all the same (epoll_ctl(2)): a death is always seen.
        self._epoll.modify(fd, 0 if muted else _IN)

    def call_at(self, when: float, call: Callable[..., object], *args: Any) -> Timer:
        """Have ``call(*args)`` made at ``when``, by the engine's thread, with the lock held."""
        timer = Timer(when, call, args)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        if self._next is None or when < self._next:
            self._next = when
            self.wake()
        return timer

    def run_timers(self) -> None:
        """Make the calls whose time has come."""
        if self._next is None or (now := self.now()) < self._next:
            return
        due = []
        while self._timers and self._timers[0][0] <= now:
            due.append(heapq.heappop(self._timers)[2])
        self._next = self._timers[0][0] if self._timers else None
        # Only these: a call that is due again at once has to wait for the descriptors' turn.
        for timer in due:
            timer.run()

    def wake(self) -> None:
        """Make `poll` return."""
        # Under the lock, as `close`: after that, the number may be another file's.
        if not self.closed:
            self.nudge()

    def nudge(self) -> None:
        """As `wake`, for those who hold no lock and know that this is open."""
        try:
            os.write(self._wake_w, b"!")
        except BlockingIOError:
            return  # the last ones have not been seen yet

    def poll(self, timeout: float | None) -> list[int]:
        """Wait; return the descriptors that are ready.  Called by one thread."""
        # A sooner timer that is set after this look writes to the pipe: the wait returns at once.
        when = self._next
        if when is not None:
            left = max(0.0, when - self.now())
            timeout = (
                min(left, MOST_WAIT_SECONDS)
                if timeout is None
                else min(left, timeout, MOST_WAIT_SECONDS)
            )
        return [fd for fd, _ in self._epoll.poll(timeout)]

    def handle(self, fd: int) -> None:
        """Do what is to be done for a descriptor; one that was removed meanwhile is passed by."""
        if fd == self._wake_r:
            os.read(fd, 512)
            return
        # The number may have been given to another since the wait: each handler may find nothing.
        handler = self._handlers.get(fd)
        if handler is not None:
            handler(fd)

    def close(self) -> None:
        """Let go of the descriptors."""
        if not self.closed:
            self.closed = True
            # Their calls hold the parts of the engine, and these hold the reactor.
            self._timers.clear()
            self._epoll.close()
            os.close(self._wake_r)
            os.close(self._wake_w)


class Alarms:
    """One timer for each worker, all for one purpose: ``call(worker)``.

    The timers are kept by the workers, which cancel them.  ``serving``: only a worker that was not
    told to end has one.
    """

    def __init__(
        self, reactor: Reactor, call: Callable[[Any], object], *, serving: bool = True
    ) -> None:
        self._reactor, self._call = reactor, call
        self.serving = serving

    def schedule_by(self, worker: Any, when: float) -> None:
        """Have the call made at ``when``, or sooner where that is set already."""
        timer = worker.timers.get(self)
        if timer is not None and timer.pending:
            if timer.when <= when:
                return
            timer.cancel()
        worker.timers[self] = self._reactor.call_at(when, self._call, worker)

    def pending(self, worker: Any) -> bool:
        """Whether the call is to be made."""
        timer = worker.timers.get(self)
        return timer is not None and timer.pending

    def cancel(self, worker: Any) -> bool:
        """Do not make the call; return whether it was to be made."""
        timer = worker.timers.pop(self, None)
        if timer is None or not timer.pending:
            return False
        timer.cancel()
        return True
