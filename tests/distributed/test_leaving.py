"""A rank that leaves right after something that all did together fails nobody else's part of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("torch", reason="xpool.distributed stands on torch.distributed")

import torch
from support.ranks import Ranks
from torch.distributed import rpc
from torch.futures import Future

from xpool.distributed import PeerLost, World
from xpool.distributed.peers import LEFT, Meetings

pytestmark = [pytest.mark.torch, pytest.mark.xpool_only]

SECONDS = 20.0
TIMEOUT = 600
came = threading.Semaphore(0)  # in rank 0: how many of the others are ready


def come() -> None:
    came.release()


def part_of(rank: int, address: str, body: Any) -> Any:
    """Be a rank of three that leaves without waiting for the others."""
    options = {"dist_init_method": address, "dist_timeout": TIMEOUT, "rpc_timeout": TIMEOUT}
    world = World(f"w{rank}", rank, 3, **options)
    try:
        return body(world)
    finally:
        if world.started:
            world.stop(graceful=False)


def gathers(world: World) -> list[float]:
    """Rank 0 has done its part of the first gather before rank 1 begins with it."""
    group = world.create_collective_group([0, 1, 2], timeout=TIMEOUT)
    group.barrier()
    mine, outputs = torch.full((1,), float(world.rank)), [torch.zeros(1) for _ in range(3)]
    if world.rank == 0:
        group.gather(mine, None, 2)
        return []
    pending = group.gather(mine, outputs, 2, async_op=True) if world.rank == 2 else None
    assert world.peers.wait_lost(["w0"], SECONDS) == ["w0"]
    if pending is None:
        group.gather(mine, None, 2)
    else:
        pending.wait()
    with pytest.raises(PeerLost, match="has left the world"):
        group.barrier()
    return [output.item() for output in outputs]


def test_leaving_after_a_collective(ranks: Ranks):
    """What a rank had done its part of goes on without it; what comes next raises `PeerLost`."""
    outcomes = ranks.run(3, part_of, ranks.address(), gathers)
    assert outcomes == [[], [0, 0, 0], [0, 1, 2]], outcomes


def hears_first(world: World) -> str:
    """The news that rank 0 leaves comes before what it sent for the barrier."""
    group = world.create_collective_group([0, 1, 2], timeout=TIMEOUT)
    group.barrier()
    if world.rank != 0:
        pending = group.barrier(async_op=True)
        after = group.irecv(torch.ones(1), 3 - world.rank)
        world.peers.lose("w0", LEFT, {group.key: 2})
        rpc.rpc_sync("w0", come)  # by torch: a group calls nobody who is known to have left
        pending.wait()
        with pytest.raises(PeerLost, match="'w0' has left the world"):
            after.wait()  # the connections are closed when the barrier is over
        return "went on"
    assert all(came.acquire(timeout=SECONDS) for _ in (1, 2))
    group.barrier()
    return "left"


def test_news_before_the_barrier_ends(ranks: Ranks):
    """A barrier under way is not cut short by the news of who has completed it and leaves."""
    assert ranks.run(3, part_of, ranks.address(), hears_first) == ["left", "went on", "went on"]


def barrier_without_answer(world: World) -> str:
    """The host of the barrier leaves, and its answers are lost with its connections."""
    group = world.create_rpc_group("group", world.get_members())
    if world.rank == 0:
        before = Meetings.arrive

        def arrive(self: Meetings, key: Any, name: str, *rest: Any) -> Future[Any]:
            future = before(self, key, name, *rest)
            return future if name == "w0" else Future()  # is never answered

        Meetings.arrive = arrive
        try:
            group.barrier()
            world.stop(graceful=False)
        finally:
            Meetings.arrive = before
        return "left"
    group.barrier()
    with pytest.raises(PeerLost, match="'w0' has left the world"):
        group.barrier()
    return "went on"


def test_answers_lost_with_the_host(ranks: Ranks):
    """A member whose answer was lost has it from the farewell of the process that leaves."""
    outcomes = ranks.run(3, part_of, ranks.address(), barrier_without_answer)
    assert outcomes == ["left", "went on", "went on"], outcomes


def kept_answers(world: World) -> int:
    group = world.create_rpc_group("group", world.get_members())
    for _ in range(50):
        group.barrier()
    return sum(len(world.meetings.answers(name)) for name in world.names)


def test_answers_are_not_kept_for_ever(ranks: Ranks):
    """A host keeps an answer until its receiver comes to the next meeting."""
    # Of the last barrier alone, and of those who have not come to the end of the world yet.
    host, *others = ranks.good_world(3, kept_answers)
    assert 1 <= host <= 3
    assert others == [0, 0]


def test_many_leave_after_a_barrier(ranks: Ranks):
    """Whoever leaves first after a barrier of either kind, nobody's barrier fails."""
    for _ in range(5):
        assert ranks.run(3, part_of, ranks.address(), both_barriers) == [None] * 3


def both_barriers(world: World) -> None:
    collective = world.create_collective_group([0, 1, 2], timeout=TIMEOUT)
    group = world.create_rpc_group("group", world.get_members())
    collective.barrier()
    group.barrier()
