"""The results of `imap` and `imap_unordered`, while their input is still drawn."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import repeat, starmap
from typing import Any, TypeVar

from xpool._calls.progress import Progress
from xpool._calls.results import (
    Job,
    PickledResult,
    Unopened,
    about_to_block,
    exception_in,
)
from xpool._python.item_notes import number_item
from xpool._python.waiters import Waiters, deadline_of
from xpool.errors import TimeoutError

T = TypeVar("T")


BOOKKEEPING = 256
"""Bytes that an untaken answer counts besides its size."""

AT_ONCE = 512
"""The most values that are moved to the buffer at once."""


_SMALL = frozenset((int, float, bool, type(None)))


def weigh(value: Any) -> int:
    """Return the approximate size of an answer in bytes; runs no code of the user."""
    kind = type(value)
    if kind in _SMALL:
        return BOOKKEEPING
    if isinstance(value, PickledResult):
        return value.nbytes + value.count * BOOKKEEPING
    if kind in (bytes, bytearray, str):
        return len(value) + BOOKKEEPING
    if kind.__module__ not in ("numpy", "torch"):
        return BOOKKEEPING
    # A sparse tensor has no `nbytes`.
    sparse = getattr(value, "is_sparse", False)
    parts = (value._indices(), value._values()) if sparse else (value,)
    return sum(getattr(part, "nbytes", 0) for part in parts) + BOOKKEEPING


class ResultBuffer:
    """Unpickled values that are handed out next, and counts.

    The engine writes ``bytes_in``, the size of all answers that have arrived; the consumer writes
    ``bytes_out``, the size of those that it has opened.
    """

    __slots__ = ("__weakref__", "bytes_in", "bytes_out", "moved", "next_task", "take",
                 "tasks_in", "values")  # fmt: skip

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.values: deque[Any] = deque(values)
        # Takes one value after the other.  If there is none, it raises `IndexError`, and can go on
        # later.  Threads may share it: neither `starmap` nor an endless `repeat` has a state.
        self.take: Iterator[Any] = starmap(self.values.popleft, repeat(()))
        self.moved = 0  # number of values that have ever been in this buffer
        self.bytes_in = self.bytes_out = 0
        self.tasks_in = 0  # number of tasks that have been answered
        self.next_task = 0  # the first task whose answer has not been moved here

    @property
    def handed_out(self) -> int:
        """Number of values that have been taken.

        Calculated: a signal handler could run between taking and counting.  While `_move` stores
        both operands it may be too low, but never too high.
        """
        return self.moved - len(self.values)


class IMapIterator(Iterator[T]):
    """The results of `imap`, in order, as `multiprocessing.pool.IMapIterator`."""

    ordered = True

    def __init__(self, label: str, pool: Any, chunked: bool) -> None:
        self.label = label
        self._pool = pool  # kept alive until all answers are in
        self._waiters = Waiters()
        self._chunked = chunked
        self.buffer = ResultBuffer()
        # Filled by the thread that delivers, emptied under `_taking`.  No common lock is needed: an
        # operation on a dict is atomic, and each key occurs once.
        # Values: whether the task succeeded, the answer, its weight, and the number of the task.
        self._arrived: dict[int, tuple[bool, Any, int, int]] = {}
        self._next = 0  # index of the first task not yet moved to the buffer
        self._length: int | None = None  # in tasks, when the input has ended
        self._failure: BaseException | PickledResult | None = None
        # Held while answers are unpickled, each once.  Reentrant: unpickling runs code of the
        # program, which may ask for the next result, and so may a signal handler.
        self._taking = threading.RLock()
        # With a buffersize: called when an item was handed out.
        self.taken: Callable[[], object] | None = None
        # Without: called when answers were opened, which makes room for more.
        self.opened: Callable[[], object] | None = None
        self.chunksize = 1
        self.items_per_task = 1
        self.with_index = False
        self.total: int | None = None  # number of items; None: the input has no length
        self.progress: Progress | None = None
        self.returns_errors = False
        # The job, and the flow control of its input.
        self.cancelling: tuple[Job, Any] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"

    def __len__(self) -> int:
        """Return the number of all results, taken ones included: the length of the input.

        Raises:
            TypeError: the input has no length.
        """
        if self.total is None:
            raise TypeError(f"{self!r} has no len(): its input has none")
        return self.total

    def __bool__(self) -> bool:
        # Otherwise `__len__` would decide: false for an empty input, an error without a length.
        return True

    __reduce__ = Job.__reduce__

    def __iter__(self) -> IMapIterator[T]:
        return self

    def next(self, timeout: float | None = None) -> T:
        """Return the next result, waiting at most ``timeout`` seconds for it.

        Raises:
            StopIteration: there are no more results.
            multiprocessing.TimeoutError: it has not arrived in time.
            Exception: what the task, or the input, raised (for StopIteration a `RuntimeError`).
        """
        # Set before the first wait, since most results have arrived already.
        deadline: float | None = None
        while True:
            buffer, got = self.buffer, False
            value: Any
            try:
                # A loop, since a signal handler that raises after a call would lose the value.
                for value in buffer.take:
                    got = True
                    try:
                        # If this raises, the value is put back.
                        if self.taken is not None:
                            self.taken()
                        if type(value) is not Unopened:
                            return value  # type: ignore[no-any-return]
                    except BaseException:
                        buffer.values.appendleft(value)
                        raise
                    try:
                        raise self._as_error(value.exc)
                    finally:
                        # Breaks a reference cycle: the traceback holds this frame.  So a dropped
                        # iterator releases its untaken results at once.
                        del self, buffer, value
            except IndexError:
                # Found out by trying, since several threads may share the iterator.
                if got:
                    raise
            try:
                if self._move():
                    continue
            except StopIteration:
                # The last state is shown before the caller goes on.
                if self.progress is not None:
                    self.progress.wait()
                raise
            if timeout is not None and deadline is None:
                deadline = deadline_of(timeout)
            about_to_block()
            left = None if deadline is None else deadline - time.monotonic()
            if not self._waiters.wait(self._movable, left):
                raise TimeoutError(
                    f"no next result of {self.label} after {timeout} s; print(pool.stacks()) says "
                    "where each worker is"
                )

    # The same function, which saves a call for each result of a loop.
    __next__ = next  # noqa: A003 - not the builtin

    def __aiter__(self) -> IMapIterator[T]:
        """Iterate in asyncio or trio.  Cancelling the ``async for`` cancels the remaining tasks."""
        return self

    def __anext__(self) -> Awaitable[T]:
        from xpool._python.event_loops import next_of

        return next_of(self)

    def cancel(self) -> bool:
        """Cancel the remaining tasks; return False if there are none.

        `next` raises `TaskCancelled` after the results that have arrived.  Running tasks are
        stopped as by `AsyncResult.cancel`, and the input is no longer drawn.
        """
        pool, cancelling = self._pool, self.cancelling
        if pool is None or cancelling is None:
            return False
        job, flow = cancelling
        cancelled: bool = pool._submitter.cancel(job)
        flow.stop()
        return cancelled

    def _movable(self) -> bool:
        # In this order: `_move` fills the buffer before it removes the answers from the dict.
        return bool(
            self._next in self._arrived
            or self.buffer.values
            or self._failure is not None
            or self._next == self._length
        )

    def _move(self) -> bool:
        """Move the next answers to the buffer; return False if none has arrived."""
        with self._taking:
            if self.buffer.values:
                return True
            first = self._next
            if first not in self._arrived:
                if first == self._length:
                    raise StopIteration
                if self._failure is not None:
                    raise self._as_error(exception_in(self._failure))
                return False
            # Unpickle before removing: an answer stays if a signal handler interrupts this.
            buffer = self.buffer
            new, keys, beyond, moved, weight = self._open_from(first)
            moved += buffer.moved
            weight += buffer.bytes_out
            # No call from here on, so this is atomic: signal handlers run, and threads switch,
            # after calls and at the beginning of functions.
            buffer.values, buffer.take = new.values, new.take
            buffer.moved = moved
            buffer.bytes_out = weight
            self._next = buffer.next_task = beyond
            for key in keys:
                del self._arrived[key]
        # Read once, since `release` clears it in another thread.
        opened = self.opened
        if opened is not None:
            opened()
        return True

    def _open_from(self, first: int) -> tuple[ResultBuffer, list[int], int, int, int]:
        """Open the answers from task ``first`` on: one `PickledResult`, or many values.

        Return the values, their keys in `_arrived`, the number of the next task, the number of
        items that the values stand for, and their weight.
        """
        arrived = self._arrived
        ok, value, weight, number = arrived[first]
        if isinstance(value, PickledResult):
            keys, beyond = [first], first + value.count
            values, errors = self._unpacked(ok, value.open(), self.returns_errors, number)
        else:
            # Values of single tasks, up to the next `PickledResult`.
            beyond, weight, values, errors = first, 0, [], 0
            plain = not self._chunked and not self.with_index
            while beyond - first < AT_ONCE and beyond in arrived:
                ok, value, more, number = arrived[beyond]
                if isinstance(value, PickledResult):
                    break
                beyond += 1
                weight += more
                if ok and plain:
                    values.append(value)
                    continue
                # An error of the input is never returned in place of a result.
                returns = self.returns_errors and type(value) is not Unopened
                got, failed = self._unpacked(ok, [value], returns, number)
                values += got
                errors += failed
            keys = list(range(first, beyond))
        # One error stands for a chunk.
        moved = len(values) + errors * (self.chunksize - 1) * self._chunked
        return ResultBuffer(values), keys, beyond, moved, weight

    def _unpacked(
        self, ok: bool, values: list[Any], returns: bool, number: int
    ) -> tuple[list[Any], int]:
        """Return items for the values of tasks, `Unopened` for errors, and the number of errors.

        ``number`` is that of the first task.
        """
        if returns or not ok:
            errors = [v.exc if type(v) is Unopened else v for v in values]
            for task, error in enumerate(errors, number):
                if isinstance(error, BaseException):
                    number_item(error, task * self.items_per_task, self.label)
            if returns:  # each item is a task
                return list(enumerate(errors, number)) if self.with_index else errors, 0
            return [Unopened(error) for error in errors], len(errors)
        if self.with_index:
            values = [self._indexed(value, i) for i, value in enumerate(values, number)]
        if self._chunked:
            return [x for v in values for x in ((v,) if type(v) is Unopened else v)], 0
        return values, 0

    def _indexed(self, value: Any, number: int) -> Any:
        """Return the value of a task with the index of each item."""
        if type(value) is Unopened:
            return value
        return (
            list(enumerate(value, number * self.items_per_task))
            if self._chunked
            else (number, value)
        )

    def _as_error(self, exc: BaseException) -> BaseException:
        """Return ``exc``; for StopIteration a RuntimeError, as in PEP 479."""
        if not isinstance(exc, StopIteration):
            return exc
        error = RuntimeError(
            f"a task of {self.label}, or its input, raised StopIteration, which would end the loop "
            "over the results early; give next() a default there, or catch the exception"
        )
        error.__cause__ = exc
        return error

    # -- the engine's side -------------------------------------------------------------------

    def arrive(self, place: int, ok: bool, value: Any, index: int) -> None:
        """Take the answer of the tasks from ``index`` on.

        ``place``: the number of tasks whose answers are handed out before it.
        """
        weight = weigh(value)
        # Counted before it can be taken, so that `bytes_out` is never larger.
        self.buffer.bytes_in += weight
        self._arrived[place] = ok, value, weight, index
        # Last, here and below: woken threads check the fields set before.
        if self._waiters.copy():  # as in `Waiters.wake`, without a call for most results
            self._waiters.wake()

    def finish(self, length: int) -> None:
        """Note that the input had ``length`` tasks."""
        self._length = length
        self._waiters.wake()

    def fail(self, exc: BaseException | PickledResult) -> None:
        """Have `next` raise ``exc`` after the answers that have arrived; `release` follows."""
        self._failure = exc

    def release(self) -> None:
        """Note that no more answers follow."""
        # From here on, the pool may be dropped.
        self._pool = self.opened = None
        self._waiters.wake()


class IMapUnorderedIterator(IMapIterator[T]):
    """The results of `imap_unordered`, in the order of their arrival."""

    ordered = False


class Stream(Job):
    """The job of an `imap`.  It does not hold the iterator, which the caller may drop.

    Then ``gone`` is called; the tasks still run, and their answers are dropped.
    """

    def __init__(self, iterator: IMapIterator[Any], number: int, gone: Callable[[], None]) -> None:
        # Without the pool: the iterator holds it.
        super().__init__(number, iterator.label, None)
        self._iterator = weakref.ref(iterator, lambda _: gone())
        self._answered = 0
        self._length: int | None = None
        # Called with the number of answered tasks, if drawing the input depends on it.
        self.answers: Callable[[int], object] | None = None
        # Submits consecutive items together: an `xpool._pools.input_reader.Runs`.
        self.runs: Any = None

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        # As `tasks_in`, without a call, since every answer of a stream comes here.
        tasks = value.count if isinstance(value, PickledResult) else 1
        before = self._answered
        self._answered = before + tasks
        if self.progress is not None:
            self.progress.add(tasks)
        if self.answers is not None:
            self.answers(tasks)
        iterator = self._iterator()
        if iterator is not None:
            iterator.buffer.tasks_in = self._answered
            iterator.arrive(index if iterator.ordered else before, ok, value, index)
        self.settled = self._answered == self._length
        return self.settled

    def record(self, index: int, ok: bool, value: Any) -> bool:
        """As `deliver`, of an answer that a journal has stored."""
        # `Recorded` overrides `deliver`.
        return Stream.deliver(self, index, ok, value)

    def hold_back(self, value: Any, times: int = 1) -> None:
        """Count the memory of an answer that is not handed on yet; -1: it is handed on now."""
        iterator = self._iterator()
        if iterator is not None:
            iterator.buffer.bytes_in += times * weigh(value)

    def around(self, put: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        """Return a function that is called with each item in place of ``put``."""
        return put

    def end(self, length: int) -> bool:
        """Note that the input had ``length`` tasks; return whether all are answered."""
        if self.settled:
            return False
        self._length = length
        iterator = self._iterator()
        if iterator is not None:
            iterator.finish(length)
        # All may have been answered before their number was known.
        self.settled = self._answered == length
        return self.settled

    def fail(self, exc: BaseException | PickledResult) -> None:
        if not self.settled:
            self.settled = True
            iterator = self._iterator()
            if iterator is not None:
                iterator.fail(exc)

    def release(self) -> None:
        iterator = self._iterator()
        if iterator is not None:
            iterator.release()
        super().release()
