"""The hooks of `BasePool`, which a pool of your own overrides.

A subclass that overrides all hooks but `worker` has its own queues and workers; verbs, results,
callbacks, states and errors come from `BasePool`.  The docstrings say which thread calls a hook and
what the hook may do.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from xpool import errors
from xpool._python import failures
from xpool._worker.worker_context import exited

Task = tuple[int, int, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Result = tuple[int, int, tuple[bool, Any]]


def next_result(results: deque[Result], wait: Callable[[float], object], timeout: float) -> Result:
    """Do what `Hooks.pool_outqueue_get` of a pool does whose workers add to ``results``."""
    if not results and timeout > 0:
        wait(timeout)
    try:
        return results.popleft()
    except IndexError:  # not checked first, because callers of `apply` pop results, too
        raise queue.Empty from None


class Carried:
    """A task's exception in transit; pickling it adds the text of its traceback."""

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc

    def __reduce__(self) -> tuple[Any, ...]:
        lines = failures.ready().format_exception(type(self.exc), self.exc, self.exc.__traceback__)
        return _carry, (self.exc, "".join(lines))


def _carry(exc: BaseException, text: str) -> Carried:
    # Not `exc.__cause__ = ...`, which the class may forbid, as a frozen dataclass does.
    object.__setattr__(exc, "__cause__", errors.RemoteTraceback(text))
    return Carried(exc)


class Hooks:
    """The methods that subclasses of `BasePool` override."""

    def setup_queues(self) -> None:
        """Make the queues.

        The constructor calls it once, and passes on its exception.
        """
        raise NotImplementedError(f"{type(self).__name__} must override setup_queues()")

    def pool_inqueue_put(self, obj: Task | None) -> None:
        """Send a task to the workers; None asks one worker to end.

        Called by the submitting thread, by the thread that draws the input of an `imap`, and with
        None by the engine's thread: several threads may call it at once.  It may block while the
        queue is full; the submitter then waits.  An exception becomes the error of that task.
        """
        raise NotImplementedError(f"{type(self).__name__} must override pool_inqueue_put()")

    def pool_outqueue_get(self, timeout: float) -> Result:
        """Return the next result; wait for it at most ``timeout`` seconds.

        Called by the engine's thread.  Raises `queue.Empty` or Python's `TimeoutError` if there is
        no result.  Any other exception ends the pool: unanswered jobs fail with `InternalError`.
        A second result of a task, or one of a task that was not put, fails its job with
        `RuntimeError`.
        """
        raise NotImplementedError(f"{type(self).__name__} must override pool_outqueue_get()")

    def repopulate_pool(self) -> None:
        """Start workers until there are `size()`.

        Called by the constructor, which passes on its exception, and by the engine's thread after
        `maintain_pool` has returned True: there, an exception ends the pool.
        """
        raise NotImplementedError(f"{type(self).__name__} must override repopulate_pool()")

    def maintain_pool(self) -> bool:
        """Remove workers that have ended; return whether there were any.

        Called by the engine's thread, about ten times a second.  It must not block.
        """
        raise NotImplementedError(f"{type(self).__name__} must override maintain_pool()")

    def terminate_workers(self) -> None:
        """Stop the workers without waiting for their tasks.

        Called by the thread that calls `terminate`, possibly while the engine's thread is in
        `repopulate_pool`, and once more by the engine's thread before `join_workers`.  It must not
        block.
        """
        raise NotImplementedError(f"{type(self).__name__} must override terminate_workers()")

    def join_workers(self) -> None:
        """Wait until all workers have ended.

        Called once, by the engine's thread, at the pool's end: after `terminate_workers`, or after
        one ``pool_inqueue_put(None)`` for each worker.  It may block; `join` waits for it.
        """
        raise NotImplementedError(f"{type(self).__name__} must override join_workers()")

    @staticmethod
    def worker(
        get: Callable[[], Task | None],
        put: Callable[[Result], object],
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasks: int | None = None,
    ) -> None:
        """Run in a worker: take tasks and answer each, until a task is None.

        ``get`` and ``put`` are functions of the pool's queues.  The worker is a thread of this
        process, or another process.
        """
        if initializer is not None:
            initializer(*initargs)
        done = 0
        while maxtasks is None or done < maxtasks:
            task = get()
            if task is None:
                return
            job, chunk, func, args, kwds = task
            try:
                answer: tuple[bool, Any] = (True, func(*args, **kwds))
            except SystemExit as exc:
                answer = (False, exited(exc, func))
            except BaseException as exc:
                answer = (False, Carried(exc))
            try:
                put((job, chunk, answer))
            # In a queue between processes, `put` pickles the answer, and this has failed.
            except Exception as exc:
                put((job, chunk, (False, errors.ResultNotPicklable(exc, answer[1]))))
            done += 1
            # `get` may wait for a long time; drop the objects of this task before it does.
            del task, job, chunk, func, args, kwds, answer
