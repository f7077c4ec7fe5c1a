"""`spawn` and `start_processes` work like torch.multiprocessing's, but return results."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import scripts, work
from support.limits import WAIT
from support.tiers import also
from support.waiting import Gate, Mailbox, wait_gone

import xpool
from xpool import OptionError, PoolClosed, WorkerDied, WorkerStartFailed, XPoolError

METHODS = [None, "spawn", "fork"]


def tell(index: int, *args: Any) -> tuple[Any, ...]:
    return index, args, os.getpid()


def put(index: int, queue: Any) -> None:
    queue.put(index)


def turn(index: int, box: str, gates: list[str]) -> int:
    work.post(box, f"{index} {os.getpid()}")
    work.pass_gate(gates[index])
    return 10 * index


def end(index: int, box: str, gates: list[str], bad: int, how: str) -> int:
    value = turn(index, box, gates)
    if index == bad:
        work.end(how)
    return value


@pytest.mark.parametrize("method", [METHODS[0], *also(*METHODS[1:])])
def test_results_by_index(warm: None, method: str | None):
    """Each process gets its index and the arguments. Results are ordered by index."""
    results = xpool.start_processes(tell, ("a", 2), nprocs=3, start_method=method)
    assert [r[:2] for r in results] == [(i, ("a", 2)) for i in range(3)]
    assert len({r[2] for r in results} | {os.getpid()}) == 4


def test_numbers_of_processes():
    """As in torch, ``nprocs`` is 1 by default, in another process, and may be 0. A negative one is
    refused, and so is a function that is not callable."""
    [(index, args, pid)] = xpool.spawn(tell)
    assert (index, args) == (0, ()) and pid != os.getpid()
    assert xpool.spawn(tell, nprocs=0) == []
    context = xpool.spawn(tell, nprocs=0, join=False)
    assert context.processes == context.pids() == []
    assert context.join() and context.results() == []
    with pytest.raises(OptionError, match="nprocs must be at least 0"):
        xpool.spawn(tell, nprocs=-1)
    with pytest.raises(TypeError, match="fn must be a callable"):
        xpool.spawn("tell")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [None, *also("spawn")])
def test_queues_in_the_arguments(warm: None, method: str | None):
    """Arguments may be queues of multiprocessing, as with torch's spawn."""
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        assert xpool.spawn(put, (queue,), nprocs=2, start_method=method) == [None, None]
        assert sorted([queue.get(), queue.get()]) == [0, 1]
    finally:
        queue.close()


@pytest.fixture
def gates(tmp_path: Any, nothing_leaks: None) -> Any:
    made = [Gate(tmp_path / f"gate{i}") for i in range(3)]
    yield made
    for gate in made:
        gate.close()


Begin = Callable[..., tuple[Any, list[int]]]


@pytest.fixture
def begin(mailbox: Mailbox, gates: list[Gate]) -> Begin:
    """Starts so many processes of a function. Returns their context and pids, once they run."""

    def spawn(func: Any, nprocs: int, *more: Any) -> tuple[Any, list[int]]:
        args = mailbox.path, [gate.path for gate in gates], *more
        context = xpool.spawn(func, args, nprocs=nprocs, join=False)
        told = dict(map(int, line.split()) for line in mailbox.lines(nprocs))
        return context, [told[index] for index in range(nprocs)]

    return spawn


def test_ends_out_of_order(begin: Begin, gates: list[Gate]):
    """`join` returns true when all processes have ended. Results are ordered by index."""
    context, pids = begin(turn, 3)
    assert context.pids() == pids
    assert context.join(timeout=0) is False
    with pytest.raises(XPoolError, match="3 of 3 processes have not ended"):
        context.results()
    for i in (2, 0, 1):
        assert context.join(timeout=0.01) is False
        gates[i].open()
    while not context.join(timeout=WAIT):
        pass
    assert context.results() == [0, 10, 20]
    assert context.join() is True
    assert wait_gone(context.pids()) == []


@pytest.mark.torch
@pytest.mark.parametrize("bad", [0, 2])
def test_the_first_failure_stops_the_others(begin: Begin, gates: list[Gate], bad: int):
    """If a process raises, the others are stopped, and `join` raises its error."""
    from torch.multiprocessing import ProcessRaisedException

    context, pids = begin(end, 3, bad, "raise")
    gates[bad].open()
    with pytest.raises(ProcessRaisedException) as caught:
        context.join()
    error = caught.value
    assert error.error_index == bad
    assert error.error_pid in pids
    assert f"-- Process {bad} terminated with the following error:\nTraceback" in error.msg
    assert isinstance(error.__cause__, RuntimeError)
    assert wait_gone(pids) == []
    with pytest.raises(ProcessRaisedException) as again:
        context.join()
    assert again.value is error
    with pytest.raises(ProcessRaisedException):
        context.results()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "code", "name"), [("sys.exit", 7, None), ("kill", -signal.SIGKILL, "SIGKILL")]
)
def test_a_process_that_ends(
    begin: Begin, gates: list[Gate], how: str, code: int, name: str | None
):
    """If a process exits or is killed, the error has its index, pid, exit code and signal."""
    from torch.multiprocessing import ProcessExitedException

    def leave(index: int, box: str, gates: list[str]) -> None:
        turn(index, box, gates)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(7)

    context, pids = begin(leave, 2)
    gates[1].open()
    with pytest.raises(ProcessExitedException) as caught:
        context.join()
    error = caught.value
    assert (error.error_index, error.error_pid) == (1, pids[1])
    assert (error.exit_code, error.signal_name) == (code, name)
    assert isinstance(error.__cause__, WorkerDied)


def test_exits_that_are_no_failure():
    """`sys.exit` without an error is no failure, and as in torch, neither is KeyboardInterrupt. The
    result is None."""
    ends = [SystemExit(0), SystemExit(), KeyboardInterrupt()]

    def leave(index: int) -> None:
        raise ends[index]

    assert xpool.spawn(leave, nprocs=3) == [None] * 3


@pytest.mark.torch
def test_others_may_end_in_the_grace_period(begin: Begin, mailbox: Mailbox, gates: list[Gate]):
    """Processes that end in the grace period after a failure are not stopped."""
    from torch.multiprocessing import ProcessRaisedException

    def last_words(index: int, box: str, gates: list[str]) -> None:
        turn(index, box, gates)
        if index == 0:
            raise ValueError
        work.post(box, "last words")

    context, _ = begin(last_words, 2)
    gates[0].open()
    gates[1].open()
    with pytest.raises(ProcessRaisedException):
        context.join(grace_period=20)
    assert mailbox.line() == "last words"


@pytest.mark.parametrize("daemon", [False, True])
def test_children_of_daemons(daemon: bool):
    """Daemons may make pools. Only processes that are not daemons may start processes."""

    def have_a_child(index: int) -> int | None:
        child = multiprocessing.Process(target=work.nothing)
        child.start()
        child.join()
        return child.exitcode

    if not daemon:
        assert xpool.spawn(have_a_child, nprocs=1) == [0]
        return
    assert xpool.spawn(lambda i: work.nested("Pool", 3), nprocs=1, daemon=True) == [[0, 1, 4]]
    pytest.importorskip("torch")
    with pytest.raises(Exception, match="daemonic processes are not allowed to have children"):
        xpool.spawn(have_a_child, nprocs=1, daemon=True)


def test_a_process_that_cannot_start():
    """If arguments cannot be unpickled, the error has the reason."""
    with pytest.raises(WorkerStartFailed, match="RuntimeError: sabotage"):
        xpool.spawn(tell, (work.EndsWhenUnpickled("raise"),), nprocs=2)


def test_a_dropped_context(begin: Begin, gates: list[Gate]):
    """As in torch, processes of a dropped context run to their end. Then none is left."""
    context, pids = begin(turn, 2)
    del context
    gc.collect()
    for gate in gates:
        gate.open()
    assert wait_gone(pids) == []


INTERRUPTED = """
import os, sys, time, xpool

def stay(index):
    sys.stdout.write(f"{os.getpid()}\\n")  # `print` writes the newline alone if unbuffered
    sys.stdout.flush()
    time.sleep(600)

if __name__ == "__main__":
    try:
        xpool.spawn(stay, nprocs=2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_ctrl_c_stops_the_processes(tmp_path: Any):
    """An interrupt during `spawn` is raised in the program, and the processes are stopped."""
    with scripts.popen([scripts.write(tmp_path / "script.py", INTERRUPTED)]) as program:
        assert program.stdout is not None
        try:
            pids = [int(program.stdout.readline()) for _ in range(2)]
            program.send_signal(signal.SIGINT)
            assert program.stdout.readline() == "interrupted\n"
        except BaseException:
            program.kill()  # the end of the block waits for it
            raise
    assert program.returncode == 0
    assert wait_gone(pids) == []


@pytest.mark.torch
def test_processes(begin: Begin, gates: list[Gate]):
    """A context has its processes, like torch's."""
    from torch.multiprocessing import ProcessExitedException

    context, _ = begin(turn, 3)
    processes = context.processes
    assert [process.pid for process in processes] == context.pids()
    assert [process.exitcode for process in processes] == [None] * 3
    assert all(process.is_alive() for process in processes)
    gates[1].open()
    processes[1].join(WAIT)
    assert [process.exitcode for process in processes] == [None, 0, None]
    assert not context.join(0)
    processes[2].terminate()
    processes[2].join(WAIT)
    assert processes[2].exitcode == -signal.SIGTERM and not processes[2].is_alive()
    processes[0].kill()
    with pytest.raises(ProcessExitedException) as caught:
        context.join()
    assert isinstance(caught.value.__cause__, WorkerDied)
    assert "retries" not in str(caught.value.__cause__)
    assert not any(process.is_alive() for process in processes)
    processes[0].terminate()  # does nothing after the end


def test_joins_in_several_threads(begin: Begin, gates: list[Gate]):
    """Each of several threads that join the same processes returns when they have ended."""
    context, _ = begin(turn, 2)
    with ThreadPoolExecutor(3) as threads:
        joined = [threads.submit(context.join) for _ in range(3)]
        for gate in gates[:2]:
            gate.open()
    assert [one.result() for one in joined] == [True] * 3


def test_a_forked_child_cannot_join(begin: Begin, gates: list[Gate]):
    """In a forked child, `join` raises; the program's processes go on."""
    context, _ = begin(turn, 1)

    child = os.fork()
    if not child:
        try:
            context.join()
        except PoolClosed as error:
            os._exit(0 if "forked from" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    gates[0].open()
    assert context.wait() == [0]


class Deadly:
    """Unpickled in a worker, it has the first worker end when that is asked for its id."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        if work.first(state["path"]):
            vars(os)["getpid"] = lambda: signal.raise_signal(signal.SIGKILL)


@pytest.mark.torch
def test_an_end_before_the_function(tmp_path: Any):
    """A process that ends before its function has begun is not replaced: its id was told."""
    from torch.multiprocessing import ProcessExitedException

    with pytest.raises(ProcessExitedException) as caught:
        xpool.spawn(tell, (Deadly(str(tmp_path / "first")),))
    assert isinstance(caught.value.__cause__, WorkerDied)
