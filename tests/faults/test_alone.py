"""After a death for lack of memory, the next try of a task runs while no other task does."""

import os
import signal
import sys

import pytest
from support import work
from support.waiting import eventually, pass_gate, post

from xpool import P2PPool, Pool, WorkerDied
from xpool._engine import memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it takes /proc")

MB = 1_000_000


@pytest.fixture
def kills(monkeypatch):
    """The number of processes that the kernel has killed, which the test changes."""
    count = [7]
    monkeypatch.setattr(memory, "oom_kills", lambda: count[0])
    return count


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


_kept = []


def _short(log, x):
    work.log_line(log, f"begin {x}")
    work.log_line(log, f"end {x}")
    return x


def _heavy(log, box, gate, *, keep=False):
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
        heavy = pool.apply_async(_heavy, (log, mailbox.path, gate.path), retries=1)
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
        assert next(iter(report.peaks)) == "_heavy()"
        assert report.peaks["_heavy()"] == max(weighed) > 650 * MB
        assert " MB of memory at most in _heavy()" in str(report)
    lines = (tmp_path / "log").read_text().splitlines()
    at = lines.index("begin heavy")
    assert lines[at + 1] == "end heavy"
    assert sum(line.startswith("end") for line in lines[:at]) * 2 == at


def test_a_worker_that_keeps_the_memory_is_replaced(mailbox, gate, weighed, tmp_path):
    """It ends after the task, and no other task is lost."""
    log = str(tmp_path / "log")
    with Pool(2, worker_memory=600 * MB) as pool:
        heavy = pool.apply_async(_heavy, (log, mailbox.path, gate.path), {"keep": True}, retries=1)
        mailbox.line()
        others = pool.map_async(work.pid, range(40), 1)
        gate.open()
        assert heavy.get() not in others.get()
        assert pool.report().deaths == 1


def _swell(size):
    kept = bytearray(size)
    pass_gate(os.environ["NEVER"])
    return len(kept)


def test_a_second_death(gate, monkeypatch):
    """A task that dies alone, too, fails at once; the error says that it was alone."""
    monkeypatch.setenv("NEVER", gate.path)
    with Pool(2, worker_memory=600 * MB) as pool:
        died = pool.apply_async(_swell, (1300 * MB,), retries=9)
        assert pool.map(work.square, range(40), 1) == [x * x for x in range(40)]
        with pytest.raises(WorkerDied, match="It ran alone: no other worker") as caught:
            died.get()
        assert caught.value.killed == 2
        assert "MB, and 2 times as much for a task alone" in str(caught.value)
        assert "run it alone" not in str(caught.value)
        assert pool.report().deaths == 2
        assert pool.map(work.square, range(40), 1) == [x * x for x in range(40)]


def _killed(mailbox, kills):
    """The kernel kills the worker whose pid is next in the mailbox."""
    pid = int(mailbox.line())
    kills[0] += 1
    os.kill(pid, signal.SIGKILL)
    return pid


def test_the_kernel_kills_a_worker(mailbox, gate, kills):
    """The kernel counts its kills; after one, the next try is alone."""
    with Pool(2) as pool:
        heavy = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), retries=3)
        _killed(mailbox, kills)
        mailbox.line()
        other = pool.map_async(work.square, range(40), 1)
        assert pool.statistics()["running"] == 1
        assert not other.ready()
        gate.open()
        heavy.get()
        assert other.get() == [x * x for x in range(40)]
        with pytest.raises(WorkerDied, match="The kernel ended it, because memory was short"):
            lost = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
            _killed(mailbox, kills)
            lost.get()


def test_another_kill_is_no_lack_of_memory(mailbox, gate, kills):
    """After a SIGKILL that the kernel does not count, others run beside the next try."""
    with Pool(2) as pool:
        heavy = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), retries=1)
        os.kill(int(mailbox.line()), signal.SIGKILL)
        mailbox.line()
        assert pool.map(work.square, range(40), 1) == [x * x for x in range(40)]
        gate.open()
        heavy.get()


def test_tasks_of_certain_workers_run_again_beside_others(mailbox, gate, kills):
    """Tasks that are bound to a worker do not run alone, because they may wait for each other."""
    with P2PPool(2) as pool:
        heavy = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), retries=1)
        _killed(mailbox, kills)
        mailbox.line()
        other = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path))
        mailbox.line()
        gate.open(2)
        heavy.get()
        other.get()
