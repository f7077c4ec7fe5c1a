"""`xpool.Executor`: an executor with a pool of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from xpool.errors import OptionError
from xpool.pool.futures import PoolExecutor
from xpool.pool.process import Pool

__all__ = ["Executor"]


class Executor(PoolExecutor):
    """A `concurrent.futures.Executor` whose calls run in the workers of an xpool `Pool`.

    What is true of the pool is true here: lambdas and closures work, tensors travel in shared
    memory, and a worker that dies fails one future, with `WorkerDied`, and is replaced.

    Args:
        max_workers: number of processes; None: one for each processor core.
        initializer: called with ``initargs`` in each worker before its first task.
        initargs: see ``initializer``.
        options: further keyword arguments of `Pool`.

    Its workers start at once.  Leaving a ``with`` block, or `shutdown`, waits for what was
    submitted, and so does the end of the program.

    Raises:
        OptionError: an argument makes no sense (a `ValueError`).
    """

    _owned = True

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[object] = (),
        **options: Any,
    ) -> None:
        if isinstance(max_workers, int) and max_workers <= 0:
            raise OptionError(f"max_workers must be greater than 0, not {max_workers}")
        super().__init__(Pool(max_workers, initializer, initargs, **options))
