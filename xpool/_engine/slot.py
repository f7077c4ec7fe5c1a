"""A worker's slot: the channels and the process of the worker that is in it now.

Slots whose workers are threads of one process have a channel each, and that process's one handle.

Descriptors that only the parent may hold are listed, and closed in every child that the program
forks: a copy of the writing end of a lifeline would keep a worker alive after its parent.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from xpool._engine.jobs.states import WORKER, WorkerEvent, WorkerStates, step
from xpool._engine.launch import Handle, Launcher
from xpool._engine.relay import Channel, Relay
from xpool._memory.arena import Arena
from xpool._python import at_fork
from xpool._wire.outbox import NO_LIMIT, Outbox, make_file
from xpool._wire.pipes import FrameReader, FrameWriter
from xpool._wire.wire import TO_PARENT, Refusal
from xpool._worker.entry import ONE, SEVERAL

__all__ = ["Slot"]

# Of all pools, each with its own lock: a set changes in one operation, so there is none here.
_parents_only: set[int] = set()

_forking = threading.RLock()
"""Held by who forks, and while pipes are made: no child has an end that is not noted yet.
Reentrant: a finalizer may fork."""


def _mine(fd: int) -> int:
    _parents_only.add(fd)
    return fd


def _close(fd: int) -> None:
    # Struck off first: once it is closed, the number may be another file's, and a child of a fork
    # would close that.
    _parents_only.discard(fd)
    os.close(fd)


def _widen(fd: int) -> None:
    """Let the pipe hold a megabyte, if the system allows: fewer turns for a large message."""
    if sys.platform == "linux":
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        except (OSError, AttributeError):
            return  # over the user's share of pipe memory: the usual 64 KiB do as well


def _after_fork_in_child() -> None:
    for fd in _parents_only:
        os.close(fd)
    _parents_only.clear()


at_fork.at_fork(in_child=_after_fork_in_child)
# By name, since each child has a lock of its own: Ctrl-C may have kept its parent from taking this.
at_fork.at_fork(before=lambda: _forking.acquire(), in_parent=lambda: _forking.release())
at_fork.renew(globals(), _forking=threading.RLock)


class Slot:
    """One worker as the parent sees it.  Guarded by the engine's lock."""

    # Of the process, from its start to its end:
    handle: Handle | None  # the process itself; None: there is none
    writer: FrameWriter  # the pipes to it and from it, and the page that both see
    reader: FrameReader
    box: Outbox
    poller: Any  # of `reader` and `handle`, for a caller that receives its answer himself
    control: int | None  # a socket, where it can ask for channels to other workers
    logs: Channel | None  # where its log records come from
    lifeline: int | None  # a pipe: the kernel kills the process when this end is closed

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = WorkerStates.ABSENT  # changed by `transition` alone
        self.generation = 0  # processes started here so far
        self.siblings: tuple[Slot, ...] = ()  # those whose workers are threads of the same process
        self.has_control = False
        self.relay: Relay | None = None  # where the log records of its processes are read
        self.attachment: int | None = None  # its place in the arena
        self.lifeline = None
        self._fresh()

    def _fresh(self) -> None:
        self.handle = self.control = self.logs = None
        # Why it could not start, by its own word or as seen from here; what nonsense it wrote,
        # after which nothing more is believed.  For the replacement.
        self.reason: Refusal | Exception | None = None
        self.protocol_error: Exception | None = None
        self.remark = ""  # for the error of its task: too much memory, or memory written over
        # For the dispatcher: functions that this process has, those of them that it may drop, said
        # with the next message, and whether it can use blocks of the arena.
        self.known: set[int] = set()
        self.forget: list[int] = []
        self.mapped = True
        # For those who take answers: what the last look saw in its outbox, how many were taken out
        # ahead of the message that will announce them, and the item that it is to break off.
        self.seen = (0, 0)
        self.answers_taken_early = 0
        self.interrupted: int | None = None
        # When it was asked to break it off, and how long it had run and waited (`processor`) then.
        self.asked = 0.0, 0.0, 0.0

    def transition(self, event: WorkerEvent) -> None:
        """Go to the state that follows."""
        self.state = step(WORKER, self.state, event)

    def __repr__(self) -> str:
        return f"<Slot {self.index} {self.state.name} pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return self.handle.pid if self.handle is not None else None

    def start(
        self,
        launcher: Launcher,
        name: str,
        daemon: bool,
        inherited: Any,
        arena: Arena | None,
    ) -> None:
        """Start a process, for the siblings as well.

        Raises:
            OSError: that is not possible; nothing is left over.
        """
        slots = sorted((self, *self.siblings), key=lambda slot: slot.index)
        boots: list[socket.socket] = []
        try:
            for slot in slots:
                boots.append(slot._open(arena))
            boot = boots[0] if len(boots) == 1 else _bundle(boots)
            handle = launcher.launch(boot, name, daemon, inherited)
        except BaseException:
            for slot in slots[: len(boots)]:
                slot._shut()
            raise
        finally:
            for boot in boots:
                boot.close()
        _mine(handle.sentinel)
        for slot in slots:
            slot.handle = handle
            slot.poller.register(handle.sentinel, select.POLLIN)
            slot.transition(WorkerEvent.LAUNCH)
            slot.generation += 1

    def _open(self, arena: Arena | None) -> socket.socket:
        """Make the channel; return the socket through which the worker gets its ends."""
        self._fresh()
        # Until the worker's ends are closed here: a child forked meanwhile would keep them open.
        with _forking:
            return self._make_channel(arena)

    def _make_channel(self, arena: Arena | None) -> socket.socket:
        mine: list[int] = []
        theirs: list[int] = []
        others: list[int] = []  # of these, those that not every worker has
        try:
            task_r, task_w = os.pipe()
            theirs.append(task_r)
            mine.append(_mine(task_w))
            answer_r, answer_w = os.pipe()
            theirs.append(answer_w)
            mine.append(_mine(answer_r))
            life_r, life_w = os.pipe()
            theirs.append(life_r)
            mine.append(_mine(life_w))
            if self.relay is not None:
                logs, its_logs = self.relay.pair()
                theirs.append(its_logs)
                mine.append(_mine(logs))
            page = make_file()
            theirs.append(page)
            # Each end of a pipe has flags of its own: the worker's still block.
            for fd in (task_w, answer_r):
                _widen(fd)
            os.set_blocking(task_w, False)
            os.set_blocking(answer_r, False)
            if self.has_control:
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                control, its_control = (end.detach() for end in pair)
                theirs.append(its_control)
                mine.append(_mine(control))
                others.append(its_control)
                os.set_blocking(control, False)
            box = Outbox(page)
            # The page is all zeros, which would forbid the worker to begin anything.
            box.limit = NO_LIMIT
            # In the order of the table in `worker.entry`.
            if self.relay is not None:
                others.append(its_logs)
            if arena is not None:
                others.append(arena.file.fd)
            boot = _packed(ONE, [task_r, answer_w, life_r, page, *others])
            if self.relay is not None:
                try:
                    self.logs = self.relay.add(self.index, logs, _close)
                except BaseException:
                    boot.close()
                    raise
        except BaseException:
            for fd in mine:
                _close(fd)
            raise
        finally:
            # The boot socket keeps what they stand for until the worker takes it out.
            for fd in theirs:
                os.close(fd)
        self.writer, self.reader, self.box = (
            FrameWriter(task_w),
            FrameReader(answer_r, TO_PARENT.size),
            box,
        )
        self.lifeline = life_w
        self.control = control if self.has_control else None
        self.poller = select.poll()
        self.poller.register(answer_r, select.POLLIN)
        return boot

    def _shut(self) -> None:
        """Let go of the channel."""
        if self.lifeline is not None:
            _close(self.lifeline)
            self.lifeline = None
        if self.control is not None:
            _close(self.control)
            self.control = None
        if self.logs is not None:
            assert self.relay is not None
            self.relay.finish(self.logs, self.box.dropped)
            self.logs = None
        _close(self.writer.fd)
        _close(self.reader.fd)
        self.box.close()

    def begun(self, answered: int) -> int:
        """Return how many items the worker has begun, ever; it has answered ``answered``.

        Where it has written over the page, at least the next one: else a task that does so would
        be taken for one that was not begun, and be run by one worker after the other.
        """
        began = self.box.began
        return began if self.box.intact else max(began, answered + 1)

    def processor(self) -> tuple[float, float, bool]:
        """Return the seconds that its main thread, which runs the tasks, has run and has waited for
        a processor, ever, and whether it runs or waits now.  Zeros and False: not known.

        The system counts a wait when it is over: one that goes on is in neither number.
        """
        try:
            # See the kernel's Documentation/scheduler/sched-stats.
            with open(f"/proc/{self.pid}/schedstat") as file:
                ran, waited = (int(word) * 1e-9 for word in file.read().split()[:2])
            with open(f"/proc/{self.pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except (OSError, ValueError, IndexError):
            return 0.0, 0.0, False
        return ran, waited, state == "R"

    def kill(self) -> None:
        """End the process at once, whatever it is doing, stopped by SIGSTOP included."""
        # The lifeline first: it also ends a worker whose pid is not known yet.
        if self.lifeline is not None:
            _close(self.lifeline)
            self.lifeline = None
        if self.handle is not None:
            self.handle.signal(signal.SIGKILL)

    def gone(self) -> None:
        """Let go of everything of a process that has ended."""
        assert self.handle is not None
        handle, self.handle = self.handle, None
        self.transition(WorkerEvent.GONE)
        self._shut()
        # The last of the siblings closes what is the process's.
        if all(mate.handle is None for mate in self.siblings):
            _parents_only.discard(handle.sentinel)
            handle.close()


def _packed(kind: bytes, fds: Sequence[int]) -> socket.socket:
    """Return a socket from which these descriptors can be received."""
    ours, theirs = socket.socketpair()
    with ours:
        try:
            socket.send_fds(ours, [kind], fds)
        except BaseException:
            theirs.close()
            raise
    return theirs


def _bundle(boots: Sequence[socket.socket]) -> socket.socket:
    """Return the boot socket of a process that has several workers: from it come theirs."""
    return _packed(SEVERAL, [boot.fileno() for boot in boots])
