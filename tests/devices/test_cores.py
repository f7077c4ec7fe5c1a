"""Workers that are threads of one process, as for the cores of a chip; the device is simulated."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import scripts, work
from support.tiers import also
from support.waiting import Gate, Mailbox, eventually, wait_gone

from xpool import (
    CtxPool,
    OptionError,
    PoolClosed,
    TaskCancelled,
    TaskStopped,
    TaskTimeout,
    TensorLost,
    WorkerDied,
    WorkerStartFailed,
    current_worker,
)
from xpool.testing._test_tasks import spin

pytestmark = pytest.mark.xpool_only


class Core:
    """A context for a worker thread; contexts with the same `process` share a process."""

    def __init__(self, number: int, process: str = "a", **env: str) -> None:
        self.number = number
        self.env: dict[str, str | None] = {"XPOOL_PROCESS": process, **env}
        self.entered: list[int] = []

    def enter(self) -> None:
        self.entered.append(threading.get_ident())


def cores(*workers: int) -> list[Core]:
    """Contexts for processes with these numbers of workers."""
    names = [str(p) for p, count in enumerate(workers) for _ in range(count)]
    return [Core(i, name) for i, name in enumerate(names)]


@pytest.fixture
def start(make_pool: Callable[..., Any]) -> Callable[..., CtxPool]:
    """Start pools whose processes have these numbers of workers."""

    def make(*workers: int, **options: Any) -> CtxPool:
        pool: CtxPool = make_pool(CtxPool, worker_contexts=cores(*workers), **options)
        return pool

    return make


def who(core: Core) -> tuple[int, int, int, int, list[int]]:
    """Return the context's number, the worker's index, pid, thread, and the threads that
    entered."""
    assert current_worker().context is core
    return (core.number, current_worker().index, os.getpid(), threading.get_ident(), core.entered)


def at_gate(core: Core, box: str, gate: str) -> tuple[int, int]:
    work.post(box, str(core.number))
    work.pass_gate(gate)
    return core.number, os.getpid()


def post_and_run(core: Core, box: str, how: str) -> None:
    """Post the worker's number, then run without end."""
    work.post(box, str(core.number))
    if how == "counts":
        n = 0
        while True:
            n += 1
    while how == "stubborn":
        try:
            post_and_run(core, os.devnull, "counts")
        except TaskStopped:
            continue
    threading.Event().wait()


def leave(core: Core, code: int) -> None:
    sys.exit(code)


def backend(pool: CtxPool, mailbox: Mailbox, gate: Gate) -> list[tuple[int, int]]:
    """Run a task in all workers at the same time; return each worker and its process."""
    asked = [pool.apply_async(at_gate, (mailbox.path, gate.path)) for _ in range(pool.size())]
    mailbox.lines(pool.size())
    gate.open(pool.size())
    return sorted(one.get() for one in asked)


# -- who is who ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["forkserver", *also("spawn", "fork")])
def test_each_worker_is_a_thread(start: Any, mailbox: Mailbox, gate: Gate, method: str):
    """Each worker has its own index, context and thread, with every start method."""
    pool = start(2, 3, 1, context=method)
    found = pool.run_all(who)
    assert [f[0] for f in found] == [f[1] for f in found] == list(range(6))
    processes = [f[2] for f in found]
    assert processes[0] == processes[1] and len(set(processes[2:5])) == 1
    assert len(set(processes)) == 3
    assert len({(f[2], f[3]) for f in found}) == 6
    assert all(f[4] == [f[3]] for f in found), "entered once, in the worker's own thread"
    assert backend(pool, mailbox, gate) == [(i, processes[i]) for i in range(6)]
    assert pool.statistics()["pids"] == processes


def in_thread(core: Core) -> str:
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(current_worker())
        except RuntimeError as exc:
            found.append(str(exc))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return str(found[0])


def test_threads_of_a_task_are_no_workers(start: Any):
    """In a thread that a task started, `current_worker` raises, because the worker is unknown."""
    assert "in the thread in which it runs them" in start(2).apply(in_thread)


def profiled(core: Core) -> list[str]:
    """Return the names of the functions that are called here."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, arg: names.append(frame.f_code.co_name))
    try:
        who(core)
    finally:
        sys.setprofile(None)
    return names


def test_tasks_can_be_profiled(start: Any):
    """A task's calls can be profiled, after tasks that have ended and tasks that were stopped."""
    pool = start(2)
    pool.run_all(who)
    assert "who" in pool.apply_async(profiled, timeout=30).get()
    with pytest.raises(TaskTimeout):
        pool.apply(post_and_run, (os.devnull, "counts"), timeout=0.3)
    assert all("who" in names for names in pool.run_all(profiled, timeout=30))


def log_start(path: str) -> None:
    work.log_line(path, f"begin {current_worker().index}")
    work.log_line(path, f"end {current_worker().index}")


def test_initializers_take_turns(start: Any, log: Path):
    """Initializers of one process run one after the other, so they need no lock."""
    pool = start(3, initializer=log_start, initargs=(str(log),))
    pool.run_all(who)
    lines = log.read_text().splitlines()
    assert lines == [f"{what} {i}" for i in range(3) for what in ("begin", "end")]


SCRIPT = """
import sys, threading
from xpool import CtxPool
class Core:
    env = {"XPOOL_PROCESS": "a"}
meet = threading.Barrier(4)
with open(sys.argv[1], "a") as log:
    print(__name__, file=log)
def together(core, x):
    meet.wait()
    return x
if __name__ == "__main__":
    with CtxPool(worker_contexts=[Core() for _ in range(4)]) as pool:
        print(pool.map(together, range(4), 1))
"""


def test_the_script_is_run_once_for_all(tmp_path: Path, log: Path):
    """Only the program runs its script, also if workers share a process."""
    done = scripts.run([scripts.write(tmp_path / "script.py", SCRIPT), str(log)])
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr
    assert log.read_text().split() == ["__main__"]


# -- what makes no sense -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maxtasksperchild": 3}, "maxtasksperchild=3.*cannot be replaced one by one"),
        ({"seed": 7}, "seed=7.*same generators"),
        (
            {"worker_contexts": [Core(0), Core(1, A="b")]},
            r"\[0, 1\] share a.*differ in env",
        ),
        ({"worker_contexts": [Core(i, "0/2") for i in range(3)]}, "room for 2:"),
        ({"worker_contexts": [Core(i) for i in range(65)]}, "room for 64:"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str):
    """Wrong options are refused when the pool is made, with the remedy."""
    with pytest.raises(OptionError, match=message):
        CtxPool(**{"worker_contexts": cores(2), **options})


def test_different_cpus_in_one_process():
    """Workers of one process cannot have different CPUs."""
    contexts: list[Any] = cores(2)
    contexts[0].cpus, contexts[1].cpus = (0,), (1,)
    with pytest.raises(OptionError, match="differ in cpus"):
        CtxPool(worker_contexts=contexts)


def test_alone_in_its_process(make_pool: Callable[..., Any]):
    """A worker alone in its process behaves like any other worker."""
    pool = make_pool(CtxPool, worker_contexts=[Core(0, "0/2"), Core(1, "1/2")], maxtasksperchild=1)
    assert len({pool.apply(who)[2] for _ in range(4)}) == 4


@pytest.mark.torch
def test_no_group_of_torch_distributed(start: Any):
    """Threads of one process cannot be ranks, because a process has one rank."""
    with pytest.raises(OptionError, match="threads of one process.*per_process=1"):
        start(2).create_group()


# -- kill -9 in each state -----------------------------------------------------------------------


def test_killed_while_all_run(start: Any, mailbox: Mailbox, gate: Gate):
    """Each task of the killed process gets WorkerDied, which names the signal and the other
    tasks."""
    pool = start(2, 2)
    asked = [pool.apply_async(at_gate, (mailbox.path, gate.path)) for _ in range(4)]
    mailbox.lines(4)
    pids = pool.statistics()["pids"]
    os.kill(pids[0], signal.SIGKILL)
    assert wait_gone([pids[0]]) == []
    gate.open(4)
    died, lived = [], []
    for one in asked:
        try:
            lived.append(one.get())
        except WorkerDied as exc:
            died.append(exc)
    assert sorted(i for i, _ in lived) == [2, 3]
    assert sorted(exc.worker for exc in died) == [0, 1]
    for exc in died:
        assert (exc.pid, exc.signal, exc.killed) == (pids[0], "SIGKILL", 1)
        assert f"worker {1 - exc.worker} ran at_gate()" in exc.beside
        assert exc.beside in str(exc) and "out-of-memory" in str(exc)


def test_killed_by_a_task(start: Any, mailbox: Mailbox, gate: Gate):
    """An idle thread of the killed process loses no task, and waiting tasks run."""
    pool = start(2)
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        pool.apply(work.kill_oneself)
    assert caught.value.beside == ""
    assert [i for i, _ in backend(pool, mailbox, gate)] == [0, 1]


@pytest.mark.parametrize("code", [0, 3])
def test_a_task_that_exits(start: Any, mailbox: Mailbox, gate: Gate, code: int):
    """`sys.exit` ends the process at once, because other threads may be affected."""
    pool = start(2)
    other = pool.apply_async(at_gate, (mailbox.path, gate.path))
    mailbox.line()
    with pytest.raises(WorkerDied) as caught:
        pool.apply(leave, (code,))
    assert caught.value.exitcode == code
    with pytest.raises(WorkerDied, match=r"may have ended it: worker \d ran leave\(\)") as caught:
        other.get()
    assert caught.value.exitcode == code
    assert [i for i, _ in backend(pool, mailbox, gate)] == [0, 1]


def end_at(core: int, box: str, once: str) -> None:
    """Post this worker's start; once, at worker `core`, wait for ever."""
    work.post(box, str(current_worker().index))
    if current_worker().index == core and not os.path.exists(once):
        Path(once).touch()
        work.post(box, f"pid {os.getpid()}")
        signal.pause() if threading.current_thread() is threading.main_thread() else spin()


@pytest.mark.parametrize("which", [1, *also(0, 2)])
def test_killed_while_it_starts(
    start: Any, mailbox: Mailbox, gate: Gate, tmp_path: Path, which: int
):
    """A process dies in the initializer of its first, middle or last worker; the workers after it
    have not begun."""
    pool = start(3, initializer=end_at, initargs=(which, mailbox.path, str(tmp_path / "once")))
    asked = [pool.apply_async(at_gate, (mailbox.path, gate.path)) for _ in range(3)]
    *begun, last = [mailbox.line() for _ in range(which + 2)]
    assert begun == [str(i) for i in range(which + 1)]
    os.kill(int(last.split()[1]), signal.SIGKILL)
    assert mailbox.lines(3) == ["0", "1", "2"]
    assert sorted(mailbox.lines(3)) == ["0", "1", "2"]
    gate.open(3)
    assert sorted(one.get()[0] for one in asked) == [0, 1, 2]


def identity(core: Core, x: Any) -> Any:
    return x


# -- ends ----------------------------------------------------------------------------------------


def test_close_waits_for_all(start: Any, mailbox: Mailbox, gate: Gate):
    """A worker without further tasks does not end its process."""
    pool = start(3)
    result = pool.apply_async(at_gate, (mailbox.path, gate.path))
    mailbox.line()
    pids = set(pool.statistics()["pids"])
    pool.close()
    gate.open(1)
    assert result.get()[0] in (0, 1, 2)
    pool.join()
    assert wait_gone(pids) == []


@pytest.mark.parametrize("how", ["counts", "waits"])
def test_terminate(start: Any, mailbox: Mailbox, how: str):
    """Running and waiting threads end with `terminate`."""
    pool = start(2)
    results = [pool.apply_async(post_and_run, (mailbox.path, how)) for _ in range(2)]
    mailbox.lines(2)
    pids = set(pool.statistics()["pids"])
    pool.terminate()
    pool.join()
    assert wait_gone(pids) == []
    for result in results:
        with pytest.raises(PoolClosed):
            result.get()


PARENT = """
import sys
from devices.test_cores import CtxPool, cores, post_and_run, who
if __name__ == "__main__":
    pool = CtxPool(worker_contexts=cores(2, 2))
    print(*{found[2] for found in pool.run_all(who)}, flush=True)
    busy = [pool.apply_async(post_and_run, ("/dev/null", "counts")) for _ in range(3)]
    sys.stdin.read()
"""


@pytest.mark.exhaustive
def test_the_parent_is_killed(tmp_path: Path):
    """Busy and idle processes die with their parent."""
    with scripts.popen([scripts.write(tmp_path / "parent.py", PARENT)]) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2 and wait_gone(pids) == []


def fail_at(core: int) -> None:
    if current_worker().index == core:
        raise RuntimeError(f"core {core} is in use")


@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_cannot_start(start: Any, which: int):
    """The pool stops, and the error names the failed worker of the process and the reason."""
    pool = start(2, initializer=fail_at, initargs=(which,))
    with pytest.raises(WorkerStartFailed, match=f"core {which} is in use") as caught:
        pool.apply(who)
    assert (caught.value.worker, caught.value.attempts) == (which, 3)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("patient")  # so that the worker can write its stack
def test_an_initializer_that_hangs(start: Any):
    """The limit is for each worker's initializer, and the error has its stack."""
    pool = start(2, initializer=work.spin_in, initargs=(1,), initializer_timeout=2)
    with pytest.raises(WorkerStartFailed, match="Worker 1.*longer than its limit") as caught:
        pool.apply(who)
    assert isinstance(caught.value.__cause__, TaskTimeout)
    assert "spin_in" in caught.value.__cause__.stack


# -- limits and cancelling -----------------------------------------------------------------------


@pytest.mark.parametrize("end", ["timeout", "cancel"])
def test_python_code_is_interrupted(start: Any, mailbox: Mailbox, gate: Gate, end: str):
    """Only the task's thread is interrupted; the process and its other threads continue."""
    pool = start(3)
    before = backend(pool, mailbox, gate)
    beside = [pool.apply_async(at_gate, (mailbox.path, gate.path)) for _ in range(2)]
    mailbox.lines(2)
    limit = 1.0 if end == "timeout" else None
    result = pool.apply_async(post_and_run, (mailbox.path, "counts"), timeout=limit)
    worker = int(mailbox.line())
    if end == "timeout":
        with pytest.raises(TaskTimeout) as caught:
            result.get()
        assert caught.value.worker == worker
        assert "post_and_run" in caught.value.stack.splitlines()[0]
        assert "several" not in caught.value.stack
    else:
        assert result.cancel()
        with pytest.raises(TaskCancelled):
            result.get()
    gate.open(2)
    for one in beside:
        one.get()
    assert backend(pool, mailbox, gate) == before
    assert pool.statistics()["deaths"] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["stubborn", "waits"])
def test_an_uninterruptible_task_ends_its_process(
    start: Any, mailbox: Mailbox, gate: Gate, how: str
):
    """Tasks beside an uninterruptible one learn that it ended the process."""
    pool = start(2)
    beside = pool.apply_async(at_gate, (mailbox.path, gate.path))
    mailbox.line()
    result = pool.apply_async(post_and_run, (mailbox.path, how), timeout=1)
    worker = int(mailbox.line())
    with pytest.raises(TaskTimeout) as caught:
        result.get()
    assert "post_and_run" in caught.value.stack
    with pytest.raises(WorkerDied) as innocent:
        beside.get()
    assert innocent.value.killed == 0
    assert f"worker {worker}, another thread of it, ran post_and_run()" in innocent.value.beside
    assert innocent.value.beside in str(innocent.value)
    assert "out-of-memory" not in str(innocent.value)
    assert [i for i, _ in backend(pool, mailbox, gate)] == [0, 1]


def fail(core: Core, index: int, box: str, how: str) -> None:
    if core.number == index:
        raise ValueError(index)
    post_and_run(core, box, how)


def test_run_all_fails_in_one_worker(start: Any, mailbox: Mailbox, gate: Gate):
    """The other tasks are stopped; if they run Python code, no process ends."""
    pool = start(2, 2)
    before = backend(pool, mailbox, gate)
    with pytest.raises(ValueError, match="3"):
        pool.run_all(fail, 3, os.devnull, "counts")
    assert backend(pool, mailbox, gate) == before


def busy(core: Core, n: int) -> int:
    """Enter and leave the interpreter and the arena's code many times."""
    array = pytest.importorskip("numpy").zeros(1 << 14)
    for _ in range(n):
        array = array + 1
    return int(array[0])


def test_cancelled_anywhere(start: Any):
    """A cancel at any moment affects only its task, running or finished."""
    pool = start(2)
    for n in range(150):
        task = pool.apply_async(busy, (n * 3,))
        numbers = pool.map_async(identity, range(10), 1)
        task.cancel()
        assert numbers.get() == list(range(10))
        assert pool.apply(busy, (3,)) == 3
    eventually(lambda: not pool.statistics()["running"], "no cancelled task runs any more")


@pytest.mark.usefixtures("plugin")
def test_an_import_is_not_interrupted(start: Any, gate: Gate):
    """A timeout during an import kills the process, so that no later task finds half a module."""
    pool = start(2)
    for limit in 1, 5, 25:
        with pytest.raises(TaskTimeout) as caught:
            pool.apply(work.import_plugin, timeout=limit)
        if "plugin.py" in caught.value.stack:
            break  # else the machine was so busy that the time was over before the import began
    assert "preload" in str(caught.value)
    gate.open(1)
    assert pool.apply(work.import_plugin) == ["plugin"]


# -- memory, handles, broadcast ------------------------------------------------------------------


class Standing(Core):
    """A core whose device is simulated."""

    def put(self, tensor: Any) -> Any:
        from support.away import Away

        return Away(tensor)


@pytest.mark.exhaustive
@pytest.mark.torch
def test_handles_go_to_their_worker(make_pool: Callable[..., Any]):
    """The owning worker gets its tensor, its neighbour a copy; both die with the process."""
    from . import handle_tasks as tasks

    contexts = [Standing(i) for i in range(2)]
    pool = make_pool(CtxPool, worker_contexts=contexts, is_copy_tensor=False)
    first, second = pool.run_all(tasks.make)
    assert (first.worker, second.worker, first.pid) == (0, 1, second.pid)
    for handle in (first, second):
        assert pool.apply(owner, (handle,)) == handle.worker
        assert handle.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]
    pid, total, kinds = pool.apply(tasks.use, (first, second))
    assert (pid, total, kinds) == (first.pid, 12.0, ["xla", "cpu"])
    assert pool.run_all(tasks.kept) == [1, 1]
    with pytest.raises(WorkerDied):
        pool.apply(work.kill_oneself, (second,))
    for handle in (first, second):
        with pytest.raises(TensorLost):
            handle.cpu()


def owner(core: Core, tensor: Any) -> int:
    return current_worker().index


def identity_of(core: Core, obj: Any) -> int:
    return id(obj)


@pytest.mark.torch
def test_broadcast(start: Any):
    """Each worker has its own object, the same one in all tasks."""
    import torch

    pool = start(2)
    shared = pool.broadcast({"w": torch.ones(1 << 18)})
    first, second = pool.run_all(identity_of, shared)
    assert first != second
    assert pool.run_all(identity_of, shared) == [first, second]
    assert pool.run_all(total, shared) == [float(1 << 18)] * 2
    assert pool.apply(functools.partial(total, obj=shared)) == 1 << 18


def total(core: Core, obj: Any) -> float:
    return float(obj["w"].sum())
