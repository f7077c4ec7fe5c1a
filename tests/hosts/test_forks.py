"""The driver and an agent fork children that live on: a pool over hosts waits for none of them."""

import multiprocessing
import os
from pathlib import Path

import pytest
from support.clusters import agent, needs_runtime_env
from support.forking import MOST_OF_HOSTS, fork_from_now_on, forks
from support.limits import WAIT

from xpool import OptionError, Pool, WorkerDied

pytestmark = [
    pytest.mark.ray,
    pytest.mark.xpool_only,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


@pytest.fixture
def agents_fork():
    """Return a `runtime_env` with which each agent forks, from the start of its process on."""
    needs_runtime_env()
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR as HOOK

    return {"env_vars": {HOOK: f"{fork_from_now_on.__module__}.{fork_from_now_on.__qualname__}"}}


def children(pid):
    """Return how many children a process has."""
    return sum(
        len(path.read_text().split()) for path in Path(f"/proc/{pid}/task").glob("*/children")
    )


def test_a_pool_while_driver_and_agents_fork(cluster, agents_fork):
    """Its calls are answered, one that loses its worker too, and it ends."""
    import xpool.ray

    large = b"x" * 1_000_000
    with forks(MOST_OF_HOSTS):
        for _ in range(2):
            hosts = xpool.ray.hosts(n=2, per_host=2, runtime_env=agents_fork)
            with Pool(hosts=hosts) as pool:
                assert pool.map_async(abs, range(400)).get(WAIT) == [*range(400)]
                with pytest.raises(WorkerDied):
                    pool.apply_async(os._exit, (3,)).get(WAIT)
                assert pool.map_async(len, [large] * 8).get(WAIT) == [1_000_000] * 8
                agents = {agent(pid) for pid in pool.run_all(os.getpid)}
                assert len(agents) == 2 and all(children(one) > 10 for one in agents)
                pool.close()
                pool.join(WAIT)


def makes_pools(end):
    import xpool.ray

    try:
        Pool(hosts=xpool.ray.hosts(n=1, per_host=1))
    except OptionError as error:
        end.send(str(error))
    with Pool(1) as pool:
        end.send(pool.apply_async(abs, (-1,)).get(WAIT))


def test_a_forked_child_makes_a_pool(cluster):
    """A child has its parent's connection to Ray, but not the threads of it: a pool over hosts is
    refused, with the reason."""
    import xpool.ray

    with Pool(hosts=xpool.ray.hosts(n=1, per_host=1)) as pool:
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=makes_pools, args=(there,))
        child.start()
        assert here.poll(WAIT) and "forked from a program that is connected to Ray" in here.recv()
        assert here.poll(WAIT) and here.recv() == 1
        child.join(WAIT)
        assert child.exitcode == 0
        assert pool.apply_async(abs, (-1,)).get(WAIT) == 1
