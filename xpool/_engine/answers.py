"""The outcome of a task: its result, its error, an error of xpool, or another try.

Called with the engine's lock held.
"""

import io
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pickle import PickleBuffer
from typing import Any, NamedTuple

from xpool._calls.results import PickledResult, Unopened
from xpool._engine.jobs.ranges import TaskRange, name_of
from xpool._engine.jobs.scheduler import CALLS, Batch
from xpool._engine.jobs.states import back_off
from xpool._engine.ledger import WorkerEnd
from xpool._engine.memory import EngineParts, MemoryLimits
from xpool._engine.worker_process import WorkerProcess
from xpool._pickling.frame import FRAMED, INLINE_BELOW, PLAIN, Leased, hold_blocks, unpack, weight
from xpool._python.failures import note_result
from xpool._python.interrupt import by_handler
from xpool._wire.outbox import NO_LIMIT, entries
from xpool._wire.wire import BODY_AGAIN, BODY_ERROR, ENTRY, OUTBOX_MIXED
from xpool.errors import InternalError, TaskTimeout, WorkerDied, WorkerStartFailed
from xpool.pickle import decode

PLAIN_BELOW = 1 << 16
"""Bytes of a pickle below which a thread may unpickle it while signal handlers are deferred."""


class _Plain(pickle.Unpickler):
    """Loads builtin types only: no other code runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


class Encoded(PickledResult):
    """Answers as a worker sent them: one payload, or (``run``) ``count`` entries of an outbox."""

    __slots__ = ("_data", "_run", "count")

    def __init__(self, data: bytes | memoryview, count: int, run: bool) -> None:
        self._data = data
        self._run = run
        self.count = count

    def __reduce__(self) -> Any:
        """Pickle the answer for another host; contents of blocks are out-of-band buffers."""
        if type(self._data) is Leased:
            pickled, buffers = unpack(self._data)
            return BufferedResult, ([PickleBuffer(part) for part in (pickled, *buffers)],)
        # A `memoryview` cannot be pickled; a large one becomes an out-of-band buffer.
        large = len(self._data) >= INLINE_BELOW
        data = PickleBuffer(self._data) if large else bytes(self._data)
        return Encoded, (data, self.count, self._run)

    @property
    def nbytes(self) -> int:
        return weight(self._data)

    def payloads(self) -> list[bytes | memoryview]:
        """Return the pickle of each answer."""
        return [data for _, data in entries(bytes(self._data))] if self._run else [self._data]

    def open(self) -> list[Any]:
        data = self._data
        if not self._run:
            # Same as `_opened`, but inlined, because each `apply` runs this.
            try:
                return [pickle.loads(data) if data and data[0] == PLAIN else decode(data)]
            except Exception as exc:
                # A signal handler raised it, such as a time limit: the caller may ask again.
                if by_handler(exc):
                    raise
                note_result(exc)
                return [Unopened(exc)]
        # Same as `entries`, but in one pass, because each result of a stream runs this.
        values: list[Any] = []
        at, end, size = 0, len(data), ENTRY.unpack_from
        # No entry has the error bit here: `Answers._split` has taken out answers with errors.
        while at + 4 <= end:
            stop = at + 4 + size(data, at)[0]
            values.append(_opened(data[at + 4 : stop]))
            at = stop
        if len(values) != self.count or at != end:
            story = f"a worker wrote {len(values)} answers in place of {self.count}"
            return [Unopened(ValueError(story))] * self.count
        return values

    def open_plain(self) -> list[Any] | None:
        data = self._data
        if self._run or not data or data[0] != PLAIN or len(data) >= PLAIN_BELOW:
            return None
        try:
            return [_Plain(io.BytesIO(data)).load()]
        except Exception:
            return None  # `open` gets the value, or the error


class BufferedResult(PickledResult):
    """An answer from another host: its pickle, then its out-of-band buffers."""

    __slots__ = ("_parts",)

    count = 1

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def open(self) -> list[Any]:
        return [_opened(self._parts, _load)]


def _load(parts: list[memoryview]) -> Any:
    return pickle.loads(parts[0], buffers=parts[1:])


def _opened(payload: Any, load: Callable[[Any], Any] = decode) -> Any:
    """Return ``load(payload)``, or `Unopened` if it raised an error."""
    try:
        return load(payload)
    except Exception as exc:
        # As in `Encoded.open`.
        if by_handler(exc):
            raise
        note_result(exc)
        return Unopened(exc)


class StartFailure(PickledResult):
    """`WorkerStartFailed` whose cause, the exception of the initializer, is still pickled.

    Unpickling may run users' code, so each caller that asks for the error unpickles it; the engine
    never does.
    """

    __slots__ = ("error", "pickled")

    count = 1

    def __init__(self, error: WorkerStartFailed, pickled: bytes | memoryview) -> None:
        self.error, self.pickled = error, pickled

    def __str__(self) -> str:
        return str(self.error)

    def __reduce__(self) -> Any:
        return StartFailure, (self.error, bytes(self.pickled))

    @property
    def nbytes(self) -> int:
        return len(self.pickled)

    def open(self) -> list[Any]:
        error = type(self.error)(*self.error.args)
        try:
            error.__cause__ = decode(self.pickled)
        except Exception as exc:
            # The text of the cause is in the error in any case.
            error.__cause__ = exc
        return [error]


CULPRIT = 5
"""Most workers that one task may kill, however large its ``retries`` is."""

_WORKER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "_worker", "")
OURS = tuple(f'"{_WORKER}{name}.py"' for name in ("loop", "callables"))


def own_part(stack: str) -> str:
    """Return a faulthandler stack without its title and xpool's frames."""
    lines = [line for line in stack.splitlines() if line.startswith("  ")]
    ours = [i for i, line in enumerate(lines) if any(o in line for o in OURS)]
    lines = lines[: ours[0]] if ours else lines
    return (
        "\n".join(lines) if lines or not ours else "  in a function that is not written in Python"
    )


def _chance() -> float:
    """Return a random number from 0 to 1.  Not from `random`, which the program may have seeded."""
    return int.from_bytes(os.urandom(4), "little") / (1 << 32)


class EngineOptions(NamedTuple):
    """Options of an engine.

    ``lifetime``: the most tasks that a process runs; None: no limit.  ``processes``: groups of
    worker indexes; the workers of a group are threads of one process.  ``together``: all workers
    end when one dies.  ``hands_back``: the engine's caller retries tasks (see `Answers`).
    ``on_end(end, told)`` is called after the end of each process, in the engine's thread; the place
    gets its next process when ``told()`` was called.
    """

    lifetime: int | None = None
    restart_budget: int = 100
    initializer_timeout: float | None = None
    processes: Iterable[Sequence[int]] = ()
    together: bool = False
    hands_back: bool = False
    memory: MemoryLimits = MemoryLimits()
    on_end: Callable[[WorkerEnd, Callable[[], None]], None] | None = None


class Answers:
    """Moves answers from workers to the results, and records them in the scheduler.

    ``give_idle()`` is called when a task is queued for another try.  ``hands_back``: a task to be
    retried is reported as a result whose ``ok`` is None; its value says whether the task has killed
    its worker.
    """

    def __init__(
        self, parts: EngineParts, give_idle: Callable[[], None], *, hands_back: bool = False
    ) -> None:
        # Results that the pool delivers: appended under the lock, popped without it.
        self.results: deque[tuple[int, int, tuple[Any, Any]]] = deque()
        self._ledger, self.describe = parts.ledger, parts.ledger.describe
        self._sched, self._reactor, self._policy = parts.sched, parts.reactor, parts.policy
        self._leased, self._give_idle = parts.maintenance.later, give_idle
        self._hands_back = hands_back
        self._chance = _chance
        self._sched.alarm = lambda when: self._reactor.call_at(when, self._queue)

    def announced(
        self,
        worker: WorkerProcess,
        errors: int,
        count: int,
        body: bytes | memoryview,
        mark: int,
        nanos: int,
    ) -> None:
        """Take the answers that a message announces.

        Raises:
            Exception: of any type, if the worker has sent an invalid message.
        """
        # The message counts the answers that `WorkerMonitor._look` took early, too.
        early, boxed = worker.early, count
        if early:
            boxed = count - early
            if boxed < 0:
                raise ValueError(f"it reports {count} answers, but {early} were taken before")
            worker.announced()
        self._policy.finished = True
        ledger, tasks = self._ledger, count + bool(body)
        account = ledger.accounts[worker.index]
        account.tasks += tasks
        account.busy += nanos
        ledger.bytes_in += len(body)
        if nanos > ledger.floor or ledger.events is not None:
            # Do this before `_sched.answered`: the task is still at the front.
            held = worker.in_flight.held
            if held:
                ledger.remarkable(worker.index, held[0], tasks, nanos)
        # `or 1`: if all answers were taken early, `seconds` is not used.
        seconds = nanos * 1e-9 / (tasks - early or 1)
        if boxed:
            data = worker.box.take(mark)
            self._ledger.bytes_in += len(data)
            # If an item was interrupted, the answers are taken one by one: `_answer` handles that.
            plain = not errors & OUTBOX_MIXED and worker.interrupted is None
            job, together = self._sched.next_answers(worker.index)
            if plain and boxed <= together and job != CALLS:
                # The answers stay one piece of data until the consumer unpickles them.
                batch, first = self._sched.answered(worker.index, boxed, seconds * boxed)
                self.results.append((batch.job, first, (True, Encoded(data, boxed, True))))
            else:
                self._split(worker, data, boxed, plain and boxed <= together, seconds)
        # All answers up to `head` were taken early.  With any other mark, an answer is missing.
        elif count and mark != worker.box.head:
            raise ValueError(f"outbox mark {mark}, but all is taken up to {worker.box.head}")
        if body:
            self._answer(
                worker, bool(errors & BODY_ERROR), body, seconds, bool(errors & BODY_AGAIN)
            )

    def _split(
        self, worker: WorkerProcess, data: bytes, boxed: int, calls: bool, seconds: float
    ) -> None:
        """Take answers one by one; ``calls``: all are values, not errors, of calls in one batch."""
        found = entries(data)
        if len(found) != boxed:
            raise ValueError(f"it reports {boxed} answers, but wrote {len(found)}")
        if not calls:
            for error, payload in found:
                self._answer(worker, error, payload, seconds)
            return
        first = self._sched.answered(worker.index, boxed, seconds * boxed)[1]
        for number, (_, payload) in enumerate(found, first):
            self.results.append((number, 0, (True, Encoded(payload, 1, False))))

    def unannounced(self, worker: WorkerProcess, mark: int) -> int:
        """Take answers from an outbox before a message announces them; return how many.

        Raises:
            Exception: of any type, if the outbox has invalid contents.
        """
        found = entries(worker.box.take(mark))
        for error, payload in found:
            self._answer(worker, error, payload)
        self._policy.finished |= bool(found)
        return len(found)

    def skipped(self, worker: WorkerProcess, count: int) -> None:
        """Record that a recalled worker has skipped some items.

        Raises:
            ValueError: the worker was not recalled, so it may skip no items.
        """
        if worker.box.limit == NO_LIMIT:
            raise ValueError(f"it skipped {count} tasks that it had to begin")
        # The worker has seen the limit, so the items that it will skip are queued now, in order.
        self._sched.take_back(worker.index, worker.box.limit)
        self._sched.skipped(worker.index, count)
        item = worker.interrupted
        if item is not None and worker.in_flight.answered > item:
            # The worker has skipped the item that it was asked to stop.
            worker.broken_off()

    def _answer(
        self,
        worker: WorkerProcess,
        error: bool,
        payload: bytes | memoryview,
        seconds: float = 0.0,
        again: bool = False,
    ) -> None:
        """Take one answer; ``again``: it is an error after which the task is retried."""
        # Hold the blocks of the payload before the worker may free them, even if no caller will
        # open the answer.  Do this first, because it raises if the payload is invalid.
        if payload[0] == FRAMED:
            payload = hold_blocks(payload)
            if type(payload) is Leased:
                worker.box.count_adopted()
                self._leased()
        batch, index = self._sched.answered(worker.index, 1, seconds)
        position = index - batch.first
        if batch.seq + position == worker.interrupted:
            self._broken_off(worker, batch, position)
        elif again and batch.terms.retries > 0:
            self._again(batch, position, killed=False)
        else:
            number, index = (index, 0) if batch.job == CALLS else (batch.job, index)
            self.results.append((number, index, (not error, Encoded(payload, 1, False))))

    def _result(self, batch: Batch, index: int, ok: bool | None, value: Any) -> None:
        self.results.append((*batch.name(index), (ok, value)))

    def handed_back(self, items: TaskRange) -> None:
        """Report items that were taken out of the queue before a worker began them."""
        self.results.append((*name_of(items.job, items.first), (None, items)))

    def _broken_off(self, worker: WorkerProcess, batch: Batch, position: int) -> None:
        """Answer a task that was asked to stop and has stopped or died.

        The worker's own answer is ignored, because the task had exceeded its limit before.
        """
        stack = worker.broken_off()
        limit = batch.terms.limit
        if batch.withdrawn or limit is None:
            return  # the item was cancelled, and its job is answered
        if limit.again and batch.terms.retries > 0:
            self._again(batch, position, killed=False)
            return
        index = batch.first + position
        task = self.describe(*batch.name(index))
        error = TaskTimeout(limit.seconds, worker.index, worker.pid, task, own_part(stack))
        self._result(batch, index, False, error)

    def _again(self, batch: Batch, position: int, killed: bool, alone: bool = False) -> None:
        # In a pool over hosts, the driver counts the retries and chooses the next worker.
        if self._hands_back:
            self._result(batch, batch.first + position, None, killed)
            return
        if alone:
            self._sched.ran_out(batch, position, self._ledger.peaks)
        when = self._reactor.now() + back_off(batch.terms.tries + 1, self._chance())
        self._sched.again(batch, position, killed=killed, when=when, alone=alone)
        self._ledger.retried(batch, batch.first + position)

    def _queue(self) -> None:
        self._sched.due(self._reactor.now())
        self._give_idle()

    # -- workers that died or sent an invalid message --------------------------------------------

    def disown(self, worker: WorkerProcess, exc: Exception) -> None:
        """Fail the tasks that an ended worker had begun and not answered, because it had sent an
        invalid message: it is unknown whether they were completed."""
        in_flight = worker.in_flight
        began = worker.begun(in_flight.answered)
        if began > in_flight.sent:  # this number is invalid, too, so assume one begun item
            began = in_flight.answered + 1
        while in_flight.held and in_flight.answered < began:
            batch = in_flight.held[0]
            # Compute this before `answered` counts the item.  Items taken back are queued already.
            wanted = batch.done < batch.taken and not batch.withdrawn
            index = self._sched.answered(worker.index, 1)[1]
            if wanted and batch.terms.retries > 0 and batch.terms.killed + 1 < CULPRIT:
                self._again(batch, index - batch.first, killed=True)
            elif wanted:
                error = InternalError(
                    f"the pool killed worker {worker.index} (pid {worker.pid}), because it sent an "
                    f"invalid message ({type(exc).__name__}: {exc}) while it ran "
                    f"{self.describe(*batch.name(index))}, or after. Either the task, or a library "
                    "that it uses, wrote to memory or descriptors that are not its own, or this is "
                    "a bug in xpool"
                )
                error.__cause__ = exc
                self._result(batch, index, False, error)

    def lost(
        self, worker: WorkerProcess, batch: Batch, position: int, exitcode: int | None,
        not_counted: bool, beside: str, last: bool, short: bool,
    ) -> None:  # fmt: skip
        """Answer a task whose worker ended, or have it run again.

        ``not_counted``: a task in another thread of the process has caused its end.  ``beside``:
        text about the other threads, for the error.  ``last``: no worker will start any more.
        ``short``: the process ended for lack of memory, so the next try is alone.
        """
        # The signal that should stop this task, or the kill after it, has ended the worker.
        if batch.seq + position == worker.interrupted:
            self._broken_off(worker, batch, position)
            return
        killed = batch.terms.killed + (not not_counted)
        had_all = short and batch.terms.alone  # another try would not have more memory
        if batch.terms.retries > 0 and killed < CULPRIT and not last and not had_all:
            alone = short and batch.bound is None
            self._again(batch, position, killed=not not_counted, alone=alone)
            return
        if had_all:
            beside += " It ran alone: no other worker had a task."
        index = batch.first + position
        task = self.describe(*batch.name(index))
        error = WorkerDied(worker.pid, exitcode, worker.index, task, killed, beside)
        self._result(batch, index, False, error)
