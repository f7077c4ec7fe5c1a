"""``priority=``: which of the waiting tasks is next."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from support import work
from support.tiers import also
from support.waiting import Gate, eventually

from xpool import P2PPool, PoolClosed, TaskCancelled, TaskTimeout, ThreadPool
from xpool._engine.threads import HeldTask

pytestmark = pytest.mark.xpool_only


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def order(log: Path) -> list[str]:
    """Return what tasks have logged, oldest first."""
    return log.read_text().split()


class Holder:
    """Keeps the only worker of a pool busy until `let_go`."""

    def __init__(self, pool, mailbox, gate, **terms):
        self.gate = gate
        self.result = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), **terms)
        self.pid = int(mailbox.line())

    def let_go(self):
        self.gate.open()
        assert self.result.get() is None


def hold_first(path: str, box: str, gate: str, x: object) -> object:
    """Log `x`; if it is "held", wait at the gate then."""
    work.logged(path, x)
    if x == "held":
        work.post_and_gate(box, gate)
    return x


def waiting(pool) -> int:
    """Return how many tasks wait for a worker or are held by one."""
    sched = pool._engine.sched
    return sched.waiting() + sum(in_flight.size for in_flight in sched.in_flight)


def test_all_verbs(kind, make_pool, mailbox, gate, log):
    """Tasks of all verbs begin in the order of their priorities."""
    pool, path = make_pool(kind, 1), str(log)
    holder = Holder(pool, mailbox, gate)
    pairs = [(path, "starmap"), (path, "starmap")]
    results = [
        pool.apply_async(work.logged, (path, "lowest"), priority=float("-inf")),
        pool.starmap_async(work.logged, pairs, priority=-1.5),
        pool.apply_async(work.logged, (path, "0")),
        pool.starmap_async(work.logged, [(path, "map1"), (path, "map2")], 1, priority=10**30),
    ]
    streams = [
        pool.imap(partial(work.logged, path), ["imap1", "imap2"], priority=1),
        pool.imap_unordered(
            partial(work.logged, path), ["unordered1", "unordered2"], priority=Fraction(3, 2)
        ),
    ]
    results.append(pool.apply_async(work.logged, (path, "highest"), priority=float("inf")))
    holder.let_go()
    for result in results:
        result.get()
    assert [list(stream) for stream in streams] == [
        ["imap1", "imap2"],
        ["unordered1", "unordered2"],
    ]
    expected = ["highest", "map1", "map2", "unordered1", "unordered2", "imap1", "imap2", "0"]
    assert order(log) == [*expected, "starmap", "starmap", "lowest"]


def test_calls_that_wait(kind, make_pool, mailbox, gate, log):
    """`apply`, `map` and `starmap` from other threads go before what waits."""
    pool, path = make_pool(kind, 1), str(log)
    holder = Holder(pool, mailbox, gate)
    later = pool.map_async(partial(work.logged, path), ["low"] * 3, 1)
    calls = [
        lambda: pool.apply(work.logged, (path, "a"), priority=3),
        lambda: pool.map(partial(work.logged, path), ["b"], priority=2),
        lambda: pool.starmap(work.logged, [(path, "c")], priority=1),
    ]
    threads = [threading.Thread(target=call) for call in calls]
    for n, thread in enumerate(threads, 3):
        thread.start()
        eventually(lambda n=n: len(pool._jobs.unanswered) == n, "it is submitted")
    if hasattr(pool, "_engine"):
        eventually(lambda: waiting(pool) == 7, "they wait")
    else:
        eventually(lambda: len(pool._threads.tasks.higher) == 3, "they wait")
    holder.let_go()
    later.get()
    for thread in threads:
        thread.join()
    assert order(log) == ["a", "b", "c", "low", "low", "low"]


@pytest.mark.parametrize(
    ("verb", "below", "above"),
    [("map_async", {}, {"priority": 1}), ("imap_unordered", {"priority": -1}, {})],
)
def test_what_a_worker_holds_is_overtaken(kind, make_pool, mailbox, gate, log, verb, below, above):
    """A task goes before those that a worker was sent and has not begun, or has not taken; also one
    without a priority before a background job."""
    pool, path = make_pool(kind, 1), str(log)
    for _ in range(20):
        pool.apply(work.nothing)  # the worker gets several such short tasks at once
    first = partial(hold_first, path, mailbox.path, gate.path)
    low = getattr(pool, verb)(first, ["held", *range(8)], 1, **below)
    mailbox.line()
    high = [pool.apply_async(work.logged, (path, name), **above) for name in "ab"]
    lower = pool.apply_async(work.logged, (path, "lower"), priority=-2)
    if hasattr(pool, "_engine"):
        (in_flight,) = pool._engine.sched.in_flight
        eventually(lambda: in_flight.paused or in_flight.size == 1, "they are taken back")
    gate.open()
    assert [*(call.get() for call in high), lower.get()] == ["a", "b", "lower"]
    got = low.get() if verb == "map_async" else low
    assert sorted(map(str, got)) == sorted(["held", *map(str, range(8))])
    assert order(log) == ["held", "a", "b", *map(str, range(8)), "lower"]


def waiting_in(tasks):
    """Return the entries of a pool's queue for threads."""
    return [*tasks.first, *tasks.last, *(one[-1] for one in (*tasks.higher, *tasks.lower))]


def is_again(entry):
    return isinstance(entry, HeldTask) and entry.options.terms.tries > 0


def fail_first(path: str, box: str, gate: str, x: object) -> object:
    """Log a line; at the first call, post, wait at the gate and raise."""
    work.log_line(path, "ran")
    if len(order(Path(path))) == 1:
        work.post_and_gate(box, gate)
        raise OSError("not yet")
    return x


@pytest.fixture
def early_gate(tmp_path, nothing_leaks):
    barrier = Gate(tmp_path / "early-gate")
    yield barrier
    barrier.close()


@pytest.mark.parametrize("priority", [1, 0, *also(-1)])
def test_a_retry_keeps_the_priority(kind, make_pool, mailbox, early_gate, gate, log, priority):
    """A task that has failed goes before all waiting tasks of its priority, and of lower ones."""
    pool, path = make_pool(kind, 1), str(log)
    task = fail_first, (path, mailbox.path, early_gate.path, "again")
    again = pool.apply_async(*task, retries=1, retry_on=OSError, priority=priority)
    mailbox.line()  # it runs now, and fails when the next task is submitted, which holds the worker
    held = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), priority=2)
    early_gate.open()
    mailbox.line()
    low = pool.map_async(partial(work.logged, path), range(3), 1, priority=min(priority, 0))
    if hasattr(pool, "_engine"):
        later = pool._engine.sched.later
        eventually(lambda: pool.report().retries, "it has failed")
        eventually(lambda: later.next() is None, "the pause is over")
    else:
        eventually(lambda: any(map(is_again, waiting_in(pool._threads.tasks))), "the pause is over")
    gate.open()
    assert held.get() is None and again.get() == "again" and low.get() == [0, 1, 2]
    assert order(log) == ["ran", "ran", "0", "1", "2"]


def test_cancelled_tasks_of_any_priority(kind, make_pool, mailbox, gate, log):
    """Waiting tasks of several priorities are cancelled; the others run in order."""
    pool, path = make_pool(kind, 1), str(log)
    holder = Holder(pool, mailbox, gate)
    calls = [pool.apply_async(work.logged, (path, i), priority=i % 5 - 2) for i in range(40)]
    job = pool.map_async(partial(work.logged, path), ["map"] * 4, 1, priority=1)
    assert job.cancel() and all(call.cancel() for call in calls[::3])
    holder.let_go()
    for i, call in enumerate(calls):
        if i % 3:
            assert call.get() == i
        else:
            with pytest.raises(TaskCancelled):
                call.get()
    left = sorted((i for i in range(40) if i % 3), key=lambda i: -(i % 5))
    assert [*map(int, order(log))] == left


def test_a_closed_pool_runs_all(kind, make_pool, mailbox, gate, log):
    """`close` lets tasks of all priorities run."""
    pool, path = make_pool(kind, 1), str(log)
    holder = Holder(pool, mailbox, gate)
    for priority in (-1, 0, 1):
        pool.map_async(partial(work.logged, path), [priority] * 2, 1, priority=priority)
    pool.close()
    holder.let_go()
    pool.join()
    assert order(log) == ["1", "1", "0", "0", "-1", "-1"]


def test_a_terminated_pool_answers_all(kind, make_pool, mailbox, gate):
    """`terminate` answers waiting tasks of all priorities."""
    pool = make_pool(kind, 1)
    holder = Holder(pool, mailbox, gate)
    calls = [pool.apply_async(work.same, (i,), priority=i) for i in range(-2, 3)]
    pool.terminate()
    for call in calls:
        with pytest.raises(PoolClosed):
            call.get()
    gate.open()
    with pytest.raises(PoolClosed):
        holder.result.get()


def test_many_threads(kind, make_pool):
    """Tasks that many threads submit, and callbacks after them, are answered once."""
    pool, done = make_pool(kind, 2), []

    def submit(thread):
        draw = random.Random(thread)
        calls = [
            pool.apply_async(
                work.same, ((thread, i),), priority=draw.choice([0, 0, 1, -1, draw.random()]),
                callback=done.append, **draw.choice([{}, {"timeout": 60}, {"retries": 1}]),
            )
            for i in range(200)
        ]  # fmt: skip
        mapped = pool.map(work.same, range(50), priority=thread - 2)
        assert [call.get() for call in calls] == [(thread, i) for i in range(200)]
        assert mapped == [*range(50)]

    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(submit, range(5))) == [None] * 5
    assert sorted(done) == [(thread, i) for thread in range(5) for i in range(200)]


def test_a_late_task_on_the_only_thread():
    """If a task that has overtaken a map exceeds its limit, the map goes on in another thread."""
    with ThreadPool(1) as pool:
        running, go_on, release = (threading.Event() for _ in range(3))

        def wait_at(x):
            if x == 0:
                running.set()
                go_on.wait()
            return x

        job = pool.map_async(wait_at, range(5), 1)
        running.wait()
        late = pool.apply_async(release.wait, priority=1, timeout=0.05)
        go_on.set()
        with pytest.raises(TaskTimeout):
            late.get()
        assert job.get() == [*range(5)]
        release.set()


def test_tasks_of_one_worker(make_pool, mailbox, gate, log):
    """Of the tasks that are bound to a worker, the one with the highest priority is next."""
    pool, path = make_pool(P2PPool, 2), str(log)
    results = [pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), worker=1)]
    mailbox.line()
    for priority in (0, 2, -1, 1):
        args = path, priority
        results.append(pool.apply_async(work.logged, args, worker=1, priority=priority))
    assert pool.apply(work.same, (3,), worker=0, priority=-5) == 3
    gate.open()
    for result in results:
        result.get()
    assert order(log) == ["2", "1", "0", "-1"]
