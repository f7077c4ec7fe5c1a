"""`run_all` calls a function once in each worker, or fails."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import work
from support.waiting import eventually, pass_gate, post, wait_gone

from xpool import (
    OptionError,
    P2PPool,
    PeerLost,
    Pool,
    PoolClosed,
    RemoteTraceback,
    TaskNotPicklable,
    TaskTimeout,
    WorkerDied,
    current_worker,
)

pytestmark = pytest.mark.xpool_only


def index(*args: Any) -> tuple[Any, ...]:
    return current_worker().index, *args


def raises_in(worker: int, box: str, gate: str) -> None:
    """Raise in one worker when the gate opens. The others wait for ever."""
    post(box, str(current_worker().index))
    if current_worker().index == worker:
        pass_gate(gate)
        raise KeyError("here")
    threading.Event().wait()


def dies_in(worker: int) -> None:
    if current_worker().index == worker:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def raises_peer_lost(worker: int, gate: str) -> None:
    """Raise PeerLost in all workers but one. Kill that one when the gate opens."""
    if current_worker().index != worker:
        raise PeerLost("it does not answer")
    pass_gate(gate)
    os.kill(os.getpid(), signal.SIGKILL)


def in_step(box: str, times: int) -> list[int]:
    """Post this worker's index and the number of the call."""
    post(box, f"{current_worker().index} {times}")
    return [times]


def when(mailbox: Any, lines: int, then: Callable[[], object]) -> threading.Thread:
    """When that many lines have arrived, call a function in a thread."""

    def run() -> None:
        mailbox.lines(lines)
        then()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_results_by_worker(process_kind, make_pool):
    """Each worker calls the function once, with its context if it has one."""
    pool = make_pool(process_kind, 3)
    raw = getattr(pool, "_pool", pool)
    results = raw.run_all(index, "a", None)
    if process_kind.name == "ctx":
        assert results == [(i, f"context {i}", "a", None) for i in range(3)]
    else:
        assert results == [(i, "a", None) for i in range(3)]


def test_busy_workers_call_it_later(make_pool, gate, mailbox):
    """A busy worker calls the function after its task."""
    pool = make_pool(P2PPool, 2)
    held = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), worker=1)
    mailbox.line()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(pool.run_all(index)))
    thread.start()
    gate.open(1)
    thread.join()
    held.get()
    assert found == [[(0,), (1,)]]


def test_many_callers_are_served_in_one_order(make_pool, mailbox):
    """Calls of several threads reach all workers in the same order."""
    pool = make_pool(Pool, 3)
    pool.run_all(index)
    with ThreadPoolExecutor(8) as threads:
        got = threads.map(lambda i: pool.run_all(in_step, mailbox.path, i), range(8))
    assert list(got) == [[[i]] * 3 for i in range(8)]
    lines = [line.split() for line in mailbox.lines(24)]
    orders = {tuple(call for worker, call in lines if worker == str(w)) for w in range(3)}
    assert len(orders) == 1


def test_an_error_stops_the_others_and_names_the_worker(make_pool, mailbox, gate):
    """`run_all` raises the function's exception, with the worker's index. Others are stopped."""
    pool = make_pool(Pool, 3)
    thread = when(mailbox, 3, lambda: gate.open(1))
    with pytest.raises(KeyError, match="here") as caught:
        pool.run_all(raises_in, 1, mailbox.path, gate.path)
    thread.join()
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.worker == 1
    assert "In worker 1:" in str(cause)
    assert pool.run_all(index) == [(0,), (1,), (2,)]


def test_a_death_is_an_error(make_pool):
    """If a worker dies, the error names it, and another replaces it."""
    pool = make_pool(Pool, 3)
    pids = pool.run_all(work.pid)
    with pytest.raises(WorkerDied) as caught:
        pool.run_all(dies_in, 2)
    assert caught.value.worker == 2
    assert caught.value.pid == pids[2]
    assert "on all workers" in str(caught.value)
    assert pool.run_all(index) == [(0,), (1,), (2,)]


def test_a_death_is_raised_before_its_effects(make_pool, gate):
    """If a death causes errors in other workers, `run_all` raises the death's error."""
    pool = make_pool(Pool, 3)

    def open_late() -> None:
        eventually(lambda: pool.statistics()["running"] == 1, "the others have failed")
        gate.open(1)

    pool.run_all(index)
    thread = threading.Thread(target=open_late)
    thread.start()
    with pytest.raises(WorkerDied) as caught:
        pool.run_all(raises_peer_lost, 0, gate.path)
    thread.join()
    assert caught.value.worker == 0


def test_killed_before_it_begins(make_pool, mailbox, gate):
    """If a worker dies before it begins the call, its replacement calls the function."""
    pool = make_pool(P2PPool, 2)
    pids = pool.run_all(work.pid)
    held = pool.apply_async(work.post_and_gate, (mailbox.path, gate.path), worker=1)
    mailbox.line()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(pool.run_all(work.pid)))
    thread.start()
    eventually(lambda: pool.statistics()["waiting"] == 1, "one call waits for the busy worker")
    os.kill(pids[1], signal.SIGKILL)
    thread.join()
    with pytest.raises(WorkerDied):
        held.get()
    assert wait_gone([pids[1]]) == []
    assert found[0][0] == pids[0]
    assert found[0][1] != pids[1]


def test_timeout(make_pool):
    """The limit is for each worker's call. The error names a worker that took too long."""
    pool = make_pool(Pool, 2)
    with pytest.raises(TaskTimeout) as caught:
        pool.run_all(work.sleep_long, timeout=0.3)
    assert caught.value.worker in (0, 1)
    assert pool.run_all(index) == [(0,), (1,)]


def test_unpicklable_and_invalid_arguments(make_pool):
    """Functions, arguments and results that cannot be pickled raise an error."""
    for pool in make_pool(P2PPool, 2), make_pool(Pool, 2):  # the first wraps the function
        with pytest.raises(TaskNotPicklable, match=r"as argument 0 of index\(\)"):
            pool.run_all(index, threading.Lock())
    with pytest.raises(Exception, match="cannot be sent back"):
        pool.run_all(threading.Lock)
    with pytest.raises(TypeError, match="callable"):
        pool.run_all(3)
    with pytest.raises(OptionError, match="timeout"):
        pool.run_all(index, timeout=-1)
    assert pool.run_all(index) == [(0,), (1,)]


def test_interrupted(make_pool, mailbox):
    """Ctrl-C ends the wait and the running calls. The pool stays usable."""
    pool = make_pool(Pool, 2)

    thread = when(mailbox, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        pool.run_all(raises_in, 5, mailbox.path, "")
    thread.join()
    assert pool.run_all(index) == [(0,), (1,)]


def test_terminated_and_closed(make_pool, mailbox):
    """`terminate` ends the wait. Later calls are refused."""
    pool = make_pool(Pool, 2)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            pool.run_all(raises_in, 5, mailbox.path, "")
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    mailbox.lines(2)
    pool.terminate()
    thread.join()
    assert [type(error) for error in errors] == [PoolClosed]
    with pytest.raises(PoolClosed):
        pool.run_all(index)
    with pytest.raises(PoolClosed):
        pool.broadcast(1)
