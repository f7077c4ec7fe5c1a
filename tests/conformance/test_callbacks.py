"""Callbacks and error callbacks of every asynchronous verb."""

from __future__ import annotations

import logging
import sys
import threading

import pytest
from support import work
from support.limits import WAIT
from support.waiting import eventually

CALLS = {
    "apply_async": ((work.square, (3,)), 9),
    "map_async": ((work.square, [1, 2, 3]), [1, 4, 9]),
    "starmap_async": ((work.add, [(1, 2), (3, 4)]), [3, 7]),
}
FAILING = {
    "apply_async": (work.fail, ("x",)),
    "map_async": (work.fail, ["x"] * 3),
    "starmap_async": (work.fail, [("x",)] * 3),
}


@pytest.mark.parametrize("given", ["both", "callback", "error_callback"])
@pytest.mark.parametrize("verb", CALLS)
def test_callbacks(pool, verb, given):
    """When `wait` returns, the callback or the error callback has run once, with the result or the
    exception. Each may be given without the other."""
    arguments, expected = CALLS[verb]
    good: list[object] = []
    bad: list[object] = []
    options = {"callback": good.append, "error_callback": bad.append}
    if given != "both":
        options = {given: options[given]}
    result = getattr(pool, verb)(*arguments, **options)
    result.wait()
    assert good == ([expected] if "callback" in options else []) and bad == []
    assert result.get() == expected
    good.clear()
    result = getattr(pool, verb)(*FAILING[verb], **options)
    result.wait()
    assert good == [] and len(bad) == ("error_callback" in options)
    assert all(isinstance(error, KeyError) and error.args == ("x",) for error in bad)
    with pytest.raises(KeyError):
        result.get()


@pytest.mark.xpool_only
def test_callback_of_an_empty_map(pool):
    """A map without items calls its callback, with an empty list."""
    got: list[object] = []
    pool.map_async(work.square, [], callback=got.append).wait()
    assert got == [[]]


def test_callbacks_by_position(pool):
    """The callbacks have the same positions as in the standard library."""
    got: list[object] = []
    pool.apply_async(work.add, (1,), {"b": 2}, got.append, got.append).wait()
    pool.map_async(work.square, [2], None, got.append, got.append).wait()
    pool.starmap_async(work.add, [(1, 1)], 1, got.append, got.append).wait()
    assert got == [3, [4], [2]]


@pytest.fixture
def reports(monkeypatch, caplog):
    """A function that returns exceptions which have reached an exception hook or the log since."""
    caught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(args.exc_value))
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, tb: caught.append(value))
    monkeypatch.setattr(sys, "unraisablehook", lambda args: caught.append(args.exc_value))
    caplog.set_level(logging.WARNING)

    def look():
        found = [*caught, *(r for r in caplog.records if r.levelno >= logging.WARNING)]
        caught.clear()
        caplog.clear()
        return found

    return look


def _boom(_):
    raise RuntimeError("the callback's own fault")


@pytest.mark.xpool_only
@pytest.mark.parametrize("verb", CALLS)
def test_callback_that_raises(pool, verb, reports):
    """An exception of a callback is reported. This result or error and later results still
    arrive."""
    arguments, expected = CALLS[verb]
    assert getattr(pool, verb)(*arguments, callback=_boom).get() == expected
    eventually(reports, "a report of the callback's exception")
    with pytest.raises(KeyError):
        getattr(pool, verb)(*FAILING[verb], error_callback=_boom).get()
    eventually(reports, "a report of the error callback's exception")
    assert pool.map(work.square, range(10)) == [i * i for i in range(10)]


@pytest.mark.xpool_only
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_callback_that_exits(pool, error, reports):
    """A callback that raises SystemExit does not stop the pool."""

    def leave(_):
        raise error

    assert pool.apply_async(work.square, (2,), callback=leave).get() == 4
    assert pool.apply_async(work.square, (3,)).get() == 9


@pytest.mark.xpool_only
def test_callbacks_may_wait_for_more_work(pool):
    """A callback may submit tasks to its own pool and wait for their results."""
    got: list[object] = []
    done = threading.Event()

    def more(value):
        got.append(pool.apply(work.square, (value,)))
        got.append(pool.map(work.square, [1, 2]))
        done.set()

    assert pool.apply_async(work.square, (2,), callback=more).get(WAIT) == 4
    assert done.wait(WAIT)
    assert got == [16, [1, 4]]


@pytest.mark.xpool_only
def test_slow_callback_does_not_delay_other_results(pool):
    """While a callback waits, results of other calls arrive."""
    hold = threading.Event()
    inside = threading.Event()

    def wait(_):
        inside.set()
        hold.wait(WAIT)

    slow = pool.apply_async(work.square, (2,), callback=wait)
    try:
        assert inside.wait(WAIT)
        assert pool.apply_async(work.square, (3,)).get(WAIT) == 9
    finally:
        hold.set()
    assert slow.get(WAIT) == 4


@pytest.mark.xpool_only
@pytest.mark.parametrize("name", ["callback", "error_callback"])
def test_callback_that_cannot_be_called(pool, name):
    """A callback that is not callable raises a TypeError that names it."""
    with pytest.raises(TypeError, match=name):
        pool.apply_async(work.square, (2,), **{name: 3})


def test_close_and_join_wait_for_callbacks(kind, make_pool):
    """When `join` returns after `close`, all callbacks have run."""
    got: list[int] = []
    pool = make_pool(kind, 2)
    for i in range(200):
        pool.apply_async(work.same, (i,), callback=got.append)
    pool.close()
    pool.join()
    assert sorted(got) == list(range(200))


def test_threads_callback_gets_the_very_object(pool, kind):
    """In a thread pool, `get` and the callback receive the object that the task returned."""
    got: list[object] = []
    thing = object() if not kind.processes else ["copy"]
    result = pool.apply_async(work.same, (thing,), callback=got.append)
    assert result.get() is got[0]
    assert (got[0] is thing) is not kind.processes
