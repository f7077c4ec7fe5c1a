"""`worker_memory` and `memory_high`."""

import os
import shutil
import sys
import threading
from types import SimpleNamespace

import pytest
from support import work
from support.waiting import Mailbox, eventually

from xpool import Pool, PoolBroken, PoolClosed, PoolStates, WorkerDied
from xpool._engine import memory
from xpool._engine.jobs.scheduler import Scheduler
from xpool._engine.memory import MemoryLimits
from xpool._memory import system
from xpool._memory.system import Scope

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it takes /proc")

MB, MIB = 1_000_000, 1 << 20


def _swell(size):
    kept = bytearray(size)
    if size > 100 * MB:
        threading.Event().wait()
    return len(kept)


def test_a_worker_beyond_its_limit_is_ended():
    """A task whose worker exceeds its limit fails with `WorkerDied`. The other tasks are done. The
    record of the worker's end has the reason, too."""
    ends = []
    with Pool(2, worker_memory=600 * MB, on_worker_end=ends.append) as pool:
        results = pool.map(_swell, [MB, 1000 * MB, MB, MB], 1, on_error="return")
        assert [type(one) for one in results] == [int, WorkerDied, int, int]
        assert "worker_memory= allows 600 MB" in str(results[1])
        assert "retries=n" in str(results[1])
        assert pool.map(_swell, [MB] * 4, 1) == [MB] * 4
        assert pool.report().deaths == 1
    assert ends[0].reason == "died" and "worker_memory= allows 600 MB" in ends[0].text


_kept = []


def _keep(size):
    _kept.append(bytearray(size))


@pytest.mark.exhaustive
def test_an_initializer_that_takes_too_much():
    """If an initializer exceeds the limit, the pool stops with the reason."""
    with Pool(1, _keep, (1000 * MB,), worker_memory=600 * MB, restart_budget=2) as pool:
        with pytest.raises((WorkerDied, PoolBroken)):
            pool.map(work.sleep_long, [1])
        eventually(lambda: pool.state is not PoolStates.RUN, "the pool has stopped")
        with pytest.raises(PoolClosed, match="PoolBroken|died"):
            pool.map(work.square, [1])


def test_memory_high(monkeypatch, tmp_path):
    """While memory is short, one task runs at a time. Later all workers run tasks again."""
    used = [0.99]
    monkeypatch.setattr(memory, "fullest_scope", lambda: Scope(10 << 30, int(used[0] * (10 << 30))))
    box = Mailbox(tmp_path / "box")
    with Pool(2, memory_high=0.9) as pool:
        pool.map(work.square, [1, 2], 1)
        results = [pool.apply_async(work.post_and_spin, (box.path,)) for _ in range(2)]
        box.line()
        assert pool.statistics()["running"] == 1
        eventually(lambda: pool.statistics()["waiting"] == 1, "the other waits")
        used[0] = 0.5
        box.line()
        assert pool.statistics()["running"] == 2
        for one in results:
            one.cancel()
        used[0] = 0.99
        assert pool.map(work.square, range(50), 1) == [x * x for x in range(50)]
    box.close()


def test_the_largest_is_ended_when_memory_is_full(monkeypatch):
    """Each check ends one of the workers that use much memory, but no small worker."""
    sizes = {1: 10 << 20, 2: 900 << 20, 3: 500 << 20, 4: 950 << 20}
    states = {4: SimpleNamespace(serves=False)}
    workers = [
        SimpleNamespace(index=pid, pid=pid, state=states.get(pid, SimpleNamespace(serves=True)))
        for pid in sizes
    ]
    monkeypatch.setattr(memory, "private_memory", sizes.__getitem__)
    used, ended, looks = [0.5], [], []
    reactor = SimpleNamespace(now=lambda: 0.0, call_at=lambda when, look: looks.append(look))

    def end(worker, remark):
        ended.append((worker.pid, remark))
        worker.state = SimpleNamespace(serves=False)

    monkeypatch.setattr(memory, "fullest_scope", lambda: Scope(10 << 30, int(used[0] * (10 << 30))))
    full = MemoryLimits(full=0.9)
    parts = SimpleNamespace(workers=workers, sched=Scheduler(4), reactor=reactor, ledger=None)
    memory.MemoryGuard(parts, full, end, lambda: None)
    assert ended == []
    used[0] = 0.95
    for _ in range(3):
        looks.pop()()
    assert [pid for pid, _ in ended] == [2, 3]
    assert "944 MB" in ended[0][1] and "90% of the 10.7 GB" in ended[0][1]


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A function that writes the kernel's files on memory."""
    monkeypatch.setattr(system, "_CGROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(system, "_PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1 << 20, "SC_PHYS_PAGES": 64_000}.get)

    def write(files):
        shutil.rmtree(tmp_path / "cgroup", ignore_errors=True)
        for name, text in {"proc/meminfo": f"MemAvailable: {32_000 << 10} kB\n", **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def version_2(folder, most, used, cache):
    """Return the files of a cgroup of version 2. The numbers are in MiB."""
    return {
        f"cgroup/{folder}memory.max": "max\n" if most is None else f"{most * MIB}\n",
        f"cgroup/{folder}memory.current": f"{used * MIB}\n",
        f"cgroup/{folder}memory.stat": f"anon 5\nfile 7\ninactive_file {cache * MIB}\n",
    }


def version_1(folder, most, used, cache):
    """Return the files of a cgroup of version 1. The numbers are in MiB."""
    return {
        f"cgroup/memory/{folder}memory.limit_in_bytes": f"{most * MIB}\n",
        f"cgroup/memory/{folder}memory.usage_in_bytes": f"{used * MIB}\n",
        f"cgroup/memory/{folder}memory.stat": f"cache 7\ntotal_inactive_file {cache * MIB}\n",
    }


@pytest.mark.pure
@pytest.mark.parametrize(
    ("of", "own"), [(version_2, "0::/\n"), (version_1, "4:cpu,memory:/\n0::/\n")]
)
def test_a_cgroups_file_cache_is_free(cgroups, of, own):
    """The cache of files that were read counts as free memory."""
    cgroups({"proc/self/cgroup": own, **of("", 8000, 7900, 6000)})
    assert system.fullest_scope() == (64_000 * MIB, 32_000 * MIB)  # half of the machine's memory
    assert system.available_memory() == 6100 * MIB
    cgroups({"proc/self/cgroup": own, **of("", 8000, 7900, 0)})
    assert system.fullest_scope() == (8000 * MIB, 7900 * MIB)
    assert system.available_memory() == 100 * MIB
    # The kernel does not count both numbers at the same time.
    cgroups({"proc/self/cgroup": own, **of("", 8000, 10, 20)})
    assert system.available_memory() == 8000 * MIB


@pytest.mark.pure
@pytest.mark.parametrize(("of", "own"), [(version_2, "0::/a/b\n"), (version_1, "4:memory:/a/b\n")])
def test_limits_of_groups_around_it_count(cgroups, of, own):
    """The limits of a process's cgroup and of its parents count. A missing folder has no limit."""
    cgroups({"proc/self/cgroup": own, **of("a/b/", 8000, 100, 0), **of("a/", 4000, 3900, 0)})
    assert system.fullest_scope() == (4000 * MIB, 3900 * MIB)
    assert system.available_memory() == 100 * MIB
    cgroups({"proc/self/cgroup": own, **of("", 2000, 1900, 0)})  # in a container
    assert system.available_memory() == 100 * MIB
    cgroups({"proc/self/cgroup": own})
    assert system.available_memory() == 32_000 * MIB


@pytest.mark.pure
def test_which_limit_of_a_cgroup(cgroups):
    """`max` or a limit above the machine's memory is no limit. The smaller limit counts."""
    cgroups({"proc/self/cgroup": "0::/\n", **version_2("", None, 7900, 0)})
    assert system.fullest_scope().total == 64_000 * MIB
    # Beyond `memory.high`, the kernel slows a process down.
    high = {"cgroup/memory.high": f"{8000 * MIB}\n"}
    cgroups({"proc/self/cgroup": "0::/\n", **version_2("", 9000, 7900, 0), **high})
    assert system.fullest_scope() == (8000 * MIB, 7900 * MIB)
    cgroups({"proc/self/cgroup": "1:memory:/\n", **version_1("", 1 << 40, 7900, 0)})
    assert system.fullest_scope().total == 64_000 * MIB


@pytest.mark.pure
def test_kills_of_the_kernel(cgroups):
    """The cgroup of the process says how many; if it does not, the machine does."""
    own = {"proc/self/cgroup": "0::/a/b\n", "proc/vmstat": "pgfault 7\noom_kill 9\n"}
    cgroups(own)
    assert system.oom_kills() == 9
    cgroups({**own, "cgroup/a/b/memory.events": "low 0\noom 5\noom_kill 3\n"})
    assert system.oom_kills() == 3
    first = {"cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 4\n"}
    cgroups({"proc/self/cgroup": "4:memory:/a\n", **first})
    assert system.oom_kills() == 4
    cgroups({"proc/self/cgroup": "0::/a\n", "proc/vmstat": "pgfault 7\n"})
    assert system.oom_kills() == 0


@pytest.mark.pure
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("quota", "cores"),
    [(None, 8), (50_000, 1), (100_000, 1), (150_000, 2), (900_000, 8)],
)
def test_a_quota_of_cores(cgroups, monkeypatch, version, quota, cores):
    """A pool has a worker for each core of its container's quota, rounded up; at most one for each
    core that the process may use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    if version == 2:
        text = f"{'max' if quota is None else quota} 100000\n"
        cgroups({"proc/self/cgroup": "0::/a/b\n", "cgroup/a/cpu.max": text})
    else:
        folder = "cgroup/cpu/a/"
        cgroups({
            "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
            f"{folder}cpu.cfs_quota_us": f"{-1 if quota is None else quota}\n",
            f"{folder}cpu.cfs_period_us": "100000\n",
        })  # fmt: skip
    assert system.default_processes() == cores
