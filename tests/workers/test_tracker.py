"""A block of shared memory is unlinked by its maker, not by a worker that attaches to it."""

import os
from multiprocessing import resource_tracker, shared_memory

import pytest
from support import scripts
from support.tiers import also

from xpool import Pool, WorkerDied


def attach(name):
    """Attach to a block by its name. Return its first byte."""
    block = shared_memory.SharedMemory(name)
    first = block.buf[0]
    block.close()
    return first


def make(_=None):
    """Make a block for the caller. Return its name."""
    block = shared_memory.SharedMemory(create=True, size=100)
    block.buf[0] = 7
    block.close()
    return block.name


def attach_in_child(name):
    """Attach in a forked process. Return its exit status."""
    pid = os.fork()
    if pid == 0:
        os._exit(attach(name) != 7)
    return os.waitpid(pid, 0)[1]


TASKS = """
    import sys
    from multiprocessing import resource_tracker, shared_memory
    import xpool
    from support import leaks
    from workers.test_tracker import attach, attach_in_child, make

    def trackers():
        return [pid for pid in leaks.servers() if "resource_tracker" in leaks.command(pid)]

    if __name__ == "__main__":
        how, method = sys.argv[1], None if sys.argv[2] == "None" else sys.argv[2]
        # From Python 3.14 on, os.fork in a child of multiprocessing has no tracker.
        may_fork = method != "spawn" or not hasattr(resource_tracker, "_fork_intent")
        if how == "before":
            block = shared_memory.SharedMemory(create=True, size=100)
        pool = xpool.Pool(2, context=method)
        pool.apply(len, ("",))
        if method is None and how != "before":
            assert not trackers()
        if how == "worker":
            block = shared_memory.SharedMemory(pool.apply(make))
        elif how != "before":
            block = shared_memory.SharedMemory(create=True, size=100)
        block.buf[0] = 7
        assert pool.map(attach, [block.name] * 4, 1) == [7] * 4
        assert not may_fork or pool.map(attach_in_child, [block.name] * 4, 1) == [0] * 4
        pool.close()
        pool.join()
        assert len(trackers()) == 1
        assert attach(block.name) == 7
        block.close()
        block.unlink()
"""


HOW = ["before", "after", "worker"]


@pytest.mark.parametrize(
    ("how", "method"),
    [
        *((how, None) for how in HOW),
        ("after", "spawn"),
        *also(*((how, "spawn") for how in HOW if how != "after")),
        *also(*((how, "forkserver") for how in HOW)),
    ],
)
@pytest.mark.xpool_only
def test_a_block_outlives_the_workers(tmp_path, how, method):
    """A block made before the pool, after it or by a worker stays until it is unlinked, also if
    children of workers attach to it. There is no warning, and the program has one resource tracker
    once it needs one."""
    assert scripts.program(tmp_path, TASKS, how, str(method)) == ""


FORKS = """
    import os, sys
    from xpool import Pool

    def fork_and_wait(_):
        before = "multiprocessing.resource_tracker" in sys.modules
        child = os.fork()
        if not child:
            os._exit(0)
        return before, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    if __name__ == "__main__":
        with Pool(1) as pool:
            print(pool.map(fork_and_wait, range(2)))
"""


@pytest.mark.xpool_only
def test_a_task_forks_before_anything_is_tracked(tmp_path):
    """A task may fork before its worker has imported the resource tracker."""
    assert scripts.program(tmp_path, FORKS) == "[(False, 0), (True, 0)]\n"


@pytest.mark.xpool_only
def test_a_worker_is_killed_while_it_asks(make_pool):
    """If a worker dies after it has asked for the tracker, other workers still use it."""
    pool = make_pool(Pool, 2)
    for _ in range(5):
        with pytest.raises(WorkerDied) as caught:
            pool.apply(ask_and_die)
        assert caught.value.signal == "SIGKILL"
    block = shared_memory.SharedMemory(create=True, size=100)
    try:
        assert pool.map(attach, [block.name] * 4, 1) == [0] * 4
    finally:
        block.close()
        block.unlink()


def ask_and_die():
    """Ask for the tracker, and end before the answer."""
    import signal

    os.write(resource_tracker._resource_tracker._parent, b"T")  # type: ignore[attr-defined]
    os.kill(os.getpid(), signal.SIGKILL)
