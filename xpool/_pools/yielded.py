"""`imap` with ``yields=True``: the values of generators, each of which runs in one worker.

A value is the answer of a task that asks for it, and all tasks of a generator are bound to its
worker.  Between two tasks, the generator waits in the worker, which is free for other tasks.  So a
consumer that takes no values stops the generators, and no worker waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any, NamedTuple

from xpool._calls.options import TaskOptions
from xpool._calls.progress import Progress
from xpool._calls.results import PickledResult, Unopened, tasks_in
from xpool._calls.streams import BOOKKEEPING, IMapIterator, ResultBuffer, Stream, weigh
from xpool._engine.answers import Encoded
from xpool._engine.jobs.ranges import CALLS, TaskRange
from xpool._pickling.frame import inline, names_given
from xpool._pools.engine_submitter import EngineSubmitter
from xpool._pools.input_reader import FlowControl, InputReader, room_for_results
from xpool._pools.job_table import JobTable
from xpool._pools.submitters import ITEM, HookSubmitter, Work, begin_work
from xpool._pools.thread_submitter import ThreadSubmitter
from xpool._python.interrupt import shielded
from xpool._worker.callables import (
    CLOSE,
    NEXT,
    Ask,
    Yielding,
    nothing,
    values,
)
from xpool.errors import OptionError, WorkerDied
from xpool.pickle import encode

MOST_ASKED = 256
"""The most values of a generator that are asked for at a time.  A worker sends them together."""

ROUND_SECONDS = 0.02
"""Seconds for which values are asked for at a time.  When a generator has given these, its worker
takes other waiting tasks first."""


class _Answer(NamedTuple):
    """Answers of one generator: ``length`` values, or an error."""

    ok: bool
    value: Any
    length: int


class _Begun:
    """A generator that was begun, as the pool knows it.

    ``given``: number of its values that have arrived.  ``asked``: number of values that are asked
    for, since the time ``since``.  ``most_asked``: the limit of ``asked``.  ``latest``: the range
    of the last tasks, which the engine has bound to a worker; before it, ``first_place`` names one.
    ``early``: answers that came before the answer of an earlier value, by the value's number.
    ``held``: answers that wait until all earlier generators have ended.
    """

    __slots__ = (
        "asked", "early", "ended", "first_place", "given", "held",
        "item", "latest", "most_asked", "number", "since",
    )  # fmt: skip

    def __init__(self, number: int, item: Any, place: int | None) -> None:
        self.number, self.item, self.first_place = number, item, place
        self.latest: TaskRange | None = None
        self.asked = self.given = 0
        self.most_asked, self.since = 1, 0.0
        self.ended = False
        self.held: deque[tuple[_Answer, int]] = deque()  # with their weights
        self.early: dict[int, tuple[bool, Any]] = {}

    @property
    def place(self) -> int | None:
        return self.first_place if self.latest is None else self.latest.bound


class _OfProcesses:
    """Asks a pool of processes for values: binds all tasks of a generator to the worker with the
    least to do at its beginning.  ``most``: values of one generator at a time."""

    def __init__(self, job: YieldStream, submitter: EngineSubmitter, work: Work) -> None:
        self._engine, self._packer = submitter.engine, submitter.packer
        self._range, self._owner, self._told = submitter.learn(job, work)
        self._numbers, self.withdraw = submitter.jobs.numbers, submitter.withdraw
        self._again = job.options.terms.retries > 0
        self.most = 1 if self._again else MOST_ASKED
        self._numbered = job.numbered

    def pack(self, item: Any) -> tuple[Any, int | None]:
        """Prepare an item; return it and its worker.  Called in the input reader's thread."""
        number, item = item
        place: int | None = -1 if self._owner is None else self._owner
        if self._again:
            # A task that runs again begins the generator again.  So each has the item, in a message
            # that is made once: the engine's thread asks for values, too, and runs no user's code.
            message, place = self._packer.pack_task(item, True, place, self._told, ITEM)
            # The generator holds the message, because it may name objects that lie in blocks of
            # their own: with a token that only the message keeps, and too large for each task.
            return (message if names_given(message) else bytes(inline(message))), place
        task = self._task(Ask(number, 0, item))
        first, place = self._packer.pack_task(task, False, place, self._told, ITEM)
        return (first, encode(self._task(Ask(number, NEXT)))), place

    def _task(self, ask: Ask) -> Any:
        return (ask.number, ask) if self._numbered else ask

    def ask(self, index: int, one: _Begun, count: int) -> None:
        """Submit tasks from ``index`` on, each of which asks for the next value."""
        if self._again:
            payload = encode(self._task(Ask(one.number, one.given, one.item, True)))
        else:
            payload = one.item[one.given > 0]
            one.item = None, one.item[1]  # the first payload may hold blocks
        self._engine.sent(payload)
        # Set before, because the next tasks may be asked for before `submit` has returned.
        one.latest = self._range.beside(index, [payload] * count, one.place)
        self._engine.submit(one.latest)

    def close(self, index: int, one: _Begun) -> None:
        """Submit a task that closes a generator one of whose values could not be sent."""
        payload = encode(self._task(Ask(one.number, CLOSE)))
        self._engine.submit(self._range.beside(index, (payload,), one.place))

    def close_all(self, begun: Iterable[_Begun]) -> None:
        """Close the generators of a job that has ended."""
        # A worker drops the function, and with it the generators, when it gets its next task.
        payload = encode((nothing, (), {}))
        for place in {one.place for one in begun if one.place is not None and one.place >= 0}:
            call = TaskRange(CALLS, 0, next(self._numbers), (payload,), place)
            self._engine.submit(call)


class _OfThreads:
    """As `_OfProcesses`, but any thread gives the next value."""

    most = 1

    def __init__(
        self, job: YieldStream, submitter: ThreadSubmitter, work: Work, yielding: Yielding
    ) -> None:
        self._pool, self._job, self._yielding = submitter._pool, job.number, yielding
        self._call, self._func, self.withdraw = work.call, work.func, submitter.withdraw

    def pack(self, item: Any) -> tuple[Any, int | None]:
        return item[1], None

    def ask(self, index: int, one: _Begun, count: int) -> None:
        pool = self._pool()
        if pool is not None:
            task = self._func, Ask(one.number, one.given, one.item)
            pool.pool_inqueue_put((self._job, index, self._call, task, {}))

    def close_all(self, begun: Iterable[_Begun]) -> None:
        self._yielding.close()


class YieldStream(Stream):
    """The job of an `imap` with ``yields=True``.

    A task of it asks for a value, and its index says nothing of the item.  `_lock` guards all
    fields; its holder waits for no other lock, so `send_asks` submits the tasks later.  ``most``:
    most values ahead of the consumer.  ``counts`` adds tasks to the pool's count of submitted ones.
    """

    numbered = False  # whether a task is a pair of the item's number and the `Ask`

    def __init__(
        self,
        iterator: IMapIterator[Any],
        number: int,
        flow: FlowControl,
        size: int,
        most: int | None,
        counts: Callable[[int], None],
    ) -> None:
        super().__init__(iterator, number, flow.stop)
        self._counts = counts
        self.flow: FlowControl = flow
        self.asking: _OfProcesses | _OfThreads
        # The marks of `Yielding`, as answers have them.
        self.ended: bytes | memoryview = b""
        self.missing: bytes | memoryview = b""
        self._lock = threading.RLock()
        self._ordered, self._size, self._most = iterator.ordered, size, most
        self._room = room_for_results()
        self._asks: dict[int, tuple[_Begun, int]] = {}  # by index: and the number of the value
        # Tasks to be submitted: the index of the first, and how many; 0: close the generator.
        self.asks: deque[tuple[int, _Begun, int]] = deque()
        self._next_ask = 0
        self._begun: dict[int, _Begun] = {}  # not ended or not passed on, in the order of the items
        self._open = 0  # number of generators that have not ended
        self._first = 0  # the first item that is not ended and passed on
        self._held = 0  # number of answers in `held`
        self._passed = 0  # number of answers that the iterator has
        self._items: int | None = None  # number of items, when the input has ended
        self._done = 0  # number of items whose generators have ended
        self._heaviest = BOOKKEEPING
        self._lacks_room = False  # the consumer asks for more values when it has taken some

    def describe(self, index: int) -> str:
        # Called with the engine's lock held, so `_lock` is not taken.
        one, place = self._asks.get(index, (None, 0))
        return self.label if one is None else self._place(one, place)

    def _place(self, one: _Begun, place: int) -> str:
        return f"item {one.number} of {self.label}, after {values(place)}"

    # -- beginning and asking ----------------------------------------------------------------------

    def may_begin(self, number: int) -> bool:
        """Whether the generator of the next item may be begun."""
        if self._open >= self._size:
            return False
        is_later = self._ordered and number != self._first
        if self._room_for(is_later, 1) > 0:
            return True
        self._lacks_room = True
        return self._room_for(is_later, 1) > 0

    @shielded
    def begin(self, number: int, item: Any) -> None:
        """Begin the generator of an item."""
        packed, place = self.asking.pack((number, item))
        with self._lock:
            if not self.settled:
                self._ask(self._enter(number, packed, place), 1)
        self.send_asks()

    def enter_failed(self, number: int) -> int:
        """Enter an item whose generator cannot be begun; return the index of its answer."""
        with self._lock:
            one = self._enter(number, None, None)
            self._next_ask += 1
            self._asks[self._next_ask - 1] = one, 0
            one.asked = 1
            return self._next_ask - 1

    def _enter(self, number: int, item: Any, place: int | None) -> _Begun:
        one = self._begun[number] = _Begun(number, item, place)
        self._open += 1
        return one

    def _ask(self, one: _Begun, count: int) -> None:
        first = self._next_ask
        for i in range(count):
            self._asks[first + i] = one, one.given + i
        one.asked, one.since = count, time.monotonic()
        self._next_ask += count
        self.asks.append((first, one, count))

    def send_asks(self) -> None:
        while self.asks:
            try:
                first, one, count = self.asks.popleft()
            except IndexError:  # another thread has taken the last one
                break
            if not count:
                assert isinstance(self.asking, _OfProcesses)
                self.asking.close(first, one)
            elif not self.settled:
                if one.given:
                    self._counts(count)  # the first task of an item is counted with the input
                self.asking.ask(first, one, count)
                # It has failed meanwhile, perhaps after its tasks were withdrawn.
                if self.settled and not one.ended:
                    self.asking.withdraw(self)

    def _room_for(self, is_later: bool, most: int) -> int:
        """Return how many values a generator that is not asked for any may be asked for.

        ``is_later``: it is not the next one for the consumer.  The next one always has room for a
        value, so that the consumer does not wait for ever.  ``most``: how many it would be asked
        for.
        """
        iterator = self._iterator()
        if iterator is None:
            return 0
        buffer, under_way = iterator.buffer, len(self._asks)
        # `taken` is called when values are taken if there is a buffersize, else when unpickled.
        untaken = self._passed - (buffer.moved if self._most is None else buffer.handed_out)
        used = buffer.bytes_in - buffer.bytes_out
        room = int((self._room - used) // self._heaviest) - under_way - is_later
        if not is_later and not untaken and (self._ordered or not under_way):
            room = max(room, 1)
        if self._most is not None:
            room = min(room, self._most - under_way - self._held - untaken - is_later)
            # The consumer has something to do: ask later, and then for several values.
            if untaken and room < min(most, self._most // 4):
                return 0
        return room

    def _ask_all(self) -> bool:
        """Ask all generators for as many values as there is room; return whether one has none."""
        lacks = False
        for one in list(self._begun.values()):
            if one.ended or one.asked:
                continue
            room = self._room_for(self._ordered and one.number != self._first, one.most_asked)
            if room > 0:
                self._ask(one, min(room, one.most_asked))
            else:
                lacks = True
        return lacks

    def _ask_more(self) -> None:
        self._lacks_room = False
        if self._ask_all():
            # Set before the second look: the consumer takes values first and then reads the flag.
            self._lacks_room = True
            self._ask_all()

    def taken(self) -> None:
        """Use the room that the consumer has made."""
        if self._lacks_room and not self.settled:
            self._use_room()

    @shielded
    def _use_room(self) -> None:
        with self._lock:
            if not self.settled:
                self._ask_more()
        self.send_asks()
        self.flow.handed_out()

    # -- answers -----------------------------------------------------------------------------------

    def misfit(self, index: int, ok: bool, value: Any) -> str:
        return "" if index in self._asks else f"two results of {self.describe(index)}"

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self.settled:
            return False
        with self._lock:
            count = tasks_in(value)
            one, place = self._asks[index]
            for i in range(index, index + count):
                del self._asks[i]
            one.asked -= count
            if not one.asked:
                short = time.monotonic() - one.since < ROUND_SECONDS / 2
                most = one.most_asked * 2 if short else one.most_asked // 2
                one.most_asked = max(1, min(self.asking.most, most))
            if not one.ended:
                one.early[place] = ok, value
            # Threads that receive answers may deliver them in another order.
            while not one.ended and one.given in one.early:
                for answer in self._split(one, one.given, *one.early.pop(one.given)):
                    self._take(one, answer)
                    if one.ended:
                        one.early.clear()
                        break
            self._ask_more()
        self.flow.handed_out()
        return self.settled

    def _split(self, one: _Begun, place: int, ok: bool, value: Any) -> Iterable[_Answer | None]:
        """Yield answers of a generator; None: it has ended."""
        if not ok:
            yield _Answer(False, value, 1)
            return
        payloads = value.payloads() if isinstance(value, Encoded) else [value]
        # Threads give objects of the program, whose `==` is not called.
        ends = self.ended, self.missing
        marks = [type(p) in (bytes, memoryview) and p in ends for p in payloads]
        if not any(marks):
            yield _Answer(True, value, len(payloads))
            return
        n = marks.index(True)
        for payload in payloads[:n]:
            yield _Answer(True, Encoded(payload, 1, False), 1)
        if payloads[n] == self.ended:
            yield None
        else:
            why = "It ended, or resize() ended it, while the generator waited in it."
            task = self._place(one, place + n)
            yield _Answer(False, WorkerDied(None, None, one.place or 0, task, 0, why), 1)

    def _take(self, one: _Begun, answer: _Answer | None) -> None:
        """Take an answer of a generator."""
        if answer is not None:
            weight = weigh(answer.value)  # once: the generator may change a list that it has given
            if answer.ok:
                one.given += answer.length
                self._heaviest = max(self._heaviest, weight // answer.length)
            if self._ordered and one.number != self._first:
                one.held.append((answer, weight))
                self._held += answer.length
                self.hold_back(weight)
            else:
                self._pass_on(one, answer, weight)
        if answer is None or not answer.ok:
            one.ended, one.item = True, None
            self._open -= 1
            self._done += 1
            if self.progress is not None:
                self.progress.add(1)
            if answer is not None and isinstance(answer.value, PickledResult):
                # The worker is alive, and has the generator if only its value cannot be sent.
                self._asks[self._next_ask] = one, one.given
                one.asked += 1
                self.asks.append((self._next_ask, one, 0))
                self._next_ask += 1
            self._go_on()

    def _pass_on(self, one: _Begun, answer: _Answer, weight: int) -> None:
        place = self._passed
        self._passed += answer.length
        iterator = self._iterator()
        if iterator is not None:
            iterator.arrive(place, answer.ok, answer.value, one.number, weight)

    def _go_on(self) -> None:
        """Forget the generators that have ended, and pass on the answers of the next."""
        if not self._ordered:
            self._begun = {n: one for n, one in self._begun.items() if not one.ended}
        while self._ordered and self._first in self._begun:
            one = self._begun[self._first]
            while one.held:
                answer, weight = one.held.popleft()
                self._held -= answer.length
                self.hold_back(-weight)
                self._pass_on(one, answer, weight)
            if not one.ended:
                break
            del self._begun[self._first]
            self._first += 1
        self._finish()

    def _finish(self) -> None:
        if self._done == self._items and not self.settled:
            iterator = self._iterator()
            if iterator is not None:
                iterator.finish(self._passed)
            self.settled = True

    def end(self, length: int) -> bool:
        if self.settled:
            return False
        with self._lock:
            self._items = length
            self._finish()
        return self.settled

    def fail(self, exc: BaseException | PickledResult) -> None:
        super().fail(exc)
        self.flow.handed_out()

    def close_generators(self) -> None:
        """Close the generators in the workers; the job has ended."""
        begun = [one for one in list(self._begun.values()) if not one.ended]
        if begun:
            self.asking.close_all(begun)


def begin(
    pool: Any, results: Any, func: Callable[..., Any], iterable: Iterable[Any], most: int | None,
    options: TaskOptions, length: int | None,
) -> None:  # fmt: skip
    """Begin to fill an iterator with the values of generators.

    ``most``: how many may be ahead of the consumer; None: as many as there is memory for, as in
    `imap`.  ``length``: number of items, if known.
    """
    submitter: HookSubmitter = pool._submitter
    _check(pool, submitter, options)
    jobs: JobTable = pool._jobs
    # The job limits how far the reader is ahead, so the flow has a buffer that nothing keeps.
    flow, number = FlowControl(None, pool._size, ResultBuffer()), next(jobs.numbers)
    job = YieldStream(results, number, flow, pool._size, most, jobs.submitted)
    job.options = options
    results.cancelling, results.numbers = (job, flow), repeat
    if most is None:
        results.opened = job.taken
    else:
        results.taken = job.taken
    if options.progress is not False:
        job.progress = results.progress = Progress(
            options.progress, job.label, length, 1, lambda: flow.drawn
        )
    pool._life.enter(job, 0)
    reader = _reader(job, iterable, jobs, submitter, pool.name)
    try:
        _prepare(pool, job, submitter, func)
    except BaseException as exc:
        submitter.give_up(job, exc)
        return
    reader.begin(pool, job)


def _prepare(
    pool: Any, job: YieldStream, submitter: HookSubmitter, func: Callable[..., Any]
) -> None:
    yielding = Yielding(func, os.urandom(16))
    work, job.numbered = begin_work(pool, job, Work(yielding))
    if isinstance(submitter, EngineSubmitter):
        job.ended, job.missing = encode(yielding.ended), encode(yielding.missing)
        job.asking = _OfProcesses(job, submitter, work)
    else:
        assert isinstance(submitter, ThreadSubmitter)
        job.ended, job.missing = yielding.ended, yielding.missing
        job.asking = _OfThreads(job, submitter, work, yielding)
    forget = job.drop_function

    def end_of_job() -> None:
        job.send_asks()
        if forget is not None:
            forget()
        job.close_generators()

    job.drop_function = end_of_job


def _check(pool: Any, submitter: HookSubmitter, options: TaskOptions) -> None:
    why = ""
    if options.journal is not None:
        why = "journal=: it finds one result for each item"
    elif options.seed is not None:
        why = "seed=: other tasks may run between two values; let the function seed a generator"
    elif not isinstance(submitter, (EngineSubmitter, ThreadSubmitter)):
        why = f"{type(pool).__name__}: its hooks pass on single tasks, and a generator has many"
    elif isinstance(submitter, ThreadSubmitter) and pool._gives_context:
        why = "threads with contexts: the next value may come from a thread with another context"
    elif isinstance(submitter, EngineSubmitter) and pool.maxtasksperchild is not None:
        why = "maxtasksperchild=: a worker would be replaced while generators wait in it"
    elif isinstance(submitter, EngineSubmitter) and pool._options.hosts is not None:
        why = "pools over hosts: agents of hosts cannot do it yet; return lists there"
    if why:
        raise OptionError(f"yields=True cannot be combined with {why}")


def _reader(
    job: YieldStream, iterable: Iterable[Any], jobs: JobTable, submitter: HookSubmitter, name: str
) -> InputReader:
    """Return the reader that begins a generator for each item, when there is room."""
    flow = job.flow

    def over() -> bool:
        # A signal handler may raise in the finalizer of the iterator, which would stop the job.
        return flow.stopped or job.settled or job._iterator() is None

    def put(index: int, item: Any) -> int:
        flow.wait(lambda: over() or job.may_begin(index))
        if over():
            flow.stop()
        else:
            job.begin(index, item)
            flow.answered(1)
        return 0

    def fail(index: int, ok: bool, exc: BaseException | Unopened) -> None:
        jobs.deliver(job.number, job.enter_failed(index), ok, exc)

    def end(length: int, reader: InputReader) -> None:
        jobs.end_input(job.number, length, reader)
        # The consumer may drop the iterator in any place, where a finalizer may take no lock.
        flow.wait(over)
        if not job.settled:
            submitter.cancel(job)

    # A `chain`, so that the reader draws lists in its thread, too: `put` waits.
    return InputReader(chain(iterable), 1, flow, put, None, fail, end, name)
