"""Pools over many hosts, at the size of a large cluster: the real policy, hosts as queues."""

from __future__ import annotations

import pytest

from .scale import UPLINK, WORKERS, Cluster

pytestmark = [pytest.mark.pure, pytest.mark.xpool_only]


@pytest.mark.parametrize("hosts", [20, pytest.param(1_000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("trip", [0.002, 0.02])
def test_workers_of_many_hosts_are_kept_busy(hosts: int, trip: float):
    """While tasks wait, nearly all workers work; a lost host loses its running tasks."""
    outcome = Cluster(hosts, 10.0, trip, each=2.0).run()
    assert outcome.busy > 0.95
    assert outcome.tail < 3 * 15.0  # a task, its repetition, and a task that waited for it
    assert outcome.begun <= outcome.lost <= WORKERS


def test_a_lost_host_loses_permitted_tasks():
    """A host may lose the short tasks that it was permitted for the next 0.05 s."""
    outcome = Cluster(4, 0.01, 0.002, each=30.0).run()
    assert outcome.busy > 0.95
    assert WORKERS < outcome.lost <= 6 * WORKERS
    assert outcome.begun <= WORKERS


def test_the_last_tasks_are_shared():
    """When no task waits, idle hosts get staged and unbegun tasks of others."""
    outcome = Cluster(20, 0.05, 0.002, each=10.0, loses=None).run()
    assert outcome.tail < 0.3


def test_few_tasks_are_sent_twice():
    """A task takes twenty times as long as the driver expects, as where arrays have to arrive."""
    outcome = Cluster(2, 0.02, 0.002, each=50.0, loses=None, cost=0.001).run()
    assert outcome.tail < 1.2  # a worker's 50 tasks
    assert outcome.sent < 1.2


def test_arguments_do_not_delay_permissions():
    """The arguments of later tasks are not sent to a host before it may begin the tasks it has."""
    outcome = Cluster(20, 0.01, 0.002, each=60.0, loses=None, workers=8, nbytes=100_000).run()
    least = 9_600 * 100_000 / UPLINK  # seconds in which all arguments leave the driver
    assert outcome.seconds < 1.15 * least
    assert outcome.sent < 1.05
