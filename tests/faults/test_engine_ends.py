"""Whatever ends an engine's thread, its pool fails with the reason, and nothing waits for it."""

import os
import select
import time

import pytest
from support import scripts
from support.limits import WAIT
from support.tiers import also
from support.waiting import wait_gone

from xpool import InternalError, Pool, PoolBroken, PoolClosed
from xpool._engine import monitor
from xpool._engine.reactor import Reactor
from xpool._engine.replacement import Replacement
from xpool._wire import wire
from xpool._wire.wire import Spin

pytestmark = pytest.mark.xpool_only


WAYS = ("poll", "handle", "run_timers")
OTHERS = (SystemExit, MemoryError, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("where", "error", "again"),
    [
        *((where, OSError, False) for where in WAYS),
        ("handle", OSError, True),
        *also(*((where, error, False) for where in WAYS for error in OTHERS)),
    ],
)
def test_the_thread_can_do_nothing_any_more(make_pool, monkeypatch, where, error, again):
    """The reason fails all calls, the workers end, and `join` returns, also if the error comes
    again when the workers should be stopped."""
    pool = make_pool(Pool, 2)
    pids = pool.run_all(os.getpid)

    def fail(*args):
        raise error("the reason")

    with monkeypatch.context() as patch:
        patch.setattr(Reactor, where, fail)
        if again:
            patch.setattr(Replacement, "terminate", fail)
        waiting = pool.apply_async(time.sleep, (1e4,))
        pool._engine.wake()
        with pytest.raises(InternalError, match="the reason"):
            waiting.get(WAIT)
        pool.join(WAIT)
    assert wait_gone(pids) == []
    with pytest.raises(PoolClosed, match="the reason"):
        pool.apply(abs, (-1,))


def test_callers_when_the_thread_ends_without_descriptors(make_pool, monkeypatch):
    """All get the reason, also if the program has closed all descriptors of the pool."""
    pool = make_pool(Pool, 2)
    pids = pool.run_all(os.getpid)

    def closed(*args):
        raise OSError("closed")

    def fail(*args):
        patch.setattr(Reactor, "wake", closed)
        closed()

    with monkeypatch.context() as patch:
        patch.setattr(Reactor, "poll", fail)
        waiting = [pool.apply_async(time.sleep, (1e4,)) for _ in range(3)]
        pool._engine.wake()
        for one in waiting:
            with pytest.raises(InternalError, match="closed"):
                one.get(WAIT)
        assert pool._life.finished.wait(WAIT)
    pool.join(WAIT)
    assert wait_gone(pids) == []


def test_a_caller_that_receives_its_answer_when_the_thread_ends(make_pool, monkeypatch):
    """It gets the reason, also if the workers could not be stopped, and were killed unseen."""
    pool = make_pool(Pool, 1)
    pool.run_all(os.getpid)
    waiting = pool.apply_async(time.sleep, (1e4,))
    worker = pool._engine.workers[0]

    def fail(*args):
        raise KeyboardInterrupt("the reason")

    def look(self, poll):
        with monkeypatch.context() as patch:
            patch.setattr(Reactor, "handle", fail)
            patch.setattr(Replacement, "terminate", fail)
            pool._engine.wake()
            pool._life.finished.wait(WAIT)
        return [(worker.reader.fd, select.POLLIN)]

    monkeypatch.setattr(Spin, "look", look)
    with pytest.raises(InternalError, match="the reason"):
        waiting.get(WAIT)
    pool.join(WAIT)


LIMITED = """
    import socket
    socket.setdefaulttimeout({limit})
    import numpy
    import xpool
    from multiprocessing.shared_memory import SharedMemory
    from xpool.queue import SimpleQueue

    def meet(i):
        here = xpool.current_worker()
        here.send(1 - i, i)
        return here.recv(1 - i, timeout=60)

    def register(x):
        memory = SharedMemory(create=True, size=8)
        memory.close()
        memory.unlink()

    def begin(queue):
        global mine
        mine = queue

    def put_later(x):
        mine.put(x)

    if __name__ == "__main__":
        assert socket.getdefaulttimeout() == {limit}
        for more in {{}}, {{"context": "spawn"}}, {{"context": "fork"}}:
            with xpool.Pool(2, maxtasksperchild=8, **more) as pool:
                assert pool.map(abs, range(20), 1) == list(range(20))
                assert pool.apply(numpy.ones, (100_000,)).sum() == 100_000
                pool.apply(register, (0,))
        with xpool.P2PPool(2) as pool:
            calls = [pool.apply_async(meet, (i,), worker=i) for i in range(2)]
            assert [call.get(60) for call in calls] == [1, 0]
        queue = SimpleQueue()
        with xpool.Pool(1, begin, (queue,)) as pool:
            call = pool.apply_async(put_later, (3,))
            assert queue.get() == 3
            call.get(60)
        with xpool.Executor(1) as executor:
            assert executor.submit(abs, -1).result(60) == 1
        assert xpool.spawn(abs, nprocs=2) == [0, 1]
        print("done")
"""


@pytest.mark.parametrize("limit", [0.01, *also(0, 5)])
def test_a_default_time_limit_of_sockets(tmp_path, limit):
    """`socket.setdefaulttimeout` changes nothing: each socket of xpool has its own time limit."""
    pytest.importorskip("numpy", reason="the script sends arrays")
    text = LIMITED.format(limit=limit)
    assert scripts.program(tmp_path, text) == "done\n"


@pytest.mark.parametrize("call", ["apply", "apply_async", "map"])
def test_no_memory_for_a_task_that_is_sent(make_pool, monkeypatch, call):
    """The caller gets the error. The pool, which has entered the task, stops with the reason."""
    pool = make_pool(Pool, 1)
    assert pool.apply(abs, (-1,)) == 1
    real, left = wire.tasks_frame, [1]

    def short(*args):
        if left:
            left.pop()
            raise MemoryError("no frame")
        return real(*args)

    monkeypatch.setattr(monitor, "tasks_frame", short)
    with pytest.raises(MemoryError, match="no frame"):
        if call == "apply":
            pool.apply(abs, (-2,))
        elif call == "apply_async":
            pool.apply_async(abs, (-2,)).get(WAIT)
        else:
            pool.map_async(abs, [-2]).get(WAIT)
    assert not left
    with pytest.raises((PoolBroken, PoolClosed), match="no frame"):
        pool.apply_async(abs, (-3,)).get(WAIT)
    pool.join(WAIT)
