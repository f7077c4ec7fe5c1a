"""`TaskStream` pickles what an input reader draws and appends it to a range of tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpool._engine.jobs.ranges import TaskRange
from xpool._pools.input_reader import FlowControl

if TYPE_CHECKING:
    from xpool._engine.protocols import EngineProtocol
    from xpool._pools.packing import Packer


class TaskStream:
    """Puts the tasks of one `imap` where the workers take them.

    ``task_range``: of its job, still empty.  ``owner``: the worker to which all are bound (-1: each
    to the one with the least to do); None: to where its tensors lie, or to none.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        packer: Packer,
        task_range: TaskRange,
        flow: FlowControl,
        owner: int | None,
    ) -> None:
        # The pool's, and not the pool itself, which the input reader must not keep.
        self._engine = engine
        self._task_range = task_range
        task_range.flow = flow
        task_range.may_run, flow.resume = flow.may_run, engine.resume
        self._next = 0
        self._packer = packer
        self._kept = task_range.terms.retries > 0
        self._owner = owner

    def put(self, index: int, task: Any) -> int:
        """Pickle an item and hand it on; return its size in bytes."""
        payload, worker = self._packer.pack_task(task, self._kept, self._owner)
        if worker is not None:
            self._engine.submit(self._task_range.beside(index, (payload,), worker))
            return self._engine.sent(payload)
        task_range = self._from(index)
        self._next = index + 1
        task_range.items.append(payload)
        # The engine looks at the items after it has marked a worker idle or the task range as not
        # queued, and we look at the marks after appending: one of us sees the other.
        if not task_range.queued or self._engine.idle:
            self._engine.feed(task_range)
        return self._engine.sent(payload)

    def put_run(self, index: int, payloads: list[bytes]) -> int:
        """As `put`, of several that are pickled."""
        task_range = self._from(index)
        self._next = index + len(payloads)
        task_range.items.extend(payloads)
        if not task_range.queued or self._engine.idle:
            self._engine.feed(task_range)
        return sum(map(len, payloads))

    def _from(self, index: int) -> TaskRange:
        """Return the range to which item ``index`` is appended."""
        if index != self._next:
            # An item in between could not be sent, and a task range has no gaps: begin another one.
            self._task_range = self._task_range.beside(index)
        return self._task_range
