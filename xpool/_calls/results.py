"""The results that callers hold while workers run their tasks.

Values arrive pickled, as a `PickledResult`.  The thread that asks for a value unpickles it, since
this may run code of the user, which the engine's thread never does.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from xpool._calls.options import TaskOptions
from xpool._calls.progress import Progress
from xpool._python.interrupt import by_handler
from xpool._python.item_notes import number_item
from xpool._python.waiters import Waiters
from xpool.errors import TaskCancelled, TimeoutError

T = TypeVar("T")

# If a thread has `local.blocking`, it is called before the thread waits for a result: a thread that
# runs callbacks then has another one go on (see xpool._pools.callbacks).
local = threading.local()


_NOT_SENT = (
    "results of a pool cannot be passed between processes or pickled, as pools cannot be sent to "
    "workers; send what get() returns"
)


class PickledResult:
    """Answers of one or more consecutive tasks, still pickled."""

    __slots__ = ()

    count: int
    """Number of answered tasks."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes."""

    @abstractmethod
    def open(self) -> list[Any]:
        """Unpickle and return one value for each task; `Unopened` if unpickling it failed."""


class Unopened:
    """Takes the place of a value that could not be unpickled."""

    __slots__ = ("exc",)

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc


def tasks_in(value: Any) -> int:
    """Return how many tasks an answer is for."""
    return value.count if isinstance(value, PickledResult) else 1


def open_one(answer: Any) -> Any:
    """Return the value in the answer of one task, unpickled; `Unopened` if that failed."""
    if isinstance(answer, PickledResult):
        (answer,) = answer.open()
    return answer


def value_of(opened: Any) -> Any:
    """Return an opened value, or raise the error of its unpickling."""
    if type(opened) is Unopened:
        raise opened.exc
    return opened


def exception_in(failure: BaseException | PickledResult) -> BaseException:
    """Return an error, unpickled if necessary; called by the thread that raises it."""
    error = open_one(failure)
    assert isinstance(error, BaseException)
    return error


def about_to_block() -> None:
    """Call this before the calling thread waits; see `local`."""
    blocking = getattr(local, "blocking", None)
    if blocking is not None:
        blocking()


class Job:
    """A call of a verb, which is answered task by task.

    ``deliver`` and ``fail`` are called by one thread at a time: the engine's, or one that acts in
    its place.  They set ``settled`` once.
    """

    drop_function: Callable[[], object] | None = None
    """Called once when it is answered: the workers no longer need its function."""

    has_callback = False
    """Whether a callback must run before the callers wake."""

    is_future = False
    """Whether it completes a future, even when the pool ends."""

    is_call = False
    """Whether it is a single task, which engines keep among `CALLS`."""

    options = TaskOptions()
    """The options of its tasks."""

    progress: Progress | None = None
    """Shows how many of its items are done."""

    flow: Any = None
    """Of a stream: its `FlowControl`."""

    def __init__(self, number: int, label: str, pool: Any) -> None:
        self.number = number
        self.label = label
        # Keeps the pool alive until the job is answered.
        self._pool = pool
        self.settled = False
        self._waiters = Waiters()

    def __reduce__(self) -> Any:
        raise NotImplementedError(_NOT_SENT)

    def describe(self, index: int) -> str:
        """Return the text that names task ``index`` in messages."""
        return f"task {index} of {self.label}"

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        """Take the answer of the tasks from ``index`` on; return whether it was the last one."""
        raise NotImplementedError

    def fail(self, exc: BaseException | PickledResult) -> None:
        """Answer all unanswered tasks with ``exc``."""
        raise NotImplementedError

    def release(self) -> None:
        """Wake the callers."""
        if self.progress is not None:
            self.progress.end()
        self._waiters.wake()


class AsyncResult(Job, Generic[T]):
    """The result of `apply_async`, as `multiprocessing.pool.AsyncResult`."""

    settled = False
    _callback: Callable[[Any], object] | None = None
    _error_callback: Callable[[BaseException], object] | None = None
    _ready = False
    _success = True
    _value: Any = None
    _opened = False
    # Identity of the thread that runs the callback, in which the result is ready already.
    _calling: int | None = None
    _cancelled = False

    def __init__(
        self,
        number: int,
        label: str,
        pool: Any,
        callback: Callable[[Any], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
    ) -> None:
        # Without `Job.__init__`, since calls in a loop make many of these.
        self.number, self.label, self._pool = number, label, pool
        self._waiters = Waiters()
        if callback is not None or error_callback is not None:
            self._callback, self._error_callback = callback, error_callback
            self.has_callback = True

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
        about_to_block()
        self._waiters.wait(self.ready, timeout)

    def get(self, timeout: float | None = None) -> T:
        """Return the result when it arrives, or raise what the call raised.

        Raises:
            multiprocessing.TimeoutError: it has not arrived after ``timeout`` seconds.
        """
        if not self._ready:
            self.wait(timeout)
            if not self._ready and not self.ready():
                raise TimeoutError(
                    f"{self.label} has no result after {timeout} s; print(pool.stacks()) says "
                    "where each worker is"
                )
        if not self._opened:
            self._open()
        if self.progress is not None:
            self.progress.wait()
        if self._success:
            value: T = self._value
            return value
        try:
            raise self._value
        finally:
            del self  # breaks a reference cycle: the traceback of the error holds this frame

    def __await__(self) -> Generator[Any, None, T]:
        """Await the result in asyncio or trio.  Cancelling the ``await`` cancels the task."""
        from xpool._python.event_loops import awaited  # here, since asyncio takes long to import

        return awaited(self).__await__()

    def cancel(self) -> bool:
        """Cancel the call: it fails with `TaskCancelled`.  Return False if it was answered before.

        Waiting tasks never run.  In running ones `TaskStopped` is raised; if a task does not end,
        its worker is killed and replaced.  A thread cannot be stopped: its task runs on, and
        another thread takes its place.
        """
        # Read once, since `release` clears it in another thread.
        pool = self._pool
        if pool is not None and not self.settled:
            pool._submitter.cancel(self)
        return self._cancelled

    def _open(self) -> None:
        if self._opened:
            return
        # Held while the first caller unpickles the value.  Reentrant, since unpickling runs code of
        # the program, which may ask for this result, and so may a signal handler.  Made here, in
        # one atomic operation, since many results need no lock.
        with self.__dict__.setdefault("_opening", threading.RLock()):
            if self._opened:
                return
            # An interrupt while this unpickles changes nothing: the next `get` unpickles again.
            try:
                success, value = self._success, self._unpack(self._value)
                if not success and not isinstance(value, BaseException):
                    raise TypeError(
                        f"the value of a failed task must be an exception, not {value!r}"
                    )
            except Exception as exc:
                if by_handler(exc):
                    raise
                success, value = False, exc
            self._settle(success, value)

    def _settle(self, success: bool, value: Any) -> None:
        self._success, self._value, self._opened = success, value, True

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, PickledResult):  # without calls, for `apply`
            (value,) = value.open()
            if type(value) is Unopened:
                raise value.exc
        return value

    # -- the engine's side -------------------------------------------------------------------

    def describe(self, index: int) -> str:
        return self.label

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        # It was cancelled, or failed with its pool, before the answer arrived.
        if self.settled:
            return False
        self._success, self._value = ok, value
        # The value of a thread is not pickled.
        self._opened = ok and not isinstance(value, PickledResult)
        self.settled = True
        return True

    def fail(self, exc: BaseException | PickledResult) -> None:
        if not self.settled:
            self._success, self._value = False, exc
            self._opened = not isinstance(exc, PickledResult)
            self._cancelled = isinstance(exc, TaskCancelled)
            self.settled = True

    def release(self) -> None:
        # Set before waking: woken threads check this flag.
        self._ready = True
        # From here on, the pool and the objects that the callbacks hold may be dropped.
        self._pool = None
        if self.has_callback:
            self._callback = self._error_callback = None
        if self.progress is not None:
            self.progress.end()
        if self._waiters.copy():  # see `wake`; saves a call for most results
            self._waiters.wake()

    def complete(self) -> None:
        """Finish after the callback: leave the job table and wake the callers."""
        pool = self._pool
        if pool is not None:
            pool._jobs.remove(self)
        self.release()

    def call_back(self) -> None:
        """Run the callback for the outcome; it may raise.  Called once, before `release`."""
        # In the callback the result is ready; for other threads it is ready only afterwards.
        self._calling = threading.get_ident()
        try:
            self._open()
            call = self._callback if self._success else self._error_callback
            if call is not None:
                call(self._value)
        finally:
            self._calling = None


class MapResult(AsyncResult[list[T]]):
    """The result of `map_async` and `starmap_async`, as `multiprocessing.pool.MapResult`.

    It is ready when every task has been answered.  If some failed, `get` raises the error that
    arrived first; with ``on_error="return"``, errors take the places of results.
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
        self.chunksize = 1
        self._failed = 0  # the task whose error is raised
        self._pieces: dict[int, Any] = {}

    def describe(self, index: int) -> str:
        return f"{'chunk' if self._chunked else 'item'} {index} of {self.label}"

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        if self.progress is not None:
            self.progress.add(tasks_in(value))
        if not ok and self.options.returns_errors:
            self._pieces[index] = value if isinstance(value, PickledResult) else Unopened(value)
        elif not ok:
            if self._success:
                self._success, self._value, self._failed = False, value, index
            # One task failed, so `get` raises: free the values of the others.
            self._pieces.clear()
        elif self._success:
            self._pieces[index] = value
        self._left -= tasks_in(value)
        self.settled = self._left == 0
        return self.settled

    def _unpack(self, value: Any) -> Any:
        if not self._success:
            error = super()._unpack(value)
            if isinstance(error, BaseException):
                number_item(error, self._failed * self.chunksize, self.label)
            return error
        out: list[Any] = []
        for index in sorted(self._pieces):
            piece = self._pieces[index]
            # A loop, since `map(value_of, ...)` would end at the StopIteration of a task.
            for value in piece.open() if isinstance(piece, PickledResult) else (piece,):
                if self.options.returns_errors:
                    out.append(value.exc if type(value) is Unopened else value)
                    if isinstance(out[-1], BaseException):
                        number_item(out[-1], len(out) - 1, self.label)
                    continue
                task = value_of(value)
                if self._chunked:
                    out.extend(task)
                else:
                    out.append(task)
        return out

    def _settle(self, success: bool, value: Any) -> None:
        super()._settle(success, value)
        # The answers are opened, so their memory is released.
        self._pieces = {}

    def fail(self, exc: BaseException | PickledResult) -> None:
        super().fail(exc)
        if not self._success:
            self._pieces = {}
