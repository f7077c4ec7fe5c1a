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
from typing import Any

import pytest
from support import scripts, work
from support.limits import WAIT
from support.tiers import also

import xpool
from xpool import CtxPool, Pool, WorkerDied, current_worker

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
    main.join()
    work.log_line(log, "thread")


def register_and_exit(log):
    register(log)
    sys.exit(0)


def ran(log):
    """Return the lines written at the end of processes, and the folders that were left."""
    left = [name for name in os.listdir(log.parent) if name.startswith("made-")]
    return sorted(log.read_text().split()), left


DONE = sorted(("atexit", "finalize", "thread", "weakref"))


@pytest.mark.parametrize("method", [None, "fork", *also("spawn", "forkserver")])
def test_close_and_join(process_kind, make_pool, log, method):
    """After `join`, each callback has run once in each worker, although others failed."""
    pool = make_pool(process_kind, 2, register, (str(log),), context=method)
    pool.map(work.square, range(10))
    pool.close()
    pool.join()
    assert ran(log) == (sorted(DONE * 2), [])


def test_maxtasksperchild(make_pool, log):
    """A worker with `maxtasksperchild` runs its callbacks before another replaces it."""
    pool = make_pool(Pool, 1, maxtasksperchild=1)
    pids = {pool.apply(register, (str(log),)) for _ in range(3)}
    pool.close()
    pool.join()
    assert len(pids) == 3 and ran(log) == (sorted(DONE * 3), [])


def test_exit_in_a_task(make_pool, log):
    """A worker that a task ends by `sys.exit` runs its callbacks. The error has its exit code."""
    pool = make_pool(Pool, 1)
    with pytest.raises(WorkerDied) as caught:
        pool.apply(register_and_exit, (str(log),))
    assert caught.value.exitcode == 0 and ran(log) == (DONE, [])
    assert "raise an exception instead" in str(caught.value)
    assert pool.apply(work.square, (3,)) == 9


def test_terminate(make_pool, log):
    """A terminated worker runs no callbacks, as in the standard library."""
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


@pytest.mark.parametrize("method", ["fork", *also("None")])
def test_callbacks_of_the_program(tmp_path, log, method):
    """Callbacks of the program run at the end of the program, not of a worker."""
    scripts.program(tmp_path, INHERITED, str(log), method)
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


@pytest.mark.parametrize(
    ("what", "method"),
    [
        *(("finalizer", None), ("thread", "fork"), ("callback in C", None)),
        *also(("finalizer", "fork"), ("thread", None), ("callback in C", "fork")),
    ],
)
def test_an_end_that_hangs(make_pool, capfd, what, method):
    """A worker whose end hangs is killed and prints its stack, and `join` returns."""
    pool = make_pool(Pool, 1, hang, (what, 0.3), context=method)
    pool.apply(work.square, (3,))
    pool.close()
    pool.join()
    stacks = capfd.readouterr().err
    assert '/exits.py", line' in stacks


FORGETS = """
    import multiprocessing
    import warnings
    from multiprocessing import process
    import xpool

    warnings.filterwarnings("ignore", "Workers do not see .* '_children'")
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
    assert scripts.program(tmp_path, FORGETS) == ""


class Entered:
    """A context that logs what happens around the tasks of its worker."""

    def __init__(self, log, fails=""):
        self.log, self.fails = str(log), fails

    def line(self, text):
        work.log_line(self.log, f"{text}:{current_worker().index}")
        if text == self.fails:
            raise RuntimeError(f"{text} fails")

    def enter(self):
        self.line("enter")

    def exit(self):
        self.line("exit")


def initialize(log):
    """Initializer: log, also at the worker's end."""
    current_worker().context.line("initializer")
    if threading.current_thread() is threading.main_thread():
        atexit.register(work.log_line, log, "atexit")


def task(context, x):
    context.line("task")
    return x


@pytest.mark.parametrize("method", [None, *also("spawn", "fork")])
def test_exit_of_a_context(make_pool, log, method):
    """A context's `exit()` is called in its worker, after the last task and what the initializer
    has registered."""
    contexts = [Entered(log)]
    pool = make_pool(CtxPool, None, initialize, (str(log),), context=method,
                     worker_contexts=contexts)  # fmt: skip
    assert pool.map(task, range(2), chunksize=1) == [0, 1]
    pool.close()
    pool.join()
    expected = "enter:0 initializer:0 task:0 task:0 atexit exit:0"
    assert log.read_text().split() == expected.split()


@pytest.mark.parametrize("kind", ["CtxPool", "CtxThreadPool"])
def test_exit_before_the_replacement_enters(make_pool, log, kind):
    """With `maxtasksperchild`, `exit()` is called before the next worker's `enter()`."""
    pool = make_pool(getattr(xpool, kind), worker_contexts=[Entered(log)], maxtasksperchild=2)
    assert pool.map(task, range(4), chunksize=1) == [0, 1, 2, 3]
    pool.close()
    pool.join()
    life = ["enter:0", "task:0", "task:0", "exit:0"]
    lines = log.read_text().split()
    assert lines[:8] == life * 2 and lines[8:] in ([], ["enter:0", "exit:0"])


@pytest.mark.parametrize("kind", ["CtxPool", "CtxThreadPool"])
@pytest.mark.parametrize("fails", ["enter", "initializer", "exit"])
def test_exit_after_a_failure(make_pool, log, kind, fails, capfd, monkeypatch):
    """`exit()` is called if `enter()` has returned, also if the initializer fails. Its own error
    is printed."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    context = Entered(log, fails)
    pool = make_pool(getattr(xpool, kind), None, initialize, (str(log),), worker_contexts=[context])
    if fails == "exit":
        assert pool.map(task, range(2), chunksize=1) == [0, 1]
        pool.close()
        pool.join()
        assert log.read_text().split()[-1] == "exit:0"
        assert "RuntimeError: exit fails" in capfd.readouterr().err
        return
    with pytest.raises((xpool.WorkerStartFailed, xpool.PoolClosed)):
        pool.map(task, range(2))
    pool.join()
    lines = log.read_text().split()
    assert lines.count("enter:0") == 3
    assert lines.count("exit:0") == (3 if fails == "initializer" else 0)


@pytest.mark.parametrize("how", ["SIGKILL", "sys.exit"])
def test_exit_of_a_worker_that_dies(make_pool, log, how):
    """`exit()` is not called in a worker that is killed; it is called after `sys.exit`."""
    pool = make_pool(CtxPool, worker_contexts=[Entered(log)])
    with pytest.raises(WorkerDied):
        pool.apply(lambda context: work.end(how))
    pool.terminate()
    assert log.read_text().split().count("exit:0") == (how == "sys.exit")


def test_exit_in_a_thread(make_pool):
    """In a pool of threads, `exit()` is called in the thread of `enter()`. A context needs no
    `enter()`."""

    class Leaves:
        def exit(self):
            ended.append((self, threading.get_ident()))

    class Where(Leaves):
        def enter(self):
            self.entered = threading.get_ident()

    ended: list[tuple[Any, int]] = []
    contexts = [Where(), Where(), Leaves()]
    pool = make_pool(xpool.CtxThreadPool, worker_contexts=contexts)
    pool.map(lambda context, x: x, range(10))
    pool.close()
    pool.join()
    assert {id(context) for context, _ in ended} == set(map(id, contexts))
    assert all(getattr(context, "entered", thread) == thread for context, thread in ended)


def test_exit_of_an_abandoned_thread(make_pool, log):
    """`exit()` is not called in a thread that was abandoned, since another one has its context."""
    over = threading.Event()
    done = threading.Event()

    def wait(context):
        over.wait(WAIT)
        done.set()

    pool = make_pool(xpool.CtxThreadPool, worker_contexts=[Entered(log)])
    with pytest.raises(xpool.TaskTimeout):
        pool.apply(wait, timeout=0.05)
    assert pool.apply(task, (1,)) == 1
    over.set()
    assert done.wait(WAIT)
    pool.close()
    pool.join()
    assert log.read_text().split().count("exit:0") == 1
