"""If a worker, an agent or a host is lost, each task gets one answer and never runs twice at the
same time. The error of a lost task names the host."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
from support import clusters, scripts
from support.clusters import address, agent, parent, raylet, workers
from support.limits import WAIT
from support.tiers import also
from support.waiting import eventually, wait_gone
from support.work import log_line

import xpool
import xpool._hosts.hosts_engine
from xpool import Pool, TaskTimeout, WorkerDied
from xpool.errors import HostLost

pytestmark = [pytest.mark.ray, pytest.mark.xpool_only]

LEASE = 3.0
"""Seconds. The default of 10 is for slow networks."""


@pytest.fixture(autouse=True)
def short_lease(monkeypatch):
    """Make the lease short, so that the tests are short."""
    monkeypatch.setattr(xpool._hosts.hosts_engine, "LEASE", LEASE)


class Stage:
    """Two hosts of the cluster for these tests. The tests kill or stop `victim`."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.safe = cluster.add(losses=100)
        self.victim = cluster.add(losses=100)

    def whole(self):
        """Replace the victim if it has ended."""
        if not clusters.is_alive(self.victim):
            self.cluster.remove(self.victim)  # the victim may have ended by itself
            self.victim = self.cluster.add(losses=100)

    def pool(self, **options):
        """Make a pool of two workers on each host. Wait for all of them."""
        import xpool.ray

        pool = Pool(hosts=xpool.ray.hosts(per_host=2, resources={"losses": 1}), **options)
        assert len(pool.run_all(os.getpid)) == 4
        eventually(lambda: len(workers(pool, self.victim)) == 2, "the workers are known", WAIT)
        return pool


@pytest.fixture(scope="module")
def hosts(cluster, warm):
    """Two more hosts."""
    stage = Stage(cluster)
    yield stage
    for node in (stage.safe, stage.victim):
        cluster.remove(node)


@pytest.fixture
def stage(hosts):
    """Two running hosts."""
    hosts.whole()
    return hosts


def write(path, *words):
    log_line(path, " ".join(map(str, words)))


def work(path, seconds, i):
    """Log when the task begins, that it still runs, and when it ends."""
    begin = time.monotonic()
    write(path, i, os.getpid(), "begin", begin)
    while (now := time.monotonic()) < begin + seconds:
        write(path, i, os.getpid(), "goes", now)
        time.sleep(min(0.02, seconds))
    write(path, i, os.getpid(), "end", time.monotonic())
    return i


def history(path):
    """Return the runs of each task: (begin, last seen, whether it ended)."""
    runs = defaultdict(list)
    for line in Path(path).read_text().splitlines() if os.path.exists(path) else ():
        i, pid, what, when = line.split()
        of = runs[int(i)]
        if what == "begin":
            of.append([int(pid), float(when), float(when), False])
        else:
            run = next(run for run in reversed(of) if run[0] == int(pid))
            run[2], run[3] = float(when), what == "end"
    return runs


def check(path, results, tries, victim):
    """Compare the runs with the results. Return the errors."""
    runs = history(path)
    errors = {}
    for i, found in enumerate(results):
        if isinstance(found, BaseException):
            errors[i] = found
            assert isinstance(found, (WorkerDied, TaskTimeout)), found
            assert address(victim) in found.host and found.host in str(found)
        else:
            assert found == i
            assert runs[i][-1][3], f"task {i} was answered before its end"
        assert len(runs[i]) <= tries, f"task {i} was begun {len(runs[i])} times"
        for before, after in zip(runs[i], runs[i][1:]):
            assert before[2] < after[1], f"task {i} ran twice at once: {before}, {after}"
    return errors


def strike(what, how, stage, pool):
    """Kill or stop a worker, the agent or the raylet of the victim. Return a function that undoes
    it."""
    victims = workers(pool, stage.victim)
    pid = {
        "worker": lambda: victims[0],
        "agent": lambda: agent(victims[0]),
        "raylet": lambda: raylet(stage.victim),
    }[what]()
    os.kill(pid, how)
    if how == signal.SIGSTOP:
        return functools.partial(goes_on, pid)
    if what == "raylet":
        return lambda: stage.cluster.remove(stage.victim)
    return lambda: None


def goes_on(pid):
    """Continue a stopped process, unless it has been killed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


CELLS = [
    ("worker", signal.SIGKILL, "running"),
    ("agent", signal.SIGKILL, "running"),
    ("raylet", signal.SIGKILL, "running"),
    ("agent", signal.SIGKILL, "staged"),
    ("raylet", signal.SIGSTOP, "running"),
    ("agent", signal.SIGSTOP, "staged"),
    ("agent", signal.SIGKILL, "idle"),
    *also(
        ("worker", signal.SIGKILL, "idle"),
        ("worker", signal.SIGKILL, "staged"),
        ("worker", signal.SIGSTOP, "running"),
        ("worker", signal.SIGSTOP, "staged"),
        ("worker", signal.SIGSTOP, "idle"),
        ("agent", signal.SIGSTOP, "idle"),
        ("agent", signal.SIGSTOP, "running"),
        ("raylet", signal.SIGKILL, "idle"),
        ("raylet", signal.SIGKILL, "staged"),
        ("raylet", signal.SIGSTOP, "idle"),
        ("raylet", signal.SIGSTOP, "staged"),
    ),
]


@pytest.mark.parametrize(("what", "how", "when"), CELLS)
def test_a_loss(stage, tmp_path, what, how, when):
    """Each task gets one answer. Without retries, none begins twice, and only those fail that may
    have run on the lost host. With retries, none fails or runs twice at the same time."""
    once, again = str(tmp_path / "once"), str(tmp_path / "again")
    n, seconds = {"idle": (8, 0.01), "running": (2, 1.0), "staged": (150, 0.02)}[when]
    limit = 8 if what == "worker" and how == signal.SIGSTOP else None
    options = {"chunksize": 1, "timeout": limit, "on_error": "return"}
    undo = None
    pool = stage.pool()
    try:
        pids = workers(pool, stage.victim)
        pids += [agent(pids[0])]
        # The pool learns how long the tasks are, so it sends many ahead.
        if when == "staged":
            pool.starmap(work, [(once + ".before", seconds, i) for i in range(20)], 1)
        if when == "idle":
            undo = strike(what, how, stage, pool)
        first = pool.starmap_async(work, [(once, seconds, i) for i in range(n)], **options)
        second = pool.starmap_async(
            work, [(again, seconds, i) for i in range(n)],
            retries=3, retry_on=TaskTimeout, **options,
        )  # fmt: skip
        if when != "idle":
            eventually(
                lambda: any(run[0] in pids for runs in history(once).values() for run in runs)
                or any(run[0] in pids for runs in history(again).values() for run in runs),
                "a task runs on the victim", WAIT,
            )  # fmt: skip
            undo = strike(what, how, stage, pool)
        lost = check(once, first.get(WAIT), 1, stage.victim)
        assert not check(again, second.get(WAIT), 4, stage.victim)
        if what == "worker":
            assert len(lost) <= (1 if how == signal.SIGKILL else 2)
        else:
            assert all(type(error) is HostLost for error in lost.values())
            assert len(lost) <= (2 if when == "running" else 20)
        if what == "agent":
            assert wait_gone(pids) == []
            why = "died" if how == signal.SIGKILL else f"its agent has not replied for {LEASE:g} s"
            assert all(why in error.reason for error in lost.values())
    finally:
        if undo is not None:
            undo()
        pool.terminate()
        pool.join()
    assert wait_gone(pids) == []


def test_a_host_that_joins(stage, tmp_path):
    """A host that joins the cluster while a pool works gets tasks."""
    path = str(tmp_path / "log")
    with stage.pool() as pool:
        result = pool.starmap_async(work, [(path, 0.02, i) for i in range(2000)], chunksize=1)
        new = stage.cluster.add(losses=100)
        try:
            pids = eventually(lambda: len(p := workers(pool, new)) == 2 and p, "a host joins", WAIT)
            eventually(
                lambda: any(run[0] in pids for runs in history(path).values() for run in runs),
                "a task runs on the new host", WAIT,
            )  # fmt: skip
            assert result.get(WAIT) == list(range(2000))
            assert len(pool.statistics()["hosts"]) == 3
        finally:
            pool.terminate()
            pool.join()
            stage.cluster.remove(new)


def test_an_agent_that_dies_is_replaced(stage, tmp_path):
    """A host whose agent dies gets another agent, even if it is the only host. Tasks with retries
    run there. After several such deaths, the host gets no more agents."""
    import xpool.ray
    from xpool._hosts import ray_fleet

    only = xpool.ray.hosts(per_host=1, resources={"losses": 1}, n=1)
    with Pool(hosts=only) as pool:
        for n in range(ray_fleet.REPLACED + 1):
            path = str(tmp_path / str(n))
            calls = [pool.apply_async(work, (path, 0.5, i), retries=8) for i in range(4)]
            worker = eventually(
                lambda p=path: [run[0] for runs in history(p).values() for run in runs],
                "one runs", WAIT,
            )[0]  # fmt: skip
            os.kill(agent(worker), signal.SIGKILL)
            if n < ray_fleet.REPLACED:
                assert [call.get(WAIT) for call in calls] == list(range(4))
        for call in calls:
            with pytest.raises(Exception, match="The pool has lost its last host"):
                call.get(WAIT)


def test_an_agent_that_does_not_answer_is_replaced(stage):
    """A host whose agent stops for longer than the lease gets another agent, even if it is the only
    host."""
    import xpool.ray

    with Pool(hosts=xpool.ray.hosts(per_host=1, resources={"losses": 1}, n=1)) as pool:
        stopped = agent(pool.apply_async(os.getpid).get(WAIT))
        os.kill(stopped, signal.SIGSTOP)
        try:
            call = pool.apply_async(os.getpid, retries=1)
            lost = pool.apply_async(os.getpid)
            assert agent(call.get(WAIT)) != stopped
            with pytest.raises(HostLost, match="has not replied"):
                lost.get(WAIT)
            assert pool.apply_async(abs, (-1,)).get(WAIT) == 1
        finally:
            goes_on(stopped)
    assert wait_gone([stopped]) == []


@pytest.mark.parametrize(
    ("where", "joins"), [({}, True), ({"total": 2}, False), ({"n": 1}, False)], ids=str
)
def test_which_pools_grow(monkeypatch, where, joins):
    """A host that joins gets an agent, unless the pool has a number of hosts or processes."""
    from xpool._hosts import ray_fleet
    from xpool.ray import Hosts

    first, second = (ray_fleet.Node(name, name, 2, 2) for name in ("first", "second"))
    fleet = ray_fleet.RayFleet(Hosts(**where), [first], None)
    fleet._agents["first"] = 1
    monkeypatch.setattr(ray_fleet, "_draining", dict)
    monkeypatch.setattr(Hosts, "living", lambda self: [second, first])
    added = []
    monkeypatch.setattr(fleet, "_add", added.append)
    fleet._look_at_hosts()
    assert added == [second] * joins


def test_an_end_that_is_reported_twice(stage, monkeypatch):
    """While an agent is being replaced, a second failed call to it does not report a lost host."""
    from xpool._hosts import ray_fleet

    node = ray_fleet.Node("an id", "a name", 1, 1)
    fleet = ray_fleet.RayFleet(None, [node], None)
    fleet._nodes[0] = node
    events = []
    fleet._tell = events.append

    def add(_):
        fleet._dead(0, "a second call has failed")
        fleet._tell("coming")

    monkeypatch.setattr(fleet, "_add", add)
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "an id", "Alive": True}])
    fleet._replace(0)
    assert events == ["coming"] and fleet._ends.get_nowait()[0] == 0


def where(_):
    return xpool.current_worker().host


def test_a_host_that_drains(stage):
    """A host that the cluster reports as draining gets no more tasks."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    with stage.pool() as pool:
        assert any(address(stage.victim) in host for host in pool.run_all(where, 0))
        deadline = int(time.time() * 1000) + 600_000
        accepted, why = GcsClient(address=stage.cluster.address).drain_node(
            stage.victim.node_id,
            DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "a test",
            deadline,
        )
        assert accepted, why
        eventually(
            lambda: all(address(stage.safe) in host for host in pool.map(where, range(40), 1)),
            "tasks go to the other host", WAIT,
        )  # fmt: skip
        assert {address(stage.safe) in host for host in pool.map(where, range(200), 1)} == {True}
    stage.cluster.remove(stage.victim)


def test_all_hosts_go(stage, tmp_path):
    """If all hosts are gone, each task fails at once, and the pool ends."""
    import xpool.ray

    stage_only = stage.cluster.add(alone=1)
    pool = Pool(hosts=xpool.ray.hosts(per_host=1, resources={"alone": 1}))
    results = [pool.apply_async(work, (str(tmp_path / "log"), 60, i)) for i in range(3)]
    eventually(lambda: history(tmp_path / "log"), "one runs", WAIT)
    stage.cluster.remove(stage_only)
    for result in results:
        with pytest.raises(Exception, match="lost|The pool has lost its last host"):
            result.get(WAIT)
    with pytest.raises(Exception, match="The pool has lost its last host"):
        pool.apply_async(abs, (1,)).get(WAIT)
    pool.close()
    pool.join()


DRIVER = """
import os, sys, time
from support import clusters
from xpool import Pool
import xpool.ray
from hosts.test_losses import work

if __name__ == "__main__":
    clusters.connect({address!r})
    pool = Pool(hosts=xpool.ray.hosts(per_host=2, resources={{"losses": 1}}))
    pool.run_all(os.getpid)
    result = pool.starmap_async(work, [({path!r}, {seconds}, i) for i in range(40)], 1)
    while len(pool.statistics()["pids"]) < 4:
        time.sleep(0.05)
    print(*pool.statistics()["pids"], flush=True)
    sys.stdin.readline()
    try:
        print("all", len(result.get(60)))
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_the_object_store_is_full(stage):
    """A large array waits for room in Ray's object store, even longer than the lease. No host is
    lost."""
    import numpy
    import ray

    mib = 1 << 20
    array = numpy.ones(mib // 2)  # 4 MiB
    # These arrays are in use, so Ray cannot move them to the disk.
    held = ray.get([ray.put(numpy.ones(mib // 8)) for _ in range(196)])
    with stage.pool() as pool:
        assert [back[-1] for back in pool.imap(abs, [array] * 16)] == [1] * 16
    assert len(held) == 196


@pytest.mark.parametrize("seconds", [30, *also(0.05)])
def test_the_driver_is_killed(stage, tmp_path, seconds):
    """After the driver's death, none of its pool's processes is left. The hosts stay usable."""
    path = str(tmp_path / "log")
    text = DRIVER.format(address=stage.cluster.address, path=path, seconds=seconds)
    with scripts.popen([scripts.write(tmp_path / "driver.py", text)]) as driver:
        pids = {int(pid) for pid in driver.stdout.readline().split()}
        assert len(pids) == 4
        pids |= {parent(pid) for pid in pids} | {agent(pid) for pid in pids}
        driver.kill()
    assert wait_gone(pids) == []
    with stage.pool() as pool:
        assert pool.map(abs, range(20)) == list(range(20))


def test_the_driver_stops_for_longer_than_its_lease(stage, tmp_path):
    """If the driver is stopped beyond its lease, its agents end. When it continues, the hosts are
    lost."""
    path = str(tmp_path / "log")
    text = DRIVER.replace("range(40)", "range(4)")
    text = text.format(address=stage.cluster.address, path=path, seconds=30).replace(
        "if __name__", f"xpool._hosts.hosts_engine.LEASE = {LEASE}\n\nif __name__"
    )
    text = "import xpool._hosts.hosts_engine\n" + text
    with scripts.popen([scripts.write(tmp_path / "driver.py", text)]) as driver:
        pids = {int(pid) for pid in driver.stdout.readline().split()}
        agents = {agent(pid) for pid in pids}
        driver.send_signal(signal.SIGSTOP)
        try:
            assert wait_gone(pids | agents) == []
        finally:
            driver.send_signal(signal.SIGCONT)
        out, err = driver.communicate("\n", WAIT)
    assert "HostLost Host" in out and "is lost" in out, out + err
