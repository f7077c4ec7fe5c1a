"""The tasks of a pool's threads, and the threads: the parts of `ThreadWorkers`."""

from __future__ import annotations

import contextlib
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xpool._calls.options import TaskOptions
from xpool._calls.results import Job
from xpool._engine.jobs.states import back_off
from xpool._engine.jobs.waiting import TimeQueue
from xpool._python.waiters import TaskQueue
from xpool._worker.callables import task_function
from xpool.errors import WorkerDied


class Source:
    """Consecutive tasks of a job, from which several threads take at once.

    A task calls ``call(func, item)``; the first item has index ``first``.  If ``last`` is true,
    threads run waiting calls and maps before the next task of this source.  They run tasks of a
    priority above 0 before the next task of any source.
    """

    __slots__ = ("call", "first", "func", "items", "job", "last", "places")

    def __init__(
        self,
        job: Job,
        call: Callable[[Callable[..., Any], Any], Any],
        func: Callable[..., Any],
        items: Sequence[Any],
        first: int = 0,
        last: bool = False,
    ) -> None:
        self.job, self.call, self.func = job, call, func
        self.items, self.first, self.last = items, first, last
        # `next` of a counter is atomic, so no two threads get the same place.
        self.places = itertools.count()


class SourceQueue(TaskQueue):
    """The queue of all threads: plain and held tasks, sources, and None, which ends a thread."""

    def put_source(self, source: Source, threads: int) -> None:
        """Let this many threads take from a source."""
        for _ in range(threads):
            self.put(source, source.last)

    def put_source_back(self, source: Source) -> None:
        """Let any thread continue with a source."""
        # Before later items of the same stream, and before calls that came after a map.
        self.put_back(source, source.last)

    def spread(self, running: list[Source], more: int) -> None:
        """Let ``more`` threads take from each source, running or waiting."""
        seen = set[int]()
        for last, waiting in (False, self.first), (True, self.last):
            # Other threads append to the right meanwhile, and take from the left.
            found = [(one, 0) for one in running if one.last is last]
            with contextlib.suppress(IndexError):
                for _ in range(len(waiting)):
                    found.append((waiting.popleft(), 1))
            for task, waits in found:
                fresh = type(task) is Source and id(task) not in seen
                seen.add(id(task))
                for _ in range(waits + more * fresh):
                    self.put(task, last)


class HeldTask:
    """A task that `HeldTasks` holds while it runs, since it has a time limit or retries.

    ``chunked``: its function gets the user's function and the arguments of many items.
    """

    def __init__(self, task: Any, options: TaskOptions, chunked: bool = False) -> None:
        self.task, self.options, self.chunked = task, options, chunked
        self.since = 0.0

    def begin(self) -> Any:
        """Start the clock; return the task to run, which restarts the clock at each item."""
        self.since = time.monotonic()
        if not self.chunked or self.options.terms.limit is None:
            return self.task
        job, index, func, (inner, *rest), kwds = self.task

        def tick() -> None:
            self.since = time.monotonic()

        return job, index, func, (task_function(inner, tick=tick).called, *rest), kwds


class PoolThread:
    """One thread of the backend."""

    __slots__ = ("done", "entered", "index", "job", "left", "over", "source", "thread")

    def __init__(self, index: int) -> None:
        self.index = index
        self.source: Source | None = None  # from which it takes tasks now
        self.thread: threading.Thread | None = None
        self.job = 0  # whose task it runs; 0: none
        self.done = 0  # tasks that it has begun
        self.entered = False  # its context's `enter` has returned
        self.left = False  # abandoned: it ends when its task returns
        self.over = False  # surplus: it ends


class Places:
    """The threads of a pool, by index.

    ``lock`` guards all fields.  It is never held while a task, an initializer or a delivery runs.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.threads: dict[int, PoolThread] = {}
        self.left = 0  # abandoned threads
        self.over = 0  # surplus threads among `threads`

    def missing(self, size: int) -> list[int]:
        """Return the empty places in which threads are to start, the lowest first."""
        missing = size - len(self.threads) + self.over
        # After a `resize`, threads with higher numbers may remain.
        free = (i for i in range(len(self.threads) + missing) if i not in self.threads)
        return list(itertools.islice(free, max(missing, 0)))

    def is_surplus(self, me: PoolThread, size: int) -> bool:
        """Whether this thread is to end, because there are more threads than places."""
        with self.lock:
            me.over = not me.left and len(self.threads) - self.over > size
            self.over += me.over
        return me.over

    def remove(self, pool_thread: PoolThread) -> None:
        """Free the place of a thread."""
        del self.threads[pool_thread.index]
        self.over -= pool_thread.over

    def abandon(self, pool_threads: list[PoolThread]) -> None:
        """Free the places of threads that continue with their tasks."""
        with self.lock:
            for pool_thread in pool_threads:
                # It may have ended or been abandoned since the caller looked.
                if self.threads.get(pool_thread.index) is pool_thread:
                    self.remove(pool_thread)
                    pool_thread.left = True
                    self.left += 1

    def of_job(self, job: int) -> list[PoolThread]:
        """Return the threads that run a task of this job now."""
        with self.lock:
            return [pool_thread for pool_thread in self.threads.values() if pool_thread.job == job]


class HeldTasks:
    """Running tasks with options, with their threads, and those that wait.

    Running tasks need no lock: `dict.pop` is atomic, and the thread that pops an entry answers the
    task.  When `alarm`, the time of the next check, becomes an earlier one, None is put into
    ``signal``.
    """

    def __init__(self, tasks: SourceQueue, signal: queue.SimpleQueue[None]) -> None:
        self._tasks, self._signal = tasks, signal
        self._held: dict[int, tuple[PoolThread, HeldTask]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # guards all below
        self.alarm: float | None = None
        self._later: TimeQueue[HeldTask] = TimeQueue()

    def put(self, entry: HeldTask, last: bool = False) -> None:
        """Queue a task as its terms say."""
        if entry.options.terms.priority:
            self._tasks.put_ranked(entry, last, entry.options.terms.priority)
        else:
            self._tasks.put(entry, last)

    def begin(self, me: PoolThread, entry: HeldTask) -> int:
        """Record what a thread begins; return its key."""
        key = next(self._numbers)
        entry.since = time.monotonic()
        # Store it before the alarm is set: the thread that the alarm wakes reads this table.
        self._held[key] = me, entry
        if (limit := entry.options.terms.limit) is not None:
            self.wake_by(entry.since + limit.seconds)
        return key

    def end(self, key: int) -> bool:
        """Forget a running task; return whether the caller is to answer it."""
        return self._held.pop(key, None) is not None

    def retried(self, entry: HeldTask, ok: bool, value: Any) -> bool:
        """Have a failed task run again after a pause, if its options say so."""
        options, terms = entry.options, entry.options.terms
        exc = getattr(value, "exc", value)  # `multiprocessing` may have wrapped it
        if ok or not terms.retries or not isinstance(exc, (WorkerDied, *options.retry_on)):
            return False
        options = options._replace(terms=terms.after_failure(killed=False))
        again = HeldTask(entry.task, options, entry.chunked)
        when = time.monotonic() + back_off(terms.tries + 1, random.Random().random())
        with self._lock:
            self._later.put(when, again)
        self.wake_by(when)
        return True

    def wake_by(self, when: float) -> None:
        """Have `put_due` called at that time or earlier."""
        with self._lock:
            if self.alarm is not None and self.alarm <= when:
                return
            self.alarm = when
        self._signal.put(None)

    def put_due(self, now: float) -> None:
        """Queue the tasks whose time has come; begin a check, and set the next alarm."""
        with self._lock:
            due = self._later.due(now)
            # Clear it before `take_overdue` looks: an entry that comes meanwhile sets it again.
            self.alarm = self._later.next()
        for entry in due:
            self.put(entry)

    def take_overdue(self, now: float) -> Iterator[tuple[PoolThread, HeldTask, float]]:
        """Yield overdue tasks, with their threads and limits; the caller answers them."""
        # An atomic copy: other threads begin and end tasks meanwhile.
        for key, (pool_thread, entry) in self._held.copy().items():
            limit = entry.options.terms.limit
            if limit is not None:
                due = entry.since + limit.seconds
                if now < due:
                    self.wake_by(due)
                elif self.end(key):
                    yield pool_thread, entry, limit.seconds
