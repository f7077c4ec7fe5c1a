"""Draws the input of `imap` in a thread, as far ahead as there is room.

A thread is needed because an iterable may block, even until a result of the same pool arrives.  The
thread also pickles the items one by one, so that an item that cannot be pickled fails alone.
"""

# No `from __future__ import annotations`: a NamedTuple would compile each type from its text.

import functools
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from xpool._calls.results import Job, Unopened
from xpool._calls.streams import ResultBuffer
from xpool._engine.jobs.states import PoolStates
from xpool._memory.system import available_memory
from xpool._python.failures import XPoolError
from xpool._python.interrupt import pass_on
from xpool._python.starting import PromptThread
from xpool._python.waiters import Waiters

AHEAD_ITEMS = 1024
"""The most drawn and pickled tasks that wait, for each worker: two of the largest batches."""

FIRST_ITEMS, FIRST_ALL = 16, 128
"""Tasks that may wait before the size of a result is known: for each worker, and at least in
all."""

HERE_ITEMS = 64
HERE_BYTES = 64 * 1024
"""The most tasks, and bytes, drawn without a thread.  Its start takes as long as pickling 50."""

LOOK = 16
"""Small items between two checks of how far ahead the input reader is."""

RUN = 256
"""Items that are passed on together if drawing them costs nothing.  Pickling 256 numbers in one
pass takes as long as starting a thread."""

AHEAD_BYTES = 16 * 1024 * 1024
"""The most bytes of payload that wait for workers, unless it is a single task."""

LEAST_ROOM = 64 * 1024 * 1024
"""Bytes for which results always have room, so that most programs need not ask the system for its
memory, which takes as long as ten calls of a short `imap`."""


@functools.cache
def room_for_results() -> int:
    """Return the bytes of untaken results of one `imap` at which no more input is drawn.

    A result counts with its pickled size and 256 bytes.  The limit is a sixteenth of the memory
    that was available at the first call, and at least `LEAST_ROOM`.
    """
    return max(LEAST_ROOM, available_memory() // 16)


class Runs(NamedTuple):
    """Functions that pass on consecutive items together."""

    prepare: Callable[[list[Any]], list[Any] | None]
    """Returns the prepared items; None: these and all later items are put one by one."""
    put: Callable[[int, list[Any]], int]
    """Passes on prepared items, given the index of the first; returns their size in bytes."""


_LATER = object()
"""In place of a task: no item may be drawn now."""


class _Run(list[Any]):
    """Prepared items that were drawn together."""


class FlowControl:
    """Limits how far the input reader may be ahead of the workers and of the consumer.

    The distance to the consumer is limited to a number of items if there is a ``buffersize``, and
    otherwise by the memory of the results.

    The input reader writes ``drawn`` and ``bytes_in``; the engine writes ``taken_*``, under its
    lock; the consumer writes its `ResultBuffer`.  All of these counts only grow.
    """

    def __init__(self, buffersize: int | None, workers: int, buffer: ResultBuffer) -> None:
        self._workers = workers
        self._buffersize = buffersize
        self._limits_memory = buffersize is None
        self._ahead = AHEAD_ITEMS * workers
        self._waiters = Waiters()
        self._waiting = False
        self._wake_at = 0  # a count of taken items at which the waiting input reader is woken
        self.stopped = False
        self._last = sys.maxsize  # the most items that are drawn in all
        self.drawn = 0
        self.put = 0
        self.bytes_in = 0
        self.taken_items = 0
        self.taken_bytes = 0
        self._buffer = weakref.ref(buffer)  # the buffer of an iterator, which may be dropped
        # Called when there is room again for the results of tasks that `may_run` has held back.  It
        # is called without a lock, and also by finalizers.
        self.resume: Callable[[], object] = int
        self._holds = False  # `may_run` has returned False since the last call of `resume`

    def is_open(self) -> bool:
        """Whether `reserve` would return at once."""
        if self.stopped or self.drawn >= self._last:
            return True
        if not self._has_room():
            return False
        if self._buffersize is not None:
            buffer = self._buffer()
            if buffer is None:
                # Usually `stop` was called, but a signal handler may have raised in the finalizer.
                self.stopped = True
                return True
            if self.drawn - buffer.handed_out >= self._buffersize:
                return False
        ahead = self.put - self.taken_items
        return ahead == 0 or (
            ahead < self._most_ahead() and self.bytes_in - self.taken_bytes < AHEAD_BYTES
        )

    def _has_room(self) -> bool:
        """Whether there is memory for more results."""
        buffer = self._buffer()
        if buffer is None or not self._limits_memory:
            return True
        used = buffer.bytes_in - buffer.bytes_out
        return used < LEAST_ROOM or used < room_for_results()

    def _most_ahead(self) -> int:
        """Return the most tasks that may wait: their results, of mean size, must have room."""
        buffer = self._buffer()
        if buffer is None or not self._limits_memory:
            return self._ahead
        answered = buffer.tasks_in
        if not answered or not buffer.bytes_in:
            return min(self._ahead, max(FIRST_ALL, FIRST_ITEMS * self._workers))
        used = buffer.bytes_in - buffer.bytes_out
        most = (LEAST_ROOM - used) * answered // buffer.bytes_in
        if most < self._ahead:
            most = (room_for_results() - used) * answered // buffer.bytes_in
        # At least two for each worker: `may_run` holds them back while results have no room.
        return max(2 * self._workers, min(self._ahead, most))

    def may_run(self, first: int) -> bool:
        """Whether the waiting tasks from ``first`` on may be given to workers now.

        True if there is room for more results, or if the consumer waits for ``first``.
        Called with the engine's lock held.
        """
        if self._has_room() or self._is_next(first):
            return True
        # Set before the second check: the consumer makes room first and then reads this flag.
        self._holds = True
        return self._has_room() or self._is_next(first)

    def _is_next(self, first: int) -> bool:
        buffer = self._buffer()
        return buffer is None or buffer.next_task == first

    def reserve(self, most: int = 1, wait: bool = True) -> int:
        """Wait until items may be drawn; return how many, at most ``most`` (0: no more).

        Without ``wait``, return -1 if no item may be drawn now.
        """
        if not self.is_open():
            if not wait:
                return -1
            self._wake_at = self.put - self._most_ahead() // 2
            self.wait(self.is_open)
        if self.stopped or self.drawn >= self._last:
            return 0
        most = min(most, self._most_ahead() - self.put + self.taken_items, self._last - self.drawn)
        if self._buffersize is not None:
            buffer = self._buffer()
            handed_out = self.drawn if buffer is None else buffer.handed_out
            most = min(most, self._buffersize - self.drawn + handed_out)
        return max(1, most)

    def wait(self, fact: Callable[[], bool]) -> None:
        """Wait, in the input reader's thread, until ``fact()`` is true."""
        # The flag is set before ``fact()`` is called, and the engine counts before it reads the
        # flag.  So this thread sees the count, or the engine sees the flag.
        self._waiting = True
        try:
            self._waiters.wait(fact, None)
        finally:
            self._waiting = False

    def added(self, size: int) -> None:
        """Count a task of ``size`` bytes that waits for a worker from now on."""
        self.put += 1
        self.bytes_in += size

    def taken(self, items: list[Any]) -> None:
        """Count tasks that were given to a worker."""
        from xpool._pickling.frame import weight_of_all  # here, since it imports the pickler

        self.taken_bytes += weight_of_all(items)
        self.answered(len(items))

    def answered(self, tasks: int) -> None:
        """Count tasks that no longer wait."""
        self.taken_items += tasks
        # Do not wake it at each task: it sleeps until half of the waiting tasks are gone.
        if self._waiting and self.taken_items >= self._wake_at:
            self._waiters.wake()

    def handed_out(self) -> None:
        """Wake the input reader: the consumer has taken a result, or is gone."""
        if self._waiting:
            self._waiters.wake()
        if self._holds:
            self._holds = False
            self.resume()

    def unbind(self) -> None:
        """Lift the limit on the memory of results: a thread waits for the end of the stream."""
        self._limits_memory = False
        self.handed_out()

    def draw_no_further(self) -> None:
        """With a ``buffersize``, draw the items that it allows now, and then no more."""
        buffer = self._buffer()
        if self._buffersize is not None and buffer is not None:
            self._last = buffer.handed_out + self._buffersize
            self._waiters.wake()

    def stop(self) -> None:
        """Draw no more."""
        self.stopped = True
        self._waiters.wake()


class InputReader:
    """Draws one iterable, in its own thread.  The caller's thread draws the first items of a list.

    ``put(index, task)`` passes on a task: an item, or a list of items if ``chunksize`` is more than
    1.  It returns the size in bytes, and raises if the task cannot be sent.  ``runs`` passes on
    consecutive items together; None: never.  ``fail(index, False, exc)`` answers a task with an
    error, an `Unopened` if the input raised it.  ``end(length, self)`` reports the number of tasks.
    None of these may hold the pool, so that a pool can be dropped while its input reader waits.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        chunksize: int,
        flow: FlowControl,
        put: Callable[[int, Any], int],
        runs: Runs | None,
        fail: Callable[[int, bool, BaseException | Unopened], object],
        end: Callable[[int, "InputReader"], None],
        name: str,
    ) -> None:
        self._iterable = iterable
        # Drawing from these runs only Python's own code, and never waits.
        self._known = type(iterable) in (list, tuple, range)
        self._chunksize = chunksize
        self.flow = flow
        self._put = put
        # Use runs only if drawing costs nothing: otherwise, the first item would wait for the last
        # one.
        self._runs = runs if self._known and chunksize == 1 else None
        self._fail = fail
        self._end = end
        self._index = 0  # the index of the next task
        self._tasks: Iterator[Any] | None = None
        # The calling thread draws.  It must not wait, since it may be the consumer.
        self._here = False
        self._name = f"{name}-input_reader"
        self.thread: threading.Thread | None = None

    def begin(self, pool: Any, job: Job) -> None:
        """Draw the input of a job that was entered: a small one in the calling thread, and the rest
        in the thread, which starts here."""
        readers: set[InputReader] = pool._jobs.input_readers
        readers.add(self)
        if pool._life.state is PoolStates.TERMINATE:
            self.flow.stop()  # the pool has ended since the job was entered
        try:
            if not (self._known and self._draw(HERE_ITEMS if self._runs is None else RUN)):
                self._start()
        except BaseException as exc:
            readers.discard(self)
            pool._submitter.give_up(job, exc)
            raise

    def _start(self) -> None:
        try:
            self.thread = PromptThread(target=self._draw, name=self._name, daemon=True)
            self.thread.start()
        except RuntimeError as exc:
            raise XPoolError(
                f"{exc}: the input of imap needs a thread, unlike that of map"
            ) from exc

    def _draw(self, most: float = math.inf) -> bool:
        """Draw all tasks, or about ``most`` small ones; return whether the input has ended."""
        flow = self.flow
        here = self._here = most < math.inf
        try:
            if self._tasks is None:
                iterator = iter(self._iterable)
                runs = self._runs
                self._tasks = (
                    self._one_by_one(iterator) if runs is None else self._by_runs(iterator, runs)
                )
                if self._chunksize > 1:
                    self._tasks = self._chunks(self._tasks)
            for task in self._tasks:
                if task is _LATER:
                    return False
                n = 1
                try:
                    if type(task) is _Run:
                        assert self._runs is not None
                        n = len(task)
                        # Count them before `put`: threads answer the first task at once.
                        flow.put += n
                        flow.bytes_in += self._runs.put(self._index, task)
                    elif size := self._put(self._index, task):
                        flow.added(size)
                except Exception as exc:
                    # In the caller's thread, a signal handler's error is not the item's.
                    if here:
                        pass_on(exc)
                    for index in range(self._index, self._index + n):
                        self._fail(index, False, exc)
                self._index += n
                # Drop it now, since the next item may take long to arrive.
                del task
                if self._index >= most:
                    return False
                if here and flow.bytes_in > HERE_BYTES:
                    return False
        except BaseException as exc:
            if here:
                raise
            # The input raised: the consumer gets the error in place of the next task.
            self._fail(self._index, False, Unopened(exc))
            self._index += 1
        self._end(self._index, self)
        return True

    def _by_runs(self, iterator: Iterator[Any], runs: Runs) -> Iterator[Any]:
        flow = self.flow
        while n := flow.reserve(RUN, not self._here):
            if n < 0:
                yield _LATER
                continue
            items = list(itertools.islice(iterator, n))
            if not items:
                return
            prepared = runs.prepare(items)
            if prepared is None:
                yield from self._one_by_one(itertools.chain(items, iterator))
                return
            flow.drawn += len(items)
            ended = len(items) < n
            yield _Run(prepared)
            if ended:
                return
            del items, prepared

    def _one_by_one(self, iterator: Iterator[Any]) -> Iterator[Any]:
        flow = self.flow
        while n := flow.reserve(LOOK, not self._here):
            if n < 0:
                yield _LATER
            for _ in range(n):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                flow.drawn += 1
                yield item
                del item
                # Check at each item: one may be large, and the stream may be stopped.
                if flow.stopped or flow.bytes_in - flow.taken_bytes >= AHEAD_BYTES:
                    break

    def _chunks(self, items: Iterator[Any]) -> Iterator[Any]:
        chunk: list[Any] = []
        for item in items:
            if item is _LATER:
                yield item
                continue
            chunk.append(item)
            if len(chunk) == self._chunksize:
                yield chunk
                chunk = []
        if chunk and not self.flow.stopped:
            yield chunk


def length_of(iterable: Any) -> int | None:
    """Return ``len(iterable)``; None: it has none."""
    if not hasattr(type(iterable), "__len__"):
        return None
    try:
        return len(iterable)
    except Exception as exc:
        pass_on(exc)
        return None
