"""The results of `imap` and `imap_unordered`, while the pool still draws their input."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import count, islice, repeat, starmap
from typing import Any, TypeVar

from xpool._calls.progress import Progress
from xpool._calls.results import (
    Job,
    PickledResult,
    Unopened,
    about_to_block,
    exception_in,
    tasks_in,
)
from xpool._python.failures import number_item
from xpool._python.waiters import Waiters, deadline_of, next_of
from xpool.errors import TimeoutError

T = TypeVar("T")


BOOKKEEPING = 256
"""Bytes that are added to the size of each answer, for the objects that hold it."""

AT_ONCE = 512
"""The largest number of values that are moved to the buffer at once."""


_SMALL = frozenset((int, float, bool, type(None)))


_FEW = 16  # elements of a container that stand for all of it


def weigh(value: Any) -> int:
    """Return the approximate size of an answer in bytes.  This runs no code of the user."""
    if isinstance(value, PickledResult):
        return value.nbytes + value.count * BOOKKEEPING
    return _size(value, 3) + BOOKKEEPING


def _size(value: Any, depth: int) -> int:
    """Return the size of texts, arrays and tensors, also in lists, tuples and dicts: a chunk has a
    list of results, and a result is often a tuple of arrays."""
    kind = type(value)
    if kind in (bytes, bytearray, str):
        return len(value)
    if kind in (list, tuple, dict) and depth:
        try:
            few = [*islice(value.values() if kind is dict else value, _FEW)]
        except RuntimeError:  # another thread has changed the dict
            return 0
        sizes = sum([_size(one, depth - 1) for one in few])
        return 8 * len(value) + (sizes * len(value) // len(few) if few else 0)
    if kind.__module__ not in ("numpy", "torch"):
        return 0
    # A sparse tensor has no `nbytes`.
    sparse = getattr(value, "is_sparse", False)
    parts = (value._indices(), value._values()) if sparse else (value,)
    return sum(getattr(part, "nbytes", 0) for part in parts)


MOST_RAISED = 1000
"""How often an iterator raises the error of its whole job: each of several threads gets it, but a
loop that notes the errors of single items and goes on must end."""


class ResultBuffer:
    """The unpickled values that the caller gets next, and counts.

    The engine writes ``bytes_in``, the size of all answers that have arrived.  The consumer writes
    ``bytes_out``, the size of the answers that it has unpickled.
    """

    __slots__ = ("__weakref__", "bytes_in", "bytes_out", "moved", "next_task", "take",
                 "tasks_in", "values")  # fmt: skip

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self.values: deque[Any] = deque(values)
        # Takes one value after the other.  If `values` is empty, it raises `IndexError`, but works
        # again later.  Threads may share it: neither `starmap` nor an endless `repeat` has a state.
        self.take: Iterator[Any] = starmap(self.values.popleft, repeat(()))
        self.moved = 0  # number of values that have ever been in this buffer
        self.bytes_in = self.bytes_out = 0
        self.tasks_in = 0  # number of tasks that have been answered
        self.next_task = 0  # the first task whose answer has not been moved here

    @property
    def handed_out(self) -> int:
        """Number of values that the caller has taken.

        It is the difference of two numbers, and not a counter, because a signal handler could run
        between taking a value and counting it.  While `_move` stores the two numbers, the
        difference may be too low, but never too high.
        """
        return self.moved - len(self.values)


class IMapIterator(Iterator[T]):
    """The results of `imap`, in the order of the input, as `multiprocessing.pool.IMapIterator`."""

    ordered = True

    def __init__(self, label: str, pool: Any, chunked: bool) -> None:
        self.label = label
        self._pool = pool  # kept alive until all answers have arrived
        self._waiters = Waiters()
        self._chunked = chunked
        self.buffer = ResultBuffer()
        # The delivering thread fills it, and `_move` empties it under `_taking`.  They need no
        # common lock, because an operation on a dict is atomic, and each key occurs only once.
        # Values: whether the task succeeded, the answer, its weight, and the number of the task.
        self._arrived: dict[int, tuple[bool, Any, int, int]] = {}
        self._next = 0  # index of the first task that was not moved to the buffer
        self._length: int | None = None  # number of tasks, when the input has ended
        self._failure: BaseException | PickledResult | None = None  # of the whole job
        self._raised = 0  # how often a caller got it
        # Held while answers are unpickled, so that each is unpickled once.  Reentrant, because code
        # that unpickling runs, or a signal handler, may ask for the next result.
        self._taking = threading.RLock()
        # With a buffersize: called when the caller has taken an item.
        self.taken: Callable[[], object] | None = None
        # Without a buffersize: called when answers were unpickled, which makes room for more.
        self.opened: Callable[[], object] | None = None
        self.items_per_task = 1
        self.with_index = False
        # Makes the numbers of consecutive tasks, from the first on.
        self.numbers: Callable[[int], Iterable[int]] = count
        self.total: int | None = None  # number of items; None: the input has no length
        self.progress: Progress | None = None
        self.returns_errors = False
        # The job, and the flow control of its input.
        self.cancelling: tuple[Stream, Any] | None = None
        self._cancelled = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"

    def __len__(self) -> int:
        """Return the number of all results, including those taken: the length of the input.

        Raises:
            TypeError: the input has no length.
        """
        if self.total is None:
            raise TypeError(
                f"{self!r} has no len(): its input has none, or an item gives many results"
            )
        return self.total

    def __bool__(self) -> bool:
        # Python would otherwise use `__len__`: False for an empty input, or an error.
        return True

    __reduce__ = Job.__reduce__

    def next(self, timeout: float | None = None) -> T:
        """Return the next result.  Wait for it at most ``timeout`` seconds; None: without limit.

        Raises:
            StopIteration: all results were returned, or the error of the whole job was raised by a
                thousand calls.
            multiprocessing.TimeoutError: the result has not arrived in time.
            Exception: the error of the task or the input; a `RuntimeError` for a StopIteration.
            RuntimeError: a finalizer has called this, and no result can arrive any more.
        """
        # Computed only before the first wait, because most results have already arrived.
        deadline: float | None = None
        while True:
            buffer, got = self.buffer, False
            value: Any
            try:
                # A loop and not a call: a signal handler may raise between the end of a call and
                # the assignment of its value, and then the value is lost.
                for value in buffer.take:
                    got = True
                    try:
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
                        # Break a reference cycle (the traceback keeps this frame), so that a
                        # dropped iterator frees its untaken results at once.
                        del self, buffer, value
            except IndexError:  # the buffer was empty; other threads may take from it, too
                if got:
                    raise
            try:
                if self._move():
                    continue
            except StopIteration:
                # Show the last state before the caller continues.
                if self.progress is not None:
                    self.progress.wait()
                raise
            if timeout is not None and deadline is None:
                deadline = deadline_of(timeout)
            if self.cancelling is not None and self.cancelling[0]._iterator() is None:
                raise RuntimeError(
                    f"{self.label} has no more results: the garbage collector has found its "
                    "iterator in a cycle that nothing refers to, and a finalizer uses the iterator"
                )
            about_to_block(self._pool)
            left = None if deadline is None else deadline - time.monotonic()
            if not self._waiters.wait(self._movable, left):
                raise TimeoutError(
                    f"no next result of {self.label} after {timeout} s; print(pool.stacks()) says "
                    "where each worker is"
                )

    # The same function, because a second one would cost a call for each result of a loop.
    __next__ = next  # noqa: A003 - not the builtin

    def __aiter__(self) -> IMapIterator[T]:
        """Iterate in asyncio or trio.  Cancelling the ``async for`` cancels the remaining tasks."""
        return self

    def __anext__(self) -> Awaitable[T]:
        return next_of(self)

    def cancel(self) -> bool:
        """Cancel the remaining tasks.  Return False if all have been answered before.

        `next` returns the results that have arrived, and then raises `TaskCancelled`.  Running
        tasks are stopped as by `AsyncResult.cancel`, and no more input is drawn.
        """
        pool, cancelling = self._pool, self.cancelling
        if pool is None or cancelling is None:
            return self._cancelled
        job, flow = cancelling
        if pool._submitter.cancel(job):
            self._cancelled = True
        flow.stop()
        return self._cancelled

    def close(self) -> None:
        """Cancel the remaining tasks, as `cancel`.  `contextlib.closing` calls this."""
        self.cancel()

    def _movable(self) -> bool:
        first = -1
        while first != self._next:  # else another thread has moved answers since
            first = self._next
            # Checked in this order, because `_move` fills the buffer before it empties the dict.
            if (
                first in self._arrived
                or self.buffer.values
                or self._failure is not None
                or first == self._length
            ):
                return True
        return False

    def _move(self) -> bool:
        """Move the next answers to the buffer.  Return False if none has arrived."""
        with self._taking:
            if self.buffer.values:
                return True
            first = self._next
            if first not in self._arrived:
                if first == self._length:
                    raise StopIteration
                if self._failure is not None:
                    if self._raised == MOST_RAISED:
                        raise StopIteration
                    self._raised += 1
                    raise self._as_error(exception_in(self._failure))
                return False
            # Unpickled before they are removed: if a signal handler raises, the answers remain.
            buffer = self.buffer
            new, keys, beyond, moved, weight = self._open_from(first)
            moved += buffer.moved
            weight += buffer.bytes_out
            # The assignments are atomic, because there is no call: signal handlers run, and threads
            # switch, only after calls and at the beginning of functions.
            buffer.values, buffer.take = new.values, new.take
            buffer.moved = moved
            buffer.bytes_out = weight
            self._next = buffer.next_task = beyond
            for key in keys:
                del self._arrived[key]
        opened = self.opened  # read once, because `release` clears it in another thread
        if opened is not None:
            opened()
        return True

    def _open_from(self, first: int) -> tuple[ResultBuffer, list[int], int, int, int]:
        """Unpickle the answers from task ``first`` on: one `PickledResult`, or many values.

        Return the values, their keys in `_arrived`, the number of the next task, the number of
        items of these tasks, and the weight of the answers.
        """
        arrived = self._arrived
        ok, value, weight, number = arrived[first]
        if isinstance(value, PickledResult):
            keys, beyond = [first], first + value.count
            values, errors = self._unpacked(ok, value.open(), self.returns_errors, number)
        else:
            # Take the values of single tasks up to the next `PickledResult`.
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
                # An error of the input is always raised, and never returned as a result.
                returns = self.returns_errors and type(value) is not Unopened
                got, failed = self._unpacked(ok, [value], returns, number)
                values += got
                errors += failed
            keys = list(range(first, beyond))
        # One error takes the place of all items of a chunk.
        moved = len(values) + errors * (self.items_per_task - 1)
        return ResultBuffer(values), keys, beyond, moved, weight

    def _unpacked(
        self, ok: bool, values: list[Any], returns: bool, number: int
    ) -> tuple[list[Any], int]:
        """Return the items in the values of tasks, with `Unopened` for each error, and the number
        of errors.  ``number`` is that of the first task.
        """
        if returns or not ok:
            errors = [v.exc if type(v) is Unopened else v for v in values]
            for task, error in zip(self.numbers(number), errors):
                if isinstance(error, BaseException):
                    number_item(error, task * self.items_per_task, self.label)
            if returns:  # then each item is its own task
                return list(zip(self.numbers(number), errors)) if self.with_index else errors, 0
            return [Unopened(error) for error in errors], len(errors)
        if self.with_index:
            size = self.items_per_task
            values = [
                v if type(v) is Unopened
                else list(enumerate(v, i * size)) if self._chunked else (i, v)
                for i, v in zip(self.numbers(number), values)
            ]  # fmt: skip
        if self._chunked:
            return [x for v in values for x in ((v,) if type(v) is Unopened else v)], 0
        return values, 0

    def _as_error(self, exc: BaseException) -> BaseException:
        """Return ``exc``, or a `RuntimeError` in place of a StopIteration, as in PEP 479."""
        if not isinstance(exc, StopIteration):
            return exc
        error = RuntimeError(
            f"a task of {self.label}, or its input, raised StopIteration, which would end the loop "
            "over the results early; give next() a default there, or catch the exception"
        )
        error.__cause__ = exc
        return error

    # -- the engine's side -------------------------------------------------------------------

    def arrive(self, place: int, ok: bool, value: Any, index: int, weight: int) -> None:
        """Take the answer of the tasks from ``index`` on, which `weigh` has weighed.

        The caller gets the answers of ``place`` tasks before this one.
        """
        # Counted before the answer can be taken, so that `bytes_out` is never larger.
        self.buffer.bytes_in += weight
        self._arrived[place] = ok, value, weight, index
        # Wake last, here and below, because woken threads check the fields that were set.  They
        # wait for the next answer in order: `_move` sets `_next` before they check and wait.  If
        # one of them has moved this answer already, wake the others, too: it may have several
        # values.
        if place <= self._next and self._waiters.copy():
            self._waiters.wake()

    def finish(self, length: int) -> None:
        """Record that the input had ``length`` tasks."""
        self._length = length
        self._waiters.wake()

    def fail(self, exc: BaseException | PickledResult) -> None:
        """Make `next` raise ``exc`` after the answers that have arrived.  `release` follows."""
        self._failure = exc

    def release(self) -> None:
        """Record that no more answers follow, so that the pool may be dropped."""
        self._pool = self.opened = None
        self._waiters.wake()


class IMapUnorderedIterator(IMapIterator[T]):
    """The results of `imap_unordered`, in the order of their arrival."""

    ordered = False


class Stream(Job):
    """The job of an `imap`.  It does not keep the iterator alive, which the caller may drop.

    If the caller drops it, ``gone`` is called.  The tasks still run, and their answers are dropped.
    """

    def __init__(self, iterator: IMapIterator[Any], number: int, gone: Callable[[], None]) -> None:
        super().__init__(number, iterator.label, None)  # the iterator keeps the pool alive
        # At the end of Python, the globals that `gone` needs may be None already.
        ends = sys.is_finalizing
        self._iterator = weakref.ref(iterator, lambda _: None if ends() else gone())
        self._answered = 0
        self._length: int | None = None
        # Set by `misfit`: all tasks before this one have an answer, and so have those beyond.
        self._all_before = 0
        self._beyond: set[int] | None = None
        # The error of the input, in place of a task: of an unordered stream it comes last.
        self._input_error: tuple[int, Any] | None = None
        # Called with the number of answered tasks, if drawing the input depends on it.
        self.answers: Callable[[int], object] | None = None

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        if type(value) is Unopened and self._answered < index and self._is_unordered():
            self._input_error = index, value
            return False
        if type(value) in _SMALL:  # most answers of threads are small; this saves a call
            tasks, weight = 1, BOOKKEEPING
        else:
            # `tasks_in`, written out to save a call.
            tasks, weight = value.count if isinstance(value, PickledResult) else 1, weigh(value)
        before = self._answered
        answered = self._answered = before + tasks
        if self.progress is not None:
            self.progress.add(tasks)
        if self.answers is not None:
            self.answers(tasks)
        # Held for no longer than needed: the thread that drops it last runs `gone`.
        iterator = self._iterator()
        if iterator is not None:
            iterator.buffer.tasks_in = answered
            place = index if iterator.ordered else before
            iterator.arrive(place, ok, value, index, weight)
        if self._input_error is not None and answered == self._input_error[0]:
            (index, error), self._input_error = self._input_error, None
            # Not that of a journal, which has counted this answer already.
            return Stream.deliver(self, index, False, error)
        if answered != self._length:
            return False
        self.settled = True
        return True

    def misfit(self, index: int, ok: bool, value: Any) -> str:
        if self._beyond is None:
            self._beyond = set()
        beyond = self._beyond
        for task in range(index, index + tasks_in(value)):
            if task < self._all_before or task in beyond:
                return f"two results of {self.describe(task)}"
            if self._length is not None and task >= self._length:
                return self.surplus(task)
            beyond.add(task)
        while self._all_before in beyond:
            beyond.remove(self._all_before)
            self._all_before += 1
        return ""

    def _is_unordered(self) -> bool:
        iterator = self._iterator()
        return iterator is not None and not iterator.ordered

    def hold_back(self, weight: int) -> None:
        """Count the memory of an answer that is not delivered yet; a negative weight ends this."""
        iterator = self._iterator()
        if iterator is not None:
            iterator.buffer.bytes_in += weight

    def around(self, put: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        """Return the function that is called with each item: ``put``, or one that calls it."""
        return put

    def end(self, length: int) -> bool:
        """Record that the input had ``length`` tasks.  Return whether all have been answered."""
        if self.settled:
            return False
        self._length = length
        iterator = self._iterator()
        if self._beyond and max(self._beyond) >= length:
            self.fail(RuntimeError(f"a hook has returned {self.surplus(max(self._beyond))}"))
        if iterator is not None:
            iterator.finish(length)
        self.settled = self.settled or self._answered == length
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
