"""The scheduler alone. It is pure, so a test can replay any history."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpool import InternalError
from xpool._engine.jobs.scheduler import (
    MOST_ITEMS,
    Scheduler,
    TaskRange,
    Terms,
)
from xpool._engine.jobs.states import (
    FIRST_RETRY_PAUSE,
    LONGEST_RETRY_PAUSE,
    WINDOW,
    EndKind,
    RestartPolicy,
    back_off,
)

pytestmark = pytest.mark.pure

ITEM = b"x" * 10


def task_range(job=1, n=1, first=0, retries=0, bound=None, priority=0):
    return TaskRange(job, 0, first, [ITEM] * n, bound, Terms(retries, priority=priority))


def ready(workers, lifetime=None):
    sched = Scheduler(workers)
    for w in range(workers):
        sched.ready(w, lifetime)
    return sched


def test_unknown_tasks_are_given_one_by_one():
    """While the duration of tasks is unknown, each worker gets one task at a time."""
    sched = ready(2)
    sched.put(task_range(n=10))
    assert sorted((w, len(g.items)) for w, g in sched.next_batches()) == [(0, 1), (1, 1)]
    assert sched.refill(0) == []


def test_short_tasks_come_in_batches():
    """If tasks are short, a worker gets two batches of at most its share."""
    sched = ready(2)
    sched.put(task_range(n=10_000))
    sched.next_batches()
    sched.answered(0, 1, seconds=1e-6)
    batches = sched.refill(0)
    assert [len(g.items) for g in batches] == [MOST_ITEMS, MOST_ITEMS]
    sched = ready(4)
    sched.sizes.cost = 1e-6
    sched.put(task_range(n=40))
    assert len(sched.next_batches()[0][1].items) == 10


def test_longer_tasks_are_held_if_many_wait():
    """A worker holds enough tasks for the time in which the parent computes."""
    for cost, held in (1e-3, 11), (0.005, 5), (0.02, 2), (0.2, 2), (0.3, 1):
        sched = ready(2)
        sched.put(task_range(n=100))
        sched.next_batches()
        sched.answered(0, 1, seconds=cost)
        sched.refill(0)
        assert len(sched.in_flight[0].held) == held
        sched.answered(1, 1, seconds=cost)
        items = sched.shared.front().items
        while len(items) > 2:
            items.pop()
        sched.refill(1)
        assert len(sched.in_flight[1].held) == (2 if cost == 1e-3 else 1)


def jobs_in_order(sched):
    """Let worker 0 run what waits, one task after the other; return the jobs."""
    order = []
    while sched.waiting() or sched.in_flight[0].size:
        order += [batch.job for _, batch in sched.next_batches()]
        sched.answered(0, 1, seconds=1.0)
    return order


def test_the_highest_priority_is_next():
    """Waiting tasks begin in the order of their priorities; of one priority, the oldest first."""
    sched = ready(1)
    priorities = [0, 5, -2, 5.0, 0.5, 10**30, 0, -2, float("inf"), float("-inf")]
    for job, priority in enumerate(priorities, 1):
        sched.put(task_range(job, priority=priority))
    expected = sorted(range(1, 11), key=lambda job: (-priorities[job - 1], job))
    assert jobs_in_order(sched) == expected


def test_streams_without_room_let_lower_priorities_go_first():
    """Tasks of 2,000 streams that have no room for results hold up none of a lower priority."""
    sched, room = ready(1), []
    for job in range(1, 2001):
        stream = task_range(job, priority=job)
        stream.may_run = lambda first: bool(room)
        sched.put(stream)
    sched.put(task_range(2001, priority=0.5))
    sched.put(task_range(2002))
    order = []
    for _ in range(2):
        ((_, batch),) = sched.next_batches()
        order.append(batch.job)
        sched.answered(0, 1)
    assert order == [2001, 2002] and sched.next_batches() == []
    sched.put(task_range(2003))
    room.append(1)
    assert jobs_in_order(sched) == [*range(2000, 0, -1), 2003]


class Counted(float):
    """A priority that counts comparisons."""

    comparisons = 0

    def __lt__(self, other):
        Counted.comparisons += 1
        return float(self) < float(other)

    def __gt__(self, other):
        Counted.comparisons += 1
        return float(self) > float(other)

    def __neg__(self):
        return Counted(-float(self))


@pytest.mark.parametrize("different", [20, 2000])
def test_different_priorities_cost_their_logarithm(different):
    """With 2,000 different priorities, a task costs a few more comparisons than with 20."""
    sched, draw = ready(1), random.Random(1)
    Counted.comparisons = 0
    priorities = [Counted(1 + draw.randrange(different)) for _ in range(10_000)]
    for number, priority in enumerate(priorities, 1):
        sched.put_call(number, ITEM, Terms(priority=priority))
    order = []
    while sched.queued:
        order += [batch.first for _, batch in sched.next_batches()]
        sched.answered(0, 1, seconds=1.0)
    assert order == sorted(range(1, 10_001), key=lambda number: -float(priorities[number - 1]))
    assert Counted.comparisons < 10_000 * 5 * different.bit_length()


def test_a_stream_of_single_tasks_goes_round():
    """Tasks that come one after the other go to the worker that has been idle longest."""
    for bind in (False, True):
        sched = ready(3)
        takers = []
        for _ in range(7):
            sched.put(task_range(bound=sched.least_loaded() if bind else None))
            ((w, _),) = sched.next_batches()
            sched.answered(w, 1, seconds=1e-6)
            takers.append(w)
        assert takers == [0, 1, 2, 0, 1, 2, 0]


def test_a_caller_that_waits_gets_the_same_worker():
    """A caller that waits for each task gets the worker that was busy last."""
    for bind in (False, True):
        sched = ready(3)
        takers = []
        for _ in range(4):
            sched.put(task_range(bound=sched.least_loaded(newest=True) if bind else None))
            ((w, _),) = sched.next_batches(newest=True)
            sched.answered(w, 1, seconds=1e-6)
            takers.append(w)
        assert takers == [2, 2, 2, 2]


def run_alone(sched, job=1):
    """Have the only item of a worker run alone, and return the worker that gets it."""
    sched.put(task_range(job, retries=1))
    [(w, _)] = sched.next_batches()
    lost = sched.gone(w, 1)
    sched.ready(w, None)
    sched.again(*lost, alone=True)
    return w


def test_withdrawing_beside_a_task_that_runs_alone():
    """If another task that is to run alone is withdrawn, nothing is given beside the first."""
    sched = ready(2)
    run_alone(sched, 1)
    [(w, _)] = sched.next_batches()
    sched.put_back(TaskRange(2, 0, 0, [ITEM], None, Terms(alone=True)))
    assert sched.withdraw(2) == []
    assert sched.start(3, 0, ITEM, Terms()) is None
    sched.put(task_range(3))
    assert sched.next_batches() == []
    sched.answered(w, 1)
    assert [batch.job for _, batch in sched.next_batches()] == [3]


def test_a_bound_task_that_is_due_with_one_that_runs_alone():
    """Both wait for the same moment. The bound one was there before, and a running one may wait for
    it, so it is given first."""
    sched = ready(3)
    for w in range(3):
        sched.put(task_range(job=w, retries=1, bound=w or None))
    assert len(sched.next_batches()) == 3
    alone, bound = sched.gone(0, 1), sched.gone(1, 1)
    sched.again(*alone, when=1.0, alone=True)
    sched.again(*bound, when=1.0)
    assert sched.due(1.0) is None
    sched.ready(1, None)
    assert [(w, batch.job) for w, batch in sched.next_batches()] == [(1, 1)]


def test_a_worker_that_goes_on_no_longer_runs_the_heavy_task():
    """A worker got other tasks behind a task whose function became heavy later. When it runs these,
    another worker gets the next heavy task, though there is memory for one only."""
    sched = Scheduler(3, lambda job, index: f"f{job}")
    sched.sizes.cost = 0.001
    for w in range(3):
        sched.ready(w, None)
    sched.put(task_range(job=1, n=3, retries=1))
    sched.next_batches()
    sched.put(task_range(job=2, n=3 * 20))
    assert sched.refill(0)
    sched.ran_out(*sched.gone(1, 1), {"f1": 100})
    sched.put(task_range(job=1, first=3, priority=1))
    sched.answered(2, 1)
    assert sched.next_batches() == [], "worker 0 runs a heavy task"
    sched.answered(0, 1)
    ((w, batch),) = sched.next_batches()
    assert (w, batch.job) == (2, 1)


def test_second_tries_come_in_the_order_of_their_times():
    """Retries are queued in the order of their times. `due` returns the next time."""
    sched = ready(1)
    sched.sizes.cost = 1e-6
    sched.put(task_range(n=3, retries=1))
    ((_, batch),) = sched.next_batches()
    sched.answered(0, 3)
    for position, when in ((0, 3.0), (1, 1.0), (2, 2.0)):
        sched.again(batch, position, when=when)
    order = []
    for now in (1.0, 2.0, 3.0):
        sched.due(now)
        order.append(sched.shared.front().first)
    assert order == [1, 2, 0] and sched.due(9.0) is None
    sched.clear()
    assert sched.waiting() == 0


def test_deaths_in_a_row():
    """After too many deaths the pool gives up. A finished task or enough time resets the count."""
    policy = RestartPolicy(3)
    assert [policy.lost(0, EndKind.DIED, t) for t in (0.0, 1.0, 2.0)] == [0.0] * 3
    policy.finished = True
    assert [policy.lost(1, EndKind.DIED, t) for t in (3.0, 4.0, 5.0)] == [0.0] * 3
    assert policy.lost(0, EndKind.DIED, 6.5) is None
    assert policy.deaths == 4 and policy.seconds() == 3.5
    policy = RestartPolicy(1)
    assert policy.lost(0, EndKind.DIED, 0.0) == 0.0
    assert policy.lost(0, EndKind.DIED, WINDOW + 1) == 0.0 and policy.deaths == 1
    assert policy.lost(0, EndKind.DIED, WINDOW + 2) is None


def test_starts_that_fail():
    """Each place counts its failed starts. A successful start resets the count."""
    policy = RestartPolicy(100)
    assert [policy.lost(0, EndKind.FAILED, 0.0) for _ in range(2)] == [0.0, 0.0]
    assert policy.lost(1, EndKind.FAILED, 0.0) == 0.0
    assert policy.lost(0, EndKind.FAILED, 0.0) is None and policy.attempts(0) == 3
    policy.forget_failures(0)
    assert policy.attempts(0) == 0 and policy.lost(0, EndKind.FAILED, 0.0) == 0.0
    pauses = [policy.lost(2, EndKind.KILLED, 0.0) for _ in range(8)]
    assert pauses[0] == 0.0 and pauses[1:4] == [0.2, 0.4, 0.8] and pauses[7] is None
    pauses = [policy.lost(3, EndKind.REFUSED, 0.0) for _ in range(7)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, None]


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_back_off(tries, chance):
    """Pauses double up to a maximum. A random factor shortens them by at most half."""
    pause = back_off(tries, chance)
    assert FIRST_RETRY_PAUSE / 2 <= pause <= LONGEST_RETRY_PAUSE
    full = back_off(tries, 1.0)
    assert full / 2 <= pause <= full
    assert back_off(tries + 1, 1.0) == min(LONGEST_RETRY_PAUSE, 2 * full)


def test_an_answer_without_a_task():
    """An answer that no task waits for raises InternalError."""
    with pytest.raises(InternalError, match="did not hold"):
        ready(1).answered(0, 1)


def test_a_range_whose_results_have_no_room_waits():
    """A range without room for its results waits, and other ranges overtake it."""
    room = dict.fromkeys((1, 2), False)
    sched = Scheduler(1)
    for job in room:
        held = TaskRange(job, 1, 0, [b"x"] * 3)
        held.may_run = lambda first, job=job: room[job]
        sched.put(held)
        sched.put(held.beside(3, [b"x"], 0))
    sched.ready(0, None)
    assert sched.next_batches() == []
    sched.put(TaskRange(3, 1, 0, [b"y"]))
    ((_, batch),) = sched.next_batches()
    assert batch.job == 3 and len(sched.queued) == 2 and sched.waiting() == 8
    sched.answered(0, 1)
    room[2] = True
    ran = []
    while batches := sched.next_batches():
        ran += [(batch.job, batch.bound) for _, batch in batches for _ in batch.items]
        sched.answered(0, len(batches[0][1].items))
    assert sorted(ran, key=str) == [(2, 0), (2, None), (2, None), (2, None)]
    assert sched.waiting() == 4
