"""A child of the fork server, as its parent sees it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import struct
from collections.abc import Callable

from xpool._python import parents_only, sockets
from xpool._python.starting import aside
from xpool._worker import entry

_CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of unix(7): pid, uid, gid."""


class Forked:
    """A child of the fork server, watched through the socket on which the server reports.

    The server and the child have the other end, so the socket closes when both have ended.  The
    kernel adds the sender's pid to each packet: only the server may send reports, and the child may
    send only `entry.TRACKER`.
    """

    def __init__(
        self, status: int, live: set[int], why_no_fork: Callable[[], Exception | None]
    ) -> None:
        self.sentinel = status
        self._live, self._why_no_fork = live, why_no_fork
        self.problem: Exception | None = None
        self._called_off = False
        self.exitcode: int | None = None
        self._pid: int | None = None
        self._ended = False
        self._server: int | None = None  # the process that has sent the pid
        self._protocol_error: ValueError | None = None
        # Non-blocking: `ended` is called with the engine's lock held.
        os.set_blocking(status, False)

    @property
    def pid(self) -> int | None:
        if self._pid is None:
            self._read()
        return self._pid

    def _read(self) -> None:
        while not self._ended:
            try:
                data, sender = self._receive()
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # an answer of ours was not read; earlier packets can be read now
            if sender is None:
                self._ended = True  # the server ended first, so it cannot report the status
                if self._pid is None and not self._called_off and self.problem is None:
                    self.problem = self._why_no_fork()
            elif data[:1] == entry.REFUSED and self._pid is None and len(data) == 3:
                number = int.from_bytes(data[1:], "little")
                self.problem = OSError(number, f"fork() was refused: {os.strerror(number)}")
            elif data == entry.TRACKER:
                self._lend_tracker()
            elif len(data) != 8 or sender != (self._server or sender):
                self._protocol_error = ValueError(
                    f"process {sender} wrote {len(data)} bytes to the socket of the fork server"
                )
            elif self._pid is None:
                self._pid = int.from_bytes(data, "little", signed=True)
                self._server = sender
            else:
                self.exitcode = int.from_bytes(data, "little", signed=True)
                self._ended = True

    def _receive(self) -> tuple[bytes, int | None]:
        """Receive a packet; return it and the pid of its sender, None at the end of the socket."""
        with sockets.borrowed(self.sentinel, socket.SOCK_SEQPACKET) as sock:
            # One byte more than a report, to detect long packets.  The kernel drops descriptors.
            data, notes, _, _ = sock.recvmsg(9, socket.CMSG_SPACE(_CREDENTIALS.size))
        for level, kind, note in notes:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid: int = _CREDENTIALS.unpack(note)[0]
                return data, pid
        return data, None

    def _lend_tracker(self) -> None:
        # The engine's lock is held here, and the start of the tracker may wait.
        with parents_only.no_fork:
            status = parents_only.owned(os.dup(self.sentinel))
        if not aside(functools.partial(_send_tracker, status), "xpool-tracker"):
            _send_tracker(status, refused=True)

    def ended(self) -> bool:
        self._read()
        if self._protocol_error is not None:
            error, self._protocol_error = self._protocol_error, None
            raise error
        return self._ended

    def signal(self, signum: int) -> None:
        pid = self.pid
        self._read()
        if self._ended:
            return
        if pid is None:
            if signum == signal.SIGKILL:
                # The server may import for long before it sees this, so count the worker as ended.
                # If the server forks it meanwhile, it ends at its first line: its lifeline is cut.
                self._called_off = True
                with sockets.borrowed(self.sentinel, socket.SOCK_SEQPACKET) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
            return
        # The pid may belong to another process by now.  The server reports a death before it reaps
        # the child.  So if no report has come, the pidfd refers to our worker.
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return  # it has ended; or no descriptor is free, then only the lifeline can end it
        try:
            self._read()
            if not self._ended:
                signal.pidfd_send_signal(fd, signum)
        except (ProcessLookupError, PermissionError):
            return  # it has ended, or runs as an earlier user: the lifeline ends it
        finally:
            os.close(fd)

    def close(self) -> None:
        # Remove it before closing: another launch may get the same number at once.
        self._live.discard(self.sentinel)
        os.close(self.sentinel)


def _send_tracker(status: int, refused: bool = False) -> None:
    """Send the tracker's descriptor to a worker, or none, and close this end of the socket."""
    try:
        from multiprocessing import resource_tracker  # late: most programs never need it

        tracker = None
        if not refused:
            # If no process can be started here, perhaps the worker can start one.
            with contextlib.suppress(Exception):
                tracker = resource_tracker.getfd()
        with sockets.borrowed(status, socket.SOCK_SEQPACKET) as sock:
            socket.send_fds(sock, [entry.TRACKER], [] if tracker is None else [tracker])
    except OSError:
        return  # the worker has ended
    finally:
        parents_only.close(status)
