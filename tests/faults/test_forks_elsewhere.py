"""The program forks children that live on: they keep nothing open for which a pool waits."""

import os
import socket

import pytest
from support import scripts
from support.tiers import also

from xpool import Pool, PoolClosed, WorkerDied
from xpool._engine.worker_process import WorkerProcess
from xpool._python import descriptors
from xpool.errors import InternalError

pytestmark = [
    pytest.mark.xpool_only,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

POOL = """
    import os
    from support.forking import forks
    import xpool
    from xpool._engine.launch import ForkServer

    if __name__ == "__main__":
        with forks():
            for _ in range(2):
                with xpool.Pool(2{more}) as pool:
                    assert pool.map_async(abs, range(4)).get(60) == [0, 1, 2, 3]
                    try:
                        pool.apply_async(os._exit, (3,)).get(60)
                    except xpool.WorkerDied:
                        pass
                    assert pool.map_async(abs, range(4)).get(60) == [0, 1, 2, 3]
                    pool.close()
                    pool.join(60)
                ForkServer.stop_all()
        print("done")
"""

EXECUTOR = """
    from support.forking import forks
    import torch
    import xpool

    if __name__ == "__main__":
        with forks():
            for _ in range(2):
                with xpool.Executor(2, max_tasks_per_child=2) as executor:
                    found = list(executor.map(torch.tensor, range(8), timeout=60))
                    assert found == list(map(torch.tensor, range(8)))
        print("done")
"""

PEERS = """
    from support.forking import forks
    import xpool

    def meet(i):
        here = xpool.current_worker()
        here.send(1 - i, i)
        return here.recv(1 - i, timeout=60)

    if __name__ == "__main__":
        with forks():
            for _ in range(2):
                with xpool.P2PPool(2) as pool:
                    calls = [pool.apply_async(meet, (i,), worker=i) for i in range(2)]
                    assert [call.get(60) for call in calls] == [1, 0]
        print("done")
"""

LOADER = """
    from support.forking import forks
    import torch
    from xpool.data import DataLoader

    if __name__ == "__main__":
        rows = torch.arange(12.0)
        with forks():
            for _ in range(2):
                loader = DataLoader(rows, 4, num_workers=2, timeout=60)
                assert torch.equal(torch.cat(list(loader)), rows)
        print("done")
"""

WORLD = """
    from support.forking import forks
    import torch
    import xpool
    from xpool.distributed import World

    def join(rank, address):
        with World(f"w{rank}", rank, 2, dist_init_method=address) as world:
            total = torch.tensor(float(rank))
            with forks():
                world.create_collective_group(world.get_ranks()).all_reduce(total)
        return total.item()

    if __name__ == "__main__":
        import sys
        with forks(), xpool.P2PPool(2) as pool:
            address = f"file://{sys.argv[1]}"
            calls = [pool.apply_async(join, (i, address), worker=i) for i in range(2)]
            assert [call.get(100) for call in calls] == [1.0, 1.0]
        print("done")
"""

OTHERS = """
    import multiprocessing
    import torch
    import xpool

    if __name__ == "__main__":
        for _ in range(2):
            with xpool.Pool(2) as pool:
                others = [
                    multiprocessing.get_context("fork").Pool(2),
                    torch.multiprocessing.get_context("fork").Pool(2),
                ]
                assert pool.map_async(abs, range(4)).get(60) == [0, 1, 2, 3]
                for other in others:
                    other.terminate()
                    other.join()
            pool.join(60)
            xpool._engine.launch.ForkServer.stop_all()
        print("done")
"""

PROGRAMS = {
    "pool": POOL.format(more=""),
    "torch": POOL.format(more="").replace("import os\n", "import os, torch\n", 1),
    "replacements": POOL.format(more=", maxtasksperchild=1"),
    "fork": POOL.format(more=", context='fork'"),
    "executor": EXECUTOR,
    "peers": PEERS,
    "loader": LOADER,
    "world": WORLD,
    "others": OTHERS,
}


@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    ["pool", *also(*(one for one in PROGRAMS if one != "pool"))],
)
def test_a_program_that_forks_every_millisecond(tmp_path, name):
    """In each stage of a pool's life, another thread forks children that live on; nothing waits for
    them."""
    assert scripts.program(tmp_path, PROGRAMS[name], str(tmp_path / "store")) == "done\n"


SLOW_STARTS = """
    import warnings
    warnings.filterwarnings("ignore", "Each worker has its own copy of")
    import multiprocessing.resource_tracker as tracker
    import os, signal, threading
    from multiprocessing.shared_memory import SharedMemory
    import xpool
    from support.waiting import eventually
    from xpool._python import starting

    def slowly(call, first):
        calls = []

        def wrapper(*args):
            calls.append(threading.current_thread().name)
            if len(calls) == first:
                waited.append(go.wait(60))
            return call(*args)

        return wrapper, calls

    def register(x):
        memory = SharedMemory(create=True, size=8)
        memory.close()
        memory.unlink()

    if __name__ == "__main__":
        waited, go = [], threading.Event()
        tracker.getfd, trackers = slowly(tracker.getfd, 1)
        with xpool.Pool(2) as pool:
            registered = pool.apply_async(register, (0,))
            eventually(lambda: trackers, "the tracker is started", 60)
            assert pool.apply_async(abs, (-1,)).get(60) == 1
            assert pool.apply(abs, (-1,)) == 1
            go.set()
            registered.get(60)
        go.clear()
        starting.start_server, servers = slowly(starting.start_server, 1)
        with xpool.Pool(2) as pool:
            one, other = pool.run_all(os.getpid)
            os.kill(pool.apply(os.getppid), signal.SIGKILL)
            os.kill(one, signal.SIGKILL)  # its replacement comes from another server
            eventually(lambda: servers, "the other server is started", 60)
            assert pool.apply_async(os.getpid).get(60) == other
            assert pool.apply(os.getpid) == other
            go.set()
            eventually(lambda: len(waited) == 2, "the other server is started", 60)
        assert waited == [True, True]
        assert not [name for name in servers + trackers if name.endswith("-engine")]
"""


def test_a_slow_start_of_a_server_or_tracker(tmp_path):
    """While another server or the resource tracker is started, the pool answers calls: another
    thread starts them, without the engine's lock."""
    scripts.program(tmp_path, SLOW_STARTS)


def test_a_thread_that_starts_processes_fails(make_pool, monkeypatch):
    """If it is stopped by an error that is no `Exception`, the pool fails with it, and its callers
    do not wait."""
    pool = make_pool(Pool, 1)
    assert pool.apply(abs, (-1,)) == 1

    def launch(*args):
        raise SystemExit("no more processes")

    monkeypatch.setattr(WorkerProcess, "launch", launch)
    with pytest.raises(WorkerDied):
        pool.apply(os._exit, (3,))
    with pytest.raises((InternalError, PoolClosed), match="no more processes"):
        pool.apply(abs, (-1,))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_has_no_private_socket():
    """A forked child closes both ends of a private pair, unless they were closed before."""
    one, other = descriptors.private_pair(socket.SOCK_STREAM)
    gone, last = descriptors.private_pair(socket.SOCK_STREAM)
    with one, other, last, open(os.devnull) as null:
        number = gone.fileno()
        gone.close()
        os.dup2(null.fileno(), number)
        pid = os.fork()
        if not pid:
            found = [_is_open(fd) for fd in (one.fileno(), other.fileno(), number)]
            os._exit(found != [False, False, True])
        os.close(number)
        assert os.waitpid(pid, 0)[1] == 0


INHERITABLE = """
    import os, select
    import xpool

    if __name__ == "__main__":
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        with xpool.Pool(1) as pool:
            assert pool.apply(abs, (-1,)) == 1
            os.close(writer)
            poller = select.poll()
            poller.register(reader, select.POLLIN)
            assert poller.poll(60_000), "the server or the worker has it"
            assert os.read(reader, 1) == b""
"""


def test_the_server_has_no_descriptor_of_the_program(tmp_path):
    """A server closes descriptors that the program has left inheritable."""
    scripts.program(tmp_path, INHERITABLE)


FORKED = """
    import ctypes, os, signal, sys, warnings
    from concurrent.futures import BrokenExecutor
    import xpool

    def read(path):
        return os.read(os.open(path, os.O_RDONLY), 5)

    def fails(call):
        try:
            call()
        except (xpool.PoolClosed, BrokenExecutor) as error:
            assert "that this one was forked from" in str(error), error
        else:
            raise AssertionError(call)

    def child(pool, waits, future):
        fails(lambda: pool.apply(abs, (-1,)))
        fails(lambda: pool.map(abs, [-1]))
        fails(waits.get)
        fails(future.result)
        with xpool.Pool(1) as own:
            assert own.map(abs, [-1]) == [1]
        pool.terminate()
        pool.join()
        assert ends == []

    if __name__ == "__main__":
        ends = []
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        paths = [os.path.join(sys.argv[1], name) for name in "ab"]
        for path in paths:
            os.mkfifo(path)
        with xpool.Pool(2, context={context!r}, on_worker_end=ends.append) as pool:
            calls = pool.apply_async(read, paths[:1]), pool.executor().submit(read, paths[1])
            for use in child, lambda *_: None:
                # No thread asks for the interpreter during a fork of which Python does not hear:
                # the child would hand it over, and wait for a lock that this thread held.
                sys.setswitchinterval(100)
                pid = {fork}()
                sys.setswitchinterval(0.005)
                if not pid:
                    signal.alarm(60)
                    use(pool, *calls)
                    sys.exit()
                assert os.waitpid(pid, 0)[1] == 0, use
            for path in paths:
                os.write(os.open(path, os.O_RDWR), b"there")
            assert [calls[0].get(), calls[1].result()] == [b"there", b"there"]
            pool.run_all(abs, -1)  # one worker may have read both, before the other was forked
        assert len(ends) == 2, ends
"""


@pytest.mark.parametrize(
    ("fork", "context"),
    [("ctypes.PyDLL(None).fork", None), *also(("os.fork", None), ("os.fork", "fork"))],
)
def test_a_child_and_its_end(tmp_path, fork, context):
    """In a forked child, the parent's pool refuses calls, a pool of its own works, and the end of
    the child leaves the parent's workers alone, and calls no `on_worker_end`. Python hears nothing
    of a fork by C code."""
    text = FORKED.format(fork=fork, context=context)
    scripts.program(tmp_path, text, str(tmp_path))


AT_ONCE = """
    import ctypes, os, signal, sys
    import xpool

    sys.setswitchinterval(100)  # seconds: a new thread runs when this one waits

    if __name__ == "__main__":
        pool = xpool.{kind}(1)
        pid = {fork}()
        if not pid:
            signal.alarm(60)
            pool.terminate()
            pool.join()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        sys.setswitchinterval(0.005)
        assert pool.apply(abs, (-1,)) == 1
        pool.close()
        pool.join()
"""


@pytest.mark.parametrize(
    ("kind", "fork"), [("Pool", "ctypes.PyDLL(None).fork"), ("ThreadPool", "os.fork")]
)
def test_a_fork_before_the_pools_thread_has_run(tmp_path, fork, kind):
    """In the child, `join` does not wait for the thread, and does not take it for one to start."""
    text = AT_ONCE.format(fork=fork, kind=kind)
    file = scripts.write(tmp_path / "at_once.py", text)
    # Python 3.12 warns of forks of a process with threads.
    scripts.run_ok(["-W", "ignore:This process:DeprecationWarning", file])


LATE = """
    import os
    from xpool._python import at_fork

    calls, late = [], [True]

    def register():
        if late:
            late.clear()
            at_fork.at_fork(
                before=lambda: calls.append("before"), in_parent=lambda: calls.append("in parent")
            )

    def fork():
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)

    os.register_at_fork(before=register)
    fork()
    assert calls == ["before", "in parent"]
    fork()
    assert calls == ["before", "in parent"] * 2
"""


def test_a_module_that_is_imported_during_a_fork(tmp_path):
    """Its function for the parent, which may release a lock, is called only after the other."""
    scripts.program(tmp_path, LATE)


STRUCK = """
    import os, signal, warnings
    import xpool

    class Struck(Exception):
        pass

    def strike(signum, frame):
        raise Struck

    if __name__ == "__main__":
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        with xpool.Pool(1) as pool:
            assert pool.apply(abs, (-1,)) == 1
            signal.signal(signal.SIGALRM, strike)
            struck = 0
            for n in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + n * 0.00002, 1)
                    while True:
                        pid = os.fork()
                        if not pid:
                            os._exit(0)
                        os.waitpid(pid, 0)
                except Struck:
                    struck += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert struck == 150
            assert pool.apply(abs, (-1,)) == 1
            pool.close()
            pool.join(60)
        print("joined")
"""


def test_a_handler_that_raises_during_a_fork(tmp_path):
    """It raises after the fork, and leaves no lock taken."""
    done = scripts.run([scripts.write(tmp_path / "struck.py", STRUCK)])
    # Python prints what is raised in the few instructions before the handler is deferred.
    assert done.stdout == "joined\n", done.stderr


IN_TASKS = """
    import os, sys, time
    import xpool

    def forking(i):
        if i % 10 == 7:
            pid = os.fork()
            if not pid:
                if way == "exits":
                    sys.exit(3)
                if way == "raises":
                    os.execv("/nowhere/program", ["program"])
                return "child"
            statuses.append(os.waitpid(pid, 0)[1])
        return i

    def late(i):
        if not os.fork():
            sys.exit(3)
        time.sleep(60)

    def ended():
        found, statuses[:] = statuses[:], []
        return found

    class Context:
        def exit(self):
            with open(sys.argv[1], "a") as log:
                log.write("x")

    if __name__ == "__main__":
        for way, status in ("exits", 3), ("returns", 0), ("raises", 1):
            statuses = []
            with xpool.Pool(1, context={context!r}) as pool:
                assert list(pool.imap(forking, range(40))) == list(range(40))
                assert pool.apply(ended) == [status << 8] * 4
        with xpool.Pool(1, context={context!r}) as pool:
            for limit in 0.1, 1, 10:  # it may end before the task has begun
                try:
                    pool.apply(late, (0,), timeout=limit)
                except xpool.TaskTimeout as error:
                    stack = error.stack
                    if "in late" in stack:
                        break
            assert "in late" in stack, stack
        way, statuses = "exits", []
        with xpool.CtxPool(worker_contexts=[Context()], context={context!r}) as pool:
            assert pool.map(lambda context, i: forking(i), range(10)) == list(range(10))
            pool.close()
            pool.join()
        with open(sys.argv[1]) as log:
            assert log.read() == "x"
"""


@pytest.mark.parametrize("context", [None, *also("fork", "spawn")])
def test_a_task_that_forks(tmp_path, context):
    """A child that a task forks answers no task, whether it exits, returns or raises. It does not
    stop the clock of its parent's task, and does not call `exit` of the context."""
    file = scripts.write(tmp_path / "program.py", IN_TASKS.format(context=context))
    done = scripts.run([file, str(tmp_path / "log")])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("FileNotFoundError") == 4


IN_THREADS = """
    import os, signal, sys, time
    import xpool

    def at_gate(path):
        while not os.path.exists(path):
            time.sleep(0.001)

    def fork(*_):
        pid = os.fork()
        if not pid:
            signal.alarm(60)
        else:
            statuses.append(os.waitpid(pid, 0)[1])
        return os.getpid()

    def run(i):
        return fork() if i == 5 else ran.append(i)

    if __name__ == "__main__":
        statuses, ran, main = [], [], os.getpid()
        with xpool.Pool(1, on_worker_end=fork) as pool:
            pool.apply_async(abs, (-1,), callback=fork).wait()
            gate = sys.argv[0] + ".gate"
            future = pool.submit(at_gate, gate)
            future.add_done_callback(fork)  # later, in a thread of the pool
            open(gate, "w").close()
            assert list(pool.imap(abs, map(lambda i: fork() and i, range(2)))) == [0, 1]
            pool.close()
            pool.join()
        assert statuses == [0] * 5, statuses
        with xpool.ThreadPool(1) as pool:
            found = pool.map(run, range(10))
            found += [pool.apply_async(fork, timeout=60).get(), *pool.imap(fork, iter(range(2)))]
        assert set(found) == {None, main}, found
        assert statuses == [0] * 9 and sorted(ran) == [0, 1, 2, 3, 4, 6, 7, 8, 9], (statuses, ran)
        os.write(1, b"end of the program\\n")
"""


def test_threads_of_a_pool_that_fork(tmp_path):
    """If a callback or a task of a thread forks and the child returns there, the child ends. It
    runs no other task."""
    file = scripts.write(tmp_path / "program.py", IN_THREADS)
    # Python 3.12 warns of forks of a process with threads.
    assert scripts.run_ok(["-W", "ignore:This process:DeprecationWarning", file]) == (
        "end of the program\n"
    )


CLOSED = """
    import os
    import xpool

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            pool.apply(abs, (-1,))
            pool.close()
            pool.join()
        os.closerange(3, 1000)
        pid = os.fork()
        assert not pid or os.waitpid(pid, 0)[1] == 0
"""


def test_a_program_that_closes_all_descriptors(tmp_path):
    """After its pools have ended, it can fork and end without a word, as daemons do."""
    scripts.program(tmp_path, CLOSED)
