"""Interrupts and errors in the caller's process lose no result and block no call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support import scripts, work
from support.limits import WAIT
from support.tiers import also
from support.waiting import drained, eventually

from xpool import AsyncResult, P2PPool, Pool, TimeoutError


class OpensBadly:
    """For the numbers in `bad`, raises when it is unpickled in the caller's process."""

    error: type[BaseException] = ValueError
    bad: frozenset[int] = frozenset()

    def __init__(self, number, parent):
        self.number, self.parent = number, parent

    def __reduce__(self):
        return open_it, (self.number, self.parent)


def open_it(number, parent):
    if os.getpid() == parent and number in OpensBadly.bad:
        raise OpensBadly.error(number)
    return number


def wrapped(task):
    return OpensBadly(*task)


@pytest.fixture
def opens_badly():
    def set_up(error, *bad):
        OpensBadly.error, OpensBadly.bad = error, frozenset(bad)

    yield set_up
    OpensBadly.bad = frozenset()


@pytest.mark.parametrize("buffersize", [None, 64])
@pytest.mark.parametrize("verb", ["imap", "imap_unordered"])
def test_a_result_that_cannot_be_unpickled_fails_alone(opens_badly, verb, buffersize):
    """If results are received together, only those that cannot be unpickled fail."""
    opens_badly(ValueError, 50, 51, 250, 499)
    with Pool(2) as pool:
        pool.map(work.same, range(4_000), chunksize=1)  # later results are received together
        tasks = [(i, os.getpid()) for i in range(500)]
        good, errors = drained(getattr(pool, verb)(wrapped, tasks, buffersize=buffersize))
        bad = [error.args[0] for error in errors]
        assert {type(error) for error in errors} == {ValueError}
        assert sorted(bad) == [50, 51, 250, 499]
        assert sorted(good + bad) == list(range(500))


def tell_and_wait(pid_and_fifo):
    pid, fifo = pid_and_fifo
    os.kill(pid, signal.SIGUSR1)
    with open(fifo, "rb") as gate:
        return gate.read()


def test_a_signal_handler_uses_the_pool(tmp_path, on_signal, make_pool):
    """A signal handler that runs while its thread waits in `apply` may use the same pool."""
    fifo = str(tmp_path / "gate")
    os.mkfifo(fifo)
    pool = make_pool(Pool, 2)
    got = []

    def handler(signum, frame):
        got.append(pool.apply(work.same, (7,)))
        got.append(sum(pool.imap(work.same, range(50))))
        with open(fifo, "wb") as gate:
            gate.write(b"done")

    on_signal(handler)
    assert pool.apply(tell_and_wait, ((os.getpid(), fifo),)) == b"done"
    assert got == [7, 1225]


class Late(Exception):
    """What a signal handler raises."""


def tell_and_hang(pid):
    os.kill(pid, signal.SIGUSR1)
    while True:
        signal.pause()


WAITING: dict[str, Callable[[Any, Any], object]] = {
    "apply": lambda pool, path: pool.apply(tell_and_hang, (os.getpid(),)),
    "map": lambda pool, path: pool.map(tell_and_hang, [os.getpid()] * 3, chunksize=1),
    "map of one": lambda pool, path: pool.map(tell_and_hang, [os.getpid()]),
    "starmap": lambda pool, path: pool.starmap(tell_and_hang, [(os.getpid(),)] * 5),
    "journal": lambda pool, path: pool.map(
        tell_and_hang, [os.getpid()] * 3, journal=path / "journal", key=id
    ),
}


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("call", WAITING)
@pytest.mark.parametrize("kind", [Pool, *also(P2PPool)])
def test_an_interrupted_call_leaves_its_worker_to_others(tmp_path, on_signal, kind, call):
    """If a handler raises in the wait of a call, its tasks are stopped: nobody has its result."""

    def handler(signum, frame):
        on_signal(signal.SIG_IGN)  # the next task may begin before the call is cancelled
        raise Late

    on_signal(handler)
    with kind(1) as pool, ThreadPoolExecutor(1) as thread:
        assert pool.apply(work.same, (1,)) == 1
        with pytest.raises(Late):
            WAITING[call](pool, tmp_path)
        assert thread.submit(pool.apply, work.same, (2,)).result() == 2
        assert pool.map(work.same, range(3)) == [0, 1, 2]
        assert pool.statistics()["deaths"] == 0


def tell(pid):
    os.kill(pid, signal.SIGUSR1)
    return pid


@pytest.mark.parametrize("call", ["apply_async", "submit"])
def test_a_handler_waits_for_a_call_behind_the_awaited_one(call, on_signal):
    """It may, although the worker begins that call only after the answer to the awaited one."""
    got = []

    def handler(signum, frame):
        got.append(get(behind))

    on_signal(handler)
    with Pool(1) as pool, pool.executor() as executor:
        submit: Callable[..., Any] = executor.submit
        get: Callable[[Any], Any] = Future.result
        if call == "apply_async":
            submit, get = lambda func, arg: pool.apply_async(func, (arg,)), AsyncResult.get
        behind = submit(work.same, -1)  # the handler may run before the next one is submitted
        for n in range(50):
            awaited = submit(tell, os.getpid())
            behind = submit(work.same, n)
            assert get(awaited) == os.getpid()
            assert get(behind) == n
        assert len(got) == 50


def test_a_handler_waits_while_a_lock_of_a_future_is_held():
    """`Future.result` holds the lock of its future for a moment. A handler that comes in this
    moment may wait for a call behind, which the same thread of the pool completes."""
    with Pool(1) as pool, pool.executor() as executor:
        awaited = executor.submit(work.same, 1)
        with awaited._condition:
            behind = [executor.submit(work.same, n) for n in range(3)]
            eventually(lambda: pool.statistics()["succeeded"] == 4, "all are answered")
            assert [one.result(WAIT) for one in behind] == [0, 1, 2]
        assert awaited.result(WAIT) == 1


def test_a_get_takes_over_its_answer_in_any_thread():
    """Several threads wait for one call, with and without a time limit: each gets its value."""
    with Pool(2) as pool, ThreadPoolExecutor(4) as threads:
        for n in range(100):
            result = pool.apply_async(work.same, (n,))
            waits = [threads.submit(result.get, limit) for limit in (None, None, 60.0, 60)]
            assert [one.result() for one in waits] == [n] * 4
            assert pool.apply(work.same, (n,)) == n
        with pytest.raises(TimeoutError, match="after 0.001 s"):
            pool.apply_async(time.sleep, (60,)).get(0.001)
        with pytest.raises(TypeError, match="timeout"):
            pool.apply_async(work.same, (1,)).get("soon")


BLOCKED = """
    import os, signal
    from xpool import Pool, WorkerDied
    if __name__ == "__main__":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        with Pool(1) as pool:
            try:
                pool.apply(os._exit, (3,))
            except WorkerDied as error:
                print(error.exitcode, pool.apply(abs, (-1,)))
"""


def test_a_program_that_blocks_sigchld(tmp_path):
    """If the program blocks SIGCHLD, the pool still detects deaths."""
    assert scripts.program(tmp_path, BLOCKED) == "3 1\n"
