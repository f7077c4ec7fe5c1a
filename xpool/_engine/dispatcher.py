"""Sends tasks to workers, and the functions that the tasks call.

Called with the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Iterable

from xpool._engine.jobs.scheduler import Batch
from xpool._engine.reactor import Reactor
from xpool._engine.worker_process import WorkerProcess
from xpool._pickling.frame import inline
from xpool._wire.wire import TASKS, TIMED, FrameWriter, Parts, forget_frame, func_frame, tasks_frame


class Dispatcher:
    """Writes messages to workers, and keeps the functions of unfinished jobs."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        # Functions by number.  They are kept until the job ends, for workers that start later.
        self._functions: dict[int, tuple[int, bytes | memoryview]] = {}
        self._last_number = 0

    def learn(self, mode: int, payload: bytes | memoryview) -> int:
        """Keep a function; return the number that tasks call it by."""
        self._last_number += 1
        self._functions[self._last_number] = mode, payload
        return self._last_number

    def forget(self, func: int, workers: Iterable[WorkerProcess]) -> None:
        """Let workers drop a function: its job is done."""
        self._functions.pop(func, None)
        for worker in workers:
            worker.functions.drop(func)

    def send_batch(self, worker: WorkerProcess, batch: Batch) -> None:
        """Send tasks to a worker, after their function if it does not have that yet."""
        parts: Parts = []
        # Functions to drop first, then the function, then its tasks: all in one write.
        functions = worker.functions
        if functions.dropped:
            parts = forget_frame(functions.take_dropped())
        func = batch.func
        if func and func not in functions.known and func in self._functions:
            # If the function is missing, its job has failed: answers to its tasks are ignored.
            functions.add(func)
            mode, payload = self._functions[func]
            parts += func_frame(func, mode, payload if worker.mapped else inline(payload))
        items = batch.items if worker.mapped else [inline(item) for item in batch.items]
        tasks = tasks_frame(func, items, TASKS if batch.terms.limit is None else TIMED)
        worker.writer.send(parts + tasks if parts else tasks)
        if worker.writer.backlog:
            self._flush_later(worker.writer)
        if batch.flow is not None:
            batch.flow.taken(batch.items)

    def send(self, worker: WorkerProcess, parts: Parts) -> None:
        """Write a frame: as much as the pipe has room for now, and the rest later."""
        worker.writer.send(parts)
        if worker.writer.backlog:
            self._flush_later(worker.writer)

    def _flush_later(self, writer: FrameWriter) -> None:
        # If the pipe is watched already, `flush` will write the backlog.
        if writer.fd in self._reactor:
            return

        def flush(fd: int) -> None:
            writer.flush()
            # Stop watching, since epoll reports a pipe with room at every turn.
            if not writer.backlog:
                self._reactor.remove(fd)

        self._reactor.add(writer.fd, flush, writable=True)
