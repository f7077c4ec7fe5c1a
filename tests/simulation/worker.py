"""A virtual worker process, which follows `xpool._worker.protocol` and stops at every visible step.

It may also be a thread of a process, beside its siblings: `xpool._worker.worker_threads`.

At each ``yield`` the world may let others go on, or end the process. The yielded value says when
the worker may go on: None, at once; a number, at that time; a function, when it returns true.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from xpool._engine.worker_process import WorkerProcess
from xpool._wire.outbox import _SINCE, STACK_SIGNAL, STOP_SIGNAL
from xpool._wire.wire import (
    BODY_AGAIN,
    BODY_ERROR,
    BOOT,
    STOP,
    TASKS,
    TIMED,
    TO_WORKER,
    Parts,
    Refusal,
)
from xpool._worker.protocol import Inbox, Replies

from .virtual import Page, Pipe

__all__ = ["Handle", "Worker"]

_WITHDRAWN = object()


class Handle:
    """A process as the parent sees it (a `Handle` of `launch`); the world decides its reports."""

    def __init__(self, world: Any, worker: Worker) -> None:
        self._world = world
        self._worker = worker  # one of its siblings
        self.news = Pipe(16)
        self.sentinel: int = world.kernel.fds.add(self.news, False)
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.problem: Exception | None = None
        self.has_server = True  # which reports the exit code
        self._ended = False

    def ended(self) -> bool:
        """Read the reports."""
        if self.news.data:
            self.pid = self._worker.pid
            self.news.data.clear()
        if not self.news.writing and not self._ended:
            self._ended = True
            self.exitcode = self._worker.reported
        return self._ended

    def signal(self, signum: int) -> None:
        """SIGKILL ends the process; unless it is deaf, SIGTERM ends it and the stop signal
        interrupts."""
        if signum == 9:
            self._worker.doomed = -9
        elif signum in (STOP_SIGNAL, STACK_SIGNAL):
            for worker in self._worker.siblings:
                if not worker.deaf:
                    worker.asked = True
        elif not self._worker.deaf:
            self._worker.doomed = -signum

    def close(self) -> None:
        if not self._ended:
            self._world.wrong("a process was closed before its end")
        self._world.kernel.fds.close(self.sentinel)


class Worker:
    """One process: its ends of the pipes, its view of the page, and its state.

    ``siblings``: the workers of the process, itself included.
    """

    def __init__(
        self,
        world: Any,
        place: WorkerProcess,
        tasks: Pipe,
        answers: Pipe,
        page: Page,
        siblings: list[Worker],
    ) -> None:
        self.world = world
        self.index = place.index
        self.generation = place.generation + 1  # counted after the start
        self.siblings = siblings
        siblings.append(self)
        first = siblings[0]
        self.pid: int = world.next_pid() if first is self else first.pid
        self.ready = self.through = False  # it could serve; it was told to stop
        self.greeted = False  # it has sent that it is ready
        self.tasks, self.answers, self.page = tasks, answers, page
        self.box = page.box(by_parent=False)
        self.handle: Handle = Handle(world, self) if first is self else first.handle
        self.alive = True
        self.doomed: int | None = None  # the exit code with which it will end
        # SIGTERM has no effect: it is stopped, or in C code.
        self.deaf = world.draw.faults.chance(world.deafness)
        self.asked = False  # the stop signal has come and is not handled yet
        self.reported: int | None = None
        self.started: list[tuple[int, int]] = []  # tasks, in order
        self.at_work: tuple[int, int] | None = None  # the running task
        self.began_at = 0.0  # when that began
        self.came_at = 0.0  # when that was announced
        self.unsafe: tuple[int, int] | None = None  # finished, and its answer would die with this
        self.unsent: tuple[int, int] | None = None  # finished, with its answer not yet announced
        self.at_door: tuple[int, int] | None = None  # announced, and not begun yet
        self._buffer = bytearray()
        self._outgoing: list[bytes] = []  # from the protocol, not yet written by this process
        self._replies = Replies(self.box, self._send, lambda: world.now)
        self._replies.small = world.box_size // 4
        self._inbox = Inbox(self._replies, lambda number, mode, payload: number, _WITHDRAWN)
        self._life = self._live()
        self._when: float | Callable[[], bool] | None = None

    # -- the world's side ------------------------------------------------------------------------

    def may_go_on(self) -> bool:
        """Whether it could make a step now."""
        if self.doomed is not None:
            return True
        if self.asked and self.at_work is not None:
            return True
        when = self._when
        if when is None:
            return True
        if isinstance(when, float):
            return when <= float(self.world.now)
        return bool(when())

    @property
    def wakes_at(self) -> float | None:
        """When it goes on if nothing happens, or None."""
        return self._when if isinstance(self._when, float) else None

    def go_on(self) -> None:
        """Make one step, or end."""
        if self.doomed is not None:
            self.end(self.doomed)
            return
        try:
            self._when = next(self._life)
        except StopIteration as stop:
            if self.through and not all(one.through for one in self.siblings):
                self._when = lambda: False  # wait for the siblings
            else:
                self.end(stop.value)

    def end(self, code: int) -> None:
        """End the process: show its stores, close its ends."""
        for one in self.siblings:
            one.alive = False
            one._life.close()
            one.page.show()
            one.tasks.reading = one.answers.writing = False
            self.world.ended(one, code)
        self.world.reports.append((self.handle, code))

    # -- its own ---------------------------------------------------------------------------------

    def _live(self) -> Any:
        world = self.world
        kind, _, size = TO_WORKER.unpack((yield from self._read(TO_WORKER.size)))
        if kind != BOOT:
            world.wrong(f"the first message to a worker is of kind {kind}")
        config = yield from self._read(size)
        if config != world.config(self.index, self.generation, None):
            world.wrong(f"worker {self.index} of generation {self.generation} gets {config}")
        yield world.now + world.start_takes()
        if world.fails_to_start():
            self._replies.refuse(Refusal("no device", b""))
            yield from self._write()
            return 1
        self.ready = True
        if len(self.siblings) > 1:
            yield lambda: all(one.ready for one in self.siblings)
        self._replies.ready(world.draw.starts.chance(0.5))
        yield from self._write()
        self.greeted = True
        world.failed_starts[self.index] = 0
        while True:
            try:
                kind, count, size = TO_WORKER.unpack((yield from self._read(TO_WORKER.size)))
                body = yield from self._read(size)
            except EOFError:
                return 0
            if kind in (TASKS, TIMED):
                code = yield from self._tasks(count, body, kind == TIMED)
                if code is not None:
                    return code
            elif kind == STOP:
                self.through = True
                return 0
            elif not self._inbox.take(kind, body):
                world.wrong(f"a worker got a message of kind {kind}")

    def _read(self, n: int) -> Any:
        buffer = self._buffer
        while len(buffer) < n:
            if not self.tasks.data:
                yield lambda: bool(self.tasks.data) or not self.tasks.writing
                if not self.tasks.data:
                    raise EOFError
            buffer += self.world.kernel.take(self.tasks, 65536)
        data = bytes(buffer[:n])
        del buffer[:n]
        return data

    def _send(self, parts: Parts) -> None:
        self._outgoing.append(b"".join(parts))

    def _write(self) -> Any:
        """Write the protocol's output in as many system calls as needed."""
        while self._outgoing:
            data = self._outgoing.pop(0)
            self.page.show(by_parent=False)
            while data:
                yield lambda: self.answers.room > 0
                n = self.world.kernel.put(self.answers, data)
                data = data[n:]

    def _tasks(self, count: int, body: bytes, timed: bool) -> Any:
        world, words = self.world, self.box.words
        sizes = struct.unpack_from(f"<{count + 1}Q", body)
        at = 8 * (count + 1)
        items = self._inbox.items(count, body)
        for size in sizes[1:]:
            self.at_door, self.came_at = world.task_of(body[at : at + size]), world.now
            at += size
            item = next(items, None)
            yield None
            if item is None:
                yield from self._write()
                self.at_door = None
                return None
            self.at_door = None
            func, payload, last = item
            plan = world.begins(self, payload, func is not _WITHDRAWN)
            self.at_work = plan.task
            self.began_at = world.now
            if timed:
                words[_SINCE] = int(world.now * 1e9)
            until = world.now + plan.takes
            stopped = False
            while world.now < until and not stopped:
                yield until
                if self.asked:
                    self.asked = False
                    stopped = self.box.told_to_stop()
            if timed:
                words[_SINCE] = 0
            if plan.code is not None and not stopped:
                if plan.rings:  # sys.exit: announce what is finished
                    self._replies.ring()
                    yield from self._write()
                return plan.code
            self.at_work = None
            self.unsafe = self.unsent = plan.task
            world.finishes(plan, self.came_at)
            error = BODY_ERROR if plan.error or stopped else 0
            if plan.again and not stopped:
                error |= BODY_AGAIN
            before = self.box.tail
            self._replies.answer(plan.answer, error, last)
            if self.box.tail != before:  # the answer is in the outbox
                self.unsafe = None
                yield None
            yield from self._write()
            self.unsafe = self.unsent = None
        return None
