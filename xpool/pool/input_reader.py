"""Drawing the input of `imap` in a thread of its own, no further ahead than there is room.

In a thread of its own since an iterable may block, even until a result of the same pool is
there; and pickled there, item by item, so that an item that cannot be pickled fails alone.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from xpool.codec.frame import weight
from xpool.results import Unopened
from xpool.shm.system import available_memory
from xpool.streams import Shelf
from xpool.waiters import Waiters

__all__ = ["InputReader", "FlowControl"]

AHEAD_ITEMS = 1024
"""Tasks for each worker that may wait, drawn and pickled: two of the largest batches."""

AHEAD_BYTES = 16 * 1024 * 1024
"""Bytes of payload that may wait for a worker, unless it is a single one."""


@functools.cache
def room_for_results() -> int:
    """Bytes of results of one `imap` that nobody has taken, from which on no more input is drawn.

    By pickled size, with 256 bytes for each result: a sixteenth of the memory that was available
    when this was first asked for, and at least 64 MiB.
    """
    return max(64 * 1024 * 1024, available_memory() // 16)


class FlowControl:
    """How far ahead the input reader may be: of the workers, and of the consumer.

    Of the consumer by items, where there is a buffersize, else by the memory that results take.

    ``drawn`` and ``bytes_in`` are the input reader's, ``taken_*`` the engine's (under its lock),
    `Shelf` the consumer's; each only grows.
    """

    def __init__(self, buffersize: int | None, workers: int, shelf: Shelf) -> None:
        self._buffersize = buffersize
        self._room: float = room_for_results() if buffersize is None else math.inf
        self._ahead = AHEAD_ITEMS * workers
        self._waiters = Waiters()
        self._waiting = False
        self.stopped = False
        self.drawn = 0
        self.put = 0
        self.bytes_in = 0
        self.taken_items = 0
        self.taken_bytes = 0
        self._shelf = weakref.ref(shelf)  # of an iterator that may be dropped

    def _open(self) -> bool:
        if self.stopped:
            return True
        shelf = self._shelf()
        if shelf is not None and shelf.bytes_in - shelf.bytes_out >= self._room:
            return False
        if self._buffersize is not None:
            if shelf is None:
                # `stop` tells so at once, unless a signal handler has raised in the finalizer.
                self.stopped = True
                return True
            if self.drawn - shelf.handed_out >= self._buffersize:
                return False
        ahead = self.put - self.taken_items
        return ahead < self._ahead and (
            ahead == 0 or self.bytes_in - self.taken_bytes < AHEAD_BYTES
        )

    def reserve(self) -> bool:
        """Wait until another item may be drawn; False when no more is wanted."""
        if not self._open():
            self._waiting = True
            try:
                self._waiters.wait(self._open, None)
            finally:
                self._waiting = False
        return not self.stopped

    def added(self, size: int) -> None:
        """Note that a task of ``size`` bytes waits now."""
        self.put += 1
        self.bytes_in += size

    def taken(self, items: list[Any]) -> None:
        """Note that these tasks went to a worker."""
        self.taken_bytes += sum(map(weight, items))
        self.answered(len(items))

    def answered(self, tasks: int) -> None:
        """Note that so many more tasks wait no longer."""
        self.taken_items += tasks
        if self._waiting and 2 * (self.put - self.taken_items) <= self._ahead:
            self._waiters.wake()

    def handed_out(self) -> None:
        """Look again: the consumer has taken something, or is gone."""
        if self._waiting:
            self._waiters.wake()

    def unbind(self) -> None:
        """Let results take what memory they need: somebody waits for the end of it all."""
        self._room = math.inf
        self._waiters.wake()

    def stop(self) -> None:
        """Draw no more."""
        self.stopped = True
        self._waiters.wake()


class InputReader:
    """The thread that draws one iterable.

    ``put(index, task)`` hands on a task: an item, or a list of ``chunksize`` items when that is
    more than 1; it returns the size in bytes, and raises when the task cannot be sent.
    ``fail(index, exc)`` answers the task in its stead, `Unopened` where the input has raised
    that; ``end(length)`` says how many there were.
    None of them may hold the pool, so that a pool can be dropped while its input reader waits.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        chunksize: int,
        flow: FlowControl,
        put: Callable[[int, Any], int],
        fail: Callable[[int, BaseException | Unopened], None],
        end: Callable[[int], None],
        name: str,
    ) -> None:
        self._iterable = iterable
        self._chunksize = chunksize
        self.flow = flow
        self._put = put
        self._fail = fail
        self._end = end
        self.thread = threading.Thread(target=self._run, name=f"{name}-input_reader", daemon=True)

    def _run(self) -> None:
        index = 0
        try:
            iterator = iter(self._iterable)
            for task in self._tasks(iterator):
                try:
                    size = self._put(index, task)
                except Exception as exc:
                    self._fail(index, exc)
                    size = 0
                if size:
                    self.flow.added(size)
                index += 1
                del task
        except BaseException as exc:
            # The input raised: the consumer gets that in place of the task that it cut short.
            self._fail(index, Unopened(exc))
            index += 1
        self._end(index)

    def _tasks(self, iterator: Iterator[Any]) -> Iterator[Any]:
        flow, size = self.flow, self._chunksize
        if size == 1:
            while flow.reserve():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                flow.drawn += 1
                yield item
                del item
            return
        chunk: list[Any] = []
        while flow.reserve():
            try:
                item = next(iterator)
            except StopIteration:
                break
            flow.drawn += 1
            chunk.append(item)
            if len(chunk) == size:
                yield chunk
                chunk = []
        if chunk and not flow.stopped:
            yield chunk
