"""Pools of threads without an engine's thread: who does its work, and when it starts."""

from __future__ import annotations

import gc
import threading
from queue import SimpleQueue
from typing import Any

import pytest
from support.limits import WAIT
from support.waiting import eventually

from xpool import ThreadPool
from xpool.errors import PoolBroken, TaskCancelled, TaskTimeout

pytestmark = pytest.mark.xpool_only


def threads_of(pool: Any) -> list[str]:
    """Return the kinds of the pool's threads."""
    start = f"{pool.name}-"
    names = [one.name for one in threading.enumerate() if one.name.startswith(start)]
    return sorted(name.removeprefix(start) for name in names)


def test_a_plain_pool_has_only_its_workers() -> None:
    """Calls, maps and streams without options start no other thread, and the pool ends."""
    pool = ThreadPool(2)
    assert pool.apply(abs, (-1,)) == 1
    assert pool.map(abs, [-1, -2], 1) == [1, 2]
    assert list(pool.imap(abs, range(10))) == list(range(10))
    assert threads_of(pool) == ["worker-0", "worker-1"]
    pool.close()
    pool.join()
    assert threads_of(pool) == []


def test_close_waits_for_unanswered_calls() -> None:
    """The thread that answers the last call of a closed pool lets the others end."""
    go_on = threading.Event()
    pool = ThreadPool(3)
    results = [pool.apply_async(go_on.wait) for _ in range(5)]
    pool.close()
    go_on.set()
    pool.join()
    assert [one.get() for one in results] == [True] * 5
    assert threads_of(pool) == []


def test_close_waits_for_a_stream() -> None:
    """The same if the last answer is that of a stream whose input is still drawn."""
    items: SimpleQueue[int | None] = SimpleQueue()
    pool = ThreadPool(2)
    results = pool.imap(abs, iter(items.get, None))
    pool.close()
    for n in range(5):
        items.put(n)
    items.put(None)
    pool.join()
    assert list(results) == list(range(5))


def test_terminate_while_tasks_run() -> None:
    """The last thread ends the pool when its task has ended."""
    go_on, begun = threading.Event(), threading.Barrier(3)

    def task() -> None:
        begun.wait()
        go_on.wait()

    with ThreadPool(2) as pool:
        for _ in range(2):
            pool.apply_async(task)
        begun.wait()
    assert not pool._life.finished.is_set()
    go_on.set()
    pool.join()
    assert threads_of(pool) == []


@pytest.mark.filterwarnings("ignore:unclosed running")
def test_a_dropped_pool_ends() -> None:
    """The threads of a dropped pool end, and its last one cleans up."""
    pool = ThreadPool(2)
    pool.map(abs, range(4))
    life, name = pool._life, pool.name
    del pool
    gc.collect()
    eventually(life.finished.is_set, "the pool has ended")
    eventually(
        lambda: not any(one.name.startswith(f"{name}-") for one in threading.enumerate()),
        "its threads have ended",
    )


def test_options_start_the_engines_thread() -> None:
    """The first task with a time limit starts it, and later ones find it."""
    go_on = threading.Event()
    with ThreadPool(2) as pool:
        assert "engine" not in threads_of(pool)
        for _ in range(2):
            with pytest.raises(TaskTimeout):
                pool.apply(go_on.wait, timeout=0.01)
        assert threads_of(pool).count("engine") == 1
        assert pool.apply(abs, (-1,)) == 1
        go_on.set()


def test_cancelling_a_running_task_starts_it() -> None:
    """The engine's thread also watches over the replacement of a thread."""
    go_on, begun = threading.Event(), threading.Event()

    def task() -> None:
        begun.set()
        go_on.wait()

    with ThreadPool(1) as pool:
        result = pool.apply_async(task)
        assert begun.wait(WAIT)
        assert result.cancel()
        assert pool.apply(abs, (-1,)) == 1
        with pytest.raises(TaskCancelled):
            result.get()
        go_on.set()


@pytest.mark.parametrize("options", [{"initializer": abs, "initargs": (1,)}])
def test_a_pool_with_an_initializer_has_it(options: dict[str, Any]) -> None:
    """An initializer may fail or hang, which the engine's thread handles."""
    with ThreadPool(1, **options) as pool:
        assert "engine" in threads_of(pool)


def test_an_error_in_the_bookkeeping_ends_the_pool() -> None:
    """A worker's thread takes the turn that fails a pool which cannot continue."""
    with ThreadPool(2) as pool:
        go_on = threading.Event()
        result = pool.apply_async(go_on.wait)
        pool._jobs.bookkeeping_error = RuntimeError("in the middle")
        pool._jobs.wake()
        with pytest.raises(PoolBroken, match="in the middle"):
            result.get(WAIT)
        go_on.set()
        pool.join()


def test_a_refused_thread_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses the successor of a thread, that thread becomes the engine's."""
    start, refused = threading.Thread.start, []

    def refuse(self: threading.Thread) -> None:
        if "-worker-" in self.name and len(refused) < 2:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    with ThreadPool(1, maxtasksperchild=1) as pool:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        assert [pool.apply(abs, (-n,)) for n in range(4)] == list(range(4))
        assert len(refused) == 2
