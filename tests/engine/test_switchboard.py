"""Requests for channels to a worker that has ended, before the parent has noticed it."""

from __future__ import annotations

import errno
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from xpool._engine.switchboard import PEER_WAIT_SECONDS, Switchboard
from xpool._wire.wire import LINK, WANTED


class Clock:
    """A fake `Reactor` whose handlers and timers the test calls."""

    def __init__(self) -> None:
        self.time = 0.0
        self.handlers: dict[int, Any] = {}
        self.timers: list[Any] = []

    def now(self) -> float:
        return self.time

    def add(self, fd: int, call: Any) -> None:
        self.handlers[fd] = call

    def remove(self, fd: int) -> None:
        self.handlers.pop(fd, None)

    def call_at(self, when: float, call: Any, *args: Any) -> Any:
        timer = SimpleNamespace(when=when, call=lambda: call(*args), on=True)
        timer.cancel = lambda: setattr(timer, "on", False)
        self.timers.append(timer)
        return timer

    def go_on(self, seconds: float) -> None:
        self.time += seconds
        due = [timer for timer in self.timers if timer.on and timer.when <= self.time]
        for timer in due:
            timer.on = False
            timer.call()


class Worker:
    """A slot, and the worker's end of its control socket."""

    def __init__(self, index: int) -> None:
        self.slot: Any = SimpleNamespace(index=index, generation=0)
        self.start()

    def start(self) -> None:
        ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.end.setblocking(False)
        self.slot.control, self.slot.handle = ours.detach(), object()
        self.slot.generation += 1

    def answer(self) -> tuple[int, int] | None:
        """Return the peer and the error of the parent's answer, or None if there is none."""
        try:
            data, fds, _, _ = socket.recv_fds(self.end, LINK.size, 1)
        except BlockingIOError:
            return None
        for fd in fds:
            socket.close(fd)
        peer, error, _ = LINK.unpack(data)
        return peer, error


@pytest.fixture
def workers() -> Any:
    made = [Worker(index) for index in range(2)]
    yield made
    for one in made:
        one.end.close()
        socket.close(one.slot.control)


@pytest.fixture
def clock(workers) -> Any:
    """Worker 1 has closed its control socket. Worker 0 asks for a channel to it."""
    clock: Any = Clock()
    clock.board = board = Switchboard([one.slot for one in workers], clock, pytest.fail)
    for one in workers:
        board.started(one.slot)
    workers[1].end.close()
    workers[0].end.send(WANTED.pack(1, 0, 0))
    clock.handlers[workers[0].slot.control](workers[0].slot.control)
    return clock


def test_the_replacement_gets_the_channel(clock, workers):
    """The worker that asked gets no answer until the replacement has started."""
    assert workers[0].answer() is None
    old = workers[1].slot.control
    clock.board.ended(workers[1].slot)
    socket.close(old)
    workers[1].start()
    clock.board.started(workers[1].slot)
    assert workers[0].answer() == (1, 0)
    assert workers[1].answer() == (0, 0)
    clock.go_on(2 * PEER_WAIT_SECONDS)
    assert workers[0].answer() is None


def test_a_closed_control_socket(clock, workers):
    """If a living worker has closed its control socket, the worker that asked gets an error."""
    clock.go_on(2 * PEER_WAIT_SECONDS)
    assert workers[0].answer() == (1, errno.EPIPE)
