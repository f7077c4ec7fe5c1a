"""What the engine's thread waits for: descriptors, timers, and wake-ups."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Any

from xpool._engine.jobs.waiting import TimeQueue

MOST_WAIT_SECONDS = 86400.0
"""Longest wait: epoll counts milliseconds in 31 bits, and a timer may be later."""

_IN, _OUT = select.POLLIN, select.POLLOUT  # epoll's numbers are the same
_epoll: Any = getattr(select, "epoll", None)

# Makes an object that closes a descriptor when it goes, in C code.  A finalizer in Python may run
# in the main thread, and would not close it if a signal handler raised there.
_owner: Any = getattr(_epoll or getattr(select, "kqueue", None), "fromfd", os.fdopen)


class _Bell:
    """A pipe, which any thread rings without a lock, and so a finalizer, too.

    It is closed when no thread refers to it.  Otherwise a thread that rings could write to another
    file, which has got the descriptor's number meanwhile.
    """

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        self._owners = _owner(self.fd), _owner(self._write)
        # Non-blocking: a finalizer must not wait for room.
        for fd in self.fd, self._write:
            os.set_blocking(fd, False)

    def ring(self) -> None:
        try:
            os.write(self._write, b"!")
        except BlockingIOError:
            return  # earlier rings are still unread


class _Poll:
    """The interface of epoll for systems that have only poll.  A wait of poll does not see changes,
    so each change wakes it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._poll = select.poll()
        self._wake = wake

    def register(self, fd: int, events: int) -> None:
        self._poll.register(fd, events)
        self._wake()

    def modify(self, fd: int, events: int) -> None:
        self._poll.modify(fd, events)
        self._wake()

    def unregister(self, fd: int) -> None:
        # No wake-up: an event that the poller still reports has no handler and is ignored.
        self._poll.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        # poll takes milliseconds, epoll takes seconds.
        return self._poll.poll(None if timeout is None else timeout * 1000)

    def close(self) -> None:
        """Do nothing: poll has no descriptor."""


class Timer:
    """A call to be made at a certain time.  Guarded by the engine's lock."""

    __slots__ = ("_args", "_call", "when")

    def __init__(self, when: float, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.when = when
        self._call: Callable[..., object] | None = call
        self._args = args

    @property
    def pending(self) -> bool:
        return self._call is not None

    def cancel(self) -> None:
        # The entry stays in the heap until its time: a search in the heap would cost more.
        self._call, self._args = None, ()

    def run(self) -> None:
        call, args = self._call, self._args
        self.cancel()  # first, so that the call may set the timer again
        if call is not None:
            call(*args)


class Reactor:
    """Descriptors and timers with their handlers.  Guarded by the engine's lock, except `poll` and
    `wake`; a change takes effect on a `poll` in progress."""

    def __init__(self) -> None:
        self._bell: _Bell | None = (bell := _Bell())
        self._bell_fd = bell.fd
        self._epoll: Any = _Poll(self.wake) if _epoll is None else _epoll()
        self._epoll.register(bell.fd, _IN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: TimeQueue[Timer] = TimeQueue()
        self.closed = False

    def now(self) -> float:
        """Return the time in seconds, by the clock of the timers.

        The engine uses no other clock, so a simulated world can supply one.
        """
        return time.monotonic()

    def __contains__(self, fd: int) -> bool:
        return fd in self._handlers

    def add(self, fd: int, handler: Callable[[int], None], *, writable: bool = False) -> None:
        """Have ``handler(fd)`` called when the descriptor is ready."""
        # Register first: the system may refuse.  `handle` runs under the lock, which is held here.
        self._epoll.register(fd, _OUT if writable else _IN)
        self._handlers[fd] = handler

    def remove(self, fd: int) -> None:
        """Forget a descriptor, if it is known."""
        # Its owner closes it afterwards.  A closed descriptor's number may belong to another file.
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def mute(self, fd: int, muted: bool) -> None:
        """Report only a hang-up of this descriptor (``muted``), or all events again."""
        # EPOLLHUP and EPOLLERR are always reported (epoll_ctl(2)), so a death is seen.
        self._epoll.modify(fd, 0 if muted else _IN)

    def call_at(self, when: float, call: Callable[..., object], *args: Any) -> Timer:
        """Have ``call(*args)`` made at ``when``, by the engine's thread, with the lock held."""
        timer = Timer(when, call, args)
        if self._timers.put(when, timer):
            self.wake()
        return timer

    def run_timers(self) -> None:
        if (when := self._timers.next()) is None or (now := self.now()) < when:
            return
        # Run only these: a call that is due again at once must wait for the descriptors.
        for timer in self._timers.due(now):
            timer.run()

    def wake(self) -> None:
        """Make `poll` return.  Any thread calls this, with or without the lock."""
        bell = self._bell
        if bell is not None:
            bell.ring()

    def poll(self, timeout: float | None) -> list[int]:
        """Wait; return the descriptors that are ready.  Called by one thread."""
        # An earlier timer that is set after this read writes to the pipe, which ends the wait.
        when = self._timers.next()
        if when is not None:
            left = max(0.0, when - self.now())
            timeout = (
                min(left, MOST_WAIT_SECONDS)
                if timeout is None
                else min(left, timeout, MOST_WAIT_SECONDS)
            )
        return [fd for fd, _ in self._epoll.poll(timeout)]

    def handle(self, fd: int) -> None:
        """Call the handler of a descriptor; ignore one that was removed meanwhile."""
        if fd == self._bell_fd:
            os.read(fd, 512)
            return
        # The number may belong to another file by now, so a handler may find nothing to read.
        handler = self._handlers.get(fd)
        if handler is not None:
            handler(fd)

    def close(self) -> None:
        """Close all descriptors.  Called by the thread that polls, or when it has ended."""
        if not self.closed:
            self.closed = True
            # Breaks a cycle: timers refer to parts of the engine, which refer to the reactor.
            self._timers.clear()
            self._epoll.close()
            self._bell = None

    def after_fork_in_child(self) -> None:
        """Close the copy of the pipe; the epoll is shared with the parent."""
        self._bell = None


class Alarms:
    """One timer for each worker, all for one purpose: ``call(worker)``.

    The workers keep the timers and cancel them.  ``serving``: only workers that are not told to end
    have one.
    """

    def __init__(
        self, reactor: Reactor, call: Callable[[Any], object], *, serving: bool = True
    ) -> None:
        self._reactor, self._call = reactor, call
        self.serving = serving

    def schedule_by(self, worker: Any, when: float) -> None:
        """Have the call made at ``when``, or earlier if an earlier time is set."""
        timer = worker.timers.get(self)
        if timer is not None and timer.pending:
            if timer.when <= when:
                return
            timer.cancel()
        worker.timers[self] = self._reactor.call_at(when, self._call, worker)

    def pending(self, worker: Any) -> bool:
        timer = worker.timers.get(self)
        return timer is not None and timer.pending

    def cancel(self, worker: Any) -> bool:
        """Cancel the call; return whether it was to be made."""
        timer = worker.timers.pop(self, None)
        if timer is None or not timer.pending:
            return False
        timer.cancel()
        return True
