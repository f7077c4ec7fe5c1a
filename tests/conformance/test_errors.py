"""Exceptions of tasks, and objects that cannot be pickled."""

from __future__ import annotations

import dataclasses
import gc
import io
import multiprocessing.pool
import sys
import threading
import traceback
import weakref
from typing import Any

import pytest
from support import work
from support.kinds import STDLIB
from support.waiting import drained

from xpool import Pool, PoolClosed


def test_the_workers_traceback_is_the_cause(process_kind, make_pool):
    """The cause of the exception shows the worker's traceback."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(KeyError) as caught:
        pool.apply(work.fail, ("key",))
    assert isinstance(caught.value.__cause__, multiprocessing.pool.RemoteTraceback)  # type: ignore[attr-defined]
    assert "raise KeyError(x)" in str(caught.value.__cause__)
    assert caught.value.__cause__.tb == str(caught.value.__cause__)
    text = "".join(traceback.format_exception(caught.value))
    assert "raise KeyError(x)" in text and "work.py" in text
    screen, sys.stderr = sys.stderr, io.StringIO()
    try:
        sys.__excepthook__(KeyError, caught.value, caught.value.__traceback__)
        assert "raise KeyError(x)" in sys.stderr.getvalue()
    finally:
        sys.stderr = screen


@pytest.mark.xpool_only
def test_a_cause_of_its_own_is_not_lost(process_kind, make_pool):
    """After ``raise ... from ...`` in a task, the worker's traceback shows both errors."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(ValueError, match="outer") as caught:
        pool.apply(work.raise_from)
    text = str(caught.value.__cause__)
    assert "KeyError: 'inner'" in text and "ValueError: outer" in text


def test_thread_pools_raise_the_very_exception(thread_kind, make_pool):
    """A thread pool raises the task's exception object itself, and does not change its cause. It
    pickles nothing, so locks and lambdas are accepted."""
    error = ValueError("mine")

    def raise_it():
        raise error

    pool, lock = make_pool(thread_kind, 1), threading.Lock()
    with pytest.raises(ValueError, match="mine") as caught:
        pool.apply(raise_it)
    assert caught.value is error and caught.value.__cause__ is None
    assert pool.apply(work.same, (lock,)) is pool.apply(lambda: lock) is lock


@pytest.mark.xpool_only
@pytest.mark.parametrize("error", [work.BaseFault, KeyboardInterrupt, GeneratorExit])
def test_base_exceptions_of_a_task(pool, error):
    """An exception that is not a subclass of `Exception` also reaches the caller."""
    for call in (
        lambda: pool.apply(work.raise_it, (error("task"),)),
        lambda: pool.map(work.raise_it, [error("task"), error("task")], 2),
        lambda: next(pool.imap(work.raise_it, [error("task")])),
    ):
        with pytest.raises(error, match="task"):
            call()
    assert pool.apply(work.square, (2,)) == 4


@pytest.mark.xpool_only
def test_exceptions_that_do_not_unpickle(process_kind, make_pool):
    """If an exception cannot be unpickled, the error still names it. The pool stays usable."""
    pool = make_pool(process_kind, 2)
    for _ in range(5):
        with pytest.raises(work.Awkward, match="^awkward 1 2$") as caught:
            pool.apply(work.raise_awkward)
        assert "raise_awkward" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(Exception, match="awkward"):
        pool.map(work.raise_awkward, range(4), 1)
    assert pool.map(work.square, range(4)) == [0, 1, 4, 9]


class LacksMemoryOnce:
    """A function whose first unpickling raises."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __call__(self, x: int) -> int:
        return abs(x)

    def __reduce__(self) -> Any:
        return load_function, (self.flag,)


def load_function(flag: str) -> Any:
    if work.first(flag):
        raise MemoryError("for the moment")
    return abs


@pytest.mark.xpool_only
def test_a_function_that_cannot_be_unpickled_for_the_moment(process_kind, make_pool, tmp_path):
    """Only the task that lacks memory fails: the next one of the same call gets the function."""
    pool = make_pool(process_kind, 1)
    func: Any = LacksMemoryOnce(str(tmp_path / "flag"))
    failed, *others = pool.map(func, [-1, -2, -3], 1, on_error="return")
    assert type(failed) is MemoryError and others == [2, 3]


class NeitherTrueNorFalse(Exception):
    def __bool__(self):
        raise RuntimeError("neither")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


@pytest.mark.xpool_only
@pytest.mark.parametrize("error", [NeitherTrueNorFalse("text"), Frozen(3)])
def test_exceptions_of_odd_classes(process_kind, make_pool, error):
    """They arrive, also if Python cannot format them, or if they take no attributes."""

    def fail():
        raise error

    pool = make_pool(process_kind, 1)
    with pytest.raises(type(error)) as caught:
        pool.apply(fail)
    assert caught.value.args == error.args and "in fail" in str(caught.value.__cause__)
    assert pool.apply(work.square, (2,)) == 4


def test_exceptions_that_do_not_pickle(process_kind, make_pool):
    """If an exception cannot be pickled, the caller gets its text. The pool stays usable."""
    pool = make_pool(process_kind, 1)
    with pytest.raises((multiprocessing.pool.MaybeEncodingError, work.HasLock)) as caught:  # type: ignore[attr-defined]
        pool.apply(work.raise_with_lock)
    if not STDLIB:
        assert type(caught.value) is work.HasLock and caught.value.args == ("locked",)
    assert pool.apply(work.square, (2,)) == 4


def test_results_that_do_not_pickle(process_kind, make_pool):
    """A result that cannot be pickled raises MaybeEncodingError. The worker survives twenty of
    them."""
    pool = make_pool(process_kind, 1)
    worker = pool.apply(work.pid)
    for _ in range(20):
        bad: list[BaseException] = []
        result = pool.apply_async(work.unpicklable, error_callback=bad.append)
        with pytest.raises(multiprocessing.pool.MaybeEncodingError) as caught:  # type: ignore[attr-defined]
            result.get()
        assert isinstance(bad[0], multiprocessing.pool.MaybeEncodingError)  # type: ignore[attr-defined]
        assert "lock" in str(caught.value) and caught.value.exc and caught.value.value
        if not STDLIB:
            from xpool import ResultNotPicklable, XPoolError

            assert isinstance(caught.value, ResultNotPicklable)
            assert isinstance(caught.value, XPoolError)
    assert pool.apply(work.pid) == worker


def test_one_bad_result_among_good_ones(process_kind, make_pool):
    """A result that cannot be pickled fails its own task only."""
    pool = make_pool(process_kind, 2)
    results = [
        pool.apply_async(work.unpicklable if i % 5 == 0 else work.same, (i,)) for i in range(30)
    ]
    for i, result in enumerate(results):
        if i % 5 == 0:
            with pytest.raises(multiprocessing.pool.MaybeEncodingError):  # type: ignore[attr-defined]
                result.get()
        else:
            assert result.get() == i


class _Refuses:
    def __reduce__(self):
        raise RuntimeError("cannot pickle this")


@pytest.mark.parametrize("verb", ["apply", "apply_async", "map", "map_async", "starmap"])
def test_arguments_that_do_not_pickle(process_kind, make_pool, verb):
    """An exception of an argument's `__reduce__` reaches the caller. The pool stays usable."""
    pool = make_pool(process_kind, 1)
    bad = _Refuses()
    arguments = (bad,) if verb.startswith("apply") else [(bad,)] * 10
    with pytest.raises(RuntimeError, match="cannot pickle this") as caught:
        result = getattr(pool, verb)(work.same, arguments)
        result.get()
    chain = "".join(traceback.format_exception(caught.value))
    place = "as argument 0 of same()" if verb.startswith("apply") else "in an item, at [0]"
    assert STDLIB or f"by _Refuses.__reduce__ {place}" in chain
    assert pool.apply(work.square, (2,)) == 4


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_lazy_arguments_that_do_not_pickle(process_kind, make_pool, verb):
    """With `imap`, only the item that cannot be pickled fails."""
    pool = make_pool(process_kind, 1)
    good, errors = drained(getattr(pool, verb)(work.same, [1, _Refuses(), 2]))
    assert sorted(good) == [1, 2] and len(errors) == 1
    assert "cannot pickle this" in "".join(traceback.format_exception(errors[0]))


@pytest.mark.xpool_only
def test_task_not_picklable_says_what_to_do(process_kind, make_pool):
    """TaskNotPicklable is a PicklingError, and names the object that could not be pickled."""
    import pickle

    from xpool import TaskNotPicklable

    pool = make_pool(process_kind, 1)
    with pytest.raises(TaskNotPicklable) as caught:
        pool.apply(work.same, (threading.Lock(),))
    assert isinstance(caught.value, pickle.PicklingError)
    assert "lock" in str(caught.value)


@pytest.mark.xpool_only
def test_errors_pickle_with_their_fields():
    """All errors of xpool keep their fields when they are pickled."""
    import pickle

    import xpool

    died = pickle.loads(pickle.dumps(xpool.WorkerDied(12, -9, 1, "task f")))
    assert (died.pid, died.exitcode, died.worker, died.task) == (12, -9, 1, "task f")
    assert died.signal == "SIGKILL" and "SIGKILL" in str(died)
    failed = pickle.loads(pickle.dumps(xpool.WorkerStartFailed(0, 3, "no")))
    assert (failed.worker, failed.attempts, failed.reason) == (0, 3, "no")
    sent = pickle.loads(pickle.dumps(xpool.ResultNotPicklable("exc", "value")))
    assert sent.exc == repr("exc") or sent.exc == "exc"
    broken = pickle.loads(pickle.dumps(xpool.PoolBroken(7, 1.5, "worker 0")))
    assert (broken.deaths, broken.seconds, broken.last) == (7, 1.5, "worker 0")
    late = pickle.loads(pickle.dumps(xpool.TaskTimeout(0.5, 1, 12, "task f", "  here")))
    assert (late.seconds, late.worker, late.pid) == (0.5, 1, 12)
    assert (late.task, late.stack) == ("task f", "  here") and "  here" in str(late)
    assert late.stopped and "was stopped" in str(late)
    thread = pickle.loads(pickle.dumps(xpool.TaskTimeout(0.5, 1, 12, "task f", stopped=False)))
    assert not thread.stopped and "was stopped" not in str(thread) and "runs on" in str(thread)
    assert died.killed == 1 and "one after the other" not in str(died)
    again = pickle.loads(pickle.dumps(xpool.WorkerDied(12, -9, 1, "task f", 3)))
    assert again.killed == 3 and "killed 3 workers" in str(again)
    for name in ("PoolClosed", "TaskNotPicklable", "TaskCancelled", "InternalError"):
        error = pickle.loads(pickle.dumps(getattr(xpool, name)("why")))
        assert type(error).__name__ == name and "why" in str(error)


@pytest.mark.xpool_only
@pytest.mark.parametrize("chunksize", [1, 4])
def test_stop_iteration_of_a_result_being_unpickled(process_kind, make_pool, chunksize):
    """If unpickling a result raises StopIteration, the map fails. It does not end early."""
    pool = make_pool(process_kind, 1)
    with pytest.raises(StopIteration):
        pool.map(work.make_stops_when_unpickled, range(8), chunksize)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(pool.imap(work.make_stops_when_unpickled, range(8), chunksize))
        pytest.fail("the loop ended without an error")


@pytest.mark.xpool_only
@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes and groups came with Python 3.11")
@pytest.mark.parametrize(
    "call",
    [
        lambda pool, func: pool.apply(func, (1,)),
        lambda pool, func: pool.starmap(func, [(1,)]),
        lambda pool, func: next(pool.imap(func, [1])),
    ],
    ids=["apply", "starmap", "imap"],
)
def test_notes_and_groups_arrive_whole(pool, call):
    """An exception group keeps its class, notes, exceptions and causes."""

    class Failures(ExceptionGroup):  # noqa: F821
        def __new__(cls, errors, code):
            self = super().__new__(Failures, f"code {code}", errors)
            self.code = code
            return self

        def derive(self, excs):
            return Failures(excs, self.code)

    class OfTheTask(Exception):
        pass

    def fail(x):
        inner, other = OfTheTask(x), TypeError(x)
        try:
            raise inner from OSError("the cause")
        except OfTheTask:
            inner.add_note("a note of the inner")  # type: ignore[attr-defined]
        try:
            try:
                raise KeyError("the context")
            except KeyError:
                raise other
        except TypeError:
            pass
        nested = ExceptionGroup("nested", [inner, ValueError(x)])  # noqa: F821
        group = Failures([nested, other], 7)
        group.add_note("a note of the outer")
        raise group from RuntimeError("the cause of all")

    with pytest.raises(Exception) as caught:
        call(pool, fail)
    error: Any = caught.value
    assert (error.code, error.message) == (7, "code 7")
    assert error.__notes__[0] == "a note of the outer"
    nested, other = error.exceptions
    assert type(nested) is ExceptionGroup and type(other) is TypeError  # noqa: F821
    assert [type(one).__name__ for one in nested.exceptions] == ["OfTheTask", "ValueError"]
    assert nested.exceptions[0].__notes__ == ["a note of the inner"]
    part = error.subgroup(lambda one: isinstance(one, ValueError))
    assert type(part) is type(error) and part.code == 7 and len(part.exceptions) == 1
    shown = "".join(traceback.format_exception(error))
    for text in (
        "the cause\n",
        "the context",
        "a note of the inner",
        "the cause of all",
        "in fail",
    ):
        assert text in shown


@pytest.mark.xpool_only
@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes and groups came with Python 3.11")
def test_groups_that_are_returned(pool):
    """With ``on_error="return"``, a group keeps its notes and exceptions too."""

    def fail(x):
        group = ExceptionGroup("group", [ValueError(x), KeyError(x)])  # noqa: F821
        group.add_note(f"of task {x}")
        raise group

    found = pool.map(fail, range(3), on_error="return")
    found += pool.imap(fail, range(3, 6), on_error="return")
    for n, error in enumerate(found):
        assert error.__notes__ == [f"of task {n}", f"item {n % 3} of {fail.__qualname__}(): {n}"]
        assert error.message == "group"
        assert [one.args for one in error.exceptions] == [(n,), (n,)]


class Box:
    """An argument to which there can be weak references."""


boxes: list[Any] = []


def fail_with(box):
    boxes.append(weakref.ref(box))
    raise ValueError


def living():
    return [ref() is not None for ref in boxes]


@pytest.mark.xpool_only
def test_a_worker_frees_the_arguments_of_a_task_that_has_raised(make_pool):
    """Nothing in the worker refers to the error, so no garbage collection is needed."""
    pool = make_pool(Pool, 1, initializer=gc.disable)
    for _ in range(2):
        with pytest.raises(ValueError):
            pool.apply(fail_with, (Box(),))
    assert pool.apply(living) == [False, False]


@pytest.mark.xpool_only
def test_a_call_that_the_pool_does_not_take_counts_for_nothing(kind, make_pool):
    """If the pool ends while a call is prepared, the call was never submitted."""
    pool = make_pool(kind, 1)

    class Closing:
        @property
        def __name__(self):
            pool.close()
            return "closing"

        def __call__(self):
            raise AssertionError

    with pytest.raises(PoolClosed):
        pool.apply_async(Closing())
    with pytest.raises(PoolClosed):
        pool.map_async(Closing(), [1])
    counts = pool.statistics()
    assert (counts["submitted"], counts["failed"], counts["jobs"]) == (0, 0, 0)
