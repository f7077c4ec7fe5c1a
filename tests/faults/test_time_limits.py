"""A task that exceeds its time limit is stopped. Its error shows its stack."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from support import scripts, work
from support.limits import WAIT
from support.tiers import also
from support.waiting import eventually, wait_gone

import xpool
from xpool import Pool, PoolClosed, TaskTimeout, ThreadPool, WorkerStartFailed, XPoolError
from xpool._engine import monitor
from xpool._engine import worker_process as worker
from xpool._python import at_fork
from xpool._wire.outbox import STACK_SIGNAL, STOP_SIGNAL

from .after_faults import check_usable, story

pytestmark = pytest.mark.xpool_only

LIMIT = 0.4  # enough for the task to reach its loop; workers have imported its module before
LONG = 1.0  # some tasks are to end within it
STUCK = {"counts": work.count_up, "stubborn": work.count_up_stubbornly, "in C": work.spin_in_c}


def stopped(result, seconds=LIMIT):
    """Wait for a result that must fail with TaskTimeout. Return the error."""
    with pytest.raises(TaskTimeout) as caught:
        result.get(WAIT)
    assert caught.value.seconds == seconds
    return caught.value


# The task, its worker, and the others -------------------------------------------------------------


@pytest.mark.parametrize("how", STUCK)
def test_a_stuck_task_is_stopped(process_kind, make_pool, how, log, mailbox, gate):
    """The stuck task fails with its stack, and its worker is killed if the task does not end. Every
    other task is done once, and all workers are usable."""
    pool = make_pool(process_kind, 2, work.nothing)
    before = [pool.apply_async(work.logged, (str(log), i)) for i in range(20)]
    victim = pool.apply_async(STUCK[how], timeout=LIMIT)
    after = [pool.apply_async(work.logged, (str(log), i)) for i in range(20, 40)]
    error = stopped(victim)
    assert STUCK[how].__name__ in error.stack
    assert error.stack.startswith(f'  File "{work.__file__}"'), error.stack
    assert STUCK[how].__name__ in error.task and error.stack in str(error)
    assert 0 <= error.worker < 2 and error.pid not in (None, os.getpid())
    assert how == "counts" or wait_gone([error.pid]) == []
    assert [r.get(WAIT) for r in before + after] == list(range(40))
    assert sorted(map(int, log.read_text().split())) == list(range(40))
    check_usable(pool, mailbox, gate, 2)


def count_and_tidy(log):
    """Count for ever; when interrupted, get a second request to stop, then log a line."""
    n = 0
    try:
        while True:
            n += 1
    finally:
        tidy(log)


def tidy(log):
    """Get another signal, as when the program asks for stacks; log a line."""
    os.kill(os.getpid(), STOP_SIGNAL)
    work.log_line(log, "tidied")


def test_a_signal_during_the_cleanup(process_kind, make_pool, log, monkeypatch):
    """A further signal does not interrupt the cleanup. The error shows where the task was stopped,
    and so does that of the next task."""
    monkeypatch.setattr(monitor, "STOP_GRACE_SECONDS", WAIT)  # no worker is killed
    pool = make_pool(process_kind, 1, work.nothing)
    for times in (1, 2):
        error = stopped(pool.apply_async(count_and_tidy, (str(log),), timeout=LIMIT))
        assert "in count_and_tidy" in error.stack and "in tidy" not in error.stack
        assert log.read_text() == "tidied\n" * times
    error = stopped(pool.apply_async(work.count_up, timeout=LIMIT))
    assert "in count_up" in error.stack and "count_and_tidy" not in error.stack


A_STACK_BEFORE_THE_REQUEST = """
import signal
from xpool._wire.outbox import NO_LIMIT, Outbox, STOP_SIGNAL, make_file
from xpool._worker import stopping
from xpool.errors import TaskStopped

fd = make_file()
box = Outbox(fd)

def task():
    box.ask(NO_LIMIT)
    signal.raise_signal(STOP_SIGNAL)
    assert "in task" in box.stack()
    box.ask(1)  # clears the page
    assert box.stack() == ""
    signal.raise_signal(STOP_SIGNAL)

box.forbid(NO_LIMIT)
stopping.listen(box, fd, task.__code__)
assert box.enter(0)
try:
    task()
except TaskStopped:
    assert box.stack().startswith('  File "'), box.stack()
    assert "line 16 in task" in box.stack().splitlines()[0], box.stack()
    print("stopped")
"""


def test_a_stack_from_before_the_request_to_stop(tmp_path):
    """A task is not stopped before its stack is in the page, though that was cleared."""
    assert scripts.program(tmp_path, A_STACK_BEFORE_THE_REQUEST) == "stopped\n"


class Endless:
    """A function whose unpickling does not end."""

    def __setstate__(self, state):
        work.count_up()

    def __getstate__(self):
        return {"some": "state"}

    def __call__(self, x):
        return x


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("verb", ["apply", "map"])
def test_a_function_that_is_unpickled_for_too_long(process_kind, make_pool, verb):
    """Its task is stopped as one that runs, and the worker stays alive."""
    pool = make_pool(process_kind, 1)
    pid = pool.apply(work.pid)
    with pytest.raises(TaskTimeout):
        getattr(pool, verb)(Endless(), (1,), timeout=LIMIT)
    assert pool.apply(work.pid) == pid


def alarmed(seconds):
    """Return whether an alarm's handler runs while this function calls a pool."""
    came = []
    signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    with ThreadPool(1) as pool:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        end = time.monotonic() + WAIT
        while not came and time.monotonic() < end:
            pool.apply(work.nothing)
    return bool(came)


@pytest.mark.usefixtures("patient")
def test_frames_of_the_parent_do_not_block_a_stop(make_pool, log):
    """A forked worker's stack includes frames of its parent that must not be interrupted. They
    block neither the stop of a task nor a signal handler of the program."""
    pool = make_pool(Pool, 1, context="fork", maxtasksperchild=2)
    # The thread that makes the pool forks the first process, the engine's thread the second one.
    # From Python 3.13, a process forked by another thread than the main thread does not notice
    # signals while it computes, so its `finally` does not run.
    for _ in range(2 if sys.version_info < (3, 13) else 1):
        pid = pool.apply(work.pid)
        assert stopped(pool.apply_async(work.count_up, (str(log),), timeout=LIMIT)).pid == pid
        assert log.read_text() == "cleaned\n"
        log.unlink()
    with Pool(1, context="fork") as forks:
        assert forks.map(alarmed, [i / 1000 for i in range(1, 30)]) == [True] * 29


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("runnable", [True, False])
def test_a_worker_that_waits_for_a_processor_is_not_killed(
    make_pool, monkeypatch, mailbox, gate, runnable
):
    """A worker that waits for a processor is not killed, any other stuck worker is."""
    asked = threading.Semaphore(0)

    def processor(pid):
        asked.release()
        return 0.0, 0.0, runnable  # a runnable worker has not run since it was asked

    for module in monitor, worker:
        monkeypatch.setattr(module, "processor_times", processor)
    pool = make_pool(Pool, 1)
    pid = pool.apply(work.pid)
    result = pool.apply_async(work.leave_slowly, (mailbox.path, gate.path), timeout=LIMIT)
    mailbox.lines(1)
    for _ in range(2):  # when the worker is asked, and when its time is over
        assert asked.acquire(timeout=WAIT)
    if runnable:
        gate.open()
    stopped(result)
    assert (pool.apply(work.pid) == pid) is runnable


@pytest.mark.usefixtures("patient")
def test_a_stop_signal_comes_just_before_a_wait(make_pool, monkeypatch, gate):
    """Python notices a signal that comes just before a wait when the wait is over. The signal is
    repeated, so that the worker lives on."""
    pool = make_pool(Pool, 1)
    pid = pool.apply(work.pid)
    (slot,) = pool._engine.workers
    sent, send = [], type(slot.handle).signal

    def lose_the_first(handle, signum):
        sent.append(signum)
        if len(sent) > 1:
            send(handle, signum)

    monkeypatch.setattr(type(slot.handle), "signal", lose_the_first)
    assert stopped(pool.apply_async(work.pass_gate, (gate.path,), timeout=LIMIT)).pid == pid
    assert sent == [STOP_SIGNAL, STACK_SIGNAL]
    assert pool.apply(work.pid) == pid


def test_processor_times(make_pool, mailbox):
    """`processor_times` says how long a worker has run and waited, and whether it is runnable."""
    pool = make_pool(Pool, 1)
    pool.apply(work.pid)
    (slot,) = pool._engine.workers
    eventually(lambda: not worker.processor_times(slot.pid)[2], "the worker sleeps")
    spinning = pool.apply_async(work.post_and_spin, (mailbox.path,))
    mailbox.lines(1)
    ran, waited, _ = worker.processor_times(slot.pid)
    eventually(lambda: worker.processor_times(slot.pid)[2], "the worker is runnable")
    eventually(lambda: worker.processor_times(slot.pid)[0] > ran, "its run time grows")
    assert worker.processor_times(slot.pid)[1] >= waited
    spinning.cancel()


def test_the_stack_of_a_task_on_a_busy_machine(make_pool, monkeypatch):
    """A task in C code is asked for its stack before it is killed, also if the engine's thread
    comes late."""
    ask = worker.WorkerProcess.interrupt

    def ask_late(*args):
        ask(*args)
        time.sleep(2 * monitor.STOP_GRACE_SECONDS)

    monkeypatch.setattr(worker.WorkerProcess, "interrupt", ask_late)
    result = make_pool(Pool, 1).apply_async(work.spin_in_c, timeout=LIMIT)
    assert "spin_in_c" in stopped(result).stack


def spin_in_a_thread(box, gate):
    threading.Thread(target=work.post_and_spin, args=(box,), daemon=True).start()
    work.pass_gate(gate)


def test_a_worker_is_runnable_if_a_thread_of_it_is(make_pool, mailbox, gate):
    """A thread that repeats the stop signal may wait for a processor while the task sleeps."""
    pool = make_pool(Pool, 1)
    result = pool.apply_async(spin_in_a_thread, (mailbox.path, gate.path))
    mailbox.lines(1)
    (slot,) = pool._engine.workers
    eventually(lambda: not is_running(slot.pid), "the task's thread sleeps")
    eventually(lambda: worker.processor_times(slot.pid)[2], "the worker is runnable")
    gate.open()
    result.get(WAIT)


def is_running(pid: int) -> bool:
    """Whether the main thread of a process runs."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


@pytest.mark.usefixtures("plugin")
def test_an_import_is_not_interrupted(process_kind, make_pool, gate):
    """An import is not interrupted. It ends, or its worker is killed."""
    pool = make_pool(process_kind, 1)
    for limit in LIMIT, 5 * LIMIT, 25 * LIMIT:
        error = stopped(pool.apply_async(work.import_plugin, timeout=limit), limit)
        if "plugin.py" in error.stack:
            break  # else the machine was so busy that the time was over before the import began
    assert "plugin.py" in error.stack and "preload" in str(error)
    assert wait_gone([error.pid]) == []
    gate.open(1)
    assert pool.apply(work.import_plugin) == ["plugin"]


@pytest.mark.usefixtures("plugin")
def test_an_import_that_ends_in_time(process_kind, make_pool, mailbox, gate):
    """If the import ends in time, the task is stopped after it."""
    pool = make_pool(process_kind, 1)
    result = pool.apply_async(work.import_plugin)
    mailbox.line()
    assert result.cancel()
    gate.open(2)  # one is for a worker that is killed before it reaches the gate
    assert pool.apply(work.import_plugin) == ["plugin"]


class Finalized:
    def __init__(self, box, gate):
        self.box, self.gate = box, gate

    def __del__(self):
        work.post_and_gate(self.box, self.gate)


def finalize(box, gate):
    Finalized(box, gate)
    while True:
        time.sleep(0.001)


def fork_slowly(box, gate):
    """Fork, with a function of xpool that waits in the parent before the fork."""
    at_fork.at_fork(before=functools.partial(work.post_and_gate, box, gate))
    pid = os.fork()
    if not pid:
        os._exit(0)
    try:
        while True:
            time.sleep(0.001)
    finally:
        os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("busy", [finalize, fork_slowly])
def test_finalizers_and_forks_are_not_interrupted(
    process_kind, make_pool, mailbox, gate, monkeypatch, busy
):
    """A task is stopped after its finalizer, in which Python would only print the exception; or
    after the functions that xpool has registered for forks."""
    monkeypatch.setattr(monitor, "STOP_GRACE_SECONDS", WAIT)
    pool = make_pool(process_kind, 1)
    result = pool.apply_async(busy, (mailbox.path, gate.path))
    pid = mailbox.line()
    assert result.cancel()
    gate.open(1)
    assert pool.apply(os.getpid) == int(pid)


def test_the_default_of_the_pool(process_kind, make_pool):
    """`task_timeout=` is the limit for every verb that gives no other limit."""
    pool = make_pool(process_kind, 1, work.nothing, task_timeout=LIMIT)
    stopped(pool.apply_async(work.count_up))
    stopped(pool.map_async(work.stay_on_three, range(5), 1))
    stopped(pool.apply_async(work.count_up, timeout=0.2), 0.2)
    assert pool.apply(work.slow_square, (2 * LIMIT, 3), timeout=math.inf) == 9
    assert pool.apply(work.square, (3,)) == 9


@pytest.mark.parametrize("how", ["stubborn", *also("counts", "in C")])
def test_terminate_while_a_task_is_being_stopped(process_kind, make_pool, how):
    """`terminate` does not wait for the grace period, and every result raises an error."""
    pool = make_pool(process_kind, 2)
    results = [pool.apply_async(STUCK[how], timeout=0.05) for _ in range(4)]
    results[0].wait(0.1)
    pool.terminate()
    pool.join()
    for result in results:
        with pytest.raises(XPoolError):
            result.get(0)


# Threads -----------------------------------------------------------------------------------------


def test_a_thread_that_cannot_be_stopped(thread_kind, make_pool, mailbox, gate):
    """The task fails with its stack. A new thread replaces its thread. Its result is dropped."""
    pool = make_pool(thread_kind, 1)
    error = stopped(pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), timeout=LIMIT))
    mailbox.line()
    assert "pass_gate" in error.stack.split("\n")[0]
    assert "backend.py" not in error.stack and "hooks.py" not in error.stack
    assert error.worker == 0 and error.pid == os.getpid()
    assert pool.apply(work.square, (3,), timeout=30) == 9
    assert not error.stopped and "runs on" in str(error) and "was stopped" not in str(error)
    old = [t for t in threading.enumerate() if t.name.endswith("-worker-0")]
    assert len(old) == 2
    gate.open(1)
    eventually(lambda: sum(t.is_alive() for t in old) == 1, "the old thread has ended")
    assert pool.apply(work.square, (3,)) == 9
    assert pool.statistics()["succeeded"] == 2


def test_a_thread_that_waits_for_another_pool(thread_kind, make_pool, gate):
    """The stack shows frames of xpool if the task itself calls xpool."""
    inner = make_pool(thread_kind, 1).apply_async(work.pass_gate, (gate.path,))
    error = stopped(make_pool(thread_kind, 1).apply_async(inner.get, timeout=LIMIT))
    assert "in wait" in error.stack.split("\n")[0] and "in get" in error.stack


@pytest.mark.exhaustive
def test_one_limit_for_each_item(kind, make_pool):
    """The limit is for each item. A whole chunk may take longer."""
    pool = make_pool(kind, 1)
    slow = functools.partial(work.slow_square, 0.1)
    assert pool.map(slow, range(12), 12, timeout=1) == [i * i for i in range(12)]
    assert list(pool.imap(slow, range(12), 12, timeout=1)) == [i * i for i in range(12)]


@pytest.mark.exhaustive
def test_an_item_of_a_map_in_threads(thread_kind, make_pool, gate):
    """The late result of a chunk is dropped."""
    pool = make_pool(thread_kind, 1)
    with pytest.raises(TaskTimeout, match="chunk 1"):
        pool.map(functools.partial(pass_gate_at, gate.path, 3), range(6), 2, timeout=LIMIT)
    results = pool.imap(functools.partial(pass_gate_at, gate.path, 3), range(6), timeout=LIMIT)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TaskTimeout):
        next(results)
    assert list(results) == [4, 5]


def pass_gate_at(gate, bad, x):
    if x == bad:
        work.pass_gate(gate)
    return x


# Initializers and join ---------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_a_starting_worker_that_waits_for_a_processor(make_pool, monkeypatch):
    """A starting worker that waits for a processor is not killed before it can send its stack."""
    monkeypatch.setattr(monitor, "STOP_GRACE_SECONDS", 0.001)  # no grace period
    for module in monitor, worker:  # the worker waits for a processor
        monkeypatch.setattr(module, "processor_times", lambda pid: (0.0, 0.0, True))
    pool = make_pool(Pool, 1, work.stay_on_three, (3,), initializer_timeout=LONG)
    with pytest.raises(WorkerStartFailed) as caught:
        pool.apply_async(work.square, (3,)).get(WAIT)
    assert "stay_on_three" in story(caught.value)


def test_an_initializer_that_does_not_end(process_kind, make_pool):
    """A stuck initializer is killed and tried again. Then the pool stops with its stack."""
    pool = make_pool(process_kind, 1, work.stay_on_three, (3,), initializer_timeout=LONG)
    with pytest.raises(WorkerStartFailed) as caught:
        pool.apply_async(work.square, (3,)).get(WAIT)
    error = caught.value
    assert "stay_on_three" in story(error) and error.attempts >= 2
    assert isinstance(error.__cause__, TaskTimeout) and error.__cause__.seconds == LONG


def test_initializers_that_do_not_end_in_a_closed_pool(thread_kind, make_pool, gate):
    """A closed pool without jobs ends when its stuck threads are given up; it has not failed."""
    begun = threading.Semaphore(0)

    def begin_and_wait():
        begun.release()
        work.pass_gate(gate.path)

    pool = make_pool(thread_kind, 3, begin_and_wait, initializer_timeout=LIMIT)
    for _ in range(3):
        begun.acquire()
    pool.close()
    pool.join()
    with pytest.raises(PoolClosed, match="was closed"):
        pool.apply(work.square, (2,))


def test_join_with_a_limit(kind, make_pool, mailbox, gate):
    """While tasks run, `join(timeout)` raises TimeoutError. A later `join` may succeed."""
    pool = make_pool(kind, 2)
    held = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, 3))
    mailbox.line()
    pool.close()
    with pytest.raises(xpool.TimeoutError, match="terminate"):
        pool.join(0.05)
    with pytest.raises(xpool.TimeoutError):
        pool.join(timeout=0)
    gate.open(1)
    pool.join(WAIT)
    assert held.get(0) == 3
