"""If workers cannot start, the pool stops soon and gives the reason."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import types

import pytest
from support import work
from support.kinds import STDLIB
from support.limits import WAIT

from xpool import Pool, PoolClosed, WorkerStartFailed, XPoolError

from .after_faults import story

pytestmark = pytest.mark.xpool_only


def start_failure(make_pool, kind, *args, **kwds):
    """Use a pool that cannot start. Return its WorkerStartFailed."""
    try:
        pool = make_pool(kind, *args, **kwds)
        pool.apply_async(work.square, (3,)).get(WAIT)
    except WorkerStartFailed as error:
        return error
    except PoolClosed as error:
        assert isinstance(error.__cause__, WorkerStartFailed), story(error)
        return error.__cause__
    return pytest.fail("the task was answered")


def test_initializers_that_fail_in_many_threads(thread_kind, make_pool):
    """Three failures in a row stop a thread pool, even if each is in another thread."""
    together, calls, over = threading.Barrier(3), itertools.count(), threading.Event()

    def fail():
        if next(calls) < 3:
            together.wait(WAIT)
        else:
            over.wait(WAIT)
        raise RuntimeError("sabotage")

    try:
        error = start_failure(make_pool, thread_kind, 3, fail)
    finally:
        over.set()
    assert error.attempts == 3 and isinstance(error.__cause__, RuntimeError)


def fail_and_stay() -> None:
    """Fail, but let the end of the process take long."""
    atexit.register(time.sleep, 3600)
    raise ValueError("no device")


def test_initializer_that_fails_in_a_worker_that_does_not_end(make_pool):
    """`initializer_timeout` ends the worker, and the initializer's own error is the reason."""
    told = ""
    for seconds in (0.2, 2, 20):  # on a busy machine, the initializer may not begin in the first
        pool = make_pool(Pool, 1, fail_and_stay, initializer_timeout=seconds)
        with pytest.raises((WorkerStartFailed, PoolClosed)) as caught:
            pool.apply(abs, (-1,))
        told = story(caught.value)
        if "no device" in told:
            return
        assert "ran longer than its limit" in told
    pytest.fail(told)


ABSENT = """
KEPT = []
RATE = 1
def initialise(): KEPT.append(1)
def task(): return RATE, KEPT
class Box: pass
"""


def test_code_of_a_module_that_the_child_does_not_have(process_kind, make_pool):
    """An initializer or a task of a module that the worker cannot import is sent by value, with its
    globals."""
    module = types.ModuleType("xpool_test_absent")
    exec(ABSENT, module.__dict__)
    sys.modules["xpool_test_absent"] = module
    try:
        pool = make_pool(process_kind, 1, None if STDLIB else module.initialise)
        if STDLIB:
            with pytest.raises(Exception, match="xpool_test_absent"):
                pool.apply(module.task)
        else:
            vars(module)["RATE"] = 2
            assert pool.apply(module.task) == (2, [1])
            assert type(pool.apply(module.Box)) is module.Box
    finally:
        del sys.modules["xpool_test_absent"]
    assert pool.apply(work.square, (3,)) == 9


@pytest.mark.parametrize("stage", ["__setstate__", "__str__"])
def test_initializer_whose_exception_blocks_in_the_parent(process_kind, make_pool, gate, stage):
    """If the exception's own code blocks, only the thread that asks for the error waits. The pool
    stops and can be joined."""
    away = work.Away(os.getpid(), stage, "block")
    pool = make_pool(process_kind, 1, work.gated_raise, (gate.path, away))
    result = pool.apply_async(work.square, (3,))
    gate.open(64)
    found: list[WorkerStartFailed] = []

    def ask() -> None:
        with pytest.raises(WorkerStartFailed) as caught:
            result.get(WAIT)
        str(caught.value.__cause__)
        found.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        assert work.Away.entered.wait(WAIT)
        assert result.ready() and pool.state.name == "TERMINATE"
        assert pool.statistics()["jobs"] == 0
        pool.terminate()
        pool.join()
        assert not found
    finally:
        work.Away.released.set()
        asking.join()
        work.Away.entered.clear()
        work.Away.released.clear()
    assert found[0].reason == "Away: its text" and isinstance(found[0].__cause__, work.Away)


@pytest.mark.parametrize("stage", ["__setstate__", "__str__"])
def test_initializer_whose_exception_raises_in_the_parent_only(
    process_kind, make_pool, gate, stage
):
    """If the exception's code raises in the parent, the error has the text from the worker."""
    away = work.Away(os.getpid(), stage, "raise")
    pool = make_pool(process_kind, 1, work.gated_raise, (gate.path, away))
    bad: list[BaseException] = []
    results = [pool.apply_async(work.square, (i,), error_callback=bad.append) for i in range(2)]
    lazily = pool.imap(work.square, range(3))
    mapped = pool.map_async(work.square, range(3))
    gate.open(64)
    for get in (*(result.get for result in results), mapped.get, lambda _: next(lazily)):
        with pytest.raises(WorkerStartFailed) as caught:
            get(40)
        assert caught.value.reason == "Away: its text"
        cause = caught.value.__cause__
        assert type(cause) is (ZeroDivisionError if stage == "__setstate__" else work.Away)
    assert len(bad) == 2 and bad[0] is not bad[1]
    with pytest.raises(PoolClosed, match="its text") as closed:
        pool.apply(work.square, (3,))
    assert isinstance(closed.value.__cause__, WorkerStartFailed)


def test_initializer_whose_exception_has_no_text(process_kind, make_pool):
    """If the exception's text cannot be made, the reason names its class."""
    away = work.Away(0, "nowhere", "raise", everywhere=True)
    error = start_failure(make_pool, process_kind, 1, work.raise_it, (away,))
    assert error.reason == "Away, whose text cannot be made (ZeroDivisionError)"
    assert isinstance(error.__cause__, work.Away)


def test_initargs_that_do_not_pickle(process_kind, make_pool):
    """Initargs that cannot be pickled raise an error in the constructor or from the first task."""
    with pytest.raises(XPoolError) as caught:
        pool = make_pool(process_kind, 1, work.remember, (threading.Lock(),))
        pool.apply_async(work.square, (3,)).get(WAIT)
    assert "lock" in story(caught.value)


def test_initargs_that_do_not_unpickle(process_kind, make_pool):
    """If the worker cannot unpickle the initargs, the pool stops with the reason."""
    error = start_failure(
        make_pool, process_kind, 1, work.remember, (work.EndsWhenUnpickled("raise"),)
    )
    assert "sabotage" in story(error)
