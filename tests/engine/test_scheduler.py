"""The scheduler alone: pure, so any history can be played to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpool import InternalError
from xpool.jobs.scheduler import HANDFUL, MOST_BYTES, MOST_ITEMS, Scheduler, Span

ITEM = b"x" * 10


def span(job=1, n=1, first=0, retries=0, bound=None):
    return Span(job, 0, first, [ITEM] * n, retries, bound)


def ready(workers, lifetime=None):
    sched = Scheduler(workers)
    for w in range(workers):
        sched.ready(w, lifetime)
    return sched


def test_unknown_tasks_are_given_one_by_one():
    """Before anything is known of how long tasks take, nobody has one queued behind another."""
    sched = ready(2)
    sched.put(span(n=10))
    assert sorted((w, len(g.items)) for w, g in sched.next_grants()) == [(0, 1), (1, 1)]
    assert sched.refill(0) == []


def test_short_tasks_come_by_the_handful():
    """Once tasks are known to be short, a worker gets two grants, of a share at most."""
    sched = ready(2)
    sched.put(span(n=10_000))
    sched.next_grants()
    sched.answered(0, 1, seconds=1e-6)
    grants = sched.refill(0)
    assert [len(g.items) for g in grants] == [MOST_ITEMS, MOST_ITEMS]
    sched = ready(4)
    sched.cost = 1e-6
    sched.put(span(n=40))
    assert len(sched.next_grants()[0][1].items) == 10


def test_long_tasks_are_not_held():
    """A task that takes longer than a handful stands alone in its hand."""
    sched = ready(1)
    sched.put(span(n=5))
    sched.next_grants()
    sched.answered(0, 1, seconds=HANDFUL)
    assert [len(g.items) for g in sched.refill(0)] == [1]


def test_a_grant_is_no_larger_than_a_pipe():
    """Large items travel alone, whatever their number."""
    sched = ready(1)
    sched.cost = 1e-6
    sched.put(Span(1, 0, 0, [b"x" * MOST_BYTES, b"y", b"z"]))
    assert len(sched.next_grants()[0][1].items) == 1
    assert [len(g.items) for g in sched.refill(0)] == [2]


def test_a_death_costs_the_task_that_was_begun():
    """What was answered stays, what was begun is lost, the rest waits again in front."""
    sched = ready(1)
    sched.cost = 1e-6
    sched.put(span(n=8))
    sched.next_grants()
    sched.answered(0, 3)
    grant, position = sched.gone(0, began=4)
    assert grant.first + position == 3
    assert sched.waiting() == 4 and sched.shared[0].first == 4


def test_a_death_before_a_task_was_begun_costs_nothing():
    """A worker that had begun nothing new takes nothing with it."""
    sched = ready(1)
    sched.put(span(n=2))
    sched.next_grants()
    assert sched.gone(0, began=0) is None
    assert sched.waiting() == 2 and sched.shared[0].first == 0


def test_a_bound_task_waits_for_its_worker():
    """What is bound to a worker is given to no other, also after its death."""
    sched = ready(2)
    sched.put(span(n=1, bound=1))
    assert [w for w, _ in sched.next_grants()] == [1]
    sched.gone(1, began=0)
    assert sched.next_grants() == []
    sched.ready(1, None)
    assert [w for w, _ in sched.next_grants()] == [1]


def test_least_loaded_counts_what_waits():
    """Tasks are bound to the worker with the least to do, held and waiting."""
    sched = ready(3)
    for _ in range(7):
        sched.put(span(bound=sched.least_loaded()))
    counts = [sum(len(s.items) for s in own) for own in sched.own]
    assert sorted(counts) == [2, 2, 3]


def test_a_lifetime_is_not_exceeded():
    """A worker that may run three tasks is given three."""
    sched = ready(1, lifetime=3)
    sched.cost = 1e-6
    sched.put(span(n=10))
    assert len(sched.next_grants()[0][1].items) == 3
    assert not sched.hands[0].accepting and sched.refill(0) == []


def test_taking_back():
    """What a paused worker has not begun waits again; its skipped answers change nothing more."""
    sched = ready(2)
    sched.cost = 1e-6
    sched.retire(1)
    sched.put(span(n=8))
    sched.next_grants()
    sched.answered(0, 1)
    assert sched.surplus(0, began=2)
    sched.pause(0)
    assert sched.take_back(0, 3) == 1 and sched.waiting() == 5
    sched.answered(0, 1)
    sched.skipped(0, 2)  # the third, at its door when told, waits again as well
    assert sched.waiting() == 6 and sched.hands[0].size == 0
    sched.resume(0)
    assert 0 in sched.idle


def test_withdrawing():
    """What waits of a failed job is given to nobody; other jobs and what is held stay."""
    sched = ready(1)
    sched.put(span(job=1, n=3))
    sched.put(span(job=2, n=2))
    sched.put(span(job=1, n=1, bound=0))
    sched.next_grants()
    sched.withdraw(1)
    assert sched.waiting() == 2 and sched.hands[0].size == 1
    sched.answered(0, 1, HANDFUL)
    assert [g.job for g in sched.refill(0)] == [2]
    assert sched.least_loaded() == 0


def test_answers_that_nobody_owes():
    """An answer of a worker that holds nothing is a bug of ours, and said to be."""
    with pytest.raises(InternalError, match="did not hold"):
        ready(1).answered(0, 1)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_every_item_is_answered_once(seed):
    """Whatever workers do - answer, die, skip, come back - each item ends exactly once."""
    draw = random.Random(seed)
    workers = draw.randint(1, 4)
    total = draw.randint(1, 60)
    sched = ready(workers)
    sched.cost = draw.choice([float("inf"), 1e-6, 1e-3])
    sched.put(span(n=total, retries=draw.randint(0, 1)))
    ended: list[int] = []
    limits: dict[int, int] = {}

    for _ in range(5_000):
        if len(ended) == total:
            break
        sched.next_grants()
        w = draw.randrange(workers)
        hand = sched.hands[w]
        event = draw.random()
        if event < 0.1:
            lost = sched.gone(w, hand.answered + (hand.size > 0 and draw.random() < 0.5))
            limits.pop(w, None)
            if lost is not None:
                grant, position = lost
                if grant.retries:
                    sched.again(grant, position)
                else:
                    ended.append(grant.first + position)
            sched.ready(w, None)
        elif event < 0.3 and w not in limits and sched.surplus(w, hand.answered + 1):
            limits[w] = hand.answered + 1
            sched.pause(w)
            # The worker may have been at the door of the next one, which then stays with it.
            sched.take_back(w, limits[w] + draw.randint(0, 1))
        elif hand.size:
            if hand.answered >= limits.get(w, hand.sent):
                sched.skipped(w, hand.size)
            else:
                grant = hand.held[0]
                n = 1 if w in limits else draw.randint(1, len(grant.items) - grant.done)
                _, first = sched.answered(w, n, 1e-6)
                ended.extend(range(first, first + n))
            if w in limits and not hand.size:
                del limits[w]
                sched.resume(w)
            if w not in limits:
                sched.refill(w)
    assert sorted(ended) == list(range(total))
