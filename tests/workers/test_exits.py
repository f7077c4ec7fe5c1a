"""At a worker's normal end, callbacks run that its tasks have registered."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import tempfile
import threading
import weakref
from multiprocessing import util

import pytest
from support import scripts, work

pytestmark = pytest.mark.xpool_only

WAYS = ("finalize", "atexit", "weakref", "thread", "folder", "raises")


class Kept:
    """An object that lives as long as the process."""


kept: list[object] = []


def register(log, ways=WAYS):
    """Register callbacks of each kind that write a line at the end of this process."""
    if "raises" in ways:
        util.Finalize(None, int, ("no number",), exitpriority=1)
        atexit.register(sys.exit, "a callback that exits")
    if "finalize" in ways:
        util.Finalize(None, work.log_line, (log, "finalize"), exitpriority=0)
    if "atexit" in ways:
        atexit.register(work.log_line, log, "atexit")
    if "weakref" in ways:
        kept.append(Kept())
        weakref.finalize(kept[-1], work.log_line, log, "weakref")
    if "thread" in ways:
        threading.Thread(target=wait_and_log, args=(threading.main_thread(), log)).start()
    if "folder" in ways:
        kept.append(tempfile.TemporaryDirectory(dir=os.path.dirname(log), prefix="made-"))
    return os.getpid()


def wait_and_log(main, log):
    """In a thread, write a line when the main thread has ended."""
    main.join()
    work.log_line(log, "thread")


def register_and_exit(log):
    """Register callbacks and end the worker."""
    register(log)
    sys.exit(0)


def ran(log):
    """Return the lines written at the end of processes, and the folders that were left."""
    left = [name for name in os.listdir(log.parent) if name.startswith("made-")]
    return sorted(log.read_text().split()), left


DONE = sorted(("atexit", "finalize", "thread", "weakref"))


@pytest.mark.parametrize("method", [None, "spawn", "fork", "forkserver"])
def test_close_and_join(make_pool, log, method):
    """After `join`, each callback has run once in each worker, although others failed."""
    from xpool import Pool

    pool = make_pool(Pool, 2, register, (str(log),), context=method)
    pool.map(work.square, range(10))
    pool.close()
    pool.join()
    assert ran(log) == (sorted(DONE * 2), [])


def test_other_pools(process_kind, make_pool, log):
    """The callbacks run in every kind of process pool."""
    pool = make_pool(process_kind, 1)
    pool.apply(register, (str(log),))
    pool.close()
    pool.join()
    assert ran(log) == (DONE, [])


def test_maxtasksperchild(make_pool, log):
    """A worker with `maxtasksperchild` runs its callbacks before another replaces it."""
    from xpool import Pool

    pool = make_pool(Pool, 1, maxtasksperchild=1)
    pids = {pool.apply(register, (str(log),)) for _ in range(3)}
    pool.close()
    pool.join()
    assert len(pids) == 3 and ran(log) == (sorted(DONE * 3), [])


def test_exit_in_a_task(make_pool, log):
    """A worker that a task ends by `sys.exit` runs its callbacks."""
    from xpool import Pool, WorkerDied

    pool = make_pool(Pool, 1)
    with pytest.raises(WorkerDied) as caught:
        pool.apply(register_and_exit, (str(log),))
    assert caught.value.exitcode == 0 and ran(log) == (DONE, [])


def test_terminate(make_pool, log):
    """A terminated worker runs no callbacks, as in the standard library."""
    from xpool import Pool

    pool = make_pool(Pool, 1)
    pool.apply(register, (str(log), ("finalize", "atexit", "weakref")))
    pool.terminate()
    pool.join()
    assert ran(log) == ([], [])


INHERITED = """
    import atexit, os, sys, tempfile, weakref
    from multiprocessing import util
    import xpool
    from support import work

    class Kept:
        pass

    if __name__ == "__main__":
        log, method = sys.argv[1:]
        folder = tempfile.TemporaryDirectory()
        kept = Kept()
        weakref.finalize(kept, work.log_line, log, "weakref")
        atexit.register(work.log_line, log, "atexit")
        util.Finalize(None, work.log_line, (log, "finalize"), exitpriority=0)
        with open(log) as file:
            pool = xpool.Pool(2, context=None if method == "None" else method)
            pool.map(work.square, range(10))
            pool.close()
            pool.join()
            assert file.read() == "" and os.path.isdir(folder.name)
"""


@pytest.mark.parametrize("method", ["None", "fork"])
def test_callbacks_of_the_program(tmp_path, log, method):
    """Callbacks of the program run at the end of the program, not of a worker."""
    scripts.run_ok([scripts.write(tmp_path / "inherited.py", INHERITED), str(log), method])
    assert sorted(log.read_text().split()) == ["atexit", "finalize", "weakref"]


def hang(what, limit):
    """Make the end of this process hang."""
    from xpool._python import exits

    exits.EXIT_LIMIT = limit
    if what == "finalizer":
        util.Finalize(None, threading.Event().wait, exitpriority=0)
    elif what == "thread":
        threading.Thread(target=threading.Event().wait).start()
    else:
        atexit.register(ctypes.PyDLL(None).pause)  # holds the interpreter's lock


@pytest.mark.parametrize("method", [None, "fork"])
@pytest.mark.parametrize("what", ["finalizer", "thread", "callback in C"])
def test_an_end_that_hangs(make_pool, capfd, what, method):
    """A worker whose end hangs is killed and prints its stack, and `join` returns."""
    from xpool import Pool

    pool = make_pool(Pool, 1, hang, (what, 0.3), context=method)
    pool.apply(work.square, (3,))
    pool.close()
    pool.join()
    stacks = capfd.readouterr().err
    assert '/exits.py", line' in stacks


FORGETS = """
    import multiprocessing
    from multiprocessing import process
    import xpool

    incomplete = []

    class Children(set):
        def discard(self, child):
            # Another thread that starts a process looks at all children, at any time.
            incomplete.extend(one for one in self if one._popen is None)
            super().discard(child)

    process._children = Children()

    if __name__ == "__main__":
        for method in "fork", "spawn", "forkserver":
            with xpool.Pool(2, maxtasksperchild=1, context=method) as pool:
                assert pool.map(abs, range(6), 1) == list(range(6))
            pool.join()
        multiprocessing.active_children()
        assert not incomplete and not process._children, (incomplete, process._children)
"""


def test_a_process_is_never_half_closed(tmp_path):
    """A thread that starts a process of its own meets no process of the pool without its parts."""
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", FORGETS)]) == ""
