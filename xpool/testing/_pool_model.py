"""The model with which `PoolStateMachine` compares a pool, and the answers that it expects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from xpool import errors
from xpool.errors import TimeoutError as PoolTimeout
from xpool.testing._saboteurs import TaskError

Spec = tuple[str, int, "str | None"]


class Answer:
    """An expected answer: how to get it, and its possible values."""

    def __init__(self, what: str, get: Callable[[float], Any], specs: list[Spec]) -> None:
        self.what = what
        self.get = get
        self.specs = specs
        self.result: Any = None  # the pool's result, if it can be cancelled
        self.called: list[Any] | None = None  # the arguments with which callbacks were called
        self.unordered = False
        self.asked = False  # whether `cancel` was called
        self.cancelled = False  # whether `cancel` returned True
        self.times_out = False

    @property
    def kinds(self) -> set[str]:
        return {spec[0] for spec in self.specs}


class Late(PoolTimeout):
    """A call has not returned within the limit."""


def in_time(act: Callable[[], Any], limit: float, threads: int = 1) -> Any:
    """Call ``act()`` in new threads and return a result.  Raise `Late` after ``limit`` seconds."""
    done: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            done.append((True, act()))
        except BaseException as exc:
            done.append((False, exc))

    working = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    end = time.monotonic() + limit
    for thread in working:
        thread.start()
    for thread in working:
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            raise Late
    for ok, value in done:
        if not ok:
            raise value
    return done[0][1]


def applied(call: Callable[[], Any], limit: float) -> list[Any]:
    return [in_time(call, limit)]


def value_of(spec: Spec) -> Any:
    what, number, _ = spec
    return bytes([number % 251]) * 300_000 if what == "large" else number


def submit(
    pool: Any, verb: str, specs: list[Spec], functions: tuple[Any, Any], terms: dict[str, Any]
) -> Answer:
    """Submit tasks by a verb that returns at once.  Return the expected answer."""
    one, two = functions
    what = f"{verb} of {[spec[:2] for spec in specs]}"
    if verb == "apply_async":
        called: list[Any] = []
        result = pool.apply_async(
            one, (specs[0],), callback=called.append, error_callback=called.append, **terms
        )
        answer = Answer(what, lambda limit: [result.get(limit)], specs)
        answer.result, answer.called = result, called
        return answer
    if verb == "starmap_async":
        result = pool.starmap_async(two, [(spec[1], spec) for spec in specs], **terms)
    else:
        result = getattr(pool, verb)(one, specs, **terms)
    if verb in ("map_async", "starmap_async"):
        answer = Answer(what, result.get, specs)
        answer.result = result
        return answer
    answer = Answer(what, lambda limit: _drawn(result, limit), specs)
    answer.unordered = verb == "imap_unordered"
    return answer


def _drawn(iterator: Any, limit: float) -> list[Any]:
    """Return all values of an iterator.  If values raise errors, raise the first one at the end."""
    values: list[Any] = []
    first: Exception | None = None
    while True:
        try:
            values.append(iterator.next(limit))
        except StopIteration:
            break
        except PoolTimeout:
            raise
        except errors.PoolClosed as exc:
            first = first or exc
            break
        except Exception as exc:
            first = first or exc
    if first is not None:
        raise first
    return values


DEATHS = ("os._exit", "SIGKILL")
"""The kinds of tasks that end their worker."""

_GOOD = {"value", "held", "large"}


class HangLimit:
    """How long an answer may take before it counts as a hang, in all histories of a machine."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.slowest = 0.0  # seconds of the slowest answer in all histories

    def hangs(self, what: str, pool: object) -> NoReturn:
        """Raise the error that ``what`` has not happened within the limit."""
        seconds = self.seconds
        # Lower the limit, because hypothesis now tries hundreds of shorter histories that may hang.
        self.seconds = min(seconds, max(0.25, 10 * self.slowest))
        raise AssertionError(f"{what} within {seconds:g} s; {pool!r}") from None


class PoolModel:
    """The expected answers of one pool, and its state.

    ``deaths``: whether the pool's workers are processes.
    """

    def __init__(self, pool: object, limit: HangLimit, deaths: bool) -> None:
        self.state = "RUN"
        self.owed: list[Answer] = []
        self.kills = 0  # number of workers that the machine has killed
        self._lost = 0  # number of lost tasks that did not end their worker themselves
        self._pool, self._limit, self._deaths = pool, limit, deaths

    def check(self, answer: Answer) -> None:
        """Get an answer and compare it with the expected one."""
        start = time.monotonic()
        try:
            value = answer.get(self._limit.seconds)
        except PoolTimeout as exc:
            # `TaskTimeout` is a TimeoutError, too, but it is an answer: the task took too long.
            if not isinstance(exc, errors.TaskTimeout):
                self._limit.hangs(f"{answer.what} is not answered", self._pool)
            self._check_error(answer, exc)
            return
        except BaseException as exc:
            self._check_error(answer, exc)
            found: list[object] | None = None
        else:
            found = value
            expected = [value_of(spec) for spec in answer.specs]
            assert not answer.cancelled, f"{answer.what} was cancelled, and gave {value!r:.80}"
            assert not (answer.kinds - _GOOD), f"{answer.what} gave {value!r:.80}, and must fail"
            assert not answer.times_out, f"{answer.what} gave {value!r:.80}, after its limit"
            if answer.unordered:  # sorted by repr, because numbers and bytes cannot be compared
                value, expected = sorted(value, key=repr), sorted(expected, key=repr)
            assert value == expected, f"{answer.what} gave {value!r:.80}, not {expected!r:.80}"
        self._limit.slowest = max(self._limit.slowest, time.monotonic() - start)
        if answer.called is not None:
            calls = len(answer.called)
            # Answers that `terminate` gives call no callbacks.
            ended = self.state == "TERMINATE"
            assert calls == 1 or (ended and not calls), f"{calls} callbacks of {answer.what}"
            if calls:
                assert found is None or answer.called[0] == found[0]

    def _check_error(self, answer: Answer, exc: BaseException) -> None:
        """Check that an error comes from a task of the answer, or that the machine caused it."""
        ends = (errors.TaskCancelled, errors.PoolClosed)
        assert not answer.cancelled or isinstance(exc, ends), (
            f"{answer.what} was cancelled, and raised {exc!r}"
        )
        if isinstance(exc, TaskError):
            numbers = [spec[1] for spec in answer.specs if spec[0] == "error"]
            assert exc.args[0] in numbers, f"{answer.what} raised the error of another: {exc!r}"
        elif isinstance(exc, errors.TaskTimeout):
            assert answer.times_out, f"{answer.what} ended with {exc!r}, without a limit"
        elif isinstance(exc, errors.WorkerDied):
            if not answer.kinds & set(DEATHS):
                self._lost += 1
                assert self._lost <= self.kills, (
                    f"{answer.what} was lost: {exc!r}; {self.kills} workers were killed, and "
                    f"{self._lost} tasks that did not end them are lost"
                )
        elif isinstance(exc, errors.PoolClosed):
            assert self.state == "TERMINATE", f"{answer.what}: {exc!r}, but the pool is not ended"
        elif isinstance(exc, errors.TaskCancelled):
            assert answer.asked, f"{answer.what} is cancelled, and nobody did it"
            assert answer.cancelled, f"{answer.what} is cancelled, and cancel() said it is not"
        elif "unpicklable" in answer.kinds and self._deaths:
            assert isinstance(exc, errors.ResultNotPicklable), f"{answer.what} raised {exc!r}"
        else:
            raise AssertionError(f"{answer.what} raised {exc!r}") from exc
