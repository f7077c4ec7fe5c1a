"""The results that callers hold while workers run their tasks.

Values arrive pickled, as a `PickledResult`.  The thread that asks for a value unpickles it, because
this may run code of the user, and the engine's thread never runs such code.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from xpool._calls.options import TaskOptions
from xpool._calls.progress import Progress
from xpool._python import at_fork
from xpool._python.failures import number_item
from xpool._python.interrupt import by_handler
from xpool._python.waiters import Waiters, awaited, deadline_of
from xpool.errors import TaskCancelled, TimeoutError

T = TypeVar("T")


class _OfThread(threading.local):
    """Attributes that a thread sets if it runs callbacks (see xpool._pools.callbacks).

    ``blocking`` is called before the thread waits for a result: another thread then runs the next
    callbacks.  ``caller`` is the `_Caller` whose callbacks the thread runs.
    """

    # Of the class, because to look up an attribute that is missing takes a microsecond.
    blocking: Any = None
    caller: Any = None


local = _OfThread()


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
        """Unpickle and return one value for each task, or `Unopened` if this has failed."""

    def open_plain(self) -> list[Any] | None:
        """As `open`, or None if the value is long or its unpickling could run a user's code."""
        return None


class Unopened:
    """Takes the place of a value that cannot be unpickled."""

    __slots__ = ("exc",)

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc


def tasks_in(value: Any) -> int:
    return value.count if isinstance(value, PickledResult) else 1


def open_one(answer: Any) -> Any:
    """Return the unpickled value in the answer of one task, or `Unopened` if this has failed."""
    if isinstance(answer, PickledResult):
        (answer,) = answer.open()
    return answer


def error_of(value: Any) -> BaseException:
    """Return the value of a failed task, or the error that it is no exception."""
    if isinstance(value, BaseException):
        return value
    return TypeError(f"the value of a failed task must be an exception, not {value!r}")


def exception_in(failure: BaseException | PickledResult) -> BaseException:
    """Return an error, unpickled if necessary.  The thread that will raise it calls this."""
    error = open_one(failure)
    assert isinstance(error, BaseException)
    return error


def about_to_block(pool: Any = None) -> None:
    """Call `_OfThread.blocking`, because this thread is about to wait, for this pool if given.

    Raises:
        RuntimeError: this is a finalizer that has interrupted the pool's own work.
    """
    if not at_fork.known[0]:
        at_fork.notice_fork()
    if (blocking := local.blocking) is not None:
        blocking()
    if pool is not None:
        pool._life.refuse_inside()


class Job:
    """A call of a verb, which is answered task by task.

    One thread at a time, usually the engine's, calls ``deliver`` and ``fail``, which set `settled`.
    """

    drop_function: Callable[[], object] | None = None
    """Called once when the job is answered, because the workers no longer need its function."""

    has_callback = False
    """Whether a callback must run before the callers wake."""

    is_future = False
    """Whether the job completes a future, even when the pool ends."""

    reserved = False
    """Whether a thread that waits for the future will complete it, or have it completed."""

    is_call = False
    """Whether the job is a single task, which engines keep among `CALLS`."""

    options = TaskOptions()

    asks: Sequence[Any] = ()
    """Tasks of a stream that `send_asks` submits."""

    progress: Progress | None = None
    """Shows how many items of the job are done."""

    flow: Any = None
    """The `FlowControl` of a stream."""

    owner: Any = None
    """The executor whose `shutdown` waits for the job, which keeps it."""

    def __init__(self, number: int, label: str, pool: Any) -> None:
        self.number = number
        self.label = label
        self._pool = pool  # kept alive until the job is answered
        self.settled = False
        self._waiters = Waiters()

    def __reduce__(self) -> Any:
        raise NotImplementedError(_NOT_SENT)

    def describe(self, index: int) -> str:
        """Return the text that names task ``index`` in error texts."""
        return f"task {index} of {self.label}"

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        """Take the answer of the tasks from ``index`` on.  Return whether all are now answered."""
        raise NotImplementedError

    def misfit(self, index: int, ok: bool, value: Any) -> str:
        """Return what is wrong with an answer that would hide that a task has none; empty: nothing.

        Called before `deliver`, if a subclass of a pool has hooks.
        """
        return ""

    def surplus(self, index: int) -> str:
        """Return what is wrong with the answer of a task that does not exist."""
        return f"a result of {self.describe(index)}, which was not put"

    def fail(self, exc: BaseException | PickledResult) -> None:
        """Answer all unanswered tasks with ``exc``."""
        raise NotImplementedError

    def send_asks(self) -> None:
        """Submit the tasks in `asks`, after `deliver`, whose caller holds a lock."""
        raise NotImplementedError

    def release(self) -> None:
        if self.progress is not None:
            self.progress.end()
        self.owner = None
        self._waiters.wake()

    def abandon(self, exc: BaseException) -> None:
        """Fail in a forked child, which has none of the pool's threads."""
        self.fail(exc)
        self.release()


INSIDE = (
    "the garbage collector has called a finalizer in the middle of a call of this pool, which "
    "cannot answer then; a finalizer may submit tasks (apply_async), but must not wait for them"
)


class AsyncResult(Job, Generic[T]):
    """The result of `apply_async`, as `multiprocessing.pool.AsyncResult`."""

    settled = False
    _callback: Callable[[Any], object] | None = None
    _error_callback: Callable[[BaseException], object] | None = None
    _ready = False
    _success = True
    _value: Any = None
    _opened = False
    # The id of the thread that runs the callback.  For this thread the result is already ready.
    _calling: int | None = None
    _cancelled = False
    # The answers of several tasks, by the number of the first task of each.
    _pieces: dict[int, Any] | None = None

    def __init__(
        self,
        number: int,
        label: str,
        pool: Any,
        callback: Callable[[Any], object] | None = None,
        error_callback: Callable[[BaseException], object] | None = None,
    ) -> None:
        # `Job.__init__`, written out to save a call: loops make many results.
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
            ValueError: the call has not completed.
        """
        if not self.ready():
            raise ValueError(f"{self!r} has no result yet; call wait() or get() first")
        self._open()
        return self._success

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the result, at most ``timeout`` seconds.  None: without limit."""
        if self.ready():
            return
        pool = self._pool  # as in `cancel`
        about_to_block(pool)
        if self.is_call and pool is not None:
            deadline = deadline_of(timeout)
            pool._submitter.receive(self, timeout)
            if deadline is not None:
                timeout = deadline - time.monotonic()
        if not self._ready:
            self._waiters.wait(self.ready, timeout)

    def get(self, timeout: float | None = None) -> T:
        """Wait for the result, at most ``timeout`` seconds, and return it.  None: without limit.

        Raises:
            multiprocessing.TimeoutError: the result has not arrived after ``timeout`` seconds.
            Exception: the error that the call raised.
        """
        if not self._ready:
            self.wait(timeout)
            if not self._ready and not self.ready():
                raise TimeoutError(
                    f"{self.label} has no result after {timeout} s; print(pool.stacks()) says "
                    "where each worker is"
                )
        if not self._opened:
            if self.options.waits:  # no other thread has this result
                self._open_now()
            else:
                self._open()
        if self.progress is not None:
            self.progress.wait()
        if self._success:
            value: T = self._value
            return value
        __tracebackhide__ = True  # in notebooks and in pytest
        try:
            raise self._value
        finally:
            del self  # breaks a reference cycle: the error's traceback keeps this frame

    def __await__(self) -> Generator[Any, None, T]:
        """Await the result in asyncio or trio.  Cancelling the ``await`` cancels the task."""
        return awaited(self).__await__()

    def cancel(self) -> bool:
        """Cancel the call, so that `get` raises `TaskCancelled`.  Return False if it was answered.

        Waiting tasks never run.  A running task gets the exception `TaskStopped`; if it does not
        end, its worker is killed and replaced.  In a `ThreadPool` a running task cannot be stopped:
        it continues, and another thread takes the place of its thread.
        """
        pool = self._pool  # read once, because `release` clears it in another thread
        if pool is not None and not self.settled:
            pool._submitter.cancel(self)
        return self._cancelled

    def _open(self) -> None:
        if self._opened:
            return
        # Held while the first caller unpickles the value.  Reentrant, because code that unpickling
        # runs, or a signal handler, may ask for this result.  Made here, by an atomic operation,
        # because many results need no lock.
        with self.__dict__.setdefault("_opening", threading.RLock()):
            if not self._opened:
                self._open_now()

    def _open_now(self) -> None:
        # If a signal handler raises here, nothing has changed, and the next `get` tries again.
        try:
            success, value = self._success, self._value
            if isinstance(value, PickledResult):
                (value,) = value.open()
                if type(value) is Unopened:
                    raise value.exc
            if self._pieces is not None:
                value = self._assembled(value)
            if not success:
                value = error_of(value)
        except Exception as exc:
            if by_handler(exc):
                raise
            success, value = False, exc
        self._success, self._value, self._opened = success, value, True

    def _assembled(self, value: Any) -> Any:
        """Return the value of a result that came in pieces, or its error ``value``."""
        raise NotImplementedError

    # -- the engine's side -------------------------------------------------------------------

    def describe(self, index: int) -> str:
        return self.label

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:  # the job was cancelled, or its pool has failed
            return False
        self._success, self._value = ok, value
        # The values of threads are not pickled.
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
        self._ready = True  # set before waking, because woken threads check it
        # Drop the pool, and the objects that the callbacks keep alive.
        self._pool = None
        if self.has_callback:
            self._callback = self._error_callback = None
        if self.progress is not None:
            self.progress.end()
        if self._waiters.copy():  # saves a call for most results
            self._waiters.wake()

    def complete(self) -> None:
        """Leave the job table and wake the callers, after the callback."""
        pool = self._pool
        if pool is None:
            self.release()
        else:
            pool._jobs.complete(self, call_back=False)

    def call_back(self) -> None:
        """Run the callback for the result or error; it may raise.  Called once before `release`."""
        # For the callback the result is ready now, for other threads only after `release`.
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

    It is ready when all tasks have been answered.  If tasks have failed, `get` raises the error
    that arrived first.  With ``on_error="return"``, errors take the places of results.
    """

    _pieces: dict[int, Any]

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
        self._left = self._tasks = tasks
        self._chunked = chunked
        self.chunksize = 1
        self._failed = 0  # the number of the task whose error `get` raises
        self._pieces = {}

    def describe(self, index: int) -> str:
        return f"{'chunk' if self._chunked else 'item'} {index} of {self.label}"

    def settle(self) -> bool:
        """Answer a map that has no tasks; return True."""
        self.settled = True
        return True

    def unanswered(self, tasks: int) -> int:
        """Return how many of the first tasks are unanswered.  No other task was submitted yet."""
        return self._left - (self._tasks - tasks)

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        tasks = value.count if isinstance(value, PickledResult) else 1
        if self.progress is not None:
            self.progress.add(tasks)
        if not ok and self.options.returns_errors:
            self._pieces[index] = value if isinstance(value, PickledResult) else Unopened(value)
        elif not ok:
            if self._success:
                self._success, self._value, self._failed = False, value, index
            # `get` will raise this error, so free the values of the other tasks.
            self._pieces.clear()
        elif self._success:
            self._pieces[index] = value
        self._left -= tasks
        self.settled = self._left <= 0
        return self.settled

    def misfit(self, index: int, ok: bool, value: Any) -> str:
        if not 0 <= index < self._tasks:
            return self.surplus(index)
        # If the job has failed, its other answers do not matter.
        if index in self._pieces and (ok or self.options.returns_errors):
            return f"two results of {self.describe(index)}"
        return ""

    def _assembled(self, value: Any) -> Any:
        if not self._success:
            if isinstance(value, BaseException):
                number_item(value, self._failed * self.chunksize, self.label)
            return value
        out: list[Any] = []
        take: Callable[[Any], None] = out.extend if self._chunked else out.append
        returns_errors = self.options.returns_errors
        for index in sorted(self._pieces):
            piece = self._pieces[index]
            for value in piece.open() if isinstance(piece, PickledResult) else (piece,):
                if type(value) is not Unopened:
                    take(value)
                elif not returns_errors:
                    raise value.exc
                else:
                    take(value.exc)
                if returns_errors and isinstance(out[-1], BaseException):
                    number_item(out[-1], len(out) - 1, self.label)
        return out

    def _open_now(self) -> None:
        super()._open_now()
        self._pieces = {}  # frees the pickled answers

    def fail(self, exc: BaseException | PickledResult) -> None:
        super().fail(exc)
        if not self._success:
            self._pieces = {}
