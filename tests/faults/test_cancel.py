"""Cancelling: a job gets TaskCancelled at once, and its running tasks are stopped."""

from __future__ import annotations

import random
import threading

import pytest
from support import work
from support.limits import WAIT
from support.tiers import also
from support.waiting import eventually

from xpool import TaskCancelled

from .after_faults import check_usable
from .test_time_limits import STUCK

pytestmark = pytest.mark.xpool_only


def cancelled(result):
    """Check that the result raises TaskCancelled at once. Return whether it failed."""
    with pytest.raises(TaskCancelled):
        result.get(0)
    return not result.successful()


@pytest.mark.parametrize("how", ["stubborn", *also("counts", "in C")])
def test_a_running_task(process_kind, make_pool, how, log, mailbox, gate):
    """A stuck task is stopped. The tasks behind it are done, and all workers are usable."""
    pool = make_pool(process_kind, 2)
    victims = [pool.apply_async(STUCK[how]) for _ in range(2)]
    rest = [pool.apply_async(work.logged, (str(log), i)) for i in range(20)]
    assert all(victim.cancel() for victim in victims)
    assert all(cancelled(victim) for victim in victims)
    assert [r.get(WAIT) for r in rest] == list(range(20))
    assert sorted(map(int, log.read_text().split())) == list(range(20))
    check_usable(pool, mailbox, gate, 2)


@pytest.mark.usefixtures("patient")
def test_a_task_that_ends_when_asked_keeps_its_worker(process_kind, make_pool, log, mailbox):
    """The task's `finally` runs, and its worker stays alive."""
    pool = make_pool(process_kind, 1)
    pid = pool.apply(work.pid)
    victim = pool.apply_async(work.count_up, (str(log), mailbox.path))
    mailbox.line()
    assert victim.cancel() and cancelled(victim)
    assert pool.apply(work.pid) == pid
    assert log.read_text() == "cleaned\n"


def test_a_finished_task(pool):
    """A finished task cannot be cancelled and keeps its result or error."""
    result = pool.apply_async(work.square, (3,))
    result.wait(WAIT)
    assert not result.cancel() and not result.cancel() and result.get() == 9
    failed = pool.apply_async(work.fail)
    failed.wait(WAIT)
    assert not failed.cancel()
    with pytest.raises(KeyError):
        failed.get()


def test_a_cancelled_job(kind, make_pool, mailbox, gate):
    """`cancel` wakes a thread that waits in `get`, and the error callback runs once. A second
    `cancel` returns true too, and `close` and `join` do not wait for the job."""
    pool = make_pool(kind, 1)
    good, bad, caught = [], [], []
    victim = pool.apply_async(
        work.post_and_gate, (mailbox.path, gate.path), callback=good.append,
        error_callback=bad.append,
    )  # fmt: skip
    mailbox.line()

    def wait():
        with pytest.raises(TaskCancelled) as error:
            victim.get(WAIT)
        caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert victim.cancel() and victim.cancel()
    thread.join()
    pool.close()
    pool.join(WAIT)
    assert cancelled(victim)
    assert len(caught) == 1 and not good and [type(one) for one in bad] == [TaskCancelled]


def test_a_map(kind, make_pool, mailbox, gate):
    """The map's waiting tasks never run, its running tasks are stopped, and other maps continue."""
    pool = make_pool(kind, 2)
    mapped = pool.starmap_async(
        work.post_and_gate, [(mailbox.path, gate.path, i) for i in range(50)], 1
    )
    other = pool.map_async(work.square, range(50), 1)
    mailbox.lines(2)
    assert mapped.cancel() and cancelled(mapped)
    assert other.get(WAIT) == [i * i for i in range(50)]
    assert mailbox.empty()


@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_a_lazy_map(kind, make_pool, verb, mailbox, gate):
    """`next` raises TaskCancelled after the earlier results. The input is not drawn any further."""
    pool = make_pool(kind, 1)
    drawn = []

    def numbers():
        while True:
            drawn.append(len(drawn))
            yield (mailbox.path, gate.path)

    def drawing():
        return any(thread.name.endswith("-input_reader") for thread in threading.enumerate())

    results = getattr(pool, verb)(work_at_gate, numbers())
    mailbox.line()
    gate.open(1)
    assert next(results) == "passed"
    mailbox.line()
    assert drawing() and results.cancel()
    for _ in range(2):
        with pytest.raises(TaskCancelled):
            next(results)
    assert results.cancel()
    eventually(lambda: not drawing(), "the thread that draws the input has ended")
    assert pool.apply(work.square, (3,)) == 9


def work_at_gate(paths):
    work.post_and_gate(*paths)
    return "passed"


def test_at_random_moments(kind, make_pool):
    """Jobs cancelled at random moments from another thread each get one answer. If `cancel`
    returned true, the answer is TaskCancelled."""
    pool = make_pool(kind, 2)
    draw = random.Random(7)
    answers = []
    for _ in range(30):
        results = [
            pool.apply_async(work.square, (i,), callback=answers.append,
                             error_callback=answers.append)
            for i in range(20)
        ]  # fmt: skip
        order = draw.sample(range(20), 20)
        said: dict[int, bool] = {}
        thread = threading.Thread(
            target=lambda order=order, results=results, said=said: [
                said.setdefault(i, results[i].cancel()) for i in order
            ]
        )
        thread.start()
        ended = {}
        for i, result in enumerate(results):
            try:
                assert result.get(WAIT) == i * i
                ended[i] = False
            except TaskCancelled:
                ended[i] = True
        thread.join()
        assert said == ended
    assert len(answers) == 600
    assert pool.map(work.square, range(10)) == [i * i for i in range(10)]


def test_after_terminate(kind, make_pool, mailbox, gate):
    """A result that `terminate` has answered cannot be cancelled."""
    pool = make_pool(kind, 1)
    victim = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
    mailbox.line()
    pool.terminate()
    assert not victim.cancel()


def test_a_task_that_waits_for_its_next_try(kind, make_pool, log):
    """A task that waits for its next try can be cancelled."""
    pool = make_pool(kind, 1)
    victim = pool.apply_async(
        work.raise_times, (str(log), 100, OSError), retries=100, retry_on=OSError
    )
    eventually(lambda: log.read_text().count("ran") >= 3, "the third try")
    assert victim.cancel() and cancelled(victim)
    assert pool.apply(work.square, (3,)) == 9
    pool.close()
    pool.join(WAIT)
