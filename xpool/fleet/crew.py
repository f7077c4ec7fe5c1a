"""Worker threads: the crew of the thread pools.

A thread cannot be stopped.  One whose task is over its time, or was cancelled, is left to itself:
the task is answered, another thread takes its place, and when it comes back some day, it ends.  Who
answers a task is decided by who takes it out of `_held`: one operation, done by one of the two.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from xpool.errors import TaskTimeout, WorkerDied, WorkerStartFailed
from xpool.jobs.budget import back_off
from xpool.options import START_ATTEMPTS, Terms
from xpool.results import Job
from xpool.worker.context import WorkerInfo, enter, leave

__all__ = ["Entry", "ThreadCrew"]

_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


class Entry:
    """A task that is run under terms: with a limit of time, or to be tried again.

    ``chunked``: its function is called with a function and many arguments for it.
    """

    def __init__(self, task: Any, terms: Terms, chunked: bool = False, tries: int = 0) -> None:
        self.task, self.terms, self.chunked, self.tries = task, terms, chunked, tries
        self.since = 0.0

    def begin(self) -> Any:
        """Start the clock; return the task to run, whose clock starts anew at each item."""
        self.since = time.monotonic()
        if not self.chunked or self.terms.timeout is None:
            return self.task
        job, index, func, (inner, *rest), kwds = self.task

        def ticking(*args: Any) -> Any:
            self.since = time.monotonic()
            return inner(*args)

        return job, index, func, (ticking, *rest), kwds


class _Run:
    """What a thread is doing: a task, or (None) the initializer."""

    __slots__ = ("entry", "index", "job", "thread")

    def __init__(self, index: int, job: int | None, entry: Entry | None) -> None:
        self.thread = threading.current_thread()
        self.index, self.job, self.entry = index, job, entry


class ThreadCrew:
    """Threads that take tasks from one queue; none of them holds the pool."""

    def __init__(
        self,
        size: int,
        work: Callable[..., None],
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
        lifetime: int | None,
        contexts: list[Any] | None,
        name: str,
        jobs: Mapping[int, Job],
        initializer_timeout: float | None = None,
    ) -> None:
        # Tasks as they are, or entries; None asks a thread to end.
        self.tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.results: deque[Any] = deque()
        self.failure: BaseException | None = None
        self.dropped = False
        self._size = size
        self._work = work
        self._initializer = initializer
        self._initargs = initargs
        self._initializer_timeout = initializer_timeout
        self._lifetime = lifetime
        self._contexts = contexts
        self._name = name
        self._jobs = jobs
        self._signal = threading.Semaphore(0)
        self._failures = 0
        self._ending = False
        self._held: dict[int, _Run] = {}
        self._numbers = itertools.count()
        self._random = random.Random()
        # Guards what follows.  The threads by index; a replacement takes the place of the one
        # that ended.  When to look for tasks over their time or to be tried again, and these.
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}
        self._alarm: float | None = None
        self._later: list[tuple[float, int, Entry]] = []

    def start_missing(self) -> None:
        """Start a thread for every index that has none."""
        with self._lock:
            for index in range(self._size):
                if index not in self._threads and not self._ending:
                    thread = threading.Thread(
                        target=self._run,
                        args=(index,),
                        name=f"{self._name}-worker-{index}",
                        daemon=True,
                    )
                    self._threads[index] = thread
                    thread.start()

    # -- in a worker's thread ----------------------------------------------------------------------

    def _run(self, index: int) -> None:
        context = self._contexts[index] if self._contexts is not None else None
        enter(WorkerInfo(index, self._name, context), thread=True)
        try:
            if self._initialize(index):
                self._failures = 0
                get, put = self._ends(index)
                self._work(get, put, None, (), self._lifetime)
        finally:
            leave()
            with self._lock:
                ours = self._threads.get(index) is threading.current_thread()
                if ours:
                    del self._threads[index]
            if ours and not self._ending and self.failure is None:
                self.start_missing()
            self.wake()

    def _initialize(self, index: int) -> bool:
        if self._initializer is None:
            return True
        limit = self._initializer_timeout
        entry = None if limit is None else Entry(None, Terms(timeout=limit))
        key = self._begin(_Run(index, None, entry))
        try:
            self._initializer(*self._initargs)
        except BaseException as exc:
            if self._held.pop(key, None) is not None:
                self._failed(index, exc)
            return False
        return self._held.pop(key, None) is not None

    def _ends(self, index: int) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Return what a thread takes tasks with, and what it answers with."""
        jobs, held, tasks = self._jobs, self._held, self.tasks
        keys: dict[tuple[int, int], int] = {}  # of the notes on the tasks in hand
        left = False  # to itself: the task in hand was answered for us

        def get() -> Any:
            while not left:
                task = tasks.get()
                if task is None:
                    return None
                entry = None
                if type(task) is Entry:
                    entry, task = task, task.task
                job = jobs.get(task[0])
                if job is not None and not job.settled:
                    keys[task[0], task[1]] = self._begin(_Run(index, task[0], entry))
                    return task if entry is None else entry.begin()
            return None

        def put(result: Any) -> None:
            nonlocal left
            run = held.pop(keys.pop(result[:2], -1), None)
            if run is None:
                left = True
            elif run.entry is None or not self._retried(run.entry, result[2]):
                self.put(result)

        return get, put

    def _begin(self, run: _Run) -> int:
        """Note what a thread does from now on; return the key of the note."""
        key = next(self._numbers)
        entry = run.entry
        if entry is not None:
            entry.since = time.monotonic()
        self._held[key] = run
        if entry is not None and entry.terms.timeout is not None:
            self._wake_by(entry.since + entry.terms.timeout)
        return key

    def _wake_by(self, when: float) -> None:
        with self._lock:
            if self._alarm is not None and self._alarm <= when:
                return
            self._alarm = when
        self.wake()

    def _retried(self, entry: Entry, answer: tuple[bool, Any]) -> bool:
        """Have a task that failed run again after a pause, if its terms say so."""
        ok, value = answer
        terms, tries = entry.terms, entry.tries + 1
        exc = getattr(value, "exc", value)  # it may be packed for its way
        if ok or tries > terms.retries or not isinstance(exc, (WorkerDied, *terms.retry_on)):
            return False
        again = Entry(entry.task, terms, entry.chunked, tries)
        when = time.monotonic() + back_off(tries, self._random.random())
        with self._lock:
            heapq.heappush(self._later, (when, next(self._numbers), again))
        self._wake_by(when)
        return True

    def _failed(self, index: int, exc: BaseException) -> None:
        self._failures += 1
        if self._failures >= START_ATTEMPTS and self.failure is None:
            failure = WorkerStartFailed(index, self._failures, f"{type(exc).__name__}: {exc}")
            failure.__cause__ = exc
            self.failure = failure

    # -- in the engine's thread, or a caller's -----------------------------------------------------

    def put(self, result: Any) -> None:
        """Take a result."""
        self.results.append(result)
        self._signal.release()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until there is a result, or something else to look at."""
        alarm = self._alarm
        if alarm is not None:
            left = max(0.0, alarm - time.monotonic())
            timeout = left if timeout is None else min(left, timeout)
        self._signal.acquire(timeout=timeout)
        if alarm is not None and time.monotonic() >= alarm:
            self._mind(time.monotonic())

    def _mind(self, now: float) -> None:
        """Answer what is over its time, and queue what is to be tried again."""
        with self._lock:
            while self._later and self._later[0][0] <= now:
                self.tasks.put(heapq.heappop(self._later)[2])
            self._alarm = self._later[0][0] if self._later else None
        for key, run in self._held.copy().items():
            if run.entry is not None and run.entry.terms.timeout is not None:
                due = run.entry.since + run.entry.terms.timeout
                if now < due:
                    self._wake_by(due)
                elif self._leave(key):
                    self._too_late(run, run.entry)

    def _leave(self, key: int) -> bool:
        """Leave a thread to itself and replace it; False when it has answered meanwhile."""
        run = self._held.pop(key, None)
        if run is None:
            return False
        with self._lock:
            if self._threads.get(run.index) is run.thread:
                del self._threads[run.index]
        if run.job is not None:
            self.start_missing()
        return True

    def _too_late(self, run: _Run, entry: Entry) -> None:
        seconds = entry.terms.timeout
        assert seconds is not None
        stack = _stack(sys._current_frames().get(run.thread.ident or 0))
        if run.job is None:
            task = "The initializer"
            error = TaskTimeout(seconds, run.index, os.getpid(), task, stack)
            self._failed(run.index, error)
            if self.failure is None:
                self.start_missing()
            self.wake()
            return
        job, index = entry.task[:2]
        known = self._jobs.get(job)
        task = f"task {index}" if known is None else known.describe(index)
        answer = False, TaskTimeout(seconds, run.index, os.getpid(), task, stack)
        if not self._retried(entry, answer):
            self.put((job, index, answer))

    def withdraw(self, job: int) -> None:
        """Leave the threads to themselves that run something of this job; it has ended."""
        for key, run in self._held.copy().items():
            if run.job == job:
                self._leave(key)

    def wake(self) -> None:
        """Make `wait` return."""
        self._signal.release()

    def drop(self) -> None:
        """Note that the pool is gone.  For the garbage collector: takes no lock of ours."""
        self.dropped = True
        self._signal.release()

    def release(self) -> None:
        """Let each thread end when the queue is empty."""
        self._ending = True
        for _ in range(self._size):
            self.tasks.put(None)

    def terminate(self) -> None:
        """Drop what waits; the threads end after the task they are in."""
        self._ending = True
        try:
            while True:
                self.tasks.get_nowait()
        except queue.Empty:
            pass  # that was the last; the threads take from it too, so it cannot be counted
        self.release()

    @property
    def ended(self) -> bool:
        """Whether all threads have ended."""
        return self._ending and not self._threads

    def join(self) -> None:
        """Wait for all threads."""
        while not self.ended:
            self.wait()
        for thread in list(self._threads.values()):
            thread.join()

    def close(self) -> None:
        """Nothing is held."""

    def after_fork_in_child(self) -> None:
        """The threads were not copied."""
        self._lock = threading.Lock()
        self._ending = True
        self._threads = {}


def _stack(frame: FrameType | None) -> str:
    """Return where a thread is, most recent call first, as faulthandler says it; without us."""
    lines = []
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
