"""A state machine that uses a pool in any order that hypothesis generates.

It calls every verb (values, errors, chunks), takes results, lets tasks or kills end workers, uses
several threads at once, and calls `close`, `terminate` and `join`.  If the pool has time limits and
`cancel`, it uses them, too.  The machine compares the pool with a simple model (`PoolModel`): every
submitted task must be answered once, as the model expects, within a time limit.  A pool that has
ended must leave nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NoReturn

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from xpool import errors
from xpool._pools.ctx_pools import CtxPool, CtxThreadPool
from xpool._pools.process import Pool
from xpool.testing._leaks import Snapshot
from xpool.testing._test_tasks import (
    Gate,
    Late,
    TaskError,
    in_context,
    in_time,
    perform,
    perform_pair,
)

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
    answer = Answer(what, lambda limit: _drawn(result, len(specs), limit), specs)
    answer.unordered = verb == "imap_unordered"
    return answer


def _drawn(iterator: Any, items: int, limit: float) -> list[Any]:
    """Return all values of an iterator of ``items`` results.

    If values raise errors, raise the first one at the end.  If the iterator does not end, raise the
    last one: the error of a failed job, which each further call would raise.
    """
    values: list[Any] = []
    first: Exception | None = None
    last: Exception | None = None
    for _ in range(items + 1):
        try:
            values.append(iterator.next(limit))
        except StopIteration:
            break
        except errors.TimeoutError:
            raise
        except errors.PoolClosed as exc:
            first = first or exc
            break
        except Exception as exc:
            first, last = first or exc, exc
    else:
        first = last
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
        except errors.TimeoutError as exc:
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


_THREADS = 3
_MIXED = st.lists(st.sampled_from(["value", "value", "value", "error", "large"]), max_size=9)
_CHUNK = st.integers(1, 4)
_SELDOM = st.sampled_from([False, False, False, True])  # rarely, so that few histories end early


class PoolStateMachine(RuleBasedStateMachine):
    """Rules for one pool.  `for_pool` makes a machine for any class of pools."""

    make: ClassVar[Callable[[], Any]]
    """Makes the pool."""

    deaths: ClassVar[bool] = False
    """Whether workers may be killed: they are processes, and a death loses only the task it ran."""

    gets_context: ClassVar[bool] = False
    """Whether tasks get a context before their arguments."""

    limit: ClassVar[HangLimit]

    @classmethod
    def for_pool(
        cls,
        pool: Callable[..., Any],
        *args: Any,
        deaths: bool | None = None,
        gets_context: bool | None = None,
        limit: float = 20.0,
        examples: int = 50,
        steps: int = 15,
        **options: Any,
    ) -> type[PoolStateMachine]:
        """Return a machine for ``pool(*args, **options)``.  pytest runs its ``TestCase``.

        Args:
            pool: a subclass of `xpool.BasePool`, or another callable that makes a pool with the
                same verbs.  The pool has two workers unless ``args`` or ``options`` say otherwise.
            deaths: whether workers may be killed.  None: only those of xpool's process pools.
            gets_context: whether tasks get a context first.  None: only in xpool's context pools.
            limit: seconds after which a missing answer counts as a hang.
            examples, steps: the number of histories, and the largest number of rules in each.
        """
        kind: type = pool if isinstance(pool, type) else type(None)
        if gets_context is None:
            gets_context = issubclass(kind, (CtxPool, CtxThreadPool))
        if gets_context:
            options.setdefault("worker_contexts", ["first", "second"])
        elif not args:
            options.setdefault("processes", 2)
        fields = {
            "make": staticmethod(lambda: pool(*args, **options)),
            "deaths": issubclass(kind, Pool) if deaths is None else deaths,
            "gets_context": gets_context,
            "limit": HangLimit(limit),
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
        }
        machine: Any = type(f"{getattr(pool, '__name__', 'Pool')}StateMachine", (cls,), fields)
        machine.TestCase.settings = settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            # One fault of a pool causes many failures, and hypothesis would shrink each of them.
            report_multiple_bugs=False,
            # The phase `explain` is left out: it tries many more histories, which may all hang.
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        return machine  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.before = Snapshot.take()
        self.pool = type(self).make()
        self.folder = tempfile.mkdtemp(prefix="xpool-testing-")
        self.gate = Gate(os.path.join(self.folder, "gate"))
        self.held = 0
        self.model = PoolModel(self.pool, self.limit, self.deaths)
        self.numbers = 0

    # -- helpers ---------------------------------------------------------------------------------

    def spec(self, what: str) -> Spec:
        self.numbers += 1
        if what == "held":
            self.held += 1
        return what, self.numbers, self.gate.path if what == "held" else None

    def functions(self) -> tuple[Any, Any]:
        """Return the task functions of one and of two arguments."""
        return (in_context, in_context) if self.gets_context else (perform, perform_pair)

    def submit(self, verb: str, whats: list[str], retries: int = 0, **terms: Any) -> None:
        """Submit tasks by a verb that does not wait, and record the expected answer."""
        specs = [self.spec(what) for what in whats]
        if retries and "retries" in inspect.signature(getattr(self.pool, verb)).parameters:
            terms["retries"] = retries
        answer = submit(self.pool, verb, specs, self.functions(), terms)
        self.model.owed.append(answer)

    def open_gate(self) -> None:
        """Let all held tasks continue."""
        if self.held:
            # Open it more than once for each task, because a task that runs again passes it again.
            self.gate.open(2 * self.held + 2)
            self.held = 0

    def running(self) -> bool:
        """Whether the pool accepts tasks.  This is a precondition of rules."""
        return self.model.state == "RUN"

    # -- rules: work -----------------------------------------------------------------------------

    @precondition(running)
    @rule(what=st.sampled_from(["value", "value", "error", "held", "large"]))
    def apply_async(self, what: str) -> None:
        self.submit("apply_async", [what])

    @precondition(running)
    @rule(verb=st.sampled_from(["map_async", "starmap_async"]), whats=_MIXED, chunk=_CHUNK)
    def many(self, verb: str, whats: list[str], chunk: int) -> None:
        self.submit(verb, whats, chunksize=chunk)

    @precondition(running)
    @rule(verb=st.sampled_from(["imap", "imap_unordered"]), whats=_MIXED, chunk=_CHUNK)
    def stream(self, verb: str, whats: list[str], chunk: int) -> None:
        self.submit(verb, whats, chunksize=chunk)

    @precondition(running)
    @rule(whats=st.lists(st.sampled_from(["value", "error"]), max_size=5))
    def apply(self, whats: list[str]) -> None:
        # Open the gate first, because held tasks may occupy all workers.
        self.open_gate()
        one, _ = self.functions()
        for what in whats:
            spec = self.spec(what)
            call = functools.partial(self.pool.apply, one, (spec,))
            self.model.check(Answer("apply", functools.partial(applied, call), [spec]))

    @precondition(running)
    @rule(verb=st.sampled_from(["map", "starmap"]), n=st.integers(0, 8))
    def map(self, verb: str, n: int) -> None:
        self.open_gate()
        one, two = self.functions()
        specs = [self.spec("value") for _ in range(n)]
        if verb == "map":
            call = functools.partial(self.pool.map, one, specs)
        else:
            call = functools.partial(self.pool.starmap, two, [(spec[1], spec) for spec in specs])
        self.model.check(Answer(verb, functools.partial(in_time, call), specs))

    @precondition(running)
    @rule(whats=st.lists(st.sampled_from(["value", "error"]), min_size=_THREADS, max_size=9))
    def several_threads(self, whats: list[str]) -> None:
        """Let several threads submit tasks at once, and get their answers."""
        self.open_gate()
        shares = [[self.spec(what) for what in whats[i::_THREADS]] for i in range(_THREADS)]

        def work(specs: list[Spec]) -> None:
            answers = [
                submit(self.pool, "apply_async", [spec], self.functions(), {}) for spec in specs
            ]
            for answer in answers:
                self.model.check(answer)

        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(work, shares))  # raises the first error

    @precondition(lambda self: self.model.owed)
    @rule(which=st.integers(0, 5))
    def take(self, which: int) -> None:
        self.open_gate()
        self.model.check(self.model.owed.pop(which % len(self.model.owed)))

    # -- rules: trouble --------------------------------------------------------------------------

    @precondition(lambda self: self.running() and self.deaths)
    @rule(
        what=st.sampled_from([*DEATHS, "unpicklable"]),
        verb=st.sampled_from(["apply_async", "map_async", "imap", "imap_unordered"]),
        others=st.integers(0, 4),
        retries=st.integers(0, 1),
    )
    def saboteur(self, what: str, verb: str, others: int, retries: int) -> None:
        """Submit a task that ends its worker, alone or among other tasks of a map."""
        whats = [what] if verb == "apply_async" else ["value"] * others + [what, "value"]
        self.submit(verb, whats, retries)

    @precondition(lambda self: self.running() and self.deaths)
    @rule(victim=st.integers(0, 1))
    def kill(self, victim: int) -> None:
        """Kill a worker, in any state."""
        # Hypothesis replays histories, so `victim` must not depend on the pids, which vary.
        pids = self.pool.statistics()["pids"]
        pid = pids[victim % len(pids)]
        if pid is not None:  # else the process has ended, and has no replacement yet
            self.model.kills += 1
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                self.model.kills -= 1  # the worker's own task has ended it already

    @precondition(lambda self: self.running() and self.deaths and _takes(self.pool, "timeout"))
    @rule(what=st.sampled_from(["hang", "spin"]))
    def timeout(self, what: str) -> None:
        """Submit an endless task with a time limit."""
        self.submit("apply_async", [what], timeout=0.05)
        self.model.owed[-1].times_out = True

    @precondition(lambda self: any(hasattr(a.result, "cancel") for a in self.model.owed))
    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        """Cancel a result, whose task may be waiting, running or finished."""
        answers = [a for a in self.model.owed if hasattr(a.result, "cancel")]
        answer = answers[which % len(answers)]
        answer.asked = True
        if answer.result.cancel():
            answer.cancelled = True

    # -- rules: the end --------------------------------------------------------------------------

    @precondition(lambda self: self.model.state == "RUN")
    @rule()
    def join_too_early(self) -> None:
        """Check that `join` raises while the pool runs."""
        try:
            self.pool.join()
        except ValueError:
            return
        raise AssertionError("join() of a running pool raised no ValueError")

    @precondition(lambda self: self.model.state != "RUN")
    @rule()
    def submit_too_late(self) -> None:
        """Check that a closed pool accepts no more tasks."""
        one, _ = self.functions()
        try:
            self.pool.apply_async(one, (("value", 0, None),))
        except ValueError:
            return
        raise AssertionError(f"apply_async() after {self.model.state} raised no ValueError")

    @rule(really=_SELDOM)
    def close(self, really: bool = True) -> None:
        if not really:
            return
        self.ends("close", self.pool.close)
        if self.model.state == "RUN":
            self.model.state = "CLOSE"

    @rule(really=_SELDOM)
    def terminate(self, really: bool) -> None:
        if not really:
            return
        self.open_gate()
        self.ends("terminate", self.pool.terminate)
        self.model.state = "TERMINATE"

    @precondition(lambda self: self.model.state != "RUN")
    @rule(threads=st.integers(1, _THREADS))
    def join(self, threads: int) -> None:
        self.open_gate()
        self.ends("join", self.pool.join, threads)

    def ends(self, what: str, act: Callable[[], Any], threads: int = 1) -> None:
        """Call ``act`` in new threads, and check that it returns within the limit."""
        try:
            in_time(act, self.limit.seconds, threads)
        except Late:
            self.limit.hangs(f"{what}() does not return", self.pool)

    def teardown(self) -> None:
        """Get all expected answers, end the pool, and check for leaks."""
        try:
            if self.model.state == "RUN":
                self.close()
            self.open_gate()
            while self.model.owed:
                self.model.check(self.model.owed.pop(0))
            self.join(1)
        except BaseException:
            self.open_gate()
            with contextlib.suppress(Late):  # the first error is the one to report
                in_time(self.pool.terminate, self.limit.seconds)
            raise
        finally:
            self.gate.close()
            shutil.rmtree(self.folder)
        # Objects that the pool keeps while it exists are not leaks, so drop the pool.
        del self.pool, self.model
        left = self.before.leaks(5.0, r"xpool-\d+-callbacks.*")
        assert not left, "left over by the pool:\n  " + "\n  ".join(left)


def _takes(pool: Any, name: str) -> bool:
    return name in inspect.signature(pool.apply_async).parameters
