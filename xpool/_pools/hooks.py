"""The hooks of `BasePool`: what a pool of your own overrides.

Override all but `worker` and you have a pool with queues and workers of your own; the verbs, the
results, callbacks, states and errors are `BasePool`'s.  The docstrings say who calls a hook and
what it may do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from xpool import errors
from xpool._worker.context import current_worker
from xpool.errors import WorkerDied

__all__ = ["Carried", "Hooks", "Result", "Task"]

Task = tuple[int, int, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Result = tuple[int, int, tuple[bool, Any]]


class Carried:
    """A task's exception on its way: as it is within a process, with its traceback out of one."""

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc

    def __reduce__(self) -> tuple[Any, ...]:
        import traceback  # only here: no pool of xpool's own needs it

        text = "".join(traceback.format_exception(type(self.exc), self.exc, self.exc.__traceback__))
        return _carry, (self.exc, text)


def _carry(exc: BaseException, text: str) -> Carried:
    exc.__cause__ = errors.RemoteTraceback(text)
    return Carried(exc)


class Hooks:
    """What `BasePool` leaves to its subclasses."""

    def setup_queues(self) -> None:
        """Make the queues.

        Called once, by the constructor, in its thread.  May raise: the constructor does, then.
        """
        raise NotImplementedError(f"{type(self).__name__} must override setup_queues()")

    def pool_inqueue_put(self, obj: Task | None) -> None:
        """Send a task on its way; None asks one worker to end.

        Called by the thread that submits, by the thread that draws the input of an `imap`, and
        with None by the engine's thread; so by several at once.  May block while there is no room
        (the submitter waits).  What it raises becomes the error of that task.
        """
        raise NotImplementedError(f"{type(self).__name__} must override pool_inqueue_put()")

    def pool_outqueue_get(self, timeout: float) -> Result:
        """Return the next result, waiting at most ``timeout`` seconds for it.

        Called by the engine's thread, which has nothing else to do, so it may block as long as
        that, not longer.  Raises `queue.Empty` or Python's own `TimeoutError` when there is none.
        Anything else that it raises ends the pool: all that is unanswered fails with
        `InternalError`.
        """
        raise NotImplementedError(f"{type(self).__name__} must override pool_outqueue_get()")

    def repopulate_pool(self) -> None:
        """Start the workers that are missing from `size()`.

        Called by the constructor, and by the engine's thread after `maintain_pool` returned true.
        Raising in the constructor: the constructor raises; later: as in `pool_outqueue_get`.
        """
        raise NotImplementedError(f"{type(self).__name__} must override repopulate_pool()")

    def maintain_pool(self) -> bool:
        """Put away workers that have ended; return whether there were any.

        Called by the engine's thread, about ten times a second.  May not block.
        """
        raise NotImplementedError(f"{type(self).__name__} must override maintain_pool()")

    def terminate_workers(self) -> None:
        """Stop the workers without waiting for their tasks.

        Called by whoever calls `terminate`, perhaps while the engine's thread is in
        `repopulate_pool`; and once more by that thread, before `join_workers`.  May not block.
        """
        raise NotImplementedError(f"{type(self).__name__} must override terminate_workers()")

    def join_workers(self) -> None:
        """Wait until all workers have ended.

        Called once, by the engine's thread, at the pool's end: after `terminate_workers`, or after
        ``pool_inqueue_put(None)`` once for each worker.  It blocks: `join` waits for it.
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
        """What a worker runs: take tasks and answer each, until None comes.

        ``get`` and ``put`` are whatever the pool's queues have.  Runs in the worker: a thread of
        this process, or another process.
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
                answer = (False, _exited(exc, func))
            except BaseException as exc:
                answer = (False, Carried(exc))
            try:
                put((job, chunk, answer))
            # A queue between processes pickles here, and could not.
            except Exception as exc:
                put((job, chunk, (False, errors.ResultNotPicklable(exc, answer[1]))))
            done += 1
            # `get` may wait for a long time; drop the objects of this task before it does.
            del task, job, chunk, func, args, kwds, answer


def _exited(exc: SystemExit, func: Callable[..., Any]) -> WorkerDied:
    """What `sys.exit` in a task means where the worker goes on: as if it had ended."""
    try:
        index = current_worker().index
    except RuntimeError:
        index = -1
    code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return WorkerDied(os.getpid(), code, index, getattr(func, "__qualname__", repr(func)))
