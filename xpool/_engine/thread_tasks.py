"""What the threads of a pool work on: tasks that several threads share, and tasks with options."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from xpool._calls.options import TaskOptions
from xpool._calls.results import Job


class Source:
    """Consecutive tasks of a job, from which several threads take at once.

    A task calls ``func(*before, item)``; the first item has index ``first``.  If ``last`` is true,
    threads run waiting calls and maps before the next task of this source.
    """

    __slots__ = ("before", "first", "func", "items", "job", "last", "places")

    def __init__(
        self,
        job: Job,
        func: Callable[..., Any],
        before: tuple[Any, ...],
        items: Sequence[Any],
        first: int = 0,
        last: bool = False,
    ) -> None:
        self.job, self.func, self.before = job, func, before
        self.items, self.first, self.last = items, first, last
        # `next` of a counter is atomic, so no two threads get the same place.
        self.places = itertools.count()


class Entry:
    """A task with options: a time limit, or retries.

    ``chunked``: its function gets the user's function and the arguments of many items.
    """

    def __init__(
        self, task: Any, options: TaskOptions, chunked: bool = False, tries: int = 0
    ) -> None:
        self.task, self.options, self.chunked, self.tries = task, options, chunked, tries
        self.since = 0.0

    def begin(self) -> Any:
        """Start the clock; return the task to run, which restarts the clock at each item."""
        self.since = time.monotonic()
        if not self.chunked or self.options.timeout is None:
            return self.task
        job, index, func, (inner, *rest), kwds = self.task

        def ticking(*args: Any) -> Any:
            self.since = time.monotonic()
            return inner(*args)

        return job, index, func, (ticking, *rest), kwds


class Member:
    """One thread of the backend."""

    __slots__ = ("done", "index", "job", "left", "over", "source", "thread")

    def __init__(self, index: int) -> None:
        self.index = index
        self.source: Source | None = None  # from which it takes tasks now
        self.thread: threading.Thread | None = None
        self.job = 0  # whose task it runs; 0: none
        self.done = 0  # tasks that it has begun
        self.left = False  # abandoned: it ends when its task returns
        self.over = False  # surplus: it ends
