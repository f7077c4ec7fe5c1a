"""Workers that other processes kill, stop or terminate."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
from support import scripts, work
from support.limits import WAIT
from support.tiers import also
from support.waiting import wait_gone

from xpool import P2PPool, WorkerDied

from .test_saboteurs import check_usable

pytestmark = pytest.mark.xpool_only


def workers_of(pool, mailbox, gate, count):
    """Return the pids of the pool's workers. Each runs a task at the same time."""
    results = [
        pool.apply_async(work.post_and_gate, (mailbox.path, gate.path)) for _ in range(count)
    ]
    pids = [int(line) for line in mailbox.lines(count)]
    gate.open(count)
    for result in results:
        result.get(WAIT)
    return pids


def test_idle_worker_terminated(process_kind, make_pool, mailbox, gate):
    """SIGTERM ends an idle worker, no task is lost, and a new worker replaces it."""
    pool = make_pool(process_kind, 2)
    victim = workers_of(pool, mailbox, gate, 2)[0]
    os.kill(victim, signal.SIGTERM)
    assert wait_gone([victim], 10) == []
    assert pool.map(work.square, range(100), 1) == [i * i for i in range(100)]
    check_usable(pool, mailbox, gate, 2)


def test_killed_while_it_reads_a_large_task(process_kind, make_pool, mailbox, gate):
    """If a worker is killed while it receives a large task, at most this task fails."""
    pool = make_pool(process_kind, 1)
    (victim,) = workers_of(pool, mailbox, gate, 1)
    os.kill(victim, signal.SIGSTOP)
    results = [pool.apply_async(len, (bytes(30_000_000),)) for _ in range(3)]
    os.kill(victim, signal.SIGKILL)
    lost = 0
    for result in results:
        try:
            assert result.get(WAIT) == 30_000_000
        except WorkerDied:
            lost += 1
    assert lost <= 1
    check_usable(pool, mailbox, gate, 1)


def test_stopped_worker_does_not_delay_the_others(make_pool, mailbox, gate):
    """While one worker is stopped before it reads a large task, the other worker runs tasks."""
    pool = make_pool(P2PPool, 2)
    stopped, running = (pool.apply(work.pid, worker=i) for i in range(2))
    os.kill(stopped, signal.SIGSTOP)
    try:
        large = [pool.apply_async(len, (bytes(20_000_000),), worker=0) for _ in range(2)]
        assert [pool.apply_async(work.pid, worker=1).get(WAIT) for _ in range(20)] == [running] * 20
        assert not any(r.ready() for r in large)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert [r.get(WAIT) for r in large] == [20_000_000] * 2


def test_stopped_worker_is_killed(process_kind, make_pool, mailbox, gate, log):
    """If a stopped worker is killed, other workers run its tasks. At most one task fails."""
    pool = make_pool(process_kind, 2)
    victim = workers_of(pool, mailbox, gate, 2)[0]
    os.kill(victim, signal.SIGSTOP)
    results = [pool.apply_async(work.logged, (str(log), i)) for i in range(40)]
    os.kill(victim, signal.SIGKILL)
    lost = []
    for i, result in enumerate(results):
        try:
            assert result.get(WAIT) == i
        except WorkerDied:
            lost.append(i)
    assert len(lost) <= 1
    ran = sorted(map(int, log.read_text().split()))
    assert ran == [i for i in range(40) if i not in lost]


def test_stopped_worker_does_not_delay_terminate(process_kind, make_pool, mailbox, gate):
    """`terminate` ends a stopped worker."""
    pool = make_pool(process_kind, 2)
    victims = workers_of(pool, mailbox, gate, 2)
    os.kill(victims[0], signal.SIGSTOP)
    pool.terminate()
    pool.join()
    assert wait_gone(victims, 10) == []


def test_worker_that_ignores_sigterm(process_kind, make_pool, mailbox):
    """`terminate` ends a worker that ignores SIGTERM."""
    pool = make_pool(process_kind, 1)
    pool.apply(signal.signal, (signal.SIGTERM, signal.SIG_IGN))
    pool.apply_async(work.post_and_spin, (mailbox.path,))
    victim = int(mailbox.line())
    pool.terminate()
    pool.join()
    assert wait_gone([victim], 10) == []


def test_kill_after_kill(process_kind, make_pool, mailbox):
    """Although busy workers are killed all the time, every task gets an answer."""
    pool = make_pool(process_kind, 2)

    def killer():
        while (line := mailbox.line(WAIT)) != "stop":
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        results = [pool.apply_async(work.post_pid, (mailbox.path,)) for _ in range(30)]
        for result in results:
            try:
                assert isinstance(result.get(WAIT), int)
            except WorkerDied:
                continue
    finally:
        work.post(mailbox.path, "stop")
        thread.join(WAIT)
    assert pool.apply(work.square, (3,)) == 9


def test_killed_at_any_moment_of_apply(process_kind, make_pool):
    """If the worker is killed at a random moment, at most one call of `apply` fails."""
    pool = make_pool(process_kind, 1)
    for _ in range(20):
        victim = pool.apply(work.pid)
        os.kill(victim, signal.SIGKILL)
        with contextlib.suppress(WorkerDied):
            assert pool.apply(work.square, (3,)) == 9
        assert pool.apply(work.square, (4,)) == 16


OPEN_AT_EXIT = """
    import signal, sys
    from xpool import Pool

    if __name__ == "__main__":
        handler = signal.SIG_IGN if sys.argv[2] == "ignored" else lambda *_: None
        signal.signal(signal.SIGTERM, handler)
        pool = Pool(2, context=sys.argv[1])
        print(pool.map(abs, [-1]))
"""


@pytest.mark.parametrize("how", ["ignored", "handled"])
@pytest.mark.parametrize("context", ["fork", *also("spawn", "forkserver")])
def test_an_open_pool_where_sigterm_ends_nothing(tmp_path, context, how):
    """At the exit, `multiprocessing` sends SIGTERM to the workers that it has started, and waits
    for them. The pool has ended before."""
    path = scripts.write(tmp_path / "open_at_exit.py", OPEN_AT_EXIT)
    assert scripts.run_ok([path, context, how]) == "[1]\n"


C_HANDLER = """
    import ctypes, os, signal, sys
    import xpool

    if __name__ == "__main__":
        embedded = sys.argv[1] == "a program with Python inside"
        if embedded:
            sys.orig_argv = []
        system = ctypes.CDLL(None)

        def handle():
            # The C library calls _exit(SIGINT).
            system.signal(signal.SIGINT, ctypes.cast(system._exit, ctypes.c_void_p))

        if not embedded:
            handle()
        with xpool.Pool(1, context="fork") as pool:
            assert pool.apply(abs, (-1,)) == 1
            if embedded:
                handle()
                assert pool.apply(abs, (-1,)) == 1
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("it is Python's handler")
"""


@pytest.mark.parametrize("what", ["a program of Python", "a program with Python inside"])
def test_a_handler_of_c_code(tmp_path, what):
    """A pool leaves it in place, although Python believes that its own handler is set. uWSGI ends
    its processes by such a handler, and sets it after the import of the application."""
    done = scripts.run([scripts.write(tmp_path / "c_handler.py", C_HANDLER), what])
    assert (done.returncode, done.stderr) == (signal.SIGINT, "")
