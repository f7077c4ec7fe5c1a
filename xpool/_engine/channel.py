"""The channel to a worker: two pipes, the shared page, and the descriptors beside them."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from xpool._engine.launch import Handle
from xpool._engine.relay import Channel as LogChannel
from xpool._engine.relay import Relay
from xpool._memory.arena import Arena
from xpool._python import parents_only, sockets
from xpool._python.parents_only import owned
from xpool._wire.outbox import COUNTERS, NO_LIMIT, Outbox, make_file
from xpool._wire.wire import FrameReader, FrameWriter
from xpool._worker.entry import ONE, SEVERAL


def _widen(fd: int) -> None:
    """Let the pipe hold a megabyte if the system allows it: large messages need fewer writes."""
    if sys.platform == "linux":
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        except (OSError, AttributeError):
            return  # above the user's limit of pipe memory; the default of 64 KiB works, too


class Channel(Protocol):
    """The connection between a worker and its parent."""

    writer: FrameWriter  # the pipe to it
    reader: FrameReader  # the pipe from it
    box: Outbox  # the page that both see
    poller: Any  # of `reader` and the sentinel, for a caller that receives its answer itself
    control: int | None  # a socket on which the worker asks for channels to others

    def attach(self, handle: Handle) -> None:
        """Record the process that has the other end."""

    def cut_lifeline(self) -> None:
        """Make the process end, even if its pid is unknown."""

    def close(self) -> None:
        """Close all descriptors; the process has ended, or was not started."""


class PipeChannel:
    """A channel of pipes.

    ``boot``: the socket from which the worker receives its ends.  When it is closed, so are they.
    ``has_control``: the worker can ask for channels to others.
    """

    def __init__(
        self, index: int, relay: Relay | None, has_control: bool, arena: Arena | None
    ) -> None:
        self._relay = relay
        self._logs: LogChannel | None = None
        self.control: int | None = None
        # Held until the worker's ends are closed here: an earlier child would keep them open.
        with parents_only.no_fork:
            self.boot = self._make(index, has_control, arena)

    def _make(self, index: int, has_control: bool, arena: Arena | None) -> socket.socket:
        relay = self._relay
        mine: list[int] = []
        theirs: list[int] = []
        others: list[int] = []  # those of `theirs` that not every worker has
        try:
            task_r, task_w = os.pipe()
            theirs.append(task_r)
            mine.append(owned(task_w))
            answer_r, answer_w = os.pipe()
            theirs.append(answer_w)
            mine.append(owned(answer_r))
            life_r, life_w = os.pipe()
            theirs.append(life_r)
            mine.append(owned(life_w))
            if relay is not None:
                logs, its_logs = relay.pair()
                theirs.append(its_logs)
                mine.append(owned(logs))
            page = make_file()
            theirs.append(page)
            # Each end of a pipe has its own flags: the worker's ends stay blocking.
            for fd in (task_w, answer_r):
                _widen(fd)
            os.set_blocking(task_w, False)
            os.set_blocking(answer_r, False)
            if has_control:
                pair = sockets.pair(socket.SOCK_SEQPACKET)
                self.control, its_control = (end.detach() for end in pair)
                theirs.append(its_control)
                mine.append(owned(self.control))
                others.append(its_control)
                os.set_blocking(self.control, False)
            box = Outbox(page)
            # The page is all zeros: a limit of 0 would forbid the worker to begin any task.
            box.forbid(NO_LIMIT)
            # `others` has the order of the table in `worker.entry`.
            if relay is not None:
                others.append(its_logs)
            if arena is not None:
                others.append(arena.file.fd)
            boot = _packed(ONE, [task_r, answer_w, life_r, page, *others])
            if relay is not None:
                try:
                    self._logs = relay.add(index, logs, parents_only.close)
                except BaseException:
                    boot.close()
                    raise
        except BaseException:
            for fd in mine:
                parents_only.close(fd)
            raise
        finally:
            # The boot socket keeps them open until the worker receives them.
            for fd in theirs:
                os.close(fd)
        self.writer, self.box = FrameWriter(task_w), box
        self.reader = FrameReader(answer_r)
        self._lifeline: int | None = life_w
        self.poller: Any = select.poll()
        self.poller.register(answer_r, select.POLLIN)
        return boot

    def attach(self, handle: Handle) -> None:
        self.poller.register(handle.sentinel, select.POLLIN)

    def cut_lifeline(self) -> None:
        if self._lifeline is not None:
            parents_only.close(self._lifeline)
            self._lifeline = None

    def close(self) -> None:
        self.cut_lifeline()
        if self.control is not None:
            parents_only.close(self.control)
        if self._logs is not None:
            assert self._relay is not None
            dropped = self.box.counts[COUNTERS.index("dropped_records")]
            self._relay.finish(self._logs, dropped)
        parents_only.close(self.writer.fd)
        parents_only.close(self.reader.fd)
        self.box.close()


def _packed(kind: bytes, fds: Sequence[int]) -> socket.socket:
    """Return a socket from which these descriptors can be received."""
    ours, theirs = parents_only.private_pair(socket.SOCK_STREAM)
    with ours:
        try:
            socket.send_fds(ours, [kind], fds)
        except BaseException:
            theirs.close()
            raise
    return theirs


def bundle(boots: Sequence[socket.socket]) -> socket.socket:
    """Return the boot socket of a process with several workers; it carries their boot sockets."""
    return _packed(SEVERAL, [boot.fileno() for boot in boots])
