"""The scheduler alone. It is pure, so a test can replay any history."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpool._engine.jobs.scheduler import (
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
