"""Worker threads: the backend of the thread pools.

All threads take from one queue.  If many tasks are known at once, they form a `Source`, one entry
of the queue from which all threads take.  The thread that ran a task delivers its result.

A thread cannot be stopped.  If a task exceeds its limit or is cancelled, its thread is abandoned:
the task is answered, another thread takes its place, and this one ends when the task returns.  A
task with a limit is answered by its own thread or by the engine's thread: by the one that pops it
from `HeldTasks`.  The pop is atomic.  A late result of a cancelled job is dropped.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xpool._calls.options import TaskOptions
from xpool._calls.results import Job
from xpool._calls.terms import terms_of
from xpool._engine.jobs.states import EndKind, RestartPolicy, back_off
from xpool._engine.jobs.waiting import TimeQueue
from xpool._engine.stacks import WorkerStack
from xpool._python.starting import PromptThread, print_error
from xpool._python.waiters import TaskQueue
from xpool._worker.callables import bound, item_of, task_function, with_context
from xpool._worker.stopping import stack_of
from xpool._worker.worker_context import WorkerInfo, enter, exited, leave
from xpool.errors import TaskTimeout, WorkerDied, WorkerStartFailed

# -- tasks -----------------------------------------------------------------------------------------


class Source:
    """Consecutive tasks of a job, from which several threads take at once.

    A task calls ``call(func, item)``; the first item has index ``first``.  If ``last`` is true,
    threads run waiting calls and maps before the next task of this source.  They run tasks of a
    priority above 0 before the next task of any source.

    A source that has tasks is one entry of the queue: the thread that takes it puts it back for the
    next one, before it runs a task.
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
    __slots__ = ("done", "entered", "index", "job", "left", "over", "source", "thread")

    def __init__(self, index: int) -> None:
        self.index = index
        self.source: Source | None = None  # from which this thread takes tasks now
        self.thread: threading.Thread | None = None
        self.job = 0  # whose task this thread runs; 0: none
        self.done = 0  # tasks that this thread has begun
        self.entered = False  # the context's `enter` has returned
        self.left = False  # abandoned: it ends when its task returns
        self.over = False  # surplus: it ends


class Places:
    """The threads of a pool, by index.

    ``lock`` guards all fields.  It is never held while a task, an initializer or a delivery runs.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.threads: dict[int, PoolThread] = {}
        self.over = 0  # surplus threads among `threads`

    def missing(self, size: int) -> list[int]:
        """Return the empty places in which threads are to start, the lowest first.

        A surplus thread keeps its place until it has ended, and the next one starts then.
        """
        missing = size - len(self.threads) + self.over
        free = (i for i in range(size) if i not in self.threads)
        return list(itertools.islice(free, max(missing, 0)))

    def is_surplus(self, me: PoolThread, size: int) -> bool:
        """Whether this thread is to end, because there are more threads than places."""
        with self.lock:
            me.over = not me.left and len(self.threads) - self.over > size
            self.over += me.over
        return me.over

    def remove(self, pool_thread: PoolThread) -> None:
        del self.threads[pool_thread.index]
        self.over -= pool_thread.over

    def abandon(self, pool_threads: list[PoolThread]) -> None:
        """Free the places of threads that continue with their tasks."""
        with self.lock:
            for pool_thread in pool_threads:
                # The thread may have ended or been abandoned since the caller looked.
                if self.threads.get(pool_thread.index) is pool_thread:
                    self.remove(pool_thread)
                    pool_thread.left = True

    def of_job(self, job: int) -> list[PoolThread]:
        """Return the threads that run a task of this job now."""
        with self.lock:
            pool_threads = list(self.threads.values())
        return [pool_thread for pool_thread in pool_threads if pool_thread.job == job]


class HeldTasks:
    """Running tasks with options, with their threads, and those that wait.

    Running tasks need no lock: `dict.pop` is atomic, and the thread that pops an entry answers the
    task.  When `alarm`, the time of the next check, becomes an earlier one, None is put into
    ``signal``.
    """

    def __init__(self, tasks: TaskQueue, signal: queue.SimpleQueue[None]) -> None:
        self._tasks, self._signal = tasks, signal
        self._held: dict[int, tuple[PoolThread, HeldTask]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # guards all below
        self.alarm: float | None = None
        self._later: TimeQueue[HeldTask] = TimeQueue()

    def put(self, entry: HeldTask, last: bool = False, front: bool = False) -> None:
        """Queue a task; ``front``: before all waiting tasks of its priority."""
        if entry.options.terms.priority:
            self._tasks.put_ranked(entry, last, entry.options.terms.priority, front)
        else:
            (self._tasks.put_back if front else self._tasks.put)(entry, last)

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
        exc = getattr(value, "exc", value)  # `multiprocessing` may have wrapped the exception
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
            self.put(entry, front=True)

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


# -- the workers -----------------------------------------------------------------------------------

_WAKE = object()
"""In the queue: wakes a thread, which then checks whether it is a surplus one."""

_ANY = -1
"""The place for which `RestartPolicy` counts failed initializers, in any thread."""

_REFUSED = -2
"""The place for which it counts threads that the system has refused."""

MOST_WAIT_SECONDS = 86400.0
"""Longest wait.  A task's time limit may be longer than a lock's timeout can be."""

_ROOT = os.path.dirname(os.path.dirname(__file__))
_OURS = (
    __file__,
    os.path.join(_ROOT, "_pools", "hooks.py"),
    os.path.join(_ROOT, "_worker", "callables.py"),
)


class ThreadOptions(NamedTuple):
    """How a pool's threads are made; ``work`` is the loop that each of them runs."""

    name: str
    work: Callable[..., None]
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    initializer_timeout: float | None
    lifetime: int | None
    contexts: list[Any] | None


def _leave(context: Any) -> None:
    """Call the context's ``exit``, if it has one; print its error."""
    if callable(end := getattr(context, "exit", None)):
        try:
            end()
        except BaseException:
            print_error()


class ThreadWorkers:
    """Threads that take tasks from one queue; none of them keeps the pool alive."""

    def __init__(
        self,
        size: int,
        options: ThreadOptions,
        jobs: Mapping[int, Job],
        answer: Callable[[int, int, bool, Any], None],
    ) -> None:
        self.tasks = TaskQueue()
        self._answer = answer  # takes job, index, whether it succeeded, and value; in any thread
        self.failure: BaseException | None = None
        self.dropped = False
        self._size, self._options, self._jobs = size, options, jobs
        # Makes `wait` return.  A queue, since a finalizer may put something into it.
        self._signal: queue.SimpleQueue[None] = queue.SimpleQueue()
        # No budget: threads do not end by themselves.
        self._policy = RestartPolicy(0)
        self._ending = False
        self.held = HeldTasks(self.tasks, self._signal)
        self._places = Places()
        self.guards: list[Any] = [self._places.lock]
        self._pause = 0.0  # until this time, empty places stay empty

    def start_missing(self) -> None:
        """Start a thread for every place that has none.

        Raises:
            RuntimeError: the system refuses a thread.
        """
        with self._places.lock:
            size = 0 if self._ending or self.failure is not None else self._size
            for index in self._places.missing(size):
                self._start(index)

    def _start(self, index: int) -> None:
        pool_thread = self._places.threads[index] = PoolThread(index)
        pool_thread.thread = PromptThread(
            target=self._run,
            args=(pool_thread,),
            name=f"{self._options.name}-worker-{index}",
            daemon=True,
        )
        try:
            pool_thread.thread.start()
        except BaseException:
            del self._places.threads[index]  # else `ended` never becomes true
            raise

    def _lost(self, index: int, kind: EndKind, cause: BaseException | None = None) -> None:
        """Start another thread in a place that has lost its own, or fail the pool."""
        now = time.monotonic()
        # An initializer that fails in one thread fails in the others, too, as does a start.
        place = {EndKind.FAILED: _ANY, EndKind.REFUSED: _REFUSED}.get(kind, index)
        with self._places.lock:
            pause, attempts = self._policy.lost(place, kind, now), self._policy.attempts(place)
            if pause:
                self._pause = now + pause
        if pause is not None:
            self._replace()
        elif self.failure is None and not self._ending:
            failure = WorkerStartFailed(index, attempts, f"{type(cause).__name__}: {cause}")
            failure.__cause__ = cause
            self.failure = failure
        self.wake()

    def _replace(self) -> None:
        """Start the threads that are missing, when the pause is over."""
        if time.monotonic() < self._pause:
            self.held.wake_by(self._pause)
            return
        try:
            self.start_missing()
        except RuntimeError as exc:
            index = next(iter(self._places.missing(self._size)), 0)
            self._lost(index, EndKind.REFUSED, exc)

    # -- in a worker's thread ----------------------------------------------------------------------

    def _run(self, me: PoolThread) -> None:
        index = me.index
        options, failed = self._options, None
        context = options.contexts[index] if options.contexts is not None else None
        enter(WorkerInfo(index, options.name, context), thread=True)
        try:
            failed = self._initialize(me, context)
            if failed is None and not me.left:
                with self._places.lock:
                    self._policy.forget_failures(index)
                    self._policy.forget_failures(_ANY)
                    self._policy.forget_failures(_REFUSED)
                get, put = self._ends(me)
                options.work(get, put, None, (), None)
        finally:
            if me.entered and not me.left:
                _leave(context)
            # Free the place before another thread starts there.  Wake last: `join` then looks at
            # the places.
            leave()
            with self._places.lock:
                if not me.left:
                    self._places.remove(me)
            if not me.left and not self._ending and self.failure is None:
                self._lost(index, EndKind.FAILED if failed else EndKind.FINISHED, failed)
            if self.ended:
                self.wake()

    def _initialize(self, me: PoolThread, context: Any) -> BaseException | None:
        """Call the context's ``enter`` and the initializer; return what one of them raised.

        If the two took longer than `initializer_timeout`, this thread was abandoned.
        """
        options = self._options
        begin = getattr(context, "enter", None)
        if options.initializer is None and not callable(begin):
            me.entered = True
            return None
        key = self.held.begin(
            me, HeldTask(None, TaskOptions(terms_of(options.initializer_timeout)))
        )
        try:
            if callable(begin):
                begin()
            me.entered = True
            if options.initializer is not None:
                options.initializer(*options.initargs)
        except BaseException as exc:
            return exc
        finally:
            self.held.end(key)
        return None

    def _ends(self, me: PoolThread) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Return the functions by which a thread takes single tasks and answers them.

        The first function also runs the tasks of sources.
        """
        jobs, take, answer = self._jobs, self.tasks.taker(), self._answer
        held, places, threads = self.held, self._places, self._places.threads
        lifetime, contexts = self._options.lifetime, self._options.contexts
        entries: dict[tuple[int, int], tuple[int, HeldTask]] = {}  # by task: its key in `held`

        def get() -> Any:
            while not me.left and me.done != lifetime:
                # Do not take the lock, because each task runs this; `is_surplus` takes it.
                if len(threads) > self._size and places.is_surplus(me, self._size):
                    self.tasks.put(_WAKE)  # another thread may be surplus, too
                    return None
                if me.source is not None:
                    self._run_source(me, me.source)
                    continue
                task, entry = take(), None
                if type(task) is not tuple:
                    if task is None:
                        if self._ending:
                            self.tasks.put(None, last=True)  # for the next thread
                        return None
                    if task is _WAKE:
                        continue
                    if type(task) is Source:
                        me.source, task = task, None  # nothing else keeps it, and its items, alive
                        self._run_source(me, me.source, taken=True)
                        continue
                    if type(task) is HeldTask:
                        entry, task = task, task.task
                # Skip tasks of a job that failed or was cancelled while they waited.
                job = jobs.get(task[0])
                if job is not None and not job.settled:
                    me.job = task[0]
                    me.done += 1
                    if entry is not None:
                        entries[task[:2]] = held.begin(me, entry), entry
                        task = entry.begin()
                    if contexts is None:
                        return task
                    number, index, func, args, kwds = task
                    return number, index, *with_context(contexts[me.index], func, args), kwds
            return None

        def put(result: Any) -> None:
            me.job = 0
            number, index, (ok, value) = result
            if entries:
                key, entry = entries.pop((number, index), (-1, None))
                # If `end` returns False, `_time_out` has answered it.
                if entry is not None and (not held.end(key) or held.retried(entry, ok, value)):
                    return
            answer(number, index, ok, value)

        return get, put

    def _run_source(self, me: PoolThread, source: Source, taken: bool = False) -> None:
        """Run and answer tasks of a source, until it has no more or other tasks go before them.

        ``taken``: the source was taken from the queue just now.
        """
        answer, calls, higher = self._answer, self.tasks.first, self.tasks.higher
        threads, lifetime = self._places.threads, self._options.lifetime
        contexts = self._options.contexts
        job, items, places, first = source.job, source.items, source.places, source.first
        call, func, last, tasks = source.call, source.func, source.last, len(items)
        if contexts is not None:
            func = bound(func, contexts[me.index])
        number = me.job = job.number
        place = next(places)
        if taken and place + 1 < tasks and not job.settled:
            self.tasks.put_back(source, last)
        while place < tasks and not job.settled:
            ok = True
            try:
                value = call(func, items[place])
            except SystemExit as exc:
                ok, value = False, exited(exc, source.func)
            except BaseException as exc:
                ok, value = False, exc
            me.done += 1
            answer(number, first + place, ok, value)
            del value  # before the next task makes another one
            if (last and calls) or higher:
                me.source = None
                break
            if me.left or me.done == lifetime or len(threads) > self._size:
                break
            place = next(places)
        else:
            me.source = None
        me.job = 0
        # The traceback of an error keeps this frame, and its variables.
        del source, job, items, func

    # -- in the engine's thread, or a caller's -----------------------------------------------------

    def resize(self, size: int) -> None:
        """Change the number of threads.  Surplus threads end when they are free, in any order.

        Raises:
            RuntimeError: the system refuses a thread; the number is as before.
        """
        before, self._size = self._size, size
        try:
            self.start_missing()
        except BaseException:
            self._size = before
            raise
        finally:
            self.tasks.put(_WAKE)  # a thread that waits in `get` checks the size when it comes

    def wait(self, timeout: float | None = None) -> None:
        """Wait until something has happened, and act on time limits."""
        # This needs no lock: `wake_by` calls `wake` after it has set an earlier alarm.
        alarm = self.held.alarm
        if alarm is not None:
            left = min(max(0.0, alarm - time.monotonic()), MOST_WAIT_SECONDS)
            timeout = left if timeout is None else min(left, timeout)
        try:
            self._signal.get(timeout=timeout)
            while True:
                self._signal.get_nowait()
        except queue.Empty:
            pass  # drained
        if alarm is not None and time.monotonic() >= alarm:
            self._check_times(time.monotonic())

    def _check_times(self, now: float) -> None:
        """Answer tasks that are over their time limit, and queue those to be tried again."""
        self.held.put_due(now)
        self._replace()
        for pool_thread, entry, seconds in self.held.take_overdue(now):
            self._time_out(pool_thread, entry, seconds)

    def _time_out(self, pool_thread: PoolThread, entry: HeldTask, seconds: float) -> None:
        thread = pool_thread.thread
        assert thread is not None
        stack = stack_of(sys._current_frames().get(thread.ident or 0), _OURS)
        self._places.abandon([pool_thread])
        task, job, index = "The initializer", 0, 0
        if entry.task is not None:
            job, index = entry.task[:2]
            known = self._jobs.get(job)
            task = f"task {index}" if known is None else known.describe(index)
        error = TaskTimeout(seconds, pool_thread.index, os.getpid(), task, stack, stopped=False)
        if entry.task is None:
            self._lost(pool_thread.index, EndKind.FAILED, error)
            return
        if not self.held.retried(entry, False, error):
            self._answer(job, index, False, error)
        self._lost(pool_thread.index, EndKind.STOPPED)

    def withdraw(self, job: int) -> None:
        """Abandon the threads that run tasks of this job, which has ended."""
        pool_threads = self._places.of_job(job)
        self._places.abandon(pool_threads)
        for pool_thread in pool_threads:
            self._lost(pool_thread.index, EndKind.STOPPED)

    def runs(self, job: int) -> bool:
        """Whether a thread runs a task of this job now."""
        return bool(self._places.of_job(job))

    def runs_here(self) -> bool:
        """Whether the calling thread is one of these, so that it must not wait for their end."""
        me = threading.current_thread()
        with self._places.lock:
            return any(one.thread is me for one in self._places.threads.values())

    def stacks(self) -> list[WorkerStack]:
        frames = sys._current_frames()
        with self._places.lock:
            pool_threads = sorted(self._places.threads.values(), key=lambda one: one.index)
        found = []
        for pool_thread in pool_threads:
            thread = pool_thread.thread
            job = self._jobs.get(pool_thread.job)
            frame = frames.get(thread.ident or 0) if thread is not None and job else None
            stack, item = stack_of(frame, _OURS), item_of(frame)
            task = "" if job is None else job.label
            found.append(WorkerStack(pool_thread.index, os.getpid(), task, item, None, stack, ""))
        return found

    def wake(self) -> None:
        self._signal.put(None)

    def drop(self) -> None:
        """Note that the pool is gone.  Called by the garbage collector, so it takes no lock."""
        self.dropped = True
        self._signal.put(None)

    def release(self) -> None:
        """Let each thread end when the queue is empty."""
        self._ending = True
        self.tasks.put(None, last=True)
        if self.ended:
            self.wake()

    def terminate(self) -> None:
        """Drop all waiting tasks; each thread ends after the task that it runs."""
        self._ending = True
        try:
            while True:
                self.tasks.get_nowait()
        except IndexError:
            pass  # empty now; it cannot be counted first, since threads take from it, too
        self.release()

    @property
    def ended(self) -> bool:
        return self._ending and not self._places.threads

    def join(self) -> None:
        while not self.ended:
            self.wait()

    def close(self) -> None:
        """Do nothing: threads hold no descriptors."""

    def after_fork_in_child(self) -> None:
        """Forget the threads, which a fork does not copy."""
        # If a task has forked this process, its thread ends with it.
        for pool_thread in self._places.threads.values():
            pool_thread.left = True
        # Some thread of the parent may have held their locks.
        self.held, self._places = HeldTasks(self.tasks, self._signal), Places()
        self._ending = True
