"""`create_group`: workers communicate, fail together, and form a new group."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import time
from typing import Any

import pytest

pytest.importorskip("torch", reason="groups are torch's")

import torch
import torch.distributed as dist
from support import work
from support.tiers import also

from xpool import CtxPool, OptionError, P2PPool, PeerLost, Pool, WorkerDied, current_worker
from xpool.distributed import get_world

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]

TIMEOUT = 3600  # seconds: above the time limit of a test, so no operation reaches it


def total(value: float = 1.0) -> float:
    world = get_world()
    assert world is not None
    tensor = torch.tensor([value * (world.rank + 1)])
    world.group.all_reduce(tensor)
    return tensor.item()


def total_by_torch(*_: Any) -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def fails(how: str, by_torch: bool) -> Any:
    """Fail in worker 1. The others wait for it in an operation."""
    if current_worker().index == 1:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("of worker 1")
    return total_by_torch() if by_torch else total()


@pytest.mark.parametrize("kind", [Pool, *also(P2PPool)])
def test_all_reduce(make_pool, kind):
    """Worker i is rank i. Functions of torch use the same group."""
    pool = make_pool(kind, 3)
    group = pool.create_group(timeout=TIMEOUT)
    assert pool.run_all(total, 2.0) == [12.0] * 3
    assert pool.run_all(total_by_torch) == [6.0] * 3
    assert pool.run_all(lambda: dist.get_rank()) == [0, 1, 2]
    assert group.generation == 1
    assert not group.broken
    assert "gloo" in repr(group)


def test_context_pools(make_pool):
    """The context is still the first argument."""
    pool = make_pool(CtxPool, worker_contexts=["a", "b"])
    pool.create_group(timeout=TIMEOUT)
    assert pool.run_all(lambda context, x: (context, total(x)), 1.0) == [("a", 3.0), ("b", 3.0)]


@pytest.mark.parametrize(
    ("how", "by_torch"),
    [("die", False), ("raise", True), *also(("die", True), ("raise", False))],
)
def test_a_failure_ends_pending_operations(make_pool, how, by_torch):
    """If a worker fails, `run_all` raises its error at once. The others form a new group."""
    pool = make_pool(P2PPool, 4)
    group = pool.create_group(timeout=TIMEOUT)
    for turn in range(1, 4):
        pids = pool.run_all(work.pid)
        if how == "die":
            with pytest.raises(WorkerDied) as caught:
                pool.run_all(fails, how, by_torch)
            assert caught.value.worker == 1
        else:
            with pytest.raises(KeyError, match="of worker 1"):
                pool.run_all(fails, how, by_torch)
        assert group.broken
        assert group.generation == turn
        assert pool.run_all(total) == [10.0] * 4
        assert group.generation == turn + 1
        assert not group.broken
        after = pool.run_all(work.pid)
        if not by_torch:  # otherwise a worker may be killed in torch's code
            assert [pids[i] == after[i] for i in (0, 2, 3)] == [True] * 3


_held: list[Any] = []


def hold_the_store() -> None:
    """Keep the store of this generation alive."""
    world = get_world()
    assert world is not None
    _held.append(world._store)


def drop_the_store() -> int:
    _held.clear()
    return os.getpid()


@pytest.mark.parametrize("again", ["after a failure", "by another call"])
def test_the_file_of_an_earlier_store_stays_open(make_pool, again):
    """torch opens a store's file by its path once more when a member drops the store. The
    descriptor in this path belongs to nothing else by then: torch would write into another file, or
    abort at a socket."""
    pool = make_pool(P2PPool, 2)
    pool.create_group(timeout=TIMEOUT)
    pool.run_all(hold_the_store)
    if again == "after a failure":
        with pytest.raises(KeyError):
            pool.run_all(fails, "raise", False)
    else:
        pool.create_group(timeout=TIMEOUT)
    assert pool.run_all(total) == [3.0] * 2
    gc.collect()
    pids = pool.run_all(work.pid)
    with contextlib.ExitStack() as sockets:
        for _ in range(8):  # these take the numbers that are free
            for one in socket.socketpair():
                sockets.enter_context(one)
        assert pool.run_all(drop_the_store) == pids
        assert pool.run_all(work.pid) == pids


class PickledLate(KeyError):
    """An error whose pickling takes longer than the others need to notice the failure."""

    def __reduce__(self) -> Any:
        time.sleep(1.5)  # like a large error or a slow worker
        return super().__reduce__()


def fails_late() -> Any:
    if current_worker().index == 1:
        raise PickledLate("of worker 1")
    return total()


def test_the_cause_comes_last(make_pool):
    """`run_all` raises the error that came first, even if a `PeerLost` arrives earlier."""
    pool = make_pool(P2PPool, 3)
    pool.create_group(timeout=TIMEOUT)
    with pytest.raises(PickledLate, match="of worker 1"):
        pool.run_all(fails_late)
    assert pool.run_all(total) == [6.0] * 3


def test_a_death_between_calls(make_pool):
    """After a death between calls, the next call has a complete group."""
    pool = make_pool(P2PPool, 3)
    group = pool.create_group(timeout=TIMEOUT)
    os.kill(pool.run_all(work.pid)[2], signal.SIGKILL)
    try:
        assert pool.run_all(total) == [6.0] * 3
    except (WorkerDied, PeerLost) as exc:  # the call began before the death was noticed
        assert re.search("[Ww]orker.2", str(exc))
    assert pool.run_all(total) == [6.0] * 3
    assert group.generation >= 2


def test_rebuild_and_create_again(make_pool):
    """`rebuild` and a second `create_group` make a new group."""
    pool = make_pool(Pool, 2)
    group = pool.create_group(timeout=TIMEOUT)
    group.rebuild()
    assert group.generation == 2
    assert pool.run_all(total) == [3.0, 3.0]
    second = pool.create_group("gloo", timeout=TIMEOUT)
    assert second.generation == 3
    assert pool.run_all(total) == [3.0, 3.0]


def test_a_timeout_breaks_it(make_pool):
    """If members do not take part in time, the call fails. The next call works."""
    from xpool import TaskTimeout

    pool = make_pool(Pool, 2)
    pool.create_group(timeout=TIMEOUT)
    with pytest.raises(TaskTimeout):
        pool.run_all(one_does_not_come, timeout=1.0)
    assert pool.run_all(total) == [3.0, 3.0]


def one_does_not_come() -> None:
    if current_worker().index == 0:
        work.sleep_long()
    total()


def test_refused(make_pool):
    """The error of an invalid argument names it."""
    pool = make_pool(Pool, 2)
    with pytest.raises(OptionError, match="gloo"):
        pool.create_group("mpi")
    with pytest.raises(OptionError, match=r"devices\('cuda'\)"):
        pool.create_group("nccl")
    with pytest.raises(OptionError, match="replica group"):
        pool.create_group("xla")
    with pytest.raises(OptionError, match="timeout"):
        pool.create_group(timeout=0)
    assert pool.run_all(work.pid)
