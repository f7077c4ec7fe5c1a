"""A worker as its parent sees it: state, process, channel, timers and tasks in flight.

Workers that are threads of one process have a channel each, and share the handle of the process.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xpool._engine.jobs.scheduler import InFlight
from xpool._engine.jobs.states import Deadlines, WorkerEvent, WorkerStates, step
from xpool._engine.launch import Handle, Launcher
from xpool._engine.reactor import Timer
from xpool._engine.relay import LogSocket, Relay
from xpool._memory.arena import Arena
from xpool._python import descriptors
from xpool._python.descriptors import disown, owned
from xpool._wire.outbox import NO_LIMIT, STACK_SIGNAL, STOP_SIGNAL, Outbox, make_file
from xpool._wire.wire import FrameReader, FrameWriter, Refusal
from xpool._worker.entry import ONE, SEVERAL


def _widen(fd: int) -> None:
    """Let the pipe hold a megabyte if the system allows it: large messages need fewer writes."""
    if sys.platform == "linux":
        try:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        except (OSError, AttributeError):
            return  # above the user's limit of pipe memory; the default of 64 KiB works, too


class Channel:
    """The connection between a worker and its parent.

    ``boot``: the socket from which the worker receives its ends of all pipes; the kernel closes
    ends that are still in it when it is closed.  ``poller``: polls the pipe from the worker and the
    sentinel, for a caller that receives its own answer.  ``control``: a socket on which the worker
    asks for channels to other workers, if ``has_control``.
    """

    def __init__(
        self, index: int, relay: Relay | None, has_control: bool, arena: Arena | None
    ) -> None:
        self._relay = relay
        self.logs: LogSocket | None = None
        self.control: int | None = None
        # Held until the worker's ends are closed here: an earlier child would keep them open.
        with descriptors.no_fork:
            self.boot = self._make(index, has_control, arena)

    def _make(self, index: int, has_control: bool, arena: Arena | None) -> socket.socket:
        relay = self._relay
        # The boot socket keeps the worker's ends open until the worker receives them.
        with contextlib.ExitStack() as always, contextlib.ExitStack() as on_error:

            def ends(mine: int, its: int) -> tuple[int, int]:
                always.callback(os.close, its)
                on_error.callback(descriptors.close, owned(mine))
                return mine, its

            task_w, task_r = ends(*reversed(os.pipe()))
            answer_r, answer_w = ends(*os.pipe())
            life_w, life_r = ends(*reversed(os.pipe()))
            page = make_file()
            always.callback(os.close, page)
            # Each end of a pipe has its own flags: the worker's ends stay blocking.
            for fd in (task_w, answer_r):
                _widen(fd)
                os.set_blocking(fd, False)
            box = Outbox(page)
            # The page is all zeros: a limit of 0 would forbid the worker to begin any task.
            box.forbid(NO_LIMIT)
            others: list[int] = []  # not every worker has these; `worker.entry` has their order
            if has_control:
                pair = descriptors.pair(socket.SOCK_SEQPACKET)
                self.control, its = ends(*(end.detach() for end in pair))
                os.set_blocking(self.control, False)
                others.append(its)
            if relay is not None:
                self.logs, its = relay.pair(index, box)
                ends(self.logs.fd, its)
                others.append(its)
            if arena is not None:
                others.append(arena.file.fd)
            boot = _packed(ONE, [task_r, answer_w, life_r, page, *others])
            on_error.pop_all()
        self.writer, self.box = FrameWriter(task_w), box
        self.reader = FrameReader(answer_r)
        self._lifeline: int | None = life_w
        self.poller: Any = select.poll()
        self.poller.register(answer_r, select.POLLIN)
        return boot

    def cut_lifeline(self) -> None:
        """Make the process end, even if its pid is unknown."""
        if self._lifeline is not None:
            descriptors.close(self._lifeline)
            self._lifeline = None

    def close(self) -> None:
        """Close all descriptors; the process has ended, or was not started."""
        self.cut_lifeline()
        if self.control is not None:
            descriptors.close(self.control)
        if self.logs is not None:
            assert self._relay is not None
            self._relay.finish(self.logs)
            descriptors.close(self.logs.fd)
        descriptors.close(self.writer.fd)
        descriptors.close(self.reader.fd)
        self.box.close()


def _packed(kind: bytes, fds: Sequence[int]) -> socket.socket:
    """Return a socket from which these descriptors can be received."""
    ours, theirs = descriptors.private_pair(socket.SOCK_STREAM)
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


class Recipe(NamedTuple):
    """How the workers of an engine are started.

    ``config(index, generation, attachment)`` returns the first message to a worker.  ``inherited``:
    objects that cannot be pickled, for start methods that fork.  ``has_control``: workers can ask
    for channels to each other.
    """

    launcher: Launcher
    config: Callable[[int, int, int | None], bytes]
    name: str
    daemon: bool = True
    inherited: Any = None
    arena: Arena | None = None
    relay: Relay | None = None
    has_control: bool = False

    def ended(self) -> "Recipe":
        """Return the recipe of an engine that starts no more workers.

        It does not hold the blocks of the first messages.  The parts of an ended engine refer to
        each other, so they would keep these blocks until the next garbage collection.
        """
        return self._replace(config=_refuse, inherited=None)


def _refuse(index: int, generation: int, attachment: int | None) -> bytes:
    raise RuntimeError(f"worker {index} cannot start: its engine is closed")


def processor_times(pid: int | None) -> tuple[float, float, bool]:
    """Return how many seconds the main thread of a process has run, how many it has waited for a
    processor, and whether a thread of the process runs or waits now.  Zeros and False: unknown.

    The main thread runs the tasks; another one may be about to repeat the signal that stops one.
    The system counts a wait only when it is over.
    """
    try:
        # See the kernel's Documentation/scheduler/sched-stats.
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            ran, waited = (int(word) * 1e-9 for word in file.read().split()[:2])
        threads = os.listdir(f"/proc/{pid}/task")
    except (OSError, ValueError):
        return 0.0, 0.0, False
    return ran, waited, any(_state(f"/proc/{pid}/task/{thread}/stat") == b"R" for thread in threads)


def _state(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]  # the name may have any bytes
    except (OSError, IndexError):
        return b""  # the thread has ended


class WorkerProcess:
    """The worker in one place of a pool, through all its processes, one after the other.

    Guarded by the engine's lock, except `launch`.  Other parts read its fields and call its events;
    only this class assigns its fields (tests/layout checks that).
    """

    # Set from `launched` to `ended`:
    handle: Handle | None  # None: no process
    writer: FrameWriter
    reader: FrameReader
    box: Outbox
    poller: Any
    control: int | None
    logs: LogSocket | None

    def __init__(self, index: int, in_flight: InFlight, recipe: Recipe) -> None:
        self.index = index
        self.in_flight = in_flight
        self.recipe = recipe
        self.state = WorkerStates.ABSENT
        self.generation = 0  # processes started here so far
        # All workers of its process, which are threads there, by index.
        self.workers: tuple[WorkerProcess, ...] = (self,)
        self.timers: dict[Any, Timer] = {}  # by their `Alarms`
        self.attachment: int | None = None  # the worker's place in the arena
        self._channel: Channel | None = None
        self._reset()

    def _reset(self) -> None:
        self.handle = self.control = self.logs = None
        # Why it could not start, as the worker said or as the parent saw.
        self.reason: Refusal | Exception | None = None
        # The error of an invalid message; all later data of this process are ignored.
        self.protocol_error: Exception | None = None
        self.remark = ""  # for the error of its task: too much memory, or overwritten memory
        self.mapped = True  # the worker can use blocks of the arena
        # Numbers of the functions that the worker has, and of those that it will forget at its next
        # message.
        self.functions: set[int] = set()
        self.dropped: list[int] = []
        self.early = 0  # answers taken from the outbox before the message that announces them
        self._seen = (0, 0, 0)
        self.interrupted: int | None = None  # the item that the worker was asked to stop
        # When it was asked to stop its task, and its `processor_times` then.
        self.asked = (0.0, 0.0, 0.0)
        self.asked_again = False  # by `ask_again`, since then
        self.deadlines = Deadlines()

    def _transition(self, event: WorkerEvent) -> None:
        self.state = step(self.state, event)

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.index} {self.state.name} pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return self.handle.pid if self.handle is not None else None

    # -- its process starts --------------------------------------------------------------------

    def share_process(self, workers: tuple["WorkerProcess", ...]) -> None:
        """Note which workers are threads of the same process, itself included, by index."""
        self.workers = workers

    def launching(self) -> None:
        """Record that the start of a process was decided."""
        self._reset()
        self._transition(WorkerEvent.LAUNCH)

    def launch(self, arena: Arena | None) -> tuple[Handle, list[Channel]]:
        """Start a process for this worker and its siblings.  Called without the lock.

        Raises:
            OSError: it cannot be started; nothing is left over.
        """
        recipe = self.recipe
        channels: list[Channel] = []
        try:
            for one in self.workers:
                channels.append(Channel(one.index, recipe.relay, recipe.has_control, arena))
            boots = [channel.boot for channel in channels]
            boot = boots[0] if len(boots) == 1 else bundle(boots)
            name = f"{recipe.name}-worker-{self.index}"
            handle = recipe.launcher.launch(boot, name, recipe.daemon, recipe.inherited)
        except BaseException:
            for channel in channels:
                channel.close()
            raise
        finally:
            for channel in channels:
                channel.boot.close()
        owned(handle.sentinel)
        for channel in channels:
            channel.poller.register(handle.sentinel, select.POLLIN)
        return handle, channels

    def launched(self, handle: Handle, channel: Channel, attachment: int | None) -> None:
        self._transition(WorkerEvent.LAUNCHED)
        self.generation += 1
        self.attachment = attachment
        self.handle, self._channel = handle, channel
        self.writer, self.reader, self.box = channel.writer, channel.reader, channel.box
        self.poller, self.control, self.logs = channel.poller, channel.control, channel.logs

    def failed(self, reason: Refusal | Exception | None) -> None:
        """Record why the worker cannot start; None: its process is not needed any more."""
        if self.state is WorkerStates.LAUNCHING:
            self._transition(WorkerEvent.REFUSED)
        self.reason = reason

    def ready(self, mapped: bool) -> None:
        """Record the worker's greeting; ``mapped``: it can use blocks of the arena."""
        self.mapped = mapped
        self._transition(WorkerEvent.HELLO)

    # -- it works ------------------------------------------------------------------------------

    def begun(self, answered: int) -> int:
        """Return how many items the worker has ever begun; ``answered``: how many it has answered.

        If a task has overwritten the page, the item after the answered ones counts as begun.
        Otherwise such a task would seem not to have begun, and would run on one worker after
        another.
        """
        began = self.box.began
        return began if self.box.intact else max(began, answered + 1)

    def look(self, began: int, tail: int, answered: int) -> tuple[int, int, int]:
        """Record what a check saw in the page, and the answers so far; return the last check's."""
        seen, self._seen = self._seen, (began, tail, answered)
        return seen

    def took_early(self, answers: int) -> None:
        self.early += answers

    def announced(self) -> None:
        """Record that the message of the answers that were taken early has come."""
        self.early = 0

    # -- it is told to stop --------------------------------------------------------------------

    def recall(self, limit: int) -> None:
        """Forbid the worker to begin items from number ``limit`` on."""
        self.box.forbid(limit)
        self._transition(WorkerEvent.RECALL)

    def emptied(self) -> bool:
        """End a recall: the worker has answered all its items.  Return whether it may get tasks."""
        # Lift the limit before it gets a task, which it would skip otherwise.
        self.box.forbid(NO_LIMIT)
        self._transition(WorkerEvent.EMPTIED)
        return self.state is WorkerStates.READY

    def interrupt(self, item: int, now: float) -> None:
        """Ask the worker to stop an item; the worker was recalled before."""
        self._transition(WorkerEvent.INTERRUPT)
        self.interrupted = item
        # The signal's handler compares this with the running item, so that it cannot hit the next.
        self.box.ask(item + 1)
        self._signal_stop(now)

    def _signal_stop(self, now: float) -> None:
        self.asked, self.asked_again = (now, *processor_times(self.pid)[:2]), False
        self.send_signal(STOP_SIGNAL)

    def ask_again(self) -> None:
        """Repeat what `interrupt` or `ask_for_stack` asked for, unless the item is over.

        Python would not notice the first signal if it came just before the main thread began to
        wait in the system, for example in `time.sleep`.  A worker in C code writes its stack now.
        """
        self.asked_again = True
        if self.interrupted is None or self.box.began == self.interrupted + 1:
            self.send_signal(STOP_SIGNAL if self.box.stack() else STACK_SIGNAL)

    def ask_for_stack(self, now: float) -> None:
        """Ask a starting worker for its stack."""
        self.box.ask(NO_LIMIT)  # no item
        self._signal_stop(now)

    def send_signal(self, number: int) -> None:
        assert self.handle is not None
        self.handle.signal(number)

    def broken_off(self) -> str:
        """End an interrupt: the item is over; return the stack that it was stopped in."""
        stack = self.box.stack()
        # A signal that arrives later finds no named item, and raises nothing.
        self.box.ask(0)
        self.interrupted = None
        self._transition(WorkerEvent.BROKEN_OFF)
        return stack

    def retire(self) -> None:
        """Record that the worker is told to end after the tasks that it holds."""
        self._transition(WorkerEvent.RETIRE)

    def condemn(self, remark: str = "") -> None:
        """Kill the process; ``remark``: why, for the error of its task."""
        self.remark = remark or self.remark
        self._transition(WorkerEvent.CONDEMN)
        # A remaining timer could need a step that the state table lacks for a condemned worker.
        self.cancel_timers(serving=True)
        self.kill()

    def distrust(self, exc: Exception) -> None:
        """Record an invalid message of the process; read nothing more from it."""
        self.protocol_error = exc
        if self.state is WorkerStates.STARTING:
            self.reason = exc  # the worker's start has failed
        self.reader.ended = True

    def found_wrong(self, what: str) -> None:
        """Record that the process has left impossible values in shared memory."""
        self.remark = f"It had written over memory that it shares with its parent ({what})."

    def kill(self) -> None:
        """Kill the process at once, also one that is stopped by SIGSTOP."""
        if self.handle is not None:
            # Cut the lifeline first: this also ends a worker whose pid is unknown.
            assert self._channel is not None
            self._channel.cut_lifeline()
            self.handle.signal(signal.SIGKILL)

    # -- it has ended --------------------------------------------------------------------------

    def ended(self, seen: bool = True) -> None:
        """Release everything that belongs to a process that has ended.

        ``seen``: if False, it is killed now: the engine's thread ends and cannot await its end.
        """
        if seen:
            self._transition(WorkerEvent.GONE)
        else:
            with contextlib.suppress(Exception):  # the lifeline is cut first, so the process ends
                self.kill()
            self.state = WorkerStates.ABSENT
        self.cancel_timers()
        handle, channel = self.handle, self._channel
        assert handle is not None and channel is not None
        self.handle = self._channel = self.control = self.logs = self.attachment = None
        channel.close()
        # The last sibling closes the handle of the process.
        if all(one.handle is None for one in self.workers):
            disown(handle.sentinel)
            handle.close()

    def starts_no_more(self) -> None:
        self.recipe = self.recipe.ended()

    def forget_process(self) -> None:
        """Forget the process: it belongs to the parent of this forked child."""
        self.state, self.handle = WorkerStates.ABSENT, None

    def cancel_timers(self, serving: bool = False) -> None:
        """Cancel the worker's timers; ``serving``: only those for a worker that may get tasks."""
        for alarms in [one for one in self.timers if one.serving or not serving]:
            alarms.cancel(self)
