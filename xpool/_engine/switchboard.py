"""Channels between workers: made when one of the two asks for it, and sent to both.

A worker asks through its control socket, which it shares with the parent (docs/peers.md).  Called
with the engine's lock held.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence

from xpool._engine.reactor import Reactor, Timer
from xpool._engine.worker_process import WorkerProcess
from xpool._python import descriptors
from xpool._wire.wire import LINK, WANTED

PEER_WAIT_SECONDS = 1.0
"""Seconds to wait for the end of a peer that a worker has reported dead.  If the peer still lives
then, both get a new channel: something else has closed the old one."""


class Switchboard:
    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        reactor: Reactor,
        distrust: Callable[[WorkerProcess, Exception], object],
    ) -> None:
        self._workers, self._reactor = workers, reactor
        self._distrust = distrust  # called for a worker that sends an invalid message
        # The latest of each pair, lower index first: its number, the generations of its processes.
        self._links: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {}
        self._serials = 0
        # Requests that wait for the peer's next process, by (asker, peer).  The timer ends a wait.
        self._waiting: dict[tuple[int, int], Timer] = {}

    def started(self, worker: WorkerProcess) -> None:
        """Listen to a new process, and connect it to the workers that wait for it."""
        assert worker.control is not None
        self._reactor.add(worker.control, lambda fd: self._read(worker, fd))
        for asker, peer in [pair for pair in self._waiting if pair[1] == worker.index]:
            self._connect(asker, peer)

    def ended(self, worker: WorkerProcess) -> None:
        """Stop listening to a process that has ended, and drop its requests."""
        assert worker.control is not None
        self._reactor.remove(worker.control)
        for pair in [pair for pair in self._waiting if pair[0] == worker.index]:
            self._forget(*pair)

    def _enough(self, asker: int, peer: int) -> None:
        """Connect a worker that has waited long enough, unless the peer has no process yet."""
        if self._workers[peer].handle is not None:
            self._connect(asker, peer, patient=False)

    def _wait(self, asker: int, peer: int) -> None:
        """Have a worker wait for the next process of a peer."""
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
            # The worker ended with unread data in its socket (unix_release_sock in af_unix.c).
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
        """Handle a request; the worker knows channel ``known``, which has closed if ``ended``."""
        pair = min(worker.index, peer), max(worker.index, peer)
        other = self._workers[peer]
        serial, ends = self._links.get(pair, (0, None))
        # A new process has another generation: the channel to its predecessor does not count.
        current = ends == self._ends(pair)
        if current and serial > known:
            return  # a newer channel was sent already
        # The peer may have died unnoticed: do not connect to a dead process.
        if other.handle is None or (current and ended):
            self._wait(worker.index, peer)
        else:
            self._connect(worker.index, peer)

    def _ends(self, pair: tuple[int, int]) -> tuple[int, int]:
        return self._workers[pair[0]].generation, self._workers[pair[1]].generation

    def _connect(self, asker: int, peer: int, patient: bool = True) -> None:
        """Make a channel and send its ends to both.

        ``patient``: if it turns out that the peer has ended, wait for its next process.
        """
        # One channel serves requests of both workers.
        self._forget(asker, peer)
        self._forget(peer, asker)
        self._serials += 1
        try:
            ends = descriptors.private_pair(socket.SOCK_SEQPACKET)
        except OSError as exc:
            self._refuse(asker, peer, exc)
            return
        # Close the sent ends here: otherwise neither worker would see the other one's death.
        with ends[0], ends[1]:
            try:
                # Send to the asker last: it is told if its peer cannot get an end.
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
        self._links[pair] = self._serials, self._ends(pair)

    def _hand(self, worker: int, peer: int, end: socket.socket) -> None:
        fd = self._workers[worker].control
        if fd is None:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        with descriptors.borrowed(fd, socket.SOCK_SEQPACKET) as control:
            socket.send_fds(control, [LINK.pack(peer, 0, self._serials)], [end.fileno()])

    def _refuse(self, asker: int, peer: int, exc: OSError) -> None:
        control = self._workers[asker].control
        try:
            if control is not None:
                # Send the reason without a descriptor: otherwise the asker would wait for ever.
                os.write(control, LINK.pack(peer, exc.errno or errno.EIO, self._serials))
        except OSError:
            return  # the worker has ended, or does not read, so it does not wait
