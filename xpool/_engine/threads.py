"""Worker threads: the backend of the thread pools.

All threads take from one queue.  Where many tasks are known at once, they are one `Source` there,
from which all threads take at the same time.  Whoever has run a task delivers its result to its
caller, so that nothing stands between the two but the queue.

A thread cannot be stopped.  One whose task is over its time, or was cancelled, is left to itself:
the task is answered, another thread takes its place, and when it comes back some day, it ends.  Who
answers a task with a limit is decided by who takes it out of `_held`: one operation, done by one of
the two.  What comes late of a job that was cancelled finds that job answered, and is dropped.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from xpool._calls.options import TaskOptions
from xpool._calls.results import Job
from xpool._engine.jobs.budget import EndKind, RestartPolicy, back_off
from xpool._engine.stacks import Whereabouts
from xpool._python.waiters import TaskQueue
from xpool._worker.callables import item_of
from xpool._worker.context import WorkerInfo, enter, leave
from xpool._worker.stopping import stack_of
from xpool.errors import TaskTimeout, WorkerDied, WorkerStartFailed

__all__ = ["Entry", "Source", "ThreadOptions", "ThreadWorkers"]

_WAKE = object()
"""In the queue: what wakes a thread so that it sees whether it is still wanted."""

_ANY = -1
"""The place, for the `RestartPolicy`, of initializers that fail in whichever thread."""

MOST_WAIT_SECONDS = 86400.0
"""Seconds of one wait: a lock cannot be waited for as long as an alarm may be away."""

_ROOT = os.path.dirname(os.path.dirname(__file__))
_OURS = (
    __file__,
    os.path.join(_ROOT, "_pools", "hooks.py"),
    os.path.join(_ROOT, "_worker", "callables.py"),
)


class Source:
    """Consecutive tasks of a job: several threads take from it at once.

    ``func(*before, item)`` is to be called for each item, the first of which has index ``first``.
    ``last``: after each task, a thread runs what waits of calls and maps.
    """

    __slots__ = ("_before", "_first", "_func", "_items", "_places", "job", "last")

    def __init__(
        self,
        job: Job,
        func: Callable[..., Any],
        before: tuple[Any, ...],
        items: Sequence[Any],
        first: int = 0,
        last: bool = False,
    ) -> None:
        self.job, self.last = job, last
        self._func, self._before = func, before
        self._items, self._first = items, first
        # `next` of a counter is atomic, so no two threads get the same place.
        self._places = itertools.count()

    def next(self) -> Any:
        """Return the next task; None: there is no more, or nobody wants it."""
        if not self.job.settled:
            place = next(self._places)
            if place < len(self._items):
                arguments = (*self._before, self._items[place])
                return self.job.number, self._first + place, self._func, arguments, {}
        return None


class Entry:
    """A task that is run under terms: with a limit of time, or to be tried again.

    ``chunked``: its function is called with a function and many arguments for it.
    """

    def __init__(
        self, task: Any, terms: TaskOptions, chunked: bool = False, tries: int = 0
    ) -> None:
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


class _Member:
    """One thread of the backend."""

    __slots__ = ("index", "job", "left", "over", "source", "thread")

    def __init__(self, index: int) -> None:
        self.index = index
        self.source: Source | None = None  # from which it takes tasks now
        self.thread: threading.Thread | None = None
        self.job = 0  # of which it runs a task; 0: none
        self.left = False  # to itself: it ends when it has done what it does
        self.over = False  # more than are wanted by now: it ends


class ThreadOptions(NamedTuple):
    """What the threads of a pool are to be; ``work`` is the loop that each of them runs."""

    name: str
    work: Callable[..., None]
    initializer: Callable[..., object] | None
    initargs: tuple[Any, ...]
    initializer_timeout: float | None
    lifetime: int | None
    contexts: list[Any] | None


class ThreadWorkers:
    """Threads that take tasks from one queue; none of them holds the pool."""

    def __init__(
        self,
        size: int,
        options: ThreadOptions,
        jobs: Mapping[int, Job],
        answer: Callable[[Any], None],
    ) -> None:
        # Tasks as they are, entries, or sources; None asks a thread to end.
        self.tasks = TaskQueue()
        self._answer = answer  # takes results, in any thread
        self.failure: BaseException | None = None
        self.dropped = False
        self._size, self._options, self._jobs = size, options, jobs
        # What makes `wait` return: a queue, since the garbage collector may put something into it.
        self._signal: queue.SimpleQueue[None] = queue.SimpleQueue()
        # The threads do not end by themselves, and so have no budget for that.
        self._policy = RestartPolicy(0)
        self._ending = False
        # What is done now that has a limit of time, and by whom.
        # No lock: who pops the entry answers the task, and a `dict` pops in one operation.
        self._held: dict[int, tuple[_Member, Entry]] = {}
        self._numbers = itertools.count()
        self._random = random.Random()
        # Guards what follows.  The threads by index; a replacement takes the place of the one
        # that ended; how many were left to themselves.  When to look for tasks over their time or
        # to be tried again, and the latter.
        # Held for moments: never while a task, an initializer or the delivery of a result runs.
        self._lock = threading.RLock()
        self._threads: dict[int, _Member] = {}
        self._pauses: dict[int, float] = {}  # places that stay empty until then
        self._left = 0
        self._over = 0  # of these threads, those that end since fewer are wanted
        self._alarm: float | None = None
        self._later: list[tuple[float, int, Entry]] = []

    def start_missing(self) -> None:
        """Start a thread for every place that has none.

        Raises:
            RuntimeError: the system has no thread for us.
        """
        with self._lock:
            for index in self._missing():
                self._start(index)

    def _missing(self) -> list[int]:
        """Return the empty places that are to have a thread: the lowest, as many as are wanted."""
        missing = self._size - len(self._threads) + self._over
        if missing <= 0 or self._ending:
            return []
        # After a `resize`, threads with higher numbers may have stayed.
        free = (i for i in range(len(self._threads) + missing) if i not in self._threads)
        return list(itertools.islice(free, missing))

    def _start(self, index: int) -> None:
        member = self._threads[index] = _Member(index)
        member.thread = threading.Thread(
            target=self._run,
            args=(member,),
            name=f"{self._options.name}-worker-{index}",
            daemon=True,
        )
        try:
            member.thread.start()
        except BaseException:
            del self._threads[index]  # nobody else would, and all wait for its end
            raise

    def _lost(self, index: int, kind: EndKind, cause: BaseException | None = None) -> None:
        """A place has lost its thread: another one starts there, or the pool gives up."""
        now = time.monotonic()
        # What an initializer raises in one thread it raises in the others, too.
        place = _ANY if kind is EndKind.FAILED else index
        with self._lock:
            pause, attempts = self._policy.lost(place, kind, now), self._policy.attempts(place)
            if pause is not None:
                self._pauses[index] = now + pause
        if pause is not None:
            self._replace()
        elif self.failure is None:
            story = f"{type(cause).__name__}: {cause}"
            failure = WorkerStartFailed(index, attempts, story)
            failure.__cause__ = cause
            self.failure = failure
        self.wake()

    def _replace(self) -> None:
        """Start the threads that are missing and whose pause is over."""
        now, refused = time.monotonic(), None
        with self._lock:
            for index in self._missing() if self.failure is None else ():
                when = self._pauses.get(index, now)
                if when > now:
                    self._wake_by(when)
                    continue
                self._pauses.pop(index, None)
                try:
                    self._start(index)
                except RuntimeError as exc:
                    refused = index, exc
                    break
        if refused is not None:
            self._lost(refused[0], EndKind.REFUSED, refused[1])

    # -- in a worker's thread ----------------------------------------------------------------------

    def _run(self, me: _Member) -> None:
        index = me.index
        options, failed = self._options, None
        context = options.contexts[index] if options.contexts is not None else None
        enter(WorkerInfo(index, options.name, context), thread=True)
        try:
            failed = self._initialize(me)
            if failed is None and not me.left:
                with self._lock:
                    self._policy.succeeded(index)
                    self._policy.succeeded(_ANY)
                get, put = self._ends(me)
                options.work(get, put, None, (), options.lifetime)
        finally:
            # The place is free before another thread is started there.  `wake` comes last: whoever
            # waits for the end of all looks at `_threads` then.
            leave()
            with self._lock:
                if not me.left:
                    self._remove(me)
            if me.source is not None:
                self._put_back(me.source)  # it has lived its life: another thread goes on
            if not me.left and not self._ending and self.failure is None:
                self._lost(index, EndKind.FAILED if failed else EndKind.FINISHED, failed)
            self.wake()

    def _initialize(self, me: _Member) -> BaseException | None:
        """Run the initializer; return what it raised.

        If it was over its time, that was noted, and this thread was left to itself.
        """
        options = self._options
        if options.initializer is None:
            return None
        key = self._hold(me, Entry(None, TaskOptions(timeout=options.initializer_timeout)))
        try:
            options.initializer(*options.initargs)
        except BaseException as exc:
            return exc
        finally:
            self._held.pop(key, None)
        return None

    def _ends(self, me: _Member) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Return what a thread takes tasks with, and what it answers with."""
        jobs, tasks, answer = self._jobs, self.tasks, self._answer
        first = tasks.first
        entries: dict[tuple[int, int], tuple[int, Entry]] = {}  # in hand, with their keys

        def get() -> Any:
            while not me.left:
                # A look without the lock, for each task; `_goes` decides with it.
                if len(self._threads) > self._size and self._goes(me):
                    return None
                if me.source is not None:
                    if me.source.last and first:
                        self._put_back(me.source)
                    else:
                        task = me.source.next()
                        if task is not None:
                            me.job = task[0]
                            return task
                    me.source = None
                task = tasks.get()
                if task is None:
                    return None
                if task is _WAKE:
                    continue
                entry = None
                if type(task) is Source:
                    me.source = task
                    del task  # what it holds is let go of with the source
                    continue
                if type(task) is Entry:
                    entry, task = task, task.task
                # Not for a job that is answered: failed, or cancelled, while this waited.
                job = jobs.get(task[0])
                if job is not None and not job.settled:
                    me.job = task[0]
                    if entry is not None:
                        entries[task[:2]] = self._hold(me, entry), entry
                        return entry.begin()
                    return task
            return None

        def put(result: Any) -> None:
            me.job = 0
            if entries:
                key, entry = entries.pop(result[:2], (-1, None))
                # None: `_too_late` has answered it meanwhile.
                if entry is not None and (
                    self._held.pop(key, None) is None or self._retried(entry, result[2])
                ):
                    return
            answer(result)

        return get, put

    def _goes(self, me: _Member) -> bool:
        """Whether a thread ends since fewer are wanted."""
        with self._lock:
            me.over = not me.left and len(self._threads) - self._over > self._size
            self._over += me.over
        return me.over

    def _hold(self, me: _Member, entry: Entry) -> int:
        """Note what a thread begins; return the key of the note."""
        key = next(self._numbers)
        entry.since = time.monotonic()
        # In the table before the alarm is set: who wakes for it looks there.
        self._held[key] = me, entry
        if entry.terms.timeout is not None:
            self._wake_by(entry.since + entry.terms.timeout)
        return key

    def _wake_by(self, when: float) -> None:
        """Have `_mind` called at that time.  The lock may be held: it is reentrant."""
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

    # -- in the engine's thread, or a caller's -----------------------------------------------------

    def resize(self, size: int) -> None:
        """Have so many threads: new ones start, or those end that are free first.

        Raises:
            RuntimeError: the system has no thread for us; there are as many as before.
        """
        before, self._size = self._size, size
        try:
            self.start_missing()
        except BaseException:
            self._size = before
            raise
        finally:
            with self._lock:
                running = [one.source for one in self._threads.values() if one.source is not None]
                surplus = len(self._threads) - self._over - self._size
            for _ in range(surplus):
                # One that waits in `get` looks at the size only when something comes.
                self.tasks.put(_WAKE)
        if size > before:
            self._spread(running, size - before)

    def _spread(self, running: list[Source], more: int) -> None:
        """Let so many more threads take from each source, those that wait too."""
        tasks, seen = self.tasks, set[int]()
        for last, waiting in (False, tasks.first), (True, tasks.last):
            # What comes meanwhile comes behind these; threads take from them.
            found = [(one, 0) for one in running if one.last is last]
            with contextlib.suppress(IndexError):
                for _ in range(len(waiting)):
                    found.append((waiting.popleft(), 1))
            for task, waits in found:
                fresh = type(task) is Source and id(task) not in seen
                seen.add(id(task))
                for _ in range(waits + more * fresh):
                    tasks.put(task, last)

    def _put_back(self, source: Source) -> None:
        """Let any thread go on with a source."""
        if source.last:
            self.tasks.put_back(source)  # before later items of the same stream
        else:
            self.tasks.put(source)

    def put(self, source: Source, tasks: int) -> None:
        """Let the threads take from a source; it has this number of tasks."""
        # A source of few tasks need not wake all threads.
        for _ in range(min(tasks, self._size)):
            self.tasks.put(source, source.last)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until there is something to look at."""
        # Without the lock: who sets a sooner one puts into `_signal` after that.
        alarm = self._alarm
        if alarm is not None:
            left = min(max(0.0, alarm - time.monotonic()), MOST_WAIT_SECONDS)
            timeout = left if timeout is None else min(left, timeout)
        try:
            self._signal.get(timeout=timeout)
            while True:
                self._signal.get_nowait()
        except queue.Empty:
            pass  # all are seen
        if alarm is not None and time.monotonic() >= alarm:
            self._mind(time.monotonic())

    def _mind(self, now: float) -> None:
        """Answer what is over its time, and queue what is to be tried again."""
        with self._lock:
            while self._later and self._later[0][0] <= now:
                self.tasks.put(heapq.heappop(self._later)[2])
            # Cleared before the table is looked at: an entry that comes meanwhile sets it anew.
            self._alarm = self._later[0][0] if self._later else None
        if self._pauses:
            self._replace()
        # A copy, made in one operation: other threads begin and end tasks meanwhile.
        for key, (member, entry) in self._held.copy().items():
            if entry.terms.timeout is not None:
                due = entry.since + entry.terms.timeout
                if now < due:
                    self._wake_by(due)
                # Popped here: its thread, when it comes back, does not answer it any more.
                elif self._held.pop(key, None) is not None:
                    self._too_late(member, entry, entry.terms.timeout)

    def _too_late(self, member: _Member, entry: Entry, seconds: float) -> None:
        thread = member.thread
        assert thread is not None
        stack = stack_of(sys._current_frames().get(thread.ident or 0), _OURS)
        self._leave([member])
        task, job, index = "The initializer", 0, 0
        if entry.task is not None:
            job, index = entry.task[:2]
            known = self._jobs.get(job)
            task = f"task {index}" if known is None else known.describe(index)
        error = TaskTimeout(seconds, member.index, os.getpid(), task, stack, stopped=False)
        if entry.task is None:
            self._lost(member.index, EndKind.FAILED, error)
            return
        if not self._retried(entry, (False, error)):
            self._answer((job, index, (False, error)))
        self._lost(member.index, EndKind.STOPPED)

    def _leave(self, members: list[_Member]) -> None:
        """Leave these threads to themselves."""
        with self._lock:
            for member in members:
                # It may have ended, or been left, since the caller looked.
                if self._threads.get(member.index) is member:
                    self._remove(member)
                    member.left = True
                    self._left += 1

    def _remove(self, member: _Member) -> None:
        del self._threads[member.index]
        self._over -= member.over

    def withdraw(self, job: int) -> None:
        """Leave the threads to themselves that run something of this job; it has ended."""
        with self._lock:
            members = [member for member in self._threads.values() if member.job == job]
        self._leave(members)
        for member in members:
            self._lost(member.index, EndKind.STOPPED)

    def runs(self, job: int) -> bool:
        """Whether a thread is in a task of this job now."""
        with self._lock:
            return any(member.job == job for member in self._threads.values())

    def stacks(self) -> list[Whereabouts]:
        """Return where each thread is."""
        frames = sys._current_frames()
        with self._lock:
            members = sorted(self._threads.values(), key=lambda member: member.index)
        found = []
        for member in members:
            thread = member.thread
            job = self._jobs.get(member.job)
            frame = frames.get(thread.ident or 0) if thread is not None and job else None
            stack, item = stack_of(frame, _OURS), item_of(frame)
            task = "" if job is None else job.label
            found.append(Whereabouts(member.index, os.getpid(), task, item, None, stack, ""))
        return found

    def wake(self) -> None:
        """Make `wait` return."""
        self._signal.put(None)

    def drop(self) -> None:
        """Note that the pool is gone.  For the garbage collector: takes no lock of ours."""
        self.dropped = True
        self._signal.put(None)

    def release(self) -> None:
        """Let each thread end when the queue is empty."""
        self._ending = True
        # One that is left to itself may just have come to wait for a task, as the others.
        for _ in range(max(self._size, len(self._threads)) + self._left):
            self.tasks.put(None, last=True)

    def terminate(self) -> None:
        """Drop what waits; the threads end after the task they are in."""
        self._ending = True
        try:
            while True:
                self.tasks.get_nowait()
        except IndexError:
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

    def close(self) -> None:
        """Nothing is held."""

    def after_fork_in_child(self) -> None:
        """The threads were not copied."""
        # Some thread of the parent may have held it.
        self._lock = threading.RLock()
        self._ending = True
        self._threads = {}
