"""Tasks that run too long: stopped, answered with the stack, and nobody else is harmed."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time

import pytest
from support import work
from support.limits import WAIT
from support.waiting import eventually, wait_gone

from .test_saboteurs import check_usable, story

pytestmark = pytest.mark.xpool_only

LIMIT = 1.0  # a worker that has to import what it runs does so within it
STUCK = {"counts": work.count_up, "stubborn": work.count_up_stubbornly, "in C": work.spin_in_c}


def stopped(result, seconds=LIMIT):
    """Wait for a result that must be a TaskTimeout; return the error."""
    from xpool import TaskTimeout

    with pytest.raises(TaskTimeout) as caught:
        result.get(WAIT)
    assert caught.value.seconds == seconds
    return caught.value


# What becomes of the task, its worker, and the others --------------------------------------------


@pytest.mark.parametrize("how", STUCK)
def test_a_stuck_task_is_stopped(process_kind, make_pool, how, log, mailbox, gate):
    """It gets TaskTimeout with the stack; each other task is done once; all slots work."""
    pool = make_pool(process_kind, 2)
    before = [pool.apply_async(work.logged, (str(log), i)) for i in range(20)]
    victim = pool.apply_async(STUCK[how], timeout=LIMIT)
    after = [pool.apply_async(work.logged, (str(log), i)) for i in range(20, 40)]
    error = stopped(victim)
    assert STUCK[how].__name__ in error.stack
    assert error.stack.startswith(f'  File "{work.__file__}"'), error.stack  # the user's frame
    assert STUCK[how].__name__ in error.task and error.stack in str(error)
    assert 0 <= error.worker < 2 and error.pid not in (None, os.getpid())
    assert [r.get(WAIT) for r in before + after] == list(range(40))
    assert sorted(map(int, log.read_text().split())) == list(range(40))
    check_usable(pool, mailbox, gate, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("how", ["counts", "in C"])
def test_other_start_methods(make_pool, method, how):
    """The same with the other start methods."""
    from xpool import Pool

    pool = make_pool(Pool, 1, context=method)
    assert STUCK[how].__name__ in stopped(pool.apply_async(STUCK[how], timeout=LIMIT)).stack
    assert pool.apply(work.square, (3,)) == 9


def test_a_task_that_ends_when_asked_keeps_its_worker(process_kind, make_pool, log):
    """Its `finally` has run, and the worker goes on."""
    pool = make_pool(process_kind, 1)
    pid = pool.apply(work.pid)
    assert stopped(pool.apply_async(work.count_up, (str(log),), timeout=LIMIT)).pid == pid
    assert log.read_text() == "cleaned\n"
    assert pool.apply(work.pid) == pid


def alarmed(seconds):
    """Return whether the handler of an alarm is called while this makes calls on a pool."""
    from xpool import ThreadPool

    came = []
    signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    with ThreadPool(1) as pool:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        end = time.monotonic() + WAIT
        while not came and time.monotonic() < end:
            pool.apply(work.nothing)
    return bool(came)


def test_a_fork_is_as_free_to_raise_as_any_worker(make_pool, log):
    """Its stack goes on with frames of its parent that must not be cut short: these do not count,
    for a task that is stopped, and for handlers of the program's."""
    from xpool import Pool

    pool = make_pool(Pool, 1, context="fork", maxtasksperchild=2)
    # The second process is forked by the engine's thread, the first by the one that makes the pool.
    # From Python 3.13 on, a child that another than the main thread has forked does not notice
    # signals while it computes, so there is no `finally` there.
    for _ in range(2 if sys.version_info < (3, 13) else 1):
        pid = pool.apply(work.pid)
        assert stopped(pool.apply_async(work.count_up, (str(log),), timeout=LIMIT)).pid == pid
        assert log.read_text() == "cleaned\n"
        log.unlink()
    with Pool(1, context="fork") as forks:
        assert forks.map(alarmed, [i / 1000 for i in range(1, 30)]) == [True] * 29


@pytest.mark.parametrize("runnable", [True, False])
def test_a_worker_that_waits_for_a_processor_is_not_killed(
    make_pool, monkeypatch, mailbox, gate, runnable
):
    """It could not even clean up; one that has nothing to wait for is killed."""
    from xpool import Pool
    from xpool._engine import start_limit, worker

    asked = threading.Semaphore(0)

    def processor(pid):
        asked.release()
        return 0.0, 0.0, runnable  # as of one that has been put aside since it was asked

    monkeypatch.setattr(start_limit, "STARVED_SECONDS", WAIT)
    for module in start_limit, worker:
        monkeypatch.setattr(module, "processor_times", processor)
    pool = make_pool(Pool, 1)
    pid = pool.apply(work.pid)
    result = pool.apply_async(work.leave_slowly, (mailbox.path, gate.path), timeout=LIMIT)
    mailbox.lines(1)
    for _ in range(2):  # when it is asked, and when its time is over
        assert asked.acquire(timeout=WAIT)
    if runnable:
        gate.open()
    stopped(result)
    assert (pool.apply(work.pid) == pid) is runnable


def test_how_long_a_worker_has_run(make_pool, mailbox, gate):
    """The system says so of a worker's main thread, and whether it is at a processor or in line."""
    from xpool import Pool
    from xpool._engine.worker import processor_times

    pool = make_pool(Pool, 1)
    pool.apply(work.pid)
    (slot,) = pool._engine.workers
    eventually(lambda: not processor_times(slot.pid)[2], "it sleeps")
    spinning = pool.apply_async(work.post_and_spin, (mailbox.path,))
    mailbox.lines(1)
    ran, waited, _ = processor_times(slot.pid)
    eventually(lambda: processor_times(slot.pid)[2], "it runs, or waits for a processor")
    eventually(lambda: processor_times(slot.pid)[0] > ran, "it has run for longer")
    assert processor_times(slot.pid)[1] >= waited
    spinning.cancel()


@pytest.mark.parametrize("how", ["stubborn", "in C"])
def test_a_task_that_does_not_end_is_killed(process_kind, make_pool, how):
    """Its worker is gone, and another has its slot."""
    pool = make_pool(process_kind, 1)
    error = stopped(pool.apply_async(STUCK[how], timeout=LIMIT))
    assert wait_gone([error.pid]) == []
    assert pool.apply(work.pid) != error.pid and pool.apply(work.who)[0] == error.worker


@pytest.mark.exhaustive
def test_the_books_are_kept_whole(process_kind, make_pool, log):
    """`TaskStopped` is not raised in a function that must not be cut short, but right after it."""
    pool = make_pool(process_kind, 1)
    for _ in range(6):
        stopped(pool.apply_async(work.keep_books, (str(log),), timeout=0.5), 0.5)
    said = log.read_text().split("\n")  # a slow machine may have killed it first
    assert said.pop() == "" and set(said) == {"whole"}


@pytest.mark.usefixtures("plugin")
def test_an_import_is_not_cut_short(process_kind, make_pool, mailbox, gate):
    """It is let through, or its worker killed: no later task meets half a module."""
    pool = make_pool(process_kind, 1)
    result = pool.apply_async(work.import_plugin, timeout=LIMIT)
    mailbox.line()
    error = stopped(result)
    assert "plugin.py" in error.stack and "preload" in str(error)
    assert wait_gone([error.pid]) == []
    gate.open(1)
    assert pool.apply(work.import_plugin) == ["plugin"]
    mailbox.line()


@pytest.mark.usefixtures("plugin")
def test_an_import_that_ends_in_time(process_kind, make_pool, mailbox, gate):
    """The task is stopped behind it."""
    pool = make_pool(process_kind, 1)
    result = pool.apply_async(work.import_plugin)
    mailbox.line()
    assert result.cancel()
    gate.open(2)  # one for a worker that is killed before it gets there
    assert pool.apply(work.import_plugin) == ["plugin"]


def test_a_stopped_process(process_kind, make_pool, mailbox):
    """A worker that SIGSTOP holds cannot say where it is; it is killed all the same."""
    pool = make_pool(process_kind, 1)
    error = stopped(pool.apply_async(work.stop_self, (mailbox.path,), timeout=1), 1)
    assert error.pid == int(mailbox.line()) and wait_gone([error.pid]) == []
    assert pool.apply(work.square, (3,)) == 9


def test_time_in_the_queue_does_not_count(process_kind, make_pool, mailbox, gate):
    """The clock starts when a worker begins the task."""
    pool = make_pool(process_kind, 1)
    held = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
    mailbox.line()
    waiting = pool.apply_async(work.square, (3,), timeout=LIMIT)
    waiting.wait(2 * LIMIT)
    assert not waiting.ready()
    gate.open(1)
    assert waiting.get(WAIT) == 9 and held.get(WAIT) is None


@pytest.mark.exhaustive
def test_one_limit_for_each_item_of_a_chunk(process_kind, make_pool):
    """A chunk takes longer than the limit, each of its items does not: all is well."""
    pool = make_pool(process_kind, 1)
    slow = functools.partial(work.slow_square, 0.1)
    assert pool.map(slow, range(12), 12, timeout=1) == [i * i for i in range(12)]
    assert list(pool.imap(slow, range(12), 12, timeout=1)) == [i * i for i in range(12)]


@pytest.mark.parametrize("chunksize", [1, 4])
def test_one_bad_item_of_a_map(process_kind, make_pool, chunksize, log):
    """A map with an item that is stuck fails with TaskTimeout when all others are done."""
    pool = make_pool(process_kind, 2)
    error = stopped(pool.map_async(work.spin_on_three, range(40), chunksize, timeout=LIMIT))
    assert "spin_on" in error.stack and ("chunk 0" if chunksize == 4 else "item 3") in error.task
    assert pool.map(work.square, range(10), timeout=LIMIT) == [i * i for i in range(10)]


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_one_bad_item_of_a_lazy_map(process_kind, make_pool, verb):
    """A lazy map raises TaskTimeout for the item, and yields all others."""
    from xpool import TaskTimeout

    pool = make_pool(process_kind, 2)
    results = getattr(pool, verb)(work.spin_on_three, range(200), timeout=LIMIT)
    good, bad = [], 0
    while True:
        try:
            good.append(next(results))
        except TaskTimeout:
            bad += 1
        except StopIteration:
            break
    assert sorted(good) == [i for i in range(200) if i != 3] and bad == 1
    assert verb == "imap_unordered" or good == sorted(good)


def test_many_stuck_tasks(process_kind, make_pool, log):
    """Stuck tasks among others, in one stream: each ends once, as it must."""
    from xpool import TaskTimeout

    pool = make_pool(process_kind, 2)
    results = [
        pool.apply_async(
            work.spin_in_c if i % 8 == 0 else work.logged, (str(log), i), timeout=LIMIT
        )
        for i in range(32)
    ]
    for i, result in enumerate(results):
        if i % 8 == 0:
            with pytest.raises(TaskTimeout):
                result.get(WAIT)
        else:
            assert result.get(WAIT) == i
    assert sorted(map(int, log.read_text().split())) == [i for i in range(32) if i % 8]


@pytest.mark.exhaustive
def test_at_the_limit(process_kind, make_pool):
    """Tasks that take just about as long as they may end once each: in time, or stopped."""
    from xpool import TaskTimeout

    pool = make_pool(process_kind, 2)
    answers: collections.Counter[int] = collections.Counter()
    results = [
        pool.apply_async(
            work.slow_square,
            (0.02 + 0.0002 * (i % 10 - 5), i),
            callback=lambda _, i=i: answers.update([i]),
            error_callback=lambda _, i=i: answers.update([i]),
            timeout=0.02,
        )
        for i in range(200)
    ]
    late = 0
    for i, result in enumerate(results):
        try:
            assert result.get(WAIT) == i * i
        except TaskTimeout as error:
            late += 1
            assert error.seconds == 0.02
    assert late > 0
    assert answers == dict.fromkeys(range(200), 1)
    assert pool.map(work.square, range(10)) == [i * i for i in range(10)]


def test_the_default_of_the_pool(process_kind, make_pool):
    """`task_timeout=` holds for all verbs, unless they say otherwise."""
    pool = make_pool(process_kind, 1, task_timeout=LIMIT)
    stopped(pool.apply_async(work.count_up))
    stopped(pool.map_async(work.spin_on_three, range(5), 1))
    stopped(pool.apply_async(work.count_up, timeout=0.5), 0.5)
    assert pool.apply(work.slow_square, (2 * LIMIT, 3), timeout=math.inf) == 9
    assert pool.apply(work.square, (3,)) == 9


@pytest.mark.exhaustive
def test_a_limit_after_close(process_kind, make_pool):
    """`close` and `join` end although a task is stuck: it has a limit."""
    pool = make_pool(process_kind, 2)
    results = [pool.apply_async(f, timeout=LIMIT) for f in STUCK.values()]
    pool.close()
    pool.join()
    for result in results:
        stopped(result)


@pytest.mark.parametrize("how", STUCK)
def test_terminate_while_a_task_is_being_stopped(process_kind, make_pool, mailbox, how):
    """`terminate` does not wait for the grace, and everything is answered."""
    from xpool import XPoolError

    pool = make_pool(process_kind, 2)
    results = [pool.apply_async(STUCK[how], timeout=0.05) for _ in range(4)]
    results[0].wait(0.1)
    pool.terminate()
    pool.join()
    for result in results:
        with pytest.raises(XPoolError):
            result.get(0)


def test_killed_while_it_is_asked(process_kind, make_pool, tmp_path):
    """A worker that somebody kills in its grace: the task has its TaskTimeout, once."""
    pool = make_pool(process_kind, 1)
    for i in range(5):
        pid = pool.apply(work.pid)
        asked = tmp_path / str(i)
        result = pool.apply_async(work.count_up_stubbornly, (str(asked),), timeout=0.1)
        eventually(lambda path=asked, its=result: path.exists() or its.ready(), "it is asked", WAIT)
        if not result.ready():
            with contextlib.suppress(ProcessLookupError):  # its grace is over in this moment
                os.kill(pid, signal.SIGKILL)
        error = stopped(result, 0.1)
        assert error.pid == pid
        assert pool.apply(work.square, (3,)) == 9


def test_results_larger_than_a_pipe_are_not_too_late(process_kind, make_pool):
    """Sending the answer does not count: the task has ended."""
    pool = make_pool(process_kind, 2)
    assert [len(x) for x in pool.map(work.large, [20_000_000] * 4, 1, timeout=30)] == [
        20_000_000
    ] * 4


def test_tasks_behind_a_stuck_one_bound_to_a_worker(make_pool, log):
    """What is bound to the worker of a stuck task is done there, by its successor."""
    from xpool import P2PPool

    pool = make_pool(P2PPool, 2)
    victim = pool.apply_async(work.spin_in_c, worker=1, timeout=LIMIT)
    behind = [pool.apply_async(work.who, worker=1, timeout=30) for _ in range(10)]
    assert stopped(victim).worker == 1
    assert {r.get(WAIT)[0] for r in behind} == {1}


# Threads -----------------------------------------------------------------------------------------


def test_a_thread_is_left_to_itself(thread_kind, make_pool, mailbox, gate):
    """Its task is answered with the stack; another thread has its place; its result is dropped."""
    pool = make_pool(thread_kind, 1)
    error = stopped(pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), timeout=LIMIT))
    mailbox.line()
    assert "pass_gate" in error.stack.split("\n")[0]
    assert "backend.py" not in error.stack and "hooks.py" not in error.stack
    assert error.worker == 0 and error.pid == os.getpid()
    assert pool.apply(work.square, (3,), timeout=30) == 9
    assert not error.stopped and "runs on" in str(error) and "was stopped" not in str(error)
    old = [t for t in threading.enumerate() if t.name.endswith("-worker-0")]
    assert len(old) == 2
    gate.open(1)
    eventually(lambda: sum(t.is_alive() for t in old) == 1, "the thread left alone has ended")
    assert pool.apply(work.square, (3,)) == 9
    assert pool.statistics()["succeeded"] == 2


def test_a_thread_that_waits_for_another_pool(thread_kind, make_pool, gate):
    """Where it is inside xpool is part of where it is."""
    inner = make_pool(thread_kind, 1).apply_async(work.pass_gate, (gate.path,))
    error = stopped(make_pool(thread_kind, 1).apply_async(inner.get, timeout=LIMIT))
    assert "in wait" in error.stack.split("\n")[0] and "in get" in error.stack


@pytest.mark.exhaustive
def test_an_item_of_a_map_in_threads(thread_kind, make_pool, gate):
    """One limit for each item, and the late answer of a chunk is not counted twice."""
    from xpool import TaskTimeout

    pool = make_pool(thread_kind, 1)
    slow = functools.partial(work.slow_square, 0.1)
    assert pool.map(slow, range(12), 12, timeout=1) == [i * i for i in range(12)]
    with pytest.raises(TaskTimeout, match="chunk 1"):
        pool.map(functools.partial(pass_gate_at, gate.path, 3), range(6), 2, timeout=LIMIT)
    results = pool.imap(functools.partial(pass_gate_at, gate.path, 3), range(6), timeout=LIMIT)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TaskTimeout):
        next(results)
    assert list(results) == [4, 5]


def pass_gate_at(gate, bad, x):
    if x == bad:
        work.pass_gate(gate)
    return x


# Initializers and join ---------------------------------------------------------------------------


def test_a_worker_that_starts_and_waits_for_a_processor_says_where_it_is(make_pool, monkeypatch):
    """It is not killed before it could, however long the system has it wait."""
    from xpool import Pool, WorkerStartFailed
    from xpool._engine import start_limit, worker

    monkeypatch.setattr(start_limit, "STARVED_SECONDS", WAIT)
    monkeypatch.setattr(start_limit, "STOP_GRACE_SECONDS", 0.001)  # no time at all
    for module in start_limit, worker:  # it is in line
        monkeypatch.setattr(module, "processor_times", lambda pid: (0.0, 0.0, True))
    pool = make_pool(Pool, 1, work.count_up, initializer_timeout=LIMIT)
    with pytest.raises(WorkerStartFailed) as caught:
        pool.apply_async(work.square, (3,)).get(WAIT)
    assert "count_up" in story(caught.value)


def test_an_initializer_that_does_not_end(process_kind, make_pool, log):
    """It is killed and tried again, then the pool stops and says where it was."""
    from xpool import TaskTimeout, WorkerStartFailed

    pool = make_pool(process_kind, 1, work.count_up, (str(log),), initializer_timeout=LIMIT)
    with pytest.raises(WorkerStartFailed) as caught:
        pool.apply_async(work.square, (3,)).get(WAIT)
    error = caught.value
    assert "count_up" in story(error) and error.attempts >= 2
    assert isinstance(error.__cause__, TaskTimeout) and error.__cause__.seconds == LIMIT


def test_an_initializer_that_does_not_end_at_first(process_kind, make_pool, tmp_path):
    """A start that hangs once is tried again, and the pool works."""
    pool = make_pool(
        process_kind, 1, work.spin_once, (str(tmp_path / "flag"),), initializer_timeout=LIMIT
    )
    assert pool.apply_async(work.square, (3,)).get(WAIT) == 9


def test_an_initializer_that_is_quick_enough(process_kind, make_pool):
    """The limit is for the start alone: tasks may take longer."""
    pool = make_pool(process_kind, 1, work.remember, (3,), initializer_timeout=30)
    assert pool.apply(work.recall) == [(3,)]


@pytest.mark.exhaustive
def test_an_initializer_that_does_not_end_in_threads(thread_kind, make_pool, gate):
    """The same in threads, which are left to themselves."""
    from xpool import TaskTimeout, WorkerStartFailed

    pool = make_pool(thread_kind, 1, work.pass_gate, (gate.path,), initializer_timeout=LIMIT)
    with pytest.raises(WorkerStartFailed, match="pass_gate") as caught:
        pool.apply_async(work.square, (3,)).get(WAIT)
    assert isinstance(caught.value.__cause__, TaskTimeout)


def test_join_with_a_limit(pool_of_its_own, mailbox, gate):
    """`join(timeout)` raises TimeoutError while workers work; the next `join` may succeed."""
    from xpool import TimeoutError

    pool = pool_of_its_own
    held = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, 3))
    mailbox.line()
    pool.close()
    with pytest.raises(TimeoutError, match="terminate"):
        pool.join(0.05)
    with pytest.raises(TimeoutError):
        pool.join(timeout=0)
    gate.open(1)
    pool.join(WAIT)
    assert held.get(0) == 3


@pytest.fixture
def pool_of_its_own(kind, make_pool):
    return make_pool(kind, 2)
