"""After a death for lack of memory, the next try of the task runs while no other task does. Other
tasks of its function begin if the memory is enough."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import work
from support.waiting import eventually, pass_gate, post

from xpool import P2PPool, Pool, WorkerDied
from xpool._engine import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it takes /proc")

MB = 1_000_000


class Machine:
    """The memory of the machine, which the test decides."""

    def __init__(self) -> None:
        self.kills = 0
        self.free = 10_000 * MB
        self.sizes: dict[int, int] = {}  # by pid

    def kill(self, pid: int) -> None:
        """The kernel kills a process for lack of memory."""
        self.kills += 1
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def machine(monkeypatch):
    one = Machine()
    monkeypatch.setattr(memory, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(memory, "oom_kills", lambda: one.kills)
    monkeypatch.setattr(memory, "available_memory", lambda part: one.free)
    monkeypatch.setattr(memory, "private_memory", lambda pid: one.sizes.get(pid, 10 * MB))
    return one


@pytest.fixture
def weighed(monkeypatch):
    """The private memory of workers, as the pool has found it."""
    found, weigh = [], memory.private_memory
    monkeypatch.setattr(memory, "POLL_SECONDS", 0.01)

    def private_memory(pid):
        found.append(weigh(pid))
        return found[-1]

    monkeypatch.setattr(memory, "private_memory", private_memory)
    return found


# -- alone -----------------------------------------------------------------------------------------

_kept = []


def _short(log, x):
    work.log_line(log, f"begin {x}")
    work.log_line(log, f"end {x}")
    return x


def _large(log, box, gate, *, keep=False):
    """Take 650 MB.  The first try is killed; the second waits at the gate."""
    again = not work.first(f"{log}.tried")
    if again:
        work.log_line(log, "begin heavy")
    block = bytearray(650 * MB)
    if keep:
        _kept.append(block)
    if again:
        post(box, "swollen")
    pass_gate(gate)
    if again:
        work.log_line(log, "end heavy")
    return os.getpid()


def test_the_next_try_has_the_memory_of_all_workers(mailbox, gate, weighed, tmp_path):
    """The next try begins when no task runs, may have more than one worker, and others wait."""
    log = str(tmp_path / "log")
    with Pool(2, worker_memory=600 * MB) as pool:
        heavy = pool.apply_async(_large, (log, mailbox.path, gate.path), retries=1)
        others = pool.starmap_async(_short, [(log, x) for x in range(40)], 1)
        mailbox.line()
        late = pool.apply_async(_short, (log, "late"))
        n = len(weighed)
        eventually(lambda: sum(x > 600 * MB for x in weighed[n:]) > 3, "it is weighed")
        counts = pool.statistics()
        assert counts["running"] == 1 and counts["waiting"] >= 1 and not late.ready()
        gate.open()
        heavy.get()
        assert others.get() == list(range(40)) and late.get() == "late"
        report = pool.report()
        assert report.deaths == 1 == report.retries
        assert next(iter(report.peaks)) == "_large()"
        assert report.peaks["_large()"] == max(weighed) > 650 * MB
        assert " MB of memory at most in _large()" in str(report)
    lines = (tmp_path / "log").read_text().splitlines()
    at = lines.index("begin heavy")
    assert lines[at + 1] == "end heavy"
    assert sum(line.startswith("end") for line in lines[:at]) * 2 == at


def test_a_worker_that_keeps_the_memory_is_replaced(mailbox, gate, weighed, tmp_path):
    """It ends after the task, and no other task is lost."""
    log = str(tmp_path / "log")
    with Pool(2, worker_memory=600 * MB) as pool:
        heavy = pool.apply_async(_large, (log, mailbox.path, gate.path), {"keep": True}, retries=1)
        mailbox.line()
        others = pool.map_async(work.pid, range(40), 1)
        gate.open()
        assert heavy.get() not in others.get()
        assert pool.report().deaths == 1


def _take(size):
    kept = bytearray(size)
    pass_gate(os.environ["NEVER"])
    return len(kept)


def test_a_second_death(gate, monkeypatch):
    """A task that dies alone, too, fails at once; the error says that it was alone."""
    monkeypatch.setenv("NEVER", gate.path)
    with Pool(2, worker_memory=600 * MB) as pool:
        died = pool.apply_async(_take, (1300 * MB,), retries=9)
        assert pool.map(work.square, range(40), 1) == [x * x for x in range(40)]
        with pytest.raises(WorkerDied, match="It ran alone: no other worker") as caught:
            died.get()
        assert caught.value.killed == 2
        assert "MB, and 2 times as much for a task alone" in str(caught.value)
        assert "run it alone" not in str(caught.value)
        assert pool.report().deaths == 2
        assert pool.map(work.square, range(40), 1) == [x * x for x in range(40)]


def test_the_kernel_kills_a_worker(mailbox, gate, machine):
    """The kernel counts its kills; after one, the next try is alone."""
    with Pool(2) as pool:
        heavy = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), retries=3)
        machine.kill(int(mailbox.line()))
        mailbox.line()
        other = pool.map_async(work.square, range(40), 1)
        assert pool.statistics()["running"] == 1
        assert not other.ready()
        gate.open()
        heavy.get()
        assert other.get() == [x * x for x in range(40)]
        with pytest.raises(WorkerDied, match="The kernel ended it, because memory was short"):
            lost = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
            machine.kill(int(mailbox.line()))
            lost.get()


def test_another_kill_is_no_lack_of_memory(mailbox, gate, machine):
    """After a SIGKILL that the kernel does not count, others run beside the next try."""
    with Pool(2) as pool:
        heavy = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), retries=1)
        os.kill(int(mailbox.line()), signal.SIGKILL)
        mailbox.line()
        assert pool.map(work.square, range(40), 1) == [x * x for x in range(40)]
        gate.open()
        heavy.get()


def test_tasks_of_certain_workers_run_again_beside_others(mailbox, gate, machine):
    """Tasks that are bound to a worker do not run alone, because they may wait for each other."""
    with P2PPool(2) as pool:
        heavy = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), retries=1)
        machine.kill(int(mailbox.line()))
        mailbox.line()
        other = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
        mailbox.line()
        gate.open(2)
        heavy.get()
        other.get()


# -- by memory -------------------------------------------------------------------------------------


def _heavy(one):
    box, gate, x = one
    post(box, str(os.getpid()))
    pass_gate(gate)
    return x


def _heavy_of(pool):
    return pool._engine.sched.heavy


@pytest.fixture
def tight(machine, mailbox, gate):
    """A function that has a task die for lack of memory; later, tasks need 1000 MB more than their
    workers have, and so many MB are free."""

    def make(pool, free):
        pool.map(work.square, range(8), 1)  # all workers have started
        machine.free = 0
        result = pool.apply_async(_heavy, ((mailbox.path, gate.path, 0),), retries=1)
        machine.kill(int(mailbox.line()))
        pid = int(mailbox.line())
        machine.sizes[pid] = 1010 * MB
        heavy = _heavy_of(pool)
        eventually(lambda: heavy.needs == {"_heavy()": 1010 * MB}, "its memory is measured")
        gate.open()
        result.get()
        machine.sizes.clear()
        eventually(lambda: {*heavy._sizes.values()} == {10 * MB}, "all workers have ended it")
        machine.free = free * MB
        eventually(lambda: heavy._free == machine.free, "it is measured")

    return make


def _items(mailbox, gate, n):
    return [(mailbox.path, gate.path, x) for x in range(n)]


@pytest.fixture
def begun(machine, mailbox):
    """A function that waits until so many tasks have begun, and until their memory is measured."""

    def wait(pool, n, size=1010):
        pids = [int(line) for line in mailbox.lines(n)]
        machine.sizes |= dict.fromkeys(pids, size * MB)
        workers = [one.index for one in pool.report().workers if one.pid in pids]
        latest = _heavy_of(pool)._latest
        seen = [size * MB] * n
        eventually(lambda: [latest.get(w, (0, 0, 0))[2] for w in workers] == seen, "it is measured")
        return pids

    return wait


def _running(pool, n):
    eventually(lambda: pool.statistics()["running"] == n, f"{n} tasks run")


@pytest.mark.parametrize("verb", ["map", "imap", "apply", "threads"])
def test_as_many_as_fit_run_at_a_time(machine, mailbox, gate, tight, begun, verb):
    """Where three tasks fit in the free memory, three of four workers run one."""
    with Pool(4) as pool:
        tight(pool, free=3100)
        items = _items(mailbox, gate, 9)
        found: Any
        if verb == "map":
            found = pool.map_async(_heavy, items, chunksize=1)
        elif verb == "imap":
            found = pool.imap(_heavy, items)
        elif verb == "apply":
            found = [pool.apply_async(_heavy, (one,)) for one in items]
        else:
            callers = ThreadPoolExecutor(9)
            found = [callers.submit(pool.apply, _heavy, (one,)) for one in items]
        _running(pool, 3)
        machine.free = 100 * MB  # as soon as the three have taken it
        pids = begun(pool, 3)
        assert len(set(pids)) == 3
        for _ in range(6):
            assert pool.statistics()["running"] == 3
            assert mailbox.empty()
            gate.open()
            assert begun(pool, 1)[0] in pids
        for left in (2, 1, 0):
            gate.open()
            _running(pool, left)
        if verb == "map":
            got = found.get()
        elif verb == "threads":
            got = [one.result() for one in found]
            callers.shutdown()
        else:
            got = list(found) if verb == "imap" else [one.get() for one in found]
        assert got == list(range(9))
        assert pool.report().deaths == 1


def test_without_retries_nothing_changes(machine, mailbox, gate):
    """A task that is not retried makes its function no heavy one."""
    with Pool(2) as pool:
        machine.free = 0
        lost = pool.apply_async(_heavy, ((mailbox.path, gate.path, 0),))
        machine.kill(int(mailbox.line()))
        with pytest.raises(WorkerDied, match="The kernel ended it"):
            lost.get()
        found = pool.map_async(_heavy, _items(mailbox, gate, 4), chunksize=1)
        assert len(set(mailbox.lines(2))) == 2
        gate.open(4)
        found.get()
        assert not _heavy_of(pool).needs


def _swell(box, gate, x, size=560):
    block = bytearray(size * MB)
    post(box, str(os.getpid()))
    pass_gate(gate)
    return x if block else 0


def _skip_with_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        pytest.skip("a worker that imports CUDA's torch needs more memory than these limits allow")


def test_workers_divide_the_limits_of_all(mailbox, gate, monkeypatch):
    """Where a worker may have 400 MB, tasks of 560 MB run two at a time in four workers.

    A worker that has imported torch needs up to 200 MB more.
    """
    _skip_with_cuda()
    monkeypatch.setattr(memory, "POLL_SECONDS", 0.01)
    with Pool(4, worker_memory=400 * MB) as pool:
        first = pool.apply_async(_swell, (mailbox.path, gate.path, 7), retries=1)
        eventually(lambda: pool.report().deaths == 1, "its worker is ended")
        eventually(lambda: pool.report().peaks["_swell()"] > 560 * MB, "it runs again")
        gate.open()
        assert first.get() == 7
        while not mailbox.empty():  # the first try may have posted
            mailbox.line()
        found = pool.starmap_async(_swell, [(mailbox.path, gate.path, x) for x in range(4)], 1)
        latest = _heavy_of(pool)._latest
        for _ in range(2):
            mailbox.lines(2)
            eventually(lambda: all(seen > 560 * MB for *_, seen in latest.values()), "measured")
            assert pool.statistics()["running"] == 2 and mailbox.empty()
            gate.open(2)
        assert found.get() == list(range(4))
        assert pool.map(work.square, range(20), 1) == [x * x for x in range(20)]
        assert pool.report().deaths == 1


def _runs_twice(pool, mailbox, gate, deaths, size):
    """Run a task whose worker is ended, and which then runs alone."""
    result = pool.apply_async(_swell, (mailbox.path, gate.path, size, size), retries=1)
    eventually(lambda: pool.report().deaths == deaths, "its worker is ended")
    eventually(lambda: pool.report().peaks["_swell()"] > size * MB, "it runs again")
    gate.open()
    assert result.get() == size


@pytest.mark.exhaustive
def test_a_larger_task_of_such_a_function(mailbox, gate, monkeypatch):
    """If it needs more than its part of all limits, it runs again alone."""
    _skip_with_cuda()
    monkeypatch.setattr(memory, "POLL_SECONDS", 0.01)
    with Pool(4, worker_memory=400 * MB) as pool:
        _runs_twice(pool, mailbox, gate, 1, 560)
        _runs_twice(pool, mailbox, gate, 2, 1000)
        with pytest.raises(WorkerDied, match="MB for this function, of which fewer tasks run"):
            pool.apply(_swell, (mailbox.path, gate.path, 3, 1700))
