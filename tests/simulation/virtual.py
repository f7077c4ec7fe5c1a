"""Virtual pipes, shared pages, processes and descriptors: what the engine's world is made of.

Real are the engine, the scheduler, `FrameReader`, `FrameWriter` and `Outbox`; below them nothing
is.  The virtual kernel is at least as unkind as the true one: it writes and reads in pieces of any
size, reports a death any time after it, and shows a store in a shared page to the other side when
it likes, within a millisecond, in any order, unless a message through a pipe comes between.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable
from typing import Any

from xpool._engine.reactor import Reactor
from xpool._engine.worker import WorkerProcess
from xpool._wire.outbox import HEADER, NO_LIMIT, Outbox
from xpool._wire.pipes import FrameReader, FrameWriter
from xpool._wire.wire import Refusal

from .seeds import World

__all__ = ["Descriptors", "Kernel", "Page", "Pipe", "SimReactor", "SimWorker"]

SEEN_WITHIN = 0.001
"""Seconds after which a store to a shared page is seen by the other side, at the latest."""


class Pipe:
    """A pipe with two ends, each open or closed."""

    def __init__(self, capacity: int) -> None:
        self.data = bytearray()
        self.capacity = capacity
        self.reading = self.writing = True

    @property
    def room(self) -> int:
        """Bytes that can be written now."""
        return self.capacity - len(self.data)


class Descriptors:
    """The parent's open descriptors, by number."""

    def __init__(self) -> None:
        self._next = 1000
        self.open: dict[int, tuple[Pipe, bool]] = {}

    def add(self, pipe: Pipe, writes: bool) -> int:
        """Open an end; numbers are used once, so that a stale one is found out."""
        self._next += 1
        self.open[self._next] = pipe, writes
        return self._next

    def close(self, fd: int) -> None:
        """Close an end."""
        pipe, writes = self.open.pop(fd)
        if writes:
            pipe.writing = False
        else:
            pipe.reading = False

    def events(self, fd: int, mask: int) -> int:
        """Return what `poll` would of this descriptor; of a closed one, nothing."""
        if fd not in self.open:
            return 0
        pipe, writes = self.open[fd]
        if writes:
            if not pipe.reading:
                return select.POLLERR
            return select.POLLOUT & mask if pipe.room else 0
        found = select.POLLIN & mask if pipe.data or not pipe.writing else 0
        return found | (0 if pipe.writing else select.POLLHUP)


class Kernel:
    """System calls on virtual descriptors, cut into pieces as the world likes."""

    def __init__(self, world: World, cuts: bool) -> None:
        self.world = world
        self.cuts = cuts
        self.fds = Descriptors()
        self.pages: list[Page] = []

    def _some(self, n: int) -> int:
        return 1 + self.world.below(n) if self.cuts and n > 1 and self.world.chance(0.3) else n

    def put(self, pipe: Pipe, data: bytes | memoryview) -> int:
        """Write some of the data; 0 when there is no room."""
        n = min(pipe.room, len(data))
        if n:
            n = self._some(n)
            pipe.data += data[:n]
        return n

    def take(self, pipe: Pipe, n: int) -> bytes:
        """Read some of what is there."""
        n = self._some(min(n, len(pipe.data))) if pipe.data else 0
        data = bytes(pipe.data[:n])
        del pipe.data[:n]
        return data

    def read(self, fd: int, n: int) -> bytes:
        """As `os.read` of a pipe that does not block."""
        pipe, _ = self.fds.open[fd]
        data = self.take(pipe, n)
        if not data and pipe.writing:
            raise BlockingIOError
        return data

    def readv(self, fd: int, buffers: list[memoryview]) -> int:
        """As `os.readv` with one buffer."""
        data = self.read(fd, len(buffers[0]))
        buffers[0][: len(data)] = data
        return len(data)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """As `os.write` to a pipe that does not block.  What was stored before is seen after."""
        pipe, _ = self.fds.open[fd]
        if not pipe.reading:
            raise BrokenPipeError
        for page in self.pages:
            page.show(by_parent=True)
        n = self.put(pipe, data)
        if not n and len(data):
            raise BlockingIOError
        return n

    def writev(self, fd: int, buffers: list[bytes | memoryview]) -> int:
        """As `os.writev`."""
        return self.write(fd, b"".join(buffers))


class _View:
    """One side's view of a part of a page: its own stores at once, the other's when shown."""

    def __init__(self, page: Page, mine: Any, theirs: Any, by_parent: bool) -> None:
        self._page, self._mine, self._theirs, self._by_parent = page, mine, theirs, by_parent

    def __getitem__(self, key: Any) -> Any:
        return self._mine[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mine[key] = value
        self._page.store(self._by_parent, self._theirs, key, value)


class _Stack:
    """Where a worker's stack is written on request: nothing ever stands there."""

    def __getitem__(self, key: Any) -> bytes:
        return b""

    def __setitem__(self, key: Any, value: bytes) -> None:
        """It is cleared before each request."""


class Page:
    """A shared page as each of two processors sees it."""

    def __init__(self, world: Any, capacity: int) -> None:
        self._world = world
        self.capacity = capacity
        sides = [memoryview(bytearray(HEADER + capacity)) for _ in range(2)]
        self._words = [side[:HEADER].cast("Q") for side in sides]
        self._data = [side[HEADER:] for side in sides]
        # Stores that the other side has not seen: (by the parent, when it must, memory, key, value)
        self._pending: list[tuple[bool, float, Any, Any, Any]] = []

    def box(self, by_parent: bool) -> Outbox:
        """Return the real `Outbox` on one side's view."""
        box = Outbox.__new__(Outbox)
        me = int(by_parent)
        fields: dict[str, Any] = {
            "capacity": self.capacity,
            "words": _View(self, self._words[me], self._words[1 - me], by_parent),
            "_data": _View(self, self._data[me], self._data[1 - me], by_parent),
            "_map": _Stack(),
            "_turn": [0],
            "_written": 0,
            "_room": 0,
        }
        vars(box).update(fields)
        return box

    def store(self, by_parent: bool, memory: Any, key: Any, value: Any) -> None:
        """A side has stored something; the other sees it later."""
        due = self._world.now + SEEN_WITHIN * self._world.draw.random()
        self._pending.append((by_parent, due, memory, key, value))

    def show(self, by_parent: bool | None = None) -> None:
        """Let all stores (of one side) be seen: a system call, or death, orders them."""
        if not self._pending:
            return
        left = []
        for entry in self._pending:
            if by_parent is None or entry[0] == by_parent:
                entry[2][entry[3]] = entry[4]
            else:
                left.append(entry)
        self._pending = left

    def tick(self, now: float) -> None:
        """Let be seen what is due, each word's stores in their order."""
        if self._pending:
            late: set[tuple[int, Any]] = set()
            left = []
            for entry in self._pending:
                key = id(entry[2]), entry[3] if isinstance(entry[3], int) else None
                if entry[1] > now or key in late:
                    late.add(key)
                    left.append(entry)
                else:
                    entry[2][entry[3]] = entry[4]
            self._pending = left


class _Epoll:
    """What `Reactor` uses of epoll; where it would block, the rest of the world goes on."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.masks: dict[int, int] = {}

    def register(self, fd: int, mask: int) -> None:
        if fd in self.masks:
            raise FileExistsError(f"descriptor {fd} is registered already")
        if fd not in self._world.kernel.fds.open:
            raise OSError(f"descriptor {fd} is not open")
        self.masks[fd] = mask

    def modify(self, fd: int, mask: int) -> None:
        if fd not in self.masks:
            raise FileNotFoundError(f"descriptor {fd} is not registered")
        self.masks[fd] = mask

    def unregister(self, fd: int) -> None:
        del self.masks[fd]

    def ready(self) -> list[tuple[int, int]]:
        events = self._world.kernel.fds.events
        found = ((fd, events(fd, mask)) for fd, mask in self.masks.items())
        return [(fd, what) for fd, what in found if what]

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        ready: list[tuple[int, int]] = self._world.others_until(self.ready, timeout)
        return ready

    def close(self) -> None:
        self.masks.clear()


class SimReactor(Reactor):
    """The real `Reactor`, on virtual descriptors and a virtual clock."""

    def __init__(self, world: Any) -> None:
        self._world = world
        fds = world.kernel.fds
        self._pipe = Pipe(64)
        self._wake_r, self._wake_w = fds.add(self._pipe, False), fds.add(self._pipe, True)
        self._epoll: Any = _Epoll(world)
        self._epoll.register(self._wake_r, select.POLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[Any] = []
        self._numbers = itertools.count()
        self._next: float | None = None
        self.closed = False

    def now(self) -> float:
        now: float = self._world.now
        return now

    def nudge(self) -> None:
        if self._pipe.room:
            self._pipe.data += b"!"

    def handle(self, fd: int) -> None:
        if fd == self._wake_r:
            self._pipe.data.clear()
        else:
            super().handle(fd)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            left = set(self._epoll.masks) - {self._wake_r}
            self._epoll.close()
            self._world.kernel.fds.close(self._wake_r)
            self._world.kernel.fds.close(self._wake_w)
            if left or self._handlers:
                self._world.wrong(f"watched to the end: {sorted(left)} {sorted(self._handlers)}")


class _Poller:
    """What a caller polls that receives its answer itself; never blocks here."""

    def __init__(self, world: Any, fds: list[int]) -> None:
        self._world, self._fds = world, fds

    def poll(self, _: float) -> list[tuple[int, int]]:
        events = self._world.kernel.fds.events
        found = ((fd, events(fd, select.POLLIN)) for fd in self._fds)
        return [(fd, what) for fd, what in found if what]


class _Refused(OSError):
    """The world refuses a process."""


class SimWorker(WorkerProcess):
    """A place whose process is a `Worker` of the world; states and books are the real ones.

    Its workers send no invalid message, and nothing but the world refuses a start: another
    exception that the engine puts down to either is a bug.
    """

    def __init__(self, world: Any, *parts: Any) -> None:
        self._world = world
        super().__init__(*parts)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "protocol_error" and value is not None:
            self._world.wrong(f"worker {self.index} has sent an invalid message: {value}")
        if name == "reason" and not isinstance(value, (_Refused, Refusal, type(None))):
            self._world.wrong(f"worker {self.index} cannot start: {value!r}")
        super().__setattr__(name, value)

    def launching(self) -> None:
        super().launching()
        self._world.decides(self.index)

    def launch(self, arena: Any) -> tuple[Any, list[Any]]:
        world = self._world
        # The engine's lock is free meanwhile: callers and workers go on.
        world.others_go_on()
        if self.generation and world.refuses(self.index):
            raise _Refused(24, "the world has no descriptors left")
        process: list[Any] = []
        channels = [SimChannel(world, one, process) for one in self.workers]
        for channel in channels:
            channel.attach(process[0].handle)
        world.others_go_on()
        return process[0].handle, channels

    def processor(self) -> tuple[float, float, bool]:
        """Its world has processors for all."""
        return 0.0, 0.0, False


class SimChannel:
    """A channel of virtual pipes, with the virtual worker at its other end."""

    control = None

    def __init__(self, world: Any, worker: WorkerProcess, process: list[Any]) -> None:
        kernel = world.kernel
        self._world, self.index = world, worker.index
        tasks, answers = Pipe(world.pipe_size), Pipe(world.pipe_size)
        self._page = Page(world, world.box_size)
        kernel.pages.append(self._page)
        world.spawn(worker, tasks, answers, self._page, process)
        self.writer = _SimOutlet(kernel, kernel.fds.add(tasks, True))
        self.reader = _SimInlet(kernel, kernel.fds.add(answers, False))
        self.box = self._page.box(by_parent=True)
        self.box.forbid(NO_LIMIT)
        self._page.show()  # the process is started after it

    def attach(self, handle: Any) -> None:
        self.poller: Any = _Poller(self._world, [self.reader.fd, handle.sentinel])

    def cut_lifeline(self) -> None:
        """The handle's signal is enough."""

    def close(self) -> None:
        if self in self._world.engine._direct:
            self._world.wrong(f"worker {self.index} is put away, and a caller polls its pipe")
        for fd in (self.writer.fd, self.reader.fd):
            self._world.kernel.fds.close(fd)
        self._world.kernel.pages.remove(self._page)


class _SimOutlet(FrameWriter):
    __slots__ = ("_write", "_writev")

    def __init__(self, kernel: Kernel, fd: int) -> None:
        super().__init__(fd)
        self._write: Any = kernel.write
        self._writev: Any = kernel.writev


class _SimInlet(FrameReader):
    __slots__ = ("_read", "_readv")

    def __init__(self, kernel: Kernel, fd: int) -> None:
        super().__init__(fd)
        self._read: Any = kernel.read
        self._readv: Any = kernel.readv
