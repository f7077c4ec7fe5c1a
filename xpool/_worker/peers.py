"""Messages between the workers of a pool: `current_worker().send` and `recv`.

A channel is a pair of sockets that only its two workers have (docs/peers.md).  Its packets are::

    kind u8, scope u64, number u64, taken u64 | a message of `xpool._pickling.frame`

    DATA   the message follows
    FILE   the message is too long for a packet: it is in a file, whose descriptor comes along
    TAKEN  nothing follows

``scope`` is the call of `run_all` to which the message belongs; 0: none.  ``number`` counts the
packets of kind DATA or FILE from 1.  ``taken`` acknowledges packets of the other direction: the
sender holds the blocks of all packets up to this number.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from xpool._memory.holds import Block
from xpool._pickling.frame import Layout, Leased, hold_blocks, weight
from xpool._python import at_fork, descriptors
from xpool._python.interrupt import deliver, interruptible, pending, uninterrupted
from xpool._wire import packets
from xpool._wire.wire import LINK, WANTED, Spin
from xpool.errors import OptionError, PeerLost, TimeoutError
from xpool.pickle import decode, encode

WINDOW = 256 * 1024 * 1024
"""Bytes of blocks that may be on their way in a channel.  A single message may be larger."""

_HEAD = struct.Struct("<BxxxxxxxQQQ")  # 32 bytes, so that the message is aligned
_DATA, _FILE, _TAKEN = 1, 2, 3
_SLICE = 0.01  # seconds of a wait while several threads wait: one may read another's message


class _Channel:
    """One end of a channel to a peer."""

    def __init__(self, sock: socket.socket, serial: int) -> None:
        sock.setblocking(False)
        packets.give_room(sock)
        self.sock, self.serial = sock, serial
        # The numbers of the last message sent, taken out, and acknowledged.
        self.sent = self.got = self.told = 0
        self.under_way: deque[tuple[int, Leased]] = deque()  # held until the peer holds the blocks
        self.bytes_out = 0
        # By scope: messages, and errors in place of messages that could not be taken out.
        self.inbox: dict[int, deque[Any]] = {}
        self.bytes_in = 0
        self.full = False  # why the last send failed: True: the socket is full; False: the window
        self.ended = False

    # -- out -----------------------------------------------------------------------------------

    def try_send(self, scope: int, message: bytes | memoryview) -> bool:
        size = weight(message) if type(message) is Leased else 0
        self.full = False
        if size and self.under_way and self.bytes_out + size > WINDOW:
            return False
        number = self.sent + 1
        if size:
            # Record it first: a task may be stopped between any two lines of this code.
            self.under_way.append((number, message))  # type: ignore[arg-type]
            self.bytes_out += size
        sent = False
        try:
            if len(message) <= packets.LONGEST:
                sent = self._packet(_DATA, scope, number, message)
            else:
                with packets.file_with(message) as fd:
                    sent = self._packet(_FILE, scope, number, b"", packets.rights([fd]))
        finally:
            if sent:
                self.sent = number
            # If a signal handler has raised before the record was made, nothing must be undone.
            elif size and self.under_way and self.under_way[-1][0] == number:
                self.under_way.pop()
                self.bytes_out -= size
        return sent

    def _packet(
        self, kind: int, scope: int, number: int, body: bytes | memoryview, rights: Any = ()
    ) -> bool:
        head = _HEAD.pack(kind, scope, number, self.got)
        try:
            self.sock.sendmsg([head, body], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self.full = True
            return False
        except (BrokenPipeError, ConnectionResetError):
            self.ended = True
            return False
        # Each packet acknowledges `got`.  Set only here, after the packet was sent.
        self.told = self.got
        return True

    def acknowledge(self) -> None:
        """Acknowledge the messages that were taken out, if that is due and the socket has room."""
        if self.told < self.got and not self.ended:
            self._packet(_TAKEN, 0, 0, b"")

    # -- in ------------------------------------------------------------------------------------

    def take_out(self, all_of_it: bool) -> None:
        """Take out the packets that have arrived; unless ``all_of_it``, no more than the window."""
        while not self.ended and (all_of_it or self.bytes_in <= WINDOW):
            try:
                data, fds, lost = packets.receive(self.sock, packets.LONGEST + _HEAD.size, 1)
            except BlockingIOError:
                return
            # The peer has closed its end with unread packets in it (net/unix/af_unix.c).
            except ConnectionResetError:
                data, fds, lost = b"", [], False
            try:
                if not data:
                    self.ended = True
                    return
                self._arrived(data, fds, lost)
            finally:
                for fd in fds:
                    os.close(fd)

    def _arrived(self, data: bytes, fds: list[int], lost: bool) -> None:
        kind, scope, number, taken = _HEAD.unpack_from(data)
        while self.under_way and self.under_way[0][0] <= taken:
            self.bytes_out -= weight(self.under_way.popleft()[1])
        if kind == _TAKEN:
            return
        message: bytes | memoryview = memoryview(data)[_HEAD.size :]
        # Count it first: a message that cannot be opened has been taken out, too.
        self.got = number
        try:
            message = hold_blocks(_from_file(fds, lost) if kind == _FILE else message)
        except LookupError:
            # The sender has died, and its blocks are free again.
            self.ended = True
            return
        except OSError as exc:
            self.inbox.setdefault(scope, deque()).append(exc)
            return
        size = len(message) + (weight(message) if type(message) is Leased else 0)
        self.bytes_in += size
        self.inbox.setdefault(scope, deque()).append(message)
        # Do this at once: until then, the peer holds the blocks and counts them as sent.
        if type(message) is Leased:
            self.acknowledge()

    def next(self, scope: int) -> Any:
        """Return the next message of a scope from the inbox; None: the inbox has none."""
        waiting = self.inbox.get(scope)
        if not waiting:
            return None
        message = waiting.popleft()
        if isinstance(message, OSError):
            return message
        self.bytes_in -= len(message) + (weight(message) if type(message) is Leased else 0)
        return message

    def forget_before(self, scope: int) -> None:
        """Drop messages of calls before this one."""
        for old in [one for one in self.inbox if 0 < one < scope]:
            while self.next(old) is not None:
                continue
            del self.inbox[old]


def _from_file(fds: list[int], lost: bool) -> memoryview:
    if not fds or lost:
        raise OSError("a message is lost: this process has no free descriptor (ulimit -n)")
    return packets.read_file(fds[0])


class Peers:
    """The channels of one worker.  Any thread may call the methods.

    A task is stopped where it waits, or in code of the program (the marks of
    `xpool._python.interrupt`).  Blocking the signal in this thread would not help: the system would
    give the signal to another thread, such as one of torch's, and Python would call its handler in
    the main thread.
    """

    here: Peers | None = None

    def __init__(self, index: int, count: int, control: int, layout: Layout) -> None:
        self._index, self._count = index, count
        self._control = descriptors.on(control)
        self._control.setblocking(False)
        self._layout = layout._replace(lessor=self._lease if layout.lessor else None)
        self._lessor = layout.lessor
        # By peer: the channel in use, then later channels, to the peer's replacements.
        self._channels: dict[int, deque[_Channel]] = {}
        self._known: dict[int, int] = {}  # by peer: the number of the last channel that ended
        self._asked: set[int] = set()
        self._refused: dict[int, int] = {}
        self._scope = 0
        # Guards all fields, for moments: a thread does not wait while it holds the lock.
        self._lock = threading.RLock()
        self._inside = 0
        self._spin = Spin()
        Peers.here = self

    # -- what tasks call -----------------------------------------------------------------------

    @uninterrupted
    def send(self, peer: int, obj: Any, timeout: float | None = None) -> None:
        """See `WorkerInfo.send`."""
        self._check(peer)
        until = _until(timeout)
        # Do not hold the lock: this runs the program's code, which may send and receive itself.
        message = _encode(obj, self._layout)
        with self._waiting():
            while True:
                with self._lock:
                    channel = self._channel(peer)
                    if channel is not None:
                        if channel.try_send(self._scope, message):
                            return
                        # The peer's acknowledgements open the window.  Two workers that send to
                        # each other also make room for each other.
                        channel.take_out(False)
                        if channel.ended:
                            raise self._lost(peer, channel)
                self._wait(channel, True, until, f"worker {peer} took no message of")

    @uninterrupted
    def recv(self, peer: int, timeout: float | None = None) -> Any:
        """See `WorkerInfo.recv`."""
        self._check(peer)
        until = _until(timeout)
        with self._waiting():
            while True:
                with self._lock:
                    channel = self._channel(peer)
                    if channel is not None:
                        message = channel.next(self._scope)
                        if message is None:
                            # Take out all packets: this call's message may lie behind others.
                            channel.take_out(True)
                            channel.forget_before(self._scope)
                            message = channel.next(self._scope)
                        if message is not None:
                            break
                        if channel.ended:
                            raise self._lost(peer, channel)
                self._wait(channel, False, until, f"worker {peer} sent no message to")
        if isinstance(message, OSError):
            raise message
        # Do not hold the lock: this runs the program's code.
        return _decode(message)

    @contextmanager
    @uninterrupted
    def call(self, scope: int) -> Iterator[None]:
        """Assign the messages of this block to a call of `run_all`."""
        with self._lock:
            for peer, channels in self._channels.items():
                # Iterate over a copy, since `_forget` removes channels.
                for channel in list(channels):
                    channel.take_out(False)
                    channel.forget_before(scope)
                    if channel.ended:
                        self._forget(peer, channel)  # the peer died, and the last call failed
        self._scope = scope
        try:
            yield
        finally:
            self._scope = 0

    @uninterrupted
    def acknowledge(self) -> bool:
        """Release blocks that peers hold by now; return whether other blocks are on their way."""
        with self._lock:
            for channel in self._all():
                # Other channels owe no acknowledgement: their messages can stay in the sockets.
                if channel.under_way:
                    channel.take_out(False)
                channel.acknowledge()
                if channel.ended:
                    # The peer has ended, and will not acknowledge these.
                    channel.under_way.clear()
            return any(channel.under_way for channel in self._all())

    def close_in_child(self) -> None:
        """Close the channels in a child that a task forked: they belong to its parent."""
        for channel in self._all():
            channel.sock.close()
        self._control.close()
        # Another thread of the parent may have held the lock at the fork.
        self._lock = threading.RLock()
        self._count = 0

    # -- channels ------------------------------------------------------------------------------

    def _check(self, peer: int) -> None:
        if not self._count:
            raise OptionError(
                "this process was forked by a worker, and only the worker has channels: call send "
                "and recv there"
            )
        if not isinstance(peer, int) or not 0 <= peer < self._count or peer == self._index:
            others = [i for i in range(self._count) if i != self._index]
            raise OptionError(
                f"peer must be the index of another worker of the pool, one of {others}, "
                f"not {peer!r}; this is worker {self._index}"
            )

    def _all(self) -> list[_Channel]:
        return [channel for channels in list(self._channels.values()) for channel in channels]

    def _channel(self, peer: int) -> _Channel | None:
        """Return the channel to a peer; None: the parent has been asked for it."""
        channels = self._channels.get(peer)
        if not channels:
            self._take_links()
            channels = self._channels.get(peer)
        if channels:
            return channels[0]
        # Raise it once: the next call asks again, since descriptors may be free then.
        error = self._refused.pop(peer, 0)
        if error:
            self._asked.discard(peer)
            raise OSError(error, f"no channel to worker {peer}: {os.strerror(error)}")
        # Ask once: the parent answers now, or after replacing the peer (`_engine/switchboard`).
        if peer not in self._asked:
            known = self._known.get(peer, 0)
            self._control.send(WANTED.pack(peer, known > 0, known))
            self._asked.add(peer)
        return None

    def _take_links(self) -> None:
        while True:
            try:
                data, fds, _ = descriptors.receive(self._control, LINK.size, 1)
            except BlockingIOError:
                return
            if not data:
                raise PeerLost("the pool's own process has ended")
            peer, error, serial = LINK.unpack(data)
            if error or not fds:
                self._refused[peer] = error or errno.EMFILE
                if not error:  # this process had no free descriptor for the file
                    self._known[peer] = serial
                continue
            self._asked.discard(peer)
            sock = descriptors.on(fds[0])
            self._channels.setdefault(peer, deque()).append(_Channel(sock, serial))

    def _forget(self, peer: int, channel: _Channel) -> None:
        """Close a channel whose other end is closed."""
        # The parent makes a new channel when a worker that knows this number asks for one.
        self._known[peer] = channel.serial
        self._channels[peer].remove(channel)
        channel.sock.close()

    def _lost(self, peer: int, channel: _Channel) -> PeerLost:
        self._forget(peer, channel)
        return PeerLost(
            f"worker {peer} ended while worker {self._index} worked with it; the next message "
            "goes to, or comes from, the worker that replaces it"
        )

    # -- waiting -------------------------------------------------------------------------------

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        # Needs no lock: the count only determines the length of a wait.
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @uninterrupted
    def _wait(
        self, channel: _Channel | None, to_send: bool, until: float | None, what: str
    ) -> None:
        """Wait for an event on this channel; take out messages of other peers in the meantime."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        with self._lock:
            # Watch other channels, too, so that their peers can send while this waits for another.
            others = [one for one in self._all() if one.bytes_in <= WINDOW or one is channel]
            by_fd = {one.sock.fileno(): one for one in others if not one.ended}
            for fd, one in by_fd.items():
                events = select.POLLIN
                # If the window is full, the socket is always writable: wait for a packet instead.
                if one is channel and to_send and one.full:
                    events |= select.POLLOUT
                poller.register(fd, events)
        # Wait at most a second: a signal that comes just before `poll` does not end it.
        seconds = 1.0 if self._inside < 2 else _SLICE
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{what} worker {self._index} within the timeout")
            seconds = min(left, seconds)
        found = self._poll(poller.poll, seconds)
        with self._lock:
            self._take_links()
            for fd, _ in found:
                other = by_fd.get(fd)
                # The caller reads its own channel itself.
                if other is not None and other is not channel and not other.ended:
                    other.take_out(False)

    @interruptible
    def _poll(self, poll: Callable[[float], list[tuple[int, int]]], seconds: float) -> Any:
        if pending:
            deliver()
        return self._spin.look(poll) or poll(seconds * 1000)

    def _lease(self, nbytes: int) -> Block | None:
        assert self._lessor is not None
        self.acknowledge()  # this may free blocks that peers hold now
        return self._lessor(nbytes)


@interruptible
def _encode(obj: Any, layout: Layout) -> bytes | memoryview:
    if pending:
        deliver()
    return encode(obj, layout=layout)


@interruptible
def _decode(message: bytes | memoryview) -> Any:
    if pending:
        deliver()
    return decode(message)


def _until(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise OptionError(f"timeout must be None or seconds, at least 0, not {timeout!r}")
    return time.monotonic() + timeout


def _after_fork_in_child() -> None:
    if Peers.here is not None:
        Peers.here.close_in_child()


at_fork.at_fork(in_child=_after_fork_in_child)
