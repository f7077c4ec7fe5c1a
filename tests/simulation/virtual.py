"""Virtual pipes, shared pages, processes and descriptors for the engine's world.

The engine, the scheduler, `FrameReader`, `FrameWriter` and `Outbox` are real; everything below them
is virtual. The virtual kernel is at least as difficult as a real one. It reads and writes pieces of
any size. It reports a death after any delay. It shows a store in a shared page to the other side
within a millisecond, in any order, unless a message through a pipe comes between.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

from xpool._engine.jobs.waiting import TimeQueue
from xpool._engine.reactor import Reactor
from xpool._engine.worker_process import WorkerProcess
from xpool._wire.outbox import HEADER, NO_LIMIT, Outbox
from xpool._wire.wire import FrameReader, FrameWriter, Refusal

from .seeds import World

__all__ = ["Descriptors", "Kernel", "Page", "Pipe", "SimReactor", "SimWorker"]

SEEN_WITHIN = 0.001
"""Maximum seconds until the other side sees a store to a shared page."""


class Pipe:
    """A pipe whose ends are open or closed."""

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
        """Open an end; each number is used once, so that use after close is found."""
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
        """Return the events of `poll`; none for a closed descriptor."""
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
    """System calls on virtual descriptors, in pieces that the world chooses."""

    def __init__(self, world: World, cuts: bool) -> None:
        self.world = world
        self.cuts = cuts
        self.fds = Descriptors()
        self.pages: list[Page] = []

    def _some(self, n: int) -> int:
        draw = self.world.draw.pipes
        return 1 + draw.below(n) if self.cuts and n > 1 and draw.chance(0.3) else n

    def put(self, pipe: Pipe, data: bytes | memoryview) -> int:
        """Write some of the data; 0 without room."""
        n = min(pipe.room, len(data))
        if n:
            n = self._some(n)
            pipe.data += data[:n]
        return n

    def take(self, pipe: Pipe, n: int) -> bytes:
        """Read some of the available data."""
        n = self._some(min(n, len(pipe.data))) if pipe.data else 0
        data = bytes(pipe.data[:n])
        del pipe.data[:n]
        return data

    def read(self, fd: int, n: int) -> bytes:
        """Like `os.read` of a non-blocking pipe."""
        pipe, _ = self.fds.open[fd]
        data = self.take(pipe, n)
        if not data and pipe.writing:
            raise BlockingIOError
        return data

    def readv(self, fd: int, buffers: list[memoryview]) -> int:
        """Like `os.readv` with one buffer."""
        data = self.read(fd, len(buffers[0]))
        buffers[0][: len(data)] = data
        return len(data)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Like `os.write` to a non-blocking pipe. The other side then sees earlier stores."""
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
        """Like `os.writev`."""
        return self.write(fd, b"".join(buffers))


class _View:
    """One side's view of a part of a page; it sees the other side's stores when they are shown."""

    def __init__(self, page: Page, mine: Any, theirs: Any, by_parent: bool) -> None:
        self._page, self._mine, self._theirs, self._by_parent = page, mine, theirs, by_parent

    def __getitem__(self, key: Any) -> Any:
        return self._mine[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mine[key] = value
        self._page.store(self._by_parent, self._theirs, key, value)


class _Stack:
    """The place of a worker's requested stack, always empty."""

    def __getitem__(self, key: Any) -> bytes:
        return b""

    def __setitem__(self, key: Any, value: bytes) -> None:
        """Ignore the clearing before each request."""


class Page:
    """A shared page as each of two processors sees it."""

    def __init__(self, world: Any, capacity: int) -> None:
        self._world = world
        self.capacity = capacity
        sides = [memoryview(bytearray(HEADER + capacity)) for _ in range(2)]
        self._words = [side[:HEADER].cast("Q") for side in sides]
        self._data = [side[HEADER:] for side in sides]
        # Stores unseen by the other side: (by the parent, time limit, memory, key, value)
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
        """Store for one side; the other side sees it later."""
        due = self._world.now + self._world.draw.pages.up_to(SEEN_WITHIN)
        self._pending.append((by_parent, due, memory, key, value))

    def show(self, by_parent: bool | None = None) -> None:
        """Show all stores, or those of one side, as a system call or a death does."""
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
        """Show stores that are due, each word's in order."""
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
    """The part of epoll that `Reactor` uses; instead of blocking, the world goes on."""

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
        self._bell_fd, self._wake_w = fds.add(self._pipe, False), fds.add(self._pipe, True)
        self._epoll: Any = _Epoll(world)
        self._epoll.register(self._bell_fd, select.POLLIN)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers = TimeQueue()
        self.closed = False

    def now(self) -> float:
        now: float = self._world.now
        return now

    def wake(self) -> None:
        if self._pipe.room:
            self._pipe.data += b"!"

    def handle(self, fd: int) -> None:
        if fd == self._bell_fd:
            self._pipe.data.clear()
        else:
            super().handle(fd)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            left = set(self._epoll.masks) - {self._bell_fd}
            self._epoll.close()
            self._world.kernel.fds.close(self._bell_fd)
            self._world.kernel.fds.close(self._wake_w)
            if left or self._handlers:
                self._world.wrong(
                    f"still watched at the end: {sorted(left)} {sorted(self._handlers)}"
                )


class _Poller:
    """The poller of a caller that receives its own answer; it never blocks."""

    def __init__(self, world: Any, fds: list[int]) -> None:
        self._world, self._fds = world, fds

    def poll(self, _: float) -> list[tuple[int, int]]:
        events = self._world.kernel.fds.events
        found = ((fd, events(fd, select.POLLIN)) for fd in self._fds)
        return [(fd, what) for fd, what in found if what]


class _Refused(OSError):
    """The world refuses to start a process."""


class SimWorker(WorkerProcess):
    """A worker whose process is a `Worker` of the world; its states and counts are real.

    Virtual workers send no invalid message, and only the world refuses starts. If the engine
    reports either for another exception, that is a bug.
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
        # The engine's lock is free during this, so callers and workers go on.
        world.others_go_on()
        if self.generation and world.refuses(self.index):
            raise _Refused(24, "the world has no descriptors left")
        process: list[Any] = []
        channels = [SimChannel(world, one, process) for one in self.workers]
        for channel in channels:
            channel.attach(process[0].handle)
        world.others_go_on()
        return process[0].handle, channels


class SimChannel:
    """A channel of virtual pipes with a virtual worker at the other end."""

    control = logs = None

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
        self._page.show()  # the process starts after this store

    def attach(self, handle: Any) -> None:
        self.poller: Any = _Poller(self._world, [self.reader.fd, handle.sentinel])

    def cut_lifeline(self) -> None:
        """Do nothing: the handle's signal is enough."""

    def close(self) -> None:
        if self in self._world.engine._direct:
            self._world.wrong(f"worker {self.index} is closed while a caller polls its pipe")
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
