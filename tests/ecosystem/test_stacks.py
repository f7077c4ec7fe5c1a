"""``pool.stacks()`` and ``python -m xpool stacks PID``: the stack of each worker."""

import os
import re
import signal
import sys
import time

import pytest
from support import scripts, work
from support.limits import PROGRAM_LIMIT
from support.waiting import eventually

from xpool import OptionError, Pool
from xpool.testing._test_tasks import pass_gate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


def backtrack(n):
    """Stay in C code that holds the interpreter lock."""
    re.match("(a+)+b", "a" * n)


def _those_that(pool, text):
    """Return the stacks that contain a text, once there are any."""
    return eventually(lambda: [one for one in pool.stacks() if text in one.stack], text)


def test_a_worker_in_python_code(make_pool, kind, mailbox, gate):
    """A busy worker's entry has its task, item, time and calls. Other workers wait for a task."""
    pool = make_pool(kind, 2)
    result = pool.starmap_async(work.post_and_gate, [(mailbox.path, gate.path, 5)], 1)
    mailbox.lines(1)
    (busy,) = _those_that(pool, "in pass_gate")
    assert "post_and_gate()" in busy.task and "in post_and_gate" in busy.stack
    assert not {"loop.py", "callables.py", "hooks.py"} & set(re.findall(r"\w+[.]py", busy.stack))
    eventually(lambda: sum(not one.task for one in pool.stacks()) == 1, "the other has started")
    assert "waits for a task" in str(pool.stacks())
    gate.open()
    result.get()


def test_the_item_of_a_chunk(mailbox, gate):
    """The entry has the number of the item in its chunk, and its time."""
    with Pool(1) as pool:
        assert pool.apply(abs, (-1,)) == 1
        before = time.monotonic()
        result = pool.map_async(pass_gate, [gate.path, gate.path], 2)
        (one,) = eventually(lambda: [one for one in pool.stacks() if one.item], "the item is known")
        assert one.item.startswith("1 of 2: '") and one.task == "chunk 0 of pass_gate()"
        assert one.seconds is not None and 0 <= one.seconds <= time.monotonic() - before
        gate.open(2)
        result.get()


def test_a_worker_in_c_code():
    """A worker in C code that holds the interpreter lock has a stack too."""
    with Pool(1) as pool:
        pool.apply_async(backtrack, (50,))
        text = "in (prefix)?match"  # `prefixmatch` in Python 3.15
        (one,) = eventually(lambda: [w for w in pool.stacks() if re.search(text, w.stack)], text)
        assert one.task == "backtrack()" and one.item == "" and "in backtrack" in one.stack
        pool.terminate()


def test_a_worker_that_is_stopped():
    """For a stopped worker, the entry has the kernel's state instead of a stack."""
    with Pool(1) as pool:
        pool.apply_async(backtrack, (50,))
        eventually(lambda: pool.statistics()["running"] == 1, "the task runs")
        # The task may begin before the server reports the worker's pid.
        pid = eventually(lambda: pool.statistics()["pids"][0], "the pid is known")
        os.kill(pid, signal.SIGSTOP)
        (one,) = eventually(
            lambda: [one for one in pool.stacks() if "stopped" in one.waits], "it has stopped"
        )
        assert one.stack == "" and "has not reported where it is" in str(one)
        pool.terminate()


def test_stacks_disturb_no_tasks():
    """Repeated calls of `stacks` disturb neither tasks nor time limits."""
    with Pool(2) as pool:
        results = pool.imap(work.square, range(20_000))
        for _ in range(20):
            assert len(pool.stacks()) == 2
        assert sum(results) == sum(x * x for x in range(20_000))
        pool.run_all(backtrack, 1)  # imports this module in each worker
        late = pool.apply_async(backtrack, (50,), timeout=0.5)
        while not late.ready():
            pool.stacks()
        with pytest.raises(TimeoutError, match="in (prefix)?match"):
            late.get()


def test_from_outside():
    """Another process can get the stacks by the program's pid."""
    with Pool(2) as pool:
        pool.apply_async(backtrack, (50,))
        _those_that(pool, "in backtrack")
        told = scripts.run(["-m", "xpool", "stacks", str(os.getpid())])
        assert told.returncode == 0, told.stderr
        assert "in backtrack" in told.stdout and "waits for a task" in told.stdout
        for pid in pool.statistics()["pids"]:
            assert f"pid {pid}" in told.stdout
        pool.terminate()


def test_from_outside_without_workers():
    """The command says if a process does not exist, or has no workers."""
    with scripts.popen(["-c", "input()"]) as program:
        told = scripts.run(["-m", "xpool", "stacks", str(program.pid)])
        assert told.stdout == f"Process {program.pid} has no workers of xpool.\n"
        program.communicate("\n", timeout=PROGRAM_LIMIT)
    told = scripts.run(["-m", "xpool", "stacks", str(program.pid)])
    assert told.returncode == 1 and told.stderr == f"There is no process {program.pid}.\n"


def test_a_custom_pool():
    """A subclass that makes its own workers has no stacks."""
    from hooks.own_pools import QueueThreadPool

    with QueueThreadPool(1) as pool, pytest.raises(OptionError, match="stacks"):
        pool.stacks()
