"""The fork server: its end, its forks, and the state that workers inherit."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest
from support import scripts
from support.limits import WAIT
from support.tiers import also
from support.waiting import eventually

from xpool import Pool, WorkerDied
from xpool._engine.launch import ForkServer
from xpool._engine.worker_process import WorkerProcess

pytestmark = pytest.mark.xpool_only

KILLED = """
    import os, signal, sys
    import xpool
    from support import leaks, work
    from support.waiting import Gate, Mailbox, wait_gone

    if __name__ == "__main__":
        mailbox, gate = Mailbox(sys.argv[1] + "/mailbox"), Gate(sys.argv[1] + "/gate")
        ends = []
        pool = xpool.Pool(2, on_worker_end=ends.append)
        running = [pool.apply_async(work.post_and_gate, (mailbox.path, gate.path, i))
                   for i in range(2)]
        before = {int(line) for line in mailbox.lines(2)}
        (server,) = leaks.servers()
        os.kill(server, signal.SIGKILL)
        assert wait_gone([server]) == []
        gate.open(2)
        assert [r.get() for r in running] == [0, 1]
        assert {pool.apply(os.getpid) for _ in range(4)} <= before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert wait_gone(list(before)) == []
        after = {pool.apply_async(os.getpid, retries=3).get() for _ in range(4)}
        assert not after & before
        pool.close()
        pool.join()
        assert len({end.pid for end in ends}) == len(ends) == 4, ends
        seen = sorted((end.pid in before, end.exitcode, end.reason) for end in ends)
        assert seen == [(False, 0, "closed")] * 2 + [(True, None, "died")] * 2, seen
"""


def test_the_server_is_killed_while_its_workers_run(tmp_path):
    """Workers of a killed server finish and run tasks. Replacements come from a new server. The
    records of its workers' ends have no exit code, which only the server knows."""
    assert scripts.program(tmp_path, KILLED, str(tmp_path)) == ""


UNBORN = """
    import os, pathlib, signal, sys
    import xpool
    from support import leaks

    if __name__ == "__main__":
        begun = pathlib.Path(sys.argv[1]) / "begun"
        with xpool.Pool(1) as pool:
            pool.apply(os.getpid)
            (server,) = leaks.servers()
            os.kill(server, signal.SIGSTOP)
            ending = xpool.Pool(2, pathlib.Path.touch, (begun,))
            ending.terminate_workers()
            os.kill(server, signal.SIGCONT)
            ending.terminate()
        assert not begun.exists()
"""


def test_workers_that_are_not_forked_yet_are_ended(tmp_path):
    """Workers that the server has not forked yet are ended before they run the initializer."""
    assert scripts.program(tmp_path, UNBORN, str(tmp_path)) == ""


FORKS = """
    import os
    from xpool._python import at_fork as forks

    called = []
    forks.at_fork(before=lambda: called.append("before"), in_child=lambda: called.append("child"))

    def told(fork):
        r, w = os.pipe()
        pid = fork()
        if pid == 0:
            os.write(w, repr(called).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return os.read(r, 1000)

    assert told(forks.fork_unused) == b"[]"
    assert told(os.fork) == b"['before', 'child']"
"""


def test_fork_unused_calls_nothing(tmp_path):
    """The server's own forks do not run registered functions. All other forks do."""
    scripts.program(tmp_path, FORKS)


KEPT = """
    import os
    import xpool

    def variables(i):
        return dict(os.environ)

    if __name__ == "__main__":
        with xpool.Pool(1, maxtasksperchild=1) as pool:
            for change in ({}, {"XPOOL_A": "1"}, {"XPOOL_A": "2"}, {"XPOOL_A": None}):
                for name, value in change.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
                pool.map(variables, [0])  # by a worker that was there before the change
                (there,) = pool.map(variables, [0])
                there.pop("OMP_NUM_THREADS", None)  # a worker's share of the cores
                here = dict(os.environ)
                here.pop("OMP_NUM_THREADS", None)
                assert there == here, (there, here)
"""


def test_workers_have_the_present_variables(tmp_path):
    """A worker has the program's present variables, even if the server has older ones."""
    scripts.program(tmp_path, KEPT)


INTERRUPTED = """
    import os, signal
    import xpool
    from xpool._engine.launch import ForkServer, start_early

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs this may ignore it
        start_early(["json"])  # what `preload` does first
        (server,) = ForkServer._servers.values()
        pid = server._process.pid
        with xpool.Pool(1) as pool:
            result = pool.apply_async(os.getppid)
            while not result.ready():  # Python's own start, and all imports
                assert server._process.poll() is None, "it has died"
                os.kill(pid, signal.SIGINT)
            assert result.get() == pid
"""


def test_ctrl_c_while_the_server_starts(tmp_path):
    """Ctrl-C does not stop a starting server, which prints nothing."""
    assert scripts.program(tmp_path, INTERRUPTED) == ""


REFUSED = """
    import os
    import xpool

    if __name__ == "__main__":
        pid = os.getpid()
        xpool.preload("refuses")
        try:
            with xpool.Pool(1) as pool:
                assert pool.apply(os.getppid) != pid
                print("worked")
        except xpool.WorkerStartFailed as exc:
            assert "fork() was refused: Resource temporarily unavailable" in str(exc), exc
            print("refused")
"""

REFUSES = """
    import errno, os

    left = {times}
    true_fork = os.fork

    def fork():
        global left
        left -= 1
        if left >= 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return true_fork()

    os.fork = fork
"""


@pytest.mark.parametrize(
    ("times", "outcome"),
    [(2, "worked\n"), pytest.param(99, "refused\n", marks=pytest.mark.exhaustive)],
)
def test_the_system_has_no_process(tmp_path, times, outcome):
    """If a fork is refused, the server tries again a few times. Then the pool raises an error."""
    refuses = REFUSES.format(times=times)
    assert scripts.program(tmp_path, REFUSED, refuses=refuses) == outcome


SLOW = """
    import os, time
    import xpool
    from xpool._engine import monitor

    monitor.STARVED_SECONDS = 60.0  # no other worker could be forked

    def waits(path):
        with open(path, "w"):
            time.sleep(60)

    if __name__ == "__main__":
        ends = []
        os.mkfifo("go")
        os.mkfifo("begun")
        xpool.preload("stops")
        with xpool.Pool(1, on_worker_end=ends.append) as pool:
            pid = pool.apply(os.getpid)
            assert pool.statistics()["pids"] == [pid]
            call = pool.apply_async(waits, ("begun",))
            with open("begun"):
                call.cancel()
            assert pool.apply(os.getpid) == pid
            with open("go", "w"):
                pass
        assert [end.pid for end in ends] == [pid]
"""

STOPS = """
    import os

    true_fork = os.fork

    def fork():
        pid = true_fork()
        if pid:
            open("go").close()
        return pid

    os.fork = fork
"""


def test_a_worker_runs_before_the_server_goes_on(tmp_path):
    """On a busy machine, a worker may run tasks before the server has told its pid. The pool knows
    the pid, so it can stop a task, and tells of the worker's end."""
    scripts.write(tmp_path / "stops.py", STOPS)
    program = scripts.write(tmp_path / "program.py", SLOW)
    assert scripts.run_ok([program], cwd=tmp_path) == ""


FLAGS = """
    import os, sys
    sys.path[:] = [*{path!r}, "/nowhere/else"]
    import xpool

    def found(x):
        with open("/proc/self/cmdline") as file:
            return str(sys.flags), file.read()

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            flags, command = pool.apply(found, (1,))
            # No assertions: some options leave them out.
            print(flags == str(sys.flags))
            print("xpool._worker.server" in command, sys.path[-1] in command)
        pool.join()
"""


@pytest.mark.parametrize("option", ["-I", *also("-O", "-OO", "-s", "-S", "-E", "-B", "-bb")])
def test_workers_have_the_programs_options(tmp_path, option):
    """Workers have Python's options. Their command line does not contain the search path."""
    path = scripts.write(tmp_path / "flags.py", FLAGS.format(path=[str(scripts.ROOT), *sys.path]))
    assert scripts.run_ok([option, path]) == "True\nTrue False\n"


CHANGED = """
    import os, signal
    import xpool

    def found(x):
        umask = os.umask(0)
        os.umask(umask)
        return umask, os.getpriority(os.PRIO_PROCESS, 0), os.getegid(), os.getppid()

    def change():
        os.umask(0o027)
        os.nice(3)
        if os.geteuid() == 0:
            os.setegid(os.getegid() + 1)

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            before = pool.apply(found, (1,))
            change()
            now = 0o027, os.getpriority(os.PRIO_PROCESS, 0), os.getegid()
            with xpool.Pool(1) as other:
                *after, parent = other.apply(found, (1,))
                assert tuple(after) == now, (after, now)
            os.kill(pool.apply(os.getpid), signal.SIGKILL)
            *after, same = pool.apply_async(found, (1,), retries=3).get()
            assert tuple(after) == now != before[:3], (after, now)
            assert same == parent != before[3]
        pool.join()
"""


def test_a_program_changes_its_umask_and_group(tmp_path):
    """A new worker has the program's present umask, niceness and group. So has a replacement."""
    assert scripts.program(tmp_path, CHANGED) == ""


DROPPED = """
    import os, sys
    import xpool
    from support.waiting import wait_gone
    from support import work

    if __name__ == "__main__":
        pools = [xpool.Pool(1, context=method) for method in (None, "spawn")]
        pids = [pool.apply(os.getpid) for pool in pools]
        busy = [pool.apply_async(work.spin_in_c) for pool in pools]
        late = pools[0].apply_async(work.square, (3,))
        # As a daemon does that has opened its ports.
        os.setresuid(65534, 65534, 0)
        for pool in pools:
            pool.terminate()
            pool.join()
        os.setresuid(0, 0, 0)
        assert wait_gone(pids) == []
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_a_program_changes_its_user(tmp_path):
    """A program that may no longer signal its workers still ends them."""
    assert scripts.program(tmp_path, DROPPED) == ""


def leave_others() -> list[int]:
    """Fork a child that keeps this worker's pipes open, and start a program. Return all pids."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    return [os.getpid(), child, os.posix_spawn("/bin/sleep", ["sleep", "600"], {})]


def test_the_lock_is_free_while_a_process_is_started(make_pool, monkeypatch):
    """While a replacement is started, callers can use the pool; so can the caller of the task whose
    worker has died. A thread of its own starts it, since hooks of a fork may wait."""
    pool = make_pool(Pool, 2)
    eventually(lambda: pool.statistics()["ready"] == 2, "both workers are ready")
    launch, entered, go = WorkerProcess.launch, threading.Event(), threading.Event()
    waited: list[bool] = []
    threads: list[str] = []

    def slow(*args):
        threads.append(threading.current_thread().name)
        entered.set()
        waited.append(go.wait(WAIT))
        return launch(*args)

    monkeypatch.setattr(WorkerProcess, "launch", slow)
    with pytest.raises(WorkerDied):
        pool.apply(os._exit, (3,))
    assert entered.wait(WAIT)
    # Do not wait for this answer here: the engine's thread may have to receive it.
    result = pool.apply_async(abs, (-1,))
    assert pool.statistics()["ready"] == 1
    go.set()
    assert result.get(WAIT) == 1
    eventually(lambda: pool.statistics()["ready"] == 2, "the replacement is ready")
    assert waited == [True] and not [name for name in threads if name.endswith("-engine")]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_worker_that_has_forked_outlives_its_server(make_pool):
    """A worker of a killed server goes on. Its death is seen, also if its child has its pipes. A
    program that a task has started inherits none."""
    pool = make_pool(Pool, 1)
    worker, *others = pool.apply(leave_others)
    (server,) = [one for one in ForkServer._servers.values() if one._live]
    server._process.kill()
    assert server._process.wait(WAIT) == -signal.SIGKILL
    assert pool.apply(os.getpid) == worker
    os.kill(worker, signal.SIGKILL)
    assert pool.apply_async(abs, (-1,), retries=1).get(WAIT) == 1
    assert pool.statistics()["deaths"] == 1
    for pid in others:
        os.kill(pid, signal.SIGKILL)
