"""Pools over many hosts, at the size of a large cluster: the real policy, hosts as queues."""

from __future__ import annotations

import pytest

from .scale import WORKERS, Cluster

pytestmark = [pytest.mark.pure, pytest.mark.xpool_only]


@pytest.mark.parametrize("hosts", [20, pytest.param(1_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("trip", [0.002, 0.02])
def test_workers_of_many_hosts_are_kept_busy(hosts: int, trip: float):
    """Until nothing waits, nearly all workers work; a host that goes takes along what it ran."""
    outcome = Cluster(hosts, 10.0, trip, each=2.0).run()
    assert outcome.busy > 0.95
    assert outcome.tail < 3 * 15.0  # of a task, of one that was begun again, and what waited for it
    assert outcome.begun <= outcome.lost <= WORKERS


def test_a_host_that_goes_takes_along_what_it_kept_in_hand():
    """Of short tasks, a host may have been permitted those of the next twentieth of a second."""
    outcome = Cluster(4, 0.01, 0.002, each=30.0).run()
    assert outcome.busy > 0.95
    assert WORKERS < outcome.lost <= 6 * WORKERS
    assert outcome.begun <= WORKERS


def test_the_last_tasks_are_not_left_to_one_host():
    """When nothing waits any more, what some hosts have staged or in hand goes to those without."""
    outcome = Cluster(20, 0.05, 0.002, each=10.0, loses=False).run()
    assert outcome.tail < 0.3
