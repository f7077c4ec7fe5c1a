"""The scheduler alone: pure, so any history can be played to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpool import InternalError
from xpool._engine.jobs.budget import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    WINDOW,
    EndKind,
    RestartPolicy,
    back_off,
)
from xpool._engine.jobs.scheduler import (
    LONG_SECONDS,
    MOST_BYTES,
    MOST_ITEMS,
    Limit,
    Scheduler,
    TaskRange,
    Terms,
)

pytestmark = pytest.mark.pure

ITEM = b"x" * 10


def task_range(job=1, n=1, first=0, retries=0, bound=None):
    return TaskRange(job, 0, first, [ITEM] * n, bound, Terms(retries))


def ready(workers, lifetime=None):
    sched = Scheduler(workers)
    for w in range(workers):
        sched.ready(w, lifetime)
    return sched


def test_unknown_tasks_are_given_one_by_one():
    """Before anything is known of how long tasks take, nobody has one queued behind another."""
    sched = ready(2)
    sched.put(task_range(n=10))
    assert sorted((w, len(g.items)) for w, g in sched.next_batches()) == [(0, 1), (1, 1)]
    assert sched.refill(0) == []


def test_a_stream_stands_behind_what_waits():
    """A stream that never runs dry gives way to what waits behind it after each batch; a map does
    not."""
    sched = ready(1)
    sched.sizes.cost = 0.01
    stream, call, one = task_range(1, 100), task_range(2), task_range(3, 3)
    stream.flow = object()
    for each in (stream, call, one):
        sched.put(each)
    order = []
    while len(order) < 7:
        batches = [batch for _, batch in sched.next_batches()] + sched.refill(0)
        order += [batch.job for batch in batches]
        sched.answered(0, 1)
    assert order[:7] == [1, 2, 3, 3, 3, 1, 1]


def test_short_tasks_come_by_the_handful():
    """Once tasks are known to be short, a worker gets two batches, of a share at most."""
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


def test_idle_workers_divide_a_handful():
    """What is one handful goes to all idle workers at once, and leaves nothing for a refill."""
    sched = ready(3)
    sched.sizes.cost = 1e-6
    sched.put(task_range(n=8))
    batches = sched.next_batches()
    assert [len(batch.items) for _, batch in batches] == [3, 3, 2] and not sched.waiting()
    for w, batch in batches[:2]:
        sched.answered(w, len(batch.items))
    # The third is busy: it may be done first, so a part is left for it.
    sched.put(task_range(n=8))
    assert [len(batch.items) for _, batch in sched.next_batches()] == [3, 2]
    sched = ready(3)  # whose tasks are not known to be short
    sched.put(task_range(n=8))
    assert [len(batch.items) for _, batch in sched.next_batches()] == [1, 1, 1]


def test_long_tasks_are_not_held():
    """A task that takes long stands alone in its worker's hand."""
    sched = ready(1)
    sched.put(task_range(n=5))
    sched.next_batches()
    sched.answered(0, 1, seconds=2 * LONG_SECONDS)
    assert [len(g.items) for g in sched.refill(0)] == [1]


def test_long_tasks_are_held_where_many_wait():
    """As many as bridge the time in which the parent computes; with others' shares left to them."""
    for cost, held in (1e-3, 11), (0.005, 5), (0.02, 2), (0.2, 2), (0.3, 1):
        sched = ready(2)
        sched.put(task_range(n=100))
        sched.next_batches()
        sched.answered(0, 1, seconds=cost)
        sched.refill(0)
        assert len(sched.in_flight[0].held) == held
        sched.answered(1, 1, seconds=cost)
        while len(sched.shared[0].items) > 2:
            sched.shared[0].items.pop()
        sched.refill(1)
        assert len(sched.in_flight[1].held) == (2 if cost == 1e-3 else 1)


def test_a_grant_is_no_larger_than_a_pipe():
    """Large items travel alone, whatever their number."""
    sched = ready(1)
    sched.sizes.cost = 1e-6
    sched.put(TaskRange(1, 0, 0, [b"x" * MOST_BYTES, b"y", b"z"]))
    assert len(sched.next_batches()[0][1].items) == 1
    assert [len(g.items) for g in sched.refill(0)] == [2]


def test_a_death_costs_the_task_that_was_begun():
    """What was answered stays, what was begun is lost, the rest waits again in front."""
    sched = ready(1)
    sched.sizes.cost = 1e-6
    sched.put(task_range(n=8))
    sched.next_batches()
    sched.answered(0, 3)
    batch, position = sched.gone(0, began=4)
    assert batch.first + position == 3
    assert sched.waiting() == 4 and sched.shared[0].first == 4


def test_a_death_before_a_task_was_begun_costs_nothing():
    """A worker that had begun nothing new takes nothing with it."""
    sched = ready(1)
    sched.put(task_range(n=2))
    sched.next_batches()
    assert sched.gone(0, began=0) is None
    assert sched.waiting() == 2 and sched.shared[0].first == 0


def test_a_bound_task_waits_for_its_worker():
    """What is bound to a worker is given to no other, also after its death."""
    sched = ready(2)
    sched.put(task_range(n=1, bound=1))
    assert [w for w, _ in sched.next_batches()] == [1]
    sched.gone(1, began=0)
    assert sched.next_batches() == []
    sched.ready(1, None)
    assert [w for w, _ in sched.next_batches()] == [1]


def test_least_loaded_counts_what_waits():
    """Tasks are bound to the worker with the least to do, held and waiting."""
    sched = ready(3)
    for _ in range(7):
        sched.put(task_range(bound=sched.least_loaded()))
    counts = [sum(len(s.items) for s in own) for own in sched.own]
    assert sorted(counts) == [2, 2, 3]


def test_a_stream_of_single_tasks_goes_round():
    """Tasks that come one by one, each done before the next, go to the longest idle worker."""
    for bind in (False, True):
        sched = ready(3)
        takers = []
        for _ in range(7):
            sched.put(task_range(bound=sched.least_loaded() if bind else None))
            ((w, _),) = sched.next_batches()
            sched.answered(w, 1, seconds=1e-6)
            takers.append(w)
        assert takers == [0, 1, 2, 0, 1, 2, 0]


def test_a_caller_that_waits_has_the_same_worker_again():
    """Tasks of a caller that waits for each go to the worker that was the last to be busy."""
    for bind in (False, True):
        sched = ready(3)
        takers = []
        for _ in range(4):
            sched.put(task_range(bound=sched.least_loaded(newest=True) if bind else None))
            ((w, _),) = sched.next_batches(newest=True)
            sched.answered(w, 1, seconds=1e-6)
            takers.append(w)
        assert takers == [2, 2, 2, 2]


def test_a_lifetime_is_not_exceeded():
    """A worker that may run three tasks is given three."""
    sched = ready(1, lifetime=3)
    sched.sizes.cost = 1e-6
    sched.put(task_range(n=10))
    assert len(sched.next_batches()[0][1].items) == 3
    assert not sched.in_flight[0].accepting and sched.refill(0) == []


def test_taking_back():
    """What a paused worker has not begun waits again; its skipped answers change nothing more."""
    sched = ready(2)
    sched.sizes.cost = 1e-6
    sched.retire(1)
    sched.put(task_range(n=8))
    sched.next_batches()
    sched.answered(0, 1)
    assert sched.surplus(0, began=2)
    sched.pause(0)
    assert sched.take_back(0, 3) == 1 and sched.waiting() == 5
    sched.answered(0, 1)
    sched.skipped(0, 2)  # the third, at its door when told, waits again as well
    assert sched.waiting() == 6 and sched.in_flight[0].size == 0
    sched.resume(0)
    assert 0 in sched.idle


def test_withdrawing():
    """What waits of a failed job is given to nobody; other jobs and what is held stay."""
    sched = ready(1)
    sched.put(task_range(job=1, n=3))
    sched.put(task_range(job=2, n=2))
    sched.put(task_range(job=1, n=1, bound=0))
    sched.next_batches()
    sched.withdraw(1)
    assert sched.waiting() == 2 and sched.in_flight[0].size == 1
    sched.answered(0, 1, 2 * LONG_SECONDS)
    assert [g.job for g in sched.refill(0)] == [2]
    assert sched.least_loaded() == 0


def test_what_is_held_of_a_withdrawn_job_is_not_queued_again():
    """Not after the death of its worker, not when it is taken back, skipped or tried again."""
    for event in ("death", "back", "skipped", "again"):
        sched = ready(1)
        sched.sizes.cost = 1e-6
        sched.put(task_range(job=1, n=4, retries=3))
        sched.put(task_range(job=2, n=4))
        sched.next_batches()
        sched.refill(0)
        assert sched.withdraw(1) == [0]
        held = {batch.job: batch.withdrawn for batch in sched.in_flight[0].held}
        assert held == {1: True, 2: False}
        if event == "death":
            lost = sched.gone(0, began=1)
            assert lost is not None
            sched.again(*lost)
            assert {s.job for s in sched.shared} == {2}
        elif event == "back":
            sched.pause(0)
            sched.take_back(0, 1)
        elif event == "skipped":
            sched.skipped(0, 2)
        else:
            batch, _ = sched.answered(0, 1)
            sched.again(batch, 0, when=1.0)
            assert sched.due(2.0) is None
        assert 1 not in {s.job for s in sched.shared}


def test_withdrawing_what_waits_for_its_time():
    """A task between two tries is forgotten, too; those of other jobs stay."""
    sched = ready(1)
    for job in (1, 2):
        sched.put(task_range(job=job, retries=1))
    sched.sizes.cost = 1e-6
    sched.next_batches()
    sched.refill(0)
    for when in (5.0, 4.0):
        batch, _ = sched.answered(0, 1)
        sched.again(batch, 0, when=when)
    assert sched.withdraw(1) == [] and sched.waiting() == 1
    assert sched.due(9.0) is None and [s.job for s in sched.shared] == [2]


def test_a_second_try_waits_its_time():
    """Not before its time, then in front; with one try less, its limit, and what it did."""
    sched = ready(1)
    sched.put(TaskRange(1, 0, 0, [ITEM], 0, Terms(3, Limit(2.5, True))))
    ((w, batch),) = sched.next_batches()
    lost = sched.gone(w, began=1)
    assert lost == (batch, 0)
    sched.again(batch, 0, when=10.0)
    sched.ready(0, None)
    assert sched.due(9.0) == 10.0 and sched.next_batches() == [] and sched.waiting() == 1
    assert sched.due(10.0) is None
    ((w, again),) = sched.next_batches()
    assert again.bound == 0
    assert again.terms == Terms(2, Limit(2.5, True), tries=1, killed=1)
    sched.answered(0, 1)
    sched.again(again, 0, killed=False)
    ((_, third),) = sched.next_batches()
    assert third.terms == Terms(1, Limit(2.5, True), tries=2, killed=1)


def test_second_tries_come_in_the_order_of_their_times():
    """Whoever's pause ends first is queued first; the next time is told."""
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
        order.append(sched.shared[0].first)
    assert order == [1, 2, 0] and sched.due(9.0) is None
    sched.clear()
    assert sched.waiting() == 0


def test_which_item_runs():
    """The item that was begun last, until its answer is there."""
    sched = ready(1)
    sched.sizes.cost = 1e-6
    sched.put(task_range(job=1, n=2))
    sched.put(task_range(job=2, n=2))
    sched.next_batches()
    sched.refill(0)
    first, second = sched.in_flight[0].held
    assert sched.running(0, began=0) is None
    assert sched.running(0, began=2) == (first, 1)
    assert sched.running(0, began=3) == (second, 0)
    sched.answered(0, 2)
    assert sched.running(0, began=2) is None
    assert sched.running(0, began=3) == (second, 0)
    sched.answered(0, 2)
    assert sched.running(0, began=4) is None


def test_deaths_in_a_row():
    """The pool gives up after too many; a task that is finished, and time, forgive them."""
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


def test_workers_that_were_told_to_end_are_no_deaths():
    """Nor are those that the pool has stopped for their task."""
    policy = RestartPolicy(0)
    for kind in (EndKind.FINISHED, EndKind.STOPPED):
        assert policy.lost(0, kind, 0.0) == 0.0
    assert policy.lost(0, EndKind.DIED, 0.0) is None


def test_starts_that_fail():
    """Each place has its own count, which ends when a worker is ready there."""
    policy = RestartPolicy(100)
    assert [policy.lost(0, EndKind.FAILED, 0.0) for _ in range(2)] == [0.0, 0.0]
    assert policy.lost(1, EndKind.FAILED, 0.0) == 0.0
    assert policy.lost(0, EndKind.FAILED, 0.0) is None and policy.attempts(0) == 3
    policy.succeeded(0)
    assert policy.attempts(0) == 0 and policy.lost(0, EndKind.FAILED, 0.0) == 0.0
    pauses = [policy.lost(2, EndKind.KILLED, 0.0) for _ in range(8)]
    assert pauses[0] == 0.0 and pauses[1:4] == [0.2, 0.4, 0.8] and pauses[7] is None
    pauses = [policy.lost(3, EndKind.REFUSED, 0.0) for _ in range(7)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, None]


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_back_off(tries, chance):
    """Pauses double up to the longest, and differ by chance by half of them at most."""
    pause = back_off(tries, chance)
    assert FIRST_PAUSE / 2 <= pause <= LONGEST_PAUSE
    full = back_off(tries, 1.0)
    assert full / 2 <= pause <= full
    assert back_off(tries + 1, 1.0) == min(LONGEST_PAUSE, 2 * full)


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
    sched.sizes.cost = draw.choice([float("inf"), 1e-6, 1e-3])
    sched.put(task_range(n=total, retries=draw.randint(0, 1)))
    ended: list[int] = []
    limits: dict[int, int] = {}

    for _ in range(5_000):
        if len(ended) == total:
            break
        sched.next_batches()
        w = draw.randrange(workers)
        in_flight = sched.in_flight[w]
        event = draw.random()
        if event < 0.1:
            lost = sched.gone(w, in_flight.answered + (in_flight.size > 0 and draw.random() < 0.5))
            limits.pop(w, None)
            if lost is not None:
                batch, position = lost
                if batch.terms.retries:
                    sched.again(batch, position)
                else:
                    ended.append(batch.first + position)
            sched.ready(w, None)
        elif event < 0.3 and w not in limits and sched.surplus(w, in_flight.answered + 1):
            limits[w] = in_flight.answered + 1
            sched.pause(w)
            # The worker may have been at the door of the next one, which then stays with it.
            sched.take_back(w, limits[w] + draw.randint(0, 1))
        elif in_flight.size:
            if in_flight.answered >= limits.get(w, in_flight.sent):
                sched.skipped(w, in_flight.size)
            else:
                batch = in_flight.held[0]
                n = 1 if w in limits else draw.randint(1, len(batch.items) - batch.done)
                _, first = sched.answered(w, n, 1e-6)
                ended.extend(range(first, first + n))
            if w in limits and not in_flight.size:
                del limits[w]
                sched.resume(w)
            if w not in limits:
                sched.refill(w)
    assert sorted(ended) == list(range(total))


def test_a_range_whose_results_have_no_room_waits():
    """Others pass it, whoever they are for; nothing runs where all wait for room."""
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
    assert batch.job == 3 and sched.queued == 4 and sched.waiting() == 8
    sched.answered(0, 1)
    room[2] = True
    ran = []
    while batches := sched.next_batches():
        ran += [(batch.job, batch.bound) for _, batch in batches for _ in batch.items]
        sched.answered(0, len(batches[0][1].items))
    assert sorted(ran, key=str) == [(2, 0), (2, None), (2, None), (2, None)]
    assert sched.waiting() == 4
