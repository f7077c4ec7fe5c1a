"""Pools over the hosts of a Ray cluster work like pools on one machine."""

import asyncio
import contextlib
import gc
import os
import time
from pathlib import Path

import pytest
from support import clusters, scripts, work
from support.leaks import Snapshot, descriptors
from support.limits import WAIT
from support.waiting import eventually

from xpool import (
    OptionError,
    Pool,
    TaskCancelled,
    TaskTimeout,
    WorkerDied,
    WorkerStartFailed,
    current_worker,
)

np = pytest.importorskip("numpy", reason="the tests send arrays")

pytestmark = [pytest.mark.ray, pytest.mark.xpool_only]


def over(cluster, **options):
    import xpool.ray

    return Pool(hosts=xpool.ray.hosts(n=2, per_host=1), **options)


def where(_=None):
    return current_worker().index, current_worker().host, os.getpid()


def fail_at(bad, x):
    if x == bad:
        raise LookupError(f"no {x}")
    return x


# Verbs --------------------------------------------------------------------------------------------


def test_executors_and_event_loops(pool):
    """They work as on one machine; `tests/conformance` tries the verbs over hosts."""
    squares = [x * x for x in range(50)]
    with pool.executor() as executor:
        assert list(executor.map(work.square, range(50))) == squares

    async def wait():
        return await pool.apply_async(work.square, (9,))

    assert asyncio.run(wait()) == 81


def test_a_time_limit_is_kept_on_any_host(pool):
    """On each host, a stuck task is stopped soon after its limit. The error names the host."""
    begin = time.monotonic()
    found = pool.starmap(work.spin, [()] * 4, timeout=1, on_error="return", chunksize=1)
    assert time.monotonic() - begin < 2 + 1
    assert all(type(error) is TaskTimeout for error in found)
    assert {error.host for error in found} == {host for _, host, _ in pool.run_all(where)}
    assert all("on host" in str(error) and "in spin" in error.stack for error in found)


def test_a_worker_dies(pool):
    """The error names the worker and its host. A new worker replaces it."""
    before = pool.run_all(where)
    with pytest.raises(WorkerDied) as caught:
        pool.apply(os._exit, (5,))
    error = caught.value
    assert (error.exitcode, error.host) == (5, before[error.worker][1])
    assert error.host in str(error)
    after = pool.run_all(where)
    assert [x[:2] for x in after] == [x[:2] for x in before]
    assert [i for i in range(4) if after[i][2] != before[i][2]] == [error.worker]


def test_retries(pool, log):
    """A task runs again after its worker's death, and after an error named in `retry_on`."""
    path = str(log)
    assert pool.apply(work.end_once, ("SIGKILL", path + ".1", "again"), retries=1) == "again"
    options = {"retries": 3, "retry_on": LookupError}
    pool.apply_async(work.raise_times, (path, 2, LookupError, "x"), **options).get(WAIT)
    assert len(log.read_text().splitlines()) == 3
    with pytest.raises(LookupError):
        pool.apply_async(work.raise_times, (path + ".2", 9, LookupError, "x"), **options).get(WAIT)


def test_cancel(pool, mailbox):
    """Waiting and running tasks can be cancelled. Their workers run other tasks."""
    results = [pool.apply_async(work.post_and_sleep, (mailbox.path,)) for _ in range(4)]
    mailbox.lines(4)
    results.append(pool.apply_async(work.square, (2,)))
    for result in results:
        assert result.cancel()
        with pytest.raises(TaskCancelled):
            result.get(WAIT)
    assert pool.map(work.square, range(8)) == [x * x for x in range(8)]


def test_progress(pool):
    """`progress` is called when the last item is done."""
    seen = []
    pool.map(work.square, range(20), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (20, 20)


# What is sent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1 << 10, 100_000, 1 << 20, 20 << 20])
def test_arrays(pool, size):
    """An array arrives whole and writable, and returns with its changes."""
    array = np.random.default_rng(size).integers(0, 256, size, "uint8")

    def invert(array):
        np.invert(array, out=array)
        return array

    for back in pool.map(invert, [array] * 3, chunksize=1):
        assert (back == ~array).all()
        back[:] = 0


def test_many_large_results_at_once(pool):
    """Results arrive although together they exceed a call's limit and the object store."""
    found = pool.imap_unordered(lambda x: np.full(4 << 20, x, "uint8"), range(80), buffersize=8)
    assert sorted(int(array[-1]) for array in found) == list(range(80))


WITHOUT_NUMPY = """
import os, sys
from pathlib import Path
from support import clusters
from xpool import Pool
import xpool.ray

if __name__ == "__main__":
    clusters.connect({address!r})
    with Pool(hosts=xpool.ray.hosts(n=1, per_host=1)) as pool:
        agent = clusters.agent(pool.apply_async(os.getpid).get(60))
        large = os.urandom(10_000_000)
        shared = pool.broadcast(large)
        for sent in (large, large[::-1]), (shared, large[::-1]):
            assert pool.apply_async(lambda a, b: (b, a), sent).get(60) == (large[::-1], large)
        print("numpy" in sys.modules, "numpy" in Path(f"/proc/{{agent}}/maps").read_text())
"""


def test_large_values_without_numpy(cluster, tmp_path):
    """Large values import no numpy, in the program or in an agent. Two threads that import parts of
    it at the same time can get half a module."""
    text = WITHOUT_NUMPY.format(address=cluster.address)
    out = scripts.run([scripts.write(tmp_path / "without_numpy.py", text)])
    assert out.stdout.split() == ["False", "False"], out


CONNECT = """
import os, sys
from support import clusters
from xpool import Pool, current_worker
import xpool.ray

K = 5
class Point:
    def __init__(self, x):
        self.x = x

def shifted(point):
    return Point(point.x + K)

def main():
    clusters.connect({address!r})
    with Pool(hosts=xpool.ray.hosts(n=2, per_host=1)) as pool:
        points = pool.map(shifted, map(Point, range(5)))
        assert all(type(point) is Point for point in points)
        print([point.x for point in points], len(pool.run_all(lambda: K)))
"""


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_main(cluster, tmp_path, how):
    """Functions and classes of ``__main__`` work, in a guarded script and with ``python -``."""
    text = CONNECT.format(address=cluster.address)
    if how == "script":
        guard = 'if __name__ == "__main__":\n    main()\n'
        out = scripts.run_ok([scripts.write(tmp_path / "own.py", text + guard)])
    else:
        out = scripts.run_ok(["-"], text + "main()\n")
    assert out == "[5, 6, 7, 8, 9] 2\n"


# The pool -----------------------------------------------------------------------------------------


def test_workers_know_their_host(pool):
    """Workers are numbered from the first host to the last."""
    found = pool.run_all(where)
    assert [index for index, _, _ in found] == [0, 1, 2, 3]
    hosts = [host for _, host, _ in found]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert all("(127.0.0." in host for host in hosts)


def test_two_hosts_of_one_machine(cluster):
    """The names of two hosts on one machine differ by their ports."""
    import xpool.ray

    one = cluster.add(twins=1)
    two = cluster.add(beside=one, twins=1)
    try:
        with Pool(hosts=xpool.ray.hosts(per_host=1, resources={"twins": 1})) as pool:
            names = {host for _, host, _ in pool.run_all(where)}
        assert len(names) == 2
        assert all(f"({one.node_ip_address}:" in name for name in names)
    finally:
        cluster.remove(one)
        cluster.remove(two)


def test_a_pool_that_waits_for_processors(cluster, make_pool, caplog):
    """If a host has too few free CPUs, the pool logs it, and works once they are free."""
    import xpool.ray

    node = cluster.add(crowded=2)
    hosts = xpool.ray.hosts(per_host=clusters.CPUS - 1, resources={"crowded": 1})
    try:
        first = Pool(hosts=hosts)
        assert first.apply_async(abs, (-1,)).get(WAIT) == 1
        second = make_pool(Pool, hosts=hosts)
        result = second.apply_async(abs, (-2,))
        eventually(lambda: "has not started" in caplog.text, "the log says so", WAIT)
        assert clusters.address(node) in caplog.text
        assert f"needs {clusters.CPUS - 1} CPUs, and 1 are free" in caplog.text
        first.terminate()
        first.join()
        assert result.get(WAIT) == 2
        second.terminate()
        second.join()
    finally:
        cluster.remove(node)


def test_arguments_of_rays_pool(cluster):
    """`xpool.ray.Pool` takes the arguments of Ray's pool. It refuses unsupported ones by name."""
    import xpool.ray

    with pytest.raises(OptionError, match="ray_remote_args=.*'num_gpus'.*hosts"):
        xpool.ray.Pool(1, ray_remote_args={"num_gpus": 1})
    with pytest.raises(OptionError, match=r"xpool\.ray\.hosts\(\)"):
        xpool.ray.Pool(hosts=xpool.ray.hosts(), ray_address=cluster.address)
    clusters.needs_runtime_env()
    remote = {"num_cpus": 1, "runtime_env": {"env_vars": {"GIVEN": "yes"}}}
    with xpool.ray.Pool(1, None, None, None, None, cluster.address, remote) as pool:
        assert pool.apply_async(os.getenv, ("GIVEN",)).get(WAIT) == "yes"


SHUT_DOWN = """
import time
from support import clusters
from xpool import Pool
import ray, xpool.ray

if __name__ == "__main__":
    clusters.connect({address!r})
    pools = [Pool(hosts=xpool.ray.hosts(n=1, per_host=1)) for _ in range(2)]
    results = [pool.apply_async(time.sleep, (60,)) for pool in pools]
    while any(pool.statistics()["running"] < 1 for pool in pools):
        time.sleep(0.05)
    ray.shutdown()
    for result in results:
        try:
            result.get(60)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    assert not ray.is_initialized()
"""


@pytest.mark.exhaustive
def test_ray_is_shut_down_under_two_pools(cluster, tmp_path):
    """Each task fails with the reason, Ray is not started again, and the program ends."""
    text = SHUT_DOWN.format(address=cluster.address)
    with scripts.popen([scripts.write(tmp_path / "program.py", text)]) as program:
        out, err = program.communicate(timeout=WAIT)
    assert program.returncode == 0, out + err
    assert out.count("the program has shut Ray down") == 2, out + err


def test_statistics_and_report(pool):
    """The statistics and the report count all hosts. The statistics list each host by name."""
    pool.map(work.square, range(100))
    found = eventually(
        lambda: (it := pool.statistics())["running"] == 0 and it["ready"] == 4 and it, "all idle"
    )
    pids = {pid for _, _, pid in pool.run_all(where)}
    assert set(found["pids"]) == pids
    assert len(found["hosts"]) == 2
    assert sum(len(one["pids"]) for one in found["hosts"].values()) == 4
    assert sorted(one.index for one in pool.report().workers) == [0, 1, 2, 3]
    eventually(lambda: {one.pid for one in pool.report().workers} == pids, "all pids", WAIT)


def total(value):
    """Return the sum of all ranks' values."""
    import torch

    from xpool.distributed import get_world

    tensor = torch.tensor([value])
    get_world().group.all_reduce(tensor)
    return tensor.item()


def test_a_group(cluster, make_pool):
    """The workers of all hosts form one group. It is rebuilt after a worker's death."""
    pytest.importorskip("torch", reason="the group is one of torch.distributed")
    pool = make_pool(over, cluster)
    group = pool.create_group()
    assert pool.run_all(total, 2.0) == [4.0, 4.0]
    made = group.generation
    with pytest.raises(WorkerDied):
        pool.apply_async(os._exit, (3,)).get(WAIT)
    assert pool.run_all(total, 3.0) == [6.0, 6.0]
    assert group.generation > made


def test_initializer(cluster, make_pool):
    """The initializer runs once in each worker, before its first task."""
    pool = make_pool(over, cluster, initializer=work.remember, initargs=("a", 1))
    assert pool.run_all(work.recall) == [[("a", 1)]] * 2


def test_initializer_of_a_global(cluster, make_pool):
    """It acts on the worker's global, as in a pool on one host."""
    pool = make_pool(over, cluster, initializer=work.initialised.append, initargs=("b",))
    assert pool.apply(work.recall) == ["b"]


def test_initializer_that_fails(cluster, make_pool):
    """If the initializer raises, each task fails with WorkerStartFailed, which has the error."""
    pool = make_pool(over, cluster, initializer=work.fail, initargs=("why",))
    with pytest.raises(WorkerStartFailed) as caught:
        pool.apply_async(work.square, (2,)).get(WAIT)
    assert type(caught.value.__cause__) is KeyError
    assert caught.value.host and caught.value.host in str(caught.value)


def test_two_pools_at_once_and_one_after(cluster, make_pool, pool):
    """Several pools on the same hosts do not affect each other."""
    for _ in range(2):
        other = make_pool(over, cluster)
        assert other.map(work.square, range(50)) == pool.map(work.square, range(50))
        other.close()
        other.join()
    assert pool.apply(work.square, (3,)) == 9


def agents_of(pool):
    """Return the process ids of a pool's agents and workers."""
    pids = {pid for _, _, pid in pool.run_all(where)}
    return pids | {clusters.agent(pid) for pid in pids}


@pytest.mark.parametrize("end", ["close", "terminate", "drop", "start"])
def test_an_end_leaves_nothing(cluster, end, mailbox):
    """After the pool's end, no agent, worker or thread is left."""
    before = Snapshot.take()
    pool = over(cluster)
    if end == "start":  # its agents have not started yet
        result = pool.map_async(work.square, range(9))
        pool.terminate()
        pool.join()
        assert result.ready() and not result.successful()
    else:
        pids = agents_of(pool)
        assert len(pids) == 4
        if end == "close":
            result = pool.map_async(work.square, range(1000))
            pool.close()
            pool.join()
            assert result.get(WAIT)[-1] == 999 * 999
        elif end == "terminate":
            result = pool.apply_async(work.post_and_sleep, (mailbox.path,))
            mailbox.lines(1)
            pool.terminate()
            pool.join()
            assert result.ready() and not result.successful()
    with pytest.warns(ResourceWarning) if end == "drop" else contextlib.nullcontext():
        del pool
        gc.collect()
    assert not [left for left in before.leaks(WAIT) if left.startswith(("process", "thread"))]


def test_descriptors_do_not_pile_up(cluster):
    """The fourth pool leaves no more descriptors open than the second."""
    counts = []
    for _ in range(4):
        with over(cluster) as pool:
            pool.apply(work.square, (2,))
        pool.join()
        counts.append(len(descriptors()))
    assert counts[-1] <= counts[1] + 6, counts


# Errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (Pool, {"processes": 2}, "per_host="),
        (Pool, {"context": "fork"}, "fork server"),
        (Pool, {"is_copy_tensor": False}, "do not share memory"),
    ],
)
def test_options_that_do_not_fit(cluster, kind, options, why):
    """Each option is refused with the reason, before a process starts."""
    import xpool.ray

    with pytest.raises(OptionError, match=why):
        kind(hosts=xpool.ray.hosts(n=1, per_host=1), **options)


def test_stacks(pool, tmp_path):
    """`stacks` shows host, task, item and calls of each worker, or that it waits for a task."""

    def hold(path):
        while not os.path.exists(path):
            time.sleep(0.01)

    open_at, hosts = str(tmp_path / "open"), {host for _, host, _ in pool.run_all(where)}
    result = pool.map_async(hold, [open_at, open_at], 1)
    try:
        (found,) = eventually(
            lambda: [s for s in [pool.stacks()] if str(s).count("in hold") == 2], "both run"
        )
        busy = [one for one in found if one.task]
        assert [one.index for one in found] == [0, 1, 2, 3]
        assert {one.host for one in found} == hosts
        tasks = sorted(one.task for one in found)
        assert tasks[:2] == ["", ""] and tasks[2].startswith("item 0 of ") and "hold()" in tasks[3]
        assert all(one.seconds is not None and "open" in one.item for one in busy)
        assert str(found).count("waits for a task") == 2
    finally:
        open(open_at, "w").close()
    result.get(WAIT)


def test_stacks_of_a_silent_host(pool, monkeypatch):
    """`stacks` lists the workers of a host that does not answer in time, and says so."""
    monkeypatch.setattr("xpool._hosts.hosts_engine.LOOK_SECONDS", 0.0)
    found = pool.stacks()
    assert [one.index for one in found] == [0, 1, 2, 3] and all(one.pid for one in found)
    assert str(found).count("its host has not answered within a second") == 4


def test_files_of_tasks(cluster, warm, tmp_path, monkeypatch):
    """With ``output="files"``, workers write to files in the pool's folder on their hosts."""
    monkeypatch.chdir(tmp_path)
    with over(cluster, output="files") as pool:
        pool.map(print, range(4), 1)
        pool.run_all(print, "all")
        found = [path.read_text() for path in Path(pool.output_folder or "").iterdir()]
    # These hosts share one file system.
    assert sorted(found) == ["0\n", "1\n", "2\n", "3\n", "all\n", "all\n"]
