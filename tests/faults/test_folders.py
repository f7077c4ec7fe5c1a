"""Unusual or removed working directories, arguments and import paths."""

import os
import signal

import pytest
from support import scripts, work
from support.tiers import also
from support.waiting import eventually

from xpool._engine.reactor import Reactor

pytestmark = pytest.mark.xpool_only

START = """
    import os, pathlib, signal, sys, tempfile, threading
    import xpool
    from support import work

    def where(*_):
        try:
            return os.getcwd()
        except FileNotFoundError:
            return "removed"

    def kill_one(pool):
        pool.apply_async(signal.raise_signal, (signal.SIGKILL,)).wait()

    if __name__ == "__main__":
        method = eval(sys.argv[1])
"""


@pytest.mark.parametrize("method", [None, *also("fork")])
def test_a_folder_that_was_removed(tmp_path, method):
    """If the program's folder was removed, its workers start in it too."""
    text = (
        START
        + """
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        with xpool.Pool(1, context=method) as pool:
            print(pool.apply(where) == os.getcwd())
            os.rmdir(folder)
            kill_one(pool)
            print(pool.apply(where))
            print(pool.map(work.square, range(4)))
        with xpool.Pool(2, context=method) as pool:
            print(pool.apply(where))
        os.chdir("/")
        with xpool.Pool(1, context=method) as pool:
            print(pool.apply(where))
    """
    )
    out = scripts.program(tmp_path, text, repr(method))
    assert out.split("\n")[:-1] == ["True", "removed", "[0, 1, 4, 9]", "removed", "/"]


ODD = {
    "argv is None": "sys.argv = None",
    "argv is deleted": "del sys.argv",
    "argv has a lock": "sys.argv.append(threading.Lock())",
    "argv is a tuple": "sys.argv = ('a', 'b')",
    "path has a lock": "sys.path.append(threading.Lock())",
    "path has a Path": "sys.path.append(pathlib.Path('/'))",
    "path is a tuple": "sys.path = tuple(sys.path)",
    "environ is a dict": "os.environ = dict(os.environ)",
}


def test_arguments_and_path_of_any_kind(tmp_path):
    """Workers start with any value of `sys.argv` and `sys.path`. They get the arguments of now;
    those that cannot be sent become text."""
    text = (
        START
        + f"""
        import xpool._engine.launch

        for name, odd in {ODD!r}.items():
            before = list(sys.argv), list(sys.path), os.environ
            with xpool.Pool(1, context=method) as pool:
                pool.apply(where)
                exec(odd)
                kill_one(pool)
                found = pool.map(work.square, range(4))
                xpool._engine.launch.ForkServer.stop_all()
                found.append(pool.apply_async(work.square, (3,), retries=1).get())
            with xpool.Pool(1) as pool:
                found.append(pool.apply(work.square, (5,)))
            sys.argv, sys.path, os.environ = before
            print(f"{{name}}: {{found}}")
        sys.argv = ["prog", pathlib.Path("/tmp"), threading.Lock(), "last"]
        with xpool.Pool(1) as pool:
            print(pool.apply(eval, ("__import__('sys').argv",)))
    """
    )
    out = scripts.program(tmp_path, text, "None")
    *odd, last = out.splitlines()
    assert odd == [f"{name}: [0, 1, 4, 9, 9, 25]" for name in ODD]
    assert last == "['prog', '/tmp', '<lock>', 'last']"


@pytest.mark.parametrize("nth", [1, 2])
def test_a_start_that_fails_half_way(process_kind, make_pool, monkeypatch, nth):
    """If the engine cannot watch a new worker, it ends that worker and starts another."""
    pool = make_pool(process_kind, 1)
    (before,) = pool.map(work.pid, range(1))
    add, calls = Reactor.add, []

    def refuse(self, *args, **kwds):
        calls.append(args)
        if len(calls) == nth:
            raise OSError(28, "No space left on device")
        add(self, *args, **kwds)

    monkeypatch.setattr(Reactor, "add", refuse)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: len(calls) > nth, "another start")
    assert pool.map(work.square, range(4)) == [0, 1, 4, 9]


@pytest.mark.exhaustive
def test_a_start_that_fails_for_good(process_kind, make_pool, monkeypatch):
    """If a worker's start always fails, the pool stops and gives the reason."""
    from xpool._pools import assembly
    from xpool.errors import PoolClosed, WorkerStartFailed

    pool = make_pool(process_kind, 1)
    pid = pool.apply(work.pid)

    def refuse():
        raise LookupError("no such thing")

    monkeypatch.setattr(assembly, "_own_cpus", refuse)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((WorkerStartFailed, PoolClosed), match="LookupError: no such thing"):
        pool.map(work.square, range(4))
