"""Channels between workers: made when one of the two asks, and handed to both.

Called with the engine's lock held.  A worker asks over its control, a socket of packets that the
parent and it have (docs/peers.md).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence

from xpool._engine.reactor import Reactor, Timer
from xpool._engine.worker import WorkerProcess
from xpool._wire.wire import LINK, WANTED

__all__ = ["Switchboard"]

PEER_WAIT_SECONDS = 1.0
"""Seconds that a worker whose peer is said to be dead has to be seen dead here too.  Then the peer
is given a channel anew: what has closed the old one was something else."""


class _Link:
    """A channel between two processes: its number, and the processes, by their generations."""

    def __init__(self, serial: int, ends: tuple[int, int]) -> None:
        self.serial, self.ends = serial, ends


class Switchboard:
    """Who of the workers of an engine has a channel to whom."""

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        reactor: Reactor,
        distrust: Callable[[WorkerProcess, Exception], object],
    ) -> None:
        self._workers, self._reactor = workers, reactor
        self._distrust = distrust  # what is done with a worker that sends an invalid message
        self._links: dict[tuple[int, int], _Link] = {}  # the last of each pair, lower index first
        self._serials = 0
        # Who asked for a channel to whom, and gets it with the peer's replacement, or then.
        self._waiting: dict[tuple[int, int], Timer] = {}

    def started(self, worker: WorkerProcess) -> None:
        """A process was started: it may ask, and who waits for it gets a channel."""
        assert worker.control is not None
        self._reactor.add(worker.control, lambda fd: self._read(worker, fd))
        for asker, peer in [pair for pair in self._waiting if pair[1] == worker.index]:
            self._connect(asker, peer)

    def ended(self, worker: WorkerProcess) -> None:
        """A process has ended: it waits for nobody."""
        assert worker.control is not None
        self._reactor.remove(worker.control)
        for pair in [pair for pair in self._waiting if pair[0] == worker.index]:
            self._forget(*pair)

    def _enough(self, asker: int, peer: int) -> None:
        """A worker has waited long enough; where the peer has no process, it gets one with that."""
        if self._workers[peer].handle is not None:
            self._connect(asker, peer, patient=False)

    def _wait(self, asker: int, peer: int) -> None:
        """Have a worker wait for a peer's replacement, as long as that may take to be there."""
        self._forget(asker, peer)
        when = self._reactor.now() + PEER_WAIT_SECONDS
        self._waiting[asker, peer] = self._reactor.call_at(when, self._enough, asker, peer)

    def _forget(self, asker: int, peer: int) -> None:
        timer = self._waiting.pop((asker, peer), None)
        if timer is not None:
            timer.cancel()

    def _read(self, worker: WorkerProcess, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, WANTED.size)
            except BlockingIOError:
                return
            # It has ended, and had not read all that was sent (unix_release_sock in af_unix.c).
            except ConnectionResetError:
                data = b""
            if not data:
                self._reactor.remove(fd)
                return
            try:
                peer, ended, known = WANTED.unpack(data)
                if not 0 <= peer < len(self._workers) or peer == worker.index:
                    raise ValueError(f"worker {worker.index} wants a channel to {peer}")
            except (struct.error, ValueError) as exc:
                self._reactor.remove(fd)
                self._distrust(worker, exc)
                return
            self._connect_or_wait(worker, peer, ended, known)

    def _connect_or_wait(self, worker: WorkerProcess, peer: int, ended: int, known: int) -> None:
        """A worker wants a channel; it knows of those up to ``known``; ``ended``: that has."""
        pair = min(worker.index, peer), max(worker.index, peer)
        other = self._workers[peer]
        link = self._links.get(pair)
        # A replacement has another generation: the channel to its predecessor is no channel to it.
        current = link is not None and link.ends == self._ends(pair)
        if link is not None and current and link.serial > known:
            return  # it is on its way
        # Its death may not have been seen here: a new channel would lead to the dead process.
        if other.handle is None or (current and ended):
            self._wait(worker.index, peer)
        else:
            self._connect(worker.index, peer)

    def _ends(self, pair: tuple[int, int]) -> tuple[int, int]:
        return self._workers[pair[0]].generation, self._workers[pair[1]].generation

    def _connect(self, asker: int, peer: int, patient: bool = True) -> None:
        """Make a channel and hand its ends to both.

        ``patient``: where the peer has ended, which has not been seen here, wait for the next one.
        """
        # One channel serves both: whoever else waits for the same pair has it, too.
        self._forget(asker, peer)
        self._forget(peer, asker)
        self._serials += 1
        try:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as exc:
            self._refuse(asker, peer, exc)
            return
        # The ends kept here close when they are handed on: else none would see the other's death.
        with ends[0], ends[1]:
            try:
                # The asker last: it is told when the other cannot have its end.
                try:
                    self._hand(peer, asker, ends[1])
                except ConnectionError:
                    if not patient:
                        raise
                    self._wait(asker, peer)
                    return
                self._hand(asker, peer, ends[0])
            except OSError as exc:
                self._refuse(asker, peer, exc)
                return
        pair = min(asker, peer), max(asker, peer)
        self._links[pair] = _Link(self._serials, self._ends(pair))

    def _hand(self, worker: int, peer: int, end: socket.socket) -> None:
        fd = self._workers[worker].control
        if fd is None:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        # Borrowed for the call: the worker owns the descriptor, which `detach` leaves open.
        control = socket.socket(fileno=fd)
        try:
            socket.send_fds(control, [LINK.pack(peer, 0, self._serials)], [end.fileno()])
        finally:
            control.detach()

    def _refuse(self, asker: int, peer: int, exc: OSError) -> None:
        control = self._workers[asker].control
        try:
            if control is not None:
                # The reason, in the place of a descriptor: else the asker would wait for ever.
                os.write(control, LINK.pack(peer, exc.errno or errno.EIO, self._serials))
        except OSError:
            return  # it has ended, or reads nothing: then it does not wait either
