"""`on_worker_end=` of pools: called once for each process, before the next one starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import pytest
from support import scripts, work
from support.limits import WAIT
from support.waiting import eventually

from xpool import (
    CtxPool,
    Executor,
    P2PPool,
    Pool,
    PoolClosed,
    PoolStates,
    TaskTimeout,
    WorkerDied,
    WorkerEnd,
    WorkerStartFailed,
)

pytestmark = pytest.mark.xpool_only


class Ends(list[WorkerEnd]):
    """A hook that keeps its records."""

    def __call__(self, end: WorkerEnd) -> None:
        self.append(end)

    def of(self, pid: int | None) -> WorkerEnd:
        """Return the one record of a process; wait for it."""
        eventually(lambda: [end for end in self if end.pid == pid], f"a record of {pid}", WAIT)
        (one,) = (end for end in self if end.pid == pid)
        return one

    def check(self) -> Ends:
        """Check that no process has two records."""
        assert len({(end.worker, end.pid) for end in self}) == len(self)
        return self


@pytest.fixture
def ends():
    """A hook that keeps its records, which are checked in the end."""
    found = Ends()
    yield found
    found.check()


def ready(pool: Any, *gone: int) -> list[int]:
    """Wait until all workers are ready, and these processes are replaced; return their pids."""

    pids: list[int] = []

    def are_ready() -> bool:
        found = pool.statistics()
        pids[:] = found["pids"]
        # A worker may be ready before the server has told its pid.
        return found["ready"] == pool.size() and not {None, *gone} & set(pids)

    eventually(are_ready, "all are ready", WAIT)
    return pids


def test_each_worker_has_its_record(process_kind, make_pool, ends):
    """A closed pool has called the hook once for each worker when `join` returns."""
    pool = make_pool(process_kind, 3, on_worker_end=ends)
    pids = ready(pool)
    pool.close()
    pool.join()
    assert sorted((end.worker, end.pid) for end in ends) == list(enumerate(pids))
    assert {(end.exitcode, end.signal, end.reason) for end in ends} == {(0, None, "closed")}
    assert all(f"worker {end.worker} (pid {end.pid})" in end.text for end in ends)


def test_start_methods(method_kind, make_pool, ends):
    """Each start method has the same records, with the signal of a worker that was killed."""
    pool = make_pool(method_kind, 1, on_worker_end=ends)
    (pid,) = ready(pool)
    os.kill(pid, signal.SIGKILL)
    end = ends.of(pid)
    assert (end.worker, end.exitcode, end.signal, end.reason) == (0, -9, "SIGKILL", "died")
    assert pool.apply(work.same, (end,)) == end
    assert end._replace(exitcode=0).signal is None
    pool.terminate()
    assert [end.reason for end in ends] == ["died", "terminated"]


def test_the_end_of_a_block(ends):
    """It calls the hook for each worker; the record has the program's own context."""
    contexts = [["a"], ["b"]]
    with CtxPool(worker_contexts=contexts, on_worker_end=ends) as pool:
        pids = ready(pool)
    assert {(end.pid, end.reason) for end in ends} == {(pid, "terminated") for pid in pids}
    assert all(end.context is contexts[end.worker] for end in ends)


@pytest.mark.parametrize(("how", "code"), [("os._exit", 4), ("SIGSEGV", -11)])
def test_a_worker_that_dies_in_a_task(make_pool, ends, how, code):
    """The record of a worker that a task has ended has its exit code or signal."""
    pool = make_pool(P2PPool, 2, on_worker_end=ends)
    with pytest.raises(WorkerDied) as caught:
        pool.apply(work.end, (how,), worker=1)
    end = ends.of(caught.value.pid)
    assert (end.worker, end.exitcode, end.reason) == (1, code, "died")
    assert end.signal == caught.value.signal
    ready(pool, end.pid)
    pool.close()
    pool.join()
    assert [end.reason for end in ends] == ["died", "closed", "closed"]


def test_a_worker_that_the_pool_kills(ends):
    """A worker that does not stop its task at its time limit was "stopped"."""
    with Pool(1, work.nothing, on_worker_end=ends) as pool:  # the task's module is imported
        (pid,) = ready(pool)
        with pytest.raises(TaskTimeout):
            pool.apply(work.spin_in_c, timeout=0.5)
        assert ends.of(pid)[3:5] == (-9, "stopped")
        assert pool.apply(work.square, (3,)) == 9


def test_killed_while_it_starts(mailbox, ends):
    """A worker that is killed in its initializer was not ready: "start failed"."""
    with Pool(1, work.post_and_sleep, (mailbox.path,), on_worker_end=ends) as pool:
        for _ in range(2):
            pid = int(mailbox.line(WAIT))
            os.kill(pid, signal.SIGKILL)
            assert ends.of(pid)[3:5] == (-9, "start failed")
        last = int(mailbox.line(WAIT))
        pool.terminate()
        assert ends.of(last).reason == "terminated"
    assert len(ends) == 3


@pytest.mark.parametrize("how", ["raise", "os._exit"])
def test_initializers_that_fail(ends, log, how):
    """Each start whose initializer fails has a record with the error."""
    with Pool(1, work.end_logged, (how, str(log)), on_worker_end=ends) as pool:
        with pytest.raises((WorkerStartFailed, PoolClosed)):
            pool.apply_async(work.square, (1,)).get(WAIT)
        eventually(lambda: pool.state is PoolStates.TERMINATE, "it has given up", WAIT)
    assert len(ends) == len(log.read_text().split()) == 3
    assert {end.reason for end in ends} == {"start failed"}
    assert all(("sabotage" if how == "raise" else "exit code 4") in end.text for end in ends)


class Busy:
    """A context whose `exit` does not return."""

    def __init__(self, box: str) -> None:
        self.box = box

    def exit(self) -> None:
        work.post_and_sleep(self.box)


def test_killed_in_its_orderly_end(mailbox, ends):
    """A worker that is killed in its `exit()` has died, though it was told to end."""
    with CtxPool(worker_contexts=[Busy(mailbox.path)], on_worker_end=ends) as pool:
        pool.close()
        pid = int(mailbox.line(WAIT))
        os.kill(pid, signal.SIGKILL)
        pool.join()
    assert [end[2:5] for end in ends] == [(pid, -9, "died")]


EXIT = """
    import xpool
    from support import work

    def hook(end):
        print(end.worker, end.reason, flush=True)
        pool.apply(work.square, (3,))

    pool = xpool.Pool(2, on_worker_end=hook)
    if __name__ == "__main__":
        pool.run_all(work.square, 3)  # both workers were started
"""


def test_at_the_interpreters_exit(tmp_path):
    """A pool that is open at the interpreter's exit calls the hook for each worker. The hook may
    call the pool, which refuses."""
    done = scripts.run([scripts.write(tmp_path / "exit.py", EXIT)])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 terminated", "1 terminated"]


def test_a_dropped_pool(ends):
    """A pool that the program has forgotten calls the hook for each worker."""
    pools = [Pool(2, on_worker_end=ends)]
    pids = ready(pools[0])
    with pytest.warns(ResourceWarning):
        pools.clear()
    assert {ends.of(pid).reason for pid in pids} == {"terminated"}


def test_resize(ends):
    """Surplus workers were "resized"; the places are filled again."""
    with Pool(3, on_worker_end=ends) as pool:
        first = ready(pool)
        pool.resize(1)
        assert {ends.of(pid).reason for pid in first[1:]} == {"resized"}
        pool.resize(3)
        assert ready(pool)[0] == first[0]
        assert len(ends) == 2


def test_a_hook_that_raises(monkeypatch, ends):
    """An exception of the hook goes to `threading.excepthook`, and the worker is replaced."""
    caught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(args.exc_type))

    def hook(end: WorkerEnd) -> None:
        ends(end)
        raise KeyError(end.pid)

    with Pool(1, on_worker_end=hook) as pool:
        for _ in range(2):
            with pytest.raises(WorkerDied):
                pool.apply(work.end, ("SIGKILL",))
        assert pool.apply(work.square, (3,)) == 9
    assert caught == [KeyError] * 3 and len(ends) == 3


def test_an_excepthook_that_raises(monkeypatch):
    """If `threading.excepthook` raises too, `sys.excepthook` gets that, and all goes on."""
    caught: list[Any] = []

    def fails(args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(threading, "excepthook", fails)
    monkeypatch.setattr(sys, "excepthook", lambda kind, value, trace: caught.append(kind))
    with Pool(1, on_worker_end=lambda end: 1 / 0) as pool:
        with pytest.raises(WorkerDied):
            pool.apply(work.end, ("SIGKILL",))
        for _ in range(2):
            pool.apply_async(work.square, (3,), callback=lambda _: 1 / 0).wait()
    assert caught == [OSError] * 4


ASKS = {
    "apply": lambda pool: pool.apply(work.square, (3,)),
    "get": lambda pool: pool.apply_async(work.square, (3,)).get(),
    "map": lambda pool: pool.map(work.square, [3])[0],
    "imap": lambda pool: next(pool.imap(work.square, [3])),
    "submit": lambda pool: pool.submit(work.square, 3).result(),
    "run_all": lambda pool: pool.run_all(work.square, 3)[0],
}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hook_that_waits_for_its_pool(ends, workers):
    """A hook can wait for a result of its pool, by any verb, also if all workers have died."""
    results: dict[str, list[int]] = {verb: [] for verb in ASKS}

    def hook(end: WorkerEnd) -> None:
        ends(end)
        if end.reason == "died":
            results[verb].append(ASKS[verb](pool))

    with Pool(workers, on_worker_end=hook) as pool:
        for verb, found in results.items():
            pids = ready(pool, *(end.pid for end in ends))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            eventually(lambda r=found: len(r) == workers, f"{verb}: the hooks have results", WAIT)
        ready(pool, *pids)
    assert results == {verb: [9] * workers for verb in ASKS}
    assert len(ends) == (len(ASKS) + 1) * workers


def test_a_late_return_frees_no_later_worker():
    """A hook that has waited, and returns after its next worker's death, does not let the second
    replacement start early."""
    first, second, told = threading.Event(), threading.Event(), []

    def hook(end: WorkerEnd) -> None:
        if len(told) == 0:
            told.append(end.pid)
            told.append(pool.apply_async(os.getpid).get())
            first.wait(WAIT)
            told.append("first")
        elif len(told) == 2:
            told.append("second begins")
            first.set()
            eventually(lambda: "first" in told, "the first call has returned", WAIT)
            told.append(pool.statistics()["pids"])
        second.set()

    with Pool(1, on_worker_end=hook) as pool:
        os.kill(ready(pool)[0], signal.SIGKILL)
        eventually(lambda: len(told) == 2, "the hook has a result", WAIT)
        os.kill(told[1], signal.SIGKILL)
        assert second.wait(WAIT)
        assert pool.apply(work.square, (3,)) == 9
        assert told[2:] == ["second begins", "first", [None]]


def test_a_hook_that_terminates_its_pool(ends):
    """`terminate` in the hook does not wait; `join` there is refused."""
    refused: list[BaseException] = []

    def hook(end: WorkerEnd) -> None:
        ends(end)
        pool.terminate()
        try:
            pool.join()
        except RuntimeError as exc:
            refused.append(exc)

    pool = Pool(2, on_worker_end=hook)
    os.kill(ready(pool)[0], signal.SIGKILL)
    eventually(lambda: pool.state is PoolStates.TERMINATE, "the pool ends", WAIT)
    pool.join(WAIT)
    assert [end.reason for end in ends] == ["died", "terminated"]
    assert ["of the same pool" in str(exc) for exc in refused] == [True, True]


@pytest.mark.parametrize("how", ["terminate", "join", "exit"])
def test_the_end_waits_for_the_hook(how):
    """`terminate`, `join` and the end of a block wait until the running hook has returned."""
    order: list[str] = []
    running, go_on = threading.Event(), threading.Event()

    def hook(end: WorkerEnd) -> None:
        if not order:
            order.append("begins")
            running.set()
            go_on.wait(WAIT)
        order.append("returns")

    def end_it() -> None:
        if how == "join":
            pool.close()
            pool.join()
        elif how == "terminate":
            pool.terminate()
        else:
            pool.__exit__(None, None, None)
        order.append("ended")

    pool = Pool(1, on_worker_end=hook)
    os.kill(ready(pool)[0], signal.SIGKILL)
    assert running.wait(WAIT)
    thread = threading.Thread(target=end_it)
    thread.start()
    eventually(lambda: pool.state is not PoolStates.RUN, "the end has begun", WAIT)
    go_on.set()
    thread.join()
    pool.join()
    assert order[:2] == ["begins", "returns"] and order[-1] == "ended"


def test_a_slow_callback_delays_no_replacement(ends):
    """While a callback of a task runs, the hook is called and the worker is replaced."""
    begun, go_on = threading.Event(), threading.Event()

    def callback(_: object) -> None:
        begun.set()
        go_on.wait(WAIT)

    with Pool(1, on_worker_end=ends) as pool:
        result = pool.apply_async(work.pid, callback=callback)
        assert begun.wait(WAIT)
        pid = ready(pool)[0]
        os.kill(pid, signal.SIGKILL)
        assert ends.of(pid).reason == "died"
        assert pool.apply(work.square, (3,)) == 9
        go_on.set()
        assert result.get(WAIT) == pid


def test_other_workers_go_on_during_the_hook():
    """While the hook runs, its place is empty, and the other workers run tasks."""
    running, go_on = threading.Event(), threading.Event()

    def hook(end: WorkerEnd) -> None:
        running.set()
        go_on.wait(WAIT)

    with Pool(2, on_worker_end=hook) as pool:
        dead, alive = ready(pool)
        os.kill(dead, signal.SIGKILL)
        assert running.wait(WAIT)
        assert set(pool.map(work.pid, range(20), chunksize=1)) == {alive}
        assert pool.statistics()["pids"] == [None, alive]
        go_on.set()
        assert alive in ready(pool, dead)


def test_a_pool_that_cannot_be_made(ends):
    """If the constructor raises, the hook's thread ends."""
    threads = set(threading.enumerate())
    with pytest.raises(Exception, match="pickle"):
        CtxPool(worker_contexts=[threading.Lock()], on_worker_end=ends)
    assert set(threading.enumerate()) == threads and ends == []


class Core:
    """A context for a worker that shares its process with others."""

    env = {"XPOOL_PROCESS": "a"}

    def __init__(self, log: str) -> None:
        self.log = log

    def exit(self) -> None:
        work.log_line(self.log, str(os.getpid()))


def test_workers_that_share_a_process(log, ends):
    """Each of the workers that share a process has a record, and its context's `exit` is called."""
    contexts = [Core(str(log)) for _ in range(3)]
    with CtxPool(worker_contexts=contexts, on_worker_end=ends) as pool:
        pid, *_ = pids = ready(pool)
        assert pids == [pid] * 3
        os.kill(pid, signal.SIGKILL)
        (second, *_) = ready(pool, pid)
        pool.close()
        pool.join()
    assert [(end.worker, end.pid, end.reason) for end in ends] == [
        *((i, pid, "died") for i in range(3)),
        *((i, second, "closed") for i in range(3)),
    ]
    assert log.read_text().split() == [str(second)] * 3


def test_an_executor(ends):
    """The pool of an `Executor` calls the hook, too."""
    with Executor(1, on_worker_end=ends) as executor:
        future = executor.submit(work.end, "SIGKILL")
        with pytest.raises(WorkerDied):
            future.result(WAIT)
        pid = executor.submit(os.getpid).result(WAIT)
    assert [end.reason for end in ends] == ["died", "closed"] and ends[1].pid == pid
