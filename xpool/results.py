"""What a caller holds while workers work: results and iterators.

Values arrive as `Parcel`: still pickled.  They are opened in the thread that asks for them, so
that unpickling, which may run any code of the user's, never happens in the engine's thread.

Waiting is done on a lock of the waiter's own: it puts the lock in a list and looks again; whoever
completes the result sets it ready first and opens the locks then.  So one of the two sees the
other, and neither needs a lock that an interrupt (Ctrl-C) could leave locked.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

from xpool.errors import TaskCancelled, TimeoutError
from xpool.interrupt import uninterrupted
from xpool.options import Terms
from xpool.waiters import Waiters

__all__ = [
    "AsyncResult",
    "IMapIterator",
    "IMapUnorderedIterator",
    "Job",
    "MapResult",
    "Parcel",
    "Stream",
    "Unopened",
    "exception_in",
    "local",
    "tasks_in",
]

# `local.blocking`, where a thread has it, is called before this thread waits for a result: a
# thread that runs callbacks uses it to let others go on (see xpool.pool.callbacks).
local = threading.local()


_NOT_SENT = (
    "results of a pool cannot be passed between processes or pickled, as pools cannot be sent to "
    "workers; send what get() returns"
)


class Parcel:
    """Answers of one or more consecutive tasks, still pickled."""

    __slots__ = ()

    count: int
    """How many tasks it answers."""

    @abstractmethod
    def open(self) -> list[Any]:
        """Unpickle; return one value for each task, `Unopened` where that raised an error."""


class Unopened:
    """Stands for a value that could not be unpickled."""

    __slots__ = ("exc",)

    def __init__(self, exc: Exception) -> None:
        self.exc = exc


def tasks_in(value: Any) -> int:
    """Return how many tasks this value answers."""
    return value.count if isinstance(value, Parcel) else 1


def _opened(value: Any) -> Any:
    """Return a value that was opened, or raise what kept it from that."""
    if type(value) is Unopened:
        raise value.exc
    return value


def exception_in(failure: BaseException | Parcel) -> BaseException:
    """Return an error, opened where it came as a parcel: in the thread that is to raise it."""
    if isinstance(failure, Parcel):
        (error,) = failure.open()
        assert isinstance(error, BaseException)
        return error
    return failure


def _about_to_block() -> None:
    blocking = getattr(local, "blocking", None)
    if blocking is not None:
        blocking()


class Job:
    """Something that was submitted and is answered task by task.

    ``deliver`` and ``fail`` are called by one thread at a time, the engine's or one that drives
    it for a moment; ``settled`` turns true there, once.
    """

    func = 0
    """Number of the function that the workers keep for this job; 0: none."""

    terms = Terms()
    """How its tasks are to be run."""

    def __init__(self, number: int, label: str, pool: Any) -> None:
        self.number = number
        self.label = label
        # Keeps the pool alive while its answer is awaited; let go when it has come.
        self._pool = pool
        self.settled = False
        self._waiters = Waiters()

    def __reduce__(self) -> Any:
        raise NotImplementedError(_NOT_SENT)

    def describe(self, index: int) -> str:
        """Say which task ``index`` is, for people."""
        return f"task {index} of {self.label}"

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        """Take the answer of task ``index`` (or of several from there on); True when all are in."""
        raise NotImplementedError

    def fail(self, exc: BaseException | Parcel) -> None:
        """Answer everything that is not answered with ``exc``: the pool has ended."""
        raise NotImplementedError

    def release(self) -> None:
        """Let the callers have it."""
        raise NotImplementedError

    @property
    def has_callback(self) -> bool:
        """Whether something must be called before the callers wake."""
        return False


class AsyncResult(Job):
    """The result of `apply_async`, as `multiprocessing.pool.AsyncResult`."""

    def __init__(
        self,
        number: int,
        label: str,
        pool: Any,
        callback: Callable[[Any], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
    ) -> None:
        super().__init__(number, label, pool)
        self._callback = callback
        self._error_callback = error_callback
        self._ready = False
        self._success = True
        self._value: Any = None
        self._opening = threading.RLock()
        self._opened = False
        # Identity of the thread that runs the callback: for it the result is ready already.
        self._calling: int | None = None
        self._cancelled = False

    def __repr__(self) -> str:
        state = "ready" if self._ready else "waiting"
        return f"<{type(self).__name__} {self.label}, {state}>"

    # -- the caller's side -------------------------------------------------------------------

    def ready(self) -> bool:
        """Return whether the call has completed."""
        return self._ready or self._calling == threading.get_ident()

    def successful(self) -> bool:
        """Return whether the call completed without an exception.

        Raises:
            ValueError: it has not completed.
        """
        if not self.ready():
            raise ValueError(f"{self!r} has no result yet; call wait() or get() first")
        self._open()
        return self._success

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the result, at most ``timeout`` seconds (None: as long as it takes)."""
        if self.ready():
            return
        _about_to_block()
        self._waiters.wait(self.ready, timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Return the result when it arrives, or raise what the call raised.

        Raises:
            multiprocessing.TimeoutError: it has not arrived after ``timeout`` seconds.
        """
        self.wait(timeout)
        if not self.ready():
            raise TimeoutError(f"{self.label} has no result after {timeout} s")
        self._open()
        if self._success:
            return self._value
        raise self._value

    def __await__(self) -> Generator[Any, None, Any]:
        """Await the result in a loop of asyncio or trio; who is cancelled has it cancelled."""
        from xpool.event_loops import awaited  # here: asyncio takes long to import

        return awaited(self).__await__()

    def cancel(self) -> bool:
        """End this with `TaskCancelled`; return whether it has ended so, False: it was ready.

        What waits of it is never run.  What runs is stopped: `TaskStopped` is raised in it, and
        when it does not end of that, its worker is killed and replaced.  A thread cannot be
        stopped: its task is left to itself, and another thread takes its place.
        """
        pool = self._pool
        if pool is not None and not self.settled:
            pool._cancel(self)
        return self._cancelled

    def _open(self) -> None:
        if self._opened:
            return
        with self._opening:
            if self._opened:
                return
            # An interrupt while this unpickles leaves all as it was: the next `get` begins anew.
            try:
                success, value = self._success, self._unpack(self._value)
                if not success and not isinstance(value, BaseException):
                    raise TypeError(f"a task failed with {value!r}, not an exception")
            except Exception as exc:
                success, value = False, exc
            self._settle(success, value)

    @uninterrupted
    def _settle(self, success: bool, value: Any) -> None:
        self._success, self._value, self._opened = success, value, True

    def _unpack(self, value: Any) -> Any:
        return _opened(value.open()[0]) if isinstance(value, Parcel) else value

    # -- the engine's side -------------------------------------------------------------------

    def describe(self, index: int) -> str:
        return self.label

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        self._success, self._value = ok, value
        self.settled = True
        return True

    def fail(self, exc: BaseException | Parcel) -> None:
        if not self.settled:
            self._success, self._value = False, exc
            self._opened = not isinstance(exc, Parcel)
            self._cancelled = isinstance(exc, TaskCancelled)
            self.settled = True

    def release(self) -> None:
        self._ready = True
        self._pool = None
        self._callback = self._error_callback = None
        self._waiters.wake()

    @property
    def has_callback(self) -> bool:
        return self._callback is not None or self._error_callback is not None

    def complete(self) -> None:
        """Finish after the callback: strike it off the pool's list and wake the callers."""
        pool = self._pool
        if pool is not None:
            pool._forget(self)
        self.release()

    def call_back(self) -> None:
        """Run the callback that fits; it may raise.  Called before `release`, by one thread."""
        self._calling = threading.get_ident()
        try:
            self._open()
            call = self._callback if self._success else self._error_callback
            if call is not None:
                call(self._value)
        finally:
            self._calling = None


class MapResult(AsyncResult):
    """The result of `map_async` and `starmap_async`, as `multiprocessing.pool.MapResult`.

    It is ready when every task has been answered; when some failed, `get` raises the error that
    arrived first.
    """

    def __init__(
        self,
        number: int,
        label: str,
        pool: Any,
        tasks: int,
        chunked: bool,
        callback: Callable[[Any], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
    ) -> None:
        super().__init__(number, label, pool, callback, error_callback)
        self._left = tasks
        self._chunked = chunked
        self._pieces: dict[int, Any] = {}

    def describe(self, index: int) -> str:
        return f"{'chunk' if self._chunked else 'item'} {index} of {self.label}"

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        if not ok:
            if self._success:
                self._success, self._value = False, value
            self._pieces.clear()
        elif self._success:
            self._pieces[index] = value
        self._left -= tasks_in(value)
        self.settled = self._left == 0
        return self.settled

    def _unpack(self, value: Any) -> Any:
        if not self._success:
            return super()._unpack(value)
        out: list[Any] = []
        for index in sorted(self._pieces):
            piece = self._pieces[index]
            for value in piece.open() if isinstance(piece, Parcel) else (piece,):
                task = _opened(value)
                if self._chunked:
                    out.extend(task)
                else:
                    out.append(task)
        return out

    def _settle(self, success: bool, value: Any) -> None:
        super()._settle(success, value)
        self._pieces = {}

    def fail(self, exc: BaseException | Parcel) -> None:
        super().fail(exc)
        if not self._success:
            self._pieces = {}


class IMapIterator(Iterator[Any]):
    """The results of `imap`, in order, as `multiprocessing.pool.IMapIterator`."""

    def __init__(self, label: str, pool: Any, chunked: bool) -> None:
        self.label = label
        self._pool = pool  # kept alive until all answers are in
        self._waiters = Waiters()
        self._chunked = chunked
        self._buffer: deque[Any] = deque()  # values to hand out next
        self._arrived: dict[int, tuple[bool, Any]] = {}
        self._next = 0  # index of the first task not yet moved to the buffer
        self._length: int | None = None  # in tasks, when the input has ended
        self._failure: BaseException | Parcel | None = None
        self._taking = threading.RLock()
        # Called with the number of items handed out, where a buffersize is to be kept.
        self.taken: Callable[[int], object] | None = None
        self.chunksize = 1
        # The pool's side of it, and what stops the drawing of its input.
        self.cancelling: tuple[Job, Callable[[], object]] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"

    __reduce__ = Job.__reduce__

    def __iter__(self) -> IMapIterator:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result, waiting at most ``timeout`` seconds for it.

        Raises:
            StopIteration: there are no more.
            multiprocessing.TimeoutError: it has not arrived in time.
            Exception: what the task raised, or the input here (StopIteration: `RuntimeError`).
        """
        deadline: float | None = None
        while True:
            try:
                value = self._buffer.popleft()
            except IndexError:
                pass  # looked at by trying: several threads may share the iterator
            else:
                if type(value) is Unopened:
                    self._hand_out(self.chunksize)
                    try:
                        raise self._as_error(value.exc)
                    finally:
                        # Its traceback has this frame: no circle, so that results which nobody
                        # takes any more go with the iterator, and their memory.
                        del self, value
                self._hand_out(1)
                return value
            if self._move():
                continue
            if timeout is not None and deadline is None:
                deadline = time.monotonic() + timeout
            _about_to_block()
            left = None if deadline is None else deadline - time.monotonic()
            if not self._waiters.wait(self._movable, left):
                raise TimeoutError(f"no next result of {self.label} after {timeout} s")

    def __aiter__(self) -> IMapIterator:
        """Iterate in a loop of asyncio or trio; who is cancelled has what is left cancelled."""
        return self

    def __anext__(self) -> Awaitable[Any]:
        from xpool.event_loops import next_of

        return next_of(self)

    def cancel(self) -> bool:
        """Run no more; return whether there was something to cancel.

        `next` raises `TaskCancelled` after the results that have arrived.  What runs is stopped
        as in `AsyncResult.cancel`, and nothing more is drawn from the input.
        """
        pool, cancelling = self._pool, self.cancelling
        if pool is None or cancelling is None:
            return False
        job, stop_drawing = cancelling
        cancelled: bool = pool._cancel(job)
        stop_drawing()
        return cancelled

    def _movable(self) -> bool:
        return bool(
            self._buffer
            or self._next in self._arrived
            or self._failure is not None
            or self._next == self._length
        )

    def _move(self) -> bool:
        """Bring the next piece that has arrived into the buffer; False when there is none yet."""
        with self._taking:
            if self._buffer:
                return True
            piece = self._first_piece()
            if piece is None:
                if self._next == self._length:
                    raise StopIteration
                if self._failure is not None:
                    raise self._as_error(exception_in(self._failure))
                return False
            # Opened first and taken then: what an interrupt cuts short is still there.
            ok, value = piece
            values = value.open() if isinstance(value, Parcel) else [value]
            if not ok:
                values = [v if type(v) is Unopened else Unopened(v) for v in values]
            elif self._chunked:
                values = [x for v in values for x in ((v,) if type(v) is Unopened else v)]
            self._take_piece(tasks_in(value), values)
            return True

    def _as_error(self, exc: BaseException) -> BaseException:
        """Return ``exc``; for what would end the caller's loop, RuntimeError, as in PEP 479."""
        if not isinstance(exc, StopIteration):
            return exc
        error = RuntimeError(
            f"a task of {self.label}, or the input, raised StopIteration; give next() a default "
            "there, or catch it: it would have ended the loop over the results"
        )
        error.__cause__ = exc
        return error

    def _hand_out(self, n: int) -> None:
        if self.taken is not None:
            self.taken(n)

    def _first_piece(self) -> tuple[bool, Any] | None:
        return self._arrived.get(self._next)

    @uninterrupted
    def _take_piece(self, tasks: int, values: list[Any]) -> None:
        self._drop_first()
        self._next += tasks
        self._buffer.extend(values)

    def _drop_first(self) -> None:
        del self._arrived[self._next]

    # -- the engine's side -------------------------------------------------------------------

    def arrive(self, index: int, ok: bool, value: Any) -> None:
        """Take the answer of task ``index``, or of several from there on."""
        self._put(index, ok, value)
        self._waiters.wake()

    def _put(self, index: int, ok: bool, value: Any) -> None:
        self._arrived[index] = ok, value

    def finish(self, length: int) -> None:
        """Note that the input had ``length`` tasks."""
        self._length = length
        self._waiters.wake()

    def fail(self, exc: BaseException | Parcel) -> None:
        """Raise ``exc`` where the answers that came end."""
        self._failure = exc

    def release(self) -> None:
        """Nothing more will come."""
        self._pool = None
        self._waiters.wake()


class IMapUnorderedIterator(IMapIterator):
    """The results of `imap_unordered`: as they come."""

    def __init__(self, label: str, pool: Any, chunked: bool) -> None:
        super().__init__(label, pool, chunked)
        self._pieces: deque[tuple[bool, Any]] = deque()

    def _movable(self) -> bool:
        return bool(
            self._buffer or self._pieces or self._failure is not None or self._next == self._length
        )

    def _first_piece(self) -> tuple[bool, Any] | None:
        return self._pieces[0] if self._pieces else None

    def _drop_first(self) -> None:
        self._pieces.popleft()

    def _put(self, index: int, ok: bool, value: Any) -> None:
        self._pieces.append((ok, value))


class Stream(Job):
    """What the pool keeps of an `imap`: the iterator is its user's, and may be dropped.

    ``gone`` is called then; the tasks run all the same, and their answers are dropped too.
    """

    def __init__(self, iterator: IMapIterator, number: int, gone: Callable[[], None]) -> None:
        super().__init__(number, iterator.label, None)
        self._iterator = weakref.ref(iterator, lambda _: gone())
        self._answered = 0
        self._length: int | None = None

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        self._answered += tasks_in(value)
        iterator = self._iterator()
        if iterator is not None:
            iterator.arrive(index, ok, value)
        self.settled = self._answered == self._length
        return self.settled

    def end(self, length: int) -> bool:
        """Note that the input had ``length`` tasks; True when all are answered already."""
        if self.settled:
            return False
        self._length = length
        iterator = self._iterator()
        if iterator is not None:
            iterator.finish(length)
        self.settled = self._answered == length
        return self.settled

    def fail(self, exc: BaseException | Parcel) -> None:
        if not self.settled:
            self.settled = True
            iterator = self._iterator()
            if iterator is not None:
                iterator.fail(exc)

    def release(self) -> None:
        iterator = self._iterator()
        if iterator is not None:
            iterator.release()
