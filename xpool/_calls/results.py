"""The results that callers hold while workers run their tasks.

Values arrive pickled, as a `PickledResult`.  The thread that asks for a value unpickles it, since
this may run any code of the user, and the engine's thread never does that.
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

# `local.blocking`, where a thread has it, is called before this thread waits for a result: a
# thread that runs callbacks uses it to let others go on (see xpool._pools.callbacks).
local = threading.local()


_NOT_SENT = (
    "results of a pool cannot be passed between processes or pickled, as pools cannot be sent to "
    "workers; send what get() returns"
)


class PickledResult:
    """Answers of one or more consecutive tasks, still pickled."""

    __slots__ = ()

    count: int
    """How many tasks it answers."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes it holds."""

    @abstractmethod
    def open(self) -> list[Any]:
        """Unpickle; return one value for each task, `Unopened` where that raised an error."""


class Unopened:
    """Stands for a value that could not be unpickled."""

    __slots__ = ("exc",)

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc


def tasks_in(value: Any) -> int:
    """Return how many tasks this value answers."""
    return value.count if isinstance(value, PickledResult) else 1


def _opened(value: Any) -> Any:
    """Return an unpickled value, or raise the error of its unpickling."""
    if type(value) is Unopened:
        raise value.exc
    return value


def exception_in(failure: BaseException | PickledResult) -> BaseException:
    """Return an error, opened where it came as a parcel: in the thread that is to raise it."""
    if isinstance(failure, PickledResult):
        (error,) = failure.open()
        assert isinstance(error, BaseException)
        return error
    return failure


def about_to_block() -> None:
    """Call the hook of a thread that runs callbacks: this thread is about to wait."""
    blocking = getattr(local, "blocking", None)
    if blocking is not None:
        blocking()


class Job:
    """Something that was submitted and is answered task by task.

    ``deliver`` and ``fail`` are called by one thread at a time, the engine's or one that drives
    it for a moment; ``settled`` turns true there, once.
    """

    drop_function: Callable[[], object] | None = None
    """Called once when it is answered: the workers need its function no longer."""

    has_callback = False
    """Whether something must be called before the callers wake."""

    is_future = False
    """Whether it completes a future, which is done at the pool's end too."""

    is_call = False
    """Whether it is a single task, which engines know among `CALLS`."""

    options = TaskOptions()
    """How its tasks are to be run."""

    progress: Progress | None = None
    """What shows how far it is."""

    flow: Any = None
    """Of a stream: how far its input is drawn, and whether its tasks may run."""

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

    def fail(self, exc: BaseException | PickledResult) -> None:
        """Answer everything that is not answered with ``exc``: the pool has ended."""
        raise NotImplementedError

    def release(self) -> None:
        """Let the callers have it."""
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
    # Identity of the thread that runs the callback: for it the result is ready already.
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
        # Not by `Job`'s: calls in a loop make many of these.
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
            del self  # its traceback has this frame: no circle, so the result goes with its name

    def __await__(self) -> Generator[Any, None, T]:
        """Await the result in a loop of asyncio or trio; who is cancelled has it cancelled."""
        from xpool._python.event_loops import awaited  # here: asyncio takes long to import

        return awaited(self).__await__()

    def cancel(self) -> bool:
        """End this with `TaskCancelled`; return whether it has ended so, False: it was ready.

        What waits of it is never run.  What runs is stopped: `TaskStopped` is raised in it, and
        when it does not end of that, its worker is killed and replaced.  A thread cannot be
        stopped: its task is left to itself, and another thread takes its place.
        """
        # Read once: `release` takes it away, in another thread.
        pool = self._pool
        if pool is not None and not self.settled:
            pool._submitter.cancel(self)
        return self._cancelled

    def _open(self) -> None:
        if self._opened:
            return
        # Held while the value is unpickled, which is done once, by whoever asks first.  Reentrant:
        # the program's code, which that runs, and signal handlers may ask for this result.  Made
        # here, by one operation, since many results need none: a thread's value is there as it is.
        with self.__dict__.setdefault("_opening", threading.RLock()):
            if self._opened:
                return
            # An interrupt while this unpickles leaves all as it was: the next `get` begins anew.
            try:
                success, value = self._success, self._unpack(self._value)
                if not success and not isinstance(value, BaseException):
                    raise TypeError(f"a task failed with {value!r}, not an exception")
            except Exception as exc:
                if by_handler(exc):
                    raise
                success, value = False, exc
            self._settle(success, value)

    def _settle(self, success: bool, value: Any) -> None:
        self._success, self._value, self._opened = success, value, True

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, PickledResult):
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
        # A thread's value is what it is.
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
        # The pool may be dropped from here on, and so may what the callbacks hold.
        self._pool = None
        if self.has_callback:
            self._callback = self._error_callback = None
        if self.progress is not None:
            self.progress.end()
        if self._waiters.copy():  # see `wake`; a call less for most results
            self._waiters.wake()

    def complete(self) -> None:
        """Finish after the callback: strike it off the pool's list and wake the callers."""
        pool = self._pool
        if pool is not None:
            pool._jobs.remove(self)
        self.release()

    def call_back(self) -> None:
        """Run the callback that fits; it may raise.  Called before `release`, by one thread."""
        # The callback may ask for the result, which for all others is ready only after it.
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

    It is ready when every task has been answered; when some failed, `get` raises the error that
    arrived first, or has the errors in their tasks' places where ``on_error="return"`` was said.
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
            # By a loop: `map(_opened, ...)` would take a task's StopIteration for its own end.
            for value in piece.open() if isinstance(piece, PickledResult) else (piece,):
                if self.options.returns_errors:
                    out.append(value.exc if type(value) is Unopened else value)
                    if isinstance(out[-1], BaseException):
                        number_item(out[-1], len(out) - 1, self.label)
                    continue
                task = _opened(value)
                if self._chunked:
                    out.extend(task)
                else:
                    out.append(task)
        return out

    def _settle(self, success: bool, value: Any) -> None:
        super()._settle(success, value)
        # The answers are opened: the memory in which they came goes.
        self._pieces = {}

    def fail(self, exc: BaseException | PickledResult) -> None:
        super().fail(exc)
        if not self._success:
            self._pieces = {}
