"""`Recorded`: the stream of an `imap` whose results a journal stores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from xpool._calls.results import PickledResult, Unopened, tasks_in
from xpool._calls.streams import BOOKKEEPING, IMapIterator, Stream, weigh
from xpool._pools.job_table import JobTable
from xpool._pools.journal import Journal, Stored
from xpool.pickle import dumps

AT_ONCE = 1000
"""The most answers that are written in one transaction."""

_Answer = tuple[int, bool, Any]
_Arrivals: TypeAlias = "queue.SimpleQueue[_Answer | int | None]"  # answers, input's length, or end


class Recorded(Stream):
    """A stream whose answers are stored in a journal before its iterator gets them.

    ``deliver`` passes answers to a thread, which stores them and then delivers them.  The stream
    ends when the journal is closed: until then its file lacks what SQLite keeps beside it.
    """

    def __init__(
        self,
        iterator: IMapIterator[Any],
        number: int,
        gone: Callable[[], None],
        journal: Journal,
        jobs: JobTable,
    ) -> None:
        super().__init__(iterator, number, gone)
        self._journal, self._jobs = journal, jobs
        self._keys: dict[int, str] = {}  # keys of submitted items, by index
        self._count: Callable[[int], object] | None = None  # the stream's `answers`
        # The thread does not hold the job, so that a dropped iterator is noticed.
        self._arrivals: _Arrivals = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_write_all,
            args=(self._arrivals, self._keys, journal, jobs, number),
            name="xpool-journal",
            daemon=True,
        )
        self._thread.start()

    def around(self, put: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        """Return a function that puts an item, or delivers its stored result."""
        journal, keys, jobs, number = self._journal, self._keys, self._jobs, self.number
        # `deliver` counts the answers, since stored items and those without a key are never put.
        self._count, self.answers = self.answers, None

        def put_or_find(index: int, item: Any) -> int:
            key = journal.key(item)
            stored = journal.find(key)
            if stored is not None:
                jobs.deliver(number, index, True, stored)
                return 0
            # Set it before `put`: the answer may arrive before `put` returns.
            keys[index] = key
            return put(index, item)

        return put_or_find

    def deliver(self, index: int, ok: bool, value: Any) -> bool:
        if self._count is not None and index in self._keys:
            self._count(1)
        # Count it now, since an answer that waits to be stored takes memory, too.
        self.hold_back(value)
        self._arrivals.put((index, ok, value))
        return False

    def record(self, index: int, ok: bool, value: Any) -> bool:
        self.hold_back(value, -1)
        return super().record(index, ok, value)

    def end(self, length: int) -> bool:
        self._arrivals.put(length)
        return False

    def release(self) -> None:
        self._arrivals.put(None)
        super().release()


def _write_all(
    arrivals: _Arrivals, keys: dict[int, str], journal: Journal, jobs: JobTable, number: int
) -> None:
    """Store answers as they arrive, until all tasks of the input are answered, or None arrives."""
    length, answered = None, 0
    released = False
    try:
        while answered != length and not released:
            answers: list[_Answer] = []
            for one in _next(arrivals):
                if isinstance(one, int):
                    length = one
                elif one is None:
                    released = True
                else:
                    answers.append(one)
            answered += sum(tasks_in(value) for _, _, value in answers)
            _store(answers, keys, journal)
            answers.reverse()
            while answers:  # removes them, since they may be large
                jobs.deliver_recorded(number, *answers.pop())
            del one
        journal.close()
        if length is not None:
            jobs.end_recorded(number, length)
    except BaseException as exc:
        journal.close()
        job = jobs.unanswered.get(number)
        if job is not None:
            jobs.fail([job], exc)


def _next(arrivals: _Arrivals) -> list[_Answer | int | None]:
    """Wait for an arrival; return it and those behind it, which share a transaction."""
    there = [arrivals.get()]
    while len(there) < AT_ONCE and not arrivals.empty():
        there.append(arrivals.get())
    return there


def _store(answers: list[_Answer], keys: dict[int, str], journal: Journal) -> None:
    """Store the results among these answers; replace those that cannot be pickled by errors."""
    rows: list[tuple[str, bytes]] = []
    for n, (index, ok, value) in enumerate(answers):
        if ok and type(value) is not Stored:
            answers[n] = index, ok, _pickled(index, value, keys, rows)
    journal.write(rows)


def _pickled(index: int, value: Any, keys: dict[int, str], rows: list[tuple[str, bytes]]) -> Any:
    """Add the results of an answer to the rows to be stored; return the answer for the consumer.

    The answer is unpickled here, and again by the consumer.  If this unpickling raises, nothing is
    stored, and the consumer gets the exception.
    """
    try:
        values = value.open() if isinstance(value, PickledResult) else [value]
    except BaseException:
        return value
    written = True
    for n, one in enumerate(values):
        # None: the input or the item's key raised.
        key = keys.pop(index + n, None)
        if key is not None and type(one) is not Unopened:
            try:
                rows.append((key, dumps(one)))
            except BaseException as exc:  # raised by any object's __reduce__
                values[n] = Unopened(exc)
                written = False
    return value if written else RefusedResult(values, weigh(value))


class RefusedResult(PickledResult):
    """The results of an answer; those that cannot be pickled are errors."""

    __slots__ = ("_values", "_weight", "count")

    def __init__(self, values: list[Any], weight: int) -> None:
        self._values, self.count = values, len(values)
        self._weight = weight

    @property
    def nbytes(self) -> int:
        # It counts as much as the answer that it replaces.
        return self._weight - self.count * BOOKKEEPING

    def open(self) -> list[Any]:
        return self._values
