"""A worker as its parent sees it: state, process, channel, timers and what it holds.

Workers that are threads of one process have a channel each, and that process's one handle.
"""

# No `from __future__ import annotations`: each field of a NamedTuple would be compiled from a text.

import signal
from collections.abc import Callable
from typing import Any, NamedTuple

from xpool._engine.channel import Channel, PipeChannel, bundle, disown, owned
from xpool._engine.jobs.deadlines import Deadlines
from xpool._engine.jobs.scheduler import InFlight
from xpool._engine.jobs.states import WORKER, WorkerEvent, WorkerStates, step
from xpool._engine.launch import Handle, Launcher
from xpool._engine.reactor import Timer
from xpool._engine.relay import Relay
from xpool._memory.arena import Arena
from xpool._wire.outbox import NO_LIMIT, STOP_SIGNAL, Outbox
from xpool._wire.pipes import FrameReader, FrameWriter
from xpool._wire.wire import Refusal

__all__ = ["Asked", "Recipe", "WorkerProcess"]


class Recipe(NamedTuple):
    """How the workers of an engine are started.

    ``config(index, generation, attachment)`` returns the first message to a worker.  ``inherited``:
    what cannot be sent, for start methods that fork.  ``has_control``: workers can ask for channels
    to each other.
    """

    launcher: Launcher
    config: Callable[[int, int, int | None], bytes]
    name: str
    daemon: bool = True
    inherited: Any = None
    arena: Arena | None = None
    relay: Relay | None = None
    has_control: bool = False


class Asked(NamedTuple):
    """When a worker was asked to break off its task, and its processor times (`processor`) then."""

    when: float
    ran: float
    waited: float


class WorkerProcess:
    """The worker in one place of a pool, through all the processes that it ever is.

    Guarded by the engine's lock, except `launch`.  Other parts read its fields and call its events;
    no other part assigns a field (tests/layout holds that).
    """

    # Of the process, from `launched` to `ended`:
    handle: Handle | None  # None: there is no process
    writer: FrameWriter
    reader: FrameReader
    box: Outbox
    poller: Any
    control: int | None

    def __init__(self, index: int, in_flight: InFlight, recipe: Recipe) -> None:
        self.index = index
        self.in_flight = in_flight
        self.recipe = recipe
        self.state = WorkerStates.ABSENT
        self.generation = 0  # processes started here so far
        self.siblings: tuple[WorkerProcess, ...] = ()  # other threads of the same process
        self.timers: dict[Any, Timer] = {}  # by their `Alarms`
        self.attachment: int | None = None  # its place in the arena
        self._channel: Channel | None = None
        self._reset()

    def _reset(self) -> None:
        self.handle = self.control = None
        # Why it could not start: its own word, or what was seen from here.
        self.reason: Refusal | Exception | None = None
        # The invalid message that it sent; nothing that came after that is believed.
        self.protocol_error: Exception | None = None
        self.remark = ""  # for the error of its task: too much memory, or memory written over
        # Functions that this process has, those of them that it may drop, which the next message
        # says, and whether it can use blocks of the arena.
        self.known: set[int] = set()
        self.forgotten: list[int] = []
        self.mapped = True
        # What the last look saw in its outbox; how many answers were taken out ahead of the message
        # that will announce them.
        self.seen = (0, 0)
        self.answers_taken_early = 0
        self.interrupted: int | None = None  # the item that it is to break off
        self.asked = Asked(0.0, 0.0, 0.0)
        self.silent = False  # nothing more is expected from it; whether it has ended is unknown
        self.deadlines = Deadlines()

    def _transition(self, event: WorkerEvent) -> None:
        self.state = step(WORKER, self.state, event)

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.index} {self.state.name} pid={self.pid}>"

    @property
    def pid(self) -> int | None:
        """The worker's process id, None while there is none."""
        return self.handle.pid if self.handle is not None else None

    @property
    def workers(self) -> tuple["WorkerProcess", ...]:
        """All workers of its process, itself included, by index."""
        return tuple(sorted((self, *self.siblings), key=lambda one: one.index))

    @property
    def may_be_told_to_end(self) -> bool:
        """Whether it has a process that was not told to end yet."""
        return self.state is WorkerStates.STARTING or self.state.serves

    # -- its process starts --------------------------------------------------------------------

    def share_process(self, siblings: tuple["WorkerProcess", ...]) -> None:
        """Note which workers are threads of the same process."""
        self.siblings = siblings

    def launching(self) -> None:
        """The start of a process was decided."""
        self._reset()
        self._transition(WorkerEvent.LAUNCH)

    def launch(self, arena: Arena | None) -> tuple[Handle, list[Channel]]:
        """Start a process for this worker and its siblings.  Called without the lock.

        Raises:
            OSError: that is not possible; nothing is left over.
        """
        recipe = self.recipe
        channels: list[PipeChannel] = []
        try:
            for one in self.workers:
                channels.append(PipeChannel(one.index, recipe.relay, recipe.has_control, arena))
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
            channel.attach(handle)
        return handle, [*channels]

    def launched(self, handle: Handle, channel: Channel, attachment: int | None) -> None:
        """Its process was started."""
        self._transition(WorkerEvent.LAUNCHED)
        self.generation += 1
        self.attachment = attachment
        self.handle, self._channel = handle, channel
        self.writer, self.reader, self.box = channel.writer, channel.reader, channel.box
        self.poller, self.control = channel.poller, channel.control

    def refused(self, reason: Exception | None) -> None:
        """No process could be started; None: none is wanted any more."""
        if self.state is WorkerStates.LAUNCHING:
            self._transition(WorkerEvent.REFUSED)
        self.reason = reason

    def failed(self, reason: Refusal | Exception) -> None:
        """It cannot start, for this reason."""
        self.reason = reason

    def ready(self, mapped: bool) -> None:
        """It has greeted; ``mapped``: it can use blocks of the arena."""
        self.mapped = mapped
        self._transition(WorkerEvent.HELLO)

    # -- it works ------------------------------------------------------------------------------

    def learned(self, func: int) -> None:
        """It is sent a function."""
        self.known.add(func)

    def may_forget(self, func: int) -> None:
        """It may drop a function, if it has it."""
        if func in self.known:
            self.known.discard(func)
            self.forgotten.append(func)

    def forgets(self) -> list[int]:
        """Return the functions that it may drop, which it is told now."""
        forgotten, self.forgotten = self.forgotten, []
        return forgotten

    def looked(self, began: int, tail: int) -> tuple[int, int]:
        """Note what a look into its page has seen; return what the last one saw."""
        seen, self.seen = self.seen, (began, tail)
        return seen

    def took_early(self, answers: int) -> None:
        """Answers were taken out of its outbox ahead of their message."""
        self.answers_taken_early += answers

    def announced(self) -> None:
        """The message of the answers that were taken early has come."""
        self.answers_taken_early = 0

    def begun(self, answered: int) -> int:
        """Return how many items the worker has begun, ever; it has answered ``answered``.

        Where it has written over the page, at least the next one: else a task that does so would
        be taken for one that was not begun, and be run by one worker after the other.
        """
        began = self.box.began
        return began if self.box.intact else max(began, answered + 1)

    # -- it is told to stop --------------------------------------------------------------------

    def recall(self, limit: int) -> None:
        """Forbid it to begin items from number ``limit`` on."""
        self.box.limit = limit
        self._transition(WorkerEvent.RECALL)

    def emptied(self) -> None:
        """It has answered all that it held when it was recalled."""
        # Before it may be given anything: it would answer that as skipped.
        self.box.limit = NO_LIMIT
        self._transition(WorkerEvent.EMPTIED)

    def interrupt(self, now: float) -> None:
        """Ask it to break off the item that was named; it was recalled before."""
        assert self.handle is not None
        self._transition(WorkerEvent.INTERRUPT)
        self.asked = Asked(now, *self.processor()[:2])
        self.handle.signal(STOP_SIGNAL)

    def name_item(self, item: int) -> None:
        """Name the item that it will be asked to break off."""
        self.interrupted = item
        self.box.ask(item + 1)

    def ask_for_stack(self, now: float) -> None:
        """Ask it where it is, while it starts."""
        assert self.handle is not None
        self.box.ask(NO_LIMIT)  # no item
        self.asked = Asked(now, *self.processor()[:2])
        self.handle.signal(STOP_SIGNAL)

    def broken_off(self) -> str:
        """The item that it was to break off is over; return its stack then."""
        stack = self.box.stack()
        # A signal that arrives after this finds no item named, and raises nothing.
        self.box.ask(0)
        self.interrupted = None
        self._transition(WorkerEvent.BROKEN_OFF)
        return stack

    def retire(self) -> None:
        """It is told to end after what it holds."""
        self._transition(WorkerEvent.RETIRE)

    def condemn(self, remark: str = "") -> None:
        """Kill it; ``remark``: why, for the error of its task."""
        self.remark = remark or self.remark
        self._transition(WorkerEvent.CONDEMN)
        # A timer that is left could want a step that a condemned worker's table does not have.
        self.cancel_timers(serving=True)
        self.kill()

    def distrust(self, exc: Exception) -> None:
        """It has sent an invalid message: nothing more is read from it."""
        self.protocol_error = exc
        if self.state is WorkerStates.STARTING:
            self.reason = exc  # its start has failed for this
        self.reader.ended = True

    def found_wrong(self, what: str) -> None:
        """It has left something in shared memory that cannot be true."""
        self.remark = f"It had written over memory that it shares with its parent ({what})."

    def fell_silent(self) -> None:
        """It was killed, whether it has ended cannot be known, and nothing comes from it."""
        self.silent = True

    def kill(self) -> None:
        """End the process at once, whatever it is doing, stopped by SIGSTOP included."""
        if self.handle is not None:
            # The lifeline first: it also ends a worker whose pid is not known yet.
            assert self._channel is not None
            self._channel.cut_lifeline()
            self.handle.signal(signal.SIGKILL)

    # -- it has ended --------------------------------------------------------------------------

    def ended(self) -> None:
        """Let go of everything of a process that has ended."""
        assert self.handle is not None and self._channel is not None
        self._transition(WorkerEvent.GONE)
        self.cancel_timers()
        handle, channel = self.handle, self._channel
        self.handle = self._channel = self.control = self.attachment = None
        channel.close()
        # The last of the siblings closes what is the process's.
        if all(mate.handle is None for mate in self.siblings):
            disown(handle.sentinel)
            handle.close()

    def forget_process(self) -> None:
        """This program is a fork of the parent, whose the process is."""
        self.state, self.handle = WorkerStates.ABSENT, None

    def cancel_timers(self, serving: bool = False) -> None:
        """Cancel its timers; ``serving``: only those of a worker that is not told to end."""
        for alarms in [one for one in self.timers if one.serving or not serving]:
            alarms.cancel(self)

    # -- its process in the system -------------------------------------------------------------

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
