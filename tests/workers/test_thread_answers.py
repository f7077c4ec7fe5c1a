"""Threads deliver the results of their tasks without waiting for each other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest
from support.limits import WAIT

from xpool import ThreadPool
from xpool._calls.results import PickledResult
from xpool._calls.streams import IMapIterator, Stream
from xpool.errors import WorkerDied

pytestmark = pytest.mark.xpool_only

deliver = Stream.deliver


class Pause:
    """The first delivery to a stream waits for `go_on`. Then it raises ``error``, if set."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Pause:
    """Pause the first delivery of the test."""
    one = Pause()

    def pause_once(self: Stream, index: int, ok: bool, value: object) -> bool:
        if not one.reached.is_set():
            one.reached.set()
            one.go_on.wait()
            if one.error is not None:
                raise one.error
        return deliver(self, index, ok, value)

    monkeypatch.setattr(Stream, "deliver", pause_once)
    return one


def test_a_thread_runs_tasks_while_another_delivers(pause: Pause) -> None:
    """While a thread delivers a result, the other thread runs all other tasks."""
    begun: SimpleQueue[int] = SimpleQueue()

    def task(n: int) -> int:
        begun.put(n)
        return -n

    with ThreadPool(2) as pool:
        try:
            results = pool.imap(task, range(100))
            assert sorted(begun.get(timeout=WAIT) for _ in range(100)) == list(range(100))
            assert pause.reached.is_set()
        finally:
            pause.go_on.set()
        assert list(results) == [-n for n in range(100)]


def test_a_dropped_result_that_waits_for_another(pause: Pause) -> None:
    """The finalizer of a dropped result may wait for another result of the pool."""
    begun: SimpleQueue[int] = SimpleQueue()
    got: SimpleQueue[int] = SimpleQueue()

    class Waits:
        def __del__(self) -> None:
            got.put(pool.apply_async(abs, (-1,)).get(timeout=WAIT))

    def task(n: int) -> Waits:
        begun.put(n)
        return Waits()

    with ThreadPool(2) as pool:
        try:
            results = pool.imap(task, range(2))
            # The thread that does not deliver has left its result before it begins this task.
            last = pool.apply_async(begun.put, (2,))
            assert sorted(begun.get(timeout=WAIT) for _ in range(3)) == [0, 1, 2]
            del results
        finally:
            pause.go_on.set()
        assert [got.get(timeout=WAIT) for _ in range(2)] == [1, 1]
        last.get(timeout=WAIT)


def test_a_delivery_that_raises_leaves_the_other_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thread's delivery raises, the other thread still delivers the other results."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    failed = threading.Event()

    def fail_once(self: Stream, index: int, ok: bool, value: object) -> bool:
        if index == 0 and not failed.is_set():
            failed.set()
            raise MemoryError
        return deliver(self, index, ok, value)

    monkeypatch.setattr(Stream, "deliver", fail_once)
    with ThreadPool(2) as pool:
        results = pool.imap_unordered(int.__neg__, range(100))
        assert sorted(results.next(timeout=WAIT) for _ in range(99)) == list(range(-99, 0))
        assert failed.is_set()
        results.cancel()


def test_a_delivery_that_raises_delivers_what_others_left(
    pause: Pause, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a delivery raises, it still delivers the results that other threads left to it."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    begun: SimpleQueue[int] = SimpleQueue()
    arrived = threading.Event()
    pause.error = MemoryError()

    def task(n: int) -> int:
        begun.put(n)
        return -n

    def last() -> bool:
        begun.put(2)  # the thread that does not deliver has left its result
        return arrived.wait(WAIT)

    with ThreadPool(2) as pool:
        results = pool.imap_unordered(task, range(2))
        try:
            assert sorted(begun.get(timeout=WAIT) for _ in range(2)) == [0, 1]
            end = pool.apply_async(last)
            assert begun.get(timeout=WAIT) == 2
            pause.go_on.set()
            assert results.next(timeout=WAIT) in (0, -1)
        finally:
            pause.go_on.set()  # otherwise the pool's end waits for the paused thread
            arrived.set()
        assert end.get(timeout=WAIT)
        results.cancel()


def test_an_item_that_exits_names_its_function() -> None:
    """The error of an item that calls `sys.exit` names the function of the map."""

    def leave(n: int) -> None:
        sys.exit(n)

    with ThreadPool(1) as pool:
        with pytest.raises(WorkerDied, match="leave") as caught:
            pool.map(leave, [3])
        assert caught.value.exitcode == 3
        with pytest.raises(WorkerDied, match="exit code 247") as caught:
            pool.map(leave, [-9])  # as the end of a process with this number
        assert caught.value.exitcode == 247


def test_a_call_in_a_full_stack_leaves_nothing_behind() -> None:
    """A call that fails because the stack is full is not submitted, and the pool goes on."""

    def call(depth: int) -> object:
        return call(depth - 1) if depth else pool.apply_async(abs, (-1,))

    refused = 0
    with ThreadPool(2) as pool:
        for depth in range(sys.getrecursionlimit() - 100, sys.getrecursionlimit()):
            try:
                call(depth)
            except RecursionError:
                refused += 1
        assert refused > 0
        assert pool.map(abs, [-1, -2]) == [1, 2]
        pool.close()
        pool.join()
        counts = pool.statistics()
    assert counts["submitted"] == counts["succeeded"] == 100 - refused + 2
    assert counts["jobs"] == 0


def test_a_dropped_value_of_a_future_may_use_the_pool() -> None:
    """The thread that completes a dropped future holds no lock when the value is finalized."""
    answers: SimpleQueue[object] = SimpleQueue()

    class Value:
        def __del__(self) -> None:
            answers.put(pool.submit(abs, -5).result())

    with ThreadPool(2) as pool:
        for _ in range(20):
            pool.submit(Value)
            assert answers.get(timeout=WAIT) == 5


def test_the_thread_of_a_task_completes_its_future() -> None:
    """`Future.set_result` is called by the thread that ran the task."""
    with ThreadPool(1) as pool:
        name = pool.submit(lambda: threading.current_thread().name).result()
        callers: SimpleQueue[str] = SimpleQueue()
        go_on = threading.Event()
        future = pool.submit(go_on.wait)
        notify = future._condition.notify_all

        def notify_all() -> None:
            callers.put(threading.current_thread().name)
            notify()

        future._condition.notify_all = notify_all  # type: ignore[method-assign]
        go_on.set()
        assert callers.get(timeout=WAIT) == name


class _Arrived(dict[int, object]):
    """The answers of an iterator; before one is looked for, and after one is stored, it calls."""

    before_look: Callable[[], object] | None = None
    after_store: Callable[[], object] | None = None

    def __contains__(self, place: object) -> bool:
        call, self.before_look = self.before_look, None
        if call is not None:
            call()
        return super().__contains__(place)

    def __setitem__(self, place: int, answer: object) -> None:
        super().__setitem__(place, answer)
        call, self.after_store = self.after_store, None
        if call is not None:
            call()


class _Values(PickledResult):
    """The answer of several tasks."""

    nbytes = 1

    def __init__(self, *values: int) -> None:
        self.values, self.count = values, len(values)

    def open(self) -> list[int]:
        return [*self.values]


@pytest.mark.pure
def test_consumers_of_one_iterator_at_the_same_time() -> None:
    """A consumer that waits is woken, and sees what is there, while another takes an answer."""
    results: IMapIterator[int] = IMapIterator("task", object(), False)
    arrived = results._arrived = _Arrived()  # type: ignore[assignment]

    # Another takes the first of three values before the thread that delivers looks who waits.
    arrived.after_store = results.next
    waiter = threading.Lock()
    waiter.acquire()
    with results._waiters.listening(waiter):
        results.arrive(0, True, _Values(0, 1, 2), 0, 1)
        assert not waiter.locked()
    assert [results.next(), results.next()] == [1, 2]

    # While a consumer looks for an answer, the next one arrives, and another takes the former.
    def take() -> None:
        results.arrive(4, True, 4, 4, 1)
        assert results.next() == 3

    results.arrive(3, True, _Values(3), 3, 1)
    arrived.before_look = take
    assert results._movable()
